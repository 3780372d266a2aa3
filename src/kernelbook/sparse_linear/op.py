"""The public functions, their custom operators, and the launches."""

import dataclasses
import math
from typing import Any, Optional

import torch
import torch.nn.functional as F

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.sparse_linear import kernels

# isort: split
import triton

__all__ = ["sparse_backward", "sparse_dw", "sparse_dx", "sparse_forward", "sparse_linear"]

MODES = ("dense", "sparse_dw", "sparse_dw_dx")
BOX = 64  # features that one tensor descriptor's load takes from a chunk


# --- public functions -----------------------------------------------------------------------------------------------


def sparse_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    active_chunks: torch.Tensor | None = None,
    *,
    chunk_size: int = 64,
    mode: str = "sparse_dw",
) -> torch.Tensor:
    """``x W^T + b``, as ``torch.nn.functional.linear``, with gradients for the active chunks of output features only.

    Feature ``n`` belongs to chunk ``n // chunk_size``. The forward pass is dense. In the backward pass the rows of dW and
    the entries of db that belong to inactive chunks are zero. dX is the dense gradient in mode ``"sparse_dw"``; in mode
    ``"sparse_dw_dx"`` it sums over active chunks only, so it is **another gradient by design**.

    Args:
        x: (..., d_in), float16, bfloat16, float32 or float64, any strides.
        weight: (d_out, d_in), the dtype of ``x``, any strides.
        bias: (d_out,), the dtype of ``x``, or ``None``.
        active_chunks: (A,) int64 or int32, different ids in [0, ceil(d_out / chunk_size)) in any order; ``None``: all. On
            the CPU and under ``KERNELBOOK_DEBUG=1`` the ids are checked; on a GPU without it an id out of range counts
            as no chunk, and ids that repeat, or as many ids as chunks that are not all different, give wrong gradients.
        chunk_size: features in a chunk, at least 16; the last chunk may be shorter.
        mode: ``"dense"``, ``"sparse_dw"`` or ``"sparse_dw_dx"``.

    Returns:
        (..., d_out) in the dtype of ``x``; under autocast in its dtype, as PyTorch's own. float32 products use tf32 where
        ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``chunk_size``, ``mode`` or (where they are checked) an id is not as above.
    """
    op = "sparse_linear"
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    _check_features(op, x, weight, bias)
    arguments.check_choice(op, "mode", mode, MODES)
    _check_chunks(op, active_chunks, chunk_size, x)
    if active_chunks is None or mode == "dense":
        return F.linear(x, weight, bias)
    y: torch.Tensor = _linear(x, weight, bias, active_chunks, chunk_size, mode)
    return y


def sparse_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    active_chunks: torch.Tensor,
    *,
    chunk_size: int = 64,
    compact: bool = False,
) -> torch.Tensor:
    """The active columns of ``x W^T + b``; differentiable.

    Args:
        x, weight, bias, active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: return the active columns only, in the order of the ids.

    Returns:
        (..., d_out) with zeros in inactive chunks, or (..., A * chunk_size) if ``compact`` (the last columns of a shorter
        chunk are zero).

    Raises: as :func:`sparse_linear`.
    """
    op = "sparse_forward"
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    _check_features(op, x, weight, bias)
    _check_chunks(op, active_chunks, chunk_size, x, required=True)
    y: torch.Tensor = _forward(x, weight, bias, active_chunks, chunk_size, weight.shape[0], compact, False)
    return y


