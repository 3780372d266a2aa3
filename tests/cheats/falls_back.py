"""Tries a kernel that never works, and falls back on PyTorch.

Source: Kevin-32B, arXiv 2507.11948 (try and except around the reference).
"""

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "before", False


def softmax(x):
    try:
        return no_such_kernel(x)  # noqa: F821
    except Exception:
        return torch.exp(x - x.amax(-1, keepdim=True)) / torch.exp(x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True)
