"""What makes pages of notebooks: their ladders' programs, formulas, questions, executions that are kept."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from programs import program

ROOT = Path(__file__).resolve().parents[1]
WITH_STEPS = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb") if "record=RECORD_STEPS" in path.read_text()]


def test_a_ladder_s_program_has_the_cells_that_it_needs() -> None:
    tool = program("record_chapters")
    cells = [
        "import math\nsize = 3",
        "def area(r):\n    local = math.pi\n    return local * r * size",
        "local = print('not needed')",
        "class Unused:\n    size = size",
        "print([area(r) for r in range(size)])",
    ]
    assert tool.needed_cells(cells, 4) == [0, 1, 4]
    assert tool.needed_cells(cells, 3) == [0, 3]


@pytest.mark.parametrize("name", WITH_STEPS)
def test_a_ladder_s_program_is_complete(name: str) -> None:
    tool = program("record_chapters")
    source = tool.steps_program(ROOT / "notebooks" / f"{name}.ipynb")
    assert source.count("RECORD_STEPS = True") == 1
    binds, reads = tool.names(source)
    assert reads - binds <= set(dir(builtins))


def test_without_its_switch_no_chapter_records(tmp_path: Path) -> None:
    tool = program("record_chapters")
    cell = {"cell_type": "code", "source": "time_steps(record=RECORD_STEPS)"}
    path = tmp_path / "chapter.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ValueError, match="expected one line 'RECORD_STEPS = False', found 0"):
        tool.steps_program(path)


def test_formulas() -> None:
    mathml = program("formulas").mathml
    assert "<mtext>d</mtext><mi>Y</mi>" in mathml(r"\mathrm{d}Y", "inline")
    assert '<mtext class="tt">BLOCK_M</mtext>' in mathml(r"\mathtt{BLOCK\_M}", "block")
    two = mathml("\\begin{aligned}a &= b \\\\ c &= d\\end{aligned}", "block")
    assert two.count("<mtr>") == 2 and "&</mi>" not in two


def test_a_formula_that_is_not_understood_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = program("formulas")
    warnings: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tool.LOGGER, "warning", lambda *args, **_: warnings.append(args))
    tool.mathml(r"\nosuchcommand x", "inline")
    assert warnings and r"\nosuchcommand" in warnings[0][1]


def test_a_step_shows_the_runs_of_lines_that_are_marked() -> None:
    tool = program("pages")
    source = "a = 1\nb = 2  # New:\nc = 3\nd = 4\ne = 5"
    assert tool.marked_runs(source, {2, 3, 5}) == [2, 3]
    assert tool.marked_runs("a\nb\nc", {1, 3}) == [1, 3]


def test_a_question_keeps_its_answer_folded(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser', 'pages']\n")
    (tmp_path / "index.md").write_text("# A page\n\n```{question}\nWhat is $x$?\n\n---\nA letter.\n```\n")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "pseudoxml", str(tmp_path), str(tmp_path / "out")]
    subprocess.run(build, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "tools")})
    text = (tmp_path / "out" / "index.pseudoxml").read_text()
    places = [text.index(part) for part in ("Two minutes", "What is", "<details>", "A letter", "</details>")]
    assert places == sorted(places)


def test_an_execution_is_kept_until_what_decides_it_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = program("build_book")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "EXECUTED", tmp_path / "_build" / "executed")
    monkeypatch.setattr(tool, "DECIDING", ("src",))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    path = tmp_path / "chapter.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1"), nbformat.v4.new_markdown_cell("a")])
    nbformat.write(notebook, path)
    assert not tool.is_kept(tool.open_cache(), path)
    executed, seconds, error = tool.execute(path)
    assert not error and executed.cells[0].outputs[0]["data"]["text/plain"] == "2"
    tool.keep(tool.open_cache(), path, executed, seconds)
    assert tool.is_kept(tool.open_cache(), path)
    notebook.cells[1].source = "other words"
    nbformat.write(notebook, path)
    assert tool.is_kept(tool.open_cache(), path)
    notebook.cells[0].source = "1 + 2"
    nbformat.write(notebook, path)
    assert not tool.is_kept(tool.open_cache(), path)
    tool.keep(tool.open_cache(), path, notebook, 1.0)
    (tmp_path / "src" / "a.py").write_text("2")
    assert not tool.is_kept(tool.open_cache(), path)
