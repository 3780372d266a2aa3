"""LoRA for experts without U and D in memory: the gradients of its factors compute them anew.

dA[e] = D^T X and dB[e] = dY^T U sum over the rows of an expert, with U = scaling X A[e]^T and D = scaling dY B[e]. Here a program
owns an expert and a block of columns of X or dY, and computes for each tile of rows what it needs of D or U. No memory holds
them, but each of the programs of an expert repeats that product. The library saves them instead: rank numbers a row.
"""

import dataclasses
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import cdiv
from kernelbook.memory import empty, tl_accumulator
from kernelbook.moe_lora import grouped, kernels, op
from kernelbook.moe_lora.grouped import ShrinkPlan, Step
from kernelbook.moe_lora.routing import Routing
from kernelbook.operators import Op
from kernelbook.tensors import precision
from kernelbook.tiles import dot

# isort: split
import triton
import triton.language as tl

__all__ = ["lora_gradients", "moe_lora_recomputed", "shrink_products"]


def moe_lora_recomputed(
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
) -> torch.Tensor:
    """Multiply as :func:`kernelbook.moe_lora` does; nothing of rank columns is kept for the backward pass.

    Args:
        x: (T, K), any strides.
        w: (E, K, N), dense, in the dtype of ``x``, any strides.
        lora_a: (E, r, K), likewise.
        lora_b: (E, N, r), likewise.
        routing, scaling: as in ``moe_lora``.

    Returns:
        (T*k, N) in the dtype of ``x``; differentiable in all four tensors.

    Raises:
        TypeError, ValueError: as ``moe_lora``.
    """
    scaling = arguments.number("moe_lora_recomputed", "scaling", scaling)
    call = op.call_of("moe_lora_recomputed", x, w, routing, lora_a, lora_b, scaling=scaling)
    return _moe_lora_recomputed(*call)  # type: ignore[no-any-return]


def lora_gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
    saved: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute dA (E, r, K) and dB (E, N, r) of ``moe_lora`` alone, in either of the two ways; not differentiable.

    Args:
        x: (T, K). dy: (T*k, N), row t*k + j for slot j of token t. lora_a: (E, r, K). lora_b: (E, N, r).
        routing, scaling: as in ``moe_lora``.
        saved: U = scaling x A^T and D = scaling dy B as :func:`shrink_products` gives them, which is how the library does it;
            ``None``: every program computes anew what it needs of them, which is slower and needs no memory.

    Raises:
        TypeError, ValueError: as ``moe_lora``.
    """
    scaling = arguments.number("lora_gradients", "scaling", scaling)
    saved = saved or (None, None)  # type: ignore[assignment]
    return _lora_gradients(x, dy, lora_a, lora_b, *routing, *saved, scaling)  # type: ignore[no-any-return, misc]


def shrink_products(
    x: torch.Tensor,
    dy: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute U = scaling x A^T and D = scaling dy B, each (T*k, padded rank) in sorted order; not differentiable.

    The rank is padded with zeros to a power of two of at least 16. Arguments as in :func:`lora_gradients`.
    """
    scaling = arguments.number("shrink_products", "scaling", scaling)
    return _shrink_products(x, dy, lora_a, lora_b, *routing, scaling)  # type: ignore[no-any-return]


