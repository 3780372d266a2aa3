"""What makes pages of notebooks: their ladders' programs, formulas, questions."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
import torch
from programs import program

from kernelbook import runtime
from kernelbook.lab import chapters, plots, record

# isort: split

ROOT = Path(__file__).resolve().parents[1]


def test_formulas() -> None:
    mathml = program("formulas").mathml
    assert "<mtext>d</mtext><mi>Y</mi>" in mathml(r"\mathrm{d}Y", "inline")
    assert '<mtext class="tt">BLOCK_M</mtext>' in mathml(r"\mathtt{BLOCK\_M}", "block")
    two = mathml("\\begin{aligned}a &= b \\\\ c &= d\\end{aligned}", "block")
    assert two.count("<mtr>") == 2 and "&</mi>" not in two


def test_a_step_highlights_the_lines_under_a_remark() -> None:
    source = "def _b_kernel(x):\n    y = x\n    # New: twice\n    z = f(\n        2 * y,\n    )\n    w = z  # New\n    tl.store(x, w)"
    assert program("pages").marked_lines(source) == {3, 4, 5, 6, 7}


HIDDEN = {"hide-input", "remove-input", "remove-cell", "hide-cell"}
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_finds_the_book_from_any_folder(path: Path) -> None:
    """By ``record.results_dir()``."""
    assert not [
        cell
        for cell in nbformat.read(path, as_version=4).cells
        if "../book" in cell.source and cell.cell_type == "code"
    ]


WORDS = 2_800  # of prose in a chapter, without exercises, listings, tables and formulas
CODE_FENCE = re.compile(
    r"^(`{3,})(?:\{(?:literalinclude|include|figure|instrument|code-cell)\}|\w+).*?^\1$", re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_short(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    text = CODE_FENCE.sub("", re.split(r"^## Exercises", text, flags=re.MULTILINE)[0])
    text = re.sub(r"\$\$.*?\$\$(?: \(.*?\))?", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\|.*\||`{3,}.*|:[\w-]+:.*|\([\w-]+\)=)$", "", text, flags=re.MULTILINE)
    words = re.sub(r"\$[^$\n]+\$|`[^`\n]+`", "x", re.sub(r"\]\(http[^)]*\)", "]", text))
    assert len(re.findall(r"\w[\w'.,-]*", words)) <= WORDS, "split it"


def open_cells(path: Path) -> str:
    """What stands open on a chapter's page before its exercises, as a script; what only puts a figure into the text is left out."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown" and re.search(r"^## Exercises", cell.source, re.MULTILINE):
            break
        if cell.cell_type == "code" and not set(cell.metadata.get("tags", [])) & HIDDEN:
            parts.append(re.sub(r"(?m)^plots\.glue\(.*\)$\n?", "", cell.source))
    return "\n\n\n".join(parts)


