"""Do the tests notice a fault in the host's code? Plants faults of Cosmic Ray's kinds, and runs the tests that reach them.

    pip install cosmic-ray
    python tools/evidence/host.py --seconds 3600                       goes on where an earlier run ended
    python tools/evidence/host.py --groups launch plans --faults 100   as many of each of two groups

The sample is drawn by digests of functions: the same on every machine, and after a change of some functions only theirs is
drawn anew. Of each place one fault is drawn, so that an operator with many substitutes is not many times as likely as another.

First every test is run alone under coverage, which says what lines it reaches and how long it takes. A fault is then planted in
a copy of the package, and shown to tests that reach its line, the fast ones first, until one fails. Verdicts are those of
``mutants.py``; a copy that cannot be imported is ``stillborn``. ``host_reasons.csv`` says why survivors live.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from common import DECIDED, EVIDENCE, PACKAGE, ROOT, Tell, Workers, command_line, keep_table, rows_of

RESULTS, REASONS = EVIDENCE / "host.csv", EVIDENCE / "host_reasons.csv"
ROOMS = ("layer_norm", "sparse_linear", "scatter_ffn", "attention", "nf4", "moe_lora")
# By group: its files, and the tests that may notice. Beside them each group has what all public functions owe.
GROUPS: dict[str, tuple[tuple[str, ...], str]] = {
    "op": (tuple(f"{room}/{name}.py" for room in ROOMS for name in ("op", "launches", "pages", "grouped", "lora", "routing")),
           "layer_norm rms_norm sparse_linear scatter_ffn attention attention_decode nf4 fp4 moe_lora observed"),
    "launch": (("launch.py", "operators.py", "memory.py", "tensors.py"), "launch operators memory tensors observed capture"),
    "arguments": (("arguments.py",), "arguments launch layer_norm"),
    "packed": (("packed/__init__.py", "packed/fp4.py", "packed/products.py"), "nf4 fp4 moe_lora"),
    "nn": (("nn/*.py",), "swap moe_block models scatter_ffn nf4 sparse_linear interop_attention state train_sparse_inference"),
    "interop": (("interop/*.py",), "swap interop_attention interop_bitsandbytes interop_mxfp4 interop_nvfp4 interop_peft interop_quantizer interop_transformers state"),
    "distributed": (("distributed/*.py",), "distributed evidence_distributed state"),
    "train": (("train/*.py",), "train_command train_loop train_optimizer train_schedulers train_text train_same_loss capture captured_step captured_models"),
    "check": (("check.py",), "check evidence_rule"),
}  # fmt: skip
LEFT_OUT = ("kernels", "notebook", "__init__")  # of files named by a pattern: kernels have mutants.py
# What is run in processes that tests start: coverage does not see it.
ELSEWHERE = {
    "distributed/": "test_distributed",
    "train/parallel": "test_distributed",
    "train/command": "test_train_command",
}
PATIENCE, LONGEST = 20.0, 60.0  # seconds beyond four times the tests' own; what one test may take


class Fault(NamedTuple):
    """One change of one place."""

    name: str  # file, function, and a digest of the function and the change
    group: str
    file: str
    line: int
    before: str  # the line
    after: str
    source: str  # the whole file, changed


# --- faults ---------------------------------------------------------------------------------------------------------


def _annotated(tree: ast.Module) -> set[tuple[int, int]]:
    """Where annotations stand, which change nothing when they change."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for part in (p for one in parts if one is not None for p in ast.walk(one) if hasattr(p, "lineno")):
            found |= {(part.lineno, column) for column in range(part.col_offset, part.end_col_offset)}  # type: ignore[attr-defined]
    return found


def _places(source: str) -> dict[tuple[int, int], list[tuple[Any, int]]]:
    """By line and column: operators of Cosmic Ray that change something there, and which of their places it is."""
    plugins, trees = importlib.import_module("cosmic_ray.plugins"), importlib.import_module("cosmic_ray.ast")
    tree, left_out = trees.get_ast(source), _annotated(ast.parse(source))
    found: dict[tuple[int, int], list[tuple[Any, int]]] = defaultdict(list)
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        places = (at for node in trees.ast_nodes(tree) for at, _ in operator.mutation_positions(node))
        for occurrence, at in enumerate(places):
            if at not in left_out:
                found[at].append((operator, occurrence))
    return found


