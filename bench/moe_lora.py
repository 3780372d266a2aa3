"""What is measured of ``moe_lora``: the products of models' experts, with and without low-rank updates, and their gradients."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench import Bench, Calls, Tensors, baselines, passes, routing, step
from bench.models import MODELS as LATEST
from kernelbook import check, runtime
from kernelbook.lab import timing
from kernelbook.moe_lora import op
from kernelbook.moe_lora.reference import (
    grouped_mm_rows,
    moe_lora_reference,
    route_reference,
    scatter2scatter_reference,
)
from kernelbook.packed import NF4, NF4Tensor

# Experts, hidden size, intermediate size, experts a token (from the models' published configurations).
MODELS = {
    "Qwen3.5-35B-A3B": (256, 2048, 512, 8),
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "OLMoE-1B-7B": (64, 2048, 1024, 8),
    "Mixtral-8x7B": (8, 4096, 14336, 2),
}
TOKENS = 2048
RANKS = (16, 32, 64)
# The case of PEFT's own benchmark, https://github.com/huggingface/peft/pull/3577: one product, one expert a token.
PEFT_EXPERTS, PEFT_K, PEFT_N, PEFT_TOKENS = 128, 2048, 768, 4096


@dataclasses.dataclass(frozen=True)
class Shape:
    """E experts with (K, N) matrices, k of them for each of T tokens, rank r; the rows come in expert order if ``grouped``."""

    experts: int
    k: int
    n: int
    slots: int
    tokens: int = TOKENS
    rank: int = 16
    grouped: bool = False

    @property
    def rows(self) -> int:
        return self.tokens * self.slots

    @property
    def named(self) -> dict[str, int]:
        """As ``targets`` and results spell it."""
        return {"E": self.experts, "K": self.k, "N": self.n, "k": self.slots, "T": self.tokens, "r": self.rank}


def projections(model: str) -> dict[str, Shape]:
    """The two products of a model's experts: gate and up in one, whose rows are tokens; down, whose rows are sorted."""
    experts, hidden, intermediate, slots = MODELS[model]
    return {
        "gate_up": Shape(experts, hidden, 2 * intermediate, slots),
        "down": Shape(experts, intermediate, hidden, slots, grouped=True),
    }


