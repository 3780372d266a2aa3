"""Trial: one 4-bit matrix times few rows; programs stay for many tiles, a table of pairs in shared memory."""
import kernelbook  # noqa: F401

# isort: split
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernelbook.packed.kernels import _halves, bits, block_scale, decoded, table

LUT_BASE = tl.constexpr(
    "{\n.shared .align 128 .b8 lut[32768];\n.reg .b32 l;\nmov.u32 l, %laneid;\nmov.u32 $0, lut;\n"
    "mad.lo.u32 $0, l, 4, $0;\n// $1\n}"
)
_FILL = """{
.reg .b32 a, c, e;
mov.u32 a, %laneid;
shl.b32 a, a, 2;
sub.u32 a, $3, a;
mad.lo.u32 a, $2, 128, a;
mov.u32 e, $2;
"""
for _ in range(8):
    _FILL += "and.b32 c, e, 7;\nshl.b32 c, c, 4;\nadd.u32 c, c, a;\nst.shared.v4.b32 [c], {$1, $1, $1, $1};\nadd.u32 e, e, 1;\n"
FILL = tl.constexpr(_FILL + "mov.b32 $0, $1;\n}")
_LUT = "{\n.reg .b32 a0, a1, a2, a3;\n"
for _i in range(4):
    _LUT += f"prmt.b32 a{_i}, $4, 0, {0x4440 + _i};\nmad.lo.u32 a{_i}, a{_i}, 128, $5;\n"
for _i in range(4):
    _LUT += f"ld.shared.b32 ${_i}, [a{_i}];\n"
LUT_LOOKUP = tl.constexpr(_LUT + "}")
_LUT = "{\n.reg .b32 a0, a1, a2, a3;\n"
for _i, _s in enumerate(("shl.b32 a0, $4, 7;", "shr.u32 a1, $4, 1;", "shr.u32 a2, $4, 9;", "shr.u32 a3, $4, 17;")):
    _LUT += f"{_s}\nlop3.b32 a{_i}, a{_i}, 0x7f80, $5, 0xea;\n"
for _i in range(4):
    _LUT += f"ld.shared.b32 ${_i}, [a{_i}+lut];\n"
LUT_LOOKUP2 = tl.constexpr(_LUT + "}")


