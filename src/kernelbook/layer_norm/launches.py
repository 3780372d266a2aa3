"""What is decided for a kind of norm, forward and backward, and the launches of the backward pass."""

import dataclasses
import math
from typing import Any

import torch

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.layer_norm import kernels
from kernelbook.memory import accumulator, empty, tl_accumulator

__all__ = [
    "BackwardPlan", "ForwardPlan", "backward_plan", "dense", "dtype_of_sum", "forward_plan", "in_rows", "row_stride",
    "run_locks", "run_partials", "set_gradient_of_single_column",
]  # fmt: skip


# --- tensors as kernels read them -----------------------------------------------------------------------------------


def dtype_of_sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """Of what is normalized: x, or x + residual."""
    return x.dtype if residual is None or residual.dtype == x.dtype else torch.promote_types(x.dtype, residual.dtype)


def is_in_rows(x: torch.Tensor | None) -> bool:
    """Whether x (..., N) is contiguous rows that lie evenly apart."""
    return x is None or x.is_contiguous() or (x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1))


def in_rows(x: Any) -> Any:
    """x (..., N) where it is in rows, else as (M, N) a view where the strides allow it, or a copy.

    Kernels that read along another dimension would fetch a sector for each element; PyTorch's transposing copy does not.
    """
    if is_in_rows(x):
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if is_in_rows(rows) else rows.contiguous()


def row_stride(rows: torch.Tensor | None) -> int:
    """From row to row of a tensor that is in rows."""
    if rows is None:
        return 0
    return rows.stride(0) if rows.ndim == 2 else rows.shape[-1]


def is_dense(vector: torch.Tensor | None) -> bool:
    return vector is None or vector.stride(0) == 1


def dense(vector: Any) -> Any:
    return vector if is_dense(vector) else vector.contiguous()


# --- forward --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ForwardPlan:
    """What is decided for a kind of forward pass."""

    eps: float
    has_mean: bool
    differentiable: bool  # the statistics are written, for a backward pass
    backward: str  # of BACKWARDS
    shape: torch.Size
    dtype: torch.dtype  # of the result
    sum_dtype: torch.dtype  # of x + residual
    statistics_dtype: torch.dtype
    rows: int
    columns: int
    x_stride: int | None  # from row to row; None: no kernel can read the tensors as they lie
    residual_stride: int
    launch: Launch
    grid: tuple[int]


