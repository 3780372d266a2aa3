"""The command that measures the whole book: its plan, how jobs are run beside each other, and what is taken of their rows."""

import itertools
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import triton
from programs import TOOLS, program

from kernelbook import runtime
from kernelbook.lab import baselines, cli, record, timing
from kernelbook.lab.bench import CASE_BY_CASE, bench, whole_model

Run = Callable[..., dict[str, tuple[float, float, str]]]
# Notes when it began and ended and on which GPU; then "code" decides.
FAKE = """
import os, sys, time
folder, seconds, code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
note = open(os.path.join(folder, "times"), "a")
print(time.monotonic(), file=note, flush=True)
time.sleep(seconds)
print(time.monotonic(), os.environ["CUDA_VISIBLE_DEVICES"], file=note, flush=True)
sys.exit(code)
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return program("measure")


def _job(tool: Any, name: str, phase: int, seconds: float = 0.1, code: int = 0, **more: Any) -> Any:
    command = (sys.executable, "-S", "-c", FAKE, "{out}", str(seconds), str(code))
    return tool.Job(name, command, "1", phase, more.pop("expected", 60.0), more.pop("least", 0.0), **more)


@pytest.fixture
def run(tool: Any, tmp_path: Path) -> Run:
    """Runs jobs -> when each that ended began and ended, and its GPU; of several times the last."""

    def scheduled(*jobs: Any, gpus: str = "01", seconds: float = 60.0) -> dict[str, tuple[float, float, str]]:
        tool.Scheduler(tmp_path, gpus, seconds, slots=4).run(jobs)
        found = {}
        for path in tmp_path.rglob("times"):
            lines = [line.split() for line in path.read_text().splitlines()]
            if len(lines) > 1:
                found[path.parent.name] = (float(lines[-2][0]), float(lines[-1][0]), lines[-1][1])
        return found

    return scheduled


def _beside(a: tuple[float, float, str], b: tuple[float, float, str]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def test_what_measures_has_a_gpu_for_itself_and_nothing_loud_beside_it(tool: Any, run: Run) -> None:
    quiet = [_job(tool, f"quiet-{i}", tool.QUIET, 0.15) for i in range(4)]
    loud = [_job(tool, f"{name}-{i}", phase) for name, phase in (("warm", 0), ("loud", 2)) for i in range(5)]
    found = run(*loud, *quiet, _job(tool, "all", tool.LAST, cores=4, every_gpu=True))
    assert len(found) == 15
    for a, b in itertools.combinations(found, 2):
        if _beside(found[a], found[b]):
            assert a.split("-")[0] == b.split("-")[0]
            assert not a.startswith("quiet") or found[a][2] != found[b][2]
    assert {found[job.name][2] for job in quiet} == {"0", "1"}
    assert found["all"][2] == "0,1"


def test_the_longest_begins_first(tool: Any, run: Run) -> None:
    found = run(*(_job(tool, str(s), tool.QUIET, 0.0, expected=s) for s in (10, 30, 20)), gpus="0")
    assert found["30"] < found["20"] < found["10"]


def test_no_more_loud_jobs_than_cores(tool: Any, run: Run) -> None:
    found = run(*(_job(tool, f"loud-{i}", tool.LOUD, 0.2, cores=2) for i in range(4)))
    for a in found.values():
        assert sum(_beside(a, b) for b in found.values()) <= 3  # itself, the one beside it, and one that took its place


def test_the_end_stops_what_runs_and_keeps_what_it_wrote(
    tool: Any, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    found = run(_job(tool, "slow", tool.QUIET, 60.0), _job(tool, "late", tool.LOUD, least=9.0), seconds=0.7)
    assert time.monotonic() - began < 4 and not found
    assert (tmp_path / "slow" / "times").read_text() and not (tmp_path / "slow" / "done").exists()
    assert "stopped slow" in capsys.readouterr().out
    assert not (tmp_path / "late").exists()


def test_a_job_that_takes_far_too_long_is_stopped(tool: Any, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(_job(tool, "hangs", tool.QUIET, 60.0, expected=0.05), _job(tool, "good", tool.QUIET), gpus="0")
    assert set(found) == {"good"} and "stopped hangs" in capsys.readouterr().out


def test_it_goes_on_with_what_is_not_done(tool: Any, run: Run, tmp_path: Path) -> None:
    jobs = [_job(tool, "good", tool.QUIET), _job(tool, "bad", tool.QUIET, code=1), _job(tool, "warm", tool.WARM)]
    jobs += [_job(tool, "after", tool.LOUD, needs="good"), _job(tool, "never", tool.LOUD, needs="bad")]
    first = run(*jobs)
    assert set(first) == {"good", "bad", "warm", "after"} and first["after"][0] > first["good"][1]
    second = run(*jobs)
    assert {name for name in second if second[name] != first[name]} == {"bad"}
    for job in jobs:
        job.version = "2"  # the sources are others now
    third = run(*jobs)
    assert all(third[name] != second[name] for name in second)
    assert (tmp_path / "cache" / "warm" / "done").read_text() == "2"  # left behind with the caches


def test_a_job_without_the_time_is_not_begun(tool: Any, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(_job(tool, "short", tool.QUIET, 0.0), _job(tool, "long", tool.QUIET, least=50.0), seconds=20.0)
    assert set(found) == {"short"} and "no time for long" in capsys.readouterr().out


def test_a_slow_gpu_is_left_out(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    figures = {"0": 700.0, "1": 500.0, "2": 650.0}
    program_ = (
        "import json, os; print(json.dumps({'copy_gbs': 4000, 'bf16_tflops': %s[os.environ['CUDA_VISIBLE_DEVICES']]}))"
    )
    monkeypatch.setattr(tool, "words", lambda *_: (sys.executable, "-S", "-c", program_ % figures))
    assert tool.healthy("0123", tmp_path) == ["0", "2"]
    out = capsys.readouterr().out
    assert (
        "GPU 1: copy_gbs 4000, bf16_tflops 500  LEFT OUT" in out and "GPU 3: copy_gbs 0, bf16_tflops 0  LEFT OUT" in out
    )


def test_the_command_runs_what_was_asked_for_and_needs_a_gpu(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [_job(tool, name, tool.QUIET, 0.0) for name in ("one", "two")]
    monkeypatch.setattr(tool, "plan", lambda out, also: jobs)
    monkeypatch.setattr(tool, "healthy", lambda gpus, out: [gpu for gpu in gpus if gpu != "1"])
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    how = ["--seconds", "30", "--out", str(tmp_path), "--only", "two"]
    assert tool.main([*how, "--gpus", "0,1"]) == 0
    assert "1 of 1 jobs are done" in capsys.readouterr().out
    assert (tmp_path / "two" / "done").exists() and not (tmp_path / "one").exists()
    assert tool.main([*how, "--gpus", "1"]) == 2
    assert "no GPU runs kernels here" in capsys.readouterr().err


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_list_has_every_room_every_list_and_every_chapter(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[-1]: line.split()[0] for line in lines}
    assert len(names) == len(lines)
    for room in CASE_BY_CASE:
        assert names[f"{room}-0"] == "quiet" and names[f"warm-{room}-0-0"] == "warm"
        assert (f"{room}-models-0" in names) == bool(tool.measure_job.listed(room, "models"))
        assert (f"extras-{room}" in names) == (bench(room).extras is not None)
    assert {name.removeprefix("ladder-") for name in names if name.startswith("ladder-")} >= {"nf4", "together"}
    assert {f"notebook-{path.stem}" for path in tool.chapters.NOTEBOOKS.glob("*.ipynb")} < set(names)
    assert names["loss-eager-2"] == "loud" and names["evidence"] == "last"
    assert tool.main(["--list", "--only", "^loss-eager-0"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["loss-base", "loss-eager-0"]


@pytest.mark.parametrize("axolotl", (False, True))
def test_every_case_is_in_one_job(tool: Any, axolotl: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has = baselines.has
    monkeypatch.setattr(baselines, "has", lambda name: axolotl if name == "axolotl" else has(name))
    jobs = tool.plan(tmp_path)
    for room in CASE_BY_CASE:
        for which in ("room", "models"):
            parts = [job.command[5:] for job in jobs if job.command[3:5] == ("cases", room) and job.command[5] == which]
            found = [str(case) for part in parts for case in tool.measure_job.chosen(room, *part)]
            assert sorted(found) == sorted(map(str, tool.measure_job.listed(room, which)))
    searched = [job for job in jobs if "TRITON_CACHE_AUTOTUNING" in job.env]
    assert bool(searched) == axolotl
    groups = [job.command[4:] for job in jobs if job.command[3] == "whole"]
    assert len(set(groups)) == len(groups)
    for warm in (False, True):
        named = {name for name, *how in groups if bool(how) == warm}
        assert {tool.measure_job.group(plan, task=warm) for plan in whole_model.plans()} == named


def test_peers_of_one_room_make_jobs_of_that_room_alone(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a job finds on its path and what the plan knew of it must be the same: else cases are in no job."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "axolotl").exists()])
        (tmp_path / "axolotl").mkdir()
        (tmp_path / "axolotl" / "__init__.py").touch()
        assert not baselines.has("axolotl")
        jobs = tool.plan(tmp_path, [f"moe_lora={tmp_path}"])
        assert not baselines.has("axolotl")
    searched = [job.name for job in jobs if "TRITON_CACHE_AUTOTUNING" in job.env]
    assert searched and all(name.startswith("moe_lora-") for name in searched)
    given = {job.name for job in jobs if str(tmp_path) in job.env.get("PYTHONPATH", "").split(":")}
    of_room = {
        job.name for job in jobs if job.command[3] in ("cases", "warm", "extras") and job.command[4] == "moe_lora"
    }
    assert given == of_room > set(searched)
    with pytest.raises(SystemExit):
        tool.main(["--list", "--also", "moe=/there"])
    assert "--also must be ROOM=FOLDERS" in capsys.readouterr().err


def test_what_may_not_fit_is_measured_last(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(whole_model, "bench", lambda folder, **given: seen.update(given) or 0)
    assert tool.measure_job.whole(tmp_path, "Qwen3-30B-A3B-dense") == 0
    measured = [(plan.provider, plan.task == "step" and not plan.checkpoints) for plan in seen["wanted"]]
    assert len(measured) == 22 and measured[-3:] == [("kernelbook:dense", True)] * 2 + [("grouped_mm", True)]
    assert tool.measure_job.whole(tmp_path, "Qwen3-30B-A3B-nf4_double-step", "warm") == 0
    assert {plan.task for plan in seen["wanted"]} == {"step"} and seen["layers"] == 1


def test_tiles_that_a_peer_would_time_are_compiled_by_several_processes(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuner, compiled = triton.runtime.autotuner.Autotuner, []
    configs = [triton.Config({"BLOCK_K": 64}, num_stages=stages) for stages in (4, 2, 3, 9)]

    def compile_(*_: Any, num_stages: int, warmup: bool, **more: Any) -> None:
        compiled.append(num_stages)
        if num_stages == 9:
            raise RuntimeError("does not fit")

    def search(case: timing.Case) -> None:
        of = types.SimpleNamespace(fn=types.SimpleNamespace(run=compile_))
        times.append([tuner._bench(of, config=config)[0] for config in configs])

    monkeypatch.setattr(tuner, "_bench", tuner._bench)
    monkeypatch.setattr(tool.measure_job, "chosen", lambda *_: ["a case"])
    monkeypatch.setattr(cli, "_warm", search)
    times: list[list[float]] = []
    for share in ("0/2", "1/2"):
        tool.measure_job.warm(tmp_path, "moe_lora", "room", "0/1", "r16", share)
    inf = float("inf")
    assert compiled == [4, 3, 2, 9] and times == [[256, inf, 192, inf], [inf, 128, inf, inf]]


# --- rows -----------------------------------------------------------------------------------------------------------


def _row(package: str, x: int = 1, run: str = "a") -> dict[str, str]:
    row = {**dict.fromkeys(record.COLUMNS, "1"), "op": "layer_norm", "mode": "forward", "dtype": "float32"}
    return row | {"shape": "N=8", "x_name": "N", "x": str(x), "package": package, "run": run, "gpu": "Fake GPU"}


def test_cases_that_any_job_has_rows_of_are_not_measured_again(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker, asked = tool.measure_job, []
    package = bench("layer_norm").package()
    cases = [
        timing.Case("layer_norm", "forward", runtime.torch.float32, {"N": 8}, "N", x, 1.0, 1.0, dict) for x in range(4)
    ]
    monkeypatch.setattr(worker, "listed", lambda room, which: cases)
    monkeypatch.setattr(runtime, "device_slug", lambda: "fake-gpu")
    monkeypatch.setattr(record, "write_results", record.write_results)
    monkeypatch.setattr(
        cli, "_bench_cases", lambda one, stem, found, *_: asked.extend(case.x for case in found) or ["one"]
    )
    monkeypatch.chdir(tmp_path)
    for job, own, x in (("other", package, 2), ("older", "0.1.0+00000000", 0)):
        path = tmp_path / job / "fake-gpu" / "layer_norm.csv"
        path.parent.mkdir(parents=True)
        pd.DataFrame([_row(own, x)]).to_csv(path, index=False)
    assert worker.main([str(tmp_path / "job"), "cases", "layer_norm", "room", "0/2", ""]) == 1
    assert asked == [0]
    record.write_results(Path("anywhere") / "layer_norm.csv", pd.DataFrame([_row(package)]), key=("op", "x"))
    assert json.loads((tmp_path / "job" / "fake-gpu" / "layer_norm.key").read_text()) == ["op", "x"]


def _brought(
    tool: Any, top: Path, name: str, rows: dict[str, list[dict[str, str]]], version: str, tflops: float
) -> None:
    folder = top / name / "fake-gpu"
    folder.mkdir(parents=True)
    (folder.parent / "version").write_text(version)
    (folder.parent / "done").write_text(version)
    run = next(iter(rows.values()))[0]["run"]
    ceilings = dict.fromkeys(record.CEILING_COLUMNS, "1") | {"run": run, "package": version, "copy_gbs": "4000"}
    for stem, table in (rows | {"ceilings": [ceilings | {"bf16_tflops": str(tflops)}]}).items():
        pd.DataFrame(table).to_csv(folder / f"{stem}.csv", index=False)
        key = {"ceilings": ("run",), "layer_norm_barrier": ("x",)}.get(stem, record.KEY)
        (folder / f"{stem}.key").write_text(json.dumps(key))


def test_merging_takes_rows_of_the_present_sources_from_gpus_that_were_not_slow(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, old = "0.1.0+11111111", "0.1.0+22222222"
    names = ("good", "extras", "slow", "older", "mixed", "loss")
    jobs = [tool.Job(name, (), now, replaces=name == "extras") for name in names]
    top, results = tmp_path / "brought", tmp_path / "results"
    record.write_results(results / "fake-gpu" / "layer_norm.csv", pd.DataFrame([_row(old, 1), _row(old, 9, "z")]))
    record.write_results(results / "fake-gpu" / "layer_norm_barrier.csv", pd.DataFrame([_row(old, 7)]), key=("x",))
    _brought(tool, top, "good", {"layer_norm": [_row(now, 1, "run-g"), _row(now, 2, "run-g")]}, now, 700)
    _brought(tool, top, "extras", {"layer_norm_barrier": [_row(now, 1, "run-e")]}, now, 690)
    _brought(tool, top, "slow", {"layer_norm": [_row(now, 3, "run-s")]}, now, 500)
    _brought(tool, top, "older", {"layer_norm": [_row(old, 4, "run-o")]}, old, 700)
    _brought(tool, top, "mixed", {"layer_norm": [_row(old, 5, "run-m")]}, now, 700)
    _brought(tool, top, "unknown", {"layer_norm": [_row(now, 6, "run-u")]}, now, 700)
    line = {"way": "eager", "seed": 0, "steps": 5, "shape": "N=8", "package": now, "run": "l", "gpu": "Fake GPU"}
    curves = top / "loss" / "fake-gpu" / "same_loss_curves.jsonl"
    curves.parent.mkdir(parents=True)
    curves.write_text(json.dumps(line) + "\n")
    (top / "loss" / "version").write_text(now)

    tool.merge(top, results, jobs, dry=True)
    assert len(pd.read_csv(results / "fake-gpu" / "layer_norm.csv")) == 2
    capsys.readouterr()
    tool.merge(top, results, jobs)
    told = capsys.readouterr().out
    rows = pd.read_csv(results / "fake-gpu" / "layer_norm.csv")
    assert sorted(zip(rows["x"], rows["run"], strict=True)) == [(1, "run-g"), (2, "run-g"), (9, "z")]
    assert list(pd.read_csv(results / "fake-gpu" / "layer_norm_barrier.csv")["run"]) == ["run-e"]
    assert set(pd.read_csv(results / "fake-gpu" / "ceilings.csv")["run"]) == {"run-g", "run-e"}
    assert json.loads((results / "fake-gpu" / "same_loss_curves.jsonl").read_text()) == line
    for words in ("slow: {'copy_gbs': 4000.0, 'bf16_tflops': 500.0}  SLOW", "older: REFUSED", "unknown: REFUSED"):
        assert words in told
    assert "mixed: layer_norm.csv REFUSED, it has rows of other sources" in told
