"""Mixture-of-experts models of transformers 5 on the kernels.

transformers calls a model's experts through an interface of named implementations. :func:`use_kernels` checks the model,
registers the name ``"kernelbook"`` and selects it::

    from kernelbook.interop.transformers import NF4ExpertsConfig, use_kernels

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4ExpertsConfig())
    use_kernels(model)

(:func:`quantize_experts` does it for a model that is there already; ``MXFP4ExpertsConfig()`` is for gpt-oss as it is published,
``NVFP4ExpertsConfig.taken_from(config)`` for a checkpoint in NVFP4.)

After :func:`register`, ``model.set_experts_implementation("kernelbook")`` selects it too, as does
``from_pretrained(..., experts_implementation="kernelbook")``. LoRA pairs that PEFT put on the
experts are used as they are, see :mod:`kernelbook.interop.peft`.
"""

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn.utils import parametrize
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernelbook.interop import base_model
from kernelbook.interop.transformers_attention import known_masks
from kernelbook.interop.transformers_experts import (
    LORA_ATTRIBUTE,
    NAME,
    check_experts,
    expert_modules,
    expert_weights,
    is_experts,
    is_transposed,
    offload_experts,
    stored,
    weight_names,
)
from kernelbook.interop.transformers_fp4 import MXFP4ExpertsConfig
from kernelbook.interop.transformers_generation import fast_generate
from kernelbook.interop.transformers_loss import loss_in_pieces
from kernelbook.interop.transformers_nvfp4 import NVFP4ExpertsConfig
from kernelbook.interop.transformers_quantizer import NF4ExpertsConfig, NF4ExpertsQuantizer
from kernelbook.nn.experts import LoRAPair, gated_experts
from kernelbook.nn.offload import read_layer
from kernelbook.nn.parameters import quantizable, quantize_parameter
from kernelbook.nn.swiglu import ClampedSwiGLU

if TYPE_CHECKING:
    from kernelbook.interop.transformers_training import CapturedTrainer

