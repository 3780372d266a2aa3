"""The public functions in the order of a call: observed or not, plan, new memory, launch; then the gradients the same way."""

import dataclasses
import math
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels_decode, launches
from kernelbook.attention.launches import plain_kernels
from kernelbook.launch import Launch, cdiv, composite, operator, sources
from kernelbook.memory import accumulator, counters, empty
from kernelbook.observed import are_tensors, form, in_mode_of_forward, is_aligned, keep_mode, observed, wants_gradient
from kernelbook.plans import KeptPlans
from kernelbook.tensors import strided

__all__ = [
    "NUMBER", "Plan", "check_heads", "check_sinks", "check_tensors", "checked_scale", "flash_attention", "forward",
    "plain_arguments", "plain_kernels",
]  # fmt: skip

MAX_D = 256
MAX_SCALE = torch.finfo(torch.float32).max / launches.LOG2_E
NUMBER = (NoneType, float)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    lengths: Tensor | None = None, window: int | None = None, sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(scale q k^T) v`` without the score matrix; differentiable in q, k, v and sinks, bitwise reproducible.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), sections 2 and 3; up to
    16 queries: Dao et al., "Flash-Decoding for long-context inference" (2023), merged in the same launch.
    Softmax and sums are computed in float32 (float64 for float64 inputs), whatever the dtype of ``q``.

    Args:
        q: (B, H, N, D), float16, bfloat16, float32 or float64, any strides, D from 1 to 256; in float64 to 128 on a GPU
            with 64 KiB of shared memory a program.
        k, v: (B, H_kv, S, D), the dtype of ``q``, any strides. H_kv divides H: query head ``h`` reads key and value head
            ``h // (H / H_kv)`` (grouped-query attention).
        causal: query ``i`` sees the keys up to ``i + S - N``: the last query sees all, also where N and S differ.
            (``torch.nn.functional.scaled_dot_product_attention`` aligns the first query with the first key instead.)
        scale: what scores are multiplied by; ``None``: 1 / sqrt(D). Scaled scores may be as large as 1e8: beyond, float32
            cannot tell them apart.
        lengths: (B,) int64 or int32: so many keys of each sequence exist. Whatever lies beyond has no effect, and its
            gradient is zero; with ``causal`` the last query stands at the last existing key. What is not in [0, S] is an error on
            the CPU and under ``KERNELBOOK_DEBUG=1``; on a GPU without it, it is clamped.
        window: with ``causal``, a query at position ``i`` sees the keys ``i - window < j <= i`` only; from 1 on, also beyond S.
        sinks: (H,) floating point, a logit of each query head that joins the sum of its softmax and has no value, as in
            gpt-oss (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023): weights add up to less
            than 1. It is not multiplied by ``scale``. -inf has no weight; +inf has all of it, and its gradient is NaN.
        softcap: above 0: scaled scores become ``softcap * tanh(score / softcap)``, as in Gemma 2. Sinks are not capped.

    Returns:
        (B, H, N, D) in the dtype of ``q`` and, where that is dense, with its strides; under autocast in its dtype, as
        PyTorch's own. A query that sees no key gets zeros, and gives none of its gradient on. float32 products use tf32
        where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, ``causal`` is not a bool, ``scale`` or
            ``softcap`` not a number, or ``window`` not an integer.
        ValueError: a shape, a device, ``scale``, ``window``, ``softcap`` or an entry of ``lengths`` is not as above.
    """
    are_numbers = type(scale) in NUMBER and type(softcap) in NUMBER
    if type(causal) is not bool or not are_numbers or type(window) not in (NoneType, int):
        causal, scale, window, softcap = plain_arguments("flash_attention", causal, scale, window, softcap)
    if is_dynamo_compiling() and are_tensors(q, k, v, lengths, sinks):
        return _flash_whole(q, k, v, causal, scale, lengths, window, sinks, softcap, SOURCES)  # type: ignore[no-any-return]
    if observed(q, k, v, lengths, sinks):
        return _flash_by_operators(q, k, v, causal, scale, lengths, window, sinks, softcap)
    if torch._C._is_any_autocast_enabled():
        q, k, v = arguments.in_autocast_dtype(q, k, v)
    if wants_gradient(q, k, v, sinks):
        return _Attention.apply(q, k, v, causal, scale, lengths, window, sinks, softcap)  # type: ignore[no-any-return]
    return _flash(q, k, v, causal, scale, lengths, window, sinks, softcap, with_lse=False)[1]


# --- checks ---------------------------------------------------------------------------------------------------------


def check_tensors(op: str, **tensors: Tensor) -> None:
    for name, value in tensors.items():
        arguments.check_tensor(op, name, value)
        if value.ndim != 4:
            raise ValueError(f"{op}: {name} must have four dimensions, got shape {tuple(value.shape)}")
    arguments.check_same_dtype(op, **tensors)
    arguments.check_same_device(op, **tensors)
    name, first = next(iter(tensors.items()))
    if not 1 <= first.shape[3] <= MAX_D:
        raise ValueError(f"{op}: {name} must have 1 to {MAX_D} features a head, got shape {tuple(first.shape)}")


def check_heads(op: str, names: str, h: int, h_kv: int) -> None:
    if h % h_kv if h_kv else h:
        raise ValueError(f"{op}: the heads of {names} must divide those of q ({h}), got {h_kv}")


def plain_arguments(
    op: str, causal: Any, scale: Any, window: Any, softcap: Any
) -> tuple[bool, float | None, int | None, float | None]:
    """What is no tensor, in Python's own types, as a plan's key holds it."""
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be a bool, got {type(causal).__name__}")
    scale = scale if scale is None else arguments.number(op, "scale", scale, "a number or None")
    softcap = softcap if softcap is None else arguments.number(op, "softcap", softcap, "a number or None")
    window = window if window is None else arguments.integer(op, "window", window, "an int or None")
    return causal, scale, window, softcap


def checked_scale(op: str, scale: Any, d: int) -> float:
    found: float = 1 / math.sqrt(d) if scale is None else scale
    if not -MAX_SCALE <= found <= MAX_SCALE:
        raise ValueError(f"{op}: scale must be finite and not above {MAX_SCALE:.3g} in size, got {found!r}")
    return found


def check_sinks(op: str, q: Tensor, sinks: Any, softcap: float | None) -> None:
    if sinks is not None:
        arguments.check_tensor(op, "sinks", sinks)
        arguments.check_shape(op, "sinks", sinks, (q.shape[1],))
        arguments.check_same_device(op, q=q, sinks=sinks)
    if softcap is not None and not launches.MIN_SCALE <= softcap <= MAX_SCALE:
        raise ValueError(f"{op}: softcap must be above 0 and not above {MAX_SCALE:.3g}, got {softcap!r}")


def _check_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Any, lengths: Any, window: Any, sinks: Any, softcap: Any
) -> tuple[float, int | None, float | None]:
    """-> scale, window and softcap. The window is None where it holds all keys, since kernels add to it in 32 bits."""
    op = "flash_attention"
    check_tensors(op, q=q, k=k, v=v)
    b, h, _, d = q.shape
    arguments.check_shape(op, "k", k, (b, *k.shape[1:3], d))
    arguments.check_shape(op, "v", v, (b, *k.shape[1:3], d))
    check_heads(op, "k and v", h, k.shape[1])
    check_sinks(op, q, sinks, softcap)
    if lengths is not None:
        arguments.check_indices(op, "lengths", lengths)
        arguments.check_shape(op, "lengths", lengths, (b,))
        arguments.check_same_device(op, q=q, lengths=lengths)
    if window is not None:
        if window < 1 or not causal:
            raise ValueError(
                f"{op}: window must be at least 1 and come with causal=True, got {window} and causal={causal}; for other "
                f"masks there is FlexAttention (torch.nn.attention.flex_attention)"
            )
        if window >= k.shape[2]:
            window = None
    return checked_scale(op, scale, d), window, softcap


# --- forward --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What is decided for a kind of forward pass, to keys that lie together or in pages."""

    scale: float
    window: int | None
    softcap: float | None
    readable: bool  # kernels can read the tensors as they lie, and queries are not multiplied beforehand
    scaling: launches.Scaling
    lse_shape: torch.Size | None
    sums_dtype: torch.dtype  # of lse, and of what splits leave
    split: launches.SplitKeys | None  # few queries
    tiles: launches.Tiles | None  # many; neither: there is nothing to see
    sinks_afterwards: tuple[Launch, tuple[int]] | None = None


