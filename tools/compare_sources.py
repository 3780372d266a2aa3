"""Times the same points with two versions of the package in turn on one GPU: what two records differ by, and what the code does.

usage: python tools/compare_sources.py worse REVISION [--rooms ROOM ...] > points.csv      (in a checkout with its history)
       python tools/compare_sources.py time OLD_SRC points.csv OUT [--part I/N] [--seconds S] [--warm]      (on a GPU)
       python tools/compare_sources.py code OLD_SRC points.csv > book/revisions_code.csv      (needs no GPU)

``worse`` lists the points whose best peer over best ours fell by more than 2% from the record at REVISION to the present one,
among peers that both have. ``code`` compiles what our call launches at these points, with both versions, and says whether a
GPU gets the same instructions: where it does, no clock can blame the code. ``time`` gives both versions the same inputs and times both by the present clock
(:func:`kernelbook.lab.timing.measure_in_turn`), in rounds, in processes of which one works while the others wait; a third process
has the present version once more, which shows what differs where the code does not. Each point and provider is a row of
OUT/<gpu>/revisions.csv.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parent.parent
NEW = ROOT / "src"
SLUG = "nvidia-h200"  # whose records are compared
ROOMS = ("attention", "layer_norm", "sparse_linear", "scatter_ffn", "nf4", "moe_lora", "moe_block")
CASE = ["op", "mode", "dtype", "shape", "x_name", "x"]
TOLERANCE = 0.02
LARGE = 2**20  # elements
GPU, TARGET = "NVIDIA H200", "sm_90"  # of SLUG
TURNS = ("old", "new", "again", "again", "new", "old")  # the present one twice: what differs without a difference
REP_MS = 25.0
COMPILERS = 12  # processes of each version that compile beforehand


# --- which points ---------------------------------------------------------------------------------------------------


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """For each case the fastest of ours and of the peers in ms, and which of ours it is."""
    from kernelbook.lab.timing import BOUNDS

    rows = rows[(rows["mode"] != "first_call") & ~rows["provider"].isin(BOUNDS)].sort_values("ms", kind="stable")
    own = rows["provider"].str.startswith("kernelbook")
    ours, peer = (part.groupby(CASE)[["ms", "provider"]].first() for part in (rows[own], rows[~own]))
    return pd.DataFrame({"ours": ours["ms"], "peer": peer["ms"], "provider": ours["provider"]}).dropna()


def worse(revision: str, room: str) -> pd.DataFrame:
    """The points of a room that are worse now than at ``revision``, with ``was`` and ``now``: peer over ours.

    ``provider`` is the fastest of ours now, and ``ours`` its time over that of the fastest then.
    """
    path = f"book/results/{SLUG}/{room}.csv"
    text = subprocess.run(["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = pd.read_csv(io.StringIO(text.stdout)), pd.read_csv(ROOT / path)
    known = after["provider"].isin(before["provider"]) | after["provider"].str.startswith("kernelbook")
    then, now = best(before), best(after[known])
    table = pd.DataFrame({"was": then["peer"] / then["ours"], "now": now["peer"] / now["ours"]})
    table["ours"] = now["ours"] / then["ours"]
    table["provider"] = now["provider"]
    table = table.dropna()
    table = table[table["now"] < (1 - TOLERANCE) * table["was"]]
    return table.round(4).reset_index().assign(room=room, since=before["date"].max())


# --- a worker -------------------------------------------------------------------------------------------------------


def present(module: str) -> Any:
    """A module of the present laboratory, whichever version is on the path: both are measured and compiled alike."""
    import importlib.util

    name = f"present_{module}"
    spec = importlib.util.spec_from_file_location(name, NEW / "kernelbook" / "lab" / f"{module}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def case_of(point: dict[str, Any]) -> Any:
    """The case that a point is of, with its inputs' seed set; ``LookupError`` where this version has none."""
    try:
        from kernelbook.lab.bench import bench_of
    except ImportError:  # a version without a laboratory
        from kernelbook.cli import _bench_of as bench_of

    for case in bench_of(point["room"]).cases():
        if [case.op, case.mode, case.dtype_name, case.shape_text, case.x_name, f"{case.x:.12g}"] == point["case"]:
            torch.manual_seed(0)
            return case
    raise LookupError("no such case")


