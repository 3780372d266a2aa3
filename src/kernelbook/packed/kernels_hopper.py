"""Rows times 4-bit matrices on Hopper, in Gluon: tiles are decoded while the tensor cores multiply the ones before.

W is the left operand of the tensor cores' instruction (``wgmma``), and the rows of x are the columns of the right one, of
which the instruction takes any multiple of 8 up to 256. So a tile can have as many rows as an expert has, up to 256 (half or
a quarter of that where it is enough), and each element of W is decoded once for all of them. A thread reads 32 or 64 elements that lie side by side and have one scale. It multiplies the sixteen
values with the scale, in float32, and rounds them: then every element is a look-up, and is what ``nf4_dequantize`` gives,
bit for bit.

    step i:  start the products of tile i  |  copy x and words of later tiles, decode tile i + 1  |  wait for tile i - 1

Three tiles of W lie in shared memory: one is read, one waits to be read, one is written; the same threads that decode
start the products. Words are on their way for STAGES + PREFETCH - 2 steps. The sum is over K, or over N for gradients of x
(BY_ROW): then tensor cores read the tile transposed.

Needs x and W as ``products.plan`` says: 16-bit numbers, aligned rows, K a multiple of 64.
"""

from kernelbook.gluon_names import async_copy

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl  # whose barrier has one name in every version
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernelbook.packed.kernels import NESTED_BLOCK, from_e4m3, from_e8m0, lookup, scaled_table, twice_rounded
from kernelbook.packed.kernels_nvidia import _bases, _fill_pairs, _looked_up
from kernelbook.tiles import grouped


