"""``python -m kernelbook tune``: finds plans that are faster on the GPU at hand than the rules.

A room's benchmark gives cases, each with inputs, a reference and a call of ours (:class:`kernelbook.lab.timing.Case`). During
that call planners are asked (:mod:`kernelbook.plans`): each problem that one of them is asked for is tuned, one after the
other. The search starts at the rule's plan and walks to neighbours of the best one so far, a batch at a time, until some
batches have brought nothing. Every candidate (:mod:`kernelbook.lab.candidates`) is checked against float64 before it is timed,
and a plan is kept only if it is faster than the rule's by :data:`GAIN` when both are timed in turn. At the end every case that
uses a new plan is timed once more with and without it, and a plan with which one of them is slower is struck.

Everything is built, checked and timed in another process. A candidate that brings it down, or does not come back, is skipped.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernelbook import check, plans, runtime
from kernelbook.lab import record, timing
from kernelbook.lab.bench import bench
from kernelbook.lab.candidates import candidates

# isort: split
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["GAIN", "TABLE_COLUMNS", "TABLE_KEY", "add_arguments", "compared", "main", "tune", "write_plans"]

GAIN = 1.02  # a difference of a per cent is within what two runs differ by
BATCH = 14  # candidates that are compiled side by side and then timed
IDLE_BATCHES = 2  # that bring nothing, after which the search ends
SLOWER = 1.01  # from here on a case counts as slower with the new plans
FINALISTS = 2  # candidates that are timed again, in turn with the rule's
SEARCH_SHARE = 0.8  # of the time; the rest is for comparing whole cases
STALLED_S = 120.0  # without an answer from the other process
MEMORY_EACH = 3 * 2**30  # bytes of free GPU memory for each process that compiles

# A row says how long a case takes by the rules and with the plans in use, timed in turn.
TABLE_COLUMNS = ("run", *record.KEY, "rules_us", "plans_us", *record.ENVIRONMENT)
TABLE_KEY = tuple(name for name in record.KEY if name != "provider")
# A row says what the search found for one problem; where the rule stays, ``plan_us`` is its time.
SEARCH_COLUMNS = ("run", "planner", "problem", "case", "tried", "rule_us", "plan_us", *record.ENVIRONMENT)
SEARCH_KEY = ("planner", "problem")

Place = tuple[str, tuple[tuple[str, float], ...], int]  # of a case: the room, sizes by name, its number
Decisions = dict[tuple[str, str], dict[str, Any]]  # by planner and key; ``plan`` is None where the rule stays


def add_arguments(parser: argparse.ArgumentParser, rooms: Sequence[str]) -> None:
    """The options of the command."""
    parser.add_argument("room", nargs="*", metavar="ROOM", help=f"what to tune, of {', '.join(rooms)} (default: all)")
    parser.add_argument("--shape", help="sizes of your own instead of the documented ones, e.g. 'M=4096 N=5120'")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after so many (default: 20)")
    parser.add_argument("--select", help="only the cases whose description matches this regular expression")
    parser.add_argument("--export", action="store_true", help="write what was found into the package, to be committed")
    parser.add_argument(
        "--compare", action="store_true", help="search nothing: time the cases with the plans in use and by the rules"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for <gpu>/search.csv; with --compare for plans.csv"
    )


def parse_shape(text: str | None) -> dict[str, float]:
    """``M=4096 active=0.1`` -> numbers by name."""
    try:
        pairs = [part.split("=") for part in (text or "").replace(",", " ").split()]
        shape = {name: float(value) for name, value in pairs}
        if not all(0 < value < 2**31 for value in shape.values()):
            raise ValueError
        return shape
    except ValueError:
        raise ValueError(f"tune: --shape must be like 'M=4096 N=5120', got {text!r}") from None


# --- files ----------------------------------------------------------------------------------------------------------


def write_plans(path: Path, gpu: str, new: plans.Plans) -> None:
    """Writes a file of plans, a line for each, in one step: a reader never sees half of it."""
    rooms = []
    for name, found in sorted(new.items()):
        lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(found.items()))
        rooms.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    body = ",\n".join(rooms)
    record.replace_file(path, f'{{\n "gpu": {json.dumps(gpu)},\n "plans": {{\n{body}\n }}\n}}\n')
    plans.forget()


def _keep(path: Path, new: plans.Plans) -> None:
    """Adds plans to a file, over those for the same problems."""
    kept = plans.read_plans(path)
    for name, found in new.items():
        kept[name] = {**kept.get(name, {}), **found}
    write_plans(path, runtime.properties().name, kept)


# --- cases ----------------------------------------------------------------------------------------------------------


def _cases_of(room: str, shape: Mapping[str, float]) -> list[timing.Case]:
    """The room's cases to tune, those that matter most first."""
    tuning_cases = bench(room).tuning_cases
    try:
        return list(tuning_cases(shape or None)) if tuning_cases else []
    except KeyError as missing:
        raise ValueError(f"tune: --shape of {room} must give {missing.args[0]}, got {', '.join(shape)}") from None


