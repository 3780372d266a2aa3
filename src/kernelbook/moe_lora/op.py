"""Public functions, then the forward operator and the backward operator: check, outputs, plan, run."""

from typing import Any, NamedTuple

import torch

from kernelbook import arguments  # before Triton, which it sets up
from kernelbook.linear import linear
from kernelbook.memory import accumulator, empty
from kernelbook.moe_lora import grouped, kernels
from kernelbook.moe_lora.grouped import SORTED, GemmPlan, ShrinkPlan, Step
from kernelbook.moe_lora.routing import Routing, route
from kernelbook.operators import Op, named_arguments
from kernelbook.packed import NF4Tensor
from kernelbook.packed.products import Matrices

__all__ = ["Routing", "moe_lora", "route", "scatter2scatter"]

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
    """Multiply each row with the matrix of the expert it is routed to; differentiable.

    Args:
        x, w, routing, grouped_in, grouped_out, transposed: as in :func:`moe_lora`.

    Returns:
        (T*k, N) in the dtype of ``x``: row t*k + j is ``x[t] @ w[expert_ids[t, j]]``, zero for a slot to skip; in expert
        order if ``grouped_out``. float32 products use tf32 where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises: as :func:`moe_lora`.
    """
    rows = {"grouped_in": grouped_in, "grouped_out": grouped_out}
    given = call_of("scatter2scatter", x, w, routing, strategy="split", transposed=transposed, **rows)
    return _moe_lora(*given)  # type: ignore[no-any-return]


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
    """Apply each expert's linear layer with a low-rank update: ``x W[e] + scaling (x A[e]^T) B[e]^T + bias[e]``.

    Differentiable in all tensors (once), and the same bit for bit in every run.

    Args:
        x: (T, K), float16, bfloat16, float32 or float64, any strides; if ``grouped_in``, (T*k, K) in expert order.
        w: (E, K, N), the dtype of ``x``, any strides. Its gradient is computed only if it requires one. Or an
            ``NF4Tensor`` of shape (E, N, K), as transformers and bitsandbytes store it: its elements become numbers in
            the dtype of ``x`` on their way into the product, forward and backward, and W never becomes dense, except in
            float64, which is for tests, and where its rows are no multiple of 32 elements.
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
    scaling = arguments.number("moe_lora", "scaling", scaling)
    given = call_of(
        "moe_lora", x, w, routing, lora_a, lora_b, bias, gates, scaling, strategy, grouped_in, grouped_out, transposed
    )
    return _moe_lora(*given)  # type: ignore[no-any-return]


# A dense W comes as ``w``, a packed one with its parts and its ``shape`` (E, K, N). ``function`` is the one that was called.
ARGUMENTS = (
    "Tensor x, Tensor? w, Tensor? lora_a, Tensor? lora_b, Tensor? bias, Tensor? gates, Tensor expert_ids, Tensor lists, "
    "Tensor? packed, Tensor? absmax, Tensor? code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset, "
    "str function, SymInt experts, SymInt[] shape, int block_size, bool transposed, float scaling, str strategy, "
    "bool grouped_in, bool grouped_out"
)


class Call(named_arguments(ARGUMENTS)):  # type: ignore[misc]
    """The arguments of the operator, in their order, see :func:`moe_lora`."""

    @property
    def routing(self) -> Routing:
        return Routing(self.expert_ids, self.lists, self.experts)

    @property
    def weight(self) -> torch.Tensor | Matrices:
        if self.w is not None:
            return self.w
        nested, (e, k, n) = (self.nested_absmax, self.nested_code, self.nested_offset), self.shape
        return Matrices(self.packed, self.absmax, self.code, nested, self.block_size, (e, k, n), self.transposed)

    @property
    def layouts(self) -> tuple[int, int]:
        """How rows of x and of dY lie. With gates a token's slots share one row of dY, which counts with each gate."""
        slots = self.expert_ids.shape[1]
        of_dy = SORTED if self.grouped_out else 1 if self.gates is None else slots
        return SORTED if self.grouped_in else slots, of_dy


DIFFERENTIABLE = 6  # the first of the tensors


