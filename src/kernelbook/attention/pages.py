"""Keys and values in pages: attention of a few new queries, and writing what is new. Public functions, then the operators."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode, launches
from kernelbook.attention.op import ForwardPlan, check_scores, check_tensors, forward_plan, numbers, run_forward
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.operators import Op

__all__ = ["append_to_pages", "paged_attention"]

MAX_PAGE = 256


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, *, scale: float | None = None,
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
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
        sinks, softcap: as for :func:`flash_attention`.

    Returns:
        (B, H, N, D) like ``q``. Slots beyond a sequence's length are never read, and neither are keys on a page that is not
        there. A query that sees no key gets zeros. Nothing waits for the device, and a captured CUDA graph follows what
        ``lengths`` and ``block_table`` hold when it is replayed.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, or ``scale`` or ``softcap`` is not a
            number.
        ValueError: a shape, a device, ``scale`` or ``softcap`` is not as above, or, where they are checked, an entry of ``lengths`` or
            ``block_table``.
    """
    scale, softcap = numbers("paged_attention", scale, softcap)
    o: Tensor = _paged(q, k_pages, v_pages, block_table, lengths, sinks, scale, softcap)
    return o


def append_to_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor
) -> None:
    """Writes new keys and values into their pages, in place, from position ``lengths[b]`` of each sequence on; no gradients.

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
    _append(k, v, k_pages, v_pages, block_table, lengths)


# --- checks ---------------------------------------------------------------------------------------------------------


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


def _check_paged(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any, sinks: Any, scale: Any, softcap: Any
) -> None:
    op = "paged_attention"
    check_tensors(op, q=q, k_pages=k_pages, v_pages=v_pages)
    if q.shape[2] > kernels_decode.MAX_QUERIES:
        raise ValueError(f"{op}: q must have at most {kernels_decode.MAX_QUERIES} queries, got shape {tuple(q.shape)}")
    _check_pages(op, k_pages, v_pages, block_table, lengths, "q", q)
    check_scores(op, q, "k_pages and v_pages", k_pages.shape[1], sinks, scale, softcap)


def _check_append(k: Any, v: Any, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any) -> None:
    op = "append_to_pages"
    check_tensors(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    arguments.check_shape(op, "v", v, k.shape)
    arguments.check_shape(op, "k_pages", k_pages, (k_pages.shape[0], k.shape[1], *k_pages.shape[2:]))
    _check_pages(op, k_pages, v_pages, block_table, lengths, "k", k)


def _check_table(op: str, table: Tensor, first: Tensor, end: Tensor, k_pages: Tensor) -> None:
    """Raise unless the pages of positions ``[first, end)`` are in the pool, or -1; for ``KERNELBOOK_DEBUG=1``: it waits."""
    page = k_pages.shape[2]
    begins = torch.arange(0, table.shape[1] * page, page, device=table.device)
    pages = table[(begins < end[:, None]) & (begins + page > first[:, None])]
    arguments.check_index_values(op, "block_table", pages[pages != -1], k_pages.shape[0])


# --- attention ------------------------------------------------------------------------------------------------------


def _plan_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, sinks: Any, scale: Any, softcap: Any
) -> ForwardPlan | None:  # fmt: skip
    if not (q.numel() and k_pages.numel() and block_table.numel()):
        return None
    p = launches.problem(q, k_pages, lengths, sinks, True, None, softcap, block_table)
    return forward_plan(p, scale, False, q)


def _run_paged(plan: ForwardPlan, outputs: tuple[Any], *args: Any) -> None:
    q, k_pages, v_pages, block_table, lengths, sinks, *_ = args
    room = block_table.shape[1] * k_pages.shape[2]
    arguments.check_index_values("paged_attention", "lengths", lengths, room + 1)
    if runtime.debug_enabled():
        _check_table("paged_attention", block_table, torch.zeros_like(lengths), lengths, k_pages)
    run_forward(plan, *outputs, None, q, k_pages, v_pages, lengths, None, block_table, sinks)


_paged = Op(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, Tensor? sinks, "
    "float? scale, float? softcap) -> Tensor o",
    check=_check_paged,
    outputs=lambda q, *_: (launches.like(q),),
    plan=_plan_paged,
    run=_run_paged,
    autocast=("q", "k_pages", "v_pages"),
)

# --- writing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AppendPlan:
    launch: Launch
    grid: tuple[int]
    sizes: tuple[int, ...]


def _plan_append(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor
) -> AppendPlan | None:
    (b, h_kv, n, d), (pages, _, page, _), config = k.shape, k_pages.shape, kernels_decode.APPEND_CONFIG
    if not (k.numel() and block_table.numel() and pages):  # nothing to write, or nowhere
        return None
    launch = launcher(
        kernels_decode._append_to_pages_kernel, PAGE=page, D=d, BLOCK_D=kernels.block_d(d), **config.kwargs,
        num_warps=config.num_warps,
    )  # fmt: skip
    grid = (b * cdiv(h_kv * n, config.kwargs["BLOCK_R"]),)
    return AppendPlan(launch, grid, (h_kv, n, page * block_table.shape[1], pages))


def _run_append(plan: AppendPlan, _: Any, *args: Tensor) -> None:
    k, v, k_pages, v_pages, block_table, lengths = args
    arguments.check_index_values("append_to_pages", "lengths", lengths, None)
    if runtime.debug_enabled():
        _check_table("append_to_pages", block_table, lengths, lengths + k.shape[2], k_pages)
    plan.launch(
        plan.grid, *(launches.kernel_arg(None, t) for t in (k, v, k_pages, v_pages)), block_table, *block_table.stride(), lengths, *lengths.stride(), *plan.sizes,
    )  # fmt: skip


_append = Op(
    "append_to_pages(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor lengths) -> ()",
    check=_check_append,
    outputs=lambda *_: (),
    plan=_plan_append,
    run=_run_append,
    results=0,
)
