"""Rows times 4-bit matrices on Hopper, in Gluon: tiles are decoded while the tensor cores multiply the ones before.

W is the left operand of the tensor cores' instruction (``wgmma``), and the rows of x are the columns of the right one, of
which the instruction takes any multiple of 8 up to 256. So a tile can have as many rows as an expert has, up to 256 (half or
a quarter of that where it is enough), and each element of W is decoded once for all of them. A thread reads 32 or 64 elements that lie side by side and have one scale. It multiplies the sixteen
values with the scale, in float32, and rounds them: then every element is a look-up, and is what ``nf4_dequantize`` gives,
bit for bit. Elements of MXFP4 and NVFP4 need no look-up (``packed/kernels.py``); the scale multiplies them.

    step i:  start the products of tile i  |  copy x and words of later tiles, decode tile i + 1  |  wait for tile i - 1

Three tiles of W lie in shared memory: one is read, one waits to be read, one is written; the same threads that decode
start the products. Words are on their way for STAGES + PREFETCH - 2 steps. The sum is over K, or over N for gradients of x
(BY_ROW): then tensor cores read the tile transposed. The few tiles of a single matrix, where one is high enough for all rows,
are shared by programs that have a part of K each (SPLIT_K): the last one to end adds up what they have, in the order of the parts.

Needs x and W as ``products.plan`` says: 16-bit numbers, aligned rows, K a multiple of 64.
"""

from kernelbook.gluon_names import async_copy

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl  # whose barrier has one name in every version
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernelbook.packed.kernels import pairs, pairs_by_table, scale_of, stored_scale
from kernelbook.packed.kernels_nvidia import scale_of_rows
from kernelbook.tiles import grouped, is_last_share

GROUP = gl.constexpr(8)  # tiles below each other that share what is read of W
STAGES = gl.constexpr(4)  # tiles of x on their way, or in use
PREFETCH = gl.constexpr(4)  # by how many steps words come before x does


@gluon.constexpr_function
def is_e2m1(scale):
    """Whether elements are e2m1, without a table."""
    return scale in ("e8m0", "e4m3", "e4m3 alone")


@gluon.constexpr_function
def padded_rank(rank):
    """What a tile of tensor cores takes."""
    return max(16, 1 << (rank - 1).bit_length())


