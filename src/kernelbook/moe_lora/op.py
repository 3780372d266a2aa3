"""The public functions, their operators, and the launches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.moe_lora import kernels
from kernelbook.packed import NESTED_BLOCK, NF4Tensor, products
from kernelbook.packed.products import Matrices, strided
from kernelbook.plans import derived

__all__ = ["Routing", "lora_gradients", "moe_lora", "route", "scatter2scatter", "thin_products"]

STRATEGIES = ("auto", "fused", "split")
MAX_ROWS = 2**30


class Routing(NamedTuple):
    """Which token goes to which expert, sorted by expert. Made by :func:`route`; R = T k.

    Attributes:
        expert_ids: (T, k), as given.
        lists: int32, the four lists below one behind the other; as one tensor they cost the host one allocation.
        num_experts: E.
    """

    expert_ids: torch.Tensor
    lists: torch.Tensor
    num_experts: int

    @property
    def slots(self) -> int:
        """k, the experts of a token."""
        return self.expert_ids.shape[1]

    @property
    def rows(self) -> int:
        """R."""
        return self.expert_ids.numel()

    @property
    def order(self) -> torch.Tensor:
        """(R,) int32, the pair t*k + j at each sorted position; stable, slots to skip at the end."""
        return self.lists[: self.rows]

    @property
    def inverse(self) -> torch.Tensor:
        """(R,) int32, the sorted position of each pair."""
        return self.lists[self.rows : 2 * self.rows]

    @property
    def offsets(self) -> torch.Tensor:
        """(E + 1,) int32, the first sorted position of each expert; the last entry counts the rows not skipped."""
        return self.lists[2 * self.rows : 2 * self.rows + self.num_experts + 1]

    @property
    def tiles(self) -> torch.Tensor:
        """(n, 3) int32, what the kernels' programs work on: runs of positions of one expert, see ``kernels.py``."""
        return self.lists[2 * self.rows + self.num_experts + 1 :].view(-1, 3)


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
    num_experts = _check_ids(expert_ids, num_experts)
    return Routing(expert_ids, _route(expert_ids, num_experts), num_experts)


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
    return _product(
        "scatter2scatter", x, w, None, None, None, None, routing, 1.0, "split", grouped_in, grouped_out, transposed
    )


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
    return _product(
        "moe_lora", x, w, lora_a, lora_b, bias, gates, routing, scaling, strategy, grouped_in, grouped_out, transposed
    )


def _product(
    op: str, x: torch.Tensor, w: Any, lora_a: Any, lora_b: Any, bias: Any, gates: Any,
    routing: Routing, scaling: Any, strategy: str, grouped_in: bool, grouped_out: bool, transposed: bool,
) -> torch.Tensor:  # fmt: skip
    x, w, lora_a, lora_b, bias = arguments.in_autocast_dtype(x, w, lora_a, lora_b, bias)
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, as route() returns it, got {type(routing).__name__}")
    scaling = arguments.number(op, "scaling", scaling)
    packed: tuple[Any, ...] = (None, None, None, None, None)
    shape: tuple[Any, ...] = (None, None, None)
    block_size = 0
    if isinstance(w, NF4Tensor):
        if len(w.shape) != 3:
            raise ValueError(f"{op}: w must have three dimensions, got shape {w.shape}")
        packed = (w.absmax, w.code, w.nested_absmax, w.nested_code, w.nested_offset)
        shape, block_size, w = w.shape, w.block_size, w.packed
    elif transposed:
        raise ValueError(f"{op}: transposed must be False for a dense w, whose strides say it, got {transposed!r}")
    expert_ids, lists, experts = routing
    n = _check(
        op,
        x,
        w,
        *shape,
        lora_a,
        lora_b,
        bias,
        gates,
        expert_ids,
        experts,
        strategy,
        grouped_in,
        grouped_out,
        transposed,
    )
    given = (
        x, w, lora_a, lora_b, bias, gates, expert_ids, lists, *packed,
        experts, n, block_size, scaling, strategy, grouped_in, grouped_out, transposed,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given[:6]):
        y: torch.Tensor = _forward(*given)[0]
    else:
        y = _inference(*given)
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
    w = x.new_empty(()).expand(routing.num_experts, x.shape[-1], lora_b.shape[1])
    ids, experts = routing.expert_ids, routing.num_experts
    scaling = arguments.number("lora_gradients", "scaling", scaling)
    _check(
        "lora_gradients", x, w, None, None, None, lora_a, lora_b, None, None, ids, experts, "auto", False, False, False
    )
    arguments.check_shape("lora_gradients", "dy", dy, (routing.rows, lora_b.shape[1]))
    arguments.check_same_dtype("lora_gradients", x=x, dy=dy, lora_a=lora_a, lora_b=lora_b)
    dtype = x.dtype
    x, dy, lora_a, lora_b = launching.in_kernel_dtype(x, dy, lora_a, lora_b)
    da, db = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (lora_a, lora_b))
    x_rows, dy_rows = _Rows(x, False, routing.slots), _Rows(dy, False, 1)
    if saved is None:
        _launch_recompute(routing, dy_rows, lora_b, x_rows, scaling, da)
        _launch_recompute(routing, x_rows, lora_a.transpose(1, 2), dy_rows, scaling, db.transpose(1, 2))
    else:
        u, d = launching.in_kernel_dtype(*saved)
        _launch_factors(routing, d, u, x_rows, dy_rows, None, da, db)
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
    u, d = (_empty_u(x, routing.rows, lora_a) for _ in range(2))
    if routing.rows > 0:
        _launch_thin(routing, _Rows(x, False, routing.slots), _Lora(lora_a, lora_b, u, scaling))
        transposed = _Lora(lora_b.transpose(1, 2), lora_a.transpose(1, 2), d, scaling)
        _launch_thin(routing, _Rows(dy, False, 1), transposed)
    return u.to(dtype), d.to(dtype)


