"""Measures the whole book on the GPUs of one machine, and takes what it brought into book/results.

usage: python tools/measure.py --seconds S --out DIR [--only REGEX ...] [--gpus 0,1] [--also ROOM=FOLDERS] [--list]
       python tools/measure.py --merge DIR [--dry]

First every kernel is compiled by as many processes as there are cores; then jobs that measure, one a GPU and nothing beside
them; then what takes no time, beside each other. A job has a folder in DIR, with its log and its rows, which are written case
by case: whatever is stopped at the end of the time keeps what it has. The same command with the same DIR goes on, on another
machine with such GPUs too: what is done, or has rows of the present sources, is not measured again; DIR/cache may stay behind.
What several GPUs do together, the study of sparse training and chapters with RECORD have commands of their own.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import measure_job
import pandas as pd
import record_chapters as chapters
import torch

import kernelbook
from kernelbook.lab import record
from kernelbook.lab.bench import CASE_BY_CASE, ROOMS, bench, same_loss, sparse_inference, whole_model

ROOT = Path(__file__).resolve().parent.parent
WARM, QUIET, LOUD, LAST = range(4)  # phases; each waits for the one before
PHASES = ("warm", "quiet", "loud", "last")
WARM_SHARE = 0.4  # of the time, where something comes after it
PATIENCE = 10  # times what was expected, then a job is stopped
STOP_SECONDS = 4  # to stop what runs at the end
LONGEST = 3600  # what a job is told that it has, where there is no end
HEALTHY = 0.8  # of the best GPU's ceilings
START_SECONDS, CASE_SECONDS, JOB_SECONDS = 15, 1.5, 60  # of a process, a case, a job: they decide the order
LONG_SECONDS = {"attention": 3, "moe_block": 3}  # of their cases
PART_SECONDS = 150  # a room's cases are measured in parts of so much: each process costs START_SECONDS again
WARM_CASES, WARM_BLOCKS = 12, 4  # that a process compiles: of a room, and of whole blocks, which call many kernels each
CEILINGS = ("copy_gbs", "bf16_tflops")


@dataclasses.dataclass
class Job:
    """One process. In ``command`` ``{out}`` is its folder and ``{seconds}`` what is left; ``version`` is its sources'."""

    name: str
    command: tuple[str, ...]
    version: str
    phase: int = QUIET
    seconds: float = JOB_SECONDS
    least: float = 2 * START_SECONDS  # without so much time it brings nothing
    cores: int = 1
    every_gpu: bool = False
    needs: str = ""
    replaces: bool = False  # its tables are replaced whole
    env: dict[str, str] = dataclasses.field(default_factory=dict)


# --- the plan -------------------------------------------------------------------------------------------------------


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:8]


def words(*arguments: object) -> tuple[str, ...]:
    """The command of a job of measure_job.py."""
    return (sys.executable, str(ROOT / "tools" / "measure_job.py"), "{out}", *map(str, arguments))


def plan(out: Path, also: Sequence[str] = ()) -> list[Job]:
    """All jobs. ``also``: folders, given as ROOM=FOLDERS, with peers that would cost the other rooms' jobs time to import."""
    sources = digest(*(path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))))
    script, what = ROOT / "tools" / "evidence" / "record.py", "fuzz warm repeats largest handshake sanitizers"
    command = (sys.executable, str(script), "--only", *what.split(), "--seconds", "{seconds}", "--out", "{out}")
    evidence = Job("evidence", command, sources, LAST, LONGEST, 2 * JOB_SECONDS, cores(), every_gpu=True)
    return [
        *_rooms(out, dict(text.split("=", 1) for text in also)),
        *_whole_models(),
        *_chapters(sources),
        *_training(),
        evidence,
    ]


@contextlib.contextmanager
def _importing(folders: str) -> Iterator[None]:
    """With ``folders`` on the path: what there is to measure depends on which peers there are."""
    before = list(sys.path)
    sys.path += filter(None, folders.split(os.pathsep))
    try:
        yield
    finally:
        sys.path[:] = before


