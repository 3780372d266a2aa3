"""Small random mixture-of-experts models of transformers, for the tests of interop."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from kernelbook import check, runtime
from kernelbook.interop import transformers as interop

COMMON: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,  # weak weights would make every block look the same
    "pad_token_id": 0,
}
WINDOW = 4
SMALL: dict[str, Any] = {**COMMON, "intermediate_size": 48, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GPT2: dict[str, Any] = {
    "vocab_size": COMMON["vocab_size"], "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
WINDOWS: dict[str, Any] = {**SMALL, "sliding_window": WINDOW}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {**COMMON, **EXPERTS}),
    "olmoe": (OlmoeConfig, {**COMMON, "num_experts": 4, "intermediate_size": 16}),
    "mixtral": (MixtralConfig, {**COMMON, "num_local_experts": 3, "intermediate_size": 24}),
    "gemma2": (Gemma2Config, {**WINDOWS, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
    "gpt_oss": (GptOssConfig, {**WINDOWS, "num_local_experts": 3, "rope_parameters": ROPE}),
    "gpt2": (GPT2Config, GPT2),
    "llama": (LlamaConfig, SMALL),
    "mistral": (MistralConfig, WINDOWS),
}
MODELS = ("qwen3_moe", "olmoe", "mixtral")
BY_ATTENTION = ("gemma2", "gpt_oss", "gpt2", "llama", "mistral")  # windows, soft caps, sinks, learned positions


def tiny_model(name: str, **changes: Any) -> Any:
    """A random model of this kind with transformers' own eager experts, in float32, without dropout."""
    config, sizes = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**{**sizes, **changes})).to(runtime.DEVICE).eval()
    if name in (*MODELS, "gpt_oss"):
        model.set_experts_implementation("eager")
    return model


def attention_model(name: str, **changes: Any) -> Any:
    """The same with eager attention too, and sinks that weigh as much as keys."""
    model = tiny_model(name, **changes)
    for layer in model.model.layers if name == "gpt_oss" else ():
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("eager")
    return model


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    """Random token ids (batch, length)."""
    return torch.randint(1, COMMON["vocab_size"], (batch, length), device=runtime.DEVICE)


def _outputs(model: Any, embeddings: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Logits, the gradient of the embeddings, and those of all parameters that require one."""
    embeddings = embeddings.detach().clone().requires_grad_()
    model.zero_grad()
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    (logits * upstream).sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    return [logits.detach(), embeddings.grad, *(torch.zeros(()) if grad is None else grad for grad in grads)]


def assert_as_eager(model: Any, use: Any) -> None:
    """``use(copy)`` gives the logits and gradients of ``model``, by the rule of correctness with float64 as the truth."""
    embeddings = torch.randn(2, 9, model.config.hidden_size, device=runtime.DEVICE)
    upstream = torch.randn(2, 9, model.config.vocab_size, device=runtime.DEVICE)
    truth = _outputs(copy.deepcopy(model).double(), embeddings.double(), upstream.double())
    baseline = _outputs(model, embeddings, upstream)
    ours = _outputs(use(copy.deepcopy(model)), embeddings, upstream)
    names = ["logits", "dembeddings", *(f"d{name}" for name, p in model.named_parameters() if p.requires_grad)]
    for i, (name, out, ref, base) in enumerate(zip(names, ours, truth, baseline, strict=True)):
        factor = check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR
        check.compare(name, out, ref, base, factor=factor).require()


def losses(model: Any, ids: torch.Tensor, steps: int = 3) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_lora(model: Any, rank: int = 3, **changes: Any) -> Any:
    """LoRA on all experts and on the attention's queries; its B is random too, else the adapter would do nothing."""
    import peft

    options: dict[str, Any] = {
        "target_parameters": interop.expert_parameters(model), "target_modules": ["q_proj"], "lora_alpha": 6,
        "init_lora_weights": False,
    }  # fmt: skip
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, **{**options, **changes}))


def pairs(model: Any) -> dict[tuple[str, ...], torch.nn.Parameter]:
    """By what they are for: around packed parameters PEFT nests its wrappers in another order."""
    found = {}
    for name, module in model.named_modules():
        for part in ("lora_A", "lora_B"):
            if hasattr(module, part):
                where = name.replace(".base_layer", ""), getattr(module, "parameter_name", ""), part
                found[where] = getattr(module, part)["default"].weight
    return found


def with_equal_pairs(model: Any, dense: Any) -> tuple[Any, Any]:
    """Both with LoRA, if they have none, and the pairs of the first in the second."""
    model, dense = (each if pairs(each) else with_lora(each) for each in (model, dense))
    ours, theirs = pairs(model), pairs(dense)
    assert ours.keys() == theirs.keys() and ours
    for where, pair in ours.items():
        theirs[where].data.copy_(pair)
    return model, dense


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> None:
    """Two shards in the place of those that are there, and more settings in ``config.json``."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    written = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(written))


def dequantized(name: str, quantized: Any, **changes: Any) -> Any:
    """The model with ordinary, frozen weights of the values that the 4-bit experts of ``quantized`` stand for."""
    dense = tiny_model(name, **changes)
    for (_, ours), (_, theirs) in zip(interop.expert_modules(dense), interop.expert_modules(quantized), strict=True):
        for weight in ("gate_up_proj", "down_proj"):
            getattr(ours, weight).requires_grad_(False).copy_(getattr(theirs, weight))
    return dense
