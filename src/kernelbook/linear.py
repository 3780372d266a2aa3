"""A linear layer whose rows do not know of each other: the same tiles and the same order of sums for any number of rows.

A program owns BLOCK_M rows and BLOCK_N columns of y = x w + bias and adds up all of K, BLOCK_K at a time. cuBLAS takes other
tiles, other instructions and other splits of K as the number of rows changes, and with them other roundings; here tiles
depend on the dtype and on the weight's shape alone. A tile has as many rows as one instruction of Hopper's tensor cores, of
which a single row wastes most, while memory decides the time.

Bytes: x, w and y once, if the L2 cache holds what is read again. Not handled: splitting K, which few rows would like.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import cdiv, launcher
from kernelbook.memory import empty, tl_accumulator
from kernelbook.operators import Op
from kernelbook.tensors import matrix, precision
from kernelbook.tiles import grouped

# isort: split
import triton
import triton.language as tl

__all__ = ["linear", "product"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, whose rows are the same bits in any batch within :func:`kernelbook.same_bits`.

    Outside of it, it is PyTorch's.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), the dtype of ``x``, any strides.
        bias: (N,), the dtype of ``x``, or ``None``.

    Returns:
        (..., N) in the dtype of ``x``, under autocast in its dtype; summed in float32 (float64 for float64) and rounded once.
        float32 products use tf32 where ``torch.backends.cuda.matmul.allow_tf32`` says so. Differentiable. Within
        ``same_bits`` rows of the gradient of ``x`` are the same bits in any batch too; the gradients of ``weight`` and
        ``bias`` add up over the batch, by PyTorch.

    Raises:
        TypeError, ValueError: within ``same_bits``: a dtype, a shape or a device is not as above.
    """
    if is_dynamo_compiling() or not runtime.in_same_bits():
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias)  # type: ignore[no-any-return]


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor) -> torch.Tensor:
    """Fills out (M, N) with x (M, K) w (K, N) + bias: by these kernels within ``same_bits``, else by PyTorch."""
    if not runtime.in_same_bits():
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    (m, k), n = x.shape, w.shape[1]
    if out.numel() == 0:
        return out
    config = tiles(n, x.element_size(), runtime.properties(x.device))
    block_m, block_n, block_k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    launch = launcher(
        _linear_fwd_kernel, HAS_BIAS=bias is not None, ACC=tl_accumulator(x.dtype), PRECISION=precision(x.dtype),
        EVEN_K=k % block_k == 0, **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    bias, stride_b = (out, 0) if bias is None else (bias, bias.stride(0))
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    launch(grid, x, *x.stride(), w, *w.stride(), bias, stride_b, out, *out.stride(), m, n, k)
    return out


# --- the kernel -----------------------------------------------------------------------------------------------------


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
    """The tiles for a weight of ``n`` features; a wide one, such as a vocabulary's, has programs enough of wider ones."""
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64 if n < 8192 else 128, "BLOCK_K": 64, "GROUP": 8}
    if itemsize == 8:
        return triton.Config(blocks | {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=4, num_stages=2)
    if itemsize == 4 or not properties.has_tensor_cores:
        return triton.Config(blocks | {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, num_warps=4, num_stages=2)
    return triton.Config(blocks, num_warps=4, num_stages=4 if properties.shared_memory_per_program > 2**16 else 2)


# --- the operator ---------------------------------------------------------------------------------------------------


def _check(x: Any, weight: Any, bias: Any) -> None:
    arguments.check_linear("linear", x, "weight", weight)
    arguments.check_alike("linear", x, bias=(bias, weight.shape[:1]))


def _run(
    _: Any, outputs: tuple[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with runtime.same_bits():  # wherever the operator runs, as in a graph that was traced within
        product(matrix(x), weight.t(), bias, out=matrix(outputs[0]))


def _gradients(call: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (x, weight), (needs_dx, needs_dw, needs_db) = call.saved, (dtype is not None for dtype in call.wanted)
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    return (
        _linear(dy, weight.t(), None) if needs_dx else None,
        rows.t() @ x.reshape(rows.shape[0], x.shape[-1]) if needs_dw else None,
        rows.sum(0) if needs_db else None,
    )


_linear = Op(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    check=_check,
    outputs=lambda x, weight, _: (empty((*x.shape[:-1], weight.shape[0]), x.dtype, x),),
    plan=lambda *_: (),  # of tiles and grid :func:`product` takes care
    run=_run,
    saves=("x", "weight"),
    autocast=("x", "weight", "bias"),
    backward=_gradients,
)
