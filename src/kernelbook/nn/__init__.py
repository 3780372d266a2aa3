"""Modules for PyTorch models that use the kernels."""

from kernelbook.nn.layers import LayerNorm, SparseLinear

__all__ = ["LayerNorm", "SparseLinear"]
