"""The kernels for Hopper GPUs, in Gluon: the algorithms of ``kernels.py`` with the overlap written out by hand.

A program has one producer warp and two or three consumer warpgroups. The producer copies tiles into rings of buffers in
shared memory; barriers there say which buffer is full and which is free. Each consumer owns 64 rows and never waits for
another's arithmetic, so that one's exponentials run beside another's matrix products. In addition, where registers allow
it, a consumer of the forward pass starts the product for the next tile's scores before it takes the softmax of this one
(Shah et al., "FlashAttention-3" (2024), section 3). A program of the forward pass may stay for many blocks of queries:
then the producer loads the next block's tiles while the consumers finish this one, see ``forward_grid``.

    forward   a consumer owns 64 queries; two take turns with the tensor cores, or three run free
    backward  a consumer owns 64 keys, on transposed tiles; with heads of 256, one of two computes dv and the other dk.
              ``DQ`` says who computes dq: see "dq with dk and dv" below
    dq        a consumer owns 64 queries; where the kernel above leaves dq to it

The sides of a tile are powers of two, in shared memory too (Triton's layouts know no others). The forward pass computes heads of
65 to 96 numbers as 64 and 16 or 32 more (``REST``), with two products for one; the backward pass as heads of 128. Descriptors
pad with zeros, which are not read from memory.

Packed sequences: a tile of queries or keys may hold rows of several. Then all of its scores are masked, else only those at the
edges, see ``Span``. Tiles of the other side begin where the first of these sequences begins, or end where the last one ends, so
that nothing behind the last sequence is read. Such tiles begin with any row: see ``COPIES`` for lse and delta.

Not handled here: windows, lengths and soft caps, dtypes of other than 16 bits, tensors that descriptors cannot read, and
what ``config`` leaves to the plain kernels.
"""

from typing import Any, NamedTuple

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention import kernels
from kernelbook.gluon_names import thread_barrier, tma

# isort: split
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64  # of one warpgroup
# In which order a program of the forward pass takes blocks of queries.
LONG_FIRST, PAIRS, SNAKES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
_place, _with_sink, _packed_in, _packed, _boundary = (
    gluon.jit(helper.fn)
    for helper in (kernels._place, kernels._with_sink, kernels._packed_in, kernels._packed, kernels._boundary)
)


class Ring(NamedTuple):
    """Tiles in shared memory that are filled and freed in turn, and barriers that say which are full and which are free."""

    tiles: Any
    rest: Any  # tiles of the features beyond those, of heads of 80 and 96 numbers; else None
    full: Any
    free: Any


@gluon.jit
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _tiles(dtype: gl.constexpr, NUMBER: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [NUMBER, HEIGHT, WIDTH], LAYOUT)


@gluon.jit
def _ring(
    dtype: gl.constexpr, NUMBER: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr,
    ARRIVALS: gl.constexpr,
):  # fmt: skip
    tiles = _tiles(dtype, NUMBER, HEIGHT, WIDTH)
    rest = tiles  # without REST nobody looks at it
    if REST:
        rest = _tiles(dtype, NUMBER, HEIGHT, REST)
    return Ring(tiles, rest, _barriers(NUMBER, 1), _barriers(NUMBER, ARRIVALS))


@gluon.jit
def _claim(ring, i, BYTES: gl.constexpr):
    """-> the buffer of the i-th tile, once it is free; BYTES will arrive there.

    From the start it is: a wait for the phase before the first returns at once.
    """
    STAGES: gl.constexpr = ring.full.shape[0]
    slot = i % STAGES
    mbarrier.wait(ring.free.index(slot), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(slot), BYTES)
    return slot


