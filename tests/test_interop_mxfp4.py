"""gpt-oss as it is published: loading, saving, training and merging with ``MXFP4ExpertsConfig``."""

import json
import math
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import peft
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import COMMON, assert_as_eager, losses, tokens
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from kernelbook import check, runtime
from kernelbook.interop import peft as interop_peft
from kernelbook.interop import transformers as interop
from kernelbook.interop import transformers_attention, transformers_experts, transformers_fp4, transformers_generation
from kernelbook.interop.transformers import MXFP4ExpertsConfig, use_kernels
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.experts import LoRAPair, gated_experts
from kernelbook.packed.fp4 import fp4_parts, fp4_quantize, fp4_tensor

SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
SIZES: dict[str, Any] = {
    **COMMON, "hidden_size": 96, "intermediate_size": 64, "head_dim": 8, "num_local_experts": 3, "sliding_window": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def random_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**{**SIZES, **changes})).to(runtime.DEVICE).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
        for bias in (layer.mlp.experts.gate_up_proj_bias, layer.mlp.experts.down_proj_bias, layer.mlp.router.bias):
            torch.nn.init.normal_(bias)
    return model


def publish(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, torch.Tensor]:
    """Writes a checkpoint as gpt-oss' are, in two shards; -> its tensors."""
    model = random_model(**changes).to(dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, _ = fp4_parts(fp4_quantize(value.mT.contiguous()))
            tensors |= {f"{name}_blocks": blocks.unflatten(-1, (-1, 16)), f"{name}_scales": scales.view(torch.uint8)}
        else:
            tensors[name] = value
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    folder.mkdir(exist_ok=True)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shards = {name: names[i % 2] for i, name in enumerate(tensors)}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.dtype = dtype
    settings = model.config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED},
    }
    settings["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


def load(folder: Path, config: Any = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config or MXFP4ExpertsConfig())


def dequantized(folder: Path) -> Any:
    """As transformers itself makes it dense; 5.17 does so in bfloat16 whatever the model's dtype, which loses nothing."""
    model = load(folder, Mxfp4Config(dequantize=True)).to(runtime.DEVICE, torch.float32)
    model.set_experts_implementation("eager")
    return model.eval()


def packed(model: Any) -> list[NF4Tensor]:
    return [
        transformers_experts.stored(experts, name)
        for _, experts in interop.expert_modules(model)
        for name in transformers_experts.weight_names(experts)
    ]


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


def test_greedy_tokens_with_and_without_padding(tmp_path: Path) -> None:
    publish(tmp_path)
    model, dense = load(tmp_path).to(runtime.DEVICE), dequantized(tmp_path)
    on_kernels(model)
    ids = tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for how in ({}, {"attention_mask": mask}):
        expected, ours = (each.generate(ids, max_new_tokens=5, do_sample=False, **how) for each in (dense, model))
        assert torch.equal(ours, expected)


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
    found = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
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
    publish(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kept = {key: file.get_tensor(key) for key in file.keys() if key != missing}  # noqa: SIM118
        save_file(kept, path, {"format": "pt"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"][missing]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"from_pretrained: {missing} must be in the checkpoint"):
        load(tmp_path)


def test_rows_that_end_within_a_block_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, num_hidden_layers=1)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="down_proj must have rows of a multiple of 32 elements, got 48"):
        load(tmp_path)


def test_another_size_than_the_configuration_s_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, num_hidden_layers=1)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["intermediate_size"] //= 2
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        (ValueError, RuntimeError), match=r"gate_up_proj_blocks must be in the checkpoint.* or in another shape"
    ):
        load(tmp_path)


def test_a_dense_checkpoint_is_refused(tmp_path: Path) -> None:
    random_model(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MXFP4ExpertsConfig: the checkpoint must be in MXFP4"):
        load(tmp_path)
    with pytest.raises(TypeError, match="MXFP4ExpertsConfig: the argument must be modules_to_not_convert"):
        MXFP4ExpertsConfig(block_size=64)


# --- training and merging -------------------------------------------------------------------------------------------


def with_lora(model: Any, **changes: Any) -> Any:
    """LoRA on all experts and on the queries, with a B that is random too."""
    options: dict[str, Any] = {
        "target_parameters": interop.expert_parameters(model), "target_modules": ["q_proj"], "init_lora_weights": False,
    }  # fmt: skip
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **{**options, **changes}))


