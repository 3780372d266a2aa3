"""The public functions in the order of a call: observed or not, plan, new memory, launches; then the gradients the same way."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import composite, operator, sources
from kernelbook.linear import linear
from kernelbook.memory import accumulator, empty, present
from kernelbook.moe_lora import grouped, kernels
from kernelbook.moe_lora.grouped import SORTED, GemmPlan, Layout, Lora, ShrinkPlan, Step
from kernelbook.moe_lora.routing import Routing, route
from kernelbook.observed import are_tensors, form, in_mode_of_forward, keep_mode, observed, wants_gradient
from kernelbook.packed import NF4Tensor
from kernelbook.packed.products import Matrices
from kernelbook.plans import KeptPlans
from kernelbook.tensors import check_versions, precision, with_versions, without_autocast

__all__ = ["Given", "Routing", "check", "moe_lora", "route", "scatter2scatter"]

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
            into the product and never becomes dense, except in float64, which is for tests.
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
    weight = _weight("scatter2scatter", x, w, transposed)
    given = Given(x, weight, None, None, None, None, routing, 1.0, "split", grouped_in, grouped_out)
    return _product("scatter2scatter", given)


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
            the dtype of ``x`` on their way into the product, forward and backward, and W never becomes dense, except in
            float64, which is for tests.
        lora_a: (E, r, K), the dtype of ``x``, any strides; or ``None``, then there is no low-rank update.
        lora_b: (E, N, r), the dtype of ``x``, any strides; ``None`` with ``lora_a`` and only with it.
        routing: of T tokens to k of E experts, from :func:`route`.
        scaling: of the low-rank update.
        bias: (E, N), the dtype of ``x``, or ``None``.
        gates: (T, k) weights of the slots, in the dtype of ``x`` or float32, or ``None``.
        strategy: how the low-rank product is added. ``"fused"``: x A^T is accumulated beside x W in one kernel.
            ``"split"``: x A^T comes from a kernel of its own, and its product with B^T is the last step of the base's
            kernel; so are ranks above 64, and GPUs before Ampere, in any case. ``"auto"``: by shape, see :func:`kernels.choose_strategy`.
        grouped_in, grouped_out: rows are in expert order, position s holding pair ``routing.order[s]``.
        transposed: the ``NF4Tensor`` has shape (E, K, N), packed along N. (A dense ``w`` has any strides.)

    Returns:
        (T*k, N) in the dtype of ``x``, row t*k + j for slot j of token t, in expert order if ``grouped_out``; with
        ``gates`` (T, N), the weighted sum over the slots. Slots to skip are zero.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device or ``strategy`` is not as above, or ``gates`` come with ``grouped_out``.
    """
    weight = _weight("moe_lora", x, w, transposed)
    given = Given(x, weight, lora_a, lora_b, bias, gates, routing, scaling, strategy, grouped_in, grouped_out)
    return _product("moe_lora", given)


class Given(NamedTuple):
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

    @property
    def differentiable(self) -> tuple[Any, ...]:
        """The tensors that may have gradients."""
        stored = self.w.packed if isinstance(self.w, Matrices) else self.w
        return self.x, stored, self.lora_a, self.lora_b, self.bias, self.gates

    @property
    def frozen(self) -> tuple[Any, ...]:
        """The tensors without gradients that the backward pass reads."""
        w, ids = self.w, None if self.bias is None or self.gates is None else self.routing.expert_ids
        parts = (w.packed, w.absmax, w.code, *w.nested) if isinstance(w, Matrices) else ()
        return ids, self.routing.lists, *parts

    @property
    def tensors(self) -> tuple[Any, ...]:
        w = self.w
        scales = (w.absmax, w.code, *w.nested) if isinstance(w, Matrices) else (None,) * 5
        return *self.differentiable, self.routing.expert_ids, self.routing.lists, *scales


