"""``python -m kernelbook train``: its arguments, and what it prints."""

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernelbook import runtime
from kernelbook.train.loop import CHOICES, CONFIGS, TrainConfig, Trainer
from kernelbook.train.text import OWN_TEXTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An option for each field of :class:`TrainConfig`, and those of a run."""
    parser.add_argument(
        "--config",
        choices=sorted(CONFIGS),
        help="a set of sizes (default: tiny, or with --resume the run's own settings)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for log.jsonl, config.json and checkpoint.pt")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, or begin if there is none"
    )
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="on all ranks that torchrun has started: copies of the model (ddp), or parts of it (fsdp, with --inactive decay)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    group = parser.add_argument_group("settings", "what --config says, changed (see kernelbook.train.TrainConfig)")
    attributes = (inspect.getdoc(TrainConfig) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    told = {name: re.sub(r"\s+", " ", re.sub(r":\w+:`(.*?)`", r"\1", about)).rstrip(".") for name, about in found}
    for field in dataclasses.fields(TrainConfig):
        option, how = "--" + field.name.replace("_", "-"), dict[str, Any](default=None, help=told[field.name])
        if field.type is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, **how)
        elif field.name in CHOICES:
            group.add_argument(option, choices=CHOICES[field.name], **how)
        else:
            group.add_argument(option, type=field.type, metavar="N" if field.type is int else "X", **how)  # type: ignore[arg-type]


def _settings(given: argparse.Namespace) -> TrainConfig:
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    changes: dict[str, Any] = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.corpus not in (None, *OWN_TEXTS):
        changes["corpus"] = str(Path(given.corpus).absolute())  # to be resumed from anywhere
    saved = given.out / "config.json"
    if given.config is None and given.resume and saved.exists():
        return dataclasses.replace(TrainConfig(**json.loads(saved.read_text(encoding="utf-8"))), **changes)
    changes.setdefault("cuda_graph", runtime.DEVICE.type == "cuda" and given.parallel is None)
    return dataclasses.replace(CONFIGS[given.config or "tiny"], **changes)


def train(given: argparse.Namespace) -> int:
    """Train once; return 1 if the run did not end well, 2 if its settings or its folder are not in order, 130 if it was interrupted."""
    try:
        try:
            trainer = _trainer(given)
        except Exception as error:  # PyTorch refuses sizes that it cannot have in many ways
            if runtime.debug_enabled() or isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"train: {error or type(error).__name__}", file=sys.stderr)
            return 2
        quiet = io.StringIO() if trainer.rank else sys.stdout  # the first rank speaks for all
        with contextlib.redirect_stdout(quiet):
            return _run(trainer, given)
    except torch.OutOfMemoryError:
        names = "--batch-size, --context, --width or --depth"
        print(f"train: the GPU's memory is too small for this run; make {names} smaller", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _trainer(given: argparse.Namespace) -> Trainer:
    how: dict[str, Any] = {"out": given.out, "resume": given.resume, "progress": not given.quiet}
    if given.parallel is None:
        if dist.is_torchelastic_launched():
            raise ValueError(
                "--parallel must be ddp or fsdp under torchrun, whose processes would each make this run, in one folder"
            )
        return Trainer(_settings(given), **how)
    from kernelbook.train import parallel  # the many modules of PyTorch's engine, only where it is asked for

    parallel.start()
    return parallel.ParallelTrainer(_settings(given), given.parallel, **how)


def _run(trainer: Trainer, given: argparse.Namespace) -> int:
    config = trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    sparse = f"{config.mode}, {config.scheduler}, {config.active:.0%} active after {config.dense_steps} steps"
    about = [
        ("kernels are", "interpreted on the CPU" if runtime.INTERPRET else "compiled"),
        ("parameters", f"{parameters:,} in {config.depth} blocks of width {config.width}"),
        *([("ranks", f"{trainer.ranks}, {trainer.parallel}")] if trainer.parallel else []),
        ("data", f"{config.corpus}, {trainer.data.digest}"),
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
    except KeyboardInterrupt:
        print(f"\ntrain: interrupted; --resume --out {given.out} goes on from the last checkpoint", file=sys.stderr)
        return 130
    losses, validation = trainer.losses(), trainer.validation_losses()
    print(
        f"training loss {losses[0]:.3f} -> {losses[-1]:.3f}, validation loss {validation[0]:.3f} -> {validation[-1]:.3f}, "
        f"{trainer.step} steps in {trainer.seconds:.1f} s; see {given.out}"
    )
    return 0
