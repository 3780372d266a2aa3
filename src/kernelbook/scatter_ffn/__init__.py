"""A feed-forward block that computes only the neurons it needs, and the product with gathered rows that it begins with."""

from kernelbook.scatter_ffn.op import ACTIVATIONS, gather_matmul, scatter_ffn
from kernelbook.scatter_ffn.reference import (
    activation_reference,
    dense_ffn,
    gather_matmul_reference,
    scatter_ffn_reference,
)

__all__ = [
    "ACTIVATIONS",
    "activation_reference",
    "dense_ffn",
    "gather_matmul",
    "gather_matmul_reference",
    "scatter_ffn",
    "scatter_ffn_reference",
]
