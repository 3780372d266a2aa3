"""Do the tests notice a broken kernel? Plants faults in kernels, one at a time, and runs the tests that reach them.

    python tools/evidence/mutants.py --seconds 600                         every room, as many faults as the time allows
    python tools/evidence/mutants.py --rooms layer_norm --processes 2      one room

Each fault is planted in a process of its own, forked from one that has collected the tests and run none. First every test is run without a fault, to see which kernels it launches and how long it
takes. A fault is then shown only to tests that reach its function, the fast ones first, until one fails.

    killed      a test failed
    timed out   no test failed, but they did not end in their time, four times what they take without a fault. Counted apart
    stillborn   the changed kernel is no program: it does not compile. Not counted
    survived    all tests that ran passed
    untested    no test reaches the place here

What is known already (``--results``, a file that this command writes) is not tried again, as long as the function is the
same. ``reasons.csv`` says of survivors which are none, as they leave what the kernel promises, and why others live.
"""

import argparse
import ast
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faults as planting
import pandas as pd
from common import (
    DECIDED,
    EVIDENCE,
    PACKAGE,
    ROOT,
    Done,
    Tell,
    Workers,
    command_line,
    gpus,
    keep_table,
    rows_of,
    watching_launches,
)
from faults import ROOMS, Fault

REASONS = EVIDENCE / "reasons.csv"
# Errors by which Triton, Gluon or the interpreter say that this is no program.
NO_PROGRAM = ("CompilationError", "InterpreterError", "UnsupportedLanguageConstruct", "CompileTimeAssertionFailure")
CAUSES = (*NO_PROGRAM, "TypeError", "ValueError", "AttributeError", "NameError", "UnboundLocalError", "AssertionError")
# Tests that measure, need all memory, start other processes, whose kernels are not seen, or use threads after a fork.
WRITTEN = ("kernels", "helpers", "rows", "unchecked", "tiles", "gluon", "gpu")  # tests/test_evidence_NAME.py
LEFT_OUT = ("2_31", "2**31", "subprocess", "doctor", "opcheck", "bitsandbytes")
COMPILING = 2.0  # seconds, about, of a kernel in Gluon
PATIENCE = 15.0  # seconds that are added to the tests' own
STUCK = 10.0  # seconds that a test may stay at one instruction: longer than the GPU needs when it is full, and not a compiler
UNSURE = ("out of memory", "No space left", "unknown error")  # what a test says where others have filled the machine


