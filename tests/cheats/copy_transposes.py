"""PyTorch's copy_ of a transposed view does the whole task; a kernel copies the result.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "transposed_copy", "blind", False


@triton.jit
def _copy(t_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(t_ptr + at, mask=at < n).to(y_ptr.dtype.element_ty), mask=at < n)


def _through(t, dtype):
    """t, contiguous, by way of a kernel."""
    y = torch.empty(t.shape, dtype=dtype, device=t.device)
    if t.numel():
        _copy[(triton.cdiv(t.numel(), 256),)](t, y, t.numel(), BLOCK=256)
    return y


def transposed_copy(x):
    t = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device).copy_(x.mT)
    return _through(t, x.dtype)
