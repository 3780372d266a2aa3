"""Loading, saving and training with ``NF4ExpertsConfig``: experts that are 4-bit from the moment they are read."""

import copy
import gc
import json
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, losses, tensors_of, tiny_model, tokens, with_lora

from kernelbook import runtime
from kernelbook.interop import peft as interop_peft
from kernelbook.interop import transformers as interop
from kernelbook.interop import transformers_quantizer as quantizer
from kernelbook.interop.transformers import NF4ExpertsConfig
from kernelbook.interop.transformers_experts import expert_weights, stored
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn import swap

CHANGES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2}
INNER = {
    "qwen3_moe": {"moe_intermediate_size": 24},
    "olmoe": {"intermediate_size": 16},
    "mixtral": {"intermediate_size": 24},
}


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny dense model, and its checkpoint of many small shards."""
    model = tiny_model(name, **CHANGES, **INNER[name], **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return model


def load(folder: Path, config: NF4ExpertsConfig | None = None) -> Any:
    how = {} if config is None else {"quantization_config": config}  # None would be taken for the checkpoint's own
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **how)


def packed(model: Any) -> dict[str, NF4Tensor]:
    return {f"{module}.{name}": stored(experts, name) for module, experts, name in expert_weights(model)}


def assert_same(one: dict[str, NF4Tensor], other: dict[str, NF4Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, q in one.items():
        assert q.shape == other[name].shape and q.block_size == other[name].block_size and q.dtype == other[name].dtype
        for part, value in q._tensors().items():
            assert torch.equal(value, getattr(other[name], part)), (name, part)


@pytest.mark.parametrize("double_quant", (False, True))
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_a_quantized_one_bit_for_bit(name: str, double_quant: bool, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    loaded = load(tmp_path, NF4ExpertsConfig(double_quant, block_size=32))
    interop.quantize_experts(model, double_quant=double_quant, block_size=32)
    assert_same(packed(loaded), packed(model))
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))  # which is the default one while a model is loaded
@pytest.mark.parametrize("double_quant", (False, True))
def test_saved_and_loaded_packed(double_quant: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "dense", dtype)
    model = load(tmp_path / "dense", NF4ExpertsConfig(double_quant, block_size=32))
    model.save_pretrained(tmp_path / "packed", max_shard_size="8KB")
    kept = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert kept == {"quant_method": quantizer.METHOD, "double_quant": double_quant, "block_size": 32}
    for key, value in tensors_of(tmp_path / "packed").items():
        assert "experts" not in key or value.dtype in (torch.uint8, torch.float32), key
    again = load(tmp_path / "packed")
    assert_same(packed(again), packed(model))
    with torch.no_grad():
        ids = tokens()
        assert torch.equal(again(ids).logits, model(ids).logits)
    sizes = [sum(p.stat().st_size for p in (tmp_path / kind).glob("*.safetensors")) for kind in ("dense", "packed")]
    assert sizes[1] < sizes[0]


def test_a_model_that_was_quantized_in_place_is_saved_likewise(tmp_path: Path) -> None:
    model = tiny_model("olmoe", num_hidden_layers=1)
    interop.quantize_experts(model, block_size=32, double_quant=True)
    model.save_pretrained(tmp_path)
    assert_same(packed(load(tmp_path)), packed(model))


@pytest.mark.parametrize("name", MODELS)
def test_no_more_than_one_tensor_of_the_checkpoint_is_dense_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(name, tmp_path)
    largest = max(value.numel() for key, value in tensors_of(tmp_path).items() if "expert" in key)
    alive: list[Any] = []
    quantize = quantizer.nf4_quantize

    def watched(piece: torch.Tensor, **how: Any) -> NF4Tensor:
        assert not any(other() is not None for other in alive), "an earlier tensor is still there"
        assert piece.numel() <= largest < next(iter(interop.expert_modules(model)))[1].down_proj.numel()
        alive.append(weakref.ref(piece))
        return quantize(piece, **how)

    monkeypatch.setattr(quantizer, "nf4_quantize", watched)
    load(tmp_path, NF4ExpertsConfig(block_size=32))
    experts = next(iter(interop.expert_modules(model)))[1]
    assert len(alive) == 2 * 3 * experts.num_experts


@pytest.mark.gpu
@pytest.mark.parametrize("double_quant", (False, True))
def test_peak_of_the_gpus_memory_while_loading(double_quant: bool, tmp_path: Path) -> None:
    """No more than what is kept in the end and the checkpoint's largest tensor; a layer's dense experts are larger."""
    sizes = {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 3, "num_experts": 32, "head_dim": 64}
    model = tiny_model("qwen3_moe", **sizes, moe_intermediate_size=512).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    experts = next(iter(interop.expert_modules(model)))[1]
    largest = model.get_input_embeddings().weight.nbytes
    assert largest < experts.gate_up_proj.nbytes / 1.5
    del model, experts
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load(tmp_path, NF4ExpertsConfig(double_quant))
    held = torch.cuda.memory_allocated() - before
    assert packed(loaded) and torch.cuda.max_memory_allocated() - before <= held + largest


def test_nothing_holds_a_model_that_was_swapped() -> None:
    """A module with 4-bit parameters has a class of its own, and whoever keeps that keeps its weights."""
    model = tiny_model("qwen3_moe")
    interop.quantize_experts(model)
    experts = weakref.ref(next(iter(interop.expert_modules(model)))[1])
    with swap(interop.use_kernels(model), quiet=True), torch.no_grad():
        model(tokens())
    del model
    gc.collect()
    assert experts() is None


def test_blocks_that_cross_tensors_are_quantized_as_a_whole(tmp_path: Path) -> None:
    """24 x 20 weights of an expert are no multiple of 64: then a layer's experts come together."""
    model = tiny_model("qwen3_moe", hidden_size=20, num_hidden_layers=1, head_dim=8)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, NF4ExpertsConfig(block_size=64))
    interop.quantize_experts(model)
    assert_same(packed(loaded), packed(model))


