"""bfloat16, TF32 and loops in Triton's interpreter as a GPU has them: results are rounded, counters are tensors.

Triton keeps bfloat16 as 16 bits and adds these as integers. Here a value is float32 that has bfloat16's eight bits; memory
holds two bytes an element, as on a GPU. A product of float32 tiles multiplies TF32 (ten bits) unless it asks for
``input_precision="ieee"``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelbook import runtime  # noqa: F401  before Triton, which it sets up

# isort: split
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

_UNSIGNED = tl.pointer_type(tl.uint16)
# Methods of the builder whose results are rounded.
_ROUNDED = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_dot", "create_precise_divf")


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the 16 bits of float32 values, rounded to the nearest even."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    return _values(_bits(values)).reshape(values.shape)


def _is_bfloat16(handle: Any) -> bool:
    return handle.dtype.scalar is tl.bfloat16


def _in_memory(pointers: Any) -> Any | None:
    """Return the same addresses as pointers to 16 bits; None for those of other types."""
    return interpreter.TensorHandle(pointers.data, _UNSIGNED) if pointers.get_element_ty() is tl.bfloat16 else None


def represent() -> None:
    """Have the interpreter keep bfloat16 as float32, from here on. It comes before what remembers types."""
    np_dtype = interpreter._get_np_dtype
    fits: Callable[..., bool] = getattr(interpreter, "_validate_np_data_size", lambda data, dtype: True)

    wide = np.dtype(np.float32)
    interpreter._get_np_dtype = lambda dtype: wide if dtype.scalar is tl.bfloat16 else np_dtype(dtype)
    interpreter._validate_np_data_size = lambda data, dtype: dtype.scalar is tl.bfloat16 or fits(data, dtype)


def _counting(*bounds: Any) -> Any:
    """``range`` in a kernel. With a bound that is known at the launch only, its counters are tensors, as compiled."""
    bounds = tuple(getattr(bound, "value", bound) for bound in bounds)
    numbers = range(*map(int, bounds))
    if not any(isinstance(bound, tl.tensor) for bound in bounds):
        return numbers
    wide = any(isinstance(bound, tl.tensor) and bound.dtype is tl.int64 for bound in bounds)
    return map(_counter_64 if wide else _counter_32, numbers)


def _counter_32(number: int) -> Any:
    handle: Any = interpreter.TensorHandle(np.array([number], np.int32), tl.int32)
    handle.narrow = "argument"  # to the watch: a product with a size may be too large for it
    return tl.tensor(handle, tl.int32)


def _counter_64(number: int) -> Any:
    return tl.tensor(interpreter.TensorHandle(np.array([number], np.int64), tl.int64), tl.int64)


def compute() -> None:
    """Have the interpreter round what it computes, from here on. It comes after what remembers types, and after the watch."""
    builder = interpreter.InterpreterBuilder

    def rounding(name: str) -> Callable[..., Any]:
        def operation(self: Any, *args: Any) -> Any:
            result = real[name](self, *args)
            if _is_bfloat16(result) and result.data.dtype == np.float32:
                result.data = _round(result.data)
            return result

        return operation

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, most: Any) -> Any:
        if precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar is tl.float32:
            a, b = (
                interpreter.TensorHandle((x.data.view(np.uint32) & 0xFFFFE000).view(np.float32), x.dtype)
                for x in (a, b)
            )
        return rounding("create_dot")(self, a, b, acc, precision, most)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar is not tl.bfloat16:
            return real["cast_impl"](self, source, target) if not _is_bfloat16(source) else interpreter.TensorHandle(
                source.data.astype(interpreter._get_np_dtype(target)), target.scalar
            )  # fmt: skip
        return interpreter.TensorHandle(_round(source.data.astype(np.float32)), tl.bfloat16)

    def convert(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.scalar is tl.bfloat16:
            return cast(self, source, target)
        source = cast(self, source, tl.float32) if _is_bfloat16(source) else source
        return source if target.scalar is tl.float32 else real["create_fp_to_fp"](self, source, target, mode)

    def bitcast(self: Any, source: Any, target: Any) -> Any:
        if _is_bfloat16(source):
            source = interpreter.TensorHandle(_bits(source.data).reshape(source.data.shape), tl.uint16)
        if target.scalar is tl.bfloat16:
            return interpreter.TensorHandle(_values(source.data.view(np.uint16)), tl.bfloat16)
        return real["create_bitcast"](self, source, target)

    def absolute(self: Any, arg: Any) -> Any:
        return (
            interpreter.TensorHandle(np.abs(arg.data), tl.bfloat16)
            if _is_bfloat16(arg)
            else real["create_fabs"](self, arg)
        )

    def load(self: Any, pointers: Any, mask: Any, other: Any, *args: Any, **how: Any) -> Any:
        if (place := _in_memory(pointers)) is None:
            return real["create_masked_load"](self, pointers, mask, other, *args, **how)
        # What nothing was said of is NaN in a block; of a scalar Triton's front end drops ``other=0.0``.
        unsaid = np.full(pointers.data.shape, np.nan if pointers.data.size > 1 else 0)
        filled = unsaid if other is None else other.data
        bits = interpreter.TensorHandle(_bits(np.broadcast_to(filled, pointers.data.shape)), tl.uint16)
        loaded = real["create_masked_load"](self, place, mask, bits, *args, **how)
        return interpreter.TensorHandle(_values(loaded.data), tl.bfloat16)

    def store(self: Any, pointers: Any, value: Any, *how: Any) -> Any:
        if (place := _in_memory(pointers)) is not None:
            pointers, value = place, interpreter.TensorHandle(_bits(value.data).reshape(value.data.shape), tl.uint16)
        return real["create_masked_store"](self, pointers, value, *how)

    def modify(self: Any, op: Any, pointers: Any, *args: Any) -> Any:
        if _in_memory(pointers) is not None:
            raise ValueError("without a GPU there are no atomics on bfloat16: add into float32, and convert afterwards")
        return real["create_atomic_rmw"](self, op, pointers, *args)

    methods = {name: rounding(name) for name in _ROUNDED} | {
        "get_bf16": lambda self, value: interpreter.TensorHandle(_round(np.array([value], np.float32)), tl.bfloat16),
        "create_dot": dot, "cast_impl": cast, "create_fp_to_fp": convert, "create_bitcast": bitcast, "create_fabs": absolute,
        "create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": modify,
    }  # fmt: skip
    real: dict[str, Any] = {
        name: getattr(builder, name) for name in methods if hasattr(builder, name)
    }  # in this Triton
    for name in {*real, "get_bf16"}:  # which Triton's own lacks
        setattr(builder, name, methods[name])
    interpreter.range = _counting  # type: ignore[attr-defined]  # kernels see this module's names, tl.range too
