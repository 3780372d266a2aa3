"""Cells that run on several ranks: ``%load_ext kernelbook.distributed.notebook``, then ``%%ranks`` above a cell.

The first such cell starts the ranks by torchrun, one for each GPU; where there are fewer than two, two on the CPU, over gloo,
with Triton's interpreter. They stay until the notebook ends, and keep their variables from cell to cell.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["Ranks", "load_ipython_extension"]

POLL_S = 0.02


class Ranks:
    """Processes of one group that execute what they are given, all of them the same.

    Args:
        count: how many; by default one for each GPU, or two without GPUs.

    Attributes:
        count: how many there are. backend: ``"nccl"`` or ``"gloo"``.
    """

    def __init__(self, count: int | None = None) -> None:
        import torch

        from kernelbook import runtime

        gpus = torch.cuda.device_count() if runtime.DEVICE.type == "cuda" else 0
        self.count = count or (gpus if gpus > 1 else 2)
        self.backend = "nccl" if gpus >= self.count else "gloo"
        self._folder = tempfile.TemporaryDirectory()
        self._cells = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
        if self.backend == "gloo":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.count)]
        with open(Path(self._folder.name) / "torchrun.log", "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command, __file__, self._folder.name], env=environment, stdout=log, stderr=log
            )
        atexit.register(self.close)

    def run(self, code: str, timeout_s: float = 300.0) -> list[str]:
        """Execute ``code`` on every rank; return what each has printed.

        Raises:
            RuntimeError: a rank raised an error, or has ended.
            TimeoutError: not all ranks are through in time.
        """
        folder, number = Path(self._folder.name), self._cells
        self._cells += 1
        _write(folder / f"cell{number}.py", code)
        done = [folder / f"cell{number}.rank{rank}" for rank in range(self.count)]
        end = time.monotonic() + timeout_s
        while not all(path.exists() for path in done):
            failed = [path.read_text() for path in done if path.exists() and path.read_text().startswith("!")]
            if failed or self._process.poll() is not None:
                log = (folder / "torchrun.log").read_text()
                self.close()
                raise RuntimeError(f"Ranks.run: a rank has failed:\n{failed[0][1:] if failed else log[-3000:]}")
            if time.monotonic() > end:
                self.close()
                raise TimeoutError(f"Ranks.run: the ranks must be through in {timeout_s:g} s, and are not")
            time.sleep(POLL_S)
        texts = [path.read_text() for path in done]
        for text in texts:
            if text.startswith("!"):
                self.close()
                raise RuntimeError(f"Ranks.run: a rank has failed:\n{text[1:]}")
        return [text[1:] for text in texts]

    def close(self) -> None:
        """End the processes."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _write(path: Path, text: str) -> None:
    """The file is there when it is whole."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)


_ranks: Ranks | None = None


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic ``%%ranks``, which prints what rank 0 prints; ``%%ranks all`` what every one does."""

    def ranks(line: str, cell: str) -> None:
        global _ranks
        if _ranks is None:
            _ranks = Ranks()
        try:
            texts = _ranks.run(cell)
        except (RuntimeError, TimeoutError):
            _ranks = None  # the next cell starts anew
            raise
        for rank, text in enumerate(texts if line.strip() == "all" else texts[:1]):
            if text:
                print(f"rank {rank}: {text}" if line.strip() == "all" else text, end="")

    shell.register_magic_function(ranks, "cell")


def _serve(folder: Path) -> None:
    """A rank: executes cell by cell."""
    import contextlib
    import io

    import torch
    import torch.distributed as dist

    from kernelbook.train import parallel

    torch.set_num_threads(1)
    parallel.start()
    rank, names, number = dist.get_rank(), {"__name__": "__main__"}, 0
    parent = os.getppid()
    while os.getppid() == parent:  # the notebook may have ended without a word
        path = folder / f"cell{number}.py"
        if not path.exists():
            time.sleep(POLL_S)
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(path.read_text(), f"<cell {number}>", "exec"), names)  # noqa: S102  the reader's own cell
            _write(folder / f"cell{number}.rank{rank}", " " + printed.getvalue())
        except Exception:
            _write(folder / f"cell{number}.rank{rank}", f"!rank {rank}: {traceback.format_exc()}")
        number += 1


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
