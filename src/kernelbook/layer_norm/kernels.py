"""LayerNorm and RMSNorm over the last dimension, forward and backward.

Forward: a program holds BLOCK_M whole rows in registers, reads them once, and computes mean and variance from the
registers (no second pass over memory). A row that is larger than a tile is read twice: once for its statistics, merged
tile by tile, and once to be normalized, then mostly from the L2 cache. Both ways correct the mean by the mean of the
deviations from it, which rounding left (Chan, Golub and LeVeque 1983).

Backward, with xhat = (x - mean) * rstd and g = dy * weight::

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))     dweight = sum over rows of dy * xhat     dbias = sum of dy

The sums run over rows, so over programs. A fixed number of programs walks over the rows; each keeps its own sums in registers
and writes one row of partial sums at the end, which a second kernel adds up in a fixed order. (``study/layer_norm.py`` has
the other way: spin locks.)

RMSNorm (Zhang and Sennrich 2019) is the same without a mean: x is divided by the root of its mean square, and in the
backward pass mean and mean(g) are 0, which HAS_MEAN = False leaves out. It can add a residual to x before, and write the
sum; the sum's own gradient is then added to dx.

Bytes moved, with T the bytes of x: forward 2 T, backward 3 T, plus weight, bias and the partial sums (2 * programs * N
values of the accumulator's dtype, twice). With a residual 4 T and 4 T.

Not handled here: a dimension other than the last (the caller permutes), 2^31 or more rows or columns.
"""

import dataclasses

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
import triton
import triton.language as tl

# The widest row that one program keeps in registers, in bytes of the accumulator's dtype. Beyond it rows are looped over.
MAX_FORWARD_ROW_BYTES = 128 * 1024
FEW_TILES = 4
# Registers beside the tiles, for pointers, masks and counters: a little less than the compiler's, so that few bytes may spill.
BOOKKEEPING_REGISTERS = 70


# --- device helpers -------------------------------------------------------------------------------------------------


@triton.jit
def _load_vector(ptr, offs_n, mask_n, HAS: tl.constexpr, ACC: tl.constexpr, OTHER: tl.constexpr):
    """A (1, BLOCK_N) tile of weight or bias in the accumulator's dtype, or the constant OTHER where there is none."""
    if HAS:
        # A two-dimensional load: the tile then has the layout of x, and needs no exchange between threads.
        return tl.load(ptr + offs_n[None, :], mask=mask_n[None, :], other=0.0).to(ACC)
    return tl.full((1, offs_n.shape[0]), OTHER, ACC)