# --- checks ---------------------------------------------------------------------------------------------------------


@arguments.once
def _check_ids(expert_ids: torch.Tensor, num_experts: Any) -> int:
    """-> the number of experts."""
    op = "route"
    arguments.check_tensor(op, "expert_ids", expert_ids, dtypes=(torch.int64, torch.int32))
    if expert_ids.ndim != 2:
        raise ValueError(f"{op}: expert_ids must have two dimensions (T, k), got shape {tuple(expert_ids.shape)}")
    return arguments.integer(op, "num_experts", num_experts, least=1)


@arguments.once
def _check(
    op: str, x: torch.Tensor, w: torch.Tensor, stored: int | None, n: Any, k: Any, lora_a: Any, lora_b: Any, bias: Any,
    gates: Any, expert_ids: torch.Tensor, experts: int, strategy: str, grouped_in: bool, grouped_out: bool,
    transposed: bool,
) -> int:  # fmt: skip
    """-> N. If ``w`` is packed it has shape (stored, n, k), or n and k change places; otherwise these are ``None``."""
    arguments.check_tensor(op, "x", x)
    if stored is None:
        arguments.check_tensor(op, "w", w)
        if w.ndim != 3:
            raise ValueError(f"{op}: w must have three dimensions, got shape {tuple(w.shape)}")
        _, k, n = w.shape
        arguments.check_shape(op, "w", w, (experts, k, n))
        arguments.check_same_dtype(op, x=x, w=w)
    else:
        arguments.check_tensor(op, "w", w, dtypes=(torch.uint8,))
        if stored != experts:
            raise ValueError(f"{op}: w must have shape {(experts, n, k)}, got {(stored, n, k)}")
        if transposed:
            n, k = k, n
    tokens, slots = expert_ids.shape
    arguments.check_shape(op, "x", x, (tokens * slots if grouped_in else tokens, k))
    arguments.check_same_device(op, x=x, w=w, routing=expert_ids)
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
    return n


# --- routing --------------------------------------------------------------------------------------------------------

# What is compiled only is asked for once, and may be replaced in between.
_cached: Callable[[Any], Any] = (lambda f: f) if runtime.COMPILE_ONLY else derived


def _capacity(rows: int, experts: int, height: int) -> int:
    """No routing needs more tiles of this height: each group but the empty ones has one that is not full."""
    least = min if type(rows) is int and type(experts) is int else torch.sym_min
    return rows // height + least(experts + 1, rows)


@_cached
def _section(rows: int, experts: int, height: int) -> tuple[int, int]:
    """Where in the lists the tiles of this height begin, and how many there can be."""
    before = sum(_capacity(rows, experts, h) for h in kernels.HEIGHTS if h < height)
    return 2 * rows + experts + 1 + 3 * before, _capacity(rows, experts, height)


def _empty_lists(expert_ids: torch.Tensor, experts: int) -> torch.Tensor:
    rows = expert_ids.numel()
    tiles = sum(_capacity(rows, experts, height) for height in kernels.HEIGHTS)
    return torch.empty(2 * rows + experts + 1 + 3 * tiles, dtype=torch.int32, device=expert_ids.device)


