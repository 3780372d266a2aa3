"""The measured experiments of the chapter "Training with a sparse backward pass".

``python -m bench sparse_training`` writes into the folder of the GPU at hand:

    sparse_training.csv            the time of a training step, by mode, scheduler and share of active chunks
    sparse_training_parts.csv      how much of that time is the optimizer's
    sparse_training_scores.csv     how well each scheduler finds a planted teacher's chunks
    sparse_training_curves.jsonl   one run a line: losses against steps and seconds
    sparse_training_budgets.csv    the loss after equal seconds, where each run's schedule ends with them
    sparse_training_control.csv    the loss after equal steps beside a narrower dense model that does as many operations

``--select '^(step|parts) 512'`` takes only the experiments whose name has this. Scores are no times, and
``python -m bench.sparse_training`` alone records them without a GPU too.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bench import Bench, forget, row, write_ceilings
from kernelbook import check, runtime
from kernelbook.lab import profiling, record, timing
from kernelbook.nn.gpt import GPT, OUTPUTS
from kernelbook.train.capture import Captured
from kernelbook.train.chunks import Layout
from kernelbook.train.loop import CONFIGS, TrainConfig, Trainer, make_data
from kernelbook.train.schedulers import SCHEDULERS, KnnScheduler, make_scheduler
from kernelbook.train.seeds import generator
from kernelbook.train.synthetic import PlantedTeacher, score_scheduler
from kernelbook.train.text import TextData

STEM = "sparse_training"
SIZES = {config.width: name for name, config in CONFIGS.items() if name != "tiny"}
WIDTHS, SEEDS = (512, 1024, 2048), (0, 1, 2)
FRACTIONS = (0.1, 0.25)
SCORED = 0.125  # active chunks of the planted teacher: as many as are planted
CURVE_STEPS = {512: 300, 1024: 300, 2048: 200}
SPARSE_MODES = ("sparse_dw", "sparse_dw_dx")
CHOOSERS = tuple(name for name in SCHEDULERS if name not in ("all", "oracle"))
BUDGET_SECONDS = {512: 1.5, 1024: 3.0, 2048: 8.0}
CONTROL = {1024: SEEDS, 2048: SEEDS[:1]}  # the seeds of the runs beside a narrower dense model, by width
WARM = 1 / 8  # the share of a run that is dense at its beginning
# What tells one row, or one line, from another.
KEYS: dict[str, tuple[str, ...]] = {
    f"{STEM}_parts": ("shape", "provider", "active", "part"),
    f"{STEM}_scores": ("families", "scheduler", "seed", "active"),
    f"{STEM}_budgets": ("shape", "provider", "active", "lr", "sparse_lr", "seed", "budget_seconds"),
    f"{STEM}_control": ("width", "provider", "control", "active", "seed"),
    f"{STEM}_curves": ("provider", "active", "sparse_lr", "width", "seed", "steps"),
}
OPTIMIZER = ("_adamw", "adam", "FusedAdam")  # what the names of its kernels contain


# --- what is trained ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to take a step."""

    mode: str = "dense"
    scheduler: str = "all"
    active: float = 1.0
    sparse_layers: str = "all"
    inactive: str = "skip"
    sparse_lr: float = 1.0
    sparse_dx: str = "all"
    graph: bool = True

    @property
    def provider(self) -> str:
        if self.mode == "dense":
            name = "dense"
        else:
            name = f"kernelbook:{self.mode}:{self.scheduler}" + (":decay" if self.inactive == "decay" else "")
            name += ":inputs" if self.sparse_dx == "inputs" else ""
        return name + ("" if self.graph else ":eager")

    def config(self, width: int, **changes: Any) -> TrainConfig:
        return dataclasses.replace(
            CONFIGS[SIZES[width]], mode=self.mode, scheduler=self.scheduler, active=self.active,
            sparse_layers=self.sparse_layers, inactive=self.inactive, sparse_lr=self.sparse_lr, sparse_dx=self.sparse_dx,
            cuda_graph=self.graph, **changes,
        )  # fmt: skip


def _shape(config: TrainConfig) -> str:
    return (
        f"width={config.width} depth={config.depth} batch={config.batch_size} context={config.context} "
        f"layers={config.sparse_layers} chunk_size={config.chunk_size}"
    )


