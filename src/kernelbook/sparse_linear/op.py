"""The public functions in the order of a call: observed or not, plan, new memory, launch; then the gradients the same way."""

import dataclasses
import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import NAMESPACE, Block, Descriptor, Launch, block, cdiv, composite, launcher, operator, sources
from kernelbook.linear import linear, product
from kernelbook.memory import accumulator, empty, present, tl_accumulator
from kernelbook.observed import are_tensors, form, in_mode_of_forward, is_aligned, keep_mode, observed, wants_gradient
from kernelbook.plans import KeptPlans
from kernelbook.sparse_linear import kernels, packing
from kernelbook.sparse_linear.packing import Chunks
from kernelbook.tensors import has_aligned_rows, matrix, strided

# isort: split

__all__ = ["sparse_backward", "sparse_dw", "sparse_dx", "sparse_forward", "sparse_linear"]

MODES = ("dense", "sparse_dw", "sparse_dw_dx")
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
    return _linear("sparse_linear", x, weight, bias, active_chunks, chunk_size, False, mode)


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
    return _linear("sparse_forward", x, weight, bias, active_chunks, chunk_size, compact, None)


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
    wanted = False, True, bool(with_bias)
    _, dw, db = _products("sparse_dw", dy, x, None, active_chunks, chunk_size, compact, wanted)
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
    dx: torch.Tensor
    dx, _, _ = _products("sparse_dx", dy, None, weight, active_chunks, chunk_size, False, (True, False, False))
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
    dx, dw, db = _products("sparse_backward", dy, x, weight, active_chunks, chunk_size, compact, (True, True, True))
    return dw, db, dx


# --- what a call does -----------------------------------------------------------------------------------------------


def _linear(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: Any, chunk_size: int, compact: bool, mode: Any
) -> torch.Tensor:
    """Y, of :func:`sparse_linear` and, without a mode, of :func:`sparse_forward`."""
    chunk_size = arguments.integer(op, "chunk_size", chunk_size)
    if is_dynamo_compiling() and are_tensors(x, weight, bias, ids):
        return _linear_whole(op, x, weight, bias, ids, chunk_size, compact, mode, SOURCES)  # type: ignore[no-any-return]
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    chunks = Chunks(chunk_size, y_compact=bool(compact))
    if observed(x, weight, bias, ids):
        chunks = _checked(op, chunks, ids, mode, x=x, weight=weight, bias=bias)
        if ids is not None and mode != "dense":
            return _linear_operator(x, weight, bias, ids, *chunks[:5], mode)  # type: ignore[no-any-return]
    else:
        plan = _plan(op, chunks, ids, x=x, weight=weight, bias=bias, mode=mode)
        if ids is not None and mode != "dense" and wants_gradient(x, weight, bias):
            return _Linear.apply(x, weight, bias, ids, plan)  # type: ignore[no-any-return]
        if ids is not None and mode != "dense":
            return _forward(plan, x, weight, bias, ids)
    return linear(x, weight, bias)


def _products(
    op: str, dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor, chunk_size: int, compact: bool, wanted: Sequence[bool]
) -> tuple[Any, Any, Any]:  # fmt: skip
    """dX (of weight), dW (of x) and db, those of a public function; the others are ``None`` or empty."""
    chunk_size = arguments.integer(op, "chunk_size", chunk_size)
    if is_dynamo_compiling() and are_tensors(dy, x, weight, ids):
        return _backward_whole(op, dy, x, weight, ids, chunk_size, compact, wanted, SOURCES)  # type: ignore[no-any-return]
    if op != "sparse_backward":
        dy, x, weight = arguments.in_autocast_dtype(dy, x, weight)
    chunks, mode = Chunks(chunk_size, dw_compact=bool(compact)), "sparse_dw_dx" if op == "sparse_backward" else None
    if observed(dy, x, weight, ids) or wants_gradient(dy, x, weight):
        chunks = _checked(op, chunks, ids, mode, x=x, weight=weight, dy=dy)
        return _backward_operator(dy, x, weight, ids, *chunks[:5], mode, wanted)  # type: ignore[no-any-return]
    return _backward(_plan(op, chunks, ids, x=x, weight=weight, dy=dy, wanted=wanted, mode=mode), dy, x, weight, ids)


# --- plans ----------------------------------------------------------------------------------------------------------

