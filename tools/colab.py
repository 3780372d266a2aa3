"""Gives every notebook its first cell for Colab, or takes it away: whichever the repository's address in _config.yml asks for.

    python tools/colab.py

Colab opens a notebook without its repository, so the cell fetches that, for the recorded figures too, and installs the package. Elsewhere it does nothing,
and pages leave it out. While there is no address there is no launch button either, and no cell.
"""

import json
from pathlib import Path
from typing import Any

import yaml
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parent.parent
ID = "on-colab"

CELL = """\
# On Colab: fetches the book, installs its package, and says which GPU there
# is. Elsewhere this cell does nothing.
import sys

if "google.colab" in sys.modules and "kernelbook" not in sys.modules:
    import os
    import subprocess

    clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", "{branch}"]
    subprocess.run([*clone, "{address}", "/content/book"], check=True)
    os.chdir("/content/book/notebooks")
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "..[lab,train,interop]"], check=True)
    from kernelbook import runtime

    if runtime.INTERPRET:
        print("Kernels are interpreted on the CPU: right, but slow.")
        print("For figures of your own take a runtime with an L4 or an A100.")
    else:
        print(f"Kernels are compiled for {{runtime.properties().name}}.")"""


def repository() -> dict[str, str]:
    """The address and the branch, from _config.yml."""
    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]
    return {"address": settings["url"], "branch": settings["branch"]}


def with_cell(notebook: dict[str, Any], address: str, branch: str) -> dict[str, Any]:
    """The notebook with the cell first, or without it where there is no address."""
    cells = [cell for cell in notebook["cells"] if cell.get("id") != ID]
    if address:
        source = CELL.format(address=address, branch=branch).splitlines(keepends=True)
        cells.insert(0, new_code_cell(source, id=ID, metadata={"tags": ["remove-cell"]}))
    return {**notebook, "cells": cells}


def main() -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        after = json.dumps(with_cell(json.loads(before), **repository()), indent=1, ensure_ascii=False) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
