"""Few rows times 4-bit matrices, in Gluon: each warp decodes what it multiplies with, and keeps it in registers.

W is the left operand of the tensor cores' instruction (``mma.sync``), which has 16 rows; the tokens are the columns of the
right one, of which it has 8. A lane reads up to four words of a row side by side, of eight elements each. The tensor cores
may sum over K in any order, as long as both operands have it: so these elements are just those that the instruction wants
from this lane, and nothing goes through shared memory. The warps of a program share the sum over K. At the end they add up
what they have, always in the same order. No warp waits for another before.

    load the words of DEPTH groups  |  group i:  load its x and the words of group i + DEPTH, decode, multiply

A lane's words have one scale, which multiplies the elements: then the instruction may sum over many blocks, and the same
lines serve blocks of any size. NVFP4's float32, which is the same along a row, multiplies the sum.

Bytes: W once, x from the L1 cache for each ROWS rows of W. Needs GPUs with ``mma.sync`` for 16-bit numbers (sm_80 and
later), x of 16 bits with aligned rows, K in multiples of 64. No low-rank product: it is left to ``kernels_hopper``.
"""

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernelbook.packed.kernels import NESTED_BLOCK, decoded, scale_of, stored_scale, table


@gluon.constexpr_function
def _bases(dims, dim, start, stop):
    """Of a linear layout: start, 2 start, ... below stop in one dimension."""
    found = []
    while start < stop:
        found.append([start if d == dim else 0 for d in range(dims)])
        start *= 2
    return found


@gluon.constexpr_function
def _words_layout(warps, rows, words):
    """Of words (warps, rows, 4 lanes, words): a lane has the last ones; eight rows lie side by side in a warp."""
    registers = _bases(4, 3, 1, words) + _bases(4, 1, 8, rows)
    lanes = _bases(4, 2, 1, 4) + _bases(4, 1, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(4, 0, 1, warps), [], [warps, rows, 4, words])


