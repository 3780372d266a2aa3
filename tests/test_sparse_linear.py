"""The room sparse_linear: every output and gradient by the rule of check.py, and everything around it."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import guarded_memory, randn, refused, with_tensor_cores

import kernelbook as kb
from kernelbook import arguments, check, operators, runtime
from kernelbook.nn import SparseLinear
from kernelbook.sparse_linear import (
    gather_cublas_backward,
    kernels,
    op,
    python_loop_backward,
    sparse_dw_reference,
    sparse_dx_reference,
)
from kernelbook.sparse_linear.cases import CASES


def _chunks(d_out: int, chunk: int, count: int) -> torch.Tensor:
    """``count`` different chunks, unsorted."""
    return torch.randperm(-(-d_out // chunk), device=runtime.DEVICE)[:count]


def _check_all(**sizes: int) -> None:
    """Every public function with every gradient."""
    for case in CASES.values():
        case.check(case.of(torch.float16, **sizes))


def _plan(r: int, d: int, k: int, split: int, boxes: bool) -> kernels.Plan:
    blocks = {"BLOCK_R": r, "BLOCK_D": d, "BLOCK_K": k, "GROUP": 8}
    return kernels.Plan(kernels.triton.Config(blocks, num_warps=4, num_stages=3), split, boxes)


PLANS = [_plan(64, 32, 32, split, boxes) for split in (1, 3) for boxes in (False, True)]
# The last but one has steps of two chunks and the last tiles of half a chunk: neither may read dX or dW in boxes.
PLANS += [_plan(128, 64, 64, 1, True), _plan(64, 32, 128, 1, True), _plan(32, 32, 16, 1, True)]


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda p: f"{p.config.kwargs['BLOCK_R']}-{p.config.kwargs['BLOCK_K']}-{p.split}-{p.boxes}"
)
@pytest.mark.parametrize("wanted", ("dw", "dx", "both", "compact"))
def test_every_way_to_cut_the_work(plan: kernels.Plan, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, d_in, d_out, chunk = 100, 72, 304, 64
    inputs = {name: randn(*s).half() for name, s in (("dy", (m, d_out)), ("x", (m, d_in)), ("weight", (d_out, d_in)))}
    ids = _chunks(d_out, chunk, 3)
    monkeypatch.setattr(kernels, "strategy", lambda *_: "tiles")
    monkeypatch.setattr(kernels, "plan_backward", lambda *_: plan)
    needs = (wanted != "dw", wanted != "dx", wanted != "dx")

    def ours(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return op.products(dy, x, weight, ids, chunk, None, False, False, wanted == "compact", needs)

    def reference(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        dw = sparse_dw_reference(x, dy, ids, chunk_size=chunk, compact=wanted == "compact")
        all_three = (sparse_dx_reference(dy, weight, ids, chunk_size=chunk), *dw)
        return [t for t, needed in zip(all_three, needs, strict=True) if needed]

    check.check_op(ours, reference, inputs, forward_factor=check.GRADIENT_FACTOR)


def test_without_ids_and_in_mode_dense_it_is_linear() -> None:
    x, weight, bias = (t.requires_grad_() for t in (randn(3, 5, 8), randn(40, 8), randn(40)))
    plain = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, weight, bias))
    for ours in (
        kb.sparse_linear(x, weight, bias),
        kb.sparse_linear(x, weight, bias, _chunks(40, 16, 1), chunk_size=16, mode="dense"),
    ):
        for a, b in zip(torch.autograd.grad(ours.square().sum(), (x, weight, bias)), plain, strict=True):
            assert torch.equal(a, b)


# --- what an inactive chunk holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "d_out", "d_in"), ((16, 90, 24), (64, 300, 24), (64, 150, 4104)))
def test_inactive_chunks_are_zero_and_do_not_leak(chunk: int, d_out: int, d_in: int) -> None:
    # At 4104 inputs the zeros of a chunk are more than one program writes.
    assert (chunk * d_in > kernels.ZERO_PIECE) == (d_in == 4104)
    x, weight, dy = (randn(*shape, dtype=torch.float16) for shape in ((37, d_in), (d_out, d_in), (37, d_out)))
    ids = _chunks(d_out, chunk, 2)
    mask = torch.zeros(-(-d_out // chunk), dtype=torch.bool, device=x.device).index_fill_(0, ids, True)
    mask = mask.repeat_interleave(chunk)[:d_out]
    dy[:, ~mask] = torch.nan
    weight[~mask] = torch.inf
    with check.poisoned_empty():
        dw, db, dx = kb.sparse_backward(x, weight, dy, ids, chunk_size=chunk)
        y = kb.sparse_forward(x, weight, None, ids, chunk_size=chunk)
    assert (dw[~mask] == 0).all() and (db[~mask] == 0).all() and (y[:, ~mask] == 0).all()
    assert all(bool(torch.isfinite(t).all()) for t in (dw, db, dx, y))
    assert dw[mask].any() and db[mask].any()
    exact = dy[:, mask].double() @ weight[mask].double()
    check.compare("dx", dx, exact, dy[:, mask] @ weight[mask], factor=check.GRADIENT_FACTOR).require()


def test_compact_rows_of_a_shorter_chunk_are_zero() -> None:
    x, dy, weight = (randn(*shape, dtype=torch.float16) for shape in ((20, 24), (20, 70), (70, 24)))
    ids = torch.tensor([4, 1], device=x.device)  # chunk 4 has 6 features
    with check.poisoned_empty():
        dw, db = kb.sparse_dw(x, dy, ids, chunk_size=16, compact=True)
        y = kb.sparse_forward(x, weight, None, ids, chunk_size=16, compact=True)
    assert (dw[6:16] == 0).all() and (db[6:16] == 0).all() and (y[:, 6:16] == 0).all()
    assert dw[:6].all() and dw[16:].all()


BAD_IDS = {"too large": [1, 5], "negative": [-1, 2], "twice": [3, 1, 3]}


@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")
    ids = torch.tensor(BAD_IDS[name], device=runtime.DEVICE)
    x, weight, dy = randn(4, 8), randn(70, 8), randn(4, 70)
    message = "active_chunks must not repeat" if name == "twice" else r"active_chunks must lie in \[0, 5\)"
    for call in (
        lambda: kb.sparse_linear(x, weight, None, ids, chunk_size=16),
        lambda: kb.sparse_forward(x, weight, None, ids, chunk_size=16),
        lambda: kb.sparse_dw(x, dy, ids, chunk_size=16),
        lambda: kb.sparse_dx(dy, weight, ids, chunk_size=16),
        lambda: kb.sparse_backward(x, weight, dy, ids, chunk_size=16),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("chunk", (16, 64))
def test_ids_out_of_range_write_nowhere(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU such ids are not looked for: they count as no chunk, though their lower 32 bits may be those of one."""
    monkeypatch.setattr(arguments, "check_index_values", lambda *args, **kwargs: None)
    d_out = 5 * chunk - 8  # rows that tensor descriptors can read
    x, weight, dy = (randn(*shape, dtype=torch.float16) for shape in ((20, 24), (d_out, 24), (20, d_out)))
    good = torch.tensor([3, 1], device=x.device)
    bad = torch.tensor([-1, 3, 5, 2**33 + 2, 1, -(2**32)], device=x.device)
    untouched = guarded_memory(monkeypatch)
    results = []
    for ids, places in ((good, [0, 1]), (bad, [1, 4])):
        given = {"active_chunks": ids, "chunk_size": chunk}
        whole = (*kb.sparse_backward(x, weight, dy, **given), kb.sparse_forward(x, weight, None, **given))
        compact = [part.unflatten(0, (-1, chunk)) for part in kb.sparse_dw(x, dy, **given, compact=True)]
        assert all(part.flatten(1).any(1).nonzero().flatten().tolist() == places for part in compact)
        results.append((*whole, *(part[places] for part in compact)))
    monkeypatch.undo()
    assert untouched()
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected)