def _weight(op: str, x: Any, w: Any, transposed: bool) -> torch.Tensor | Matrices:
    """W (E, K, N), as it goes down to the kernels."""
    if isinstance(w, NF4Tensor):
        if len(w.shape) != 3:
            raise ValueError(f"{op}: w must have three dimensions, got shape {w.shape}")
        # Triton's float64 products compile with no operand that was decoded from bytes.
        if getattr(x, "dtype", None) == torch.float64:
            dense = w.as_float64()
            return dense if transposed else dense.transpose(1, 2)
        e, first, second = w.shape
        nested = (w.nested_absmax, w.nested_code, w.nested_offset)
        shape = (e, first, second) if transposed else (e, second, first)
        return Matrices(w.packed, w.absmax, w.code, nested, w.block_size, shape, bool(transposed))
    if transposed:
        raise ValueError(f"{op}: transposed must be False for a dense w, whose strides say it, got {transposed!r}")
    if not isinstance(w, torch.Tensor):
        arguments.check_tensor(op, "w", w)
    return w  # type: ignore[no-any-return]


def _product(op: str, given: Given) -> torch.Tensor:
    given = _settled(op, given)
    tensors = given.tensors
    y: torch.Tensor
    if is_dynamo_compiling() and are_tensors(*tensors):
        y = _moe_lora_whole(op, *_flat(given), SOURCES)
    elif observed(*tensors):
        y = _by_operators(op, given)
    elif wants_gradient(*tensors[:_DIFFERENTIABLE]):
        y = _MoeLora.apply(*tensors[:_DIFFERENTIABLE], _forward_plan(op, given), given)
    else:
        y, _ = _forward(_forward_plan(op, given), given, with_u=False)
    return y


def _settled(op: str, given: Given) -> Given:
    """Tensors in autocast's dtype, and plain arguments of their types."""
    x, w, lora_a, lora_b, bias, gates, routing, scaling, strategy, grouped_in, grouped_out = given
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, as route() returns it, got {type(routing).__name__}")
    scaling = arguments.number(op, "scaling", scaling)
    if type(strategy) is not str:
        arguments.check_choice(op, "strategy", strategy, STRATEGIES)
    x, w, lora_a, lora_b, bias = arguments.in_autocast_dtype(x, w, lora_a, lora_b, bias)
    plain = scaling, strategy, bool(grouped_in), bool(grouped_out)
    return Given(x, w, lora_a, lora_b, bias, gates, routing, *plain)


def check(op: str, given: Given) -> None:
    x, w, lora_a, lora_b, bias, gates, routing, _, strategy, grouped_in, grouped_out = given
    expert_ids, _, experts = routing
    arguments.check_tensor(op, "x", x)
    if isinstance(w, Matrices):
        stored, (found, k, n) = w.packed, w.shape
        if found != experts:
            sides = (k, n) if w.transposed else (n, k)
            raise ValueError(f"{op}: w must have shape {(experts, *sides)}, got {(found, *sides)}")
    else:
        arguments.check_tensor(op, "w", w)
        if w.ndim != 3:
            raise ValueError(f"{op}: w must have three dimensions, got shape {tuple(w.shape)}")
        stored, (_, k, n) = w, w.shape
        arguments.check_shape(op, "w", w, (experts, k, n))
        arguments.check_same_dtype(op, x=x, w=w)
    tokens, slots = expert_ids.shape
    arguments.check_shape(op, "x", x, (tokens * slots if grouped_in else tokens, k))
    arguments.check_same_device(op, x=x, w=stored, routing=expert_ids)
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


# --- plans of a call ------------------------------------------------------------------------------------------------


def _key(given: Given) -> tuple[Any, ...]:
    """What the plans of a call depend on."""
    w: Any
    x, w, lora_a, lora_b, bias, gates, (ids, _, experts), _, strategy, grouped_in, grouped_out = given
    stored, packing = w, None
    if isinstance(w, Matrices):
        stored, packing = w.packed, (w.shape, w.transposed, w.block_size, w.nested[0] is None)
    aligned = x.data_ptr() % 16 == 0, stored.data_ptr() % 16 == 0
    tensors = form(x), form(stored), packing, form(lora_a), form(lora_b), form(bias), form(gates)
    plain = ids.shape, ids.device, experts, strategy, grouped_in, grouped_out
    return tensors, aligned, plain, precision(x.dtype), runtime.plan_mode()


