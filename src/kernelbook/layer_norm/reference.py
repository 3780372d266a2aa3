"""LayerNorm (Ba, Kiros and Hinton 2016, section 3) in plain PyTorch: the specification, in any dtype."""

import torch

__all__ = ["layer_norm_backward_reference", "layer_norm_reference"]


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
    """The gradients that the chapter derives, for ``dy`` and ``x`` (M, N): dx (M, N), dweight (N,), dbias (N,)."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    xhat = (x - mean) * rstd
    g = dy if weight is None else dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)
