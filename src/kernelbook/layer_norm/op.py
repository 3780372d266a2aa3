"""The public functions in the order of a call: observed or not, plan, new memory, launch; then the gradients the same way."""

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import composite, operator, sources
from kernelbook.layer_norm import launches
from kernelbook.layer_norm.launches import dense, dtype_of_sum, in_rows, row_stride
from kernelbook.memory import accumulator, empty, present
from kernelbook.observed import are_tensors, form, in_mode_of_forward, is_aligned, keep_mode, observed, wants_gradient
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
    # A schema takes True and 1 for 1.0. To ask for the type of ``backward`` too would be a guard more: what it may be is checked later.
    if is_dynamo_compiling() and isinstance(eps, float) and are_tensors(x, weight, bias):
        return _layer_norm_whole(x, weight, bias, eps, backward, SOURCES)  # type: ignore[no-any-return]
    if type(eps) is not float or type(backward) is not str:
        eps, backward = _checked_numbers("layer_norm", eps, backward)
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


def _out_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """What PyTorch's own norm gives; under autocast float32, written as such by the kernel: no copy of x in float32."""
    dtype = dtype_of_sum(x, residual)
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
    if backward == "locks" and runtime.in_same_bits():
        raise ValueError(
            f"{op}: backward must be 'partials' within same_bits(), since locks add up in any order, got 'locks'"
        )
    return found, backward


# --- forward --------------------------------------------------------------------------------------------------------


_forward_plans = KeptPlans[launches.ForwardPlan]()


def _forward_plan(
    op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, dtype: torch.dtype, differentiable: bool, backward: str,
) -> launches.ForwardPlan:  # fmt: skip
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    tensors = form(x), form(residual), form(weight), form(bias)
    key = (op, tensors, eps, dtype, differentiable, backward, runtime.plan_mode())
    plan = _forward_plans.get(key)
    if plan is None:
        _check(op, x, residual, weight, bias, eps, backward)
        plan = launches.forward_plan(
            op == "layer_norm", x, residual, weight, bias, eps, dtype, differentiable, backward
        )
        _forward_plans.keep(key, plan)
    return plan


def _forward(
    plan: launches.ForwardPlan, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
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
        x, residual, weight, bias = in_rows(x), in_rows(residual), dense(weight), dense(bias)
        x_stride, residual_stride = row_stride(x), row_stride(residual)
    plan.launch(plan.grid, x, x_stride, residual, residual_stride, weight, bias, y, total, statistics, m, n)
    return y, total, statistics


# --- backward -------------------------------------------------------------------------------------------------------


_backward_plans = KeptPlans[launches.BackwardPlan]()


def _backward_plan(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, statistics: torch.Tensor, dsum: torch.Tensor | None,
    with_dw: bool, with_db: bool, has_mean: bool, backward: str,
) -> launches.BackwardPlan:  # fmt: skip
    locks = backward == "locks" and not torch.are_deterministic_algorithms_enabled()
    # What Triton's launcher looks at before it widens loads.
    aligned = is_aligned(x, dy, weight, statistics, dsum)
    tensors = form(dy), form(x), form(weight), form(dsum)
    key = (tensors, aligned, with_dw, with_db, has_mean, locks, runtime.plan_mode())
    plan = _backward_plans.get(key)
    if plan is None:
        plan = launches.backward_plan(dy, x, weight, dsum, aligned, with_dw, with_db, has_mean, locks)
        _backward_plans.keep(key, plan)
    return plan


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
    x, dy, dsum, weight = in_rows(x), in_rows(dy), in_rows(dsum), dense(weight)
    plan = _backward_plan(
        dy, x, weight, statistics, dsum, dw is not None, db is not None, has_mean, backward
    )  # fmt: skip
    if plan.locks is not None:
        launches.run_locks(plan, dx, dw, db, dy, x, weight, statistics)
    else:
        launches.run_partials(plan, dx, dw, db, dy, x, weight, statistics, dsum)
    if n == 1:
        launches.set_gradient_of_single_column(dx, dy, x, weight, statistics, dsum, eps, has_mean)
    return dx, dw, db


# --- gradients ------------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    """A norm that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, plan: launches.ForwardPlan) -> torch.Tensor:
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
    keep_mode(ctx)
    ctx.save_for_backward(x, weight, statistics)
    ctx.set_materialize_grads(False)
    ctx.eps, ctx.has_mean, ctx.backward_way = eps, has_mean, backward
    ctx.bias_dtype = None if bias is None else bias.dtype


@in_mode_of_forward
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
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: Any, plan: launches.ForwardPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total, rstd = _forward(plan, x, residual, weight, None)
        _keep(ctx, total, weight, None, rstd, plan.eps, plan.has_mean, plan.backward)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return *_gradients_of_sum(ctx, dy, dsum), None


@in_mode_of_forward
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
    run=lambda x, weight, bias, eps, dtype, mean: _run_norm(x, weight, bias, eps, dtype, mean, "partials", False)[0],
    visible=True,
)

_norm_of_sum = operator(
    "norm_of_sum(Tensor x, Tensor residual, Tensor? weight, float eps, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    outputs=lambda x, residual, weight, eps, dtype: (
        empty(x.shape, dtype, x), empty(x.shape, total := dtype_of_sum(x, residual), x), _new_statistics(x, False, total),
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
