"""The resource model, and plans: what was tuned before what the rules say."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from kernelbook import plans, runtime
from kernelbook.lab import timing, tuning
from kernelbook.lab.bench import bench
from kernelbook.lab.candidates import SPACES, candidates, prune
from kernelbook.lab.compiled import CompiledKernel, compile_calls, occupancy
from kernelbook.plans import Resources, bucket, fits, matmul_resources, tensor_core, tile_resources

SMALL = triton.Config({"BLOCK": 64}, num_warps=4, num_stages=2)
LARGE = triton.Config({"BLOCK": 256}, num_warps=8, num_stages=3)
H200 = runtime.TARGETS["sm_90"]


def test_registers_are_counted_for_each_thread() -> None:
    """A 128 x 256 float32 accumulator in 8 warps is 128 registers a thread (not 1,024: dividing by 32 alone)."""
    config = triton.Config({}, num_warps=8, num_stages=3)
    needs = tile_resources(config, staged=[(128 * 64, 2), (64 * 256, 2)], held=[(128 * 256, 4)])
    assert needs.registers_per_thread == plans.BOOKKEEPING_REGISTERS + 128
    assert needs.shared_bytes == 3 * (128 * 64 + 64 * 256) * 2
    assert fits(needs, config, H200)
    half = triton.Config({}, num_warps=4, num_stages=3)
    assert not fits(tile_resources(half, held=[(128 * 256, 4)]), half, H200)
    assert tile_resources(triton.Config({}, num_stages=1), staged=[(64, 2)]).shared_bytes == 128


def test_shared_memory_and_many_warps_limit_too() -> None:
    assert not fits(Resources(H200.shared_memory_per_program + 1, 10), SMALL, H200)
    sixteen = triton.Config({}, num_warps=16)
    assert fits(Resources(0, 255), SMALL, H200) and not fits(Resources(0, 255.5), SMALL, H200)
    assert fits(Resources(0, 128), sixteen, H200) and not fits(Resources(0, 129), sixteen, H200)


def test_prune_keeps_the_order_and_never_returns_nothing() -> None:
    wanted = {SMALL: Resources(1, 1), LARGE: Resources(10**9, 1)}
    assert prune([LARGE, SMALL], wanted.__getitem__, H200) == [SMALL]
    assert prune([SMALL, SMALL], wanted.__getitem__, H200) == [SMALL, SMALL]
    with pytest.raises(ValueError, match="prune: none of 1 configurations fits NVIDIA H200"):
        prune([LARGE], wanted.__getitem__, H200)


# --- the model of a matrix product, against the compiler --------------------------------------------------------------

# sparse_linear's forward pass (pointers) and its dX (descriptors, and pointers that follow ids) with any configuration:
# loads, BLOCK_R, BLOCK_D, BLOCK_K, num_warps, num_stages.
SPREAD = [
    ("pointers", 16, 128, 64, 4, 4),
    ("pointers", 32, 64, 32, 4, 3),
    ("pointers", 16, 64, 32, 4, 1),
    ("pointers", 64, 64, 64, 4, 4),
    ("pointers", 64, 128, 64, 8, 3),
    ("pointers", 128, 64, 128, 4, 2),
    ("pointers", 128, 128, 32, 4, 4),
    ("pointers", 128, 128, 64, 8, 1),
    ("pointers", 128, 256, 16, 8, 1),  # the result's staging is larger than the loop's buffers
    ("pointers", 128, 256, 64, 8, 3),
    ("pointers", 128, 256, 32, 4, 2),  # spills
    ("unaligned", 64, 128, 64, 4, 3),  # spills
    ("dX", 128, 128, 64, 8, 3),
    ("descriptors", 64, 128, 64, 4, 4),
    ("descriptors", 128, 256, 64, 8, 4),
    ("descriptors", 128, 256, 64, 4, 3),  # spills
]
LAUNCH = """
from unittest import mock
import torch, triton
import kernelbook as kb
from kernelbook import plans
from kernelbook.sparse_linear import kernels
ids = torch.arange(4)
for loads, r, d, k, warps, stages in SPREAD:
    blocks = {"BLOCK_R": r, "BLOCK_D": d, "BLOCK_K": k, "GROUP": 8}
    config = triton.Config(blocks, num_warps=warps, num_stages=stages)
    plan = kernels.Plan(config, 1, loads == "descriptors")
    d_in = 4095 if loads == "unaligned" else 4096
    x, w, dy = (torch.empty(s, dtype=torch.bfloat16) for s in ((64, d_in), (16384, d_in), (64, 16384)))
    plans.forget()  # else the plan that was made with another tile is found
    with mock.patch.multiple(kernels, plan_forward=lambda *_: plan, plan_backward=lambda *_: plan):
        if loads in ("dX", "descriptors"):
            kb.sparse_dx(dy, w, ids)
        else:
            kb.sparse_forward(x, w, None, ids, compact=True)
