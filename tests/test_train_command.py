"""``python -m kernelbook train``, as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelbook.lab import cli
from kernelbook.train import CONFIGS, Trainer

SIZES = ("--context", "5", "--batch-size", "1", "--vocab-size", "260")
TINY = ("train", "--config", "tiny", "--quiet", *SIZES, "--corpus", __file__, "--out")


def test_real_text_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The issue's sign of life: the sizes called tiny learn; half of their steps are enough to see it."""
    out = tmp_path / "run"
    typed = ["train", "--config", "tiny", "--out", str(out), "--steps", "16", "--quiet"]
    assert cli.main(typed) == 0
    printed = capsys.readouterr().out
    assert "topics" in printed and "training loss" in printed
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    validation = [entry["validation_loss"] for entry in entries if "validation_loss" in entry]
    assert len(losses) == 16 and sum(losses[-4:]) / 4 < losses[0] - 0.4
    assert validation[-1] < validation[0] - 0.3
    assert json.loads((out / "config.json").read_text())["width"] == CONFIGS["tiny"].width
    # A second run does not write over the first; --resume finds that all is done.
    assert cli.main(typed) == 2 and "holds a run already" in capsys.readouterr().err
    assert cli.main([*typed, "--resume"]) == 0 and "going on after step 16" in capsys.readouterr().out


def test_the_help_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "{dense,sparse_dw,sparse_dw_dx}" in printed and "{all,random,round_robin,ema_topk,knn,oracle}" in printed
    assert "--weight-decay X      of AdamW; vectors and embeddings do not decay" in printed
    with pytest.raises(SystemExit) as ended:
        cli.main([*TINY, "unused", "--mode", "sparse"])
    assert ended.value.code == 2 and "invalid choice: 'sparse'" in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert cli.main([*TINY, out, "--steps", "4", "--dense-steps", "1", "--mode", "sparse_dw_dx", "--seed", "3"]) == 0
    again = ["train", "--quiet", "--resume", "--out", out]
    assert cli.main(again) == 0
    assert "going on after step 4" in capsys.readouterr().out
    assert cli.main([*again, "--seed", "4"]) == 2
    assert "seed must be that of the run" in capsys.readouterr().err
    (tmp_path / "run" / "config.json").write_text('{"widht": 3}')
    assert cli.main(again) == 2
    assert "unexpected keyword argument 'widht'" in capsys.readouterr().err


def test_torchrun_without_parallel_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its processes would make the run, and write to the one folder."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as torchrun sets it")
    assert cli.main(["train", "--config", "tiny", "--out", str(tmp_path / "run")]) == 2
    assert "train: --parallel must be ddp or fsdp under torchrun" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_text_of_ones_own_is_found_again_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own.txt").write_text("Some words, and then more of them.\n\n" * 40)
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TINY, str(tmp_path / "run"), "--steps", "1", "--corpus", "own.txt"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["train", "--quiet", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert "going on after step 1" in capsys.readouterr().out
    (tmp_path / "own.txt").rename(tmp_path / "moved.txt")
    (tmp_path / "run2").mkdir()
    again = ["train", "--quiet", "--resume", "--corpus", str(tmp_path / "moved.txt"), "--out", str(tmp_path / "run")]
    assert cli.main(again) == 2  # a document is named after its file, so that the split would be another
    assert "the corpus must be that of the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    (
        (KeyboardInterrupt(), 130, "interrupted; --resume --out"),
        (OSError(28, "No space left on device"), 1, "No space left on device); --resume --out"),
        (FloatingPointError("Trainer: loss of step 2"), 1, "train: Trainer: loss of step 2"),
        (torch.OutOfMemoryError("..."), 1, "train: the GPU's memory is too small for this run; make --batch-size,"),
    ),
)
def test_how_a_run_can_end(
    error: BaseException, code: int, message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def ends(self: Trainer, until: int | None = None) -> Any:
        raise error

    monkeypatch.setattr(Trainer, "run", ends)
    assert cli.main([*TINY, str(tmp_path / "run")]) == code
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_a_step_is_captured_where_there_is_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert cli.main([*TINY[:-1], "--width", "128", "--steps", "20", "--out", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["cuda_graph"] is True
    assert cli.main([*TINY[:-1], "--no-cuda-graph", "--steps", "2", "--out", str(tmp_path / "eager")]) == 0
    assert json.loads((tmp_path / "eager" / "config.json").read_text())["cuda_graph"] is False
    torch.cuda.synchronize()