_plans = KeptPlans[Plan]()


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: Tensor | None, window: int | None,
    sinks: Tensor | None, softcap: float | None, *, with_lse: bool,
) -> tuple[Plan, Tensor, Tensor | None]:  # fmt: skip
    """-> the plan, o like q, and lse (B, H, N) in base 2, which may be None where it is not asked for."""
    plan = _flash_plan(q, k, v, causal, scale, lengths, window, sinks, softcap, with_lse)
    if lengths is not None:
        arguments.check_index_values("flash_attention", "lengths", lengths, k.shape[2] + 1)
    return plan, *forward(plan, q, k, v, lengths, None, sinks)


def _flash_plan(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: Tensor | None, window: int | None,
    sinks: Tensor | None, softcap: float | None, with_lse: bool,
) -> Plan:  # fmt: skip
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    aligned, precision = is_aligned(q, k, v), launches.precision(q)
    tensors = form(q), form(k), form(v), form(lengths)
    asked = causal, scale, window, form(sinks), softcap, with_lse
    others = aligned, asked, precision, launches.HAS_GLUON, runtime.plan_mode()
    plan = _plans.get((tensors, others))
    if plan is None:
        kind = _without_length(tensors, window), others
        plan = _plans.get(kind)
        if plan is None:
            plan = _new_flash_plan(
                q, k, v, causal, scale, lengths, window, sinks, softcap, with_lse, aligned, precision
            )
            _plans.keep(kind, plan)
        _plans.keep((tensors, others), plan)
    return plan


