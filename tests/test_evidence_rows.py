"""Rows of experts, and rows by a list: what no other test of ``moe_lora`` and ``scatter_ffn`` noticed when faults were planted
in their kernels. Sizes end within tiles, and what must not count is NaN or lies at the end of memory, which is watched."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kernelbook as kb

# isort: split
import pytest
import torch
import triton
from tensors import randn

from kernelbook import check, operators, runtime
from kernelbook.moe_lora import grouped, kernels, moe_lora_reference, op
from kernelbook.moe_lora.routing import tiles_of_height
from kernelbook.scatter_ffn import kernels as ffn_kernels
from kernelbook.scatter_ffn.cases import CASES
from kernelbook.study.moe_lora import lora_gradients, shrink_products


@contextlib.contextmanager
def _tiles(of: Any = ffn_kernels, **configs: Any) -> Iterator[None]:
    """Within the context a room's kernels are cut so; a function's name is that of a rule, which says so for every call."""
    with pytest.MonkeyPatch.context() as patch:
        for name, config in configs.items():
            patch.setattr(of, name, (lambda *_, c=config: c) if callable(getattr(of, name)) else config)
        operators.forget_plans()
        yield
    operators.forget_plans()


# --- moe_lora -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "experts"), ((7, 9), (300, 600)), ids=("one program", "three programs"))
def test_tiles_that_no_rows_need_say_so(rows: int, experts: int) -> None:
    """One expert has all rows, so that each list has nearly as many entries too many as there are experts."""
    with check.poisoned_empty():
        routing = kb.route(torch.full((rows, 1), 5, device=runtime.DEVICE), experts)
    assert routing.offsets.tolist() == [0] * 6 + [rows] * (experts - 5)
    for height in kernels.HEIGHTS:
        begin, count = tiles_of_height(rows, experts, height)
        groups = routing.lists[begin : begin + 3 * count : 3].tolist()
        used = -(-rows // height)
        assert groups == [5] * used + [-1] * (count - used)


def _routed(*counts: int, skipped: int = 0) -> tuple[torch.Tensor, kb.Routing]:
    """Ids (T, 1) of so many tokens for each expert, mixed but for the first, which is expert 0's, and the last, the last one's."""
    experts = len(counts)
    inner = [e for e, n in enumerate((*counts, skipped)) for _ in range(n - (e in (0, experts - 1)))]
    mixed = [inner[i] for i in torch.randperm(len(inner)).tolist()]
    ids = torch.tensor([0, *mixed, experts - 1], device=runtime.DEVICE).view(-1, 1)
    return ids, kb.route(ids, experts)


@pytest.mark.parametrize("block_n", (16, 64))
@pytest.mark.parametrize("lora", ("fused", "split"))
@pytest.mark.parametrize("rank", (16, 40))
def test_products_of_rows_in_small_and_large_tiles(rank: int, lora: str, block_n: int) -> None:
    """Experts with more rows than a small tile, with as many, and with fewer; U has no element that nobody wrote."""
    ids, routing = _routed(20, 16, 5, skipped=7)
    tiles = kernels.tiles(4, 2, BLOCK_M=32, BLOCK_N=block_n, BLOCK_K=16, SMALL_M=16)
    w, a = randn(3, 48, 40, dtype=torch.float16), randn(3, rank, 48, dtype=torch.float16) / 7
    x, b = randn(48, 48, dtype=torch.float16), randn(3, 40, rank, dtype=torch.float16) / 4
    exact = moe_lora_reference(*(t.double() for t in (x, w, a, b)), ids)
    chosen = torch.cat([a, a.new_zeros(1, rank, 48)])[ids[:, 0]].double()
    exact_u = (chosen @ x.double()[:, :, None])[routing.order.long(), :, 0]
    for weight in (w, w.transpose(1, 2).contiguous().transpose(1, 2)):
        for rows, in_order in ((x, False), (x[routing.order.long()], True)):
            call = op.call_of("moe_lora", rows, weight, routing, a, b, strategy=lora, grouped_in=in_order)
            with _tiles(of=kernels, rows_tiles=tiles), check.poisoned_empty():
                y, u = op._moe_lora.execute(
                    SimpleNamespace(plan=op._moe_lora.plan(*call, True), forms=None), (*call, True)
                )
            assert check.relative_error(y, exact) < 2e-3
            assert check.relative_error(u[:, :rank], exact_u) < 2e-3
            assert (u[:, rank:] == 0).all() and (u[-7:] == 0).all() and (y[ids[:, 0] == 3] == 0).all()


def test_shares_that_do_not_divide_a_long_sum() -> None:
    """Three steps for two programs, and the last token's row ends where memory ends."""
    ids, routing = _routed(5, 4)
    x, a, dy, b = randn(9, 96), randn(2, 3, 96), randn(9, 32), randn(2, 32, 3)
    tiles = kernels.tiles(4, 2, BLOCK_M=16, BLOCK_K=32, BLOCK_R=16, SPLIT=2)
    with _tiles(of=kernels, shrink_tiles=tiles):
        u, _ = shrink_products(x, dy, a, b, routing)
    exact = (a.double()[ids[:, 0]] @ x.double()[:, :, None])[routing.order.long(), :, 0]
    assert check.relative_error(u[:, :3], exact) < 1e-6


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_a_nan_stays_with_its_expert(dtype: torch.dtype) -> None:
    """That of the first token, which stands in for rows that a tile has not."""
    _, routing = _routed(3, 5, 1)
    x, dy = randn(9, 20, dtype=dtype), randn(9, 24, dtype=dtype)
    a, b = randn(3, 4, 20, dtype=dtype), randn(3, 24, 4, dtype=dtype)
    x[0], dy[0] = torch.nan, torch.nan
    for saved in (None, shrink_products(x, dy, a, b, routing)):
        for grad in lora_gradients(x, dy, a, b, routing, saved=saved):
            assert grad[0].isnan().any() and grad[1:].isfinite().all()
    gates = torch.ones(9, 1, dtype=dtype, device=x.device)
    gates[0] = torch.nan
    w = randn(3, 20, 24, dtype=dtype).requires_grad_()
    y = kb.moe_lora(x.nan_to_num(), w, None, None, routing, gates=gates)
    [dw] = torch.autograd.grad(y, w, dy.nan_to_num())
    assert dw[0].isnan().any() and dw[1:].isfinite().all()


