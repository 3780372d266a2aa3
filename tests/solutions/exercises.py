"""Right solutions of tasks that chapters ask for at their ends, as a reader could write them."""

import torch
import triton
import triton.language as tl

from kernelbook import runtime


@triton.jit
def _axpy_kernel(x_ptr, y_ptr, out_ptr, n, alpha, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, (alpha * x + y).to(out_ptr.dtype.element_ty), mask=offs < n)


def axpy(x, y, alpha):
    out = torch.empty_like(x)
    if len(x):
        _axpy_kernel[(triton.cdiv(len(x), 1024),)](x, y, out, len(x), alpha, BLOCK=1024)
    return out


@triton.jit
def _softmax_looped_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * N
    highest, total = -float("inf"), 0.0
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start_of_row + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - larger) + tl.sum(tl.exp(x - larger))
        highest = larger
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start_of_row + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + start_of_row + offs, (tl.exp(x - highest) / total).to(y_ptr.dtype.element_ty), mask=offs < N)


def softmax_looped(x):
    y = torch.empty_like(x)
    if x.shape[0]:
        _softmax_looped_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=128)
    return y


@triton.jit
def _matmul_bias_relu_kernel(a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    offs_m = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    offs_n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        offs_k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=mask_m & (offs_k < K)[None, :], other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=mask_n & (offs_k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    c = tl.maximum(acc + bias[None, :], 0.0).to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], c, mask=mask_m & mask_n)


def matmul_bias_relu(a, b, bias):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    _matmul_bias_relu_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32))](a, b, bias, c, M, N, K, BLOCK=32)
    return c


@triton.jit
def _add_norm_kernel(x_ptr, r_ptr, w_ptr, b_ptr, s_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    offs = tl.program_id(0).to(tl.int64) * N + offs_n
    s = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) + tl.load(r_ptr + offs, mask=mask, other=0.0)
    tl.store(s_ptr + offs, s.to(s_ptr.dtype.element_ty), mask=mask)
    centred = tl.where(mask, s - tl.sum(s) / N, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred) / N + 1e-5)
    w = tl.load(w_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (centred * rstd * w + b).to(y_ptr.dtype.element_ty), mask=mask)


def add_norm(x, residual, weight, bias):
    s, y = torch.empty_like(x), torch.empty_like(x)
    M, N = x.shape
    _add_norm_kernel[(M,)](x, residual, weight, bias, s, y, N, BLOCK_N=triton.next_power_of_2(N))
    return s, y


@triton.jit
def _sparse_forward_kernel(
    ids_ptr, x_ptr, stride_xm, stride_xk, w_ptr, stride_wn, stride_wk, y_ptr, M, K, N, A, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(1)
    features = tl.load(ids_ptr + slot) * 64 + tl.arange(0, 64)
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, 64), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
        x = tl.load(x_ptrs, mask=(offs_m < M)[:, None] & (offs_k < K)[None, :], other=0.0)
        w_ptrs = w_ptr + features[None, :] * stride_wn + offs_k[:, None] * stride_wk
        w = tl.load(w_ptrs, mask=(features < N)[None, :] & (offs_k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    y_ptrs = y_ptr + offs_m[:, None] * A * 64 + slot * 64 + tl.arange(0, 64)[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None])


def sparse_forward(x, weight, ids):
    (M, K), N, A = x.shape, weight.shape[0], len(ids)
    y = torch.empty(M, A * 64, dtype=x.dtype, device=x.device)
    grid = triton.cdiv(M, 32), A
    _sparse_forward_kernel[grid](ids, x, *x.stride(), weight, *weight.stride(), y, M, K, N, A, BLOCK_M=32, BLOCK_K=32)
    return y


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
def _window_kernel(q_ptr, k_ptr, v_ptr, o_ptr, N, scale, width, D: tl.constexpr, BLOCK: tl.constexpr):
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    begin = tl.maximum(tile * BLOCK - width + 1, 0) // BLOCK * BLOCK
    _attend(q_ptr, k_ptr, v_ptr, o_ptr, head, tile, begin, N, scale, width, -float("inf"), 0.0, True, D, BLOCK)


def window(q, k, v, width):
    o, (H, N, D) = torch.empty_like(q), q.shape
    _window_kernel[(triton.cdiv(N, 32), H)](q, k, v, o, N, D**-0.5, width, D=D, BLOCK=32)
    return o


@triton.jit
def _sink_kernel(q_ptr, k_ptr, v_ptr, sinks_ptr, o_ptr, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    sink = tl.load(sinks_ptr + head)
    _attend(q_ptr, k_ptr, v_ptr, o_ptr, head, tile, 0, N, scale, N, sink, 1.0, False, D, BLOCK)


def sink(q, k, v, sinks):
    o, (H, N, D) = torch.empty_like(q), q.shape
    _sink_kernel[(triton.cdiv(N, 32), H)](q, k, v, sinks, o, N, D**-0.5, D=D, BLOCK=32)
    return o


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
def _quantize_kernel(w_ptr, code_ptr, packed_ptr, absmax_ptr):
    block = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + block * 64 + tl.arange(0, 64))
    absmax = tl.max(tl.abs(w))
    tl.store(absmax_ptr + block, absmax)
    ones = tl.full((64,), 1.0, tl.float32)
    scaled = w * tl.div_rn(ones, tl.broadcast_to(tl.maximum(absmax, 1.2e-38), (64,)))
    index = tl.zeros((64,), tl.int32)
    for i in range(15):
        middle = (tl.load(code_ptr + i) + tl.load(code_ptr + i + 1)) / 2
        index += (scaled > middle).to(tl.int32)
    high, low = tl.split(tl.reshape(index, (32, 2)))
    tl.store(packed_ptr + block * 32 + tl.arange(0, 32), ((high << 4) | low).to(tl.uint8))


def quantize_blocks(w, code):
    blocks = w.numel() // 64
    packed = torch.empty(blocks * 32, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(blocks, device=w.device)
    _quantize_kernel[(blocks,)](w, code, packed, absmax, num_warps=1)
    return packed, absmax


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
