"""What the package was tried with: it claims nothing that is not in the table, and what it claims is tried again."""

import csv
import re
from pathlib import Path

import yaml

from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]
NOXFILE = (ROOT / "noxfile.py").read_text()


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


def test_every_tried_triton_is_tried_again() -> None:
    pairs = set(re.findall(r'^    \("3\.\d+", "[\d.]+", "(\d+\.\d+)\.\d+"\),$', NOXFILE, re.MULTILINE))
    assert set(runtime.TRIED_TRITON) <= pairs
    jobs = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())["jobs"]
    named = {name.replace("_", ".") for name in jobs["versions"]["strategy"]["matrix"]["triton"]}
    assert named >= set(runtime.TRIED_TRITON)


def test_what_is_run_exists() -> None:
    short = re.search(r'for name in \(("[^)]*")\)\]', NOXFILE)
    assert short is not None
    assert all((ROOT / "tests" / f"test_{name}.py").is_file() for name in re.findall(r'"(\w+)"', short[1]))
    sessions = set(re.findall(r"^def (\w+)\(session: nox.Session", NOXFILE, re.MULTILINE))
    workflow = (ROOT / ".github/workflows/versions.yml").read_text()
    named = {name for line in re.findall(r"nox -s ([\w ]+?)(?: -k|$|\n)", workflow) for name in line.split()}
    assert named and named <= sessions


def test_the_weekly_runs_open_an_issue() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())
    assert workflow["permissions"] == {"contents": "read", "issues": "write"} and "schedule" in workflow[True]  # "on:"
    for name in ("next", "versions"):
        runs = [step for step in workflow["jobs"][name]["steps"] if "run" in step]
        assert runs[0]["run"].startswith("pipx run nox")
        assert runs[-1]["run"].startswith("gh issue create ") and "failure()" in runs[-1]["if"]
        assert "GH_TOKEN" in runs[-1]["env"]
