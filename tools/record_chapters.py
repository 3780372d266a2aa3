"""Runs chapters with RECORD set, on the GPU at hand: each writes the times of its own steps into book/results/<gpu>.

usage: python tools/record_chapters.py attention_forward attention_backward

The notebooks themselves stay as they are.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def recording(path: Path) -> nbformat.NotebookNode:
    """The notebook at ``path`` with ``RECORD = True``; it has to have the one line that this replaces."""
    notebook = nbformat.read(path, as_version=4)
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, found = re.subn(r"^RECORD = False$", "RECORD = True", cell.source, flags=re.MULTILINE)
            count += found
    if count != 1:
        raise ValueError(f"{path.name}: expected one line 'RECORD = False', found {count}")
    return notebook


def main(names: list[str]) -> int:
    """Records one chapter after the other; 1 if one of them failed."""
    if not names:
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        write_kernel_spec(Path(scratch, "kernels", "python3"), extra_arguments=["--log-level=ERROR"])
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [scratch, os.environ.get("JUPYTER_PATH")]))
        for name in names:
            client = NotebookClient(
                recording(NOTEBOOKS / f"{name}.ipynb"),
                timeout=600,
                kernel_name="python3",
                resources={"metadata": {"path": str(NOTEBOOKS)}},
            )
            try:
                client.execute()
                print(f"{name}: recorded", flush=True)
            except CellExecutionError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
