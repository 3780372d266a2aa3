"""The kernel for dq, dk and dv at once on Hopper GPUs, for heads of 65 to 128 numbers and long sequences, and what follows it.

As the one for heads of 64 in ``kernels_hopper.py``, which says why nothing can wait for ever. But sums for dk and dv of 128
features leave no registers for a third consumer. So the two consumers compute dq too, of the step before, each for half of the
features and all keys of the program. They leave it in shared memory, where TMA adds it to the sums in global memory.

    consumers    64 keys each: dk and dv, and half of dq
    adders       one warp for each half of dq: waits for its turn, has TMA add, and passes the turn on
    producer     that of the kernel for dk and dv

The halves have counters of their own. All sums stay in float32, and a second kernel rounds them to dq.

Not handled here: what ``kernels_hopper.all_gradients_config`` leaves to two kernels.
"""

from kernelbook import runtime  # noqa: F401 (before Triton, which it sets up)
from kernelbook.attention.kernels_hopper import _ask_for_turn, _dkdv_produce, _place, _seen_by, _visitors
from kernelbook.gluon_names import thread_barrier, tma

# isort: split
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


def _async_atomic_add(tensor_desc, coord, src, _semantic=None):
    """Adds a tile in shared memory to global memory by TMA: Triton 3.8's, of which earlier versions have all but this function."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


async_atomic_add = getattr(tma, "async_atomic_add", None) or _core.builtin(_async_atomic_add)

# What the warp has seen with its turn comes before what TMA does for it next. $0: nothing. $1: the counter.
BEFORE_TMA = gl.constexpr("fence.proxy.async.global; mov.u32 $0, 0;")
# Once TMA has written for every thread of the warp (Triton's store_wait waits until it has read), the first one speaks for all.
# $0: nothing. $1: where the counter is. $2: its new value.
PASS_WRITTEN = gl.constexpr("""{
    .reg .u32 lane;
    .reg .pred first;
    cp.async.bulk.wait_group 0;
    bar.warp.sync -1;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    @first st.release.gpu.global.b32 [$1], $2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def _leave(tile, smem, full, free, phase):
    """Stores a tile for others once they have done with the one before it."""
    mbarrier.wait(free, phase ^ 1)
    smem.store(tile)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full)


