"""Models in NVFP4, as compressed-tensors and ModelOpt write them: loading, saving, training and merging."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import assert_as_eager, pairs, tensors_of, tiny_model, tokens, with_equal_pairs, write_checkpoint

from kernelbook import check, runtime
from kernelbook.interop import peft as interop_peft
from kernelbook.interop import transformers as interop
from kernelbook.interop import transformers_nvfp4
from kernelbook.interop.transformers import NVFP4ExpertsConfig, use_kernels
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.parameters import dense_parameter

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 11, "num_hidden_layers": 1},
    "mixtral": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
}
LAYOUTS = ("compressed-tensors", "modelopt")
SETTINGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
    },
}


# --- a checkpoint, written and read with nothing of ours ------------------------------------------------------------


VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def encoded(w: torch.Tensor, layout: str) -> dict[str, torch.Tensor]:
    """The tensors of a matrix (N, K)."""
    w, largest = w.float(), w.float().abs().max()
    whole = largest / (6 * 448) if layout == "modelopt" else 6 * 448 / largest
    blocks = w.unflatten(-1, (-1, 16))
    scales = blocks.abs().amax(-1) / 6
    scales = (scales / whole if layout == "modelopt" else scales * whole).to(torch.float8_e4m3fn)
    step = scales.float() * whole if layout == "modelopt" else scales.float() / whole
    distance = (blocks[..., None] / step[..., None, None] - VALUES).abs()
    codes = distance.nan_to_num(0.0).argmin(-1).flatten(-2).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    if layout == "modelopt":
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.rand(())}
    rest = {"weight_global_scale": whole.reshape(1), "input_global_scale": torch.rand(1)}
    return {"weight_packed": packed, "weight_scale": scales, **rest}


def decoded(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    packed = parts["weight" if "weight" in parts else "weight_packed"]
    values = VALUES[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
    scales = parts["weight_scale"].float()
    step = scales * parts["weight_scale_2"] if "weight" in parts else scales / parts["weight_global_scale"]
    return values * step.repeat_interleave(16, -1)


def publish(
    folder: Path, layout: str, *, attention: bool = True, dtype: torch.dtype = torch.float32, name: str = "qwen3_moe"
) -> tuple[Any, Any]:
    """Writes a checkpoint of two shards; -> its tensors, and the dense model that they stand for."""
    model = tiny_model(name, **SIZES[name]).cpu().to(dtype)
    tensors, dense = {}, {}
    names = ["q_proj", "k_proj", "v_proj", "o_proj"] if attention else []
    model.save_pretrained(folder)
    for key, value in sorted(load_file(folder / "model.safetensors").items()):
        module = key.removesuffix(".weight")
        if ".experts." in key or module.rpartition(".")[2] in names:
            # gate, up and down of an expert have very different scales
            factor = {"up_proj": 4.0, "w3": 4.0, "gate_proj": 0.3, "w1": 0.3}.get(module.rpartition(".")[2], 1.0)
            parts = encoded(value * factor, layout)
            tensors |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
            dense[key] = decoded(parts)
        else:
            tensors[key], dense[key] = value, value.float()
    if layout == "modelopt":
        tensors |= {f"model.layers.0.self_attn.{name}_proj.{name}_scale": torch.rand(()) for name in "kv"}
    dense_folder = folder.with_name(f"{folder.name}_dense")
    model.float().save_pretrained(dense_folder)
    save_file(dense, dense_folder / "model.safetensors", {"format": "pt"})
    exact = transformers.AutoModelForCausalLM.from_pretrained(dense_folder, experts_implementation="eager")
    for name, parameter in exact.named_parameters():
        parameter.requires_grad_("experts" not in name and not any(f"{each}.weight" in name for each in names))
    write_checkpoint(folder, tensors, quantization_config=SETTINGS[layout])
    return tensors, exact.to(runtime.DEVICE).eval()


def load(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    quantization = NVFP4ExpertsConfig.taken_from(config)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, quantization_config=quantization)


def packed(model: Any) -> dict[str, NF4Tensor]:
    return {f"{module}.{name}": q for module, name, q, _ in transformers_nvfp4._stored(model)}


# --- loading and saving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", (False, True))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_model_is_the_dense_one(layout: str, attention: bool, tmp_path: Path) -> None:
    """What the parameters stand for; logits and gradients by the rule. Gate and up of an expert have other scales."""
    _, dense = publish(tmp_path / "nvfp4", layout, attention=attention)
    model = load(tmp_path / "nvfp4")
    found = packed(model)
    assert len(found) == 2 + 4 * attention
    for name, q in found.items():
        module, _, parameter = name.rpartition(".")
        ours, theirs = getattr(model.get_submodule(module), parameter), dense.get_parameter(name).detach()
        rtol = 3e-7 if layout == "compressed-tensors" else 0.0  # to divide is to multiply by the reciprocal
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0.0)
        assert q.shape == theirs.shape and q.block_size == 16
    assert_as_eager(dense, lambda _: use_kernels(model))


@pytest.mark.parametrize(("name", "dtype"), (("qwen3_moe", torch.float32), ("mixtral", torch.bfloat16)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_gives_the_same_bytes(layout: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    attention = name == "qwen3_moe"  # where it is dense, there still are scales of a cache
    published, _ = publish(tmp_path / "published", layout, attention=attention, dtype=dtype, name=name)
    model = load(tmp_path / "published")
    assert model.dtype == dtype and all(q.dtype == dtype for q in packed(model).values())
    assert len(packed(model)) == (6 if attention else 2) * model.config.num_hidden_layers
    model.save_pretrained(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert kept == SETTINGS[layout]
    found = tensors_of(tmp_path / "saved")
    assert found.keys() == published.keys()
    for name, value in published.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name
    again = packed(load(tmp_path / "saved"))
    assert all(torch.equal(again[name].packed, q.packed) for name, q in packed(model).items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layer_is_dense_at_any_time(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a second copy of the packed bytes kept: they stay where the bytes of single experts were put together."""
    publish(tmp_path / "nvfp4", layout)
    monkeypatch.setattr("kernelbook.nn.parameters.nf4_dequantize", lambda *_, **__: pytest.fail("it became dense"))
    read: list[NF4Tensor] = []
    make, largest = transformers_nvfp4.fp4_tensor, 11 * 2 * 64 * 64 // 2  # gate and up of all experts, packed

    def watched(bytes_: torch.Tensor, *others: Any, **how: Any) -> NF4Tensor:
        q = make(bytes_, *others, **how)
        assert q.packed.untyped_storage().data_ptr() == bytes_.untyped_storage().data_ptr()
        assert q.packed.untyped_storage().nbytes() == bytes_.numel()
        read.append(q)
        return q

    monkeypatch.setattr(transformers_nvfp4, "fp4_tensor", watched)
    model = load(tmp_path / "nvfp4")
    assert len(read) == 6
    held = [*model.named_parameters(), *model.named_buffers()]
    assert max(t.nbytes for name, t in held if "experts" in name) <= largest


