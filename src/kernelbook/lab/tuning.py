"""``python -m kernelbook tune``: finds plans that are faster on the GPU at hand than the rules.

A room's benchmark gives cases, each with inputs, a reference and a call of ours (:class:`kernelbook.lab.timing.Case`). During
that call planners are asked (:mod:`kernelbook.plans`): each problem that one of them is asked for is tuned, one after the
other. The search starts at the rule's plan and walks to neighbours of the best one so far, a batch at a time, until some
batches have brought nothing. Every candidate is checked against float64 before it is timed, and a plan is kept only if it is
faster than the rule's by :data:`GAIN` when both are timed in turn. At the end every case that uses a new plan is timed once
more with and without it, and a plan with which one of them is slower is struck.

Candidates run in another process, which writes down each one before it starts. One that brings this process down, or does not
come back, is skipped by the next.
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from kernelbook import check, launching, plans, runtime
from kernelbook.lab import record, timing
from kernelbook.lab.bench import bench

# isort: split
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "GAIN",
    "TABLE_COLUMNS",
    "TABLE_KEY",
    "add_arguments",
    "compared",
    "main",
    "prune",
    "tune",
    "tune_case",
    "write_plans",
]

GAIN = 1.02  # a difference of a per cent is within what two runs differ by
BATCH = 14  # candidates that are compiled side by side and then timed
IDLE_BATCHES = 2  # that bring nothing, after which the search ends; one where time is short
SHORT_S = 300.0
SLOWER = 1.01  # from here on a case counts as slower with the new plans
FINALISTS = 2  # candidates that are timed again, in turn with the rule's
SEARCH_SHARE = 0.8  # of the time; the rest is for comparing whole cases
STALLED_S = 120.0  # without a word from the other process
COMPILERS = 14  # processes that compile candidates beforehand, at most
MEMORY_EACH = 3 * 2**30  # bytes of free GPU memory for each of them

# A row says how long a case takes by the rules and with the plans in use, timed in turn.
TABLE_COLUMNS = ("run", *record.KEY, "rules_us", "plans_us", *record.ENVIRONMENT)
TABLE_KEY = tuple(name for name in record.KEY if name != "provider")
# A row says what the search found for one problem; where the rule stays, ``plan_us`` is its time.
SEARCH_COLUMNS = ("run", "planner", "problem", "case", "tried", "rule_us", "plan_us", *record.ENVIRONMENT)
SEARCH_KEY = ("planner", "problem")


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


def parse_shape(text: str | None) -> dict[str, float] | None:
    """``M=4096 active=0.1`` -> numbers by name."""
    try:
        pairs = [part.split("=") for part in (text or "").replace(",", " ").split()]
        return {name: float(value) for name, value in pairs} or None
    except ValueError:
        raise ValueError(f"tune: --shape must be like 'M=4096 N=5120', got {text!r}") from None


def prune(
    configs: Sequence[triton.Config],
    resources: Callable[[triton.Config], plans.Resources],
    properties: runtime.DeviceProperties | None = None,
) -> list[triton.Config]:
    """The configurations that fit, in their order. Raises ``ValueError`` if none does."""
    properties = properties or runtime.properties()
    kept = [config for config in configs if plans.fits(resources(config), config, properties)]
    if not kept:
        raise ValueError(f"prune: none of {len(configs)} configurations fits {properties.name}")
    return kept


# --- one case -------------------------------------------------------------------------------------------------------


class Journal:
    """What has been tried: a line of JSON each, written before and after, so that it outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]

    def write(self, **entry: Any) -> None:
        entry["at"] = round(time.time(), 2)
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def tried(self, **what: Any) -> dict[str, dict[str, Any]]:
        """The last entry of each candidate of a problem, by its text; without an outcome it brought the process down."""
        found = [e for e in self.entries if "plan" in e and what.items() <= e.items()]
        return {json.dumps(e["plan"]): e for e in found}

    def winners(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The last decision on each problem; ``kept`` tells whether its winner is faster than the rule's plan."""
        return {(e["planner"], e["key"]): e for e in self.entries if "kept" in e}


Warm = Callable[[str, str, Sequence[tuple[str, str, Any]], Sequence[int]], None]


def tune_case(case: timing.Case, journal: Journal, *, deadline: float = float("inf"), warm: Warm | None = None) -> None:
    """Tunes each problem that the case's call asks planners for and that the journal has no decision on.

    ``warm`` is called before candidates are timed, with the problem's planner and key, what has been chosen for other
    problems of the case, and the candidates' numbers; it may compile them.
    """
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
    won: list[tuple[str, str, Any]] = []
    with contextlib.ExitStack() as chosen:
        while time.time() < deadline:
            with plans.watched() as asked:
                call()
            found = next((what for what in asked if what not in done), None)
            if found is None:
                return
            done.add(found)
            (name, key), planner = found, plans.planners()[found[0]]
            if found not in journal.winners():
                compiling = None if warm is None else functools.partial(warm, name, key, tuple(won))
                _tune_problem(case, planner, key, asked[found], ours, call, journal, deadline, compiling)
            decision = journal.winners().get(found, {"kept": False})
            if decision["kept"]:
                for plan in planner.candidates(*asked[found]):
                    if plans.as_json(plan) == decision["winner"]:
                        chosen.enter_context(plans.using(name, key, plan))
                        won.append((name, key, decision["winner"]))
                        break


def _candidates(planner: plans.Planner, problem: Sequence[Any]) -> list[Any]:
    """The rule's plan, then the candidates, each once."""
    found = [planner.rule(*problem), *planner.candidates(*problem)]
    return list({json.dumps(plans.as_json(plan)): plan for plan in found}.values())


def _distance(a: Any, b: Any) -> float:
    """How far apart two plans are, as files hold them: a factor of two in a number counts 1, up to 2."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return sum(_distance(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return sum(map(_distance, a, b))
    if type(a) is type(b) is int and min(a, b) > 0:
        return min(2.0, abs(math.log2(a / b)))
    return 0.0 if a == b else 2.0


def _tune_problem(
    case: timing.Case,
    planner: plans.Planner,
    key: str,
    problem: Sequence[Any],
    ours: timing.Problem,
    call: Callable[[], Any],
    journal: Journal,
    deadline: float,
    warm: Callable[[Sequence[int]], None] | None,
) -> None:
    """Checks and times candidates of one problem, and writes the winner (or that the rule stays) into the journal."""
    what = {"planner": planner.name, "key": key}
    candidates = _candidates(planner, problem)
    texts = [plans.as_json(plan) for plan in candidates]
    left = dict.fromkeys(range(len(candidates)))
    times: dict[int, float] = {}
    for i, known in ((i, journal.tried(**what).get(json.dumps(text))) for i, text in enumerate(texts)):
        if known is not None:
            del left[i]
            if "us" in known:
                times[i] = known["us"]
            elif "outcome" not in known:
                journal.write(**what, plan=texts[i], outcome="brought the process down")
    best, idle = 0, 0
    patience = IDLE_BATCHES if deadline - time.time() > SHORT_S else 1
    while left and idle < patience and time.time() < deadline:
        batch = sorted(left, key=lambda i: _distance(texts[i], texts[best]))[:BATCH]
        if warm is not None:
            warm(batch)
        for i in batch:
            del left[i]
            outcome = _try(planner.name, key, candidates[i], texts[i], ours, call, journal)
            if outcome is not None:
                times[i] = outcome
        if 0 not in times:
            break  # the rule's own plan does not run here
        fastest = min(times, key=times.__getitem__)
        idle = 0 if times[fastest] < 0.99 * times[best] else idle + 1
        best = fastest
    if not times:
        return  # no time: no decision
    finalists = sorted((i for i in times if i), key=times.__getitem__)[:FINALISTS]
    if 0 not in times or not finalists or times[finalists[0]] > times[0]:
        journal.write(**what, case=str(case), kept=False, **({"rule_us": round(times[0], 2)} if 0 in times else {}))
        return
    finalists = [0, *finalists]
    medians = dict(zip(finalists, _in_turn(planner.name, key, [candidates[i] for i in finalists], call), strict=True))
    winner = min(medians, key=medians.__getitem__)
    about = {"rule_us": round(medians[0], 2), "us": round(medians[winner], 2)}
    if medians[0] < GAIN * medians[winner]:
        journal.write(**what, case=str(case), kept=False, **about)
        return
    entry = {
        "plan": texts[winner],
        **about,
        "case": str(case),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    _keep(plans.own_plans(runtime.properties().name), {planner.name: {key: entry}})
    journal.write(**what, case=str(case), kept=True, winner=texts[winner], **about)


def _try(
    name: str, key: str, plan: Any, text: Any, ours: timing.Problem, call: Callable[[], Any], journal: Journal
) -> float | None:
    """The time of the call with a candidate, in microseconds, if it is right."""
    about = {"planner": name, "key": key, "plan": text}
    journal.write(**about)
    try:
        with plans.using(name, key, plan):
            timing.error_ratios(ours)
            us = timing.measure(call, warmup_ms=1, rep_ms=5, min_samples=10).ms * 1e3
    except check.CheckError as error:
        journal.write(**about, outcome=f"wrong: {error}")
        return None
    except (OutOfResources, PTXASError, CompilationError, torch.OutOfMemoryError) as error:
        journal.write(**about, outcome=f"does not fit: {type(error).__name__}")
        return None
    except RuntimeError as error:
        if "PassManager" not in str(error):  # a pass of the compiler; what the device says ends this process
            raise
        journal.write(**about, outcome="does not compile")
        return None
    journal.write(**about, outcome="ok", us=round(us, 3))
    return us


def _in_turn(name: str, key: str, candidates: Sequence[Any], call: Callable[[], Any]) -> list[float]:
    """The time of the call with each plan, in microseconds: the medians of rounds, in which each has its turn."""
    rounds: list[list[float]] = [[] for _ in candidates]
    for _ in range(3):
        for plan, samples in zip(candidates, rounds, strict=True):
            with plans.using(name, key, plan):
                samples.append(timing.measure(call, warmup_ms=2, rep_ms=20).ms * 1e3)
    return [statistics.median(samples) for samples in rounds]


def write_plans(path: Path, gpu: str, new: plans.Plans) -> None:
    """Writes a file of plans, a line for each, in one step: a reader never sees half of it."""
    rooms = []
    for name, found in sorted(new.items()):
        lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(found.items()))
        rooms.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    body = ",\n".join(rooms)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(f'{{\n "gpu": {json.dumps(gpu)},\n "plans": {{\n{body}\n }}\n}}\n')
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    plans.forget()


def _strike(path: Path, name: str, key: str) -> None:
    kept = plans.read_plans(path)
    kept.get(name, {}).pop(key, None)
    write_plans(path, runtime.properties().name, kept)


def _keep(path: Path, new: plans.Plans) -> None:
    """Adds plans to a file, over those for the same problems."""
    kept = plans.read_plans(path)
    for name, found in new.items():
        kept[name] = {**kept.get(name, {}), **found}
    write_plans(path, runtime.properties().name, kept)


# --- the other process ----------------------------------------------------------------------------------------------


Shape = tuple[tuple[str, float], ...]  # sizes by name, sorted


def _cases_of(room: str, shape: Mapping[str, float] | None) -> list[timing.Case]:
    """The room's cases to tune, those that matter most first."""
    tuning_cases = bench(room).tuning_cases
    if tuning_cases is None:
        return []
    try:
        return list(tuning_cases(shape))
    except KeyError as missing:
        raise ValueError(f"tune: --shape of {room} must give {missing.args[0]}, got {', '.join(shape or ())}") from None


@functools.lru_cache(maxsize=1)
def _call_of(room: str, shape: Shape, index: int) -> Callable[[], Any]:
    problem = _cases_of(room, dict(shape) or None)[index].build()
    assert isinstance(problem, timing.Problem)
    return problem.providers["kernelbook"]


def _compile_one(
    room: str, shape: Shape, index: int, name: str, key: str, chosen: Sequence[tuple[str, str, Any]], number: int
) -> None:
    """Runs a candidate of a problem once, so that Triton's cache has its kernels; in a process of its own."""
    try:
        _run_once(room, shape, index, name, key, chosen, number)
    except Exception:  # what is wrong with a candidate is found, and told, when it is timed
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
            return
        os._exit(1)  # the device does not answer this process any more


def _run_once(
    room: str, shape: Shape, index: int, name: str, key: str, chosen: Sequence[tuple[str, str, Any]], number: int
) -> None:
    call = _call_of(room, shape, index)
    with contextlib.ExitStack() as stack:
        for other, its_key, text in chosen:
            with plans.watched() as asked:
                call()
            for plan in plans.planners()[other].candidates(*asked[other, its_key]):
                if plans.as_json(plan) == text:
                    stack.enter_context(plans.using(other, its_key, plan))
        with plans.watched() as asked:
            call()
        plan = _candidates(plans.planners()[name], asked[name, key])[number]
        stack.enter_context(plans.using(name, key, plan))
        call()
        torch.cuda.synchronize()


class _Compilers:
    """Processes that compile candidates of a problem side by side: most of the time of tuning is the compiler's."""

    def __init__(self) -> None:
        count = 0
        if runtime.DEVICE.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
            count = min(COMPILERS, (os.cpu_count() or 1) - 2, free // MEMORY_EACH)
        self.count = count
        self.pool = self._started()

    def _started(self) -> ProcessPoolExecutor | None:
        return ProcessPoolExecutor(self.count, mp_context=get_context("spawn")) if self.count > 1 else None

    def warm(
        self, room: str, shape: Shape, index: int, name: str, key: str, chosen: Sequence[tuple[str, str, Any]],
        numbers: Sequence[int],
    ) -> None:  # fmt: skip
        if self.pool is None:
            return
        compile_one = functools.partial(_compile_one, room, shape, index, name, key, chosen)
        try:
            list(self.pool.map(compile_one, numbers, timeout=STALLED_S / 2))
        except (BrokenProcessPool, TimeoutError):
            self.stop()
            self.pool = self._started()

    def stop(self) -> None:
        if self.pool is not None:
            for process in list(self.pool._processes.values()):
                process.kill()
            self.pool.shutdown(wait=False, cancel_futures=True)


def _chosen_cases(job: Mapping[str, Any]) -> list[tuple[str, int, timing.Case]]:
    """The cases of a job, a case of each room in turn: where time ends early, every room has had its share."""
    selected = re.compile(job["select"] or "")
    rooms = [
        [(room, i, case) for i, case in enumerate(_cases_of(room, job["shape"])) if selected.search(str(case))]
        for room in job["rooms"]
    ]
    return [entry for turn in itertools.zip_longest(*rooms) for entry in turn if entry is not None]


def _work(job: Mapping[str, Any], journal: Journal) -> None:
    """Tunes the cases of a job that the journal does not have as finished, then compares those with new plans."""
    finished = {(e["room"], e["index"]) for e in journal.entries if "finished" in e}
    shape = tuple(sorted((job["shape"] or {}).items()))
    cases = _chosen_cases(job)
    compilers = _Compilers()
    for room, index, case in cases:
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
    compared_already = {e["compared"] for e in journal.entries if "compared" in e}
    for room, _, case in cases:
        if str(case) not in compared_already:
            strike_where_slower(room, case, journal)


# --- whole cases ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _plans(mode: str) -> Iterator[None]:
    """Within the context ``KERNELBOOK_PLANS`` is ``mode``."""
    before = os.environ.get("KERNELBOOK_PLANS")
    os.environ["KERNELBOOK_PLANS"] = mode
    plans.forget()
    try:
        yield
    finally:
        del os.environ["KERNELBOOK_PLANS"]
        if before is not None:
            os.environ["KERNELBOOK_PLANS"] = before
        plans.forget()


def _asked(case: timing.Case) -> list[tuple[str, str]]:
    """What planners a case asks, and for what; found without a launch, so that nothing is compiled."""
    with mock.patch.object(launching.Launch, "__call__", lambda *_: None), plans.watched() as asked:
        problem = case.build()
        assert isinstance(problem, timing.Problem)
        with contextlib.suppress(RuntimeError):
            problem.providers["kernelbook"]()
    return list(asked)


def compared(room: str, case: timing.Case) -> tuple[float, float, list[tuple[str, str]]] | None:
    """How long a case takes by the rules and with the plans in use, in microseconds, each in turn, and which plans.

    ``None`` where no stored plan is used. What is computed with the plans is checked first.
    """
    with _plans("tuned"):
        stored = plans.stored_plans(runtime.properties())
        if not any(name.startswith(f"{room}.") for file in stored for name in file):
            return None
        used = [(name, key) for name, key in _asked(case) if any(key in file.get(name, {}) for file in stored)]
        if not used:
            return None
        torch.manual_seed(0)
        problem = case.build()
        assert isinstance(problem, timing.Problem)
        call = problem.providers["kernelbook"]
        timing.error_ratios(dataclasses.replace(problem, providers={"kernelbook": call}))
    samples: dict[str, list[float]] = {"rules": [], "tuned": []}
    for _ in range(5):
        for which, times in samples.items():
            with _plans(which):
                call()
                times.append(timing.measure(call, warmup_ms=1, rep_ms=10).ms * 1e3)
    rules, tuned = (statistics.median(times) for times in samples.values())
    return rules, tuned, used


def strike_where_slower(room: str, case: timing.Case, journal: Journal) -> None:
    """Strikes the user's own plans that a case uses if it is slower with them than by the rules."""
    try:
        found = compared(room, case)
    except (torch.OutOfMemoryError, check.CheckError) as error:
        journal.write(compared=str(case), left_out=f"{case}: {type(error).__name__}: {str(error)[:200]}")
        return
    if found is None:
        return
    rules, tuned, used = found
    slower = tuned > SLOWER * rules
    if slower:
        for name, key in used:
            _strike(plans.own_plans(runtime.properties().name), name, key)
            if (name, key) in journal.winners():
                rule_us = journal.winners()[name, key]["rule_us"]
                journal.write(planner=name, key=key, case=str(case), kept=False, rule_us=rule_us)
    journal.write(compared=str(case), rules_us=round(rules, 2), plans_us=round(tuned, 2), struck=slower)


def comparison(job: Mapping[str, Any], out: Path | None) -> int:
    """Times every case that stored plans are used in with them and by the rules; prints a table, and writes it."""
    import pandas as pd
    from tabulate import tabulate
    from tqdm import tqdm

    about = {"run": record.new_run(), **record.environment(record.package_version())}
    rows: list[dict[str, Any]] = []
    for room, _, case in tqdm(_chosen_cases(job), unit="case"):
        if time.time() > job["deadline"]:
            print("tune: time is up before all cases were compared", file=sys.stderr)
            break
        try:
            found = compared(room, case)
        except (torch.OutOfMemoryError, check.CheckError) as error:
            print(f"left out: {case}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            continue
        if found is not None:
            what = {"op": case.op, "mode": case.mode, "provider": "kernelbook", "dtype": case.dtype_name}
            where = {"shape": case.shape_text, "x_name": case.x_name, "x": f"{case.x:.12g}"}
            rows.append({**about, **what, **where, "rules_us": round(found[0], 2), "plans_us": round(found[1], 2)})
    table = pd.DataFrame(rows, columns=list(TABLE_COLUMNS))
    if rows:
        shown = table[["op", "mode", "shape", "x_name", "x", "rules_us", "plans_us"]].assign(
            times_as_fast=(table["rules_us"] / table["plans_us"]).round(3)
        )
        print(tabulate(shown.to_dict("records"), headers="keys"))
        folder = (out or record.results_dir()) / runtime.device_slug()
        record.write_results(folder / "plans.csv", table, key=TABLE_KEY)
    print(f"{len(rows)} cases use stored plans")
    return 0


# --- the command ----------------------------------------------------------------------------------------------------


def supervise(command: Sequence[str], journal: Path, *, stalled_s: float = STALLED_S, quiet: bool = False) -> int:
    """Runs ``command``, which writes into the journal, until it ends well, again and again where it does not.

    It is killed where it writes nothing for ``stalled_s``, and given up where it gets no further in two attempts.
    Returns how often it was started.
    """
    from tqdm import tqdm

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
    elif entry.get("kept"):
        bar.write(f"{entry['planner']} {entry['key']}: {entry['rule_us']:.1f} -> {entry['us']:.1f} us")
    elif "left_out" in entry:
        bar.write(f"left out: {entry['left_out']}")


def searched(journal: Journal) -> "pd.DataFrame":
    """What a journal says of each problem on which it has a decision, in the columns :data:`SEARCH_COLUMNS`."""
    import pandas as pd

    about = {"run": record.new_run(), **record.environment(record.package_version())}
    rows = []
    for (name, key), decision in journal.winners().items():
        tried = sum(
            e.get("outcome") == "ok" for e in journal.entries if (e.get("planner"), e.get("key")) == (name, key)
        )
        rule_us = decision.get("rule_us", math.nan)
        plan_us = decision["us"] if decision["kept"] else rule_us
        what = {"planner": name, "problem": key, "case": decision["case"], "tried": tried}
        rows.append({**about, **what, "rule_us": rule_us, "plan_us": plan_us})
    return pd.DataFrame(rows, columns=list(SEARCH_COLUMNS))


def tune(job: Mapping[str, Any], minutes: float, export: bool, out: Path | None = None) -> int:
    """Tunes rooms on the GPU at hand; 1 if a candidate computed something wrong, 2 without a GPU.

    Args:
        job: ``rooms``, a ``shape`` or ``None``, and what cases to ``select`` or ``None``.
        minutes: how long at most.
        export: whether what was found is written into the package too.
        out: a folder for the record of the search, ``<gpu>/search.csv``.
    """
    from tabulate import tabulate

    if runtime.DEVICE.type != "cuda":
        print("tune: no GPU runs kernels here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    name = runtime.properties().name
    for room in job["rooms"]:
        _cases_of(room, job["shape"])  # a wrong shape is told before anything starts
    journal = plans.own_plans(name).with_suffix(".journal")
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.unlink(missing_ok=True)
    whole = {**job, "deadline": time.time() + 60 * minutes * SEARCH_SHARE}
    command = [sys.executable, "-m", "kernelbook.lab.tuning", json.dumps(whole), str(journal)]
    try:
        supervise(command, journal)
    except KeyboardInterrupt:
        print("Interrupted. What was found so far is kept.")
    found = Journal(journal)
    rows = [
        (e["planner"], e["key"], f"{e['rule_us']:.1f}", f"{e['us']:.1f}", f"{e['rule_us'] / e['us']:.2f}")
        for e in found.winners().values()
        if e["kept"]
    ]
    print(
        tabulate(rows, headers=("planner", "problem", "rule, us", "tuned, us", "times as fast"), disable_numparse=True)
    )
    print(f"{len(rows)} of {len(found.winners())} problems have a faster plan, in {plans.own_plans(name)}")
    if out is not None and found.winners():
        record.write_results(out / runtime.device_slug() / "search.csv", searched(found), key=SEARCH_KEY)
    if export and rows:
        own = plans.read_plans(plans.own_plans(name))
        _keep(plans.shipped_plans(name), own)
        print(f"written to {plans.shipped_plans(name)}")
    wrong = [e for e in found.entries if str(e.get("outcome", "")).startswith("wrong")]
    for entry in wrong:
        print(f"WRONG: {entry['planner']} {entry['key']} {entry['plan']}: {entry['outcome']}", file=sys.stderr)
    return 1 if wrong else 0


def main(given: argparse.Namespace, rooms: Sequence[str]) -> int:
    """The command with its options."""
    try:
        unknown = [room for room in given.room if room not in rooms]
        if unknown:
            raise ValueError(f"tune: ROOM must be of {', '.join(rooms)}, got {', '.join(unknown)}")
        re.compile(given.select or "")
        job = {"rooms": given.room or list(rooms), "shape": parse_shape(given.shape), "select": given.select}
        if given.compare and runtime.DEVICE.type == "cuda":
            return comparison({**job, "deadline": time.time() + 60 * given.minutes}, given.out)
        return tune(job, given.minutes, given.export, given.out)
    except re.error as error:
        print(f"tune: --select must be a regular expression, got {given.select!r}: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    from kernelbook.lab import tuning  # whose functions other processes can import, which this module's are not

    tuning._work(json.loads(sys.argv[1]), tuning.Journal(Path(sys.argv[2])))