# --- PyTorch's machinery --------------------------------------------------------------------------------------------


def test_baselines_compute_the_same() -> None:
    x, weight, dy, ids = randn(9, 12), randn(96, 12), randn(9, 96), _chunks(96, 16, 3)
    exact = (*sparse_dw_reference(x, dy, ids, chunk_size=16), sparse_dx_reference(dy, weight, ids, chunk_size=16))
    for baseline in (python_loop_backward, gather_cublas_backward):
        for ours, ref in zip(baseline(x, weight, dy, ids, chunk_size=16), exact, strict=True):
            torch.testing.assert_close(ours, ref, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", ("x", "weight"))
def test_gradients_of_gradients_where_one_tensor_is_frozen(frozen: str) -> None:
    tensors = {"x": randn(5, 24), "weight": randn(32, 24)}
    [learns] = (t.requires_grad_() for name, t in tensors.items() if name != frozen)
    up, ids = randn(5, 32).requires_grad_(), torch.arange(2, device=runtime.DEVICE)
    found = []
    for call in (lambda x, weight: kb.sparse_forward(x, weight, None, ids, chunk_size=16), F.linear):
        (first,) = torch.autograd.grad(call(*tensors.values()), learns, up, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (up, learns), allow_unused=True, materialize_grads=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_module_trains_its_active_chunks() -> None:
    ours = SparseLinear(24, 70, device=runtime.DEVICE, chunk_size=16, mode="sparse_dw_dx")
    theirs = torch.nn.Linear(24, 70, device=runtime.DEVICE)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.num_chunks == 5 and "chunk_size=16" in repr(ours)
    x = randn(8, 24)
    torch.testing.assert_close(ours(x), theirs(x))
    before = ours.weight.detach().clone()
    ours.active_chunks = torch.tensor([4, 1], device=runtime.DEVICE)
    ours(x).square().sum().backward()
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    changed = (ours.weight != before).any(1)
    assert changed[16:32].all() and changed[64:].all() and not changed[:16].any() and not changed[32:64].any()


# --- edges ----------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "weight of another width": ({"weight": lambda: randn(70, 9)}, r"weight must have shape \(70, 8\), got \(70, 9\)"),
    "weight of another dtype": (
        {"weight": lambda: randn(70, 8).half()},
        r"weight must have the dtype of x \(torch.float32\), got torch.float16",
    ),
    "bias of another length": ({"bias": lambda: randn(69)}, r"bias must have shape \(70,\), got \(69,\)"),
    "small chunks": ({"chunk_size": 15}, "chunk_size must be at least 16, got 15"),
    "unknown mode": ({"mode": "sparse"}, "mode must be one of 'dense', 'sparse_dw', 'sparse_dw_dx', got 'sparse'"),
}


def _good() -> dict[str, Any]:
    ids = torch.tensor([1], device=runtime.DEVICE)
    return {"x": randn(4, 8), "weight": randn(70, 8), "bias": randn(70), "active_chunks": ids, "chunk_size": 16}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    refused(kb.sparse_linear, _good(), changes, f"sparse_linear: {message}")


def test_a_gradient_of_another_shape_is_refused() -> None:
    ids = torch.tensor([1], device=runtime.DEVICE)
    with pytest.raises(ValueError, match=r"sparse_dw: dy must have shape \(4, 70\), got \(5, 70\)"):
        kb.sparse_dw(randn(4, 8), randn(5, 70), ids)
    with pytest.raises(ValueError, match=r"sparse_dx: dy must have shape \(4, 70\), got \(4, 71\)"):
        kb.sparse_dx(randn(4, 71), randn(70, 8), ids)


@with_tensor_cores
@pytest.mark.parametrize("m", (1, 40))
def test_large_and_not_aligned_is_packed(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows are copied together for cuBLAS; here a problem counts as large from the first operation on."""
    monkeypatch.setattr(kernels, "SMALL_FLOP", 0.0)
    packed, run = [], op.run_packed
    monkeypatch.setattr(op, "run_packed", lambda *args: (packed.append(args), run(*args)))
    for d_in, d_out in ((21, 70), (24, 72)):
        packed.clear()
        _check_all(m=m, d_in=d_in, d_out=d_out, chunk=16, count=3)
        assert bool(packed) == (d_in == 21)


@with_tensor_cores
@pytest.mark.parametrize(("limit", "chunk"), (("UNBOXED_FLOP", 16), ("UNBOXED_FLOP", 40), ("SMALL_FLOP", 17)))
def test_large_with_chunks_that_no_box_fits_is_packed(limit: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of dY end with their chunk; a product that takes no part of dY from a chunk is left as it is."""
    packed, run = [], op.run_packed
    monkeypatch.setattr(op, "run_packed", lambda *args: (packed.append(args), run(*args)))
    x, weight, dy = (randn(*s, dtype=torch.float16) for s in ((9, 24), (136, 24), (9, 136)))
    ids = _chunks(136, chunk, 3)
    kb.sparse_backward(x, weight, dy, ids, chunk_size=chunk)
    assert not packed
    monkeypatch.setattr(kernels, limit, 0.0)
    operators.forget_plans()
    kb.sparse_backward(x, weight, dy, _chunks(136, 64, 2), chunk_size=64)
    kb.sparse_forward(x, weight, None, ids, chunk_size=chunk)
    assert not packed
    _check_all(m=9, d_in=24, d_out=136, chunk=chunk, count=3)
    assert packed


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_first_kernel_of_the_backward_thread_may_be_ours() -> None:
    """The kernel is loaded already, and the thread for backward passes has launched nothing yet: it has no CUDA context."""
    code = """
import torch, kernelbook as kb
x, w, dy = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
ids = torch.tensor([2, 0], device="cuda")
first = kb.sparse_backward(x, w, dy, ids)
leaves = [t.requires_grad_() for t in (w, torch.zeros_like(x[0]), x)]
y = kb.sparse_linear(x, *leaves[:2], ids, mode="sparse_dw_dx")
for again, once in zip(torch.autograd.grad(y, leaves, dy), first, strict=True):
    assert torch.equal(again, once)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", (64, 128, 48))
def test_ordinary_loads_are_bitwise_reproducible(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race between the pipeline's copies and the tensor cores showed in most launches of this kind."""
    monkeypatch.setattr(runtime.DeviceProperties, "has_tma", False)
    x, weight, dy = (randn(*s, dtype=torch.bfloat16) for s in ((2000, 2048), (4096, 2048), (2000, 4096)))
    ids = _chunks(4096, chunk, 20)
    first = kb.sparse_backward(x, weight, dy, ids, chunk_size=chunk)
    for _ in range(250):
        again = kb.sparse_backward(x, weight, dy, ids, chunk_size=chunk)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.memory
def test_more_than_2_31_elements_of_dy() -> None:
    m, d_in, d_out = 2**17 + 64, 64, 2**14 + 64
    x, dy = randn(m, d_in, dtype=torch.bfloat16), torch.randn(m, d_out, dtype=torch.bfloat16, device=runtime.DEVICE)
    dw, _ = kb.sparse_dw(x, dy, torch.tensor([256, 3], device=runtime.DEVICE), compact=True)
    last = dy[:, 2**14 :]
    check.compare("dw", dw[:64], last.double().t() @ x.double(), last.t() @ x, factor=check.GRADIENT_FACTOR).require()
