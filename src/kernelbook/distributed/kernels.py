"""What happens to tokens between the all-to-alls of :mod:`kernelbook.distributed.exchange`: where they go, copies, sums.

A token goes to a rank once. What travels is a *message*: a row of H elements, then its k weights, its k local expert ids and
the number of its first pair, each part from a multiple of 16 bytes on. Where it arrives it becomes a row for each of its
experts there, a *pair*.

    places    one program a rank: which tokens go there, in which order, and how many pairs they make; reads T k ids
    send      one program a token: its message, once for each rank that it visits; or an item: its row to each of its places
    arrive    one program a message: a row, a weight and an id for each of its pairs
    combine   one program an item: the sum of its rows; with weights their gradients travel along

and between ranks that share memory (:mod:`kernelbook.distributed.windows`), where a row's place is known to its sender:

    put       one program a token: its row, weights and ids, into the memory of each rank that it visits
    copy      one program for each row that may have come: out of this rank's window; nothing came: zeros, and no expert;
              or its result, into the window of the rank that it came from

Copies are of integers, whatever they stand for. Sums are in the order of places, the same bits every time.
Not handled: rows that are not contiguous.
"""

from kernelbook import runtime  # noqa: F401  first: it sets up Triton

# isort: split
import triton
import triton.language as tl

__all__ = ["BLOCK_H", "WARPS"]

BLOCK_H, WARPS = 2048, 4


