"""What the package was tried with: the table is made by the tool, and the package claims nothing that is not in it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import program

from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool, with a table of its own."""
    found = program("try_versions")
    monkeypatch.setattr(found, "TABLE", tmp_path / "versions.csv")
    return found


def test_what_the_package_calls_tried_has_passed() -> None:
    tool = program("try_versions")
    rows = tool.rows()
    assert rows == sorted(rows, key=tool._order)
    known, on_gpus = {*tool.parts(short=False), *tool.parts(short=True)}, tuple(f"{name}, " for name in tool.HERE)
    assert all(row["tests"] in known or row["tests"].startswith(on_gpus) for row in rows)
    for part in ("launcher", "interpreted", "kernels"):
        passed = {
            r["triton"].rpartition(".")[0] for r in rows if part in r["tests"] and r["failed"] == "0" < r["passed"]
        }
        assert set(runtime.TRIED_TRITON) <= passed, f"run 'make test-versions', which has the part {part}"


def test_what_a_gpu_says_stands_beside_its_name(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != "nvidia-smi":
            ran.append(command)
        return subprocess.CompletedProcess(command, 5, stdout="NVIDIA L4\n")

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(
        tool, "versions", lambda _: {"python": "3.12", "torch": "2.11", "triton": "3.6.0", "numpy": "2"}
    )
    assert tool.main(["--here", "--only", "rooms, compiled"]) == 1
    ((row,), (command,)) = tool.rows(), ran
    assert row["tests"] == "rooms, compiled for sm_75, NVIDIA L4" and row["failed"] == "1"
    assert command[0] == sys.executable and command[-len(tool.ROOMS) - 1 :][:2] == ["sm_75", "tests/test_layer_norm.py"]


def test_every_tried_triton_is_tried_again() -> None:
    pairs = program("try_versions").PAIRS
    assert set(runtime.TRIED_TRITON) <= {triton.rpartition(".")[0] for _, _, triton in pairs}
    jobs = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())["jobs"]
    assert set(jobs["versions"]["strategy"]["matrix"]["triton"]) >= set(runtime.TRIED_TRITON)


def test_the_weekly_runs_open_an_issue() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())
    assert workflow["permissions"] == {"contents": "read", "issues": "write"} and "schedule" in workflow[True]  # "on:"
    for name, command in (("next", "make test-next"), ("versions", "make test-versions")):
        runs = [step for step in workflow["jobs"][name]["steps"] if "run" in step]
        assert runs[0]["run"].startswith(command)
        assert runs[-1]["run"].startswith("gh issue create ") and "failure()" in runs[-1]["if"]
        assert "GH_TOKEN" in runs[-1]["env"]


def test_the_table_keeps_one_row_for_the_same_versions(tool: Any) -> None:
    old = dict.fromkeys(tool.COLUMNS, "0") | {
        "python": "3.11",
        "torch": "2.11.0+cpu",
        "triton": "3.6.0",
        "numpy": "2.2.6",
    }
    for row in (old | {"triton": "3.10.0"}, old | {"failed": "3"}, old | {"triton": "3.9.0"}, old):
        tool.keep(row)
    assert [(row["triton"], row["failed"]) for row in tool.rows()] == [("3.6.0", "0"), ("3.9.0", "0"), ("3.10.0", "0")]


def test_passed_and_failed_are_pytests_own(tool: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert tool.counts(report) == (0, 1), "a run without a report has failed"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="1"/></testsuites>')
    assert tool.counts(report) == (5, 3)


def test_a_pair_without_its_python_is_said_so(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    assert tool.main(["--only", "triton==3.9.0"]) == 0 and not tool.rows()
    assert "python3.12 torch==2.15.0 triton==3.9.0: there is no python3.12 here" in capsys.readouterr().err


def test_what_it_runs_exists(tool: Any) -> None:
    for path in (
        path for paths in (tool.PARTS | tool.parts(short=True)).values() for path in paths if path.startswith("tests/")
    ):
        name, _, test = path.partition("::")
        assert test in (ROOT / name).read_text()
    assert set(tool.parts(short=True)) == {"launcher", "attention's kernels for sm_90", "doctor, interpreted"}
