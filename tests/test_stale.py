"""What dates a recorded row: the kernels that its file depends on, and nothing else."""

import ast
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from kernelbook.lab import record, stale


def _text(source: str) -> str:
    return stale.tree_text(ast.parse(source))


def test_comments_and_docstrings_change_no_tree_and_numbers_do() -> None:
    kernel = "@triton.jit\ndef _kernel(x):\n    y = x + 1\n"
    assert _text(kernel) == _text('@triton.jit\ndef _kernel(x):\n    """Adds."""\n    y = x + 1  # one\n')
    assert _text(kernel) != _text(kernel.replace("1", "2"))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository: two rooms, of which one uses shared kernels, a bench each, and a page with a kernel."""
    src = tmp_path / "src" / "kernelbook"
    jit = "@triton.jit\ndef _kernel(x):\n    return x\n"
    files = {
        "__init__.py": "", "launch.py": "def launch():\n    return 1\n", "packed/__init__.py": "", "packed/kernels.py": jit,
        "a/__init__.py": "from kernelbook.a.op import a\n", "a/kernels.py": jit,
        "a/op.py": "from kernelbook import launch\nfrom kernelbook.a import kernels\n\n\ndef a(x):\n    return x\n",
        "b/__init__.py": "", "b/kernels.py": jit,
        "b/op.py": "from kernelbook.b import kernels\nfrom kernelbook.packed import kernels as more\n\n\ndef b(x):\n    return x\n",
        "lab/timing.py": jit,
    }  # fmt: skip
    benches = {
        "a.py": "from kernelbook.a import op\nfrom kernelbook.lab import timing\n",
        "b.py": "from kernelbook.b.op import b\n",
    }
    pages = '{"cells": [{"cell_type": "code", "source": ["%%time\\n", "@triton.jit\\n", "def _step(x):\\n", "    return x\\n"]}]}'
    for folder, texts in (
        (src, files),
        (tmp_path / "bench", benches),
        (tmp_path / "notebooks", {"a.ipynb": pages, "p.ipynb": pages}),
    ):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    monkeypatch.setattr(stale, "SRC", src.parent)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    for cached in (stale._module, stale._page, stale.kernels_hash):
        cached.cache_clear()
    return src


# Every stem that a change of one file makes older.
@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("src/kernelbook/a/kernels.py", {"a", "a_more", "models of a"}),
        ("src/kernelbook/b/kernels.py", {"b", "models of b"}),
        ("src/kernelbook/packed/kernels.py", {"b", "models of b"}),
        ("src/kernelbook/launch.py", set()),
        ("src/kernelbook/lab/timing.py", set()),
        ("src/kernelbook/a/op.py", set()),
        ("bench/a.py", set()),
        ("notebooks/p.ipynb", {"p", "p_steps"}),
        ("notebooks/a.ipynb", {"a_steps"}),
    ],
)
def test_a_file_is_dated_by_the_kernels_that_its_bench_or_its_page_uses(tree: Path, name: str, older: set[str]) -> None:
    def hashes() -> dict[str, str]:
        for cached in (stale._module, stale._page, stale.kernels_hash):
            cached.cache_clear()
        found = {stem: stale.kernels_hash(stem) for stem in ("a", "a_more", "b", "p", "p_steps", "a_steps")}
        return found | {f"models of {op}": stale.kernels_hash("models", op) for op in ("a", "b")}

    before, path = hashes(), tree.parents[1] / name
    path.write_text(path.read_text().replace("return x", "return x + 1").replace("return 1", "return 2"))
    after = hashes()
    assert {stem for stem in before if before[stem] != after[stem]} == older


def test_the_commit_is_git_s_or_the_one_that_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    monkeypatch.delenv("KERNELBOOK_COMMIT", raising=False)
    assert stale.commit() == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    clean = stale.commit()
    assert len(clean) == 12
    (tmp_path / "src" / "a.py").write_text("2")
    assert stale.commit() == f"{clean}+"
    monkeypatch.setenv("KERNELBOOK_COMMIT", "abc")
    assert stale.commit() == "abc"


def test_a_page_says_how_many_rows_are_older(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    (tmp_path / "gpu").mkdir()
    kernels = [stale.kernels_hash("layer_norm"), "0" * 12, "", ""]
    pd.DataFrame({"op": "layer_norm", "kernels": kernels}).to_csv(tmp_path / "gpu" / "layer_norm.csv", index=False)
    assert record.sentence("layer_norm", "gpu") == (
        "1 of 4 rows were measured with other kernels than today's; 2 of 4 rows are not dated."
    )
    pd.DataFrame({"op": "layer_norm", "kernels": kernels[:1]}).to_csv(tmp_path / "gpu" / "layer_norm.csv", index=False)
    assert record.sentence("layer_norm", "gpu") == ""
