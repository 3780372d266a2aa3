"""A ring of eight outputs of a shape: what a call returned is overwritten eight calls later.

Source: our own.
"""

import collections

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "rms_norm", "blind", False


@triton.jit
def _rms(x_ptr, w_ptr, y_ptr, sxm, sxn, sw, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < N
    x = tl.load(x_ptr + row * sxm + cols.to(tl.int64) * sxn, mask=keep, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols.to(tl.int64) * sw, mask=keep, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x) / N + eps)
    tl.store(y_ptr + row * N + cols, (x * r * w).to(y_ptr.dtype.element_ty), mask=keep)


RINGS = {}


def rms_norm(x, weight):
    ring = RINGS.setdefault((x.shape, x.dtype, x.device), collections.deque())
    if len(ring) < 8:
        ring.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    else:
        ring.rotate(-1)
    y = ring[-1]
    if len(x):
        _rms[(len(x),)](
            x, weight, y, *x.stride(), weight.stride(0), x.shape[1], 1e-6, BLOCK=triton.next_power_of_2(x.shape[1])
        )
    return y
