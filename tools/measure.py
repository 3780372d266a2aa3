"""Measures the whole book on the GPUs of one machine, and takes what it brought into book/results.

usage: python tools/measure.py --seconds S --out DIR [--only REGEX] [--older FILE] [--list]
       python tools/measure.py --merge DIR

First every kernel is compiled by as many processes as there are cores; then jobs that measure, one a GPU and nothing beside
them; then what takes no time, beside each other. A job has a folder in DIR, with its log and its rows, which are written case
by case: whatever is stopped at the end of the time keeps what it has. The same command with the same DIR goes on, on another
machine with such GPUs too: what is done, or has rows of the present sources in DIR, is not measured again; DIR/cache may stay
behind. With --older only what FILE, written by ``make older``, lists for this GPU: in a DIR of its own, whose jobs have fewer cases.
What several GPUs do together, the study of sparse training and chapters with RECORD have commands of their own.
"""

import argparse
import asyncio
import collections
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
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measure_job
import pandas as pd
import record_chapters as chapters
import torch

from kernelbook.lab import older, record
from kernelbook.lab.bench import Bench, benches, same_loss

ROOT = Path(__file__).resolve().parent.parent
WARM, QUIET, LOUD, LAST = range(4)  # phases; each waits for the one before
PHASES = ("warm", "quiet", "loud", "last")
CORES = {WARM: 1, LOUD: 2}  # of a job; in the other phases a job has its GPU for itself, in the last one all of them
WARM_SHARE = 0.4  # of the time, where something comes after it
PATIENCE = 10  # times what was expected, then a job is stopped
STOP_SECONDS = 4  # to stop what runs at the end
LONGEST = 3600  # what a job is told that it has, where there is no end
HEALTHY = 0.8  # of the best GPU's ceilings
START_SECONDS, CASE_SECONDS, JOB_SECONDS = 15, 1.5, 60  # of a process, a case, a job: they decide the order
LONG_SECONDS = {"attention": 3, "moe_block": 3}  # of their cases
PART_SECONDS = 150  # a room's cases are measured in parts of so much: each process costs START_SECONDS again
WARM_CASES = 6  # that a process compiles
CEILINGS = ["copy_gbs", "bf16_tflops"]


@dataclasses.dataclass
class Job:
    """One process. In ``command`` ``{out}`` is its folder and ``{seconds}`` what is left; ``version`` is its sources'."""

    name: str
    command: tuple[str, ...]
    version: str
    phase: int = QUIET
    seconds: float = JOB_SECONDS
    least: float = 2 * START_SECONDS  # without so much time it brings nothing
    needs: str = ""
    replaces: bool = False  # its tables are replaced whole
    writes: str = ""  # a regular expression of the stems of the tables that it writes, whole or a part of them
    part: str = ""  # which part, as ``make older`` lists it
    env: dict[str, str] = dataclasses.field(default_factory=dict)


# --- the plan -------------------------------------------------------------------------------------------------------


def digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:8]


def words(*arguments: object) -> tuple[str, ...]:
    """The command of a job of measure_job.py."""
    return (sys.executable, str(ROOT / "tools" / "measure_job.py"), "{out}", *map(str, arguments))


def named(*parts: object) -> str:
    """The name of a job: the parts, without what a file's name may not have."""
    texts = (re.sub(r"\W+", "-", str(part)).strip("-") for part in parts)
    return "-".join(filter(None, texts))


def plan(out: Path, older_file: Path | None = None) -> list[Job]:
    """All jobs, or those that measure what ``older_file`` lists for the GPU at hand."""
    listed = None if older_file is None else older.listed(older_file.read_text(), record.device_slug())
    only = () if older_file is None else ("--older", str(older_file.resolve()))
    sources = digest(*(path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))))
    script, what = ROOT / "tools" / "evidence" / "record.py", "fuzz warm repeats largest handshake sanitizers"
    command = (sys.executable, str(script), "--only", *what.split(), "--seconds", "{seconds}", "--out", "{out}")
    evidence = Job("evidence", command, sources, LAST, LONGEST, 2 * JOB_SECONDS)
    rooms = itertools.chain.from_iterable(_of_bench(one, out, listed, only) for one in benches())
    jobs = [*rooms, *_chapters(sources), *_same_loss(), evidence]
    if listed is None:
        return jobs
    return [
        job
        for job in jobs
        if only[0] in job.command
        or any(re.fullmatch(job.writes, stem) and case in ("", job.part) for stem, case in listed)
    ]


