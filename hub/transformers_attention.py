"""Attention in the form in which transformers calls it."""

from typing import Any

import torch
import torch.nn.functional as F

from kernelbook.nn.named_attention import boolean_mask, own_attention

__all__ = ["attention_forward"]


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
    out = own_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal)
    if out is not None:
        return out, None
    n, s = query.shape[2], key.shape[2]
    mask = boolean_mask(attention_mask, n, s)
    causal = mask is None and n > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    grouped = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None
