"""Attention in the form in which transformers calls it."""

from typing import Any

import torch
import torch.nn.functional as F

from kernelbook.attention import flash_attention

__all__ = ["attention_forward"]

MAX_HEAD = 256


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (B, H, N, D), key and value (B, H_kv, S, D) -> (B, N, H, D), and no weights.

    A call with a mask or dropout, or with heads of more than 256 features, is PyTorch's ``scaled_dot_product_attention``.
    Register it with ``sdpa_mask`` as its mask, which leaves out masks that would only be the causal one.

    Raises:
        ValueError: attention sinks, a position bias, a soft cap or a paged cache, of which this knows nothing.
    """
    for name in ("s_aux", "position_bias", "softcap", "cache"):
        if others.get(name) is not None:
            raise ValueError(f"attention_forward: {name} must be None, got {type(others[name]).__name__}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    if attention_mask is None and dropout == 0 and query.shape[-1] == value.shape[-1] <= MAX_HEAD:
        out = flash_attention(query, key, value, causal=causal, scale=scaling)
    else:
        grouped = key.shape[1] != query.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=grouped
        )
    return out.transpose(1, 2).contiguous(), None
