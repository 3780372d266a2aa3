"""Do the tests notice a broken kernel? Plants small faults in kernels, one at a time, and runs the tests that reach them.

    python tools/evidence/faults.py --faults 400 --seconds 14400                a sample of each room
    python tools/evidence/faults.py --rooms layer_norm --faults 40 --processes 2

First the room's tests run without a fault, to see which kernels each launches and how long it takes. Then each fault is planted
in a copy of the sources and shown to the tests that reach its function, the fast ones first, until one fails. How many there are
of each verdict goes to ``book/evidence/faults.csv``, each fault to ``_build/faults/<room>.csv``:

    killed      a test failed
    timed out   the tests did not end in four times the time that they take without a fault. Counted apart
    stillborn   the changed kernel is no program: it does not compile. Not counted
    survived    all tests that ran passed; ``reasons.csv`` says of some that they break no promise (equivalent), or why they live
    untested    no test reaches the function here
"""

import argparse
import ast
import copy
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from kernelbook.lab.stale import commit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, EVIDENCE = ROOT / "src" / "kernelbook", ROOT / "book" / "evidence"
# Beside the folders with kernels: whose tests have to notice, where that is not test_<folder>*.py, the contract, fuzz and test_evidence_*.py.
TESTS = {"packed": "nf4 moe_lora", "nn": "moe_block whole_model", "study": "layer_norm scatter_ffn moe_lora"}
NO_PROGRAM = r"CompilationError|InterpreterError|UnsupportedLanguage|CompileTimeAssertion|SyntaxError"
HINTS = ("_prefetch",)  # it only asks a cache for what will be read: no result can depend on it
OTHERS = ("static_assert", "assume", "inline_asm_elementwise")
# Calls that keep threads, warps or kernels in order.
ORDER = ("debug_barrier", "gdc_wait", "fence_async_shared", "wait", "arrive", "store_wait", "barrier", "thread_barrier")
PATIENCE, BUDGET = 30.0, 60.0  # seconds: added to what tests may take, and of tests that a fault is shown to
VERDICTS = ("killed", "stillborn", "timed out", "equivalent", "survived", "untested")


@dataclasses.dataclass(frozen=True)
class Fault:
    """``text`` instead of the source from ``start`` to ``end`` (offsets in bytes) of ``file``."""

    room: str
    file: str
    function: str
    kind: str
    statement: str
    line: int
    start: int
    end: int
    text: str


# --- what can be planted --------------------------------------------------------------------------------------------


def _called(node: ast.AST) -> str:
    """The last part of the name that a call calls; empty for what is no call."""
    called = getattr(node, "func", None)
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _changed(node: Any, **fields: Any) -> Any:
    """The same, but for these fields."""
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def _without(call: ast.Call, *names: str) -> ast.Call:
    return _changed(call, keywords=[k for k in call.keywords if k.arg not in names])


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_constant(node: ast.AST) -> bool:
    """Known when a kernel is compiled: constants, and names in capitals except sizes."""
    sizes = {"M", "N", "K", "L", "S", "D", "E", "R", "T", "G", "H", "K_out", "L_out"}
    return not any(isinstance(n, ast.Call) for n in ast.walk(node)) and all(
        n.isupper() and n not in sizes for n in _names(node)
    )


def _is_tuple(node: ast.AST) -> bool:
    return isinstance(node, (ast.Tuple, ast.List))


