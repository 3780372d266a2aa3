"""Measuring: the time of a call, the ceilings of the machine, and the cases of a benchmark.

A benchmark of a room (``bench/<room>.py``) lists :class:`Case` objects. :func:`run_cases` checks every provider of a
case against float64 and times them in one process beside the machine's ceilings, and :func:`kernelbook.lab.record.write_results` keeps the
rows of each case, as they come, in ``book/results/<gpu>/<room>.csv``. GB are 1e9 bytes, TFLOP 1e12 operations, MiB
2**20 bytes, times milliseconds.

Tables need the extra ``lab``; :func:`measure` and the ceilings do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kernelbook import check, runtime
from kernelbook.lab import record as results

if TYPE_CHECKING:
    import pandas as pd

WARMUP_MS, MIN_SAMPLES = 25.0, 20
ROUNDS = 4  # in which the providers of a case have their turns; even, since every second round goes backwards
MODES = ("forward", "backward", "forward_backward", "step")


# --- the time of a call ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median of the samples and their 20th and 80th percentiles, in milliseconds."""

    ms: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))


def half_dtype() -> torch.dtype:
    """Return the GPU's fast dtype of 16 bits: bfloat16, and float16 on Turing, which has no bfloat16."""
    return torch.bfloat16 if runtime.properties().has_tensor_cores else torch.float16


def free_bytes() -> int:
    """Return how much more memory this process can take on the current GPU, or without one in the machine.

    What PyTorch's allocator holds and does not use counts as free; what it was forbidden
    (``PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.5``) does not.
    """
    if runtime.DEVICE.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, total = torch.cuda.mem_get_info()
    held, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    return min(free + held, int(total * torch.cuda.memory.get_per_process_memory_fraction())) - used


def measure(fn: Callable[[], Any], *, rep_ms: float = 100.0) -> Timing:
    """The time of ``fn()`` on the device, with a cold L2 cache, after warm-up.

    On a GPU each sample is the time between two events around the call. Before the first event the L2 cache is
    overwritten and read again, so that nothing of the call's is in it and no line has to be written back first (between
    the layers of a model most lines are clean too); and the device is kept busy for a little longer than the host needs to
    enqueue the call: so the sample holds the device's time, not the host's (:func:`host_us`). Without a GPU the wall clock
    is read, which tells nothing about a GPU.
    """
    return Timing.of(_sampler(fn)(WARMUP_MS, rep_ms, MIN_SAMPLES))


