"""Routing and expert products in plain PyTorch, one expert after the other, and what PyTorch users would write faster."""

import torch

__all__ = [
    "grouped_mm_rows",
    "moe_lora_reference",
    "route_reference",
    "scatter2scatter_reference",
]


def route_reference(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> order (T*k,), inverse (T*k,), offsets (E + 1,): a stable sort of the pairs t*k + j by expert; slots to skip last."""
    experts, order = expert_ids.reshape(-1).long().sort(stable=True)
    boundaries = torch.arange(num_experts + 1, device=expert_ids.device)
    return order, order.argsort(), torch.searchsorted(experts, boundaries)


def scatter2scatter_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> torch.Tensor:
    """x (T, K), or (T*k, K) in expert order if ``grouped_in``; w (E, K, N); expert_ids (T, k) -> (T*k, N)."""
    return moe_lora_reference(x, w, None, None, expert_ids, grouped_in=grouped_in, grouped_out=grouped_out)


def moe_lora_reference(
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    expert_ids: torch.Tensor,
    *,
    scaling: float = 1.0,
    bias: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> torch.Tensor:
    """As :func:`kernelbook.moe_lora`, from expert ids (T, k)."""
    num_experts, _, n = w.shape
    tokens, slots = expert_ids.shape
    order, _, offsets = route_reference(expert_ids, num_experts)
    y = x.new_zeros((tokens * slots, n))
    for expert in range(num_experts):
        low, high = offsets[expert : expert + 2].tolist()
        positions = torch.arange(low, high, device=x.device)
        pairs = order[positions]
        rows = x[positions if grouped_in else pairs // slots]
        out = rows @ w[expert]
        if lora_a is not None and lora_b is not None:
            u = rows @ lora_a[expert].t()
            out = out + scaling * (u @ lora_b[expert].t())
        if bias is not None:
            out = out + bias[expert]
        y = y.index_copy(0, positions if grouped_out else pairs, out)
    if gates is None:
        return y
    return (y.view(tokens, slots, n) * gates[..., None].to(x.dtype)).sum(1)


def grouped_mm_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    tokens: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scaling: float = 1.0,
    grouped_in: bool = False,
) -> torch.Tensor:
    """The same with ``torch._grouped_mm``: rows gathered in expert order, three grouped products, rows put back.

    Args:
        x, w, lora_a, lora_b, scaling, grouped_in: as in :func:`moe_lora_reference`.
        tokens, inverse, offsets: the token of each sorted row, and what :func:`route_reference` returns. No slot may be skipped:
            ``torch._grouped_mm`` leaves rows behind the last expert's as they were allocated.
    """
    ends = offsets[1:].to(torch.int32)
    rows = x if grouped_in else x[tokens]
    out = torch._grouped_mm(rows, w, offs=ends)
    if lora_a is not None and lora_b is not None:
        thin = torch._grouped_mm(rows, lora_a.transpose(1, 2), offs=ends)
        low_rank = torch._grouped_mm(thin, lora_b.transpose(1, 2), offs=ends)
        out = out + (low_rank if scaling == 1.0 else scaling * low_rank)
    return out[inverse]
