"""The public function, its operators, and the launches."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.layer_norm import kernels

__all__ = ["layer_norm"]

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
        The shape of ``x``, contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype.
        ValueError: ``weight`` or ``bias`` has another shape or device, ``normalized_shape`` is not how ``x`` ends, or
            ``eps`` or ``backward`` has another value.
    """
    if normalized_shape is not None:
        return _over_several(x, weight, bias, eps, normalized_shape, backward)
    _check(x, weight, bias, eps, backward)
    out_dtype = x.dtype
    if out_dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type):
        out_dtype = torch.float32  # written as such by the kernel: no copy of x in float32
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        y: torch.Tensor = _layer_norm(x, weight, bias, float(eps), out_dtype, backward)[0]
    else:
        y = _inference(x, weight, bias, float(eps), out_dtype)
    return y


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
    arguments.check_tensor("layer_norm", "x", x)
    if x.ndim == 0:
        raise ValueError("layer_norm: x must have at least one dimension, got a scalar")
    for name, vector in (("weight", weight), ("bias", bias)):
        if isinstance(vector, int | tuple | list):
            raise TypeError(
                f"layer_norm: {name} must be a tensor (a shape goes into normalized_shape=), got {vector!r}"
            )
        if vector is not None:
            arguments.check_tensor("layer_norm", name, vector)
            arguments.check_shape("layer_norm", name, vector, x.shape[-1:])
    arguments.check_same_device("layer_norm", x=x, weight=weight, bias=bias)
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"layer_norm: eps must be a number that is not negative, got {eps!r}")
    arguments.check_choice("layer_norm", "backward", backward, BACKWARDS)
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    if m >= 2**31 or n >= 2**31 - 2**16:
        raise ValueError(f"layer_norm: x must have fewer than 2^31 rows and columns, got {m} x {n}")


