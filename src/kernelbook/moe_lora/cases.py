"""Calls of this room's functions, and what each promises."""

from typing import Any

import torch

from kernelbook.cases import Case, Given, draw, draw_shares
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
    tokens: int = 4, experts: int = 3, slots: int = 2, k: int = 32, n: int = 24, skipped: float = 0.0, **options: Any
) -> Given:
    routed = routing(tokens=tokens, experts=experts, slots=slots, skipped=skipped)
    x = draw(routed.rows if options.get("grouped_in") else tokens, k)
    return {"x": x, "w": draw(experts, k, n) / k**0.5, "routing": routed, **options}


def given_lora(
    rank: int = 2, bias: bool = False, gates: bool = False, kind: str | None = None, scaling: float = 0.5, **sizes: Any
) -> Given:
    """No LoRA where ``rank`` is zero; weights in 4 bits of a ``kind``."""
    if gates:
        sizes["grouped_out"] = False
    given = _given_base(**sizes)
    experts, k, n = given["w"].shape
    lora = (
        {"lora_a": draw(experts, rank, k) / k**0.5, "lora_b": draw(experts, n, rank)}
        if rank
        else {"lora_a": None, "lora_b": None}
    )
    lora |= {"bias": draw(experts, n)} if bias else {}
    lora |= {"gates": draw_shares(*given["routing"].expert_ids.shape)} if gates else {}
    return given | ({"w": weights(experts, n, k, kind=kind)} if kind else {}) | lora | {"scaling": scaling}


def _lists(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    found = route(expert_ids, num_experts)
    return found.order, found.inverse, found.offsets


def _base(x: torch.Tensor, w: torch.Tensor, routing: Routing, **options: Any) -> torch.Tensor:
    return scatter2scatter_reference(x, w, routing.expert_ids, **options)


def _lora(x: torch.Tensor, w: Any, routing: Routing, strategy: str = "auto", **given: Any) -> torch.Tensor:
    dense = w if isinstance(w, torch.Tensor) else w.as_float64().to(x.dtype).mT
    return moe_lora_reference(x, dense, expert_ids=routing.expert_ids, **given)


FLAG = (False, True)
SIZES = {"tokens": (0, 257), "experts": [1, 4, 7], "slots": (1, 3), "n": (1, 257), "skipped": [0.0, 0.3]}
OPTIONS = {"bias": FLAG, "gates": FLAG, "strategy": ["auto", "fused", "split"]}
GROUPED = {"k": (1, 128), "grouped_in": FLAG, "grouped_out": FLAG}
REAL = tuple(
    dict(zip(("tokens", "experts", "slots", "k", "n", "rank"), problem, strict=True)) | {"strategy": strategy, "skipped": 0.05} | more
    for problem in ((500, 16, 4, 512, 768, 16), (333, 7, 2, 1000, 520, 64), (2048, 64, 8, 256, 384, 32), (64, 5, 2, 257, 130, 3))
    for strategy in ("fused", "split")
    for more in ({}, {"grouped_in": True, "bias": True, "gates": True})
)  # fmt: skip

CASES = {
    "route": Case(
        function=_lists, given=lambda experts=3, **sizes: {"expert_ids": choose(experts=experts, **sizes), "num_experts": experts},
        reference=route_reference, rows=("expert_ids",), grads=(), but=("forward mode",), what="sort tokens by expert",
        sizes={name: SIZES[name] for name in ("tokens", "experts", "slots", "skipped")},
    ),
    "scatter2scatter": Case(
        function=scatter2scatter, given=_given_base, reference=_base, rows=("x", "routing"),
        what="each token times its experts' matrices", sizes=SIZES | GROUPED,
    ),
    "moe_lora": Case(
        function=moe_lora, given=given_lora, options={"bias": True, "gates": True}, reference=_lora,
        rows=("x", "routing", "gates"), what="the same with LoRA on each expert", plain={"bias": False, "gates": False},
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
            {"tokens": tokens, "experts": 5, "k": 320, "n": 208, "rank": rank, "kind": kind}
            for tokens in (2, 40, 700) for rank in (0, 20) for kind in ("64", "64 double", "mxfp4", "nvfp4")
        ),
    ),
}  # fmt: skip
