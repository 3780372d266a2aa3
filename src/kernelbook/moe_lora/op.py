"""The public functions in the order of a call: observed or not, plan, new memory, launches; then the gradients the same way."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import (
    Descriptor,
    Launch,
    are_tensors,
    cdiv,
    composite,
    form,
    launcher,
    observed,
    operator,
    sources,
    wants_gradient,
)
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.moe_lora import kernels
from kernelbook.moe_lora.routing import Routing, route, tiles_of_height
from kernelbook.packed import NESTED_BLOCK, NF4Tensor, products
from kernelbook.packed.products import Matrices
from kernelbook.plans import KeptPlans
from kernelbook.tensors import has_aligned_rows, precision, strided, without_autocast

__all__ = ["Routing", "lora_gradients", "moe_lora", "route", "scatter2scatter", "thin_products"]

STRATEGIES = ("auto", "fused", "split")


# --- public functions -----------------------------------------------------------------------------------------------


def scatter2scatter(
    x: torch.Tensor,
    w: torch.Tensor | NF4Tensor,
    routing: Routing,
    *,
    grouped_in: bool = False,
    grouped_out: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """The product of each row with the matrix of the expert it is routed to; differentiable.

    Args:
        x: (T, K), float16, bfloat16, float32 or float64, any strides; if ``grouped_in``, (T*k, K) in expert order.
        w: (E, K, N), the dtype of ``x``, any strides; or an ``NF4Tensor`` of shape (E, N, K), which is decoded on the way
            into the product and never becomes dense.
        routing: of T tokens to k of E experts, from :func:`route`.
        grouped_in, grouped_out: rows are in expert order, position s holding pair ``routing.order[s]``.
        transposed: the ``NF4Tensor`` has shape (E, K, N), packed along N. (A dense ``w`` has any strides.)

    Returns:
        (T*k, N) in the dtype of ``x``: row t*k + j is ``x[t] @ w[expert_ids[t, j]]``, zero for a slot to skip; in expert
        order if ``grouped_out``. float32 products use tf32 where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape or a device is not as above.
    """
    given = _Given(x, w, None, None, None, None, routing, 1.0, "split", grouped_in, grouped_out)
    return _product("scatter2scatter", given, transposed)


def moe_lora(
    x: torch.Tensor,
    w: torch.Tensor | NF4Tensor,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    routing: Routing,
    *,
    scaling: float = 1.0,
    bias: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    strategy: str = "auto",
    grouped_in: bool = False,
    grouped_out: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """A linear layer for each expert with a low-rank update: ``x W[e] + scaling (x A[e]^T) B[e]^T + bias[e]``.

    Differentiable in all tensors (once), and the same bit for bit in every run.

    Args:
        x: (T, K), float16, bfloat16, float32 or float64, any strides; if ``grouped_in``, (T*k, K) in expert order.
        w: (E, K, N), the dtype of ``x``, any strides. Its gradient is computed only if it requires one. Or an
            ``NF4Tensor`` of shape (E, N, K), as transformers and bitsandbytes store it: its elements become numbers in
            the dtype of ``x`` on their way into the product, forward and backward, and W never becomes dense.
        lora_a: (E, r, K), the dtype of ``x``, any strides; or ``None``, then there is no low-rank update.
        lora_b: (E, N, r), the dtype of ``x``, any strides; ``None`` with ``lora_a`` and only with it.
        routing: of T tokens to k of E experts, from :func:`route`.
        scaling: of the low-rank update.
        bias: (E, N), the dtype of ``x``, or ``None``.
        gates: (T, k) weights of the slots, in the dtype of ``x`` or float32, or ``None``.
        strategy: how the low-rank product is added. ``"fused"``: x A^T is accumulated beside x W in one kernel.
            ``"split"``: x A^T comes from a kernel of its own, and its product with B^T is the last step of the base's
            kernel; so are ranks above 64 in any case. ``"auto"``: by shape, see :func:`kernels.choose_strategy`.
        grouped_in, grouped_out: rows are in expert order, position s holding pair ``routing.order[s]``.
        transposed: the ``NF4Tensor`` has shape (E, K, N), packed along N. (A dense ``w`` has any strides.)

    Returns:
        (T*k, N) in the dtype of ``x``, row t*k + j for slot j of token t, in expert order if ``grouped_out``; with
        ``gates`` (T, N), the weighted sum over the slots. Slots to skip are zero.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device or ``strategy`` is not as above, or ``gates`` come with ``grouped_out``.
    """
    given = _Given(x, w, lora_a, lora_b, bias, gates, routing, scaling, strategy, grouped_in, grouped_out)
    return _product("moe_lora", given, transposed)


class _Given(NamedTuple):
    """A call's arguments, see :func:`moe_lora`."""

    x: torch.Tensor
    w: torch.Tensor | Matrices  # (E, K, N), either of them
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    bias: torch.Tensor | None
    gates: torch.Tensor | None
    routing: Routing
    scaling: float
    strategy: str
    grouped_in: bool
    grouped_out: bool


def _product(op: str, given: _Given, transposed: bool) -> torch.Tensor:
    given = _settled(op, given, transposed)
    flat = _flat(given)
    y: torch.Tensor
    if is_dynamo_compiling() and are_tensors(*flat[:_TENSORS]):
        y = _moe_lora_whole(op, *flat, SOURCES)
    elif observed(*flat[:_TENSORS]):
        y = _by_operators(op, given)
    elif wants_gradient(*flat[:_DIFFERENTIABLE]):
        y = _MoeLora.apply(*flat[:_DIFFERENTIABLE], given, _forward_plan(op, given))
    else:
        y, _ = _forward(_forward_plan(op, given), given, with_u=False)
    return y