@gluon.constexpr_function
def rows_layout(block_n):
    """Of a tile of y: eight columns a thread, the threads of a warp side by side."""
    return gl.BlockedLayout([1, 8], [32 * 8 // block_n, block_n // 8], [block_n // 16, 1], [1, 0])


@gluon.jit
def _decode(
    words, scale, code, smem, dtype: gl.constexpr, SCALE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr
):  # fmt: skip
    """Words (ROWS, COLS / P, P / 8) and scales (ROWS, COLS / P) into shared memory (ROWS, COLS)."""
    if is_e2m1(SCALE):
        found = pairs(words, gl.expand_dims(scale, 2), None, dtype, SCALE)
    else:
        found = pairs_by_table(words, code, scale, dtype)
    found = gl.permute(found, (0, 1, 2, 4, 3))  # (ROWS, COLS / P, P / 8, 2, 2), the first pair at (0, 0)
    as_pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    smem._reinterpret(gl.int32, [ROWS, COLS // 2], as_pairs).store(gl.reshape(found, (ROWS, COLS // 2)))


@gluon.jit
def _store_tile(
    y, first, rows, n0, order_ptr, y_ptr, width,
    layout: gl.constexpr, Y_GROUPED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Store y (BLOCK_M, BLOCK_N) from column n0 on, in the rows that the tile's positions stand for."""
    offs_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    positions = first + gl.minimum(offs_t, rows - 1)
    y_rows = positions if Y_GROUPED else gl.load(order_ptr + positions)
    offs_n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    y_ptrs = y_ptr + (y_rows.to(gl.int64) * width)[:, None] + offs_n[None, :]
    gl.store(y_ptrs, y, mask=(offs_t < rows)[:, None] & (offs_n < width)[None, :])


@gluon.jit
def _tile(
    expert, first, rows, pid_n,
    order_ptr, x_ptr, stride_xm,
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
    b_ptr, stride_be, stride_bn, stride_br, u_ptr, bias_ptr,
    y_ptr, sums_ptr, tickets_ptr, N, K, top_k,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr, r: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """y[tokens, BLOCK_N] of W (N, K), the stored matrix, over K, or over N if BY_ROW; SPLIT_K programs share the sum."""
    WARPS: gl.constexpr = BLOCK_N // 16
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
    w_smem = gl.allocate_shared_memory(dtype, [3, ROWS, COLS], gl.NVMMASharedLayout(128, 16, 2))
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], gl.NVMMASharedLayout(128, 16, 2))
    RING: gl.constexpr = STAGES + PREFETCH - 2
    ring = gl.allocate_shared_memory(
        gl.int32, [RING, ROWS, COLS // RUN, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    length = N if BY_ROW else K
    width = K if BY_ROW else N
    n0 = pid_n * BLOCK_N
    steps = gl.cdiv(length, BLOCK_K * SPLIT_K)
    k0 = 0  # a constant without parts: it takes no part in the loop's addresses
    if SPLIT_K > 1:
        k0 = gl.program_id(1) * steps * BLOCK_K

    # Where this program's rows of x lie. Tokens that are not there get the last one's, and are not stored.
    offs_t = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, x_layout))
    positions = first + gl.minimum(offs_t, rows - 1)
    x_rows = positions if X_GROUPED else gl.load(order_ptr + positions) // top_k
    offs_k = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, x_layout))
    offs_k = gl.max_contiguous(gl.multiple_of(offs_k, [8]), [8])
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
        offs_r += k0
        row_of_step: gl.constexpr = BLOCK_K
        col_of_step: gl.constexpr = 0
    else:
        offs_r += n0
        offs_c += k0
        row_of_step: gl.constexpr = 0
        col_of_step: gl.constexpr = BLOCK_K
    offs_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))
    word_offs = gl.expand_dims((offs_r * K + offs_c) // 8, 2) + offs_i[None, None, :]
    word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, WORDS]), [1, 1, WORDS])
    word_ptrs = packed_ptr + word_offs
    step_words = (row_of_step * K + col_of_step) // 8
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
        mask = (offs_k + s * BLOCK_K < length)[None, :] & (offs_t < BLOCK_M)[:, None]
        async_copy.async_copy_global_to_shared(x_smem.index(s), x_ptrs + s * BLOCK_K, mask=mask)
        at = s + PREFETCH
        mask = gl.expand_dims((offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K), 2)
        async_copy.async_copy_global_to_shared(ring.index(at % RING), word_ptrs + at * step_words, mask=mask)
        async_copy.commit_group()
    # The scales of the next three tiles.
    scales = ()
    for s in gl.static_range(3):
        inside = (offs_r + s * row_of_step < N) & (offs_c + s * col_of_step < K)
        blocks = (within + (offs_r + s * row_of_step) * K + offs_c + s * col_of_step) // BLOCK_SIZE
        scales += (stored_scale(block0, blocks, inside, absmax_ptr, nested_absmax_ptr, SCALE),)
    async_copy.wait_group(STAGES - 2)
    words = ring.index(0).load(words_layout)
    scale = scale_of(scales[0][0], scales[0][1], None, nested_code_ptr, offset, SCALE)
    _decode(words, scale, code, w_smem.index(0), dtype, SCALE, ROWS, COLS)
    stored1, nested1 = scales[1]
    stored2, nested2 = scales[2]
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=mma)
    if r > 0:
        RANK: gl.constexpr = padded_rank(r)
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
        mask = (offs_k + at * BLOCK_K < length)[None, :] & (offs_t < BLOCK_M)[:, None]
        async_copy.async_copy_global_to_shared(x_smem.index(at % STAGES), x_ptrs + at * BLOCK_K, mask=mask)
        at += PREFETCH
        mask = gl.expand_dims((offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K), 2)
        async_copy.async_copy_global_to_shared(ring.index(at % RING), word_ptrs + at * step_words, mask=mask)
        async_copy.commit_group()
        scale = scale_of(stored1, nested1, None, nested_code_ptr, offset, SCALE)
        stored1 = stored2
        nested1 = nested2
        at = i + 3
        inside = (offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K)
        blocks = (within + (offs_r + at * row_of_step) * K + offs_c + at * col_of_step) // BLOCK_SIZE
        stored2, nested2 = stored_scale(block0, blocks, inside, absmax_ptr, nested_absmax_ptr, SCALE)
        _decode(words, scale, code, w_smem.index((i + 1) % 3), dtype, SCALE, ROWS, COLS)
        acc = warpgroup_mma_wait(1, deps=[token])
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    is_last = True
    if SPLIT_K > 1:
        offs = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))[:, None] * BLOCK_M
        offs += gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))[None, :]
        tickets_ptr += gl.program_id(0)
        sums_ptr += gl.program_id(0) * (SPLIT_K * BLOCK_N * BLOCK_M)
        gl.store(sums_ptr + gl.program_id(1) * (BLOCK_N * BLOCK_M) + offs, acc)
        is_last = is_last_share(tickets_ptr, SPLIT_K)  # which adds up, in the order of the parts
        if is_last:
            acc = gl.load(sums_ptr + offs, cache_modifier=".cg")
            for p in gl.static_range(1, SPLIT_K):
                acc += gl.load(sums_ptr + p * (BLOCK_N * BLOCK_M) + offs, cache_modifier=".cg")
    if is_last:
        if SCALE == "e4m3 alone":
            acc *= scale_of_rows(element0 + n0 * K, N - n0, K, nested_absmax_ptr, mma, BLOCK_N)[:, None]
        if bias_ptr is not None:
            c_n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
            bias = gl.load(bias_ptr + expert.to(gl.int64) * width + c_n, mask=c_n < width, other=0.0)
            acc += bias.to(gl.float32)[:, None]
        y_layout: gl.constexpr = rows_layout(BLOCK_N)
        y = gl.convert_layout(gl.permute(acc.to(dtype), (1, 0)), y_layout)
        _store_tile(y, first, rows, n0, order_ptr, y_ptr, width, y_layout, Y_GROUPED, BLOCK_M, BLOCK_N)


