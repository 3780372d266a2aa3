"""The command line: doctor, judge, train and profile."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelbook import runtime
from kernelbook.lab import cli, doctor
from kernelbook.layer_norm import op


@pytest.mark.slow
def test_doctor_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "triton" in out and "FAILED" not in out
    for name in ("layer_norm", "flash_attention", "sparse_linear", "scatter_ffn", "moe_lora", "nf4_matmul", "route"):
        assert f"\n{name}" in out
    if runtime.INTERPRET:
        assert "interpreted on the CPU" in out and "none found" in out


def test_doctor_says_what_to_expect_of_a_gpu_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    said = {}
    with (
        pytest.raises(ValueError, match=r"compiling_for: target must be one of sm_75, .*, got 'sm_42'"),
        runtime.compiling_for("sm_42"),
    ):
        pass
    for target in ("sm_75", "sm_80"):
        with runtime.compiling_for(target):
            said[target] = dict(doctor._machine())
    assert said["sm_75"]["architecture"] == "sm_75" and "to expect" not in said["sm_80"]
    assert said["sm_75"]["to expect"].startswith("float16 and float32; bfloat16 is right, and several times slower")


def _slightly_wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
    return op.layer_norm(*args, **kwargs) * 1.01


def _raises(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("broken", (_slightly_wrong, _raises))
def test_doctor_fails_when_a_kernel_is_broken(
    broken: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = dataclasses.replace(doctor._cases()["layer_norm"], function=broken)
    monkeypatch.setattr(doctor, "_cases", lambda: {"layer_norm": one})
    assert cli.main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed",
    (
        "", "kitchen", "doctor layer_norm",
        "profile --set hidden_size=-4 --out new", "profile --set slots={[]:1} --out new", "profile --out file/folder",
        "profile --config file", "train --out file", "train --out new --lr nan", "train --out new --beta1 3",
        "train --out new --seed 99999999999999999999", "train --out new --corpus nowhere", "train --out new --heads 0",
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


def test_a_run_whose_files_are_not_its_own_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--context", "5", "--steps", "1", "--vocab-size", "260", "--corpus", __file__]
    assert cli.main(["train", "--config", "tiny", "--quiet", *sizes, "--out", str(tmp_path / "run")]) == 0
    # The log is written anew from the checkpoint.
    names, contents = ("config.json", "checkpoint.pt"), (b"", b"[]", b"3", b'{"width": "x"}', b"\xff\x00")
    for number, (name, content) in enumerate(itertools.product(names, contents)):
        other = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", other)
        (other / name).write_bytes(content)
        capsys.readouterr()
        assert cli.main(["train", "--quiet", "--resume", "--out", str(other)]) == 2, (name, content)
        assert capsys.readouterr().err.startswith("train: ")


def test_ctrl_c_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "doctor", lambda: _stopped(torch.empty(0)))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "\ndoctor: interrupted\n"


def _stopped(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt
