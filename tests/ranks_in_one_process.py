"""What ``kernelbook.distributed`` does between its collectives, for several ranks in lock step in one process.

Copies from one list to another stand where messages travel. So the kernels run in the process of the test, where faults can be
planted, memory is watched and sanitizers look on; ``several_ranks.py`` checks the whole with real groups of processes.
"""

from collections.abc import Sequence
from typing import NamedTuple

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


def by_messages(xs: Tensors, gates: Tensors, ids: Tensors, grads: Tensors, experts: int, share: int) -> Passed:
    n, (_, hidden), slots = len(xs), xs[0].shape, gates[0].shape[1]
    empty, message = exchange._Message.empty, exchange._Message.of
    dtypes = xs[0].dtype, gates[0].dtype
    counts = [torch.empty(n, 2, dtype=torch.int32, device=x.device) for x in xs]
    places, sent = [], []
    for x, g, i, count in zip(xs, gates, ids, counts, strict=True):
        at, firsts = exchange._place(i, experts, share, n, count)
        leaving = empty(int(count[:, 0].sum()), x, g)
        places.append(exchange._send(leaving, x, g, i, at, firsts, count, experts, share))
        sent.append(leaving.whole)
    pairs = []
    for rank, whole in enumerate(_moved(sent, counts)):
        arrived = message(whole, hidden, slots, *dtypes)
        theirs = torch.stack([count[rank] for count in counts])
        pairs.append(exchange._arrive(arrived, theirs, int(theirs[:, 1].sum())))
    results = [_experts(p, w, i, rank * share, share) for rank, (p, w, i, _) in enumerate(pairs)]

    def summed(rows: Tensors) -> list[torch.Tensor]:
        leaving = [r.new_empty(of_slots.shape[0], hidden) for r, (*_, of_slots) in zip(rows, pairs, strict=True)]
        for out, r, (*_, of_slots) in zip(leaving, rows, pairs, strict=True):
            exchange._collect(r, of_slots, out)
        return _moved(leaving, counts, back=True)

    out = [torch.empty_like(x) for x in xs]
    for rows, at, o in zip(summed(results), places, out, strict=True):
        exchange._collect(rows, at, o)
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
        exchange._collect(drows, of_slots, part.rows, dweights, part.weights)
        returned.append(part.whole)
    dx, dgates = [torch.empty_like(x) for x in xs], [torch.empty_like(g) for g in gates]
    for rank, whole in enumerate(_moved(returned, counts, back=True)):
        part = message(whole, hidden, slots, *dtypes)
        exchange._collect(part.rows, places[rank], dx[rank], part.weights, dgates[rank], ids[rank], share, experts)
    return Passed(out, dx, dgates)


class _Windows(windows.Windows):
    """Of ranks that are all in this process."""

    def __init__(self, rank: int, memory: Tensors, size: int, most: int) -> None:
        self.rank, self.ranks, self.size, self.device = rank, len(memory), size, memory[0].device
        self.memory, self._views, self.barrier = memory[rank], {}, lambda: None
        begin = torch.tensor([m.data_ptr() for m in memory], dtype=torch.int64, device=self.device)
        self.addresses = begin, begin + size
        self.most = lambda tokens: most  # type: ignore[method-assign]


def by_windows(xs: Tensors, gates: Tensors, ids: Tensors, grads: Tensors, experts: int, share: int) -> Passed:
    n, size = len(xs), 1 << 16
    memory = [torch.randint(0, 255, (2 * size,), dtype=torch.uint8, device=xs[0].device) for _ in xs]
    ways = [
        windows._Way(_Windows(rank, memory, size, max(map(len, xs))), i, experts, share) for rank, i in enumerate(ids)
    ]
    layout = ways[0].layout(xs[0], gates[0])
    assert layout.size <= size
    for way, x, g in zip(ways, xs, gates, strict=True):
        way.places, _ = exchange._place(
            way.ids, experts, share, n, None, way.windows.addresses[0], way.windows.rank, layout.capacity
        )
        windows._put(way, layout, x, g)
    taken = [windows._take(way, layout, x, g) for way, x, g in zip(ways, xs, gates, strict=True)]
    for way, (rows, weights, i) in zip(ways, taken, strict=True):
        row = torch.arange(n * layout.capacity, device=rows.device)
        nothing = row % layout.capacity >= way.counts[row // layout.capacity]
        assert (i[nothing] == way.own).all() and (weights[nothing] == 0).all() and (rows[nothing] == 0).all()
    for rank, (way, (rows, weights, i)) in enumerate(zip(ways, taken, strict=True)):
        windows._give(way, layout, _experts(rows, weights, i, rank * share, way.own), None)
    out = [torch.empty_like(x) for x in xs]
    for way, o in zip(ways, out, strict=True):
        windows._sums(way, layout, o, None)
    for way, g in zip(ways, grads, strict=True):
        windows._put(way, layout, g, None)
    returned = [windows._take(way, layout, g, None)[0] for way, g in zip(ways, grads, strict=True)]
    for rank, (way, grad, (rows, weights, i)) in enumerate(zip(ways, returned, taken, strict=True)):
        windows._give(way, layout, *_scaled(grad, rows, weights, i, rank * share, way.own))
    dx, dgates = [torch.empty_like(x) for x in xs], [torch.empty_like(g) for g in gates]
    for way, d, dg in zip(ways, dx, dgates, strict=True):
        windows._sums(way, layout, d, dg)
    return Passed(out, dx, dgates)