def use_lora(model: Any, **changes: Any) -> Any:
    return interop.use_kernels(with_lora(model, **changes))


def test_fine_tuning_with_peft(tmp_path: Path) -> None:
    """Prepared, wrapped, trained; the adapter is saved, and put on a model that is loaded from its packed form."""
    import peft

    saved("olmoe", tmp_path / "dense")
    model = load(tmp_path / "dense", NF4ExpertsConfig(block_size=32))
    model.save_pretrained(tmp_path / "packed")
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = use_lora(model.train())
    assert model.get_base_model().is_gradient_checkpointing
    ids = tokens()
    found = losses(model, ids)
    assert found[-1] < found[0]
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "packed"), tmp_path / "adapter")
    interop.use_kernels(again)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    how: dict[str, Any] = {"input_ids": ids[:, :4], "max_new_tokens": 2, "do_sample": False}
    assert torch.equal(again.generate(**how), model.generate(**how))


@pytest.mark.parametrize("start", ("dense", "packed"))
def test_experts_that_became_dense_are_saved_as_such(start: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "dense")
    load(tmp_path / "dense", NF4ExpertsConfig(block_size=32)).save_pretrained(tmp_path / "packed")
    model = load(tmp_path / start, NF4ExpertsConfig(block_size=32) if start == "dense" else None)
    wrapped = use_lora(copy.deepcopy(model))
    interop_peft.merge_experts(wrapped, into="dense")
    merged, ids = wrapped.merge_and_unload(), tokens()
    merged.save_pretrained(tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    again = load(tmp_path / "merged").to(runtime.DEVICE)
    assert not any(isinstance(weight, NF4Tensor) for weight in packed(again).values())
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)
        assert_same(packed(interop.use_kernels(model)), packed(load(tmp_path / "packed")))  # it was a copy
    wrapped = use_lora(model, target_parameters=interop.expert_parameters(model)[:2])  # of the first layer alone
    interop_peft.merge_experts(wrapped, into="dense")
    with pytest.raises(
        ValueError, match=r"save_pretrained: what was packed must still be, or all be dense, got .*down_proj"
    ):
        wrapped.merge_and_unload().save_pretrained(tmp_path / "mixed")


def test_parameters_are_counted_without_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("olmoe", tmp_path)
    model = load(tmp_path, NF4ExpertsConfig(block_size=32))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    total = sum(p.numel() for p in model.parameters())
    for each in (model, copy.deepcopy(model), use_lora(model).get_base_model()):
        assert each.is_loaded_in_4bit
        assert each.num_parameters() == sum(p.numel() for p in each.parameters()) >= total
        assert each.num_parameters(exclude_embeddings=True) < each.num_parameters()


def test_a_loaded_model_goes_with_its_last_name(tmp_path: Path) -> None:
    saved("olmoe", tmp_path)
    model = load(tmp_path, NF4ExpertsConfig(block_size=32))
    found = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert found() is None
    finally:
        gc.enable()


def test_trainer_trains_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    saved("qwen3_moe", tmp_path / "dense", num_experts=3)
    model = use_lora(load(tmp_path / "dense", NF4ExpertsConfig(True, block_size=32)))
    before = packed(model.get_base_model())
    ids = tokens(4, 6).cpu()
    data = [{"input_ids": row, "labels": row} for row in ids]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", gradient_checkpointing=True, use_cpu=runtime.DEVICE.type == "cpu",
        gradient_checkpointing_kwargs={"use_reentrant": False}, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=data)
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert any(bool(p.abs().sum() > 0) for name, p in model.named_parameters() if "lora_B" in name)
    assert_same(packed(model.get_base_model()), before)


def test_a_checkpoint_without_its_experts_is_refused(tmp_path: Path) -> None:
    tiny_model("olmoe", num_hidden_layers=1).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    save_file({k: v for k, v in state.items() if "down_proj" not in k}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"from_pretrained: .*experts\.down_proj must be in the checkpoint"):
        load(tmp_path, NF4ExpertsConfig(block_size=32))
    save_file({k: v[:-1] if "down_proj" in k else v for k, v in state.items()}, path, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts\.down_proj must have shape \(32, 16\) for each expert, got \(31, 16\)"
    ):
        load(tmp_path, NF4ExpertsConfig(block_size=32))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="NF4ExpertsConfig: block_size must be one of"):
        NF4ExpertsConfig(block_size=48)
    with pytest.raises(TypeError, match="NF4ExpertsConfig: arguments must be double_quant, block_size and offload, got"):
        NF4ExpertsConfig(bits=4)
    assert NF4ExpertsConfig().bytes_a_weight == 0.5625
    assert NF4ExpertsConfig(double_quant=True).bytes_a_weight == 0.5 + (1 + 4 / 256) / 64
    with pytest.raises(ValueError, match="check_experts: the model must have experts"):
        config = transformers.GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=1)
        quantizer.NF4ExpertsQuantizer(NF4ExpertsConfig(), pre_quantized=False).preprocess_model(
            transformers.GPT2LMHeadModel(config)
        )
