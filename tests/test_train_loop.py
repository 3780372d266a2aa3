"""The model, the loop, its log and its checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kernelbook.nn import GPT, GPTConfig
from kernelbook.train import CONFIGS, TrainConfig, Trainer, make_data
from kernelbook.train.chunks import chunk_norms, top_chunks_reference

# A run of a second: 16 tokens a step.
SMALL = dataclasses.replace(
    CONFIGS["tiny"], corpus=__file__, vocab_size=260, width=32, depth=1, context=5, batch_size=1, steps=6, dense_steps=2, log_every=2,
    eval_every=0, eval_batches=1, checkpoint_every=0, lr_warmup=1, refresh_every=2,
)  # fmt: skip


def _trainer(out: Path | None = None, resume: bool = False, **changes: Any) -> Trainer:
    return Trainer(dataclasses.replace(SMALL, **changes), out=out, resume=resume, progress=False)


# --- the model ------------------------------------------------------------------------------------------------------


class _Plain(nn.Module):
    """The same transformer in PyTorch's own modules."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        model = self.model
        x = model.tokens(tokens) + model.positions.weight[: tokens.shape[1]]
        for block in model.blocks:
            d = x.shape[-1]

            def norm(layer: nn.LayerNorm, x: torch.Tensor, d: int = d) -> torch.Tensor:
                return nn.functional.layer_norm(x, (d,), layer.weight, layer.bias)

            q, k, v = (
                (norm(block.norm_attention, x) @ layer.weight.t()).unflatten(-1, (block.heads, -1)).transpose(1, 2)
                for layer in (block.q, block.k, block.v)
            )
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            causal = torch.ones_like(scores[0, 0]).tril().bool()
            mixed = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
            x = x + mixed.transpose(1, 2).flatten(2) @ block.attention_out.weight.t()
            hidden = nn.functional.gelu(norm(block.norm_mlp, x) @ block.up.weight.t(), approximate="tanh")
            x = x + hidden @ block.down.weight.t()
        x = nn.functional.layer_norm(x, x.shape[-1:], model.norm.weight, model.norm.bias)
        return x @ model.head.weight.t()


def test_gpt_is_the_textbooks(device: torch.device) -> None:
    model = GPT(GPTConfig(vocab_size=11, context=8, width=32, depth=2, heads=2, chunk_size=16)).to(device)
    tokens = torch.randint(11, (2, 6), device=device)
    ours, plain = model(tokens), _Plain(model)(tokens)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    ours.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain.square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-5)
    loss = model(tokens, tokens)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(ours.flatten(0, 1), tokens.flatten()))
    # The future does not reach the past.
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    torch.testing.assert_close(model(changed)[:, :-1], ours[:, :-1])


def test_gpt_has_a_shape_where_it_has_no_memory() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=11, context=8, width=32, depth=1, heads=2, chunk_size=16))
        assert model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 11)


