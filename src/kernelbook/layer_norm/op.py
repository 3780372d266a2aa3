"""The public functions in the order of a call: observed or not, plan, new memory, launch; then the gradients the same way."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, composite, launcher, operator, sources
from kernelbook.layer_norm import kernels
from kernelbook.memory import accumulator, empty, present, tl_accumulator
from kernelbook.observed import are_tensors, form, is_aligned, observed, wants_gradient
from kernelbook.plans import KeptPlans

__all__ = ["layer_norm", "rms_norm"]

BACKWARDS = ("partials", "locks")


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    backward: str = "partials",
) -> torch.Tensor:
    """Layer normalization over the last dimension, or over as many as ``normalized_shape`` has.

    Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3. Statistics are computed in float32 (float64 for
    float64 inputs), from the deviations, whatever the dtype of ``x``. What ``torch.nn.functional.layer_norm`` is given by
    name this function takes by the same names; by position it takes no ``normalized_shape``.

    Args:
        x: (..., N), float16, bfloat16, float32 or float64, any strides.
        weight: (N,), or ``normalized_shape``, or ``None``; any of those dtypes.
        bias: as ``weight``.
        eps: added to the variance; not negative.
        normalized_shape: the last dimensions of ``x``, which are normalized together; ``None``: the last one.
        backward: how the gradients of weight and bias are summed over the rows. ``"partials"``: each program keeps a
            partial sum, a second kernel adds them up; bitwise reproducible on one GPU model. ``"locks"``: programs add
            into shared buffers under spin locks, in whatever order they come; for study. Where
            ``torch.use_deterministic_algorithms`` is on, and for rows of more than 128 KiB in float32, ``"partials"``
            is used.

    Returns:
        The shape of ``x``, contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own on a GPU.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or ``eps`` not a number.
        ValueError: ``weight`` or ``bias`` has another shape or device, ``normalized_shape`` is not how ``x`` ends, or
            ``eps`` or ``backward`` has another value.
    """
    if normalized_shape is not None:
        return _over_several(x, weight, bias, eps, normalized_shape, backward)
    if type(eps) is not float or type(backward) is not str:
        eps, backward = _checked_numbers("layer_norm", eps, backward)
    if is_dynamo_compiling() and are_tensors(x, weight, bias):
        return _layer_norm_whole(x, weight, bias, eps, backward, SOURCES)  # type: ignore[no-any-return]
    if observed(x, weight, bias):
        return _layer_norm_by_operators(x, weight, bias, eps, backward)
    differentiable = wants_gradient(x, weight, bias)
    plan = _forward_plan("layer_norm", x, None, weight, bias, eps, _out_dtype(x, None), differentiable, backward)
    if plan.differentiable:
        return _Norm.apply(x, weight, bias, plan)  # type: ignore[no-any-return]
    return _forward(plan, x, None, weight, bias)[0]


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: None = None
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root mean square normalization over the last dimension, ``x / sqrt(mean(x^2) + eps) * weight``.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), section 4. The mean square and all that follows is
    computed in float32 (float64 for float64 inputs) and rounded once, as by ``torch.nn.functional.rms_norm``.

    Args:
        x: (..., N), float16, bfloat16, float32 or float64, any strides.
        weight: (N,) or ``None``, any of those dtypes.
        eps: added to the mean square; not negative.
        residual: the shape of ``x``, any of those dtypes and any strides, or ``None``. It is added to ``x`` first, in the same
            pass over memory, forward and backward.

    Returns:
        (..., N), contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own on a GPU. With a residual the
        pair of the normalized sum and the sum ``x + residual``, which is what the next layer adds to, both in the dtype that
        PyTorch gives such a sum (bfloat16 and a float32 residual: float32).

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or ``eps`` not a number.
        ValueError: ``weight`` or ``residual`` has another shape or device, or ``eps`` another value.
    """
    found: Any
    if type(eps) is not float:
        eps, _ = _checked_numbers("rms_norm", eps, "partials")
    if is_dynamo_compiling() and are_tensors(x, weight, residual):
        found = _rms_norm_whole(x, weight, eps, residual, SOURCES)
        return found[0] if residual is None else (found[0], found[1])
    if observed(x, weight, residual):
        found = _rms_norm_by_operators(x, weight, eps, residual)
        return found[0] if residual is None else (found[0], found[1])
    differentiable = wants_gradient(x, weight, residual)
    dtype = _out_dtype(x, residual)
    plan = _forward_plan("rms_norm", x, residual, weight, None, eps, dtype, differentiable, "partials")
    if residual is None:
        found = _Norm.apply(x, weight, None, plan) if plan.differentiable else _forward(plan, x, None, weight, None)[0]
    elif plan.differentiable:
        found = _NormOfSum.apply(x, residual, weight, plan)
    else:
        found = _forward(plan, x, residual, weight, None)[:2]
    return found


