"""Modules for PyTorch models that use the kernels."""

from kernelbook.nn.ffn import SparseFFN
from kernelbook.nn.layers import LayerNorm, SparseLinear

__all__ = ["LayerNorm", "SparseFFN", "SparseLinear"]
