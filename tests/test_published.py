"""What a published book has beside its pages: Colab's cell, the site's own files, the workflow."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import warm_python
import yaml
from programs import program
from sphinx.application import Sphinx

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
    assert install == str([warm_python.REAL, "../tools/colab.py", "--install"])
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
    assert {"transformers", "peft", "tabulate", "tiktoken"} <= names and not names & {"torch", "triton", "kernelbook"}
    assert "This machine has PyTorch 2.10.0+cu126; kernelbook was tried with 2.11 and newer" in capsys.readouterr().out
    assert not tool.older("2.11.0") and not tool.older("3.0.1+cu130") and tool.older("2.9.1")


def _build(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small pages, built by Sphinx with the extension."""
    source, out = folder / "source", folder / "out"
    (source / "notebooks").mkdir(parents=True, exist_ok=True)
    (source / "index.rst").write_text(
        "A <title> & more\n================\n\nWhat the book is.\n\n.. toctree::\n\n   notebooks/second\n   first\n"
    )
    (source / "first.rst").write_text(
        "First\n=====\n\n.. meta::\n   :description: Said to engines.\n\nSaid to readers.\n"
    )
    (source / "notebooks" / "second.rst").write_text(f"Second\n======\n\n{'A long paragraph. ' * 30}\n")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("BOOK_ADDRESS", address)
    settings = {"extensions": ["published"], "project": "A book", "html_title": "A & book", "html_theme": "basic"}
    Sphinx(str(source), None, str(out), str(folder / "trees"), "html", settings, status=None).build(force_all=True)
    return out


def test_files_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = _build(tmp_path, "https://example.org/book", monkeypatch)
    urls = [url.text for url in ET.fromstring((out / "sitemap.xml").read_bytes()).iter() if url.tag.endswith("loc")]
    assert urls == [f"https://example.org/book/{page}.html" for page in ("index", "notebooks/second", "first")]
    missing = (out / "404.html").read_text()
    assert "A &amp; book" in missing and 'href="https://example.org/book/notebooks/second.html"' in missing
    llms = (out / "llms.txt").read_text()
    assert llms.startswith("# A book\n\n> What the book is.\n")
    assert "- [First](https://example.org/book/_sources/first.rst.txt): Said to engines.\n" in llms
    assert (out / "_sources" / "first.rst.txt").is_file()
    assert "Sitemap: https://example.org/book/sitemap.xml" in (out / "robots.txt").read_text()
    assert (out / "_static" / "card.png").read_bytes()[:4] == b"\x89PNG"
    page = (out / "index.html").read_text()
    assert 'property="og:title" content="A &lt;title&gt; &amp; more"' in page
    assert 'content="https://example.org/book/_static/card.png"' in page
    assert 'property="og:description" content="A long paragraph.' in (out / "notebooks" / "second.html").read_text()


def test_without_an_address_there_is_none_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = _build(tmp_path, "", monkeypatch)
    assert not (out / "sitemap.xml").exists() and "og:title" not in (out / "index.html").read_text()
    assert 'href="/notebooks/second.html"' in (out / "404.html").read_text() and (out / "llms.txt").is_file()


def test_the_container_has_what_the_two_commands_need() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["image"].startswith("mcr.microsoft.com/devcontainers/python:") and "3.12" in container["image"]
    assert {"make", "chromium"} <= {*container["onCreateCommand"].split()}
    target = container["postCreateCommand"].removeprefix("make ")
    assert f"VENV ?= {target.split('/')[0]}\n" in (makefile := (ROOT / "Makefile").read_text())
    assert f"$(VENV)/{target.split('/')[1]}:" in makefile
    assert container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"].endswith(
        "/.venv/bin/python"
    )


def test_the_workflow_builds_and_publishes() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())["jobs"]
    steps = jobs["build"]["steps"]
    (build,) = [step for step in steps if step.get("run") == "make book"]
    assert "base_url" in build["env"]["BOOK_ADDRESS"]
    assert any(step.get("with", {}).get("path") == "_build/html" for step in steps)
    assert jobs["publish"]["needs"] == "build"
