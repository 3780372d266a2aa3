"""Which rows of ``book/results`` are older than these sources (:mod:`kernelbook.lab.dates`), and which are missing. Needs no GPU.

``python -m kernelbook.lab.older`` lists file, case and column. Where our time is older the whole case is to be measured again,
so that no ratio mixes runs.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import kernelbook
from kernelbook import runtime
from kernelbook.lab import baselines, bench, dates, launched, record, timing

__all__ = ["Older", "dates_of", "launch_digests", "listed", "older", "sentence"]

PACKAGE = Path(kernelbook.__file__).parent
NOT_DATED = "not dated"
NOT_MEASURED = "not measured"
# The GPUs whose rows the book has: nothing else is known of them where they are not.
GPUS = {
    record.slug(name): dataclasses.replace(runtime.TARGETS["sm_90"], name=name, l2_bytes=l2_mib * 2**20)
    for name, l2_mib in (("NVIDIA H200", 60), ("NVIDIA H100 80GB HBM3", 50))
}


# --- what cases launch ----------------------------------------------------------------------------------------------

Digests = dict[str, dict[str, dict[str, str]]]  # by bench, case and provider


def case_key(row: Mapping[str, Any]) -> str:
    """A row's case, as :class:`kernelbook.lab.timing.Case` spells it."""
    return f"{row['op']} {row['mode']} {row['dtype']} {row['shape']} {row['x_name']}={row['x']}"


def properties_of(gpu: str) -> runtime.DeviceProperties | None:
    """What is known of the GPU of a folder in ``book/results``: the one at hand, or one of the book's."""
    if runtime.DEVICE.type == "cuda" and gpu == record.device_slug():
        return runtime.properties()
    return GPUS.get(gpu)


def launch_digests(properties: runtime.DeviceProperties, names: Iterable[str] = bench.CASE_BY_CASE) -> Digests:
    """By bench, case and provider of ours the digest of what it launches on a GPU, found by a process that has none.

    What was found is kept on disk for these sources.
    """
    sources = hashlib.sha256(repr((dataclasses.astuple(properties), sys.version_info)).encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        sources.update(path.read_bytes())
    folder = runtime.cache_dir() / "launches" / sources.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: folder / f"{name}.json" for name in names}
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # chapters that are executed beside each other ask for the same
        missing = [name for name, path in kept.items() if not path.exists()]
        if missing:
            for name, found in _found_without_gpu(properties, missing).items():
                record.replace_file(kept[name], json.dumps(found))
    return {name: json.loads(path.read_text()) for name, path in kept.items()}


def _found_without_gpu(properties: runtime.DeviceProperties, names: Sequence[str]) -> Digests:
    hidden = {
        "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "kernelbook.lab.older", "--launches", *names],
        input=json.dumps(dataclasses.asdict(properties)),
        env={**os.environ, **hidden}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def digests_here(properties: Mapping[str, Any], names: Iterable[str] = bench.CASE_BY_CASE) -> Digests:
    """What :func:`launch_digests` asks for, in a process without a GPU."""
    with runtime.compiling_for(runtime.DeviceProperties(**properties)), baselines.none():
        return {
            one.name: {str(case): _digests_of(one, case) for case in (*one.cases(), *one.models())}
            for one in bench.benches(names)
            if one.cases
        }


def _digests_of(one: bench.Bench, case: timing.Case) -> dict[str, str]:
    """By provider of ours; of a case that raises nothing is known, and of the others all is."""
    try:
        launches = dict(launched.launches_of(lambda: calls_of(case)))
    except Exception as error:
        print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
        return {}
    return {provider: launched.digest(timing.METHOD, one.method, what) for provider, what in launches.items()}


def calls_of(case: timing.Case) -> dict[str, Callable[[], object]]:
    """The calls of ours that a case times."""
    torch.manual_seed(0)
    providers = {name: call for name, call in case.build().providers.items() if record.is_ours(name)}
    return {name: _first_call(call) if isinstance(call, str) else call for name, call in providers.items()}


def _first_call(code: str) -> Callable[[], object]:
    return lambda: exec(code.replace('"cuda"', '"cpu"'), {"torch": torch})  # noqa: S102


def dates_of(one: bench.Bench) -> Callable[[timing.Case, str], dict[str, str]]:
    """For a run on the GPU at hand: from a case and a provider to the columns :data:`record.DATES`."""
    found = launch_digests(runtime.properties(), [one.name])
    host = dates.host_digest(one.library)

    def of(case: timing.Case, provider: str) -> dict[str, str]:
        if not record.is_ours(provider):
            return {"launches": "", "host": "", "peer": baselines.peer_version(provider, one.baselines)}
        return {"launches": found[one.name].get(str(case), {}).get(provider, ""), "host": host, "peer": ""}

    return of


# --- the list -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Older:
    """A case, or a whole file, of which something is older: ``launches``, ``host``, ``peer``, ``sources``; or it is not dated, or a case not measured."""

    gpu: str
    file: str
    case: str
    column: str
    rows: int

    def __str__(self) -> str:
        return f"{self.gpu}/{self.file}: {self.case or f'{self.rows} rows'}: {self.column}"


def older(gpus: Iterable[str] | None = None, stem: str = "*") -> list[Older]:
    """What in ``book/results`` is older than these sources, or not dated; and the cases that a room's file has no rows of.

    Args:
        gpus: folders of ``book/results`` (default: all).
        stem: of one file, instead of all.
    """
    folders = list(record.recorded_gpus(stem) if gpus is None else gpus)
    known = {gpu: properties for gpu in folders if (properties := properties_of(gpu)) is not None}
    # Of other files no case has to be looked at.
    names: Sequence[str] = (
        [stem] if stem in bench.CASE_BY_CASE else bench.CASE_BY_CASE if stem in ("*", "models") else ()
    )
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda properties: launch_digests(properties, names=names), known.values())
        digests = dict(zip(known, found, strict=True))
    return [found for gpu in folders for found in _older_on(gpu, stem, digests.get(gpu, {}))]


