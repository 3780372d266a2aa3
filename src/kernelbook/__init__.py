"""The kernels of "Sparse and Fused: GPU Kernels in Triton, Step by Step"."""

import importlib.util
import sys

if importlib.util.find_spec("triton") is None:
    _help = {
        "darwin": "which has no build for macOS: take a Linux container or virtual machine (.devcontainer/ describes one)",
        "win32": "which has no official build for Windows: take WSL 2, or a Linux container (.devcontainer/ describes one)",
    }.get(sys.platform, "which is not installed: pip install 'triton>=3.6' (Linux; no GPU is needed)")
    if sys.argv[:1] == ["-m"] and "kernelbook" in sys.orig_argv:  # python -m kernelbook, which shows no traceback
        print(f"kernelbook needs Triton, {_help}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(f"kernelbook needs Triton, {_help}", name="triton")

# isort: split
from kernelbook import runtime  # first: it sets up Triton before anything imports it

# isort: split
from kernelbook.attention import append_to_pages, flash_attention, paged_attention
from kernelbook.layer_norm import layer_norm, rms_norm
from kernelbook.moe_lora import Routing, moe_lora, route, scatter2scatter
from kernelbook.nf4 import NF4Tensor, nf4_dequantize, nf4_matmul, nf4_quantize
from kernelbook.packed.fp4 import fp4_quantize, fp4_tensor
from kernelbook.runtime import same_bits
from kernelbook.scatter_ffn import gather_matmul, scatter_ffn
from kernelbook.sparse_linear import sparse_backward, sparse_dw, sparse_dx, sparse_forward, sparse_linear

__version__ = "0.1.0"

__all__ = [
    "NF4Tensor",
    "Routing",
    "__version__",
    "append_to_pages",
    "flash_attention",
    "fp4_quantize",
    "fp4_tensor",
    "gather_matmul",
    "layer_norm",
    "moe_lora",
    "nf4_dequantize",
    "nf4_matmul",
    "nf4_quantize",
    "paged_attention",
    "rms_norm",
    "route",
    "runtime",
    "same_bits",
    "scatter2scatter",
    "scatter_ffn",
    "sparse_backward",
    "sparse_dw",
    "sparse_dx",
    "sparse_forward",
    "sparse_linear",
]
