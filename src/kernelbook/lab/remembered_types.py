"""Caches in Triton's interpreter, which makes types, shapes and wrappers anew for every value, and asks what two values of one
dtype become: they halve its time.

Python 3.11 and later keep frames in chunks of 16 KiB. Where a kernel is interpreted at the end of a chunk, each call maps another
and unmaps it, which doubles the time again. A launch begins a chunk of its own, with room for all that it calls.

They are for Triton 3.7. With another, or without this file, all runs as Triton has it. ``test_evidence_memory`` compares
the two.
"""

import builtins
import functools
import inspect
import math
from typing import Any

from kernelbook import runtime

# isort: split
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

of_triton: dict[tuple[Any, str], Any] = {}  # by class or module, and name: what stands there without these caches
_PLAIN = {core.tensor, core.dtype, int, float, bool, str, type(None)}


def _new_block(cls: Any, *args: Any, known: dict[Any, Any] = {}) -> Any:  # noqa: B006
    """Return the one block type of an element and a shape; one of a subclass, as Gluon's, is made anew."""
    if cls is not core.block_type or not args:
        return object.__new__(cls)
    element, shape = args
    key = element.name, builtins.tuple([getattr(size, "value", size) for size in shape])
    if key not in known:
        known[key] = object.__new__(cls)
        of_triton[core.block_type, "__init__"](known[key], element, shape)
    return known[key]


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    if "numel" not in self.__dict__:
        of_triton[core.block_type, "__init__"](self, element_ty, shape)


@functools.cache
def _sizes(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(builtins.tuple(type.shape) if type.is_block() else ())


def _unwrap_if_constexpr(o: Any) -> Any:
    kind = type(o)
    if kind is core.constexpr:
        return o.value
    return o if kind in _PLAIN else of_triton[core, "_unwrap_if_constexpr"](o)


def _get_np_dtype(tt_dtype: Any, known: dict[str, Any] = {}) -> Any:  # noqa: B006
    name = tt_dtype.scalar.name
    if name not in known:
        known[name] = of_triton[interpreter, "_get_np_dtype"](tt_dtype)
    return known[name]


@functools.cache
def _builtins_of(pkg: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]


@functools.cache
def _patched(member: Any) -> Any:
    called = getattr(member, "__wrapped__", member)
    return lambda *args, _semantic=None, **kwargs: called(*args, **kwargs, _semantic=interpreter.interpreter_semantic)


def _patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
    for name in _builtins_of(pkg):
        if core.is_builtin(member := getattr(pkg, name)):
            scope.set_attr(pkg, name, _patched(member))


def _broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return of_triton[TritonSemantic, "broadcast_impl_value"](self, lhs, rhs)


def _binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *how: bool) -> Any:
    divides = how[3:]
    if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and not (divides or lhs.dtype.is_ptr()):
        return self.broadcast_impl_value(lhs, rhs)
    return of_triton[TritonSemantic, "binary_op_type_checking_impl"](self, lhs, rhs, *how)


CACHED: dict[tuple[Any, str], Any] = {
    (core.block_type, "__new__"): _new_block,
    (core.block_type, "__init__"): _init_block,
    (core.tensor, "__init__"): _init_tensor,
    (core, "_unwrap_if_constexpr"): _unwrap_if_constexpr,
    (TritonSemantic, "broadcast_impl_value"): _broadcast_impl_value,
    (TritonSemantic, "binary_op_type_checking_impl"): _binary_op_type_checking_impl,
    (interpreter, "_get_np_dtype"): _get_np_dtype,
    (interpreter, "_patch_builtin"): _patch_builtin,
}


def remember() -> None:
    """Use the caches from here on, in this process."""
    if of_triton or not (runtime.INTERPRET and triton.__version__.startswith("3.7.")):
        return
    for pkg in (tl, core, core.tensor, tl.math, core.tensor_descriptor_base):
        _builtins_of(pkg)  # before any kernel ran, whose functions may stay patched
    for (place, name), member in CACHED.items():
        of_triton[place, name] = getattr(place, name)
        setattr(place, name, member)
    launch = interpreter.GridExecutor.__call__
    launch.__code__ = launch.__code__.replace(co_stacksize=2**17)  # a chunk is the power of two above: half is left
    of_triton[core.block_type, "__new__"] = lambda cls, *args: object.__new__(cls)
