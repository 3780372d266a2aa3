"""Trial: one 4-bit matrix times 16 to 64 rows: W decoded into registers, the left operand of wgmma; x through shared memory."""
import kernelbook  # noqa: F401

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernelbook.packed.kernels import block_scale
from kernelbook.packed.kernels_nvidia import _bases, _fill_pairs, _looked_up


@gluon.constexpr_function
def _tall_layout(warps, rows):
    registers = _bases(3, 2, 1, 2) + [[8, 0, 0]] + _bases(3, 0, 16 * warps, rows)
    lanes = _bases(3, 1, 1, 4) + _bases(3, 0, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(3, 0, 16, 16 * warps), [], [rows, 4, 2])


@gluon.jit
def _load_w(
    k, K, word_ptrs, ok_w, ok_s, first_s,
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
):  # fmt: skip
    words = gl.load(word_ptrs + k // 8, mask=gl.expand_dims(ok_w & (k < K), 2), other=0, cache_modifier=".cg")
    scale = block_scale(
        block0, (first_s + k) // BLOCK_SIZE, ok_s & (k < K),
        absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE, NESTED_BLOCK,
    )  # fmt: skip
    return words, scale


@gluon.jit(do_not_specialize=["expert", "E", "M"])
def _tall_kernel(
    expert_ptr, expert,
    x_ptr, stride_xm,
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
    y_ptr,
    E, M, N, K,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, CH: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    in_words: gl.constexpr = _tall_layout(WARPS, ROWS)
    in_lanes: gl.constexpr = gl.SliceLayout(2, in_words)
    of_scales: gl.constexpr = gl.SliceLayout(1, mma)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * CH, TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2))

    if expert_ptr is not None:
        expert = gl.load(expert_ptr)
    expert = expert.to(gl.int64)
    exists = (expert >= 0) & (expert < E)
    row0 = gl.where(exists, expert, 0) * N
    packed_ptr += row0 * (K // 8)
    block0 = row0 * K // BLOCK_SIZE
    within = (row0 * K - block0 * BLOCK_SIZE).to(gl.int32)
    n0 = gl.program_id(0) * ROWS
    w_n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, in_lanes))
    w_l = gl.arange(0, 4, layout=gl.SliceLayout(0, in_lanes))
    w_i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_words)))
    ok_w = ((w_n < N) & exists)[:, None] & (w_l >= 0)[None, :]
    word_offs = gl.expand_dims((w_n * (K // 8))[:, None] + (w_l * 2)[None, :], 2) + w_i[None, None, :]
    word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, 2]), [1, 1, 2])
    word_ptrs = packed_ptr + word_offs
    s_n = n0 + gl.arange(0, ROWS, layout=of_scales)
    ok_s = (s_n < N) & exists
    first_s = within + s_n * K

    # The tensor cores' order of K is (word, half of a word, pair, lane, half of a pair), memory's (lane, word, ...).
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, x_layout))
    k_x = c // 2 % 4 * 16 + c // 32 * 8 + c // 16 % 2 * 4 + c // 8 % 2 * 2 + c % 2
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [2]), [2])
    x_t = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, x_layout))
    x_ptrs = x_ptr + (gl.minimum(x_t, M - 1) * stride_xm)[:, None] + k_x[None, :]

    for s in gl.static_range(STAGES - 2):
        for h in gl.static_range(CH):
            off = (s * CH + h) * 64
            async_copy.async_copy_global_to_shared(x_smem.index(s * CH + h), x_ptrs + off, mask=(k_x + off < K)[None, :] & (x_t >= 0)[:, None])
        async_copy.commit_group()
    words = ()
    scales = ()
    for d in gl.static_range(DEPTH):
        first, s0 = _load_w(
            d * 64, K, word_ptrs, ok_w, ok_s, first_s,
            absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, BLOCK_SIZE, SCALE, NESTED_BLOCK,
        )  # fmt: skip
        words += (first,)
        scales += (s0,)
    begin = _fill_pairs(code_ptr, dtype, WARPS)
    tl.debug_barrier()
    acc = gl.zeros((ROWS, TOKENS), gl.float32, layout=mma)
    zeros = gl.zeros((ROWS, TOKENS), gl.float32, layout=mma)
    for k in range(0, K, 64 * DEPTH):
        next_words = ()
        next_scales = ()
        for d in gl.static_range(DEPTH):
            at = k + d * 64
            t = at // (64 * CH)
            w = _looked_up(words[d], begin, dtype)
            # (row, lane, word, half of a pair, pair, half of a word) -> (row, (word, half, pair, lane, half of a pair))
            w = gl.reshape(gl.permute(w, (0, 2, 5, 4, 1, 3)), (ROWS, 64))
            w = gl.convert_layout(w, left, assert_trivial=True)
            if d % CH == 0:
                async_copy.wait_group(STAGES - 3)
                fence_async_shared()
                tl.debug_barrier()
            x = x_smem.index(t % STAGES * CH + d % CH).permute((1, 0))
            token = warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)
            if d % CH == 0:
                for h in gl.static_range(CH):
                    ahead = at + ((STAGES - 2) * CH + h) * 64
                    async_copy.async_copy_global_to_shared(
                        x_smem.index((t + STAGES - 2) % STAGES * CH + h), x_ptrs + ahead,
                        mask=(k_x + ahead < K)[None, :] & (x_t >= 0)[:, None],
                    )  # fmt: skip
                async_copy.commit_group()
            if d > 0:
                part, before_w = warpgroup_mma_wait(1, deps=[before, before_w])
                acc += part * scales[d - 1][:, None]
            new, new_s = _load_w(
                at + DEPTH * 64, K, word_ptrs, ok_w, ok_s, first_s,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, BLOCK_SIZE, SCALE, NESTED_BLOCK,
            )  # fmt: skip
            next_words += (new,)
            next_scales += (new_s,)
            before = token
            before_w = w
        part, before_w = warpgroup_mma_wait(0, deps=[before, before_w])
        acc += part * scales[DEPTH - 1][:, None]
        words = next_words
        scales = next_scales
    async_copy.wait_group(0)
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // ROWS, ROWS // 8], [WARPS, 1], [1, 0])
    y = gl.convert_layout(gl.permute(gl.where(exists, acc, 0.0).to(dtype), (1, 0)), y_layout)
    out_t = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, y_layout))
    out_n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, y_layout))
    y_ptrs = y_ptr + (out_t * N)[:, None] + out_n[None, :]
    gl.store(y_ptrs, y, mask=(out_t < M)[:, None] & (out_n < N)[None, :])