def test_sums_over_the_only_row_there_is() -> None:
    """A tile has many more, and the lists of so small a routing end before."""
    routing = kb.route(torch.zeros(1, 1, dtype=torch.int64, device=runtime.DEVICE), 1)
    x, dy, a, b = (randn(*s, dtype=torch.float16) for s in ((1, 8), (1, 24), (1, 4, 8), (1, 24, 4)))
    u, d = (x @ a[0].t()).double(), (dy @ b[0]).double()
    for saved in (None, shrink_products(x, dy, a, b, routing)):
        da, db = lora_gradients(x, dy, a, b, routing, saved=saved)
        assert check.relative_error(da[0], d.t() @ x.double()) < 2e-3
        assert check.relative_error(db[0], dy.double().t() @ u) < 2e-3


def test_a_token_with_many_slots() -> None:
    """More than any model has, all unrolled."""
    values, gates, x = randn(3 * 20, 10), randn(3, 20), randn(3, 10)
    out, dgates = torch.empty_like(x), torch.empty_like(gates)
    step = grouped.combine_step(60, 20, 10, values.dtype, with_dgates=True)
    grouped.combine(step, values, out, gates, None, x, dgates)
    by_slot = values.view(3, 20, 10)
    torch.testing.assert_close(out, (by_slot * gates[..., None]).sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dgates, (by_slot * x[:, None]).sum(2), rtol=1e-5, atol=1e-5)


