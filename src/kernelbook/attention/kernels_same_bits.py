"""Attention whose rows are the same bits for any number of queries: keys in parts of PART, at the same places for every row.

A row of the result is summed up in one order: within a part of PART keys as the forward pass in ``kernels.py`` does it, tile
after tile of BLOCK_N keys; then part after part, each joined to those before. Parts and tiles begin at multiples of their
size, whatever sees them. A tile that a row does not see adds exactly nothing, so that it does not matter whether the program
that has the row looks at it for another's sake.

One kernel does for prompts and for decoding, with keys that lie together or in pages; parts of a packed sequence begin where it
does, so that its rows are the bits of the sequence alone. A program owns BLOCK_M rows, the
queries of all heads that share a key head, and walks over the parts. Split, for few queries, each part is a program's,
which leaves its sums in a workspace; the last program of a tile joins them, in the same order with the same operations. So
which of the two is launched does not show in the result, and may depend on what is idle.

Bytes: as in ``kernels_decode.py``, and where keys are split 4 (D + 2) a row and part twice more.

Not handled: gradients, which ``kernels.py`` has; tensor descriptors, that prompts would like.
"""

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention.kernels import _capped, _last_key, _packed, _packed_in, _with_sink, block_d
from kernelbook.attention.kernels_decode import _tile_of
from kernelbook.tiles import dot, is_last_share

# isort: split
import triton
import triton.language as tl

# --- device helpers -------------------------------------------------------------------------------------------------