def _without_length(tensors: tuple[Any, ...], window: int | None) -> tuple[Any, ...]:
    """What a plan for few queries depends on: of the number of keys only how many blocks of 64 they are.

    So a cache that grows by a key a call keeps its plan. For more queries, the tensors' forms as they are.
    """
    q, k, v, lengths = tensors
    if None in (q, k, v) or any(len(shape) != 4 for shape, *_ in (q, k, v)) or q[0][2] > kernels_decode.MAX_QUERIES:
        return tensors
    (shape, k_strides, *k_others), (v_shape, v_strides, *v_others) = k, v
    b, h_kv, s, d = shape
    readable = launches.are_in_pieces(k_strides), launches.are_in_pieces(v_strides)
    seen = window is None or window >= s
    return q, b, h_kv, cdiv(s, 64), d, shape == v_shape or v_shape, *k_others, *v_others, *readable, lengths, seen


def _new_flash_plan(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: Tensor | None, window: int | None,
    sinks: Tensor | None, softcap: float | None, with_lse: bool, aligned: bool, precision: str,
) -> Plan:  # fmt: skip
    scale, window, softcap = _check_flash(q, k, v, causal, scale, lengths, window, sinks, softcap)
    problem = launches.problem(q, k, causal, lengths, window, precision, sinks=sinks, softcap=softcap)
    split = tiles = afterwards = None
    few = problem.n <= kernels_decode.MAX_QUERIES or problem.properties.same_bits  # whose kernel takes any number
    if q.numel() and k.numel() and few:
        split = launches.split_keys(problem, with_lse)
    elif q.numel() and k.numel():
        tiles = launches.forward(problem, launches.reach(problem, (q, k, v), (q,)))
        afterwards = launches.sinks_afterwards(problem, tiles)
    scaling = launches.scaling(q.dtype, scale)
    readable = aligned and scaling.queries == 1 and all(launches.are_in_pieces(t.stride()) for t in (q, k, v))
    lse_shape = q.shape[:3] if with_lse or tiles else None
    dtype = accumulator(q.dtype)
    return Plan(scale, window, softcap, readable, scaling, lse_shape, dtype, split, tiles, afterwards)


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, table: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """-> o and lse. With a ``table`` k and v are pages, which kernels read wherever they lie."""
    o = _like(q)
    lse = None if plan.lse_shape is None else empty(plan.lse_shape, plan.sums_dtype, q)
    if plan.split is None and plan.tiles is None:
        return o.zero_(), None if lse is None else lse.fill_(math.inf)
    q, scale = plan.scaling.of_queries(q), plan.scaling.scores
    if not plan.readable:
        q = launches.readable(q)
        k, v = (k, v) if table is not None else (launches.readable(k), launches.readable(v))
    if plan.split is not None:
        split, partial, counted = plan.split, o, o
        s = k.shape[2] if table is None else k.shape[2] * table.shape[1]
        if split.partial_shape is not None:
            partial = empty(split.partial_shape, plan.sums_dtype, q)
            counted = counters(split.grid[0], q.device)
        split.launch(
            split.grid, q, *q.stride(), k, *k.stride(), v, *v.stride(), o, *o.stride(), o if lse is None else lse,
            *strided(lengths, 1, o), *strided(table, 2, o), partial, counted,
            *q.shape[1:3], s, k.shape[0], plan.window or 0, scale, *strided(sinks, 1, o),
        )  # fmt: skip
    elif plan.tiles is not None:
        tiles = plan.tiles
        tiles.launch(
            tiles.grid, *tiles.queries.of(q), *tiles.keys.of(k), *tiles.keys.of(v), *tiles.results.of(o), lse,
            *tiles.sizes, *tiles.seen(lengths, lse), scale, *tiles.joining(sinks, lse),
        )  # fmt: skip
        if plan.sinks_afterwards is not None and sinks is not None:
            launch, grid = plan.sinks_afterwards
            launch(grid, o, *o.stride(), lse, sinks, *sinks.stride(), *q.shape[1:3])
    return o, lse


