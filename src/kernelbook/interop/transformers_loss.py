"""The loss of a language model of transformers without the logits of all tokens."""

import inspect
import weakref
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from kernelbook import arguments
from kernelbook.interop import base_model

LOGITS = (0.1, 1.0, 30.0, 1000.0)  # sizes at which logits are compared: a soft cap shows in large ones alone
_compared: weakref.WeakSet[Any] = weakref.WeakSet()  # models of which we know that our logits are theirs


def loss_in_pieces(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    piece: int = 512,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    **others: Any,
) -> torch.Tensor:
    """The mean cross entropy of the next token, as ``model(..., labels=labels).loss``, ``piece`` tokens' logits at a time.

    A piece's logits are made again in the backward pass. With 151,936 tokens and sequences of 2,048 they take 3 GiB in float32
    otherwise. For ``CapturedStep(..., loss=loss_in_pieces)``.

    Logits are those of the output layer, with the soft cap or the scale that Gemma's, Granite's and Cohere's configurations
    name. The first call for a model compares them with the model's own, on two tokens, for which the host waits.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        input_ids: (B, N).
        labels: (B, N) int64; ``ignore_index`` does not count.
        attention_mask, others: what the model without its head takes beside them.
        piece: tokens.
        num_items_in_batch: what the sum is divided by, where it is not this batch's labels that count: with gradients
            accumulated, those of all batches.
        shift_labels: (B, N) the next token of each, in the place of ``labels``.
        ignore_index: the label that does not count.

    Returns:
        () float32; 0 where no label counts. A router's auxiliary loss is no part of it.

    Raises:
        TypeError: ``piece``, ``num_items_in_batch`` or ``ignore_index`` is not an integer; or another model, such as one in DDP.
        ValueError: ``piece`` is below 1; or the model makes logits or a loss in another way, or would with an argument of its
            own such as ``logits_to_keep``, so that this would not be its loss; or PEFT adds tokens (prompt tuning) or a loss.
        RuntimeError: a graph is captured, and there was no call for this model before.
    """
    piece = arguments.integer("loss_in_pieces", "piece", piece, least=1)
    ignore_index = arguments.integer("loss_in_pieces", "ignore_index", ignore_index)
    if num_items_in_batch is not None and not isinstance(num_items_in_batch, torch.Tensor):
        expected = "an integer or a tensor of one"
        num_items_in_batch = arguments.integer("loss_in_pieces", "num_items_in_batch", num_items_in_batch, expected)
    base = base_model(model)
    if not isinstance(base, transformers.PreTrainedModel):
        expected = "a transformers model or a PeftModel around one"
        raise TypeError(f"loss_in_pieces: model must be {expected}, got {type(base).__name__}")
    _refuse_wrapper(model, base)
    _refuse_others(base, others)
    if base not in _compared and input_ids.numel():
        device = input_ids.device.type
        # Under autocast weights that were cast without a gradient would be taken again, and get none.
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            _compare(base, input_ids)
        _compared.add(base)
    others = {"use_cache": False} | others | {"return_dict": True}
    body = base.base_model(input_ids, attention_mask=attention_mask, **others)
    if shift_labels is None:
        rows, targets = body.last_hidden_state[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    else:
        rows, targets = body.last_hidden_state.flatten(0, 1), shift_labels.flatten()

    def of(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(_logits(base, part).float(), wanted, ignore_index=ignore_index, reduction="sum")

    parts = [
        checkpoint(of, part, wanted, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in zip(rows.split(piece), targets.split(piece), strict=True)
    ]
    total = torch.stack(parts).sum()
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum().clamp(min=1)
    return total / (
        num_items_in_batch.to(total.device) if isinstance(num_items_in_batch, torch.Tensor) else num_items_in_batch
    )


def _refuse_wrapper(model: Any, base: Any) -> None:
    """Raises for what PEFT does around ``base``: learned tokens before the others, or a loss of its own, as AdaLoRA's."""
    around: Any = type(getattr(model, "base_model", model))
    # A tuner's forward pass is that of its base class, or handed on.
    if model is not base and around.forward.__module__ not in ("peft.tuners.tuners_utils", "torch.nn.modules.module"):
        kinds = sorted({str(getattr(config, "peft_type", config)) for config in model.peft_config.values()})
        raise ValueError(
            f"loss_in_pieces: model must be a PeftModel that adds nothing around {type(base).__name__}, got one with "
            f"{', '.join(kinds)}; take the model's own loss"
        )


def _refuse_others(base: Any, others: dict[str, Any]) -> None:
    """Raises for what the model's forward pass would take itself, and its body would pass over in silence."""
    own = (
        inspect.signature(base.forward).parameters.keys() - inspect.signature(base.base_model.forward).parameters.keys()
    )
    for name in sorted(others.keys() & ((own | {"output_router_logits"}) - {"return_dict"})):
        value = others[name]
        if isinstance(value, torch.Tensor) or value:
            raise ValueError(
                f"loss_in_pieces: {name} must be left out, got {value}, of which {type(base).__name__} makes another loss; take "
                f"the model's own loss"
            )


def _logits(base: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the model makes of its last hidden states: its output layer, and what configurations say comes after it."""
    logits: torch.Tensor = base.get_output_embeddings()(hidden)
    config = base.config.get_text_config()
    cap, divisor, factor = (
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_scaling", "logit_scale")
    )
    if divisor is not None:
        logits = logits / divisor
    if factor is not None:
        logits = logits * factor
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def _compare(base: Any, input_ids: torch.Tensor) -> None:
    """Raises where the model's own forward pass makes other logits of the same hidden states, or another loss of them."""
    name = type(base).__name__
    if input_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"loss_in_pieces: {name} must have a call before one is captured, which compares its logits")
    if getattr(base, "loss_function", ForCausalLMLoss) is not ForCausalLMLoss:
        raise ValueError(
            f"loss_in_pieces: model must have transformers' loss of causal language models, got {name} with another "
            f"loss_function; take the model's own loss"
        )
    probes: list[torch.Tensor] = []

    def instead(_module: Any, _inputs: Any, out: Any) -> Any:
        """Hidden states of our choice in the place of the body's."""
        like = out.last_hidden_state
        probe = (torch.arange(like[:1, :1].numel() * len(LOGITS), device=like.device).float() * 1.7).sin()
        probe = probe.view(1, len(LOGITS), -1).to(like.dtype)
        sizes = _logits(base, probe).float().std(-1, keepdim=True).clamp(min=1e-3)
        probes.append(
            (probe * torch.tensor(LOGITS, dtype=torch.float32, device=like.device)[:, None] / sizes).to(like.dtype)
        )
        out.last_hidden_state = probes[0]
        return out

    modes = [(module, module.training) for module in base.modules()]
    hook = base.base_model.register_forward_hook(instead)
    try:
        base.eval()  # so that nothing is drawn
        theirs = base(input_ids=input_ids[:1, :2], use_cache=False).logits
        ours = _logits(base, probes[0]) if probes else None
    finally:
        hook.remove()
        for module, mode in modes:
            module.training = mode
    same = ours is not None and ours.shape == theirs.shape
    if same:
        wrong = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-6)
        same = bool((wrong < 0.02).all())
    if not same:
        raise ValueError(
            f"loss_in_pieces: model must make its logits by its output layer, with a soft cap or a scale that its "
            f"configuration names, got {name}, whose own logits are others; take the model's own loss"
        )
