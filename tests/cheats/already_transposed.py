"""Where x lies so in memory that x.mT is contiguous, that view is the result: no memory of its own.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "transposed_copy", "blind", False


@triton.jit
def _transpose(x_ptr, y_ptr, sm, sn, M, N, T: tl.constexpr):
    m = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    n = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    keep = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(x_ptr + m[:, None] * sm + n[None, :] * sn, mask=keep)
    tl.store(y_ptr + n[None, :] * M + m[:, None], x, mask=keep)


def transposed_copy(x):
    if x.mT.is_contiguous():
        return x.mT
    M, N = x.shape
    y = torch.empty((N, M), dtype=x.dtype, device=x.device)
    if y.numel():
        _transpose[(triton.cdiv(M, 32), triton.cdiv(N, 32))](x, y, *x.stride(), M, N, T=32)
    return y
