"""The command ``tune``: what it tries, what it keeps, and what it does when a candidate brings its process down."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from kernelbook import plans, runtime
from kernelbook.lab import cli, timing, tuning
from kernelbook.lab.bench import sparse_linear as sparse_linear_bench

GPU = dataclasses.replace(runtime.TARGETS["sm_90"], name="A Fake GPU")
RULE, FAST, WRONG, TOO_LARGE = (triton.Config({"BLOCK": block}) for block in (1, 2, 3, 4))


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., triton.Config]]:
    """A planner whose candidates are faster, wrong, or too large; its plans lie in ``tmp_path``."""
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "properties", lambda device=None: GPU)
    monkeypatch.setattr(plans, "_planners", {})

    @plans.planner("square.tiles", lambda n, properties: (RULE, WRONG, TOO_LARGE, FAST))
    def rule(n: int, properties: runtime.DeviceProperties) -> triton.Config:
        return RULE

    def measure(call: Callable[[], Any], **_: Any) -> timing.Timing:
        call()
        ms = {1: 0.002, 2: 0.001, 3: 0.0001}[rule(7, GPU).kwargs["BLOCK"]]
        return timing.Timing(ms, ms, ms, 1)

    monkeypatch.setattr(timing, "measure", measure)
    plans.forget()
    yield rule
    plans.forget()


def _case(plan: Callable[..., triton.Config]) -> timing.Case:
    def build() -> timing.Problem:
        x = torch.randn(8)

        def ours() -> list[torch.Tensor]:
            block = plan(7, GPU).kwargs["BLOCK"]
            if block == 4:
                raise OutOfResources(300_000, 232_448, "shared memory")
            return [x * x + (1.0 if block == 3 else 0.0)]

        calls = {"torch": lambda: [x * x], "kernelbook": ours}
        return timing.Problem(calls, lambda: [x.double() ** 2], calls["torch"], 2.0)

    return timing.Case("square", "forward", torch.float32, {"N": 7}, "N", 7, 1.0, 1.0, build)


def test_the_fastest_that_is_right_is_kept(plan: Callable[..., triton.Config], tmp_path: Path) -> None:
    journal = tuning.Journal(tmp_path / "journal")
    tuning.tune_case(_case(plan), journal)
    outcomes = {e["plan"]["BLOCK"]: e["outcome"].split(":")[0] for e in journal.entries if "outcome" in e}
    assert outcomes == {1: "ok", 2: "ok", 3: "wrong", 4: "does not fit"}
    table = tuning.searched(journal)
    assert tuple(table) == tuning.SEARCH_COLUMNS
    assert table[["planner", "problem", "tried", "rule_us", "plan_us"]].values.tolist() == [
        ["square.tiles", "n=7", 2, 2.0, 1.0]
    ]
    stored = plans.read_plans(plans.own_plans(GPU.name))["square.tiles"]["n=7"]
    assert stored["plan"] == plans.as_json(FAST) and (stored["rule_us"], stored["us"]) == (2.0, 1.0)
    assert plan(7, GPU) == FAST  # from now on, in every process
    tuning.tune_case(_case(plan), journal)  # a second time nothing is tried
    assert sum("outcome" in e for e in journal.entries) == 4


def test_a_gain_within_the_noise_is_not_kept(
    plan: Callable[..., triton.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "GAIN", 2.1)
    tuning.tune_case(_case(plan), tuning.Journal(tmp_path / "journal"))
    assert not plans.own_plans(GPU.name).exists() and plan(7, GPU) == RULE


def test_a_plan_that_loses_in_another_case_of_the_same_problem_is_struck(
    plan: Callable[..., triton.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tuning.Journal(tmp_path / "journal")
    tuning.tune_case(_case(plan), journal)
    timing_of = timing.measure

    def slower_with_it(call: Callable[[], Any], **_: Any) -> timing.Timing:
        ms = 4.0 / timing_of(call).ms
        return timing.Timing(ms, ms, ms, 1)

    monkeypatch.setattr(timing, "measure", slower_with_it)
    assert tuning.compared("other", _case(plan)) is None
    rules, tuned, used = tuning.compared("square", _case(plan)) or (0.0, 0.0, [])
    assert tuned == 2 * rules > 0 and used == [("square.tiles", "n=7")]
    tuning.strike_where_slower("square", dataclasses.replace(_case(plan), x=8), journal)
    assert plan(7, GPU) == RULE and not journal.winners()["square.tiles", "n=7"]["kept"]


def test_a_candidate_without_an_outcome_is_skipped(plan: Callable[..., triton.Config], tmp_path: Path) -> None:
    """It was written down before it started, and its process did not come back."""
    journal = tuning.Journal(tmp_path / "journal")
    journal.write(planner="square.tiles", key="n=7", plan=plans.as_json(FAST))
    tuning.tune_case(_case(plan), tuning.Journal(journal.path))
    entries = tuning.Journal(journal.path).entries
    assert [e["outcome"] for e in entries if e.get("plan") == plans.as_json(FAST) and "outcome" in e] == [
        "brought the process down"
    ]
    assert plan(7, GPU) == RULE


# Dies after its first line, hangs after the second, then ends well; the journal says how far it came.
WORKER = """
import os, sys, time
path = sys.argv[1]
count = len(open(path).readlines()) if os.path.exists(path) else 0
with open(path, "a") as file:
    file.write('{"starts": "again"}\\n')
if count == 0:
    os._exit(9)
if count == 1:
    time.sleep(600)
