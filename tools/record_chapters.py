"""Runs chapters with RECORD set, on the GPU at hand: each writes the times of its own steps into book/results/<gpu>.

usage: python tools/record_chapters.py [--steps] attention_forward attention_backward
       python tools/record_chapters.py --profile

With --steps only the ladder is recorded, by RECORD_STEPS, and only the cells run that it needs, which takes seconds.
The notebooks themselves stay as they are.
With --profile Nsight Compute counts in the kernels that the page "How a GPU runs your program" reads, into profile.csv.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import symtable
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def names(source: str) -> tuple[set[str], set[str], set[str]]:
    """The global names that a cell binds, those that it reads before, and those that its functions read once they are called."""
    binds: set[str] = set()
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if top and (symbol.is_assigned() or symbol.is_imported()):
                binds.add(symbol.get_name())
            if not top and symbol.is_referenced() and (symbol.is_global() or table.get_type() == "class"):
                later.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(source, "<cell>", "exec"), True)
    reads: set[str] = set()
    bound: set[str] = set()

    def note(node: ast.AST, stored: bool = True) -> None:
        """The names in an expression: those that it reads, then those that it binds."""
        parts = list(ast.walk(node))
        own = {part.arg for part in parts if isinstance(part, ast.arg)}  # of a lambda
        for part in parts:
            if isinstance(part, ast.comprehension):
                own |= {name.id for name in ast.walk(part.target) if isinstance(name, ast.Name)}
        found = [part for part in parts if isinstance(part, ast.Name) and part.id not in own]
        reads.update({name.id for name in found if isinstance(name.ctx, ast.Load)} - bound)
        if stored:
            bound.update(name.id for name in found if isinstance(name.ctx, ast.Store))

    def run(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for part in (
                    *node.decorator_list,
                    *(node.args.defaults if isinstance(node, ast.FunctionDef) else node.bases),
                ):
                    note(part)
                bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.If):
                note(node.test)
                before = set(bound)
                run(node.body)
                after = set(bound)
                bound.intersection_update(before)
                run(node.orelse)
                bound.intersection_update(after)  # what only one branch binds may still be from before
            elif isinstance(node, ast.AugAssign):
                reads.update({name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)} - bound)
                note(node)
            else:
                for _, value in ast.iter_fields(node):
                    parts = value if isinstance(value, list) else [value]
                    expressions = [
                        part for part in parts if isinstance(part, ast.AST) and not isinstance(part, ast.stmt)
                    ]
                    # What is assigned is read first: the right side, the iterable.
                    for part in expressions:
                        note(part, stored=False)
                    for part in expressions:
                        note(part)
                run(
                    [
                        part
                        for _, value in ast.iter_fields(node)
                        if isinstance(value, list)
                        for part in value
                        if isinstance(part, ast.stmt)
                    ]
                )

    run(ast.parse(source).body)
    return binds, reads, later


def needed_cells(cells: list[str], last: int) -> list[int]:
    """The cells, in order, that bind what cell ``last`` reads, or what those read.

    A cell finds a name as the nearest cell before it left it. A function finds it so, too, if it is called there, and as the nearest
    cell before ``last`` left it.
    """
    known = [names(cell) for cell in cells[: last + 1]]
    kept: set[int] = set()
    open_cells = [last]
    while open_cells:
        i = open_cells.pop()
        if i in kept:
            continue
        kept.add(i)
        _, reads, later = known[i]
        for name, before in [*((name, i) for name in reads | later), *((name, last) for name in later)]:
            binders = [j for j in range(before) if name in known[j][0]]
            if binders:
                open_cells.append(binders[-1])
    return sorted(kept)


def without_checks(source: str) -> str:
    """A cell without what it only prints, glues, checks or asserts: ``time_steps`` checks every step again."""

    def only_shows(node: ast.stmt) -> bool:
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        name = ast.unparse(call.func) if call else ""
        return (
            isinstance(node, ast.Assert)
            or name in ("print", "display", "plots.glue", "Markdown")
            or name.startswith("check_")
        )

    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if only_shows(node):
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines)


def steps_program(path: Path) -> str:
    """What the notebook's cells with RECORD_STEPS need, and these cells, as a program."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ends = [i for i, source in enumerate(code) if "record=RECORD_STEPS" in source]
    code = [source if i in ends else without_checks(source) for i, source in enumerate(code)]
    program = "\n\n".join(code[i] for i in sorted({i for end in ends for i in needed_cells(code, end)}))
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


