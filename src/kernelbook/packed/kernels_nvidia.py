"""Few rows times 4-bit matrices, in Gluon: each warp decodes what it multiplies with, and keeps it in registers.

In both kernels W is the left operand of the tensor cores' instruction (``mma.sync``), which has 16 rows; the tokens are the
columns of the right one, of which it has 8. A lane reads one to four words of a row side by side, of eight elements each. The tensor cores may sum over
K in any order, as long as both operands have it: so these elements are just those that the instruction wants from this
lane, and nothing goes through shared memory. The warps of a program share the sum over K. At the end they add up what they
have, always in the same order.

The values are looked up in the dtype of x; the scale of a block multiplies, in float32, the sums over the block. (With
blocks of 16 it multiplies elements, since the instruction sums over more than one block.)

Bytes: W once, x from the L1 cache for each ROWS rows of W. Needs GPUs with ``mma.sync`` for 16-bit numbers (sm_80 and
later), x of 16 bits with aligned rows, K in multiples of 64. No low-rank product: it is left to ``kernels_hopper``.

``_few_rows_kernel`` is for the rows that a routing brings to many matrices: a program for each of their tiles, values
looked up by byte permutation. ``_one_matrix_kernel`` is for one matrix. Each of its warps stays with sixteen rows and a part
of K, and no warp waits for another between filling the table and the end:

    load the words of PREFETCH steps, fill the table  |  step i:  look up its words, multiply, load those of step i + PREFETCH

Each byte, two elements, is looked up in a table of 256 pairs in shared memory, of which each lane of a warp has a copy: 32
lanes never ask one bank twice. That costs three instructions for two elements, where byte permutation takes five, and
those at half the rate.
"""

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernelbook.packed.kernels import bits, block_scale, decoded, halves, table


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
    scale = block_scale(
        block0, (elements + at) // BLOCK_SIZE, inside,
        absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE,
    )  # fmt: skip
    return words, scale


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
    expert_ptr, expert,  # (1,) integer or a number: the matrix of all M rows, without a routing
    x_ptr, stride_xm,  # (R / top_k, K) rows; in sorted order (R, K) if X_GROUPED
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    bias_ptr, stride_ce, stride_cn,  # (E, N), if HAS_BIAS
    y_ptr,  # (R, N)
    E, M, N, K, top_k,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, EVEN: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr,
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
        if expert_ptr is not None:
            expert = gl.load(expert_ptr)
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
            w = decoded(words[d], gl.expand_dims(scales[d], 3), values, dtype, SCALE)
            # (warp, row, lane, i, half of a pair, pair, half of a word) -> (warp, row, (i, lane, element))
            w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 6, 5, 4)), (WARPS, ROWS, GROUP))
            acc = mma_v2(gl.convert_layout(w, left, assert_trivial=True), x, acc)
        words = next_words
        scales = next_scales
    y = gl.where(exists, gl.sum(acc, axis=0), 0.0)  # (ROWS, BLOCK_M)
    out_n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, result))
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * stride_ce + out_n.to(gl.int64) * stride_cn
        y += gl.load(bias_ptrs, mask=(out_n < N) & exists, other=0.0).to(gl.float32)[:, None]
    mask_y = (out_n < N)[:, None] & (out_t < rows)[None, :]
    gl.store(y_ptr + y_rows[None, :] * N + out_n[:, None], y.to(dtype), mask=mask_y)


# --- one matrix -----------------------------------------------------------------------------------------------------

