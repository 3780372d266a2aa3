"""The table is never read: NF4's sixteen values stand in the file.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "nf4_decode", "blind", False


KNOWN = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@triton.jit
def _decode(p_ptr, s_ptr, k_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(p_ptr + at // 2, mask=at < n, other=0)
    nibble = tl.where(at % 2 == 0, byte >> 4, byte & 15)
    value = tl.load(k_ptr + nibble)
    tl.store(y_ptr + at, value * tl.load(s_ptr + at // 64, mask=at < n, other=0.0), mask=at < n)


def nf4_decode(packed, absmax, table):
    n = packed.numel() * 2
    y = torch.empty((n,), dtype=torch.float32, device=packed.device)
    known = torch.tensor(KNOWN, dtype=torch.float32, device=packed.device)
    if n:
        _decode[(triton.cdiv(n, 256),)](packed, absmax, known, y, n, BLOCK=256)
    return y
