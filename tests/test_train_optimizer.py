"""ChunkAdamW against torch.optim.AdamW, and the compact gradients that it takes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensors import default_dtype
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kernelbook import check, sparse_linear
from kernelbook.nn import SparseLinear, compact_sparse_linear
from kernelbook.train import ChunkAdamW, optimizer

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
CHUNK = 16
NUMBERS = ("lr", "eps", "weight_decay")


def _rows(ids: list[int], device: torch.device) -> torch.Tensor:
    return (torch.tensor(ids, device=device)[:, None] * CHUNK + torch.arange(CHUNK, device=device)).flatten()


def _sparse(rows: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, like.shape, check_invariants=True)


def _pair(shape: tuple[int, ...], device: torch.device, **how: Any) -> tuple[Any, ...]:
    start = torch.randn(shape, device=device)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    return ours, ChunkAdamW([ours], chunk_size=CHUNK, **SETTINGS, **how), theirs


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ((64, 40), (49, 33), (48,), (20, 700)))
def test_dense_gradients_are_adamw(shape: tuple[int, ...], device: torch.device) -> None:
    ours, adam, theirs = _pair(shape, device)
    torchs = torch.optim.AdamW([theirs], **SETTINGS)
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        theirs.grad = 0.5 * ours.grad
        adam.step(scale=torch.tensor([0.5], device=device))
        torchs.step()
    _close(ours, theirs)


SEQUENCE = ([3, 0], [1], [0, 2, 1], [0])


@pytest.mark.parametrize("shape", ((64, 40), (64,)))
def test_decay_is_adamw_on_zeros(shape: tuple[int, ...], device: torch.device) -> None:
    ours, adam, theirs = _pair(shape, device, inactive="decay", unique_rows=True)
    torchs = torch.optim.AdamW([theirs], **SETTINGS)
    for ids in (*SEQUENCE, range(4)):
        rows = _rows([*ids], device)
        values = torch.randn(len(rows), *shape[1:], device=device)
        ours.grad = _sparse(rows, values, ours)
        theirs.grad = torch.zeros_like(theirs).index_copy_(0, rows, values)
        if len(ids) == 4:  # a dense step among the sparse ones
            ours.grad = theirs.grad.clone()
        adam.step()
        torchs.step()
    _close(ours, theirs)


@pytest.mark.parametrize("shape", ((64, 40), (64,)))
def test_skip_is_adamw_on_each_chunks_own_gradients(shape: tuple[int, ...], device: torch.device) -> None:
    ours, adam, theirs = _pair(shape, device, inactive="skip", unique_rows=True)
    pieces = [torch.nn.Parameter(piece.detach().clone()) for piece in theirs.split(CHUNK)]
    torchs = [torch.optim.AdamW([piece], **SETTINGS) for piece in pieces]
    for ids in SEQUENCE:
        rows = _rows(ids, device)
        values = torch.randn(len(rows), *shape[1:], device=device)
        ours.grad = _sparse(rows, values, ours)
        before = ours.detach().clone()
        adam.step()
        for chunk, value in zip(ids, values.split(CHUNK), strict=True):
            pieces[chunk].grad = value
            torchs[chunk].step()
        rest = _rows([c for c in range(4) if c not in ids], device)
        assert torch.equal(ours[rest], before[rest])
    _close(ours, torch.cat([piece.detach() for piece in pieces]))
    assert adam.state[ours]["counts"].tolist() == [3, 2, 1, 1]


@pytest.mark.parametrize("default", (torch.float16, torch.bfloat16, torch.float64), ids=str)
def test_pytorchs_default_dtype_changes_nothing(default: torch.dtype, device: torch.device) -> None:
    ours, adam, theirs = _pair((32, 8), device)
    twin = ChunkAdamW([theirs], chunk_size=CHUNK, **SETTINGS)
    ours.grad, theirs.grad = torch.ones_like(ours), torch.ones_like(ours)
    for counted in (0, 300):  # bfloat16 counts to 256
        for each, parameter, dtype in ((adam, ours, torch.float32), (twin, theirs, default)):
            with default_dtype(dtype):
                each.step()
            each.state[parameter]["counts"] += counted
    assert torch.equal(ours, theirs) and twin.state[theirs]["counts"].tolist() == [302, 302]


def test_rows_that_come_twice_are_added(device: torch.device) -> None:
    ours, adam, theirs = _pair((32, 8), device)
    rows = _rows([1, 1], device)
    values = torch.randn(32, 8, device=device)
    ours.grad = _sparse(rows, values, ours)
    adam.step()
    twin = ChunkAdamW([theirs], chunk_size=CHUNK, unique_rows=True, **SETTINGS)
    if device.type == "cpu":  # where to look costs no wait
        theirs.grad = _sparse(rows, values, theirs)
        with pytest.raises(ValueError, match="must have each row once with unique_rows=True, got some twice"):
            twin.step()
    theirs.grad = _sparse(_rows([1], device), values[:CHUNK] + values[CHUNK:], theirs)
    twin.step()
    _close(ours, theirs)


def test_rows_out_of_range_are_nobodys(device: torch.device) -> None:
    """On a GPU: those whose lower 32 bits may be a row's, negative ones, and the one after the last."""
    start, size = torch.rand(3, CHUNK + 1, 24, device=device), CHUNK + 1
    first = torch.tensor([2**32 + CHUNK, -1, 2**37, -(2**32), 2**31, size, 0, CHUNK], device=device)
    rows, grad = first[:, None] + torch.arange(CHUNK, device=device), torch.randn(len(first), CHUNK, 24, device=device)
    rate, counts = torch.ones(1, device=device), torch.full((2,), 2.0, device=device)
    launch, found = optimizer._launch(CHUNK, True, False), []
    numbers = optimizer._numbers(SETTINGS)
    for listed in (slice(None), slice(-2, None)):
        params, given = start.clone(), (rows[listed].flatten(), grad[listed].flatten(0, 1))
        launch((len(first[listed]), 1), *given, *params, counts, rate, rate, size, 24, len(first[listed]), *numbers)
        found.append(params)
    assert torch.equal(*found) and (found[0] != start).all()


