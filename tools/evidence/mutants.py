"""Do the tests notice a broken kernel? Plants faults in kernels, one at a time, and runs the tests that reach them.

    python tools/evidence/mutants.py --seconds 600                         every room, as many faults as the time allows
    python tools/evidence/mutants.py --rooms layer_norm --processes 2      one room

Each fault is planted in a copy of the package, in a process of its own: forked from one that has imported PyTorch, Triton
and pytest, but not yet kernelbook. First every test is run without a fault, to see which kernels it launches and how long it
takes. A fault is then shown only to tests that reach its function, the fast ones first, until one fails.

    killed      a test failed
    timed out   no test failed, but they did not end in their time, four times what they take without a fault. Counted apart
    stillborn   the changed kernel is no program: it does not compile. Not counted
    survived    all tests that ran passed
    untested    no test reaches the function here: the interpreter has no Gluon

What is known already (``--results``, a file that this command writes) is not tried again, as long as the function is the
same. ``equivalent.csv`` lists, with reasons, the faults that are none: those that leave what the kernel promises.
"""

import argparse
import ast
import csv
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faults as planting
from faults import PACKAGE, ROOMS, ROOT, Fault
from interpreters import mend_interpreter

COLUMNS = (
    "room",
    "name",
    "file",
    "line",
    "kind",
    "statement",
    "text",
    "function_digest",
    "where",
    "verdict",
    "by",
    "why",
    "seconds",
)
DECIDED = ("killed", "timed out", "stillborn")
EQUIVALENT = ROOT / "book" / "evidence" / "equivalent.csv"
# Errors by which Triton, Gluon or the interpreter say that this is no program.
NO_PROGRAM = ("CompilationError", "InterpreterError", "UnsupportedLanguageConstruct", "CompileTimeAssertionFailure")
CAUSES = (*NO_PROGRAM, "TypeError", "ValueError", "AttributeError", "NameError", "UnboundLocalError", "AssertionError")
# Tests that measure, need all memory, or start other processes, whose kernels are not seen.
LEFT_OUT = ("2_31", "2**31", "tuning_cases", "subprocess", "doctor", "opcheck")
RARE = (
    "barrier removed",
    "order relaxed",
    "NaN takes the other side",
    "cache modifier dropped",
    "guard dropped",
    "accumulator lost",
)


