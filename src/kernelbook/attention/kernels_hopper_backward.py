"""Attention's backward pass on Hopper GPUs in one kernel: five products a pair of tiles, where two kernels need seven.

A program owns 128 keys. Two warpgroups compute dk and dv of 64 keys each, on transposed tiles, as in ``kernels_hopper.py``,
and leave ds in shared memory. A third multiplies it with the keys: that is this program's part of dq of 64 queries, a sum
over all programs of the head. One producer warp loads.

The parts of dq are added in the order of the key tiles, so that every run gives the same bits. A counter for each tile of
queries says whose turn it is. The first of a tile stores its part in float32, those after it add theirs, the last one adds
what is there to its own, rounds, and writes dq: nothing has to be zeroed before or converted afterwards.

Nothing can wait for ever. A program waits only for one with the key tile before its own, of the same head, which has a lower
program id, and GPUs start programs in the order of their ids: so among all that run, the one with the lowest id waits for
nobody, and ends. (Within a program loads wait for free buffers, products for loads, and the sum for products, never in a
circle: a turn is passed on before the next one is waited for.) All programs of a head walk over its queries in the same
order, so that each stays behind the one before it by about one tile, and hardly waits once the first have set out.
"""

from typing import Any

from kernelbook import runtime  # noqa: F401 (before Triton, which it sets up)
from kernelbook.attention.kernels_hopper import ROWS, _place, _seen_by, _visitors
from kernelbook.gluon_names import tma

# isort: split
import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 has another name

