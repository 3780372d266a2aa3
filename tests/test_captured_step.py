"""A training step as a CUDA graph: the losses and weights of a loop written out, bit for bit. Without a GPU it runs eagerly,
or, where a test asks for it, in graphs that are emulated.
"""

import collections
import contextlib
import copy
import gc
import random
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulated_graphs import emulate
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernelbook import runtime, same_bits
from kernelbook.nn import SparseLinear, swap
from kernelbook.nn.gpt import GPT, GPTConfig
from kernelbook.train import CapturedStep, ChunkAdamW, capture
from kernelbook.train.capture import MANY, CapturedCalls, Fingerprint, FixedInputs, _no_stashed_generator, state_of

GPU = runtime.DEVICE.type == "cuda"
# Each test runs in 'make test', eagerly or emulated, and where there is a GPU in 'make test-gpu' too.
pytestmark = [pytest.mark.gpu] if GPU else [pytest.mark.filterwarnings("ignore:.*there is no GPU")]
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


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that can be captured in an emulated graph too."""
    lr: Any = torch.tensor(1e-2, device=runtime.DEVICE)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True, capturable=GPU)


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


def assert_captured(step: CapturedStep, graphs: int) -> None:
    if GPU:
        assert step.why_eager is None
        assert len(step._calls) == graphs
    else:
        assert step.why_eager == "there is no GPU"


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "plain": (Net, {}, 1),
    "clipped": (Net, {"clip": 0.5}, 1),
    "accumulated": (Net, {"accumulate": 3, "clip": 0.5}, 3),
    "checkpoints": (lambda: Net(checkpoints=False), {"accumulate": 2}, 2),
    "checkpoints, with the generator's state": (lambda: Net(checkpoints=True), {}, 1),
    "dropout": (lambda: Net(dropout=0.5), {"accumulate": 2}, 2),
    "bfloat16": (lambda: Net(checkpoints=False), {"autocast": torch.bfloat16}, 1),
}


@pytest.mark.parametrize("case", CASES)
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


class ByHand:
    """A schedule of a user's own, which sets learning rates as numbers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.02 / self.steps


@pytest.mark.parametrize("kind", ("AdamW", "SGD", "fused"))
@pytest.mark.parametrize("schedule", (warmup, ByHand))
def test_learning_rates_change(kind: str, schedule: Any) -> None:
    data, found = batches(12), []
    for captured in (True, False):
        model = made(Net)
        optimizer: Any = adam(model, fused=GPU) if kind == "fused" else adam(model)
        if kind == "SGD":  # runs after the graph, from Python
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = CapturedStep(model, optimizer, scheduler=schedule(optimizer), clip=1.0, capture=captured)
        found.append([step(**batch).item() for batch in data])
        assert not captured or assert_captured(step, 1) is None
    assert found[0] == found[1]
    plain = made(Net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9) if kind == "SGD" else adam(plain)
    assert GPU or found[0] == written_out(plain, optimizer, data, scheduler=schedule(optimizer), clip=1.0)


def test_a_gradient_from_before_is_no_part_of_a_step() -> None:
    data, model, plain = batches(6), made(Net), made(Net)
    step, found = CapturedStep(model, adam(model)), []
    for batch in data:
        model(**{name: t.to(runtime.DEVICE) for name, t in batch.items()}).backward()
        found.append(step(**batch).item())
    assert found == written_out(plain, adam(plain), data)


def test_two_lengths_are_two_graphs() -> None:
    data, model, plain = batches(14, 9, 13, 16), made(Net), made(Net)
    step = CapturedStep(model, adam(model), lengths=(16, 12), pad={"input_ids": 0, "labels": -100})
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


@pytest.mark.parametrize("accumulate", (1, 2))
def test_rows_of_a_sparse_gradient_that_come_twice_are_clipped_as_their_sum(accumulate: int) -> None:
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=sparse).to(runtime.DEVICE)
        before = embedding.weight.detach().clone()
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        step = CapturedStep(
            embedding, optimizer, loss=lambda model, ids: model(ids).square().sum(), clip=0.1, accumulate=accumulate
        )
        for _ in range(accumulate):
            step(torch.tensor([4, 4, 4]))
        assert step.grad_norm is not None
        assert float((embedding.weight.detach() - before).norm()) == pytest.approx(0.1, rel=1e-3)
        found.append((step.grad_norm, embedding.weight.detach()))
    torch.testing.assert_close(*found)


