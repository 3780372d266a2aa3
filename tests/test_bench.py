"""What is measured, and the command that measures it case by case."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import bench as registry
from bench import __main__ as command
from bench import attention, chapters, layer_norm, moe_block, moe_lora, nf4, scatter_ffn, sparse_linear
from kernelbook import check, runtime
from kernelbook.lab import record, stale, timing

# --- the command ----------------------------------------------------------------------------------------------------

Run = Callable[..., int]


def _case(ours: Any, x: float = 8) -> timing.Case:
    def build() -> timing.Problem:
        given = torch.randn(4, 8, device=runtime.DEVICE)
        doubled = [given + given]
        calls = {"torch": lambda: doubled, "kernelbook": lambda: [ours(given)]}
        return timing.Problem(calls, lambda: [given.double() * 2], lambda: doubled, 2.0)

    return timing.Case("double", "forward", torch.float32, {"N": 8}, "N", x, 1.0, 1.0, build)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _stopped(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Measures the given cases, as on a GPU named fake-gpu, into ``tmp_path``; returns the exit code."""
    monkeypatch.setattr(timing, "measure_ceilings", lambda: timing.Ceilings(4000.0, 700.0, 350.0, 4.0, 7.0))
    monkeypatch.setattr(record, "device_slug", lambda: "fake-gpu")
    monkeypatch.setattr(command, "can_measure", lambda: True)
    monkeypatch.setattr(command, "REP_MS", 1.0)
    monkeypatch.setattr(stale, "commit", lambda: "one")
    monkeypatch.setattr(stale, "kernels_hash", lambda *_: "today")

    def call(*cases: timing.Case, models: Sequence[timing.Case] = (), more: str = "") -> int:
        def extras() -> Iterator[tuple[str, pd.DataFrame]]:
            yield "layer_norm_errors", pd.DataFrame([{"dtype": "float32", "error": 0.5}])

        one = registry.Bench(
            name="layer_norm",
            baselines={"torch": "torch", "peer": "no-such-package"},
            cases=lambda: cases,
            models=lambda: models,
            extras=extras,
            keys={"layer_norm_errors": ("dtype",)},
        )
        monkeypatch.setattr(registry, "bench", lambda name: one)
        return command.main(["layer_norm", "--out", str(tmp_path), *more.split()])

    return call


def _recorded(folder: Path, name: str = "layer_norm") -> list[tuple[str, ...]]:
    """-> run and x of each row."""
    path = folder / "fake-gpu" / f"{name}.csv"
    if not path.exists():
        return []
    rows = pd.read_csv(path, dtype=str)
    return list(rows[["run", "x"] if "x" in rows else ["run"]].itertuples(index=False, name=None))