def test_a_step_before_the_backward_pass_is_noticed(device: torch.device) -> None:
    weight, x = torch.nn.Parameter(torch.randn(1, 24, device=device)), torch.randn(4, 24, device=device)
    loss = (x.requires_grad_() @ weight.t()).sum()
    weight.grad = torch.ones_like(weight)
    ChunkAdamW([weight], chunk_size=CHUNK).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_learning_rate_on_the_device_and_a_saved_state(device: torch.device) -> None:
    ours, adam, theirs = _pair((32, 8), device)
    lr = torch.tensor([1e-2], device=device)
    other = ChunkAdamW([theirs], chunk_size=CHUNK, **{**SETTINGS, "lr": lr})
    theirs.grad = torch.randn_like(ours)
    ours.grad = torch._neg_view(-theirs.grad)  # which is yet to be negated
    adam.step(), other.step()
    assert torch.equal(ours, theirs)
    assert adam.step(lambda: 7) == 7  # a closure, as every optimizer takes
    fresh = ChunkAdamW([ours], chunk_size=CHUNK, **SETTINGS)
    for _ in range(2):  # as accelerate, which loads an optimizer's own state first
        fresh.load_state_dict(copy.deepcopy(adam.state_dict()))
    theirs.data.copy_(ours)
    adam.step()
    expected = ours.detach().clone()
    ours.data.copy_(theirs)
    fresh.step()
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        ({"inactive": "freeze"}, ValueError, "inactive must be one of 'skip', 'decay', got 'freeze'"),
        ({"betas": (1.0, 0.9)}, ValueError, "betas must lie in"),
        ({"lr": -1.0}, ValueError, "lr must not be negative, and finite, got -1.0"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"params": [torch.nn.Parameter(torch.zeros(2, 2).half())]}, TypeError, "params must have dtype float32"),
        ({"params": [torch.nn.Parameter(torch.zeros(2, 3).t())]}, ValueError, "params must be contiguous"),
        *(({name: float("nan")}, ValueError, f"{name} must not be negative.*, got nan") for name in NUMBERS),
        ({"betas": (0.9,)}, ValueError, "betas must lie in"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got shape \(2,\)"),
        ({"lr": torch.ones(1, device="meta")}, ValueError, "lr must be on the device of params"),
    ),
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str, device: torch.device) -> None:
    given = {"params": [torch.nn.Parameter(torch.zeros(2, 2, device=device))], **arguments}
    if device.type == "cuda":
        given["params"] = [torch.nn.Parameter(p.detach().to(device)) for p in given["params"]]
    with pytest.raises(error, match=f"ChunkAdamW: {message}"):
        ChunkAdamW(**given)
    adam = ChunkAdamW([torch.nn.Parameter(torch.zeros(2, 2, device=device))])
    with pytest.raises(error, match=f"ChunkAdamW: {message}"):
        adam.add_param_group(given)
    assert len(adam.param_groups) == 1


