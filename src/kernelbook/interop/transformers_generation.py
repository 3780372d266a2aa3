"""``model.generate`` of transformers with each new token's forward pass as one CUDA graph.

transformers' own loop stays: sampling, beams, processors, stopping and streaming are its code. It calls a model with a static
cache through ``get_compiled_call``, which otherwise compiles it; here it is captured, which takes less than a second.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import transformers
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from kernelbook import arguments
from kernelbook.interop import base_model
from kernelbook.train.capture import CapturedCalls, FixedInputs, state_of


def fast_generate(model: Any, *, max_length: int | None = None) -> Any:
    """Makes ``model.generate`` decode from a static cache inside a CUDA graph. Returns ``model``.

    The tokens are those of the model with a static cache from Python. Batches may be padded on the left, and batches and
    lengths may change from call to call: there is a graph for each size of the cache, which grows to the longest generation
    so far. The cache stays allocated between calls. A model with sliding windows has two graphs for each size: before its
    windows are full, and from then on. A model with layers without attention, and a step that cannot be captured, run from
    Python, with a warning that names the reason; so it is without a GPU. A model that transformers would not compile, since
    its quantizer cannot have that or a part of it is not on the GPU, stays as it is, with a warning too.

    ``model.generation_config.cache_implementation = None`` goes back to the growing cache; ``save_pretrained`` would save the
    other setting with the model.

    Args:
        model: a ``PreTrainedModel`` that generates, or a ``PeftModel`` around one.
        max_length: the tokens of prompt and answer that the cache is made for at first, so that it need not grow.

    Raises:
        TypeError: ``max_length`` is not an integer.
        ValueError: ``max_length`` is below 1, the model cannot generate, this version of transformers generates otherwise, or
            the model is in training mode with gradient checkpoints, where transformers keeps no cache.
    """
    if max_length is not None:
        max_length = arguments.integer("fast_generate", "max_length", max_length, "an int or None", least=1)
    base = base_model(model)
    if not isinstance(base, transformers.GenerationMixin) or not hasattr(base, "get_compiled_call"):
        raise ValueError(
            f"fast_generate: model must be a transformers model that generates by get_compiled_call, as in transformers 5, "
            f"got {type(base).__name__} in transformers {transformers.__version__}"
        )
    if getattr(base, "training", False) and getattr(base, "is_gradient_checkpointing", False):
        raise ValueError(
            "fast_generate: model must be in eval() where gradient checkpoints are on, since transformers keeps no cache in "
            "training mode then, got training mode"
        )
    why = _never_compiled(base)
    if why is not None:
        warnings.warn(f"fast_generate: leaves the model as it is, and its cache growing: {why}", stacklevel=2)
        return model
    base.generation_config.cache_implementation = "static"
    if max_length is not None:
        base.generation_config.max_cache_len = max_length
    base.get_compiled_call = _DecodingGraphs(base)
    return model


def _never_compiled(base: Any) -> str | None:
    """Why ``generate`` would not call ``get_compiled_call``, in words: see its ``_valid_auto_compile_criteria``."""
    quantizer = getattr(base, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return f"{type(quantizer).__name__} says that its models are not to be compiled"
    places = {str(place) for place in (getattr(base, "hf_device_map", None) or {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        return "parts of it are not on the GPU"
    return "generation_config.disable_compile is set" if base.generation_config.disable_compile else None


class _DecodingGraphs:
    """In the place of ``model.get_compiled_call``: the model's call for one more token, captured."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._calls = CapturedCalls("fast_generate")
        self._fixed = FixedInputs()
        # What graphs read of caches, and whose it is.
        self._taken: dict[Hashable, tuple[list[torch.Tensor], Any]] = {}
        self._state: Hashable = None

    def __reduce__(self) -> Any:
        return type(self), (self._owner(),)  # a copy of the model captures graphs of its own

    def _owner(self) -> Any:
        return self._model()

    def __call__(self, compile_config: Any = None) -> Callable[..., Any]:
        """What ``generate`` calls once: the function for its new tokens."""
        model = self._owner()
        state = torch.is_inference_mode_enabled(), *state_of(model)  # its tensors nobody may write to outside of it
        if state != self._state:  # other weights, adapters or implementations
            self._state = state
            self._calls.forget()
            if model.device != self._calls.device:
                self._calls = CapturedCalls("fast_generate", device=model.device)
            self._fixed = FixedInputs()
            self._taken.clear()
        return self.forward

    def forward(self, **inputs: Any) -> Any:
        """The model's call, with (B, 1) tokens from a graph; what it returns is the caller's."""
        model, cache = self._owner(), inputs.pop("past_key_values", None)
        ids = inputs.get("input_ids")
        layers = getattr(cache, "layers", [])
        # Of other layers Python decides by counts of its own what is kept.
        others = {
            type(layer).__name__ for layer in layers if type(layer) not in (StaticLayer, StaticSlidingWindowLayer)
        }
        if ids is None or ids.shape[1] != 1 or not layers or others or torch.is_grad_enabled():
            if others and self._calls.why_eager is None:
                self._calls.go_on_eagerly(f"its cache has {' and '.join(sorted(others))}, which count in Python")
            return model(**inputs, past_key_values=cache)
        windows = [layer for layer in layers if type(layer) is StaticSlidingWindowLayer]
        full = tuple(_is_full(layer) for layer in windows)
        if windows and (why := self._unknown(inputs, windows)) is not None:
            if self._calls.why_eager is None:
                self._calls.go_on_eagerly(why)
            return model(**inputs, past_key_values=cache)
        place = self._take(cache)
        kind, _, fixed = self._fixed((), inputs, ids.device)

        def one_token() -> tuple[Any, dict[str, Any]]:
            on = torch.is_autocast_enabled(ids.device.type)
            # Casts that the caller's autocast keeps are gone with it.
            with torch.autocast(ids.device.type, enabled=on, cache_enabled=False):
                out = model(**fixed, past_key_values=in_graphs(cache))
            return type(out), {name: value for name, value in out.items() if name != "past_key_values"}

        made, parts = self._calls((kind, place, full), one_token)
        for layer in windows:
            layer.cumulative_length_int += 1
        return made(**{name: _own(value) for name, value in parts.items()}, past_key_values=cache)

    def _unknown(self, inputs: dict[str, Any], windows: list[Any]) -> str | None:
        """What the model would make by Python's counts, which a graph would repeat; in words."""
        if inputs.get("position_ids") is None:
            return "its cache has windows, and generate gives no positions"
        mask = inputs.get("attention_mask")
        if isinstance(mask, dict) or getattr(mask, "ndim", 0) == 4:
            return None
        # A window that is full with this token is seen as a whole, and needs no mask; chunks are no such windows.
        full = all(layer.cumulative_length_int + 1 >= layer.max_cache_len for layer in windows)
        chunks = getattr(self._owner().config.get_text_config(), "attention_chunk_size", None)
        return None if full and chunks is None else "its cache has windows, and generate gives no mask for them"

    def _take(self, cache: Any) -> Hashable:
        """Puts the cache's tensors where the graphs of its size read them; says which these are."""
        theirs = [t for layer in cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        kind = tuple((tensor.shape, tensor.dtype) for tensor in theirs)
        ours, owner = self._taken.get(kind, ([], lambda: None))
        if not ours or owner() not in (None, cache):
            if ours:  # an earlier cache is still somebody's, and stays as it is
                self._calls.forget()
            ours = theirs
        elif any(mine is not other for mine, other in zip(ours, theirs, strict=True)):  # a new one, or reordered beams
            torch._foreach_copy_(ours, theirs)
            for i, layer in enumerate(cache.layers):
                layer.keys, layer.values, layer.cumulative_length = ours[3 * i : 3 * i + 3]
        self._taken[kind] = ours, weakref.ref(cache)
        return kind, ours[0].data_ptr()


def in_graphs(cache: Any) -> Any:
    """A static cache of the same tensors, whose layers with a window can be captured."""
    read = copy.copy(cache)
    read.layers = [_Window.of(layer) if type(layer) is StaticSlidingWindowLayer else layer for layer in cache.layers]
    return read


class _Window(StaticSlidingWindowLayer):
    """Stands for a layer with a window while a step is captured: the same tensors, and its count is nobody else's."""

    @classmethod
    def of(cls, layer: StaticSlidingWindowLayer) -> "_Window":
        own = cls.__new__(cls)
        own.__dict__.update(layer.__dict__)
        return own

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, for one token; but a full window's makes an index on the host, which no graph can have."""
        if not _is_full(self):
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept.copy_(torch.cat((kept[:, :, 1:], new), dim=2))
        return self.keys, self.values


def _is_full(layer: Any) -> bool:
    return bool(layer.cumulative_length_int >= layer.max_cache_len)


def _own(value: Any) -> Any:
    """A copy that the next replay leaves alone."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(_own(v) for v in value) if isinstance(value, tuple | list) else value
