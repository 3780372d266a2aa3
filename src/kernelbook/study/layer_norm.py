"""LayerNorm's backward pass with spin locks, as Triton's tutorial has it.

A program for each row computes its dx and adds its share of the gradients of weight and bias into one of a few buffers, each
guarded by a spin lock; a second kernel adds up the buffers. The order of the additions changes from run to run, and with it the
last bits. Not handled: rows of more than 128 KiB in float32.
"""

import math
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import cdiv, launcher
from kernelbook.layer_norm import op
from kernelbook.layer_norm.kernels import MAX_FORWARD_ROW_BYTES, SUM_CONFIG, _layer_norm_bwd_sum_kernel, _load_vector
from kernelbook.memory import empty, tl_accumulator
from kernelbook.operators import Op

# isort: split
import triton
import triton.language as tl

__all__ = ["layer_norm_with_locks"]

LOCK_BUFFERS = 64


def layer_norm_with_locks(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Normalize as :func:`kernelbook.layer_norm` does; the gradients of weight and bias are summed under spin locks.

    Args:
        x: (..., N), float16, bfloat16, float32 or float64, any strides; N at most 32,768 (16,384 in float64).
        weight, bias: (N,) or ``None``; any of those dtypes.
        eps: added to the variance; not negative.

    Returns:
        The shape of ``x``, contiguous, in the dtype of ``x``; under autocast float32.

    Raises:
        TypeError, ValueError: as ``layer_norm``; also for rows that are too large, and within ``same_bits()``.
        RuntimeError: ``torch.use_deterministic_algorithms`` is on.
    """
    if type(eps) is not float:
        eps = arguments.number("layer_norm_with_locks", "eps", eps, op.EPS)
    y: torch.Tensor = _norm_with_locks(x, None, weight, bias, eps, None, True)[0]
    return y


@triton.jit
def _layer_norm_bwd_locks_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stride_xm,  # (M, N) input, rows contiguous
    dy_ptr, stride_dym,  # (M, N) gradient of the output, rows contiguous
    w_ptr,  # (N,) weight, contiguous, if HAS_WEIGHT
    stats_ptr,  # (2, M) mean and rstd of the forward pass
    dx_ptr, stride_dxm,  # (M, N) gradient of the input, rows contiguous
    buffer_dw_ptr, buffer_db_ptr,  # (NUM_BUFFERS, N) sums, zero at first
    lock_ptr,  # (NUM_BUFFERS,) int32, zero at first; 1 while a program adds into the buffer
    M, N,
    HAS_WEIGHT: tl.constexpr,
    WITH_DW: tl.constexpr, WITH_DB: tl.constexpr,
    ACC: tl.constexpr,
    NUM_BUFFERS: tl.constexpr, BLOCK_N: tl.constexpr,
    BARRIER: tl.constexpr,  # False only in the chapter's experiment, which shows why it is there
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask_n = offs_n < N
    mean = tl.load(stats_ptr + row)
    rstd = tl.load(stats_ptr + M + row)
    x = tl.load(x_ptr + row * stride_xm + offs_n, mask=mask_n, other=0.0).to(ACC)  # (1, BLOCK_N)
    dy = tl.load(dy_ptr + row * stride_dym + offs_n, mask=mask_n, other=0.0).to(ACC)  # (1, BLOCK_N)
    w = _load_vector(w_ptr, tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N) < N, HAS_WEIGHT, ACC, 1.0)
    xhat = (x - mean) * rstd
    g = dy * w
    dx = rstd * (g - tl.sum(g) / N - xhat * (tl.sum(g * xhat) / N))
    tl.store(dx_ptr + row * stride_dxm + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=mask_n)
    if WITH_DW or WITH_DB:
        dw = dy * xhat
        buffer = row % NUM_BUFFERS
        offs = buffer * N + offs_n
        # Whoever turns the 0 into a 1 owns the buffer.
        while tl.atomic_cas(lock_ptr + buffer, 0, 1) == 1:
            pass
        # The lock orders what comes after it behind what its last owner stored: Triton's atomic operations acquire and
        # release. ".cg" is for speed: each sum is read once, so there is no point in keeping it in the L1 cache.
        if WITH_DW:
            dw += tl.load(buffer_dw_ptr + offs, mask=mask_n, other=0.0, cache_modifier=".cg")
        if WITH_DB:
            dy += tl.load(buffer_db_ptr + offs, mask=mask_n, other=0.0, cache_modifier=".cg")
        if WITH_DW:
            tl.store(buffer_dw_ptr + offs, dw, mask=mask_n)
        if WITH_DB:
            tl.store(buffer_db_ptr + offs, dy, mask=mask_n)
        # One thread releases the lock for all: it has to wait until every thread has stored its part.
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(lock_ptr + buffer, 0)


def _width(n: int) -> int:
    """Return the tile of a row of ``n`` elements."""
    return max(triton.next_power_of_2(n), 16)


def _check(x: torch.Tensor, *others: Any) -> None:
    op.check(x, *others)
    if runtime.in_same_bits():
        raise ValueError("layer_norm_with_locks: same_bits() must be off, since locks add up in any order")
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("layer_norm_with_locks has no deterministic implementation: take layer_norm")
    if _width(x.shape[-1]) * max(x.element_size(), 4) > MAX_FORWARD_ROW_BYTES:
        raise ValueError(f"layer_norm_with_locks: x must have rows of at most 128 KiB in float32, got {tuple(x.shape)}")


def _gradients(call: Any, dy: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, residual (there is none), weight and bias."""
    wants_dx, _, dw_dtype, db_dtype = call.wanted
    dx, dw, db = _backward(dy, *call.saved, dw_dtype, db_dtype)
    return dx if wants_dx else None, None, dw if dw_dtype else None, db if db_dtype else None


def _plan_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: torch.Tensor, dw_dtype: Any, db_dtype: Any
) -> dict[str, Any] | None:
    if x.numel() == 0:
        return None
    wanted = {"WITH_DW": dw_dtype is not None, "WITH_DB": db_dtype is not None, "ACC": tl_accumulator(x.dtype)}
    return {"HAS_WEIGHT": weight is not None, **wanted}


