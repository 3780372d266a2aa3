"""Compares two versions of the package point by point: what differs between two records, and what the code does of that.

usage: python tools/compare_sources.py code OLD_SRC POINTS ...                          (needs no GPU)
       python tools/compare_sources.py time OLD_SRC POINTS ... --out DIR [--seconds S]      (on a GPU)

POINTS are tables with the columns op, mode, dtype, shape, x_name, x and provider, as in book/results; without a column room they
are of the room that the file is named after. ``code`` compiles what our calls launch at these points, with both versions, and
prints whether a GPU gets the same instructions: where it does, no clock can blame the code. ``time`` gives both versions the
same inputs and times all providers by the present clock (:func:`kernelbook.lab.timing.measure_in_turn`), in rounds, in
processes of which one works while the others wait; a third process has the present version once more, which shows what differs
where the code does not. Each point and provider is a row of DIR/<gpu>/revisions.csv.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch

NEW = Path(__file__).resolve().parent.parent / "src"
CASE = ["op", "mode", "dtype", "shape", "x_name", "x"]
GPU, TARGET = "NVIDIA H200", "sm_90"  # for which ``code`` compiles
TURNS = ("old", "new", "again", "again", "new", "old")  # the present one twice: what differs without a difference
REP_MS = 25.0
# Nothing is interpreted, and a GPU that is there is hidden: its presence would change what is launched.
COMPILE_ONLY = {
    "TRITON_INTERPRET": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
}


def read_points(paths: list[Path]) -> pd.DataFrame:
    """The points of several tables, each with its room."""
    tables = [pd.read_csv(path) for path in paths]
    return pd.concat([t if "room" in t else t.assign(room=path.stem) for path, t in zip(paths, tables, strict=True)])


def named(point: pd.Series) -> dict[str, str]:
    """A case's columns as results have them, with its room."""
    return {name: str(point[name]) for name in ["room", *CASE[:-1]]} | {"x": f"{float(point['x']):.12g}"}


# --- in a process of one version ------------------------------------------------------------------------------------


def _begin(src: Path, environment: dict[str, str]) -> None:
    """Has this process, and those that it starts, import the package from ``src``."""
    os.environ.update(environment, PYTHONPATH=os.pathsep.join([str(src), os.environ.get("PYTHONPATH", "")]))
    sys.path.insert(0, str(src))
    sys.stdout = sys.stderr  # what is printed is the table


def process(src: Path, **environment: str) -> ProcessPoolExecutor:
    """A process with the package of ``src``."""
    fresh = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=fresh, initializer=_begin, initargs=(src, environment))


