"""The public functions in the order of a call: observed or not, plan, new memory, launch; then the gradients the same way."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode
from kernelbook.launch import (
    NAMESPACE,
    Descriptor,
    Launch,
    are_tensors,
    cdiv,
    composite,
    form,
    is_aligned,
    launcher,
    observed,
    operator,
    sources,
    wants_gradient,
)
from kernelbook.memory import accumulator, counters, empty, tl_accumulator
from kernelbook.plans import KeptPlans, derived
from kernelbook.tensors import allows_tf32, has_aligned_rows, written

try:  # Gluon is experimental: where Triton has changed it, the plain kernels do the work
    from triton.experimental.gluon.language import NVMMASharedLayout

    from kernelbook.attention import kernels_hopper

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

__all__ = ["append_to_pages", "flash_attention", "paged_attention"]

MAX_D = 256
MAX_PAGE = 256
LOG2_E = math.log2(math.e)
# Kernels take the scale in base 2, in float32. What is smaller is zero.
MAX_SCALE, MIN_SCALE = torch.finfo(torch.float32).max / LOG2_E, torch.finfo(torch.float32).tiny


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    lengths: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(scale q k^T) v`` without the score matrix; differentiable in q, k and v, bitwise reproducible.

    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), sections 2 and 3; up to
    16 queries: Dao et al., "Flash-Decoding for long-context inference" (2023), merged in the same launch.
    Softmax and sums are computed in float32 (float64 for float64 inputs), whatever the dtype of ``q``.

    Args:
        q: (B, H, N, D), float16, bfloat16, float32 or float64, any strides, D from 1 to 256.
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

    Returns:
        (B, H, N, D) in the dtype of ``q`` and, where that is dense, with its strides; under autocast in its dtype, as
        PyTorch's own. A query that sees no key gets zeros, and gives none of its gradient on. float32 products use tf32
        where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, ``causal`` is not a bool, ``scale`` not
            a number, or ``window`` not an integer.
        ValueError: a shape, a device, ``scale``, ``window`` or an entry of ``lengths`` is not as above.
    """
    if is_dynamo_compiling() and are_tensors(q, k, v, lengths):
        return _flash_whole(q, k, v, causal, scale, lengths, window, SOURCES)  # type: ignore[no-any-return]
    if observed(q, k, v, lengths):
        return _flash_by_operators(q, k, v, causal, scale, lengths, window)
    if torch._C._is_any_autocast_enabled():
        q, k, v = arguments.in_autocast_dtype(q, k, v)
    if wants_gradient(q, k, v):
        return _Attention.apply(q, k, v, causal, scale, lengths, window)  # type: ignore[no-any-return]
    plan = _flash_plan(q, k, v, causal, scale, lengths, window, with_lse=False)
    return _forward(plan, q, k, v, lengths, None)[0]


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """Attention of up to 16 new queries a sequence, to keys and values in pages; no gradients.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).

    Args:
        q: (B, H, N, D), float16, bfloat16, float32 or float64, N from 0 to 16, D from 1 to 256: the last N positions of
            each sequence, causal among them.
        k_pages, v_pages: (P, H_kv, page, D), the dtype of ``q``, any strides (fast where rows are contiguous); H_kv divides
            H, and a page has 16 to 256 slots, a multiple of 16.
        block_table: (B, n) int64 or int32: key ``j`` of sequence ``b`` lies in slot ``j % page`` of page
            ``block_table[b, j // page]``. Sequences may share pages. A page that is not in [0, P) is not there; under
            ``KERNELBOOK_DEBUG=1`` one that a key lies on is an error, but for -1.
        lengths: (B,) int64 or int32: how many keys each sequence has, the new ones among them. What is not in
            [0, n * page] is an error on the CPU and under ``KERNELBOOK_DEBUG=1``; on a GPU without it, it is clamped.
        scale: what scores are multiplied by; ``None``: 1 / sqrt(D).

    Returns:
        (B, H, N, D) like ``q``. Slots beyond a sequence's length are never read, and neither are keys on a page that is not
        there. A query that sees no key gets zeros. Nothing waits for the device, and a captured CUDA graph follows what
        ``lengths`` and ``block_table`` hold when it is replayed.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, or ``scale`` is not a number.
        ValueError: a shape, a device or ``scale`` is not as above, or, where they are checked, an entry of ``lengths`` or
            ``block_table``.
    """
    if is_dynamo_compiling() and are_tensors(q, k_pages, v_pages, block_table, lengths):
        return _paged_whole(q, k_pages, v_pages, block_table, lengths, scale, SOURCES)  # type: ignore[no-any-return]
    if observed(q, k_pages, v_pages, block_table, lengths) or wants_gradient(q, k_pages, v_pages):
        return _paged_by_operator(q, k_pages, v_pages, block_table, lengths, scale)
    if torch._C._is_any_autocast_enabled():
        q, k_pages, v_pages = arguments.in_autocast_dtype(q, k_pages, v_pages)
    return _paged(q, k_pages, v_pages, block_table, lengths, scale)


