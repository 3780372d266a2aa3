"""What a call is made of, each with its plan and its launch: grouped GEMM, LoRA shrink, grouped wgrad, and the sum over slots."""

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

# How rows lie is said by their number of slots: (R / slots, N), row p // slots for pair p; or (R, N) in expert order.
SORTED = 0


class Step(NamedTuple):
    """A launch, but for its tensors."""

    launch: Launch
    grid: tuple[int, ...]
    last: tuple[int, ...]  # the numbers that come last

    def __call__(self, *args: Any) -> None:
        self.launch(self.grid, *args, *self.last)


def tiled(kernel: Any, tiles: kernels.Tiles, **constants: Any) -> Launch:
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return launcher(kernel, repeatable=True, **constants, **tiles.kwargs, **options)


# --- the sum over a token's slots -----------------------------------------------------------------------------------


def combine_step(rows: int, slots: int, columns: int, dtype: torch.dtype, *, with_dgates: bool = False) -> Step:
    """Plan the sum over slots of rows (R, C) of pairs."""
    tiles = kernels.slots_tiles(slots, columns)
    launch = tiled(kernels._moe_lora_fwd_slots_kernel, tiles, SLOTS=slots, ACC=tl_accumulator(dtype))
    # The inner products go over all columns, so that one program has to see them.
    across = 1 if with_dgates else cdiv(columns, tiles.kwargs["BLOCK_C"])
    return Step(launch, (rows // slots, across), (columns,))


def combine(
    step: Step, values: torch.Tensor, out: torch.Tensor | None, gates: torch.Tensor | None = None,
    order: torch.Tensor | None = None, x: torch.Tensor | None = None, dgates: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill out (R / slots, C) with sums of the values (R, C), each with its gate; and dgates (R,) with inner products with x.

    ``order``: of values in expert order.
    """
    step(order, values, None if gates is None else gates.contiguous(), out, *strided(x, 2), dgates)


# --- LoRA shrink ----------------------------------------------------------------------------------------------------


class ShrinkPlan(NamedTuple):
    """U = scaling X A^T, (R, padded rank) in expert order."""

    step: Step
    tiles_at: int
    shape: tuple[int, int]  # of U
    split_k: int  # programs that share a sum
    combine: Step | None  # adds up their shares


def shrink_plan(routing: Routing, x: torch.Tensor, layout: int, a: torch.Tensor) -> ShrinkPlan:
    rows, (experts, rank, k) = routing.rows, a.shape
    padded = kernels.padded_rank(rank)
    tiles = kernels.shrink_tiles(rows, experts, k, padded, x.element_size(), runtime.properties(x.device))
    block_k, split = tiles.kwargs["BLOCK_K"], tiles.kwargs["SPLIT"]
    launch = tiled(
        kernels._moe_lora_fwd_shrink_kernel, tiles, X_SLOTS=layout, ACC=tl_accumulator(x.dtype),
        PRECISION=precision(x.dtype), EVEN_K=k % block_k == 0, r=rank, RANK=padded,
    )  # fmt: skip
    tiles_at, num_m = tiles_of_height(rows, experts, tiles.height)
    return ShrinkPlan(
        step=Step(launch, (num_m, padded // tiles.kwargs["BLOCK_R"], split), (experts, k)),
        tiles_at=tiles_at, shape=(rows, padded), split_k=split,
        combine=combine_step(rows * split, split, padded, accumulator(x.dtype)) if split > 1 else None,
    )  # fmt: skip


def _needs_copy(factor: torch.Tensor) -> bool:
    """Tell whether neither rows nor columns are contiguous (PEFT's B): a tile would read a sector for each element."""
    return 1 not in factor.stride()[1:]


def shrink(
    plan: ShrinkPlan, routing: Routing, x: torch.Tensor, a: torch.Tensor, u: torch.Tensor, scaling: float
) -> None:
    """Fill u from x and a (E, r, K)."""
    a = a.contiguous() if _needs_copy(a) else a
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


class GemmPlan(NamedTuple):
    """Y = X W[e] + U B[e]^T + bias[e] for the rows of each expert."""

    kernel: Launch | products.Plan  # the latter for packed matrices alone
    tiles_at: int
    num_m: int  # tiles
    slots: int
    shrink: ShrinkPlan | None  # what makes U first; None: the kernel itself, or there is none
    copies_x: bool
    # Of this room's kernel:
    grid: tuple[int, ...] = ()
    w_by_row: bool = False
    b_by_row: bool = False
    x_block: Block | None = None  # of a tensor descriptor; None: by pointers
    w_block: Block | None = None


def gemm_plan(
    routing: Routing, x: torch.Tensor, layout: int, w: torch.Tensor | Matrices, a: torch.Tensor | None,
    b: torch.Tensor | None, has_bias: bool, y_grouped: bool, strategy: str,
) -> GemmPlan:  # fmt: skip
    rows, (experts, k, n), rank = routing.rows, w.shape, 0 if a is None else a.shape[1]
    properties, wide_x = runtime.properties(x.device), has_aligned_rows(x)
    if isinstance(w, Matrices) and strategy != "fused" and w.packed.data_ptr() % 16 == 0:
        found = products.plan(
            rows, (experts, k, n) if w.transposed else (experts, n, k), w.transposed, x.dtype, w.block_size,
            w.kind_of_scale, rank=rank, has_bias=has_bias, x_grouped=layout == SORTED, y_grouped=y_grouped,
            routed=True, properties=properties,
        )  # fmt: skip
        if found is not None:
            tiles_at, num_m = tiles_of_height(rows, experts, found.height)
            shrink = None if a is None else shrink_plan(routing, x, layout, a)
            return GemmPlan(found, tiles_at, num_m, max(layout, 1), shrink, not wide_x)
    # A gradient may come expanded; a copy takes less time than to read it an element at a time.
    whole = k > 0 and k * x.element_size() % 16 == 0
    copies_x = not wide_x and k > 0 and (x.stride(1) != 1 or whole)
    b_by_row = b is not None and b.stride(1) == 1 and b.stride(2) != 1
    if strategy == "auto":
        strategy = kernels.choose_strategy(rows, properties, copies_b=b_by_row)
    fits = 0 < rank <= kernels.FUSED_RANK and x.dtype != torch.float64 and properties.has_tensor_cores
    fused = fits and strategy == "fused"
    block_size, scale, access, form = 0, "", "narrow", "pointers"
    if isinstance(w, Matrices):
        by_row, block_size, scale = w.transposed, w.block_size, w.kind_of_scale
        # Turing has no instruction that multiplies pairs of bfloat16.
        pairs = properties.is_nvidia and (x.dtype == torch.float16 or properties.capability >= 80)
        access, form = "packed", "permute" if x.element_size() == 2 and pairs else "gather"
    else:
        by_row = not _fits_descriptor(w.transpose(1, 2))
        if (wide_x or (copies_x and whole)) and (not by_row or _fits_descriptor(w)):
            access, form = ("boxes", "boxes") if properties.prefers_tma else ("wide", "pointers")
        else:
            by_row = w.stride(1) != 1 or w.stride(2) == 1
    in_kernel = kernels.padded_rank(rank) if fused else 0
    tiles = kernels.rows_tiles(rows, experts, in_kernel, x.element_size(), access, properties)
    block_k, block_n = tiles.kwargs["BLOCK_K"], tiles.kwargs["BLOCK_N"]
    launch = tiled(
        kernels._moe_lora_fwd_rows_kernel, tiles, FORMAT=form, BLOCK_SIZE=block_size, SCALE=scale, W_BY_ROW=by_row,
        B_BY_ROW=b_by_row and not fused, X_SLOTS=layout, Y_GROUPED=y_grouped, PRECISION=precision(x.dtype),
        EVEN_K=k % block_k == 0, r=rank,
    )  # fmt: skip
    tiles_at, num_m = tiles_of_height(rows, experts, tiles.height)
    shrink = None if a is None or fused else shrink_plan(routing, x, layout, a)
    return GemmPlan(
        launch, tiles_at, num_m, max(layout, 1), shrink, copies_x, (num_m * cdiv(n, block_n),), by_row,
        b_by_row and not fused,
        x_block=block(tiles.height, block_k) if form == "boxes" and layout == SORTED else None,
        w_block=block(1, *((block_k, block_n) if by_row else (block_n, block_k))) if form == "boxes" else None,
    )  # fmt: skip


def _fits_descriptor(w: torch.Tensor) -> bool:
    """Tell whether a tensor descriptor can read it: 16-bit, aligned, its last dimension contiguous."""
    return w.element_size() == 2 and w.numel() > 0 and has_aligned_rows(w)


def gemm(
    plan: GemmPlan, routing: Routing, x: torch.Tensor, w: torch.Tensor | Matrices, bias: torch.Tensor | None,
    y: torch.Tensor, a: Any, b: Any, u: torch.Tensor | None, scaling: float,
) -> None:  # fmt: skip
    """Fill y (R, N), and U (R, padded rank) if there is one, with a (E, r, K) and b (E, N, r), or neither."""
    if plan.copies_x:
        x = x.clone(memory_format=torch.contiguous_format)
    if plan.shrink is not None:
        u = empty(plan.shrink.shape, x.dtype, x) if u is None else u
        shrink(plan.shrink, routing, x, a, u, scaling)
    experts, k, n = w.shape
    if isinstance(plan.kernel, products.Plan):
        assert isinstance(w, Matrices)
        b = b.contiguous() if b is not None and _needs_copy(b) else b
        products.multiply(plan.kernel, routing.lists, plan.tiles_at, plan.num_m, x, w, b, u, bias, y, plan.slots)
        return
    scales: tuple[torch.Tensor | None, ...] = (None,) * 5
    elements: Any
    strides = 0, 0
    if isinstance(w, Matrices):
        packed = w.packed if w.packed.data_ptr() % 16 == 0 else w.packed.clone()
        elements, scales = packed.view(torch.int32), w.scales
    else:
        elements = w if plan.w_by_row else w.transpose(1, 2)
        if plan.w_block is not None:
            elements = Descriptor(elements, plan.w_block)
        else:
            elements = elements if elements.stride(2) == 1 else elements.contiguous()
            strides = elements.stride()[:2]
    factors = None if a is None or plan.shrink is not None else a.contiguous()
    if b is not None:
        b = (b.transpose(1, 2) if plan.b_by_row else b).contiguous()
    plan.kernel(
        plan.grid,
        routing.lists, plan.tiles_at, x, x.stride(0), None if plan.x_block is None else Descriptor(x, plan.x_block),
        elements, *strides, *scales, factors, b, u, None if bias is None else bias.contiguous(), y, scaling, experts, k, n,
    )  # fmt: skip


# --- grouped wgrad --------------------------------------------------------------------------------------------------


def wgrad_step(
    routing: Routing, like: torch.Tensor, left: int, p: int, x: int, k: int, dy: int = SORTED, n: int = 0, *,
    exact: bool = False,
) -> Step | None:  # fmt: skip
    """Plan dA (E, P, K) and dB (E, N, P), or one of them (the other has no columns), from rows like ``like``.

    ``left``, ``x``, ``dy``: how their rows lie. ``exact``: float32 as it is, never tf32.
    """
    if p * (k + n) == 0:
        return None
    experts, dtype = routing.num_experts, like.dtype
    tiles = kernels.wgrad_tiles(routing.rows, experts, p, dtype.itemsize, runtime.properties(like.device))
    launch = tiled(
        kernels._moe_lora_bwd_wgrad_kernel, tiles, L_SLOTS=left, X_SLOTS=x, DY_SLOTS=dy, ACC=tl_accumulator(dtype),
        PRECISION="ieee" if exact else precision(dtype), P=p,
    )  # fmt: skip
    block_q = tiles.kwargs["BLOCK_Q"]
    return Step(launch, (experts, cdiv(p, tiles.kwargs["BLOCK_P"]), cdiv(k, block_q) + cdiv(n, block_q)), (k, n))


def wgrad(
    step: Step, routing: Routing, left: Any, x: Any, gates: Any, da: Any, u: Any = None, dy: Any = None, db: Any = None
) -> None:
    """Fill da (E, P, K), contiguous, with the sum over an expert's rows of left^T x, each with its gate; db with dy^T u.

    ``left`` and ``u`` have the same strides; of either pair both may be ``None``.
    """
    gates = None if gates is None else gates.contiguous()
    strides = (u if left is None else left).stride()
    step(routing.lists, 2 * routing.rows, left, u, *strides, *strided(x, 2), *strided(dy, 2), gates, da, db)