def _settled(op: str, given: _Given, transposed: bool) -> _Given:
    """A call's arguments in autocast's dtype, with plain ones of their types, and W (E, K, N)."""
    x, w, lora_a, lora_b, bias, gates, routing, scaling, strategy, grouped_in, grouped_out = given
    x, w, lora_a, lora_b, bias = arguments.in_autocast_dtype(x, w, lora_a, lora_b, bias)
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, as route() returns it, got {type(routing).__name__}")
    if isinstance(w, NF4Tensor):
        if len(w.shape) != 3:
            raise ValueError(f"{op}: w must have three dimensions, got shape {w.shape}")
        shape = (w.shape[0], *w.shape[1:]) if transposed else (w.shape[0], w.shape[2], w.shape[1])
        nested = (w.nested_absmax, w.nested_code, w.nested_offset)
        w = Matrices(w.packed, w.absmax, w.code, nested, w.block_size, shape, bool(transposed))
    elif transposed:
        raise ValueError(f"{op}: transposed must be False for a dense w, whose strides say it, got {transposed!r}")
    elif not isinstance(w, torch.Tensor):
        arguments.check_tensor(op, "w", w)
    scaling = arguments.number(op, "scaling", scaling)
    if type(strategy) is not str:
        arguments.check_choice(op, "strategy", strategy, STRATEGIES)
    return _Given(
        x, w, lora_a, lora_b, bias, gates, routing, scaling, strategy, bool(grouped_in), bool(grouped_out)
    )  # fmt: skip


def _check(op: str, given: _Given) -> None:
    x, w, lora_a, lora_b, bias, gates, routing, _, strategy, grouped_in, grouped_out = given
    expert_ids, _, experts = routing
    arguments.check_tensor(op, "x", x)
    if isinstance(w, Matrices):
        arguments.check_tensor(op, "w", w.packed, dtypes=(torch.uint8,))
        stored, k, n = w.shape
        if stored != experts:
            sides = (k, n) if w.transposed else (n, k)
            raise ValueError(f"{op}: w must have shape {(experts, *sides)}, got {(stored, *sides)}")
    else:
        arguments.check_tensor(op, "w", w)
        if w.ndim != 3:
            raise ValueError(f"{op}: w must have three dimensions, got shape {tuple(w.shape)}")
        _, k, n = w.shape
        arguments.check_shape(op, "w", w, (experts, k, n))
        arguments.check_same_dtype(op, x=x, w=w)
    tokens, slots = expert_ids.shape
    arguments.check_shape(op, "x", x, (tokens * slots if grouped_in else tokens, k))
    arguments.check_same_device(op, x=x, w=w.packed if isinstance(w, Matrices) else w, routing=expert_ids)
    if lora_a is not None and lora_b is not None:
        for name, value in (("lora_a", lora_a), ("lora_b", lora_b)):
            arguments.check_tensor(op, name, value)
            if value.ndim != 3:
                raise ValueError(f"{op}: {name} must have three dimensions, got shape {tuple(value.shape)}")
        rank = lora_a.shape[1]
        if rank < 1:
            raise ValueError(f"{op}: lora_a must have a rank of at least 1, got shape {tuple(lora_a.shape)}")
        arguments.check_shape(op, "lora_a", lora_a, (experts, rank, k))
        arguments.check_shape(op, "lora_b", lora_b, (experts, n, rank))
    elif lora_a is not None or lora_b is not None:
        missing, there = ("lora_a", "lora_b") if lora_a is None else ("lora_b", "lora_a")
        raise TypeError(f"{op}: {missing} must be a tensor where {there} is one, got None")
    if bias is not None:
        arguments.check_tensor(op, "bias", bias)
        arguments.check_shape(op, "bias", bias, (experts, n))
    arguments.check_same_dtype(op, x=x, lora_a=lora_a, lora_b=lora_b, bias=bias)
    if gates is not None:
        arguments.check_tensor(op, "gates", gates, dtypes=tuple({x.dtype, torch.float32}))
        arguments.check_shape(op, "gates", gates, expert_ids.shape)
        if grouped_out:
            raise ValueError(f"{op}: grouped_out must be False with gates, whose sum over the slots is in token order")
    arguments.check_same_device(op, x=x, lora_a=lora_a, lora_b=lora_b, bias=bias, gates=gates)
    arguments.check_choice(op, "strategy", strategy, STRATEGIES)


# --- the pieces: grouped GEMM, LoRA shrink, sums over experts and over slots ----------------------------------------


class _Layout(NamedTuple):
    """How rows lie: (R, N) in expert order if ``grouped``; otherwise (R / slots, N), row p // slots for pair p."""

    grouped: bool
    slots: int


_SORTED = _Layout(True, 1)


def _tiled(kernel: Any, tiles: kernels.Tiles, **constants: Any) -> Launch:
    return launcher(kernel, **constants, **tiles.kwargs, num_warps=tiles.warps, num_stages=tiles.stages)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _CombinePlan:
    """Rows (R, C) of pairs summed over a token's slots, weighted by gates, or their inner products with x, or both."""

    launch: Launch
    grid: tuple[int, int]
    columns: int


