"""gpt-oss as it is published: ``from_pretrained(folder, quantization_config=MXFP4ExpertsConfig())``.

A checkpoint in MXFP4 has ``gate_up_proj_blocks`` (E, 2 I, H / 32, 16) and ``gate_up_proj_scales`` (E, 2 I, H / 32), and the
same of ``down_proj``. Each is read into the place where it stays, shard by shard: nothing is ever dense, and nothing but the
halves of bytes changes. transformers' own ``Mxfp4Config`` either makes the experts dense to train them, or runs kernels that
have no gradients. ``save_pretrained`` gives the same bytes back, under the same names and with the same configuration, on the
host, which has to have room for them. Other parts of the model are loaded as transformers loads them.
"""

from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import Mxfp4Config

from kernelbook.interop.transformers_experts import check_experts, expert_weights
from kernelbook.interop.transformers_quantizer import ExpertsQuantizer, Place, expect, taken
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.parameters import store_parameter, stored_weight
from kernelbook.packed.fp4 import fp4_parts, fp4_tensor

METHOD = "kernelbook_mxfp4_experts"
BLOCK = 32  # elements of a scale


@register_quantization_config(METHOD)
class MXFP4ExpertsConfig(Mxfp4Config):
    """Experts in MXFP4 as a checkpoint holds them: a ``quantization_config`` of transformers' ``from_pretrained``.

    Args:
        modules_to_not_convert: kept for the configuration that is saved; what is packed, the checkpoint says.
    """

    def __init__(self, modules_to_not_convert: list[str] | None = None, **others: Any) -> None:
        unknown = set(others) - {"quant_method", "dequantize"}  # which a saved configuration may have
        if unknown:
            raise TypeError(f"MXFP4ExpertsConfig: the argument must be modules_to_not_convert, got {sorted(unknown)}")
        super().__init__(modules_to_not_convert)
        self.quant_method = METHOD  # type: ignore[assignment]

    def get_loading_attributes(self) -> dict[str, Any]:
        """What transformers takes from here where the checkpoint has a configuration of its own."""
        return {"dequantize": False, "quant_method": METHOD}

    def to_dict(self) -> dict[str, Any]:
        """As others know it, who are to read what was saved."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": self.modules_to_not_convert}


# transformers takes another configuration than the checkpoint's for a mistake, and tells them apart by this name.
MXFP4ExpertsConfig.__name__ = Mxfp4Config.__name__


@register_quantizer(METHOD)
class MXFP4ExpertsQuantizer(ExpertsQuantizer):
    """What transformers calls while it loads a model with :class:`MXFP4ExpertsConfig`."""

    def __init__(self, quantization_config: Any, **others: Any) -> None:
        super().__init__(MXFP4ExpertsConfig(quantization_config.modules_to_not_convert), **others)

    # --- what transformers asks ---

    def validate_environment(self, *_: Any, **__: Any) -> None:
        if not self.pre_quantized:
            raise ValueError(
                "MXFP4ExpertsConfig: the checkpoint must be in MXFP4, and its config.json does not say so; for one with dense "
                "experts there is NF4ExpertsConfig"
            )

    def _process_model_before_weight_loading(self, model: Any, **others: Any) -> None:
        check_experts(model)
        self.places = [_place(*found) for found in expert_weights(model)]
        for place in self.places:
            expect(model.get_submodule(place.module), place)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for place in self.places:
            experts = model.get_submodule(place.module)
            blocks, scales = taken(experts, place)
            q = fp4_tensor(blocks, scales, dtype=model.config.dtype, in_place=True)
            store_parameter(experts, place.name, q, transposed=experts.is_transposed)
        return self._loaded(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """With blocks and scales, on the host, in the place of what the experts keep; as it is where they are dense."""
        state = model.state_dict()
        weights = {(module, name): stored_weight(experts, name) for module, experts, name in expert_weights(model)}
        packed = {where: q for where, q in weights.items() if isinstance(q, NF4Tensor)}
        self._is_packed(model, *([f"{module}.{name}" for module, name in found] for found in (weights, packed)))
        for (module, name), q in packed.items():
            prefix = f"{module}.parametrizations.{name}."
            state = {key: value for key, value in state.items() if not key.startswith(prefix)}
            blocks, scales, _ = fp4_parts(q.to("cpu"))
            state[f"{module}.{name}_blocks"] = blocks.unflatten(-1, (-1, BLOCK // 2))
            state[f"{module}.{name}_scales"] = scales.view(torch.uint8)
        return state, {}


def _place(module: str, experts: Any, name: str) -> Place:
    e, *sides = getattr(experts, name).shape
    n, k = reversed(sides) if experts.is_transposed else sides
    if k % BLOCK:
        raise ValueError(f"from_pretrained: {name} must have rows of a multiple of {BLOCK} elements, got {k}")
    shapes = {"blocks": (e, n, k // BLOCK, BLOCK // 2), "scales": (e, n, k // BLOCK)}
    return Place(module, name, {f"{name}_{part}": (torch.uint8, shape) for part, shape in shapes.items()})
