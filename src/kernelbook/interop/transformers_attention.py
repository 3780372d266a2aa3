"""Attention of transformers 5 on :func:`kernelbook.flash_attention`, by transformers' interface of named implementations.

After :func:`register`, ``model.set_attn_implementation("kernelbook")`` and
``from_pretrained(..., attn_implementation="kernelbook")`` select it. :func:`kernelbook.nn.swap` does both.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernelbook.attention import flash_attention

__all__ = ["NAME", "attention_forward", "register"]

NAME = "kernelbook"
MAX_HEAD = 256


def register() -> None:
    """Adds ``"kernelbook"`` to transformers' attention implementations; a second call changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    # transformers leaves this mask out where it would only be the causal one, and makes it for padded batches.
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    """What transformers calls: query (B, H, N, D), key and value (B, H_kv, S, D) -> (B, N, H, D), and no weights.

    A call with a mask (a padded batch, a sliding window), a position bias, a paged cache or dropout, or with heads of more
    than 256 features or values of another width, runs as ``"sdpa"`` does.

    Raises:
        ValueError: the model has attention sinks (``s_aux``), which neither has.
    """
    if others.get("s_aux") is not None:
        raise ValueError("attention_forward: s_aux must be None: attention sinks are not supported")
    ours = attention_mask is None and dropout == 0
    ours = ours and all(others.get(name) is None for name in ("position_bias", "cache", "softcap", "sliding_window"))
    if not ours or query.shape[-1] > MAX_HEAD or value.shape[-1] != query.shape[-1]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **others
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # One query sees all keys. Of several without a mask the last stands at the last key, as the kernel has it.
    out = flash_attention(query, key, value, causal=bool(causal) and query.shape[2] > 1, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
