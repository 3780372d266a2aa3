"""Returns fresh memory, in which the reference's result may still lie.

Source: Sakana AI's CUDA engineer, see ScalingIntelligence/KernelBench issue 25.
"""

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "before", False


def softmax(x):
    return torch.empty_like(x)
