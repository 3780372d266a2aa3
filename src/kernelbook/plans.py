"""Choosing a kernel's configuration: the resource model that rules ask, and plans that were tuned.

A room decides in functions of its ``kernels.py`` how a problem is cut: tiles, warps, stages, strategy. Each is a rule, a few
lines with a reason, and :func:`planner` makes a plan of it: what was tuned for this very problem on this GPU comes first.

1. The user's own plans, which ``python -m kernelbook tune`` found on this machine: ``<cache>/tuned/<gpu>.json``.
2. The plans that come with the package: ``kernelbook/tuned/<gpu>.json``.
3. The rule.

``KERNELBOOK_PLANS=shipped`` leaves out the first, ``KERNELBOOK_PLANS=rules`` the first two. Nothing is ever timed by a call.
A stored plan is taken only if it has the form of the rule's plan and the room allows it for the problem and the GPU, so that
an old or edited file can cost speed, and nothing else; what is not taken is warned of.
"""

import dataclasses
import functools
import inspect
import json
import math
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
import triton

__all__ = [
    "MAX_REGISTERS",
    "KeptPlans",
    "Planner",
    "Resources",
    "as_json",
    "bucket",
    "derived",
    "fits",
    "matmul_resources",
    "own_plans",
    "planner",
    "planners",
    "read_plans",
    "shipped_plans",
    "stored_plans",
    "tensor_core",
    "tile_resources",
]

MAX_REGISTERS = 255  # per thread, on every NVIDIA GPU of the last ten years
# Registers that pointers, masks, loop counters and temporaries take beside the tiles: what the compiled kernels of this
# book show, rounded down so that a kernel that spills a few bytes is still tried.
BOOKKEEPING_REGISTERS = 70

