"""The public functions, their operators, and the launches."""

import functools
import math
from collections.abc import Sequence
from typing import Any, overload

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.layer_norm import kernels
from kernelbook.plans import derived

__all__ = ["layer_norm", "rms_norm"]

BACKWARDS = ("partials", "locks")


@launching.repeated()
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
        The shape of ``x``, contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype.
        ValueError: ``weight`` or ``bias`` has another shape or device, ``normalized_shape`` is not how ``x`` ends, or
            ``eps`` or ``backward`` has another value.
    """
    if normalized_shape is not None:
        return _over_several(x, weight, bias, eps, normalized_shape, backward)
    _check(x, weight, bias, eps, backward)
    out_dtype = _out_dtype(x)
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        y: torch.Tensor = _norm(x, weight, bias, float(eps), out_dtype, True, backward)
    else:
        y = _inference(x, weight, bias, float(eps), out_dtype, True)
    return y


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: None = None
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...


@launching.repeated()
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
        residual: the shape and dtype of ``x``, any strides, or ``None``. It is added to ``x`` first, in the same pass over
            memory, forward and backward.

    Returns:
        (..., N), contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own. With a residual the pair of the
        normalized sum and the sum ``x + residual``, which has the dtype of ``x`` and is what the next layer adds to.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or ``residual`` has not the dtype of ``x``.
        ValueError: ``weight`` or ``residual`` has another shape or device, or ``eps`` another value.
    """
    _check_rms(x, weight, residual, eps)
    out_dtype = _out_dtype(x)
    found: Any
    if residual is not None:
        found = _norm_of_sum(x, residual, weight, float(eps), out_dtype)
    elif torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        found = _norm(x, weight, None, float(eps), out_dtype, False, "partials")
    else:
        found = _inference(x, weight, None, float(eps), out_dtype, False)
    return found


def _over_several(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, normalized_shape: int | Sequence[int], backward: str
) -> torch.Tensor:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
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


@arguments.once
def _check(x: torch.Tensor, weight: Any, bias: Any, eps: float, backward: str) -> None:
    _check_rows("layer_norm", x, eps)
    for name, vector in (("weight", weight), ("bias", bias)):
        if isinstance(vector, int | tuple | list):
            raise TypeError(
                f"layer_norm: {name} must be a tensor (a shape goes into normalized_shape=), got {vector!r}"
            )
        if vector is not None:
            arguments.check_tensor("layer_norm", name, vector)
            arguments.check_shape("layer_norm", name, vector, x.shape[-1:])
    arguments.check_same_device("layer_norm", x=x, weight=weight, bias=bias)
    arguments.check_choice("layer_norm", "backward", backward, BACKWARDS)


@arguments.once
def _check_rms(x: torch.Tensor, weight: Any, residual: Any, eps: float) -> None:
    _check_rows("rms_norm", x, eps)
    if weight is not None:
        arguments.check_tensor("rms_norm", "weight", weight)
        arguments.check_shape("rms_norm", "weight", weight, x.shape[-1:])
    if residual is not None:
        arguments.check_tensor("rms_norm", "residual", residual)
        arguments.check_shape("rms_norm", "residual", residual, x.shape)
        arguments.check_same_dtype("rms_norm", x=x, residual=residual)
    arguments.check_same_device("rms_norm", x=x, weight=weight, residual=residual)


def _check_rows(op: str, x: torch.Tensor, eps: float) -> None:
    arguments.check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a scalar")
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps must be a number that is not negative, got {eps!r}")
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    if m >= 2**31 or n >= 2**31 - 2**16:
        raise ValueError(f"{op}: x must have fewer than 2^31 rows and columns, got {m} x {n}")


def _out_dtype(x: torch.Tensor) -> torch.dtype:
    """What PyTorch's own norm gives; under autocast float32, written as such by the kernel: no copy of x in float32."""
    lowered = torch.is_autocast_enabled(x.device.type) and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if lowered else x.dtype


# --- forward --------------------------------------------------------------------------------------------------------


