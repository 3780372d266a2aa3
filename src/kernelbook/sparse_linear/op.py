"""Public functions, then two operators: the product, dense or of active chunks, and its gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Block, Descriptor, Launch, block, cdiv, launcher
from kernelbook.linear import linear, product
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.operators import Op
from kernelbook.sparse_linear import kernels
from kernelbook.tensors import has_aligned_rows, matrix, strided

MODES = ("dense", "sparse_dw", "sparse_dw_dx")
SPARSE = "sparse"  # the mode of the operator in which the product too is of active chunks only


# --- public functions -----------------------------------------------------------------------------------------------


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, active_chunks: torch.Tensor | None = None,
    *, chunk_size: int = 64, mode: str = "sparse_dw",
) -> torch.Tensor:  # fmt: skip
    """Compute ``x W^T + b``, as ``torch.nn.functional.linear``, with gradients for the active chunks of output features only.

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
        mode: ``"dense"``, for which no id is read, ``"sparse_dw"`` or ``"sparse_dw_dx"``.

    Returns:
        (..., d_out) in the dtype of ``x``; under autocast in its dtype, as PyTorch's own. float32 products use tf32 where
        ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``chunk_size``, ``mode`` or (where they are checked) an id is not as above.
    """
    chunk_size = arguments.integer("sparse_linear", "chunk_size", chunk_size)
    arguments.check_choice("sparse_linear", "mode", mode, MODES)
    if active_chunks is not None and mode != "dense":
        return _forward(x, weight, bias, active_chunks, chunk_size, None, False, False, mode)  # type: ignore[no-any-return]
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    _forward.check_once(x, weight, bias, active_chunks, chunk_size, None, False, False, mode)
    return linear(x, weight, bias)


def sparse_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, active_chunks: torch.Tensor, *,
    chunk_size: int = 64, compact: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the active columns of ``x W^T + b``; differentiable.

    Args:
        x, weight, bias, active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: return the active columns only, in the order of the ids.

    Returns:
        (..., d_out) with zeros in inactive chunks, or (..., A * chunk_size) if ``compact`` (the last columns of a shorter
        chunk are zero).

    Raises: as :func:`sparse_linear`.
    """
    chunk_size = arguments.integer("sparse_forward", "chunk_size", chunk_size)
    return _forward(x, weight, bias, active_chunks, chunk_size, None, bool(compact), False, SPARSE)  # type: ignore[no-any-return]


