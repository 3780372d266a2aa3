"""What ``kernelbook.distributed`` does between its collectives, for several ranks in lock step in one process.

Copies from one list to another stand where messages travel. So the kernels run in the process of the test, where faults can be
planted, memory is watched and sanitizers look on; ``several_ranks.py`` checks the whole with real groups of processes.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernelbook.distributed import exchange, windows

Tensors = Sequence[torch.Tensor]


class Passed(NamedTuple):
    """By rank: results, and gradients of tokens and gates."""

    out: Tensors
    dx: Tensors
    dgates: Tensors


def _experts(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, first: int, own: int) -> torch.Tensor:
    """Expert e multiplies by e + 1. A weight for each row and slot; ids from ``first`` on, those of other ranks not below ``own``."""
    factor = torch.where((ids >= 0) & (ids < own), (ids + first + 1).to(rows.dtype) * weights, 0)
    return rows * factor.sum(-1, keepdim=True)


def _scaled(
    grads: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, first: int, own: int
) -> Tensors:
    """Gradients of the rows and weights that ``_experts`` was given."""
    factor = torch.where((ids >= 0) & (ids < own), (ids + first + 1).to(rows.dtype), 0)
    return grads * (factor * weights).sum(-1, keepdim=True), factor * (grads * rows).sum(-1, keepdim=True)


def reference(xs: Tensors, gates: Tensors, ids: Tensors, grads: Tensors, experts: int) -> Passed:
    factors = [torch.where((i >= 0) & (i < experts), i + 1, 0).to(x.dtype) for i, x in zip(ids, xs, strict=True)]
    scale = [(f * g).sum(-1, keepdim=True) for f, g in zip(factors, gates, strict=True)]
    return Passed(
        [x * s for x, s in zip(xs, scale, strict=True)],
        [d * s for d, s in zip(grads, scale, strict=True)],
        [f * (d * x).sum(-1, keepdim=True) for f, d, x in zip(factors, grads, xs, strict=True)],
    )


def _moved(parts: Tensors, counts: Tensors, *, back: bool = False) -> list[torch.Tensor]:
    """All to all: what each rank holds for the others, or from them, by ``counts[source][target]`` rows."""
    numbers = [[int(n) for n in count[:, 0]] for count in counts]
    if back:
        numbers = [list(n) for n in zip(*numbers, strict=True)]
    split = [part.split(number) for part, number in zip(parts, numbers, strict=True)]
    return [torch.cat(found) for found in zip(*split, strict=True)]


def _alone(part: exchange._Message) -> exchange._Message:
    """Parts in memory of their own, which ends where they end."""
    return exchange._Message(part.whole, *(p.clone() for p in part[1:]))


def _only_parts(part: exchange._Message, write: Callable[[], Any], *sizes: Any) -> Any:
    """What ``write`` gives; it may fill the message's parts, and nothing between them."""
    before = exchange._Message.of(part.whole.random_(0, 255).clone(), *sizes)
    result = write()
    for old, new in zip(before[1:], part[1:], strict=True):
        old.copy_(new)
    assert torch.equal(before.whole, part.whole)
    return result


def by_messages(xs: Tensors, gates: Tensors, ids: Tensors, grads: Tensors, experts: int, share: int) -> Passed:
    n, (_, hidden), slots = len(xs), xs[0].shape, gates[0].shape[1]
    empty, sizes = exchange._Message.empty, (hidden, slots, xs[0].dtype, gates[0].dtype)
    counts = [torch.empty(n, 2, dtype=torch.int32, device=x.device) for x in xs]
    places, sent = [], []
    for x, g, i, count in zip(xs, gates, ids, counts, strict=True):
        at, firsts = exchange._place(i, experts, share, n, count)
        leaving = empty(int(count[:, 0].sum()), x, g)
        given = leaving, x, g, i, at, firsts, count, experts, share
        places.append(_only_parts(leaving, functools.partial(exchange._send, *given), *sizes))
        assert (leaving.ids >= -1).all()
        sent.append(leaving.whole)
    pairs = []
    for rank, whole in enumerate(_moved(sent, counts)):
        arrived = _alone(exchange._Message.of(whole, *sizes))
        theirs = torch.stack([count[rank] for count in counts])
        pairs.append(exchange._arrive(arrived, theirs, int(theirs[:, 1].sum())))
    results = [_experts(p, w, i, rank * share, share) for rank, (p, w, i, _) in enumerate(pairs)]

    def summed(rows: Tensors) -> list[torch.Tensor]:
        leaving = [r.new_empty(of_slots.shape[0], hidden) for r, (*_, of_slots) in zip(rows, pairs, strict=True)]
        for out, r, (*_, of_slots) in zip(leaving, rows, pairs, strict=True):
            exchange._combine(r, of_slots, out)
        return _moved(leaving, counts, back=True)

    out = [torch.empty_like(x) for x in xs]
    for rows, at, o in zip(summed(results), places, out, strict=True):
        exchange._combine(rows, at, o)
    # Gradients: the other way.
    leaving = [g.new_empty(int(count[:, 0].sum()), hidden) for g, count in zip(grads, counts, strict=True)]
    for g, at, rows in zip(grads, places, leaving, strict=True):
        exchange._spread(g, at, rows)
    returned = []
    for rank, (rows, (p, w, i, of_slots)) in enumerate(zip(_moved(leaving, counts), pairs, strict=True)):
        grad = torch.empty_like(p)
        exchange._spread(rows, of_slots, grad)
        drows, dweights = _scaled(grad, p, w, i, rank * share, share)
        part = empty(of_slots.shape[0], drows, dweights.expand(-1, slots))
        _only_parts(
            part,
            functools.partial(exchange._combine, drows, of_slots, part.rows, dweights, part.weights),
            *sizes,
        )
        returned.append(part.whole)
    dx, dgates = [torch.empty_like(x) for x in xs], [torch.empty_like(g) for g in gates]
    for rank, whole in enumerate(_moved(returned, counts, back=True)):
        part = _alone(exchange._Message.of(whole, *sizes))
        exchange._combine(part.rows, places[rank], dx[rank], part.weights, dgates[rank], ids[rank], share, experts)
    return Passed(out, dx, dgates)


