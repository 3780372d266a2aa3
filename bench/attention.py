"""What is measured of ``attention``: forward, backward and a few queries beside PyTorch's own attention, FlexAttention and,
where they are installed, FlashAttention-3's forward pass, FlashAttention-4 and FlashInfer, packed sequences, pages beside contiguous keys, and the errors."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import Bench, Tensors, baselines, compiled, passes
from bench.models import MODELS
from kernelbook import check, runtime
from kernelbook.attention import op, pages
from kernelbook.attention.reference import flash_attention_backward_reference, flash_attention_reference
from kernelbook.lab import record, timing

# B, H, H_kv, N, D, causal
SHAPES = (
    (4, 48, 48, 4096, 64, True),
    (4, 16, 16, 4096, 128, True),
    (1, 16, 16, 16384, 128, True),
    (4, 16, 16, 4096, 128, False),
    (4, 32, 8, 4096, 128, True),
)
# Lengths and heads for which nothing was tuned.
UNTUNED = (
    (3, 28, 4, 6000, 128, True),
    (2, 20, 20, 4000, 128, False),
    (2, 24, 24, 6000, 64, False),
    (16, 16, 16, 640, 64, True),
    (2, 12, 4, 3072, 256, True),
    (1, 32, 8, 2048, 96, True),
)
# The sweep: 16,384 tokens (one sequence if it is longer), 2,048 features over all heads.
SWEEP_N = (1024, 2048, 4096, 8192, 16384, 32768)
TOKENS, FEATURES = 16384, 2048
SMALL_SHAPE = (1, 8, 8, 128, 64, True)  # where the host decides
# Few queries. B, H, H_kv, N, S, D: every query sees every key, which is what all providers agree on.
DECODED = (
    *((1, 32, 4, 1, s, 128) for s in (512, 1024, 4096, 8192, 131072)),
    *((1, 32, 8, 1, s, 128) for s in (1024, 8192, 131072)),
    *((b, 32, 8, 1, 8192, 128) for b in (4, 16)),
    (64, 32, 4, 1, 2048, 128),
    (1, 16, 16, 1, 8192, 128),
    (8, 16, 16, 1, 8192, 64),
    (4, 64, 8, 1, 16384, 64),
    (16, 64, 8, 1, 4096, 128),
    *((1, 32, 8, n, 8192, 128) for n in (4, 16)),
    *((8, 32, 8, n, 8192, 128) for n in (4, 16)),
    (8, 16, 16, 16, 4096, 128),
)
WITH_FLEX = ((1, 32, 4, 1, 8192, 128), (16, 32, 8, 1, 8192, 128), (8, 32, 8, 16, 8192, 128))
PAGED = ((1, 32, 4, 1, 8192, 128), (16, 32, 8, 1, 8192, 128), (8, 32, 8, 4, 8192, 128))
PAGE = 64
FLASHINFER_HEADS = (64, 128)  # it compiles its kernels for each head size, for a minute each
# Models whose heads no other list has.
WITH_HEADS = (
    *("Qwen3-32B", "Qwen3-235B-A22B", "gpt-oss-20b", "GLM-4.5-Air", "Gemma-3-1b", "Gemma-3-4b", "Gemma-3-27b"),
    *("OLMo-2-13B", "Phi-4", "Qwen3-Next-80B-A3B"),
)


# Sequences packed one after another, causal: H, D; and their lengths.
PACKED, PACKED_LENGTHS = (16, 128), (3000, 1, 2047, 700, 1400, 644, 300, 100)

LARGEST_MATH = 2**30  # scores that the formulas one by one are measured with: more take seconds and tens of GB
CHECKED_WHOLE = 4096  # of longer sequences the first key head is checked: float64 takes its time too

ERROR_SHAPE = (1, 8, 8, 4096, 128, True)
ERROR_COLUMNS = ("run", "op", "provider", "dtype", "shape", "output", "error", *record.ENVIRONMENT)
ERROR_KEY = ("op", "provider", "dtype", "shape", "output")

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _inputs(b: int, h: int, h_kv: int, n: int, s: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v that want gradients, and do."""
    sizes = ((h, n), (h_kv, s), (h_kv, s), (h, n))
    q, k, v, do = (torch.randn(b, heads, rows, d, dtype=dtype, device=runtime.DEVICE) for heads, rows in sizes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def _sdpa(backend: SDPBackend, causal: bool) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def _flex(n: int, causal: bool) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=str(runtime.DEVICE))
    flex = compiled(flex_attention)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def _flash_attention_3(causal: bool) -> Attention:
    from fa3_fwd_interface import flash_attn_func

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        return o.transpose(1, 2)

    return attention