@derived
def _forward_launch(
    n: int, itemsize: int, eps: float, dtype: torch.dtype, properties: runtime.DeviceProperties, *flags: bool
) -> tuple[Launch, int]:
    """-> the launch for rows of ``n`` elements, and the rows of a program. ``flags``: the kernel's ``HAS_...``, in order."""
    config = kernels.plan_forward(n, itemsize, properties)
    kernel = kernels._layer_norm_fwd_looped_kernel if config is None else kernels._layer_norm_fwd_kernel
    config = config or kernels.looped_config(itemsize)
    names = ("HAS_MEAN", "HAS_RESIDUAL", "HAS_WEIGHT", "HAS_BIAS", "HAS_STATISTICS")
    constants = {**dict(zip(names, flags, strict=True)), "ACC": launching.tl_accumulator(dtype)}
    launch = Launch(kernel, EPS=eps, **constants, **config.kwargs, num_warps=config.num_warps)
    return launch, config.kwargs.get("BLOCK_M", 1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(M, N) for (..., N), rows contiguous: a view where the strides allow it.

    Kernels that read along another dimension would fetch a sector for each element; PyTorch's transposing copy does not.
    """
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _vector(vector: torch.Tensor | None) -> torch.Tensor | None:
    return vector if vector is None or vector.stride(0) == 1 else vector.contiguous()


def _forward(
    y: torch.Tensor, total: Any, statistics: Any, x: torch.Tensor, residual: Any, weight: Any, bias: Any, eps: float,
    has_mean: bool,
) -> None:  # fmt: skip
    """Fills y and, where they are there, x + residual and the statistics."""
    if y.numel() == 0:
        if statistics is not None:
            statistics.zero_()
        return
    x = _rows(x)
    m, n = x.shape
    launch, rows = _forward_launch(
        int(n), x.element_size(), eps, x.dtype, runtime.properties(x.device),
        has_mean, residual is not None, weight is not None, bias is not None, statistics is not None,
    )  # fmt: skip
    added, added_step = (None, 0) if residual is None else (_rows(residual), _rows(residual).stride(0))
    launch(
        (cdiv(m, rows),),
        x, x.stride(0), added, added_step, _vector(weight), _vector(bias), y, total, statistics, m, n,
    )  # fmt: skip


def _statistics(x: torch.Tensor, has_mean: bool) -> torch.Tensor:
    """Mean and rstd, (2, M), or rstd, (1, M)."""
    return launching.empty((1 + has_mean, math.prod(x.shape[:-1])), launching.accumulator(x.dtype), x)


_inference = launching.operator(
    "norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype, bool has_mean) -> Tensor",
    outputs=lambda x, weight, bias, eps, out_dtype, has_mean: launching.empty(x.shape, out_dtype, x),
    run=lambda y, x, weight, bias, eps, _, has_mean: _forward(y, None, None, x, None, weight, bias, eps, has_mean),
    visible=True,
)


# --- backward -------------------------------------------------------------------------------------------------------


@derived
def _backward_launches(
    n: int, itemsize: int, aligned: bool, dtype: torch.dtype, has_weight: bool, has_mean: bool, has_dsum: bool,
    with_dw: bool, with_db: bool, properties: runtime.DeviceProperties,
) -> tuple[Launch, Launch, kernels.BackwardPlan]:  # fmt: skip
    """-> the launch that walks over the rows, the one that adds up the partial sums, and the plan of the first."""
    plan = kernels.plan_backward(n, itemsize, aligned, 2 if has_mean else 1, has_dsum, properties)
    config, total = plan.config, kernels.SUM_CONFIG
    looped = "SPLIT" not in config.kwargs
    wanted = {"WITH_DW": with_dw, "WITH_DB": with_db, "ACC": launching.tl_accumulator(dtype)}
    rows = Launch(
        kernels._layer_norm_bwd_partials_looped_kernel if looped else kernels._layer_norm_bwd_partials_kernel,
        HAS_WEIGHT=has_weight, HAS_MEAN=has_mean, HAS_DSUM=has_dsum, **wanted,
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    return rows, Launch(kernels._layer_norm_bwd_sum_kernel, **wanted, **total.kwargs, num_warps=total.num_warps), plan


def _run_partials(
    dx: torch.Tensor, dw: torch.Tensor | None, db: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor, weight: Any,
    statistics: torch.Tensor, dsum: torch.Tensor | None, has_mean: bool,
) -> None:  # fmt: skip
    """Fills the gradients of LayerNorm, or without a mean of RMSNorm; x, dy and dsum are (M, N) with contiguous rows."""
    m, n = x.shape
    w = _vector(weight)
    x_step, dy_step, added_step = x.stride(0), dy.stride(0), 0 if dsum is None else dsum.stride(0)
    # What Triton's launcher looks at before it widens loads.
    aligned = (
        not (x_step % 16 or dy_step % 16 or n % 16 or added_step % 16)
        and launching.is_aligned(x, dy, w, statistics, dx, dsum)
    )  # fmt: skip
    properties = runtime.properties(x.device)
    launch, launch_sum, plan = _backward_launches(
        int(n), x.element_size(), aligned, x.dtype, weight is not None, has_mean, dsum is not None,
        dw is not None, db is not None, properties,
    )  # fmt: skip
    programs = kernels.backward_programs(m, plan, properties)
    split = plan.config.kwargs.get("SPLIT")
    to_dw, to_db, alone = dw, db, programs == 1 and split is not None
    if not alone:
        to_dw = None if dw is None else launching.empty((programs, n), statistics.dtype, x)
        to_db = None if db is None else launching.empty((programs, n), statistics.dtype, x)
    launch((programs, split or 1), x, x_step, dy, dy_step, w, statistics, dx, dsum, added_step, to_dw, to_db, m, n)
    if not alone and (dw is not None or db is not None):
        columns = cdiv(n, kernels.SUM_CONFIG.kwargs["BLOCK_N"])
        launch_sum((columns, 1 if db is None else 2), to_dw, to_db, dw, db, programs, n)


def _run_backward(
    results: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: torch.Tensor,
    dsum: Any, eps: float, dw_dtype: torch.dtype | None, db_dtype: torch.dtype | None, has_mean: bool, backward: str,
) -> None:  # fmt: skip
    dx, dw, db = results
    if dx.numel() == 0:
        dw.zero_(), db.zero_()
        return
    x, dy, added = _rows(x), _rows(dy), None if dsum is None else _rows(dsum)
    locks = kernels.locks_config(x.shape[1], x.element_size()) if backward == "locks" else None
    if locks is not None and not torch.are_deterministic_algorithms_enabled():
        _run_locks(locks, results, dy, x, weight, statistics, dw_dtype is not None, db_dtype is not None)
    else:
        to_dw, to_db = None if dw_dtype is None else dw, None if db_dtype is None else db
        _run_partials(dx, to_dw, to_db, dy, x, weight, statistics, added, has_mean)
    if x.shape[1] > 1:
        return
    if has_mean:
        # A single column never deviates from its mean; a fused multiply-add would leave one rounding times rstd.
        torch.sub(dy, dy, out=dx.view(-1, 1))  # NaN where dy is
        dx.view(-1, 1).add_(x - x)
    else:
        # 1 - xhat^2 is eps * rstd^2, of which a difference leaves little.
        g = dy.to(statistics.dtype) * eps * (1 if weight is None else weight)
        dx.view(-1, 1).copy_(g * statistics.view(-1, 1) ** 3 + (0 if added is None else added))


def _run_locks(
    config: Any, results: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, weight: Any,
    statistics: torch.Tensor, with_dw: bool, with_db: bool,
) -> None:  # fmt: skip
    dx, dw, db = results
    n, wanted = x.shape[1], {"WITH_DW": with_dw, "WITH_DB": with_db, "ACC": launching.tl_accumulator(x.dtype)}
    tensors = (x, x.stride(0), dy, dy.stride(0), _vector(weight), statistics, dx, n)
    sums = _launch_locks(config, tensors, x.shape[0], n, {"HAS_WEIGHT": weight is not None, **wanted})
    if with_dw or with_db:
        total = kernels.SUM_CONFIG
        launch = _launch(kernels._layer_norm_bwd_sum_kernel, **wanted, **total.kwargs, num_warps=total.num_warps)
        launch((cdiv(n, total.kwargs["BLOCK_N"]), 2), *sums, dw, db, sums[0].shape[0], n)


_launch = functools.cache(Launch)


def _launch_locks(
    config: Any, tensors: tuple[Any, ...], m: int, n: int, constants: dict[str, Any],
    *, buffers: int = kernels.LOCK_BUFFERS, barrier: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the buffers that the programs added into, each (buffers, N)."""
    statistics = tensors[5]
    shape = (buffers, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    buffer_dw, buffer_db = (statistics.new_zeros(shape) for _ in range(2))
    launch = _launch(
        kernels._layer_norm_bwd_locks_kernel,
        NUM_BUFFERS=buffers, BARRIER=barrier, num_warps=config.num_warps, **constants, **config.kwargs,
    )  # fmt: skip
    launch((m,), *tensors, buffer_dw, buffer_db, statistics.new_zeros(buffers, dtype=torch.int32), m, n)
    return buffer_dw, buffer_db


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: Any, dsum: Any, eps: float, dw_dtype: Any, db_dtype: Any,
    has_mean: bool, backward: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """-> dx like x, dweight (N,) or empty, dbias (N,) or empty."""
    n = x.shape[-1]
    dw, db = (launching.empty((n if dtype else 0,), dtype or x.dtype, x) for dtype in (dw_dtype, db_dtype))
    return launching.empty(x.shape, x.dtype, x), dw, db


_backward = launching.operator(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, Tensor? dsum, float eps, ScalarType? dw_dtype, "
    "ScalarType? db_dtype, bool has_mean, str backward) -> (Tensor, Tensor, Tensor)",
    outputs=_gradients,
    run=_run_backward,
    visible=True,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, ctx.eps, _, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _autograd(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, weight, statistics = ctx.saved_tensors
    _, needs_dw, needs_db, *_ = ctx.needs_input_grad
    dw_dtype, db_dtype = weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
    dx, dw, db = _backward(dy, x, weight, statistics, None, ctx.eps, dw_dtype, db_dtype, *ctx.settings)
    return dx, dw if needs_dw else None, db if needs_db else None, None, None, None, None


_norm = launching.operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype, bool has_mean, str backward) "
    "-> (Tensor, Tensor)",
    outputs=lambda x, w, b, eps, out_dtype, has_mean, _: (
        launching.empty(x.shape, out_dtype, x), _statistics(x, has_mean)
    ),
    run=lambda results, x, w, b, eps, out_dtype, has_mean, _: _forward(
        results[0], None, results[1], x, None, w, b, eps, has_mean
    ),
    setup_context=_keep,
    backward=_autograd,
    saved=1,
    visible=True,
)  # fmt: skip


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.set_materialize_grads(False)


def _sum_autograd(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    needs_x, needs_residual, needs_dw, *_ = ctx.needs_input_grad
    dx, dw = dsum, None
    if dy is not None:
        total, weight, rstd = ctx.saved_tensors
        dw_dtype = weight.dtype if needs_dw else None
        dx, dw, _ = _backward(dy, total, weight, rstd, dsum, ctx.eps, dw_dtype, None, False, "partials")
    return dx if needs_x else None, dx if needs_residual else None, dw if needs_dw else None, None, None


# RMSNorm of x + residual: -> the normalized sum, and the sum.
_norm_of_sum = launching.operator(
    "norm_of_sum(Tensor x, Tensor residual, Tensor? weight, float eps, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    outputs=lambda x, residual, w, eps, out_dtype: (
        launching.empty(x.shape, out_dtype, x), launching.empty(x.shape, x.dtype, x), _statistics(x, False)
    ),
    run=lambda results, x, residual, w, eps, _: _forward(
        results[0], results[1], results[2], x, residual, w, None, eps, False
    ),
    setup_context=_keep_sum,
    backward=_sum_autograd,
    saved=1,
    visible=True,
)  # fmt: skip
