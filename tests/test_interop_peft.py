"""PEFT's LoRA on expert parameters, used without merging, against PEFT's own way through the eager experts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
import torch
import transformers
from peft.tuners.lora import layer
from tensors import default_dtype
from tiny_models import (
    MODELS,
    assert_as_eager,
    dequantized,
    losses,
    pairs,
    tiny_model,
    tokens,
    with_equal_pairs,
    with_lora,
)

from kernelbook import runtime
from kernelbook.interop import peft as interop_peft
from kernelbook.interop import transformers as interop
from kernelbook.interop import transformers_experts
from kernelbook.nn import experts as nn_experts
from kernelbook.nn import swap
from kernelbook.nn.parameters import quantize_parameter


def _tiny(name: str, **how: Any) -> Any:
    return with_lora(tiny_model(name, num_hidden_layers=1), **how)


def _in_4_bits(name: str, before: bool = True, **changes: Any) -> tuple[Any, Any]:
    """A model with 4-bit experts and LoRA, and the same on the dequantized weights."""
    changes = {"num_hidden_layers": 1, **changes}
    model = tiny_model(name, **changes)
    if before:
        interop.quantize_experts(model, block_size=32)
    model = with_lora(model)
    if not before:
        interop.quantize_experts(model, block_size=32)
    return with_equal_pairs(model, dequantized(name, model, **changes))


def _use_eager(model: Any) -> Any:
    model.get_base_model().set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("name", "how"),
    (
        *((name, {}) for name in MODELS),
        ("mixtral", {"rank": 1, "use_rslora": True, "lora_alpha": 5}),
        ("olmoe", {"target_parameters": ["model.layers.0.mlp.experts.down_proj"]}),
    ),
    ids=(*MODELS, "rank one, scaled", "one parameter"),
)
def test_logits_and_gradients_are_pefts(name: str, how: dict[str, Any]) -> None:
    """Every LoRA parameter's gradient, and that of the input."""
    assert_as_eager(_tiny(name, **how), interop.use_kernels)