def test_a_sparse_gradient_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    weights = []
    for captured in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(8, 4, sparse=True).to(runtime.DEVICE)
        optimizer = torch.optim.SparseAdam(embedding.parameters())
        step = CapturedStep(embedding, optimizer, loss=lambda m, x: m(x).square().sum(), accumulate=2, capture=captured)
        message = "CapturedStep: goes on without a CUDA graph: a gradient is sparse"
        with pytest.warns(UserWarning, match=message) if captured else contextlib.nullcontext():
            step(torch.tensor([1, 2]))
        for i in range(7):
            step(torch.tensor([i % 3, 2]))
        weights.append(embedding.weight.detach())
    assert torch.equal(*weights)


class Reads(Net):
    """It waits for the device."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        return loss if loss.item() > 0 else -loss


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("build", "line"),
    [
        (Reads, "return loss if loss.item() > 0 else -loss"),
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
    drawn = torch.rand(2, device=runtime.DEVICE)
    torch.manual_seed(5)
    assert losses == written_out(plain, adam(plain), data, accumulate=accumulate)
    assert_same_weights(model, plain)
    # PyTorch is as it was: random numbers, the current stream, and the next graph.
    assert torch.equal(torch.rand(2, device=runtime.DEVICE), drawn)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = made(Net)
    good = CapturedStep(other, adam(other))
    for batch in data:
        good(**batch)
    assert_captured(good, 1)


class Draws(nn.Module):
    """Draws in four ways in each step: a dropout's mask, uniform and normal numbers, and a sample of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(input_ids), 0.3, training=self.training)
        x = x + torch.rand_like(x) + 0.1 * torch.randn(x.shape, device=x.device, dtype=x.dtype)
        logits = self.head(x).flatten(0, 1).float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
        return F.cross_entropy(logits, labels.flatten()) + 0.1 * F.cross_entropy(logits, drawn)


def test_random_numbers_are_those_of_the_loop_and_leave_the_generator_where_it_leaves_it() -> None:
    data = batches(9, 16, 24)
    found = []
    for captured in (False, True):
        model = made(Draws)
        optimizer = adam(model)
        step = CapturedStep(model, optimizer) if captured else None
        torch.manual_seed(7)
        if step is None:
            losses = written_out(model, optimizer, data)
        else:
            losses = [step(**batch).item() for batch in data]
            assert_captured(step, 2)
        state = torch.cuda.get_rng_state() if GPU else torch.get_rng_state()
        found.append((losses, state, torch.rand(4, device=runtime.DEVICE), model))
    (plain, state, after, first), (ours, our_state, our_after, second) = found
    assert ours == plain and len(set(plain)) == len(plain)
    assert torch.equal(our_state, state) and torch.equal(our_after, after)
    assert_same_weights(first, second)


def test_a_generator_that_is_stashed_is_named() -> None:
    with _no_stashed_generator(), pytest.raises(RuntimeError, match="cannot be set back in a graph"):
        torch.cuda.get_rng_state()


def test_copies_of_the_optimizer_and_the_model() -> None:
    model = made(Net)
    optimizer = adam(model)
    step = CapturedStep(model, optimizer)
    for batch in batches(5):
        step(**batch)
    copy.deepcopy(model)(**{name: t.to(runtime.DEVICE) for name, t in batches(1)[0].items()})
    assert copy.deepcopy(optimizer).state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clip": 0.0}, ValueError, "clip must be positive"),
        ({"accumulate": 0}, ValueError, "accumulate must be"),
        ({"autocast": torch.float16}, ValueError, "autocast must be one of"),
        ({"lengths": (0,)}, ValueError, "lengths must be"),
        ({"lengths": 16}, TypeError, "lengths must be a sequence of integers, got int"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
    ],
)
def test_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    model = made(Net)
    given = {"optimizer": adam(model)} | changes
    with pytest.raises(error, match=f"CapturedStep: {message}"):
        CapturedStep(model, **given)


