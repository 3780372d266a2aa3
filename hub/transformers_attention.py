"""Attention in the form in which transformers calls it."""

from typing import Any

import torch
import torch.nn.functional as F

from kernelbook.nn.named_attention import OWN, asked_for, boolean_mask, own_attention

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
    Its mask function has to be transformers' ``sdpa_mask``: masks of four dimensions, with windows and padding in them, and
    none that would only be the causal one::

        AttentionInterface.register("kernelbook", attention_forward)
        AttentionMaskInterface.register("kernelbook", sdpa_mask)

    Raises:
        ValueError: a position bias, a paged cache or a keyword of which this knows nothing; sinks or a soft cap in a call that
            would be PyTorch's; a mask of other dimensions, another mask function, or a sliding window of which no mask tells.
    """
    asked = asked_for(others)
    for name in asked:
        if name not in OWN:
            raise ValueError(f"attention_forward: {name} must be None, got {type(others[name]).__name__}")
    _check_mask(module, attention_mask)
    out = own_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    if out is not None:
        return out, None
    for name in asked:  # PyTorch's has neither
        raise ValueError(
            f"attention_forward: {name} must be None with dropout, with heads of more than 256 features and with a mask that is "
            f"more than causal, got {type(others[name]).__name__}"
        )
    n, s = query.shape[2], key.shape[2]
    mask = boolean_mask(attention_mask, query.shape[0], n, s)
    causal = mask is None and n > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    grouped = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def _check_mask(module: torch.nn.Module, mask: Any) -> None:
    """Raises where the mask may lack padding or a window."""
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            got = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_forward: attention_mask must be None or have four dimensions, as sdpa_mask makes it, got {got}"
            )
        return
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is None:  # called by hand
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    # Other mask functions leave padding and windows to the attention, and where none is registered padding is lost.
    if ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not sdpa_mask:
        raise ValueError(
            f"attention_forward: transformers must know sdpa_mask as the mask function of {name!r}, got "
            f"{ALL_MASK_ATTENTION_FUNCTIONS.get(name)}: AttentionMaskInterface.register({name!r}, sdpa_mask)"
        )
