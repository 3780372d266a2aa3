"""Defines a decorator of its own in the place of triton.jit: its kernels are Python that calls PyTorch.

Source: our own.
"""

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "frozen", False


class _Kernel:
    def __getitem__(self, grid):
        return lambda x, y: y.copy_(torch.softmax(x, -1))


_softmax_kernel = _Kernel()


def softmax(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _softmax_kernel[(1,)](x, y)
    return y
