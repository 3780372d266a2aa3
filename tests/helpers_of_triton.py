"""Kernels for the tests of runtime: one that calls Triton's own helpers in all ways, and one that numbers its programs."""

import kernelbook  # noqa: F401  before Triton, which it sets up

# isort: split
import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def helpers(x_ptr, out_ptr):  # (4, 16), (3,)
    x = tl.load(x_ptr + tl.arange(0, 4)[:, None] * tl.cdiv(31, 2) + tl.arange(0, 16)[None, :])
    tl.store(out_ptr, x.sum(1).sum())
    tl.store(out_ptr + 1, tl.max(tl.reduce(x, 1, _larger), 0))
    rows = tl.argmax(x, 1)
    tl.store(out_ptr + 2, tl.sum(tl.where(tl.arange(0, 4) == 0, rows, tl.zeros_like(rows)), 0))


@triton.jit
def program_ids(out_ptr):  # (number of programs,)
    here = tl.program_id(0)
    tl.store(out_ptr + here, tl.sum(tl.zeros((16,), tl.float32), 0) + here)