class _Windows(windows.Windows):
    """Of ranks that are all in this process."""

    def __init__(self, rank: int, memory: Tensors, size: int, most: int) -> None:
        self.rank, self.ranks, self.size, self.device = rank, len(memory), size, memory[0].device
        self.memory, self.barrier = memory[rank], lambda: None
        begin = torch.tensor([m.data_ptr() for m in memory], dtype=torch.int64, device=self.device)
        self.addresses = begin, begin + size
        self.max_tokens_over_ranks = lambda tokens: most  # type: ignore[method-assign]

    def view(self, *part: Any) -> torch.Tensor:
        """A part in memory of its own, which ends where it ends: kernels read it, and write to addresses."""
        return super().view(*part).clone()

    def expected(self, window: int, parts: dict[int, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """The memory after the ``rows`` (by source and number) of these ``parts`` have come, and nothing else."""
        after = self.memory.clone()
        for at, part in parts.items():
            begin = window * self.size + at
            bytes_of = after[begin : begin + part.numel() * part.element_size()]
            bytes_of.view(part.dtype).view(part.shape)[rows] = part[rows]
        return after


def by_windows(xs: Tensors, gates: Tensors, ids: Tensors, grads: Tensors, experts: int, share: int) -> Passed:
    n, (_, hidden), slots, size = len(xs), xs[0].shape, gates[0].shape[1], 1 << 14
    memory = [torch.randint(0, 255, (2 * size,), dtype=torch.uint8, device=xs[0].device) for _ in xs]
    if watch := sys.modules.get("kernelbook.lab.watched_memory"):
        watch.reached[:] = memory
    ways = [
        windows._WindowDispatchPlan(_Windows(rank, memory, size, max(map(len, xs))), i, experts, share)
        for rank, i in enumerate(ids)
    ]
    layout = ways[0].layout(xs[0], gates[0])
    assert layout.size <= size
    put = []
    for rank, way in enumerate(ways):
        shapes = ((n, layout.capacity, length) for length in (hidden, slots, slots))
        rows, weights, local = (like.new_empty(s) for like, s in zip((xs[0], gates[0], ids[0]), shapes, strict=True))
        come = torch.zeros(n, layout.capacity, dtype=torch.bool, device=rows.device)
        for source, i in enumerate(ids):
            here = (i >= rank * share) & (i < min(rank * share + share, experts))
            goes = here.any(1)
            number = int(goes.sum())
            come[source, :number] = True
            rows[source, :number], weights[source, :number] = xs[source][goes], gates[source][goes]
            local[source, :number] = torch.where(here, i - rank * share, -1)[goes]
        parts = {layout.rows: rows, layout.weights: weights, layout.ids: local}
        after = way.windows.expected(0, parts, come)
        after[: 4 * n] = come.sum(1, dtype=torch.int32).view(torch.uint8)
        put.append((after, come))
    for way, x, g in zip(ways, xs, gates, strict=True):
        way.places, _ = exchange._place(
            way.ids, experts, share, n, None, way.windows.addresses[0], way.windows.rank, layout.capacity
        )
        windows._put(way, layout, x, g)
    assert all(torch.equal(m, after) for m, (after, _) in zip(memory, put, strict=True))
    taken = [windows._take(way, layout, x, g) for way, x, g in zip(ways, xs, gates, strict=True)]
    for way, (rows, weights, i), (_, come) in zip(ways, taken, put, strict=True):
        nothing = ~come.view(-1)
        assert (i[nothing] == way.own).all() and (weights[nothing] == 0).all() and (rows[nothing] == 0).all()

    def give(rows: Tensors, weights: Tensors | None) -> None:
        shape = n, layout.capacity, -1
        for m in memory:
            m.random_(0, 255)
        after = []
        for rank, way in enumerate(ways):
            parts = {layout.rows: torch.stack([r.view(shape)[rank] for r in rows])}
            if weights is not None:
                parts[layout.weights] = torch.stack([w.view(shape)[rank] for w in weights])
            came = torch.stack([come[rank] for _, come in put])
            after.append(way.windows.expected(1, parts, came))
        for rank, way in enumerate(ways):
            windows._give(way, layout, rows[rank], None if weights is None else weights[rank])
        assert all(map(torch.equal, memory, after))

    give([_experts(*t, rank * share, way.own) for rank, (way, t) in enumerate(zip(ways, taken, strict=True))], None)
    out = [torch.empty_like(x) for x in xs]
    for way, o in zip(ways, out, strict=True):
        windows._sums(way, layout, o, None)
    for way, g in zip(ways, grads, strict=True):
        windows._put(way, layout, g, None)
    returned = [windows._take(way, layout, g, None)[0] for way, g in zip(ways, grads, strict=True)]
    scaled = [
        _scaled(grad, *t, rank * share, way.own)
        for rank, (way, grad, t) in enumerate(zip(ways, returned, taken, strict=True))
    ]
    give(*zip(*scaled, strict=True))
    dx, dgates = [torch.empty_like(x) for x in xs], [torch.empty_like(g) for g in gates]
    for way, d, dg in zip(ways, dx, dgates, strict=True):
        windows._sums(way, layout, d, dg)
    return Passed(out, dx, dgates)