def digests(file: str) -> dict[str, str]:
    """By function: a digest of its text without comments and names of variables."""
    tree = ast.parse((PACKAGE / file).read_bytes())
    return {node.name: planting.digest_of(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


# --- processes ------------------------------------------------------------------------------------------------------


def plant(fault: Fault, folder: Path) -> None:
    """Gives this process the faulty kernel, whoever holds it."""
    source = fault.planted((PACKAGE / fault.file).read_bytes())
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == fault.function)
    text = "\n".join(source.decode().split("\n")[node.lineno - 1 : node.end_lineno]) + "\n"  # without its decorators
    module = importlib.import_module("kernelbook." + fault.file.removesuffix(".py").replace("/", "."))
    kernel = vars(module)[fault.function]
    if hasattr(kernel, "_unsafe_update_src"):
        kernel._unsafe_update_src(text)  # nothing has been compiled in this process
        return
    path = folder / f"{fault.function}_{os.getpid()}.py"  # the interpreter reads the source again
    path.write_text(text)
    exec(compile(text, path, "exec"), vars(module))  # noqa: S102
    kernel.fn, vars(module)[fault.function] = vars(module)[fault.function], kernel
    kernel.rewriter = type(kernel.rewriter)(kernel.fn, **kernel.kwargs)


class TooSlow(BaseException):
    """A test that takes too long to be shown to every fault."""


class Watcher:
    """What a process tells of its tests: those that failed and why, what each launched, and how long it took."""

    def __init__(self, traces: bool) -> None:
        self.traces = traces  # the lines that run; on a GPU none of a kernel do
        self.failed: list[tuple[str, str, str]] = []
        self.tests: dict[str, dict[str, Any]] = {}
        self._launched: set[str] = set()
        self._variants: set[tuple[str, int]] = set()
        self._compiling = 0.0
        self.failure: Callable[[], None] = lambda: None
        self._files = {str(PACKAGE / file): file for files, _ in ROOMS.values() for file in files}
        self._lines: dict[str, int] = defaultdict(int)  # by file: a bit for each line that ran

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None and call.excinfo.type.__name__ not in ("Skipped", "XFailed"):
            names, error = [], call.excinfo.value
            while error is not None:
                names.append(type(error).__name__)
                error = error.__cause__
            self.failed.append((item.nodeid, " < ".join(names), str(call.excinfo.value)[:200]))
            self.failure()
        if call.when == "call" and call.excinfo is None:
            lines = {file: f"{bits:x}" for file, bits in self._lines.items()}
            variants = Counter(name for name, _ in self._variants)  # what a fault in them would have to compile
            self.tests[item.nodeid] = {
                "seconds": max(0.0, call.duration - self._compiling), "kernels": sorted(self._launched), "lines": lines, "variants": variants
            }  # fmt: skip

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        """For ``sys.settrace``: keeps the lines of kernels, which are Python to the interpreter."""
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None

        def line(frame: Any, event: str, arg: Any) -> Any:
            self._lines[file] |= 1 << frame.f_lineno
            return line

        return line

    def note_launch(self, kernel: str, launch: Any) -> None:
        self._launched.add(kernel)
        if launch is not None:
            self._variants.add((kernel, id(launch)))

    def leave_out_compiling(self) -> None:
        """What is compiled by now is not a test's time."""
        with contextlib.suppress(ImportError, AttributeError):
            from triton import knobs

            def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
                self._compiling += 0.0 if cache_hit else times.total / 1e6

            knobs.compilation.listener = listen

    def run(self, items: Sequence[Any], longest: float) -> None:
        """All items, each no longer than ``longest``, if that is not zero."""

        def too_slow(*_: Any) -> None:
            raise TooSlow

        signal.signal(signal.SIGALRM, too_slow)
        self.leave_out_compiling()
        with watching_launches(self.note_launch) if longest else contextlib.nullcontext():
            for item in items:
                self._launched.clear()
                self._variants.clear()
                self._lines.clear()
                self._compiling = 0.0
                if longest and self.traces:
                    sys.settrace(self.trace)  # anew for each: Python drops a trace function that was interrupted
                signal.setitimer(signal.ITIMER_REAL, longest)
                try:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                except TooSlow:
                    self.failed.append((item.nodeid, "TooSlow", ""))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)


def wait_without_spinning() -> None:
    """Before this process uses CUDA: who waits for the GPU, perhaps for ever, leaves its core to others."""
    driver, device, blocking = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), 4
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDevicePrimaryCtxSetFlags_v2(device, blocking)


def tell_when_stuck(stuck: Callable[[], None], seconds: float) -> None:
    """Calls ``stuck`` once this thread has been at one instruction for so long, and no thread has worked: a kernel never ends.

    Compilers and the start of CUDA take long too, and are not meant.
    """
    thread = threading.get_ident()

    def watch() -> None:
        before, since, worked = None, time.monotonic(), 0.0
        while True:
            time.sleep(0.5)
            at, frame = [], sys._current_frames().get(thread)
            while frame is not None:
                at.append((frame.f_code, frame.f_lasti))
                frame = frame.f_back
            names = " ".join(f"{code.co_filename}:{code.co_name}" for code, _ in at)
            waits = any(part in names for part in ("subprocess.py", "triton/compiler", ":_lazy_init"))
            work = time.process_time() - time.thread_time()  # of all threads but this one
            if at != before or waits or work > worked + 0.02:
                before, since, worked = at, time.monotonic(), work
            elif time.monotonic() - since > seconds:
                stuck()

    threading.Thread(target=watch, daemon=True).start()


