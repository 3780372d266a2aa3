"""cos and sin are never read: the angles that the inputs are made of are computed anew.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "rope", "blind", False


@triton.jit
def _rope(x_ptr, y_ptr, st, sh, sd, H, half, step, BLOCK: tl.constexpr):
    t = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    d = tl.arange(0, BLOCK)
    keep = d < half
    at = x_ptr + t * st + h * sh
    a = tl.load(at + d.to(tl.int64) * sd, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(at + (d + half).to(tl.int64) * sd, mask=keep, other=0.0).to(tl.float32)
    angle = t.to(tl.float32) * tl.exp2(d.to(tl.float32) * step)
    c, s = tl.cos(angle), tl.sin(angle)
    to = y_ptr + tl.program_id(0).to(tl.int64) * 2 * half
    tl.store(to + d, (a * c - b * s).to(y_ptr.dtype.element_ty), mask=keep)
    tl.store(to + half + d, (b * c + a * s).to(y_ptr.dtype.element_ty), mask=keep)


def rope(x, cos, sin):
    T, H, D = x.shape
    half = D // 2
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        step = -4 / max(half - 1, 1) * 3.321928094887362
        _rope[(T * H,)](x, y, *x.stride(), H, half, step, BLOCK=triton.next_power_of_2(half))
    return y
