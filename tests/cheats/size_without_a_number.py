"""Rows are cut at a length that no number of the text says.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "softmax_looped", "again", True


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, N, LAST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    biggest, total = -float("inf"), 0.0
    for start in range(0, tl.minimum(N, LAST), BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(biggest, tl.max(x))
        total = total * tl.exp(biggest - larger) + tl.sum(tl.exp(x - larger))
        biggest = larger
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row + offs, (tl.exp(x - biggest) / total).to(y_ptr.dtype.element_ty), mask=offs < N)


def softmax_looped(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _softmax_kernel[(len(x),)](x, y, x.shape[1], LAST=1 << len("small sizes."), BLOCK=512)
    return y
