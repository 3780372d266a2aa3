"""The public functions, their operators, and the launches."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode
from kernelbook.launching import Launch, accumulator, box_form, cdiv, has_aligned_rows, strided, tl_accumulator
from kernelbook.plans import derived

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


def _settings() -> tuple[bool, ...]:
    """What decides what a call launches beside its arguments."""
    return HAS_GLUON, *launching.settings()


@launching.repeated(_settings)
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    lengths: torch.Tensor | None = None, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
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
    q, k, v = arguments.in_autocast_dtype(q, k, v)
    scale, window = _check_flash(q, k, v, causal, scale, lengths, window)
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return cast(torch.Tensor, (_flash if wanted else _inference)(q, k, v, causal, scale, lengths, window))


@launching.repeated(_settings)
def paged_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, *,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
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
    q, k_pages, v_pages = arguments.in_autocast_dtype(q, k_pages, v_pages)
    scale = _check_paged(q, k_pages, v_pages, block_table, lengths, scale)
    return cast(torch.Tensor, _paged(q, k_pages, v_pages, block_table, lengths, scale))


@launching.repeated(_settings)
def append_to_pages(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:  # fmt: skip
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
    _check_append(k, v, k_pages, v_pages, block_table, lengths)
    if runtime.INTERPRET and k.dtype == torch.bfloat16:  # whose loads are not to be trusted there; bits are moved
        k, v, k_pages, v_pages = (t.view(torch.int16) for t in (k, v, k_pages, v_pages))
    append = _run_append if launching.is_recorded() else torch.ops.kernelbook.append_to_pages
    append(k, v, k_pages, v_pages, block_table, lengths)


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


def _checked_scale(op: str, scale: Any, d: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d)
    found = arguments.number(op, "scale", scale, "a number or None")
    if not -MAX_SCALE <= found <= MAX_SCALE:
        raise ValueError(f"{op}: scale must be finite and not above {MAX_SCALE:.3g} in size, got {found!r}")
    return found


@arguments.once
def _check_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Any, scale: Any, lengths: Any, window: Any
) -> tuple[float, int | None]:
    """-> the scale and the window: None where it holds all keys, since kernels add to it in 32 bits."""
    op = "flash_attention"
    _check_tensors(op, q=q, k=k, v=v)
    b, h, _, d = q.shape
    arguments.check_shape(op, "k", k, (b, *k.shape[1:3], d))
    arguments.check_shape(op, "v", v, (b, *k.shape[1:3], d))
    _check_heads(op, "k and v", h, k.shape[1])
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be a bool, got {type(causal).__name__}")
    if lengths is not None:
        arguments.check_indices(op, "lengths", lengths)
        arguments.check_shape(op, "lengths", lengths, (b,))
        arguments.check_same_device(op, q=q, lengths=lengths)
    if window is not None:
        window = arguments.integer(op, "window", window, "an int or None")
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


@arguments.once
def _check_paged(q: Any, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any, scale: Any) -> float:
    """-> the scale."""
    op = "paged_attention"
    _check_tensors(op, q=q, k_pages=k_pages, v_pages=v_pages)
    if q.shape[2] > kernels_decode.MAX_QUERIES:
        raise ValueError(f"{op}: q must have at most {kernels_decode.MAX_QUERIES} queries, got shape {tuple(q.shape)}")
    _check_pages(op, k_pages, v_pages, block_table, lengths, "q", q)
    _check_heads(op, "k_pages and v_pages", q.shape[1], k_pages.shape[1])
    return _checked_scale(op, scale, q.shape[3])


@arguments.once
def _check_append(k: Any, v: Any, k_pages: Any, v_pages: Any, block_table: Any, lengths: Any) -> None:
    op = "append_to_pages"
    _check_tensors(op, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    arguments.check_shape(op, "v", v, k.shape)
    arguments.check_shape(op, "k_pages", k_pages, (k_pages.shape[0], k.shape[1], *k_pages.shape[2:]))
    _check_pages(op, k_pages, v_pages, block_table, lengths, "k", k)


# --- tensors as kernels take them -----------------------------------------------------------------------------------


def _launchable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with rows in pieces of 16 elements; one that lies otherwise is copied.

    That costs far less than reading it element by element for each tile.
    """
    b, h, n, within = tensor.stride()
    if within == 1 and not (b | h | n) % 16 and min(b, h, n) > 0 and not tensor.data_ptr() % 16:
        return tensor
    d = tensor.shape[3]
    copy = tensor.new_empty(*tensor.shape[:3], cdiv(d, 16) * 16)[..., :d]
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


