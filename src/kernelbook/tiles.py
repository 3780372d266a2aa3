"""Device functions that kernels of several packages call."""

from kernelbook import runtime  # noqa: F401  (before Triton, which it sets up)

# isort: split
import triton
import triton.language as tl


@triton.jit
def grouped(tile, num_rows, num_cols, GROUP: tl.constexpr):
    """Tile number -> (row, column) in groups of GROUP rows, which share their operands in the L2 cache."""
    per_group = GROUP * num_cols
    first = tile // per_group * GROUP
    size = tl.minimum(num_rows - first, GROUP)
    within = tile % per_group
    return first + within % size, within // size


@triton.jit
def _round_to_tf32(x):
    """Round float32 to the nearest number of tf32; tensor cores would cut the last bits off, which is biased."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a GPU's NaN would carry over into a zero


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``, where float32 is multiplied as ``tensors.precision`` says."""
    if PRECISION == "tf32":
        a = _round_to_tf32(a)
        b = _round_to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


# --- sums that several programs share -------------------------------------------------------------------------------
# Each program stores its share of a tile's sum. The last one to arrive adds them up in their order, whoever that is, so
# that the result is the same bit for bit in every run.


@triton.jit
def is_last_share(semaphore_ptr, shares):
    """Raise a tile's semaphore, and tell whether this program is the last of ``shares`` to do so.

    The semaphore (int32) resets itself: zero before the first and behind the last. What this program has stored before
    the call, and the others before theirs, ``sum_of_shares`` reads in the last one.
    """
    tl.debug_barrier()  # all threads' stores come before the semaphore is raised
    is_last = tl.atomic_add(semaphore_ptr, 1, sem="acq_rel") == shares - 1
    if is_last:
        tl.store(semaphore_ptr, 0)
    return is_last


@triton.jit
def sum_of_shares(ptrs, stride, shares, mask):
    """Add up a tile of ``shares`` partial sums, ``stride`` elements apart, in their order."""
    total = tl.zeros(ptrs.shape, ptrs.dtype.element_ty)
    for _ in range(shares):
        # ".cg": from the L2 cache, where the other programs' stores are; this SM's own cache may be stale.
        total += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        ptrs += stride
    return total
