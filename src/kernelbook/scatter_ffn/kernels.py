"""A feed-forward block by chosen rows of its weights: gather a product's rows, scatter its result.

Up, ``gather_matmul``: h = act(x W[rows]^T). A program owns some of the listed rows and follows their ids: what it loads are
whole stretches of rows, wherever they lie. With a gate it owns the same rows of two matrices, and h is act(gate) * up.

Down: y = h W[rows], summed over the listed rows. A program owns some columns of y and all listed rows, or (``split`` > 1)
one share of them. Shares write partial sums; the program that raises a tile's semaphore last adds them up in their order. So
nothing is added atomically, every sum has one order, and results are the same bits in every run.

There are two of each: "vector" kernels multiply and add in registers, for very few tokens and exactly in float32; "tiles"
kernels use tensor cores. With few tokens both are bound by reading 2 (gated: 3) rows a neuron, and the loads of as many
rows as possible have to be under way at once: hence thin tiles, deep pipelines, and the second kernel starting before the
first ends (PDL). Tensor cores want 16 tokens, which are padded, and in the up kernel one warp would multiply all of K one
after another; SHARES warps each take a part of the reduction instead.

Bytes: the listed rows of each weight once, x and y; h (M, L) is written and read once, and stays in the L2 cache.
Operations: 4 M K L (gated: 6).

Not handled: float16 and bfloat16 weights with rows that are not contiguous are read two bytes at a time. The index of a row
that lies outside the matrix stands for a row of zeros.
"""

import dataclasses

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.tiles import grouped, merge_shares

# isort: split
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# --- device helpers -------------------------------------------------------------------------------------------------


@triton.jit
def _rows_at(rows_ptr, pos, last, N):
    """Load the row ids (int64) at positions ``pos`` < last of the list, and whether there is such a row; 0 where not."""
    rows = tl.load(rows_ptr + pos, mask=pos < last, other=-1).to(tl.int64)
    exists = (rows >= 0) & (rows < N)
    return tl.where(exists, rows, 0), exists


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    """Return the activation of ``z`` and its derivative there; one that is not used leaves no trace in the compiled kernel."""
    if ACTIVATION == "relu":
        slope = tl.where(z <= 0, 0.0, 1.0).to(z.dtype)
        z = tl.where(z <= 0, 0.0, z)  # not a maximum, which would drop NaN
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(z > 0, 1.0, 0.01).to(z.dtype)  # PyTorch's at NaN is the small one, and relu's is 1
        z = tl.where(z <= 0, 0.01 * z, z)
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        slope = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * density
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (z + 0.044715 z^3)
        s = tl.sigmoid(1.5957691216057308 * z * (1 + 0.044715 * z * z))
        slope = s + z * s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * z * z)
        z = z * s
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        slope = s * (1 + z * (1 - s))
        z = z * s
    else:
        slope = tl.full(z.shape, 1.0, z.dtype)
    return z, slope