def test_gpt_compiles_to_one_graph(device: torch.device) -> None:
    model = GPT(GPTConfig(vocab_size=11, context=8, width=32, depth=1, heads=2, chunk_size=16)).to(device)
    for layer in model.sparse_layers().values():
        layer.active_chunks = torch.tensor([1], device=device)
    tokens = torch.randint(11, (2, 6), device=device)
    found = []
    for each in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        model.zero_grad()
        each(tokens, tokens).backward()
        found.append([p.grad for p in model.parameters()])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"heads": 3}, r"width must be a multiple of heads \(3\), got 32"),
        ({"chunk_size": 24}, r"chunk_size must be at least 16 and divide the width \(32\), got 24"),
        ({"sparse_layers": "none"}, "sparse_layers must be one of 'mlp', 'all', got 'none'"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"width": 512, "heads": 1}, "heads must have at most 256 features, or attention be 'torch', got 512"),
    ),
)
def test_a_bad_shape_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"GPTConfig: {message}"):
        GPTConfig(**{"vocab_size": 5, "width": 32, "heads": 2, "chunk_size": 16, **changes})


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"mode": "sparse"}, "mode must be one of 'dense', 'sparse_dw', 'sparse_dw_dx', got 'sparse'"),
        ({"scheduler": "best"}, "scheduler must be one of .*'knn'.*, got 'best'"),
        ({"active": 0.0}, r"active must lie in \(0, 1\], got 0.0"),
        ({"clip": 0.0}, "clip must be positive, got 0.0"),
        ({"dense_steps": -1}, "dense_steps must be at least 0, got -1"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"lr": 1e-4, "min_lr": 1e-3}, r"min_lr must lie in \[0, lr\] \(\[0, 0.0001\]\), got 0.001"),
    ),
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"TrainConfig: {message}"):
        TrainConfig(**changes)


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "scheduler"),
    (("dense", "all"), ("sparse_dw", "knn"), ("sparse_dw_dx", "ema_topk"), ("sparse_dw_dx", "oracle")),
)
@pytest.mark.parametrize("inactive", ("skip", "decay"))
def test_every_mode_takes_its_steps(mode: str, scheduler: str, inactive: str) -> None:
    trainer = _trainer(mode=mode, scheduler=scheduler, inactive=inactive, steps=3)
    before = [layer.weight.detach().clone() for layer in trainer.layers.values()]
    trainer.run(until=2)
    middle = [layer.weight.detach().clone() for layer in trainer.layers.values()]
    assert all(not torch.equal(a, b) for a, b in zip(before, middle, strict=True))
    trainer.run()
    assert len(trainer.losses()) == 3 and all(torch.tensor(trainer.losses()).isfinite())
    chunk = trainer.config.chunk_size
    for layer, old, ids in zip(trainer.layers.values(), middle, trainer.scheduler.ids_of_layers(), strict=True):
        moved = (layer.weight != old).view(-1, chunk * old.shape[1]).any(1).nonzero().flatten()
        all_move = mode == "dense" or inactive == "decay"
        expected = range(layer.num_chunks) if all_move else sorted(ids.tolist())
        assert moved.tolist() == list(expected)


def test_where_a_branch_ends_dx_can_stay_dense() -> None:
    trainer = _trainer(mode="sparse_dw_dx", sparse_dx="inputs", steps=4)
    modes = {name.split(".")[-1]: layer.mode for name, layer in trainer.layers.items()}
    assert {name for name, mode in modes.items() if mode == "sparse_dw"} == {"attention_out", "down"}
    assert {name for name, mode in modes.items() if mode == "sparse_dw_dx"} == {"q", "k", "v", "up"}


