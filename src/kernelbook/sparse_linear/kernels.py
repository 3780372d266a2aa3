"""A linear layer of whose output features only some chunks are active: forward, and the gradients of weight, bias, input.

The features are cut into chunks of CHUNK; ``ids`` names the A active ones. Position ``pos`` of the active features is
feature ``ids[pos // CHUNK] * CHUNK + pos % CHUNK``. With that, every product here is an ordinary tiled one over A * CHUNK
features whose operands are read in place, where they lie in the full tensors:

    dW tile (BLOCK_R active features, BLOCK_D inputs)   reduces over the rows of x and dY
    dX tile (BLOCK_R rows, BLOCK_D inputs)              reduces over the active features
    Y tile  (BLOCK_R rows, BLOCK_D active features)     reduces over the inputs

Backward is one launch: tiles of dW, tiles of dX, and programs that write the zeros of inactive chunks of dW. The longer
tiles come first, so that the shorter ones fill the multiprocessors that would idle at the end; the zeros are strewn among
them, so that memory writes run beside the arithmetic. db is the sum over dY of those dW tiles that read it first.

Where tensor cores cannot read the operands as they lie (float32), and where a large problem would be read by narrow loads or
chunks do not fit the boxes of tensor descriptors, the active features are copied together (``_sparse_linear_pack_kernel``),
multiplied by cuBLAS and put in place (``_sparse_linear_place_kernel``).

Operations: 2 M d_in A CHUNK for each product. Bytes: x, the active columns of dY and rows of W once, dX and dW once.

A chunk id outside the tensor stands for a chunk of zeros: nothing is read or written for it. Not handled: ids that come
twice (the two write the same rows of dW).
"""

import dataclasses
import math

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.tiles import grouped

# isort: split
import triton
import triton.language as tl

BLOCK_A = tl.constexpr(256)  # ids looked at in a step
BLOCK_ZERO = tl.constexpr(8192)  # zeros written in a step

# --- device helpers -------------------------------------------------------------------------------------------------


@triton.jit
def _features(ids_ptr, pos, A, d_out, CHUNK: tl.constexpr):
    """Find the features (int64) at active positions ``pos``; at least d_out where there is none."""
    slot = pos // CHUNK
    chunk = tl.load(ids_ptr + slot, mask=slot < A, other=-1).to(tl.int64)
    num_chunks = tl.cdiv(d_out, CHUNK)
    chunk = tl.where((chunk >= 0) & (chunk < num_chunks), chunk, num_chunks)
    # So many neighbours come from one chunk: loads of theirs can be wide.
    ALIGN: tl.constexpr = 64 if CHUNK % 64 == 0 else CHUNK & -CHUNK
    return tl.max_contiguous(tl.multiple_of(chunk * CHUNK + pos % CHUNK, ALIGN), ALIGN)


@triton.jit
def _slot_of(ids_ptr, chunk, A):
    """Find where ``ids`` has ``chunk``, or -1."""
    found = tl.full((BLOCK_A,), -1, tl.int32)
    for start in range(A):
        offs = start + tl.arange(0, BLOCK_A)
        ids = tl.load(ids_ptr + offs, mask=offs < A, other=-1)
        found = tl.maximum(found, tl.where(ids == chunk, offs, -1))
    return tl.max(found, axis=0)


# --- backward -------------------------------------------------------------------------------------------------------
# What changes with the number of active chunks is not specialized on: a new set should not compile a kernel anew.


