"""Checks of what users pass in: every message names the function, the argument, what was expected and what came."""

import dataclasses
import functools
import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelbook import runtime
from kernelbook.tensors import has_values

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@functools.cache  # once
def _warn_of_bfloat16(gpu: str) -> None:
    warnings.warn(
        f"kernelbook: {gpu} has no bfloat16: kernels compute in float32 and convert, which takes several times as long. "
        "Take float16 there",
        stacklevel=2,
    )


def check_tensor(
    op: str, name: str, value: object, *, dtypes: Sequence[torch.dtype] = FLOATING, dims: int | None = None
) -> None:
    """Raise unless ``value`` is a tensor of one of ``dtypes`` on a device where kernels run, with ``dims`` dimensions if given."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    check_dtype(op, name, value, dtypes)
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {value.layout}")
    if dims is not None and value.ndim != dims:
        expected = ("no dimension", "one dimension", "two dimensions", "three dimensions")[dims]
        raise ValueError(f"{op}: {name} must have {expected}, got shape {tuple(value.shape)}")
    if not torch.compiler.is_compiling():
        inner = value
        while torch._C._functorch.is_batchedtensor(inner):  # torch.func.vmap within another transform
            inner = torch._C._functorch.get_unwrapped(inner)
        # Forward-mode differentiation would leave the operator out silently.
        forward_mode = forward_ad._current_level >= 0 and forward_ad.unpack_dual(inner).tangent is not None
        if forward_mode or torch._C._functorch.is_gradtrackingtensor(inner):
            how = "forward mode (torch.func.jvp, torch.autograd.forward_ad)" if forward_mode else "torch.func"
            raise NotImplementedError(f"{op}: {name} must be differentiated by torch.autograd (backward), got {how}")
    if value.dtype == torch.bfloat16 and not value.is_meta and not runtime.properties(value.device).has_tensor_cores:
        _warn_of_bfloat16(runtime.properties(value.device).name)
    if value.device.type in ("meta", "cuda"):
        if runtime.TOO_OLD and value.is_cuda:
            raise ValueError(f"{op}: {name} must be on the CPU: {runtime.TOO_OLD}")
        return
    if value.device.type != "cpu":
        raise ValueError(f"{op}: {name} must be on a GPU (or on the CPU under the interpreter), got {value.device}")
    if runtime.COMPILE_ONLY and runtime.compile_target is None:  # with one, launches are recorded (see ``compiled``)
        raise ValueError(
            f"{op}: {name} cannot be used: there is no GPU and TRITON_INTERPRET=0, so kernels can only be compiled here"
        )
    if not runtime.INTERPRET and runtime.HAS_GPU:
        raise ValueError(f"{op}: {name} must be on the GPU, got cpu (on the CPU, kernels need TRITON_INTERPRET=1)")


def check_dtype(op: str, name: str, value: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise a ``TypeError`` unless ``value.dtype`` is one of ``dtypes``."""
    if value.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must have dtype {_names(dtypes)}, got {_names([value.dtype])}")


def check_shape(op: str, name: str, value: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise a ``ValueError`` unless ``value.shape`` is ``shape``."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(value.shape)}")


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise a ``ValueError`` unless all tensors (``None`` aside) are on the device of the first."""
    _check_same(op, tensors, "device", "be on", ValueError)


def check_same_dtype(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise a ``TypeError`` unless all tensors (``None`` aside) have the dtype of the first."""
    _check_same(op, tensors, "dtype", "have", TypeError)


def _check_same(op: str, tensors: dict[str, Any], what: str, verb: str, error: type[Exception]) -> None:
    (first, expected), *others = ((name, getattr(t, what)) for name, t in tensors.items() if t is not None)
    for name, got in others:
        if got != expected:
            raise error(f"{op}: {name} must {verb} the {what} of {first} ({expected}), got {got}")


def check_linear(op: str, x: Any, name: str, weight: Any) -> None:
    """Raise unless ``x`` (..., K) and the matrix ``weight`` (N, K), called ``name``, have one dtype and one device."""
    check_tensor(op, "x", x)
    check_tensor(op, name, weight, dims=2)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    check_alike(op, x, **{name: (weight, (weight.shape[0], x.shape[-1]))})


