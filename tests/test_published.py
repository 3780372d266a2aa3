"""What a published book has beside its pages: Colab's cell, the site's own files, the workflow."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import program

ROOT = Path(__file__).resolve().parents[1]


def test_notebooks_have_colabs_cell_where_there_is_an_address() -> None:
    tool = program("colab")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = path.read_text()
        expected = tool.with_cell(json.loads(text), **tool.repository())
        assert json.loads(text) == expected, f"{path.name}: run 'python tools/colab.py'"


def test_colabs_cell_comes_goes_and_does_nothing_elsewhere() -> None:
    tool = program("colab")
    before = json.loads((ROOT / "notebooks" / "layer_norm.ipynb").read_text())
    with_cell = tool.with_cell(before, "https://example.org/book", "main")
    first = with_cell["cells"][0]
    assert first["metadata"]["tags"] == ["remove-cell"] and with_cell["cells"][1:] == before["cells"]
    assert tool.with_cell(with_cell, "https://example.org/book", "main") == with_cell
    assert tool.with_cell(with_cell, "", "main") == before
    source = "".join(first["source"])
    assert "https://example.org/book" in source and "{" not in source.replace("{runtime.properties().name}", "")
    names: dict[str, Any] = {}
    exec(compile(source, "cell", "exec"), names)  # noqa: S102
    assert set(names) - {"__builtins__"} == {"os", "sys", "hosted"} and not names["hosted"]


@pytest.mark.parametrize("place", ("colab", "kaggle"))
def test_the_cell_fetches_and_installs_on_colab_and_kaggle(place: str, tmp_path: Path) -> None:
    source = program("colab").CELL.format(address="https://example.org/book", branch="main")
    before = {
        "colab": "import sys, types; sys.modules['google.colab'] = types.ModuleType('google.colab')",
        "kaggle": "import os; os.environ['KAGGLE_KERNEL_RUN_TYPE'] = 'Interactive'",
    }[place]
    told = "import subprocess, os; subprocess.run = lambda command, check: print(command); os.chdir = print"
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{told}\n{source}"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    clone, folder, install, *said = done.stdout.splitlines()
    assert "https://example.org/book" in clone and folder == "book/notebooks", done.stderr
    assert install == str([sys.executable, "../tools/colab.py", "--install"])
    assert said[0].startswith("Kernels are ")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib; neither place has so old a Python")
def test_what_the_cell_installs_keeps_the_machines_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = program("colab")
    ran: list[list[str]] = []
    monkeypatch.setattr(tool.subprocess, "run", lambda command, check: ran.append(command))
    versions = {"torch": "2.10.0+cu126", "triton": "3.5.0"}
    monkeypatch.setattr(tool.importlib.metadata, "version", versions.__getitem__)
    tool.install()
    package, others = (command[command.index("--quiet") + 1 :] for command in ran)
    assert package == ["--no-deps", str(ROOT)]
    assert others[:2] == ["torch==2.10.0+cu126", "triton==3.5.0"]
    names = {re.split("[<>=;]", line)[0] for line in others[2:]}
    assert {"transformers", "peft", "tabulate", "tokenizers"} <= names and not names & {"torch", "triton", "kernelbook"}
    assert "This machine has PyTorch 2.10.0+cu126; kernelbook was tried with 2.11 and newer" in capsys.readouterr().out
    assert not tool.older("2.11.0") and not tool.older("3.0.1+cu130") and tool.older("2.9.1")


def test_a_published_book_knows_its_address_and_another_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, path = program("build_book"), tmp_path / "_config.yml"
    monkeypatch.setenv("BOOK_ADDRESS", "https://example.org/book")
    tool.write_config(path, tmp_path)
    sphinx = yaml.safe_load(path.read_text())["sphinx"]
    assert {"sphinx_sitemap", "sphinxext.opengraph", "notfound.extension"} <= {*sphinx["extra_extensions"]}
    assert sphinx["config"]["html_baseurl"] == sphinx["config"]["ogp_site_url"] == "https://example.org/book/"
    assert sphinx["config"]["notfound_urls_prefix"] == "/book/"
    monkeypatch.delenv("BOOK_ADDRESS")
    tool.write_config(path, tmp_path)
    sphinx = yaml.safe_load(path.read_text())["sphinx"]
    assert "sphinx_sitemap" not in sphinx["extra_extensions"] and "html_baseurl" not in sphinx["config"]