@triton.jit
def _keys(first_query, stop, diagonal, length, window, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> first, last: the keys from ``first`` to ``last`` are all that some query from ``first_query`` to ``stop`` sees."""
    first, last = 0, length
    if CAUSAL:
        last = tl.maximum(tl.minimum(stop + diagonal, length), 0)
    if window is not None:
        first = tl.maximum(first_query + diagonal - window + 1, 0) // BLOCK_N * BLOCK_N
    return first, last


@triton.jit
def _of_part(
    q,  # (BLOCK_M, BLOCK_D)
    k, v,
    table_ptr,  # of this sequence, if PAGE
    b, h_kv, last_seen,  # (BLOCK_M,) the last key that each row sees
    low, high, P, window, scale,
    D: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """-> acc (BLOCK_M, BLOCK_D), l and m (BLOCK_M,) over the keys from ``low`` to ``high``."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    l = tl.zeros((BLOCK_M,), ACC)
    m = tl.full((BLOCK_M,), float("-inf"), ACC)
    unit = 1.0 if SOFTCAP > 0.0 else scale  # what is left to scale
    for start in range(low, high, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        there = offs_n < high
        page = 0
        if PAGE:
            page = tl.load(table_ptr + offs_n // PAGE, mask=there, other=-1)
            there = there & (page >= 0) & (page < P)
        k_tile = _tile_of(k, b, h_kv, start, high, page, there, D, PAGE, BLOCK_N, BLOCK_D)
        scores = dot(q, k_tile.T, tl.zeros((BLOCK_M, BLOCK_N), ACC), PRECISION)
        if SOFTCAP > 0.0:
            scores = _capped(scores * scale, SOFTCAP)
        seen = there[None, :] & (offs_n[None, :] <= last_seen[:, None])
        if window is not None:
            seen = seen & (offs_n[None, :] > last_seen[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1) * unit)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # where nothing was seen yet: -inf - (-inf) would be NaN
        p = tl.math.exp2(scores * unit - shift[:, None])
        alpha = tl.math.exp2(m - shift)
        l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        m = m_new
        v_tile = _tile_of(v, b, h_kv, start, high, page, there, D, PAGE, BLOCK_N, BLOCK_D)
        acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)
    return acc, l, m


@triton.jit
def _joined(acc, l, m, part_acc, part_l, part_m):
    """What is known of all parts so far, and one more. To nothing (0, 0, -inf) it adds the part as it is."""
    m_new = tl.maximum(m, part_m)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    before, now = tl.math.exp2(m - shift), tl.math.exp2(part_m - shift)
    return acc * before[:, None] + part_acc * now[:, None], l * before + part_l * now, m_new


@triton.jit
def _finish(o_ptrs, o_mask, lse_ptr, sinks_ptr, rows, h, exists, acc, l, m):
    seen = l > 0.0
    acc = acc / tl.where(seen, l, 1.0)[:, None]
    lse = tl.where(seen, m + tl.math.log2(tl.where(seen, l, 1.0)), float("inf"))
    if sinks_ptr is not None:
        share, lse = _with_sink(lse, tl.load(sinks_ptr + h, mask=exists, other=0.0).to(lse.dtype))
        acc = acc * share[:, None]
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, lse, mask=exists)
    tl.store(o_ptrs, acc.to(o_ptrs.dtype.element_ty), mask=o_mask)


# --- the kernel -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["H", "N", "S", "P", "window"])
def _flash_attention_same_bits_kernel(
    q,  # (B, H, N, D) queries, columns contiguous: Rows, as k, v and o
    k,  # (B, H / GROUP, S, D) keys, or (P, H / GROUP, PAGE, D) pages
    v,  # the same of values
    o,  # (B, H, N, D) output, columns contiguous
    lse_ptr,  # (B, H, N) log2 of the sum of exp2(score), +inf where no key is seen, or None
    lengths_ptr,  # (B,) keys that exist, or None: all of them; (P + 1,) boundaries, if PACKED
    table_ptr, stride_tb,  # (B, S / PAGE) pages, columns contiguous, or None
    partial_ptr,  # (tiles, parts, ROWS, D), then twice (tiles, parts, ROWS), or None: a program has all parts of its rows
    semaphores_ptr,  # (tiles,) int32, zero before and after, or None
    H, N, S,
    P,  # pages, or None; sequences, if PACKED
    window,  # a number or None
    scale,  # with log2(e)
    sinks_ptr,  # (H,) logits, or None
    D: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,  # with log2(e); 0: none
    PACKED: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr,  # that are kept of a part
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if q.ptr.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(GROUP * N, BLOCK_M)
    tile, heads = tl.program_id(0), tl.num_programs(0) // blocks
    head = tile % heads
    first_row = (blocks - 1 - tile // heads) * BLOCK_M  # the last queries, which see most, come first
    b, h_kv = head // (H // GROUP), head % (H // GROUP)
    length = S
    if lengths_ptr is not None and not PACKED:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), S).to(tl.int32)
    if PAGE:
        table_ptr += b.to(tl.int64) * stride_tb

    # Row r is query r // GROUP of the group's head r % GROUP.
    offs_r = first_row + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    exists = offs_r < GROUP * N
    h, n = h_kv * GROUP + offs_r % GROUP, offs_r // GROUP
    mask = exists[:, None] & (offs_d < D)[None, :]
    q_ptrs = (q.ptr + b.to(tl.int64) * q.stride_b) + h.to(tl.int64)[:, None] * q.stride_h
    q_ptrs += n.to(tl.int64)[:, None] * q.stride_n + offs_d[None, :]
    q_tile = tl.load(q_ptrs, mask=mask, other=0.0)
    o_ptrs = (o.ptr + b.to(tl.int64) * o.stride_b) + h.to(tl.int64)[:, None] * o.stride_h
    o_ptrs += n.to(tl.int64)[:, None] * o.stride_n + offs_d[None, :]
    every_row = (b.to(tl.int64) * H + h) * N + n

    first_query, stop = first_row // GROUP, (tl.minimum(first_row + BLOCK_M, GROUP * N) - 1) // GROUP + 1
    last_seen = n + length - N if CAUSAL else tl.zeros((BLOCK_M,), tl.int32) + length - 1
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    l = tl.zeros((BLOCK_M,), ACC)
    m = tl.full((BLOCK_M,), float("-inf"), ACC)
    if partial_ptr is None:
        low, high = 0, 1
        if PACKED:
            low, high = _packed_in(lengths_ptr, 1, P, first_query, stop)
        for sequence in range(low, high):
            if PACKED:
                begin, end = _packed(lengths_ptr, 1, sequence, N)
                diagonal, keys, last_key = 0, end - begin, _last_key(n, begin, end, CAUSAL)
            else:
                begin, diagonal, keys, last_key = 0, length - N, length, last_seen
            first, last = _keys(first_query - begin, stop - begin, diagonal, keys, window, CAUSAL, BLOCK_N)
            for part in range(first // PART, tl.cdiv(last, PART)):
                part_acc, part_l, part_m = _of_part(
                    q_tile, k, v, table_ptr, b, h_kv, last_key,
                    begin + tl.maximum(part * PART, first), begin + tl.minimum((part + 1) * PART, last), P, window, scale,
                    D, PAGE, SOFTCAP, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                acc, l, m = _joined(acc, l, m, part_acc, part_l, part_m)
        _finish(o_ptrs, mask, lse_ptr, sinks_ptr, every_row, h, exists, acc, l, m)
    else:
        first, last = _keys(first_query, stop, length - N, length, window, CAUSAL, BLOCK_N)
        first_part, parts = first // PART, tl.cdiv(last, PART)
        part, most = tl.program_id(1), tl.num_programs(1)
        parts = tl.maximum(parts, first_part + 1)  # where nothing is seen one program says so
        if (part >= first_part) & (part < parts):
            part_acc, part_l, part_m = _of_part(
                q_tile, k, v, table_ptr, b, h_kv, last_seen,
                tl.maximum(part * PART, first), tl.minimum((part + 1) * PART, last), P, window, scale,
                D, PAGE, SOFTCAP, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            rows = tl.arange(0, BLOCK_M)
            kept = rows < ROWS
            all_rows = tl.num_programs(0).to(tl.int64) * most * ROWS
            sums_ptrs = partial_ptr + all_rows * D + tile.to(tl.int64) * most * ROWS + rows
            acc_ptrs = partial_ptr + (tile.to(tl.int64) * most * ROWS + rows)[:, None] * D + offs_d[None, :]
            acc_mask = kept[:, None] & (offs_d < D)[None, :]
            tl.store(acc_ptrs + part * ROWS * D, part_acc, mask=acc_mask)
            tl.store(sums_ptrs + part * ROWS, part_l, mask=kept)
            tl.store(sums_ptrs + all_rows + part * ROWS, part_m, mask=kept)
            if is_last_share(semaphores_ptr + tile, parts - first_part):
                # ".cg": from the L2 cache, where the other programs' stores are; this SM's own cache may be stale.
                for other in range(first_part, parts):
                    part_acc = tl.load(acc_ptrs + other * ROWS * D, mask=acc_mask, other=0.0, cache_modifier=".cg")
                    part_l = tl.load(sums_ptrs + other * ROWS, mask=kept, other=0.0, cache_modifier=".cg")
                    part_m = tl.load(
                        sums_ptrs + all_rows + other * ROWS, mask=kept, other=float("-inf"), cache_modifier=".cg"
                    )
                    acc, l, m = _joined(acc, l, m, part_acc, part_l, part_m)
                _finish(o_ptrs, mask, lse_ptr, sinks_ptr, every_row, h, exists, acc, l, m)


# --- configurations -------------------------------------------------------------------------------------------------

PART = 256  # keys; a multiple of every BLOCK_N


def config(d: int, itemsize: int, properties: runtime.DeviceProperties) -> triton.Config:
    """The tiles for heads of ``d`` features: 64 rows, as one instruction of Hopper's tensor cores takes, also for one query."""
    width = block_d(d)
    if itemsize > 2:
        return triton.Config({"PART": PART, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": width}, num_warps=4, num_stages=1)
    if not properties.has_tensor_cores:
        side = 32 if width <= 128 else 16
        blocks = {"PART": PART, "BLOCK_M": side, "BLOCK_N": side, "BLOCK_D": width}
        return triton.Config(blocks, num_warps=8 if width <= 128 else 16, num_stages=1)
    # Two sets of sums take registers. Hopper has most left: its tensor cores read keys and values from shared memory.
    wide = properties.is_hopper or properties.is_interpreter
    blocks = {"PART": PART, "BLOCK_M": 64, "BLOCK_N": 64 if wide and width <= 128 else 32, "BLOCK_D": width}
    return triton.Config(blocks, num_warps=4 if width <= (128 if wide else 64) else 8, num_stages=2)


def splits(tiles: int, queries: int, keys: int, properties: runtime.DeviceProperties) -> bool:
    """Whether each part has a program: for a few queries that leave multiprocessors idle."""
    return queries <= 16 and keys > PART and tiles <= 2 * properties.num_sms
