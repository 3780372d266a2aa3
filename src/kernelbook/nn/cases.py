"""Calls of the modules, and of the functions beside them."""

from collections.abc import Callable
from typing import Any

import torch

from kernelbook import nn, runtime
from kernelbook.cases import Case, Given, draw, draw_shares, ids
from kernelbook.moe_lora.cases import choose
from kernelbook.packed.cases import weights
from kernelbook.sparse_linear.cases import EVERY_CHUNK, given_layer


def _call(module: torch.nn.Module, **given: Any) -> Any:
    """The module with what is given by its parameters' names in their place, and all else as its inputs."""
    names = dict(module.named_parameters())
    parameters = {n: value for n, value in given.items() if n in names}
    inputs = tuple(value for n, value in given.items() if n not in names)
    return torch.func.functional_call(module, parameters, inputs)


def _module(make: Callable[[], torch.nn.Module], inputs: Callable[[], Given]) -> Case:
    """A module as a function of its inputs and of the parameters that it trains."""

    def given() -> Given:
        with runtime.DEVICE:
            module = make()
        trained = {n: draw(*p.shape) / 4 for n, p in module.named_parameters() if p.requires_grad}
        return {"module": module, **inputs(), **trained}

    return Case(function=_call, given=given)


def _with(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _experts() -> nn.GatedExperts:
    return nn.GatedExperts(3, 64, 32)


def _rows() -> Given:
    return {"x": draw(4, 32)}


def _tokens() -> Given:
    return {"x": draw(4, 64)}


def routed() -> Given:
    return {"x": draw(4, 64), "expert_ids": choose(), "gates": draw_shares(4, 2)}


def _given_experts() -> Given:
    return {**routed(), "gate_up": draw(3, 64, 64) / 8, "down": draw(3, 64, 32) / 8}


def _packed_experts(active: str) -> Case:
    """Experts in 4 bits, and what reaches the products of them."""
    packed = lambda: {"gate_up": weights(3, 64, 64), "down": weights(3, 64, 32), "active": active}  # noqa: E731
    return Case(function=nn.gated_experts, given=lambda: routed() | packed())


def _float8_experts() -> Given:
    given, one = _given_experts(), torch.ones(3, 1, 1, device=runtime.DEVICE)
    return given | {n: nn.Float8Tensor(given[n].to(torch.float8_e4m3fn), one.clone()) for n in ("gate_up", "down")}


def _same_bits_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    with runtime.same_bits():
        return nn.linear(x, weight, bias)


CASES = {
    "gated_experts": Case(
        function=nn.gated_experts,
        given=_given_experts,
        rows=("x", "expert_ids", "gates"),
        lowered=("x", "gate_up", "down"),
    )
}
MODULES = {
    "LayerNorm": _module(lambda: nn.LayerNorm(32), _rows),
    "RMSNorm": _module(lambda: nn.RMSNorm(32), lambda: {"x": draw(4, 32), "residual": draw(4, 32)}),
    "SparseLinear": _module(lambda: _with(nn.SparseLinear(32, 48, chunk_size=16), active_chunks=ids(2, 0)), _rows),
    "SparseLinear, compact": _module(
        lambda: _with(nn.SparseLinear(32, 48, chunk_size=16, compact_gradient=True), active_chunks=ids(2, 0)), _rows
    ),
    "SparseFFN": _module(
        lambda: _with(nn.SparseFFN(32, 9, gated=True, bias=True, activation="silu"), neurons=ids(1, 7, 4)), _rows
    ),
    "SameBitsLinear": _module(lambda: nn.SameBitsLinear(32, 24), _rows),
    "linear": Case(
        function=_same_bits_linear, given=lambda: {"x": draw(4, 32), "weight": draw(24, 32), "bias": draw(24)}
    ),
    "ClampedSwiGLU": Case(function=lambda h: nn.ClampedSwiGLU()(h), given=lambda: {"h": draw(4, 32)}),
    "swiglu": Case(function=nn.swiglu.swiglu, given=lambda: {"h": draw(4, 32)}),
    "compact_sparse_linear": Case(function=nn.compact_sparse_linear, given=given_layer, options=EVERY_CHUNK),
    "load_balancing_loss": Case(
        function=nn.load_balancing_loss, given=lambda: {"probabilities": draw_shares(4, 3), "expert_ids": choose()},
        but=("forward mode",),  # which is PyTorch's
    ),
    "NF4Linear": _module(lambda: nn.NF4Linear(64, 8), _tokens),
    "NF4Linear with LoRA": _module(lambda: nn.NF4Linear(64, 8).add_lora(2), _tokens),
    "GatedExperts": _module(_experts, routed),
    "GatedExperts with LoRA": _module(lambda: _experts().add_lora(2), routed),
    "GatedExperts in 4 bits": _module(lambda: _experts().quantize(), routed),
    "GatedExperts in 4 bits with LoRA": _module(lambda: _with(_experts().quantize().add_lora(2), active="all"), routed),
    "MoELayer": _module(lambda: nn.MoELayer(3, 64, 32, slots=2), _tokens),
    "gated_experts, bound": _packed_experts("bound"),
    "gated_experts, all": _packed_experts("all"),
    "gated_experts in float8": Case(function=nn.gated_experts, given=_float8_experts),
    "GPT": _module(
        lambda: nn.GPT(nn.GPTConfig(11, context=8, width=32, heads=2, depth=1, chunk_size=16)),
        lambda: {"tokens": ids(1, 5, 3, 0)[None]},
    ),
}  # fmt: skip