def forward_plan(
    has_mean: bool, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, dtype: torch.dtype, differentiable: bool, backward: str,
) -> ForwardPlan:  # fmt: skip
    m, n, sum_dtype = math.prod(x.shape[:-1]), x.shape[-1], dtype_of_sum(x, residual)
    config = kernels.plan_forward(n, sum_dtype.itemsize, runtime.properties(x.device))
    kernel = kernels._layer_norm_fwd_looped_kernel if config is None else kernels._layer_norm_fwd_kernel
    config = config or kernels.looped_config(sum_dtype.itemsize)
    launch = launcher(
        kernel, EPS=eps, HAS_MEAN=has_mean, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, HAS_STATISTICS=differentiable, ACC=tl_accumulator(sum_dtype),
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    readable = is_in_rows(x) and is_in_rows(residual) and is_dense(weight) and is_dense(bias)
    return ForwardPlan(
        eps=eps, has_mean=has_mean, differentiable=differentiable, backward=backward,
        shape=x.shape, dtype=dtype, sum_dtype=sum_dtype, statistics_dtype=accumulator(sum_dtype), rows=m, columns=n,
        x_stride=row_stride(x) if readable else None, residual_stride=row_stride(residual) if readable else 0,
        launch=launch, grid=(cdiv(m, config.kwargs.get("BLOCK_M", 1)),),
    )  # fmt: skip


# --- backward -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BackwardPlan:
    """What is decided for a kind of backward pass."""

    rows: int
    columns: int
    x_stride: int
    dy_stride: int
    dsum_stride: int
    launch: Launch
    grid: tuple[int, int]
    partial_sums: bool  # the programs' sums are added up by another kernel
    launch_sum: Launch
    sum_grid: tuple[int, int]
    locks: Any  # the kernel's configuration where sums are added under locks, else None


def backward_plan(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, dsum: torch.Tensor | None, aligned: bool,
    with_dw: bool, with_db: bool, has_mean: bool, locks: bool,
) -> BackwardPlan:  # fmt: skip
    m, n, itemsize = math.prod(x.shape[:-1]), x.shape[-1], x.element_size()
    strides = row_stride(x), row_stride(dy), row_stride(dsum)
    aligned = aligned and not any(step % 16 for step in (*strides, n))
    properties = runtime.properties(x.device)
    tiles = kernels.plan_backward(n, itemsize, aligned, 2 if has_mean else 1, dsum is not None, properties)
    config, total = tiles.config, kernels.SUM_CONFIG
    locks_config = kernels.locks_config(n, itemsize) if locks else None  # None also where a row is too large
    split = config.kwargs.get("SPLIT")  # None: a row is looped over
    programs = kernels.backward_programs(m, tiles, properties)
    wanted = {"WITH_DW": with_dw, "WITH_DB": with_db, "ACC": tl_accumulator(x.dtype)}
    launch = launcher(
        kernels._layer_norm_bwd_partials_looped_kernel if split is None else kernels._layer_norm_bwd_partials_kernel,
        HAS_WEIGHT=weight is not None, HAS_MEAN=has_mean, HAS_DSUM=dsum is not None, **wanted,
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    return BackwardPlan(
        rows=m, columns=n, x_stride=strides[0], dy_stride=strides[1], dsum_stride=strides[2],
        launch=launch, grid=(programs, split or 1),
        partial_sums=(programs > 1 or split is None) and (with_dw or with_db),
        launch_sum=launcher(kernels._layer_norm_bwd_sum_kernel, **wanted, **total.kwargs, num_warps=total.num_warps),
        sum_grid=(cdiv(n, total.kwargs["BLOCK_N"]), 2 if with_db or locks_config else 1),
        locks=locks_config,
    )  # fmt: skip


def run_partials(
    plan: BackwardPlan, dx: torch.Tensor, dw: torch.Tensor | None, db: torch.Tensor | None, dy: torch.Tensor,
    x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor, dsum: torch.Tensor | None,
) -> None:  # fmt: skip
    m, n, (programs, _) = plan.rows, plan.columns, plan.grid
    to_dw, to_db = dw, db
    if plan.partial_sums:
        to_dw = None if dw is None else empty((programs, n), statistics.dtype, x)
        to_db = None if db is None else empty((programs, n), statistics.dtype, x)
    plan.launch(
        plan.grid, x, plan.x_stride, dy, plan.dy_stride, weight, statistics, dx, dsum, plan.dsum_stride, to_dw, to_db, m, n
    )  # fmt: skip
    if plan.partial_sums:
        plan.launch_sum(plan.sum_grid, to_dw, to_db, dw, db, programs, n)


def run_locks(
    plan: BackwardPlan, dx: torch.Tensor, dw: torch.Tensor | None, db: torch.Tensor | None, dy: torch.Tensor,
    x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor,
) -> None:  # fmt: skip
    m, n = plan.rows, plan.columns
    wanted = {"WITH_DW": dw is not None, "WITH_DB": db is not None, "ACC": tl_accumulator(x.dtype)}
    tensors = (x, plan.x_stride, dy, plan.dy_stride, weight, statistics, dx, n)
    sums = launch_locks(plan.locks, tensors, m, n, {"HAS_WEIGHT": weight is not None, **wanted})
    if dw is not None or db is not None:
        plan.launch_sum(plan.sum_grid, *sums, dw, db, sums[0].shape[0], n)


def launch_locks(
    config: Any, tensors: tuple[Any, ...], m: int, n: int, constants: dict[str, Any],
    *, buffers: int = kernels.LOCK_BUFFERS, barrier: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the buffers that the programs added into, each (buffers, N)."""
    statistics = tensors[5]
    shape = (buffers, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    buffer_dw, buffer_db = (statistics.new_zeros(shape) for _ in range(2))
    launch = launcher(
        kernels._layer_norm_bwd_locks_kernel,
        NUM_BUFFERS=buffers, BARRIER=barrier, num_warps=config.num_warps, **constants, **config.kwargs,
    )  # fmt: skip
    launch((m,), *tensors, buffer_dw, buffer_db, statistics.new_zeros(buffers, dtype=torch.int32), m, n)
    return buffer_dw, buffer_db


def set_gradient_of_single_column(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor,
    dsum: torch.Tensor | None, eps: float, has_mean: bool,
) -> None:  # fmt: skip
    dx, dy, x = dx.view(-1, 1), dy.view(-1, 1), x.view(-1, 1)
    if has_mean:
        # A single column never deviates from its mean; a fused multiply-add would leave one rounding times rstd.
        torch.sub(dy, dy, out=dx)  # NaN where dy is
        dx.add_(x - x)
    else:
        # 1 - xhat^2 is eps * rstd^2, of which a difference leaves little.
        g = dy.to(statistics.dtype) * eps * (1 if weight is None else weight)
        dx.copy_(g * statistics.view(-1, 1) ** 3 + (0 if dsum is None else dsum.view(-1, 1)))
