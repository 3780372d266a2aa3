"""What the tests of the rooms share: random tensors, tensors whose rows lie far apart, calls with a wrong argument."""

from collections.abc import Callable
from typing import Any

import torch

from kernelbook import runtime


def label(value: Any) -> str:
    """A parameter in the name of a test."""
    return str(value).removeprefix("torch.").replace(" ", "")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers where kernels run, rounded to ``dtype``."""
    return torch.randn(shape, device=runtime.DEVICE).to(dtype)


def far_apart(tensor: torch.Tensor, *steps: int) -> torch.Tensor:
    """A copy of ``tensor`` with these strides and contiguous rows. The memory between is reserved, not touched."""
    strides = (*steps, 1)
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
    return torch.empty(size, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def call_with(
    function: Callable[..., object], given: Callable[[], dict[str, Any]], **changes: Any
) -> Callable[[], object]:
    """A call of ``function`` with the arguments that ``given`` makes, but for ``changes``; those that can be called are."""

    def call() -> object:
        return function(**given() | {name: v() if callable(v) else v for name, v in changes.items()})

    return call
