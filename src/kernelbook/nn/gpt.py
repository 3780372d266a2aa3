"""A small GPT whose linear layers can leave out most of their backward pass."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kernelbook import arguments
from kernelbook.attention import flash_attention
from kernelbook.nn.layers import LayerNorm, SparseLinear
from kernelbook.tensors import without_autocast

OUTPUTS = ("attention_out", "down")  # the layers of a block that write to the residual stream; the others read it
# Causal attention of (B, H, N, D) three times.
ATTENTION: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kernelbook": functools.partial(flash_attention, causal=True),
    "torch": functools.partial(F.scaled_dot_product_attention, is_causal=True),
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a :class:`GPT`.

    Attributes:
        vocab_size: tokens.
        context: the longest sequence.
        width: features of a token (``d``).
        depth: blocks.
        heads: attention heads, which divide the width.
        mlp_ratio: hidden features of an MLP, over the width.
        chunk_size: features in a chunk; it divides the width.
        sparse_layers: which linear layers are sparse ones: ``"mlp"``, or ``"all"`` six of a block.
        attention: ``"kernelbook"`` or ``"torch"``: :func:`kernelbook.flash_attention`, or PyTorch's own.
        activation: of the MLP, ``"gelu"`` or ``"relu"``. With ReLU most hidden values become zero, see
            :mod:`bench.sparse_inference`.
        compact_gradient: sparse layers hand out gradients of their active rows only, for
            :class:`kernelbook.train.ChunkAdamW`; PyTorch's optimizers, clipping, DDP, FSDP2 and
            ``torch.compile(fullgraph=True)`` need ``False``.
    """

    vocab_size: int
    context: int = 512
    width: int = 512
    depth: int = 4
    heads: int = 8
    mlp_ratio: int = 4
    chunk_size: int = 64
    sparse_layers: str = "mlp"
    attention: str = "kernelbook"
    activation: str = "gelu"
    compact_gradient: bool = False

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        for name in ("vocab_size", "context", "width", "depth", "heads", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig: {name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"GPTConfig: width must be a multiple of heads ({self.heads}), got {self.width}")
        if self.chunk_size < 16 or self.width % self.chunk_size:
            raise ValueError(
                f"GPTConfig: chunk_size must be at least 16 and divide the width ({self.width}), got {self.chunk_size}"
            )
        for name, choices in (("attention", ATTENTION), ("activation", ACTIVATIONS), ("sparse_layers", ("mlp", "all"))):
            arguments.check_choice("GPTConfig", name, getattr(self, name), tuple(choices))
        if self.attention == "kernelbook" and self.width > 256 * self.heads:
            raise ValueError(
                f"GPTConfig: heads must have at most 256 features, or attention be 'torch', got {self.width // self.heads}"
            )


class _Block(nn.Module):
    """Pre-norm: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d, hidden = config.width, config.mlp_ratio * config.width
        how: dict[str, Any] = {"chunk_size": config.chunk_size, "compact_gradient": config.compact_gradient}
        sparse: Any = functools.partial(SparseLinear, bias=False, **how)
        linear = sparse if config.sparse_layers == "all" else functools.partial(nn.Linear, bias=False)
        self.heads, self.attention, self.activation = config.heads, config.attention, config.activation
        self.norm_attention = LayerNorm(d)
        # Three layers, not one of 3 d features: their gradients need not be put together again.
        self.q, self.k, self.v, self.attention_out = (linear(d, d) for _ in range(4))
        self.norm_mlp = LayerNorm(d)
        self.up, self.down = sparse(d, hidden), sparse(hidden, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        normed = _normed(self.norm_attention, x)
        heads = (batch, length, self.heads, d // self.heads)
        q, k, v = (layer(normed).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = ATTENTION[self.attention](q, k, v).transpose(1, 2).reshape(batch, length, d)
        x = x + self.attention_out(mixed)
        return x + self.down(ACTIVATIONS[self.activation](self.up(_normed(self.norm_mlp, x))))


def _normed(norm: LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """Return the norm in the dtype of ``x``. Autocast would write float32, only for the next layer to round it again."""
    with without_autocast(x):
        return norm(x)


class GPT(nn.Module):
    """Decoder-only transformer: Radford et al., "Language models are unsupervised multitask learners" (2019).

    Token and position embeddings, blocks of causal attention and an MLP with GELU or ReLU, a final norm and a linear head. Under
    autocast the residual stream has its dtype.

    ``model.sparse_layers()`` are the layers whose ``active_chunks`` and ``mode`` can be set, see
    :class:`kernelbook.nn.SparseLinear`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.norm = LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # as many additions to the residual stream: Radford et al., section 2.3
            for layer in (block.attention_out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.depth))  # type: ignore[union-attr, arg-type]

    def sparse_layers(self) -> dict[str, SparseLinear]:
        """Return the sparse layers by name, in order."""
        return {name: module for name, module in self.named_modules() if isinstance(module, SparseLinear)}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """tokens (B, N) int64 -> logits (B, N, vocab_size), or with targets (B, N) the mean loss; -100 is left out.

        Raises ``ValueError`` when the sequences are longer than the context, or the targets have another shape.
        """
        batch, length = tokens.shape
        if length > self.config.context:
            raise ValueError(f"GPT: tokens must have at most {self.config.context} columns, got {length}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"GPT: targets must have shape {tuple(tokens.shape)}, got {tuple(targets.shape)}")
        x = self.tokens(tokens) + self.positions.weight[:length]
        x = x.to(arguments.autocast_dtype(x) or x.dtype)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(_normed(self.norm, x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(batch * length, -1).float(), targets.reshape(-1))
