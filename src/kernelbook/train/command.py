"""``python -m kernelbook train``: its arguments, and what it prints."""

import argparse
import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernelbook import runtime
from kernelbook.train.loop import CHOICES, CONFIGS, TrainConfig, Trainer

__all__ = ["add_arguments", "train"]

_TYPES = {"int": int, "float": float, "str": str, "float | None": float}
# Set by options of their own.
_NOT_AN_OPTION = {"corpus"}
_HELP = {
    "width": "features of a token",
    "depth": "blocks",
    "heads": "attention heads, which divide the width",
    "context": "tokens in a sequence",
    "chunk_size": "rows of a weight in a chunk, at least 16",
    "sparse_layers": "which linear layers are sparse: all six of a block, or those of the MLP",
    "attention": "whose attention",
    "activation": "of the MLPs; with relu most hidden values become zero",
    "task": "real text, or synthetic sequences to copy or to look up in",
    "vocab_size": "tokens of the encoding, which is found on the text",
    "batch_size": "sequences in a step",
    "steps": "steps in all",
    "seed": "of weights, batches and schedulers",
    "mode": "what the backward pass leaves out",
    "sparse_dx": "in mode sparse_dw_dx: in all sparse layers, or in those that read the residual stream",
    "scheduler": "who chooses the active chunks",
    "active": "share of active chunks, in (0, 1]",
    "explore": "share of the active chunks that ema_topk and knn draw at random",
    "dense_steps": "dense steps before the first sparse one",
    "refresh_every": "steps after which knn sees the weights again",
    "inactive": "rows without gradient: rest (skip), or go on by their moments and decay (decay)",
    "sparse_lr": "in sparse steps, times the learning rate for sparse layers",
    "lr": "largest learning rate",
    "min_lr": "learning rate at the end",
    "lr_warmup": "steps over which the learning rate rises",
    "beta1": "of AdamW",
    "beta2": "of AdamW",
    "eps": "of AdamW",
    "weight_decay": "of AdamW; vectors and embeddings do not decay",
    "clip": "largest norm of the gradient",
    "dtype": "of products and activations; bfloat16 by autocast",
    "log_every": "steps between readings of the losses, each of which waits for the device",
    "eval_every": "steps between evaluations; 0: only at the end",
    "eval_batches": "batches of an evaluation",
    "checkpoint_every": "steps between checkpoints; 0: only at the end",
    "probe_every": "steps between scores of the chosen chunks against the dense gradient; 0: never",
    "cuda_graph": "capture the step in a CUDA graph (default: where there is a GPU)",
    "deterministic": "repeat bit by bit on a GPU, at a price (CUBLAS_WORKSPACE_CONFIG=:4096:8 may have to be set)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An option for each field of :class:`TrainConfig`, and those of a run."""
    parser.add_argument(
        "--config",
        choices=sorted(CONFIGS),
        help="a set of sizes (default: tiny, or with --resume the run's own settings)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for log.jsonl, config.json and checkpoint.pt")
    parser.add_argument(
        "--text", metavar="FILE", help="train on this UTF-8 file; 'stdlib' and 'topics' are Python's own texts"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, or begin if there is none"
    )
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="on all ranks that torchrun has started: copies of the model (ddp), or parts of it (fsdp)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    group = parser.add_argument_group("settings", "what --config says, changed (see kernelbook.train.TrainConfig)")
    for field in dataclasses.fields(TrainConfig):
        if field.name in _NOT_AN_OPTION:
            continue
        option, about = "--" + field.name.replace("_", "-"), _HELP[field.name]
        if field.type in (bool, "bool"):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=about)
            continue
        kind = field.type if isinstance(field.type, type) else _TYPES[str(field.type)]
        choices = CHOICES.get(field.name)
        metavar = None if choices else {int: "N", float: "X", str: "NAME"}[kind]  # type: ignore[index]
        group.add_argument(option, type=kind, default=None, choices=choices, metavar=metavar, help=about)