def sparse_dw(
    x: torch.Tensor,
    dy: torch.Tensor,
    active_chunks: torch.Tensor,
    *,
    chunk_size: int = 64,
    compact: bool = False,
    with_bias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias in the active chunks, both from one pass over ``dy``; differentiable.

    Args:
        x: (..., d_in). dy: (..., d_out), the dtype of ``x``; what it holds in inactive chunks is not read.
        active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: return the active rows only, in the order of the ids.
        with_bias: also return db.

    Returns:
        dW (d_out, d_in) and db (d_out,) or ``None``, zero in inactive chunks; if ``compact``, (A * chunk_size, d_in) and
        (A * chunk_size,) (the last rows of a shorter chunk are zero).

    Raises: as :func:`sparse_linear`.
    """
    op = "sparse_dw"
    x, dy = arguments.in_autocast_dtype(x, dy)
    arguments.check_tensor(op, "x", x)
    arguments.check_tensor(op, "dy", dy)
    arguments.check_same_dtype(op, x=x, dy=dy)
    for name, value in (("x", x), ("dy", dy)):
        if value.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
    arguments.check_shape(op, "dy", dy, (*x.shape[:-1], dy.shape[-1]))
    arguments.check_same_device(op, x=x, dy=dy)
    _check_chunks(op, active_chunks, chunk_size, x, required=True)
    dw, db = _dw(x, dy, active_chunks, chunk_size, dy.shape[-1], compact, False, with_bias)
    return dw, db if with_bias else None


def sparse_dx(
    dy: torch.Tensor, weight: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64
) -> torch.Tensor:
    """The gradient of the input that the active chunks carry: the sum over them of ``dY[..., c] W[c]``; differentiable.

    Args:
        dy: (..., d_out), the dtype of ``weight``; what it holds in inactive chunks is not read.
        weight: (d_out, d_in).
        active_chunks, chunk_size: as in :func:`sparse_linear`.

    Returns:
        dX (..., d_in).

    Raises: as :func:`sparse_linear`.
    """
    op = "sparse_dx"
    dy, weight = arguments.in_autocast_dtype(dy, weight)
    arguments.check_tensor(op, "dy", dy)
    arguments.check_tensor(op, "weight", weight)
    arguments.check_same_dtype(op, dy=dy, weight=weight)
    if weight.ndim != 2:
        raise ValueError(f"{op}: weight must have two dimensions, got shape {tuple(weight.shape)}")
    if dy.ndim == 0:
        raise ValueError(f"{op}: dy must have at least one dimension, got a scalar")
    arguments.check_shape(op, "dy", dy, (*dy.shape[:-1], weight.shape[0]))
    arguments.check_same_device(op, dy=dy, weight=weight)
    _check_chunks(op, active_chunks, chunk_size, dy, required=True)
    dx: torch.Tensor = _dx(dy, weight, active_chunks, chunk_size, weight.shape[0], False, False)
    return dx


def sparse_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    active_chunks: torch.Tensor,
    *,
    chunk_size: int = 64,
    compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole backward pass of mode ``"sparse_dw_dx"`` in one call (and for 16-bit dtypes one launch).

    Args:
        x: (..., d_in). weight: (d_out, d_in). dy: (..., d_out), all of one dtype.
        active_chunks, chunk_size: as in :func:`sparse_linear`. compact: as in :func:`sparse_dw`, for dW and db.

    Returns:
        dW and db as :func:`sparse_dw`, dX as :func:`sparse_dx`; not differentiable.

    Raises: as :func:`sparse_linear`.
    """
    op = "sparse_backward"
    _check_features(op, x, weight, None)
    arguments.check_tensor(op, "dy", dy)
    arguments.check_same_dtype(op, x=x, dy=dy)
    arguments.check_shape(op, "dy", dy, (*x.shape[:-1], weight.shape[0]))
    arguments.check_same_device(op, x=x, dy=dy)
    _check_chunks(op, active_chunks, chunk_size, x, required=True)
    dx, dw, db = _linear_backward(dy, x, weight, active_chunks, chunk_size, "sparse_dw_dx", compact, True, True, True)
    return dw, db, dx


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_features(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    arguments.check_linear(op, x, "weight", weight)
    if bias is not None:
        arguments.check_tensor(op, "bias", bias)
        arguments.check_shape(op, "bias", bias, weight.shape[:1])
        arguments.check_same_dtype(op, x=x, bias=bias)
        arguments.check_same_device(op, x=x, bias=bias)


def _check_chunks(op: str, ids: object, chunk_size: object, x: torch.Tensor, *, required: bool = False) -> None:
    if not isinstance(chunk_size, int) or chunk_size < 16:
        raise ValueError(f"{op}: chunk_size must be an integer of at least 16, got {chunk_size!r}")
    if ids is None and not required:
        return
    arguments.check_indices(op, "active_chunks", ids)
    assert isinstance(ids, torch.Tensor)
    arguments.check_same_device(op, x=x, active_chunks=ids)


def _check_ids(op: str, ids: torch.Tensor, d_out: int, chunk: int) -> None:
    arguments.check_index_values(op, "active_chunks", ids, launching.cdiv(d_out, chunk), unique=True)


# --- custom operators -----------------------------------------------------------------------------------------------
# The products are linear in each tensor, so that the gradient of each operator is made of the other two. ``d_out`` is
# given where compact tensors do not tell it.


@torch.library.custom_op("kernelbook::sparse_linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
    active_chunks: torch.Tensor,
    chunk_size: int,
    mode: str,
) -> torch.Tensor:
    _check_ids("sparse_linear", active_chunks, weight.shape[0], chunk_size)
    with launching.without_autocast(x):
        y = F.linear(x, weight, bias)
    return launching.reshaped(y, *y.shape)


@_linear.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    active_chunks: torch.Tensor,
    chunk_size: int,
    mode: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("kernelbook::sparse_linear_backward", mutates_args=())
def _linear_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    active_chunks: torch.Tensor,
    chunk_size: int,
    mode: str,
    compact: bool,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx, dw, db; empty where not needed."""
    _check_ids("sparse_backward", active_chunks, weight.shape[0], chunk_size)
    dense_dx = needs_dx and mode != "sparse_dw_dx"
    dx, dw, db = _backward(
        _Problem(active_chunks, chunk_size, weight.shape[0], dw_compact=compact),
        dy, x, weight, needs_dx and not dense_dx, needs_dw, needs_db,
    )  # fmt: skip
    if dense_dx:
        with launching.without_autocast(dy):
            dx = dy @ weight
    return dx, dw, db


@_linear_backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    active_chunks: torch.Tensor,
    chunk_size: int,
    mode: str,
    compact: bool,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = active_chunks.shape[0] * chunk_size if compact else weight.shape[0]
    return (
        dy.new_empty(x.shape if needs_dx else (0,)),
        dy.new_empty((rows, x.shape[-1]) if needs_dw else (0,)),
        dy.new_empty(rows if needs_db else 0),
    )


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _bias, ids, ctx.chunk_size, ctx.mode = inputs
    # x is only needed for dW and the weight only for dX.
    ctx.save_for_backward(x, weight, ids)


def _linear_autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    gradients = _linear_backward(dy, *ctx.saved_tensors, ctx.chunk_size, ctx.mode, False, *needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), None, None, None


_linear.register_autograd(_linear_autograd, setup_context=_setup_linear)


@torch.library.custom_op("kernelbook::sparse_forward", mutates_args=())
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
    active_chunks: torch.Tensor,
    chunk_size: int,
    d_out: int,
    compact: bool,
    weight_compact: bool,
) -> torch.Tensor:
    """-> Y (..., d_out) or (..., A * chunk_size); weight and bias have A * chunk_size rows if ``weight_compact``."""
    _check_ids("sparse_forward", active_chunks, d_out, chunk_size)
    return _run_forward(_Problem(active_chunks, chunk_size, d_out, compact, weight_compact), x, weight, bias)


@_forward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    active_chunks: torch.Tensor,
    chunk_size: int,
    d_out: int,
    compact: bool,
    weight_compact: bool,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], active_chunks.shape[0] * chunk_size if compact else d_out))


@torch.library.custom_op("kernelbook::sparse_dw", mutates_args=())
def _dw(
    x: torch.Tensor,
    dy: torch.Tensor,
    active_chunks: torch.Tensor,
    chunk_size: int,
    d_out: int,
    compact: bool,
    dy_compact: bool,
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> dW, and db or an empty tensor."""
    _check_ids("sparse_dw", active_chunks, d_out, chunk_size)
    problem = _Problem(active_chunks, chunk_size, d_out, dy_compact, dw_compact=compact)
    _, dw, db = _backward(problem, dy, x, None, False, True, with_bias)
    return dw, db


@_dw.register_fake
def _(
    x: torch.Tensor,
    dy: torch.Tensor,
    active_chunks: torch.Tensor,
    chunk_size: int,
    d_out: int,
    compact: bool,
    dy_compact: bool,
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = active_chunks.shape[0] * chunk_size if compact else d_out
    return x.new_empty((rows, x.shape[-1])), x.new_empty(rows if with_bias else 0)


@torch.library.custom_op("kernelbook::sparse_dx", mutates_args=())
def _dx(
    dy: torch.Tensor,
    weight: torch.Tensor,
    active_chunks: torch.Tensor,
    chunk_size: int,
    d_out: int,
    dy_compact: bool,
    weight_compact: bool,
) -> torch.Tensor:
    _check_ids("sparse_dx", active_chunks, d_out, chunk_size)
    problem = _Problem(active_chunks, chunk_size, d_out, dy_compact, weight_compact)
    return _backward(problem, dy, None, weight, True, False, False)[0]


@_dx.register_fake
def _(
    dy: torch.Tensor,
    weight: torch.Tensor,
    active_chunks: torch.Tensor,
    chunk_size: int,
    d_out: int,
    dy_compact: bool,
    weight_compact: bool,
) -> torch.Tensor:
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]))


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, ids, ctx.chunk_size, ctx.d_out, ctx.compact, ctx.weight_compact = inputs
    ctx.save_for_backward(x, weight, ids)


