"""What the launches of forward and backward pass share: the problem, numbers and tensors as kernels take them, tiles.

Many queries are cut into tiles: on Hopper GPUs by kernels of their own where these are faster and tensor descriptors can read
everything, else by those that run on every GPU.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernelbook import gluon_names, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels
from kernelbook.attention.kernels import Rows
from kernelbook.launch import Block, Descriptor, Launch, block, cdiv, launcher
from kernelbook.memory import empty, tl_accumulator
from kernelbook.tensors import aligned_steps, precision, strided

try:  # Gluon is experimental: where Triton has changed it, the plain kernels do the work
    from triton.experimental.gluon.language import NVMMASharedLayout as NVMMASharedLayout

    from kernelbook.attention import kernels_hopper as kernels_hopper

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


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What decides what a call launches: its sizes, and of other arguments whether they are there."""

    b: int
    h: int
    h_kv: int
    group: int  # query heads that share a key head
    n: int
    s: int  # keys that a sequence has, or has room for
    d: int
    page: int  # slots of a page; 0: keys lie together
    dtype: torch.dtype
    causal: bool
    lengths: bool
    boundaries: int  # how many packed sequences have, which lie one after another in n; 0: they are not packed
    window: int | None
    sinks: bool
    softcap: float  # in base 2; 0: none
    precision: str
    properties: runtime.DeviceProperties
    tma_reads: bool = False  # whether kernels for tiles read by tensor descriptor
    hopper: bool = False  # whether they may be those for Hopper GPUs

    @property
    def packed(self) -> bool:
        return self.boundaries > 0


def problem(
    q: Tensor, k: Tensor, lengths: Any, sinks: Any, causal: bool, window: int | None, softcap: Any,
    table: Any = None, cu_seqlens: Any = None,
) -> Problem:  # fmt: skip
    """The problem of a call, in which with a ``table`` the keys lie in pages (P, H_kv, page, D)."""
    (b, h, n, d), (_, h_kv, s, _), page = q.shape, k.shape, 0
    if table is not None:
        page, s = s, s * table.shape[1]
    # A window that holds all keys is none; kernels add to it in 32 bits.
    window = None if window is None or window >= s else window
    return Problem(
        b, h, h_kv, h // h_kv, n, s, d, page, q.dtype, causal, lengths is not None,
        0 if cu_seqlens is None else cu_seqlens.shape[0], window,
        sinks is not None, 0.0 if softcap is None else softcap * LOG2_E, _precision(q), runtime.properties(q.device),
    )  # fmt: skip


def _precision(q: Tensor) -> str:
    """How float32 is multiplied. Three tf32 products have float32's error on tensor cores; not every GPU has them."""
    properties = runtime.properties(q.device)
    if q.dtype != torch.float32 or properties.is_amd or not properties.has_tensor_cores:
        return "ieee"
    return "tf32" if precision(torch.float32) == "tf32" else "tf32x3"


# --- tensors and numbers as kernels take them ------------------------------------------------------------------------


def like(tensor: Tensor) -> Tensor:
    """New memory in the tensor's shape with contiguous columns and, where it is dense and has such too, its strides."""
    if not tensor.is_contiguous():
        kept = torch.empty_like(tensor)
        if kept.stride(3) == 1:
            return kept
    return empty(tensor.shape, tensor.dtype, tensor)


def is_readable(tensor: Tensor) -> bool:
    """Whether rows lie one after the other, each in aligned pieces of 16 elements."""
    b, h, n, within = tensor.stride()
    return within == 1 and not (b | h | n) % 16 and min(b, h, n) > 0 and tensor.data_ptr() % 16 == 0


def readable(tensor: Tensor) -> Tensor:
    """The tensor with rows in aligned pieces of 16 elements; one that lies otherwise is copied.

    That costs far less than reading it element by element for each tile.
    """
    if is_readable(tensor):
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

    def scale_queries(self, q: Tensor) -> Tensor:
        return q if self.queries == 1 else q * self.queries


def scaling(q: Tensor, scale: float | None) -> Scaling:
    """``scale=None``: 1 / sqrt(D)."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if q.dtype == torch.float64:
        return Scaling(scale * LOG2_E, 1.0, 1.0, scale, 1 / LOG2_E)
    if scale * LOG2_E >= MIN_SCALE:
        return Scaling(1.0, scale * LOG2_E, scale, 1.0, 1.0)
    sign, size = (-1.0, -scale) if -scale * LOG2_E >= MIN_SCALE else (0.0, 1.0)
    return Scaling(sign, size * LOG2_E, size, sign, 1.0)


def kernel_arg(block: Block | None, tensor: Tensor) -> Rows | Descriptor:
    """A tensor as a kernel's argument: by pointer and strides, or by tensor descriptor where it has a block."""
    return Rows(tensor, *tensor.stride()) if block is None else Descriptor(tensor, block)


# --- tiles ----------------------------------------------------------------------------------------------------------


def with_tma(p: Problem, gluon: bool, read: tuple[Tensor, ...], results_like: tuple[Tensor, ...]) -> Problem:
    """The problem, with what tensor descriptors (TMA) can do.

    ``read``: what kernels read, or aligned copies of it in pieces; ``results_like``: tensors that the results are like.
    """
    # They would read what lies beyond a length; and where they can read, tiles are others.
    there = p.properties.prefers_tma and not p.lengths and not p.properties.same_bits
    reads = there and _fit_descriptors(*(t for t in read if is_readable(t)))
    writes = there and _fit_descriptors(*(torch.empty_like(t, device="meta") for t in results_like))
    hopper = gluon and reads and writes and p.window is None and not p.softcap
    return dataclasses.replace(p, tma_reads=reads, hopper=hopper)