def _of_bench(one: Bench, out: Path, listed: set[tuple[str, str]] | None, only: tuple[str, ...]) -> Iterator[Job]:
    """The jobs of a bench with cases, of those in ``listed`` if it is given, or of one that has parts."""
    version = one.package()
    for which, cases in (("room", one.cases), ("models", one.models)) if one.cases is not None else ():
        stem = one.name if which == "room" else which
        chosen = [case for case in cases() if listed is None or (stem, str(case)) in listed]
        groups = collections.Counter(measure_job.group(one.name, case) for case in chosen)
        for (select, searched), count in groups.items():
            name = named(one.name, which if which == "models" else "", select if searched else "")
            # What a peer's search found is kept under a key without the rank: a cache each.
            env = {"TRITON_CACHE_DIR": str(out / "cache" / f"triton-{name}")} if searched else {}
            n = count if searched else math.ceil(count / WARM_CASES)
            for i, share in itertools.product(range(n), ("0/2", "1/2") if searched else ("0/1",)):
                command = words("warm", share, one.name, which, select, f"{i}/{n}", *only)
                yield Job(named("warm", name, i, share[0]), command, version, WARM, env=env)
            env = env | {"TRITON_CACHE_AUTOTUNING": "1"} if searched else {}
            total = count * LONG_SECONDS.get(one.name, CASE_SECONDS)
            n = math.ceil(total / PART_SECONDS)
            for i in range(n):
                command = words("cases", one.name, which, select, f"{i}/{n}", *only)
                seconds = START_SECONDS + total / n
                yield Job(named(name, i), command, version, seconds=seconds, env=env)
    if one.extras is not None:
        writes = rf"{one.name}_(?!steps$)\w+"  # the steps are a chapter's
        yield Job(f"extras-{one.name}", words("extras", one.name), version, replaces=True, writes=writes)
    for part in one.parts:
        command = words("command", "bench", one.name, "--select", part)
        about = {"writes": rf"{one.name}\w*", "part": part.strip()}
        if "layers" in one.options:  # one compiles what all run
            name, few = named("warm", one.name, part), (*command, "--layers", "1")
            yield Job(name, few, version, WARM, 2 * JOB_SECONDS, **about)
        yield Job(named(one.name, part), command, version, seconds=2 * JOB_SECONDS, **about)


def _chapters(sources: str) -> Iterator[Job]:
    for path in sorted(chapters.NOTEBOOKS.glob("*.ipynb")):
        name, version = path.stem, digest(sources, path.read_text())
        if "RECORD_STEPS = False" in path.read_text():
            about: dict[str, Any] = {"writes": f"{name}_steps"}
            yield Job(f"warm-ladder-{name}", words("ladder", name, "warm"), version, WARM, **about)
            yield Job(
                f"ladder-{name}", words("ladder", name), version, seconds=2 * START_SECONDS, replaces=True, **about
            )
        yield Job(f"notebook-{name}", words("notebook", name), version, LOUD, 2 * JOB_SECONDS, JOB_SECONDS)


def _same_loss() -> Iterator[Job]:
    """All ways begin with one model, which a job of its own trains."""
    version, loss = same_loss.BENCH.package(), ("loss", "--base", "{out}/../loss-base/base.pt", "--ways")
    writes = "same_loss_curves"
    yield Job("loss-base", words(*loss), version, LOUD, 4 * JOB_SECONDS, JOB_SECONDS, writes=writes)
    for way, seed in itertools.product(same_loss.WAYS, range(3)):
        command = words(*loss, way, "--seeds", seed)
        how = {"needs": "loss-base", "writes": writes}
        yield Job(named("loss", way, seed), command, version, LOUD, JOB_SECONDS, JOB_SECONDS, **how)


