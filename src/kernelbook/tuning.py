"""``python -m kernelbook tune``: finds plans that are faster on the GPU at hand than the rules.

A room's benchmark gives cases, each with inputs, a reference and a call of ours (:class:`kernelbook.timing.Case`). During
that call planners are asked (:mod:`kernelbook.autotune`): each problem that one of them is asked for is tuned, one after the
other. Every candidate is checked against float64 before it is timed, and a plan is kept only if it is faster than the rule's
by :data:`GAIN` when both are timed in turn.

Candidates run in another process, which writes down each one before it starts. One that brings this process down, or does not
come back, is skipped by the next.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm.auto import tqdm

from kernelbook import autotune, check, runtime, timing

# isort: split
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

__all__ = ["GAIN", "add_arguments", "main", "tune", "tune_case"]

GAIN = 1.02  # a difference of a per cent is within what two runs differ by
FINALISTS = 3  # candidates that are timed again, in turn with the rule's
STALLED_S = 120.0  # without a word from the other process
COMPILERS = 12  # processes that compile candidates beforehand, at most
MEMORY_EACH = 3 * 2**30  # bytes of free GPU memory for each of them

Cases = Callable[[Mapping[str, float] | None], Iterator[timing.Case]]


def add_arguments(parser: argparse.ArgumentParser, rooms: Sequence[str]) -> None:
    """The options of the command."""
    parser.add_argument("room", nargs="?", choices=rooms, help="what to tune (default: every room)")
    parser.add_argument("--shape", help="sizes of your own instead of the documented ones, e.g. 'M=4096 N=5120'")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so many (default: 20)")
    parser.add_argument("--export", action="store_true", help="write what was found into the package, to be committed")


def parse_shape(text: str | None) -> dict[str, float] | None:
    """``M=4096 active=0.1`` -> numbers by name."""
    try:
        pairs = [part.split("=") for part in (text or "").replace(",", " ").split()]
        return {name: float(value) for name, value in pairs} or None
    except ValueError:
        raise ValueError(f"tune: --shape must be like 'M=4096 N=5120', got {text!r}") from None


# --- one case -------------------------------------------------------------------------------------------------------


class Journal:
    """What has been tried: a line of JSON each, written before and after, so that it outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]

    def write(self, **entry: Any) -> None:
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def tried(self, **what: Any) -> dict[str, dict[str, Any]]:
        """The last entry of each candidate of a problem, by its text; without an outcome it brought the process down."""
        found = [e for e in self.entries if "plan" in e and what.items() <= e.items()]
        return {json.dumps(e["plan"]): e for e in found}

    def winners(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(e["planner"], e["key"]): e for e in self.entries if "winner" in e}


def _known(planner: autotune.Planner, problem: Sequence[Any], plan: Any) -> Any:
    """The candidate that a file holds as ``plan``, or ``None``."""
    return next((c for c in planner.candidates(*problem) if autotune.as_json(c) == plan), None)


def tune_case(
    case: timing.Case,
    journal: Journal,
    *,
    deadline: float = float("inf"),
    warm: Callable[[str, str, int], None] | None = None,
) -> None:
    """Tunes each problem that the case's call asks planners for and that the journal has no winner for."""
    torch.manual_seed(0)
    problem = case.build()
    assert isinstance(problem, timing.Problem)
    call = problem.providers["kernelbook"]
    ours = dataclasses.replace(
        problem,
        providers={"kernelbook": call},
        truth=functools.cache(problem.truth),
        baseline=functools.cache(problem.baseline),
    )
    done: set[tuple[str, str]] = set()
    with contextlib.ExitStack() as chosen:
        while time.time() < deadline:
            with autotune.watched() as asked:
                call()
            found = next((what for what in asked if what not in done), None)
            if found is None:
                return
            done.add(found)
            (name, key), planner = found, autotune.planners()[found[0]]
            before = journal.winners().get(found)
            if before is None:
                if warm is not None:
                    warm(name, key, len(_candidates(planner, asked[found])))
                _tune_problem(case, planner, key, asked[found], ours, call, journal, deadline)
            winner = journal.winners().get(found, {}).get("winner")
            plan = None if winner is None else _known(planner, asked[found], winner)
            if plan is not None and before is not None and before["case"] != str(case):
                rule, tuned = _in_turn(name, key, [planner.rule(*asked[found]), plan], call)
                if tuned > GAIN * rule:  # one plan stands for both cases, and loses in this one
                    journal.write(planner=name, key=key, case=str(case), winner=None)
                    _strike(autotune.own_plans(runtime.properties().name), name, key)
                    plan = None
            if plan is not None:
                chosen.enter_context(autotune.using(name, key, plan))


