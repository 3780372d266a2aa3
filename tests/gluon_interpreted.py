"""Kernels in Gluon, run by Triton's interpreter, which knows none.

What a kernel says of layouts is left out, and the rest is Triton's language, so that ``watched_memory`` watches it too. What the
interpreter does not have is here: assembly of ``packed`` by what it is to give, products of tensor cores, shared memory, copies
of tiles by descriptors, barriers there, partitions of warps. One partition runs at a time, until it waits: the last one first, which
copies, and so as far ahead of the others as it can be; in every third program the first one first.

The order of what happens beside the program is the worst that is allowed. A copy to shared memory destroys what is there when
it is issued, and brings its values when somebody waits for it. An asynchronous product reads its operands until somebody waits
for it, so nobody may write there before, and nobody may look at its result. Tensor cores read what threads have stored once
these have fenced it and then met. A tile arrives only when nobody can go on without it, and first what somebody waits for, in one program the oldest, in the next
the newest, and in every third one at once.
"""

import ast
import contextlib
import functools
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import interpreter

from kernelbook.attention import kernels_hopper
from kernelbook.lab.watched_memory import Bounded
from kernelbook.packed import kernels, kernels_nvidia

# A matrix has fewer than 2^31 elements (``products.plan``), and they are counted from its first one; strides that ``op`` checks.
BOUNDED = {
    "_one_matrix_kernel": ("N", "K", "groups", "stride_xm"),
    "_some_rows_kernel": ("N", "K", "stride_xm"),
}


class WrongOrderError(Exception):
    """Something is read or overwritten that may not be yet, or lies outside of its memory."""


def _tensor(data: np.ndarray, dtype: Any, scalar: bool = False) -> Any:
    shape = [*data.shape]
    return tl.tensor(interpreter.TensorHandle(data, dtype), dtype if scalar else tl.block_type(dtype, shape))


# --- shared memory --------------------------------------------------------------------------------------------------