def _rooms(out: Path, also: Mapping[str, str]) -> Iterator[Job]:
    for room in CASE_BY_CASE:
        with _importing(also.get(room, "")):
            jobs = list(_of_room(room, out))
        if room in also:
            path = os.pathsep.join([environment()["PYTHONPATH"], also[room]])
            jobs = [dataclasses.replace(job, env=job.env | {"PYTHONPATH": path}) for job in jobs]
        yield from jobs


def _of_room(room: str, out: Path) -> Iterator[Job]:
    version, block = bench(room).package(), room not in ROOMS
    for which in ("room", "models"):
        ranks = collections.Counter(measure_job.searched(room, case) for case in measure_job.listed(room, which))
        for rank, count in ranks.items():
            name = "-".join(filter(None, [room, which if which == "models" else "", rank]))
            # What a peer's search found is kept under a key without the rank: a cache each.
            env = {"TRITON_CACHE_DIR": str(out / "cache" / f"triton-{room}-{rank}")} if rank else {}
            n = count if rank else math.ceil(count / (WARM_BLOCKS if block else WARM_CASES))
            for i, share in itertools.product(range(n), ("0/2", "1/2") if rank else ("0/1",)):
                command = words("warm", room, which, f"{i}/{n}", rank, share)
                first = JOB_SECONDS + block  # these begin first
                yield Job(f"warm-{name}-{i}-{share[0]}", command, version, WARM, first, env=env)
            env = env | {"TRITON_CACHE_AUTOTUNING": "1"} if rank else {}
            total = count * LONG_SECONDS.get(room, CASE_SECONDS)
            n = math.ceil(total / PART_SECONDS)
            for i in range(n):
                command, seconds = words("cases", room, which, f"{i}/{n}", rank), total / n
                yield Job(f"{name}-{i}", command, version, seconds=START_SECONDS + seconds, env=env)
    if bench(room).extras is not None:
        yield Job(f"extras-{room}", words("extras", room), version, replaces=True)


def _whole_models() -> Iterator[Job]:
    version = whole_model.BENCH.package()
    for plan in {measure_job.group(plan, task=True): None for plan in whole_model.plans()}:
        yield Job(f"warm-whole-{plan}", words("whole", plan, "warm"), version, WARM, 2 * JOB_SECONDS)
    for name, count in collections.Counter(map(measure_job.group, whole_model.plans())).items():
        yield Job(f"whole-{name}", words("whole", name), version, seconds=3 * START_SECONDS + 3 * CASE_SECONDS * count)


def _chapters(sources: str) -> Iterator[Job]:
    for path in sorted(chapters.NOTEBOOKS.glob("*.ipynb")):
        name, version = path.stem, digest(sources, path.read_text())
        if "RECORD_STEPS = False" in path.read_text():
            yield Job(f"warm-ladder-{name}", words("ladder", name, "warm"), version, WARM)
            yield Job(f"ladder-{name}", words("ladder", name), version, seconds=2 * START_SECONDS, replaces=True)
        yield Job(f"notebook-{name}", words("notebook", name), version, LOUD, 2 * JOB_SECONDS, JOB_SECONDS, cores=2)


def _training() -> Iterator[Job]:
    version = sparse_inference.BENCH.package()
    for width in sparse_inference.WIDTHS:
        yield Job(f"sparse_inference-{width}", words("module", "sparse_inference", "--widths", width), version)
    version = same_loss.BENCH.package()
    loss = ("module", "same_loss", "--base", "{out}/../loss-base/base.pt", "--ways")
    yield Job("loss-base", words(*loss), version, LOUD, 4 * JOB_SECONDS, JOB_SECONDS)
    for way, seed in itertools.product(same_loss.WAYS, range(3)):
        name, command = f"loss-{way.replace(':', '-')}-{seed}", words(*loss, way, "--seeds", seed)
        yield Job(name, command, version, LOUD, JOB_SECONDS, JOB_SECONDS, needs="loss-base")


