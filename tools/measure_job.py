"""One job of tools/measure.py, in a process of its own: python tools/measure_job.py FOLDER WHAT ARGUMENTS.

Whatever it measures is written, as it comes, to FOLDER/<gpu>/<stem>.csv, with the table's key beside it in <stem>.key.
"""

import contextlib
import csv
import dataclasses
import importlib
import itertools
import json
import math
import os
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
from kernelbook.lab import baselines, cli, record, timing
from kernelbook.lab.bench import bench

REP_MS = 50.0  # of samples, 20 at least, for each call
NOTEBOOK_BYTES = 6 * 2**30  # what a chapter may hold of a GPU
COLUMNS = ("op", "mode", "dtype", "shape", "x_name", "x")  # of a case


def redirect(folder: Path) -> None:
    """Has every table written below ``folder``, wherever it would go, and its key noted."""
    write = record.write_results

    def noted(path: Path, rows: pd.DataFrame, key: Sequence[str] = record.KEY) -> pd.DataFrame:
        path = folder / runtime.device_slug() / path.name
        table = write(path, rows, key)
        path.with_suffix(".key").write_text(json.dumps(list(key)))
        return table

    record.write_results = noted  # type: ignore[assignment]


def searched(room: str, case: timing.Case) -> str:
    """For a case whose peer axolotl, where it is installed, times many tiles: its rank (jobs of their own); else nothing.

    A first call, which does so with empty caches, has a job of its own too.
    """
    theirs = room == "moe_block" or (case.op == "moe_lora" and case.mode in ("forward_backward", "first_call"))
    if not theirs or not baselines.has("axolotl"):
        return ""
    return "first" if case.mode == "first_call" else f"r{case.shape.get('r', 0)}"


def listed(room: str, which: str) -> list[timing.Case]:
    """The cases of a list, ``room`` or ``models``."""
    one = bench(room)
    return list(one.cases() if which == "room" else one.models())


def chosen(room: str, which: str, part: str, rank: str) -> list[timing.Case]:
    own, of = map(int, part.split("/"))
    return [case for case in listed(room, which) if searched(room, case) == rank][own::of]


def measured(folder: Path, package: str, columns: Sequence[str], stem: str = "*") -> set[tuple[str, ...]]:
    """These columns of the rows of ``package`` that this job and those beside it have in files of this name."""
    found = set()
    for path in folder.parent.glob(f"*/{runtime.device_slug()}/{stem}.csv"):
        with path.open() as file:
            rows = csv.DictReader(file)
            if set(columns) <= set(rows.fieldnames or ()):
                found |= {tuple(row[name] for name in columns) for row in rows if row["package"] == package}
    return found


def told(failures: Sequence[str]) -> int:
    """Prints what could not be measured; 1 if there is any."""
    for failure in failures:
        print(f"NOT RECORDED: {failure}")
    return int(bool(failures))


def health(folder: Path) -> int:
    """Prints the ceilings of the GPU at hand."""
    print(json.dumps(dataclasses.asdict(timing.measure_ceilings(quick=True))))
    return 0


def warm(folder: Path, room: str, which: str, part: str, rank: str = "", share: str = "0/1") -> int:
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
    for case in chosen(room, which, part, rank):
        cli._warm(case)
        torch.cuda.empty_cache()
    return 0


def cases(folder: Path, room: str, which: str, part: str, rank: str = "") -> int:
    """Measures a part of a list, less what is there already. A peer's search of tiles, all compiled, is a short one."""
    import triton

    def short(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=5, rep=25, quantiles=quantiles)

    if rank:
        triton.runtime.autotuner.Autotuner.do_bench = property(lambda self: short)
    one, stem = bench(room), room if which == "room" else which
    there = measured(
        folder, one.package(), COLUMNS, stem
    )  # and not in other files: a model's point may be a room's own too
    left = [
        case
        for case in chosen(room, which, part, rank)
        if (case.op, case.mode, case.dtype_name, case.shape_text, case.x_name, f"{case.x:.12g}") not in there
    ]
    failures = cli._bench_cases(one, stem, left, folder, REP_MS) if left else []
    return told(failures)


def extras(folder: Path, room: str) -> int:
    """A room's tables of another kind."""
    failures = cli._bench_extras(bench(room), folder)
    return told(failures)


def group(plan: Any, task: bool = False) -> str:
    """Plans of a whole model that one process measures: the same weights; with ``task`` it also says whether it is a step."""
    how = ["few"] if plan.layers else []
    return "-".join([plan.model, *how, plan.kind, *([plan.mode] if task else [])])


def whole(folder: Path, name: str, how: str = "") -> int:
    """The whole models of a group; with ``warm`` one layer of each, which compiles what all layers run."""
    from kernelbook.lab.bench import whole_model

    wanted = [plan for plan in whole_model.plans() if name == group(plan, task=how == "warm")]
    if how == "warm":
        return whole_model.bench(folder, layers=1, samples=1, wanted=wanted)
    there = measured(folder, whole_model.BENCH.package(), ("provider", "shape", "x"))

    def key(plan: whole_model.Plan) -> tuple[str, str, str]:
        config = whole_model.configuration(plan.model, plan.layers)
        return plan.provider, plan.shape(config.num_hidden_layers, whole_model.PROMPT), str(plan.batch)

    # What may not fit comes last, the one that needs the most at the end: an allocation that failed leaves its marks.
    def late(plan: whole_model.Plan) -> tuple[bool, ...]:
        large = plan.task == "step" and not plan.checkpoints
        return plan.provider == "kernelbook:all", large, large and plan.provider == "grouped_mm"

    left = sorted((plan for plan in wanted if key(plan) not in there), key=late)
    return whole_model.bench(folder, wanted=left) if left else 0