"""


def _model(loads: str, r: int, d: int, k: int, warps: int, stages: int) -> Resources:
    return matmul_resources(
        triton.Config({}, num_warps=warps, num_stages=stages),
        rows=r,
        operands=[(r * k, 2), (d * k, 2)],
        accumulators=[(r * d, 4)],
        copy_bytes=2 if loads == "unaligned" else 16,
        descriptors=loads == "descriptors",
        properties=H200,
    )


@pytest.fixture(scope="module")
def reports() -> list[CompiledKernel]:
    found = compile_calls(f"SPREAD = {SPREAD!r}\n{LAUNCH}", ("sm_90",), asm=("ptx",))
    assert len(found) == len(SPREAD)
    return found


def test_the_model_agrees_with_the_compiler(reports: list[CompiledKernel]) -> None:
    errors = []
    for configuration, kernel in zip(SPREAD, reports, strict=True):
        _, r, _, _, warps, _ = configuration
        needs = _model(*configuration)
        assert (tensor_core(r, warps, H200) == "wgmma") == ("wgmma.mma_async" in kernel.asm["ptx"]), str(kernel)
        # The barriers of descriptors are a few bytes.
        assert 0 <= needs.shared_bytes - kernel.shared_bytes <= 64, (str(kernel), needs)
        assert (needs.registers_per_thread > 255) == (kernel.spill_bytes > 0), (str(kernel), needs)
        if not kernel.spill_bytes:
            errors.append(needs.registers_per_thread - kernel.registers)
    assert max(abs(error) for error in errors) <= 20, errors
    assert sum(abs(error) for error in errors) / len(errors) <= 10, errors


def test_the_model_knows_mixed_loads_and_a_second_product() -> None:
    """moe_lora: W by descriptor, X by pointers; with a low-rank update, A too, and a second accumulator."""
    sides = [(16, 128, 64, 4, 4), (64, 128, 64, 4, 3), (128, 256, 64, 8, 4), (128, 256, 64, 4, 3)]
    code = f"""
from unittest import mock
import torch
import kernelbook as kb
from kernelbook import plans
from kernelbook.moe_lora import kernels
shapes = (64, 2048), (8, 2048, 1536), (8, 16, 2048), (8, 1536, 16)
x, w, a, b = (torch.empty(s, dtype=torch.bfloat16) for s in shapes)
lists = torch.zeros(4096, dtype=torch.int32)
routing = kb.Routing(torch.zeros(64, 8, dtype=torch.int64), lists, 8)
for m, n, k, warps, stages in {sides!r}:
    tiles = kernels.tiles(warps, stages, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8, SMALL_M=m)
    plans.forget()
    with mock.patch.object(kernels, "rows_tiles", lambda *_: tiles):
        kb.scatter2scatter(x, w, routing)
        kb.moe_lora(x, w, a, b, routing, strategy="fused")
