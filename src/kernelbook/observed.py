"""Who observes a call: a compiler, a mode, a trace, a profiler, a transform, autograd; and what a plan's key holds of tensors."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor  # one guard of a compiled call less than by the module
from torch.autograd import forward_ad

from kernelbook import runtime
from kernelbook.memory import PLAIN

__all__ = [
    "are_tensors",
    "form",
    "has_values",
    "in_mode_of_forward",
    "is_aligned",
    "is_batched",
    "is_observed",
    "is_transformed",
    "keep_mode",
    "observed",
    "of_thread",
    "wants_gradient",
]

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_mode, _modes = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
is_batched = torch._C._functorch.is_legacy_batchedtensor  # by autograd's is_grads_batched, of which no transform tells


class _OfThread(threading.local):
    tracing: Any = False  # whether the kernels that are launched become nodes of a graph


of_thread = _OfThread()


def is_transformed() -> bool:
    """Whether a call is compiled or one of ``torch.func``'s transforms or forward-mode differentiation is at work."""
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0 or _transform() is not None


def is_observed() -> bool:
    """Whether PyTorch's dispatcher has something to add to a call: a compiler, a mode, a transform, a trace, a profiler."""
    return (
        torch.compiler.is_compiling() or _function_modes() > 0 or _profiling() or _trace() is not None
        or forward_ad._current_level >= 0 or _transform() is not None or _dispatch_modes() > 0
    )  # fmt: skip


def observed(*tensors: torch.Tensor | None) -> bool:
    """Whether a call is left to its operator: somebody observes it, or an argument is no ordinary dense tensor with data.

    PyTorch's dispatcher knows what to do for tensors of another class, on the meta device, negated and batched ones.
    """
    if is_observed():
        return True
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in PLAIN or tensor.is_meta or tensor.is_neg() or tensor.layout is not torch.strided
            or is_batched(tensor)
        ):  # fmt: skip
            return True
    return False


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the host can read what is in a tensor: not on the meta device, of fake ones, and while a graph is traced."""
    traced = _mode(_modes.FAKE) is not None or _mode(_modes.PROXY) is not None
    return not (tensor.is_meta or traced or hasattr(tensor, "fake_mode"))


def are_tensors(*given: object) -> bool:
    """Whether all are tensors or ``None``, so that an operator takes them."""
    return all(isinstance(each, Tensor) for each in given if each is not None)


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd is to record a call with these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def keep_mode(ctx: Any) -> None:
    """Has autograd's context of a forward pass remember whether ``runtime.same_bits`` holds."""
    ctx.same_bits = runtime.in_same_bits()


def in_mode_of_forward(backward: Callable[..., Any]) -> Any:
    """A backward pass in the mode that :func:`keep_mode` has kept: autograd may run it in a thread of its own, and later."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if ctx.same_bits == runtime.in_same_bits():
            return backward(ctx, *gradients)
        with runtime.same_bits(ctx.same_bits):
            return backward(ctx, *gradients)

    return run


def form(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What the key of a plan holds of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def is_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all begin on 16 bytes, as PyTorch allocates them; fake tensors do."""
    if of_thread.tracing is not True:
        for tensor in tensors:
            if tensor is not None and tensor.data_ptr() % 16:
                return False
    return True
