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
# What a model may pass for us to ignore: everything else changes the result.
WITHOUT_EFFECT = {"position_ids", "output_attentions", "use_cache", "cache_position", "num_items_in_batch"}


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

    A call with a mask (a padded batch, a sliding window), with dropout, with heads of more than 256 features or values of
    another width, or with an argument that is not known here, runs as ``"sdpa"`` does.
    """
    options = {name for name, argument in others.items() if argument is not None} - WITHOUT_EFFECT
    ours = attention_mask is None and dropout == 0 and not options
    if not ours or query.shape[-1] > MAX_HEAD or value.shape[-1] != query.shape[-1]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **others
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # One query sees all keys. Of several without a mask the last stands at the last key, as the kernel has it.
    out = flash_attention(query, key, value, causal=bool(causal) and query.shape[2] > 1, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
