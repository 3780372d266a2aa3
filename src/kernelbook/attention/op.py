"""The public function, its checks, and the forward operator: outputs, plan, run. The backward pass is in backward.py."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernelbook import arguments  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode, kernels_same_bits, launches
from kernelbook.attention.backward import attention_backward
from kernelbook.attention.launches import Problem, Tiles, is_readable, kernel_arg, like, plain_kernels, readable
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.memory import accumulator, counters, empty
from kernelbook.operators import Op

__all__ = ["flash_attention", "plain_kernels"]

MAX_D = 256
MAX_SCALE = torch.finfo(torch.float32).max / launches.LOG2_E


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    lengths: Tensor | None = None, window: int | None = None, sinks: Tensor | None = None, softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
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
        cu_seqlens: (sequences + 1,) int64 or int32, cumulative lengths: with B = 1 and S = N, sequence ``i`` has the rows
            from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` of q, k and v, and sees itself alone; all of the above holds
            within it. The first entry is 0, none is below the one before, the last is at most N: rows behind it see
            nothing. Other entries are an error on the CPU and under ``KERNELBOOK_DEBUG=1``; on a GPU without it, what rows see
            then is not defined, but lies in q, k and v. The host never reads them: a captured CUDA graph follows what they
            are when it is replayed, and entries that repeat N make room for more sequences.

    Returns:
        (B, H, N, D) in the dtype of ``q`` and, where that is dense, with its strides; under autocast in its dtype, as
        PyTorch's own. A query that sees no key gets zeros, and gives none of its gradient on. float32 products use tf32
        where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, ``causal`` is not a bool, ``scale`` or
            ``softcap`` not a number, or ``window`` not an integer.
        ValueError: a shape, a device, ``scale``, ``window``, ``softcap`` or an entry of ``lengths`` or ``cu_seqlens`` is not
            as above, or both are given.
    """
    if type(causal) is not bool:
        raise TypeError(f"flash_attention: causal must be a bool, got {type(causal).__name__}")
    if window is not None:
        window = arguments.integer("flash_attention", "window", window, "an int or None")
    scale, softcap = numbers("flash_attention", scale, softcap)
    o: Tensor = _attention(q, k, v, lengths, cu_seqlens, sinks, causal, scale, window, softcap, launches.HAS_GLUON)
    return o


def numbers(op: str, scale: Any, softcap: Any) -> tuple[float | None, float | None]:
    """Scale and soft cap as Python's own numbers."""
    scale = scale if scale is None else arguments.number(op, "scale", scale, "a number or None")
    softcap = softcap if softcap is None else arguments.number(op, "softcap", softcap, "a number or None")
    return scale, softcap


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


def check_scores(op: str, q: Tensor, names: str, h_kv: int, sinks: Any, scale: Any, softcap: Any) -> None:
    """``names``: of keys and values, which have ``h_kv`` heads."""
    h = q.shape[1]
    if h % h_kv if h_kv else h:
        raise ValueError(f"{op}: the heads of {names} must divide those of q ({h}), got {h_kv}")
    if sinks is not None:
        arguments.check_tensor(op, "sinks", sinks)
        arguments.check_shape(op, "sinks", sinks, (h,))
        arguments.check_same_device(op, q=q, sinks=sinks)
    if softcap is not None and not launches.MIN_SCALE <= softcap <= MAX_SCALE:
        raise ValueError(f"{op}: softcap must be above 0 and not above {MAX_SCALE:.3g}, got {softcap!r}")
    if scale is not None and not -MAX_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"{op}: scale must be finite and not above {MAX_SCALE:.3g} in size, got {scale!r}")


def _check(
    q: Any, k: Any, v: Any, lengths: Any, cu_seqlens: Any, sinks: Any, causal: bool, scale: Any, window: Any,
    softcap: Any, gluon: bool,
) -> None:  # fmt: skip
    op = "flash_attention"
    check_tensors(op, q=q, k=k, v=v)
    b, _, _, d = q.shape
    arguments.check_shape(op, "k", k, (b, *k.shape[1:3], d))
    arguments.check_shape(op, "v", v, (b, *k.shape[1:3], d))
    check_scores(op, q, "k and v", k.shape[1], sinks, scale, softcap)
    if lengths is not None:
        arguments.check_indices(op, "lengths", lengths)
        arguments.check_shape(op, "lengths", lengths, (b,))
        arguments.check_same_device(op, q=q, lengths=lengths)
    if cu_seqlens is not None:
        _check_packed(op, q, k, lengths, cu_seqlens)
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"{op}: window must be at least 1 and come with causal=True, got {window} and causal={causal}; for other "
            f"masks there is FlexAttention (torch.nn.attention.flex_attention)"
        )


