"""Calls of this room's functions, and what each promises."""

from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import runtime
from kernelbook.cases import ONE_TARGET, Case, Given, draw, draw_shares
from kernelbook.moe_lora.op import moe_lora, scatter2scatter
from kernelbook.moe_lora.reference import moe_lora_reference, route_reference, scatter2scatter_reference
from kernelbook.moe_lora.routing import Routing, route
from kernelbook.packed.cases import weights


def choose(tokens: int = 4, experts: int = 3, slots: int = 2, skipped: float = 0.0) -> torch.Tensor:
    """The experts of each token; a share of the slots has none."""
    chosen = draw_shares(tokens, experts).argsort(1)[:, : min(slots, experts)].contiguous()
    return chosen.masked_fill(draw_shares(*chosen.shape) < skipped, experts)


def routing(**sizes: Any) -> Routing:
    return route(choose(**sizes), sizes.get("experts", 3))


def _given_base(
    tokens: int = 4, experts: int = 3, slots: int = 2, k: int = 32, n: int = 24, skipped: float = 0.0,
    kind: str | None = None, **options: Any,
) -> Given:  # fmt: skip
    """With weights in 4 bits of a ``kind``."""
    routed = routing(tokens=tokens, experts=experts, slots=slots, skipped=skipped)
    x = draw(routed.rows if options.get("grouped_in") else tokens, k)
    w = weights(experts, n, k, kind=kind) if kind else draw(experts, k, n, scale=max(k, 1) ** -0.5)
    return {"x": x, "w": w, "routing": routed, **options}


def given_lora(
    experts: int = 3, k: int = 32, n: int = 24, rank: int = 2, bias: bool = False, gates: bool = False,
    scaling: float = 0.5, **sizes: Any,
) -> Given:  # fmt: skip
    """No LoRA where ``rank`` is zero."""
    given = _given_base(experts=experts, k=k, n=n, **sizes | ({"grouped_out": False} if gates else {}))
    a, b = (draw(experts, rank, k, scale=max(k, 1) ** -0.5), draw(experts, n, rank)) if rank else (None, None)
    given |= {"lora_a": a, "lora_b": b, "scaling": scaling}
    given |= {"bias": draw(experts, n)} if bias else {}
    return given | ({"gates": draw_shares(*given["routing"].expert_ids.shape)} if gates else {})


