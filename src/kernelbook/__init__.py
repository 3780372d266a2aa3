"""The kernels of "Sparse and Fused: GPU Kernels in Triton, Step by Step"."""

from kernelbook import runtime  # first: it sets up Triton before anything imports it

# isort: split
from kernelbook.layer_norm import layer_norm

__version__ = "0.1.0"

__all__ = ["__version__", "layer_norm", "runtime"]