def _expr(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


_LOOSER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.LtE: ast.Lt, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def _of_call(node: ast.Call, stored: bool) -> Iterator[tuple[str, ast.AST]]:
    name, keywords = _called(node), {k.arg: k.value for k in node.keywords}
    if name in ("load", "store") or name.startswith("atomic_"):
        if "mask" in keywords:
            yield "mask dropped", _without(node, "mask", "other")
        if "other" in keywords:
            yield "other dropped", _without(node, "other")
    if name.startswith("atomic_"):
        relaxed = ast.keyword("sem", ast.Constant("relaxed"))
        yield "order relaxed", _changed(node, keywords=[*_without(node, "sem").keywords, relaxed])
    if name in ("range", "static_range") and node.args:
        step = ast.unparse(node.args[2]) if len(node.args) > 2 else "1"
        at = 1 if len(node.args) > 1 else 0
        first, (end, *rest) = node.args[:at], node.args[at:]
        yield "loop one short", _changed(node, args=[*first, _expr(f"({ast.unparse(end)}) - ({step})"), *rest])
        if first:
            yield "loop starts late", _changed(node, args=[_expr(f"({ast.unparse(first[0])}) + ({step})"), end, *rest])
    if name == "zeros" and node.args:
        size, *rest = node.args
        full = _changed(node.func, attr="full")
        yield "accumulator not reset", _changed(node, func=full, args=[size, ast.Constant(1), *rest])
    if name == "dot" and len(node.args) > 2:
        yield "accumulator lost", _changed(node, args=[*node.args[:2], *node.args[3:]])
    if name == "where":
        yield from (("choice dropped", choice) for choice in node.args[1:] if not isinstance(choice, ast.Constant))
    if name in ("minimum", "maximum"):
        yield from (("bound dropped", arg) for arg in node.args)
    if name == "to" and isinstance(node.func, ast.Attribute) and node.args and not stored:
        target = ast.unparse(node.args[0])
        if target.endswith("int64"):
            yield "cast dropped", node.func.value
        elif target in ("ACC", "tl.float32", "gl.float32"):
            narrow = _expr("tl.float16" if target != "gl.float32" else "gl.float16")
            yield "cast narrowed", _changed(node, args=[narrow, *node.args[1:]])


def _of_operation(node: ast.BinOp, strides: list[str]) -> Iterator[tuple[str, ast.AST]]:
    left, right, op = node.left, node.right, type(node.op)
    if _is_tuple(left) or _is_tuple(right) or _is_constant(node):
        return
    if op is ast.BitAnd:
        yield "condition dropped", left
        yield "condition dropped", right
    elif op is ast.Mult:
        for side, other in (("right", left), ("left", right)):
            factor = getattr(node, side)
            if isinstance(factor, ast.Name) and factor.id.startswith("stride"):
                alike = [s for s in strides if s[:8] == factor.id[:8] and s != factor.id]
                swapped = _expr(alike[0] if alike else f"({factor.id} + 1)")
                yield "stride swapped", _changed(node, **{side: swapped})
            elif side == "right" or isinstance(factor, ast.Constant):
                yield "factor dropped", other
    elif op in (ast.Div, ast.FloorDiv, ast.Mod):
        yield "divisor dropped", left
    elif op in (ast.Add, ast.Sub):
        yield "term dropped", left
        if op is ast.Sub:
            yield "sign turned", ast.BinOp(left, ast.Add(), right)


def _of_comparison(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    op, right = type(node.ops[0]), node.comparators[0]
    if len(node.ops) != 1 or _is_constant(node) or isinstance(getattr(right, "value", None), str):
        return
    if op in _LOOSER:
        yield "comparison changed", _changed(node, ops=[_LOOSER[op]()])
    if op is ast.Lt:
        yield "bound off by one", _changed(node, comparators=[_expr(f"({ast.unparse(right)}) - 1")])


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Expr) and _called(node.value) in ORDER:
        yield "barrier removed", ast.Pass()
    if isinstance(node, ast.AugAssign) and not _is_tuple(node.value):
        yield "update dropped", ast.Pass()
    named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    if named and "arange" in map(_called, ast.walk(node.value)):  # type: ignore[attr-defined]
        yield "offset off by one", _changed(node, value=_expr(f"({ast.unparse(node.value)}) + 1"))


def _of_function(function: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt, ast.AST, ast.AST]]:
    """-> kind, statement, the node that is replaced, what replaces it."""
    strides = [a.arg for a in function.args.args if a.arg.startswith("stride")]
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    stored = {arg for call in calls if _called(call) == "store" for arg in call.args[1:2]}  # a store casts by itself

    def visit(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt, ast.AST, ast.AST]]:
        for statement in statements:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(statement, ast.If) and {*map(_called, ast.walk(statement.body[-1]))} & {*HINTS}:
                continue  # it prepares a hint, and nothing else
            if isinstance(statement, ast.AnnAssign) or _called(getattr(statement, "value", statement)) in OTHERS:
                continue
            for kind, new in _of_statement(statement):
                yield kind, statement, statement, new
            blocks = [getattr(statement, name, []) for name in ("body", "orelse")]
            inner = {id(s) for block in blocks for s in block}
            todo: list[ast.AST] = [c for c in ast.iter_child_nodes(statement) if id(c) not in inner]
            if isinstance(statement, ast.If) and not _is_constant(statement.test) and _names(statement.test):
                returns = isinstance(statement.body[-1], ast.Return)
                yield "guard dropped", statement, statement.test, ast.Constant(not returns)
            while todo:
                node = todo.pop()
                found: Iterator[tuple[str, ast.AST]] = iter(())
                if isinstance(node, ast.Call):
                    found = _of_call(node, node in stored)
                elif isinstance(node, ast.BinOp):
                    found = _of_operation(node, strides)
                elif isinstance(node, ast.Compare):
                    found = _of_comparison(node)
                elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not _is_constant(node.operand):
                    found = iter([("sign turned", node.operand)])
                elif isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in (0.0, 1.0):
                    found = iter([("constant off", ast.Constant(node.value * 1.01))])
                for kind, new in found:
                    yield kind, statement, node, new
                todo.extend(ast.iter_child_nodes(node))
            for block in blocks:
                yield from visit(block)

    yield from visit(function.body)


