"""compute-sanitizer over every kernel, at small sizes: the calls of ``calls.py``, a process for each room and tool.

    python tools/evidence/sanitize.py --processes 8 --seconds 600 --out sanitizers.json

memcheck (addresses), racecheck (shared memory between threads), synccheck (barriers), initcheck (global memory that nobody
wrote). Only our kernels are watched, and PyTorch gives each tensor memory of its own, so that its neighbours are not part of it.
"""

import ast
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import PACKAGE, command_line, gpus, keep, sanitizer
from faults import is_kernel

ROOMS = (
    "attention",
    "moe_lora",
    "scatter_ffn",
    "sparse_linear",
    "layer_norm",
    "nf4",
    "modules",
    "control",
)  # the slow ones first
PARTS = {"attention": 4, "moe_lora": 3, "modules": 2}  # processes that share a room's calls; of others there is one
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")


def kernels() -> list[str]:
    """The names of the package's kernels, without what benches alone launch."""
    found = {
        node.name  # type: ignore[attr-defined]
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if is_kernel(node) and node.name.endswith("_kernel")  # type: ignore[attr-defined]
    }
    return sorted(found - {"_read_rows_kernel"})


def parts(text: str) -> tuple[list[tuple[str, str]], bool]:
    """-> the numbers and names of the calls that were begun, and whether the sanitizer itself ended the process."""
    died = "Internal Sanitizer Error" in text or "process didn't terminate successfully" in text
    return re.findall(r"^call (\d+): (.*)", text, re.M), died


def summary(tool: str, logs: list[str], ended: bool, failed: bool) -> dict[str, Any]:
    """What the tool said, by kernel. A call in which the tool itself died is named, and those after it had a new process."""
    found = [m.group(1) for log in logs for m in [re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", log)] if m]
    text = "\n".join(logs)
    # What is said of PyTorch's kernels is not ours. A report is a line, and the next says where.
    found_at = re.findall(r"========= (?!COMPUTE|ERROR|RACECHECK|Internal|\s)(.*)\n=========\s+(?:at )?(.*)", text)
    reports = [f"{what} {where}" for what, where in found_at if re.search(r"\b_\w+_kernel\b", f"{what} {where}")]
    names = [re.search(r"\b_\w+_kernel\b", report).group() for report in reports]  # type: ignore[union-attr]
    died = [begun[-1][1] for begun, died in map(parts, logs) if died and begun]
    begun = sum(len(parts(log)[0]) for log in logs)
    clean = (
        bool(found)
        and ended
        and not failed
        and not died
        and (all(f.startswith("0 ") for f in found) or (tool == "initcheck" and not reports))
    )
    return {
        "tool": tool,
        "summary": ("; ".join(found) or "no summary")
        + ("" if ended else ", ran out of time")
        + ", a call failed" * failed,
        "clean": clean,
        "calls": begun,
        "tool died in": died,
        "launched": sorted(
            {name for log in logs for line in re.findall(r"^launched: (.*)", log, re.M) for name in line.split()}
        ),
        "kernels": Counter(names).most_common(),
        "reports": Counter(re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d{4,}", "#", r)[:200] for r in reports).most_common(6),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    program = sanitizer()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()
    began, told = time.monotonic(), dict[str, dict[str, Any]]()
    only = [text for name in kernels() for text in ("--kernel-name", f"kne={name}")]
    probe = subprocess.run([program, *only, "/bin/true"], capture_output=True, text=True, check=False)
    if re.search(r"more than once|unrecogni[sz]ed|invalid", probe.stdout + probe.stderr):
        print(f"all kernels are watched: {(probe.stdout + probe.stderr)[:200]}", flush=True)
        only = []
    waiting = [
        (room, tool, part, 0)
        for room in ROOMS
        for tool in TOOLS
        for part in range(PARTS.get(room, 1))
        if room != "control" or tool in ("racecheck", "memcheck")
    ]
    visible, started = gpus(), 0
    running: dict[tuple[str, str, int, int], tuple[subprocess.Popen[bytes], float]] = {}
    late: set[str] = set()
    failed: set[str] = set()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    folder = args.out.with_suffix(".logs")
    folder.mkdir(parents=True, exist_ok=True)
    log_of = lambda room, tool, part, first: folder / f"{room}_{tool}_{part}_{first:02}.log"  # noqa: E731
    while waiting or running:
        over = time.monotonic() - began > args.seconds
        while waiting and len(running) < args.processes and not over:
            room, tool, part, first = key = waiting.pop(0)
            # initcheck has to see who writes memory, so it watches PyTorch's kernels too.
            watch = [program, "--tool", tool, "--print-limit", "2000", "--show-backtrace", "no"]
            watch += only if tool != "initcheck" else []
            command = [*watch, sys.executable, str(Path(__file__).with_name("calls.py")), room, "--first", str(first)]
            command += ["--share", f"{part}/{PARTS.get(room, 1)}"]
            if tool == "racecheck" and room != "control":
                command.append("--products-elsewhere")
            environment["CUDA_VISIBLE_DEVICES"] = visible[started % len(visible)]
            started += 1
            with log_of(*key).open("w") as file:
                process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
            running[key] = process, time.monotonic()
        for key, (process, since) in list(running.items()):
            ended = process.poll() is not None
            if ended or over:
                room, tool, part, _ = key
                if not ended:
                    os.killpg(process.pid, 9)
                    process.wait()
                    late.add(f"{room} {tool}")
                begun, died = parts(log_of(*key).read_text(errors="replace"))
                if died and begun and not over:
                    waiting.insert(0, (room, tool, part, int(begun[-1][0]) + 1))
                elif ended and process.returncode and not died:
                    failed.add(f"{room} {tool}")
                logs = [p.read_text(errors="replace") for p in sorted(folder.glob(f"{room}_{tool}_*.log"))]
                seconds = told.get(f"{room} {tool}", {}).get("seconds", 0) + round(time.monotonic() - since)
                del running[key]
                unfinished = {f"{room} {tool}" for room, tool, *_ in [*waiting, *running]} | late
                whole = f"{room} {tool}" not in unfinished
                found = summary(tool, logs, whole, f"{room} {tool}" in failed)
                told[f"{room} {tool}"] = {**found, "seconds": seconds}
                print(key, told[f"{room} {tool}"], flush=True)
        if over:
            nothing = {"summary": "not run: no time", "clean": False, "kernels": [], "reports": [], "seconds": 0}
            told = {f"{room} {tool}": {"tool": tool, **nothing} for room, tool, *_ in waiting} | told
            waiting = []
        time.sleep(0.1)
        known = version[version.index("Version") + 1] if "Version" in version else ""
        keep(args.out, {"version": known, "kernels": kernels(), "runs": told})


if __name__ == "__main__":
    main()
