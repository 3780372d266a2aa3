"""Mixture-of-experts models in NVFP4, as compressed-tensors and NVIDIA's ModelOpt write them::

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, quantization_config=NVFP4ExpertsConfig.taken_from(config)
    )

Both keep a matrix (N, K) as bytes (N, K / 2), the even element in the low half, with an e4m3 for 16 elements of a row and a
float32 for the whole: compressed-tensors' ``weight_global_scale`` divides, ModelOpt's ``weight_scale_2`` multiplies. An
expert's matrices come one by one. They are stacked as bytes, and each keeps the float32 of its own: gate and up of one expert
may have different ones, and nothing is rounded anew. (To divide is to multiply by the reciprocal, one rounding of float32.)
Linear layers in NVFP4, of attention for one, stay packed too. ``save_pretrained`` gives the same bytes back, under the same
names and with the same configuration; scales of activations and of a cache are kept for it, and not used.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.utils import parametrize
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kernelbook.interop.transformers_experts import check_experts, expert_weights
from kernelbook.interop.transformers_quantizer import ExpertsQuantizer, Place, expect, stacks_experts, taken
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.nf4_linear import NF4Linear
from kernelbook.nn.parameters import store_parameter, stored_weight
from kernelbook.packed.fp4 import fp4_parts, fp4_tensor

METHOD = "kernelbook_nvfp4_experts"
BLOCK = 16  # elements of a scale
PER_FLOAT = 4096  # elements that a float32 of an NF4Tensor stands for
# The tensors of a matrix: bytes, scales of blocks, and the float32 of the whole, which divides in compressed-tensors.
LAYOUTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
DTYPES = {"weight_packed": "U8", "weight": "U8", "weight_scale": "F8_E4M3"}  # as safetensors calls them; others are F32
KEPT = {"input_scale", "input_global_scale", "q_scale", "k_scale", "v_scale"}
# Only a quantized layer has one of these.
MARKS = re.compile(r"weight_(packed|scale|scale_2|scale_inv|global_scale|zero_point|shape)|pre_quant_scale|svdquant_.*")
EXPERT = re.compile(r"\.experts\.\d+\.")


class NVFP4ExpertsConfig(QuantizationConfigMixin):
    """Experts, and linear layers, in NVFP4 as a checkpoint holds them: a ``quantization_config`` of ``from_pretrained``.

    Args:
        settings: the ``quantization_config`` of the checkpoint's ``config.json``, whose ``quant_method`` is
            ``"compressed-tensors"`` or ``"modelopt"``. What is packed, the checkpoint's tensors say.

    Raises:
        TypeError, ValueError: ``settings`` are others.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        if not isinstance(settings, dict):
            raise TypeError(f"NVFP4ExpertsConfig: settings must be a dict, got {type(settings).__name__}")
        method = settings.get("quant_method")
        if method not in LAYOUTS:
            raise ValueError(
                f"NVFP4ExpertsConfig: settings must be of quant_method {' or '.join(LAYOUTS)}, got {method}"
            )
        if settings.get("transform_config"):
            raise ValueError(
                "NVFP4ExpertsConfig: settings must have no transform_config: activations are not rotated here"
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.settings = settings

    @classmethod
    def taken_from(cls, config: Any) -> "NVFP4ExpertsConfig":
        """Moves ``config.quantization_config`` here: transformers would ask for its own reader of what is left in ``config``.

        Raises:
            TypeError, ValueError: as above, or there is none.
        """
        for each in (config, config.get_text_config(decoder=True)):
            settings = getattr(each, "quantization_config", None)
            if settings is not None:
                taken = cls(settings)
                del each.quantization_config
                return taken
        raise ValueError("NVFP4ExpertsConfig.taken_from: config must have a quantization_config, as config.json has")

    def to_dict(self) -> dict[str, Any]:
        """As it was, for others to read what is saved."""
        return copy.deepcopy(self.settings)


class NVFP4Linear(torch.nn.Linear):
    """A ``torch.nn.Linear`` for PEFT and others, with a packed weight that :class:`kernelbook.nn.NF4Linear`'s product reads."""

    lora_a = lora_b = None
    forward = NF4Linear.forward  # type: ignore[assignment]


def _place(module: str, name: str, prefix: str, leaves: tuple[str, ...], *shape: int) -> Place:
    """``leaves``: bytes, scales, the float32, and what is kept. ``shape``: of an expert's matrices (E, parts, N, K), or (N, K)."""
    *lead, rows, columns = shape
    if columns % BLOCK or (lead and rows * columns % PER_FLOAT):
        raise ValueError(
            f"from_pretrained: {module}.{name} must have rows of a multiple of {BLOCK} elements, and matrices of a "
            f"multiple of {PER_FLOAT} in each expert, got {rows} x {columns}"
        )
    packed = (torch.uint8, (*lead, rows, columns // 2)), (torch.float8_e4m3fn, (*lead, rows, columns // BLOCK))
    plain = [(torch.float32, tuple(lead))] * (len(leaves) - 2)
    return Place(module, name, {prefix + leaf: its for leaf, its in zip(leaves, (*packed, *plain), strict=True)})


@register_quantizer(METHOD)
class NVFP4ExpertsQuantizer(ExpertsQuantizer):
    """What transformers calls while it loads a model with :class:`NVFP4ExpertsConfig`.

    transformers knows nothing of the checkpoint's own format then, and reads one parameter after the other: while the tensors of
    single experts are put together, those bytes are there twice.
    """

    quantization_config: NVFP4ExpertsConfig  # type: ignore[assignment]

    @property
    def layout(self) -> tuple[str, str, str]:
        return LAYOUTS[self.quantization_config.settings["quant_method"]]

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        leaves = _leaves(checkpoint_files)
        linears = _packed_linears(model, leaves, self.layout)
        kept_of_experts = {leaf for name in leaves if EXPERT.search(name) for leaf in leaves[name]} & KEPT
        self.leaves = (*self.layout, *sorted(kept_of_experts))
        self.places = []
        check_experts(model)
        for module, experts, name in expert_weights(model):
            if experts.is_transposed:
                raise ValueError(f"from_pretrained: {module} must keep its experts as (E, N, K), got (E, K, N)")
            e, n, k = getattr(experts, name).shape
            parts = 2 if name == "gate_up_proj" else 1
            self.places.append(_place(module, name, f"{name}_", self.leaves, e, parts, n // parts, k))
        modules = dict(model.named_modules())
        for module in sorted(leaves.keys() & modules.keys()):
            kept = sorted(leaves[module].keys() & KEPT)
            if module in linears:
                self.places.append(_place(module, "weight", "", (*self.layout, *kept), *modules[module].weight.shape))
            else:  # of a cache, where the layer is dense
                for leaf in kept:
                    if not hasattr(modules[module], leaf):
                        modules[module].register_buffer(leaf, torch.empty((), dtype=torch.float32, device="meta"))
        for place in self.places:
            expect(modules[place.module], place)

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """Converters that stack the matrices of single experts become such that stack their tensors."""
        found = []
        for converter in weight_conversions:
            if not stacks_experts(converter) or not all(p.endswith(".weight") for p in converter.source_patterns):
                found.append(converter)
                continue
            sources, [target] = converter._original_source_patterns, converter._original_target_patterns
            for leaf in sorted(self.leaves, key=len, reverse=True):  # older versions take the first that begins so
                names = [source.removesuffix("weight") + leaf for source in sources]
                new: Any = WeightConverter(names, f"{target}_{leaf}", [_Stack()])
                for scope in ("scope_prefix", "base_model_prefix"):
                    if hasattr(converter, scope):
                        setattr(new, scope, getattr(converter, scope))
                found.append(new)
        return found

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for place in self.places:
            _take(model.get_submodule(place.module), place, "global" in self.layout[2], model.config.dtype)
        return self._loaded(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """With the checkpoint's tensors, on the host, in the place of what the layers keep.

        A model of which nothing is packed any more, since it took up LoRA pairs, is saved as dense ones are.
        """
        state, found = model.state_dict(), list(_stored(model))
        there = {f"{module}.{name}".replace(".base_layer", "") for module, name, _, _ in found}
        if not self._is_packed(model, [f"{place.module}.{place.name}" for place in self.places], there):
            model._weight_conversions = None
        for module, name, q, kept in found:
            prefix = f"{module}.parametrizations.{name}."
            state = {key: value for key, value in state.items() if not key.startswith(prefix)}
            experts = len(q.shape) == 3
            lead = kept[self.layout[2]].shape[:2] if experts else ()
            parts = zip(self.layout, fp4_parts(q.to("cpu"))[:2], strict=False)
            tensors = {leaf: value.view(*lead, -1, value.shape[-1]) for leaf, value in parts}
            for leaf, value in (tensors | kept).items():
                state[f"{module}.{name}_{leaf}" if experts else f"{module}.{leaf}"] = value.cpu()
        return state, {}


# --- what a checkpoint has --------------------------------------------------------------------------------------------


def _leaves(checkpoint_files: Any) -> dict[str, dict[str, str]]:
    """The dtypes of a layer's tensors by their names, by the layer's name; from the files' headers alone."""
    if not checkpoint_files or not all(str(path).endswith(".safetensors") for path in checkpoint_files):
        raise ValueError("from_pretrained: a checkpoint in NVFP4 must be in .safetensors files")
    leaves: dict[str, dict[str, str]] = {}
    for path in checkpoint_files:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                module, _, leaf = key.rpartition(".")
                leaves.setdefault(module, {})[leaf] = file.get_slice(key).get_dtype()
    return leaves


def _packed_linears(model: Any, leaves: dict[str, dict[str, str]], layout: tuple[str, ...]) -> set[str]:
    """The linear layers in NVFP4. Raises for what is quantized otherwise, or is no linear layer."""
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    found, modules = set(), dict(model.named_modules())
    for name, its in leaves.items():
        if any(pattern.search(f"{name}.weight") for pattern in ignored):
            continue
        packed = any(map(MARKS.fullmatch, its))
        if packed and its.keys() - KEPT - {"bias"} != set(layout):
            raise ValueError(
                f"from_pretrained: {name} must be dense, or in NVFP4 as {', '.join(layout)}, got {', '.join(sorted(its))}"
            )
        for leaf in its.keys() & (KEPT.union(layout) if packed else KEPT):
            if its[leaf] != DTYPES.get(leaf, "F32"):  # it would be rounded
                raise ValueError(f"from_pretrained: {name}.{leaf} must be {DTYPES.get(leaf, 'F32')}, got {its[leaf]}")
        if packed and not EXPERT.search(name):
            if type(modules.get(name)) is not torch.nn.Linear:
                kind = type(modules[name]).__name__ if name in modules else "nothing of that name"
                raise ValueError(
                    f"from_pretrained: {name}, which is in NVFP4, must be a Linear of the model, got {kind}"
                )
            found.add(name)
    return found


# --- what is read, and what becomes of it -----------------------------------------------------------------------------


class _Stack(ConversionOps):
    """The tensors of single experts, a list for each of an expert's matrices -> (experts, matrices, ...)."""

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: Any, source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        given = [input_dict.pop(pattern, []) for pattern in source_patterns]
        in_turns = [tensor for of_one in zip(*given, strict=True) for tensor in of_one]
        dtype = in_turns[0].dtype
        plain = torch.uint8 if dtype.itemsize == 1 else dtype  # not every PyTorch stacks float8 everywhere
        stacked = torch.stack([tensor.view(plain) for tensor in in_turns]).view(dtype)
        return {target_patterns[0]: stacked.unflatten(0, (-1, len(given)))}

    @property
    def reverse_op(self) -> ConversionOps:
        return _Unstack()


class _Unstack(ConversionOps):
    """What :class:`_Stack` made of them -> the tensors of single experts."""

    def convert(  # type: ignore[override]
        self, input_dict: Any, source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        [[stacked]] = input_dict.values()
        return {
            pattern.replace("*", str(e)): matrices[i]
            for e, matrices in enumerate(stacked)
            for i, pattern in enumerate(target_patterns)
        }


def _take(module: Any, place: Place, divides: bool, dtype: torch.dtype) -> None:
    """Makes the 4-bit parameter of what was read; its bytes stay where they are."""
    packed, scales, whole, *kept = taken(module, place)
    lead, (rows, blocks), leaves = packed.shape[:-2], scales.shape[-2:], list(place.tensors)[2:]
    if whole.numel() != math.prod(lead):
        raise ValueError(
            f"from_pretrained: {place.module}.{leaves[0]} must be one number a matrix, got {whole.numel()}"
        )
    factor = whole.flatten() if lead else whole.reshape(())
    if lead:
        packed, scales = packed.flatten(0, 1), scales.flatten(0, 1)
    q = fp4_tensor(packed, scales, 1 / factor if divides else factor, dtype=dtype, in_place=True)
    if lead:
        q = dataclasses.replace(q, shape=(lead[0], lead[1] * rows, blocks * BLOCK))
    else:
        module.__class__ = NVFP4Linear
    store_parameter(module, place.name, q)
    parametrization = module.parametrizations[place.name][0]
    for leaf, value in zip(leaves, (whole, *kept), strict=True):
        # float32 there whatever becomes of the model's dtype
        parametrization.register_buffer(leaf.removeprefix(f"{place.name}_") if lead else leaf, value)


def _stored(model: Any) -> Iterator[tuple[str, str, NF4Tensor, dict[str, torch.Tensor]]]:
    """What is packed: module, parameter, the tensor, and what is kept beside it."""
    for module, layer in model.named_modules():
        for name in layer.parametrizations if parametrize.is_parametrized(layer) else ():
            q, parametrization = stored_weight(layer, name), layer.parametrizations[name][0]
            if isinstance(q, NF4Tensor) and (q.code_name, q.block_size) == ("e2m1", BLOCK):
                kept = {
                    leaf: value for leaf, value in parametrization._buffers.items() if leaf not in parametrization.PARTS
                }
                yield module, name, q, kept
