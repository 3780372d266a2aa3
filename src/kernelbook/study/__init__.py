"""Kernels that chapters compare with and the library does not take: each can be called, each is tested."""

from kernelbook.study.layer_norm import layer_norm_with_locks
from kernelbook.study.moe_lora import moe_lora_recomputed
from kernelbook.study.scatter_ffn import scatter_ffn_with_atomics

__all__ = ["layer_norm_with_locks", "moe_lora_recomputed", "scatter_ffn_with_atomics"]