def _flash_attention_4(causal: bool, *, deterministic: bool = False) -> Attention:
    """It compiles for each head size, mask and number of heads that share a key head, not for each length.

    ``deterministic``: its gradients are added in one order, as ours are.
    """
    from flash_attn.cute import flash_attn_func

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, _ = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, deterministic=deterministic)
        return o.transpose(1, 2)

    return attention


def _flashinfer(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, causal: bool
) -> Callable[[], Tensors]:
    """Pages that are all full, planned beforehand, as one plan serves all layers of a model.

    Of its ways to a few queries those that divide the keys among programs; one query has tensor cores where four heads share
    keys, which is from where on they are worth it.
    """
    import flashinfer

    b, h, n, d = q.shape
    h_kv, page = k_pages.shape[1:3]
    ends = torch.arange(b + 1, dtype=torch.int32)
    workspace = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    pages_of = (ends * table.shape[1], table.flatten(), torch.full((b,), page, dtype=torch.int32))
    about: dict[str, Any] = {"q_data_type": q.dtype, "kv_data_type": k_pages.dtype}
    if n == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=h >= 4 * h_kv)
        wrapper.plan(*pages_of, h, h_kv, d, page, **about)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        wrapper.plan(ends * n, *pages_of, h, h_kv, d, page, causal=causal, **about)
    rows = q.transpose(1, 2).reshape(b * n, h, d)
    return lambda: [wrapper.run(rows, (k_pages, v_pages)).view(b, n, h, d).transpose(1, 2)]


def _kernels_of(provider: str) -> contextlib.AbstractContextManager[None]:
    """Within the context the kernels that the provider stands for are used, forward and backward."""
    return op.plain_kernels() if provider == "kernelbook:plain" else contextlib.nullcontext()


def _attentions(sequences: int, n: int, s: int, causal: bool, *, slow_ones: bool) -> dict[str, Attention]:
    """By provider. The slow ones: FlexAttention, which compiles for each shape, and the one with the score matrix.

    ``sequences``: how many score matrices there are, one for each head of each.
    """
    found: dict[str, Attention] = {
        "sdpa_flash": _sdpa(SDPBackend.FLASH_ATTENTION, causal),
        "sdpa_cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, causal),
        "kernelbook": functools.partial(op.flash_attention, causal=causal),
    }
    if n == s:  # few queries have one kernel on every GPU
        found["kernelbook:plain"] = found["kernelbook"]
        if baselines.version("flash-attn-4"):  # on Hopper it does not divide the keys
            found["flash_attention_4"] = _flash_attention_4(causal)
        if baselines.has("fa3_fwd_interface"):  # its wheel has no backward pass
            found["flash_attention_3"] = _flash_attention_3(causal)
    if slow_ones:
        found["flex"] = _flex(n, causal)
        if n == s and sequences * n * s <= LARGEST_MATH:
            found["sdpa_math"] = _sdpa(SDPBackend.MATH, causal)
    return found


