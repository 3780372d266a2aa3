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
    the call, and the others before theirs, the last one may read, past this SM's own cache, which may be stale (".cg").
    """
    tl.debug_barrier()  # all threads' stores come before the semaphore is raised
    is_last = tl.atomic_add(semaphore_ptr, 1, sem="acq_rel") == shares - 1
    if is_last:
        tl.store(semaphore_ptr, 0)
    return is_last


@triton.jit
def merge_shares(sums, ptrs, offsets, stride, share, shares, semaphore_ptr, mask):
    """Store this program's share of the tiles ``sums``; the last program of ``shares`` adds them up in their order.

    ``ptrs``: for each tile where the first share's lies, at ``offsets``; the next one lies ``stride`` elements further on.
    Returns whether this program is the last one, and the tiles, which are whole if it is.
    """
    for i in tl.static_range(len(sums)):
        tl.store(ptrs[i] + share.to(tl.int64) * stride + offsets, sums[i], mask=mask)
    is_last = is_last_share(semaphore_ptr, shares)
    if is_last:
        totals = ()
        for i in tl.static_range(len(sums)):
            share_ptrs = ptrs[i] + offsets
            total = tl.zeros(share_ptrs.shape, share_ptrs.dtype.element_ty)
            for _ in range(shares):
                total += tl.load(share_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
                share_ptrs += stride
            totals += (total,)
        sums = totals
    return is_last, sums
