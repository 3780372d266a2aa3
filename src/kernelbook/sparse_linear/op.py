"""The public functions, their operators, and the launches."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.sparse_linear import kernels

# isort: split
import triton

__all__ = ["sparse_backward", "sparse_dw", "sparse_dx", "sparse_forward", "sparse_linear"]

MODES = ("dense", "sparse_dw", "sparse_dw_dx")
BOX = 64  # features that one tensor descriptor's load takes from a chunk
PRECISION = "ieee"  # of float32, which only the interpreter multiplies here: on a GPU it is left to cuBLAS


# --- public functions -----------------------------------------------------------------------------------------------


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, active_chunks: torch.Tensor | None = None,
    *, chunk_size: int = 64, mode: str = "sparse_dw",
) -> torch.Tensor:  # fmt: skip
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
            as no chunk, and ids that repeat give wrong gradients; but as many ids as chunks count as all chunks, unread.
        chunk_size: features in a chunk, at least 16; the last chunk may be shorter. Multiples of 64 are fastest.
        mode: ``"dense"``, ``"sparse_dw"`` or ``"sparse_dw_dx"``.

    Returns:
        (..., d_out) in the dtype of ``x``; under autocast in its dtype, as PyTorch's own. float32 products use tf32 where
        ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``chunk_size``, ``mode`` or (where they are checked) an id is not as above.
    """
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    chunk_size = _check("sparse_linear", "x weight bias", active_chunks, chunk_size, mode, x, weight, bias)
    if active_chunks is None or mode == "dense":
        return F.linear(x, weight, bias)
    y: torch.Tensor = _linear(x, weight, bias, active_chunks, chunk_size, mode)
    return y


def sparse_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, active_chunks: torch.Tensor, *,
    chunk_size: int = 64, compact: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The active columns of ``x W^T + b``; differentiable.

    Args:
        x, weight, bias, active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: return the active columns only, in the order of the ids.

    Returns:
        (..., d_out) with zeros in inactive chunks, or (..., A * chunk_size) if ``compact`` (the last columns of a shorter
        chunk are zero).

    Raises: as :func:`sparse_linear`.
    """
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    chunk_size = _check("sparse_forward", "x weight bias", active_chunks, chunk_size, None, x, weight, bias)
    y: torch.Tensor = _forward(x, weight, bias, active_chunks, chunk_size, weight.shape[0], compact, False)
    return y


def sparse_dw(
    x: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64, compact: bool = False,
    with_bias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The gradients of weight and bias in the active chunks, both from one pass over ``dy``; differentiable.

    Args:
        x: (..., d_in).
        dy: (..., d_out), the dtype of ``x``; what it holds in inactive chunks is not read.
        active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: return the active rows only, in the order of the ids.
        with_bias: also return db.

    Returns:
        dW (d_out, d_in) and db (d_out,) or ``None``, zero in inactive chunks; if ``compact``, (A * chunk_size, d_in) and
        (A * chunk_size,) (the last rows of a shorter chunk are zero).

    Raises: as :func:`sparse_linear`.
    """
    x, dy = arguments.in_autocast_dtype(x, dy)
    chunk_size = _check("sparse_dw", "x dy", active_chunks, chunk_size, None, x, dy)
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
    dy, weight = arguments.in_autocast_dtype(dy, weight)
    chunk_size = _check("sparse_dx", "dy weight", active_chunks, chunk_size, None, dy, weight)
    dx: torch.Tensor = _dx(dy, weight, active_chunks, chunk_size, weight.shape[0], False, False)
    return dx