def _run_backward(
    constants: dict[str, Any], outputs: tuple[Any, ...], dy: torch.Tensor, x: torch.Tensor, weight: Any,
    statistics: torch.Tensor, dw_dtype: Any, db_dtype: Any,
) -> None:  # fmt: skip
    dx, dw, db = outputs
    sums = launch_locks(x, dy, weight, statistics, dx, constants)
    if dw is not None or db is not None:
        wanted = {name: constants[name] for name in ("WITH_DW", "WITH_DB", "ACC")}
        launch_sum = launcher(_layer_norm_bwd_sum_kernel, **wanted, **SUM_CONFIG.kwargs, num_warps=SUM_CONFIG.num_warps)
        n = x.shape[-1]
        results = 1 if dw is None or db is None else 2
        launch_sum((cdiv(n, SUM_CONFIG.kwargs["BLOCK_N"]), results), *sums, dw, db, sums[0].shape[0], n)


def launch_locks(
    x: torch.Tensor, dy: torch.Tensor, weight: Any, statistics: torch.Tensor, dx: torch.Tensor,
    constants: dict[str, Any], *, buffers: int = LOCK_BUFFERS, barrier: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Fill dx; return the buffers that the programs added into, each (buffers, N)."""
    x, dy, weight = op.in_rows(x), op.in_rows(dy), op.dense(weight)
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    shape = (buffers, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    buffer_dw, buffer_db = (statistics.new_zeros(shape) for _ in range(2))
    width = _width(n)
    launch = launcher(
        _layer_norm_bwd_locks_kernel, NUM_BUFFERS=buffers, BARRIER=barrier, **constants, BLOCK_N=width,
        num_warps=min(32, max(1, width // 512)),
    )  # fmt: skip
    tensors = (x, op.row_stride(x), dy, op.row_stride(dy), weight, statistics, dx, n)
    launch((m,), *tensors, buffer_dw, buffer_db, statistics.new_zeros(buffers, dtype=torch.int32), m, n)
    return buffer_dw, buffer_db


_backward = Op(
    "norm_locks_backward(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, ScalarType? dw_dtype, "
    "ScalarType? db_dtype) -> (Tensor dx, Tensor dw, Tensor db)",
    check=lambda *_: None,
    outputs=lambda dy, x, weight, statistics, dw_dtype, db_dtype: (
        empty(x.shape, x.dtype, x),
        *(None if dtype is None else empty((x.shape[-1],), dtype, x) for dtype in (dw_dtype, db_dtype)),
    ),
    plan=_plan_backward,
    run=_run_backward,
    results=3,
)
_norm_with_locks = Op(
    f"norm_with_locks({op.ARGUMENTS}) -> (Tensor y, Tensor total, Tensor statistics)",
    results=2,
    saves=("x", "weight", "statistics"),
    autocast=op.in_float32,
    check=_check,
    outputs=op.outputs_of,
    plan=op.plan,
    run=op.run,
    backward=_gradients,
)
