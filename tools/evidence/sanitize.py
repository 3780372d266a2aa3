"""compute-sanitizer over every kernel, at small sizes: the calls of ``calls.py``, a process for each room and tool.

    python tools/evidence/sanitize.py --processes 8 --seconds 600 --out sanitizers.json

memcheck (addresses), racecheck (shared memory between threads), synccheck (barriers), initcheck (global memory that nobody
wrote). Only our kernels are watched, and PyTorch gives each tensor memory of its own, so that its neighbours are not part of it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOMS = ("attention", "moe_lora", "scatter_ffn", "sparse_linear", "layer_norm", "nf4")  # the slow ones first
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")


def summary(tool: str, text: str, ended: bool) -> dict[str, Any]:
    """What the tool said, by kernel."""
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
    reports = re.findall(r"========= (?!COMPUTE|ERROR|RACECHECK|Host|Target|Saved|\s)(.*)", text)
    at = re.findall(r"=========\s+at (\w+)", text)
    return {
        "tool": tool,
        "summary": found.group(1) if found else ("no summary" if ended else "ran out of time"),
        "clean": bool(found) and found.group(1).startswith("0 "),
        "kernels": Counter(at).most_common(),
        "reports": Counter(re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d{4,}", "#", r)[:160] for r in reports).most_common(6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        raise SystemExit("sanitize: compute-sanitizer must be in PATH, it comes with CUDA's toolkit")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout.split()
    began, told = time.monotonic(), {}
    waiting = [(room, tool) for tool in args.tools for room in args.rooms]
    running: dict[tuple[str, str], tuple[subprocess.Popen[bytes], Path, float]] = {}
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    logs = args.out.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        over = time.monotonic() - began > args.seconds
        while waiting and len(running) < args.processes and not over:
            room, tool = waiting.pop(0)
            log = logs / f"{room}_{tool}.log"
            command = [
                sanitizer,
                "--tool",
                tool,
                "--kernel-regex",
                "kns=_kernel",
                "--print-limit",
                "40",
                sys.executable,
                str(HERE / "calls.py"),
                room,
            ]
            with log.open("w") as file:
                running[room, tool] = (
                    subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True),
                    log,
                    time.monotonic(),
                )
        for key, (process, log, since) in list(running.items()):
            ended = process.poll() is not None
            if ended or over:
                if not ended:
                    os.killpg(process.pid, 9)
                    process.wait()
                text = log.read_text(errors="replace")
                told[f"{key[0]} {key[1]}"] = {
                    **summary(key[1], text, ended),
                    "seconds": round(time.monotonic() - since),
                }
                del running[key]
                print(key, told[f"{key[0]} {key[1]}"], flush=True)
        if over:
            for room, tool in waiting:
                told[f"{room} {tool}"] = {
                    "tool": tool,
                    "summary": "not run: no time",
                    "clean": False,
                    "kernels": [],
                    "reports": [],
                    "seconds": 0,
                }
            waiting = []
        time.sleep(0.1)
        args.out.write_text(
            json.dumps(
                {"version": version[version.index("Version") + 1] if "Version" in version else "", "runs": told},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
