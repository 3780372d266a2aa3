"""Training that is killed again and again, on a CPU: it goes on with the same bits, and never leaves half a checkpoint.

    python tools/evidence/soak.py --seconds 3600 --out book/evidence/soak.json

A short run without interruption is the truth. Then the same run is killed (SIGKILL) in each phase of writing a checkpoint,
on a disk that is full (no file may grow beyond a limit), and at random moments, and resumed until it is done. Each time the
checkpoint has to load; at the end weights have to be the truth's, bit for bit. Resident memory is compared between runs of
different lengths.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import command_line, keep, output_of

PHASES = ("opened", "half written", "before fsync", "before replace", "after replace")
SETTINGS = ["--config", "tiny", "--task", "copy", "--quiet", "--checkpoint-every", "2", "--mode", "sparse_dw"]


def _child(out: str, steps: str, phase: str, limit: str) -> None:
    """One run in a process of its own, which kills itself in ``phase`` of writing the second checkpoint from now."""
    from kernelbook.lab import cli
    from kernelbook.train import files

    if int(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    seen = {"files": 0, "bytes": 0}

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    real_open, real_fsync, real_replace = files.tempfile.NamedTemporaryFile, os.fsync, os.replace

    def opened(*args: Any, **kwargs: Any) -> Any:
        file = real_open(*args, **kwargs)
        if str(kwargs.get("prefix", "")).startswith("checkpoint"):
            seen["files"] += 1
            if seen["files"] == 2 and phase == "opened":
                die()
            if seen["files"] == 2 and phase == "half written":
                write = file.file.write

                def partly(data: Any) -> int:
                    seen["bytes"] += len(data)
                    if seen["bytes"] > 20000:
                        write(bytes(data)[: len(data) // 2])
                        file.file.flush()
                        die()
                    return int(write(data))

                file.write = partly
        return file

    def fsync(number: int) -> None:
        if seen["files"] == 2 and phase == "before fsync":
            die()
        real_fsync(number)

    def replace(source: Any, target: Any) -> None:
        ours = seen["files"] == 2 and str(target).endswith("checkpoint.pt")
        if ours and phase == "before replace":
            die()
        real_replace(source, target)
        if ours and phase == "after replace":
            die()

    files.tempfile.NamedTemporaryFile, os.fsync, os.replace = opened, fsync, replace  # type: ignore[assignment, misc]
    code = cli.main(["train", *SETTINGS, "--out", out, "--steps", steps, "--resume"])
    print("maxrss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sys.exit(code)


def _start(out: Path, steps: int, phase: str = "", limit: int = 0) -> "subprocess.Popen[str]":
    return output_of([sys.executable, __file__, "--child", str(out), str(steps), phase, str(limit)])


def _ran(*how: Any, **more: Any) -> tuple[int, str]:
    """One run to its end: its code, and what it printed."""
    process = _start(*how, **more)
    text = process.communicate()[0]
    return process.returncode, text


def _bits(out: Path) -> dict[str, tuple[Any, ...]]:
    """The model in the checkpoint, bit for bit; raises if that is not whole."""
    import torch

    model = torch.load(out / "checkpoint.pt", weights_only=False)["model"]
    return {
        name: (t.dtype, t.shape, bytes(t.contiguous().flatten().view(torch.uint8).numpy())) for name, t in model.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:6])
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, rng = time.monotonic(), random.Random(args.seed)
    told: dict[str, Any] = {"phases": {}, "kills": 0, "resumes": 0, "runs": 0, "different": 0, "half_checkpoints": 0}

    with tempfile.TemporaryDirectory() as folder:
        top, memory = Path(folder), {}
        for name, steps in (("short", args.steps // 4), ("truth", args.steps)):
            code, text = _ran(top / name, steps)
            assert code == 0, text
            memory[name] = int(text.split("maxrss")[1])
        truth = _bits(top / "truth")
        told["memory"] = {"steps": [args.steps // 4, args.steps], "kib": [memory["short"], memory["truth"]]}
        size = (top / "truth" / "checkpoint.pt").stat().st_size

        def check(out: Path) -> None:
            if (out / "checkpoint.pt").exists():
                try:
                    _bits(out)
                except Exception:
                    told["half_checkpoints"] += 1

        def finish(out: Path) -> None:
            code, text = _ran(out, args.steps)
            assert code == 0, text
            told["resumes"] += 1
            told["runs"] += 1
            told["different"] += _bits(out) != truth

        for phase in PHASES:
            out = top / phase.replace(" ", "_")
            code, text = _ran(out, args.steps, phase)
            assert code == -signal.SIGKILL, text
            told["kills"] += 1
            check(out)
            finish(out)
            told["phases"][phase] = (
                "whole, went on with the same bits" if not told["half_checkpoints"] + told["different"] else "NOT whole"
            )
        out = top / "full"
        code, text = _ran(out, args.steps // 4)
        before = (out / "checkpoint.pt").read_bytes()
        code, text = _ran(out, args.steps, limit=size // 2)
        told["phases"]["full disk"] = (
            "an error, and the checkpoint before is there"
            if code not in (0, -9) and (out / "checkpoint.pt").read_bytes() == before
            else "NOT kept"
        )
        finish(out)
        while time.monotonic() - began < args.seconds:
            out = top / f"random_{told['runs']}"
            for _ in range(rng.randint(1, 4)):
                process = _start(out, args.steps)
                try:
                    process.wait(rng.uniform(0.5, 12))
                except subprocess.TimeoutExpired:
                    process.kill()
                    told["kills"] += 1
                process.communicate()
                check(out)
            finish(out)
    told["seconds"] = round(time.monotonic() - began)
    print(json.dumps(told, indent=1))
    keep(args.out, told)
    kept = all("NOT" not in text for text in told["phases"].values())
    sys.exit(not kept or told["different"] > 0 or told["half_checkpoints"] > 0)


if __name__ == "__main__":
    main()