# --- scatter_ffn ----------------------------------------------------------------------------------------------------


def _config(**blocks: int) -> triton.Config:
    return triton.Config(blocks, num_warps=4)


def _check_ffn(
    inputs: dict[str, torch.Tensor], rows: torch.Tensor, activation: str, grads: tuple[str, ...] = ()
) -> None:
    CASES["scatter_ffn"].check(inputs | {"neurons": rows, "activation": activation}, grads=grads)


@pytest.mark.parametrize("activation", ("relu", "leaky_relu"))
def test_the_slope_at_zero_is_that_of_pytorch(activation: str) -> None:
    inputs = {"x": randn(6, 20), "w_up": randn(30, 20), "w_down": randn(30, 24)}
    inputs["x"][2] = 0
    _check_ffn(inputs, torch.tensor([3, 29, 0], device=runtime.DEVICE), activation, grads=tuple(inputs))


def test_tickets_are_reset_by_the_only_program_there_is() -> None:
    up = _config(TOKENS=2, BLOCK_L=64, BLOCK_K=32, STAGES=1)
    down = _config(TOKENS=2, BLOCK_L=8, BLOCK_C=16, UNROLL=2)
    inputs = {"x": randn(2, 20), "w_up": randn(70, 20), "w_down": randn(70, 24)}
    with _tiles(plan=ffn_kernels.Plan("vector", up, 1, down, 3)):
        _check_ffn(inputs, torch.randperm(70, device=runtime.DEVICE)[:40], "silu")


@pytest.mark.parametrize("strategy", ("vector", "tiles"))
def test_a_list_that_fills_the_hidden_rows(strategy: str) -> None:
    """h has no column beyond the list, and a step of the sum goes beyond both: the last token's row ends where memory ends."""
    if strategy == "vector":
        up = _config(TOKENS=2, BLOCK_L=16, BLOCK_K=32, STAGES=1)
        down = _config(TOKENS=2, BLOCK_L=16, BLOCK_C=16, UNROLL=3)
    else:
        up = _config(BLOCK_M=16, BLOCK_L=16, BLOCK_K=16, SHARES=1, GROUP=2, STAGES=2)
        down = _config(BLOCK_M=16, BLOCK_L=128, BLOCK_C=16, GROUP=2, STAGES=2, LISTED=128, AHEAD=0)
    inputs = {"x": randn(2, 20), "w_up": randn(70, 20), "w_down": randn(70, 24), "b_down": 1e5 * randn(24)}
    rows = torch.randperm(70, device=runtime.DEVICE)[: ffn_kernels.PAD].int()
    with _tiles(plan=ffn_kernels.Plan(strategy, up, 1, down, 1)):
        _check_ffn(inputs, rows, "silu")


@pytest.mark.parametrize("gated", (False, True))
def test_rows_that_are_copied_together_in_several_tiles(gated: bool) -> None:
    """Some rows are listed several times, the last ones never: where theirs would begin, the list of places has ended."""
    inputs = {"x": randn(9, 40), "w_up": randn(30, 40), "w_down": randn(30, 24), "b_up": randn(30)}
    inputs |= {"w_gate": randn(30, 40)} if gated else {}
    rows = torch.randint(0, 27, (ffn_kernels.PAD + 6,), device=runtime.DEVICE)
    with _tiles(
        COPY_CONFIG=_config(BLOCK_L=256, BLOCK_K=16),
        HIDDEN_CONFIG=_config(BLOCK_M=2, BLOCK_L=32),
        PLACE_CONFIG=_config(BLOCK_N=4, BLOCK_K=16),
        PLACE_VECTOR_CONFIG=_config(BLOCK_N=8, BLOCK_K=1),
        plan=ffn_kernels.Plan("packed", None, 1, None, 1),
    ):
        _check_ffn(inputs, rows, "gelu", grads=tuple(inputs))
