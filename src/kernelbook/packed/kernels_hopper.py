"""Many rows times 4-bit matrices on Hopper, in Gluon: tiles are decoded while the tensor cores multiply the one before.

W takes the part of the left operand and the rows of x that of the right one, whose number comes in eights: so a tile has
as many tokens as there are, in steps of 64, and each element of W is decoded once for up to 256 of them. A thread reads
32 or more elements that lie side by side and have one scale. It multiplies the sixteen values with the scale, in float32,
and rounds them: then every element is a look-up, and is what ``nf4_dequantize`` gives, bit for bit.

    step i:  start the products of tile i  |  copy x of tile i + 2, decode W of tile i + 1  |  wait for the products
"""

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernelbook.packed.kernels import block_scale, lookup, scaled_table


@gluon.jit
def _decode(words, scale, code, smem, dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Words (ROWS, COLS / P, P / 8) and scales (ROWS, COLS / P) into shared memory (ROWS, COLS)."""
    values = scaled_table(code, scale, dtype)
    pairs = lookup(words, values)  # (ROWS, COLS / P, P / 8, 2, 2), the first pair at (0, 0)
    pairs = gl.permute(pairs, (0, 1, 2, 4, 3))
    as_pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    smem._reinterpret(gl.int32, [ROWS, COLS // 2], as_pairs).store(gl.reshape(pairs, (ROWS, COLS // 2)))


@gluon.jit
def _fetch(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,
    block0, within, offs, mask,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr, words_layout: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """The words and scales of the runs that begin at the elements ``offs``, counted from the matrix' first."""
    scale = block_scale(
        block0, (within + offs) // BLOCK_SIZE, mask,
        absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, SCALE, NESTED_BLOCK,
    )  # fmt: skip
    offs_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))
    word_ptrs = packed_ptr + gl.expand_dims(offs // 8, 2) + offs_i[None, None, :]
    return gl.load(word_ptrs, mask=gl.expand_dims(mask, 2), other=0), scale


@gluon.jit
def _tile(
    expert, first, rows, pid_n,
    order_ptr, x_ptr, stride_xm,
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
    y_ptr, N, K, slots,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, OUT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """y[tokens, OUT] of W (N, K), the stored matrix, over K, or over N if BY_ROW."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = DEPTH if BY_ROW else OUT
    COLS: gl.constexpr = OUT if BY_ROW else DEPTH
    EACH: gl.constexpr = ROWS * COLS // (32 * WARPS)  # elements of a thread
    RUN: gl.constexpr = min(EACH, 64, BLOCK_SIZE)
    WORDS: gl.constexpr = RUN // 8
    ACROSS: gl.constexpr = min(COLS // EACH, 8)
    words_layout: gl.constexpr = gl.BlockedLayout(
        [1, EACH // RUN, WORDS], [32 // ACROSS, ACROSS, 1], [WARPS, 1, 1], [2, 1, 0]
    )
    runs: gl.constexpr = gl.SliceLayout(2, words_layout)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DEPTH, DEPTH // 8], [WARPS, 1], [1, 0])
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // OUT, OUT // 8], [WARPS, 1], [1, 0])
    w_smem = gl.allocate_shared_memory(dtype, [2, ROWS, COLS], gl.NVMMASharedLayout(128, 16, 2))
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    length = N if BY_ROW else K
    width = K if BY_ROW else N
    n0 = pid_n * OUT

    # Where this program's rows of x lie. Tokens that are not there get the last one's, and are not stored.
    offs_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, x_layout))
    positions = first + gl.minimum(offs_t, rows - 1)
    x_rows = positions if X_GROUPED else gl.load(order_ptr + positions) // slots
    offs_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, x_layout))
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
        row_of_step: gl.constexpr = DEPTH
        col_of_step: gl.constexpr = 0
    else:
        offs_r += n0
        row_of_step: gl.constexpr = 0
        col_of_step: gl.constexpr = DEPTH
    steps = gl.cdiv(length, DEPTH)
    code = ()
    for i in gl.static_range(16):
        code += (gl.load(code_ptr + i),)
    for s in gl.static_range(STAGES - 1):
        mask = (offs_k + s * DEPTH < length)[None, :] & (offs_t < TOKENS)[:, None]
        async_copy.async_copy_global_to_shared(x_smem.index(s), x_ptrs + s * DEPTH, mask=mask)
        async_copy.commit_group()
    words, scale = _fetch(
        packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,
        block0, within, offs_r * K + offs_c, (offs_r < N) & (offs_c < K),
        BLOCK_SIZE, SCALE, NESTED_BLOCK, words_layout, WORDS,
    )  # fmt: skip
    _decode(words, scale, code, w_smem.index(0), dtype, ROWS, COLS)
    offs_r += row_of_step
    offs_c += col_of_step
    words, scale = _fetch(
        packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,
        block0, within, offs_r * K + offs_c, (offs_r < N) & (offs_c < K),
        BLOCK_SIZE, SCALE, NESTED_BLOCK, words_layout, WORDS,
    )  # fmt: skip
    acc = gl.zeros((OUT, TOKENS), gl.float32, layout=mma)
    for i in range(steps):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        w = w_smem.index(i % 2)
        if BY_ROW:
            w = w.permute((1, 0))
        token = warpgroup_mma(w, x_smem.index(i % STAGES).permute((1, 0)), acc, is_async=True)
        ahead = i + STAGES - 1
        mask = (offs_k + ahead * DEPTH < length)[None, :] & (offs_t < TOKENS)[:, None]
        async_copy.async_copy_global_to_shared(x_smem.index(ahead % STAGES), x_ptrs + ahead * DEPTH, mask=mask)
        async_copy.commit_group()
        offs_r += row_of_step
        offs_c += col_of_step
        next_words, next_scale = _fetch(
            packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,
            block0, within, offs_r * K + offs_c, (offs_r < N) & (offs_c < K),
            BLOCK_SIZE, SCALE, NESTED_BLOCK, words_layout, WORDS,
        )  # fmt: skip
        _decode(words, scale, code, w_smem.index((i + 1) % 2), dtype, ROWS, COLS)
        words = next_words
        scale = next_scale
        acc = warpgroup_mma_wait(0, deps=[token])
    async_copy.wait_group(0)
    y = gl.convert_layout(gl.permute(acc.to(dtype), (1, 0)), y_layout)
    out_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, y_layout))
    positions = first + gl.minimum(out_t, rows - 1)
    y_rows = positions if Y_GROUPED else gl.load(order_ptr + positions)
    offs_n = n0 + gl.arange(0, OUT, layout=gl.SliceLayout(0, y_layout))
    y_ptrs = y_ptr + (y_rows.to(gl.int64) * width)[:, None] + offs_n[None, :]
    gl.store(y_ptrs, y, mask=(out_t < rows)[:, None] & (offs_n < width)[None, :])


@gluon.jit(do_not_specialize=["tiles_at", "E", "slots", "num_m"])
def _many_rows_kernel(
    routing_ptr, tiles_at,  # order, (R,) pair of each sorted position; there (num_m, 3) group, first position and rows
    x_ptr, stride_xm,  # (R / slots, length) rows; in sorted order (R, length) if X_GROUPED
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # (E, N, K)
    y_ptr,  # (R, width)
    E, N, K, slots, num_m,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, SMALLER: gl.constexpr, OUT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    pid = gl.program_id(0)
    num_n = gl.cdiv(K if BY_ROW else N, OUT)
    per_group = GROUP * num_n
    first_m = pid // per_group * GROUP
    size = gl.minimum(num_m - first_m, GROUP)
    pid_m = first_m + pid % per_group % size
    pid_n = pid % per_group // size
    tile_ptr = routing_ptr + tiles_at + pid_m * 3
    expert = gl.load(tile_ptr)
    first = gl.load(tile_ptr + 1)
    rows = gl.load(tile_ptr + 2)
    if (expert >= 0) & (expert < E):
        if SMALLER == 3:
            if rows <= TOKENS // 4:
                _tile(
                    expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                    y_ptr, N, K, slots, X_GROUPED, Y_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                    TOKENS // 4, OUT, DEPTH, STAGES, WARPS,
                )  # fmt: skip
            elif rows <= TOKENS // 2:
                _tile(
                    expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                    y_ptr, N, K, slots, X_GROUPED, Y_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                    TOKENS // 2, OUT, DEPTH, STAGES, WARPS,
                )  # fmt: skip
            else:
                _tile(
                    expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                    y_ptr, N, K, slots, X_GROUPED, Y_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                    TOKENS, OUT, DEPTH, STAGES, WARPS,
                )  # fmt: skip
        elif SMALLER == 2:
            if rows <= TOKENS // 2:
                _tile(
                    expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                    y_ptr, N, K, slots, X_GROUPED, Y_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                    TOKENS // 2, OUT, DEPTH, STAGES, WARPS,
                )  # fmt: skip
            else:
                _tile(
                    expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                    y_ptr, N, K, slots, X_GROUPED, Y_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                    TOKENS, OUT, DEPTH, STAGES, WARPS,
                )  # fmt: skip
        else:
            _tile(
                expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm,
                packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                y_ptr, N, K, slots, X_GROUPED, Y_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                TOKENS, OUT, DEPTH, STAGES, WARPS,
            )  # fmt: skip
