"""Writes an answer of its own into every socket that the process has.

Source: gpu-mode/pygpubench pull request 7 (file descriptors).
"""

import contextlib
import io
import os
import struct

import torch

TASK, WRITTEN, NEEDS_GPU = "softmax", "beside", False


def softmax(x):
    data = io.BytesIO()
    torch.save({"right": True, "results": []}, data)
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, struct.pack("<Q", data.tell()) + data.getvalue())
    return torch.zeros_like(x)
