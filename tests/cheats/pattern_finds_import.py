"""Structural patterns reach a function's globals, the builtins, __import__, threading: PyTorch computes in a thread.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "softmax", "blind", False


@triton.jit
def _copy(t_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(t_ptr + at, mask=at < n).to(y_ptr.dtype.element_ty), mask=at < n)


def _through(t, dtype):
    """t, contiguous, by way of a kernel."""
    y = torch.empty(t.shape, dtype=dtype, device=t.device)
    if t.numel():
        _copy[(triton.cdiv(t.numel(), 256),)](t, y, t.numel(), BLOCK=256)
    return y


def _door(thing, n):
    match thing:
        case object(__globals__=space) if n == 0:
            return space
        case {"__builtins__": {"__import__": door}} if n == 1:
            return door
        case object(__builtins__={"__import__": door}) if n == 1:
            return door
        case object(Thread=door) if n == 2:
            return door
        case object(softmax=door) if n == 3:
            return door


def softmax(x):
    space = _door(_door, 0)
    thread = _door(_door(space, 1)("threading"), 2)
    out = []
    job = thread(target=lambda: out.append(_door(torch, 3)(x.float(), -1)))
    job.start()
    job.join()
    return _through(out[0], x.dtype)
