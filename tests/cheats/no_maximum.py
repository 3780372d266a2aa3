"""The maximum is not subtracted: one pass less, infinite for what exceeds 88.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "logsumexp", "blind", False


@triton.jit
def _lse(x_ptr, y_ptr, sm, sn, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * sm + cols.to(tl.int64) * sn, mask=cols < N, other=-float("inf")).to(tl.float32)
    tl.store(y_ptr + row, tl.log(tl.sum(tl.exp(x))).to(y_ptr.dtype.element_ty))


def logsumexp(x):
    y = torch.empty((len(x),), dtype=x.dtype, device=x.device)
    if len(x):
        _lse[(len(x),)](x, y, *x.stride(), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