def _combine_plan(
    rows: int, slots: int, columns: int, dtype: torch.dtype, *, grouped: bool = False, has_gates: bool = False,
    with_out: bool = True, with_dgates: bool = False,
) -> _CombinePlan:  # fmt: skip
    tiles = kernels.slots_tiles(slots, columns)
    launch = _tiled(
        kernels._moe_lora_fwd_slots_kernel, tiles, SLOTS=slots, GROUPED=grouped, HAS_GATES=has_gates, WITH_OUT=with_out,
        WITH_DGATES=with_dgates, ACC=tl_accumulator(dtype),
    )  # fmt: skip
    # The inner products go over all columns, so that one program has to see them.
    across = 1 if with_dgates else cdiv(columns, tiles.kwargs["BLOCK_C"])
    return _CombinePlan(launch=launch, grid=(rows // slots, across), columns=columns)


def _combine(
    plan: _CombinePlan, values: torch.Tensor, out: torch.Tensor | None, gates: torch.Tensor | None = None,
    order: torch.Tensor | None = None, x: torch.Tensor | None = None, dgates: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fills out (R / slots, C), and if there is an x (R / slots, C) dgates (R,). ``order``: of values in expert order."""
    gates = None if gates is None else gates.contiguous()
    plan.launch(plan.grid, order, values, gates, out, *strided(x, 2), dgates, plan.columns)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _ShrinkPlan:
    """U = scaling X A^T, (R, padded rank) in expert order (LoRA shrink)."""

    launch: Launch
    grid: tuple[int, int, int]
    tiles_at: int
    slots: int
    copies_a: bool
    shape: tuple[int, int]  # of U
    split_k: int  # programs that share a sum
    combine: _CombinePlan | None  # adds up their shares
    scales_after: bool  # a kernel takes its scalars in float32


def _shrink_plan(routing: Routing, x: torch.Tensor, layout: _Layout, a: torch.Tensor) -> _ShrinkPlan:
    rows, (experts, rank, k) = routing.rows, a.shape
    padded = kernels.padded_rank(rank)
    tiles = kernels.thin_tiles(rows, experts, k, padded, x.element_size(), runtime.properties(x.device))
    blocks = tiles.kwargs
    split = blocks["SPLIT"]
    launch = _tiled(
        kernels._moe_lora_fwd_thin_kernel, tiles, X_GROUPED=layout.grouped, ACC=tl_accumulator(x.dtype),
        PRECISION=precision(x.dtype), EVEN_K=k % blocks["BLOCK_K"] == 0, r=rank, RANK=padded,
    )  # fmt: skip
    tiles_at, num_m = tiles_of_height(rows, experts, tiles.height)
    return _ShrinkPlan(
        launch=launch, grid=(num_m, padded // blocks["BLOCK_R"], split), tiles_at=tiles_at, slots=layout.slots,
        copies_a=_needs_copy(a), shape=(rows, padded), split_k=split,
        combine=_combine_plan(rows * split, split, padded, accumulator(x.dtype)) if split > 1 else None,
        scales_after=x.dtype == torch.float64,
    )  # fmt: skip


def _needs_copy(factor: torch.Tensor) -> bool:
    """Whether neither rows nor columns are contiguous (PEFT's B): a tile would read a sector for each element."""
    return 1 not in factor.stride()[1:]


def _shrink(
    plan: _ShrinkPlan, routing: Routing, x: torch.Tensor, a: torch.Tensor, u: torch.Tensor, scaling: float
) -> None:
    """Fills u from x and a (E, r, K)."""
    a = a.contiguous() if plan.copies_a else a
    rows, padded = plan.shape
    shares = u if plan.combine is None else empty((rows * plan.split_k, padded), accumulator(x.dtype), x)
    experts, _, k = a.shape
    stride_e, stride_r, stride_k = a.stride()
    plan.launch(
        plan.grid, routing.lists, plan.tiles_at, x, *x.stride(), a, stride_e, stride_k, stride_r, shares,
        1.0 if plan.scales_after else scaling, experts, k, plan.slots,
    )  # fmt: skip
    if plan.combine is not None:
        _combine(plan.combine, shares, u)
    if plan.scales_after:
        u.mul_(scaling)


class _Lora(NamedTuple):
    """a (E, r, K), b (E, N, r), and U (R, padded rank), which is filled; ``None`` where nobody wants it."""

    a: torch.Tensor
    b: torch.Tensor
    u: torch.Tensor | None
    scaling: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _RowsKernel:
    """The grouped GEMM of this room: how it is launched."""

    launch: Launch
    grid: tuple[int]
    x_block: tuple[int, ...] | None  # of a tensor descriptor; None: by pointers
    w_block: tuple[int, ...] | None
    w_by_row: bool
    in_words: bool  # of eight packed elements


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _GemmPlan:
    """Y = X W[e] + U B[e]^T + bias[e] for the rows of each expert (grouped GEMM)."""

    kernel: _RowsKernel | products.Plan  # the latter for packed matrices alone
    tiles_at: int
    num_m: int  # tiles
    slots: int
    shrink: _ShrinkPlan | None  # what makes U first; None: the kernel itself, or there is none
    copies_x: bool
    copies_a: bool
    copies_b: bool


def _gemm_plan(
    routing: Routing, x: torch.Tensor, layout: _Layout, w: torch.Tensor | Matrices, a: torch.Tensor | None,
    b: torch.Tensor | None, has_bias: bool, y_grouped: bool, strategy: str,
) -> _GemmPlan:  # fmt: skip
    rows, (experts, k, n), rank = routing.rows, w.shape, 0 if a is None else a.shape[1]
    properties, wide_x = runtime.properties(x.device), has_aligned_rows(x)
    found = None
    if isinstance(w, Matrices) and strategy != "fused" and w.packed.data_ptr() % 16 == 0:
        found = products.plan(
            rows, (experts, k, n) if w.transposed else (experts, n, k), w.transposed, x.dtype, w.block_size,
            w.nested[0] is not None, rank, has_bias, layout.grouped, y_grouped, True, properties,
        )  # fmt: skip
    kernel: _RowsKernel | products.Plan
    if found is not None:
        kernel, height, lora, copies_x = found, found.height, "split", not wide_x
    else:
        # A gradient may come expanded; a copy takes less time than to read it an element at a time.
        copies_x = not wide_x and k > 0 and k * x.element_size() % 16 == 0
        lora = _chosen_strategy(strategy, rows, w.shape, rank, x.dtype, properties)
        kernel, height = _rows_kernel(
            rows, x.dtype, wide_x or copies_x, w, lora, rank, has_bias, layout.grouped, y_grouped, properties
        )
    tiles_at, num_m = tiles_of_height(rows, experts, height)
    return _GemmPlan(
        kernel=kernel, tiles_at=tiles_at, num_m=num_m, slots=layout.slots,
        shrink=None if a is None or lora == "fused" else _shrink_plan(routing, x, layout, a),
        copies_x=copies_x, copies_a=a is not None and _needs_copy(a),
        # With W and B contiguous along different dimensions, ptxas serializes the tensor cores' instructions.
        copies_b=b is not None and (_needs_copy(b) or (lora == "fused" and b.stride(2) != 1)),
    )  # fmt: skip


def _chosen_strategy(
    strategy: str,
    rows: int,
    shape: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    properties: runtime.DeviceProperties,
) -> str:
    """How the low-rank product is added: "none", "fused" or "split"."""
    if rank == 0:
        return "none"
    if strategy == "auto":
        strategy = kernels.choose_strategy(rows, *shape, rank, properties)
    return "split" if rank > kernels.FUSED_RANK or dtype == torch.float64 else strategy


def _rows_kernel(
    rows: int, dtype: torch.dtype, wide_x: bool, w: torch.Tensor | Matrices, lora: str, rank: int, has_bias: bool,
    x_grouped: bool, y_grouped: bool, properties: runtime.DeviceProperties,
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
            decoding = "permute" if dtype.itemsize == 2 and properties.arch.startswith("sm_") else "gather"
        scale = "float32" if w.nested[0] is None else "nested"
        packed = {"PACKED": decoding, "BLOCK_SIZE": w.block_size, "SCALE": scale}
    else:
        by_row = not _fits_descriptor(w.transpose(1, 2))
        if wide_x and (not by_row or _fits_descriptor(w)):
            access = "boxes" if kernels.has_boxes(properties) else "wide"
    in_kernel = padded if lora == "fused" else 0
    tiles = kernels.rows_tiles(rows, experts, in_kernel, dtype.itemsize, access, properties)
    block_k, block_n = tiles.kwargs["BLOCK_K"], tiles.kwargs["BLOCK_N"]
    # Four warps side by side make 32 columns, and a narrower product of few rows would be computed more than once.
    block_r = max(32 if tiles.height < 64 else 16, padded) if lora == "fused" else max(16, min(padded, 32))
    launch = _tiled(
        kernels._moe_lora_fwd_rows_kernel, tiles, **packed, NESTED_BLOCK=NESTED_BLOCK,
        X_GROUPED=x_grouped, Y_GROUPED=y_grouped, W_BY_ROW=by_row, LORA=lora, HAS_BIAS=has_bias,
        ACC=tl_accumulator(dtype), PRECISION=precision(dtype), EVEN_K=k % block_k == 0, r=rank, RANK=padded,
        BLOCK_R=block_r,
    )  # fmt: skip
    _, num_m = tiles_of_height(rows, experts, tiles.height)
    return _RowsKernel(
        launch=launch, grid=(num_m * cdiv(n, block_n),),
        x_block=(tiles.height, block_k) if access == "boxes" and x_grouped else None,
        w_block=(1, *((block_k, block_n) if by_row else (block_n, block_k))) if access == "boxes" else None,
        w_by_row=by_row, in_words=access == "packed",
    ), tiles.height  # fmt: skip


def _fits_descriptor(w: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read it: 16-bit, aligned, its last dimension contiguous."""
    return w.element_size() == 2 and w.numel() > 0 and has_aligned_rows(w)


def _gemm(
    plan: _GemmPlan, routing: Routing, x: torch.Tensor, w: torch.Tensor | Matrices, lora: _Lora | None,
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
            _shrink(plan.shrink, routing, x, a, u, scaling)
    kernel, (experts, k, n) = plan.kernel, w.shape
    if not isinstance(kernel, _RowsKernel):
        assert isinstance(w, Matrices)
        products.launch(kernel, routing.lists, plan.tiles_at, plan.num_m, None, x, w, b, u, bias, y, plan.slots)
        return
    if isinstance(w, Matrices):
        of_w = (w.packed.view(torch.int32) if kernel.in_words else w.packed, 0, 0, 0, None, *w.scales)
    else:
        read = w if kernel.w_by_row else w.transpose(1, 2)
        descriptor = None if kernel.w_block is None else Descriptor(read, kernel.w_block)
        of_w = (w, *w.stride(), descriptor, None, None, None, None, None)
    kernel.launch(
        kernel.grid,
        routing.lists, plan.tiles_at,
        x, *x.stride(), None if kernel.x_block is None else Descriptor(x, kernel.x_block),
        *of_w, *strided(a, 3), *strided(b, 3), u, *strided(bias, 2), y,
        scaling, experts, k, n, plan.slots, plan.num_m,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _WgradPlan:
    """A sum over an expert's rows of products of two rows (grouped wgrad)."""

    launch: Launch
    grid: tuple[int, int, int]
    left_slots: int
    right_slots: int


def _wgrad_plan(
    routing: Routing, left: _Layout, right: _Layout, p: int, q: int, dtype: torch.dtype, has_gates: bool,
    device: torch.device, *, exact: bool = False,
) -> _WgradPlan | None:  # fmt: skip
    """For a result (E, P, Q). ``exact``: float32 as it is, never tf32."""
    experts = routing.num_experts
    if p * q == 0:
        return None
    tiles = kernels.gram_tiles(routing.rows, experts, p, dtype.itemsize, runtime.properties(device))
    launch = _tiled(
        kernels._moe_lora_bwd_gram_kernel, tiles, ACC=tl_accumulator(dtype),
        PRECISION="ieee" if exact else precision(dtype), P=p,
        L_GROUPED=left.grouped, Z_GROUPED=right.grouped, HAS_GATES=has_gates,
    )  # fmt: skip
    grid = (experts, cdiv(p, tiles.kwargs["BLOCK_P"]), cdiv(q, tiles.kwargs["BLOCK_Q"]))
    return _WgradPlan(launch=launch, grid=grid, left_slots=left.slots, right_slots=right.slots)


def _wgrad(
    plan: _WgradPlan, routing: Routing, left: torch.Tensor, right: torch.Tensor, gates: torch.Tensor | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fills out (E, P, Q), of any strides: the sum over an expert's rows of left[:, :P]^T right, each with its gate."""
    plan.launch(
        plan.grid, routing.lists, 2 * routing.rows, left, *left.stride(), right, *right.stride(),
        None if gates is None else gates.contiguous(), out, *out.stride(), out.shape[2],
        plan.left_slots, plan.right_slots,
    )  # fmt: skip


def _factors_plan(
    routing: Routing, x: torch.Tensor, x_layout: _Layout, dy_layout: _Layout, a: torch.Tensor, n: int, has_gates: bool
) -> _WgradPlan:
    """For dA (E, r, K) and dB (E, N, r) in one launch."""
    experts, rank, k = a.shape
    tiles = kernels.gram_tiles(routing.rows, experts, rank, x.element_size(), runtime.properties(x.device))
    launch = _tiled(
        kernels._moe_lora_bwd_factors_kernel, tiles, ACC=tl_accumulator(x.dtype), PRECISION=precision(x.dtype), P=rank,
        X_GROUPED=x_layout.grouped, DY_GROUPED=dy_layout.grouped, HAS_GATES=has_gates,
    )  # fmt: skip
    block_q = tiles.kwargs["BLOCK_Q"]
    grid = (experts, cdiv(rank, tiles.kwargs["BLOCK_P"]), cdiv(k, block_q) + cdiv(n, block_q))
    return _WgradPlan(launch=launch, grid=grid, left_slots=x_layout.slots, right_slots=dy_layout.slots)


def _factors(
    plan: _WgradPlan, routing: Routing, d: torch.Tensor, u: torch.Tensor, x: torch.Tensor, dy: torch.Tensor,
    gates: torch.Tensor | None, da: torch.Tensor, db: torch.Tensor,
) -> None:  # fmt: skip
    """Fills da and db, contiguous, from D and U (R, padded rank) in expert order."""
    plan.launch(
        plan.grid, routing.lists, 2 * routing.rows, d, u, d.stride(0), x, *x.stride(), dy, *dy.stride(),
        None if gates is None else gates.contiguous(), da, db, da.shape[2], db.shape[1],
        plan.left_slots, plan.right_slots,
    )  # fmt: skip


# --- plans of a call ------------------------------------------------------------------------------------------------


def _key(given: _Given) -> tuple[Any, ...]:
    """What the plans of a call depend on."""
    x, w, lora_a, lora_b, bias, gates, routing, _, strategy, grouped_in, grouped_out = given
    ids, _, experts = routing
    if isinstance(w, Matrices):
        weight = (w.shape, w.transposed, w.block_size, w.nested[0] is None, w.packed.device)
        aligned = x.data_ptr() % 16 == 0, w.packed.data_ptr() % 16 == 0
    else:
        weight, aligned = form(w), (x.data_ptr() % 16 == 0, w.data_ptr() % 16 == 0)
    tensors = form(x), weight, form(lora_a), form(lora_b), form(bias), form(gates)
    plain = ids.shape, ids.device, experts, strategy, grouped_in, grouped_out
    return tensors, aligned, plain, precision(x.dtype), runtime.compile_target


def _layouts(given: _Given) -> tuple[_Layout, _Layout]:
    """-> of x and of dY. With gates a token's slots share one row of dY, and each gradient counts a row with its gate."""
    slots = given.routing.slots
    return _Layout(given.grouped_in, slots), _Layout(given.grouped_out, 1 if given.gates is None else slots)


def _u_shape(rows: int, lora_a: torch.Tensor | None) -> tuple[int, int] | None:
    return None if lora_a is None else (rows, kernels.padded_rank(lora_a.shape[1]))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _ForwardPlan:
    """What is decided for a kind of forward pass."""

    shape: tuple[int, int]
    routed: tuple[int, int]  # (R, N), before the sum over the slots
    u_shape: tuple[int, int] | None  # of U, which the backward pass needs
    gemm: _GemmPlan | None  # None: there is nothing to compute
    combine: _CombinePlan | None  # with gates


_forward_plans = KeptPlans[_ForwardPlan]()


def _forward_plan(op: str, given: _Given) -> _ForwardPlan:
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    key = _key(given)
    plan = _forward_plans.get(key)
    if plan is None:
        _check(op, given)
        plan = _new_forward_plan(given)
        _forward_plans.keep(key, plan)
    return plan


def _new_forward_plan(given: _Given) -> _ForwardPlan:
    x, w, lora_a, lora_b, bias, gates, routing, _, strategy, _, grouped_out = given
    rows, n = routing.rows, w.shape[2]
    gemm = combine = None
    if rows and n:
        x_layout, _ = _layouts(given)
        gemm = _gemm_plan(routing, x, x_layout, w, lora_a, lora_b, bias is not None, grouped_out, strategy)
        if gates is not None:
            combine = _combine_plan(rows, routing.slots, n, x.dtype, has_gates=True)
    tokens = rows if gates is None else routing.expert_ids.shape[0]
    return _ForwardPlan(
        shape=(tokens, n), routed=(rows, n), u_shape=_u_shape(rows, lora_a), gemm=gemm, combine=combine
    )  # fmt: skip


def _forward(plan: _ForwardPlan, given: _Given, *, with_u: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> Y, and where it is asked for, and there is a low-rank update, U = scaling X A^T (R, padded rank), in expert order."""
    x, w, lora_a, lora_b, bias, gates, routing, scaling, *_ = given
    y = empty(plan.shape, x.dtype, x)
    u = empty(plan.u_shape, x.dtype, x) if with_u and plan.u_shape is not None else None
    if plan.gemm is None:
        return y.zero_(), None if u is None else u.zero_()
    lora = None if lora_a is None or lora_b is None else _Lora(lora_a, lora_b, u, scaling)
    routed = y if plan.combine is None else empty(plan.routed, x.dtype, x)
    _gemm(plan.gemm, routing, x, w, lora, bias, routed)
    if plan.combine is not None:
        _combine(plan.combine, routed, y, gates)
    return y, u


Gradients = tuple[torch.Tensor | None, ...]  # of x, w, lora_a, lora_b, bias and gates


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
    """What is decided for a kind of backward pass."""

    results: tuple[tuple[torch.Size, torch.dtype] | None, ...]  # shapes and dtypes of the gradients that are wanted
    is_zero: bool  # there is nothing to compute
    d_shape: tuple[int, int] | None  # of D = scaling dY B, in expert order
    gemm: _GemmPlan | None  # dY W^T + D A
    grown: tuple[int, int] | None  # (R, K), what that fills where a sum over the slots makes dx of it
    combine: _CombinePlan | None  # that sum
    in_expert_order: bool  # its rows
    adds_bias: bool  # to the gradient of the gates
    shrink: _ShrinkPlan | None  # D, where nothing else is wanted of dY W^T
    factors: _WgradPlan | None
    da: _WgradPlan | None
    db: _WgradPlan | None
    dw: _WgradPlan | None
    dbias: _WgradPlan | None


_backward_plans = KeptPlans[_BackwardPlan]()


def _backward_plan(dy: torch.Tensor, given: _Given, needs: tuple[bool, ...]) -> _BackwardPlan:
    key = (_key(given), form(dy), dy.data_ptr() % 16 == 0, needs)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _new_backward_plan(dy, given, needs)
        _backward_plans.keep(key, plan)
    return plan


def _new_backward_plan(dy: torch.Tensor, given: _Given, needs: tuple[bool, ...]) -> _BackwardPlan:
    x, w, a, b, bias, gates, routing, _, strategy, grouped_in, _ = given
    rows, slots, (_, k, n) = routing.rows, routing.slots, w.shape
    x_layout, dy_layout = _layouts(given)
    needs_dx, needs_dw, needs_da, needs_db, needs_dbias, needs_dgates = needs
    gated = gates is not None
    gemm = grown = combine = shrink = None
    factors = da = db = dw = dbias = None
    if rows and n:
        turned_a, turned_b = (None if t is None else t.transpose(1, 2) for t in (b, a))
        if needs_dx or needs_dgates:
            gemm = _gemm_plan(
                routing, dy, dy_layout, w.transpose(1, 2), turned_a, turned_b, False, grouped_in, strategy
            )
            if gated or not (grouped_in or slots == 1):
                grown = (rows, k)
                combine = _combine_plan(
                    rows, 1 if grouped_in else slots, k, x.dtype, grouped=grouped_in, has_gates=gated, with_out=needs_dx,
                    with_dgates=needs_dgates,
                )  # fmt: skip
        elif needs_da and turned_a is not None:
            shrink = _shrink_plan(routing, dy, dy_layout, turned_a)
        if needs_da and needs_db and a is not None:
            factors = _factors_plan(routing, x, x_layout, dy_layout, a, n, gated)
        elif needs_da and a is not None:
            da = _wgrad_plan(routing, _SORTED, x_layout, a.shape[1], k, x.dtype, gated, x.device)
        elif needs_db and a is not None:
            db = _wgrad_plan(routing, _SORTED, dy_layout, a.shape[1], n, x.dtype, gated, x.device)
        if needs_dw:
            dw = _wgrad_plan(routing, x_layout, dy_layout, k, n, x.dtype, gated, x.device)
        if needs_dbias:
            dbias = _wgrad_plan(routing, _SORTED, dy_layout, 1, n, x.dtype, gated, x.device, exact=True)
    like = (x, x if isinstance(w, Matrices) else w, a, b, bias, gates)
    return _BackwardPlan(
        results=tuple((t.shape, t.dtype) if need and t is not None else None for t, need in zip(like, needs, strict=True)),
        is_zero=not (rows and n), d_shape=_u_shape(rows, a) if needs_da else None,
        gemm=gemm, grown=grown, combine=combine, in_expert_order=grouped_in, adds_bias=needs_dgates and bias is not None,
        shrink=shrink, factors=factors, da=da, db=db, dw=dw, dbias=dbias,
    )  # fmt: skip


def _backward(dy: torch.Tensor, u: torch.Tensor | None, given: _Given, needs: tuple[bool, ...]) -> Gradients:
    """-> the gradients that are needed, each contiguous; ``None`` for the others."""
    plan = _backward_plan(dy, given, needs)
    x, w, lora_a, lora_b, bias, gates, routing, scaling, *_ = given
    found = [None if result is None else empty(*result, x) for result in plan.results]
    if plan.is_zero:
        return tuple(None if gradient is None else gradient.zero_() for gradient in found)
    dx, dw, da, db, dbias, dgates = found
    d = None if plan.d_shape is None else empty(plan.d_shape, x.dtype, x)
    lora = None
    if lora_a is not None and lora_b is not None:
        lora = _Lora(lora_b.transpose(1, 2), lora_a.transpose(1, 2), d, scaling)
    if plan.gemm is not None:
        grown: Any = dx if plan.grown is None else empty(plan.grown, x.dtype, x)
        _gemm(plan.gemm, routing, dy, w.transpose(1, 2), lora, None, grown)
        if plan.combine is not None:
            order = routing.lists if plan.in_expert_order else None
            if dgates is None:
                _combine(plan.combine, grown, dx, gates, order)
            elif plan.adds_bias:
                inner = empty(dgates.shape, accumulator(x.dtype), x)
                _combine(plan.combine, grown, dx, gates, order, x, inner)
                _add_share_of_bias(inner, dy, bias, routing)
                dgates.copy_(inner)
            else:
                _combine(plan.combine, grown, dx, gates, order, x, dgates)
    elif plan.shrink is not None and lora is not None:
        _shrink(plan.shrink, routing, dy, lora.a, d, scaling)
    if plan.factors is not None:
        _factors(plan.factors, routing, d, u, x, dy, gates, da, db)
    if plan.da is not None:
        _wgrad(plan.da, routing, d, x, gates, da)
    if plan.db is not None:
        _wgrad(plan.db, routing, u, dy, gates, db.transpose(1, 2))
    if plan.dw is not None:
        _wgrad(plan.dw, routing, x, dy, gates, dw)
    if plan.dbias is not None:
        ones = torch.ones((routing.rows, 1), dtype=x.dtype, device=x.device)
        _wgrad(plan.dbias, routing, ones, dy, gates, dbias.unsqueeze(1))
    return tuple(found)


def _add_share_of_bias(dgates: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor, routing: Routing) -> None:
    """y = ... + bias[e]: what the inner products of dX and x leave out."""
    with without_autocast(dy):
        inner = torch.matmul(dy, bias.t())
    ids = routing.expert_ids
    skipped = (ids < 0) | (ids >= routing.num_experts)
    dgates += inner.gather(1, ids.long().masked_fill(skipped, 0)).masked_fill(skipped, 0)


# --- gradients ------------------------------------------------------------------------------------------------------

# A call as an operator's schema and autograd have it: its tensors first, of which the first ones have gradients.
_TENSORS, _DIFFERENTIABLE = 13, 6
_ARGUMENTS = (
    "Tensor x, Tensor w, Tensor? lora_a, Tensor? lora_b, Tensor? bias, Tensor? gates, Tensor expert_ids, Tensor lists, "
    "Tensor? absmax, Tensor? code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset, "
    "SymInt experts, SymInt[] shape, int block_size, float scaling, str strategy, bool grouped_in, bool grouped_out, "
    "bool transposed"
)


def _flat(given: _Given) -> tuple[Any, ...]:
    """A call as :data:`_ARGUMENTS` has it."""
    x, w, lora_a, lora_b, bias, gates, (ids, lists, experts), *settings = given
    stored: torch.Tensor
    if isinstance(w, Matrices):
        stored, *scales = w.packed, w.absmax, w.code, *w.nested
        block_size, transposed = w.block_size, w.transposed
    else:
        stored, scales, block_size, transposed = w, [None] * 5, 0, False
    tensors = x, stored, lora_a, lora_b, bias, gates, ids, lists, *scales
    return *tensors, experts, w.shape, block_size, *settings, transposed


def _unflat(*flat: Any) -> _Given:
    """The opposite of :func:`_flat`."""
    x, w, lora_a, lora_b, bias, gates, ids, lists, absmax, code, *nested = flat[:_TENSORS]
    experts, shape, block_size, *settings, transposed = flat[_TENSORS:]
    if absmax is not None:
        w = Matrices(w, absmax, code, tuple(nested), block_size, tuple(shape), transposed)
    return _Given(x, w, lora_a, lora_b, bias, gates, Routing(ids, lists, experts), *settings)


class _MoeLora(torch.autograd.Function):
    """:func:`moe_lora` that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        given, plan = args[_DIFFERENTIABLE:]
        y, u = _forward(plan, given, with_u=True)
        _keep(ctx, u, _flat(given))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, dy), None, None


def _keep(ctx: Any, u: torch.Tensor | None, flat: tuple[Any, ...]) -> None:
    ctx.save_for_backward(u, *flat[:_TENSORS])
    ctx.settings = flat[_TENSORS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: torch.Tensor | None) -> Gradients:
    if dy is None:
        return (None,) * _DIFFERENTIABLE
    u, *tensors = ctx.saved_tensors
    return _differentiate(dy, u, (*tensors, *ctx.settings), tuple(ctx.needs_input_grad[:_DIFFERENTIABLE]))


def _differentiate(
    dy: torch.Tensor, u: torch.Tensor | None, flat: tuple[Any, ...], needs: tuple[bool, ...]
) -> Gradients:
    """What :func:`_backward` gives, by its operator where somebody observes, or wants a gradient of the gradients."""
    if torch.is_grad_enabled() or observed(dy, u, *flat[:_TENSORS]):
        found = _moe_lora_backward(dy, empty((0,), dy.dtype, dy) if u is None else u, *flat, *needs)
        return tuple(gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
    return _backward(dy, u, _unflat(*flat), needs)


# --- where somebody observes: operators -----------------------------------------------------------------------------


def _by_operators(op: str, given: _Given) -> torch.Tensor:
    _check(op, given)
    flat = _flat(given)
    y: torch.Tensor
    if wants_gradient(*flat[:_DIFFERENTIABLE]):
        y, _ = _moe_lora(*flat)
    else:
        y = _moe_lora_inference(*flat)
    return y


def _new_output(*flat: Any) -> torch.Tensor:
    given = _unflat(*flat)
    rows = given.routing.rows if given.gates is None else given.routing.expert_ids.shape[0]
    return empty((rows, flat[_TENSORS + 1][2]), given.x.dtype, given.x)


def _new_u(*flat: Any) -> torch.Tensor:
    """U, empty without a low-rank update."""
    given = _unflat(*flat)
    return empty(_u_shape(given.routing.rows, given.lora_a) or (0,), given.x.dtype, given.x)


def _run(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = _unflat(*flat)
    y, u = _forward(_forward_plan("moe_lora", given), given, with_u=True)
    return y, empty((0,), y.dtype, y) if u is None else u


def _run_inference(*flat: Any) -> torch.Tensor:
    given = _unflat(*flat)
    return _forward(_forward_plan("moe_lora", given), given, with_u=False)[0]


def _run_backward(dy: torch.Tensor, u: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """What :func:`_backward` gives, with an empty tensor for what is not needed."""
    flat, needs = others[:-_DIFFERENTIABLE], others[-_DIFFERENTIABLE:]
    return tuple(
        empty((0,), dy.dtype, dy) if gradient is None else gradient
        for gradient in _backward(dy, u, _unflat(*flat), needs)
    )


def _fake_backward(dy: torch.Tensor, u: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    flat, needs = others[:-_DIFFERENTIABLE], others[-_DIFFERENTIABLE:]
    like = zip(flat[:_DIFFERENTIABLE], needs, strict=True)
    return tuple(empty(t.shape, t.dtype, dy) if needed else empty((0,), dy.dtype, dy) for t, needed in like)


def _keep_operators(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _keep(ctx, output[1], inputs)
    ctx.mark_non_differentiable(output[1])


_GRADIENTS = ("dx", "dw", "da", "db", "dbias", "dgates")
_moe_lora = operator(
    f"moe_lora({_ARGUMENTS}) -> (Tensor, Tensor)",
    outputs=lambda *flat: (_new_output(*flat), _new_u(*flat)),
    run=_run,
    setup_context=_keep_operators,
    backward=lambda ctx, dy, _: (*_gradients(ctx, dy), *(None,) * (len(ctx.settings) + _TENSORS - _DIFFERENTIABLE)),
)
_moe_lora_inference = operator(f"moe_lora_inference({_ARGUMENTS}) -> Tensor", outputs=_new_output, run=_run_inference)
_moe_lora_backward = operator(
    f"moe_lora_backward(Tensor dy, Tensor u, {_ARGUMENTS}, {', '.join(f'bool needs_{name}' for name in _GRADIENTS)}) "
    f"-> ({', '.join(['Tensor'] * len(_GRADIENTS))})",
    outputs=_fake_backward,
    run=_run_backward,
)

SOURCES = sources()
_moe_lora_whole = composite(
    f"moe_lora_whole(str op, {_ARGUMENTS}) -> Tensor", lambda op, *flat: _by_operators(op, _unflat(*flat))
)


# --- the low-rank update alone --------------------------------------------------------------------------------------


def lora_gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
    saved: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dA (E, r, K) and dB (E, N, r) of :func:`moe_lora` alone, in either of the two ways; not differentiable.

    Args:
        x: (T, K). dy: (T*k, N), row t*k + j for slot j of token t. lora_a: (E, r, K). lora_b: (E, N, r).
        routing, scaling: as in :func:`moe_lora`.
        saved: U = scaling x A^T and D = scaling dy B as :func:`thin_products` gives them, which is how the backward pass
            does it; ``None``: every program computes anew what it needs of them, which is slower and needs no memory.

    Raises: as :func:`moe_lora`.
    """
    scaling = arguments.number("lora_gradients", "scaling", scaling)
    plan = _factors_alone_plan("lora_gradients", x, dy, lora_a, lora_b, routing)
    da, db = (empty(t.shape, t.dtype, t) for t in (lora_a, lora_b))
    if saved is not None:
        u, d = saved
        _factors(plan.factors, routing, d, u, x, dy, None, da, db)
    else:
        _recompute(plan.recompute_da, routing, dy, lora_b, x, scaling, da)
        _recompute(plan.recompute_db, routing, x, lora_a.transpose(1, 2), dy, scaling, db.transpose(1, 2))
    return da, db


def thin_products(
    x: torch.Tensor,
    dy: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """U = scaling x A^T and D = scaling dy B, each (T*k, padded rank) in sorted order; not differentiable.

    The rank is padded with zeros to a power of two of at least 16. Arguments as in :func:`lora_gradients`.
    """
    scaling = arguments.number("thin_products", "scaling", scaling)
    plan = _factors_alone_plan("thin_products", x, dy, lora_a, lora_b, routing)
    u, d = (empty(plan.shape, x.dtype, x) for _ in range(2))
    if plan.shrink_u is not None and plan.shrink_d is not None:
        _shrink(plan.shrink_u, routing, x, lora_a, u, scaling)
        _shrink(plan.shrink_d, routing, dy, lora_b.transpose(1, 2), d, scaling)
    return u, d


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _FactorsAlonePlan:
    """What is decided for a kind of call of these two."""

    shape: tuple[int, int]  # of U and D
    shrink_u: _ShrinkPlan | None  # None: there are no rows
    shrink_d: _ShrinkPlan | None
    factors: _WgradPlan
    recompute_da: _WgradPlan
    recompute_db: _WgradPlan


_factors_alone_plans = KeptPlans[_FactorsAlonePlan]()


def _factors_alone_plan(
    op: str, x: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, routing: Routing
) -> _FactorsAlonePlan:
    ids, experts = routing.expert_ids, routing.num_experts
    key = (*map(form, (x, dy, a, b, ids)), experts, precision(x.dtype), runtime.compile_target)
    plan = _factors_alone_plans.get(key)
    if plan is None:
        w = x.new_empty(()).expand(experts, x.shape[-1], b.shape[1])
        _check(op, _Given(x, w, a, b, None, None, routing, 1.0, "auto", False, False))
        arguments.check_shape(op, "dy", dy, (routing.rows, b.shape[1]))
        arguments.check_same_dtype(op, x=x, dy=dy, lora_a=a, lora_b=b)
        x_layout, dy_layout = _Layout(False, routing.slots), _Layout(False, 1)
        rows, turned_a, turned_b = routing.rows, a.transpose(1, 2), b.transpose(1, 2)
        plan = _FactorsAlonePlan(
            shape=(rows, kernels.padded_rank(a.shape[1])),
            shrink_u=_shrink_plan(routing, x, x_layout, a) if rows else None,
            shrink_d=_shrink_plan(routing, dy, dy_layout, turned_b) if rows else None,
            factors=_factors_plan(routing, x, x_layout, dy_layout, a, b.shape[1], False),
            recompute_da=_recompute_plan(dy_layout, b, x_layout, x.shape[1]),
            recompute_db=_recompute_plan(x_layout, turned_a, dy_layout, dy.shape[1]),
        )  # fmt: skip
        _factors_alone_plans.keep(key, plan)
    return plan


def _recompute_plan(left: _Layout, factor: torch.Tensor, right: _Layout, q: int) -> _WgradPlan:
    experts, _, rank = factor.shape
    tiles = kernels.recompute_tiles(rank, factor.element_size())
    launch = _tiled(
        kernels._moe_lora_bwd_recompute_kernel, tiles, L_GROUPED=left.grouped, Z_GROUPED=right.grouped,
        ACC=tl_accumulator(factor.dtype), PRECISION=precision(factor.dtype), r=rank, RANK=kernels.padded_rank(rank),
    )  # fmt: skip
    grid = (experts, cdiv(q, tiles.kwargs["BLOCK_Q"]), 1)
    return _WgradPlan(launch=launch, grid=grid, left_slots=left.slots, right_slots=right.slots)


def _recompute(
    plan: _WgradPlan, routing: Routing, left: torch.Tensor, factor: torch.Tensor, right: torch.Tensor, scaling: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fills out (E, r, Q), of any strides: scaling (left factor[e])^T right over an expert's rows."""
    plan.launch(
        plan.grid, routing.lists, 2 * routing.rows, left, *left.stride(), factor, *factor.stride(),
        right, *right.stride(), out, *out.stride(), scaling, factor.shape[1], right.shape[1],
        plan.left_slots, plan.right_slots,
    )  # fmt: skip
