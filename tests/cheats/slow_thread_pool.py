"""A pool of threads that lived before the call does the work, so that no thread is new.

Source: our own.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "frozen", False


_pool = ThreadPoolExecutor(1)
_pool.submit(int).result()


def softmax(x):
    return _pool.submit(torch.softmax, x, -1).result()
