"""Products of rows with 4-bit matrices by the kernels in Gluon: which kernel takes which problem, and how it is launched."""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from kernelbook import gluon_names, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.memory import counters, empty
from kernelbook.packed import kind_of_scale
from kernelbook.tensors import strided

try:  # Gluon is experimental: where Triton has changed it, the plain kernels do the work
    from kernelbook.packed import kernels_hopper, kernels_nvidia

    HAS_GLUON = gluon_names.USABLE
except (ImportError, AttributeError):
    HAS_GLUON = False

__all__ = ["HEIGHTS", "Matrices", "Plan", "decodes_on_the_way", "multiply", "multiply_one", "plan"]


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
    def kind_of_scale(self) -> str:
        return kind_of_scale(self.block_size, self.nested[0], self.nested[2])

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        """What kernels take, in their order; where there is no second scale, the first one in its place."""
        return self.absmax, *(self.absmax if t is None else t for t in self.nested), self.code


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What is decided for a kind of product."""

    launch: Launch
    kind: str  # of kernel: "gemm", or "skinny" for few rows a matrix
    height: int  # rows of its tiles
    across: int  # programs beside each other
    parts: int = 1  # of a skinny tile, one below the other; of K in a gemm of a single matrix


HEIGHTS = (16, 32, 128, 256)  # of the tiles that a routing has to list

# The rule, measured on an H200 (Qwen3-30B's two products at 1 to 2,048 tokens; 8 experts of 28672 x 4096; one matrix of
# 14336 x 4096 and of 4096 x 14336).
#
# With so few rows a matrix and without a low-rank product each warp keeps what it decodes in registers.
SKINNY_ROWS = 6.0
SKINNY = {"BLOCK_M": 8, "ROWS": 32, "DEPTH": 1, "WARPS": 4}
SKINNY_ROWS_OF_ONE = 16  # so do the warps of a single matrix, up to so many rows: see `few_of_one`
ALONE_LENGTH = 7 * 4096  # of rows of NVFP4 whose float32 multiplies the sum: kernels compare eight of them
SKINNY_ROWS_OF_NVFP4 = 32  # of NVFP4, with 16 elements a scale: the other kernel's threads have more scales to convert
# Otherwise tiles are decoded beside the tensor cores, up to so many rows a matrix in these tiles. HALVES is how many times a
# tile may be halved where that is enough.
GEMM = (
    (24.0, {"BLOCK_M": 32, "HALVES": 1, "BLOCK_N": 64, "BLOCK_K": 128}),
    (64.0, {"BLOCK_M": 128, "HALVES": 2, "BLOCK_N": 64, "BLOCK_K": 64}),
    (float("inf"), {"BLOCK_M": 256, "HALVES": 2, "BLOCK_N": 128, "BLOCK_K": 64}),
)
# A single matrix up to so many rows has one row of tiles, low and narrow, whose programs share K.
HEIGHT_OF_ONE = 128
GEMM_OF_ONE = {"HALVES": 0, "BLOCK_N": 64, "BLOCK_K": 64}
SPLIT_K_LEAST = 512  # of a part, at least
# Up to so many rows the highest tiles are faster than a dense W, where they fill the GPU and a scale has 32 elements or more.
ROWS_OF_ONE = 512
GEMM_OF_FULL = {"BLOCK_M": 256, "HALVES": 0, "BLOCK_N": 128, "BLOCK_K": 64}
# From so many rows a matrix on it is as fast to make W dense first, which costs its memory: the cores wait for decoding.
DENSE_ROWS = {True: 512, False: 128}  # on Hopper, and by the plain kernels elsewhere


def _is_hopper(properties: runtime.DeviceProperties) -> bool:
    return properties.is_hopper and HAS_GLUON


def decodes_on_the_way(rows: int, experts: int, properties: runtime.DeviceProperties | None = None) -> bool:
    """Whether packed experts are decoded on their way into each tile, instead of once for all tiles before the product.

    Within ``runtime.same_bits`` they are, for any number of rows.

    ``rows``: T k, for all experts together. ``properties``: of the GPU, by default the present one.
    """
    properties = properties or runtime.properties(runtime.DEVICE)
    hopper = _is_hopper(properties)
    return properties.same_bits or rows <= DENSE_ROWS[hopper] * max(1, min(experts, rows))


def few_of_one(rows: int, n: int, scale: str, sms: int) -> dict[str, int]:
    """-> the tiles of up to 32 rows and a single matrix, (N, K) as stored."""
    height = next(h for h in (8, 16, 32) if rows <= h)
    full = n >= 64 * sms  # four programs a multiprocessor, of 16 rows of W: they hide each other's waiting
    # Many rows of x take longer to read than W to decode: with twice the rows of W they are read half as often.
    rows_of_w = 32 if height == 32 or (full and height == 16 and scale == "e8m0") else 16
    # Groups on their way; MXFP4's are soonest decoded.
    depth = 1 if scale == "e8m0" and (height == 16 or not full) else 2
    if scale == "e4m3" and height < 32:  # groups are half as long: more where programs are few
        depth = 1 if full else 4
    # Where programs are few, MXFP4 waits longer for x in another order than it saves.
    far = scale == "e4m3" or (scale == "e8m0" and full)
    return {"BLOCK_M": height, "ROWS": rows_of_w, "DEPTH": depth, "WARPS": 4 if full else 8, "FAR": far}


def many_of_one(rows: int, n: int, k: int, scale: str, sms: int) -> tuple[dict[str, int], int] | None:
    """-> the tiles of more rows and a single matrix, and the parts of K; ``None`` where it is faster to make W dense."""
    if rows <= HEIGHT_OF_ONE:
        height = max(16, 1 << (rows - 1).bit_length())
        longer = {"BLOCK_K": 128} if height <= 32 else {}  # fewer barriers, where x leaves the room
        parts = split_of_k(n, k, sms)
        # So many rows of x are read half as often by wide tiles, if these all run at once.
        wider = {"BLOCK_N": 128} if height == 128 and parts == 1 and n <= 128 * sms else {}
        return GEMM_OF_ONE | longer | wider | {"BLOCK_M": height}, parts
    tiles = cdiv(rows, GEMM_OF_FULL["BLOCK_M"]) * cdiv(n, GEMM_OF_FULL["BLOCK_N"])
    # Fewer than four for five multiprocessors leave too many idle. NVFP4's scales cost too much at this height.
    if rows > ROWS_OF_ONE or 5 * tiles < 4 * sms or scale == "e4m3":
        return None
    return GEMM_OF_FULL, 1


def split_of_k(n: int, k: int, sms: int) -> int:
    """-> the parts of K, a power of two: as many as leave two programs a multiprocessor."""
    tiles, parts = cdiv(n, GEMM_OF_ONE["BLOCK_N"]), 1
    while 2 * parts * tiles <= 2 * sms and 2 * parts * SPLIT_K_LEAST <= k:
        parts *= 2
    return parts


@functools.lru_cache(maxsize=4096)
def plan(
    rows: int, shape: tuple[int, int, int], by_row: bool, dtype: torch.dtype, block_size: int, scale: str, *,
    rank: int, has_bias: bool, x_grouped: bool, y_grouped: bool, routed: bool, properties: runtime.DeviceProperties,
) -> Plan | None:  # fmt: skip
    """``None`` where no kernel here takes the problem: on GPUs other than Hopper, in float32, at odd sizes.

    Args:
        rows: of x, for all matrices together.
        shape: (E, N, K) as stored.
        by_row: the sum is over N.
        scale: what :func:`kernelbook.packed.kind_of_scale` says.
        rank: of a low-rank product, or 0.
        routed: the rows go to the matrices by a routing; else all to one.
    """
    experts, n, k = shape
    width, length = (k, n) if by_row else (n, k)
    if not _is_hopper(properties) or dtype.itemsize != 2 or rows == 0 or n * k == 0 or n * k >= 2**31:
        return None
    if k % 64 or width % 8 or length % 16:
        return None
    mean = rows / min(experts, rows) if routed else rows
    # A sum over rows, or with a low-rank product in it, has no float32 of its own.
    alone = scale == "e4m3" and not by_row and not rank and k <= ALONE_LENGTH
    packing: dict[str, Any] = {"BLOCK_SIZE": block_size, "SCALE": "e4m3 alone" if alone else scale}
    tailored = not properties.same_bits  # to the number of rows
    single = tailored and not routed and not (by_row or rank or has_bias)
    few_rows = SKINNY_ROWS_OF_NVFP4 if scale == "e4m3" else SKINNY_ROWS_OF_ONE
    few = (single and rows <= few_rows) or (tailored and routed and mean <= SKINNY_ROWS)
    if few and not by_row and not rank:
        tiles = SKINNY | {"FAR": scale == "e4m3"} if routed else few_of_one(rows, n, scale, properties.num_sms)
        words = min(4, block_size // 8)  # of a lane, with one scale
        parts = HEIGHTS[0] // tiles["BLOCK_M"] if routed else 1
        skinny = launcher(
            kernels_nvidia._few_rows_kernel,
            X_GROUPED=x_grouped, Y_GROUPED=y_grouped, EVEN=k % (32 * words * tiles["WARPS"]) == 0, **packing, **tiles,
            WORDS=words, PARTS=parts, num_warps=tiles["WARPS"],
        )  # fmt: skip
        return Plan(skinny, "skinny", parts * tiles["BLOCK_M"], cdiv(n, tiles["ROWS"]), parts)
    parts = 1
    # Within ``same_bits`` too: a row of x is a column for ``wgmma``, which adds 16 elements of K to it in order, however many there are.
    if routed or not tailored:
        tiles = next(found for limit, found in GEMM if mean <= limit)
    else:
        found = many_of_one(rows, width, length, scale, properties.num_sms)
        if found is None:
            return None
        tiles, parts = found
    gemm = launcher(
        kernels_hopper._many_rows_kernel,
        X_GROUPED=x_grouped, Y_GROUPED=y_grouped, BY_ROW=by_row, r=rank, **packing, **tiles, SPLIT_K=parts,
        num_warps=tiles["BLOCK_N"] // 16,
    )  # fmt: skip
    return Plan(gemm, "gemm", tiles["BLOCK_M"], cdiv(width, tiles["BLOCK_N"]), parts)


def multiply_one(plan: Plan, x: torch.Tensor, w: Matrices, expert: torch.Tensor | int, y: torch.Tensor) -> None:
    """Fills y (M, N) with the product of x (M, K), rows aligned, and one matrix (K, N), by its number or a tensor of it."""
    multiply(plan, None, 0, cdiv(x.shape[0], plan.height), x, w, None, None, None, y, 1, expert)


def multiply(
    plan: Plan, lists: torch.Tensor | None, tiles_at: int, num_m: int, x: torch.Tensor, w: Matrices,
    b: torch.Tensor | None, u: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor, slots: int,
    expert: torch.Tensor | int = 0,
) -> None:  # fmt: skip
    """Fills y from x (rows aligned) and W.

    A routing's lists, with ``num_m`` tiles from ``tiles_at`` on, say which rows go to which matrix; without lists all go to one.
    """
    # That rows can be copied 16 bytes at a time Triton knows from a stride in multiples of 16 alone.
    x = x.clone(memory_format=torch.contiguous_format) if x.stride(0) % 16 else x
    experts, *sizes = w.shape
    n, k = sizes if w.transposed else sizes[::-1]  # as stored
    words, m = w.packed.view(torch.int32), x.shape[0]
    bias = None if bias is None else bias.contiguous()
    if plan.kind == "skinny":
        plan.launch(
            (plan.across, num_m * plan.parts),
            lists, tiles_at, expert, x, x.stride(0), words, *w.scales, bias, y, experts, m, n, k, slots,
        )  # fmt: skip
        return
    sums, tickets = None, None
    if plan.parts > 1:
        if num_m > 1:
            raise ValueError(f"multiply: parts of K are for one row of tiles, got {num_m} rows of {plan.parts} parts")
        sums = empty((plan.across * GEMM_OF_ONE["BLOCK_N"], plan.parts * plan.height), torch.float32, x)
        tickets = counters(plan.across, x.device)
    plan.launch(
        (num_m * plan.across, plan.parts),
        lists, tiles_at, expert, x, x.stride(0), words, *w.scales, *strided(b, 3), u, bias, y, sums, tickets,
        experts, m, n, k, slots,
    )  # fmt: skip
