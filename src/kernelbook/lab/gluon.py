"""Kernels in Gluon on a machine without a GPU: run, checked, and replayed.

Triton's interpreter knows no Gluon. :func:`interpret` runs a kernel in it all the same, as one program of a Hopper GPU after the
other, and says what is wrong with it::

    events = interpret(kernel[(4, 4)], a, b, c, K, BLOCK=64)     # GluonError: wrong phase: tensor cores read a_smem[1] at ...

**Which functions.** Of ``gluon.language`` those for tiles of numbers (``arange``, ``zeros``, ``full``, ``load``, ``store``, ``where``,
reductions, arithmetic, ...), ``convert_layout``, ``allocate_shared_memory`` with ``index``, ``slice``, ``permute``, ``reshape``, ``load``
and ``store``, ``warp_specialize``, ``barrier`` (``thread_barrier``); of ``nvidia.ampere`` ``async_copy`` and ``mma_v2``; of
``nvidia.hopper`` ``mbarrier``, ``tma`` with descriptors of float16 and float32, ``fence_async_shared``, ``warpgroup_mma`` and
``warpgroup_mma_wait``. Not clusters, not tensor memory, not inline assembly, unless ``assembly`` says what it gives.

**What is asynchronous.** A copy destroys its buffer when it starts and brings its values when it lands. A product of
``warpgroup_mma(is_async=True)`` reads its operands until somebody waits for it. Partitions of ``warp_specialize`` run from one wait to
the next. When a copy lands, and which partition goes on, is any order that the machine allows, by ``seed``. Every fourth
program has copies land as late as possible, the oldest first; or the newest first; or at once, with the first partition
ahead; or all of it is drawn.

**What is refused** is a :class:`GluonError` whose ``kind`` is one of ``KINDS``: a wait for the wrong phase, a buffer that is read
before its copy has landed, a fence that is missing between threads and the asynchronous proxy (TMA, tensor cores), bytes that
do not match ``expect``, more arrivals than ``init`` says, a deadlock with who waits for what, a buffer that is overwritten before it
was read, a result that is used before its wait, layouts that do not fit, and a program that ends before its copies.

**Layouts** are checked by Triton's own front end (``GluonSemantic``): operands of one operation have one layout. In addition a
layout has as many warps as the partition, operands of tensor cores have the layouts that the instruction takes, and a tile
in shared memory has the layout of its descriptor. ``reshape``, ``permute``, ``join`` and ``split`` of tiles return one that fits anything.
Barriers among the threads of a partition are the compiler's: they are not asked for.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from kernelbook import gluon_names, runtime  # before Triton, which it sets up
from kernelbook.lab.gluon_memory import (
    KINDS,
    Copy,
    Event,
    GluonError,
    Product,
    Program,
    Shared,
    Tiles,
    make_tensor,
    warps_of,
    wrong,
)
from kernelbook.lab.watched_memory import Bounded

# isort: split
import triton.language as tl
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.runtime import interpreter

__all__ = ["KINDS", "Event", "GluonError", "enable", "interpret", "interpreted"]

# --- layouts ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=True)
class _Unknown(language.AutoLayout):  # type: ignore[misc]
    """The layout of what was reshaped, permuted, joined or split: it goes with any other."""

    rank: int = 0


class _Builder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """Triton's, and what Gluon's front end asks for; layouts are told from one another by that front end alone."""

    begin: Callable[[], None]

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        super().set_grid_idx(x, y, z)
        self.begin()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") and name.endswith("_layout"):
            return lambda *_: None
        raise AttributeError(name)

    def get_gluon_layout_from_tensor(self, handle: Any) -> Any:
        return _Unknown(handle.data.ndim)

    def get_distributed_ty(self, kind: Any, shape: Sequence[int], _layout: Any) -> Any:
        return tl.block_type(kind, [*shape])

    def create_broadcast(self, handle: Any, kind: Any) -> Any:
        return super().create_broadcast(handle, getattr(kind, "shape", kind))

    def create_convert_layout(self, _kind: Any, handle: Any) -> Any:
        return handle

    def create_set_auto_layout(self, _layout: Any, handle: Any) -> Any:
        return handle

    def is_convert_layout_trivial(self, _kind: Any, _handle: Any) -> bool:
        return True

    def create_barrier(self) -> Any:
        _meet()
        return super().create_barrier()


class _Semantic(GluonSemantic):  # type: ignore[misc, type-arg]
    """Gluon's front end over the interpreter's builder."""

    def _has_warps(self, layout: Any) -> None:
        warps, here = warps_of(layout), Program.current.here
        if warps is not None and warps != here.num_warps:
            raise GluonError(
                "layout", f"{layout} is of {warps} warps, and {Program.current.place()} has {here.num_warps}"
            )

    def arange(self, start: Any, end: Any, layout: Any = None) -> Any:
        self._has_warps(layout)
        return super().arange(start, end, layout)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        self._has_warps(layout)
        return super().full(shape, value, dtype, layout)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        self._has_warps(layout)
        return super().convert_layout(value, layout, assert_trivial)

    def expand_dims(self, value: Any, axis: int) -> Any:
        found = super().expand_dims(value, axis)
        parent = getattr(value.type.layout, "parent", None) or _Unknown(len(found.shape))
        return self.tensor(found.handle, language.distributed_type(value.dtype, found.shape, parent))

    def load(self, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self._same(ptr, mask=mask, other=other)
        return super().load(ptr, mask, other, *rest)

    def store(self, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._same(ptr, mask=mask, value=value)
        return super().store(ptr, value, mask, *rest)

    def _same(self, ptr: Any, **others: Any) -> None:
        for name, other in others.items():
            layouts = [getattr(t.type, "layout", None) for t in (ptr, other) if isinstance(t, tl.tensor)]
            known = [layout for layout in layouts if layout is not None and not isinstance(layout, language.AutoLayout)]
            if len(known) == 2 and known[0] != known[1]:
                raise wrong("layout", f"pointers have {known[0]}, {name} {known[1]}")


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction of Triton's, whose result lies as a slice of its tile."""

    @functools.wraps(function)
    def reduce(tile: Any, axis: Any = None, **rest: Any) -> Any:
        found = function(tile, axis, **rest)
        if axis is None or len(tile.shape) == 1:
            return found
        part = language.SliceLayout(operator.index(axis), tile.type.layout)
        return make_tensor(found.handle.data, found.dtype, part)

    return reduce


