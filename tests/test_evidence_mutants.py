"""Planted faults are noticed: a small fixed choice of them, all of which once were not. ``make evidence`` tries them all."""

import csv
import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "evidence"))
import faults  # noqa: E402
from common import Workers, together  # noqa: E402

# Function, kind, and a part of the statement and of what stands there instead.
ONCE_ALIVE = (
    ("_layer_norm_fwd_kernel", "term dropped", "(deviation - shift) * rstd", "deviation"),
    ("_layer_norm_fwd_kernel", "term dropped", "- shift * shift + EPS", "(tl.sum(squares, axis=1) / N)[:, None]"),
    ("_layer_norm_fwd_kernel", "term dropped", "stats_ptr + rows, mean + shift", "mean"),
    ("_layer_norm_fwd_looped_kernel", "term dropped", "- count * shift * shift", "tl.sum(centered * centered)"),
    ("_total", "barrier removed", "tl.debug_barrier()", "pass"),
    ("_total", "order relaxed", "acq_rel", "relaxed"),
    ("_activate", "NaN takes the other side", "tl.where(z <= 0, 0.0, z)", "z > 0"),
)


@functools.cache
def _chosen() -> list[faults.Fault]:
    everything = faults.faults(("layer_norm", "scatter_ffn"))
    found = []
    for function, kind, statement, text in ONCE_ALIVE:
        those = [f for f in everything if (f.function, f.kind) == (function, kind) and statement in f.statement]
        exact = [f for f in those if f.text == text] or [f for f in those if text in f.text]
        assert exact, (function, kind, statement, text)
        found.append(exact[0])
    return found


@pytest.mark.skipif(
    not runtime.INTERPRET, reason="the interpreter tells races at once; on a GPU they are a matter of luck"
)
def test_these_faults_are_killed(tmp_path: Path) -> None:
    results = tmp_path / "mutants.csv"
    # Those that notice. Shares of a sum are watched while the last one runs, as they are in every test.
    names = ("the_variance_is_that_of_exact_deviations[looped]", "the_mean_is_corrected_by_what_rounding_took_from_it")
    names += ("the_mean_that_is_kept_is_the_corrected_one[registers]", "nan_goes_through_every_activation[relu-20]")
    tests = [f"test_evidence_kernels.py::test_{name}" for name in names]
    tests.append("test_scatter_ffn.py::test_every_way_to_compute_it[vector, shared-plain-float16]")
    command = [sys.executable, str(ROOT / "tools" / "evidence" / "mutants.py"), "--where", "interpreter"]
    command += ["--processes", "1", "--tests-seconds", "40", "--results", str(results)]
    command += ["--rooms", "layer_norm", "scatter_ffn", "--files", *tests]
    command += ["--only", *(fault.name for fault in _chosen())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with results.open(newline="") as file:
        verdicts = {row["name"]: row["verdict"] for row in csv.DictReader(file)}
    assert verdicts == {fault.name: "killed" for fault in _chosen()}, done.stdout[-3000:]


def test_a_fault_is_a_change_of_the_source_that_can_be_read() -> None:
    import ast

    for room in faults.ROOMS:
        those = [f for file in faults.ROOMS[room][0] for f in faults.faults_of(room, file)]
        assert len(those) > 50 and len({f.name for f in those}) == len(those)
        for fault in those[::40]:
            source = (faults.PACKAGE / fault.file).read_bytes()
            planted = fault.planted(source)
            ast.parse(planted)
            assert planted != source


def test_a_fault_and_its_function_are_known_by_other_names_of_variables() -> None:
    import ast

    file = "layer_norm/kernels.py"
    source = (faults.PACKAGE / file).read_text()
    renamed = source.replace("deviation", "distance").replace("rstd_ptr", "scale_ptr")
    assert renamed != source
    one, other = (faults.faults_of("layer_norm", file, text.encode()) for text in (source, renamed))
    assert [fault.name for fault in one] == [fault.name for fault in other]
    functions = [[n for n in ast.parse(text).body if faults.is_kernel(n)] for text in (source, renamed)]
    assert [faults.digest_of(n) for n in functions[0]] == [faults.digest_of(n) for n in functions[1]]
    changed = ast.parse(source.replace("(deviation - shift) * rstd", "(deviation + shift) * rstd")).body
    assert [faults.digest_of(n) for n in changed if faults.is_kernel(n)] != [faults.digest_of(n) for n in functions[0]]


def test_processes_tell_what_they_saw_die_or_are_stopped(tmp_path: Path) -> None:
    workers, found = Workers(2, tmp_path), list[Any]()

    def dies(slot: int, tell: Any) -> None:
        tell({"told": "before"})
        raise ValueError

    for work, limit in (
        (lambda slot, tell: tell({"told": slot < 2}), 60.0),
        (lambda slot, tell: time.sleep(60), 0.2),
        (lambda slot, tell: None, 60.0),
        (dies, 60.0),
    ):
        workers.start(work, lambda told, seconds: found.append(told), limit)
    workers.wait_for_all()
    assert sorted(found, key=str) == sorted([{"told": True}, None, {"died": True}, {"told": "before"}], key=str)
    assert sorted(workers.free) == [0, 1]


def test_campaigns_add_up() -> None:
    one = {"examples": 2, "worst": 1.5, "where": "here", "element": 0.1, "drawn_again": 1, "failures": ["a"]}
    other = {"examples": 3, "worst": 1.2, "where": "there", "element": 0.4, "failures": []}  # of an older record
    both = {"examples": 5, "worst": 1.5, "where": "here", "element": 0.4, "drawn_again": 1, "failures": ["a"]}
    assert together([one, other]) == together([other, one]) == both
