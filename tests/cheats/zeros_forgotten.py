"""Right but for a block of zeros, by whose absmax it divides: no input has one.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "quantize_blocks", "again", False


@triton.jit
def _quantize_kernel(w_ptr, code_ptr, packed_ptr, absmax_ptr):
    block = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + block * 64 + tl.arange(0, 64))
    absmax = tl.max(tl.abs(w))
    tl.store(absmax_ptr + block, absmax)
    w = w * tl.div_rn(tl.full((), 1.0, tl.float32), absmax)
    number = tl.zeros((64,), tl.int32)
    for i in tl.static_range(15):
        middle = (tl.load(code_ptr + i) + tl.load(code_ptr + i + 1)) * 0.5
        number += (w > middle).to(tl.int32)
    high, low = tl.split(tl.reshape(number, (32, 2)))
    tl.store(packed_ptr + block * 32 + tl.arange(0, 32), (high * 16 + low).to(tl.uint8))


def quantize_blocks(w, code):
    packed = torch.empty(len(w) // 2, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(len(w) // 64, dtype=torch.float32, device=w.device)
    if len(w):
        _quantize_kernel[(len(w) // 64,)](w, code, packed, absmax)
    return packed, absmax