@gluon.jit
def _copy(tensor, at, ring, slot):
    tma.async_copy_global_to_shared(tensor, at, ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def _await(ring, i):
    """-> the buffer of the i-th tile, once it is full."""
    STAGES: gl.constexpr = ring.full.shape[0]
    slot = i % STAGES
    mbarrier.wait(ring.full.index(slot), (i // STAGES) & 1)
    return slot


class Packed(NamedTuple):
    """Sequences that lie one after another in N rows: where their boundaries are, on the device, or None."""

    ptr: Any
    stride: Any
    N: Any
    low: Any  # those from low to high are meant: all of them, or those that have rows in a block
    high: Any


class Span(NamedTuple):
    """The keys that a block of queries sees: ``count`` tiles from ``begin`` on, visited from the last one.

    Of packed sequences the last tile ends with the last key that is seen, at ``top + BLOCK_N``, and begins in the one before
    it: nothing behind the sequences is read.
    """

    begin: Any
    top: Any
    count: Any
    masked: Any  # of these, from the last one on
    low: Any  # the packed sequences from low to high have rows in the block
    high: Any


@gluon.jit
def _within(packed, start, stop):
    """-> the sequences from low to high have rows from start to stop; where they begin and end; whether one has all of these."""
    low, high = _packed_in(packed.ptr, packed.stride, packed.high, start, stop)
    begin = _boundary(packed.ptr, packed.stride, low, 0, packed.N)
    end = _boundary(packed.ptr, packed.stride, high, begin, packed.N)
    alone = (high == low + 1) & (begin <= start) & (stop <= end)
    return low, high, begin, end, alone


@gluon.jit
def _keys_of(start_m, N, S, packed, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    begin, top, low, high = 0, 0, 0, 0
    if packed.ptr is not None:
        stop = gl.minimum(start_m + BLOCK_M, N)
        low, high, begin, end, alone = _within(packed, start_m, stop)
        last, seen_by_all = end, end
        if CAUSAL:
            last, seen_by_all = gl.minimum(stop, end), start_m + 1
        full = gl.where(alone, (seen_by_all - begin) // BLOCK_N, 0)  # else all is masked
        top = gl.where(last > begin, last - BLOCK_N, N)
    else:
        last = S
        full = S // BLOCK_N
        if CAUSAL:
            last = gl.maximum(gl.minimum(start_m + BLOCK_M + S - N, S), 0)
            full = gl.maximum(gl.minimum(start_m + 1 + S - N, S), 0) // BLOCK_N
    count = gl.cdiv(last - begin, BLOCK_N)
    return Span(begin, top, count, count - full, low, high)


@gluon.jit
def _start_of(i, span, packed, BLOCK_N: gl.constexpr):
    """The first key of the i-th tile."""
    start = (span.count - 1 - i) * BLOCK_N
    if packed.ptr is not None:
        start = gl.where(i == 0, span.top, span.begin + start)
    return start


@gluon.jit
def _with_sequences(rows, packed):
    """-> rows; begin and end of the packed sequence that each is in, N and 0 where it is in none."""
    begins, ends = 0, 0
    if packed.ptr is not None:
        begins, ends = gl.zeros_like(rows) + packed.N, gl.zeros_like(rows)
        for sequence in range(packed.low, packed.high):
            begin, end = _packed(packed.ptr, packed.stride, sequence, packed.N)
            inside = (rows >= begin) & (rows < end)
            begins, ends = gl.where(inside, begin, begins), gl.where(inside, end, ends)
    return rows, begins, ends


@gluon.jit
def _seen(i, scores, rows, span, packed, diagonal, S, CAUSAL: gl.constexpr):
    """Which keys of the i-th tile each query sees. ``rows``: see ``_with_sequences``."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    queries, begins, ends = rows
    keys = _start_of(i, span, packed, BLOCK_N) + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
    last = queries
    if packed.ptr is not None:  # what the last tile has of the one before it is seen there
        first = gl.maximum(begins, span.begin + (span.count - 1 - i) * BLOCK_N)
        seen = gl.expand_dims(keys, 0) >= gl.expand_dims(first, 1)
        if not CAUSAL:
            last = ends - 1
    else:
        seen = gl.expand_dims(keys < S, 0)
    if CAUSAL or packed.ptr is not None:
        seen = seen & (gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1) + diagonal)
    else:
        seen = seen & (gl.expand_dims(last, 1) >= 0)
    return seen


@gluon.constexpr_function
def _products(width):
    """The layout of a warpgroup's products that are ``width`` wide."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def _zeros(HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    return gl.zeros([HEIGHT, WIDTH], gl.float32, layout=_products(WIDTH))


@gluon.jit
def _product_with(left, tile):
    """Starts the product of what a warpgroup owns and a tile that is turned around: ``left @ tile.T``."""
    zeros = _zeros(left.shape[0], tile.shape[0])
    return warpgroup_mma(left, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _left(x, dtype: gl.constexpr, acc):
    """x as the left side of a product that is added to ``acc``."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _store(out, at, tile, smem):
    """Starts to store a tile through shared memory that nobody needs any more."""
    smem.store(tile.to(smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, at, smem)


# --- forward --------------------------------------------------------------------------------------------------------


class Queries(NamedTuple):
    """What decides which blocks of queries a program computes, which keys these see, and their weights."""

    B: Any
    H: Any
    N: Any
    S: Any
    section: Any
    order: Any
    rounds: Any  # so many blocks, one after the other
    packed: Any
    sinks_ptr: Any
    stride_sh: Any
    scale: Any


@gluon.jit
def _turned(round, order):
    """This program's place in a round: in SNAKES every second one runs backwards."""
    return gl.where((order == SNAKES) & (round % 2 == 1), gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(0))


@gluon.jit
def _block(round, p, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """-> head, its first query, the keys that the block sees: one tile at least, masked.

    See ``forward_grid`` for orders. In PAIRS two rounds take a block and its mirror image.
    """
    num_blocks = gl.cdiv(p.N, BLOCK_M)
    pairs = (p.order == PAIRS).to(gl.int32)
    unit = round // (1 + pairs) * gl.num_programs(0) + _turned(round, p.order)
    block, head = _place(unit, num_blocks // (1 + pairs), p.B * p.H, p.section, CAUSAL)
    if CAUSAL:
        block = gl.where(pairs * (1 - round % 2) == 1, num_blocks - 1 - block, block)
    start_m = block * BLOCK_M
    span = _keys_of(start_m, p.N, p.S, p.packed, CAUSAL, BLOCK_M, BLOCK_N)
    count, masked = gl.maximum(span.count, 1), gl.maximum(span.masked, 1)
    return head, start_m, Span(span.begin, span.top, count, masked, span.low, span.high)


@gluon.jit
def _copy_features(tensors, at, ring, slot):
    """Those of the rest too, if there are any."""
    tensor, rest = tensors
    b, h, row = at
    _copy(tensor, (b, h, row, 0), ring, slot)
    if rest is not None:
        at = (b, h, row, ring.tiles.shape[2])
        tma.async_copy_global_to_shared(rest, at, ring.full.index(slot), ring.rest.index(slot))


@gluon.jit
def _produce(work, GROUP: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr):
    q, k, v, rings, p = work
    q_ring, k_ring, v_ring = rings
    WARPGROUPS: gl.constexpr = q_ring.tiles.shape[0]
    ROWS: gl.constexpr = q_ring.tiles.shape[1]
    D: gl.constexpr = q_ring.tiles.shape[2] + REST
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    before = 0  # tiles of keys of earlier rounds
    for round in range(p.rounds):
        head, start_m, span = _block(round, p, CAUSAL, WARPGROUPS * ROWS, BLOCK_N)
        b, h = head // p.H, head % p.H
        for i in range(span.count):
            start = _start_of(i, span, p.packed, BLOCK_N)
            at = (b, h // GROUP, start)
            slot = _claim(k_ring, before + i, BLOCK_N * D * 2)
            _copy_features(k, at, k_ring, slot)
            if i == 0:
                for w in gl.static_range(WARPGROUPS):
                    mbarrier.wait(q_ring.free.index(w), (round & 1) ^ 1)
                    mbarrier.expect(q_ring.full.index(w), ROWS * D * 2)
                    _copy_features(q, (b, h, start_m + w * ROWS), q_ring, w)
            slot = _claim(v_ring, before + i, BLOCK_N * D * 2)
            _copy_features(v, at, v_ring, slot)
        before += span.count


@gluon.jit
def _rescaled(l, alpha):
    return l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1)


@gluon.jit
def _softmax(i, scores, m, rows, span, p, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Of tile i -> weights, sums of these, m, alpha: by what earlier sums are scaled down. MASKED: a row may see nothing.

    The sum of a row is in the parts that a thread has of it: (rows, 8). Threads add them up once, at the end.
    """
    if MASKED:
        seen = _seen(i, scores, rows, span, p.packed, p.S - p.N, p.S, CAUSAL)
        scores = gl.where(seen, scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, axis=1) * p.scale)
    shift = m_new
    if MASKED:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(scores * p.scale - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m - shift)
    sums = gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 8]), axis=1)
    return weights, sums, m_new, alpha


@gluon.jit
def _scores(q, q_rest, k, slot, W: gl.constexpr, REST: gl.constexpr):
    """Starts the product of this warpgroup's queries and a tile of keys."""
    scores = _product_with(q, k.tiles.index(slot))
    if REST:
        scores = warpgroup_mma(q_rest.index(W), k.rest.index(slot).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _step_alone(i, acc, l, m, shared, block, p, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Scores, softmax and product with the values of tile i, one after the other: other warpgroups fill the gaps."""
    q, _q_rest, k, v, _turn = shared
    before, _turns, rows, span = block
    slot = _await(k, before + i)
    scores = _product_with(q, k.tiles.index(slot))
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k.free.index(slot))
    weights, sums, m, alpha = _softmax(i, scores, m, rows, span, p, MASKED, CAUSAL)
    l = _rescaled(l, alpha) + sums
    left = _left(weights, v.tiles.dtype, acc)
    acc = _rescaled(acc, alpha)
    slot = _await(v, before + i)
    out = warpgroup_mma(left, v.tiles.index(slot), acc, is_async=True)
    acc, left = warpgroup_mma_wait(0, deps=[out, left])
    mbarrier.arrive(v.free.index(slot))
    return acc, l, m


@gluon.jit
def _step(
    i, acc, more, l, m, left, shared, block, p,
    W: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """The scores and softmax of tile i; the product of ``left``, tile i - 1's weights, with its values."""
    q, q_rest, k, v, turn = shared
    before, turns, rows, span = block
    slot = _await(k, before + i)
    # The first one's first turn has no one before it.
    mbarrier.wait(turn.index(W), ((turns + i) & 1) ^ (W != 0))
    scores = _scores(q, q_rest, k, slot, W, REST)
    slot_v = _await(v, before + i - 1)
    out = warpgroup_mma(left, v.tiles.index(slot_v), acc, is_async=True)
    if REST:
        more = warpgroup_mma(left, v.rest.index(slot_v), more, is_async=True)
    mbarrier.arrive(turn.index((W + 1) % turn.shape[0]))
    PRODUCTS: gl.constexpr = 2 if REST else 1  # with the values
    scores = warpgroup_mma_wait(PRODUCTS, deps=[scores])
    mbarrier.arrive(k.free.index(slot))
    weights, sums, m, alpha = _softmax(i, scores, m, rows, span, p, MASKED, CAUSAL)
    l = _rescaled(l, alpha) + sums
    # The compiler would take the exponentials after the product. It does not move them across a
    # branch: a wait for a barrier is one, also where it returns at once.
    weights = warpgroup_mma_wait(PRODUCTS, deps=[_left(weights, v.tiles.dtype, acc)])
    slot_v = _await(v, before + i - 1)
    if REST:
        acc, more, left = warpgroup_mma_wait(0, deps=[out, more, left])
        more = _rescaled(more, alpha)
    else:
        acc, left = warpgroup_mma_wait(0, deps=[out, left])
    mbarrier.arrive(v.free.index(slot_v))
    return _rescaled(acc, alpha), more, l, m, weights


@gluon.jit
def _consume(work, OVERLAP: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr, W: gl.constexpr):
    o, o_rest, lse_ptr, rings, o_tiles, o_rest_tiles, turn, p = work
    q_ring, k, v = rings
    WARPGROUPS: gl.constexpr = q_ring.tiles.shape[0]
    ROWS: gl.constexpr = q_ring.tiles.shape[1]
    BLOCK_D: gl.constexpr = q_ring.tiles.shape[2]
    BLOCK_N: gl.constexpr = k.tiles.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, _products(BLOCK_N))
    SHARED: gl.constexpr = BLOCK_D > 128
    q, q_rest = q_ring.tiles.index(W), q_ring.rest
    shared = q, q_rest, k, v, turn
    before = 0  # tiles of keys of earlier rounds
    for round in range(p.rounds):
        head, start_m, span = _block(round, p, CAUSAL, WARPGROUPS * ROWS, BLOCK_N)
        queries = start_m + W * ROWS + gl.arange(0, ROWS, layout=ROW)
        rows = _with_sequences(queries, Packed(p.packed.ptr, p.packed.stride, p.N, span.low, span.high))
        m = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
        acc = _zeros(ROWS, BLOCK_D)
        more = 0.0
        if REST:
            more = _zeros(ROWS, REST)
        mbarrier.wait(q_ring.full.index(W), round & 1)
        if OVERLAP:
            slot = _await(k, before)
            scores = _scores(q, q_rest, k, slot, W, REST)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k.free.index(slot))
            weights, l, m, _alpha = _softmax(0, scores, m, rows, span, p, True, CAUSAL)
            left = _left(weights, v.tiles.dtype, acc)
            block = before, before - round, rows, span  # each round's first tile has no turn
            if CAUSAL or p.packed.ptr is not None:  # else only the first tile is masked
                for i in range(1, span.masked):
                    acc, more, l, m, left = _step(i, acc, more, l, m, left, shared, block, p, W, True, CAUSAL, REST)
            for i in range(span.masked, span.count):
                acc, more, l, m, left = _step(i, acc, more, l, m, left, shared, block, p, W, False, CAUSAL, REST)
            if not SHARED:
                mbarrier.arrive(q_ring.free.index(W))
            slot = _await(v, before + span.count - 1)
            acc = warpgroup_mma(left, v.tiles.index(slot), acc, is_async=True)
            if REST:
                more = warpgroup_mma(left, v.rest.index(slot), more, is_async=True)
                acc, more, left = warpgroup_mma_wait(0, deps=[acc, more, left])
            else:
                acc, left = warpgroup_mma_wait(0, deps=[acc, left])
            mbarrier.arrive(v.free.index(slot))
        else:
            block = before, 0, rows, span
            l = gl.sum(_zeros(ROWS, BLOCK_N).reshape([ROWS, BLOCK_N // 8, 8]), axis=1)
            for i in range(span.masked):
                acc, l, m = _step_alone(i, acc, l, m, shared, block, p, True, CAUSAL)
            for i in range(span.masked, span.count):
                acc, l, m = _step_alone(i, acc, l, m, shared, block, p, False, CAUSAL)
            if not SHARED:
                mbarrier.arrive(q_ring.free.index(W))
        before += span.count

        l = gl.convert_layout(gl.sum(l, axis=1), ROW)
        seen = l > 0.0
        l = gl.where(seen, l, 1.0)
        lse = gl.where(seen, m + gl.log2(l), float("inf"))
        if p.sinks_ptr is not None:
            sink = gl.load(p.sinks_ptr + (head % p.H).to(gl.int64) * p.stride_sh).to(gl.float32)
            share, lse = _with_sink(lse, sink)
            l = l / share
        gl.store(lse_ptr + head.to(gl.int64) * p.N + queries, lse, mask=queries < p.N)
        acc = acc / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, acc.type.layout)), 1)
        if REST:
            more = more / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, more.type.layout)), 1)
        if not SHARED:
            tma.store_wait(0)  # the block before has been read
        _store(o, (head // p.H, head % p.H, start_m + W * ROWS, 0), acc, o_tiles.index(W))
        if REST:
            _store(o_rest, (head // p.H, head % p.H, start_m + W * ROWS, BLOCK_D), more, o_rest_tiles.index(W))
        if SHARED:
            tma.store_wait(0)
            mbarrier.arrive(q_ring.free.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "section", "order", "sequences"])
def _flash_attention_fwd_hopper_kernel(
    q, k, v, o,  # tensor descriptors: (B, H, N, D), (B, H / GROUP, S, D) twice, (B, H, N, D)
    lse_ptr,  # (B, H, N), contiguous
    B, H, N, S, section, order,
    boundaries_ptr, stride_s, sequences,  # (sequences + 1,) boundaries of packed sequences, or None
    scale,  # with log2(e)
    sinks_ptr, stride_sh,  # (H,) logits, or None
    q_rest, k_rest, v_rest, o_rest,  # descriptors of the features from BLOCK_D on, if REST
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    WARPGROUPS: gl.constexpr, OVERLAP: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    width = gl.num_programs(0)
    pairs = (order == PAIRS).to(gl.int32)
    units = gl.cdiv(N, WARPGROUPS * ROWS) * B * H // (1 + pairs)
    full = units // width
    rounds = (full + (_turned(full, order) < units % width).to(gl.int32)) * (1 + pairs)
    packed = Packed(boundaries_ptr, stride_s, N, 0, sequences)
    p = Queries(B, H, N, S, section, order, rounds, packed, sinks_ptr, stride_sh, scale)

    q_ring = _ring(q.dtype, WARPGROUPS, ROWS, BLOCK_D, REST, 1)
    k_ring = _ring(q.dtype, STAGES, BLOCK_N, BLOCK_D, REST, WARPGROUPS)
    v_ring = _ring(q.dtype, STAGES, BLOCK_N, BLOCK_D, REST, WARPGROUPS)
    o_tiles, o_rest_tiles = q_ring.tiles, q_ring.rest
    if BLOCK_D <= 128:  # else the output lies where the queries lay: there is no room for both
        o_tiles = _tiles(q.dtype, WARPGROUPS, ROWS, BLOCK_D)
    if REST:
        o_rest_tiles = _tiles(q.dtype, WARPGROUPS, ROWS, REST)
    turn = _barriers(WARPGROUPS, 1)
    fence_async_shared()
    rings = q_ring, k_ring, v_ring
    consumer = o, o_rest, lse_ptr, rings, o_tiles, o_rest_tiles, turn, p
    producer = (q, q_rest), (k, k_rest), (v, v_rest), rings, p
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (consumer, OVERLAP, CAUSAL, REST, 0)),
                (_consume, (consumer, OVERLAP, CAUSAL, REST, 1)),
                (_produce, (producer, GROUP, CAUSAL, REST)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumer, OVERLAP, CAUSAL, REST, 0)),
                (_consume, (consumer, OVERLAP, CAUSAL, REST, 1)),
                (_consume, (consumer, OVERLAP, CAUSAL, REST, 2)),
                (_produce, (producer, GROUP, CAUSAL, REST)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


# --- backward: dk and dv --------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """The keys that a program owns, and which queries visit them."""

    b: Any
    part: Any  # which of the parts of the heads that share a key head
    head: Any  # its first query head
    start_n: Any
    first: Any  # the first query that sees a key, in whole tiles
    masked: Any  # how many tiles to mask, from there on
    count: Any  # how many tiles there are from there on
    diagonal: Any
    S: Any
    packed: Any  # the sequences that have keys here


class Buffers(NamedTuple):
    """What is in shared memory: a program's keys and values, rings of tiles of queries and do, lse and delta with these."""

    k: Any
    v: Any
    kv_full: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    ds: Any  # a ring, where dq is computed too; with heads of 256 one tile of probabilities
    k_free: Any  # a barrier, where dq is computed: keys may be overwritten


# TMA copies whole pieces of 16 bytes, but a tile of a packed sequence begins with any row. Of lse and delta there are as many
# copies as a piece has numbers, one after another, each one element further on: in one of them the tile begins with a piece.
COPIES = gl.constexpr(4)


@gluon.jit
def _bwd_produce(work, MEMBERS: gl.constexpr, PARTS: gl.constexpr):
    """A program's keys and values; then the queries that see them, from the last on, of all its heads."""
    q, k, v, do, lse, delta, to, own, H, n_padded = work
    WARPGROUPS: gl.constexpr = to.k.shape[0]
    ROWS: gl.constexpr = to.k.shape[1]
    BLOCK_D: gl.constexpr = to.k.shape[2]
    BLOCK_M: gl.constexpr = to.q.tiles.shape[1]
    BYTES: gl.constexpr = BLOCK_M * BLOCK_D * 2 + BLOCK_M * 4
    for w in gl.static_range(WARPGROUPS):
        at = (own.b, own.part // PARTS, own.start_n + w * ROWS, 0)
        mbarrier.expect(to.kv_full.index(w), 2 * ROWS * BLOCK_D * 2)
        tma.async_copy_global_to_shared(k, at, to.kv_full.index(w), to.k.index(w))
        tma.async_copy_global_to_shared(v, at, to.kv_full.index(w), to.v.index(w))
    for i in range(MEMBERS * own.count):
        h = own.head + i // own.count
        start = own.first + (own.count - 1 - i % own.count) * BLOCK_M
        row = (own.b * H + h) * n_padded + start
        if own.packed.ptr is not None:  # in the copy in which it lies on 16 bytes
            row += (-start & (COPIES - 1)) * (H * n_padded + 1)
        slot = _claim(to.q, i, BYTES)
        _copy(q, (own.b, h, start, 0), to.q, slot)
        tma.async_copy_global_to_shared(lse, (row,), to.q.full.index(slot), to.lse.index(slot))
        slot = _claim(to.do, i, BYTES)
        _copy(do, (own.b, h, start, 0), to.do, slot)
        tma.async_copy_global_to_shared(delta, (row,), to.do.full.index(slot), to.delta.index(slot))


@gluon.jit
def _seen_by(start, scores, keys, own, CAUSAL: gl.constexpr):
    """Which of the queries from ``start`` on see the keys; without ``CAUSAL`` which keys there are. See ``_with_sequences``."""
    keys, begins, ends = keys
    seen = gl.expand_dims(keys, 1) < own.S
    if CAUSAL or own.packed.ptr is not None:
        rows = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        first = keys if CAUSAL else begins
        seen = gl.expand_dims(first, 1) <= gl.expand_dims(rows, 0) + own.diagonal
        if own.packed.ptr is not None:
            seen = seen & (gl.expand_dims(rows, 0) < gl.expand_dims(ends, 1))
    return seen


@gluon.jit
def _of_sequences(gradient, start_n, own):
    """Zeros for keys that no packed sequence has: their numbers may be NaN."""
    if own.packed.ptr is not None:
        keys = start_n + gl.arange(0, gradient.shape[0], layout=gl.SliceLayout(1, gradient.type.layout))
        _keys, _begins, ends = _with_sequences(keys, own.packed)
        gradient = gl.where(gl.expand_dims(ends, 1) > 0, gradient, 0.0)
    return gradient


@gluon.jit
def _beside_scores(vectors, slot):
    """lse or delta of a tile of queries."""
    return vectors.index(slot).load(gl.SliceLayout(0, _products(vectors.shape[1])))


@gluon.jit
def _bwd_step(
    i, start, dk, dv, k, v, t, keys, own, scale,
    W: gl.constexpr, DQ: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of queries. DQ: leaves ds too."""
    slot = _await(t.q, i)
    q, do = t.q.tiles.index(slot), t.do.tiles.index(slot)
    scores = _product_with(k, q)
    _await(t.do, i)
    dp = _product_with(v, do)
    lse = _beside_scores(t.lse, slot)
    scores = warpgroup_mma_wait(1, deps=[scores])
    # Beyond the last query lse is +inf, so that probabilities there are zero.
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:  # beyond the last key they may be infinite, and zeros of keys times these nan
        p = gl.where(_seen_by(start, scores, keys, own, CAUSAL), p, 0.0)
    left = _left(p, do.dtype, dv)
    if not DQ:  # beside the exponentials, where there are registers for it
        delta = _beside_scores(t.delta, slot)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if DQ:
        delta = _beside_scores(t.delta, slot)
    ds = p * (dp - gl.expand_dims(delta, 0))
    if MASKED and own.packed.ptr is not None:  # before the first row are no numbers
        ds = gl.where(p == 0.0, 0.0, ds)
    ds = ds.to(q.dtype)
    if DQ:  # leaves this warpgroup's keys of ds, once the buffer is free
        DS_STAGES: gl.constexpr = t.ds.full.shape[0]
        place = i % DS_STAGES
        mbarrier.wait(t.ds.free.index(place), ((i // DS_STAGES) & 1) ^ 1)
        t.ds.tiles.index(place * 2 + W).store(ds)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(t.ds.full.index(place))
    right = _left(ds, q.dtype, dk)
    dk = warpgroup_mma(right, q, dk, is_async=True)
    dv, left = warpgroup_mma_wait(1, deps=[dv, left])
    mbarrier.arrive(t.do.free.index(slot))
    dk, right = warpgroup_mma_wait(0, deps=[dk, right])
    mbarrier.arrive(t.q.free.index(slot))
    return dk, dv


@gluon.jit
def _bwd_consume(
    work, MEMBERS: gl.constexpr, DQ: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, W: gl.constexpr
):
    dk_out, dv_out, t, own, scale, dk_scale = work
    ROWS: gl.constexpr = t.k.shape[1]
    BLOCK_D: gl.constexpr = t.k.shape[2]
    BLOCK_M: gl.constexpr = t.q.tiles.shape[1]
    SCORES: gl.constexpr = _products(BLOCK_M)
    k, v = t.k.index(W), t.v.index(W)
    k_left, v_left = k, v
    keys = own.start_n + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    keys = _with_sequences(keys, own.packed)
    dk, dv = _zeros(ROWS, BLOCK_D), _zeros(ROWS, BLOCK_D)
    mbarrier.wait(t.kv_full.index(W), 0)
    if DQ:
        # Both stay in registers too: products that read both sides from shared memory wait for it.
        k_left = k.load(gl.DotOperandLayout(0, SCORES, 2))
        v_left = v.load(gl.DotOperandLayout(0, SCORES, 2))
    for member in range(MEMBERS):
        before = member * own.count
        for i in range(own.count - own.masked):
            dk, dv = _bwd_step(before + i, 0, dk, dv, k_left, v_left, t, keys, own, scale, W, DQ, RAGGED, CAUSAL)
        if CAUSAL or own.packed.ptr is not None:  # a second loop costs the others registers
            for i in range(own.count - own.masked, own.count):
                start = own.first + (own.count - 1 - i) * BLOCK_M
                dk, dv = _bwd_step(before + i, start, dk, dv, k_left, v_left, t, keys, own, scale, W, DQ, True, CAUSAL)
    # This warpgroup's values are not needed any more, nor its keys once dq is computed.
    at = (own.b, own.part, own.start_n + W * ROWS, 0)
    _store(dv_out, at, dv, v)
    if DQ:
        mbarrier.wait(t.k_free.index(0), 0)
    _store(dk_out, at, _of_sequences(dk * dk_scale, own.start_n + W * ROWS, own), k)
    tma.store_wait(0)


# With 256 features a warpgroup has no registers for dk and dv: one computes dv and the probabilities, which it hands to the
# other, and that one dk. Each does two of the four products.


@gluon.jit
def _dv_step(i, start, dv, k, t, keys, own, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    slot = _await(t.q, i)
    do = t.do.tiles.index(slot)
    scores = _product_with(k, t.q.tiles.index(slot))
    lse = _beside_scores(t.lse, slot)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(t.q.free.index(slot))
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 0))
    if MASKED:
        p = gl.where(_seen_by(start, scores, keys, own, CAUSAL), p, 0.0)
    mbarrier.wait(t.ds.free.index(0), (i & 1) ^ 1)
    t.ds.tiles.index(0).store(p)
    mbarrier.arrive(t.ds.full.index(0))
    left = _left(p, do.dtype, dv)
    _await(t.do, i)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dv, left = warpgroup_mma_wait(0, deps=[dv, left])
    mbarrier.arrive(t.do.free.index(slot))
    return dv


@gluon.jit
def _wide_consume(work, MEMBERS: gl.constexpr, CAUSAL: gl.constexpr, VALUES: gl.constexpr):
    """dv where VALUES, else dk. It goes where the keys or values lay that only this warpgroup reads."""
    dk_out, dv_out, t, own, scale, dk_scale = work
    ROWS: gl.constexpr = t.k.shape[1]
    BLOCK_M: gl.constexpr = t.q.tiles.shape[1]
    SCORES: gl.constexpr = _products(BLOCK_M)
    keys = _with_sequences(own.start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)), own.packed)
    gradient = _zeros(ROWS, t.k.shape[2])
    mbarrier.wait(t.kv_full.index(0), 0)
    if VALUES:
        out, smem = dv_out, t.k.index(0)
        for member in range(MEMBERS):
            before = member * own.count
            for i in range(own.count - own.masked):
                gradient = _dv_step(before + i, 0, gradient, smem, t, keys, own, scale, False, CAUSAL)
            if CAUSAL or own.packed.ptr is not None:
                for i in range(own.count - own.masked, own.count):
                    start = own.first + (own.count - 1 - i) * BLOCK_M
                    gradient = _dv_step(before + i, start, gradient, smem, t, keys, own, scale, True, CAUSAL)
    else:
        out, smem = dk_out, t.v.index(0)
        for i in range(MEMBERS * own.count):
            slot = _await(t.do, i)
            q = t.q.tiles.index(slot)
            dp = _product_with(smem, t.do.tiles.index(slot))
            delta = _beside_scores(t.delta, slot)
            dp = warpgroup_mma_wait(0, deps=[dp])
            mbarrier.arrive(t.do.free.index(slot))
            mbarrier.wait(t.ds.full.index(0), i & 1)
            p = t.ds.tiles.index(0).load(SCORES)
            mbarrier.arrive(t.ds.free.index(0))
            ds = p * (dp - gl.expand_dims(delta, 0))
            if own.packed.ptr is not None:
                ds = gl.where(p == 0.0, 0.0, ds)
            left = _left(ds, q.dtype, gradient)
            _await(t.q, i)
            gradient = warpgroup_mma(left, q, gradient, is_async=True)
            gradient, left = warpgroup_mma_wait(0, deps=[gradient, left])
            mbarrier.arrive(t.q.free.index(slot))
        gradient = _of_sequences(gradient * dk_scale, own.start_n, own)
    _store(out, (own.b, own.part, own.start_n, 0), gradient, smem)
    tma.store_wait(0)


# --- backward: dq with dk and dv ------------------------------------------------------------------------------------

# dq, dk and dv at once: five products a pair of tiles, where two kernels need seven. Two warpgroups compute dk and dv as they
# do alone, and leave ds in shared memory. Its product with the keys is this program's part of dq of a tile of queries, a sum
# over all programs of the head. With heads of 64 a third warpgroup computes it, adds to the sum in global memory, and the last
# one writes dq. With more features there are no registers for a third one.
#
# The parts are added in the order of the blocks of keys, so that every run gives the same bits. A counter for each tile
# says whose turn it is. The first program stores its part in float32, those after it add theirs, and the last one sets
# the counter back to zero. All programs of a head walk over its queries in the same order, so that each stays about a tile
# behind the one before it, and hardly waits once all have set out.
#
# Nothing waits for ever, by a forward-progress assumption: a GPU starts the programs of a launch in the order of their numbers,
# and lets a program that has started go on. CUDA does not promise the first; every NVIDIA GPU so far does it. A program waits
# only for the block of keys before its own, of the same head, which ``_place`` gives a lower number. So of all that run the one
# with the lowest number waits for nobody that has not ended, and ends. Within a program loads wait for free buffers, products
# for loads and the sum for products, never in a circle: a turn is passed on before the next one is waited for.

# $0: the counter. $1: where it is.
ASK = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")
# The first thread of a warpgroup speaks for all. $0: nothing. $1: where the counter is. $2: its new value, unless negative.
PASS = gl.constexpr("""{
    .reg .u32 thread;
    .reg .pred first;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, 127;
    setp.eq.u32 first, thread, 0;
    setp.ge.and.s32 first, $2, 0, first;
    @first st.release.gpu.global.b32 [$1], $2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def _ask_for_turn(counter):
    """Every thread for itself, so that each sees what was written before the turn was passed on."""
    return gl.inline_asm_elementwise(ASK, "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(counter, turn):
    """After all that the warpgroup has written. Negative: none."""
    thread_barrier()
    gl.inline_asm_elementwise(PASS, "=r,l,r", [counter, turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _in_fours(x):
    """A product (BLOCK_M, BLOCK_D) as rows of four numbers that one thread holds, the neighbours of a warp's one after the other."""
    BLOCK_M: gl.constexpr = x.shape[0]
    BLOCK_D: gl.constexpr = x.shape[1]
    x = x.reshape([BLOCK_M // 16, 2, 8, BLOCK_D // 8, 4, 2])  # warp, half, row, eight columns, lane, pair
    return x.permute([0, 3, 2, 4, 1, 5]).reshape([BLOCK_M * BLOCK_D // 4, 4])


@gluon.jit
def _from_fours(x, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of ``_in_fours``."""
    x = x.reshape([BLOCK_M // 16, BLOCK_D // 8, 8, 4, 2, 2])
    return gl.convert_layout(x.permute([0, 4, 2, 1, 3, 5]).reshape([BLOCK_M, BLOCK_D]), LAYOUT)


@gluon.jit
def _add_up(work, D: gl.constexpr, MEMBERS: gl.constexpr, CAUSAL: gl.constexpr):
    """This program's part of dq, tile by tile, added to those of the programs before it."""
    dq_out, sums_ptr, turns_ptr, t, own, H, N, dq_scale = work
    BLOCK_M: gl.constexpr = t.q.tiles.shape[1]
    BLOCK_D: gl.constexpr = t.k.shape[2]
    BLOCK_N: gl.constexpr = 2 * t.k.shape[1]
    OUT: gl.constexpr = _products(BLOCK_D)
    SIZE: gl.constexpr = BLOCK_M * BLOCK_D
    for w in gl.static_range(2):
        mbarrier.wait(t.kv_full.index(w), 0)
    block = own.start_n // BLOCK_N
    before = turns_ptr
    turn = -1  # to be passed on in ``before``, if any
    for member in range(MEMBERS):
        h = own.head + member
        for nth in range(own.count):
            i = member * own.count + nth
            start = own.first + (own.count - 1 - nth) * BLOCK_M
            tile = (own.b * H + h).to(gl.int64) * gl.cdiv(N, BLOCK_M) + start // BLOCK_M
            last = gl.cdiv(own.S, BLOCK_N) - 1  # block of keys that adds to this tile
            if CAUSAL:
                last = gl.minimum(gl.cdiv(start + BLOCK_M + own.diagonal, BLOCK_N) - 1, last)
            slot = _await(t.ds, i)
            dq = _zeros(BLOCK_M, BLOCK_D)
            for w in gl.static_range(2):
                ds = t.ds.tiles.index(slot * 2 + w).permute((1, 0))
                dq = warpgroup_mma(ds, t.k.index(w), dq, use_acc=w > 0, is_async=True)
            # Beside the products, and only now: what was written for the tile before has arrived, and is not waited for.
            _pass_turn(before, turn)
            counter = turns_ptr + tile
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(t.ds.free.index(slot))
            own_part = _in_fours(dq)
            line = gl.arange(0, SIZE // 4, layout=gl.SliceLayout(1, own_part.type.layout))
            four = gl.arange(0, 4, layout=gl.SliceLayout(0, own_part.type.layout))
            sums = sums_ptr + tile * SIZE + (gl.expand_dims(line, 1) * 4 + gl.expand_dims(four, 0))
            # Before the products are waited for, it was measured to be slower.
            now = _ask_for_turn(counter)
            if block > 0:  # without this ptxas keeps what tensor cores read in registers, which do not suffice
                while now < block:
                    now = _ask_for_turn(counter)
            if block == last:
                if block > 0:
                    dq = dq + _from_fours(gl.load(sums, cache_modifier=".cg"), BLOCK_M, BLOCK_D, OUT)
                rows = gl.expand_dims(start + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT)), 1)
                columns = gl.expand_dims(gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, OUT)), 0)
                base = dq_out.ptr + own.b.to(gl.int64) * dq_out.stride_b + h.to(gl.int64) * dq_out.stride_h
                at = base + (rows.to(gl.int64) * dq_out.stride_n + columns * dq_out.stride_d)
                gl.store(at, (dq * dq_scale).to(dq_out.ptr.dtype.element_ty), mask=(rows < N) & (columns < D))
            elif block == 0:
                gl.store(sums, own_part)
            else:  # the only one that adds: in one instruction, which nobody waits for
                gl.atomic_add(sums, own_part, sem="relaxed")
            before = counter
            turn = gl.where(block == last, 0, block + 1)  # 0: as it was, for the next call
    mbarrier.arrive(t.k_free.index(0))
    _pass_turn(before, turn)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section", "sequences"])
def _flash_attention_bwd_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse, delta,  # descriptors of (B * H * n_padded,): the queries' rows, padded; +inf and 0 beyond N; see COPIES
    dk, dv,  # descriptors: (B, H / GROUP * PARTS, S, D): of each part of the heads that share a key head
    dq,  # Rows of (B, H, N, D), if DQ
    sums_ptr,  # dq unscaled, in float32: (B, H, tiles of queries, BLOCK_M * BLOCK_D), see _in_fours; if DQ
    turns_ptr,  # (B, H, tiles of queries): zeros, before and afterwards; if DQ
    B, H, N, S, n_padded, section,
    boundaries_ptr, stride_s, sequences,  # (sequences + 1,) boundaries of packed sequences, or None
    scale,  # with log2(e)
    dk_scale,  # without
    D: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr,
    RAGGED: gl.constexpr,  # not causal, and the last block of keys is not whole
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """With dq every query must see a key: without ``CAUSAL``, or with N <= S; and sequences are not packed."""
    MEMBERS: gl.constexpr = GROUP // PARTS
    WARPGROUPS: gl.constexpr = 2 if BLOCK_D <= 128 else 1  # that own keys
    BLOCK_N: gl.constexpr = WARPGROUPS * ROWS
    block, head = _place(gl.program_id(0), gl.cdiv(S, BLOCK_N), B * (H // MEMBERS), section, False)
    b, part = head // (H // MEMBERS), head % (H // MEMBERS)
    start_n, diagonal = block * BLOCK_N, S - N
    packed = Packed(boundaries_ptr, stride_s, S, 0, sequences)
    if boundaries_ptr is not None:  # tiles of queries end where the last sequence ends that has keys here
        stop = gl.minimum(start_n + BLOCK_N, S)
        low, high, begin, end, alone = _within(packed, start_n, stop)
        packed = Packed(boundaries_ptr, stride_s, S, low, high)
        lowest, seeing_all = begin, begin
        if CAUSAL:
            lowest, seeing_all = start_n, stop - 1
        count = gl.cdiv(gl.maximum(end - lowest, 0), BLOCK_M)
        first = end - count * BLOCK_M
        masked = gl.where(alone, gl.cdiv(gl.maximum(seeing_all - first, 0), BLOCK_M), count)
    else:
        first, full = 0, 0
        if CAUSAL:
            first = gl.minimum(gl.maximum(start_n - diagonal, 0), N) // BLOCK_M * BLOCK_M
            full = gl.cdiv(gl.maximum(start_n + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
        count = gl.cdiv(gl.maximum(N - first, 0), BLOCK_M)
        masked = gl.cdiv(gl.maximum(full - first, 0), BLOCK_M)
    masked = gl.minimum(masked, count)
    own = Keys(b, part, part * MEMBERS, start_n, first, masked, count, diagonal, S, packed)

    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    k_tiles, v_tiles = _tiles(q.dtype, WARPGROUPS, ROWS, BLOCK_D), _tiles(q.dtype, WARPGROUPS, ROWS, BLOCK_D)
    kv_full = _barriers(WARPGROUPS, 1)
    q_ring = _ring(q.dtype, STAGES, BLOCK_M, BLOCK_D, 0, 2)
    do_ring = _ring(q.dtype, STAGES, BLOCK_M, BLOCK_D, 0, 2)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    ds_ring, k_free = q_ring, kv_full  # without dq nobody looks at them
    if DQ:
        ds_tiles = _tiles(q.dtype, DS_STAGES * 2, ROWS, BLOCK_M)
        ds_ring = Ring(ds_tiles, None, _barriers(DS_STAGES, 2), _barriers(DS_STAGES, 1))
        k_free = _barriers(1, 1)
    if BLOCK_D > 128:
        P_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
        p_tile = gl.allocate_shared_memory(gl.float32, [1, ROWS, BLOCK_M], P_TILE)
        ds_ring = Ring(p_tile, None, _barriers(1, 1), _barriers(1, 1))
    t = Buffers(k_tiles, v_tiles, kv_full, q_ring, do_ring, lse_tiles, delta_tiles, ds_ring, k_free)
    fence_async_shared()
    consumer = dk, dv, t, own, scale, dk_scale
    producer = q, k, v, do, lse, delta, t, own, H, n_padded
    if BLOCK_D > 128:
        gl.warp_specialize(
            [
                (_wide_consume, (consumer, MEMBERS, CAUSAL, True)),
                (_wide_consume, (consumer, MEMBERS, CAUSAL, False)),
                (_bwd_produce, (producer, MEMBERS, PARTS)),
            ],
            [4, 1],
            [240, 24],
        )
    elif not DQ:
        gl.warp_specialize(
            [
                (_bwd_consume, (consumer, MEMBERS, DQ, CAUSAL, RAGGED, 0)),
                (_bwd_consume, (consumer, MEMBERS, DQ, CAUSAL, RAGGED, 1)),
                (_bwd_produce, (producer, MEMBERS, PARTS)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_bwd_consume, (consumer, MEMBERS, DQ, CAUSAL, RAGGED, 0)),
                (_bwd_consume, (consumer, MEMBERS, DQ, CAUSAL, RAGGED, 1)),
                (_add_up, ((dq, sums_ptr, turns_ptr, t, own, H, N, dk_scale), D, MEMBERS, CAUSAL)),
                (_bwd_produce, (producer, MEMBERS, PARTS)),
            ],
            [4, 4, 1],
            [208, 72, 24],
        )


# --- backward: dq alone ---------------------------------------------------------------------------------------------


@gluon.jit
def _dq_produce(work, GROUP: gl.constexpr):
    q, k, v, do, shared = work
    q_tiles, do_tiles, q_full, k_ring, v_ring, b, h, start_m, span, packed = shared
    ROWS: gl.constexpr = q_tiles.shape[1]
    BLOCK_D: gl.constexpr = q_tiles.shape[2]
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), 2 * ROWS * BLOCK_D * 2)
        tma.async_copy_global_to_shared(q, (b, h, start_m + w * ROWS, 0), q_full.index(w), q_tiles.index(w))
        tma.async_copy_global_to_shared(do, (b, h, start_m + w * ROWS, 0), q_full.index(w), do_tiles.index(w))
    for i in range(span.count):
        at = (b, h // GROUP, _start_of(i, span, packed, BLOCK_N), 0)
        _copy(k, at, k_ring, _claim(k_ring, i, BLOCK_N * BLOCK_D * 2))
        _copy(v, at, v_ring, _claim(v_ring, i, BLOCK_N * BLOCK_D * 2))


@gluon.jit
def _dq_step(i, dq, own, k_ring, v_ring, span, packed, diagonal, S, scale, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    q, do, lse, delta, rows = own
    slot = _await(k_ring, i)
    k = k_ring.tiles.index(slot)
    scores = _product_with(q, k)
    _await(v_ring, i)
    dp = _product_with(do, v_ring.tiles.index(slot))
    scores = warpgroup_mma_wait(1, deps=[scores])
    p = gl.exp2(scores * scale - gl.expand_dims(lse, 1))
    if MASKED:
        p = gl.where(_seen(i, scores, rows, span, packed, diagonal, S, CAUSAL), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_ring.free.index(slot))
    ds = p * (dp - gl.expand_dims(delta, 1))
    left = _left(ds, q.dtype, dq)
    dq = warpgroup_mma(left, k, dq, is_async=True)
    dq, left = warpgroup_mma_wait(0, deps=[dq, left])
    mbarrier.arrive(k_ring.free.index(slot))
    return dq


@gluon.jit
def _dq_consume(work, CAUSAL: gl.constexpr, W: gl.constexpr):
    dq_out, lse_ptr, delta_ptr, shared, N, S, scale, dq_scale = work
    q_tiles, do_tiles, q_full, k_ring, v_ring, b, h, start_m, span, packed = shared
    ROWS: gl.constexpr = q_tiles.shape[1]
    BLOCK_D: gl.constexpr = q_tiles.shape[2]
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    queries = start_m + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _products(BLOCK_N)))
    rows = _with_sequences(queries, packed)
    lse = gl.load(lse_ptr + queries)
    delta = gl.load(delta_ptr + queries)
    q, do = q_tiles.index(W), do_tiles.index(W)
    own = q, do, lse, delta, rows
    dq = _zeros(ROWS, BLOCK_D)
    mbarrier.wait(q_full.index(W), 0)
    for i in range(span.masked):
        dq = _dq_step(i, dq, own, k_ring, v_ring, span, packed, S - N, S, scale, True, CAUSAL)
    for i in range(span.masked, span.count):
        dq = _dq_step(i, dq, own, k_ring, v_ring, span, packed, S - N, S, scale, False, CAUSAL)
    _store(dq_out, (b, h, start_m + W * ROWS, 0), dq * dq_scale, q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", "H", "N", "S", "n_padded", "section", "sequences"])
def _flash_attention_bwd_dq_hopper_kernel(
    q, k, v, do,  # tensor descriptors: (B, H, N, D) for q and do, (B, H / GROUP, S, D) for k and v
    lse_ptr, delta_ptr,  # (B, H, n_padded); +inf and 0 beyond N
    dq,  # a descriptor: (B, H, N, D)
    B, H, N, S, n_padded, section,
    boundaries_ptr, stride_s, sequences,  # (sequences + 1,) boundaries of packed sequences, or None
    scale,  # with log2(e)
    dq_scale,  # without
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    block, head = _place(gl.program_id(0), gl.cdiv(N, 2 * ROWS), B * H, section, CAUSAL)
    b, h, start_m = head // H, head % H, block * (2 * ROWS)
    packed = Packed(boundaries_ptr, stride_s, N, 0, sequences)
    span = _keys_of(start_m, N, S, packed, CAUSAL, 2 * ROWS, BLOCK_N)
    packed = Packed(boundaries_ptr, stride_s, N, span.low, span.high)
    lse_ptr += head.to(gl.int64) * n_padded
    delta_ptr += head.to(gl.int64) * n_padded

    q_tiles, do_tiles, q_full = _tiles(q.dtype, 2, ROWS, BLOCK_D), _tiles(q.dtype, 2, ROWS, BLOCK_D), _barriers(2, 1)
    k_ring = _ring(q.dtype, STAGES, BLOCK_N, BLOCK_D, 0, 2)
    v_ring = _ring(q.dtype, STAGES, BLOCK_N, BLOCK_D, 0, 2)
    fence_async_shared()
    shared = q_tiles, do_tiles, q_full, k_ring, v_ring, b, h, start_m, span, packed
    consumer = dq, lse_ptr, delta_ptr, shared, N, S, scale, dq_scale
    producer = q, k, v, do, shared
    gl.warp_specialize(
        [
            (_dq_consume, (consumer, CAUSAL, 0)),
            (_dq_consume, (consumer, CAUSAL, 1)),
            (_dq_produce, (producer, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


# --- configurations -------------------------------------------------------------------------------------------------

# From how many keys on, which tiles; with fewer keys, and with None, the plain kernel is faster. Three warpgroups have no
# registers for the overlap, and at 64 features gain more from one another, but end later than two.
TWO = {"BLOCK_N": 128, "WARPGROUPS": 2, "STAGES": 2, "OVERLAP": True, "REST": 0}
THREE = {"BLOCK_N": 128, "WARPGROUPS": 3, "STAGES": 2, "OVERLAP": False, "REST": 0}
Choices = tuple[tuple[int, dict[str, Any] | None], ...]
# By the features that are computed and causal.
TILES: dict[tuple[int, bool], Choices] = {
    (64, False): ((1024, TWO), (2048, THREE)),
    (64, True): ((1024, TWO), (8193, THREE)),
    **dict.fromkeys(((80, False), (80, True)), ((0, TWO | {"BLOCK_D": 64, "REST": 16}),)),
    **dict.fromkeys(((96, False), (96, True)), ((0, TWO | {"BLOCK_D": 64, "REST": 32}),)),
    **dict.fromkeys(((128, False), (128, True)), ((0, TWO),)),
    **dict.fromkeys(((256, False), (256, True)), ((0, TWO | {"BLOCK_N": 64}),)),
}
# By kernel and BLOCK_D: of the kernel for dk and dv; of the same with dq, where it is faster than two; of that for dq.
BACKWARD_TILES: dict[tuple[str, int], Choices] = {
    ("dkdv", 64): ((0, {"DQ": False, "BLOCK_M": 64, "STAGES": 2, "DS_STAGES": 0}),),
    ("dkdv", 128): ((0, {"DQ": False, "BLOCK_M": 64, "STAGES": 3, "DS_STAGES": 0}),),
    ("dkdv", 256): ((0, {"DQ": False, "BLOCK_M": 64, "STAGES": 2, "DS_STAGES": 0}),),
    ("bwd", 64): ((0, {"DQ": True, "BLOCK_M": 64, "STAGES": 3, "DS_STAGES": 2}),),
    ("dq", 128): ((0, {"BLOCK_N": 64, "STAGES": 4}),),
    ("dq", 256): ((0, {"BLOCK_N": 32, "STAGES": 3}),),
}
PADDING = 128  # rows that lse and delta are padded to: no tile of them reaches into the next head


def config(
    kernel: str, d: int, itemsize: int, s: int, causal: bool, properties: runtime.DeviceProperties
) -> triton.Config | None:
    """The tiles of ``fwd``, ``dkdv`` or ``dq``, ``None`` where the plain kernel is to be used; or of ``bwd``, ``None`` where two are."""
    width, found = max(16, triton.next_power_of_2(d)), None
    if kernel == "fwd":
        choices = TILES.get((80 if 64 < d <= 80 else 96 if 80 < d <= 96 else width, causal), ())
    else:
        choices = BACKWARD_TILES.get((kernel, width), ())
    for shortest, tiles in choices:
        found = tiles if s >= shortest else found
    if found is None or itemsize != 2 or not properties.is_hopper:
        return None
    return triton.Config({"BLOCK_D": width, "ROWS": ROWS, **found}, num_warps=4)


def forward_grid(num_blocks: int, heads: int, d: int, causal: bool, mean: int, num_sms: int) -> tuple[int, int]:
    """How many programs share ``num_blocks`` blocks of queries a head, and the order in which each takes them.

    A program that stays for many blocks loads the next one's tiles while it stores this one's output: that counts most
    where a block has few tiles. But work is given out beforehand, so that programs have to be equally long. Causal ones
    take pairs of a long block and a short one, where few programs have one pair less. Heads of 80 and 96 numbers go faster
    with rounds of blocks, the long ones first, from the first program to the last one and back again. Else each block is a
    program. With heads of 256 numbers queries and output share a buffer, and nothing is gained.

    Of packed sequences, which have ``mean`` queries (0: they are not packed), nobody knows beforehand how long a block takes:
    programs stay only where all of them are short, and else for two.
    """
    units = num_blocks * heads
    if d > 128 or units <= num_sms:
        return units, LONG_FIRST.value
    if mean:
        return num_sms if mean <= 512 else max(num_sms, -(-units // 2)), LONG_FIRST.value
    if not causal:
        return num_sms, LONG_FIRST.value
    if 64 < d <= 96:
        return num_sms, SNAKES.value
    pairs = units // 2
    even = num_blocks % 2 == 0 and pairs >= 0.9 * num_sms * -(-pairs // num_sms)
    return (min(pairs, num_sms), PAIRS.value) if even else (units, LONG_FIRST.value)


def parts(heads: int, s: int, group: int, d: int, num_sms: int) -> int:
    """Over how many programs the ``group`` query heads that share one of ``heads`` key heads are divided.

    As few as give each multiprocessor two programs: a long one and a short one, if causal.
    """
    blocks = heads * -(-s // (2 * ROWS if d <= 128 else ROWS))
    return next((n for n in range(1, group) if group % n == 0 and blocks * n >= 1.9 * num_sms), group)


def all_gradients_section(heads: int, fitting: int, causal: bool, num_sms: int) -> int:
    """How many of ``heads`` heads to work on at a time: no more than are ``fitting`` for two kernels.

    Sums of dq take room in the L2 cache too, as much as the tensors read: where programs are equally long, half as many heads.
    Two programs a head or more run beside each other, so that the next part of a sum comes soon. All sections are equally large.
    """
    most = min(fitting, num_sms // 2)
    return -(-heads // -(-heads // max(1, most if causal else most // 2)))


def programs_wait_little(
    heads: int, n: int, s: int, members: int, causal: bool, section: int, block_m: int, num_sms: int
) -> bool:
    """Whether the programs of a head, which add to dq in turn, lose little time by waiting for one another at the start.

    Those that set out together have ``late`` before the last of them that are as long as it is: it ends so many tiles later
    than without turns. Causal programs of later keys are shorter by more than they wait. A fourth is what five products
    instead of seven save.
    """
    blocks = -(-s // (2 * ROWS))
    late = min(-(-(s - n) // (2 * ROWS)) if causal else blocks - 1, -(-num_sms // section) - 1)
    tiles = members * -(-n // block_m) * max(1.0, heads * blocks / num_sms)  # that a multiprocessor computes
    return 4 * late <= tiles