def _like(tensor: Tensor) -> Tensor:
    """New memory in the tensor's shape and, where it is dense, its strides."""
    return empty(tensor.shape, tensor.dtype, tensor) if tensor.is_contiguous() else torch.empty_like(tensor)


# --- gradients ------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, lengths: Any, window: Any, sinks: Any,
        softcap: Any,
    ) -> Tensor:  # fmt: skip
        plan, o, lse = _flash(q, k, v, causal, scale, lengths, window, sinks, softcap, with_lse=True)
        _keep(ctx, (q, k, v, causal, plan.scale, lengths, plan.window, sinks, plan.softcap), (o, lse))
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, do)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, ctx.causal, ctx.scale, lengths, ctx.window, sinks, ctx.softcap = inputs
    keep_mode(ctx)
    ctx.save_for_backward(q, k, v, *output, lengths, sinks)
    ctx.set_materialize_grads(False)


@in_mode_of_forward
def _gradients(ctx: Any, do: Tensor | None, _lse: None = None) -> tuple[Tensor | None, ...]:
    """-> the gradients of all arguments."""
    if do is None:
        return (None,) * 9
    q, k, v, o, lse, lengths, sinks = ctx.saved_tensors
    by_operator = torch.is_grad_enabled() or observed(do, q, k, v, o, lse, lengths, sinks)
    dq, dk, dv, dsinks = (_backward_operator if by_operator else _backward)(
        do, q, k, v, o, lse, ctx.causal, ctx.scale, lengths, ctx.window, sinks, ctx.softcap
    )
    return dq, dk, dv, None, None, None, None, None if sinks is None else dsinks, None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
    """What is decided for a kind of backward pass."""

    readable: bool  # kernels can read the tensors as they lie
    scaling: launches.Scaling
    launch_delta: Launch
    delta_grid: tuple[int]
    delta_shape: tuple[int, int, int]  # (B, H, N), N rounded up where kernels load whole blocks
    of_keys: launches.Tiles
    of_queries: launches.Tiles | None  # None: the kernel for dk and dv computes dq too
    adding_up: launches.AddingUp | None  # how it adds up dq
    splits: int  # so many programs share the query heads of one key head
    partial_shape: tuple[int, ...]  # of their dk and dv
    of_sinks: Launch | None


_backward_plans = KeptPlans[_BackwardPlan]()


