"""Experts that bitsandbytes quantized, on the kernels."""

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("bitsandbytes.nn.parametrize")

import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit as replace
from tiny_models import dequantized, tiny_model, tokens, with_lora

from kernelbook.interop import bitsandbytes as interop_bnb
from kernelbook.interop import transformers as interop
from kernelbook.nf4 import nf4_dequantize

# On the CPU bitsandbytes dequantizes rightly only where blocks do not span two rows.
SIZES = {
    "qwen3_moe": {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 64},
    "olmoe": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64},
}


def _quantized(name: str, **settings: Any) -> Any:
    model = tiny_model(name, **SIZES[name])
    for _, experts in interop.expert_modules(model):
        for weight in ("gate_up_proj", "down_proj"):
            replace(experts, weight, **settings)
    return model


@pytest.mark.parametrize("compress_statistics", (False, True), ids=("plain", "double"))
@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
def test_experts_are_taken_as_they_are(quant_type: str, compress_statistics: bool) -> None:
    model = _quantized("qwen3_moe", quant_type=quant_type, compress_statistics=compress_statistics)
    experts = next(interop.expert_modules(model))[1]
    q = interop_bnb.parametrized_weight(experts, "gate_up_proj")
    assert q.packed.data_ptr() == experts.parametrizations["gate_up_proj"].original.data_ptr(), "shared, not copied"
    assert torch.equal(nf4_dequantize(q, dtype=torch.float32), experts.gate_up_proj)
    dense, ids = dequantized("qwen3_moe", model, **SIZES["qwen3_moe"]), tokens()
    with torch.no_grad():
        expected = dense(ids).logits
        assert torch.equal(model(ids).logits, expected), "bitsandbytes' own way"
        torch.testing.assert_close(interop.use_kernels(model)(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_lora_on_them() -> None:
    model = with_lora(tiny_model("olmoe", **SIZES["olmoe"]), target_modules=[])
    dense = copy.deepcopy(model)
    for (_, experts), (_, plain) in zip(interop.expert_modules(model), interop.expert_modules(dense), strict=True):
        for weight in ("gate_up_proj", "down_proj"):
            replace(experts, weight)
            getattr(plain, weight).data.copy_(getattr(experts, weight))
    interop.use_kernels(model)
    ids = tokens()
    for each in (model, dense):
        each(ids, labels=ids).loss.backward()
    grads = {name: p.grad for name, p in dense.named_parameters() if p.requires_grad}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == grads.keys() and len(trained) == 4
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-5)


def test_another_parametrization_is_refused() -> None:
    model = tiny_model("olmoe", **SIZES["olmoe"])
    experts = next(interop.expert_modules(model))[1]
    with pytest.raises(ValueError, match="replace_parameter_4bit, got an ordinary parameter"):
        interop_bnb.parametrized_weight(experts, "down_proj")
    interop.quantize_experts(model)
    with pytest.raises(ValueError, match=r"replace_parameter_4bit, got \['NF4Parametrization'\]"):
        interop_bnb.parametrized_weight(experts, "down_proj")