def _function_at(tree: ast.Module, line: int) -> Any:
    """The outermost function or class that the line is in, with its decorators; the module where there is none."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= line <= (node.end_lineno or 0):
                return node
    return tree


def faults_of(group: str, count: int) -> list[Fault]:
    """``count`` faults of a group, or all that there are."""
    mutate = importlib.import_module("cosmic_ray.mutating").mutate_code
    drawn: list[tuple[str, Any]] = []
    for pattern in GROUPS[group][0]:
        for path in sorted(PACKAGE.glob(pattern)):
            if "*" in pattern and any(part in path.stem for part in LEFT_OUT):
                continue
            source, file = path.read_text(), path.relative_to(PACKAGE).as_posix()
            tree = ast.parse(source)
            texts: dict[int, str] = {}
            for (line, column), changes in sorted(_places(source).items()):
                node = _function_at(tree, line)
                text = texts.setdefault(id(node), ast.unparse(node) if node is not tree else "")
                own = line - getattr(node, "lineno", 1) if node is not tree else source.splitlines()[line - 1]
                digest = hashlib.sha256(repr((file, text, own, column)).encode()).hexdigest()
                operator, occurrence = changes[int(digest[:8], 16) % len(changes)]
                name = f"{file}:{getattr(node, 'name', '')}:{digest[:10]}"
                drawn.append((digest[8:], (name, file, line, source, operator, occurrence)))
    found = []
    for _, (name, file, _, source, operator, occurrence) in sorted(drawn, key=lambda one: one[0])[:count]:
        changed = mutate(source, operator, occurrence)
        lines = zip(source.splitlines(), changed.splitlines(), strict=False)
        at, before, after = next((i, a, b) for i, (a, b) in enumerate(lines, 1) if a != b)
        found.append(Fault(name, group, file, at, before.strip(), after.strip(), changed))
    return found


# --- processes ------------------------------------------------------------------------------------------------------


class Plugin:
    """Of pytest: the first failure; and with coverage what each test reaches, and its seconds."""

    def __init__(self, coverage: Any = None) -> None:
        self.coverage, self.failed = coverage, ""
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid
        if report.skipped or report.failed:
            self.seconds[report.nodeid] = float("inf")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _run(folder: Path, tests: list[str], fault: Fault | None, slot: int, tell: Tell) -> None:
    """In a process of its own: the tests on the slot's copy of the package, without the fault that was there before."""
    copy = folder / str(slot)
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, copy / "kernelbook", ignore=without, dirs_exist_ok=True)
    if fault is not None:
        path = copy / "kernelbook" / fault.file
        path.write_text(fault.source)
        # A time that no compiled file has: Python compares seconds and sizes only.
        os.utime(path, (10**9 + os.getpid(),) * 2)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    os.chdir(ROOT)
    import pytest

    how = ["-q", "-p", "no:cacheprovider", "--no-header", f"--basetemp={folder / f'{slot}_tmp'}"]
    if fault is not None:
        try:
            for file in (fault.file.removesuffix(".py"), "__init__"):
                importlib.import_module("kernelbook." + file.replace("/", ".").replace(".__init__", ""))
        except BaseException as error:
            tell({"stillborn": f"{type(error).__name__}: {error}"})
            return
        plugin = Plugin()
        pytest.main([*how, "-x", *tests], plugins=[plugin])
        tell({"failed": plugin.failed})
        return
    from coverage import Coverage

    files = [str(copy / "kernelbook" / pattern) for those, _ in GROUPS.values() for pattern in those]
    coverage = Coverage(data_file=None, include=files, messages=False, config_file=False)
    plugin = Plugin(coverage)
    coverage.start()
    pytest.main([*how, *tests], plugins=[plugin])
    coverage.stop()
    data, reached = coverage.get_data(), defaultdict(list)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                if context:
                    reached[context].append((str(Path(file).relative_to(copy / "kernelbook")), line))
    tell({"seconds": plugin.seconds, "reached": reached})


