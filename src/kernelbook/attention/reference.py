"""Attention and its gradients in plain PyTorch, with the whole score matrix, in any dtype up to float64."""

import math

import torch

__all__ = [
    "append_to_pages_reference",
    "flash_attention_backward_reference",
    "flash_attention_reference",
    "paged_attention_reference",
]


def _seen(
    n: int,
    s: int,
    causal: bool,
    lengths: torch.Tensor | None,
    window: int | None,
    device: torch.device,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """(B or 1, 1, N, S) booleans: which keys each query may see."""
    given = torch.tensor([s], device=device) if lengths is None else lengths.to(device).clamp(0, s)
    length = given.long()[:, None, None, None]
    key = torch.arange(s, device=device)
    position = torch.arange(n, device=device)[:, None] + length - n
    seen = (key < length).expand(-1, -1, n, -1)
    if causal:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (key > position - window)
    if cu_seqlens is not None:
        of = torch.bucketize(
            key, cu_seqlens.to(device).contiguous(), right=True
        )  # the sequence of each row, counted from 1
        seen = seen & (of == of[:, None]) & (of < cu_seqlens.shape[0])
    return seen


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    scale: float | None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """(B, H, N, S): softmax of the scaled scores; rows with no key to see are zero.

    ``k`` has as many heads as ``q``.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    # A row of -inf alone would give NaN.
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    if sinks is not None:  # one more logit, whose weight is dropped
        joined = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, joined], -1).softmax(-1)[..., :-1].masked_fill(~seen, 0.0)
    return scores.softmax(-1).masked_fill(~seen, 0.0)


def _wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v once for each query head, zeros where no query looks: what lies there, NaN say, has no effect."""
    group = q.shape[1] // max(k.shape[1], 1)
    unused = ~seen.any(-2)[..., None]
    k, v = (t.masked_fill(unused, 0.0).repeat_interleave(group, dim=1) for t in (k, v))
    return k, v


def flash_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` for q (B, H, N, D), k and v (B, H_kv, S, D); -> (B, H, N, D).

    Query head ``h`` reads key and value head ``h // (H / H_kv)``. ``scale`` is 1 / sqrt(D) unless given. With ``lengths``
    (B,) only so many keys of each sequence exist, and the last query stands at the last of them; with ``window`` a query
    at position i sees keys i - window < j <= i. ``sinks`` (H,) join the sums of the softmax; with ``softcap`` a scaled score
    s counts as ``softcap * tanh(s / softcap)``. With ``cu_seqlens`` (sequences + 1,) each row sees keys of its own sequence
    only, and those from ``cu_seqlens[-1]`` on see none.
    """
    seen = _seen(q.shape[2], k.shape[2], causal, lengths, window, q.device, cu_seqlens)
    k, v = _wide(q, k, v, seen)
    return _probabilities(q, k, seen, scale, sinks, softcap) @ v


def flash_attention_backward_reference(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv by the formulas, for the upstream gradient ``do`` (B, H, N, D).

    With P the probabilities and o = P v: dV = P^T dO, dP = dO V^T, dS = P * (dP - delta) with delta = rowsum(o * dO),
    dQ = scale dS K, dK = scale dS^T Q. Heads that share a key head add up.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    seen = _seen(q.shape[2], k.shape[2], causal, lengths, window, q.device)
    wide_k, wide_v = _wide(q, k, v, seen)
    p = _probabilities(q, wide_k, seen, scale)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    delta = (p @ wide_v * do).sum(-1, keepdim=True)
    ds = p * (do @ wide_v.mT - delta)
    dk, dv = (t.unflatten(1, (k.shape[1], group)).sum(2) for t in (scale * ds.mT @ q, p.mT @ do))
    return scale * ds @ wide_k, dk, dv


def paged_attention_reference(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the last N of ``lengths[b]`` positions, from pages (P, H_kv, page, D); -> (B, H, N, D).

    ``block_table`` (B, n) names the pages of each sequence. Keys on a page that is not in [0, P) count as not there.
    """
    pages, _, page, _ = k_pages.shape
    there = ((block_table >= 0) & (block_table < pages)).repeat_interleave(page, dim=1)
    ids = block_table.long().clamp(0, pages - 1)
    k, v = (t[ids].transpose(1, 2).flatten(2, 3) for t in (k_pages, v_pages))  # (B, H_kv, n * page, D)
    seen = _seen(q.shape[2], k.shape[2], True, lengths, None, q.device) & there[:, None, None, :]
    k, v = _wide(q, k, v, seen)
    return _probabilities(q, k, seen, scale, sinks, softcap) @ v


def append_to_pages_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Writes k and v (B, H_kv, N, D) into the pages (P, H_kv, page, D), from position ``lengths[b]`` on.

    Positions without room in ``block_table``, or whose page is not in [0, P), are left out.
    """
    pages, _, page, _ = k_pages.shape
    for b, start in enumerate(lengths.tolist()):
        for i in range(k.shape[2]):
            where, slot = divmod(start + i, page)
            if 0 <= where < block_table.shape[1] and 0 <= (place := int(block_table[b, where])) < pages:
                k_pages[place, :, slot] = k[b, :, i]
                v_pages[place, :, slot] = v[b, :, i]
