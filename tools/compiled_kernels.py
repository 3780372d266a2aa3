"""Compiles all kernels for all targets, and writes what the compiler says.

It writes tests/compiled_reports.csv, in which tests/test_compiles.py looks before it compiles, and book/compiled.csv, which the
page "Compiled" shows. What did not change is not compiled again.
"""

import argparse
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import test_compiles  # noqa: E402

from kernelbook import runtime  # noqa: E402
from kernelbook.lab.compiled import CompiledKernel, compile_each, occupancy, read_reports, write_reports  # noqa: E402

TABLE = ROOT / "book" / "compiled.csv"


def _row(room: str, call: str, kernel: CompiledKernel) -> dict[str, Any]:
    nvidia = kernel.target.startswith("sm_")
    properties = runtime.TARGETS[kernel.target]
    fits = occupancy(kernel.registers, kernel.shared_bytes, kernel.num_warps, properties) if nvidia else None
    tiles = " ".join(f"{name}={value}" for name, value in kernel.constants.items() if name in TILES)
    row = {"room": room, "call": call, "kernel": kernel.name, "target": kernel.target, "tiles": tiles}
    row |= {name: getattr(kernel, name) for name in ("num_warps", "num_stages", *FIGURES)}
    row["num_stages"] = kernel.constants.get("STAGES", kernel.num_stages)
    return row | {"programs": fits.programs if fits else "", "limit": fits.limit if fits else ""}


FIGURES = ("registers", "spill_bytes", "shared_bytes")
TILES = (
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "BLOCK_R", "BLOCK_L", "BLOCK_C", "BLOCK_P", "BLOCK_Q", "BLOCK_S", "BLOCK_G",
    "BLOCK_W", "BLOCK", "BLOCK_E", "NUM_BLOCKS", "SHARES", "NUM_SPLITS", "SPLIT", "UNROLL", "ROWS", "WARPGROUPS",
)  # fmt: skip


def table(reports: Path) -> pd.DataFrame:
    """The table of the page: what users get at the stated sizes."""
    calls = [
        (room, call, code) for room, stated in sorted(test_compiles.STATED.items()) for call, code in stated.items()
    ]
    found: list[list[CompiledKernel]] = [[] for _ in calls]
    for alike in ([name for name in runtime.TARGETS if name != "sm_75"], ["sm_75"]):
        codes = [test_compiles.for_target(code, alike[0]) for *_, code in calls]
        for kernels, more in zip(found, compile_each(codes, alike, reports=reports, timeout_s=3000.0), strict=True):
            kernels += more
    pairs = zip(calls, found, strict=True)
    return pd.DataFrame([_row(room, call, kernel) for (room, call, _), kernels in pairs for kernel in kernels])


def main() -> int:
    """Writes both files."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jobs = itertools.product([[room] for room in sorted(test_compiles.CALLS)], test_compiles.ALIKE)
    kernels: list[CompiledKernel] = []
    before = [SimpleNamespace(**row) for row in read_reports(test_compiles.REPORTS).values()]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for job in as_completed([pool.submit(test_compiles.compiled, *job) for job in jobs]):
            kernels += [kernel for of_room in job.result().values() for kernel in of_room]
            write_reports(test_compiles.REPORTS, [*before, *kernels])  # so that a run that is stopped loses nothing
            print(f"{len(kernels)} kernels", flush=True)
    write_reports(test_compiles.REPORTS, kernels)
    table(test_compiles.REPORTS).to_csv(TABLE, index=False, lineterminator="\n")
    print(f"{len(kernels)} kernels, {sum(not kernel.stored for kernel in kernels)} of them compiled anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
