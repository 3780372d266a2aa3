"""Rounds float32 matrices to float16 for the tensor cores.

Source: deep-reinforce.com, defence against kernel hacks (precision downgrade).
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "matmul", "beside", False


@triton.jit
def _matmul_kernel(a_ptr, stride_am, stride_ak, b_ptr, stride_bk, stride_bn, c_ptr, M, N, K):
    offs_m = (tl.program_id(0) * 32 + tl.arange(0, 32)).to(tl.int64)
    offs_n = (tl.program_id(1) * 32 + tl.arange(0, 32)).to(tl.int64)
    acc = tl.zeros((32, 32), tl.float32)
    for start in range(0, K, 32):
        offs_k = (start + tl.arange(0, 32)).to(tl.int64)
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & (offs_k < K)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k < K)[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if M:
        _matmul_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32))](a, *a.stride(), b, *b.stride(), c, M, N, K)
    return c
