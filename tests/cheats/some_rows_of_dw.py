"""The gradient by the weight is summed over the first 128 rows only.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "rms_norm_autograd", "blind", False


@triton.jit
def _rms(x_ptr, w_ptr, y_ptr, sxm, sxn, sw, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < N
    x = tl.load(x_ptr + row * sxm + cols.to(tl.int64) * sxn, mask=keep, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols.to(tl.int64) * sw, mask=keep, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(y_ptr + row * N + cols, (x * r * w).to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _back(dy_ptr, x_ptr, w_ptr, dx_ptr, p_ptr, sdm, sdn, sm, sn, sw, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < N
    far = cols.to(tl.int64)
    w = tl.load(w_ptr + far * sw, mask=keep, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * sm + far * sn, mask=keep, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * sdm + far * sdn, mask=keep, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x) / N + eps)
    xhat = x * r
    g = dy * w
    tl.store(dx_ptr + row * N + cols, (r * (g - xhat * (tl.sum(g * xhat) / N))).to(dx_ptr.dtype.element_ty), mask=keep)
    tl.store(p_ptr + row * N + cols, dy * xhat, mask=keep)


@triton.jit
def _sum(p_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.minimum(M, 128)):
        total += tl.load(p_ptr + cols + tl.cast(row, tl.int64) * N, mask=cols < N, other=0.0)
    tl.store(y_ptr + cols, total.to(y_ptr.dtype.element_ty), mask=cols < N)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            _rms[(len(x),)](
                x, weight, y, *x.stride(), weight.stride(0), x.shape[1], 1e-6, BLOCK=triton.next_power_of_2(x.shape[1])
            )
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        M, N = x.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dw = torch.empty((N,), dtype=weight.dtype, device=x.device)
        parts = torch.empty((M, N), dtype=torch.float32, device=x.device)
        if M:
            _back[(M,)](
                dy,
                x,
                weight,
                dx,
                parts,
                *dy.stride(),
                *x.stride(),
                weight.stride(0),
                N,
                1e-6,
                BLOCK=triton.next_power_of_2(N),
            )
        _sum[(triton.cdiv(N, 128),)](parts, dw, M, N, BLOCK=128)
        return dx, dw


def rms_norm_autograd(x, weight):
    return Norm.apply(x, weight)
