"""What Nsight Compute counts inside kernels: ``python -m bench.counters``, on a GPU with ``ncu`` on the path.

- ``profile.csv``: the kernels that the chapter "A kernel is wrong, a kernel is slow" reads;
- ``slow_kernels.csv``: those that it asks about;
- ``attention_counters.csv``: attention's forward pass beside FlashAttention-3's, where that is installed.

Each call runs in a process of its own, once to be compiled and once to be counted.
"""

import argparse
import functools
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

import kernelbook as kb
from bench import attention
from kernelbook import runtime, study
from kernelbook.lab import record, stale

SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats")
# Of some hundred metrics those that pages read
METRICS = re.compile(
    r"gpu__time_duration\.sum|dram__bytes_(read|write)\.sum|lts__t_bytes\.sum|smsp__inst_executed\.sum|(gpu__dram_|sm__)throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|launch__(registers_per_thread|grid_size|block_size|waves_per_multiprocessor|occupancy_limit_\w+)"
    r"|sm__pipe_tensor_cycles_active\.avg\.pct_of_peak_sustained_active|sm__warps_active\.avg\.pct_of_peak_sustained_active|smsp__issue_active\.avg\.pct_of_peak_sustained_active"
    r"|smsp__average_warp_latency_per_inst_issued\.ratio|smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio"
)
MORE = (
    "dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum,smsp__inst_executed.sum,"
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
)
ROWS, HEADS = (65536, 4096), (2, 16, 4096, 128)


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16, device=runtime.DEVICE, requires_grad=True)


def _norms() -> Callable[[], object]:
    x, weight, bias, dy = _tensor(*ROWS), _tensor(ROWS[1]), _tensor(ROWS[1]), _tensor(*ROWS).detach()
    return lambda: torch.autograd.grad(study.layer_norm_with_locks(x, weight, bias), (x, weight, bias), dy)


def _attention() -> Callable[[], object]:
    q, k, v = (_tensor(*HEADS).detach() for _ in range(3))
    return lambda: kb.flash_attention(q, k, v)


# By kernel the problem, and what makes a call that launches it.
PROFILED: dict[str, tuple[str, Callable[[], Callable[[], object]]]] = {
    "_layer_norm_fwd_kernel": ("M=65536 N=4096", _norms),
    "_layer_norm_bwd_locks_kernel": ("M=65536 N=4096", _norms),
    "_flash_attention_fwd_hopper_kernel": ("B=2 H=16 N=4096 D=128", _attention),
}


def _forward(provider: str, shape: tuple[int, int, int, int, int, bool]) -> Callable[[], object]:
    b, h, h_kv, n, d, causal = shape
    q, k, v, _ = attention._inputs(b, h, h_kv, n, n, d, torch.bfloat16)
    ours = functools.partial(kb.flash_attention, causal=causal)
    function = ours if provider == "kernelbook" else attention._flash_attention_3(causal)
    return lambda: function(q.detach(), k.detach(), v.detach())


def attention_counters() -> dict[str, tuple[str, Callable[[], Callable[[], object]]]]:
    """By provider and shape, in the same way."""
    return {
        f"{provider} D={shape[4]}": (
            "B={} H={} H_kv={} N={} D={} causal={}".format(*shape),
            functools.partial(_forward, provider, shape),
        )
        for shape in attention.SHAPES[1::-1]
        for provider in ("kernelbook", "fa3")
    }


def slow_kernels() -> dict[str, tuple[str, Callable[[], Callable[[], object]]]]:
    """The slow kernels of a chapter, in the same way."""
    sys.path.append(str(stale.ROOT / "book" / "solutions"))
    import slow

    return {name: (problem, lambda call=call: call) for name, (problem, call) in slow.calls("cuda").items()}  # type: ignore[misc]


FILES = {"profile": lambda: PROFILED, "slow_kernels": slow_kernels, "attention_counters": attention_counters}


