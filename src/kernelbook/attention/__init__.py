"""Attention in tiles: softmax(scale q k^T) v and its gradients without the score matrix."""

from kernelbook.attention.op import flash_attention
from kernelbook.attention.pages import append_to_pages, paged_attention
from kernelbook.attention.reference import (
    append_to_pages_reference,
    flash_attention_backward_reference,
    flash_attention_reference,
    paged_attention_reference,
)

__all__ = [
    "append_to_pages",
    "append_to_pages_reference",
    "flash_attention",
    "flash_attention_backward_reference",
    "flash_attention_reference",
    "paged_attention",
    "paged_attention_reference",
]