# --- the language -----------------------------------------------------------------------------------------------------

_REDUCTIONS = ("max", "min", "sum", "xor_sum", "reduce_or", "argmax", "argmin")


class _Gluon:
    """The module gluon.language."""

    constexpr = tl.constexpr
    static_range, range = range, range
    allocate_shared_memory = staticmethod(Shared.allocate)

    def __getattr__(self, name: str) -> Any:
        if name in ("max_contiguous", "multiple_of", "max_constancy"):
            return lambda value, *_, **__: value
        if name in _REDUCTIONS:
            return _reduced(getattr(tl, name))
        found = getattr(language, name, None)
        builtin = getattr(found, "__triton_builtin__", False) and name not in ("load", "store")
        if found is None or (builtin and found.__module__.startswith("triton.experimental")):  # of Gluon alone
            raise GluonError("not interpreted", f"gl.{name}")
        return getattr(tl, name, found)

    @staticmethod
    def warp_specialize(
        functions: Sequence[tuple[Any, tuple[Any, ...]]], worker_num_warps: Sequence[int], worker_num_regs: Any = None
    ) -> None:
        Program.current.specialize(functions, worker_num_warps)

    @staticmethod
    def arange(start: Any, end: Any, layout: Any = None) -> Any:
        return interpreter.interpreter_semantic.arange(operator.index(start), operator.index(end), layout)

    @staticmethod
    def full(shape: Sequence[Any], value: Any, dtype: Any, layout: Any = None) -> Any:
        return interpreter.interpreter_semantic.full([operator.index(n) for n in shape], value, dtype, layout)

    @classmethod
    def zeros(cls, shape: Sequence[Any], dtype: Any, layout: Any = None) -> Any:
        return cls.full(shape, 0, dtype, layout)

    @staticmethod
    def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return interpreter.interpreter_semantic.convert_layout(value, layout, assert_trivial)

    @staticmethod
    def num_warps() -> int:
        return Program.current.here.num_warps

    @staticmethod
    def barrier(*, cluster: bool = False) -> None:
        tl.debug_barrier(_semantic=interpreter.interpreter_semantic)

    thread_barrier = barrier

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        return (a + b - 1) // b


