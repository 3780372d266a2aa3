"""Runs chapters with RECORD set, on the GPU at hand: each writes the times of its own steps into book/results/<gpu>.

usage: python tools/record_chapters.py [--steps] attention_forward attention_backward
       python tools/record_chapters.py --profile

With --steps only the ladder is recorded, by RECORD_STEPS, and only the cells run that it needs, which takes seconds.
The notebooks themselves stay as they are.
With --profile Nsight Compute counts in the kernels that the page "How a GPU runs your program" reads, into profile.csv.
"""

import ast
import dis
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
LEAVES = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")


def names(source: str) -> tuple[set[str], set[str], set[str]]:
    """The global names that a cell binds, those that it reads before, and those that its functions read once they are called."""
    binds: set[str] = set()
    reads: set[str] = set()
    later: set[str] = set()

    def scan(code: CodeType, bound: set[str], top: bool) -> None:
        """``top``: it runs with the cell, ``bound`` are the names that the cell has bound by then."""
        joins: dict[int, set[str]] = {}  # by offset: what is bound on each way that jumps there
        falls = True  # from the instruction before into this one
        for step in dis.get_instructions(code):
            if step.offset in joins:
                bound = joins[step.offset] & bound if falls else joins[step.offset]
            falls = step.opname not in LEAVES
            if isinstance(step.argval, CodeType):
                scan(step.argval, set(bound), top and step.argval.co_name in COMPREHENSIONS)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                (reads if top else later).update({step.argval} - bound if top else {step.argval})
            elif step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and code.co_name == "<module>"):
                binds.add(step.argval)
                bound = bound | {step.argval}
            elif (
                step.opcode in (*dis.hasjrel, *dis.hasjabs) and step.opname != "FOR_ITER" and step.argval > step.offset
            ):
                joins[step.argval] = joins.get(step.argval, bound) & bound

    scan(compile(source, "<cell>", "exec"), set(), True)
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


def code_of(path: Path) -> list[str]:
    """The code cells of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def switched_on(path: Path, program: str, switch: str) -> str:
    program, count = re.subn(rf"^{switch} = False$", f"{switch} = True", program, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{path.name}: expected one line '{switch} = False', found {count}")
    return program


def steps_program(path: Path) -> str:
    """What the notebook's cells with RECORD_STEPS need, and these cells, as a program."""
    code = code_of(path)
    ends = [i for i, source in enumerate(code) if "record=RECORD_STEPS" in source]
    code = [source if i in ends else without_checks(source) for i, source in enumerate(code)]
    needed = sorted({i for end in ends for i in needed_cells(code, end)})
    return switched_on(path, "\n\n".join(code[i] for i in needed), "RECORD_STEPS")


def whole_program(path: Path) -> str:
    """All cells, as a program."""
    return switched_on(path, "\n\n".join(code_of(path)), "RECORD")


def record(name: str, program: str, scratch: Path) -> bool:
    """Runs the program of a chapter; whether that went well."""
    place = scratch / f"{name}.py"
    place.write_text(program, encoding="utf-8")
    environment = os.environ | {"MPLBACKEND": "agg"}
    return subprocess.run([sys.executable, str(place)], cwd=NOTEBOOKS, env=environment, check=False).returncode == 0


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
    from kernelbook.lab import record, timing

    package = Path(timing.__file__).parent
    where = record.environment(record.package_version(package / "layer_norm", package / "attention"))
    path = record.results_dir() / runtime.device_slug() / "profile.csv"
    path.unlink(missing_ok=True)  # a metric or a problem that is counted no longer must not stay
    record.write_results(path, rows.assign(**where), key=("kernel", "metric"))
    return True


def main(arguments: list[str]) -> int:
    """Records one chapter after the other; 1 if one of them failed."""
    if arguments == ["--profiled"]:
        call_profiled()
        return 0
    if arguments == ["--profile"]:
        with tempfile.TemporaryDirectory() as scratch:
            return int(not record_profile(Path(scratch)))
    steps = arguments[:1] == ["--steps"]
    chapters = arguments[steps:]
    if not chapters:
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in chapters:
            start = time.perf_counter()
            path = NOTEBOOKS / f"{name}.ipynb"
            done = record(name, steps_program(path) if steps else whole_program(path), Path(scratch))
            print(f"{name}: {'recorded' if done else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True)
            failed |= not done
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
