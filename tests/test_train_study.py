"""The study behind the chapter on training: what it counts, what it records, and how parts of it are put together."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from torch import nn

from bench import sparse_training as study
from kernelbook.nn import GPT
from kernelbook.train import TrainConfig


def test_operations_are_counted_from_the_model() -> None:
    config = TrainConfig(width=128, depth=2, heads=2, context=16, batch_size=3, mode="dense")
    model = GPT(config.model(50))
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    tokens = 3 * 16
    products = 3 * sum(2 * tokens * m.weight.numel() for m in linear)
    attention = 3.5 * 2 * (2 * 3 * 16 * 16 * 128) * 2 / 2  # two products a block, half of them masked
    assert study.step_gflop(config, 50) == pytest.approx((products + attention) / 1e9)
    sparse = dataclasses.replace(config, mode="sparse_dw_dx", active=0.5)
    layers = sum(m.weight.numel() for m in model.sparse_layers().values())
    saved = study.step_gflop(config, 50) - study.step_gflop(sparse, 50)
    assert layers == 2 * 12 * 128 * 128 and saved == pytest.approx(2 * tokens * 2 * 0.5 * layers / 1e9)
    only_dw = dataclasses.replace(sparse, mode="sparse_dw", sparse_layers="mlp")
    saved = study.step_gflop(config, 50) - study.step_gflop(only_dw, 50)
    assert saved == pytest.approx(2 * tokens * 0.5 * 2 * 8 * 128 * 128 / 1e9)
    more = study.step_gflop(dataclasses.replace(sparse, sparse_dx="inputs"), 50) - study.step_gflop(sparse, 50)
    assert more == pytest.approx(2 * 3 * 16 * 0.5 * 2 * 5 * 128 * 128 / 1e9)  # attention_out and down of two blocks


@pytest.mark.gpu
@pytest.mark.memory
def test_equal_seconds_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "BUDGET_SECONDS", {512: 0.25})
    chosen = [(study.Variant(), 1.0), (study.Variant("sparse_dw_dx", "ema_topk", 0.1), 2.0)]
    monkeypatch.setattr(study, "budget_variants", lambda settings: iter(chosen))
    monkeypatch.setattr(study, "WIDTHS", (512,))
    assert study.run(tmp_path, "^budget .*seed 0") == 0
    rows = pd.read_csv(tmp_path / "sparse_training_budgets.csv")
    spent = rows["dense_steps"] * rows["step_ms"].iloc[0] + (rows["steps"] - rows["dense_steps"]) * rows["step_ms"]
    assert len(rows) == 2 and spent.sub(250).abs().lt(10).all()
