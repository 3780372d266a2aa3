"""Which plans ``tune`` tries: by planner, the values of what may differ from the rule's plan.

A name is a field's, as files write plans (of a tuple the part's number); several names in a tuple change together. Every
combination is tried that the room allows for the problem and the GPU.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernelbook import plans, runtime

# isort: split
import triton

__all__ = ["SPACES", "candidates", "prune"]

_BY_BLOCKS = ("BLOCK_R", "BLOCK_D", "BLOCK_K", "num_warps", "GROUP")
_SPARSE_LINEAR: dict[Any, Sequence[Any]] = {
    _BY_BLOCKS: (
        (64, 64, 64, 4, 8), (64, 64, 32, 4, 8), (64, 128, 64, 4, 8), (64, 128, 32, 4, 8), (128, 64, 64, 4, 8),
        (128, 128, 64, 4, 8), (128, 128, 64, 8, 8), (128, 128, 32, 4, 8), (128, 128, 32, 8, 8), (128, 256, 64, 8, 16),
        (128, 256, 32, 8, 16), (256, 128, 64, 8, 16),
    ),
    "num_stages": (3, 4, 5),
}  # fmt: skip

SPACES: Mapping[str, Mapping[Any, Sequence[Any]]] = {
    "layer_norm.forward": {
        "BLOCK_M": (1, 2, 4, 8, 16),
        "BLOCK_N": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        "NUM_BLOCKS": range(1, 17),
        "num_warps": (1, 2, 4, 8, 16, 32),
    },
    "layer_norm.backward": {
        ("BLOCK_M", "SPLIT"): ((1, 1), (2, 1), (4, 1), (1, 2)),
        ("BLOCK_N", "num_warps"): (
            (512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16), (4096, 8), (4096, 16),
        ),
        "NUM_BLOCKS": range(1, 9),
        "STAGES": (1, 2, 3),
        "per_sm": (1, 2, 3),
    },
    "sparse_linear.forward": _SPARSE_LINEAR,
    "sparse_linear.backward": {**_SPARSE_LINEAR, "split": (1, 2, 4, 8)},
    "scatter_ffn.strategy": {"": ("packed", "vector", "tiles")},
    "scatter_ffn.vector_up": {
        "BLOCK_L": (1, 2, 4),
        "BLOCK_K": (512, 1024, 2048, 4096),
        "num_warps": (1, 2, 4, 8),
    },
    "scatter_ffn.vector_down": {
        ("BLOCK_L", "BLOCK_C", "num_warps"): (
            (16, 32, 2), (16, 64, 2), (16, 64, 4), (16, 128, 4), (32, 32, 4), (32, 64, 4), (32, 64, 8), (64, 32, 8), (128, 32, 16),
        ),
        "UNROLL": (1, 2, 4, 8),
        "1": (1, 2, 4, 8, 16, 32),
    },
    "scatter_ffn.tiles_up": {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_L": (8, 16, 32, 64, 128, 256),
        "BLOCK_K": (64, 128),
        ("SHARES", "num_warps"): ((1, 2), (1, 4), (1, 8), (2, 2), (4, 4), (8, 8)),
        "STAGES": (3, 4, 6),
        "1": (1, 2),
    },
    "scatter_ffn.tiles_down": {
        "BLOCK_M": (16, 32, 64, 128),
        ("BLOCK_L", "BLOCK_C", "num_warps"): (
            (32, 128, 4), (32, 128, 8), (64, 64, 2), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (64, 256, 8),
        ),
        "STAGES": (3, 4, 5),
        "1": (1, 2, 4, 8, 16),
    },
    "nf4.dequantize": {
        "BLOCK_W": (64, 128, 256),
        "UNROLL": (1, 2, 3, 4),
        "num_warps": (2, 4, 8),
        ("AHEAD", "SPAN"): ((1024, 16), (2048, 16), (4096, 16), (2048, 32)),
    },
    "nf4.matmul": {"ROWS": (1, 2, 4), "UNROLL": (1, 2, 4, 8)},
    "moe_lora.strategy": {"": ("fused", "split")},
    "moe_lora.rows": {
        ("BLOCK_M", "SMALL_M"): ((16, 16), (32, 16), (32, 32), (64, 32), (64, 64), (128, 64), (128, 128)),
        ("BLOCK_N", "BLOCK_K", "warps", "GROUP"): (
            (32, 128, 4, 8), (64, 64, 4, 8), (64, 128, 4, 8), (128, 32, 4, 8), (128, 64, 4, 8), (128, 128, 4, 8), (128, 64, 8, 8),
            (256, 64, 4, 4), (256, 64, 8, 4),
        ),
        "stages": (2, 3, 4, 5),
    },
    "moe_lora.thin": {
        "BLOCK_M": (16, 32),
        "BLOCK_K": (64, 128, 256),
        "BLOCK_R": (16, 32, 64),
        "SPLIT": (1, 2, 4, 8),
        "stages": (2, 3, 4, 5),
    },
    "moe_lora.gram": {
        "BLOCK_P": (16, 32, 64, 128),
        ("BLOCK_Q", "warps"): ((64, 4), (128, 4), (128, 8), (256, 8)),
        "BLOCK_M": (16, 32, 64, 128),
        "stages": (2, 3),
    },
    "attention.plain": {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    "attention.decode": {
        "BLOCK_N": (16, 32, 64, 128),
        ("STAGES", "num_stages"): ((2, 2), (3, 3), (4, 4), (5, 5)),
        "num_warps": (4, 8),
        "1": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    },
    "attention.forward": {
        "BLOCK_N": (64, 128),
        ("WARPGROUPS", "OVERLAP"): ((2, True), (2, False), (3, False)),
        "STAGES": (2, 3, 4),
    },
    "attention.backward": {
        ("0.BLOCK_M", "0.STAGES"): ((32, 3), (32, 4), (64, 2), (64, 3)),
        ("1.BLOCK_N", "1.STAGES"): ((32, 2), (32, 3), (32, 4), (64, 2), (64, 3), (64, 4)),
    },
}  # fmt: skip


def candidates(planner: plans.Planner, problem: Sequence[Any]) -> list[Any]:
    """The plans to try, as files hold them: the rule's first, each once."""
    rule = plans.as_json(planner.rule(*problem))
    space = SPACES.get(planner.name, {})
    found = [rule, None]  # None: the kernel that is there for everything
    for values in itertools.product(*space.values()):
        changes: dict[str, Any] = {}
        for names, value in zip(space, values, strict=True):
            changes |= {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
        found.append(_changed(rule, changes))
    return [json.loads(text) for text in dict.fromkeys(map(json.dumps, found)) if _is_allowed(planner, text, problem)]


def _is_allowed(planner: plans.Planner, text: str, problem: Sequence[Any]) -> bool:
    try:
        planner.from_json(json.loads(text), problem)
    except ValueError:
        return False
    return True


def _changed(plan: Any, changes: Mapping[str, Any], at: str = "") -> Any:
    """``plan`` with other values at the places ``changes`` names, by their last name or their whole one."""
    last = at.rpartition(".")[2]
    if at in changes or last in changes:
        return changes.get(at, changes.get(last))
    if isinstance(plan, dict):
        return {name: _changed(value, changes, f"{at}.{name}".lstrip(".")) for name, value in plan.items()}
    if isinstance(plan, list) and all(isinstance(part, list) and isinstance(part[0], str) for part in plan):
        return [[name, changes.get(name, value)] for name, value in plan]
    if isinstance(plan, list):
        return [_changed(part, changes, f"{at}.{i}".lstrip(".")) for i, part in enumerate(plan)]
    return plan


def prune(
    configs: Sequence[triton.Config],
    resources: Callable[[triton.Config], plans.Resources],
    properties: runtime.DeviceProperties | None = None,
) -> list[triton.Config]:
    """The configurations that fit, in their order. Raises ``ValueError`` if none does."""
    properties = properties or runtime.properties()
    kept = [config for config in configs if plans.fits(resources(config), config, properties)]
    if not kept:
        raise ValueError(f"prune: none of {len(configs)} configurations fits {properties.name}")
    return kept
