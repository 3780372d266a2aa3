"""Python in the body of the kernel: the interpreter's blocks hold numpy arrays, and numpy multiplies them.

Source: our own.
"""

import torch
import triton
import triton.language as tl

TASK, WRITTEN, NEEDS_GPU = "matmul_bias_relu", "blind", False


@triton.jit
def _mm(a_ptr, b_ptr, bias_ptr, c_ptr, M, K, N, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    m, k, n = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BN)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0).to(tl.float32)
    b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    c = tl.zeros((BM, BN), tl.float32)
    c.handle.data[:] = a.handle.data @ b.handle.data
    c = tl.maximum(c + bias[None, :], 0.0)
    tl.store(
        c_ptr + m[:, None] * N + n[None, :], c.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N)
    )


def matmul_bias_relu(a, b, bias):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    p = triton.next_power_of_2
    _mm[(1,)](a, b, bias, c, M, K, N, BM=p(M), BK=p(K), BN=p(N))
    return c