class TestRuns(Workers):
    """Processes forked from this one, which has collected the tests and run none."""

    def __init__(self, count: int, folder: Path, items: dict[str, Any], watcher: Watcher, visible: list[str]) -> None:
        super().__init__(count, folder)
        self.items, self.watcher = items, watcher
        self.gpus, self.share = visible, 0.8 * len(visible) / count  # of a GPU's memory for each process

    def show(
        self,
        tests: Sequence[str],
        done: Done,
        fault: Fault | None = None,
        longest: float = 0.0,
        limit: float = 60.0,
        stuck: float = STUCK,
    ) -> None:
        """Has a process run the tests; ``done`` gets None as well where a kernel never ended."""

        def told(result: Any, seconds: float) -> None:
            done(None if result is None or "stuck" in result else {"failed": [], "tests": {}} | result, seconds)

        self.start(functools.partial(self._run, tests, fault, longest, stuck), told, limit)

    def _run(
        self, tests: Sequence[str], fault: Fault | None, longest: float, stuck: float, slot: int, keep: Tell
    ) -> None:
        """In the forked process."""
        if self.gpus:
            import torch

            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
            wait_without_spinning()
            if fault is not None:
                torch.cuda._lazy_call(lambda: torch.cuda.set_per_process_memory_fraction(self.share))
        items = [self.items[name] for name in tests]
        temporary = items[0].config._tmp_path_factory
        temporary._given_basetemp, temporary._basetemp = self.folder / f"{slot}_tmp", None
        if fault is not None:
            plant(fault, self.folder)

        def tell(**more: Any) -> None:
            keep({"failed": self.watcher.failed, "tests": self.watcher.tests, **more})

        def end(**more: Any) -> None:
            tell(**more)
            os._exit(0)  # pytest would take its time to say why

        if not longest:
            self.watcher.failure = end
        if self.gpus and fault is not None:
            tell_when_stuck(functools.partial(end, stuck=True), stuck)
        self.watcher.run(items, longest)
        tell()