def sparse_backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64,
    compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The whole backward pass of mode ``"sparse_dw_dx"`` in one call (and for 16-bit dtypes one launch).

    Args:
        x: (..., d_in).
        weight: (d_out, d_in).
        dy: (..., d_out), all of one dtype.
        active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: as in :func:`sparse_dw`, for dW and db.

    Returns:
        dW and db as :func:`sparse_dw`, dX as :func:`sparse_dx`; not differentiable.

    Raises: as :func:`sparse_linear`.
    """
    chunk_size = _check("sparse_backward", "x weight dy", active_chunks, chunk_size, None, x, weight, dy)
    dx, dw, db = _linear_backward(dy, x, weight, active_chunks, chunk_size, "sparse_dw_dx", compact, True, True, True)
    return dw, db, dx


# --- checks ---------------------------------------------------------------------------------------------------------


@arguments.once
def _check(op: str, names: str, ids: Any, chunk_size: Any, mode: str | None, *tensors: Any) -> int:
    """Checks the tensors of these names, the first of which sets dtype and device. Ids may be missing if there is a mode.

    -> the chunk size.
    """
    given = {name: t for name, t in zip(names.split(), tensors, strict=True) if name != "bias" or t is not None}
    x, dy, weight = (given.get(name) for name in ("x", "dy", "weight"))
    if "x" in given and "weight" in given:
        arguments.check_linear(op, x, "weight", weight)
    for name, tensor in given.items():
        arguments.check_tensor(op, name, tensor)
    arguments.check_same_dtype(op, **given)
    for name in ("x", "dy"):
        if name in given and given[name].ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
    if weight is not None and weight.ndim != 2:
        raise ValueError(f"{op}: weight must have two dimensions, got shape {tuple(weight.shape)}")
    if weight is not None and "bias" in given:
        arguments.check_shape(op, "bias", given["bias"], weight.shape[:1])
    if dy is not None:
        leading = (dy if x is None else x).shape[:-1]
        arguments.check_shape(op, "dy", dy, (*leading, dy.shape[-1] if weight is None else weight.shape[0]))
    if mode is not None:
        arguments.check_choice(op, "mode", mode, MODES)
    size = arguments.integer(op, "chunk_size", chunk_size, least=16)
    if ids is not None or mode is None:
        arguments.check_indices(op, "active_chunks", ids)
        given["active_chunks"] = ids
    arguments.check_same_device(op, **given)
    return size


def _check_ids(op: str, ids: torch.Tensor, d_out: int, chunk_size: int) -> None:
    arguments.check_index_values(op, "active_chunks", ids, cdiv(d_out, chunk_size), unique=True)


# --- operators ------------------------------------------------------------------------------------------------------
# The products are linear in each tensor, so that the gradient of each operator is made of the other two. ``d_out`` is
# given where compact tensors do not tell it.


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps both factors of the product and the ids; a bias is not needed."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    ctx.save_for_backward(*tensors[:2], tensors[-1])
    ctx.settings = [value for value in inputs if value is not None and not isinstance(value, torch.Tensor)]


def _gradients(
    dy: torch.Tensor, dx_shape: Sequence[int], rows: int, d_in: int, needs_dx: bool, needs_dw: bool, needs_db: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx, dw, db; empty where not needed."""
    dx = dy.new_empty(tuple(dx_shape) if needs_dx else (0,))
    return dx, dy.new_empty((rows, d_in) if needs_dw else (0,)), dy.new_empty((rows if needs_db else 0,))


def _run_linear_backward(
    results: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor,
    chunk_size: int, mode: str, compact: bool, *needs: bool,
) -> None:  # fmt: skip
    dx, dw, db = (result if needed else None for result, needed in zip(results, needs, strict=True))
    if dx is not None and mode != "sparse_dw_dx":
        torch.mm(launching.matrix(dy), weight, out=launching.matrix(dx))
        dx = None
    chunks = _Chunks(ids.shape[0], chunk_size, weight.shape[0], dw_compact=compact)
    _run_backward("sparse_backward", chunks, ids, dy, x, weight, dx, dw, db)


_linear_backward = launching.operator(
    "sparse_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor active_chunks, SymInt chunk_size, str mode, "
    "bool compact, bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    outputs=lambda dy, x, weight, ids, chunk_size, mode, compact, *needs: _gradients(
        dy, x.shape, ids.shape[0] * chunk_size if compact else weight.shape[0], x.shape[-1], *needs
    ),
    run=_run_linear_backward,
)


def _run_linear(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor, chunk_size: int, mode: str
) -> None:
    _check_ids("sparse_linear", ids, weight.shape[0], chunk_size)
    _dense(y, x, weight, bias)


