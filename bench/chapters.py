"""The times of chapters' steps: executes a notebook with ``RECORD_STEPS`` set, down to the cell that records."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SWITCH = "RECORD_STEPS"
SECONDS = 600  # for a cell


def recording(path: Path) -> nbformat.NotebookNode:
    """A notebook with its line ``RECORD_STEPS = False`` turned on, without the cells behind the last that records.

    Raises ``ValueError`` where it has no such line, or several.
    """
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    last = max((i for i, cell in enumerate(code) if f"record={SWITCH}" in cell.source), default=len(code) - 1)
    notebook.cells, count = code[: last + 1], 0
    for cell in notebook.cells:
        cell.source, found = re.subn(rf"^{SWITCH} = False$", f"{SWITCH} = True", cell.source, flags=re.MULTILINE)
        count += found
    if count != 1:
        raise ValueError(f"{path.name}: expected one line '{SWITCH} = False', found {count}")
    return notebook


def record_steps(name: str) -> int:
    """Executes a chapter so that it records; 1 where a cell fails. What it wrote before stays."""
    from ipykernel.kernelspec import write_kernel_spec

    notebook = recording(NOTEBOOKS / f"{name}.ipynb")
    with tempfile.TemporaryDirectory() as scratch:
        write_kernel_spec(Path(scratch) / "kernels" / "python3")
        resources = {"metadata": {"path": str(NOTEBOOKS)}}
        os.environ["JUPYTER_PATH"] = scratch  # for this environment's kernel, whatever others the user has
        try:
            NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
        except CellExecutionError as error:
            print(f"NOT RECORDED: {name}: {error}", file=sys.stderr)
            return 1
    print(f"{name}: recorded", flush=True)
    return 0
