"""A linear layer whose rows do not know of each other; several packages call it."""

from kernelbook.linear.op import linear, product

__all__ = ["linear", "product"]
