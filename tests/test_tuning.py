"""The command ``tune``: what it tries, what it keeps, and what it does when a candidate brings its process down."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from kernelbook import plans, runtime
from kernelbook.lab import candidates, cli, timing, tuning
from kernelbook.lab.bench import sparse_linear as sparse_linear_bench

GPU = dataclasses.replace(runtime.TARGETS["sm_90"], name="A Fake GPU")
RULE, FAST, WRONG, TOO_LARGE, DEADLY = (triton.Config({"BLOCK": block}) for block in (1, 2, 3, 4, 5))
PLACE = ("square", (), 0)
KEY = ("square.tiles", "n=7")
NEVER = float("inf")


def here(function: Callable[..., Any], *arguments: Any) -> Any:
    """In place of another process."""
    return function(*arguments)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., triton.Config]]:
    """A planner whose candidates are faster, wrong, too large, or fail; its plans lie in ``tmp_path``."""
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "properties", lambda device=None: GPU)
    monkeypatch.setattr(plans, "_planners", {})
    monkeypatch.setattr(candidates, "SPACES", {"square.tiles": {"BLOCK": range(1, 6)}})

    @plans.planner("square.tiles", lambda plan, n, properties: True)
    def rule(n: int, properties: runtime.DeviceProperties) -> triton.Config:
        return RULE

    def measure(call: Callable[[], Any], **_: Any) -> timing.Timing:
        call()
        ms = {1: 0.002, 2: 0.001, 3: 0.0001}[rule(7, GPU).kwargs["BLOCK"]]
        return timing.Timing(ms, ms, ms, 1)

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(tuning, "_cases_of", lambda room, shape: [_case(rule)])
    tuning._problem.cache_clear()
    plans.forget()
    yield rule
    tuning._problem.cache_clear()
    plans.forget()


def _case(plan: Callable[..., triton.Config]) -> timing.Case:
    def build() -> timing.Problem:
        x = torch.randn(8)

        def ours() -> list[torch.Tensor]:
            block = plan(7, GPU).kwargs["BLOCK"]
            if block == 4:
                raise OutOfResources(300_000, 232_448, "shared memory")
            if block == 5:
                raise tuning.LostError("the process died")
            return [x * x + (1.0 if block == 3 else 0.0)]

        calls = {"torch": lambda: [x * x], "kernelbook": ours}
        return timing.Problem(calls, lambda: [x.double() ** 2], calls["torch"], 2.0)

    return timing.Case("square", "forward", torch.float32, {"N": 7}, "N", 7, 1.0, 1.0, build)


def _tuned(plan: Callable[..., triton.Config]) -> tuning.Decisions:
    decisions: tuning.Decisions = {}
    tuning.tune_case(PLACE, _case(plan), [here], decisions, NEVER)
    return decisions


def test_the_fastest_that_is_right_is_kept(
    plan: Callable[..., triton.Config], capsys: pytest.CaptureFixture[str]
) -> None:
    decisions = _tuned(plan)
    said = capsys.readouterr().err.splitlines()
    assert ['"BLOCK": 3' in said[0], '"BLOCK": 5' in said[1], len(said)] == [True, True, 2]
    assert "wrong: kernelbook[0]" in said[0] and "failed: the process died" in said[1]
    assert decisions[KEY]["wrong"] == 1
    table = tuning.searched(decisions)
    assert tuple(table) == tuning.SEARCH_COLUMNS
    assert table[["planner", "problem", "tried", "rule_us", "plan_us"]].values.tolist() == [[*KEY, 2, 2.0, 1.0]]
    stored = plans.read_plans(plans.own_plans(GPU.name))["square.tiles"]["n=7"]
    assert stored["plan"] == plans.as_json(FAST) and (stored["rule_us"], stored["us"]) == (2.0, 1.0)
    assert plan(7, GPU) == FAST  # from now on, in every process
    before = repr(decisions)
    tuning.tune_case(PLACE, _case(plan), [here], decisions, NEVER)  # a second time nothing is tried
    assert repr(decisions) == before


def test_a_gain_within_the_noise_is_not_kept(
    plan: Callable[..., triton.Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "GAIN", 2.1)
    decisions = _tuned(plan)
    assert decisions[KEY]["plan"] is None and tuning.searched(decisions)["plan_us"].tolist() == [2.0]
    assert not plans.own_plans(GPU.name).exists() and plan(7, GPU) == RULE


def test_a_plan_that_loses_in_another_case_of_the_same_problem_is_struck(
    plan: Callable[..., triton.Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuning.compared(here, PLACE) is None
    decisions = _tuned(plan)
    timing_of = timing.measure

    def slower_with_it(call: Callable[[], Any], **_: Any) -> timing.Timing:
        ms = 4.0 / timing_of(call).ms
        return timing.Timing(ms, ms, ms, 1)

    monkeypatch.setattr(timing, "measure", slower_with_it)
    monkeypatch.setenv("KERNELBOOK_PLANS", "rules")  # as in the other process
    assert tuning.compared(here, ("other", (), 0)) is None
    rules, tuned, used = tuning.compared(here, PLACE) or (0.0, 0.0, [])
    assert tuned == 2 * rules > 0 and used == [KEY]
    tuning.strike_where_slower(PLACE, _case(plan), here, decisions)
    assert decisions[KEY]["plan"] is None
    monkeypatch.delenv("KERNELBOOK_PLANS")
    plans.forget()
    assert plan(7, GPU) == RULE


def test_nothing_is_decided_where_time_is_up(plan: Callable[..., triton.Config]) -> None:
    decisions: tuning.Decisions = {}
    tuning.tune_case(PLACE, _case(plan), [here], decisions, time.time() - 1)
    assert tuning.search([here], PLACE, KEY, (7, GPU), {}, time.time() - 1) is None
    assert not decisions and not plans.own_plans(GPU.name).exists()


def test_a_process_that_dies_hangs_or_fails_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tuning.Worker()
    first = worker(os.getpid)
    assert first not in (os.getpid(), None) and worker(os.getpid) == first
    assert worker(os.getenv, "KERNELBOOK_PLANS") == "rules"
    with pytest.raises(tuning.LostError, match="the process died"):
        worker(os._exit, 9)
    second = worker(os.getpid)
    with pytest.raises(tuning.LostError, match="ValueError: "):
        worker(int, "none")
    third = worker(os.getpid)
    monkeypatch.setattr(tuning, "STALLED_S", 1.0)
    with pytest.raises(tuning.LostError, match="no answer in 1 s"):
        worker(time.sleep, 600)
    assert len({first, second, third}) == 3
    worker.end()


def test_a_case_that_fails_is_left_out(plan: Callable[..., triton.Config], capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> None:
        raise tuning.LostError("OutOfMemoryError")

    tuning._attempt(tuning.tune_case, PLACE, _case(plan), [fails], {}, NEVER)
    assert "left out: square forward float32 N=7 N=7: OutOfMemoryError" in capsys.readouterr().err


def test_shapes() -> None:
    assert tuning.parse_shape("M=4096 N=5120, active=0.1") == {"M": 4096, "N": 5120, "active": 0.1}
    assert tuning.parse_shape(None) == {}
    with pytest.raises(ValueError, match="tune: --shape must be like 'M=4096 N=5120', got 'large'"):
        tuning.parse_shape("large")
    with pytest.raises(ValueError, match="tune: --shape of layer_norm must give N, got M"):
        tuning._cases_of("layer_norm", {"M": 3})
    cases = tuning._cases_of("layer_norm", {"M": 3, "N": 5})
    assert {case.op for case in cases} == {"layer_norm", "rms_norm"}
    assert all(case.shape.items() >= {"M": 3, "N": 5}.items() for case in cases)


def test_the_search_walks_to_neighbours_of_the_best_and_ends_where_nothing_is_gained(
    plan: Callable[..., triton.Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valley from the rule, at one end, to the best plan at the other; what lies far behind it is never tried."""
    blocks = [2**i for i in range(17)]
    monkeypatch.setattr(candidates, "SPACES", {"square.tiles": {"BLOCK": blocks, "num_stages": (3, 4, 5)}})
    tried: list[int] = []
    called: list[int] = []

    def worker(function: Callable[..., Any], place: tuning.Place, trial: Any) -> Any:
        if function is tuning.asked:
            return called.append(trial["square.tiles"]["n=7"]["plan"]["BLOCK"])
        if function is tuning.in_turn:
            return [time_of(each) for each in trial]
        tried.append(trial["square.tiles"]["n=7"]["plan"]["BLOCK"])
        return time_of(trial)

    def time_of(trial: Any) -> float:
        found = trial["square.tiles"]["n=7"]["plan"]
        return 1.0 + abs(found["BLOCK"].bit_length() - 8) + found["num_stages"]

    monkeypatch.setattr(tuning, "BATCH", 4)
    decision = tuning.search([worker, worker], PLACE, KEY, (7, GPU), {}, NEVER)
    assert decision is not None
    assert decision["plan"] == plans.as_json(triton.Config({"BLOCK": 2**7}, num_stages=3)), decision
    assert 12 <= decision["tried"] == len(tried) < 45 and max(tried) < 2**16
    assert sorted(called) == sorted(tried)  # compiled beforehand, each once