@triton.jit
def _prefetch(ptrs, size, wanted):
    """Prefetch ``size`` bytes at each address into the L2 cache; multiples of 16 only."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [ptrs.to(tl.int64), size, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _bias_at(ptr, places, stride, mask, ACC: tl.constexpr):
    """Load a bias (int64 ``places``), or zeros where there is none."""
    values = tl.zeros(places.shape, ACC)
    if ptr is not None:
        values = tl.load(ptr + places * stride, mask=mask, other=0.0).to(ACC)
    return values


# --- up: gathered rows ----------------------------------------------------------------------------------------------
# L and the split change from call to call, which should not compile a kernel anew.


@triton.jit(do_not_specialize=["L"])
def _gather_matmul_fwd_vector_kernel(
    rows_ptr,  # (L,) integers
    x_ptr, stride_xm, stride_xk,  # (M, K), M <= TOKENS
    w_ptr, stride_wn, stride_wk,  # (N, K)
    b_ptr, stride_b,  # (N,) or None
    gate_ptr, stride_gn, stride_gk,  # (N, K) or None
    bg_ptr, stride_bg,  # (N,) or None
    out_ptr, stride_om,  # (M, L_out), columns contiguous; those from L on become zero
    M, N, K, L, L_out,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # the next kernel may begin to load its weights; it waits for this one where it has to
    pos = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows, exists = _rows_at(rows_ptr, pos, L, N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    w_ptrs = w_ptr + rows[:, None] * stride_wn + offs_k[None, :] * stride_wk
    if gate_ptr is not None:
        gate_ptrs = gate_ptr + rows[:, None] * stride_gn + offs_k[None, :] * stride_gk
    x_ptrs = x_ptr + offs_k * stride_xk
    up, gate = (), ()
    for _ in tl.static_range(TOKENS):
        up = up + (tl.zeros((BLOCK_L, BLOCK_K), ACC),)
        gate = gate + (tl.zeros((BLOCK_L, BLOCK_K), ACC),)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        mask_k = k + tl.arange(0, BLOCK_K) < K
        mask = exists[:, None] & mask_k[None, :]
        # Weights are read once, so they should not push out what is read again.
        w = tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)  # (BLOCK_L, BLOCK_K)
        if gate_ptr is not None:
            g = tl.load(gate_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC)
            gate_ptrs += BLOCK_K * stride_gk
        new_up, new_gate = (), ()
        for t in tl.static_range(TOKENS):
            x = tl.load(x_ptrs + t * stride_xm, mask=mask_k & (t < M), other=0.0).to(ACC)  # (BLOCK_K,)
            new_up = new_up + (up[t] + w * x[None, :],)
            if gate_ptr is not None:
                new_gate = new_gate + (gate[t] + g * x[None, :],)
            else:
                new_gate = new_gate + (gate[t],)
        up, gate = new_up, new_gate
        w_ptrs += BLOCK_K * stride_wk
        x_ptrs += BLOCK_K * stride_xk
    bias = _bias_at(b_ptr, rows, stride_b, exists, ACC)
    gate_bias = _bias_at(bg_ptr, rows, stride_bg, exists, ACC)
    for t in tl.static_range(TOKENS):
        h = tl.sum(up[t], axis=1) + bias
        if gate_ptr is not None:
            h *= _activate(tl.sum(gate[t], axis=1) + gate_bias, ACTIVATION)[0]
        else:
            h = _activate(h, ACTIVATION)[0]
        out_ptrs = out_ptr + t * stride_om + pos
        tl.store(out_ptrs, h.to(out_ptr.dtype.element_ty), mask=(pos < L_out) & (t < M))


@triton.jit(do_not_specialize=["L", "split"])
def _gather_matmul_fwd_tiles_kernel(
    rows_ptr,  # (L,) integers
    x_ptr, stride_xm, stride_xk,  # (M, K)
    w_ptr, stride_wn, stride_wk,  # (N, K)
    b_ptr, stride_b,  # (N,) or None
    gate_ptr, stride_gn, stride_gk,  # (N, K) or None
    bg_ptr, stride_bg,  # (N,) or None
    out_ptr, stride_om,  # (M, L_out), columns contiguous; zero from L on
    partial_ptr, stride_ps,  # (split, M, L_out), with a gate twice; or None
    semaphores_ptr,  # (tiles of out,) int32, zero; or None
    M, N, K, L, L_out, split,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SHARES tiles of BLOCK_K are multiplied at a time, by as many warps, and
    their products added at the end."""
    if PDL:
        gdc_launch_dependents()
    tile, share = tl.program_id(0), tl.program_id(1)
    num_m, num_l = tl.cdiv(M, BLOCK_M), tl.cdiv(L_out, BLOCK_L)
    pid_m, pid_l = grouped(tile, num_m, num_l, GROUP)
    STEP: tl.constexpr = SHARES * BLOCK_K
    low, high = 0, K
    if partial_ptr is not None:
        per_share = tl.cdiv(tl.cdiv(K, STEP), split) * STEP
        low = share * per_share
        high = tl.minimum(low + per_share, K)
    pos = pid_l * BLOCK_L + tl.arange(0, BLOCK_L)
    rows, exists = _rows_at(rows_ptr, pos, L, N)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + offs_m.to(tl.int64) * stride_xm
    w_rows = w_ptr + rows * stride_wn
    if gate_ptr is not None:
        gate_rows = gate_ptr + rows * stride_gn
    if SHARES == 1:
        offs_k = tl.arange(0, BLOCK_K)
        wide_k = (low + offs_k).to(tl.int64)
        x_ptrs = x_rows[:, None] + wide_k[None, :] * stride_xk
        w_ptrs = w_rows[None, :] + wide_k[:, None] * stride_wk
        if gate_ptr is not None:
            gate_ptrs = gate_rows[None, :] + wide_k[:, None] * stride_gk
        up = tl.zeros((BLOCK_M, BLOCK_L), ACC)
        gate = tl.zeros((BLOCK_M, BLOCK_L), ACC)
        for k in tl.range(low, high, BLOCK_K, num_stages=STAGES):
            mask_k = k + offs_k < high
            mask_x = mask_m[:, None] & mask_k[None, :]
            mask_w = mask_k[:, None] & exists[None, :]
            x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # (BLOCK_M, BLOCK_K)
            w = tl.load(w_ptrs, mask=mask_w, other=0.0)  # (BLOCK_K, BLOCK_L)
            up = tl.dot(x, w, up, input_precision="ieee", out_dtype=ACC)
            if gate_ptr is not None:
                g = tl.load(gate_ptrs, mask=mask_w, other=0.0)
                gate = tl.dot(x, g, gate, input_precision="ieee", out_dtype=ACC)
                gate_ptrs += BLOCK_K * stride_gk
            x_ptrs += BLOCK_K * stride_xk
            w_ptrs += BLOCK_K * stride_wk
    else:
        # (SHARES, BLOCK_K), so that each share reads whole segments of memory
        shares, within = tl.arange(0, SHARES), tl.arange(0, BLOCK_K)
        offs_k = shares[:, None] * BLOCK_K + within[None, :]
        wide_k = (low + offs_k).to(tl.int64)
        x_ptrs = x_rows[None, :, None] + wide_k[:, None, :] * stride_xk
        w_ptrs = w_rows[None, None, :] + wide_k[:, :, None] * stride_wk
        if gate_ptr is not None:
            gate_ptrs = gate_rows[None, None, :] + wide_k[:, :, None] * stride_gk
        ups = tl.zeros((SHARES, BLOCK_M, BLOCK_L), ACC)
        gates = tl.zeros((SHARES, BLOCK_M, BLOCK_L), ACC)
        for k in tl.range(low, high, STEP, num_stages=STAGES):
            mask_k = k + offs_k < high
            mask_x = mask_m[None, :, None] & mask_k[:, None, :]
            mask_w = mask_k[:, :, None] & exists[None, None, :]
            x = tl.load(x_ptrs, mask=mask_x, other=0.0)
            # (SHARES, BLOCK_M, BLOCK_K) times (SHARES, BLOCK_K, BLOCK_L)
            w = tl.load(w_ptrs, mask=mask_w, other=0.0, eviction_policy="evict_first")
            ups = tl.dot(x, w, ups, input_precision="ieee", out_dtype=ACC)
            if gate_ptr is not None:
                g = tl.load(gate_ptrs, mask=mask_w, other=0.0, eviction_policy="evict_first")
                gates = tl.dot(x, g, gates, input_precision="ieee", out_dtype=ACC)
                gate_ptrs += STEP * stride_gk
            x_ptrs += STEP * stride_xk
            w_ptrs += STEP * stride_wk
        up = tl.sum(ups, axis=0)
        gate = tl.sum(gates, axis=0)
    offs_m = offs_m.to(tl.int64)
    mask_out = mask_m[:, None] & (pos < L_out)[None, :]
    is_last = True
    if partial_ptr is not None:
        sums, ptrs = (up,), (partial_ptr,)
        if gate_ptr is not None:
            sums, ptrs = (up, gate), (partial_ptr, partial_ptr + split.to(tl.int64) * stride_ps)
        offsets = offs_m[:, None] * L_out + pos[None, :]
        is_last, sums = merge_shares(sums, ptrs, offsets, stride_ps, share, split, semaphores_ptr + tile, mask_out)
        up = sums[0]
        if gate_ptr is not None:
            gate = sums[1]
    if is_last:
        h = up + _bias_at(b_ptr, rows, stride_b, exists, ACC)[None, :]
        if gate_ptr is not None:
            h *= _activate(gate + _bias_at(bg_ptr, rows, stride_bg, exists, ACC)[None, :], ACTIVATION)[0]
        else:
            h = _activate(h, ACTIVATION)[0]
        out_ptrs = out_ptr + offs_m[:, None] * stride_om + pos[None, :]
        tl.store(out_ptrs, h.to(out_ptr.dtype.element_ty), mask=mask_out)


