"""Kernels that chapters compare with and the library does not take: each can be called, each is tested."""

from kernelbook.study.layer_norm import layer_norm_with_locks
from kernelbook.study.moe_lora import moe_lora_recomputed

__all__ = ["layer_norm_with_locks", "moe_lora_recomputed"]