# --- the kernel and its tiles ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["offsets_at"])
def _moe_lora_bwd_recompute_kernel(  # type: ignore[no-untyped-def]
    routing_ptr, offsets_at,  # order (R,); there (E + 1,) offsets
    l_ptr, stride_lm, stride_lc,  # (R / L_SLOTS, C) left
    f_ptr, stride_fe, stride_fc, stride_fr,  # (E, C, r)
    z_ptr, stride_zm, stride_zq,  # (R / Z_SLOTS, Q) right
    out_ptr, stride_oe, stride_or, stride_oq,  # (E, r, Q)
    scaling, C, Q,
    L_SLOTS: tl.constexpr, Z_SLOTS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    r: tl.constexpr, RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(L F[e])^T Z; every program of an expert computes L F anew."""
    expert = tl.program_id(0).to(tl.int64)
    offs_q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offs_r = tl.arange(0, RANK)
    offs_c = tl.arange(0, BLOCK_C)
    mask_r, mask_q = offs_r < r, offs_q < Q
    low = tl.load(routing_ptr + offsets_at + expert)
    high = tl.load(routing_ptr + offsets_at + expert + 1)
    acc = tl.zeros((BLOCK_Q, RANK), ACC)
    for start in range(low, high, BLOCK_M):
        positions = start + tl.arange(0, BLOCK_M)
        mask_m = positions < high
        pairs = tl.load(routing_ptr + positions, mask=mask_m, other=0)
        l_rows, z_rows = (pairs // L_SLOTS).to(tl.int64), (pairs // Z_SLOTS).to(tl.int64)
        shrunk = tl.zeros((BLOCK_M, RANK), ACC)
        for c in range(0, C, BLOCK_C):
            mask_c = c + offs_c < C
            columns = (c + offs_c).to(tl.int64)
            l_ptrs = l_ptr + l_rows[:, None] * stride_lm
            l_ptrs += columns[None, :] * stride_lc
            f_ptrs = f_ptr + expert * stride_fe + columns[:, None] * stride_fc
            f_ptrs += offs_r.to(tl.int64)[None, :] * stride_fr
            mask_l = mask_m[:, None] & mask_c[None, :]  # (BLOCK_M, BLOCK_C)
            mask_f = mask_c[:, None] & mask_r[None, :]  # (BLOCK_C, RANK)
            left = tl.load(l_ptrs, mask=mask_l, other=0.0)
            factor = tl.load(f_ptrs, mask=mask_f, other=0.0)
            shrunk = dot(left, factor, shrunk, PRECISION)
        shrunk = (shrunk * scaling).to(out_ptr.dtype.element_ty)
        z_ptrs = z_ptr + z_rows[:, None] * stride_zm
        z_ptrs += offs_q.to(tl.int64)[None, :] * stride_zq
        mask_z = mask_m[:, None] & mask_q[None, :]  # (BLOCK_M, BLOCK_Q)
        right = tl.load(z_ptrs, mask=mask_z, other=0.0)
        acc = dot(tl.trans(right), shrunk, acc, PRECISION)
    out_ptrs = out_ptr + expert * stride_oe
    out_ptrs += offs_r.to(tl.int64)[None, :] * stride_or
    out_ptrs += offs_q.to(tl.int64)[:, None] * stride_oq
    mask = mask_q[:, None] & mask_r[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def recompute_tiles(rank: int, itemsize: int, properties: runtime.DeviceProperties) -> kernels.Tiles:
    """Choose the tiles of sums over rows that compute their left operand themselves."""
    if itemsize > 2 or not properties.has_tensor_cores:
        return kernels.tiles(4, 2, BLOCK_Q=32, BLOCK_M=16, BLOCK_C=32)
    return kernels.tiles(4, 3, BLOCK_Q=128, BLOCK_M=64, BLOCK_C=64)


# --- check, outputs, plan, run --------------------------------------------------------------------------------------


def _checked(name: str) -> Any:
    def check(x: Any, dy: Any, lora_a: Any, lora_b: Any, expert_ids: Any, lists: Any, experts: int, *_: Any) -> None:
        for each, factor in (("lora_a", lora_a), ("lora_b", lora_b)):
            arguments.check_tensor(name, each, factor)
        arguments.check_tensor(name, "x", x)
        arguments.check_tensor(name, "dy", dy)
        w = x.new_empty(()).expand(experts, x.shape[-1], lora_b.shape[1])
        op.check(*op.call_of(name, x, w, Routing(expert_ids, lists, experts), lora_a, lora_b))
        arguments.check_shape(name, "dy", dy, (expert_ids.numel(), lora_b.shape[1]))
        arguments.check_same_dtype(name, x=x, dy=dy)

    return check


def _plan_shrink(
    x: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor, lists: torch.Tensor,
    experts: int, scaling: float,
) -> tuple[ShrinkPlan, ShrinkPlan] | None:  # fmt: skip
    routing = Routing(ids, lists, experts)
    if routing.rows == 0:
        return None
    shrink_d = grouped.shrink_plan(routing, dy, 1, b.transpose(1, 2))
    return grouped.shrink_plan(routing, x, routing.slots, a), shrink_d


def _run_shrink(
    plans: tuple[ShrinkPlan, ShrinkPlan], outputs: tuple[torch.Tensor, ...], x: torch.Tensor, dy: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor, lists: torch.Tensor, experts: int, scaling: float,
) -> None:  # fmt: skip
    routing, (u, d) = Routing(ids, lists, experts), outputs
    grouped.shrink(plans[0], routing, x, a, u, scaling)
    grouped.shrink(plans[1], routing, dy, b.transpose(1, 2), d, scaling)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _GradientPlan:
    factors: Step | None  # from what was saved; None: by the next two
    recompute_da: Step | None
    recompute_db: Step | None


def _plan_gradients(
    x: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ids: torch.Tensor, lists: torch.Tensor,
    experts: int, u: Any, d: Any, scaling: float,
) -> _GradientPlan | None:  # fmt: skip
    routing = Routing(ids, lists, experts)
    if routing.rows == 0:
        return None
    if u is not None:
        sizes = (a.shape[1], routing.slots, x.shape[1], 1, dy.shape[1])
        return _GradientPlan(grouped.wgrad_step(routing, x, grouped.SORTED, *sizes), None, None)
    recompute_da = _recompute_step(1, b, routing.slots, x.shape[1])
    return _GradientPlan(None, recompute_da, _recompute_step(routing.slots, a.transpose(1, 2), 1, dy.shape[1]))


def _recompute_step(left: int, factor: torch.Tensor, right: int, q: int) -> Step:
    experts, c, rank = factor.shape
    tiles = recompute_tiles(rank, factor.element_size(), runtime.properties(factor.device))
    launch = grouped.tiled(
        _moe_lora_bwd_recompute_kernel, tiles, L_SLOTS=left, Z_SLOTS=right,
        ACC=tl_accumulator(factor.dtype), PRECISION=precision(factor.dtype), r=rank, RANK=kernels.padded_rank(rank),
    )  # fmt: skip
    return Step(launch, (experts, cdiv(q, tiles.kwargs["BLOCK_Q"])), (c, q))


def _run_gradients(
    plan: _GradientPlan, outputs: tuple[torch.Tensor, ...], x: torch.Tensor, dy: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, ids: torch.Tensor, lists: torch.Tensor, experts: int, u: Any, d: Any, scaling: float,
) -> None:  # fmt: skip
    (da, db), offsets_at = outputs, 2 * ids.numel()
    if plan.factors is not None:
        grouped.wgrad(plan.factors, Routing(ids, lists, experts), d, x, None, da, u, dy, db)
    if plan.recompute_da is not None and plan.recompute_db is not None:
        plan.recompute_da(
            lists, offsets_at, dy, *dy.stride(), b, *b.stride(), x, *x.stride(), da, *da.stride(), scaling
        )
        a, db = a.transpose(1, 2), db.transpose(1, 2)
        plan.recompute_db(
            lists, offsets_at, x, *x.stride(), a, *a.stride(), dy, *dy.stride(), db, *db.stride(), scaling
        )


def _backward(call: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, w, lora_a and lora_b."""
    x, w, lora_a, lora_b = call.saved
    needs_dx, needs_dw, needs_da, needs_db = (dtype is not None for dtype in call.wanted[:4])
    ids, lists = call.kept[:2]
    given = op.call_of(call.function, x, w, Routing(ids, lists, call.experts), lora_a, lora_b, scaling=call.scaling)
    found = op.moe_lora_backward(dy, None, *given, [needs_dx, needs_dw, False, False, False, False])
    da = db = None
    if needs_da or needs_db:
        da, db = _lora_gradients(x, dy, lora_a, lora_b, ids, lists, call.experts, None, None, call.scaling)
    wanted = zip((*found[:2], da, db), (needs_dx, needs_dw, needs_da, needs_db), strict=True)
    return tuple(gradient if needed else None for gradient, needed in wanted)


# --- operators ------------------------------------------------------------------------------------------------------

ARGUMENTS = "Tensor x, Tensor dy, Tensor lora_a, Tensor lora_b, Tensor expert_ids, Tensor lists, SymInt experts"
_shrink_products = Op(
    f"moe_lora_shrink_products({ARGUMENTS}, float scaling) -> (Tensor u, Tensor d)",
    check=_checked("shrink_products"),
    outputs=lambda x, dy, a, b, ids, *_: tuple(
        empty((ids.numel(), kernels.padded_rank(a.shape[1])), x.dtype, x) for _ in range(2)
    ),
    plan=_plan_shrink,
    run=_run_shrink,
    results=2,
)
_lora_gradients = Op(
    f"moe_lora_factor_gradients({ARGUMENTS}, Tensor? u, Tensor? d, float scaling) -> (Tensor da, Tensor db)",
    check=_checked("lora_gradients"),
    outputs=lambda x, dy, a, b, *_: tuple(empty(t.shape, t.dtype, x) for t in (a, b)),
    plan=_plan_gradients,
    run=_run_gradients,
    results=2,
)
_moe_lora_recomputed = Op(
    f"moe_lora_recomputed({op.ARGUMENTS}, bool record) -> (Tensor y, Tensor u)",
    saves=("x", "w", "lora_a", "lora_b"),
    backward=_backward,
    **{**op.FORWARD, "outputs": lambda *args: op.FORWARD["outputs"](*args[:-1], False)},
)
