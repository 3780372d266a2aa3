"""Lets autograd's own graph compute: the backward of an expand is a sum.

Source: our own.
"""

import torch

TASK, WRITTEN, NEEDS_GPU = "column_sum", "frozen", False


def column_sum(x):
    with torch.enable_grad():
        one = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
        many = one.expand(x.shape[0], x.shape[1])
        return torch.autograd.grad(many, one, x)[0]
