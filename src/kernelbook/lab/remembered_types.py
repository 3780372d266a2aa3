"""Triton's interpreter decides for every value anew what a launch has few of: types, shapes, what an operation does with two types.

Here that is decided once and remembered, which takes off half of its time. ``test_evidence_memory`` compares it with Triton's own.
It is for Triton 3.7. With another, or without this file, all runs as Triton has it and takes twice as long: where a new Triton breaks
a function of :data:`OURS`, leave that function out.
"""

import builtins
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kernelbook import runtime

# isort: split
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Place = tuple[Any, str]  # a class or module of Triton's, and a name there
of_triton: dict[Place, Any] = {}  # what is there without this file
BUILTIN = core.program_id.__code__  # of the wrapper that all of Triton's builtins have


# --- types ----------------------------------------------------------------------------------------------------------

_blocks: dict[tuple[str, tuple[int, ...]], Any] = {}


def _new_block(cls: Any, *args: Any) -> Any:
    if cls is not core.block_type or len(args) != 2 or not isinstance(args[0], core.dtype):
        return object.__new__(cls)
    element, shape = args
    sizes = shape.values if type(shape) is core.tuple else shape
    key = element.name, builtins.tuple([size.value if type(size) is core.constexpr else size for size in sizes])
    block = _blocks.get(key)
    if block is None:
        block = object.__new__(cls)
        of_triton[core.block_type, "__init__"](block, *args)
        block.shape = _shape(key[1])  # the same one of equal ones
        block.of_tensor = _sizes(key[1])
        _blocks[key] = block
    return block


@functools.cache
def _shape(sizes: tuple[int, ...]) -> Any:
    return core.tuple(sizes)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    if "numel" not in self.__dict__:  # of a subclass
        of_triton[core.block_type, "__init__"](self, element_ty, shape)


def _with_element_ty(self: Any, scalar_ty: Any, known: dict[tuple[str, str], Any] = {}) -> Any:  # noqa: B006
    key = self.name, scalar_ty.name
    if key not in known:
        known[key] = core.block_type(scalar_ty, self.shape)
    return known[key]


def _same_dtype(self: Any, other: Any) -> Any:
    return self is other or of_triton[core.dtype, "__eq__"](self, other)


def _np_dtype(dtype: Any, known: dict[str, Any] = {}) -> Any:  # noqa: B006
    name = dtype.scalar.name
    if name not in known:
        known[name] = of_triton[interpreter, "_get_np_dtype"](dtype)
    return known[name]


# --- values ---------------------------------------------------------------------------------------------------------


@functools.cache
def _sizes(sizes: tuple[int, ...]) -> tuple[Any, ...]:
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensor or _sizes(builtins.tuple(type.shape.values))


def _same_values(self: Any, other: Any) -> Any:
    return core.constexpr(True) if self is other else of_triton[core.tuple, "__eq__"](self, other)


_PLAIN = {core.tensor, core.dtype, int, float, bool, str, type(None)}


def _unwrap_if_constexpr(o: Any) -> Any:
    kind = type(o)
    if kind is core.constexpr:
        return o.value
    return o if kind in _PLAIN else of_triton[core, "_unwrap_if_constexpr"](o)


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None, known: dict[str, int] = {}) -> None:  # noqa: B006
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > known.get(dtype.name, 0):
        self.__post_init__()  # raises if that does not fit
        known[dtype.name] = data.itemsize


# --- operations -----------------------------------------------------------------------------------------------------


