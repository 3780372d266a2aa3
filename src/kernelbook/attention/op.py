"""The public function, its custom operators, and the launches."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode
from kernelbook.launching import accumulator, box, cdiv, has_aligned_rows, tl_accumulator

# isort: split
import triton

try:  # Gluon is experimental: where Triton has changed it, the plain kernels do the work
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    from kernelbook.attention import kernels_hopper

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

__all__ = ["append_to_pages", "flash_attention", "paged_attention"]

MAX_D = 256
MAX_PAGE = 256
TICKETS = 2**18  # counters for calls in captured graphs
_tickets_of: dict[tuple[torch.device, int], torch.Tensor] = {}
LOG2_E = math.log2(math.e)
# Kernels take the scale in base 2, in float32. What is smaller is zero.
MAX_SCALE, MIN_SCALE = torch.finfo(torch.float32).max / LOG2_E, torch.finfo(torch.float32).tiny


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
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
        lengths: (B,) int64 or int32: so many keys of each sequence exist. The rest is never read (their gradient is zero),
            and with ``causal`` the last query stands at the last existing key. On a GPU what is not in [0, S] is clamped.
        window: with ``causal``, a query at position ``i`` sees the keys ``i - window < j <= i`` only; from 1 on.

    Returns:
        (B, H, N, D) in the dtype of ``q`` and, where that is dense, with its strides; under autocast in its dtype, as
        PyTorch's own. A query that sees no key gets zeros, and gives none of its gradient on. float32 products use tf32
        where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, ``causal`` is not a bool, ``scale`` not
            a number, or ``window`` not an integer.
        ValueError: a shape, a device, ``scale``, ``window`` or an entry of ``lengths`` is not as above.
    """
    op = "flash_attention"
    q, k, v = arguments.in_autocast_dtype(q, k, v)
    _check_tensors(op, q=q, k=k, v=v)
    b, h, _, d = q.shape
    h_kv, s = k.shape[1], k.shape[2]
    arguments.check_shape(op, "k", k, (b, h_kv, s, d))
    arguments.check_shape(op, "v", v, (b, h_kv, s, d))
    _check_heads(op, "k and v", h, h_kv)
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be a bool, got {type(causal).__name__}")
    scale = _checked_scale(op, scale, d)
    if lengths is not None:
        arguments.check_indices(op, "lengths", lengths)
        arguments.check_shape(op, "lengths", lengths, (b,))
        arguments.check_same_device(op, q=q, lengths=lengths)
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"{op}: window must be an int or None, got {type(window).__name__}")
        if window < 1 or not causal:
            raise ValueError(
                f"{op}: window must be at least 1 and come with causal=True, got {window} and {causal}; for other masks "
                f"there is torch.nn.attention.flex_attention (FlexAttention)"
            )
    o: torch.Tensor = _forward(q, k, v, causal, scale, lengths, window)[0]
    return o


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of up to 16 new queries a sequence, to keys and values in pages; no gradients.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).

    Args:
        q: (B, H, N, D), float16, bfloat16, float32 or float64, N from 0 to 16, D from 1 to 256: the last N positions of
            each sequence, causal among them.
        k_pages, v_pages: (P, H_kv, page, D), the dtype of ``q``, the last dimension contiguous; H_kv divides H, and a page
            has 16 to 256 slots, a multiple of 16.
        block_table: (B, n) int64 or int32: key ``j`` of sequence ``b`` lies in slot ``j % page`` of page
            ``block_table[b, j // page]``. Sequences may share pages.
        lengths: (B,) int64 or int32: how many keys each sequence has, the new ones among them; what is not in
            [0, n * page] is clamped.
        scale: what scores are multiplied by; ``None``: 1 / sqrt(D).

    Returns:
        (B, H, N, D) like ``q``. Slots beyond a sequence's length are never read, and keys on a page that is not in [0, P)
        count as not there. A query that sees no key gets zeros. Nothing waits for the device, and a captured CUDA graph
        follows what ``lengths`` and ``block_table`` hold when it is replayed.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, dtypes differ, or ``scale`` is not a number.
        ValueError: a shape, a stride, a device or ``scale`` is not as above; on the CPU also an entry out of range.
    """
    op = "paged_attention"
    q, k_pages, v_pages = arguments.in_autocast_dtype(q, k_pages, v_pages)
    _check_tensors(op, q=q, k_pages=k_pages, v_pages=v_pages)
    if q.shape[2] > kernels_decode.MAX_QUERIES:
        raise ValueError(f"{op}: q must have at most {kernels_decode.MAX_QUERIES} queries, got shape {tuple(q.shape)}")
    _check_pages(op, k_pages, v_pages, block_table, lengths, q)
    _check_heads(op, "k_pages and v_pages", q.shape[1], k_pages.shape[1])
    o: torch.Tensor = _paged(q, k_pages, v_pages, block_table, lengths, _checked_scale(op, scale, q.shape[3]))
    return o


def append_to_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Writes new keys and values into their pages, in place, from position ``lengths[b]`` of each sequence on.

    Args:
        k, v: (B, H_kv, N, D), the dtype of the pages, any strides.
        k_pages, v_pages, block_table: as for :func:`paged_attention`.
        lengths: (B,) int64 or int32: how many keys each sequence has so far; it is not changed.

    What has no room in ``block_table``, or belongs on a page that is not in [0, P), is not written. Two sequences must not
    write to one page: that page has to be copied first. Nothing waits for the device.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a stride or a device is not as above, or the pages want gradients.
    """
    op = "append_to_pages"
    _check_tensors(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    arguments.check_shape(op, "v", v, k.shape)
    _check_pages(op, k_pages, v_pages, block_table, lengths, k)
    arguments.check_shape(op, "k_pages", k_pages, (k_pages.shape[0], k.shape[1], *k_pages.shape[2:]))
    _append(k, v, k_pages, v_pages, block_table, lengths)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_tensors(op: str, **tensors: torch.Tensor) -> None:
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


def _checked_scale(op: str, scale: object, d: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{op}: scale must be a number or None, got {type(scale).__name__}")
    if not -MAX_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"{op}: scale must be finite and not above {MAX_SCALE:.3g} in size, got {scale!r}")
    return float(scale)


def _check_pages(
    op: str, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: object, lengths: object, new: torch.Tensor
) -> None:
    """``new``: queries or keys (B, any, any, D)."""
    arguments.check_shape(op, "k_pages", k_pages, (*k_pages.shape[:3], new.shape[3]))
    arguments.check_shape(op, "v_pages", v_pages, k_pages.shape)
    page = k_pages.shape[2]
    if page % 16 or not 16 <= page <= MAX_PAGE:
        raise ValueError(f"{op}: k_pages must have 16 to {MAX_PAGE} slots a page, a multiple of 16, got {page}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.numel() and not has_aligned_rows(pages):
            raise ValueError(
                f"{op}: {name} must have contiguous rows that begin on multiples of 16 bytes, got strides {pages.stride()}"
            )
    arguments.check_tensor(op, "block_table", block_table, dtypes=(torch.int64, torch.int32))
    arguments.check_indices(op, "lengths", lengths)
    assert isinstance(block_table, torch.Tensor) and isinstance(lengths, torch.Tensor)
    if block_table.ndim != 2 or block_table.shape[0] != new.shape[0]:
        raise ValueError(f"{op}: block_table must have shape ({new.shape[0]}, n), got {tuple(block_table.shape)}")
    arguments.check_shape(op, "lengths", lengths, (new.shape[0],))
    arguments.check_same_device(op, k_pages=k_pages, block_table=block_table, lengths=lengths)


# --- custom operators -----------------------------------------------------------------------------------------------


@torch.library.custom_op("kernelbook::flash_attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> o like q, lse (B, H, N) in base 2."""
    dtype = q.dtype
    if lengths is not None:
        arguments.check_index_values("flash_attention", "lengths", lengths, k.shape[2] + 1)
    o = torch.empty_like(q, dtype=runtime.kernel_dtype(dtype))
    lse = torch.empty(q.shape[:3], dtype=accumulator(dtype), device=q.device)
    if k.numel() == 0 or o.numel() == 0:
        return o.zero_().to(dtype), lse.fill_(math.inf)
    q, k, v = (_launchable(t) for t in (q, k, v))
    q, scale2, _, _, _ = _scaled(q, scale)
    _launch_forward(q, k, v, o, lse, causal, scale2, lengths, window)
    return o.to(dtype), lse


@_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[:3], dtype=accumulator(q.dtype), device=q.device)


@torch.library.custom_op("kernelbook::flash_attention_backward", mutates_args=())
def _backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq, dk, dv like q, k, v."""
    dtype = q.dtype
    dq, dk, dv = (torch.empty_like(t, dtype=runtime.kernel_dtype(dtype)) for t in (q, k, v))
    if k.numel() == 0 or o.numel() == 0:
        return dq.zero_().to(dtype), dk.zero_().to(dtype), dv.zero_().to(dtype)
    do, q, k, v, o = (_launchable(t) for t in (do, q, k, v, o))
    q, scale2, scale, dq_factor, dk_factor = _scaled(q, scale)
    _launch_backward(do, q, k, v, o, lse, dq, dk, dv, causal, scale2, scale, lengths, window)
    if dq_factor != 1:
        dq *= dq_factor
    if dk_factor != 1:
        dk *= dk_factor
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@_backward.register_fake
def _(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, ctx.causal, ctx.scale, lengths, ctx.window = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, lengths)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, do: torch.Tensor | None, _lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if do is None:
        return (None,) * 7
    *saved, lengths = ctx.saved_tensors
    return *_backward(do, *saved, ctx.causal, ctx.scale, lengths, ctx.window), None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


@torch.library.custom_op("kernelbook::paged_attention", mutates_args=())
def _paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    dtype = q.dtype
    room = block_table.shape[1] * k_pages.shape[2]
    arguments.check_index_values("paged_attention", "lengths", lengths, room + 1)
    o = torch.empty_like(q, dtype=runtime.kernel_dtype(dtype))
    if o.numel() == 0 or room == 0 or k_pages.shape[0] == 0:
        return o.zero_().to(dtype)
    lse = torch.empty(q.shape[:3], dtype=accumulator(dtype), device=q.device)
    q, k_pages, v_pages = (t.to(runtime.kernel_dtype(dtype)) for t in (q, k_pages, v_pages))
    q, scale2, _, _, _ = _scaled(q, scale)
    _launch_decode(q, k_pages, v_pages, o, lse, True, scale2, lengths, None, block_table)
    return o.to(dtype)


@_paged.register_fake
def _(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("kernelbook::append_to_pages", mutates_args=("k_pages", "v_pages"))
def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    b, h_kv, n, d = k.shape
    page = k_pages.shape[2]
    if k.numel() == 0 or block_table.numel() == 0 or k_pages.shape[0] == 0:
        return
    config = kernels_decode.APPEND_CONFIG
    grid = (b * cdiv(h_kv * n, config.kwargs["BLOCK_R"]),)
    with runtime.on_device_of(k):
        kernels_decode._append_to_pages_kernel[grid](
            k, *k.stride(),
            v, *v.stride(),
            k_pages, *k_pages.stride(),
            v_pages, *v_pages.stride(),
            block_table, *block_table.stride(),
            lengths, *lengths.stride(),
            h_kv, n, page * block_table.shape[1], k_pages.shape[0],
            PAGE=page, D=d, BLOCK_D=kernels.block_d(d), **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip


# --- launches -------------------------------------------------------------------------------------------------------


def _launchable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take it: float32 instead of bfloat16 in the interpreter, and rows in pieces of 16 elements.

    A tensor that lies otherwise is copied. That costs far less than reading it element by element for each tile.
    """
    tensor = tensor.to(runtime.kernel_dtype(tensor.dtype))
    steps = tensor.stride()[:3]
    if tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps):
        return tensor
    d = tensor.shape[3]
    copy = torch.empty(*tensor.shape[:3], cdiv(d, 16) * 16, dtype=tensor.dtype, device=tensor.device)[..., :d]
    return copy.copy_(tensor)


def _scaled(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float, float, float, float]:
    """-> q, the scale of the scores in base 2, that of the gradients, and what dq and dk are multiplied by afterwards.

    Kernels find the largest score before they scale, so they are given a scale above zero; and they take it in float32,
    so that for float64 it goes into ``q``.
    """
    if q.dtype == torch.float64:
        return q * (scale * LOG2_E), 1.0, 1.0, scale, 1 / LOG2_E
    if scale * LOG2_E >= MIN_SCALE:
        return q, scale * LOG2_E, scale, 1.0, 1.0
    sign, size = (-1.0, -scale) if -scale * LOG2_E >= MIN_SCALE else (0.0, 1.0)
    return q * sign, size * LOG2_E, size, sign, 1.0


def _precision(dtype: torch.dtype, properties: runtime.DeviceProperties) -> str:
    """How float32 is multiplied. Three tf32 products have float32's error on tensor cores; not every vendor has them."""
    if dtype != torch.float32 or properties.arch.startswith("gfx"):
        return "ieee"
    return "tf32" if launching.allows_tf32() else "tf32x3"


def _in_boxes(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can read the tensors: contiguous rows, everything on a multiple of 16 bytes."""
    if not kernels.has_boxes(runtime.properties(tensors[0].device)):
        return False
    return all(
        has_aligned_rows(t) and max(t.stride()) * t.element_size() < 2**40  # a descriptor has no room for more
        for t in tensors
    )


def _argument(tensor: torch.Tensor, boxes: bool, rows: int, block_d: int) -> tuple[Any, ...]:
    """A tensor as the kernels take it: with its strides, or as a descriptor of ``rows`` x ``block_d`` boxes."""
    if not boxes:
        return tensor, *tensor.stride()
    return box(tensor, 1, 1, rows, block_d), 0, 0, 0, 0


def _constants(q: torch.Tensor, k: torch.Tensor, causal: bool, boxes: bool, config: triton.Config) -> dict[str, Any]:
    return {
        "D": q.shape[3], "GROUP": q.shape[1] // k.shape[1], "CAUSAL": causal, "BOXES": boxes,
        "ACC": tl_accumulator(q.dtype), "PRECISION": _precision(q.dtype, runtime.properties(q.device)), **config.kwargs,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Within the context the kernels that run on every GPU are used on Hopper too, to compare the two."""
    global HAS_GLUON
    before, HAS_GLUON = HAS_GLUON, False
    try:
        yield
    finally:
        HAS_GLUON = before


def _gluon_argument(tensor: torch.Tensor, rows: int, block_d: int) -> Any:
    layout = NVMMASharedLayout(min(128, 2 * block_d), 16, rank=4)
    return GluonDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, block_d], layout)


def _launch_forward_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale2: float,
    config: triton.Config,
) -> None:
    b, h, n, d = q.shape
    s = k.shape[2]
    rows, block_n, block_d = (config.kwargs[name] for name in ("ROWS", "BLOCK_N", "BLOCK_D"))
    blocks, properties = cdiv(n, rows * config.kwargs["WARPGROUPS"]), runtime.properties(q.device)
    programs, paired = kernels_hopper.forward_grid(blocks, b * h, block_d, causal, properties.num_sms)
    kernels_hopper._flash_attention_fwd_hopper_kernel[(programs,)](
        _gluon_argument(q, rows, block_d),
        _gluon_argument(k, block_n, block_d),
        _gluon_argument(v, block_n, block_d),
        _gluon_argument(o, rows, block_d),
        lse,
        b, h, n, s, kernels.section(s, d, q.element_size(), causal, properties), int(paired),
        scale2,
        GROUP=h // k.shape[1], CAUSAL=causal, **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip


@functools.cache
def _spare_tickets(device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(TICKETS, dtype=torch.int32, device=device)]


def _tickets(device: torch.device, count: int) -> torch.Tensor:
    """``count`` counters that are zero, as every kernel leaves them, and that no other stream uses.

    A captured graph may run beside anything else, so each call in it gets counters of its own. They come from memory that
    was zeroed before; where that is used up, zeroing them becomes part of the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if not capturing and key in _tickets_of and _tickets_of[key].numel() >= count:
        return _tickets_of[key]
    if capturing and not _spare_tickets.cache_info().currsize:
        return torch.zeros(count, dtype=torch.int32, device=device)
    spare = _spare_tickets(device)
    if capturing:
        if spare[0].numel() < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        found, spare[0] = spare[0][:count], spare[0][count:]
        return found
    _tickets_of[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
    return _tickets_of[key]


def _launch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale2: float,
    lengths: torch.Tensor | None = None,
    window: int | None = None,
    table: torch.Tensor | None = None,
) -> None:
    b, h, n, d = q.shape
    h_kv, page = k.shape[1], 0 if table is None else k.shape[2]
    group, s = h // h_kv, k.shape[2] if table is None else page * table.shape[1]
    properties = runtime.properties(q.device)
    plan = kernels_decode.plan(b * h_kv, group * n, s, d, q.element_size(), properties, page)
    partial, tickets = lse, lse
    if plan.splits > 1:
        partial = torch.empty(plan.programs * plan.rows * (d + 1), dtype=lse.dtype, device=q.device)
        tickets = _tickets(q.device, plan.tiles)
    config = plan.config
    with runtime.on_device_of(q):
        kernels_decode._flash_attention_decode_kernel[(plan.programs,)](
            q, *q.stride(),
            k, *k.stride(),
            v, *v.stride(),
            o, *o.stride(),
            lse,
            *launching.strided(lengths, 1, lse),
            *launching.strided(table, 2, lse),
            partial, tickets,
            h, n, s, k.shape[0], plan.splits, window or 0,
            scale2,
            D=d, GROUP=group, CAUSAL=causal and n > 1, LENGTHS=lengths is not None, WINDOW=window is not None, PAGE=page,
            ACC=tl_accumulator(q.dtype), PRECISION=_precision(q.dtype, properties),
            **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale2: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> None:
    b, h, n, d = q.shape
    s = k.shape[2]
    properties = runtime.properties(q.device)
    if n <= kernels_decode.MAX_QUERIES:
        return _launch_decode(q, k, v, o, lse, causal, scale2, lengths, window)
    special = lengths is not None or window is not None
    boxes = lengths is None and _in_boxes(q, k, v)  # boxes would read what lies beyond a length
    if HAS_GLUON and boxes and not special and _in_boxes(o):
        hopper = kernels_hopper.forward_config(d, q.element_size(), s, causal, properties)
        if hopper is not None:
            with runtime.on_device_of(q):
                _launch_forward_hopper(q, k, v, o, lse, causal, scale2, hopper)
            return
    config = kernels.config("fwd", d, q.element_size(), boxes, properties)
    block_m, block_n, block_d = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    with runtime.on_device_of(q):
        kernels._flash_attention_fwd_kernel[(cdiv(n, block_m) * b * h,)](
            *_argument(q, boxes, block_m, block_d),
            *_argument(k, boxes, block_n, block_d),
            *_argument(v, boxes, block_n, block_d),
            o, *o.stride(),
            lse,
            b, h, n, s, kernels.section(s, d, q.element_size(), causal, properties),
            *launching.strided(lengths, 1, lse), window or 0, scale2,
            LENGTHS=lengths is not None, WINDOW=window is not None, **_constants(q, k, causal, boxes, config),
        )  # fmt: skip


def _launch_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    causal: bool,
    scale2: float,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> None:
    hopper = None
    if HAS_GLUON and lengths is None and window is None and _in_boxes(q, k, v, do, dq, dk, dv):
        hopper = kernels_hopper.backward_config(q.shape[3], q.element_size(), runtime.properties(q.device))
    with runtime.on_device_of(q):
        if hopper is not None:
            lse, delta = _launch_delta(o, do, lse, kernels_hopper.PADDING)
            _launch_dkdv_hopper(q, k, v, do, lse, delta, dk, dv, causal, scale2, scale, hopper[0])
        else:
            lse, delta = _launch_delta(o, do, lse)
            _launch_dkdv(q, k, v, do, lse, delta, dk, dv, causal, scale2, scale, lengths, window)
        if hopper is not None and hopper[1] is not None:
            _launch_dq_hopper(q, k, v, do, lse, delta, dq, causal, scale2, scale, hopper[1])
        else:
            _launch_dq(q, k, v, do, lse, delta, dq, causal, scale2, scale, lengths, window)


def _launch_delta(
    o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> lse and rowsum(o * do), both (B, H, N rounded up to a multiple)."""
    b, h, n, d = o.shape
    n_padded = cdiv(n, multiple) * multiple
    delta = torch.empty(b, h, n_padded, dtype=lse.dtype, device=lse.device)
    padded = torch.empty_like(delta) if multiple > 1 else lse
    config = kernels.DELTA_CONFIG
    kernels._flash_attention_bwd_delta_kernel[(cdiv(n_padded, config.kwargs["BLOCK_M"]) * b * h,)](
        o, *o.stride(),
        do, *do.stride(),
        lse,
        delta,
        padded,
        h, n, n_padded,
        d, tl_accumulator(delta.dtype), multiple > 1, **config.kwargs, BLOCK_D=kernels.block_d(d),
        num_warps=config.num_warps,
    )  # fmt: skip
    return padded, delta


def _launch_dkdv_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    causal: bool,
    scale2: float,
    scale: float,
    config: triton.Config,
) -> None:
    b, h, n, d = q.shape
    h_kv, s = k.shape[1], k.shape[2]
    rows, block_m, block_d = (config.kwargs[name] for name in ("ROWS", "BLOCK_M", "BLOCK_D"))
    vector = NVMMASharedLayout(0, 32, rank=1)
    kernels_hopper._flash_attention_bwd_dkdv_hopper_kernel[(cdiv(s, 2 * rows) * b * h_kv,)](
        _gluon_argument(q, block_m, block_d),
        _gluon_argument(k, rows, block_d),
        _gluon_argument(v, rows, block_d),
        _gluon_argument(do, block_m, block_d),
        _gluon_argument(dk, rows, block_d),
        _gluon_argument(dv, rows, block_d),
        GluonDescriptor(lse, [lse.numel()], [1], [block_m], vector),
        GluonDescriptor(delta, [delta.numel()], [1], [block_m], vector),
        b, h, n, s, lse.shape[2],
        kernels.section(n * (h // h_kv), d, q.element_size(), causal, runtime.properties(q.device)),
        scale2, scale,
        GROUP=h // h_kv, CAUSAL=causal, **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip


def _launch_dq_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    causal: bool,
    scale2: float,
    scale: float,
    config: triton.Config,
) -> None:
    b, h, n, d = q.shape
    s = k.shape[2]
    rows, block_n, block_d = (config.kwargs[name] for name in ("ROWS", "BLOCK_N", "BLOCK_D"))
    kernels_hopper._flash_attention_bwd_dq_hopper_kernel[(cdiv(n, 2 * rows) * b * h,)](
        _gluon_argument(q, rows, block_d),
        _gluon_argument(k, block_n, block_d),
        _gluon_argument(v, block_n, block_d),
        _gluon_argument(do, rows, block_d),
        _gluon_argument(dq, rows, block_d),
        lse, delta,
        b, h, n, s, lse.shape[2], kernels.section(s, d, q.element_size(), causal, runtime.properties(q.device)),
        scale2, scale,
        GROUP=h // k.shape[1], CAUSAL=causal, **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip


def _launch_dkdv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    causal: bool,
    scale2: float,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> None:
    b, h, n, d = q.shape
    h_kv, s = k.shape[1], k.shape[2]
    properties = runtime.properties(q.device)
    boxes = lengths is None and _in_boxes(q, k, v, do)
    config = kernels.config("dkdv", d, q.element_size(), boxes, properties)
    block_m, block_n, block_d = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    kernels._flash_attention_bwd_dkdv_kernel[(cdiv(s, block_n) * b * h_kv,)](
        *_argument(q, boxes, block_m, block_d),
        *_argument(k, boxes, block_n, block_d),
        *_argument(v, boxes, block_n, block_d),
        *_argument(do, boxes, block_m, block_d),
        lse, delta,
        dk, *dk.stride(),
        dv, *dv.stride(),
        b, h, n, s, lse.shape[2], kernels.section(n * (h // h_kv), d, q.element_size(), causal, properties),
        *launching.strided(lengths, 1, lse), window or 0, scale2, scale,
        LENGTHS=lengths is not None, WINDOW=window is not None, **_constants(q, k, causal, boxes, config),
    )  # fmt: skip


def _launch_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    causal: bool,
    scale2: float,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> None:
    b, h, n, d = q.shape
    s = k.shape[2]
    properties = runtime.properties(q.device)
    boxes = lengths is None and _in_boxes(q, k, v, do)
    config = kernels.config("dq", d, q.element_size(), boxes, properties)
    block_m, block_n, block_d = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    kernels._flash_attention_bwd_dq_kernel[(cdiv(n, block_m) * b * h,)](
        *_argument(q, boxes, block_m, block_d),
        *_argument(k, boxes, block_n, block_d),
        *_argument(v, boxes, block_n, block_d),
        *_argument(do, boxes, block_m, block_d),
        lse, delta,
        dq, *dq.stride(),
        b, h, n, s, lse.shape[2], kernels.section(s, d, q.element_size(), causal, properties),
        *launching.strided(lengths, 1, lse), window or 0, scale2, scale,
        LENGTHS=lengths is not None, WINDOW=window is not None, **_constants(q, k, causal, boxes, config),
    )  # fmt: skip
