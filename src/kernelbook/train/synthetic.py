"""Problems whose answer is known: a planted sparse teacher, and sequences to copy or to recall.

They tell apart what a real text mixes: whether a scheduler finds the chunks that matter, and whether a model learns at all.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kernelbook import runtime
from kernelbook.sparse_linear import sparse_dw
from kernelbook.train.chunks import chunk_norms
from kernelbook.train.schedulers import Scheduler
from kernelbook.train.seeds import generator

__all__ = ["CopyData", "PlantedTeacher", "Score", "score_chunks", "score_scheduler"]


# --- a planted teacher ----------------------------------------------------------------------------------------------


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
        families: families of ``chunks / families`` chunks each, or ``None``.
        batch: rows of x. noise: standard deviation of the noise in the teacher's answers. seed: of all that is random.

    Attributes:
        weight: (N, d_in), the student.
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
        device: torch.device | None = None,
    ) -> None:
        if families is not None and (chunks % families or planted % (chunks // families)):
            raise ValueError(
                f"PlantedTeacher: families must divide chunks ({chunks}) into sizes that divide planted ({planted}), "
                f"got {families}"
            )
        if not 1 <= planted <= chunks:
            raise ValueError(f"PlantedTeacher: planted must lie in [1, {chunks}], got {planted}")
        self.chunks, self.chunk_size, self.d_in, self.planted, self.period = chunks, chunk_size, d_in, planted, period
        self.families, self.batch, self.noise, self.seed = families, batch, noise, seed
        self.device = runtime.DEVICE if device is None else device
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
        units = self.chunks if self.families is None else self.families
        size = self.chunks // units
        count = self.planted // size
        turn = (step // self.period * count + torch.arange(count)) % units
        chosen = torch.randperm(units, generator=generator("planted", self.seed))[turn]
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


@dataclasses.dataclass(frozen=True)
class Score:
    """The quality of a choice of chunks.

    Attributes:
        precision: the share of the chosen chunks that are among the wanted ones.
        recall: the share of the wanted chunks that were chosen.
        energy: the share of the squared gradient that lies in the chosen chunks.
    """

    precision: float
    recall: float
    energy: float


def score_chunks(ids: torch.Tensor, norms: torch.Tensor, wanted: int | None = None) -> Score:
    """Scores chosen chunks against the ``wanted`` largest (default: as many as chosen), by the true norms (C,)."""
    wanted = len(ids) if wanted is None else wanted
    top = set(norms.sort(descending=True, stable=True).indices[:wanted].tolist())
    hits = len(top & set(ids.tolist()))
    energy = norms.double().square()
    return Score(hits / len(ids), hits / wanted, float(energy[ids].sum() / energy.sum().clamp_min(1e-300)))


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
            yield {"step": step, **dataclasses.asdict(score_chunks(ids, truth, teacher.planted))}


# --- sequences ------------------------------------------------------------------------------------------------------


class CopyData:
    """Sequences whose second half follows from the first: to be copied, or looked up in. A quick sign of life.

    ``"copy"``: random symbols, a mark, the same symbols again; the loss counts behind the mark.
    ``"recall"``: pairs of a key and a value, then the keys in another order, each followed by its value; the loss counts the
    values.

    Args:
        task: ``"copy"`` or ``"recall"``. symbols: how many different ones; the vocabulary has one more, the mark.
        batch_size, context: sequences in a batch and tokens in a sequence. seed, device: as in :class:`TextData`.
    """

    digest = "synthetic"

    def __init__(
        self,
        task: str = "copy",
        *,
        symbols: int = 32,
        batch_size: int,
        context: int,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if task not in ("copy", "recall"):
            raise ValueError(f"CopyData: task must be one of 'copy', 'recall', got {task!r}")
        if context < 4:
            raise ValueError(f"CopyData: context must be at least 4, got {context}")
        pairs = context // 4
        if task == "recall" and pairs > symbols:
            raise ValueError(f"CopyData: symbols must be at least {pairs}, a key for each pair, got {symbols}")
        self.task, self.symbols, self.vocab_size = task, symbols, symbols + 1
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.device = runtime.DEVICE if device is None else device

    def _draw(self, number: int, use: str = "batch") -> tuple[torch.Tensor, torch.Tensor]:
        make = self._copy if self.task == "copy" else self._recall
        rows, counts = make(generator(use, self.seed, number))
        targets = torch.where(counts, rows, -100)[:, 1:]
        return rows[:, :-1].to(self.device), targets.to(self.device)

    def _copy(self, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.context // 2
        symbols = torch.randint(self.symbols, (self.batch_size, half), generator=chance)
        mark = torch.full((self.batch_size, 1), self.symbols)
        rows = torch.cat([symbols, mark, symbols], 1)
        counts = torch.arange(rows.shape[1]) > half
        return rows, counts.expand_as(rows)

    def _recall(self, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = self.context // 4
        shape = (self.batch_size, self.symbols)
        keys = torch.rand(shape, dtype=torch.float32, generator=chance).argsort(1)[:, :pairs]
        values = torch.randint(self.symbols, (self.batch_size, pairs), generator=chance)
        told = torch.stack([keys, values], 2).flatten(1)
        order = torch.rand(keys.shape, dtype=torch.float32, generator=chance).argsort(1)
        asked = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
        mark = torch.full((self.batch_size, 1), self.symbols)
        rows = torch.cat([told, mark, asked], 1)
        position = torch.arange(rows.shape[1])
        counts = (position > 2 * pairs) & ((position - 2 * pairs) % 2 == 0)
        return rows, counts.expand_as(rows)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (batch_size, about context) int64; targets are -100 where the loss does not count."""
        return self._draw(step)

    def validation_batches(self, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """``count`` batches that no training step draws."""
        return (self._draw(i, "validation") for i in range(count))