def _preload() -> None:
    """What every process imports, but for the package: they are forked from this one."""
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.path.insert(0, str(ROOT / "tests"))
    for name in (
        "torch",
        "torch._dynamo",
        "torch._inductor",
        "triton",
        "hypothesis",
        "pandas",
        "coverage",
        "transformers",
        "peft",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


# --- the run --------------------------------------------------------------------------------------------------------


def _baseline(workers: Workers, groups: list[str]) -> dict[str, Any]:
    """By test: seconds, and the lines that it reaches as (file, line)."""
    names = sorted({name for group in groups for name in (*GROUPS[group][1].split(), "contract")})
    told: dict[str, Any] = {"seconds": {}, "reached": {}}

    def done(found: Any, _: float) -> None:
        for key in told:
            told[key] |= (found or {}).get(key, {})

    for name in names:
        workers.start(functools.partial(_run, workers.folder, [f"tests/test_{name}.py"], None), done, 1800.0)
    workers.wait_for_all()
    return told


def _shown(fault: Fault, told: dict[str, Any], by_line: dict[tuple[str, int], list[str]], budget: float) -> list[str]:
    seconds = told["seconds"]
    reaching = by_line.get((fault.file, fault.line)) or by_line.get((fault.file, 0), [])
    names = {*GROUPS[fault.group][1].split(), "contract"}
    reaching = [test for test in reaching if test.split("/")[-1].split(".py")[0].removeprefix("test_") in names]
    elsewhere = [part for part in ELSEWHERE if fault.file.startswith(part)]
    reaching += [test for test in seconds for part in elsewhere if ELSEWHERE[part] in test and test not in reaching]
    shown, spent = [], 0.0
    for test in sorted(reaching, key=lambda test: seconds.get(test, float("inf"))):
        spent += seconds.get(test, float("inf"))
        if spent > budget and shown and seconds.get(test, 0) > 1:
            break
        if seconds.get(test, float("inf")) <= LONGEST or elsewhere:
            shown.append(test)
    return [test for test in shown if seconds.get(test, float("inf")) < float("inf")]


def _explained(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """With what the reasons say of survivors: ``equivalent`` ones are no faults."""
    reasons = {row["name"]: row for row in rows_of(REASONS)}
    for row in rows:
        known = reasons.get(row["name"]) if row["verdict"] not in DECIDED else None
        yield row | {
            "counts_as": known["counts_as"] if known else row["verdict"],
            "reason": known["reason"] if known else "",
        }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    keep_table(path, pd.DataFrame(_explained(rows)).sort_values(["group", "file", "line", "name"]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--faults", type=int, default=65, help="of each group (default: 65)")
    parser.add_argument(
        "--budget", type=float, default=40.0, help="seconds of tests that a fault is shown to (default: 40)"
    )
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    began = time.monotonic()
    _preload()
    sample = {fault.name: fault for group in args.groups for fault in faults_of(group, args.faults)}
    known = {row["name"]: row for row in rows_of(args.results)}
    kept = {name: row for name, row in known.items() if row["group"] not in args.groups or name in sample}
    todo = [
        fault
        for name, fault in sample.items()
        if name not in kept or (args.again and kept[name]["verdict"] not in DECIDED)
    ]
    todo.sort(key=lambda fault: fault.name.rpartition(":")[2])  # every group has its share of the time
    print(f"{len(sample)} faults, {len(todo)} to try", flush=True)
    with tempfile.TemporaryDirectory(prefix="host_") as name:
        workers = Workers(args.processes, Path(name))
        told = _baseline(workers, sorted({fault.group for fault in todo}))
        by_line: dict[tuple[str, int], list[str]] = defaultdict(list)
        for test, lines in told["reached"].items():
            for file, line in {*map(tuple, lines), *((file, 0) for file, _ in lines)}:
                by_line[file, line].append(test)
        print(f"{len(told['seconds'])} tests without a fault in {time.monotonic() - began:.0f} s", flush=True)

        def record(fault: Fault, verdict: str, by: str) -> None:
            kept[fault.name] = {
                **{key: str(getattr(fault, key)) for key in ("group", "name", "file", "line", "before", "after")},
                "verdict": verdict, "by": by,
            }  # fmt: skip
            if verdict not in ("killed", "stillborn"):
                print(f"{verdict}: {fault.file}:{fault.line}: {fault.before}  ->  {fault.after}", flush=True)

        for number, fault in enumerate(todo):
            if time.monotonic() - began > args.seconds:
                print(f"{len(todo) - number} faults were left out: no time", flush=True)
                break
            tests = _shown(fault, told, by_line, args.budget)
            if not tests:
                record(fault, "untested", "")
                continue

            def done(found: Any, _: float, fault: Fault = fault, tests: list[str] = tests) -> None:
                if found is None:
                    record(fault, "timed out", "")
                elif "stillborn" in found:
                    record(fault, "stillborn", found["stillborn"][:80])
                elif found.get("failed", "?"):
                    record(fault, "killed", found.get("failed", "the process ended").removeprefix("tests/"))
                else:
                    record(fault, "survived", f"{len(tests)} tests")

            limit = PATIENCE + 4 * sum(told["seconds"][test] for test in tests)
            workers.start(functools.partial(_run, workers.folder, tests, fault), done, limit)
            if number % 20 == 19:
                _write(args.results, list(kept.values()))
        workers.wait_for_all()
    if kept:
        _write(args.results, list(kept.values()))
        table = pd.DataFrame(_explained(list(kept.values())))
        print(table.groupby(["group", "counts_as"]).size().unstack(fill_value=0).to_string())


if __name__ == "__main__":
    main()
