"""A linear layer whose backward pass computes only the active chunks of its output features."""

from kernelbook.sparse_linear.op import sparse_backward, sparse_dw, sparse_dx, sparse_forward, sparse_linear
from kernelbook.sparse_linear.reference import (
    gather_cublas_backward,
    python_loop_backward,
    sparse_dw_reference,
    sparse_dx_reference,
    sparse_forward_reference,
    sparse_linear_reference,
)

__all__ = [
    "gather_cublas_backward",
    "python_loop_backward",
    "sparse_backward",
    "sparse_dw",
    "sparse_dw_reference",
    "sparse_dx",
    "sparse_dx_reference",
    "sparse_forward",
    "sparse_forward_reference",
    "sparse_linear",
    "sparse_linear_reference",
]
