"""Public functions, then the forward operator and the backward operator: check, outputs, plan, run."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.layer_norm import kernels
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.operators import Op

EPS = "a number that is not negative"


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
) -> torch.Tensor:
    """Normalize over the last dimension, or over as many as ``normalized_shape`` has.

    Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3. Statistics are computed in float32 (float64 for
    float64 inputs), from the deviations, whatever the dtype of ``x``. What ``torch.nn.functional.layer_norm`` is given by
    name this function takes by the same names; by position it takes no ``normalized_shape``. Gradients are bitwise
    reproducible on one GPU model: each program keeps partial sums over its rows, and a second kernel adds them up.

    Args:
        x: (..., N), float16, bfloat16, float32 or float64, any strides.
        weight, bias: (N,), or ``normalized_shape``, or ``None``; any of those dtypes.
        eps: added to the variance; not negative.
        normalized_shape: the last dimensions of ``x``, which are normalized together; ``None``: the last one.

    Returns:
        The shape of ``x``, contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own on a GPU.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or ``eps`` not a number.
        ValueError: ``weight`` or ``bias`` has another shape or device, ``normalized_shape`` is not how ``x`` ends, or
            ``eps`` has another value.
    """
    if normalized_shape is not None:
        return _over_several(x, weight, bias, eps, normalized_shape)
    eps = arguments.number("layer_norm", "eps", eps, EPS)
    return _norm(x, None, weight, bias, eps, None, True)[0]  # type: ignore[no-any-return]


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: None = None
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalize by the root mean square over the last dimension, ``x / sqrt(mean(x^2) + eps) * weight``.

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
    eps = arguments.number("rms_norm", "eps", eps, EPS)
    if residual is None:
        return _norm(x, None, weight, None, eps, None, False)[0]  # type: ignore[no-any-return]
    return _norm_of_sum(x, residual, weight, None, eps, None, False)  # type: ignore[no-any-return]


def _over_several(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, normalized_shape: int | Sequence[int]
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
    weight, bias = (None if vector is None else vector.flatten() for vector in (weight, bias))
    return layer_norm(x.flatten(-len(shape)), weight, bias, eps).view(x.shape)


def in_float32(_: torch.dtype, x: Any, residual: Any, weight: Any, bias: Any, eps: float, *others: Any) -> Any:
    """Return the arguments under autocast: 16-bit inputs give float32, written as such by the kernel."""
    is_16_bit = all(t is None or getattr(t, "dtype", None) in (torch.float16, torch.bfloat16) for t in (x, residual))
    return x, residual, weight, bias, eps, torch.float32 if is_16_bit else None, *others[1:]


def in_rows(x: Any) -> Any:
    """Return x (..., N) where its rows are contiguous and lie evenly apart, else (M, N): a view if strides allow it, or a copy.

    Kernels that read along another dimension would fetch a sector for each element; PyTorch's transposing copy does not.
    """
    if x is None or x.is_contiguous() or (x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1)):
        return x
    return x.contiguous() if x.ndim == 2 else in_rows(x.reshape(-1, x.shape[-1]))


def row_stride(rows: torch.Tensor | None) -> int:
    """Return the step from row to row of a tensor that is in rows."""
    if rows is None:
        return 0
    return rows.stride(0) if rows.ndim == 2 else rows.shape[-1]


def dense(vector: Any) -> Any:
    """Return a vector, or ``None``, with its elements one after the other."""
    return vector if vector is None or vector.stride(0) == 1 else vector.contiguous()


# --- forward --------------------------------------------------------------------------------------------------------


def check(x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: float, _: Any, has_mean: bool) -> None:
    """Raise unless the arguments are those of ``layer_norm`` (``has_mean``) or ``rms_norm``."""
    op = "layer_norm" if has_mean else "rms_norm"
    arguments.check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps must be {EPS}, got {eps!r}")
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    numbers = type(m) is int and type(n) is int  # symbolic sizes are looked at when they are numbers
    if numbers and (m >= 2**31 or n >= 2**31 - 2**16):
        raise ValueError(f"{op}: x must have fewer than 2^31 rows and columns, got {m} x {n}")
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if has_mean and isinstance(tensor, int | tuple | list):
            raise TypeError(f"{op}: {name} must be a tensor (a shape goes into normalized_shape=), got {tensor!r}")
        if tensor is not None:
            arguments.check_tensor(op, name, tensor)
            arguments.check_shape(op, name, tensor, x.shape if name == "residual" else x.shape[-1:])
    arguments.check_same_device(op, x=x, weight=weight, bias=bias, residual=residual)


def outputs_of(
    x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: float, dtype: Any, has_mean: bool, record: bool
) -> tuple[torch.Tensor, Any, Any]:
    """Return y, with a residual x + residual, and for the backward pass mean and rstd (2, M), or rstd (1, M)."""
    summed = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return (
        empty(x.shape, dtype or summed, x),
        None if residual is None else empty(x.shape, summed, x),
        empty((1 + has_mean, math.prod(x.shape[:-1])), accumulator(summed), x) if record else None,
    )


class _ForwardPlan(NamedTuple):
    rows: int
    columns: int
    x_stride: int
    residual_stride: int
    as_they_lie: bool  # the kernel reads the tensors, not copies
    launch: Launch
    grid: tuple[int]


def plan(x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: float, *how: Any) -> _ForwardPlan | None:
    """Choose kernel, tiles and grid; ``None`` where there is nothing to normalize."""
    _, has_mean, record = how
    if x.numel() == 0:
        return None
    as_they_lie = in_rows(x) is x and in_rows(residual) is residual and dense(weight) is weight and dense(bias) is bias
    x, residual = in_rows(x), in_rows(residual)
    m, n = x.numel() // x.shape[-1], x.shape[-1]
    summed = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    config = kernels.plan_forward(n, summed.itemsize, runtime.properties(x.device))
    kernel = kernels._layer_norm_fwd_looped_kernel if config is None else kernels._layer_norm_fwd_kernel
    config = config or kernels.looped_config(summed.itemsize)
    launch = launcher(
        kernel, EPS=eps, HAS_MEAN=has_mean, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, HAS_STATISTICS=record, ACC=tl_accumulator(summed),
        **config.kwargs, num_warps=config.num_warps, repeatable=True,
    )  # fmt: skip
    grid = (cdiv(m, config.kwargs.get("BLOCK_M", 1)),)
    return _ForwardPlan(m, n, row_stride(x), row_stride(residual), as_they_lie, launch, grid)


def run(
    plan: _ForwardPlan, outputs: tuple[Any, ...], x: torch.Tensor, residual: Any, weight: Any, bias: Any, *_: Any
) -> None:
    """Fill the outputs."""
    if not plan.as_they_lie:
        x, residual, weight, bias = in_rows(x), in_rows(residual), dense(weight), dense(bias)
    plan.launch(
        plan.grid, x, plan.x_stride, residual, plan.residual_stride, weight, bias, *outputs, plan.rows, plan.columns
    )


def _gradients(call: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, residual, weight and bias."""
    if dy is None:
        return dsum, dsum, None, None
    dx, dw, db = _norm_backward(dy, *call.saved, dsum, call.eps, *call.wanted[2:], call.has_mean)
    return dx, dx, dw, db


