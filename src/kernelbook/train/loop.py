"""Training a small GPT with a sparse backward pass: the loop, its settings, its log and its checkpoints.

The first ``dense_steps`` steps are dense. In the others a scheduler says which chunks of the sparse layers learn. Between
two entries in the log the host never waits for the device, so a whole step can be captured in a CUDA graph.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from kernelbook import arguments, runtime
from kernelbook.nn.gpt import ACTIVATIONS, ATTENTION, GPT, OUTPUTS, GPTConfig
from kernelbook.train.capture import CapturedCalls
from kernelbook.train.chunks import Layout, chunk_norms
from kernelbook.train.files import replacing, sweep
from kernelbook.train.optimizer import INACTIVE, ChunkAdamW
from kernelbook.train.schedulers import SCHEDULERS, make_scheduler
from kernelbook.train.synthetic import CopyData, score_chunks
from kernelbook.train.text import TextData

__all__ = ["CHOICES", "CONFIGS", "Data", "TrainConfig", "Trainer", "make_data"]

FILES = ("checkpoint.pt", "config.json", "latest", "log.jsonl")
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("dense", "sparse_dw", "sparse_dw_dx"),
    "sparse_dx": ("all", "inputs"),
    "scheduler": tuple(SCHEDULERS),
    "inactive": INACTIVE,
    "task": ("text", "copy", "recall"),
    "dtype": ("float32", "bfloat16"),
    "sparse_layers": ("all", "mlp"),
    "attention": tuple(ATTENTION),
    "activation": tuple(ACTIVATIONS),
}


class Data(Protocol):
    """The data that the loop trains on; all of it follows from seed and step."""

    vocab_size: int
    digest: str

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a training step."""

    def validation_batches(self, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets to evaluate on."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All that decides a run.

    Attributes:
        width, depth, heads, context, chunk_size, sparse_layers, attention, activation: as in :class:`kernelbook.nn.GPTConfig`.
        task: ``"text"``, ``"copy"`` or ``"recall"``.
        corpus, vocab_size: as in :class:`TextData`.
        batch_size: sequences in a step.
        steps: optimizer steps.
        seed: of the first weights, the data and the schedulers.
        mode: ``"dense"``, ``"sparse_dw"`` or ``"sparse_dw_dx"``.
        scheduler, explore: see :mod:`kernelbook.train.schedulers`.
        sparse_dx: the layers whose dX mode ``sparse_dw_dx`` makes sparse. ``"all"``, or ``"inputs"``: those that read the
            residual stream, which has a gradient of its own. The dX of the layers that write to it is all that a branch gets.
        active: the share of active chunks.
        dense_steps: steps before the first sparse one.
        refresh_every: steps after which a scheduler sees the weights again.
        inactive: what the optimizer does with rows without gradient, ``"skip"`` or ``"decay"``.
        sparse_lr: in sparse steps, what the learning rate of the sparse layers is multiplied with.
        lr, min_lr, lr_warmup: the learning rate rises over ``lr_warmup`` steps, then falls by a cosine to ``min_lr``.
        beta1, beta2, eps, weight_decay: of AdamW; vectors and embeddings do not decay.
        clip: largest gradient norm.
        dtype: ``"float32"`` or, by autocast, ``"bfloat16"``.
        log_every, eval_every, eval_batches, checkpoint_every: in steps; 0 for never (but at the end).
        probe_every: steps after which the choice of chunks is scored against the dense gradient; 0 for never.
        cuda_graph: capture the step in a CUDA graph (needs a GPU), see :class:`kernelbook.train.CapturedStep`.
        deterministic: ask PyTorch for deterministic algorithms, at a price, for runs that repeat bit by bit on a GPU. Some
            versions of PyTorch want ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment for that, and say so.
    """

    width: int = 512
    depth: int = 4
    heads: int = 8
    context: int = 512
    chunk_size: int = 64
    sparse_layers: str = "all"
    attention: str = "kernelbook"
    activation: str = "gelu"
    task: str = "text"
    corpus: str = "stdlib"
    vocab_size: int = 4096
    batch_size: int = 16
    steps: int = 1000
    seed: int = 0
    mode: str = "sparse_dw"
    sparse_dx: str = "all"
    scheduler: str = "ema_topk"
    active: float = 0.1
    explore: float | None = None
    dense_steps: int = 50
    refresh_every: int = 50
    inactive: str = "skip"
    sparse_lr: float = 1.0
    lr: float = 1e-3
    min_lr: float = 1e-4
    lr_warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "bfloat16"
    log_every: int = 20
    eval_every: int = 100
    eval_batches: int = 8
    checkpoint_every: int = 200
    probe_every: int = 0
    cuda_graph: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        for field in dataclasses.fields(self):
            value, bits = getattr(self, field.name), 63 if field.name == "seed" else 31
            if isinstance(value, int) and value >= 2**bits:
                raise ValueError(f"TrainConfig: {field.name} must be below 2^{bits}, got {value}")
            if isinstance(value, float) and not math.isfinite(value) and field.name != "clip":
                raise ValueError(f"TrainConfig: {field.name} must be finite, got {value}")
        if self.seed < 0:
            raise ValueError(f"TrainConfig: seed must not be negative, got {self.seed}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"TrainConfig: {name} must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}"
                )
        for name in ("batch_size", "steps", "log_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("dense_steps", "refresh_every", "eval_every", "checkpoint_every", "probe_every", "lr_warmup"):
            if getattr(self, name) < 0:
                raise ValueError(f"TrainConfig: {name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.active <= 1:
            raise ValueError(f"TrainConfig: active must lie in (0, 1], got {self.active}")
        for name in ("clip", "lr", "sparse_lr", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"TrainConfig: {name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"TrainConfig: min_lr must lie in [0, lr] ([0, {self.lr}]), got {self.min_lr}")
        if self.weight_decay < 0:
            raise ValueError(f"TrainConfig: weight_decay must not be negative, got {self.weight_decay}")

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
        return GPTConfig(
            vocab_size=vocab_size,
            context=self.context,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            chunk_size=self.chunk_size,
            sparse_layers=self.sparse_layers,
            attention=self.attention,
            activation=self.activation,
            compact_gradient=True,
        )


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


def make_data(config: TrainConfig) -> Data:
    """Return the data that a configuration asks for."""
    shape: dict[str, Any] = {"batch_size": config.batch_size, "context": config.context, "seed": config.seed}
    if config.task != "text":
        return CopyData(config.task, **shape)
    return TextData(config.corpus, vocab_size=config.vocab_size, **shape)


@contextlib.contextmanager
def _default_float32() -> Iterator[None]:
    """Weights are float32 whatever the caller's default is: ``TrainConfig.dtype`` is that of products."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
        ModuleNotFoundError: ``progress`` wants a bar, and tqdm is not installed.
    """

    rank, ranks, parallel = 0, 1, ""  # others in :class:`kernelbook.train.parallel.ParallelTrainer`

    def __init__(
        self,
        config: TrainConfig,
        data: Data | None = None,
        *,
        out: Path | str | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        if config.cuda_graph and runtime.DEVICE.type != "cuda":
            raise ValueError("Trainer: cuda_graph must be off where there is no GPU, got True")
        if progress and importlib.util.find_spec("tqdm") is None:
            raise ModuleNotFoundError(
                "Trainer: tqdm, which draws the progress bar, must be installed: pip install 'kernelbook[train]'",
                name="tqdm",
            )
        self.config, self.progress = config, progress
        self.out = None if out is None else Path(out)
        checkpoint = self._checkpoint_path()
        if (
            checkpoint is not None
            and not resume
            and (checkpoint.exists() or checkpoint.with_name("log.jsonl").exists())
        ):
            raise FileExistsError(f"Trainer: {self.out} holds a run already; resume it, or choose another folder")
        if checkpoint is not None:
            for name in FILES:
                sweep(checkpoint.with_name(name))
        self.data: Data = make_data(config) if data is None else data
        self.step, self.seconds = 0, 0.0
        self.records: list[dict[str, Any]] = []
        self._build()
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        elif checkpoint is not None:
            self._write_text("log.jsonl", "")
        if checkpoint is not None:
            self._write_text("config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")

    # --- what a run is made of ---

    def _build(self) -> None:
        config, device = self.config, runtime.DEVICE
        # The caller's random numbers go on as if nothing had been drawn.
        devices = [torch.cuda.current_device()] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), device, _default_float32():  # the weights are drawn where they live
            torch.manual_seed(config.seed)
            self.model = GPT(config.model(self.data.vocab_size))
        self.layers = self.model.sparse_layers()
        for name, layer in self.layers.items():
            layer.mode = config.mode
            if config.sparse_dx == "inputs" and config.mode == "sparse_dw_dx" and name.split(".")[-1] in OUTPUTS:
                layer.mode = "sparse_dw"
        layout = Layout.of_fraction([layer.num_chunks for layer in self.layers.values()], config.active, device)
        options = {} if config.explore is None else {"explore": config.explore}
        self.scheduler = make_scheduler(config.scheduler, layout, seed=config.seed, **options)
        self._lr, self._chunk_lr = (
            torch.zeros((), dtype=torch.float32, device=device),
            torch.zeros((), dtype=torch.float32, device=device),
        )
        of_chunks = [p for layer in self.layers.values() for p in (layer.weight, layer.bias) if p is not None]
        self._rest = list(self.model.parameters_but({id(p) for p in of_chunks}))
        adam: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
        self._chunk_adam = ChunkAdamW(
            of_chunks, lr=self._chunk_lr, weight_decay=config.weight_decay, chunk_size=config.chunk_size,
            inactive=config.inactive, unique_rows=True, **adam,
        )  # fmt: skip
        groups = [
            {"params": [p for p in self._rest if self._decays(p)], "weight_decay": config.weight_decay},
            {"params": [p for p in self._rest if not self._decays(p)], "weight_decay": 0.0},
        ]
        how: dict[str, Any] = {"fused": True} if device.type == "cuda" else {"foreach": False}
        self._rest_adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self._lr, capturable=device.type == "cuda", **adam, **how
        )
        self._norms = torch.zeros(self.scheduler.layout.total, dtype=torch.float32, device=device)
        self._active_norms = torch.zeros_like(self._norms[: self.scheduler.layout.total_active])
        self._inputs, self._targets = (t.clone() for t in self.data.batch(0))
        self._loss, self._grad_norm = (
            torch.zeros((), dtype=torch.float32, device=device),
            torch.zeros((), dtype=torch.float32, device=device),
        )
        self._calls = CapturedCalls("Trainer", capture=config.cuda_graph)

    def _decays(self, parameter: torch.Tensor) -> bool:
        embeddings = {id(self.model.tokens.weight), id(self.model.positions.weight)}
        return parameter.ndim > 1 and id(parameter) not in embeddings

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

    def _biases(self) -> list[torch.Tensor | None]:
        """Return the gradients of the sparse layers' biases."""
        return [layer.bias.grad for layer in self.layers.values() if layer.bias is not None]

    def _weights(self) -> list[torch.Tensor]:
        """Return the sparse layers' weights."""
        return [layer.weight for layer in self.layers.values()]

    def _total_norm(self, norms: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients: ``norms`` of chunks, and the gradients of all that is no chunk."""
        parts = torch.stack([torch.linalg.vector_norm(norms), torch.nn.utils.get_total_norm(others)])
        return torch.linalg.vector_norm(parts)

    def _update(self, norms: torch.Tensor) -> None:
        """Clip, and move the weights. ``norms`` of the chunks' gradients are a part of the whole norm."""
        others = [p.grad for p in self._rest if p.grad is not None]
        others_too = others + [b._values() if b.is_sparse else b for b in self._biases() if b is not None]
        total = self._total_norm(norms, others_too)
        self._grad_norm.copy_(total)
        scale = (self.config.clip / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(others, scale)
        self._chunk_adam.step(scale=scale)
        self._rest_adam.step()

    def _dense_step(self) -> None:
        self._activate([None] * len(self.layers))
        self._backward()
        self._measure(self._norms, self.scheduler.layout.counts)
        self.scheduler.observe_all(self._norms)
        self._update(self._norms)

    def _sparse_step(self) -> None:
        if self.scheduler.needs_dense:
            self._activate([None] * len(self.layers))
            self._backward()
            self._measure(self._norms, self.scheduler.layout.counts)
            self.scheduler.observe_all(self._norms)
        self.scheduler.select()
        self._activate(self.scheduler.ids_of_layers())
        self._backward()
        self._measure(self._active_norms, self.scheduler.layout.active)
        self.scheduler.observe(self._active_norms)
        self._update(self._active_norms)

    def _enqueue(self, step: int) -> None:
        """Start step number ``step`` (from 0), and wait for nothing."""
        config = self.config
        for mine, new in zip((self._inputs, self._targets), self.data.batch(step), strict=True):
            mine.copy_(new)
        sparse = config.is_sparse(step)
        self._lr.fill_(config.lr_at(step))
        self._chunk_lr.fill_(config.lr_at(step) * (config.sparse_lr if sparse else 1.0))
        if sparse and self.scheduler.needs_weights:
            since = step - config.dense_steps
            if since == 0 or (config.refresh_every and since % config.refresh_every == 0):
                self.scheduler.refresh(self._weights(), config.chunk_size)
        name = "sparse" if sparse else "dense"
        body: Callable[[], None] = self._sparse_step if sparse else self._dense_step
        self._calls(name, body)

    # --- the run ---

    def run(self, until: int | None = None) -> list[dict[str, Any]]:
        """Train to step ``until`` (default: the configured number) and return :attr:`records`.

        Raises ``FloatingPointError`` when a loss or a gradient is not finite; the last checkpoint is from before that.
        """
        config = self.config
        end = config.steps if until is None else min(until, config.steps)
        losses, norms = (self._loss.new_zeros(max(0, min(config.log_every, end))) for _ in range(2))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_determinism(config.deterministic))
            bar: Any = None
            if self.progress:
                from tqdm import tqdm

                bar = stack.enter_context(tqdm(total=config.steps, initial=self.step, unit="step"))
            if self.step == 0 and end > 0 and not self.records:
                self._evaluate()
            _wait()
            started, pending = time.perf_counter(), 0
            while self.step < end:
                self._enqueue(self.step)
                losses[pending].copy_(self._loss)
                norms[pending].copy_(self._grad_norm)
                self.step += 1
                pending += 1
                if pending == config.log_every or self.step == end or self._pauses():
                    values = list(zip(losses[:pending].tolist(), norms[:pending].tolist(), strict=True))
                    took = time.perf_counter() - started
                    self.seconds += took
                    self._record_steps(values, took)
                    self._pause(last=self.step == end)
                    if bar is not None:
                        bar.update(pending)
                        shown = {"loss": self.losses()[-1:], "validation": self.validation_losses()[-1:]}
                        bar.set_postfix({name: f"{value[0]:.3f}" for name, value in shown.items() if value})
                    _wait()
                    started, pending = time.perf_counter(), 0
        return self.records

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _pauses(self) -> bool:
        config = self.config
        return any(self._due(every) for every in (config.eval_every, config.checkpoint_every, config.probe_every))

    def _pause(self, last: bool) -> None:
        """Leave out of the run's time what is done between steps: scoring, evaluation, a checkpoint."""
        config = self.config
        if self._due(config.probe_every) and config.is_sparse(self.step - 1):
            self._record(self.probe())
        if self._due(config.eval_every) or last:
            self._evaluate()
        if self._due(config.checkpoint_every) or last:
            self.save()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the validation batches."""
        found = []
        for inputs, targets in self.data.validation_batches(self.config.eval_batches):
            with self._autocast():
                found.append(self.model(inputs, targets))
        return float(torch.stack(found).mean())

    def _evaluate(self) -> None:
        self._record({"step": self.step, "validation_loss": self.evaluate(), "seconds": round(self.seconds, 4)})

    def probe(self) -> dict[str, Any]:
        """Scores the chunks that the last step chose against the dense gradient of its batch; moves nothing."""
        self._activate([None] * len(self.layers))
        self._backward()
        norms = torch.empty_like(self._norms)
        self._measure(norms, self.scheduler.layout.counts)
        parts = norms.split(list(self.scheduler.layout.counts))
        scores = [score_chunks(ids, p) for ids, p in zip(self.scheduler.ids_of_layers(), parts, strict=True)]
        self.model.zero_grad(set_to_none=True)
        mean = {
            name: sum(getattr(score, name) for score in scores) / len(scores)
            for name in ("precision", "recall", "energy")
        }
        return {"step": self.step, **mean}

    # --- the record ---

    def _record_steps(self, values: list[tuple[float, float]], took: float) -> None:
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
        if self.out is not None:
            with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def losses(self) -> list[float]:
        """Return the training loss of every step so far."""
        return [entry["loss"] for entry in self.records if "loss" in entry]

    def validation_losses(self) -> list[float]:
        """Return the validation losses so far; the first is that of the untrained model."""
        return [entry["validation_loss"] for entry in self.records if "validation_loss" in entry]

    # --- checkpoints ---

    def _checkpoint_path(self) -> Path | None:
        return None if self.out is None else self.out / "checkpoint.pt"

    def save(self) -> None:
        """Write ``checkpoint.pt`` in one step: a run that is killed here leaves the one before."""
        path = self._checkpoint_path()
        if path is None:
            return
        state = {
            "config": dataclasses.asdict(self.config),
            "digest": self.data.digest,
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "chunk_adam": self._chunk_adam.state_dict(),
            "rest_adam": self._rest_adam.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        with replacing(path) as file:
            torch.save(state, file)

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=runtime.DEVICE, weights_only=True)
        except Exception as error:  # torch.load raises many things for a file that is not its own
            raise ValueError(
                f"Trainer: {path} must be a checkpoint of a run, got a file that cannot be read"
            ) from error
        if not isinstance(state, dict) or not isinstance(state.get("config"), dict) or "rest_adam" not in state:
            raise ValueError(f"Trainer: {path} must be a checkpoint of a run, got a file with something else")
        check_same_run(path.parent, state, self.config, self.data.digest)
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for optimizer, name, lr in (
            (self._chunk_adam, "chunk_adam", self._chunk_lr),
            (self._rest_adam, "rest_adam", self._lr),
        ):
            optimizer.load_state_dict(state[name])
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.scheduler.load_state_dict(state["scheduler"])
        self._load_log(path.with_name("log.jsonl"))

    def _load_log(self, log: Path) -> None:
        """The entries of the steps that are done; those of steps that the checkpoint does not have come again."""
        if not log.exists():
            raise ValueError(f"Trainer: {log.parent} must hold the log of its checkpoint, got no log.jsonl")
        lines = log.read_text(encoding="utf-8").splitlines()
        self.records = [entry for entry in _entries(lines) if entry["step"] <= self.step]
        logged = [entry["step"] for entry in self.records if "loss" in entry]
        if logged != list(range(1, self.step + 1)) or not self.validation_losses():
            raise ValueError(
                f"Trainer: {log} must be the log of its checkpoint, with steps 1 to {self.step}, got another one with "
                f"{len(logged)} of them"
            )
        if self.out is not None:
            self._write_text("log.jsonl", "".join(json.dumps(entry) + "\n" for entry in self.records))

    def _write_text(self, name: str, text: str) -> None:
        assert self.out is not None
        with replacing(self.out / name) as file:
            file.write(text.encode())


def check_same_run(folder: Path, saved: Mapping[str, Any], config: TrainConfig, digest: str) -> None:
    """``ValueError`` unless a run with the ``config`` and ``digest`` in ``saved`` may go on with these."""
    own = dataclasses.asdict(config)
    # A run that is watched otherwise may go on from here; one with other steps behind it or before it may not.
    # Where its corpus lies does not matter either: the digest says whether it is the same.
    free = {"log_every", "eval_every", "eval_batches", "checkpoint_every", "probe_every", "cuda_graph", "corpus"}
    for name, value in saved["config"].items():
        longer = name == "steps" and own["steps"] > value
        if name not in free and own.get(name) != value and not longer:
            least = "at least " if name == "steps" else ""
            raise ValueError(
                f"Trainer: {name} must be {least}that of the run in {folder} ({value!r}), got {own.get(name)!r}"
            )
    if saved["digest"] != digest:
        raise ValueError(f"Trainer: the corpus must be that of the run in {folder} ({saved['digest']}), got {digest}")


def _entries(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed while it wrote
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                yield entry


@contextlib.contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _wait() -> None:
    if runtime.DEVICE.type == "cuda":
        torch.cuda.synchronize()