@pytest.mark.skipif(runtime.DEVICE.type == "cuda", reason="about machines without a GPU")
def test_the_interpreter_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["layer_norm", "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        ("", "must say what to measure"),
        ("kitchen", "'kitchen'"),
        ("nf4 --part 2/2", "I < N, got 2/2"),
        ("nf4 --out /proc/new", "a folder to write to, got /proc/new"),
    ],
)
def test_what_it_cannot_take_is_named(typed: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(typed.split())
    assert stopped.value.code == 2 and wrong in capsys.readouterr().err


def test_rows_are_measured_with_what_the_rules_choose(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "autotune_enabled", lambda: True)
    assert run(_case(_double)) == 2
    assert "KERNELBOOK_AUTOTUNE must not be set" in capsys.readouterr().err


@pytest.mark.parametrize(("ours", "code"), ((_double, 0), (lambda x: x * 2.1, 1)))
def test_what_is_right_only_is_recorded(
    ours: Any, code: int, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_case(ours)) == code
    streams = capsys.readouterr()
    assert "left out: peer (package no-such-package is not installed)" in streams.out
    if code == 0:
        assert {run for run, _ in _recorded(tmp_path)} == {run for (run,) in _recorded(tmp_path, "ceilings")}
        rows = pd.read_csv(tmp_path / "fake-gpu" / "layer_norm.csv", dtype=str, keep_default_na=False)
        assert [*rows["commit"], *rows["kernels"]] == ["one", "one", "today", "today"]
        assert [peer.split()[0] if peer else "" for peer in rows["peer"]] == ["torch", ""]
    else:
        assert "NOT RECORDED: double forward" in streams.err
        assert not _recorded(tmp_path) and not _recorded(tmp_path, "ceilings")
    assert (tmp_path / "fake-gpu" / "layer_norm_errors.csv").exists()


def test_it_goes_on_where_it_was_stopped(run: Run, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(_case(_double, 1), _case(_double, 2), _case(_stopped, 3), _case(_double, 4))
    rows = _recorded(tmp_path)
    assert [x for _, x in rows] == ["1", "1", "2", "2"]
    assert [(rows[0][0],)] == _recorded(tmp_path, "ceilings") and len({run for run, _ in rows}) == 1
    assert run(_case(_raises, 1), _case(_raises, 2), _case(_double, 3)) == 0
    later = _recorded(tmp_path)
    assert later[:4] == rows and [x for _, x in later[4:]] == ["3", "3"]
    assert {(run,) for run, _ in later} == set(_recorded(tmp_path, "ceilings"))


def test_rows_of_another_commit_are_replaced_and_with_stale_only_those_of_other_kernels(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [_case(_double, 1), _case(_double, 2)]
    assert run(*cases) == 0
    first = _recorded(tmp_path)
    monkeypatch.setattr(stale, "commit", lambda: "two")
    assert run(*cases, more="--stale") == 0 and _recorded(tmp_path) == first
    assert run(*cases) == 0 and not set(_recorded(tmp_path)) & set(first)
    second = _recorded(tmp_path)
    monkeypatch.setattr(stale, "kernels_hash", lambda *_: "tomorrow")
    assert run(*cases, more="--stale") == 0 and not set(_recorded(tmp_path)) & set(second)


def test_a_part_of_the_cases_and_those_that_an_expression_finds(run: Run, tmp_path: Path) -> None:
    models = [_case(_double, x) for x in (4, 5)]
    assert run(*(_case(_double, x) for x in (1, 2, 3)), models=models, more="--part 1/2") == 0
    assert [x for _, x in _recorded(tmp_path)] == ["2", "2"] and [x for _, x in _recorded(tmp_path, "models")] == [
        "5"
    ] * 2
    assert not (tmp_path / "fake-gpu" / "layer_norm_errors.csv").exists()  # which the first part measures
    assert run(_case(_double, 7), models=models, more="--select N=[4-6]$") == 0
    assert sorted(x for _, x in _recorded(tmp_path, "models")) == ["4", "4", "5", "5"] and len(_recorded(tmp_path)) == 2


def test_warming_calls_all_and_records_nothing(run: Run, tmp_path: Path) -> None:
    seen: list[torch.Size] = []

    def ours(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return x

    assert run(_case(_raises, 1), _case(ours, 2), models=[_case(ours, 3)], more="--warm") == 0
    assert len(seen) == 2 and not (tmp_path / "fake-gpu").exists()


def test_rows_of_several_folders_are_put_together(tmp_path: Path) -> None:
    row = dict.fromkeys(record.COLUMNS, "1")
    for part, x, value in (("a", "1", "0.10"), ("b", "1", "0.20"), ("b", "2", "0.300")):
        record.write_results(tmp_path / part / "gpu" / "nf4.csv", pd.DataFrame([row | {"x": x, "ms": value}]))
    for part, wrong in (("a", 1), ("b", 2)):
        table = pd.DataFrame([{"op": "f", "variant": "v", "dtype": "d", "shape": "s", "wrong": wrong}])
        record.write_results(
            tmp_path / part / "gpu" / "layer_norm_barrier.csv",
            table,
            registry.bench("layer_norm").keys["layer_norm_barrier"],
        )
        line = {"shape": "s", "way": "w", "seed": 1, "steps": 2, "validation_loss": [wrong]}
        record.write_lines(tmp_path / part / "gpu" / "same_loss_curves.jsonl", [line], ("way",))
    assert command.main(["--merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "all")]) == 0
    folder = tmp_path / "all" / "gpu"
    rows = pd.read_csv(folder / "nf4.csv", dtype=str)
    assert rows[["x", "ms"]].to_numpy().tolist() == [["1", "0.20"], ["2", "0.300"]]  # to the last character
    assert pd.read_csv(folder / "layer_norm_barrier.csv")["wrong"].tolist() == [2]
    assert pd.read_json(folder / "same_loss_curves.jsonl", lines=True)["validation_loss"].tolist() == [[2]]
    with pytest.raises(SystemExit):
        command.main(["--merge", str(tmp_path / "nothing"), "--out", str(tmp_path / "all")])


# --- chapters -------------------------------------------------------------------------------------------------------

WITH_STEPS = [path for path in sorted(chapters.NOTEBOOKS.glob("*.ipynb")) if "record=RECORD_STEPS" in path.read_text()]


@pytest.mark.parametrize("path", WITH_STEPS, ids=lambda path: path.stem)
def test_a_chapter_records_its_steps_and_ends_there(path: Path) -> None:
    sources = [cell.source for cell in chapters.recording(path).cells]
    assert sum("RECORD_STEPS = True" in source for source in sources) == 1
    assert "record=RECORD_STEPS" in sources[-1]


# --- what is measured is right ----------------------------------------------------------------------------------------


def _tiny_cases() -> Iterator[tuple[str, Callable[[], timing.Problem]]]:
    """Each kind of case at sizes for the interpreter: a case that is wrong would cost a run on a GPU."""
    half, mixed = torch.bfloat16, moe_lora.Shape(4, 32, 64, 2, tokens=6, rank=8)
    norms = (("layer_norm", "forward_backward"), ("layer_norm", "backward"), ("rms_norm", "backward"))
    for name, mode in norms:
        residual = name == "rms_norm"
        yield f"{name} {mode}", partial(layer_norm._problem, name, mode, 5, 48, half, False, residual)
    for case in (sparse_linear.backward_case, sparse_linear._forward_case, sparse_linear._step_case):
        yield f"sparse_linear {case.__name__}", case((17, 32, 192), 0.4).build
    for wanted in ("dw", "dx"):
        yield f"sparse_{wanted}", sparse_linear.backward_case((17, 32, 192), 0.4, wanted=wanted).build
    for build in (scatter_ffn._forward, scatter_ffn._gather, scatter_ffn._read):
        yield f"scatter_ffn {build.__name__}", partial(build, scatter_ffn.Shape(32, 64, False, "relu"), 3, 0.25)
        yield f"scatter_ffn {build.__name__}, gated", partial(build, scatter_ffn.Shape(32, 64, True, "silu"), 3, 0.25)
    yield "flash_attention", partial(attention._problem, "backward", 1, 2, 1, 17, 17, 16, True, half, False)
    yield "packed", partial(attention._packed_problem, "backward", 2, 16, (5, 1, 11), half)
    yield "paged_attention", partial(attention._paged_problem, 1, 2, 1, 1, 32, 16, 16, half)
    yield "flash_attention, few queries", partial(attention._problem, "forward", 1, 4, 2, 2, 33, 16, False, half, False)
    for (name, mode), build in moe_lora.FAMILIES.items():
        yield f"{name} {mode}", partial(build, mixed, half)
    for name, mode in (("scatter2scatter", "forward"), ("moe_lora", "forward_backward"), ("moe_lora_dx", "backward")):
        grouped = dataclasses.replace(mixed, grouped=True)
        yield f"{name} {mode}, grouped", partial(moe_lora.FAMILIES[name, mode], grouped, half)
    yield "nf4", partial(nf4._problem, (4, 64, 256), 2, True)
    yield "read_rows", partial(nf4._read_problem, 8192)
    yield "nf4_matmul", partial(nf4._matmul_problem, (2, 16, 256), 3)
    for format in nf4.BITS:
        yield f"nf4_matmul {format}", partial(nf4._matmul_problem, (1, 16, 256), 3, format=format)
    for mode in ("forward", "forward_backward"):
        yield f"moe_block {mode}", moe_block._case(mode, 3, (12, 64, 64, 2)).build


@pytest.mark.parametrize("build", [pytest.param(build, id=name) for name, build in _tiny_cases()])
def test_what_is_measured_is_right(build: Callable[[], timing.Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is correct, and PyTorch's gives its results in the same form; other peers' kernels are for a GPU."""
    pytest.importorskip("peft")
    monkeypatch.setattr(registry.baselines, "has", lambda name: False)
    ratios = timing.error_ratios(build())  # which raises where ours is wrong
    assert "kernelbook" in ratios and ratios.get("grouped_mm:apart", 0) <= check.GRADIENT_FACTOR