def step_gflop(config: TrainConfig, vocab_size: int) -> float:
    """1e9 operations of one step's matrix products and attention: what the algorithm needs, for active chunks only."""
    d, tokens = config.width, config.batch_size * config.context
    outputs = {"q": d, "k": d, "v": d, "attention_out": d, "up": 4 * d, "down": d}
    sparse = set(outputs) if config.sparse_layers == "all" else {"up", "down"}
    total = 3.0 * vocab_size * d  # the head: forward, dX, dW
    for name, d_out in outputs.items():
        d_in = 4 * d if name == "down" else d
        share = 1.0
        if name in sparse and config.mode != "dense":
            count = d_out // config.chunk_size
            share = Layout.of_fraction([count], config.active).active[0] / count
        sparse_dx = config.mode == "sparse_dw_dx" and (config.sparse_dx == "all" or name not in OUTPUTS)
        dw, dx = share, share if sparse_dx else 1.0
        total += config.depth * d_in * d_out * (1 + dw + dx)
    # Causal: half of the scores; the backward pass has five products for the forward pass's two.
    attention = config.depth * config.context * d / 2 * 2 * 3.5
    return 2 * tokens * (total + attention) / 1e9


# --- the time of a step ---------------------------------------------------------------------------------------------


def _step_times(enqueue: Callable[[int], object], *, graph: bool = True) -> timing.Timing:
    """The time from one step's end to the next one's, the queue never empty.

    With ``graph`` the host gets a head start: what else it has to do then does not count. Without, a step is what the
    host makes of it.
    """
    warm, count = 6, 30
    for step in range(warm):
        enqueue(step)
    cycles_per_ms = torch.cuda.get_device_properties(torch.cuda.current_device()).clock_rate  # which is in kHz
    for head_start_ms in (150, 600) if graph else (0,):
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        if head_start_ms:
            torch.cuda._sleep(cycles_per_ms * head_start_ms)
        for i, event in enumerate(events):
            event.record()
            if i < count:
                enqueue(warm + i)
        ahead = not events[0].query()
        torch.cuda.synchronize()
        if ahead:
            break
    return timing.Timing.of([a.elapsed_time(b) for a, b in itertools.pairwise(events)])


def _trainer(variant: Variant, width: int, data: TextData) -> Trainer:
    # Sparse from the first step on: random chunks are as good as any for timing.
    return Trainer(variant.config(width, dense_steps=0), data, progress=False)


def _error_ratio(variant: Variant, width: int, data: TextData) -> float:
    """The worst error of the active chunks' gradients over that of dense bfloat16, both against float32.

    In mode ``sparse_dw`` all layers are compared. In mode ``sparse_dw_dx``, another gradient by design, the last layer is:
    nothing before it was left out. Raises ``CheckError`` where the rule of :mod:`kernelbook.check` is broken.
    """
    trainer = _trainer(dataclasses.replace(variant, graph=False), width, data)
    layers = trainer.layers
    trainer.scheduler.observe_all(torch.rand_like(trainer._norms))
    trainer.scheduler.select()
    ids = [chosen.clone() for chosen in trainer.scheduler.ids_of_layers()]
    chunk = trainer.config.chunk_size
    rows = [(i[:, None] * chunk + torch.arange(chunk, device=i.device)).flatten() for i in ids]

    def gradients(active: bool, dtype: str) -> list[torch.Tensor]:
        trainer.config = dataclasses.replace(trainer.config, dtype=dtype)
        for block in trainer.model.blocks:
            block.attention = "torch" if dtype == "float32" else trainer.config.attention  # type: ignore[assignment]
        trainer._activate(ids if active else [None] * len(ids))
        trainer._backward()
        grads = [layer.weight.grad for layer in layers.values()]
        return [g._values() if g.is_sparse else g[r] for g, r in zip(grads, rows, strict=True) if g is not None]

    reference, baseline, ours = gradients(False, "float32"), gradients(False, "bfloat16"), gradients(True, "bfloat16")
    names = list(layers)
    compared = range(len(names)) if variant.mode == "sparse_dw" else [len(names) - 1]
    how = {"factor": check.GRADIENT_FACTOR, "floor": 2.0**-8}
    return max(check.compare(names[i], ours[i], reference[i], baseline[i], **how).require().ratio for i in compared)


