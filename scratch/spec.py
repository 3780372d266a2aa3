"""Trial: tiles decoded by one warpgroup for two that multiply."""
import kernelbook  # noqa: F401

# isort: split
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernelbook.packed.kernels_hopper import _decode, _no_tile, _scale, _stored_scale
from kernelbook.tiles import grouped


@gluon.jit
def _which(t, routing_ptr, tiles_at, num_m, num_n, GROUP: gl.constexpr):
    pid_m, pid_n = grouped(t, num_m, num_n, GROUP)
    tile_ptr = routing_ptr + tiles_at + pid_m * 3
    return gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), pid_n


@gluon.jit
def _load(word_ptrs, at, offs_r, offs_c, N, K, within, block0, absmax_ptr, nested_absmax_ptr,
          row_of_step: gl.constexpr, col_of_step: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr):
    inside = (offs_r + at * row_of_step < N) & (offs_c + at * col_of_step < K)
    words = gl.load(word_ptrs + at * ((row_of_step * K + col_of_step) // 8), mask=gl.expand_dims(inside, 2), other=0)
    blocks = (within + (offs_r + at * row_of_step) * K + offs_c + at * col_of_step) // BLOCK_SIZE
    stored, nested = _stored_scale(block0, blocks, inside, absmax_ptr, nested_absmax_ptr, SCALE, NESTED_BLOCK)
    return words, stored, nested


@gluon.jit
def _produce(
    w_smem, x_smem, w_full, x_full, free,
    routing_ptr, tiles_at, x_ptr, stride_xm, packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
    E, N, K, slots, num_m,
    X_GROUPED: gl.constexpr, BY_ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, OUT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr, FENCE: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = DEPTH if BY_ROW else OUT
    COLS: gl.constexpr = OUT if BY_ROW else DEPTH
    EACH: gl.constexpr = ROWS * COLS // (32 * WARPS)
    RUN: gl.constexpr = min(EACH, 64, BLOCK_SIZE)
    WORDS: gl.constexpr = RUN // 8
    ACROSS: gl.constexpr = min(COLS // EACH, 8)
    words_layout: gl.constexpr = gl.BlockedLayout([1, EACH // RUN, WORDS], [32 // ACROSS, ACROSS, 1], [WARPS, 1, 1], [2, 1, 0])
    runs: gl.constexpr = gl.SliceLayout(2, words_layout)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DEPTH, DEPTH // 8], [WARPS, 1], [1, 0])
    PART: gl.constexpr = TOKENS // 4
    row_of_step: gl.constexpr = DEPTH if BY_ROW else 0
    col_of_step: gl.constexpr = 0 if BY_ROW else DEPTH
    length = N if BY_ROW else K
    width = K if BY_ROW else N
    steps = gl.cdiv(length, DEPTH)
    num_n = gl.cdiv(width, OUT)
    code = ()
    for c in gl.static_range(16):
        code += (gl.load(code_ptr + c),)
    offset = 0.0
    if SCALE != "float32":
        offset = gl.load(nested_offset_ptr)
    before = 0
    for t in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        expert, first, rows, pid_n = _which(t, routing_ptr, tiles_at, num_m, num_n, GROUP)
        if (expert >= 0) & (expert < E):
            n0 = pid_n * OUT
            offs_t = gl.arange(0, PART, layout=gl.SliceLayout(1, x_layout))
            offs_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, x_layout))
            x_ptrs = ()
            for p in gl.static_range(4):
                positions = first + gl.minimum(offs_t + p * PART, rows - 1)
                x_rows = positions if X_GROUPED else gl.load(routing_ptr + positions) // slots
                x_ptrs += (x_ptr + (x_rows.to(gl.int64) * stride_xm)[:, None] + offs_k[None, :],)
            element0 = expert.to(gl.int64) * N * K
            block0 = element0 // BLOCK_SIZE
            within = (element0 - block0 * BLOCK_SIZE).to(gl.int32)
            offs_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, runs))[:, None]
            offs_c = gl.arange(0, COLS // RUN, layout=gl.SliceLayout(0, runs))[None, :] * RUN
            if BY_ROW:
                offs_c += n0
            else:
                offs_r += n0
            offs_i = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))
            word_offs = gl.expand_dims((offs_r * K + offs_c) // 8, 2) + offs_i[None, None, :]
            word_offs = gl.max_contiguous(gl.multiple_of(word_offs, [1, 1, WORDS]), [1, 1, WORDS])
            word_ptrs = packed_ptr + element0 // 8 + word_offs
            words0, stored0, nested0 = _load(word_ptrs, 0, offs_r, offs_c, N, K, within, block0, absmax_ptr, nested_absmax_ptr, row_of_step, col_of_step, BLOCK_SIZE, SCALE, NESTED_BLOCK)
            words1, stored1, nested1 = _load(word_ptrs, 1, offs_r, offs_c, N, K, within, block0, absmax_ptr, nested_absmax_ptr, row_of_step, col_of_step, BLOCK_SIZE, SCALE, NESTED_BLOCK)
            for i in range(steps):
                words2, stored2, nested2 = _load(word_ptrs, i + 2, offs_r, offs_c, N, K, within, block0, absmax_ptr, nested_absmax_ptr, row_of_step, col_of_step, BLOCK_SIZE, SCALE, NESTED_BLOCK)
                at = before + i
                slot = at % STAGES
                mbarrier.wait(free.index(slot), ((at // STAGES) & 1) ^ 1)
                x_tile = x_smem.index(slot)
                mask = (offs_k + i * DEPTH < length)[None, :] & (offs_t < PART)[:, None]
                for j in gl.static_range(4):
                    if j < 2:
                        async_copy.async_copy_global_to_shared(x_tile.slice(j * PART, PART), x_ptrs[j] + i * DEPTH, mask=mask)
                    else:
                        if rows > j * PART:
                            async_copy.async_copy_global_to_shared(x_tile.slice(j * PART, PART), x_ptrs[j] + i * DEPTH, mask=mask)
                async_copy.mbarrier_arrive(x_full.index(slot), increment_count=False)
                scale = _scale((stored0, nested0), nested_code_ptr, offset, SCALE)
                _decode(words0, scale, code, w_smem.index(slot), dtype, ROWS, COLS)
                if FENCE % 2 == 1:
                    fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(w_full.index(slot), count=1)
                words0 = words1
                stored0 = stored1
                nested0 = nested1
                words1 = words2
                stored1 = stored2
                nested1 = nested2
            before += steps


@gluon.jit
def _finish(acc, first, rows, n0, order_ptr, y_ptr, width, Y_GROUPED: gl.constexpr, y_layout: gl.constexpr):
    OUT: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    y = gl.convert_layout(gl.permute(acc.to(y_ptr.dtype.element_ty), (1, 0)), y_layout)
    out_t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, y_layout))
    positions = first + gl.minimum(out_t, rows - 1)
    y_rows = positions if Y_GROUPED else gl.load(order_ptr + positions)
    offs_n = n0 + gl.arange(0, OUT, layout=gl.SliceLayout(0, y_layout))
    y_ptrs = y_ptr + (y_rows.to(gl.int64) * width)[:, None] + offs_n[None, :]
    gl.store(y_ptrs, y, mask=(out_t < rows)[:, None] & (offs_n < width)[None, :])


@gluon.jit
def _multiply(
    w_smem, x_smem, w_full, x_full, free, before, steps, first, rows, n0, order_ptr, y_ptr, width,
    W: gl.constexpr, BY_ROW: gl.constexpr, Y_GROUPED: gl.constexpr, TOKENS: gl.constexpr, EXTRA: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    mma2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(EXTRA, 8), 16])
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HALF, HALF // 8], [4, 1], [1, 0])
    acc = gl.zeros((HALF, TOKENS), gl.float32, layout=mma)
    if EXTRA > 0:
        acc2 = gl.zeros((HALF, EXTRA), gl.float32, layout=mma2)
    for i in range(steps):
        at = before + i
        slot = at % STAGES
        phase = (at // STAGES) & 1
        mbarrier.wait(x_full.index(slot), phase)
        mbarrier.wait(w_full.index(slot), phase)
        if FENCE // 2 == 1:
            fence_async_shared()
        w = w_smem.index(slot)
        if BY_ROW:
            w = w.slice(W * HALF, HALF, 1).permute((1, 0))
        else:
            w = w.slice(W * HALF, HALF, 0)
        x = x_smem.index(slot)
        token = warpgroup_mma(w, x.slice(0, TOKENS).permute((1, 0)), acc, is_async=True)
        if EXTRA > 0:
            token2 = warpgroup_mma(w, x.slice(TOKENS, EXTRA).permute((1, 0)), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(2, deps=[token, token2])
        else:
            acc = warpgroup_mma_wait(1, deps=[token])
        if i > 0:
            mbarrier.arrive(free.index((at - 1) % STAGES), count=1)
    if EXTRA > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((before + steps - 1) % STAGES), count=1)
    _finish(acc, first, rows, n0, order_ptr, y_ptr, width, Y_GROUPED, y_layout)
    if EXTRA > 0:
        _finish(acc2, first + TOKENS, rows - TOKENS, n0, order_ptr, y_ptr, width, Y_GROUPED, y_layout)


@gluon.jit
def _consume(
    w_smem, x_smem, w_full, x_full, free, routing_ptr, tiles_at, y_ptr, E, N, K, num_m,
    W: gl.constexpr, BY_ROW: gl.constexpr, Y_GROUPED: gl.constexpr, TOKENS: gl.constexpr, OUT: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, FENCE: gl.constexpr,
):
    HALF: gl.constexpr = OUT // 2
    length = N if BY_ROW else K
    width = K if BY_ROW else N
    steps = gl.cdiv(length, DEPTH)
    num_n = gl.cdiv(width, OUT)
    before = 0
    for t in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        expert, first, rows, pid_n = _which(t, routing_ptr, tiles_at, num_m, num_n, GROUP)
        if expert == E:
            _no_tile(first, rows, pid_n * 2 + W, routing_ptr, y_ptr, width, Y_GROUPED, TOKENS, HALF, 4)
        elif expert >= 0:
            n0 = pid_n * OUT + W * HALF
            if rows <= TOKENS // 2:
                _multiply(w_smem, x_smem, w_full, x_full, free, before, steps, first, rows, n0, routing_ptr, y_ptr, width,
                          W, BY_ROW, Y_GROUPED, TOKENS // 2, 0, HALF, STAGES, FENCE)
            elif rows <= TOKENS // 4 * 3:
                _multiply(w_smem, x_smem, w_full, x_full, free, before, steps, first, rows, n0, routing_ptr, y_ptr, width,
                          W, BY_ROW, Y_GROUPED, TOKENS // 2, TOKENS // 4, HALF, STAGES, FENCE)
            else:
                _multiply(w_smem, x_smem, w_full, x_full, free, before, steps, first, rows, n0, routing_ptr, y_ptr, width,
                          W, BY_ROW, Y_GROUPED, TOKENS, 0, HALF, STAGES, FENCE)
            before += steps


@gluon.jit(do_not_specialize=["tiles_at", "E", "slots", "num_m"])
def _spec_kernel(
    routing_ptr, tiles_at, x_ptr, stride_xm,
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr, y_ptr, E, N, K, slots, num_m,
    X_GROUPED: gl.constexpr, Y_GROUPED: gl.constexpr, BY_ROW: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCALE: gl.constexpr, NESTED_BLOCK: gl.constexpr,
    TOKENS: gl.constexpr, OUT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
    REGS: gl.constexpr, REGS_P: gl.constexpr, FENCE: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = DEPTH if BY_ROW else OUT
    COLS: gl.constexpr = OUT if BY_ROW else DEPTH
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLS], gl.NVMMASharedLayout(128, 16, 2))
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(w_full.index(s), count=1)
        mbarrier.init(x_full.index(s), count=32 * WARPS)
        mbarrier.init(free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (w_smem, x_smem, w_full, x_full, free, routing_ptr, tiles_at, y_ptr, E, N, K, num_m,
                        0, BY_ROW, Y_GROUPED, TOKENS, OUT, DEPTH, STAGES, GROUP, FENCE)),
            (_consume, (w_smem, x_smem, w_full, x_full, free, routing_ptr, tiles_at, y_ptr, E, N, K, num_m,
                        1, BY_ROW, Y_GROUPED, TOKENS, OUT, DEPTH, STAGES, GROUP, FENCE)),
            (_produce, (w_smem, x_smem, w_full, x_full, free, routing_ptr, tiles_at, x_ptr, stride_xm,
                        packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,
                        E, N, K, slots, num_m, X_GROUPED, BY_ROW, BLOCK_SIZE, SCALE, NESTED_BLOCK,
                        TOKENS, OUT, DEPTH, STAGES, WARPS, GROUP, FENCE)),
        ],
        [4, WARPS],
        [REGS, REGS_P],
    )