def sparse_dw(
    x: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64, compact: bool = False,
    with_bias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of weight and bias in the active chunks, both from one pass over ``dy``; differentiable.

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
    chunk_size, needs = arguments.integer("sparse_dw", "chunk_size", chunk_size), (False, True, bool(with_bias))
    dy, x = arguments.in_autocast_dtype(dy, x)
    _, dw, db = products(dy, x, None, active_chunks, chunk_size, None, False, False, bool(compact), needs)
    return dw, db if with_bias else None


def sparse_dx(
    dy: torch.Tensor, weight: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64
) -> torch.Tensor:
    """Return the gradient of the input that the active chunks carry: the sum over them of ``dY[..., c] W[c]``; differentiable.

    Args:
        dy: (..., d_out), the dtype of ``weight``; what it holds in inactive chunks is not read.
        weight: (d_out, d_in).
        active_chunks, chunk_size: as in :func:`sparse_linear`.

    Returns:
        dX (..., d_in).

    Raises: as :func:`sparse_linear`.
    """
    chunk_size, needs = arguments.integer("sparse_dx", "chunk_size", chunk_size), (True, False, False)
    dy, weight = arguments.in_autocast_dtype(dy, weight)
    return products(dy, None, weight, active_chunks, chunk_size, None, False, False, False, needs)[0]  # type: ignore[no-any-return]


def sparse_backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64,
    compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run the whole backward pass of mode ``"sparse_dw_dx"`` in one call (and for 16-bit dtypes one launch).

    Args:
        x: (..., d_in).
        weight: (d_out, d_in).
        dy: (..., d_out), all of one dtype.
        active_chunks, chunk_size: as in :func:`sparse_linear`.
        compact: as in :func:`sparse_dw`, for dW and db.

    Returns:
        dW and db as :func:`sparse_dw`, dX as :func:`sparse_dx`; differentiable, and autocast leaves their dtype alone.

    Raises: as :func:`sparse_linear`.
    """
    chunk_size, needs = arguments.integer("sparse_backward", "chunk_size", chunk_size), (True, True, True)
    dx, dw, db = products(dy, x, weight, active_chunks, chunk_size, None, False, False, bool(compact), needs)
    return dw, db, dx


# --- what the operators share ----------------------------------------------------------------------------------------


def _check_tensors(op: str, ids: Any, chunk_size: int, **tensors: Any) -> None:
    """Raise unless the tensors of a public function fit each other; the first of them sets dtype and device."""
    for name, tensor in tensors.items():
        arguments.check_tensor(op, name, tensor, dims=2 if name == "weight" else None)
        if name in ("x", "dy") and tensor.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
    arguments.check_same_dtype(op, **tensors)
    *rows, d_in = tensors["x" if "x" in tensors else "dy"].shape
    d_out = tensors["weight"].shape[0] if "weight" in tensors else tensors["dy"].shape[-1]
    for name, shape in (("weight", (d_out, d_in)), ("bias", (d_out,)), ("dy", (*rows, d_out))):
        if name in tensors and not (name == "weight" and op == "sparse_dx"):
            arguments.check_shape(op, name, tensors[name], shape)
    arguments.integer(op, "chunk_size", chunk_size, least=16)
    if ids is not None or op != "sparse_linear":
        arguments.check_indices(op, "active_chunks", ids)
        tensors["active_chunks"] = ids
    arguments.check_same_device(op, **tensors)


class Chunks(NamedTuple):
    """The chunks, and whether the columns of Y and dY, the rows of W, and those of dW and db are the active ones only."""

    size: int
    d_out: int
    y_compact: bool = False
    w_compact: bool = False
    dw_compact: bool = False
    listed: int = 0  # A

    @property
    def total(self) -> int:
        return cdiv(self.d_out, self.size)

    @property
    def active(self) -> int:
        """Active features."""
        return self.listed * self.size


def _chunks(
    ids: torch.Tensor, weight: Any, dy: Any, size: int, d_out: int | None, y_compact: bool, w_compact: bool,
    dw_compact: bool = False,
) -> Chunks:  # fmt: skip
    """Return the chunks of a call. Public functions leave ``d_out`` to their tensors, none of which is compact."""
    if d_out is None:
        d_out = dy.shape[-1] if weight is None else weight.shape[0]
    return Chunks(size, d_out, y_compact, w_compact, dw_compact, ids.shape[0])


class _Plan(NamedTuple):
    """What is decided for calls of a kind."""

    chunks: Chunks
    strategy: str  # of :func:`_strategy`
    # By tiles: a launch of them, and of the zeros in inactive chunks.
    launch: Launch | None = None
    grid: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()  # of tiles and of zeros, the kernel's last arguments
    split: int = 1  # partial sums of each of dW's
    # Of the tensor descriptors of x, dY (for dW and for dX) and W, where there are any.
    blocks: tuple[Block | None, ...] = (None, None, None, None)


def _strategy(chunks: Chunks, m: int, d_in: int, operands: Sequence[torch.Tensor], *, by_chunk: bool = False) -> str:
    """``"dense"``: cuBLAS on everything; else what :func:`kernels.strategy` says of ``d_in`` inputs."""
    if chunks.listed == chunks.total and not (chunks.y_compact or chunks.w_compact or chunks.dw_compact):
        return "dense"
    aligned = all(has_aligned_rows(t) or has_aligned_rows(t.t()) for t in operands)
    size, properties = operands[0].element_size(), runtime.properties(operands[0].device)
    return kernels.strategy(m, d_in, chunks.active, chunks.size, size, aligned, by_chunk, properties)


# --- the product, dense or of active chunks --------------------------------------------------------------------------
# What PyTorch computes, here and below, goes to ``out=``, which autocast leaves alone.


def _check_forward(x: Any, weight: Any, bias: Any, ids: Any, chunk_size: int, d_out: int | None, *layout: Any) -> None:
    if d_out is None:
        op = "sparse_forward" if layout[-1] == SPARSE else "sparse_linear"
        _check_tensors(op, ids, chunk_size, x=x, weight=weight, **({} if bias is None else {"bias": bias}))


def _outputs_of_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor, *layout: Any
) -> tuple[torch.Tensor]:
    chunks = _chunks(ids, weight, None, *layout[:-1])
    return (empty((*x.shape[:-1], chunks.active if chunks.y_compact else chunks.d_out), x.dtype, x),)


def _plan_forward(x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor, *layout: Any) -> _Plan | None:
    chunks, x = _chunks(ids, weight, None, *layout[:-1]), matrix(x)
    if layout[-1] != SPARSE:
        return _Plan(chunks, "dense")
    m, d_in = x.shape
    if chunks.listed == 0 or m == 0 or chunks.d_out == 0:
        return None
    strategy = _strategy(chunks, m, d_in, (x, weight))
    if strategy != "tiles":
        return _Plan(chunks, strategy)
    tiles = kernels.plan_forward(m, d_in, chunks.active, x.element_size(), runtime.properties(x.device))
    blocks = tiles.config.kwargs
    num_tiles = cdiv(m, blocks["BLOCK_R"]) * cdiv(chunks.active, blocks["BLOCK_D"])
    num_zero = 0 if chunks.y_compact else chunks.total * cdiv(m, kernels.ZERO_ROWS)
    launch = launcher(
        kernels._sparse_linear_fwd_tiles_kernel,
        CHUNK=chunks.size, Y_COMPACT=chunks.y_compact, W_COMPACT=chunks.w_compact, EVEN_K=d_in % blocks["BLOCK_K"] == 0,
        **blocks, ZERO_ROWS=kernels.ZERO_ROWS,
        num_warps=tiles.config.num_warps, num_stages=tiles.config.num_stages, repeatable=True,
    )  # fmt: skip
    counts = num_tiles, (num_tiles + num_zero) // max(num_zero, 1)
    return _Plan(chunks, strategy, launch, (num_tiles + num_zero,), counts)


def _run_forward(
    plan: _Plan, outputs: tuple[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: Any, ids: torch.Tensor,
    *layout: Any,
) -> None:  # fmt: skip
    chunks = plan.chunks
    op = "sparse_forward" if layout[-1] == SPARSE else "sparse_linear"
    arguments.check_index_values(op, "active_chunks", ids, chunks.total, unique=True)
    x, y, ids = matrix(x), matrix(outputs[0]), ids.contiguous()
    if plan.strategy == "dense":
        product(x, weight.t(), bias, out=y)
    elif plan.launch is not None:
        tensors = (x, *x.stride(), weight, *weight.stride(), *strided(bias, 1), y, y.stride(0))
        plan.launch(plan.grid, ids, *tensors, *x.shape, chunks.d_out, chunks.listed, *plan.counts)
    else:
        packed_w = pack(chunks, ids, weight, 0, chunks.w_compact)[0]
        packed_b = None if bias is None else pack(chunks, ids, bias[None, :], 1, chunks.w_compact)[0][0]
        packed_y = y if chunks.y_compact else empty((y.shape[0], chunks.active), y.dtype, y)
        product(x, packed_w.t(), packed_b, out=packed_y)
        if not chunks.y_compact:
            place(chunks, ids, packed_y.t()[None], y.t(), None, None)


def _gradients_of_forward(call: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (x, weight), [ids], needs = call.saved, call.kept, [dtype is not None for dtype in call.wanted[:3]]
    d_out = weight.shape[0] if call.d_out is None else call.d_out
    layout = call.chunk_size, d_out, call.compact, call.weight_compact, call.weight_compact
    dense_dx = needs[0] and call.mode == "sparse_dw"
    needs[0] = needs[0] and not dense_dx
    dx, dw, db = products(dy, x, weight, ids, *layout, needs)
    return linear(dy, weight.t()) if dense_dx else dx, dw, db


# --- gradients: dX, dW and db ----------------------------------------------------------------------------------------


def _public_function(needs: Sequence[bool]) -> str:
    with_dx, with_dw, _ = needs
    return "sparse_dw" if not with_dx else "sparse_backward" if with_dw else "sparse_dx"


def _check_products(dy: Any, x: Any, weight: Any, ids: Any, chunk_size: int, d_out: int | None, *settings: Any) -> None:
    if d_out is None:
        op = _public_function(settings[-1])
        tensors = {"sparse_dw": {"x": x, "dy": dy}, "sparse_dx": {"dy": dy, "weight": weight}}
        _check_tensors(op, ids, chunk_size, **tensors.get(op, {"x": x, "weight": weight, "dy": dy}))


def _outputs_of_products(
    dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor | None, ...]:
    *layout, (with_dx, with_dw, with_db) = settings
    chunks = _chunks(ids, weight, dy, *layout)
    rows = chunks.active if chunks.dw_compact else chunks.d_out
    return (
        empty((*dy.shape[:-1], weight.shape[1]), dy.dtype, dy) if with_dx else None,
        empty((rows, x.shape[-1]), dy.dtype, dy) if with_dw else None,
        empty((rows,), dy.dtype, dy) if with_db else None,
    )


def _plan_products(dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor, *settings: Any) -> _Plan | None:
    *layout, (with_dx, with_dw, with_db) = settings
    chunks = _chunks(ids, weight, dy, *layout)
    if dy.numel() == 0 or chunks.listed == 0 or not (with_dx or with_dw or with_db):
        return None
    operands = [matrix(dy), *([matrix(x)] if with_dw else []), *([weight] if with_dx else [])]
    m, d_in = operands[0].shape[0], operands[-1].shape[1] if len(operands) > 1 else 0
    strategy = _strategy(chunks, m, d_in, operands, by_chunk=not chunks.y_compact)
    if strategy != "tiles":
        return _Plan(chunks, strategy)
    properties, size = runtime.properties(dy.device), dy.element_size()
    # Tensor descriptors read matrices with contiguous rows that start on 16 bytes, in chunks of whole blocks.
    whole = not (chunks.size % kernels.BOX or chunks.y_compact or chunks.w_compact or chunks.d_out >= 2**30)
    by_descriptor = whole and properties.has_tma and all(map(has_aligned_rows, operands))
    tiles = kernels.plan_backward(m, d_in, chunks.active, size, with_dw, with_dx, by_descriptor, properties)
    blocks, split = tiles.config.kwargs, tiles.split if with_dw else 1
    r, d, k = blocks["BLOCK_R"], blocks["BLOCK_D"], blocks["BLOCK_K"]
    columns = cdiv(d_in, d)
    num_dw = cdiv(chunks.active, r) * columns * split if with_dw else 0
    num_dx = cdiv(m, r) * columns if with_dx else 0
    dw_compact = chunks.dw_compact or split > 1  # partial sums are put in place later
    num_zero = chunks.total * cdiv(chunks.size * d_in, kernels.ZERO_PIECE) if with_dw and not dw_compact else 0
    dx_first = num_dw > 0 and num_dx > 0 and chunks.active > cdiv(m, split)
    num_later = num_dw if dx_first else num_dx
    dw_by_descriptor = tiles.boxes and with_dw and r % kernels.BOX == 0
    dx_by_descriptor = tiles.boxes and with_dx and chunks.size % k == 0
    launch = launcher(
        kernels._sparse_linear_bwd_tiles_kernel,
        CHUNK=chunks.size, DY_COMPACT=chunks.y_compact, W_COMPACT=chunks.w_compact, DW_COMPACT=dw_compact,
        DX_FIRST=dx_first, SPLIT=split, EVEN_M=m % k == 0, **blocks, ZERO_PIECE=kernels.ZERO_PIECE,
        num_warps=tiles.config.num_warps, num_stages=tiles.config.num_stages, repeatable=True,
    )  # fmt: skip
    counts = num_dw, num_dx, (num_later + num_zero) // max(num_zero, 1)
    for_dw = (block(k, d), block(k, kernels.BOX)) if dw_by_descriptor else (None, None)
    for_dx = (block(r, k), block(k, d)) if dx_by_descriptor else (None, None)
    return _Plan(chunks, "tiles", launch, (num_dw + num_dx + num_zero,), counts, split, (*for_dw, *for_dx))


def _run_products(
    plan: _Plan, outputs: tuple[Any, ...], dy: torch.Tensor, x: Any, weight: Any, ids: torch.Tensor, *settings: Any
) -> None:
    (dx, dw, db), chunks = outputs, plan.chunks
    op = _public_function(settings[-1])
    arguments.check_index_values(op, "active_chunks", ids, chunks.total, unique=True)
    dy, x, dx, ids = matrix(dy), None if dw is None else matrix(x), None if dx is None else matrix(dx), ids.contiguous()
    if plan.strategy == "dense":
        if dx is not None:
            product(dy, weight, out=dx)
        if dw is not None:
            torch.mm(dy.t(), x, out=dw)
        if db is not None:
            torch.sum(dy, 0, out=db)
    elif plan.launch is None:
        run_packed(chunks, ids, dy, x, weight, dx, dw, db)
    else:  # one launch, or two if the sums of dW are split
        if db is not None and dw is None:  # the kernel sums dY where it multiplies it for dW
            run_packed(chunks, ids, dy, None, None, None, None, db)
            db = None
        weight = None if dx is None else weight
        m, d_in = dy.shape[0], (weight if x is None else x).shape[1]
        to_dw, to_db = dw, db
        if plan.split > 1:
            to_dw = empty((plan.split, chunks.active, d_in), accumulator(dy.dtype), dy)
            to_db = None if db is None else empty((plan.split, chunks.active), accumulator(dy.dtype), dy)
        read = zip((x, dy, dy, weight), plan.blocks, strict=True)
        plan.launch(
            plan.grid,
            ids,
            *strided(x, 2), dy, *dy.stride(), *strided(weight, 2), dx, to_dw, to_db,
            *(None if by is None else Descriptor(tensor, by) for tensor, by in read),
            m, d_in, chunks.d_out, chunks.listed, *plan.counts,
        )  # fmt: skip
        if plan.split > 1:
            place(chunks, ids, to_dw, dw, to_db, db, compact=chunks.dw_compact)


def _gradients_of_products(call: Any, gx: Any, gw: Any, gb: Any) -> tuple[Any, ...]:
    """-> those of dy, x and weight: the products are linear in each tensor, so that each is made of the others."""
    (dy, x, weight), [ids], (needs_dy, needs_x, needs_weight, _) = call.saved, call.kept, call.wanted
    size, d_out, *_ = _chunks(ids, weight, dy, call.chunk_size, call.d_out, call.dy_compact, call.weight_compact)
    w_compact, dw_compact = call.weight_compact, call.dw_compact
    of_dy, of_x, of_weight = [], None, None
    if needs_dy and gx is not None:
        of_dy.append(_forward(gx, weight, None, ids, size, d_out, call.dy_compact, w_compact, SPARSE))
    if needs_dy and (gw is not None or gb is not None):
        gw_or_zeros = gb.new_zeros(gb.shape[0], x.shape[-1]) if gw is None else gw
        of_dy.append(_forward(x, gw_or_zeros, gb, ids, size, d_out, call.dy_compact, dw_compact, SPARSE))
    if needs_x and gw is not None:
        layout = size, d_out, call.dy_compact, dw_compact, False
        of_x = products(dy, None, gw, ids, *layout, (True, False, False))[0]
    if needs_weight and gx is not None:
        layout = size, d_out, call.dy_compact, False, w_compact
        of_weight = products(dy, gx, None, ids, *layout, (False, True, False))[1]
    return sum(of_dy[1:], of_dy[0]) if of_dy else None, of_x, of_weight


# --- active rows and columns copied together and back, for products that are left to cuBLAS ---------------------------


def run_packed(
    chunks: Chunks, ids: torch.Tensor, dy: torch.Tensor, x: Any, weight: Any, dx: Any, dw: Any, db: Any
) -> None:
    """Fill dx, dw and db: pack the active columns of dY (summing them for db) and rows of W, and multiply."""
    packed_dy, sums = pack(chunks, ids, dy, 1, chunks.y_compact, dx is not None or dw is not None, db is not None)
    if dx is not None:
        packed_w, _ = pack(chunks, ids, weight, 0, chunks.w_compact)
        product(packed_dy, packed_w, out=dx)
    if dw is not None and chunks.dw_compact:
        torch.mm(packed_dy.t(), x, out=dw)
    elif dw is not None:
        of_active = torch.mm(packed_dy.t(), x, out=empty((chunks.active, x.shape[1]), x.dtype, x))
        place(chunks, ids, of_active[None], dw, sums, db)
    if db is not None and (dw is None or chunks.dw_compact):
        place(chunks, ids, None, None, sums, db, compact=chunks.dw_compact)


def pack(
    chunks: Chunks, ids: torch.Tensor, source: torch.Tensor, axis: int, compact: bool, copy: bool = True, sums: bool = False
) -> tuple[Any, torch.Tensor | None]:  # fmt: skip
    """Copy the active rows (axis 0) or columns (1) of a matrix together, in memory as it is; sum columns in parts (P, A * chunk).

    A ``compact`` source has the active ones only; those of a shorter chunk that are none become zero.
    """
    strides, config, m = source.stride(), kernels.PACK_CONFIG, source.shape[1 - axis]
    shape = (chunks.active, m) if axis == 0 else (m, chunks.active)
    packed: torch.Tensor | None = None
    if copy and strides[0] == 1 and strides[1] != 1:
        packed = empty(shape[::-1], source.dtype, source).t()
    elif copy:
        packed = empty(shape, source.dtype, source)
    to = (0, 0) if packed is None else packed.stride()
    grid = cdiv(chunks.active, config.kwargs["BLOCK_N"]), cdiv(m, config.kwargs["ROWS"])
    partial = empty((grid[1], chunks.active), accumulator(source.dtype), source) if sums else None
    launch = launcher(
        kernels._sparse_linear_pack_kernel,
        CHUNK=chunks.size, SRC_COMPACT=compact, ACC=tl_accumulator(source.dtype),
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    launch(
        grid,
        ids,
        source, strides[1 - axis], strides[axis],
        packed, to[1 - axis], to[axis],
        partial,
        m, chunks.d_out, chunks.listed,
    )  # fmt: skip
    return packed, partial


def place(
    chunks: Chunks, ids: torch.Tensor, source: Any, target: Any, sums: Any, total: Any, *, compact: bool = False
) -> None:
    """Sum (SPLIT, A * chunk, M) into the rows of (d_out, M), zeros elsewhere; partial sums likewise into ``total``."""
    m, split = (0, 1) if source is None else (target.shape[1], source.shape[0])
    launch = launcher(
        kernels._sparse_linear_place_kernel,
        CHUNK=chunks.size, COMPACT=compact, SPLIT=split, ACC=tl_accumulator((total if target is None else target).dtype),
        BLOCK_N=1 << (chunks.size - 1).bit_length(), BLOCK_M=kernels.PLACE_BLOCK_M, num_warps=8,
    )  # fmt: skip
    launch(
        (chunks.listed if compact else chunks.total, max(1, cdiv(m, kernels.PLACE_BLOCK_M))),
        ids,
        *strided(source, 3), *strided(target, 2), sums, total if sums is not None else None,
        m, chunks.d_out, chunks.listed, 0 if sums is None else sums.shape[0],
    )  # fmt: skip


# --- operators ------------------------------------------------------------------------------------------------------

_forward = Op(
    "sparse_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? active_chunks, SymInt chunk_size, SymInt? d_out, "
    "bool compact, bool weight_compact, str mode) -> Tensor",
    check=_check_forward,
    outputs=_outputs_of_forward,
    plan=_plan_forward,
    run=_run_forward,
    saves=("x", "weight"),
    keeps=("active_chunks",),
    autocast=("x", "weight", "bias"),
    backward=_gradients_of_forward,
)
products = Op(
    "sparse_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor active_chunks, SymInt chunk_size, SymInt? d_out, "
    "bool dy_compact, bool weight_compact, bool dw_compact, bool[] needs) -> (Tensor dx, Tensor dw, Tensor db)",
    check=_check_products,
    outputs=_outputs_of_products,
    plan=_plan_products,
    run=_run_products,
    results=3,
    saves=("dy", "x", "weight"),
    keeps=("active_chunks",),
    backward=_gradients_of_products,
)
