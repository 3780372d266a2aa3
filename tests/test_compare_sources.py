"""Two versions of the package, timed in turn."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import compare_sources

POINT = {
    "room": "layer_norm", "op": "layer_norm", "mode": "forward", "dtype": "float32", "shape": "M=4 N=8", "x_name": "N", "x": 8.0,
    "date": "2026-11-21",
}  # fmt: skip


def _rows(ours: float, peer: float, bound: float = 0.1) -> pd.DataFrame:
    found = {"kernelbook": 2 * ours, "kernelbook:other": ours, "torch": peer, "packed_cublas": bound}
    return pd.DataFrame([{**POINT, "provider": name, "ms": ms} for name, ms in found.items()])


def test_the_fastest_of_each_side_counts_and_no_bound() -> None:
    both = compare_sources.best(_rows(1.0, 3.0)).iloc[0]
    assert both["ours"] == 1.0 and both["peer"] == 3.0 and both["provider"] == "kernelbook:other"


def test_points_are_worse_by_more_than_two_per_cent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "book" / "results" / compare_sources.SLUG
    place.mkdir(parents=True)
    monkeypatch.setattr(compare_sources, "ROOT", tmp_path)
    before = _rows(1.0, 3.0).to_csv(index=False)
    monkeypatch.setattr(compare_sources.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": before}))
    for ours, expected in ((1.01, 0), (1.04, 1)):
        _rows(ours, 3.0).to_csv(place / "layer_norm.csv", index=False)
        found = compare_sources.worse("a-revision", "layer_norm")
        assert len(found) == expected
    assert found["ours"].item() == 1.04 and found["since"].item() == "2026-11-21"
    assert found["was"].item() == 3.0 and found["now"].item() == pytest.approx(3 / 1.04, abs=1e-4)


def test_each_version_has_its_turns_and_what_one_lacks_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Worker:
        process = type("Process", (), {"terminate": staticmethod(lambda: None)})

        def __init__(self, src: Path) -> None:
            self.src = src.name

        def ask(self, point: Any) -> dict[str, float]:
            asked.append(self.src)
            return {"kernelbook": float(len(asked)), **({"torch": 1.0} if self.src != "old" else {})}

    monkeypatch.setattr(compare_sources, "Worker", Worker)
    rows = next(compare_sources.timed(pd.DataFrame([POINT]), Path("old"), math.inf))
    assert asked == ["old", "src", "src", "src", "src", "old"]
    assert rows["provider"].tolist() == ["kernelbook"] and rows["x"].tolist() == ["8"]
    assert [float(rows[f"{which}_ms"].iloc[0]) for which in ("old", "new", "again")] == [3.5, 3.5, 3.5]
    assert float(rows["spread"].iloc[0]) == 6.0


def test_what_a_gpu_gets_is_the_same_or_not(tmp_path: Path) -> None:
    """An untouched room is the same code, another root is not; large inputs take no time."""
    old = tmp_path / "src"
    shutil.copytree(compare_sources.NEW, old, ignore=shutil.ignore_patterns("__pycache__"))
    kernels = old / "kernelbook" / "layer_norm" / "kernels.py"
    text = kernels.read_text()
    kernels.write_text(text.replace("1.0 / tl.sqrt(", "tl.rsqrt("))
    assert kernels.read_text() != text
    large = {"op": "layer_norm", "mode": "forward", "dtype": "bfloat16", "shape": "M=4096 N=8192", "x": 8192.0}
    unlike = {
        **large,
        "room": "scatter_ffn",
        "op": "scatter_ffn",
        "shape": "M=1 K=4096 N=16384",
        "x_name": "active",
        "x": 0.1,
    }
    points = pd.DataFrame([{**POINT, **large}, {**POINT, **unlike}, POINT]).assign(provider="kernelbook")
    found = compare_sources.same_code(points, old)
    assert found["same"].tolist() == [False, True, None]  # of the last no bench has a case
    assert found["kernels"].tolist()[0] == 1 and found["kernels"].tolist()[2] == 0
