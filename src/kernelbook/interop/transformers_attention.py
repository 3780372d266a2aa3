"""Attention of transformers 5 on :func:`kernelbook.flash_attention`, by transformers' interface of named implementations.

After :func:`register`, ``model.set_attn_implementation("kernelbook")`` and
``from_pretrained(..., attn_implementation="kernelbook")`` select it. :func:`kernelbook.nn.swap` does both.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from kernelbook import runtime
from kernelbook.interop import attention_calls, base_model
from kernelbook.nn.named_attention import (
    NEUTRAL,
    OWN,
    asked_for,
    boolean_mask,
    cu_seqlens,
    encode_mask,
    encode_packed,
    is_stated,
    own_attention,
    told_to_be_packed,
)

NAME = "kernelbook"
SDPA_KEYWORDS = frozenset(inspect.signature(sdpa_attention_forward).parameters)
# What every model's eager attention does without a parameter of that name: sinks are the module's, weights are what it returns.
EAGER_KEYWORDS = frozenset((*OWN, "output_attentions"))


def register() -> None:
    """Adds ``"kernelbook"`` to transformers' attention implementations; a second call changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(**asked: Any) -> torch.Tensor | None:
    """What transformers calls once for all layers with the same mask; what it is given, see its ``sdpa_mask``.

    A causal mask, with a sliding window or without, in which nothing is padded, is stated rather than made, of packed sequences
    too: see :mod:`kernelbook.nn.named_attention`. A static cache's is stated by a tensor that holds its length, so that one compiled
    or captured step does for all. Any other is ``sdpa_mask``'s: (B, 1, N, S).

    Within ``runtime.same_bits`` all keys have to be there, and a mask that is made is read again where it is used.

    Whether a mask given for the tokens leaves some out is read from the device, as ``sdpa_mask`` does; while tracing, such
    a mask is always made.
    """
    if runtime.in_same_bits() and not isinstance(asked.get("kv_offset", 0), torch.Tensor) and asked.get("kv_offset", 0):
        raise ValueError(
            f"attention_mask: kv_offset must be 0 within same_bits(), got {asked['kv_offset']}: a cache that drops keys "
            f"forgets where the others stood; use one that keeps all, such as DynamicCache() without a configuration"
        )
    stated = _stated(**asked) if "q_length" in asked else False
    return stated if stated is None or isinstance(stated, torch.Tensor) else sdpa_mask(**asked)


def _captured() -> bool:
    return runtime.DEVICE.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stated(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_others: Any,
) -> torch.Tensor | bool | None:
    """The mask as a statement; False where it has to be made."""
    compiling = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    tracing = compiling or _captured()
    static = isinstance(q_offset, torch.Tensor)
    number, packed = _packed(mask_function) if not compiling else (None, None)
    if number is not None and attention_mask is None and q_length == kv_length and not static and not q_offset:
        window = local_size if local_size is not None and kv_length > local_size else None
        if packed is causal_mask_function if local_size is None else _is_window(packed, local_size):
            return encode_packed(cu_seqlens(number), window)
    # A step of decoding with a static cache is told to make its mask, and so is a mask with something added.
    plain = mask_function is causal_mask_function if static else not compiling and _is_window(mask_function, local_size)
    if not (allow_is_causal_skip or (q_length == 1 and plain)):
        return False
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        return False  # chunks, which are passed as a size too
    if attention_mask is not None:
        if tracing or attention_mask.ndim != 2:
            return False
        exists = int(q_offset) + q_length
        if attention_mask.shape[1] < exists or not bool(attention_mask[:, kv_offset:exists].all()):
            return False
    if isinstance(q_offset, torch.Tensor):
        if local_size is not None:
            return False
        if not tracing and q_length > 1 and int(q_offset) == 0:
            return None
        return encode_mask((q_offset + q_length).to(torch.int64).expand(batch_size), None)
    there = q_offset + q_length
    if kv_offset == 0 and kv_length > there and local_size is not None and not tracing:
        # A static cache whose window is not full: what it has room for is more than what is there.
        return encode_mask(torch.full((batch_size,), there, dtype=torch.int64, device=device), None)
    if kv_offset + kv_length != there:
        return False
    window = local_size if local_size is not None and kv_length > local_size else None
    if window is None and q_length in (1, kv_length):
        return None
    return encode_mask(torch.empty(0, dtype=torch.int64, device=device), window)