def _check_packed(op: str, q: Tensor, k: Tensor, lengths: Any, cu_seqlens: Any) -> None:
    arguments.check_indices(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must have shape (sequences + 1,), one entry at least, got (0,)")
    arguments.check_same_device(op, q=q, cu_seqlens=cu_seqlens)
    if lengths is not None:
        raise ValueError(f"{op}: lengths must be None with cu_seqlens, got a tensor of shape {tuple(lengths.shape)}")
    if q.shape[0] > 1 or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"{op}: q, k and v must be a batch of 1 with the same rows with cu_seqlens, got q of shape {tuple(q.shape)} and k of "
            f"shape {tuple(k.shape)}"
        )


# --- forward --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SplitKeys:
    """The kernel for few queries, whose keys are split over programs."""

    launch: Launch
    grid: tuple[int, int]
    partial_shape: tuple[int] | None  # of what the programs of a tile leave for the last to merge; None: there is one


def split_keys(p: Problem) -> SplitKeys:
    """``p``: with a number of keys that is rounded up to a multiple of 64, so that a cache that grows has few problems."""
    constants = {"D": p.d, "GROUP": p.group, "SOFTCAP": p.softcap}
    if p.properties.same_bits:
        return _same_bits(p, constants)
    plan = kernels_decode.plan(p.b * p.h_kv, p.group * p.n, p.s, p.d, p.dtype.itemsize, p.properties, p.page)
    launch = launcher(
        kernels_decode._flash_attention_decode_kernel, CAUSAL=p.causal and p.n > 1, **constants,
        HOW=kernels_decode.Tiles(p.precision, p.page, **plan.config.kwargs),
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    )  # fmt: skip
    partial_shape = (plan.programs * plan.rows * (p.d + 1),) if plan.splits > 1 else None
    return SplitKeys(launch, (plan.tiles, plan.splits), partial_shape)


