"""Right solutions written in other ways than the book's. A right kernel that the judge refuses is the judge's fault."""

import dataclasses
import os

os.environ.setdefault("TRITON_INTERPRET", "0")

import torch
import triton
import triton.language as tl

TASKS = {
    "online_softmax": "softmax",
    "split_k": "matmul",
    "sums_by_dot": "row_sum",
    "persistent": "vector_add",
    "by_descriptor": "copy",
    "adds_by_atomics": "rms_norm_dw",
    "Launcher": "strided_copy",
}


@triton.autotune([triton.Config({}, num_warps=w) for w in (1, 2, 4)], key=["N"])
@triton.heuristics({"BLOCK_N": lambda args: min(triton.next_power_of_2(args["N"]), 64)})
@triton.jit
def _online_softmax_kernel(x_ptr, stride_m, stride_n, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest, total = -float("inf"), 0.0
    for start in tl.range(0, N, BLOCK_N):
        offs = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        x = tl.load(x_ptr + row * stride_m + offs * stride_n, mask=offs < N, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - larger) + tl.sum(tl.exp(x - larger))
        highest = larger
    for start in tl.range(0, N, BLOCK_N):
        offs = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        x = tl.load(x_ptr + row * stride_m + offs * stride_n, mask=offs < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row * N + offs, (tl.exp(x - highest) / total).to(y_ptr.dtype.element_ty), mask=offs < N)


def online_softmax(x):
    y = x.new_empty(x.shape)
    if len(x):
        _online_softmax_kernel[lambda meta: (len(x),)](x, *x.stride(), y, x.shape[1])
    return y


@triton.jit
def _split_k_kernel(a_ptr, am, ak, b_ptr, bk, bn, c_ptr, M, N, K, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    offs_m = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    offs_n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(tl.program_id(2) * BLOCK, K, PARTS * BLOCK):
        offs_k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        a = tl.load(a_ptr + offs_m * am + offs_k[None, :] * ak, mask=(offs_m < M) & (offs_k < K)[None, :], other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * bk + offs_n * bn, mask=(offs_n < N) & (offs_k < K)[:, None], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    tl.atomic_add(c_ptr + offs_m * N + offs_n, acc, mask=(offs_m < M) & (offs_n < N))


def split_k(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.zeros(M, N, dtype=torch.float32, device=a.device)
    if M:
        grid = triton.cdiv(M, 16), triton.cdiv(N, 16), 2
        _split_k_kernel[grid](a, *a.stride(), b, *b.stride(), c, M, N, K, BLOCK=16, PARTS=2)
    return c.to(a.dtype)


@triton.jit
def _sums_by_dot_kernel(x_ptr, stride_m, stride_n, out_ptr, M, N, BLOCK: tl.constexpr):
    offs_m = (tl.program_id(0) * 16 + tl.arange(0, 16)).to(tl.int64)
    acc = tl.zeros((16, 16), tl.float32)
    for start in range(0, N, BLOCK):
        offs_n = (start + tl.arange(0, BLOCK)).to(tl.int64)
        ptrs = x_ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
        x = tl.load(ptrs, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(x, tl.full((BLOCK, 16), 1.0, x.dtype), acc, input_precision="ieee")
    tl.store(out_ptr + offs_m, (tl.sum(acc, axis=1) / 16).to(out_ptr.dtype.element_ty), mask=offs_m < M)


def sums_by_dot(x):
    out = torch.empty(len(x), dtype=x.dtype, device=x.device)
    if len(x):
        _sums_by_dot_kernel[(triton.cdiv(len(x), 16),)](x, *x.stride(), out, *x.shape, BLOCK=64)
    return out


@dataclasses.dataclass
class Grid:
    programs: int = 3
    block: int = 128


@triton.jit
def _persistent_kernel(x_ptr, stride_x, y_ptr, stride_y, out_ptr, n, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs * stride_x, mask=offs < n, other=0.0)
        tl.store(out_ptr + offs, x + tl.load(y_ptr + offs * stride_y, mask=offs < n, other=0.0), mask=offs < n)


def persistent(x, y):
    out, grid = torch.empty(len(x), dtype=x.dtype, device=x.device), Grid()
    _persistent_kernel[(grid.programs,)](x, x.stride(0), y, y.stride(0), out, len(x), BLOCK=grid.block)
    return out


@triton.jit
def _descriptor_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(tl.make_block_ptr(x_ptr, (n,), (1,), (pid * BLOCK,), (BLOCK,), (0,)), boundary_check=(0,))
    tl.store(tl.make_block_ptr(out_ptr, (n,), (1,), (pid * BLOCK,), (BLOCK,), (0,)), x, boundary_check=(0,))


def by_descriptor(x):
    out = torch.empty_like(x)
    _descriptor_kernel[(triton.cdiv(len(x), 256),)](x, out, len(x), BLOCK=256)
    return out


@triton.jit
def _dw_kernel(dy_ptr, sdm, sdn, x_ptr, sm, sn, dw_ptr, N, BLOCK_N: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N).to(tl.int64)
    x = tl.load(x_ptr + row * sm + offs * sn, mask=offs < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * sdm + offs * sdn, mask=offs < N, other=0.0).to(tl.float32)
    tl.atomic_add(dw_ptr + offs, dy * x * tl.rsqrt(tl.sum(x * x) / N + 1e-6), mask=offs < N)


def adds_by_atomics(dy, x, weight):
    dw = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(x.shape[1])
    _dw_kernel[(len(x),)](dy, *dy.stride(), x, *x.stride(), dw, x.shape[1], BLOCK_N=width)
    return dw.to(weight.dtype)


@triton.jit
def _rows_kernel(x_ptr, stride_m, stride_n, out_ptr, N, BLOCK_N: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N).to(tl.int64)
    x = tl.load(x_ptr + row * stride_m + offs * stride_n, mask=offs < N, other=0.0)
    tl.store(out_ptr + row * N + offs, x, mask=offs < N)


class _Launcher:
    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            width = triton.next_power_of_2(x.shape[1])
            self.kernel[(len(x),)](x, *x.stride(), out, x.shape[1], BLOCK_N=width)
        return out


Launcher = _Launcher(_rows_kernel)