def _backward_plan(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, causal: bool, scale: float, lengths: Tensor | None,
    window: int | None, sinks: Tensor | None, softcap: float | None,
) -> _BackwardPlan:  # fmt: skip
    aligned, precision = is_aligned(do, q, k, v, o), launches.precision(q)
    tensors = form(do), form(q), form(k), form(v), form(o), form(lengths), form(sinks)
    key = tensors, aligned, causal, scale, window, softcap, precision, launches.HAS_GLUON, runtime.plan_mode()
    plan = _backward_plans.get(key)
    if plan is None:
        p = launches.problem(q, k, causal, lengths, window, precision, sinks=sinks, softcap=softcap)
        reach = launches.reach(p, (q, k, v, do), (q, k, v))
        scaling, of_queries, adding_up = launches.scaling(p.dtype, scale), None, None
        if (at_once := launches.all_gradients(p, reach)) is not None:
            of_keys, n_padded, splits, adding_up = at_once
        else:
            of_keys, n_padded, splits = launches.dkdv(p, reach)
            of_queries = launches.dq(p, reach, n_padded)
        in_pieces = all(launches.are_in_pieces(t.stride()) for t in (do, q, k, v, o))
        plan = _BackwardPlan(
            aligned and in_pieces and scaling.queries == 1, scaling,
            *launches.delta(p, n_padded, of_keys.vectors is not None), (p.b, p.h, n_padded),
            of_keys, of_queries, adding_up, splits, (p.b, p.h_kv * splits, p.s, p.d),
            None if sinks is None else launches.dsinks(p),
        )  # fmt: skip
        _backward_plans.keep(key, plan)
    return plan


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    lengths: Tensor | None, window: int | None, sinks: Tensor | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dq, dk, dv and dsinks, like q, k, v and sinks; without sinks one of no elements."""
    dq, dk, dv, dsinks = _like(q), _like(k), _like(v), _like_sinks(q, sinks)
    if k.numel() == 0 or o.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_()
    plan = _backward_plan(do, q, k, v, o, causal, scale, lengths, window, sinks, softcap)
    scaling, (_, h, n_padded), n = plan.scaling, plan.delta_shape, q.shape[2]
    q = scaling.of_queries(q)
    if not plan.readable:
        do, q, k, v, o = map(launches.readable, (do, q, k, v, o))
    delta = empty(plan.delta_shape, lse.dtype, q)
    padded = lse if plan.of_keys.vectors is None else empty(plan.delta_shape, lse.dtype, q)
    plan.launch_delta(plan.delta_grid, o, *o.stride(), do, *do.stride(), lse, delta, padded, h, n, n_padded)
    if plan.of_sinks is not None and sinks is not None:
        plan.of_sinks((h,), padded, delta, sinks, *sinks.stride(), dsinks, q.shape[0], h, n_padded)
    sums = dk, dv
    if plan.splits > 1:
        sums = empty(plan.partial_shape, k.dtype, k), empty(plan.partial_shape, v.dtype, v)
    adding_up, dq_sums, dq_arguments = plan.adding_up, dq, ()
    if adding_up is not None:
        dq_sums = empty(adding_up.shape, lse.dtype, q)
        dq_arguments = adding_up.of(dq, dq_sums, counters(adding_up.counters, q.device))
    for tiles, results, more in ((plan.of_keys, sums, dq_arguments), (plan.of_queries, (dq,), ())):
        if tiles is None:
            continue
        tiles.launch(
            tiles.grid, *tiles.queries.of(q), *tiles.keys.of(k), *tiles.keys.of(v), *tiles.queries.of(do),
            tiles.vector(padded), tiles.vector(delta), *(part for result in results for part in tiles.results.of(result)),
            *more, *tiles.sizes, *tiles.seen(lengths, padded), scaling.scores, scaling.gradients,
        )  # fmt: skip
    if adding_up is not None and adding_up.round is not None:
        adding_up.round(adding_up.round_grid, dq_sums, dq, *dq.stride()[:3], h, n, scaling.gradients)
    if plan.splits > 1:
        for result, partial in zip((dk, dv), sums, strict=True):
            torch.sum(partial.unflatten(1, (k.shape[1], plan.splits)), 2, out=result)
    if scaling.dq != 1:
        dq *= scaling.dq
    if scaling.dk != 1:
        dk *= scaling.dk
    return dq, dk, dv, dsinks


def _like_sinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return empty((0,), q.dtype, q) if sinks is None else empty(sinks.shape, sinks.dtype, sinks)


# --- where somebody observes: operators -----------------------------------------------------------------------------


def _flash_by_operators(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: Tensor | None, window: int | None,
    sinks: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    q, k, v = arguments.in_autocast_dtype(q, k, v)
    scale, window, softcap = _check_flash(q, k, v, causal, scale, lengths, window, sinks, softcap)
    o: Tensor
    if wants_gradient(q, k, v, sinks):
        o, _ = _flash_operator(q, k, v, causal, scale, lengths, window, sinks, softcap)
    else:
        o = _inference_operator(q, k, v, causal, scale, lengths, window, sinks, softcap)
    return o


def _keep_flash(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(output[1])


_flash_operator = operator(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window, "
    "Tensor? sinks, float? softcap) -> (Tensor, Tensor)",
    outputs=lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))),
    run=lambda *args: _flash(*args, with_lse=True)[1:],
    setup_context=_keep_flash,
    backward=_gradients,
)

_inference_operator = operator(
    "flash_attention_inference(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window, "
    "Tensor? sinks, float? softcap) -> Tensor",
    outputs=lambda q, *_: torch.empty_like(q),
    run=lambda *args: _flash(*args, with_lse=False)[1],
)

_backward_operator = operator(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale, "
    "Tensor? lengths, int? window, Tensor? sinks, float? softcap) -> (Tensor, Tensor, Tensor, Tensor)",
    outputs=lambda do, q, k, v, *others: (*map(torch.empty_like, (q, k, v)), _like_sinks(q, others[-2])),
    run=_backward,
)


SOURCES = sources()
_flash_whole = composite(
    "flash_attention_whole(Tensor q, Tensor k, Tensor v, bool causal, float? scale, Tensor? lengths, SymInt? window, "
    "Tensor? sinks, float? softcap) -> Tensor",
    _flash_by_operators,
)