def _same_bits(p: Problem, constants: dict[str, Any]) -> SplitKeys:
    """The kernel for any number of queries whose rows are the same bits in any batch (batch-invariant)."""
    config = kernels_same_bits.config(p.d, p.dtype.itemsize, p.properties)
    rows, block_m = p.group * p.n, config.kwargs["BLOCK_M"]
    tiles, parts = p.b * p.h_kv * cdiv(rows, block_m), 1
    if split := not p.packed and kernels_same_bits.splits(tiles, p.n, p.s, p.properties):
        parts = cdiv(p.s, kernels_same_bits.PART)
    kept = min(block_m, 1 << (rows - 1).bit_length())
    launch = launcher(
        kernels_same_bits._flash_attention_same_bits_kernel, CAUSAL=p.causal, **constants, PACKED=p.packed, PAGE=p.page,
        PRECISION=p.precision, ROWS=kept, **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return SplitKeys(launch, (tiles, parts), (tiles * parts * kept * (p.d + 2),) if split else None)


def _forward_tiles(p: Problem) -> Tiles:
    """The kernel for many queries."""
    config = launches.hopper_config("fwd", p)
    if config is None:
        return launches.plain_tiles("fwd", kernels._flash_attention_fwd_kernel, p, p.n, p.h, p.s, SINKS=p.sinks)
    hopper, rows = launches.kernels_hopper, config.kwargs["ROWS"] * config.kwargs["WARPGROUPS"]
    mean = max(1, p.n // p.boundaries) if p.packed else 0
    grid, order = hopper.forward_grid(cdiv(p.n, rows), p.b * p.h, p.d, p.causal, mean, p.properties.num_sms)
    sizes = launches.section(p, p.s, p.h), order
    return launches.hopper_tiles(hopper._flash_attention_fwd_hopper_kernel, config, p, grid, sizes)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ForwardPlan:
    """What is decided for a kind of forward pass, to keys that lie together or in pages."""

    readable: bool  # kernels can read the tensors as they lie
    scaling: launches.Scaling
    window: int | None
    kernel: SplitKeys | Tiles


def forward_plan(p: Problem, scale: Any, gluon: bool, *read: Tensor) -> ForwardPlan:
    """``read``: q and, unless they lie in pages, k and v."""
    scaling = launches.scaling(read[0], scale)
    kernel: SplitKeys | Tiles
    few = p.n <= kernels_decode.MAX_QUERIES and not p.packed
    if few or p.properties.same_bits:  # whose kernel takes any number
        kernel = split_keys(dataclasses.replace(p, s=64 * cdiv(p.s, 64)))
    else:
        kernel = _forward_tiles(launches.with_tma(p, gluon, read, read[:1]))
    as_they_lie = scaling.queries == 1 and all(map(is_readable, read))
    return ForwardPlan(as_they_lie, scaling, p.window, kernel)


def run_forward(
    plan: ForwardPlan, o: Tensor, lse: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Any, cu_seqlens: Any, table: Any,
    sinks: Any,
) -> None:  # fmt: skip
    """Fill o and, where it is wanted, lse. With a ``table`` k and v are pages, which kernels read wherever they lie."""
    kernel, scores, s = plan.kernel, plan.scaling.scores, k.shape[2]
    q = plan.scaling.scale_queries(q)
    if not plan.readable:
        q = readable(q)
        k, v = (k, v) if table is not None else (readable(k), readable(v))
    if isinstance(kernel, SplitKeys):
        partial = semaphores = count = row = None
        if kernel.partial_shape is not None:
            partial = empty(kernel.partial_shape, accumulator(q.dtype), q)
            semaphores = counters(kernel.grid[0], q.device)
        of_keys = lengths
        if cu_seqlens is not None:
            of_keys, count = cu_seqlens, cu_seqlens.shape[0] - 1
        if table is not None:
            table = table if table.stride(1) == 1 else table.contiguous()
            count, row, s = k.shape[0], table.stride(0), s * table.shape[1]
        of_keys, sinks = (t if t is None else t.contiguous() for t in (of_keys, sinks))
        kernel.launch(
            kernel.grid, *(kernel_arg(None, t) for t in (q, k, v, o)), lse, of_keys, table, row, partial, semaphores,
            *q.shape[1:3], s, count, plan.window, scores, sinks,
        )  # fmt: skip
        return
    if lse is None:  # these kernels always write it
        lse = empty(q.shape[:3], accumulator(q.dtype), q)
    kernel.launch(
        kernel.grid, kernel_arg(kernel.queries, q), kernel_arg(kernel.keys, k), kernel_arg(kernel.keys, v),
        kernel_arg(kernel.results, o), lse,
        *kernel.sizes, *kernel.mask_args(lengths, cu_seqlens, lse), scores, *kernel.sink_args(sinks, lse),
        *kernel.rest_args(q, k, v, o),
    )  # fmt: skip


# --- the operator ---------------------------------------------------------------------------------------------------


def _outputs(q: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
    """-> o like q; for the backward pass lse (B, H, N), in base 2."""
    *_, record = others
    return like(q), empty(q.shape[:3], accumulator(q.dtype), q) if record else None


def _plan(*args: Any) -> ForwardPlan | None:
    q, k, v, lengths, cu_seqlens, sinks, causal, scale, window, softcap, gluon, _ = args
    if q.numel() == 0 or k.numel() == 0:
        return None
    p = launches.problem(q, k, lengths, sinks, causal, window, softcap, cu_seqlens=cu_seqlens)
    return forward_plan(p, scale, gluon, q, k, v)


def _kind(*args: Any) -> tuple[Any, ...] | None:
    """What a plan for few queries depends on: of the number of keys how many blocks of 64 they are, so that a cache grows."""
    q, k, v, lengths, cu_seqlens, sinks, causal, scale, window, softcap, gluon, record = args
    few = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[2] <= kernels_decode.MAX_QUERIES
    if not few or cu_seqlens is not None:
        return None
    (b, h_kv, s, d), tensors = k.shape, (q, k, v, lengths, sinks)
    kinds = [None if t is None else (t.dtype, t.device, t.data_ptr() % 16) for t in tensors]
    others = [None if t is None else (t.shape, t.stride()) for t in (q, lengths, sinks)]
    seen = window is None or window >= s
    numbers = causal, scale, window, seen, softcap, gluon, record
    return b, h_kv, cdiv(s, 64), d, is_readable(k), is_readable(v), *kinds, *others, *numbers


def _run(plan: ForwardPlan, outputs: tuple[Any, Any], *args: Any) -> None:
    q, k, v, lengths, cu_seqlens, sinks, *_ = args
    if lengths is not None:
        arguments.check_index_values("flash_attention", "lengths", lengths, k.shape[2] + 1)
    if cu_seqlens is not None:
        arguments.check_index_values("flash_attention", "cu_seqlens", cu_seqlens, q.shape[2] + 1, boundaries=True)
    run_forward(plan, *outputs, q, k, v, lengths, cu_seqlens, None, sinks)


def _gradients(call: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    """-> the gradients of q, k, v, lengths and cu_seqlens (there are none) and sinks."""
    dq, dk, dv, dsinks = attention_backward(
        do, *call.saved, *call.kept, call.causal, call.scale, call.window, call.softcap, call.gluon
    )
    *_, sinks = call.wanted
    return dq, dk, dv, None, None, None if sinks is None else dsinks


_attention = Op(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? cu_seqlens, Tensor? sinks, "
    "bool causal, float? scale, SymInt? window, float? softcap, bool gluon, bool record) -> (Tensor o, Tensor lse)",
    check=_check,
    outputs=_outputs,
    plan=_plan,
    run=_run,
    saves=("q", "k", "v", "o", "lse", "sinks"),
    keeps=("lengths", "cu_seqlens"),
    autocast=("q", "k", "v"),
    kind=_kind,
    backward=_gradients,
)