@triton.jit
def lut_fill(code_ptr, entries, dtype: tl.constexpr):
    base = tl.inline_asm_elementwise(LUT_BASE, "=&r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
    pair = bits(tl.load(code_ptr + entries // 16).to(dtype)) | (bits(tl.load(code_ptr + entries % 16).to(dtype)) << 16)
    tl.inline_asm_elementwise(FILL, "=&r,r,r,r", [pair, entries, base], dtype=tl.int32, is_pure=False, pack=1)
    return base


@triton.jit
def lut_decoded(word, base, dtype: tl.constexpr):
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        LUT_LOOKUP, "=&r,=&r,=&r,=&r,r,r", [word, base],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    lower = tl.join(_halves(p0, dtype), _halves(p1, dtype))
    return tl.join(lower, tl.join(_halves(p2, dtype), _halves(p3, dtype)))


@triton.jit
def stay():
    """Loads before it are issued before what comes behind it."""
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff;\nmov.u32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _bases(dims, dim, start, stop):
    found = []
    while start < stop:
        found.append([start if d == dim else 0 for d in range(dims)])
        start *= 2
    return found


@gluon.constexpr_function
def _read_layout(warps, rows, words):
    """Of (warps, rows, 16 words): a lane has ``words`` side by side, four lanes a group of them; eight rows in a warp."""
    registers = _bases(3, 2, 1, words) + _bases(3, 2, 4 * words, 16) + _bases(3, 1, 8, rows)
    lanes = _bases(3, 2, words, 4 * words) + _bases(3, 1, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(3, 0, 1, warps), [], [warps, rows, 16])


@gluon.constexpr_function
def _sums_layout(warps, rows, split, tokens):
    """(warps, rows, split, tokens) as the tensor cores leave (warps, rows, split * tokens)."""
    columns = _bases(4, 3, 1, tokens) + _bases(4, 2, 1, split)
    registers = columns[:1] + [[0, 8, 0, 0]] + columns[3:] + _bases(4, 1, 16, rows)
    lanes = columns[1:3] + _bases(4, 1, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(4, 0, 1, warps), [], [warps, rows, split, tokens])


@gluon.jit
def _copy_w(slot, tile, tiles, k, word_ptrs, row_w, k_w, N, K, ROWS: gl.constexpr, EVEN: gl.constexpr):
    if EVEN:
        mask_w = (row_w >= 0) & (tile < tiles)
    else:
        mask_w = (row_w < N - tile * ROWS) & (k_w + k < K)
    async_copy.async_copy_global_to_shared(slot, word_ptrs + (tile * ROWS * K + k) // 8, mask=mask_w)
    async_copy.commit_group()


@gluon.jit
def _load_s(
    tile, tiles, k, row_s, k_s, within, N, K,
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0,
    ROWS: gl.constexpr, EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr, GROUPS: gl.constexpr,
):
    mask_s = (row_s >= 0) & (tile < tiles)
    found = ()
    for g in gl.static_range(GROUPS):
        if not EVEN:
            mask_s = (row_s < N - tile * ROWS) & (k_s + k + g * 64 < K)
        elements = within + (tile * ROWS + row_s) * K + k_s + k + g * 64
        found += (
            block_scale(
                block0, elements // BLOCK_SIZE, mask_s,
                absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE, NESTED_BLOCK,
            ),
        )
    return found


@gluon.jit(do_not_specialize=["expert", "E", "M"])
def _ring_kernel(
    expert_ptr, expert,  # (1,) integer or a number
    x_ptr, stride_xm,  # (M, K)
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    y_ptr,  # (M, N)
    E, M, N, K,
    EVEN: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = 2 * SPLIT
    GROUPS: gl.constexpr = 2 // SPLIT
    GROUP: gl.constexpr = 32 * WORDS
    STEP: gl.constexpr = 128
    COLS: gl.constexpr = SPLIT * TOKENS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    in_words: gl.constexpr = _read_layout(WARPS, ROWS, WORDS)
    copied_words: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    in_rows: gl.constexpr = gl.SliceLayout(2, copied_words)
    sums: gl.constexpr = _sums_layout(WARPS, ROWS, SPLIT, TOKENS)
    of_scales: gl.constexpr = gl.SliceLayout(3, sums)  # (WARPS, ROWS, SPLIT)

    pid = gl.program_id(0)
    if expert_ptr is not None:
        expert = gl.load(expert_ptr)
    expert = expert.to(gl.int64)
    exists = (expert >= 0) & (expert < E)
    row0 = gl.where(exists, expert, 0) * N
    packed_ptr += row0 * (K // 8)
    block0 = row0 * K // BLOCK_SIZE
    within = (row0 * K - block0 * BLOCK_SIZE).to(gl.int32)
    steps = gl.cdiv(K, STEP * WARPS)
    offs_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, in_rows))
    offs_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, in_rows))
    offs_i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, copied_words)))
    row_w = gl.expand_dims(0 * offs_w[:, None] + offs_n[None, :], 2)
    k_w = gl.expand_dims(offs_w[:, None] * (steps * STEP) + 0 * offs_n[None, :], 2) + (offs_i // 8 * 64)[None, None, :]
    word_offs = gl.expand_dims(offs_n[None, :] * (K // 8) + offs_w[:, None] * (steps * STEP // 8), 2) + offs_i[None, None, :]
    word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, 8]), [1, 1, 8])
    word_ptrs = packed_ptr + word_offs
    k_w = gl.max_constancy(k_w, [1, 1, 8])
    s_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_scales)))
    s_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_scales)))
    s_h = gl.arange(0, SPLIT, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_scales)))
    row_s = gl.expand_dims(0 * s_w[:, None] + s_n[None, :], 2) + 0 * s_h[None, None, :]
    k_s = gl.expand_dims(s_w[:, None] * (steps * STEP) + 0 * s_n[None, :], 2) + s_h[None, None, :] * 64

    # x: the instruction's order is (i, lane, 8), that in memory (lane, i, 8); columns are (half, token).
    offs_k = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))
    k_1 = offs_k // 8 % 4 * (8 * WORDS) + offs_k // 32 * 8 + offs_k % 8
    half_k = gl.max_constancy(k_1 // 64, [8])
    k_1 = gl.max_contiguous(gl.multiple_of(k_1, [8]), [8])
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))
    k_x = gl.expand_dims(x_w, 1) * (steps * STEP) + k_1[None, :]
    k_x = gl.max_contiguous(gl.multiple_of(k_x, [1, 8]), [1, 8])
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))
    token = cols % TOKENS
    x_ptrs = x_ptr + gl.expand_dims(k_x, 2) + (token * stride_xm)[None, None, :]
    inside = gl.expand_dims(gl.expand_dims(half_k, 0) + 0 * x_w[:, None], 2) == (cols // TOKENS)[None, None, :]
    inside = inside & (token < M)[None, None, :]

    tiles = gl.where(exists, gl.cdiv(N, ROWS), 0)
    programs = gl.num_programs(0)
    ring = gl.allocate_shared_memory(
        gl.int32, [AHEAD, WARPS, ROWS, 16], gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0])
    )
    copied = pid
    k_copied = 0
    for s in gl.static_range(AHEAD - 1):
        _copy_w(ring.index(s), copied, tiles, k_copied, word_ptrs, row_w, k_w, N, K, ROWS, EVEN)
        k_copied += STEP
        full = k_copied >= steps * STEP
        copied = gl.where(full, copied + programs, copied)
        k_copied = gl.where(full, 0, k_copied)
    scales1 = _load_s(pid, tiles, 0, row_s, k_s, within, N, K, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, ROWS, EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, GROUPS)
    tile2 = gl.where(steps == 1, pid + programs, pid)
    k2 = gl.where(steps == 1, 0, STEP)
    scales2 = _load_s(tile2, tiles, k2, row_s, k_s, within, N, K, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, ROWS, EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, GROUPS)
    entries = gl.arange(0, 256, layout=gl.BlockedLayout([max(1, 256 // (32 * WARPS))], [32], [WARPS], [0]))
    base = lut_fill(code_ptr, entries, dtype)
    zeros = gl.zeros((WARPS, ROWS, COLS), gl.float32, layout=mma)
    acc = gl.zeros((WARPS, ROWS, SPLIT, TOKENS), gl.float32, layout=sums)
    out_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, sums))
    out_n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    out_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, out_layout))
    tile = pid
    k = 0
    for it in range(gl.cdiv(gl.cdiv(N, ROWS) - pid, programs) * steps):
        xs = ()
        for g in gl.static_range(GROUPS):
            at = k + g * GROUP
            if EVEN:
                xs += (gl.load(x_ptrs + at, mask=inside, other=0.0),)
            else:
                xs += (gl.load(x_ptrs + at, mask=inside & gl.expand_dims(k_x + at < K, 2), other=0.0),)
        async_copy.wait_group(AHEAD - 2)
        gl.thread_barrier()
        words = ring.index(it % AHEAD).load(in_words)
        _copy_w(ring.index((it + AHEAD - 1) % AHEAD), copied, tiles, k_copied, word_ptrs, row_w, k_w, N, K, ROWS, EVEN)
        k_copied += STEP
        full = k_copied >= steps * STEP
        copied = gl.where(full, copied + programs, copied)
        k_copied = gl.where(full, 0, k_copied)
        scales = scales1
        scales1 = scales2
        k2 += STEP
        full = k2 >= steps * STEP
        tile2 = gl.where(full, tile2 + programs, tile2)
        k2 = gl.where(full, 0, k2)
        scales2 = _load_s(tile2, tiles, k2, row_s, k_s, within, N, K, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, block0, ROWS, EVEN, BLOCK_SIZE, SCALE, NESTED_BLOCK, GROUPS)
        if GROUPS == 1:
            of_groups = (words,)
        else:
            of_groups = gl.split(gl.permute(gl.reshape(words, (WARPS, ROWS, 2, 8)), (0, 1, 3, 2)))
        for g in gl.static_range(GROUPS):
            w = lut_decoded(gl.reshape(of_groups[g], (WARPS, ROWS, 4, WORDS)), base, dtype)
            # (warp, row, lane, i, half of a pair, pair, half of a word) -> (warp, row, (i, lane, element))
            w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 6, 5, 4)), (WARPS, ROWS, GROUP))
            w = gl.convert_layout(w, left, assert_trivial=True)
            part = gl.convert_layout(gl.reshape(mma_v2(w, xs[g], zeros), (WARPS, ROWS, SPLIT, TOKENS)), sums)
            acc += part * gl.expand_dims(scales[g], 3)
        k += STEP
        if k >= steps * STEP:
            y = gl.where(exists, gl.sum(gl.sum(acc, axis=2), axis=0), 0.0)  # (ROWS, TOKENS)
            rows = tile * ROWS + out_n
            y_ptrs = y_ptr + (out_t * N)[None, :] + rows[:, None]
            gl.store(y_ptrs, y.to(dtype), mask=(rows < N)[:, None] & (out_t < M)[None, :])
            acc = gl.zeros((WARPS, ROWS, SPLIT, TOKENS), gl.float32, layout=sums)
            tile += programs
            k = 0
    async_copy.wait_group(0)
