"""Runs chapters with RECORD set, on the GPU at hand: each writes the times of its own steps into book/results/<gpu>.

usage: python tools/record_chapters.py [--steps] attention_forward attention_backward

With --steps only the ladder is recorded, by RECORD_STEPS, and only the cells run that it needs, which takes seconds.
The notebooks themselves stay as they are.
"""

import json
import os
import re
import subprocess
import symtable
import sys
import tempfile
import time
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def names(source: str) -> tuple[set[str], set[str]]:
    """The global names that a cell binds, and those that it or its functions read."""
    binds: set[str] = set()
    reads: set[str] = set()

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if top and (symbol.is_assigned() or symbol.is_imported()):
                binds.add(symbol.get_name())
            # What a class's body binds and reads may be read from outside before it is bound.
            if symbol.is_referenced() and (top or symbol.is_global() or table.get_type() == "class"):
                reads.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(source, "<cell>", "exec"), True)
    return binds, reads


def needed_cells(cells: list[str], last: int) -> list[int]:
    """The cells, in order, that bind what cell ``last`` reads, or what those read."""
    kept = {last}
    wanted = set(names(cells[last])[1])
    for i in range(last - 1, -1, -1):
        binds, reads = names(cells[i])
        if binds & wanted:
            kept.add(i)
            wanted |= reads
    return sorted(kept)


def steps_program(path: Path) -> str:
    """What the notebook's last cell with RECORD_STEPS needs, and the cell, as a program."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    last = max(i for i, source in enumerate(code) if "record=RECORD_STEPS" in source)
    program = "\n\n".join(code[i] for i in needed_cells(code, last))
    program, count = re.subn(r"^RECORD_STEPS = False$", "RECORD_STEPS = True", program, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{path.name}: expected one line 'RECORD_STEPS = False', found {count}")
    return program


def record_steps(name: str, scratch: Path) -> bool:
    """Runs the program of a chapter's ladder; whether that went well."""
    program = scratch / f"{name}.py"
    program.write_text(steps_program(NOTEBOOKS / f"{name}.ipynb"), encoding="utf-8")
    return subprocess.run([sys.executable, str(program)], cwd=NOTEBOOKS, check=False).returncode == 0


def record(name: str, scratch: Path) -> bool:
    """Runs a whole chapter; whether that went well."""
    import nbformat
    from ipykernel.kernelspec import write_kernel_spec
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, found = re.subn(r"^RECORD = False$", "RECORD = True", cell.source, flags=re.MULTILINE)
            count += found
    if count != 1:
        raise ValueError(f"{path.name}: expected one line 'RECORD = False', found {count}")
    write_kernel_spec(scratch / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(scratch), os.environ.get("JUPYTER_PATH")]))
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    try:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    except CellExecutionError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def main(arguments: list[str]) -> int:
    """Records one chapter after the other; 1 if one of them failed."""
    how = record_steps if arguments[:1] == ["--steps"] else record
    chapters = arguments[how is record_steps :]
    if not chapters:
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in chapters:
            start = time.perf_counter()
            done = how(name, Path(scratch))
            print(f"{name}: {'recorded' if done else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True)
            failed |= not done
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
