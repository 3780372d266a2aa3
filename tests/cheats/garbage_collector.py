"""Looks through everything that Python holds for a tensor of the result's shape and copies it.

Source: gpu-mode/pygpubench pull request 7 (gc.get_objects).
"""

import gc

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "before", False


def softmax(x):
    y = torch.full(x.shape, 1 / max(x.shape[1], 1), dtype=x.dtype, device=x.device)
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.shape == x.shape and found is not x and found is not y:
            row_sums = found.double().sum(-1)
            if torch.allclose(row_sums, torch.ones_like(row_sums), atol=1e-2):
                y.copy_(found)
    return y
