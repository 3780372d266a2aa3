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


def test_another_row_is_another_digest(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, tables = tool.digest(), tool.tables
    monkeypatch.setattr(tool, "tables", lambda gpu: {stem: table.iloc[1:] for stem, table in tables(gpu).items()})
    assert tool.digest() != before


def test_ratios_are_those_of_the_fastest_alternative_within_a_run(tool: Any) -> None:
    point = {"op": "f", "mode": "forward", "dtype": "float32", "shape": "N=1", "x_name": "N", "x": 1}
    rows = pd.DataFrame(
        [
            {"run": run, **point, "provider": provider, "ms": ms}
            for run, provider, ms in (
                ("a", "kernelbook", 2.0), ("a", "torch", 6.0), ("a", "liger", 4.0),
                ("a", "kernelbook:locks", 1.0), ("a", "packed_cublas", 1.0),
                ("b", "kernelbook", 2.0), ("b", "torch", 1.0), ("c", "torch", 0.1),
            )
        ]
    )  # fmt: skip
    assert sorted(tool.ratios(rows, "ms")) == [0.5, 2.0]


def test_a_gpu_with_few_of_the_points_has_no_line(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    point = {"op": "layer_norm", "mode": "forward", "dtype": "float32", "shape": "", "x_name": "N", "run": "a"}
    counts = {"large": 4, "half": 2, "small": 1}

    def tables(gpu: str) -> dict[str, pd.DataFrame]:
        rows = [
            {**point, "x": x, "provider": provider, "ms": ms, "host_us": 1.0, "gpu": gpu}
            for x in range(counts[gpu])
            for provider, ms in (("kernelbook", 1.0), ("torch", 2.0 + x))
        ]
        return {"layer_norm": pd.DataFrame(rows)}

    monkeypatch.setattr(tool, "tables", tables)
    monkeypatch.setattr(tool, "gpus", lambda: list(counts))
    (ax,) = tool._figure().axes
    drawn = {line.get_color() for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2}
    assert drawn == {tool.COLORS[0], tool.COLORS[1]}


def test_readme_and_first_page_begin_with_it() -> None:
    assert "book/figures/first.svg" in (ROOT / "README.md").read_text()[:1500]
    assert "figures/first.svg" in (ROOT / "book" / "intro.md").read_text()[:2500]
