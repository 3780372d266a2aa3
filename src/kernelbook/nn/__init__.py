"""Modules for PyTorch models that use the kernels."""

from kernelbook.linear import linear
from kernelbook.nn.compact import compact_sparse_linear
from kernelbook.nn.ffn import SparseFFN
from kernelbook.nn.gpt import GPT, GPTConfig
from kernelbook.nn.layers import LayerNorm, RMSNorm, SparseLinear
from kernelbook.nn.moe import Float8Tensor, GatedExperts, LoRAPair, MoELayer, gated_experts, load_balancing_loss
from kernelbook.nn.nf4_linear import NF4Linear
from kernelbook.nn.same_bits import SameBitsLinear
from kernelbook.nn.swap import Swap, swap
from kernelbook.nn.swiglu import ClampedSwiGLU

__all__ = [
    "GPT",
    "ClampedSwiGLU",
    "Float8Tensor",
    "GPTConfig",
    "GatedExperts",
    "LayerNorm",
    "LoRAPair",
    "MoELayer",
    "NF4Linear",
    "RMSNorm",
    "SameBitsLinear",
    "SparseFFN",
    "SparseLinear",
    "Swap",
    "compact_sparse_linear",
    "gated_experts",
    "linear",
    "load_balancing_loss",
    "swap",
]