def _binary_op_type_checking_impl(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and not (div_or_mod or lhs.dtype.is_ptr()):
        return self.broadcast_impl_value(lhs, rhs)
    return of_triton[TritonSemantic, "binary_op_type_checking_impl"](
        self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    )


def _broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    a, b = lhs.type, rhs.type
    if lhs.shape is rhs.shape:
        return lhs, rhs
    shape = _joint(a, b)
    if shape is None or (a.is_block() and b.is_block() and len(lhs.shape) != len(rhs.shape)):
        return of_triton[TritonSemantic, "broadcast_impl_value"](self, lhs, rhs)
    return _broadcast(self, lhs, shape), _broadcast(self, rhs, shape)


def _broadcast(semantic: Any, value: Any, like: Any) -> Any:
    if value.type.is_block() and value.type.shape is like.shape:
        return value
    kind = core.block_type(value.dtype, like.shape)
    if value.type.is_block():
        return core.tensor(semantic.builder.create_broadcast(value.handle, like.shape.values), kind)
    return core.tensor(semantic.builder.create_splat(kind, value.handle), kind)


def _cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
    source, target = input.dtype, dst_ty.scalar
    if source is target:
        return input
    if source.name in _CAST_FROM and target.name in _CAST_TO and fp_downcast_rounding is None:
        handle = interpreter.TensorHandle(input.handle.data.astype(_np_dtype(target)), target)
        return core.tensor(handle, input.type.with_element_ty(target))
    return of_triton[TritonSemantic, "cast"](self, input, dst_ty, fp_downcast_rounding)


def _expand_dims_of(self: Any, input: Any, axis: int) -> Any:
    if not input.type.is_block():
        return of_triton[TritonSemantic, "expand_dims"](self, input, axis)
    sizes = input.type.shape.values
    kind = core.block_type(input.dtype, [*sizes[:axis], 1, *sizes[axis:]])
    return core.tensor(self.builder.create_expand_dims(input.handle, axis), kind)


def _computation_type_impl(self: Any, *args: Any, known: dict[Any, Any] = {}) -> Any:  # noqa: B006
    key = builtins.tuple([getattr(arg, "name", arg) for arg in args])
    if key not in known:
        known[key] = of_triton[TritonSemantic, "computation_type_impl"](self, *args)
    return known[key]


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if output.itemsize > lhs.data.itemsize and not interpreter._validate_np_data_size(output, dtype):
        output = output.astype(_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


def _splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    if arg.dtype.is_block():
        return of_triton[interpreter.InterpreterBuilder, "create_splat"](self, ret_ty, arg)
    data = np.empty(ret_ty.shape.values, _np_dtype(arg.dtype))
    data[...] = arg.data
    return interpreter.TensorHandle(data, arg.dtype)


def _expand_dims(self: Any, arg: Any, axis: int) -> Any:
    shape = arg.data.shape
    return interpreter.TensorHandle(arg.data.reshape((*shape[:axis], 1, *shape[axis:])), arg.dtype.scalar)


_CAST_FROM = {"fp32", "fp64", *core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}  # which NumPy casts in one step
_CAST_TO = (_CAST_FROM | {"fp16"}) - {"int1"}


def _addptr(self: Any, ptr: Any, offset: Any) -> Any:
    data = offset.data.astype(np.uint64)
    data *= max(1, ptr.get_element_ty().primitive_bitwidth // 8)
    return interpreter.TensorHandle(ptr.data + data, ptr.dtype)


FLOAT, SIGNED, UNSIGNED = range(3)
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("fp16", "bf16", "fp32", "fp64"), FLOAT),
    **dict.fromkeys(core.dtype.SINT_TYPES, SIGNED),
    **dict.fromkeys(core.dtype.UINT_TYPES, UNSIGNED),
}
_ARITHMETIC = {
    "add": ("create_fadd", "create_add"),
    "sub": ("create_fsub", "create_sub"),
    "mul": ("create_fmul", "create_mul"),
}
_COMPARISONS = {
    "lt": ("create_fcmpOLT", "create_icmpSLT", "create_icmpULT"),
    "le": ("create_fcmpOLE", "create_icmpSLE", "create_icmpULE"),
    "gt": ("create_fcmpOGT", "create_icmpSGT", "create_icmpUGT"),
    "ge": ("create_fcmpOGE", "create_icmpSGE", "create_icmpUGE"),
    "eq": ("create_fcmpOEQ", "create_icmpEQ", "create_icmpEQ"),
    "ne": ("create_fcmpUNE", "create_icmpNE", "create_icmpNE"),
}
_BITS = {"and": "create_and", "or": "create_or", "xor": "create_xor"}


def _joint(a: Any, b: Any, known: dict[tuple[str, str], Any] = {}) -> Any:  # noqa: B006
    """The type of what an operation makes of a's elements in the shape that both are broadcast to; None if there is none."""
    if a is b:
        return a
    key = a.name, b.name
    if key not in known:
        sizes = [list(t.shape.values) if t.is_block() else [] for t in (a, b)]
        try:
            shape = list(np.broadcast_shapes(*sizes))
        except ValueError:
            return None
        known[key] = core.block_type(a.scalar, shape) if shape else a
    return known[key]


def _operator(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of two tensors, or of a tensor and a number that takes its dtype: NumPy broadcasts them."""
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    turned = name.startswith("__r") and name != "__rshift__"
    plain = name.strip("_")[turned:]
    creates = _COMPARISONS.get(plain) or _ARITHMETIC.get(plain) or (_BITS[plain],)
    creates = (*creates, creates[-1], creates[-1])  # for floats, signed and unsigned integers
    compares, bits = plain in _COMPARISONS, plain in _BITS

    def number(value: float, dtype: Any) -> Any:
        return builder.get_null_value(dtype) if value == 0 else getattr(builder, f"get_{dtype.name}")(value)

    def of_handles(kind: int, a: Any, b: Any, joint: Any) -> Any:
        handle = getattr(builder, creates[kind])(*((b, a) if turned else (a, b)))
        return core.tensor(handle, joint.with_element_ty(core.int1) if compares else joint)

    def operate(self: Any, other: Any) -> Any:
        if builder.options.sanitize_overflow:
            return slow(self, other, _semantic=semantic)
        dtype: Any = self.dtype
        kind: Any = _KINDS.get(dtype.name)
        fits = kind == SIGNED and dtype.int_bitwidth >= 32 and type(other) is int and -(2**31) <= other < 2**31
        if fits or (kind == FLOAT and type(other) in (int, float) and not bits):
            if not compares or dtype is core.int32 or (dtype is core.float32 and type(other) is int):
                return of_handles(kind, self.handle, number(other, dtype), self.type)
            other = semantic.to_tensor(other)
        if type(other) is core.tensor and (joint := _joint(self.type, other.type)) is not None:
            kinds = kind, _KINDS.get(other.dtype.name)
            if None not in kinds and not (bits and FLOAT in kinds):
                a, b = self, other
                if other.dtype is not dtype:
                    dtype = semantic.computation_type_impl(dtype, False, other.dtype, False, False)
                    kind, joint = _KINDS[dtype.name], joint.with_element_ty(dtype)
                    a, b = semantic.cast(a, dtype), semantic.cast(b, dtype)
                return of_handles(kind, a.handle, b.handle, joint)
            if name == "__add__" and dtype.is_ptr() and kinds[1] == SIGNED:
                return core.tensor(builder.create_addptr(self.handle, other.handle), joint)
        return slow(self, other, _semantic=semantic)

    return operate


def _getitem(slow: Callable[..., Any]) -> Callable[..., Any]:
    semantic = interpreter.interpreter_semantic

    def getitem(self: Any, slices: Any) -> Any:
        if type(slices) is not builtins.tuple or any(
            s is not None and not (type(s) is slice and s.start is s.stop is s.step is None) for s in slices
        ):
            return slow(self, slices, _semantic=semantic)
        for dim, s in enumerate(slices):
            self = semantic.expand_dims(self, dim) if s is None else self
        return self

    return getitem


OPERATORS = {f"__{r}{name}__" for name in (*_ARITHMETIC, *_BITS) for r in ("", "r")} | {
    f"__{name}__" for name in _COMPARISONS
}


@functools.cache
def _patched(obj: Any, name: str, member: Any) -> Any:
    if getattr(member, "__code__", None) is BUILTIN:
        member = member.__wrapped__
    if obj is core.tensor and name == "__getitem__":
        return _getitem(member)
    if obj is core.tensor and name in OPERATORS:
        return _operator(name, member)

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return new_member


@functools.cache
def _builtins_of(pkg: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]


def _patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
    for name in _builtins_of(pkg):
        member = getattr(pkg, name)
        if core.is_builtin(member):
            scope.set_attr(pkg, name, _patched(pkg, name, member))


OURS: dict[Place, Any] = {
    (core.block_type, "__init__"): _init_block,
    (core.block_type, "with_element_ty"): _with_element_ty,
    (core.dtype, "__eq__"): _same_dtype,
    (core.tensor, "__init__"): _init_tensor,
    (core.tuple, "__eq__"): _same_values,
    (core, "_unwrap_if_constexpr"): _unwrap_if_constexpr,
    (TritonSemantic, "binary_op_type_checking_impl"): _binary_op_type_checking_impl,
    (TritonSemantic, "broadcast_impl_value"): _broadcast_impl_value,
    (TritonSemantic, "cast"): _cast,
    (TritonSemantic, "expand_dims"): _expand_dims_of,
    (TritonSemantic, "computation_type_impl"): _computation_type_impl,
    (interpreter, "_get_np_dtype"): _np_dtype,
    (interpreter, "_patch_builtin"): _patch_builtin,
    (interpreter.TensorHandle, "__init__"): _init_handle,
    (interpreter.InterpreterBuilder, "binary_op"): _binary_op,
    (interpreter.InterpreterBuilder, "create_addptr"): _addptr,
    (interpreter.InterpreterBuilder, "create_splat"): _splat,
    (interpreter.InterpreterBuilder, "create_expand_dims"): _expand_dims,
}


def remember() -> None:
    """From here on, in this process."""
    # Other versions make types in other ways.
    if of_triton or not (runtime.INTERPRET and triton.__version__.startswith("3.7.")):
        return
    of_triton.update({(place, name): getattr(place, name) for place, name in OURS})
    core.dtype.of_tensor, core.block_type.of_tensor = _sizes(()), None
    _put(OURS, _new_block)
    for pkg in (tl, core, core.tensor, tl.math, core.tensor_descriptor_base):
        _builtins_of(pkg)  # before any kernel ran, whose functions may stay patched


def _put(functions: dict[Place, Any], new_block: Any) -> None:
    core.block_type.__new__ = new_block
    for (place, name), function in functions.items():
        setattr(place, name, function)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Within the context all is as Triton has it."""
    _put(of_triton, lambda cls, *args: object.__new__(cls))
    try:
        yield
    finally:
        _put(OURS, _new_block)
