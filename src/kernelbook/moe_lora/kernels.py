"""Products of rows with the matrix of the expert that each row is routed to, and what LoRA adds to them.

There are R = T k rows, one for each (token, slot) pair p = t k + j. Sorting the pairs by expert gives ``order``: sorted
position s holds pair order[s], and the positions of expert e are offsets[e] to offsets[e + 1]. A tile is a run of at most
BLOCK_M positions of one expert; it multiplies with one W[e], and no row is computed that is not there but in an expert's
last tile. Rows are read through ``order`` and written through it ("scatter to scatter"), or lie in sorted order already.

    route    order, offsets, and for each tile height the list of tiles: a counting sort in two launches, or in one where
             one program sees all rows
    rows     Y = X W[e] + U B[e]^T + bias[e] (grouped GEMM), a tile (BLOCK_M, BLOCK_N) a program; also dX = dY W[e]^T + D A[e]
    shrink   U = scaling X A[e]^T and D = scaling dY B[e], (R, RANK) in sorted order
    wgrad    sums over the rows of an expert: dA[e] = D^T X, dB[e] = dY^T U, dW[e] = X^T dY, dbias[e] = 1^T dY
    slots    the weighted sum over a token's slots (top_k), and the gradient of the weights (combine)

``rows`` adds the low-rank product in one of two ways. Split: U comes from ``shrink``, and U B[e]^T is what the loop over K
starts from. Fused: the loop over K also accumulates U = X A[e]^T, in every program of a row of tiles anew.

Bytes of a forward pass: W once (the tiles of an expert run together and share it in the L2 cache), X once for each
column of tiles, Y once. Operations: 2 R K N + 2 R r (K + N).

A slot whose expert id is E (or, on a GPU, out of range) is skipped: the row of Y is zero, and it enters no sum.
Nothing is added up by atomics, so that results are the same bit for bit in every run.
Not handled: gradients of gradients.
"""

import dataclasses
import functools

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.packed import products
from kernelbook.packed.kernels import load_tile, table
from kernelbook.tiles import dot, grouped

# isort: split
import triton
import triton.language as tl

# Tiles are listed by ``route`` for each of these heights. The last one is for packed matrices alone.
HEIGHTS = products.HEIGHTS

# --- routing --------------------------------------------------------------------------------------------------------


