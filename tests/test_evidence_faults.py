"""Faults that are planted in kernels, a fixed choice of them, are noticed. ``make evidence`` tries a sample of each room."""

import ast
import sys
from pathlib import Path

import pytest

from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "evidence"))
import faults  # noqa: E402


def test_a_fault_is_a_change_of_the_source_that_can_be_read() -> None:
    assert {"layer_norm", "attention", "packed", "nn", "train", "study"} <= faults.rooms().keys()
    for room, files in faults.rooms().items():
        those = [fault for file in files for fault in faults.faults_of(room, file)]
        assert len(those) > 20 and len({fault.name for fault in those}) == len(those), room
        for fault in those[::40]:
            source = (faults.PACKAGE / fault.file).read_bytes()
            ast.parse(fault.planted(source))
            assert fault.planted(source) != source


@pytest.mark.slow
@pytest.mark.skipif(not runtime.INTERPRET, reason="where kernels are compiled it takes minutes")
def test_verdicts() -> None:
    every = [f for file in faults.rooms()["layer_norm"] for f in faults.faults_of("layer_norm", file)]
    [wrong] = [
        f for f in every if f.function == "_layer_norm_fwd_kernel" and f.text == "deviation" and "rstd" in f.statement
    ][:1]
    told = {
        "one": {"seconds": 1.0, "kernels": ["_layer_norm_fwd_kernel"]},
        "other": {"seconds": 0.1, "kernels": ["_other"]},
    }
    assert faults.chosen(told, faults.reaching()[wrong.function]) == ["one"]
    notices = "tests/test_evidence_kernels.py::test_the_mean_is_corrected_by_what_rounding_took_from_it"
    assert faults.shown(wrong, [notices], 200.0)[0] == "killed"
    assert faults.shown(wrong, ["tests/test_house.py::test_runtime_comes_first"], 200.0) == ("survived", "1 tests")
