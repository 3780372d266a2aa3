"""The public functions, their custom operators, and the launches."""

import dataclasses
from typing import Any, NamedTuple, Optional

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.moe_lora import kernels
from kernelbook.packed import NESTED_BLOCK, NF4Tensor

__all__ = ["Routing", "lora_gradients", "moe_lora", "route", "scatter2scatter", "thin_products"]

STRATEGIES = ("auto", "fused", "split")
MAX_ROWS = 2**30
_GRADIENTS = ("dx", "dw", "da", "db", "dbias", "dgates")


class Routing(NamedTuple):
    """Which token goes to which expert, sorted by expert. Made by :func:`route`; R = T k.

    Attributes:
        expert_ids: (T, k), as given.
        order: (R,) int32, the pair t*k + j at each sorted position; stable, slots to skip at the end.
        inverse: (R,) int32, the sorted position of each pair.
        offsets: (E + 1,) int32, the first sorted position of each expert; the last entry counts the rows that are not
            skipped.
        tiles: (n, 3) int32, what the kernels' programs work on: runs of positions of one expert, see ``kernels.py``.
    """

    expert_ids: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return self.offsets.shape[0] - 1

    @property
    def slots(self) -> int:
        """k, the experts of a token."""
        return self.expert_ids.shape[1]


# --- public functions -----------------------------------------------------------------------------------------------


def route(expert_ids: torch.Tensor, num_experts: int) -> Routing:
    """Sorts the (token, slot) pairs by expert; without a host synchronisation.

    Args:
        expert_ids: (T, k) int64 or int32, any strides, entries in [0, E]; E marks a slot to skip, whose output row is
            zero. On the CPU and under ``KERNELBOOK_DEBUG=1`` the ids are checked; on a GPU without it an id out of range
            counts as a slot to skip.
        num_experts: E.

    Returns:
        The routing that :func:`scatter2scatter` and :func:`moe_lora` take; it can be used many times.

    Raises:
        TypeError: ``expert_ids`` is not a tensor of int64 or int32, or ``num_experts`` no integer.
        ValueError: a shape or (where they are checked) an id is not as above.
    """
    op = "route"
    arguments.check_tensor(op, "expert_ids", expert_ids, dtypes=(torch.int64, torch.int32))
    if expert_ids.ndim != 2:
        raise ValueError(f"{op}: expert_ids must have two dimensions (T, k), got shape {tuple(expert_ids.shape)}")
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | torch.SymInt):
        raise TypeError(f"{op}: num_experts must be an integer, got {type(num_experts).__name__}")
    if num_experts < 1:
        raise ValueError(f"{op}: num_experts must be at least 1, got {num_experts}")
    sort = _route_now if launching.is_plain(expert_ids) else _route
    order, inverse, offsets, tiles = sort(expert_ids, num_experts)
    return Routing(expert_ids, order, inverse, offsets, tiles)


def scatter2scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    routing: Routing,
    *,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> torch.Tensor:
    """The product of each row with the matrix of the expert it is routed to; differentiable.

    Args:
        x: (T, K), float16, bfloat16, float32 or float64, any strides; if ``grouped_in``, (T*k, K) in expert order.
        w: (E, K, N), the dtype of ``x``, any strides.
        routing: of T tokens to k of E experts, from :func:`route`.
        grouped_in, grouped_out: rows are in expert order, position s holding pair ``routing.order[s]``.

    Returns:
        (T*k, N) in the dtype of ``x``: row t*k + j is ``x[t] @ w[expert_ids[t, j]]``, zero for a slot to skip; in expert
        order if ``grouped_out``. float32 products use tf32 where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape or a device is not as above.
    """
    op = "scatter2scatter"
    x, w = arguments.in_autocast_dtype(x, w)
    _check_rows(op, x, w, routing, grouped_in)
    return _product(x, w, None, None, None, None, routing, 1.0, "split", grouped_in, grouped_out)