def _layouts(given: Given) -> tuple[Layout, Layout]:
    """-> of x and of dY. With gates a token's slots share one row of dY, and each gradient counts a row with its gate."""
    slots = given.routing.slots
    return Layout(given.grouped_in, slots), Layout(given.grouped_out, 1 if given.gates is None else slots)


def _empty_u(given: Given) -> torch.Tensor | None:
    """U, or D = scaling dY B: (R, padded rank), in expert order; ``None`` without a low-rank update."""
    if given.lora_a is None:
        return None
    return empty((given.routing.rows, kernels.padded_rank(given.lora_a.shape[1])), given.x.dtype, given.x)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _ForwardPlan:
    """What is decided for a kind of forward pass."""

    shape: tuple[int, int]
    gemm: GemmPlan | None  # None: there is nothing to compute
    combine: Step | None  # with gates


_forward_plans = KeptPlans[_ForwardPlan]()


def _forward_plan(op: str, given: Given) -> _ForwardPlan:
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    key = _key(given)
    plan = _forward_plans.get(key)
    if plan is None:
        check(op, given)
        plan = _new_forward_plan(given)
        _forward_plans.keep(key, plan)
    return plan


def _new_forward_plan(given: Given) -> _ForwardPlan:
    x, w, lora_a, lora_b, bias, gates, routing, _, strategy, _, grouped_out = given
    rows, n = routing.rows, w.shape[2]
    gemm = combine = None
    if rows and n:
        x_layout, _ = _layouts(given)
        gemm = grouped.gemm_plan(routing, x, x_layout, w, lora_a, lora_b, bias is not None, grouped_out, strategy)
        if gates is not None:
            combine = grouped.combine_step(rows, routing.slots, n, x.dtype, has_gates=True)
    return _ForwardPlan((rows if gates is None else routing.expert_ids.shape[0], n), gemm, combine)


