"""The activation between the two products of a gated expert, in one pass over its rows; and the rotation of queries and keys.

``out = silu(gate) * up`` for rows ``[gate, up]``; backward from the same rows, so that nothing else has to be kept. Moves
3 I elements a row forward and 5 I backward, where separate operations move 5 I and 14 I. So does gpt-oss' activation, whose
rows are interleaved: a program loads pairs as they lie and splits them in registers. Other gates are not handled.

Rotation: one program turns HEADS heads of a token, and reads cos and sin once for them; q and k are read and written once.
"""

from kernelbook import runtime  # noqa: F401  first: it sets up Triton

# isort: split
import triton
import triton.language as tl

__all__ = ["BLOCK_I", "HEADS", "ROWS", "WARPS"]

# 8 elements a thread: one 16-byte access each for the 16-bit types.
ROWS, BLOCK_I, WARPS = 4, 256, 4
HEADS = 16


@triton.jit
def _swiglu_kernel(
    dout_ptr,  # (S, I) contiguous, or None
    h_ptr,  # (S, 2 I) contiguous: gate, up, which are read I apart; or gate, up, gate, up, ... if LIMIT
    out_ptr,  # (S, I) contiguous; with dout the gradient of h, (S, 2 I), as h
    S, I,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,  # of the clamped one, or None
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    offs_s = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    mask = (offs_s < S) & (offs_i < I)
    if LIMIT is None:
        offs_h = offs_s * (2 * I) + offs_i
        gate = tl.load(h_ptr + offs_h, mask=mask, other=0.0).to(ACC)
        up = tl.load(h_ptr + offs_h + I, mask=mask, other=0.0).to(ACC)
    else:
        columns = tl.program_id(1) * (2 * BLOCK_I) + tl.arange(0, 2 * BLOCK_I)[None, :]
        mask_h = (offs_s < S) & (columns < 2 * I)
        offs_h = offs_s * (2 * I) + columns
        pairs = tl.load(h_ptr + offs_h, mask=mask_h, other=0.0).to(ACC)
        gate, up = tl.split(pairs.reshape(ROWS, BLOCK_I, 2))
        # Written so that NaN stays NaN, as in torch.clamp. A number at the limit itself has a gradient; one beyond it has none.
        beyond_gate, beyond_up = gate > LIMIT, (up > LIMIT) | (up < -LIMIT)
        gate = tl.where(beyond_gate, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if dout_ptr is None:
        if LIMIT is None:
            out = gate / (1.0 + tl.exp(-gate)) * up
        else:
            out = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
        tl.store(out_ptr + offs_s * I + offs_i, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        dout = tl.load(dout_ptr + offs_s * I + offs_i, mask=mask, other=0.0).to(ACC)
        if LIMIT is None:
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            dup = dout * gate * sigmoid
            tl.store(out_ptr + offs_h, dgate.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(out_ptr + offs_h + I, dup.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
            dgate = dout * (up + 1.0) * sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid))
            dup = dout * gate * sigmoid
            dgate = tl.where(beyond_gate, 0.0, dgate)
            dup = tl.where(beyond_up, 0.0, dup)
            dh = tl.join(dgate, dup).reshape(ROWS, 2 * BLOCK_I)
            tl.store(out_ptr + offs_h, dh.to(out_ptr.dtype.element_ty), mask=mask_h)


@triton.jit(do_not_specialize=["N"])
def _rotate_kernel(
    q_ptr, stride_qb, stride_qh, stride_qn,  # (B, HQ, N, D), features contiguous
    k_ptr, stride_kb, stride_kh, stride_kn,  # (B, HK, N, D), likewise
    cos_ptr, stride_cb, stride_cn,  # (B, N, D), likewise
    sin_ptr, stride_sb, stride_sn,  # (B, N, D), likewise
    q_out_ptr, stride_ob, stride_oh, stride_on,  # as q
    k_out_ptr, stride_pb, stride_ph, stride_pn,  # as k
    N, HQ, HK,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token, the queries' first. BACK: the transposed rotation."""
    token, block = tl.program_id(0), tl.program_id(1)
    b, n = (token // N).to(tl.int64), (token % N).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_d < HALF
    cos_ptrs = cos_ptr + b * stride_cb + n * stride_cn + offs_d
    sin_ptrs = sin_ptr + b * stride_sb + n * stride_sn + offs_d
    c1 = tl.load(cos_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    blocks_q = tl.cdiv(HQ, BLOCK_H)
    heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
    x_ptr, out_ptr, count = q_ptr + b * stride_qb + n * stride_qn, q_out_ptr + b * stride_ob + n * stride_on, HQ
    stride_xh, stride_yh = stride_qh, stride_oh
    if block >= blocks_q:
        heads -= blocks_q * BLOCK_H
        x_ptr, out_ptr, count = k_ptr + b * stride_kb + n * stride_kn, k_out_ptr + b * stride_pb + n * stride_pn, HK
        stride_xh, stride_yh = stride_kh, stride_ph
    mask = (heads < count)[:, None] & inside[None, :]
    x_ptrs = x_ptr + heads.to(tl.int64)[:, None] * stride_xh + offs_d[None, :]
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    out_ptrs = out_ptr + heads.to(tl.int64)[:, None] * stride_yh + offs_d[None, :]
    tl.store(out_ptrs, y1.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, y2.to(out_ptr.dtype.element_ty), mask=mask)
