"""A linear layer whose rows do not know of each other: the same instruction and the same order of sums for any number of rows.

A program owns BLOCK_M rows and BLOCK_N columns of y = x w + bias and adds up all of K. cuBLAS takes other instructions and
other splits of K as the number of rows changes, and with them other roundings. Hopper's ``wgmma`` adds 16 elements of K to
each element of y, in order, whatever the width of the tile (64 rows a warp group at least): so there the tile may follow the
number of rows, and a GPU test compares the bits. Elsewhere it depends on the dtype and on the weight's shape alone.

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
    # What lies beyond the last row or column is not read: a token's tile has many such rows.
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
    w_ptrs = w_ptr + offs_k[:, None] * stride_wk + offs_n[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, K, BLOCK_K):
        mask_k = start + offs_k < K
        x = tl.load(x_ptrs, mask=mask_m if EVEN_K else mask_m & mask_k[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=mask_n if EVEN_K else mask_n & mask_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n * stride_b, mask=offs_n < N, other=0.0).to(ACC)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :] * stride_yn
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m & mask_n)


# BLOCK_M, BLOCK_N, BLOCK_K, warps and stages of tiles that ``wgmma`` multiplies, the largest first.
WGMMA_TILES = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 6),
    (64, 32, 128, 4, 6),
    (64, 16, 128, 4, 6),
)


def tiles(m: int, n: int, itemsize: int, properties: runtime.DeviceProperties) -> triton.Config:
    """Return the tiles for a weight of ``n`` features, and on Hopper for ``m`` rows: the largest ones of which there are enough."""
    if itemsize == 8:
        block_m, block_n, block_k, warps, stages = 32, 32, 16, 4, 2
    elif itemsize == 4 or not properties.has_tensor_cores:
        block_m, block_n, block_k, warps, stages = 32, 32, 32, 4, 2
    elif properties.is_hopper:
        enough = 0.75 * properties.num_sms
        fitting = (t for t in WGMMA_TILES if t[0] <= max(m, 64) and -(-m // t[0]) * -(-n // t[1]) >= enough)
        block_m, block_n, block_k, warps, stages = next(fitting, WGMMA_TILES[-1])
    else:  # a wide weight, such as a vocabulary's, has programs enough of wider tiles
        block_m, block_n, block_k, warps = 64, 64 if n < 8192 else 128, 64, 4
        stages = 4 if properties.shared_memory_per_program > 2**16 else 2
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)
