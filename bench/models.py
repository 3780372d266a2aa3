"""Sizes of language models, from their published configurations (``config.json`` on the Hugging Face Hub): for benchmarks.

What a room measures at these sizes is its bench's ``models()``: shapes that no rule was fitted to.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """One configuration; ``intermediate`` is the width of the dense network, 0 where every layer has experts.

    ``experts`` counts the routed ones, ``expert_intermediate`` is the width of one, ``slots`` how many each token takes.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    expert_intermediate: int = 0
    slots: int = 0


MODELS = {
    "Qwen3-8B": Model(4096, 12288, 32, 8, 128),
    "Qwen3-32B": Model(5120, 25600, 64, 8, 128),
    "Qwen3-235B-A22B": Model(4096, 0, 64, 4, 128, 128, 1536, 8),
    "Llama-4-Scout": Model(5120, 16384, 40, 8, 128, 16, 8192, 1),
    "gpt-oss-20b": Model(2880, 0, 64, 8, 64, 32, 2880, 4),
    "gpt-oss-120b": Model(2880, 0, 64, 8, 64, 128, 2880, 4),
    "GLM-4.5-Air": Model(4096, 10944, 96, 8, 128, 128, 1408, 8),
    "DeepSeek-V3": Model(7168, 18432, 128, 128, 192, 256, 2048, 8),  # its heads are latent attention's: not ours
    "Gemma-3-1b": Model(1152, 6912, 4, 1, 256),
    "Gemma-3-4b": Model(2560, 10240, 8, 4, 256),
    "Gemma-3-27b": Model(5376, 21504, 32, 16, 128),
    "OLMo-2-7B": Model(4096, 11008, 32, 32, 128),
    "OLMo-2-13B": Model(5120, 13824, 40, 40, 128),
    "OLMo-2-32B": Model(5120, 27648, 40, 8, 128),
    "Phi-4": Model(5120, 17920, 40, 10, 128),
    "Phi-4-mini": Model(3072, 8192, 24, 8, 128),
    "Phi-3.5-MoE": Model(4096, 0, 32, 8, 128, 16, 6400, 2),
    "Llama-3.2-3B": Model(3072, 8192, 24, 8, 128),
    "Qwen3-Next-80B-A3B": Model(2048, 0, 16, 2, 256, 512, 512, 10),
}
