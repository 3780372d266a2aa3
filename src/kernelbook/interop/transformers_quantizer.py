"""transformers' loading with experts in 4 bits: ``from_pretrained(folder, quantization_config=NF4ExpertsConfig())``.

Experts are quantized while they are read. Where a checkpoint keeps a tensor for each expert and projection, as most do, each
is read, quantized and dropped, so that the dense weights of no layer exist as a whole. Everything else of the
model is loaded as transformers loads it. ``save_pretrained`` writes the packed bytes and the scales, and ``from_pretrained``
reads them as they are; both need this module to be imported, which :mod:`kernelbook.interop.transformers` does.
"""

import copy
import dataclasses
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from kernelbook import arguments, runtime
from kernelbook.interop.transformers_experts import (
    check_experts,
    expert_weights,
    is_experts,
    offload_experts,
    stored,
    weight_names,
)
from kernelbook.nf4 import BLOCK_SIZES, NF4Tensor, nf4_quantize
from kernelbook.nn.parameters import store_parameter
from kernelbook.packed import NESTED_BLOCK, quantized_scales

METHOD = "kernelbook_nf4_experts"  # the name in a model's config.json


@register_quantization_config(METHOD)
class NF4ExpertsConfig(QuantizationConfigMixin):
    """Experts in 4 bits, everything else as it is: a ``quantization_config`` of transformers' ``from_pretrained``.

    ``kernelbook.check.model(model, batch)`` says whether the loaded model is right.

    Args:
        double_quant: quantize the scales too.
        block_size: weights that share a scale: 32, 64, ..., 4096.
        offload: quantize on the GPU, one matrix at a time, and keep the experts in pinned host memory, as
            :func:`~kernelbook.interop.transformers.offload_experts` does. It is not saved with the model.

    Raises:
        ValueError: ``block_size`` is another number.
    """

    def __init__(self, double_quant: bool = False, block_size: int = 64, offload: bool = False, **others: Any) -> None:
        block_size = arguments.integer("NF4ExpertsConfig", "block_size", block_size)
        arguments.check_choice("NF4ExpertsConfig", "block_size", block_size, BLOCK_SIZES)
        unknown = set(others) - {"quant_method"}  # which a saved configuration has
        if unknown:
            raise TypeError(
                f"NF4ExpertsConfig: arguments must be double_quant, block_size and offload, got {sorted(unknown)}"
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.double_quant, self.block_size, self.offload = bool(double_quant), block_size, bool(offload)

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved with the model: not where its experts lie, which whoever loads it decides."""
        return {name: value for name, value in super().to_dict().items() if name != "offload"}

    @property
    def bytes_a_weight(self) -> float:
        """Of the packed codes and the scales."""
        scale = 1 + 4 / NESTED_BLOCK if self.double_quant else 4
        return 0.5 + scale / self.block_size


class ExpertsQuantizer(HfQuantizer):
    """What all of our quantizers answer to transformers alike."""

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:  # without it generate() leaves a static cache to Python
        return True

    def is_serializable(self) -> bool:
        return True

    def update_device_map(self, device_map: Any) -> Any:
        """Where nothing is said the model goes to where the kernels run."""
        return {"": runtime.DEVICE} if device_map is None else device_map

    @staticmethod
    def _loaded(model: Any) -> Any:
        # Who prepares a model for training in few bits asks for this name.
        model.is_loaded_in_4bit = True
        model.num_parameters = _NumParameters(model)
        return model

    def _is_packed(self, model: Any, weights: Collection[str], packed: Collection[str]) -> bool:
        """Whether all of ``weights`` are. A model of which nothing is any more, since LoRA pairs were merged, is as dense ones are.

        Raises ``ValueError`` for a mixture, which no configuration describes.
        """
        dense = [name for name in weights if name not in packed]
        if dense and packed:
            raise ValueError(
                f"save_pretrained: what was packed must still be, or all be dense, got a dense {dense[0]} beside a packed "
                f"{min(packed)}"
            )
        if dense:
            self.remove_quantization_config(model)
            for name in ("is_loaded_in_4bit", "num_parameters"):
                model.__dict__.pop(name, None)
        return not dense


class _NumParameters:
    """A loaded model's ``num_parameters``: of one that ``is_loaded_in_4bit`` transformers' own asks bitsandbytes."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)  # a model that refers to itself keeps its memory until the collector runs

    def __reduce__(self) -> tuple[Any, ...]:  # of a copy, that of the copied model
        return _NumParameters, (self._model(),)

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        model: Any = self._model()
        model.is_loaded_in_4bit = False
        try:
            return int(type(model).num_parameters(model, *args, **kwargs))
        finally:
            model.is_loaded_in_4bit = True


@register_quantizer(METHOD)
class NF4ExpertsQuantizer(ExpertsQuantizer):
    """What transformers calls while it loads a model with :class:`NF4ExpertsConfig`."""

    quantization_config: NF4ExpertsConfig  # type: ignore[assignment]

    def update_device_map(self, device_map: Any) -> Any:
        """Where experts are to stay on the host everything is loaded there, and the rest goes to the GPU afterwards."""
        to_host = self.quantization_config.offload and device_map is None
        return {"": torch.device("cpu")} if to_host else super().update_device_map(device_map)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes, by which transformers takes memory beforehand: by those of the dense form it would need that much."""
        if self.param_needs_quantization(model, param_name):
            return self.quantization_config.bytes_a_weight
        return param.element_size()

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        if not param_name.endswith(("_proj",)):
            return False
        module, name = get_module_from_name(model, param_name)
        return is_experts(module) and name in weight_names(module)

    def quantized(self, weight: torch.Tensor) -> NF4Tensor:
        settings = self.quantization_config
        return nf4_quantize(weight, block_size=settings.block_size, double_quant=settings.double_quant)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Converters that stack the tensors of single experts become such that quantize them one by one.

        transformers hands over the model since 5.21.
        """
        if self.pre_quantized:
            return weight_conversions
        found = [copy.deepcopy(one) if stacks_experts(one) else one for one in weight_conversions]
        for converter in filter(stacks_experts, found):
            converter.__class__ = _Streaming  # what it is made from is another in each version of transformers
        return found

    def _process_model_before_weight_loading(self, model: Any, **others: Any) -> None:
        check_experts(model)
        for _, experts, name in expert_weights(model):
            if self.pre_quantized:  # without storage
                store_parameter(experts, name, self.quantized(getattr(experts, name)))
            # transformers would draw new values for what it does not know, through the dense form.
            experts.__dict__["_is_hf_initialized"] = True

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for module, experts, name in expert_weights(model):
            if not isinstance(stored(experts, name), NF4Tensor) or not self._has_come(experts, name):
                raise ValueError(
                    f"from_pretrained: {module}.{name} must be in the checkpoint, and it is not, or in another shape"
                )
        if self.quantization_config.offload:
            offload_experts(model)
        return self._loaded(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, Any]]:
        """As it is, packed or dense."""
        weights = {f"{module}.{name}": stored(experts, name) for module, experts, name in expert_weights(model)}
        self._is_packed(model, weights, [name for name, weight in weights.items() if isinstance(weight, NF4Tensor)])
        return None, {}

    def _has_come(self, experts: Any, weight: str) -> bool:
        found = experts.parametrizations[weight]
        parts = [found.original, *(buffer for buffer in found[0].buffers())]
        if not self.pre_quantized:
            return not found.original.is_meta
        return all(getattr(part, "_is_hf_initialized", False) and not part.is_meta for part in parts)