# --- down: rows that add up -----------------------------------------------------------------------------------------


@triton.jit
def _load_step(
    w_columns, stride_wn, mask_c, rows, exists,
    rows_ptr, pos, high, N,
    UNROLL: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Load the UNROLL tiles of ``rows``, all on their way before the first is used; and the rows of the step at ``pos``."""
    tiles, next_rows, next_exists = (), (), ()
    for u in tl.static_range(UNROLL):
        w_ptrs = w_columns + rows[u][:, None] * stride_wn
        mask = exists[u][:, None] & mask_c[None, :]
        # Weights are read once, so they should not push out what is read again.
        tiles = tiles + (tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first"),)
    for u in tl.static_range(UNROLL):
        found, present = _rows_at(rows_ptr, pos + u * BLOCK_L, high, N)
        next_rows, next_exists = next_rows + (found,), next_exists + (present,)
    return tiles, next_rows, next_exists


@triton.jit(do_not_specialize=["L", "split"])
def _scatter_ffn_fwd_down_vector_kernel(
    rows_ptr,  # (L,) integers
    h_ptr, stride_hm,  # (M, L_pad), zero from L on; M <= TOKENS
    w_ptr, stride_wn, stride_wk,  # (N, K_out)
    b_ptr, stride_b,  # (K_out,) or None
    y_ptr, stride_ym,  # (M, K_out), columns contiguous
    partial_ptr, stride_ps,  # (split, M, K_out) or None
    semaphores_ptr,  # (columns of programs,) int32, zero; or None
    M, N, K_out, L, split,
    ACC: tl.constexpr, PDL: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    pid_c, share = tl.program_id(0), tl.program_id(1)
    STEP: tl.constexpr = UNROLL * BLOCK_L
    low, high = 0, L
    if partial_ptr is not None:
        per_share = tl.cdiv(tl.cdiv(L, STEP), split) * STEP
        low = share * per_share
        high = tl.minimum(low + per_share, L)
    offs_l = tl.arange(0, BLOCK_L)
    offs_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < K_out
    w_columns = w_ptr + offs_c.to(tl.int64)[None, :] * stride_wk
    # One step's rows are loaded while the step before is summed up, and their
    # ids a step before that. The first rows do not depend on h: they are on
    # their way while the up kernel still runs.
    rows, exists = (), ()
    for u in tl.static_range(UNROLL):
        found, present = _rows_at(rows_ptr, low + u * BLOCK_L + offs_l, high, N)
        rows, exists = rows + (found,), exists + (present,)
    tiles, rows, exists = _load_step(
        w_columns, stride_wn, mask_c, rows, exists, rows_ptr, low + STEP + offs_l, high, N, UNROLL, BLOCK_L
    )  # fmt: skip
    if PDL:
        gdc_wait()
    acc = ()
    for _ in tl.static_range(TOKENS):
        acc = acc + (tl.zeros((BLOCK_L, BLOCK_C), ACC),)
    for l in tl.range(low, high, STEP, num_stages=1):
        coming, rows, exists = _load_step(
            w_columns, stride_wn, mask_c, rows, exists, rows_ptr, l + 2 * STEP + offs_l, high, N, UNROLL, BLOCK_L
        )  # fmt: skip
        for u in tl.static_range(UNROLL):
            pos = l + u * BLOCK_L + offs_l
            w = tiles[u].to(ACC)
            summed = ()
            for t in tl.static_range(TOKENS):
                h_ptrs = h_ptr + t * stride_hm + pos
                h = tl.load(h_ptrs, mask=(pos < high) & (t < M), other=0.0)
                summed = summed + (acc[t] + h.to(ACC)[:, None] * w,)
            acc = summed
        tiles = coming
    bias = _bias_at(b_ptr, offs_c.to(tl.int64), stride_b, mask_c, ACC)
    tokens = tl.arange(0, TOKENS)
    sums = tl.zeros((TOKENS, BLOCK_C), ACC)
    for t in tl.static_range(TOKENS):
        sums = tl.where((tokens == t)[:, None], tl.sum(acc[t], axis=0)[None, :], sums)
    mask = (tokens < M)[:, None] & mask_c[None, :]
    is_last = True
    if partial_ptr is not None:
        offsets, semaphore_ptr = tokens[:, None] * K_out + offs_c[None, :], semaphores_ptr + pid_c
        is_last, merged = merge_shares((sums,), (partial_ptr,), offsets, stride_ps, share, split, semaphore_ptr, mask)
        sums = merged[0]
    if is_last:
        y_ptrs = y_ptr + tokens[:, None] * stride_ym + offs_c[None, :]
        tl.store(y_ptrs, (sums + bias[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["L", "split"])
def _scatter_ffn_fwd_down_tiles_kernel(
    rows_ptr,  # (L,) integers
    h_ptr, stride_hm,  # (M, L_pad), zero from L on
    w_ptr, stride_wn, stride_wk,  # (N, K_out)
    b_ptr, stride_b,  # (K_out,) or None
    y_ptr, stride_ym,  # (M, K_out), columns contiguous
    partial_ptr, stride_ps,  # (split, M, K_out) or None
    semaphores_ptr,  # (tiles of y,) int32, zero; or None
    M, N, K_out, L, L_pad, split,
    ACC: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    LISTED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    tile, share = tl.program_id(0), tl.program_id(1)
    pid_m, pid_c = grouped(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(K_out, BLOCK_C), GROUP)
    tl.static_assert(LISTED % BLOCK_L == 0)
    low, high = 0, L
    if partial_ptr is not None:
        per_share = tl.cdiv(tl.cdiv(L, BLOCK_L), split) * BLOCK_L
        low = share * per_share
        high = tl.minimum(low + per_share, L)
    offs_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < K_out
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    w_columns = w_ptr + offs_c.to(tl.int64) * stride_wk
    h_rows = h_ptr + offs_m.to(tl.int64) * stride_hm
    if AHEAD > 0:
        # What does not depend on h is on its way into the L2 cache while the
        # up kernel still runs.
        early = low + tl.arange(0, AHEAD)
        first_rows, wanted = _rows_at(rows_ptr, early, high, N)
        first = pid_c * BLOCK_C
        itemsize: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        size = tl.minimum(BLOCK_C, K_out - first) * itemsize
        _prefetch(w_ptr + first_rows * stride_wn + first, size, wanted)
    if PDL:
        gdc_wait()
    # The ids of LISTED rows are loaded at once, and each step picks its own from them. Loaded in the step they would be a
    # stage of the software pipeline, and waiting for the newest of its copies is waiting for all: no row would be early.
    # The pipeline looks ahead beyond the last step, so places are clamped to the list: a gather reads without a mask.
    # Beyond L, h is zero, and so are the rows, which the mask leaves out. h's own mask is by L_pad, a multiple of 16, so
    # that its loads stay wide.
    offs_l = tl.arange(0, BLOCK_L)
    sums = tl.zeros((BLOCK_M, BLOCK_C), ACC)
    for start in tl.range(low, high, LISTED, num_stages=1):
        places = start + tl.arange(0, LISTED)
        rows, exists = _rows_at(rows_ptr, places, high, N)
        listed = tl.where(exists, rows, -1).to(tl.int32)
        stop = tl.minimum(start + LISTED, high)
        for l in tl.range(start, stop, BLOCK_L, num_stages=STAGES):
            place = tl.minimum(l - start + offs_l, LISTED - 1)
            row = tl.gather(listed, place, 0)
            w = tl.load(
                w_columns[None, :] + row.to(tl.int64)[:, None] * stride_wn,
                mask=(row >= 0)[:, None] & mask_c[None, :], other=0.0,
            )  # (BLOCK_L, BLOCK_C)  # fmt: skip
            mask_l = l + offs_l < L_pad
            h = tl.load(
                h_rows[:, None] + (l + offs_l)[None, :],
                mask=mask_m[:, None] & mask_l[None, :], other=0.0,
            )  # (BLOCK_M, BLOCK_L)  # fmt: skip
            sums = tl.dot(h, w, sums, input_precision="ieee", out_dtype=ACC)
    bias = _bias_at(b_ptr, offs_c.to(tl.int64), stride_b, mask_c, ACC)
    offs_m = offs_m.to(tl.int64)
    mask = mask_m[:, None] & mask_c[None, :]
    is_last = True
    if partial_ptr is not None:
        offsets, semaphore_ptr = offs_m[:, None] * K_out + offs_c[None, :], semaphores_ptr + tile
        is_last, merged = merge_shares((sums,), (partial_ptr,), offsets, stride_ps, share, split, semaphore_ptr, mask)
        sums = merged[0]
    if is_last:
        y_ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_c[None, :]
        tl.store(y_ptrs, (sums + bias[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


# --- rows copied together, for cuBLAS -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["L", "L_pad"])
def _scatter_ffn_pack_kernel(
    rows_ptr,  # (L,) integers
    w_ptr, stride_wn, stride_wk,  # (N, K)
    out_ptr,  # (L_pad, K) contiguous; rows from L on become zero
    N, K, L, L_pad,
    BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pos = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    rows, exists = _rows_at(rows_ptr, pos, L, N)
    offs_k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    mask_k = (offs_k < K)[None, :]
    w_ptrs = w_ptr + rows[:, None] * stride_wn + offs_k[None, :] * stride_wk
    w = tl.load(w_ptrs, mask=exists[:, None] & mask_k, other=0.0)  # (BLOCK_L, BLOCK_K)
    tl.store(out_ptr + pos.to(tl.int64)[:, None] * K + offs_k[None, :], w, mask=(pos < L_pad)[:, None] & mask_k)


@triton.jit(do_not_specialize=["M"])
def _scatter_ffn_hidden_kernel(
    u_ptr, stride_um,  # (M, L_pad) up products with their bias, zero from L on
    g_ptr,  # (M, L_pad) gate products, or None
    dh_ptr,  # (M, L_pad) gradient of h, zero from L on; or None
    h_ptr, du_ptr, dg_ptr,  # (M, L_pad)
    M, L_pad,
    ACTIVATION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """h = act(u), or act(g) u; with dh also the gradients of u and g. All have u's strides. What is zero, as from L on, stays zero."""
    pos = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    offs_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offsets = offs_m[:, None] * stride_um + pos[None, :]
    mask = (offs_m < M)[:, None] & (pos < L_pad)[None, :]
    u = tl.load(u_ptr + offsets, mask=mask, other=0.0).to(ACC)
    if g_ptr is not None:
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(ACC)
        gate, slope = _activate(g, ACTIVATION)
        h = gate * u
    else:
        h, slope = _activate(u, ACTIVATION)
    tl.store(h_ptr + offsets, h.to(h_ptr.dtype.element_ty), mask=mask)
    if dh_ptr is not None:
        dh = tl.load(dh_ptr + offsets, mask=mask, other=0.0).to(ACC)
        if g_ptr is not None:
            dg = dh * u * slope
            tl.store(dg_ptr + offsets, dg.to(dg_ptr.dtype.element_ty), mask=mask)
            du = dh * gate
        else:
            du = dh * slope
        tl.store(du_ptr + offsets, du.to(du_ptr.dtype.element_ty), mask=mask)


# --- gradients of the weights ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N"])
def _scatter_ffn_place_kernel(
    order_ptr,  # (L,) int64: places of the list, sorted by row
    bounds_ptr,  # (N + 1,) int64: where row n's places begin in that order
    source_ptr,  # (L, K) contiguous: a gradient for each place of the list
    out_ptr,  # (N, K) contiguous
    N, K,
    ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of each row: the sum over its places in the list, in their
    order; zero for a row that is not listed."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    start = tl.load(bounds_ptr + offs_n, mask=mask_n, other=0)
    count = tl.load(bounds_ptr + offs_n + 1, mask=mask_n, other=0) - start
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = (offs_k < K)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), ACC)
    for i in range(tl.max(count, axis=0)):
        mask_i = mask_n & (i < count)
        place = tl.load(order_ptr + start + i, mask=mask_i, other=0)
        source_ptrs = source_ptr + place[:, None] * K + offs_k[None, :]
        # (BLOCK_N, BLOCK_K)
        values = tl.load(source_ptrs, mask=mask_i[:, None] & mask_k, other=0.0)
        acc += values.to(ACC)
    out_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask_n[:, None] & mask_k)


