"""The command line: doctor and bench."""

import argparse
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import _part

import kernelbook
from kernelbook import runtime
from kernelbook.lab import bench as registry
from kernelbook.lab import cli, older, profiling, timing
from kernelbook.layer_norm import op
from kernelbook.train import command as training

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_doctor_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "triton" in out and "FAILED" not in out
    for name in registry.CASE_BY_CASE:
        assert name in out
    if runtime.INTERPRET:
        assert "interpreted on the CPU" in out and "none found" in out


def test_doctor_says_what_to_expect_of_a_gpu_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    said = {}
    for target in ("sm_75", "sm_80"):
        with runtime.compiling_for(target):
            said[target] = dict(cli._machine())
    assert said["sm_75"]["architecture"] == "sm_75" and "to expect" not in said["sm_80"]
    assert said["sm_75"]["to expect"].startswith("float16 and float32; bfloat16 is right, and several times slower")


def _slightly_wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _LAYER_NORM(*args, **kwargs) * 1.01


def _raises(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("no such kernel")


_LAYER_NORM = op.layer_norm


@pytest.mark.parametrize("broken", (_slightly_wrong, _raises))
def test_doctor_fails_when_a_kernel_is_broken(
    broken: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "CASE_BY_CASE", ("layer_norm",))
    monkeypatch.setattr(op, "layer_norm", broken)
    assert cli.main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="about machines without a GPU")
def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"kernelbook {kernelbook.__version__}\n"


def test_bench_refuses_to_measure_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "layer_norm", "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", (["bench"], ["bench", "layer_norm", "--all"], ["bench", "kitchen"], []))
def test_a_wrong_command_line_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    (
        "bench layer_norm --rep-ms x", "bench layer_norm --part 1", "doctor layer_norm",
        "profile --set hidden_size=-4 --out new", "profile --set slots={[]:1} --out new", "profile --out file/folder",
        "profile --config file", "train --out file", "train --out new --lr nan", "train --out new --beta1 3",
        "train --out new --seed 99999999999999999999", "train --out new --text nowhere", "train --out new --heads 0",
        "judge file", "judge nothere", "judge --task nothere", "judge nothere --task vector_add", "judge file --task nothere",
        "profile --out /proc/new", "check-model nothere", "check-model file", "check-model . --tokens 0",
    ),
)  # fmt: skip
def test_whatever_is_typed_is_answered_in_a_sentence(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        code: Any = cli.main(typed.split())
    except SystemExit as error:  # argparse's own way
        code = error.code
    said = capsys.readouterr()
    assert code == 2 and said.err.strip() and not said.out and not (tmp_path / "new").exists()


BAD = ("", "x", "-1", "0", "9" * 30, "nan", "1e999", "(", "a=b=c", "file", "file/x", "a" * 5000)


def _commands() -> dict[str, argparse.ArgumentParser]:
    return next(a.choices for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))


def _options(command: str) -> list[str]:
    """Of a command, all that is followed by a value, and the file that one takes."""
    actions = _commands()[command]._actions
    found = [action.option_strings[-1] for action in actions if action.nargs != 0 and action.option_strings]
    return found + [action.dest for action in actions if action.dest == "file"]


NEEDED = {
    "bench": ["layer_norm"],
    "train": ["--config", "tiny", "--quiet", "--task", "copy"],
    "profile": [],
    "judge": ["--task", "vector_add"],
    "check-model": ["nothere"],
}


