"""Right solutions of tasks about rows, as a reader could write them. A right kernel that the judge refuses is the judge's fault."""

import torch
import triton
import triton.language as tl


@triton.jit
def _load_row(ptr, row, stride_m, stride_n, N, OTHER: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    return tl.load(ptr + row * stride_m + offs_n * stride_n, mask=offs_n < N, other=OTHER).to(tl.float32)


@triton.jit
def _store_row(ptr, row, N, values, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(ptr + row * N + offs_n, values.to(ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _silu_mul_kernel(g_ptr, stride_gm, stride_gn, u_ptr, stride_um, stride_un, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g = _load_row(g_ptr, row, stride_gm, stride_gn, N, 0.0, BLOCK_N)
    u = _load_row(u_ptr, row, stride_um, stride_un, N, 0.0, BLOCK_N)
    _store_row(y_ptr, row, N, g * tl.sigmoid(g) * u, BLOCK_N)


def silu_mul(gate, up):
    M, N = gate.shape
    y = torch.empty(M, N, dtype=gate.dtype, device=gate.device)
    if M:
        _silu_mul_kernel[(M,)](gate, *gate.stride(), up, *up.stride(), y, N, BLOCK_N=triton.next_power_of_2(N))
    return y


@triton.jit
def _softmax_kernel(x_ptr, stride_m, stride_n, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = _load_row(x_ptr, row, stride_m, stride_n, N, -float("inf"), BLOCK_N)
    x = tl.exp(x - tl.max(x))
    _store_row(y_ptr, row, N, x / tl.sum(x), BLOCK_N)


def softmax(x):
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        _softmax_kernel[(M,)](x, *x.stride(), y, N, BLOCK_N=triton.next_power_of_2(N))
    return y


@triton.jit
def _softmax_backward_kernel(
    dy_ptr, stride_dm, stride_dn, y_ptr, stride_ym, stride_yn, dx_ptr, N, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dy = _load_row(dy_ptr, row, stride_dm, stride_dn, N, 0.0, BLOCK_N)
    y = _load_row(y_ptr, row, stride_ym, stride_yn, N, 0.0, BLOCK_N)
    _store_row(dx_ptr, row, N, y * (dy - tl.sum(dy * y)), BLOCK_N)


def softmax_backward(dy, y):
    M, N = y.shape
    dx = torch.empty(M, N, dtype=y.dtype, device=y.device)
    if M:
        _softmax_backward_kernel[(M,)](dy, *dy.stride(), y, *y.stride(), dx, N, BLOCK_N=triton.next_power_of_2(N))
    return dx


@triton.jit
def _logsumexp_kernel(x_ptr, stride_m, stride_n, out_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    biggest, total = -float("inf"), 0.0
    for start in range(0, N, BLOCK_N):
        offs_n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        ptrs = x_ptr + row * stride_m + offs_n * stride_n
        x = tl.load(ptrs, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(biggest, tl.max(x))
        total = total * tl.exp(biggest - larger) + tl.sum(tl.exp(x - larger))
        biggest = larger
    tl.store(out_ptr + row, (biggest + tl.log(total)).to(out_ptr.dtype.element_ty))


def logsumexp(x):
    M, N = x.shape
    out = torch.empty(M, dtype=x.dtype, device=x.device)
    if M:
        _logsumexp_kernel[(M,)](x, *x.stride(), out, N, BLOCK_N=256)
    return out


@triton.jit
def _row_products_kernel(a_ptr, stride_am, stride_an, b_ptr, stride_bm, stride_bn, out_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    a = _load_row(a_ptr, row, stride_am, stride_an, N, 0.0, BLOCK_N)
    b = _load_row(b_ptr, row, stride_bm, stride_bn, N, 0.0, BLOCK_N)
    tl.store(out_ptr + row, tl.sum(a * b).to(out_ptr.dtype.element_ty))


def row_products(a, b):
    M, N = a.shape
    out = torch.empty(M, dtype=a.dtype, device=a.device)
    if M:
        _row_products_kernel[(M,)](a, *a.stride(), b, *b.stride(), out, N, BLOCK_N=triton.next_power_of_2(N))
    return out


@triton.jit
def _column_sum_kernel(x_ptr, stride_m, stride_n, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs_m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        ptrs = x_ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
        acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=offs_n < N)


def column_sum(x):
    M, N = x.shape
    out = torch.empty(N, dtype=x.dtype, device=x.device)
    _column_sum_kernel[(triton.cdiv(N, 32),)](x, *x.stride(), out, M, N, BLOCK_M=32, BLOCK_N=32)
    return out


@triton.jit
def _row_sum_kernel(x_ptr, stride_m, stride_n, out_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = _load_row(x_ptr, row, stride_m, stride_n, N, 0.0, BLOCK_N)
    tl.store(out_ptr + row, tl.sum(x).to(out_ptr.dtype.element_ty))


def row_sum(x):
    M, N = x.shape
    out = torch.empty(M, dtype=x.dtype, device=x.device)
    if M:
        _row_sum_kernel[(M,)](x, *x.stride(), out, N, BLOCK_N=triton.next_power_of_2(N))
    return out


@triton.jit
def _row_argmax_kernel(x_ptr, stride_m, stride_n, out_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = _load_row(x_ptr, row, stride_m, stride_n, N, -float("inf"), BLOCK_N)
    tl.store(out_ptr + row, tl.argmax(x, axis=0).to(tl.int64))


def row_argmax(x):
    M, N = x.shape
    out = torch.empty(M, dtype=torch.int64, device=x.device)
    if M:
        _row_argmax_kernel[(M,)](x, *x.stride(), out, N, BLOCK_N=triton.next_power_of_2(N))
    return out


@triton.jit
def _running_sum_kernel(x_ptr, stride_m, stride_n, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = _load_row(x_ptr, row, stride_m, stride_n, N, 0.0, BLOCK_N)
    _store_row(y_ptr, row, N, tl.cumsum(x, axis=0), BLOCK_N)


def running_sum(x):
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        _running_sum_kernel[(M,)](x, *x.stride(), y, N, BLOCK_N=triton.next_power_of_2(N))
    return y


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return softmax_backward(dy, *ctx.saved_tensors)


def softmax_autograd(x):
    return Softmax.apply(x)