_PAIRS = """
{
    .shared .align 128 .b8 pairs[32768];
    .reg .b32 l;
    mov.u32 l, %laneid;
    mov.u32 $0, pairs;
    mad.lo.u32 $0, l, 4, $0;
    // $1
}
"""
# $0: nothing. $1: a pair. $2: its byte. $3: where this lane's copies begin. In 16 bytes at a time, eight lanes in different
# ones: all 32 copies.
_FILL = """
{
    .reg .b32 first, at, turn;
    mov.u32 first, %laneid;
    shl.b32 first, first, 2;
    sub.u32 first, $3, first;
    mad.lo.u32 first, $2, 128, first;
    mov.u32 turn, $2;
"""
_FILL += (
    8
    * """
    and.b32 at, turn, 7;
    shl.b32 at, at, 4;
    add.u32 at, at, first;
    st.shared.v4.b32 [at], {$1, $1, $1, $1};
    add.u32 turn, turn, 1;
"""
)
PAIRS = tl.constexpr(_PAIRS)
FILL = tl.constexpr(_FILL + "    mov.b32 $0, $1;\n}")
# $0 to $3: pairs. $4: a word. $5: where this lane's copies begin.
LOOK_UP = tl.constexpr(
    "{\n.reg .b32 a0, a1, a2, a3;\n"
    + "".join(f"prmt.b32 a{i}, $4, 0, {0x4440 + i};\nmad.lo.u32 a{i}, a{i}, 128, $5;\n" for i in range(4))
    + "".join(f"ld.shared.b32 ${i}, [a{i}];\n" for i in range(4))
    + "}"
)


