"""transformers' mixture-of-experts models on the kernels, against their own eager implementation."""

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")

import torch
import transformers
from tiny_models import MODELS, assert_as_eager, dequantized, tiny_model, tokens
from transformers.integrations import moe as hf_moe

from kernelbook import check, runtime
from kernelbook.interop import expert_parallel, transformers_experts
from kernelbook.interop import transformers as interop
from kernelbook.nn import experts as nn_experts
from kernelbook.nn import moe


@pytest.mark.parametrize("name", MODELS)
def test_model_is_as_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters train here, the experts' dense weights too; and transformers' own switch goes there and back."""
    model, ids, calls, real = tiny_model(name), tokens(), [], nn_experts.moe_lora
    monkeypatch.setattr(nn_experts, "moe_lora", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    assert_as_eager(model, interop.use_kernels)
    assert len(calls) == 2 * model.config.num_hidden_layers
    with torch.no_grad():
        expected = model(ids).logits
        model.set_experts_implementation(interop.NAME)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        model.set_experts_implementation("eager")
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("experts", ("eager", "batched_mm", interop.NAME))
def test_quantized_and_then_converted(experts: str) -> None:
    """Every implementation reads experts in the dtype that the model has now."""
    model, ids = tiny_model("qwen3_moe", num_hidden_layers=1), tokens()
    interop.register()
    interop.quantize_experts(model, block_size=32)
    dense = dequantized("qwen3_moe", model, num_hidden_layers=1)
    model.set_experts_implementation(experts)
    with torch.no_grad():
        truth = copy.deepcopy(dense).double()(ids).logits
        check.compare("logits", model.bfloat16()(ids).logits, truth, dense.bfloat16()(ids).logits).require()


def test_a_saved_model_is_loaded_onto_the_kernels(tmp_path: Path) -> None:
    interop.register()
    model, ids = interop.use_kernels(tiny_model("qwen3_moe")), tokens()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation=interop.NAME).to(runtime.DEVICE)
    assert again.config._experts_implementation == interop.NAME
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache(name: str) -> None:
    model, ids = tiny_model(name), tokens(2, 5)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    expected = model.generate(ids, **options)
    assert torch.equal(interop.use_kernels(model).generate(ids, **options), expected)


# --- other kinds of experts -----------------------------------------------------------------------------------------


class _OtherExperts(torch.nn.Module):
    """Experts as gpt-oss (transposed, with biases, another gate) and Nemotron-H (no gate) have them, and a norm at the end."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = torch.nn.Parameter(torch.randn(config.up))
        self.up_proj = self.gate_up_proj
        self.down_proj = torch.nn.Parameter(torch.randn(config.down))
        self.gate_up_proj_bias = self.up_proj_bias = torch.nn.Parameter(torch.randn(4, max(config.up[1:])))
        self.down_proj_bias = torch.nn.Parameter(torch.randn(4, 12))
        self.act_fn = torch.nn.GELU()
        self.post_expert_norm = torch.nn.RMSNorm(12)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Interleaved(_OtherExperts):
    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h[:, ::2]) * (h[:, 1::2] + 1)


