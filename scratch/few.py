import kernelbook  # noqa
"""Few rows times 4-bit matrices, in Gluon: each warp decodes what it multiplies with, and keeps it in registers.

W takes the part of the tensor cores' left operand, whose rows come in sixteens; the tokens are the right one, in eights. A
lane reads 16 bytes, 32 elements of a row. The tensor cores may sum over K in any order, as long as both operands have
it: so these 32 elements are just those that the instruction wants from this lane, and nothing goes through shared memory.
The warps of a program share the sum over K. At the end they add up what they have, always in the same order.

The values are looked up in the dtype of x; the scale of a block multiplies, in float32, the sums over the block. (With
blocks of 16 it multiplies elements, since the instruction sums over more than one block.)

Bytes: W once, x from the L1 cache for each ROWS rows of W. Needs GPUs with ``mma.sync`` for 16-bit numbers (sm_80 and
later), x of 16 bits with aligned rows, K in multiples of 64. No low-rank product: it is left to ``kernels_hopper``.
"""

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernelbook.packed.kernels import block_scale, decoded, table
from one import lut_decoded, lut_fill, stay


@gluon.constexpr_function
def _words_layout(warps, rows, words):
    """Of words (warps, rows, 4 lanes, words): a lane has the last ones; eight rows lie side by side in a warp."""

    def bases(dim, start, stop):
        found = []
        while start < stop:
            found.append([start if d == dim else 0 for d in range(4)])
            start *= 2
        return found

    registers = bases(3, 1, words) + bases(1, 8, rows)
    lanes = bases(2, 1, 4) + bases(1, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, bases(0, 1, warps), [], [warps, rows, 4, words])