def listed(printed: str, gpu: str) -> set[tuple[str, str]]:
    """What :func:`main` printed of ``gpu``: a file's stem and a case, or nothing where the whole file is older. Not what is not dated."""
    lines = [re.fullmatch(rf"{gpu}/(\w+)\.\w+: (.*): (\w[\w ]*)", line) for line in printed.splitlines()]
    found = [line.groups() for line in lines if line is not None and line[3] != NOT_DATED]
    return {(stem, "" if re.fullmatch(r"\d+ rows", case) else case) for stem, case, _ in found}


def _older_on(gpu: str, stem: str, digests: Digests) -> Iterator[Older]:
    import pandas as pd

    bench_of = {case: name for name, cases in digests.items() for case in cases}
    hosts = {name: dates.host_digest(bench.bench(name).library) for name in digests}
    folder = record.results_dir() / gpu
    for path in sorted([*folder.glob(f"{stem}.csv"), *folder.glob(f"{stem}.jsonl")]):
        if path.stem == "ceilings":  # of the machine, whatever the sources are
            continue
        rows = pd.read_json(path, lines=True, dtype=False) if path.suffix == ".jsonl" else pd.read_csv(path, dtype=str)
        rows = rows.assign(**{name: "" for name in record.DATES if name not in rows.columns}).fillna("")
        if path.stem in dates.DATED:
            digest = dates.sources_digest(path.stem)
            column = "launches" if set(record.KEY) <= {*rows} else "sources"
            behind = rows.get(column, "") != digest
            if column == "launches":
                behind &= rows["provider"].map(record.is_ours)
            # Whole models are measured one by one, and a provider at a time.
            whole = {"provider", "shape"} <= {*rows} and rows["shape"].str.startswith("model=").all()
            models = rows["shape"].str.extract(r"model=(.*?) layers=", expand=False) if whole else ""
            part = models + " " + rows["provider"] if whole else pd.Series("", rows.index)
            for name, count in behind.groupby(part, sort=False).sum().items():
                if count:
                    yield Older(gpu, path.name, str(name), column, int(count))
        elif path.stem in {*bench.CASE_BY_CASE, "models"}:
            for _, case in rows.groupby(list(record.KEY[:2] + record.KEY[3:]), sort=False):
                key = case_key(case.iloc[0])
                columns = _older_columns(
                    case, digests.get(bench_of.get(key, ""), {}).get(key, {}), hosts.get(bench_of.get(key, ""))
                )
                for column in columns:
                    yield Older(gpu, path.name, key, column, len(case))
            measured = set(map(case_key, rows.to_dict("records")))
            for key in _cases_of(path.stem, digests):
                if key not in measured:
                    yield Older(gpu, path.name, key, NOT_MEASURED, 0)
        else:
            yield Older(gpu, path.name, "", NOT_DATED, len(rows))


def _cases_of(stem: str, names: Iterable[str]) -> list[str]:
    """The cases of a room's file, or of the rooms ``names`` those of models."""
    rooms = bench.benches(name for name in names if stem in ("models", name))
    lists = (one.models if stem == "models" else one.cases for one in rooms)
    return [str(case) for cases in lists if cases is not None for case in cases()]


def _older_columns(case: Any, digests: Mapping[str, str], host: str | None) -> list[str]:
    """The columns of a case's rows that are older: its launches, else the host's path and the peers' versions."""
    ours = case["provider"].map(record.is_ours)
    if any(row["launches"] != digests.get(row["provider"]) for _, row in case[ours].iterrows()):
        return ["launches"]
    found = ["host"] if any((case["host_us"] != "") & ours & (case["host"] != host)) else []
    return [*found, *(["peer"] if any(map(_is_older_peer, case["peer"][~ours])) else [])]


def _is_older_peer(peer: str) -> bool:
    """Whether another version of a peer is installed here; PyTorch's own is the one that a record was made with."""
    name, _, version = peer.partition(" ")
    return name not in ("", "torch") and baselines.version(name) not in (None, version)


@functools.cache
def sentence(stem: str, gpu: str) -> str:
    """Whether recorded rows of ``stem`` are older, in a sentence; nothing where none is."""
    counts: dict[str, int] = {}
    for found in older([gpu], stem):
        counts[found.column] = counts.get(found.column, 0) + found.rows
    parts = [f"{counts[column]:,} of the rows {words}" for column, words in WORDS.items() if column in counts]
    return f"{'; '.join(parts)}." if parts else ""


WORDS = {
    "launches": "launch other kernels than they did when they were measured",
    "sources": "were measured with older sources than this book's",
    "host": "have host times from before the code around their launches changed",
    "peer": "compare with a peer of another version than the one that is pinned now",
    NOT_DATED: "have no rule that would tell whether they are older",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is older, a line each."""
    asked = list(sys.argv[1:] if arguments is None else arguments)
    if asked[:1] == ["--launches"]:
        print(json.dumps(digests_here(json.load(sys.stdin), asked[1:])))
        return 0
    for found in older():
        print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