def _linear_autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    gradients = _linear_backward(dy, *ctx.saved_tensors, *ctx.settings, False, *needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), None, None, None


_linear = launching.operator(
    "sparse_linear(Tensor x, Tensor weight, Tensor? bias, Tensor active_chunks, SymInt chunk_size, str mode) -> Tensor",
    outputs=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
    run=_run_linear,
    setup_context=_keep,
    backward=_linear_autograd,
)


def _forward_autograd(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    chunk_size, d_out, compact, weight_compact = ctx.settings
    needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
    dx = _dx(gy, weight, ids, chunk_size, d_out, compact, weight_compact) if needs_dx else None
    dw, db = None, None
    if needs_dw or needs_db:
        dw, db = _dw(x, gy, ids, chunk_size, d_out, weight_compact, compact, needs_db)
    return dx, dw if needs_dw else None, db if needs_db else None, None, None, None, None, None


# -> Y (..., d_out) or (..., A * chunk_size); weight and bias have A * chunk_size rows if ``weight_compact``.
_forward = launching.operator(
    "sparse_forward(Tensor x, Tensor weight, Tensor? bias, Tensor active_chunks, SymInt chunk_size, SymInt d_out, "
    "bool compact, bool weight_compact) -> Tensor",
    outputs=lambda x, weight, bias, ids, chunk_size, d_out, compact, weight_compact: x.new_empty(
        (*x.shape[:-1], ids.shape[0] * chunk_size if compact else d_out)
    ),
    run=lambda y, x, weight, bias, ids, chunk_size, *settings: _run_forward(
        _Chunks(ids.shape[0], chunk_size, *settings), ids, x, weight, bias, y
    ),
    setup_context=_keep,
    backward=_forward_autograd,
)


def _dw_autograd(ctx: Any, gw: torch.Tensor, gb: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, dy, ids = ctx.saved_tensors
    chunk_size, d_out, compact, dy_compact, with_bias = ctx.settings
    sizes = (ids, chunk_size, d_out, dy_compact, compact)
    gx = _dx(dy, gw, *sizes) if ctx.needs_input_grad[0] else None
    gdy = _forward(x, gw, gb if with_bias else None, *sizes) if ctx.needs_input_grad[1] else None
    return gx, gdy, None, None, None, None, None, None


# -> dW, and db or an empty tensor.
_dw = launching.operator(
    "sparse_dw(Tensor x, Tensor dy, Tensor active_chunks, SymInt chunk_size, SymInt d_out, bool compact, bool dy_compact, "
    "bool with_bias) -> (Tensor, Tensor)",
    outputs=lambda x, dy, ids, chunk_size, d_out, compact, dy_compact, with_bias: _gradients(
        dy, (), ids.shape[0] * chunk_size if compact else d_out, x.shape[-1], False, True, with_bias
    )[1:],
    run=lambda results, x, dy, ids, chunk_size, d_out, compact, dy_compact, with_bias: _run_backward(
        "sparse_dw", _Chunks(ids.shape[0], chunk_size, d_out, dy_compact, dw_compact=compact),
        ids, dy, x, None, None, results[0], results[1] if with_bias else None,
    ),
    setup_context=_keep,
    backward=_dw_autograd,
)  # fmt: skip


def _dx_autograd(ctx: Any, gx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dy, weight, ids = ctx.saved_tensors
    chunk_size, d_out, dy_compact, weight_compact = ctx.settings
    sizes, needs = (ids, chunk_size, d_out), ctx.needs_input_grad
    gdy = _forward(gx, weight, None, *sizes, dy_compact, weight_compact) if needs[0] else None
    gw = _dw(gx, dy, *sizes, weight_compact, dy_compact, False)[0] if needs[1] else None
    return gdy, gw, None, None, None, None, None


_dx = launching.operator(
    "sparse_dx(Tensor dy, Tensor weight, Tensor active_chunks, SymInt chunk_size, SymInt d_out, bool dy_compact, "
    "bool weight_compact) -> Tensor",
    outputs=lambda dy, weight, *_: dy.new_empty((*dy.shape[:-1], weight.shape[1])),
    run=lambda dx, dy, weight, ids, chunk_size, *settings: _run_backward(
        "sparse_dx", _Chunks(ids.shape[0], chunk_size, *settings), ids, dy, None, weight, dx, None, None
    ),
    setup_context=_keep,
    backward=_dx_autograd,
)


# --- launches -------------------------------------------------------------------------------------------------------
# A small backward pass is over in 15 microseconds, so what the host does here counts: all that a launch needs but its
# tensors is worked out once for each size. What PyTorch computes goes to ``out=``, which autocast leaves alone.


class _Chunks(NamedTuple):
    """The active chunks, and whether the columns of Y and dY, the rows of W, and those of dW and db are compact."""

    listed: int  # A
    size: int
    d_out: int
    y_compact: bool = False
    w_compact: bool = False
    dw_compact: bool = False

    @property
    def total(self) -> int:
        return cdiv(self.d_out, self.size)

    @property
    def active(self) -> int:
        """Active features."""
        return self.listed * self.size


_launch = functools.cache(Launch)


def _strategy(
    chunks: _Chunks, m: int, d_in: int, operands: Sequence[torch.Tensor], in_rows: bool, *, by_chunk: bool = False
) -> str:
    """``"dense"``: cuBLAS on everything. ``"packed"``: on packed operands. ``"tiles"``: our kernels, in place.

    ``in_rows``: all operands have aligned rows. ``by_chunk``: an operand's contiguous dimension is that of the chunks, so that no load is longer than a chunk.
    """
    if chunks.listed == chunks.total and not (chunks.y_compact or chunks.w_compact or chunks.dw_compact):
        return "dense"
    dtype = operands[0].dtype
    # Tensor cores want float32 operands with the reduction in the fast dimension, where dW and dX have it in the slow.
    # What is no product (d_in = 0, or a sum for db) comes with packing too.
    if dtype in (torch.float32, torch.float64) or d_in == 0:
        return "packed"
    # Rows or columns are contiguous and all begin on 16 bytes.
    wide = in_rows or all(launching.has_aligned_rows(t) or launching.has_aligned_rows(t.t()) for t in operands)
    most = math.inf
    if by_chunk and chunks.size % BOX:
        wide = wide and kernels.alignment(chunks.size) * dtype.itemsize % 16 == 0
        most = kernels.UNBOXED_FLOP
    if not wide:
        most = kernels.SMALL_FLOP
    return "packed" if 2.0 * m * d_in * chunks.active > most else "tiles"


def _dense(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    x, y = launching.matrix(x), launching.matrix(y)
    torch.mm(x, weight.t(), out=y) if bias is None else torch.addmm(bias, x, weight.t(), out=y)


def _run_backward(
    op: str, chunks: _Chunks, ids: torch.Tensor, dy: torch.Tensor, x: Any, weight: Any, dx: Any, dw: Any, db: Any
) -> None:
    """Fills dx (from weight), dw (from x) and db, those that are there."""
    _check_ids(op, ids, chunks.d_out, chunks.size)
    if chunks.listed == 0 or dy.numel() == 0:
        for result in (dx, dw, db):
            if result is not None:
                result.zero_()
        return
    dy = launching.matrix(dy)
    x, weight = None if dw is None else launching.matrix(x), None if dx is None else weight
    operands = [t for t in (dy, x, weight) if t is not None]
    m, d_in = dy.shape[0], operands[-1].shape[1] if len(operands) > 1 else 0
    in_rows = all(map(launching.has_aligned_rows, operands))
    strategy = _strategy(chunks, m, d_in, operands, in_rows, by_chunk=not chunks.y_compact)
    if strategy == "dense":
        if dx is not None:
            torch.mm(dy, weight, out=launching.matrix(dx))
        if dw is not None:
            torch.mm(dy.t(), x, out=dw)
        if db is not None:
            torch.sum(dy, 0, out=db)
        return
    ids = ids.contiguous()
    if strategy == "packed":
        _run_packed(chunks, ids, dy, x, weight, dx, dw, db)
        return
    if db is not None and dw is None:
        _run_packed(chunks, ids, dy, None, None, None, None, db)
        db = None
    properties = runtime.properties(dy.device)
    # Tensor descriptors read matrices with contiguous rows that start on 16 bytes, in chunks of whole boxes.
    whole = not (chunks.size % BOX or chunks.y_compact or chunks.w_compact or chunks.d_out >= 2**30)
    boxes = in_rows and whole and kernels.has_boxes(properties)
    itemsize, with_dw, with_dx = dy.element_size(), dw is not None, dx is not None
    plan = kernels.plan_backward(m, d_in, chunks.active, itemsize, with_dw, with_dx, boxes, properties)
    _launch_tiles(plan, chunks, ids, dy, x, weight, dx, dw, db)


@functools.lru_cache(maxsize=4096)
def _tiles(
    plan: kernels.Plan, chunks: _Chunks, m: int, d_in: int, dtype: torch.dtype, with_dx: bool, with_dw: bool, with_db: bool
) -> tuple[Launch, tuple[int], int, tuple[Any, ...], tuple[int, ...]]:  # fmt: skip
    """-> the launch, its grid, its split, the boxes of x, dy (for dW and for dX) and weight, and its arguments from M on."""
    blocks, split = plan.config.kwargs, plan.split if with_dw else 1
    r, d, k = blocks["BLOCK_R"], blocks["BLOCK_D"], blocks["BLOCK_K"]
    columns = cdiv(d_in, d)
    num_dw = cdiv(chunks.active, r) * columns * split if with_dw else 0
    num_dx = cdiv(m, r) * columns if with_dx else 0
    with_zero = with_dw and not chunks.dw_compact and split == 1
    num_zero = chunks.total * cdiv(chunks.size * d_in, kernels.ZERO_PIECE) if with_zero else 0
    dx_first = num_dw > 0 and num_dx > 0 and chunks.active > cdiv(m, split)
    num_later = num_dw if dx_first else num_dx
    dw_boxes = plan.boxes and with_dw and r % BOX == 0
    dx_boxes = plan.boxes and with_dx and chunks.size % k == 0
    launch = _launch(
        kernels._sparse_linear_bwd_tiles_kernel,
        CHUNK=chunks.size, ALIGN=kernels.alignment(chunks.size),
        DY_COMPACT=chunks.y_compact, W_COMPACT=chunks.w_compact, DW_COMPACT=chunks.dw_compact,
        WITH_DW=with_dw, WITH_DB=with_db, WITH_DX=with_dx, WITH_ZERO=with_zero,
        DX_FIRST=dx_first, SPLIT=split, DW_BOXES=dw_boxes, DX_BOXES=dx_boxes, BOX=BOX,
        ACC=launching.tl_accumulator(dtype), PRECISION=PRECISION, EVEN_M=m % k == 0,
        **blocks, BLOCK_A=kernels.BLOCK_A, BLOCK_ZERO=kernels.BLOCK_ZERO,
        ZERO_PIECE=kernels.ZERO_PIECE,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    )  # fmt: skip
    boxes = (
        *((launching.box_form(k, d), launching.box_form(k, BOX)) if dw_boxes else (None, None)),
        *((launching.box_form(r, k), launching.box_form(k, d)) if dx_boxes else (None, None)),
    )
    zero_every = (num_later + num_zero) // max(num_zero, 1)
    numbers = (m, d_in, chunks.d_out, chunks.listed, num_dw, num_dx, num_zero, zero_every)
    return launch, (num_dw + num_dx + num_zero,), split, boxes, numbers


def _launch_tiles(
    plan: kernels.Plan, chunks: _Chunks, ids: torch.Tensor, dy: torch.Tensor,
    x: Any, weight: Any, dx: Any, dw: Any, db: Any,
) -> None:  # fmt: skip
    """Fills dx, dw and, with it, db with one launch, or two if dW's reduction is split."""
    m, d_in = dy.shape[0], (weight if x is None else x).shape[1]
    launch, grid, split, (x_box, dy_dw_box, dy_dx_box, w_box), numbers = _tiles(
        plan, chunks, m, d_in, dy.dtype, dx is not None, dw is not None, db is not None
    )
    to_dw, to_db = dw, db
    if split > 1:
        acc = launching.accumulator(dy.dtype)
        to_dw = dy.new_empty((split, chunks.active, d_in), dtype=acc)
        to_db = None if db is None else dy.new_empty((split, chunks.active), dtype=acc)
    launch(
        grid,
        ids,
        *launching.strided(x, 2, dy),
        dy, *dy.stride(),
        *launching.strided(weight, 2, dy),
        dy if dx is None else dx,
        dy if to_dw is None else to_dw, dy if to_db is None else to_db,
        None if x_box is None else x_box(x), None if dy_dw_box is None else dy_dw_box(dy),
        None if dy_dx_box is None else dy_dx_box(dy), None if w_box is None else w_box(weight),
        *numbers,
    )  # fmt: skip
    if split > 1:
        _place(chunks, ids, to_dw, dw, to_db, db, compact=chunks.dw_compact)


@functools.cache
def _pack_launch(chunk: int, compact: bool, copy: bool, sums: bool, dtype: torch.dtype) -> Launch:
    config = kernels.PACK_CONFIG
    return _launch(
        kernels._sparse_linear_pack_kernel,
        CHUNK=chunk, ALIGN=kernels.alignment(chunk), SRC_COMPACT=compact, WITH_COPY=copy, WITH_SUMS=sums,
        ACC=launching.tl_accumulator(dtype), **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip


def _pack(
    chunks: _Chunks, ids: torch.Tensor, source: torch.Tensor, axis: int, compact: bool, copy: bool = True, sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The active rows (axis 0) or columns (1) of a matrix, in memory as it is, and partial sums of columns (P, A * chunk).

    A ``compact`` source has the active ones only; those of a shorter chunk that are none become zero.
    """
    shape, strides, active = list(source.shape), source.stride(), chunks.active
    m, shape[axis] = shape[1 - axis], active
    packed = source
    if copy:
        turned = strides[0] == 1 and strides[1] != 1
        packed = source.new_empty(shape[::-1]).t() if turned else source.new_empty(shape)
    to = packed.stride()
    blocks = kernels.PACK_CONFIG.kwargs
    programs = cdiv(m, blocks["ROWS"])
    partial = source.new_empty((programs, active), dtype=launching.accumulator(source.dtype)) if sums else None
    _pack_launch(chunks.size, compact, copy, sums, source.dtype)(
        (cdiv(active, blocks["BLOCK_N"]), programs),
        ids,
        source, strides[1 - axis], strides[axis],
        packed, to[1 - axis], to[axis],
        source if partial is None else partial,
        m, chunks.d_out, chunks.listed,
    )  # fmt: skip
    return packed, partial


@functools.cache
def _place_launch(chunk: int, compact: bool, split: int, copy: bool, sums: bool, dtype: torch.dtype) -> Launch:
    return _launch(
        kernels._sparse_linear_place_kernel,
        CHUNK=chunk, COMPACT=compact, SPLIT=split, WITH_COPY=copy, WITH_SUMS=sums,
        ACC=launching.tl_accumulator(dtype),
        BLOCK_N=triton.next_power_of_2(chunk), BLOCK_M=kernels.PLACE_BLOCK_M, BLOCK_A=kernels.BLOCK_A, num_warps=8,
    )  # fmt: skip


def _place(
    chunks: _Chunks, ids: torch.Tensor, source: Any, target: Any, sums: Any, total: Any, *, compact: bool = False
) -> None:
    """(SPLIT, A * chunk, M) summed into the rows of (d_out, M), zeros elsewhere; partial sums likewise into ``total``."""
    copy, dtype = source is not None, (total if target is None else target).dtype
    m, split = (target.shape[1], source.shape[0]) if copy else (0, 1)
    _place_launch(chunks.size, compact, split, copy, sums is not None, dtype)(
        (chunks.listed if compact else chunks.total, max(1, cdiv(m, kernels.PLACE_BLOCK_M))),
        ids,
        *launching.strided(source, 3, ids),
        *launching.strided(target, 2, ids),
        *((ids, ids) if sums is None else (sums, total)),
        m, chunks.d_out, chunks.listed, 0 if sums is None else sums.shape[0],
    )  # fmt: skip


def _run_packed(
    chunks: _Chunks, ids: torch.Tensor, dy: torch.Tensor, x: Any, weight: Any, dx: Any, dw: Any, db: Any
) -> None:
    """As :func:`_run_backward`: packs the active columns of dY (summing them for db) and rows of W, and multiplies."""
    packed_dy, sums = _pack(chunks, ids, dy, 1, chunks.y_compact, dx is not None or dw is not None, db is not None)
    if dx is not None:
        packed_w, _ = _pack(chunks, ids, weight, 0, chunks.w_compact)
        torch.mm(packed_dy, packed_w, out=launching.matrix(dx))
    if dw is not None and chunks.dw_compact:
        torch.mm(packed_dy.t(), x, out=dw)
    elif dw is not None:
        product = torch.mm(packed_dy.t(), x, out=x.new_empty((chunks.active, x.shape[1])))
        _place(chunks, ids, product[None], dw, sums, db)
    if db is not None and (dw is None or chunks.dw_compact):
        _place(chunks, ids, None, None, sums, db, compact=chunks.dw_compact)


@functools.lru_cache(maxsize=4096)
def _forward_tiles(
    plan: kernels.Plan, chunks: _Chunks, m: int, d_in: int, dtype: torch.dtype, has_bias: bool
) -> tuple[Launch, tuple[int], tuple[int, ...]]:
    """-> the launch, its grid, and its arguments from M on."""
    blocks = plan.config.kwargs
    num_tiles = cdiv(m, blocks["BLOCK_R"]) * cdiv(chunks.active, blocks["BLOCK_D"])
    num_zero = 0 if chunks.y_compact else chunks.total * cdiv(m, kernels.ZERO_ROWS)
    launch = _launch(
        kernels._sparse_linear_fwd_tiles_kernel,
        CHUNK=chunks.size, ALIGN=kernels.alignment(chunks.size),
        Y_COMPACT=chunks.y_compact, W_COMPACT=chunks.w_compact, HAS_BIAS=has_bias,
        ACC=launching.tl_accumulator(dtype), PRECISION=PRECISION, EVEN_K=d_in % blocks["BLOCK_K"] == 0,
        **blocks, BLOCK_A=kernels.BLOCK_A, ZERO_ROWS=kernels.ZERO_ROWS,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    )  # fmt: skip
    numbers = (m, d_in, chunks.d_out, chunks.listed, num_tiles, (num_tiles + num_zero) // max(num_zero, 1))
    return launch, (num_tiles + num_zero,), numbers


def _run_forward(
    chunks: _Chunks, ids: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, y: torch.Tensor
) -> None:
    """Fills Y (..., d_out), or (..., A * chunk) if ``chunks.y_compact``."""
    _check_ids("sparse_forward", ids, chunks.d_out, chunks.size)
    if y.numel() == 0 or chunks.listed == 0:
        y.zero_()
        return
    x, y, ids = launching.matrix(x), launching.matrix(y), ids.contiguous()
    m, d_in = x.shape
    strategy = _strategy(chunks, m, d_in, (x, weight), False)
    if strategy == "dense":
        _dense(y, x, weight, bias)
    elif strategy == "tiles":
        plan = kernels.plan_forward(m, d_in, chunks.active, x.element_size(), runtime.properties(x.device))
        launch, grid, numbers = _forward_tiles(plan, chunks, m, d_in, x.dtype, bias is not None)
        tensors = (x, *x.stride(), weight, *weight.stride(), *launching.strided(bias, 1, x), y, y.stride(0))
        launch(grid, ids, *tensors, *numbers)
    else:
        packed_w, _ = _pack(chunks, ids, weight, 0, chunks.w_compact)
        packed_b = None if bias is None else _pack(chunks, ids, bias[None, :], 1, chunks.w_compact)[0][0]
        packed_y = y if chunks.y_compact else y.new_empty((m, chunks.active))
        _dense(packed_y, x, packed_w, packed_b)
        if not chunks.y_compact:
            _place(chunks, ids, packed_y.t()[None], y.t(), None, None)
