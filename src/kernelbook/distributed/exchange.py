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
from kernelbook.launch import Launch, launcher
from kernelbook.memory import tl_accumulator
from kernelbook.tensors import check_versions, with_versions

# As PyTorch calls them since 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Bytes, for each part of a message or a window: its strides are multiples of 16 elements of whatever dtype.
ALIGNED = 128


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
    at_weights = aligned(hidden * dtype.itemsize)
    at_ids = at_weights + aligned(top_k * gates.itemsize)
    return at_weights, at_ids, at_ids + aligned((top_k + 1) * 4)


def aligned(size: int) -> int:
    """Return the bytes that a part of this size takes in a message or a window."""
    return -(-size // ALIGNED) * ALIGNED


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
    launch = _launch("_send_kernel", HAS_IDS=True, **_sizes(top_k, hidden))
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
        launch = _launch("_send_kernel", HAS_IDS=False, **_sizes(1, hidden))
        message = _bits(rows), rows.stride(0), None, 0, None, 0
        launch((count,), _bits(items), None, None, places, None, None, None, *message, 0, 0, width, hidden)


def _own(message: _Message, first: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids (rows, k): from the expert ``first`` on, and ``own`` for slots that are not for one of ``own``."""
    local = message.ids[:, : message.weights.shape[1]] - first
    return message.weights.contiguous(), torch.where((local >= 0) & (local < own), local, own)


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
        self.versions = with_versions(ids)
        self.counts = torch.empty(2, dist.get_world_size(group), 2, dtype=torch.int32, device=ids.device)

    def _travel(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, sent, group=self.group)
        return out

    def dispatch(self, x: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> pairs (P, H), their weights (P, 1) and ids (P, 1)."""
        mine, theirs = self.counts.unbind(0)
        places, firsts = _place(self.ids, self.num_experts, self.share, mine.shape[0], mine)
        assert firsts is not None
        dist.all_to_all_single(theirs, mine, group=self.group)
        sent, received = wait_for_counts(self.counts)
        self.sent, self.received = ([rows for rows, _ in count] for count in (sent, received))
        self.pairs = sum(pairs for _, pairs in received)
        leaving = _Message.empty(sum(self.sent), x, gates)
        self.places = _send(leaving, x, gates, self.ids, places, firsts, mine, self.num_experts, self.share)
        whole = self._travel(leaving.whole, self.sent, self.received)
        arrived = _Message.of(whole, x.shape[1], gates.shape[1], x.dtype, gates.dtype)
        out, weights, ids, self.slots = _arrive(arrived, theirs, self.pairs)
        return out, weights, ids

    def dispatch_back(
        self, drows: torch.Tensor, dweights: torch.Tensor, dx: torch.Tensor, dgates: torch.Tensor, *_: Any
    ) -> None:
        check_versions(self.versions)
        top_k = self.ids.shape[1]
        leaving = _Message.empty(sum(self.received), drows, dweights.expand(-1, top_k))
        _combine(drows, self.slots, leaving.rows, dweights, leaving.weights)
        whole = self._travel(leaving.whole, self.received, self.sent)
        arrived = _Message.of(whole, drows.shape[1], top_k, drows.dtype, dweights.dtype)
        _combine(arrived.rows, self.places, dx, arrived.weights, dgates, self.ids, self.share, self.num_experts)

    def combine(self, pairs: torch.Tensor, out: torch.Tensor) -> None:
        leaving = pairs.new_empty(sum(self.received), pairs.shape[1])
        _combine(pairs, self.slots, leaving)
        _combine(self._travel(leaving, self.received, self.sent), self.places, out)

    def combine_back(self, grad: torch.Tensor) -> torch.Tensor:
        leaving = grad.new_empty(sum(self.sent), grad.shape[1])
        _spread(grad, self.places, leaving)
        pairs = grad.new_empty(self.pairs, grad.shape[1])
        _spread(self._travel(leaving, self.sent, self.received), self.slots, pairs)
        return pairs


class _Dispatch(torch.autograd.Function):
    """Tokens (T, H) and gates (T, k) -> rows, their weights and ids on the ranks of their experts, as a plan brings them there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gates: torch.Tensor, plan: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.plan, ctx.tokens, ctx.slots = plan, *gates.shape
        rows, weights, ids = plan.dispatch(x, gates)
        ctx.mark_non_differentiable(ids)
        return rows, weights, ids

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        dx, dgates = drows.new_empty(ctx.tokens, drows.shape[1]), dweights.new_empty(ctx.tokens, ctx.slots)
        ctx.plan.dispatch_back(drows.contiguous(), dweights.contiguous(), dx, dgates, ctx.needs_input_grad)
        return dx, dgates, None


class _Combine(torch.autograd.Function):
    """Results of the rows -> their sums (T, H), where the tokens came from."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: int, plan: Any) -> torch.Tensor:
        ctx.plan = plan
        out = rows.new_empty(tokens, rows.shape[1])
        plan.combine(rows.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.plan.combine_back(grad.contiguous()), None, None


def through(experts: Callable[..., torch.Tensor], x: torch.Tensor, gates: torch.Tensor, plan: Any) -> torch.Tensor:
    """-> (T, H): tokens go to their experts and results come back, both as ``plan`` says."""
    rows, weights, ids = _Dispatch.apply(x.contiguous(), gates.contiguous(), plan)
    return _Combine.apply(experts(rows, ids, weights), x.shape[0], plan)  # type: ignore[no-any-return]


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
    return through(experts, x, gates, _DispatchPlan(expert_ids.contiguous(), num_experts, share, group))


# --- everything everywhere ------------------------------------------------------------------------------------------


class _EveryRankPlan:
    """The rows of all ranks, rank by rank, with weights and with ids of the ``own`` experts from ``first`` on; backwards each rank
    gets the sums of its own rows."""

    def __init__(self, ids: torch.Tensor, num_experts: int, share: int, group: dist.ProcessGroup) -> None:
        self.ids, self.group = ids, group
        self.first = dist.get_rank(group) * share
        self.own = max(min(share, num_experts - self.first), 0)

    def gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """-> the tensors of all ranks one behind the other, and what to wait for."""
        out = tensor.new_empty(dist.get_world_size(self.group) * tensor.shape[0], *tensor.shape[1:])
        return out, all_gather(out, tensor, group=self.group, async_op=True)

    def dispatch(self, x: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top_k = self.ids.shape[1]
        message = _Message.empty(x.shape[0], x[:, :0], gates)  # what is small, together
        message.weights.copy_(gates)
        message.ids[:, :top_k].copy_(self.ids)
        (whole, one), (rows, two) = self.gather(message.whole), self.gather(x)
        one.wait()
        arrived = _Message.of(whole, 0, top_k, x.dtype, gates.dtype)
        weights, local = _own(arrived, self.first, self.own)
        two.wait()
        return rows, weights, local

    def dispatch_back(
        self, drows: torch.Tensor, dweights: torch.Tensor, dx: torch.Tensor, dgates: torch.Tensor, wanted: Any
    ) -> None:
        pairs = [pair for pair, is_wanted in zip(((dx, drows), (dgates, dweights)), wanted, strict=False) if is_wanted]
        for work in [reduce_scatter(out, grad, group=self.group, async_op=True) for out, grad in pairs]:
            work.wait()

    def combine(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        reduce_scatter(out, rows, group=self.group)

    def combine_back(self, grad: torch.Tensor) -> torch.Tensor:
        rows, work = self.gather(grad)
        work.wait()
        return rows


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
    plan = _EveryRankPlan(expert_ids, num_experts, share, group)
    count = torch.full((1,), x.shape[0], device=x.device)
    told, work = plan.gather(count)
    work.wait()
    torch._assert_async((told == count).all(), "exchange_all: all ranks must bring as many tokens")
    return through(experts, x, gates, plan)
