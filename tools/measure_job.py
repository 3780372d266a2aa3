"""One job of tools/measure.py, in a process of its own: python tools/measure_job.py FOLDER WHAT ARGUMENTS.

Whatever it measures is written, as it comes, to FOLDER/<gpu>/<stem>.csv, with the table's key beside it in <stem>.key.
"""

import contextlib
import itertools
import json
import math
import os
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import record_chapters
import torch

from kernelbook import runtime
from kernelbook.lab import baselines, cli, older, record, timing
from kernelbook.lab.bench import bench, same_loss

REP_MS = "50"  # of samples, 20 at least, for each call
NOTEBOOK_BYTES = 6 * 2**30  # what a chapter may hold of a GPU
TESTS = Path(__file__).resolve().parent.parent / "tests"


def redirect(folder: Path) -> None:
    """Has every table written below ``folder``, wherever it would go, and its key noted; rows are dropped there too."""
    write, drop = record.write_results, record.drop_rows

    def here(path: Path) -> Path:
        return folder / record.device_slug() / path.name

    def noted(path: Path, rows: pd.DataFrame, key: Sequence[str] = record.KEY) -> pd.DataFrame:
        table = write(here(path), rows, key)
        here(path).with_suffix(".key").write_text(json.dumps(list(key)))
        return table

    record.write_results = noted  # type: ignore[assignment]
    record.drop_rows = lambda path, which: drop(here(path), which)


# Of which cases the peer axolotl, where it is installed, times many tiles: as ``bench --select`` has them.
SEARCHED = {"moe_block": "^moe_block ", "moe_lora": "^moe_lora (forward_backward|first_call) "}


def group(room: str, case: timing.Case) -> tuple[str, bool]:
    """The cases beside which this one may be measured, as ``bench --select`` has them, and whether a peer searches tiles.

    For those it does with one rank in a process; a first call, which does so with empty caches, has one of its own too.
    """
    pattern = SEARCHED.get(room)
    if pattern is None or not baselines.has("axolotl"):
        return "", False
    if not re.search(pattern, str(case)):
        return f"^(?!{pattern[1:]})", False
    return rf"^{case.op} {case.mode} .*\br={case.shape['r']} ", True


def command(folder: Path, *arguments: str) -> int:
    """A command of the package, with its ``--out`` here."""
    return cli.main([*arguments, "--out", str(folder)])


