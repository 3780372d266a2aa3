"""Results files: rows with a key, what they were measured with, and what dates them, in ``book/results/<gpu>/<stem>.csv``.

:func:`write_results` adds rows to such a file, :func:`load_results` reads one. Tables need the extra ``lab``.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import datetime
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernelbook import runtime
from kernelbook.lab import dates

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BOOKS_GPU",
    "BOUNDS",
    "CEILING_COLUMNS",
    "COLUMNS",
    "DATES",
    "ENVIRONMENT",
    "KEY",
    "LATER_COLUMNS",
    "WRONG",
    "check_folder",
    "device_slug",
    "drop_rows",
    "drop_unused_ceilings",
    "environment",
    "gpu_name",
    "is_ours",
    "load_all_results",
    "load_ceilings",
    "load_results",
    "new_run",
    "notebook_version",
    "package_version",
    "page_version",
    "recorded_gpus",
    "replace_file",
    "results_dir",
    "slug",
    "source_digest",
    "write_results",
    "wrong_results",
]

ENVIRONMENT = ("gpu", "driver", "torch", "triton", "package", "date")
DATES = ("launches", "host", "peer")  # see lab/older.py
KEY = ("op", "mode", "provider", "dtype", "shape", "x_name", "x")
FIGURES = ("ms", "ms_p20", "ms_p80", "gbytes", "gflop", "peak_mib", "err_ratio", "host_us", "gpus")
COLUMNS = ("run", *KEY, *FIGURES, *ENVIRONMENT, *DATES)
CEILING_COLUMNS = ("run", "copy_gbs", "bf16_tflops", "tf32_tflops", "empty_us", "add_host_us", *ENVIRONMENT)
# Columns that joined later, with what they are in files that were written before.
LATER_COLUMNS = {
    "host_us": "nan", "gpus": "1", "empty_us": "nan", "add_host_us": "nan", "setup_s": "nan",
    "launches": "", "host": "", "peer": "", "sources": "",
}  # fmt: skip
# What decides the figures of every room, beside its own sources.
PACKAGE = Path(__file__).resolve().parents[1]
SHARED_SOURCES = (
    "launch.py",
    "operators.py",
    "memory.py",
    "tensors.py",
    "arguments.py",
    "runtime.py",
    "tiles.py",
    "packed",
)
WRONG = 10.0  # ``err_ratio`` of a row from which on the result is wrong, and its time is compared with nothing
BOUNDS = ("packed_cublas",)  # providers that do a part of the work only: no peer, since nobody can call one instead


def is_ours(provider: str) -> bool:
    """Whether a provider is the package, or a variant of it."""
    return provider.split(":")[0] == "kernelbook"


def new_run() -> str:
    """An id for all rows of one process."""
    return uuid.uuid4().hex[:12]


def source_digest(*places: Path) -> str:
    """Eight hexadecimal digits that change with the Python sources in these folders or files: they tie a row to its code."""
    digest = hashlib.sha256()
    for place in places:
        for path in [place] if place.is_file() else sorted(place.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def page_version(stem: str, kernels: Iterable[Any]) -> str:
    """``<stem>+<digest>`` of the sources of a page's own kernels, and of the package where its files or folders are given."""
    sources = "".join(source_digest(k) if isinstance(k, Path) else inspect.getsource(k.fn) for k in kernels)
    if not sources:
        raise ValueError("page_version: kernels must name what a row measures, got none")
    return _version_of(stem, sources)


def _version_of(stem: str, sources: str) -> str:
    sources = re.sub(r"^ *# (region .*|endregion)\n", "", sources, flags=re.MULTILINE)  # what a page folds
    return f"{stem}+{hashlib.sha256(sources.encode()).hexdigest()[:8]}"


def notebook_version(stem: str) -> str:
    """What :func:`page_version` gives of a chapter's steps, read off its notebook, so that a cell can have it before the last
    kernel; empty where there is no such notebook."""
    path = results_dir().parents[1] / "notebooks" / f"{stem.removesuffix('_steps')}.ipynb"
    return _notebook_version(stem, path, path.stat().st_mtime_ns) if path.exists() else ""


