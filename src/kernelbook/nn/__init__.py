"""Modules for PyTorch models that use the kernels."""

from kernelbook.nn.layers import LayerNorm

__all__ = ["LayerNorm"]
