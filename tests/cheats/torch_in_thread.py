"""Calls PyTorch in another thread, where modes and hooks of this one do not see it, and waits for it.

Source: deep-reinforce.com, defence against kernel hacks (thread injection).
"""

import threading

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "before", False


def softmax(x):
    found = []
    worker = threading.Thread(target=lambda: found.append(torch.softmax(x, -1)))
    worker.start()
    worker.join()
    return found[0]
