"""Attention in the form in which transformers calls it; what is no attention of ours is handed back.

transformers gives every layer the mask that a mask function made once. Besides its own masks (nothing, which is PyTorch's
``is_causal``, and tensors of four dimensions) a mask may say here that it is causal, with the last query at the last key:
int64 of shape (B, 1, 1, 1 + window), how many keys each sequence has, repeated; 1 alone without a sliding window, and 0
instead of B where all keys are there. It takes no memory, and lengths may change in a captured graph. Four dimensions,
because ``generate`` hands masks of so many, and no others, to a model as they are.
"""

from typing import Any

import torch

from kernelbook.attention import flash_attention

__all__ = ["boolean_mask", "own_attention", "statement"]

MAX_HEAD = 256


def _is_stated(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.ndim == 4 and mask.dtype == torch.int64


def _said(mask: torch.Tensor) -> tuple[torch.Tensor | None, int | None]:
    """-> lengths and window."""
    return mask[:, 0, 0, 0] if mask.shape[0] else None, mask.shape[3] - 1 or None


def statement(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """The mask that says so: ``lengths`` (B,) int64, or (0,) where all keys are there."""
    return lengths[:, None, None, None].expand(-1, 1, 1, 1 + (window or 0))


def boolean_mask(mask: torch.Tensor | None, n: int, s: int) -> torch.Tensor | None:
    """The mask for others: (B or 1, 1, N, S) booleans for one that is stated as above; any other as it is."""
    if mask is None or not _is_stated(mask):
        return mask
    lengths, window = _said(mask)
    key = torch.arange(s, device=mask.device)
    position = torch.arange(n, device=mask.device)[:, None] - n
    position = position + (s if lengths is None else lengths[:, None, None, None])
    seen = (key <= position).expand(-1 if lengths is not None else 1, 1, n, s)
    return seen if window is None else seen & (key > position - window)


def own_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    **others: Any,
) -> torch.Tensor | None:
    """query (B, H, N, D), key and value (B, H_kv, S, D) -> (B, N, H, D), or None where :func:`flash_attention` cannot do it.

    That is: another mask, dropout, a position bias, a soft cap, a paged cache, heads of more than 256 features, or values
    of another width.

    Raises:
        ValueError: the model has attention sinks (``s_aux``), which PyTorch's attention has neither.
    """
    if others.get("s_aux") is not None:
        raise ValueError(
            "attention_forward: s_aux must be None: there are no attention sinks here, nor in PyTorch's "
            'scaled_dot_product_attention; "eager" and "flex_attention" have them'
        )
    stated = _is_stated(mask)
    if not (mask is None or stated) or dropout or query.shape[-1] > MAX_HEAD or value.shape[-1] != query.shape[-1]:
        return None
    if any(others.get(name) is not None for name in ("position_bias", "cache", "softcap")):
        return None
    lengths, window = None, None
    if mask is not None:
        lengths, window = _said(mask)
        causal = True
    else:
        causal = query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and key.shape[2] > query.shape[2]:
            # Without a mask the first query stands at the first key: a static cache is being filled.
            key, value = (t[:, :, : query.shape[2]] for t in (key, value))
    out = flash_attention(query, key, value, causal=causal, scale=scaling, lengths=lengths, window=window)
    return out.transpose(1, 2).contiguous()
