"""Random tensors, and tensors whose rows lie far apart, for the tests of the rooms."""

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
