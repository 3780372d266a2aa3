"""Layers that stand in for PyTorch's own."""

import torch

from kernelbook.layer_norm import layer_norm

__all__ = ["LayerNorm"]


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`kernelbook.layer_norm`; the state dict is the same.

    Args:
        normalized_shape: the size of the last dimension, as a number or a sequence of one number.
        eps, elementwise_affine, bias, device, dtype: as in PyTorch.

    Raises:
        ValueError: ``normalized_shape`` names more than one dimension.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"LayerNorm: normalized_shape must name one dimension, got {tuple(self.normalized_shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., N) -> (..., N)."""
        if input.shape[-1:] != self.normalized_shape:
            raise ValueError(
                f"LayerNorm: input must have shape (..., {self.normalized_shape[0]}), got {tuple(input.shape)}"
            )
        return layer_norm(input, self.weight, self.bias, self.eps)