# The tensors of each public function, the first of which sets dtype and device.
TENSORS = {
    "sparse_linear": ("x", "weight", "bias"), "sparse_forward": ("x", "weight", "bias"), "sparse_dw": ("x", "dy"),
    "sparse_dx": ("dy", "weight"), "sparse_backward": ("x", "weight", "dy"),
}  # fmt: skip


def _checked(op: str, chunks: Chunks, ids: Any, mode: Any, **tensors: Any) -> Chunks:
    """Checks what a public function was given; only :func:`sparse_linear` has a mode, and does without ids.

    -> the chunks with their size and ``d_out``.
    """
    given = {name: tensors[name] for name in TENSORS[op] if name != "bias" or tensors[name] is not None}
    for name, tensor in given.items():
        arguments.check_tensor(op, name, tensor)
        if name in ("x", "dy") and tensor.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
        if name == "weight" and tensor.ndim != 2:
            raise ValueError(f"{op}: weight must have two dimensions, got shape {tuple(tensor.shape)}")
    arguments.check_same_dtype(op, **given)
    x, weight, dy = (given.get(name) for name in ("x", "weight", "dy"))
    d_out = given["dy"].shape[-1] if weight is None else weight.shape[0]
    if x is not None and weight is not None:
        arguments.check_shape(op, "weight", weight, (d_out, x.shape[-1]))
    if "bias" in given:
        arguments.check_shape(op, "bias", given["bias"], (d_out,))
    if dy is not None:
        arguments.check_shape(op, "dy", dy, (*(dy if x is None else x).shape[:-1], d_out))
    if op == "sparse_linear":
        arguments.check_choice(op, "mode", mode, MODES)
    size = arguments.integer(op, "chunk_size", chunks.size, least=16)
    if ids is not None or op != "sparse_linear":
        arguments.check_indices(op, "active_chunks", ids)
        given["active_chunks"] = ids
    arguments.check_same_device(op, **given)
    return chunks._replace(size=size, d_out=d_out)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Tiles:
    """A launch of tiles, and of the zeros in inactive chunks."""

    launch: Launch
    grid: tuple[int]
    counts: tuple[int, ...]  # of tiles and of zeros, the kernel's last arguments
    split: int = 1  # partial sums of each of dW's
    # Of the tensor descriptors of x, dY (for dW and for dX) and W, where there are any.
    blocks: tuple[Block | None, ...] = (None, None, None, None)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is decided for a kind of call."""

    op: str
    mode: str | None
    chunks: Chunks
    shapes: tuple[Any, ...]  # of Y, or of dX, dW and db; None: not wanted
    strategy: str  # "zeros", or of :func:`_strategy`
    tiles: _Tiles | None


_plans = KeptPlans[_Plan]()


def _plan(
    op: str, chunks: Chunks, ids: Any, *, x: Any = None, weight: Any = None, bias: Any = None, dy: Any = None,
    wanted: Sequence[bool] | None = None, mode: Any = None,
) -> _Plan:  # fmt: skip
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked.

    ``wanted`` says of a backward pass which of dX (of weight), dW (of x) and db.
    """
    if type(chunks.size) is not int or type(mode) not in (str, NoneType):
        chunks = _checked(op, chunks, ids, mode, x=x, weight=weight, bias=bias, dy=dy)
    tensors = form(ids), form(x), form(weight), form(bias), form(dy)
    aligned = is_aligned(x), is_aligned(weight), is_aligned(dy)
    key = (op, chunks, tensors, aligned, wanted and tuple(wanted), mode, runtime.plan_mode())
    plan = _plans.get(key)
    if plan is None:
        if chunks.d_out is None:
            chunks = _checked(op, chunks, ids, mode, x=x, weight=weight, bias=bias, dy=dy)
        chunks = chunks._replace(listed=0 if ids is None else ids.shape[0])
        if wanted is None:
            plan = _forward_plan(op, chunks, x, weight, bias, mode)
        else:
            plan = _backward_plan(op, chunks, dy, x, weight, wanted, mode)
        _plans.keep(key, plan)
    return plan