@gluon.jit
def _decode(words, scale, code, smem, dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Words (ROWS, COLS / P, P / 8) and scales (ROWS, COLS / P) into shared memory (ROWS, COLS)."""
    values = scaled_table(code, scale, dtype)
    pairs = lookup(words, values)  # (ROWS, COLS / P, P / 8, 2, 2), the first pair at (0, 0)
    pairs = gl.permute(pairs, (0, 1, 2, 4, 3))
    as_pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    smem._reinterpret(gl.int32, [ROWS, COLS // 2], as_pairs).store(gl.reshape(pairs, (ROWS, COLS // 2)))


@gluon.jit
def _stored_scale(block0, blocks, mask, absmax_ptr, nested_absmax_ptr, SCALE: gl.constexpr):
    """What there is to load for a scale, long before it is used: the stored value, and what scales it in turn."""
    stored = gl.load(absmax_ptr + block0 + blocks, mask=mask, other=0)
    if SCALE == "float32" or SCALE == "e8m0":
        return stored, stored
    nested0 = block0 // NESTED_BLOCK
    within = (block0 - nested0 * NESTED_BLOCK).to(gl.int32)
    return stored, gl.load(nested_absmax_ptr + nested0 + (within + blocks) // NESTED_BLOCK, mask=mask, other=0.0)


@gluon.jit
def _scale(parts, nested_code_ptr, offset, SCALE: gl.constexpr):
    stored, nested = parts
    if SCALE == "float32":
        return stored
    if SCALE == "e8m0":
        return from_e8m0(stored)
    if SCALE == "e4m3":
        return from_e4m3(stored) * nested
    return twice_rounded(gl.load(nested_code_ptr + stored.to(gl.int32)), nested, offset)


@gluon.jit
def _copy_x(smem, x_ptrs, inside, some):
    async_copy.async_copy_global_to_shared(smem, x_ptrs, mask=inside[None, :] & some[:, None])


@gluon.jit
def _no_tile(
    first, rows, pid_n, order_ptr, y_ptr, width,
    Y_GROUPED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows that belong to no expert are zero."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0])
    offs_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    positions = first + gl.minimum(offs_t, rows - 1)
    y_rows = positions if Y_GROUPED else gl.load(order_ptr + positions)
    offs_n = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    y_ptrs = y_ptr + (y_rows.to(gl.int64) * width)[:, None] + offs_n[None, :]
    zeros = gl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty, layout)
    gl.store(y_ptrs, zeros, mask=(offs_t < rows)[:, None] & (offs_n < width)[None, :])


@gluon.jit
def _tile(
    expert, first, rows, pid_n,
    order_ptr, x_ptr, stride_xm,
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
    b_ptr, stride_be, stride_bn, stride_br, u_ptr, bias_ptr, stride_ce, stride_cn,
    y_ptr, N, K, top_k,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr,
    r: gl.constexpr, RANK: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """y[tokens, BLOCK_N] of W (N, K), the stored matrix, over K, or over N if BY_ROW."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = BLOCK_K if BY_ROW else BLOCK_N
    COLS: gl.constexpr = BLOCK_N if BY_ROW else BLOCK_K
    EACH: gl.constexpr = ROWS * COLS // (32 * WARPS)  # elements of a thread
    RUN: gl.constexpr = min(EACH, 64, BLOCK_SIZE)
    WORDS: gl.constexpr = RUN // 8
    ACROSS: gl.constexpr = min(COLS // EACH, 8)
    words_layout: gl.constexpr = gl.BlockedLayout(
        [1, EACH // RUN, WORDS], [32 // ACROSS, ACROSS, 1], [WARPS, 1, 1], [2, 1, 0]
    )
    runs: gl.constexpr = gl.SliceLayout(2, words_layout)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_K, BLOCK_K // 8], [WARPS, 1], [1, 0])
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0])
    w_smem = gl.allocate_shared_memory(dtype, [3, ROWS, COLS], gl.NVMMASharedLayout(128, 16, 2))
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], gl.NVMMASharedLayout(128, 16, 2))
    RING: gl.constexpr = STAGES + PREFETCH - 2
    ring = gl.allocate_shared_memory(
        gl.int32, [RING, ROWS, COLS // RUN, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    length = N if BY_ROW else K
    width = K if BY_ROW else N
    n0 = pid_n * BLOCK_N

    # Where this program's rows of x lie. Tokens that are not there get the last one's, and are not stored.
    offs_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_layout))
    positions = first + gl.minimum(offs_t, rows - 1)
    x_rows = positions if X_GROUPED else gl.load(order_ptr + positions) // top_k
    offs_k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, x_layout))
    x_ptrs = x_ptr + (x_rows.to(gl.int64) * stride_xm)[:, None] + offs_k[None, :]

    # Elements are counted from the matrix' first one, in 32 bits.
    element0 = expert.to(gl.int64) * N * K
    packed_ptr += element0 // 8
    block0 = element0 // BLOCK_SIZE
    within = (element0 - block0 * BLOCK_SIZE).to(gl.int32)
    offs_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, runs))[:, None]
    offs_c = gl.arange(0, COLS // RUN, layout=gl.SliceLayout(0, runs))[None, :] * RUN
    if BY_ROW:
        offs_c += n0
        row_of_step: gl.constexpr = BLOCK_K
        col_of_step: gl.constexpr = 0
    else:
        offs_r += n0
        row_of_step: gl.constexpr = 0
        col_of_step: gl.constexpr = BLOCK_K
    offs_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))
    word_offs = gl.expand_dims((offs_r * K + offs_c) // 8, 2) + offs_i[None, None, :]
    word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, WORDS]), [1, 1, WORDS])
    word_ptrs = packed_ptr + word_offs
    step_words = (row_of_step * K + col_of_step) // 8
    steps = gl.cdiv(length, BLOCK_K)
    code = ()
    for i in gl.static_range(16):
        code += (gl.load(code_ptr + i),)
    offset = 0.0
    if SCALE == "nested":
        offset = gl.load(nested_offset_ptr)
    for s in gl.static_range(PREFETCH):
        mask = gl.expand_dims((offs_r + s * row_of_step < N) & (offs_c + s * col_of_step < K), 2)
        async_copy.async_copy_global_to_shared(ring.index(s), word_ptrs + s * step_words, mask=mask)
    async_copy.commit_group()
    for s in gl.static_range(STAGES - 2):
        _copy_x(x_smem.index(s), x_ptrs + s * BLOCK_K, offs_k + s * BLOCK_K < length, offs_t < BLOCK_M)
        at = s + PREFETCH
        mask = gl.expand_dims((offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K), 2)
        async_copy.async_copy_global_to_shared(ring.index(at % RING), word_ptrs + at * step_words, mask=mask)
        async_copy.commit_group()
    # The scales of the next three tiles.
    scales = ()
    for s in gl.static_range(3):
        inside = (offs_r + s * row_of_step < N) & (offs_c + s * col_of_step < K)
        blocks = (within + (offs_r + s * row_of_step) * K + offs_c + s * col_of_step) // BLOCK_SIZE
        scales += (_stored_scale(block0, blocks, inside, absmax_ptr, nested_absmax_ptr, SCALE),)
    async_copy.wait_group(STAGES - 2)
    words = ring.index(0).load(words_layout)
    _decode(words, _scale(scales[0], nested_code_ptr, offset, SCALE), code, w_smem.index(0), dtype, ROWS, COLS)
    stored1, nested1 = scales[1]
    stored2, nested2 = scales[2]
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=mma)
    if RANK > 0:
        # Before the loop: behind it, ptxas would serialize the tensor cores' instructions.
        PART: gl.constexpr = max(16, min(RANK, 64, 4096 // BLOCK_M))  # a row of 128 bytes at most
        b_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // PART, PART // 8], [WARPS, 1], [1, 0])
        shared: gl.constexpr = gl.NVMMASharedLayout(PART * 2, 16, 2)
        b_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, b_layout))
        b_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, b_layout))
        b_r = gl.arange(0, PART, layout=gl.SliceLayout(0, b_layout))
        u_rows = (first + gl.minimum(b_t, rows - 1)).to(gl.int64) * RANK
        b_rows = expert.to(gl.int64) * stride_be + (n0 + b_n).to(gl.int64) * stride_bn
        for start in gl.static_range(0, RANK, PART):
            b_ptrs = b_ptr + b_rows[:, None] + ((start + b_r) * stride_br)[None, :]
            mask_b = (n0 + b_n < width)[:, None] & (start + b_r < r)[None, :]
            b_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, PART], shared, gl.load(b_ptrs, mask=mask_b, other=0.0))
            u = gl.load(u_ptr + u_rows[:, None] + (start + b_r)[None, :])
            u_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, PART], shared, u)
            fence_async_shared()
            tl.debug_barrier()
            acc = warpgroup_mma(b_smem, u_smem.permute((1, 0)), acc)
    for i in range(steps):
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        tl.debug_barrier()
        words = ring.index((i + 1) % RING).load(words_layout)
        w = w_smem.index(i % 3)
        if BY_ROW:
            w = w.permute((1, 0))
        token = warpgroup_mma(w, x_smem.index(i % STAGES).permute((1, 0)), acc, is_async=True)
        # What these copies overwrite, the products of two steps before have read; so has what is decoded.
        at = i + STAGES - 2
        _copy_x(x_smem.index(at % STAGES), x_ptrs + at * BLOCK_K, offs_k + at * BLOCK_K < length, offs_t < BLOCK_M)
        at += PREFETCH
        mask = gl.expand_dims((offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K), 2)
        async_copy.async_copy_global_to_shared(ring.index(at % RING), word_ptrs + at * step_words, mask=mask)
        async_copy.commit_group()
        scale = _scale((stored1, nested1), nested_code_ptr, offset, SCALE)
        stored1 = stored2
        nested1 = nested2
        at = i + 3
        inside = (offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K)
        blocks = (within + (offs_r + at * row_of_step) * K + offs_c + at * col_of_step) // BLOCK_SIZE
        stored2, nested2 = _stored_scale(block0, blocks, inside, absmax_ptr, nested_absmax_ptr, SCALE)
        _decode(words, scale, code, w_smem.index((i + 1) % 3), dtype, ROWS, COLS)
        acc = warpgroup_mma_wait(1, deps=[token])
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    if HAS_BIAS:
        c_n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
        bias_ptrs = bias_ptr + expert.to(gl.int64) * stride_ce + c_n.to(gl.int64) * stride_cn
        acc += gl.load(bias_ptrs, mask=c_n < width, other=0.0).to(gl.float32)[:, None]
    y = gl.convert_layout(gl.permute(acc.to(dtype), (1, 0)), y_layout)
    out_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, y_layout))
    positions = first + gl.minimum(out_t, rows - 1)
    y_rows = positions if Y_GROUPED else gl.load(order_ptr + positions)
    offs_n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, y_layout))
    y_ptrs = y_ptr + (y_rows.to(gl.int64) * width)[:, None] + offs_n[None, :]
    gl.store(y_ptrs, y, mask=(out_t < rows)[:, None] & (offs_n < width)[None, :])