def moe_lora(
    x: torch.Tensor,
    w: torch.Tensor,
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
) -> torch.Tensor:
    """A linear layer for each expert with a low-rank update: ``x W[e] + scaling (x A[e]^T) B[e]^T + bias[e]``.

    Differentiable in all tensors (once), and the same bit for bit in every run.

    Args:
        x: (T, K), float16, bfloat16, float32 or float64, any strides; if ``grouped_in``, (T*k, K) in expert order.
        w: (E, K, N), the dtype of ``x``, any strides. Its gradient is computed only if it requires one.
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

    Returns:
        (T*k, N) in the dtype of ``x``, row t*k + j for slot j of token t, in expert order if ``grouped_out``; with
        ``gates`` (T, N), the weighted sum over the slots. Slots to skip are zero.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device or ``strategy`` is not as above, or ``gates`` come with ``grouped_out``.
    """
    op = "moe_lora"
    x, w, lora_a, lora_b, bias = arguments.in_autocast_dtype(x, w, lora_a, lora_b, bias)
    _check_rows(op, x, w, routing, grouped_in)
    experts, k, n = w.shape
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
        arguments.check_shape(op, "gates", gates, routing.expert_ids.shape)
        if grouped_out:
            raise ValueError(f"{op}: grouped_out must be False with gates, whose sum over the slots is in token order")
    try:
        scaling = float(scaling)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: scaling must be a number, got {scaling!r}") from None
    arguments.check_same_device(op, x=x, lora_a=lora_a, lora_b=lora_b, bias=bias, gates=gates)
    arguments.check_choice(op, "strategy", strategy, STRATEGIES)
    return _product(x, w, lora_a, lora_b, bias, gates, routing, float(scaling), strategy, grouped_in, grouped_out)


def _product(
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    gates: torch.Tensor | None,
    routing: Routing,
    *settings: Any,
) -> torch.Tensor:
    given = (x, w, lora_a, lora_b, bias, gates)
    forward = _forward_now if launching.is_plain(*given) else _forward
    y, _ = forward(*given, routing.expert_ids, routing.order, routing.offsets, routing.tiles, *settings)
    return y


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
    op = "lora_gradients"
    _check_rows(op, x, x.new_empty((routing.num_experts, x.shape[-1], 0)), routing, False)
    arguments.check_shape(op, "dy", dy, (routing.order.shape[0], lora_b.shape[1]))
    arguments.check_same_dtype(op, x=x, dy=dy, lora_a=lora_a, lora_b=lora_b)
    dtype, rank = x.dtype, lora_a.shape[1]
    x, dy, lora_a, lora_b = launching.in_kernel_dtype(x, dy, lora_a, lora_b)
    routed = _Routed(routing.order, routing.offsets, routing.tiles, routing.slots)
    x_rows, dy_rows = _Rows(x, False, routing.slots), _Rows(dy, False, 1)
    with runtime.on_device_of(x):
        if saved is None:
            da = _launch_recompute(routed, dy_rows, lora_b, x_rows, scaling)
            db = _launch_recompute(routed, x_rows, lora_a.transpose(1, 2), dy_rows, scaling, transposed=True)
        else:
            u, d = launching.in_kernel_dtype(*saved)
            da, db = _launch_factors(routed, d, u, x_rows, dy_rows, None, rank)
    return da.to(dtype), db.to(dtype)


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
    dtype = x.dtype
    x, dy, lora_a, lora_b = launching.in_kernel_dtype(x, dy, lora_a, lora_b)
    routed = _Routed(routing.order, routing.offsets, routing.tiles, routing.slots)
    u, d = (x.new_empty(_u_shape(routed.rows, lora_a)) for _ in range(2))
    with runtime.on_device_of(x):
        if routed.rows > 0:
            _launch_thin(routed, _Rows(x, False, routing.slots), _Lora(lora_a, lora_b, u, scaling))
            transposed = _Lora(lora_b.transpose(1, 2), lora_a.transpose(1, 2), d, scaling)
            _launch_thin(routed, _Rows(dy, False, 1), transposed)
    return u.to(dtype), d.to(dtype)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_rows(op: str, x: torch.Tensor, w: torch.Tensor, routing: Routing, grouped_in: bool) -> None:
    arguments.check_tensor(op, "x", x)
    arguments.check_tensor(op, "w", w)
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, as route() returns it, got {type(routing).__name__}")
    if w.ndim != 3:
        raise ValueError(f"{op}: w must have three dimensions, got shape {tuple(w.shape)}")
    tokens, slots = routing.expert_ids.shape
    arguments.check_shape(op, "w", w, (routing.num_experts, *w.shape[1:]))
    arguments.check_shape(op, "x", x, (tokens * slots if grouped_in else tokens, w.shape[1]))
    arguments.check_same_dtype(op, x=x, w=w)
    arguments.check_same_device(op, x=x, w=w, routing=routing.order)