# --- which kernels, and how they are cut ----------------------------------------------------------------------------

PACKED_TOKENS = 2048  # from here on rows are copied together
FEW, MANY = 512, 2500  # neurons
FEW_OUTPUTS = 2048
EARLY = 8500  # neurons up to which the down kernel may start early; later programs of the up kernel would miss its room
PAD = 64  # h has a multiple of so many columns; those that no neuron has are zero
COPY_CONFIG = triton.Config({"BLOCK_L": 4, "BLOCK_K": 1024}, num_warps=4)
HIDDEN_CONFIG = triton.Config({"BLOCK_M": 4, "BLOCK_L": 512}, num_warps=4)
PLACE_CONFIG = triton.Config({"BLOCK_N": 4, "BLOCK_K": 1024}, num_warps=4)
PLACE_VECTOR_CONFIG = triton.Config({"BLOCK_N": 1024, "BLOCK_K": 1}, num_warps=4)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is computed: which kernels, with which tiles, and into how many shares their sums are split.

    ``strategy``: ``"vector"``, ``"tiles"``, or ``"packed"``: rows copied together, and cuBLAS.
    """

    strategy: str
    up: triton.Config | None
    up_split: int
    down: triton.Config | None
    down_split: int


def _narrow(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16")


def strategy(
    m: int, k: int, k_out: int, active: int, dtype: str, gated: bool,
    properties: runtime.DeviceProperties,
) -> str:  # fmt: skip
    """Which kernels compute ``active`` neurons for ``m`` tokens, K inputs and
    K_out outputs.

    ==================  ==============  =======================================
    dtype               tokens          strategy
    ==================  ==============  =======================================
    float16, bfloat16   1               ``vector``
    float16, bfloat16   2 to 2047       ``tiles``: 16 to 128 tokens a tile
    float16, bfloat16   2048 and more   ``packed``: the copy costs little
                                        beside so much arithmetic
    float32             1 to 4          ``vector``: exact products
    float32             5 and more      ``packed``: cuBLAS, with tf32 where
                                        PyTorch allows it
    float64             any             ``packed``
    ==================  ==============  =======================================

    Where ``tl.dot`` has no tensor cores, as on a T4, 16 bits go the way of
    float32: cuBLAS uses them there too. Within ``same_bits`` all is
    ``packed``, and the product is the package's own.
    """
    if properties.same_bits:
        return "packed"
    tiles = _narrow(dtype) and properties.has_tensor_cores
    if m <= (1 if tiles else 4) and dtype != "float64":
        return "vector"
    return "tiles" if tiles and m < PACKED_TOKENS else "packed"


def plan(
    m: int, k: int, k_out: int, active: int, dtype: str, gated: bool,
    properties: runtime.DeviceProperties,
) -> Plan:  # fmt: skip
    """Which kernels, see :func:`strategy`, and how they are cut.

    Within a strategy the tiles grow with the number of neurons: few neurons
    have to be spread over all multiprocessors, many should share what is read
    of x and h. The thresholds are where the measured order of the tiles
    changes on an H200.
    """
    m = max(m, 1)
    way = strategy(m, k, k_out, active, dtype, gated, properties)
    if way == "packed":
        return Plan(way, None, 1, None, 1)
    if way == "vector":
        up = vector_up(m, active, dtype, gated, properties), 1
        down = vector_down(m, k_out, active, dtype, properties)
    else:
        up = tiles_up(m, active, gated, properties)
        down = tiles_down(m, k_out, active, properties)
    return Plan(way, *up, *down)


# As many bytes in flight in each thread whatever the dtype; several tokens take registers for their sums.
def _per_element(m: int, dtype: str) -> int:
    return 1 if dtype != "float32" else 2 * triton.next_power_of_2(m)


def _vector_up(m: int, block_l: int, block_k: int, warps: int) -> triton.Config:
    blocks = {"BLOCK_L": block_l, "BLOCK_K": block_k, "TOKENS": triton.next_power_of_2(m), "STAGES": 1}
    return triton.Config(blocks, num_warps=warps)


def vector_up(m: int, active: int, dtype: str, gated: bool, properties: runtime.DeviceProperties) -> triton.Config:
    """Two rows a program; few neurons are read by more warps each."""
    size = _per_element(m, dtype)
    if active <= FEW:
        return _vector_up(m, 2, 4096 // size, 4)
    return _vector_up(m, 2, 2048 // size, 4 if gated else 2)


def _vector_down(m: int, block_l: int, block_c: int, unroll: int, warps: int) -> triton.Config:
    blocks = {"BLOCK_L": block_l, "BLOCK_C": block_c, "UNROLL": unroll, "TOKENS": triton.next_power_of_2(m)}
    return triton.Config(blocks, num_warps=warps)


def vector_down(
    m: int, k_out: int, active: int, dtype: str, properties: runtime.DeviceProperties
) -> tuple[triton.Config, int]:
    """Few neurons: all of them in each program. Many: shares of them, four programs a multiprocessor."""
    size = _per_element(m, dtype)
    if active <= FEW:
        return _vector_down(m, 128, 32, max(1, 4 // size), 16), 1
    if size == 1 and active < MANY and k_out <= FEW_OUTPUTS:
        # The shares of few outputs are added up for longer than they are read: wider ones, four of them. 12.2 -> 11.0 us
        # with 691 neurons and 1,152 outputs on an H100, 11.6 -> 10.5 on an H200.
        return _vector_down(m, 32, 32, 8, 4), 4
    columns = -(-k_out // 64)
    split = max(1, min(4 * properties.num_sms // max(columns, 1), active // 128, 64))
    return _vector_down(m, 16, 64, max(1, 8 // size), 4), split


# The tiles by the most tokens they are for, and then by the fewest neurons. Few neurons have to be spread over all
# multiprocessors, by thin tiles or by warps and programs that share one; many should share what is read of x and h. Tokens
# are padded to the height of a tile, and the thresholds are where the measured order of the tiles changes on an H200.
Table = dict[int, tuple[tuple[int, tuple[int, ...]], ...]]

TILES_UP: Table = {  # BLOCK_M, BLOCK_L, BLOCK_K, SHARES, stages, warps
    16: (
        (5000, (16, 32, 128, 1, 4, 4)),
        (MANY, (16, 8, 128, 2, 4, 2)),
        (FEW + 1, (16, 16, 64, 4, 6, 4)),
        (0, (16, 8, 64, 8, 4, 8)),
    ),
    32: ((5000, (32, 32, 128, 1, 4, 4)), (0, (32, 16, 64, 4, 4, 4))),
    64: ((MANY, (64, 32, 128, 1, 4, 4)), (0, (64, 16, 128, 1, 5, 4))),
    128: ((5000, (128, 64, 64, 1, 5, 4)), (0, (64, 32, 128, 1, 5, 4))),
    256: ((MANY, (128, 128, 64, 1, 4, 8)), (0, (128, 64, 64, 1, 5, 4))),
}
# Without a gate a thread has half the sums, so that tiles are wider.
TILES_UP_PLAIN = TILES_UP | {128: ((MANY, (64, 64, 64, 1, 6, 4)), (0, (64, 32, 128, 1, 5, 4)))}
TILES_DOWN: Table = {  # BLOCK_M, BLOCK_L, BLOCK_C, stages, warps, and programs a tile
    16: ((MANY, (16, 32, 128, 4, 4, 8)), (FEW + 1, (16, 64, 128, 4, 4, 4)), (0, (16, 64, 64, 5, 4, 2))),
    32: ((MANY, (32, 64, 128, 3, 4, 8)), (0, (32, 64, 128, 3, 4, 4))),
    64: ((MANY, (64, 64, 64, 5, 4, 4)), (0, (64, 64, 64, 5, 4, 2))),
    128: ((MANY, (128, 64, 128, 4, 8, 4)), (FEW + 1, (64, 64, 64, 5, 4, 2)), (0, (64, 64, 64, 5, 4, 1))),
    256: ((0, (128, 64, 128, 4, 8, 2)),),
}


def _tuned(table: Table, m: int, active: int) -> tuple[int, ...]:
    rows = next(rows for most, rows in table.items() if m <= most)
    return next(tiles for fewest, tiles in rows if active >= fewest)


def _tiles_up(
    tiles: tuple[int, ...], stages: int, warps: int, gated: bool, properties: runtime.DeviceProperties
) -> triton.Config:
    block_m, block_l, block_k, shares = tiles
    blocks = {"BLOCK_M": block_m, "BLOCK_L": block_l, "BLOCK_K": block_k, "SHARES": shares, "GROUP": 8}
    stage_bytes = 2 * shares * block_k * (block_m + block_l * (2 if gated else 1))
    return triton.Config(blocks | {"STAGES": _stages(stages, stage_bytes, properties)}, num_warps=warps)


def tiles_up(m: int, active: int, gated: bool, properties: runtime.DeviceProperties) -> tuple[triton.Config, int]:
    """Choose the tiles of the up kernel, and its split."""
    if m <= 16 and properties.is_amd:
        active = max(active, FEW + 1)  # the tiles for fewer are 8 wide, which AMD's tensor cores are not
    if m <= 256:
        *tiles, stages, warps = _tuned(TILES_UP if gated else TILES_UP_PLAIN, m, active)
        if 64 < m <= 128 and tiles[0] == 128 and not properties.has_wgmma:
            warps = 8
    else:
        wide, square = (-(-m // 128) * -(-active // side) for side in (256, 128))
        tiles, stages, warps = [128, 64, 64, 1], 4, 4
        if wide >= 0.75 * properties.num_sms and properties.has_wgmma and not gated:
            tiles, stages, warps = [128, 256, 64, 1], 3, 8
        elif square >= 0.5 * properties.num_sms:
            tiles, stages, warps = [128, 128, 64, 1], 4, 8
    split = 2 if 128 < m <= 256 and active < MANY else 1
    return _tiles_up(tuple(tiles), stages, warps, gated, properties), split


def _tiles_down(
    m: int, tiles: tuple[int, ...], stages: int, warps: int, properties: runtime.DeviceProperties
) -> triton.Config:
    block_m, block_l, block_c = tiles
    blocks = {"BLOCK_M": block_m, "BLOCK_L": block_l, "BLOCK_C": block_c, "GROUP": 8}
    blocks |= {"STAGES": _stages(stages, 2 * block_l * (block_m + block_c), properties)}
    return triton.Config(blocks | {"LISTED": 1024, "AHEAD": 64 if m <= 256 else 0}, num_warps=warps)


def tiles_down(m: int, k_out: int, active: int, properties: runtime.DeviceProperties) -> tuple[triton.Config, int]:
    """Choose the tiles of the down kernel, and into how many shares the listed neurons are split."""
    if m <= 256:
        *tiles, stages, warps, programs = _tuned(TILES_DOWN, m, active)
        if m <= 16 and FEW < active < MANY and k_out <= FEW_OUTPUTS:
            # Narrow tiles make the programs that more shares would, with less to add up: 14.4 -> 12.9 us with 691 neurons
            # and 1,152 outputs on an H100, 14.0 -> 12.6 on an H200.
            return _tiles_down(m, (16, 64, 64), 4, 4, properties), 4
    else:
        *tiles, stages, warps = 128, 64, 256, 3, 8
        programs = min(4, properties.num_sms // (-(-m // 128) * -(-k_out // 256) or 1))
    _, block_l, block_c = tiles
    # The shares are for 4,096 outputs; of fewer outputs there are fewer tiles, so more programs share one.
    columns = -(-k_out // block_c)
    split = programs if m > 256 else programs * max(1, 4096 // block_c // max(columns, 1))
    split = max(1, min(split, active // block_l, 64))
    return _tiles_down(m, tuple(tiles), stages, warps, properties), split


def _stages(wanted: int, stage_bytes: int, properties: runtime.DeviceProperties) -> int:
    """Return as many stages as fit; AMD's pipeline keeps the newest in registers."""
    # The listed ids, and what changes its layout, lie in shared memory too.
    room = properties.shared_memory_per_program - 12 * 1024
    while wanted > 2 and (wanted - properties.is_amd) * stage_bytes > room:
        wanted -= 1
    return wanted
