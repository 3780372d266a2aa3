"""A feed-forward block by chosen neurons in one kernel, with atomic additions: the obvious way to fuse its three steps.

A program owns some neurons. Their part of h stays in registers; it is multiplied by their rows of W_down, and the product is added
to y atomically. The sums depend on the order in which programs come, and so do the last bits. Besides y needs zeros first, and one
more pass that rounds it. The library takes two kernels, with h in the L2 cache between them.
"""

import math
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import cdiv, launcher
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.operators import Op
from kernelbook.scatter_ffn import op
from kernelbook.scatter_ffn.kernels import _activate, _rows_at
from kernelbook.tensors import matrix, precision

# isort: split
import triton
import triton.language as tl

__all__ = ["launch_fused", "scatter_ffn_with_atomics"]

NAME = "scatter_ffn_with_atomics"


def scatter_ffn_with_atomics(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, neurons: torch.Tensor, *, activation: str = "relu",
    block_l: int = 32,
) -> torch.Tensor:  # fmt: skip
    """Compute what :func:`kernelbook.scatter_ffn` does without a gate and biases, in one kernel that adds atomically.

    Args:
        x: (..., K), any strides.
        w_up: (N, K).
        w_down: (N, K_out), all of one dtype.
        neurons, activation: as in ``scatter_ffn``.
        block_l: neurons of a program, a power of two of at least 16.

    Returns:
        (..., K_out) in the dtype of ``x``. Its gradients are those of ``scatter_ffn``, without atomics.

    Raises:
        TypeError, ValueError: as ``scatter_ffn``; also for ``block_l``, and within ``same_bits()``.
        RuntimeError: ``torch.use_deterministic_algorithms`` is on.
    """
    block_l = arguments.integer(NAME, "block_l", block_l, least=16)
    return _scatter_ffn_with_atomics(x, w_up, w_down, neurons, activation, block_l)  # type: ignore[no-any-return]


@triton.jit(do_not_specialize=["L"])
def _scatter_ffn_fwd_fused_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # (L,) integers
    x_ptr, stride_xm, stride_xk,  # (M, K)
    up_ptr, stride_un, stride_uk,  # (N, K)
    down_ptr, stride_dn, stride_dk,  # (N, K_out)
    y_ptr,  # (M, K_out) ACC, contiguous; zero, if ADD
    M, N, K, K_out, L,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add act(x W_up[l]^T) W_down[l] of BLOCK_L neurons l to y; h stays in registers.

    Without ADD the sums are stored over one another: a wrong result, whose time is that of everything but the additions.
    """
    pos = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows, exists = _rows_at(rows_ptr, pos, L, N)
    offs_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask_m = offs_m < M
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk
    up_ptrs = up_ptr + offs_k.to(tl.int64)[:, None] * stride_uk + rows[None, :] * stride_un
    acc = tl.zeros((BLOCK_M, BLOCK_L), ACC)
    for k in range(0, K, BLOCK_K):
        mask_k = k + offs_k < K
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # (BLOCK_M, BLOCK_K)
        w = tl.load(up_ptrs, mask=mask_k[:, None] & exists[None, :], other=0.0)  # (BLOCK_K, BLOCK_L)
        acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
        x_ptrs += BLOCK_K * stride_xk
        up_ptrs += BLOCK_K * stride_uk
    h = _activate(acc, ACTIVATION)[0].to(x_ptr.dtype.element_ty)
    offs_c = tl.arange(0, BLOCK_C)
    down_ptrs = down_ptr + rows[:, None] * stride_dn + offs_c.to(tl.int64)[None, :] * stride_dk
    y_ptrs = y_ptr + offs_m[:, None] * K_out + offs_c[None, :]
    for c in range(0, K_out, BLOCK_C):
        mask_c = c + offs_c < K_out
        w = tl.load(down_ptrs, mask=exists[:, None] & mask_c[None, :], other=0.0)  # (BLOCK_L, BLOCK_C)
        part = tl.dot(h, w, input_precision=PRECISION, out_dtype=ACC)
        if ADD:
            tl.atomic_add(y_ptrs, part, mask=mask_m[:, None] & mask_c[None, :], sem="relaxed")
        else:
            tl.store(y_ptrs, part, mask=mask_m[:, None] & mask_c[None, :])
        down_ptrs += BLOCK_C * stride_dk
        y_ptrs += BLOCK_C


def _config(block_l: int) -> triton.Config:
    """Choose the tiles for BLOCK_L neurons a program; 16 tokens, the fewest for tensor cores."""
    small = block_l <= 32
    blocks = {"BLOCK_M": 16, "BLOCK_L": block_l, "BLOCK_K": 128 if small else 64, "BLOCK_C": 256 if small else 64}
    return triton.Config(blocks, num_warps=4, num_stages=3)


def launch_fused(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, neurons: torch.Tensor, activation: str, block_l: int,
    *, add: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return y (M, K_out) in the dtype of sums. ``add=False``: without the additions, to measure what they cost."""
    (m, k), (n, k_out), count = x.shape, w_down.shape, neurons.shape[0]
    total = x.new_zeros((m, k_out), dtype=accumulator(x.dtype))
    if total.numel() and count:
        config = _config(block_l)
        launch = launcher(
            _scatter_ffn_fwd_fused_kernel, ACTIVATION=activation, ADD=add, ACC=tl_accumulator(x.dtype),
            PRECISION=precision(x.dtype), **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        grid = (cdiv(count, block_l), cdiv(m, config.kwargs["BLOCK_M"]))
        operands = (neurons.contiguous(), x, *x.stride(), w_up, *w_up.stride(), w_down, *w_down.stride(), total)
        launch(grid, *operands, m, n, k, k_out, count)
    return total


def _check(x: Any, w_up: Any, w_down: Any, neurons: Any, activation: Any, block_l: int) -> None:
    op.check(x, w_up, w_down, None, None, None, None, neurons, activation, NAME)
    if block_l & (block_l - 1):
        raise ValueError(f"{NAME}: block_l must be a power of two, got {block_l}")
    if runtime.in_same_bits():
        raise ValueError(f"{NAME}: same_bits() must be off, since atomics add up in any order")
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(f"{NAME} has no deterministic implementation: take scatter_ffn")


def _run(
    _: int, outputs: tuple[torch.Tensor], x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor,
    neurons: torch.Tensor, activation: str, block_l: int,
) -> None:  # fmt: skip
    arguments.check_index_values(NAME, "neurons", neurons, w_up.shape[0])
    outputs[0].copy_(launch_fused(matrix(x), w_up, w_down, neurons, activation, block_l).view(outputs[0].shape))


def _gradients(call: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """-> the gradients of x, w_up and w_down."""
    needs = [*(dtype is not None for dtype in call.wanted[:3]), False, False, False, False]
    return op.ffn_backward(dy, *call.saved, None, None, None, *call.kept, call.activation, needs)[:3]  # type: ignore[no-any-return]


_scatter_ffn_with_atomics = Op(
    f"{NAME}(Tensor x, Tensor w_up, Tensor w_down, Tensor neurons, str activation, int block_l) -> Tensor",
    check=_check,
    outputs=lambda x, w_up, w_down, *_: (empty((*x.shape[:-1], w_down.shape[1]), x.dtype, x),),
    plan=lambda x, w_up, w_down, *_: math.prod(x.shape[:-1]) * w_down.shape[1] or None,  # None: nothing to compute
    run=_run,
    saves=("x", "w_up", "w_down"),
    keeps=("neurons",),
    autocast=("x", "w_up", "w_down"),
    backward=_gradients,
)
