"""The forward pass for Hopper GPUs, in Gluon: the algorithm of ``kernels.py`` with the overlap written out by hand.

A program has one producer warp and two (or three) consumer warpgroups. The producer copies tiles of keys and values into a
ring of buffers in shared memory. Each consumer owns 64 queries and, for each tile, starts the product of the next scores
and the product of the last probabilities with the values, and computes the softmax of one tile while the tensor cores
work on another. Barriers in shared memory say which buffer is full and which is free.
"""

import functools

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64  # queries of one warpgroup


@gluon.jit
def _produce(
    q, k, v, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
    b, h, h_kv, start_m, count,
    WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    q_bytes: gl.constexpr = ROWS * BLOCK_D * 2
    bytes: gl.constexpr = BLOCK_N * BLOCK_D * 2
    for w in gl.static_range(WARPGROUPS):
        mbarrier.expect(q_full.index(w), q_bytes)
        tma.async_copy_global_to_shared(q, [b, h, start_m + w * ROWS, 0], q_full.index(w), q_smem.index(w))
    for i in range(count):
        slot = i % STAGES
        # A buffer is free from the start: waiting for the phase before the first returns at once.
        phase = (i // STAGES) & 1
        start = (count - 1 - i) * BLOCK_N
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), bytes)
        tma.async_copy_global_to_shared(k, [b, h_kv, start, 0], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), bytes)
        tma.async_copy_global_to_shared(v, [b, h_kv, start, 0], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def _softmax(scores, m, start, rows, diagonal, S, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """-> p, row sums of p, m, alpha: by what earlier sums are scaled down."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        offs_n = start + gl.arange(0, scores.shape[1], layout=columns)
        seen = gl.expand_dims(offs_n < S, 0)
        if CAUSAL:
            seen = seen & (gl.expand_dims(offs_n, 0) <= gl.expand_dims(rows, 1) + diagonal)
        else:
            seen = seen & (gl.expand_dims(rows, 1) >= 0)
        scores = gl.where(seen, scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, axis=1) * scale)
    shift = m_new
    if MASKED:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(scores * scale - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m - shift)
    return p, gl.sum(p, axis=1), m_new, alpha


@gluon.jit
def _step(
    i, acc, l, m, p, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn,
    count, rows, diagonal, S, scale,
    W: gl.constexpr, WARPGROUPS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr, LEFT: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The scores and softmax of tile i; the product with the values of tile i - 1."""
    slot, before = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
    if TURNS:  # the first one's turn has no one before it
        if W == 0:
            mbarrier.wait(turn.index(W), i & 1)
        else:
            mbarrier.wait(turn.index(W), (i & 1) ^ 1)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    scores = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Probabilities go from step to step in float32: as pairs of 16 bits they would be taken apart and packed again.
    left = gl.convert_layout(p.to(q.dtype), LEFT)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    out = warpgroup_mma(left, v_smem.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index((W + 1) % WARPGROUPS))
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(slot))
    p, sums, m, alpha = _softmax(scores, m, (count - 1 - i) * BLOCK_N, rows, diagonal, S, scale, MASKED, CAUSAL)
    l = l * alpha + sums
    acc, left = warpgroup_mma_wait(0, deps=[out, left])
    mbarrier.arrive(v_free.index(before))
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1)
    return acc, l, m, p


@gluon.jit
def _consume(
    o, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn,
    b, h, head, start_m, count, masked, diagonal, N, S, scale,
    W: gl.constexpr, WARPGROUPS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    rows = start_m + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    q = q_smem.index(W)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)

    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    scores = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0))
    p, l, m, _alpha = _softmax(scores, m, (count - 1) * BLOCK_N, rows, diagonal, S, scale, True, CAUSAL)
    for i in range(1, masked):
        acc, l, m, p = _step(
            i, acc, l, m, p, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn, count, rows, diagonal, S, scale,
            W, WARPGROUPS, TURNS, STAGES, True, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT, OUT,
        )  # fmt: skip
    for i in range(masked, count):
        acc, l, m, p = _step(
            i, acc, l, m, p, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn, count, rows, diagonal, S, scale,
            W, WARPGROUPS, TURNS, STAGES, False, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT, OUT,
        )  # fmt: skip
    last = count - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    left = gl.convert_layout(p.to(q.dtype), LEFT)
    acc = warpgroup_mma(left, v_smem.index(last % STAGES), acc, is_async=True)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])

    seen = l > 0.0
    l = gl.where(seen, l, 1.0)
    lse = gl.where(seen, m + gl.log2(l), float("inf"))
    gl.store(lse_ptr + head.to(gl.int64) * N + rows, lse, mask=rows < N)
    acc = acc / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, OUT)), 1)
    # The queries are not needed any more.
    q.store(acc.to(q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o, [b, h, start_m + W * ROWS, 0], q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "section"])
