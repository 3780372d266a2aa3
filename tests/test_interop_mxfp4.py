"""gpt-oss as it is published: loading, saving, training and merging with ``MXFP4ExpertsConfig``."""

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import torch
import transformers
from tiny_models import (
    assert_as_eager,
    attention_model,
    losses,
    pairs,
    tensors_of,
    tokens,
    with_equal_pairs,
    with_lora,
    write_checkpoint,
)
from transformers import Mxfp4Config

from kernelbook import check, runtime
from kernelbook.interop import peft as interop_peft
from kernelbook.interop import transformers as interop
from kernelbook.interop import transformers_attention, transformers_fp4, transformers_generation
from kernelbook.interop.transformers import MXFP4ExpertsConfig, use_kernels
from kernelbook.interop.transformers_experts import expert_weights, stored
from kernelbook.nf4 import NF4Tensor
from kernelbook.packed.fp4 import fp4_parts, fp4_quantize

SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def random_model(**changes: Any) -> Any:
    model = attention_model("gpt_oss", **{"hidden_size": 96, "intermediate_size": 64, **changes})
    for layer in model.model.layers:
        for bias in (layer.mlp.experts.gate_up_proj_bias, layer.mlp.experts.down_proj_bias, layer.mlp.router.bias):
            torch.nn.init.normal_(bias)
    return model


def publish(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, torch.Tensor]:
    """Writes a checkpoint as gpt-oss' are, in two shards; -> its tensors."""
    model = random_model(**changes).to(dtype)
    model.config.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, _ = fp4_parts(fp4_quantize(value.mT.contiguous()))
            tensors |= {f"{name}_blocks": blocks.unflatten(-1, (-1, 16)), f"{name}_scales": scales.view(torch.uint8)}
        else:
            tensors[name] = value
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    write_checkpoint(
        folder, tensors, architectures=["GptOssForCausalLM"], dtype=str(dtype).removeprefix("torch."),
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED},
    )  # fmt: skip
    return tensors


def load(folder: Path, config: Any = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config or MXFP4ExpertsConfig())


def dequantized(folder: Path) -> Any:
    """As transformers itself makes it dense; 5.17 does so in bfloat16 whatever the model's dtype, which loses nothing."""
    model = load(folder, Mxfp4Config(dequantize=True)).to(runtime.DEVICE, torch.float32)
    model.set_experts_implementation("eager")
    return model.eval()


def packed(model: Any) -> list[NF4Tensor]:
    return [stored(experts, name) for _, experts, name in expert_weights(model)]


def on_kernels(model: Any) -> Any:
    transformers_attention.register()
    model.set_attn_implementation("kernelbook")
    return use_kernels(model)


# --- loading and saving ---------------------------------------------------------------------------------------------