def _chosen_cases(
    rooms: Sequence[str], shape: Mapping[str, float], select: str | None
) -> list[tuple[Place, timing.Case]]:
    """The cases to tune, one of each room in turn: where time ends early, every room has had its share."""
    sizes, selected = tuple(sorted(shape.items())), re.compile(select or "")
    found = [
        [((room, sizes, i), case) for i, case in enumerate(_cases_of(room, shape)) if selected.search(str(case))]
        for room in rooms
    ]
    return [entry for turn in itertools.zip_longest(*found) for entry in turn if entry is not None]


# --- in the other process -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _problem(place: Place) -> timing.Problem:
    """The inputs of a case and our call of it; what is right is computed once."""
    room, shape, index = place
    torch.manual_seed(0)
    problem = _cases_of(room, dict(shape))[index].build()
    assert isinstance(problem, timing.Problem)
    return dataclasses.replace(
        problem,
        providers={"kernelbook": problem.providers["kernelbook"]},
        truth=functools.cache(problem.truth),
        baseline=functools.cache(problem.baseline),
    )


@contextlib.contextmanager
def _trying(trial: plans.Plans) -> Iterator[None]:
    """Within the context these plans come before all files."""
    plans.trial.update(trial)
    plans.forget()
    try:
        yield
    finally:
        plans.trial.clear()
        plans.forget()


def asked(place: Place, trial: plans.Plans) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Calls a case once; -> the problems that planners are asked for, by planner and key."""
    with _trying(trial):
        _problem(place).providers["kernelbook"]()
        return {(name, plans.planners()[name].key(problem)): problem for name, problem in plans.asked}


def tried(place: Place, trial: plans.Plans) -> float | str:
    """The time of a case with a plan, in microseconds, if it is right; else what is wrong."""
    problem = _problem(place)
    try:
        with _trying(trial):
            timing.error_ratios(problem)
            return timing.measure(problem.providers["kernelbook"], warmup_ms=1, rep_ms=5, min_samples=10).ms * 1e3
    except check.CheckError as error:
        return f"wrong: {error}"
    except (OutOfResources, PTXASError, CompilationError, torch.OutOfMemoryError) as error:
        return f"does not fit: {type(error).__name__}"


def in_turn(place: Place, trials: Sequence[plans.Plans]) -> list[float]:
    """The time of a case with each plan, in microseconds: the medians of rounds, in which each has its turn."""
    call = _problem(place).providers["kernelbook"]
    rounds: list[list[float]] = [[] for _ in trials]
    for _ in range(5):
        for trial, samples in zip(trials, rounds, strict=True):
            with _trying(trial):
                samples.append(timing.measure(call, warmup_ms=2, rep_ms=20).ms * 1e3)
    return [statistics.median(samples) for samples in rounds]


class LostError(RuntimeError):
    """The other process failed, died or did not answer."""


class Worker:
    """Another process, which calls functions for this one, and is started anew where one of them fails."""

    def __init__(self) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns. Raises :class:`LostError`."""
        try:
            return self.pool.submit(function, *arguments).result(STALLED_S)
        except BrokenProcessPool:
            failed = "the process died"
        except FutureTimeoutError:
            failed = f"no answer in {STALLED_S:.0f} s"
        except Exception as error:  # one of the device leaves nothing of use behind: the process is replaced
            failed = f"{type(error).__name__}: {str(error)[:200]}"
        self.end()
        Worker.__init__(self)
        raise LostError(failed)

    def end(self) -> None:
        """Whatever it is doing."""
        for process in list(self.pool._processes.values()):
            process.kill()
        self.pool.shutdown()


