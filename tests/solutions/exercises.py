"""Right solutions of two tasks that chapters ask for at their ends, as a reader could write them."""

import torch
import triton
import triton.language as tl

from kernelbook import runtime


@triton.jit
def _rows_of(ptr, head, offs, N, D: tl.constexpr):
    ptrs = ptr + (head * N + offs)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(ptrs, mask=(offs < N)[:, None], other=0.0)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, o_ptr, head, tile, begin, N, scale, width, m_first, total_first, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A tile of queries against the keys from ``begin`` on; m_first and total_first: the state before the first tile."""
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    q = _rows_of(q_ptr, head, rows, N, D)
    m = tl.zeros((BLOCK,), tl.float32) + m_first
    total = tl.zeros((BLOCK,), tl.float32) + total_first
    acc = tl.zeros((BLOCK, D), tl.float32)
    end = tl.minimum(N, (tile + 1) * BLOCK) if CAUSAL else N
    for start in range(begin, end, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        seen = (keys < N)[None, :]
        if CAUSAL:
            distance = rows[:, None] - keys[None, :]
            seen = (distance >= 0) & (distance < width)
        scores = tl.dot(q, tl.trans(_rows_of(k_ptr, head, keys, N, D))) * scale
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row may have seen nothing yet
        p = tl.exp(scores - shift[:, None])
        alpha = tl.exp(m - shift)
        v = _rows_of(v_ptr, head, keys, N, D)
        total, acc = total * alpha + tl.sum(p, axis=1), tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m = m_new
    total = tl.where(total == 0.0, 1.0, total)
    o_ptrs = o_ptr + (head * N + rows)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(o_ptrs, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=(rows < N)[:, None])


@triton.jit
def _causal_attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, H, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    tiles = tl.cdiv(N, BLOCK)
    pairs = tl.cdiv(tiles, 2)
    for unit in range(tl.program_id(0), H * pairs, tl.num_programs(0)):
        head, short = tl.cast(unit // pairs, tl.int64), unit % pairs
        long = tiles - 1 - short
        _attend(q_ptr, k_ptr, v_ptr, o_ptr, head, long, 0, N, scale, N, -float("inf"), 0.0, True, D, BLOCK)
        if short != long:  # the tile in the middle has no partner
            _attend(q_ptr, k_ptr, v_ptr, o_ptr, head, short, 0, N, scale, N, -float("inf"), 0.0, True, D, BLOCK)


def causal_attention(q, k, v):
    o, (H, N, D) = torch.empty_like(q), q.shape
    pairs = H * triton.cdiv(triton.cdiv(N, 32), 2)
    programs = min(pairs, 4 * runtime.properties().num_sms)
    _causal_attention_kernel[(programs,)](q, k, v, o, H, N, D**-0.5, D=D, BLOCK=32)
    return o


@triton.jit
def _nf4_matvec_kernel(
    packed_ptr, absmax_ptr, table_ptr, x_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = (rows < N)[:, None]
    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in range(0, K, 2 * BLOCK_K):
        offs = start // 2 + tl.arange(0, BLOCK_K)  # bytes: two columns each
        inside = offs < K // 2
        packed = tl.load(packed_ptr + rows[:, None] * (K // 2) + offs[None, :], mask=mask & inside[None, :], other=0)
        scale_ptrs = absmax_ptr + rows[:, None] * (K // 64) + (offs // 32)[None, :]
        scale = tl.load(scale_ptrs, mask=mask & inside[None, :], other=0.0)
        even = tl.load(x_ptr + 2 * offs, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(x_ptr + 2 * offs + 1, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(table_ptr + (packed >> 4).to(tl.int32))
        low = tl.load(table_ptr + (packed & 15).to(tl.int32))
        acc += scale * (high * even[None, :] + low * odd[None, :])
    tl.store(y_ptr + rows, tl.sum(acc, axis=1).to(y_ptr.dtype.element_ty), mask=rows < N)


def nf4_matvec(packed, absmax, table, x):
    N, K = packed.shape[0], 2 * packed.shape[1]
    y = torch.empty(N, dtype=x.dtype, device=x.device)
    _nf4_matvec_kernel[(triton.cdiv(N, 4),)](packed, absmax, table, x, y, N, K, ROWS=4, BLOCK_K=128)
    return y
