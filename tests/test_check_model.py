"""A check of a whole model: faults of the kinds that are reported for others are named with their layer, and right models
come out right.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")

import peft
import torch
from emulated_graphs import emulate
from tiny_models import BY_ATTENTION, MODELS, attention_model, tiny_model, tokens, with_lora
from torch import nn

from kernelbook import check, runtime
from kernelbook.interop import check_model, check_reference
from kernelbook.interop import peft as interop_peft
from kernelbook.interop import transformers as interop
from kernelbook.lab import cli
from kernelbook.nn import swap
from kernelbook.train import CapturedStep

LENGTH = 8


def _ids(rows: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    return tokens(rows, LENGTH)


def _wrong(report: Any, trial: str = "as given") -> set[tuple[str, str]]:
    return {(row.what, row.name) for row in report.wrong if row.trial == trial}


# --- right models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*MODELS, *BY_ATTENTION))
def test_a_right_model_swapped_and_quantized_is_right(name: str) -> None:
    model = attention_model(name, **({} if name in ("gemma2", "gpt_oss", "gpt2") else {"num_hidden_layers": 1}))
    if any(True for _ in interop.expert_modules(model)):
        interop.quantize_experts(model, block_size=32)
        interop.use_kernels(model)
    swap(model, quiet=True)
    report = check.model(model, _ids())
    assert report.ok, str(report)
    trials = {"as given", "after a step", "padding", *(() if name == "gpt_oss" else ("packing",))}
    assert trials <= {row.trial for row in report.rows}
    assert ("see each other" in str(report)) == (name == "gpt_oss")  # whose own eager attention knows no positions
    assert {"output", "gradient", "input grad", "loss", "whole", "moved"} <= {row.what for row in report.rows}


def test_pairs_in_16_bits_under_checkpoints_are_right_and_the_model_stays_as_it_was() -> None:
    model = with_lora(tiny_model("qwen3_moe", num_hidden_layers=1, num_experts=16).bfloat16())
    interop.quantize_experts(model, block_size=32)
    interop.use_kernels(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids, before, state = _ids(), {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    report = check.model(model, ids)
    assert report.ok, str(report)
    assert "no row of this batch reached experts" in str(report) and "All is right" in str(report)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters()) and all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_pair_that_is_new_has_gradients_of_zero_and_no_fault() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    config = peft.LoraConfig(r=3, target_modules=["q_proj"])  # B is zero
    report = check.model(peft.get_peft_model(model, config), _ids())
    assert report.ok, str(report)
    assert "its gradient is zero here and in the reference" in str(report)


# --- faults -----------------------------------------------------------------------------------------------------------


def _scaled_gradient(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        found = out[0] if isinstance(out, tuple) else out
        if found.requires_grad:
            found.register_hook(change)
        return out

    module.forward = changed


def _given(module: Any, **changes: Any) -> None:
    """The module is called with other arguments."""
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{name: changes.get(name, value) for name, value in kwargs.items()})

    module.forward = changed


def _causal() -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min, device=runtime.DEVICE).triu(1)[None, None]


def _layer(model: Any, at: int) -> Any:
    return model.model.layers[at]


def _frozen(model: Any) -> None:
    _layer(model, 1).mlp.experts.lora_A["default"].weight.requires_grad_(False)


def interop_experts(model: Any, at: int) -> Any:
    return [experts for _, experts in interop.expert_modules(model)][at]


def _dead_expert(model: Any) -> None:
    weight = _layer(model, 0).mlp.experts.lora_A["default"].weight

    def change(grad: torch.Tensor) -> torch.Tensor:
        return grad * (torch.arange(len(grad), device=grad.device)[:, None] // 3 != 2)

    weight.register_hook(change)


def _detached(model: Any) -> None:
    q = _layer(model, 1).self_attn.q_proj
    forward = q.forward
    q.forward = lambda *args: forward(*args).detach()


def _stale_weights(model: Any) -> None:
    norm = _layer(model, 1).input_layernorm
    old = norm.weight.detach().clone()
    forward = norm.forward

    def changed(x: torch.Tensor) -> torch.Tensor:
        return forward(x) * (old / norm.weight.detach())

    norm.forward = changed


def _labels_shifted_twice(model: Any) -> None:
    loss = model.loss_function
    model.loss_function = lambda logits, labels, **others: loss(logits=logits, labels=labels.roll(-1, 1), **others)


def _without_sinks(model: Any) -> None:
    attention = _layer(model, 1).self_attn
    forward, gone = attention.forward, nn.Parameter(torch.full_like(attention.sinks, -1e9))

    def without(*args: Any, **kwargs: Any) -> Any:
        kept, attention._parameters["sinks"] = attention.sinks, gone
        try:
            return forward(*args, **kwargs)
        finally:
            attention._parameters["sinks"] = kept

    attention.forward = without


FAULTS: dict[str, tuple[str, bool, Callable[[Any], None], str, str, str]] = {
    # model, with LoRA, what is done to it, and what is named: trial, what, name
    "an adapter is frozen": ("qwen3_moe", True, _frozen, "as given", "gradient", "layers.1.mlp.experts.lora_A.default.weight"),
    "a gradient is scaled by 1 / top_k": ("qwen3_moe", True, lambda m: _scaled_gradient(interop_experts(m, 1), lambda grad: grad / 2), "as given", "gradient", "layers.1.mlp.experts.lora_B.default.weight"),
    "a gradient is not finite": ("llama", False, lambda m: _scaled_gradient(_layer(m, 0).self_attn, lambda grad: grad * float("nan")), "as given", "gradient", "layers.0.self_attn.v_proj.weight"),
    "one expert's adapter gets no gradient": ("qwen3_moe", True, _dead_expert, "as given", "gradient", "layers.0.mlp.experts.lora_A.default.weight"),
    "an adapter is out of the graph": ("qwen3_moe", True, _detached, "as given", "gradient", "layers.1.self_attn.q_proj.lora_B.default.weight"),
    "a window is dropped": ("mistral", False, lambda m: _given(_layer(m, 1).self_attn, attention_mask=_causal()), "as given", "output", "layers.1.self_attn"),
    "sinks are ignored": ("gpt_oss", False, _without_sinks, "as given", "output", "layers.1.self_attn"),
    "a soft cap is lost": ("gemma2", False, lambda m: setattr(_layer(m, 1).self_attn, "attn_logit_softcapping", None), "as given", "output", "layers.1.self_attn"),
    "padding is attended to": ("llama", False, lambda m: _given(_layer(m, 0).self_attn, attention_mask=_causal()), "padding", "output", "layers.0.self_attn"),
    "packed sequences see each other": ("llama", False, lambda m: _given(_layer(m, 1).self_attn, attention_mask=_causal()), "packing", "output", "layers.1.self_attn"),
    "labels are shifted twice": ("llama", False, _labels_shifted_twice, "as given", "loss", "loss"),
    "a layer keeps old weights": ("llama", False, _stale_weights, "after a step", "output", "layers.1.input_layernorm"),
    "something is scaled between two layers": ("llama", False, lambda m: _layer(m, 0).register_forward_hook(lambda module, args, out: out * 1.01), "as given", "input", "layers.1.input_layernorm"),
}  # fmt: skip


SAID = {
    "an adapter is frozen": "frozen (requires_grad is False)",
    "one expert's adapter gets no gradient": "zero for experts 2",
    "an adapter is out of the graph": "missing: no backward pass reaches it",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_layer(fault: str) -> None:
    name, pairs, plant, trial, what, where = FAULTS[fault]
    model = attention_model(name)
    wrapped = with_lora(model) if pairs else model
    plant(model)
    report = check.model(wrapped, _ids(2))
    wrong = _wrong(report, trial)
    assert (what, where if where == "loss" else f"model.{where}") in wrong
    if where != "loss":  # and nothing of that kind in the other layer
        other = f"layers.{1 - int(where.split('.')[1])}."
        assert not any(kind == what and other in place for kind, place in wrong)
    assert SAID.get(fault, "") in str(report)


def test_a_dropped_window_longer_than_the_batch_is_named() -> None:
    model = attention_model("mistral", sliding_window=4096)
    _given(_layer(model, 1).self_attn, attention_mask=_causal())
    wrong = check.model(model, _ids())
    assert not _wrong(wrong) and ("output", "model.layers.1.self_attn") in _wrong(wrong, "window")


def test_b_with_the_expert_slowest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = interop_peft.lora_pair

    def wrong(wrapper: Any, adapter: str) -> Any:
        pair = right(wrapper, adapter)
        b = wrapper.lora_B[adapter].weight
        return pair._replace(b=b.reshape(b.shape[0], wrapper.num_experts, -1).transpose(0, 1))

    monkeypatch.setattr(interop_peft, "lora_pair", wrong)
    model = with_lora(tiny_model("qwen3_moe", num_hidden_layers=1))
    monkeypatch.setattr(interop_peft, "_probe", lambda: None)
    report = check.model(interop.use_kernels(model), _ids())
    assert {("output", "model.layers.0.mlp.experts")} == {row for row in _wrong(report) if row[0] == "output"}


def test_shifted_scales_of_one_expert_are_named() -> None:
    before = tiny_model("qwen3_moe")
    model = copy.deepcopy(before)
    interop.quantize_experts(model, block_size=32)
    assert check.model(model, _ids(), against=before).ok
    scales = interop_experts(model, 1).parametrizations.down_proj[0].absmax
    of_expert = scales.view(5, -1)[2]
    of_expert.copy_(of_expert.roll(1))
    report = check.model(model, _ids(), against=before)
    assert _wrong(report) == {("weight", "model.layers.1.mlp.experts.down_proj")} and report.wrong[0].note == "expert 2"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu()).square().mean()  # type: ignore[no-any-return]


def _net() -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().to(runtime.DEVICE)
    return model, copy.deepcopy(model), torch.randn(12, 16, device=runtime.DEVICE)


def test_a_module_of_ones_own_needs_the_one_before_the_change() -> None:
    model, before, x = _net()
    with pytest.raises(ValueError, match="against must be the module before the change"):
        check.model(model, x)
    swap(model, quiet=True)
    report = check.model(model, x, against=before)
    assert report.ok and sum(row.what == "output" for row in report.rows if row.trial == "as given") == 3, str(report)
    with torch.autocast(runtime.DEVICE.type, torch.bfloat16):  # which keeps its casts of weights
        assert check.model(model, x, against=before).ok and torch.is_autocast_cache_enabled()
    model.norm.eps = 1.0
    assert ("output", "norm") in _wrong(check.model(model, x, against=before))
    with torch.no_grad():
        model.last.weight[0, 0] += 1
    assert ("weight", "last.weight") in _wrong(check.model(model, x, against=before))


class Stale(CapturedStep):
    """Goes on with the learning rate of its first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(check_model.LR)
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("kind", (CapturedStep, Stale))
def test_a_stale_captured_learning_rate_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(check_model, "CapturedStep", kind)
    model, before, x = _net()
    report = check.model(model, x, against=before, captured=True)
    assert not any("from Python" in note for note in report.notes), report.notes
    wrong = _wrong(report, "captured")
    assert (("moved", "first.weight") in wrong) == (kind is Stale) and report.ok == (kind is not Stale), str(report)


def test_what_a_compiler_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before, x = _net()

    def compile(model: Any) -> Any:
        return lambda x: model(x) * 2

    monkeypatch.setattr(torch, "compile", compile)
    assert ("gradient", "norm.weight") in _wrong(check.model(model, x, against=before, compiled=True), "compiled")
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert check.model(model, x, against=before, compiled=True).ok
    monkeypatch.setattr(torch, "compile", lambda model: None)
    assert "TypeError: 'NoneType' object is not callable" in str(check.model(model, x, against=before, compiled=True))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    call = ["check-model", str(tmp_path / "model"), "--tokens", "8"]
    assert cli.main(call) == 0
    assert "All is right." in capsys.readouterr().out
    assert cli.main(["check-model", str(tmp_path / "nothing")]) == 2
    monkeypatch.setattr(check_reference, "GLUE", -1.0)
    assert cli.main(call) == 1
    assert "Something is wrong." in capsys.readouterr().out