class _PlainLayerNorm(torch.nn.LayerNorm):
    """PyTorch's, in the dtype of its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return torch.nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def _plain_step(width: int, data: TextData) -> Callable[[int], object]:
    """The step as PyTorch alone takes it: its LayerNorm, linear layers, attention, clipping and fused AdamW, in a CUDA graph."""
    config = CONFIGS[SIZES[width]]
    torch.manual_seed(0)
    with runtime.DEVICE:
        model = GPT(dataclasses.replace(config.model(data.vocab_size), attention="torch"))
        for block in model.blocks:
            for name in ("norm_attention", "norm_mlp"):
                setattr(block, name, _PlainLayerNorm(width))
            for name in ("q", "k", "v", "attention_out", "up", "down"):
                old = getattr(block, name)
                setattr(block, name, torch.nn.Linear(old.in_features, old.out_features, bias=False))
        model.norm = _PlainLayerNorm(width)  # type: ignore[assignment]
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True, capturable=True)
    inputs, targets = (t.clone() for t in data.batch(0))

    def body() -> None:
        adam.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        adam.step()

    captured = Captured(body)

    def enqueue(step: int) -> None:
        for mine, new in zip((inputs, targets), data.batch(step), strict=True):
            mine.copy_(new)
        captured()

    return enqueue


def step_variants() -> Iterator[Variant]:
    """All that is timed at a width, by one scheduler, whose choice costs what the others' do."""
    yield Variant()
    yield Variant(graph=False)
    yield Variant("sparse_dw_dx", "ema_topk", 0.1, sparse_dx="inputs")
    for mode in SPARSE_MODES:
        for active in (*FRACTIONS, 0.5):
            yield Variant(mode, "ema_topk", active)
        yield Variant(mode, "ema_topk", 0.1, inactive="decay")
        yield Variant(mode, "ema_topk", 0.1, graph=False)
        yield Variant(mode, "ema_topk", 0.1, sparse_layers="mlp")


def curve_variants(*, half: bool = True) -> Iterator[Variant]:
    """All that is trained for as many steps as dense, at each width; with ``half`` half of the chunks too."""
    yield Variant()
    for active, mode, scheduler in itertools.product(FRACTIONS, SPARSE_MODES, (*CHOOSERS, "oracle")):
        yield Variant(mode, scheduler, active)
    for mode in SPARSE_MODES if half else ():
        yield Variant(mode, "ema_topk", 0.5)


def budget_variants(*, settings: bool = True) -> Iterator[tuple[Variant, float]]:
    """What is trained for as many seconds as dense, with what the size's learning rate is multiplied with.

    With ``settings`` those that leave out most of the gradient too.
    """
    for lr in (1.0, 0.6):
        yield Variant(), lr
        for mode in SPARSE_MODES:
            yield Variant(mode, "ema_topk", 0.5), lr
    # Few chunks learn seldom: twice the learning rate makes up for some of that.
    yield Variant("sparse_dw_dx", "ema_topk", 0.25, sparse_lr=2.0, sparse_dx="inputs"), 1.0
    if not settings:
        return
    for active, mode in itertools.product(reversed(FRACTIONS), SPARSE_MODES):
        yield Variant(mode, "ema_topk", active, sparse_lr=2.0), 1.0


class _ShuffledKnn(KnnScheduler):
    """``knn`` that takes each chunk for another: what is left of it if weights cannot help."""

    name = "knn:shuffled"

    def refresh(self, weights: Sequence[torch.Tensor], chunk_size: int) -> None:
        super().refresh(weights, chunk_size)
        order = torch.randperm(self._features.shape[1], generator=generator("shuffled", self.seed))
        self._features.copy_(self._features[:, order.to(self._features.device)])


