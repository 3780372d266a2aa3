"""What the programs in this folder share: their command line, the GPUs and processes that they use, what kernels are launched."""

import argparse
import contextlib
import csv
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
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


def together(campaigns: list[dict[str, Any]]) -> dict[str, Any]:
    """What several campaigns of fuzz saw of one function."""
    worst = max(campaigns, key=lambda campaign: campaign["worst"])
    return {
        "examples": sum(campaign["examples"] for campaign in campaigns),
        "worst": worst["worst"],
        "where": worst["where"],
        "element": max(campaign["element"] for campaign in campaigns),
        "drawn_again": sum(campaign.get("drawn_again", 0) for campaign in campaigns),
        "failures": [failure for campaign in campaigns for failure in campaign["failures"]],
    }


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


Tell = Callable[[Any], None]
Done = Callable[[Any, float], None]


@dataclasses.dataclass
class Running:
    """A process at work."""

    process: multiprocessing.Process
    slot: int
    done: Done
    limit: float
    began: float = dataclasses.field(default_factory=time.monotonic)
    stopped: bool = False


class Workers:
    """At most ``count`` processes at a time, forked from this one. Each has a slot: a log, and a file with what it told."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.free = folder, list(range(count))
        self.running: list[Running] = []

    def start(self, work: Callable[[int, Tell], object], done: Done, limit: float) -> None:
        """Has a process do ``work(slot, tell)``. ``done`` gets what it told last, None if it was stopped, and its seconds."""
        while not self.free:
            self.wait()
        slot = self.free.pop()
        (self.folder / f"{slot}.json").unlink(missing_ok=True)
        process = multiprocessing.get_context("fork").Process(target=self._child, args=(work, slot))
        process.start()
        self.running.append(Running(process, slot, done, limit))

    def _child(self, work: Callable[[int, Tell], object], slot: int) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        log = os.open(self.folder / f"{slot}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(slot, lambda told: keep(self.folder / f"{slot}.json", told))
        os._exit(0)  # whatever threads the tests have left

    def wait(self) -> None:
        """Until a process has ended."""
        while True:
            for one in self.running:
                seconds, process, ended = time.monotonic() - one.began, one.process, not one.process.is_alive()
                if ended or (seconds > one.limit and not one.stopped):
                    one.stopped |= not ended  # it may take a while to end: a GPU has to get rid of its kernel
                    process.kill()
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid or 0, signal.SIGKILL)  # and what it started
                if ended:
                    self.running.remove(one)
                    self.free.append(one.slot)
                    path = self.folder / f"{one.slot}.json"
                    told = json.loads(path.read_text()) if path.exists() else {"died": True}
                    one.done(None if one.stopped else told, seconds)
                    return
            time.sleep(0.01)

    def wait_for_all(self) -> None:
        while self.running:
            self.wait()


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
