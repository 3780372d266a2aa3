"""Profiling chosen steps of a program: a trace for a timeline, a snapshot of the memory, and a table of kernels.

:class:`StepProfiler` is told where each step begins and ends, and writes three files into a folder:

- ``trace.json``: what host and device did when, for chrome://tracing or https://ui.perfetto.dev;
- ``memory.pickle``: every allocation with its stack, for https://pytorch.org/memory_viz (where there is a GPU);
- ``kernels.txt``: the kernels that took longest, as a table (without a GPU: the host's operators).

The step before the first recorded one runs under the profiler too, unrecorded: it takes the profiler's own start.
Where several processes train together (``torch.distributed``), each writes into a folder of its own within that one.
"""

import argparse
import ast
import atexit
import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from kernelbook import runtime
from kernelbook.lab import record, timing

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

    def table(self, top: int | None = None) -> str:
        """The rows as text; names are cut to 70 characters."""
        from tabulate import tabulate

        shown = [
            (name[:70], f"{calls:g}", f"{ms:.3f}", f"{share:.1%}", f"{us:.1f}")
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

    What was recorded is written after the last step, by :meth:`close`, or when the program ends. A program that ends its
    run without one of these steps is warned by :meth:`close`.

    Args:
        out: the folder for the files; ``out/rank<i>`` where several processes train together.
        first, last: numbers of the first and the last recorded step, both counted.
        top: rows of the table in ``kernels.txt``.

    Raises:
        ValueError: ``first`` is below 1 or above ``last``, or ``out`` cannot be a folder.
    """

    def __init__(self, out: str | Path, *, first: int = 3, last: int = 5, top: int = 15) -> None:
        if not 1 <= first <= last:
            raise ValueError(f"StepProfiler: first and last must be 1 <= first <= last, got {first} and {last}")
        self.out, self.first, self.last, self.top = Path(out), first, last, top
        record.check_folder("StepProfiler", self.out)
        self.report: Report | None = None
        self._profile: Any = None
        self._recorded = 0
        self._ran: tuple[int, int] | None = None
        self._gpu = runtime.DEVICE.type == "cuda"

    def begin(self, step: int) -> None:
        """Step number ``step`` (from 1) is about to run."""
        self._ran = (step if self._ran is None else self._ran[0], step)
        if self.report is None and self._profile is None and self.first - 1 <= step <= self.last:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._gpu:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                torch.cuda.synchronize()
            # Warming up: events of the step before the first are taken and thrown away.
            steps = self.last - self.first + 1
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1) if step < self.first else None
            self._profile = torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True)
            self._profile.start()
            atexit.register(self.close)  # a profiler that still runs when Python ends crashes it
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
            if step < self.first:
                timing.wait()  # kernels still to run would count to the step that comes
            self._profile.step()

    def close(self) -> Report | None:
        """Writes what was recorded, if anything was and it has not been written yet; ends the recording."""
        profile, self._profile = self._profile, None
        if profile is not None:
            atexit.unregister(self.close)
            try:
                timing.wait()
            finally:
                profile.stop()
            if self._recorded:
                self.report = self._written(profile)
        if self.report is None and self._ran is not None:
            warnings.warn(
                f"StepProfiler: nothing was recorded in {self.out}: steps {self.first} to {self.last} were asked for, and "
                f"steps {self._ran[0]} to {self._ran[1]} were run",
                stacklevel=2,
            )
            self._ran = None
        return self.report

    def _written(self, profile: Any) -> Report:
        out, snapshot, peak = self.out, None, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            out = out / f"rank{dist.get_rank()}"
        out.mkdir(parents=True, exist_ok=True)
        if self._gpu:
            peak = torch.cuda.max_memory_allocated() / 2**20
            snapshot = out / "memory.pickle"
            try:
                torch.cuda.memory._dump_snapshot(str(snapshot))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        trace, table = out / "trace.json", out / "kernels.txt"
        profile.export_chrome_trace(str(trace))
        rows, total = _rows(profile.key_averages(), self._recorded, self._gpu)
        report = Report(trace, snapshot, table, self._recorded, rows, total, peak)
        table.write_text(report.table(self.top) + "\n")
        return report


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


class ProfileCallback:
    """Profiles chosen steps of a ``transformers.Trainer``: a Chrome trace, a memory snapshot, the top kernels.

    ::

        trainer = Trainer(..., callbacks=[ProfileCallback("profile", first=10, last=12)])

    A step is an optimizer step, gradient accumulation included; steps count from 1 as the Trainer's do, also where it
    resumes. One callback records once: another ``train()`` wants another one, with a folder of its own.

    Args:
        out: the folder for ``trace.json``, ``memory.pickle`` and ``kernels.txt``; ``out/rank<i>`` with several processes.
        first, last: the first and the last step that is recorded.
        top: how many kernels the table has.
    """

    def __init__(self, out: str | Path = "profile", *, first: int = 3, last: int = 5, top: int = 15) -> None:
        self.profiler = StepProfiler(out, first=first, last=last, top=top)

    @property
    def report(self) -> Report | None:
        """What was recorded, once the last step is over."""
        return self.profiler.report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.report is not None:
            warnings.warn(
                f"ProfileCallback: {self.profiler.out} holds what an earlier train() recorded, and this one is not recorded; "
                f"give it a callback of its own",
                stacklevel=2,
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.profiler.begin(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.profiler.end(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.profiler.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The Trainer's other events, in which nothing is done; so that nobody has to import transformers for this module."""
        if not name.startswith("on_"):
            raise AttributeError(f"ProfileCallback has no attribute {name!r}")
        return lambda *args, **kwargs: None


# --- what the device did -------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One run of a kernel; times in nanoseconds."""

    name: str
    start: int
    end: int


def device_kernels(call: Callable[[], Any], *, calls: int = 1) -> list[Kernel]:
    """All that the device runs in ``calls`` calls."""
    timing.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        timing.wait()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]


