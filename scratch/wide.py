"""Trial: one 4-bit matrix times few rows; every warp stays with its rows and its share of K, words several steps ahead."""
import kernelbook  # noqa: F401

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernelbook.packed.kernels import block_scale
from kernelbook.packed.kernels_nvidia import _fill_pairs, _issue, _looked_up, _sums_layout, _words_layout


@gluon.jit
def _load_w(
    k, inside, word_ptrs, ok_w, k_w, ok_s, first_s, k_s, K,
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    words = ()
    scales = ()
    for c in gl.static_range(CHUNKS):
        at = k + c * CHUNK
        mask_w = ok_w & inside
        mask_s = ok_s & inside
        if not EVEN:
            mask_w = mask_w & (k_w + at < K)
            mask_s = mask_s & (k_s + at < K)
        words += (gl.load(word_ptrs + at // 8, mask=gl.expand_dims(mask_w, 3), other=0, cache_modifier=".cg"),)
        scales += (
            block_scale(
                block0, (first_s + at) // BLOCK_SIZE, mask_s,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE, NESTED_BLOCK,
            ),
        )  # fmt: skip
    return words, scales


@gluon.jit
def _load_x(k, inside, x_ptrs, k_x, mask_x, K, EVEN: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    xs = ()
    for c in gl.static_range(CHUNKS):
        at = k + c * CHUNK
        mask = mask_x & inside
        if not EVEN:
            mask = mask & gl.expand_dims(k_x + at < K, 2)
        xs += (gl.load(x_ptrs + at, mask=mask, other=0.0),)
    return xs


@gluon.jit(do_not_specialize=["expert", "E", "M"])
def _wide_kernel(
    expert_ptr, expert,  # (1,) integer or a number
    x_ptr, stride_xm,  # (M, K)
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    y_ptr,  # (M, N)
    E, M, N, K, groups,
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    DEPTH: gl.constexpr, CHUNKS: gl.constexpr, XAHEAD: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = 2 * HALVES
    CHUNK: gl.constexpr = 32 * WORDS
    STEP: gl.constexpr = CHUNK * CHUNKS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    in_words: gl.constexpr = _words_layout(WARPS, ROWS, WORDS)
    in_lanes: gl.constexpr = gl.SliceLayout(3, in_words)
    in_rows: gl.constexpr = gl.SliceLayout(2, in_lanes)
    sums: gl.constexpr = _sums_layout(WARPS, ROWS, HALVES, TOKENS)
    of_scales: gl.constexpr = gl.SliceLayout(3, sums)  # (WARPS, ROWS, HALVES)

    if expert_ptr is not None:
        expert = gl.load(expert_ptr)
    expert = expert.to(gl.int64)
    exists = (expert >= 0) & (expert < E)
    length = gl.cdiv(K, STEP * PARTS) * STEP
    row0 = gl.where(exists, expert, 0) * N
    packed_ptr += row0 * (K // 8)
    block0 = row0 * K // BLOCK_SIZE
    within = (row0 * K - block0 * BLOCK_SIZE).to(gl.int32)
    n0 = gl.program_id(0) * groups * ROWS

    w_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, in_rows))
    w_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, in_rows))
    w_l = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_lanes)))
    w_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, in_words))))
    row_w = n0 + (w_w // PARTS * ROWS)[:, None] + w_n[None, :]
    ok_w = gl.expand_dims((row_w < N) & (w_w // PARTS < groups)[:, None] & exists, 2) & (w_l >= 0)[None, None, :]
    row_w = gl.expand_dims(row_w, 2)
    k_w = gl.expand_dims((w_w % PARTS * length)[:, None] + 0 * w_n[None, :], 2) + (w_l * (8 * WORDS))[None, None, :]
    word_offs = gl.expand_dims(row_w * (K // 8) + k_w // 8, 3) + w_i[None, None, None, :]
    word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, 1, WORDS]), [1, 1, 1, WORDS])
    word_ptrs = packed_ptr + word_offs
    s_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_scales)))
    s_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_scales)))
    s_h = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_scales)))
    row_s = n0 + (s_w // PARTS * ROWS)[:, None] + s_n[None, :]
    ok_s = gl.expand_dims((row_s < N) & (s_w // PARTS < groups)[:, None] & exists, 2) & (s_h >= 0)[None, None, :]
    k_s = gl.expand_dims((s_w % PARTS * length)[:, None] + 0 * s_n[None, :], 2) + s_h[None, None, :] * 64
    first_s = within + gl.expand_dims(row_s * K, 2) + k_s

    offs_k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    k_x = offs_k // 8 % 4 * (8 * WORDS) + offs_k // 32 * 8 + offs_k % 8
    half_x = gl.max_constancy(k_x // 64, [8])
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [8]), [8])
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    columns = gl.arange(0, HALVES * TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    mask_x = gl.expand_dims(half_x[None, :] + 0 * x_w[:, None], 2) == (columns // TOKENS)[None, None, :]
    mask_x = mask_x & (columns % TOKENS < M)[None, None, :]
    k_x = (x_w % PARTS * length)[:, None] + k_x[None, :]
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [1, 8]), [1, 8])
    x_ptrs = x_ptr + gl.expand_dims(k_x, 2) + (columns % TOKENS * stride_xm)[None, None, :]

    words = ()
    scales = ()
    for d in gl.static_range(DEPTH):
        w, s = _load_w(
            d * STEP, d * STEP < length, word_ptrs, ok_w, k_w, ok_s, first_s, k_s, K,
            absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
            EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, CHUNK, CHUNKS,
        )  # fmt: skip
        words += (w,)
        scales += (s,)
    if XAHEAD:
        xs = _load_x(0, 0 < length, x_ptrs, k_x, mask_x, K, EVEN, CHUNK, CHUNKS)
    begin = _fill_pairs(code_ptr, dtype, WARPS)
    tl.debug_barrier()
    zeros = gl.zeros((WARPS, ROWS, HALVES * TOKENS), gl.float32, layout=mma)
    acc = gl.zeros((WARPS, ROWS, HALVES, TOKENS), gl.float32, layout=sums)
    for k in range(0, length, STEP * DEPTH):
        next_words = ()
        next_scales = ()
        for d in gl.static_range(DEPTH):
            at = k + d * STEP
            if XAHEAD:
                x = xs
                xs = _load_x(at + STEP, at + STEP < length, x_ptrs, k_x, mask_x, K, EVEN, CHUNK, CHUNKS)
            else:
                x = _load_x(at, at < length, x_ptrs, k_x, mask_x, K, EVEN, CHUNK, CHUNKS)
            for c in gl.static_range(CHUNKS):
                if SKIP == 1:  # what the table costs
                    w = words[d][c]
                    w = tl.join(tl.join(w, w), tl.join(w, w))
                    w = gl.reshape(w, (WARPS, ROWS, 4, WORDS, 4))
                    w = tl.join(w.to(gl.int16).to(dtype, bitcast=True), (w >> 16).to(gl.int16).to(dtype, bitcast=True))
                    w = gl.reshape(w, (WARPS, ROWS, 4, WORDS, 2, 2, 2))
                else:
                    w = _looked_up(words[d][c], begin, dtype)
                # (warp, row, lane, i, half of a pair, pair, half of a word) -> (warp, row, (i, lane, element))
                w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 6, 5, 4)), (WARPS, ROWS, CHUNK))
                w = gl.convert_layout(w, left, assert_trivial=True)
                part = gl.reshape(mma_v2(w, x[c], zeros), (WARPS, ROWS, HALVES, TOKENS))
                acc += gl.convert_layout(part, sums, assert_trivial=True) * gl.expand_dims(scales[d][c], 3)
            w, s = _load_w(
                at + DEPTH * STEP, at + DEPTH * STEP < length, word_ptrs, ok_w, k_w, ok_s, first_s, k_s, K,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
                EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, CHUNK, CHUNKS,
            )  # fmt: skip
            next_words += (w,)
            next_scales += (s,)
            _issue()
        words = next_words
        scales = next_scales
    y = gl.sum(acc, axis=2)  # (WARPS, ROWS, TOKENS)
    if PARTS > 1:
        y = gl.sum(gl.reshape(y, (WARPS // PARTS, PARTS, ROWS, TOKENS)), axis=1)
    out: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [WARPS, 1, 1], [1, 2, 0])
    y = gl.convert_layout(y, out)
    out_g = gl.arange(0, WARPS // PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, out)))
    out_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, out)))
    out_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, out)))
    rows = n0 + (out_g * ROWS)[:, None] + out_n[None, :]
    ok = (rows < N) & (out_g < groups)[:, None]
    y_ptrs = y_ptr + gl.expand_dims(rows, 2) + (out_t * N)[None, None, :]
    gl.store(y_ptrs, gl.where(exists, y, 0.0).to(dtype), mask=gl.expand_dims(ok, 2) & (out_t < M)[None, None, :])