def call_of(
    function: str, x: Any, w: Any, routing: Any, lora_a: Any = None, lora_b: Any = None, bias: Any = None,
    gates: Any = None, scaling: float = 1.0, strategy: str = "auto", grouped_in: bool = False,
    grouped_out: bool = False, transposed: bool = False,
) -> Call:  # fmt: skip
    """Put a public function's arguments together as the operator takes them."""
    if not isinstance(routing, Routing):
        raise TypeError(f"{function}: routing must be a Routing, as route() returns it, got {type(routing).__name__}")
    parts: tuple[Any, Any, Any, Any, Any, Any] = (None, None, None, None, None, None)
    shape: tuple[int, ...] = ()
    block_size = 0
    if isinstance(w, NF4Tensor):
        if len(w.shape) != 3:
            raise ValueError(f"{function}: w must have three dimensions, got shape {w.shape}")
        e, first, second = w.shape
        # Triton's float64 products compile with no operand that was decoded from bytes, and rows of W have to be whole words.
        dtype = getattr(x, "dtype", None)
        if isinstance(dtype, torch.dtype) and (dtype == torch.float64 or second % 32):
            w = w.as_float64().to(dtype) if transposed else w.as_float64().to(dtype).transpose(1, 2)
        else:
            parts = w.packed, w.absmax, w.code, w.nested_absmax, w.nested_code, w.nested_offset
            shape, block_size, w = (e, first, second) if transposed else (e, second, first), w.block_size, None
    elif transposed:
        raise ValueError(
            f"{function}: transposed must be False for a dense w, whose strides say it, got {transposed!r}"
        )
    elif not isinstance(w, torch.Tensor):
        arguments.check_tensor(function, "w", w)
    return Call(
        x, w, lora_a, lora_b, bias, gates, routing.expert_ids, routing.lists, *parts, function, routing.num_experts,
        shape, block_size, bool(transposed), scaling, strategy, bool(grouped_in), bool(grouped_out),
    )  # fmt: skip


def check(*args: Any) -> None:
    call = Call(*args)
    (x, w, lora_a, lora_b, bias, gates, expert_ids), op, experts = args[:7], call.function, call.experts
    arguments.check_tensor(op, "x", x)
    if w is None:
        found, k, n = call.shape
        if found != experts:
            sides = (k, n) if call.transposed else (n, k)
            raise ValueError(f"{op}: w must have shape {(experts, *sides)}, got {(found, *sides)}")
    else:
        arguments.check_tensor(op, "w", w, dims=3)
        _, k, n = w.shape
        arguments.check_alike(op, x, w=(w, (experts, k, n)))
    tokens, slots = expert_ids.shape
    arguments.check_shape(op, "x", x, (tokens * slots if call.grouped_in else tokens, k))
    arguments.check_same_device(op, x=x, w=call.packed, routing=expert_ids)
    rank = 0
    if (lora_a is None) != (lora_b is None):
        missing, there = ("lora_a", "lora_b") if lora_a is None else ("lora_b", "lora_a")
        raise TypeError(f"{op}: {missing} must be a tensor where {there} is one, got None")
    if lora_a is not None:
        arguments.check_tensor(op, "lora_a", lora_a, dims=3)
        rank = lora_a.shape[1]
        if rank < 1:
            raise ValueError(f"{op}: lora_a must have a rank of at least 1, got shape {tuple(lora_a.shape)}")
    factors = {"lora_a": (lora_a, (experts, rank, k)), "lora_b": (lora_b, (experts, n, rank))}
    arguments.check_alike(op, x, **factors, bias=(bias, (experts, n)))
    if gates is not None:
        arguments.check_tensor(op, "gates", gates, dtypes=tuple({x.dtype, torch.float32}))
        arguments.check_shape(op, "gates", gates, expert_ids.shape)
        if call.grouped_out:
            raise ValueError(f"{op}: grouped_out must be False with gates, whose sum over the slots is in token order")
        arguments.check_same_device(op, x=x, gates=gates)
    arguments.check_choice(op, "strategy", call.strategy, STRATEGIES)


# --- forward --------------------------------------------------------------------------------------------------------