class _AsyncCopy:
    """The module ampere.async_copy."""

    @staticmethod
    def async_load(memory: Shared, pointers: Any, mask: Any = None, **_: Any) -> None:
        values = tl.load(pointers, mask=mask, other=None if mask is None else 0)
        if [*values.shape] != memory.shape or values.dtype != memory.dtype:
            raise GluonError(
                "layout",
                f"{memory} is of {memory.shape} {memory.dtype}, and {[*values.shape]} {values.dtype} are copied",
            )
        Program.current.groups[-1].append(Copy(memory, values.handle.data))

    async_copy_global_to_shared = async_load

    @staticmethod
    def commit_group() -> None:
        Program.current.groups.append([])

    @staticmethod
    def wait_group(num_outstanding: Any = 0) -> None:
        groups = Program.current.groups
        here = max(0, len(groups) - 1 - operator.index(num_outstanding))
        for copy in itertools.chain(*groups[:here]):
            copy.land()
        del groups[:here]


class _MBarrier:
    """The module hopper.mbarrier."""

    MBarrierLayout = hopper.mbarrier.MBarrierLayout

    @staticmethod
    def allocate_mbarrier(batch: Any = None) -> Shared:
        return Shared.allocate(tl.int64, [1] if batch is None else [batch, 1], hopper.mbarrier.MBarrierLayout())

    @staticmethod
    def init(barrier: Shared, count: Any) -> None:
        barrier.barrier.init(operator.index(count))

    @staticmethod
    def invalidate(barrier: Shared) -> None:
        barrier.barrier.count = 0

    @staticmethod
    def expect(barrier: Shared, bytes: Any, pred: Any = True) -> None:
        if pred:
            one, bytes = barrier.barrier, operator.index(bytes)
            Program.current.tell("expect", one, f"{Program.current.here} expects {bytes} bytes at {one}", one.parity)
            one.arrive(bytes)

    @staticmethod
    def arrive(barrier: Shared, *, count: Any = 1, pred: Any = True) -> None:
        if pred:
            one = barrier.barrier
            Program.current.tell("arrive", one, f"{Program.current.here} arrives at {one}", one.parity)
            one.arrive(arrivals=operator.index(count))

    @staticmethod
    def wait(barrier: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        phase = operator.index(phase)
        if phase not in (0, 1):
            raise wrong("wrong phase", f"a phase is told by its parity, 0 or 1, and {phase} is given")
        if pred:
            Program.current.wait(barrier.barrier, phase)


class _Tma:
    """The module hopper.tma."""

    @staticmethod
    def async_load(tiles: Tiles, at: Sequence[Any], barrier: Shared, memory: Shared, pred: Any = True) -> None:
        if not pred:
            return
        program, one = Program.current, barrier.barrier
        if one in program.unfenced:
            raise wrong("missing fence", f"a copy is to arrive at {one}, which was made and not fenced")
        tiles.check(memory)
        values = np.zeros(tiles.block_shape, tiles.data.dtype)
        source, target = tiles.part(at)
        values[target] = tiles.data[source]
        program.flying.append(Copy(memory, values, one))
        if program.order == 2:
            program.flying.pop().land()

    async_copy_global_to_shared = async_load

    @staticmethod
    def async_store(tiles: Tiles, at: Sequence[Any], memory: Shared) -> None:
        target, source = _Tma._written(tiles, at, memory)
        tiles.data[target] = source

    async_copy_shared_to_global = async_store

    @staticmethod
    def async_atomic_add(tiles: Tiles, at: Sequence[Any], memory: Shared) -> None:
        target, source = _Tma._written(tiles, at, memory)
        tiles.data[target] += source

    @staticmethod
    def _written(tiles: Tiles, at: Sequence[Any], memory: Shared) -> tuple[tuple[slice, ...], np.ndarray]:
        """Where, and what."""
        tiles.check(memory)
        memory.read_by_async_proxy("TMA reads")
        Program.current.here.stores += memory.slots
        Program.current.tell("write", memory, f"TMA copies {memory} to global memory")
        target, source = tiles.part(at)
        return target, memory.data.reshape(tiles.block_shape)[source]

    @staticmethod
    def store_wait(pendings: Any, **_: Any) -> None:
        stores = Program.current.here.stores
        del stores[: max(0, len(stores) - operator.index(pendings))]


def _fence(cluster: bool = False) -> None:
    here = Program.current.here
    here.fenced += here.stored
    here.stored = []
    Program.current.unfenced = []


def _meet() -> None:
    here = Program.current.here
    for slot in here.fenced:
        slot.visible = slot not in here.stored
    here.fenced = []


# --- tensor cores -----------------------------------------------------------------------------------------------------


def _of_any_width(layout: Any) -> Any:
    """A layout of Hopper's tensor cores without the product's columns, which do not show in the left operand's registers."""
    if not isinstance(layout, language.NVMMADistributedLayout) or layout.version[0] != 3:
        return layout
    return dataclasses.replace(layout, instr_shape=[layout.instr_shape[0], *layout.instr_shape[2:]])


def _operand(operand: Any, acc: Any, number: int) -> np.ndarray:
    """An operand of tensor cores, in the layout that they take."""
    if isinstance(operand, Shared):
        if not isinstance(operand.layout, language.NVMMASharedLayout):
            raise wrong("layout", f"warpgroup_mma reads {operand} in {operand.layout}, not in an NVMMASharedLayout")
        operand.read_by_async_proxy("tensor cores read")
        return operand.data.astype(np.float32)
    wanted, found = acc.type.layout, operand.type.layout
    fits = isinstance(found, language.DotOperandLayout) and found.operand_index == number
    if not fits or _of_any_width(found.parent) != _of_any_width(wanted):
        raise wrong("layout", f"operand {number} has {found}, not DotOperandLayout({number}, {wanted}, ...)")
    return operand.handle.data.astype(np.float32)


def _result(acc: Any, version: int) -> Any:
    layout = acc.type.layout
    if not isinstance(layout, language.NVMMADistributedLayout) or layout.version[0] != version:
        raise wrong("layout", f"the accumulator has {layout}, not an NVMMADistributedLayout of version {version}")
    return layout


def _warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    program = Program.current
    before = acc._value if isinstance(acc, Product) else acc
    layout = _result(before, 3)
    product = _multiplied(_operand(a, before, 0), _operand(b, before, 1))
    rows, columns = product.shape
    if not program.any_tile and (
        rows % 64 or columns % 8 or columns > 256 * layout.warps_per_cta[1] or b.shape[0] % 16
    ):
        raise wrong(
            "layout",
            f"wgmma multiplies 64 rows by up to 256 columns, 16 deep, not {rows} by {columns}, {b.shape[0]} deep",
        )
    if use_acc:
        product = before.handle.data + product
    value = make_tensor(product, tl.float32, layout)
    if not is_async:
        return value
    found = Product(value, [*getattr(a, "slots", ()), *b.slots])
    program.here.products.append(found)
    program.tell("product", a if isinstance(a, Shared) else b, f"{program.here} starts a product")
    return found


def _warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    program = Program.current
    products = program.here.products
    for product in products[: max(0, len(products) - operator.index(num_outstanding))]:
        products.remove(product)
        program.tell("done", product.slots[0], f"{program.here} has waited for its product of line {product.line}")
    found = [d._value if isinstance(d, Product) and d not in products else d for d in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return a @ b


def _mma_v2(a: Any, b: Any, acc: Any, **_: Any) -> Any:
    layout = _result(acc, 2)
    return make_tensor(acc.handle.data + _multiplied(_operand(a, acc, 0), _operand(b, acc, 1)), tl.float32, layout)


_STANDS_FOR: list[tuple[Any, Any]] = [
    (language, _Gluon()),
    (ampere.async_copy, _AsyncCopy),
    (gluon_names.async_copy, _AsyncCopy),
    (hopper.mbarrier, _MBarrier),
    (hopper.tma, _Tma),
    (gluon_names.tma, _Tma),
    (gluon_names.thread_barrier, _Gluon.barrier),
    (hopper.fence_async_shared, _fence),
    (hopper.warpgroup_mma, _warpgroup_mma),
    (hopper.warpgroup_mma_wait, _warpgroup_mma_wait),
    (ampere.mma_v2, _mma_v2),
]
_BY_NAME = {"async_atomic_add": _Tma.async_atomic_add}  # which a Triton without it is given by the kernels


# --- running ----------------------------------------------------------------------------------------------------------


class _Transformer(ast.NodeTransformer):
    """Has numbers be tensors, as the interpreter does, and tells shared memory its name."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        call = ast.Name(id="_assigned", ctx=ast.Load())
        node.value = ast.Call(func=call, args=[ast.Constant(value=name), node.value], keywords=[])
        return node


def _assigned(name: str, value: Any) -> Any:
    if isinstance(value, Shared) and value.name == "shared memory":
        value.name = name
    return interpreter.interpreter_semantic.to_tensor(value, False)


def _rewritten(function: Any, scope: dict[str, Any]) -> Any:
    """The function that the interpreter calls, of its source as it is now: a fault may have been planted there."""
    tree = ast.fix_missing_locations(_Transformer().visit(ast.parse(function.src)))
    lines, first = inspect.getsourcelines(function.fn)
    before = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))  # decorators
    ast.increment_lineno(tree, first + before - 1)
    found: dict[str, Any] = {}
    exec(compile(tree, function.fn.__code__.co_filename, "exec"), scope, found)  # noqa: S102
    return found[function.__name__]


_scopes: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}


def _scope(names: dict[str, Any]) -> dict[str, Any]:
    """A module's names, as the interpreter has them; the same again while the sources of its functions are the same."""
    key = id(names), tuple(f.src for f in names.values() if isinstance(f, GluonJITFunction))
    if key in _scopes:
        return _scopes[key]
    scope = _scopes[key] = vars(interpreter) | names | {"_assigned": _assigned}
    for name, value in names.items():
        for real, ours in _STANDS_FOR:
            if value is real:
                scope[name] = ours
        if name in _BY_NAME:
            scope[name] = _BY_NAME[name]
        if isinstance(value, tl.constexpr):
            scope[name] = value.value
        if isinstance(value, GluonJITFunction):
            home = value.fn.__globals__
            scope[name] = _rewritten(value, scope) if home is names else _scope(home)[value.__name__]
    return scope


class _Kernel(interpreter.InterpretedFunction):  # type: ignore[misc, type-arg]
    """What the interpreter launches: nothing is left to be rewritten."""

    def __init__(self, function: Any, arg_names: Sequence[str]) -> None:
        self.fn, self.arg_names = function, arg_names
        self.pre_run_hooks: list[Any] = []

    def rewrite(self) -> Any:
        return self.fn


class _Launches:
    """What :func:`interpreted` was asked for, and the events of the last launch's programs."""

    def __init__(
        self, seed: int, assembly: Callable[..., Any], any_tile: bool, bounded: Callable[[str], Sequence[str]]
    ) -> None:
        self.seed, self.assembly, self.any_tile, self.bounded = seed, assembly, any_tile, bounded
        self.numbers = itertools.count()
        self.events: list[list[Event]] = []

    def inline_asm(self, asm: Any, constraints: Any, args: Sequence[Any], dtype: Any, *_: Any, **__: Any) -> Any:
        return self.assembly(getattr(asm, "value", asm), args, dtype)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        names = kernel.fn.__globals__
        function = _scope(names)[kernel.__name__]
        files = {f.fn.__code__.co_filename for f in names.values() if isinstance(f, GluonJITFunction)}
        bounded = self.bounded(kernel.__name__)
        args = tuple(Bounded(a) if name in bounded else a for name, a in zip(kernel.arg_names, args, strict=False))
        args = tuple(Tiles(a) if hasattr(a, "block_shape") else a for a in args)
        self.events = []

        def begin() -> None:
            if self.events:
                Program.current.finish(Program.current.main)
            number, warps = next(self.numbers), constants.get("num_warps", 4)
            Program.current = Program(number, self.seed, warps, kernel.__name__, files, self.any_tile)
            self.events.append(Program.current.events)

        builder: Any = _Builder()
        builder.begin, semantic = begin, _Semantic(builder)
        try:
            with (  # for this launch alone: other kernels are Triton's, whose types have no layouts
                mock.patch.object(interpreter, "interpreter_builder", builder),
                mock.patch.object(interpreter, "interpreter_semantic", semantic),
                mock.patch.object(interpreter, "TritonSemantic", lambda _: semantic),  # which Triton 3.6 makes anew
                mock.patch.object(tl, "inline_asm_elementwise", self.inline_asm),
            ):
                _Kernel(function, kernel.arg_names).run(*args, grid=grid, warmup=False, **constants)
            Program.current.finish(Program.current.main)
        except interpreter.InterpreterError as error:
            cause = error.__cause__
            if isinstance(cause, GluonError):
                raise cause from None
            if "ayout" in str(cause):  # the front end's
                raise GluonError("layout", f"{cause}, at {Program.current.place()}") from cause
            raise


def _no_assembly(asm: str, *_: Any) -> Any:
    raise GluonError("not interpreted", f"inline assembly {asm!r}")


@contextlib.contextmanager
def interpreted(
    seed: int = 0,
    *,
    assembly: Callable[..., Any] = _no_assembly,
    any_tile: bool = False,
    bounded: Callable[[str], Sequence[str]] = lambda _: (),
) -> Iterator[_Launches]:
    """Within the context a launch of a Gluon kernel runs in the interpreter, which raises where the kernel is wrong.

    Args:
        seed: which of the orders that the machine allows; see the module.
        assembly: ``assembly(asm, args, dtype)`` -> what inline assembly gives.
        any_tile: let wgmma multiply tiles of any shape, so that tests may have small ones.
        bounded: of a kernel's name, its arguments that are known to be small: see ``kernelbook.lab.watched_memory``.

    Raises:
        RuntimeError: kernels are compiled in this process.
    """
    if not runtime.INTERPRET:
        raise RuntimeError("interpreted: kernels are compiled in this process; start Python with TRITON_INTERPRET=1")
    launches = _Launches(seed, assembly, any_tile, bounded)
    with (
        mock.patch.object(GluonJITFunction, "run", lambda kernel, *args, **how: launches.run(kernel, *args, **how)),
        # Its own hash is one of the sources of what it calls, and knows nothing that is interpreted.
        mock.patch.object(GluonJITFunction, "__hash__", object.__hash__),
    ):
        yield launches


_enabled = contextlib.ExitStack()  # never closed


def enable() -> None:
    """From here on, in this process, launches of Gluon kernels run in the interpreter; on a GPU nothing changes."""
    if runtime.INTERPRET:
        _enabled.enter_context(interpreted())


def interpret(launch: Any, *args: Any, seed: int = 0, **constants: Any) -> list[list[Event]]:
    """Runs one launch of a Gluon kernel in the interpreter -> for each of its programs what happened, in its order.

    Args:
        launch: ``kernel[grid]``.
        args, constants: of the launch; ``num_warps`` too.
        seed: see :func:`interpreted`.

    Raises:
        GluonError: the kernel does what it may not.
        RuntimeError: kernels are compiled in this process.
    """
    with interpreted(seed) as launches:
        launch(*args, **constants)
    return launches.events