def _by_head(
    reference: Callable[..., Any], tensors: Tensors, group: int, causal: bool
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The reference in float64, for one key head of one batch at a time: whole score matrices would not fit."""
    num_kv = tensors[0].shape[1] // group
    for b in range(tensors[0].shape[0]):
        for heads in zip(*(t.detach()[b : b + 1].double().chunk(num_kv, dim=1) for t in tensors), strict=True):
            out = reference(*heads, causal=causal)
            yield out if isinstance(out, tuple) else (out,)


def _truth(reference: Callable[..., Any], tensors: Tensors, group: int, causal: bool) -> Tensors:
    """The reference in float64. ``tensors``: the first has all query heads."""
    b, h_kv = tensors[0].shape[0], tensors[0].shape[1] // group
    outputs = zip(*_by_head(reference, tensors, group, causal), strict=True)
    return [torch.cat(parts).unflatten(0, (b, h_kv)).flatten(1, 2) for parts in outputs]


def _takes(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a peer takes tensors of this kind at all."""
    try:
        attention(q, k, v)
    except (RuntimeError, AssertionError):
        return False
    return True


def _problem(
    mode: str, b: int, h: int, h_kv: int, n: int, s: int, d: int, causal: bool, dtype: torch.dtype, slow_ones: bool
) -> timing.Problem:
    *leaves, do = _inputs(b, h, h_kv, n, s, d, dtype)
    given = _attentions(b * h, n, s, causal, slow_ones=slow_ones)
    if mode != "forward":
        given.pop("flash_attention_3", None)
    if mode != "forward" and "flash_attention_4" in given:
        given["flash_attention_4:one_order"] = _flash_attention_4(causal, deterministic=True)
    calls: dict[str, Callable[[], Tensors]] = {
        provider: _passes(provider, mode, attention, leaves, do)
        for provider, attention in given.items()
        if provider.startswith("kernelbook") or _takes(attention, *leaves)
    }
    if n != s and d in FLASHINFER_HEADS and baselines.has("flashinfer"):
        q, k, v = (t.detach() for t in leaves)
        order = torch.arange(b * s // PAGE, device=q.device)
        k_pages, v_pages = (_in_pages(t, order, PAGE) for t in (k, v))
        table = order.view(b, s // PAGE).to(torch.int32)
        calls["flashinfer"] = _flashinfer(q, k_pages, v_pages, table, causal)

    def checked(out: Tensors) -> Tensors:
        """What is compared with float64: heads that share a key head stay together."""
        return out if n <= CHECKED_WHOLE else [t[:1, : t.shape[1] // h_kv] for t in out]

    def truth() -> Tensors:
        if mode == "forward":
            return _truth(flash_attention_reference, checked(leaves), h // h_kv, causal)
        return _truth(_gradients, checked([*leaves, do]), h // h_kv, causal)

    return timing.Problem(
        calls, truth, lambda: checked(calls["sdpa_flash"]()), _factor(mode), dict.fromkeys(calls, checked)
    )


def _passes(provider: str, mode: str, attention: Attention, leaves: Tensors, do: torch.Tensor) -> Callable[[], Tensors]:
    with _kernels_of(provider):
        call = passes(mode, attention, leaves, [do])

    def within() -> Tensors:
        with _kernels_of(provider):
            return call()

    return within


def _factor(mode: str) -> float:
    return check.FORWARD_FACTOR if mode == "forward" else check.GRADIENT_FACTOR


def _gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return flash_attention_backward_reference(do, q, k, v, causal=causal)


def _case(
    mode: str,
    shape: tuple[int, int, int, int, int, bool],
    dtype: torch.dtype = torch.bfloat16,
    slow_ones: bool | None = None,
) -> timing.Case:
    b, h, h_kv, n, d, causal = shape
    if slow_ones is None:
        slow_ones = dtype == torch.bfloat16 and (shape in SHAPES or (d == 128 and causal))
    q, kv, lse = b * h * n * d, b * h_kv * n * d, 4 * b * h * n
    # Forward. Read: q, k, v; written: o, lse. Backward. Read: q, k, v, o, do, lse; written: dq, dk, dv.
    tensors, products = {"forward": (2, 2), "backward": (4, 5), "forward_backward": (6, 7)}[mode]
    gbytes = (tensors * (q + kv) * dtype.itemsize + lse * (2 if mode == "forward_backward" else 1)) / 1e9
    gflop = products * b * h * n * n * d / 1e9 * (1 if causal else 2)
    sizes = {"B": b, "H": h, "H_kv": h_kv, "N": n, "S": n, "D": d, "causal": "yes" if causal else "no"}
    build = functools.partial(_problem, mode, b, h, h_kv, n, n, d, causal, dtype, slow_ones)
    return timing.Case("flash_attention", mode, dtype, sizes, "N", n, gbytes, gflop, build)


def _decode_case(shape: tuple[int, int, int, int, int, int], *, page: int = 0) -> timing.Case:
    """A few queries, to contiguous keys or to those in pages."""
    b, h, h_kv, n, s, d = shape
    dtype = torch.bfloat16
    sizes: dict[str, Any] = {"B": b, "H": h, "H_kv": h_kv, "N": n, "S": s, "D": d}
    gbytes = 2 * b * d * (h * n + h_kv * s) * dtype.itemsize / 1e9  # read: q, k, v; written: o
    gflop = 4 * b * h * n * s * d / 1e9
    if page:
        op, about, build = (
            "paged_attention",
            {"causal": "yes", "page": page},
            functools.partial(_paged_problem, *shape, page),
        )
    else:
        op, about = "flash_attention", {"causal": "no"}
        build = functools.partial(_problem, "forward", *shape, False, slow_ones=shape in WITH_FLEX)
    return timing.Case(op, "forward", dtype, sizes | about, "S", s, gbytes, gflop, lambda: build(dtype=dtype))


def _packed_case(mode: str) -> timing.Case:
    """Several sequences in one row of a batch: what is counted is what is seen."""
    (h, d), n, dtype = PACKED, sum(PACKED_LENGTHS), torch.bfloat16
    seen = sum(length * (length + 1) // 2 for length in PACKED_LENGTHS)
    tensors, products = (2, 2) if mode == "forward" else (4, 5)
    sizes = {"B": 1, "H": h, "H_kv": h, "N": n, "S": n, "D": d, "causal": "yes", "sequences": len(PACKED_LENGTHS)}
    gbytes = (2 * tensors * n * d * h * dtype.itemsize + 4 * h * n) / 1e9
    build = functools.partial(_packed_problem, mode, h, d, PACKED_LENGTHS, dtype)
    return timing.Case("flash_attention", mode, dtype, sizes, "N", n, gbytes, 2 * products * h * seen * d / 1e9, build)


def _packed_problem(mode: str, h: int, d: int, packed: Sequence[int], dtype: torch.dtype) -> timing.Problem:
    """PyTorch's with the mask of (N, N), FlexAttention with one of blocks, FlashAttention-4's for this."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = sum(packed)
    *leaves, do = _inputs(1, h, h, n, n, d, dtype)
    lengths = torch.tensor(packed, dtype=torch.int32, device=do.device)
    ends, of = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), torch.repeat_interleave(lengths)
    mask = torch.ones(n, n, dtype=torch.bool, device=do.device).tril() & (of[:, None] == of)
    found: dict[str, Attention] = {
        "kernelbook": functools.partial(op.flash_attention, causal=True, cu_seqlens=ends),
        "sdpa_mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask),
    }
    if runtime.DEVICE.type == "cuda":
        blocks = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, n, n, device=str(runtime.DEVICE))
        found["flex"] = functools.partial(compiled(flex_attention), block_mask=blocks)
    if baselines.version("flash-attn-4"):
        from flash_attn.cute import flash_attn_varlen_func

        def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = (t[0].transpose(0, 1) for t in (q, k, v))
            o, _ = flash_attn_varlen_func(*rows, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
            return o.transpose(0, 1)[None]

        found["flash_attention_4"] = varlen

    def of_first_head(attention: Attention, dtype: torch.dtype) -> Tensors:
        own = [t[:, :1].detach().to(dtype).requires_grad_() for t in leaves]
        return passes(mode, attention, own, [do[:, :1].to(dtype)])()

    calls = {name: passes(mode, attention, leaves, [do]) for name, attention in found.items()}
    reference = functools.partial(flash_attention_reference, causal=True, cu_seqlens=ends)
    return timing.Problem(
        calls,
        lambda: of_first_head(reference, torch.float64),
        lambda: of_first_head(found["sdpa_mask"], dtype),
        _factor(mode),
        dict.fromkeys(calls, lambda out: [t[:, :1] for t in out]),
    )


def _in_pages(x: torch.Tensor, order: torch.Tensor, page: int) -> torch.Tensor:
    """(B, H_kv, S, D) -> (B S / page, H_kv, page, D), in a random order: page ``order[i]`` holds part ``i``."""
    parts = x.unflatten(2, (x.shape[2] // page, page)).transpose(1, 2).flatten(0, 1)
    pool = torch.empty(parts.shape, dtype=x.dtype, device=x.device)
    pool[order] = parts
    return pool


def _paged_problem(b: int, h: int, h_kv: int, n: int, s: int, d: int, page: int, dtype: torch.dtype) -> timing.Problem:
    """The same keys in pages and, beside it, contiguous."""
    q, k, v = (t.detach() for t in _inputs(b, h, h_kv, n, s, d, dtype)[:3])
    order = torch.randperm(b * s // page, device=runtime.DEVICE)
    k_pages, v_pages = (_in_pages(t, order, page) for t in (k, v))
    table = order.view(b, s // page).to(torch.int32)
    lengths = torch.full((b,), s, dtype=torch.int32, device=runtime.DEVICE)

    def plain() -> Tensors:
        wide_k, wide_v = (t.repeat_interleave(h // h_kv, dim=1) for t in (k, v))
        mask = torch.ones(n, s, dtype=torch.bool, device=q.device).tril(s - n)
        return [F.scaled_dot_product_attention(q, wide_k, wide_v, mask)]

    calls: dict[str, Callable[[], Tensors]] = {
        "kernelbook": lambda: [pages.paged_attention(q, k_pages, v_pages, table, lengths)],
        "kernelbook:contiguous": lambda: [op.flash_attention(q, k, v, causal=True)],
    }
    if baselines.has("flashinfer"):
        calls["flashinfer"] = _flashinfer(q, k_pages, v_pages, table, True)
    return timing.Problem(
        calls,
        lambda: _truth(flash_attention_reference, (q, k, v), h // h_kv, True),
        plain,
        check.FORWARD_FACTOR,
    )


def cases() -> Iterator[timing.Case]:
    """The named shapes, those that nobody tuned, and sequences from 1,024 to 32,768 at two head sizes, causal or not, forward and
    backward; a small shape; few queries to contiguous keys and to pages; packed sequences."""
    shapes = dict.fromkeys(SHAPES)
    for d in (64, 128):
        for causal in (True, False):
            for n in SWEEP_N:
                h = FEATURES // d
                shapes[(max(1, TOKENS // n), h, h, n, d, causal)] = None
    for shape in shapes:
        yield _case("forward", shape)
        yield _case("backward", shape)
    for shape in UNTUNED:
        yield _case("forward", shape, slow_ones=False)
        yield _case("backward", shape, slow_ones=False)
    for d in (80, 256):
        yield _case("forward", (4, FEATURES // d, FEATURES // d, 4096, d, True))
        yield _case("backward", (4, FEATURES // d, FEATURES // d, 4096, d, True))
    yield _case("forward", SHAPES[1], torch.float16)
    yield _case("backward", SHAPES[1], torch.float16)
    for mode in ("forward", "forward_backward"):
        yield _case(mode, SMALL_SHAPE)
    for decoded in DECODED:
        yield _decode_case(decoded)
    for decoded in PAGED:
        yield _decode_case(decoded, page=PAGE)
    for mode in ("forward", "backward"):
        yield _packed_case(mode)


def models() -> Iterator[timing.Case]:
    """The heads of this year's models, on a prompt of 4,096 tokens and on one of 1,000; and one query to 4,096 keys."""
    for name in WITH_HEADS:
        h, h_kv, d = MODELS[name].heads, MODELS[name].kv_heads, MODELS[name].head_dim
        for mode in ("forward", "backward"):
            yield _case(mode, (1, h, h_kv, 4096, d, True), slow_ones=False)
        yield _case("forward", (1, h, h_kv, 1000, d, True), slow_ones=False)
        yield _decode_case((8, h, h_kv, 1, 4096, d))


def _errors() -> pd.DataFrame:
    """The relative error against float64 of every output and gradient, by provider and dtype."""
    b, h, h_kv, n, d, causal = ERROR_SHAPE
    shape = f"B={b} H={h} H_kv={h_kv} N={n} S={n} D={d} causal=yes"
    about = {"run": record.new_run(), **record.environment("attention_errors")}
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        torch.manual_seed(0)
        q, k, v, do = _inputs(b, h, h_kv, n, n, d, dtype)
        truth = [
            *_truth(flash_attention_reference, (q, k, v), 1, causal),
            *_truth(_gradients, (q, k, v, do), 1, causal),
        ]
        attentions = {**_attentions(b * h, n, n, causal, slow_ones=False), "sdpa_math": _sdpa(SDPBackend.MATH, causal)}
        for name, attention in attentions.items():
            if not (name.startswith("kernelbook") or _takes(attention, q, k, v)):
                continue
            with _kernels_of(name):
                o = attention(q, k, v)
                grads = torch.autograd.grad(o, (q, k, v), do) if name != "flash_attention_3" else ()
            for output, ours, exact in zip(("o", "dq", "dk", "dv"), [o.detach(), *grads], truth, strict=False):
                row = {"op": "flash_attention", "provider": name, "dtype": str(dtype)[6:], "shape": shape}
                rows.append({**about, **row, "output": output, "error": f"{check.relative_error(ours, exact):.4g}"})
    return pd.DataFrame(rows, columns=list(ERROR_COLUMNS))


def extras() -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables of another kind."""
    yield "attention_errors", _errors()


BENCH = Bench(
    name="attention",
    keys={"attention_errors": ERROR_KEY},
    baselines=dict.fromkeys(("sdpa_flash", "sdpa_cudnn", "sdpa_math", "sdpa_mask", "flex"), "torch")
    | dict.fromkeys(("flash_attention_4", "flash_attention_4:one_order"), "flash-attn-4")
    | {"flashinfer": "flashinfer-python", "flash_attention_3": "fa3-fwd"},
    cases=cases,
    models=models,
    extras=extras,
)
