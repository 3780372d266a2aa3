"""What is measured: a module for each room, for modules and whole models, for several GPUs, and the studies."""

import importlib
import pkgutil
from typing import Any

import kernelbook

__all__ = ["bench_of", "modules_measured", "rooms"]


def rooms() -> list[str]:
    """The rooms of the package that can be measured, by name."""
    packages = {module.name for module in pkgutil.iter_modules(kernelbook.__path__) if module.ispkg}
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name in packages)


def modules_measured() -> list[str]:
    """What is measured beside the rooms: modules that combine them."""
    return ["moe_block"]


def bench_of(name: str) -> Any:
    """The bench of that name; it is imported only then."""
    return importlib.import_module(f"{__name__}.{name}")
