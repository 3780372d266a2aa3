"""Gives every notebook its first cell for Colab and Kaggle, or takes it away: whichever the address in _config.yml asks for.

    python tools/colab.py             the cells
    python tools/colab.py --install   what such a cell runs: the package, beside the machine's own PyTorch and Triton

These places open a notebook without its repository, so the cell fetches that, for the recorded figures too, and installs the package. Elsewhere it does
nothing, and pages leave it out. While there is no address there is no launch button either, and no cell.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ID = "on-colab"
EXTRAS = ("lab", "train", "interop")  # what chapters use
# Of the machine: its GPU's driver may be too old for newer ones, and they take minutes to load.
KEPT = ("torch", "triton")

CELL = """\
# On Colab and Kaggle: fetches the book, installs its package, and says which
# GPU there is. Elsewhere this cell does nothing.
import os
import sys

hosted = "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ
if hosted and "kernelbook" not in sys.modules:
    import subprocess

    if not os.path.isdir("book"):
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", "{branch}"]
        subprocess.run([*clone, "{address}", "book"], check=True)
    os.chdir("book/notebooks")
    install = [sys.executable, "../tools/colab.py", "--install"]
    subprocess.run(install, check=True)
    sys.path.append("..")  # for bench, which no package has
    from kernelbook import runtime

    if runtime.INTERPRET:
        print("Kernels are interpreted on the CPU: right, but slow.")
        print("For figures of your own take a runtime with a T4, an L4 or an A100.")
    else:
        print(f"Kernels are compiled for {{runtime.properties().name}}.")"""


def older(torch: str) -> str:
    """A sentence where this PyTorch is older than the package asks for; empty where it is not."""
    needed = next(line for line in project()["dependencies"] if line.startswith("torch>="))
    least = needed.removeprefix("torch>=")
    if [int(part) for part in torch.split(".")[:2]] >= [int(part) for part in least.split(".")]:
        return ""
    return (
        f"This machine has PyTorch {torch}; kernelbook was tried with {least} and newer, and may not work with it. "
        f"'pip install --upgrade torch' and a restart bring a newer one."
    )


def project() -> dict[str, Any]:
    """What pyproject.toml says of the package."""
    import tomllib  # Python 3.11, which both places have

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands(present: dict[str, str]) -> list[list[str]]:
    """What installs the package; ``present`` are the machine's versions of ``KEPT``, which stay.

    The package comes without its requirements. pip leaves alone whatever else is there and new enough.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    wanted = dict.fromkeys(line for extra in EXTRAS for line in project()["optional-dependencies"][extra])
    pinned = [f"{name}=={version}" for name, version in present.items()]
    return [[*pip, "--no-deps", str(ROOT)], [*pip, *pinned, *wanted]]


def install() -> None:
    there = {distribution.name for distribution in importlib.metadata.distributions()}
    if absent := [name for name in KEPT if name not in there]:
        extras = ",".join(EXTRAS)
        raise SystemExit(f"{' and '.join(absent)} must be installed here: pip install '{ROOT}[{extras}]' brings both")
    present = {name: importlib.metadata.version(name) for name in KEPT}
    if sentence := older(present["torch"]):
        print(sentence)
    for command in commands(present):
        subprocess.run(command, check=True)


def repository() -> dict[str, str]:
    """The address and the branch, from _config.yml."""
    import yaml

    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]
    return {"address": settings["url"], "branch": settings["branch"]}


def with_cell(notebook: dict[str, Any], address: str, branch: str) -> dict[str, Any]:
    """The notebook with the cell first, or without it where there is no address."""
    cells = [cell for cell in notebook["cells"] if cell.get("id") != ID]
    if address:
        from nbformat.v4 import new_code_cell

        source = CELL.format(address=address, branch=branch).splitlines(keepends=True)
        cells.insert(0, new_code_cell(source, id=ID, metadata={"tags": ["remove-cell"]}))
    return {**notebook, "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="the package, where a notebook runs")
    if parser.parse_args().install:
        return install()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        after = json.dumps(with_cell(json.loads(before), **repository()), indent=1, ensure_ascii=False) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
