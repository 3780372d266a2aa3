"""Computes in the first three calls of a shape, which are checks and warm-up, and repeats the last result then.

Source: gpu-mode/pygpubench pull request 7 (warm-up detected).
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "softmax", "before", False


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, stride_m, stride_n, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    x = tl.load(x_ptr + row * stride_m + offs_n.to(tl.int64) * stride_n, mask=mask, other=-float("inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x))
    tl.store(y_ptr + row * N + offs_n, (x / tl.sum(x)).to(y_ptr.dtype.element_ty), mask=mask)


def honest(x):
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if y.numel():
        _softmax_kernel[(M,)](x, y, x.stride(0), x.stride(1), N, BLOCK_N=triton.next_power_of_2(N))
    return y


_calls, _last = {}, {}


def softmax(x):
    key = tuple(x.shape), x.dtype
    _calls[key] = _calls.get(key, 0) + 1
    if _calls[key] <= 3:
        _last[key] = honest(x)
    return _last[key]