class Study:
    """The experiments whose names have ``select``, recorded as they come, for one :attr:`width` at a time."""

    def __init__(self, folder: Path, select: str) -> None:
        self.width, self.folder, self.select = WIDTHS[0], folder, select
        self.about = {"run": record.new_run(), **record.environment(STEM)}
        self.data = make_data(CONFIGS["small"])  # the same for all widths
        self._ms: dict[tuple[int, Variant], float] = {}
        self.failures = 0

    def attempt(self, name: str, body: Callable[[], str]) -> None:
        """Runs one experiment; what it raises is printed and counted."""
        if not re.search(self.select, name):
            return
        started = time.monotonic()
        try:
            print(f"{name}: {body()} ({time.monotonic() - started:.1f} s)", flush=True)
        except Exception:  # the other experiments go on
            self.failures += 1
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
        forget()

    def _write(self, table: str, figures: dict[str, Any]) -> None:
        rows = pd.DataFrame([{"run": self.about["run"], **figures, **self.about}])
        record.write_results(self.folder / f"{STEM}_{table}.csv", rows, key=KEYS[f"{STEM}_{table}"])

    # --- steps ---

    def steps(self) -> None:
        """Rows of ``sparse_training.csv``: plain PyTorch, and every variant."""
        self.attempt(f"step {self.width} torch", self._torch_step)
        for variant in step_variants():
            name = f"step {self.width} {variant.provider} {variant.sparse_layers} {variant.active:g}"
            self.attempt(name, functools.partial(self._step, variant))

    def _torch_step(self) -> str:
        return self._timed("torch", Variant().config(self.width), lambda: _plain_step(self.width, self.data), math.nan)

    def _step(self, variant: Variant) -> str:
        config = variant.config(self.width, dense_steps=0)
        ratio = math.nan if variant.mode == "dense" else _error_ratio(variant, self.width, self.data)
        trainer = functools.partial(_trainer, variant, self.width, self.data)
        return self._timed(variant.provider, config, lambda: trainer()._enqueue, ratio, graph=variant.graph)

    def _timed(
        self, provider: str, config: TrainConfig, make: Callable[[], Callable[[int], object]], ratio: float, *,
        graph: bool = True,
    ) -> str:  # fmt: skip
        """Times the steps that ``make`` makes, and writes the row."""
        forget()  # its peak of memory is not that of experiments before
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = _step_times(make(), graph=graph)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        written = row(
            STEM, "step", provider, getattr(torch, config.dtype), _shape(config), ("active", config.active), found,
            gbytes=0, gflop=step_gflop(config, self.data.vocab_size), peak_mib=peak, err_ratio=ratio,
        )  # fmt: skip
        table = pd.DataFrame([{**self.about, **written}], columns=list(record.COLUMNS))
        record.write_results(self.folder / f"{STEM}.csv", table)
        return f"{found.ms:.3f} ms, error ratio {ratio:.2f}"

    # --- parts ---

    def parts(self) -> None:
        """Rows of ``sparse_training_parts.csv``: device time of a step's kernels, the optimizer's and the others'."""
        for variant in (Variant(), Variant("sparse_dw", "knn", 0.1)):
            self.attempt(f"parts {self.width} {variant.provider}", functools.partial(self._parts, variant))

    def _parts(self, variant: Variant) -> str:
        config = variant.config(self.width, dense_steps=0)
        # Eagerly: the profiler sees the kernels of a graph as well, but the autograd of a step is what it can attribute.
        trainer = _trainer(dataclasses.replace(variant, graph=False), self.width, self.data)
        for step in range(4):
            trainer._enqueue(step)
        numbers = itertools.count(4)
        kernels = profiling.device_kernels(lambda: trainer._enqueue(next(numbers)), calls=5)
        key = {"shape": _shape(config), "provider": variant.provider, "active": f"{variant.active:g}"}
        parts: dict[str, list[float]] = {"optimizer": [], "others": []}
        for kernel in kernels:
            own = any(name in kernel.name for name in OPTIMIZER)
            parts["optimizer" if own else "others"].append((kernel.end - kernel.start) / 1e6)
        for part, ms in parts.items():
            figures = {"part": part, "device_ms": f"{sum(ms) / 5:.5g}", "launches": f"{len(ms) / 5:g}"}
            self._write("parts", {**key, **figures})
        return f"{sum(map(sum, parts.values())) / 5:.3f} ms in all"

    # --- curves ---

    def curves(self) -> None:
        """Lines of ``sparse_training_curves.jsonl``: dense, and each scheduler in each mode at each share."""
        for seed in SEEDS if self.width == min(WIDTHS) else SEEDS[:1]:
            for variant in curve_variants(half=seed == 0):
                name = f"curve {self.width} {variant.provider} {variant.active:g} seed {seed}"
                self.attempt(name, functools.partial(self._curve, variant, seed))

    def _curve(self, variant: Variant, seed: int) -> str:
        steps = CURVE_STEPS[self.width]
        every = max(1, steps // 8)
        config = variant.config(
            self.width, steps=steps, seed=seed, dense_steps=round(WARM * steps), eval_every=every, eval_batches=4,
            checkpoint_every=0, log_every=10, lr_warmup=max(1, steps // 20),
            probe_every=0 if variant.mode == "dense" else 2 * every,
        )  # fmt: skip
        self.data.seed = seed  # type: ignore[attr-defined]
        trainer = Trainer(config, self.data, progress=False)
        records = trainer.run()
        evaluated = [r for r in records if "validation_loss" in r]
        probed = [r for r in records if "recall" in r]
        line = {
            "provider": variant.provider, "mode": variant.mode, "scheduler": variant.scheduler, "active": variant.active,
            "inactive": variant.inactive, "sparse_lr": variant.sparse_lr, "sparse_dx": variant.sparse_dx,
            "width": self.width, "seed": seed, "steps": steps, "shape": _shape(config),
            "validation_steps": [r["step"] for r in evaluated],
            "validation_seconds": [round(r["seconds"], 3) for r in evaluated],
            "validation_loss": [round(r["validation_loss"], 4) for r in evaluated],
            "probe_energy": [round(r["energy"], 4) for r in probed],
            "corpus": self.data.digest, "vocab_size": self.data.vocab_size,
            **self.about,
        }  # fmt: skip
        record.write_lines(self.folder / f"{STEM}_curves.jsonl", [line], KEYS[f"{STEM}_curves"])
        return f"validation loss {evaluated[-1]['validation_loss']:.4f} in {trainer.seconds:.1f} s"

    # --- budgets ---

    def budgets(self) -> None:
        """Rows of ``sparse_training_budgets.csv``: each variant takes as many steps as fit into the same seconds."""
        for seed in SEEDS if self.width == max(WIDTHS) else SEEDS[:1]:
            for variant, lr in budget_variants(settings=seed == 0):
                name = f"budget {self.width} {variant.provider} {variant.active:g} lr x{lr:g} x{variant.sparse_lr:g} seed {seed}"
                self.attempt(name, functools.partial(self._budget, variant, lr, seed))

    def _step_ms(self, variant: Variant) -> float:
        variant = dataclasses.replace(variant, sparse_lr=1.0)  # costs nothing
        key = (self.width, variant)
        if key not in self._ms:
            if variant.mode != "dense":
                _error_ratio(variant, self.width, self.data)
            trainer = _trainer(variant, self.width, self.data)
            self._ms[key] = _step_times(trainer._enqueue).ms
        return self._ms[key]

    def _budget(self, variant: Variant, lr_times: float, seed: int) -> str:
        budget, base = BUDGET_SECONDS[self.width], CONFIGS[SIZES[self.width]]
        lr = base.lr * lr_times
        dense_ms, ms = self._step_ms(Variant()), self._step_ms(variant)
        dense_steps = round(WARM * 1e3 * budget / dense_ms)
        steps = dense_steps + round((1e3 * budget - dense_steps * dense_ms) / ms)
        config = variant.config(
            self.width, steps=steps, seed=seed, dense_steps=dense_steps, lr=lr, min_lr=base.min_lr * lr_times,
            lr_warmup=max(1, steps // 20), eval_every=0, eval_batches=8, checkpoint_every=0, log_every=20,
        )  # fmt: skip
        self.data.seed = seed  # type: ignore[attr-defined]
        trainer = Trainer(config, self.data, progress=False)
        trainer.run()
        outcome = {
            "shape": _shape(config), "provider": variant.provider, "active": f"{variant.active:g}",
            "lr": f"{lr:g}", "sparse_lr": f"{variant.sparse_lr:g}", "seed": seed, "budget_seconds": f"{budget:g}",
            "step_ms": f"{ms:.5g}", "dense_steps": dense_steps, "steps": steps,
            "train_loss": f"{statistics.fmean(trainer.losses()[-20:]):.4f}",
            "validation_loss": f"{trainer.validation_losses()[-1]:.4f}",
            "clock_seconds": f"{trainer.seconds:.3f}",
        }  # fmt: skip
        self._write("budgets", outcome)
        return f"validation loss {outcome['validation_loss']} after {steps} steps in {trainer.seconds:.1f} s"

    # --- control ---

    def control(self) -> None:
        """Rows of ``sparse_training_control.csv``: dense, sparse, and dense but so narrow that the whole run has as many operations."""
        for seed, active in itertools.product(CONTROL.get(self.width, ()), (1.0, *FRACTIONS)):
            variant = Variant() if active == 1 else Variant("sparse_dw_dx", "ema_topk", active)
            for control in (False, True)[: 1 + (active < 1)]:
                name = f"control {self.width} {variant.provider} {active:g} narrow {control} seed {seed}"
                self.attempt(name, functools.partial(self._control, variant, control, seed))

    def _control(self, variant: Variant, control: bool, seed: int) -> str:
        steps = CURVE_STEPS[self.width]
        warm = round(WARM * steps)
        dense, sparse = (step_gflop(each.config(self.width), self.data.vocab_size) for each in (Variant(), variant))
        gflop = warm * dense + (steps - warm) * sparse
        config = variant.config(
            self.width, steps=steps, seed=seed, dense_steps=warm, eval_every=0, eval_batches=8,
            checkpoint_every=0, log_every=20, lr_warmup=max(1, steps // 20),
        )  # fmt: skip
        if control:
            config = self._narrower(config, gflop / steps)
            gflop = steps * step_gflop(config, self.data.vocab_size)
        self.data.seed = seed  # type: ignore[attr-defined]
        trainer = Trainer(config, self.data, progress=False)
        trainer.run()
        outcome = {
            "width": self.width, "provider": variant.provider, "control": control, "active": f"{variant.active:g}",
            "seed": seed, "shape": _shape(config), "steps": steps, "gflop": f"{gflop:.5g}",
            "validation_loss": f"{trainer.validation_losses()[-1]:.4f}", "clock_seconds": f"{trainer.seconds:.3f}",
        }  # fmt: skip
        self._write("control", outcome)
        return f"width {config.width}, {gflop:.0f} GFLOP: validation loss {outcome['validation_loss']}"

    def _narrower(self, config: TrainConfig, gflop: float) -> TrainConfig:
        """The dense configuration, with as many heads, whose step has the most operations up to ``gflop`` times 1e9."""
        widths = range(config.width, 0, -16 * config.heads)  # heads of attention have a multiple of 16 features
        dense = (
            dataclasses.replace(config, mode="dense", scheduler="all", active=1.0, width=width) for width in widths
        )
        return next(each for each in dense if step_gflop(each, self.data.vocab_size) <= gflop)

    # --- scores ---

    def scores(self) -> None:
        """Rows of ``sparse_training_scores.csv``: precision, recall and energy on a planted teacher."""
        for seed, families, name in itertools.product(SEEDS, (8, None), [*CHOOSERS, _ShuffledKnn.name, "oracle"]):
            experiment = functools.partial(self._score, name, families, seed)
            self.attempt(f"scores {name} families {families} seed {seed}", experiment)

    def _score(self, name: str, families: int | None, seed: int) -> str:
        teacher = PlantedTeacher(families=families, seed=seed)
        layout = Layout.of_fraction([teacher.chunks], SCORED)
        shuffled = name == _ShuffledKnn.name
        scheduler = _ShuffledKnn(layout, seed=seed) if shuffled else make_scheduler(name, layout, seed=seed)
        table = pd.DataFrame(list(score_scheduler(teacher, scheduler, 160)))
        mean = table[["precision", "recall", "energy"]].mean()
        key = {"families": families or 0, "scheduler": name, "seed": seed, "active": SCORED}
        self._write("scores", {**key, **{str(name): f"{value:.4f}" for name, value in mean.items()}})
        return f"recall {mean['recall']:.3f}, energy {mean['energy']:.3f}"


def run(folder: Path, select: str | None = None) -> int:
    """Runs the experiments whose names have ``select``; 1 if one failed."""
    study = Study(folder, select or "")
    write_ceilings(folder, study.about["run"])
    study.scores()
    for experiment in (study.steps, study.parts, study.curves, study.budgets, study.control):
        for study.width in WIDTHS:
            experiment()
    return int(study.failures > 0)


BENCH = Bench(
    name="sparse_training",
    keys=KEYS,
    baselines={"dense": "torch", "torch": "torch"},
    run=run,
    options=("select",),
)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    Study(record.results_dir() / record.device_slug(), "").scores()
