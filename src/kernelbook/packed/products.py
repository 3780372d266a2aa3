"""Products of rows with 4-bit matrices by the kernels in Gluon: which kernel takes which problem, and how it is launched."""

import functools
from typing import Any, NamedTuple

import torch

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.packed import NESTED_BLOCK

__all__ = ["Matrices", "Plan", "launch", "plan"]


class Matrices(NamedTuple):
    """The matrices (E, K, N) that an ``NF4Tensor`` of shape (E, N, K) stands for; ``transposed``: of shape (E, K, N)."""

    packed: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    nested: tuple[torch.Tensor | None, ...]  # absmax, code, offset
    block_size: int
    shape: tuple[int, int, int]
    transposed: bool = False

    def transpose(self, *_: int) -> "Matrices":
        e, k, n = self.shape
        return self._replace(shape=(e, n, k), transposed=not self.transposed)

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """What kernels take, in their order; where there is no second scale, the first one in its place."""
        return self.absmax, *(self.absmax if t is None else t for t in self.nested), self.code


class Plan(NamedTuple):
    launch: Launch
    height: int  # of its tiles
    across: int  # columns of a tile


# The tiles by the mean number of rows of a matrix up to which they are taken: TOKENS (the height), HALVES, OUT, DEPTH,
# STAGES, AHEAD, warps.
TILES = (
    (8, (16, 1, 64, 128, 4, 4, 4)),
    (16, (32, 1, 64, 128, 4, 4, 4)),
    (96, (128, 2, 128, 64, 4, 4, 4)),
    (2**31, (256, 2, 128, 64, 4, 4, 8)),
)

@functools.lru_cache(maxsize=4096)
def plan(
    rows: int, shape: tuple[int, int, int], by_row: bool, dtype: torch.dtype, block_size: int, nested: bool,
    rank: int, has_bias: bool, x_grouped: bool, y_grouped: bool, properties: runtime.DeviceProperties,
    tiles: tuple[int, ...] | None = None,
) -> Plan | None:  # fmt: skip
    """``None`` where no kernel here takes the problem: GPUs other than Hopper, float32, rows that are not aligned.

    Args:
        rows: of x, for all matrices together.
        shape: (E, N, K) as stored.
        by_row: the sum is over N.
    """
    experts, n, k = shape
    width, length = (k, n) if by_row else (n, k)
    if properties.arch not in ("sm_90", "sm_90a") or dtype.itemsize != 2:
        return None
    if k % 64 or width % 8 or length % 8 or n * k >= 2**31 or rows == 0:
        return None
    from kernelbook.packed import kernels_hopper as kernels

    mean = rows / min(experts, rows)
    height, halves, out, depth, stages, ahead, warps = tiles or next(found for limit, found in TILES if mean <= limit)
    padded = max(16, 1 << (rank - 1).bit_length()) if rank else 0
    found = Launch(
        kernels._many_rows_kernel, X_GROUPED=x_grouped, Y_GROUPED=y_grouped, BY_ROW=by_row, r=rank, RANK=padded,
        HAS_BIAS=has_bias, BLOCK_SIZE=block_size, SCALE="nested" if nested else "float32", NESTED_BLOCK=NESTED_BLOCK,
        TOKENS=height, HALVES=halves, OUT=out, DEPTH=depth, STAGES=stages, AHEAD=ahead, WARPS=warps, GROUP=8,
        num_warps=warps,
    )  # fmt: skip
    return Plan(found, height, cdiv(width, out))


def launch(
    plan: Plan, lists: torch.Tensor | None, tiles_at: int, num_m: int, expert: torch.Tensor | int | None,
    x: torch.Tensor, w: Matrices, b: torch.Tensor | None, u: torch.Tensor | None, bias: torch.Tensor | None,
    y: torch.Tensor, slots: int,
) -> None:  # fmt: skip
    """Fills y from x (rows aligned) and W: by a routing's lists, whose tiles begin at ``tiles_at``, or by one matrix."""
    (experts, k, n), by_row = w.shape, w.transposed
    number = expert if isinstance(expert, int) else 0
    plan.launch(
        (num_m * plan.across,),
        lists, tiles_at, expert if isinstance(expert, torch.Tensor) else None, number,
        x, x.stride(0),
        w.packed.view(torch.int32), *w.scales,
        *_strided(b, 3), u, *_strided(bias, 2),
        y, experts, x.shape[0], *((k, n) if by_row else (n, k)), slots, num_m,
    )  # fmt: skip


def _strided(tensor: torch.Tensor | None, dims: int) -> tuple[Any, ...]:
    return (None, *(0,) * dims) if tensor is None else (tensor, *tensor.stride())