"""
    found = compile_calls(code, ("sm_90",))
    assert len(found) == 2 * len(sides)
    for i, kernel in enumerate(found):
        (m, n, k, warps, stages), fused = sides[i // 2], i % 2 == 1
        rank = int(kernel.constants["BLOCK_R"])  # padded
        needs = matmul_resources(
            triton.Config({}, num_warps=warps, num_stages=stages),
            rows=m,
            operands=[(m * k, 2), (n * k, 2), *([(rank * k, 2)] if fused else [])],
            accumulators=[(m * n, 4), *([(m * rank, 4)] if fused else [])],
            descriptors=[False, True, *([False] if fused else [])],
            properties=H200,
        )
        assert 0 <= needs.shared_bytes - kernel.shared_bytes <= 64, (str(kernel), needs)
        assert (needs.registers_per_thread > 255) == (kernel.spill_bytes > 0), (str(kernel), needs)
        if m >= 64 and not kernel.spill_bytes:
            # Row numbers and gathered rows, which it does not count, are up to 48 registers.
            assert -10 <= kernel.registers - needs.registers_per_thread <= 48, (str(kernel), needs)


def test_what_dividing_by_32_throws_away(reports: list[CompiledKernel]) -> None:
    """It calls every tile of 64 x 128 or more impossible; most of them do not spill."""
    pairs = [(c, k) for c, k in zip(SPREAD, reports, strict=True) if c[1] * c[2] >= 64 * 128]
    assert all(plans.BOOKKEEPING_REGISTERS + c[1] * c[2] / 32 > 255 for c, _ in pairs)
    assert sum(k.spill_bytes == 0 for _, k in pairs) >= 8


def test_a_second_accumulator_and_operand_are_counted() -> None:
    config = triton.Config({}, num_warps=8, num_stages=3)
    one = _model("pointers", 128, 128, 64, 8, 3)
    two = matmul_resources(
        config,
        rows=128,
        operands=[(128 * 64, 2), (128 * 64, 2), (16 * 64, 2)],
        accumulators=[(128 * 128, 4), (128 * 16, 4)],
        held=[(256, 4)],
        properties=H200,
    )
    assert two.shared_bytes - one.shared_bytes == 3 * 16 * 64 * 2
    assert two.registers_per_thread - one.registers_per_thread == 8 + 1 + 0.5 * plans.COPY_REGISTERS


@pytest.mark.parametrize(
    ("stages", "copy_bytes", "ahead"), ((3, 16, True), (3, 2, False), (1, 16, False)), ids=("", "narrow", "one stage")
)
def test_what_is_not_copied_ahead_goes_through_registers_into_one_buffer(
    stages: int, copy_bytes: int, ahead: bool
) -> None:
    config = triton.Config({}, num_warps=4, num_stages=stages)
    size = 64 * 64 * 2
    needs = matmul_resources(
        config,
        rows=64,
        operands=[(64 * 64, 2)] * 2,
        accumulators=[(64 * 64, 4)],
        copy_bytes=copy_bytes,
        properties=H200,
    )
    assert needs.shared_bytes == 2 * size * (stages if ahead else 1)
    copies, passing = 2 * size / copy_bytes / 128, 0 if ahead else 2 * size / 4 / 128
    kept = 64 * 64 / 128 + plans.LOOP_REGISTERS["wgmma"]
    assert needs.registers_per_thread == kept + plans.COPY_REGISTERS * copies + passing


def test_before_ampere_a_thread_holds_its_rows_and_columns_of_a_step() -> None:
    m, n, k, threads = 64, 32, 16, 128
    needs = matmul_resources(
        triton.Config({}, num_warps=4, num_stages=3),
        rows=m, operands=[(m * k, 2), (n * k, 2)], accumulators=[(m * n, 4)], properties=runtime.TARGETS["sm_75"],
    )  # fmt: skip
    size, square = (m + n) * k * 2, math.sqrt(m * n / threads)
    assert needs.shared_bytes == m * n * 2  # the result is turned around in it; of the operands there is one copy
    assert needs.registers_per_thread == pytest.approx(
        m * n / threads + plans.LOOP_REGISTERS["fma"] + plans.COPY_REGISTERS * size / 16 / threads
        + size / 4 / threads + plans.FMA_REGISTERS * 2 * square * k
    )  # fmt: skip


def test_each_operand_has_descriptors_or_none_has() -> None:
    with pytest.raises(ValueError, match="shorter"):
        matmul_resources(SMALL, rows=64, operands=[(64, 2)] * 2, accumulators=[(64, 4)], descriptors=[True])


def test_the_older_tensor_cores_have_one_buffer_fewer() -> None:
    config = triton.Config({}, num_warps=4, num_stages=3)
    shared = {
        arch: matmul_resources(
            config,
            rows=64,
            operands=[(64 * 64, 2), (128 * 64, 2)],
            accumulators=[(64 * 128, 4)],
            properties=runtime.TARGETS[arch],
        ).shared_bytes
        for arch in ("sm_80", "sm_90", "sm_100")
    }
    assert shared == {"sm_80": 2 * 24576, "sm_90": 3 * 24576, "sm_100": 3 * 24576}  # as the compiler reports


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs", "limit"),
    (
        (32, 0, 4, 16, "registers"),  # 64 warps: the registers and the warps give out at the same time
        (24, 0, 4, 16, "warps"),
        (16, 0, 1, 32, "programs"),
        (128, 0, 4, 4, "registers"),
        (129, 0, 4, 3, "registers"),  # rounded up to 136
        (64, 100 * 1024, 4, 2, "shared memory"),
        (64, 113 * 1024, 4, 2, "shared memory"),
        (64, 114 * 1024, 4, 1, "shared memory"),  # 1 KiB of each program is the system's
        (187, 147_456, 8, 1, "registers"),
    ),
)
def test_occupancy(registers: int, shared: int, warps: int, programs: int, limit: str) -> None:
    found = occupancy(registers, shared, warps, H200)
    assert found.programs == programs and found.share == programs * warps / 64
    assert found.limit == limit


@pytest.mark.gpu
def test_occupancy_is_what_the_driver_says() -> None:
    import ctypes
    from unittest import mock

    import torch

    import kernelbook as kb
    from kernelbook.sparse_linear import kernels

    x, w = (torch.randn(n, 256, device=runtime.DEVICE, dtype=torch.bfloat16) for n in (64, 2048))
    ids = torch.arange(4, device=runtime.DEVICE)
    for loads, r, d, k, warps, stages in SPREAD:
        if loads == "pointers":
            blocks = {"BLOCK_R": r, "BLOCK_D": d, "BLOCK_K": k, "GROUP": 8}
            config = triton.Config(blocks, num_warps=warps, num_stages=stages)
            plans.forget()
            with mock.patch.object(kernels, "plan_forward", lambda *_, c=config: kernels.Plan(c)):
                kb.sparse_forward(x, w, None, ids, compact=True)
    compiled = [
        kernel
        for cache in kernels._sparse_linear_fwd_tiles_kernel.device_caches.values()
        for kernel in cache[0].values()
    ]
    assert len(compiled) >= 8
    driver = ctypes.CDLL("libcuda.so.1")
    for kernel in compiled:
        warps, shared, said = kernel.metadata.num_warps, kernel.metadata.shared, ctypes.c_int()
        code = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(said), ctypes.c_void_p(kernel.function), 32 * warps, ctypes.c_size_t(shared)
        )
        assert code == 0
        assert occupancy(kernel.n_regs, shared, warps).programs == said.value, (kernel.n_regs, shared, warps)


def test_buckets() -> None:
    assert [bucket(m) for m in (0, 1, 16, 17, 32, 33, 1000, 1024, 1025)] == [16, 16, 16, 32, 32, 64, 1024, 1024, 2048]
    assert [bucket(m, lowest=1) for m in (0, 1, 2, 3)] == [1, 1, 2, 4] and bucket(5, lowest=64) == 64
    assert len({bucket(m) for m in range(1, 8193)}) == 10


# --- plans ------------------------------------------------------------------------------------------------------------

GPU = dataclasses.replace(H200, name="A Fake GPU", arch="sm_90")


@dataclasses.dataclass(frozen=True)
class _Plan:
    config: triton.Config
    split: int


def _allowed(plan: _Plan, m: int, n: int, properties: runtime.DeviceProperties) -> bool:
    return plan.config.kwargs["BLOCK"] <= 256


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., _Plan]]:
    """A planner; the user's plans lie in ``tmp_path``, the shipped ones in ``tmp_path / "shipped"``."""
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(plans, "shipped_plans", lambda name: tmp_path / "shipped" / f"{runtime.slug(name)}.json")
    monkeypatch.setattr(plans, "_planners", {})

    @plans.planner("square.tiles", _allowed, buckets=("m",))
    def rule(m: int, n: int, properties: runtime.DeviceProperties) -> _Plan:
        return _Plan(SMALL, 1)

    plans.forget()
    yield rule
    plans.forget()