def _over_several(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, normalized_shape: int | Sequence[int], backward: str
) -> torch.Tensor:
    given: Any = normalized_shape if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    shape = tuple(arguments.integer("layer_norm", "normalized_shape", n, "an integer or several") for n in given)
    arguments.check_tensor("layer_norm", "x", x)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"layer_norm: normalized_shape must be how the shape of x ends, {tuple(x.shape)}, got {normalized_shape}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            arguments.check_tensor("layer_norm", name, vector)
            arguments.check_shape("layer_norm", name, vector, shape)
    rows = x.reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape))
    weight, bias = (None if vector is None else vector.reshape(-1) for vector in (weight, bias))
    return layer_norm(rows, weight, bias, eps, backward=backward).view(x.shape)


def _sum_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """Of what is normalized: x, or x + residual."""
    return x.dtype if residual is None or residual.dtype == x.dtype else torch.promote_types(x.dtype, residual.dtype)


def _out_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """What PyTorch's own norm gives; under autocast float32, written as such by the kernel: no copy of x in float32."""
    dtype = _sum_dtype(x, residual)
    if not torch._C._is_any_autocast_enabled() or arguments.autocast_dtype(x) is None:
        return dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _check(op: str, x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: float, backward: str) -> None:
    arguments.check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    _checked_numbers(op, eps, backward)
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    if m >= 2**31 or n >= 2**31 - 2**16:
        raise ValueError(f"{op}: x must have fewer than 2^31 rows and columns, got {m} x {n}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if op == "layer_norm" and isinstance(vector, int | tuple | list):
            raise TypeError(
                f"layer_norm: {name} must be a tensor (a shape goes into normalized_shape=), got {vector!r}"
            )
        if vector is not None:
            arguments.check_tensor(op, name, vector)
            arguments.check_shape(op, name, vector, x.shape[-1:])
    if residual is not None:
        arguments.check_tensor(op, "residual", residual)
        arguments.check_shape(op, "residual", residual, x.shape)
    arguments.check_same_device(op, x=x, weight=weight, bias=bias, residual=residual)


def _checked_numbers(op: str, eps: float, backward: str) -> tuple[float, str]:
    """``eps`` as a float and ``backward`` as it is: what a plan's key holds of them."""
    found = arguments.number(op, "eps", eps, "a number that is not negative")
    if not 0 <= found < math.inf:
        raise ValueError(f"{op}: eps must be a number that is not negative, got {eps!r}")
    arguments.check_choice(op, "backward", backward, BACKWARDS)
    return found, backward


# --- forward --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _ForwardPlan:
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


_forward_plans = KeptPlans[_ForwardPlan]()


def _forward_plan(
    op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, dtype: torch.dtype, differentiable: bool, backward: str,
) -> _ForwardPlan:  # fmt: skip
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    tensors = form(x), form(residual), form(weight), form(bias)
    key = (op, tensors, eps, dtype, differentiable, backward, runtime.compile_target)
    plan = _forward_plans.get(key)
    if plan is None:
        _check(op, x, residual, weight, bias, eps, backward)
        plan = _new_forward_plan(op == "layer_norm", x, residual, weight, bias, eps, dtype, differentiable, backward)
        _forward_plans.keep(key, plan)
    return plan


def _new_forward_plan(
    has_mean: bool, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, dtype: torch.dtype, differentiable: bool, backward: str,
) -> _ForwardPlan:  # fmt: skip
    m, n, sum_dtype = math.prod(x.shape[:-1]), x.shape[-1], _sum_dtype(x, residual)
    config = kernels.plan_forward(n, sum_dtype.itemsize, runtime.properties(x.device))
    kernel = kernels._layer_norm_fwd_looped_kernel if config is None else kernels._layer_norm_fwd_kernel
    config = config or kernels.looped_config(sum_dtype.itemsize)
    launch = launcher(
        kernel, EPS=eps, HAS_MEAN=has_mean, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, HAS_STATISTICS=differentiable, ACC=tl_accumulator(sum_dtype),
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    readable = _is_in_rows(x) and _is_in_rows(residual) and _is_dense(weight) and _is_dense(bias)
    return _ForwardPlan(
        eps=eps, has_mean=has_mean, differentiable=differentiable, backward=backward,
        shape=x.shape, dtype=dtype, sum_dtype=sum_dtype, statistics_dtype=accumulator(sum_dtype), rows=m, columns=n,
        x_stride=_row_stride(x) if readable else None, residual_stride=_row_stride(residual) if readable else 0,
        launch=launch, grid=(cdiv(m, config.kwargs.get("BLOCK_M", 1)),),
    )  # fmt: skip


def _forward(
    plan: _ForwardPlan, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Any, Any]:  # fmt: skip
    """-> y; with a residual x + residual, else None; if the plan is differentiable the statistics, else None."""
    m, n = plan.rows, plan.columns
    y = empty(plan.shape, plan.dtype, x)
    total = None if residual is None else empty(plan.shape, plan.sum_dtype, x)
    # Mean and rstd, (2, M), or rstd, (1, M).
    statistics = empty((1 + plan.has_mean, m), plan.statistics_dtype, x) if plan.differentiable else None
    if m * n == 0:
        return y, total, statistics if statistics is None else statistics.zero_()
    x_stride, residual_stride = plan.x_stride, plan.residual_stride
    if x_stride is None:
        x, residual, weight, bias = _rows(x), _rows(residual), _vector(weight), _vector(bias)
        x_stride, residual_stride = _row_stride(x), _row_stride(residual)
    plan.launch(plan.grid, x, x_stride, residual, residual_stride, weight, bias, y, total, statistics, m, n)
    return y, total, statistics


def _is_in_rows(x: torch.Tensor | None) -> bool:
    """Whether x (..., N) is contiguous rows that lie evenly apart."""
    return x is None or x.is_contiguous() or (x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1))


def _rows(x: Any) -> Any:
    """x (..., N) where it is in rows, else as (M, N) a view where the strides allow it, or a copy.

    Kernels that read along another dimension would fetch a sector for each element; PyTorch's transposing copy does not.
    """
    if _is_in_rows(x):
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if _is_in_rows(rows) else rows.contiguous()


def _row_stride(rows: torch.Tensor | None) -> int:
    """From row to row of a tensor that is in rows."""
    if rows is None:
        return 0
    return rows.stride(0) if rows.ndim == 2 else rows.shape[-1]


def _is_dense(vector: torch.Tensor | None) -> bool:
    return vector is None or vector.stride(0) == 1


def _vector(vector: Any) -> Any:
    return vector if _is_dense(vector) else vector.contiguous()


# --- backward -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
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


_backward_plans = KeptPlans[_BackwardPlan]()


def _backward_plan(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor, dsum: torch.Tensor | None,
    with_dw: bool, with_db: bool, has_mean: bool, backward: str,
) -> _BackwardPlan:  # fmt: skip
    locks = backward == "locks" and not torch.are_deterministic_algorithms_enabled()
    # What Triton's launcher looks at before it widens loads.
    aligned = is_aligned(x, dy, weight, statistics, dsum)
    tensors = form(dy), form(x), form(weight), form(dsum)
    key = (tensors, aligned, with_dw, with_db, has_mean, locks, runtime.compile_target)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _new_backward_plan(dy, x, weight, dsum, aligned, with_dw, with_db, has_mean, locks)
        _backward_plans.keep(key, plan)
    return plan


def _new_backward_plan(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, dsum: torch.Tensor | None, aligned: bool,
    with_dw: bool, with_db: bool, has_mean: bool, locks: bool,
) -> _BackwardPlan:  # fmt: skip
    m, n, itemsize = math.prod(x.shape[:-1]), x.shape[-1], x.element_size()
    strides = _row_stride(x), _row_stride(dy), _row_stride(dsum)
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
    return _BackwardPlan(
        rows=m, columns=n, x_stride=strides[0], dy_stride=strides[1], dsum_stride=strides[2],
        launch=launch, grid=(programs, split or 1),
        partial_sums=(programs > 1 or split is None) and (with_dw or with_db),
        launch_sum=launcher(kernels._layer_norm_bwd_sum_kernel, **wanted, **total.kwargs, num_warps=total.num_warps),
        sum_grid=(cdiv(n, total.kwargs["BLOCK_N"]), 2 if with_db or locks_config else 1),
        locks=locks_config,
    )  # fmt: skip


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor, dsum: torch.Tensor | None,
    eps: float, dw_dtype: torch.dtype | None, db_dtype: torch.dtype | None, has_mean: bool, backward: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """-> dx like x; dweight and dbias, (N,), where a dtype asks for them, else None."""
    n = x.shape[-1]
    dx = empty(x.shape, x.dtype, x)
    dw = None if dw_dtype is None else empty((n,), dw_dtype, x)
    db = None if db_dtype is None else empty((n,), db_dtype, x)
    if dx.numel() == 0:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()
    x, dy, dsum, weight = _rows(x), _rows(dy), _rows(dsum), _vector(weight)
    plan = _backward_plan(
        dy, x, weight, statistics, dsum, dw is not None, db is not None, has_mean, backward
    )  # fmt: skip
    if plan.locks is not None:
        _run_locks(plan, dx, dw, db, dy, x, weight, statistics)
    else:
        _run_partials(plan, dx, dw, db, dy, x, weight, statistics, dsum)
    if n == 1:
        _set_gradient_of_single_column(dx, dy, x, weight, statistics, dsum, eps, has_mean)
    return dx, dw, db


def _run_partials(
    plan: _BackwardPlan, dx: torch.Tensor, dw: torch.Tensor | None, db: torch.Tensor | None, dy: torch.Tensor,
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


def _run_locks(
    plan: _BackwardPlan, dx: torch.Tensor, dw: torch.Tensor | None, db: torch.Tensor | None, dy: torch.Tensor,
    x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor,
) -> None:  # fmt: skip
    m, n = plan.rows, plan.columns
    wanted = {"WITH_DW": dw is not None, "WITH_DB": db is not None, "ACC": tl_accumulator(x.dtype)}
    tensors = (x, plan.x_stride, dy, plan.dy_stride, weight, statistics, dx, n)
    sums = _launch_locks(plan.locks, tensors, m, n, {"HAS_WEIGHT": weight is not None, **wanted})
    if dw is not None or db is not None:
        plan.launch_sum(plan.sum_grid, *sums, dw, db, sums[0].shape[0], n)


def _launch_locks(
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


def _set_gradient_of_single_column(
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


# --- gradients ------------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    """A norm that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, plan: _ForwardPlan) -> torch.Tensor:
        y, _, statistics = _forward(plan, x, None, weight, bias)
        _keep(ctx, x, weight, bias, statistics, plan.eps, plan.has_mean, plan.backward)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, dy), None


def _keep(
    ctx: Any,
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    statistics: torch.Tensor,
    eps: float,
    has_mean: bool,
    backward: str,
) -> None:
    ctx.save_for_backward(x, weight, statistics)
    ctx.set_materialize_grads(False)
    ctx.eps, ctx.has_mean, ctx.backward_way = eps, has_mean, backward
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, weight and bias."""
    if dy is None:
        return None, None, None
    x, weight, statistics = ctx.saved_tensors
    _, needs_dw, needs_db, *_ = ctx.needs_input_grad
    dw_dtype, db_dtype = weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
    return _differentiate(dy, x, weight, statistics, None, ctx.eps, dw_dtype, db_dtype, ctx.has_mean, ctx.backward_way)


class _NormOfSum(torch.autograd.Function):
    """RMSNorm of x + residual, and that sum, which autograd records where nobody observes the call."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: Any, plan: _ForwardPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total, rstd = _forward(plan, x, residual, weight, None)
        _keep(ctx, total, weight, None, rstd, plan.eps, plan.has_mean, plan.backward)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return *_gradients_of_sum(ctx, dy, dsum), None


def _gradients_of_sum(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, residual and weight."""
    needs_x, needs_residual, needs_dw, *_ = ctx.needs_input_grad
    dx, dw = dsum, None
    if dy is not None:
        total, weight, rstd = ctx.saved_tensors
        dw_dtype = weight.dtype if needs_dw else None
        dx, dw, _ = _differentiate(dy, total, weight, rstd, dsum, ctx.eps, dw_dtype, None, False, "partials")
    return dx if needs_x else None, dx if needs_residual else None, dw if needs_dw else None


def _differentiate(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: torch.Tensor, dsum: Any, *settings: Any
) -> tuple[torch.Tensor | None, ...]:
    """What :func:`_backward` gives, by its operator where somebody observes, or wants a gradient of the gradients."""
    if torch.is_grad_enabled() or observed(dy, x, weight, statistics, dsum):
        _, dw_dtype, db_dtype, *_ = settings
        dx, dw, db = _norm_backward(dy, x, weight, statistics, dsum, *settings)
        return dx, None if dw_dtype is None else dw, None if db_dtype is None else db
    return _backward(dy, x, weight, statistics, dsum, *settings)


# --- where somebody observes: operators -----------------------------------------------------------------------------


def _layer_norm_by_operators(x: torch.Tensor, weight: Any, bias: Any, eps: float, backward: str) -> torch.Tensor:
    _check("layer_norm", x, None, weight, bias, eps, backward)
    y: torch.Tensor
    if wants_gradient(x, weight, bias):
        y, _ = _norm(x, weight, bias, eps, _out_dtype(x, None), True, backward)
    else:
        y = _norm_inference(x, weight, bias, eps, _out_dtype(x, None), True)
    return y


def _rms_norm_by_operators(x: torch.Tensor, weight: Any, eps: float, residual: Any) -> list[torch.Tensor]:
    """-> y, and with a residual x + residual."""
    _check("rms_norm", x, residual, weight, None, eps, "partials")
    if residual is not None:
        y, total, _ = _norm_of_sum(x, residual, weight, eps, _out_dtype(x, residual))
        return [y, total]
    if wants_gradient(x, weight):
        y, _ = _norm(x, weight, None, eps, _out_dtype(x, None), False, "partials")
        return [y]
    return [_norm_inference(x, weight, None, eps, _out_dtype(x, None), False)]


def _new_statistics(x: torch.Tensor, has_mean: bool, dtype: torch.dtype) -> torch.Tensor:
    return empty((1 + has_mean, math.prod(x.shape[:-1])), accumulator(dtype), x)


def _run_norm(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, dtype: torch.dtype, has_mean: bool, backward: str,
    differentiable: bool = True,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    op = "layer_norm" if has_mean else "rms_norm"
    plan = _forward_plan(op, x, None, weight, bias, eps, dtype, differentiable, backward)
    y, _, statistics = _forward(plan, x, None, weight, bias)
    return y, statistics


def _run_norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: Any, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    plan = _forward_plan("rms_norm", x, residual, weight, None, eps, dtype, True, "partials")
    return _forward(plan, x, residual, weight, None)


def _run_norm_backward(dy: torch.Tensor, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """What :func:`_backward` gives, with an empty tensor for what is not wanted."""
    return present(_backward(dy, x, *others), x)


def _fake_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: Any, dsum: Any, eps: float, dw_dtype: Any, db_dtype: Any,
    has_mean: bool, backward: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    n = x.shape[-1]
    dw, db = (empty((n if dtype else 0,), dtype or x.dtype, x) for dtype in (dw_dtype, db_dtype))
    return empty(x.shape, x.dtype, x), dw, db


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, eps, _, has_mean, backward = inputs
    _keep(ctx, x, weight, bias, output[1], eps, has_mean, backward)
    ctx.mark_non_differentiable(output[1])


def _keep_norm_of_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, weight, eps, _ = inputs
    _keep(ctx, output[1], weight, None, output[2], eps, False, "partials")
    ctx.mark_non_differentiable(output[2])


_norm = operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype, bool has_mean, str backward) "
    "-> (Tensor, Tensor)",
    outputs=lambda x, weight, bias, eps, dtype, has_mean, _: (
        empty(x.shape, dtype, x),
        _new_statistics(x, has_mean, x.dtype),
    ),
    run=_run_norm,
    setup_context=_keep_norm,
    backward=lambda ctx, dy, _: (*_gradients(ctx, dy), None, None, None, None),
    visible=True,
)

_norm_inference = operator(
    "norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype, bool has_mean) -> Tensor",
    outputs=lambda x, weight, bias, eps, dtype, has_mean: empty(x.shape, dtype, x),
    run=lambda *given: _run_norm(*given, backward="partials", differentiable=False)[0],
    visible=True,
)

_norm_of_sum = operator(
    "norm_of_sum(Tensor x, Tensor residual, Tensor? weight, float eps, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    outputs=lambda x, residual, weight, eps, dtype: (
        empty(x.shape, dtype, x), empty(x.shape, total := _sum_dtype(x, residual), x), _new_statistics(x, False, total),
    ),
    run=_run_norm_of_sum,
    setup_context=_keep_norm_of_sum,
    backward=lambda ctx, dy, dsum, _: (*_gradients_of_sum(ctx, dy, dsum), None, None),
    visible=True,
)  # fmt: skip

_norm_backward = operator(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, Tensor? dsum, float eps, ScalarType? dw_dtype, "
    "ScalarType? db_dtype, bool has_mean, str backward) -> (Tensor, Tensor, Tensor)",
    outputs=_fake_norm_backward,
    run=_run_norm_backward,
    visible=True,
)

SOURCES = sources()
_layer_norm_whole = composite(
    "layer_norm_whole(Tensor x, Tensor? weight, Tensor? bias, float eps, str backward) -> Tensor",
    _layer_norm_by_operators,
)
_rms_norm_whole = composite(
    "rms_norm_whole(Tensor x, Tensor? weight, float eps, Tensor? residual) -> Tensor[]", _rms_norm_by_operators
)