def append_to_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor
) -> None:
    """Writes new keys and values into their pages, in place, from position ``lengths[b]`` of each sequence on.

    Args:
        k, v: (B, H_kv, N, D), the dtype of the pages, any strides.
        k_pages, v_pages, block_table: as for :func:`paged_attention`.
        lengths: (B,) int64 or int32: how many keys each sequence has so far; it is not changed. One below 0 is an error on
            the CPU and under ``KERNELBOOK_DEBUG=1``; on a GPU without it, positions below 0 are not written.

    What has no room in ``block_table``, or belongs on a page that is not in [0, P), is not written. Two sequences must not
    write to one page: that page has to be copied first. Nothing waits for the device.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape or a device is not as above, or, where they are checked, an entry of ``lengths`` or
            ``block_table``.
    """
    if observed(k, v, k_pages, v_pages, block_table, lengths) or wants_gradient(k, v, k_pages, v_pages):
        _check_append(k, v, k_pages, v_pages, block_table, lengths)
        _append_operator(k, v, k_pages, v_pages, block_table, lengths)
    else:
        _append(k, v, k_pages, v_pages, block_table, lengths)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_tensors(op: str, **tensors: Tensor) -> None:
    for name, value in tensors.items():
        arguments.check_tensor(op, name, value)
        if value.ndim != 4:
            raise ValueError(f"{op}: {name} must have four dimensions, got shape {tuple(value.shape)}")
    arguments.check_same_dtype(op, **tensors)
    arguments.check_same_device(op, **tensors)
    name, first = next(iter(tensors.items()))
    if not 1 <= first.shape[3] <= MAX_D:
        raise ValueError(f"{op}: {name} must have 1 to {MAX_D} features a head, got shape {tuple(first.shape)}")


def _check_heads(op: str, names: str, h: int, h_kv: int) -> None:
    if h % h_kv if h_kv else h:
        raise ValueError(f"{op}: the heads of {names} must divide those of q ({h}), got {h_kv}")


def _plain_arguments(op: str, causal: Any, scale: Any, window: Any) -> tuple[bool, float | None, int | None]:
    """What is no tensor, in Python's own types, as a plan's key holds it."""
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be a bool, got {type(causal).__name__}")
    scale = scale if scale is None else arguments.number(op, "scale", scale, "a number or None")
    return causal, scale, window if window is None else arguments.integer(op, "window", window, "an int or None")


def _checked_scale(op: str, scale: Any, d: int) -> float:
    found: float = 1 / math.sqrt(d) if scale is None else scale
    if not -MAX_SCALE <= found <= MAX_SCALE:
        raise ValueError(f"{op}: scale must be finite and not above {MAX_SCALE:.3g} in size, got {found!r}")
    return found


def _check_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Any, lengths: Any, window: Any
) -> tuple[float, int | None]:
    """-> the scale and the window: None where it holds all keys, since kernels add to it in 32 bits."""
    op = "flash_attention"
    _check_tensors(op, q=q, k=k, v=v)
    b, h, _, d = q.shape
    arguments.check_shape(op, "k", k, (b, *k.shape[1:3], d))
    arguments.check_shape(op, "v", v, (b, *k.shape[1:3], d))
    _check_heads(op, "k and v", h, k.shape[1])
    causal, scale, window = _plain_arguments(op, causal, scale, window)
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
    return _checked_scale(op, scale, d), window


def _check_pages(op: str, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any, name: str, new: Any) -> None:
    """``new``: queries or keys (B, any, any, D), called ``name``."""
    arguments.check_shape(op, "k_pages", k_pages, (*k_pages.shape[:3], new.shape[3]))
    arguments.check_shape(op, "v_pages", v_pages, k_pages.shape)
    page = k_pages.shape[2]
    if page % 16 or not 16 <= page <= MAX_PAGE:
        raise ValueError(f"{op}: k_pages must have 16 to {MAX_PAGE} slots a page, a multiple of 16, got {page}")
    arguments.check_tensor(op, "block_table", block_table, dtypes=(torch.int64, torch.int32))
    if block_table.ndim != 2 or block_table.shape[0] != new.shape[0]:
        raise ValueError(f"{op}: block_table must have shape ({new.shape[0]}, n), got {tuple(block_table.shape)}")
    arguments.check_indices(op, "lengths", lengths)
    arguments.check_shape(op, "lengths", lengths, new.shape[:1])
    arguments.check_same_device(op, **{name: new}, block_table=block_table, lengths=lengths)


def _check_paged(q: Any, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any, scale: Any) -> float:
    """-> the scale."""
    op = "paged_attention"
    _check_tensors(op, q=q, k_pages=k_pages, v_pages=v_pages)
    if q.shape[2] > kernels_decode.MAX_QUERIES:
        raise ValueError(f"{op}: q must have at most {kernels_decode.MAX_QUERIES} queries, got shape {tuple(q.shape)}")
    _check_pages(op, k_pages, v_pages, block_table, lengths, "q", q)
    _check_heads(op, "k_pages and v_pages", q.shape[1], k_pages.shape[1])
    return _checked_scale(op, _plain_arguments(op, True, scale, None)[1], q.shape[3])


