"""The command line: doctor and bench."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kernelbook
from kernelbook import cli, runtime, timing
from kernelbook.layer_norm import op


def test_doctor_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "triton" in out and "FAILED" not in out
    for name in cli.rooms() + cli.modules_measured():
        assert name in out
    if runtime.INTERPRET:
        assert "interpreted on the CPU" in out and "none found" in out


def test_modules_that_combine_rooms_are_measured_too() -> None:
    assert "moe_block" in cli.modules_measured() and "moe_block" not in cli.rooms()
    bench = cli._bench_of("moe_block")
    assert all(case.op == "moe_block" for case in bench.cases())
    assert all(path.exists() for path in bench.SOURCES)


def _slightly_wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _LAYER_NORM(*args, **kwargs) * 1.01


def _raises(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("no such kernel")


_LAYER_NORM = op.layer_norm


@pytest.mark.parametrize("broken", (_slightly_wrong, _raises))
def test_doctor_fails_when_a_kernel_is_broken(
    broken: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "rooms", lambda: ["layer_norm"])
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


def _case(ours: Any) -> timing.Case:
    x = torch.randn(4, 8, device=runtime.DEVICE)
    problem = timing.Problem(
        {"torch": lambda: [x + x], "kernelbook": lambda: [ours(x)]}, lambda: [x.double() * 2], lambda: [x + x], 2.0
    )
    return timing.Case("double", "forward", torch.float32, {"N": 8}, "N", 8, 1.0, 1.0, lambda: problem)


@pytest.mark.parametrize(("ours", "code"), ((lambda x: x * 2, 0), (lambda x: x * 2.1, 1)))
def test_bench_records_what_is_right_only(
    ours: Any, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bench:
        __file__ = str(tmp_path / "room" / "bench.py")

        @staticmethod
        def cases() -> list[timing.Case]:
            return [_case(ours)]

        @staticmethod
        def missing_peers() -> list[str]:
            return ["peer (package peer is not installed)"]

    ceilings = timing.Ceilings(4000.0, 700.0, 350.0)
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda") if runtime.HAS_GPU else runtime.DEVICE)
    monkeypatch.setattr(cli, "_bench_of", lambda room: Bench())
    monkeypatch.setattr(timing, "measure_ceilings", lambda: ceilings)
    monkeypatch.setattr(runtime, "device_slug", lambda: "fake-gpu")
    monkeypatch.setattr(cli, "_can_measure", lambda: True)
    assert cli.main(["bench", "layer_norm", "--out", str(tmp_path), "--rep-ms", "1"]) == code
    streams = capsys.readouterr()
    assert "left out: peer (package peer is not installed)" in streams.out
    written = tmp_path / "fake-gpu" / "layer_norm.csv"
    if code == 0:
        assert "kernelbook" in streams.out and "kernelbook" in written.read_text()
        run = written.read_text().splitlines()[1].split(",")[0]
        assert run in (tmp_path / "fake-gpu" / "ceilings.csv").read_text()
    else:
        assert "NOT CORRECT, not recorded: double forward" in streams.err and not written.exists()
