"""The kernels for Hopper GPUs, in Gluon: the algorithms of ``kernels.py`` with the overlap written out by hand.

A program has one producer warp and two or three consumer warpgroups. The producer copies tiles into a ring of buffers in
shared memory; barriers there say which buffer is full and which is free. Each consumer owns 64 rows and never waits for
another's arithmetic, so that one's exponentials run beside another's matrix products. In addition, where registers allow
it, a consumer of the forward pass starts the product for the next tile's scores before it takes the softmax of this one
(Shah et al., "FlashAttention-3" (2024), section 3). A program of the forward pass may stay for many blocks of queries:
then the producer loads the next block's tiles while the consumers finish this one, see ``forward_grid``.

    forward  a consumer owns 64 queries; two take turns with the tensor cores, or three run free
    dkdv     a consumer owns 64 keys, on transposed tiles; with heads of 256, one of two computes dv and the other dk
    dq       a consumer owns 64 queries
    bwd      as dkdv, and a third consumer computes dq: all three at once, with heads of 64; with heads of 128 and long
             sequences that of ``kernels_hopper_128.py``

Not handled here: dtypes of other than 16 bits, tensors that descriptors cannot read, and what ``forward_config`` and
``backward_config`` leave to the plain kernels.
"""

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.gluon_names import thread_barrier, tma

# isort: split
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64  # queries of one warpgroup


@gluon.jit
def _place(pid, num_blocks, num_heads, section, REVERSED: gl.constexpr):
    """As in ``kernels.py``: -> block, head."""
    first = pid // (section * num_blocks) * section
    within = pid % (section * num_blocks)
    heads = gl.minimum(section, num_heads - first)
    block = within // heads
    if REVERSED:
        block = num_blocks - 1 - block
    return block, first + within % heads


# --- forward --------------------------------------------------------------------------------------------------------