def _forward(plan: _ForwardPlan, given: Given, *, with_u: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> Y, and where it is asked for, and there is a low-rank update, U = scaling X A^T, which the backward pass needs."""
    x, w, lora_a, lora_b, bias, gates, routing, scaling, *_ = given
    y, u = empty(plan.shape, x.dtype, x), _empty_u(given) if with_u else None
    if plan.gemm is None:
        return y.zero_(), None if u is None else u.zero_()
    lora = None if lora_a is None or lora_b is None else Lora(lora_a, lora_b, u, scaling)
    routed = y if plan.combine is None else empty((routing.rows, w.shape[2]), x.dtype, x)
    grouped.gemm(plan.gemm, routing, x, w, lora, bias, routed)
    if plan.combine is not None:
        grouped.combine(plan.combine, routed, y, gates)
    return y, u


Gradients = tuple[torch.Tensor | None, ...]  # of x, w, lora_a, lora_b, bias and gates


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
    """What is decided for a kind of backward pass; ``None``: it is not wanted."""

    gemm: GemmPlan | None = None  # dY W^T + D A
    combine: Step | None = None  # where dX is a sum of its rows, or the gradient of the gates is wanted
    shrink: ShrinkPlan | None = None  # D = scaling dY B, where nothing else is wanted of dY W^T
    factors: Step | None = None  # dA and dB
    da: Step | None = None
    db: Step | None = None
    dw: Step | None = None
    dbias: Step | None = None


_backward_plans = KeptPlans[_BackwardPlan]()


def _backward_plan(dy: torch.Tensor, given: Given, needs: tuple[bool, ...]) -> _BackwardPlan:
    key = (_key(given), form(dy), dy.data_ptr() % 16 == 0, needs)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _new_backward_plan(dy, given, needs)
        _backward_plans.keep(key, plan)
    return plan


def _new_backward_plan(dy: torch.Tensor, given: Given, needs: tuple[bool, ...]) -> _BackwardPlan:
    x, w, a, b, _, gates, routing, _, strategy, grouped_in, _ = given
    rows, slots, (_, k, n), gated = routing.rows, routing.slots, w.shape, gates is not None
    if rows == 0 or n == 0:
        return _BackwardPlan()
    needs_dx, needs_dw, needs_da, needs_db, needs_dbias, needs_dgates = needs
    x_layout, dy_layout = _layouts(given)
    rank = 0 if a is None else a.shape[1]
    turned: Any = [None if t is None else t.transpose(1, 2) for t in (b, a)]
    turned_a, turned_b = turned  # what A and B are to dY
    gemm = combine = None
    if needs_dx or needs_dgates:
        gemm = grouped.gemm_plan(
            routing, dy, dy_layout, w.transpose(1, 2), turned_a, turned_b, False, grouped_in, strategy
        )
        if gated or not (grouped_in or slots == 1):
            combine = grouped.combine_step(
                rows, 1 if grouped_in else slots, k, x.dtype, grouped=grouped_in, has_gates=gated, with_out=needs_dx,
                with_dgates=needs_dgates,
            )  # fmt: skip
    both = needs_da and needs_db
    return _BackwardPlan(
        gemm=gemm,
        combine=combine,
        shrink=grouped.shrink_plan(routing, dy, dy_layout, turned_a) if needs_da and gemm is None else None,
        factors=grouped.factors_step(routing, x, x_layout, dy_layout, rank, n, gated) if both else None,
        da=grouped.wgrad_step(routing, SORTED, x_layout, x, rank, k, gated) if needs_da and not both else None,
        db=grouped.wgrad_step(routing, SORTED, dy_layout, x, rank, n, gated) if needs_db and not both else None,
        dw=grouped.wgrad_step(routing, x_layout, dy_layout, x, k, n, gated) if needs_dw else None,
        dbias=grouped.wgrad_step(routing, SORTED, dy_layout, x, 1, n, gated, exact=True) if needs_dbias else None,
    )


def _backward(dy: torch.Tensor, u: Any, given: Given, needs: tuple[bool, ...]) -> Gradients:
    """-> the gradients that are needed, each contiguous; ``None`` for the others."""
    x, w, lora_a, lora_b, bias, gates, routing, scaling, *_ = given
    plan = _backward_plan(dy, given, needs)
    like: Any = zip((x, w, lora_a, lora_b, bias, gates), needs, strict=True)
    found: list[Any] = [empty(t.shape, t.dtype, x) if needed else None for t, needed in like]
    dx, dw, da, db, dbias, dgates = found
    if routing.rows == 0 or w.shape[2] == 0:
        return tuple(None if gradient is None else gradient.zero_() for gradient in found)
    d: Any = None if da is None else _empty_u(given)
    lora: Any = None
    if lora_a is not None and lora_b is not None:
        lora = Lora(lora_b.transpose(1, 2), lora_a.transpose(1, 2), d, scaling)
    if plan.gemm is not None:
        grown: Any = dx if plan.combine is None else empty((routing.rows, x.shape[1]), x.dtype, x)
        grouped.gemm(plan.gemm, routing, dy, w.transpose(1, 2), lora, None, grown)
        if plan.combine is not None:
            _sum_up(plan.combine, grown, dx, dgates, dy, given)
    if plan.shrink is not None:
        grouped.shrink(plan.shrink, routing, dy, lora.a, d, scaling)
    if plan.factors is not None:
        grouped.factors(plan.factors, routing, d, u, x, dy, gates, da, db)
    if plan.da is not None:
        grouped.wgrad(plan.da, routing, d, x, gates, da)
    if plan.db is not None:
        grouped.wgrad(plan.db, routing, u, dy, gates, db.transpose(1, 2))
    if plan.dw is not None:
        grouped.wgrad(plan.dw, routing, x, dy, gates, dw)
    if plan.dbias is not None:
        ones = torch.ones((routing.rows, 1), dtype=x.dtype, device=x.device)
        grouped.wgrad(plan.dbias, routing, ones, dy, gates, dbias.unsqueeze(1))
    return tuple(found)


def _sum_up(step: Step, grown: torch.Tensor, dx: Any, dgates: Any, dy: torch.Tensor, given: Given) -> None:
    """Fills dx and dgates, where they are wanted, from dY W^T + D A, a row for each routed token."""
    order = given.routing.lists if given.grouped_in else None
    x = None if dgates is None else given.x
    if dgates is None or given.bias is None:
        grouped.combine(step, grown, dx, given.gates, order, x, dgates)
    else:
        inner = empty(dgates.shape, accumulator(grown.dtype), grown)
        grouped.combine(step, grown, dx, given.gates, order, x, inner)
        _add_share_of_bias(inner, dy, given)
        dgates.copy_(inner)


def _add_share_of_bias(dgates: torch.Tensor, dy: torch.Tensor, given: Given) -> None:
    """y = ... + bias[e]: what the inner products of dX and x leave out."""
    assert given.bias is not None
    with without_autocast(dy):
        inner = linear(dy, given.bias)
    ids, _, experts = given.routing
    skipped = (ids < 0) | (ids >= experts)
    dgates += inner.gather(1, ids.long().masked_fill(skipped, 0)).masked_fill(skipped, 0)


# --- gradients ------------------------------------------------------------------------------------------------------

_DIFFERENTIABLE = 6  # the first of a call's tensors


class _MoeLora(torch.autograd.Function):
    """:func:`moe_lora` that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        plan, given = args[_DIFFERENTIABLE:]
        x, w, lora_a, lora_b, bias, gates, ctx.routing, *ctx.settings = given
        y, u = _forward(plan, given, with_u=True)
        # Where activations are checkpointed, each tensor that autograd keeps costs the host some 25 us. A routing and frozen
        # weights in few bits have no gradient, and no memory is won by dropping them.
        keep_mode(ctx)
        ctx.packed = w if isinstance(w, Matrices) else None
        ctx.versions = with_versions(*given.frozen)
        ctx.save_for_backward(u, x, w if ctx.packed is None else None, lora_a, lora_b, bias, gates)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @in_mode_of_forward
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return (None,) * (_DIFFERENTIABLE + 2)
        u, x, dense, lora_a, lora_b, bias, gates = ctx.saved_tensors
        check_versions(ctx.versions)
        w = dense if ctx.packed is None else ctx.packed
        given = Given(x, w, lora_a, lora_b, bias, gates, ctx.routing, *ctx.settings)
        return *_differentiate(dy, u, given, tuple(ctx.needs_input_grad[:_DIFFERENTIABLE])), None, None


def _differentiate(dy: torch.Tensor, u: torch.Tensor | None, given: Given, needs: tuple[bool, ...]) -> Gradients:
    """What :func:`_backward` gives, by its operator where somebody observes, or wants a gradient of the gradients."""
    if torch.is_grad_enabled() or observed(dy, u, *given.tensors):
        found = _moe_lora_backward(dy, _nothing(dy) if u is None else u, *_flat(given), *needs)
        return tuple(gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
    return _backward(dy, u, given, needs)


# --- where somebody observes: operators -----------------------------------------------------------------------------

# A call as an operator's schema has it: its tensors first.
_TENSORS = 13
_ARGUMENTS = (
    "Tensor x, Tensor w, Tensor? lora_a, Tensor? lora_b, Tensor? bias, Tensor? gates, Tensor expert_ids, Tensor lists, "
    "Tensor? absmax, Tensor? code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset, "
    "SymInt experts, SymInt[] shape, int block_size, float scaling, str strategy, bool grouped_in, bool grouped_out, "
    "bool transposed"
)


def _flat(given: Given) -> tuple[Any, ...]:
    """A call as :data:`_ARGUMENTS` has it."""
    w, (_, _, experts), settings = given.w, given.routing, given[7:]
    block_size, transposed = (w.block_size, w.transposed) if isinstance(w, Matrices) else (0, False)
    return *given.tensors, experts, w.shape, block_size, *settings, transposed


def _unflat(*flat: Any) -> Given:
    """The opposite of :func:`_flat`."""
    x, w, lora_a, lora_b, bias, gates, ids, lists, absmax, code, *nested = flat[:_TENSORS]
    experts, shape, block_size, *settings, transposed = flat[_TENSORS:]
    if absmax is not None:
        w = Matrices(w, absmax, code, tuple(nested), block_size, tuple(shape), transposed)
    return Given(x, w, lora_a, lora_b, bias, gates, Routing(ids, lists, experts), *settings)


def _by_operators(op: str, given: Given) -> torch.Tensor:
    check(op, given)
    flat = _flat(given)
    y: torch.Tensor
    if wants_gradient(*flat[:_DIFFERENTIABLE]):
        y, _ = _moe_lora(*flat)
    else:
        y = _moe_lora_inference(*flat)
    return y


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns where there is no result."""
    return empty((0,), like.dtype, like)


def _new_results(*flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = _unflat(*flat)
    rows, (_, _, n), u = given.routing.rows, flat[_TENSORS + 1], _empty_u(given)
    y = empty((rows if given.gates is None else given.routing.expert_ids.shape[0], n), given.x.dtype, given.x)
    return y, _nothing(y) if u is None else u


def _run(*flat: Any, with_u: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    given = _unflat(*flat)
    y, u = _forward(_forward_plan("moe_lora", given), given, with_u=with_u)
    return y, _nothing(y) if u is None else u


def _run_backward(dy: torch.Tensor, u: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    flat, needs = others[:-_DIFFERENTIABLE], others[-_DIFFERENTIABLE:]
    found = _backward(dy, u, _unflat(*flat), needs)
    return present(found, dy)


def _new_gradients(dy: torch.Tensor, u: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    like = zip(others[:_DIFFERENTIABLE], others[-_DIFFERENTIABLE:], strict=True)
    return tuple(empty(t.shape, t.dtype, dy) if needed else _nothing(dy) for t, needed in like)


def _keep_operators(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    keep_mode(ctx)
    ctx.save_for_backward(output[1], *inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


@in_mode_of_forward
def _gradients(ctx: Any, dy: torch.Tensor | None) -> Gradients:
    if dy is None:
        return (None,) * _DIFFERENTIABLE
    u, *tensors = ctx.saved_tensors
    needs = tuple(ctx.needs_input_grad[:_DIFFERENTIABLE])
    return _differentiate(dy, u, _unflat(*tensors, *ctx.settings), needs)


_NEEDS = ", ".join(f"bool needs_{name}" for name in ("dx", "dw", "da", "db", "dbias", "dgates"))
_moe_lora = operator(
    f"moe_lora({_ARGUMENTS}) -> (Tensor, Tensor)",
    outputs=_new_results,
    run=_run,
    setup_context=_keep_operators,
    backward=lambda ctx, dy, _: (*_gradients(ctx, dy), *(None,) * (_ARGUMENTS.count(",") + 1 - _DIFFERENTIABLE)),
)
_moe_lora_inference = operator(
    f"moe_lora_inference({_ARGUMENTS}) -> Tensor",
    outputs=lambda *flat: _new_results(*flat)[0],
    run=lambda *flat: _run(*flat, with_u=False)[0],
)
_moe_lora_backward = operator(
    f"moe_lora_backward(Tensor dy, Tensor u, {_ARGUMENTS}, {_NEEDS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=_new_gradients,
    run=_run_backward,
)

SOURCES = sources()
_moe_lora_whole = composite(
    f"moe_lora_whole(str op, {_ARGUMENTS}) -> Tensor", lambda op, *flat: _by_operators(op, _unflat(*flat))
)