@triton.jit(do_not_specialize=["T", "E", "share", "own", "capacity"])
def _places_kernel(
    ids_ptr,  # (T, k) expert ids, contiguous
    places_ptr,  # (T, n) out: rank * capacity + which row for that rank the token is, or -1
    firsts_ptr,  # (T, n) out: how many pairs come before its own there
    counts_ptr,  # (n, 2) out: rows and pairs for each rank
    windows_ptr,  # (n,) int64, if SHARED: where the ranks' windows begin, with counts by source, which this rank is as own
    T, E, share, own, capacity,
    SHARED: tl.constexpr, k: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rank, ranks = tl.program_id(0), tl.num_programs(0)
    low = rank * share
    high = tl.minimum(low + share, E)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    rows = 0
    pairs = 0
    for start in range(0, T, BLOCK_T):
        offs_t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (offs_t < T)[:, None] & (offs_k < k)
        ids = tl.load(ids_ptr + offs_t[:, None] * k + offs_k, mask=mask, other=-1)
        here = tl.sum(((ids >= low) & (ids < high)).to(tl.int32), axis=1)
        goes = (here > 0).to(tl.int32)
        place = rows + tl.cumsum(goes, axis=0) - goes
        first = pairs + tl.cumsum(here, axis=0) - here
        out = offs_t * ranks + rank
        tl.store(places_ptr + out, tl.where(goes > 0, rank * capacity + place, -1), mask=offs_t < T)
        if not SHARED:
            tl.store(firsts_ptr + out, first, mask=offs_t < T)
        rows += tl.sum(goes, axis=0)
        pairs += tl.sum(here, axis=0)
    if SHARED:
        tl.store(tl.load(windows_ptr + rank).to(tl.pointer_type(tl.int32)) + own, rows)
    else:
        tl.store(counts_ptr + rank * 2, rows)
        tl.store(counts_ptr + rank * 2 + 1, pairs)


@triton.jit(do_not_specialize=["E", "share", "width"])
def _send_kernel(
    x_ptr,  # (T, H)
    gates_ptr, ids_ptr,  # (T, k), if HAS_IDS
    places_ptr,  # (T, width) rows where a token goes, or -1; if HAS_IDS a column a rank, counted from its first
    firsts_ptr, counts_ptr,  # of _places_kernel, if HAS_IDS
    message_ptr,  # (T, n) out, if HAS_IDS: row of the message, or -1; not written over places, which other warps may still read
    rows_ptr, stride_r,  # (rows, H)
    weights_ptr, stride_w, locals_ptr, stride_l,  # the message's other parts, if HAS_IDS; firsts behind the ids
    E, share, width, H,
    HAS_IDS: tl.constexpr, k: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if HAS_IDS:
        offs_k = tl.arange(0, BLOCK_K)
        mask_k = offs_k < k
        ids = tl.load(ids_ptr + token * k + offs_k, mask=mask_k, other=-1)
        gates = tl.load(gates_ptr + token * k + offs_k, mask=mask_k, other=0)
    before = 0
    for rank in range(width):
        place = tl.load(places_ptr + token * width + rank)
        if HAS_IDS:
            tl.store(message_ptr + token * width + rank, tl.where(place >= 0, before + place, -1))
        if place >= 0:
            row = (before + place).to(tl.int64)
            if HAS_IDS:
                local = ids - rank * share
                mine = (local >= 0) & (local < share) & (ids < E)
                tl.store(locals_ptr + row * stride_l + offs_k, tl.where(mine, local, -1).to(tl.int32), mask=mask_k)
                tl.store(locals_ptr + row * stride_l + k, tl.load(firsts_ptr + token * width + rank))
                tl.store(weights_ptr + row * stride_w + offs_k, gates, mask=mask_k)
            for start in range(0, H, BLOCK_H):
                offs_h = start + tl.arange(0, BLOCK_H)
                values = tl.load(x_ptr + token * H + offs_h, mask=offs_h < H, other=0)
                tl.store(rows_ptr + row * stride_r + offs_h, values, mask=offs_h < H)
        if HAS_IDS:
            before += tl.load(counts_ptr + rank * 2)


@triton.jit(do_not_specialize=["ranks"])
def _arrive_kernel(
    rows_ptr, stride_r, weights_ptr, stride_w, locals_ptr, stride_l,  # the message's three parts
    counts_ptr,  # (n, 2) rows and pairs from each rank
    pairs_ptr,  # (P, H) out
    pair_weights_ptr, pair_ids_ptr,  # (P,) out
    slots_ptr,  # (rows, k) out: the pair of each slot, or -1
    ranks, H,
    k: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    end = 0
    first = tl.load(locals_ptr + row * stride_l + k)
    for rank in range(ranks):
        end += tl.load(counts_ptr + rank * 2)
        first += tl.where(row >= end, tl.load(counts_ptr + rank * 2 + 1), 0)
    pair = first
    for j in range(k):
        local = tl.load(locals_ptr + row * stride_l + j)
        tl.store(slots_ptr + row * k + j, tl.where(local >= 0, pair, -1))
        if local >= 0:
            tl.store(pair_ids_ptr + pair, local)
            tl.store(pair_weights_ptr + pair, tl.load(weights_ptr + row * stride_w + j))
            pair += 1
    for start in range(0, H, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        values = tl.load(rows_ptr + row * stride_r + offs_h, mask=offs_h < H, other=0)
        for i in range(pair - first):  # pairs of a message lie together
            tl.store(pairs_ptr + (first.to(tl.int64) + i) * H + offs_h, values, mask=offs_h < H)


@triton.jit(do_not_specialize=["width", "share", "k"])
def _combine_kernel(
    rows_ptr, stride_r,  # (rows, H)
    places_ptr,  # (items, width) rows of each item, or -1
    out_ptr, stride_o,  # (items, H)
    weights_ptr, stride_w,  # rows' weights: (rows,), or (rows, k) with ids
    ids_ptr,  # (items, k) experts; their owner is the column of places
    out_weights_ptr, stride_u,  # (items, k)
    width, share, k, H, E,
    HAS_WEIGHTS: tl.constexpr, HAS_IDS: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    for start in range(0, H, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        total = tl.zeros((BLOCK_H,), ACC)
        for j in range(width):
            place = tl.load(places_ptr + item * width + j).to(tl.int64)
            if place >= 0:
                total += tl.load(rows_ptr + place * stride_r + offs_h, mask=offs_h < H, other=0).to(ACC)
        tl.store(out_ptr + item * stride_o + offs_h, total.to(out_ptr.dtype.element_ty), mask=offs_h < H)
    if HAS_WEIGHTS:
        offs_k = tl.arange(0, BLOCK_K)
        mask_k = offs_k < k
        if HAS_IDS:
            ids = tl.load(ids_ptr + item * k + offs_k, mask=mask_k, other=-1)
            here = mask_k & (ids >= 0) & (ids < E)
            place = tl.load(places_ptr + item * width + ids // share, mask=here, other=-1).to(tl.int64)
            found = tl.load(weights_ptr + place * stride_w + offs_k, mask=place >= 0, other=0)
        else:
            place = tl.load(places_ptr + item * width + offs_k, mask=mask_k, other=-1).to(tl.int64)
            found = tl.load(weights_ptr + place * stride_w, mask=place >= 0, other=0)
        tl.store(out_weights_ptr + item * stride_u + offs_k, found, mask=mask_k)


@triton.jit
def _at(address, element: tl.constexpr):
    """Addresses of memory that begins on 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit(do_not_specialize=["own", "capacity", "share", "ranks", "E"])
def _put_kernel(
    x_ptr,  # (T, H)
    gates_ptr,  # (T, k)
    ids_ptr,  # (T, k)
    places_ptr,  # (T, n): rank * capacity + row there, or -1
    windows_ptr,  # (n,) int64
    own, capacity, share, ranks, E, H, at_rows, at_weights, at_ids,
    HAS_IDS: tl.constexpr, k: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < k
    element: tl.constexpr = x_ptr.dtype.element_ty
    if HAS_IDS:
        ids = tl.load(ids_ptr + token * k + offs_k, mask=mask_k, other=-1)
        gates = tl.load(gates_ptr + token * k + offs_k, mask=mask_k, other=0)
        for rank in range(ranks):
            place = tl.load(places_ptr + token * ranks + rank)
            if place >= 0:
                slot = (place + (own - rank) * capacity).to(tl.int64) * k + offs_k
                local = ids - rank * share
                mine = (local >= 0) & (local < share) & (ids < E)
                window = tl.load(windows_ptr + rank)
                tl.store(_at(window + at_ids, tl.int32) + slot, tl.where(mine, local, -1).to(tl.int32), mask=mask_k)
                tl.store(_at(window + at_weights, gates_ptr.dtype.element_ty) + slot, gates, mask=mask_k)
    for start in range(0, H, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        values = tl.load(x_ptr + token * H + offs_h, mask=offs_h < H, other=0)
        for rank in range(ranks):
            place = tl.load(places_ptr + token * ranks + rank)
            if place >= 0:
                row = (place + (own - rank) * capacity).to(tl.int64)
                window = tl.load(windows_ptr + rank)
                tl.store(_at(window + at_rows, element) + row * H + offs_h, values, mask=offs_h < H)


@triton.jit(do_not_specialize=["capacity", "rank", "own"])
def _copy_kernel(
    rows_ptr,  # (n capacity, H): what came from each rank; if BACK the results
    counts_ptr,  # (n,) rows that came from each rank
    windows_ptr,  # (n,) int64, if BACK: where the results go
    out_ptr,  # (n capacity, H), unless BACK
    out_counts_ptr,  # (n,), with ids
    weights_ptr, out_weights_ptr,  # (n capacity, k), or None; out unless BACK
    ids_ptr, out_ids_ptr,  # (n capacity, k), or None
    capacity, rank, own, H, at_rows, at_weights,
    BACK: tl.constexpr, k: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, i = row // capacity, row % capacity
    count = tl.load(counts_ptr + source)
    came = i < count
    to = row
    if BACK:
        to = rank.to(tl.int64) * capacity + i
        window = tl.load(windows_ptr + source)
        out_ptr = _at(window + at_rows, rows_ptr.dtype.element_ty)
        if weights_ptr is not None:
            out_weights_ptr = _at(window + at_weights, weights_ptr.dtype.element_ty)
    if not BACK or came:
        for start in range(0, H, BLOCK_H):
            offs_h = start + tl.arange(0, BLOCK_H)
            values = tl.load(rows_ptr + row * H + offs_h, mask=(offs_h < H) & came, other=0)
            tl.store(out_ptr + to * H + offs_h, values, mask=offs_h < H)
        offs_k = tl.arange(0, BLOCK_K)
        mask_k = offs_k < k
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row * k + offs_k, mask=mask_k & came, other=0)
            tl.store(out_weights_ptr + to * k + offs_k, weights, mask=mask_k)
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + row * k + offs_k, mask=mask_k & came, other=-1)
            tl.store(out_ids_ptr + row * k + offs_k, tl.where(ids >= 0, ids, own), mask=mask_k)
            if i == 0:
                tl.store(out_counts_ptr + source, count)
