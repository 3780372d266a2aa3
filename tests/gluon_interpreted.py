"""Kernels in Gluon, run by Triton's interpreter, which knows none: for those without partitions of warps.

What a kernel says of layouts is left out, and the rest is Triton's language, so that ``watched_memory`` watches it too. What the
interpreter does not have is here: assembly of ``packed`` by what it is to give, products of tensor cores, shared memory.

The order of what happens beside the program is the worst that is allowed. A copy to shared memory destroys what is there when
it is issued, and brings its values when somebody waits for it. An asynchronous product reads its operands until somebody waits
for it, so nobody may write there before, and nobody may look at its result. Tensor cores read what threads have stored once
these have fenced it and then met.
"""

import ast
import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import interpreter
from watched_memory import Bounded

from kernelbook.packed import kernels, kernels_hopper, kernels_nvidia

# A matrix has fewer than 2^31 elements (``products.plan``), and they are counted from its first one; strides that ``op`` checks.
BOUNDED = {"_one_matrix_kernel": ("N", "K", "groups", "stride_xm")}


class WrongOrderError(Exception):
    """Something is read or overwritten that may not be yet, or lies outside of its memory."""


def _tensor(data: np.ndarray, dtype: Any, scalar: bool = False) -> Any:
    shape = [*data.shape]
    return tl.tensor(interpreter.TensorHandle(data, dtype), dtype if scalar else tl.block_type(dtype, shape))


# --- shared memory --------------------------------------------------------------------------------------------------


class _Program:
    """What is under way in the program that runs."""

    def __init__(self) -> None:
        self.copies: list[list[tuple[Shared, np.ndarray]]] = [[]]  # by group, the last one is open
        self.products: list[Product] = []
        self.stored: list[_Slot] = []  # and not fenced; then fenced, and the threads have not met since
        self.fenced: list[_Slot] = []
        self.pairs = self.filling = None


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
    def allocate(cls, dtype: Any, shape: Sequence[int], layout: Any, value: Any = None) -> "Shared":
        count = int(shape[0]) if len(shape) > 2 else 1
        kind = interpreter._get_np_dtype(dtype)
        memory = cls(np.empty([int(n) for n in shape], kind), dtype, [_Slot() for _ in range(count)])
        memory.data.view(np.uint8)[...] = 0xFF  # NaN, or minus one
        if value is not None:
            memory.store(value)
        return memory

    def index(self, i: Any) -> "Shared":
        i = operator.index(i)
        if not 0 <= i < len(self.data):
            raise WrongOrderError(f"part {i} of shared memory that has {len(self.data)}")
        return Shared(self.data[i], self.dtype, [self.slots[i]])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.transpose(order), self.dtype, self.slots)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Shared":
        return Shared(self.data.view(interpreter._get_np_dtype(dtype)).reshape(shape), dtype, self.slots)

    def overwrite(self, data: np.ndarray | None) -> None:
        """What threads store is for tensor cores only behind a fence and a barrier; without data nobody may read it."""
        for product in _program.products:
            if not {*self.slots}.isdisjoint(product.slots):
                raise WrongOrderError("shared memory is written that a product may still read")
        if data is None:
            self.data[...] = np.frombuffer(b"\xff" * self.data.itemsize, self.data.dtype)[0]
        else:
            self.data[...] = data
        for slot in self.slots:
            slot.visible = False
            _program.stored.append(slot)

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


# --- tensor cores ---------------------------------------------------------------------------------------------------


class Product:
    """The result of a product that may be under way."""

    def __init__(self, value: Any, slots: list[_Slot]) -> None:
        self._value, self.slots = value, slots

    def __getattr__(self, name: str) -> Any:
        raise WrongOrderError("the result of a product is used before anybody waits for it")


def _warpgroup_mma(a: Shared, b: Shared, acc: Any, is_async: bool = False) -> Any:
    before = acc._value if isinstance(acc, Product) else acc
    with np.errstate(invalid="ignore"):
        found = _tensor(before.handle.data + a.operand() @ b.operand(), tl.float32)
    if not is_async:
        return found
    _program.products.append(Product(found, [*a.slots, *b.slots]))
    return _program.products[-1]


def _warpgroup_mma_wait(outstanding: Any, deps: Sequence[Any]) -> Any:
    del _program.products[: max(0, len(_program.products) - operator.index(outstanding))]
    (result,) = deps
    return result if result in _program.products or not isinstance(result, Product) else result._value


def _mma_v2(a: Any, b: Any, acc: Any) -> Any:
    with np.errstate(invalid="ignore"):
        product = a.handle.data.astype(np.float32) @ b.handle.data.astype(np.float32)
    return _tensor(product + acc.handle.data, tl.float32)


def _fence() -> None:
    _program.fenced += _program.stored
    _program.stored = []


def _barrier() -> None:
    for slot in _program.fenced:
        slot.visible = slot not in _program.stored
    _program.fenced = []
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
    data = np.broadcast_arrays(*(arg.handle.data for arg in args))
    scalar = not any(arg.type.is_block() for arg in args)
    if "bar.warp.sync" in asm:
        return None
    found = [_tensor(d, tl.int32, scalar) for d in _ASSEMBLY[asm](*data)]
    return tuple(found) if isinstance(dtype, tuple) else found[0]


# --- the language ---------------------------------------------------------------------------------------------------


class _Gluon:
    """The module gluon.language: Triton's, without layouts."""

    constexpr = tl.constexpr
    static_range, range = range, range
    allocate_shared_memory = staticmethod(Shared.allocate)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_, **__: None
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
    exec(compile(tree, sys.modules[function.__module__].__file__ or "", "exec"), scope, found)
    return found[function.__name__]


def _place(function: Any) -> tuple[str, int]:
    from triton.runtime.jit import get_jit_fn_file_line

    return get_jit_fn_file_line(function)


@functools.cache
def _scope(module: Any, sources: tuple[str, ...]) -> dict[str, Any]:
    """The module's names, as the interpreter has them."""
    ours = {
        "gl": _Gluon(), "async_copy": _Copies, "fence_async_shared": _fence, "warpgroup_mma": _warpgroup_mma,
        "warpgroup_mma_wait": _warpgroup_mma_wait, "mma_v2": _mma_v2,
    }  # fmt: skip
    scope = vars(interpreter) | vars(module) | {name: value for name, value in ours.items() if name in vars(module)}
    for name, function in vars(module).items():
        if isinstance(function, GluonJITFunction):
            scope[name] = _rewritten(function, scope)
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
    _Kernel(function, kernel.arg_names).run(*args, grid=grid, warmup=False, **constants)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within the context the interpreter runs kernels in Gluon too."""
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
        patch.setattr(tl, "inline_asm_elementwise", _inline_asm_elementwise)
        patch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", begin)
        patch.setattr(interpreter.InterpreterBuilder, "create_barrier", barrier)
        yield
