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
