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

__all__ = [
    "GEMV_ROWS", "HEIGHTS", "SPLIT_K_ROWS", "Matrices", "Plan", "decodes_on_the_way", "multiply", "multiply_one", "plan",
]  # fmt: skip


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
    kind: str  # of kernel: "gemm", "skinny" for few rows a matrix, "gemv" and "split_k" for those of a single matrix
    height: int  # rows of its tiles
    across: int  # programs beside each other
    parts: int = 1  # of a skinny tile, one below the other; of K in a split_k; of a gemv: groups of rows in a program


HEIGHTS = (16, 32, 128, 256)  # of the tiles that a routing has to list

# The rule, measured on an H200 (Qwen3-30B's two products at 1 to 2,048 tokens; 8 experts of 28672 x 4096; one matrix of
# 14336 x 4096). PREFETCH is the prefetch distance: by how many steps words come before x does,
# and in a gemv before they are used.
#
# With so many rows a matrix and without a low-rank product each warp keeps what it decodes in registers.
SKINNY_ROWS = 6.0
SKINNY = {"BLOCK_M": 8, "ROWS": 32, "DEPTH": 1, "WARPS": 4}
# A single matrix and up to so many rows: one program of sixteen warps a multiprocessor, each warp with 16 rows of W.
GEMV_ROWS = 8
GEMV_MORE_ROWS, GEMV_MORE_ELEMENTS = 16, 2**25  # of a larger matrix up to so many: measured on an H100
GEMV = {"ROWS": 16, "WARPS": 16}
GEMV_STEPS = {
    4: {"CHUNKS": 2, "PREFETCH": 1},
    8: {"CHUNKS": 2, "PREFETCH": 2},
    16: {"CHUNKS": 1, "PREFETCH": 3},
}  # by rows of x
# Then up to so many: two programs of four warps a multiprocessor, with parts of K where W has few rows. Measured on an H100
# (14336 x 4096, 4096 x 14336, 4096 x 4096).
SPLIT_K_ROWS = 64
# All of these rows fill a tile of the next kernel, which is faster where W has so many rows a multiprocessor.
FULL_TILES = 32
SPLIT_K_WARPS = 4  # with 16 rows of W each
SPLIT_K_STEPS = {
    16: {"BLOCKS": 4, "STAGES": 3},
    32: {"BLOCKS": 4, "STAGES": 3},
    64: {"BLOCKS": 2, "STAGES": 4},
}  # by rows of x
SPLIT_K_LEAST = 512  # of a part, at least
# Otherwise tiles are decoded beside the tensor cores, up to so many rows a matrix in these tiles. HALVES is how many times a
# tile may be halved where that is enough.
GEMM = (
    (24.0, {"BLOCK_M": 32, "HALVES": 1, "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 4, "PREFETCH": 4, "WARPS": 4}),
    (64.0, {"BLOCK_M": 128, "HALVES": 2, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 4, "PREFETCH": 4, "WARPS": 4}),
    (
        float("inf"),
        {"BLOCK_M": 256, "HALVES": 2, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 4, "PREFETCH": 4, "WARPS": 8},
    ),
)
# A single matrix has few tiles: they are low, and narrow.
GEMM_OF_ONE = {"HALVES": 0, "BLOCK_N": 64, "STAGES": 4, "PREFETCH": 4, "WARPS": 4}
# Within ``same_bits`` one tile for any number of rows, which is not halved.
GEMM_OF_ALL = {"BLOCK_M": 128, "HALVES": 0, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 4, "PREFETCH": 4, "WARPS": 4}
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


def gemv_split(n: int, sms: int) -> tuple[int, int]:
    """-> the warps that share a group's rows, each with a part of K, and the groups of a program.

    As many warps a group as leave one program a multiprocessor; then as few groups a program as keep all of them busy for as
    long: 14,336 rows are 896 groups, seven for each of 128 programs.
    """
    tiles, warps = cdiv(n, GEMV["ROWS"]), GEMV["WARPS"]
    parts = warps
    while parts > 1 and warps // parts * sms < tiles:
        parts //= 2
    rounds = cdiv(tiles, warps // parts * sms)
    return parts, cdiv(tiles, rounds * sms)


def split_of_k(n: int, k: int, sms: int) -> int:
    """-> the parts of K, a power of two: as many as leave two programs a multiprocessor."""
    tiles, parts = cdiv(n, 16 * SPLIT_K_WARPS), 1
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
    packing: dict[str, Any] = {
        "BLOCK_SIZE": block_size, "SCALE": scale,
    }  # fmt: skip
    tailored = not properties.same_bits  # to the number of rows
    single = tailored and not routed and block_size >= 64 and not (by_row or rank or has_bias)
    if single and rows <= (GEMV_MORE_ROWS if n * k >= GEMV_MORE_ELEMENTS else GEMV_ROWS):
        tokens = max(4, 1 << (rows - 1).bit_length())
        parts, groups = gemv_split(n, properties.num_sms)
        step = (128 if tokens == 4 else 64) * GEMV_STEPS[tokens]["CHUNKS"]
        gemv = launcher(
            kernels_nvidia._one_matrix_kernel,
            EVEN=k % (step * parts) == 0, **packing, BLOCK_M=tokens, SPLIT_K=parts, **GEMV, **GEMV_STEPS[tokens],
            num_warps=GEMV["WARPS"], maxnreg=properties.registers_per_sm // (32 * GEMV["WARPS"]),
        )  # fmt: skip
        return Plan(gemv, "gemv", tokens, cdiv(n, groups * GEMV["ROWS"]), groups)
    if single and (rows < SPLIT_K_ROWS or (rows == SPLIT_K_ROWS and n < FULL_TILES * properties.num_sms)):
        tokens, parts = max(16, 1 << (rows - 1).bit_length()), split_of_k(n, k, properties.num_sms)
        split_k = launcher(
            kernels_hopper._some_rows_kernel,
            **packing, BLOCK_M=tokens, SPLIT_K=parts, WARPS=SPLIT_K_WARPS, **SPLIT_K_STEPS[tokens],
            num_warps=SPLIT_K_WARPS,
        )  # fmt: skip
        return Plan(split_k, "split_k", tokens, cdiv(n, 16 * SPLIT_K_WARPS), parts)
    if tailored and mean <= (SKINNY_ROWS if routed else SKINNY["BLOCK_M"]) and not by_row and not rank:
        words = min(4, block_size // 8)
        parts = HEIGHTS[0] // SKINNY["BLOCK_M"] if routed else 1
        skinny = launcher(
            kernels_nvidia._few_rows_kernel,
            X_GROUPED=x_grouped, Y_GROUPED=y_grouped, EVEN=k % (32 * words * SKINNY["WARPS"]) == 0,
            HAS_BIAS=has_bias, BLOCK_SIZE=block_size, SCALE=scale, **SKINNY, WORDS=words, PARTS=parts,
            num_warps=SKINNY["WARPS"],
        )  # fmt: skip
        return Plan(skinny, "skinny", parts * SKINNY["BLOCK_M"], cdiv(n, SKINNY["ROWS"]), parts)
    if properties.same_bits:
        tiles: dict[str, int] = GEMM_OF_ALL
    elif routed:
        tiles = next(found for limit, found in GEMM if mean <= limit)
        if by_row and tiles["BLOCK_M"] == 256:
            tiles = tiles | {"PREFETCH": 6}  # here a step has other rows, each half a line of the cache
    else:
        height = max(16, 1 << (min(rows, 64) - 1).bit_length())
        tiles = GEMM_OF_ONE | {"BLOCK_M": height, "BLOCK_K": 128 if height < 64 else 64}
    padded = max(16, 1 << (rank - 1).bit_length()) if rank else 0
    gemm = launcher(
        kernels_hopper._many_rows_kernel,
        X_GROUPED=x_grouped, Y_GROUPED=y_grouped, BY_ROW=by_row, r=rank, RANK=padded, HAS_BIAS=has_bias, **packing,
        **tiles, GROUP=8, num_warps=tiles["WARPS"],
    )  # fmt: skip
    return Plan(gemm, "gemm", tiles["BLOCK_M"], cdiv(width, tiles["BLOCK_N"]))


def multiply_one(plan: Plan, x: torch.Tensor, w: Matrices, expert: torch.Tensor | int, y: torch.Tensor) -> None:
    """Fills y (M, N) with the product of x (M, K), rows aligned, and one matrix (K, N), by its number or a tensor of it."""
    if plan.kind in ("gemm", "skinny"):
        multiply(plan, None, 0, cdiv(x.shape[0], plan.height), x, w, None, None, None, y, 1, expert)
        return
    x = _in_pieces_of_16_bytes(x)
    (experts, k, n), words, m = w.shape, w.packed.view(torch.int32), x.shape[0]
    absmax, nested_absmax, nested_code, nested_offset, code = w.scales
    expert_ptr, number = (expert, 0) if isinstance(expert, torch.Tensor) else (None, expert)
    if plan.kind == "gemv":
        plan.launch(
            (plan.across,),
            expert_ptr, number, x, x.stride(0), words, absmax, nested_absmax, nested_code, nested_offset, code, y,
            experts, m, n, k, plan.parts,
        )  # fmt: skip
        return
    sums, tickets, pairs = None, None, x.view(torch.int32)
    if plan.parts > 1:
        sums = empty((plan.across, plan.parts, 16 * SPLIT_K_WARPS, plan.height), torch.float32, x)
        tickets = counters(plan.across, x.device)
    plan.launch(
        (plan.across, plan.parts),
        expert_ptr, number, pairs, pairs.stride(0), words, absmax, nested_absmax, nested_code, nested_offset, code, y,
        sums, tickets, experts, m, n, k,
    )  # fmt: skip


def multiply(
    plan: Plan, lists: torch.Tensor | None, tiles_at: int, num_m: int, x: torch.Tensor, w: Matrices,
    b: torch.Tensor | None, u: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor, slots: int,
    expert: torch.Tensor | int = 0,
) -> None:  # fmt: skip
    """Fills y from x (rows aligned) and W, by a "gemm" or a "skinny".

    A routing's lists, with ``num_m`` tiles from ``tiles_at`` on, say which rows go to which matrix; without lists all go to one.
    """
    x = _in_pieces_of_16_bytes(x)
    experts, *sizes = w.shape
    n, k = sizes if w.transposed else sizes[::-1]  # as stored
    words, m = w.packed.view(torch.int32), x.shape[0]
    absmax, nested_absmax, nested_code, nested_offset, code = w.scales
    expert_ptr, number = (expert, 0) if isinstance(expert, torch.Tensor) else (None, expert)
    if plan.kind == "skinny":
        plan.launch(
            (plan.across, num_m * plan.parts),
            lists, tiles_at, expert_ptr, number, x, x.stride(0),
            words, absmax, nested_absmax, nested_code, nested_offset, code,
            *strided(bias, 2), y, experts, m, n, k, slots,
        )  # fmt: skip
    else:
        plan.launch(
            (num_m * plan.across,),
            lists, tiles_at, expert_ptr, number, x, x.stride(0),
            words, absmax, nested_absmax, nested_code, nested_offset, code,
            *strided(b, 3), u, *strided(bias, 2), y, experts, m, n, k, slots, num_m,
        )  # fmt: skip


def _in_pieces_of_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy: that rows can be copied 16 bytes at a time Triton knows from a stride in multiples of 16 alone."""
    return x.clone(memory_format=torch.contiguous_format) if x.stride(0) % 16 else x