@triton.jit
def _groups(ids_ptr, stride_it, stride_ik, offs, R, top_k, E):
    """Load the expert of each pair; E for a slot to skip, and past the end."""
    token = (offs // top_k).to(tl.int64)
    slot = (offs % top_k).to(tl.int64)
    ids = tl.load(ids_ptr + token * stride_it + slot * stride_ik, mask=offs < R, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit(do_not_specialize=["R", "top_k", "E", "per_program"])
def _route_fwd_count_kernel(
    ids_ptr, stride_it, stride_ik,  # (T, k) expert ids
    counts_ptr,  # (num_programs, BLOCK_E) how often each program saw each group
    R, top_k, E, per_program,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    low = pid * per_program
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(low, tl.minimum(low + per_program, R), BLOCK):
        group = _groups(ids_ptr, stride_it, stride_ik, start + tl.arange(0, BLOCK), R, top_k, E)
        counts += tl.histogram(group, BLOCK_E)
    tl.store(counts_ptr + pid * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["R", "top_k", "E", "per_program"])
def _route_fwd_place_kernel(
    ids_ptr, stride_it, stride_ik,  # (T, k) expert ids
    counts_ptr,  # (num_programs, BLOCK_E), if COUNTED
    routing_ptr,  # the four lists, one behind the other
    R, top_k, E, per_program,
    COUNTED: tl.constexpr, HEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    order_ptr = routing_ptr  # (R,) pair of each sorted position
    inverse_ptr = order_ptr + R  # (R,) sorted position of each pair
    offsets_ptr = inverse_ptr + R  # (E + 1,) first position of each expert, and of the skipped
    tiles_ptr = offsets_ptr + E + 1  # (tiles, 3) group, first position, rows; a section a height
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    low = pid * per_program
    high = tl.minimum(low + per_program, R)
    offs_e = tl.arange(0, BLOCK_E)
    within = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    if COUNTED:
        for start in range(0, programs, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)
            counts_ptrs = counts_ptr + offs_p[:, None] * BLOCK_E + offs_e
            mask_p = (offs_p < programs)[:, None]
            counts = tl.load(counts_ptrs, mask=mask_p, other=0)
            total += tl.sum(counts, axis=0)  # of (BLOCK_P, BLOCK_E)
            counts = tl.where((offs_p < pid)[:, None], counts, 0)
            before += tl.sum(counts, axis=0)
    else:  # one program, and one step
        group = _groups(ids_ptr, stride_it, stride_ik, within, R, top_k, E)
        total += tl.histogram(group, BLOCK_E)
    first = tl.cumsum(total, axis=0) - total
    # Past the end pairs were counted as slots to skip, which come last.
    total = tl.where(offs_e == E, R - first, total)
    if pid == 0:
        tl.store(offsets_ptr + offs_e, first, mask=offs_e <= E)
    next_free = first + before
    for start in range(low, high, BLOCK):
        offs = start + within
        group = _groups(ids_ptr, stride_it, stride_ik, offs, R, top_k, E)
        # Earlier pairs of the step with the same expert: the sort is stable.
        earlier = within[:, None] > within[None, :]  # (BLOCK, BLOCK)
        earlier &= group[:, None] == group[None, :]
        position = tl.gather(next_free, group, 0)
        position += tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(inverse_ptr + offs, position, mask=offs < R)
        tl.store(order_ptr + position, offs, mask=offs < R)
        next_free += tl.histogram(group, BLOCK_E)
    # The lists of tiles: the j-th tiles of all groups at once. Every program
    # has its share of them, and of the entries that are not needed.
    section = 0
    for i in tl.static_range(len(HEIGHTS)):
        height = HEIGHTS[i]
        capacity = R // height + tl.minimum(E + 1, R)
        tiles_of = (total + (height - 1)) // height
        ends = tl.cumsum(tiles_of, axis=0)
        section_ptrs = tiles_ptr + (section + ends - tiles_of).to(tl.int64) * 3
        for j in range(pid, tl.max(tiles_of, axis=0), programs):
            tile_ptrs = section_ptrs + j * 3
            done = j * height
            tl.store(tile_ptrs, offs_e, mask=j < tiles_of)
            tl.store(tile_ptrs + 1, first + done, mask=j < tiles_of)
            rows = tl.minimum(total - done, height)
            tl.store(tile_ptrs + 2, rows, mask=j < tiles_of)
        used = tl.sum(tiles_of, axis=0)
        for start in range(used + pid * BLOCK, capacity, programs * BLOCK):
            tile = start + within
            tile_ptrs = tiles_ptr + (section + tile).to(tl.int64) * 3
            nothing = tl.full((BLOCK,), -1, tl.int32)
            tl.store(tile_ptrs, nothing, mask=tile < capacity)
        section += capacity


@triton.constexpr_function
def padded_rank(rank: int) -> int:
    """Return the width of U and D: tensor cores multiply with no fewer than 16 columns of the reduction."""
    return max(16, triton.next_power_of_2(rank))


# --- products of rows -----------------------------------------------------------------------------------------------


@triton.jit
def _rows_tile(
    expert, first, rows, pid_n,
    order_ptr, x_ptr, stride_xm, x_desc, w, stride_we, stride_w, scales,
    a_ptr, b_ptr, u_ptr, bias_ptr, y_ptr,
    scaling, K, N,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    W_BY_ROW: tl.constexpr, B_BY_ROW: tl.constexpr, X_SLOTS: tl.constexpr, Y_GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, r: tl.constexpr,
):  # fmt: skip
    dtype = y_ptr.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    RANK: tl.constexpr = padded_rank(r)
    positions = first + tl.minimum(tl.arange(0, BLOCK_M), rows - 1)  # past the end the last one again
    pairs = tl.load(order_ptr + positions).to(tl.int64)
    positions = positions.to(tl.int64)
    x_rows = positions if X_SLOTS == 0 else pairs // X_SLOTS
    y_rows = positions if Y_GROUPED else pairs
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = tl.arange(0, BLOCK_M) < rows
    mask_n = offs_n < N
    offs_k = tl.arange(0, BLOCK_K)
    expert64 = expert.to(tl.int64)
    x_ptrs = x_ptr + x_rows[:, None] * stride_xm + offs_k[None, :]
    if FORMAT == "permute":
        values = table(scales[4], dtype)
        code = values
    elif FORMAT == "gather":
        code = tl.load(scales[4] + tl.arange(0, 16))
        values = code
    elif FORMAT == "pointers":
        w_ptrs = w + expert64 * stride_we
        if W_BY_ROW:
            w_ptrs += offs_k.to(tl.int64)[:, None] * stride_w + offs_n[None, :]
            step_w = tl.full((), BLOCK_K, tl.int64) * stride_w
        else:
            w_ptrs += offs_k[:, None] + offs_n.to(tl.int64)[None, :] * stride_w
            step_w = BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if b_ptr is not None:
        # Four warps side by side make 32 columns, and a narrower product of few rows would be computed more than once.
        BLOCK_R: tl.constexpr = min(RANK, 32) if a_ptr is None else max(RANK, 32) if BLOCK_M < 64 else RANK
        offs_r = tl.arange(0, BLOCK_R)
        b_ptrs = b_ptr + expert64 * N * r
        if B_BY_ROW:
            b_ptrs += offs_r.to(tl.int64)[:, None] * N + offs_n[None, :]
            step_b = tl.full((), BLOCK_R, tl.int64) * N
        else:
            b_ptrs += offs_r[:, None] + offs_n.to(tl.int64)[None, :] * r
            step_b = BLOCK_R
    if b_ptr is not None and a_ptr is None:
        # Before the loop. Behind it, with W contiguous along K, ptxas (of CUDA
        # 12.8) serializes all tensor core instructions of the kernel (C7515).
        # 2026-11; tests/test_moe_lora.py counts the waits.
        u_ptrs = u_ptr + positions[:, None] * RANK + offs_r[None, :]
        for start in tl.static_range(0, RANK, BLOCK_R):
            u = tl.load(u_ptrs + start)  # (BLOCK_M, BLOCK_R)
            mask_b = (start + offs_r < r)[:, None] & mask_n[None, :]
            b = tl.load(b_ptrs, mask=mask_b, other=0.0)
            acc = dot(u, b, acc, PRECISION)
            b_ptrs += step_b
    if a_ptr is not None:
        a_ptrs = a_ptr + expert64 * K * r + offs_k[:, None] + offs_r.to(tl.int64)[None, :] * K
        acc_u = tl.zeros((BLOCK_M, BLOCK_R), ACC)
    for k in range(0, K, BLOCK_K):
        mask_k = k + offs_k < K
        # W first: it does not wait for the row numbers.
        if FORMAT == "pointers":
            mask_w = mask_k[:, None] & mask_n[None, :]
            w_tile = tl.load(w_ptrs, mask=mask_w, other=0.0)  # (BLOCK_K, BLOCK_N)
            w_ptrs += step_w
        elif FORMAT == "boxes":
            if W_BY_ROW:
                w_tile = w.load([expert, k, pid_n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                w_tile = tl.trans(w.load([expert, pid_n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K))
        elif W_BY_ROW:
            w_tile = load_tile(
                w, scales[0], scales[1], scales[2], scales[3], code, values, expert, k, pid_n * BLOCK_N, K, N,
                BLOCK_K, BLOCK_N, BLOCK_SIZE, SCALE, FORMAT == "permute", x_ptr.dtype.element_ty,
            )  # fmt: skip
        else:
            w_tile = tl.trans(load_tile(
                w, scales[0], scales[1], scales[2], scales[3], code, values, expert, pid_n * BLOCK_N, k, N, K,
                BLOCK_N, BLOCK_K, BLOCK_SIZE, SCALE, FORMAT == "permute", x_ptr.dtype.element_ty,
            ))  # fmt: skip
        if x_desc is not None:
            x = x_desc.load([first, k])  # (BLOCK_M, BLOCK_K)
        elif EVEN_K:
            x = tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
        else:
            mask_x = mask_m[:, None] & mask_k[None, :]
            x = tl.load(x_ptrs, mask=mask_x, other=0.0)
        acc = dot(x, w_tile, acc, PRECISION)
        if a_ptr is not None:
            mask_a = mask_k[:, None] & (offs_r < r)[None, :]
            a = tl.load(a_ptrs, mask=mask_a, other=0.0)  # (BLOCK_K, BLOCK_R)
            acc_u = dot(x, a, acc_u, PRECISION)
            a_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    if a_ptr is not None:
        mask_b = (offs_r < r)[:, None] & mask_n[None, :]
        b = tl.load(b_ptrs, mask=mask_b, other=0.0)  # (BLOCK_R, BLOCK_N)
        u = (acc_u * scaling).to(dtype)
        acc = dot(u, b, acc, PRECISION)
        if u_ptr is not None:  # noqa: SIM102 - known when it is compiled
            if pid_n == 0:
                u_ptrs = u_ptr + positions[:, None] * RANK + offs_r[None, :]
                mask_u = mask_m[:, None] & (offs_r < RANK)[None, :]
                tl.store(u_ptrs, u, mask=mask_u)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert64 * N + offs_n, mask=mask_n, other=0.0).to(ACC)[None, :]
    y_ptrs = y_ptr + y_rows[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc.to(dtype), mask=mask_m[:, None] & mask_n[None, :])


# What changes from batch to batch is not specialized on. The rank is: a mask that is known lets loads be wide.
@triton.jit(do_not_specialize=["tiles_at", "E"])
def _moe_lora_fwd_rows_kernel(
    routing_ptr, tiles_at,  # order, (R,) pair of each sorted position; there group, first position and rows of each tile
    x_ptr, stride_xm, x_desc,  # (R / X_SLOTS, K), rows contiguous; in sorted order (R, K) if X_SLOTS is 0
    w, stride_we, stride_w,  # a pointer or a descriptor of (E, K, N), or of (E, N, K) unless W_BY_ROW, rows contiguous
    absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr,  # as in packed/kernels.py, of 4-bit elements
    a_ptr,  # (E, r, K), from which U is made here, or None
    b_ptr,  # (E, N, r), or (E, r, N) if B_BY_ROW, or None
    u_ptr,  # (R, RANK) in sorted order: read, or with A written; or None
    bias_ptr,  # (E, N) or None
    y_ptr,  # (R, N), rows of pairs; in sorted order if Y_GROUPED
    scaling, E, K, N,
    FORMAT: tl.constexpr,  # of W: "pointers" or "boxes"; or words of 4-bit elements, decoded by "permute" or "gather"
    BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    W_BY_ROW: tl.constexpr, B_BY_ROW: tl.constexpr, X_SLOTS: tl.constexpr, Y_GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SMALL_M: tl.constexpr, r: tl.constexpr,
):  # fmt: skip
    """Y = X W[e] + U B[e]^T + bias[e]; U = scaling X A[e]^T is read, or with A made beside X W[e]."""
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped(tl.program_id(0), tl.num_programs(0) // num_n, num_n, 4 if BLOCK_N == 256 else 8)
    tile_ptr = routing_ptr + tiles_at + pid_m * 3
    expert = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    rows = tl.load(tile_ptr + 2)
    scales = absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr
    if expert >= 0:
        if expert == E:
            positions = first + tl.minimum(tl.arange(0, BLOCK_M), rows - 1)
            y_rows = positions if Y_GROUPED else tl.load(routing_ptr + positions)
            y_rows = y_rows.to(tl.int64)
            offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_m = tl.arange(0, BLOCK_M) < rows
            y_ptrs = y_ptr + y_rows[:, None] * N + offs_n[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty)
            tl.store(y_ptrs, zeros, mask=mask_m[:, None] & (offs_n < N)[None, :])
            if a_ptr is not None and u_ptr is not None:  # noqa: SIM102
                if pid_n == 0:
                    offs_r = tl.arange(0, padded_rank(r))
                    u_ptrs = u_ptr + positions.to(tl.int64)[:, None] * padded_rank(r) + offs_r[None, :]
                    no_u = tl.zeros((BLOCK_M, padded_rank(r)), u_ptr.dtype.element_ty)
                    tl.store(u_ptrs, no_u, mask=mask_m[:, None])
        elif SMALL_M < BLOCK_M and rows <= SMALL_M:
            _rows_tile(
                expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm, None, w, stride_we, stride_w, scales,
                a_ptr, b_ptr, u_ptr, bias_ptr, y_ptr, scaling, K, N,
                FORMAT, BLOCK_SIZE, SCALE, W_BY_ROW, B_BY_ROW, X_SLOTS, Y_GROUPED, PRECISION, EVEN_K,
                SMALL_M, BLOCK_N, BLOCK_K, r,
            )  # fmt: skip
        else:
            _rows_tile(
                expert, first, rows, pid_n, routing_ptr, x_ptr, stride_xm, x_desc, w, stride_we, stride_w, scales,
                a_ptr, b_ptr, u_ptr, bias_ptr, y_ptr, scaling, K, N,
                FORMAT, BLOCK_SIZE, SCALE, W_BY_ROW, B_BY_ROW, X_SLOTS, Y_GROUPED, PRECISION, EVEN_K,
                BLOCK_M, BLOCK_N, BLOCK_K, r,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_at", "E"])
def _moe_lora_fwd_shrink_kernel(
    routing_ptr, tiles_at,  # order (R,); there (num_m, 3) tiles
    x_ptr, stride_xm, stride_xk,  # (R / X_SLOTS, K) rows; in sorted order (R, K) if X_SLOTS is 0
    a_ptr, stride_ae, stride_ak, stride_ar,  # (E, K, r)
    u_ptr,  # (R, SPLIT, RANK) in sorted order: shares of the sum over K
    scaling, E, K,
    X_SLOTS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    r: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid_m = tl.program_id(0)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    share = tl.program_id(2)
    order_ptr = routing_ptr
    tile_ptr = routing_ptr + tiles_at + pid_m * 3
    expert = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    rows = tl.load(tile_ptr + 2)
    if expert >= 0:
        acc = tl.zeros((BLOCK_M, BLOCK_R), ACC)
        if expert < E:
            positions = first + tl.minimum(tl.arange(0, BLOCK_M), rows - 1)  # past the end the last one again
            x_rows = positions if X_SLOTS == 0 else tl.load(order_ptr + positions) // X_SLOTS
            x_rows = x_rows.to(tl.int64)
            per_share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
            low = share * per_share
            high = tl.minimum(low + per_share, K)
            offs_k = tl.arange(0, BLOCK_K)
            x_ptrs = x_ptr + x_rows[:, None] * stride_xm + (low + offs_k).to(tl.int64)[None, :] * stride_xk
            a_ptrs = a_ptr + expert.to(tl.int64) * stride_ae + (low + offs_k).to(tl.int64)[:, None] * stride_ak
            a_ptrs += offs_r.to(tl.int64)[None, :] * stride_ar
            step_x = tl.full((), BLOCK_K, tl.int64) * stride_xk
            step_a = tl.full((), BLOCK_K, tl.int64) * stride_ak
            for k in range(low, high, BLOCK_K):
                mask_k = k + offs_k < K
                if EVEN_K:
                    x = tl.load(x_ptrs)  # (BLOCK_M, BLOCK_K)
                else:
                    x = tl.load(x_ptrs, mask=mask_k[None, :], other=0.0)
                a = tl.load(a_ptrs, mask=mask_k[:, None] & (offs_r < r)[None, :], other=0.0)  # (BLOCK_K, BLOCK_R)
                acc = dot(x, a, acc, PRECISION)
                x_ptrs += step_x
                a_ptrs += step_a
        u_rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64) * SPLIT + share
        u_ptrs = u_ptr + u_rows[:, None] * RANK + offs_r[None, :]
        u = (acc * scaling).to(u_ptr.dtype.element_ty)
        tl.store(u_ptrs, u, mask=(tl.arange(0, BLOCK_M) < rows)[:, None])


# --- sums over the rows of an expert --------------------------------------------------------------------------------


@triton.jit
def _wgrad_tile(
    expert, pid_p, pid_q,
    order_ptr, offsets_ptr,
    l_ptr, stride_lm, stride_lp,
    z_ptr, stride_zm, stride_zq,
    gates_ptr,
    out_ptr, stride_oe, stride_op, stride_oq,
    Q,
    L_SLOTS: tl.constexpr, Z_SLOTS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute a tile (BLOCK_P, BLOCK_Q) of left^T right over the rows of an expert."""
    offs_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_q = pid_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    mask_p, mask_q = offs_p < P, offs_q < Q
    low = tl.load(offsets_ptr + expert)
    high = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_Q, BLOCK_P), ACC)
    for start in range(low, high, BLOCK_M):
        positions = start + tl.arange(0, BLOCK_M)
        mask_m = positions < high
        pairs = tl.load(order_ptr + positions, mask=mask_m, other=0)
        l_rows = (positions if L_SLOTS == 0 else pairs // L_SLOTS).to(tl.int64)
        z_rows = (positions if Z_SLOTS == 0 else pairs // Z_SLOTS).to(tl.int64)
        l_ptrs = l_ptr + l_rows[:, None] * stride_lm
        l_ptrs += offs_p.to(tl.int64)[None, :] * stride_lp
        z_ptrs = z_ptr + z_rows[:, None] * stride_zm
        z_ptrs += offs_q.to(tl.int64)[None, :] * stride_zq
        mask_l = mask_m[:, None] & mask_p[None, :]
        mask_z = mask_m[:, None] & mask_q[None, :]
        left = tl.load(l_ptrs, mask=mask_l, other=0.0)  # (BLOCK_M, BLOCK_P)
        right = tl.load(z_ptrs, mask=mask_z, other=0.0)  # (BLOCK_M, BLOCK_Q)
        if gates_ptr is not None:
            gates = tl.load(gates_ptr + pairs, mask=mask_m, other=0.0)
            left = (left.to(ACC) * gates.to(ACC)[:, None]).to(left.dtype)
        # The wide operand first: Hopper's tensor cores take at least 64 rows.
        acc = dot(tl.trans(right), left, acc, PRECISION)
    out_ptrs = out_ptr + expert * stride_oe
    out_ptrs += offs_p.to(tl.int64)[None, :] * stride_op
    out_ptrs += offs_q.to(tl.int64)[:, None] * stride_oq
    mask = mask_q[:, None] & mask_p[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["offsets_at"])
def _moe_lora_bwd_wgrad_kernel(
    routing_ptr, offsets_at,  # order (R,); there (E + 1,) offsets
    l_ptr, u_ptr, stride_lm, stride_lp,  # (R / L_SLOTS, P) left rows of each sum; in sorted order (R, P) if L_SLOTS is 0
    x_ptr, stride_xm, stride_xk,  # (R / X_SLOTS, K) right rows of the first sum, likewise
    dy_ptr, stride_dym, stride_dyn,  # (R / DY_SLOTS, N) those of the second, likewise
    gates_ptr,  # (R,) a weight of each pair, or None
    da_ptr,  # (E, P, K) or None
    db_ptr,  # (E, N, P) or None
    K, N,
    L_SLOTS: tl.constexpr, X_SLOTS: tl.constexpr, DY_SLOTS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dA = L^T X and dB = dY^T U in one launch: first the tiles of dA, then those of dB. Also one of them."""
    expert = tl.program_id(0).to(tl.int64)
    pid_p = tl.program_id(1)
    pid_q = tl.program_id(2)
    offsets_ptr = routing_ptr + offsets_at
    num_k = 0 if da_ptr is None else tl.cdiv(K, BLOCK_Q)
    if da_ptr is not None and (db_ptr is None or pid_q < num_k):
        _wgrad_tile(
            expert, pid_p, pid_q, routing_ptr, offsets_ptr,
            l_ptr, stride_lm, stride_lp, x_ptr, stride_xm, stride_xk, gates_ptr,
            da_ptr, tl.cast(P, tl.int64) * K, K, 1, K,
            L_SLOTS, X_SLOTS, ACC, PRECISION, P, BLOCK_P, BLOCK_Q, BLOCK_M,
        )  # fmt: skip
    elif db_ptr is not None:
        _wgrad_tile(
            expert, pid_p, pid_q - num_k, routing_ptr, offsets_ptr,
            u_ptr, stride_lm, stride_lp, dy_ptr, stride_dym, stride_dyn, gates_ptr,
            db_ptr, tl.cast(P, tl.int64) * N, 1, P, N,
            L_SLOTS, DY_SLOTS, ACC, PRECISION, P, BLOCK_P, BLOCK_Q, BLOCK_M,
        )  # fmt: skip


# --- sums over the slots of a token ---------------------------------------------------------------------------------


@triton.jit
def _moe_lora_fwd_slots_kernel(
    order_ptr,  # (R,), of rows in sorted order, or None
    rows_ptr,  # (R, C): row i SLOTS + j belongs to output row i
    gates_ptr,  # (R,) a weight of each pair, or None
    out_ptr,  # (R / SLOTS, C) or None
    x_ptr, stride_xm, stride_xc,  # (R / SLOTS, C), for dgates
    dgates_ptr,  # (R,) inner products of the rows of a pair and x, or None
    C,
    SLOTS: tl.constexpr, ACC: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    inner = tl.zeros((BLOCK_S,), ACC)
    for start in range(tl.program_id(1) * BLOCK_C, C, tl.num_programs(1) * BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        total = tl.zeros((BLOCK_C,), ACC)
        if dgates_ptr is not None:
            x_ptrs = x_ptr + row * stride_xm + offs_c.to(tl.int64) * stride_xc
            x = tl.load(x_ptrs, mask=offs_c < C, other=0.0).to(ACC)
        # Unrolled, so that the loads of all slots are under way at once.
        for j in tl.static_range(SLOTS):
            source = row * SLOTS + j
            values = tl.load(rows_ptr + source * C + offs_c, mask=offs_c < C, other=0.0).to(ACC)
            if dgates_ptr is not None:
                inner += tl.where(offs_s == j, tl.sum(values * x, axis=0), 0.0)
            if gates_ptr is not None:
                if order_ptr is not None:
                    source = tl.load(order_ptr + source).to(tl.int64)
                values *= tl.load(gates_ptr + source).to(ACC)
            total += values
        if out_ptr is not None:
            tl.store(out_ptr + row * C + offs_c, total.to(out_ptr.dtype.element_ty), mask=offs_c < C)
    if dgates_ptr is not None:
        pairs = row * SLOTS + offs_s
        mask_s = offs_s < SLOTS
        if order_ptr is not None:
            pairs = tl.load(order_ptr + pairs, mask=mask_s, other=0).to(tl.int64)
        tl.store(dgates_ptr + pairs, inner.to(dgates_ptr.dtype.element_ty), mask=mask_s)


# --- configurations -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)  # tiles() makes one object each: as a key it costs no hash of its fields
class Tiles:
    """The tiles of one kernel: its constants, warps and stages, and the tile height in :data:`HEIGHTS`, if it has one."""

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: int

    @property
    def kwargs(self) -> dict[str, int]:
        return dict(self.blocks)

    @property
    def height(self) -> int:
        return self.kwargs["BLOCK_M"]


@functools.cache
def tiles(warps: int, stages: int, **blocks: int) -> Tiles:
    """``Tiles`` from keywords."""
    return Tiles(tuple(blocks.items()), warps, stages)


def _mean_rows(rows: int, experts: int) -> int:
    """Return the mean number of rows of an expert, as a power of two: token counts of one size share a kernel."""
    return triton.next_power_of_2(max(1, rows // max(1, min(experts, rows))))


# The product of rows for 16-bit tiles on Hopper and later, by the mean number of rows up to which they were measured
# fastest, over three models and 1 to 8,192 tokens. A tile of 128 rows switches to its half where an expert has no more
# rows left; neither taller tiles nor narrower ones, which make more programs, came near.
ROWS_TILES = (
    (8, tiles(4, 4, BLOCK_M=16, BLOCK_N=128, BLOCK_K=128, SMALL_M=16)),
    (16, tiles(4, 4, BLOCK_M=32, BLOCK_N=128, BLOCK_K=64, SMALL_M=32)),
    (2**31, tiles(8, 4, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, SMALL_M=64)),
)


def rows_tiles(
    rows: int, experts: int, rank: int, itemsize: int, access: str, properties: runtime.DeviceProperties
) -> Tiles:
    """Choose the tiles of the product of rows; ``rank`` of a fused low-rank product, or 0.

    ``access``: W is read in ``"boxes"``, by ``"wide"`` loads, or by ``"narrow"`` ones of an element each, whose
    addresses take so many registers that only small tiles have room.
    """
    if properties.same_bits:
        return _rows_tiles_of_all(itemsize, access, properties)
    mean = _mean_rows(rows, experts)
    if access == "packed" and itemsize == 2 and properties.has_tensor_cores:
        if mean <= 16:
            return tiles(4, 4, BLOCK_M=16, BLOCK_N=128, BLOCK_K=128, SMALL_M=16)
        return tiles(8, 3, BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, SMALL_M=64)
    if itemsize == 8:
        return tiles(4, 2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16, SMALL_M=32)
    # Without tensor cores each thread holds its rows and columns of both operands.
    if itemsize == 4 or access == "narrow" or not properties.has_tensor_cores:
        height = max(16, min(32, mean))
        return tiles(4, 2, BLOCK_M=height, BLOCK_N=32, BLOCK_K=32, SMALL_M=height)
    if access == "boxes" and 8 < mean <= 16 and rank > 0:
        return tiles(4, 4, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, SMALL_M=32)
    if access == "boxes":
        return next(found for limit, found in ROWS_TILES if mean <= limit)
    if mean <= 16:
        return tiles(4, 2, BLOCK_M=16, BLOCK_N=128, BLOCK_K=64, SMALL_M=16)
    return tiles(8, 2, BLOCK_M=128, BLOCK_N=64 if rank > 32 else 128, BLOCK_K=32, SMALL_M=128)


def _rows_tiles_of_all(itemsize: int, access: str, properties: runtime.DeviceProperties) -> Tiles:
    """Choose the tiles for any number of rows, which switch to no half: high enough for a batch, narrow enough to read W for a token."""
    if itemsize == 8:
        return tiles(4, 2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16, SMALL_M=32)
    if itemsize == 4 or access == "narrow" or not properties.has_tensor_cores:
        return tiles(4, 2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, SMALL_M=32)
    if access == "packed":
        return tiles(8, 3, BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, SMALL_M=128)
    if access == "boxes":
        return tiles(8, 4, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, SMALL_M=128)
    return tiles(8, 2, BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, SMALL_M=128)


def shrink_tiles(
    rows: int, experts: int, k: int, rank: int, itemsize: int, properties: runtime.DeviceProperties
) -> Tiles:
    """Choose the tiles of the products whose result is RANK columns wide: short, so that there are many programs."""
    height = 32 if properties.same_bits else max(16, min(32, _mean_rows(rows, experts)))
    block_r = rank if rank <= 64 else 32
    if properties.same_bits and itemsize == 2 and properties.has_tensor_cores:  # no sum is shared, whatever is idle
        return tiles(4, 3, BLOCK_M=height, BLOCK_K=128, BLOCK_R=block_r, SPLIT=1)
    programs = rows // height + min(experts, rows)
    split = 1  # a long sum is shared by several programs where there are too few
    while not properties.same_bits and split < 8 and programs * split * 2 <= properties.num_sms and k >= 2048 * split:
        split *= 2
    if itemsize > 2 or not properties.has_tensor_cores:
        return tiles(4, 2, BLOCK_M=height, BLOCK_K=32, BLOCK_R=min(block_r, 32), SPLIT=split)
    if not properties.prefers_tma:
        return tiles(4, 2, BLOCK_M=height, BLOCK_K=128, BLOCK_R=block_r, SPLIT=split)
    # With few programs on a multiprocessor each has to have more bytes under way.
    if programs < 2 * properties.num_sms and k >= 4096 and block_r <= 32:
        return tiles(4, 5, BLOCK_M=height, BLOCK_K=256, BLOCK_R=block_r, SPLIT=split)
    return tiles(4, 3, BLOCK_M=height, BLOCK_K=128, BLOCK_R=block_r, SPLIT=split)


def wgrad_tiles(rows: int, experts: int, columns: int, itemsize: int, properties: runtime.DeviceProperties) -> Tiles:
    """Choose the tiles of sums over rows, ``columns`` of the narrower operand wide: RANK, or more for dW."""
    if itemsize > 2 or not properties.has_tensor_cores:
        return tiles(4, 2, BLOCK_P=min(32, padded_rank(columns)), BLOCK_Q=32, BLOCK_M=16)
    if columns > 64:
        return tiles(8, 3 if properties.prefers_tma else 2, BLOCK_P=128, BLOCK_Q=128, BLOCK_M=32)
    block_m = 128 if _mean_rows(rows, experts) > 256 else 32
    return tiles(4, 2, BLOCK_P=min(64, padded_rank(columns)), BLOCK_Q=128, BLOCK_M=block_m)


@functools.lru_cache(maxsize=4096)
def slots_tiles(slots: int, columns: int) -> Tiles:
    """Choose the tiles of sums over slots: 8 elements a thread and slot."""
    block_c = max(16, min(1024, triton.next_power_of_2(columns)))
    return tiles(max(1, block_c // 256), 2, BLOCK_S=triton.next_power_of_2(slots), BLOCK_C=block_c)


ROUTE_WARPS = 4
ROUTE_BLOCK = 128  # pairs in a step


@functools.lru_cache(maxsize=4096)
def route_blocks(rows: int, experts: int) -> tuple[int, int, int]:
    """Return programs, padded groups, and how many programs' counts are read in a step of some 4,096 numbers."""
    block_e = triton.next_power_of_2(experts + 1)
    return max(1, min(64, triton.cdiv(rows, ROUTE_BLOCK))), block_e, max(1, min(64, 4096 // block_e))


FUSED_RANK = 64  # the widest U that a program of the fused product keeps in registers beside its tile of Y
FUSED_ROWS = 64


def choose_strategy(rows: int, properties: runtime.DeviceProperties, *, copies_b: bool = False) -> str:
    """Return ``"fused"`` or ``"split"``, whichever was measured faster on an H200.

    Fused repeats X A^T in every column of tiles, n / 256 times. With few rows
    that is free, since reading W takes all the time, and one launch less is
    worth more. With more rows split is as fast or faster: clearly with few
    large experts, hardly with many small ones. Where fused ``copies_b``, as
    in the backward pass, all experts' copies take longer than a second launch:
    75.8 -> 63.1 us for 8 rows of 128 experts on an H100, 63.7 -> 52.8 on an
    H200 (k = 1536, n = 2048, rank 16).
    """
    return "fused" if rows <= FUSED_ROWS and not copies_b and not properties.same_bits else "split"