def test_a_loaded_model_is_transformers_own_dense_one(tmp_path: Path) -> None:
    """What the parameters stand for, bit for bit; logits and gradients, with windows and sinks, by the rule."""
    publish(tmp_path)
    model, dense = load(tmp_path), dequantized(tmp_path)
    assert all(q.code_name == "e2m1" and q.block_size == 32 for q in packed(model)) and len(packed(model)) == 4
    for (_, ours), (_, theirs) in zip(interop.expert_modules(model), interop.expert_modules(dense), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
            getattr(theirs, name).requires_grad_(False)  # as the packed ones have none
    model.to(runtime.DEVICE)
    assert_as_eager(dense, lambda _: on_kernels(model))


def test_a_published_model_can_be_checked(tmp_path: Path) -> None:
    publish(tmp_path, num_hidden_layers=1)
    report = check.model(on_kernels(load(tmp_path)), tokens(1, 8))
    assert report.ok, str(report)


def test_fast_generation_of_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate takes the way through our call, and gives the dense model's tokens; windows fill on the way."""
    publish(tmp_path)
    model, dense = on_kernels(load(tmp_path).to(runtime.DEVICE)), dequantized(tmp_path)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    asked = [tokens(2, 2), tokens(1, 7)]
    expected = [dense.generate(ids, **how) for ids in asked]
    taken: list[int] = []
    calls = transformers_generation.CapturedCalls.__call__
    monkeypatch.setattr(
        transformers_generation.CapturedCalls, "__call__", lambda self, *args: taken.append(1) or calls(self, *args)
    )
    if runtime.DEVICE.type != "cuda":
        how["compile_config"] = transformers.CompileConfig()
        how["compile_config"]._compile_all_devices = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*there is no GPU")
        interop.fast_generate(model)
        for ids, ref in zip(asked * 2, expected * 2, strict=True):
            assert torch.equal(model.generate(ids, **how), ref)
    assert len(taken) == 4 * 5
    if runtime.DEVICE.type == "cuda":
        assert model.get_compiled_call._calls.why_eager is None and len(model.get_compiled_call._calls) >= 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_saving_gives_the_same_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    published = publish(tmp_path / "published", dtype)
    model = load(tmp_path / "published")
    assert model.dtype == dtype and all(q.dtype == dtype for q in packed(model))
    model.save_pretrained(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert kept == {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED}
    found = tensors_of(tmp_path / "saved")
    assert found.keys() == published.keys()
    for name, value in published.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    again = load(tmp_path / "saved")
    assert all(torch.equal(a.packed, b.packed) for a, b in zip(packed(again), packed(model), strict=True))


def test_no_expert_is_dense_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there a second copy of the packed bytes: they stay in the memory into which they were read."""
    publish(tmp_path)
    monkeypatch.setattr("kernelbook.nn.parameters.nf4_dequantize", lambda *_, **__: pytest.fail("it became dense"))
    read: list[Any] = []
    make = transformers_fp4.fp4_tensor

    def watched(blocks: torch.Tensor, *others: Any, **how: Any) -> NF4Tensor:
        q = make(blocks, *others, **how)
        assert q.packed.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()
        read.append(weakref.ref(blocks))
        return q

    monkeypatch.setattr(transformers_fp4, "fp4_tensor", watched)
    model = load(tmp_path)
    assert len(read) == 4
    largest = max(p.numel() * p.element_size() for name, p in model.named_parameters() if "experts" in name)
    assert largest < 3 * 96 * 128 * 2  # of one dense parameter in 16 bits


@pytest.mark.parametrize(
    "missing", ("model.layers.1.mlp.experts.down_proj_scales", "model.layers.0.mlp.experts.gate_up_proj_blocks")
)
def test_what_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    tensors = publish(tmp_path)
    del tensors[missing]
    write_checkpoint(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"from_pretrained: {missing} must be in the checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("size", "message"),
    (
        (48, "down_proj must have rows of a multiple of 32 elements, got 48"),
        (32, r"gate_up_proj_blocks must be in the checkpoint.* or in another shape"),
    ),
)
def test_another_size_than_the_checkpoint_s_is_refused(size: int, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, publish(tmp_path, num_hidden_layers=1), intermediate_size=size)
    with pytest.raises((ValueError, RuntimeError), match=message):
        load(tmp_path)


def test_a_dense_checkpoint_is_refused(tmp_path: Path) -> None:
    random_model(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MXFP4ExpertsConfig: the checkpoint must be in MXFP4"):
        load(tmp_path)
    with pytest.raises(TypeError, match="MXFP4ExpertsConfig: the argument must be modules_to_not_convert"):
        MXFP4ExpertsConfig(block_size=64)


# --- training and merging -------------------------------------------------------------------------------------------


def both(folder: Path) -> tuple[Any, Any]:
    """The packed model and the dense one with the same pairs."""
    publish(folder, num_hidden_layers=1)
    model, dense = with_equal_pairs(load(folder).to(runtime.DEVICE), dequantized(folder))
    return use_kernels(model), dense


def test_lora_is_pefts_on_the_dense_model(tmp_path: Path) -> None:
    model, dense = both(tmp_path)
    found, ids = [], tokens()
    for each in (model, dense):
        logits = each(ids, use_cache=False).logits
        (logits * logits.detach().sin()).sum().backward()
        found.append({"logits": logits.detach(), **{where: p.grad for where, p in pairs(each).items()}})
    for where, expected in found[1].items():
        assert check.relative_error(found[0][where], expected) < 1e-4, where
    torch.testing.assert_close(losses(model, ids), losses(dense, ids), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("into", ("dense", "mxfp4"))
def test_merging_says_what_it_loses(into: str, tmp_path: Path) -> None:
    model, dense = both(tmp_path)
    before = [q.packed.clone() for q in packed(model.get_base_model())]
    errors = interop_peft.merge_experts(use_kernels(model), into=into)
    merged, exact = model.merge_and_unload(), dense.merge_and_unload()
    names = interop.expert_parameters(exact)
    assert set(errors) == set(names) and len(names) == 2
    for name in names:
        error = errors[name]
        ours, theirs = merged.get_parameter(name) if into == "dense" else read(merged, name), exact.get_parameter(name)
        start = read(dequantized(tmp_path), name)
        lost = float((ours - theirs).norm())
        assert lost / float(theirs.norm()) == pytest.approx(error.of_weights, rel=1e-3, abs=1e-6)
        assert lost / float((theirs - start).norm()) == pytest.approx(error.of_update, rel=1e-3, abs=1e-5)
    if into == "dense":
        assert all(error.of_weights < 1e-6 for error in errors.values())
        ids = tokens()
        with torch.no_grad():
            torch.testing.assert_close(merged(ids).logits, exact(ids).logits, rtol=1e-3, atol=1e-3)
            merged.save_pretrained(tmp_path / "merged")
            assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").to(runtime.DEVICE)
            torch.testing.assert_close(again(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)
    else:
        assert all(0.03 < error.of_weights < 0.3 < error.of_update * 10 for error in errors.values())
        assert any(not torch.equal(q.packed, old) for q, old in zip(packed(merged), before, strict=True))
        merged.save_pretrained(tmp_path / "merged")
        again = load(tmp_path / "merged")
        assert all(torch.equal(a.packed, b.packed) for a, b in zip(packed(again), packed(merged), strict=True))


def read(model: Any, name: str) -> torch.Tensor:
    module, _, parameter = name.rpartition(".")
    return getattr(model.get_submodule(module), parameter).detach()


def test_what_was_rounded_in_is_not_taken_back(tmp_path: Path) -> None:
    publish(tmp_path, num_hidden_layers=1)
    model = use_kernels(with_lora(load(tmp_path).to(runtime.DEVICE)))
    with pytest.raises(ValueError, match=r"merge: .* kernelbook\.interop\.peft\.merge_experts"):
        model.merge_adapter()
    model.unmerge_adapter()
    with pytest.raises(ValueError, match="merge_experts: into must be one of"):
        interop_peft.merge_experts(model, into="nf4")
    interop_peft.merge_experts(model, into="mxfp4")
    with pytest.raises(ValueError, match=r"unmerge: .* must be dense to give LoRA pairs back"), model.disable_adapter():
        model(tokens(1, 3))
