"""Calls PyTorch's own softmax: no kernel at all.

Source: wafer.ai, field guide to reward hacking (benign shortcuts).
"""

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "before", False


def softmax(x):
    return torch.softmax(x, -1)