def pairs(model: Any) -> dict[tuple[str, ...], torch.nn.Parameter]:
    """By what they are for: around packed parameters PEFT nests its wrappers in another order."""
    found = {}
    for name, module in model.named_modules():
        for part in ("lora_A", "lora_B"):
            if hasattr(module, part):
                where = name.replace(".base_layer", ""), getattr(module, "parameter_name", ""), part
                found[where] = getattr(module, part)["default"].weight
    return found


def both(folder: Path) -> tuple[Any, Any]:
    """The packed model and the dense one with the same pairs."""
    publish(folder, num_hidden_layers=1)
    model, dense = with_lora(load(folder).to(runtime.DEVICE)), with_lora(dequantized(folder))
    theirs = pairs(dense)
    for where, ours in pairs(model).items():
        ours.data.copy_(theirs[where])
    assert len(theirs) == len(pairs(model)) == 6
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


def test_a_model_that_is_dense_in_part_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, num_hidden_layers=1)
    model = load(tmp_path).to(runtime.DEVICE)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    name = interop.expert_parameters(model)[0]
    interop_peft.merge_experts(with_lora(model, target_parameters=[name]), into="dense")
    with pytest.raises(ValueError, match=r"what was packed must still be, or all be dense, got a dense .*gate_up_proj"):
        model.save_pretrained(tmp_path / "mixed")


def test_nothing_is_lost_of_nothing(tmp_path: Path) -> None:
    publish(tmp_path, num_hidden_layers=1)
    model = load(tmp_path).to(runtime.DEVICE)
    for q in packed(model):
        q.packed.zero_()
    errors = interop_peft.merge_experts(with_lora(model, init_lora_weights=True), into="dense")
    assert len(errors) == 2 and all(error == (0.0, 0.0) for error in errors.values())


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


# --- a probe of gradients -------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FULL: dict[str, int] = {
    "experts": 32,
    "hidden": 2880,
    "inner": 2880,
    "tokens": 512,
    "top": 4,
    "rank": 16,
}  # gpt-oss-20b
SMALL: dict[str, int] = {"experts": 6, "hidden": 96, "inner": 64, "tokens": 24, "top": 2, "rank": 4}
RARE = {1: 1, 4: 2}  # experts with so many tokens
ENTRIES = 400