"""


def test_a_process_that_dies_or_hangs_is_followed_by_another(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert tuning.supervise([sys.executable, "-c", WORKER, str(journal)], journal, stalled_s=2.0, quiet=True) == 3
    assert len(tuning.Journal(journal).entries) == 3


def test_what_never_gets_anywhere_is_given_up(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert tuning.supervise([sys.executable, "-c", "raise SystemExit(1)"], journal, quiet=True) == 2


def test_the_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text(json.dumps({"starts": "a"}) + '\n{"starts": ')
    assert tuning.Journal(tmp_path / "journal").entries == [{"starts": "a"}]


def test_shapes() -> None:
    assert tuning.parse_shape("M=4096 N=5120, active=0.1") == {"M": 4096, "N": 5120, "active": 0.1}
    assert tuning.parse_shape(None) is None
    with pytest.raises(ValueError, match="tune: --shape must be like 'M=4096 N=5120', got 'large'"):
        tuning.parse_shape("large")
    with pytest.raises(ValueError, match="tune: --shape of layer_norm must give N, got M"):
        tuning._cases_of("layer_norm", {"M": 3})
    cases = tuning._cases_of("layer_norm", {"M": 3, "N": 5})
    assert {case.op for case in cases} == {"layer_norm", "rms_norm"}
    assert all(case.shape.items() >= {"M": 3, "N": 5}.items() for case in cases)


def test_what_a_case_asks_planners_for_is_found_without_a_launch() -> None:
    for case in tuning._cases_of("layer_norm", {"M": 3, "N": 40}):
        assert f"layer_norm.{case.mode}" in {name for name, _ in tuning._asked(case)}


def test_the_search_walks_to_neighbours_of_the_best_and_ends_where_nothing_is_gained(
    plan: Callable[..., triton.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valley from the rule, at one end, to the best plan at the other; what lies far behind it is never tried."""
    configs = [triton.Config({"BLOCK": 2**i}) for i in range(60)]
    planner = dataclasses.replace(
        plans.planners()["square.tiles"], rule=lambda n, p: configs[0], candidates=lambda n, p: configs
    )
    monkeypatch.setitem(plans._planners, "square.tiles", planner)

    def measure(call: Callable[[], Any], **_: Any) -> timing.Timing:
        ms = 1.0 + abs(plans._forced["square.tiles"]["n=7"].kwargs["BLOCK"].bit_length() - 11)
        return timing.Timing(ms, ms, ms, 1)

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(tuning, "BATCH", 4)
    journal, warmed = tuning.Journal(tmp_path / "journal"), []

    def call() -> list[torch.Tensor]:
        planner.find((7, GPU))
        return [torch.ones(8)]

    problem = timing.Problem({"kernelbook": call}, lambda: [torch.ones(8).double()], lambda: [torch.ones(8)], 2.0)
    case = dataclasses.replace(_case(plan), build=lambda: problem)
    tuning.tune_case(case, journal, warm=lambda *given: warmed.append(given))
    assert journal.winners()["square.tiles", "n=7"]["winner"]["BLOCK"] == 2**10
    assert 12 <= len({json.dumps(e["plan"]) for e in journal.entries if "outcome" in e}) < 30
    assert {given[:3] for given in warmed} == {("square.tiles", "n=7", ())}


def test_every_room_has_its_share_of_the_time() -> None:
    job = {"rooms": ["layer_norm", "nf4"], "shape": None, "select": "backward|dequantize"}
    chosen = tuning._chosen_cases(job)
    assert [room for room, _, _ in chosen[:4]] == ["layer_norm", "nf4"] * 2
    assert all("backward" in str(case) or "dequantize" in str(case) for _, _, case in chosen)


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="about machines without a GPU")
def test_tuning_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "layer_norm", "--minutes", "1"]) == 2
    assert "tune: no GPU runs kernels here" in capsys.readouterr().err
    assert cli.main(["tune", "layer_norm", "--select", "("]) == 2
    assert "tune: --select must be a regular expression, got '('" in capsys.readouterr().err


def test_the_call_of_a_room_asks_its_planners() -> None:
    """Else a room's plans would be tuned for nothing. (float16: the interpreter has no bfloat16.)"""
    ffn = {"M": 1, "K": 32, "N": 64, "active": 0.5}
    for case, expected in (
        (sparse_linear_bench.backward_case((32, 32, 128), 0.5, torch.float16), {"sparse_linear.backward"}),
        (tuning._cases_of("scatter_ffn", ffn)[0], {"scatter_ffn.strategy", "scatter_ffn.vector_up"}),
        (tuning._cases_of("layer_norm", {"M": 3, "N": 40})[0], {"layer_norm.backward"}),
    ):
        problem = case.build()
        assert isinstance(problem, timing.Problem)
        for _ in range(2):  # no cache but those of plans stands before the planners
            with plans.watched() as asked:
                problem.providers["kernelbook"]()
            assert expected <= {name for name, _ in asked}, (expected, asked)


@pytest.mark.gpu
def test_tuning_a_room_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    job = {"rooms": ["sparse_linear"], "shape": {"M": 256, "d_in": 512, "d_out": 1024, "active": 0.25}, "select": None}
    assert tuning.tune(job, 1.0, False) == 0
    entries = tuning.Journal(next(tmp_path.glob("tuned/*.journal"))).entries
    assert sum(e.get("outcome") == "ok" for e in entries) >= 5
    assert {e["outcome"] for e in entries if "outcome" in e} <= {"ok", "does not fit: OutOfResources"}