# --- turns ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _wait_for_turn(ptr, turn):
    """Until the counter is ``turn``. Every thread asks for itself, so that each sees what was written before."""
    ASK: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    now = gl.inline_asm_elementwise(ASK, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)
    while now < turn:
        now = gl.inline_asm_elementwise(ASK, "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(ptr, value, THREADS: gl.constexpr = 128):
    """Sets the counter, after all that the warpgroup has written: its first thread speaks for all after a barrier."""
    thread_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .u32 thread;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, $3;
        setp.eq.u32 first, thread, 0;
        @first st.release.gpu.global.b32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r", [ptr, value, THREADS - 1], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _as_stored(x):
    """A product (64, BLOCK_D) -> (16 * BLOCK_D, 4): rows of four numbers that one thread holds, neighbours of a warp's."""
    BLOCK_D: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, BLOCK_D // 8, 4, 2])  # warp, half, row, column block, lane, pair
    return x.permute([0, 3, 2, 4, 1, 5]).reshape([16 * BLOCK_D, 4])


@gluon.jit
def _as_computed(x, LAYOUT: gl.constexpr):
    """The inverse of ``_as_stored``."""
    BLOCK_D: gl.constexpr = x.shape[0] // 16
    x = x.reshape([4, BLOCK_D // 8, 8, 4, 2, 2])
    return gl.convert_layout(x.permute([0, 4, 2, 1, 3, 5]).reshape([64, BLOCK_D]), LAYOUT)


# --- the parts of a program -----------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
    kv_full, q_full, q_free, do_full, do_free,
    b, part, H, start_n, first, count, n_padded,
    MEMBERS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    own_bytes: gl.constexpr = 2 * ROWS * BLOCK_D * 2
    bytes: gl.constexpr = BLOCK_M * BLOCK_D * 2 + BLOCK_M * 4
    for w in gl.static_range(2):
        at = [b, part // PARTS, start_n + w * ROWS, 0]
        mbarrier.expect(kv_full.index(w), own_bytes)
        tma.async_copy_global_to_shared(k, at, kv_full.index(w), k_smem.index(w))
        tma.async_copy_global_to_shared(v, at, kv_full.index(w), v_smem.index(w))
    for i in range(MEMBERS * count):
        h = part * MEMBERS + i // count
        start = first + (count - 1 - i % count) * BLOCK_M
        row = (b * H + h) * n_padded + start
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(q_free.index(slot), phase ^ 1)
        mbarrier.expect(q_full.index(slot), bytes)
        tma.async_copy_global_to_shared(q, [b, h, start, 0], q_full.index(slot), q_smem.index(slot))
        tma.async_copy_global_to_shared(lse, [row], q_full.index(slot), lse_smem.index(slot))
        mbarrier.wait(do_free.index(slot), phase ^ 1)
        mbarrier.expect(do_full.index(slot), bytes)
        tma.async_copy_global_to_shared(do, [b, h, start, 0], do_full.index(slot), do_smem.index(slot))
        tma.async_copy_global_to_shared(delta, [row], do_full.index(slot), delta_smem.index(slot))


@gluon.jit
def _step(
    i, start, dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
    q_full, q_free, do_full, do_free, ds_full, ds_free, columns, diagonal, scale,
    W: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, EARLY: gl.constexpr, MASKED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    slot = i % STAGES
    phase = (i // STAGES) & 1
    q, do = q_smem.index(slot), do_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if EARLY:
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(1, deps=[scores])
    else:
        lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Beyond the last query lse is +inf, so that probabilities there are zero.
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        p = gl.where(_seen_by(start, columns, diagonal, SCORES), p, 0.0)
    rounded = p.to(do.dtype)
    left = gl.convert_layout(rounded, LEFT)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    if EARLY:
        dp = warpgroup_mma_wait(1, deps=[dp])
    else:  # half the registers
        dp, rounded = warpgroup_mma_wait(1, deps=[dp, rounded])
        p = rounded.to(gl.float32)
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    mbarrier.wait(ds_free.index(i % DS_STAGES), ((i // DS_STAGES) & 1) ^ 1)
    ds_smem.index(i % DS_STAGES * 2 + W).store(ds)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ds_full.index(i % DS_STAGES))
    right = gl.convert_layout(ds, LEFT)
    dk = warpgroup_mma(right, q, dk, is_async=True)
    dv, left = warpgroup_mma_wait(1, deps=[dv, left])
    mbarrier.arrive(do_free.index(slot))
    dk, right = warpgroup_mma_wait(0, deps=[dk, right])
    mbarrier.arrive(q_free.index(slot))
    return dk, dv


@gluon.jit
def _consume(
    dk_out, dv_out, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
    kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, k_free,
    b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
    W: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    EARLY: gl.constexpr, HELD: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    columns = start_n + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    mbarrier.wait(kv_full.index(W), 0)
    k, v = k_smem.index(W), v_smem.index(W)
    if HELD:  # keys and values stay in registers: products that read both sides from shared memory wait for it
        k_left = k.load(gl.DotOperandLayout(0, SCORES, 2))
        v_left = v.load(gl.DotOperandLayout(0, SCORES, 2))
    else:
        k_left, v_left = k, v
    for member in range(MEMBERS):
        for i in range(count - masked):
            dk, dv = _step(
                member * count + i, 0, dk, dv, k_left, v_left, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                q_full, q_free, do_full, do_free, ds_full, ds_free, columns, diagonal, scale,
                W, STAGES, DS_STAGES, EARLY, False, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
        for i in range(count - masked, count):
            dk, dv = _step(
                member * count + i, first + (count - 1 - i) * BLOCK_M,
                dk, dv, k_left, v_left, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                q_full, q_free, do_full, do_free, ds_full, ds_free, columns, diagonal, scale,
                W, STAGES, DS_STAGES, EARLY, True, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
    # This warpgroup's keys and values are not needed any more, once dq is computed.
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_out, [b, part, start_n + W * ROWS, 0], v)
    mbarrier.wait(k_free, 0)
    k.store((dk * dk_scale).to(k.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [b, part, start_n + W * ROWS, 0], k)
    tma.store_wait(0)


@gluon.jit
def _add_up(
    dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, sums_ptr, turns_ptr, k_smem, ds_smem, kv_full, ds_full, ds_free, k_free,
    b, part, H, N, S, block, first, count, diagonal, dq_scale,
    MEMBERS: gl.constexpr, DS_STAGES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr, LATE: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """This program's part of dq, tile by tile and 64 features at a time, added to those of the programs before it."""
    WIDTH: gl.constexpr = 64  # so that this warpgroup leaves its registers to the others
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BLOCK_N: gl.constexpr = 2 * ROWS
    PARTS_D: gl.constexpr = BLOCK_D // WIDTH
    SIZE: gl.constexpr = BLOCK_M * WIDTH
    # Rows of 128 bytes lie one after the other: the keys are tiles of 64 features.
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    columns = k_smem._reinterpret(k_smem.dtype, [2 * PARTS_D, ROWS, WIDTH], COLUMNS)
    tiles = gl.cdiv(N, BLOCK_M)
    for w in gl.static_range(2):
        mbarrier.wait(kv_full.index(w), 0)
    before = turns_ptr
    passes = 0
    for i in range(MEMBERS * count):
        h = part * MEMBERS + i // count
        start = first + (count - 1 - i % count) * BLOCK_M
        tile = (b * H + h) * tiles + start // BLOCK_M
        slot = i % DS_STAGES
        counter = turns_ptr + tile
        last = gl.cdiv(S, BLOCK_N) - 1
        if CAUSAL:
            last = gl.minimum(gl.cdiv(start + BLOCK_M + diagonal, BLOCK_N) - 1, last)
        mbarrier.wait(ds_full.index(slot), (i // DS_STAGES) & 1)
        for c in gl.static_range(PARTS_D):
            zeros = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout=OUT)
            left, right = ds_smem.index(slot * 2).permute((1, 0)), ds_smem.index(slot * 2 + 1).permute((1, 0))
            dq = warpgroup_mma(left, columns.index(c), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma(right, columns.index(PARTS_D + c), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            if c == PARTS_D - 1:
                mbarrier.arrive(ds_free.index(slot))
            part_dq = _as_stored(dq)
            lines = gl.arange(0, SIZE // 4, layout=gl.SliceLayout(1, part_dq.type.layout))
            four = gl.arange(0, 4, layout=gl.SliceLayout(0, part_dq.type.layout))
            offs = gl.expand_dims(lines, 1) * 4 + gl.expand_dims(four, 0)
            sums = sums_ptr + (tile * PARTS_D + c).to(gl.int64) * SIZE + offs
            if ORDERED:
                if c == 0:
                    if LATE:  # by now what was written for the tile before has arrived
                        if passes > 0:
                            _pass_turn(before, passes)
                        passes = 0
                    if block > 0:
                        _wait_for_turn(counter, block)
                if block == last:
                    if block > 0:
                        dq = dq + _as_computed(gl.load(sums, cache_modifier=".cg"), OUT)
                    rows = start + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
                    offs_d = c * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
                    base = dq_ptr + b.to(gl.int64) * dq_stride_b + h.to(gl.int64) * dq_stride_h
                    at = gl.expand_dims(rows.to(gl.int64) * dq_stride_n, 1) + gl.expand_dims(offs_d, 0)
                    seen = gl.expand_dims(rows < N, 1) & (gl.expand_dims(offs_d, 0) >= 0)
                    gl.store(base + at, (dq * dq_scale).to(dq_ptr.dtype.element_ty), mask=seen)
                elif block == 0:
                    gl.store(sums, part_dq)
                else:
                    gl.atomic_add(sums, part_dq, sem="relaxed")
            else:
                gl.atomic_add(sums, part_dq, sem="relaxed")
        if ORDERED:
            if block == last:
                if block > 0:
                    _pass_turn(counter, 0)  # as it was, for the next call
            elif LATE:
                before = counter
                passes = block + 1
            else:
                _pass_turn(counter, block + 1)
    mbarrier.arrive(k_free)
    if ORDERED and LATE:
        if passes > 0:
            _pass_turn(before, passes)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse, delta,  # descriptors of (B * H * n_padded,): the queries' rows, padded; +inf and 0 beyond N
    dk, dv,  # descriptors: (B, H / GROUP * PARTS, S, D): of each part of the heads that share a key head
    dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n,  # (B, H, N, D)
    sums_ptr,  # (B, H, tiles of queries, BLOCK_M * BLOCK_D) in float32: as a warpgroup holds 64 features each
    turns_ptr,  # (B, H, tiles of queries): zeros, before and afterwards
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dk_scale,  # without
    GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    ORDERED: gl.constexpr, LATE: gl.constexpr, EARLY: gl.constexpr, HELD: gl.constexpr,
    MATH_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    MEMBERS: gl.constexpr = GROUP // PARTS
    BLOCK_N: gl.constexpr = 2 * ROWS
    block, head = _place(gl.program_id(0), gl.cdiv(S, BLOCK_N), B * (H // MEMBERS), section, False)
    b, part = head // (H // MEMBERS), head % (H // MEMBERS)
    start_n = block * BLOCK_N
    diagonal = S - N
    first, masked, count = _visitors(start_n, N, diagonal, CAUSAL, BLOCK_M, BLOCK_N)

    dtype: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    OWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES * 2, ROWS, BLOCK_M], DS)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(k_free, count=1)
    for w in gl.static_range(2):
        mbarrier.init(kv_full.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=2)
        mbarrier.init(do_free.index(s), count=2)
    for s in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(s), count=2)
        mbarrier.init(ds_free.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, k_free,
                b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
                0, MEMBERS, STAGES, DS_STAGES, EARLY, HELD, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, k_free,
                b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
                1, MEMBERS, STAGES, DS_STAGES, EARLY, HELD, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_add_up, (
                dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, sums_ptr, turns_ptr,
                k_smem, ds_smem, kv_full, ds_full, ds_free, k_free,
                b, part, H, N, S, block, first, count, diagonal, dk_scale,
                MEMBERS, DS_STAGES, CAUSAL, ORDERED, LATE, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, H, start_n, first, count, n_padded,
                MEMBERS, PARTS, STAGES, ROWS, BLOCK_M, BLOCK_D,
            )),
        ],
        [4, 4, 1],
        [MATH_REGISTERS, DQ_REGISTERS, 24],
    )  # fmt: skip


# --- heads of 128 ---------------------------------------------------------------------------------------------------

# Beside dk and dv of 128 features there are no registers for a third warpgroup. The two that have the keys compute the
# part of dq too, 64 features each, a step after its ds, so that neither waits for the other. They leave it in shared
# memory, from where two warps add it up.


@gluon.jit
def _half_of_dq(slot, ds_smem, columns, W: gl.constexpr, BLOCK_M: gl.constexpr, OUT: gl.constexpr):
    """Starts the product of all 128 keys for 64 features."""
    zeros = gl.zeros([BLOCK_M, 64], gl.float32, layout=OUT)
    dq = warpgroup_mma(ds_smem.index(slot * 2).permute((1, 0)), columns.index(W), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(ds_smem.index(slot * 2 + 1).permute((1, 0)), columns.index(2 + W), dq, is_async=True)


@gluon.jit
def _leave(i, dq, dq_smem, dq_full, dq_free, W: gl.constexpr, DQ_STAGES: gl.constexpr):
    """Leaves the part of dq of step i - 1 for those that add up."""
    slot = i % DQ_STAGES * 2 + W
    mbarrier.wait(dq_free.index(slot), ((i // DQ_STAGES) & 1) ^ 1)
    dq_smem.index(slot).store(_as_stored(dq))
    thread_barrier()
    mbarrier.arrive(dq_full.index(slot))


@gluon.jit
def _step_with_dq(
    i, start, dk, dv, k, v, columns, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
    q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, keys, diagonal, scale,
    W: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    EARLY: gl.constexpr, MASKED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """As ``_step``, with dq of the step before. The ds of step i - 1 are number i: those before the first step are zeros."""
    slot = i % STAGES
    phase = (i // STAGES) & 1
    q, do = q_smem.index(slot), do_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(ds_full.index(i % DS_STAGES), (i // DS_STAGES) & 1)
    dq = _half_of_dq(i % DS_STAGES, ds_smem, columns, W, BLOCK_M, HALF)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    mbarrier.arrive(ds_free.index(i % DS_STAGES))
    _leave(i, dq, dq_smem, dq_full, dq_free, W, DQ_STAGES)
    if EARLY:
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(1, deps=[scores])
    else:
        lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        p = gl.where(_seen_by(start, keys, diagonal, SCORES), p, 0.0)
    rounded = p.to(do.dtype)
    left = gl.convert_layout(rounded, LEFT)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    if EARLY:
        dp = warpgroup_mma_wait(1, deps=[dp])
    else:  # half the registers
        dp, rounded = warpgroup_mma_wait(1, deps=[dp, rounded])
        p = rounded.to(gl.float32)
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    _leave_ds(i + 1, ds, ds_smem, ds_full, ds_free, W, DS_STAGES)
    right = gl.convert_layout(ds, LEFT)
    dk = warpgroup_mma(right, q, dk, is_async=True)
    dv, left = warpgroup_mma_wait(1, deps=[dv, left])
    mbarrier.arrive(do_free.index(slot))
    dk, right = warpgroup_mma_wait(0, deps=[dk, right])
    mbarrier.arrive(q_free.index(slot))
    return dk, dv


@gluon.jit
def _leave_ds(i, ds, ds_smem, ds_full, ds_free, W: gl.constexpr, DS_STAGES: gl.constexpr):
    """Leaves ds for a product that both warpgroups, or another, have with it."""
    slot = i % DS_STAGES
    mbarrier.wait(ds_free.index(slot), ((i // DS_STAGES) & 1) ^ 1)
    ds_smem.index(slot * 2 + W).store(ds)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ds_full.index(slot))


@gluon.jit
def _consume_with_dq(
    dk_out, dv_out, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
    kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, k_free,
    b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
    W: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    EARLY: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    k, v = k_smem.index(W), v_smem.index(W)
    # Rows of 128 bytes lie one after the other: the keys are tiles of 64 features.
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    columns = k_smem._reinterpret(k_smem.dtype, [4, ROWS, BLOCK_D // 2], COLUMNS)
    keys = start_n + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES).to(k.dtype)
    _leave_ds(0, nothing, ds_smem, ds_full, ds_free, W, DS_STAGES)
    for w in gl.static_range(2):
        mbarrier.wait(kv_full.index(w), 0)
    for member in range(MEMBERS):
        for i in range(count - masked):
            dk, dv = _step_with_dq(
                member * count + i, 0, dk, dv, k, v, columns, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, keys, diagonal, scale,
                W, STAGES, DS_STAGES, DQ_STAGES, EARLY, False, ROWS, BLOCK_M, SCORES, LEFT, HALF,
            )  # fmt: skip
        for i in range(count - masked, count):
            dk, dv = _step_with_dq(
                member * count + i, first + (count - 1 - i) * BLOCK_M,
                dk, dv, k, v, columns, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, keys, diagonal, scale,
                W, STAGES, DS_STAGES, DQ_STAGES, EARLY, True, ROWS, BLOCK_M, SCORES, LEFT, HALF,
            )  # fmt: skip
    i = MEMBERS * count
    mbarrier.wait(ds_full.index(i % DS_STAGES), (i // DS_STAGES) & 1)
    dq = _half_of_dq(i % DS_STAGES, ds_smem, columns, W, BLOCK_M, HALF)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(k_free)
    _leave(i, dq, dq_smem, dq_full, dq_free, W, DQ_STAGES)
    # This warpgroup's keys and values are not needed any more, once both have computed dq.
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_out, [b, part, start_n + W * ROWS, 0], v)
    mbarrier.wait(k_free, 0)
    k.store((dk * dk_scale).to(k.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [b, part, start_n + W * ROWS, 0], k)
    tma.store_wait(0)


@gluon.jit
def _add_up_left(
    dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, sums_ptr, turns_ptr, dq_smem, dq_full, dq_free,
    b, part, H, N, S, block, first, count, diagonal, dq_scale,
    MEMBERS: gl.constexpr, DQ_STAGES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
    WARPS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """As ``_add_up``, of what lies in shared memory, in pieces of a few registers."""
    BLOCK_N: gl.constexpr = 2 * ROWS
    LINES: gl.constexpr = WARPS * 32 * 2  # of four numbers
    PIECES: gl.constexpr = 64 * BLOCK_M // 4 // LINES
    PIECE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pieces = dq_smem._reinterpret(gl.float32, [DQ_STAGES * 2 * PIECES, LINES, 4], PLAIN)
    tiles = gl.cdiv(N, BLOCK_M)
    lines = gl.arange(0, LINES, layout=gl.SliceLayout(1, PIECE))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, PIECE))
    offs = gl.expand_dims(lines, 1) * 4 + gl.expand_dims(four, 0)
    # The first are those before the first step.
    for half in gl.static_range(2):
        mbarrier.wait(dq_full.index(half), 0)
        mbarrier.arrive(dq_free.index(half))
    for i in range(MEMBERS * count):
        h = part * MEMBERS + i // count
        start = first + (count - 1 - i % count) * BLOCK_M
        tile = (b * H + h) * tiles + start // BLOCK_M
        slot = (i + 1) % DQ_STAGES * 2
        phase = ((i + 1) // DQ_STAGES) & 1
        counter = turns_ptr + tile
        last = gl.cdiv(S, BLOCK_N) - 1
        if CAUSAL:
            last = gl.minimum(gl.cdiv(start + BLOCK_M + diagonal, BLOCK_N) - 1, last)
        if ORDERED:
            if block > 0:
                _wait_for_turn(counter, block)
        for w in range(2):
            mbarrier.wait(dq_full.index(slot + w), phase)
            sums = sums_ptr + (tile * 2 + w).to(gl.int64) * (BLOCK_M * 64)
            if ORDERED:
                if block == last:
                    to = dq_ptr + b.to(gl.int64) * dq_stride_b + h.to(gl.int64) * dq_stride_h
                    to += start.to(gl.int64) * dq_stride_n + w * 64
                    for piece in range(PIECES):
                        dq = pieces.index((slot + w) * PIECES + piece).load(PIECE)
                        if block > 0:
                            dq += gl.load(sums + piece * (LINES * 4) + offs, cache_modifier=".cg")
                        left, right = gl.split((dq * dq_scale).to(dq_ptr.dtype.element_ty).reshape([LINES, 2, 2]))
                        left = left.to(gl.uint16, bitcast=True).to(gl.uint32)
                        both = left | (right.to(gl.uint16, bitcast=True).to(gl.uint32) << 16)
                        # Of a line: warp, columns of eight, row, pair of columns; its halves are 8 rows apart.
                        line = piece * LINES + gl.arange(0, LINES, layout=gl.SliceLayout(1, both.type.layout))
                        lower = gl.arange(0, 2, layout=gl.SliceLayout(0, both.type.layout)) * 8
                        row = gl.expand_dims(line // 256 * 16 + line // 4 % 8, 1) + gl.expand_dims(lower, 0)
                        column = gl.expand_dims(line // 32 % 8 * 8 + line % 4 * 2, 1)
                        at = (to + (row * dq_stride_n + column)).to(gl.pointer_type(gl.uint32), bitcast=True)
                        gl.store(at, both, mask=start + row < N)
                elif block == 0:
                    for piece in range(PIECES):
                        dq = pieces.index((slot + w) * PIECES + piece).load(PIECE)
                        gl.store(sums + piece * (LINES * 4) + offs, dq)
                else:
                    for piece in range(PIECES):
                        dq = pieces.index((slot + w) * PIECES + piece).load(PIECE)
                        gl.atomic_add(sums + piece * (LINES * 4) + offs, dq, sem="relaxed")
            else:
                for piece in range(PIECES):
                    dq = pieces.index((slot + w) * PIECES + piece).load(PIECE)
                    gl.atomic_add(sums + piece * (LINES * 4) + offs, dq, sem="relaxed")
            thread_barrier()
            mbarrier.arrive(dq_free.index(slot + w))
        if ORDERED:
            if block == last:
                if block > 0:
                    _pass_turn(counter, 0, WARPS * 32)  # as it was, for the next call
            else:
                _pass_turn(counter, block + 1, WARPS * 32)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_128_hopper_kernel(
    q, k, v, do, lse, delta, dk, dv, dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, sums_ptr, turns_ptr,
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dk_scale,  # without
    GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    ORDERED: gl.constexpr, EARLY: gl.constexpr, WARPS: gl.constexpr,
    MATH_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Arguments as for ``_flash_attention_bwd_hopper_kernel``."""
    MEMBERS: gl.constexpr = GROUP // PARTS
    BLOCK_N: gl.constexpr = 2 * ROWS
    block, head = _place(gl.program_id(0), gl.cdiv(S, BLOCK_N), B * (H // MEMBERS), section, False)
    b, part = head // (H // MEMBERS), head % (H // MEMBERS)
    start_n = block * BLOCK_N
    diagonal = S - N
    first, masked, count = _visitors(start_n, N, diagonal, CAUSAL, BLOCK_M, BLOCK_N)

    dtype: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    OWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES * 2, ROWS, BLOCK_M], DS)
    dq_smem = gl.allocate_shared_memory(gl.float32, [DQ_STAGES * 2, BLOCK_M * BLOCK_D // 8, 4], PLAIN)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [DQ_STAGES * 2, 1], BARRIER)
    dq_free = gl.allocate_shared_memory(gl.int64, [DQ_STAGES * 2, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(k_free, count=2)
    for w in gl.static_range(2):
        mbarrier.init(kv_full.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=2)
        mbarrier.init(do_free.index(s), count=2)
    for s in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(s), count=2)
        mbarrier.init(ds_free.index(s), count=2)
    for s in gl.static_range(DQ_STAGES * 2):
        mbarrier.init(dq_full.index(s), count=1)
        mbarrier.init(dq_free.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume_with_dq, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, k_free,
                b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
                0, MEMBERS, STAGES, DS_STAGES, DQ_STAGES, EARLY, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_consume_with_dq, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, k_free,
                b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
                1, MEMBERS, STAGES, DS_STAGES, DQ_STAGES, EARLY, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_add_up_left, (
                dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, sums_ptr, turns_ptr, dq_smem, dq_full, dq_free,
                b, part, H, N, S, block, first, count, diagonal, dk_scale,
                MEMBERS, DQ_STAGES, CAUSAL, ORDERED, WARPS, ROWS, BLOCK_M,
            )),
            (_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, H, start_n, first, count, n_padded,
                MEMBERS, PARTS, STAGES, ROWS, BLOCK_M, BLOCK_D,
            )),
        ],
        [4, WARPS, 1],
        [MATH_REGISTERS, DQ_REGISTERS, DQ_REGISTERS],
    )  # fmt: skip


# --- host -----------------------------------------------------------------------------------------------------------

BLOCK_M = 64


def in_one_kernel(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool, scale: float,
    turns: Tensor, *, section: int, parts: int = 1, ordered: bool = True, **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dq, dk, dv. lse and delta (B, H, n_padded), in base 2 and times scale / log2(e); turns: zeros, one for each tile.

    Not ordered: dq comes back as the float32 sums, unscaled, in the kernel's own order, see ``sums_as_dq``.
    """
    (b, h, n, d), (_, h_kv, s, _) = q.shape, k.shape
    layout = gl.NVMMASharedLayout(min(128, 2 * d), 16, rank=4)
    vector = gl.NVMMASharedLayout(0, 32, rank=1)

    def rows(tensor: Tensor, count: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [1, 1, count, d], layout)

    tiles = -(-n // BLOCK_M)
    make = torch.empty if ordered else torch.zeros
    sums = make(b, h, tiles, BLOCK_M * d, dtype=torch.float32, device=q.device)
    unseen = causal and s < n
    dq = torch.zeros_like(q) if unseen else torch.empty_like(q)
    dk, dv = (k.new_empty(b, h_kv * parts, s, d) for _ in range(2))
    grid = (-(-s // (2 * ROWS)) * b * h_kv * parts,)
    kernel = _flash_attention_bwd_128_hopper_kernel if d == 128 else _flash_attention_bwd_hopper_kernel
    names = {**DEFAULTS[d], **{name.upper(): value for name, value in settings.items()}}
    names["MATH_REGISTERS"], names["DQ_REGISTERS"] = names.pop("REGISTERS")
    kernel[grid](
        rows(q, BLOCK_M), rows(k, ROWS), rows(v, ROWS), rows(do, BLOCK_M),
        *(TensorDescriptor.from_tensor(t.view(-1), [BLOCK_M], vector) for t in (lse, delta)),
        rows(dk, ROWS), rows(dv, ROWS), dq, *dq.stride()[:3], sums, turns,
        b, h, n, s, lse.shape[2], section, scale * 1.4426950408889634, scale,
        GROUP=h // h_kv, PARTS=parts, CAUSAL=causal, ORDERED=ordered, **names,
        ROWS=ROWS, BLOCK_M=BLOCK_M, BLOCK_D=d, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        dk, dv = (t.unflatten(1, (h_kv, parts)).sum(2) for t in (dk, dv))
    return dq if ordered else sums, dk, dv


DEFAULTS = {
    64: {"STAGES": 3, "DS_STAGES": 2, "LATE": True, "EARLY": True, "HELD": True, "REGISTERS": (208, 72)},
    128: {"STAGES": 2, "DS_STAGES": 2, "DQ_STAGES": 1, "EARLY": True, "WARPS": 2, "REGISTERS": (232, 40)},
}


def sums_as_dq(sums: Tensor, n: int, d: int) -> Tensor:
    """The float32 sums in their places: (B, H, N, D)."""
    b, h, tiles, _ = sums.shape
    lines = sums.view(b, h, tiles, d // 64, 4, 8, 8, 4, 2, 2)  # as ``_as_computed`` reads them
    return lines.permute(0, 1, 2, 4, 8, 6, 3, 5, 7, 9).reshape(b, h, tiles * BLOCK_M, d)[:, :, :n]