class Layer:
    """One layer of gpt-oss' experts, of random bytes and scales, with LoRA pairs; what comes in and the gradient of what goes out."""

    def __init__(self, *, experts: int, hidden: int, inner: int, tokens: int, top: int, rank: int) -> None:
        torch.manual_seed(2)
        dtype = torch.bfloat16 if runtime.DEVICE.type == "cuda" else torch.float32
        normal = lambda *shape: torch.randn(shape, device=runtime.DEVICE).to(dtype)  # noqa: E731
        self.packed = {"up": self._bytes(experts, 2 * inner, hidden), "down": self._bytes(experts, hidden, inner)}
        self.leaves = {
            "x": normal(tokens, hidden),
            "gates": normal(tokens, top).float().softmax(-1).to(dtype),
            "up_a": normal(experts, rank, hidden) / hidden**0.5, "up_b": normal(experts, 2 * inner, rank) / rank**0.5,
            "down_a": normal(experts, rank, inner) / inner**0.5, "down_b": normal(experts, hidden, rank) / rank**0.5,
            "up_bias": normal(experts, 2 * inner), "down_bias": normal(experts, hidden),
        }  # fmt: skip
        self.upstream = normal(tokens, hidden)
        often = torch.tensor([e for e in range(experts) if e not in RARE])
        ids = torch.stack([often[torch.randperm(len(often))[:top]] for _ in range(tokens)])
        token = 3
        for expert, count in RARE.items():
            for _ in range(count):
                ids[token, token % top] = expert
                token += 4
        self.ids = ids.to(runtime.DEVICE)

    @staticmethod
    def _bytes(e: int, n: int, k: int) -> list[torch.Tensor]:
        """Blocks and scales of matrices that make rows about as long as those they are given."""
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8, device=runtime.DEVICE)
        least = 126 + round(math.log2(1 / (2.93 * k**0.5)))
        return [blocks, torch.randint(least, least + 3, (e, n, k // 32), device=runtime.DEVICE).to(torch.uint8)]

    def by_kernels(self, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of the packed product, with these scales of the first matrix."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.leaves.items()}
        up, down = (
            fp4_tensor(blocks, its, dtype=leaves["x"].dtype)
            for blocks, its in ((self.packed["up"][0], scales), self.packed["down"])
        )
        out = gated_experts(
            leaves["x"], up, down, self.ids, leaves["gates"], activation="swigluoai",
            gate_up_lora=LoRAPair(leaves["up_a"], leaves["up_b"], 0.5), gate_up_bias=leaves["up_bias"],
            down_lora=LoRAPair(leaves["down_a"], leaves["down_b"], 0.5), down_bias=leaves["down_bias"],
        )  # fmt: skip
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), self.upstream), strict=True))

    def by_hand(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gradients of dequantize-and-multiply, one expert at a time."""
        grads = {name: torch.zeros_like(value, dtype=dtype) for name, value in self.leaves.items()}
        for e in range(len(self.packed["up"][0])):
            token, slot = (self.ids == e).nonzero(as_tuple=True)
            dense = {name: self._dense(*(part[e] for part in parts)).to(dtype) for name, parts in self.packed.items()}
            where: dict[str, Any] = dict.fromkeys(self.leaves, e) | {"x": token, "gates": (token, slot)}
            own = {name: self.leaves[name][at].to(dtype).requires_grad_() for name, at in where.items()}

            def product(name: str, rows: torch.Tensor, dense: Any = dense, own: Any = own) -> torch.Tensor:
                pair = rows @ own[f"{name}_a"].mT @ own[f"{name}_b"].mT
                return rows @ dense[name].mT + 0.5 * pair + own[f"{name}_bias"]

            h = product("up", own["x"])
            gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
            out = product("down", gate * torch.sigmoid(1.702 * gate) * (up + 1)) * own["gates"][:, None]
            found = torch.autograd.grad(out, list(own.values()), self.upstream[token].to(dtype))
            for (name, at), grad in zip(where.items(), found, strict=True):
                if name == "x":
                    grads[name].index_add_(0, token, grad)
                else:
                    grads[name][at] = grad
        return grads

    @staticmethod
    def _dense(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
        values = E2M1.to(blocks.device)[codes] * torch.exp2(scales.float() - 127)[..., None]
        return values.flatten(-2)

    def places(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Some hundred entries of each gradient, and as many of what rarely used experts have: names and flat indices."""
        rare = torch.tensor(list(RARE), device=runtime.DEVICE)
        rows = torch.isin(self.ids, rare).any(-1).nonzero()[:, 0]
        for name, value in self.leaves.items():
            per_row = value.numel() // len(value)
            few = rows if name in ("x", "gates") else rare
            for kind, those in (("all", torch.arange(len(value), device=runtime.DEVICE)), ("rare", few)):
                row = those[torch.randint(len(those), (ENTRIES,), device=runtime.DEVICE)]
                yield name, kind, row * per_row + torch.randint(per_row, (ENTRIES,), device=runtime.DEVICE)


@pytest.mark.parametrize(
    "sizes", (SMALL, pytest.param(FULL, marks=(pytest.mark.gpu, pytest.mark.memory))), ids=("small", "full")
)
def test_a_probe_of_gradients_finds_a_wrong_scale(sizes: dict[str, int]) -> None:
    """By the rule at some hundred entries of every gradient; with one scale of a rarely used expert wrong they are not."""
    layer = Layer(**sizes)
    ids = layer.ids.flatten().bincount(minlength=sizes["experts"])
    assert all(ids[expert] == count for expert, count in RARE.items())
    truth, baseline = layer.by_hand(torch.float64), layer.by_hand(layer.leaves["x"].dtype)
    scales = layer.packed["up"][1]
    wrong = scales.clone()
    wrong[4, 7, 1] += 8
    ours, planted = layer.by_kernels(scales), layer.by_kernels(wrong)
    found = []
    for name, kind, at in layer.places():
        ref, base = truth[name].flatten()[at], baseline[name].flatten()[at]
        verdicts = [
            check.compare(f"{name}, {kind}", grads[name].flatten()[at], ref, base, factor=check.GRADIENT_FACTOR)
            for grads in (ours, planted)
        ]
        verdicts[0].require()
        if not verdicts[1].passed:
            found.append((name, kind))
    # Of 2,880 columns the scale belongs to 32; it changes the output of its rows, and what follows from that.
    assert {kind for _, kind in found} >= {"rare"}
    # Small sizes are the interpreter's; a GPU is asked with those of a model.
    assert sizes is FULL or not runtime.INTERPRET or ("x", "rare") in found