def test_nothing_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = interop.use_kernels(_tiny("qwen3_moe"))
    given = []
    real = nn_experts.moe_lora

    def spy(x: Any, w: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((w.data_ptr(), None if a is None else tuple(a.shape)))
        return real(x, w, a, b, *args, **kwargs)

    monkeypatch.setattr(nn_experts, "moe_lora", spy)
    experts = next(interop.expert_modules(model))[1]
    model(tokens())
    assert given == [
        (experts.gate_up_proj.data_ptr(), (5, 3, 32)),
        (experts.down_proj.data_ptr(), (5, 3, 24)),
    ]
    assert not experts.__dict__[transformers_experts.LORA_ATTRIBUTE], "handed over for the forward pass only"


def test_merged_and_unmerged_agree() -> None:
    model, ids = interop.use_kernels(_tiny("qwen3_moe")), tokens()
    with torch.no_grad():
        unmerged = model(ids).logits
        model.merge_adapter()
        merged = model(ids).logits
        model.unmerge_adapter()
        again = model(ids).logits
        plain = model.merge_and_unload()(ids).logits
    for other in (merged, again, plain):
        torch.testing.assert_close(other, unmerged, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(unmerged, tiny_model("qwen3_moe", num_hidden_layers=1)(ids).logits, atol=1e-2)


def test_merging_into_4_bit_experts_is_refused() -> None:
    """PEFT alone would add to a dense copy and lose it, with the adapter taken for merged."""
    model, _ = _in_4_bits("qwen3_moe")
    interop.use_kernels(model)
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        for merge in (model.merge_adapter, lambda: model.merge_adapter(safe_merge=True)):
            with pytest.raises(ValueError, match=r"merge: .*_proj must be dense to take up LoRA pairs, got NF4Tensor"):
                merge()
            model.unmerge_adapter()
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.11's compiler does not follow how a wrapper hands its pairs over (__dict__.setdefault of a module)",
)
@pytest.mark.parametrize("quantize", (False, True), ids=("dense", "4-bit"))
def test_the_whole_model_compiles_to_one_graph(quantize: bool) -> None:
    model, ids = _tiny("qwen3_moe"), tokens()
    if quantize:
        interop.quantize_experts(model, block_size=32)
    interop.use_kernels(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for each in (compiled, model):
        model.zero_grad()
        loss = each(ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)


def test_the_lines_that_the_chapter_gives_run_as_they_are(tmp_path: Path) -> None:
    chapter = json.loads((Path(__file__).parents[1] / "notebooks" / "together.ipynb").read_text())
    [lines] = [
        code
        for cell in chapter["cells"]
        if cell["cell_type"] == "markdown"
        for code in re.findall(r"```python\n(.*?)```", "".join(cell["source"]), re.DOTALL)
        if "get_peft_model(" in code
    ]
    given: dict[str, Any] = {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}
    given |= {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "folder": tmp_path}
    tiny_model("qwen3_moe", num_hidden_layers=1, moe_intermediate_size=32).save_pretrained(tmp_path)
    exec(lines, given)  # noqa: S102  the chapter's own lines
    ids = tokens()
    found = losses(given["model"], ids, steps=4)
    assert found[-1] < found[0]
    trained = [name for name, p in given["model"].named_parameters() if p.grad is not None]
    assert sum("experts" in name for name in trained) == 4


@pytest.mark.skipif(peft.__version__.startswith("0.20."), reason="that PEFT takes one adapter with target_parameters")
@pytest.mark.parametrize("quantize", (False, True), ids=("dense", "4-bit"))
def test_two_adapters_and_both_at_once(quantize: bool) -> None:
    base, ids = tiny_model("olmoe", num_hidden_layers=1), tokens()
    if quantize:
        interop.quantize_experts(base, block_size=32)
    with torch.no_grad():
        plain = base(ids).logits
    model = interop.use_kernels(with_lora(base))
    names = interop.expert_parameters(model)
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=1, target_parameters=names, init_lora_weights=False))
    assert sum("other" in wrapper.lora_A for wrapper in interop_peft.check_wrappers(model)) == 2
    for active in ("other", "default", ["default", "other"]):
        model.base_model.set_adapter(active)
        model.base_model.model.set_experts_implementation(interop.NAME)
        with torch.no_grad():
            ours = model(ids).logits
            with model.disable_adapter():
                torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
            assert torch.equal(model(ids).logits, ours) and not torch.allclose(ours, plain, atol=1e-2)
            torch.testing.assert_close(_use_eager(model)(ids).logits, ours, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpointing(reentrant: bool) -> None:
    model = _tiny("qwen3_moe")

    def checkpointed(model: Any) -> Any:
        interop.use_kernels(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model.train()

    assert_as_eager(model, checkpointed)


def test_a_parametrization_of_ones_own_on_a_4_bit_weight_stays_what_it_is() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.tensor(2.0, device=runtime.DEVICE))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.by

    linear = torch.nn.Linear(64, 32, device=runtime.DEVICE)
    quantize_parameter(linear, "weight")
    before = linear.weight
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Scaled(), unsafe=True)
    assert torch.equal(linear.weight, 2 * before) and "parametrizations.weight.1.by" in linear.state_dict()


@pytest.mark.parametrize(
    ("implementation", "before"),
    ((interop.NAME, True), (interop.NAME, False), ("eager", True), ("eager", False), ("grouped_mm", False)),
    ids=str,
)
def test_4_bit_experts_with_lora(implementation: str, before: bool) -> None:
    """Nothing of a forward pass stays behind: not in the next one, not without the adapter, not back on the kernels."""
    model, dense = _in_4_bits("qwen3_moe", before)
    ids = tokens()
    with torch.no_grad(), dense.disable_adapter():
        plain = dense(ids).logits
    with torch.no_grad():
        expected = dense(ids).logits
    interop.use_kernels(model).get_base_model().set_experts_implementation(implementation)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
    found = losses(model, ids)
    assert found == pytest.approx(losses(dense, ids), rel=1e-4)


