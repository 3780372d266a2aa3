"""What the launches of several rooms have in common: tensors as kernels take them, and the dtypes of their sums."""

import contextlib
import math
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "accumulator",
    "allows_tf32",
    "box",
    "cdiv",
    "has_aligned_rows",
    "in_kernel_dtype",
    "is_plain",
    "matrix",
    "precision",
    "reshaped",
    "strided",
    "tl_accumulator",
    "without_autocast",
]


def cdiv(a: int, b: int) -> int:
    """``triton.cdiv``, without the wrapper that lets kernels call it too: the host's time counts for small problems."""
    return -(-a // b)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether PyTorch's dispatcher has nothing to add to an operator's call with ``tensors`` (``None`` among them).

    A public function then calls the operator's implementation by itself, which spares the host some 20 microseconds. It
    is so where nobody compiles, traces, transforms or profiles, all are ordinary tensors, and none of them wants a
    gradient.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.is_meta
            or (recording and tensor.requires_grad)
        ):
            return False
    return True


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tl_accumulator(dtype: torch.dtype) -> tl.dtype:
    """:func:`accumulator` as a kernel's ``ACC`` takes it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def allows_tf32() -> bool:
    """Whether PyTorch is set to multiply float32 matrices in tf32, by any of its switches.

    ``torch.backends.cuda.matmul.allow_tf32`` cannot be read once somebody has set the newer ``fp32_precision``; that one
    can be read either way.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def precision() -> str:
    """How kernels multiply float32 (``input_precision`` of ``tl.dot``): as PyTorch is set to, in tf32 or exactly."""
    return "tf32" if allows_tf32() else "ieee"


def reshaped(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """An operator's result in another shape, on the same memory.

    It is no view to autograd, which forbids ``y += residual`` on a view that an operator returned.
    """
    return torch.ops.aten._unsafe_view.default(result, shape)


def without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast on the tensor's device.

    Within an operator dtypes are settled; autocast would lower those of a backward pass that runs under it.
    """
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def in_kernel_dtype(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """``tensors`` in the dtypes that kernels are given, see :func:`runtime.kernel_dtype`; ``None`` stays ``None``."""
    if not runtime.INTERPRET:
        return tensors  # kernel_dtype() changes none
    return tuple(None if t is None else t.to(runtime.kernel_dtype(t.dtype)) for t in tensors)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """(M, N) for (..., N), a view where the strides allow it, in the dtype that kernels are given."""
    if x.ndim == 2 and not runtime.INTERPRET:
        return x
    return x.to(runtime.kernel_dtype(x.dtype)).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def strided(tensor: torch.Tensor | None, dims: int, stand_in: torch.Tensor) -> tuple[Any, ...]:
    """The tensor and its ``dims`` strides, as a kernel's arguments.

    Without a tensor it is ``stand_in`` and zeros: the kernel wants a pointer, and won't touch it.
    """
    return (stand_in, *(0,) * dims) if tensor is None else (tensor, *tensor.stride())


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Whether the last dimension is contiguous and all rows begin on 16 bytes, one after the other.

    Then rows are loaded in pieces of 16 bytes, and a tensor descriptor can read them.
    """
    *steps, within = tensor.stride()
    size = tensor.element_size()
    return within == 1 and all(step > 0 and step * size % 16 == 0 for step in steps) and tensor.data_ptr() % 16 == 0


def box(tensor: torch.Tensor, *sides: int) -> TensorDescriptor:
    """A tensor descriptor that reads ``tensor`` in boxes of this shape."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(sides))