def _strided(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor, *tensor.stride())


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Within the context the kernels that run on every GPU are used on Hopper too, to compare the two."""
    global HAS_GLUON
    before, HAS_GLUON = HAS_GLUON, False
    try:
        yield
    finally:
        HAS_GLUON = before


# --- plans: which kernel, in which tiles ----------------------------------------------------------------------------


# One for all plans that differ in nothing that is compiled.
_launch = functools.cache(Launch)


class _Plan(NamedTuple):
    """A launch, how many rows a program of it owns, and tensors as it takes them: rows of queries, of keys, results, vectors.

    ``parts``: so many programs share the query heads of one key head; each has dk and dv of its own.
    """

    launch: Launch
    owned: int
    queries: Callable[[torch.Tensor], tuple[Any, ...]]
    keys: Callable[[torch.Tensor], tuple[Any, ...]]
    results: Callable[[torch.Tensor], tuple[Any, ...]]
    vectors: Callable[[torch.Tensor], Any]
    hopper: bool
    parts: int = 1


@derived
def _plan(
    kernel: str, d: int, group: int, dtype: torch.dtype, causal: bool, lengths: bool, window: bool, s: int,
    boxes: bool, boxed_results: bool, gluon: bool, precision: str, properties: runtime.DeviceProperties, parts: int = 1,
) -> _Plan:  # fmt: skip
    """``boxes``: descriptors can read the arguments; ``boxed_results``: and write the results. ``parts``: see _Plan."""
    name, config = f"_flash_attention_{kernel if kernel == 'fwd' else f'bwd_{kernel}'}", None
    kind: dict[str, Any] = {"GROUP": group, "CAUSAL": causal}
    boxes = boxes and not lengths  # boxes would hold what lies beyond a length
    if gluon and boxes and boxed_results and not window:
        config = kernels_hopper.config(kernel, d, dtype.itemsize, s, causal, properties)
    if config is not None:
        blocks = config.kwargs
        walked = "BLOCK_M" if kernel == "dkdv" else "BLOCK_N"
        wide = kernel == "dkdv" and blocks["BLOCK_D"] > 128
        function = getattr(kernels_hopper, f"{name}{'_wide' if wide else ''}_hopper_kernel")
        divided = {"PARTS": parts} if kernel == "dkdv" else {}
        launch = _launch(function, **kind, **divided, **blocks, num_warps=config.num_warps)
        forms = [
            box_form(
                1, 1, rows, blocks["BLOCK_D"], layout=NVMMASharedLayout(min(128, 2 * blocks["BLOCK_D"]), 16, rank=4)
            )
            for rows in (blocks["ROWS"], blocks[walked])
        ]
        own, others = (lambda t, form=form: (form(t),) for form in forms)
        owned = blocks["ROWS"] * blocks.get("WARPGROUPS", 1 if wide else 2)
        if kernel != "dkdv":
            return _Plan(launch, owned, own, others, own, lambda t: t, True)
        vector = box_form(blocks["BLOCK_M"], layout=NVMMASharedLayout(0, 32, rank=1))
        return _Plan(launch, owned, others, own, own, lambda t: vector(t.view(-1)), True, parts)
    config = kernels.config(kernel, d, dtype.itemsize, boxes, properties)
    launch = _launch(
        getattr(kernels, f"{name}_kernel"), **kind, LENGTHS=lengths, WINDOW=window, D=d, BOXES=boxes, ACC=tl_accumulator(dtype), PRECISION=precision, **config.kwargs,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    block_m, block_n, block_d = (config.kwargs[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    queries, keys = _strided, _strided
    if boxes:
        forms = [box_form(1, 1, rows, block_d) for rows in (block_m, block_n)]
        queries, keys = (lambda t, form=form: (form(t), 0, 0, 0, 0) for form in forms)
    return _Plan(launch, block_n if kernel == "dkdv" else block_m, queries, keys, _strided, lambda t: t, False)


# --- forward --------------------------------------------------------------------------------------------------------


def _outputs(q: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """-> o like q, and lse (B, H, N) in base 2."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _run(
    results: tuple[torch.Tensor, torch.Tensor | None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    causal: bool, scale: float, lengths: torch.Tensor | None, window: int | None,
) -> None:  # fmt: skip
    o, lse = results
    if lengths is not None:
        arguments.check_index_values("flash_attention", "lengths", lengths, k.shape[2] + 1)
    if k.numel() == 0 or o.numel() == 0:
        o.zero_(), None if lse is None else lse.fill_(math.inf)
        return
    q, k, v = _launchable(q), _launchable(k), _launchable(v)
    q, scale2, _, _, _ = _scaled(q, scale)
    if q.shape[2] <= kernels_decode.MAX_QUERIES:
        _decode(q, k, v, o, lse, causal, scale2, lengths, window, None)
        return
    (b, h, n, d), s, properties = q.shape, k.shape[2], runtime.properties(q.device)
    plan = _plan(
        "fwd", d, h // k.shape[1], q.dtype, causal, lengths is not None, window is not None, s, _in_boxes(q, k, v),
        _in_boxes(o), HAS_GLUON, _precision(q.dtype, properties), properties,
    )  # fmt: skip
    grid: tuple[int, ...] = (cdiv(n, plan.owned) * b * h,)
    paired: tuple[int, ...] = ()
    if plan.hopper:
        programs, pairs = kernels_hopper.forward_grid(cdiv(n, plan.owned), b * h, d, causal, properties.num_sms)
        grid, paired = (programs,), (int(pairs),)
    lse = launching.empty(q.shape[:3], accumulator(q.dtype), q) if lse is None else lse
    section = kernels.section(s, b * h, d, q.element_size(), causal, properties)
    plan.launch(
        grid,
        *plan.queries(q), *plan.keys(k), *plan.keys(v), *plan.results(o), lse, b, h, n, s, section, *paired,
        *(() if plan.hopper else (*strided(lengths, 1, lse), window or 0)), scale2,
    )  # fmt: skip


