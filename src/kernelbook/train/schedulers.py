"""Which chunks are to learn in the next step? Schedulers are told the gradient norms of those that did in the last one.

A scheduler serves all sparse layers of a model at once. Before a step :meth:`Scheduler.select` writes the ids of the
chunks to activate into ``scheduler.ids``; after it :meth:`Scheduler.observe` takes the norms of their gradients. Both
only enqueue work: neither waits for the device, and both can be captured in a CUDA graph. Random numbers come from a
counter, so that a scheduler's whole state is a few tensors.

================  =====================================================================================================
``all``           every chunk: a dense step
``random``        drawn anew in each step
``round_robin``   one after the other
``ema_topk``      the largest running means of the norms that were observed, and a share of exploration
``knn``           the largest norms, observed or predicted from neighbours, and a share of exploration
``oracle``        the largest norms of this very step, which somebody has to compute first: an upper bound
================  =====================================================================================================
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernelbook import arguments, runtime
from kernelbook.train.chunks import Layout, int32, knn_scores, top_chunks
from kernelbook.train.seeds import generator


def weight_features(
    weights: Sequence[torch.Tensor], chunk_size: int, dims: int = 16, seed: int = 0
) -> list[torch.Tensor]:
    """Return a fixed random projection of the weight rows of each chunk.

    Feature ``r`` of a chunk is the sum over its rows ``i`` of ``s[i, r] * (W[i] @ p[:, r])``, with random signs ``s`` and a
    Gaussian ``p``: distances between chunks are kept in expectation, at the price of one thin product. Each layer's features
    are scaled so that their mean squared length is 1.

    Args:
        weights: (N, D) for each layer. chunk_size: rows in a chunk. dims: features of a chunk.

    Returns:
        For each layer (dims, ceil(N / chunk_size)) float32.
    """
    found = []
    for number, weight in enumerate(weights):
        rows, columns = weight.shape
        chunks = -(-rows // chunk_size)
        chance = generator("features", seed, number)
        p = torch.randn(columns, dims, dtype=torch.float32, generator=chance).to(weight.device)
        signs = torch.randint(0, 2, (chunk_size, dims), generator=chance).to(p) * 2 - 1
        projected = weight.detach().float() @ p
        projected = torch.nn.functional.pad(projected, (0, 0, 0, chunks * chunk_size - rows))
        features = (projected.view(chunks, chunk_size, dims) * signs).sum(1)
        features = features / features.square().sum(1).mean().sqrt().clamp_min(1e-12)
        found.append(features.t().contiguous())
    return found


class Scheduler(torch.nn.Module):
    """The base of all schedulers; by itself it activates every chunk, as ``all``.

    Args:
        layout: the chunks of all layers and how many may be active.
        seed: of all that is drawn at random.
        explore: the share of active chunks that are drawn at random among those not chosen; used by ``ema_topk`` and ``knn``.

    Its state is its buffers: ``state_dict()`` and ``load_state_dict()`` are those of any module.

    Attributes:
        ids: (total_active,) int64, ids within their layers; :meth:`select` writes here.
        needs_dense: whether the norms of all chunks have to be observed before :meth:`select`.
        needs_weights: whether :meth:`refresh` wants to see the weights now and then.
    """

    name = "all"
    needs_dense = False
    needs_weights = False

    def __init__(self, layout: Layout, *, seed: int = 0, explore: float = 0.0) -> None:
        super().__init__()
        if not 0 <= explore <= 1:
            raise ValueError(f"Scheduler: explore must lie in [0, 1], got {explore!r}")
        seed = arguments.integer("Scheduler", "seed", seed)
        if self.name == "all":
            layout = Layout(layout.counts, layout.counts)
        self.layout, self.seed, self.explore = layout, seed, explore
        self._starts, self._slots, self._active = layout.starts(), layout.slots(), int32(layout.active)
        self._longest = max(layout.counts)
        self._base = self._starts[:-1].long()[layout.layer_of_slot()]
        self.ids = torch.nn.Buffer(torch.cat([torch.arange(a, device=runtime.DEVICE) for a in layout.active]))
        self._step = torch.nn.Buffer(int32([0]))
        self._chosen, self._taken = (int32([0] * layout.total) for _ in range(2))
        # How many of each layer's active chunks are drawn at random, and how many are chosen by score.
        share = [self.explore * a for a in layout.active]
        drawn = [round(s) if s >= 1 else int(s > 0 and a > 1) for s, a in zip(share, layout.active, strict=True)]
        exploit = [a - d for a, d in zip(layout.active, drawn, strict=True)]
        self._exploit, self._drawn, self._drawn_slots = int32(exploit), int32(drawn), layout.slots(exploit)

    # --- the interface ---

    def select(self) -> torch.Tensor:
        """Choose the chunks of the next step; return :attr:`ids`, the same tensor each time."""
        self._select()
        self._step.add_(1)
        return self.ids

    def observe(self, norms: torch.Tensor) -> None:
        """Take the norms (total_active,) of the gradients of the chunks in :attr:`ids`."""
        self._observe(self._base + self.ids, norms)

    def observe_all(self, norms: torch.Tensor) -> None:
        """Take the norms (total,) of all chunks, after a dense step."""
        self._observe(torch.arange(self.layout.total, device=norms.device), norms)

    def refresh(self, weights: Sequence[torch.Tensor], chunk_size: int) -> None:
        """Look at the weights (N, D) of each layer, where :attr:`needs_weights`."""

    def ids_of_layers(self) -> tuple[torch.Tensor, ...]:
        """For each layer its part (A,) of :attr:`ids`: views that follow it."""
        return self.layout.split(self.ids)

    # --- for those that differ ---

    def _select(self) -> None:
        """Write :attr:`ids`."""

    def _observe(self, places: torch.Tensor, norms: torch.Tensor) -> None:
        """``places``: positions among all chunks."""

    def _top(self, scores: torch.Tensor | None) -> None:
        """Fill ids by ``scores``, and a share of them at random; all of them without ``scores``."""
        how: dict[str, Any] = {"longest": self._longest, "step": self._step, "seed": self.seed, "chosen": self._chosen}
        if scores is None or self.explore == 0:
            top_chunks(scores, self.ids, self._starts, self._slots, self._active, **how)
            return
        top_chunks(scores, self.ids, self._starts, self._slots, self._exploit, **how | {"chosen": self._taken})
        top_chunks(None, self.ids, self._starts, self._drawn_slots, self._drawn, taken=self._taken, **how)


class RandomScheduler(Scheduler):
    """Chunks drawn at random, anew in each step: unbiased up to a factor, and blind."""

    name = "random"

    def _select(self) -> None:
        self._top(None)


class RoundRobinScheduler(Scheduler):
    """One chunk after the other: each has its turn equally often."""

    name = "round_robin"

    def __init__(self, layout: Layout, *, seed: int = 0, explore: float = 0.0) -> None:
        super().__init__(layout, seed=seed, explore=explore)
        layer = layout.layer_of_slot()
        self._per_step, self._modulus = int32(layout.active)[layer].long(), int32(layout.counts)[layer].long()
        self._within = self.ids.clone()

    def _select(self) -> None:
        torch.remainder(self._step * self._per_step + self._within, self._modulus, out=self.ids)


class EmaTopkScheduler(Scheduler):
    """The chunks with the largest running means of observed norms. Unseen ones come first.

    Args:
        decay: what a mean keeps of itself when its chunk is observed.
    """

    name = "ema_topk"

    def __init__(self, layout: Layout, *, seed: int = 0, explore: float = 0.1, decay: float = 0.8) -> None:
        super().__init__(layout, seed=seed, explore=explore)
        if not 0 <= decay < 1:
            raise ValueError(f"Scheduler: decay must lie in [0, 1), got {decay!r}")
        self.decay = decay
        self._mean = torch.nn.Buffer(torch.full((layout.total,), torch.inf, dtype=torch.float32, device=runtime.DEVICE))

    def _observe(self, places: torch.Tensor, norms: torch.Tensor) -> None:
        before = self._mean[places]
        after = torch.lerp(norms, before, self.decay)
        after = torch.where(before.isinf(), norms, after)
        self._mean.index_copy_(0, places, after)

    def _select(self) -> None:
        self._top(self._mean)


class KnnScheduler(Scheduler):
    """The chunks whose gradients are largest, where that of a chunk not observed lately is its neighbours'.

    Neighbours are chunks whose weights look alike (:func:`weight_features`).

    Args:
        k: how many neighbours predict. window: steps for which an observation counts as itself.
        dims: features of a chunk.
    """

    name = "knn"
    needs_weights = True

    def __init__(
        self, layout: Layout, *, seed: int = 0, explore: float = 0.2, k: int = 4, window: int = 10, dims: int = 16
    ) -> None:
        super().__init__(layout, seed=seed, explore=explore)
        for name, value in {"k": k, "window": window, "dims": dims}.items():
            arguments.integer("Scheduler", name, value, least=int(name != "window"))
        self.k, self.window, self.dims = k, window, dims
        zeros = torch.zeros(layout.total, dtype=torch.float32, device=runtime.DEVICE)
        self._norms, self._scores = torch.nn.Buffer(zeros), zeros.clone()
        self._seen = torch.nn.Buffer(int32([-1] * layout.total))
        self._features = torch.nn.Buffer(zeros.repeat(dims, 1))

    def refresh(self, weights: Sequence[torch.Tensor], chunk_size: int) -> None:
        self._features.copy_(torch.cat(weight_features(weights, chunk_size, self.dims, self.seed), dim=1))

    def _observe(self, places: torch.Tensor, norms: torch.Tensor) -> None:
        self._norms.index_copy_(0, places, norms)
        self._seen.index_copy_(0, places, self._step.expand(places.shape[0]))

    def _select(self) -> None:
        knn_scores(
            self._features, self._norms, self._seen, self._step, self._starts,
            longest=self._longest, window=self.window, k=self.k, out=self._scores,
        )  # fmt: skip
        self._top(self._scores)


class OracleScheduler(Scheduler):
    """The largest norms of this very step: whoever uses it computes the dense gradient first, and gains nothing."""

    name = "oracle"
    needs_dense = True

    def __init__(self, layout: Layout, *, seed: int = 0, explore: float = 0.0) -> None:
        super().__init__(layout, seed=seed)  # there is nothing to explore
        self._norms = torch.nn.Buffer(torch.zeros(layout.total, dtype=torch.float32, device=runtime.DEVICE))

    def _observe(self, places: torch.Tensor, norms: torch.Tensor) -> None:
        self._norms.index_copy_(0, places, norms)

    def _select(self) -> None:
        self._top(self._norms)


SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    kind.name: kind
    for kind in (Scheduler, RandomScheduler, RoundRobinScheduler, EmaTopkScheduler, KnnScheduler, OracleScheduler)
}


def make_scheduler(name: str, layout: Layout, **options: Any) -> Scheduler:
    """Return the scheduler called ``name``: what each does stands at :mod:`kernelbook.train.schedulers`.

    Raises:
        ValueError: there is no scheduler of this name.
    """
    arguments.check_choice("make_scheduler", "name", name, tuple(SCHEDULERS))
    return SCHEDULERS[name](layout, **options)
