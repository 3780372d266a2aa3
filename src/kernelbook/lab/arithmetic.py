"""What a mixture-of-experts model holds, reads and computes: the least that its sizes ask for, before anything is measured.

Bytes are what has to be read once and operations what has to be multiplied and added; what norms, softmax and routing
do beside is left out.
"""

import dataclasses
from typing import Any

# Bits of a stored weight. NF4: 4, and an absmax of 32 bits for 64 weights; doubly quantized 8 bits for 64, 32 for 256 of those.
# MXFP4: an exponent of 8 bits for 32.
BITS = {"dense": 16.0, "nf4": 4 + 32 / 64, "nf4_double": 4 + 8 / 64 + 32 / (64 * 256), "mxfp4": 4 + 8 / 32}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A decoder of ``layers`` blocks: attention with ``heads`` and ``kv_heads`` of ``head_dim``, then experts.

    ``experts`` of ``inner`` features, each token to ``slots`` of them. A tied head is the embedding once more.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    slots: int
    inner: int
    vocab: int
    tied: bool = False

    @classmethod
    def of(cls, config: Any) -> "Sizes":
        """Of a configuration of transformers, such as Qwen3-MoE's or OLMoE's. Of windows it knows nothing: gpt-oss' too are whole."""
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            experts=getattr(config, "num_experts", None) or config.num_local_experts,
            slots=config.num_experts_per_tok,
            inner=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
        )

    # --- weights ---

    @property
    def expert(self) -> int:
        """Weights of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.inner

    @property
    def attention(self) -> int:
        """Weights of a layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> dict[str, int]:
        """Weights by part; norms are left out."""
        return {
            "experts": self.layers * self.experts * self.expert,
            "attention": self.layers * self.attention,
            "routers": self.layers * self.experts * self.hidden,
            "embeddings": self.head * (1 if self.tied else 2),
        }

    def held_gb(self, kind: str) -> float:
        """GB of the weights with experts stored as ``kind``, the rest in bfloat16."""
        parts = self.parameters
        return (parts["experts"] * BITS[kind] + (sum(parts.values()) - parts["experts"]) * 16) / 8e9

    def lora_parameters(self, rank: int) -> int:
        """Parameters of the pairs on every expert's matrices, and on the four projections of attention."""
        experts = self.experts * (2 * self.hidden + 3 * self.inner)
        attention = 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * rank * (experts + attention)

    # --- a token ---

    def experts_used(self, tokens: int) -> float:
        """Different experts of a layer that ``tokens`` go to, on average, if each goes anywhere alike."""
        return self.experts * (1 - (1 - self.slots / self.experts) ** tokens)

    def cache_gb(self, batch: int, context: int) -> float:
        """GB of keys and values in bfloat16."""
        return 4 * self.layers * batch * context * self.kv_heads * self.head_dim / 1e9

    def step_gb(self, kind: str, batch: int, context: int) -> float:
        """GB that a step of decoding reads: the weights it uses, and all keys and values."""
        experts = self.layers * self.experts_used(batch) * self.expert * BITS[kind]
        others = self.layers * (self.attention + self.experts * self.hidden) + self.head
        return (experts + others * 16) / 8e9 + self.cache_gb(batch, context)

    def forward_gflop(self, batch: int, tokens: int, *, rank: int = 0) -> float:
        """10^9 operations of a forward pass over ``batch`` sequences of ``tokens``."""
        of_token = self.layers * (self.slots * self.expert + self.attention + self.experts * self.hidden)
        pairs = self.slots * (2 * self.hidden + 3 * self.inner)
        pairs += 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim
        seen = tokens * (tokens + 1) / 2  # keys of all queries: causal
        attention = 4 * self.layers * self.heads * self.head_dim * seen
        return batch * (2 * (of_token + self.layers * rank * pairs + self.head) * tokens + attention) / 1e9

    def training_gflop(self, batch: int, tokens: int, rank: int, *, checkpoint: bool) -> float:
        """Of a step that trains LoRA pairs: forward, once more where activations are not kept, and the gradients of rows.

        Frozen weights need no gradient; that of the pairs is a hundredth of the rest. Attention's backward pass has 2.5 times
        the forward pass's operations.
        """
        forward = self.forward_gflop(batch, tokens, rank=rank)
        attention = batch * 4 * self.layers * self.heads * self.head_dim * tokens * (tokens + 1) / 2 / 1e9
        return forward * (3 if checkpoint else 2) + 1.5 * attention

    def kept_gb(self, batch: int, tokens: int, *, checkpoint: bool) -> float:
        """GB of bfloat16 activations that a training step keeps for its backward pass: with checkpoints each layer's input.

        Without: of a token the inputs of the norms, of the projections and of both products, and what lies between them.
        """
        if checkpoint:
            return 2 * self.layers * batch * tokens * self.hidden / 1e9
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        of_token = 4 * self.hidden + 2 * (q + kv) + q + self.slots * (2 * self.inner + self.inner)
        return 2 * self.layers * batch * tokens * of_token / 1e9
