"""Tensors on the host: alignment, strides, shapes, versions, and how float32 is multiplied."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

# How PyTorch is set to multiply float32, by any of its switches: what its own one asks.
# ``torch.backends.cuda.matmul.allow_tf32`` cannot be read once somebody has set the newer ``fp32_precision``.
fp32_precision: Callable[[], str] = functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
_mode, _modes = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_transform = torch._C._functorch.peek_interpreter_stack
is_batched = torch._C._functorch.is_legacy_batchedtensor  # by autograd's is_grads_batched, of which no transform tells


def is_transformed() -> bool:
    """Return whether a call is compiled or one of ``torch.func``'s transforms or forward-mode differentiation is at work."""
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0 or _transform() is not None


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the host can read what is in a tensor: not on the meta device, of fake ones, in ``vmap``, and in a trace."""
    traced = _mode(_modes.FAKE) is not None or _mode(_modes.PROXY) is not None
    wrapped = torch._C._functorch.is_batchedtensor(tensor)
    return not (tensor.is_meta or traced or wrapped or hasattr(tensor, "fake_mode"))


def precision(dtype: torch.dtype) -> str:
    """Return how kernels multiply ``dtype`` (``input_precision`` of ``tl.dot``): only float32 has a choice, which is PyTorch's."""
    return "tf32" if dtype == torch.float32 and fp32_precision() == "tf32" else "ieee"


def strided(tensor: torch.Tensor | None, dims: int, stand_in: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Return a tensor that may be missing, and its ``dims`` strides, as a kernel's arguments.

    Without one it is ``stand_in`` and zeros, for a kernel that wants a pointer which it won't touch. (For ``None`` Triton
    would compile a kernel of its own, with the same instructions, for which nothing is recorded.)
    """
    return (stand_in, *(0,) * dims) if tensor is None else (tensor, *tensor.stride())


def reshaped(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an operator's result in another shape, on the same memory.

    It is no view to autograd, which forbids ``y += residual`` on a view that an operator returned.
    """
    return torch.ops.aten._unsafe_view.default(result, shape)


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Return whether the last dimension is contiguous and all rows begin on 16 bytes, one after the other.

    Then rows are loaded in pieces of 16 bytes, and a tensor descriptor can read them.
    """
    return tensor.data_ptr() % 16 == 0 and aligned_steps(tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=4096)
def aligned_steps(strides: tuple[int, ...], size: int) -> bool:
    """:func:`has_aligned_rows`, of a tensor that begins on 16 bytes."""
    *steps, within = strides
    return within == 1 and all(step > 0 and step * size % 16 == 0 for step in steps)


def without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast on the tensor's device.

    Within an operator dtypes are settled; autocast would lower those of a backward pass that runs under it.
    """
    if tensor.is_meta:  # PyTorch knows no autocast for meta tensors
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


# An attribute of tensors whose memory is lent to others after the forward pass (nn/offload.py): what brings their values back.
BRING_BACK = "kernelbook_bring_back"


def with_versions(*tensors: torch.Tensor | None) -> tuple[tuple[torch.Tensor, int], ...]:
    """Return the tensors (``None`` aside) that a backward pass keeps without autograd, for :func:`check_versions`."""
    return tuple([(tensor, _version(tensor)) for tensor in tensors if tensor is not None])


def check_versions(kept: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Raise what PyTorch raises where a tensor that a backward pass needs was changed in place since it was kept."""
    for tensor, version in kept:
        bring_back = getattr(tensor, BRING_BACK, None)
        if bring_back is not None:
            bring_back()
        elif _version(tensor) != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {_version(tensor)}; expected version {version} instead"
            )


def _version(tensor: torch.Tensor) -> int:
    """Return how often the tensor's memory was changed in place; PyTorch does not count that of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """(M, N) for (..., N): a view where the strides allow it, else a copy."""
    return tensor if tensor.ndim == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
