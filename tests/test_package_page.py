"""The pages of the package: the snippets of each run in their order, and the table knows every public function."""

import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest
from programs import program

import kernelbook as kb
from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]


PAGES = [ROOT / "book" / "package.md", *sorted((ROOT / "book" / "package").glob("*.md"))]
TEXT = "\n".join(path.read_text() for path in PAGES)


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [path for path in PAGES[1:] if snippets(path)], ids=lambda path: path.stem)
def test_snippets_run(page: Path) -> None:
    names: dict[str, Any] = {}
    for snippet in [*snippets(PAGES[0]), *snippets(page)]:
        exec(compile(snippet, f"{page.name}: {snippet.splitlines()[0]}", "exec"), names)  # noqa: S102


def test_a_signature_that_is_written_by_hand_is_the_function_s() -> None:
    """Autodoc would print every overload of it."""
    written = re.findall(r"autofunction:: (kernelbook\.[\w.]+)(\(.*\))$", TEXT, re.MULTILINE)
    for name, signature in written:
        names = re.findall(r"(\w+)(?==|,|\))", re.sub(r"=[^,)]+", "", signature))
        assert names == list(inspect.signature(pydoc.locate(name)).parameters), name


def test_the_first_pages_snippet_runs() -> None:
    page = (ROOT / "book" / "intro.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    small = snippet.replace('device="cuda"', f'device="{runtime.DEVICE}"').replace("1024", "32")
    assert small != snippet
    exec(compile(small, "intro.md", "exec"), {})  # noqa: S102


def test_the_table_knows_every_function() -> None:
    tool = program("support_matrix")
    functions = {name for name in kb.__all__ if inspect.isfunction(getattr(kb, name))}
    assert functions - {"same_bits"} == set(tool.cases())  # which is a mode


def test_a_line_of_the_table() -> None:
    """What is known of two functions is what the table finds out."""
    tool = program("support_matrix")
    found = tool.row("rms_norm", tool.cases()["rms_norm"])
    assert found["dtypes"] == "all" and found["launches"] == "1 + 1"
    assert [found[name] for name in ("torch.compile", "autocast", "gradients")] == ["yes"] * 3
    assert found["forward mode"] == found["of gradients"] == "error"
    assert found["CUDA graph"] == found["same bits"] == "tested"
    assert tool.row("nf4_quantize", tool.cases()["nf4_quantize"])["dtypes"] == "fp16, bf16, fp32"