def _candidates(planner: autotune.Planner, problem: Sequence[Any]) -> list[Any]:
    """The rule's plan, then the candidates, each once."""
    plans = [planner.rule(*problem), *planner.candidates(*problem)]
    return list({json.dumps(autotune.as_json(plan)): plan for plan in plans}.values())


def _tune_problem(
    case: timing.Case,
    planner: autotune.Planner,
    key: str,
    problem: Sequence[Any],
    ours: timing.Problem,
    call: Callable[[], Any],
    journal: Journal,
    deadline: float,
) -> None:
    """Checks and times the candidates of one problem, and writes the winner (or that the rule stays) into the journal."""
    what = {"planner": planner.name, "key": key}
    plans = _candidates(planner, problem)
    before = journal.tried(**what)
    times: dict[int, float] = {}
    for i, plan in enumerate(plans):
        about = {**what, "plan": autotune.as_json(plan)}
        known = before.get(json.dumps(about["plan"]))
        if known is not None:
            if "us" in known:
                times[i] = known["us"]
            elif "outcome" not in known:
                journal.write(**about, outcome="brought the process down")
            continue
        if i and time.time() > deadline:
            return
        journal.write(**about)
        try:
            with autotune.using(planner.name, key, plan):
                timing.error_ratios(ours)
                times[i] = timing.measure(call, warmup_ms=2, rep_ms=15, min_samples=10).ms * 1e3
        except check.CheckError as error:
            journal.write(**about, outcome=f"wrong: {error}")
        except (OutOfResources, PTXASError, CompilationError, torch.OutOfMemoryError) as error:
            journal.write(**about, outcome=f"does not fit: {type(error).__name__}")
        else:
            journal.write(**about, outcome="ok", us=round(times[i], 3), count=len(plans))
    best = sorted((i for i in times if i), key=times.__getitem__)[:FINALISTS]
    if 0 not in times or not best or times[best[0]] > times[0]:
        journal.write(**what, case=str(case), winner=None)
        return
    finalists = (0, *best)
    medians = dict(zip(finalists, _in_turn(planner.name, key, [plans[i] for i in finalists], call), strict=True))
    winner = min(medians, key=medians.__getitem__)
    if medians[0] < GAIN * medians[winner]:
        journal.write(**what, case=str(case), winner=None)
        return
    entry = {
        "plan": autotune.as_json(plans[winner]),
        "us": round(medians[winner], 2),
        "rule_us": round(medians[0], 2),
        "case": str(case),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    _keep(autotune.own_plans(runtime.properties().name), {planner.name: {key: entry}})
    journal.write(**what, case=str(case), winner=entry["plan"], us=entry["us"], rule_us=entry["rule_us"])


def _in_turn(name: str, key: str, plans: Sequence[Any], call: Callable[[], Any]) -> list[float]:
    """The time of the call with each plan, in microseconds: the medians of rounds, in which each has its turn."""
    rounds: list[list[float]] = [[] for _ in plans]
    for _ in range(3):
        for plan, samples in zip(plans, rounds, strict=True):
            with autotune.using(name, key, plan):
                samples.append(timing.measure(call, warmup_ms=2, rep_ms=40).ms * 1e3)
    return [statistics.median(samples) for samples in rounds]


def _strike(path: Path, name: str, key: str) -> None:
    plans = autotune.read_plans(path)
    plans.get(name, {}).pop(key, None)
    autotune.write_plans(path, runtime.properties().name, plans)


def _keep(path: Path, new: autotune.Plans) -> None:
    """Adds plans to a file, over those for the same problems."""
    plans = autotune.read_plans(path)
    for name, found in new.items():
        plans[name] = {**plans.get(name, {}), **found}
    autotune.write_plans(path, runtime.properties().name, plans)


# --- the other process ----------------------------------------------------------------------------------------------


def _cases_of(room: str, shape: Mapping[str, float] | None) -> list[timing.Case]:
    from kernelbook import cli

    tuning_cases: Cases | None = getattr(cli._bench_of(room), "tuning_cases", None)
    if tuning_cases is None:
        return []
    try:
        return list(tuning_cases(shape))
    except KeyError as missing:
        raise ValueError(f"tune: --shape of {room} must give {missing.args[0]}, got {', '.join(shape or ())}") from None


@functools.lru_cache(maxsize=1)
def _call_of(room: str, shape: tuple[tuple[str, float], ...], index: int) -> Callable[[], Any]:
    problem = _cases_of(room, dict(shape) or None)[index].build()
    assert isinstance(problem, timing.Problem)
    return problem.providers["kernelbook"]


def _compile_some(
    room: str, shape: tuple[tuple[str, float], ...], index: int, name: str, key: str, numbers: Sequence[int]
) -> None:
    """Runs candidates of a problem once each, so that Triton's cache has their kernels; in a process of its own."""
    call = _call_of(room, shape, index)
    with autotune.watched() as asked:
        call()
    planner = autotune.planners()[name]
    if (name, key) not in asked:
        return
    plans = _candidates(planner, asked[name, key])
    for number in numbers:
        with (
            contextlib.suppress(OutOfResources, PTXASError, CompilationError),
            autotune.using(name, key, plans[number]),
        ):
            call()
            torch.cuda.synchronize()


class _Compilers:
    """Processes that compile the candidates of a problem side by side: most of the time of tuning is the compiler's."""

    def __init__(self) -> None:
        count = 0
        if runtime.DEVICE.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
            count = min(COMPILERS, (os.cpu_count() or 1) - 2, free // MEMORY_EACH)
        self.count = count
        self.pool = ProcessPoolExecutor(count, mp_context=get_context("spawn")) if count > 1 else None

    def warm(
        self, room: str, shape: tuple[tuple[str, float], ...], index: int, name: str, key: str, total: int
    ) -> None:
        if self.pool is None or total < 4:
            return
        shares = [range(start, total, self.count) for start in range(min(self.count, total))]
        try:
            list(
                self.pool.map(
                    functools.partial(_compile_some, room, shape, index, name, key), shares, timeout=STALLED_S / 2
                )
            )
        except Exception:  # a candidate that brings a process down is found, and told, when it is timed
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None

    def stop(self) -> None:
        if self.pool is not None:
            with contextlib.suppress(BrokenProcessPool):
                self.pool.shutdown(cancel_futures=True)


def _work(job: Mapping[str, Any], journal: Journal) -> None:
    """Tunes the cases of a job that the journal does not have as finished."""
    finished = {(e["room"], e["index"]) for e in journal.entries if "finished" in e}
    shape = tuple(sorted((job["shape"] or {}).items()))
    compilers = _Compilers()
    for room in job["rooms"]:
        for index, case in enumerate(_cases_of(room, job["shape"])):
            if (room, index) in finished or time.time() > job["deadline"]:
                continue
            journal.write(starts=str(case))
            try:
                warm = functools.partial(compilers.warm, room, shape, index)
                tune_case(case, journal, deadline=job["deadline"], warm=warm)
            except (torch.OutOfMemoryError, check.CheckError) as error:
                journal.write(left_out=f"{case}: {type(error).__name__}: {str(error)[:200]}")
            if time.time() < job["deadline"]:
                journal.write(finished=str(case), room=room, index=index)
            torch.cuda.empty_cache()
    compilers.stop()


# --- the command ----------------------------------------------------------------------------------------------------


def supervise(command: Sequence[str], journal: Path, *, stalled_s: float = STALLED_S, quiet: bool = False) -> int:
    """Runs ``command``, which writes into the journal, until it ends well, again and again where it does not.

    It is killed where it writes nothing for ``stalled_s``, and given up where it gets no further in two attempts.
    Returns how often it was started.
    """
    starts, idle, seen = 0, 0, 0
    bar = tqdm(unit="candidate", disable=quiet)
    while idle < 2:
        starts, before = starts + 1, seen
        process = subprocess.Popen(command, env={**os.environ, "KERNELBOOK_PLANS": "rules"})
        try:
            changed = time.time()
            while process.poll() is None:
                time.sleep(0.2)
                entries = Journal(journal).entries
                if len(entries) > seen:
                    changed = time.time()
                    for entry in entries[seen:]:
                        _tell(entry, bar)
                    seen = len(entries)
                elif time.time() - changed > stalled_s:
                    process.kill()
        finally:
            if process.poll() is None:  # interrupted
                process.terminate()
            process.wait()
        for entry in Journal(journal).entries[seen:]:
            _tell(entry, bar)
        seen = len(Journal(journal).entries)
        if process.returncode == 0:
            break
        idle = idle + 1 if seen == before else 0
    bar.close()
    return starts


def _tell(entry: Mapping[str, Any], bar: Any) -> None:
    if "starts" in entry:
        bar.set_description(entry["starts"][:60])
    elif "outcome" in entry:
        bar.update()
        if not entry["outcome"].startswith(("ok", "does not fit")):
            bar.write(f"{entry['planner']} {entry['key']} {entry['plan']}: {entry['outcome']}")
    elif entry.get("winner") is not None:
        bar.write(f"{entry['planner']} {entry['key']}: {entry['rule_us']:.1f} -> {entry['us']:.1f} us")
    elif "left_out" in entry:
        bar.write(f"left out: {entry['left_out']}")


def tune(rooms: Sequence[str], shape: Mapping[str, float] | None, minutes: float, export: bool) -> int:
    """Tunes rooms on the GPU at hand; 1 if a candidate computed something wrong, 2 without a GPU."""
    if runtime.DEVICE.type != "cuda":
        print("tune: there is no GPU here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    name = runtime.properties().name
    for room in rooms:
        _cases_of(room, shape)  # a wrong shape is told before anything starts
    journal = autotune.own_plans(name).with_suffix(".journal")
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.unlink(missing_ok=True)
    job = {"rooms": list(rooms), "shape": shape, "deadline": time.time() + 60 * minutes}
    command = [sys.executable, "-m", "kernelbook.tuning", json.dumps(job), str(journal)]
    try:
        supervise(command, journal)
    except KeyboardInterrupt:
        print("Interrupted. What was found so far is kept.")
    found = Journal(journal)
    rows = [
        (e["planner"], e["key"], f"{e['rule_us']:.1f}", f"{e['us']:.1f}", f"{e['rule_us'] / e['us']:.2f}")
        for e in found.winners().values()
        if e["winner"] is not None
    ]
    print(
        tabulate(rows, headers=("planner", "problem", "rule, us", "tuned, us", "times as fast"), disable_numparse=True)
    )
    print(f"{len(rows)} of {len(found.winners())} problems have a faster plan, in {autotune.own_plans(name)}")
    if export and rows:
        plans = autotune.read_plans(autotune.own_plans(name))
        _keep(autotune.shipped_plans(name), plans)
        print(f"written to {autotune.shipped_plans(name)}")
    wrong = [e for e in found.entries if str(e.get("outcome", "")).startswith("wrong")]
    for entry in wrong:
        print(f"WRONG: {entry['planner']} {entry['key']} {entry['plan']}: {entry['outcome']}", file=sys.stderr)
    return 1 if wrong else 0


def main(given: argparse.Namespace, rooms: Sequence[str]) -> int:
    """The command with its options."""
    try:
        return tune([given.room] if given.room else rooms, parse_shape(given.shape), given.minutes, given.export)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    from kernelbook import tuning  # whose functions other processes can import, which this module's are not

    tuning._work(json.loads(sys.argv[1]), tuning.Journal(Path(sys.argv[2])))
