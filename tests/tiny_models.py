"""Small random mixture-of-experts models of transformers, for the tests of interop."""

from typing import Any

import torch
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from kernelbook import runtime

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
MODELS: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 4, "intermediate_size": 16}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 3, "intermediate_size": 24}),
}


def tiny_model(name: str, **changes: Any) -> Any:
    """A random model of this kind with transformers' own eager experts, in float32, without dropout."""
    model_class, config_class, own = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**COMMON, **own, **changes})).to(runtime.DEVICE).eval()
    model.set_experts_implementation("eager")
    return model


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    """Random token ids (batch, length)."""
    return torch.randint(1, COMMON["vocab_size"], (batch, length), device=runtime.DEVICE)
