"""A call that raises leaves the modules that it was given as they were: one test over all that change modules."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrize

from kernelbook import runtime
from kernelbook.distributed import ExpertParallel, by_expert
from kernelbook.interop import transformers as interop
from kernelbook.nn import GatedExperts, NF4Linear, swap
from kernelbook.nn.moe import quantize_parameter

MESH: Any = types.SimpleNamespace(ndim=1, size=lambda: 2)  # nothing is asked of it before the module has been looked at


def _experts() -> GatedExperts:
    return GatedExperts(2, 64, 64, device=runtime.DEVICE)


def _half_packed(name: str) -> GatedExperts:
    experts = _experts()
    quantize_parameter(experts, name)
    return experts


def _parametrized() -> GatedExperts:
    """Its second weight is of a form that is not sharded."""
    experts = _half_packed("gate_up")
    parametrize.register_parametrization(experts, "down", nn.Identity())
    return experts


def _blocks_of_two_experts() -> GatedExperts:
    """Its first weight can be laid out by expert, its second not: an expert of it has half a block."""
    experts = GatedExperts(2, 16, 16, device=runtime.DEVICE)
    quantize_parameter(experts, "gate_up", block_size=512)
    quantize_parameter(experts, "down", block_size=512)
    return experts


def _in_double(model: Any) -> Any:
    """The last layer's experts are in float64, which is not quantized."""
    last = list(interop.expert_modules(model))[-1][1]
    last.down_proj = nn.Parameter(last.down_proj.detach().double())
    return model


class _LikeTransformers(nn.Sequential):
    """A norm that is changed, and what looks like a model of transformers until it is asked for its configuration."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(16), nn.RMSNorm(16))

    def set_attn_implementation(self, name: str) -> None: ...


Make = Callable[[], nn.Module]
CALLS: dict[str, tuple[Make, Callable[[Any], Any], type[Exception]]] = {
    "add_lora, a rank of another kind": (_experts, lambda m: m.add_lora(2.0), TypeError),
    "add_lora, an alpha of another kind": (_experts, lambda m: m.add_lora(2, alpha="4"), TypeError),
    "add_lora, a dtype without gradients": (_experts, lambda m: m.add_lora(2, dtype=torch.int8), ValueError),
    "add_lora of a linear layer": (lambda: NF4Linear(64, 64, device=runtime.DEVICE), lambda m: m.add_lora(2.0), TypeError),
    "add_lora of a linear layer, a dtype": (
        lambda: NF4Linear(64, 64, device=runtime.DEVICE), lambda m: m.add_lora(2, dtype=torch.int8), ValueError
    ),
    "add_lora twice": (lambda: _experts().add_lora(2), lambda m: m.add_lora(3), ValueError),
    "quantize, one is packed already": (lambda: _half_packed("down"), lambda m: m.quantize(), ValueError),
    "quantize, a block size": (_experts, lambda m: m.quantize(block_size=7), ValueError),
    "by_expert": (_blocks_of_two_experts, by_expert, ValueError),
    "parallelize": (_parametrized, lambda m: ExpertParallel()._apply(m, MESH), ValueError),
    "swap": (_LikeTransformers, lambda m: swap(m, quiet=True), AttributeError),
    "quantize_experts": (lambda: _in_double(tiny_model("olmoe")), interop.quantize_experts, TypeError),
    "quantize_experts, a block size": (
        lambda: tiny_model("olmoe"), lambda m: interop.quantize_experts(m, block_size=7), ValueError
    ),
    "use_kernels": (lambda: nn.Sequential(tiny_model("olmoe")), interop.use_kernels, ValueError),
}  # fmt: skip


def _state(model: nn.Module) -> list[Any]:
    """Every module's class and what it holds, every tensor's identity, value and whether it requires a gradient."""
    found: list[Any] = []
    for name, module in model.named_modules():
        others = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found.append((name, type(module), others, list(module._parameters), list(module._buffers)))
        found += [getattr(module, "config", None) and module.config.to_dict()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.append((name, id(tensor), tensor.requires_grad, tensor.dtype, tensor.detach().flatten().tolist()))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_raises_changes_nothing(name: str) -> None:
    make, call, error = CALLS[name]
    model = make()
    before = _state(model)
    with pytest.raises(error):
        call(model)
    assert _state(model) == before