@triton.jit
def _dw_products(
    x_ptrs, step_x, mask_d, x_desc, offset_d,
    dy_ptrs, step_dy, mask_n, dy_desc, columns,
    low, high,
    WITH_DB: tl.constexpr, ACC: tl.constexpr, EVEN_M: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over the rows [low, high): for each of ``columns`` dy^T x (ROWS, BLOCK_D), and dy^T 1 (ROWS,).

    By descriptors each of ``columns`` is the first feature of a box; by pointers there is one, which nobody looks at.
    """
    accs = ()
    sums = ()
    for _ in tl.static_range(len(columns)):
        accs = accs + (tl.zeros((ROWS, BLOCK_D), ACC),)
        sums = sums + (tl.zeros((ROWS, 16), ACC),)
    # dy is summed by the tensor cores too. A tile that the loop's pipeline copies to shared memory, for them and for
    # registers, comes out wrong now and then: with triton 3.6 on an H200 the next copy may overtake a tensor core.
    sixteenths = tl.full((BLOCK_K, 16), 1 / 16, dy_ptrs.dtype.element_ty)
    for k in range(low, high, BLOCK_K):
        mask_k = k + tl.arange(0, BLOCK_K) < high
        if x_desc is not None:
            x = x_desc.load([k, offset_d])  # (BLOCK_K, BLOCK_D)
        elif EVEN_M:
            x = tl.load(x_ptrs, mask=mask_d[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=mask_k[:, None] & mask_d[None, :], other=0.0)
        new_accs = ()
        new_sums = ()
        for j in tl.static_range(len(columns)):
            if x_desc is not None:
                dy = dy_desc.load([k, columns[j]])  # (BLOCK_K, ROWS)
            elif EVEN_M:
                dy = tl.load(dy_ptrs, mask=mask_n[None, :], other=0.0)
            else:
                dy = tl.load(dy_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
            # Both lie with the reduction in their slow dimension; tensor cores read 16-bit tiles either way round.
            new_accs = new_accs + (tl.dot(tl.trans(dy), x, accs[j], input_precision="ieee", out_dtype=ACC),)
            if WITH_DB:
                of_dy = tl.dot(tl.trans(dy), sixteenths, sums[j], input_precision="ieee", out_dtype=ACC)
                new_sums = new_sums + (of_dy,)
            else:
                new_sums = new_sums + (sums[j],)
        accs = new_accs
        sums = new_sums
        x_ptrs += step_x
        dy_ptrs += step_dy
    totals = ()
    for j in tl.static_range(len(columns)):
        totals = totals + (tl.sum(sums[j], axis=1),)
    return accs, totals


@triton.jit
def _dw_tile(
    tile, ids_ptr,
    x_ptr, stride_xm, stride_xk, x_desc,
    dy_ptr, stride_dym, stride_dyn, dy_desc,
    dw_ptr, db_ptr,
    M, d_in, d_out, A,
    CHUNK: tl.constexpr, DY_COMPACT: tl.constexpr, DW_COMPACT: tl.constexpr, SPLIT: tl.constexpr, EVEN_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dW by pointers, or by descriptors in boxes of ROWS features, each of which lies in one chunk."""
    ACC: tl.constexpr = tl.float64 if dy_ptr.dtype.element_ty == tl.float64 else tl.float32
    ROWS: tl.constexpr = BLOCK_R if dy_desc is None else dy_desc.block_shape[1]
    tl.static_assert(dy_desc is None or CHUNK % ROWS == 0, "a box lies in one chunk")
    num_r, num_d = tl.cdiv(A * CHUNK, BLOCK_R), tl.cdiv(d_in, BLOCK_D)
    share = tile // (num_r * num_d)
    pid_r, pid_d = grouped(tile % (num_r * num_d), num_r, num_d, GROUP)
    num_chunks = tl.cdiv(d_out, CHUNK)
    columns = ()
    features = ()
    for j in tl.static_range(BLOCK_R // ROWS):
        first = pid_r * BLOCK_R + j * ROWS
        if dy_desc is not None:
            chunk = tl.load(ids_ptr + first // CHUNK, mask=first // CHUNK < A, other=-1)
            # Beyond the tensor a descriptor reads zeros.
            chunk = tl.where((chunk >= 0) & (chunk < num_chunks), chunk, num_chunks).to(tl.int32)
            columns = columns + (chunk * CHUNK + first % CHUNK,)
            features = features + (columns[j].to(tl.int64) + tl.arange(0, ROWS),)
        else:
            columns = columns + (first,)
            features = features + (_features(ids_ptr, first + tl.arange(0, ROWS), A, d_out, CHUNK),)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < d_in
    per_share = tl.cdiv(tl.cdiv(M, BLOCK_K), SPLIT) * BLOCK_K
    low = share * per_share
    high = tl.minimum(low + per_share, M)
    offs_k = (low + tl.arange(0, BLOCK_K)).to(tl.int64)
    pos = pid_r * BLOCK_R + tl.arange(0, ROWS)
    read = pos.to(tl.int64) if DY_COMPACT else features[0]
    dy_rows, x_rows = dy_ptr + offs_k * stride_dym, x_ptr + offs_k * stride_xm
    dy_ptrs = dy_rows[:, None] + read[None, :] * stride_dyn
    x_ptrs = x_rows[:, None] + offs_d.to(tl.int64)[None, :] * stride_xk
    step_dy = tl.full((), BLOCK_K, tl.int64) * stride_dym
    step_x = tl.full((), BLOCK_K, tl.int64) * stride_xm
    mask_n = features[0] < d_out
    if db_ptr is not None and pid_d == 0:
        accs, sums = _dw_products(
            x_ptrs, step_x, mask_d, x_desc, pid_d * BLOCK_D, dy_ptrs, step_dy, mask_n, dy_desc, columns, low, high,
            True, ACC, EVEN_M, ROWS, BLOCK_D, BLOCK_K,
        )  # fmt: skip
    else:
        accs, sums = _dw_products(
            x_ptrs, step_x, mask_d, x_desc, pid_d * BLOCK_D, dy_ptrs, step_dy, mask_n, dy_desc, columns, low, high,
            False, ACC, EVEN_M, ROWS, BLOCK_D, BLOCK_K,
        )  # fmt: skip
    # Partial sums: one (A * CHUNK, d_in) after the other.
    base = share.to(tl.int64) * A * CHUNK
    for j in tl.static_range(BLOCK_R // ROWS):
        rows = pid_r * BLOCK_R + j * ROWS + tl.arange(0, ROWS) if DW_COMPACT else features[j]
        mask_rows = rows < (A * CHUNK if DW_COMPACT else d_out)
        rows = base + rows
        if db_ptr is not None and pid_d == 0:
            tl.store(db_ptr + rows, sums[j].to(db_ptr.dtype.element_ty), mask=mask_rows)
        dw_ptrs = dw_ptr + rows[:, None] * d_in + offs_d[None, :]
        tl.store(dw_ptrs, accs[j].to(dw_ptr.dtype.element_ty), mask=mask_rows[:, None] & mask_d[None, :])


@triton.jit
def _dx_tile(
    tile, ids_ptr,
    dy_ptr, stride_dym, stride_dyn, dy_desc,
    w_ptr, stride_wn, stride_wk, w_desc,
    dx_ptr,
    M, d_in, d_out, A,
    CHUNK: tl.constexpr, DY_COMPACT: tl.constexpr, W_COMPACT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of dX by pointers, or by descriptors, whose boxes of BLOCK_K features lie in one chunk."""
    tl.static_assert(dy_desc is None or CHUNK % BLOCK_K == 0, "a box lies in one chunk")
    ACC: tl.constexpr = tl.float64 if dy_ptr.dtype.element_ty == tl.float64 else tl.float32
    pid_r, pid_d = grouped(tile, tl.cdiv(M, BLOCK_R), tl.cdiv(d_in, BLOCK_D), GROUP)
    offs_m = pid_r * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_m = offs_m < M
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < d_in
    offs_k = tl.arange(0, BLOCK_K)
    num_chunks = tl.cdiv(d_out, CHUNK)
    dy_rows = dy_ptr + offs_m.to(tl.int64)[:, None] * stride_dym
    w_columns = w_ptr + offs_d.to(tl.int64)[None, :] * stride_wk
    acc = tl.zeros((BLOCK_R, BLOCK_D), ACC)
    # The ids of a step are loaded one step ahead and carried over. Loaded in the step itself they would be one more stage
    # of the software pipeline, taken from those that hide the latency of dy and w.
    if CHUNK % BLOCK_K == 0:
        chunk = tl.load(ids_ptr).to(tl.int64)  # the step lies in one chunk: a scalar
    else:
        features = _features(ids_ptr, offs_k, A, d_out, CHUNK)
    for k in range(0, A * CHUNK, BLOCK_K):
        pos = k + offs_k
        if CHUNK % BLOCK_K == 0:
            chunk = tl.where((chunk >= 0) & (chunk < num_chunks), chunk, num_chunks)
            first = tl.multiple_of(chunk * CHUNK + k % CHUNK, BLOCK_K)
            now = first + offs_k
            chunk = tl.load(ids_ptr + tl.minimum((k + BLOCK_K) // CHUNK, A - 1)).to(tl.int64)
        else:
            ALIGN: tl.constexpr = 64 if CHUNK % 64 == 0 else CHUNK & -CHUNK  # as in _features: a step forgets the hint
            now = tl.max_contiguous(tl.multiple_of(features, ALIGN), ALIGN)
            features = _features(ids_ptr, pos + BLOCK_K, A, d_out, CHUNK)
        if dy_desc is not None:
            column = first.to(tl.int32)
            dy = dy_desc.load([pid_r * BLOCK_R, column])  # (BLOCK_R, BLOCK_K)
            w = w_desc.load([column, pid_d * BLOCK_D])  # (BLOCK_K, BLOCK_D)
        else:
            mask_k = now < d_out
            columns = pos.to(tl.int64) if DY_COMPACT else now
            rows = pos.to(tl.int64) if W_COMPACT else now
            dy_ptrs = dy_rows + columns[None, :] * stride_dyn
            dy = tl.load(dy_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            w_ptrs = w_columns + rows[:, None] * stride_wn
            w = tl.load(w_ptrs, mask=mask_k[:, None] & mask_d[None, :], other=0.0)
        acc = tl.dot(dy, w, acc, input_precision="ieee", out_dtype=ACC)
    dx_ptrs = dx_ptr + offs_m.to(tl.int64)[:, None] * d_in + offs_d[None, :]
    tl.store(dx_ptrs, acc.to(dx_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["A", "num_dw", "num_dx", "zero_every"])
def _sparse_linear_bwd_tiles_kernel(
    ids_ptr,  # (A,) active chunks
    x_ptr, stride_xm, stride_xk,  # (M, d_in) input, for dW
    dy_ptr, stride_dym, stride_dyn,  # (M, d_out) gradient of the output; (M, A * CHUNK) if DY_COMPACT
    w_ptr, stride_wn, stride_wk,  # (d_out, d_in) weight, for dX; (A * CHUNK, d_in) if W_COMPACT
    dx_ptr,  # (M, d_in) or None
    dw_ptr, db_ptr,  # (d_out, d_in) and (d_out,) or None; if DW_COMPACT A * CHUNK rows, SPLIT times
    x_desc, dy_dw_desc, dy_dx_desc, w_desc,  # descriptors of x, dy (for dW, for dX) and W, where they are read by them
    M, d_in, d_out, A,
    num_dw, num_dx,  # tiles of dW and of dX; the other programs look at pieces of chunks for zeros
    zero_every,  # one program in so many of the later ones writes zeros
    CHUNK: tl.constexpr, DY_COMPACT: tl.constexpr, W_COMPACT: tl.constexpr, DW_COMPACT: tl.constexpr,
    DX_FIRST: tl.constexpr, SPLIT: tl.constexpr, EVEN_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ZERO_PIECE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    num_first = num_dx if DX_FIRST else num_dw
    WITH_ZERO: tl.constexpr = dw_ptr is not None and not DW_COMPACT
    zero = -1
    if WITH_ZERO:
        num_zero = tl.num_programs(0) - num_dw - num_dx
        later = tile - num_first
        if later >= 0:
            if later % zero_every == 0 and later // zero_every < num_zero:
                zero = later // zero_every
            else:
                tile -= tl.minimum(later // zero_every + 1, num_zero)
    if WITH_ZERO and zero >= 0:
        # A piece of a chunk of dW, if that is inactive, and with the first piece db.
        pieces = tl.cdiv(tl.full((), CHUNK, tl.int64) * d_in, ZERO_PIECE)
        chunk, piece = zero // pieces, zero % pieces
        if _slot_of(ids_ptr, chunk, A) < 0:
            first = chunk * CHUNK
            last = tl.minimum(first + CHUNK, d_out)
            start = first.to(tl.int64) * d_in
            count = (last - first).to(tl.int64) * d_in
            zeros = tl.zeros((BLOCK_ZERO,), dw_ptr.dtype.element_ty)
            low = piece * ZERO_PIECE
            for offset in range(low, tl.minimum(low + ZERO_PIECE, count), BLOCK_ZERO):
                offs = offset + tl.arange(0, BLOCK_ZERO)
                # ".cs": the zeros are not read soon, so they should not push operands out of the L2 cache.
                tl.store(dw_ptr + start + offs, zeros, mask=offs < count, cache_modifier=".cs")
            if db_ptr is not None and piece == 0:
                offs_n = first + tl.arange(0, triton.next_power_of_2(CHUNK))
                tl.store(db_ptr + offs_n, tl.zeros(offs_n.shape, db_ptr.dtype.element_ty), mask=offs_n < last)
    else:
        dw_tile = tile - (num_dx if DX_FIRST else 0)
        dx_tile = tile - (0 if DX_FIRST else num_dw)
        if dw_ptr is not None and (dx_ptr is None or (dw_tile >= 0 and dw_tile < num_dw)):
            _dw_tile(
                dw_tile, ids_ptr, x_ptr, stride_xm, stride_xk, x_desc, dy_ptr, stride_dym, stride_dyn, dy_dw_desc,
                dw_ptr, db_ptr, M, d_in, d_out, A,
                CHUNK, DY_COMPACT, DW_COMPACT, SPLIT, EVEN_M, BLOCK_R, BLOCK_D, BLOCK_K, GROUP,
            )  # fmt: skip
        elif dx_ptr is not None:
            _dx_tile(
                dx_tile, ids_ptr, dy_ptr, stride_dym, stride_dyn, dy_dx_desc, w_ptr, stride_wn, stride_wk, w_desc,
                dx_ptr, M, d_in, d_out, A,
                CHUNK, DY_COMPACT, W_COMPACT, BLOCK_R, BLOCK_D, BLOCK_K, GROUP,
            )  # fmt: skip


# --- forward --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["A", "num_tiles", "zero_every"])
def _sparse_linear_fwd_tiles_kernel(
    ids_ptr,  # (A,) active chunks
    x_ptr, stride_xm, stride_xk,  # (M, d_in) input
    w_ptr, stride_wn, stride_wk,  # (d_out, d_in) weight; (A * CHUNK, d_in) if W_COMPACT
    b_ptr, stride_b,  # (d_out,) or (A * CHUNK,) bias, or None
    y_ptr, stride_ym,  # (M, d_out) output, rows contiguous; (M, A * CHUNK) if Y_COMPACT
    M, d_in, d_out, A,
    num_tiles, zero_every,
    CHUNK: tl.constexpr, Y_COMPACT: tl.constexpr, W_COMPACT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ZERO_ROWS: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    tile = tl.program_id(0)
    zero = -1
    if not Y_COMPACT:
        num_zero = tl.num_programs(0) - num_tiles
        if tile % zero_every == 0 and tile // zero_every < num_zero:
            zero = tile // zero_every
        else:
            tile -= tl.minimum(tile // zero_every + 1, num_zero)
    if zero >= 0:
        num_chunks = tl.cdiv(d_out, CHUNK)
        chunk = zero % num_chunks
        if _slot_of(ids_ptr, chunk, A) < 0:
            within = tl.arange(0, triton.next_power_of_2(CHUNK))
            offs_n = chunk * CHUNK + within
            mask_n = (within < CHUNK) & (offs_n < d_out)
            first = zero // num_chunks * ZERO_ROWS
            for start in range(first, tl.minimum(first + ZERO_ROWS, M), BLOCK_R):
                offs_m = start + tl.arange(0, BLOCK_R)
                mask = (offs_m < M)[:, None] & mask_n[None, :]
                y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
                zeros = tl.zeros((BLOCK_R, triton.next_power_of_2(CHUNK)), y_ptr.dtype.element_ty)
                tl.store(y_ptrs, zeros, mask=mask, cache_modifier=".cs")
    else:
        pid_m, pid_n = grouped(tile, tl.cdiv(M, BLOCK_R), tl.cdiv(A * CHUNK, BLOCK_D), GROUP)
        offs_m = pid_m * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_m = offs_m < M
        pos = pid_n * BLOCK_D + tl.arange(0, BLOCK_D)
        features = _features(ids_ptr, pos, A, d_out, CHUNK)
        mask_n = features < d_out
        rows = pos.to(tl.int64) if W_COMPACT else features
        offs_k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk
        w_ptrs = w_ptr + rows[None, :] * stride_wn + offs_k.to(tl.int64)[:, None] * stride_wk
        step_x = tl.full((), BLOCK_K, tl.int64) * stride_xk
        step_w = tl.full((), BLOCK_K, tl.int64) * stride_wk
        acc = tl.zeros((BLOCK_R, BLOCK_D), ACC)
        for k in range(0, d_in, BLOCK_K):
            if EVEN_K:
                mask_x = mask_m[:, None]
                mask_w = mask_n[None, :]
            else:
                mask_k = k + offs_k < d_in
                mask_x = mask_m[:, None] & mask_k[None, :]
                mask_w = mask_k[:, None] & mask_n[None, :]
            x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # (BLOCK_R, BLOCK_K)
            w = tl.load(w_ptrs, mask=mask_w, other=0.0)  # (BLOCK_K, BLOCK_D)
            acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=ACC)
            x_ptrs += step_x
            w_ptrs += step_w
        if b_ptr is not None:
            acc += tl.load(b_ptr + rows * stride_b, mask=mask_n, other=0.0).to(ACC)[None, :]
        columns = pos.to(tl.int64) if Y_COMPACT else features
        mask_columns = pos < A * CHUNK if Y_COMPACT else mask_n
        y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + columns[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_columns[None, :])


# --- copying active features together, and back in place ----------------------------------------------------------------


@triton.jit(do_not_specialize=["A"])
def _sparse_linear_pack_kernel(
    ids_ptr,  # (A,) active chunks
    src_ptr, stride_sm, stride_sn,  # (M, d_out); (M, A * CHUNK) if SRC_COMPACT
    dst_ptr, stride_dm, stride_dn,  # (M, A * CHUNK) or None
    sums_ptr,  # (num_programs(1), A * CHUNK) sums over this program's rows, or None
    M, d_out, A,
    CHUNK: tl.constexpr, SRC_COMPACT: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pos = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    features = _features(ids_ptr, pos, A, d_out, CHUNK)
    mask_n = features < d_out
    mask_pos = pos < A * CHUNK
    columns = pos.to(tl.int64) if SRC_COMPACT else features
    first = tl.program_id(1) * ROWS
    sums = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(first, tl.minimum(first + ROWS, M), BLOCK_M):
        offs_m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask_m = offs_m < M
        src_ptrs = src_ptr + offs_m[:, None] * stride_sm + columns[None, :] * stride_sn
        values = tl.load(src_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0)  # (BLOCK_M, BLOCK_N)
        if dst_ptr is not None:
            dst_ptrs = dst_ptr + offs_m[:, None] * stride_dm + pos.to(tl.int64)[None, :] * stride_dn
            tl.store(dst_ptrs, values, mask=mask_m[:, None] & mask_pos[None, :])
        if sums_ptr is not None:
            sums += values.to(ACC)
    if sums_ptr is not None:
        offs = tl.program_id(1).to(tl.int64) * A * CHUNK + pos
        tl.store(sums_ptr + offs, tl.sum(sums, axis=0), mask=mask_pos)


@triton.jit(do_not_specialize=["A", "num_sums"])
def _sparse_linear_place_kernel(
    ids_ptr,  # (A,) active chunks
    src_ptr, stride_ss, stride_sn, stride_sm,  # (SPLIT, A * CHUNK, M) partial sums, or None
    dst_ptr, stride_dn, stride_dm,  # (d_out, M) or None; A * CHUNK rows if COMPACT
    sums_ptr,  # (num_sums, A * CHUNK) partial sums, or None
    total_ptr,  # (d_out,) or (A * CHUNK,) or None
    M, d_out, A, num_sums,
    CHUNK: tl.constexpr, COMPACT: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    if COMPACT:
        slot = tl.program_id(0)
        first = slot * CHUNK
        last = A * CHUNK
    else:
        slot = _slot_of(ids_ptr, tl.program_id(0), A)
        first = tl.program_id(0) * CHUNK
        last = d_out
    within = tl.arange(0, BLOCK_N)
    mask_n = (within < CHUNK) & (first + within < last)
    offs_n = (first + within).to(tl.int64)
    pos = (slot * CHUNK + within).to(tl.int64)
    mask_src = mask_n & (slot >= 0)
    if dst_ptr is not None:
        offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        offs_m = offs_m.to(tl.int64)
        src_ptrs = src_ptr + pos[:, None] * stride_sn + offs_m[None, :] * stride_sm
        acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
        for _ in tl.static_range(SPLIT):  # in a fixed order
            acc += tl.load(src_ptrs, mask=mask_src[:, None] & mask_m[None, :], other=0.0).to(ACC)
            src_ptrs += stride_ss
        dst_ptrs = dst_ptr + offs_n[:, None] * stride_dn + offs_m[None, :] * stride_dm
        tl.store(dst_ptrs, acc.to(dst_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
    if sums_ptr is not None and tl.program_id(1) == 0:
        total = tl.zeros((BLOCK_N,), ACC)
        sums_ptrs = sums_ptr + pos
        for _row in range(num_sums):
            total += tl.load(sums_ptrs, mask=mask_src, other=0.0)
            sums_ptrs += A * CHUNK
        tl.store(total_ptr + offs_n, total.to(total_ptr.dtype.element_ty), mask=mask_n)


# --- configurations -------------------------------------------------------------------------------------------------

PACK_CONFIG = triton.Config({"BLOCK_M": 32, "BLOCK_N": 128, "ROWS": 128}, num_warps=4)
PLACE_BLOCK_M = 128
BOX = 64  # features that one tensor descriptor's load takes from a chunk
ZERO_PIECE = 262144  # zeros that one program writes: they take about as long as a tile
ZERO_ROWS = 1024  # rows of Y whose zeros one program writes


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """A tile shape for problems of up to ``flop`` operations in one launch on 132 multiprocessors."""

    flop: float
    r: int
    d: int
    k: int
    warps: int
    stages: int
    group: int


# By bytes an element. The thresholds for 16 bits are where the measured order of the tiles changes on an H200, over five
# shapes and seven active fractions. A small problem needs many programs to reach every multiprocessor; a large one is
# fastest with the tile that reads least for its arithmetic. 132 programs of 128 x 256 read fewest strips as a block of
# 16 x 8, hence groups of 16. float32 and float64 are packed and multiplied by cuBLAS, so that theirs only have to be right.
TILES = {
    2: (
        _Tiles(1.2e9, 64, 64, 64, 4, 4, 8),
        _Tiles(12e9, 64, 128, 64, 4, 4, 8),
        _Tiles(60e9, 128, 128, 64, 4, 3, 8),
        _Tiles(math.inf, 128, 256, 64, 8, 4, 16),
    ),
    4: (_Tiles(math.inf, 64, 64, 32, 4, 3, 8),),
    8: (_Tiles(math.inf, 32, 32, 16, 4, 2, 8),),
}
# Both products in one launch, by descriptors, with tiles of 64 x 128. Up to 2.5 programs a multiprocessor, a fifth stage hides
# more latency than a second program that runs beside the first: 19.7 -> 17.0 us at m = 2048, d_in = 1024, active = 512 on an
# H200 (19.3 -> 17.3 on an H100; 18.9 -> 16.6 with 256). From 2.9 programs on, four stages are as fast or faster.
FEW_PROGRAMS, FEW_PROGRAMS_STAGES = 2.5, 5
# With so few active features a tile of dX is two steps and its store: small tiles, several a multiprocessor, overlap the
# stores of some with the loads of others, and dW's few tiles are shared by two programs. 136 -> 108 us at m = 8192,
# d_in = 6912, active = 128 on an H100.
NARROW, NARROW_TILES = 128, _Tiles(math.inf, 64, 128, 32, 4, 4, 8)
# From so many operations a product on, copying the active features for cuBLAS is faster than reading them in place: where
# loads are narrower than 16 bytes, and where they are ordinary ones because a box would reach over the end of a chunk.
# Measured on an H200 with chunks of 16 to 100 features.
SMALL_FLOP = TILES[2][0].flop
UNBOXED_FLOP = TILES[2][1].flop
# Ordinary loads take registers for addresses and masks. The tile for large problems is for Hopper and later, whose
# tensor cores read both operands from shared memory.
POINTER_TILES = (
    *TILES[2][:2],
    _Tiles(60e9, 128, 128, 64, 8, 3, 8),
    _Tiles(math.inf, 256, 128, 64, 8, 3, 8),
)


def strategy(
    m: int, d_in: int, active: int, chunk: int, itemsize: int, aligned: bool, by_chunk: bool,
    properties: runtime.DeviceProperties,
) -> str:  # fmt: skip
    """``"packed"``: by cuBLAS on the active features, copied together. ``"tiles"``: by the kernels above, in place.

    Args:
        m, d_in, active: the sizes of a product, 0 inputs where there is only a sum over rows. chunk: features in a chunk.
        aligned: rows or columns of all operands are contiguous and begin on 16 bytes.
        by_chunk: an operand's contiguous dimension is that of the chunks, so that no load is longer than a chunk.
    """
    # Tensor cores want float32 operands with the reduction in the fast dimension, where dW and dX have it in the slow. And
    # cuBLAS uses those of Turing, which tl.dot does not.
    # And copied together they are one matrix, whose rows are the same bits in any batch where ``same_bits`` asks for it.
    if itemsize != 2 or d_in == 0 or not properties.has_tensor_cores or properties.same_bits:
        return "packed"
    most = math.inf
    if by_chunk and chunk % BOX:
        aligned = aligned and alignment(chunk) * itemsize % 16 == 0
        most = UNBOXED_FLOP
    return "packed" if 2.0 * m * d_in * active > (most if aligned else SMALL_FLOP) else "tiles"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one launch is cut: tiles, into how many shares the reduction of dW is split."""

    config: triton.Config
    split: int = 1
    boxes: bool = False  # read through tensor descriptors


def _config(
    choices: tuple[_Tiles, ...], flop: float, itemsize: int, properties: runtime.DeviceProperties
) -> triton.Config:
    """Choose the tiles for a launch of ``flop`` operations, with as many stages as fit."""
    found = next((t for t in choices if flop <= t.flop * properties.num_sms / 132), choices[-1])
    # A stage is one tile of each operand; AMD's pipeline keeps the newest in registers.
    stages, stage_bytes = found.stages, (found.r + found.d) * found.k * itemsize
    while stages > 2 and (stages - properties.is_amd) * stage_bytes > properties.shared_memory_per_program:
        stages -= 1
    blocks = {"BLOCK_R": found.r, "BLOCK_D": found.d, "BLOCK_K": found.k, "GROUP": found.group}
    return triton.Config(blocks, num_warps=found.warps, num_stages=stages)


def _choices(itemsize: int, boxes: bool, properties: runtime.DeviceProperties) -> tuple[_Tiles, ...]:
    if boxes or itemsize != 2:
        return TILES[itemsize]
    return POINTER_TILES if properties.has_tma else POINTER_TILES[:-1]


def plan_backward(
    m: int,
    d_in: int,
    active: int,
    itemsize: int,
    with_dw: bool,
    with_dx: bool,
    boxes: bool,
    properties: runtime.DeviceProperties,
) -> Plan:
    """Choose tiles by the operations of the launch, and a split where few tiles of dW would outlast everything else.

    Args:
        m, d_in: rows and columns of x. active: active features. itemsize: bytes an element.
        with_dw, with_dx: which products the launch has. boxes: whether tensor descriptors read the operands.
    """
    flop = 2.0 * m * d_in * active * (with_dw + with_dx)
    choices, both = _choices(itemsize, boxes, properties), boxes and with_dw and with_dx
    config = _config(choices, flop, itemsize, properties)
    split, r, d = 1, config.kwargs["BLOCK_R"], config.kwargs["BLOCK_D"]
    if both and active <= NARROW and r > NARROW_TILES.r:
        return Plan(_config((NARROW_TILES,), flop, itemsize, properties), 2 if m >= 4096 else 1, boxes)
    if with_dw:
        # What each multiprocessor has to do, in steps of a tile's reduction: a tile of dW has m of them, one of dX active.
        steps = flop / (2 * r * d) / properties.num_sms
        # A share shorter than that would not pay for the second pass; in small launches that pass is cheap too.
        shortest = 512 if flop <= SMALL_FLOP else 2048
        split = max(1, min(16, int(m // max(steps, shortest))))
    programs = -(-d_in // d) * (-(-active // r) * split + -(-m // r))
    if both and (r, d) == (64, 128) and programs <= FEW_PROGRAMS * properties.num_sms:
        choices = tuple(dataclasses.replace(t, stages=FEW_PROGRAMS_STAGES) for t in choices)
        config = _config(choices, flop, itemsize, properties)
    return Plan(config, split, boxes)


def plan_forward(m: int, d_in: int, active: int, itemsize: int, properties: runtime.DeviceProperties) -> Plan:
    """Choose the tiles of the forward pass: by its operations too. It reads by ordinary loads, with fewer operands to address."""
    choices = tuple(dataclasses.replace(t, stages=min(t.stages, 3)) for t in TILES[itemsize])
    if not properties.has_tma:
        choices = _choices(itemsize, False, properties)
    return Plan(_config(choices, 2.0 * m * d_in * active, itemsize, properties))


def alignment(chunk: int) -> int:
    """Return the largest power of two that divides ``chunk``, at most 64."""
    return min(chunk & -chunk, 64)