def _strategy(chunks: Chunks, m: int, d_in: int, operands: Sequence[torch.Tensor], *, by_chunk: bool = False) -> str:
    """``"dense"``: cuBLAS on everything; else what :func:`kernels.strategy` says of ``d_in`` inputs."""
    if chunks.listed == chunks.total and not (chunks.y_compact or chunks.w_compact or chunks.dw_compact):
        return "dense"
    aligned = all(has_aligned_rows(t) or has_aligned_rows(t.t()) for t in operands)
    size, properties = operands[0].element_size(), runtime.properties(operands[0].device)
    return kernels.strategy(m, d_in, chunks.active, chunks.size, size, aligned, by_chunk, properties)


# --- forward --------------------------------------------------------------------------------------------------------
# What PyTorch computes, here and below, goes to ``out=``, which autocast leaves alone.


def _forward_plan(op: str, chunks: Chunks, x: torch.Tensor, weight: torch.Tensor, bias: Any, mode: Any) -> _Plan:
    shape = (*x.shape[:-1], chunks.active if chunks.y_compact else chunks.d_out)
    strategy, tiles = "dense" if mode is not None else "zeros", None
    if mode is None and chunks.listed > 0 and math.prod(shape) > 0:
        x = matrix(x)
        strategy = _strategy(chunks, x.shape[0], x.shape[1], (x, weight))
    if strategy == "tiles":
        properties = runtime.properties(x.device)
        cut = kernels.plan_forward(x.shape[0], x.shape[1], chunks.active, x.element_size(), properties)
        tiles = _forward_tiles(cut, chunks, x, bias is not None)
    return _Plan(op, mode, chunks, (shape,), strategy, tiles)


