"""``python -m kernelbook train``: its arguments, and what it prints."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from kernelbook import runtime
from kernelbook.train.loop import CONFIGS, TrainConfig, Trainer

__all__ = ["add_arguments", "train"]

_TYPES = {"int": int, "float": float, "str": str, "float | None": float}
# Set by options of their own.
_NOT_AN_OPTION = {"corpus"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An option for each field of :class:`TrainConfig`, and those of a run."""
    parser.add_argument("--config", choices=sorted(CONFIGS), default="tiny", help="a set of sizes (default: tiny)")
    parser.add_argument("--out", type=Path, required=True, help="folder for log.jsonl, config.json and checkpoint.pt")
    parser.add_argument(
        "--text", metavar="FILE", help="train on this UTF-8 file; 'stdlib' and 'topics' are Python's own texts"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, or begin if there is none"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    group = parser.add_argument_group("settings", "what --config says, changed (see kernelbook.train.TrainConfig)")
    for field in dataclasses.fields(TrainConfig):
        if field.name in _NOT_AN_OPTION:
            continue
        option = "--" + field.name.replace("_", "-")
        if field.type in (bool, "bool"):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None)
        else:
            kind = field.type if isinstance(field.type, type) else _TYPES[str(field.type)]
            group.add_argument(option, type=kind, default=None, metavar=field.name.upper())


def _settings(given: argparse.Namespace) -> TrainConfig:
    changes: dict[str, Any] = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(TrainConfig)
        if field.name not in _NOT_AN_OPTION and getattr(given, field.name) is not None
    }
    if given.text is not None:
        changes["corpus"] = given.text
    return dataclasses.replace(CONFIGS[given.config], **changes)


def train(given: argparse.Namespace) -> int:
    """One run; 2 if its settings or its folder are not in order."""
    try:
        trainer = Trainer(_settings(given), out=given.out, resume=given.resume, progress=not given.quiet)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    config = trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    about = [
        ("kernels are", "interpreted on the CPU" if runtime.INTERPRET else "compiled"),
        ("parameters", f"{parameters:,} in {config.depth} blocks of width {config.width}"),
        ("data", f"{config.corpus if config.task == 'text' else config.task}, {trainer.data.digest}"),
        ("tokens", f"{trainer.data.vocab_size:,} different ones, {config.batch_size * config.context:,} a step"),
        ("backward", f"{config.mode}, {config.scheduler}, {config.active:.0%} active after {config.dense_steps} steps"),
    ]
    print(tabulate(about, tablefmt="plain"))
    if trainer.step:
        print(f"going on after step {trainer.step}")
    trainer.run()
    losses, validation = trainer.losses(), trainer.validation_losses()
    print(
        f"training loss {losses[0]:.3f} -> {losses[-1]:.3f}, validation loss {validation[0]:.3f} -> {validation[-1]:.3f}, "
        f"{trainer.step} steps in {trainer.seconds:.1f} s; see {given.out}"
    )
    return 0