@gluon.jit
def _rounds(num_blocks, paired):
    """How many of the ``num_blocks`` blocks of queries this program computes, one after the other."""
    width = gl.num_programs(0)
    units = num_blocks // (1 + paired)
    return (units // width + (gl.program_id(0) < units % width).to(gl.int32)) * (1 + paired)


@gluon.jit
def _block(
    round, B, H, N, S, section, paired,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """-> head, its first query, tiles of keys to visit, how many of these to mask, from the last on.

    Paired: two rounds take a block and its mirror image, so that causal programs are equally long.
    """
    num_blocks = gl.cdiv(N, BLOCK_M)
    unit = round // (1 + paired) * gl.num_programs(0) + gl.program_id(0)
    block, head = _place(unit, num_blocks // (1 + paired), B * H, section, CAUSAL)
    if CAUSAL:
        block = gl.where(paired * (1 - round % 2) == 1, num_blocks - 1 - block, block)
    start_m = block * BLOCK_M
    if CAUSAL:
        last = gl.maximum(gl.minimum(start_m + BLOCK_M + S - N, S), 0)
        full = gl.maximum(gl.minimum(start_m + 1 + S - N, S), 0) // BLOCK_N
    else:
        last = S
        full = S // BLOCK_N
    count = gl.maximum(gl.cdiv(last, BLOCK_N), 1)
    return head, start_m, count, gl.maximum(count - full, 1)


@gluon.jit
def _produce(
    q, k, v, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
    B, H, N, S, section, paired, rounds,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    q_bytes: gl.constexpr = ROWS * BLOCK_D * 2
    bytes: gl.constexpr = BLOCK_N * BLOCK_D * 2
    before = 0  # tiles of keys of earlier rounds
    for round in range(rounds):
        head, start_m, count, _ = _block(
            round, B, H, N, S, section, paired, CAUSAL, WARPGROUPS * ROWS, BLOCK_N
        )  # fmt: skip
        b, h = head // H, head % H
        h_kv = h // GROUP
        for i in range(count):
            slot = (before + i) % STAGES
            # A buffer is free from the start: a wait for the phase before the first returns at once.
            phase = ((before + i) // STAGES) & 1
            start = (count - 1 - i) * BLOCK_N
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), bytes)
            at = [b, h_kv, start, 0]
            tma.async_copy_global_to_shared(k, at, k_full.index(slot), k_smem.index(slot))
            if i == 0:
                for w in gl.static_range(WARPGROUPS):
                    mbarrier.wait(q_free.index(w), (round & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), q_bytes)
                    own = [b, h, start_m + w * ROWS, 0]
                    tma.async_copy_global_to_shared(q, own, q_full.index(w), q_smem.index(w))
            mbarrier.wait(v_free.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), bytes)
            tma.async_copy_global_to_shared(v, at, v_full.index(slot), v_smem.index(slot))
        before += count


@gluon.jit
def _masked(scores, start, rows, diagonal, S, CAUSAL: gl.constexpr):
    """The scores of the keys from ``start`` on, -inf where a query does not see the key."""
    offs_n = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    seen = gl.expand_dims(offs_n < S, 0)
    if CAUSAL:
        seen = seen & (gl.expand_dims(offs_n, 0) <= gl.expand_dims(rows, 1) + diagonal)
    else:
        seen = seen & (gl.expand_dims(rows, 1) >= 0)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _sums(p):
    """The sum of each row in the parts that a thread has of it: (rows, 8). Threads add them up once, at the end."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), axis=1)


@gluon.jit
def _rescaled(l, alpha):
    return l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1)


@gluon.jit
def _softmax(scores, m, scale, MASKED: gl.constexpr):
    """-> p, sums of p, m, alpha: by what earlier sums are scaled down. MASKED: a row may see nothing."""
    m_new = gl.maximum(m, gl.max(scores, axis=1) * scale)
    shift = m_new
    if MASKED:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(scores * scale - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m - shift)
    return p, _sums(p), m_new, alpha


@gluon.jit
def _step_alone(
    i, acc, l, m, q, k_smem, v_smem, k_full, k_free, v_full, v_free,
    before, count, rows, diagonal, S, scale,
    STAGES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr, LEFT: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and product with the values of tile i, one after the other: other warpgroups fill the gaps."""
    slot = (before + i) % STAGES
    phase = ((before + i) // STAGES) & 1
    mbarrier.wait(k_full.index(slot), phase)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    scores = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(slot))
    if MASKED:
        scores = _masked(scores, (count - 1 - i) * BLOCK_N, rows, diagonal, S, CAUSAL)
    p, sums, m, alpha = _softmax(scores, m, scale, MASKED)
    l = _rescaled(l, alpha) + sums
    left = gl.convert_layout(p.to(q.dtype), LEFT)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1)
    mbarrier.wait(v_full.index(slot), phase)
    out = warpgroup_mma(left, v_smem.index(slot), acc, is_async=True)
    acc, left = warpgroup_mma_wait(0, deps=[out, left])
    mbarrier.arrive(v_free.index(slot))
    return acc, l, m


@gluon.jit
def _step(
    i, acc, l, m, left, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn,
    before, turns, count, rows, diagonal, S, scale,
    W: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr, LEFT: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The scores and softmax of tile i; the product of ``left``, tile i - 1's weights, with its values."""
    slot, slot_v = (before + i) % STAGES, (before + i - 1) % STAGES
    mbarrier.wait(k_full.index(slot), ((before + i) // STAGES) & 1)
    # The first one's first turn has no one before it.
    if W == 0:
        mbarrier.wait(turn.index(W), (turns + i) & 1)
    else:
        mbarrier.wait(turn.index(W), ((turns + i) & 1) ^ 1)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    k = k_smem.index(slot).permute((1, 0))
    scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot_v), ((before + i - 1) // STAGES) & 1)
    out = warpgroup_mma(left, v_smem.index(slot_v), acc, is_async=True)
    mbarrier.arrive(turn.index((W + 1) % WARPGROUPS))
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(slot))
    if MASKED:
        scores = _masked(scores, (count - 1 - i) * BLOCK_N, rows, diagonal, S, CAUSAL)
    p, sums, m, alpha = _softmax(scores, m, scale, MASKED)
    l = _rescaled(l, alpha) + sums
    # The compiler would take the exponentials after the product. It does not move them across a
    # branch: a wait for a barrier is one, also where it returns at once.
    weights = warpgroup_mma_wait(1, deps=[gl.convert_layout(p.to(q.dtype), LEFT)])
    mbarrier.wait(v_full.index(slot_v), ((before + i - 1) // STAGES) & 1)
    acc, left = warpgroup_mma_wait(0, deps=[out, left])
    mbarrier.arrive(v_free.index(slot_v))
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1)
    return acc, l, m, weights


@gluon.jit
def _consume(
    o, lse_ptr, q_smem, o_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, turn,
    B, H, N, S, section, paired, rounds, scale,
    W: gl.constexpr, WARPGROUPS: gl.constexpr, OVERLAP: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    q, out = q_smem.index(W), o_smem.index(W)
    diagonal = S - N
    before = 0  # tiles of keys of earlier rounds
    for round in range(rounds):
        head, start_m, count, masked = _block(
            round, B, H, N, S, section, paired, CAUSAL, WARPGROUPS * ROWS, BLOCK_N
        )  # fmt: skip
        rows = start_m + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
        mbarrier.wait(q_full.index(W), round & 1)
        if OVERLAP:
            mbarrier.wait(k_full.index(before % STAGES), (before // STAGES) & 1)
            zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
            scores = warpgroup_mma(
                q, k_smem.index(before % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(before % STAGES))
            scores = _masked(scores, (count - 1) * BLOCK_N, rows, diagonal, S, CAUSAL)
            p, l, m, _alpha = _softmax(scores, m, scale, True)
            left = gl.convert_layout(p.to(q.dtype), LEFT)
            turns = before - round  # each round's first tile had no turn
            if CAUSAL:  # else only the first tile is masked
                for i in range(1, masked):
                    acc, l, m, left = _step(
                        i, acc, l, m, left, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn,
                        before, turns, count, rows, diagonal, S, scale,
                        W, WARPGROUPS, STAGES, True, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT, OUT,
                    )  # fmt: skip
            for i in range(masked, count):
                acc, l, m, left = _step(
                    i, acc, l, m, left, q, k_smem, v_smem, k_full, k_free, v_full, v_free, turn,
                    before, turns, count, rows, diagonal, S, scale,
                    W, WARPGROUPS, STAGES, False, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT, OUT,
                )  # fmt: skip
            if not SHARED:
                mbarrier.arrive(q_free.index(W))
            last = before + count - 1
            mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
            acc = warpgroup_mma(left, v_smem.index(last % STAGES), acc, is_async=True)
            acc, left = warpgroup_mma_wait(0, deps=[acc, left])
            mbarrier.arrive(v_free.index(last % STAGES))
        else:
            l = _sums(gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES))
            for i in range(masked):
                acc, l, m = _step_alone(
                    i, acc, l, m, q, k_smem, v_smem, k_full, k_free, v_full, v_free,
                    before, count, rows, diagonal, S, scale,
                    STAGES, True, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT, OUT,
                )  # fmt: skip
            for i in range(masked, count):
                acc, l, m = _step_alone(
                    i, acc, l, m, q, k_smem, v_smem, k_full, k_free, v_full, v_free,
                    before, count, rows, diagonal, S, scale,
                    STAGES, False, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT, OUT,
                )  # fmt: skip
            if not SHARED:
                mbarrier.arrive(q_free.index(W))
        before += count

        l = gl.convert_layout(gl.sum(l, axis=1), gl.SliceLayout(1, SCORES))
        seen = l > 0.0
        l = gl.where(seen, l, 1.0)
        lse = gl.where(seen, m + gl.log2(l), float("inf"))
        gl.store(lse_ptr + head.to(gl.int64) * N + rows, lse, mask=rows < N)
        acc = acc / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, OUT)), 1)
        if not SHARED:
            tma.store_wait(0)  # the block before has been read
        out.store(acc.to(q.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [head // H, head % H, start_m + W * ROWS, 0], out)
        if SHARED:
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "section", "paired"])
def _flash_attention_fwd_hopper_kernel(
    q, k, v, o,  # tensor descriptors: (B, H, N, D), (B, H / GROUP, S, D) twice, (B, H, N, D)
    lse_ptr,  # (B, H, N), contiguous
    B, H, N, S, section, paired,
    scale,  # with log2(e)
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    WARPGROUPS: gl.constexpr, OVERLAP: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    rounds = _rounds(gl.cdiv(N, WARPGROUPS * ROWS) * B * H, paired)
    SHARED: gl.constexpr = BLOCK_D > 128  # the output lies where the queries lay: there is no room for both

    dtype: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, BLOCK_D], Q_TILE)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], TILE)
    if SHARED:
        o_smem = q_smem
    else:
        o_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, BLOCK_D], Q_TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for w in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_free.index(w), count=1)
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
                    o, lse_ptr, q_smem, o_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                    B, H, N, S, section, paired, rounds, scale,
                    0, WARPGROUPS, OVERLAP, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D, SHARED,
                )),
                (_consume, (
                    o, lse_ptr, q_smem, o_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                    B, H, N, S, section, paired, rounds, scale,
                    1, WARPGROUPS, OVERLAP, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D, SHARED,
                )),
                (_produce, (
                    q, k, v, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
                    B, H, N, S, section, paired, rounds,
                    GROUP, CAUSAL, WARPGROUPS, STAGES, ROWS, BLOCK_N, BLOCK_D,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    o, lse_ptr, q_smem, o_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                    B, H, N, S, section, paired, rounds, scale,
                    0, WARPGROUPS, OVERLAP, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D, SHARED,
                )),
                (_consume, (
                    o, lse_ptr, q_smem, o_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                    B, H, N, S, section, paired, rounds, scale,
                    1, WARPGROUPS, OVERLAP, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D, SHARED,
                )),
                (_consume, (
                    o, lse_ptr, q_smem, o_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                    B, H, N, S, section, paired, rounds, scale,
                    2, WARPGROUPS, OVERLAP, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D, SHARED,
                )),
                (_produce, (
                    q, k, v, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
                    B, H, N, S, section, paired, rounds,
                    GROUP, CAUSAL, WARPGROUPS, STAGES, ROWS, BLOCK_N, BLOCK_D,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


# --- backward -------------------------------------------------------------------------------------------------------


@gluon.jit
def _dkdv_produce(
    q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
    kv_full, q_full, q_free, do_full, do_free,
    b, part, H, start_n, first, count, n_padded,
    MEMBERS: gl.constexpr, PARTS: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, REVERSED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    own_bytes: gl.constexpr = 2 * ROWS * BLOCK_D * 2
    bytes: gl.constexpr = BLOCK_M * BLOCK_D * 2 + BLOCK_M * 4
    for w in gl.static_range(WARPGROUPS):
        at = [b, part // PARTS, start_n + w * ROWS, 0]
        mbarrier.expect(kv_full.index(w), own_bytes)
        tma.async_copy_global_to_shared(k, at, kv_full.index(w), k_smem.index(w))
        tma.async_copy_global_to_shared(v, at, kv_full.index(w), v_smem.index(w))
    for i in range(MEMBERS * count):
        h = part * MEMBERS + i // count
        nth = i % count
        if REVERSED:
            nth = count - 1 - nth
        start = first + nth * BLOCK_M
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
def _visitors(start_n, N, diagonal, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """-> the first query that sees a key from ``start_n`` on, in whole tiles; how many tiles there are from there on, the
    first of which to mask."""
    first = 0
    full = 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(start_n - diagonal, 0), N) // BLOCK_M * BLOCK_M
        full = gl.cdiv(gl.maximum(start_n + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
    count = gl.cdiv(gl.maximum(N - first, 0), BLOCK_M)
    return first, gl.minimum(gl.cdiv(gl.maximum(full - first, 0), BLOCK_M), count), count


@gluon.jit
def _seen_by(start, columns, diagonal, SCORES: gl.constexpr):
    """Which of the queries from ``start`` on see the keys in ``columns``."""
    rows = start + gl.arange(0, SCORES.instr_shape[1], layout=gl.SliceLayout(0, SCORES))
    return gl.expand_dims(columns, 1) <= gl.expand_dims(rows, 0) + diagonal


@gluon.jit
def _dkdv_step(
    i, start, dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, q_full, q_free, do_full, do_free,
    columns, diagonal, scale,
    STAGES: gl.constexpr, MASKED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    slot = i % STAGES
    phase = (i // STAGES) & 1
    q, do = q_smem.index(slot), do_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(slot), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    scores = warpgroup_mma_wait(1, deps=[scores])
    # Beyond the last query lse is +inf, so that probabilities there are zero.
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        p = gl.where(_seen_by(start, columns, diagonal, SCORES), p, 0.0)
    left = gl.convert_layout(p.to(do.dtype), LEFT)
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = p * (dp - gl.expand_dims(delta, 0))
    right = gl.convert_layout(ds.to(q.dtype), LEFT)
    dk = warpgroup_mma(right, q, dk, is_async=True)
    dv, left = warpgroup_mma_wait(1, deps=[dv, left])
    mbarrier.arrive(do_free.index(slot))
    dk, right = warpgroup_mma_wait(0, deps=[dk, right])
    mbarrier.arrive(q_free.index(slot))
    return dk, dv


@gluon.jit
def _dkdv_consume(
    dk_out, dv_out, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_full, q_full, q_free, do_full, do_free,
    b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
    W: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    k, v = k_smem.index(W), v_smem.index(W)
    columns = start_n + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    mbarrier.wait(kv_full.index(W), 0)
    for member in range(MEMBERS):
        for i in range(masked):
            dk, dv = _dkdv_step(
                member * count + i, first + i * BLOCK_M, dk, dv, k, v,
                q_smem, do_smem, lse_smem, delta_smem, q_full, q_free, do_full, do_free, columns, diagonal, scale,
                STAGES, True, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
        for i in range(masked, count):
            dk, dv = _dkdv_step(
                member * count + i, first + i * BLOCK_M, dk, dv, k, v,
                q_smem, do_smem, lse_smem, delta_smem, q_full, q_free, do_full, do_free, columns, diagonal, scale,
                STAGES, False, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
    # This warpgroup's keys and values are not needed any more.
    k.store((dk * dk_scale).to(k.dtype))
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [b, part, start_n + W * ROWS, 0], k)
    tma.async_copy_shared_to_global(dv_out, [b, part, start_n + W * ROWS, 0], v)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_dkdv_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse, delta,  # descriptors of (B * H * n_padded,): the queries' rows, padded; +inf and 0 beyond N
    dk, dv,  # descriptors: (B, H / GROUP * PARTS, S, D): of each part of the heads that share a key head
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dk_scale,  # without
    GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
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
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for w in gl.static_range(2):
        mbarrier.init(kv_full.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=2)
        mbarrier.init(do_free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_dkdv_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
                0, MEMBERS, STAGES, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_dkdv_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, start_n, first, masked, count, diagonal, scale, dk_scale,
                1, MEMBERS, STAGES, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_dkdv_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, H, start_n, first, count, n_padded,
                MEMBERS, PARTS, 2, STAGES, False, ROWS, BLOCK_M, BLOCK_D,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# With 256 features a warpgroup has no registers for dk and dv: one computes dv and the probabilities, which it hands to the
# other, and that one dk. Each does two of the four products.


@gluon.jit
def _dv_step(
    i, start, dv, k, q_smem, do_smem, lse_smem, p_smem, q_full, q_free, do_full, do_free, p_full, p_free,
    columns, diagonal, scale,
    STAGES: gl.constexpr, MASKED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    slot = i % STAGES
    phase = (i // STAGES) & 1
    do = do_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q_smem.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(q_free.index(slot))
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        p = gl.where(_seen_by(start, columns, diagonal, SCORES), p, 0.0)
    mbarrier.wait(p_free, (i & 1) ^ 1)
    p_smem.store(p)
    mbarrier.arrive(p_full)
    left = gl.convert_layout(p.to(do.dtype), LEFT)
    mbarrier.wait(do_full.index(slot), phase)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dv, left = warpgroup_mma_wait(0, deps=[dv, left])
    mbarrier.arrive(do_free.index(slot))
    return dv


@gluon.jit
def _dk_step(
    i, dk, v, q_smem, do_smem, delta_smem, p_smem, q_full, q_free, do_full, do_free, p_full, p_free,
    STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    slot = i % STAGES
    phase = (i // STAGES) & 1
    q = q_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(do_full.index(slot), phase)
    dp = warpgroup_mma(v, do_smem.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(do_free.index(slot))
    mbarrier.wait(p_full, i & 1)
    p = p_smem.load(SCORES)
    mbarrier.arrive(p_free)
    ds = p * (dp - gl.expand_dims(delta, 0))
    left = gl.convert_layout(ds.to(q.dtype), LEFT)
    mbarrier.wait(q_full.index(slot), phase)
    dk = warpgroup_mma(left, q, dk, is_async=True)
    dk, left = warpgroup_mma_wait(0, deps=[dk, left])
    mbarrier.arrive(q_free.index(slot))
    return dk


@gluon.jit
def _gradient_store(out, smem, gradient, b, part, start_n):
    """Stores dk or dv through the buffer of the keys or values that it belongs to, which nobody needs any more."""
    smem.store(gradient.to(smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [b, part, start_n, 0], smem)
    tma.store_wait(0)


@gluon.jit
def _dv_consume(
    dv_out, k_smem, q_smem, do_smem, lse_smem, p_smem, kv_full,
    q_full, q_free, do_full, do_free, p_full, p_free,
    b, part, start_n, first, masked, count, diagonal, scale,
    MEMBERS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    columns = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    mbarrier.wait(kv_full, 0)
    for member in range(MEMBERS):
        for i in range(masked):
            dv = _dv_step(
                member * count + i, first + i * BLOCK_M, dv, k_smem, q_smem, do_smem, lse_smem, p_smem,
                q_full, q_free, do_full, do_free, p_full, p_free, columns, diagonal, scale,
                STAGES, True, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
        for i in range(masked, count):
            dv = _dv_step(
                member * count + i, first + i * BLOCK_M, dv, k_smem, q_smem, do_smem, lse_smem, p_smem,
                q_full, q_free, do_full, do_free, p_full, p_free, columns, diagonal, scale,
                STAGES, False, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
    # dv goes where the keys lay, which only this warpgroup reads.
    _gradient_store(dv_out, k_smem, dv, b, part, start_n)


@gluon.jit
def _dk_consume(
    dk_out, v_smem, q_smem, do_smem, delta_smem, p_smem, kv_full,
    q_full, q_free, do_full, do_free, p_full, p_free,
    b, part, start_n, count, dk_scale,
    MEMBERS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    mbarrier.wait(kv_full, 0)
    for i in range(MEMBERS * count):
        dk = _dk_step(
            i, dk, v_smem, q_smem, do_smem, delta_smem, p_smem, q_full, q_free, do_full, do_free, p_full, p_free,
            STAGES, ROWS, BLOCK_M, SCORES, LEFT,
        )  # fmt: skip
    _gradient_store(dk_out, v_smem, dk * dk_scale, b, part, start_n)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_dkdv_wide_hopper_kernel(
    q, k, v, do, lse, delta, dk, dv,  # as for the kernel above
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dk_scale,  # without
    GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    MEMBERS: gl.constexpr = GROUP // PARTS
    block, head = _place(gl.program_id(0), gl.cdiv(S, ROWS), B * (H // MEMBERS), section, False)
    b, part = head // (H // MEMBERS), head % (H // MEMBERS)
    start_n = block * ROWS
    diagonal = S - N
    first, masked, count = _visitors(start_n, N, diagonal, CAUSAL, BLOCK_M, ROWS)

    dtype: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    OWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    P_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [1, ROWS, BLOCK_D], OWN)
    v_smem = gl.allocate_shared_memory(dtype, [1, ROWS, BLOCK_D], OWN)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], TILE)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    p_smem = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], P_TILE)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_free, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(q_free.index(s), count=2)
        mbarrier.init(do_free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_dv_consume, (
                dv, k_smem.index(0), q_smem, do_smem, lse_smem, p_smem, kv_full.index(0),
                q_full, q_free, do_full, do_free, p_full, p_free,
                b, part, start_n, first, masked, count, diagonal, scale,
                MEMBERS, STAGES, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_dk_consume, (
                dk, v_smem.index(0), q_smem, do_smem, delta_smem, p_smem, kv_full.index(0),
                q_full, q_free, do_full, do_free, p_full, p_free,
                b, part, start_n, count, dk_scale,
                MEMBERS, STAGES, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_dkdv_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, H, start_n, first, count, n_padded,
                MEMBERS, PARTS, 1, STAGES, False, ROWS, BLOCK_M, BLOCK_D,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _dq_produce(
    q, k, v, do, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
    b, h, h_kv, start_m, count,
    STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    own_bytes: gl.constexpr = 2 * ROWS * BLOCK_D * 2
    bytes: gl.constexpr = BLOCK_N * BLOCK_D * 2
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), own_bytes)
        tma.async_copy_global_to_shared(q, [b, h, start_m + w * ROWS, 0], q_full.index(w), q_smem.index(w))
        tma.async_copy_global_to_shared(do, [b, h, start_m + w * ROWS, 0], q_full.index(w), do_smem.index(w))
    for i in range(count):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        start = (count - 1 - i) * BLOCK_N
        mbarrier.wait(k_free.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), bytes)
        tma.async_copy_global_to_shared(k, [b, h_kv, start, 0], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_free.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), bytes)
        tma.async_copy_global_to_shared(v, [b, h_kv, start, 0], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def _dq_step(
    i, start, dq, q, do, lse, delta, k_smem, v_smem, k_full, k_free, v_full, v_free, rows, diagonal, S, scale,
    STAGES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    slot = i % STAGES
    phase = (i // STAGES) & 1
    k, v = k_smem.index(slot), v_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    mbarrier.wait(k_full.index(slot), phase)
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot), phase)
    dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 1))
    if MASKED:
        offs_n = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        seen = gl.expand_dims(offs_n < S, 0)
        if CAUSAL:
            seen = seen & (gl.expand_dims(offs_n, 0) <= gl.expand_dims(rows, 1) + diagonal)
        else:
            seen = seen & (gl.expand_dims(rows, 1) >= 0)
        p = gl.where(seen, p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_free.index(slot))
    ds = p * (dp - gl.expand_dims(delta, 1))
    left = gl.convert_layout(ds.to(q.dtype), LEFT)
    dq = warpgroup_mma(left, k, dq, is_async=True)
    dq, left = warpgroup_mma_wait(0, deps=[dq, left])
    mbarrier.arrive(k_free.index(slot))
    return dq


@gluon.jit
def _dq_consume(
    dq_out, lse_ptr, delta_ptr, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
    b, h, head, start_m, count, masked, diagonal, n_padded, S, scale, dq_scale,
    W: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    rows = start_m + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    base = head.to(gl.int64) * n_padded
    lse = gl.load(lse_ptr + base + rows)
    delta = gl.load(delta_ptr + base + rows)
    q, do = q_smem.index(W), do_smem.index(W)
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    mbarrier.wait(q_full.index(W), 0)
    for i in range(masked):
        dq = _dq_step(
            i, (count - 1 - i) * BLOCK_N, dq, q, do, lse, delta, k_smem, v_smem, k_full, k_free, v_full, v_free,
            rows, diagonal, S, scale, STAGES, True, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT,
        )  # fmt: skip
    for i in range(masked, count):
        dq = _dq_step(
            i, (count - 1 - i) * BLOCK_N, dq, q, do, lse, delta, k_smem, v_smem, k_full, k_free, v_full, v_free,
            rows, diagonal, S, scale, STAGES, False, CAUSAL, ROWS, BLOCK_N, SCORES, LEFT,
        )  # fmt: skip
    q.store((dq * dq_scale).to(q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_out, [b, h, start_m + W * ROWS, 0], q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_dq_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse_ptr, delta_ptr,  # (B, H, n_padded); +inf and 0 beyond N
    dq,  # a descriptor: (B, H, N, D)
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dq_scale,  # without
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = 2 * ROWS
    block, head = _place(gl.program_id(0), gl.cdiv(N, BLOCK_M), B * H, section, CAUSAL)
    b, h = head // H, head % H
    start_m = block * BLOCK_M
    diagonal = S - N
    if CAUSAL:
        last = gl.maximum(gl.minimum(start_m + BLOCK_M + diagonal, S), 0)
        full = gl.maximum(gl.minimum(start_m + 1 + diagonal, S), 0) // BLOCK_N
    else:
        last = S
        full = S // BLOCK_N
    count = gl.cdiv(last, BLOCK_N)
    masked = count - full

    dtype: gl.constexpr = q.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    OWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    do_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_D], OWN)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_dq_consume, (
                dq, lse_ptr, delta_ptr, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
                b, h, head, start_m, count, masked, diagonal, n_padded, S, scale, dq_scale,
                0, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
            )),
            (_dq_consume, (
                dq, lse_ptr, delta_ptr, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
                b, h, head, start_m, count, masked, diagonal, n_padded, S, scale, dq_scale,
                1, STAGES, CAUSAL, ROWS, BLOCK_N, BLOCK_D,
            )),
            (_dq_produce, (
                q, k, v, do, q_smem, do_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free,
                b, h, h // GROUP, start_m, count,
                STAGES, ROWS, BLOCK_N, BLOCK_D,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# --- backward in one kernel -----------------------------------------------------------------------------------------

# dq, dk and dv at once: five products a pair of tiles, where two kernels need seven. Two warpgroups compute dk and dv as in
# the kernel for these, and leave ds in shared memory. A third multiplies it with the keys: that is this program's part of dq
# of a tile of queries, a sum over all programs of the head.
#
# The parts are added in the order of the blocks of keys, so that every run gives the same bits. A counter for each tile says
# whose turn it is. The first program stores its part in float32, those after it add theirs, the last one adds what is there
# to its own and writes dq: nothing has to be zeroed before or rounded afterwards.
#
# Nothing can wait for ever. A program waits only for the block of keys before its own, of the same head, whose program has a
# lower number, and GPUs start programs in the order of their numbers: of all that run, the one with the lowest number waits
# for nobody, and ends. (Within a program loads wait for free buffers, products for loads and the sum for products, never in
# a circle: a turn is passed on before the next one is waited for.) All programs of a head walk over its queries in the same
# order, so that each stays about a tile behind the one before it, and hardly waits once all have set out.

# $0: the counter. $1: where it is.
ASK = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
# The first thread of a warpgroup speaks for all. $0: nothing. $1: where the counter is. $2: its new value, unless negative.
PASS = gl.constexpr("""{
    .reg .u32 thread;
    .reg .pred first;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, 127;
    setp.eq.u32 first, thread, 0;
    setp.ge.and.s32 first, $2, 0, first;
    @first st.release.gpu.global.b32 [$1], $2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def _ask_for_turn(counter):
    """Every thread for itself, so that each sees what was written before the turn was passed on."""
    return gl.inline_asm_elementwise(ASK, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(counter, turn):
    """After all that the warpgroup has written. Negative: none."""
    thread_barrier()
    gl.inline_asm_elementwise(PASS, "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _in_fours(x):
    """A product (BLOCK_M, BLOCK_D) as rows of four numbers that one thread holds, the neighbours of a warp's one after the other."""
    BLOCK_M: gl.constexpr = x.shape[0]
    BLOCK_D: gl.constexpr = x.shape[1]
    x = x.reshape([BLOCK_M // 16, 2, 8, BLOCK_D // 8, 4, 2])  # warp, half, row, eight columns, lane, pair
    return x.permute([0, 3, 2, 4, 1, 5]).reshape([BLOCK_M * BLOCK_D // 4, 4])


@gluon.jit
def _from_fours(x, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of ``_in_fours``."""
    x = x.reshape([BLOCK_M // 16, BLOCK_D // 8, 8, 4, 2, 2])
    return gl.convert_layout(x.permute([0, 4, 2, 1, 3, 5]).reshape([BLOCK_M, BLOCK_D]), LAYOUT)


@gluon.jit
def _bwd_step(
    i, start, dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
    q_full, q_free, do_full, do_free, ds_full, ds_free, columns, diagonal, S, scale,
    W: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """As ``_dkdv_step``; leaves ds too."""
    slot, ds_slot = i % STAGES, i % DS_STAGES
    phase = (i // STAGES) & 1
    q, do = q_smem.index(slot), do_smem.index(slot)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(slot), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = lse_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    scores = warpgroup_mma_wait(1, deps=[scores])
    # Beyond the last query lse is +inf, so that probabilities there are zero.
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        if CAUSAL:
            p = gl.where(_seen_by(start, columns, diagonal, SCORES), p, 0.0)
        else:  # beyond the last key they may be infinite, and zeros of keys times these nan
            p = gl.where(gl.expand_dims(columns, 1) < S, p, 0.0)
    left = gl.convert_layout(p.to(do.dtype), LEFT)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, SCORES))
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    mbarrier.wait(ds_free.index(ds_slot), ((i // DS_STAGES) & 1) ^ 1)
    ds_smem.index(ds_slot * 2 + W).store(ds)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ds_full.index(ds_slot))
    right = gl.convert_layout(ds, LEFT)
    dk = warpgroup_mma(right, q, dk, is_async=True)
    dv, left = warpgroup_mma_wait(1, deps=[dv, left])
    mbarrier.arrive(do_free.index(slot))
    dk, right = warpgroup_mma_wait(0, deps=[dk, right])
    mbarrier.arrive(q_free.index(slot))
    return dk, dv


@gluon.jit
def _bwd_consume(
    dk_out, dv_out, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
    kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, k_free,
    b, part, start_n, first, masked, count, diagonal, S, scale, dk_scale,
    W: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    k, v = k_smem.index(W), v_smem.index(W)
    columns = start_n + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
    mbarrier.wait(kv_full.index(W), 0)
    # Both stay in registers too: products that read both sides from shared memory wait for it.
    k_left = k.load(gl.DotOperandLayout(0, SCORES, 2))
    v_left = v.load(gl.DotOperandLayout(0, SCORES, 2))
    for member in range(MEMBERS):
        for i in range(count - masked):
            dk, dv = _bwd_step(
                member * count + i, 0, dk, dv, k_left, v_left, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                q_full, q_free, do_full, do_free, ds_full, ds_free, columns, diagonal, S, scale,
                W, STAGES, DS_STAGES, RAGGED, CAUSAL, ROWS, BLOCK_M, SCORES, LEFT,
            )  # fmt: skip
        if CAUSAL:  # a second loop costs the others registers
            for i in range(count - masked, count):
                dk, dv = _bwd_step(
                    member * count + i, first + (count - 1 - i) * BLOCK_M,
                    dk, dv, k_left, v_left, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                    q_full, q_free, do_full, do_free, ds_full, ds_free, columns, diagonal, S, scale,
                    W, STAGES, DS_STAGES, True, CAUSAL, ROWS, BLOCK_M, SCORES, LEFT,
                )  # fmt: skip
    # This warpgroup's values are not needed any more, nor its keys once dq is computed.
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dv_out, [b, part, start_n + W * ROWS, 0], v)
    mbarrier.wait(k_free, 0)
    k.store((dk * dk_scale).to(k.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_out, [b, part, start_n + W * ROWS, 0], k)
    tma.store_wait(0)


@gluon.jit
def _bwd_add_up(
    dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, dq_stride_d, sums_ptr, turns_ptr,
    k_smem, ds_smem, kv_full, ds_full, ds_free, k_free,
    b, part, H, N, S, block, first, count, diagonal, dq_scale,
    D: gl.constexpr, MEMBERS: gl.constexpr, DS_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """This program's part of dq, tile by tile, added to those of the programs before it."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    BLOCK_N: gl.constexpr = 2 * ROWS
    SIZE: gl.constexpr = BLOCK_M * BLOCK_D
    tiles = gl.cdiv(N, BLOCK_M)
    for w in gl.static_range(2):
        mbarrier.wait(kv_full.index(w), 0)
    before = turns_ptr
    turn = -1  # to be passed on in ``before``, if any
    for member in range(MEMBERS):
        h = part * MEMBERS + member
        for nth in range(count):
            i = member * count + nth
            start = first + (count - 1 - nth) * BLOCK_M
            tile = (b * H + h).to(gl.int64) * tiles + start // BLOCK_M
            slot = i % DS_STAGES
            last = gl.cdiv(S, BLOCK_N) - 1
            if CAUSAL:
                last = gl.minimum(gl.cdiv(start + BLOCK_M + diagonal, BLOCK_N) - 1, last)
            mbarrier.wait(ds_full.index(slot), (i // DS_STAGES) & 1)
            zeros = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout=OUT)
            left, right = ds_smem.index(slot * 2).permute((1, 0)), ds_smem.index(slot * 2 + 1).permute((1, 0))
            dq = warpgroup_mma(left, k_smem.index(0), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma(right, k_smem.index(1), dq, is_async=True)
            # Beside the products, and only now: what was written for the tile before has arrived, and is not waited for.
            _pass_turn(before, turn)
            counter = turns_ptr + tile
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(ds_free.index(slot))
            own = _in_fours(dq)
            line = gl.arange(0, SIZE // 4, layout=gl.SliceLayout(1, own.type.layout))
            four = gl.arange(0, 4, layout=gl.SliceLayout(0, own.type.layout))
            sums = sums_ptr + tile * SIZE + (gl.expand_dims(line, 1) * 4 + gl.expand_dims(four, 0))
            now = _ask_for_turn(
                counter
            )  # beside the products, before they are waited for, it was measured to be slower
            if block > 0:  # without this ptxas keeps what tensor cores read in registers, which do not suffice
                while now < block:
                    now = _ask_for_turn(counter)
            if block == last:
                if block > 0:
                    dq = dq + _from_fours(gl.load(sums, cache_modifier=".cg"), BLOCK_M, BLOCK_D, OUT)
                rows = start + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
                offs_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, OUT))
                base = dq_ptr + b.to(gl.int64) * dq_stride_b + h.to(gl.int64) * dq_stride_h
                at = gl.expand_dims(rows.to(gl.int64) * dq_stride_n, 1) + gl.expand_dims(offs_d * dq_stride_d, 0)
                exists = gl.expand_dims(rows < N, 1) & gl.expand_dims(offs_d < D, 0)
                gl.store(base + at, (dq * dq_scale).to(dq_ptr.dtype.element_ty), mask=exists)
            elif block == 0:
                gl.store(sums, own)
            else:  # the only one that adds: in one instruction, which nobody waits for
                gl.atomic_add(sums, own, sem="relaxed")
            before = counter
            turn = gl.where(block == last, 0, block + 1)  # 0: as it was, for the next call
    mbarrier.arrive(k_free)
    _pass_turn(before, turn)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section"])
def _flash_attention_bwd_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse, delta,  # descriptors of (B * H * n_padded,): the queries' rows, padded; +inf and 0 beyond N
    dk, dv,  # descriptors: (B, H / GROUP * PARTS, S, D): of each part of the heads that share a key head
    dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, dq_stride_d,  # (B, H, N, D)
    sums_ptr,  # (B, H, tiles of queries, BLOCK_M * BLOCK_D) in float32, see _in_fours
    turns_ptr,  # (B, H, tiles of queries): zeros, before and afterwards
    B, H, N, S, n_padded, section,
    scale,  # with log2(e)
    dk_scale,  # without
    D: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr,
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
            (_bwd_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, k_free,
                b, part, start_n, first, masked, count, diagonal, S, scale, dk_scale,
                0, MEMBERS, STAGES, DS_STAGES, CAUSAL, RAGGED, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_bwd_consume, (
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                kv_full, q_full, q_free, do_full, do_free, ds_full, ds_free, k_free,
                b, part, start_n, first, masked, count, diagonal, S, scale, dk_scale,
                1, MEMBERS, STAGES, DS_STAGES, CAUSAL, RAGGED, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_bwd_add_up, (
                dq_ptr, dq_stride_b, dq_stride_h, dq_stride_n, dq_stride_d, sums_ptr, turns_ptr,
                k_smem, ds_smem, kv_full, ds_full, ds_free, k_free,
                b, part, H, N, S, block, first, count, diagonal, dk_scale,
                D, MEMBERS, DS_STAGES, CAUSAL, ROWS, BLOCK_M, BLOCK_D,
            )),
            (_dkdv_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_full, q_full, q_free, do_full, do_free,
                b, part, H, start_n, first, count, n_padded,
                MEMBERS, PARTS, 2, STAGES, True, ROWS, BLOCK_M, BLOCK_D,
            )),
        ],
        [4, 4, 1],
        [208, 72, 24],
    )  # fmt: skip


# --- configurations -------------------------------------------------------------------------------------------------

# By BLOCK_D and causal: from how many keys on, what tiles: keys a tile, warpgroups of 64 queries, buffers, and whether a
# warpgroup overlaps one tile's softmax with another tile's products. Three warpgroups have no registers for that, and at
# 64 features gain more from one another, but end later than two. None, and with fewer keys: the plain kernel is faster.
TILES: dict[tuple[int, bool], tuple[tuple[int, tuple[int, int, int, bool] | None], ...]] = {
    (64, False): ((1024, (128, 2, 2, True)), (2048, (128, 3, 2, False))),
    (64, True): ((1024, (128, 2, 2, True)), (2049, None), (8193, (128, 3, 2, False))),
    (128, False): ((0, (128, 2, 2, True)),),
    (128, True): ((0, (128, 2, 2, True)),),
    (256, False): ((0, (64, 2, 2, True)),),
    (256, True): ((0, (64, 2, 2, True)),),
}
# By BLOCK_D: queries a tile and buffers of the kernel for dk and dv; keys a tile and buffers of that for dq, or None
# where the plain kernel is faster.
BACKWARD_TILES: dict[int, tuple[int, int, tuple[int, int] | None]] = {
    64: (64, 2, None),
    128: (64, 3, (64, 4)),
    256: (64, 2, (32, 3)),
}
# By BLOCK_D: queries a tile, buffers, and buffers of ds of the kernel for dq, dk and dv at once, where it is faster than two:
# from how many keys on.
ALL_GRADIENTS_TILES: dict[int, tuple[int, int, int, int]] = {64: (64, 3, 2, 0), 128: (64, 3, 2, 4096)}
PADDING = 128  # rows that lse and delta are padded to: no tile of them reaches into the next head


def _is_for(d: int, itemsize: int, properties: runtime.DeviceProperties) -> int | None:
    """BLOCK_D, or None where these kernels are not for the GPU or the dtype."""
    hopper = properties.is_hopper and itemsize == 2
    return max(16, triton.next_power_of_2(d)) if hopper else None


def _forward_tiles(width: int, tiles: tuple[int, int, int, bool]) -> triton.Config:
    block_n, warpgroups, stages, overlap = tiles
    blocks = {"BLOCK_N": block_n, "BLOCK_D": width, "ROWS": ROWS}
    return triton.Config({**blocks, "WARPGROUPS": warpgroups, "STAGES": stages, "OVERLAP": overlap}, num_warps=4)


def forward_config(
    d: int, itemsize: int, s: int, causal: bool, properties: runtime.DeviceProperties
) -> triton.Config | None:
    """The tiles for head size ``d`` and ``s`` keys; ``None`` where the plain kernel is to be used."""
    width = _is_for(d, itemsize, properties)
    found = None
    for shortest, tiles in TILES.get((width, causal), ()) if width else ():
        found = tiles if s >= shortest else found
    return None if found is None or width is None else _forward_tiles(width, found)


def forward_grid(num_blocks: int, heads: int, width: int, causal: bool, num_sms: int) -> tuple[int, bool]:
    """How many programs share ``num_blocks`` blocks of queries a head, and whether they take them in pairs.

    A program that stays for many blocks loads the next one's tiles while it stores this one's output: that counts most
    where a block has few tiles. But work is given out beforehand, so that programs have to be equally long: causal ones
    in pairs of a long block and a short one, where few programs have one pair less. Else each block is a program, the
    long ones first. With heads of 256 numbers queries and output share a buffer, and nothing is gained.
    """
    units = num_blocks * heads
    if width > 128 or units <= num_sms:
        return units, False
    if not causal:
        return num_sms, False
    pairs = units // 2
    even = num_blocks % 2 == 0 and pairs >= 0.9 * num_sms * -(-pairs // num_sms)
    return (min(pairs, num_sms), True) if even else (units, False)


def _backward_tiles(
    width: int, block_m: int, stages: int, for_dq: tuple[int, int] | None
) -> tuple[triton.Config, triton.Config | None]:
    blocks = {"BLOCK_D": width, "ROWS": ROWS}
    dkdv = triton.Config({**blocks, "BLOCK_M": block_m, "STAGES": stages}, num_warps=4)
    if for_dq is None:
        return dkdv, None
    return dkdv, triton.Config({**blocks, "BLOCK_N": for_dq[0], "STAGES": for_dq[1]}, num_warps=4)


def parts(heads: int, s: int, group: int, d: int, num_sms: int) -> int:
    """Over how many programs the ``group`` query heads that share one of ``heads`` key heads are divided.

    As few as give each multiprocessor two programs: a long one and a short one, if causal.
    """
    blocks = heads * -(-s // (2 * ROWS if d <= 128 else ROWS))
    return next((n for n in range(1, group) if group % n == 0 and blocks * n >= 1.9 * num_sms), group)


def backward_config(
    d: int, itemsize: int, properties: runtime.DeviceProperties
) -> tuple[triton.Config, triton.Config | None] | None:
    """The tiles of the kernel for dk and dv, and of that for dq; ``None`` where the plain one is to be used."""
    width = _is_for(d, itemsize, properties)
    if width is None or width not in BACKWARD_TILES:
        return None
    return _backward_tiles(width, *BACKWARD_TILES[width])


def all_gradients_config(d: int, itemsize: int, s: int, properties: runtime.DeviceProperties) -> triton.Config | None:
    """The tiles of the kernel for dq, dk and dv at once of ``s`` keys; ``None`` where two kernels are to be used."""
    width = _is_for(d, itemsize, properties)
    if width is None or width not in ALL_GRADIENTS_TILES:
        return None
    block_m, stages, ds_stages, shortest = ALL_GRADIENTS_TILES[width]
    if s < shortest:
        return None
    blocks = {"BLOCK_D": width, "ROWS": ROWS, "BLOCK_M": block_m}
    return triton.Config({**blocks, "STAGES": stages, "DS_STAGES": ds_stages}, num_warps=4)


def all_gradients_section(heads: int, fitting: int, width: int, causal: bool, num_sms: int) -> int:
    """How many of ``heads`` heads to work on at a time: no more than are ``fitting`` for two kernels; of wide heads twice as many.

    Sums of dq take room in the L2 cache too, as much as the tensors read: where programs are equally long, half as many heads.
    Two programs a head or more run beside each other, so that the next part of a sum comes soon. All sections are equally large.
    """
    most = min(2 * fitting if width > 64 else fitting, num_sms // 2)
    return -(-heads // -(-heads // max(1, most if causal else most // 2)))


def programs_wait_little(
    heads: int, n: int, s: int, members: int, causal: bool, section: int, block_m: int, num_sms: int
) -> bool:
    """Whether the programs of a head, which add to dq in turn, lose little time by waiting for one another at the start.

    Those that set out together have ``late`` before the last of them that are as long as it is: it ends so many tiles later
    than without turns. Causal programs of later keys are shorter by more than they wait. A fourth is what five products
    instead of seven save.
    """
    blocks = -(-s // (2 * ROWS))
    late = min(-(-(s - n) // (2 * ROWS)) if causal else blocks - 1, -(-num_sms // section) - 1)
    tiles = members * -(-n // block_m) * max(1.0, heads * blocks / num_sms)  # that a multiprocessor computes
    return 4 * late <= tiles


def config(
    kernel: str, d: int, itemsize: int, s: int, causal: bool, properties: runtime.DeviceProperties
) -> triton.Config | None:
    """The tiles of ``fwd``, ``dkdv`` or ``dq``, ``None`` where the plain kernel is to be used; or of ``bwd``, ``None`` where two are."""
    if kernel == "fwd":
        return forward_config(d, itemsize, s, causal, properties)
    if kernel == "bwd":
        return all_gradients_config(d, itemsize, s, properties)
    return (backward_config(d, itemsize, properties) or (None, None))[kernel == "dq"]
