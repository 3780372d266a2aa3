"""The loss of a language model of transformers without the logits of all tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernelbook import arguments
from kernelbook.interop import base_model

__all__ = ["loss_in_pieces"]


def loss_in_pieces(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    piece: int = 512,
    **others: Any,
) -> torch.Tensor:
    """The mean cross entropy of the next token, as ``model(..., labels=labels).loss``, ``piece`` tokens' logits at a time.

    A piece's logits are made again in the backward pass. With 151,936 tokens and sequences of 2,048 they take 3 GiB in float32
    otherwise. For ``CapturedStep(..., loss=loss_in_pieces)``.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        input_ids: (B, N). labels: (B, N) int64; -100 does not count.
        attention_mask, others: what the model without its head takes beside them.
        piece: tokens.

    Returns:
        () float32; 0 where no label counts. A router's auxiliary loss is no part of it.

    Raises:
        TypeError: ``piece`` is not an integer.
        ValueError: ``piece`` is below 1.
    """
    piece = arguments.integer("loss_in_pieces", "piece", piece, least=1)
    base = base_model(model)
    head = base.get_output_embeddings()
    body = base.base_model(input_ids, attention_mask=attention_mask, **({"use_cache": False} | others))
    rows, targets = body.last_hidden_state[:, :-1].flatten(0, 1), labels[:, 1:].flatten()

    def of(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(part).float(), wanted, reduction="sum")

    parts = [
        checkpoint(of, part, wanted, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in zip(rows.split(piece), targets.split(piece), strict=True)
    ]
    return torch.stack(parts).sum() / (targets != -100).sum().clamp(min=1)