# --- the places of what is read as it is ------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a packed parameter's tensors are read: ``name`` of ``module``, and their dtypes and shapes by their names there."""

    module: str
    name: str
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # of a scalar at least these dimensions


def expect(module: Any, place: Place) -> None:
    """Puts buffers without storage in the place of a dense parameter, for transformers to fill."""
    delattr(module, place.name)
    for name, (dtype, shape) in place.tensors.items():
        module.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
    # transformers would draw new values for parameters that are not there yet.
    module.__dict__["_is_hf_initialized"] = True


def taken(module: Any, place: Place) -> list[torch.Tensor]:
    """What was read, out of the buffers, which are gone. Raises ``ValueError`` for what is missing."""
    read = []
    for name, (_, shape) in place.tensors.items():
        value = getattr(module, name)
        if value.is_meta or not getattr(value, "_is_hf_initialized", False) or value.shape[: len(shape)] != shape:
            raise ValueError(
                f"from_pretrained: {place.module}.{name} must be in the checkpoint, and it is not, or in another shape"
            )
        delattr(module, name)
        read.append(value)
    module.register_parameter(place.name, None)
    return read


# --- the conversion -------------------------------------------------------------------------------------------------


def _take(model: Any, full_name: str, q: NF4Tensor, missing: set[str] | None) -> dict[str, torch.Tensor]:
    """Puts the tensor into its module; there is nothing left for transformers to set."""
    module, name = get_module_from_name(model, full_name)
    store_parameter(module, name, q)
    if missing is not None:
        missing.discard(full_name)
    return {}