def test_a_step_refuses_other_losses_and_float16() -> None:
    model, [batch] = made(Net), batches(1)
    with pytest.raises(ValueError, match="CapturedStep: loss must return a scalar"):
        CapturedStep(model, adam(model), loss=lambda m, **batch: m.embed(batch["input_ids"]))(**batch)
    step, half = CapturedStep(model, adam(model)), torch.autocast(runtime.DEVICE.type, torch.float16)
    with half, pytest.raises(ValueError, match="vanish without a GradScaler"):
        step(**batch)
    CapturedStep(model, adam(made(Net)), clip=1.0)(**batch)  # of other parameters, as in a loop


# --- what a graph takes for granted -----------------------------------------------------------------------------------


class Parts(nn.Module):
    """Of its three layers a batch names those that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale, self.rows = 1.0, torch.arange(6)

    def forward(self, x: torch.Tensor, parts: tuple[int, ...] = (0,), others: Any = None) -> torch.Tensor:
        x = x.index_select(1, self.rows.to(x.device))
        for i in parts:
            x = torch.tanh(self.layers[i](x))
        return (x * self.scale).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """It runs after the graph, and moves what has a gradient of zero."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.1)


def xs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def same(
    calls: list[dict[str, Any]], make: Callable[[nn.Module], torch.optim.Optimizer], *,
    changes: dict[int, Callable[[nn.Module, torch.optim.Optimizer], Any]] | None = None,
    accumulate: int = 1, graphs: int | None = None, why: str | None = None,
) -> CapturedStep:  # fmt: skip
    """Runs the calls of ``Parts`` in a captured step and in a loop, with changes before some of them; they are the same."""
    model, plain = made(Parts), made(Parts)
    optimizer = make(plain)
    step = CapturedStep(model, make(model), accumulate=accumulate)
    for i, call in enumerate(calls):
        for each, its in ((model, step.optimizer), (plain, optimizer)):
            if i in (changes or {}):
                changes[i](each, its)  # type: ignore[index]
        loss = step(**call)
        if i % accumulate == 0:
            optimizer.zero_grad()
        expected = plain(**{k: v.to(runtime.DEVICE) if isinstance(v, torch.Tensor) else v for k, v in call.items()})
        (expected / accumulate).backward()
        if i % accumulate == accumulate - 1:
            optimizer.step()
        assert loss.item() == expected.item(), f"call {i}"
        assert_same_weights(model, plain)
    if why is None:
        assert step.why_eager is None
    else:
        assert why in str(step.why_eager)
    assert graphs is None or len(step._calls) == graphs
    return step


