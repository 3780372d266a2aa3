"""Times the same points with two versions of the package in turn on one GPU: what two records differ by, and what the code does.

usage: python tools/compare_sources.py worse REVISION [--rooms ROOM ...] > points.csv      (in a checkout with its history)
       python tools/compare_sources.py time OLD_SRC points.csv OUT [--part I/N] [--seconds S] [--warm]      (on a GPU)

``worse`` lists the points whose best peer over best ours fell by more than 2% from the record at REVISION to the present one,
among peers that both have. ``time`` gives both versions the same inputs and times both by the present clock
(:func:`kernelbook.timing.measure_in_turn`), in rounds, in processes of which one works while the others wait; a third process
has the present version once more, which shows what differs where the code does not. Each point and provider is a row of
OUT/<gpu>/revisions.csv.
"""

import argparse
import concurrent.futures
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parent.parent
NEW = ROOT / "src"
SLUG = "nvidia-h200"  # whose records are compared
ROOMS = ("attention", "layer_norm", "sparse_linear", "scatter_ffn", "nf4", "moe_lora", "moe_block")
CASE = ["op", "mode", "dtype", "shape", "x_name", "x"]
TOLERANCE = 0.02
TURNS = ("old", "new", "again", "again", "new", "old")  # the present one twice: what differs without a difference
REP_MS = 25.0
COMPILERS = 12  # processes of each version that compile beforehand


# --- which points ---------------------------------------------------------------------------------------------------


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """For each case the fastest of ours and of the peers, ``ms``."""
    from kernelbook.timing import BOUNDS

    rows = rows[(rows["mode"] != "first_call") & ~rows["provider"].isin(BOUNDS)]
    own = rows["provider"].str.startswith("kernelbook")
    fastest = {"ours": rows[own], "peer": rows[~own]}
    return pd.DataFrame({name: part.groupby(CASE)["ms"].min() for name, part in fastest.items()}).dropna()


def worse(revision: str, room: str) -> pd.DataFrame:
    """The points of a room that are worse now than at ``revision``, with ``was`` and ``now``: peer over ours."""
    path = f"book/results/{SLUG}/{room}.csv"
    text = subprocess.run(["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = pd.read_csv(io.StringIO(text.stdout)), pd.read_csv(ROOT / path)
    known = after["provider"].isin(before["provider"]) | after["provider"].str.startswith("kernelbook")
    ratios = {"was": best(before), "now": best(after[known])}
    table = pd.DataFrame({when: both["peer"] / both["ours"] for when, both in ratios.items()}).dropna()
    table = table[table["now"] < (1 - TOLERANCE) * table["was"]]
    return table.round(4).reset_index().assign(room=room)


# --- a worker -------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answers lines of JSON: a point in, the times of its providers out. The package is the one on the path."""
    import importlib.util

    from kernelbook import cli

    answers, sys.stdout = sys.stdout, sys.stderr
    # The present clock measures both versions: it may have changed between them.
    spec = importlib.util.spec_from_file_location("clock", NEW / "kernelbook" / "timing.py")
    assert spec is not None and spec.loader is not None
    clock = importlib.util.module_from_spec(spec)
    sys.modules["clock"] = clock
    spec.loader.exec_module(clock)
    for line in sys.stdin:
        asked = json.loads(line)
        times: dict[str, float] = {}
        try:
            for case in cli._bench_of(asked["room"]).cases():
                if [case.op, case.mode, case.dtype_name, case.shape_text, case.x_name, f"{case.x:.12g}"] == asked[
                    "case"
                ]:
                    torch.manual_seed(0)
                    providers = {name: call for name, call in case.build().providers.items() if callable(call)}
                    if asked["warm"]:
                        for call in providers.values():
                            call()
                    else:
                        taken = clock.measure_in_turn(providers, rep_ms=REP_MS)
                        times = {name: found.ms for name, found in taken.items()}
                    break
        except Exception as error:  # this point has no row; the others do
            print(f"{asked['case']}: {type(error).__name__}: {error}", file=sys.stderr)
            times = {}
        torch.cuda.empty_cache()
        print(json.dumps(times), file=answers, flush=True)


class Worker:
    """A process with one version of the package."""

    def __init__(self, src: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(src), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, __file__, "serve"]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, point: Any, *, warm: bool = False) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(
            json.dumps({"room": str(point["room"]), "case": named(point), "warm": warm}),
            file=self.process.stdin,
            flush=True,
        )
        return dict(json.loads(self.process.stdout.readline() or "{}"))


def named(point: Any) -> list[str]:
    """A case's columns as results have them."""
    return [str(point[name]) for name in CASE[:-1]] + [f"{float(point['x']):.12g}"]


def compile_all(points: pd.DataFrame, src: Path) -> None:
    """Calls every provider once, in several processes beside each other."""

    def part(i: int) -> None:
        worker = Worker(src)
        for _, point in points.iloc[i::COMPILERS].iterrows():
            worker.ask(point, warm=True)
        worker.process.terminate()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(part, range(COMPILERS)))


# --- in turn --------------------------------------------------------------------------------------------------------


def timed(points: pd.DataFrame, old: Path, seconds: float) -> Iterator[pd.DataFrame]:
    """The rows of each point in turn, until the time is over."""
    from kernelbook import timing

    began, run = time.monotonic(), timing.new_run()
    about = timing.environment(timing.package_version(NEW / "kernelbook"))
    workers = {"old": Worker(old), "new": Worker(NEW), "again": Worker(NEW)}
    for _, point in points.iterrows():
        if time.monotonic() - began > seconds:
            break
        found: dict[str, dict[str, list[float]]] = {}
        for which in TURNS:
            for provider, ms in workers[which].ask(point).items():
                found.setdefault(provider, {}).setdefault(which, []).append(ms)
        rows: list[dict[str, Any]] = []
        for provider, both in found.items():
            if both.keys() == set(TURNS):
                figures = {f"{which}_ms": f"{statistics.median(times):.5g}" for which, times in both.items()}
                spread = max(max(times) / min(times) for times in both.values())
                what = dict(zip(CASE, named(point), strict=True)) | {"room": point["room"], "provider": provider}
                rows.append({"run": run, **what, **figures, "spread": f"{spread:.4g}", **about})
        yield pd.DataFrame(rows)
    for worker in workers.values():
        worker.process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    listing = commands.add_parser("worse")
    listing.add_argument("revision")
    listing.add_argument("--rooms", nargs="+", default=ROOMS)
    timing_ = commands.add_parser("time")
    timing_.add_argument("old", type=Path)
    timing_.add_argument("points", type=Path)
    timing_.add_argument("out", type=Path)
    timing_.add_argument("--part", default="0/1")
    timing_.add_argument("--seconds", type=float, default=3600.0)
    timing_.add_argument("--warm", action="store_true", help="only compile, beside each other")
    commands.add_parser("serve")
    given = parser.parse_args()
    if given.what == "serve":
        serve()
    elif given.what == "worse":
        pd.concat([worse(given.revision, room) for room in given.rooms]).to_csv(sys.stdout, index=False)
    else:
        from kernelbook import runtime, timing

        own, of = map(int, given.part.split("/"))
        target, old = given.out / runtime.device_slug() / "revisions.csv", given.old.resolve()
        points = pd.read_csv(given.points).iloc[own::of]
        if given.warm:
            for src in (old, NEW):
                compile_all(points, src)
            return 0
        for rows in timed(points, old, given.seconds):
            if len(rows):
                timing.write_results(target, rows, key=(*CASE, "room", "provider"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