def _lists(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    found = route(expert_ids, num_experts)
    return found.order, found.inverse, found.offsets


def _dense(w: Any, x: torch.Tensor) -> torch.Tensor:
    return w if isinstance(w, torch.Tensor) else w.as_float64().to(x.dtype).mT


def _base(x: torch.Tensor, w: torch.Tensor, routing: Routing, **options: Any) -> torch.Tensor:
    return scatter2scatter_reference(x, _dense(w, x), routing.expert_ids, **options)


def _lora(x: torch.Tensor, w: Any, routing: Routing, strategy: str = "auto", **given: Any) -> torch.Tensor:
    return moe_lora_reference(x, _dense(w, x), expert_ids=routing.expert_ids, **given)


FLAG = (False, True)
SIZES = {"tokens": (0, 257), "experts": [1, 4, 7], "slots": (1, 3), "n": (0, 257), "skipped": [0.0, 0.3]}
OPTIONS = {"bias": FLAG, "gates": FLAG, "strategy": ["auto", "fused", "split"]}
GROUPED = {"k": (0, 128), "grouped_in": FLAG, "grouped_out": FLAG}
REAL = tuple(
    dict(zip(("tokens", "experts", "slots", "k", "n", "rank"), problem, strict=True)) | {"strategy": strategy, "skipped": 0.05} | more
    for problem in ((500, 16, 4, 512, 768, 16), (333, 7, 2, 1000, 520, 64), (2048, 64, 8, 256, 384, 32), (64, 5, 2, 257, 130, 3))
    for strategy in ("fused", "split")
    for more in ({}, {"grouped_in": True, "bias": True, "gates": True})
)  # fmt: skip

CASES = {
    "route": Case(
        function=_lists, given=lambda experts=3, **sizes: {"expert_ids": choose(experts=experts, **sizes), "num_experts": experts},
        reference=route_reference, rows=("expert_ids",), grads=(), but=("forward mode", "rows alone"), what="sort tokens by expert",
        sizes={name: SIZES[name] for name in ("tokens", "experts", "slots", "skipped")},
    ),
    "scatter2scatter": Case(
        function=scatter2scatter, given=_given_base, reference=_base, rows=("x", "routing"),
        what="each token times its experts' matrices", sizes=SIZES | GROUPED,
        real=tuple(
            {"tokens": tokens, "experts": 5, "k": 320, "n": 208, "kind": "64", "grouped_in": order, "grouped_out": not order}
            for tokens in (9, 40, 300) for order in FLAG
        ),
    ),
    "moe_lora": Case(
        function=moe_lora, given=given_lora, options={"bias": True, "gates": True}, reference=_lora,
        rows=("x", "routing", "gates"), float32=("gates",), what="the same with LoRA on each expert", plain={"bias": False, "gates": False},
        sizes=SIZES | OPTIONS | GROUPED | {"experts": [1, 4, 7, 64], "rank": [0, 1, 8, 16]}, real=REAL,
        large={"tokens": 3, "experts": 600, "k": 2048, "n": 2048, "rank": 16},
    ),
    "moe_lora, in order of experts": Case(
        function=moe_lora, reference=_lora, rows=("x", "routing"),
        given=given_lora, options={"grouped_in": True, "grouped_out": True, "strategy": "fused"},
    ),
    "moe_lora in 4 bits": Case(
        function=moe_lora, given=given_lora, options={"k": 64, "n": 32, "kind": "64"}, reference=_lora,
        rows=("x", "routing"),
        sizes=SIZES | OPTIONS | {"k": [64, 128, 192, 256, 512], "rank": [0, 1, 8, 16], "kind": ["32", "64", "128 double", "mxfp4", "nvfp4"]},
        real=tuple(
            {"tokens": tokens, "experts": 5, "k": 320, "n": 208, "rank": rank, "kind": kind, "bias": True, "skipped": 0.1}
            for tokens in (2, 9, 40, 100, 700) for rank in (0, 20)
            for kind in ("32", "64", "64 double", "4096 double", "mxfp4", "nvfp4")
        ),
    ),
}  # fmt: skip

LORA = ("x", "lora_a", "lora_b")


def compiled(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that are compiled for a GPU: on one at every size at which a rule changes. Those of one packed matrix too."""
    every = target == ONE_TARGET
    large = {
        "tokens": 512,
        "experts": 4,
        "k": 2048,
        "n": 1536,
        "rank": 16,
        "bias": False,
        "gates": False,
        "needs": LORA,
    }
    gated = {"grouped_in": True, "bias": True, "gates": True, "needs": (*LORA, "bias", "gates")}
    odd = gated | {"k": 333, "n": 257, "rank": 3, "dtype": torch.float16}
    for strategy in ("fused", "split"):
        way = large | {"strategy": strategy}
        for rank in (8, 16, 32, 64, 100) if every else (64,):
            yield "moe_lora", way | {"rank": rank}
        yield "moe_lora", way | gated | {"k": 768, "n": 2048}
        for tokens in (2, 16, 32) if every else ():
            yield "moe_lora", way | {"tokens": tokens}
        yield "moe_lora", way | {"k": 72, "n": 40, "rank": 3, "dtype": torch.float32}
    yield "moe_lora", large | odd | {"strategy": "split"}
    yield "scatter2scatter", {"tokens": 512, "experts": 4, "k": 256, "n": 384}
    yield "moe_lora_recomputed", {"tokens": 512, "experts": 4, "k": 256, "n": 384, "rank": 16, "needs": LORA}
    packed = {"experts": 4, "k": 512, "n": 384, "kind": "64 double"}
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (2, 20, 100, 1000):
            for kind in ("16 double", "64 double"):
                yield "scatter2scatter", packed | {"tokens": tokens, "kind": kind, "dtype": dtype}
            yield "moe_lora in 4 bits", packed | {"tokens": tokens, "rank": 64, "strategy": "split", "dtype": dtype}
    apart = lambda t: t.new_empty(100, 328)[:, :320]  # noqa: E731
    yield (
        "scatter2scatter",
        packed | {"tokens": 100, "k": 320, "n": 200, "lie": apart},
    )  # rows and sums of no multiple of 16
    yield "scatter2scatter", {"tokens": 9, "experts": 4, "k": 36, "n": 24, "kind": "32 double", "needs": ()}
    yield "moe_lora", large | {"within": runtime.same_bits}
    yield "moe_lora", large | odd | {"within": runtime.same_bits}
    yield "moe_lora in 4 bits", packed | {"tokens": 100, "rank": 16, "within": runtime.same_bits}
    one: dict[str, Any] = {"experts": 4, "needs": ()}
    for m in (1, 5) if every else ():  # what fills its tiles, and what does not
        for k, kind in ((2048, "64 double"), (2112, "4096 double")):
            yield "nf4_matmul", one | {"m": m, "n": 4096, "k": k, "kind": kind}
    for kind in ("64 double", "4096 double") if every else ():
        yield "nf4_matmul", one | {"m": 16, "n": 16384, "k": 2112, "kind": kind}
    for m in (16, 32, 64) if every else ():  # with parts of K, and without
        for n, k, kind in ((4096, 2112, "64 double"), (14336, 2048, "4096 double")):
            yield "nf4_matmul", one | {"m": m, "n": n, "k": k, "kind": kind}


# What the page "Compiled" shows.
BLOCK = {"tokens": 2048, "experts": 128, "slots": 8, "k": 2048, "n": 1536, "rank": 16, "bias": False, "gates": False}
STATED = {
    "moe_lora, 128 experts, 2,048 to 1,536, 8 of them for each of 2,048 tokens, rank 16, bfloat16": [
        ("moe_lora", BLOCK | {"needs": LORA})
    ]
}