# --- backward -------------------------------------------------------------------------------------------------------


def _outputs_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: Any, dsum: Any, eps: float, *wanted: Any
) -> tuple[Any, ...]:
    """Return new tensors: dx like x; dweight and dbias, (N,), where a dtype asks for them."""
    dw, db = (None if dtype is None else empty((x.shape[-1],), dtype, x) for dtype in wanted[:2])
    return empty(x.shape, x.dtype, x), dw, db


class _BackwardPlan(NamedTuple):
    as_they_lie: bool  # the kernel reads the tensors, not copies
    strides: tuple[int, int, int]  # from row to row of x, dy and dsum
    launch: Launch
    grid: tuple[int, int]
    partials: tuple[int, int] | None  # the shape of the programs' sums, which another kernel adds up
    launch_sum: Launch
    sum_grid: tuple[int, int]


def _plan_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: Any, dsum: Any, eps: float, *wanted: Any
) -> _BackwardPlan | None:
    dw, db, has_mean = wanted
    if x.numel() == 0:
        return None
    as_they_lie = in_rows(x) is x and in_rows(dy) is dy and in_rows(dsum) is dsum and dense(weight) is weight
    as_they_lie = as_they_lie and statistics.is_contiguous()  # a hook of saved tensors may have brought others
    x, dy, dsum, weight = in_rows(x), in_rows(dy), in_rows(dsum), dense(weight)
    strides = row_stride(x), row_stride(dy), row_stride(dsum)
    m, n, itemsize = x.numel() // x.shape[-1], x.shape[-1], x.element_size()
    # What Triton's launcher looks at before it widens loads.
    on_16_bytes = all(t is None or t.data_ptr() % 16 == 0 for t in (x, dy, weight, statistics, dsum))
    aligned = on_16_bytes and not any(step % 16 for step in (*strides, n))
    properties = runtime.properties(x.device)
    tiles = kernels.plan_backward(n, itemsize, aligned, 2 if has_mean else 1, dsum is not None, properties)
    config, total = tiles.config, kernels.SUM_CONFIG
    split = config.kwargs.get("SPLIT")  # None: a row is looped over
    programs = kernels.backward_programs(m, tiles, properties)
    both = {"WITH_DW": dw is not None, "WITH_DB": db is not None, "ACC": tl_accumulator(x.dtype), "repeatable": True}
    launch = launcher(
        kernels._layer_norm_bwd_partials_looped_kernel if split is None else kernels._layer_norm_bwd_partials_kernel,
        HAS_WEIGHT=weight is not None, HAS_MEAN=has_mean, HAS_DSUM=dsum is not None, **both,
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    launch_sum = launcher(kernels._layer_norm_bwd_sum_kernel, **both, **total.kwargs, num_warps=total.num_warps)
    sum_grid = (cdiv(n, total.kwargs["BLOCK_N"]), 1 if dw is None or db is None else 2)
    partials = (programs, n) if (dw or db) and (programs > 1 or split is None) else None
    return _BackwardPlan(as_they_lie, strides, launch, (programs, split or 1), partials, launch_sum, sum_grid)


def _run_backward(
    plan: _BackwardPlan, outputs: tuple[Any, ...], dy: torch.Tensor, x: torch.Tensor, weight: Any,
    statistics: torch.Tensor, dsum: Any, eps: float, *wanted: Any,
) -> None:  # fmt: skip
    (dx, dw, db), (to_dw, to_db) = outputs, outputs[1:]
    if not plan.as_they_lie:
        x, dy, dsum, weight = in_rows(x), in_rows(dy), in_rows(dsum), dense(weight)
        statistics = statistics.contiguous()
    m, n = x.numel() // x.shape[-1], x.shape[-1]
    x_stride, dy_stride, dsum_stride = plan.strides
    if plan.partials is not None:
        to_dw, to_db = (None if d is None else empty(plan.partials, statistics.dtype, x) for d in (dw, db))
    plan.launch(
        plan.grid, x, x_stride, dy, dy_stride, weight, statistics, dx, dsum, dsum_stride, to_dw, to_db, m, n
    )  # fmt: skip
    if plan.partials is not None:
        plan.launch_sum(plan.sum_grid, to_dw, to_db, dw, db, plan.partials[0], n)
    if n == 1 and wanted[2]:
        # A single column never deviates from its mean; a fused multiply-add would leave one rounding times rstd.
        dx.copy_(((dy - dy) + (x - x).view(dy.shape)).view(dx.shape))  # NaN where one is
    elif n == 1:
        # 1 - xhat^2 is eps * rstd^2, of which a difference leaves little.
        g = dy.to(statistics.dtype) * eps * (1 if weight is None else weight)
        sums = 0 if dsum is None else dsum.view(dy.shape)
        dx.copy_((g * statistics.view(dy.shape) ** 3 + sums).view(dx.shape))


# --- operators ------------------------------------------------------------------------------------------------------

_norm_backward = Op(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, Tensor? dsum, float eps, ScalarType? dw_dtype, "
    "ScalarType? db_dtype, bool has_mean) -> (Tensor dx, Tensor dw, Tensor db)",
    outputs=_outputs_backward,
    plan=_plan_backward,
    run=_run_backward,
    results=3,
)
ARGUMENTS = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype, bool has_mean, bool record"


def _norm_op(name: str, normalized: str) -> Op:
    """Return one of two operators, which differ in what the backward pass reads: what was normalized is x, or the sum."""
    return Op(
        f"{name}({ARGUMENTS}) -> (Tensor y, Tensor total, Tensor statistics)",
        check=check,
        outputs=outputs_of,
        plan=plan,
        run=run,
        results=2,
        saves=(normalized, "weight", "statistics"),
        autocast=in_float32,
        backward=_gradients,
    )


_norm = _norm_op("norm", "x")
_norm_of_sum = _norm_op("norm_of_sum", "total")