class _Partition:
    """What warps of one kind have under way, and what they wait for."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[_Slot] = []  # which are being copied out of shared memory
        self.stored: list[_Slot] = []  # and not fenced; then fenced, and the threads have not met since
        self.fenced: list[_Slot] = []
        self.waits: Callable[[], bool] = lambda: False
        self.barrier: Barrier | None = None
        self.asked = 0  # which counter, last
        self.turn = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.done = self.cancelled = False


_numbers = itertools.count()


class _Program:
    """What is under way in the program that runs."""

    def __init__(self) -> None:
        self.copies: list[list[tuple[Shared, np.ndarray]]] = [[]]  # by group, the last one is open
        self.arriving: list[tuple[Barrier, Callable[[], None]]] = []
        self.here = _Partition()
        self.partitions = [self.here]
        self.scheduler = threading.Semaphore(0)
        self.pairs = self.filling = None
        self.number = next(_numbers)
        self.barriers: list[Barrier] = []  # that are not fenced since they were made


_program = _Program()


class _Slot:
    """A stretch of shared memory that is written as a whole: who may read it."""

    def __init__(self) -> None:
        self.visible = True  # to tensor cores


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: np.ndarray, dtype: Any, slots: list[_Slot]) -> None:
        self.data, self.dtype, self.slots = data, dtype, slots

    @classmethod
    def allocate(
        cls, dtype: Any, shape: Sequence[int], layout: Any, value: Any = None
    ) -> "Shared | Barriers | Barrier":
        if dtype == tl.int64:
            return Barriers(int(shape[0])) if len(shape) > 1 else Barrier()
        count = int(shape[0])
        kind = interpreter._get_np_dtype(dtype)
        memory = cls(np.empty([int(n) for n in shape], kind), dtype, [_Slot() for _ in range(count)])
        memory.data.view(np.uint8)[...] = 0xFF  # NaN, or minus one
        if value is not None:
            memory.store(value)
        return memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, i: Any) -> "Shared":
        i = operator.index(i)
        if not 0 <= i < len(self.data):
            raise WrongOrderError(f"part {i} of shared memory that has {len(self.data)}")
        return Shared(self.data[i], self.dtype, [self.slots[i]])

    def slice(self, start: Any, length: int) -> "Shared":
        start = operator.index(start)
        if not 0 <= start <= start + length <= len(self.data):
            raise WrongOrderError(f"rows {start} to {start + length} of shared memory that has {len(self.data)}")
        return Shared(self.data[start : start + length], self.dtype, self.slots)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.transpose(order), self.dtype, self.slots)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Shared":
        return Shared(self.data.view(interpreter._get_np_dtype(dtype)).reshape(shape), dtype, self.slots)

    def overwrite(self, data: np.ndarray | None) -> None:
        """What threads store is for tensor cores only behind a fence and a barrier; without data nobody may read it."""
        self.check_nobody_reads()
        if data is None:
            self.data[...] = np.frombuffer(b"\xff" * self.data.itemsize, self.data.dtype)[0]
        else:
            self.data[...] = data
        for slot in self.slots:
            slot.visible = False
            _program.here.stored.append(slot)

    def check_nobody_reads(self) -> None:
        for part in _program.partitions:
            if not {*self.slots}.isdisjoint([*part.stores, *(s for product in part.products for s in product.slots)]):
                raise WrongOrderError("shared memory is written that a product or a copy may still read")

    def store(self, value: Any) -> None:
        self.overwrite(value.handle.data.astype(self.data.dtype, copy=False))

    def load(self, layout: Any) -> Any:
        return _tensor(self.data.copy(), self.dtype)

    def operand(self) -> np.ndarray:
        if not all(slot.visible for slot in self.slots):
            raise WrongOrderError("tensor cores read what was stored without a fence and then a barrier")
        return self.data.astype(np.float32)


class _Copies:
    """The module async_copy."""

    @staticmethod
    def async_copy_global_to_shared(memory: Shared, pointers: Any, mask: Any = None, **_: Any) -> None:
        values = tl.load(pointers, mask=mask, other=None if mask is None else 0)
        _program.copies[-1].append((memory, values.handle.data.astype(memory.data.dtype, copy=False)))
        memory.overwrite(None)

    @staticmethod
    def commit_group() -> None:
        _program.copies.append([])

    @staticmethod
    def wait_group(outstanding: Any) -> None:
        here = max(0, len(_program.copies) - 1 - operator.index(outstanding))
        for group in _program.copies[:here]:
            for memory, values in group:
                memory.overwrite(values)
        del _program.copies[:here]


# --- tiles, barriers, partitions --------------------------------------------------------------------------------------


class Tiles:
    """A descriptor."""

    def __init__(self, descriptor: Any) -> None:
        base = descriptor.base
        self.data = base.detach().as_strided([*descriptor.shape], [*descriptor.strides]).numpy()
        self.block = [*descriptor.block_shape]
        self.dtype = {torch.float16: tl.float16, torch.float32: tl.float32}[base.dtype]

    def part(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor, and of a tile: what both have."""
        begins = [operator.index(i) for i in at]
        spans = [
            (max(0, i), max(0, min(i + n, size)))
            for i, n, size in zip(begins, self.block, self.data.shape, strict=True)
        ]
        return (
            tuple(slice(low, max(low, high)) for low, high in spans),
            tuple(slice(low - i, max(low, high) - i) for (low, high), i in zip(spans, begins, strict=True)),
        )


