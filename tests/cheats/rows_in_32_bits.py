"""Offsets in 32 bits, hidden in a chain of additions instead of a product.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "rms_norm", "blind", True


@triton.jit
def _rms(x_ptr, w_ptr, y_ptr, sxm, sxn, sw, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    keep = cols < N
    start = tl.zeros((), tl.int32)
    bit = sxm
    left = row
    to = tl.zeros((), tl.int32)
    bit_to = N
    while left > 0:
        start += tl.where(left % 2 == 1, bit, 0).to(tl.int32)
        to += tl.where(left % 2 == 1, bit_to, 0).to(tl.int32)
        bit += bit
        bit_to += bit_to
        left = left // 2
    x = tl.load(x_ptr + start + cols.to(tl.int64) * sxn, mask=keep, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols.to(tl.int64) * sw, mask=keep, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(y_ptr + to + cols, (x * r * w).to(y_ptr.dtype.element_ty), mask=keep)


def rms_norm(x, weight):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _rms[(len(x),)](
            x, weight, y, *x.stride(), weight.stride(0), x.shape[1], 1e-6, BLOCK=triton.next_power_of_2(x.shape[1])
        )
    return y
