"""A training step as a CUDA graph: the losses and weights of a loop written out, bit for bit. Without a GPU it runs eagerly."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernelbook import runtime
from kernelbook.nn import MoELayer
from kernelbook.nn.gpt import GPT, GPTConfig
from kernelbook.train import CapturedStep, ChunkAdamW
from kernelbook.train.capture import _no_stashed_generator
from kernelbook.train.step import KeptGradients

GPU = runtime.DEVICE.type == "cuda"
VOCABULARY, BATCH, LENGTH = 61, 4, 24


class Net(nn.Module):
    """A small language model of PyTorch's own layers."""

    def __init__(self, width: int = 32, *, dropout: float = 0.0, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.checkpoints = checkpoints

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.checkpoints is None:
            x = x + self.inner(x)
        else:
            x = x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.checkpoints)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


class Experts(nn.Module):
    """Our mixture of experts, frozen in 4 bits, with LoRA pairs, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.block = MoELayer(4, 64, 64, 2)
        self.block.experts.quantize()
        self.block.experts.add_lora(4)
        for pair in (self.block.experts.gate_up_b, self.block.experts.down_b):
            assert pair is not None
            nn.init.normal_(pair, std=0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return F.cross_entropy(self.head(x + self.block(x)).flatten(0, 1), labels.flatten())


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with runtime.DEVICE:
        return build()


def batches(count: int, *lengths: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens on the host, of these lengths in turn."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        length = lengths[i % len(lengths)] if lengths else LENGTH
        ids = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator)
        found.append({"input_ids": ids, "labels": ids.roll(1, 1)})
    return found


def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    """AdamW as a captured step sets it up: its results depend on that in the last bits."""
    lr: Any = torch.tensor(1e-2, device=runtime.DEVICE) if GPU else 1e-2
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=lr, capturable=GPU, **how)


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))


def written_out(
    model: nn.Module, optimizer: Any, data: list[dict[str, torch.Tensor]], *, accumulate: int = 1,
    clip: float | None = None, scheduler: Any = None, autocast: torch.dtype | None = None,
) -> list[float]:  # fmt: skip
    """The loop that anybody writes."""
    losses = []
    for i, batch in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast(runtime.DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(**{name: t.to(runtime.DEVICE) for name, t in batch.items()})
        (loss / accumulate).backward()
        losses.append(loss.item())
        if i % accumulate == accumulate - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return losses


@pytest.fixture(autouse=True)
def _quiet_without_a_gpu() -> Iterator[None]:
    with warnings.catch_warnings():
        if not GPU:
            warnings.filterwarnings("ignore", message=".*there is no GPU")
        yield


def assert_captured(step: CapturedStep, graphs: int) -> None:
    if GPU:
        assert step.why_eager is None
        assert len(step._calls) == graphs
    else:
        assert step.why_eager == "there is no GPU"


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def gpt() -> nn.Module:
    model = GPT(GPTConfig(vocab_size=VOCABULARY, context=LENGTH, width=64, depth=1, heads=2, chunk_size=16))
    forward = model.forward
    model.forward = lambda input_ids, labels: forward(input_ids, labels)  # type: ignore[assignment, method-assign]
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "plain": (Net, {}, 1),
    "clipped": (Net, {"clip": 0.5}, 1),
    "accumulated": (Net, {"accumulate": 3, "clip": 0.5}, 3),
    "checkpoints": (lambda: Net(checkpoints=False), {"accumulate": 2}, 2),
    "checkpoints, with the generator's state": (lambda: Net(checkpoints=True), {}, 1),
    "dropout": (lambda: Net(dropout=0.5), {"accumulate": 2}, 2),
    "bfloat16": (lambda: Net(checkpoints=False), {"autocast": torch.bfloat16}, 1),
    "gpt": (gpt, {"clip": 1.0}, 1),
    "experts": (Experts, {"clip": 1.0}, 1),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.gpu if build in (gpt, Experts) else ())
        for name, (build, *_) in CASES.items()
    ],
)
def test_a_captured_step_is_the_step(case: str) -> None:
    build, how, graphs = CASES[case]
    data = batches(15)
    model, plain = made(build), made(build)
    step, optimizer = CapturedStep(model, adam(model), **how), adam(plain)
    torch.manual_seed(5)
    losses = [step(**batch) for batch in data]
    torch.manual_seed(5)
    assert [loss.item() for loss in losses] == written_out(plain, optimizer, data, **how)
    assert_same_weights(model, plain)
    assert_captured(step, graphs)
    assert step.updates == len(data) // how.get("accumulate", 1)
    assert (step.grad_norm is None) == ("clip" not in how)


@pytest.mark.parametrize("kind", ("AdamW", "SGD", "fused"))
def test_learning_rates_change(kind: str) -> None:
    data, found = batches(16), []
    for captured in (True, False):
        model = made(Net)
        optimizer: Any = adam(model, fused=GPU) if kind == "fused" else adam(model)
        if kind == "SGD":  # runs after the graph, from Python
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = warmup(optimizer)
        if captured:
            step = CapturedStep(model, optimizer, scheduler=scheduler, clip=1.0)
            found.append([step(**batch).item() for batch in data])
            assert_captured(step, 1)
        else:
            found.append(written_out(model, optimizer, data, scheduler=scheduler, clip=1.0))
    assert found[0] == found[1]


def losses_by_hand(step: CapturedStep, data: list[dict[str, torch.Tensor]]) -> list[float]:
    """With learning rates that the caller sets as numbers."""
    losses = []
    for i, batch in enumerate(data):
        step.optimizer.param_groups[0]["lr"] = 0.02 / (1 + i)
        losses.append(step(**batch).item())
    return losses


def test_a_learning_rate_may_be_set_as_a_number() -> None:
    data, models = batches(10), [made(Net), made(Net)]
    captured, eager = (
        losses_by_hand(CapturedStep(model, adam(model), capture=i == 0), data) for i, model in enumerate(models)
    )
    assert captured == eager
    assert_same_weights(*models)


@pytest.mark.gpu
def test_a_stale_learning_rate_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    data, models = batches(10), [made(Net), made(Net)]
    eager = losses_by_hand(CapturedStep(models[0], adam(models[0]), capture=False), data)
    monkeypatch.setattr(CapturedStep, "_settle_lrs", lambda self: None)
    assert losses_by_hand(CapturedStep(models[1], adam(models[1])), data) != eager


@pytest.mark.parametrize("cleared", (True, False))
def test_gradients_that_are_not_cleared_would_be_seen(cleared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data, model, plain = batches(12), made(Net), made(Net)
    if not cleared:
        monkeypatch.setattr(KeptGradients, "clear", lambda self: None)
    step = CapturedStep(model, adam(model), accumulate=2)
    losses = [step(**batch).item() for batch in data]
    assert (losses == written_out(plain, adam(plain), data, accumulate=2)) is cleared


def test_a_gradient_from_before_is_no_part_of_a_step() -> None:
    data, model, plain = batches(6), made(Net), made(Net)
    step, found = CapturedStep(model, adam(model)), []
    for batch in data:
        model(**{name: t.to(runtime.DEVICE) for name, t in batch.items()}).backward()
        found.append(step(**batch).item())
    assert found == written_out(plain, adam(plain), data)


def test_two_lengths_are_two_graphs() -> None:
    data, model, plain = batches(14, 9, 13, 16), made(Net), made(Net)
    step = CapturedStep(model, adam(model), lengths=(16, 12))
    losses = [step(**batch).item() for batch in data]
    padded = []
    for batch in data:
        extra = (0, (12 if batch["labels"].shape[1] <= 12 else 16) - batch["labels"].shape[1])
        padded.append(
            {"input_ids": F.pad(batch["input_ids"], extra), "labels": F.pad(batch["labels"], extra, value=-100)}
        )
    assert losses == written_out(plain, adam(plain), padded)
    assert_captured(step, 2)
    with pytest.raises(ValueError, match=r"CapturedStep: the batch must be at most as long as .*\(16\), got 17"):
        step(**batches(1, 17)[0])


@pytest.mark.parametrize("accumulate", (1, 2))
def test_a_run_that_is_resumed_goes_on(accumulate: int, tmp_path: Path) -> None:
    def fresh() -> CapturedStep:
        model = made(Net)
        optimizer = adam(model)
        return CapturedStep(model, optimizer, scheduler=warmup(optimizer), clip=1.0, accumulate=accumulate)

    def load(step: CapturedStep) -> None:
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        for name, part in (("model", step.model), ("optimizer", step.optimizer), ("scheduler", step.scheduler)):
            part.load_state_dict(state[name])

    data, step = batches(20), fresh()
    for batch in data[:10]:
        step(**batch)
    state = {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}
    torch.save(state | {"scheduler": step.scheduler.state_dict()}, tmp_path / "state.pt")
    expected = [step(**batch).item() for batch in data[10:]]
    other = fresh()
    for again in (other, step):  # another process's, and back
        load(again)
        assert [again(**batch).item() for batch in data[10:]] == expected
    assert_captured(step, accumulate)


@pytest.mark.gpu
def test_chunks_of_a_sparse_model_learn_in_a_graph() -> None:
    """Compact gradients and our optimizer."""
    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=VOCABULARY, context=LENGTH, width=64, depth=1, heads=2, chunk_size=16, compact_gradient=True
        )
        model = GPT(config).to(runtime.DEVICE)
        for layer in model.sparse_layers().values():
            layer.active_chunks = torch.tensor([0, 2], device=runtime.DEVICE)
        chunks = [layer.weight for layer in model.sparse_layers().values()]
        optimizer = ChunkAdamW(chunks, lr=1e-2, chunk_size=16, unique_rows=True)
        step = CapturedStep(model, optimizer, clip=1.0, capture=captured, warm=2)
        data = [(b["input_ids"], b["labels"]) for b in batches(8)]
        found.append(([step(*batch).item() for batch in data], model))
        if captured:
            assert_captured(step, 1)
    assert found[0][0] == found[1][0]
    assert_same_weights(found[0][1], found[1][1])


def test_what_a_kept_gradient_cannot_be_is_said() -> None:
    embedding = nn.Embedding(8, 4, sparse=True).to(runtime.DEVICE)
    step = CapturedStep(
        embedding, torch.optim.SparseAdam(embedding.parameters()), loss=lambda m, x: m(x).square().sum()
    )
    with pytest.raises(ValueError, match="CapturedStep: gradients must be dense where they are kept"):
        step(torch.tensor([1, 2]))


class Reads(Net):
    """It waits for the device."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        return loss if loss.item() > 0 else -loss