def _entry(config: triton.Config, split: int) -> dict[str, Any]:
    return {"plan": plans.as_json(_Plan(config, split)), "us": 1.0}


def _store(place: Callable[[str], Path], entry: dict[str, Any], key: str = "m=128 n=4096") -> None:
    tuning.write_plans(place(GPU.name), GPU.name, {"square.tiles": {key: entry}})


def test_the_rule_holds_where_nothing_is_stored(plan: Callable[..., _Plan]) -> None:
    assert plan(100, 4096, GPU) == _Plan(SMALL, 1)
    assert plan(100, 4096, GPU) is plan(100, 4096, GPU)  # looked up, not made anew


def test_own_plans_come_before_shipped_ones_and_those_before_the_rule(
    plan: Callable[..., _Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(plans.shipped_plans, _entry(LARGE, 1))
    assert plan(100, 4096, GPU) == _Plan(LARGE, 1)
    _store(plans.own_plans, _entry(LARGE, 2))
    # 65 to 128 share a key; another size, another GPU, and the rules when they are asked for.
    assert plan(100, 4096, GPU) == plan(65, 4096, GPU) == _Plan(LARGE, 2)
    assert plan(129, 4096, GPU) == plan(100, 4097, GPU) == plan(100, 4096, H200) == _Plan(SMALL, 1)
    for mode, expected in (("shipped", _Plan(LARGE, 1)), ("rules", _Plan(SMALL, 1))):
        monkeypatch.setenv("KERNELBOOK_PLANS", mode)
        plans.forget()
        assert plan(100, 4096, GPU) == expected


BLOCKS = {"BLOCK": 256, "num_warps": 8, "num_stages": 3}


@pytest.mark.parametrize(
    ("stored", "problem"),
    (
        ({"config": BLOCKS}, r"the plan must have the names config, split, got"),
        ({"config": BLOCKS, "split": 2, "more": 1}, r"the plan must have the names config, split, got"),
        ({"config": {**BLOCKS, "BLOCK_K": 32}, "split": 2}, r"config must have the names BLOCK, num_warps, num_stages, got"),
        ({"config": {**BLOCKS, "BLOCK": "256"}, "split": 2}, r'BLOCK of config cannot be "256"'),
        ({"config": {**BLOCKS, "BLOCK": True}, "split": 2}, r"BLOCK of config cannot be true"),
        ({"config": {**BLOCKS, "num_warps": 3}, "split": 2}, r"num_warps of config cannot be 3"),
        ({"config": {**BLOCKS, "num_warps": 64}, "split": 2}, r"num_warps of config cannot be 64"),
        ({"config": {**BLOCKS, "num_stages": 0}, "split": 2}, r"num_stages of config cannot be 0"),
        ({"config": BLOCKS, "split": 0}, r"split must be like 1, got 0"),
        ({"config": BLOCKS, "split": 2.0}, r"split must be like 1, got 2\.0"),
        ({"config": None, "split": 1}, r"config must have the names BLOCK, num_warps, num_stages, got null"),
        ({"config": {**BLOCKS, "BLOCK": 512}, "split": 2}, r"the plan does not fit the problem or the GPU"),
        ([1, 2], r"the plan must have the names config, split, got \[1, 2\]"),
        (None, r"the plan must have the names config, split, got null"),
    ),
)  # fmt: skip
def test_a_stored_plan_that_is_none_of_the_rule_s_form_is_left_aside(
    plan: Callable[..., _Plan], stored: Any, problem: str
) -> None:
    _store(plans.own_plans, {"plan": stored})
    with pytest.warns(UserWarning, match=rf"a-fake-gpu\.json: square\.tiles m=128 n=4096 is left aside: {problem}"):
        assert plan(100, 4096, GPU) == _Plan(SMALL, 1)


@pytest.mark.parametrize("pair", ([], 7, None, "BLOCK_M", ["BLOCK"]))
def test_tiles_by_name_are_pairs_in_a_file(pair: Any) -> None:
    planner, problem = plans.planners()["moe_lora.rows"], (16384, 128, 0, 2, "wide", H200)
    stored = plans.as_json(planner.rule(*problem))
    assert plans.as_json(planner.from_json(stored, problem)) == stored
    with pytest.raises(ValueError, match="blocks must have the names BLOCK_M, "):
        planner.from_json({**stored, "blocks": [pair, *stored["blocks"][1:]]}, problem)


def test_a_rule_need_not_say_what_its_plan_is_made_of(plan: Callable[..., _Plan]) -> None:
    plans.planner("pair.tiles", lambda *_: True)(lambda m, properties: (SMALL, 1))
    pair = plans.planners()["pair.tiles"]
    assert plans.as_json(pair.from_json(plans.as_json((LARGE, 2)), (100, GPU))) == plans.as_json((LARGE, 2))


def test_tiles_are_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = plans.planners()["layer_norm.forward"]
    stored = {"BLOCK_M": 2, "BLOCK_N": 64, "NUM_BLOCKS": 3, "num_warps": 4, "num_stages": 3}
    assert planner.from_json(stored, (192, 2, H200)).kwargs == {"BLOCK_M": 2, "BLOCK_N": 64, "NUM_BLOCKS": 3}
    with pytest.raises(ValueError, match="BLOCK_N of the plan cannot be 192"):
        planner.from_json({**stored, "BLOCK_N": 192, "NUM_BLOCKS": 1}, (192, 2, H200))
    with pytest.raises(ValueError, match="does not fit the problem"):
        planner.from_json({**stored, "NUM_BLOCKS": 2}, (192, 2, H200))


def test_a_kernel_that_is_there_for_everything_may_replace_another() -> None:
    """Where the rule's result may be None; not where it may not."""
    backward = plans.planners()["attention.backward"]
    dkdv, dq = backward.rule(128, 2, H200)
    assert backward.from_json(None, (128, 2, H200)) is None
    assert backward.from_json([plans.as_json(dkdv), None], (128, 2, H200)) == (dkdv, None)
    with pytest.raises(ValueError, match="part 0 of the plan must have the names"):
        backward.from_json([None, plans.as_json(dq)], (128, 2, H200))
    with pytest.raises(ValueError, match="the plan must be like null"):  # the rule has no such kernel there
        plans.planners()["attention.forward"].from_json(plans.as_json(dkdv), (64, 2, 512, False, H200))


@pytest.mark.parametrize(
    "content", ("", "not json", "[]", '{"plans": {"square.tiles": []}}', '{"plans": {"a": {"b": 1}}}')
)
def test_a_broken_file_is_ignored(content: str, plan: Callable[..., _Plan]) -> None:
    path = plans.own_plans(GPU.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert plan(100, 4096, GPU) == _Plan(SMALL, 1)


def test_a_file_of_plans_is_readable(plan: Callable[..., _Plan]) -> None:
    _store(plans.own_plans, _entry(LARGE, 2))
    text = plans.own_plans(GPU.name).read_text()
    assert '"gpu": "A Fake GPU"' in text and len(text.splitlines()) == 8
    assert plans.read_plans(plans.own_plans(GPU.name)) == {"square.tiles": {"m=128 n=4096": _entry(LARGE, 2)}}


def test_tuning_can_set_plans_and_hears_what_is_asked(
    plan: Callable[..., _Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = plans.derived(lambda m: plan(m, 64, GPU).split)
    assert asking(100) == 1
    assert [*plans.asked] == [("square.tiles", (100, 64, GPU))]
    with tuning._trying({"square.tiles": {"m=128 n=64": _entry(LARGE, 2)}}):
        assert asking(100) == 2 and asking(200) == 1
    assert asking(100) == 1


def test_a_planner_has_a_name_of_its_own_and_ends_with_the_properties(plan: Callable[..., _Plan]) -> None:
    with pytest.raises(ValueError, match=r"planner: square\.tiles is taken"):
        plans.planner("square.tiles", _allowed)(lambda m, properties: None)
    with pytest.raises(ValueError, match="wrong parameters"):
        plans.planner("square.other", _allowed)(lambda m: None)


def test_every_shipped_plan_is_taken() -> None:
    """Else it would be left aside: after a change of a rule or of what it allows, tune again or strike it."""
    gpus = {properties.name: properties for properties in runtime.TARGETS.values()}
    h100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
    gpus[h100.name] = h100
    for path in (Path(plans.__file__).parent / "tuned").glob("*.json"):
        content = json.loads(path.read_text())
        assert runtime.slug(content["gpu"]) == path.stem
        properties = gpus[content["gpu"]]
        for name, entries in plans.read_plans(path).items():
            planner = plans.planners()[name]
            for key, entry in entries.items():
                problem = (*(_value(part.split("=")[1]) for part in key.split()), properties)
                assert plans.as_json(planner.from_json(entry["plan"], problem)) == entry["plan"], (path.name, name, key)
                assert entry["plan"] in candidates(planner, problem), (path.name, name, key)


def _value(text: str) -> Any:
    return {"True": True, "False": False, "None": None}.get(text, int(text) if text.lstrip("-").isdigit() else text)


def _problems(properties: runtime.DeviceProperties) -> dict[str, tuple[Any, ...]]:
    """One for each planner that has a choice on the GPU."""
    problems: dict[str, tuple[Any, ...]] = {
        "layer_norm.forward": (4096, 2),
        "layer_norm.backward": (4096, 2, True, 2, False),
        "sparse_linear.backward": (8192, 4096, 1664, 2, True, True, False),
        "sparse_linear.forward": (8192, 4096, 1664, 2),
        "scatter_ffn.strategy": (1, 4096, 4096, 1638, "bfloat16", False),
        "scatter_ffn.vector_up": (1, 1638, "bfloat16", False),
        "scatter_ffn.vector_down": (1, 4096, 1638, "bfloat16"),
        "scatter_ffn.tiles_up": (16, 1638, False),
        "scatter_ffn.tiles_down": (16, 4096, 1638),
        "nf4.dequantize": (True,),
        "nf4.matmul": (1, 4096),
        "moe_lora.rows": (16384, 128, 0, 2, "boxes" if properties.prefers_tma else "wide"),
        "moe_lora.thin": (16384, 128, 2048, 16, 2),
        "moe_lora.gram": (16384, 128, 16, 2),
        "moe_lora.strategy": (64, 128, 2048, 1536, 16),
        "attention.plain": ("dkdv", 128, 2, properties.prefers_tma),
        "attention.decode": (32, 8, 8192, 128, 2, 0),
    }
    if properties.arch == "sm_90":
        problems |= {"attention.forward": (128, 2, 4096, True), "attention.backward": (128, 2)}
    if not properties.has_tensor_cores:  # cuBLAS multiplies
        problems = {
            name: of for name, of in problems.items() if not name.startswith(("sparse_linear", "scatter_ffn.tiles"))
        }
        problems["attention.plain"] = ("fwd", 64, 2, False)
    assert properties.arch != "sm_90" or set(problems) == set(plans.planners())
    return {name: (*problem, properties) for name, problem in problems.items()}


@pytest.mark.parametrize("target", sorted(runtime.TARGETS))
def test_candidates_of_the_rooms_are_few_enough_to_be_timed_and_not_only_one(target: str) -> None:
    for name, problem in _problems(runtime.TARGETS[target]).items():
        planner = plans.planners()[name]
        listed = candidates(planner, problem)
        assert 2 <= len(listed) <= 750, (name, len(listed))
        assert len(set(map(json.dumps, listed))) == len(listed)
        rule = plans.as_json(planner.rule(*problem))
        assert listed[0] == rule, "the rule's own plan is always allowed"
        for stored in listed[::20]:
            assert plans.as_json(planner.from_json(stored, problem)) == stored


def test_the_fields_that_are_varied_are_those_of_the_plans() -> None:
    """A name that no plan has would be varied without effect."""
    assert set(SPACES) == set(plans.planners())
    for name, problem in _problems(H200).items():
        rule = plans.planners()[name].rule(*problem)
        text = json.dumps(plans.as_json(rule))
        for names in SPACES[name]:
            for one in (names,) if isinstance(names, str) else names:
                last = one.rpartition(".")[2]
                assert f'"{last}"' in text or (one in ("", "1") and isinstance(rule, str | tuple)), (name, one)


def test_the_benchmark_of_a_room_with_planners_gives_cases_to_tune() -> None:
    rooms = {name.split(".")[0] for name in plans.planners()}
    assert rooms >= {"layer_norm", "sparse_linear", "scatter_ffn"}
    for room in rooms:
        assert all(isinstance(case, timing.Case) for case in bench(room).tuning_cases())