@functools.cache
def present(module: str) -> Any:
    """A module of the present laboratory, whichever version is on the path: both are measured and compiled alike."""
    name = f"present_{module}"
    spec = importlib.util.spec_from_file_location(name, NEW / "kernelbook" / "lab" / f"{module}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def providers_of(point: dict[str, str]) -> dict[str, Any]:
    """The calls of the case that a point is of, on inputs of one seed; ``LookupError`` where this version has none."""
    try:
        from kernelbook.lab.bench import bench
    except ImportError:  # a version from before there was this list
        from kernelbook.cli import _bench_of as bench

    for case in bench(point["room"]).cases():
        found = (case.op, case.mode, case.dtype_name, case.shape_text, case.x_name, f"{case.x:.12g}")
        if found == tuple(point[name] for name in CASE):
            torch.manual_seed(0)
            return dict(case.build().providers)
    raise LookupError("no such case")


def times(point: dict[str, str]) -> dict[str, float]:
    """The milliseconds of each provider; of none where one fails."""
    try:
        providers = {name: call for name, call in providers_of(point).items() if callable(call)}
        taken = present("timing").measure_in_turn(providers, rep_ms=REP_MS)
        return {name: found.ms for name, found in taken.items()}
    except Exception as error:  # this point has no row; the others do
        print(f"{point}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        torch.cuda.empty_cache()
    return {}


def instructions(points: list[tuple[dict[str, str], str]]) -> list[list[Any] | None]:
    """For each point and provider what is launched: kernels, grids, warps, memory, and a digest of the opcodes' order.

    Operands are left out: parameters lie elsewhere when one is added, and nothing else changes.
    """
    from kernelbook import runtime

    compiled, unfilled = present("compiled"), present("launched").unfilled
    launches: list[tuple[Any, list[int]]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip((parameter.name for parameter in kernel.params), args, strict=False)) | options
        launches.append((compiled._record(kernel, args, options), list(grid(given) if callable(grid) else grid)))

    @functools.cache
    def about(launch: Any) -> list[Any]:
        kernel = compiled._compile(launch, TARGET, ("sass",))
        opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", kernel.asm["sass"])
        digest = hashlib.sha256(" ".join(opcodes).encode()).hexdigest()[:16]
        memory = [kernel.registers, kernel.spill_bytes, kernel.shared_bytes]
        return [kernel.name, kernel.num_warps, *memory, len(opcodes), digest]

    def of(point: dict[str, str], provider: str) -> list[Any] | None:
        try:
            with unfilled():
                call = providers_of(point)[provider]
            launches.clear()  # of what the inputs took
            call()
        except Exception as error:  # of this point nothing is known
            print(f"{point}: {type(error).__name__}: {error}", file=sys.stderr)
            return None
        return [[*about(launch), grid] for launch, grid in launches]

    compiled.JITFunction.run = record
    # Versions before this one look up shipped plans by the name of the GPU.
    runtime.TARGETS[TARGET] = dataclasses.replace(runtime.TARGETS[TARGET], name=GPU)
    with runtime.compiling_for(TARGET):
        return [of(*point) for point in points]


# --- both versions --------------------------------------------------------------------------------------------------


def same_code(points: pd.DataFrame, old: Path) -> pd.DataFrame:
    """Our ``points`` with how many kernels they launch, and whether they are the old ones, instruction by instruction."""
    import triton

    points = points[points["provider"].str.startswith("kernelbook")]
    asked = [(named(point), point["provider"]) for _, point in points.iterrows()]
    with process(old, **COMPILE_ONLY) as theirs, process(NEW, **COMPILE_ONLY) as ours:
        before, after = (found.result() for found in [pool.submit(instructions, asked) for pool in (theirs, ours)])
    same = [None if one is None or other is None else one == other for one, other in zip(before, after, strict=True)]
    return points.assign(kernels=[len(each or ()) for each in after], same=same, triton=triton.__version__)


def timed(points: list[dict[str, str]], old: Path, seconds: float) -> Iterator[pd.DataFrame]:
    """The rows of each point in turn, until the time is over."""
    from kernelbook.lab import record

    began, run = time.monotonic(), record.new_run()
    about = record.environment(record.package_version(NEW / "kernelbook"))
    with process(old) as one, process(NEW) as other, process(NEW) as third:
        workers = {"old": one, "new": other, "again": third}
        for point in points:
            if time.monotonic() - began > seconds:
                return
            found: dict[str, dict[str, list[float]]] = {}
            for which in TURNS:
                for provider, ms in workers[which].submit(times, point).result().items():
                    found.setdefault(provider, {}).setdefault(which, []).append(ms)
            rows: list[dict[str, Any]] = []
            for provider, both in found.items():
                if both.keys() == set(TURNS):
                    figures = {f"{which}_ms": f"{statistics.median(taken):.5g}" for which, taken in both.items()}
                    spread = max(max(taken) / min(taken) for taken in both.values())
                    what = {name: point[name] for name in [*CASE, "room"]} | {"provider": provider}
                    rows.append({"run": run, **what, **figures, "spread": f"{spread:.4g}", **about})
            yield pd.DataFrame(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("code", "time"))
    parser.add_argument("old", type=Path)
    parser.add_argument("points", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("book/results"))
    parser.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    points, old = read_points(given.points), given.old.resolve()
    if given.what == "code":
        same_code(points, old).to_csv(sys.stdout, index=False)
        return 0
    from kernelbook.lab import record

    cases = [named(point) for _, point in points.drop_duplicates(["room", *CASE]).iterrows()]
    for rows in timed(cases, old, given.seconds):
        if len(rows):
            record.write_results(
                given.out / record.device_slug() / "revisions.csv", rows, key=(*CASE, "room", "provider")
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