def check_alike(op: str, x: torch.Tensor, **others: tuple[Any, Sequence[int]]) -> None:
    """Raise unless each other tensor that is not ``None`` has the shape that comes with it, and dtype and device of ``x``."""
    given = {name: tensor for name, (tensor, _) in others.items() if tensor is not None}
    for name, tensor in given.items():
        check_tensor(op, name, tensor)
        check_shape(op, name, tensor, others[name][1])
    check_same_dtype(op, x=x, **given)
    check_same_device(op, x=x, **given)


def check_choice(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


# A number is one of Python's or NumPy's, or of a class made of those. A bool says yes or no, a string has to be read, and a
# tensor's value is on a device, which the host would have to wait for.


def integer(op: str, name: str, value: Any, expected: str = "an integer", *, least: int | None = None) -> int:
    """``value`` as an ``int`` (a ``torch.SymInt`` as it is).

    Raises a ``TypeError`` where it is no integer, and a ``ValueError`` where it is less than ``least``.
    """
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{op}: {name} must be {expected}, got {type(value).__name__}")
        value = int(value)
    if least is not None and value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return value  # type: ignore[no-any-return]


def check_fields(config: Any) -> None:
    """Have every field of a dataclass that is declared an ``int`` or a ``float`` hold one; :func:`integer`, :func:`number`."""
    op = type(config).__name__
    for field in dataclasses.fields(config):
        value, declared = getattr(config, field.name), getattr(field.type, "__name__", str(field.type))
        if declared == "int":
            object.__setattr__(config, field.name, integer(op, field.name, value))
        elif declared.startswith("float") and (value is not None or declared == "float"):
            object.__setattr__(config, field.name, number(op, field.name, value))


def number(op: str, name: str, value: Any, expected: str = "a number") -> float:
    """``value`` as a ``float`` (a ``torch.SymFloat`` as it is); raises a ``TypeError`` where it is no real number."""
    if type(value) is float or isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.SymInt):
        raise TypeError(f"{op}: {name} must be {expected}, got {type(value).__name__}")
    return float(value)


def check_indices(op: str, name: str, value: object) -> None:
    """Raise unless ``value`` is a one-dimensional int64 or int32 tensor; :func:`check_index_values` reads it."""
    check_tensor(op, name, value, dtypes=(torch.int64, torch.int32), dims=1)


def check_index_values(
    op: str, name: str, value: torch.Tensor, upper: int | None, *, unique: bool = False, boundaries: bool = False
) -> None:
    """Raise unless all entries lie in ``[0, upper)``, from 0 on without ``upper``, and with ``unique`` none comes twice.

    ``boundaries``: the first must be 0, and none below the one before.

    Called from an operator's implementation, where the entries exist (``torch.compile`` traces the public function
    without them); what has none is not checked. They are looked at on the CPU, and on a GPU under ``KERNELBOOK_DEBUG=1``
    only: there it costs a synchronisation, so kernels mask ids out of range instead. A process that only compiles stands
    for one with a GPU.
    """
    unread = runtime.COMPILE_ONLY or (value.is_cuda and not runtime.debug_enabled())
    if value.numel() == 0 or unread or not has_values(value):
        return
    low, high = int(value.min()), int(value.max())
    if low < 0 or (upper is not None and high >= upper):
        expected = "not be negative" if upper is None else f"lie in [0, {upper})"
        raise ValueError(f"{op}: {name} must {expected}, got entries from {low} to {high}")
    if boundaries and (int(value[0]) or bool((value.diff() < 0).any())):
        raise ValueError(f"{op}: {name} must begin at 0 and not fall, got {value.tolist()}")
    if unique:
        ids, counts = value.unique(return_counts=True)
        if ids.numel() != value.numel():
            raise ValueError(f"{op}: {name} must not repeat an entry, got {int(ids[counts > 1][0])} more than once")


def autocast_dtype(tensor: Any) -> torch.dtype | None:
    """Autocast's dtype on the tensor's device; ``None`` where it is off, and for what is no tensor."""
    # PyTorch knows no autocast for meta tensors, and asking raises.
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not torch.is_autocast_enabled(tensor.device.type):
        return None
    return torch.get_autocast_dtype(tensor.device.type)


def lowered(arg: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in autocast's ``dtype``, and float64 and what is no such tensor as it is."""
    is_lowered = isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dtype != torch.float64
    return arg.to(dtype) if is_lowered else arg


def in_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Return ``tensors`` as :func:`lowered` does where autocast is on for the first one's device."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(lowered(tensor, dtype) for tensor in tensors)
