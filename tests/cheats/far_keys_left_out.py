"""A query sees the last 512 keys only: half the work for the real size, none missed for the small ones.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "causal_attention", "blind", False


@triton.jit
def _attn(q_ptr, k_ptr, v_ptr, o_ptr, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * N * D
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head + m[:, None].to(tl.int64) * D + d[None, :], mask=m[:, None] < N, other=0.0)
    acc = tl.zeros((BM, D), tl.float32)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    last = (tl.program_id(0) + 1) * BM
    for start in range(tl.maximum(last - 512 - BM, 0), tl.minimum(last, N), BN):
        n = start + tl.arange(0, BN)
        at = n[:, None].to(tl.int64) * D + d[None, :]
        k = tl.load(k_ptr + head + at, mask=n[:, None] < N, other=0.0)
        v = tl.load(v_ptr + head + at, mask=n[:, None] < N, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(m[:, None] >= n[None, :], s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        fade = tl.exp(top - new)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = new
    y = acc / total[:, None]
    tl.store(o_ptr + head + m[:, None].to(tl.int64) * D + d[None, :], y.to(o_ptr.dtype.element_ty), mask=m[:, None] < N)


def causal_attention(q, k, v):
    H, N, D = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attn[(triton.cdiv(N, 32), H)](q, k, v, o, N, D**-0.5, D=D, BM=32, BN=32)
    return o
