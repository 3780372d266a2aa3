"""Calls of this room's functions, and what each promises."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from kernelbook import runtime
from kernelbook.attention.op import flash_attention, plain_kernels
from kernelbook.attention.pages import append_to_pages, paged_attention
from kernelbook.attention.reference import (
    _seen,
    append_to_pages_reference,
    flash_attention_reference,
    paged_attention_reference,
)
from kernelbook.cases import ONE_TARGET, Case, Given, draw, ids
from kernelbook.tensors import precision


def given_attention(
    b: int = 2, h: int = 2, group: int = 2, n: int = 20, s: int = 20, d: int = 16, causal: bool = True,
    lengths: bool = False, sinks: bool = False, sequences: bool = False, **options: Any,
) -> Given:  # fmt: skip
    """``group`` heads of queries to each of ``h`` heads of keys."""
    given: Given = {"q": draw(b, h * group, n, d), "k": draw(b, h, s, d), "v": draw(b, h, s, d), "causal": causal}
    given |= {"lengths": torch.randint(0, s + 1, (b,), dtype=torch.int32, device=runtime.DEVICE)} if lengths else {}
    given |= {"sinks": draw(h * group)} if sinks else {}
    given |= {"cu_seqlens": ids(0, n // 3, n // 3 + 1, n // 3 + 1, n - 1).int()} if sequences else {}
    return given | {name: option for name, option in options.items() if option is not None}


def _given_pages(
    b: int = 1, h: int = 2, group: int = 2, n: int = 1, d: int = 16, page: int = 16, per: int = 2, new: bool = False,
    sinks: bool = False,
) -> Given:  # fmt: skip
    """Pools of pages with one more than ``b`` sequences of ``per`` take; queries, or ``new`` keys and values."""
    pool = (b * per + 1, h, page, d)
    heads = {"k": draw(b, h, n, d), "v": draw(b, h, n, d)} if new else {"q": draw(b, h * group, n, d)}
    table = torch.randperm(b * per + 1, device=runtime.DEVICE)[: b * per].int().view(b, per)
    lengths = torch.randint(0, per * page - n + 1, (b,), dtype=torch.int32, device=runtime.DEVICE)
    heads |= {"sinks": draw(h * group)} if sinks else {}
    return {**heads, "k_pages": draw(*pool), "v_pages": draw(*pool), "block_table": table, "lengths": lengths}


def _rounded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors, in tf32 where that is allowed: cuBLAS takes it at some sizes only."""
    if precision(tensors[0].dtype) != "tf32":
        return list(tensors)
    nearest = [((t.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in tensors]
    return [t + (rounded - t.detach()) for t, rounded in zip(tensors, nearest, strict=True)]


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """PyTorch's own in float32: like ours it keeps no probabilities, so the backward pass has its differences from the output."""
    if precision(q.dtype) == "tf32":
        return flash_attention_reference(*_rounded(q, k, v), **given)
    if q.dtype != torch.float32 or not q.numel() or {*given} & {"sinks", "softcap", "cu_seqlens"}:
        return flash_attention_reference(q, k, v, **given)
    causal, lengths, window, scale = (given.get(name) for name in ("causal", "lengths", "window", "scale"))
    seen = _seen(q.shape[2], k.shape[2], bool(causal), lengths, window, q.device)
    some = seen.any(-1, keepdim=True)
    # Heads that share keys would get the plain one on a GPU.
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    o = functional.scaled_dot_product_attention(q.contiguous(), k, v, attn_mask=seen | ~some, scale=scale)
    return torch.where(some, o, 0.0)


def _paged(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, **given: Any) -> torch.Tensor:
    q, k_pages, v_pages = _rounded(q, k_pages, v_pages)
    return paged_attention_reference(q=q, k_pages=k_pages, v_pages=v_pages, **given)


def _attention(**more: Any) -> Any:
    """What all cases of attention share."""
    shared = {
        "function": flash_attention,
        "given": given_attention,
        "reference": flash_attention_reference,
        "baseline": _fused,
        "op": "flash_attention",
    }
    rows = {"rows": ("q", "k", "v"), "lowered": ("q", "k", "v")}
    return shared | rows | {"but": ("in place",), "largest": 1.0} | more


FLAG = (False, True)
SIZES = {
    "b": (1, 3), "h": (1, 2), "group": (1, 3), "n": (0, 257), "s": (1, 512), "d": [8, 16, 40, 64, 128], "causal": FLAG,
    "lengths": FLAG,
}  # fmt: skip
REAL = tuple(
    dict(zip(("b", "h", "group", "n", "s", "d"), problem, strict=True)) | {"causal": causal}
    for problem in (
        (2, 8, 1, 1024, 1024, 64), (1, 2, 4, 1000, 1000, 128), (1, 4, 1, 777, 1300, 64), (2, 1, 4, 1300, 777, 128),
        (1, 2, 2, 513, 2049, 256), (1, 2, 2, 1025, 1025, 80), (1, 2, 1, 2048, 2048, 96), (1, 2, 1, 1000, 1000, 32),
        (3, 1, 2, 1, 4096, 128), (1, 2, 1, 500, 500, 17), (1, 2, 2, 4100, 4200, 128),
    )
    for causal in FLAG
)  # fmt: skip

CASES = {
    "flash_attention": Case(
        what="attention of any length; also one token against a cache",
        sizes=SIZES | {"scale": [None, 0.3, -0.2]}, real=REAL, **_attention(),
    ),
    "attention with sinks": Case(
        options={"window": 7, "sinks": True, "softcap": 2.0},
        sizes=SIZES | {"causal": [True], "window": [None, 1, 20], "sinks": FLAG, "softcap": [None, 2.0]},
        real=tuple(sizes | {"window": 200} for sizes in REAL if sizes["causal"]), **_attention(),
    ),
    "attention of packed sequences": Case(
        options={"b": 1, "sequences": True}, real=tuple({"n": 1000, "s": 1000, "d": d} for d in (64, 128, 256)), **_attention()
    ),
    "decoding": Case(options={"n": 1, "causal": False}, **_attention()),
    "paged_attention": Case(
        function=paged_attention, given=_given_pages, reference=paged_attention_reference, baseline=_paged,
        rows=("q", "block_table", "lengths"), grads=(), what="the same against a cache in pages", largest=1.0,
        sizes={
            "b": (1, 3), "h": (1, 2), "group": (1, 4), "n": (0, 16), "d": [8, 40, 64, 128], "page": [16, 48, 64],
            "per": (1, 4),
        },
        real=tuple({"b": 3, "h": 4, "group": 8, "n": n, "d": 128, "page": 64, "per": 60} for n in (1, 5)),
    ),
    "append_to_pages": Case(
        function=append_to_pages, given=_given_pages, options={"new": True},
        reference=append_to_pages_reference, rows=(), grads=(), but=("empty",), writes=("k_pages", "v_pages"),
        what="write new keys and values into those pages",
        sizes={"b": (1, 3), "h": (1, 2), "n": (0, 16), "d": [8, 40, 64, 128], "page": [16, 48, 64], "per": (1, 4)},
    ),
}  # fmt: skip


def compiled(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that are compiled for a GPU: on one with every head size, and every height of a tile of a few queries."""
    every = target == ONE_TARGET
    heads = (16, 32, 64, 80, 128, 256) if every else (64, 128)
    wide = {"sm_90": (64, 128), "sm_75": (64, 128, 256)}.get(target, (64,))
    one: dict[str, Any] = {"b": 1, "n": 1024, "s": 1024}
    more: dict[str, Any]
    apart = lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 1)[..., :-1]  # noqa: E731
    for d in heads:
        for more in ({}, {"lie": apart}, {"within": plain_kernels}):
            yield "flash_attention", one | {"d": d} | more
    for d in wide:
        for more in ({}, {"lie": apart}):
            yield "flash_attention", one | {"d": d, "dtype": torch.float32} | more
    yield "flash_attention", one | {"n": 2048, "s": 2048, "d": 64, "causal": False, "dtype": torch.float16}
    yield "flash_attention", one | {"n": 10000, "s": 10000, "d": 64}
    if every:
        yield "flash_attention", one | {"n": 16384, "s": 16384, "d": 128, "causal": False}
    yield "flash_attention", one | {"b": 2, "d": 128, "lengths": True, "window": 200}
    for d, window in ((64, None), (128, None), (128, 128), (256, None)):
        yield "flash_attention", one | {"d": d, "window": window, "sequences": True}
    few = [(4, 8, 1, 128, torch.bfloat16)]
    if every:
        few += [(8, 4, 16, 128, torch.bfloat16), (8, 8, 16, 128, torch.bfloat16), (4, 4, 16, 256, torch.bfloat16)]
        few += [(16, 1, 1, 64, torch.float32), (4, 2, 4, 256, torch.float32)]
    for h, group, n, d, dtype in few:
        queries = {"b": 2, "h": h, "group": group, "n": n, "d": d, "dtype": dtype, "needs": ()}
        yield "flash_attention", queries | {"s": 8192}
        yield "paged_attention", queries | {"page": 64, "per": 128}
    yield "append_to_pages", {"b": 2, "h": h, "d": d, "page": 64, "per": 128, "dtype": dtype}
    shared: dict[str, Any] = one | {"h": 1, "group": 8}
    for d, more in (  # gpt-oss' two kinds of layers, Gemma 2's
        (64, {}), (64, {"window": 128}), (256, {"softcap": 50.0}), (256, {"softcap": 50.0, "window": 512})
    ):  # fmt: skip
        sizes = shared | {"d": d, "sinks": d == 64} | more
        yield "flash_attention", sizes
        yield "flash_attention", sizes | {"n": 1, "needs": ()}
    yield "paged_attention", {"h": 1, "group": 8, "d": 64, "page": 64, "per": 16, "sinks": True}
    for d in heads:
        yield "flash_attention", one | {"d": d, "within": runtime.same_bits}
        queries = {"b": 2, "h": 4, "group": 8, "n": 1, "d": d, "needs": (), "within": runtime.same_bits}
        yield "flash_attention", queries | {"s": 8192, "causal": False}
        yield "paged_attention", queries | {"page": 64, "per": 128}
    for d in wide:
        yield "flash_attention", one | {"d": d, "dtype": torch.float32, "within": runtime.same_bits}
    for more in ({"sequences": True}, {"sinks": True, "window": 128, "softcap": 50.0}):
        yield "flash_attention", shared | {"d": 64, "needs": (), "within": runtime.same_bits} | more


# What the page "Compiled" shows.
STATED = {
    "flash_attention, 4,096 tokens, heads of 128, causal, bfloat16": [
        ("flash_attention", {"b": 4, "h": 16, "group": 1, "n": 4096, "s": 4096, "d": 128})
    ]
}