class Barrier:
    """An mbarrier: its phase ends when so many have arrived and all bytes that were announced are there."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def arrive(self, bytes: int = 0, arrivals: int = 1) -> None:
        if not self.count:
            raise WrongOrderError("a barrier is used that nobody has made")
        self.bytes += bytes
        self.missing -= arrivals
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = 1 - self.phase, self.count


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]
        self.shape = (count, 1)

    def index(self, i: Any) -> Barrier:
        i = operator.index(i)
        if not 0 <= i < len(self.barriers):
            raise WrongOrderError(f"barrier {i} of {len(self.barriers)}")
        return self.barriers[i]


class _MBarrier:
    """The module mbarrier."""

    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count
        _program.barriers.append(barrier)

    @staticmethod
    def expect(barrier: Barrier, bytes: Any) -> None:
        barrier.arrive(operator.index(bytes))

    @staticmethod
    def arrive(barrier: Barrier) -> None:
        barrier.arrive()

    @staticmethod
    def wait(barrier: Barrier, phase: Any) -> None:
        phase, here = operator.index(phase), _program.here
        if phase not in (0, 1):
            raise WrongOrderError("the parity of a phase is 0 or 1")
        here.barrier = barrier
        here.waits = lambda: barrier.phase == phase
        if here.waits():
            _program.scheduler.release()
            here.turn.acquire()
        if here.cancelled:
            raise SystemExit


class _Tma:
    """The module tma."""

    @staticmethod
    def async_copy_global_to_shared(tiles: Tiles, at: Sequence[Any], barrier: Barrier, memory: Shared) -> None:
        if barrier in _program.barriers:
            raise WrongOrderError("a copy is to arrive at a barrier that was not fenced")
        memory.check_nobody_reads()
        values = np.zeros(tiles.block, tiles.data.dtype)
        source, target = tiles.part(at)
        values[target] = tiles.data[source]
        memory.data[...] = np.frombuffer(b"\xff" * memory.data.itemsize, memory.data.dtype)[0]
        for slot in memory.slots:
            slot.visible = False

        def arrived() -> None:
            memory.data[...] = values.reshape(memory.data.shape)
            for slot in memory.slots:
                slot.visible = True
            barrier.arrive(-values.nbytes, 0)

        _program.arriving.append((barrier, arrived))
        if _program.number % 3 == 2:
            _program.arriving.pop()[1]()

    @staticmethod
    def async_copy_shared_to_global(tiles: Tiles, at: Sequence[Any], memory: Shared) -> None:
        here = _program.here
        if not all(slot.visible or slot in here.fenced for slot in memory.slots):
            raise WrongOrderError("what threads have stored is copied without a fence")
        here.stores += memory.slots
        target, source = tiles.part(at)
        tiles.data[target] = memory.data.reshape(tiles.block)[source]

    @staticmethod
    def store_wait(outstanding: int) -> None:
        _program.here.stores.clear()


def _warp_specialize(functions: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    program, trace = _program, sys.gettrace()

    def run(part: _Partition, function: Any, args: tuple[Any, ...]) -> None:
        sys.settrace(trace)
        part.turn.acquire()
        try:
            if not part.cancelled:
                function(*args)
            if part.stores and not part.cancelled:
                raise WrongOrderError("a program ends while its shared memory is copied")
        except SystemExit:
            pass
        except BaseException as error:
            part.error = error
        part.done = True
        program.scheduler.release()

    parts = program.partitions = [_Partition() for _ in functions]
    for part, (function, args) in zip(parts, functions, strict=True):
        threading.Thread(target=run, args=(part, function, args), daemon=True).start()

    def go_on(part: _Partition) -> None:
        program.here = part
        part.turn.release()
        program.scheduler.acquire()

    try:
        while not all(part.done for part in parts):
            order = parts if program.number % 3 == 2 else parts[::-1]
            ready = next((part for part in order if not part.done and not part.waits()), None)
            if ready is not None:
                go_on(ready)
                if ready.error is not None:
                    raise ready.error
            elif program.arriving:
                wanted = [part.barrier for part in parts if not part.done]
                those = [a for a in program.arriving if a[0] in wanted] or program.arriving
                tile = those[-(program.number % 3)]
                program.arriving.remove(tile)
                tile[1]()
            else:
                raise WrongOrderError("partitions wait for each other for ever")
        if program.arriving:
            raise WrongOrderError("a program ends while its shared memory is written")
    finally:
        for part in parts:
            if not part.done:
                part.cancelled = True
                go_on(part)


# --- tensor cores ---------------------------------------------------------------------------------------------------


class Product:
    """The result of a product that may be under way."""

    def __init__(self, value: Any, slots: list[_Slot]) -> None:
        self._value, self.slots = value, slots

    def __getattr__(self, name: str) -> Any:
        raise WrongOrderError("the result of a product is used before anybody waits for it")


def _warpgroup_mma(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    left = a.operand() if isinstance(a, Shared) else a.handle.data.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        product = left @ b.operand()
        if use_acc:
            product = (acc._value if isinstance(acc, Product) else acc).handle.data + product
    if not is_async:
        return _tensor(product, tl.float32)
    products = _program.here.products
    products.append(Product(_tensor(product, tl.float32), [*getattr(a, "slots", ()), *b.slots]))
    return products[-1]


def _warpgroup_mma_wait(outstanding: Any, deps: Sequence[Any]) -> Any:
    products = _program.here.products
    del products[: max(0, len(products) - operator.index(outstanding))]
    found = [d._value if isinstance(d, Product) and d not in products else d for d in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _mma_v2(a: Any, b: Any, acc: Any) -> Any:
    with np.errstate(invalid="ignore"):
        product = a.handle.data.astype(np.float32) @ b.handle.data.astype(np.float32)
    return _tensor(product + acc.handle.data, tl.float32)


def _fence() -> None:
    here = _program.here
    here.fenced += here.stored
    here.stored = []
    _program.barriers = []


def _barrier() -> None:
    here = _program.here
    for slot in here.fenced:
        slot.visible = slot not in here.stored
    here.fenced = []
    if _program.filling is not None:
        _program.pairs, _program.filling = _program.filling, None


# --- assembly -------------------------------------------------------------------------------------------------------


def _words(tables: Sequence[np.ndarray], words: np.ndarray) -> list[np.ndarray]:
    """Eight elements of each word by sixteen values of 16 bits, whose low bytes are in four registers, the high ones in four."""
    registers = [np.asarray(t).astype(np.int64) & 0xFFFFFFFF for t in tables]

    def value(code: np.ndarray) -> np.ndarray:
        low, high = (
            np.choose(code // 4, np.broadcast_arrays(*part, code)[:4]) >> (code % 4 * 8) & 0xFF
            for part in (registers[:4], registers[4:])
        )
        return low | high << 8

    words = words.astype(np.int64) & 0xFFFFFFFF
    # The even element is the high half of its byte.
    elements = [value(words >> 4 * (j ^ 1) & 15) for j in range(8)]
    return [elements[2 * i] | elements[2 * i + 1] << 16 for i in range(4)]


def _int32(bits: np.ndarray) -> np.ndarray:
    return (bits & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def _decode(word: np.ndarray, _first: np.ndarray, _second: np.ndarray, *tables: np.ndarray) -> list[np.ndarray]:
    return [_int32(p) for p in _words(tables, word)]


def _decode_scaled(word: np.ndarray, first: np.ndarray, second: np.ndarray, *tables: np.ndarray) -> list[np.ndarray]:
    def half(bits: np.ndarray, h: int) -> np.ndarray:
        return (np.asarray(bits).astype(np.int64) >> 16 * h & 0xFFFF).astype(np.uint16).view(np.float16).astype(float)

    pairs = []
    for pair in _words(tables, word):
        bits = []
        for h in range(2):  # two fused multiplications and additions in float16
            rest = (half(pair, h) * half(second, h)).astype(np.float16).astype(float)
            value = (half(pair, h) * half(first, h) + rest).astype(np.float16)
            bits.append(value.view(np.uint16).astype(np.int64))
        pairs.append(_int32(bits[0] | bits[1] << 16))
    return pairs


def _table(*values: np.ndarray) -> list[np.ndarray]:
    *code, scale = values
    bits = [(c * scale).astype(np.float32).astype(np.float16).view(np.uint16).astype(np.int64) for c in code]
    return [
        _int32(functools.reduce(operator.or_, ((bits[4 * i + j] >> shift & 0xFF) << 8 * j for j in range(4))))
        for shift in (0, 8)
        for i in range(4)
    ]


def _fill(pair: np.ndarray, byte: np.ndarray, begin: np.ndarray) -> list[np.ndarray]:
    _program.filling = np.full(256, -1, np.int32)
    _program.filling[byte] = pair
    return [pair]


def _look_up(word: np.ndarray, begin: np.ndarray) -> list[np.ndarray]:
    if _program.pairs is None:
        raise WrongOrderError("the table of pairs is read before the threads that fill it have met")
    return [_program.pairs[(word.astype(np.int64) >> 8 * i) & 0xFF] for i in range(4)]


def _ask(counter: Any) -> Any:
    """Programs run one after the other: what a counter is not yet, it never becomes."""
    here, asked = _program.here, counter.handle.data.item()
    if here.asked == asked:
        raise WrongOrderError("a program waits for a turn that nobody will pass on to it")
    here.asked = asked
    return tl.atomic_add(counter, 0, sem="acquire", _semantic=interpreter.interpreter_semantic)


def _pass(counter: Any, turn: Any) -> Any:
    passed = turn.handle.data >= 0 if isinstance(turn, tl.tensor) else turn >= 0
    if not passed:
        return turn
    return tl.atomic_xchg(counter, turn, sem="release", _semantic=interpreter.interpreter_semantic)


_TURNS: dict[str, Callable[..., Any]] = {
    kernels_hopper.ASK.value: _ask,
    kernels_hopper.PASS.value: _pass,
}


def _thread_barrier() -> None:
    tl.debug_barrier(_semantic=interpreter.interpreter_semantic)


_ASSEMBLY: dict[str, Callable[..., list[np.ndarray]]] = {
    kernels.DECODE.value: _decode,
    kernels.DECODE_FP16.value: _decode_scaled,
    kernels.TABLE_FP16.value: _table,
    kernels.LOOKUP.value: lambda words, *tables: [_int32(p) for p in _words(tables, words)],
    kernels_nvidia.PAIRS.value: lambda program: [np.zeros_like(program)],
    kernels_nvidia.FILL.value: _fill,
    kernels_nvidia.LOOK_UP.value: _look_up,
}


def _inline_asm_elementwise(
    asm: Any, constraints: Any, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    asm = getattr(asm, "value", asm)
    if asm in _TURNS:
        return _TURNS[asm](*args)
    data = np.broadcast_arrays(*(arg.handle.data for arg in args))
    scalar = not any(arg.type.is_block() for arg in args)
    if "bar.warp.sync" in asm:
        return None
    found = [_tensor(d, tl.int32, scalar) for d in _ASSEMBLY[asm](*data)]
    return tuple(found) if isinstance(dtype, tuple) else found[0]


# --- the language ---------------------------------------------------------------------------------------------------


class _Layout:
    def __init__(self, *args: Any, instr_shape: Sequence[int] | None = None, **_: Any) -> None:
        self.instr_shape = args[2] if instr_shape is None and len(args) > 2 else instr_shape

    @staticmethod
    def get_default_for(*_: Any) -> None:
        return None


class _Gluon:
    """The module gluon.language: Triton's, without layouts."""

    constexpr = tl.constexpr
    static_range, range = range, range
    allocate_shared_memory = staticmethod(Shared.allocate)
    warp_specialize = staticmethod(_warp_specialize)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return _Layout
        if name in ("max_contiguous", "multiple_of", "max_constancy", "convert_layout"):
            return lambda value, *_, **__: value
        function = getattr(tl, name)
        if name not in ("arange", "zeros", "full"):
            return function
        without = {"arange": 2, "zeros": 2, "full": 3}[name]
        return lambda *args, **_: function(*args[:without])

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        return (a + b - 1) // b


