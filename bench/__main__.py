"""Measures on the GPU at hand: ``python -m bench layer_norm``. Rows are written case by case into ``book/results/<gpu>``.

A case that has rows of this commit is skipped, so the same command goes on where an earlier one ended. With ``--stale`` all cases
are skipped whose rows are of today's kernels, whatever their commit. ``--warm`` calls everything once and records nothing:
beforehand it fills the compilers' caches, several processes beside each other, each with its ``--part``.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tabulate import tabulate
from tqdm import tqdm

import bench as registry
from bench import baselines, chapters
from kernelbook import runtime
from kernelbook.lab import record, stale, timing

REP_MS = 50.0  # of samples, 20 at least, for each call


def can_measure() -> bool:
    return runtime.DEVICE.type == "cuda"


# --- cases ----------------------------------------------------------------------------------------------------------


def kept(path: Path, stem: str, only_stale: bool) -> set[tuple[str, ...]]:
    """The keys of the cases that need not be measured: of which there are rows of this commit, or of today's kernels."""
    if not path.exists():
        return set()
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    today = [stale.state(kernels, stem, op) == stale.CURRENT for kernels, op in zip(rows["kernels"], rows["op"])]
    columns = [name for name in record.KEY if name != "provider"]
    found = rows.loc[pd.Series(today, rows.index) & (only_stale | (rows["commit"] == stale.commit()))]
    return set(found[columns].itertuples(index=False, name=None))


def chosen(one: registry.Bench, given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[timing.Case]]]:
    """The files of a bench, and for each the cases that are to be measured into it by this process."""
    own, of = given.part
    assert one.cases is not None
    for stem, cases in ((one.name, one.cases()), ("models", one.models())):
        there = set() if given.warm else kept(folder / f"{stem}.csv", stem, given.stale)
        wanted = [case for case in cases if re.search(given.select or "", str(case))][own::of]
        yield stem, [case for case in wanted if case.key not in there]


def measure_cases(one: registry.Bench, stem: str, cases: Iterable[timing.Case], folder: Path) -> list[str]:
    """Measures the cases, writes and prints the rows of each as they come, and returns the failures."""
    ceilings = timing.measure_ceilings()

    def keep(rows: pd.DataFrame) -> None:
        first = rows.iloc[0]  # the ceilings first: no row without those of its run
        record.write_results(folder / "ceilings.csv", timing.ceilings_row(ceilings, first["run"]), key=("run",))
        record.write_results(folder / f"{stem}.csv", rows)
        shown = rows[["provider", "ms", "host_us", "peak_mib", "err_ratio"]]
        tqdm.write(f"\n{first['mode']} {first['dtype']} {first['shape']} {first['x_name']}={first['x']}")
        tqdm.write(tabulate(shown, headers="keys", showindex=False, disable_numparse=True))

    peer = functools.partial(baselines.peer_version, distributions=one.baselines)
    return timing.run_cases(cases, stem=stem, rep_ms=REP_MS, peer=peer, record=keep)[1]


def measure_extras(one: registry.Bench, folder: Path) -> list[str]:
    """Measures and writes the tables of another kind, one by one, and returns the failures."""
    try:
        for stem, table in one.extras() if one.extras is not None else ():
            record.write_results(folder / f"{stem}.csv", table, key=one.keys[stem])
            print(tabulate(table.to_dict("records"), headers="keys"), flush=True)
    except Exception as error:  # the room's own rows are written already and count
        return [f"{one.name}, extras: {type(error).__name__}: {error}"]
    return []