def changed(folder: Path, layout: str, change: Any) -> Path:
    """A published checkpoint, changed."""
    tensors, _ = publish(folder, layout)
    change(tensors)
    write_checkpoint(folder, tensors)
    return folder


ATTENTION, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.1.up_proj"


def _to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{ATTENTION}.weight_scale_2"]


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    (
        ("modelopt", _to_fp8, f"{ATTENTION} must be dense, or in NVFP4 as weight, weight_scale, weight_scale_2, got"),
        (
            "modelopt",
            lambda t: t.update({f"{EXPERT}.pre_quant_scale": torch.ones(64)}),
            f"{EXPERT} must be dense, or in NVFP4 as weight, weight_scale, weight_scale_2, got .*pre_quant_scale",
        ),
        (
            "compressed-tensors",
            lambda t: t.update({f"{ATTENTION}.weight_scale": t[f"{ATTENTION}.weight_scale"].bfloat16()}),
            f"{ATTENTION}.weight_scale must be F8_E4M3, got BF16",
        ),
        (
            "compressed-tensors",
            lambda t: t.update(
                {
                    f"model.layers.0.mlp.gate.{k}": v
                    for k, v in encoded(t.pop("model.layers.0.mlp.gate.weight"), LAYOUTS[0]).items()
                }
            ),
            "model.layers.0.mlp.gate, which is in NVFP4, must be a Linear of the model, got Qwen3MoeTopKRouter",
        ),
    ),
)
def test_what_would_be_computed_wrongly_is_refused(layout: str, change: Any, message: str, tmp_path: Path) -> None:
    folder = changed(tmp_path / "nvfp4", layout, change)
    with pytest.raises(ValueError, match=f"from_pretrained: {message}"):
        load(folder)