def _rewritten(function: Any, scope: dict[str, Any]) -> Any:
    """The function that the interpreter calls, of its source as it is now: a fault may have been planted there."""
    tree = ast.parse(function.src)
    tree = ast.fix_missing_locations(interpreter.FunctionRewriter.ast_transformer.visit(tree))
    _, line = _place(function)
    ast.increment_lineno(tree, line - 1)
    found: dict[str, Any] = {}
    exec(compile(tree, sys.modules[function.__module__].__file__ or "", "exec"), scope, found)  # noqa: S102
    return found[function.__name__]


def _place(function: Any) -> tuple[str, int]:
    from triton.runtime.jit import get_jit_fn_file_line

    return get_jit_fn_file_line(function)


@functools.cache
def _scope(module: Any, sources: tuple[str, ...]) -> dict[str, Any]:
    """The module's names, as the interpreter has them."""
    ours = {
        "gl": _Gluon(), "async_copy": _Copies, "fence_async_shared": _fence, "warpgroup_mma": _warpgroup_mma,
        "warpgroup_mma_wait": _warpgroup_mma_wait, "mma_v2": _mma_v2, "mbarrier": _MBarrier, "tma": _Tma,
        "thread_barrier": _thread_barrier,
    }  # fmt: skip
    scope = vars(interpreter) | vars(module) | {name: value for name, value in ours.items() if name in vars(module)}
    for name, function in vars(module).items():
        if isinstance(function, GluonJITFunction):
            if function.__module__ == module.__name__:
                scope[name] = _rewritten(function, scope)
            else:
                scope[name] = _scope(sys.modules[function.__module__], sources)[function.__name__]
    return scope


