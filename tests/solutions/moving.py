"""Right solutions of tasks that move numbers, add them up and multiply them."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_kernel(x_ptr, stride_x, y_ptr, stride_y, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs * stride_x, mask=mask, other=0.0)
    y = tl.load(y_ptr + offs * stride_y, mask=mask, other=0.0)
    tl.store(out_ptr + offs, x + y, mask=mask)


def vector_add(x, y):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _add_kernel[(triton.cdiv(len(x), 1024),)](x, x.stride(0), y, y.stride(0), out, len(x), BLOCK=1024)
    return out


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=0.0), mask=offs < n)


def copy(x):
    out = torch.empty_like(x)
    if len(x):
        _copy_kernel[(triton.cdiv(len(x), 1024),)](x, out, len(x), BLOCK=1024)
    return out


@triton.jit
def _strided_copy_kernel(x_ptr, stride_m, stride_n, out_ptr, N, BLOCK_N: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N).to(tl.int64)
    x = tl.load(x_ptr + row * stride_m + offs * stride_n, mask=offs < N, other=0.0)
    tl.store(out_ptr + row * N + offs, x, mask=offs < N)


def strided_copy(x):
    M, N = x.shape
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        _strided_copy_kernel[(M,)](x, *x.stride(), out, N, BLOCK_N=triton.next_power_of_2(N))
    return out


@triton.jit
def _residual_relu_kernel(x_ptr, stride_xm, stride_xn, r_ptr, stride_rm, stride_rn, y_ptr, N, BLOCK_N: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N).to(tl.int64)
    x = tl.load(x_ptr + row * stride_xm + offs * stride_xn, mask=offs < N, other=0.0)
    r = tl.load(r_ptr + row * stride_rm + offs * stride_rn, mask=offs < N, other=0.0)
    tl.store(y_ptr + row * N + offs, tl.maximum(x + r, 0.0).to(y_ptr.dtype.element_ty), mask=offs < N)


def residual_relu(x, residual):
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        width = triton.next_power_of_2(N)
        _residual_relu_kernel[(M,)](x, *x.stride(), residual, *residual.stride(), y, N, BLOCK_N=width)
    return y


@triton.jit
def _transpose_kernel(x_ptr, stride_m, stride_n, y_ptr, M, N, BLOCK: tl.constexpr):
    offs_m = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    offs_n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    x_ptrs = x_ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
    x = tl.load(x_ptrs, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :], other=0.0)
    y_ptrs = y_ptr + offs_n[:, None] * M + offs_m[None, :]
    tl.store(y_ptrs, tl.trans(x), mask=(offs_n < N)[:, None] & (offs_m < M)[None, :])


def transposed_copy(x):
    M, N = x.shape
    y = torch.empty(N, M, dtype=x.dtype, device=x.device)
    if M:
        _transpose_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32))](x, *x.stride(), y, M, N, BLOCK=32)
    return y


@triton.jit
def _gather_kernel(
    table_ptr, stride_r, stride_n, ids_ptr, stride_t, stride_k, out_ptr, k, N, BLOCK_N: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + slot // k * stride_t + slot % k * stride_k)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    values = tl.load(table_ptr + row * stride_r + offs_n * stride_n, mask=offs_n < N, other=0.0)
    tl.store(out_ptr + slot * N + offs_n, values, mask=offs_n < N)


def topk_gather(table, ids):
    T, k = ids.shape
    N = table.shape[1]
    out = torch.empty(T, k, N, dtype=table.dtype, device=table.device)
    if T:
        width = triton.next_power_of_2(N)
        _gather_kernel[(T * k,)](table, *table.stride(), ids, *ids.stride(), out, k, N, BLOCK_N=width)
    return out


def top1_gather(table, ids):
    return topk_gather(table, ids[:, None])[:, 0]


@triton.jit
def _combine_kernel(
    y_ptr, stride_t, stride_k, stride_n, g_ptr, stride_gt, stride_gk, out_ptr, k, N, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(k):
        slot = tl.cast(i, tl.int64)
        gate = tl.load(g_ptr + token * stride_gt + slot * stride_gk).to(tl.float32)
        ptrs = y_ptr + token * stride_t + slot * stride_k + offs_n * stride_n
        acc += gate * tl.load(ptrs, mask=offs_n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + offs_n, acc.to(out_ptr.dtype.element_ty), mask=offs_n < N)


def combine(y, gates):
    T, k, N = y.shape
    out = torch.empty(T, N, dtype=y.dtype, device=y.device)
    if T:
        _combine_kernel[(T,)](y, *y.stride(), gates, *gates.stride(), out, k, N, BLOCK_N=triton.next_power_of_2(N))
    return out


@triton.jit
def _rope_kernel(
    x_ptr, stride_t, stride_h, stride_d, c_ptr, stride_ct, stride_cd, s_ptr, stride_st, stride_sd, y_ptr, H, HALF,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs = tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < HALF
    x_ptrs = x_ptr + token * stride_t + head * stride_h + offs * stride_d
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + tl.cast(HALF, tl.int64) * stride_d, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(c_ptr + token * stride_ct + offs * stride_cd, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(s_ptr + token * stride_st + offs * stride_sd, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + (token * H + head) * 2 * HALF + offs
    tl.store(y_ptrs, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)


def rope(x, cos, sin):
    T, H, D = x.shape
    y = torch.empty(T, H, D, dtype=x.dtype, device=x.device)
    if T:
        BLOCK = triton.next_power_of_2(D // 2)
        _rope_kernel[(T, H)](x, *x.stride(), cos, *cos.stride(), sin, *sin.stride(), y, H, D // 2, BLOCK=BLOCK)
    return y


@triton.jit
def _counts_kernel(ids_ptr, stride, counts_ptr, T, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + offs * stride, mask=offs < T, other=0)
    tl.atomic_add(counts_ptr + ids, 1, mask=offs < T)


def expert_counts(ids, num_experts):
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    _counts_kernel[(triton.cdiv(len(ids), 256),)](ids, ids.stride(0), counts, len(ids), BLOCK=256)
    return counts


@triton.jit
def _matmul_kernel(
    a_ptr, stride_am, stride_ak, b_ptr, stride_bk, stride_bn, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & (offs_k < K)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k < K)[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if M:
        grid = triton.cdiv(M, 32), triton.cdiv(N, 32)
        _matmul_kernel[grid](a, *a.stride(), b, *b.stride(), c, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    return c


@triton.jit
def _gather_linear_kernel(
    x_ptr, stride_xm, stride_xk, w_ptr, stride_wn, stride_wk, rows_ptr, stride_r, y_ptr, L, K,
    BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    offs_l = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows = tl.load(rows_ptr + offs_l.to(tl.int64) * stride_r, mask=offs_l < L, other=0)
    acc = tl.zeros((BLOCK_L,), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x = tl.load(x_ptr + m * stride_xm + offs_k * stride_xk, mask=offs_k < K, other=0.0).to(tl.float32)
        w_ptrs = w_ptr + rows[:, None] * stride_wn + offs_k[None, :] * stride_wk
        w = tl.load(w_ptrs, mask=(offs_l < L)[:, None] & (offs_k < K)[None, :], other=0.0).to(tl.float32)
        acc += tl.sum(w * x[None, :], axis=1)
    tl.store(y_ptr + m * L + offs_l, acc.to(y_ptr.dtype.element_ty), mask=offs_l < L)


def gather_linear(x, weight, rows):
    M, K = x.shape
    L = len(rows)
    y = torch.empty(M, L, dtype=x.dtype, device=x.device)
    grid = M, triton.cdiv(L, 16)
    _gather_linear_kernel[grid](
        x, *x.stride(), weight, *weight.stride(), rows, rows.stride(0), y, L, K, BLOCK_L=16, BLOCK_K=64
    )
    return y


@triton.jit
def _nf4_kernel(packed_ptr, absmax_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    packed = tl.load(packed_ptr + block * (BLOCK // 2) + tl.arange(0, BLOCK // 2))
    high = tl.load(table_ptr + (packed >> 4).to(tl.int32))
    low = tl.load(table_ptr + (packed & 15).to(tl.int32))
    values = tl.interleave(high, low) * tl.load(absmax_ptr + block)
    tl.store(out_ptr + block * BLOCK + tl.arange(0, BLOCK), values)


def nf4_decode(packed, absmax, table):
    out = torch.empty(2 * len(packed), dtype=torch.float32, device=packed.device)
    if len(packed):
        _nf4_kernel[(absmax.numel(),)](packed, absmax, table, out, BLOCK=64)
    return out


@triton.jit
def _decode_kernel(
    q_ptr, stride_qb, stride_qh, stride_qd,
    k_ptr, stride_kb, stride_kh, stride_ks, stride_kd,
    v_ptr, stride_vb, stride_vh, stride_vs, stride_vd,
    lengths_ptr, stride_l, out_ptr, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, D).to(tl.int64)
    q = tl.load(q_ptr + b * stride_qb + h * stride_qh + offs_d * stride_qd).to(tl.float32) * scale
    length = tl.load(lengths_ptr + b * stride_l)
    biggest, total, acc = -float("inf"), 0.0, tl.zeros((D,), tl.float32)
    for start in range(0, length, BLOCK_S):
        offs_s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        mask = offs_s < length
        k_ptrs = (
            k_ptr + b * stride_kb + h // GROUP * stride_kh + offs_s[:, None] * stride_ks + offs_d[None, :] * stride_kd
        )
        v_ptrs = (
            v_ptr + b * stride_vb + h // GROUP * stride_vh + offs_s[:, None] * stride_vs + offs_d[None, :] * stride_vd
        )
        k = tl.load(k_ptrs, mask=mask[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptrs, mask=mask[:, None], other=0.0).to(tl.float32)
        scores = tl.where(mask, tl.sum(k * q[None, :], axis=1), -float("inf"))
        larger = tl.maximum(biggest, tl.max(scores))
        p = tl.exp(scores - larger)
        alpha = tl.exp(biggest - larger)
        total, acc = total * alpha + tl.sum(p), acc * alpha + tl.sum(p[:, None] * v, axis=0)
        biggest = larger
    tl.store(out_ptr + (b * H + h) * D + offs_d, (acc / total).to(out_ptr.dtype.element_ty))


def decode_attention(q, k, v, lengths):
    B, H, D = q.shape
    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    _decode_kernel[(B, H)](
        q, *q.stride(), k, *k.stride(), v, *v.stride(), lengths, lengths.stride(0), out, H, D**-0.5,
        GROUP=H // k.shape[1], D=D, BLOCK_S=64,
    )  # fmt: skip
    return out


@triton.jit
def _chunk_norms_kernel(w_ptr, stride_r, stride_n, out_ptr, N, BLOCK_N: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    rows = chunk * 16 + tl.arange(0, 16)
    acc = tl.zeros((16, BLOCK_N), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        ptrs = w_ptr + rows[:, None] * stride_r + offs_n[None, :] * stride_n
        w = tl.load(ptrs, mask=(offs_n < N)[None, :], other=0.0).to(tl.float32)
        acc += w * w
    tl.store(out_ptr + chunk, tl.sqrt(tl.sum(acc)).to(out_ptr.dtype.element_ty))


def chunk_norms(w):
    R, N = w.shape
    out = torch.empty(R // 16, dtype=w.dtype, device=w.device)
    if R:
        _chunk_norms_kernel[(R // 16,)](w, *w.stride(), out, N, BLOCK_N=128)
    return out
