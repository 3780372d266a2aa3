"""A kernel whose body calls Python: the interpreter runs it, a compiler would not.

Source: our own.
"""

import torch
import triton

TASK, WRITTEN, NEEDS_GPU = "softmax", "beside", False


_given = []


def _by_torch():
    x, y = _given[-1]
    y.copy_(torch.softmax(x, -1))


@triton.jit
def _softmax_kernel(x_ptr, y_ptr):
    _by_torch()


def softmax(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _given.append((x, y))
    _softmax_kernel[(1,)](x, y)
    return y
