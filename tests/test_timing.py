"""Measuring and the record of a measurement."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from kernelbook import check, runtime
from kernelbook.lab import record, timing


def _problem(ours: object) -> timing.Problem:
    x = torch.randn(20, 30, device=runtime.DEVICE)
    return timing.Problem(
        providers={"torch": lambda: [x * x], "kernelbook": lambda: [ours(x)]},
        truth=lambda: [x.double() * x.double()],
        baseline=lambda: [x * x],
        factor=check.FORWARD_FACTOR,
    )


def _case(ours: object = torch.square, x: float = 30) -> timing.Case:
    return timing.Case(
        op="square",
        mode="forward",
        dtype=torch.float32,
        shape={"M": 20, "N": 30},
        x_name="N",
        x=x,
        gbytes=4.8e-6,
        gflop=6e-7,
        build=lambda: _problem(ours),
    )


def _unwritten(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[1:] = x[1:] * x[1:]
    return out


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise MemoryError("too large")


@pytest.mark.parametrize(
    ("wrong", "said"),
    (
        (lambda x: x * x * 1.001, "kernelbook[0]: error"),
        (_unwritten, "kernelbook[0]: error"),
        (_broken, "MemoryError: too large"),
    ),
)
def test_a_wrong_result_of_ours_and_an_error_cost_one_case(wrong: object, said: str) -> None:
    rows, failures = timing.run_cases([_case(wrong), _case(x=31)], progress=False, rep_ms=2)
    assert len(failures) == 1 and f"square forward float32 M=20 N=30 N=30: {said}" in failures[0]
    assert list(rows["x"]) == ["31", "31"]


def _rows(**changes: str) -> pd.DataFrame:
    return pd.DataFrame([dict.fromkeys(record.COLUMNS, "1") | changes], columns=list(record.COLUMNS))


def test_a_file_with_other_columns_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "square.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"write_results: square\.csv has columns"):
        record.write_results(path, _rows())
    assert path.read_text() == "a,b\n1,2\n"


def test_host_time_counts_the_call_and_not_the_device() -> None:
    assert timing.host_us(lambda: time.sleep(0.002), calls=4, batches=3) >= 2000
    assert timing.host_us(lambda: None) < 100


@pytest.mark.gpu
@pytest.mark.alone
def test_a_sample_begins_with_a_cold_cache() -> None:
    """What is read twice in one sample comes from the cache the second time. In a warm cache it would come from there twice."""
    x, out = torch.ones(6 * 2**20, device=runtime.DEVICE), torch.empty((), device=runtime.DEVICE)  # 24 MiB

    def read() -> None:
        torch.amax(x, dim=0, out=out)

    def twice() -> None:
        read(), read()

    assert timing.measure(twice).ms < 1.85 * timing.measure(read).ms


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="the wall clock is for the interpreter")
def test_measure_reads_the_wall_clock_without_a_gpu() -> None:
    timing_of_sleep = timing.measure(lambda: time.sleep(0.002), rep_ms=10)
    assert 2 <= timing_of_sleep.p20 <= timing_of_sleep.ms <= timing_of_sleep.p80 < 50
    assert math.isnan(timing.peak_mib(lambda: None))


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="a sleeping host enqueues nothing")
def test_the_wall_clock_begins_after_what_comes_before() -> None:
    called: list[str] = []

    def before() -> None:
        called.append("before")
        time.sleep(0.1)

    def call() -> None:
        called.append("call")
        time.sleep(0.002)

    found, host = timing.wall(call, calls=3, samples=2, before=before)
    assert called == ["before", *3 * ["call"]] * 2 and found.samples == 2
    assert 2 <= found.p20 <= found.ms < 30 and 2e3 <= host <= 1e3 * found.p80


def test_a_case_has_the_same_inputs_in_every_run() -> None:
    """Routing is drawn, and decides times: what was measured before must not change it."""
    drawn: list[torch.Tensor] = []

    def case() -> timing.Case:
        return dataclasses.replace(_case(), build=lambda: drawn.append(torch.rand(4)) or _problem(torch.square))

    torch.manual_seed(1)
    timing.run_cases([case(), case()], progress=False, rep_ms=1)
    assert len(drawn) == 2 and torch.equal(*drawn)


@pytest.mark.gpu
def test_what_is_compared_has_its_turn_in_each_round() -> None:
    """A call that gets slower with time does so for all."""
    x, order = torch.randn(2**20, device=runtime.DEVICE), []
    calls = {name: lambda name=name: (order.append(name), x.add_(1)) for name in "ab"}
    times = timing.measure_in_turn(calls, rep_ms=3)
    turns = "".join(name for name, _ in itertools.groupby(order))
    # Each is called first to see how long it takes; every second round goes backwards, and begins with who ended the last.
    assert turns == "ab" + "ab" * (timing.ROUNDS // 2) + "a"
    assert times["a"].samples >= timing.MIN_SAMPLES and 0.8 < times["a"].ms / times["b"].ms < 1.25


@pytest.mark.gpu
def test_measure_sees_the_device_not_the_host() -> None:
    x = torch.randn(2**26, device=runtime.DEVICE)

    def slow_host() -> None:
        time.sleep(0.001)
        x.add_(1)

    plain, slow = timing.measure(lambda: x.add_(1)), timing.measure(slow_host)
    assert slow.ms < 1.3 * plain.ms
    ceilings = timing.measure_ceilings(quick=True)
    assert 0.5 * ceilings.copy_gbs < 2 * x.nbytes / plain.ms / 1e6 < 1.1 * ceilings.copy_gbs


@pytest.mark.gpu
def test_peak_memory() -> None:
    assert timing.peak_mib(lambda: torch.empty(2**20, dtype=torch.int8, device=runtime.DEVICE)) == 1


@pytest.mark.gpu
def test_no_first_call_takes_ten_seconds(tmp_path: Path) -> None:
    code = "import time, torch, kernelbook as kb\nx = torch.randn(64, 4096, device='cuda')\nstart = time.time()\nkb.layer_norm(x).sum().item()\n"
    code += "assert time.time() - start < 10"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, check=True)


def test_steps_take_the_place_of_the_old_ones_unless_one_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing.runtime, "DEVICE", torch.device("cpu"))
    assert timing.time_steps("square_steps", [_case()]).empty  # the interpreter's times say nothing
    about = record.environment()
    monkeypatch.setattr(timing.runtime, "DEVICE", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(record, "device_slug", lambda: "a-gpu")
    monkeypatch.setattr(record, "environment", lambda *_: about)
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    failures: list[str] = []
    path = tmp_path / "a-gpu" / "square_steps.csv"
    record.write_results(path, _rows(run="old", provider="kernelbook:gone"))
    monkeypatch.setattr(timing, "run_cases", lambda *_, **__: (_rows(run="new"), failures))
    monkeypatch.setattr(timing, "measure_ceilings", lambda: timing.Ceilings(1.0, 2.0, 3.0, 4.0, 5.0))
    failures.append("square: wrong")
    with pytest.raises(RuntimeError, match="time_steps: square: wrong"):
        timing.time_steps("square_steps", [], record=True)
    assert sorted(pd.read_csv(path)["run"]) == ["new", "old"]
    failures.clear()
    timing.time_steps("square_steps", [], record=True)
    assert list(pd.read_csv(path)["run"]) == list(pd.read_csv(path.with_name("ceilings.csv"))["run"]) == ["new"]
