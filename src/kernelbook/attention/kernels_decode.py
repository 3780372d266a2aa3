"""Attention for a few queries: the keys of one head are split over programs (split-K), which merge what they found.

One query does 4 S D operations on 4 S D bytes of keys and values (16 bits): memory decides. A program owns a tile of
rows, the N queries of all GROUP heads that share one key head, so that each key is read once, and walks over its split of
the keys as the forward pass in ``kernels.py`` does. There are as many splits as fill the GPU's multiprocessors once.

Each program leaves o and lse of its split in a float32 workspace and adds one to the tile's counter, a semaphore. The last
program of a tile merges all splits in their order, so that results are bitwise reproducible, writes the tile, and puts the
counter back to zero for the next launch. Splits are equal parts of the keys that a sequence has (``lengths``, read by the
kernel), not of those that it has room for: one without keys ends at once and is not waited for.

With PAGE, keys and values lie in pages of PAGE slots anywhere in a pool, and a table names each sequence's pages. Pages
that are not in the pool count as keys that nobody sees; they are never read.

Bytes: the visible keys and values once; q, o, and twice 4 (D + 1) a row and split.

Where that leaves multiprocessors idle, or much to merge, two or four programs have the same split: each takes all of its
scores, and its own columns of the values.

Not handled: more rows than fit one tile read the keys again (from the L2 cache, if all goes well); no gradients.
"""

import dataclasses
import functools

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention.kernels import Rows, _capped, _rows, _with_sink, block_d
from kernelbook.tiles import dot, is_last_share

# isort: split
import triton
import triton.language as tl

# --- device helpers -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The constants that a plan decides, as one argument of the kernel."""

    PRECISION: str
    PAGE: int  # slots of a page; 0: keys and values lie together
    Q_LATE: bool  # whether queries are asked for with the keys
    PIECES: int  # so many programs compute columns of one result
    ROWS: int  # that a split keeps
    LISTED: int  # pages whose numbers are held at a time
    WHOLE: bool  # whether these are all pages of a sequence
    NUM_SPLITS: int  # rounded up
    MERGED: int  # splits that are merged at a time, in registers; 1: one after the other
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    STAGES: int

    def mangle(self) -> str:
        """Its part of the name of a device function that takes it."""
        return "_".join(map(str, dataclasses.astuple(self)))


