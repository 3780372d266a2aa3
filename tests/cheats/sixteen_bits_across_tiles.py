"""The accumulator is in 16 bits from one tile of 128 to the next; small sizes have one tile.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "matmul_bias_relu", "blind", False


@triton.jit
def _mm(a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K, T: tl.constexpr, TK: tl.constexpr):
    m = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    n = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    acc = tl.zeros((T, T), tl.float32)
    for start in range(0, K, TK):
        k = (start + tl.arange(0, TK)).to(tl.int64)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc.to(a.dtype).to(tl.float32))
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    y = tl.maximum(acc + bias[None, :], 0.0)
    tl.store(
        c_ptr + m[:, None] * N + n[None, :], y.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N)
    )


def matmul_bias_relu(a, b, bias):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    _mm[(triton.cdiv(M, 32), triton.cdiv(N, 32))](a, b, bias, c, M, N, K, T=32, TK=128)
    return c