def _settings(given: argparse.Namespace) -> TrainConfig:
    changes: dict[str, Any] = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(TrainConfig)
        if field.name not in _NOT_AN_OPTION and getattr(given, field.name) is not None
    }
    if given.text is not None:
        own = given.text in ("stdlib", "topics")
        changes["corpus"] = given.text if own else str(Path(given.text).absolute())  # to be resumed from anywhere
    saved = given.out / "config.json"
    if given.config is None and given.resume and saved.exists():
        try:
            base = TrainConfig(**json.loads(saved.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{saved} must hold the settings of a run ({error}); say --config and the settings"
            ) from None
    else:
        base = CONFIGS[given.config or "tiny"]
        changes.setdefault("cuda_graph", runtime.DEVICE.type == "cuda" and given.parallel is None)
    config = dataclasses.replace(base, **changes)
    if given.text is not None and config.task != "text":
        raise ValueError(f"--text must come with --task text, got --task {config.task}")
    return config


def train(given: argparse.Namespace) -> int:
    """Train once; return 1 if the run did not end well, 2 if its settings or its folder are not in order, 130 if it was interrupted."""
    if given.parallel is None:
        return _train(given)
    from kernelbook.train import parallel  # the many modules of PyTorch's engine, only where it is asked for

    try:
        return _train(given)
    finally:
        parallel.end()


def _trainer(given: argparse.Namespace) -> Trainer:
    how: dict[str, Any] = {"out": given.out, "resume": given.resume, "progress": not given.quiet}
    if given.parallel is None:
        if dist.is_torchelastic_launched():
            raise ValueError(
                "--parallel must be ddp or fsdp under torchrun, whose processes would each make this run, in one folder"
            )
        return Trainer(_settings(given), **how)
    from kernelbook.train import parallel

    parallel.start()
    return parallel.ParallelTrainer(_settings(given), given.parallel, **how)


def _train(given: argparse.Namespace) -> int:
    try:
        trainer = _trainer(given)
    except Exception as error:  # PyTorch refuses sizes that it cannot have in many ways
        if runtime.debug_enabled():
            raise
        print(f"train: {error or type(error).__name__}", file=sys.stderr)
        return 2
    if trainer.rank != 0:  # the first rank speaks for all
        with contextlib.redirect_stdout(io.StringIO()):
            return _run(trainer, given)
    return _run(trainer, given)


def _run(trainer: Trainer, given: argparse.Namespace) -> int:
    config = trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    sparse = f"{config.mode}, {config.scheduler}, {config.active:.0%} active after {config.dense_steps} steps"
    about = [
        ("kernels are", "interpreted on the CPU" if runtime.INTERPRET else "compiled"),
        ("parameters", f"{parameters:,} in {config.depth} blocks of width {config.width}"),
        *([("ranks", f"{trainer.ranks}, {trainer.parallel}")] if trainer.parallel else []),
        ("data", f"{config.corpus if config.task == 'text' else config.task}, {trainer.data.digest}"),
        ("tokens", f"{trainer.data.vocab_size:,} different ones, {config.batch_size * config.context:,} a step"),
        ("backward", sparse if config.is_sparse(config.steps) else "dense"),
    ]
    for name, value in about:
        print(f"{name:11}  {value}")
    if trainer.step:
        print(f"going on after step {trainer.step}")
    try:
        trainer.run()
    except FloatingPointError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"train: writing to {given.out} failed ({error}); --resume --out {given.out} goes on from the last checkpoint",
            file=sys.stderr,
        )
        return 1
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
            print(
                f"train: --batch-size, --context or --width must be smaller for this machine; {error}", file=sys.stderr
            )
            return 2
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        print(f"train: --deterministic must come with CUBLAS_WORKSPACE_CONFIG=:4096:8 set; {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ntrain: interrupted; --resume --out {given.out} goes on from the last checkpoint", file=sys.stderr)
        return 130
    losses, validation = trainer.losses(), trainer.validation_losses()
    print(
        f"training loss {losses[0]:.3f} -> {losses[-1]:.3f}, validation loss {validation[0]:.3f} -> {validation[-1]:.3f}, "
        f"{trainer.step} steps in {trainer.seconds:.1f} s; see {given.out}"
    )
    return 0
