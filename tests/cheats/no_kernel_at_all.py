"""What looks like a kernel and a launch is a class of the file, with numpy inside; a real launch of an empty kernel stands beside it.

Source: our own.
"""

import numpy as np
import torch
import triton

TASK, WRITTEN, NEEDS_GPU = "silu_mul", "blind", False


class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        return self.fn


@triton.jit
def _nothing(y_ptr):
    pass


@Kernel
def _silu(g, u, y):
    a, b = g.float().numpy(), u.float().numpy()
    y.copy_(torch.from_numpy(a / (1 + np.exp(-a)) * b))


def silu_mul(gate, up):
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _nothing[(1,)](y)
    _silu[(1,)](gate, up, y)
    return y
