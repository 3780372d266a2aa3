"""What a call is made of, each with its plan and its launch: grouped GEMM, LoRA shrink, grouped wgrad, and the sum over slots."""

import dataclasses
from typing import Any, NamedTuple

import torch

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.launch import Block, Descriptor, Launch, block, cdiv, launcher
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.moe_lora import kernels
from kernelbook.moe_lora.routing import Routing, tiles_of_height
from kernelbook.packed import products
from kernelbook.packed.products import Matrices
from kernelbook.tensors import has_aligned_rows, precision, strided

__all__ = [
    "SORTED", "GemmPlan", "Layout", "Lora", "ShrinkPlan", "Step", "combine", "combine_step", "factors", "factors_step",
    "gemm", "gemm_plan", "shrink", "shrink_plan", "tiled", "wgrad", "wgrad_step",
]  # fmt: skip


class Layout(NamedTuple):
    """How rows lie: (R, N) in expert order if ``grouped``; otherwise (R / slots, N), row p // slots for pair p."""

    grouped: bool
    slots: int


SORTED = Layout(True, 1)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Step:
    """A launch, but for its tensors."""

    launch: Launch
    grid: tuple[int, ...]
    last: tuple[int, ...]  # the numbers that come last

    def __call__(self, *args: Any) -> None:
        self.launch(self.grid, *args, *self.last)


def tiled(kernel: Any, tiles: kernels.Tiles, **constants: Any) -> Launch:
    return launcher(kernel, **constants, **tiles.kwargs, num_warps=tiles.warps, num_stages=tiles.stages)


# --- the sum over a token's slots -----------------------------------------------------------------------------------