# What is profiled: kernel -> problem. All in float16.
PROFILED = {
    "_layer_norm_fwd_kernel": "M=16384 N=4096",
    "_layer_norm_bwd_locks_kernel": "M=16384 N=4096",
    "_flash_attention_fwd_hopper_kernel": "B=2 H=16 N=4096 D=128",
}
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats")
# Of some hundred metrics those that the page reads
METRICS = re.compile(
    r"gpu__time_duration\.sum|dram__bytes_(read|write)\.sum|(gpu__dram_|sm__)throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|launch__(registers_per_thread|grid_size|block_size|waves_per_multiprocessor|occupancy_limit_\w+)"
    r"|sm__warps_active\.avg\.pct_of_peak_sustained_active|smsp__issue_active\.avg\.pct_of_peak_sustained_active"
    r"|smsp__average_warp_latency_per_inst_issued\.ratio|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio"
)


def call_profiled() -> None:
    """What runs under Nsight Compute: everything once to compile it, then once to be counted."""
    import torch

    import kernelbook as kb

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float16, device="cuda", requires_grad=True)

    x, weight, bias, dy = tensor(16384, 4096), tensor(4096), tensor(4096), tensor(16384, 4096).detach()
    q, k, v = (tensor(2, 16, 4096, 128).detach() for _ in range(3))

    def calls() -> None:
        y = kb.layer_norm(x, weight, bias, backward="locks")
        torch.autograd.grad(y, (x, weight, bias), dy)
        kb.flash_attention(q, k, v)
        torch.cuda.synchronize()

    calls()
    torch.cuda.profiler.start()
    calls()
    torch.cuda.profiler.stop()


def read_profile(text: str) -> "pd.DataFrame":
    """The page "raw" of Nsight Compute, as comma-separated values: a row for each kernel and metric of those that are kept."""
    import io

    import pandas as pd

    lines = [line for line in text.splitlines() if not line.startswith("==")]
    units, *kernels = pd.read_csv(io.StringIO("\n".join(lines)), dtype=str, keep_default_na=False).to_dict("records")
    return pd.DataFrame(
        [
            {
                "kernel": row["Kernel Name"],
                "problem": PROFILED[row["Kernel Name"]],
                "metric": metric,
                "unit": units[metric],
            }
            | {"value": row[metric].replace(",", "")}
            for row in kernels
            for metric in row
            if METRICS.fullmatch(str(metric)) and row["Kernel Name"] in PROFILED
        ]
    )


def record_profile(scratch: Path) -> bool:
    """Counts inside :data:`PROFILED`, at the clock that the GPU has; whether that went well."""
    ncu = shutil.which("ncu")
    if ncu is None:
        print("record_profile: expected Nsight Compute's 'ncu' on the path, found none", file=sys.stderr)
        return False
    raw = scratch / "raw.csv"
    sections = [argument for name in SECTIONS for argument in ("--section", name)]
    command = [ncu, *sections, "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--kernel-name", f"regex:^({'|'.join(PROFILED)})$"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(raw)]
    done = subprocess.run([*command, sys.executable, __file__, "--profiled"], check=False).returncode == 0
    text = raw.read_text(encoding="utf-8") if raw.exists() else ""
    rows = read_profile(text) if done and '"Kernel Name"' in text else None
    missing = set(PROFILED) - set(rows["kernel"] if rows is not None else ())
    if rows is None or missing:
        print(f"record_profile: nothing counted in {', '.join(sorted(missing))}\n{text[-2000:]}", file=sys.stderr)
        return False
    from kernelbook import runtime
    from kernelbook.lab import timing

    package = Path(timing.__file__).parent
    where = timing.environment(timing.package_version(package / "layer_norm", package / "attention"))
    path = timing.results_dir() / runtime.device_slug() / "profile.csv"
    path.unlink(missing_ok=True)  # a metric or a problem that is counted no longer must not stay
    timing.write_results(path, rows.assign(**where), key=("kernel", "metric"))
    return True


def main(arguments: list[str]) -> int:
    """Records one chapter after the other; 1 if one of them failed."""
    if arguments == ["--profiled"]:
        call_profiled()
        return 0
    if arguments == ["--profile"]:
        with tempfile.TemporaryDirectory() as scratch:
            return int(not record_profile(Path(scratch)))
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