class _Inputs:
    """Random tensors, and the routing as both sides take it."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=dtype, device=runtime.DEVICE)

        self.ids = routing(shape.tokens, shape.experts, shape.slots).to(runtime.DEVICE)
        self.routing = op.route(self.ids, shape.experts)
        order, inverse, offsets = route_reference(self.ids, shape.experts)
        self.sorted_routing = (order // shape.slots, inverse, offsets)
        self.x = randn(shape.rows if shape.grouped else shape.tokens, shape.k)
        self.w = randn(shape.experts, shape.k, shape.n) / shape.k**0.5
        self.lora_a = randn(shape.experts, shape.rank, shape.k) / shape.k**0.5
        self.lora_b = randn(shape.experts, shape.n, shape.rank)
        self.dy = randn(shape.rows, shape.n)


def _base(shape: Shape, dtype: torch.dtype) -> timing.Problem:
    """The product without a low-rank update."""
    t = _Inputs(shape, dtype)
    how: dict[str, Any] = {"grouped_in": shape.grouped}
    calls: Calls = {
        "grouped_mm": lambda: [grouped_mm_rows(t.x, t.w, None, None, *t.sorted_routing, **how)],
        "kernelbook": lambda: [op.scatter2scatter(t.x, t.w, t.routing, **how)],
    }

    def truth() -> Tensors:
        return [scatter2scatter_reference(t.x.double(), t.w.double(), t.ids, **how)]

    return timing.Problem(calls, truth, calls["grouped_mm"], check.FORWARD_FACTOR)


def _moe_lora(mode: str, shape: Shape, dtype: torch.dtype) -> timing.Problem:
    """Forward, or both passes with W frozen; -> y, and then dx, dA, dB."""
    t = _Inputs(shape, dtype)
    how: dict[str, Any] = {"grouped_in": shape.grouped}
    leaves = [v.requires_grad_() for v in (t.x, t.lora_a, t.lora_b)]

    def timed(call: Callable[..., torch.Tensor], leaves: Tensors, dy: torch.Tensor) -> Callable[[], Tensors]:
        return passes(mode, call, leaves, [dy]) if mode == "forward" else step(call, leaves, dy)

    def ours(strategy: str) -> Callable[[], Tensors]:
        return timed(lambda x, a, b: op.moe_lora(x, t.w, a, b, t.routing, strategy=strategy, **how), leaves, t.dy)

    def truth() -> Tensors:
        w, exact = t.w.double(), [v.detach().double().requires_grad_() for v in leaves]
        return timed(lambda x, a, b: moe_lora_reference(x, w, a, b, t.ids, **how), exact, t.dy.double())()

    calls: Calls = {
        "grouped_mm": timed(lambda x, a, b: grouped_mm_rows(x, t.w, a, b, *t.sorted_routing, **how), leaves, t.dy),
        "kernelbook": ours("auto"),
        "kernelbook:fused": ours("fused"),
        "kernelbook:split": ours("split"),
    }
    views: dict[str, Callable[[Tensors], Tensors]] = {}
    if mode != "forward" and baselines.has("axolotl"):
        calls["axolotl"], views["axolotl"] = _axolotl(t, shape)
    if mode != "forward" and shape.tokens == PEFT_TOKENS and baselines.has("peft"):  # elsewhere as one of moe_block's
        calls["peft"], views["peft"] = _peft(t, shape)
    factor = check.FORWARD_FACTOR if mode == "forward" else check.GRADIENT_FACTOR
    return timing.Problem(calls, truth, calls["grouped_mm"], factor, views)


def _dx(shape: Shape, dtype: torch.dtype) -> timing.Problem:
    """The gradient of x alone."""
    t = _Inputs(shape, dtype)
    needs = (True, False, False, False, False, False)

    def ours(strategy: str) -> Callable[[], Tensors]:
        call = op.call_of(
            "moe_lora", t.x, t.w, t.routing, t.lora_a, t.lora_b, strategy=strategy, grouped_in=shape.grouped
        )
        return lambda: [op.moe_lora_backward(t.dy, None, *call, needs)[0]]

    def grouped_mm() -> Tensors:
        rows, ends = t.dy[t.routing.order.long()], t.sorted_routing[2][1:].to(torch.int32)
        dx = torch._grouped_mm(rows, t.w.transpose(1, 2), offs=ends)
        dx += torch._grouped_mm(torch._grouped_mm(rows, t.lora_b, offs=ends), t.lora_a, offs=ends)
        if shape.grouped:
            return [dx]
        return [dx[t.sorted_routing[1]].view(shape.tokens, shape.slots, shape.k).sum(1)]

    def truth() -> Tensors:
        x = t.x.double().requires_grad_()
        y = moe_lora_reference(x, t.w.double(), t.lora_a.double(), t.lora_b.double(), t.ids, grouped_in=shape.grouped)
        return torch.autograd.grad(y, x, t.dy.double())

    calls: Calls = {
        "grouped_mm": grouped_mm,
        "kernelbook": ours("auto"),
        "kernelbook:fused": ours("fused"),
        "kernelbook:split": ours("split"),
    }
    return timing.Problem(calls, truth, grouped_mm, check.GRADIENT_FACTOR)


def _quantized(shape: Shape) -> tuple[NF4Tensor, torch.Tensor]:
    """Random NF4 experts, and the float32 numbers (E, K, N) that they stand for."""
    sizes, device = (shape.experts, shape.n, shape.k), runtime.DEVICE
    elements = math.prod(sizes)
    code = torch.tensor(NF4.values, device=device)
    packed = torch.randint(256, (elements // 2,), dtype=torch.uint8, device=device)
    absmax = (1 + torch.rand(elements // 64, device=device)) / shape.k**0.5
    dense = torch.empty(sizes, device=device)
    for expert, bytes_, scales in zip(dense, packed.chunk(len(dense)), absmax.chunk(len(dense)), strict=True):
        codes = torch.stack([bytes_ >> 4, bytes_ & 15], -1).view(-1, 64).int()
        torch.mul(code[codes], scales[:, None], out=expert.view(-1, 64))
    return NF4Tensor(packed, absmax, sizes, 64, code), dense.transpose(1, 2)


def _packed(shape: Shape, dtype: torch.dtype) -> timing.Problem:
    """The product with experts in 4 bits, beside the one with the same experts dense."""
    how: dict[str, Any] = {"grouped_in": shape.grouped}
    t, (q, exact) = _Inputs(shape, dtype), _quantized(shape)
    w = exact.transpose(1, 2).to(dtype).transpose(1, 2)
    calls: Calls = {
        "grouped_mm": lambda: [grouped_mm_rows(t.x, w, None, None, *t.sorted_routing, **how)],
        "kernelbook:dense": lambda: [op.scatter2scatter(t.x, w, t.routing, **how)],
        "kernelbook": lambda: [op.scatter2scatter(t.x, q, t.routing, **how)],
    }
    if baselines.has("nf4_grouped"):
        from nf4_grouped import gemm_4bit_grouped

        given, rows_of = _for_grouped_nf4_gemm(t, q, shape)
        calls["grouped_nf4_gemm"] = lambda: [gemm_4bit_grouped(rows_of(t.x), *given)[t.sorted_routing[1]]]

    def truth() -> Tensors:
        return [scatter2scatter_reference(t.x.double(), exact.double(), t.ids, **how)]

    return timing.Problem(calls, truth, calls["grouped_mm"], check.FORWARD_FACTOR)


def _packed_step(shape: Shape, dtype: torch.dtype) -> timing.Problem:
    """Both passes with LoRA, with experts in 4 bits and with the same ones dense."""
    t, (q, exact) = _Inputs(shape, dtype), _quantized(shape)
    w = exact.transpose(1, 2).to(dtype).transpose(1, 2)
    leaves = [v.requires_grad_() for v in (t.x, t.lora_a, t.lora_b)]

    def ours(weight: Any) -> Callable[[], Tensors]:
        return step(lambda x, a, b: op.moe_lora(x, weight, a, b, t.routing), leaves, t.dy)

    def truth() -> Tensors:
        own = [v.detach().double().requires_grad_() for v in leaves]
        return step(lambda x, a, b: moe_lora_reference(x, exact.double(), a, b, t.ids), own, t.dy.double())()

    calls: Calls = {"kernelbook:dense": ours(w), "kernelbook": ours(q)}
    if baselines.has("nf4_qlora"):
        from nf4_qlora import fused_grouped_lora

        given, rows_of = _for_grouped_nf4_gemm(t, q, shape)

        def peer(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = fused_grouped_lora(rows_of(x), *given, a, b)
            return out[t.sorted_routing[1]]

        calls["grouped_nf4_gemm"] = step(peer, leaves, t.dy)
    return timing.Problem(calls, truth, calls["kernelbook:dense"], check.GRADIENT_FACTOR)


def _route(shape: Shape, dtype: torch.dtype) -> timing.Problem:
    """Sorting alone; -> order, inverse, offsets."""
    ids = _Inputs(dataclasses.replace(shape, k=1, n=1, rank=1), dtype).ids

    def as_numbers(out: Tensors) -> Tensors:
        return [v.double() for v in out]

    def ours() -> Tensors:
        routing = op.route(ids, shape.experts)
        return [routing.order, routing.inverse, routing.offsets]

    def exact() -> Tensors:
        return as_numbers(route_reference(ids, shape.experts))

    calls: Calls = {"torch": lambda: route_reference(ids, shape.experts), "kernelbook": ours}
    return timing.Problem(calls, exact, exact, check.FORWARD_FACTOR, dict.fromkeys(calls, as_numbers))


# --- counts ---------------------------------------------------------------------------------------------------------


def _count(name: str, mode: str, shape: Shape) -> tuple[int, int]:
    """Elements of 16 bits that a family's call reads and writes at least, and operations."""
    if name == "route":
        return 4 * shape.rows, 0
    used = len(routing(shape.tokens, shape.experts, shape.slots).unique())  # experts that have rows
    weights, sides = shape.k * shape.n, shape.k + shape.n
    elements = (shape.rows if shape.grouped else shape.tokens) * shape.k + used * weights + shape.rows * shape.n
    flop = 2 * shape.rows * weights
    if name.startswith("moe_lora"):
        elements, flop = elements + used * shape.rank * sides, flop + 2 * shape.rows * shape.rank * sides
    if name.endswith("nf4"):  # 4 bits, and a scale of 32 for 64 elements, instead of 16 bits
        elements -= round(used * weights * (1 - 4.5 / 16))
    if mode == "forward_backward":
        # Of the factors' gradients. Read: x, dy, U and D. Written: dA and dB.
        factors = shape.tokens * shape.k + shape.rows * (shape.n + 2 * shape.rank) + shape.experts * shape.rank * sides
        elements, flop = 2 * elements + factors, 2 * (flop + shape.rows * shape.rank * sides)
    return elements, flop


