"""From each public function "go to definition" leads to every kernel that it can launch, within eight functions of ours.

jedi is the static reader, as in an editor: what a dictionary of functions, a string or ``getattr`` chooses it does not find.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jedi
import pytest
from test_compiles import SRC, _kernels_in

import kernelbook as kb
from bench import ROOMS
from kernelbook.cases import collect

HOPS = 8  # functions of ours that are entered between the public one and the kernel
NOT_FOLLOWED = {
    "launch.py",
    "runtime.py",
    "arguments.py",
    "memory.py",
    "interpreter.py",
    "tensors.py",
    "tiles.py",
}
PROJECT = jedi.Project(SRC.parent, sys_path=[str(SRC.parent)], smart_sys_path=False)


@functools.cache
def _script(path: Path) -> jedi.Script:
    return jedi.Script(path=path, project=PROJECT)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _nodes(path: Path) -> list[tuple[int, int, Any]]:
    """The functions, classes and assignments of a file, each with its first line and its last."""
    return [
        (
            min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]),
            node.end_lineno or node.lineno,
            node,
        )
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
    ]


def _node_at(path: Path, line: int) -> Any:
    """The function, class or statement at module level that stands at a line, innermost first."""
    found: Any = None
    for first, last, node in _nodes(path):
        if first <= line <= last and (found is None or node.lineno >= found.lineno):
            found = node
    return found


@functools.cache
def _definitions(path: Path, line: int, column: int) -> tuple[tuple[Path, int, str], ...]:
    """Where a name is defined, in files of the package."""
    places = _script(path).goto(line, column, follow_imports=True)
    return tuple(
        (d.module_path, d.line, d.name)
        for d in places
        if d.module_path is not None and SRC in d.module_path.parents and d.line is not None
    )


@functools.cache
def _ours() -> set[str]:
    """What functions, classes and module-level names are called in the package: of others jedi is not asked."""
    found = set[str]()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernelbook"):
                found |= {alias.asname or alias.name for alias in node.names}
        for node in _tree(path).body:
            if isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _names(node: ast.AST) -> Iterator[tuple[str, int, int]]:
    """The names that are read within a function or a statement, each once, where its last part stands; no local ones."""
    local = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    local |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    seen = set[str]()
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and (text := ast.unparse(each)) not in seen:
            seen.add(text)
            if isinstance(each, ast.Attribute):
                yield each.attr, each.end_lineno or each.lineno, (each.end_col_offset or 0) - len(each.attr)
            elif each.id not in local:
                yield each.id, each.lineno, each.col_offset


@functools.cache
def _next(path: Path, first: int) -> tuple[tuple[Path, int, str], ...]:
    """The functions, classes and declarations that one of them names."""
    node = _node_at(path, first)
    found: dict[tuple[Path, int, str], None] = {}
    for name, line, column in _names(node):
        for place in _definitions(path, line, column) if name in _ours() else ():
            target = _node_at(*place[:2])
            inside = place[0] == path and node.lineno <= place[1] <= (node.end_lineno or 0) and target is node
            if target is None or inside or place[0].name in NOT_FOLLOWED:
                continue
            if isinstance(target, ast.Assign | ast.AnnAssign) and target not in _tree(place[0]).body:
                continue
            found[place] = None
    return tuple(found)


def kernels_of(function: Any) -> dict[str, int]:
    """By name the kernels to which definitions lead from a function, and how many functions of ours are entered on the way."""
    code = function.__code__
    place = Path(code.co_filename), code.co_firstlineno, function.__name__
    reached, seen, border = dict[str, int](), {place}, [place]
    for hops in range(HOPS + 1):
        border = [p for each in border for p in _next(*each[:2]) if p not in seen and not seen.add(p)]  # type: ignore[func-returns-value]
        found = [place for place in border if place[0].name.startswith("kernels") and place[2].endswith("_kernel")]
        reached.update({name: hops for _, _, name in found if name not in reached})
        border = [place for place in border if place not in found]
    return reached


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_definitions_lead_to_every_kernel(room: str) -> None:
    functions = [getattr(kb, name) for name, case in collect(rooms=(room,)).items() if case.what]
    reached = {name for function in functions for name in kernels_of(function)}
    assert _kernels_in((SRC / room).glob("kernels*.py")) <= reached