# --- routing --------------------------------------------------------------------------------------------------------


def _capacity(rows: int, experts: int, height: int) -> int:
    """No routing needs more tiles of this height: each group but the empty ones has one that is not full."""
    return rows // height + min(experts + 1, rows)


def _route_now(
    expert_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> order, inverse, offsets, tiles."""
    arguments.check_index_values("route", "expert_ids", expert_ids, num_experts + 1)
    slots, rows = expert_ids.shape[1], expert_ids.numel()
    if rows >= MAX_ROWS:
        raise ValueError(f"route: expert_ids must have fewer than 2^30 entries, got {rows}")
    order, inverse, offsets, tiles = _empty_routing(expert_ids, num_experts)
    if rows == 0:
        return order, inverse, offsets.zero_(), tiles
    programs, block_e, block_p = kernels.route_blocks(rows, num_experts)
    block = kernels.ROUTE_BLOCK
    per_program = launching.cdiv(launching.cdiv(rows, programs), block) * block
    given = (expert_ids, *expert_ids.stride())
    counts = order  # any tensor: one program counts by itself
    with runtime.on_device_of(expert_ids):
        if programs > 1:
            counts = torch.empty((programs, block_e), dtype=torch.int32, device=expert_ids.device)
            kernels._route_fwd_count_kernel[(programs,)](
                *given, counts, rows, slots, num_experts, per_program, BLOCK=block, BLOCK_E=block_e,
                num_warps=kernels.ROUTE_WARPS,
            )  # fmt: skip
        kernels._route_fwd_place_kernel[(programs,)](
            *given, counts, order, inverse, offsets, tiles, rows, slots, num_experts, per_program,
            COUNTED=programs > 1, HEIGHTS=kernels.HEIGHTS, BLOCK=block, BLOCK_E=block_e, BLOCK_P=block_p,
            num_warps=kernels.ROUTE_WARPS,
        )  # fmt: skip
    return order, inverse, offsets, tiles


def _empty_routing(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    rows = expert_ids.numel()
    tiles = sum(_capacity(rows, num_experts, height) for height in kernels.HEIGHTS)
    shapes = ((rows,), (rows,), (num_experts + 1,), (tiles, 3))
    return tuple(torch.empty(shape, dtype=torch.int32, device=expert_ids.device) for shape in shapes)


def _route_fake(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    rows = expert_ids.numel()
    tiles = sum(rows // height + torch.sym_min(num_experts + 1, rows) for height in kernels.HEIGHTS)
    shapes: Any = ((rows,), (rows,), (num_experts + 1,), (tiles, 3))
    return tuple(torch.empty(shape, dtype=torch.int32, device=expert_ids.device) for shape in shapes)


_route = launching.operator_before("route", _route_now, _route_fake)

# --- custom operators -----------------------------------------------------------------------------------------------


def _forward_now(
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: Optional[torch.Tensor],  # noqa: UP045
    lora_b: Optional[torch.Tensor],  # noqa: UP045
    bias: Optional[torch.Tensor],  # noqa: UP045
    gates: Optional[torch.Tensor],  # noqa: UP045
    expert_ids: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    scaling: float,
    strategy: str,
    grouped_in: bool,
    grouped_out: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> Y, and U = scaling X A^T in sorted order (R, padded rank), which the backward pass needs; empty without LoRA."""
    dtype, n = x.dtype, w.shape[2]
    routed = _Routed(order, offsets, tiles, expert_ids.shape[1])
    x, w, lora_a, lora_b, bias = launching.in_kernel_dtype(x, w, lora_a, lora_b, bias)
    u = x.new_empty(_u_shape(routed.rows, lora_a))
    if routed.rows > 0 and n > 0:
        with runtime.on_device_of(x):
            lora = _Lora.of(lora_a, lora_b, u, scaling)
            rows = _Rows(x, grouped_in, routed.slots)
            y = _launch_rows(routed, rows, w, lora, bias, grouped_out, strategy)
            if gates is not None:
                y, _ = _launch_slots(routed, y, gates, None, False)
    else:
        y = x.new_zeros((routed.rows if gates is None else expert_ids.shape[0], n))
        u.zero_()
    return y.to(dtype), u.to(dtype)


def _forward_fake(
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    gates: torch.Tensor | None,
    expert_ids: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    scaling: float,
    strategy: str,
    grouped_in: bool,
    grouped_out: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = order.shape[0] if gates is None else expert_ids.shape[0]
    return x.new_empty((rows, w.shape[2])), x.new_empty(_u_shape(order.shape[0], lora_a))


def _backward_now(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: Optional[torch.Tensor],  # noqa: UP045
    lora_b: Optional[torch.Tensor],  # noqa: UP045
    bias: Optional[torch.Tensor],  # noqa: UP045
    gates: Optional[torch.Tensor],  # noqa: UP045
    u: torch.Tensor,
    expert_ids: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    scaling: float,
    strategy: str,
    grouped_in: bool,
    grouped_out: bool,
    needs_dx: bool,
    needs_dw: bool,
    needs_da: bool,
    needs_db: bool,
    needs_dbias: bool,
    needs_dgates: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx, dw, dlora_a, dlora_b, dbias, dgates; empty where not needed."""
    dtype = x.dtype
    routed = _Routed(order, offsets, tiles, expert_ids.shape[1])
    dy, x, w, lora_a, lora_b, bias, u = launching.in_kernel_dtype(dy, x, w, lora_a, lora_b, bias, u)
    wanted = dict(zip(_GRADIENTS, (needs_dx, needs_dw, needs_da, needs_db, needs_dbias, needs_dgates), strict=True))
    if routed.rows == 0 or w.shape[2] == 0:
        inputs = zip(_GRADIENTS, (x, w, lora_a, lora_b, bias, gates), strict=True)
        zeros = {name: t.new_zeros(t.shape) for name, t in inputs if t is not None and wanted[name]}
        return _settle(zeros, x, dtype)
    found: dict[str, torch.Tensor] = {}
    x_rows = _Rows(x, grouped_in, routed.slots)
    # With gates a token's slots share one row of dY, and each gradient below counts a row with its gate.
    dy_rows = _Rows(dy, grouped_out, routed.slots if gates is not None else 1)
    with runtime.on_device_of(x):
        d = x.new_empty(_u_shape(routed.rows, lora_a))
        transposed = _Lora.of(_transposed(lora_b), _transposed(lora_a), d, scaling)
        if needs_dx or needs_dgates:
            grown = _launch_rows(routed, dy_rows, w.transpose(1, 2), transposed, None, grouped_in, strategy)
            if gates is not None or not (grouped_in or routed.slots == 1):
                out_of = x if needs_dgates else None
                found["dx"], found["dgates"] = _launch_slots(
                    routed, grown, gates, out_of, grouped_in, with_out=needs_dx
                )
            else:
                found["dx"] = grown
        elif needs_da and transposed is not None:
            _launch_thin(routed, dy_rows, transposed)
        if lora_a is not None and lora_b is not None:
            if needs_da and needs_db:
                found["da"], found["db"] = _launch_factors(routed, d, u, x_rows, dy_rows, gates, lora_a.shape[1])
            elif needs_da:
                left = _Rows(d[:, : lora_a.shape[1]], True, 1)
                found["da"] = _launch_gram(routed, left, x_rows, gates, lora_a.shape[1:])
            elif needs_db:
                left = _Rows(u[:, : lora_b.shape[2]], True, 1)
                found["db"] = _launch_gram(routed, left, dy_rows, gates, lora_b.shape[:0:-1], transposed=True)
        if needs_dw:
            found["dw"] = _launch_gram(routed, x_rows, dy_rows, gates, w.shape[1:])
        if needs_dbias and bias is not None:
            ones = _Rows(x.new_ones((routed.rows, 1)), True, 1)
            found["dbias"] = _launch_gram(routed, ones, dy_rows, gates, (1, bias.shape[1]), exact=True)[:, 0]
        if needs_dgates and bias is not None and gates is not None:
            # y = ... + bias[e]: what the inner products of dX and x leave out.
            with launching.without_autocast(dy):
                inner = torch.matmul(dy, bias.t())
            skipped = (expert_ids < 0) | (expert_ids >= w.shape[0])
            of_bias = inner.gather(1, expert_ids.long().masked_fill(skipped, 0)).masked_fill(skipped, 0)
            found["dgates"] = found["dgates"] + of_bias.to(found["dgates"].dtype)
    if gates is not None and needs_dgates:
        found["dgates"] = found["dgates"].to(gates.dtype)
    return _settle({name: found[name] for name in _GRADIENTS if wanted[name]}, x, dtype)


def _settle(found: dict[str, torch.Tensor], like: torch.Tensor, dtype: torch.dtype) -> Any:
    """The gradients in their order and dtype (gates have their own); empty where not wanted, never one tensor twice."""
    settled = []
    for name in _GRADIENTS:
        gradient = found.get(name)
        if gradient is None:
            gradient = like.new_empty(0, dtype=dtype)
        settled.append(gradient if name == "dgates" else gradient.to(dtype))
    return tuple(settled)


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    gates: torch.Tensor | None,
    u: torch.Tensor,
    expert_ids: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    scaling: float,
    strategy: str,
    grouped_in: bool,
    grouped_out: bool,
    *needs: bool,
) -> tuple[torch.Tensor, ...]:
    tensors = (x, w, lora_a, lora_b, bias, gates)
    return tuple(
        t.new_empty(t.shape) if t is not None and needed else x.new_empty(0)
        for t, needed in zip(tensors, needs, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scaling, ctx.strategy, ctx.grouped_in, ctx.grouped_out = inputs
    ctx.save_for_backward(*tensors[:6], output[1], *tensors[6:])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:6]
    if dy is None:
        return (None,) * 14
    settings = (ctx.scaling, ctx.strategy, ctx.grouped_in, ctx.grouped_out)
    gradients = _backward(dy, *ctx.saved_tensors, *settings, *needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), *(None,) * 8


_forward = launching.operator_before("moe_lora", _forward_now, _forward_fake, _autograd, _setup)
_backward = launching.operator_before("moe_lora_backward", _backward_now, _backward_fake)


# --- launches -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Routed:
    """A routing as the launches take it; the list of tiles of each height."""

    order: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    slots: int

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1

    def tiles_of(self, height: int) -> tuple[torch.Tensor, int]:
        """The section of tiles of this height, and how many there can be."""
        before = sum(_capacity(self.rows, self.experts, h) for h in kernels.HEIGHTS if h < height)
        return self.tiles[before:], _capacity(self.rows, self.experts, height)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows (R, N) in sorted order if ``grouped``; otherwise (R / slots, N), row p // slots for pair p."""

    tensor: torch.Tensor
    grouped: bool
    slots: int


@dataclasses.dataclass(frozen=True)
class _Lora:
    """a (E, r, K), b (E, N, r), and U (R, padded rank), which is read or written."""

    a: torch.Tensor
    b: torch.Tensor
    u: torch.Tensor
    scaling: float

    @classmethod
    def of(cls, a: torch.Tensor | None, b: torch.Tensor | None, u: torch.Tensor, scaling: float) -> "_Lora | None":
        return None if a is None or b is None else cls(_one_contiguous(a), _one_contiguous(b), u, scaling)

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclasses.dataclass(frozen=True)
class _Packed:
    """The matrices (E, K, N) that an ``NF4Tensor`` of shape (E, N, K) stands for; ``transposed``: of shape (E, K, N)."""

    q: NF4Tensor
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        e, rows, cols = self.q.shape
        return (e, rows, cols) if self.transposed else (e, cols, rows)

    def transpose(self, *_: int) -> "_Packed":
        return dataclasses.replace(self, transposed=not self.transposed)


def _one_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where neither rows nor columns are contiguous (PEFT's B): each tile would read a sector an element."""
    return tensor if 1 in tensor.stride()[1:] else tensor.contiguous()


def _transposed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.transpose(1, 2)


def _u_shape(rows: int, lora_a: torch.Tensor | None) -> tuple[int, ...]:
    return (0,) if lora_a is None else (rows, kernels.padded_rank(lora_a.shape[1]))


def _numbers(dtype: torch.dtype) -> dict[str, Any]:
    """How products of this dtype are added up."""
    return {"ACC": launching.tl_accumulator(dtype), "PRECISION": launching.precision()}


def _in_boxes(tensor: torch.Tensor) -> bool:
    """Whether a tensor descriptor can read it: 16-bit, aligned, one dimension contiguous (the last)."""
    return tensor.element_size() == 2 and launching.has_aligned_rows(tensor) and tensor.numel() > 0


def _launch_rows(
    routed: _Routed,
    rows: _Rows,
    w: torch.Tensor | _Packed,
    lora: _Lora | None,
    bias: torch.Tensor | None,
    grouped_out: bool,
    strategy: str,
    tiles: kernels.Tiles | None = None,
) -> torch.Tensor:
    """-> Y (R, N) of rows and w (E, K, N); fills lora's U."""
    x = rows.tensor
    experts, k, n = w.shape
    x_aligned = launching.has_aligned_rows(x)
    if not x_aligned and k * x.element_size() % 16 == 0:
        # A gradient may come expanded; a copy takes less time than to read it an element at a time.
        x = x.contiguous()
        rows = dataclasses.replace(rows, tensor=x)
        x_aligned = launching.has_aligned_rows(x)
    how = "none"
    if lora is not None:
        how = strategy
        if strategy == "auto":
            how = kernels.choose_strategy(routed.rows, experts, k, n, lora.rank)
        if lora.rank > kernels.FUSED_RANK or x.dtype == torch.float64:
            how = "split"
        if how == "split":
            _launch_thin(routed, rows, lora)
        elif lora.b.stride(2) != 1:
            # With W and B contiguous along different dimensions, ptxas serializes the tensor cores' instructions.
            lora = dataclasses.replace(lora, b=lora.b.contiguous())
    properties = runtime.properties()
    rank = kernels.padded_rank(lora.rank) if lora is not None else 0
    access = "narrow"
    matrix: Any = w
    if isinstance(w, _Packed):
        by_row, access = w.transposed, "packed"
    else:
        matrix = w.transpose(1, 2)
        by_row = not _in_boxes(matrix)
        if by_row:
            matrix = w
        if x_aligned and (not by_row or _in_boxes(w)):
            access = "boxes" if kernels.has_boxes(properties) else "wide"
    tiles = tiles or kernels.rows_tiles(
        routed.rows, experts, rank if how == "fused" else 0, x.element_size(), access, properties
    )
    blocks = tiles.kwargs
    table, num_m = routed.tiles_of(tiles.height)
    y = torch.empty((routed.rows, n), dtype=x.dtype, device=x.device)
    x_box = w_box = None
    if access == "boxes":
        sides = [blocks["BLOCK_K"], blocks["BLOCK_N"]]
        w_box = launching.box(matrix, 1, *(sides if by_row else sides[::-1]))
        if rows.grouped:
            x_box = launching.box(x, tiles.height, blocks["BLOCK_K"])
    # Four warps side by side make 32 columns, and a narrower product of few rows would be computed more than once.
    block_r = max(32 if tiles.height < 64 else 16, rank) if how == "fused" else max(16, min(rank, 32))
    kernels._moe_lora_fwd_rows_kernel[(num_m * launching.cdiv(n, blocks["BLOCK_N"]),)](
        routed.order, table,
        x, *x.stride(), x_box,
        *_weight_arguments(w, w_box, x),
        *launching.strided(lora.a if lora is not None else None, 3, x),
        *launching.strided(lora.b if lora is not None else None, 3, x),
        lora.u if lora is not None else x,
        *launching.strided(bias, 2, x),
        y,
        lora.scaling if lora is not None else 0.0, experts, k, n, rows.slots, num_m,
        **_weight_constants(w, x, properties),
        X_GROUPED=rows.grouped, Y_GROUPED=grouped_out, W_BY_ROW=by_row, LORA=how, HAS_BIAS=bias is not None,
        **_numbers(x.dtype), EVEN_K=k % blocks["BLOCK_K"] == 0,
        **blocks, r=lora.rank if lora is not None else 0, RANK=rank, BLOCK_R=block_r,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def _weight_arguments(w: torch.Tensor | _Packed, w_box: Any, x: torch.Tensor) -> tuple[Any, ...]:
    if not isinstance(w, _Packed):
        return (w, *w.stride(), w_box, x, x, x, x, x)
    q = w.q
    nested = (q.absmax if t is None else t for t in (q.nested_absmax, q.nested_code, q.nested_offset))
    return (q.packed.view(torch.int32), 0, 0, 0, None, q.absmax, *nested, q.code)


def _weight_constants(
    w: torch.Tensor | _Packed, x: torch.Tensor, properties: runtime.DeviceProperties
) -> dict[str, Any]:
    if not isinstance(w, _Packed):
        return {"PACKED": "none", "BLOCK_SIZE": 0, "SCALE": "", "NESTED_BLOCK": NESTED_BLOCK}
    permute = x.element_size() == 2 and properties.arch.startswith("sm_")
    return {
        "PACKED": "permute" if permute else "gather",
        "BLOCK_SIZE": w.q.block_size,
        "SCALE": "nested" if w.q.double_quant else "float32",
        "NESTED_BLOCK": NESTED_BLOCK,
    }


def _launch_thin(routed: _Routed, rows: _Rows, lora: _Lora, tiles: kernels.Tiles | None = None) -> None:
    """Fills U = scaling X A^T."""
    x = rows.tensor
    experts, rank, k = lora.a.shape
    padded = kernels.padded_rank(rank)
    tiles = tiles or kernels.thin_tiles(routed.rows, experts, k, padded, x.element_size(), runtime.properties())
    blocks = tiles.kwargs
    table, num_m = routed.tiles_of(tiles.height)
    split = blocks["SPLIT"]
    target = lora.u
    if split > 1:
        target = torch.empty((routed.rows * split, padded), dtype=launching.accumulator(x.dtype), device=x.device)
    exact = x.dtype == torch.float64  # a kernel takes its scalars in float32
    kernels._moe_lora_fwd_thin_kernel[(num_m, padded // blocks["BLOCK_R"], split)](
        routed.order, table,
        x, *x.stride(),
        lora.a, lora.a.stride(0), lora.a.stride(2), lora.a.stride(1),
        target,
        1.0 if exact else lora.scaling, experts, k, rows.slots,
        X_GROUPED=rows.grouped, **_numbers(x.dtype), EVEN_K=k % blocks["BLOCK_K"] == 0,
        **blocks, r=rank, RANK=padded,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split > 1:
        _sum_slots(target, split, lora.u)
    if exact:
        lora.u.mul_(lora.scaling)


def _launch_gram(
    routed: _Routed,
    left: _Rows,
    right: _Rows,
    gates: torch.Tensor | None,
    shape: Any,
    *,
    transposed: bool = False,
    exact: bool = False,
    tiles: kernels.Tiles | None = None,
) -> torch.Tensor:
    """-> (E, P, Q), the sum over an expert's rows of left^T right, each with its gate; (E, Q, P) if ``transposed``.

    ``exact``: float32 as it is, never tf32.
    """
    p, q = shape
    x = left.tensor
    out = torch.empty((routed.experts, q, p) if transposed else (routed.experts, p, q), dtype=x.dtype, device=x.device)
    steps = out.stride()
    if out.numel() > 0:
        tiles = tiles or kernels.gram_tiles(routed.rows, routed.experts, p, x.element_size(), runtime.properties())
        blocks = tiles.kwargs
        kernels._moe_lora_bwd_gram_kernel[
            (routed.experts, launching.cdiv(p, blocks["BLOCK_P"]), launching.cdiv(q, blocks["BLOCK_Q"]))
        ](
            routed.order, routed.offsets,
            x, *x.stride(),
            right.tensor, *right.tensor.stride(),
            _flat(gates) if gates is not None else x,
            out, steps[0], *(steps[:0:-1] if transposed else steps[1:]),
            q, left.slots, right.slots,
            L_GROUPED=left.grouped, Z_GROUPED=right.grouped, HAS_GATES=gates is not None,
            **(_numbers(x.dtype) | ({"PRECISION": "ieee"} if exact else {})), P=p,
            **blocks, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out


def _launch_factors(
    routed: _Routed, d: torch.Tensor, u: torch.Tensor, x: _Rows, dy: _Rows, gates: torch.Tensor | None, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> dA (E, r, K) and dB (E, N, r) from D and U (R, padded rank) in sorted order."""
    k, n = x.tensor.shape[1], dy.tensor.shape[1]
    da = torch.empty((routed.experts, rank, k), dtype=d.dtype, device=d.device)
    db = torch.empty((routed.experts, n, rank), dtype=d.dtype, device=d.device)
    tiles = kernels.gram_tiles(routed.rows, routed.experts, rank, d.element_size(), runtime.properties())
    blocks = tiles.kwargs
    columns = launching.cdiv(k, blocks["BLOCK_Q"]) + launching.cdiv(n, blocks["BLOCK_Q"])
    kernels._moe_lora_bwd_factors_kernel[(routed.experts, launching.cdiv(rank, blocks["BLOCK_P"]), columns)](
        routed.order, routed.offsets,
        d, u, d.stride(0),
        x.tensor, *x.tensor.stride(),
        dy.tensor, *dy.tensor.stride(),
        _flat(gates) if gates is not None else d,
        da, db,
        k, n, x.slots, dy.slots,
        X_GROUPED=x.grouped, DY_GROUPED=dy.grouped, HAS_GATES=gates is not None,
        **_numbers(d.dtype), P=rank,
        **blocks, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return da, db


def _launch_recompute(
    routed: _Routed, left: _Rows, factor: torch.Tensor, right: _Rows, scaling: float, *, transposed: bool = False
) -> torch.Tensor:
    """-> (E, r, Q), scaling (left factor[e])^T right over an expert's rows; (E, Q, r) if ``transposed``."""
    experts, c, rank = factor.shape
    q = right.tensor.shape[1]
    shape = (experts, q, rank) if transposed else (experts, rank, q)
    out = torch.empty(shape, dtype=factor.dtype, device=factor.device)
    steps = out.stride()
    tiles = kernels.recompute_tiles(rank, factor.element_size())
    kernels._moe_lora_bwd_recompute_kernel[(experts, launching.cdiv(q, tiles.kwargs["BLOCK_Q"]))](
        routed.order, routed.offsets,
        left.tensor, *left.tensor.stride(),
        factor, *factor.stride(),
        right.tensor, *right.tensor.stride(),
        out, steps[0], *(steps[:0:-1] if transposed else steps[1:]),
        scaling, c, q, left.slots, right.slots,
        L_GROUPED=left.grouped, Z_GROUPED=right.grouped, **_numbers(factor.dtype),
        r=rank, RANK=kernels.padded_rank(rank), **tiles.kwargs, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _flat(gates: torch.Tensor) -> torch.Tensor:
    return gates.to(runtime.kernel_dtype(gates.dtype)).reshape(-1).contiguous()


def _launch_slots(
    routed: _Routed,
    values: torch.Tensor,
    gates: torch.Tensor | None,
    x: torch.Tensor | None,
    grouped: bool,
    *,
    with_out: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (R, C) of pairs -> their sum over the slots of each token, weighted by gates (T, C), and dgates (T, k).

    dgates are the inner products of ``values`` and ``x``, empty without ``x``. In sorted order (``grouped``) there is
    nothing to sum: -> (R, C).
    """
    slots = 1 if grouped else routed.slots
    out_rows = routed.rows // slots
    out = values.new_empty((out_rows, values.shape[1]) if with_out else 0)
    dgates = (values if gates is None else gates).new_empty(
        (routed.rows // routed.slots, routed.slots) if x is not None else 0,
        dtype=launching.accumulator(values.dtype),
    )
    _sum_slots(
        values, slots, out, gates=gates, order=routed.order if grouped else None, x=x, dgates=dgates, with_out=with_out
    )
    return out, dgates


def _sum_slots(
    values: torch.Tensor,
    slots: int,
    out: torch.Tensor,
    *,
    gates: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    dgates: torch.Tensor | None = None,
    with_out: bool = True,
) -> None:
    """Fills out (R / slots, C) and, if there is an x (R / slots, C), dgates (R,) from values (R, C)."""
    rows, columns = values.shape
    tiles = kernels.slots_tiles(slots, columns)
    # The inner products go over all columns, so that one program has to see them.
    pieces = 1 if x is not None else launching.cdiv(columns, tiles.kwargs["BLOCK_C"])
    kernels._moe_lora_fwd_slots_kernel[(rows // slots, pieces)](
        order if order is not None else values, values,
        _flat(gates) if gates is not None else values,
        out,
        *launching.strided(x, 2, values),
        dgates if dgates is not None else values,
        columns,
        SLOTS=slots, GROUPED=order is not None, HAS_GATES=gates is not None, WITH_OUT=with_out, WITH_DGATES=x is not None,
        ACC=launching.tl_accumulator(values.dtype),
        **tiles.kwargs, num_warps=tiles.warps,
    )  # fmt: skip
