"""Which kernel a call of attention launches, in which tiles, and how that kernel is given tensors.

Few queries have a kernel that splits their keys over programs. Many are cut into tiles: on Hopper GPUs by kernels of their
own where these are faster and tensor descriptors can read everything, else by those that run on every GPU.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernelbook import gluon_names, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode, kernels_same_bits
from kernelbook.launch import Block, Descriptor, Launch, block, cdiv, launcher
from kernelbook.memory import tl_accumulator
from kernelbook.observed import is_aligned
from kernelbook.tensors import aligned_steps, allows_tf32, strided

try:  # Gluon is experimental: where Triton has changed it, the plain kernels do the work
    from triton.experimental.gluon.language import NVMMASharedLayout

    from kernelbook.attention import kernels_hopper, kernels_hopper_128

    HAS_GLUON = gluon_names.USABLE
except (ImportError, AttributeError):
    HAS_GLUON = False

LOG2_E = math.log2(math.e)
# Kernels take the scale in base 2, in float32. What is smaller is zero.
MIN_SCALE = torch.finfo(torch.float32).tiny


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Within the context the kernels that run on every GPU are used on Hopper too, to compare the two."""
    global HAS_GLUON
    before, HAS_GLUON = HAS_GLUON, False
    try:
        yield
    finally:
        HAS_GLUON = before


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """What decides what a call launches: its sizes, and of other arguments whether they are there."""

    b: int
    h: int
    h_kv: int
    n: int
    s: int  # keys that a sequence has, or has room for
    d: int
    dtype: torch.dtype
    causal: bool
    lengths: bool
    window: int | None
    page: int  # slots of a page; 0: keys lie together
    precision: str
    properties: runtime.DeviceProperties
    sinks: bool = False
    softcap: float = 0.0  # in base 2; 0: none

    @property
    def group(self) -> int:
        return self.h // self.h_kv


def problem(
    q: Tensor, k: Tensor, causal: bool, lengths: Tensor | None, window: int | None, precision: str,
    table: Tensor | None = None, *, sinks: Tensor | None = None, softcap: float | None = None,
) -> Problem:  # fmt: skip
    """The problem of a call, in which with a ``table`` the keys lie in pages (P, H_kv, page, D)."""
    (b, h, n, d), (_, h_kv, s, _), page = q.shape, k.shape, 0
    if table is not None:
        page, s = s, s * table.shape[1]
    properties = runtime.properties(q.device)
    return Problem(
        b, h, h_kv, n, s, d, q.dtype, causal, lengths is not None, window, page, precision, properties,
        sinks is not None, 0.0 if softcap is None else softcap * LOG2_E,
    )  # fmt: skip


def precision(q: Tensor | None) -> str:
    """How float32 is multiplied. Three tf32 products have float32's error on tensor cores; not every GPU has them."""
    if q is None or q.dtype != torch.float32:
        return "ieee"
    properties = runtime.properties(q.device)
    if properties.is_amd or not properties.has_tensor_cores:
        return "ieee"
    return "tf32" if allows_tf32() else "tf32x3"


# --- tensors and numbers as kernels take them ------------------------------------------------------------------------


def are_in_pieces(strides: tuple[int, ...]) -> bool:
    """Whether all rows of a tensor begin on multiples of 16 elements, one after the other."""
    b, h, n, within = strides
    return within == 1 and not (b | h | n) % 16 and min(b, h, n) > 0


def readable(tensor: Tensor) -> Tensor:
    """The tensor with rows in aligned pieces of 16 elements; one that lies otherwise is copied.

    That costs far less than reading it element by element for each tile.
    """
    if are_in_pieces(tensor.stride()) and is_aligned(tensor):
        return tensor
    d = tensor.shape[3]
    copy = tensor.new_empty(*tensor.shape[:3], cdiv(d, 16) * 16)[..., :d]
    return copy.copy_(tensor)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Scaling:
    """What scores and gradients are multiplied by.

    Kernels find the largest score before they scale, so they are given a scale above zero; and they take it in float32, so
    that for float64 it goes into the queries.
    """

    queries: float  # beforehand
    scores: float  # in base 2
    gradients: float
    dq: float  # afterwards
    dk: float

    def of_queries(self, q: Tensor) -> Tensor:
        return q if self.queries == 1 else q * self.queries


