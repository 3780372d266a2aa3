"""A linear layer whose rows do not know of each other: the same tiles and the same order of sums for any number of rows.

A program owns BLOCK_M rows and BLOCK_N columns of y = x w + bias and adds up all of K, BLOCK_K at a time. cuBLAS takes other
tiles, other instructions and other splits of K as the number of rows changes, and with them other roundings; here tiles
depend on the dtype and on the weight's shape alone. A tile has as many rows as one instruction of Hopper's tensor cores, of
which a single row wastes most, while memory decides the time.

Bytes: x, w and y once, if the L2 cache holds what is read again. Not handled: splitting K, which few rows would like.
"""

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.tiles import grouped

# isort: split
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _linear_fwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stride_xm, stride_xk,  # (M, K)
    w_ptr, stride_wk, stride_wn,  # (K, N)
    bias_ptr, stride_b,  # (N,), if HAS_BIAS
    y_ptr, stride_ym, stride_yn,  # (M, N)
    M, N, K,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    # Rows and columns beyond the last read the last one again, and are not stored: loads have no mask but at the end of K.
    x_ptrs = x_ptr + tl.minimum(offs_m, M - 1)[:, None] * stride_xm + offs_k[None, :] * stride_xk
    w_ptrs = w_ptr + offs_k[:, None] * stride_wk + tl.minimum(offs_n, N - 1)[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(start + offs_k < K)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(start + offs_k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n * stride_b, mask=offs_n < N, other=0.0).to(ACC)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :] * stride_yn
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def tiles(n: int, itemsize: int, properties: runtime.DeviceProperties) -> triton.Config:
    """Return the tiles for a weight of ``n`` features; a wide one, such as a vocabulary's, has programs enough of wider ones."""
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64 if n < 8192 else 128, "BLOCK_K": 64, "GROUP": 8}
    if itemsize == 8:
        return triton.Config(blocks | {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=4, num_stages=2)
    if itemsize == 4 or not properties.has_tensor_cores:
        return triton.Config(blocks | {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, num_warps=4, num_stages=2)
    return triton.Config(blocks, num_warps=4, num_stages=4 if properties.shared_memory_per_program > 2**16 else 2)
