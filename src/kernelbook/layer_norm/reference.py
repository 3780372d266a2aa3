"""LayerNorm (Ba, Kiros and Hinton 2016, section 3) and RMSNorm in plain PyTorch: the specification, in any dtype."""

from typing import Any

import torch

__all__ = [
    "layer_norm_backward_reference",
    "layer_norm_reference",
    "rms_norm_reference",
]


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension, with the biased variance.

    Args:
        x: (..., N).
        weight, bias: (N,) or ``None``.
        eps: added to the variance.

    Returns:
        (..., N) in the dtype of ``x``.
    """
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).square().mean(-1, keepdim=True)
    y = (x - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def layer_norm_backward_reference(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients that the chapter derives, for ``dy`` and ``x`` (M, N): dx (M, N), dweight (N,), dbias (N,)."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    xhat = (x - mean) * rstd
    g = dy if weight is None else dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> Any:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension: Zhang and Sennrich 2019, section 4.

    Args:
        x: (..., N).
        weight: (N,) or ``None``.
        eps: added to the mean square.
        residual: (..., N) or ``None``, added to ``x`` before.

    Returns:
        (..., N) in the dtype of ``x``; with a residual the pair of it and ``x + residual``.
    """
    total = x if residual is None else x + residual
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    y = (y if weight is None else y * weight).to(x.dtype)
    return y if residual is None else (y, total)
