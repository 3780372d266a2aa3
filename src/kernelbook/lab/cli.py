"""``python -m kernelbook``: does this machine work, how fast is it, is a kernel or a model right, a training run, a profile."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import kernelbook
from kernelbook.lab import check_folder, profiling
from kernelbook.lab.doctor import doctor
from kernelbook.train import command as training

# What a command needs beside the package's own requirements, and the extra that has it.
NEEDS = {
    "profile": (("tabulate",), "lab"), "check-model": (("transformers",), "interop"), "train": (("tokenizers", "tqdm"), "train"),
}  # fmt: skip


def judge(file: Path | None, name: str | None, hints: int, seed: int | None) -> int:
    """Judges a file, shows a task, or lists the tasks; 0 if it is right, 1 if not, 2 if there is nothing to judge."""
    from kernelbook.lab import judge as judging
    from kernelbook.lab import tasks

    try:
        if name is not None:
            task = judging.find_task(name)
            if file is None:
                print(task.says, *([task.picture] if task.picture else []), sep="\n\n")
                return 0
            found = judging.judge(file, task, hints=hints, seed=seed)
            print(found)
            return 0 if found.right else 1
        if file is not None:
            how = f"name the task of {file}: judge {file} --task NAME; `python -m kernelbook judge` lists the tasks"
            raise ValueError(f"judge: {how if file.exists() else f'{file} cannot be read: No such file or directory'}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for one in tasks.TASKS.values():
        print(f"{one.name:18} {one.says}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m kernelbook", description=kernelbook.__doc__)
    top.add_argument("--version", action="version", version=f"kernelbook {kernelbook.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check that this machine works; exit code 1 if something is broken")
    judged = commands.add_parser(
        "judge", help="judge a kernel of yours: is it right, and on a GPU how fast; without a file, list the tasks"
    )
    judged.add_argument("file", nargs="?", type=Path, help="a file with a function of the task's name")
    judged.add_argument(
        "--task", help="what it has to do, shown where there is no file; my_tasks.py:name for a Task of your own"
    )
    judged.add_argument("--hint", action="count", default=0, help="a hint if it is not right; again: one more")
    judged.add_argument("--seed", type=int, help="of sizes and numbers (default: new ones each time)")
    check_folder.add_arguments(
        commands.add_parser(
            "check-model",
            help="check a model of transformers on the kernels, layer by layer; exit code 1 if it is wrong",
        )
    )
    training.add_arguments(commands.add_parser("train", help="train a small GPT with a sparse backward pass"))
    profiling.add_arguments(commands.add_parser("profile", help="record some training steps of a model"))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    top = parser()
    given = top.parse_args(arguments)
    names, extra = NEEDS.get(given.command, ((), ""))
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{given.command}: {', '.join(missing)} must be installed: pip install 'kernelbook[{extra}]'",
            file=sys.stderr,
        )
        return 2
    try:
        return _command(given)
    except KeyboardInterrupt:
        print(f"\n{given.command}: interrupted", file=sys.stderr)
        return 130


def _command(given: argparse.Namespace) -> int:
    if given.command == "doctor":
        return doctor()
    if given.command == "train":
        return training.train(given)
    if given.command == "judge":
        return judge(given.file, given.task, given.hint, given.seed)
    if given.command == "check-model":
        return check_folder.check_folder(given)
    return profiling.profile(given)
