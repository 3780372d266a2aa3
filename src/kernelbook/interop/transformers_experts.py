"""The experts of transformers' models as transformers' interface for experts calls them: which they are, and their weights."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from kernelbook import runtime
from kernelbook.interop import base_model
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.experts import Float8Tensor, Weight
from kernelbook.nn.offload import offload_layers
from kernelbook.nn.parameters import is_stored_transposed, stored_weight

NAME = "kernelbook"
LORA_ATTRIBUTE = "_kernelbook_lora"  # where PEFT's wrappers leave their pairs for the forward pass


def expert_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of ``model`` that transformers' interface for experts calls, with their names."""
    for name, module in model.named_modules():
        if is_experts(module):
            yield name, module


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers' interface for experts calls this module, rather than one around it that hands its attributes on."""
    flags = ("has_gate", "is_transposed", "_apply_gate")
    return all(inspect.getattr_static(module, flag, None) is not None for flag in flags)


def weight_names(experts: Any) -> tuple[str, str]:
    """The parameters of the two products."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def expert_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """The weights of :func:`expert_modules`: the module's name, the module, and the parameter's name in it."""
    for module, experts in expert_modules(model):
        for name in weight_names(experts):
            yield module, experts, name


def check_experts(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The experts of ``model``, if all of them are of a kind that the kernels can run.

    Raises:
        ValueError: the model has no experts on that interface, or some that are built otherwise.
    """
    found = list(expert_modules(model))
    if not found:
        raise ValueError(
            f"check_experts: the model must have experts on transformers' ExpertsInterface, got "
            f"{type(model).__name__} without any"
        )
    for name, experts in found:
        problem = _problem_of(experts)
        if problem:
            raise ValueError(f"check_experts: {name} ({type(experts).__name__}) {problem}")
    return found


def offload_experts(model: torch.nn.Module) -> None:
    """Keep the model's 4-bit experts in pinned host memory, and everything else on the GPU.

    Two layers' experts are on the GPU at a time; while one layer computes, the next one's are copied. A model that is loaded
    with ``device_map="cpu"`` never has more than that there. ``save_pretrained`` writes what it wrote before. Implementations
    of the experts other than ``"kernelbook"`` copy all experts of a layer when they read them, and wait for it.

    Raises:
        ValueError: as :func:`check_experts`; or experts that are offloaded already, or of different shapes.
        TypeError: an expert's weight is not in 4 bits, or LoRA pairs are parametrizations of it at the moment.
    """
    found = check_experts(model)
    offload_layers([(experts, weight_names(experts)) for _, experts in found], runtime.DEVICE)
    model.to(runtime.DEVICE)
    base: Any = base_model(model)
    if hasattr(base, "hf_device_map"):  # by which accelerate knows where a 4-bit model is
        base.hf_device_map = {"": runtime.DEVICE}


def _problem_of(experts: Any) -> str | None:
    """What keeps ``experts`` off the kernels, in words."""
    names = weight_names(experts)
    # By hasattr a 4-bit weight would be decoded, which no kernel does on the host.
    there = {*vars(experts), *experts._parameters, *experts._buffers, *getattr(experts, "parametrizations", ())}
    missing = {*names, *(f"{name}_bias" for name in names if experts.has_bias)} - there
    if missing:
        return f"must have the parameters {' and '.join(sorted(missing))}"
    try:
        up, down = (stored(experts, name) for name in names)
    except (TypeError, ValueError) as error:
        return f"must have weights in a form that is known: {error}"
    if len(up.shape) != 3 or len(down.shape) != 3:
        return f"must have weights with three dimensions, got {tuple(up.shape)} and {tuple(down.shape)}"
    (num, out, hidden), (num2, hidden2, inner) = up.shape, down.shape
    if is_transposed(experts):
        out, hidden, hidden2, inner = hidden, out, inner, hidden2
    # Spread over ranks, the module counts its own rank's experts, and its weights know of all.
    counted = num if isinstance(up, DTensor) else experts.num_experts
    if not num == num2 == counted or hidden != hidden2 or out != (2 if experts.has_gate else 1) * inner:
        return (
            f"must have {experts.num_experts} experts that take and give the same number of features, got weights "
            f"{tuple(up.shape)} and {tuple(down.shape)}"
        )
    return None


def stored(experts: torch.nn.Module, name: str) -> Weight:
    """The weight in the form in which it is stored, whoever compressed it."""
    if parametrize.is_parametrized(experts, name):
        found = experts.parametrizations[name]  # type: ignore[index]
        if len(found) == 1 and type(found[0]).__module__.startswith("bitsandbytes."):
            from kernelbook.interop.bitsandbytes import parametrized_weight

            return parametrized_weight(experts, name)
    weight = stored_weight(experts, name)
    if isinstance(weight, NF4Tensor) or weight.element_size() > 1:
        return weight
    scale = getattr(experts, f"{name}_scale_inv", None)
    if scale is None:
        raise ValueError(f"{name} is {weight.dtype} and there is no {name}_scale_inv")
    block = getattr(experts, "block_size", None)
    return Float8Tensor(weight.detach(), scale.detach(), None if block is None else tuple(block))


def is_transposed(experts: Any) -> bool:
    """Whether the weights are stored as (E, K, N). Two that are compressed are stored in the same way."""
    return bool(experts.is_transposed) and not is_stored_transposed(experts, weight_names(experts)[0])
