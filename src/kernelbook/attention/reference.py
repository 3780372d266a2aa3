"""Attention and its gradients in plain PyTorch, with the whole score matrix, in any dtype up to float64."""

import math

import torch

__all__ = ["causal_mask_reference", "flash_attention_backward_reference", "flash_attention_reference"]


def causal_mask_reference(n: int, s: int, device: torch.device | None = None) -> torch.Tensor:
    """(N, S) booleans: which keys each query may see. The last query is aligned with the last key.

    Three queries and five keys::

        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1
    """
    return torch.ones(n, s, dtype=torch.bool, device=device).tril(s - n)


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """(B, H, N, S): softmax of the scaled scores; rows with no key to see are zero.

    ``k`` has as many heads as ``q``.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * scale
    if causal:
        mask = causal_mask_reference(q.shape[2], k.shape[2], q.device)
        scores = scores.masked_fill(~mask, -math.inf)
        # A row of -inf alone would give NaN.
        return scores.masked_fill(~mask.any(1, keepdim=True), 0.0).softmax(-1).masked_fill(~mask, 0.0)
    return scores.softmax(-1)


def flash_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` for q (B, H, N, D), k and v (B, H_kv, S, D); -> (B, H, N, D).

    Query head ``h`` reads key and value head ``h // (H / H_kv)``. ``scale`` is 1 / sqrt(D) unless given.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    return _probabilities(q, k, causal, scale) @ v


def flash_attention_backward_reference(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv by the formulas, for the upstream gradient ``do`` (B, H, N, D).

    With P the probabilities and o = P v: dV = P^T dO, dP = dO V^T, dS = P * (dP - delta) with delta = rowsum(o * dO),
    dQ = scale dS K, dK = scale dS^T Q. Heads that share a key head add up.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    wide_k, wide_v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    p = _probabilities(q, wide_k, causal, scale)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    delta = (p @ wide_v * do).sum(-1, keepdim=True)
    ds = p * (do @ wide_v.mT - delta)
    dk, dv = (t.unflatten(1, (k.shape[1], group)).sum(2) for t in (scale * ds.mT @ q, p.mT @ do))
    return scale * ds @ wide_k, dk, dv