class _Kernel(interpreter.InterpretedFunction):  # type: ignore[type-arg]
    """What the interpreter launches: nothing is left to be rewritten."""

    def __init__(self, function: Any, arg_names: Sequence[str]) -> None:
        self.fn, self.arg_names, self.pre_run_hooks = function, arg_names, []

    def rewrite(self) -> Any:
        return self.fn


def _run(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
    module = sys.modules[kernel.__module__]
    sources = tuple(f.src for f in vars(module).values() if isinstance(f, GluonJITFunction))
    function = _scope(module, sources)[kernel.__name__]
    bounded = BOUNDED.get(kernel.__name__, ("N", "K"))
    args = tuple(Bounded(a) if name in bounded else a for name, a in zip(kernel.arg_names, args, strict=False))
    args = tuple(Tiles(a) if hasattr(a, "block_shape") else a for a in args)
    _Kernel(function, kernel.arg_names).run(*args, grid=grid, warmup=False, **constants)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within the context the interpreter runs kernels in Gluon too."""
    global _numbers
    _numbers = itertools.count()
    set_grid_idx, create_barrier = (
        getattr(interpreter.InterpreterBuilder, n) for n in ("set_grid_idx", "create_barrier")
    )

    def begin(self: Any, *place: int) -> None:
        global _program
        _program = _Program()
        set_grid_idx(self, *place)

    def barrier(self: Any) -> Any:
        _barrier()
        return create_barrier(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GluonJITFunction, "run", _run)
        # Its own hash is one of the sources of what it calls, and knows nothing that is interpreted.
        patch.setattr(GluonJITFunction, "__hash__", object.__hash__)
        patch.setattr(tl.block_type, "layout", None, raising=False)
        patch.setattr(tl, "inline_asm_elementwise", _inline_asm_elementwise)
        patch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", begin)
        patch.setattr(interpreter.InterpreterBuilder, "create_barrier", barrier)
        yield
