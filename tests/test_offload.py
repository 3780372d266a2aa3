"""4-bit experts in host memory: the same numbers in every kind of pass, and two layers on the device."""

import copy
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers", minversion="5")

import torch
import transformers
from tiny_models import losses, tiny_model, tokens

from kernelbook import runtime
from kernelbook.interop import transformers as interop
from kernelbook.nn import offload
from kernelbook.nn.parameters import stored_weight
from kernelbook.packed import products

LAYERS = 3


def quantized() -> Any:
    model = tiny_model("qwen3_moe", hidden_size=32, moe_intermediate_size=32, num_hidden_layers=LAYERS, num_experts=3)
    interop.quantize_experts(model, double_quant=True)
    return interop.use_kernels(model)


def with_pairs(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=2, target_modules=[], target_parameters=interop.expert_parameters(model), init_lora_weights=False
    )
    model = get_peft_model(model, config)
    return interop.use_kernels(model)


def offloaded(model: Any) -> Any:
    model = copy.deepcopy(model)
    with mock.patch("kernelbook.nn.parameters.nf4_dequantize", None):  # no kernel decodes what lies on the host
        interop.offload_experts(model)
    return model


def experts_of(model: Any) -> list[Any]:
    return [experts for _, experts in interop.expert_modules(model)]


