"""The public function, its custom operators, and the launches."""

import math
from typing import Any, Optional

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.layer_norm import kernels

# isort: split
import triton
import triton.language as tl

__all__ = ["layer_norm"]

BACKWARDS = ("partials", "locks")
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backward: str = "partials",
) -> torch.Tensor:
    """Layer normalization over the last dimension, a drop-in for ``torch.nn.functional.layer_norm``.

    Ba, Kiros and Hinton, "Layer Normalization" (2016), section 3. Statistics are computed in float32 (float64 for
    float64 inputs), from the deviations, whatever the dtype of ``x``.

    Args:
        x: (..., N), float16, bfloat16, float32 or float64, any strides.
        weight: (N,) or ``None``, any of those dtypes.
        bias: (N,) or ``None``, any of those dtypes.
        eps: added to the variance; not negative.
        backward: how the gradients of weight and bias are summed over the rows. ``"partials"``: each program keeps a
            partial sum, a second kernel adds them up; bitwise reproducible on one GPU model. ``"locks"``: programs add
            into shared buffers under spin locks, in whatever order they come; for study. Where
            ``torch.use_deterministic_algorithms`` is on, and for rows of more than 128 KiB in float32, ``"partials"``
            is used.

    Returns:
        (..., N), contiguous, in the dtype of ``x``; under autocast float32, as PyTorch's own.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype.
        ValueError: ``weight`` or ``bias`` has another shape or device, or ``eps`` or ``backward`` another value.
    """
    arguments.check_tensor("layer_norm", "x", x)
    if x.ndim == 0:
        raise ValueError("layer_norm: x must have at least one dimension, got a scalar")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            arguments.check_tensor("layer_norm", name, vector)
            arguments.check_shape("layer_norm", name, vector, x.shape[-1:])
    arguments.check_same_device("layer_norm", x=x, weight=weight, bias=bias)
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"layer_norm: eps must be a number that is not negative, got {eps!r}")
    arguments.check_choice("layer_norm", "backward", backward, BACKWARDS)
    out_dtype = x.dtype
    if x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type):
        out_dtype = torch.float32  # written as such by the kernel: no copy of x in float32
    y: torch.Tensor = _forward(x, weight, bias, float(eps), out_dtype, backward)[0]
    return y


