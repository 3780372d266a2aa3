"""Tokens travel to the ranks that hold their experts, and what these made of them comes back, summed for each token.

A token goes to a rank once, however many of its experts live there, and one row comes back: the sum over those experts,
weighted. So a token crosses the wire at most ``min(k, ranks)`` times each way instead of ``k`` times. Where it arrives it
becomes a row for each of its experts there, a *pair*.

====================  =========================================================================
forward               counts (16 bytes a pair of ranks), **the host waits for them**, tokens with
                      their experts and weights, results
backward              gradients of the results, gradients of tokens and weights
====================  =========================================================================

No token is dropped and none is padded: whatever the router says, the buffers have the size that the counts ask for. The
host has to know that size, which is the one wait of a layer (:func:`wait_for_counts`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ["Exchange", "all_gather", "exchange", "exchange_all", "reduce_scatter", "wait_for_counts"]

# As PyTorch calls them since 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Places(NamedTuple):
    """Which rows belong to which items: a row is a copy of its item, or an item is the sum of its rows.

    ``item`` (L,): the item of each row. ``rows`` (L,): the rows, item by item. ``starts`` (items + 1,): where those of an
    item begin.
    """

    item: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor


def _copy(items: torch.Tensor, places: Places) -> torch.Tensor:
    return items.index_select(0, places.item)


def _sum(rows: torch.Tensor, places: Places) -> torch.Tensor:
    """Sums in float32 at least, in the order of the rows: the same bits every time."""
    items = places.starts.shape[0] - 1
    if rows.shape[0] == 0 or items == 0:
        return rows.new_zeros(items, rows.shape[1])
    return F.embedding_bag(places.rows, rows, places.starts, mode="sum", include_last_offset=True)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, items: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        ctx.places = Places(*places)
        return _copy(items, ctx.places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _sum(grad.contiguous(), ctx.places), None, None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        ctx.places = Places(*places)
        return _sum(rows, ctx.places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _copy(grad, ctx.places), None, None, None


class Exchange(NamedTuple):
    """How many rows go where, known to the host: what an all-to-all is told.

    ``sent``, ``received``: rows to and from each rank. ``pairs``: how many pairs of a token and an expert arrive.
    """

    sent: list[int]
    received: list[int]
    pairs: int
    group: dist.ProcessGroup

    @property
    def back(self) -> "Exchange":
        """The way back."""
        return self._replace(sent=self.received, received=self.sent)


def _travel(rows: torch.Tensor, way: Exchange) -> tuple[torch.Tensor, Any]:
    rows = rows.contiguous()
    out = rows.new_empty(sum(way.received), *rows.shape[1:])
    work = dist.all_to_all_single(out, rows, way.received, way.sent, group=way.group, async_op=True)
    return out, work


def _packed(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """One message of both: bytes, whatever they stand for; and where in a row the second begins."""
    parts = [t.contiguous().view(torch.uint8) for t in (weights, ids)]
    return torch.cat(parts, dim=1), parts[0].shape[1]


def _unpacked(
    small: torch.Tensor, split: int, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return small[:, :split].contiguous().view(weights.dtype), small[:, split:].contiguous().view(ids.dtype)


class _There(torch.autograd.Function):
    """Tokens and their weights (with gradients) and their experts' numbers, to the ranks that hold the experts."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, way: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.way = way
        ctx.mark_non_differentiable(ids)
        small, split = _packed(weights, ids)
        (out, first), (small, second) = _travel(rows, way), _travel(small, way)
        first.wait()
        second.wait()
        weights, ids = _unpacked(small, split, weights, ids)
        ctx.mark_non_differentiable(ids)
        return out, weights, ids

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        started = [
            _travel(grad, ctx.way.back) if needed else None
            for grad, needed in zip((drows, dweights), ctx.needs_input_grad[:2], strict=True)
        ]
        for found in started:
            if found is not None:
                found[1].wait()
        return (*(None if found is None else found[0] for found in started), None, None)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: Exchange) -> torch.Tensor:
        ctx.way = way
        out, work = _travel(rows, way.back)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, work = _travel(grad, ctx.way)
        work.wait()
        return out, None


def wait_for_counts(counts: torch.Tensor) -> list[list[int]]:
    """The counts on the host. **The host waits for the device here**, once in a forward pass of a layer, and nowhere else.

    PyTorch's collectives take the sizes of their messages from the host. (Those of its symmetric memory take them on the
    device; they are not used here.)
    """
    return counts.tolist()


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return F.pad(counts.cumsum(0), (1, 0))