@functools.cache
def _notebook_version(stem: str, path: Path, _changed: int) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    functions: dict[str, str] = {}
    tuples: dict[str, list[ast.expr]] = {}
    imports: list[ast.ImportFrom] = []
    measured: ast.expr | None = None
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                text = "".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])
                functions[node.name] = text.rstrip("\n") + "\n"
            elif isinstance(node, (ast.Assign, ast.AugAssign)) and isinstance(node.value, ast.Tuple):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                tuples.setdefault(ast.unparse(target), []).extend(node.value.elts)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "timing.time_steps":
                measured = node.args[2]
            elif isinstance(node, ast.ImportFrom):
                imports.append(node)
    parts: list[str] = []
    for element in tuples.get(ast.unparse(measured), [measured]) if measured is not None else []:
        if isinstance(element, ast.Name):
            parts.append(functions[element.id])
        else:
            # A path of the package, spelled with what the notebook imports.
            names = {node.id for node in ast.walk(element) if isinstance(node, ast.Name)}
            scope: dict[str, Any] = {}
            for node in imports:
                for alias in node.names:
                    if (name := alias.asname or alias.name) in names:
                        module = importlib.import_module(node.module or "")
                        found = getattr(module, alias.name, None)
                        scope[name] = found or importlib.import_module(f"{node.module}.{alias.name}")
            found = eval(ast.unparse(element), scope)
            parts += [source_digest(place) for place in ([found] if isinstance(found, Path) else found)]
    return _version_of(stem, "".join(parts))


def package_version(*places: Path) -> str:
    """``<version of kernelbook>+<digest>`` of the sources in these folders or files and of :data:`SHARED_SOURCES`."""
    from kernelbook import __version__

    shared = [PACKAGE / name for name in SHARED_SOURCES]
    return f"{__version__}+{source_digest(*places, *(path for path in shared if path.exists()))}"


def environment(package: str) -> dict[str, str]:
    """The columns that say where and with what a row was measured."""
    import triton

    driver = "none"
    if runtime.HAS_GPU:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    return {
        "gpu": runtime.properties().name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "package": package,
        "date": datetime.date.today().isoformat(),
    }


def write_results(path: Path, rows: pd.DataFrame, key: Sequence[str] = KEY) -> pd.DataFrame:
    """Adds ``rows`` to the CSV file at ``path``, replacing those with the same key, and returns the whole table.

    Rows that are not replaced keep every character. The new file takes the old one's place in one step. New rows of a file
    that its sources date (:data:`kernelbook.lab.dates.DATED`) get their digest, wherever the file lies. Raises ``ValueError`` when the columns of the file and of ``rows`` differ.
    """
    import pandas as pd

    if digest := dates.sources_digest(path.stem):
        rows = _dated(rows, digest)
    rows = rows.fillna({name: value for name, value in LATER_COLUMNS.items() if name in rows.columns}).astype(str)
    if path.exists():
        old = _with_later_columns(pd.read_csv(path, dtype=str, keep_default_na=False), list(rows.columns))
        if list(old.columns) != list(rows.columns):
            raise ValueError(f"write_results: {path.name} has columns {list(old.columns)}, got {list(rows.columns)}")
        rows = pd.concat([old, rows], ignore_index=True)
    rows = rows.drop_duplicates(list(key), keep="last").reset_index(drop=True)
    replace_file(path, rows.to_csv(index=False, lineterminator="\n"))
    return rows


def drop_rows(path: Path, which: Callable[[pd.DataFrame], Sequence[bool]]) -> None:
    """Drops rows of a file, if there is one: ``which`` says of each whether it goes. The others keep every character."""
    import pandas as pd

    if path.exists():
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        left = rows[[not goes for goes in which(rows)]]
        if len(left) < len(rows):
            replace_file(path, left.to_csv(index=False, lineterminator="\n"))


def _dated(rows: pd.DataFrame, digest: str) -> pd.DataFrame:
    """``rows`` with the digest where they have none: in ``launches`` of our rows, or, of another kind of table, in ``sources``."""
    if not set(KEY) <= {*rows.columns}:
        return rows if "sources" in rows.columns else rows.assign(sources=digest)
    rows = (rows if "launches" in rows.columns else rows.assign(launches="")).fillna({"launches": ""})
    return rows.assign(launches=rows["launches"].mask(rows["provider"].map(is_ours) & (rows["launches"] == ""), digest))