@pytest.mark.parametrize(
    ("base", "flags"),
    (
        (_Interleaved, {"is_transposed": True, "has_bias": True, "is_concatenated": False}),
        (_OtherExperts, {"has_gate": False}),
        (_OtherExperts, {}),
        (_OtherExperts, {"has_post_expert_norm": True}),
    ),
    ids=("transposed, biases, own gate", "no gate", "gelu", "norm"),
)
def test_other_experts_are_as_batched_mm(base: type, flags: dict[str, bool]) -> None:
    """The flags that the interface has for models are followed: batched_mm is transformers' own reading of them."""
    try:
        kind = hf_moe.use_experts_implementation(type("Experts", (base,), {}), **flags)
    except TypeError:
        pytest.skip(f"transformers {transformers.__version__} has no {', '.join(flags)}")
    inner = 10
    up, down = (4, (1 if flags.get("has_gate") is False else 2) * inner, 12), (4, 12, inner)
    if flags.get("is_transposed"):
        up, down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
    experts = kind(types.SimpleNamespace(up=up, down=down)).to(runtime.DEVICE)
    assert transformers_experts._problem_of(experts) is None
    x = torch.randn(6, 12, device=runtime.DEVICE, requires_grad=True)
    ids = torch.stack([torch.randperm(4, device=runtime.DEVICE)[:2] for _ in range(6)])
    gates = torch.rand(6, 2, device=runtime.DEVICE)
    grads = []
    for forward in (hf_moe.batched_mm_experts_forward, interop.experts_forward):
        out = forward(experts, x, ids, gates)
        parameters = [experts.gate_up_proj, experts.down_proj]
        grads.append([out, *torch.autograd.grad(out.square().sum(), [x, *parameters])])
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_float8_experts() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = types.SimpleNamespace(
        hidden_size=32, moe_intermediate_size=40, num_experts=4, hidden_act="silu", num_local_experts=4
    )
    kind = hf_moe.use_experts_implementation(
        type("Experts", (finegrained.FP8Experts,), {}), experts_interface=finegrained.ALL_FP8_EXPERTS_FUNCTIONS
    )
    experts = kind(config, block_size=(16, 16)).to(runtime.DEVICE)
    dense = {}
    for name in ("gate_up_proj", "down_proj"):
        values, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        values.data.copy_(torch.randn(values.shape))
        scale.data.uniform_(0.1, 2.0)
        spread = scale.data.repeat_interleave(16, 1).repeat_interleave(16, 2)  # the last block is a smaller one
        dense[name] = values.data.float() * spread[:, : values.shape[1], : values.shape[2]]
    x, ids = torch.randn(6, 32, device=runtime.DEVICE), torch.randint(0, 4, (6, 2), device=runtime.DEVICE)
    gates = torch.rand(6, 2, device=runtime.DEVICE)
    interop.register()
    config._experts_implementation = interop.NAME
    expected = moe.gated_experts(x, dense["gate_up_proj"], dense["down_proj"], ids, gates)
    torch.testing.assert_close(experts(x, ids, gates), expected, rtol=1e-4, atol=1e-4)


# --- 4 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("double_quant", (False, True), ids=("plain", "double"))
def test_4_bit_experts_are_as_dequantized_ones(name: str, double_quant: bool) -> None:
    model = tiny_model(name, num_hidden_layers=1)
    interop.quantize_experts(model, block_size=32, double_quant=double_quant)
    assert_as_eager(dequantized(name, model, num_hidden_layers=1), lambda _: interop.use_kernels(model))


def test_quantizing_saves_memory() -> None:
    model = tiny_model("qwen3_moe")
    before = sum(p.nbytes for p in model.parameters())
    saved = interop.quantize_experts(model, block_size=32)
    after = sum(p.nbytes for p in model.parameters())
    scales = sum(buffer.nbytes for name, buffer in model.named_buffers() if "parametrizations" in name)
    assert saved == before - after - scales > 0.7 * before * 0.5


# --- what it does not know ------------------------------------------------------------------------------------------


def test_a_model_without_experts_is_refused() -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    for call in (interop.use_kernels, interop.quantize_experts, interop.check_experts):
        with pytest.raises(
            ValueError, match="must have experts on transformers' ExpertsInterface, got LlamaForCausalLM"
        ):
            call(model)


def test_experts_of_another_shape_or_quantized_twice_are_refused() -> None:
    model = tiny_model("olmoe")
    last = list(interop.expert_modules(model))[-1][1]
    last.down_proj = torch.nn.Parameter(torch.zeros(4, 32, 17, device=runtime.DEVICE))
    for call in (interop.use_kernels, interop.quantize_experts):
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts \(OlmoeExperts\) must have 4 experts"):
            call(model)
    model = tiny_model("olmoe")
    interop.quantize_experts(model)
    with pytest.raises(ValueError, match="must be dense, but it is compressed already"):
        interop.quantize_experts(model)


# --- expert parallelism ---------------------------------------------------------------------------------------------


def test_ranks_with_one_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 has a table of implementations; one like it stands for that."""
    table: dict[str, Any] = {}
    module: Any = types.ModuleType("transformers.distributed.expert_parallel")
    module.EPImplementation = type("EPImplementation", (), {"__init__": lambda *_: None})
    module.EPImplementationInterface = types.SimpleNamespace(register=table.__setitem__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    expert_parallel.register()
    one, two = (types.SimpleNamespace(size=lambda size=size: size) for size in (1, 2))
    assert table["kernelbook"]("experts", two, one).experts == "experts"
    with pytest.raises(ValueError, match=r"every rank must have a batch of its own \(tp_size=1\), got tp_size=2"):
        table["kernelbook"]("experts", two, two)