# By function and pass what makes the calls.
FAMILIES: dict[tuple[str, str], Callable[..., timing.Problem]] = {
    ("scatter2scatter", "forward"): _base,
    ("moe_lora", "forward"): functools.partial(_moe_lora, "forward"),
    ("moe_lora", "forward_backward"): functools.partial(_moe_lora, "forward_backward"),
    ("moe_lora_dx", "backward"): _dx,
    ("scatter2scatter_nf4", "forward"): _packed,
    ("moe_lora_nf4", "forward_backward"): _packed_step,
    ("route", "forward"): _route,
}


def _case(name: str, mode: str, shape: Shape, x_name: str = "r") -> timing.Case:
    dtype, (elements, flop) = torch.bfloat16, _count(name, mode, shape)
    build = functools.partial(FAMILIES[name, mode], shape, dtype)
    x, gbytes = shape.named[x_name], elements * dtype.itemsize / 1e9
    return timing.Case(name, mode, dtype, shape.named, x_name, x, gbytes, flop / 1e9, build)


def cases() -> Iterator[timing.Case]:
    """Every projection, gate_up at each rank; then sweeps over tokens and experts, where fused and split change places."""
    for model in MODELS:
        for shape in projections(model).values():
            yield _case("scatter2scatter", "forward", shape)
            yield _case("moe_lora_dx", "backward", shape)
            for rank in RANKS[:1] if shape.grouped else RANKS:
                ranked = dataclasses.replace(shape, rank=rank)
                yield _case("moe_lora", "forward", ranked)
                yield _case("moe_lora", "forward_backward", ranked)
        yield _case("route", "forward", projections(model)["gate_up"])
    for model in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
        for tokens in (1, 4, 16, 64, 256, 1024, 4096):
            shape = dataclasses.replace(projections(model)["gate_up"], tokens=tokens)
            yield _case("moe_lora", "forward", shape, "T")
    for projection in projections("Qwen3-30B-A3B").values():
        for tokens in (1, 4, 16, 64, 256, 1024, 2048):
            yield _case("scatter2scatter_nf4", "forward", dataclasses.replace(projection, tokens=tokens), "T")
    for model in ("Qwen3-30B-A3B", "OLMoE-1B-7B"):
        yield _case("moe_lora_nf4", "forward_backward", projections(model)["gate_up"])
    yield _case("moe_lora", "forward_backward", Shape(PEFT_EXPERTS, PEFT_K, PEFT_N, 1, PEFT_TOKENS))
    many_experts = projections("Qwen3-30B-A3B")["gate_up"]
    for tokens in (1, 16, 128, 1024, 16384):
        yield _case("route", "forward", dataclasses.replace(many_experts, tokens=tokens), "T")
    for rank in (16, 64):
        for experts in (8, 16, 32, 64, 128, 256):
            yield _case("moe_lora", "forward", Shape(experts, 2048, 1536, 8, rank=rank), "E")