class _Quantize(ConversionOps):
    """Quantizes what came as one tensor."""

    def __init__(self, quantizer: NF4ExpertsQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: Any, model: Any = None, missing_keys: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            module, leaf = get_module_from_name(model, name)
            expected = tuple(getattr(module, leaf).shape)
            if value.shape != expected:
                raise ValueError(f"from_pretrained: {name} must have shape {expected}, got {tuple(value.shape)}")
            q = self.quantizer.quantized(value.to(runtime.DEVICE)).to(value.device)
            _take(model, name, q, missing_keys)
        return {}


class _Streaming(WeightConverter):
    """Reads the tensors of single experts one after the other, quantizes each, and keeps none."""

    __slots__ = ()

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, torch.Tensor]:
        if not isinstance(hf_quantizer, NF4ExpertsQuantizer):  # saving, for one
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        settings = hf_quantizer.quantization_config
        module, name = get_module_from_name(model, layer_name)
        shape = tuple(getattr(module, name).shape)
        given: list[list[Any]] = [self.collected_tensors.get(pattern, []) for pattern in self.source_patterns]
        rows = shape[1] // len(given)
        size = rows * shape[2]
        ready = all(len(tensors) == shape[0] and all(map(callable, tensors)) for tensors in given)
        if not ready or shape[1] % len(given) or size % settings.block_size:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for expert in range(shape[0]):
            for tensors in given:
                read, tensors[expert] = tensors[expert], None
                piece = read()
                if tuple(piece.shape) != (rows, shape[2]):
                    raise ValueError(
                        f"from_pretrained: what makes up {layer_name} must have shape {(rows, shape[2])} for each expert, "
                        f"got {tuple(piece.shape)}"
                    )
                q = nf4_quantize(piece.to(runtime.DEVICE), block_size=settings.block_size)
                pieces.append((q.packed.to(piece.device), q.absmax.to(piece.device)))
                del piece, read
        self.collected_tensors.clear()
        packed, absmax = map(torch.cat, zip(*pieces, strict=True))
        # Scales in 8 bits are of the whole, as :func:`kernelbook.nf4_quantize` has them.
        scales = quantized_scales(absmax) if settings.double_quant else {"absmax": absmax}
        whole = dataclasses.replace(q.to(packed.device), packed=packed, shape=shape, **scales)
        return _take(model, layer_name, whole, None if loading_info is None else loading_info.missing_keys)


def stacks_experts(converter: Any) -> bool:
    """Whether a converter stacks the matrices of single experts, one above the other where each has several."""
    if type(converter) is not WeightConverter or len(converter.target_patterns) != 1:
        return False
    kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
    several = len(converter.source_patterns) > 1
    return kinds == [(MergeModulelist, 0), (Concatenate, 1)][: 1 + several]