@gluon.jit
def scale_of_rows(element0, count, length, nested_absmax_ptr, layout: gl.constexpr, ROWS: gl.constexpr):
    """NVFP4's float32 of ROWS rows from element0 (64-bit) on, with the 2^7 of "e4m3 alone"; NaN where a row has several.

    ``count``: of rows that exist. ``length``: of a row, ``ALONE_LENGTH`` at most. ``layout``: of a tile of two dimensions, the first one the rows.
    """
    BLOCK: gl.constexpr = 16 * NESTED_BLOCK
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    start = element0 + rows.to(gl.int64) * length
    last = (start + length - 1) // BLOCK
    found = gl.load(nested_absmax_ptr + gl.minimum(start // BLOCK + at, last), mask=rows < count, other=0.0)
    low = gl.min(found, axis=1)
    others = gl.max((found != low[:, None]).to(gl.int32), axis=1)  # a NaN too, which a GPU's minimum passes over
    return gl.where(others == 0, low * 128.0, float("nan"))


@gluon.jit
def _load(
    at, word_ptrs, elements, k_w, mask_w, K,
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """A group's words and their blocks' scales, ``at`` elements further on."""
    inside = mask_w
    if not EVEN:
        inside = mask_w & (k_w + at < K)
    words = gl.load(word_ptrs + at // 8, mask=gl.expand_dims(inside, 3), other=0, cache_modifier=".cg")
    stored, nested = stored_scale(block0, (elements + at) // BLOCK_SIZE, inside, absmax_ptr, nested_absmax_ptr, SCALE)
    return words, scale_of(stored, nested, inside, nested_code_ptr, nested_offset_ptr, SCALE)


# How a warp holds W, with two words a lane. Lane 4 r + l has words of the rows r, r + 8, ..., and there the l-th of four parts
# of a group (`_words_layout`). Two instructions take 32 elements of K, a word from each of the four lanes:
#
#     K in memory          0        8        16       24       32       40       48       56       64
#     lane                 |     l = 0       |     l = 1       |     l = 2       |     l = 3       |
#     its word             | i = 0  | i = 1  | i = 0  | i = 1  | i = 0  | i = 1  | i = 0  | i = 1  |
#
#     K of instructions    0        8        16       24       32       40       48       56       64
#     word                 |               i = 0               |               i = 1               |
#     of lane              | l = 0  | l = 1  | l = 2  | l = 3  | l = 0  | l = 1  | l = 2  | l = 3  |
#
# W is reordered by a permutation of names, which moves nothing (`assert_trivial`), and x by where it is read (`k_x`). Each warp
# has a run of K for itself, in steps of a group, and all rows of the program; the sums of the warps meet at the end:
#
#     K           0 ... steps GROUP   | ... 2 steps GROUP   | ...              | ... K
#     row n0      |  warp 0           |  warp 1             |  warp 2          |  warp 3
#     ...         |                   |                     |                  |


@gluon.jit(do_not_specialize=["tiles_at", "expert", "E", "M", "top_k"])
def _few_rows_kernel(
    routing_ptr, tiles_at,  # order, (R,) pair of each sorted position; there (num_m, 3) group, first position and rows
    expert,  # (1,) integer or a number: the matrix of all M rows, without a routing
    x_ptr, stride_xm,  # (R / top_k, K) rows; in sorted order (R, K) if X_GROUPED
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    bias_ptr,  # (E, N) or None
    y_ptr,  # (R, N)
    E, M, N, K, top_k,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, EVEN: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, FAR: gl.constexpr,  # of e2m1: elements are multiplied in the order that is soonest decoded
):  # fmt: skip
    """BLOCK_M rows of x times ROWS rows of W. A lane reads WORDS words side by side, of one block, DEPTH groups ahead."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    GROUP: gl.constexpr = 32 * WORDS
    gl.static_assert(8 * WORDS <= BLOCK_SIZE)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    result: gl.constexpr = gl.SliceLayout(0, mma)
    in_words: gl.constexpr = _words_layout(WARPS, ROWS, WORDS)
    in_lanes: gl.constexpr = gl.SliceLayout(3, in_words)  # (WARPS, ROWS, 4)
    in_rows: gl.constexpr = gl.SliceLayout(2, in_lanes)

    n0 = gl.program_id(0) * ROWS
    offs_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    out_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, result))
    if routing_ptr is not None:
        tile_ptr = routing_ptr + tiles_at + gl.program_id(1) // PARTS * 3
        before = gl.program_id(1) % PARTS * BLOCK_M
        expert = gl.load(tile_ptr)
        rows = gl.load(tile_ptr + 2) - before
        if (expert < 0) | (rows <= 0):
            return
        first = gl.load(tile_ptr + 1) + before
        positions = (first + gl.minimum(offs_t, rows - 1)).to(gl.int64)
        x_rows = positions if X_GROUPED else gl.load(routing_ptr + positions).to(gl.int64) // top_k
        out_positions = (first + gl.minimum(out_t, rows - 1)).to(gl.int64)
        y_rows = out_positions if Y_GROUPED else gl.load(routing_ptr + out_positions).to(gl.int64)
    else:
        if expert.dtype.is_ptr():
            expert = gl.load(expert)
        first = gl.program_id(1) * BLOCK_M
        rows = M - first
        x_rows = (first + gl.minimum(offs_t, rows - 1)).to(gl.int64)
        y_rows = (first + out_t).to(gl.int64)
    expert = expert.to(gl.int64)
    exists = (expert >= 0) & (expert < E)

    # Word and element numbers are 64-bit up to the program's first row, and 32-bit from there.
    row0 = gl.where(exists, expert, 0) * N + n0
    packed_ptr += row0 * (K // 8)
    block0 = row0 * K // BLOCK_SIZE
    within = (row0 * K - block0 * BLOCK_SIZE).to(gl.int32)
    steps = gl.cdiv(K, GROUP * WARPS)  # of a warp
    w_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, in_rows))
    w_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, in_rows))
    w_l = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_lanes)))
    w_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, in_words))))
    # The first element of a lane's share: (WARPS, ROWS, 4)
    k_w = gl.expand_dims(w_w[:, None] * (steps * GROUP) + 0 * w_n[None, :], 2) + (w_l * (8 * WORDS))[None, None, :]
    elements = gl.expand_dims(0 * w_w[:, None] + w_n[None, :], 2) * K + k_w
    mask_w = (gl.expand_dims(0 * w_w[:, None] + w_n[None, :], 2) + 0 * k_w < N - n0) & exists
    word_offs = gl.expand_dims(elements // 8, 3) + w_i[None, None, None, :]
    word_ptrs = packed_ptr + gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, 1, WORDS]), [1, 1, 1, WORDS])
    elements += within

    # Where the K of x lie: the instruction's order is (i, lane, 8), that in memory (lane, i, 8).
    offs_k = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    k_x = offs_k // 8 % 4 * (8 * WORDS) + offs_k // 32 * 8 + offs_k % 8
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [8]), [8])
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    k_x = gl.expand_dims(x_w, 1) * (steps * GROUP) + k_x[None, :]
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [1, 8]), [1, 8])
    x_ptrs = x_ptr + gl.expand_dims(k_x, 2) + (x_rows * stride_xm)[None, None, :]
    mask_x = (offs_t < rows)[None, None, :]

    words = ()
    scales = ()
    for d in gl.static_range(DEPTH):
        first_words, first_scale = _load(
            d * GROUP, word_ptrs, elements, k_w, mask_w & (d < steps), K,
            absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, EVEN, BLOCK_SIZE, SCALE,
        )  # fmt: skip
        words += (first_words,)
        scales += (first_scale,)
    values = table(code_ptr, dtype)
    acc = gl.zeros((WARPS, ROWS, BLOCK_M), gl.float32, layout=mma)
    for step in range(0, gl.where(exists, steps, 0), DEPTH):
        next_words = ()
        next_scales = ()
        for d in gl.static_range(DEPTH):
            at = (step + d) * GROUP
            mask = mask_x & (step + d < steps)
            if not EVEN:
                mask = mask & gl.expand_dims(k_x + at < K, 2)
            x = gl.load(x_ptrs + at, mask=mask, other=0.0)
            new_words, new_scale = _load(
                at + DEPTH * GROUP, word_ptrs, elements, k_w, mask_w & (step + d + DEPTH < steps), K,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, EVEN, BLOCK_SIZE, SCALE,
            )  # fmt: skip
            next_words += (new_words,)
            next_scales += (new_scale,)
            w = decoded(words[d], gl.expand_dims(scales[d], 3), values, dtype, SCALE, FAR)
            # (warp, row, lane, i, pair, half of a word, half of a pair) -> (warp, row, (i, lane, element))
            w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 5, 4, 6)), (WARPS, ROWS, GROUP))
            if FAR:  # (half of a word, element) -> (element, half)
                x = gl.permute(gl.reshape(x, (WARPS, GROUP // 8, 2, 4, BLOCK_M)), (0, 1, 3, 2, 4))
                x = gl.convert_layout(gl.reshape(x, (WARPS, GROUP, BLOCK_M)), right)
            acc = mma_v2(gl.convert_layout(w, left, assert_trivial=True), x, acc)
        words = next_words
        scales = next_scales
    y = gl.sum(acc, axis=0)  # (ROWS, BLOCK_M)
    if SCALE == "e4m3 alone":
        y *= scale_of_rows(row0 * K, N - n0, K, nested_absmax_ptr, result, ROWS)[:, None]
    y = gl.where(exists, y, 0.0)
    out_n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, result))
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * N + out_n
        y += gl.load(bias_ptrs, mask=(out_n < N) & exists, other=0.0).to(gl.float32)[:, None]
    mask_y = (out_n < N)[:, None] & (out_t < rows)[None, :]
    gl.store(y_ptr + y_rows[None, :] * N + out_n[:, None], y.to(dtype), mask=mask_y)