@pytest.mark.parametrize("length", (1, 4))
def test_4_bit_experts_under_checkpointing_with_a_few_active(length: int) -> None:
    """Made again in the backward pass, inside of what checkpointing makes again."""
    model, dense = _in_4_bits("qwen3_moe", num_experts=16)
    interop.use_kernels(model).gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    ids = tokens(1, length)
    for each in (model.train(), dense):
        each(ids).logits.square().sum().backward()
    ours, theirs = pairs(model), pairs(dense)
    assert len(ours) == 6
    for where, pair in ours.items():
        torch.testing.assert_close(pair.grad, theirs[where].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantize", (False, True), ids=("dense", "4-bit"))
def test_checkpoint_loads_back(quantize: bool, tmp_path: Path) -> None:
    """Also into a model that is quantized, as long as it is after PEFT has wrapped it."""
    model, ids = interop.use_kernels(_tiny("qwen3_moe")), tokens()
    losses(model, ids, steps=2)
    model.save_pretrained(tmp_path)
    if quantize:
        interop.quantize_experts(model, block_size=32)
    with torch.no_grad():
        expected = model(ids).logits
    for use in (interop.use_kernels,) if quantize else (interop.use_kernels, _use_eager):
        again = peft.PeftModel.from_pretrained(tiny_model("qwen3_moe", num_hidden_layers=1), tmp_path)
        if quantize:
            interop.quantize_experts(again, block_size=32)
        with torch.no_grad():
            torch.testing.assert_close(use(again)(ids).logits, expected, rtol=1e-3, atol=1e-4)


def test_lora_weights_in_float32_beside_16_bit_experts() -> None:
    """PEFT keeps adapters in float32 beside a bfloat16 model."""
    model = with_lora(tiny_model("olmoe", num_hidden_layers=1).bfloat16())
    experts = next(interop.expert_modules(model))[1]
    interop.use_kernels(model)
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    trained = [p for n, p in model.named_parameters() if "experts" in n and p.requires_grad]
    assert experts.down_proj.dtype == torch.bfloat16 and loss.isfinite()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() and p.grad.any() for p in trained)


# --- what it does not know ------------------------------------------------------------------------------------------


def _wrappers(model: Any) -> list[type]:
    return [type(module) for module in model.modules() if isinstance(module, layer.ParamWrapper)]


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PEFT at hand is asked what its pairs add, so that a version that lays them out otherwise is found out."""
    with default_dtype(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):  # of no consequence
        assert interop_peft._probe.__wrapped__() is None
    model = _tiny("olmoe")
    real = layer.ParamWrapper.get_delta_weight
    monkeypatch.setattr(layer.ParamWrapper, "get_delta_weight", lambda self, name: 2 * real(self, name))
    interop_peft._probe.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"as in PEFT 0\.20 and 0\.21, and in PEFT .* another layout"):
            interop.use_kernels(model)
    finally:
        interop_peft._probe.cache_clear()
    assert model.get_base_model().config._experts_implementation == "eager"
    assert set(_wrappers(model)) == {layer.ParamWrapper}


def test_lora_on_another_parameter_is_refused() -> None:
    model = tiny_model("olmoe", num_hidden_layers=1)
    name, experts = next(interop.expert_modules(model))
    experts.extra = torch.nn.Parameter(torch.randn(4, 3, 5, device=runtime.DEVICE))
    model = with_lora(model, target_parameters=[f"{name}.extra"])
    with pytest.raises(ValueError, match="LoRA must be on gate_up_proj or down_proj of OlmoeExperts, got extra"):
        interop.use_kernels(model)
    assert model.get_base_model().config._experts_implementation == "eager"


def test_other_wrapped_parameters_are_left_alone() -> None:
    """A router's weight, for one, is PEFT's business."""
    model = tiny_model("olmoe", num_hidden_layers=1)
    names = [*interop.expert_parameters(model), "model.layers.0.mlp.gate.weight"]
    model = with_lora(model, target_parameters=names)
    assert_as_eager(model, interop.use_kernels)
    interop.use_kernels(model)
    assert _wrappers(model).count(layer.ParamWrapper) == 1


def test_a_model_that_refuses_the_kernels_keeps_its_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _tiny("qwen3_moe")
    monkeypatch.setattr(model.get_base_model(), "set_experts_implementation", lambda name: pytest.fail("no switching"))
    with pytest.raises(pytest.fail.Exception):
        interop.use_kernels(model)
    assert not any(type(module).__module__.startswith("kernelbook") for module in model.modules())


@pytest.mark.parametrize("trained", ("self_attn", "norm", "experts"))
def test_copies_that_peft_trains_give_the_same(trained: str) -> None:
    """A wrapper hands on the attributes of a copy that has its own configuration. Experts run as they did before."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    model.set_attn_implementation("eager")
    model = with_lora(model, target_parameters=None, target_modules=["lm_head"], modules_to_save=[trained])
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        swap(interop.use_kernels(model).get_base_model(), quiet=True)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    if trained == "experts":
        with pytest.raises(
            ValueError, match=r"modules_to_save\.default\.gate_up_proj must be frozen, but PEFT is to train"
        ):
            interop.quantize_experts(model)