def warm(case: timing.Case) -> None:
    """Calls every provider once, so that the compilers' caches on disk are full before anything is measured."""

    def attempt(what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # measuring says more; here the others matter
            print(f"not warmed: {what}: {type(error).__name__}: {error}", file=sys.stderr)

    problem = attempt(str(case), case.build)
    for provider, call in problem.providers.items() if problem is not None else ():
        attempt(f"{case}: {provider}", call)
    torch.cuda.empty_cache()  # for processes beside this one


def measure(name: str, given: argparse.Namespace, folder: Path) -> int:
    """Measures one bench; 1 if something was not recorded, 2 where it does not take an option that was given."""
    one = registry.bench(name)
    asked = {"select": given.select, "layers": given.layers}
    takes = ("select",) if one.cases is not None else one.options
    if wrong := [option for option, value in asked.items() if value is not None and option not in takes]:
        print(f"bench: {name} does not take --{wrong[0]}", file=sys.stderr)
        return 2
    if one.run is not None:
        return 0 if given.warm else one.run(folder, **{option: asked[option] for option in one.options})
    lists = dict(chosen(one, given, folder))
    print(f"{name}: {sum(map(len, lists.values()))} cases on {runtime.properties().name}", flush=True)
    for note in one.missing():
        print(f"left out: {note}")
    failures: list[str] = []
    for stem, cases in lists.items():
        if given.warm:
            for case in cases:
                warm(case)
        elif cases:
            failures += measure_cases(one, stem, cases, folder)
    if not (given.warm or given.stale or given.select) and given.part[0] == 0:
        failures += measure_extras(one, folder)
    for failure in failures:
        print(f"NOT RECORDED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def merge(parts: Iterable[Path], out: Path) -> None:
    """Puts the rows of several folders into ``out``; of rows with the same key the last folder's stay."""
    keys = {"ceilings": ("run",)} | {stem: key for one in registry.benches() for stem, key in one.keys.items()}
    for path in (path for part in parts for path in sorted([*part.glob("*/*.csv"), *part.glob("*/*.jsonl")])):
        target, key = out / path.parent.name / path.name, keys.get(path.stem, record.KEY)
        if path.suffix == ".jsonl":
            record.write_lines(target, [json.loads(line) for line in path.read_text().splitlines()], key)
        else:
            record.write_results(target, pd.read_csv(path, dtype=str, keep_default_na=False), key)
        print(path)


# --- the command line -----------------------------------------------------------------------------------------------


def part_of(text: str) -> tuple[int, int]:
    own, _, of = text.partition("/")
    if not (own.isdigit() and of.isdigit() and int(own) < int(of)):
        raise argparse.ArgumentTypeError(f"must be I/N with I < N, got {text}")
    return int(own), int(of)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("names", nargs="*", metavar="name", help=f"what to measure: {', '.join(registry.NAMES)}")
    top.add_argument("--all", action="store_true", help="all that is measured case by case")
    top.add_argument("--steps", nargs="+", default=[], metavar="chapter", help="the steps of these chapters")
    top.add_argument("--out", type=Path, help="folder for <gpu>/<file>.csv (default: book/results)")
    top.add_argument("--select", help="only cases whose description has this, such as 'forward .*r=16'")
    top.add_argument("--stale", action="store_true", help="only cases without rows of today's kernels")
    top.add_argument("--part", type=part_of, default=(0, 1), help="I/N: of N processes the I-th, from 0")
    top.add_argument("--warm", action="store_true", help="call everything once and record nothing")
    top.add_argument("--layers", type=int, help="whole_model: so many layers of each model (default: all)")
    top.add_argument("--merge", type=Path, nargs="+", help="measure nothing; put the rows of these folders into --out")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; 1 if a result of ours was not correct or something failed, 2 without a GPU."""
    top = parser()
    given = top.parse_args(arguments)
    out = given.out or record.results_dir()
    names = [*given.names, *(registry.CASE_BY_CASE if given.all else ())]
    if unknown := [name for name in names if name not in registry.NAMES]:
        top.error(f"name must be one of {', '.join(registry.NAMES)}, got {unknown[0]!r}")
    try:
        record.check_folder("bench", out)
    except ValueError as error:
        top.error(str(error))
    if given.merge:
        if not any(any(folder.glob("*/*.*")) for folder in given.merge):
            top.error(f"--merge must be of folders with <gpu>/<file>.csv, got {', '.join(map(str, given.merge))}")
        merge(given.merge, out)
        return 0
    if not (names or given.steps):
        top.error("a name, --all or --steps must say what to measure")
    if not can_measure():
        print("bench: no GPU runs kernels here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    if runtime.autotune_enabled():
        print("bench: KERNELBOOK_AUTOTUNE must not be set: rows are of what the rules choose", file=sys.stderr)
        return 2
    folder = out / record.device_slug()
    codes = [measure(name, given, folder) for name in names]
    codes += [chapters.record_steps(name) for name in given.steps]
    if not given.warm:
        record.drop_unused_ceilings(folder)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
