"""Active rows and columns copied together and back, for products that are left to cuBLAS."""

from typing import Any, NamedTuple

import torch

from kernelbook.launch import cdiv, launcher  # before Triton, which it sets up
from kernelbook.linear import product
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.sparse_linear import kernels
from kernelbook.tensors import strided

# isort: split
import triton

__all__ = ["Chunks", "pack", "place", "run_packed"]


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
        BLOCK_N=triton.next_power_of_2(chunks.size), BLOCK_M=kernels.PLACE_BLOCK_M, num_warps=8,
    )  # fmt: skip
    launch(
        (chunks.listed if compact else chunks.total, max(1, cdiv(m, kernels.PLACE_BLOCK_M))),
        ids,
        *strided(source, 3), *strided(target, 2), sums, total if sums is not None else None,
        m, chunks.d_out, chunks.listed, 0 if sums is None else sums.shape[0],
    )  # fmt: skip
