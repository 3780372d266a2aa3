"""The page of the package: its snippets run in their order, and its table knows every public function."""

import re
from pathlib import Path
from typing import Any

from programs import program

from kernelbook import runtime

ROOT = Path(__file__).resolve().parents[1]


def test_snippets_run() -> None:
    page = (ROOT / "book" / "package.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 8
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, f"package.md: {snippet.splitlines()[0]}", "exec"), names)  # noqa: S102


def test_the_first_pages_snippet_runs() -> None:
    page = (ROOT / "book" / "intro.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    small = snippet.replace('device="cuda"', f'device="{runtime.DEVICE}"').replace("1024", "32")
    assert small != snippet
    exec(compile(small, "intro.md", "exec"), {})  # noqa: S102


def test_the_table_knows_every_function() -> None:
    tool = program("support_matrix")
    assert set(tool.functions()) == set(tool.cases())


def test_a_line_of_the_table() -> None:
    """What is known of two functions is what the table finds out."""
    tool = program("support_matrix")
    found = tool.row("rms_norm", tool.cases()["rms_norm"])
    assert found["dtypes"] == "all" and found["launches"] == "1 + 1"
    assert [found[name] for name in ("torch.compile", "autocast", "gradients")] == ["yes"] * 3
    assert found["forward mode"] == found["of gradients"] == "error"
    assert found["CUDA graph"] == found["same bits"] == "tested"
    assert tool.row("nf4_quantize", tool.cases()["nf4_quantize"])["dtypes"] == "fp16, bf16, fp32"


LINES = """Text.

Args:
    x: (M, K). weight: (N, K), the dtype of
        ``x``. bias, scale: (N,).
    mode: ``"a"``. It says more: this.

Returns:
    y: (M, N). x: not an entry here.
"""


def test_entries_in_one_line_are_taken_apart() -> None:
    tool = program("docstrings")
    lines = tool.apart(LINES.splitlines(), {"x", "weight", "bias", "scale", "mode"})
    assert lines[2:9] == [
        "Args:",
        "    x: (M, K).",
        "    weight: (N, K), the dtype of ``x``.",
        "    bias, scale: (N,).",
        '    mode: ``"a"``. It says more: this.',
        "",
        "Returns:",
    ]
    assert lines[9] == "    y: (M, N). x: not an entry here."
