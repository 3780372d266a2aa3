"""Attention in the form in which transformers calls it; what is no attention of ours is handed back.

transformers gives every layer the mask that a mask function made once. Besides its own masks (nothing, which is PyTorch's
``is_causal``, and tensors of four dimensions) a mask may say here that it is causal, with the last query at the last key:
uint64 of shape (B, 1, 1, 1 + window), how many keys each sequence has, repeated; 1 alone without a sliding window, and 0
instead of B where all keys are there. It takes no memory, and lengths may change in a captured graph. Four dimensions,
because ``generate`` hands masks of so many, and no others, to a model as they are; uint64, because nobody's mask has that
dtype, and hardly anything can be computed with it.

Of packed sequences a mask says where they begin: uint64 of shape (1, 1, B N + 1, 1 + window), repeated likewise, as
``cu_seqlens`` of the batch's rows one after another; :func:`cu_seqlens` makes it on the device, for any number of sequences.
"""

from typing import Any

import torch

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention import flash_attention
from kernelbook.nn.same_bits import attend, begin_anew, jumps, positions, sequences

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


def _lengths(mask: torch.Tensor) -> torch.Tensor | None:
    """(B,) of a statement; ``None`` where all keys are there."""
    return mask[:, 0, 0, 0].view(torch.int64) if mask.shape[0] and mask.shape[2] == 1 else None