def _forward_autograd(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
    sizes = (ids, ctx.chunk_size, ctx.d_out)
    dx = _dx(gy, weight, *sizes, ctx.compact, ctx.weight_compact) if needs_dx else None
    dw, db = None, None
    if needs_dw or needs_db:
        dw, db = _dw(x, gy, *sizes, ctx.weight_compact, ctx.compact, needs_db)
    return dx, dw if needs_dw else None, db if needs_db else None, None, None, None, None, None


def _setup_dw(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, dy, ids, ctx.chunk_size, ctx.d_out, ctx.compact, ctx.dy_compact, ctx.with_bias = inputs
    ctx.save_for_backward(x, dy, ids)


def _dw_autograd(ctx: Any, gw: torch.Tensor, gb: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, dy, ids = ctx.saved_tensors
    sizes = (ids, ctx.chunk_size, ctx.d_out, ctx.dy_compact, ctx.compact)
    gx = _dx(dy, gw, *sizes) if ctx.needs_input_grad[0] else None
    gdy = _forward(x, gw, gb if ctx.with_bias else None, *sizes) if ctx.needs_input_grad[1] else None
    return gx, gdy, None, None, None, None, None, None


def _setup_dx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    dy, weight, ids, ctx.chunk_size, ctx.d_out, ctx.dy_compact, ctx.weight_compact = inputs
    ctx.save_for_backward(dy, weight, ids)


def _dx_autograd(ctx: Any, gx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dy, weight, ids = ctx.saved_tensors
    sizes = (ids, ctx.chunk_size, ctx.d_out)
    gdy = _forward(gx, weight, None, *sizes, ctx.dy_compact, ctx.weight_compact) if ctx.needs_input_grad[0] else None
    gw = _dw(gx, dy, *sizes, ctx.weight_compact, ctx.dy_compact, False)[0] if ctx.needs_input_grad[1] else None
    return gdy, gw, None, None, None, None, None


_forward.register_autograd(_forward_autograd, setup_context=_setup_forward)
_dw.register_autograd(_dw_autograd, setup_context=_setup_dw)
_dx.register_autograd(_dx_autograd, setup_context=_setup_dx)


# --- launches -------------------------------------------------------------------------------------------------------
# A small backward pass is over in 15 microseconds, so what the host does here counts.


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The active chunks, and whether the columns of Y and dY, the rows of W, and those of dW and db are compact."""

    ids: torch.Tensor
    chunk: int
    d_out: int
    y_compact: bool = False
    w_compact: bool = False
    dw_compact: bool = False

    @property
    def num_chunks(self) -> int:
        return launching.cdiv(self.d_out, self.chunk)

    @property
    def count(self) -> int:
        """A, the number of active chunks."""
        return self.ids.shape[0]

    @property
    def active(self) -> int:
        """Active features."""
        return self.count * self.chunk

    @property
    def dw_rows(self) -> int:
        return self.active if self.dw_compact else self.d_out

    @property
    def y_columns(self) -> int:
        return self.active if self.y_compact else self.d_out

    def with_contiguous_ids(self) -> "_Problem":
        return self if self.ids.is_contiguous() else dataclasses.replace(self, ids=self.ids.contiguous())

    @property
    def constants(self) -> dict[str, int]:
        return {"CHUNK": self.chunk, "ALIGN": kernels.alignment(self.chunk)}


def _strategy(problem: _Problem, dtype: torch.dtype, m: int, d_in: int, *operands: torch.Tensor | None) -> str:
    """``"dense"``: cuBLAS on everything. ``"packed"``: on packed operands. ``"tiles"``: our kernels, in place."""
    compact = problem.y_compact or problem.w_compact or problem.dw_compact
    if problem.count == problem.num_chunks and not compact:
        return "dense"
    # Tensor cores want float32 operands with the reduction in the fast dimension, where dW and dX have it in the slow.
    if dtype in (torch.float32, torch.float64):
        return "packed"
    # Rows that begin anywhere are loaded two bytes at a time; a large problem is better off with a copy and cuBLAS.
    large = 2.0 * m * d_in * problem.active > kernels.SMALL_FLOP
    return "packed" if large and not all(t is None or _wide(t) for t in operands) else "tiles"


def _wide(tensor: torch.Tensor) -> bool:
    """Whether rows or columns are contiguous and all begin on 16 bytes."""
    return launching.has_aligned_rows(tensor) or launching.has_aligned_rows(tensor.t())


def _backward(
    problem: _Problem,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx, dw, db; empty where not needed. ``x`` is there if dw is needed, ``weight`` if dx is."""
    dtype, device = dy.dtype, dy.device
    source = weight if weight is not None else x
    assert source is not None
    d_in, leading = source.shape[-1], dy.shape[:-1]
    m = math.prod(leading)
    kernel_dtype = runtime.kernel_dtype(dtype)
    dx = torch.empty((m, d_in) if needs_dx else 0, dtype=kernel_dtype, device=device)
    dw = torch.empty((problem.dw_rows, d_in) if needs_dw else 0, dtype=kernel_dtype, device=device)
    db = torch.empty(problem.dw_rows if needs_db else 0, dtype=kernel_dtype, device=device)
    if m == 0 or problem.count == 0:
        dx.zero_(), dw.zero_(), db.zero_()
    else:
        dy = launching.matrix(dy)
        x = launching.matrix(x) if x is not None and needs_dw else None
        weight = launching.matrix(weight) if weight is not None and needs_dx else None
        strategy = _strategy(problem, dtype, m, d_in, dy, x, weight)
        if strategy == "dense":
            with launching.without_autocast(dy):
                if weight is not None:
                    torch.mm(dy, weight, out=dx)
                if x is not None:
                    torch.mm(dy.t(), x, out=dw)
                if needs_db:
                    torch.sum(dy, 0, out=db)
        else:
            problem = problem.with_contiguous_ids()
            # db alone comes with packing; it is a sum, not a product.
            products = d_in > 0 and (needs_dx or needs_dw)
            run = _run_tiles if strategy == "tiles" and products else _run_packed
            with runtime.on_device_of(dy), launching.without_autocast(dy):
                run(problem, dy, x, weight, dx, dw, db, needs_db)
    return (
        launching.reshaped(dx.to(dtype), *leading, d_in) if needs_dx else dx.to(dtype),
        dw.to(dtype),
        db.to(dtype),
    )


def _in_boxes(problem: _Problem, *tensors: torch.Tensor | None) -> bool:
    """Whether tensor descriptors can read the matrices: chunks of whole boxes, contiguous rows that start on 16 bytes."""
    if problem.chunk % BOX or problem.y_compact or problem.w_compact or problem.d_out >= 2**30:
        return False
    return all(t is None or launching.has_aligned_rows(t) for t in tensors)


def _run_tiles(
    problem: _Problem,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    dx: torch.Tensor,
    dw: torch.Tensor,
    db: torch.Tensor,
    needs_db: bool,
) -> None:
    """Fills dx (if there is a weight), dw (if there is an x) and db with one launch, or two if dW's reduction is split."""
    m, d_in = dy.shape[0], (x if x is not None else weight).shape[1]  # type: ignore[union-attr]
    with_dw, with_dx = x is not None, weight is not None
    if needs_db and not with_dw:
        _run_packed(problem, dy, None, None, dx[:0], dw, db, needs_db)
        needs_db = False
    properties = runtime.properties()
    boxes = kernels.has_boxes(properties) and _in_boxes(problem, dy, x, weight)
    plan = kernels.plan_backward(m, d_in, problem.active, dy.element_size(), with_dw, with_dx, boxes, properties)
    _launch_tiles(problem, dy, x, weight, dx, dw, db, needs_db, plan)


def _launch_tiles(
    problem: _Problem,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    dx: torch.Tensor,
    dw: torch.Tensor,
    db: torch.Tensor,
    needs_db: bool,
    plan: kernels.Plan,
) -> None:
    m, d_in = dy.shape[0], (x if x is not None else weight).shape[1]  # type: ignore[union-attr]
    config, split = plan.config, plan.split if x is not None else 1
    acc = launching.accumulator(dy.dtype)
    blocks = config.kwargs
    r, d, k = blocks["BLOCK_R"], blocks["BLOCK_D"], blocks["BLOCK_K"]
    columns = launching.cdiv(d_in, d)
    num_dw = launching.cdiv(problem.active, r) * columns * split if x is not None else 0
    num_dx = launching.cdiv(m, r) * columns if weight is not None else 0
    with_zero = x is not None and not problem.dw_compact and split == 1
    num_zero = problem.num_chunks if with_zero else 0
    dx_first = num_dw > 0 and num_dx > 0 and problem.active > launching.cdiv(m, split)
    num_later = num_dw if dx_first else num_dx
    to_dw, to_db = dw, db
    if split > 1:
        to_dw = torch.empty((split, problem.active, d_in), dtype=acc, device=dy.device)
        to_db = torch.empty((split, problem.active), dtype=acc, device=dy.device)
    dw_boxes = plan.boxes and x is not None and r % BOX == 0
    dx_boxes = plan.boxes and weight is not None and problem.chunk % k == 0
    boxes = (
        *((launching.box(x, k, d), launching.box(dy, k, BOX)) if x is not None and dw_boxes else (None, None)),
        *((launching.box(dy, r, k), launching.box(weight, k, d)) if weight is not None and dx_boxes else (None, None)),
    )
    kernels._sparse_linear_bwd_tiles_kernel[(num_dw + num_dx + num_zero,)](
        problem.ids,
        *launching.strided(x, 2, dy),
        dy, *dy.stride(),
        *launching.strided(weight, 2, dy),
        dx,
        to_dw, to_db,
        *boxes,
        m, d_in, problem.d_out, problem.count,
        num_dw, num_dx, num_zero,
        (num_later + num_zero) // max(num_zero, 1),
        **problem.constants,
        DY_COMPACT=problem.y_compact, W_COMPACT=problem.w_compact, DW_COMPACT=problem.dw_compact,
        WITH_DW=x is not None, WITH_DB=needs_db, WITH_DX=weight is not None, WITH_ZERO=with_zero,
        DX_FIRST=dx_first, SPLIT=split, DW_BOXES=dw_boxes, DX_BOXES=dx_boxes, BOX=BOX,
        ACC=launching.tl_accumulator(acc), PRECISION=launching.precision(), EVEN_M=m % k == 0,
        **blocks, BLOCK_A=kernels.BLOCK_A, BLOCK_ZERO=kernels.BLOCK_ZERO,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if split > 1:
        _place(problem, to_dw, dw, to_db if needs_db else None, db, compact=problem.dw_compact)


def _pack(
    problem: _Problem, source: torch.Tensor, compact: bool, *, copy: bool = True, sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Active columns of (M, d_out): -> (M, A * chunk) in memory as ``source`` is, and partial sums (P, A * chunk).

    A ``compact`` source has the active columns only; those of a shorter chunk that are none become zero.
    """
    m = source.shape[0]
    acc = launching.accumulator(source.dtype)
    blocks = kernels.PACK_CONFIG.kwargs
    programs = launching.cdiv(m, blocks["ROWS"])
    shape = (m if copy else 0, problem.active)
    transposed = source.stride(0) == 1 and source.stride(1) != 1
    packed = torch.empty(shape[::-1] if transposed else shape, dtype=source.dtype, device=source.device)
    packed = packed.t() if transposed else packed
    partial = torch.empty((programs if sums else 0, problem.active), dtype=acc, device=source.device)
    kernels._sparse_linear_pack_kernel[(launching.cdiv(problem.active, blocks["BLOCK_N"]), programs)](
        problem.ids,
        source, *source.stride(),
        packed, *packed.stride(),
        partial,
        m, problem.d_out, problem.count,
        **problem.constants,
        SRC_COMPACT=compact, WITH_COPY=copy, WITH_SUMS=sums,
        ACC=launching.tl_accumulator(acc),
        **blocks, num_warps=kernels.PACK_CONFIG.num_warps,
    )  # fmt: skip
    return packed, partial if sums else None


def _place(
    problem: _Problem,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    sums: torch.Tensor | None,
    total: torch.Tensor,
    *,
    compact: bool = False,
) -> None:
    """(SPLIT, A * chunk, M) summed into the rows of (d_out, M), zeros elsewhere; partial sums likewise into ``total``."""
    copy = source is not None and target is not None
    m = target.shape[1] if target is not None and copy else 0
    acc = launching.accumulator(total.dtype)
    grid = (problem.count if compact else problem.num_chunks, max(1, launching.cdiv(m, kernels.PLACE_BLOCK_M)))
    kernels._sparse_linear_place_kernel[grid](
        problem.ids,
        *launching.strided(source if copy else None, 3, problem.ids),
        *launching.strided(target if copy else None, 2, problem.ids),
        sums if sums is not None else problem.ids,
        total,
        m, problem.d_out, problem.count, sums.shape[0] if sums is not None else 0,
        CHUNK=problem.chunk, COMPACT=compact, SPLIT=source.shape[0] if source is not None else 1,
        WITH_COPY=copy, WITH_SUMS=sums is not None,
        ACC=launching.tl_accumulator(acc),
        BLOCK_N=triton.next_power_of_2(problem.chunk), BLOCK_M=kernels.PLACE_BLOCK_M, BLOCK_A=kernels.BLOCK_A,
        num_warps=8,
    )  # fmt: skip


def _run_packed(
    problem: _Problem,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    dx: torch.Tensor,
    dw: torch.Tensor,
    db: torch.Tensor,
    needs_db: bool,
) -> None:
    """Fills dx, dw and db: packs the active columns of dY (summing them for db) and rows of W, and multiplies."""
    sums = None
    if x is not None or weight is not None or needs_db:
        packed_dy, sums = _pack(problem, dy, problem.y_compact, copy=x is not None or weight is not None, sums=needs_db)
    if weight is not None:
        packed_w, _ = _pack(problem, weight.t(), problem.w_compact)
        torch.mm(packed_dy, packed_w.t(), out=dx)
    if x is not None and problem.dw_compact:
        torch.mm(packed_dy.t(), x, out=dw)
    elif x is not None:
        _place(problem, torch.mm(packed_dy.t(), x)[None], dw, sums, db)
        sums = None
    if sums is not None:
        _place(problem, None, None, sums, db, compact=problem.dw_compact)


def _run_forward(problem: _Problem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """-> Y (..., d_out) or (..., A * chunk) if ``problem.y_compact``."""
    dtype, leading, d_in = x.dtype, x.shape[:-1], x.shape[-1]
    m = math.prod(leading)
    kernel_dtype = runtime.kernel_dtype(dtype)
    if m == 0 or problem.y_columns == 0 or problem.count == 0:
        y = torch.zeros((m, problem.y_columns), dtype=dtype, device=x.device)
        return launching.reshaped(y, *leading, problem.y_columns)
    rows, weight_rows = launching.matrix(x), launching.matrix(weight)
    strategy = _strategy(problem, dtype, m, d_in, rows, weight_rows)
    if strategy == "dense":
        with launching.without_autocast(x):
            y = F.linear(x, weight, bias)
        return launching.reshaped(y, *y.shape)
    problem = problem.with_contiguous_ids()
    bias = None if bias is None else bias.to(kernel_dtype)
    y = torch.empty((m, problem.y_columns), dtype=kernel_dtype, device=x.device)
    run = _run_forward_tiles if strategy == "tiles" and d_in > 0 else _run_forward_packed
    with runtime.on_device_of(x), launching.without_autocast(x):
        run(problem, rows, weight_rows, bias, y)
    return launching.reshaped(y.to(dtype), *leading, problem.y_columns)


def _run_forward_tiles(
    problem: _Problem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    m, d_in = x.shape
    config = kernels.forward_tiles(m, d_in, problem.active, x.element_size(), runtime.properties())
    blocks = config.kwargs
    num_tiles = launching.cdiv(m, blocks["BLOCK_R"]) * launching.cdiv(problem.active, blocks["BLOCK_D"])
    num_zero = 0 if problem.y_compact else problem.num_chunks * launching.cdiv(m, kernels.ZERO_ROWS)
    kernels._sparse_linear_fwd_tiles_kernel[(num_tiles + num_zero,)](
        problem.ids,
        x, *x.stride(),
        *launching.strided(weight, 2, x),
        *launching.strided(bias, 1, x),
        y, y.stride(0),
        m, d_in, problem.d_out, problem.count,
        num_tiles, (num_tiles + num_zero) // max(num_zero, 1),
        **problem.constants,
        Y_COMPACT=problem.y_compact, W_COMPACT=problem.w_compact, HAS_BIAS=bias is not None,
        ACC=launching.tl_accumulator(x.dtype), PRECISION=launching.precision(), EVEN_K=d_in % blocks["BLOCK_K"] == 0,
        **blocks, BLOCK_A=kernels.BLOCK_A, ZERO_ROWS=kernels.ZERO_ROWS,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _run_forward_packed(
    problem: _Problem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    packed_w, _ = _pack(problem, weight.t(), problem.w_compact)
    packed_b = None if bias is None else _pack(problem, bias[None, :], problem.w_compact)[0][0]
    if problem.y_compact:
        torch.mm(x, packed_w, out=y) if packed_b is None else torch.addmm(packed_b, x, packed_w, out=y)
    else:
        packed_y = torch.mm(x, packed_w) if packed_b is None else torch.addmm(packed_b, x, packed_w)
        _place(problem, packed_y.t()[None], y.t(), None, y)