@pytest.mark.parametrize("progress", (False, True))
def test_progress_is_shown_where_it_is_wanted(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(SMALL, progress=progress).run(2)
    assert ("step/s" in capsys.readouterr().err) == progress


def test_a_trainer_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _trainer(steps=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", steps=6, checkpoint_every=2)
    trainer.run(until=2)
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"Trainer: loss and gradient of step 3 must be finite, got nan"):
        trainer.run()
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    logged = (tmp_path / "run" / "log.jsonl").read_text()
    assert "NaN" not in logged
    resumed = _trainer(tmp_path / "run", resume=True, steps=6, checkpoint_every=2)
    resumed.run()
    assert len(resumed.losses()) == 6


def test_the_oracle_knows() -> None:
    trainer = _trainer(scheduler="oracle", steps=3)
    trainer.run(until=2)
    trainer._activate([None] * len(trainer.layers))
    for mine, new in zip((trainer._inputs, trainer._targets), trainer.data.batch(2), strict=True):
        mine.copy_(new)
    trainer._backward()
    norms = torch.cat([chunk_norms(layer.weight.grad, chunk_size=16) for layer in trainer.layers.values()])
    layout = trainer.scheduler.layout
    trainer.run()
    assert torch.equal(trainer.scheduler.ids, top_chunks_reference(norms, layout.counts, layout.active))


def test_clipping_and_the_whole_norm() -> None:
    trainer = _trainer(mode="sparse_dw", steps=4, clip=1e-3)
    trainer.run()
    trainer._backward()  # the gradients of the last batch, at other weights: only their norm is wanted
    trainer._measure(trainer._active_norms, trainer.scheduler.layout.active)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    grads = [g.coalesce().values() if g.is_sparse else g.clone() for g in (p.grad for p in trainer.model.parameters())]
    trainer._update(trainer._active_norms)
    total = torch.stack([g.norm() for g in grads]).norm()
    torch.testing.assert_close(trainer._grad_norm, total)
    clipped = torch.stack([p.grad.norm() for p in trainer._rest]).norm()
    assert float(clipped) <= 1e-3 and float(total) > 1e-2
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ("knn", "ema_topk"))
def test_a_resumed_run_is_the_uninterrupted_one(scheduler: str, tmp_path: Path) -> None:
    settings = {"scheduler": scheduler, "checkpoint_every": 3, "eval_every": 3}
    whole = _trainer(**settings)
    whole.run()
    out = tmp_path / "run"
    killed = _trainer(out, **settings)
    enqueue = killed._enqueue

    def dies(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt
        enqueue(step)

    killed._enqueue = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    with (out / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed while it wrote
    resumed = _trainer(out, resume=True, **settings)
    assert resumed.step == 3 and len(resumed.losses()) == 3
    resumed.run()
    assert resumed.losses() == whole.losses()  # to the last bit
    assert resumed.validation_losses() == whole.validation_losses()
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in logged if "loss" in entry] == whole.losses()
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_half_a_checkpoint_is_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(tmp_path / "run", steps=1)
    trainer.run()
    path = tmp_path / "run" / "checkpoint.pt"
    before = path.read_bytes()

    def half(state: object, file: Any) -> None:
        file.write(before[: len(before) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        trainer.save()
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["checkpoint.pt", "config.json", "log.jsonl"]


def test_a_checkpoint_belongs_to_its_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _trainer(out, steps=1).run()
    with pytest.raises(FileExistsError, match="holds a run already"):
        _trainer(out, steps=1)
    with pytest.raises(ValueError, match=r"seed must be that of the run in .* \(0\), got 1"):
        _trainer(out, resume=True, steps=1, seed=1)
    other = make_data(dataclasses.replace(SMALL, steps=1))
    other.digest = "another"
    with pytest.raises(ValueError, match=r"corpus must be that of the run in .* \('\w+'\), got 'another'"):
        Trainer(dataclasses.replace(SMALL, steps=1), other, out=out, resume=True, progress=False)
    for half in (b"", (out / "checkpoint.pt").read_bytes()[:-999]):
        (out / "checkpoint.pt").write_bytes(half)
        with pytest.raises(ValueError, match=r"checkpoint.pt must be a checkpoint of a run, got another file"):
            _trainer(out, resume=True, steps=1)


def test_a_run_that_is_done_can_go_on_for_more_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _trainer(out, steps=2).run()
    more = _trainer(out, resume=True, steps=3)
    assert more.step == 2
    more.run()
    assert len(more.losses()) == 3 and json.loads((out / "config.json").read_text())["steps"] == 3
    with pytest.raises(ValueError, match=r"steps must be at least that of the run in .* \(3\), got 2"):
        _trainer(out, resume=True, steps=2)


def test_the_probe_moves_nothing() -> None:
    trainer = _trainer(steps=4, probe_every=1)
    trainer.run()
    probes = [entry for entry in trainer.records if "recall" in entry]
    assert [entry["step"] for entry in probes] == [3, 4]
    assert all(0 <= entry[name] <= 1 for entry in probes for name in ("precision", "recall", "energy"))
    unprobed = _trainer(steps=4)
    unprobed.run()
    assert unprobed.losses() == trainer.losses()


# --- on a GPU -------------------------------------------------------------------------------------------------------

GPU = TrainConfig(
    width=256, depth=2, heads=4, context=64, batch_size=8, steps=24, dense_steps=8, corpus="topics", lr_warmup=2,
    checkpoint_every=0, eval_every=0, eval_batches=1, log_every=8,
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "scheduler", "changes"),
    (
        ("dense", "all", {}),
        ("sparse_dw", "knn", {}),
        ("sparse_dw", "round_robin", {"inactive": "decay"}),
        ("sparse_dw_dx", "oracle", {}),
        ("sparse_dw_dx", "ema_topk", {"sparse_dx": "inputs"}),
        ("sparse_dw_dx", "random", {"dtype": "float32"}),
    ),
)
def test_a_captured_step_is_the_step(
    mode: str, scheduler: str, changes: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    config = dataclasses.replace(GPU, mode=mode, scheduler=scheduler, **changes)
    eager = Trainer(config, progress=False)
    eager.run()
    captured = Trainer(dataclasses.replace(config, cuda_graph=True), out=tmp_path / "run", progress=False)
    captured.run(until=15)
    assert captured._calls.why_eager is None
    resumed = Trainer(dataclasses.replace(config, cuda_graph=True), out=tmp_path / "run", resume=True, progress=False)
    resumed.run()
    assert captured.losses() == eager.losses()[:15]
    assert resumed.losses() == eager.losses()
