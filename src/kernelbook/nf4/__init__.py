"""4-bit NormalFloat: quantize, and dequantize only the experts that are needed."""

from kernelbook.nf4.op import BLOCK_SIZES, FP4, NF4, CodeBook, NF4Tensor, nf4_dequantize, nf4_matmul, nf4_quantize
from kernelbook.nf4.reference import (
    nested_absmax_reference,
    nf4_code_reference,
    nf4_dequantize_reference,
    nf4_quantize_reference,
)

__all__ = [
    "BLOCK_SIZES",
    "FP4",
    "NF4",
    "CodeBook",
    "NF4Tensor",
    "nested_absmax_reference",
    "nf4_code_reference",
    "nf4_dequantize",
    "nf4_dequantize_reference",
    "nf4_matmul",
    "nf4_quantize",
    "nf4_quantize_reference",
]
