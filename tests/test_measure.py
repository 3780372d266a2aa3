"""The command that measures the whole book: its plan, how jobs are run beside each other, and what is taken of their rows."""

import asyncio
import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import threading
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
from kernelbook.lab import baselines, cli, older, record, timing
from kernelbook.lab.bench import CASE_BY_CASE, bench, benches

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
        asyncio.run(tool.Scheduler(tmp_path, gpus, seconds, cores=4).run(jobs))
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
    found = run(*loud, *quiet, _job(tool, "all", tool.LAST))
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
    found = run(*(_job(tool, f"loud-{i}", tool.LOUD, 0.2) for i in range(4)))
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


def test_who_ends_it_ends_the_jobs_too(tool: Any, run: Run, tmp_path: Path) -> None:
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(asyncio.CancelledError):
        run(_job(tool, "slow", tool.QUIET, 60.0))
    assert len((tmp_path / "slow" / "times").read_text().splitlines()) == 1


def test_the_command_runs_what_was_asked_for_and_needs_a_gpu(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [_job(tool, name, tool.QUIET, 0.0) for name in ("one", "two")]
    monkeypatch.setattr(tool, "plan", lambda *_: jobs)
    how = ["--seconds", "30", "--out", str(tmp_path), "--only", "two"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert tool.main(how) == 0
    assert "1 of 1 jobs are done" in capsys.readouterr().out
    assert (tmp_path / "two" / "done").exists() and not (tmp_path / "one").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 0)
    assert tool.main(how) == 2
    assert "no GPU runs kernels here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["--merge", str(tmp_path / "two")])
    assert "--merge must name a folder in which jobs have written rows" in capsys.readouterr().err


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_list_has_every_room_every_list_and_every_chapter(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[-1]: line.split()[0] for line in lines}
    assert len(names) == len(lines)
    for room in CASE_BY_CASE:
        assert names[f"{room}-0"] == "quiet" and names[f"warm-{room}-0-0"] == "warm"
        assert (f"{room}-models-0" in names) == bool(list(bench(room).models()))
        assert (f"extras-{room}" in names) == (bench(room).extras is not None)
    assert {name.removeprefix("ladder-") for name in names if name.startswith("ladder-")} >= {"nf4", "together"}
    assert {f"notebook-{path.stem}" for path in tool.chapters.NOTEBOOKS.glob("*.ipynb")} < set(names)
    for name in ("sparse_inference-1024", "whole_model-GPT-2-torch", "warm-whole_model-Qwen3-30B-A3B-kernelbook-dense"):
        assert names[name] == ("warm" if name.startswith("warm") else "quiet")
    assert names["loss-eager-2"] == "loud" and names["evidence"] == "last"
    assert tool.main(["--list", "--only", "^loss-eager-0"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["loss-base", "loss-eager-0"]


def test_only_what_is_older_on_this_gpu_is_planned(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "device_slug", lambda: "gpu-h2")
    case, *_ = bench("nf4").cases()
    lines = (
        f"gpu-h2/nf4.csv: {case}: host\ngpu-h1/layer_norm.csv: 3 rows: sources\ngpu-h2/profile.csv: 2 rows: not dated\n"
    )
    lines += "gpu-h2/attention_errors.csv: 52 rows: sources\ngpu-h2/nf4_steps.csv: 4 rows: sources\n"
    (printed := tmp_path / "older").write_text(lines)
    jobs = tool.plan(tmp_path, printed)
    names = ["warm-nf4-0-0", "nf4-0", "extras-attention", "warm-ladder-nf4", "ladder-nf4"]
    assert sorted(job.name for job in jobs) == sorted(names)
    assert all(job.command[-2:] == ("--older", str(printed)) for job in jobs if job.name in names[:2])


@pytest.mark.parametrize("axolotl", (False, True))
def test_every_case_is_in_one_job(tool: Any, axolotl: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has = baselines.has
    monkeypatch.setattr(baselines, "has", lambda name: axolotl if name == "axolotl" else has(name))
    jobs = tool.plan(tmp_path)
    for one in benches(CASE_BY_CASE):
        for which, cases in (("room", list(one.cases())), ("models", list(one.models()))):
            for what in ("cases", "warm"):
                ways = [job.command[4 + (what == "warm") :] for job in jobs if job.command[3] == what]
                parts = [part for way in set(ways) if way[:2] == (one.name, which) for part in [way[2:]]]
                found = []
                for select, part in parts:
                    own, of = map(int, part.split("/"))
                    found += [str(case) for case in cases if re.search(select, str(case))][own::of]
                assert sorted(found) == sorted(map(str, cases))
    searched = {job.name for job in jobs if "TRITON_CACHE_AUTOTUNING" in job.env}
    ranks = {"moe_block-moe_block-forward-br-0-0", "moe_lora-moe_lora-first_call-br-16-0"}
    assert ranks < searched if axolotl else not searched
    assert len({job.env["TRITON_CACHE_DIR"] for job in jobs if job.name in ranks}) == (2 if axolotl else 0)


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
    monkeypatch.setattr(cli, "_can_measure", lambda: True)
    monkeypatch.setattr(cli, "_warm", search)
    monkeypatch.setattr(older, "dates_of", lambda one: None)
    times: list[list[float]] = []
    for share in ("0/2", "1/2"):
        tool.measure_job.warm(tmp_path, share, "moe_lora", "room", "^moe_lora first_call ", "0/1")
    inf = float("inf")
    assert compiled == [4, 3, 2, 9] and times == [[256, inf, 192, inf], [inf, 128, inf, inf]]


# --- rows -----------------------------------------------------------------------------------------------------------


def _row(package: str, x: int = 1, run: str = "a") -> dict[str, str]:
    row = {**dict.fromkeys(record.COLUMNS, "1"), "op": "layer_norm", "mode": "forward", "dtype": "float32"}
    return row | {"shape": "N=8", "x_name": "N", "x": str(x), "package": package, "run": run, "gpu": "Fake GPU"}


def test_cases_that_a_job_has_rows_of_are_not_measured_again(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker, asked = tool.measure_job, []
    package = bench("layer_norm").package()
    cases = [
        timing.Case("layer_norm", "forward", runtime.torch.float32, {"N": 8}, "N", x, 1.0, 1.0, dict) for x in range(4)
    ]
    one = dataclasses.replace(bench("layer_norm"), cases=lambda: cases)
    monkeypatch.setattr(cli.registry, "bench", lambda _: one)
    monkeypatch.setattr(cli, "_can_measure", lambda: True)
    monkeypatch.setattr(record, "device_slug", lambda: "fake-gpu")
    for name in ("write_results", "drop_rows"):
        monkeypatch.setattr(record, name, getattr(record, name))
    monkeypatch.setattr(
        cli, "_bench_cases", lambda one, stem, found, *_: asked.extend(case.x for case in found) or ["one"]
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job" / "fake-gpu" / "layer_norm.csv"
    path.parent.mkdir(parents=True)
    pd.DataFrame([_row(package, 2), _row("0.1.0+00000000", 0)]).to_csv(path, index=False)
    assert worker.main([str(tmp_path / "job"), "cases", "layer_norm", "room", "", "0/2"]) == 1
    assert asked == [0]
    record.write_results(Path("anywhere") / "layer_norm.csv", pd.DataFrame([_row(package)]), key=("op", "x"))
    assert json.loads((tmp_path / "job" / "fake-gpu" / "layer_norm.key").read_text()) == ["op", "x"]
    recorded = tmp_path / "recorded" / "layer_norm.csv"
    recorded.parent.mkdir()
    recorded.write_text(path.read_text())
    record.drop_rows(recorded, lambda rows: [True] * len(rows))
    assert len(pd.read_csv(recorded)) and not len(pd.read_csv(path))


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
    names = ("good", "extras", "slow", "older", "loss")
    jobs = [tool.Job(name, (), now, replaces=name == "extras") for name in names]
    top, results = tmp_path / "brought", tmp_path / "results"
    record.write_results(results / "fake-gpu" / "layer_norm.csv", pd.DataFrame([_row(old, 1), _row(old, 9, "z")]))
    record.write_results(results / "fake-gpu" / "layer_norm_barrier.csv", pd.DataFrame([_row(old, 7)]), key=("x",))
    _brought(tool, top, "good", {"layer_norm": [_row(now, 1, "run-g"), _row(now, 2, "run-g")]}, now, 700)
    _brought(tool, top, "extras", {"layer_norm_barrier": [_row(now, 1, "run-e")]}, now, 690)
    _brought(tool, top, "slow", {"layer_norm": [_row(now, 3, "run-s")]}, now, 500)
    _brought(tool, top, "older", {"layer_norm": [_row(old, 4, "run-o")]}, old, 700)
    _brought(tool, top, "unknown", {"layer_norm": [_row(now, 6, "run-u")]}, now, 700)
    line = {"way": "eager", "seed": 0, "steps": 5, "shape": "N=8", "package": now, "run": "l", "gpu": "Fake GPU"}
    curves = top / "loss" / "fake-gpu" / "same_loss_curves.jsonl"
    curves.parent.mkdir(parents=True)
    curves.write_text(json.dumps(line) + "\n")
    (top / "loss" / "version").write_text(now)

    tool.merge(top, results, jobs)
    told = capsys.readouterr().out
    rows = pd.read_csv(results / "fake-gpu" / "layer_norm.csv")
    assert sorted(zip(rows["x"], rows["run"], strict=True)) == [(1, "run-g"), (2, "run-g"), (9, "z")]
    assert list(pd.read_csv(results / "fake-gpu" / "layer_norm_barrier.csv")["run"]) == ["run-e"]
    assert set(pd.read_csv(results / "fake-gpu" / "ceilings.csv")["run"]) == {"run-g", "run-e"}
    assert json.loads((results / "fake-gpu" / "same_loss_curves.jsonl").read_text()) == line
    for words in ("slow: REFUSED, its GPU was slow", "older: REFUSED", "unknown: REFUSED"):
        assert words in told
    assert (top / "good" / "done").exists() and not (top / "slow" / "done").exists()  # it is measured anew
