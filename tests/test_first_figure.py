"""The figure with which README and book begin: drawn from the rows that are recorded now."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from programs import program

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> Any:
    return program("first_figure")


def test_it_is_not_older_than_the_results(tool: Any) -> None:
    assert f"drawn from rows {tool.digest()} of" in tool.PICTURE.read_text(), (
        "book/results changed: run 'python tools/first_figure.py'"
    )


def test_a_step_that_changed_nothing_is_left_out(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"kernelbook:five launches": 0.5, "kernelbook:one": 0.1, "kernelbook:renamed": 0.101, "torch": 0.1}
    table = pd.DataFrame({"provider": list(times), "ms": list(times.values()), "shape": "M=4096 N=16384", "gpu": "G"})
    monkeypatch.setattr(tool, "rows", lambda: table)
    assert [name for name, _ in tool.steps()] == ["five launches", "one", "PyTorch"]
    (ax,) = tool._figure().axes
    assert [round(bar.get_width()) for bar in ax.patches] == [500, 100, 100]