def count(what: str, name: str) -> None:
    """What runs under Nsight Compute: a call once to compile it, then once to be counted."""
    torch.manual_seed(0)
    call = FILES[what]()[name][1]()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(what: str, name: str) -> pd.DataFrame:
    """What Nsight Compute says of a call, at the clock that the GPU has: see :func:`read_raw`. No row where it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "raw.csv"
        command = ["ncu", *(part for section in SECTIONS for part in ("--section", section))]
        command += ["--metrics", MORE, "--clock-control", "none"]
        command += ["--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--log-file", str(raw), sys.executable, "-m", "bench.counters", "--call", what, name]
        done = subprocess.run(command, check=False)
        return read_raw(raw.read_text(encoding="utf-8") if done.returncode == 0 and raw.exists() else "")


def read_raw(text: str) -> pd.DataFrame:
    """The page "raw" of Nsight Compute: a row for each kernel and metric of those that are kept, kernels in their order."""
    columns = ["launch", "kernel", "metric", "unit", "value"]
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    if not lines:
        return pd.DataFrame(columns=columns)
    units, *kernels = pd.read_csv(io.StringIO("\n".join(lines)), dtype=str, keep_default_na=False).to_dict("records")
    rows = [
        (i, kernel["Kernel Name"], metric, units[metric], value.replace(",", ""))
        for i, kernel in enumerate(kernels)
        for metric, value in kernel.items()
        if METRICS.fullmatch(str(metric))
    ]
    return pd.DataFrame(rows, columns=columns)


SHOWN = {
    "gpu__time_duration.sum": ("time, µs", 1e-3),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor cores at work, %", 1.0),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("cycles in which a scheduler issues, %", 1.0),
    "smsp__inst_executed.sum": ("instructions of warps, millions", 1e-6),
    "launch__registers_per_thread": ("registers a thread", 1.0),
    "lts__t_bytes.sum": ("L2 cache, MB", 1e-6),
    "dram__bytes_read.sum": ("read from memory, MB", 1e-6),
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def beside_peers(rows: pd.DataFrame, stalls: int = 4) -> pd.DataFrame:
    """The rows of ``attention_counters.csv`` as a table: a line for each count and for the reasons that warps wait most for."""
    wide = rows.assign(value=rows["value"].astype(float)).pivot(index="metric", columns="kernel", values="value")
    wide = wide[rows["kernel"].drop_duplicates()]
    lines = pd.DataFrame(
        {name: wide.loc[metric] * factor for metric, (name, factor) in SHOWN.items() if metric in wide.index}
    ).T
    waits = wide.rename(index=lambda metric: m[1].replace("_", " ") if (m := STALL.fullmatch(metric)) else metric)
    waits = waits.loc[[metric for metric in waits.index if "__" not in metric and metric != "selected"]]
    longest = waits.loc[waits.max(axis=1).sort_values(ascending=False).index[:stalls]]
    return pd.concat([lines, longest.rename(index=lambda name: f"warps that wait, {name}, an instruction issued")])


def main(arguments: list[str] | None = None) -> int:
    """Counts what is missing; 1 if something was not counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(FILES), help=f"of {', '.join(FILES)} (default: all)")
    parser.add_argument("--call", nargs=2, metavar=("FILE", "NAME"), help="only this call: what runs under ncu")
    given = parser.parse_args(arguments)
    if given.call:
        count(*given.call)
        return 0
    if shutil.which("ncu") is None or runtime.DEVICE.type != "cuda":
        print("counters: expected a GPU, and Nsight Compute's 'ncu' on the path", file=sys.stderr)
        return 2
    folder, missing = record.results_dir() / record.device_slug(), []
    for what in given.files:
        for kernel, (problem, _) in FILES[what]().items():
            rows = counted(what, kernel)
            if what == "attention_counters":  # a peer's kernel has a name that fills a page: the longest launch it is
                times = rows.loc[rows["metric"] == "gpu__time_duration.sum"].set_index("launch")["value"].astype(float)
                rows = rows.loc[rows["launch"] == (times.idxmax() if len(times) else None)].assign(kernel=kernel)
            rows = rows.loc[rows["kernel"] == kernel].drop(columns="launch").drop_duplicates("metric")
            rows.insert(1, "problem", problem)
            if len(rows):
                rows = rows.assign(**record.environment(what))
                record.write_results(folder / f"{what}.csv", rows, key=("kernel", "metric"))
            missing += [kernel] * (not len(rows))
    print("".join(f"not counted: {name}\n" for name in missing), end="", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