def environment() -> dict[str, str]:
    """That of every job."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


# --- running --------------------------------------------------------------------------------------------------------


class Scheduler:
    """Runs jobs on ``gpus`` until ``seconds`` are over, phase by phase, the longest first."""

    def __init__(self, out: Path, gpus: Sequence[str], seconds: float, slots: int | None = None) -> None:
        self.out, self.gpus, self.slots = out, list(gpus), slots or cores()
        self.began, self.seconds = time.monotonic(), seconds
        self.running: dict[str, tuple[Job, subprocess.Popen[bytes], float, str]] = {}

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def say(self, *words: object) -> None:
        line = f"[{self.seconds - self.left():5.0f} s] {' '.join(map(str, words))}"
        print(line, flush=True)
        with (self.out / "measure.log").open("a") as log:
            log.write(line + "\n")

    def folder(self, job: Job) -> Path:
        """Those of jobs that only fill caches lie beside the caches, and are left behind with them."""
        return self.out / "cache" / job.name if job.phase == WARM else self.out / job.name

    def done(self, job: Job) -> bool:
        mark = self.folder(job) / "done"
        return mark.exists() and mark.read_text() == job.version

    def run(self, jobs: Sequence[Job], first: Callable[[Job], int] = lambda job: 0) -> None:
        """Everything of ``jobs`` that is not done yet and has the time; in a phase the least of ``first``, then the longest."""
        self.out.mkdir(parents=True, exist_ok=True)
        by_name = {job.name: job for job in jobs}
        try:
            for phase in sorted({job.phase for job in jobs}):
                todo = [job for job in jobs if job.phase == phase and not self.done(job)]
                last = all(job.phase == phase for job in jobs)
                end = (1 - WARM_SHARE) * self.left() if phase == WARM and not last else 0.0
                self._phase(sorted(todo, key=lambda job: (first(job), -job.seconds)), end, by_name)
        finally:
            self._stop()

    def _phase(self, todo: list[Job], end: float, by_name: dict[str, Job]) -> None:
        """Runs them until all are through or no more than ``end`` seconds are left."""
        while (todo or self.running) and self.left() > end:
            self._reap()
            for job in list(todo):
                waits = bool(job.needs) and not self.done(by_name[job.needs])
                if self.left() - end < job.least:
                    todo.remove(job)
                    self.say("no time for", job.name)
                elif waits and job.needs not in {*self.running, *(other.name for other in todo)}:
                    todo.remove(job)
                    self.say(job.name, "waits in vain for", job.needs)
                elif not waits and (gpu := self._free_gpu(job)) is not None:
                    todo.remove(job)
                    self._start(job, gpu)
            time.sleep(0.02)
        self._reap()
        self._stop()

    def _free_gpu(self, job: Job) -> str | None:
        """The GPU on which it can begin now; None if there is none."""
        used = collections.Counter(gpu for _, _, _, gpu in self.running.values())
        best = min(self.gpus, key=lambda gpu: used[gpu])
        if job.phase == QUIET:
            return best if not used[best] else None
        busy = sum(other.cores for other, _, _, _ in self.running.values())
        if self.running and busy + job.cores > self.slots:
            return None
        return ",".join(self.gpus) if job.every_gpu else best

    def _start(self, job: Job, gpu: str) -> None:
        folder = self.folder(job)
        mark = folder / "version"
        if mark.exists() and mark.read_text() != job.version:
            self.say(job.name, "was of other sources: begun anew")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(job.version)
        # Of a process that runs beside many others no library may take all cores.
        # One that measures finds all compiled, and needs no processes that wait for something to compile.
        beside = {} if job.phase == QUIET else {"OMP_NUM_THREADS": str(job.cores)}
        beside["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        caches = {f"{name.upper()}_CACHE_DIR": str(self.out / "cache" / name) for name in ("triton", "torchinductor")}
        env = environment() | caches | beside | job.env | {"CUDA_VISIBLE_DEVICES": gpu}
        filled = {"{out}": str(folder), "{seconds}": str(max(1, int(min(self.left() - 5, LONGEST))))}
        command = [re.sub(r"\{\w+\}", lambda found: filled[found[0]], part) for part in job.command]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        self.running[job.name] = (job, process, time.monotonic(), gpu)
        self.say("begin", job.name, f"on GPU {gpu}, {job.seconds:.0f} s expected")

    def _reap(self) -> None:
        for name, (job, process, began, _) in list(self.running.items()):
            if process.poll() is None:
                if time.monotonic() - began > PATIENCE * job.seconds:
                    self._stop(name)
                continue
            del self.running[name]
            # What failed while it compiled fails again when it is measured, and is told there.
            if process.returncode == 0 or (job.phase == WARM and process.returncode > 0):
                (self.folder(job) / "done").write_text(job.version)
            result = "done" if process.returncode == 0 else f"FAILED ({process.returncode}), see its log:"
            self.say(result, name, f"in {time.monotonic() - began:.0f} s")

    def _stop(self, *names: str) -> None:
        """Ends what still runs, or those of ``names``, with all that they started."""
        ended = {name: self.running.pop(name) for name in names or tuple(self.running)}
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for _, process, _, _ in ended.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            deadline = time.monotonic() + STOP_SECONDS / 2
            while time.monotonic() < deadline and any(process.poll() is None for _, process, _, _ in ended.values()):
                time.sleep(0.02)
        for name in ended:
            self.say("stopped", name)


def healthy(gpus: Sequence[str], out: Path) -> list[str]:
    """The GPUs that copy and multiply nearly as fast as the best of them; says which are left out."""

    def ask(gpu: str) -> dict[str, float]:
        command = [part.replace("{out}", str(out / "cache" / "health")) for part in words("health")]
        env = environment() | {"CUDA_VISIBLE_DEVICES": gpu}
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError, IndexError):
            told = subprocess.run(command, env=env, capture_output=True, timeout=120, check=False).stdout
            return dict(json.loads(told.splitlines()[-1]))
        return dict.fromkeys(CEILINGS, 0.0)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = dict(zip(gpus, pool.map(ask, gpus), strict=True))
    best = {name: max((1.0, *(each[name] for each in found.values()))) for name in CEILINGS}
    fine = [gpu for gpu, each in found.items() if all(each[name] >= HEALTHY * best[name] for name in CEILINGS)]
    for gpu, each in found.items():
        shown = ", ".join(f"{name} {each[name]:.0f}" for name in CEILINGS)
        print(f"GPU {gpu}: {shown}" + ("" if gpu in fine else "  LEFT OUT"), flush=True)
    return fine


# --- merging --------------------------------------------------------------------------------------------------------


def read(path: Path) -> pd.DataFrame:
    if path.suffix == ".jsonl":
        return pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def slow_jobs(top: Path) -> set[str]:
    """The jobs whose ceilings are far below the best of their kind of GPU; says all ceilings."""
    tables = {path: read(path)[list(CEILINGS)].astype(float) for path in sorted(top.glob("*/*/ceilings.csv"))}
    slow = set()
    for path, table in tables.items():
        best = pd.concat([other for place, other in tables.items() if place.parent.name == path.parent.name]).max()
        name, own = path.parent.parent.name, table.min()
        slow |= {name} if (own < HEALTHY * best).any() else set()
        print(f"{name}: {own.round().to_dict()}" + ("  SLOW: left out" if name in slow else ""))
    return slow


def merge(top: Path, results: Path, jobs: Sequence[Job], *, dry: bool = False) -> None:
    """Takes the rows of every job's folder in ``top`` into ``results``/<gpu>, the oldest job's first."""
    slow, by_name, touched = slow_jobs(top), {job.name: job for job in jobs}, set()
    for mark in sorted(top.glob("*/version"), key=lambda path: path.stat().st_mtime):
        folder, job = mark.parent, by_name.get(mark.parent.name)
        if job is None or mark.read_text() != job.version:
            print(f"{folder.name}: REFUSED, it is of other sources")
            continue
        if folder.name in slow:
            continue
        for path in sorted(path for path in folder.glob("*/*") if path.suffix in (".csv", ".jsonl")):
            target, rows = results / path.parent.name / path.name, read(path)
            packages = rows["package"][rows["package"].str.startswith(f"{kernelbook.__version__}+")]
            if (packages != job.version).any():  # those of a page's own kernels have another name
                print(f"{folder.name}: {path.name} REFUSED, it has rows of other sources")
                continue
            print(f"{folder.name}: {len(rows)} rows of {path.name}")
            if dry:
                continue
            if path.suffix == ".jsonl":
                for line in path.read_text().splitlines():
                    same_loss._record(target, json.loads(line))
            else:
                if job.replaces and path.name != "ceilings.csv" and (folder / "done").exists():
                    target.unlink(missing_ok=True)
                record.write_results(target, rows, key=json.loads(path.with_suffix(".key").read_text()))
            touched.add(target.parent)
        for path in folder.glob("*.json"):
            print(f"{folder.name}: {path} replaces that of book/evidence, by hand, where it went further")
    for place in touched:
        record.drop_unused_ceilings(place)


# --- the command line -----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Lists, runs or merges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=86400, help="when everything has ended (default: a day)")
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "measure", help="default: _build/measure")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="REGEX",
        help="jobs whose name has one of these, the first one's first",
    )
    parser.add_argument("--gpus", help="by number, with commas between (default: all)")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="ROOM=FOLDERS",
        help="with peers that only this room's jobs import",
    )
    parser.add_argument("--list", action="store_true", help="say what there is to do")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="take the rows in DIR into book/results")
    parser.add_argument("--dry", action="store_true", help="with --merge: only say what would be taken")
    given = parser.parse_args(arguments)
    if wrong := [text for text in given.also if "=" not in text or text.split("=")[0] not in CASE_BY_CASE]:
        parser.error(f"--also must be ROOM=FOLDERS with a room of {', '.join(CASE_BY_CASE)}, got {wrong[0]!r}")
    out = (given.merge or given.out).resolve()
    jobs = plan(out, given.also)
    if given.merge:
        merge(out, record.results_dir(), jobs, dry=given.dry)
        return 0

    def first(job: Job) -> int:
        """Which expression is the first for it, or for a job that waits for it."""
        names = [job.name, *(other.name for other in jobs if other.needs == job.name)]
        return min((i for i, regex in enumerate(given.only) for name in names if re.search(regex, name)), default=-1)

    jobs = [job for job in jobs if first(job) >= 0]
    if given.list:
        for job in sorted(jobs, key=lambda job: (job.phase, first(job), -job.seconds)):
            print(f"{PHASES[job.phase]:6} {job.seconds:5.0f} s  {job.name}")
        return 0
    visible = (
        given.gpus or os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    )
    began = time.monotonic()
    gpus = [gpu for gpu in visible.split(",") if gpu]
    if any(job.phase == QUIET for job in jobs):
        gpus = healthy(gpus, out)
    if not gpus:
        print("measure: no GPU runs kernels here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # who ends this ends the jobs too
    scheduler = Scheduler(out, gpus, given.seconds - STOP_SECONDS - (time.monotonic() - began))
    scheduler.run(jobs, first)
    done = sum(map(scheduler.done, jobs))
    print(f"{done} of {len(jobs)} jobs are done. For the rows: python tools/measure.py --merge {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
