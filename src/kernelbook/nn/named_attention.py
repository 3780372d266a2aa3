"""Attention in the form in which transformers calls it; what is no attention of ours is handed back.

transformers gives every layer the mask that a mask function made once. Besides its own masks (nothing, which is PyTorch's
``is_causal``, and tensors of four dimensions) a mask may say here that it is causal, with the last query at the last key:
uint64 of shape (B, 1, 1, 1 + window), how many keys each sequence has, repeated; 1 alone without a sliding window, and 0
instead of B where all keys are there. It takes no memory, and lengths may change in a captured graph. Four dimensions,
because ``generate`` hands masks of so many, and no others, to a model as they are; uint64, because nobody's mask has that
dtype, and hardly anything can be computed with it.
"""

from typing import Any

import torch

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention import flash_attention
from kernelbook.nn.same_bits import attend, check_alone, positions, sequences

__all__ = ["NEUTRAL", "OWN", "asked_for", "boolean_mask", "encode_mask", "is_stated", "own_attention"]

MAX_HEAD = 256
# What transformers' modules call an argument of flash_attention.
OWN = {"s_aux": "sinks", "softcap": "softcap"}
# Keywords that change nothing here: the mask says it, or it is meant for other parts of a model or for other kernels.
NEUTRAL = frozenset(
    (
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    )
)


def is_stated(mask: torch.Tensor | None) -> bool:
    """Return whether :func:`encode_mask` made the mask."""
    return mask is not None and mask.dtype == torch.uint64


def decode_mask(mask: torch.Tensor) -> tuple[torch.Tensor | None, int | None]:
    """Return lengths and window of a mask that :func:`encode_mask` made."""
    return mask[:, 0, 0, 0].view(torch.int64) if mask.shape[0] else None, mask.shape[3] - 1 or None


def encode_mask(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return a mask that tells lengths and window: ``lengths`` (B,) int64, or (0,) where all keys are there."""
    return lengths.view(torch.uint64)[:, None, None, None].expand(-1, 1, 1, 1 + (window or 0))


def boolean_mask(mask: torch.Tensor | None, n: int, s: int) -> torch.Tensor | None:
    """Return the mask for others: (B or 1, 1, N, S) booleans for one that is stated as above; any other as it is."""
    if mask is None or not is_stated(mask):
        return mask
    lengths, window = decode_mask(mask)
    key = torch.arange(s, device=mask.device)
    position = torch.arange(n, device=mask.device)[:, None] - n
    position = position + (s if lengths is None else lengths[:, None, None, None])
    seen = (key <= position).expand(-1 if lengths is not None else 1, 1, n, s)
    return seen if window is None else seen & (key > position - window)


def asked_for(others: dict[str, Any]) -> list[str]:
    """Return the keywords that ask for more than plain attention: a soft cap, sinks, a bias, or whatever comes next."""
    return [name for name, value in others.items() if name not in NEUTRAL and value is not None and value is not False]


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

    That is: another mask, dropout, heads of more than 256 features, values of another width, or a keyword of
    :func:`asked_for` that is not in :data:`OWN`. Within ``runtime.same_bits`` a mask of booleans is read, see
    :func:`sequences`: it may say that tokens are padding, and where packed sequences begin.

    Raises:
        ValueError: a mask of integers, which means something else to each of PyTorch's attentions; a sliding window of which
            no mask tells; within ``same_bits`` whatever gives None elsewhere, and packed sequences of which no mask tells.
    """
    if mask is not None and not (is_stated(mask) or mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"attention_forward: attention_mask must be of booleans or floating point, got {mask.dtype}")
    window = others.get("sliding_window")
    if mask is None and window is not None and window < key.shape[2]:
        raise ValueError(
            f"attention_forward: sliding_window must be part of attention_mask where there are more keys, got "
            f"{window} for {key.shape[2]} keys and no mask; transformers' sdpa_mask makes such masks"
        )
    stated, same_bits = is_stated(mask), runtime.in_same_bits()
    made = same_bits and mask is not None and mask.ndim == 4 and mask.dtype == torch.bool
    asked = asked_for(others)
    known = (
        not dropout and query.shape[-1] <= MAX_HEAD and value.shape[-1] == query.shape[-1] and set(asked) <= set(OWN)
    )
    if not known or not (mask is None or stated or made):
        if same_bits:
            raise ValueError(
                f"attention_forward: within same_bits() there must be a causal mask of booleans or none, no dropout, at most "
                f"{MAX_HEAD} features a head and nothing else, got dropout {dropout}, {query.shape[-1]} features, a mask of "
                f"{None if mask is None else mask.dtype} and {', '.join(asked) or 'nothing else'}"
            )
        return None
    more: dict[str, Any] = {OWN[name]: others[name] for name in asked}
    batch, _, n, _ = query.shape
    if made and mask is not None:
        where = sequences(mask, batch, window, positions(others))
        return attend(query, key, value, where, scale=scaling, **more)
    if same_bits:
        check_alone(batch, n, positions(others), others.get("cu_seq_lens_q"))
    lengths, window = None, None
    if mask is not None:
        lengths, window = decode_mask(mask)
        causal = True
    else:
        causal = query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and key.shape[2] > query.shape[2]:
            # Without a mask the first query stands at the first key: a static cache is being filled.
            key, value = (t[:, :, : query.shape[2]] for t in (key, value))
    out = flash_attention(query, key, value, causal=causal, scale=scaling, lengths=lengths, window=window, **more)
    return out.transpose(1, 2).contiguous()
