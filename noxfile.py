"""Other versions than the pinned ones, each in an environment of its own: ``nox -l`` lists them, ``nox -s oldest`` runs one.

``versions`` tries pairs of PyTorch and Triton, and adds a row for each to book/versions.csv, which "Running the book" shows.
"""

import csv
import datetime
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import nox

nox.options.sessions = ["oldest", "oldest_interop"]
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "pandas", "tabulate", "tqdm", "matplotlib", "pyyaml"]
# The oldest that the package supports. (NumPy 2.4 breaks Triton 3.6's interpreter.)
OLDEST = ("torch==2.11.0", "triton==3.6.0", "numpy==2.2.6")
# Every kernel is compiled for a Hopper GPU, and some rooms run in the interpreter.
SHORT = [f"tests/test_{name}.py" for name in ("runtime", "launch", "compiles", "layer_norm", "nf4")]
WITHOUT = "not page_holds and not others and not sm_75"  # of which the records are those of the pinned compiler
# Python, PyTorch, Triton: each PyTorch with the Triton that it asks for, and on the oldest and the newest Python of both.
PAIRS = [
    ("3.10", "2.11.0", "3.6.0"),
    ("3.11", "2.13.0", "3.7.1"),
    ("3.12", "2.14.1", "3.8.0"),
    ("3.12", "2.15.0", "3.9.0"),
    ("3.13", "2.15.0", "3.9.0"),
    ("3.14", "2.15.0", "3.9.0"),
]
TABLE = Path(__file__).parent / "book" / "versions.csv"
COLUMNS = ("date", "python", "torch", "triton", "numpy", "tests", "passed", "failed")


def pytest(session: nox.Session, *arguments: str) -> None:
    path = os.pathsep.join(["src", "."])
    session.run("python", "-m", "pytest", "-n", "auto", "--dist", "worksteal", *arguments, env={"PYTHONPATH": path})


@nox.session
def oldest(session: nox.Session) -> None:
    """The oldest versions that the package supports."""
    session.install(*TOOLS, *OLDEST)
    pytest(session, *SHORT, "-k", WITHOUT)


@nox.session
def newest(session: nox.Session) -> None:
    """The newest that the index has, before pins are moved."""
    session.install(*TOOLS)
    session.install("--upgrade", "--pre", "torch", "triton", "numpy")
    pytest(session, *SHORT, "-k", WITHOUT)


@nox.session
def oldest_interop(session: nox.Session) -> None:
    """The oldest of each neighbour, as pyproject.toml bounds them, with the oldest pair; then the oldest that takes ``kernels``."""
    neighbours = ("transformers==5.8.0", "peft==0.20.0", "accelerate==1.10.0", "bitsandbytes==0.50.0")
    session.install(*TOOLS, *OLDEST, *neighbours)
    interop = [str(path) for path in sorted(Path("tests").glob("test_interop_*.py"))]
    pytest(session, "tests/test_swap.py", *interop, "tests/test_captured_models.py")
    session.install("transformers[kernels]==5.19.0", "kernels==0.17.2")
    pytest(session, "tests/test_hub.py", "tests/test_captured_models.py")


@nox.session
@nox.parametrize(
    ("python", "torch", "triton"), PAIRS, ids=[f"triton_{t}_python_{p}".replace(".", "_") for p, _, t in PAIRS]
)
def versions(session: nox.Session, torch: str, triton: str) -> None:
    """A pair of PyTorch and Triton; what came out is a row of book/versions.csv."""
    session.install(*TOOLS, "numpy", f"torch=={torch}")
    session.install("--no-deps", f"triton=={triton}")  # which PyTorch's own choice may not be
    report = Path(session.create_tmp()) / "report.xml"
    try:
        pytest(session, *SHORT, "-k", WITHOUT, f"--junitxml={report}")
    finally:
        asked = "import numpy, torch; print(torch.__version__, numpy.__version__)"
        found = str(session.run("python", "-c", asked, silent=True)).split()
        [suite] = ET.parse(report).getroot().iter("testsuite")
        total, failed = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        passed = total - failed - int(suite.get("skipped", 0))
        today = datetime.date.today().isoformat()
        with TABLE.open("a", newline="") as file:
            row = (today, session.python, found[0], triton, found[1], "launcher, kernels, rooms", passed, failed)
            csv.writer(file, lineterminator="\n").writerow(row)