# --- forward --------------------------------------------------------------------------------------------------------


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Half the host's time of new_empty(x.shape).
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@functools.cache
def _forward_launch(
    n: int, itemsize: int, eps: float, has_weight: bool, has_bias: bool, has_statistics: bool, dtype: torch.dtype
) -> tuple[Launch, int]:
    """-> the launch for rows of ``n`` elements, and the rows of a program; 0 where a program has one."""
    config = kernels.forward_config(n, itemsize)
    constants = {
        "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias, "HAS_STATISTICS": has_statistics,
        "ACC": launching.tl_accumulator(dtype),
    }  # fmt: skip
    kernel = kernels._layer_norm_fwd_kernel if config is not None else kernels._layer_norm_fwd_looped_kernel
    config = config or kernels.looped_config(itemsize)
    launch = Launch(kernel, EPS=eps, **constants, **config.kwargs, num_warps=config.num_warps)
    return launch, config.kwargs.get("BLOCK_M", 0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(M, N) for (..., N), rows contiguous: a view where the strides allow it.

    Kernels that read along another dimension would fetch a sector for each element; PyTorch's transposing copy does not.
    """
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _forward(
    y: torch.Tensor, statistics: torch.Tensor | None, x: torch.Tensor, weight: Any, bias: Any, eps: float
) -> None:
    if y.numel() == 0:
        return
    x = _rows(x)
    m, n = x.shape
    launch, rows = _forward_launch(
        int(n), x.element_size(), eps, weight is not None, bias is not None, statistics is not None, x.dtype
    )
    launch(
        (cdiv(m, rows) if rows else m,),
        x, x.stride(0),
        *launching.strided(weight, 1, x), *launching.strided(bias, 1, x),
        y, n,
        x if statistics is None else statistics,
        m, n,
    )  # fmt: skip


def _outputs(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, out_dtype: torch.dtype, backward: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> y like x, and mean and rstd, (2, M)."""
    shape = (2, math.prod(x.shape[:-1]))
    return _empty(x, out_dtype), torch.empty(shape, dtype=launching.accumulator(x.dtype), device=x.device)


def _run(
    results: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, weight: Any, bias: Any, eps: float, *_settings: Any
) -> None:
    if x.shape[-1] == 0:
        results[1].zero_()
    _forward(*results, x, weight, bias, eps)


_inference = launching.operator(
    "layer_norm_inference(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype) -> Tensor",
    outputs=lambda x, weight, bias, eps, out_dtype: _empty(x, out_dtype),
    run=lambda y, x, weight, bias, eps, out_dtype: _forward(y, None, x, weight, bias, eps),
    visible=True,
)


# --- backward -------------------------------------------------------------------------------------------------------


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: Any,
    statistics: torch.Tensor,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx like x, dweight (N,) or empty, dbias (N,) or empty."""
    n = x.shape[-1]
    dw = torch.empty(0 if dw_dtype is None else n, dtype=dw_dtype or x.dtype, device=x.device)
    db = torch.empty(0 if db_dtype is None else n, dtype=db_dtype or x.dtype, device=x.device)
    return _empty(x, x.dtype), dw, db


@functools.cache
def _sum_launch(**constants: Any) -> Launch:
    config = kernels.SUM_CONFIG
    return Launch(kernels._layer_norm_bwd_sum_kernel, **constants, **config.kwargs, num_warps=config.num_warps)


def _run_backward(
    results: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, weight: Any, statistics: torch.Tensor,
    dw_dtype: torch.dtype | None, db_dtype: torch.dtype | None, backward: str,
) -> None:  # fmt: skip
    dx, dw, db = results
    if dx.numel() == 0:
        dw.zero_(), db.zero_()
        return
    x, dy = _rows(x), _rows(dy)
    m, n = x.shape
    with_dw, with_db, acc = dw_dtype is not None, db_dtype is not None, launching.tl_accumulator(x.dtype)
    constants = {"HAS_WEIGHT": weight is not None, "WITH_DW": with_dw, "WITH_DB": with_db, "ACC": acc}
    tensors = (x, x.stride(0), dy, dy.stride(0), *launching.strided(weight, 1, x), statistics, dx, n)
    config = kernels.locks_config(int(n), x.element_size())
    if backward == "locks" and config is not None and not torch.are_deterministic_algorithms_enabled():
        partial_dw, partial_db = _launch_locks(config, tensors, m, n, constants)
    else:
        partial_dw, partial_db = _launch_partials(tensors, m, n, constants)
    if with_dw or with_db:
        launch = _sum_launch(WITH_DW=with_dw, WITH_DB=with_db, ACC=acc)
        columns = cdiv(n, kernels.SUM_CONFIG.kwargs["BLOCK_N"])
        launch((columns, 2), partial_dw, partial_db, dw, db, partial_dw.shape[0], n)
    if n == 1:
        # A single column never deviates from its mean; a fused multiply-add would leave one rounding times rstd.
        torch.sub(dy, dy, out=dx)  # NaN where dy is
        dx.view(-1).add_((x - x).view(-1))


@functools.cache
def _partials_launch(
    n: int, itemsize: int, aligned: bool, properties: runtime.DeviceProperties, **constants: Any
) -> tuple[Launch, Any]:
    config = kernels.backward_config(n, itemsize, aligned)
    split = config.kwargs.get("SPLIT")
    kernel = kernels._layer_norm_bwd_partials_kernel if split else kernels._layer_norm_bwd_partials_looped_kernel
    return Launch(kernel, **constants, **config.kwargs, num_warps=config.num_warps), config


def _launch_partials(
    tensors: tuple[Any, ...], m: int, n: int, constants: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the partial sums of weight's and bias's gradients, each (programs, N)."""
    x, statistics = tensors[0], tensors[6]
    # What Triton's launcher looks at before it widens loads.
    strides = [number for number in (*tensors, n) if not isinstance(number, torch.Tensor) and number != 1]
    aligned = launching.is_aligned(*(t for t in tensors if isinstance(t, torch.Tensor))) and not any(
        stride % 16 for stride in strides
    )
    launch, config = _partials_launch(int(n), x.element_size(), aligned, runtime.properties(x.device), **constants)
    programs = kernels.backward_programs(m, config)
    shape = (programs, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    partial_dw = torch.empty(shape, dtype=statistics.dtype, device=x.device)
    partial_db = torch.empty_like(partial_dw)
    launch((programs, config.kwargs.get("SPLIT") or 1), *tensors, partial_dw, partial_db, m, n)
    return partial_dw, partial_db


def _launch_locks(
    config: Any, tensors: tuple[Any, ...], m: int, n: int, constants: dict[str, Any],
    *, buffers: int = kernels.LOCK_BUFFERS, barrier: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the buffers that the programs added into, each (buffers, N)."""
    statistics = tensors[6]
    shape = (buffers, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    buffer_dw, buffer_db = (statistics.new_zeros(shape) for _ in range(2))
    launch = _locks_launch(
        NUM_BUFFERS=buffers, BARRIER=barrier, num_warps=config.num_warps, **constants, **config.kwargs
    )
    launch((m,), *tensors, buffer_dw, buffer_db, statistics.new_zeros(buffers, dtype=torch.int32), m, n)
    return buffer_dw, buffer_db


@functools.cache
def _locks_launch(**constants: Any) -> Launch:
    return Launch(kernels._layer_norm_bwd_locks_kernel, **constants)


_backward = launching.operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, ScalarType? dw_dtype, "
    "ScalarType? db_dtype, str backward) -> (Tensor, Tensor, Tensor)",
    outputs=_gradients,
    run=_run_backward,
    visible=True,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _, _, ctx.backward = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _autograd(ctx: Any, dy: torch.Tensor | None, _statistics: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None, None
    x, weight, statistics = ctx.saved_tensors
    _, needs_dw, needs_db, *_ = ctx.needs_input_grad
    dw_dtype, db_dtype = weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
    dx, dw, db = _backward(dy, x, weight, statistics, dw_dtype, db_dtype, ctx.backward)
    return dx, dw if needs_dw else None, db if needs_db else None, None, None, None


_layer_norm = launching.operator(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype, str backward) "
    "-> (Tensor, Tensor)",
    outputs=_outputs,
    run=_run,
    setup_context=_setup_context,
    backward=_autograd,
    visible=True,
)
