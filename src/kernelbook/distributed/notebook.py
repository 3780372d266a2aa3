"""Cells that run on several ranks: ``%load_ext kernelbook.distributed.notebook``, then ``%%ranks`` above a cell.

The first such cell starts the ranks by torchrun, one for each GPU; where there are fewer than two, two on the CPU, over gloo,
with Triton's interpreter. They stay until the notebook ends, and keep their variables from cell to cell.
"""

import atexit
import contextlib
import datetime
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

POLL_S = 0.02


class Ranks:
    """Processes of one group that execute what they are given, all of them the same; a ``TCPStore`` hands it to them.

    Attributes:
        count: how many there are. backend: ``"nccl"`` or ``"gloo"``.
    """

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from kernelbook import runtime

        gpus = torch.cuda.device_count() if runtime.DEVICE.type == "cuda" else 0
        self.count, self.backend = (gpus, "nccl") if gpus > 1 else (2, "gloo")
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._cells = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
        if self.backend == "gloo":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.count)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the processes
        self._process = subprocess.Popen(
            [sys.executable, *command, __file__, str(self._store.port)],
            env=environment,
            stdout=self._log,
            stderr=self._log,
        )
        atexit.register(self._process.terminate)

    def run(self, code: str) -> list[str]:
        """Execute ``code`` on every rank; return what each has printed.

        Raises:
            RuntimeError: a rank raised an error, or has ended.
        """
        cell, self._cells = self._cells, self._cells + 1
        self._store.set(f"cell {cell}", code)
        texts: dict[int, str] = {}
        try:
            while len(texts) < self.count:
                for rank in range(self.count):
                    if rank not in texts and self._store.check([f"{cell} {rank}"]):
                        texts[rank], error = json.loads(self._store.get(f"{cell} {rank}"))
                        if error:
                            raise RuntimeError(f"Ranks.run: rank {rank} has failed:\n{error}")
                if self._process.poll() is not None:
                    self._log.seek(0)
                    raise RuntimeError(f"Ranks.run: a rank has ended:\n{self._log.read()[-3000:]}")
                time.sleep(POLL_S)
        except BaseException:
            self._process.terminate()
            raise
        return [texts[rank] for rank in range(self.count)]


_ranks: Ranks | None = None


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic ``%%ranks``, which prints what rank 0 prints; ``%%ranks all`` what every one does."""

    def ranks(line: str, cell: str) -> None:
        global _ranks
        started, _ranks = _ranks or Ranks(), None  # after an error the next cell starts anew
        texts = started.run(cell)
        _ranks = started
        for rank, text in enumerate(texts if line.strip() == "all" else texts[:1]):
            if text:
                print(f"rank {rank}: {text}" if line.strip() == "all" else text, end="")

    shell.register_magic_function(ranks, "cell")


def _serve(port: int) -> None:
    """A rank: executes cell by cell; it ends with the notebook, whose store is gone then."""
    import torch
    import torch.distributed as dist

    from kernelbook.train import parallel

    torch.set_num_threads(1)
    parallel.start()
    store: Any = dist.TCPStore("127.0.0.1", port)  # type: ignore[attr-defined]
    names, cell = {"__name__": "__main__"}, 0
    while True:
        store.wait([f"cell {cell}"], datetime.timedelta(days=100))
        code, printed, error = store.get(f"cell {cell}").decode(), io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"<cell {cell}>", "exec"), names)  # noqa: S102  the reader's own cell
        except Exception:
            error = traceback.format_exc()
        store.set(f"{cell} {dist.get_rank()}", json.dumps([printed.getvalue(), error]))
        cell += 1


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