__all__ = [
    "NAME",
    "CapturedTrainer",
    "MXFP4ExpertsConfig",
    "NF4ExpertsConfig",
    "NVFP4ExpertsConfig",
    "check_experts",
    "expert_modules",
    "expert_parameters",
    "experts_forward",
    "fast_generate",
    "is_experts",
    "known_masks",
    "loss_in_pieces",
    "offload_experts",
    "quantize_experts",
    "register",
    "use_kernels",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "CapturedTrainer":  # transformers' Trainer takes its time to import, and not everybody trains
            from kernelbook.interop.transformers_training import CapturedTrainer

            return CapturedTrainer
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Adds ``"kernelbook"`` to transformers' experts implementations; a second call changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)  # experts in float8 have a table of their own


def use_kernels(model: Any) -> Any:
    """Runs the experts of ``model``, and the LoRA pairs that PEFT put on them, on the kernels. Returns ``model``.

    ``model.set_experts_implementation("eager")`` goes back. Call it after ``get_peft_model``, or again; and
    before 4-bit experts get another adapter, which PEFT alone puts on none of them.
    ``kernelbook.check.model(model, batch)`` says whether the model is still right.

    Args:
        model: a ``PreTrainedModel`` or a ``PeftModel`` around one.

    Raises:
        ImportError, ValueError: versions or a model that this module does not know; then nothing has been changed.
    """
    check_experts(model)
    base = base_model(model)
    if not hasattr(base, "set_experts_implementation"):
        raise ValueError(f"use_kernels: model must be a transformers model, got {type(model).__name__}")
    has_pairs = any(hasattr(module, "lora_A") for module in model.modules())
    if has_pairs:
        from kernelbook.interop.peft import check_wrappers, use_factors

        check_wrappers(model)
    register()
    base.set_experts_implementation(NAME)
    if has_pairs:
        use_factors(model)
    return model


# --- the implementation ---------------------------------------------------------------------------------------------


def _activation(experts: Any) -> Any:
    """What lies between the two products: our own where it is the ordinary SwiGLU, or gpt-oss'."""
    if not experts.has_gate:
        return experts.act_fn
    found = type(experts)._apply_gate.__module__
    if found == "transformers.models.gpt_oss.modeling_gpt_oss":
        return ClampedSwiGLU(experts.alpha, experts.limit)
    ordinary = found == "transformers.integrations.moe"
    if ordinary and isinstance(experts.act_fn, torch.nn.SiLU | transformers.activations.SiLUActivation):
        return "silu"
    return experts._apply_gate


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls: hidden_states (T, H), top_k_index and top_k_weights (T, k) -> (T, H)."""
    first, second = weight_names(self)
    pairs: dict[str, LoRAPair] = self.__dict__.get(LORA_ATTRIBUTE, {})
    norm = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
    gate_up, down = read_layer(self, (first, second)) or (stored(self, first), stored(self, second))
    return gated_experts(
        hidden_states,
        gate_up,
        down,
        top_k_index,
        top_k_weights,
        activation=_activation(self),
        gate_up_lora=pairs.get(first),
        down_lora=pairs.get(second),
        gate_up_bias=getattr(self, f"{first}_bias") if self.has_bias else None,
        down_bias=getattr(self, f"{second}_bias") if self.has_bias else None,
        transposed=is_transposed(self),
        post_expert=norm,
    )


# --- experts in 4 bits ----------------------------------------------------------------------------------------------


def expert_parameters(model: torch.nn.Module) -> list[str]:
    """The full names of the experts' weights: what PEFT's ``target_parameters`` wants, also of quantized experts.

    They are the names in the transformers model, whatever PEFT has wrapped around it and in it.
    """
    found = expert_weights(base_model(model))
    return [f"{module.replace('.base_layer', '')}.{name}" for module, _, name in found]


def quantize_experts(model: torch.nn.Module, *, block_size: int = 64, double_quant: bool = False) -> int:
    """Replaces the experts' weights by their 4-bit form, frozen, one after the other; returns the bytes saved.

    A model that is loaded need not be dense before: see :class:`NF4ExpertsConfig`. What the two give is the same, and so is
    what ``save_pretrained`` writes from here on: packed bytes and scales, which ``from_pretrained`` reads as they are.
    Around quantized parameters PEFT nests its wrappers in another order, and an adapter that is saved so can be loaded only
    into a model that was quantized first as well.
    ``kernelbook.check.model(model, batch, against=before)`` says whether layers and packed weights are right.
    Every implementation of the experts goes on working; all but ``"kernelbook"`` make all experts dense in each forward
    pass and keep them for the backward pass.

    Raises:
        ValueError: as :func:`check_experts`; or weights that are compressed already, or that PEFT trains. Nothing is changed.
    """
    check_experts(model)
    base = base_model(model)
    for module, experts, name in expert_weights(model):
        if parametrize.is_parametrized(experts, name) or getattr(experts, name).element_size() == 1:
            raise ValueError(f"quantize_experts: {module}.{name} must be dense, but it is compressed already")
        if base is not model and getattr(experts, name).requires_grad:  # a copy in modules_to_save
            raise ValueError(f"quantize_experts: {module}.{name} must be frozen, but PEFT is to train it")
        quantizable(experts, name, block_size)
    saved = 0
    for _, experts, name in expert_weights(model):
        saved += getattr(experts, name).nbytes
        saved -= quantize_parameter(experts, name, block_size=block_size, double_quant=double_quant).nbytes
    if isinstance(base, transformers.PreTrainedModel):
        settings = NF4ExpertsConfig(double_quant, block_size)
        base.hf_quantizer = NF4ExpertsQuantizer(settings, pre_quantized=True)  # type: ignore[assignment]
        base.config.quantization_config = settings
    return saved