def serve() -> None:
    """Answers lines of JSON: a point in, the times of its providers out. The package is the one on the path."""
    answers, sys.stdout = sys.stdout, sys.stderr
    clock = present("timing")
    for line in sys.stdin:
        asked = json.loads(line)
        times: dict[str, float] = {}
        try:
            providers = {name: call for name, call in case_of(asked).build().providers.items() if callable(call)}
            if asked["warm"]:
                for call in providers.values():
                    call()
            else:
                taken = clock.measure_in_turn(providers, rep_ms=REP_MS)
                times = {name: found.ms for name, found in taken.items()}
        except Exception as error:  # this point has no row; the others do
            print(f"{asked['case']}: {type(error).__name__}: {error}", file=sys.stderr)
            times = {}
        torch.cuda.empty_cache()
        print(json.dumps(times), file=answers, flush=True)


class Unfilled(TorchDispatchMode):
    """Large tensors are made, but nothing is computed of them: no instruction depends on what they hold."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sizes = [each.numel() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        made = [
            math.prod(each) for each in args if isinstance(each, list | tuple) and all(type(n) is int for n in each)
        ]
        if func.namespace != "aten" or func.is_view or max([*sizes, *made], default=0) < LARGE:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]

        def meta(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return each.to("meta")
            return "meta" if isinstance(each, torch.device) else each

        def real(each: Any) -> Any:
            kept = isinstance(each, torch.Tensor)
            return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype) if kept else each

        generator = {"generator": None} if "generator" in kwargs else {}
        return tree_map(real, func(*tree_map(meta, args), **(tree_map(meta, kwargs) | generator)))


def instructions(points: list[dict[str, Any]]) -> Iterator[list[Any] | None]:
    """For each point what the fastest of ours launches: kernels, grids, warps, memory, and a digest of the opcodes' order.

    Operands are left out: parameters lie elsewhere when one is added, and nothing else changes.
    """
    from triton.runtime.jit import JITFunction

    from kernelbook import runtime

    compiled = present("compiled")
    known: dict[Any, list[Any]] = {}
    found: list[tuple[Any, list[int]]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip((parameter.name for parameter in kernel.params), args, strict=False)) | options
        found.append((compiled._record(kernel, args, options), list(grid(given) if callable(grid) else grid)))

    JITFunction.run = record
    # Shipped plans are looked up by the name of the GPU.
    runtime.TARGETS[TARGET] = dataclasses.replace(runtime.TARGETS[TARGET], name=GPU)
    with runtime.compiling_for(TARGET):
        for point in points:
            try:
                with Unfilled():
                    call = case_of(point).build().providers[point["provider"]]
                found.clear()  # of what the inputs took
                call()
            except Exception as error:  # of this point nothing is known
                print(f"{point['case']}: {type(error).__name__}: {error}", file=sys.stderr)
                yield None
                continue
            for launch, _ in found:
                if launch not in known:
                    kernel = compiled._compile(launch, TARGET, ("sass",))
                    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", kernel.asm["sass"])
                    digest = hashlib.sha256(" ".join(opcodes).encode()).hexdigest()[:16]
                    about = [kernel.num_warps, kernel.registers, kernel.spill_bytes, kernel.shared_bytes]
                    known[launch] = [kernel.name, *about, len(opcodes), digest]
            yield [[*known[launch], grid] for launch, grid in found]


def same_code(points: pd.DataFrame, old: Path) -> pd.DataFrame:
    """``points`` with how many kernels ours launches, and whether they are the old ones, instruction by instruction."""
    import triton

    asked = [{"room": p["room"], "case": named(p), "provider": p["provider"]} for _, p in points.iterrows()]

    def of(src: Path) -> list[Any]:
        hidden = {
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "HIP_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
        }
        env = {**os.environ, **hidden, "KERNELBOOK_PLANS": "shipped", "PYTHONPATH": str(src)}
        command = [sys.executable, __file__, "instructions"]
        done = subprocess.run(command, env=env, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
        return list(json.loads(done.stdout.splitlines()[-1]))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        before, after = pool.map(of, (old, NEW))
    same = [None if one is None or other is None else one == other for one, other in zip(before, after, strict=True)]
    return points.assign(kernels=[len(each or ()) for each in after], same=same, triton=triton.__version__)


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
    from kernelbook.lab import timing

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
    code = commands.add_parser("code")
    code.add_argument("old", type=Path)
    code.add_argument("points", type=Path)
    commands.add_parser("serve")
    commands.add_parser("instructions")
    given = parser.parse_args()
    if given.what == "serve":
        serve()
    elif given.what == "instructions":
        answers, sys.stdout = sys.stdout, sys.stderr
        print(json.dumps(list(instructions(json.load(sys.stdin)))), file=answers)
    elif given.what == "code":
        same_code(pd.read_csv(given.points), given.old.resolve()).to_csv(sys.stdout, index=False)
    elif given.what == "worse":
        pd.concat([worse(given.revision, room) for room in given.rooms]).to_csv(sys.stdout, index=False)
    else:
        from kernelbook import runtime
        from kernelbook.lab import timing

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