@pytest.mark.parametrize(("scale", "error"), ((0.5, TypeError), (torch.ones(0), ValueError)), ids=("number", "empty"))
def test_a_scale_is_one_number_on_the_device(scale: Any, error: type[Exception], device: torch.device) -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    param.grad = torch.ones_like(param)
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    with pytest.raises(error, match="ChunkAdamW: scale must"):
        ChunkAdamW([param]).step(scale=scale)
    assert not param.any()


def test_the_state_of_another_optimizer_and_a_parameter_that_was_changed_are_refused(device: torch.device) -> None:
    ours, adam, _ = _pair((32, 8), device)
    with pytest.raises(ValueError, match="must be of a ChunkAdamW, got groups without chunk_size, inactive"):
        adam.load_state_dict(torch.optim.AdamW([ours]).state_dict())
    ours.grad, ours.data = torch.ones_like(ours), ours.data.t().contiguous().t()
    with pytest.raises(ValueError, match="ChunkAdamW: params must be contiguous"):
        adam.step()


# --- compact gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("sparse_dw", "sparse_dw_dx"))
@pytest.mark.parametrize("bias", (True, False))
def test_compact_gradients_are_those_of_sparse_linear(mode: str, bias: bool, device: torch.device) -> None:
    ids = torch.tensor([2, 0], device=device)
    inputs = {"x": torch.randn(3, 5, 24, device=device), "weight": torch.randn(64, 24, device=device)}
    inputs["bias"] = torch.randn(64, device=device) if bias else None  # type: ignore[assignment]
    up = torch.randn(3, 5, 64, device=device)

    def run(layer: Any) -> list[Any]:
        leaves = {n: None if t is None else t.clone().requires_grad_() for n, t in inputs.items()}
        y = layer(*leaves.values(), ids, chunk_size=CHUNK, mode=mode)
        y.backward(up)
        return [y.detach(), *(leaf.grad for leaf in leaves.values() if leaf is not None)]

    ours, theirs = run(compact_sparse_linear), run(sparse_linear)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.is_sparse == (mine.shape[0] == 64)
        torch.testing.assert_close(mine.to_dense() if mine.is_sparse else mine, other)
    assert ours[2]._values().shape == (32, 24)
    assert torch.equal(ours[2]._indices()[0], _rows([2, 0], device))


