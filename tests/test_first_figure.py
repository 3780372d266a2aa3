"""The figure with which README and book begin: drawn from the rows that are recorded now."""

from pathlib import Path
from typing import Any

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
