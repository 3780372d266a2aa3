"""Tries the package with other versions of Python, PyTorch and Triton, each pair in an environment of its own; or on a GPU.

    python tools/try_versions.py                          every pair below
    python tools/try_versions.py --only triton==3.8.0     those whose description has these words
    python tools/try_versions.py --here                   what needs a GPU, with the versions that this Python has

Every kernel is compiled for a Hopper GPU, the launcher's tests run, and those of the rooms in the interpreter; ``--short`` takes
less of the first and the last. What came out of a part is a row of book/versions.csv,
which the page "Running the book" shows, and in whose place the next run of the same versions puts its own.
``runtime.TRIED_TRITON`` lists no Triton but those of which each part passed here.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "book" / "versions.csv"
COLUMNS = ("date", "python", "torch", "triton", "numpy", "tests", "passed", "failed")
KEY = ("tests", "python", "numpy", "torch", "triton")

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
# What is tried, as the table's column "tests" names it: pytest's arguments.
PARTS = {
    "launcher": ("tests/test_launch.py",),
    "rooms, interpreted": tuple(f"tests/test_{room}.py" for room in ROOMS),
    # sm_90 alone, which has the most kernels. Others' reports would be those of the pinned compiler.
    "kernels for sm_90": ("tests/test_compiles.py::test_kernels_compile_without_spilling", "-k", "sm_90"),
}
# What --short takes in the place of a part: the doctor has every public function compute small cases, and attention has the
# kernels that depend on the version most.
SHORT = {
    "rooms, interpreted": ("doctor, interpreted", ("tests/test_cli.py::test_doctor_passes",)),
    "kernels for sm_90": ("attention's kernels for sm_90", (*PARTS["kernels for sm_90"][:2], "attention-sm_90")),
}
# On a GPU, with what is installed: what needs one; and all tests of the rooms, and all chapters, by kernels that are compiled for
# a T4.
HERE = {
    "GPU tests of the rooms": ("-m", "gpu and not alone", *PARTS["rooms, interpreted"], "tests/test_same_bits.py"),
    "rooms, compiled for sm_75": ("-m", "not alone", "--stand-in", "sm_75", *PARTS["rooms, interpreted"]),
    "chapters, compiled for sm_75": ("--stand-in", "sm_75", "tests/test_memory.py", "-k", "six_gib"),
}


def parts(short: bool) -> dict[str, tuple[str, ...]]:
    """The parts to be run."""
    return dict(SHORT.get(name, (name, given)) if short else (name, given) for name, given in PARTS.items())


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
    kinds = ("tests", "failures", "errors", "skipped")
    tests, failures, errors, skipped = (sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds)
    return tests - failures - errors - skipped, failures + errors


def run(python: Path, chosen: Mapping[str, Sequence[str]], workers: str) -> bool:
    """Runs tests in an environment and keeps a row for each part; whether all passed."""
    have, all_passed = versions(python), True
    for part, given in chosen.items():
        print(f"{', '.join(f'{name} {version}' for name, version in have.items())}: {part}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = ["-m", "pytest", "-q", "-n", workers, "--dist", "worksteal", "-p", "no:cacheprovider"]
            done = subprocess.run([str(python), *command, f"--junitxml={report}", *given], cwd=ROOT, check=False)
            passed, failed = counts(report)
        if done.returncode and not failed:  # stopped, or nothing was found
            failed = 1
        today = datetime.date.today().isoformat()
        keep({"date": today, **have, "tests": part, "passed": str(passed), "failed": str(failed)})
        all_passed &= not failed
    return all_passed


def rows() -> list[dict[str, str]]:
    return pd.read_csv(TABLE, dtype=str, keep_default_na=False).to_dict("records") if TABLE.exists() else []


def _order(row: dict[str, str]) -> list[Any]:
    """Older versions first: of Triton, then of the rest."""
    numbers = [[int(part) for part in re.findall(r"\d+", row[name].split("+")[0])] for name in reversed(KEY[1:])]
    return [numbers, row["torch"], row["tests"]]


def keep(row: dict[str, str]) -> None:
    """Puts a row into the table, in the place of one of the same versions."""
    kept = sorted([*(old for old in rows() if any(old[name] != row[name] for name in KEY)), row], key=_order)
    pd.DataFrame(kept, columns=list(COLUMNS)).to_csv(TABLE, index=False, lineterminator="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pairs whose description has these words: triton==3.8.0, python3.12")
    parser.add_argument("--short", action="store_true", help="one room compiled, small cases interpreted")
    parser.add_argument("--workers", default="auto", help="processes that test")
    parser.add_argument("--here", action="store_true", help="no environments: what needs a GPU, beside this Python")
    given = parser.parse_args(arguments)
    if given.here:
        smi = [
            "nvidia-smi",
            "--query-gpu=name",
            "--format=csv,noheader",
            f"--id={os.environ.get('CUDA_VISIBLE_DEVICES') or 0}",
        ]
        gpu = subprocess.run(smi, check=True, capture_output=True, text=True).stdout.splitlines()[0]
        wanted = {f"{name}, {gpu}": how for name, how in HERE.items() if given.only in name}
        return int(not run(Path(sys.executable), wanted, given.workers))
    chosen = parts(given.short)
    failed = False
    for python, torch, triton in PAIRS:
        name = f"python{python} torch=={torch} triton=={triton}"
        if given.only not in name:
            continue
        if shutil.which(f"python{python}") is None:
            print(f"{name}: there is no python{python} here, so this was not tried", file=sys.stderr)
            continue
        folder = ROOT / ".venv-test-versions"
        try:
            failed |= not run(environment(folder, python, torch, triton), chosen, given.workers)
        except subprocess.CalledProcessError as error:  # no such wheel, or one that cannot be imported
            print(f"{name}: no environment: {error}", file=sys.stderr)
            failed = True
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