@_cached
def _route_plan(rows: int, experts: int) -> tuple[int, int, int, Launch | None, Launch]:
    """-> programs, pairs of each, padded groups, and the launches that count and that sort."""
    programs, block_e, block_p = kernels.route_blocks(rows, experts)
    block, warps = kernels.ROUTE_BLOCK, kernels.ROUTE_WARPS
    counted = programs > 1
    count = _launch(kernels._route_fwd_count_kernel, BLOCK=block, BLOCK_E=block_e, num_warps=warps)
    place = _launch(
        kernels._route_fwd_place_kernel, COUNTED=counted, HEIGHTS=kernels.HEIGHTS, BLOCK=block, BLOCK_E=block_e,
        BLOCK_P=block_p, num_warps=warps,
    )  # fmt: skip
    return programs, cdiv(cdiv(rows, programs), block) * block, block_e, count if counted else None, place


def _run_route(lists: torch.Tensor, expert_ids: torch.Tensor, experts: int) -> None:
    arguments.check_index_values("route", "expert_ids", expert_ids, experts + 1)
    rows = expert_ids.numel()
    if rows >= MAX_ROWS:
        raise ValueError(f"route: expert_ids must have fewer than 2^30 entries, got {rows}")
    if rows == 0:
        lists.zero_()
        return
    programs, each, block_e, count, place = _route_plan(rows, experts)
    given = (expert_ids, *expert_ids.stride())
    sizes = (rows, expert_ids.shape[1], experts, each)
    counts = None
    if count is not None:
        counts = torch.empty((programs, block_e), dtype=torch.int32, device=expert_ids.device)
        count((programs,), *given, counts, *sizes)
    place((programs,), *given, counts, lists, *sizes)


_route = launching.operator(
    "route(Tensor expert_ids, SymInt experts) -> Tensor", outputs=_empty_lists, run=_run_route,
    repeated=launching.settings,
)  # fmt: skip

# --- operators ------------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """The operators' arguments; see :func:`moe_lora`. If ``w`` is packed there is an ``absmax``."""

    x: torch.Tensor
    w: torch.Tensor
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    bias: torch.Tensor | None
    gates: torch.Tensor | None
    expert_ids: torch.Tensor
    lists: torch.Tensor
    absmax: torch.Tensor | None
    code: torch.Tensor | None
    nested_absmax: torch.Tensor | None
    nested_code: torch.Tensor | None
    nested_offset: torch.Tensor | None
    experts: int
    n: int
    block_size: int
    scaling: float
    strategy: str
    grouped_in: bool
    grouped_out: bool
    transposed: bool

    @property
    def weight(self) -> torch.Tensor | Matrices:
        if self.absmax is None or self.code is None:
            return self.w
        nested = (self.nested_absmax, self.nested_code, self.nested_offset)
        shape = (self.experts, self.x.shape[1], self.n)
        return Matrices(self.w, self.absmax, self.code, nested, self.block_size, shape, self.transposed)


_TENSORS = 13  # of those, the first ones
_ARGUMENTS = (
    "Tensor x, Tensor w, Tensor? lora_a, Tensor? lora_b, Tensor? bias, Tensor? gates, Tensor expert_ids, Tensor lists, "
    "Tensor? absmax, Tensor? code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset, "
    "SymInt experts, SymInt n, int block_size, float scaling, str strategy, bool grouped_in, bool grouped_out, "
    "bool transposed"
)
_GRADIENTS = ("dx", "dw", "da", "db", "dbias", "dgates")


def _empty_u(x: torch.Tensor, rows: int, lora_a: torch.Tensor | None) -> torch.Tensor:
    shape = (0,) if lora_a is None else (rows, kernels.padded_rank(lora_a.shape[1]))
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _output(*args: Any) -> torch.Tensor:
    given = _Given(*args)
    rows = given.expert_ids.numel() if given.gates is None else given.expert_ids.shape[0]
    return torch.empty((rows, given.n), dtype=given.x.dtype, device=given.x.device)