@gluon.jit(do_not_specialize=["tiles_at", "expert", "E", "M", "top_k", "num_m"])
def _many_rows_kernel(
    routing_ptr, tiles_at,  # order, (R,) pair of each sorted position; there (num_m, 3) group, first position and rows
    expert_ptr, expert,  # (1,) integer or a number: the matrix of all M rows, without a routing
    x_ptr, stride_xm,  # (R / top_k, K) rows, or N wide if BY_ROW; in sorted order, R of them, if X_GROUPED
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    b_ptr, stride_be, stride_bn, stride_br, u_ptr,  # (E, N, r), or K long if BY_ROW; (R, RANK) in sorted order; if RANK > 0
    bias_ptr, stride_ce, stride_cn,  # (E, N), if HAS_BIAS
    y_ptr,  # (R, N), or K wide if BY_ROW; in sorted order if Y_GROUPED
    E, M, N, K, top_k, num_m,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr,
    r: gl.constexpr, RANK: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, HALVES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PREFETCH: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A tile has BLOCK_M rows, or half or a quarter of them (HALVES) where that is enough."""
    pid_m, pid_n = grouped(gl.program_id(0), num_m, gl.cdiv(K if BY_ROW else N, BLOCK_N), GROUP)
    if routing_ptr is None:
        if expert_ptr is not None:
            expert = gl.load(expert_ptr)
        expert = gl.where((expert >= 0) & (expert < E), expert, E).to(gl.int32)
        first = pid_m * BLOCK_M
        rows = M - first
    else:
        tile_ptr = routing_ptr + tiles_at + pid_m * 3
        expert = gl.load(tile_ptr)
        first = gl.load(tile_ptr + 1)
        rows = gl.load(tile_ptr + 2)
    if expert == E:
        _no_tile(first, rows, pid_n, routing_ptr, y_ptr, K if BY_ROW else N, Y_GROUPED, BLOCK_M, BLOCK_N, WARPS)
    elif expert >= 0:
        small = BLOCK_M
        if HALVES > 0:
            small = gl.where(rows <= BLOCK_M // 2, BLOCK_M // 2, small)
        if HALVES > 1:
            small = gl.where(rows <= BLOCK_M // 4, BLOCK_M // 4, small)
        for h in gl.static_range(HALVES + 1):
            if small == BLOCK_M >> h:
                _tile(
                    expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                    b_ptr, stride_be, stride_bn, stride_br, u_ptr, bias_ptr, stride_ce, stride_cn,
                    y_ptr, N, K, top_k, X_GROUPED, Y_GROUPED, BY_ROW, r, RANK, HAS_BIAS,
                    BLOCK_SIZE, SCALE, BLOCK_M >> h, BLOCK_N, BLOCK_K, STAGES, PREFETCH, WARPS,
                )  # fmt: skip


# --- one matrix, some rows ------------------------------------------------------------------------------------------

# CUDA gives a program so many bytes of shared memory unasked. Triton asks for more where what it allocated is more. It does
# not count the table of pairs, with which less than this would be too much: what it allocates is made more.
UNASKED = tl.constexpr(48 << 10)


@gluon.constexpr_function
def _words_of_rows(rows, blocks):
    """Of words (blocks * rows, 4, 2): a lane has two side by side of two rows, as wgmma wants its left operand."""
    registers = _bases(3, 2, 1, 2) + [[8, 0, 0]] + _bases(3, 0, rows, rows * blocks)
    lanes = _bases(3, 1, 1, 4) + _bases(3, 0, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(3, 0, 16, rows), [], [rows * blocks, 4, 2])


@gluon.constexpr_function
def _scales_of_rows(rows, blocks, shared):
    """Of scales (rows, blocks): each of four lanes has one block's, if ``shared``; else all have all."""
    across = _bases(2, 1, 1, blocks)
    registers = [[8, 0]] + ([] if shared else across)
    lanes = ((across if shared else []) + 2 * [[0, 0]])[:2] + _bases(2, 0, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, _bases(2, 0, 16, rows), [], [rows, blocks])


@gluon.jit
def _by_block(scale, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    """(ROWS, BLOCKS), a part in each lane -> BLOCKS times (ROWS,), in all lanes."""
    scale = gl.convert_layout(scale, _scales_of_rows(ROWS, BLOCKS, False))
    if BLOCKS == 1:
        parts = (gl.reshape(scale, (ROWS,)),)
    elif BLOCKS == 2:
        parts = gl.split(scale)
    else:
        even, odd = gl.split(gl.reshape(scale, (ROWS, 2, 2)))
        even0, even1 = gl.split(even)
        odd0, odd1 = gl.split(odd)
        parts = (even0, odd0, even1, odd1)
    return parts


@gluon.jit
def _store_x(smem, x, R: gl.constexpr):
    """Pairs (R, 32) in the order in which a lane has them: (lane, i, half of a word, pair) -> (i, half, pair, lane)."""
    x = gl.permute(gl.reshape(x, (R, 4, 2, 2, 2)), (0, 2, 3, 4, 1))
    smem._reinterpret(gl.int32, [R, 32], gl.NVMMASharedLayout(128, 32, 2)).store(gl.reshape(x, (R, 32)))


@gluon.jit
def _store_y(y, y_ptr, n0, M, N, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [ROWS // 64, WARPS * 64 // ROWS], [0, 1])
    y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), layout)
    rows = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    # y has fewer than 2**31 elements, as W.
    gl.store(y_ptr + rows[:, None] + (tokens * N)[None, :], y, mask=(rows < N)[:, None] & (tokens < M)[None, :])


@gluon.jit(do_not_specialize=["expert", "E", "M"])
def _some_rows_kernel(
    expert_ptr, expert,  # (1,) integer or a number
    x_ptr, stride_xm,  # (M, K / 2) pairs in int32
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    y_ptr,  # (M, N)
    sums_ptr, tickets_ptr,  # (tiles, SPLIT_K, ROWS, BLOCK_M) float32, (tiles,) zero before and after; if SPLIT_K > 1
    E, M, N, K,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """M <= BLOCK_M rows, with a tile of 16 rows of W a warp, which stay in registers.

    A step is BLOCKS times 64 of K. As in ``_one_matrix_kernel`` a lane reads words side by side, values are looked up in
    pairs, and scales multiply the sums over 64 elements. The order in which wgmma then sums over K is not that in memory, so x
    is put in this order on its way into shared memory, once for all warps.
    """
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    ROWS: gl.constexpr = 16 * WARPS
    STEP: gl.constexpr = 64 * BLOCKS
    R: gl.constexpr = BLOCKS * BLOCK_M
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    copied: gl.constexpr = _words_of_rows(ROWS, BLOCKS)
    in_words: gl.constexpr = _words_of_rows(ROWS, 1)
    in_parts: gl.constexpr = _scales_of_rows(ROWS, BLOCKS, True)
    of_scales: gl.constexpr = gl.SliceLayout(1, mma)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    x_smem = gl.allocate_shared_memory(dtype, [2, R, 64], gl.NVMMASharedLayout(128, 16, 2))
    # STAGES of them are used. For the rest see UNASKED.
    SLOTS: gl.constexpr = max(STAGES, (UNASKED - 2 * R * 128) // (BLOCKS * ROWS * 32) + 1)
    ring = gl.allocate_shared_memory(
        gl.int32, [SLOTS, BLOCKS * ROWS, 4, 2], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )

    if expert_ptr is not None:
        expert = gl.load(expert_ptr)
    expert = expert.to(gl.int64)
    exists = (expert >= 0) & (expert < E)
    n0 = gl.program_id(0) * ROWS
    steps = gl.cdiv(K, STEP * SPLIT_K)
    k0 = gl.program_id(1) * steps * STEP
    length = gl.where(exists, gl.minimum(steps * STEP, K - k0), 0)  # of the part

    # Elements are counted from the matrix' first one, in 32 bits.
    row0 = gl.where(exists, expert, 0) * N
    packed_ptr += row0 * (K // 8)
    block0 = row0 * K // BLOCK_SIZE
    within = (row0 * K - block0 * BLOCK_SIZE).to(gl.int32)
    w_r = gl.arange(0, BLOCKS * ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, copied)))
    w_l = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, copied)))
    w_i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, copied)))
    w_n = n0 + w_r % ROWS
    w_k = w_r // ROWS * 64
    word_offs = (w_n * (K // 8) + w_k // 8)[:, None] + (k0 // 8 + w_l * 2)[None, :]
    word_offs = gl.expand_dims(word_offs, 2) + w_i[None, None, :]
    word_ptrs = packed_ptr + gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, 2]), [1, 1, 2])
    w_k = gl.where(w_n < N, w_k, 2**30)  # never below the length
    w_k = gl.expand_dims(w_k[:, None] + 0 * w_l[None, :], 2)
    s_n = n0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, in_parts))
    s_k = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, in_parts)) * 64
    first_s = (within + s_n * K)[:, None] + (k0 + s_k)[None, :]
    s_k = gl.where(s_n < N, 0, 2**30)[:, None] + s_k[None, :]
    x_r = gl.arange(0, R, layout=gl.SliceLayout(1, x_layout))
    x_p = gl.arange(0, 32, layout=gl.SliceLayout(0, x_layout))
    x_ptrs = x_ptr + (x_r % BLOCK_M * stride_xm + x_r // BLOCK_M * 32)[:, None] + (k0 // 2 + x_p)[None, :]
    x_k = gl.where(x_r % BLOCK_M < M, x_r // BLOCK_M * 64, 2**30)[:, None] + 0 * x_p[None, :]

    for s in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(ring.index(s), word_ptrs + s * (STEP // 8), mask=w_k < length - s * STEP)
        async_copy.commit_group()
    x = gl.load(x_ptrs, mask=x_k < length, other=0)
    next_x = gl.load(x_ptrs + STEP // 2, mask=x_k < length - STEP, other=0)
    scales = ()  # what there is to load for those of two steps
    for s in gl.static_range(2):
        scales += (
            _stored_scale(
                block0, (first_s + s * STEP) // BLOCK_SIZE, s_k < length - s * STEP,
                absmax_ptr, nested_absmax_ptr, SCALE,
            ),
        )  # fmt: skip
    offset = 0.0
    if SCALE == "nested":
        offset = gl.load(nested_offset_ptr)
    begin = _fill_pairs(code_ptr, dtype, WARPS)
    _store_x(x_smem.index(0), x, R)
    fence_async_shared()
    word_ptrs += (STAGES - 1) * (STEP // 8)
    x_ptrs += STEP
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=mma)
    acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=mma)
    for i in range(steps):
        async_copy.wait_group(STAGES - 2)
        tl.debug_barrier()
        slot = ring.index(i % STAGES)
        x_slot = x_smem.index(i % 2)
        ws = ()
        parts = ()
        for b in gl.static_range(BLOCKS):
            w = _looked_up(slot.slice(b * ROWS, ROWS).load(in_words), begin, dtype)
            # (row, lane, i, half of a pair, pair, half of a word) -> (row, (i, half of a word, pair, lane, half of a pair))
            w = gl.reshape(gl.permute(w, (0, 2, 5, 4, 1, 3)), (ROWS, 64))
            w = gl.convert_layout(w, left, assert_trivial=True)
            ws += (w,)
            x_b = x_slot.slice(b * BLOCK_M, BLOCK_M).permute((1, 0))
            parts += (warpgroup_mma(w, x_b, zeros, use_acc=False, is_async=True),)
        # The words that these copies overwrite are in registers, and the products of the step before have read its x.
        left_k = length - i * STEP
        _store_x(x_smem.index((i + 1) % 2), next_x, R)
        fence_async_shared()
        async_copy.async_copy_global_to_shared(
            ring.index((i + STAGES - 1) % STAGES), word_ptrs, mask=w_k < left_k - (STAGES - 1) * STEP
        )
        async_copy.commit_group()
        next_x = gl.load(x_ptrs, mask=x_k < left_k - 2 * STEP, other=0)
        scale = _by_block(_scale(scales[0], nested_code_ptr, offset, SCALE), ROWS, BLOCKS)
        scales = (
            scales[1],
            _stored_scale(
                block0, (first_s + (i + 2) * STEP) // BLOCK_SIZE, s_k < left_k - 2 * STEP,
                absmax_ptr, nested_absmax_ptr, SCALE,
            ),
        )  # fmt: skip
        word_ptrs += STEP // 8
        x_ptrs += STEP // 2
        for b in gl.static_range(BLOCKS):
            part, _ = warpgroup_mma_wait(BLOCKS - 1 - b, deps=[parts[b], ws[b]])
            acc += part * gl.convert_layout(scale[b], of_scales, assert_trivial=True)[:, None]
    async_copy.wait_group(0)
    if SPLIT_K == 1:
        _store_y(acc, y_ptr, n0, M, N, ROWS, BLOCK_M, WARPS)
    else:
        offs = gl.arange(0, ROWS, layout=of_scales)[:, None] * BLOCK_M
        offs += gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))[None, :]
        sums_ptr += gl.program_id(0) * (SPLIT_K * ROWS * BLOCK_M)
        gl.store(sums_ptr + gl.program_id(1) * (ROWS * BLOCK_M) + offs, acc)
        # All threads' stores come before the ticket. The last program of a tile adds up, in the order of the parts.
        tl.debug_barrier()
        if gl.atomic_add(tickets_ptr + gl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1:
            y = gl.load(sums_ptr + offs, cache_modifier=".cg")
            for p in gl.static_range(1, SPLIT_K):
                y += gl.load(sums_ptr + p * (ROWS * BLOCK_M) + offs, cache_modifier=".cg")
            _store_y(y, y_ptr, n0, M, N, ROWS, BLOCK_M, WARPS)
            gl.store(tickets_ptr + gl.program_id(0), 0)
