"""Training that is killed: it goes on with the same bits, and never leaves half a checkpoint. ``python -m pytest -m soak``

The run is killed (SIGKILL) in each phase of writing a checkpoint, and its disk is full; then it is resumed until it is done.
Each time the checkpoint has to load; at the end the weights are those of a run that nobody killed, bit for bit.
"""

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelbook import runtime

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not runtime.INTERPRET, reason="the host's part, which a GPU does not change"),
]

PHASES = ("opened", "half written", "before fsync", "before replace", "after replace")
SETTINGS = ["--config", "tiny", "--corpus", __file__, "--quiet", "--checkpoint-every", "2", "--mode", "sparse_dw"]
STEPS = 12


def _child(out: str, phase: str, limit: str) -> int:
    """One run in a process of its own, which kills itself in ``phase`` of writing the second checkpoint from now."""
    from kernelbook.lab import cli

    if int(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    seen = {"files": 0, "bytes": 0}

    def die_in(this: str) -> None:
        if seen["files"] == 2 and phase == this:
            os.kill(os.getpid(), signal.SIGKILL)

    real_open, real_fsync, real_replace = Path.open, os.fsync, os.replace

    class Checkpoint(io.FileIO):
        def write(self, data: Any) -> int:
            seen["bytes"] += len(data)
            if seen["files"] == 2 and seen["bytes"] > 20000 and phase == "half written":
                super().write(bytes(data)[: len(data) // 2])
                die_in("half written")
            return super().write(data)

    def opened(path: Path, mode: str = "r", **how: Any) -> Any:
        if path.name != "checkpoint.pt.tmp":
            return real_open(path, mode, **how)
        seen["files"] += 1
        file = Checkpoint(path, "w")
        die_in("opened")
        return file

    def fsync(number: int) -> None:
        die_in("before fsync")
        real_fsync(number)

    def replace(source: Any, target: Any) -> None:
        ours = str(target).endswith("checkpoint.pt")
        if ours:
            die_in("before replace")
        real_replace(source, target)
        if ours:
            die_in("after replace")

    Path.open, os.fsync, os.replace = opened, fsync, replace  # type: ignore[assignment, method-assign]
    return cli.main(["train", *SETTINGS, "--out", out, "--steps", str(STEPS), "--resume"])


def _start(out: Path, phase: str = "", limit: int = 0) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, __file__, str(out), phase, str(limit)], stderr=subprocess.DEVNULL)


def _bits(out: Path) -> dict[str, Any]:
    """The model in the checkpoint, bit for bit; raises if that is not whole."""
    model = torch.load(out / "checkpoint.pt", weights_only=False)["model"]
    return {name: t.contiguous().flatten().view(torch.uint8).tolist() for name, t in model.items()}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("truth")
    assert _start(out).wait() == 0
    return out


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_is_killed_while_it_writes_goes_on(phase: str, truth: Path, tmp_path: Path) -> None:
    assert _start(tmp_path, phase).wait() == -signal.SIGKILL
    _bits(tmp_path)
    assert _start(tmp_path).wait() == 0 and _bits(tmp_path) == _bits(truth)


def test_a_full_disk_keeps_the_checkpoint_before(truth: Path, tmp_path: Path) -> None:
    assert _start(tmp_path, "after replace").wait() == -signal.SIGKILL
    before = (tmp_path / "checkpoint.pt").read_bytes()
    assert _start(tmp_path, limit=len(before) // 2).wait() not in (0, -signal.SIGKILL)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert _start(tmp_path).wait() == 0 and _bits(tmp_path) == _bits(truth)


if __name__ == "__main__":
    sys.exit(_child(*sys.argv[1:]))