@pytest.mark.parametrize(("make", "accumulate"), [(sgd, 1), (sgd, 2), (fused, 2), (fused, 1)])
def test_parameters_that_a_batch_leaves_out_have_no_gradient(
    make: Callable[[nn.Module], torch.optim.Optimizer], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds of batches that use other layers, in turn, long after each of them was captured."""
    emulate(monkeypatch)
    parts = [(0,)] * 8 + [(0, 1)] * 8 + [(0,)] * 4 + [(2,)] * 8 + [(0, 1), (0,), (2,), (0,)] * 10
    same([{"x": x, "parts": p} for x, p in zip(xs(len(parts)), parts, strict=True)], make, accumulate=accumulate)


@pytest.mark.parametrize(("make", "accumulate"), [(sgd, 1), (fused, 2)])
def test_what_is_trained_may_change(
    make: Callable[[nn.Module], torch.optim.Optimizer], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)

    def freeze(model: Any, optimizer: Any) -> None:
        model.layers[1].requires_grad_(False)

    def thaw(model: Any, optimizer: Any) -> None:
        model.layers[1].requires_grad_(True)

    def add(model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": list(model.layers[2].parameters())})

    def first_two(model: nn.Module) -> torch.optim.Optimizer:
        model.layers[1].requires_grad_(False)  # type: ignore[index, union-attr]
        optimizer = make(model.layers[0])  # type: ignore[index, arg-type]
        optimizer.param_groups[0]["params"] += list(model.layers[1].parameters())  # type: ignore[index, union-attr]
        return optimizer

    calls = [{"x": x, "parts": (0, 1, 2)} for x in xs(48)]
    same(calls, first_two, changes={10: thaw, 20: add, 30: freeze, 38: thaw}, accumulate=accumulate)


def number(model: Any, optimizer: Any) -> None:
    model.scale = 3.0


def tensor(model: Any, optimizer: Any) -> None:
    model.rows = torch.arange(5, -1, -1, device=runtime.DEVICE)


def assign(model: Any, optimizer: Any) -> None:
    model.layers[0].load_state_dict({k: 2 * v for k, v in model.layers[0].state_dict().items()}, assign=True)


def hook(model: Any, optimizer: Any) -> None:
    model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)


@pytest.mark.parametrize("change", (number, tensor, assign, hook))
@pytest.mark.parametrize("make", (sgd, fused))
def test_a_change_of_the_model_is_seen(
    change: Callable[[Any, Any], None], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    same([{"x": x} for x in xs(16)], make, changes={8: change}, graphs=2)


def test_modes_of_parts_and_of_the_caller_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = made(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    step = CapturedStep(model, fused(model), loss=lambda m, x: m(x).square().mean())
    for x in xs(5):
        step(x)
    mean = model[1].running_mean  # type: ignore[index]
    model[1].eval()  # type: ignore[index]
    before = mean.clone()
    for x in xs(5):
        step(x)
    assert torch.equal(before, mean)
    autocast = torch.autocast(runtime.DEVICE.type, torch.bfloat16)
    for within, graphs in ((autocast, 3), (contextlib.nullcontext(), 3), (same_bits(), 4)):
        with within:
            for x in xs(5):
                step(x)
        assert len(step._calls) == graphs


class Settings(nn.Module):
    """A module with something of each kind that a state has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.rate, self.none, self.names, self.empty = 0.5, None, ["a"], {}
        self.sizes = {"a": 1}
        self.long = list(range(MANY + 1))
        self.table = torch.zeros(3)
        self.config = types.SimpleNamespace(cap=1.0)
        self.register_buffer("mean", torch.zeros(3))


CHANGES: dict[str, Callable[[Settings], object]] = {
    "a number": lambda m: setattr(m, "rate", 0.25),
    "a tensor where a number was, of the same value": lambda m: setattr(m, "rate", torch.tensor(0.5)),
    "a new attribute": lambda m: setattr(m, "other", 1),
    "a part of a list": lambda m: m.names.__setitem__(0, "b"),
    "another name in a dictionary": lambda m: m.sizes.update(b=m.sizes.pop("a")),
    "a dictionary that was empty": lambda m: m.empty.update(a=2),
    "a long list becomes short": lambda m: m.long.pop(),
    "another tensor": lambda m: setattr(m, "table", torch.zeros(3)),
    "other storage of a weight": lambda m: setattr(m.inner[0].weight, "data", m.inner[0].weight.data.clone()),
    "another weight": lambda m: setattr(m.inner[0], "bias", nn.Parameter(torch.zeros(3))),
    "a frozen weight": lambda m: m.inner[0].weight.requires_grad_(False),
    "a mode": lambda m: m.inner[1].eval(),
    "another module": lambda m: m.inner.__setitem__(1, nn.AlphaDropout(0.5)),
    "a module where there was none": lambda m: m.inner[1].add_module("part", nn.ReLU()),
    "a class": lambda m: swap(m, same_bits=True, quiet=True),
    "a hook": lambda m: m.inner[0].register_forward_hook(lambda *_: None),
    "a configuration": lambda m: setattr(m.config, "cap", 2.0),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_is_known_again_and_no_change_is_missed(change: Callable[[Settings], object]) -> None:
    model, known = Settings(), Fingerprint()
    first = known(model, ("rate", 1))
    model.inner[0].weight.data.add_(1)  # values may change
    assert known(model, ("rate", 1)) is first
    assert known(model, ("rate", 2)) is not first
    assert known(model, ("rate", 1)) is first
    change(model)
    assert known(model, ("rate", 1)) is not first


def test_the_state_of_a_model_has_its_chunks() -> None:
    layer = SparseLinear(64, 64, chunk_size=16)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))
    states = [state_of(model)]
    for name, value in (
        ("active_chunks", torch.tensor([0, 1])), ("active_chunks", torch.tensor([2])), ("mode", "dense"),
    ):  # fmt: skip
        setattr(layer, name, value)
        states.append(state_of(model))
    assert layer.active_chunks is not None
    layer.active_chunks.fill_(1)  # another value of the same tensor is read by the graph that there is
    assert state_of(model) == states[-1]
    assert len(set(states)) == 4


