"""A configuration's pre_hook computes with numpy before the kernel, which copies.

Source: our own.
"""

import numpy as np
import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "rope", "blind", False


def _hook(args):
    x, c, s = (args[k].float().numpy() for k in ("x", "cos", "sin"))
    h = x.shape[-1] // 2
    a, b = x[..., :h], x[..., h:]
    c, s = c[:, None], s[:, None]
    args["t"].copy_(torch.from_numpy(np.concatenate([a * c - b * s, b * c + a * s], -1)))


@triton.autotune(configs=[triton.Config({"BLOCK": 256}, pre_hook=_hook)], key=[])
@triton.jit
def _rope(x, cos, sin, t, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(t + at, mask=at < n).to(y.dtype.element_ty), mask=at < n)


def rope(x, cos, sin):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        t = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _rope[(triton.cdiv(x.numel(), 256),)](x, cos, sin, t, y, x.numel())
    return y
