"""Training a small GPT with a sparse backward pass: the loop, its settings, its log and its checkpoints.

The first ``dense_steps`` steps are dense. In the others a scheduler says which chunks of the sparse layers learn. Between
two entries in the log the host never waits for the device, so a whole step can be captured in a CUDA graph.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kernelbook import arguments, runtime
from kernelbook.nn.gpt import ACTIVATIONS, ATTENTION, GPT, OUTPUTS, GPTConfig
from kernelbook.train.capture import CapturedCalls
from kernelbook.train.chunks import Layout, chunk_norms
from kernelbook.train.optimizer import INACTIVE, ChunkAdamW
from kernelbook.train.schedulers import SCHEDULERS, make_scheduler
from kernelbook.train.synthetic import score_chunks
from kernelbook.train.text import TextData

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("dense", "sparse_dw", "sparse_dw_dx"),
    "sparse_dx": ("all", "inputs"),
    "scheduler": tuple(SCHEDULERS),
    "inactive": INACTIVE,
    "dtype": ("float32", "bfloat16"),
    "sparse_layers": ("all", "mlp"),
    "attention": tuple(ATTENTION),
    "activation": tuple(ACTIVATIONS),
}
LEAST = dict.fromkeys(("batch_size", "steps", "log_every", "eval_batches"), 1) | dict.fromkeys(
    ("dense_steps", "refresh_every", "eval_every", "checkpoint_every", "probe_every", "lr_warmup"), 0
)
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All that decides a run; each is an option of ``python -m kernelbook train``.

    Attributes:
        width: features of a token.
        depth: blocks.
        heads: attention heads, which divide the width.
        context: tokens in a sequence.
        chunk_size: rows of a weight in a chunk, at least 16.
        sparse_layers: which linear layers are sparse: all six of a block, or those of the MLP.
        attention: whose attention.
        activation: of the MLPs; with relu most hidden values become zero.
        corpus: stdlib or topics, which are Python's own texts, or a UTF-8 file.
        vocab_size: tokens of the encoding, which is found on the text.
        batch_size: sequences in a step.
        steps: optimizer steps in all.
        seed: of weights, batches and schedulers.
        mode: what the backward pass leaves out.
        sparse_dx: where mode sparse_dw_dx makes dX sparse: in all sparse layers, or in those that read the residual stream
            (inputs), which has a gradient of its own. The dX of the layers that write to it is all that a branch gets.
        scheduler: who chooses the active chunks, see :mod:`kernelbook.train.schedulers`.
        active: share of active chunks, in (0, 1].
        dense_steps: dense steps before the first sparse one.
        refresh_every: steps after which knn sees the weights again.
        inactive: rows without gradient: rest (skip), or go on by their moments and decay (decay).
        sparse_lr: in sparse steps, times the learning rate for sparse layers.
        lr: largest learning rate; it falls by a cosine.
        min_lr: learning rate at the end.
        lr_warmup: steps over which the learning rate rises.
        weight_decay: of AdamW; vectors and embeddings do not decay.
        clip: largest norm of the gradient.
        dtype: of products and activations; bfloat16 by autocast.
        log_every: steps between readings of the losses, each of which waits for the device.
        eval_every: steps between evaluations; 0: only at the end.
        eval_batches: batches of an evaluation.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        probe_every: steps between scores of the chosen chunks against the dense gradient; 0: never.
        cuda_graph: capture the step in a CUDA graph, which needs a GPU.
    """

    width: int = 512
    depth: int = 4
    heads: int = 8
    context: int = 512
    chunk_size: int = 64
    sparse_layers: str = "all"
    attention: str = "kernelbook"
    activation: str = "gelu"
    corpus: str = "stdlib"
    vocab_size: int = 4096
    batch_size: int = 16
    steps: int = 1000
    seed: int = 0
    mode: str = "sparse_dw"
    sparse_dx: str = "all"
    scheduler: str = "ema_topk"
    active: float = 0.1
    dense_steps: int = 50
    refresh_every: int = 50
    inactive: str = "skip"
    sparse_lr: float = 1.0
    lr: float = 1e-3
    min_lr: float = 1e-4
    lr_warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "bfloat16"
    log_every: int = 20
    eval_every: int = 100
    eval_batches: int = 8
    checkpoint_every: int = 200
    probe_every: int = 0
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        for name, choices in CHOICES.items():
            arguments.check_choice("TrainConfig", name, getattr(self, name), choices)
        for name, least in LEAST.items():
            arguments.integer("TrainConfig", name, getattr(self, name), least=least)
        if not 0 < self.active <= 1:
            raise ValueError(f"TrainConfig: active must lie in (0, 1], got {self.active}")
        for name in ("clip", "lr", "sparse_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"TrainConfig: {name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"TrainConfig: min_lr must lie in [0, lr] ([0, {self.lr}]), got {self.min_lr}")

    def is_sparse(self, step: int) -> bool:
        """Return whether a step (from 0) leaves chunks out."""
        return self.mode != "dense" and self.scheduler != "all" and step >= self.dense_steps

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step (from 0)."""
        if step < self.lr_warmup:
            return self.lr * (step + 1) / self.lr_warmup
        way = (step - self.lr_warmup) / max(1, self.steps - self.lr_warmup)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(way, 1.0)))

    def model(self, vocab_size: int) -> GPTConfig:
        """Return the shape of the model."""
        names = ("context", "width", "depth", "heads", "chunk_size", "sparse_layers", "attention", "activation")
        same = {name: getattr(self, name) for name in names}
        return GPTConfig(vocab_size=vocab_size, compact_gradient=True, **same)


# Sizes by name. "tiny" is for a machine without a GPU.
CONFIGS: dict[str, TrainConfig] = {
    "tiny": TrainConfig(
        width=32, depth=1, heads=2, context=24, chunk_size=16, corpus="topics", vocab_size=512, batch_size=2,
        steps=40, dense_steps=10, active=0.5, lr=2e-2, min_lr=4e-3, lr_warmup=5, refresh_every=20, dtype="float32",
        log_every=10, eval_every=20, eval_batches=4, checkpoint_every=20,
    ),
    "small": TrainConfig(width=512, heads=8, lr=1e-3, min_lr=1e-4),
    "medium": TrainConfig(width=1024, heads=8, lr=6e-4, min_lr=6e-5),
    "large": TrainConfig(width=2048, heads=16, lr=3e-4, min_lr=3e-5),
    "huge": TrainConfig(width=4096, heads=32, lr=1.5e-4, min_lr=1.5e-5),
}  # fmt: skip


def make_data(config: TrainConfig) -> TextData:
    """Return the data that a configuration asks for."""
    names = ("corpus", "vocab_size", "batch_size", "context", "seed")
    return TextData(**{name: getattr(config, name) for name in names})


class Trainer:
    """One run: ``Trainer(config, out=folder).run()``.

    Args:
        config: see :class:`TrainConfig`.
        data: default :func:`make_data`.
        out: a folder for ``log.jsonl``, ``config.json`` and ``checkpoint.pt``; ``None`` keeps nothing.
        resume: go on from the checkpoint in ``out``, or begin if there is none. ``steps`` may be more than they were: the
            learning rate follows the new number from there on.
        progress: show a progress bar.

    Attributes:
        model, scheduler: as trained so far. step: finished steps. seconds: time spent on them, evaluation left out.
        records: the entries of the log.

    Raises:
        FileExistsError: ``out`` holds a run already and ``resume`` is not set.
        ValueError: the checkpoint belongs to another configuration or corpus or cannot be read, or a CUDA graph is wanted
            without a GPU.
    """

    rank, ranks, parallel = 0, 1, ""  # others in :class:`kernelbook.train.parallel.ParallelTrainer`

    def __init__(
        self,
        config: TrainConfig,
        data: TextData | None = None,
        *,
        out: Path | str | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        if config.cuda_graph and runtime.DEVICE.type != "cuda":
            raise ValueError("Trainer: cuda_graph must be off where there is no GPU, got True")
        self.config, self.progress = config, progress
        self.out = None if out is None else Path(out)
        if self.out is not None and not resume and (self.out / "log.jsonl").exists():
            raise FileExistsError(f"Trainer: {self.out} holds a run already; resume it, or choose another folder")
        self.data = make_data(config) if data is None else data
        self.step, self.seconds = 0, 0.0
        self.records: list[dict[str, Any]] = []
        self._build()
        if self.out is not None:
            self._resume(self.out)
            self._write_text("log.jsonl", "".join(json.dumps(entry) + "\n" for entry in self.records))
            self._write_text("config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")

    # --- what a run is made of ---

    def _build(self) -> None:
        config, device = self.config, runtime.DEVICE
        # The caller's random numbers go on as if nothing had been drawn.
        devices = [torch.cuda.current_device()] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), device:  # the weights are drawn where they live
            torch.manual_seed(config.seed)
            self.model = GPT(config.model(self.data.vocab_size))
        self.layers = self.model.sparse_layers()
        for name, layer in self.layers.items():
            layer.mode = config.mode
            if config.sparse_dx == "inputs" and config.mode == "sparse_dw_dx" and name.split(".")[-1] in OUTPUTS:
                layer.mode = "sparse_dw"
        layout = Layout.of_fraction([layer.num_chunks for layer in self.layers.values()], config.active)
        self.scheduler = make_scheduler(config.scheduler, layout, seed=config.seed)
        self._lr, self._chunk_lr, self._loss, self._grad_norm = (torch.zeros((), device=device) for _ in range(4))
        of_chunks = self._weights()
        chunked = {id(p) for p in of_chunks}
        self._rest = [p for p in self.model.parameters() if id(p) not in chunked]
        self._chunk_adam = ChunkAdamW(
            of_chunks, lr=self._chunk_lr, weight_decay=config.weight_decay, chunk_size=config.chunk_size,
            inactive=config.inactive, unique_rows=True, **ADAM,
        )  # fmt: skip
        groups = [
            {"params": [p for p in self._rest if self._decays(p)], "weight_decay": config.weight_decay},
            {"params": [p for p in self._rest if not self._decays(p)], "weight_decay": 0.0},
        ]
        how: dict[str, Any] = {"fused": True, "capturable": True} if device.type == "cuda" else {"foreach": False}
        self._how = {**ADAM, **how}
        self._rest_adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=self._lr, **self._how)
        self._norms = torch.zeros(self.scheduler.layout.total, device=device)
        self._active_norms = torch.zeros_like(self._norms[: self.scheduler.layout.total_active])
        self._inputs, self._targets = (t.clone() for t in self._part(self.data.batch(0)))
        self._calls = CapturedCalls("Trainer", capture=config.cuda_graph)

    def _decays(self, parameter: torch.Tensor) -> bool:
        embeddings = {id(self.model.tokens.weight), id(self.model.positions.weight)}
        return parameter.ndim > 1 and id(parameter) not in embeddings

    def _part(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return this rank's part of a batch."""
        return batch

    # --- a step, on the device alone ---

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        # No cache: each weight is cast once a step anyway, and a cache would outlive a captured graph.
        enabled = self.config.dtype == "bfloat16"
        return torch.autocast(runtime.DEVICE.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _activate(self, ids: Iterable[torch.Tensor | None]) -> None:
        for layer, chosen in zip(self.layers.values(), ids, strict=True):
            layer.active_chunks = chosen

    def _backward(self) -> None:
        """Gradients of this batch for the chunks that are active."""
        self.model.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.model(self._inputs, self._targets)
        loss.backward()
        self._loss.copy_(loss.detach())

    def _measure(self, into: torch.Tensor, sizes: Iterable[int]) -> None:
        """The norms of the gradients of the chunks that have one, layer by layer."""
        chunk = self.config.chunk_size
        for layer, out in zip(self.layers.values(), into.split(list(sizes)), strict=True):
            grad = layer.weight.grad
            assert grad is not None
            chunk_norms(grad._values() if grad.is_sparse else grad, chunk_size=chunk, out=out)

    def _weights(self) -> list[torch.Tensor]:
        return [layer.weight for layer in self.layers.values()]

    def _total_norm(self, norms: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients: ``norms`` of chunks, and the gradients of all that is no chunk."""
        parts = torch.stack([torch.linalg.vector_norm(norms), torch.nn.utils.get_total_norm(others)])
        return torch.linalg.vector_norm(parts)

    def _update(self, norms: torch.Tensor) -> None:
        """Clip, and move the weights. ``norms`` of the chunks' gradients are a part of the whole norm."""
        others = [p.grad for p in self._rest if p.grad is not None]
        total = self._total_norm(norms, others)
        self._grad_norm.copy_(total)
        scale = (self.config.clip / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(others, scale)
        self._chunk_adam.step(scale=scale)
        self._rest_adam.step()

    def _observe_all(self) -> None:
        """Tell the scheduler the dense gradient."""
        self._activate([None] * len(self.layers))
        self._backward()
        self._measure(self._norms, self.scheduler.layout.counts)
        self.scheduler.observe_all(self._norms)

    def _dense_step(self) -> None:
        self._observe_all()
        self._update(self._norms)

    def _sparse_step(self) -> None:
        if self.scheduler.needs_dense:
            self._observe_all()
        self.scheduler.select()
        self._activate(self.scheduler.ids_of_layers())
        self._backward()
        self._measure(self._active_norms, self.scheduler.layout.active)
        self.scheduler.observe(self._active_norms)
        self._update(self._active_norms)

    def _enqueue(self, step: int) -> None:
        """Start step number ``step`` (from 0), and wait for nothing."""
        config = self.config
        for mine, new in zip((self._inputs, self._targets), self._part(self.data.batch(step)), strict=True):
            mine.copy_(new)
        sparse = config.is_sparse(step)
        self._lr.fill_(config.lr_at(step))
        self._chunk_lr.fill_(config.lr_at(step) * (config.sparse_lr if sparse else 1.0))
        if sparse and self.scheduler.needs_weights:
            since = step - config.dense_steps
            if since == 0 or (config.refresh_every and since % config.refresh_every == 0):
                self.scheduler.refresh(self._weights(), config.chunk_size)
        self._calls(sparse, self._sparse_step if sparse else self._dense_step)

    # --- the run ---

    def run(self, until: int | None = None) -> list[dict[str, Any]]:
        """Train to step ``until`` (default: the configured number) and return :attr:`records`.

        Raises ``FloatingPointError`` when a loss or a gradient is not finite; the last checkpoint is from before that.
        """
        config = self.config
        end = config.steps if until is None else min(until, config.steps)
        pending: list[torch.Tensor] = []  # losses and norms that nobody has read
        from tqdm import tqdm  # of the extra [train]

        with tqdm(total=config.steps, initial=self.step, unit="step", disable=not self.progress) as bar:
            if self.step == 0 and end > 0 and not self.records:
                self._evaluate()
            _wait()
            started = time.perf_counter()
            while self.step < end:
                self._enqueue(self.step)
                pending.append(torch.stack([self._loss, self._grad_norm]))
                self.step += 1
                last = self.step == end
                pauses = self._due(config.eval_every, config.checkpoint_every, config.probe_every)
                if len(pending) == config.log_every or last or pauses:
                    values = torch.stack(pending).tolist()
                    took = time.perf_counter() - started
                    self.seconds += took
                    self._record_steps(values, took)
                    if self._due(config.probe_every) and config.is_sparse(self.step - 1):
                        self._record(self.probe())
                    if self._due(config.eval_every) or last:
                        self._evaluate()
                    if self._due(config.checkpoint_every) or last:
                        self.save()
                    bar.update(len(pending))
                    bar.set_postfix(loss=self.losses()[-1], validation=self.validation_losses()[-1])
                    pending.clear()
                    _wait()
                    started = time.perf_counter()  # what is done between steps does not count
        return self.records

    def _due(self, *every: int) -> bool:
        return any(steps > 0 and self.step % steps == 0 for steps in every)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the validation batches."""
        found = []
        for batch in self.data.validation_batches(self.config.eval_batches):
            inputs, targets = self._part(batch)
            with self._autocast():
                found.append(self.model(inputs, targets))
        return float(torch.stack(found).mean())

    def _evaluate(self) -> None:
        self._record({"step": self.step, "validation_loss": self.evaluate(), "seconds": round(self.seconds, 4)})

    def probe(self) -> dict[str, Any]:
        """Scores the chunks that the last step chose against the dense gradient of its batch; moves nothing."""
        self._activate([None] * len(self.layers))
        self._backward()
        norms, counts = torch.empty_like(self._norms), self.scheduler.layout.counts
        self._measure(norms, counts)
        parts = zip(self.scheduler.ids_of_layers(), norms.split(list(counts)), strict=True)
        scores = [score_chunks(*part) for part in parts]
        self.model.zero_grad(set_to_none=True)
        return {"step": self.step} | {name: sum(s[name] for s in scores) / len(scores) for name in scores[0]}

    # --- the record ---

    def _record_steps(self, values: list[list[float]], took: float) -> None:
        count, first = len(values), self.step - len(values)
        tokens = count * self._inputs.numel()
        for i, (loss, norm) in enumerate(values):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"Trainer: loss and gradient of step {first + i + 1} must be finite, got {loss} and norm {norm}; "
                    f"a smaller lr (now {self.config.lr:g}) may help"
                )
            entry = {"step": first + i + 1, "loss": loss, "grad_norm": norm, "lr": self.config.lr_at(first + i)}
            if i == count - 1:
                entry |= {"seconds": round(self.seconds, 4), "tokens_per_second": round(tokens / max(took, 1e-9), 1)}
            self._record(entry)

    def _record(self, entry: dict[str, Any]) -> None:
        self.records.append(entry)
        if self.out is not None and self.rank == 0:
            with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def losses(self) -> list[float]:
        """Return the training loss of every step so far."""
        return [entry["loss"] for entry in self.records if "loss" in entry]

    def validation_losses(self) -> list[float]:
        """Return the validation losses so far; the first is that of the untrained model."""
        return [entry["validation_loss"] for entry in self.records if "validation_loss" in entry]

    def _write_text(self, name: str, text: str) -> None:
        if self.out is not None and self.rank == 0:
            with replacing(self.out / name) as file:
                file.write(text.encode())

    # --- checkpoints ---

    def _identity(self) -> dict[str, Any]:
        """Return what is the same in a run that goes on."""
        how = {"the corpus": self.data.digest, "parallel": "fsdp" if self.parallel == "fsdp" else ""}
        return dataclasses.asdict(self.config) | how

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        """Take over the history of a run; ``ValueError`` unless this is the same one."""
        own = self._identity()
        # A run that is watched otherwise may go on from here; one with other steps behind it or before it may not.
        # Where its corpus lies does not matter either: the digest says whether it is the same.
        free = {"log_every", "eval_every", "eval_batches", "checkpoint_every", "probe_every", "cuda_graph", "corpus"}
        for name, value in saved["identity"].items():
            longer = name == "steps" and own["steps"] > value
            if name not in free and own.get(name) != value and not longer:
                least = "at least " if name == "steps" else ""
                raise ValueError(
                    f"Trainer: {name} must be {least}that of the run in {self.out} ({value!r}), got {own.get(name)!r}"
                )
        self.step, self.seconds, self.records = saved["step"], saved["seconds"], saved["records"]

    def _parts(self) -> dict[str, Any]:
        """Return all that changes."""
        optimizers = {"chunk_adam": self._chunk_adam, "rest_adam": self._rest_adam}
        return {"model": self.model, "scheduler": self.scheduler, **optimizers}

    def _state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def _load(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        for optimizer, lr in ((self._chunk_adam, self._chunk_lr), (self._rest_adam, self._lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr

    def save(self) -> None:
        """Write ``checkpoint.pt`` in one step: a run that is killed here leaves the one before."""
        if self.out is None:
            return
        run = {"step": self.step, "seconds": self.seconds, "records": self.records, "identity": self._identity()}
        state = {"run": run, **self._state()}
        if self.rank == 0:
            with replacing(self.out / "checkpoint.pt") as file:
                torch.save(state, file)

    def _resume(self, folder: Path) -> None:
        path = folder / "checkpoint.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=runtime.DEVICE, weights_only=True)
            history = state["run"]
        except Exception as error:  # torch.load raises many things for a file that is not its own
            raise ValueError(f"Trainer: {path} must be a checkpoint of a run, got another file") from error
        self._go_on(history)
        self._load(state)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file that takes the place of ``path`` when all of it is on the disk, and never else.

    What a process that is killed leaves is ``path`` with ``.tmp`` behind it, which the next one overwrites.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.tmp")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _wait() -> None:
    if runtime.DEVICE.type == "cuda":
        torch.cuda.synchronize()