def _launchable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take it: float32 instead of bfloat16 in the interpreter."""
    return tensor.to(runtime.kernel_dtype(tensor.dtype))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(M, N) for (..., N), rows contiguous: a view where the strides allow it.

    Kernels that read along another dimension would fetch a sector for each element; PyTorch's transposing copy does not.
    """
    rows = _launchable(x).reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _vector(vector: torch.Tensor | None, stand_in: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor and its stride for weight or bias; any tensor where there is none, since the kernel won't touch it."""
    if vector is None:
        return stand_in, 0
    vector = _launchable(vector)
    return vector, vector.stride(0)


def _check_size(m: int, n: int) -> None:
    if m >= 2**31 or n >= 2**31 - 2**16:
        raise ValueError(f"layer_norm: x must have fewer than 2^31 rows and columns, got {m} x {n}")


@torch.library.custom_op("kernelbook::layer_norm", mutates_args=())
def _forward(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],  # noqa: UP045
    bias: Optional[torch.Tensor],  # noqa: UP045
    eps: float,
    out_dtype: torch.dtype,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> y like x, mean (M,), rstd (M,)."""
    n = x.shape[-1]
    m = math.prod(x.shape[:-1])
    _check_size(m, n)
    acc = kernels.accumulator_dtype(x.dtype)
    y = torch.empty(x.shape, dtype=runtime.kernel_dtype(out_dtype), device=x.device)
    mean = torch.empty(m, dtype=acc, device=x.device)
    rstd = torch.empty(m, dtype=acc, device=x.device)
    if n == 0:
        mean.zero_(), rstd.zero_()
    if m == 0 or n == 0:
        return y.to(out_dtype), mean, rstd
    x = _rows(x)
    vectors = (*_vector(weight, x), *_vector(bias, x))
    constants = {"EPS": eps, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "ACC": _TL_DTYPE[acc]}
    config = kernels.forward_config(n, x.element_size())
    with runtime.on_device_of(x):
        if config is not None:
            tiles = triton.cdiv(m, config.kwargs["BLOCK_M"])
            kernels._layer_norm_fwd_kernel[(tiles,)](
                x, x.stride(0),
                *vectors,
                y, n,
                mean, rstd,
                m, n,
                **constants, **config.kwargs, num_warps=config.num_warps,
            )  # fmt: skip
        else:
            looped = kernels.looped_config(x.element_size())
            kernels._layer_norm_fwd_looped_kernel[(m,)](
                x, x.stride(0),
                *vectors,
                y, n,
                mean, rstd,
                n,
                **constants, **looped.kwargs, num_warps=looped.num_warps,
            )  # fmt: skip
    return y.to(out_dtype), mean, rstd


@_forward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    acc, m = kernels.accumulator_dtype(x.dtype), math.prod(x.shape[:-1])
    return (
        torch.empty(x.shape, dtype=out_dtype, device=x.device),
        torch.empty(m, dtype=acc, device=x.device),
        torch.empty(m, dtype=acc, device=x.device),
    )


@torch.library.custom_op("kernelbook::layer_norm_backward", mutates_args=())
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: Optional[torch.Tensor],  # noqa: UP045
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dw_dtype: Optional[torch.dtype],  # noqa: UP045
    db_dtype: Optional[torch.dtype],  # noqa: UP045
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx like x, dweight (N,) or empty, dbias (N,) or empty."""
    n, m = x.shape[-1], mean.shape[0]
    dx = torch.empty(x.shape, dtype=runtime.kernel_dtype(x.dtype), device=x.device)
    dw = torch.empty(0 if dw_dtype is None else n, dtype=dw_dtype or x.dtype, device=x.device)
    db = torch.empty(0 if db_dtype is None else n, dtype=db_dtype or x.dtype, device=x.device)
    if m == 0 or n == 0:
        return dx.to(x.dtype), dw.zero_(), db.zero_()
    dtype = x.dtype
    x, dy = _rows(x), _rows(dy)
    dw, db = dw.to(runtime.kernel_dtype(dw.dtype)), db.to(runtime.kernel_dtype(db.dtype))
    constants = {
        "HAS_WEIGHT": weight is not None,
        "WITH_DW": dw_dtype is not None,
        "WITH_DB": db_dtype is not None,
        "ACC": _TL_DTYPE[mean.dtype],
    }
    tensors = (
        x, x.stride(0),
        dy, dy.stride(0),
        *_vector(weight, x),
        mean, rstd,
        dx, n,
    )  # fmt: skip
    with runtime.on_device_of(x):
        config = kernels.locks_config(n, x.element_size())
        if backward == "locks" and config is not None and not torch.are_deterministic_algorithms_enabled():
            partial_dw, partial_db = _launch_locks(config, tensors, m, n, constants)
        else:
            partial_dw, partial_db = _launch_partials(tensors, m, n, constants)
        if dw_dtype is not None or db_dtype is not None:
            config = kernels.SUM_CONFIG
            kernels._layer_norm_bwd_sum_kernel[(triton.cdiv(n, config.kwargs["BLOCK_N"]), 2)](
                partial_dw, partial_db,
                dw, db,
                partial_dw.shape[0], n,
                constants["WITH_DW"], constants["WITH_DB"], constants["ACC"],
                **config.kwargs, num_warps=config.num_warps,
            )  # fmt: skip
    if n == 1:  # a single column never deviates from its mean; a fused multiply-add would leave one rounding times rstd
        dx.zero_()
    return dx.to(dtype), dw.to(dw_dtype or dtype), db.to(db_dtype or dtype)


def _launch_partials(
    tensors: tuple[Any, ...], m: int, n: int, constants: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the partial sums of weight's and bias's gradients, each (programs, N)."""
    x, mean = tensors[0], tensors[6]
    # What Triton's launcher looks at before it widens loads.
    strides = [number for number in (*tensors, n) if isinstance(number, int) and number != 1]
    aligned = all(t.data_ptr() % 16 == 0 for t in tensors if isinstance(t, torch.Tensor)) and not any(
        stride % 16 for stride in strides
    )
    config = kernels.backward_config(n, x.element_size(), aligned)
    programs = kernels.backward_programs(m, config)
    shape = (programs, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    partial_dw, partial_db = (torch.empty(shape, dtype=mean.dtype, device=x.device) for _ in range(2))
    split = config.kwargs.get("SPLIT")
    kernel = kernels._layer_norm_bwd_partials_kernel if split else kernels._layer_norm_bwd_partials_looped_kernel
    kernel[(programs, split or 1)](
        *tensors, partial_dw, partial_db, m, n, **constants, **config.kwargs, num_warps=config.num_warps
    )
    return partial_dw, partial_db


def _launch_locks(
    config: triton.Config,
    tensors: tuple[Any, ...],
    m: int,
    n: int,
    constants: dict[str, Any],
    *,
    buffers: int = kernels.LOCK_BUFFERS,
    barrier: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the buffers that the programs added into, each (buffers, N)."""
    x, mean = tensors[0], tensors[6]
    shape = (buffers, n if constants["WITH_DW"] or constants["WITH_DB"] else 0)
    buffer_dw, buffer_db = (torch.zeros(shape, dtype=mean.dtype, device=x.device) for _ in range(2))
    locks = torch.zeros(buffers, dtype=torch.int32, device=x.device)
    kernels._layer_norm_bwd_locks_kernel[(m,)](
        *tensors, buffer_dw, buffer_db, locks, n,
        **constants, NUM_BUFFERS=buffers, **config.kwargs, BARRIER=barrier, num_warps=config.num_warps,
    )  # fmt: skip
    return buffer_dw, buffer_db


@_backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(0 if dw_dtype is None else n, dtype=dw_dtype or x.dtype, device=x.device),
        torch.empty(0 if db_dtype is None else n, dtype=db_dtype or x.dtype, device=x.device),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _, _, backward = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.backward = backward
    ctx.bias_dtype = None if bias is None else bias.dtype


def _autograd(
    ctx: Any, dy: torch.Tensor | None, _mean: torch.Tensor | None, _rstd: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    _, needs_dw, needs_db, *_ = ctx.needs_input_grad
    dw_dtype = weight.dtype if needs_dw else None
    db_dtype = ctx.bias_dtype if needs_db else None
    dx, dw, db = _backward(dy, x, weight, mean, rstd, dw_dtype, db_dtype, ctx.backward)
    return dx, dw if needs_dw else None, db if needs_db else None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