Pair = collections.namedtuple("Pair", ("x", "parts"))


def test_a_named_tuple_is_a_part_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model, given = made(Parts), xs(8)
    step = CapturedStep(model, fused(model), loss=lambda m, pair: m(pair.x, pair.parts))
    plain = made(Parts)
    other = CapturedStep(plain, fused(plain), capture=False)
    assert [step(Pair(x, (0, 2))).item() for x in given] == [other(x, (0, 2)).item() for x in given]
    assert len(step._calls) == 1
    step = CapturedStep(model, fused(model), loss=lambda m, batch: m(**batch))  # a tokenizer's batch is no dict
    for x in given:
        step(collections.UserDict(x=x))
    assert len(step._calls) == 1 and step.why_eager is None


def test_a_hyperparameter_with_a_schedule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = made(Parts)
    optimizer = fused(model)
    optimizer.param_groups[0]["lr"] = 0.1
    step = CapturedStep(model, optimizer)
    with pytest.warns(UserWarning, match=r"CapturedStep: goes on .*: 8 calls in a row .* the next: optimizer betas$"):
        for i, x in enumerate(xs(20)):
            optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * i, 0.99)
            step(x)
    assert "optimizer betas" in str(step.why_eager)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for x in xs(20):
            step(x)
    assert step.why_eager is None
    assert len(step._calls) == 1


