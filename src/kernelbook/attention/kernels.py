"""Attention without the score matrix: softmax(scale q k^T) v and its gradients, one tile of scores at a time.

Forward: a program owns BLOCK_M queries of one head. It walks over the keys, BLOCK_N at a time, and keeps for each query
the largest score m so far, the sum l of exp2(score - m), and the sum acc of exp2(score - m) v; when m grows, l and acc are
scaled down by what it grew. Scores are in base 2: ``scale`` comes multiplied by log2(e). The output is acc / l, and
lse = m + log2(l) is saved: all that the backward pass needs to recompute a probability as exp2(score - lse).

Backward, from delta = rowsum(o * do):

    dkdv   a program owns BLOCK_N keys and walks over the queries, of all heads that share these keys
    dq     a program owns BLOCK_M queries and walks over the keys, as the forward pass does

Each output has one owner, so nothing is added atomically and results are bitwise reproducible; the price is that both
kernels recompute the scores: seven matrix products where five would do. dkdv computes transposed tiles (keys x queries), so
that each of its products reads its left operand as it lies in registers.

Causal: query i sees the keys up to i + S - N; with a window, as many before that one only. Tiles that no query sees are
not visited; only tiles on the two diagonals, and the last ones, are masked, in loops of their own. With lengths, each
sequence has its own S, which is read on the device.

Packed: sequences lie one after another in N, at boundaries on the device, and do not see each other. A program finds the
sequences in its tile by bisection, and walks over the keys (or queries) of one after the other, in tiles that begin where the
sequence begins; rows of the others see nothing there. So the grid follows from N alone, and rows are the same bits as those of
the sequence alone in the same tiles. (A NaN in v or in a gradient reaches, as 0 times NaN, rows beside it in the tile that do
not see it, as it does across the causal diagonal.)

A sink is a logit of a head that joins the sum of its softmax and has no value: with lse' = log2(exp2(lse) + exp2(sink)) it
scales the output by exp2(lse - lse'), and the backward pass takes lse' for lse; nothing else of it changes. Its own gradient
is -sum(exp2(sink - lse') delta). A soft cap makes a score s to cap * tanh(s / cap) as it is computed.

Operations: 4 B H N S D forward, 10 B H N S D backward (half of that if causal). Bytes: q, k, v, o once, plus 4 B H N.

Not handled: dropout, bias, other masks, head sizes above 256.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.tiles import dot

# isort: split
import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))

# --- device helpers -------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A tensor (B, H, N, D) that kernels read or write by pointer and strides, as one of their arguments."""

    ptr: Any
    stride_b: Any  # or of pages (P, H, PAGE, D)
    stride_h: Any
    stride_n: Any
    stride_d: Any


@triton.jit
def _rows(
    x,  # (B, H, N, D): Rows, or a descriptor if BOXES
    b, h, start, N, D: tl.constexpr,
    MASKED: tl.constexpr, BOXES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr = False,  # whether N may be the end of a packed sequence
):  # fmt: skip
    """BLOCK rows of a head from ``start`` on: (BLOCK, BLOCK_D), zeros beyond N (if MASKED) and D."""
    if BOXES:
        tile = x.load([b, h, start, 0]).reshape(BLOCK, BLOCK_D)
        if MASKED and PACKED:  # a descriptor knows the end of the tensor only
            tile = tl.where((start + tl.arange(0, BLOCK) < N)[:, None], tile, 0.0)
    else:
        offs_n = tl.arange(0, BLOCK)
        offs_d = tl.arange(0, BLOCK_D)
        # The first row's address is one number; a tile of addresses that moves would take two
        # registers an element.
        base = x.ptr + b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h
        base += (start + tl.zeros((), tl.int64)) * x.stride_n
        offsets = offs_n.to(tl.int64)[:, None] * x.stride_n + offs_d.to(tl.int64)[None, :] * x.stride_d
        ptrs = base + offsets
        if MASKED and D == BLOCK_D:
            tile = tl.load(ptrs, mask=(start + offs_n < N)[:, None], other=0.0)
        elif MASKED:
            mask = (start + offs_n < N)[:, None] & (offs_d < D)[None, :]
            tile = tl.load(ptrs, mask=mask, other=0.0)
        elif D == BLOCK_D:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0)
    return tile