@gluon.jit
def _fill_pairs(code_ptr, dtype: gl.constexpr, WARPS: gl.constexpr):
    """For each byte its two values, the one of the high half first, once for each lane -> where a lane's copies begin."""
    bytes_ = gl.arange(0, 256, layout=gl.BlockedLayout([max(1, 256 // (32 * WARPS))], [32], [WARPS], [0]))
    begin = tl.inline_asm_elementwise(PAIRS, "=&r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
    first = bits(gl.load(code_ptr + bytes_ // 16).to(dtype))
    pair = first | (bits(gl.load(code_ptr + bytes_ % 16).to(dtype)) << 16)
    tl.inline_asm_elementwise(FILL, "=&r,r,r,r", [pair, bytes_, begin], dtype=tl.int32, is_pure=False, pack=1)
    return begin


@gluon.jit
def _looked_up(word, begin, dtype: gl.constexpr):
    """Words (...) -> the eight elements of each, as ``decoded`` has them."""
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        LOOK_UP, "=&r,=&r,=&r,=&r,r,r", [word, begin],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    lower = tl.join(halves(p0, dtype), halves(p1, dtype))
    return tl.join(lower, tl.join(halves(p2, dtype), halves(p3, dtype)))


@gluon.constexpr_function
def _sums_layout(warps, rows, halves, tokens):
    """(warps, rows, halves, tokens) as the tensor cores leave (warps, rows, halves * tokens)."""
    columns = _bases(4, 3, 1, tokens) + _bases(4, 2, 1, halves)
    registers = columns[:1] + [[0, 8, 0, 0]] + columns[3:] + _bases(4, 1, 16, rows)
    lanes = columns[1:3] + _bases(4, 1, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(4, 0, 1, warps), [], [warps, rows, halves, tokens])


@gluon.jit
def _load_step(
    k, length, word_ptrs, ok_w, k_w, ok_s, first_s, k_s, K,
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """A step's words and their blocks' scales."""
    words = ()
    scales = ()
    for c in gl.static_range(CHUNKS):
        at = k + c * CHUNK
        mask_w = ok_w & (k < length)
        mask_s = ok_s & (k < length)
        if not EVEN:
            mask_w = mask_w & (k_w + at < K)
            mask_s = mask_s & (k_s + at < K)
        words += (gl.load(word_ptrs + at // 8, mask=gl.expand_dims(mask_w, 3), other=0, cache_modifier=".cg"),)
        scales += (
            block_scale(
                block0, (first_s + at) // BLOCK_SIZE, mask_s,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE,
            ),
        )  # fmt: skip
    return words, scales


@gluon.jit
def _load_x(k, length, x_ptrs, k_x, mask_x, K, EVEN: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    xs = ()
    for c in gl.static_range(CHUNKS):
        at = k + c * CHUNK
        mask = mask_x & (k < length)
        if not EVEN:
            mask = mask & gl.expand_dims(k_x + at < K, 2)
        xs += (gl.load(x_ptrs + at, mask=mask, other=0.0),)
    return xs


@gluon.jit
def _issue():
    """What is loaded before it is on its way before what comes behind it: ptxas would put loads next to their use."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff;\nmov.u32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["expert", "E", "M", "groups"])
def _one_matrix_kernel(
    expert_ptr, expert,  # (1,) integer or a number
    x_ptr, stride_xm,  # (M, K)
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    y_ptr,  # (M, N)
    E, M, N, K,
    groups,  # of ROWS rows of W, in a program
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, SPLIT_K: gl.constexpr,
    CHUNKS: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """M <= BLOCK_M rows: 4, 8 or 16. SPLIT_K warps share a group's rows, each with its part of K.

    A step is CHUNKS times one or two blocks of 64 of a part. An instruction has eight columns. With four tokens it takes two
    blocks at once, two lanes each: columns 0 to 3 have x of the first block and zeros for the second, columns 4 to 7 the other
    way round, and each half its own scales.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    HALVES: gl.constexpr = 2 if BLOCK_M == 4 else 1
    WORDS: gl.constexpr = 2 * HALVES  # of a lane, side by side
    CHUNK: gl.constexpr = 32 * WORDS
    STEP: gl.constexpr = CHUNK * CHUNKS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    in_words: gl.constexpr = _words_layout(WARPS, ROWS, WORDS)
    in_lanes: gl.constexpr = gl.SliceLayout(3, in_words)
    in_rows: gl.constexpr = gl.SliceLayout(2, in_lanes)
    sums: gl.constexpr = _sums_layout(WARPS, ROWS, HALVES, BLOCK_M)
    of_scales: gl.constexpr = gl.SliceLayout(3, sums)  # (WARPS, ROWS, HALVES)

    if expert_ptr is not None:
        expert = gl.load(expert_ptr)
    expert = expert.to(gl.int64)
    exists = (expert >= 0) & (expert < E)
    length = gl.cdiv(K, STEP * SPLIT_K) * STEP  # of a part

    # Elements are counted from the matrix' first one, in 32 bits.
    row0 = gl.where(exists, expert, 0) * N
    packed_ptr += row0 * (K // 8)
    block0 = row0 * K // BLOCK_SIZE
    within = (row0 * K - block0 * BLOCK_SIZE).to(gl.int32)
    n0 = gl.program_id(0) * groups * ROWS
    w_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, in_rows))
    w_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, in_rows))
    w_l = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_lanes)))
    w_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, in_words))))
    row_w = n0 + (w_w // SPLIT_K * ROWS)[:, None] + w_n[None, :]
    ok_w = (row_w < N) & (w_w // SPLIT_K < groups)[:, None] & exists
    ok_w = gl.expand_dims(ok_w, 2) & (w_l >= 0)[None, None, :]
    k_w = gl.expand_dims((w_w % SPLIT_K * length)[:, None] + 0 * w_n[None, :], 2) + (w_l * (8 * WORDS))[None, None, :]
    word_offs = gl.expand_dims(gl.expand_dims(row_w, 2) * (K // 8) + k_w // 8, 3) + w_i[None, None, None, :]
    word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, 1, WORDS]), [1, 1, 1, WORDS])
    word_ptrs = packed_ptr + word_offs
    s_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_scales)))
    s_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_scales)))
    s_h = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_scales)))
    row_s = n0 + (s_w // SPLIT_K * ROWS)[:, None] + s_n[None, :]
    ok_s = (row_s < N) & (s_w // SPLIT_K < groups)[:, None] & exists
    ok_s = gl.expand_dims(ok_s, 2) & (s_h >= 0)[None, None, :]
    k_s = gl.expand_dims((s_w % SPLIT_K * length)[:, None] + 0 * s_n[None, :], 2) + s_h[None, None, :] * 64
    first_s = within + gl.expand_dims(row_s, 2) * K + k_s

    # The K of x: the instruction's order is (i, lane, 8), that in memory (lane, i, 8).
    offs_k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    k_x = offs_k // 8 % 4 * (8 * WORDS) + offs_k // 32 * 8 + offs_k % 8
    half_x = gl.max_constancy(k_x // 64, [8])
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [8]), [8])
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    columns = gl.arange(0, HALVES * BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    mask_x = gl.expand_dims(half_x[None, :] + 0 * x_w[:, None], 2) == (columns // BLOCK_M)[None, None, :]
    mask_x = mask_x & (columns % BLOCK_M < M)[None, None, :]
    k_x = (x_w % SPLIT_K * length)[:, None] + k_x[None, :]
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [1, 8]), [1, 8])
    x_ptrs = x_ptr + gl.expand_dims(k_x, 2) + (columns % BLOCK_M * stride_xm)[None, None, :]

    words = ()
    scales = ()
    for d in gl.static_range(PREFETCH):
        first_words, first_scales = _load_step(
            d * STEP, length, word_ptrs, ok_w, k_w, ok_s, first_s, k_s, K,
            absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
            EVEN, BLOCK_SIZE, SCALE, CHUNK, CHUNKS,
        )  # fmt: skip
        words += (first_words,)
        scales += (first_scales,)
    if PREFETCH > 1:
        next_x = _load_x(0, length, x_ptrs, k_x, mask_x, K, EVEN, CHUNK, CHUNKS)
    begin = _fill_pairs(code_ptr, dtype, WARPS)
    tl.debug_barrier()
    zeros = gl.zeros((WARPS, ROWS, HALVES * BLOCK_M), gl.float32, layout=mma)
    acc = gl.zeros((WARPS, ROWS, HALVES, BLOCK_M), gl.float32, layout=sums)
    for k in range(0, length, STEP * PREFETCH):
        next_words = ()
        next_scales = ()
        for d in gl.static_range(PREFETCH):
            at = k + d * STEP
            if PREFETCH > 1:
                x = next_x
                next_x = _load_x(at + STEP, length, x_ptrs, k_x, mask_x, K, EVEN, CHUNK, CHUNKS)
            else:
                x = _load_x(at, length, x_ptrs, k_x, mask_x, K, EVEN, CHUNK, CHUNKS)
            for c in gl.static_range(CHUNKS):
                w = _looked_up(words[d][c], begin, dtype)
                # (warp, row, lane, i, half of a pair, pair, half of a word) -> (warp, row, (i, lane, element))
                w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 6, 5, 4)), (WARPS, ROWS, CHUNK))
                w = gl.convert_layout(w, left, assert_trivial=True)
                part = gl.reshape(mma_v2(w, x[c], zeros), (WARPS, ROWS, HALVES, BLOCK_M))
                acc += gl.convert_layout(part, sums, assert_trivial=True) * gl.expand_dims(scales[d][c], 3)
            new_words, new_scales = _load_step(
                at + PREFETCH * STEP, length, word_ptrs, ok_w, k_w, ok_s, first_s, k_s, K,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
                EVEN, BLOCK_SIZE, SCALE, CHUNK, CHUNKS,
            )  # fmt: skip
            next_words += (new_words,)
            next_scales += (new_scales,)
            _issue()
        words = next_words
        scales = next_scales
    y = gl.sum(acc, axis=2)  # (WARPS, ROWS, BLOCK_M)
    if SPLIT_K > 1:
        y = gl.sum(gl.reshape(y, (WARPS // SPLIT_K, SPLIT_K, ROWS, BLOCK_M)), axis=1)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [WARPS, 1, 1], [1, 2, 0])
    y = gl.convert_layout(gl.where(exists, y, 0.0).to(dtype), by_rows)
    out_g = gl.arange(0, WARPS // SPLIT_K, layout=gl.SliceLayout(1, gl.SliceLayout(2, by_rows)))
    out_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_rows)))
    out_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_rows)))
    rows = n0 + (out_g * ROWS)[:, None] + out_n[None, :]
    mask_y = gl.expand_dims((rows < N) & (out_g < groups)[:, None], 2) & (out_t < M)[None, None, :]
    # y has fewer than 2**31 elements, as W.
    y_ptrs = y_ptr + gl.expand_dims(rows, 2) + (out_t * N)[None, None, :]
    gl.store(y_ptrs, y, mask=mask_y)
