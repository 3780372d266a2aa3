"""What the book's instruments show is what the kernels do: every recording can be made again, and is the same."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import program

from kernelbook import runtime

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"
NAMES = sorted(path.stem for path in (STATIC / "instruments").glob("*.json"))


@pytest.fixture(scope="module")
def tool() -> Any:
    return program("record_instruments")


@pytest.mark.unwatched
@pytest.mark.skipif(not runtime.INTERPRET, reason="recordings are made by the interpreter")
@pytest.mark.parametrize("name", NAMES)
def test_recording_again_gives_the_same(tool: Any, name: str) -> None:
    assert tool.written(tool.RECORDINGS[name]()) == (STATIC / "instruments" / f"{name}.json").read_text(
        encoding="utf-8"
    )


PAGES = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "book").glob("*.md")]
USED = {path: re.findall(r"\{instrument\} (\w+)", path.read_text(encoding="utf-8")) for path in PAGES}


def test_every_instrument_is_recorded_and_every_chapter_has_one() -> None:
    assert sorted(name for names in USED.values() for name in names) == NAMES
    without = {path.stem for path, names in USED.items() if not names and path.suffix == ".ipynb"}
    # Parts of a subject that has one in its first chapter, and chapters of exercises.
    assert without <= {"attention_hopper", "matrix_product", "nf4_products", "your_turn", "wrong_and_slow"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_consistent(name: str) -> None:
    recording = json.loads((STATIC / "instruments" / f"{name}.json").read_text(encoding="utf-8"))
    sizes = {panel["name"]: panel["rows"] * panel["columns"] for panel in recording["panels"]}
    assert 0 <= recording["answer"] < len(recording["choices"])
    assert 0 <= recording["asked"] < len(recording["runs"])  # the run that plays when a prediction is locked in
    colours = set(re.findall(r"\.c-(\w)\b", (STATIC / "book.css").read_text(encoding="utf-8"))) | {"."}
    legend, seen = set(recording["legend"]), set()
    for run in recording["runs"]:
        assert list(run["facts"]) == list(recording["runs"][0]["facts"])
        changes = [change for frame in run["frames"] for change in frame.get("set", [])]
        assert any(codes.strip(".") for _, _, codes, *_ in changes), "nothing happens"
        for panel, start, codes, *words in changes:
            assert 0 <= start <= start + len(codes) <= sizes[panel]
            assert not words or len(words[0]) == len(codes)
            seen |= set(codes)
    assert legend <= seen <= colours
    if not any("a colour each" in meaning for meaning in recording["legend"].values()):
        assert seen <= legend | {"."}


def test_the_script_and_a_page_s_data_are_small() -> None:
    assert len(gzip.compress((STATIC / "book.js").read_bytes())) < 30_000
    for path, names in USED.items():
        data = b"".join((STATIC / "instruments" / f"{name}.json").read_bytes() for name in names)
        assert len(gzip.compress(data)) < 60_000, path.stem