@pytest.mark.parametrize("leaf", ("weight_packed", "weight_scale", "weight_global_scale"))
def test_all_experts_must_be_there(leaf: str, tmp_path: Path) -> None:
    """One without any of its tensors is a layer that is not there; one that lacks some is in another format."""

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.0.mlp.experts.2.")]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"experts.gate_up_proj_weight_packed must be in the checkpoint"):
        load(changed(tmp_path / "without", LAYOUTS[0], without))
    with pytest.raises(ValueError, match=f"{EXPERT} must be dense, or in NVFP4"):
        load(changed(tmp_path / "partly", LAYOUTS[0], lambda tensors: tensors.pop(f"{EXPERT}.{leaf}")))


def test_settings() -> None:
    for settings, error, message in (
        (None, TypeError, "settings must be a dict, got NoneType"),
        (
            {"quant_method": "fp8"},
            ValueError,
            "settings must be of quant_method compressed-tensors or modelopt, got fp8",
        ),
        (SETTINGS[LAYOUTS[0]] | {"transform_config": {"R1": 1}}, ValueError, "settings must have no transform_config"),
    ):
        with pytest.raises(error, match=f"NVFP4ExpertsConfig: {message}"):
            NVFP4ExpertsConfig(settings)
    with pytest.raises(ValueError, match="taken_from: config must have a quantization_config"):
        NVFP4ExpertsConfig.taken_from(tiny_model("qwen3_moe", **SIZES["qwen3_moe"]).config)


# --- training and merging -------------------------------------------------------------------------------------------


def both(folder: Path, layout: str) -> tuple[Any, Any]:
    """The packed model and the dense one with the same pairs, on experts and on a packed layer of attention."""
    _, dense = publish(folder, layout)
    model, dense = with_equal_pairs(load(folder), dense)
    return use_kernels(model), dense


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_is_pefts_on_the_dense_model(layout: str, tmp_path: Path) -> None:
    """Logits and the gradients of all pairs by the rule, with float64 as the truth; the adapter is loaded again."""
    model, dense = both(tmp_path / "nvfp4", layout)
    ids, found = tokens(), []
    upstream = torch.randn(*ids.shape, model.config.vocab_size, device=runtime.DEVICE)
    for each in (copy.deepcopy(dense).double(), dense, model):
        logits = each(ids, use_cache=False).logits
        (logits * upstream).sum().backward()
        found.append({("logits",): logits.detach(), **{where: p.grad for where, p in pairs(each).items()}})
    truth, baseline, ours = found
    for where, ref in truth.items():
        factor = check.FORWARD_FACTOR if where == ("logits",) else check.GRADIENT_FACTOR
        check.compare(str(where), ours[where], ref, baseline[where], factor=factor).require()
    model.save_pretrained(tmp_path / "adapter")
    again = use_kernels(peft.PeftModel.from_pretrained(load(tmp_path / "nvfp4"), tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merging_makes_it_dense_or_is_refused(layout: str, tmp_path: Path) -> None:
    model, dense = both(tmp_path / "nvfp4", layout)
    for module in model.modules():
        if isinstance(module, interop_peft.Linear | interop_peft.ParamWrapper):
            with pytest.raises(ValueError, match=r"merge: .* kernelbook\.interop\.peft\.merge_experts"):
                module.merge()
    with pytest.raises(ValueError, match="must be in MXFP4 to be rounded to it again, got e2m1 in blocks of 16"):
        interop_peft.merge_experts(model, into="mxfp4")
    errors = interop_peft.merge_experts(model, into="dense")
    assert len(errors) == 2 and all(error.of_weights < 1e-6 for error in errors.values())
    merged, exact, ids = model.merge_and_unload(), dense.merge_and_unload(), tokens()
    assert not packed(merged)
    merged.save_pretrained(tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").to(runtime.DEVICE)
    with torch.no_grad():
        for each in (merged, again):
            torch.testing.assert_close(each(ids).logits, exact(ids).logits, rtol=1e-3, atol=1e-3)


def test_a_model_that_is_dense_in_part_is_not_saved(tmp_path: Path) -> None:
    publish(tmp_path / "nvfp4", "modelopt")
    model = load(tmp_path / "nvfp4")
    _, experts = next(iter(interop.expert_modules(model)))
    dense_parameter(experts, "down_proj", experts.down_proj.detach())
    with pytest.raises(
        ValueError, match=r"save_pretrained: what was packed must still be, or all be dense, got .*down_proj"
    ):
        model.save_pretrained(tmp_path / "saved")