def _outputs(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """-> Y, and U = scaling X A^T in sorted order (R, padded rank), which the backward pass needs; empty without LoRA."""
    given = _Given(*args)
    return _output(*args), _empty_u(given.x, given.expert_ids.numel(), given.lora_a)


def _run(results: tuple[torch.Tensor, torch.Tensor | None], *args: Any) -> None:
    (y, u), given = results, _Given(*args)
    routing = Routing(given.expert_ids, given.lists, given.experts)
    rows, slots, n = routing.rows, routing.slots, given.n
    if rows == 0 or n == 0:
        y.zero_()
        if u is not None:
            u.zero_()
        return
    x, gates = given.x, given.gates
    lora = _Lora.of(given.lora_a, given.lora_b, u, given.scaling)
    products = y if gates is None else torch.empty((rows, n), dtype=y.dtype, device=y.device)
    _launch_rows(
        routing, _Rows(x, given.grouped_in, slots), given.weight, lora, given.bias, products, given.grouped_out,
        given.strategy,
    )  # fmt: skip
    if gates is not None:
        _sum_slots(products, slots, y, gates=gates)


def _empty_gradients(dy: torch.Tensor, u: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    x, needs = args[0], args[len(_Given._fields) :]
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if needed
        else torch.empty(0, dtype=x.dtype, device=x.device)
        for t, needed in zip(args[:6], needs, strict=True)
    )


def _run_backward(results: tuple[torch.Tensor, ...], dy: torch.Tensor, u: torch.Tensor, *args: Any) -> None:
    given, needs = _Given(*args[: len(_Given._fields)]), dict(zip(_GRADIENTS, args[len(_Given._fields) :], strict=True))
    x, gates, bias, a, b = given.x, given.gates, given.bias, given.lora_a, given.lora_b
    routing = Routing(given.expert_ids, given.lists, given.experts)
    rows, slots = routing.rows, routing.slots
    if rows == 0 or given.n == 0:
        for result in results:
            result.zero_()
        return
    dx, dw, da, db, dbias, dgates = results
    x_rows = _Rows(x, given.grouped_in, slots)
    # With gates a token's slots share one row of dY, and each gradient below counts a row with its gate.
    dy_rows = _Rows(dy, given.grouped_out, slots if gates is not None else 1)
    d = _empty_u(x, rows, a) if needs["da"] else None
    transposed = None if a is None or b is None else _Lora.of(b.transpose(1, 2), a.transpose(1, 2), d, given.scaling)
    if needs["dx"] or needs["dgates"]:
        grouped = given.grouped_in
        direct = gates is None and (grouped or slots == 1)
        grown = dx if direct else torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
        _launch_rows(routing, dy_rows, given.weight.transpose(1, 2), transposed, None, grown, grouped, given.strategy)
        if not direct:
            inner = dgates
            if needs["dgates"] and bias is not None:
                inner = torch.empty_like(dgates, dtype=launching.accumulator(x.dtype))
            _sum_slots(
                grown, 1 if grouped else slots, dx if needs["dx"] else None, gates=gates,
                order=given.lists if grouped else None, x=x if needs["dgates"] else None, dgates=inner,
            )  # fmt: skip
            if inner is not dgates:
                _add_share_of_bias(inner, dy, given)
                dgates.copy_(inner)
    elif needs["da"] and transposed is not None:
        _launch_thin(routing, dy_rows, transposed)
    if needs["da"] and needs["db"]:
        _launch_factors(routing, d, u, x_rows, dy_rows, gates, da, db)
    elif needs["da"] and d is not None:
        _launch_gram(routing, _Rows(d, True, 1), x_rows, gates, da)
    elif needs["db"]:
        _launch_gram(routing, _Rows(u, True, 1), dy_rows, gates, db.transpose(1, 2))
    if needs["dw"]:
        _launch_gram(routing, x_rows, dy_rows, gates, dw)
    if needs["dbias"]:
        ones = torch.ones((rows, 1), dtype=x.dtype, device=x.device)
        _launch_gram(routing, _Rows(ones, True, 1), dy_rows, gates, dbias.unsqueeze(1), exact=True)


def _add_share_of_bias(dgates: torch.Tensor, dy: torch.Tensor, given: _Given) -> None:
    """y = ... + bias[e]: what the inner products of dX and x leave out."""
    assert given.bias is not None
    with launching.without_autocast(dy):
        inner = torch.matmul(dy, given.bias.t())
    ids = given.expert_ids
    skipped = (ids < 0) | (ids >= given.experts)
    dgates += inner.gather(1, ids.long().masked_fill(skipped, 0)).masked_fill(skipped, 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * len(_Given._fields)
    needs = ctx.needs_input_grad[:6]
    gradients = _backward(dy, *ctx.saved_tensors, *ctx.settings, *needs)
    rest = len(_Given._fields) - len(needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), *(None,) * rest


_inference = launching.operator(
    f"moe_lora_inference({_ARGUMENTS}) -> Tensor", outputs=_output, run=lambda y, *args: _run((y, None), *args),
    repeated=launching.settings,
)  # fmt: skip
_forward = launching.operator(
    f"moe_lora({_ARGUMENTS}) -> (Tensor, Tensor)", outputs=_outputs, run=_run, setup_context=_setup, backward=_autograd,
    repeated=launching.settings,
)  # fmt: skip
_backward = launching.operator(
    f"moe_lora_backward(Tensor dy, Tensor u, {_ARGUMENTS}, {', '.join(f'bool needs_{name}' for name in _GRADIENTS)}) "
    f"-> ({', '.join(['Tensor'] * len(_GRADIENTS))})",
    outputs=_empty_gradients,
    run=_run_backward,
    repeated=launching.settings,
)


# --- launches -------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows (R, N) in sorted order if ``grouped``; otherwise (R / slots, N), row p // slots for pair p."""

    tensor: torch.Tensor
    grouped: bool
    slots: int


class _Lora(NamedTuple):
    """a (E, r, K), b (E, N, r), and U (R, padded rank), which is read or written; ``None`` where nobody wants it."""

    a: torch.Tensor
    b: torch.Tensor
    u: torch.Tensor | None
    scaling: float

    @classmethod
    def of(cls, a: Any, b: Any, u: torch.Tensor | None, scaling: float) -> "_Lora | None":
        """Copies where neither rows nor columns are contiguous (PEFT's B): a tile would read a sector an element."""
        if a is None or b is None:
            return None
        a, b = (t if 1 in t.stride()[1:] else t.contiguous() for t in (a, b))
        return cls(a, b, u, scaling)


@functools.cache
def _launch(kernel: Any, **constants: Any) -> Launch:
    return Launch(kernel, **constants)


def _tiled(kernel: Any, tiles: kernels.Tiles, **constants: Any) -> Launch:
    return _launch(kernel, **constants, **tiles.kwargs, num_warps=tiles.warps, num_stages=tiles.stages)


def _precision(dtype: torch.dtype) -> str:
    """How products are added up, see :func:`launching.precision`; nothing but float32 has a choice."""
    return launching.precision() if dtype == torch.float32 else "ieee"


def _in_boxes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, aligned: bool) -> bool:
    """Whether a tensor descriptor can read it: 16-bit, aligned, its last dimension contiguous."""
    return itemsize == 2 and 0 not in shape and _has_aligned_rows(strides, itemsize, aligned)


def _has_aligned_rows(strides: tuple[int, ...], itemsize: int, aligned: bool) -> bool:
    *steps, within = strides
    return aligned and within == 1 and all(step > 0 and step * itemsize % 16 == 0 for step in steps)


class _RowsPlan(NamedTuple):
    launch: Launch
    grid: tuple[int]
    tiles_at: int
    num_m: int
    how: str  # the low-rank product is added
    copies_x: bool
    x_form: Any
    w_form: Any
    w_by_row: bool


@_cached
def _rows_plan(
    rows: int, shape: tuple[int, int, int], dtype: torch.dtype, x_strides: tuple[int, ...], x_aligned: bool,
    w_strides: tuple[int, ...] | None, w_aligned: bool, packed: tuple[bool, int, bool] | None,
    rank: int, has_bias: bool, x_grouped: bool, y_grouped: bool, strategy: str, precision: str,
    properties: runtime.DeviceProperties, tiles: kernels.Tiles | None,
) -> _RowsPlan:  # fmt: skip
    """``packed``: whether W is stored transposed, its block size, and whether its scales are quantized."""
    (experts, k, n), itemsize = shape, dtype.itemsize
    wide_x = _has_aligned_rows(x_strides, itemsize, x_aligned)
    # A gradient may come expanded; a copy takes less time than to read it an element at a time.
    copies_x = not wide_x and k > 0 and k * itemsize % 16 == 0
    wide_x = wide_x or copies_x
    how = "none"
    if rank:
        how = kernels.choose_strategy(rows, experts, k, n, rank, properties) if strategy == "auto" else strategy
        if rank > kernels.FUSED_RANK or dtype == torch.float64:
            how = "split"
    padded = kernels.padded_rank(rank) if rank else 0
    access, form, block_size, scale = "narrow", "none", 0, ""
    if packed is not None:
        by_row, block_size, nested = packed
        scale = "nested" if nested else "float32"
        form = "elements"
        if itemsize <= 4 and w_aligned and (n if by_row else k) % 32 == 0:
            access = "packed"
            form = "permute" if itemsize == 2 and properties.arch.startswith("sm_") else "gather"
    else:
        assert w_strides is not None
        across = (w_strides[0], w_strides[2], w_strides[1])
        by_row = not _in_boxes(shape, across, itemsize, w_aligned)
        if wide_x and (not by_row or _in_boxes(shape, w_strides, itemsize, w_aligned)):
            access = "boxes" if kernels.has_boxes(properties) else "wide"
    tiles = tiles or kernels.rows_tiles(rows, experts, padded if how == "fused" else 0, itemsize, access, properties)
    blocks = tiles.kwargs
    x_form = w_form = None
    if access == "boxes":
        sides = (blocks["BLOCK_K"], blocks["BLOCK_N"])
        w_form = launching.box_form(1, *(sides if by_row else sides[::-1]))
        if x_grouped:
            x_form = launching.box_form(tiles.height, blocks["BLOCK_K"])
    # Four warps side by side make 32 columns, and a narrower product of few rows would be computed more than once.
    block_r = max(32 if tiles.height < 64 else 16, padded) if how == "fused" else max(16, min(padded, 32))
    launch = _tiled(
        kernels._moe_lora_fwd_rows_kernel, tiles,
        PACKED=form, BLOCK_SIZE=block_size, SCALE=scale, NESTED_BLOCK=NESTED_BLOCK,
        X_GROUPED=x_grouped, Y_GROUPED=y_grouped, W_BY_ROW=by_row, LORA=how, HAS_BIAS=has_bias,
        ACC=launching.tl_accumulator(dtype), PRECISION=precision, EVEN_K=k % blocks["BLOCK_K"] == 0,
        r=rank, RANK=padded, BLOCK_R=block_r,
    )  # fmt: skip
    tiles_at, num_m = _section(rows, experts, tiles.height)
    grid = (num_m * cdiv(n, blocks["BLOCK_N"]),)
    return _RowsPlan(launch, grid, tiles_at, num_m, how, copies_x, x_form, w_form, by_row)


def _launch_rows(
    routing: Routing, rows: _Rows, w: torch.Tensor | Matrices, lora: _Lora | None, bias: torch.Tensor | None,
    y: torch.Tensor, grouped_out: bool, strategy: str, tiles: kernels.Tiles | None = None,
) -> None:  # fmt: skip
    """Fills Y (R, N) from rows and w (E, K, N), and lora's U if there is one."""
    x, grouped, slots = rows
    if isinstance(w, Matrices):
        if strategy != "fused" and _launch_packed(routing, rows, w, lora, bias, y, grouped_out):
            return
        stored, w_strides = w.packed, None
        packed: Any = (w.transposed, w.block_size, w.nested[0] is not None)
    else:
        stored, packed, w_strides = w, None, w.stride()
    shape = tuple(w.shape)
    plan = _rows_plan(
        routing.rows, shape, x.dtype, x.stride(), x.data_ptr() % 16 == 0, w_strides, stored.data_ptr() % 16 == 0, packed,
        0 if lora is None else lora.a.shape[1], bias is not None, grouped, grouped_out, strategy, _precision(x.dtype),
        runtime.properties(x.device), tiles,
    )  # fmt: skip
    if plan.copies_x:
        x = x.clone(memory_format=torch.contiguous_format)
    a = b = u = None
    scaling = 0.0
    if lora is not None:
        a, b, u, scaling = lora
        if plan.how == "split":
            u = _empty_u(x, routing.rows, a) if u is None else u
            _launch_thin(routing, _Rows(x, grouped, slots), lora._replace(u=u))
        elif b.stride(2) != 1:
            # With W and B contiguous along different dimensions, ptxas serializes the tensor cores' instructions.
            b = b.contiguous()
    w_box = None
    scales: tuple[Any, ...] = (None, None, None, None, None)
    if isinstance(w, Matrices):
        scales = w.scales
        if plan.launch.constants["PACKED"] != "elements":
            stored = stored.view(torch.int32)
    elif plan.w_form is not None:
        w_box = plan.w_form(w if plan.w_by_row else w.transpose(1, 2))
    experts, k, n = shape
    plan.launch(
        plan.grid,
        routing.lists, plan.tiles_at,
        x, *x.stride(), None if plan.x_form is None else plan.x_form(x),
        stored, *(w_strides or (0, 0, 0)), w_box,
        *scales,
        *strided(a, 3), *strided(b, 3), u,
        *strided(bias, 2),
        y,
        scaling, experts, k, n, slots, plan.num_m,
    )  # fmt: skip


def _launch_packed(
    routing: Routing, rows: _Rows, w: Matrices, lora: _Lora | None, bias: torch.Tensor | None, y: torch.Tensor,
    grouped_out: bool,
) -> bool:  # fmt: skip
    """As :func:`_launch_rows`, by a kernel for packed matrices -> whether there is one."""
    x, grouped, slots = rows
    e, k, n = w.shape
    plan = products.plan(
        routing.rows, (e, k, n) if w.transposed else (e, n, k), w.transposed, x.dtype, w.block_size,
        w.nested[0] is not None, 0 if lora is None else lora.a.shape[1], bias is not None, grouped, grouped_out, True,
        runtime.properties(x.device),
    )  # fmt: skip
    if plan is None or w.packed.data_ptr() % 16:
        return False
    if not _has_aligned_rows(x.stride(), x.element_size(), x.data_ptr() % 16 == 0):
        rows = rows._replace(tensor=x.clone(memory_format=torch.contiguous_format))
    b = u = None
    if lora is not None:
        b, u = lora.b, _empty_u(x, routing.rows, lora.a) if lora.u is None else lora.u
        _launch_thin(routing, rows, lora._replace(u=u))
    tiles_at, num_m = _section(routing.rows, routing.num_experts, plan.height)
    products.launch(plan, routing.lists, tiles_at, num_m, None, rows.tensor, w, b, u, bias, y, slots)
    return True


@_cached
def _thin_plan(
    rows: int, shape: tuple[int, ...], dtype: torch.dtype, grouped: bool, precision: str,
    properties: runtime.DeviceProperties, tiles: kernels.Tiles | None,
) -> tuple[Launch, tuple[int, ...], int, int]:  # fmt: skip
    """-> the launch, its grid, where its tiles begin, and how many programs share a sum."""
    experts, rank, k = shape
    padded = kernels.padded_rank(rank)
    tiles = tiles or kernels.thin_tiles(rows, experts, k, padded, dtype.itemsize, properties)
    blocks = tiles.kwargs
    launch = _tiled(
        kernels._moe_lora_fwd_thin_kernel, tiles, X_GROUPED=grouped, ACC=launching.tl_accumulator(dtype),
        PRECISION=precision, EVEN_K=k % blocks["BLOCK_K"] == 0, r=rank, RANK=padded,
    )  # fmt: skip
    tiles_at, num_m = _section(rows, experts, tiles.height)
    return launch, (num_m, padded // blocks["BLOCK_R"], blocks["SPLIT"]), tiles_at, blocks["SPLIT"]


def _launch_thin(routing: Routing, rows: _Rows, lora: _Lora, tiles: kernels.Tiles | None = None) -> None:
    """Fills U = scaling X A^T."""
    (x, grouped, slots), (a, _, u, scaling) = rows, lora
    assert u is not None
    experts, _, k = a.shape
    launch, grid, tiles_at, split = _thin_plan(
        routing.rows, a.shape, x.dtype, grouped, _precision(x.dtype), runtime.properties(x.device), tiles
    )
    target = u
    if split > 1:
        shape = (routing.rows * split, u.shape[1])
        target = torch.empty(shape, dtype=launching.accumulator(x.dtype), device=x.device)
    exact = x.dtype == torch.float64  # a kernel takes its scalars in float32
    stride_e, stride_r, stride_k = a.stride()
    launch(
        grid, routing.lists, tiles_at, x, *x.stride(), a, stride_e, stride_k, stride_r, target,
        1.0 if exact else scaling, experts, k, slots,
    )  # fmt: skip
    if split > 1:
        _sum_slots(target, split, u)
    if exact:
        u.mul_(scaling)


@_cached
def _gram_launch(
    rows: int, experts: int, p: int, dtype: torch.dtype, precision: str, properties: runtime.DeviceProperties,
    kernel: Any, **constants: Any,
) -> tuple[Launch, int, int]:  # fmt: skip
    """-> the launch, and the rows and columns of its tiles."""
    tiles = kernels.gram_tiles(rows, experts, p, dtype.itemsize, properties)
    launch = _tiled(kernel, tiles, ACC=launching.tl_accumulator(dtype), PRECISION=precision, P=p, **constants)
    return launch, tiles.kwargs["BLOCK_P"], tiles.kwargs["BLOCK_Q"]


def _launch_gram(
    routing: Routing, left: _Rows, right: _Rows, gates: torch.Tensor | None, out: torch.Tensor, *, exact: bool = False
) -> None:
    """Fills out (E, P, Q), of any strides: the sum over an expert's rows of left[:, :P]^T right, each with its gate.

    ``exact``: float32 as it is, never tf32.
    """
    experts, p, q = out.shape
    x = left.tensor
    if out.numel() == 0:
        return
    launch, block_p, block_q = _gram_launch(
        routing.rows, experts, p, x.dtype, "ieee" if exact else _precision(x.dtype), runtime.properties(x.device),
        kernels._moe_lora_bwd_gram_kernel,
        L_GROUPED=left.grouped, Z_GROUPED=right.grouped, HAS_GATES=gates is not None,
    )  # fmt: skip
    launch(
        (experts, cdiv(p, block_p), cdiv(q, block_q)),
        routing.lists, 2 * routing.rows,
        x, *x.stride(), right.tensor, *right.tensor.stride(),
        None if gates is None else gates.contiguous(),
        out, *out.stride(),
        q, left.slots, right.slots,
    )  # fmt: skip


def _launch_factors(
    routing: Routing, d: Any, u: torch.Tensor, x: _Rows, dy: _Rows, gates: torch.Tensor | None,
    da: torch.Tensor, db: torch.Tensor,
) -> None:  # fmt: skip
    """Fills dA (E, r, K) and dB (E, N, r) from D and U (R, padded rank) in sorted order."""
    (experts, rank, k), n = da.shape, db.shape[1]
    launch, block_p, block_q = _gram_launch(
        routing.rows, experts, rank, d.dtype, _precision(d.dtype), runtime.properties(d.device),
        kernels._moe_lora_bwd_factors_kernel,
        X_GROUPED=x.grouped, DY_GROUPED=dy.grouped, HAS_GATES=gates is not None,
    )  # fmt: skip
    launch(
        (experts, cdiv(rank, block_p), cdiv(k, block_q) + cdiv(n, block_q)),
        routing.lists, 2 * routing.rows,
        d, u, d.stride(0),
        x.tensor, *x.tensor.stride(), dy.tensor, *dy.tensor.stride(),
        None if gates is None else gates.contiguous(),
        da, db,
        k, n, x.slots, dy.slots,
    )  # fmt: skip


def _launch_recompute(
    routing: Routing, left: _Rows, factor: torch.Tensor, right: _Rows, scaling: float, out: torch.Tensor
) -> None:
    """Fills out (E, r, Q), of any strides: scaling (left factor[e])^T right over an expert's rows."""
    experts, c, rank = factor.shape
    q = right.tensor.shape[1]
    tiles = kernels.recompute_tiles(rank, factor.element_size())
    launch = _tiled(
        kernels._moe_lora_bwd_recompute_kernel, tiles, L_GROUPED=left.grouped, Z_GROUPED=right.grouped,
        ACC=launching.tl_accumulator(factor.dtype), PRECISION=_precision(factor.dtype), r=rank,
        RANK=kernels.padded_rank(rank),
    )  # fmt: skip
    launch(
        (experts, cdiv(q, tiles.kwargs["BLOCK_Q"])),
        routing.lists, 2 * routing.rows,
        left.tensor, *left.tensor.stride(), factor, *factor.stride(), right.tensor, *right.tensor.stride(),
        out, *out.stride(),
        scaling, c, q, left.slots, right.slots,
    )  # fmt: skip


@_cached
def _slots_plan(
    slots: int, columns: int, dtype: torch.dtype, grouped: bool, has_gates: bool, with_out: bool, with_dgates: bool
) -> tuple[Launch, int]:
    """-> the launch, and the programs of a row."""
    tiles = kernels.slots_tiles(slots, columns)
    launch = _tiled(
        kernels._moe_lora_fwd_slots_kernel, tiles, SLOTS=slots, GROUPED=grouped, HAS_GATES=has_gates, WITH_OUT=with_out,
        WITH_DGATES=with_dgates, ACC=launching.tl_accumulator(dtype),
    )  # fmt: skip
    # The inner products go over all columns, so that one program has to see them.
    return launch, 1 if with_dgates else cdiv(columns, tiles.kwargs["BLOCK_C"])


def _sum_slots(
    values: torch.Tensor,
    slots: int,
    out: torch.Tensor | None,
    *,
    gates: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    dgates: torch.Tensor | None = None,
) -> None:
    """Sums rows (R, C) of pairs over a token's slots, weighted by gates.

    Fills out (R / slots, C), and if there is an x (R / slots, C) dgates (R,), the inner products of ``values`` and ``x``.
    In sorted order (``order``) there is nothing to sum, slots is 1.
    """
    rows, columns = values.shape
    launch, pieces = _slots_plan(
        slots, columns, values.dtype, order is not None, gates is not None, out is not None, x is not None
    )
    launch(
        (rows // slots, pieces),
        order, values,
        None if gates is None else gates.contiguous(),
        out,
        *strided(x, 2), None if x is None else dgates,
        columns,
    )  # fmt: skip
