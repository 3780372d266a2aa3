"""Gathers the evidence for the page "Evidence": ``book/evidence/<gpu>.json`` and ``mutants.csv`` beside it.

    python tools/evidence/record.py --seconds 3600     all of it, on the GPU at hand; without a GPU, what the CPU can tell
    python tools/evidence/record.py --seconds 110 --out folder
    python tools/evidence/record.py --parts a b --out folder         of what earlier runs on the same GPU left in their folders

Fuzz, repeats under load, sanitizers and faults run beside each other, each until its time is over, and leave what they saw
in files of their own. What was not reached is written as not reached.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASIS = ("gpu", "torch", "triton", "package", "date", "sources")
NICE = {"fuzz": 10, "mutants": 5}  # what takes longest, however long, lets the others go first

import kernelbook  # noqa: E402

# isort: split
import torch  # noqa: E402
import triton  # noqa: E402
from common import EVIDENCE, PACKAGE, ROOT, command_line, keep, together  # noqa: E402
from faults import ROOMS  # noqa: E402

from kernelbook import runtime  # noqa: E402
from kernelbook.lab import record  # noqa: E402


def reached(run: dict[str, Any]) -> tuple[bool, int]:
    """How far a sanitizer's run came: to its end, or through so many calls."""
    return "time" not in run["summary"], run.get("calls", 0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--examples", type=int, default=20000 if runtime.DEVICE.type == "cuda" else 2000)
    parser.add_argument(
        "--only", nargs="*", default=[], help="of fuzz, warm, repeats, largest, sanitizers, handshake, mutants, soak"
    )
    parser.add_argument(
        "--parts", type=Path, nargs="*", default=[], help="folders with such files; then nothing is run"
    )
    parser.add_argument("--note", default="", help="what a reader of the record has to know")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    args = parser.parse_args()
    on_gpu, began, n = runtime.DEVICE.type == "cuda", time.monotonic(), args.processes
    args.out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if not on_gpu:
        environment["TRITON_INTERPRET"] = "1"
    told: dict[str, Any] = {
        "gpu": runtime.properties().name if on_gpu else "none: the interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "package": kernelbook.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "sources": {room: record.source_digest(PACKAGE / room) for room in ROOMS},
    }
    seconds, share = args.seconds - 12, max(1, n // 4)
    slug = record.device_slug() if on_gpu else "cpu"
    with tempfile.TemporaryDirectory(dir=args.out, prefix="parts_") as folder:
        parts, jobs = Path(folder), {}
        if not args.parts:
            (parts / f"{slug}.json").write_text(json.dumps(told))  # with it a run that was stopped is known by --parts
        told["late"] = []

        def start(name: str, script: str, *arguments: Any) -> None:
            if args.parts or (args.only and name.split("_")[0] not in args.only):
                return
            nice = ["nice", "-n", str(NICE.get(name, 0))]
            command = [*nice, sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
            how = {"env": environment, "cwd": ROOT, "start_new_session": True}
            with (args.out / f"{name}.log").open("w") as log:
                jobs[name] = subprocess.Popen(command, stdout=log, stderr=log, **how)

        results = ["--results", args.out / "mutants.csv"]
        fuzz = ["--examples", args.examples, "--seed", args.seed, "--out", parts / "fuzz.json"]
        if on_gpu:
            start("fuzz", "fuzz.py", *fuzz, "--processes", max(2, 5 * n // 8), "--seconds", seconds)
            # Compiled before anything watches or repeats it: under a sanitizer that would take most of the time.
            start("warm", "calls.py", "--processes", n)
            if "warm" in jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    jobs["warm"].wait(args.seconds / 4)
            start("largest", "calls.py", "--largest", "--out", parts / "largest.json")
            limits = ["--processes", 4 * share, "--seconds", args.seconds - 20 - (time.monotonic() - began)]
            start("sanitizers", "sanitize.py", *limits, "--out", parts / "sanitizers.json")
            limits = ["--repeat", 250, "--seconds", max(2.0, seconds / 10), "--processes", share]
            start("repeats", "calls.py", *limits, "--out", parts / "repeats.json")
            start("handshake", "handshake.py", "--out", parts / "handshake.json")
            # What the interpreter cannot run or tell.
            what = ["--rooms", "attention", "packed", "scatter_ffn", "--where", "gpu"]
            what += ["--files", "test_evidence_gpu.py"]
            limits = ["--processes", 5 * n // 4, "--seconds", seconds - 60, "--tests-seconds", 45, "--longest", 100]
            start("mutants", "mutants.py", *what, *results, *limits)
        else:
            start("fuzz", "fuzz.py", *fuzz, "--processes", max(1, n // 3), "--seconds", seconds)
            start("soak", "soak.py", "--seconds", seconds / 2, "--steps", 8, "--out", parts / "soak.json")
            limits = ["--processes", max(1, n - n // 3 - 1), "--seconds", seconds - 20]
            start("mutants", "mutants.py", "--where", "interpreter", *limits, *results)
        for name, job in jobs.items():
            try:
                job.wait(max(1.0, args.seconds - 4 - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:  # noqa: PERF203
                os.killpg(job.pid, signal.SIGKILL)
                told["late"].append(name)
        sources: dict[str, dict[str, str]] = {}
        told |= {"fuzz": {}, "sanitizers": {}, "soak": {}, "largest": {}, "handshake": {}, "repeats": {}}
        found_in = []
        for path in sorted(path for parts_ in args.parts or [parts] for path in parts_.glob("*.json")):
            with contextlib.suppress(json.JSONDecodeError):  # who wrote it was stopped
                found = json.loads(path.read_text())
                if "gpu" not in found:
                    found_in.append((path.stem.split("_")[0], found))
                    continue
                # The record of a run, which says on what it was; with all that its parts told, if nothing stopped it.
                if found["sources"] != sources.setdefault("of parts", found["sources"]):
                    raise SystemExit(f"record: {path} is of other sources than another part")
                slug = path.stem
                told |= {key: found[key] for key in BASIS}
                found_in += [(name, found[name]) for name in told if found.get(name) and name not in (*BASIS, "late")]
        for name, found in found_in:
            if name == "fuzz":
                for target, campaign in found.items():
                    campaign["failures"] = [re.sub(r'File "[^"]*/', 'File "', f) for f in campaign["failures"]]
                    told["fuzz"][target] = together([*filter(None, [told["fuzz"].get(target)]), campaign])
            elif name == "sanitizers":
                runs = told[name].get("runs", {})
                further = {w: max(run, runs.get(w, run), key=reached) for w, run in found["runs"].items()}
                told[name] = found | {"runs": runs | further}
            elif name == "repeats":
                for call, seen in found.items():
                    known = told[name].get(call, seen)
                    told[name][call] = {"repeats": max(known["repeats"], seen["repeats"])}
                    told[name][call]["different"] = seen["different"] + (known is not seen) * known["different"]
            elif name in told:
                told[name] |= found
    told["note"] = args.note
    told["seconds"] = round(time.monotonic() - began)
    keep(args.out / f"{slug}.json", told)
    print(json.dumps({k: v for k, v in told.items() if k not in ("fuzz", "sanitizers", "repeats", "soak")}), flush=True)


if __name__ == "__main__":
    main()