@gluon.jit(do_not_specialize=["tiles_at", "expert", "E", "M", "top_k"])
def _many_rows_kernel(
    routing_ptr, tiles_at,  # order, (R,) pair of each sorted position; there (num_m, 3) group, first position and rows
    expert,  # (1,) integer or a number: the matrix of all M rows, without a routing
    x_ptr, stride_xm,  # (R / top_k, K) rows, or N wide if BY_ROW; in sorted order, R of them, if X_GROUPED
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K), words
    b_ptr, stride_be, stride_bn, stride_br, u_ptr,  # (E, N, r), or K long if BY_ROW; (R, RANK) in sorted order; if RANK > 0
    bias_ptr,  # (E, N) or None
    y_ptr,  # (R, N), or K wide if BY_ROW; in sorted order if Y_GROUPED
    sums_ptr, tickets_ptr,  # (tiles, SPLIT_K, BLOCK_N, BLOCK_M) float32, (tiles,) zero before and after; if SPLIT_K > 1
    E, M, N, K, top_k,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr, r: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr, HALVES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """A tile has BLOCK_M rows, or half or a quarter of them (HALVES) where that is enough; with SPLIT_K > 1 never."""
    gl.static_assert(SPLIT_K == 1 or (r == 0 and HALVES == 0))
    across = gl.cdiv(K if BY_ROW else N, BLOCK_N)
    pid_m, pid_n = grouped(gl.program_id(0), gl.num_programs(0) // across, across, GROUP)
    if routing_ptr is None:
        if expert.dtype.is_ptr():
            expert = gl.load(expert)
        expert = gl.where((expert >= 0) & (expert < E), expert, E).to(gl.int32)
        first = pid_m * BLOCK_M
        rows = M - first
    else:
        tile_ptr = routing_ptr + tiles_at + pid_m * 3
        expert = gl.load(tile_ptr)
        first = gl.load(tile_ptr + 1)
        rows = gl.load(tile_ptr + 2)
    if expert == E:  # rows that belong to no expert are zero
        layout: gl.constexpr = rows_layout(BLOCK_N)
        zeros = gl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty, layout)
        width = K if BY_ROW else N
        _store_tile(zeros, first, rows, pid_n * BLOCK_N, routing_ptr, y_ptr, width, layout, Y_GROUPED, BLOCK_M, BLOCK_N)
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
                    b_ptr, stride_be, stride_bn, stride_br, u_ptr, bias_ptr,
                    y_ptr, sums_ptr, tickets_ptr, N, K, top_k, X_GROUPED, Y_GROUPED, BY_ROW, r,
                    BLOCK_SIZE, SCALE, BLOCK_M >> h, BLOCK_N, BLOCK_K, SPLIT_K,
                )  # fmt: skip
