"""The kernels of "Sparse and Fused: GPU Kernels in Triton, Step by Step"."""

from kernelbook import runtime  # first: it sets up Triton before anything imports it

# isort: split
from kernelbook.layer_norm import layer_norm

__all__ = ["layer_norm", "runtime"]
