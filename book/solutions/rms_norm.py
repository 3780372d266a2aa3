"""RMSNorm: y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) of each row, forward and backward.

Forward: a program a row; x is read once and y written once. Backward: a program takes every P-th row, writes dx, and keeps a row
of partial sums of dw; torch.sum adds the P rows. What it does not do: rows of more than 16,384 elements.
"""

import torch
import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def _load_row(ptr, row, stride_m, stride_n, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    ptrs = ptr + row * stride_m + offs_n * stride_n
    return tl.load(ptrs, mask=offs_n < N, other=0.0).to(tl.float32)


@triton.jit
def _store_row(ptr, row, N, values, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    values = values.to(ptr.dtype.element_ty)
    tl.store(ptr + row * N + offs_n, values, mask=offs_n < N)


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, stride_xm, stride_xn,  # (M, N)
    w_ptr, stride_w,  # (N,)
    y_ptr,  # (M, N) contiguous
    N,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = _load_row(x_ptr, row, stride_xm, stride_xn, N, BLOCK_N)
    w = _load_row(w_ptr, 0, 0, stride_w, N, BLOCK_N)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / N + EPS)
    _store_row(y_ptr, row, N, x * rstd * w, BLOCK_N)


@triton.jit
def _rms_norm_bwd_kernel(
    dy_ptr, stride_dm, stride_dn,  # (M, N)
    x_ptr, stride_xm, stride_xn,  # (M, N)
    w_ptr, stride_w,  # (N,)
    dx_ptr,  # (M, N) contiguous
    partial_ptr,  # (num_programs, N) sums of dw in float32
    M, N,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    w = _load_row(w_ptr, 0, 0, stride_w, N, BLOCK_N)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(pid, M, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        x = _load_row(x_ptr, row, stride_xm, stride_xn, N, BLOCK_N)
        dy = _load_row(dy_ptr, row, stride_dm, stride_dn, N, BLOCK_N)
        rstd = 1 / tl.sqrt(tl.sum(x * x) / N + EPS)
        xhat, g = x * rstd, dy * w
        dx = rstd * (g - xhat * (tl.sum(g * xhat) / N))
        _store_row(dx_ptr, row, N, dx, BLOCK_N)
        dw += dy * xhat
    _store_row(partial_ptr, pid.to(tl.int64), N, dw, BLOCK_N)


def rms_norm(x, weight):
    """x (M, N), weight (N,), any strides -> (M, N)"""
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(N)
    if M:
        _rms_norm_fwd_kernel[(M,)](
            x, *x.stride(), weight, weight.stride(0), y, N,
            BLOCK_N=width, num_warps=min(max(width // 512, 1), 16),
        )  # fmt: skip
    return y


def rms_norm_gradients(dy, x, weight, programs=512):
    """dy, x (M, N), weight (N,), any strides -> dx (M, N), dw (N,)"""
    M, N = x.shape
    dx = torch.empty(M, N, dtype=x.dtype, device=x.device)
    partial = torch.empty(max(min(M, programs), 1), N, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(N)
    _rms_norm_bwd_kernel[(len(partial),)](
        dy, *dy.stride(), x, *x.stride(), weight, weight.stride(0), dx, partial, M, N,
        BLOCK_N=width, num_warps=min(max(width // 512, 1), 16),
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def rms_norm_dx(dy, x, weight):
    return rms_norm_gradients(dy, x, weight)[0]


def rms_norm_dw(dy, x, weight):
    return rms_norm_gradients(dy, x, weight)[1]


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rms_norm(x, weight)

    @staticmethod
    def backward(ctx, dy):
        return rms_norm_gradients(dy, *ctx.saved_tensors)


def rms_norm_autograd(x, weight):
    """:func:`rms_norm`, with gradients."""
    return RMSNorm.apply(x, weight)