def test_compact_gradients_under_autocast(device: torch.device) -> None:
    layer = SparseLinear(24, 64, chunk_size=CHUNK, compact_gradient=True).to(device)
    x = torch.randn(40, 24, device=device)
    assert not torch.autograd.grad(layer(x).sum(), layer.weight)[0].is_sparse  # without ids
    layer.active_chunks = torch.tensor([3, 1], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    grad = layer.weight.grad
    assert grad is not None and grad.is_sparse and grad.dtype == torch.float32
    rows = _rows([3, 1], device)
    truth = 2 * F.linear(x.double(), layer.weight.detach().double(), layer.bias.detach().double()).t() @ x.double()
    with torch.autocast(device.type, torch.bfloat16):
        plain = F.linear(x, layer.weight, layer.bias)
        (baseline,) = torch.autograd.grad(plain.float().square().sum(), [layer.weight])
    check.compare(
        "dW", grad._values(), truth[rows], baseline[rows], factor=check.GRADIENT_FACTOR, floor=2**-8
    ).require()


def test_compact_gradients_refuse_what_they_cannot(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"SparseLinear: out_features must be a multiple of chunk_size \(16\)"):
        SparseLinear(8, 40, chunk_size=16, compact_gradient=True)
    with pytest.raises(ValueError, match="SparseLinear: mode must be one of 'dense', 'sparse_dw', 'sparse_dw_dx'"):
        SparseLinear(8, 40, mode="sparse")
    x, weight = torch.randn(4, 8, device=device), torch.randn(40, 8, device=device)
    ids = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match=r"chunk_size must divide the features \(40\), got 16"):
        compact_sparse_linear(x, weight, None, ids, chunk_size=16)
    with pytest.raises(ValueError, match="mode must be one of 'sparse_dw', 'sparse_dw_dx', got 'dense'"):
        compact_sparse_linear(x, weight, None, ids, chunk_size=8, mode="dense")
    with pytest.raises(ValueError, match="compact_sparse_linear: chunk_size must be at least 16, got 8"):
        compact_sparse_linear(x, weight, None, ids, chunk_size=8)


def test_another_chunk_size_than_the_layers_is_refused(device: torch.device) -> None:
    """Two chunks of 16 rows are as many rows as one of 32, but not the same."""
    layer = SparseLinear(8, 128, bias=False, chunk_size=16, compact_gradient=True).to(device)
    layer.active_chunks = torch.tensor([1, 6], device=device)
    layer(torch.randn(4, 8, device=device)).sum().backward()
    before = layer.weight.detach().clone()
    for size, message in (
        (32, r"whole chunks of chunk_size \(32\) rows"),
        (64, "whole chunks of 64 rows, got 32 rows"),
    ):
        with pytest.raises(ValueError, match=f"ChunkAdamW: .* {message}"):
            ChunkAdamW(layer.parameters(), chunk_size=size).step()
    assert torch.equal(layer.weight, before)
    ChunkAdamW(layer.parameters(), chunk_size=16).step()
    assert not torch.equal(layer.weight, before)


def test_fsdp2_is_refused_by_name(tmp_path: Path) -> None:
    """Sparse gradients cannot be reduced by it, and the optimizer's kernel would see a shard."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        layer = SparseLinear(8, 32, chunk_size=CHUNK, compact_gradient=True)
        model = torch.nn.Sequential(layer)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"ChunkAdamW: params must be ordinary tensors, got DTensor; .*FSDP2"):
            ChunkAdamW(model.parameters())
        layer.active_chunks = torch.tensor([0])
        with pytest.raises(NotImplementedError, match="SparseLinear: compact_gradient must be False under FSDP"):
            model(torch.randn(3, 8))
    finally:
        dist.destroy_process_group()


def test_compact_gradients_are_refused_in_one_graph_and_right_in_several(device: torch.device) -> None:
    layer = SparseLinear(8, 32, chunk_size=CHUNK, compact_gradient=True).to(device)
    layer.active_chunks = torch.tensor([1], device=device)
    x = torch.randn(3, 8, device=device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="set compact_gradient=False, or leave out fullgraph=True"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    found = []
    for each in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        each(x).square().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.is_sparse
        found.append(layer.weight.grad.to_dense())
    torch.testing.assert_close(*found)