@pytest.mark.parametrize("accumulate", (1, 2))
def test_a_number_in_the_batch_that_changes_is_named(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with pytest.warns(UserWarning, match=r"calls in a row were of as many kinds.*: batch \['others'\]$"):
        same([{"x": x, "others": i} for i, x in enumerate(xs(24))], sgd, accumulate=accumulate, why="['others']")


def test_types_of_values_are_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = FixedInputs()
    values: list[Any] = [{"x": v} for v in (1, True, 1.0, None, {}, [], (), (1,), [1], {"y": 1})]
    kinds = [fixed((), value, runtime.DEVICE)[0] for value in [{}, *values]]
    assert len(set(kinds)) == len(kinds)
    assert fixed((), {"x": 1}, runtime.DEVICE)[0] == kinds[1]


def test_kinds_and_their_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used is dropped, and captured anew where it comes back."""
    emulate(monkeypatch)
    monkeypatch.setattr(capture, "MAX_KINDS", 2)
    calls = [{"x": x, "others": i // 6 % 3} for i, x in enumerate(xs(54))]
    step = same(calls, sgd, graphs=2)
    assert len(step._inputs._sets) == 2
    assert len(step._calls._kinds) == 2


class Lucky(Parts):
    """A layer is left out by chance."""

    draw: Callable[[], float]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, (0, 1) if type(self).draw() < 0.5 else (0,))


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (random.random, "random"),
        (lambda: float(np.random.rand()), "numpy.random"),
        (lambda: float(torch.rand(())), "torch's on the CPU"),
    ],
)
def test_random_numbers_of_the_host_are_named(
    draw: Callable[[], float], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(Lucky, "draw", staticmethod(draw), raising=False)
    losses = []
    for captured in (True, False):
        random.seed(0)
        np.random.seed(0)
        model = made(Lucky)
        torch.manual_seed(0)
        step = CapturedStep(model, fused(model), capture=captured)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses.append([step(x).item() for x in xs(12)])
        if captured:
            [found] = [w for w in said if f"random numbers are drawn on the host ({named})" in str(w.message)]
            assert found.filename == __file__
            assert len(step._calls) == 0
    assert losses[0] == losses[1]


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_generator_to_the_graphs_from_before() -> None:
    """Seeds reach them, and they and eager draws share one sequence of numbers."""
    model, plain, data = made(lambda: Net(dropout=0.5)), made(lambda: Net(dropout=0.5)), batches(16)
    step, other = CapturedStep(model, adam(model)), CapturedStep(plain, adam(plain), capture=False)
    for each in (step, other):
        torch.manual_seed(3)
        for batch in data[:6]:
            each(**batch)
    assert_captured(step, 1)
    bad = made(Reads)
    failing = CapturedStep(bad, adam(bad), warm=1)
    with pytest.warns(UserWarning, match="goes on without a CUDA graph"):
        for batch in data[:3]:
            failing(**batch)
    found = []
    for each in (step, other):
        torch.manual_seed(7)
        draws = []
        for batch in data[6:]:
            draws += [each(**batch).item(), torch.rand((), device=runtime.DEVICE).item()]
        found.append(draws)
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])


def test_a_step_that_is_dropped_is_gone() -> None:
    model = made(Net)
    optimizer = adam(model)
    step = CapturedStep(model, optimizer)
    step(**batches(1)[0])
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None
    assert not optimizer._optimizer_load_state_dict_post_hooks
    optimizer.load_state_dict(optimizer.state_dict())


def test_half_a_gradient_does_not_outlive_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model, data = made(Parts), xs(12)
    step = CapturedStep(model, sgd(model), accumulate=2)
    for x in data[:9]:
        step(x)
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    plain = copy.deepcopy(model)
    optimizer = sgd(plain)
    optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for each in (step, CapturedStep(plain, optimizer, accumulate=2, capture=False)):
        for x in data[10:]:
            each(x)
    assert_same_weights(model, plain)


# --- where, and what ---------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_on_a_gpu_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Parts()
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    with pytest.warns(UserWarning, match="the model is on the cpu"):
        step = CapturedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step.why_eager == "the model is on the cpu"
    assert step(xs(1)[0]).device.type == "cpu"
    with pytest.warns(UserWarning, match="the model is on the cpu"):
        assert not CapturedCalls("x", device=torch.device("cpu")).captures


def test_a_model_on_several_devices_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = made(Parts)
    model.layers[2].to("meta")  # type: ignore[index, union-attr]
    with pytest.warns(UserWarning, match="the model is on several devices"):
        step = CapturedStep(model, sgd(model.layers[0]))  # type: ignore[index, arg-type]
    step(xs(1)[0])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_another_gpu_than_the_current_one() -> None:
    models = [made(Net).to("cuda:1") for _ in range(2)]
    steps = [CapturedStep(model, adam(model), capture=i == 0) for i, model in enumerate(models)]
    data = batches(8)
    assert [steps[0](**b).item() for b in data] == [steps[1](**b).item() for b in data]
    assert_captured(steps[0], 1)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.ones(2), "numpy.ndarray"),
        (np.float32(1.0), "numpy.float32"),
        ({1, 2}, "builtins.set"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, requires_grad=True), "wants a gradient"),
    ],
)
def test_a_batch_of_other_things_is_named(value: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    with pytest.warns(UserWarning, match=rf"without a CUDA graph: the batch has a .*{named}.*\['others'\]\[0\]"):
        same([{"x": x, "others": [value]} for x in xs(6)], sgd, why=named)


@pytest.mark.gpu
def test_pinned_memory_may_be_filled_anew_at_once() -> None:
    model, plain = made(Parts), made(Parts)
    step, other = CapturedStep(model, sgd(model)), CapturedStep(plain, sgd(plain), capture=False)
    pinned = torch.empty(4, 6).pin_memory()
    large = torch.ones(8192, 8192, device=runtime.DEVICE)
    losses = []
    for x in xs(10):
        pinned.copy_(x)
        for _ in range(4):
            large @ large  # the device is behind
        losses.append(step(pinned))
        pinned.fill_(torch.nan)
    assert [loss.item() for loss in losses] == [other(x).item() for x in xs(10)]


def test_what_cannot_be_filled_up_is_refused() -> None:
    model = made(Net)
    [batch] = batches(1, 9)
    step = CapturedStep(model, adam(model), lengths=(9, 16))
    with pytest.raises(ValueError, match=r"CapturedStep: labels must have a dimension 1 .* got shape \(4,\)"):
        step(input_ids=batch["input_ids"], labels=torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="CapturedStep: the batch must be given by name where lengths are, got 2"):
        step(*batch.values())
    step(**batch)  # nothing is filled up
    with pytest.raises(ValueError, match="CapturedStep: the batch must have an attention_mask where it is filled up"):
        step(**batches(1, 8)[0])
    # What says with no elements that nothing is left out stays what it is.
    assert step._padded((), batch | {"attention_mask": torch.ones(0, 1, 1, 1)})["attention_mask"].shape == (0, 1, 1, 1)