@gluon.jit
def _half_of_dq(slot, ds_smem, columns, none, W: gl.constexpr, BLOCK_M: gl.constexpr, HALF: gl.constexpr):
    """Starts the product of ds of all keys and their features of one half."""
    left, right = ds_smem.index(slot * 2).permute((1, 0)), ds_smem.index(slot * 2 + 1).permute((1, 0))
    WIDTH: gl.constexpr = HALF.instr_shape[1]
    zeros = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout=HALF)
    dq = warpgroup_mma(left, columns.index(W + none), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(right, columns.index(2 + W + none), dq, is_async=True)


@gluon.jit
def _step(
    i, start, dk, dv, k_smem, v_smem, columns, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
    q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, keys, diagonal, S, scale,
    W: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """As ``_bwd_step``, with dq of the step before: ds number ``i`` is that of step ``i - 1``, and number 0 is zero."""
    slot, ds_slot, ds_next = i % STAGES, i % DS_STAGES, (i + 1) % DS_STAGES
    phase = (i // STAGES) & 1
    q, do = q_smem.index(slot), do_smem.index(slot)
    # Zero, which the compiler cannot know: else it computes addresses before the loop, in registers that do not suffice.
    none = i >> 30
    k, v = k_smem.index(W + none), v_smem.index(W + none)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(ds_full.index(ds_slot), (i // DS_STAGES) & 1)
    dq = _half_of_dq(ds_slot, ds_smem, columns, none, W, BLOCK_M, HALF)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    mbarrier.arrive(ds_free.index(ds_slot))
    _leave(dq, dq_smem.index(W), dq_full.index(W), dq_free.index(W), i & 1)
    mbarrier.wait(do_full.index(slot), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    scores = warpgroup_mma_wait(1, deps=[scores])
    # Beyond the last query lse is +inf, so that probabilities there are zero.
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        if CAUSAL:
            p = gl.where(_seen_by(start, keys, diagonal, SCORES), p, 0.0)
        else:  # beyond the last key they may be infinite, and zeros of keys times these nan
            p = gl.where(gl.expand_dims(keys, 1) < S, p, 0.0)
    left = gl.convert_layout(p.to(do.dtype), LEFT)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    own, phase = ds_smem.index(ds_next * 2 + W), ((i + 1) // DS_STAGES) & 1
    _leave(ds, own, ds_full.index(ds_next), ds_free.index(ds_next), phase)
    right = gl.convert_layout(ds, LEFT)
    dk = warpgroup_mma(right, q, dk, is_async=True)
    dv, left = warpgroup_mma_wait(1, deps=[dv, left])
    mbarrier.arrive(do_free.index(slot))
    dk, right = warpgroup_mma_wait(0, deps=[dk, right])
    mbarrier.arrive(q_free.index(slot))
    return dk, dv


@gluon.jit
def _consume(
    dk_out, dv_out, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
    kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, k_free,
    b, part, start_n, first, masked, count, diagonal, S, scale, dk_scale,
    W: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    k, v = k_smem.index(W), v_smem.index(W)
    # In shared memory a tile's left half lies before its right one, as rows have 128 bytes there.
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    columns = k_smem._reinterpret(k_smem.dtype, [4, ROWS, BLOCK_D // 2], COLUMNS)
    keys = start_n + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES).to(k.dtype)
    _leave(nothing, ds_smem.index(W), ds_full.index(0), ds_free.index(0), 0)
    for w in gl.static_range(2):
        mbarrier.wait(kv_full.index(w), 0)
    for member in range(MEMBERS):
        for i in range(count - masked):
            dk, dv = _step(
                member * count + i, 0, dk, dv, k_smem, v_smem, columns, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, keys, diagonal, S, scale,
                W, STAGES, DS_STAGES, RAGGED, CAUSAL, ROWS, BLOCK_M, SCORES, LEFT, HALF,
            )  # fmt: skip
        if CAUSAL:  # a second loop costs the others registers
            for i in range(count - masked, count):
                dk, dv = _step(
                    member * count + i, first + (count - 1 - i) * BLOCK_M,
                    dk, dv, k_smem, v_smem, columns, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                    q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, keys, diagonal, S, scale,
                    W, STAGES, DS_STAGES, True, CAUSAL, ROWS, BLOCK_M, SCORES, LEFT, HALF,
                )  # fmt: skip
    i = MEMBERS * count
    mbarrier.wait(ds_full.index(i % DS_STAGES), (i // DS_STAGES) & 1)
    dq = _half_of_dq(i % DS_STAGES, ds_smem, columns, 0, W, BLOCK_M, HALF)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(k_free)
    _leave(dq, dq_smem.index(W), dq_full.index(W), dq_free.index(W), i & 1)
    # This warpgroup's values are not needed any more, nor its keys once both have computed dq.
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_out, [b, part, start_n + W * ROWS, 0], v)
    mbarrier.wait(k_free, 0)
    k.store((dk * dk_scale).to(k.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [b, part, start_n + W * ROWS, 0], k)
    tma.store_wait(0)


@gluon.jit
def _add_up_half(
    sums, turns_ptr, dq_smem, dq_full, dq_free, b, part, H, N, S, block, first, count, diagonal,
    W: gl.constexpr, MEMBERS: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """This program's part of half of dq, tile by tile, added to those of the programs before it."""
    BLOCK_N: gl.constexpr = 2 * ROWS
    tiles = gl.cdiv(N, BLOCK_M)
    # The first one is that before the first step.
    mbarrier.wait(dq_full.index(W), 0)
    mbarrier.arrive(dq_free.index(W))
    for i in range(MEMBERS * count):
        h = part * MEMBERS + i // count
        start = first + (count - 1 - i % count) * BLOCK_M
        tile = (b * H + h).to(gl.int64) * tiles + start // BLOCK_M
        counter = turns_ptr + (tile * 2 + W)
        last = gl.cdiv(S, BLOCK_N) - 1
        if CAUSAL:
            last = gl.minimum(gl.cdiv(start + BLOCK_M + diagonal, BLOCK_N) - 1, last)
        if block > 0:
            now = _ask_for_turn(counter)
            while now < block:
                now = _ask_for_turn(counter)
            gl.inline_asm_elementwise(BEFORE_TMA, "=r,r", [now], dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.wait(dq_full.index(W), (i + 1) & 1)
        at = [(tile * BLOCK_M).to(gl.int32), W * (BLOCK_D // 2)]
        if block == 0:
            tma.async_copy_shared_to_global(sums, at, dq_smem.index(W))
        else:
            async_atomic_add(sums, at, dq_smem.index(W))
        tma.store_wait(0)
        mbarrier.arrive(dq_free.index(W))
        turn = gl.where(block == last, 0, block + 1)  # 0: as it was, for the next call
        gl.inline_asm_elementwise(PASS_WRITTEN, "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_128_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse, delta,  # descriptors of (B * H * n_padded,): the queries' rows, padded; +inf and 0 beyond N
    dk, dv,  # descriptors: (B, H / GROUP * PARTS, S, D): of each part of the heads that share a key head
    sums,  # a descriptor: (B * H * tiles of queries * BLOCK_M, BLOCK_D) in float32: dq without its scale
    turns_ptr,  # (B, H, tiles of queries, 2): zeros, before and afterwards
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dk_scale,  # without
    GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last block of keys is not whole
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Every query must see a key: without ``CAUSAL``, or with N <= S."""
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
    DQ: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D // 2], gl.float32)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_STAGES * 2, ROWS, BLOCK_M], DS)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, BLOCK_D // 2], DQ)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(k_free, count=2)
    for w in gl.static_range(2):
        mbarrier.init(kv_full.index(w), count=1)
        mbarrier.init(dq_full.index(w), count=1)
        mbarrier.init(dq_free.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=2)
        mbarrier.init(do_free.index(s), count=2)
    for s in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(s), count=2)
        mbarrier.init(ds_free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, k_free,
                b, part, start_n, first, masked, count, diagonal, S, scale, dk_scale,
                0, MEMBERS, STAGES, DS_STAGES, CAUSAL, RAGGED, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, dq_full, dq_free, k_free,
                b, part, start_n, first, masked, count, diagonal, S, scale, dk_scale,
                1, MEMBERS, STAGES, DS_STAGES, CAUSAL, RAGGED, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_add_up_half, (
                sums, turns_ptr, dq_smem, dq_full, dq_free, b, part, H, N, S, block, first, count, diagonal,
                0, MEMBERS, CAUSAL, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_add_up_half, (
                sums, turns_ptr, dq_smem, dq_full, dq_free, b, part, H, N, S, block, first, count, diagonal,
                1, MEMBERS, CAUSAL, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_dkdv_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, H, start_n, first, count, n_padded,
                MEMBERS, PARTS, 2, STAGES, True, ROWS, BLOCK_M, BLOCK_D,
            )),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "N"])
def _flash_attention_bwd_round_kernel(
    sums_ptr,  # (B, H, tiles of queries, BLOCK_M, BLOCK_D), as the kernel above leaves them
    dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n,  # (B, H, N, D), numbers of a row one after the other
    H, N, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq of ROWS queries."""
    steps = tl.cdiv(N, BLOCK_M) * (BLOCK_M // ROWS)
    pid = tl.program_id(0)
    b, h = (pid // steps // H).to(tl.int64), (pid // steps % H).to(tl.int64)
    rows, offs_d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    offs_m = pid % steps * ROWS + rows
    exists = (offs_m < N) & (offs_d < D)
    dq = tl.load(sums_ptr + pid.to(tl.int64) * (ROWS * BLOCK_D) + rows * BLOCK_D + offs_d, mask=exists, other=0.0)
    dq_ptr += b * dq_stride_b + h * dq_stride_h
    tl.store(dq_ptr + offs_m.to(tl.int64) * dq_stride_n + offs_d, (dq * scale).to(dq_ptr.dtype.element_ty), mask=exists)


ROUND_CONFIG = triton.Config({"ROWS": 16}, num_warps=4)