# --- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr, stride_xm,  # (M, N) input, rows contiguous
    res_ptr, stride_rm,  # (M, N) what is added to it first, rows contiguous, if HAS_RESIDUAL
    w_ptr,  # (N,) weight, contiguous, if HAS_WEIGHT
    b_ptr,  # (N,) bias, contiguous, if HAS_BIAS
    y_ptr, sum_ptr,  # (M, N) output and, if HAS_RESIDUAL, x + residual; contiguous
    stats_ptr,  # (2, M) mean and rstd for the backward pass, if HAS_STATISTICS; (M,) rstd unless HAS_MEAN
    M, N,
    EPS: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rows = offs_m.to(tl.int64)[:, None]
    # A row is NUM_BLOCKS tiles, which stay in registers as they were loaded.
    xs = ()
    for c in tl.static_range(NUM_BLOCKS):
        offs_n = c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mask = mask_m[:, None] & (offs_n < N)
        x = tl.load(x_ptr + rows * stride_xm + offs_n, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            # Rounded as it is written: the backward pass, which reads it back, differentiates this very function.
            added = tl.load(res_ptr + rows * stride_rm + offs_n, mask=mask, other=0.0)
            x = (x.to(ACC) + added.to(ACC)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + rows * N + offs_n, x, mask=mask)
        total = x.to(ACC) if c == 0 else total + x.to(ACC)  # noqa: F821
        xs = xs + (x,)
    # A mean that is the constant 0 leaves no trace in the compiled kernel.
    mean = (tl.sum(total, axis=1) / N)[:, None] if HAS_MEAN else 0.0
    # Centered before squaring: E[x^2] - E[x]^2 would cancel where the mean is large.
    for c in tl.static_range(NUM_BLOCKS):
        mask = mask_m[:, None] & (c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :] < N)
        centered = tl.where(mask, xs[c].to(ACC) - mean, 0.0)
        deviations = centered if c == 0 else deviations + centered  # noqa: F821
        squares = centered * centered if c == 0 else squares + centered * centered  # noqa: F821
    # What rounding took from the mean is the mean of the deviations: the corrected two-pass algorithm.
    shift = (tl.sum(deviations, axis=1) / N)[:, None] if HAS_MEAN else 0.0
    rstd = 1.0 / tl.sqrt((tl.sum(squares, axis=1) / N)[:, None] - shift * shift + EPS)
    for c in tl.static_range(NUM_BLOCKS):
        cols = c * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = cols < N
        # Loaded as late as possible: held from the start they take the registers of the programs that hide latency.
        w = _load_vector(w_ptr, cols, mask_n, HAS_WEIGHT, ACC, 1.0)  # (1, BLOCK_N)
        b = _load_vector(b_ptr, cols, mask_n, HAS_BIAS, ACC, 0.0)  # (1, BLOCK_N)
        # One tile stays centered; to hold several in the accumulator's dtype would take twice the registers.
        deviation = centered if NUM_BLOCKS == 1 else xs[c].to(ACC) - mean
        y = (deviation - shift) * rstd * w + b
        mask = mask_m[:, None] & mask_n[None, :]
        tl.store(y_ptr + rows * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if HAS_STATISTICS:
        if HAS_MEAN:
            tl.store(stats_ptr + rows, mean + shift, mask=mask_m[:, None])
        tl.store(stats_ptr + (M if HAS_MEAN else 0) + rows, rstd, mask=mask_m[:, None])


@triton.jit
def _layer_norm_fwd_looped_kernel(
    x_ptr, stride_xm,  # (M, N) input, rows contiguous
    res_ptr, stride_rm,  # (M, N) what is added to it first, rows contiguous, if HAS_RESIDUAL
    w_ptr,  # (N,) weight, contiguous, if HAS_WEIGHT
    b_ptr,  # (N,) bias, contiguous, if HAS_BIAS
    y_ptr, sum_ptr,  # (M, N) output and, if HAS_RESIDUAL, x + residual; contiguous
    stats_ptr,  # (2, M) mean and rstd for the backward pass, if HAS_STATISTICS; (M,) rstd unless HAS_MEAN
    M, N,
    EPS: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    mean = tl.zeros((), ACC)
    m2 = tl.zeros((), ACC)  # the sum of squared deviations from the mean so far
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        x = tl.load(x_ptr + offs_n, mask=mask_n, other=0.0)  # (BLOCK_N,)
        if HAS_RESIDUAL:
            added = tl.load(res_ptr + row * stride_rm + offs_n, mask=mask_n, other=0.0)
            x = (x.to(ACC) + added.to(ACC)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * N + offs_n, x, mask=mask_n)
        x = x.to(ACC)
        if HAS_MEAN:
            count = tl.minimum(BLOCK_N, N - start).to(ACC)
            tile_mean = tl.sum(x) / count
            centered = tl.where(mask_n, x - tile_mean, 0.0)
            shift = tl.sum(centered) / count
            delta = tile_mean + shift - mean
            share = count / (start + count)
            mean += delta * share
            m2 += tl.sum(centered * centered) - count * shift * shift + delta * delta * start * share
        else:
            m2 += tl.sum(x * x)
    rstd = 1.0 / tl.sqrt(m2 / N + EPS)
    if HAS_STATISTICS:
        if HAS_MEAN:
            tl.store(stats_ptr + row, mean)
        tl.store(stats_ptr + (M if HAS_MEAN else 0) + row, rstd)
    if HAS_RESIDUAL:
        # Threads may read what other threads of the program wrote.
        tl.debug_barrier()
        x_ptr = sum_ptr + row * N
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        x = tl.load(x_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)[None, :]  # (1, BLOCK_N)
        w = _load_vector(w_ptr, offs_n, mask_n, HAS_WEIGHT, ACC, 1.0)
        b = _load_vector(b_ptr, offs_n, mask_n, HAS_BIAS, ACC, 0.0)
        y = (x - mean) * rstd * w + b
        tl.store(y_ptr + row * N + offs_n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_n[None, :])


# --- backward, partial sums -----------------------------------------------------------------------------------------


@triton.jit
def _layer_norm_bwd_partials_kernel(
    x_ptr, stride_xm,  # (M, N) input, rows contiguous
    dy_ptr, stride_dym,  # (M, N) gradient of the output, rows contiguous
    w_ptr,  # (N,) weight, contiguous, if HAS_WEIGHT
    stats_ptr,  # (2, M) mean and rstd of the forward pass; (M,) rstd unless HAS_MEAN
    dx_ptr,  # (M, N) gradient of the input, contiguous
    dsum_ptr, stride_dsm,  # (M, N) what is added to it, rows contiguous, if HAS_DSUM
    dw_ptr, db_ptr,  # (num_programs(0), N) sums over this program's rows: the gradients themselves if it is the only one
    M, N,
    HAS_WEIGHT: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_DSUM: tl.constexpr,
    WITH_DW: tl.constexpr, WITH_DB: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    # A row is SPLIT shares of NUM_BLOCKS tiles each. The program keeps the sums of its own share; of the other shares
    # it needs the row sums only, and reads them from the L2 cache, where their owners put them at about the same time.
    first = pid_n * (NUM_BLOCKS * BLOCK_N) if SPLIT > 1 else 0
    dw = ()
    db = ()
    for _ in tl.static_range(NUM_BLOCKS):
        dw = dw + (tl.zeros((BLOCK_M, BLOCK_N), ACC),)
        db = db + (tl.zeros((BLOCK_M, BLOCK_N), ACC),)
    for tile in tl.range(pid_m, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        rows = offs_m.to(tl.int64)
        # A mean that is the constant 0 leaves no trace in the compiled kernel.
        mean = tl.load(stats_ptr + rows, mask=mask_m, other=0.0)[:, None] if HAS_MEAN else 0.0
        rstd = tl.load(stats_ptr + (M if HAS_MEAN else 0) + rows, mask=mask_m, other=0.0)[:, None]
        x_rows = x_ptr + rows[:, None] * stride_xm
        dy_rows = dy_ptr + rows[:, None] * stride_dym
        dx_rows = dx_ptr + rows[:, None] * N
        # Tiles until the end of the row, so that there is one reduction across threads for each of the two sums.
        sum_g = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        sum_gx = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        xs = ()
        dys = ()
        for c in tl.static_range(NUM_BLOCKS * SPLIT):
            # The program's own share first, then the others in turn.
            start = (first + c * BLOCK_N) % (NUM_BLOCKS * SPLIT * BLOCK_N)
            offs_n = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            mask = mask_m[:, None] & mask_n[None, :]
            x = tl.load(x_rows + offs_n[None, :], mask=mask, other=0.0)
            dy = tl.load(dy_rows + offs_n[None, :], mask=mask, other=0.0)
            w = _load_vector(w_ptr, offs_n, mask_n, HAS_WEIGHT, ACC, 1.0)
            g = dy.to(ACC) * w
            # Beyond the row's end g is 0, so that the tile adds nothing.
            sum_g += g
            sum_gx += g * ((x.to(ACC) - mean) * rstd)
            if c < NUM_BLOCKS:
                xs = xs + (x,)
                dys = dys + (dy,)
        mean_g = (tl.sum(sum_g, axis=1) / N)[:, None] if HAS_MEAN else 0.0
        mean_gx = (tl.sum(sum_gx, axis=1) / N)[:, None]
        new_dw = ()
        new_db = ()
        for c in tl.static_range(NUM_BLOCKS):
            offs_n = first + c * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            w = _load_vector(w_ptr, offs_n, mask_n, HAS_WEIGHT, ACC, 1.0)
            dy = dys[c].to(ACC)
            xhat = (xs[c].to(ACC) - mean) * rstd
            dx = rstd * (dy * w - mean_g - xhat * mean_gx)
            mask = mask_m[:, None] & mask_n[None, :]
            if HAS_DSUM:
                dsum_rows = dsum_ptr + rows[:, None] * stride_dsm
                dx += tl.load(dsum_rows + offs_n[None, :], mask=mask, other=0.0).to(ACC)
            tl.store(dx_rows + offs_n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            # Rows beyond M have dy = 0.
            new_dw = new_dw + (dw[c] + dy * xhat,)
            new_db = new_db + (db[c] + dy,)
        dw = new_dw
        db = new_db
    for c in tl.static_range(NUM_BLOCKS):
        offs_n = first + c * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        offs = pid_m.to(tl.int64) * N + offs_n
        if WITH_DW:
            tl.store(dw_ptr + offs, tl.sum(dw[c], axis=0).to(dw_ptr.dtype.element_ty), mask=mask_n)
        if WITH_DB:
            tl.store(db_ptr + offs, tl.sum(db[c], axis=0).to(db_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def _layer_norm_bwd_partials_looped_kernel(
    x_ptr, stride_xm,  # (M, N) input, rows contiguous
    dy_ptr, stride_dym,  # (M, N) gradient of the output, rows contiguous
    w_ptr,  # (N,) weight, contiguous, if HAS_WEIGHT
    stats_ptr,  # (2, M) mean and rstd of the forward pass; (M,) rstd unless HAS_MEAN
    dx_ptr,  # (M, N) gradient of the input, contiguous
    dsum_ptr, stride_dsm,  # (M, N) what is added to it, rows contiguous, if HAS_DSUM
    dw_ptr, db_ptr,  # (num_programs(0), N) sums over this program's rows
    M, N,
    HAS_WEIGHT: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_DSUM: tl.constexpr,
    WITH_DW: tl.constexpr, WITH_DB: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # The sums do not fit into registers: they stay in this program's row of the partial buffers, which nobody else
    # touches. BLOCK_M rows share one trip to them.
    for tile in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        rows = offs_m.to(tl.int64)
        # A mean that is the constant 0 leaves no trace in the compiled kernel.
        mean = tl.load(stats_ptr + rows, mask=mask_m, other=0.0)[:, None] if HAS_MEAN else 0.0
        rstd = tl.load(stats_ptr + (M if HAS_MEAN else 0) + rows, mask=mask_m, other=0.0)[:, None]
        x_rows = x_ptr + rows[:, None] * stride_xm
        dy_rows = dy_ptr + rows[:, None] * stride_dym
        dx_rows = dx_ptr + rows[:, None] * N
        sum_g = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        sum_gx = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        for start in range(0, N, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            mask = mask_m[:, None] & mask_n[None, :]
            x = tl.load(x_rows + offs_n[None, :], mask=mask, other=0.0).to(ACC)
            dy = tl.load(dy_rows + offs_n[None, :], mask=mask, other=0.0).to(ACC)
            g = dy * _load_vector(w_ptr, offs_n, mask_n, HAS_WEIGHT, ACC, 1.0)
            sum_g += g
            sum_gx += g * ((x - mean) * rstd)
        mean_g = (tl.sum(sum_g, axis=1) / N)[:, None] if HAS_MEAN else 0.0
        mean_gx = (tl.sum(sum_gx, axis=1) / N)[:, None]
        for start in range(0, N, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            mask = mask_m[:, None] & mask_n[None, :]
            x = tl.load(x_rows + offs_n[None, :], mask=mask, other=0.0).to(ACC)
            dy = tl.load(dy_rows + offs_n[None, :], mask=mask, other=0.0).to(ACC)
            w = _load_vector(w_ptr, offs_n, mask_n, HAS_WEIGHT, ACC, 1.0)
            xhat = (x - mean) * rstd
            dx = rstd * (dy * w - mean_g - xhat * mean_gx)
            if HAS_DSUM:
                dsum_rows = dsum_ptr + rows[:, None] * stride_dsm
                dx += tl.load(dsum_rows + offs_n[None, :], mask=mask, other=0.0).to(ACC)
            tl.store(dx_rows + offs_n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            offs = pid.to(tl.int64) * N + offs_n
            mask_old = mask_n & (tile != pid)  # the first time there is nothing to add to
            if WITH_DW:
                old = tl.load(dw_ptr + offs, mask=mask_old, other=0.0)
                tl.store(dw_ptr + offs, old + tl.sum(dy * xhat, axis=0), mask=mask_n)
            if WITH_DB:
                old = tl.load(db_ptr + offs, mask=mask_old, other=0.0)
                tl.store(db_ptr + offs, old + tl.sum(dy, axis=0), mask=mask_n)


@triton.jit
def _layer_norm_bwd_sum_kernel(
    partial_dw_ptr, partial_db_ptr,  # (G, N) partial sums
    dw_ptr, db_ptr,  # (N,) gradients of weight and bias
    G, N,
    WITH_DW: tl.constexpr, WITH_DB: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the rows of one buffer: with both wanted, programs (..., 0) dw's and (..., 1) db's."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    partial_ptr = partial_dw_ptr if WITH_DW else partial_db_ptr
    if WITH_DW and WITH_DB and tl.program_id(1) == 1:
        partial_ptr = partial_db_ptr
    acc = tl.zeros((BLOCK_G, BLOCK_N), ACC)
    for start in range(0, G, BLOCK_G):
        offs_g = start + tl.arange(0, BLOCK_G)
        mask = (offs_g < G)[:, None] & mask_n[None, :]
        acc += tl.load(partial_ptr + offs_g.to(tl.int64)[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, axis=0)
    if WITH_DW and (not WITH_DB or tl.program_id(1) == 0):
        tl.store(dw_ptr + offs_n, total.to(dw_ptr.dtype.element_ty), mask=mask_n)
    elif WITH_DB:
        tl.store(db_ptr + offs_n, total.to(db_ptr.dtype.element_ty), mask=mask_n)


# --- configurations -------------------------------------------------------------------------------------------------


# The sum over the partial buffers: few columns a program, so that there are enough programs.
SUM_CONFIG = triton.Config({"BLOCK_G": 64, "BLOCK_N": 16}, num_warps=4)


def plan_forward(n: int, itemsize: int, properties: runtime.DeviceProperties) -> triton.Config | None:
    """Return the tiles for rows of ``n`` elements of ``itemsize`` bytes, or ``None`` where a row is too large for registers.

    One tile: two rows or 2,048 elements, whichever is more, and 32 elements a thread: loads enough in flight, and registers
    few enough for several programs on a multiprocessor, which hide each other's latency. A long row that leaves a quarter of
    the threads or more without work, or that is longer than 12,288 elements, is cut into tiles of 8 elements a thread instead.
    """
    width = max(triton.next_power_of_2(n), 16)
    if width * max(itemsize, 4) > MAX_FORWARD_ROW_BYTES:
        return None
    if n > 12288 or (n > 4096 and 4 * n <= 3 * width):
        block = 1024 if n <= 8192 else 2048
        tiles = {"BLOCK_M": 1, "BLOCK_N": block, "NUM_BLOCKS": triton.cdiv(n, block)}
        return triton.Config(tiles, num_warps=block // 256)
    rows = 1 if width >= 8192 else max(2, 2048 // width)
    return triton.Config({"BLOCK_M": rows, "BLOCK_N": width, "NUM_BLOCKS": 1}, num_warps=min(32, rows * width // 1024))


def looped_config(itemsize: int) -> triton.Config:
    """Return the tile of a row that is looped over: 16 bytes a thread and load, two loads in flight."""
    return triton.Config({"BLOCK_N": 16384 // max(itemsize, 4)}, num_warps=8)


def backward_resources(config: triton.Config, itemsize: int, sums: int = 2, added: bool = False) -> tuple[int, float]:
    """Return a program's bytes of shared memory, and how many registers a thread takes.

    The sums, x and dy of a program's share stay in registers; the pipeline stages x and dy of the whole row. The compiler
    gives a tile that is used twice one buffer more for each stage than one that is used once. What is ``added`` to dx is
    staged for the program's share.
    """
    tile = config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"]
    share, row = tile * config.kwargs["NUM_BLOCKS"], tile * config.kwargs["NUM_BLOCKS"] * config.kwargs["SPLIT"]
    accumulator = max(itemsize, 4)
    stages = config.kwargs["STAGES"] - 1
    staged = stages * itemsize * (4 * row + added * share - tile * config.kwargs["SPLIT"] ** 2)
    held = sums * (share + tile) * accumulator + 2 * share * itemsize
    return staged or tile * accumulator, BOOKKEEPING_REGISTERS + held / 4 / (32 * config.num_warps)


def _fits(config: triton.Config, needs: tuple[int, float], properties: runtime.DeviceProperties) -> bool:
    """Return whether a program fits the GPU without spilling, as far as :func:`backward_resources` can tell."""
    (shared_bytes, registers), threads = needs, properties.warp_size * config.num_warps
    fits = shared_bytes <= properties.shared_memory_per_program
    return fits and registers <= min(255, properties.registers_per_sm // threads)


def _backward_config(
    n: int, itemsize: int, aligned: bool, sums: int, added: bool, properties: runtime.DeviceProperties
) -> triton.Config | None:
    """Return the tiles for rows of ``n`` elements that fit the GPU, or ``None`` where a row has to be looped over.

    A thread loads 8 elements of a tile, 16 bytes in the 16-bit dtypes, and a row is as many tiles as it needs. Four
    warps (in float32 eight, for the registers) and two programs on a multiprocessor for short rows, eight warps and the
    whole multiprocessor for long ones; two programs, or three, share a row whose sums one cannot hold. Rows that are not
    ``aligned`` to 16 elements are loaded one element at a time, with a pointer for each: that leaves registers for half
    as many.
    """
    width = max(triton.next_power_of_2(n), 16)
    shapes: list[tuple[int, int, int, int, int]] = []  # rows, columns, tiles side by side, programs a row, warps
    if n <= 1024:
        shapes = [(4096 // width, width, 1, 1, 4 if aligned and itemsize < 4 else 8)]
    elif n <= 2048:
        shapes = [(2, 1024, 2, 1, 4) if aligned else (1, 1024, 2, 1, 4)]
    elif not aligned:
        shapes = [(1, 2048, 2, 1, 8)] if n <= 4096 else []
    elif n == 4096:
        shapes = [(1, 4096, 1, 1, 8)]
    elif n <= 6144:
        shapes = [(1, 1024, triton.cdiv(n, 1024), 1, 4)]
    else:
        shapes = [(1, 2048, triton.cdiv(n, 2048), 1, 8)] if n <= 18432 else []
        if n <= 24576 - 4096 * sums:
            shapes.append((1, 2048, triton.cdiv(n, 4096), 2, 8))
        elif n <= 18432 and itemsize == 2:
            shapes.append((1, 2048, triton.cdiv(n, 6144), 3, 8))
    # Beside two sums a longer row leaves no room to load the next one meanwhile.
    stages_of = (3, 2, 1) if n <= 24576 - 4096 * sums else (1,)
    configs = [
        triton.Config(
            {"BLOCK_M": rows, "BLOCK_N": block, "NUM_BLOCKS": blocks, "SPLIT": split, "STAGES": stages}, num_warps=warps
        )
        for rows, block, blocks, split, warps in shapes
        for stages in stages_of
    ]
    fitting = (c for c in configs if _fits(c, backward_resources(c, itemsize, sums, added), properties))
    return next(fitting, None) if itemsize <= 4 else None


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The tiles of the backward pass, and how many programs of it a multiprocessor gets."""

    config: triton.Config
    per_sm: int


def plan_backward(
    n: int, itemsize: int, aligned: bool, sums: int, added: bool, properties: runtime.DeviceProperties
) -> BackwardPlan:
    """Return how the gradients of rows of ``n`` elements are computed; without ``NUM_BLOCKS`` and ``SPLIT`` a row is looped over.

    ``sums`` is how many sums over the rows there are: two of LayerNorm, one of RMSNorm. ``added``: whether the gradient of
    the sum with a residual is added to dx. As many programs as run at the same time, so that none waits.
    """
    config = _backward_config(n, itemsize, aligned, sums, added, properties)
    if config is None:
        # Warps side by side along the row, 8 elements a thread in the 16-bit dtypes, so that sums over rows stay in a
        # thread.
        return BackwardPlan(triton.Config({"BLOCK_M": 4, "BLOCK_N": 8192 // max(itemsize, 4)}, num_warps=8), 1)
    share = config.kwargs["BLOCK_N"] * config.kwargs["NUM_BLOCKS"]
    if config.num_warps == 4:
        return BackwardPlan(config, 3 if share == 3072 else 2)
    return BackwardPlan(config, 2 if share == 4096 or (aligned and n <= 1024) else 1)


def backward_programs(m: int, plan: BackwardPlan, properties: runtime.DeviceProperties) -> int:
    """Return how many programs walk over the ``m`` rows: one for a few, which can then write the sums itself."""
    tiles = -(-m // plan.config.kwargs["BLOCK_M"])
    if tiles <= FEW_TILES:
        return 1
    return max(1, min(tiles, properties.num_sms * plan.per_sm // plan.config.kwargs.get("SPLIT", 1)))