def is_kernel(node: ast.AST) -> bool:
    """A function under ``triton.jit`` or ``gluon.jit``."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(d).split("(")[0] in ("triton.jit", "gluon.jit") for d in node.decorator_list
    )


def faults_of(room: str, file: str) -> list[Fault]:
    """All faults that can be planted in the kernels of a file, in the order of the source."""
    source = (PACKAGE / file).read_bytes()
    starts = [*accumulate(map(len, source.splitlines(keepends=True)), initial=0)]
    found: list[Fault] = []
    for function in ast.parse(source).body:
        if not is_kernel(function) or function.name in HINTS:
            continue
        for kind, statement, old, new in _of_function(function):
            start = starts[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
            end = starts[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
            text = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(new, ast.expr) and not isinstance(new, (ast.Call, ast.Name, ast.Constant, ast.Subscript)):
                text = f"({text})"
            if text != source[start:end].decode():
                head = ast.unparse(statement).splitlines()[0]
                line = old.lineno  # type: ignore[attr-defined]
                found.append(Fault(room, file, function.name, kind, head, line, start, end, text))
    return found


def rooms() -> dict[str, list[str]]:
    """By folder with kernels its files."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.glob("*/*.py")):
        room = path.parent.name
        if room != "lab" and any(map(is_kernel, ast.parse(path.read_text()).body)):
            found.setdefault(room, []).append(f"{room}/{path.name}")
    return found


def sample(room: str, count: int) -> list[Fault]:
    """So many faults of a room, spread evenly over files, functions and kinds."""
    every = [fault for file in rooms()[room] for fault in faults_of(room, file)]
    every.sort(key=lambda fault: (fault.file, fault.function, fault.kind))
    golden = (5**0.5 - 1) / 2  # of its multiples, modulo 1, any number lie apart
    return [every[i] for i in sorted(range(len(every)), key=lambda i: i * golden % 1)[:count]]


def reaching() -> dict[str, set[str]]:
    """By function of kernels: the kernels in which it runs, by their names, itself included."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.parse(path.read_text()).body if is_kernel(node)]
    calls = {
        kernel.name: _names(kernel) | {n.attr for n in ast.walk(kernel) if isinstance(n, ast.Attribute)}
        for kernel in nodes
    }
    found = {name: {name} for name in calls}
    for _ in range(8):  # no function is called through more
        for caller, names in calls.items():
            for name in names & calls.keys():
                found[name] |= found[caller]
    return found


# --- the tests ------------------------------------------------------------------------------------------------------


class Watcher:
    """A plugin of pytest: notes which kernels each test launches, and its seconds, of those that pass."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.launched: set[str] = set()

    def pytest_sessionstart(self) -> None:
        from triton.runtime.jit import KernelInterface

        from kernelbook.launch import Launch

        def noting(call: Any) -> Any:
            def noted(of: Any, *args: Any) -> Any:
                kernel = getattr(of, "kernel", of)
                self.launched.add(getattr(kernel, "__name__", None) or kernel.fn.__name__)
                return call(of, *args)

            return noted

        KernelInterface.__getitem__ = noting(KernelInterface.__getitem__)  # type: ignore[method-assign]
        Launch.__call__ = noting(Launch.__call__)  # type: ignore[method-assign]

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.when == "call":
            if call.excinfo is None:
                self.told[item.nodeid] = {"seconds": call.duration, "kernels": sorted(self.launched)}
            self.launched.clear()


def files_of(room: str) -> list[str]:
    """The test files that have to notice a fault of a room."""
    names = [*TESTS.get(room, room).split(), "evidence_", "contract", "fuzz"]
    found = {path for name in names for path in (ROOT / "tests").glob(f"test_{name}*.py")}
    return [str(path.relative_to(ROOT)) for path in sorted(found)]


def environment(src: Path) -> dict[str, str]:
    path = [str(src), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def chosen(told: dict[str, Any], kernels: set[str]) -> list[str]:
    """The tests that launch one of these kernels, the fast ones first, up to a budget of seconds."""
    tests, spent = [], 0.0
    for name, about in sorted(told.items(), key=lambda item: item[1]["seconds"]):
        if kernels & {*about["kernels"]} and (spent := spent + about["seconds"]) < max(BUDGET, about["seconds"] + 1e-9):
            tests.append(name)
    return tests


def shown(fault: Fault, tests: list[str], limit: float) -> tuple[str, str]:
    """The verdict on a fault that is planted in a copy of the sources, and the test that gave it."""
    with tempfile.TemporaryDirectory() as scratch:
        src = Path(shutil.copytree(ROOT / "src", Path(scratch) / "src"))
        path = src / "kernelbook" / fault.file
        source = path.read_bytes()
        path.write_bytes(source[: fault.start] + fault.text.encode() + source[fault.end :])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        how: dict[str, Any] = {"cwd": ROOT, "env": environment(src), "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=limit, check=False, **how)
        except subprocess.TimeoutExpired:
            return "timed out", ""
    if done.returncode == 0:
        return "survived", f"{len(tests)} tests"
    failed = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "stillborn" if re.search(NO_PROGRAM, done.stdout) else "killed", "".join(failed[:1])[:200]


def campaign(room: str, count: int, processes: int, until: float) -> Iterator[dict[str, Any]]:
    """A row for each fault of a room's sample that is tried before the time is up."""
    kernels = reaching()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--baseline", file.name, *files_of(room)]
        subprocess.run(command, cwd=ROOT, env=environment(ROOT / "src"), stdout=subprocess.DEVNULL, check=False)
        told = json.loads(Path(file.name).read_text())

    def tried(fault: Fault) -> tuple[Fault, str, str]:
        tests = chosen(told, kernels[fault.function])
        if not tests or time.monotonic() > until:
            return fault, "" if tests else "untested", ""
        return fault, *shown(fault, tests, PATIENCE + 4 * sum(told[test]["seconds"] for test in tests))

    with ThreadPoolExecutor(processes) as pool:
        for fault, verdict, by in pool.map(tried, sample(room, count)):
            if verdict:
                print(f"{verdict:9} {fault.file}:{fault.line} {fault.kind}: {fault.statement[:80]}", flush=True)
                yield dataclasses.asdict(fault) | {"verdict": verdict, "by": by} | explained(fault, verdict)


def explained(fault: Fault, verdict: str) -> dict[str, str]:
    """What a fault counts as, and of one that lives the reason, if ``reasons.csv`` has one for this place."""
    if verdict in ("survived", "untested"):
        for r in pd.read_csv(EVIDENCE / "reasons.csv", dtype=str, keep_default_na=False).to_dict("records"):
            same = r["function"] in ("", fault.function) and r["kind"] in ("", fault.kind)
            if same and r["statement"] in fault.statement and r["text"] in ("", fault.text):
                return {"counts_as": r["counts_as"], "reason": r["reason"]}
    return {"counts_as": verdict, "reason": ""}


def main() -> None:
    """Tries a sample of each room, and prints the share that the tests noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=list(rooms()), choices=list(rooms()))
    parser.add_argument("--faults", type=int, default=400, help="of each room (default: 400)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--baseline", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.baseline:
        import pytest

        watcher = Watcher()
        pytest.main(["-q", "-p", "no:cacheprovider", *given.baseline[1:]], plugins=[watcher])
        Path(given.baseline[0]).write_text(json.dumps(watcher.told))
        return
    until = time.monotonic() + given.seconds
    (ROOT / "_build" / "faults").mkdir(parents=True, exist_ok=True)
    for room in given.rooms:
        found = pd.DataFrame(campaign(room, given.faults, given.processes, until))
        if found.empty:
            continue
        found.to_csv(ROOT / "_build" / "faults" / f"{room}.csv", index=False)
        counts = found["counts_as"].value_counts().reindex(VERDICTS, fill_value=0)
        line = {"faults": sum(len(faults_of(room, file)) for file in rooms()[room]), **counts}
        line["unexplained"] = sum(found["counts_as"].isin(("survived", "untested")) & (found["reason"] == ""))
        line |= {"commit": commit(), "date": datetime.date.today().isoformat()}
        known = pd.read_csv(EVIDENCE / "faults.csv").set_index("room")
        known.loc[room] = line
        known.to_csv(EVIDENCE / "faults.csv", lineterminator="\n")
        print(f"{room}:", ", ".join(f"{value} {name}" for name, value in line.items()), flush=True)


if __name__ == "__main__":
    main()
