"""The activation between the two products of a gated expert, in one pass over its rows.

``out = silu(gate) * up`` for rows ``[gate, up]``; backward from the same rows, so that nothing else has to be kept. Moves
3 I elements a row forward and 5 I backward, where separate operations move 5 I and 14 I. Other gates are not handled.
"""

from kernelbook import runtime  # noqa: F401  first: it sets up Triton

# isort: split
import triton
import triton.language as tl

__all__ = ["BLOCK_I", "ROWS", "WARPS"]

# 8 elements a thread: one 16-byte access each for the 16-bit types.
ROWS, BLOCK_I, WARPS = 4, 256, 4


@triton.jit
def _tile(S, I, ROWS: tl.constexpr, BLOCK_I: tl.constexpr):
    """-> (ROWS, 1) rows, (1, BLOCK_I) columns, and the mask of those that exist."""
    offs_s = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    return offs_s, offs_i, (offs_s < S) & (offs_i < I)


@triton.jit
def _swiglu_fwd_kernel(
    h_ptr,  # (S, 2 I) contiguous: gate, up
    out_ptr,  # (S, I) contiguous
    S,
    I,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    offs_s, offs_i, mask = _tile(S, I, ROWS, BLOCK_I)
    h_ptrs = h_ptr + offs_s * (2 * I) + offs_i
    gate = tl.load(h_ptrs, mask=mask, other=0.0).to(ACC)
    up = tl.load(h_ptrs + I, mask=mask, other=0.0).to(ACC)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + offs_s * I + offs_i, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    dout_ptr,  # (S, I) contiguous
    h_ptr,  # (S, 2 I) contiguous
    dh_ptr,  # (S, 2 I) contiguous
    S,
    I,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    offs_s, offs_i, mask = _tile(S, I, ROWS, BLOCK_I)
    offs_h = offs_s * (2 * I) + offs_i
    gate = tl.load(h_ptr + offs_h, mask=mask, other=0.0).to(ACC)
    up = tl.load(h_ptr + offs_h + I, mask=mask, other=0.0).to(ACC)
    dout = tl.load(dout_ptr + offs_s * I + offs_i, mask=mask, other=0.0).to(ACC)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dout * gate * sigmoid
    tl.store(dh_ptr + offs_h, dgate.to(dh_ptr.dtype.element_ty), mask=mask)
    tl.store(dh_ptr + offs_h + I, dup.to(dh_ptr.dtype.element_ty), mask=mask)
