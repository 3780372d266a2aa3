"""Profiling chosen steps of a program: a trace for a timeline, a snapshot of the memory, and a table of kernels.

:class:`StepProfiler` is told where each step begins and ends, and writes three files into a folder:

- ``trace.json``: what host and device did when, for chrome://tracing or https://ui.perfetto.dev;
- ``memory.pickle``: every allocation with its stack, for https://pytorch.org/memory_viz (where there is a GPU);
- ``kernels.txt``: the kernels that took longest, as a table (without a GPU: the host's operators).

The step before the first recorded one runs under the profiler too, unrecorded: it takes the profiler's own start.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._C._autograd import DeviceType

from kernelbook import runtime

__all__ = ["Report", "StepProfiler"]

MAX_EVENTS = 200_000  # allocations that the snapshot holds


@dataclasses.dataclass(frozen=True)
class Report:
    """What was recorded.

    Attributes:
        trace, table_file: the files that were written.
        snapshot: likewise, or ``None`` without a GPU.
        steps: how many steps were recorded.
        rows: kernel, calls a step, milliseconds a step, share of all kernels' time, mean microseconds; longest first.
        total_ms: the time of all kernels in a step.
        peak_mib: the most memory in use during the recorded steps; ``None`` without a GPU.
    """

    trace: Path
    snapshot: Path | None
    table_file: Path
    steps: int
    rows: list[tuple[str, float, float, float, float]]
    total_ms: float
    peak_mib: float | None

    def table(self, top: int | None = None, width: int = 70) -> str:
        """The rows as text; names are cut to ``width`` characters."""
        shown = [
            (
                name if len(name) <= width else name[: width - 3] + "...",
                f"{calls:g}",
                f"{ms:.3f}",
                f"{share:.1%}",
                f"{us:.1f}",
            )
            for name, calls, ms, share, us in self.rows[:top]
        ]
        headers = ("kernel" if self.snapshot else "operator", "calls/step", "ms/step", "share", "mean us")
        lines = [tabulate(shown, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 4))]
        lines.append(f"all: {self.total_ms:.3f} ms a step, {self.steps} steps recorded")
        if self.peak_mib is not None:
            lines.append(f"peak memory: {self.peak_mib:.0f} MiB")
        return "\n".join(lines)


class StepProfiler:
    """Records the steps ``first`` to ``last`` of a run.

    Args:
        out: the folder for the files.
        first, last: numbers of the first and the last recorded step, both counted.
        top: rows of the table in ``kernels.txt``.

    Raises:
        ValueError: ``first`` is below 1 or above ``last``.
    """

    def __init__(self, out: str | Path, *, first: int = 3, last: int = 5, top: int = 15) -> None:
        if not 1 <= first <= last:
            raise ValueError(f"StepProfiler: first and last must be 1 <= first <= last, got {first} and {last}")
        self.out, self.first, self.last, self.top = Path(out), first, last, top
        self.report: Report | None = None
        self._profile: Any = None
        self._recorded = 0
        self._gpu = runtime.DEVICE.type == "cuda"

    def begin(self, step: int) -> None:
        """Step number ``step`` (from 1) is about to run."""
        if self.report is None and self._profile is None and self.first - 1 <= step <= self.last:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._gpu:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # Warming up: events of the step before the first are taken and thrown away.
            warmup = 1 if step < self.first else 0
            schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=self.last - self.first + 1, repeat=1)
            self._profile = torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True)
            self._profile.start()
        if self._profile is not None and step == self.first and self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)

    def end(self, step: int) -> None:
        """Step number ``step`` has run."""
        if self._profile is None:
            return
        if step >= self.first:
            self._recorded += 1
        if step >= self.last:
            self.close()
        else:
            self._profile.step()

    def close(self) -> Report | None:
        """Writes what was recorded, if anything was and it has not been written yet; ends the recording."""
        profile, self._profile = self._profile, None
        if profile is None:
            return self.report
        if self._gpu:
            torch.cuda.synchronize()
        if not self._recorded:
            profile.stop()
            return None
        self.out.mkdir(parents=True, exist_ok=True)
        snapshot, peak = None, None
        if self._gpu:
            peak = torch.cuda.max_memory_allocated() / 2**20
            snapshot = self.out / "memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        profile.stop()
        trace = self.out / "trace.json"
        profile.export_chrome_trace(str(trace))
        rows, total = _rows(profile.key_averages(), self._recorded, self._gpu)
        table = self.out / "kernels.txt"
        self.report = Report(trace, snapshot, table, self._recorded, rows, total, peak)
        table.write_text(self.report.table(self.top) + "\n")
        return self.report


def _rows(averages: Any, steps: int, gpu: bool) -> tuple[list[tuple[str, float, float, float, float]], float]:
    """The profiler's averages as rows of a :class:`Report`, and their total."""
    wanted = DeviceType.CUDA if gpu else DeviceType.CPU
    times = [
        (event.key, event.count, event.self_device_time_total if gpu else event.self_cpu_time_total)
        for event in averages
        # A step's own mark covers everything in it.
        if event.device_type == wanted and not event.key.startswith("ProfilerStep")
    ]
    total = sum(us for _, _, us in times)
    rows = [
        (name, count / steps, us / steps / 1e3, us / total if total else 0.0, us / max(count, 1))
        for name, count, us in sorted(times, key=lambda item: -item[2])
    ]
    return rows, total / steps / 1e3