def scaling(dtype: torch.dtype, scale: float) -> Scaling:
    if dtype == torch.float64:
        return Scaling(scale * LOG2_E, 1.0, 1.0, scale, 1 / LOG2_E)
    if scale * LOG2_E >= MIN_SCALE:
        return Scaling(1.0, scale * LOG2_E, scale, 1.0, 1.0)
    sign, size = (-1.0, -scale) if -scale * LOG2_E >= MIN_SCALE else (0.0, 1.0)
    return Scaling(sign, size * LOG2_E, size, sign, 1.0)


# --- few queries ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SplitKeys:
    """The kernel for few queries, whose keys are split over programs."""

    launch: Launch
    grid: tuple[int, int]
    partial_shape: tuple[int] | None  # of what the programs of a tile leave for the last to merge; None: there is one


def split_keys(p: Problem, with_lse: bool) -> SplitKeys:
    """The plan is made for the number of keys rounded up to a multiple of 64, so that it serves a cache that grows."""
    if p.properties.same_bits:
        return same_bits(p, with_lse)
    keys = 64 * cdiv(p.s, 64)
    plan = kernels_decode.plan(p.b * p.h_kv, p.group * p.n, keys, p.d, p.dtype.itemsize, p.properties, p.page)
    launch = launcher(
        kernels_decode._flash_attention_decode_kernel, D=p.d, GROUP=p.group, CAUSAL=p.causal and p.n > 1,
        LENGTHS=p.lengths, WINDOW=p.window is not None, PAGE=p.page, SINKS=p.sinks, SOFTCAP=p.softcap, LSE=with_lse,
        ACC=tl_accumulator(p.dtype), PRECISION=p.precision, **plan.config.kwargs,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    )  # fmt: skip
    partial_shape = (plan.programs * plan.rows * (p.d + 1),) if plan.splits > 1 else None
    return SplitKeys(launch, (plan.tiles, plan.splits), partial_shape)


