"""Fine-tuning five ways, at the size of the interpreter."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5")

import torch

from bench import same_loss
from kernelbook import runtime

SIZES = same_loss.TINY | {"batch": 1}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def ignorant() -> tuple[Weights, float]:
    """A model that has learned nothing, and its loss."""
    return same_loss.pretrain(SIZES, 0, small=True)


@pytest.fixture(scope="module")
def base(ignorant: tuple[Weights, float]) -> Weights:
    weights, loss = same_loss.pretrain(SIZES, 3, lr=1e-2, small=True)
    assert loss < ignorant[1]
    return weights


@pytest.mark.slow
def test_all_ways_begin_and_go_alike(base: Weights, ignorant: tuple[Weights, float]) -> None:
    lines = {
        way: same_loss.finetune(way, 3, SIZES, 3, base, lr=1e-2, small=True) for way in same_loss.WAYS
    }  # fmt: skip
    eager, dense = (lines[way]["validation_loss"] for way in ("eager", "kernelbook:dense"))
    apart = 2e-4 if runtime.DEVICE.type == "cpu" else 0.02  # on a GPU all but eager compute in bfloat16
    assert dense == pytest.approx(eager, abs=apart)
    assert lines["grouped_mm"]["validation_loss"] == pytest.approx(eager, abs=apart)
    for way in ("kernelbook:nf4", "kernelbook:nf4_double"):
        assert lines[way]["validation_loss"] != eager
        assert lines[way]["validation_loss"] == pytest.approx(eager, abs=0.05)
    line = lines["eager"]
    assert line["parameters"] > line["trained"] > 0
    assert line["train_steps"] == [1, 2, 3] and len(line["train_loss"]) == 3
    # Three steps change the loss by less than their batches differ; and 40 teach something new only who knows nothing.
    long = same_loss.finetune("eager", 3, SIZES, 40, ignorant[0], lr=3e-2, small=True)["validation_loss"]
    assert long[-1] < long[0] - 0.02
    other = same_loss.finetune("eager", 4, SIZES, 3, base, lr=1e-2, small=True)
    assert other["validation_loss"][0] == eager[0] and other["train_loss"] != line["train_loss"]


def test_a_run_writes_a_line(tmp_path: Path) -> None:
    assert same_loss.run(tmp_path, "eager, seed 1", SIZES, first=1, steps=1) == 0
    (line,) = map(json.loads, (tmp_path / "same_loss_curves.jsonl").read_text().splitlines())
    assert line["way"] == "eager" and line["seed"] == 1 and {"run", "gpu", "version", "kernels"} <= line.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["same_loss_curves.jsonl"]