def module(folder: Path, name: str, *arguments: str) -> int:
    """The command of a bench that has one, with its ``--out`` here."""
    command = importlib.import_module(f"kernelbook.lab.bench.{name}")
    return int(command.main(["--out", str(folder / runtime.device_slug()), *arguments]))


def ladder(folder: Path, name: str, how: str = "") -> int:
    """The ladder of a chapter; with ``warm`` it is checked and not recorded."""
    text = record_chapters.steps_program(record_chapters.NOTEBOOKS / f"{name}.ipynb")
    if how == "warm":
        text = text.replace("RECORD_STEPS = True", "RECORD_STEPS = False")
    program = folder / f"{name}.py"
    program.write_text(text)
    os.chdir(record_chapters.NOTEBOOKS)
    runpy.run_path(str(program), run_name="__main__")
    return 0


# The first cell of a chapter that is watched; measurements reset the peak.
WATCH = """
def watch(path):
    import json, pathlib, torch
    peak, reset = [0], torch.cuda.reset_peak_memory_stats
    def note(*_):
        if torch.cuda.is_initialized():
            peak[0] = max(peak[0], torch.cuda.max_memory_allocated())
            share = torch.cuda.get_per_process_memory_fraction()
            limit = share * torch.cuda.get_device_properties(0).total_memory
            pathlib.Path(path).write_text(json.dumps([peak[0], limit]))
    def noted_reset(*device):
        note()
        reset(*device)
    torch.cuda.reset_peak_memory_stats = noted_reset
    get_ipython().events.register("post_run_cell", note)
watch({path!r})
"""


def notebook(folder: Path, name: str) -> int:
    """Executes a chapter as a reader does, on a part of the GPU's memory; after each cell a row says how far it came."""
    import nbformat
    from ipykernel.kernelspec import write_kernel_spec
    from nbclient import NotebookClient

    # Of the allocator's variables the one that is read first, in every version that has this limit.
    os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "", "MPLBACKEND": "agg"}
    if runtime.DEVICE.type == "cuda":
        share = min(1.0, NOTEBOOK_BYTES / torch.cuda.get_device_properties(0).total_memory)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{share:.4f}"
    path, watched, began = record_chapters.NOTEBOOKS / f"{name}.ipynb", folder / "watched", time.monotonic()
    chapter = nbformat.read(path, as_version=4)
    last = max(i for i, cell in enumerate(chapter.cells) if cell.cell_type == "code")
    run, about = record.new_run(), record.environment(f"{name}+{record.source_digest(path)}")
    failed: list[str] = []
    left_out: list[str] = []

    def note(state: str) -> None:
        peak, limit = json.loads(watched.read_text()) if watched.exists() else (math.nan, math.nan)
        if limit > 1.01 * NOTEBOOK_BYTES:
            state = f"without a limit: {state}"
        figures = {"seconds": f"{time.monotonic() - began:.0f}", "peak_mib": f"{peak / 2**20:.0f}"}
        figures |= {"limit_mib": f"{limit / 2**20:.0f}", "left_out": len(left_out)}
        row = pd.DataFrame([{"run": run, "chapter": name, "state": "; ".join(failed) or state, **figures, **about}])
        record.write_results(record.results_dir() / runtime.device_slug() / "chapters.csv", row, ("chapter",))

    def executed(cell: Any, cell_index: int, **_: Any) -> None:
        number, outputs = cell_index - 1, cell.get("outputs", [])  # of the chapter's own cells
        printed = "".join(output.get("text", "") for output in outputs if output["output_type"] == "stream")
        left_out.extend(line for line in printed.splitlines() if "left out, too little GPU memory" in line)
        if "raises-exception" not in cell.metadata.get("tags", []):
            errors = [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
            failed.extend(f"cell {number}: {error.splitlines()[0][:120]}" for error in errors)  # the log has all
        note("passed" if number == last else f"stopped behind cell {number}")

    chapter.cells.insert(0, nbformat.v4.new_code_cell(WATCH.format(path=str(watched))))
    resources = {"metadata": {"path": str(record_chapters.NOTEBOOKS)}}
    with tempfile.TemporaryDirectory() as scratch:
        write_kernel_spec(Path(scratch) / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
        os.environ["JUPYTER_PATH"] = scratch
        # All that fails is to be known, not the first alone.
        how = {"timeout": 600, "kernel_name": "python3", "allow_errors": True, "on_cell_executed": executed}
        try:
            NotebookClient(chapter, resources=resources, **how).execute()
        except Exception as error:  # the kernel died, or a cell does not end
            failed.append(f"{type(error).__name__}: {str(error)[-300:]}")
            note("")
    print(*left_out, sep="\n")
    return told(failed)


WHAT = {f.__name__: f for f in (health, warm, cases, extras, whole, module, ladder, notebook)}


def main(arguments: Sequence[str]) -> int:
    folder, what, *rest = arguments
    place = Path(folder).resolve()
    redirect(place)
    return WHAT[what](place, *rest)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
