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
}  # fmt: skip


def test_points_of_a_results_file_are_of_its_room(tmp_path: Path) -> None:
    own, given = tmp_path / "nf4.csv", tmp_path / "points.csv"
    pd.DataFrame([POINT]).drop(columns="room").to_csv(own, index=False)
    pd.DataFrame([POINT]).to_csv(given, index=False)
    points = compare_sources.read_points([own, given])
    assert points["room"].tolist() == ["nf4", "layer_norm"]
    assert compare_sources.named(points.iloc[1]) == {**POINT, "x": "8"}


def test_each_version_has_its_turns_and_what_one_lacks_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Process:
        def __init__(self, src: Path) -> None:
            self.src = src.name

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, work: Any, point: Any) -> Any:
            asked.append(self.src)
            found = {"kernelbook": float(len(asked)), **({"torch": 1.0} if self.src != "old" else {})}
            return type("Future", (), {"result": lambda _: found})()

    monkeypatch.setattr(compare_sources, "process", Process)
    rows = next(compare_sources.timed([{**POINT, "x": "8"}], Path("old"), math.inf))
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
