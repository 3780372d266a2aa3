"""The public functions, their operators, and the launches."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.attention import kernels, kernels_decode
from kernelbook.autotune import derived
from kernelbook.launching import Launch, accumulator, box_form, cdiv, has_aligned_rows, tl_accumulator

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
    q, k, v = arguments.in_autocast_dtype(q, k, v)
    scale = _check_flash(q, k, v, causal, scale, lengths, window)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o: torch.Tensor = _flash(q, k, v, causal, scale, lengths, window)[0]
    else:
        o = _inference(q, k, v, causal, scale, lengths, window)
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
        k_pages, v_pages: (P, H_kv, page, D), the dtype of ``q``, any strides (fast where rows are contiguous); H_kv divides
            H, and a page has 16 to 256 slots, a multiple of 16.
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
        ValueError: a shape, a device or ``scale`` is not as above; on the CPU also an entry out of range.
    """
    q, k_pages, v_pages = arguments.in_autocast_dtype(q, k_pages, v_pages)
    scale = _check_paged(q, k_pages, v_pages, block_table, lengths, scale)
    o: torch.Tensor = _paged(q, k_pages, v_pages, block_table, lengths, scale)
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
        ValueError: a shape or a device is not as above.
    """
    _check_append(k, v, k_pages, v_pages, block_table, lengths)
    tensors: tuple[torch.Tensor, ...] = (k, v, k_pages, v_pages)
    if runtime.INTERPRET and k.dtype == torch.bfloat16:  # whose loads are not to be trusted there; bits are moved
        tensors = tuple(t.view(torch.int16) for t in tensors)
    _append(*tensors, block_table, lengths)


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
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{op}: scale must be a number or None, got {type(scale).__name__}")
    if not -MAX_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"{op}: scale must be finite and not above {MAX_SCALE:.3g} in size, got {scale!r}")
    return float(scale)


@arguments.once
def _check_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Any, scale: Any, lengths: Any, window: Any
) -> float:
    """-> the scale."""
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
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"{op}: window must be an int or None, got {type(window).__name__}")
        if window < 1 or not causal:
            raise ValueError(
                f"{op}: window must be at least 1 and come with causal=True, got {window} and causal={causal}; for other "
                f"masks there is FlexAttention (torch.nn.attention.flex_attention)"
            )
    return _checked_scale(op, scale, d)


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


def _arguments(form: Any, *tensors: torch.Tensor) -> list[Any]:
    """Tensors as the plain kernels take them: with their strides, or as boxes of this form."""
    found: list[Any] = []
    for tensor in tensors:
        found += (tensor, *tensor.stride()) if form is None else (form(tensor), 0, 0, 0, 0)
    return found


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


@functools.cache
def _launch(kernel: str, **constants: Any) -> Launch:
    """The launches of all plans that differ in nothing that is compiled."""
    return Launch(
        getattr(kernels_hopper if "hopper" in kernel else kernels, f"_flash_attention_{kernel}_kernel"), **constants
    )


@derived
def _plain(
    kernel: str, d: int, group: int, dtype: torch.dtype, causal: bool, boxes: bool, lengths: bool, window: bool,
    precision: str, properties: runtime.DeviceProperties,
) -> tuple[Launch, int, int, Any, Any]:  # fmt: skip
    """-> the launch of a kernel for every GPU, its BLOCK_M and BLOCK_N, and the boxes of tensors in such blocks."""
    config = kernels.config(kernel, d, dtype.itemsize, boxes, properties)
    block_m, block_n, block_d = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    launch = _launch(
        kernel if kernel == "fwd" else f"bwd_{kernel}", LENGTHS=lengths, WINDOW=window, D=d, GROUP=group, CAUSAL=causal,
        BOXES=boxes, ACC=tl_accumulator(dtype), PRECISION=precision, **config.kwargs,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    forms = [box_form(1, 1, rows, block_d) if boxes else None for rows in (block_m, block_n)]
    return launch, block_m, block_n, *forms


def _hopper_form(rows: int, block_d: int) -> Any:
    return box_form(1, 1, rows, block_d, layout=NVMMASharedLayout(min(128, 2 * block_d), 16, rank=4))


@functools.lru_cache(maxsize=4096)
def _hopper(kernel: str, config: Any, group: int, causal: bool) -> tuple[Launch, int, int, Any, Any]:
    """-> the launch of a kernel for Hopper GPUs, its rows of what it owns and what it walks over, and their boxes."""
    owned, moved = config.kwargs["ROWS"], config.kwargs["BLOCK_M" if kernel == "dkdv" else "BLOCK_N"]
    name = f"{'fwd' if kernel == 'fwd' else f'bwd_{kernel}'}_hopper"
    launch = _launch(name, GROUP=group, CAUSAL=causal, **config.kwargs, num_warps=config.num_warps)
    return launch, owned, moved, *(_hopper_form(rows, config.kwargs["BLOCK_D"]) for rows in (owned, moved))


# --- forward --------------------------------------------------------------------------------------------------------


def _outputs(q: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """-> o like q, and lse (B, H, N) in base 2."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _run(
    results: tuple[torch.Tensor, torch.Tensor | None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    lengths: torch.Tensor | None,
    window: int | None,
) -> None:
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
    else:
        lse = q.new_empty(q.shape[:3], dtype=accumulator(q.dtype)) if lse is None else lse
        _prefill(q, k, v, o, lse, causal, scale2, lengths, window)


