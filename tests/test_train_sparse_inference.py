"""A GPT with ReLU that generates with some of its neurons, at the size of the interpreter."""

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from bench import sparse_inference
from kernelbook import check
from kernelbook.lab import record
from kernelbook.nn import GPT
from kernelbook.train import CONFIGS, Trainer
from kernelbook.train.capture import Captured

CONFIG = dataclasses.replace(
    CONFIGS["tiny"], activation="relu", mode="dense", scheduler="all", steps=6, eval_every=0, checkpoint_every=0
)


@pytest.fixture(scope="module")
def trained() -> tuple[GPT, Any]:
    trainer = Trainer(CONFIG, progress=False)
    trainer.run()
    return trainer.model.requires_grad_(False).eval(), trainer.data


def test_a_predictor_learns_what_will_be_positive(trained: tuple[GPT, Any]) -> None:
    """What it chooses is positive more often than what is chosen at random."""
    model, data = trained
    learnt = sparse_inference.train_predictors(model, data, rank=8, steps=30, lr=2e-2)
    drawn = [sparse_inference.Predictor(32, 128, 8)]
    torch.nn.init.normal_(drawn[0].b)
    found = []
    for predictors in (learnt, drawn):
        ready = sparse_inference.calibrated(model, predictors, data, 0.25)
        ((x, z),) = sparse_inference._mlp_inputs(model, next(iter(data.validation_batches(1)))[0])
        with torch.no_grad():
            chosen, positive = ready[0].scores(x) > ready[0].threshold, z > 0
        hit, computed = float((chosen & positive).sum() / positive.sum()), float(chosen.float().mean())
        assert 0.1 < float(positive.float().mean()) < 0.9  # ReLU leaves zeros
        assert 0.1 < computed < 0.4
        found.append(hit / computed)
    assert found[0] > 1.6 and found[0] > 1.4 * found[1]


def test_the_decoder_is_the_model(trained: tuple[GPT, Any]) -> None:
    """Dense: the logits of the whole sequence at once. Sparse: those with a mask, by the rule of correctness."""
    model, data = trained
    tokens = next(iter(data.validation_batches(1)))[0][:2, :5]
    decoder = sparse_inference.Decoder(model, 2, 8, dtype=torch.float32)
    logits = []
    for i in range(5):
        decoder.tokens.copy_(tokens[:, i : i + 1])
        logits.append(decoder.step())
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits, 1), model(tokens), rtol=1e-4, atol=1e-4)
    assert torch.equal(decoder.tokens[:, 0], logits[-1][:, 0].argmax(-1))
    predictors = sparse_inference.train_predictors(model, data, rank=4, steps=1)
    predictors = sparse_inference.calibrated(model, predictors, data, 0.25)
    assert sparse_inference.error_ratio(model, predictors, data) < check.FORWARD_FACTOR


@pytest.mark.gpu
def test_one_graph_generates_what_launches_do(trained: tuple[GPT, Any]) -> None:
    """The list of neurons and the place in the cache change from token to token, and the graph with them."""
    model, data = trained
    predictors = sparse_inference.train_predictors(model, data, rank=4, steps=5)
    predictors = sparse_inference.calibrated(model, predictors, data, 0.25)
    generated = []
    for graph in (False, True):
        decoder = sparse_inference.Decoder(model, 1, 16, predictors=predictors, dtype=torch.float32)
        step = Captured(decoder.step) if graph else decoder.step
        decoder.length.zero_()
        decoder.tokens.fill_(5)
        for _ in range(8):
            step()
            generated.append(decoder.tokens.item())
    assert generated[:8] == generated[8:]


def test_the_files(tmp_path: Path) -> None:
    sizes = {"shares": (0.25,), "batches": (1,), "samples": 1, "count": 2}
    about = {"run": record.new_run(), **record.environment("sparse_inference")}
    sparse_inference.measure(CONFIG, tmp_path, about, rank=4, predictor_steps=1, **sizes)
    rows = pd.read_csv(tmp_path / "sparse_inference.csv")
    assert list(rows.columns) == list(record.COLUMNS) and set(rows["provider"]) == {"dense", "kernelbook"}