def _with_later_columns(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """``rows`` with those of :data:`LATER_COLUMNS` that ``columns`` has and a file from before has not."""
    missing = {name: value for name, value in LATER_COLUMNS.items() if name in columns and name not in rows.columns}
    return rows.assign(**missing)[list(columns)] if missing and {*rows.columns, *missing} == {*columns} else rows


def replace_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def drop_unused_ceilings(folder: Path) -> None:
    """Drops from ``ceilings.csv`` in ``folder`` the runs of which no other file there has a row any more."""
    path = folder / "ceilings.csv"
    if not path.exists():
        return
    others = [other.read_text() for other in folder.iterdir() if other.suffix in {".csv", ".jsonl"} and other != path]
    header, *rows = path.read_text().splitlines(keepends=True)
    used = [row for row in rows if any(row.split(",", 1)[0] in other for other in others)]
    replace_file(path, "".join([header, *used]))


def check_folder(op: str, out: Path) -> None:
    """Raises a ``ValueError`` unless ``out`` is a folder that can be written to, or may become one."""
    try:
        there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=there):  # permissions do not say it: nobody makes a folder in /proc
            pass
    except OSError as error:
        raise ValueError(f"{op}: out must be a folder to write to, got {str(out)[:80]}: {error.strerror}") from None


def slug(name: str) -> str:
    """Return a GPU's name as files and folders are called by it: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_slug() -> str:
    """Return the name of the folder under ``book/results`` for this machine: ``nvidia-h200``, ``interpreter``."""
    return slug(runtime.properties().name) if runtime.DEVICE.type == "cuda" else "interpreter"


def results_dir() -> Path:
    """``book/results`` of the repository that the working folder, or else this package, lies in."""
    here = Path(__file__).resolve()
    for folder in (*[Path.cwd(), *Path.cwd().parents], *here.parents):
        if (folder / "book" / "results").is_dir() and (folder / "_toc.yml").is_file():
            return folder / "book" / "results"
    raise FileNotFoundError(
        "results_dir: no folder book/results above the working folder or the package: it needs the book's repository"
    )


BOOKS_GPU = "nvidia-h200"  # whose rows the text of the book speaks of


def recorded_gpus(*stems: str) -> list[str]:
    """The folders of ``book/results`` that have a file of one of these stems (``layer_norm``): the book's GPU first.

    Then the one at hand, if it has been measured, then all others by name.
    """
    folders = {path.parent.name for stem in stems for path in results_dir().glob(f"*/{stem}.*")}
    first = [gpu for gpu in (BOOKS_GPU, device_slug()) if gpu in folders]
    return list(dict.fromkeys([*first, *sorted(folders)]))


def gpu_name(folder: str) -> str:
    """The name of the GPU whose rows are in ``folder`` of ``book/results``, as they have it; ``folder`` where it has none."""
    path = results_dir() / folder / "ceilings.csv"
    if not path.exists():
        return folder
    with path.open() as rows:
        return next((row["gpu"] for row in csv.DictReader(rows)), folder)


def load_results(room: str, gpu: str = BOOKS_GPU) -> pd.DataFrame:
    """The recorded rows of ``room`` on ``gpu`` (a folder of ``book/results``), figures as numbers, less :func:`wrong_results`."""
    rows = _read(room, gpu)
    return rows.loc[~(rows["err_ratio"] >= WRONG)].reset_index(drop=True) if "err_ratio" in rows else rows


def wrong_results(room: str, gpu: str = BOOKS_GPU) -> pd.DataFrame:
    """The rows of ``room`` whose result is wrong by :data:`WRONG`: a peer's, since ours are not recorded then."""
    rows = _read(room, gpu)
    return rows.loc[rows["err_ratio"] >= WRONG] if "err_ratio" in rows else rows.iloc[:0]


def _read(room: str, gpu: str) -> pd.DataFrame:
    import pandas as pd

    rows = pd.read_csv(results_dir() / gpu / f"{room}.csv", dtype={"run": str})
    for name in ("host_us", "gpus"):
        if name not in rows.columns:
            rows[name] = float(LATER_COLUMNS[name])
    rows["gbs"] = rows["gbytes"] / rows["ms"] * 1e3
    rows["tflops"] = rows["gflop"] / rows["ms"]
    return rows


def load_all_results(gpu: str = BOOKS_GPU) -> dict[str, pd.DataFrame]:
    """:func:`load_results` for each file of ``gpu`` that has the columns of a measurement, by its stem."""
    import pandas as pd

    files = sorted((results_dir() / gpu).glob("*.csv"))
    return {path.stem: load_results(path.stem, gpu) for path in files if "ms" in pd.read_csv(path, nrows=0).columns}


def load_ceilings(gpu: str = BOOKS_GPU, run: str | None = None) -> pd.DataFrame:
    """The recorded ceilings of ``gpu``, those of one ``run`` if it is given."""
    import pandas as pd

    rows = pd.read_csv(results_dir() / gpu / "ceilings.csv", dtype={"run": str})
    return rows if run is None else rows.loc[rows["run"] == run]
