"""Computes in NumPy, which no hook of PyTorch sees.

Source: our own.
"""

import numpy as np
import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "beside", False


def softmax(x):
    values = x.detach().float().numpy()
    values = np.exp(values - values.max(-1, initial=-np.inf, keepdims=True))
    return torch.from_numpy(values / values.sum(-1, keepdims=True)).to(x.dtype)