def _forward_tiles(cut: kernels.Plan, chunks: Chunks, x: torch.Tensor, has_bias: bool) -> _Tiles:
    (m, d_in), blocks = x.shape, cut.config.kwargs
    num_tiles = cdiv(m, blocks["BLOCK_R"]) * cdiv(chunks.active, blocks["BLOCK_D"])
    num_zero = 0 if chunks.y_compact else chunks.total * cdiv(m, kernels.ZERO_ROWS)
    launch = launcher(
        kernels._sparse_linear_fwd_tiles_kernel,
        CHUNK=chunks.size, ALIGN=kernels.alignment(chunks.size),
        Y_COMPACT=chunks.y_compact, W_COMPACT=chunks.w_compact, HAS_BIAS=has_bias,
        ACC=tl_accumulator(x.dtype), PRECISION=PRECISION, EVEN_K=d_in % blocks["BLOCK_K"] == 0,
        **blocks, BLOCK_A=kernels.BLOCK_A, ZERO_ROWS=kernels.ZERO_ROWS,
        num_warps=cut.config.num_warps, num_stages=cut.config.num_stages,
    )  # fmt: skip
    return _Tiles(launch, (num_tiles + num_zero,), (num_tiles, (num_tiles + num_zero) // max(num_zero, 1)))


def _forward(plan: _Plan, x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor) -> torch.Tensor:
    chunks, [shape] = plan.chunks, plan.shapes
    arguments.check_index_values(plan.op, "active_chunks", ids, chunks.total, unique=True)
    result = empty(shape, x.dtype, x)
    if plan.strategy == "zeros":
        return result.zero_()
    x, y, ids = matrix(x), matrix(result), ids.contiguous()
    if plan.strategy == "dense":
        _multiply(y, x, weight, bias)
    elif plan.tiles is not None:
        tensors = (x, *x.stride(), weight, *weight.stride(), *strided(bias, 1, x), y, y.stride(0))
        plan.tiles.launch(plan.tiles.grid, ids, *tensors, *x.shape, chunks.d_out, chunks.listed, *plan.tiles.counts)
    else:
        packed_w, _ = packing.pack(chunks, ids, weight, 0, chunks.w_compact)
        packed_b = None if bias is None else packing.pack(chunks, ids, bias[None, :], 1, chunks.w_compact)[0][0]
        packed_y = y if chunks.y_compact else empty((y.shape[0], chunks.active), y.dtype, y)
        _multiply(packed_y, x, packed_w, packed_b)
        if not chunks.y_compact:
            packing.place(chunks, ids, packed_y.t()[None], y.t(), None, None)
    return result


def _multiply(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    product(x, weight.t(), bias, out=y)


# --- backward -------------------------------------------------------------------------------------------------------


def _backward_plan(
    op: str, chunks: Chunks, dy: torch.Tensor, x: Any, weight: Any, wanted: Sequence[bool], mode: str | None
) -> _Plan:
    shapes, (with_dx, with_dw, with_db) = _gradient_shapes(chunks, dy, x, weight, wanted), wanted
    with_dx = with_dx and mode != "sparse_dw"
    if chunks.listed == 0 or dy.numel() == 0 or not (with_dx or with_dw or with_db):
        return _Plan(op, mode, chunks, shapes, "zeros", None)
    operands = [matrix(dy), *([matrix(x)] if with_dw else []), *([weight] if with_dx else [])]
    m, d_in = operands[0].shape[0], operands[-1].shape[1] if len(operands) > 1 else 0
    strategy, tiles = _strategy(chunks, m, d_in, operands, by_chunk=not chunks.y_compact), None
    if strategy == "tiles":
        properties, size = runtime.properties(dy.device), dy.element_size()
        # Tensor descriptors read matrices with contiguous rows that start on 16 bytes, in chunks of whole blocks.
        whole = not (chunks.size % kernels.BOX or chunks.y_compact or chunks.w_compact or chunks.d_out >= 2**30)
        by_descriptor = whole and properties.has_tma and all(map(has_aligned_rows, operands))
        cut = kernels.plan_backward(m, d_in, chunks.active, size, with_dw, with_dx, by_descriptor, properties)
        tiles = _backward_tiles(cut, chunks, m, d_in, dy.dtype, (with_dx, with_dw, with_dw and with_db))
    return _Plan(op, mode, chunks, shapes, strategy, tiles)


def _gradient_shapes(
    chunks: Chunks, dy: torch.Tensor, x: Any, weight: Any, wanted: Sequence[bool]
) -> tuple[tuple[int, ...] | None, ...]:
    """Of dX, dW and db; ``None`` where not wanted."""
    with_dx, with_dw, with_db = wanted
    rows = chunks.active if chunks.dw_compact else chunks.d_out
    dx_shape = (*dy.shape[:-1], weight.shape[1]) if with_dx else None
    return dx_shape, (rows, x.shape[-1]) if with_dw else None, (rows,) if with_db else None


def _backward_tiles(
    cut: kernels.Plan, chunks: Chunks, m: int, d_in: int, dtype: torch.dtype, wanted: Sequence[bool]
) -> _Tiles:
    with_dx, with_dw, with_db = wanted
    blocks, split = cut.config.kwargs, cut.split if with_dw else 1
    r, d, k = blocks["BLOCK_R"], blocks["BLOCK_D"], blocks["BLOCK_K"]
    columns = cdiv(d_in, d)
    num_dw = cdiv(chunks.active, r) * columns * split if with_dw else 0
    num_dx = cdiv(m, r) * columns if with_dx else 0
    with_zero = with_dw and not chunks.dw_compact and split == 1
    num_zero = chunks.total * cdiv(chunks.size * d_in, kernels.ZERO_PIECE) if with_zero else 0
    dx_first = num_dw > 0 and num_dx > 0 and chunks.active > cdiv(m, split)
    num_later = num_dw if dx_first else num_dx
    dw_by_descriptor = cut.boxes and with_dw and r % kernels.BOX == 0
    dx_by_descriptor = cut.boxes and with_dx and chunks.size % k == 0
    launch = launcher(
        kernels._sparse_linear_bwd_tiles_kernel,
        CHUNK=chunks.size, ALIGN=kernels.alignment(chunks.size),
        DY_COMPACT=chunks.y_compact, W_COMPACT=chunks.w_compact, DW_COMPACT=chunks.dw_compact,
        WITH_DW=with_dw, WITH_DB=with_db, WITH_DX=with_dx, WITH_ZERO=with_zero,
        DX_FIRST=dx_first, SPLIT=split, DW_BY_DESCRIPTOR=dw_by_descriptor, DX_BY_DESCRIPTOR=dx_by_descriptor, BOX=kernels.BOX,
        ACC=tl_accumulator(dtype), PRECISION=PRECISION, EVEN_M=m % k == 0,
        **blocks, BLOCK_A=kernels.BLOCK_A, BLOCK_ZERO=kernels.BLOCK_ZERO, ZERO_PIECE=kernels.ZERO_PIECE,
        num_warps=cut.config.num_warps, num_stages=cut.config.num_stages,
    )  # fmt: skip
    counts = num_dw, num_dx, num_zero, (num_later + num_zero) // max(num_zero, 1)
    for_dw = (block(k, d), block(k, kernels.BOX)) if dw_by_descriptor else (None, None)
    for_dx = (block(r, k), block(k, d)) if dx_by_descriptor else (None, None)
    return _Tiles(launch, (num_dw + num_dx + num_zero,), counts, split, (*for_dw, *for_dx))


def _backward(plan: _Plan, dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor) -> tuple[Any, Any, Any]:
    """-> dX (of weight), dW (of x) and db, ``None`` where not wanted."""
    arguments.check_index_values(plan.op, "active_chunks", ids, plan.chunks.total, unique=True)
    results = dx, dw, db = [None if shape is None else empty(shape, dy.dtype, dy) for shape in plan.shapes]
    dy, x, dx, ids = matrix(dy), None if dw is None else matrix(x), None if dx is None else matrix(dx), ids.contiguous()
    if dx is not None and (plan.mode == "sparse_dw" or plan.strategy == "dense"):
        product(dy, weight, out=dx)
        dx = None
    if plan.strategy == "zeros":
        for result in (dx, dw, db):
            if result is not None:
                result.zero_()
    elif plan.strategy == "dense":
        if dw is not None:
            torch.mm(dy.t(), x, out=dw)
        if db is not None:
            torch.sum(dy, 0, out=db)
    elif plan.tiles is None:
        packing.run_packed(plan.chunks, ids, dy, x, weight, dx, dw, db)
    else:
        if db is not None and dw is None:  # the kernel sums dY where it multiplies it for dW
            packing.run_packed(plan.chunks, ids, dy, None, None, None, None, db)
        _run_tiles(plan.tiles, plan.chunks, ids, dy, x, weight, dx, dw, None if dw is None else db)
    return results[0], dw, db


def _run_tiles(
    tiles: _Tiles, chunks: Chunks, ids: torch.Tensor, dy: torch.Tensor, x: Any, weight: Any, dx: Any, dw: Any, db: Any
) -> None:
    """Fills dx, dw and, with it, db with one launch, or two if the sums of dW are split."""
    x, weight = None if dw is None else x, None if dx is None else weight
    m, d_in = dy.shape[0], (weight if x is None else x).shape[1]
    to_dw, to_db = dw, db
    if tiles.split > 1:
        to_dw = empty((tiles.split, chunks.active, d_in), accumulator(dy.dtype), dy)
        to_db = None if db is None else empty((tiles.split, chunks.active), accumulator(dy.dtype), dy)
    read = zip((x, dy, dy, weight), tiles.blocks, strict=True)
    tiles.launch(
        tiles.grid,
        ids,
        *strided(x, 2, dy), dy, *dy.stride(), *strided(weight, 2, dy),
        *(dy if target is None else target for target in (dx, to_dw, to_db)),
        *(None if by is None else Descriptor(tensor, by) for tensor, by in read),
        m, d_in, chunks.d_out, chunks.listed, *tiles.counts,
    )  # fmt: skip
    if tiles.split > 1:
        packing.place(chunks, ids, to_dw, dw, to_db, db, compact=chunks.dw_compact)


# --- gradients ------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """:func:`sparse_linear` and :func:`sparse_forward` that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor, plan: _Plan
    ) -> torch.Tensor:
        keep_mode(ctx)
        ctx.save_for_backward(x, weight, ids)
        ctx.settings = (*plan.chunks[:5], plan.mode)
        return _forward(plan, x, weight, bias, ids)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, dy), None, None


@in_mode_of_forward
def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, weight and bias."""
    (x, weight, ids), wanted, (*sizes, mode) = ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.settings
    if torch.is_grad_enabled() or observed(dy, x, weight, ids):
        with_dx, with_dw, with_db = wanted
        # Where db is to be differentiated, that is by the gradients of dW.
        computed = with_dx, with_dw or (with_db and mode is None), with_db
        found = _backward_operator(dy, x, weight, ids, *ctx.settings, computed)
        return tuple(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))
    plan = _plan("sparse_backward", Chunks(*sizes), ids, x=x, weight=weight, dy=dy, wanted=wanted, mode=mode)
    return _backward(plan, dy, x, weight, ids)


@in_mode_of_forward
def _gradients_of_gradients(ctx: Any, gx: torch.Tensor, gw: torch.Tensor, gb: torch.Tensor) -> tuple[Any, ...]:
    """-> those of dy, x and weight: the products are linear in each tensor, so that each is made of the others."""
    dy, x, weight, ids = ctx.saved_tensors
    *sizes, w_compact, dw_compact, mode, (with_dx, with_dw, with_db) = ctx.settings
    if mode is not None:
        raise RuntimeError(f"{NAMESPACE}::sparse_linear_backward cannot be differentiated")
    needs_dy, needs_x, needs_weight, *_ = ctx.needs_input_grad
    of_dy = []
    if needs_dy and with_dx:
        of_dy += [_linear_operator(gx, weight, None, ids, *sizes, w_compact, w_compact, None)]
    if needs_dy and with_dw:
        of_dy += [_linear_operator(x, gw, gb if with_db else None, ids, *sizes, dw_compact, dw_compact, None)]
    of_x, of_weight = None, None
    if needs_x and with_dw:
        of_x = _backward_operator(dy, None, gw, ids, *sizes, dw_compact, False, None, (True, False, False))[0]
    if needs_weight and with_dx:
        of_weight = _backward_operator(dy, gx, None, ids, *sizes, False, w_compact, None, (False, True, False))[1]
    return sum(of_dy[1:], of_dy[0]) if of_dy else None, of_x, of_weight


# --- where somebody observes: operators -----------------------------------------------------------------------------
# Their numbers are those of Chunks, and a mode; without one they are the products of active chunks alone.


def _run_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor, *settings: Any) -> torch.Tensor:
    *sizes, mode = settings
    op = "sparse_forward" if mode is None else "sparse_linear"
    return _forward(_plan(op, Chunks(*sizes), ids, x=x, weight=weight, bias=bias, mode=mode), x, weight, bias, ids)


def _run_backward(dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, ...]:
    *sizes, mode, wanted = settings
    plan = _plan("sparse_backward", Chunks(*sizes), ids, x=x, weight=weight, dy=dy, wanted=wanted, mode=mode)
    return present(_backward(plan, dy, x, weight, ids), dy)


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor, *settings: Any) -> torch.Tensor:
    chunks = Chunks(*settings[:5])._replace(listed=ids.shape[0])
    return x.new_empty((*x.shape[:-1], chunks.active if chunks.y_compact else chunks.d_out))


def _fake_backward(
    dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, ...]:
    chunks = Chunks(*settings[:5])._replace(listed=ids.shape[0])
    shapes = _gradient_shapes(chunks, dy, x, weight, settings[6])
    return tuple(dy.new_empty((0,) if shape is None else shape) for shape in shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _bias, ids, *ctx.settings = inputs
    keep_mode(ctx)
    ctx.save_for_backward(x, weight, ids)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dy, x, weight, ids, *ctx.settings = inputs
    keep_mode(ctx)
    ctx.save_for_backward(dy, x, weight, ids)


_linear_operator = operator(
    "sparse_linear(Tensor x, Tensor weight, Tensor? bias, Tensor active_chunks, SymInt chunk_size, SymInt d_out, "
    "bool compact, bool weight_compact, bool dw_compact, str? mode) -> Tensor",
    outputs=_fake_linear,
    run=_run_linear,
    setup_context=_keep,
    backward=lambda ctx, dy: (*_gradients(ctx, dy), *(None,) * 7),
)
_backward_operator = operator(
    "sparse_linear_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor active_chunks, SymInt chunk_size, SymInt d_out, "
    "bool dy_compact, bool weight_compact, bool dw_compact, str? mode, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    outputs=_fake_backward,
    run=_run_backward,
    setup_context=_keep_backward,
    backward=lambda ctx, *gradients: (*_gradients_of_gradients(ctx, *gradients), *(None,) * 8),
)

SOURCES = sources()
_linear_whole = composite(
    "sparse_linear_whole(str op, Tensor x, Tensor weight, Tensor? bias, Tensor? active_chunks, SymInt chunk_size, "
    "bool compact, str? mode) -> Tensor",
    _linear,
)
_backward_whole = composite(
    "sparse_linear_backward_whole(str op, Tensor dy, Tensor? x, Tensor? weight, Tensor active_chunks, SymInt chunk_size, "
    "bool compact, bool[] needs) -> (Tensor, Tensor, Tensor)",
    lambda op, dy, *args: present(_products(op, dy, *args), dy),
)
