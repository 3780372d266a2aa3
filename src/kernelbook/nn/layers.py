"""Layers that stand in for PyTorch's own."""

from typing import Any

import torch

from kernelbook import arguments
from kernelbook.layer_norm import layer_norm, rms_norm
from kernelbook.nn.compact import compact_sparse_linear
from kernelbook.sparse_linear import sparse_linear


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`kernelbook.layer_norm`; the arguments and the state dict are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., normalized_shape) -> (..., normalized_shape). Nested tensors are PyTorch's."""
        if input.is_nested:
            return super().forward(input)
        if input.shape[-1:] == self.normalized_shape:
            return layer_norm(input, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape)


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on :func:`kernelbook.rms_norm`; the state dict is the same.

    Args:
        normalized_shape: the size of the last dimension, as a number or a sequence of one number.
        eps, elementwise_affine, device, dtype: as in PyTorch. Without ``eps`` it is the machine epsilon of float32, or of
            float64 for float64 inputs.

    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """(..., N) -> (..., N); with a residual (..., N) the pair of the normalized sum and the sum.

        Raises ``ValueError`` for another shape, and where ``normalized_shape`` names more than one dimension. Nested tensors are
        PyTorch's, without a residual.
        """
        if x.is_nested and residual is None:
            return super().forward(x)
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(
                f"RMSNorm: normalized_shape {tuple(self.normalized_shape)} must be the last dimension, got {tuple(x.shape)}"
            )
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return rms_norm(x, self.weight, eps if self.eps is None else self.eps, residual=residual)


class SparseLinear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`kernelbook.sparse_linear`; the state dict is the same.

    Set ``layer.active_chunks`` before a forward pass; its backward pass then computes gradients for those chunks of output
    features only. ``None``, as at first, stands for all: an ordinary linear layer.

    Args:
        in_features, out_features, bias, device, dtype: as in PyTorch.
        chunk_size: features in a chunk, at least 16; the last chunk may be shorter.
        mode: ``"sparse_dw"`` (sparse gradients of weight and bias), ``"sparse_dw_dx"`` (of the input too) or ``"dense"``.
        compact_gradient: the gradients of weight and bias are ``torch.sparse_coo`` tensors of the active rows only, as those
            of ``torch.nn.Embedding(sparse=True)``; the last chunk must then be a full one. See
            :class:`kernelbook.train.ChunkAdamW` for an optimizer. PyTorch's AdamW, ``clip_grad_norm_``,
            ``DistributedDataParallel``, FSDP2 and ``torch.compile(fullgraph=True)`` raise with such gradients: for them
            leave it ``False``.

    Raises:
        ValueError: ``chunk_size`` or ``mode`` is not as above, or ``compact_gradient`` is set and ``chunk_size`` does not
            divide ``out_features``.
    """

    active_chunks: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        chunk_size: int = 64,
        mode: str = "sparse_dw",
        compact_gradient: bool = False,
    ) -> None:
        chunk_size = arguments.integer("SparseLinear", "chunk_size", chunk_size, least=16)
        arguments.check_choice("SparseLinear", "mode", mode, ("dense", "sparse_dw", "sparse_dw_dx"))
        super().__init__(in_features, out_features, bias, device, dtype)
        if compact_gradient and out_features % chunk_size:
            raise ValueError(
                f"SparseLinear: out_features must be a multiple of chunk_size ({chunk_size}) "
                f"for compact gradients, got {out_features}"
            )
        self.chunk_size, self.mode, self.compact_gradient = chunk_size, mode, compact_gradient
        self.active_chunks = None

    @property
    def num_chunks(self) -> int:
        """Return how many chunks there are to choose from."""
        return -(-self.out_features // self.chunk_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features).

        Raises ``NotImplementedError`` for compact gradients under FSDP.
        """
        if self.compact_gradient and self.active_chunks is not None and self.mode != "dense":
            if getattr(self, "_is_fsdp_managed_module", False):  # FSDP's own mark
                raise NotImplementedError(
                    "SparseLinear: compact_gradient must be False under FSDP, which reduces dense gradients only, got True"
                )
            return compact_sparse_linear(
                input, self.weight, self.bias, self.active_chunks, chunk_size=self.chunk_size, mode=self.mode
            )
        return sparse_linear(
            input, self.weight, self.bias, self.active_chunks, chunk_size=self.chunk_size, mode=self.mode
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}, mode={self.mode!r}"