# --- the command ----------------------------------------------------------------------------------------------------

# Our own model where no other is named: small enough for the interpreter, and a layer of Qwen3-30B-A3B on a GPU.
SMALL = {"num_experts": 4, "hidden_size": 32, "intermediate_size": 32, "slots": 2}
LAYER = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768, "slots": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``python -m kernelbook profile``."""
    parser.description = (
        "Runs training steps of a mixture-of-experts model on random data, and records some of them: a Chrome trace, a "
        "snapshot of the memory, and a table of the kernels that took longest."
    )
    parser.add_argument(
        "--config", type=Path, help="a transformers config.json, or a folder with one (default: our own MoELayer)"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change values of the configuration")
    parser.add_argument("--experts", default="kernelbook", help="transformers' implementation of experts (kernelbook)")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train LoRA of this rank on the experts only"
    )
    parser.add_argument("--nf4", action="store_true", help="hold the experts' weights in 4 bits (needs --lora)")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step (default: 1)")
    parser.add_argument(
        "--length", type=int, default=None, help="tokens in a sequence (default: 2048, interpreter: 16)"
    )
    parser.add_argument("--first", type=int, default=3, help="the first step to record (default: 3)")
    parser.add_argument("--last", type=int, default=4, help="the last step to record, and to run (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder for the files (default: profile)")


def profile(given: argparse.Namespace) -> int:
    """Runs the command; 2 where its arguments do not go together, or describe a model that does not run."""
    try:
        return _profile(given)
    except (ImportError, OSError, ValueError) as error:
        what = str(error)
    except Exception as error:  # whatever a model raises whose sizes do not fit
        if runtime.debug_enabled():
            raise
        what = f"the model must run, and it raised {type(error).__name__}: {error}"
    print(f"profile: {' '.join(what.split())}", file=sys.stderr)
    return 2


def _profile(given: argparse.Namespace) -> int:
    if given.nf4 and not given.lora:
        raise ValueError("--nf4 freezes the experts, so there must be --lora RANK to train")
    for name, least in (("batch", 1), ("length", 1), ("lora", 0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    if given.config is None and given.experts != "kernelbook":
        raise ValueError(f"--experts must come with --config, got --experts {given.experts} without it")
    profiler = StepProfiler(given.out, first=given.first, last=given.last)
    step = _step_of(given)
    try:
        for number in range(1, given.last + 1):
            profiler.begin(number)
            loss = step()
            profiler.end(number)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where nothing was recorded, the error says why
            report = profiler.close()
    assert report is not None
    if not loss.isfinite():
        raise ValueError(f"the loss must stay finite, got {loss.item()}: what was recorded is not a model's work")
    print(report.table(profiler.top))
    for path in (report.trace, report.snapshot, report.table_file):
        if path is not None:
            print(f"written: {path}")
    return 0


def _changes(items: list[str]) -> dict[str, Any]:
    """``["a=1", "b=silu"]`` as a dictionary; values are Python literals or else text."""
    found: dict[str, Any] = {}
    for item in items:
        name, mark, value = item.partition("=")
        if not mark:
            raise ValueError(f"--set must have the form NAME=VALUE, got {item!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, TypeError, ValueError):
            found[name] = value
    return found


def _step_of(given: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """One training step of the model that the arguments describe, which returns the loss."""
    real = runtime.DEVICE.type == "cuda"
    length = given.length or (2048 if real else 16)
    dtype = torch.bfloat16 if real else torch.float32
    torch.manual_seed(0)
    if given.config is None:
        loss_of, parameters = _own_model(given, length, dtype)
    else:
        loss_of, parameters = _transformers_model(given, length, dtype)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _own_model(given: argparse.Namespace, length: int, dtype: torch.dtype) -> tuple[Callable[[], torch.Tensor], Any]:
    from kernelbook.nn import MoELayer

    sizes = {**(LAYER if runtime.DEVICE.type == "cuda" else SMALL), **_changes(given.set)}
    try:
        layer = MoELayer(**sizes, device=runtime.DEVICE, dtype=dtype)
    except TypeError as error:
        raise ValueError(f"--set must name sizes of MoELayer: {error}") from error
    if given.lora:
        layer.requires_grad_(False)
        layer.experts.add_lora(given.lora)
        if given.nf4:
            layer.experts.quantize()
    x, target = (
        torch.randn(given.batch, length, sizes["hidden_size"], device=runtime.DEVICE, dtype=dtype) for _ in range(2)
    )
    return lambda: torch.nn.functional.mse_loss(layer(x), target), [p for p in layer.parameters() if p.requires_grad]


def _transformers_model(
    given: argparse.Namespace, length: int, dtype: torch.dtype
) -> tuple[Callable[[], torch.Tensor], Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from kernelbook.interop import transformers as interop

    if not given.config.exists():  # transformers would look for it on the network
        raise ValueError(f"--config must be a file or a folder, but there is no {given.config}")
    config, changes = AutoConfig.from_pretrained(given.config), _changes(given.set)
    unknown = [name for name in changes if not hasattr(config, name)]
    if unknown:
        raise ValueError(f"--set must name values of {type(config).__name__}, got {', '.join(unknown)}")
    config = AutoConfig.from_pretrained(given.config, **changes)
    with torch.device(runtime.DEVICE):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if given.lora:
        import peft

        names = interop.expert_parameters(model)
        if not names:
            raise ValueError(f"--lora must come with a model that has experts, got {type(model).__name__}")
        lora = peft.LoraConfig(r=given.lora, target_modules=[], target_parameters=names)
        model = peft.get_peft_model(model, lora)
    if given.nf4:
        interop.quantize_experts(model)
    if given.experts == interop.NAME:
        interop.use_kernels(model)
    else:
        (model.get_base_model() if given.lora else model).set_experts_implementation(given.experts)
    ids = torch.randint(0, config.get_text_config().vocab_size, (given.batch, length), device=runtime.DEVICE)
    return lambda: model(ids, labels=ids, use_cache=False).loss, [p for p in model.parameters() if p.requires_grad]