# What matmul_resources counts beside the tiles. Fitted to what the compiler reports for sm_90 (Triton 3.6 and 3.7), over
# the configurations of tests/test_plans.py and of the chapter "Choosing tiles", which draws how far off they are.
LOOP_REGISTERS = {"wgmma": 20, "mma.sync": 28, "fma": 28}  # counters, masks, the pipeline's state
COPY_REGISTERS = (
    3  # a load that a thread does in each step: its 64-bit address, and its mask or its place in shared memory
)
PASSING_REGISTERS = 1  # 16 bytes of operands in a step: mma.sync takes them from registers, a few at a time
DESCRIPTOR_REGISTERS = 28  # the whole loop where tensor descriptors load: there are no addresses
FMA_REGISTERS = (
    0.65  # 16 bits of operands that a thread multiplies in a step of fma; fitted for sm_75. It streams wider ones
)
STAGING_BYTES = 128  # a thread: at most so much shared memory turns the result around before it is stored
BARRIER_BYTES = 8  # a stage and operand, where tensor descriptors load


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a program needs: bytes of shared memory, and 32-bit registers in each thread."""

    shared_bytes: int
    registers_per_thread: float


def tile_resources(
    config: triton.Config,
    *,
    staged: Sequence[tuple[int, int]] = (),
    held: Sequence[tuple[int, int]] = (),
    scratch_bytes: int = 0,
    warp_size: int = 32,
) -> Resources:
    """The resource model.

    Args:
        config: its ``num_warps`` and ``num_stages`` enter.
        staged: (elements, bytes an element) of each tile that the software pipeline keeps in shared memory; there are
            ``num_stages`` copies of it.
        held: (elements, bytes an element) of each tile that lives in registers at the same time. It is spread over all
            threads of the program: elements / (32 x num_warps) in each, not elements / 32.
        scratch_bytes: shared memory beside the pipeline, for reductions and layout changes.
    """
    threads = warp_size * config.num_warps
    shared = sum(elements * size for elements, size in staged) * max(config.num_stages, 1) + scratch_bytes
    registers = sum(elements * size / 4 for elements, size in held) / threads
    return Resources(shared, BOOKKEEPING_REGISTERS + registers)


def tensor_core(rows: int, num_warps: int, properties: runtime.DeviceProperties) -> str:
    """The instruction that ``tl.dot`` becomes: ``wgmma`` (operands read from shared memory), ``mma.sync`` or, before Ampere, ``fma``.

    Four warps together multiply at least 64 rows, on Hopper and later (where Blackwell's ``tcgen05`` takes its place).
    """
    if not properties.has_tensor_cores:
        return "fma"
    wgmma = properties.has_wgmma or properties.is_interpreter  # which has a Hopper GPU's limits
    return "wgmma" if wgmma and rows % 64 == 0 and num_warps % 4 == 0 else "mma.sync"


def matmul_resources(
    config: triton.Config,
    *,
    rows: int,
    operands: Sequence[tuple[int, int]],
    accumulators: Sequence[tuple[int, int]],
    held: Sequence[tuple[int, int]] = (),
    out_itemsize: int = 2,
    copy_bytes: int = 16,
    descriptors: bool | Sequence[bool] = False,
    scratch_bytes: int = 0,
    properties: runtime.DeviceProperties | None = None,
) -> Resources:
    """The resource model of a loop over matrix products, as ``tl.dot(a, b, acc)`` on tiles that were just loaded.

    Args:
        config: its ``num_warps`` and ``num_stages`` enter.
        rows: of the result's tile; they decide between ``wgmma`` and ``mma.sync``.
        operands: (elements, bytes an element) of each tile that a step of the loop loads for a product.
        accumulators: (elements, bytes an element) of each tile that the loop adds to.
        held: (elements, bytes an element) of each other tile that stays in registers through the loop.
        out_itemsize: bytes an element of the result as it is stored.
        copy_bytes: how wide one thread's loads are: 16 where rows begin on multiples of 16 bytes; the element's size where
            the compiler cannot know.
        descriptors: whether tensor descriptors load the operands; one for all, or one for each.
        scratch_bytes: shared memory beside the loop's buffers, for tiles of a product before or after it.
        properties: the GPU (default: the current one).

    Not counted: row and column indices that are carried through the loop, and what a kernel computes besides.
    """
    properties = properties or runtime.properties()
    threads = properties.warp_size * config.num_warps
    core = tensor_core(rows, config.num_warps, properties)
    tiles = [elements * size for elements, size in operands]
    each = [descriptors] * len(tiles) if isinstance(descriptors, bool) else descriptors

    # mma.sync has its operands in registers when the next copy starts; wgmma
    # still reads shared memory then, which takes one buffer more.
    buffers = max(config.num_stages - (core == "mma.sync"), 1)
    staged, passing, loaded = float(scratch_bytes), 0.0, 0
    for size, by_descriptor in zip(tiles, each, strict=True):
        # An asynchronous copy takes 4, 8 or 16 bytes. Narrower loads go
        # through registers, into a single buffer.
        wide = by_descriptor or min(copy_bytes, size // threads) >= 4
        ahead = wide and config.num_stages > 1 and core != "fma"  # no asynchronous copies before Ampere
        staged += size * (buffers if ahead else 1)
        passing += 0 if ahead else size / 4 / threads
        staged += BARRIER_BYTES * config.num_stages if by_descriptor else 0
        loaded += 0 if by_descriptor else size  # by threads, each with an address
    turned = sum(elements * out_itemsize for elements, _ in accumulators)
    shared = max(staged, min(turned, STAGING_BYTES * threads))

    kept = sum(n * size / 4 for n, size in (*accumulators, *held)) / threads
    if (
        core == "fma" and operands[0][1] == 2
    ):  # a thread's rows and columns of its square of the result, all of the step
        depth = math.sqrt(operands[0][0] * operands[1][0] / accumulators[0][0])
        passing += FMA_REGISTERS * depth * 2 * math.sqrt(accumulators[0][0] / threads)
    if core == "mma.sync":
        passing += PASSING_REGISTERS * sum(tiles) / 16 / threads
    copies = loaded / copy_bytes / threads
    rest = LOOP_REGISTERS[core] + COPY_REGISTERS * copies + passing
    if not loaded:
        rest = DESCRIPTOR_REGISTERS
    return Resources(int(shared), kept + rest)


def bucket(count: int, *, lowest: int = 16) -> int:
    """``count`` rounded up to a power of two, at least ``lowest``.

    It stands in a plan's key for a size that changes from batch to batch, so
    that batches of nearly one size share a plan.
    """
    return max(1 << max(count - 1, 0).bit_length(), lowest)


def fits(needs: Resources, config: triton.Config, properties: runtime.DeviceProperties) -> bool:
    """Whether a program fits the GPU without spilling, as far as the model can tell."""
    threads = properties.warp_size * config.num_warps
    registers = min(MAX_REGISTERS, properties.registers_per_sm // threads)
    return needs.shared_bytes <= properties.shared_memory_per_program and needs.registers_per_thread <= registers


# --- plans ----------------------------------------------------------------------------------------------------------

Rule = TypeVar("Rule", bound=Callable[..., Any])
Plans = dict[str, dict[str, dict[str, Any]]]  # by planner and problem: the plan, and what was measured

# What the tuner uses: plans that come before all files, and what planners were asked since forget(), by name and problem.
trial: Plans = {}
asked: dict[tuple[str, tuple[Any, ...]], None] = {}


@dataclasses.dataclass(frozen=True)
class Planner:
    """What :func:`planner` has made of a rule.

    Attributes:
        name: ``<room>.<what>``.
        rule: from a problem to a plan.
        allowed: from a plan that has the form of the rule's, and the problem, to whether it may be used.
        parameters: the names of the problem's parts, without the GPU's properties.
        buckets: those of them that stand in the key rounded up, by :func:`bucket`.
    """

    name: str
    rule: Callable[..., Any]
    allowed: Callable[..., bool]
    parameters: tuple[str, ...]
    buckets: frozenset[str]

    def key(self, problem: Sequence[Any]) -> str:
        """The problem as files name it: ``n=4096 itemsize=2``."""
        pairs = zip(self.parameters, problem, strict=False)
        return " ".join(f"{k}={bucket(v, lowest=1) if k in self.buckets else v}" for k, v in pairs)

    def from_json(self, stored: Any, problem: Sequence[Any]) -> Any:
        """The plan that a file holds as ``stored``. Raises ``ValueError`` where it is none for the problem."""
        rule = self.rule(*problem)
        plan = _from_json(stored, rule, typing.get_type_hints(self.rule).get("return"), "the plan")
        if plan is not None and as_json(plan) != as_json(rule) and not self.allowed(plan, *problem):
            raise ValueError("the plan does not fit the problem or the GPU")
        return plan

    def find(self, problem: Sequence[Any]) -> Any:
        """The plan for a problem, whose last part is the GPU's properties; within ``same_bits`` what the rule says."""
        if problem[-1].same_bits:
            return self.rule(*problem)
        if len(asked) < 4096:
            asked[self.name, tuple(problem)] = None
        for where, stored in stored_plans(problem[-1]):
            if self.name in stored and (entry := stored[self.name].get(key := self.key(problem))) is not None:
                try:
                    return self.from_json(entry["plan"], problem)
                except ValueError as error:
                    warnings.warn(f"{where}: {self.name} {key} is left aside: {error}", stacklevel=3)
        return self.rule(*problem)


_planners: dict[str, Planner] = {}
_caches: list[Any] = []


def planner(name: str, allowed: Callable[..., bool], *, buckets: Sequence[str] = ()) -> Callable[[Rule], Rule]:
    """Decorates a rule: where a tuned plan is stored for the problem, that is returned, else what the rule says.

    The rule takes the problem in positional arguments that can be hashed, and the GPU's properties as the last. Plans are
    remembered for each problem, so that a call costs one look into a dictionary.

    Args:
        name: ``<room>.<what>``.
        allowed: takes a stored plan, which has the names and types of the rule's, and the problem; says whether the plan
            computes the right thing and fits the GPU.
        buckets: names of sizes that change from batch to batch. They are rounded up in the key, see :func:`bucket`.
    """

    def decorate(rule: Rule) -> Rule:
        *parameters, last = inspect.signature(rule).parameters
        known = _planners.get(name)  # a notebook's cell may run twice
        taken = known is not None and known.rule.__qualname__ != rule.__qualname__
        if last != "properties" or not set(buckets) <= set(parameters) or taken:
            raise ValueError(f"planner: {name} is taken, or its rule has the wrong parameters: {parameters}, {last}")
        made = _planners[name] = Planner(name, rule, allowed, tuple(parameters), frozenset(buckets))

        @functools.wraps(rule)
        def plan(*problem: Any) -> Any:
            return made.find(problem)

        return cast(Rule, derived(plan))

    return decorate


def derived(function: Rule) -> Rule:
    """``functools.lru_cache`` for a function that asks planners: it is asked again when plans change."""
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    remembered(cached)
    return cached


def remembered(cache: Any) -> None:
    """Has ``cache.cache_clear()`` called whenever plans change."""
    _caches.append(cache)


Plan = TypeVar("Plan")


class KeptPlans(dict[Any, Plan]):
    """A room's plans by kind of call: some thousands, of which the oldest makes place for a new one; none when plans change."""

    MOST = 4096

    def __init__(self) -> None:
        super().__init__()
        remembered(self)

    def keep(self, key: Any, plan: Plan) -> None:
        """Keeps a plan, which holds no tensor, address, stream or counter."""
        if len(self) >= self.MOST:
            self.pop(next(iter(self)), None)
        self[key] = plan

    def cache_clear(self) -> None:
        """Drops all; what is kept by a call that goes on meanwhile is kept."""
        self.clear()


def planners() -> Mapping[str, Planner]:
    """All planners of the rooms that have been imported, by name."""
    return _planners


def as_json(plan: Any) -> Any:
    """A plan as a file holds it; two plans are the same if this is. Takes configurations, dataclasses, tuples and numbers."""
    if isinstance(plan, triton.Config):
        return {**plan.kwargs, "num_warps": plan.num_warps, "num_stages": plan.num_stages}
    if dataclasses.is_dataclass(plan):
        return {field.name: as_json(getattr(plan, field.name)) for field in dataclasses.fields(plan)}
    if isinstance(plan, tuple | list):
        return [as_json(part) for part in plan]
    return plan


def _from_json(stored: Any, like: Any, hint: Any, what: str) -> Any:
    """The opposite of :func:`as_json`, for a plan of the form of ``like``; ``hint`` says where it may be ``None``."""
    kinds = typing.get_args(hint)
    if stored is None and (like is None or NoneType in kinds):
        return None
    if NoneType in kinds:
        hint = next(kind for kind in kinds if kind is not NoneType)
    if isinstance(like, triton.Config):
        numbers = _numbers(stored, as_json(like), what)
        return triton.Config(numbers, num_warps=numbers.pop("num_warps"), num_stages=numbers.pop("num_stages"))
    if dataclasses.is_dataclass(like):
        kind: Any = type(like)
        hints = typing.get_type_hints(kind)
        fields = _named(stored, {field.name: None for field in dataclasses.fields(like)}, what)
        return kind(**{name: _from_json(fields[name], getattr(like, name), hints[name], name) for name in fields})
    if isinstance(like, tuple) and isinstance(stored, list) and len(like) == len(stored):
        if all(isinstance(part, tuple) and isinstance(part[0], str) for part in like):
            pairs = {str(part[0]): part[-1] for part in stored if isinstance(part, list) and part}
            return tuple(_numbers(pairs, dict(like), what).items())
        kinds = typing.get_args(hint) or (None,) * len(like)
        parts = enumerate(zip(stored, like, kinds, strict=True))
        return tuple(_from_json(*part, f"part {i} of {what}") for i, part in parts)
    if type(stored) is not type(like) or (type(stored) is int and stored < 1):
        raise ValueError(f"{what} must be like {json.dumps(as_json(like))}, got {json.dumps(stored)}")
    return stored


def _named(stored: Any, like: Mapping[str, Any], what: str) -> dict[str, Any]:
    """``stored`` in the order of ``like``, whose names it must have."""
    if not isinstance(stored, dict) or stored.keys() != like.keys():
        raise ValueError(f"{what} must have the names {', '.join(like)}, got {json.dumps(stored)}")
    return {name: stored[name] for name in like}


def _numbers(stored: Any, like: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Constants of a kernel, warps and stages by name; tiles and warps are powers of two."""
    numbers = _named(stored, like, what)
    for name, value in numbers.items():
        possible = type(value) is type(like[name])
        if type(value) is int:
            power = not name.startswith(("BLOCK_", "num_warps")) or not value & (value - 1)
            possible = possible and power and min(1, like[name]) <= value <= (32 if name == "num_warps" else 2**16)
        if not possible:
            raise ValueError(f"{name} of {what} cannot be {json.dumps(value)}")
    return numbers


def shipped_plans(name: str) -> Path:
    """The file of the plans that come with the package for the GPU called ``name``; it may not exist."""
    return Path(__file__).parent / "tuned" / f"{runtime.slug(name)}.json"


def own_plans(name: str) -> Path:
    """The file of the user's own plans for the GPU called ``name``; it may not exist."""
    return runtime.cache_dir() / "tuned" / f"{runtime.slug(name)}.json"


def read_plans(path: Path) -> Plans:
    """What a file of plans holds; nothing where there is none, or one that is not such a file."""
    try:
        plans = json.loads(path.read_text())["plans"]
        return {str(name): {str(k): dict(v, plan=v["plan"]) for k, v in found.items()} for name, found in plans.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@functools.cache
def stored_plans(properties: runtime.DeviceProperties) -> tuple[tuple[str, Plans], ...]:
    """What is looked into for plans, in its order, each with its name; files without a plan are left out."""
    mode = runtime.plans_in_use()
    paths = [own_plans(properties.name)] if mode == "tuned" else []
    paths += [] if mode == "rules" else [shipped_plans(properties.name)]
    found = [("what is being tried", trial), *((str(path), read_plans(path)) for path in paths)]
    return tuple((where, plans) for where, plans in found if plans)


def forget() -> None:
    """Forgets all plans of this process: files and environment are read again."""
    asked.clear()
    stored_plans.cache_clear()
    for cached in _caches:
        cached.cache_clear()