@pytest.mark.parametrize("command", NEEDED)
def test_no_value_of_any_option_ends_in_a_traceback(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes after the arguments have been taken, and would take its time, is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"\xff{")
    for name, value in (
        ("_can_measure", True),
        ("_bench_cases", []),
        ("_bench_extras", []),
        ("_warm", None),
        ("_run", 0),
    ):
        monkeypatch.setattr(cli, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(training, "_run", lambda *_: 0)
    step_of = profiling._step_of
    monkeypatch.setattr(profiling, "_step_of", lambda given: step_of(given) and (lambda: torch.zeros(())))
    monkeypatch.setattr(
        profiling.StepProfiler, "close", lambda _: profiling.Report(Path(), None, Path(), 1, [], 0.0, None)
    )
    for name in ("begin", "end"):
        monkeypatch.setattr(profiling.StepProfiler, name, lambda *_: None)
    refused = 0
    assert set(NEEDED) | {"doctor"} == set(_commands())
    for number, (option, value) in enumerate(itertools.product(_options(command), BAD)):
        if option in ("-h", "--steps") and value == "9" * 30 and command == "profile":
            continue  # so many steps are run
        out = [f"--out=new{number}"] if "--out" in _options(command) and option != "--out" else []
        given = [value] if option == "file" else [option, value]
        if command == "judge" and option != "file":
            given.append("file")
        try:
            code: Any = cli.main([command, *NEEDED[command], *out, *given])
        except SystemExit as error:  # argparse's own way
            code = error.code
        said = capsys.readouterr().err
        assert code in (0, 2) and (code == 0 or said.strip()) and "Traceback" not in said, (option, value, code, said)
        refused += code == 2
    assert refused > len(_options(command)) * len(BAD) / 3


def test_a_run_whose_files_are_not_its_own_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["train", *NEEDED["train"], "--context", "5", "--steps", "1", "--out"]
    assert cli.main([*typed, str(tmp_path / "run")]) == 0
    names, contents = ("config.json", "checkpoint.pt", "log.jsonl"), (b"", b"[]", b"3", b'{"width": "x"}', b"\xff\x00")
    for number, (name, content) in enumerate(itertools.product(names, contents)):
        other = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", other)
        (other / name).write_bytes(content)
        capsys.readouterr()
        assert cli.main(["train", "--quiet", "--resume", "--out", str(other)]) == 2, (name, content)
        assert capsys.readouterr().err.startswith("train: ")


def test_rows_are_measured_with_what_the_rules_choose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "_can_measure", lambda: True)
    monkeypatch.setattr(runtime, "autotune_enabled", lambda: True)
    assert cli.main(["bench", "layer_norm", "--out", str(tmp_path)]) == 2
    assert "KERNELBOOK_AUTOTUNE must not be set" in capsys.readouterr().err


def test_ctrl_c_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "doctor", lambda: _stopped(torch.empty(0)))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "\ndoctor: interrupted\n"


def _case(ours: Any, x: float = 8) -> timing.Case:
    def build() -> timing.Problem:
        given = torch.randn(4, 8, device=runtime.DEVICE)
        doubled = [given + given]
        calls = {"torch": lambda: doubled, "kernelbook": lambda: [ours(given)]}
        return timing.Problem(calls, lambda: [given.double() * 2], lambda: doubled, 2.0)

    return timing.Case("double", "forward", torch.float32, {"N": 8}, "N", x, 1.0, 1.0, build)