def _outputs(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> Y, and for the backward pass, where there is a low-rank update, U = scaling X A^T (R, padded rank), in expert order."""
    call, record = Call(*args[:-1]), args[-1]
    x, a, rows, u = call.x, call.lora_a, call.expert_ids.numel(), None
    if record and a is not None:
        u = empty((rows, kernels.padded_rank(a.shape[1])), x.dtype, x)
    return empty((rows if call.gates is None else call.expert_ids.shape[0], call.weight.shape[2]), x.dtype, x), u


def _plan(*args: Any) -> tuple[GemmPlan, Step | None] | None:
    """-> the product, and with gates the sum over slots."""
    call = Call(*args[:-1])
    routing, w, x = call.routing, call.weight, call.x
    if routing.rows == 0 or w.shape[2] == 0:
        return None
    gemm = grouped.gemm_plan(
        routing, x, call.layouts[0], w, call.lora_a, call.lora_b, call.bias is not None, call.grouped_out, call.strategy
    )
    gated = call.gates is not None
    return gemm, grouped.combine_step(routing.rows, routing.slots, w.shape[2], x.dtype) if gated else None


def _run(plan: tuple[GemmPlan, Step | None], outputs: tuple[torch.Tensor, torch.Tensor | None], *args: Any) -> None:
    (gemm, combine), (y, u), call = plan, outputs, Call(*args[:-1])
    x, w = call.x, call.weight
    routed = y if combine is None else empty((call.expert_ids.numel(), w.shape[2]), x.dtype, x)
    grouped.gemm(gemm, call.routing, x, w, call.bias, routed, call.lora_a, call.lora_b, u, call.scaling)
    if combine is not None:
        grouped.combine(combine, routed, y, call.gates)


def _gradients(call: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """-> of x, w, lora_a, lora_b, bias and gates."""
    needs = [dtype is not None for dtype in call.wanted[:DIFFERENTIABLE]]
    return moe_lora_backward(dy, *call.saved, *call.kept, *call.plain[:-1], needs)  # type: ignore[no-any-return]


# --- backward -------------------------------------------------------------------------------------------------------


def _outputs_backward(dy: torch.Tensor, u: Any, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients that are needed, each contiguous; ``None`` for the others."""
    like = zip(args[:DIFFERENTIABLE], args[-1], strict=True)
    return tuple(empty(t.shape, t.dtype, dy) if needed else None for t, needed in like)


class _BackwardPlan(NamedTuple):
    """Each step is ``None`` where nothing of it is wanted."""

    gemm: GemmPlan | None  # dY W^T + D A
    combine: Step | None  # where dX is a sum of its rows, or the gradient of the gates is wanted
    shrink: ShrinkPlan | None  # D = scaling dY B, where nothing else is wanted of dY W^T
    factors: Step | None  # dA and dB
    dw: Step | None
    dbias: Step | None


def _transposed(factor: torch.Tensor | None) -> Any:
    """A low-rank factor as the product with dY has it: B^T in the place of A, and A^T in that of B."""
    return None if factor is None else factor.transpose(1, 2)


def _plan_backward(dy: torch.Tensor, u: Any, *args: Any) -> _BackwardPlan | None:
    call, (needs_dx, needs_dw, needs_da, needs_db, needs_dbias, needs_dgates) = Call(*args[:-1]), args[-1]
    routing, w, x, grouped_in, gated = call.routing, call.weight, call.x, call.grouped_in, call.gates is not None
    rows, slots, (_, k, n) = routing.rows, routing.slots, w.shape
    if rows == 0 or n == 0:
        return None
    x_layout, dy_layout = call.layouts
    a, b = _transposed(call.lora_b), _transposed(call.lora_a)
    rank = 0 if a is None else a.shape[1]
    gemm = combine = None
    if needs_dx or needs_dgates:
        gemm = grouped.gemm_plan(routing, dy, dy_layout, w.transpose(1, 2), a, b, False, grouped_in, call.strategy)
        if gated or not (grouped_in or slots == 1):
            combine = grouped.combine_step(rows, 1 if grouped_in else slots, k, x.dtype, with_dgates=needs_dgates)
    columns = k if needs_da else 0, n if needs_db else 0
    return _BackwardPlan(
        gemm=gemm,
        combine=combine,
        shrink=grouped.shrink_plan(routing, dy, dy_layout, a) if needs_da and gemm is None else None,
        factors=grouped.wgrad_step(routing, x, SORTED, rank, x_layout, columns[0], dy_layout, columns[1]),
        dw=grouped.wgrad_step(routing, x, x_layout, k, dy_layout, n) if needs_dw else None,
        dbias=grouped.wgrad_step(routing, x, SORTED, 1, dy_layout, n, exact=True) if needs_dbias else None,
    )


def _run_backward(plan: _BackwardPlan, outputs: tuple[Any, ...], dy: torch.Tensor, u: Any, *args: Any) -> None:
    dx, dw, da, db, dbias, dgates = outputs
    call = Call(*args[:-1])
    routing, x, gates = call.routing, call.x, call.gates
    d: Any = None if da is None else empty(u.shape, u.dtype, u)  # like U
    a, b = _transposed(call.lora_b), _transposed(call.lora_a)
    if plan.gemm is not None:
        dx_per_slot = dx if plan.combine is None else empty((routing.rows, x.shape[1]), x.dtype, x)
        grouped.gemm(plan.gemm, routing, dy, call.weight.transpose(1, 2), None, dx_per_slot, a, b, d, call.scaling)
        if plan.combine is not None:
            _combine_slots(plan.combine, dx_per_slot, dx, dgates, dy, call)
    if plan.shrink is not None:
        grouped.shrink(plan.shrink, routing, dy, a, d, call.scaling)
    if plan.factors is not None:
        left, right = (None, None) if da is None else (d, x)
        # A hook of saved tensors may have brought a U with other strides.
        second: tuple[Any, Any] = (None, None) if db is None else (u.contiguous(), dy)
        grouped.wgrad(plan.factors, routing, left, right, gates, da, *second, db)
    if plan.dw is not None:
        grouped.wgrad(plan.dw, routing, x, dy, gates, dw)
    if plan.dbias is not None:
        ones = torch.ones((routing.rows, 1), dtype=x.dtype, device=x.device)
        grouped.wgrad(plan.dbias, routing, ones, dy, gates, dbias)


def _combine_slots(step: Step, dx_per_slot: torch.Tensor, dx: Any, dgates: Any, dy: torch.Tensor, call: Call) -> None:
    """Fill dx and dgates, where they are wanted, from dY W^T + D A, a row for each routed token."""
    order = call.lists if call.grouped_in else None
    x = None if dgates is None else call.x
    if dgates is None or call.bias is None:
        grouped.combine(step, dx_per_slot, dx, call.gates, order, x, dgates)
        return
    inner = empty(dgates.shape, accumulator(dx_per_slot.dtype), dx_per_slot)
    grouped.combine(step, dx_per_slot, dx, call.gates, order, x, inner)
    # y = ... + bias[e]: what the inner products of dX and x leave out.
    ids = call.expert_ids
    skipped = (ids < 0) | (ids >= call.experts)
    inner += linear(dy, call.bias).gather(1, ids.long().masked_fill(skipped, 0)).masked_fill(skipped, 0)
    dgates.copy_(inner)


# --- operators ------------------------------------------------------------------------------------------------------

moe_lora_backward = Op(
    f"moe_lora_backward(Tensor dy, Tensor? u, {ARGUMENTS}, bool[] needs) "
    "-> (Tensor dx, Tensor dw, Tensor da, Tensor db, Tensor dbias, Tensor dgates)",
    outputs=_outputs_backward,
    plan=_plan_backward,
    run=_run_backward,
    results=DIFFERENTIABLE,
)
FORWARD: dict[str, Any] = {
    "check": check,
    "outputs": _outputs,
    "plan": _plan,
    "run": _run,
    "autocast": ("x", "w", "lora_a", "lora_b", "bias"),
    # Where activations are checkpointed, each tensor that autograd saves costs the host some 25 us. A routing and frozen
    # weights in few bits have no gradient, and no memory is won by dropping them.
    "keeps": ("expert_ids", "lists", "packed", "absmax", "code", "nested_absmax", "nested_code", "nested_offset"),
}
_moe_lora = Op(
    f"moe_lora({ARGUMENTS}, bool record) -> (Tensor y, Tensor u)",
    saves=("u", "x", "w", "lora_a", "lora_b", "bias", "gates"),
    backward=_gradients,
    **FORWARD,
)
