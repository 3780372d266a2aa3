"""What the package was tried with: it claims nothing that is not in the table, and what it claims is tried again."""

import csv
import re
from pathlib import Path

from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]


def test_what_the_package_calls_tried_has_passed() -> None:
    with (ROOT / "book" / "versions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for part in ("launcher", "interpreted|rooms", "kernels"):
        passed = {
            row["triton"].rpartition(".")[0]
            for row in rows
            if re.search(part, row["tests"]) and row["failed"] == "0" < row["passed"]
        }
        assert set(runtime.TRIED_TRITON) <= passed, f"run 'nox -s versions', which has the part {part}"
