"""Packages that benches compare with, where they are installed."""

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch


def has(module: str) -> bool:
    """Whether the top-level ``module`` is installed; it is not imported."""
    return importlib.util.find_spec(module) is not None


def version(distribution: str) -> str | None:
    """The installed version of a distribution, as ``pip`` names it; ``None`` where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def peer_version(provider: str, distributions: Mapping[str, str]) -> str:
    """``liger-kernel 0.8.5``: what a provider that is not ours comes from, and its version here."""
    name = distributions.get(provider, "torch")
    installed = version(name)
    return name if installed is None else f"{name} {installed}"


def _empty_packages(name: str, *parts: str) -> str:
    """Has the package ``name`` and those below it imported without their own code; the name of the last of them."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations is not None
    folder = found.submodule_search_locations[0]
    for part in (*parts, ""):
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [folder]
        sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
        name, folder = (f"{name}.{part}", os.path.join(folder, part)) if part else (name, folder)
    return name


@functools.cache
def axolotl(module: str) -> Any:
    """A module of axolotl's ScatterMoE, without the packages above it: their imports need all that axolotl installs."""
    package = _empty_packages("axolotl", "integrations", "kernels", "libs", "scattermoe_lora")
    return importlib.import_module(f"{package}.{module}")


def experts_apart(
    experts: Any, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, pairs: Mapping[str, Any]
) -> torch.Tensor:
    """A layer of experts as a program of one's own has it: PyTorch's grouped products, and LoRA pairs beside the weights.

    Args:
        experts: transformers' module, with dense weights. x, ids, gates: (T, H), (T, k), (T, k).
        pairs: by the parameter's name a (E, r, K), b (E, N, r) and the scaling.
    """
    flat, slots = ids.flatten(), ids.shape[1]
    order = flat.argsort()  # rows stay in it from the first product to the last
    ends = torch.searchsorted(flat[order], torch.arange(experts.num_experts, device=x.device), right=True).int()

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)
        out = torch._grouped_mm(rows, weight if experts.is_transposed else weight.transpose(1, 2), offs=ends)
        if name in pairs:
            a, b, scaling = pairs[name]
            for factor in (a, b):
                rows = torch._grouped_mm(rows, factor.to(rows.dtype).contiguous().transpose(1, 2), offs=ends)
            out = out + scaling * rows
        return out + getattr(experts, f"{name}_bias")[flat[order]] if experts.has_bias else out

    rows = product(experts._apply_gate(product(x[order // slots], "gate_up_proj")), "down_proj")
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (rows[back].view(*ids.shape, -1) * gates[..., None]).sum(1)