def encode_mask(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return a mask that tells lengths and window: ``lengths`` (B,) int64, or (0,) where all keys are there."""
    return lengths.view(torch.uint64)[:, None, None, None].expand(-1, 1, 1, 1 + (window or 0))


def cu_seqlens(number: torch.Tensor) -> torch.Tensor:
    """Return (B N + 1,) where packed sequences begin, in rows one after another; behind the last sequence B N again and again.

    Args:
        number: (B, N) integers, the number of each token's sequence: grows within a row, and counts anew in each.
    """
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[:, 1:] = number.diff(dim=1) != 0
    counted = begins.flatten().cumsum(0)  # from 1
    return torch.searchsorted(counted, torch.arange(1, counted.shape[0] + 2, device=number.device))


def encode_packed(cu_seqlens: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return a mask that tells where packed sequences begin, and window: ``cu_seqlens`` (B N + 1,) int64."""
    return cu_seqlens.view(torch.uint64)[None, None, :, None].expand(-1, -1, -1, 1 + (window or 0))


def told_to_be_packed(
    mask: torch.Tensor | None, batch: int, n: int, s: int, others: dict[str, Any]
) -> torch.Tensor | None:
    """Return where packed sequences begin, in rows one after another; ``None``: nobody tells of any.

    The mask does, or the keywords ``cu_seq_lens_q`` and, as transformers' FlashAttention reads them, ``position_ids``, for which
    see :func:`begin_anew`.

    Raises:
        ValueError: sequences are packed where there are keys from before; of ``position_ids`` this is asked within ``same_bits``.
    """
    if mask is not None and (not is_stated(mask) or _lengths(mask) is not None):
        return None
    given: torch.Tensor | None = others.get("cu_seq_lens_q")
    if given is not None and n == s:
        return given
    if mask is not None and mask.shape[2] > 1:
        return mask[0, 0, :, 0].view(torch.int64)
    if given is not None and given.shape[0] > batch + 1:
        raise ValueError(PACKED.format("cu_seq_lens_q", f"{given.shape[0] - 1} sequences, {n} queries and {s} keys"))
    if torch.compiler.is_compiling() or not (n == s or runtime.in_same_bits()):
        return None
    places = positions(others)
    if places is None or not begin_anew(places, batch, n):
        return None
    if n != s:
        raise ValueError(PACKED.format("position_ids", f"some that begin anew, {n} queries and {s} keys"))
    return cu_seqlens(jumps(places, batch).cumsum(1))


PACKED = "attention_forward: {} must not pack sequences where there are keys from before, got {}"


def boolean_mask(
    mask: torch.Tensor | None,
    batch: int,
    n: int,
    s: int,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor | None:
    """Return the mask for others: (B or 1, 1, N, S) booleans for one that is stated as above; any other as it is.

    With ``cu_seqlens``, of rows one after another, sequences are told apart, and ``causal`` says what ``None`` means.
    """
    if cu_seqlens is None and (mask is None or not is_stated(mask)):
        return mask
    lengths, window = (None, None) if mask is None else (_lengths(mask), mask.shape[3] - 1 or None)
    device = mask.device if cu_seqlens is None else cu_seqlens.device  # type: ignore[union-attr]
    key = torch.arange(s, device=device)
    position = torch.arange(n, device=device)[:, None] - n
    position = position + (s if lengths is None else lengths[:, None, None, None])
    seen = ((key <= position) | (not causal)).expand(-1 if lengths is not None else 1, 1, n, s)
    if cu_seqlens is not None:
        of = torch.bucketize(torch.arange(batch * n, device=device), cu_seqlens, right=True).view(batch, 1, n, 1)
        seen = seen & (of == of.mT)
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
    :func:`asked_for` that is not in :data:`OWN`. Packed sequences, see :func:`told_to_be_packed`, do not see each other. Within ``runtime.same_bits`` a mask of booleans is read, see
    :func:`sequences`: it may say that tokens are padding, and where packed sequences begin.

    Raises:
        ValueError: a mask of integers, which means something else to each of PyTorch's attentions; a sliding window of which
            no mask tells; packed sequences where there are keys from before; within ``same_bits`` whatever gives None elsewhere.
    """
    batch, _, n, _ = query.shape
    ours = mask is not None and is_stated(mask) and mask.ndim == 4 and mask.shape[1] == 1
    stated = ours and mask is not None and (mask.shape[2] == 1 or mask.shape[::2] == (1, batch * n + 1))
    if mask is not None and not (stated or mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"attention_forward: attention_mask must be of booleans or floating point, got {mask.dtype}")
    window = others.get("sliding_window")
    if mask is None and window is not None and window < key.shape[2]:
        raise ValueError(
            f"attention_forward: sliding_window must be part of attention_mask where there are more keys, got "
            f"{window} for {key.shape[2]} keys and no mask; transformers' sdpa_mask makes such masks"
        )
    same_bits = runtime.in_same_bits()
    made = same_bits and mask is not None and mask.ndim == 4 and mask.dtype == torch.bool
    asked = asked_for(others)
    known = (
        not dropout and query.shape[-1] <= MAX_HEAD and value.shape[-1] == query.shape[-1] and set(asked) <= set(OWN)
    )
    if not known or not (mask is None or stated or made):
        if same_bits:
            raise ValueError(
                f"attention_forward: within same_bits() there must be a causal mask of booleans or none, no dropout, at most "
                f"{MAX_HEAD} features a head, as many of values, and nothing else, got dropout {dropout}, {query.shape[-1]} and "
                f"{value.shape[-1]} features, a mask of {None if mask is None else mask.dtype} and "
                f"{', '.join(asked) or 'nothing else'}"
            )
        return None
    more: dict[str, Any] = {OWN[name]: others[name] for name in asked}
    if made and mask is not None:
        where = sequences(mask, batch, window, positions(others))
        return attend(query, key, value, where, scale=scaling, **more)
    packed = told_to_be_packed(mask, batch, n, key.shape[2], others)
    lengths, window = None, None
    if mask is not None:
        lengths, window, causal = _lengths(mask), mask.shape[3] - 1 or None, True
    else:
        causal = n > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and key.shape[2] > n:
            # Without a mask the first query stands at the first key: a static cache is being filled.
            key, value = (t[:, :, :n] for t in (key, value))
    more |= {"causal": causal, "scale": scaling, "window": window}
    if packed is not None:
        rows = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (query, key, value))
        out = flash_attention(*rows, cu_seqlens=packed, **more)
        return out.transpose(1, 2).contiguous().view(batch, n, *query.shape[1::2])
    out = flash_attention(query, key, value, lengths=lengths, **more)
    return out.transpose(1, 2).contiguous()
