"""Tokens travel to the ranks that hold their experts, and what these made of them comes back, summed for each token.

A token goes to a rank once, however many of its experts live there, and one row comes back: the sum over those experts,
weighted. So a token crosses the wire at most ``min(k, ranks)`` times each way instead of ``k`` times. Where it arrives it
becomes a row for each of its experts there, a *pair*.

====================  =========================================================================
forward               counts (8 bytes a pair of ranks), **the host waits for them**, tokens with
                      their experts and weights, results
backward              gradients of the results, gradients of tokens and weights
====================  =========================================================================

No token is dropped and none is padded: whatever the router says, the buffers have the size that the counts ask for. The
host has to know that size, which is the one wait of a layer (:func:`wait_for_counts`). :func:`exchange_all` does without.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.distributed import kernels
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.memory import tl_accumulator
from kernelbook.tensors import check_versions, with_versions

__all__ = ["all_gather", "exchange", "exchange_all", "reduce_scatter", "wait_for_counts"]

# As PyTorch calls them since 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ALIGNED = 128  # bytes, for each part of a message: its strides are multiples of 16 elements of whatever dtype


class _Message(NamedTuple):
    """Messages (rows, bytes), and their parts: rows (rows, H), weights (rows, k), ids and first pair (rows, k + 1)."""

    whole: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, whole: torch.Tensor, hidden: int, top_k: int, dtype: torch.dtype, gates: torch.dtype) -> "_Message":
        at_weights, at_ids, _ = _offsets(hidden, top_k, dtype, gates)
        rows, weights, ids = (whole.view(kind) for kind in (dtype, gates, torch.int32))
        return cls(
            whole,
            rows[:, :hidden],
            weights[:, at_weights // gates.itemsize :][:, :top_k],
            ids[:, at_ids // 4 :][:, : top_k + 1],
        )

    @classmethod
    def empty(cls, count: int, like: torch.Tensor, gates: torch.Tensor) -> "_Message":
        """For ``count`` rows like those of ``like`` (T, H), with weights like ``gates`` (T, k)."""
        hidden, top_k = like.shape[1], gates.shape[1]
        size = _offsets(hidden, top_k, like.dtype, gates.dtype)[2]
        whole = torch.empty(count, size, dtype=torch.uint8, device=like.device)
        return cls.of(whole, hidden, top_k, like.dtype, gates.dtype)


@functools.cache
def _offsets(hidden: int, top_k: int, dtype: torch.dtype, gates: torch.dtype) -> tuple[int, int, int]:
    """Return where weights and ids begin in a message, and where it ends, in bytes."""

    def up(size: int) -> int:
        return -(-size // ALIGNED) * ALIGNED

    at_weights = up(hidden * dtype.itemsize)
    at_ids = at_weights + up(top_k * gates.itemsize)
    return at_weights, at_ids, at_ids + up((top_k + 1) * 4)


# --- launches -------------------------------------------------------------------------------------------------------

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return what kernels that copy are given: to the interpreter integers, since a launch would widen bfloat16 there."""
    return tensor.view(INTEGERS[tensor.element_size()]) if runtime.INTERPRET else tensor


@functools.cache
def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _block(hidden: int) -> int:
    return min(kernels.BLOCK_H, max(_power(hidden), 16))


def _sizes(top_k: int, hidden: int) -> dict[str, int]:
    return {"k": top_k, "BLOCK_K": _power(top_k), "BLOCK_H": _block(hidden)}


@functools.cache
def _launch(kernel: str, **constants: Any) -> Launch:
    """Return a launch by what decides it: to hash a kernel costs the host more than to launch it."""
    return launcher(getattr(kernels, kernel), num_warps=kernels.WARPS, **constants)


