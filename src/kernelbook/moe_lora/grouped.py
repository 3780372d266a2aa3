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
    x_block: Block | None  # of a tensor descriptor; None: by pointers
    w_block: Block | None
    w_by_row: bool
    in_words: bool  # of eight packed elements


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GemmPlan:
    """Y = X W[e] + U B[e]^T + bias[e] for the rows of each expert."""

    kernel: _RowsKernel | products.Plan  # the latter for packed matrices alone
    tiles_at: int
    num_m: int  # tiles
    slots: int
    shrink: ShrinkPlan | None  # what makes U first; None: the kernel itself, or there is none
    copies_x: bool
    copies_a: bool
    copies_b: bool


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
            w.kind_of_scale, rank=rank, has_bias=has_bias, x_grouped=layout.grouped, y_grouped=y_grouped,
            routed=True, properties=properties,
        )  # fmt: skip
    kernel: _RowsKernel | products.Plan
    if found is not None:
        kernel, height, lora, copies_x = found, found.height, "split", not wide_x
    else:
        # A gradient may come expanded; a copy takes less time than to read it an element at a time.
        copies_x = not wide_x and k > 0 and k * x.element_size() % 16 == 0
        along_n = b is not None and b.stride(1) == 1 and b.stride(2) != 1
        lora = _chosen_strategy(strategy, rows, w.shape, rank, x.dtype, properties, along_n)
        kernel, height = _rows_kernel(
            rows, x.dtype, layout, wide_x or copies_x, w, lora, rank, has_bias, y_grouped, properties
        )
    tiles_at, num_m = tiles_of_height(rows, experts, height)
    return GemmPlan(
        kernel=kernel, tiles_at=tiles_at, num_m=num_m, slots=layout.slots,
        shrink=None if a is None or lora == "fused" else shrink_plan(routing, x, layout, a),
        copies_x=copies_x, copies_a=a is not None and _needs_copy(a),
        # With W and B contiguous along different dimensions, ptxas serializes the tensor cores' instructions.
        copies_b=b is not None and (_needs_copy(b) or (lora == "fused" and b.stride(2) != 1)),
    )  # fmt: skip


def _chosen_strategy(
    strategy: str, rows: int, shape: Any, rank: int, dtype: torch.dtype, properties: runtime.DeviceProperties,
    copies_b: bool,
) -> str:  # fmt: skip
    """How the low-rank product is added: "none", "fused" (which ``copies_b``, or not) or "split"."""
    if rank == 0:
        return "none"
    if strategy == "auto":
        experts, k, n = shape
        strategy = kernels.choose_strategy(rows, experts, k, n, rank, properties, copies_b)
    fits = rank <= kernels.FUSED_RANK and dtype != torch.float64 and properties.has_tensor_cores
    return strategy if fits else "split"