@gluon.jit
def _load(
    word_ptrs, elements, k_w, k_s, k, mask_w, mask_s, K, x_ptrs, k_x, some,
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """GROUPS tensors of words, k elements further on, their blocks' scales, and the part of x."""
    words = ()
    scales = ()
    xs = ()
    for g in gl.static_range(GROUPS):
        at = k + g * GROUP
        if EVEN:
            words += (gl.load(word_ptrs + at // 8, cache_modifier=".cg"),)
            inside = None
        else:
            mask = gl.expand_dims(mask_w & (k_w + at < K), 3)
            words += (gl.load(word_ptrs + at // 8, mask=mask, other=0, cache_modifier=".cg"),)
            inside = mask_s & (k_s + at < K)
        scales += (
            block_scale(
                block0, (elements + at) // BLOCK_SIZE, inside,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE, NESTED_BLOCK,
            ),
        )  # fmt: skip
        # Tokens that are not there get the last one's x, and are not stored.
        if EVEN:
            xs += (gl.load(x_ptrs + at),)
        else:
            xs += (gl.load(x_ptrs + at, mask=gl.expand_dims(k_x + at < K, 2) & some[None, None, :], other=0.0),)
    return words, scales, xs


@gluon.jit(do_not_specialize=["tiles_at", "expert", "E", "M", "slots"])
def _few_rows_kernel(
    routing_ptr, tiles_at,  # order, (R,) pair of each sorted position; there (num_m, 3) group, first position and rows
    expert_ptr, expert,  # (1,) integer or a number: the matrix of all M rows, without a routing
    x_ptr, stride_xm,  # (R / slots, K) rows; in sorted order (R, K) if X_GROUPED
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    bias_ptr, stride_ce, stride_cn,  # (E, N), if HAS_BIAS
    y_ptr,  # (R, N)
    E, M, N, K, slots,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, EVEN: gl.constexpr,
    HAS_BIAS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, LUT: gl.constexpr, STAY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    FOLD: gl.constexpr = BLOCK_SIZE < 32  # the scale multiplies elements; else the sums over a block
    WORDS: gl.constexpr = 2 if FOLD or BLOCK_SIZE >= 64 else 1  # of a lane, side by side
    GROUP: gl.constexpr = 32 * WORDS
    STEP: gl.constexpr = GROUPS * GROUP
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    result: gl.constexpr = gl.SliceLayout(0, mma)
    in_words: gl.constexpr = _words_layout(WARPS, ROWS, WORDS)
    in_lanes: gl.constexpr = gl.SliceLayout(3, in_words)  # (WARPS, ROWS, 4)
    in_rows: gl.constexpr = gl.SliceLayout(2, in_lanes)

    n0 = gl.program_id(0) * ROWS
    offs_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    out_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, result))
    if routing_ptr is not None:
        tile_ptr = routing_ptr + tiles_at + gl.program_id(1) // PARTS * 3
        before = gl.program_id(1) % PARTS * TOKENS
        expert = gl.load(tile_ptr)
        rows = gl.load(tile_ptr + 2) - before
        if (expert < 0) | (rows <= 0):
            return
        first = gl.load(tile_ptr + 1) + before
        positions = (first + gl.minimum(offs_t, rows - 1)).to(gl.int64)
        x_rows = positions if X_GROUPED else gl.load(routing_ptr + positions).to(gl.int64) // slots
        out_positions = (first + gl.minimum(out_t, rows - 1)).to(gl.int64)
        y_rows = out_positions if Y_GROUPED else gl.load(routing_ptr + out_positions).to(gl.int64)
    else:
        if expert_ptr is not None:
            expert = gl.load(expert_ptr)
        first = gl.program_id(1) * TOKENS
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
    offs_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, in_rows))
    offs_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, in_rows))
    offs_l = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_lanes)))
    offs_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, in_words))))
    steps = gl.cdiv(K, STEP * WARPS)  # of a warp
    # The first element of a lane's share: (WARPS, ROWS, 4)
    k_w = (
        gl.expand_dims(offs_w[:, None] * (steps * STEP) + 0 * offs_n[None, :], 2)
        + (offs_l * (8 * WORDS))[None, None, :]
    )
    row_w = gl.expand_dims(0 * offs_w[:, None] + offs_n[None, :], 2)
    mask_w = row_w < N - n0
    word_ptrs = packed_ptr + gl.expand_dims(row_w * (K // 8) + k_w // 8, 3) + offs_i[None, None, None, :]
    if FOLD:
        elements = within + row_w * K + k_w
        k_s = k_w
        mask_s = mask_w
    else:
        of_acc: gl.constexpr = gl.SliceLayout(2, mma)
        row_s = gl.arange(0, ROWS, layout=gl.SliceLayout(0, of_acc))[None, :]
        k_s = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_acc))[:, None] * (steps * STEP)
        elements = within + row_s * K + k_s
        mask_s = row_s < N - n0

    # Where the K of x lie: the instruction's order is (i, lane, 8), that in memory (lane, i, 8).
    offs_k = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    k_x = offs_k // 8 % 4 * (8 * WORDS) + offs_k // 32 * 8 + offs_k % 8
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [8]), [8])
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    k_x = gl.expand_dims(x_w, 1) * (steps * STEP) + k_x[None, :]
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [1, 8]), [1, 8])
    x_ptrs = x_ptr + gl.expand_dims(k_x, 2) + (x_rows * stride_xm)[None, None, :]

    acc = gl.zeros((WARPS, ROWS, TOKENS), gl.float32, layout=mma)
    zeros = gl.zeros((WARPS, ROWS, TOKENS), gl.float32, layout=mma)
    next_words, next_scales, next_xs = _load(
        word_ptrs, elements, k_w, k_s, 0, mask_w, mask_s, K, x_ptrs, k_x, offs_t < TOKENS,
        absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
        EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, GROUP, GROUPS,
    )  # fmt: skip
    if LUT:
        entries = gl.arange(0, 256, layout=gl.BlockedLayout([max(1, 256 // (32 * WARPS))], [32], [WARPS], [0]))
        base = lut_fill(code_ptr, entries, dtype)
        gl.thread_barrier()
    else:
        values = table(code_ptr, dtype)
    for step in range(gl.where(exists, steps, 0)):
        k = step * STEP
        words = next_words
        scales = next_scales
        xs = next_xs
        if step + 1 < steps:
            next_words, next_scales, next_xs = _load(
                word_ptrs, elements, k_w, k_s, k + STEP, mask_w, mask_s, K, x_ptrs, k_x, offs_t < TOKENS,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
                EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, GROUP, GROUPS,
            )  # fmt: skip
        if STAY:
            stay()
        for g in gl.static_range(GROUPS):
            if LUT:
                w = lut_decoded(words[g], base, dtype)
            else:
                w = decoded(words[g], gl.expand_dims(scales[g], 3) if FOLD else None, values, dtype)
            # (warp, row, lane, i, half of a pair, pair, half of a word) -> (warp, row, (i, lane, element))
            w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 6, 5, 4)), (WARPS, ROWS, GROUP))
            w = gl.convert_layout(w, left, assert_trivial=True)
            if FOLD:
                acc = mma_v2(w, xs[g], acc)
            else:
                acc += mma_v2(w, xs[g], zeros) * gl.expand_dims(scales[g], 2)
    y = gl.where(exists, gl.sum(acc, axis=0), 0.0)  # (ROWS, TOKENS)
    out_n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, result))
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * stride_ce + out_n.to(gl.int64) * stride_cn
        y += gl.load(bias_ptrs, mask=(out_n < N) & exists, other=0.0).to(gl.float32)[:, None]
    mask_y = (out_n < N)[:, None] & (out_t < rows)[None, :]
    gl.store(y_ptr + y_rows[None, :] * N + out_n[:, None], y.to(dtype), mask=mask_y)
