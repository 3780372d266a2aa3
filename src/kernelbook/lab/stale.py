"""Is a recorded row older than the kernels? One rule for every file in ``book/results``.

A row has the hash of the kernels that its file depends on, as they were when it was measured; where today's differs, it is older.
Which these are follows from the file's name: the longest name of a bench or a chapter that it begins with, then from what that
imports of the package. Of a chapter the kernels on the page count too. Needs the repository, and no GPU.
"""

import ast
import functools
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kernelbook
from kernelbook import runtime

SRC = Path(kernelbook.__file__).resolve().parents[1]
ROOT = SRC.parent  # of the repository, where there is one
CURRENT, OLDER, NOT_DATED = "current", "older", "not dated"


def commit() -> str:
    """``KERNELBOOK_COMMIT``, which a copy of these sources is told; else the repository's commit, with a ``+`` if files differ."""
    if given := runtime.given_commit():
        return given
    try:
        git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
        changed = git(["git", "status", "--porcelain", "--untracked-files=no", "--", "src", "bench"]).stdout.strip()
        return git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def tree_text(node: object) -> str:
    """A syntax tree without docstrings as text: what ``ast.dump`` shows, but alike in all versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(tree_text(each) for each in node if not _is_docstring(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")]
    shown = ",".join(f"{name}={tree_text(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({shown})"


def _is_docstring(statement: object) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_list(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a file imports, or names in them; not the whole package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("kernelbook."))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("kernelbook"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    """The file of a module, or of the module in which a name is."""
    for name in (module, module.rpartition(".")[0]):
        place = SRC.joinpath(*name.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path if path.parent != SRC / "kernelbook" or path.stem != "__init__" else None
    return None


@functools.cache
def _module(path: Path) -> tuple[str, list[str]]:
    """The syntax trees of what a module with kernels defines, as text, nothing if it has none, and what it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom)) and not _is_list(node)]
    return tree_text(defined) if any(map(_is_kernel, ast.walk(tree))) else "", [*_imports(tree)]


@functools.cache
def _page(path: Path) -> tuple[list[str], list[str]]:
    """A notebook's kernels as text, and what it imports; without lines that are IPython's."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    lines = [line.rstrip("\n") for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    tree = ast.parse("\n".join(line for line in lines if not line.lstrip().startswith(("%", "!"))))
    return [tree_text(node) for node in tree.body if _is_kernel(node)], [*_imports(tree)]


def _sources(stem: str, op: str) -> Path:
    """The bench or the chapter that a file is named after; of ``models`` and ``counters`` the bench of the room that has the function."""
    if stem in ("models", "counters"):
        rooms = sorted(path.parent for path in SRC.glob("kernelbook/*/op.py"))
        stem = next((room.name for room in rooms if f"def {op}(" in (room / "op.py").read_text()), "nothing")
    pages = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    benches = {path.stem: path for path in sorted((ROOT / "bench").glob("*.py"))}
    both = benches | pages if stem.endswith("_steps") else pages | benches
    named = [name for name in both if stem == name or stem.startswith(f"{name}_")]
    return both[max(named, key=len)] if named else SRC


@functools.cache
def kernels_hash(stem: str, op: str = "") -> str:
    """Twelve hexadecimal digits of the syntax trees of the kernels, and of the rules beside them, that a file depends on.

    Comments, docstrings and everything of the host leave them as they are.

    Args:
        stem: of the file in ``book/results/<gpu>``.
        op: the function that was measured, which tells the room of a row of ``models`` or ``counters``.
    """
    source = _sources(stem, op)
    own, waiting = _page(source) if source.suffix == ".ipynb" else ([], _module(source)[1] if source != SRC else [])
    waiting = [*waiting]
    found: set[Path] = set()
    while waiting:
        path = _file_of(waiting.pop())
        if path is not None and path not in found and "lab" not in path.relative_to(SRC).parts:
            found.add(path)
            waiting += _module(path)[1]
    kernels = [path for path in found if _module(path)[0]]
    if not kernels and not own:  # who imports the whole package, or nothing of it, depends on all
        kernels = [*SRC.rglob("kernels*.py")]
    texts = sorted(_module(path)[0] for path in kernels)
    return hashlib.sha256("\n".join([*texts, *own]).encode()).hexdigest()[:12]


def state(kernels: object, stem: str, op: str = "") -> str:
    """Of a row whose column ``kernels`` holds this: is it current, older, or not dated?"""
    if not isinstance(kernels, str) or not kernels:
        return NOT_DATED
    return CURRENT if kernels == kernels_hash(stem, op) else OLDER