def warm(folder: Path, share: str, room: str, which: str, select: str, part: str, *only: str) -> int:
    """Calls every provider of a part of a list once; of the tiles that a peer searches, compiles each n-th and times none."""
    from triton.runtime.autotuner import Autotuner

    own, of = map(int, share.split("/"))
    count = itertools.count()

    def compile_only(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if next(count) % of == own:
            with contextlib.suppress(Exception):  # tiles that do not fit; the search will say so again
                self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
                # What runs at the end of this "search" is the smallest that could be compiled.
                return [float(config.kwargs.get("BLOCK_K", 0) * config.num_stages)] * 3
        return [float("inf")] * 3

    Autotuner._bench = compile_only
    older.dates_of(bench(room))  # what is launched is found once, and kept
    return command(folder, "bench", room, "--only", which, "--select", select, "--part", part, "--warm", *only)


def cases(folder: Path, room: str, which: str, select: str, part: str, *only: str) -> int:
    """Measures a part of a list, less what is there already. A peer's search of tiles, all compiled, is a short one."""
    import triton

    def short(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=5, rep=25, quantiles=quantiles)

    if "TRITON_CACHE_AUTOTUNING" in os.environ:
        triton.runtime.autotuner.Autotuner.do_bench = property(lambda self: short)
    what = ("--only", which, "--select", select, "--part", part, "--rep-ms", REP_MS, "--missing", *only)
    return command(folder, "bench", room, *what)


def extras(folder: Path, room: str) -> int:
    """A room's tables of another kind."""
    failures = cli._bench_extras(bench(room), folder)
    print(*failures, sep="\n")
    return int(bool(failures))


def loss(folder: Path, *arguments: str) -> int:
    """Curves of :mod:`kernelbook.lab.bench.same_loss`."""
    return same_loss.main(["--out", str(folder / record.device_slug()), *arguments])


def ladder(folder: Path, name: str, how: str = "") -> int:
    """The ladder of a chapter; with ``warm`` it is checked and not recorded."""
    from IPython.display import display

    text = record_chapters.steps_program(record_chapters.NOTEBOOKS / f"{name}.ipynb")
    if how == "warm":
        text = text.replace("RECORD_STEPS = True", "RECORD_STEPS = False")
    program = folder / f"{name}.py"
    program.write_text(text)
    os.chdir(record_chapters.NOTEBOOKS)
    runpy.run_path(str(program), {"display": display}, run_name="__main__")
    return 0


# The first cell of a chapter that is watched, since measurements reset the peak, and its last.
WATCH = """
import torch
def watch(peak=[0]):
    peak[0] = max(peak[0], torch.cuda.max_memory_allocated())
    total = torch.cuda.get_device_properties(0).total_memory
    return peak[0], torch.cuda.get_per_process_memory_fraction() * total
torch.cuda.reset_peak_memory_stats = lambda *device, reset=torch.cuda.reset_peak_memory_stats: (watch(), reset(*device))
"""
TOLD = "import json; print(json.dumps(watch()))"


def notebook(folder: Path, name: str, target: str = "") -> int:
    """Executes a chapter as a reader does, on a part of the GPU's memory, and records how that went.

    With a ``target``, ``sm_75`` say, plans and kernels are those of that older GPU.
    """
    import nbformat
    from ipykernel.kernelspec import write_kernel_spec
    from nbclient import NotebookClient
    from traitlets.config import Config

    # Of the allocator's variables the one that is read first, in every version that has this limit.
    os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "", "MPLBACKEND": "agg"}
    if runtime.DEVICE.type == "cuda":
        share = min(1.0, NOTEBOOK_BYTES / torch.cuda.get_device_properties(0).total_memory)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{share:.4f}"
    path, began = record_chapters.NOTEBOOKS / f"{name}.ipynb", time.monotonic()
    chapter = nbformat.read(path, as_version=4)
    stand_in = f"import sys; sys.path.append({str(TESTS)!r}); import stand_in; stand_in.stand_in_for({target!r})"
    first, last = map(nbformat.v4.new_code_cell, (f"{stand_in}\n{WATCH}" if target else WATCH, TOLD))
    cells, chapter.cells = chapter.cells, [first, *chapter.cells, last]
    resources = {"metadata": {"path": str(record_chapters.NOTEBOOKS)}}
    died: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        write_kernel_spec(Path(scratch) / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
        os.environ["JUPYTER_PATH"] = scratch
        try:  # all that fails is to be known, not the first alone
            how = {"timeout": 600, "kernel_name": "python3", "allow_errors": True, "resources": resources}
            # Sockets in files: two kernels that begin at the same time may choose the same port, and one of them dies.
            files = Config(KernelManager={"transport": "ipc", "ip": f"{scratch}/kernel"})
            NotebookClient(chapter, config=files, **how).execute()
        except Exception as error:  # the kernel died, or a cell does not end
            died = [f"{type(error).__name__}: {str(error)[-300:]}"]
    failed: list[str] = []
    printed = ""
    for number, cell in enumerate(cells):
        outputs = cell.get("outputs", [])
        printed += "".join(output["text"] for output in outputs if output["output_type"] == "stream")
        if "raises-exception" not in cell.metadata.get("tags", []):
            errors = [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
            failed += [f"cell {number}: {error.splitlines()[0][:120]}" for error in errors]  # the log has all
    left_out = [line for line in printed.splitlines() if "left out, too little GPU memory" in line]
    print(*left_out, *failed, *died, sep="\n")
    told = [output["text"] for output in last.outputs if output["output_type"] == "stream"]
    peak, limit = json.loads(told[0]) if told else (math.nan, math.nan)
    state = "; ".join([*failed, *died]) or "passed"
    figures = {"seconds": f"{time.monotonic() - began:.0f}", "peak_mib": f"{peak / 2**20:.0f}"}
    figures |= {"limit_mib": f"{limit / 2**20:.0f}", "left_out": len(left_out)}
    state = f"without a limit: {state}" if limit > 1.01 * NOTEBOOK_BYTES else state
    about = {"run": record.new_run(), "chapter": name, "state": state, **figures}
    row = pd.DataFrame([about | record.environment(f"{name}+{record.source_digest(path)}")])
    record.write_results(record.results_dir() / record.device_slug() / "chapters.csv", row, ("chapter",))
    return int(state != "passed")


WHAT = {f.__name__: f for f in (command, warm, cases, extras, loss, ladder, notebook)}


def main(arguments: Sequence[str]) -> int:
    folder, what, *rest = arguments
    place = Path(folder).resolve()
    redirect(place)
    return WHAT[what](place, *rest)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