def _flash_attention_fwd_hopper_kernel(
    q, k, v, o,  # tensor descriptors: (B, H, N, D), (B, H / GROUP, S, D) twice, (B, H, N, D)
    lse_ptr,  # (B, H, N), contiguous
    B, H, N, S, section,
    scale,  # with log2(e)
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    WARPGROUPS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = WARPGROUPS * ROWS
    num_blocks = gl.cdiv(N, BLOCK_M)
    pid = gl.program_id(0)
    first = pid // (section * num_blocks) * section
    within = pid % (section * num_blocks)
    heads = gl.minimum(section, B * H - first)
    head = first + within % heads
    block = within // heads
    if CAUSAL:
        block = num_blocks - 1 - block
    b, h = head // H, head % H
    start_m = block * BLOCK_M

    diagonal = S - N
    if CAUSAL:
        last = gl.maximum(gl.minimum(start_m + BLOCK_M + diagonal, S), 0)
        full = gl.maximum(gl.minimum(start_m + 1 + diagonal, S), 0) // BLOCK_N
    else:
        last = S
        full = S // BLOCK_N
    count = gl.maximum(gl.cdiv(last, BLOCK_N), 1)
    masked = gl.maximum(count - full, 1)

    dtype: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, BLOCK_D], Q_TILE)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for w in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(turn.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=WARPGROUPS)
        mbarrier.init(v_free.index(s), count=WARPGROUPS)
    fence_async_shared()

    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    o, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn,
                    b, h, head, start_m, count, masked, diagonal, N, S, scale,
                    0, WARPGROUPS, TURNS, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
                )),
                (_consume, (
                    o, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn,
                    b, h, head, start_m, count, masked, diagonal, N, S, scale,
                    1, WARPGROUPS, TURNS, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
                )),
                (_produce, (
                    q, k, v, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
                    b, h, h // GROUP, start_m, count,
                    WARPGROUPS, STAGES, ROWS, BLOCK_N, BLOCK_D,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    o, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn,
                    b, h, head, start_m, count, masked, diagonal, N, S, scale,
                    0, WARPGROUPS, TURNS, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
                )),
                (_consume, (
                    o, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn,
                    b, h, head, start_m, count, masked, diagonal, N, S, scale,
                    1, WARPGROUPS, TURNS, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
                )),
                (_consume, (
                    o, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn,
                    b, h, head, start_m, count, masked, diagonal, N, S, scale,
                    2, WARPGROUPS, TURNS, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
                )),
                (_produce, (
                    q, k, v, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
                    b, h, h // GROUP, start_m, count,
                    WARPGROUPS, STAGES, ROWS, BLOCK_N, BLOCK_D,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


# --- configurations -------------------------------------------------------------------------------------------------

# By BLOCK_D: keys a tile, warpgroups of 64 queries, buffers, whether the warpgroups take turns.
TILES = {
    64: (128, 2, 3, True),
    128: (128, 2, 2, True),
    256: (64, 2, 2, True),
}


@functools.lru_cache(maxsize=1024)
def config(d: int, itemsize: int, properties: runtime.DeviceProperties) -> triton.Config | None:
    """The tiles for head size ``d``; ``None`` where this kernel is not for the GPU, the dtype or the head size."""
    width = max(16, triton.next_power_of_2(d))
    if properties.arch not in ("sm_90", "sm_90a") or itemsize != 2 or width not in TILES:
        return None
    block_n, warpgroups, stages, turns = TILES[width]
    blocks = {
        "BLOCK_N": block_n, "BLOCK_D": width, "ROWS": ROWS, "WARPGROUPS": warpgroups, "STAGES": stages, "TURNS": turns,
    }  # fmt: skip
    return triton.Config(blocks, num_warps=4)