def test_logits_and_tokens_are_the_same_bits_pass_after_pass() -> None:
    model, ids = quantized(), tokens()
    ours = offloaded(model)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(2):
            torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=0)
    generated = [m.generate(ids[:1, :4], max_new_tokens=4, do_sample=False) for m in (model, ours)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("checkpoints", (None, False, True), ids=("none", "not reentrant", "reentrant"))
def test_steps_are_the_same(checkpoints: bool | None) -> None:
    pytest.importorskip("peft")
    found, ids = [], tokens()
    for change in (copy.deepcopy, offloaded):
        model = with_pairs(change(quantized())).train()
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
            model.enable_input_require_grads()
        found.append(losses(model, ids, 2))
    assert found[0] == found[1] and len(set(found[0])) > 1


@pytest.mark.parametrize("few", (128, 0), ids=("decoded in the product", "made dense"))
def test_gradients_of_two_passes_before_one_backward(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are copied again where a backward pass comes after other passes, and in any order."""
    pytest.importorskip("peft")
    monkeypatch.setattr(products, "DENSE_ROWS", {True: few, False: few})
    found, ids = [], tokens()
    for change in (copy.deepcopy, offloaded):
        model = with_pairs(change(quantized()))
        first, second = (model(part, use_cache=False).logits.square().mean() for part in (ids[:1], ids[1:]))
        first.backward()
        second.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(found[0]) == 4 * LAYERS and all(map(torch.equal, *found))


def test_the_device_holds_two_layers_and_the_host_all() -> None:
    model = offloaded(quantized())
    stacks = [experts.parametrizations["down_proj"] for experts in experts_of(model)]
    [store] = {stack[0].host for stack in stacks}
    assert len({w.packed.data_ptr() for layer in store.weights for w in layer}) == 2 * len(store.weights[0]) == 4
    model.half().to(runtime.DEVICE)
    for stack in stacks:
        parts = [stack.original, *stack[0].buffers()]
        assert all(part.device.type == "cpu" and part.dtype in (torch.uint8, torch.float32) for part in parts)
        assert stack[0].dtype == torch.float16
        assert runtime.DEVICE.type == "cpu" or all(part.is_pinned() for part in parts)


def test_each_layer_is_copied_once_a_pass_but_the_ones_where_it_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = offloaded(quantized()), []
    modules = experts_of(model)
    host = modules[0].parametrizations["down_proj"][0].host
    copy_layer = host._copy

    def note(index: int) -> None:
        if host.held[index % 2] != index:
            read.append(index)
        copy_layer(index)

    monkeypatch.setattr(host, "_copy", note)
    for i in (0, 1, 2, 2, 1, 0):  # forward, and what checkpoints compute again
        offload.read_layer(modules[i], ("gate_up_proj", "down_proj"))
    assert read == [0, 1, 2, 2, 1, 0, 0]


def test_checkpoints_and_copies_have_the_same_bytes(tmp_path: Any) -> None:
    model, ids = quantized(), tokens()
    ours = offloaded(model)
    ours.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for other in (again, copy.deepcopy(ours)):
        for (key, value), (name, expected) in zip(other.state_dict().items(), model.state_dict().items(), strict=True):
            assert key == name and torch.equal(value.cpu(), expected.cpu()), key
        with torch.no_grad():
            logits = interop.use_kernels(other)(ids).logits
            torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=0)


def test_dense_reading_and_other_implementations_work() -> None:
    model, ids = quantized(), tokens()
    ours = offloaded(model)
    for one, other in zip(experts_of(model), experts_of(ours), strict=True):
        assert (
            torch.equal(one.gate_up_proj, other.gate_up_proj) and other.gate_up_proj.device == one.gate_up_proj.device
        )
    for each in (model, ours):
        each.set_experts_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(TypeError, match="gate_up_proj must be a 4-bit parameter"):
        interop.offload_experts(tiny_model("qwen3_moe"))
    model = offloaded(quantized())
    with pytest.raises(ValueError, match="they are offloaded"):
        interop.offload_experts(model)
    layers = experts_of(quantized())
    with pytest.raises(ValueError, match="weights like the first one's"):
        offload.offload_layers([(layers[0], ["gate_up_proj"]), (layers[1], ["down_proj"])], runtime.DEVICE)
    weight: Any = stored_weight(layers[0], "gate_up_proj")
    assert weight.packed.device.type == runtime.DEVICE.type
    layers[0].parametrizations["gate_up_proj"].original = torch.nn.Parameter(weight.packed.to("meta"), False)
    with pytest.raises(ValueError, match="packed gate_up_proj must be in memory, got the meta device, as accelerate"):
        stored_weight(layers[0], "gate_up_proj")


@pytest.mark.gpu
def test_captured_steps_follow_replays_and_eager_passes() -> None:
    """A graph that is replayed changes what lies in the two places; a pass from Python between replays must not notice."""
    model, ids = quantized(), tokens()
    ours = offloaded(model)
    with torch.no_grad():
        expected, captured, graphs = model(ids).logits, [], []
        for one in (model, ours):  # PyTorch's products in a graph round otherwise than those from Python
            one(ids)
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                captured.append(one(ids).logits)
                offload.join_copies()
        for _ in range(2):
            for graph in graphs:
                graph.replay()
            assert torch.equal(*captured)
            torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=0)


def test_a_model_is_loaded_onto_the_host(tmp_path: Any) -> None:
    """Its experts stay there, one bit for bit with those on the device; nothing of it stands in the saved model."""
    tiny_model("qwen3_moe", num_hidden_layers=LAYERS).save_pretrained(tmp_path / "dense")
    load = transformers.AutoModelForCausalLM.from_pretrained
    models = [
        load(tmp_path / "dense", quantization_config=interop.NF4ExpertsConfig(double_quant=True, offload=offload))
        for offload in (False, True)
    ]
    (here, away), ids = (interop.use_kernels(model) for model in models), tokens()
    assert {p.device.type for p in away.parameters()} <= {"cpu", runtime.DEVICE.type}
    assert all(experts.parametrizations["down_proj"].original.device.type == "cpu" for experts in experts_of(away))
    with torch.no_grad():
        torch.testing.assert_close(away(ids).logits, here(ids).logits, rtol=0, atol=0)
    away.save_pretrained(tmp_path / "packed")
    assert "offload" not in (tmp_path / "packed" / "config.json").read_text()
    assert experts_of(load(tmp_path / "packed"))[0].parametrizations["down_proj"][0].host is None