def _both(mask_function: Any) -> tuple[Any, ...]:
    """Return the two functions that transformers' ``and_masks`` has joined, or ``()``."""
    cells: Any = getattr(mask_function, "__closure__", None) or ()
    parts = cells[0].cell_contents if len(cells) == 1 else ()
    return parts if isinstance(parts, tuple) and len(parts) == 2 else ()


def _is_window(mask_function: Any, window: int | None) -> bool:
    """Whether it is transformers' ``sliding_window_causal_mask_function(window)``, with nothing added."""
    parts = _both(mask_function)
    if not parts or parts[1] is not causal_mask_function:
        return False
    overlay = getattr(parts[0], "__code__", None) is sliding_window_overlay(1).__code__
    return overlay and [cell.cell_contents for cell in parts[0].__closure__] == [window]


def _packed(mask_function: Any) -> tuple[torch.Tensor | None, Any]:
    """-> (B, N) the number of each token's sequence, ``None`` where none are packed; the mask function without it."""
    parts = _both(mask_function)
    if not parts or getattr(parts[1], "__code__", None) is not packed_sequence_mask_function(torch.empty(0)).__code__:
        return None, mask_function
    return parts[1].__closure__[0].cell_contents, parts[0]


def known_masks(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch for a captured step: a mask that leaves nothing out, or none, becomes the word that attention is causal.

    While a graph is captured nobody can look whether a mask leaves tokens out or whether ``position_ids`` begin anew, so
    that transformers makes a mask of (B, 1, N, N), which flash attention does not take. This looks before; where there is a
    mask on the device the host waits for it. A model with sliding windows gets the word for each kind of its layers, in a
    dictionary, as ``generate`` gives it masks.

    Of packed sequences ``cu_seq_lens_q`` and ``cu_seq_lens_k`` get room for as many as there are tokens, and ``max_length_q``
    and ``max_length_k``, which our attention does not ask for, are left out: batches of one number of tokens have one graph.
    ``position_ids`` that begin anew need nothing; the graph reads them.

    Models whose attention is not ours, or not causal, or of other kinds, models of several modalities, those before whose tokens
    PEFT puts learned ones, and batches with padding, with ``position_ids`` or with router logits keep what else they have.
    """
    base = base_model(model)
    config, found = getattr(base, "config", None), dict(batch)
    learned = any(getattr(each, "is_prompt_learning", False) for each in getattr(model, "peft_config", {}).values())
    if learned or getattr(config, "_attn_implementation", None) != NAME:
        return found
    if found.get("cu_seq_lens_q") is not None:
        _make_room(found)
    if found.get("position_ids") is not None:
        return found
    windows = _windows(base)
    router = found.get("output_router_logits") or getattr(config, "output_router_logits", False)
    mask = found.get("attention_mask")
    if not windows or router or not (mask is None or isinstance(mask, torch.Tensor)):
        return found
    if mask is None or (mask.ndim == 2 and bool(mask.all())):
        tokens = found.get("input_ids", found.get("inputs_embeds"))
        device = None if tokens is None else tokens.device
        said = {
            kind: encode_mask(torch.empty(0, dtype=torch.int64, device=device), window)
            for kind, window in windows.items()
        }
        found["attention_mask"] = said if len(said) > 1 else next(iter(said.values()))
    return found


def _make_room(batch: dict[str, Any]) -> None:
    """Give a batch's boundaries as many entries as it has tokens, and one more: empty sequences behind the last."""
    tokens = next(
        batch[name].shape[:2].numel() for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None
    )
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        given = batch.get(name)
        if given is not None:
            batch[name] = torch.cat((given, given[-1:].expand(max(tokens + 1 - given.shape[0], 0))))
    for name in ("max_length_q", "max_length_k"):
        batch.pop(name, None)


def _windows(base: Any) -> dict[str, int | None]:
    """Of each kind of layers that ``base`` makes a mask for its sliding window; nothing where that is not known.

    As transformers' ``create_masks_for_generate`` has it, and only if the model's own forward pass makes and takes such masks.
    """
    config: Any = base.config
    if config is not config.get_text_config() or hasattr(base, "create_masks_for_generate"):
        return {}
    if config.is_encoder_decoder or not getattr(config, "is_causal", True):
        return {}
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "attention_chunk_size", None):
        return {}
    window = getattr(config, "sliding_window", None)
    known = {"full_attention": None, "sliding_attention": window}
    default = "full_attention" if window is None else "sliding_attention"
    kinds = sorted(set(getattr(config, "layer_types", None) or [default]))
    if not set(kinds) <= set(known):
        return {}
    if "sliding_attention" in kinds:
        forward = inspect.unwrap(type(base.base_model).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if window is None or create_sliding_window_causal_mask.__name__ not in names:
            return {}
        if len(kinds) > 1 and "dict" not in names:  # by which it asks whether masks are there already
            return {}
    return {kind: known[kind] for kind in kinds}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers calls: query (B, H, N, D), key and value (B, H_kv, S, D) -> (B, N, H, D), and no weights.

    A call with another mask than :func:`attention_mask` states (a padded batch) or dropout, or with heads of more than 256
    features or values of another width, runs as ``"sdpa"`` does, and so does one with a keyword that only that knows (a
    position bias, a paged cache). Sinks and soft caps are the kernel's own; where such a call cannot be, and with a keyword
    that is an argument of the model's own eager attention, it runs as ``"eager"`` does.

    Raises:
        ValueError: a keyword that asks for something and that none of these reads; a module of :func:`why_not_ours`, unless
            it comes with a mask that it made; a mask of integers; a sliding window of which no mask tells; packed
            sequences where there are keys from before.
    """
    if (attention_mask is None or is_stated(attention_mask)) and not torch.compiler.is_compiling():
        why = why_not_ours(type(module))
        if why is not None:
            raise ValueError(
                f"attention_forward: module must leave its attention and its masks to others, but {type(module).__name__} {why}; "
                f"kernelbook.nn.swap leaves it alone"
            )
    out = own_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    if out is not None:
        return out, None
    batch, n, s = query.shape[0], query.shape[2], key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    packed = told_to_be_packed(attention_mask, batch, n, s, others)
    mask = boolean_mask(attention_mask, batch, n, s, packed, causal or attention_mask is not None)
    unknown = [name for name in asked_for(others) if name not in SDPA_KEYWORDS]
    if not unknown:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal=is_causal, **others)
    eager = attention_calls.eager_attention(type(module).forward)
    read = EAGER_KEYWORDS.union(attention_calls.parameters(eager))
    unread = [name for name in unknown if eager is None or name not in read]
    if eager is None or unread:
        raise ValueError(
            f"attention_forward: {unread[0]} must be None where neither the kernel nor the module's eager_attention_forward reads "
            f"it, got {type(others[unread[0]]).__name__} from {type(module).__name__}"
        )
    if mask is None and causal and n > 1:
        mask = torch.ones(n, s, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    if scaling is not None:  # some have a default of their own
        others["scaling"] = scaling
    return eager(module, query, key, value, mask, dropout=dropout, **others)  # type: ignore[no-any-return]


KNOWN = frozenset(inspect.signature(attention_forward).parameters) | SDPA_KEYWORDS | EAGER_KEYWORDS | NEUTRAL


def why_not_ours(kind: type[torch.nn.Module]) -> str | None:
    """Why the attention of this class of modules cannot be :func:`attention_forward`; ``None`` where nothing speaks against it."""
    return attention_calls.why_not(kind.forward, KNOWN)