def exchange(
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    gates: torch.Tensor,
    *,
    num_experts: int,
    share: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """``sum_j gates[t, j] * expert_{expert_ids[t, j]}(x[t])`` with experts spread over the ranks of ``group``.

    Every rank calls it with its own tokens; it is a collective. Gradients reach ``x``, ``gates`` and whatever ``experts``
    uses. They are sums over the tokens of all ranks.

    Args:
        experts: this rank's experts, called as ``experts(rows (P, H), ids (P, 1), gates (P, 1)) -> (P, H)`` with ids
            counted from this rank's first expert. It is called with no rows too, so that its backward pass runs.
        x: (T, H), any floating-point dtype.
        expert_ids: (T, k) integers; whatever is not in [0, num_experts) marks a slot to skip.
        gates: (T, k) floating point.
        num_experts: E, on all ranks together.
        share: experts of a rank: rank r has those from ``r * share`` on, as ``torch.chunk`` divides them.
        group: the ranks.

    Returns:
        (T, H) in the dtype of ``experts``' result.
    """
    ranks, (tokens, slots) = dist.get_world_size(group), expert_ids.shape
    ids = expert_ids.to(torch.int64)
    owner = torch.where((ids >= 0) & (ids < num_experts), ids // share, ranks)
    goes = torch.zeros(tokens, ranks + 1, dtype=torch.int64, device=x.device).scatter_(1, owner, 1)[:, :ranks]
    pairs = torch.zeros(ranks + 1, dtype=torch.int64, device=x.device)
    pairs = pairs.scatter_add_(0, owner.reshape(-1), torch.ones_like(owner).reshape(-1))[:ranks]
    counts = torch.stack([goes.sum(0), pairs], dim=1)  # (ranks, 2)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received, arrived = wait_for_counts(torch.stack([counts[:, 0], *arriving.unbind(1)]))
    way = Exchange(sent, received, sum(arrived), group)

    # The rows to send, rank by rank; nothing below waits.
    total = sum(sent)
    by_rank = torch.nonzero_static(goes.t().reshape(-1), size=total)[:, 0]
    by_token = torch.nonzero_static(goes.reshape(-1), size=total)[:, 0]
    number = torch.empty(ranks * tokens, dtype=torch.int64, device=x.device)
    number.scatter_(0, by_rank, torch.arange(total, device=x.device))
    token = by_rank % max(tokens, 1)
    sending = Places(token, number[by_token % ranks * tokens + by_token // ranks], _starts(goes.sum(1)))
    to = (by_rank // max(tokens, 1))[:, None]
    there = torch.where(owner[token] == to, ids[token] - to * share, -1).to(torch.int32)
    rows, weights, local = _There.apply(_Copies.apply(x, *sending), gates[token], there, way)

    # A row for each expert of a token that arrived.
    here = local >= 0
    place = torch.nonzero_static(here.reshape(-1), size=way.pairs)[:, 0]
    arrivals = Places(place // slots, torch.arange(way.pairs, device=x.device), _starts(here.sum(1)))
    out = experts(
        _Copies.apply(rows, *arrivals),
        local.reshape(-1)[place][:, None],
        weights.reshape(-1).index_select(0, place)[:, None],
    )
    result: torch.Tensor = _Sums.apply(_Back.apply(_Sums.apply(out, *arrivals), way), *sending)
    return result


# --- everything everywhere ------------------------------------------------------------------------------------------


def _everywhere(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    out = tensor.new_empty(dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:])
    return out, all_gather(out, tensor.contiguous(), group=group, async_op=True)


def _home(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    out = tensor.new_empty(tensor.shape[0] // dist.get_world_size(group), *tensor.shape[1:])
    return out, reduce_scatter(out, tensor.contiguous(), group=group, async_op=True)


class _Everywhere(torch.autograd.Function):
    """The rows of all ranks, rank by rank, and what goes with them; backward every rank gets the sums of its own."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.group = group
        small, split = _packed(weights, ids)
        (out, first), (small, second) = _everywhere(rows, group), _everywhere(small, group)
        first.wait()
        second.wait()
        weights, ids = _unpacked(small, split, weights, ids)
        ctx.mark_non_differentiable(ids)
        return out, weights, ids

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        started = [
            _home(grad, ctx.group) if needed else None
            for grad, needed in zip((drows, dweights), ctx.needs_input_grad[:2], strict=True)
        ]
        for found in started:
            if found is not None:
                found[1].wait()
        return (*(None if found is None else found[0] for found in started), None, None)


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out, work = _home(rows, group)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, work = _everywhere(grad, ctx.group)
        work.wait()
        return out, None


def exchange_all(
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    gates: torch.Tensor,
    *,
    num_experts: int,
    share: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """As :func:`exchange`, but every token goes to every rank, so that the host knows all sizes and waits for nothing.

    Nothing is sorted and nothing is copied: tokens are gathered, each rank's experts skip the slots that are not theirs, and
    results are added up on their way back, in their dtype. A CUDA graph can hold it. Its price: ``ranks - 1`` rows leave a rank
    for each token, where :func:`exchange` sends those that are needed (of 8 experts drawn at random as many with 2 ranks, one
    in ten less with 4, a third less with 8), and the experts' buffers have a row for each slot of every rank's tokens.

    Args: as :func:`exchange`; all ranks must bring as many tokens, and ``experts`` is called with k slots a row, of which ids
        equal to this rank's number of experts are to be skipped.
    """
    first = dist.get_rank(group) * share
    own = max(min(share, num_experts - first), 0)
    rows, weights, ids = _Everywhere.apply(x, gates, expert_ids, group)
    local = ids - first
    skipped = (local < 0) | (local >= own) | (ids >= num_experts)
    result: torch.Tensor = _Home.apply(experts(rows, local.masked_fill(skipped, own), weights), group)
    return result