# --- backward -------------------------------------------------------------------------------------------------------


def _gradients(do: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _run_backward(
    results: tuple[torch.Tensor, ...], do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, lengths: torch.Tensor | None, window: int | None,
) -> None:  # fmt: skip
    dq, dk, dv = results
    if k.numel() == 0 or o.numel() == 0:
        dq.zero_(), dk.zero_(), dv.zero_()
        return
    do, q, k, v, o = (_launchable(t) for t in (do, q, k, v, o))
    q, scale2, scale, dq_factor, dk_factor = _scaled(q, scale)
    (b, h, n, d), h_kv, s = q.shape, k.shape[1], k.shape[2]
    itemsize, properties = q.element_size(), runtime.properties(q.device)
    kind = (
        d, h // h_kv, q.dtype, causal, lengths is not None, window is not None, s, _in_boxes(q, k, v, do),
        _in_boxes(dq, dk, dv), HAS_GLUON, _precision(q.dtype, properties), properties,
    )  # fmt: skip
    wanted = kernels_hopper.parts(b * h_kv, s, h // h_kv, d, properties.num_sms) if HAS_GLUON else 1
    of_keys, of_queries = _plan("dkdv", *kind, wanted), _plan("dq", *kind)
    parts = of_keys.parts
    lse, delta = _delta(o, do, lse, kernels_hopper.PADDING if of_keys.hopper else 1)
    seen = (*strided(lengths, 1, lse), window or 0)
    of_parts = (dk, dv) if parts == 1 else tuple(k.new_empty(b, h_kv * parts, s, d) for _ in range(2))
    for plan, rows, heads, walked, found in (
        (of_keys, s, h_kv * parts, n, of_parts), (of_queries, n, h, s, (dq,)),
    ):  # fmt: skip
        section = kernels.section(walked, b * heads, d, itemsize, causal, properties)
        plan.launch(
            (cdiv(rows, plan.owned) * b * heads,),
            *plan.queries(q), *plan.keys(k), *plan.keys(v), *plan.queries(do), plan.vectors(lse), plan.vectors(delta),
            *(part for result in found for part in plan.results(result)), b, h, n, s, lse.shape[2], section,
            *(() if plan.hopper else seen), scale2, scale,
        )  # fmt: skip
    if parts > 1:
        for result, shares in zip((dk, dv), of_parts, strict=True):
            torch.sum(shares.unflatten(1, (h_kv, parts)), 2, out=result)
    if dq_factor != 1:
        dq *= dq_factor
    if dk_factor != 1:
        dk *= dk_factor


def _delta(o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> lse and rowsum(o * do), both (B, H, N rounded up to a multiple)."""
    b, h, n, d = o.shape
    n_padded = cdiv(n, multiple) * multiple
    delta = lse.new_empty(b, h, n_padded)
    padded, config = torch.empty_like(delta) if multiple > 1 else lse, kernels.DELTA_CONFIG
    launch = _launch(
        kernels._flash_attention_bwd_delta_kernel, D=d, ACC=tl_accumulator(lse.dtype), PADDED=multiple > 1,
        BLOCK_D=kernels.block_d(d), **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    grid = (cdiv(n_padded, config.kwargs["BLOCK_M"]) * b * h,)
    launch(grid, *_strided(o), *_strided(do), lse, delta, padded, h, n, n_padded)
    return padded, delta


_backward = launching.operator(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale, "
    "Tensor? lengths, int? window) -> (Tensor, Tensor, Tensor)",
    outputs=_gradients,
    run=_run_backward,
    repeated=_settings,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, ctx.causal, ctx.scale, lengths, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, lengths)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, do: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if do is None:
        return (None,) * 7
    *saved, lengths = ctx.saved_tensors
    return *_backward(do, *saved, ctx.causal, ctx.scale, lengths, ctx.window), None, None, None, None


_flash = launching.operator(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window) "
    "-> (Tensor, Tensor)",
    outputs=_outputs,
    run=_run,
    setup_context=_setup_context,
    backward=_autograd,
    saved=1,
    repeated=_settings,
)

_inference = launching.operator(
    "flash_attention_inference(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window) "
    "-> Tensor",
    outputs=lambda q, *_others: torch.empty_like(q),
    run=lambda o, *args: _run((o, None), *args),
)


# --- few queries ----------------------------------------------------------------------------------------------------


@derived
def _decode_plan(
    b: int, h: int, h_kv: int, n: int, blocks: int, d: int, dtype: torch.dtype, causal: bool, lengths: bool, window: bool,
    page: int, with_lse: bool, precision: str, properties: runtime.DeviceProperties,
) -> tuple[Launch, kernels_decode.Plan]:  # fmt: skip
    """For room for ``blocks`` x 64 keys: each new token would need a plan of its own if it were for an exact number."""
    group = h // h_kv
    plan = kernels_decode.plan(b * h_kv, group * n, 64 * blocks, d, dtype.itemsize, properties, page)
    return _launch(
        kernels_decode._flash_attention_decode_kernel, D=d, GROUP=group, CAUSAL=causal, LENGTHS=lengths, WINDOW=window, PAGE=page, LSE=with_lse,
        ACC=tl_accumulator(dtype), PRECISION=precision, **plan.config.kwargs,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    ), plan  # fmt: skip


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor | None,
    causal: bool, scale2: float, lengths: torch.Tensor | None, window: int | None, table: torch.Tensor | None,
) -> None:  # fmt: skip
    (b, h, n, d), (pages, h_kv, s, _), properties = q.shape, k.shape, runtime.properties(q.device)
    page = 0
    if table is not None:
        page, s = s, s * table.shape[1]
    launch, plan = _decode_plan(
        b, h, h_kv, n, cdiv(s, 64), d, q.dtype, causal and n > 1, lengths is not None, window is not None, page,
        lse is not None, _precision(q.dtype, properties), properties,
    )  # fmt: skip
    partial, tickets = o, o
    if plan.splits > 1:
        partial = launching.empty((plan.programs * plan.rows * (d + 1),), accumulator(q.dtype), q)
        tickets = launching.tickets(plan.tiles, q.device)
    launch(
        (plan.tiles, plan.splits),
        *_strided(q), *_strided(k), *_strided(v), *_strided(o), o if lse is None else lse, *strided(lengths, 1, o),
        *strided(table, 2, o), partial, tickets, h, n, s, pages, window or 0, scale2,
    )  # fmt: skip


def _check_table(op: str, table: torch.Tensor, first: torch.Tensor, end: torch.Tensor, k_pages: torch.Tensor) -> None:
    """Raises unless the pages of positions ``[first, end)`` are in the pool, or -1; for ``KERNELBOOK_DEBUG=1``: it waits."""
    page = k_pages.shape[2]
    begins = torch.arange(0, table.shape[1] * page, page, device=table.device)
    pages = table[(begins < end[:, None]) & (begins + page > first[:, None])]
    arguments.check_index_values(op, "block_table", pages[pages != -1], k_pages.shape[0])


def _run_paged(
    o: torch.Tensor, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor,
    lengths: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    room = block_table.shape[1] * k_pages.shape[2]
    arguments.check_index_values("paged_attention", "lengths", lengths, room + 1)
    if runtime.debug_enabled():
        _check_table("paged_attention", block_table, torch.zeros_like(lengths), lengths, k_pages)
    if o.numel() == 0 or room == 0 or k_pages.shape[0] == 0:
        o.zero_()
        return
    q, scale2, _, _, _ = _scaled(_launchable(q), scale)
    _decode(q, k_pages, v_pages, o, None, True, scale2, lengths, None, block_table)


_paged = launching.operator(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, float scale) -> Tensor",
    outputs=lambda q, *_others: torch.empty_like(q),
    run=_run_paged,
)


def _run_append(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:  # fmt: skip
    b, h_kv, n, d = k.shape
    pages, _, page, _ = k_pages.shape
    if k.numel() == 0 or block_table.numel() == 0 or pages == 0:
        return
    arguments.check_index_values("append_to_pages", "lengths", lengths, None)
    if runtime.debug_enabled():
        _check_table("append_to_pages", block_table, lengths, lengths + n, k_pages)
    config = kernels_decode.APPEND_CONFIG
    launch = _launch(
        kernels_decode._append_to_pages_kernel, PAGE=page, D=d, BLOCK_D=kernels.block_d(d), **config.kwargs,
        num_warps=config.num_warps,
    )  # fmt: skip
    launch(
        (b * cdiv(h_kv * n, config.kwargs["BLOCK_R"]),),
        *_strided(k), *_strided(v), *_strided(k_pages), *_strided(v_pages), *_strided(block_table), *_strided(lengths),
        h_kv, n, page * block_table.shape[1], pages,
    )  # fmt: skip
    launching.written(k_pages, v_pages)


# launching.operator() is for operators that return what they compute; this one writes into its arguments.
torch.library.define(
    f"{launching.NAMESPACE}::append_to_pages",
    "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor lengths) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl(f"{launching.NAMESPACE}::append_to_pages", "default", _run_append)
torch.library.register_fake(f"{launching.NAMESPACE}::append_to_pages", lambda *_tensors: None)