class Selects(Net):
    """A shape depends on values."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.embed(input_ids)[input_ids > 3]
        return F.cross_entropy(self.head(rows), labels[input_ids > 3])


def with_hook() -> nn.Module:
    model = Net()
    model.inner.register_forward_hook(lambda module, args, out: print(end="" if out.sum().item() else "zero"))
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("build", "line"),
    [
        (Reads, "return loss if loss.item() > 0 else -loss"),
        (Selects, "rows = self.embed(input_ids)[input_ids > 3]"),
        (with_hook, "model.inner.register_forward_hook("),
        (lambda: Net(dropout=0.5, checkpoints=True), "x = x + checkpoint(self.inner, x"),
    ],
)
@pytest.mark.parametrize("accumulate", (1, 2))
def test_a_step_that_cannot_be_captured_goes_on(build: Callable[[], nn.Module], line: str, accumulate: int) -> None:
    data, model, plain = batches(12), made(build), made(build)
    step = CapturedStep(model, adam(model), accumulate=accumulate)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="CapturedStep: goes on without a CUDA graph") as said:
        losses = [step(**batch).item() for batch in data]
    assert line in str(said[0].message)
    assert Path(__file__).name in str(step.why_eager)
    torch.manual_seed(5)
    assert losses == written_out(plain, adam(plain), data, accumulate=accumulate)
    assert_same_weights(model, plain)
    # PyTorch is as it was: the current stream, random numbers, and the next graph.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(2, device=runtime.DEVICE).isfinite().all()
    other = made(Net)
    good = CapturedStep(other, adam(other))
    for batch in data:
        good(**batch)
    assert_captured(good, 1)


@pytest.mark.gpu
def test_dropout_draws_anew_in_each_replay() -> None:
    model = made(lambda: Net(dropout=0.5))
    step = CapturedStep(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
    [batch] = batches(1)
    losses = {step(**batch).item() for _ in range(10)}
    assert_captured(step, 1)
    assert len(losses) == 10


def test_a_generator_that_is_stashed_is_named() -> None:
    with _no_stashed_generator(), pytest.raises(RuntimeError, match="cannot be set back in a graph"):
        torch.cuda.get_rng_state()


@pytest.mark.gpu
def test_a_changed_setting_is_captured_anew() -> None:
    data, model = batches(8), made(Net)
    step = CapturedStep(model, adam(model))
    for batch in data:
        step(**batch)
    step.optimizer.param_groups[0]["weight_decay"] = 0.5
    for batch in data:
        step(**batch)
    assert_captured(step, 2)
    model.eval()
    for batch in data:
        step(**batch)
    assert_captured(step, 3)


def test_an_outer_autocast_is_kept() -> None:
    model, seen = made(Net), []
    model.inner.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    step = CapturedStep(model, adam(model))
    with torch.autocast(runtime.DEVICE.type, torch.bfloat16):
        step(**batches(1)[0])
    step(**batches(1)[0])
    assert seen == [torch.bfloat16, torch.float32]


def test_copies_of_the_optimizer_and_the_model() -> None:
    model = made(Net)
    optimizer = adam(model)
    step = CapturedStep(model, optimizer)
    for batch in batches(5):
        step(**batch)
    copy.deepcopy(model)(**{name: t.to(runtime.DEVICE) for name, t in batches(1)[0].items()})
    assert copy.deepcopy(optimizer).state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = made(Net)
        step = CapturedStep(model, adam(model))
    assert "CapturedStep: goes on without a CUDA graph: there is no GPU" in str(said[0].message)
    assert said[0].filename == __file__
    assert step.why_eager == "there is no GPU"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clip": 0.0}, ValueError, "clip must be positive"),
        ({"accumulate": 0}, ValueError, "accumulate must be"),
        ({"autocast": torch.float64}, ValueError, "autocast must be one of"),
        ({"lengths": (0,)}, ValueError, "lengths must be"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
    ],
)
def test_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    model = made(Net)
    given = {"optimizer": adam(model)} | changes
    with pytest.raises(error, match=f"CapturedStep: {message}"):
        CapturedStep(model, **given)


def test_a_batch_of_other_things_is_refused() -> None:
    model = made(Net)
    step = CapturedStep(model, adam(model))
    with pytest.raises(TypeError, match="CapturedStep: the batch must be of tensors and of plain values"):
        step(batches(1)[0]["input_ids"], {1, 2})
    with pytest.raises(ValueError, match="CapturedStep: loss must return a scalar"):
        CapturedStep(model, adam(model), loss=lambda m, **batch: m.embed(batch["input_ids"]))(**batches(1)[0])
