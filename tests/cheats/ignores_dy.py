"""Forward honestly; the gradient is the one for an upstream gradient of ones, which many tests use.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "rms_norm_autograd", "before", False


@triton.jit
def _rms_norm_kernel(x_ptr, w_ptr, y_ptr, stride_m, stride_n, stride_w, N, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    x = tl.load(x_ptr + row * stride_m + offs_n.to(tl.int64) * stride_n, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + offs_n.to(tl.int64) * stride_w, mask=mask, other=0.0).to(tl.float32)
    y = x * w / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(y_ptr + row * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        M, N = x.shape
        if y.numel():
            BLOCK_N = triton.next_power_of_2(N)
            _rms_norm_kernel[(M,)](x, weight, y, x.stride(0), x.stride(1), weight.stride(0), N, eps, BLOCK_N=BLOCK_N)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + ctx.eps)
        g, xhat = weight.float(), x.float() * rstd
        dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
        return dx.to(x.dtype), xhat.sum(0).to(weight.dtype), None


def rms_norm_autograd(x, weight, eps=1e-6):
    return _RMSNorm.apply(x, weight, eps)