@pytest.mark.parametrize("name", ("layer_norm", "sparse_linear"))
def test_what_stands_open_can_be_typed_and_runs(name: str, tmp_path: Path) -> None:
    """By a reader who opens nothing: no import, no input and no check is in a folded cell only."""
    (tmp_path / "typed.py").write_text(open_cells(ROOT / "notebooks" / f"{name}.ipynb"), encoding="utf-8")
    quick = "import runpy; from kernelbook.lab import remembered_types; remembered_types.remember(); runpy.run_path('typed.py')"
    typed = subprocess.run([sys.executable, "-c", quick], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert typed.returncode == 0, typed.stderr[-2000:]
    assert typed.stdout.count("passed") >= 9


def test_embedded_pictures_become_files(tmp_path: Path) -> None:
    tool = program("pages")
    text = '<img alt="a" src="data:image/png;base64,YWJj"><img src="b.png">'
    moved = tool.with_files(text, tmp_path / "notebooks" / "page.html", tmp_path)
    (file,) = (tmp_path / "_images").iterdir()
    assert file.read_bytes() == b"abc"
    assert moved == f'<img loading="lazy" alt="a" src="../_images/{file.name}"><img src="b.png">'


def test_a_wide_drawing_has_parts_for_a_phone(tmp_path: Path) -> None:
    tool = program("pages")
    (tmp_path / "_images").mkdir()
    drawing = '<svg viewBox="0 0 600 200"><view id="phone-1" viewBox="0 0 300 200"/><view id="phone-2" viewBox="300 0 300 200"/></svg>'
    (tmp_path / "_images" / "two.svg").write_text(drawing)
    (tmp_path / "_images" / "one.svg").write_text('<svg viewBox="0 0 600 200"></svg>')
    text = '<img alt="a" src="../_images/two.svg" /><img src="../_images/one.svg"><img src="b.png">'
    found = tool.with_views(text, tmp_path)
    assert re.findall(r'class="phone-view" alt="" loading="lazy" src="([^"]+)"', found) == [
        "../_images/two.svg#phone-1",
        "../_images/two.svg#phone-2",
    ]
    assert re.sub(r'<img class="phone-view"[^>]*>', "", found) == text
    (tmp_path / "_images" / "narrow.svg").write_text('<svg viewBox="0 0 400 200"></svg>')
    assert tool.with_views('<img src="_images/narrow.svg">', tmp_path) == '<img class="fits" src="_images/narrow.svg">'


def test_a_question_keeps_its_answer_folded(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser', 'pages']\n")
    (tmp_path / "index.md").write_text("# A page\n\n```{question}\nWhat is $x$?\n\n---\nA letter.\n```\n")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "pseudoxml", str(tmp_path), str(tmp_path / "out")]
    subprocess.run(build, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "tools")})
    text = (tmp_path / "out" / "index.pseudoxml").read_text()
    places = [text.index(part) for part in ("Two minutes", "What is", "<details>", "A letter", "</details>")]
    assert places == sorted(places)


def test_packed_sequences_are_no_second_point_of_a_length() -> None:
    for mode in ("forward", "backward"):
        figure = chapters.attention_sweep(record.load_results("attention"), record.load_ceilings(), mode, True)
        lines = [list(line.get_xdata()) for ax in figure.axes for line in ax.lines]
        assert len(lines) > 6 and all(len(set(x)) == len(x) for x in lines)


@pytest.mark.parametrize("left", [3, 2, 1, 0])
@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_a_gpu_too_small_for_some_points_draws_the_others(
    name: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell that measures the reader's own points, with as many of them as fit."""
    from bench import attention as bench
    from kernelbook.lab import timing

    recorded = record.load_results("attention")

    def run_cases(cases: list[timing.Case], **_: Any) -> tuple[pd.DataFrame, list[str]]:
        assert sorted(case.x for case in cases) == [1024, 4096, 16384], "the sweep over N, and no windows"
        shapes = [case.shape_text for case in cases[:left]]
        rows = recorded[recorded["shape"].isin(shapes) & (recorded["mode"] == cases[0].mode)]
        return rows[list(record.COLUMNS)].astype(str), []

    monkeypatch.setattr(timing, "run_cases", run_cases)
    monkeypatch.setattr(record, "sentence", lambda stem, gpu: "")  # what of the record is older a test of tabs shows
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    [cell] = [cell.source for cell in cells if "own_rows(chapters.attention_points" in cell.source]
    names = {"chapters": chapters, "plots": plots, "bench": bench, "GPU": True}
    exec(cell, names)  # noqa: S102  a cell of the book


def test_steps_are_one_case_that_is_checked_and_knows_its_providers() -> None:
    def square(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return x * x

    backward = chapters.backward_of(lambda x: x * x)
    calls: dict[str, Any] = {"doubled": lambda x, dy: (2 * x * dy,), "by autograd": lambda x, dy: backward(dy, x)}
    case = chapters.step_case(
        "square", {"M": 3, "N": 5}, (60.0, 15.0), lambda x, dy: 2 * x * dy, lambda: torch.ones(2, 3, 5), calls,
        {"peer": square}, mode="backward", unchecked=["peer"],
    )  # fmt: skip
    assert case.providers == ("kernelbook:doubled", "kernelbook:by autograd", "peer") and case.x == 5
    rows = chapters.own_rows([case], rep_ms=1)
    assert len(rows) == (3 if runtime.DEVICE.type == "cuda" else 0)
    wrong = dataclasses.replace(
        case, build=lambda: chapters.problem(square, {"kernelbook:twice": lambda x: 2 * x}, torch.rand(9))
    )
    with pytest.raises(RuntimeError, match="time_steps: square backward"):
        chapters.own_rows([wrong], rep_ms=1)
