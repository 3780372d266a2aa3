"""Tries the package with other versions of Python, PyTorch and Triton, each pair in an environment of its own. Needs no GPU.

    python tools/try_versions.py                          every pair below
    python tools/try_versions.py --only triton==3.8.0     those whose description has these words
    python tools/try_versions.py --python path/to/python  an environment that is there already, as it is

Every kernel is compiled for a Hopper GPU, the launcher's tests run, and those of the rooms in the interpreter; ``--short`` takes
some of the rooms' tests. What came out is a row of book/versions.csv, which the page "Running the book" shows, and in whose
place the next run of the same versions puts its own. ``runtime.TRIED_TRITON`` lists no Triton but those that passed here.
"""

import argparse
import csv
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "book" / "versions.csv"
COLUMNS = ("date", "python", "torch", "triton", "numpy", "tests", "passed", "failed")
KEY = ("python", "numpy", "torch", "triton")

# Python, PyTorch, Triton: each PyTorch with the Triton that it asks for, and on the oldest and the newest Python of both.
PAIRS = (
    ("3.10", "2.11.0", "3.6.0"),
    ("3.11", "2.13.0", "3.7.1"),
    ("3.12", "2.14.1", "3.8.0"),
    ("3.12", "2.15.0", "3.9.0"),
    ("3.13", "2.15.0", "3.9.0"),
)
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "pandas", "tabulate", "tqdm", "matplotlib", "pyyaml", "numpy")

ROOMS = (
    "layer_norm",
    "rms_norm",
    "sparse_linear",
    "scatter_ffn",
    "attention",
    "attention_decode",
    "nf4",
    "fp4",
    "moe_lora",
)
# Among those of "short": the doctor's, which has every public function compute a small case.
INTERPRETED = {
    "all": tuple(f"tests/test_{room}.py" for room in ROOMS),
    "short": ("tests/test_layer_norm.py", "tests/test_fp4.py", "tests/test_attention_decode.py"),
}
ALWAYS = (
    "tests/test_runtime.py",
    "tests/test_launch.py",
    "tests/test_cli.py::test_doctor_passes",
    "tests/test_compiles.py",
)
# Compiled: for sm_90 alone, which has the most kernels. Others need what the pinned compiler said, or a neighbour.
LEFT_OUT = "not page_holds and not others and not sm_75"


def environment(folder: Path, python: str, torch: str, triton: str) -> Path:
    """A new environment with these versions; its Python."""
    subprocess.run([f"python{python}", "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, f"torch=={torch}", *TOOLS], check=True)
    # After PyTorch, whose own choice it may not be, and whose build for the CPU brings none.
    subprocess.run([*install, "--no-deps", f"triton=={triton}"], check=True)
    return folder / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    """What an environment has, asked of itself."""
    code = (
        "import json, platform, torch, triton, numpy\n"
        "print(json.dumps({'python': platform.python_version().rpartition('.')[0], 'torch': torch.__version__, "
        "'triton': triton.__version__, 'numpy': numpy.__version__}))"
    )
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def counts(report: Path) -> tuple[int, int]:
    """How many tests passed and how many did not, by pytest's report; one failed where there is none."""
    if not report.exists():
        return 0, 1
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    return total["tests"] - failed - total["skipped"], failed


def run(python: Path, which: str, workers: str) -> dict[str, str]:
    """Runs the tests in an environment; the row."""
    row = versions(python)
    print(f"{', '.join(f'{name} {version}' for name, version in row.items())}: {which} tests", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "-m",
            "pytest",
            "-q",
            "-n",
            workers,
            "--dist",
            "worksteal",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        done = subprocess.run(
            [str(python), *command, *ALWAYS, *INTERPRETED[which], "-k", LEFT_OUT], cwd=ROOT, check=False
        )
        passed, failed = counts(report)
    if done.returncode and not failed:  # stopped, or nothing was found
        failed = 1
    return {
        "date": datetime.date.today().isoformat(),
        **row,
        "tests": which,
        "passed": str(passed),
        "failed": str(failed),
    }


def rows() -> list[dict[str, str]]:
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _order(row: dict[str, str]) -> list[list[int]]:
    """Older versions first: of Triton, then of the rest."""
    return [[int(part) for part in re.findall(r"\d+", row[name].split("+")[0])] for name in reversed(KEY)]


def keep(row: dict[str, str]) -> None:
    """Puts a row into the table, in the place of one of the same versions."""
    kept = sorted([*(old for old in rows() if any(old[name] != row[name] for name in KEY)), row], key=_order)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pairs whose description has these words: triton==3.8.0, python3.12")
    parser.add_argument("--python", type=Path, help="the Python of an environment that is there already")
    parser.add_argument("--short", action="store_true", help="some of the rooms' tests in the interpreter")
    parser.add_argument("--workers", default="auto", help="processes that test")
    given = parser.parse_args(arguments)
    which, failed = ("short" if given.short else "all"), 0
    if given.python:
        found = [run(given.python, which, given.workers)]
        keep(found[0])
        return int(found[0]["failed"] != "0")
    for python, torch, triton in PAIRS:
        name = f"python{python} torch=={torch} triton=={triton}"
        if given.only not in name:
            continue
        if shutil.which(f"python{python}") is None:
            print(f"{name}: there is no python{python} here, so this was not tried", file=sys.stderr)
            continue
        folder = ROOT / ".venv-test-versions"
        try:
            row = run(environment(folder, python, torch, triton), which, given.workers)
        except subprocess.CalledProcessError as error:  # no such wheel, or one that cannot be imported
            print(f"{name}: no environment: {error}", file=sys.stderr)
            failed += 1
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        keep(row)
        failed += row["failed"] != "0"
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
