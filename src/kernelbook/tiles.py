"""Device functions that kernels of several packages call."""

from kernelbook import runtime  # noqa: F401  (before Triton, which it sets up)

# isort: split
import triton
import triton.language as tl

__all__ = ["grouped"]


@triton.jit
def grouped(tile, num_rows, num_cols, GROUP: tl.constexpr):
    """Tile number -> (row, column) in groups of GROUP rows, which share their operands in the L2 cache."""
    per_group = GROUP * num_cols
    first = tile // per_group * GROUP
    size = tl.minimum(num_rows - first, GROUP)
    within = tile % per_group
    return first + within % size, within // size
