"""What the programs in this folder share: their command line, the GPUs and processes that they use, what kernels are launched."""

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import pandas as pd

DECIDED = ("killed", "timed out", "stillborn")  # verdicts on a planted fault after which nobody tries it again
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kernelbook"
EVIDENCE = ROOT / "book" / "evidence"


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the program's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def keep(path: Path | None, told: Any) -> None:
    """Writes what was found so far, if there is a path; who reads it meanwhile finds all of it or what was there before."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(".part")
        partly.write_text(json.dumps(told, indent=1) + "\n")
        partly.replace(path)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none where there is no such file yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def keep_table(path: Path, table: "pd.DataFrame") -> None:
    """As :func:`keep`, for a table."""
    table.to_csv(path.with_suffix(".part"), index=False, lineterminator="\n")
    path.with_suffix(".part").replace(path)


def output_of(command: list[str]) -> "subprocess.Popen[str]":
    """Starts a program of one thread, whose output can be read together with what it says of errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def sanitizer() -> str:
    """The path of compute-sanitizer."""
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(path).exists():
        raise SystemExit("compute-sanitizer must be in PATH, it comes with CUDA's toolkit")
    return path


def gpus() -> list[str]:
    """Those that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def forked(count: int, work: Callable[[int], None]) -> list[multiprocessing.Process]:
    """Starts ``work(k)`` in so many processes, which have the GPUs by turns. Nothing may have used CUDA yet."""
    visible = gpus()

    def begin(k: int) -> None:
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[k % len(visible)]
        work(k)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=begin, args=(k,)) for k in range(count)]
    for process in processes:
        process.start()
    return processes


@contextlib.contextmanager
def watching_launches(note: Callable[[str, Any], None]) -> Iterator[None]:
    """Tells ``note`` the name of each kernel that is launched, and the package's launcher if that does it."""
    from triton.runtime.jit import KernelInterface

    from kernelbook.launch import Launch

    getitem, launch = KernelInterface.__getitem__, Launch.__call__

    def named(kernel: Any) -> str:
        return str(getattr(kernel, "__name__", None) or kernel.fn.__name__)

    def watched_getitem(kernel: Any, grid: Any) -> Any:
        note(named(kernel), None)
        return getitem(kernel, grid)

    def watched_launch(self: Any, grid: Any, *args: Any) -> None:
        note(named(self.kernel), self)
        launch(self, grid, *args)

    with (
        mock.patch.object(KernelInterface, "__getitem__", watched_getitem),
        mock.patch.object(Launch, "__call__", watched_launch),
    ):
        yield