def digests(file: str) -> dict[str, str]:
    """By function: a digest of its text without comments."""
    tree = ast.parse((PACKAGE / file).read_bytes())
    return {
        node.name: hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


# --- processes ------------------------------------------------------------------------------------------------------


class Plugin:
    """What one run of pytest tells: the tests that failed and why, what each launched, and how long it took."""

    def __init__(self, longest: float) -> None:
        self.longest, self.failed, self.tests = longest, [], {}  # type: ignore[var-annotated]
        self._launched: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._launched.clear()

    def pytest_runtest_call(self, item: Any) -> None:
        if self.longest:
            signal.setitimer(signal.ITIMER_REAL, self.longest)

    def pytest_runtest_teardown(self, item: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None and call.excinfo.type.__name__ not in ("Skipped", "XFailed"):
            names, error = [], call.excinfo.value
            while error is not None:
                names.append(type(error).__name__)
                error = error.__cause__
            self.failed.append((item.nodeid, " < ".join(names), str(call.excinfo.value)[:200]))
        if call.when == "call" and call.excinfo is None:
            self.tests[item.nodeid] = {"seconds": call.duration, "kernels": sorted(self._launched)}

    def watch_launches(self) -> None:
        from triton.runtime.jit import KernelInterface

        from kernelbook.launching import Launch

        getitem, launch = KernelInterface.__getitem__, Launch.__call__

        def named(kernel: Any) -> str:
            return str(getattr(kernel, "__name__", None) or kernel.fn.__name__)

        def watched_getitem(kernel: Any, grid: Any) -> Any:
            self._launched.add(named(kernel))
            return getitem(kernel, grid)

        def watched_launch(self_: Any, grid: Any, *args: Any) -> None:
            self._launched.add(named(self_.kernel))
            launch(self_, grid, *args)

        KernelInterface.__getitem__, Launch.__call__ = watched_getitem, watched_launch  # type: ignore[method-assign]


class TooSlow(BaseException):
    """A test that takes too long to be shown to every fault."""


def _too_slow(*_: Any) -> None:
    raise TooSlow


def _child(tree: Path, work: Path, tests: Sequence[str], longest: float) -> None:
    """In the forked process: runs pytest against the package in ``tree`` and leaves ``result.json`` in ``work``."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(work / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    import pytest

    import kernelbook

    assert Path(kernelbook.__file__).is_relative_to(tree), kernelbook.__file__
    mend_interpreter()
    plugin = Plugin(longest)
    arguments = ["-q", "-m", "", "-p", "no:cacheprovider", "--tb=line", f"--basetemp={work / 'tmp'}"]
    if longest:
        signal.signal(signal.SIGALRM, _too_slow)
        plugin.watch_launches()
    else:
        arguments.append("-x")
    code = pytest.main([*arguments, *tests], plugins=[plugin])
    (work / "result.json").write_text(json.dumps({"code": int(code), "failed": plugin.failed, "tests": plugin.tests}))


class Workers:
    """At most ``count`` forked processes at a time."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.count = folder, count
        self.running: dict[int, tuple[int, float, Callable[[dict[str, Any] | None, float], None], float]] = {}
        self.free = list(range(count))
        for i in self.free:
            (folder / str(i)).mkdir()
            shutil.copytree(
                PACKAGE, folder / str(i) / "src" / "kernelbook", ignore=shutil.ignore_patterns("__pycache__")
            )

    def start(
        self,
        tests: Sequence[str],
        done: Callable[[dict[str, Any] | None, float], None],
        fault: Fault | None = None,
        longest: float = 0.0,
        limit: float = 60.0,
    ) -> None:
        while not self.free:
            self.wait()
        slot = self.free.pop()
        work = self.folder / str(slot)
        (work / "result.json").unlink(missing_ok=True)
        restore: Callable[[], None] = lambda: None  # noqa: E731
        if fault is not None:
            path, source = work / "src" / "kernelbook" / fault.file, (PACKAGE / fault.file).read_bytes()
            path.write_bytes(fault.planted(source))
            restore = lambda: (path.write_bytes(source), None)[1]  # noqa: E731
        pid = os.fork()
        if pid == 0:
            try:
                _child(work / "src", work, tests, longest)
            finally:
                sys.stdout.flush()
                os._exit(0)
        began = time.monotonic()

        def finish(result: dict[str, Any] | None, seconds: float) -> None:
            restore()
            done(result, seconds)

        self.running[pid] = (slot, began, finish, limit)

    def wait(self) -> None:
        """Until a process has ended."""
        while True:
            for pid, (slot, began, done, limit) in list(self.running.items()):
                over = time.monotonic() - began > limit
                if over:
                    try:
                        os.killpg(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        os.kill(pid, signal.SIGKILL)
                ended, _ = os.waitpid(pid, 0 if over else os.WNOHANG)
                if ended:
                    del self.running[pid]
                    self.free.append(slot)
                    path = self.folder / str(slot) / "result.json"
                    result = json.loads(path.read_text()) if path.exists() else {"code": -1, "failed": [], "tests": {}}
                    done(None if over else result, time.monotonic() - began)
                    return
            time.sleep(0.02)

    def wait_for_all(self) -> None:
        while self.running:
            self.wait()


# --- tests ----------------------------------------------------------------------------------------------------------


def collect(rooms: Sequence[str], workers: Workers, files: Sequence[str]) -> list[str]:
    """The tests of the rooms, by name: those of their files, and those that were written for faults."""
    written = {"test_evidence_kernels.py", "test_evidence_gpu.py"}
    files = files or sorted({name for room in rooms for name in ROOMS[room][1]} | written)
    found = workers.folder / "collected"
    pid = os.fork()
    if pid == 0:
        sys.path.insert(0, str(ROOT / "src"))
        import contextlib
        import io

        import pytest

        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            pytest.main(
                ["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *(str(ROOT / "tests" / f) for f in files)]
            )
        found.write_text(text.getvalue())
        os._exit(0)
    os.waitpid(pid, 0)
    names = [
        line for line in found.read_text().splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))
    ]
    return [n for n in names if not any(part in n for part in LEFT_OUT)]


def quick(tests: list[str], known: dict[str, dict[str, Any]], each: int = 10) -> list[str]:
    """The fastest tests that between them launch each kernel ``each`` times, by what an earlier run saw."""
    counts: Counter[str] = Counter()
    chosen = [name for name in tests if "test_evidence" in name]
    for name in sorted(set(tests) & known.keys() - set(chosen), key=lambda n: known[n]["seconds"]):
        if any(counts[kernel] < each for kernel in known[name]["kernels"]):
            chosen.append(name)
            counts.update(known[name]["kernels"])
    return chosen


def baseline(tests: list[str], workers: Workers, seconds: float, longest: float) -> dict[str, dict[str, Any]]:
    """What each test launches and how long it takes; without those that do not pass or take longer than ``longest``."""
    known: dict[str, dict[str, Any]] = {}
    began, shares = time.monotonic(), max(1, len(tests) // 10, min(len(tests), workers.count))
    shuffled = random.Random(0).sample(tests, len(tests))
    broken: list[Any] = []

    def done(result: dict[str, Any] | None, _: float) -> None:
        if result is None:
            return
        known.update(result["tests"])
        broken.extend(result["failed"])
        if result["code"] < 0:
            print("  a process ended early", flush=True)

    for i in range(shares):
        if time.monotonic() - began > seconds:
            print(f"  {shares - i} of {shares} shares of the tests were left out: no time", flush=True)
            break
        workers.start(shuffled[i::shares], done, longest=longest, limit=30.0 + 3 * longest)
    workers.wait_for_all()
    for name, kind, message in broken:
        known.pop(name, None)
        if "TooSlow" in kind:
            continue
        print(f"  left out, fails without a fault: {name}: {kind}: {message[:150]}".replace("\n", " "), flush=True)
    return known


# --- the campaign ---------------------------------------------------------------------------------------------------


def read_results(*paths: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """By name, function's digest and place; of several files, the last that has a row."""
    results = {}
    for path in paths:
        if path.exists():
            with path.open(newline="") as file:
                results |= {(row["name"], row["function_digest"], row["where"]): row for row in csv.DictReader(file)}
    return results


def read_equivalent() -> dict[str, str]:
    """The faults that are none, by name, with the reason."""
    with EQUIVALENT.open(newline="") as file:
        return {row["name"]: row["reason"] for row in csv.DictReader(file)}


def chosen(faults: Sequence[Fault], each: int) -> list[Fault]:
    """All that concerns order between threads, and a sample of the rest: the rooms in turn, ``each`` of them at most."""
    by_room: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_room[fault.room].append(fault)
    picked: list[list[Fault]] = []
    for room, those in by_room.items():
        rest = [f for f in those if f.kind not in RARE]
        rare = [f for f in those if f.kind in RARE]
        picked.append((rare + random.Random(room).sample(rest, len(rest)))[:each])
    return [those[i] for i in range(max(map(len, picked), default=0)) for those in picked if i < len(those)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--where", choices=("interpreter", "gpu"), help="default: the GPU where there is one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no fault is planted after so many")
    parser.add_argument("--each", type=int, default=10**6, help="at most so many faults a room")
    parser.add_argument(
        "--tests-seconds",
        type=float,
        nargs="+",
        default=[4.0, 60.0],
        help="of tests shown to one fault, by their time without one: at first, then to those that survived",
    )
    parser.add_argument(
        "--longest", type=float, default=6.0, help="seconds of a test; slower ones are shown to no fault"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "book" / "evidence" / "mutants.csv")
    parser.add_argument("--quick", type=Path, help="a file of --baseline: only a quick choice of its tests")
    parser.add_argument("--files", nargs="*", default=[], help="files in tests/ (default: those of the rooms)")
    parser.add_argument("--baseline", type=Path, help="keeps there what a run without a fault showed, for the next run")
    parser.add_argument("--only", nargs="*", default=[], help="parts of faults' names, kinds or statements")
    parser.add_argument(
        "--merge", type=Path, nargs="*", default=[], help="adds what these files know, and tries nothing"
    )
    parser.add_argument("--elsewhere", action="store_true", help="only what survived or was untested elsewhere")
    parser.add_argument("--again", action="store_true", help="what survived here is tried again: there are new tests")
    args = parser.parse_args()
    began = time.monotonic()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", KERNELBOOK_PLANS="shipped")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than most tests
    if args.where == "interpreter":
        os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    os.chdir(ROOT)
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT / "src"]
    sys.path.append(str(ROOT / "tools" / "evidence"))
    # What every process needs is imported before they are forked. None of it may touch CUDA.
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pandas  # noqa: F401
    import pytest  # noqa: F401
    import torch

    if args.where is None:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        args.where = "gpu" if torch.cuda.is_available() else "interpreter"
    os.environ["TRITON_INTERPRET"] = "1" if args.where == "interpreter" else "0"
    import torch._dynamo
    import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401

    faults = planting.faults(tuple(args.rooms))
    total = Counter(f.room for f in faults)
    digest = {file: digests(file) for file in {f.file for f in faults}}
    results, equivalent = read_results(args.results, *args.merge), read_equivalent()
    for known, row in list(results.items()):
        if row["file"] in digest and digest[row["file"]].get(row["name"].split(":")[0]) != row["function_digest"]:
            del results[known]  # the function is another now
    if args.merge:
        write(args.results, results)
        report(results, total, equivalent)
        return
    key = lambda f: (f.name, digest[f.file][f.function], args.where)  # noqa: E731
    decided = {k[:2] for k, row in results.items() if row["verdict"] in DECIDED}
    tried = set() if args.again else results.keys()
    todo = [f for f in chosen(faults, args.each) if key(f) not in tried and key(f)[:2] not in decided]
    if args.elsewhere:
        seen = {k[:2] for k in results}
        todo = [f for f in todo if key(f)[:2] in seen]
    todo = [f for f in todo if f.name not in equivalent]
    if args.only:
        todo = [f for f in todo if any(part in f"{f.name} {f.kind} {f.statement}" for part in args.only)]
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        workers = Workers(args.processes, Path(folder))
        if args.baseline and args.baseline.exists():
            tests = json.loads(args.baseline.read_text())
        else:
            tests = baseline(collect(args.rooms, workers, args.files), workers, args.seconds / 2, args.longest)
            if args.baseline:
                args.baseline.write_text(json.dumps(tests))
        inside = planting.reachable()
        reaching: dict[str, list[str]] = defaultdict(list)
        for name in sorted(tests, key=lambda n: tests[n]["seconds"]):
            for function in {f for kernel in tests[name]["kernels"] for f in inside.get(kernel, ())}:
                reaching[function].append(name)
        print(
            f"{args.where}: {len(tests)} tests without a fault in {time.monotonic() - began:.0f} s; {len(todo)} faults of {len(faults)} to try",
            flush=True,
        )
        args.results.parent.mkdir(parents=True, exist_ok=True)

        def finished(fault: Fault, shown: Sequence[str], before: int) -> Callable[[dict[str, Any] | None, float], None]:
            def done(result: dict[str, Any] | None, seconds: float) -> None:
                by = why = ""
                if result is None:
                    verdict, why = "timed out", f"after {seconds:.0f} s"
                elif result["failed"]:
                    by, kind, message = result["failed"][0]
                    no_program = any(k in kind for k in NO_PROGRAM) and kind.split(" < ")[-1] in CAUSES
                    verdict = "stillborn" if no_program else "killed"
                    why = f"{kind}: {message}".replace("\n", " ")[:160]
                elif result["code"] == 0:
                    verdict, why = "survived", f"{before + len(shown)} tests"
                else:
                    verdict, why = "killed", f"ended with {result['code']}"
                record(fault, verdict, by, why, seconds)

            return done

        def record(fault: Fault, verdict: str, by: str, why: str, seconds: float) -> None:
            row = (
                fault.room, fault.name, fault.file, fault.line, fault.kind, fault.statement, fault.text,
                digest[fault.file][fault.function], args.where, verdict, by.split("/")[-1], why, f"{seconds:.1f}",
            )  # fmt: skip
            results[key(fault)] = dict(zip(COLUMNS, map(str, row), strict=True))

        # First a few tests for each fault, the fast ones; then for what survived them the slower ones too.
        before: dict[str, int] = defaultdict(int)
        written = time.monotonic()
        for budget in args.tests_seconds:
            for fault in todo:
                if time.monotonic() - began > args.seconds:
                    break
                if before[fault.name] and results.get(key(fault), {}).get("verdict") != "survived":
                    continue
                names, shown, spent = reaching[fault.function], [], 0.0
                for i, name in enumerate(names):
                    spent += tests[name]["seconds"]
                    if spent > budget and i:
                        break
                    if i >= before[fault.name]:
                        shown.append(name)
                if not names:
                    record(fault, "untested", "", "", 0.0)
                if not shown:
                    continue
                limit = 15 + 4 * sum(tests[name]["seconds"] for name in shown)
                workers.start(shown, finished(fault, shown, before[fault.name]), fault, limit=limit)
                before[fault.name] += len(shown)
                if time.monotonic() - written > 5:
                    write(args.results, results)  # what is known so far
                    written = time.monotonic()
            workers.wait_for_all()
        write(args.results, results)
    report(results, total, equivalent)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def write(path: Path, results: dict[tuple[str, str, str], dict[str, str]]) -> None:
    partly = path.with_suffix(".part")
    with partly.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            sorted(results.values(), key=lambda r: (r["room"], r["file"], int(r["line"]), r["name"], r["where"]))
        )
    partly.replace(path)


def verdicts(
    results: dict[tuple[str, str, str], dict[str, str]], equivalent: dict[str, str]
) -> Iterator[tuple[dict[str, str], str]]:
    """Each fault once: killed anywhere is killed."""
    ranks = ("killed", "stillborn", "timed out", "equivalent", "survived", "untested")
    best: dict[str, tuple[dict[str, str], str]] = {}
    for row in results.values():
        verdict = row["verdict"]
        if row["name"] in equivalent and verdict in ("survived", "untested"):
            verdict = "equivalent"
        if row["name"] not in best or ranks.index(verdict) < ranks.index(best[row["name"]][1]):
            best[row["name"]] = row, verdict
    yield from best.values()


def report(
    results: dict[tuple[str, str, str], dict[str, str]], total: Counter[str], equivalent: dict[str, str]
) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row, verdict in verdicts(results, equivalent):
        counts[row["room"]][verdict] += 1
    for room, c in counts.items():
        counted = c["killed"] + c["timed out"] + c["survived"]
        rate = f"{100 * (counted - c['survived']) / counted:.1f}%" if counted else "-"
        print(f"{room:14} {rate:>6} killed; {dict(c)} of {total[room]}")
    for row, verdict in verdicts(results, equivalent):
        if verdict == "survived":
            print(
                f"  survived {row['room']} {row['file']}:{row['line']} {row['kind']}: {row['statement'][:90]} -> {row['text'][:80]} ({row['why']}) {row['name']}"
            )


if __name__ == "__main__":
    main()