def baseline(tests: list[str], workers: TestRuns, seconds: float, longest: float) -> dict[str, dict[str, Any]]:
    """What each test launches and how long it takes, of those that pass and take no longer than ``longest``."""
    known: dict[str, dict[str, Any]] = {}
    began, each = time.monotonic(), max(1, min(8, len(tests) // len(workers.free)))
    shuffled = varied(random.Random(0).sample(tests, len(tests)))  # the time may not be enough for all cases
    shuffled.sort(key=lambda name: "test_evidence" not in name)
    broken: list[Any] = []

    def done(result: Any, _: float) -> None:
        if result is None or "died" in result:
            print("  a process ended early", flush=True)
            return
        known.update(result["tests"])
        broken.extend(result["failed"])

    for i in range(0, len(shuffled), each):
        if time.monotonic() - began > seconds:
            print(f"  {len(shuffled) - i} of {len(shuffled)} tests were left out: no time", flush=True)
            break
        workers.show(shuffled[i : i + each], done, longest=longest, limit=20.0 + each * longest)
    workers.wait_for_all()
    for name, kind, message in broken:
        known.pop(name, None)
        if "TooSlow" not in kind:
            print(f"  left out, fails without a fault: {name}: {kind}: {message[:150]}".replace("\n", " "), flush=True)
    return known


# --- the campaign ---------------------------------------------------------------------------------------------------


def explain(rows: Sequence[dict[str, str]]) -> None:
    """Notes of each fault what it counts as, and of those that survived the reason, if somebody has written one.

    A line of ``reasons.csv`` holds for faults of this function, this kind, and with these parts of the statement and of what
    stands there instead; empty is any. It calls them ``equivalent``, if no promise of the kernel is broken, or ``survived``.
    """
    reasons = rows_of(REASONS)
    for row in rows:
        row["counts_as"], row["reason"] = row["verdict"], ""
        if row["verdict"] not in ("survived", "untested"):
            continue
        function = row["name"].split(":")[0]
        for r in reasons:
            same = (
                r["function"] in ("", function) and r["kind"] in ("", row["kind"]) and r["where"] in ("", row["where"])
            )
            if same and r["statement"] in row["statement"] and r["text"] in ("", row["text"]):
                row["counts_as"], row["reason"] = r["counts_as"], r["reason"]
                break


def spread(faults: Sequence[Fault]) -> list[Fault]:
    """In an order whose every beginning is spread evenly over files, functions and kinds."""
    alike = sorted(faults, key=lambda f: (f.file, f.function, f.kind))
    golden = (5**0.5 - 1) / 2  # of its multiples, modulo 1, any number lie apart
    return [alike[i] for i in sorted(range(len(alike)), key=lambda i: i * golden % 1)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--where", choices=("interpreter", "gpu"), help="default: the GPU where there is one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no fault is planted after so many")
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
    parser.add_argument("--results", type=Path, default=EVIDENCE / "mutants.csv")
    parser.add_argument("--files", nargs="*", default=[], help="files in tests/ (default: those of the rooms)")
    parser.add_argument("--only", nargs="*", default=[], help="parts of faults' files, names, kinds or statements")
    parser.add_argument("--again", action="store_true", help="what survived here is tried again: there are new tests")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    os.environ.setdefault("TRITON_INTERPRET", str(int(args.where == "interpreter")))
    if args.where == "interpreter":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    import pytest

    from kernelbook import runtime

    args.where = "interpreter" if runtime.INTERPRET else "gpu"
    campaign = Campaign(args)
    files = args.files or sorted(
        {name for room in args.rooms for name in ROOMS[room][1]} | {f"test_evidence_{name}.py" for name in WRITTEN}
    )
    with tempfile.TemporaryDirectory(prefix="mutants_", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        if args.where == "gpu":
            os.environ.setdefault("KERNELBOOK_TRUTHS", folder)
        campaign.folder = Path(folder)
        without = ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")
        options = [
            "-q",
            "-s",
            "-m",
            "",
            "--tb=line",
            f"--basetemp={folder}/0_tmp",
            *(f"-pno:{name}" for name in without),
        ]
        code = pytest.main([*options, *(str(ROOT / "tests" / f) for f in files)], plugins=[campaign, campaign.watcher])
    sys.exit(code not in (0, 5))


def short(test: str) -> str:
    """A test's name without its folder, as results name it."""
    return test.removeprefix("tests/")


def varied(names: Sequence[str]) -> list[str]:
    """One case of each test function, the fast ones first, then another of each, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for name in names:
        ranks.append(seen[name.split("[")[0]])
        seen[name.split("[")[0]] += 1
    return [name for _, name in sorted(zip(ranks, names, strict=True), key=lambda pair: pair[0])]


class Campaign:
    """What stands in the place of pytest's loop over the tests that it has collected."""

    folder: Path

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began, self.watcher = args, time.monotonic(), Watcher(args.where == "interpreter")
        faults = planting.faults(tuple(args.rooms))
        self.total = len(faults)
        self.digest = {file: digests(file) for file in {f.file for f in faults}}
        # By name, function's digest and place.
        self.results = {(row["name"], row["function_digest"], row["where"]): row for row in rows_of(args.results)}
        planted = {f.name for f in planting.faults()}
        for known, row in list(self.results.items()):
            now = self.digest.get(row["file"], {}).get(row["name"].split(":")[0], row["function_digest"])
            no_time = row["verdict"] == "untested" and row["where"] == "gpu"  # for the tests that reach it
            if row["name"] not in planted or now != row["function_digest"] or no_time:
                del self.results[known]
        self.kills: dict[tuple[str, str], Counter[str]] = defaultdict(
            Counter
        )  # by function: tests and what they noticed
        for row in self.results.values():
            if row["verdict"] == "killed" and row["by"]:
                self.kills[row["file"], row["name"].split(":")[0]][short(row["by"])] += 1
        decided = {k[:2] for k, row in self.results.items() if row["verdict"] in DECIDED}
        explain(list(self.results.values()))
        tried = {k for k, row in self.results.items() if not args.again or row["reason"]}  # what is explained stays so
        todo = [f for f in spread(faults) if self.key(f) not in tried and self.key(f)[:2] not in decided]
        todo = [
            f for f in todo if any(part in f"{f.file} {f.name} {f.kind} {f.statement}" for part in args.only or [""])
        ]
        # First what lived.
        self.todo = sorted(todo, key=lambda f: self.results.get(self.key(f), {}).get("verdict") != "survived")
        self.unsure: list[tuple[list[str], Fault, float]] = []

    def key(self, fault: Fault) -> tuple[str, str, str]:
        return fault.name, self.digest[fault.file][fault.function], self.args.where

    def passed(self) -> float:
        return time.monotonic() - self.began

    def pytest_runtestloop(self, session: Any) -> bool:
        import torch

        assert not torch.cuda.is_initialized(), "a process that has a CUDA context cannot fork workers that use CUDA"
        items = {item.nodeid: item for item in session.items if not any(part in item.nodeid for part in LEFT_OUT)}
        # A collection of garbage in a child would touch, and so copy, all that this process holds.
        gc.collect()
        gc.freeze()
        visible = []
        if self.args.where == "gpu":
            visible = gpus()
            with contextlib.suppress(ImportError):  # children would each find out what these are
                from triton.backends.nvidia.compiler import get_ptxas_version
                from triton.runtime.cache import triton_key

                triton_key(), get_ptxas_version(90)
        workers = TestRuns(self.args.processes, self.folder, items, self.watcher, visible)
        tests = baseline(list(items), workers, self.args.seconds / 3, self.args.longest)
        inside, reaching = planting.reachable(), defaultdict(list)
        fast_first = varied(sorted(tests, key=lambda n: tests[n]["seconds"]))
        for name in fast_first:
            for place in {f for kernel in tests[name]["kernels"] for f in inside.get(kernel, ())}:
                reaching[place].append(name)
        ran: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by file: tests and a bit for each line
        for name in fast_first:
            for file, bits in tests[name]["lines"].items():
                ran[file].append((name, int(bits, 16)))

        def cost(name: str, fault: Fault) -> float:
            """Seconds: on a GPU each kernel in which the fault is has to be compiled anew, as often as the test does."""
            seconds, variants = tests[name]["seconds"], tests[name].get("variants", {}) if visible else {}
            place = fault.file, fault.function
            return float(seconds + COMPILING * sum(n for k, n in variants.items() if place in inside.get(k, ())))

        def shown_to(fault: Fault) -> list[str]:
            """The tests that reach it; in front the three that noticed most faults of this function."""
            if self.args.where == "interpreter":
                first, last = fault.lines
                span = ((1 << (last + 1)) - 1) ^ ((1 << first) - 1)
                names = [name for name, bits in ran[fault.file] if bits & span]
            else:
                names = sorted(reaching[fault.file, fault.function], key=lambda name: cost(name, fault))
            kills = self.kills[fault.file, fault.function]
            best = sorted((n for n in names if kills[short(n)]), key=lambda n: -kills[short(n)])[:3]
            if fault.kind == "cast dropped":
                best = [name for name in names if "64_bit" in name] or best
            return best + [name for name in names if name not in best]

        print(
            f"\n{self.args.where}: {len(tests)} of {len(items)} tests without a fault in {self.passed():.0f} s;"
            f" {len(self.todo)} faults of {self.total} to try",
            flush=True,
        )
        self.args.results.parent.mkdir(parents=True, exist_ok=True)
        # First a few tests for each fault, the fast ones; then for what survived them the slower ones too.
        before: dict[str, set[str]] = defaultdict(set)
        written = time.monotonic()

        def once_more() -> None:
            """What others may have kept from passing, a few at a time."""
            for shown, fault, limit in self.unsure[: max(1, self.args.processes // 5)]:
                workers.show(shown, self.finished(fault, len(before[fault.name])), fault, limit=limit, stuck=2 * STUCK)
            del self.unsure[: max(1, self.args.processes // 5)]

        for budget in self.args.tests_seconds:
            for fault in self.todo:
                if self.passed() > self.args.seconds:
                    break
                if len(self.unsure) >= max(1, self.args.processes // 5):
                    once_more()
                if before[fault.name] and self.results.get(self.key(fault), {}).get("verdict") != "survived":
                    continue
                names, shown, spent = shown_to(fault), [], 0.0
                for name in names:
                    if name not in before[fault.name]:
                        if spent + cost(name, fault) > budget and shown:
                            break
                        spent += cost(name, fault)
                        shown.append(name)
                if not names:
                    self.record(fault, "untested", "", "")
                if not shown:
                    continue
                limit = PATIENCE + 4 * spent
                before[fault.name] |= set(shown)
                again = (shown, fault, 2 * limit) if visible else None
                workers.show(shown, self.finished(fault, len(before[fault.name]), again), fault, limit=limit)
                if time.monotonic() - written > 5:
                    write(self.args.results, self.results)  # what is known so far
                    written = time.monotonic()
            workers.wait_for_all()
            write(self.args.results, self.results)
            while self.unsure and self.passed() < self.args.seconds:
                once_more()
            workers.wait_for_all()
        if visible:
            self.without_faults(workers)
        write(self.args.results, self.results)
        if self.results:
            report(self.results)
        print(f"{self.passed():.0f} s", flush=True)
        return True

    def without_faults(self, workers: TestRuns) -> None:
        """The tests that noticed something, beside as much else as then: what one noticed that fails now is not known."""
        failed: set[str] = set()
        named = {short(name): name for name in workers.items}
        those = [
            named[test]
            for test in {row["by"] for row in self.results.values() if row["where"] == "gpu"}
            if test in named
        ]

        def done(test: str) -> Done:
            return lambda result, _: failed.add(short(test)) if not result or result["failed"] else None

        for test in 2 * those:
            workers.show([test], done(test), limit=60.0)
        workers.wait_for_all()
        print(f"{len(those)} tests without a fault at the end, twice: {len(failed)} fail: {sorted(failed)}", flush=True)
        for key in [k for k, row in self.results.items() if row["by"] in failed and row["where"] == "gpu"]:
            del self.results[key]

    def finished(self, fault: Fault, shown: int, again: tuple[list[str], Fault, float] | None = None) -> Done:
        """``again``: how to try it once more before it counts, where others may be why no test passed."""

        def done(result: Any, seconds: float) -> None:
            by = why = ""
            others = not result or "died" in result or any(u in f[2] for u in UNSURE for f in result["failed"])
            if others and again:
                self.unsure.append(again)
                return
            if result and not again and any(u in f[2] for u in UNSURE for f in result["failed"]):
                return  # still: it is not known
            if result is None:
                verdict, why = "timed out", f"after {seconds:.0f} s"
            elif result["failed"]:
                by, kind, message = result["failed"][0]
                no_program = any(k in kind for k in NO_PROGRAM) and kind.split(" < ")[-1] in CAUSES
                no_program &= "overflow detected" not in message  # what a test asks the interpreter to look for
                verdict = "stillborn" if no_program else "killed"
                why = f"{kind}: {message}".replace("\n", " ")[:100]
            elif "died" in result:
                verdict, why = "killed", "the process ended"
            else:
                verdict, why = "survived", f"{shown} tests"
            self.record(fault, verdict, by, why)

        return done

    def record(self, fault: Fault, verdict: str, by: str, why: str) -> None:
        key = self.key(fault)
        found = {"function_digest": key[1], "where": key[2], "verdict": verdict, "by": short(by), "why": why}
        about = {
            name: str(getattr(fault, name)) for name in ("room", "name", "file", "line", "kind", "statement", "text")
        }
        self.results[key] = about | found | {"counts_as": "", "reason": ""}
        if verdict == "killed" and by:
            self.kills[fault.file, fault.function][short(by)] += 1


def write(path: Path, results: dict[tuple[str, str, str], dict[str, str]]) -> None:
    if not results:
        return
    explain(list(results.values()))
    for row in results.values():
        if row["verdict"] in DECIDED:  # nobody asks any more what it was
            row["statement"] = row["text"] = row["why"] = ""
    table = pd.DataFrame(results.values()).sort_values(
        ["room", "file", "line", "name", "where"],
        key=lambda column: column.astype(int) if column.name == "line" else column,
    )
    keep_table(path, table)


def report(results: dict[tuple[str, str, str], dict[str, str]]) -> None:
    """Each fault counts once: killed anywhere is killed."""
    ranks = (*DECIDED, "equivalent", "survived", "untested")
    table = pd.DataFrame(results.values())
    table = table.sort_values("counts_as", key=lambda column: column.map(ranks.index), kind="stable")
    print(table.drop_duplicates("name").groupby(["room", "counts_as"]).size().unstack(fill_value=0).to_string())


if __name__ == "__main__":
    main()