def _check_append(k: Any, v: Any, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any) -> None:
    op = "append_to_pages"
    _check_tensors(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    arguments.check_shape(op, "v", v, k.shape)
    arguments.check_shape(op, "k_pages", k_pages, (k_pages.shape[0], k.shape[1], *k_pages.shape[2:]))
    _check_pages(op, k_pages, v_pages, block_table, lengths, "k", k)


# --- forward --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is decided for a kind of forward pass, to keys that lie together or in pages."""

    scale: float
    window: int | None
    room: int  # keys that a sequence may have
    debug: bool
    readable: bool  # kernels can read the tensors as they lie
    scaling: "_Scaling"
    lse_shape: torch.Size | None
    sums_dtype: torch.dtype  # of lse, and of what splits leave
    split: "_SplitKeys | None"  # few queries
    tiles: "_Tiles | None"  # many; neither: there is nothing to see


_plans = KeptPlans[_Plan]()


def _flash_plan(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: Tensor | None, window: int | None,
    with_lse: bool,
) -> _Plan:  # fmt: skip
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    if type(causal) is not bool or type(scale) not in (NoneType, float) or type(window) not in (NoneType, int):
        causal, scale, window = _plain_arguments("flash_attention", causal, scale, window)
    aligned, tf32 = is_aligned(q, k, v), _takes_tf32(q)
    debug = lengths is not None and runtime.debug_enabled()
    tensors = form(q), form(k), form(v), form(lengths)
    key = tensors, aligned, causal, scale, window, with_lse, tf32, debug, HAS_GLUON, runtime.compile_target
    plan = _plans.get(key)
    if plan is None:
        scale, window = _check_flash(q, k, v, causal, scale, lengths, window)
        split, tiles = None, None
        if q.numel() and k.numel() and q.shape[2] <= kernels_decode.MAX_QUERIES:
            split = _split_keys(q, k, causal, lengths is not None, window, None, with_lse, tf32)
        elif q.numel() and k.numel():
            tiles = _forward_tiles(_problem((q, k, v), (q,), k, causal, lengths is not None, window, tf32))
        plan = _Plan(
            scale, window, k.shape[2], debug, aligned and all(map(_is_in_pieces, (q, k, v))), _scaling(q.dtype, scale),
            q.shape[:3] if with_lse or tiles else None, accumulator(q.dtype), split, tiles,
        )  # fmt: skip
        _plans.keep(key, plan)
    return plan


def _forward(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, table: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """-> o like q, and lse (B, H, N) in base 2 where it is wanted. With a ``table`` k and v are pages."""
    if lengths is not None:
        op = "flash_attention" if table is None else "paged_attention"
        arguments.check_index_values(op, "lengths", lengths, plan.room + 1)
        if table is not None and plan.debug:
            _check_table(op, table, torch.zeros_like(lengths), lengths, k)
    o = _like(q)
    lse = None if plan.lse_shape is None else empty(plan.lse_shape, plan.sums_dtype, q)
    if plan.split is None and plan.tiles is None:
        return o.zero_(), None if lse is None else lse.fill_(math.inf)
    if not plan.readable:
        q, k, v = _readable(q), k if table is not None else _readable(k), v if table is not None else _readable(v)
    q = plan.scaling.of_queries(q)
    if plan.split is not None:
        split, partial, counted = plan.split, o, o
        if split.partial_shape is not None:
            partial = empty(split.partial_shape, plan.sums_dtype, q)
            counted = counters(split.grid[0], q.device)
        split.launch(
            split.grid, q, *q.stride(), k, *k.stride(), v, *v.stride(), o, *o.stride(), o if lse is None else lse,
            *_strided_or(lengths, 1, o), *_strided_or(table, 2, o), partial, counted, *split.sizes, plan.scaling.scores,
        )  # fmt: skip
    elif plan.tiles is not None:
        tiles = plan.tiles
        tiles.launch(
            tiles.grid, *tiles.queries.of(q), *tiles.keys.of(k), *tiles.keys.of(v), *tiles.results.of(o), lse,
            *tiles.sizes, *tiles.seen(lengths, lse), plan.scaling.scores,
        )  # fmt: skip
    return o, lse


# --- tensors as kernels take them -----------------------------------------------------------------------------------


def _like(tensor: Tensor) -> Tensor:
    """New memory in the tensor's shape and, where it is dense, its strides."""
    return empty(tensor.shape, tensor.dtype, tensor) if tensor.is_contiguous() else torch.empty_like(tensor)


def _is_in_pieces(tensor: Tensor) -> bool:
    """Whether all rows begin on multiples of 16 elements, one after the other."""
    b, h, n, within = tensor.stride()
    return within == 1 and not (b | h | n) % 16 and min(b, h, n) > 0


def _readable(tensor: Tensor) -> Tensor:
    """The tensor with rows in aligned pieces of 16 elements; one that lies otherwise is copied.

    That costs far less than reading it element by element for each tile.
    """
    if _is_in_pieces(tensor) and is_aligned(tensor):
        return tensor
    d = tensor.shape[3]
    copy = tensor.new_empty(*tensor.shape[:3], cdiv(d, 16) * 16)[..., :d]
    return copy.copy_(tensor)


def _fit_descriptors(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can read the tensors: contiguous rows, everything on a multiple of 16 bytes."""
    return all(
        has_aligned_rows(t) and max(t.stride()) * t.element_size() < 2**40  # a descriptor has no room for more
        for t in tensors
    )


def _strided_or(tensor: Tensor | None, dims: int, stand_in: Tensor) -> tuple[Any, ...]:
    """A tensor and its strides; where it is missing another one, which the kernel does not touch.

    For ``None`` Triton would compile a kernel of its own, with the same instructions, for which nothing is recorded.
    """
    return (stand_in, *(0,) * dims) if tensor is None else (tensor, *tensor.stride())


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Scaling:
    """What scores and gradients are multiplied by.

    Kernels find the largest score before they scale, so they are given a scale above zero; and they take it in float32, so
    that for float64 it goes into the queries.
    """

    queries: float  # beforehand
    scores: float  # in base 2
    gradients: float
    dq: float  # afterwards
    dk: float

    def of_queries(self, q: Tensor) -> Tensor:
        return q if self.queries == 1 else q * self.queries


def _scaling(dtype: torch.dtype, scale: float) -> _Scaling:
    if dtype == torch.float64:
        return _Scaling(scale * LOG2_E, 1.0, 1.0, scale, 1 / LOG2_E)
    if scale * LOG2_E >= MIN_SCALE:
        return _Scaling(1.0, scale * LOG2_E, scale, 1.0, 1.0)
    sign, size = (-1.0, -scale) if -scale * LOG2_E >= MIN_SCALE else (0.0, 1.0)
    return _Scaling(sign, size * LOG2_E, size, sign, 1.0)


def _takes_tf32(q: Tensor | None) -> bool:
    """PyTorch's switch, which decides for float32 only."""
    return q is not None and q.dtype == torch.float32 and allows_tf32()


def _precision(dtype: torch.dtype, tf32: bool, properties: runtime.DeviceProperties) -> str:
    """How float32 is multiplied. Three tf32 products have float32's error on tensor cores; not every vendor has them."""
    if dtype != torch.float32 or properties.arch.startswith("gfx"):
        return "ieee"
    return "tf32" if tf32 else "tf32x3"


# --- few queries: the keys are split over programs ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _SplitKeys:
    """The kernel for few queries."""

    launch: Launch
    grid: tuple[int, int]
    partial_shape: tuple[int] | None  # of what the programs of a tile leave for the last to merge; None: there is one
    sizes: tuple[int, ...]


def _split_keys(
    q: Tensor, k: Tensor, causal: bool, lengths: bool, window: int | None, table: Tensor | None, with_lse: bool, tf32: bool
) -> _SplitKeys:  # fmt: skip
    (b, h, n, d), (pages, h_kv, s, _), properties = q.shape, k.shape, runtime.properties(q.device)
    page = 0
    if table is not None:
        page, s = s, s * table.shape[1]
    launch, plan = _decode_launch(
        b, h, h_kv, n, cdiv(s, 64), d, q.dtype, causal and n > 1, lengths, window is not None, page, with_lse,
        _precision(q.dtype, tf32, properties), properties,
    )  # fmt: skip
    partial_shape = (plan.programs * plan.rows * (d + 1),) if plan.splits > 1 else None
    return _SplitKeys(launch, (plan.tiles, plan.splits), partial_shape, (h, n, s, pages, window or 0))


@derived
def _decode_launch(
    b: int, h: int, h_kv: int, n: int, blocks: int, d: int, dtype: torch.dtype, causal: bool, lengths: bool, window: bool,
    page: int, with_lse: bool, precision: str, properties: runtime.DeviceProperties,
) -> tuple[Launch, kernels_decode.Plan]:  # fmt: skip
    """For room for 64 keys a block, so that a cache that grows by a key a call takes its choices from the last call."""
    group = h // h_kv
    plan = kernels_decode.plan(b * h_kv, group * n, 64 * blocks, d, dtype.itemsize, properties, page)
    return launcher(
        kernels_decode._flash_attention_decode_kernel, D=d, GROUP=group, CAUSAL=causal, LENGTHS=lengths, WINDOW=window,
        PAGE=page, LSE=with_lse, ACC=tl_accumulator(dtype), PRECISION=precision, **plan.config.kwargs,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    ), plan  # fmt: skip


# --- many queries: tiles of scores ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Rows:
    """How a kernel is given rows: by pointer and strides, or by tensor descriptor, in blocks."""

    block_shape: tuple[int, ...] | None = None
    layout: Any = None  # of the blocks in shared memory, for Gluon's kernels, which take no strides

    def of(self, tensor: Tensor) -> tuple[Any, ...]:
        """The tensor as the kernel's arguments."""
        if self.block_shape is None:
            return (tensor, *tensor.stride())
        if self.layout is None:
            return Descriptor(tensor, self.block_shape), 0, 0, 0, 0
        return (Descriptor(tensor, self.block_shape, self.layout),)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Tiles:
    """A kernel of which each program owns a tile, and how it is given tensors."""

    launch: Launch
    grid: tuple[int]
    queries: _Rows
    keys: _Rows
    results: _Rows
    vectors: _Rows | None  # lse and delta; None: by pointer
    sizes: tuple[int, ...]
    window: int | None  # 0: none; None: the kernel takes neither lengths nor a window

    def seen(self, lengths: Tensor | None, stand_in: Any) -> tuple[Any, ...]:
        """Lengths and window as the kernel's arguments."""
        return () if self.window is None else (*_strided_or(lengths, 1, stand_in), self.window)

    def vector(self, tensor: Tensor) -> Any:
        return tensor if self.vectors is None else self.vectors.of(tensor.view(-1))[0]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Problem:
    """What decides which kernels a call takes, and in which tiles."""

    b: int
    h: int
    h_kv: int
    n: int
    s: int
    d: int
    dtype: torch.dtype
    causal: bool
    lengths: bool
    window: int | None
    descriptors: bool  # can read the arguments
    results_fit: bool  # and write the results
    precision: str
    properties: runtime.DeviceProperties

    def hopper_config(self, kernel: str) -> Any:
        """The tiles of a kernel for Hopper GPUs; ``None`` where one that runs on every GPU is to be used."""
        if not (HAS_GLUON and self.descriptors and self.results_fit) or self.window is not None:
            return None
        return kernels_hopper.config(kernel, self.d, self.dtype.itemsize, self.s, self.causal, self.properties)


def _problem(
    read: tuple[Tensor, ...], results_like: tuple[Tensor, ...], k: Tensor, causal: bool, lengths: bool,
    window: int | None, tf32: bool,
) -> _Problem:  # fmt: skip
    """``read``: what kernels read, q first; ``results_like``: tensors that the results are like."""
    q, properties = read[0], runtime.properties(k.device)
    descriptors = kernels.has_descriptors(properties) and not lengths  # they would read what lies beyond a length
    b, h, n, d = q.shape
    return _Problem(
        b, h, k.shape[1], n, k.shape[2], d, q.dtype, causal, lengths, window,
        # What is copied fits.
        descriptors and _fit_descriptors(*(t for t in read if _is_in_pieces(t) and is_aligned(t))),
        descriptors and _fit_descriptors(*(torch.empty_like(t, device="meta") for t in results_like)),
        _precision(q.dtype, tf32, properties), properties,
    )  # fmt: skip


def _forward_tiles(p: _Problem) -> _Tiles:
    config = p.hopper_config("fwd")
    if config is None:
        return _plain_tiles("fwd", kernels._flash_attention_fwd_kernel, p, p.n, p.h, p.s)
    rows = config.kwargs["ROWS"] * config.kwargs["WARPGROUPS"]
    grid, in_pairs = kernels_hopper.forward_grid(cdiv(p.n, rows), p.b * p.h, p.d, p.causal, p.properties.num_sms)
    kernel = kernels_hopper._flash_attention_fwd_hopper_kernel
    return _hopper_tiles(kernel, config, p, grid, (_section(p, p.s, p.h), int(in_pairs)))


def _dkdv_tiles(p: _Problem) -> tuple[_Tiles, int, int]:
    """-> the kernel for dk and dv, to how many queries lse and delta are padded, and over how many programs the query heads
    of one key head are split: each has dk and dv of its own, which are added up afterwards.
    """
    config = p.hopper_config("dkdv")
    if config is None:
        return _plain_tiles("dkdv", kernels._flash_attention_bwd_dkdv_kernel, p, p.s, p.h_kv, p.n, p.n), p.n, 1
    splits = kernels_hopper.parts(p.b * p.h_kv, p.s, p.h // p.h_kv, p.d, p.properties.num_sms)
    n_padded, heads = cdiv(p.n, kernels_hopper.PADDING) * kernels_hopper.PADDING, p.h_kv * splits
    kernel, rows = kernels_hopper._flash_attention_bwd_dkdv_hopper_kernel, 2 * config.kwargs["ROWS"]
    if config.kwargs["BLOCK_D"] > 128:
        kernel, rows = kernels_hopper._flash_attention_bwd_dkdv_wide_hopper_kernel, config.kwargs["ROWS"]
    grid, sizes = cdiv(p.s, rows) * p.b * heads, (n_padded, _section(p, p.n, heads))
    return _hopper_tiles(kernel, config, p, grid, sizes, PARTS=splits), n_padded, splits


def _dq_tiles(p: _Problem, n_padded: int) -> _Tiles:
    config = p.hopper_config("dq")
    if config is None:
        return _plain_tiles("dq", kernels._flash_attention_bwd_dq_kernel, p, p.n, p.h, p.s, n_padded)
    grid, sizes = cdiv(p.n, 2 * config.kwargs["ROWS"]) * p.b * p.h, (n_padded, _section(p, p.s, p.h))
    return _hopper_tiles(kernels_hopper._flash_attention_bwd_dq_hopper_kernel, config, p, grid, sizes)


def _section(p: _Problem, walked: int, heads: int) -> int:
    return kernels.section(walked, p.b * heads, p.d, p.dtype.itemsize, p.causal, p.properties)


def _plain_tiles(name: str, kernel: Any, p: _Problem, rows: int, heads: int, walked: int, *n_padded: int) -> _Tiles:
    """A kernel that runs on every GPU: its programs own ``rows`` of ``heads`` and walk over ``walked`` others."""
    config = kernels.config(name, p.d, p.dtype.itemsize, p.descriptors, p.properties)
    block_m, block_n, width = (config.kwargs[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    launch = launcher(
        kernel, GROUP=p.h // p.h_kv, CAUSAL=p.causal, LENGTHS=p.lengths, WINDOW=p.window is not None, D=p.d,
        BOXES=p.descriptors, ACC=tl_accumulator(p.dtype), PRECISION=p.precision, **config.kwargs,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    queries, keys = (_Rows((1, 1, block, width) if p.descriptors else None) for block in (block_m, block_n))
    grid = cdiv(rows, block_n if name == "dkdv" else block_m) * p.b * heads
    sizes = p.b, p.h, p.n, p.s, *n_padded, _section(p, walked, heads)
    return _Tiles(launch, (grid,), queries, keys, _Rows(), None, sizes, p.window or 0)


def _hopper_tiles(kernel: Any, config: Any, p: _Problem, grid: int, sizes: tuple[int, ...], **constants: Any) -> _Tiles:
    """A kernel for Hopper GPUs: ``sizes`` are those that not all of them take."""
    blocks, width = config.kwargs, config.kwargs["BLOCK_D"]
    launch = launcher(kernel, GROUP=p.h // p.h_kv, CAUSAL=p.causal, **constants, **blocks, num_warps=config.num_warps)
    layout = NVMMASharedLayout(min(128, 2 * width), 16, rank=4)
    own = _Rows((1, 1, blocks["ROWS"], width), layout)
    if "BLOCK_M" in blocks:  # programs own keys
        walked = _Rows((1, 1, blocks["BLOCK_M"], width), layout)
        rows, vectors = (walked, own), _Rows((blocks["BLOCK_M"],), NVMMASharedLayout(0, 32, rank=1))
    else:
        rows, vectors = (own, _Rows((1, 1, blocks["BLOCK_N"], width), layout)), None
    return _Tiles(launch, (grid,), *rows, own, vectors, (p.b, p.h, p.n, p.s, *sizes), None)


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Within the context the kernels that run on every GPU are used on Hopper too, to compare the two."""
    global HAS_GLUON
    before, HAS_GLUON = HAS_GLUON, False
    try:
        yield
    finally:
        HAS_GLUON = before


# --- gradients ------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, lengths: Any, window: Any
    ) -> Tensor:
        plan = _flash_plan(q, k, v, causal, scale, lengths, window, with_lse=True)
        o, lse = _forward(plan, q, k, v, lengths, None)
        _keep(ctx, (q, k, v, causal, plan.scale, lengths, plan.window), (o, lse))
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, do)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, ctx.causal, ctx.scale, lengths, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, lengths)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, _lse: None = None) -> tuple[Tensor | None, ...]:
    """-> the gradients of all arguments."""
    if do is None:
        return (None,) * 7
    *saved, lengths = ctx.saved_tensors
    if torch.is_grad_enabled() or observed(do, *saved, lengths):
        found = _backward_operator(do, *saved, ctx.causal, ctx.scale, lengths, ctx.window)
    else:
        found = _backward(do, *saved, ctx.causal, ctx.scale, lengths, ctx.window)
    return *found, None, None, None, None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
    """What is decided for a kind of backward pass."""

    readable: bool  # kernels can read the tensors as they lie
    scaling: _Scaling
    launch_delta: Launch
    delta_grid: tuple[int]
    delta_shape: tuple[int, int, int]  # (B, H, N), N rounded up where kernels load whole blocks
    of_keys: _Tiles
    of_queries: _Tiles
    splits: int  # so many programs share the query heads of one key head
    partial_shape: tuple[int, ...]  # of their dk and dv


_backward_plans = KeptPlans[_BackwardPlan]()


def _backward_plan(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, causal: bool, scale: float, lengths: Tensor | None,
    window: int | None,
) -> _BackwardPlan:  # fmt: skip
    aligned, tf32 = is_aligned(do, q, k, v, o), _takes_tf32(q)
    tensors = form(do), form(q), form(k), form(v), form(o), form(lengths)
    key = tensors, aligned, causal, scale, window, tf32, HAS_GLUON, runtime.compile_target
    plan = _backward_plans.get(key)
    if plan is None:
        p = _problem((q, k, v, do), (q, k, v), k, causal, lengths is not None, window, tf32)
        (of_keys, n_padded, splits), config = _dkdv_tiles(p), kernels.DELTA_CONFIG
        launch_delta = launcher(
            kernels._flash_attention_bwd_delta_kernel, D=p.d, ACC=tl_accumulator(p.dtype),
            PADDED=of_keys.vectors is not None, BLOCK_D=kernels.block_d(p.d), **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        plan = _BackwardPlan(
            aligned and all(map(_is_in_pieces, (do, q, k, v, o))), _scaling(p.dtype, scale), launch_delta,
            (cdiv(n_padded, config.kwargs["BLOCK_M"]) * p.b * p.h,), (p.b, p.h, n_padded),
            of_keys, _dq_tiles(p, n_padded), splits, (p.b, p.h_kv * splits, p.s, p.d),
        )  # fmt: skip
        _backward_plans.keep(key, plan)
    return plan


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dq, dk, dv, like q, k, v."""
    dq, dk, dv = _like(q), _like(k), _like(v)
    if k.numel() == 0 or o.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    plan = _backward_plan(do, q, k, v, o, causal, scale, lengths, window)
    if not plan.readable:
        do, q, k, v, o = _readable(do), _readable(q), _readable(k), _readable(v), _readable(o)
    scaling, (_, h, n_padded), n = plan.scaling, plan.delta_shape, q.shape[2]
    q = scaling.of_queries(q)
    delta = empty(plan.delta_shape, lse.dtype, q)
    padded = lse if plan.of_keys.vectors is None else empty(plan.delta_shape, lse.dtype, q)
    plan.launch_delta(plan.delta_grid, o, *o.stride(), do, *do.stride(), lse, delta, padded, h, n, n_padded)
    sums = dk, dv
    if plan.splits > 1:
        sums = empty(plan.partial_shape, k.dtype, k), empty(plan.partial_shape, v.dtype, v)
    for tiles, results in ((plan.of_keys, sums), (plan.of_queries, (dq,))):
        tiles.launch(
            tiles.grid, *tiles.queries.of(q), *tiles.keys.of(k), *tiles.keys.of(v), *tiles.queries.of(do),
            tiles.vector(padded), tiles.vector(delta), *(part for result in results for part in tiles.results.of(result)),
            *tiles.sizes, *tiles.seen(lengths, padded), scaling.scores, scaling.gradients,
        )  # fmt: skip
    if plan.splits > 1:
        for result, partial in zip((dk, dv), sums, strict=True):
            torch.sum(partial.unflatten(1, (k.shape[1], plan.splits)), 2, out=result)
    if scaling.dq != 1:
        dq *= scaling.dq
    if scaling.dk != 1:
        dk *= scaling.dk
    return dq, dk, dv


# --- pages ----------------------------------------------------------------------------------------------------------


def _paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, scale: float | None
) -> Tensor:
    if type(scale) not in (NoneType, float):
        _, scale, _ = _plain_arguments("paged_attention", True, scale, None)
    aligned, tf32, debug = is_aligned(q), _takes_tf32(q), runtime.debug_enabled()
    tensors = form(q), form(k_pages), form(v_pages), form(block_table), form(lengths)
    key = tensors, aligned, scale, tf32, debug, runtime.compile_target
    plan = _plans.get(key)
    if plan is None:
        scale = _check_paged(q, k_pages, v_pages, block_table, lengths, scale)
        room, split = block_table.shape[1] * k_pages.shape[2], None
        if q.numel() and room and k_pages.shape[0]:
            split = _split_keys(q, k_pages, True, True, None, block_table, False, tf32)
        readable = aligned and _is_in_pieces(q)  # pages are read wherever they lie
        scaling, sums_dtype = _scaling(q.dtype, scale), accumulator(q.dtype)
        plan = _Plan(scale, None, room, debug, readable, scaling, None, sums_dtype, split, None)
        _plans.keep(key, plan)
    return _forward(plan, q, k_pages, v_pages, lengths, block_table)[0]


def _check_table(op: str, table: Tensor, first: Tensor, end: Tensor, k_pages: Tensor) -> None:
    """Raises unless the pages of positions ``[first, end)`` are in the pool, or -1; for ``KERNELBOOK_DEBUG=1``: it waits."""
    page = k_pages.shape[2]
    begins = torch.arange(0, table.shape[1] * page, page, device=table.device)
    pages = table[(begins < end[:, None]) & (begins + page > first[:, None])]
    arguments.check_index_values(op, "block_table", pages[pages != -1], k_pages.shape[0])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _AppendPlan:
    """What is decided for a kind of keys and values that are written into pages."""

    debug: bool
    launch: Launch | None  # None: there is nothing to write
    grid: tuple[int]
    sizes: tuple[int, ...]


_append_plans = KeptPlans[_AppendPlan]()


def _append_plan(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor
) -> _AppendPlan:
    tensors = form(k), form(v), form(k_pages), form(v_pages), form(block_table), form(lengths)
    key = tensors, runtime.debug_enabled(), runtime.compile_target
    plan = _append_plans.get(key)
    if plan is None:
        _check_append(k, v, k_pages, v_pages, block_table, lengths)
        (b, h_kv, n, d), (pages, _, page, _) = k.shape, k_pages.shape
        config, launch = kernels_decode.APPEND_CONFIG, None
        if k.numel() and block_table.numel() and pages:
            launch = launcher(
                kernels_decode._append_to_pages_kernel, PAGE=page, D=d, BLOCK_D=kernels.block_d(d), **config.kwargs,
                num_warps=config.num_warps,
            )  # fmt: skip
        grid = (b * cdiv(h_kv * n, config.kwargs["BLOCK_R"]),)
        plan = _AppendPlan(runtime.debug_enabled(), launch, grid, (h_kv, n, page * block_table.shape[1], pages))
        _append_plans.keep(key, plan)
    return plan


def _append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    plan = _append_plan(k, v, k_pages, v_pages, block_table, lengths)
    if plan.launch is None:
        return
    arguments.check_index_values("append_to_pages", "lengths", lengths, None)
    if plan.debug:
        _check_table("append_to_pages", block_table, lengths, lengths + k.shape[2], k_pages)
    plan.launch(
        plan.grid, k, *k.stride(), v, *v.stride(), k_pages, *k_pages.stride(), v_pages, *v_pages.stride(),
        block_table, *block_table.stride(), lengths, *lengths.stride(), *plan.sizes,
    )  # fmt: skip
    written(k_pages, v_pages)


# --- where somebody observes: operators -----------------------------------------------------------------------------


def _flash_by_operators(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: Tensor | None, window: int | None
) -> Tensor:
    q, k, v = arguments.in_autocast_dtype(q, k, v)
    scale, window = _check_flash(q, k, v, causal, scale, lengths, window)
    o: Tensor
    if wants_gradient(q, k, v):
        o, _ = _flash_operator(q, k, v, causal, scale, lengths, window)
    else:
        o = _inference_operator(q, k, v, causal, scale, lengths, window)
    return o


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor | None]:
    plan = _flash_plan(q, k, v, causal, scale, lengths, window, with_lse=True)
    return _forward(plan, q, k, v, lengths, None)


def _run_inference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Tensor | None, window: int | None
) -> Tensor:
    plan = _flash_plan(q, k, v, causal, scale, lengths, window, with_lse=False)
    return _forward(plan, q, k, v, lengths, None)[0]


def _keep_flash(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(output[1])


_flash_operator = operator(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window) "
    "-> (Tensor, Tensor)",
    outputs=lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))),
    run=_run_flash,
    setup_context=_keep_flash,
    backward=_gradients,
)

_inference_operator = operator(
    "flash_attention_inference(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window) "
    "-> Tensor",
    outputs=lambda q, *_: torch.empty_like(q),
    run=_run_inference,
)

_backward_operator = operator(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale, "
    "Tensor? lengths, int? window) -> (Tensor, Tensor, Tensor)",
    outputs=lambda do, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    run=_backward,
)


def _paged_by_operator(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, scale: float | None
) -> Tensor:
    q, k_pages, v_pages = arguments.in_autocast_dtype(q, k_pages, v_pages)
    scale = _check_paged(q, k_pages, v_pages, block_table, lengths, scale)
    return _paged_operator(q, k_pages, v_pages, block_table, lengths, scale)  # type: ignore[no-any-return]


_paged_operator = operator(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, float scale) -> Tensor",
    outputs=lambda q, *_: torch.empty_like(q),
    run=_paged,
)

# launch.operator() is for operators that return what they compute; this one writes into its arguments.
torch.library.define(
    f"{NAMESPACE}::append_to_pages",
    "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor lengths) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl(f"{NAMESPACE}::append_to_pages", "default", _append)
torch.library.register_fake(f"{NAMESPACE}::append_to_pages", lambda *_tensors: None)
_append_operator = torch.ops.kernelbook.append_to_pages.default

SOURCES = sources()
_flash_whole = composite(
    "flash_attention_whole(Tensor q, Tensor k, Tensor v, bool causal, float? scale, Tensor? lengths, SymInt? window) "
    "-> Tensor",
    _flash_by_operators,
)
_paged_whole = composite(
    "paged_attention_whole(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, float? scale) "
    "-> Tensor",
    _paged_by_operator,
)