def measure_in_turn(calls: Mapping[str, Callable[[], Any]], *, rep_ms: float = 100.0) -> dict[str, Timing]:
    """:func:`measure` of each call, in :data:`ROUNDS` rounds in which each has its turn.

    A GPU's clock falls with its power and heat, by some per cent within a second of hard work: so what is compared meets the
    same clock. A call that needs little power leaves a faster clock to the next one, so every second round goes backwards.
    """
    rounds = ROUNDS if runtime.DEVICE.type == "cuda" else 1
    samplers = {name: _sampler(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, sample in list(samplers.items())[:: -1 if turn % 2 else 1]:
            times[name] += sample(WARMUP_MS / rounds, rep_ms / rounds, math.ceil(MIN_SAMPLES / rounds))
    return {name: Timing.of(samples) for name, samples in times.items()}


def _sampler(fn: Callable[[], Any]) -> Callable[[float, float, int], list[float]]:
    """Calls ``fn`` a few times; -> what warms it up for so many ms and returns samples of as many, at least so many."""
    if runtime.DEVICE.type != "cuda":
        return lambda warmup_ms, rep_ms, min_samples: _samples_on_cpu(fn, rep_ms)

    def host_ms() -> float:
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3

    fn()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    enqueue_ms = statistics.median(host_ms() for _ in range(5))
    end.record()
    torch.cuda.synchronize()
    estimate = max(start.elapsed_time(end) / 5, 1e-3)
    # clock_rate is in kHz, so this many cycles are a millisecond.
    cycles_per_ms = torch.cuda.get_device_properties(torch.cuda.current_device()).clock_rate
    head_start = int(cycles_per_ms * min(1.5 * enqueue_ms + 0.02, 5.0))

    def sample(warmup_ms: float, rep_ms: float, min_samples: int) -> list[float]:
        for _ in range(min(1000, math.ceil(warmup_ms / estimate))):
            fn()
        flush = torch.empty(max(runtime.properties().l2_bytes // 2, 2**26), dtype=torch.int32, device=runtime.DEVICE)
        read = torch.empty((), dtype=torch.int32, device=runtime.DEVICE)
        count = max(min_samples, min(500, math.ceil(rep_ms / estimate)))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, finish in events:
            torch.amax(flush.zero_(), dim=0, out=read)
            torch.cuda._sleep(head_start)
            begin.record()
            fn()
            finish.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(finish) for begin, finish in events]

    return sample


def _samples_on_cpu(fn: Callable[[], Any], rep_ms: float) -> list[float]:
    times: list[float] = []
    while not times or (sum(times) < rep_ms and len(times) < 100):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def host_us(fn: Callable[[], Any], *, calls: int = 30, batches: int = 7) -> float:
    """The host's time for one call of ``fn``, in microseconds, without waiting for the device.

    It is the median of ``batches`` times of ``calls`` calls in a row (fewer where the device needs long, so that its queue
    never fills, and what the device does for them takes no seconds); between batches the device is waited for. That is what
    a caller pays before the next line runs. It is the wall clock of one thread, so other work on the machine shows in it.
    """

    for _ in range(3):
        fn()
    wait()
    start = time.perf_counter()
    fn()
    wait()
    seconds = time.perf_counter() - start
    calls = max(2, min(calls, int(0.02 / seconds)))
    batches = max(3, min(batches, int(0.4 / (calls * seconds))))
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls * 1e6)
        wait()
    return statistics.median(times)


def wait() -> None:
    """Waits until the device has done what it was given, if there is a GPU."""
    if runtime.DEVICE.type == "cuda":
        torch.cuda.synchronize()


def wall(
    fn: Callable[[], Any], *, calls: int = 1, samples: int = 5, before: Callable[[], object] = lambda: None
) -> tuple[Timing, float]:
    """The wall clock's time of a call of ``fn``, and the host's microseconds until it has enqueued one (their median).

    A sample is ``calls`` calls in a row and the wait for the device; ``before`` runs before each sample and does not count.
    Nothing is warmed up.
    """
    times, host = [], []
    for _ in range(samples):
        before()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        enqueued = time.perf_counter()
        wait()
        times.append((time.perf_counter() - start) / calls * 1e3)
        host.append((enqueued - start) / calls * 1e6)
    return Timing.of(times), statistics.median(host)


def peak_mib(fn: Callable[[], Any]) -> float:
    """The most memory that ``fn()`` holds at a time beyond what was held before, outputs included; NaN without GPU."""
    if runtime.DEVICE.type != "cuda":
        return math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return (peak - before) / 2**20


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Sets PyTorch's switch for tf32 in float32 matrix products within the context."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# --- the ceilings of the machine ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this machine reaches with PyTorch: copy bandwidth (bytes read plus written), matrix products, and what a call
    costs at least: the device's time of an empty kernel and the host's of ``torch.add(x, 1, out=y)``, in microseconds."""

    copy_gbs: float
    bf16_tflops: float
    tf32_tflops: float
    empty_us: float
    add_host_us: float


def measure_ceilings(*, quick: bool = False) -> Ceilings:
    """Measures a large device-to-device copy and large square matrix products on random data. Needs a GPU."""
    if runtime.DEVICE.type != "cuda":
        raise RuntimeError("measure_ceilings: there is no GPU to measure")
    rep_ms = 30.0 if quick else 150.0
    n = 4096 if quick else 8192

    def copy_gbs() -> float:
        elements = 2**27 if quick else 2**30
        while elements > 2**24 and 8 * elements > free_bytes():  # of which it takes half
            elements //= 2
        source = torch.randn(elements, dtype=torch.bfloat16, device=runtime.DEVICE)
        target = torch.empty_like(source)
        return 2 * source.nbytes / measure(lambda: target.copy_(source), rep_ms=rep_ms).ms / 1e6

    def tflops(dtype: torch.dtype) -> float:
        a, b = (torch.randn(n, n, dtype=dtype, device=runtime.DEVICE) for _ in range(2))
        return 2 * n**3 / measure(lambda: a @ b, rep_ms=rep_ms).ms / 1e9

    with allow_tf32(True):
        figures = copy_gbs(), tflops(torch.bfloat16), tflops(torch.float32)
    x, y = (torch.ones(64, 256, dtype=torch.bfloat16, device=runtime.DEVICE) for _ in range(2))
    empty_us = measure(lambda: torch.cuda._sleep(0), rep_ms=rep_ms).ms * 1e3
    return Ceilings(*figures, empty_us, host_us(lambda: torch.add(x, 1, out=y)))


def ceilings_row(ceilings: Ceilings, run: str) -> pd.DataFrame:
    """One row of ``ceilings.csv``."""
    import pandas as pd

    figures = {name: f"{value:.5g}" for name, value in dataclasses.asdict(ceilings).items()}
    return pd.DataFrame([{"run": run, **figures, **results.environment()}], columns=list(results.CEILING_COLUMNS))


# --- what is measured -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """Fresh random inputs, bound to the calls that are compared.

    Attributes:
        providers: by name, a call that returns the outputs (or gradients) that are checked.
        truth: the same outputs from the reference in float64.
        baseline: the same outputs from plain PyTorch in the dtype under test.
        factor: how many times the baseline's error is allowed (``check.FORWARD_FACTOR`` or ``GRADIENT_FACTOR``).
        views: by provider, what makes of its outputs those that are checked, where they are laid out otherwise; not timed.
    """

    providers: Mapping[str, Callable[[], Sequence[torch.Tensor]]]
    truth: Callable[[], Sequence[torch.Tensor]]
    baseline: Callable[[], Sequence[torch.Tensor]]
    factor: float
    views: Mapping[str, Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of a benchmark: a row for each provider.

    ``gbytes`` and ``gflop`` are the algorithm's minimum: each input read once, each output written once.
    """

    op: str
    mode: str
    dtype: torch.dtype
    shape: Mapping[str, Any]
    x_name: str
    x: float
    gbytes: float
    gflop: float
    build: Callable[[], Problem]

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"Case: mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    @property
    def shape_text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.shape.items())

    @property
    def key(self) -> tuple[str, ...]:
        """What a row has in the columns op, mode, dtype, shape, x_name and x."""
        dtype = str(self.dtype).removeprefix("torch.")
        return self.op, self.mode, dtype, self.shape_text, self.x_name, f"{self.x:.12g}"

    def __str__(self) -> str:
        return "{} {} {} {} {}={}".format(*self.key)


def error_ratios(problem: Problem) -> dict[str, float]:
    """For each provider its error over plain PyTorch's (the worst output); ``CheckError`` if ours is not correct."""
    truth, baseline = problem.truth(), problem.baseline()
    ratios = {}
    for provider, call in problem.providers.items():
        # Under the switch that fills new memory a graph would be compiled anew, and what is timed not be checked.
        poisoned = results.is_ours(provider) and not provider.endswith(":compiled")
        with check.poisoned_empty() if poisoned else contextlib.nullcontext():
            outputs = call()
        if provider in problem.views:
            outputs = problem.views[provider](outputs)
        verdicts = [
            check.compare(f"{provider}[{i}]", out, ref, base, factor=problem.factor)
            for i, (out, ref, base) in enumerate(zip(outputs, truth, baseline, strict=True))
        ]
        if results.is_ours(provider):
            for verdict in verdicts:
                verdict.require()
        ratios[provider] = max(verdict.ratio for verdict in verdicts)
    return ratios


def run_cases(
    cases: Iterable[Case],
    *,
    stem: str = "",
    progress: bool = True,
    rep_ms: float = 100.0,
    peer: Callable[[str], str] = lambda provider: "",
    record: Callable[[pd.DataFrame], object] | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Checks and times every provider of every case in this process.

    Args:
        cases: what is measured.
        stem: of the file that the rows are for, which says what kernels they depend on (:mod:`kernelbook.lab.stale`).
        progress: show a progress bar.
        rep_ms: how long to sample each call.
        peer: from a provider that is not ours to the package that it is of, and its version.
        record: is given the rows of each case as soon as they are there, so that a run that ends early keeps them.

    Returns:
        The rows (columns :data:`kernelbook.lab.record.COLUMNS`, one run id) and the failures in words. A case in which one of our own results
        is not correct, or that raises an error, contributes no row; the others are measured all the same. A case that is too
        large for the GPU's memory is left out, which is printed and no failure.
    """
    import pandas as pd
    from tqdm import tqdm

    run = results.new_run()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for case in tqdm(list(cases), disable=not progress, unit="case"):
        try:
            found = _run_case(case, rep_ms)
        except check.CheckError as error:
            failures.append(f"{case}: {error}")
            continue
        except torch.OutOfMemoryError:  # this GPU is too small for it; a smaller one of the same sweep may fit
            tqdm.write(f"left out, too little GPU memory: {case}")
            continue
        except Exception as error:  # a peer that a new version broke: one case is lost, not the run
            failures.append(f"{case}: {type(error).__name__}: {error}")
            continue
        about = results.environment(stem, case.op)
        peers = ["" if results.is_ours(row["provider"]) else peer(row["provider"]) for row in found]
        new = [{"run": run, **row, **about, "peer": name} for row, name in zip(found, peers, strict=True)]
        rows += new
        if record is not None:
            record(pd.DataFrame(new, columns=list(results.COLUMNS)))
    return pd.DataFrame(rows, columns=list(results.COLUMNS)), failures


def _run_case(case: Case, rep_ms: float) -> list[dict[str, str]]:
    torch.manual_seed(0)  # the same inputs in every run, whatever is measured before: routing decides times
    problem, on_gpu = case.build(), runtime.DEVICE.type == "cuda"
    gpus = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    ratios, rows, (op, mode, *others) = error_ratios(problem), [], case.key
    for provider, timing in measure_in_turn(problem.providers, rep_ms=rep_ms).items():
        call = problem.providers[provider]
        rows.append(
            dict(zip(results.KEY, (op, mode, provider, *others), strict=True))
            | {
                "ms": f"{timing.ms:.5g}",
                "ms_p20": f"{timing.p20:.5g}",
                "ms_p80": f"{timing.p80:.5g}",
                "gbytes": f"{case.gbytes:.6g}",
                "gflop": f"{case.gflop:.6g}",
                "peak_mib": f"{peak_mib(call):.5g}",
                "err_ratio": f"{ratios[provider]:.3g}",
                "host_us": f"{host_us(call) if on_gpu else math.nan:.4g}",
                "gpus": str(gpus),
            }
        )
    return rows


def time_steps(stem: str, cases: Iterable[Case], *, record: bool = False, rep_ms: float = 100.0) -> pd.DataFrame:
    """Checks and times the steps of a chapter, see :func:`run_cases`; without a GPU checks them and returns no row.

    Args:
        stem: with ``record``, on a GPU, the rows go to ``book/results/<gpu>/<stem>.csv``, and the ceilings beside them.
        cases: one for each table of steps; the providers are its steps in their order, peers last.
        record: keep what was measured.
        rep_ms: how long to sample each call.

    Raises:
        RuntimeError: a case failed.
    """
    gpu = runtime.DEVICE.type == "cuda"
    path = results.results_dir() / results.device_slug() / f"{stem}.csv" if record and gpu else None
    rows, failures = run_cases(cases, stem=stem if path else "", progress=False, rep_ms=rep_ms if gpu else 1.0)
    if path is not None and len(rows):
        if not failures:  # steps that are none any more do not stay
            path.unlink(missing_ok=True)
        results.write_results(path, rows)
        ceilings = ceilings_row(measure_ceilings(), rows["run"].iloc[0])
        results.write_results(path.parent / "ceilings.csv", ceilings, key=("run",))
    if failures:
        raise RuntimeError("time_steps: " + "; ".join(failures))
    return rows if gpu else rows.iloc[:0]  # the interpreter's times say nothing, so none is kept