def _begin() -> None:
    os.environ["KERNELBOOK_PLANS"] = "rules"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks


# --- the search -----------------------------------------------------------------------------------------------------


def _distance(a: Any, b: Any) -> float:
    """How far apart two plans are, as files hold them: a factor of two in a number counts 1, up to 2."""
    if isinstance(a, dict) and isinstance(b, dict):
        return sum(_distance(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return sum(map(_distance, a, b))
    if type(a) is type(b) is int and min(a, b) > 0:
        return min(2.0, abs(math.log2(a / b)))
    return 0.0 if a == b else 2.0


def search(
    workers: Sequence[Any], place: Place, found: tuple[str, str], problem: Sequence[Any], won: plans.Plans, deadline: float
) -> dict[str, Any] | None:  # fmt: skip
    """Tries plans for one problem of a case, beside those that have won for others; ``None`` where there was no time.

    All ``workers`` call a batch's candidates once, side by side, so that Triton's cache has their kernels: most of the time
    of tuning is the compiler's. The first of them then checks and times one after the other.
    """
    (name, key), worker = found, workers[0]
    listed = candidates(plans.planners()[name], problem)
    trials = [{**won, name: {**won.get(name, {}), key: {"plan": plan}}} for plan in listed]
    left, times, best, idle = list(range(len(listed))), dict[int, float](), 0, 0
    decision: dict[str, Any] = {"wrong": 0, "plan": None}
    while left and idle < IDLE_BATCHES and time.time() < deadline:
        left.sort(key=lambda i: _distance(listed[i], listed[best]))
        batch, left = left[:BATCH], left[BATCH:]
        if len(workers) > 1:
            with ThreadPoolExecutor() as threads:
                shares = [[trials[i] for i in batch[start :: len(workers)]] for start in range(len(workers))]
                list(threads.map(_compile, workers, itertools.repeat(place), shares))
        for i in batch:
            outcome = _outcome(worker, place, trials[i])
            if isinstance(outcome, float):
                times[i] = outcome
            elif not outcome.startswith("does not fit"):
                decision["wrong"] += outcome.startswith("wrong")
                print(f"{name} {key} {json.dumps(listed[i])}: {outcome}", file=sys.stderr)
        if 0 not in times:
            break  # the rule's own plan does not run here
        fastest = min(times, key=times.__getitem__)
        idle = 0 if times[fastest] < 0.99 * times[best] else idle + 1
        best = fastest
    if not times:
        return None
    decision |= {"tried": len(times), "rule_us": times.get(0, math.nan)}
    if 0 in times and best:
        finalists = [0, *sorted(set(times) - {0}, key=times.__getitem__)[:FINALISTS]]
        medians = dict(zip(finalists, worker(in_turn, place, [trials[i] for i in finalists]), strict=True))
        winner = min(medians, key=medians.__getitem__)
        faster = medians[0] >= GAIN * medians[winner]
        decision |= {"rule_us": medians[0], "us": medians[winner], "plan": listed[winner] if faster else None}
    return decision


def _compile(worker: Any, place: Place, trials: Sequence[plans.Plans]) -> None:
    """Calls a case with each plan once; what is wrong with one is found, and told, when it is timed."""
    for trial in trials:
        with contextlib.suppress(LostError):
            worker(asked, place, trial)


def _outcome(worker: Any, place: Place, trial: plans.Plans) -> float | str:
    try:
        found: float | str = worker(tried, place, trial)
        return found
    except LostError as error:
        return f"failed: {error}"


def tune_case(place: Place, case: timing.Case, workers: Sequence[Any], decisions: Decisions, deadline: float) -> None:
    """Tunes each problem that a case asks planners for and on which there is no decision; writes what is faster."""
    done: set[tuple[str, str]] = set()
    won: plans.Plans = {}
    while time.time() < deadline:
        problems = workers[0](asked, place, won)
        found = next((what for what in problems if what not in done), None)
        if found is None:
            return
        done.add(found)
        if found not in decisions:
            decision = search(workers, place, found, problems[found], won, deadline)
            if decision is None:
                return
            decisions[found] = {"case": str(case), **decision}
            if decision["plan"] is not None:
                entry = {
                    "plan": decision["plan"],
                    **{name: round(decision[name], 2) for name in ("rule_us", "us")},
                    "case": str(case),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "date": datetime.date.today().isoformat(),
                }
                _keep(plans.own_plans(runtime.properties().name), {found[0]: {found[1]: entry}})
                print(f"{' '.join(found)}: {decision['rule_us']:.1f} -> {decision['us']:.1f} us", flush=True)
        if decisions[found]["plan"] is not None:
            won.setdefault(found[0], {})[found[1]] = {"plan": decisions[found]["plan"]}


def compared(worker: Any, place: Place) -> tuple[float, float, list[tuple[str, str]]] | None:
    """How long a case takes by the rules and with the stored plans, in microseconds, each in turn, and which plans.

    ``None`` where no stored plan is used. What is computed with the plans is checked first.
    """
    gpu, stored = runtime.properties().name, plans.Plans()
    for path in (plans.shipped_plans(gpu), plans.own_plans(gpu)):
        for name, found in plans.read_plans(path).items():
            stored.setdefault(name, {}).update(found)
    if not any(name.startswith(f"{place[0]}.") for name in stored):
        return None
    used = [found for found in worker(asked, place, stored) if found[1] in stored.get(found[0], {})]
    if not used:
        return None
    outcome = worker(tried, place, stored)
    if isinstance(outcome, str):
        raise LostError(outcome)
    rules, tuned = worker(in_turn, place, [{}, stored])
    return rules, tuned, used


def strike_where_slower(place: Place, case: timing.Case, worker: Any, decisions: Decisions) -> None:
    """Strikes the user's own plans that a case uses if it is slower with them than by the rules."""
    rules, tuned, used = compared(worker, place) or (1.0, 1.0, [])
    if tuned <= SLOWER * rules:
        return
    path = plans.own_plans(runtime.properties().name)
    kept = plans.read_plans(path)
    for name, key in used:
        kept.get(name, {}).pop(key, None)
        decisions.get((name, key), {})["plan"] = None
        print(f"struck: {name} {key}, with which {case} is slower", flush=True)
    write_plans(path, runtime.properties().name, kept)


# --- the command ----------------------------------------------------------------------------------------------------


def _attempt(action: Callable[..., None], place: Place, case: timing.Case, *more: Any) -> None:
    """Does something with a case; one that fails is left out."""
    try:
        action(place, case, *more)
    except LostError as error:
        print(f"left out: {case}: {error}", file=sys.stderr)


def tune(cases: Sequence[tuple[Place, timing.Case]], minutes: float, export: bool, out: Path | None = None) -> int:
    """Tunes cases on the GPU at hand; 1 if a candidate computed something wrong.

    Args:
        cases: as :func:`_chosen_cases` finds them.
        minutes: how long at most.
        export: whether what was found is written into the package too.
        out: a folder for the record of the search, ``<gpu>/search.csv``.
    """
    gpu, deadline, decisions = runtime.properties().name, time.time() + 60 * minutes * SEARCH_SHARE, Decisions()
    count = min(BATCH, (os.cpu_count() or 1) - 2, torch.cuda.mem_get_info()[0] // MEMORY_EACH)
    workers = [Worker() for _ in range(max(1, count))]
    try:
        for place, case in cases:
            _attempt(tune_case, place, case, workers, decisions, deadline)
        for place, case in cases:
            _attempt(strike_where_slower, place, case, workers[0], decisions)
    except KeyboardInterrupt:
        print("Interrupted. What was found so far is kept.")
    finally:
        for worker in workers:
            worker.end()
    faster = sum(one["plan"] is not None for one in decisions.values())
    print(f"{faster} of {len(decisions)} problems have a faster plan, in {plans.own_plans(gpu)}")
    if out is not None and decisions:
        record.write_results(out / runtime.device_slug() / "search.csv", searched(decisions), key=SEARCH_KEY)
    if export and faster:
        _keep(plans.shipped_plans(gpu), plans.read_plans(plans.own_plans(gpu)))
        print(f"written to {plans.shipped_plans(gpu)}")
    return 1 if any(one["wrong"] for one in decisions.values()) else 0


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> "pd.DataFrame":
    import pandas as pd

    about = {"run": record.new_run(), **record.environment(record.package_version())}
    return pd.DataFrame([{**about, **row} for row in rows], columns=list(columns))


def searched(decisions: Decisions) -> "pd.DataFrame":
    """What was found for each problem, in the columns :data:`SEARCH_COLUMNS`."""
    rows = []
    for (name, key), one in decisions.items():
        what = {"planner": name, "problem": key, "case": one["case"], "tried": one["tried"]}
        plan_us = one["rule_us"] if one["plan"] is None else one["us"]
        rows.append({**what, "rule_us": round(one["rule_us"], 2), "plan_us": round(plan_us, 2)})
    return _table(rows, SEARCH_COLUMNS)


def comparison(cases: Sequence[tuple[Place, timing.Case]], minutes: float, out: Path | None) -> int:
    """Times every case that stored plans are used in with them and by the rules, prints and writes what was found."""
    worker, rows, deadline = Worker(), list[dict[str, Any]](), time.time() + 60 * minutes

    def compare(place: Place, case: timing.Case) -> None:
        found = compared(worker, place)
        if found is not None:
            what = {"op": case.op, "mode": case.mode, "provider": "kernelbook", "dtype": case.dtype_name}
            where = {"shape": case.shape_text, "x_name": case.x_name, "x": f"{case.x:.12g}"}
            rows.append({**what, **where, "rules_us": round(found[0], 2), "plans_us": round(found[1], 2)})
            print(f"{case}: {found[0]:.1f} us by the rules, {found[1]:.1f} with plans", flush=True)

    for place, case in cases:
        if time.time() > deadline:
            print("tune: time is up before all cases were compared", file=sys.stderr)
            break
        _attempt(compare, place, case)
    if rows:
        folder = (out or record.results_dir()) / runtime.device_slug()
        record.write_results(folder / "plans.csv", _table(rows, TABLE_COLUMNS), key=TABLE_KEY)
    print(f"{len(rows)} cases use stored plans")
    return 0


def main(given: argparse.Namespace, rooms: Sequence[str]) -> int:
    """The command with its options; 2 where they are wrong, and without a GPU."""
    try:
        unknown = [room for room in given.room if room not in rooms]
        if unknown:
            raise ValueError(f"tune: ROOM must be of {', '.join(rooms)}, got {', '.join(unknown)}")
        if not given.minutes > 0:
            raise ValueError(f"tune: --minutes must be above zero, got {given.minutes:g}")
        if given.out is not None:
            record.check_folder("tune", given.out)
        cases = _chosen_cases(given.room or list(rooms), parse_shape(given.shape), given.select)
    except re.error as error:
        print(f"tune: --select must be a regular expression, got {given.select!r}: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if runtime.DEVICE.type != "cuda":
        print("tune: no GPU runs kernels here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    if given.compare:
        return comparison(cases, given.minutes, given.out)
    return tune(cases, given.minutes, given.export, given.out)