@triton.jit
def _store_rows(x, tile, b, h, start, N, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_n = start + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = x.ptr + b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h
    ptrs += offs_n.to(tl.int64)[:, None] * x.stride_n + offs_d.to(tl.int64)[None, :] * x.stride_d
    mask = (offs_n < N)[:, None]
    if D != BLOCK_D:
        mask = mask & (offs_d < D)[None, :]
    tl.store(ptrs, tile.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _place(pid, num_blocks, num_heads, section, REVERSED: tl.constexpr):
    """-> block, head of a program.

    ``section`` heads are worked on at a time: their keys and values stay in the L2 cache. Within a
    section all heads' first blocks come first (the last ones, if REVERSED): those with most work, so
    that the short ones fill the multiprocessors that would idle at the end.
    """
    first = pid // (section * num_blocks) * section
    within = pid % (section * num_blocks)
    heads = tl.minimum(section, num_heads - first)
    block = within // heads
    if REVERSED:
        block = num_blocks - 1 - block
    return block, first + within % heads


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """``SOFTCAP * tanh(scores / SOFTCAP)``."""
    x = scores * (1.0 / SOFTCAP)
    t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    if scores.dtype == tl.float32:  # near zero the difference would have the error of a number near one
        square = x * x
        series = x * (1.0 - square * (0.333333333 - square * (0.133333333 - square * 0.0539682540)))
        t = tl.where(square < 0.01, series, t)
    return SOFTCAP * t


@triton.jit
def _with_sink(lse, sink):
    """-> by what a sink scales the output, and log2 of the sum with it. +-inf where no key is seen stays so."""
    seen = tl.abs(lse) < float("inf")
    more = tl.math.exp2(sink * LOG2_E - tl.where(seen, lse, 0.0))  # as many times the sum as the sink adds to it
    return tl.where(seen, 1.0 / (1.0 + more), 0.0), tl.where(seen, lse + tl.math.log2(1.0 + more), lse)


@triton.jit
def _length(lengths_ptr, stride_lb, b, S, LENGTHS: tl.constexpr):
    """How many keys sequence ``b`` has: S if nothing else is said."""
    length = S
    if LENGTHS:
        length = tl.load(lengths_ptr + b.to(tl.int64) * stride_lb)
        length = tl.minimum(tl.maximum(length, 0), S).to(tl.int32)
    return length


@triton.jit
def _packed_in(boundaries_ptr, stride_s, sequences, start, stop):
    """-> low, high: the packed sequences from ``low`` to ``high`` have rows from ``start`` to ``stop``."""
    low = 0
    high = sequences
    while low < high:  # the last one that begins at ``start`` or before; ``sequences`` behind the end of the last
        middle = (low + high + 1) // 2
        after = tl.load(boundaries_ptr + tl.cast(middle, tl.int64) * stride_s) > start
        low = tl.where(after, low, middle)
        high = tl.where(after, middle - 1, high)
    high = low
    while (high < sequences) & (tl.load(boundaries_ptr + tl.cast(high, tl.int64) * stride_s) < stop):
        high += 1
    return low, high


@triton.jit
def _boundary(boundaries_ptr, stride_s, i, least, N):
    """The row at which packed sequence ``i`` begins, from ``least`` to N whatever stands there."""
    row = tl.load(boundaries_ptr + tl.cast(i, tl.int64) * stride_s)
    return tl.minimum(tl.maximum(row, least), N).to(tl.int32)


@triton.jit
def _packed(boundaries_ptr, stride_s, sequence, N):
    """-> begin, end: the rows of a packed sequence."""
    begin = _boundary(boundaries_ptr, stride_s, sequence, 0, N)
    return begin, _boundary(boundaries_ptr, stride_s, sequence + 1, begin, N)


@triton.jit
def _last_key(offs_m, begin, end, CAUSAL: tl.constexpr):
    """The last key that each row sees of the packed sequence from ``begin`` to ``end``; -1: none."""
    last = offs_m if CAUSAL else end - 1 + tl.zeros_like(offs_m)
    return tl.where((offs_m >= begin) & (offs_m < end), last, -1)


@triton.jit
def _visible(
    start_m, N, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """-> first, left, full, last: what keys the queries from ``start_m`` on see, in whole tiles but for ``last``.

    Some query sees a key from ``first`` to ``last``, and all of them see those from ``left`` to ``full``.
    """
    first = 0
    left = 0
    last = S
    full = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        diagonal = S - N
        last = tl.maximum(tl.minimum(start_m + BLOCK_M + diagonal, S), 0)
        full = tl.maximum(tl.minimum(start_m + 1 + diagonal, S), 0) // BLOCK_N * BLOCK_N
        if WINDOW:
            first = tl.maximum(start_m + diagonal - window + 1, 0) // BLOCK_N * BLOCK_N
            left = tl.maximum(start_m + BLOCK_M + diagonal - window, 0)
            left = tl.minimum(tl.cdiv(left, BLOCK_N), tl.cdiv(last, BLOCK_N)) * BLOCK_N
            full = tl.maximum(full, left)
    if PACKED:  # where rows of other sequences are in the tile, all is masked
        full = tl.where((start_m >= 0) & (start_m + BLOCK_M <= N), full, left)
    return first, left, full, last


@triton.jit
def _seeing(
    start_n, N, S, window,
    CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """-> first, full, right, last: what queries see the keys from ``start_n`` on, in whole tiles but for ``last``.

    No query before ``first`` or from ``last`` on sees any of these keys; those from ``full`` to ``right`` see all of them.
    Of packed sequences the end cuts no tile before ``right``.
    """
    diagonal = S - N
    first = 0
    full = 0
    last = N
    if LENGTHS:
        last = tl.where(start_n < S, N, 0)
    right = last
    if CAUSAL:
        first = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M
        full = tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
        if WINDOW:
            last = tl.minimum(start_n + BLOCK_N - 1 - diagonal + window, last)
            right = tl.minimum(tl.maximum(start_n - diagonal + window, 0), N) // BLOCK_M * BLOCK_M
    if PACKED:
        whole = N // BLOCK_M * BLOCK_M  # behind the last query is another sequence
        right = tl.minimum(right, whole)
        # Where keys of other sequences are in the tile, all is masked.
        full = tl.where((start_n >= 0) & (start_n + BLOCK_N <= S), tl.minimum(full, whole), whole)
    if WINDOW or PACKED:
        right = tl.maximum(right, full)
    return first, full, right, last


# --- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _flash_attention_fwd_steps(
    acc, l, m, q,  # (BLOCK_M, BLOCK_D), (BLOCK_M,), (BLOCK_M,), (BLOCK_M, BLOCK_D)
    k, v, b, h_kv, offs_m, first, last, diagonal, S, window, scale,
    D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    BOXES: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys from ``first`` to ``last``; masked where a query does not see all of them."""
    unit = 1.0 if SOFTCAP > 0.0 else scale  # what is left to scale
    for start in range(first, last, BLOCK_N):
        k_tile = _rows(k, b, h_kv, start, S, D, MASKED, BOXES, BLOCK_N, BLOCK_D)
        zeros = tl.zeros((q.shape[0], BLOCK_N), ACC)
        scores = dot(q, k_tile.T, zeros, PRECISION)  # (BLOCK_M, BLOCK_N)
        if SOFTCAP > 0.0:
            scores = _capped(scores * scale, SOFTCAP)
        if MASKED:
            offs_n = start + tl.arange(0, BLOCK_N)
            seen = (offs_n < S)[None, :]
            if CAUSAL:
                seen = seen & (offs_n[None, :] <= offs_m[:, None] + diagonal)
            if WINDOW:
                seen = seen & (offs_n[None, :] > offs_m[:, None] + diagonal - window)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1) * unit)
        # Where nothing was seen yet, -inf - (-inf) would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.math.exp2(scores * unit - shift[:, None])
        alpha = tl.math.exp2(m - shift)
        l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        m = m_new
        v_tile = _rows(v, b, h_kv, start, S, D, MASKED, BOXES, BLOCK_N, BLOCK_D, PACKED)
        acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)
    return acc, l, m


@triton.jit(do_not_specialize=["B", "H", "N", "S", "section", "sequences", "window"])
def _flash_attention_fwd_kernel(
    q,  # (B, H, N, D) queries: Rows or, if BOXES, a descriptor, as k and v
    k,  # (B, H / GROUP, S, D) keys
    v,  # (B, H / GROUP, S, D) values
    o,  # (B, H, N, D) output
    lse_ptr,  # (B, H, N) log2 of the sum of exp2(score), contiguous; +inf where no key is seen
    B, H, N, S, section,
    lengths_ptr, stride_lb,  # (B,) keys that exist, if LENGTHS; (sequences + 1,) boundaries, if PACKED
    sequences, window,
    scale,  # with log2(e)
    sinks_ptr, stride_sh,  # (H,) logits, if SINKS
    LENGTHS: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # with log2(e); 0: none
    D: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, BOXES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid_m, head = _place(tl.program_id(0), tl.cdiv(N, BLOCK_M), B * H, section, CAUSAL)
    b, h = head // H, head % H
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_tile = _rows(q, b, h, start_m, N, D, True, BOXES, BLOCK_M, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    l = tl.zeros((BLOCK_M,), ACC)
    m = tl.full((BLOCK_M,), float("-inf"), ACC)

    low, high = 0, 1
    if PACKED:
        low, high = _packed_in(lengths_ptr, stride_lb, sequences, start_m, tl.minimum(start_m + BLOCK_M, N))
    for sequence in range(low, high):
        if PACKED:
            begin, end = _packed(lengths_ptr, stride_lb, sequence, N)
            queries, keys, last_key = end - begin, end - begin, _last_key(offs_m, begin, end, CAUSAL)
        else:
            begin, queries, keys, last_key = 0, N, _length(lengths_ptr, stride_lb, b, S, LENGTHS), offs_m
        first, left, full, last = _visible(
            start_m - begin, queries, keys, window, CAUSAL, WINDOW, PACKED, BLOCK_M, BLOCK_N
        )
        if WINDOW:
            acc, l, m = _flash_attention_fwd_steps(
                acc, l, m, q_tile, k, v,
                b, h // GROUP, last_key, begin + first, begin + tl.minimum(left, last), keys - queries, begin + keys, window, scale,
                D, True, CAUSAL, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        acc, l, m = _flash_attention_fwd_steps(
            acc, l, m, q_tile, k, v,
            b, h // GROUP, last_key, begin + left, begin + full, keys - queries, begin + keys, window, scale,
            D, False, CAUSAL, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, l, m = _flash_attention_fwd_steps(
            acc, l, m, q_tile, k, v,
            b, h // GROUP, last_key, begin + full, begin + last, keys - queries, begin + keys, window, scale,
            D, True, CAUSAL or PACKED, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    seen = l > 0.0
    acc = acc / tl.where(seen, l, 1.0)[:, None]
    lse = tl.where(seen, m + tl.math.log2(tl.where(seen, l, 1.0)), float("inf"))
    if SINKS:
        share, lse = _with_sink(lse, tl.load(sinks_ptr + h.to(tl.int64) * stride_sh).to(ACC))
        acc = acc * share[:, None]
    tl.store(lse_ptr + head.to(tl.int64) * N + offs_m, lse, mask=offs_m < N)
    _store_rows(o, acc, b, h, start_m, N, D, BLOCK_M, BLOCK_D)


# --- backward -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["H", "N", "n_padded"])
def _flash_attention_bwd_delta_kernel(
    o,  # (B, H, N, D) output of the forward pass
    do,  # (B, H, N, D) its gradient
    lse_ptr,  # (B, H, N), contiguous, if PADDED
    delta_ptr,  # (B, H, n_padded) rowsum(o * do), contiguous; 0 beyond N
    padded_ptr,  # (B, H, n_padded) lse, +inf beyond N, if PADDED
    H, N, n_padded,
    D: tl.constexpr, ACC: tl.constexpr, PADDED: tl.constexpr, COPIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """COPIES: as many follow one another, each with its numbers one element further on."""
    num_blocks = tl.cdiv(n_padded, BLOCK_M)
    head, start_m = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks * BLOCK_M
    b, h = head // H, head % H
    o_tile = _rows(o, b, h, start_m, N, D, True, False, BLOCK_M, BLOCK_D)
    do_tile = _rows(do, b, h, start_m, N, D, True, False, BLOCK_M, BLOCK_D)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    out = head.to(tl.int64) * n_padded + offs_m
    delta = tl.sum(o_tile.to(ACC) * do_tile.to(ACC), axis=1)
    next_copy = tl.num_programs(0).to(tl.int64) * BLOCK_M + 1  # all rows, if there are several
    for copy in tl.static_range(COPIES):
        tl.store(delta_ptr + out + copy * next_copy, delta, mask=offs_m < n_padded)
    if PADDED:
        lse = tl.load(lse_ptr + head.to(tl.int64) * N + offs_m, mask=offs_m < N, other=float("inf"))
        for copy in tl.static_range(COPIES):
            tl.store(padded_ptr + out + copy * next_copy, lse, mask=offs_m < n_padded)


@triton.jit(do_not_specialize=["B", "H", "n_padded"])
def _flash_attention_bwd_sinks_kernel(
    lse_ptr, delta_ptr,  # (B, H, n_padded), contiguous, as the other kernels read them
    sinks_ptr, stride_sh,  # (H,) logits
    dsinks_ptr,  # (H,) contiguous
    B, H, n_padded,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A program sums up a head, in the same order in every run."""
    h = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks_ptr + h * stride_sh).to(ACC) * LOG2_E
    total = tl.zeros((BLOCK_M,), ACC)
    for b in range(B):
        rows = (b * H + h) * n_padded
        for start in range(0, n_padded, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            lse = tl.load(lse_ptr + rows + offs_m, mask=offs_m < n_padded, other=float("inf"))
            delta = tl.load(delta_ptr + rows + offs_m, mask=offs_m < n_padded, other=0.0)
            total += tl.math.exp2(sink - lse) * delta
    tl.store(dsinks_ptr + h, (-tl.sum(total, axis=0)).to(dsinks_ptr.dtype.element_ty))


@triton.jit
def _flash_attention_bwd_dkdv_steps(
    dk, dv, k_tile, v_tile,  # (BLOCK_N, BLOCK_D) each
    q, do, lse_ptr, delta_ptr,  # of this head
    b, h, offs_n, first, last, diagonal, N, window, scale,
    D: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, BOXES: tl.constexpr,
    SOFTCAP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The queries from ``first`` to ``last``; masked where a query does not see all of the keys. CUT: the last tile may be cut."""
    unit = 1.0 if SOFTCAP > 0.0 else scale
    for start in range(first, last, BLOCK_M):
        if not PACKED:
            start = tl.multiple_of(start, BLOCK_M)
        offs_m = start + tl.arange(0, BLOCK_M)
        q_tile = _rows(q, b, h, start, N, D, CUT, BOXES, BLOCK_M, BLOCK_D, PACKED)
        # Beyond the last query lse is +inf, so that probabilities there are zero.
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < N, other=float("inf"))
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < N, other=0.0)
        zeros = tl.zeros((k_tile.shape[0], BLOCK_M), ACC)
        scores = dot(k_tile, q_tile.T, zeros, PRECISION)  # (BLOCK_N, BLOCK_M)
        if SOFTCAP > 0.0:
            scores = _capped(scores * scale, SOFTCAP)
        p = tl.math.exp2(scores * unit - lse[None, :])
        if MASKED:
            seen = offs_n[:, None] <= offs_m[None, :] + diagonal
            if WINDOW:
                seen = seen & (offs_n[:, None] > offs_m[None, :] + diagonal - window)
            p = tl.where(seen, p, 0.0)
        do_tile = _rows(do, b, h, start, N, D, CUT, BOXES, BLOCK_M, BLOCK_D, PACKED)
        zeros = tl.zeros((v_tile.shape[0], BLOCK_M), ACC)
        dp = dot(v_tile, do_tile.T, zeros, PRECISION)  # (BLOCK_N, BLOCK_M)
        dv = dot(p.to(do_tile.dtype), do_tile, dv, PRECISION)
        ds = p * (dp - delta[None, :])
        if SOFTCAP > 0.0:
            ds = ds * (1.0 - (scores * (1.0 / SOFTCAP)) * (scores * (1.0 / SOFTCAP)))
        dk = dot(ds.to(q_tile.dtype), q_tile, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section", "sequences", "window"])
def _flash_attention_bwd_dkdv_kernel(
    q,  # (B, H, N, D) queries: Rows or, if BOXES, a descriptor, as k, v and do
    k,  # (B, H / GROUP, S, D) keys
    v,  # (B, H / GROUP, S, D) values
    do,  # (B, H, N, D) gradient of the output
    lse_ptr, delta_ptr,  # (B, H, n_padded) from the forward pass; rowsum(o * do)
    dk_out,  # (B, H / GROUP, S, D)
    dv_out,  # (B, H / GROUP, S, D)
    B, H, N, S, n_padded, section,
    lengths_ptr, stride_lb,  # (B,) keys that exist, if LENGTHS; (sequences + 1,) boundaries, if PACKED
    sequences, window,
    scale,  # with log2(e)
    dk_scale,  # without
    LENGTHS: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, BOXES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid_n, head_kv = _place(tl.program_id(0), tl.cdiv(S, BLOCK_N), B * (H // GROUP), section, False)
    b, h_kv = head_kv // (H // GROUP), head_kv % (H // GROUP)
    start_n = pid_n * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    if PACKED:  # behind the last sequence nothing is read
        length = _boundary(lengths_ptr, stride_lb, sequences, 0, S)
    else:
        length = _length(lengths_ptr, stride_lb, b, S, LENGTHS)
    k_tile = _rows(k, b, h_kv, start_n, length, D, True, BOXES, BLOCK_N, BLOCK_D)
    v_tile = _rows(v, b, h_kv, start_n, length, D, True, BOXES, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D), ACC)

    low, high = 0, 1
    if PACKED:
        low, high = _packed_in(lengths_ptr, stride_lb, sequences, start_n, tl.minimum(start_n + BLOCK_N, S))
    for sequence in range(low, high):
        if PACKED:
            begin, end = _packed(lengths_ptr, stride_lb, sequence, S)
            queries, keys = end - begin, end - begin
            first_query = offs_n if CAUSAL else begin + tl.zeros_like(offs_n)
            first_query = tl.where((offs_n >= begin) & (offs_n < end), first_query, 2**30)  # of other keys beyond all
        else:
            begin, queries, keys, first_query = 0, N, length, offs_n
        first, full, right, last = _seeing(
            start_n - begin, queries, keys, window, CAUSAL, LENGTHS, PACKED, WINDOW, BLOCK_M, BLOCK_N
        )
        for member in range(GROUP):
            h = h_kv * GROUP + member
            rows = (b.to(tl.int64) * H + h) * n_padded
            if CAUSAL or PACKED:
                dk, dv = _flash_attention_bwd_dkdv_steps(
                    dk, dv, k_tile, v_tile, q, do,
                    lse_ptr + rows, delta_ptr + rows, b, h,
                    first_query, begin + first, begin + tl.minimum(full, last), keys - queries, begin + queries, window, scale,
                    D, True, not PACKED, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_M, BLOCK_D,
                )  # fmt: skip
            dk, dv = _flash_attention_bwd_dkdv_steps(
                dk, dv, k_tile, v_tile, q, do,
                lse_ptr + rows, delta_ptr + rows, b, h,
                first_query, begin + full, begin + tl.minimum(right, last), keys - queries, begin + queries, window, scale,
                D, False, not PACKED, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            if WINDOW or PACKED:
                dk, dv = _flash_attention_bwd_dkdv_steps(
                    dk, dv, k_tile, v_tile, q, do,
                    lse_ptr + rows, delta_ptr + rows, b, h,
                    first_query, begin + right, begin + last, keys - queries, begin + queries, window, scale,
                    D, True, True, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_M, BLOCK_D,
                )  # fmt: skip
    if LENGTHS or PACKED:  # keys beyond the length were zeros, not out of sight; NaN may lie behind the last sequence
        there = (offs_n < length)[:, None]
        dk = tl.where(there, dk, 0.0)
        dv = tl.where(there, dv, 0.0)
    _store_rows(dk_out, dk * dk_scale, b, h_kv, start_n, S, D, BLOCK_N, BLOCK_D)
    _store_rows(dv_out, dv, b, h_kv, start_n, S, D, BLOCK_N, BLOCK_D)


@triton.jit
def _flash_attention_bwd_dq_steps(
    dq, q_tile, do_tile,  # (BLOCK_M, BLOCK_D) each
    lse, delta,  # (BLOCK_M,) each
    k, v, b, h_kv, offs_m, first, last, diagonal, S, window, scale,
    D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    BOXES: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys from ``first`` to ``last``; masked where a query does not see all of them."""
    unit = 1.0 if SOFTCAP > 0.0 else scale
    for start in range(first, last, BLOCK_N):
        k_tile = _rows(k, b, h_kv, start, S, D, MASKED, BOXES, BLOCK_N, BLOCK_D, PACKED)
        v_tile = _rows(v, b, h_kv, start, S, D, MASKED, BOXES, BLOCK_N, BLOCK_D, PACKED)
        zeros = tl.zeros((q_tile.shape[0], BLOCK_N), ACC)
        scores = dot(q_tile, k_tile.T, zeros, PRECISION)  # (BLOCK_M, BLOCK_N)
        if SOFTCAP > 0.0:
            scores = _capped(scores * scale, SOFTCAP)
        p = tl.math.exp2(scores * unit - lse[:, None])
        if MASKED:
            offs_n = start + tl.arange(0, BLOCK_N)
            seen = (offs_n < S)[None, :]
            if CAUSAL:
                seen = seen & (offs_n[None, :] <= offs_m[:, None] + diagonal)
            if WINDOW:
                seen = seen & (offs_n[None, :] > offs_m[:, None] + diagonal - window)
            p = tl.where(seen, p, 0.0)
        zeros = tl.zeros((do_tile.shape[0], BLOCK_N), ACC)
        dp = dot(do_tile, v_tile.T, zeros, PRECISION)  # (BLOCK_M, BLOCK_N)
        ds = p * (dp - delta[:, None])
        if SOFTCAP > 0.0:
            ds = ds * (1.0 - (scores * (1.0 / SOFTCAP)) * (scores * (1.0 / SOFTCAP)))
        dq = dot(ds.to(k_tile.dtype), k_tile, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section", "sequences", "window"])
def _flash_attention_bwd_dq_kernel(
    q,  # (B, H, N, D) queries: Rows or, if BOXES, a descriptor, as k, v and do
    k,  # (B, H / GROUP, S, D) keys
    v,  # (B, H / GROUP, S, D) values
    do,  # (B, H, N, D) gradient of the output
    lse_ptr, delta_ptr,  # (B, H, n_padded) from the forward pass; rowsum(o * do)
    dq_out,  # (B, H, N, D)
    B, H, N, S, n_padded, section,
    lengths_ptr, stride_lb,  # (B,) keys that exist, if LENGTHS; (sequences + 1,) boundaries, if PACKED
    sequences, window,
    scale,  # with log2(e)
    dq_scale,  # without
    LENGTHS: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, BOXES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid_m, head = _place(tl.program_id(0), tl.cdiv(N, BLOCK_M), B * H, section, CAUSAL)
    b, h = head // H, head % H
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    rows = head.to(tl.int64) * n_padded
    q_tile = _rows(q, b, h, start_m, N, D, True, BOXES, BLOCK_M, BLOCK_D)
    do_tile = _rows(do, b, h, start_m, N, D, True, BOXES, BLOCK_M, BLOCK_D)
    lse = tl.load(lse_ptr + rows + offs_m, mask=offs_m < N, other=float("inf"))
    delta = tl.load(delta_ptr + rows + offs_m, mask=offs_m < N, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), ACC)

    low, high = 0, 1
    if PACKED:
        low, high = _packed_in(lengths_ptr, stride_lb, sequences, start_m, tl.minimum(start_m + BLOCK_M, N))
    for sequence in range(low, high):
        if PACKED:
            begin, end = _packed(lengths_ptr, stride_lb, sequence, N)
            queries, keys, last_key = end - begin, end - begin, _last_key(offs_m, begin, end, CAUSAL)
        else:
            begin, queries, keys, last_key = 0, N, _length(lengths_ptr, stride_lb, b, S, LENGTHS), offs_m
        first, left, full, last = _visible(
            start_m - begin, queries, keys, window, CAUSAL, WINDOW, PACKED, BLOCK_M, BLOCK_N
        )
        if WINDOW:
            dq = _flash_attention_bwd_dq_steps(
                dq, q_tile, do_tile, lse, delta, k, v,
                b, h // GROUP, last_key, begin + first, begin + tl.minimum(left, last), keys - queries, begin + keys, window, scale,
                D, True, CAUSAL, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        dq = _flash_attention_bwd_dq_steps(
            dq, q_tile, do_tile, lse, delta, k, v,
            b, h // GROUP, last_key, begin + left, begin + full, keys - queries, begin + keys, window, scale,
            D, False, CAUSAL, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        dq = _flash_attention_bwd_dq_steps(
            dq, q_tile, do_tile, lse, delta, k, v,
            b, h // GROUP, last_key, begin + full, begin + last, keys - queries, begin + keys, window, scale,
            D, True, CAUSAL or PACKED, PACKED, WINDOW, BOXES, SOFTCAP, ACC, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    _store_rows(dq_out, dq * dq_scale, b, h, start_m, N, D, BLOCK_M, BLOCK_D)


# --- configurations -------------------------------------------------------------------------------------------------

KERNELS = ("fwd", "dkdv", "dq")
DELTA_CONFIG = triton.Config({"BLOCK_M": 32}, num_warps=4)
DSINKS_CONFIG = triton.Config({"BLOCK_M": 1024}, num_warps=4)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """BLOCK_M queries, BLOCK_N keys."""

    m: int
    n: int
    warps: int
    stages: int


# By kernel and BLOCK_D, for 16 bits an element. On Hopper, where tensor descriptors copy the tiles: the fastest of some 25
# tiles a kernel on an H200, at 4,096 queries.
HOPPER_TILES = {
    "fwd": {
        16: _Tiles(64, 128, 4, 2),
        32: _Tiles(64, 128, 4, 2),
        64: _Tiles(64, 128, 4, 2),
        128: _Tiles(64, 64, 4, 3),
        256: _Tiles(128, 64, 8, 2),
    },
    "dkdv": {
        16: _Tiles(64, 64, 4, 2),
        32: _Tiles(64, 64, 4, 2),
        64: _Tiles(128, 64, 4, 2),
        128: _Tiles(64, 64, 4, 2),
        256: _Tiles(32, 64, 8, 2),
    },
    "dq": {
        16: _Tiles(64, 64, 4, 2),
        32: _Tiles(64, 64, 4, 2),
        64: _Tiles(64, 64, 4, 2),
        128: _Tiles(128, 64, 8, 3),
        256: _Tiles(64, 32, 4, 2),
    },
}
# On Hopper, of dkdv for packed sequences: with 128 queries the loops for what is masked would spill at every step.
PACKED_TILES = {64: _Tiles(64, 64, 4, 2)}
# Elsewhere, and where ordinary loads take registers for addresses and masks: as large as fits into registers.
TILES = {
    "fwd": {
        16: _Tiles(64, 64, 4, 3),
        32: _Tiles(64, 64, 4, 3),
        64: _Tiles(64, 64, 4, 3),
        128: _Tiles(64, 64, 8, 2),
        256: _Tiles(64, 32, 8, 2),
    },
    "dkdv": {
        16: _Tiles(32, 64, 8, 2),
        32: _Tiles(32, 64, 8, 2),
        64: _Tiles(32, 64, 8, 2),
        128: _Tiles(32, 32, 8, 2),
        256: _Tiles(32, 32, 8, 2),
    },
    "dq": {
        16: _Tiles(64, 32, 4, 2),
        32: _Tiles(64, 32, 4, 2),
        64: _Tiles(64, 32, 4, 2),
        128: _Tiles(64, 32, 8, 2),
        256: _Tiles(64, 32, 8, 2),
    },
}
# Without tensor cores each thread holds its rows and columns of both operands, over all features and in float32.
FMA_TILES = {
    "fwd": {
        16: _Tiles(64, 64, 8, 1),
        32: _Tiles(64, 32, 8, 1),
        64: _Tiles(32, 32, 8, 1),
        128: _Tiles(32, 32, 8, 1),
        256: _Tiles(16, 16, 16, 1),
    },
    "dkdv": {
        16: _Tiles(64, 64, 8, 1),
        32: _Tiles(64, 32, 8, 1),
        64: _Tiles(32, 32, 8, 1),
        128: _Tiles(16, 16, 8, 1),
        256: _Tiles(16, 16, 8, 1),
    },
    "dq": {
        16: _Tiles(64, 64, 8, 1),
        32: _Tiles(64, 32, 8, 1),
        64: _Tiles(32, 32, 8, 1),
        128: _Tiles(16, 16, 8, 1),
        256: _Tiles(16, 16, 8, 1),
    },
}


TURNED_BYTES = 2048  # a tile of 16 x 16 scores in float64


def _shared_bytes(kernel: str, tiles: _Tiles, width: int, itemsize: int, amd: bool) -> int:
    """The tiles that a program keeps in shared memory."""
    owned, moved = (tiles.m, tiles.n) if kernel != "dkdv" else (tiles.n, tiles.m)
    kept = {"fwd": 1, "dkdv": 2, "dq": 2}[kernel] * owned
    # A stage is one tile of each operand that the loop reads; AMD's pipeline keeps the newest in registers.
    return (kept + 2 * moved * (tiles.stages - amd)) * width * itemsize


def _has_room(kernel: str, tiles: _Tiles, width: int, itemsize: int, properties: runtime.DeviceProperties) -> bool:
    """Whether tiles that are not pipelined fit into shared memory, with what the compiler turns around beside them."""
    shared = _shared_bytes(kernel, dataclasses.replace(tiles, stages=1), width, itemsize, properties.is_amd)
    return shared + TURNED_BYTES <= properties.shared_memory_per_program


def block_d(d: int) -> int:
    """The width of a tile of rows: the tensor cores take no less than 16."""
    return max(16, triton.next_power_of_2(d))


def config(
    kernel: str, d: int, itemsize: int, boxes: bool, properties: runtime.DeviceProperties, packed: bool = False
) -> triton.Config:
    """The tiles of ``kernel`` (one of :data:`KERNELS`) for head size ``d``, with as many stages as fit."""
    width = block_d(d)
    hopper = boxes and (properties.is_hopper or properties.is_interpreter)
    tiles = (HOPPER_TILES if hopper else TILES if properties.has_tensor_cores else FMA_TILES)[kernel][width]
    if hopper and packed and kernel == "dkdv":
        tiles = PACKED_TILES.get(width, tiles)
    if itemsize > 2:
        # The tensor cores take float32 from registers, three times over where it is to be exact: tiles are small.
        wide = kernel == "fwd" and itemsize == 4 and width <= 64 and boxes
        tiles = _Tiles(64, 32, 8, 2) if wide else _Tiles(16, 16, 4, 2)
        # Of wide heads a program of the backward pass owns 8 rows without tensor cores, where it spills with 16, and in
        # float64 where 16 have no room.
        narrow = {"dkdv": _Tiles(16, 8, 4, 1), "dq": _Tiles(8, 16, 4, 1)}.get(kernel, tiles)
        if itemsize == 4 and not properties.has_tensor_cores:
            tiles = narrow if width > 64 else _Tiles(32, 32, 8, 1)
        elif itemsize == 8 and not _has_room(kernel, tiles, width, itemsize, properties):
            tiles = narrow
            if not _has_room(kernel, tiles, width, itemsize, properties):
                raise ValueError(
                    f"flash_attention: heads of float64 must have at most {width // 2} features on a GPU with "
                    f"{properties.shared_memory_per_program:,} bytes of shared memory a program, got {d}"
                )
    # Ordinary loads that feed the tensor cores and, turned, registers too are not pipelined (see sparse_linear).
    stages = 1 if itemsize > 2 and not boxes else tiles.stages
    while stages > 1:
        tiles = dataclasses.replace(tiles, stages=stages)
        if _shared_bytes(kernel, tiles, width, itemsize, properties.is_amd) <= properties.shared_memory_per_program:
            break
        stages -= 1
    blocks = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_D": width}
    return triton.Config(blocks, num_warps=tiles.warps, num_stages=stages)


def section(length: int, heads: int, d: int, itemsize: int, causal: bool, properties: runtime.DeviceProperties) -> int:
    """How many of ``heads`` heads to work on at a time: the swizzle of the programs.

    Where programs differ in length, many, so that all long programs come first: about as many as have two (length, d)
    tensors in half the L2 cache. All sections are equally large: the long programs of a small one would be left over at the
    end. Where programs are equally long, one head after the other.
    """
    fitting = max(1, properties.l2_bytes // 2 // (2 * length * d * itemsize))
    return -(-heads // max(1, heads // fitting)) if causal else 1