def combine_step(
    rows: int, slots: int, columns: int, dtype: torch.dtype, *, grouped: bool = False, has_gates: bool = False,
    with_out: bool = True, with_dgates: bool = False,
) -> Step:  # fmt: skip
    """Of rows (R, C) of pairs, ``grouped``: in expert order; weighted by gates; or their inner products with x; or both."""
    tiles = kernels.slots_tiles(slots, columns)
    launch = tiled(
        kernels._moe_lora_fwd_slots_kernel, tiles, SLOTS=slots, GROUPED=grouped, HAS_GATES=has_gates, WITH_OUT=with_out,
        WITH_DGATES=with_dgates, ACC=tl_accumulator(dtype),
    )  # fmt: skip
    # The inner products go over all columns, so that one program has to see them.
    across = 1 if with_dgates else cdiv(columns, tiles.kwargs["BLOCK_C"])
    return Step(launch, (rows // slots, across), (columns,))


def combine(
    step: Step, values: torch.Tensor, out: torch.Tensor | None, gates: torch.Tensor | None = None,
    order: torch.Tensor | None = None, x: torch.Tensor | None = None, dgates: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fills out (R / slots, C), and if there is an x (R / slots, C) dgates (R,). ``order``: of values in expert order."""
    step(order, values, None if gates is None else gates.contiguous(), out, *strided(x, 2), dgates)


# --- LoRA shrink ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ShrinkPlan:
    """U = scaling X A^T, (R, padded rank) in expert order."""

    step: Step
    tiles_at: int
    copies_a: bool
    shape: tuple[int, int]  # of U
    split_k: int  # programs that share a sum
    combine: Step | None  # adds up their shares


def shrink_plan(routing: Routing, x: torch.Tensor, layout: Layout, a: torch.Tensor) -> ShrinkPlan:
    rows, (experts, rank, k) = routing.rows, a.shape
    padded = kernels.padded_rank(rank)
    tiles = kernels.shrink_tiles(rows, experts, k, padded, x.element_size(), runtime.properties(x.device))
    block_k, split = tiles.kwargs["BLOCK_K"], tiles.kwargs["SPLIT"]
    launch = tiled(
        kernels._moe_lora_fwd_shrink_kernel, tiles, X_GROUPED=layout.grouped, ACC=tl_accumulator(x.dtype),
        PRECISION=precision(x.dtype), EVEN_K=k % block_k == 0, r=rank, RANK=padded,
    )  # fmt: skip
    tiles_at, num_m = tiles_of_height(rows, experts, tiles.height)
    return ShrinkPlan(
        step=Step(launch, (num_m, padded // tiles.kwargs["BLOCK_R"], split), (experts, k, layout.slots)),
        tiles_at=tiles_at, copies_a=_needs_copy(a), shape=(rows, padded), split_k=split,
        combine=combine_step(rows * split, split, padded, accumulator(x.dtype)) if split > 1 else None,
    )  # fmt: skip


def _needs_copy(factor: torch.Tensor) -> bool:
    """Whether neither rows nor columns are contiguous (PEFT's B): a tile would read a sector for each element."""
    return 1 not in factor.stride()[1:]


def shrink(
    plan: ShrinkPlan, routing: Routing, x: torch.Tensor, a: torch.Tensor, u: torch.Tensor, scaling: float
) -> None:
    """Fills u from x and a (E, r, K)."""
    a = a.contiguous() if plan.copies_a else a
    rows, padded = plan.shape
    shares = u if plan.combine is None else empty((rows * plan.split_k, padded), accumulator(x.dtype), x)
    stride_e, stride_r, stride_k = a.stride()
    exact = x.dtype == torch.float64  # then scaled behind the kernel, which takes its scalars in float32
    factor = 1.0 if exact else scaling
    plan.step(routing.lists, plan.tiles_at, x, *x.stride(), a, stride_e, stride_k, stride_r, shares, factor)
    if plan.combine is not None:
        combine(plan.combine, shares, u)
    if exact:
        u.mul_(scaling)


# --- grouped GEMM ---------------------------------------------------------------------------------------------------


class Lora(NamedTuple):
    """a (E, r, K), b (E, N, r), and U (R, padded rank), which is filled; ``None`` where nobody wants it."""

    a: torch.Tensor
    b: torch.Tensor
    u: torch.Tensor | None
    scaling: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _RowsKernel:
    """The kernel of this room."""

    launch: Launch
    grid: tuple[int]
    format: str  # of W
    w_by_row: bool
    b_by_row: bool
    x_block: Block | None  # of a tensor descriptor; None: by pointers
    w_block: Block | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GemmPlan:
    """Y = X W[e] + U B[e]^T + bias[e] for the rows of each expert."""

    kernel: _RowsKernel | products.Plan  # the latter for packed matrices alone
    tiles_at: int
    num_m: int  # tiles
    slots: int
    shrink: ShrinkPlan | None  # what makes U first; None: the kernel itself, or there is none
    copies_x: bool


def gemm_plan(
    routing: Routing, x: torch.Tensor, layout: Layout, w: torch.Tensor | Matrices, a: torch.Tensor | None,
    b: torch.Tensor | None, has_bias: bool, y_grouped: bool, strategy: str,
) -> GemmPlan:  # fmt: skip
    rows, (experts, k, n), rank = routing.rows, w.shape, 0 if a is None else a.shape[1]
    properties, wide_x = runtime.properties(x.device), has_aligned_rows(x)
    found = None
    if isinstance(w, Matrices) and strategy != "fused" and w.packed.data_ptr() % 16 == 0:
        found = products.plan(
            rows, (experts, k, n) if w.transposed else (experts, n, k), w.transposed, x.dtype, w.block_size,
            w.nested[0] is not None, rank=rank, has_bias=has_bias, x_grouped=layout.grouped, y_grouped=y_grouped,
            routed=True, properties=properties,
        )  # fmt: skip
    kernel: _RowsKernel | products.Plan
    if found is not None:
        kernel, height, fused, copies_x = found, found.height, False, not wide_x
    else:
        # A gradient may come expanded; a copy takes less time than to read it an element at a time.
        copies_x = not wide_x and k > 0 and (x.stride(1) != 1 or k * x.element_size() % 16 == 0)
        b_by_row = b is not None and b.stride(1) == 1 and b.stride(2) != 1
        fused = rank > 0 and _is_fused(strategy, rows, w.shape, rank, x.dtype, properties, b_by_row)
        wide_x = wide_x or (copies_x and k * x.element_size() % 16 == 0)
        kernel, height = _rows_kernel(
            rows, x.dtype, layout, wide_x, w, fused, rank, b_by_row and not fused, y_grouped, properties
        )
    tiles_at, num_m = tiles_of_height(rows, experts, height)
    shrink = None if a is None or fused else shrink_plan(routing, x, layout, a)
    return GemmPlan(kernel, tiles_at, num_m, layout.slots, shrink, copies_x)


def _is_fused(
    strategy: str, rows: int, shape: Any, rank: int, dtype: torch.dtype, properties: runtime.DeviceProperties,
    copies_b: bool,
) -> bool:  # fmt: skip
    """Whether the low-rank product is added by the kernel that multiplies with W, which ``copies_b``, or not."""
    if rank > kernels.FUSED_RANK or dtype == torch.float64 or not properties.has_tensor_cores:
        return False
    if strategy == "auto":
        strategy = kernels.choose_strategy(rows, *shape, rank, properties, copies_b)
    return strategy == "fused"


def _rows_kernel(
    rows: int, dtype: torch.dtype, layout: Layout, wide_x: bool, w: torch.Tensor | Matrices, fused: bool, rank: int,
    b_by_row: bool, y_grouped: bool, properties: runtime.DeviceProperties,
) -> tuple[_RowsKernel, int]:  # fmt: skip
    """-> the kernel, and the rows of its tiles."""
    experts, k, n = w.shape
    block_size, scale, access, form = 0, "", "narrow", "pointers"
    if isinstance(w, Matrices):
        by_row, form = w.transposed, "elements"
        block_size, scale = w.block_size, "float32" if w.nested[0] is None else "nested"
        if dtype.itemsize <= 4 and w.packed.data_ptr() % 16 == 0 and (n if by_row else k) % 32 == 0:
            # Turing has no instruction that multiplies pairs of bfloat16.
            pairs = properties.is_nvidia and (dtype == torch.float16 or properties.capability >= 80)
            access, form = "packed", "permute" if dtype.itemsize == 2 and pairs else "gather"
    else:
        by_row = not _fits_descriptor(w.transpose(1, 2))
        if wide_x and (not by_row or _fits_descriptor(w)):
            access, form = ("boxes", "boxes") if properties.prefers_tma else ("wide", "pointers")
        else:
            by_row = w.stride(1) != 1 or w.stride(2) == 1
    tiles = kernels.rows_tiles(
        rows, experts, kernels.padded_rank(rank) if fused else 0, dtype.itemsize, access, properties
    )
    block_k, block_n = tiles.kwargs["BLOCK_K"], tiles.kwargs["BLOCK_N"]
    launch = tiled(
        kernels._moe_lora_fwd_rows_kernel, tiles, FORMAT=form, BLOCK_SIZE=block_size, SCALE=scale, W_BY_ROW=by_row,
        B_BY_ROW=b_by_row, X_SLOTS=0 if layout.grouped else layout.slots, Y_GROUPED=y_grouped, PRECISION=precision(dtype),
        EVEN_K=k % block_k == 0, r=rank,
    )  # fmt: skip
    _, num_m = tiles_of_height(rows, experts, tiles.height)
    return _RowsKernel(
        launch, (num_m * cdiv(n, block_n),), form, by_row, b_by_row,
        x_block=block(tiles.height, block_k) if form == "boxes" and layout.grouped else None,
        w_block=block(1, *((block_k, block_n) if by_row else (block_n, block_k))) if form == "boxes" else None,
    ), tiles.height  # fmt: skip


def _fits_descriptor(w: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read it: 16-bit, aligned, its last dimension contiguous."""
    return w.element_size() == 2 and w.numel() > 0 and has_aligned_rows(w)


def gemm(
    plan: GemmPlan, routing: Routing, x: torch.Tensor, w: torch.Tensor | Matrices, lora: Lora | None,
    bias: torch.Tensor | None, y: torch.Tensor,
) -> None:  # fmt: skip
    """Fill y (R, N), and lora's U if there is one."""
    a = b = u = None
    scaling = 0.0
    if plan.copies_x:
        x = x.clone(memory_format=torch.contiguous_format)
    if lora is not None:
        a, b, u, scaling = lora
        if plan.shrink is not None:
            u = empty(plan.shrink.shape, x.dtype, x) if u is None else u
            shrink(plan.shrink, routing, x, a, u, scaling)
    kernel, (experts, k, n) = plan.kernel, w.shape
    if not isinstance(kernel, _RowsKernel):
        assert isinstance(w, Matrices)
        b = b.contiguous() if b is not None and _needs_copy(b) else b
        products.multiply(kernel, routing.lists, plan.tiles_at, plan.num_m, x, w, b, u, bias, y, plan.slots)
        return
    scales: tuple[torch.Tensor | None, ...] = (None,) * 5
    elements: Any
    strides = 0, 0
    if isinstance(w, Matrices):
        elements, scales = w.packed if kernel.format == "elements" else w.packed.view(torch.int32), w.scales
    else:
        elements = w if kernel.w_by_row else w.transpose(1, 2)
        if kernel.w_block is not None:
            elements = Descriptor(elements, kernel.w_block)
        else:
            elements = elements if elements.stride(2) == 1 else elements.contiguous()
            strides = elements.stride()[:2]
    factors = None if a is None or plan.shrink is not None else a.contiguous()
    if b is not None:
        b = (b.transpose(1, 2) if kernel.b_by_row else b).contiguous()
    kernel.launch(
        kernel.grid,
        routing.lists, plan.tiles_at, x, x.stride(0), None if kernel.x_block is None else Descriptor(x, kernel.x_block),
        elements, *strides, *scales, factors, b, u, None if bias is None else bias.contiguous(), y, scaling, experts, k, n,
    )  # fmt: skip


# --- grouped wgrad --------------------------------------------------------------------------------------------------


def wgrad_step(
    routing: Routing, left: Layout, right: Layout, like: torch.Tensor, p: int, q: int, has_gates: bool, *,
    exact: bool = False,
) -> Step | None:  # fmt: skip
    """For a result (E, P, Q) from rows like ``like``. ``exact``: float32 as it is, never tf32."""
    if p * q == 0:
        return None
    experts, dtype = routing.num_experts, like.dtype
    tiles = kernels.wgrad_tiles(routing.rows, experts, p, dtype.itemsize, runtime.properties(like.device))
    launch = tiled(
        kernels._moe_lora_bwd_wgrad_kernel, tiles, ACC=tl_accumulator(dtype),
        PRECISION="ieee" if exact else precision(dtype), P=p,
        L_GROUPED=left.grouped, Z_GROUPED=right.grouped, HAS_GATES=has_gates,
    )  # fmt: skip
    grid = (experts, cdiv(p, tiles.kwargs["BLOCK_P"]), cdiv(q, tiles.kwargs["BLOCK_Q"]))
    return Step(launch, grid, (q, left.slots, right.slots))


def wgrad(
    step: Step, routing: Routing, left: torch.Tensor, right: torch.Tensor, gates: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Fills out (E, P, Q), of any strides: the sum over an expert's rows of left[:, :P]^T right, each with its gate."""
    gates = None if gates is None else gates.contiguous()
    rows = (left, *left.stride(), right, *right.stride())
    step(routing.lists, 2 * routing.rows, *rows, gates, out, *out.stride())


def factors_step(
    routing: Routing, x: torch.Tensor, x_layout: Layout, dy_layout: Layout, rank: int, n: int, has_gates: bool
) -> Step:
    """For dA (E, r, K) and dB (E, N, r) in one launch."""
    experts, k = routing.num_experts, x.shape[1]
    tiles = kernels.wgrad_tiles(routing.rows, experts, rank, x.element_size(), runtime.properties(x.device))
    launch = tiled(
        kernels._moe_lora_bwd_factors_kernel, tiles, ACC=tl_accumulator(x.dtype), PRECISION=precision(x.dtype), P=rank,
        X_GROUPED=x_layout.grouped, DY_GROUPED=dy_layout.grouped, HAS_GATES=has_gates,
    )  # fmt: skip
    block_q = tiles.kwargs["BLOCK_Q"]
    grid = (experts, cdiv(rank, tiles.kwargs["BLOCK_P"]), cdiv(k, block_q) + cdiv(n, block_q))
    return Step(launch, grid, (k, n, x_layout.slots, dy_layout.slots))


def factors(
    step: Step, routing: Routing, d: torch.Tensor, u: torch.Tensor, x: torch.Tensor, dy: torch.Tensor,
    gates: torch.Tensor | None, da: torch.Tensor, db: torch.Tensor,
) -> None:  # fmt: skip
    """Fills da and db, contiguous, from D and U (R, padded rank) in expert order."""
    gates = None if gates is None else gates.contiguous()
    step(routing.lists, 2 * routing.rows, d, u, d.stride(0), x, *x.stride(), dy, *dy.stride(), gates, da, db)
