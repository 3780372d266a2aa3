"""Profiling: chosen steps, the command, and the callback in transformers' Trainer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kernelbook import runtime
from kernelbook.lab import cli, profiling

GPU = runtime.DEVICE.type == "cuda"


def _matmuls(profiler: profiling.StepProfiler, steps: int, size: int = 64) -> None:
    a = torch.randn(size, size, device=runtime.DEVICE)
    for step in range(1, steps + 1):
        profiler.begin(step)
        for _ in range(step):
            a = torch.tanh(a)
        profiler.end(step)


def _calls(report: profiling.Report, name: str) -> float:
    return sum(calls for kernel, calls, *_ in report.rows if name in kernel)


@pytest.mark.parametrize(("first", "last", "expected"), ((1, 1, 1), (2, 3, 2.5), (1, 4, 2.5), (4, 4, 4)))
def test_only_the_chosen_steps_are_recorded(first: int, last: int, expected: float, tmp_path: Path) -> None:
    """Step i calls tanh i times."""
    profiler = profiling.StepProfiler(tmp_path / "made", first=first, last=last)
    _matmuls(profiler, 5)
    report = profiler.report
    assert report is not None and report.steps == last - first + 1
    assert _calls(report, "tanh") == expected
    assert sum(row[3] for row in report.rows) == pytest.approx(1)
    assert sum(row[2] for row in report.rows) == pytest.approx(report.total_ms)
    assert [row[2] for row in report.rows] == sorted((row[2] for row in report.rows), reverse=True)


def test_the_files(tmp_path: Path) -> None:
    profiler = profiling.StepProfiler(tmp_path, first=2, last=2, top=3)
    _matmuls(profiler, 3)
    report = profiler.report
    assert report is not None
    events = json.loads(report.trace.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::tanh" for event in events) == 2
    text = report.table_file.read_text()
    assert "tanh" in text and "1 steps recorded" in text
    if GPU:
        assert report.snapshot is not None and report.snapshot.stat().st_size > 0 and report.peak_mib
    else:
        assert report.snapshot is None and report.peak_mib is None and not (tmp_path / "memory.pickle").exists()


def test_a_run_that_ends_early_is_recorded_as_far_as_it_went(tmp_path: Path) -> None:
    profiler = profiling.StepProfiler(tmp_path, first=2, last=9)
    _matmuls(profiler, 4)
    assert profiler.report is None
    report = profiler.close()
    assert report is not None and report.steps == 3 and _calls(report, "tanh") == 3
    assert profiler.close() is report


def test_a_run_that_never_gets_there_records_nothing(tmp_path: Path) -> None:
    for first, said in ((5, "steps 5 to 6 were asked for, and steps 1 to 4 were run"), (6, "steps 6 to 6 were asked")):
        profiler = profiling.StepProfiler(tmp_path, first=first, last=6)
        _matmuls(profiler, 4)
        with pytest.warns(UserWarning, match=f"StepProfiler: nothing was recorded in .*: {said}"):
            assert profiler.close() is None
        assert profiler.close() is None and not list(tmp_path.iterdir())


def test_what_was_recorded_of_a_program_that_fails_is_written_at_its_end(tmp_path: Path) -> None:
    """A profiler that nobody stops used to crash Python on the way out."""
    code = (
        "import kernelbook, torch\nfrom kernelbook.lab import profiling\n"
        f"profiler = profiling.StepProfiler({str(tmp_path / 'out')!r}, first=1, last=9)\n"
        "for step in (1, 2):\n    profiler.begin(step); torch.ones(3).tanh(); profiler.end(step)\n"
        "raise RuntimeError('out of memory')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RuntimeError: out of memory" in done.stderr
    assert "2 steps recorded" in (tmp_path / "out" / "kernels.txt").read_text()


def test_several_processes_write_folders_of_their_own(tmp_path: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            profiler = profiling.StepProfiler(tmp_path, first=1, last=1)
            _matmuls(profiler, 1)
        finally:
            dist.destroy_process_group()
        assert profiler.report is not None and profiler.report.trace == tmp_path / f"rank{rank}" / "trace.json"
    assert [path.name for path in tmp_path.rglob("*.json")] == ["trace.json"] * 2


# --- the command ----------------------------------------------------------------------------------------------------


def _command(tmp_path: Path, *arguments: str) -> int:
    return cli.main(["profile", "--out", str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize("more", ((), ("--lora", "2", "--nf4")), ids=("all parameters", "lora"))
def test_command_with_our_own_layer(more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("num_experts=3", "hidden_size=32", "intermediate_size=32", "slots=1")
    assert _command(tmp_path, "--length", "4", "--first", "2", "--last", "2", "--set", *sizes, *more) == 0
    out = capsys.readouterr().out
    assert "moe_lora" in out and str(tmp_path / "out" / "trace.json") in out
    assert "nf4" not in out  # 4-bit experts are decoded within moe_lora, and nowhere else


@pytest.mark.parametrize("experts", ("kernelbook", "eager"))
def test_command_with_a_config_of_transformers(experts: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tiny_models import tiny_model

    tiny_model("olmoe").config.save_pretrained(tmp_path / "config")
    arguments = ("--config", str(tmp_path / "config"), "--set", "num_hidden_layers=1", "num_experts=3")
    more = ("--lora", "2", "--length", "4", "--experts", experts, "--first", "2", "--last", "2")
    assert _command(tmp_path, *arguments, *more) == 0
    assert ("moe_lora" in (tmp_path / "out" / "trace.json").read_text()) == (experts == "kernelbook")


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--nf4",), "there must be --lora"),
        (("--set", "slots"), "--set must have the form NAME=VALUE, got 'slots'"),
        (("--set", "colour=3"), "--set must name sizes of MoELayer"),
        (("--set", "num_experts=4", "slots=9"), "MoELayer: slots must be in [1, 4], got 9"),
        (("--first", "9", "--last", "3"), "1 <= first <= last"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--length", "-3"), "--length must be at least 1, got -3"),
        (("--lora", "-1"), "--lora must be at least 0, got -1"),
        (("--experts", "bogus"), "--experts must come with --config, got --experts bogus without it"),
        (("--config", "/there/is/nothing"), "--config must be a file or a folder, but there is no /there/is/nothing"),
    ),
)
def test_command_that_cannot_be_run(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(tmp_path, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("profile: ") and message in said and not (tmp_path / "out").exists()


def test_command_with_a_config_refuses_unknown_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from tiny_models import tiny_model

    tiny_model("olmoe", num_hidden_layers=1).config.save_pretrained(tmp_path / "config")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}  # and no experts
    transformers.LlamaConfig(**sizes, intermediate_size=32, num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    (tmp_path / "broken").write_text("{")
    for more, message in (
        (("--set", "num_expertz=3"), "--set must name values of OlmoeConfig, got num_expertz"),
        (("--set", "num_hidden_layers=x"), "profile: the model must run, and it raised Strict"),
        (("--set", "num_attention_heads=7"), "profile: the model must run, and it raised RuntimeError: The size of"),
        (("--set", "vocab_size=0"), "profile: the model must run, and it raised"),
        (("--experts", "bogus"), "bogus"),
        (
            ("--config", str(tmp_path / "llama"), "--lora", "2"),
            "--lora must come with a model that has experts, got Llama",
        ),
        (("--config", str(tmp_path / "broken")), "is not a valid JSON file"),
    ):
        assert _command(tmp_path, "--config", str(tmp_path / "config"), "--length", "4", *more) == 2
        [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("profile: ")]
        assert message in said


# --- the Trainer ----------------------------------------------------------------------------------------------------


def test_callback_in_the_real_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    import transformers
    from tiny_models import tiny_model, tokens

    from kernelbook.interop.transformers import use_kernels
    from kernelbook.lab.profiling import ProfileCallback

    model = use_kernels(tiny_model("mixtral", num_hidden_layers=1))
    rows: list[dict[str, Any]] = [{"input_ids": row, "labels": row} for row in tokens(8, 6).cpu()]
    callback = ProfileCallback(tmp_path / "profile", first=2, last=3)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", use_cpu=not GPU, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    report = callback.report
    assert report is not None and report.steps == 2 and trainer.state.global_step == 4
    names = {event.get("name") for event in json.loads(report.trace.read_text())["traceEvents"]}
    assert {"kernelbook::route", "kernelbook::moe_lora"} & names
    # Two batches a step, one block each.
    routes = [calls for kernel, calls, *_ in report.rows if kernel == "kernelbook::route"]
    assert GPU or routes == [2]
    with pytest.warns(UserWarning, match=r"ProfileCallback: .* holds what an earlier train\(\) recorded"):
        callback.on_train_begin(arguments, trainer.state, trainer.control)


@pytest.mark.gpu
def test_the_kernels_of_a_call_are_those_that_the_device_ran() -> None:
    a = torch.randn(512, 512, device=runtime.DEVICE)
    torch.tanh(a)
    found = profiling.device_kernels(lambda: torch.tanh(a), calls=4)
    assert len(found) == 4 and all("tanh" in kernel.name and 0 < kernel.end - kernel.start < 1e6 for kernel in found)
