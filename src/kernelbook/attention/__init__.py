"""Attention in tiles: softmax(scale q k^T) v and its gradients without the score matrix."""

from kernelbook.attention.op import flash_attention
from kernelbook.attention.reference import (
    causal_mask_reference,
    flash_attention_backward_reference,
    flash_attention_reference,
)

__all__ = [
    "causal_mask_reference",
    "flash_attention",
    "flash_attention_backward_reference",
    "flash_attention_reference",
]
