"""Modules for PyTorch models that use the kernels."""

from kernelbook.nn.layers import LayerNorm, SparseLinear
from kernelbook.nn.moe import Float8Tensor, GatedExperts, LoRAPair, MoELayer, gated_experts

__all__ = ["Float8Tensor", "GatedExperts", "LayerNorm", "LoRAPair", "MoELayer", "SparseLinear", "gated_experts"]