def _rows_kernel(
    rows: int, dtype: torch.dtype, layout: Layout, wide_x: bool, w: torch.Tensor | Matrices, lora: str, rank: int,
    has_bias: bool, y_grouped: bool, properties: runtime.DeviceProperties,
) -> tuple[_RowsKernel, int]:  # fmt: skip
    """-> the kernel, and the rows of its tiles."""
    experts, k, n = w.shape
    padded = kernels.padded_rank(rank) if rank else 0
    packed: dict[str, Any] = {"PACKED": "none", "BLOCK_SIZE": 0, "SCALE": ""}
    access = "narrow"
    if isinstance(w, Matrices):
        by_row, decoding = w.transposed, "elements"
        if dtype.itemsize <= 4 and w.packed.data_ptr() % 16 == 0 and (n if by_row else k) % 32 == 0:
            access = "packed"
            # Turing has no instruction that multiplies pairs of bfloat16.
            pairs = properties.is_nvidia and (dtype == torch.float16 or properties.capability >= 80)
            decoding = "permute" if dtype.itemsize == 2 and pairs else "gather"
        packed = {"PACKED": decoding, "BLOCK_SIZE": w.block_size, "SCALE": w.kind_of_scale}
    else:
        by_row = not _fits_descriptor(w.transpose(1, 2))
        if wide_x and (not by_row or _fits_descriptor(w)):
            access = "boxes" if properties.prefers_tma else "wide"
    in_kernel = padded if lora == "fused" else 0
    tiles = kernels.rows_tiles(rows, experts, in_kernel, dtype.itemsize, access, properties)
    block_k, block_n = tiles.kwargs["BLOCK_K"], tiles.kwargs["BLOCK_N"]
    # Four warps side by side make 32 columns, and a narrower product of few rows would be computed more than once.
    block_r = max(32 if tiles.height < 64 else 16, padded) if lora == "fused" else max(16, min(padded, 32))
    launch = tiled(
        kernels._moe_lora_fwd_rows_kernel, tiles, **packed,
        X_GROUPED=layout.grouped, Y_GROUPED=y_grouped, W_BY_ROW=by_row, LORA=lora, HAS_BIAS=has_bias,
        ACC=tl_accumulator(dtype), PRECISION=precision(dtype), EVEN_K=k % block_k == 0, r=rank, RANK=padded,
        BLOCK_R=block_r,
    )  # fmt: skip
    _, num_m = tiles_of_height(rows, experts, tiles.height)
    return _RowsKernel(
        launch=launch, grid=(num_m * cdiv(n, block_n),),
        x_block=block(tiles.height, block_k) if access == "boxes" and layout.grouped else None,
        w_block=block(1, *((block_k, block_n) if by_row else (block_n, block_k))) if access == "boxes" else None,
        w_by_row=by_row, in_words=access == "packed",
    ), tiles.height  # fmt: skip


def _fits_descriptor(w: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read it: 16-bit, aligned, its last dimension contiguous."""
    return w.element_size() == 2 and w.numel() > 0 and has_aligned_rows(w)


def gemm(
    plan: GemmPlan, routing: Routing, x: torch.Tensor, w: torch.Tensor | Matrices, lora: Lora | None,
    bias: torch.Tensor | None, y: torch.Tensor,
) -> None:  # fmt: skip
    """Fills y (R, N), and lora's U if there is one."""
    a = b = u = None
    scaling = 0.0
    if plan.copies_x:
        x = x.clone(memory_format=torch.contiguous_format)
    if lora is not None:
        a, b, u, scaling = lora
        a, b = a.contiguous() if plan.copies_a else a, b.contiguous() if plan.copies_b else b
        if plan.shrink is not None:
            u = empty(plan.shrink.shape, x.dtype, x) if u is None else u
            shrink(plan.shrink, routing, x, a, u, scaling)
    kernel, (experts, k, n) = plan.kernel, w.shape
    if not isinstance(kernel, _RowsKernel):
        assert isinstance(w, Matrices)
        products.multiply(kernel, routing.lists, plan.tiles_at, plan.num_m, x, w, b, u, bias, y, plan.slots)
        return
    strides: tuple[int, ...] = (0, 0, 0)
    scales: tuple[torch.Tensor | None, ...] = (None,) * 5
    w_descriptor = None
    if isinstance(w, Matrices):
        elements, scales = w.packed.view(torch.int32) if kernel.in_words else w.packed, w.scales
    else:
        elements, strides = w, w.stride()
        if kernel.w_block is not None:
            w_descriptor = Descriptor(w if kernel.w_by_row else w.transpose(1, 2), kernel.w_block)
    x_descriptor = None if kernel.x_block is None else Descriptor(x, kernel.x_block)
    absmax, nested_absmax, nested_code, nested_offset, code = scales
    kernel.launch(
        kernel.grid,
        routing.lists, plan.tiles_at, x, *x.stride(), x_descriptor, elements, *strides, w_descriptor,
        absmax, nested_absmax, nested_code, nested_offset, code, *strided(a, 3), *strided(b, 3), u, *strided(bias, 2), y,
        scaling, experts, k, n, plan.slots, plan.num_m,
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
