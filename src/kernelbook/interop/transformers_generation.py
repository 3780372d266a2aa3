"""``model.generate`` of transformers with each new token's forward pass as one CUDA graph.

transformers' own loop stays: sampling, beams, processors, stopping and streaming are its code. It calls a model with a static
cache through ``get_compiled_call``, which otherwise compiles it; here it is captured, which takes less than a second.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import transformers
from transformers.cache_utils import StaticLayer

from kernelbook import arguments
from kernelbook.interop import base_model
from kernelbook.train.capture import CapturedCalls, FixedInputs

__all__ = ["fast_generate"]


def fast_generate(model: Any, *, max_length: int | None = None) -> Any:
    """Makes ``model.generate`` decode from a static cache inside a CUDA graph. Returns ``model``.

    The tokens are those of the model with a static cache from Python. Batches may be padded on the left, and batches and
    lengths may change from call to call: there is a graph for each size of the cache, which grows to the longest generation
    so far. The cache stays allocated between calls. A model with sliding windows or layers without attention, and a step
    that cannot be captured, run from Python, with a warning that names the reason; so it is without a GPU.

    ``model.generation_config.cache_implementation = None`` goes back to the growing cache; ``save_pretrained`` would save the
    other setting with the model.

    Args:
        model: a ``PreTrainedModel`` that generates, or a ``PeftModel`` around one.
        max_length: the tokens of prompt and answer that the cache is made for at first, so that it need not grow.

    Raises:
        TypeError: ``max_length`` is not an integer.
        ValueError: ``max_length`` is below 1, the model cannot generate, or this version of transformers generates otherwise.
    """
    if max_length is not None:
        max_length = arguments.integer("fast_generate", "max_length", max_length, "an int or None", least=1)
    base = base_model(model)
    if not isinstance(base, transformers.GenerationMixin) or not hasattr(base, "get_compiled_call"):
        raise ValueError(
            f"fast_generate: model must be a transformers model that generates by get_compiled_call, as in transformers 5, "
            f"got {type(base).__name__} in transformers {transformers.__version__}"
        )
    base.generation_config.cache_implementation = "static"
    if max_length is not None:
        base.generation_config.max_cache_len = max_length
    base.get_compiled_call = _DecodingGraphs(base)
    return model


class _DecodingGraphs:
    """In the place of ``model.get_compiled_call``: the model's call for one more token, captured."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._calls = CapturedCalls("fast_generate")
        self._fixed = FixedInputs("fast_generate")
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
        state = tuple(_state_of(model))
        if state != self._state:  # other weights, adapters or implementations
            self._state = state
            self._calls.forget()
            self._fixed = FixedInputs("fast_generate")
            self._taken.clear()
        return self.forward

    def forward(self, **inputs: Any) -> Any:
        """The model's call, with (B, 1) tokens from a graph; what it returns is the caller's."""
        model, cache = self._owner(), inputs.pop("past_key_values", None)
        ids = inputs.get("input_ids")
        layers = getattr(cache, "layers", [])
        # Of other layers Python decides by counts of its own what is kept.
        others = {type(layer).__name__ for layer in layers if type(layer) is not StaticLayer}
        if ids is None or ids.shape[1] != 1 or not layers or others or torch.is_grad_enabled():
            if others and self._calls.why_eager is None:
                self._calls.go_on_eagerly(f"its cache has {' and '.join(sorted(others))}, which count in Python")
            return model(**inputs, past_key_values=cache)
        place = self._take(cache)
        kind, _, fixed = self._fixed((), inputs, ids.device)

        def one_token() -> tuple[Any, dict[str, Any]]:
            out = model(**fixed, past_key_values=cache)
            return type(out), {name: value for name, value in out.items() if name != "past_key_values"}

        made, parts = self._calls((kind, place), one_token)
        return made(**{name: _own(value) for name, value in parts.items()}, past_key_values=cache)

    def _take(self, cache: Any) -> Hashable:
        """Puts the cache's tensors where the graphs of its size read them; says which these are."""
        theirs = [tensor for layer in cache.layers for tensor in _tensors(layer)]
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


def _tensors(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values, layer.cumulative_length


def _own(value: Any) -> Any:
    """A copy that the next replay leaves alone."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(_own(v) for v in value) if isinstance(value, tuple | list) else value


def _state_of(model: Any) -> Iterator[Hashable]:
    """What a graph takes for granted of a model: where its tensors are, what computes, and which adapters are on."""
    yield torch.is_inference_mode_enabled()  # whose tensors nobody may write to outside of it
    yield model.training, model.config._attn_implementation, str(getattr(model.config, "_experts_implementation", None))
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            yield None if tensor is None else tensor.data_ptr()
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a layer of PEFT's
            yield module.disable_adapters, tuple(module.active_adapters), bool(module.merged)
