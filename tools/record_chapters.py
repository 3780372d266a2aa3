"""Runs chapters with RECORD set, on the GPU at hand: each writes the times of its own steps into book/results/<gpu>.

usage: python tools/record_chapters.py [--steps] [--seconds N] [--profile] [--slow] [--counters] [chapter ...]

With --steps only the ladder is recorded, by RECORD_STEPS, and the chapter ends there; cells that only ask the compiler are left out.
The notebooks themselves stay as they are. Without a GPU everything runs and nothing is written: a rehearsal.
With --profile Nsight Compute counts in the kernels that the chapter "A kernel is wrong, a kernel is slow" reads, into profile.csv;
with --slow in those that the chapter "A kernel is wrong, a kernel is slow" asks about, into slow_kernels.csv; with --counters in the
longest kernel of each function, at the recorded shape whose share of the bound is the middle one, into counters.csv.

One chapter after the other, each in a process of its own. What one has written stays, whatever becomes of it or of the others;
--seconds ends the one that runs when the time is up. The last lines say what was recorded and what was not.
"""

import argparse
import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def code_of(path: Path) -> list[str]:
    """The code cells of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def switched_on(path: Path, program: str, switch: str) -> str:
    program, count = re.subn(rf"^{switch} = False$", f"{switch} = True", program, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{path.name}: expected one line '{switch} = False', found {count}")
    return program


def steps_cells(path: Path) -> list[str]:
    """The notebook's cells down to the last with RECORD_STEPS, switched on."""
    code = code_of(path)
    end = max((i for i, source in enumerate(code) if "record=RECORD_STEPS" in source), default=0)
    mark = "\n# --- the next cell ---\n"
    return switched_on(path, mark.join(code[: end + 1]), "RECORD_STEPS").split(mark)


def steps_program(path: Path) -> str:
    """The same as one text."""
    return "\n\n".join(steps_cells(path))


def whole_program(path: Path) -> str:
    """All cells, as a program."""
    cells = ["from IPython.display import display", *code_of(path)]
    return switched_on(path, "\n\n".join(cells), "RECORD")


class _AsksTheCompiler(Exception):  # noqa: N818  no error: a cell is left out
    pass


def run_cells(folder: Path) -> None:
    """Runs the cells of a chapter, a file each, in one namespace; what asks the compiler, or uses its answer, is left out."""
    from IPython.display import display

    from kernelbook.lab import compiled

    def left_out(*_: object, **__: object) -> None:
        raise _AsksTheCompiler

    compiled.compile_calls = left_out  # type: ignore[assignment]
    namespace: dict[str, object] = {"__name__": "__main__", "display": display}
    unset: set[str] = set()
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        try:
            exec(compile(text, str(path), "exec"), namespace)  # noqa: S102
        except (_AsksTheCompiler, NameError) as error:
            if "record=RECORD" in text or (isinstance(error, NameError) and error.name not in unset):
                raise
            [line, *_] = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
            ended = [node for node in ast.parse(text).body if (node.end_lineno or 0) >= (line or 0)]
            names = [name for node in ended for name in ast.walk(node) if isinstance(name, ast.Name)]
            for name in (name.id for name in names if isinstance(name.ctx, ast.Store)):
                unset.add(name)  # what an earlier cell called so is not what a later one expects
                namespace.pop(name, None)
            print(f"{folder.name}: the cell {path.stem} is left out", flush=True)