def models() -> Iterator[timing.Case]:
    """The experts of this year's models at 2,048 tokens; of the largest the share of one GPU of four."""
    for model in LATEST.values():
        if model.experts:
            share = 4 if model.experts * model.hidden * model.expert_intermediate > 2**31 else 1
            experts, slots = model.experts // share, max(1, model.slots // share)
            for k, n, grouped in (
                (model.hidden, 2 * model.expert_intermediate, False),
                (model.expert_intermediate, model.hidden, True),
            ):
                shape = Shape(experts, k, n, slots, grouped=grouped)
                yield _case("moe_lora", "forward", shape)
                yield _case("moe_lora", "forward_backward", shape)


# --- peers that may be missing --------------------------------------------------------------------------------------


def _axolotl(t: _Inputs, shape: Shape) -> tuple[Callable[[], Tensors], Callable[[Tensors], Tensors]]:
    """A step of axolotl's ScatterMoE LoRA with the faster of its ways to dX; and its result in our layout.

    Its A and B keep the experts side by side: (E r, K) and (N, E r).
    """
    apply = baselines.axolotl("parallel_linear_lora").parallel_linear_lora
    experts, order = torch.sort(t.ids.flatten())
    offsets = torch.bincount(experts, minlength=shape.experts).cumsum(0)
    a = t.lora_a.detach().reshape(-1, shape.k).clone().requires_grad_()
    b = t.lora_b.detach().transpose(0, 1).reshape(shape.n, -1).clone().requires_grad_()
    slots = 1 if shape.grouped else shape.slots

    def lora(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = apply(
            x, t.w, slots, experts, order, offsets, a, b, grouped_in=shape.grouped, use_fused_dX=True
        )
        return out

    def ours(out: Tensors) -> Tensors:
        y, dx, da, db = out
        by_expert = db.view(shape.n, shape.experts, shape.rank).transpose(0, 1)
        return [y.view(shape.rows, shape.n), dx, da.view(t.lora_a.shape), by_expert]

    return step(lora, (t.x, a, b), t.dy), ours


def _peft(t: _Inputs, shape: Shape) -> tuple[Callable[[], Tensors], Callable[[Tensors], Tensors]]:
    """A step as PEFT has it: each pair is added to its expert's whole matrix, then PyTorch's grouped product; and its layout.

    Its A and B are (E r, K) and (N, r E), of which the experts are slowest in A and fastest in B.
    """
    import peft

    class Experts(torch.nn.Module):
        is_transposed = True  # (E, K, N), as PEFT asks

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(t.w, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return grouped_mm_rows(x, self.weight, None, None, *t.sorted_routing, grouped_in=shape.grouped)

    settings = peft.LoraConfig(r=shape.rank, lora_alpha=shape.rank, target_modules=[], target_parameters=["0.weight"])
    holder: Any = torch.nn.Sequential(Experts())
    model: Any = peft.get_peft_model(holder, settings, autocast_adapter_dtype=False)
    wrapper = model.base_model.model[0]
    a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    a.data.copy_(t.lora_a.detach().flatten(0, 1))
    b.data.copy_(t.lora_b.detach().permute(1, 2, 0).flatten(1))

    def ours(out: Tensors) -> Tensors:
        y, dx, da, db = out
        return [y, dx, da.view(t.lora_a.shape), db.view(shape.n, shape.rank, shape.experts).permute(2, 0, 1)]

    return step(lambda x, a, b: wrapper(x), (t.x, a, b), t.dy), ours


def _for_grouped_nf4_gemm(
    t: _Inputs, q: NF4Tensor, shape: Shape
) -> tuple[tuple[Any, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """The same bytes as grouped-nf4-gemm takes them, the rows of each expert that has some, counted by the host beforehand,
    and these experts; and what brings the rows in order."""
    counts = t.sorted_routing[2].diff()
    chosen = counts.nonzero()[:, 0]
    packed = q.packed.view(shape.experts, shape.n, shape.k // 2)
    given = (packed, q.absmax.view(shape.experts, shape.n, -1), counts[chosen].tolist(), chosen.int())
    return given, lambda x: x if shape.grouped else x[t.sorted_routing[0]]


BENCH = Bench(
    name="moe_lora",
    # Of axolotl its kernels are enough: pip install --no-deps.
    baselines={"torch": "torch", "grouped_mm": "torch", "axolotl": "axolotl", "peft": "peft"}
    | {"grouped_nf4_gemm": "grouped-nf4-gemm"},
    cases=cases,
    models=models,
)
