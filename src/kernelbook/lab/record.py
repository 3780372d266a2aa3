"""Results files: rows with a key, what they were measured with, and what dates them, in ``book/results/<gpu>/<stem>.csv``.

:func:`write_results` adds rows to such a file, :func:`load_results` reads one. Tables need the extra ``lab``.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernelbook import runtime
from kernelbook.lab import stale

if TYPE_CHECKING:
    import pandas as pd

ENVIRONMENT = ("gpu", "driver", "torch", "triton", "version", "commit", "kernels", "date")
KEY = ("op", "mode", "provider", "dtype", "shape", "x_name", "x")
FIGURES = ("ms", "ms_p20", "ms_p80", "gbytes", "gflop", "peak_mib", "err_ratio", "host_us", "gpus")
COLUMNS = ("run", *KEY, *FIGURES, *ENVIRONMENT, "peer")
CEILING_COLUMNS = ("run", "copy_gbs", "bf16_tflops", "tf32_tflops", "empty_us", "add_host_us", *ENVIRONMENT)
WRONG = 10.0  # ``err_ratio`` of a row from which on the result is wrong, and its time is compared with nothing
BOUNDS = ("packed_cublas",)  # providers that do a part of the work only: no peer, since nobody can call one instead


def is_ours(provider: str) -> bool:
    """Whether a provider is the package, or a variant of it."""
    return provider.split(":")[0] == "kernelbook"


def new_run() -> str:
    """An id for all rows of one process."""
    return uuid.uuid4().hex[:12]


@functools.cache
def _driver() -> str:
    if runtime.HAS_GPU:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    return "none"


def environment(stem: str = "", op: str = "") -> dict[str, str]:
    """The columns that say where and with what a row was measured.

    Args:
        stem: of the file that the row is for; nothing for what depends on no kernel.
        op: the function that the row is of, see :func:`kernelbook.lab.stale.kernels_hash`.
    """
    import triton

    from kernelbook import __version__

    return {
        "gpu": runtime.properties().name,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "version": __version__,
        "commit": stale.commit(),
        "kernels": stale.kernels_hash(stem, op) if stem else "",
        "date": datetime.date.today().isoformat(),
    }


def write_results(path: Path, rows: pd.DataFrame, key: Sequence[str] = KEY) -> pd.DataFrame:
    """Adds ``rows`` to the CSV file at ``path``, replacing those with the same key, and returns the whole table.

    Rows that are not replaced keep every character. The new file takes the old one's place in one step.
    Raises ``ValueError`` when the columns of the file and of ``rows`` differ.
    """
    import pandas as pd

    rows = rows.assign(peer=rows["peer"].astype(object).fillna("")) if "peer" in rows else rows
    rows = rows.astype(str)
    if path.exists():
        old = pd.read_csv(path, dtype=str, keep_default_na=False)
        if list(old.columns) != list(rows.columns):
            raise ValueError(f"write_results: {path.name} has columns {list(old.columns)}, got {list(rows.columns)}")
        rows = pd.concat([old, rows], ignore_index=True)
    rows = rows.drop_duplicates(list(key), keep="last").reset_index(drop=True)
    replace_file(path, rows.to_csv(index=False, lineterminator="\n"))
    return rows


def write_lines(path: Path, lines: Iterable[dict[str, Any]], key: Sequence[str]) -> None:
    """The same for a file of one JSON object a line, such as curves."""
    old = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    found = {json.dumps([line[name] for name in key]): line for line in [*old, *lines]}
    replace_file(path, "".join(json.dumps(line) + "\n" for line in found.values()))


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


def load_results(stem: str, gpu: str = BOOKS_GPU) -> pd.DataFrame:
    """The recorded rows of a file of ``gpu`` (a folder of ``book/results``), figures as numbers, less :func:`wrong_results`.

    A column ``state`` says of each row whether it is current, older or not dated (:mod:`kernelbook.lab.stale`).
    """
    rows = _read(stem, gpu)
    return rows.loc[~(rows["err_ratio"] >= WRONG)].reset_index(drop=True) if "err_ratio" in rows else rows


def wrong_results(stem: str, gpu: str = BOOKS_GPU) -> pd.DataFrame:
    """The rows of a file whose result is wrong by :data:`WRONG`: a peer's, since ours are not recorded then."""
    rows = _read(stem, gpu)
    return rows.loc[rows["err_ratio"] >= WRONG] if "err_ratio" in rows else rows.iloc[:0]


def _read(stem: str, gpu: str) -> pd.DataFrame:
    import pandas as pd

    path = results_dir() / gpu / f"{stem}.csv"
    if path.exists():
        rows = pd.read_csv(path, dtype={"run": str, "kernels": str, "commit": str})
    else:
        rows = pd.read_json(path.with_suffix(".jsonl"), lines=True, dtype=False)
    if "ms" in rows:
        rows["gbs"], rows["tflops"] = rows["gbytes"] / rows["ms"] * 1e3, rows["gflop"] / rows["ms"]
    ops, hashes = (rows[name] if name in rows else [""] * len(rows) for name in ("op", "kernels"))
    rows["state"] = [stale.state(kernels, stem, str(op)) for kernels, op in zip(hashes, ops, strict=True)]
    return rows


def sentence(stem: str, gpu: str = BOOKS_GPU) -> str:
    """:func:`dated` of the recorded rows of ``stem``."""
    return dated(load_results(stem, gpu))


def dated(rows: pd.DataFrame) -> str:
    """Whether rows of :func:`load_results` are older than the kernels, in a sentence; nothing where all are current."""
    if "state" not in rows:
        return ""
    counts = rows["state"].value_counts()
    words = {stale.OLDER: "were measured with other kernels than today's", stale.NOT_DATED: "are not dated"}
    parts = [f"{counts[state]:,} of {counts.sum():,} rows {word}" for state, word in words.items() if state in counts]
    return f"{'; '.join(parts)}." if parts else ""


def load_all_results(gpu: str = BOOKS_GPU) -> dict[str, pd.DataFrame]:
    """:func:`load_results` for each file of ``gpu`` that has the columns of a measurement, by its stem."""
    import pandas as pd

    files = sorted((results_dir() / gpu).glob("*.csv"))
    return {path.stem: load_results(path.stem, gpu) for path in files if "ms" in pd.read_csv(path, nrows=0).columns}


def load_ceilings(gpu: str = BOOKS_GPU) -> pd.DataFrame:
    """The recorded ceilings of ``gpu``."""
    import pandas as pd

    return pd.read_csv(results_dir() / gpu / "ceilings.csv", dtype={"run": str})


def main() -> int:
    """Prints what is older than the kernels, or not dated: a line for each file, function and state."""
    for gpu in recorded_gpus("*"):
        for path in sorted(results_dir().glob(f"{gpu}/*.*")):
            rows = load_results(path.stem, gpu)
            of = zip(rows["op"] if "op" in rows else [""] * len(rows), rows["state"], strict=True)
            for (op, state), count in collections.Counter(of).items():
                if state != stale.CURRENT and path.stem != "ceilings":
                    print(f"{gpu}/{path.name}: {op}{': ' if op else ''}{count} rows {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