def record(command: list[str], seconds: float) -> str:
    """Runs the program of a chapter; what became of it, in a word or two."""
    environment = os.environ | {"MPLBACKEND": "agg"}
    process = subprocess.Popen([sys.executable, *command], cwd=NOTEBOOKS, env=environment)
    try:
        code = process.wait(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "TIME IS UP"
    return "recorded" if code == 0 else f"FAILED with {code}"


def record_chapter(name: str, steps: bool, scratch: Path, seconds: float) -> str:
    path, folder = NOTEBOOKS / f"{name}.ipynb", scratch / name
    folder.mkdir()
    if not steps:
        (folder / f"{name}.py").write_text(whole_program(path), encoding="utf-8")
        return record([str(folder / f"{name}.py")], seconds)
    for i, source in enumerate(steps_cells(path)):
        (folder / f"{i:03}.py").write_text(source, encoding="utf-8")
    return record([__file__, "--cells", str(folder)], seconds)


# What is profiled: kernel -> problem. All in float16.
PROFILED = {
    "_layer_norm_fwd_kernel": "M=65536 N=4096",
    "_layer_norm_bwd_locks_kernel": "M=65536 N=4096",
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


def package_calls() -> list[Callable[[], object]]:
    """What launches the kernels of :data:`PROFILED`."""
    import torch

    import kernelbook as kb
    from kernelbook import study

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float16, device="cuda", requires_grad=True)

    x, weight, bias, dy = tensor(65536, 4096), tensor(4096), tensor(4096), tensor(65536, 4096).detach()
    q, k, v = (tensor(2, 16, 4096, 128).detach() for _ in range(3))

    def norm() -> object:
        return torch.autograd.grad(study.layer_norm_with_locks(x, weight, bias), (x, weight, bias), dy)

    return [norm, lambda: kb.flash_attention(q, k, v)]


def slow_calls() -> dict[str, tuple[str, Callable[[], object]]]:
    """The slow kernels of a chapter: by name, the problem and a call of it on the GPU."""
    sys.path.append(str(NOTEBOOKS.parent / "book" / "solutions"))
    import slow

    return slow.calls("cuda")


def count(calls: list[Callable[[], object]]) -> None:
    """What runs under Nsight Compute: everything once to compile it, then once to be counted."""
    import torch

    for counted in (False, True):
        if counted:
            torch.cuda.profiler.start()
        for call in calls:
            call()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def middle_cases() -> dict[str, tuple[Any, Any]]:
    """For each function and mode, of what is recorded on this GPU, the case with the middle share of the bound, and its bench."""
    from kernelbook.lab import bench, measured, older, record

    cases = {
        str(case): (one, case) for one in bench.benches(bench.CASE_BY_CASE) for case in (*one.cases(), *one.models())
    }
    found = measured.bounded(record.device_slug())
    found["case"] = [older.case_key({**row, "x": f"{row['x']:.12g}"}) for row in found.to_dict("records")]
    return {name: cases[name] for name in measured.middles(found.loc[found["case"].isin(list(cases))])["case"]}


def case_call(name: str) -> Callable[[], object]:
    """Our call of one of :func:`middle_cases`, on its inputs."""
    import torch

    torch.manual_seed(0)  # as where it is timed
    return middle_cases()[name][1].build().providers["kernelbook"]


def raw_page(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The page "raw" of Nsight Compute, as comma-separated values: the unit of each metric, and a dictionary for each kernel."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    units, *kernels = pd.read_csv(io.StringIO("\n".join(lines)), dtype=str, keep_default_na=False).to_dict("records")
    rows = [
        {name: value.replace(",", "") if METRICS.fullmatch(str(name)) else value for name, value in row.items()}
        for row in kernels
    ]
    return units, rows  # type: ignore[return-value]


def read_longest(text: str) -> pd.DataFrame:
    """Of such a page the kernel that took longest: a row for each metric of those that are kept."""
    units, kernels = raw_page(text)
    longest = max(kernels, key=lambda row: float(row["gpu__time_duration.sum"]))
    return pd.DataFrame(
        [
            {"kernel": longest["Kernel Name"], "metric": metric, "unit": units[metric], "value": value}
            for metric, value in longest.items()
            if METRICS.fullmatch(metric)
        ]
    )


def read_profile(text: str, problems: Mapping[str, str] = PROFILED) -> pd.DataFrame:
    """Of such a page a row for each kernel of ``problems`` and metric of those that are kept."""
    units, kernels = raw_page(text)
    return pd.DataFrame(
        [
            {
                "kernel": row["Kernel Name"],
                "problem": problems[row["Kernel Name"]],
                "metric": metric,
                "unit": units[metric],
            }
            | {"value": row[metric]}
            for row in kernels
            for metric in row
            if METRICS.fullmatch(metric) and row["Kernel Name"] in problems
        ]
    )


def run_counted(scratch: Path, arguments: list[str], kernels: str = ".*") -> str:
    """What Nsight Compute prints of this program with ``arguments``, at the clock that the GPU has; nothing where it failed.

    ``kernels``: those that are counted, a regular expression.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        print("run_counted: expected Nsight Compute's 'ncu' on the path, found none", file=sys.stderr)
        return ""
    raw = scratch / "raw.csv"
    raw.unlink(missing_ok=True)
    sections = [argument for name in SECTIONS for argument in ("--section", name)]
    command = [ncu, *sections, "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--kernel-name", f"regex:^({kernels})$"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(raw)]
    done = subprocess.run([*command, sys.executable, __file__, *arguments], check=False).returncode == 0
    text = raw.read_text(encoding="utf-8") if raw.exists() else ""
    if done and '"Kernel Name"' in text:
        return text
    print(f"run_counted: {' '.join(arguments)}: nothing counted\n{text[-2000:]}", file=sys.stderr)
    return ""


def record_counters(scratch: Path, seconds: float) -> bool:
    """Counts in each of :func:`middle_cases` that has no rows of the present sources; whether all went well.

    Every one has a process of its own: what one gave stays.
    """
    from kernelbook.lab import record

    path = record.results_dir() / record.device_slug() / "counters.csv"
    begin, missing = time.perf_counter(), []
    known = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame()
    counted = set(known[["op", "mode", "shape", "package"]].itertuples(index=False, name=None)) if len(known) else set()
    for name, (one, case) in middle_cases().items():
        op, mode, _, shape, *_ = case.key
        if (op, mode, shape, one.package()) in counted:
            continue
        left = time.perf_counter() - begin < seconds
        text = run_counted(scratch, ["--counted", name]) if left else ""
        if not text:
            missing.append(name)
            continue
        rows = read_longest(text)
        about = dict(zip(("op", "mode", "dtype", "shape", "x_name", "x"), case.key, strict=True))
        rows = pd.concat([pd.DataFrame([about] * len(rows)), rows], axis=1).assign(**record.environment(one.package()))
        record.write_results(path, rows, key=("op", "mode", "metric"))
    print("".join(f"not counted: {name}\n" for name in missing), end="", file=sys.stderr)
    return not missing


def record_profile(scratch: Path, what: str = "--profiled") -> bool:
    """Counts inside :data:`PROFILED` or the slow kernels; whether that went well."""
    slow = what == "--slowly"
    problems = {name: problem for name, (problem, _) in slow_calls().items()} if slow else PROFILED
    text = run_counted(scratch, [what], "|".join(problems))
    rows = read_profile(text, problems) if text else None
    missing = set(problems) - set(rows["kernel"] if rows is not None else ())
    if rows is None or missing:
        print(f"record_profile: nothing counted in {', '.join(sorted(missing))}", file=sys.stderr)
        return False
    from kernelbook.lab import record, timing

    package = Path(timing.__file__).parent
    sources = (NOTEBOOKS.parent / "book" / "solutions",) if slow else (package / "layer_norm", package / "attention")
    where = record.environment(record.package_version(*sources))
    path = record.results_dir() / record.device_slug() / ("slow_kernels.csv" if slow else "profile.csv")
    path.unlink(missing_ok=True)  # a metric or a problem that is counted no longer must not stay
    record.write_results(path, rows.assign(**where), key=("kernel", "metric"))
    return True


def main(arguments: list[str]) -> int:
    """Records one after the other; 1 if something was not recorded."""
    if arguments in (["--profiled"], ["--slowly"]):
        slow = arguments == ["--slowly"]
        count([call for _, call in slow_calls().values()] if slow else package_calls())
        return 0
    if arguments[:1] == ["--counted"]:
        count([case_call(arguments[1])])
        return 0
    if arguments[:1] == ["--cells"]:
        run_cells(Path(arguments[1]))
        return 0
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("chapters", nargs="*", metavar="chapter")
    for option in ("--steps", "--profile", "--slow", "--counters"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long all of it may take")
    asked = parser.parse_args(arguments)
    if not (asked.chapters or asked.profile or asked.slow or asked.counters):
        print(__doc__, file=sys.stderr)
        return 2
    begin = time.perf_counter()
    ends: dict[str, str] = {}

    def done(name: str, what: Callable[[float], str]) -> None:
        start = time.perf_counter()
        left = asked.seconds - (start - begin)
        try:
            ends[name] = what(left) if left > 0 else "NO TIME LEFT"
        except Exception as error:  # the others go on
            ends[name] = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name}: {ends[name]}, {time.perf_counter() - start:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.chapters:
            done(name, lambda left, name=name: record_chapter(name, asked.steps, Path(scratch), min(left, 1e6)))  # type: ignore[misc]
        for option, counted in (("profile", "--profiled"), ("slow", "--slowly")):
            if getattr(asked, option):
                done(
                    f"--{option}",
                    lambda _, counted=counted: "recorded" if record_profile(Path(scratch), counted) else "FAILED",  # type: ignore[misc]
                )
        if asked.counters:
            done("--counters", lambda left: "recorded" if record_counters(Path(scratch), left) else "FAILED")
    missing = [f"{name} ({end})" for name, end in ends.items() if end != "recorded"]
    from kernelbook import runtime

    done_so = "recorded" if runtime.DEVICE.type == "cuda" else "rehearsed (nothing is written without a GPU)"
    print(
        f"{len(ends) - len(missing)} {done_so}" + (f"; not recorded: {', '.join(missing)}" if missing else ""),
        flush=True,
    )
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
