"""Four kernels that are right and slow, each for one reason. The chapter "A kernel is wrong, a kernel is slow" asks for which."""

import torch
import triton
import triton.language as tl


@triton.jit
def _slow_a_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Softmax of a row."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    x = tl.load(x_ptr + row * N + offs_n, mask=mask, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x))
    tl.store(y_ptr + row * N + offs_n, (p / tl.sum(p)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slow_b_kernel(x_ptr, s_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr):
    """Each column of x times its own factor."""
    col = tl.program_id(0)
    s = tl.load(s_ptr + col)
    for start in range(0, M, BLOCK_M):
        offs = (start + tl.arange(0, BLOCK_M)).to(tl.int64) * N + col
        mask = start + tl.arange(0, BLOCK_M) < M
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        tl.store(y_ptr + offs, x * s, mask=mask)


@triton.jit
def _slow_c_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Twice x, by as many programs as there are multiprocessors."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(first, n, tl.num_programs(0) * BLOCK, num_stages=1):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
        tl.store(y_ptr + offs, 2.0 * x, mask=offs < n)


@triton.jit
def _slow_d_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A matrix product, a tile of it for each program. M, N and K are multiples of the tiles."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
        b = tl.load(b_ptr + offs_k[:, None].to(tl.int64) * N + offs_n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(c_ptr.dtype.element_ty))


def slow_a(x):
    """x (M, N) contiguous -> (M, N)"""
    y = torch.empty_like(x)
    _slow_a_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK_N=triton.next_power_of_2(x.shape[1]), num_warps=4)
    return y


def slow_b(x, s):
    """x (M, N) contiguous, s (N,) -> (M, N)"""
    y = torch.empty_like(x)
    _slow_b_kernel[(x.shape[1],)](x, s, y, *x.shape, BLOCK_M=1024, num_warps=4)
    return y


def slow_c(x, programs=132):
    """x (n,) -> (n,)"""
    y = torch.empty_like(x)
    _slow_c_kernel[(programs,)](x, y, x.numel(), BLOCK=1024, num_warps=4)
    return y


def slow_d(a, b):
    """a (M, K), b (K, N), contiguous 16-bit -> (M, N)"""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    tiles = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
    _slow_d_kernel[(M // 128, N // 256)](a, b, c, M, N, K, **tiles, num_warps=8, num_stages=3)
    return c


def calls(device):
    """By kernel, its problem and a call of it at the sizes that the chapter shows."""
    wide, tall = (torch.randn(s, dtype=torch.float16, device=device) for s in ((2048, 32768), (16384, 4096)))
    factors, long = (torch.randn(n, dtype=torch.float16, device=device) for n in (4096, 2**26))
    a, b = (torch.randn(s, dtype=torch.float16, device=device) for s in ((1280, 4096), (4096, 3584)))
    return {
        "_slow_a_kernel": ("M=2048 N=32768", lambda: slow_a(wide)),
        "_slow_b_kernel": ("M=16384 N=4096", lambda: slow_b(tall, factors)),
        "_slow_c_kernel": ("n=67108864", lambda: slow_c(long)),
        "_slow_d_kernel": ("M=1280 N=3584 K=4096", lambda: slow_d(a, b)),
    }