def same_bits(p: Problem, with_lse: bool) -> SplitKeys:
    """The kernel for any number of queries whose rows are the same bits in any batch. It takes what that of few queries does."""
    config = kernels_same_bits.config(p.d, p.dtype.itemsize, p.properties)
    rows, block_m, keys = p.group * p.n, config.kwargs["BLOCK_M"], 64 * cdiv(p.s, 64)
    tiles, parts = p.b * p.h_kv * cdiv(rows, block_m), 1
    if split := kernels_same_bits.splits(tiles, p.n, keys, p.properties):
        parts = cdiv(keys, kernels_same_bits.PART)
    kept = min(block_m, 1 << (rows - 1).bit_length())
    launch = launcher(
        kernels_same_bits._flash_attention_same_bits_kernel, D=p.d, GROUP=p.group, CAUSAL=p.causal, LENGTHS=p.lengths,
        WINDOW=p.window is not None, PAGE=p.page, SINKS=p.sinks, SOFTCAP=p.softcap, LSE=with_lse,
        ACC=tl_accumulator(p.dtype), PRECISION=p.precision, SPLIT=split, ROWS=kept, **config.kwargs,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return SplitKeys(launch, (tiles, parts), (tiles * parts * kept * (p.d + 2),) if split else None)


# --- many queries ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """How a kernel is given rows: by pointer and strides, or by tensor descriptor, in blocks."""

    block: Block | None = None

    def of(self, tensor: Tensor) -> tuple[Any, ...]:
        """The tensor as the kernel's arguments; Gluon's kernels, whose blocks have a layout, take no strides."""
        if self.block is None:
            return (tensor, *tensor.stride())
        descriptor = Descriptor(tensor, self.block)
        return (descriptor, 0, 0, 0, 0) if self.block.layout is None else (descriptor,)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """A kernel of which each program owns a tile, and how it is given tensors."""

    launch: Launch
    grid: tuple[int]
    queries: Rows
    keys: Rows
    results: Rows
    vectors: Rows | None  # lse and delta; None: by pointer
    sizes: tuple[int, ...]
    window: int | None  # 0: none; None: the kernel takes neither lengths nor a window

    def vector(self, tensor: Tensor) -> Any:
        """lse or delta as the kernel's argument."""
        return tensor if self.vectors is None else self.vectors.of(tensor.view(-1))[0]

    def seen(self, lengths: Tensor | None, stand_in: Any) -> tuple[Any, ...]:
        """Lengths and window as the kernel's arguments."""
        return () if self.window is None else (*strided(lengths, 1, stand_in), self.window)

    def joining(self, sinks: Tensor | None, stand_in: Any) -> tuple[Any, ...]:
        """Sinks as the arguments of a forward kernel."""
        return () if self.window is None else strided(sinks, 1, stand_in)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Reach:
    """What tensor descriptors can do for a call."""

    reads: bool  # the arguments
    writes: bool  # the results


def reach(p: Problem, read: tuple[Tensor, ...], results_like: tuple[Tensor, ...]) -> Reach:
    """``read``: what kernels read, or aligned copies of it in pieces; ``results_like``: tensors that the results are like."""
    # They would read what lies beyond a length; and where they can read, tiles are others.
    there = p.properties.prefers_tma and not p.lengths and not p.properties.same_bits
    reads = there and _fit_descriptors(*(t for t in read if are_in_pieces(t.stride())))
    writes = there and _fit_descriptors(*(torch.empty_like(t, device="meta") for t in results_like))
    return Reach(reads, writes)


def _fit_descriptors(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can read tensors that begin on 16 bytes: contiguous rows, all on a multiple of 16 bytes."""
    return all(
        aligned_steps(t.stride(), t.element_size())
        and max(t.stride()) * t.element_size() < 2**40  # a descriptor has no room for more
        for t in tensors
    )


def forward(p: Problem, reach: Reach) -> Tiles:
    """The forward pass."""
    config = _hopper_config("fwd", p, reach)
    if config is None:
        return _plain("fwd", kernels._flash_attention_fwd_kernel, p, reach, p.n, p.h, p.s)
    rows = config.kwargs["ROWS"] * config.kwargs["WARPGROUPS"]
    grid, in_pairs = kernels_hopper.forward_grid(cdiv(p.n, rows), p.b * p.h, p.d, p.causal, p.properties.num_sms)
    kernel = kernels_hopper._flash_attention_fwd_hopper_kernel
    return _hopper(kernel, config, p, grid, (_section(p, p.s, p.h), int(in_pairs)))


def sinks_afterwards(p: Problem, tiles: Tiles) -> tuple[Launch, tuple[int]] | None:
    """The kernel that joins sinks to what ``tiles`` made, and its grid; ``None`` where there are none, or they are in it."""
    if not p.sinks or tiles.window is not None:
        return None
    config = kernels.SINKS_CONFIG
    launch = launcher(
        kernels._flash_attention_sinks_kernel, D=p.d, ACC=tl_accumulator(p.dtype), BLOCK_D=kernels.block_d(p.d),
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    return launch, (cdiv(p.n, config.kwargs["BLOCK_M"]) * p.b * p.h,)


def dkdv(p: Problem, reach: Reach) -> tuple[Tiles, int, int]:
    """-> the kernel for dk and dv, the rows that it wants of lse and delta, and over how many programs it splits a group.

    Each of these takes some of the query heads that share a key head, and has dk and dv of its own.
    """
    config = _hopper_config("dkdv", p, reach)
    if config is None:
        kernel = kernels._flash_attention_bwd_dkdv_kernel
        return _plain("dkdv", kernel, p, reach, p.s, p.h_kv, p.n, p.n), p.n, 1
    splits = kernels_hopper.parts(p.b * p.h_kv, p.s, p.group, p.d, p.properties.num_sms)
    n_padded, heads = cdiv(p.n, kernels_hopper.PADDING) * kernels_hopper.PADDING, p.h_kv * splits
    kernel, rows = kernels_hopper._flash_attention_bwd_dkdv_hopper_kernel, 2 * config.kwargs["ROWS"]
    if config.kwargs["BLOCK_D"] > 128:
        kernel, rows = kernels_hopper._flash_attention_bwd_dkdv_wide_hopper_kernel, config.kwargs["ROWS"]
    grid, sizes = cdiv(p.s, rows) * p.b * heads, (n_padded, _section(p, p.n, heads))
    return _hopper(kernel, config, p, grid, sizes, PARTS=splits), n_padded, splits


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddingUp:
    """How a kernel for dq, dk and dv adds up dq, in float32."""

    shape: tuple[int, int]  # of the sums
    counters: int
    sums: Rows | None = None  # None: by pointer, and it writes dq itself
    round: Launch | None = None  # the sums, to dq
    round_grid: tuple[int] = (0,)

    def of(self, dq: Tensor, sums: Tensor, turns: Tensor) -> tuple[Any, ...]:
        """dq, the sums and the counters as the kernel's arguments."""
        return (dq, *dq.stride(), sums, turns) if self.sums is None else (*self.sums.of(sums), turns)


def all_gradients(p: Problem, reach: Reach) -> tuple[Tiles, int, int, AddingUp] | None:
    """As ``dkdv``, for the kernel that computes dq too -> also how it adds up dq; ``None`` where two kernels are to be used."""
    config = None if p.causal and p.s < p.n else _hopper_config("bwd", p, reach)
    if config is None:
        return None
    num_sms, block_m, width = p.properties.num_sms, config.kwargs["BLOCK_M"], config.kwargs["BLOCK_D"]
    splits = kernels_hopper.parts(p.b * p.h_kv, p.s, p.group, p.d, num_sms)
    heads = p.b * p.h_kv * splits
    fitting = kernels.section(p.n, heads, p.d, p.dtype.itemsize, True, p.properties)
    section = kernels_hopper.all_gradients_section(heads, fitting, width, p.causal, num_sms)
    members = p.group // splits
    # Causal wide heads that share a key head: two kernels were measured faster.
    slower = width > 64 and p.causal and members > 1
    if slower or not kernels_hopper.programs_wait_little(heads, p.n, p.s, members, p.causal, section, block_m, num_sms):
        return None
    n_padded = cdiv(p.n, kernels_hopper.PADDING) * kernels_hopper.PADDING
    block_n, tiles_of_queries = 2 * config.kwargs["ROWS"], p.b * p.h * cdiv(p.n, block_m)
    constants = {"PARTS": splits, "RAGGED": not p.causal and p.s % block_n > 0}
    if width <= 64:
        kernel, constants["D"] = kernels_hopper._flash_attention_bwd_hopper_kernel, p.d
        adding_up = AddingUp((tiles_of_queries, block_m * width), tiles_of_queries)
    else:
        kernel, rounding = kernels_hopper_128._flash_attention_bwd_128_hopper_kernel, kernels_hopper_128.ROUND_CONFIG
        half = Rows(block(block_m, width // 2, layout=NVMMASharedLayout(128, 32, rank=2)))
        launch = launcher(
            kernels_hopper_128._flash_attention_bwd_round_kernel, D=p.d, BLOCK_M=block_m, BLOCK_D=width,
            **rounding.kwargs, num_warps=rounding.num_warps,
        )  # fmt: skip
        grid = (tiles_of_queries * block_m // rounding.kwargs["ROWS"],)
        adding_up = AddingUp((tiles_of_queries * block_m, width), 2 * tiles_of_queries, half, launch, grid)
    tiles = _hopper(kernel, config, p, cdiv(p.s, block_n) * heads, (n_padded, section), **constants)
    return tiles, n_padded, splits, adding_up


def dq(p: Problem, reach: Reach, n_padded: int) -> Tiles:
    """The kernel for dq."""
    config = _hopper_config("dq", p, reach)
    if config is None:
        return _plain("dq", kernels._flash_attention_bwd_dq_kernel, p, reach, p.n, p.h, p.s, n_padded)
    grid, sizes = cdiv(p.n, 2 * config.kwargs["ROWS"]) * p.b * p.h, (n_padded, _section(p, p.s, p.h))
    return _hopper(kernels_hopper._flash_attention_bwd_dq_hopper_kernel, config, p, grid, sizes)


def delta(p: Problem, n_padded: int, padded: bool) -> tuple[Launch, tuple[int]]:
    """The kernel for rowsum(o * do), and its grid."""
    config = kernels.DELTA_CONFIG
    launch = launcher(
        kernels._flash_attention_bwd_delta_kernel, D=p.d, ACC=tl_accumulator(p.dtype), PADDED=padded,
        BLOCK_D=kernels.block_d(p.d), **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    return launch, (cdiv(n_padded, config.kwargs["BLOCK_M"]) * p.b * p.h,)


def dsinks(p: Problem) -> Launch:
    """The kernel for the gradient of sinks, with a program a head."""
    config = kernels.DSINKS_CONFIG
    return launcher(
        kernels._flash_attention_bwd_sinks_kernel,
        ACC=tl_accumulator(p.dtype),
        **config.kwargs,
        num_warps=config.num_warps,
    )


def _section(p: Problem, walked: int, heads: int) -> int:
    return kernels.section(walked, p.b * heads, p.d, p.dtype.itemsize, p.causal, p.properties)


def _hopper_config(kernel: str, p: Problem, reach: Reach) -> Any:
    """The tiles of a kernel for Hopper GPUs; ``None`` where one that runs on every GPU is to be used."""
    if not (HAS_GLUON and reach.reads and reach.writes) or p.window is not None or p.softcap:
        return None
    return kernels_hopper.config(kernel, p.d, p.dtype.itemsize, p.s, p.causal, p.properties)


def _plain(
    name: str, kernel: Any, p: Problem, reach: Reach, rows: int, heads: int, walked: int, *n_padded: int
) -> Tiles:
    """A kernel that runs on every GPU: its programs own ``rows`` of ``heads`` and walk over ``walked`` others."""
    config = kernels.config(name, p.d, p.dtype.itemsize, reach.reads, p.properties)
    block_m, block_n, width = (config.kwargs[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    forward = {"SINKS": p.sinks} if name == "fwd" else {}
    launch = launcher(
        kernel, GROUP=p.group, CAUSAL=p.causal, LENGTHS=p.lengths, WINDOW=p.window is not None, **forward,
        SOFTCAP=p.softcap, D=p.d, BOXES=reach.reads,
        ACC=tl_accumulator(p.dtype), PRECISION=p.precision, **config.kwargs,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    queries, keys = (Rows(block(1, 1, rows, width) if reach.reads else None) for rows in (block_m, block_n))
    grid = cdiv(rows, block_n if name == "dkdv" else block_m) * p.b * heads
    sizes = p.b, p.h, p.n, p.s, *n_padded, _section(p, walked, heads)
    return Tiles(launch, (grid,), queries, keys, Rows(), None, sizes, p.window or 0)


def _hopper(kernel: Any, config: Any, p: Problem, grid: int, sizes: tuple[int, ...], **constants: Any) -> Tiles:
    """A kernel for Hopper GPUs; ``sizes`` come after those that all of them take."""
    blocks, width = config.kwargs, config.kwargs["BLOCK_D"]
    launch = launcher(kernel, GROUP=p.group, CAUSAL=p.causal, **constants, **blocks, num_warps=config.num_warps)
    layout = NVMMASharedLayout(min(128, 2 * width), 16, rank=4)
    own = Rows(block(1, 1, blocks["ROWS"], width, layout=layout))
    if "BLOCK_M" in blocks:  # programs own keys
        queries, keys = Rows(block(1, 1, blocks["BLOCK_M"], width, layout=layout)), own
        vectors = Rows(block(blocks["BLOCK_M"], layout=NVMMASharedLayout(0, 32, rank=1)))
    else:
        queries, keys, vectors = own, Rows(block(1, 1, blocks["BLOCK_N"], width, layout=layout)), None
    return Tiles(launch, (grid,), queries, keys, own, vectors, (p.b, p.h, p.n, p.s, *sizes), None)


# --- pages ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Append:
    """The kernel that writes new keys and values into their pages."""

    launch: Launch
    grid: tuple[int]  # no program where there is nothing to write, or nowhere
    sizes: tuple[int, ...]


def append(k: Tensor, k_pages: Tensor, block_table: Tensor) -> Append:
    """For new keys (B, H_kv, N, D)."""
    (b, h_kv, n, d), (pages, _, page, _), config = k.shape, k_pages.shape, kernels_decode.APPEND_CONFIG
    launch = launcher(
        kernels_decode._append_to_pages_kernel, PAGE=page, D=d, BLOCK_D=kernels.block_d(d), **config.kwargs,
        num_warps=config.num_warps,
    )  # fmt: skip
    grid = b * cdiv(h_kv * n, config.kwargs["BLOCK_R"]) if block_table.numel() and pages else 0
    return Append(launch, (grid,), (h_kv, n, page * block_table.shape[1], pages))