@triton.jit
def _tile_of(
    x, b, h, start, high,
    page, there,  # (BLOCK_N,) each, if PAGE: the page of each key, and whether there is one
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys (or values) from ``start`` on: (BLOCK_N, BLOCK_D), zeros from ``high`` on and where there is none."""
    if PAGE:
        offs_d = tl.arange(0, BLOCK_D)
        slot = (start + tl.arange(0, BLOCK_N)) % PAGE
        ptrs = (x.ptr + h.to(tl.int64) * x.stride_h) + page.to(tl.int64)[:, None] * x.stride_b
        ptrs += slot.to(tl.int64)[:, None] * x.stride_n + offs_d.to(tl.int64)[None, :] * x.stride_d
        mask = there[:, None]
        if D != BLOCK_D:
            mask = mask & (offs_d < D)[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    else:
        tile = _rows(x, b, h, start, high, D, True, False, BLOCK_N, BLOCK_D)
    return tile


@triton.jit
def _listed(table_ptr, stride_tb, b, first, last, P, LISTED: tl.constexpr):
    """The numbers of LISTED pages of sequence ``b`` from ``first`` on: -1 from ``last`` on, and of what is no page."""
    offs_p = first + tl.arange(0, LISTED)
    listed = tl.load(table_ptr + b.to(tl.int64) * stride_tb + offs_p, mask=offs_p < last, other=-1)
    return tl.where((listed >= 0) & (listed < P), listed, -1).to(tl.int32)


@triton.jit
def _decode_steps(
    acc, l, m, q,  # (BLOCK_M, columns), (BLOCK_M,) or (BLOCK_M, BLOCK_N), (BLOCK_M,), (BLOCK_M, BLOCK_D) unless Q_LATE
    q_ptrs, q_mask,  # (BLOCK_M, BLOCK_D)
    k, v, b, h_kv, last_seen,  # (BLOCK_M,) the last key that each row sees
    listed, first_page,  # (LISTED,) pages from ``first_page`` on, -1 where there is none, if PAGE
    low, high, window, scale,
    D: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The keys from ``low`` to ``high``."""
    PRECISION: tl.constexpr = HOW.PRECISION
    PAGE: tl.constexpr = HOW.PAGE
    BLOCK_N: tl.constexpr = HOW.BLOCK_N
    BLOCK_D: tl.constexpr = HOW.BLOCK_D
    BLOCK_V: tl.constexpr = BLOCK_D // HOW.PIECES
    WIDTH: tl.constexpr = D if HOW.PIECES == 1 else BLOCK_V
    unit = 1.0 if SOFTCAP > 0.0 else scale  # what is left to scale
    for start in tl.range(low, high, BLOCK_N, num_stages=HOW.STAGES):
        offs_n = start + tl.arange(0, BLOCK_N)
        there = offs_n < high
        page = 0
        if PAGE:
            # The pipeline looks ahead beyond the last step, and a gather reads without a mask.
            page = tl.gather(listed, tl.minimum(offs_n // PAGE - first_page, HOW.LISTED - 1), 0)
            there = there & (page >= 0)
        k_tile = _tile_of(k, b, h_kv, start, high, page, there, D, PAGE, BLOCK_N, BLOCK_D)
        if HOW.Q_LATE:
            # The compiler would take a load that is the same in all steps out of the loop, and wait for it before it
            # asks for the first keys. (No key has a negative index.)
            q_tile = tl.load(q_ptrs + ((start + tl.zeros((), tl.int64)) >> 31) * k.stride_n, mask=q_mask, other=0.0)
        else:
            q_tile = q
        scores = dot(q_tile, k_tile.T, tl.zeros((acc.shape[0], BLOCK_N), acc.dtype), PRECISION)  # (BLOCK_M, BLOCK_N)
        if SOFTCAP > 0.0:
            scores = _capped(scores * scale, SOFTCAP)
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= last_seen[:, None])
        if window is not None:
            seen = seen & (offs_n[None, :] > last_seen[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1) * unit)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # where nothing was seen yet: -inf - (-inf) would be NaN
        p = tl.math.exp2(scores * unit - shift[:, None])
        alpha = tl.math.exp2(m - shift)
        if len(l.shape) == 2:  # the rows' sums would take warps that wait for each other in every step
            l = l * alpha[:, None] + p
        else:
            l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        m = m_new
        v_tile = _tile_of(v, b, h_kv, start, high, page, there, WIDTH, PAGE, BLOCK_N, BLOCK_V)
        acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)
    return acc, l, m


@triton.jit
def _store_output(
    o, lse_ptr, sinks_ptr, acc, lse,  # (rows, columns), (rows,)
    b, h_kv, first_row, H, N, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows of a group from ``first_row`` on: row r is query r % N of the group's head r // N."""
    offs_r = first_row + tl.arange(0, acc.shape[0])
    offs_d = tl.arange(0, acc.shape[1])
    exists = offs_r < GROUP * N
    h = h_kv * GROUP + offs_r // N
    n = offs_r % N
    if sinks_ptr is not None:
        share, lse = _with_sink(lse, tl.load(sinks_ptr + h, mask=exists, other=0.0).to(lse.dtype))
        acc = acc * share[:, None]
    if lse_ptr is not None:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        tl.store(lse_ptr + (b.to(tl.int64) * H + h) * N + n, lse, mask=exists)
    ptrs = (o.ptr + b.to(tl.int64) * o.stride_b) + h.to(tl.int64)[:, None] * o.stride_h
    ptrs += n.to(tl.int64)[:, None] * o.stride_n + offs_d[None, :]
    tl.store(ptrs, acc.to(o.ptr.dtype.element_ty), mask=exists[:, None] & (offs_d < WIDTH)[None, :])


@triton.jit
def _shares(
    partial_ptr, partial_lse_ptr, first, used, splits,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """-> o (MERGED, ROWS, BLOCK_D) and lse (ROWS, MERGED) of the splits from ``first`` on.

    ".cg": from the L2 cache, where the other programs' stores are; this SM's own cache may be stale.
    """
    offs_s, offs_r, offs_d = first + tl.arange(0, MERGED), tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    rows = offs_s[:, None] * ROWS + offs_r[None, :]
    mask = (offs_s < used)[:, None]
    parts = tl.load(
        partial_ptr + rows[:, :, None] * D + offs_d[None, None, :],
        mask=mask[:, :, None] & (offs_d < D)[None, None, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return parts, _lse_of_splits(partial_lse_ptr, first, used, splits, ROWS, MERGED)


@triton.jit
def _lse_of_splits(partial_lse_ptr, first, used, splits, ROWS: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """(ROWS, NUM_SPLITS), as they lie: a row's splits are one warp's, whose threads need no shared memory to compare them."""
    offs_r, offs_s = tl.arange(0, ROWS), first + tl.arange(0, NUM_SPLITS)
    ptrs = partial_lse_ptr + offs_r[:, None] * splits + offs_s[None, :]
    return tl.load(ptrs, mask=(offs_s < used)[None, :], other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _merged(
    partial_ptr, partial_lse_ptr,  # (splits, ROWS, D), (ROWS, splits): of this tile
    used, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """-> o (ROWS, BLOCK_D) and lse (ROWS,) over all splits, always in the same order.

    Few rows: MERGED splits at a time, in registers. Many: one after the other, in a pipeline through the memory in which
    the keys lay, since registers would hold too little of what is on its way.
    """
    ROWS: tl.constexpr = HOW.ROWS
    NUM_SPLITS: tl.constexpr = HOW.NUM_SPLITS
    MERGED: tl.constexpr = HOW.MERGED
    ACC: tl.constexpr = partial_ptr.dtype.element_ty
    if MERGED > 1:
        # The first splits are on their way while the logarithms of all are looked at.
        parts, lse = _shares(partial_ptr, partial_lse_ptr, 0, used, splits, D, ROWS, BLOCK_D, MERGED)
        every_lse = lse
        if NUM_SPLITS > MERGED:
            every_lse = _lse_of_splits(partial_lse_ptr, 0, used, splits, ROWS, NUM_SPLITS)
        m = tl.max(every_lse, axis=1)
        shift = tl.where(m == float("-inf"), 0.0, m)
        l = tl.sum(tl.math.exp2(every_lse - shift[:, None]), axis=1)
        acc = tl.sum(tl.trans(tl.math.exp2(lse - shift[:, None]))[:, :, None] * parts, axis=0)
        if NUM_SPLITS > MERGED:
            for first in tl.range(MERGED, used, MERGED):
                parts, lse = _shares(partial_ptr, partial_lse_ptr, first, used, splits, D, ROWS, BLOCK_D, MERGED)
                acc += tl.sum(tl.trans(tl.math.exp2(lse - shift[:, None]))[:, :, None] * parts, axis=0)
    else:
        offs_r, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        acc = tl.zeros((ROWS, BLOCK_D), ACC)
        l = tl.zeros((ROWS,), ACC)
        m = tl.full((ROWS,), float("-inf"), ACC)
        for share in tl.range(0, used, num_stages=4):
            rows = share * ROWS + offs_r
            ptrs = partial_ptr + rows[:, None] * D + offs_d[None, :]
            part = tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0, cache_modifier=".cg")
            lse = tl.load(partial_lse_ptr + offs_r * splits + share, cache_modifier=".cg")
            m_new = tl.maximum(m, lse)
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha, weight = tl.math.exp2(m - shift), tl.math.exp2(lse - shift)
            l = l * alpha + weight
            acc = acc * alpha[:, None] + weight[:, None] * part
            m = m_new
    seen = l > 0.0
    l = tl.where(seen, l, 1.0)
    return acc * (1.0 / l)[:, None], tl.where(seen, m + tl.math.log2(l), float("-inf"))


# --- kernels --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["H", "S", "P", "window"])  # N: one query needs no division
def _flash_attention_decode_kernel(
    q,  # (B, H, N, D) queries, columns contiguous: Rows, as k, v and o
    k,  # (B, H / GROUP, S, D) keys, or (P, H / GROUP, PAGE, D) pages
    v,  # the same of values
    o,  # (B, H, N, D) output, columns contiguous
    lse_ptr,  # (B, H, N) log2 of the sum of exp2(score), +inf where no key is seen, or None
    lengths_ptr,  # (B,) keys that exist, or None: all of them
    table_ptr, stride_tb,  # (B, S / PAGE) pages, columns contiguous, or None
    partial_ptr,  # (tiles, splits, ROWS, D / PIECES) and then (tiles, ROWS, splits), or None: keys are not split
    semaphores_ptr,  # (tiles,) int32, zero before and after, or None
    H, N, S,
    P, window,  # each a number or None
    scale,  # with log2(e)
    sinks_ptr,  # (H,) logits, or None
    D: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,  # with log2(e); 0: none
    HOW: tl.constexpr,  # Tiles
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if q.ptr.dtype.element_ty == tl.float64 else tl.float32
    PAGE: tl.constexpr = HOW.PAGE
    LISTED: tl.constexpr = HOW.LISTED
    BLOCK_M: tl.constexpr = HOW.BLOCK_M
    BLOCK_N: tl.constexpr = HOW.BLOCK_N
    BLOCK_V: tl.constexpr = HOW.BLOCK_D // HOW.PIECES
    WIDTH: tl.constexpr = D if HOW.PIECES == 1 else BLOCK_V
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    group, piece = tile // HOW.PIECES, tile % HOW.PIECES
    blocks = tl.cdiv(GROUP * N, BLOCK_M)
    head, first_row = group // blocks, group % blocks * BLOCK_M
    b, h_kv = head // (H // GROUP), head % (H // GROUP)
    v_ptr, o_ptr = v.ptr + piece.to(tl.int64) * BLOCK_V * v.stride_d, o.ptr + piece.to(tl.int64) * BLOCK_V
    v = Rows(v_ptr, v.stride_b, v.stride_h, v.stride_n, v.stride_d)
    o = Rows(o_ptr, o.stride_b, o.stride_h, o.stride_n, o.stride_d)
    every_page = 0
    if HOW.WHOLE:
        every_page = _listed(table_ptr, stride_tb, b, 0, S // PAGE, P, LISTED)
    length = S
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), S).to(tl.int32)

    # Asked for before anything waits for the length; where nothing does, the keys would wait for it.
    offs_r = first_row + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HOW.BLOCK_D)
    query = offs_r % N
    q_ptrs = (q.ptr + b.to(tl.int64) * q.stride_b) + (h_kv * GROUP + offs_r // N).to(tl.int64)[:, None] * q.stride_h
    q_ptrs += query.to(tl.int64)[:, None] * q.stride_n + offs_d[None, :]
    q_mask = (offs_r < GROUP * N)[:, None] & (offs_d < D)[None, :]
    q_tile = 0
    if not HOW.Q_LATE:
        q_tile = tl.load(q_ptrs, mask=q_mask, other=0.0)

    # Tiles of keys from the first one that the first query sees; the same number to each share.
    first = 0
    if window is not None:
        first = tl.maximum(length - N - window + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(length - first, BLOCK_N), splits) * BLOCK_N
    low = first + split * share
    high = tl.minimum(low + share, length)

    if (split == 0) | (low < length):
        last_seen = length - N + query
        acc = tl.zeros((BLOCK_M, BLOCK_V), ACC)
        # Tiles of fewer than 64 rows lie across the warps, in which a row's sum is kept in parts.
        l = tl.zeros((BLOCK_M, BLOCK_N) if BLOCK_M < 64 else (BLOCK_M,), ACC)
        m = tl.full((BLOCK_M,), float("-inf"), ACC)
        if PAGE and not HOW.WHOLE:
            # A page's number loaded in the step that needs it would make the step wait for all copies that are under
            # way: numbers come LISTED at a time, and each step picks its own.
            for page in tl.range(low // PAGE, tl.cdiv(high, PAGE), LISTED, num_stages=1):
                listed = _listed(table_ptr, stride_tb, b, page, tl.cdiv(high, PAGE), P, LISTED)
                acc, l, m = _decode_steps(
                    acc, l, m, q_tile, q_ptrs, q_mask, k, v, b, h_kv, last_seen, listed, page,
                    tl.maximum(page * PAGE, low), tl.minimum((page + LISTED) * PAGE, high), window, scale,
                    D, CAUSAL, SOFTCAP, HOW,
                )  # fmt: skip
        else:
            acc, l, m = _decode_steps(
                acc, l, m, q_tile, q_ptrs, q_mask, k, v, b, h_kv, last_seen, every_page, 0, low, high, window, scale,
                D, CAUSAL, SOFTCAP, HOW,
            )  # fmt: skip
        if BLOCK_M < 64:
            l = tl.sum(l, axis=1)
        seen = l > 0.0
        l = tl.where(seen, l, 1.0)
        acc = acc * (1.0 / l)[:, None]
        lse = tl.where(seen, m + tl.math.log2(l), float("-inf"))

        if partial_ptr is None:
            _store_output(o, lse_ptr, sinks_ptr, acc, lse, b, h_kv, first_row, H, N, WIDTH, GROUP)
        else:
            ROWS: tl.constexpr = HOW.ROWS
            partial_lse_ptr = partial_ptr + tl.num_programs(0).to(tl.int64) * splits * (ROWS * WIDTH)
            partial_ptr += tile.to(tl.int64) * splits * (ROWS * WIDTH)
            partial_lse_ptr += tile.to(tl.int64) * splits * ROWS
            rows = tl.arange(0, BLOCK_M)
            within = split * ROWS + rows
            used = tl.maximum(tl.cdiv(length - first, tl.maximum(share, 1)), 1)
            tl.store(partial_lse_ptr + rows * splits + split, lse, mask=rows < ROWS)
            offs_v = tl.arange(0, BLOCK_V)
            tl.store(
                partial_ptr + within[:, None] * WIDTH + offs_v[None, :], acc,
                mask=(rows < ROWS)[:, None] & (offs_v < WIDTH)[None, :],
            )  # fmt: skip
            if is_last_share(semaphores_ptr + tile, used):
                merged, merged_lse = _merged(partial_ptr, partial_lse_ptr, used, splits, WIDTH, BLOCK_V, HOW)
                _store_output(o, lse_ptr, sinks_ptr, merged, merged_lse, b, h_kv, first_row, H, N, WIDTH, GROUP)


@triton.jit(do_not_specialize=["H_kv", "N", "S", "P"])
def _append_to_pages_kernel(
    k, v,  # (B, H_kv, N, D) new keys and values: Rows, as the pages
    k_pages, v_pages,  # (P, H_kv, PAGE, D)
    table_ptr, stride_tb, stride_tp,  # (B, S / PAGE) pages
    lengths_ptr, stride_lb,  # (B,) keys that exist before
    H_kv, N, S, P,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program moves BLOCK_R of a sequence's H_kv N rows. What has no room, or no page in the pool, is not written."""
    blocks = tl.cdiv(H_kv * N, BLOCK_R)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    offs_r = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    h, n = (offs_r // N).to(tl.int64), (offs_r % N).to(tl.int64)
    position = tl.load(lengths_ptr + b * stride_lb).to(tl.int64) + n
    mask = (offs_r < H_kv * N) & (position >= 0) & (position < S)
    page = tl.load(table_ptr + b * stride_tb + position // PAGE * stride_tp, mask=mask, other=-1).to(tl.int64)
    mask = (mask & (page >= 0) & (page < P))[:, None] & (offs_d < D)[None, :]
    slot = position % PAGE
    k_ptrs = k.ptr + b * k.stride_b + (h * k.stride_h + n * k.stride_n)[:, None] + offs_d[None, :] * k.stride_d
    v_ptrs = v.ptr + b * v.stride_b + (h * v.stride_h + n * v.stride_n)[:, None] + offs_d[None, :] * v.stride_d
    k_rows = tl.load(k_ptrs, mask=mask, other=0.0)
    v_rows = tl.load(v_ptrs, mask=mask, other=0.0)
    k_out = k_pages.ptr + (page * k_pages.stride_b + h * k_pages.stride_h + slot * k_pages.stride_n)[:, None]
    v_out = v_pages.ptr + (page * v_pages.stride_b + h * v_pages.stride_h + slot * v_pages.stride_n)[:, None]
    tl.store(k_out + offs_d[None, :] * k_pages.stride_d, k_rows, mask=mask)
    tl.store(v_out + offs_d[None, :] * v_pages.stride_d, v_rows, mask=mask)


# --- configurations -------------------------------------------------------------------------------------------------

MAX_QUERIES = 16
APPEND_CONFIG = triton.Config({"BLOCK_R": 16}, num_warps=4)
MAX_LISTED = 512  # pages whose numbers are held at a time
MERGE_REGISTERS = 128  # of a thread, for splits on their way
# What a launch takes, in microseconds on an H200. Ratios decide, which are much the same on other GPUs.
ALL_READ = 1.0  # until every multiprocessor has read 32 kB
ONE_READS = 0.8  # until one of them has, alone, for each of its programs
START = 1.5  # of a program
MERGE = 2.0  # of a tile's splits, and for each 64 kB of them:
HELD, PIPED = 3.5, 1.0  # where they are merged in registers, and in a pipeline


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of BLOCK_M rows and BLOCK_N keys, and over how many programs a tile's keys are split."""

    config: triton.Config
    tiles: int
    splits: int
    rows: int

    @property
    def programs(self) -> int:
        return self.tiles * self.splits


def _tiles(
    heads: int, rows: int, d: int, itemsize: int, paged: bool, properties: runtime.DeviceProperties
) -> tuple[triton.Config, int]:
    """-> the tiles, and how many programs a multiprocessor is given.

    Memory decides, so that what counts is the bytes under way: the best of some seven tiles a shape on an H200. Few
    queries are asked for with the keys, where there is shared memory for a copy of them beside each tile that is under way.
    """
    width = block_d(d)
    if itemsize == 2 and not properties.has_tensor_cores:  # a thread holds its rows and columns of both operands
        blocks = {"BLOCK_M": 16, "BLOCK_N": 32 if width <= 64 else 16, "BLOCK_D": width, "PIECES": 1}
        warps = 16 if width > 128 and not paged else 8
        return triton.Config({**blocks, "Q_LATE": False, "STAGES": 1}, num_warps=warps, num_stages=1), 2
    if itemsize > 2:  # takes each operand into registers three times over
        block_m, block_n, stages = 16, max(16, min(32, 16384 // (width * itemsize))), 4
    elif rows <= 32:
        block_m, block_n, stages = max(16, triton.next_power_of_2(rows)), min(128, 8192 // width), 4
        if paged and block_n < 128 and heads >= 0.75 * properties.num_sms:
            block_n, stages = 2 * block_n, 3  # to look pages up costs the same for a larger tile
    else:
        block_m, block_n, stages = 64, min(64, 8192 // width), 3
    # wgmma, for tiles of 64 rows, reads a stage where it lies; mma.sync has its operands in registers by then.
    spare = 0 if block_m == 64 else 1

    late = not paged and itemsize == 2 and block_m == 16 and width <= 128

    def shared() -> int:
        return (2 * block_n * (stages - spare) + block_m * (stages - 1 if late else 1)) * width * itemsize

    while stages > 1 and shared() > properties.shared_memory_per_program - 2048:
        if stages == 3 and block_n > 16:
            block_n //= 2
        else:
            stages -= 1
    warps = 8 if block_m * width * (itemsize // 2) ** 2 > 8192 else 4
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": width, "PIECES": 1, "Q_LATE": late, "STAGES": stages}
    per_sm = 2 if 2 * (shared() + 1024) <= properties.shared_memory_per_sm else 1
    return triton.Config(blocks, num_warps=warps, num_stages=stages), per_sm


@dataclasses.dataclass(frozen=True)
class _Work:
    """Tiles of queries, each with so many steps of keys; what a step reads, and a split leaves; how splits are merged."""

    tiles: int
    steps: int
    step_bytes: int
    split_bytes: int
    in_registers: bool

    def microseconds(self, splits: int, per_sm: int, num_sms: int) -> float:
        """Programs come in waves, ``per_sm`` to a multiprocessor; in the last wave some multiprocessors may have fewer."""
        waves, rest = divmod(self.tiles * splits, num_sms * per_sm)
        reads = -(-self.steps // splits) * self.step_bytes / 32768  # of each program
        spent = waves * (reads * per_sm * ALL_READ + START)
        if rest:
            # Few programs read as fast as a multiprocessor can, many as fast as the memory gives.
            spent += reads * max(-(-rest // num_sms) * ONE_READS, rest / num_sms * ALL_READ) + START
        if splits == 1:
            return spent
        merged = triton.next_power_of_2(splits) * HELD if self.in_registers else splits * PIPED
        return spent + MERGE + merged * self.split_bytes / 65536


@functools.lru_cache(maxsize=4096)
def _splits(work: _Work, per_sm: int, num_sms: int) -> tuple[float, int]:
    """-> microseconds, and the number of splits that ends first."""
    most = max(1, min(work.steps, num_sms * per_sm))
    return min((work.microseconds(splits, per_sm, num_sms), splits) for splits in range(1, most + 1))


def _merged_at_a_time(rows: int, config: triton.Config) -> int:
    """How many splits of few rows there are registers for; 1 where there are many rows."""
    stored = min(config.kwargs["BLOCK_M"], triton.next_power_of_2(rows))
    width = config.kwargs["BLOCK_D"] // config.kwargs["PIECES"]
    return max(1, MERGE_REGISTERS * 32 * config.num_warps // (stored * width)) if stored <= 8 else 1


def _pieces(tiles: int, stored: int, width: int, d: int, num_sms: int) -> list[int]:
    """Into how many pieces of its columns a few rows' result may be cut, where multiprocessors would idle.

    Each piece is a program's that reads all keys, from the L2 cache but for the first, and its own columns of the values:
    less for a program to read, and much less to merge.
    """
    cut = width == d and stored <= 8
    most = min(num_sms // (2 * tiles), width // 32) if cut else 1
    return [1, *(pieces for pieces in (2, 4) if pieces <= most)]


def tiles_and_splits(
    heads: int, rows: int, keys: int, d: int, itemsize: int, page: int, properties: runtime.DeviceProperties
) -> tuple[triton.Config, int]:
    """The tiles, and over how many programs the keys of one are split."""
    config, per_sm = _tiles(heads, rows, d, itemsize, page > 0, properties)
    block_m, block_n, width = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    tiles, stored = heads * -(-rows // block_m), min(block_m, triton.next_power_of_2(rows))
    found = []
    for pieces in _pieces(tiles, stored, width, d, properties.num_sms):
        divided = triton.Config({**config.kwargs, "PIECES": pieces}, config.num_warps, config.num_stages)
        work = _Work(
            tiles * pieces, -(-keys // block_n), (1 + pieces) * block_n * width * itemsize // pieces,
            stored * width * max(4, itemsize) // pieces, stored <= 8,
        )  # fmt: skip
        time, splits = _splits(work, per_sm, properties.num_sms)
        found.append((time, pieces, divided, splits))
    _, _, divided, splits = min(found, key=lambda choice: choice[:2])
    return divided, splits


def plan(
    heads: int, rows: int, keys: int, d: int, itemsize: int, properties: runtime.DeviceProperties, page: int = 0
) -> Plan:
    """For ``heads`` key heads over all sequences with room for ``keys`` keys, each read by ``rows`` queries."""
    config, splits = tiles_and_splits(heads, rows, keys, d, itemsize, page, properties)
    block_m, pieces = config.kwargs["BLOCK_M"], config.kwargs["PIECES"]
    tiles, stored = heads * -(-rows // block_m) * pieces, min(block_m, triton.next_power_of_2(rows))
    listed, pages = 1, -(-keys // page) if page else 0
    if page:  # all pages of a sequence, or a split's at a time, if there are not too many
        listed = max(128, triton.next_power_of_2(pages))
        if listed > MAX_LISTED:
            listed = min(MAX_LISTED, max(128, triton.next_power_of_2(-(-pages // splits))))
    blocks = {
        **config.kwargs,
        "ROWS": stored,
        "NUM_SPLITS": triton.next_power_of_2(splits) if _merged_at_a_time(rows, config) > 1 else 1,
        "MERGED": min(triton.next_power_of_2(splits), _merged_at_a_time(rows, config)),
        "LISTED": listed,
        "WHOLE": 0 < pages <= listed,
    }
    whole = triton.Config(blocks, num_warps=config.num_warps, num_stages=config.num_stages)
    return Plan(whole, tiles, splits, stored)