_inference = launching.operator(
    "flash_attention_inference(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window) "
    "-> Tensor",
    outputs=lambda q, *_others: torch.empty_like(q),
    run=lambda o, *args: _run((o, None), *args),
)


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale2: float, lengths: torch.Tensor | None, window: int | None,
) -> None:  # fmt: skip
    b, h, n, d = q.shape
    s, group, itemsize, properties = k.shape[2], h // k.shape[1], q.element_size(), runtime.properties(q.device)
    boxes = lengths is None and _in_boxes(q, k, v)  # boxes would hold what lies beyond a length
    section = kernels.section(s, d, itemsize, causal, properties)
    if HAS_GLUON and boxes and window is None and _in_boxes(o):
        config = kernels_hopper.forward_config(d, itemsize, s, causal, properties)
        if config is not None:
            launch, rows, _, q_form, k_form = _hopper("fwd", config, group, causal)
            blocks = cdiv(n, rows * config.kwargs["WARPGROUPS"])
            programs, paired = kernels_hopper.forward_grid(
                blocks, b * h, config.kwargs["BLOCK_D"], causal, properties.num_sms
            )
            tensors = (q_form(q), k_form(k), k_form(v), q_form(o), lse)
            launch((programs,), *tensors, b, h, n, s, section, int(paired), scale2)
            return
    launch, block_m, _, q_form, k_form = _plain(
        "fwd", d, group, q.dtype, causal, boxes, lengths is not None, window is not None,
        _precision(q.dtype, properties), properties,
    )  # fmt: skip
    tensors = (*_arguments(q_form, q), *_arguments(k_form, k, v), *_arguments(None, o), lse)
    seen = (*launching.strided(lengths, 1, lse), window or 0)
    launch((cdiv(n, block_m) * b * h,), *tensors, b, h, n, s, section, *seen, scale2)


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
    b, h, n, d = q.shape
    h_kv, s, itemsize, properties = k.shape[1], k.shape[2], q.element_size(), runtime.properties(q.device)
    boxes = lengths is None and _in_boxes(q, k, v, do)
    dkdv_config, dq_config = None, None
    if HAS_GLUON and boxes and window is None and _in_boxes(dq, dk, dv):
        dkdv_config, dq_config = kernels_hopper.backward_config(d, itemsize, properties) or (None, None)
    lse, delta = _delta(o, do, lse, 1 if dkdv_config is None else kernels_hopper.PADDING)
    kind = (d, h // h_kv, q.dtype, causal, boxes, lengths is not None, window is not None)
    precision = _precision(q.dtype, properties)
    seen = (*launching.strided(lengths, 1, lse), window or 0)
    sizes = (b, h, n, s, lse.shape[2])
    launch: Launch

    section = kernels.section(n * (h // h_kv), d, itemsize, causal, properties)
    if dkdv_config is not None:
        launch, rows, block_m, k_form, q_form = _hopper("dkdv", dkdv_config, h // h_kv, causal)
        vector = box_form(block_m, layout=NVMMASharedLayout(0, 32, rank=1))
        tensors = [q_form(q), k_form(k), k_form(v), q_form(do), k_form(dk), k_form(dv)]
        vectors = (vector(lse.view(-1)), vector(delta.view(-1)))
        launch((cdiv(s, 2 * rows) * b * h_kv,), *tensors, *vectors, *sizes, section, scale2, scale)
    else:
        launch, _, block_n, q_form, k_form = _plain("dkdv", *kind, precision, properties)
        tensors = _arguments(q_form, q) + _arguments(k_form, k, v) + _arguments(q_form, do)
        grads = _arguments(None, dk, dv)
        launch(
            (cdiv(s, block_n) * b * h_kv,), *tensors, lse, delta, *grads, *sizes, section, *seen, scale2, scale
        )  # fmt: skip

    section = kernels.section(s, d, itemsize, causal, properties)
    if dq_config is not None:
        launch, rows, _, q_form, k_form = _hopper("dq", dq_config, h // h_kv, causal)
        tensors = [q_form(q), k_form(k), k_form(v), q_form(do), q_form(dq)]
        launch((cdiv(n, 2 * rows) * b * h,), *tensors, lse, delta, *sizes, section, scale2, scale)
    else:
        launch, block_m, _, q_form, k_form = _plain("dq", *kind, precision, properties)
        tensors = _arguments(q_form, q) + _arguments(k_form, k, v) + _arguments(q_form, do)
        grads = _arguments(None, dq)
        launch((cdiv(n, block_m) * b * h,), *tensors, lse, delta, *grads, *sizes, section, *seen, scale2, scale)

    if dq_factor != 1:
        dq *= dq_factor
    if dk_factor != 1:
        dk *= dk_factor


@functools.cache
def _delta_launch(d: int, dtype: torch.dtype, padded: bool) -> Launch:
    config = kernels.DELTA_CONFIG
    constants = {**config.kwargs, "BLOCK_D": kernels.block_d(d), "num_warps": config.num_warps}
    return _launch("bwd_delta", D=d, ACC=tl_accumulator(dtype), PADDED=padded, **constants)


def _delta(o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> lse and rowsum(o * do), both (B, H, N rounded up to a multiple)."""
    b, h, n, d = o.shape
    n_padded = cdiv(n, multiple) * multiple
    delta = lse.new_empty(b, h, n_padded)
    padded = torch.empty_like(delta) if multiple > 1 else lse
    grid = (cdiv(n_padded, kernels.DELTA_CONFIG.kwargs["BLOCK_M"]) * b * h,)
    _delta_launch(d, lse.dtype, multiple > 1)(grid, *_arguments(None, o, do), lse, delta, padded, h, n, n_padded)
    return padded, delta


_backward = launching.operator(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale, "
    "Tensor? lengths, int? window) -> (Tensor, Tensor, Tensor)",
    outputs=_gradients,
    run=_run_backward,
)


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


_flash = launching.operator(
    "flash_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? lengths, int? window) "
    "-> (Tensor, Tensor)",
    outputs=_outputs,
    run=_run,
    setup_context=_setup_context,
    backward=_autograd,
)


# --- few queries ----------------------------------------------------------------------------------------------------

# Counters that are zero, as each launch leaves them: by device and stream, and (without a stream) for captured graphs.
_counters: dict[tuple[int, int | None], torch.Tensor] = {}
COUNTERS, CAPTURED_COUNTERS = 2**12, 2**18


def _tickets(device: torch.device, count: int) -> torch.Tensor:
    """``count`` counters (int32) that are zero and that no other stream uses.

    A captured graph may run beside anything, so that each call in it gets counters of its own, of memory that was zeroed
    before; where there is none left, zeroing them becomes part of the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        spare = _counters.get((index, None))
        if spare is None or spare.numel() < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        found, _counters[index, None] = spare[:count], spare[count:]
        return found
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _counters or _counters[key].numel() < count:
        _counters[key] = torch.zeros(max(count, COUNTERS), dtype=torch.int32, device=device)
        if (index, None) not in _counters:
            _counters[index, None] = torch.zeros(CAPTURED_COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]


@derived
def _decode_plan(
    device: torch.device, gpu: str, b: int, h: int, h_kv: int, n: int, blocks: int, d: int, dtype: torch.dtype,
    causal: bool, lengths: bool, window: bool, page: int, with_lse: bool, precision: str,
) -> tuple[Launch, kernels_decode.Plan]:  # fmt: skip
    """For room for ``blocks`` x 64 keys: each new token would need a plan of its own if it were for an exact number."""
    group = h // h_kv
    plan = kernels_decode.plan(b * h_kv, group * n, 64 * blocks, d, dtype.itemsize, runtime.properties(device), page)
    return _decode_launch(
        D=d, GROUP=group, CAUSAL=causal, LENGTHS=lengths, WINDOW=window, PAGE=page, LSE=with_lse,
        ACC=tl_accumulator(dtype), PRECISION=precision, **plan.config.kwargs,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    ), plan  # fmt: skip


@functools.cache
def _decode_launch(**constants: Any) -> Launch:
    return Launch(kernels_decode._flash_attention_decode_kernel, **constants)


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor | None,
    causal: bool, scale2: float, lengths: torch.Tensor | None, window: int | None, table: torch.Tensor | None,
) -> None:  # fmt: skip
    b, h, n, d = q.shape
    pages, h_kv, s, _ = k.shape
    page = 0
    if table is not None:
        page, s = s, s * table.shape[1]
    device, dtype = q.device, q.dtype
    properties = runtime.properties(device)
    # The name stands for the properties, whose hash costs the host more than all the rest.
    launch, plan = _decode_plan(
        device, properties.name, b, h, h_kv, n, cdiv(s, 64), d, dtype, causal and n > 1, lengths is not None,
        window is not None, page, lse is not None, _precision(dtype, properties),
    )  # fmt: skip
    partial, tickets = o, o
    if plan.splits > 1:
        partial = q.new_empty(plan.programs * plan.rows * (d + 1), dtype=accumulator(dtype))
        tickets = _tickets(device, plan.tiles)
    launch(
        (plan.programs,), *_arguments(None, q, k, v, o), o if lse is None else lse,
        *launching.strided(lengths, 1, o), *launching.strided(table, 2, o), partial, tickets,
        h, n, s, pages, plan.splits, window or 0, scale2,
    )  # fmt: skip


def _run_paged(
    o: torch.Tensor, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor,
    lengths: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    room = block_table.shape[1] * k_pages.shape[2]
    arguments.check_index_values("paged_attention", "lengths", lengths, room + 1)
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


@functools.cache
def _append_launch(page: int, d: int) -> Launch:
    config = kernels_decode.APPEND_CONFIG
    constants = {**config.kwargs, "BLOCK_D": kernels.block_d(d), "num_warps": config.num_warps}
    return Launch(kernels_decode._append_to_pages_kernel, PAGE=page, D=d, **constants)


def _run_append(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:  # fmt: skip
    b, h_kv, n, d = k.shape
    pages, _, page, _ = k_pages.shape
    if k.numel() == 0 or block_table.numel() == 0 or pages == 0:
        return
    grid = (b * cdiv(h_kv * n, kernels_decode.APPEND_CONFIG.kwargs["BLOCK_R"]),)
    tables = (block_table, *block_table.stride(), lengths, *lengths.stride())
    room = page * block_table.shape[1]
    _append_launch(page, d)(grid, *_arguments(None, k, v, k_pages, v_pages), *tables, h_kv, n, room, pages)


# launching.operator() is for operators that return what they compute; this one writes into its arguments.
torch.library.define(
    f"{launching.NAMESPACE}::append_to_pages",
    "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor lengths) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl(f"{launching.NAMESPACE}::append_to_pages", "default", _run_append)
torch.library.register_fake(f"{launching.NAMESPACE}::append_to_pages", lambda *_tensors: None)


def _append(*tensors: torch.Tensor) -> None:
    if torch.compiler.is_compiling() or launching.is_observed() or any(type(t) is not torch.Tensor for t in tensors):
        torch.ops.kernelbook.append_to_pages(*tensors)
    else:
        _run_append(*tensors)