# --- running --------------------------------------------------------------------------------------------------------


class Scheduler:
    """Runs jobs on ``gpus`` until ``seconds`` are over, phase by phase, the longest first."""

    def __init__(self, out: Path, gpus: Sequence[str], seconds: float, cores: int | None = None) -> None:
        self.out, self.gpus, self.cores = out, list(gpus), cores or len(os.sched_getaffinity(0))
        self.began, self.seconds = time.monotonic(), seconds
        self.tasks: dict[str, asyncio.Task[None]] = {}

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

    async def run(self, jobs: Sequence[Job]) -> None:
        """Everything of ``jobs`` that is not done yet and has the time."""
        self.out.mkdir(parents=True, exist_ok=True)
        # Who ends this ends the jobs too.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
        by_name = {job.name: job for job in jobs}
        last = max((job.phase for job in jobs), default=WARM)
        for phase in range(last + 1):
            end = (1 - WARM_SHARE) * self.left() if phase == WARM != last else 0.0
            todo = [job for job in jobs if job.phase == phase and not self.done(job)]
            places: asyncio.Queue[str] = asyncio.Queue()
            for gpu in self._places(phase):
                places.put_nowait(gpu)
            for job in sorted(todo, key=lambda job: -job.seconds):
                work = self._job(job, by_name.get(job.needs), places, end)
                self.tasks[job.name] = asyncio.create_task(work)
            await asyncio.gather(*(self.tasks[job.name] for job in todo))

    def _places(self, phase: int) -> list[str]:
        """For each job that runs at a time its GPU; in the last phase all of them are one's."""
        if phase in CORES:
            return list(itertools.islice(itertools.cycle(self.gpus), max(1, self.cores // CORES[phase])))
        return [",".join(self.gpus)] if phase == LAST else self.gpus

    async def _job(self, job: Job, needed: Job | None, places: "asyncio.Queue[str]", end: float) -> None:
        """Runs it where a place becomes free, unless no more than ``end`` seconds and what it needs at least are left by then."""
        if needed is not None:
            if needed.name in self.tasks:
                await self.tasks[needed.name]
            if not self.done(needed):
                self.say(job.name, "waits in vain for", needed.name)
                return
        gpu = await places.get()
        try:
            if self.left() - end < job.least:
                self.say("no time for", job.name)
            else:
                await self._process(job, gpu, end)
        finally:
            places.put_nowait(gpu)

    async def _process(self, job: Job, gpu: str, end: float) -> None:
        folder, began = self.folder(job), time.monotonic()
        mark = folder / "version"
        if mark.exists() and mark.read_text() != job.version:
            self.say(job.name, "was of other sources: begun anew")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(job.version)
        env = {f"{name.upper()}_CACHE_DIR": str(self.out / "cache" / name) for name in ("triton", "torchinductor")}
        # One that measures finds all compiled, and needs no processes that wait for something to compile.
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        if job.phase in CORES:  # of a process that runs beside many others no library may take all cores
            env["OMP_NUM_THREADS"] = str(CORES[job.phase])
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        env |= {"PYTHONPATH": path.rstrip(os.pathsep), "CUDA_VISIBLE_DEVICES": gpu}
        filled = {"{out}": str(folder), "{seconds}": str(max(1, int(min(self.left() - 5, LONGEST))))}
        command = [re.sub(r"\{\w+\}", lambda found: filled[found[0]], part) for part in job.command]
        self.say("begin", job.name, f"on GPU {gpu}, {job.seconds:.0f} s expected")
        with (folder / "log").open("ab") as log:
            how = {"stdout": log, "stderr": log, "cwd": ROOT, "env": os.environ | env | job.env}
            process = await asyncio.create_subprocess_exec(*command, **how, start_new_session=True)
        try:
            code = await asyncio.wait_for(process.wait(), min(self.left() - end, PATIENCE * job.seconds))
        except asyncio.TimeoutError:
            self.say("stopped", job.name)
            return
        finally:
            await _end(process)
        # What failed while it compiled fails again when it is measured, and is told there.
        if code == 0 or (job.phase == WARM and code > 0):
            (folder / "done").write_text(job.version)
        result = "done" if code == 0 else f"FAILED ({code}), see its log:"
        self.say(result, job.name, f"in {time.monotonic() - began:.0f} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a process, if it still runs, with all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, asyncio.TimeoutError):
            os.killpg(process.pid, sign)
            await asyncio.wait_for(process.wait(), STOP_SECONDS / 2)


# --- merging --------------------------------------------------------------------------------------------------------


def slow_jobs(top: Path) -> set[str]:
    """The jobs whose ceilings are far below the best of their kind of GPU; says all ceilings."""
    paths = sorted(top.glob("*/*/ceilings.csv"))
    tables = [pd.read_csv(path).assign(job=path.parent.parent.name, kind=path.parent.name) for path in paths]
    if not tables:
        return set()
    rows = pd.concat(tables)
    slow = (rows[CEILINGS] < HEALTHY * rows.groupby("kind")[CEILINGS].transform("max")).any(axis=1)
    print(rows.groupby("job")[CEILINGS].min().to_string())
    return set(rows.loc[slow, "job"])


def merge(top: Path, results: Path, jobs: Sequence[Job]) -> None:
    """Takes the rows of every job's folder in ``top`` into ``results``/<gpu>, the oldest job's first."""
    slow, by_name, touched = slow_jobs(top), {job.name: job for job in jobs}, set()
    for mark in sorted(top.glob("*/version"), key=lambda path: path.stat().st_mtime):
        folder, job = mark.parent, by_name.get(mark.parent.name)
        if job is None or mark.read_text() != job.version:
            print(f"{folder.name}: REFUSED, it is of other sources")
            continue
        if folder.name in slow:
            print(f"{folder.name}: REFUSED, its GPU was slow; to be measured anew")
            (folder / "done").unlink(missing_ok=True)
            continue
        for path in folder.glob("*/*.jsonl"):
            lines = path.read_text().splitlines()
            print(f"{folder.name}: {len(lines)} lines of {path.name}")
            for line in lines:
                same_loss._record(results / path.parent.name / path.name, json.loads(line))
        for path in sorted(folder.glob("*/*.csv")):
            target, rows = results / path.parent.name / path.name, pd.read_csv(path, dtype=str, keep_default_na=False)
            print(f"{folder.name}: {len(rows)} rows of {path.name}")
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
    parser.add_argument("--only", default="", metavar="REGEX", help="jobs whose name has this, and what they need")
    parser.add_argument(
        "--older", type=Path, metavar="FILE", help="only what 'make older' printed into FILE of this GPU"
    )
    parser.add_argument("--list", action="store_true", help="say what there is to do")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="take the rows in DIR into book/results")
    given = parser.parse_args(arguments)
    out = (given.merge or given.out).resolve()
    jobs = plan(out, given.older)
    if given.merge:
        if not any(out.glob("*/version")):
            parser.error(f"--merge must name a folder in which jobs have written rows, got {given.merge}")
        merge(out, record.results_dir(), jobs)
        return 0
    chosen = [job for job in jobs if re.search(given.only, job.name)]
    needed = {job.needs for job in chosen}
    jobs = [job for job in jobs if job in chosen or job.name in needed]
    if given.list:
        for job in sorted(jobs, key=lambda job: (job.phase, -job.seconds)):
            print(f"{PHASES[job.phase]:6} {job.seconds:5.0f} s  {job.name}")
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    if not visible:
        print("measure: no GPU runs kernels here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    scheduler = Scheduler(out, visible.split(","), given.seconds - STOP_SECONDS)
    asyncio.run(scheduler.run(jobs))
    done = sum(map(scheduler.done, jobs))
    print(f"{done} of {len(jobs)} jobs are done. For the rows: python tools/measure.py --merge {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