def test_every_room_has_its_share_of_the_time() -> None:
    chosen = tuning._chosen_cases(["layer_norm", "nf4"], {}, "backward|dequantize")
    assert [place[0] for place, _ in chosen[:4]] == ["layer_norm", "nf4"] * 2
    assert all("backward" in str(case) or "dequantize" in str(case) for _, case in chosen)
    assert all(str(tuning._cases_of(room, {})[index]) == str(case) for (room, _, index), case in chosen)


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="about machines without a GPU")
def test_tuning_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "layer_norm", "--minutes", "1"]) == 2
    assert "tune: no GPU runs kernels here" in capsys.readouterr().err
    assert cli.main(["tune", "layer_norm", "--compare"]) == 2
    assert "tune: no GPU runs kernels here" in capsys.readouterr().err
    assert cli.main(["tune", "layer_norm", "--select", "("]) == 2
    assert "tune: --select must be a regular expression, got '('" in capsys.readouterr().err
    assert cli.main(["tune", "kitchen"]) == 2
    assert "tune: ROOM must be of " in capsys.readouterr().err


def test_the_call_of_a_room_asks_its_planners() -> None:
    """Else a room's plans would be tuned for nothing. (float16: the interpreter has no bfloat16.)"""
    ffn = {"M": 1, "K": 32, "N": 64, "active": 0.5}
    norms = tuning._cases_of("layer_norm", {"M": 3, "N": 40})
    for case, expected in (
        (sparse_linear_bench.backward_case((32, 32, 128), 0.5, torch.float16), {"sparse_linear.backward"}),
        (tuning._cases_of("scatter_ffn", ffn)[0], {"scatter_ffn.strategy", "scatter_ffn.vector_up"}),
        *((norm, {f"layer_norm.{norm.mode}"}) for norm in norms),
    ):
        problem = case.build()
        assert isinstance(problem, timing.Problem)
        for _ in range(2):  # no cache but those of plans stands before the planners
            plans.forget()
            problem.providers["kernelbook"]()
            assert expected <= {name for name, _ in plans.asked}, (expected, plans.asked)


@pytest.mark.gpu
def test_tuning_a_room_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    shape = {"M": 256, "d_in": 512, "d_out": 1024, "active": 0.25}
    assert tuning.tune(tuning._chosen_cases(["sparse_linear"], shape, None), 1.0, False, tmp_path) == 0
    found = next(tmp_path.glob("*/search.csv")).read_text().splitlines()
    assert len(found) >= 2 and "sparse_linear.backward" in found[1]
