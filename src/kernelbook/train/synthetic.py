"""A planted sparse teacher: a problem of which it is known which chunks matter, so that a scheduler's choice can be scored."""

from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import runtime
from kernelbook.sparse_linear import sparse_dw
from kernelbook.train.chunks import chunk_norms
from kernelbook.train.schedulers import Scheduler
from kernelbook.train.seeds import generator


class PlantedTeacher:
    """A linear student whose gradient lives in known chunks, which change now and then.

    Student ``y = W x`` and teacher ``y = W* x`` differ in ``planted`` chunks of rows, plus noise. The loss is half the
    squared error, averaged over the batch, so that ``dW = (W - W*) E[x x^T]``: large in planted chunks until they are
    learnt, noise elsewhere. Every ``period`` steps other chunks are planted.

    Chunks come in families. Those of one family have similar weights, and are planted together: what a scheduler that looks
    at weights can use. With ``families=None`` weights tell nothing.

    Args:
        chunks, chunk_size, d_in: the student is (chunks * chunk_size, d_in).
        planted: chunks that differ at a time. period: steps until others are planted.
        families: families of ``chunks / families`` chunks each, which divide ``planted``; or ``None``.
        batch: rows of x. noise: standard deviation of the noise in the teacher's answers. seed: of all that is random.

    Attributes:
        weight: (N, d_in), the student.

    Raises:
        ValueError: the chunks are not whole families, or what is planted is not.
    """

    def __init__(
        self,
        *,
        chunks: int = 64,
        chunk_size: int = 16,
        d_in: int = 32,
        planted: int = 8,
        period: int = 40,
        families: int | None = 8,
        batch: int = 64,
        noise: float = 0.3,
        seed: int = 0,
    ) -> None:
        self.chunks, self.chunk_size, self.d_in, self.planted, self.period = chunks, chunk_size, d_in, planted, period
        self.batch, self.noise, self.seed, self.device = batch, noise, seed, runtime.DEVICE
        self._units = chunks if families is None else families  # which are planted as a whole
        if not 1 <= self._units <= chunks or chunks % self._units or planted % (chunks // self._units):
            raise ValueError(
                f"PlantedTeacher: families must divide chunks ({chunks}) into parts that divide planted ({planted}), got {families}"
            )
        chance = generator("teacher", seed)
        if families is None:
            weight = torch.randn(chunks, chunk_size, d_in, dtype=torch.float32, generator=chance)
        else:
            centres = torch.randn(families, 1, chunk_size, d_in, dtype=torch.float32, generator=chance)
            own = torch.randn(families, chunks // families, chunk_size, d_in, dtype=torch.float32, generator=chance)
            weight = (centres + 0.2 * own).flatten(0, 1)
        # Families are not neighbours by number.
        self._order = torch.randperm(chunks, generator=chance)
        self.weight = weight[self._order.argsort()].reshape(-1, d_in).to(self.device)
        self._teacher = self.weight.clone()
        self._phase = -1

    def planted_chunks(self, step: int) -> torch.Tensor:
        """(planted,) int64 on the CPU: where student and teacher differ from the beginning of this phase on."""
        # In turn, so that two phases that follow each other have nothing in common (where there are others).
        size = self.chunks // self._units
        count = self.planted // size
        turn = (step // self.period * count + torch.arange(count)) % self._units
        chosen = torch.randperm(self._units, generator=generator("planted", self.seed))[turn]
        return self._order[(chosen[:, None] * size + torch.arange(size)).flatten()]

    def gradients(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x (batch, d_in) and dY (batch, N) of this step: ``dY^T x`` is the gradient of the student's weight."""
        phase = step // self.period
        if phase != self._phase:  # what was planted before is as good as learnt
            self._phase = phase
            chance = generator("shift", self.seed, phase)
            self._teacher = self.weight.clone()
            rows = self.planted_chunks(step)[:, None] * self.chunk_size + torch.arange(self.chunk_size)
            shift = torch.randn(rows.numel(), self.d_in, dtype=torch.float32, generator=chance).to(self.device)
            self._teacher[rows.flatten().to(self.device)] += shift
        chance = generator("inputs", self.seed, step)
        x = torch.randn(self.batch, self.d_in, dtype=torch.float32, generator=chance).to(self.device)
        noise = torch.randn(self.batch, self.weight.shape[0], dtype=torch.float32, generator=chance).to(self.device)
        difference = x @ (self.weight - self._teacher).t() + self.noise * noise
        return x, difference / self.batch


def score_chunks(ids: torch.Tensor, norms: torch.Tensor, wanted: int | None = None) -> dict[str, float]:
    """Scores chosen chunks against the ``wanted`` largest (default: as many as chosen), by the true norms (C,).

    Returns:
        ``precision``: the share of the chosen chunks that are among the wanted ones. ``recall``: the share of the wanted chunks
        that were chosen. ``energy``: the share of the squared gradient that lies in the chosen chunks.
    """
    wanted = len(ids) if wanted is None else wanted
    top = set(norms.sort(descending=True, stable=True).indices[:wanted].tolist())
    hits = len(top & set(ids.tolist()))
    energy = norms.double().square()
    share = float(energy[ids].sum() / energy.sum().clamp_min(1e-300))
    return {"precision": hits / len(ids), "recall": hits / wanted, "energy": share}


def score_scheduler(
    teacher: PlantedTeacher, scheduler: Scheduler, steps: int, *, lr: float = 0.1
) -> Iterator[dict[str, Any]]:
    """Train the student on the scheduler's chunks by plain gradient steps, and score each choice.

    The first step is dense, so that every scheduler has seen each chunk once. Yields for each later step ``step``, and
    precision, recall and energy against the true gradient of that step; wanted are the planted chunks' number.
    """
    chunk = teacher.chunk_size
    for step in range(steps):
        x, dy = teacher.gradients(step)
        truth = chunk_norms(dy.t() @ x, chunk_size=chunk)
        if scheduler.needs_weights and step % 10 == 0:
            scheduler.refresh([teacher.weight], chunk)
        if step == 0 or scheduler.needs_dense:
            scheduler.observe_all(truth)
        ids = scheduler.select()
        dw, _ = sparse_dw(x, dy, ids, chunk_size=chunk, compact=True, with_bias=False)
        scheduler.observe(chunk_norms(dw, chunk_size=chunk))
        rows = (ids[:, None] * chunk + torch.arange(chunk, device=ids.device)).flatten()
        teacher.weight.index_add_(0, rows, dw, alpha=-lr)
        if step:
            yield {"step": step, **score_chunks(ids, truth, teacher.planted)}
