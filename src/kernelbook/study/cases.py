"""Calls of the kernels that chapters compare with; each computes what a room's function does."""

import dataclasses

from kernelbook.layer_norm import cases as layer_norm
from kernelbook.moe_lora import cases as moe_lora
from kernelbook.scatter_ffn import cases as scatter_ffn
from kernelbook.study import layer_norm_with_locks, moe_lora_recomputed, scatter_ffn_with_atomics

# Beside the room's own tests: the same answer. What they owe callers is the room's.
STUDIES = {
    "layer_norm_with_locks": dataclasses.replace(
        layer_norm.CASES["layer_norm"], function=layer_norm_with_locks, real=layer_norm.REAL[:-1], large=None
    ),
    "moe_lora_recomputed": dataclasses.replace(
        moe_lora.CASES["moe_lora"], function=moe_lora_recomputed, options={}, rows=("x", "routing"),
        sizes=moe_lora.SIZES | {"k": (0, 128), "rank": [1, 8, 16]}, real=(), large=None,
    ),
    "scatter_ffn_with_atomics": dataclasses.replace(
        scatter_ffn.CASES["scatter_ffn"], function=scatter_ffn_with_atomics, real=(),
        options={"gated": False},
        sizes=scatter_ffn.SIZES | {"k_out": (0, 257), "activation": scatter_ffn.ACTIVATIONS},
    ),
}  # fmt: skip