def _fit_descriptors(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can read tensors that begin on 16 bytes: contiguous rows, all on a multiple of 16 bytes."""
    return all(
        aligned_steps(t.stride(), t.element_size())
        and max(t.stride()) * t.element_size() < 2**40  # a descriptor has no room for more
        for t in tensors
    )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """A kernel of which each program owns a tile, and the blocks in which it takes tensors; without one by pointer."""

    launch: Launch
    grid: tuple[int]
    queries: Block | None
    keys: Block | None
    results: Block | None
    vectors: Block | None  # of lse and delta
    sizes: tuple[int, ...]
    window: int | None  # 0: none; None: a kernel for Hopper, which takes neither lengths nor a window
    rest: tuple[Block, Block] | None = None  # of features beyond these blocks: queries, keys

    def mask_args(self, lengths: Tensor | None, cu_seqlens: Tensor | None, stand_in: Tensor) -> tuple[Any, ...]:
        """Lengths or boundaries, and window, as the kernel's arguments."""
        window = () if self.window is None else (self.window,)
        if cu_seqlens is not None:
            return cu_seqlens, cu_seqlens.stride(0), cu_seqlens.shape[0] - 1, *window
        if self.window is None:
            return (None,) * 3
        return *strided(lengths, 1, stand_in), 0, self.window

    def sink_args(self, sinks: Tensor | None, stand_in: Tensor) -> tuple[Any, ...]:
        """Sinks as the arguments of a forward kernel."""
        if self.window is not None:
            return strided(sinks, 1, stand_in)
        return (None, None) if sinks is None else (sinks, sinks.stride(0))

    def rest_args(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Any, ...]:
        """The same tensors for features beyond the blocks, as the arguments of a forward kernel for Hopper."""
        if self.window is not None:
            return ()
        if self.rest is None:
            return (None,) * 4
        queries, keys = self.rest
        return Descriptor(q, queries), Descriptor(k, keys), Descriptor(v, keys), Descriptor(o, queries)


def hopper_config(kernel: str, p: Problem) -> Any:
    """The tiles of a kernel for Hopper GPUs; ``None`` where one that runs on every GPU is to be used."""
    return kernels_hopper.config(kernel, p.d, p.dtype.itemsize, p.s, p.causal, p.properties) if p.hopper else None


def section(p: Problem, walked: int, heads: int) -> int:
    return kernels.section(walked, p.b * heads, p.d, p.dtype.itemsize, p.causal, p.properties)


def plain_tiles(
    name: str, kernel: Any, p: Problem, rows: int, heads: int, walked: int, *n_padded: int, **constants: Any
) -> Tiles:
    """A kernel that runs on every GPU: its programs own ``rows`` of ``heads`` and walk over ``walked`` others."""
    config = kernels.config(name, p.d, p.dtype.itemsize, p.tma_reads, p.properties, p.packed)
    block_m, block_n, width = (config.kwargs[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    launch = launcher(
        kernel, GROUP=p.group, CAUSAL=p.causal, LENGTHS=p.lengths, PACKED=p.packed, WINDOW=p.window is not None,
        **constants, SOFTCAP=p.softcap, D=p.d, BOXES=p.tma_reads,
        ACC=tl_accumulator(p.dtype), PRECISION=p.precision, **config.kwargs,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    queries, keys = (block(1, 1, side, width) if p.tma_reads else None for side in (block_m, block_n))
    grid = cdiv(rows, block_n if name == "dkdv" else block_m) * p.b * heads
    sizes = p.b, p.h, p.n, p.s, *n_padded, section(p, walked, heads)
    return Tiles(launch, (grid,), queries, keys, None, None, sizes, p.window or 0)


def hopper_tiles(kernel: Any, config: Any, p: Problem, grid: int, sizes: tuple[int, ...], **constants: Any) -> Tiles:
    """A kernel for Hopper GPUs; ``sizes`` come after those that all of them take."""
    blocks, width = config.kwargs, config.kwargs["BLOCK_D"]
    launch = launcher(kernel, GROUP=p.group, CAUSAL=p.causal, **constants, **blocks, num_warps=config.num_warps)
    layout = NVMMASharedLayout(min(128, 2 * width), 16, rank=4)
    own = block(1, 1, blocks["ROWS"], width, layout=layout)
    if "BLOCK_M" in blocks:  # programs own keys
        queries, keys = block(1, 1, blocks["BLOCK_M"], width, layout=layout), own
        vectors = block(blocks["BLOCK_M"], layout=NVMMASharedLayout(0, 32, rank=1))
    else:
        queries, keys, vectors = own, block(1, 1, blocks["BLOCK_N"], width, layout=layout), None
    rest = None
    if more := blocks.get("REST"):
        layout = NVMMASharedLayout(2 * more, 16, rank=4)
        rest = block(1, 1, blocks["ROWS"], more, layout=layout), block(1, 1, blocks["BLOCK_N"], more, layout=layout)
    return Tiles(launch, (grid,), queries, keys, own, vectors, (p.b, p.h, p.n, p.s, *sizes), None, rest)