def _stopped(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def _room(
    folder: Path, cases: Sequence[timing.Case], models: Sequence[timing.Case], extras_fail: bool
) -> registry.Bench:
    """A room with these cases, and a table of another kind after which an error may come."""

    def extras() -> Iterator[tuple[str, pd.DataFrame, tuple[str, ...]]]:
        yield "room_errors", pd.DataFrame([{"dtype": "float32", "error": 0.5}]), ("dtype",)
        if extras_fail:
            raise RuntimeError("no second table")

    return registry.Bench(
        name="room",
        sources=(folder / "room", folder / "lab" / "bench" / "room.py"),
        library=(),
        baselines={"torch": "torch", "peer": "no-such-package"},
        cases=lambda: cases,
        models=lambda: models,
        extras=extras,
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs ``bench`` with the given cases, as on a GPU named fake-gpu, into ``tmp_path``; returns its exit code."""
    monkeypatch.setattr(timing, "measure_ceilings", lambda: timing.Ceilings(4000.0, 700.0, 350.0, 4.0, 7.0))
    monkeypatch.setattr(runtime, "device_slug", lambda: "fake-gpu")
    monkeypatch.setattr(cli, "_can_measure", lambda: True)
    dates = {"launches": "l", "host": "h", "peer": ""}
    monkeypatch.setattr(older, "dates_of", lambda one: lambda case, provider: dates)

    def run(*cases: timing.Case, extras_fail: bool = False, models: Sequence[timing.Case] = (), more: str = "") -> int:
        room = _room(tmp_path, cases, models, extras_fail)
        monkeypatch.setattr(registry, "bench", lambda name: room)
        return cli.main(["bench", "layer_norm", "--out", str(tmp_path), "--rep-ms", "1", *more.split()])

    return run


def _recorded(folder: Path, name: str = "layer_norm") -> list[tuple[str, ...]]:
    """-> run and x of each row."""
    path = folder / "fake-gpu" / f"{name}.csv"
    if not path.exists():
        return []
    rows = pd.read_csv(path, dtype=str)
    return list(rows[["run", "x"] if "x" in rows else ["run"]].itertuples(index=False, name=None))


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_layers_are_for_whole_models(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(more="--layers 2") == 2
    assert "bench: layer_norm does not take --layers" in capsys.readouterr().err


@pytest.mark.parametrize(("ours", "code"), ((_double, 0), (lambda x: x * 2.1, 1)))
def test_bench_records_what_is_right_only(
    ours: Any, code: int, bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(_case(ours)) == code
    streams = capsys.readouterr()
    assert "left out: peer (package no-such-package is not installed)" in streams.out
    if code == 0:
        assert "kernelbook" in streams.out
        assert {run for run, _ in _recorded(tmp_path)} == {run for (run,) in _recorded(tmp_path, "ceilings")}
        assert len(_recorded(tmp_path)) == 2
    else:
        assert "NOT RECORDED: double forward" in streams.err
        assert not _recorded(tmp_path) and not _recorded(tmp_path, "ceilings")
    assert (tmp_path / "fake-gpu" / "room_errors.csv").exists()


def test_a_bench_that_is_stopped_keeps_what_it_measured(bench: Callable[..., int], tmp_path: Path) -> None:
    assert bench(_case(_double, 1), _case(_double, 2), _case(_stopped, 3), _case(_double, 4)) == 130
    rows = _recorded(tmp_path)
    assert [x for _, x in rows] == ["1", "1", "2", "2"]
    assert [(rows[0][0],)] == _recorded(tmp_path, "ceilings") and len({run for run, _ in rows}) == 1
    assert sorted(p.name for p in (tmp_path / "fake-gpu").iterdir()) == ["ceilings.csv", "layer_norm.csv"]

    # What it did not reach comes later, with the run's own id and ceilings; a row of the same key is replaced.
    assert bench(_case(_double, 2), _case(_double, 3)) == 0
    later = _recorded(tmp_path)
    assert later[:2] == rows[:2] and sorted(x for _, x in later) == ["1", "1", "2", "2", "3", "3"]
    assert [run == rows[0][0] for run, _ in later] == [True, True, False, False, False, False]
    assert {(run,) for run, _ in later} == set(_recorded(tmp_path, "ceilings"))


def test_one_list_a_part_of_it_and_those_that_an_expression_finds(bench: Callable[..., int], tmp_path: Path) -> None:
    given = {"models": [_case(_double, x) for x in (4, 5)]}
    assert bench(*(_case(_double, x) for x in (1, 2, 3)), **given, more="--only room --part 0/2") == 0
    assert [x for _, x in _recorded(tmp_path)] == ["1", "1", "3", "3"] and not _recorded(tmp_path, "models")
    assert (tmp_path / "fake-gpu" / "room_errors.csv").exists()
    assert bench(_case(_double, 2), **given, more="--only models --select N=[5-9]$") == 0
    assert [x for _, x in _recorded(tmp_path, "models")] == ["5", "5"] and len(_recorded(tmp_path)) == 4
    seen: list[torch.Size] = []
    assert bench(_case(lambda x: seen.append(x.shape) or x * 2, 3), _case(_double, 9), more="--missing") == 0
    assert not seen and [x for _, x in _recorded(tmp_path)][-2:] == ["9", "9"]
    with pytest.raises(SystemExit):
        bench(_case(_double), more="--part 2/2")


def test_of_all_cases_those_that_are_listed_as_older(bench: Callable[..., int], tmp_path: Path) -> None:
    cases = [_case(_double, x) for x in (1, 2, 3)]
    lines = [f"fake-gpu/layer_norm.csv: {cases[1]}: host", f"other/layer_norm.csv: {cases[2]}: launches"]
    (tmp_path / "older").write_text("\n".join([*lines, f"fake-gpu/models.csv: {cases[0]}: peer"]))
    assert bench(*cases, models=cases, more=f"--older {tmp_path / 'older'}") == 0
    assert [x for _, x in _recorded(tmp_path)] == ["2", "2"]
    assert [x for _, x in _recorded(tmp_path, "models")] == ["1", "1"]
    assert not (tmp_path / "fake-gpu" / "room_errors.csv").exists()


def test_warming_calls_all_and_records_nothing(bench: Callable[..., int], tmp_path: Path) -> None:
    seen: list[torch.Size] = []

    def ours(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return x

    assert bench(_case(_raises, 1), _case(ours, 2), models=[_case(ours, 3)], more="--warm") == 0
    assert len(seen) == 2 and not (tmp_path / "fake-gpu").exists()


def test_a_case_that_raises_does_not_lose_the_others(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(_case(_raises, 1), _case(_double, 2), extras_fail=True) == 1
    assert [x for _, x in _recorded(tmp_path)] == ["2", "2"]
    assert (tmp_path / "fake-gpu" / "room_errors.csv").exists()
    lost = [line for line in capsys.readouterr().err.splitlines() if line.startswith("NOT RECORDED")]
    assert lost == [
        "NOT RECORDED: double forward float32 N=8 N=1: RuntimeError: no such kernel",
        "NOT RECORDED: room, extras: RuntimeError: no second table",
    ]


@pytest.mark.parametrize(("name", "taken"), [("several_gpus", {"select": "train"}), ("study", {})])
def test_what_has_a_clock_of_its_own_gets_the_options_that_it_takes(
    name: str,
    taken: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[object] = []
    own = dataclasses.replace(registry.bench(name), run=lambda folder, **given: seen.append((folder, given)) or 0)
    monkeypatch.setattr(registry, "bench", lambda _: own)
    monkeypatch.setattr(runtime, "device_slug", lambda: "fake-gpu")
    monkeypatch.setattr(cli, "_can_measure", lambda: True)
    how = ["bench", name, "--out", str(tmp_path)]
    assert cli.main([*how, *(["--select", "train"] if taken else [])]) == 0
    assert seen == [(tmp_path / "fake-gpu", taken)]
    (tmp_path / "file").touch()
    assert cli.main(["bench", name, "--out", str(tmp_path / "file")]) == 2 and len(seen) == 1
    assert "bench: out must be a folder to write to" in capsys.readouterr().err
    assert cli.main([*how, "--layers", "2"]) == 2 and len(seen) == 1
    assert capsys.readouterr().err == f"bench: {name} does not take --layers\n"


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (("--select", "forward ("), "must be a regular expression"),
        (("--part", "2/2"), "I < N"),
        (("--rep-ms", "-1"), "above zero"),
    ],
)
def test_what_bench_cannot_take_is_named(
    given: tuple[str, str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "nf4", *given])
    said = capsys.readouterr().err
    assert given[0] in said and wrong in said and given[1] in said


# Not that of a make that runs these tests: it would have another one say where it is.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def _make(*arguments: str, folder: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=folder, env=_ENVIRONMENT | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="about machines without a GPU")
@pytest.mark.parametrize("target", ("test-gpu", "test-turing"))
def test_the_tests_of_a_gpu_say_at_once_that_there_is_none(target: str) -> None:
    done = _make(target, f"PY={sys.executable}")
    assert done.returncode != 0 and "no GPU runs kernels here" in done.stderr and not done.stdout


@pytest.mark.parametrize("part", ("3/2", "0/2", "x", "1"))
def test_a_part_of_the_tests_that_is_none(part: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be I/N with I from 1 to N, got {part}"):
        _part(part)


def test_pins_stay_where_they_cannot_be_made_anew(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name, text in (("requirements.txt", "pins"), ("uv", "#!/bin/sh\nexit 1")):
        (tmp_path / name).write_text(text)
    (tmp_path / "uv").chmod(0o755)
    done = _make("lock", folder=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0 and (tmp_path / "requirements.txt").read_text() == "pins"
    (tmp_path / "uv").write_text("#!/bin/sh\necho torch==1")
    assert _make("lock", folder=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}").returncode == 0
    assert (tmp_path / "requirements.txt").read_text().splitlines()[1:] == ["torch==1"]