def _place(
    ids: torch.Tensor, num_experts: int, share: int, ranks: int, counts: torch.Tensor | None = None,
    windows: torch.Tensor | None = None, own: int = 0, capacity: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """places and firsts (T, n); writes ``counts`` (n, 2), or without them into the ranks' ``windows``."""
    tokens, top_k = ids.shape
    places = torch.empty(tokens, ranks, dtype=torch.int32, device=ids.device)
    firsts = None if counts is None else torch.empty_like(places)
    block_k = _power(top_k)
    blocks = {"BLOCK_T": max(min(4096 // block_k, 1024), 16), "BLOCK_K": block_k}
    launch = _launch("_places_kernel", SHARED=counts is None, k=top_k, **blocks)
    launch((ranks,), ids, places, firsts, counts, windows, tokens, num_experts, share, own, capacity)
    return places, firsts


def _send(
    message: _Message, x: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor, places: torch.Tensor,
    firsts: torch.Tensor, counts: torch.Tensor, num_experts: int, share: int,
) -> torch.Tensor:  # fmt: skip
    """Fill the message; return the rows that tokens have in it, (T, n)."""
    (tokens, top_k), hidden = ids.shape, x.shape[1]
    of_message = torch.empty_like(places)
    if tokens == 0:
        return of_message
    launch = _launch("_send_kernel", **_sizes(top_k, hidden))
    rows, weights, local = _bits(message.rows), _bits(message.weights), message.ids
    launch(
        (tokens,), _bits(x), _bits(gates), ids, places, firsts, counts, of_message, rows, rows.stride(0), weights, weights.stride(0),
        local, local.stride(0), num_experts, share, counts.shape[0], hidden,
    )  # fmt: skip
    return of_message


def _arrive(message: _Message, counts: torch.Tensor, pairs: int) -> tuple[torch.Tensor, ...]:
    """Pairs (P, H), their weights and ids (P, 1), and the pair of each slot (rows, k)."""
    (count, hidden), top_k = message.rows.shape, message.weights.shape[1]
    device = message.whole.device
    out = torch.empty(pairs, hidden, dtype=message.rows.dtype, device=device)
    weights = torch.empty(pairs, 1, dtype=message.weights.dtype, device=device)
    ids = torch.empty(pairs, 1, dtype=torch.int32, device=device)
    of_slots = torch.empty(count, top_k, dtype=torch.int32, device=device)
    if count:
        launch = _launch("_arrive_kernel", k=top_k, BLOCK_H=_block(hidden))
        rows, theirs, local = _bits(message.rows), _bits(message.weights), message.ids
        launch(
            (count,), rows, rows.stride(0), theirs, theirs.stride(0), local, local.stride(0), counts, _bits(out),
            _bits(weights), ids, of_slots, counts.shape[0], hidden,
        )  # fmt: skip
    return out, weights, ids, of_slots


def _combine(
    rows: torch.Tensor, places: torch.Tensor, out: torch.Tensor, weights: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None, ids: torch.Tensor | None = None, share: int = 1, num_experts: int = 0,
) -> None:  # fmt: skip
    """out[i] = the sum of ``rows`` at ``places[i]``, and the weights at these places."""
    (items, width), hidden = places.shape, rows.shape[1]
    if items == 0:
        return
    top_k = width if out_weights is None else out_weights.shape[1]
    launch = _launch(
        "_combine_kernel", HAS_WEIGHTS=weights is not None, HAS_IDS=ids is not None, ACC=tl_accumulator(rows.dtype),
        BLOCK_K=_power(top_k), BLOCK_H=_block(hidden),
    )  # fmt: skip
    given: tuple[Any, ...] = (None, 0, None, None, 0)
    if weights is not None and out_weights is not None:
        given = _bits(weights), weights.stride(0), ids, _bits(out_weights), out_weights.stride(0)
    launch(
        (items,), rows, rows.stride(0), places, out, out.stride(0), *given, width, share, top_k, hidden, num_experts
    )  # fmt: skip


def _spread(items: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """rows[places[i, j]] = items[i]."""
    (count, width), hidden = places.shape, items.shape[1]
    if count:
        launch = _launch("_spread_kernel", BLOCK_H=_block(hidden))
        launch((count,), _bits(items), items.stride(0), places, _bits(rows), rows.stride(0), width, hidden)


def _own(message: _Message, first: int, own: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids (rows, k): from the expert ``first`` on, and ``own`` for slots that are not for one of ``own``."""
    theirs, top_k = _bits(message.weights), message.weights.shape[1]
    weights = torch.empty(message.weights.shape, dtype=message.weights.dtype, device=theirs.device)
    local = torch.empty_like(weights, dtype=torch.int32)
    if local.numel():
        launch = _launch("_own_kernel", k=top_k, BLOCK=1024)
        launch(
            (cdiv(local.numel(), 1024),), theirs, theirs.stride(0), message.ids, message.ids.stride(0),
            _bits(weights), local, local.numel(), first, own, num_experts,
        )  # fmt: skip
    return weights, local


# --- dispatch, combine -----------------------------------------------------------------------------------------------


class _DispatchPlan:
    """Plan of a dispatch, which the forward pass makes and the backward pass follows: where tokens go."""

    sent: list[int]  # rows to each rank
    received: list[int]  # and from each
    pairs: int
    places: torch.Tensor  # (T, n) rows of the message that leaves
    slots: torch.Tensor  # (rows, k) pairs of the message that arrives

    def __init__(self, ids: torch.Tensor, num_experts: int, share: int, group: dist.ProcessGroup) -> None:
        self.ids, self.num_experts, self.share, self.group = ids, num_experts, share, group
        self.counts = torch.empty(2, dist.get_world_size(group), 2, dtype=torch.int32, device=ids.device)

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, self.received, self.sent, group=self.group)
        return out

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(sum(self.sent), *rows.shape[1:])
        dist.all_to_all_single(out, rows, self.sent, self.received, group=self.group)
        return out


class _Dispatch(torch.autograd.Function):
    """Tokens (T, H) and gates (T, k) -> pairs (P, H), their weights (P, 1) and ids (P, 1), on the ranks of their experts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gates: torch.Tensor, plan: _DispatchPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.plan, ctx.versions = plan, with_versions(plan.ids)
        mine, theirs = plan.counts.unbind(0)
        places, firsts = _place(plan.ids, plan.num_experts, plan.share, mine.shape[0], mine)
        assert firsts is not None
        dist.all_to_all_single(theirs, mine, group=plan.group)
        sent, received = wait_for_counts(plan.counts)
        plan.sent, plan.received = ([rows for rows, _ in count] for count in (sent, received))
        plan.pairs = sum(pairs for _, pairs in received)
        leaving = _Message.empty(sum(plan.sent), x, gates)
        plan.places = _send(leaving, x, gates, plan.ids, places, firsts, mine, plan.num_experts, plan.share)
        arrived = _Message.of(plan.dispatch(leaving.whole), x.shape[1], gates.shape[1], x.dtype, gates.dtype)
        out, weights, ids, plan.slots = _arrive(arrived, theirs, plan.pairs)
        ctx.mark_non_differentiable(ids)
        return out, weights, ids

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        plan: _DispatchPlan = ctx.plan
        check_versions(ctx.versions)
        tokens, top_k = plan.ids.shape
        leaving = _Message.empty(sum(plan.received), drows, dweights.expand(-1, top_k))
        _combine(drows.contiguous(), plan.slots, leaving.rows, dweights.contiguous(), leaving.weights)
        arrived = _Message.of(plan.combine(leaving.whole), drows.shape[1], top_k, drows.dtype, dweights.dtype)
        dx, dgates = drows.new_empty(tokens, drows.shape[1]), dweights.new_empty(tokens, top_k)
        _combine(arrived.rows, plan.places, dx, arrived.weights, dgates, plan.ids, plan.share, plan.num_experts)
        return dx, dgates, None


class _Combine(torch.autograd.Function):
    """Results of the pairs (P, H) -> their sums (T, H), where the tokens came from."""

    @staticmethod
    def forward(ctx: Any, pairs: torch.Tensor, plan: _DispatchPlan) -> torch.Tensor:
        ctx.plan = plan
        leaving = pairs.new_empty(sum(plan.received), pairs.shape[1])
        _combine(pairs.contiguous(), plan.slots, leaving)
        out = pairs.new_empty(plan.places.shape[0], pairs.shape[1])
        _combine(plan.combine(leaving), plan.places, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        plan: _DispatchPlan = ctx.plan
        leaving = grad.new_empty(sum(plan.sent), grad.shape[1])
        _spread(grad.contiguous(), plan.places, leaving)
        pairs = grad.new_empty(plan.pairs, grad.shape[1])
        _spread(plan.dispatch(leaving), plan.slots, pairs)
        return pairs, None


def wait_for_counts(counts: torch.Tensor) -> list[Any]:
    """Return the counts on the host. **The host waits for the device here**, once in a forward pass of a layer, and nowhere else.

    PyTorch's collectives take the sizes of their messages from the host.
    """
    return counts.tolist()


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
    plan = _DispatchPlan(expert_ids.contiguous(), num_experts, share, group)
    rows, weights, ids = _Dispatch.apply(x.contiguous(), gates.contiguous(), plan)
    result: torch.Tensor = _Combine.apply(experts(rows, ids, weights), plan)
    return result


# --- everything everywhere ------------------------------------------------------------------------------------------


def _everywhere(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    out = tensor.new_empty(dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:])
    return out, all_gather(out, tensor.contiguous(), group=group, async_op=True)


def _home(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    out = tensor.new_empty(tensor.shape[0] // dist.get_world_size(group), *tensor.shape[1:])
    return out, reduce_scatter(out, tensor.contiguous(), group=group, async_op=True)


class _Everywhere(torch.autograd.Function):
    """The rows of all ranks, rank by rank, with weights and with ids of ``own`` experts; backward each rank gets the sums of
    its own rows."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor, first: int, own: int, num_experts: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.group = group
        top_k = ids.shape[1]
        message = _Message.empty(x.shape[0], x[:, :0], gates)  # what is small, together
        message.weights.copy_(gates)
        message.ids[:, :top_k].copy_(ids)
        (whole, one), (rows, two) = _everywhere(message.whole, group), _everywhere(x, group)
        one.wait()
        weights, local = _own(_Message.of(whole, 0, top_k, x.dtype, gates.dtype), first, own, num_experts)
        two.wait()
        ctx.mark_non_differentiable(local)
        return rows, weights, local

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        started = [
            _home(grad, ctx.group) if needed else None
            for grad, needed in zip((drows, dweights), ctx.needs_input_grad[:2], strict=True)
        ]
        for found in started:
            if found is not None:
                found[1].wait()
        return (*(None if found is None else found[0] for found in started), *(None,) * 5)


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

    Args: as :func:`exchange`; ``experts`` is called with k slots a row, of which ids equal to this rank's number of experts are
        to be skipped.

    Raises:
        RuntimeError: the ranks bring different numbers of tokens; on a GPU the device says so, and later calls raise it.
    """
    count = torch.full((1,), x.shape[0], device=x.device)
    told, work = _everywhere(count, group)
    work.wait()
    torch._assert_async((told == count).all(), "exchange_all: all ranks must bring as many tokens")
    first = dist.get_rank(group) * share
    own = max(min(share, num_experts - first), 0)
    rows, weights, ids = _Everywhere.apply(x, gates, expert_ids, first, own, num_experts, group)
    result: torch.Tensor = _Home.apply(experts(rows, ids, weights), group)
    return result
