"""Modules for PyTorch models that use the kernels."""

from kernelbook.nn.compact import compact_sparse_linear
from kernelbook.nn.ffn import SparseFFN
from kernelbook.nn.gpt import GPT, GPTConfig
from kernelbook.nn.layers import LayerNorm, SparseLinear

__all__ = ["GPT", "GPTConfig", "LayerNorm", "SparseFFN", "SparseLinear", "compact_sparse_linear"]
