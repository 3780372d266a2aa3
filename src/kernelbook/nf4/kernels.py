"""4-bit code books with blockwise absmax: dequantizing the experts that are asked for, and quantizing.

Dequantizing, element by element: out[i] = code[index[i]] * absmax[i // BLOCK_SIZE], in float32, rounded once. A program
finds its expert, reads the packed bytes of a part of it as words of four bytes, which hold eight elements, and writes
these eight as one run. The 16 code values are read once a program and looked up with tl.gather, from shared memory or
(with one warp) from the other lanes' registers. Double quantization adds, for each block, absmax =
nested_code[q] * nested_absmax + nested_offset: two roundings, not one, so that bitsandbytes' values come out; launches
therefore ask for enable_fp_fusion=False.

Four fifths of the traffic are writes, and memory that turns from writing to reading and back for every kilobyte loses
time. So one program in SPAN prefetches the words and scales of SPAN later programs into the L2 cache: reads come in
bursts, and what the later programs read is there. On NVIDIA GPUs only, with an instruction of PTX.

Bytes moved for an element: 0.5 packed, 4 / BLOCK_SIZE for absmax (1 / BLOCK_SIZE and a little in the double case), and
the output.

Words need experts that start at a word: where an expert's size is not a multiple of eight elements, or the packed bytes
are not aligned, another kernel reads a byte for each element. Neither handles block sizes that are not powers of two, or
strided packed bytes.
"""

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.packed.kernels import NESTED_BLOCK, scale_of, stored_scale

# isort: split
import triton
import triton.language as tl


def words_config(double_quant: bool, properties: runtime.DeviceProperties) -> triton.Config:
    """UNROLL words a lane. Every SPAN-th program prefetches for SPAN others,
    AHEAD programs later: about as many as an H200 runs at a time.

    Double quantization has more loads that wait for other loads, and hides
    them behind more words.
    """
    tile = {"BLOCK_W": 128, "UNROLL": 3 if double_quant else 2}
    ahead = {"AHEAD": 1024 if double_quant else 2048, "SPAN": 16}
    return triton.Config(tile | ahead, num_warps=4)


ELEMENTS_CONFIG = triton.Config({"BLOCK": 1024}, num_warps=4)


def quantize_config(block_size: int) -> triton.Config:
    """A program quantizes as many blocks as make 4,096 elements: 32 in each of 128 threads."""
    return triton.Config({"BLOCKS": max(1, 4096 // block_size)}, num_warps=4)


# --- device helpers -------------------------------------------------------------------------------------------------


@triton.jit
def _load_expert(experts_ptr, first, slot, E, HAS_EXPERTS: tl.constexpr):
    """The id of the expert that goes to ``slot``, and whether there is such an expert.

    Without a list of experts they come one after another, from ``first`` on.
    """
    if HAS_EXPERTS:
        expert = tl.load(experts_ptr + slot).to(tl.int64)
    else:
        expert = first + slot.to(tl.int64)
    return expert, (expert >= 0) & (expert < E)


# --- dequantize -----------------------------------------------------------------------------------------------------


@triton.jit
def _prefetch(ptr, count, MOST: tl.constexpr, PREFETCH: tl.constexpr):
    """Asks the L2 cache for count <= MOST values, a line of 128 bytes a lane."""
    LINE: tl.constexpr = 128 // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    offs = LINE * tl.arange(0, triton.next_power_of_2((MOST + LINE - 1) // LINE))
    if PREFETCH == "instruction":
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred inside;
                setp.ne.s32 inside, $2, 0;
                @inside prefetch.global.L2 [$1];
                mov.u32 $0, 0;
            }
            """,
            "=r,l,r",
            [(ptr + offs).to(tl.int64), (offs < count).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:  # the interpreter has no instructions; a load shows the same addresses
        tl.load(ptr + offs, mask=offs < count, other=0)


# One compiled kernel serves all sizes: eight outputs are 16 bytes whatever the number of words.
@triton.jit(do_not_specialize=["first", "E", "words", "tiles"])
def _nf4_dequantize_fwd_words_kernel(
    packed_ptr,  # (E * words * 4,) uint8, read as words: eight elements each
    absmax_ptr,  # (blocks,) float32, or uint8, see SCALE in packed/kernels.py
    nested_absmax_ptr,  # (ceil(blocks / 256),)
    nested_code_ptr,  # (256,)
    nested_offset_ptr,  # (); where SCALE has them
    code_ptr,  # (16,) float32
    experts_ptr, first,  # (A,) integers, if HAS_EXPERTS; else the number of the first one
    out_ptr,  # (A, 8 * words)
    E, words, tiles,  # words and tiles in an expert
    HAS_EXPERTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_W: tl.constexpr, UNROLL: tl.constexpr,
    AHEAD: tl.constexpr, SPAN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = BLOCK_W * UNROLL
    WORDS: tl.constexpr = BLOCK_SIZE // 8  # in a block
    packed_ptr = packed_ptr.to(tl.pointer_type(tl.int32))
    pid = tl.program_id(0)
    if PREFETCH != "none":  # noqa: SIM102
        if (pid % SPAN == 0) & (tl.num_programs(0) - pid > AHEAD):
            # What SPAN programs from that one on are going to read, as far as it is of one expert.
            slot_ahead = (pid + AHEAD) // tiles
            expert_ahead, is_there = _load_expert(experts_ptr, first, slot_ahead, E, HAS_EXPERTS)
            tile_ahead = (pid + AHEAD - slot_ahead * tiles).to(tl.int64) * TILE
            count = tl.where(is_there, tl.minimum(words - tile_ahead, SPAN * TILE).to(tl.int32), 0)
            word_ahead = expert_ahead * words + tile_ahead
            _prefetch(packed_ptr + word_ahead, count, SPAN * TILE, PREFETCH)
            _prefetch(absmax_ptr + word_ahead // WORDS, count // WORDS, SPAN * TILE // WORDS, PREFETCH)
    slot = pid // tiles
    expert, exists = _load_expert(experts_ptr, first, slot, E, HAS_EXPERTS)
    # 64-bit scalars find the tile; offsets within it are 32-bit.
    tile0 = (pid - slot * tiles).to(tl.int64) * TILE
    word0 = expert * words + tile0
    block0 = word0 // WORDS
    within = (word0 - block0 * WORDS).to(tl.int32)
    left = tl.minimum(words - tile0, TILE).to(tl.int32)
    readable = tl.where(exists, left, 0)
    code = tl.load(code_ptr + tl.arange(0, 16))

    # All loads come before the first use, so that they are in flight together.
    packed, absmax = (), ()
    for u in tl.static_range(UNROLL):
        offs_w = u * BLOCK_W + tl.arange(0, BLOCK_W)
        mask = offs_w < readable
        blocks = (within + offs_w) // WORDS
        word = tl.load(
            packed_ptr + word0 + offs_w, mask=mask, other=0,
            eviction_policy="evict_first",  # read once
        )  # fmt: skip
        packed += (word,)
        absmax += (tl.load(absmax_ptr + block0 + blocks, mask=mask, other=0),)
    scale0, scale1, offset, border = 0.0, 0.0, 0.0, 0
    if SCALE == "nested" or SCALE == "e4m3":
        # A tile's blocks lie in one nested block or in two.
        tl.static_assert(TILE // WORDS < NESTED_BLOCK)
        some = readable > 0
        nested0 = block0 // NESTED_BLOCK
        nested1 = (block0 + (within + left - 1) // WORDS) // NESTED_BLOCK
        scale0 = tl.load(nested_absmax_ptr + nested0, mask=some, other=0.0)
        scale1 = tl.load(nested_absmax_ptr + nested1, mask=some, other=0.0)
        border = ((nested0 + 1) * NESTED_BLOCK - block0).to(tl.int32)
    if SCALE == "nested":
        offset = tl.load(nested_offset_ptr, mask=readable > 0, other=0.0)
    stored, absmax = absmax, ()
    for u in tl.static_range(UNROLL):
        offs_w = u * BLOCK_W + tl.arange(0, BLOCK_W)
        nested = tl.where((within + offs_w) // WORDS < border, scale0, scale1)
        absmax += (scale_of(stored[u], nested, offs_w < readable, nested_code_ptr, offset, SCALE),)

    offs_e = tl.arange(0, 8)
    shift = (4 * offs_e) ^ 4  # the even element is the high half of its byte
    out_ptr += (slot.to(tl.int64) * words + tile0) * 8
    for u in tl.static_range(UNROLL):
        offs_w = u * BLOCK_W + tl.arange(0, BLOCK_W)
        index = (packed[u][:, None] >> shift[None, :]) & 15  # (BLOCK_W, 8)
        value = tl.gather(code, tl.reshape(index, (BLOCK_W * 8,)), 0)
        out = tl.reshape(value, (BLOCK_W, 8)) * absmax[u][:, None]
        out_ptrs = out_ptr + (offs_w * 8)[:, None] + offs_e[None, :]
        mask = (offs_w < left)[:, None]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "E", "size", "tiles"])
def _nf4_dequantize_fwd_elements_kernel(
    packed_ptr,  # (ceil(E * size / 2),) uint8
    absmax_ptr,  # (blocks,) float32, or uint8, see SCALE in packed/kernels.py
    nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,  # (ceil(blocks / 256),), (256,), (), where SCALE has them
    code_ptr,  # (16,) float32
    experts_ptr, first,  # (A,) integers, if HAS_EXPERTS; else the number of the first one
    out_ptr,  # (A, size)
    E, size, tiles,  # elements and tiles in an expert
    HAS_EXPERTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Any size: an expert may start in the middle of a byte and of a block. Neighbours share bytes through the cache."""
    pid = tl.program_id(0)
    slot = pid // tiles
    expert, exists = _load_expert(experts_ptr, first, slot, E, HAS_EXPERTS)
    tile0 = (pid - slot * tiles).to(tl.int64) * BLOCK
    element0 = expert * size + tile0
    offs = tl.arange(0, BLOCK)
    inside = offs < tl.minimum(size - tile0, BLOCK).to(tl.int32)
    mask = inside & exists
    byte0 = element0 // 2
    halves = (element0 - byte0 * 2).to(tl.int32) + offs
    packed = tl.load(packed_ptr + byte0 + halves // 2, mask=mask, other=0).to(tl.int32)
    block0 = element0 // BLOCK_SIZE
    blocks = ((element0 - block0 * BLOCK_SIZE).to(tl.int32) + offs) // BLOCK_SIZE
    stored, nested = stored_scale(block0, blocks, mask, absmax_ptr, nested_absmax_ptr, SCALE)
    absmax = scale_of(stored, nested, mask, nested_code_ptr, nested_offset_ptr, SCALE)
    index = (packed >> (4 - 4 * (halves & 1))) & 15
    out = tl.load(code_ptr + index) * absmax
    out_ptrs = out_ptr + slot.to(tl.int64) * size + tile0 + offs
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


# --- quantize -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def _nf4_quantize_fwd_kernel(
    w_ptr,  # (n,) contiguous
    bounds_ptr,  # (15,) float32: the middles between the sorted code values
    order_ptr,  # (16,) int32: the code book's index of each sorted value
    packed_ptr,  # (ceil(n / 2),) uint8
    absmax_ptr,  # (ceil(n / BLOCK_SIZE),) float32
    n,
    BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block0 = tl.program_id(0).to(tl.int64) * BLOCKS
    blocks = block0 + tl.arange(0, BLOCKS)
    offs = blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    w = tl.load(w_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(w), axis=1)
    # 1e-38 keeps a block of zeros from 0 / 0. Which blocks are divided, and
    # which absmax is stored with that floor, decides over single bits: both as
    # bitsandbytes has it.
    floored = tl.maximum(absmax, tl.full((BLOCKS,), 1e-38, tl.float32))
    short = (blocks + 1) * BLOCK_SIZE > n
    kept = tl.where(short, floored, absmax)
    # A maximum passes over NaN; so would the block, as if it had never been there.
    kept = tl.where(tl.max((w != w).to(tl.int32), axis=1) > 0, float("nan"), kept)
    tl.store(absmax_ptr + blocks, kept, mask=blocks * BLOCK_SIZE < n)
    reciprocal = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), floored)
    divided = tl.div_rn(w, tl.broadcast_to(floored[:, None], w.shape))
    scaled = tl.where(short[:, None], divided, w * reciprocal[:, None])
    rank = tl.zeros((BLOCKS, BLOCK_SIZE), tl.int32)
    for k in tl.static_range(15):
        rank += (scaled > tl.load(bounds_ptr + k)).to(tl.int32)
    index = tl.load(order_ptr + rank)
    high, low = tl.split(tl.reshape(index, (BLOCKS, BLOCK_SIZE // 2, 2)))
    offs_b = tl.arange(0, BLOCK_SIZE // 2)
    pairs = blocks[:, None] * (BLOCK_SIZE // 2) + offs_b[None, :]
    packed = ((high << 4) | low).to(tl.uint8)
    tl.store(packed_ptr + pairs, packed, mask=pairs * 2 < n)


# --- multiply -------------------------------------------------------------------------------------------------------


MAX_MATMUL_M = 8  # tokens up to which W is not written to memory
# Elements of W from which kernels for tensor cores decode it, where there are such kernels: for few tokens, and for more.
PACKED_ELEMENTS, SOME_ELEMENTS = 2**23, 2**22


def for_tensor_cores(m: int, n: int, k: int) -> bool:
    """Whether W is large enough for a kernel for tensor cores, if :func:`kernelbook.packed.products.plan` has one."""
    return n * k >= (PACKED_ELEMENTS if m <= MAX_MATMUL_M else SOME_ELEMENTS)


MATMUL_TOKENS = 8  # of them in one program: x and the sums of a row stay in registers


def matmul_config(tokens: int, n: int, properties: runtime.DeviceProperties) -> triton.Config:
    """One warp a program: the code book is then looked up in the other lanes' registers, without a barrier.

    Each lane has ROWS * UNROLL words in flight. One row makes many programs of a small matrix; two share what is read
    of x.
    """
    rows = 1 if n < 4096 else 2
    unroll = 4 if rows == 2 or tokens > 4 else 8  # eight words beside eight tokens would spill
    if rows * tokens == 16 and not properties.has_tensor_cores:  # of an older generation, whose compiler takes more
        unroll = 2
    return triton.Config({"ROWS": rows, "BLOCK_W": 32, "UNROLL": unroll}, num_warps=1)


@triton.jit(do_not_specialize=["expert", "E", "M", "N", "words"])
def _nf4_matmul_fwd_kernel(
    x_ptr,  # (M, 8 * words) contiguous
    packed_ptr,  # (E * N * words * 4,) uint8, read as words: eight elements of K each
    absmax_ptr,  # (blocks,) float32, or uint8, see SCALE in packed/kernels.py
    nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,  # (ceil(blocks / 256),), (256,), (), where SCALE has them
    code_ptr,  # (16,) float32
    expert_ptr, expert,  # (1,) integer, if HAS_EXPERT; else the number
    y_ptr,  # (M, N) output
    E, M, N, words,
    HAS_EXPERT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y = x W^T for the W of one expert: BLOCK_M * ROWS elements a program, each word read once and never dequantized
    into memory. absmax multiplies the sum over a word, not each of its elements."""
    expert, exists = _load_expert(expert_ptr, expert, tl.full((), 0, tl.int32), E, HAS_EXPERT)
    packed_ptr = packed_ptr.to(tl.pointer_type(tl.int32))
    n0 = tl.program_id(0) * ROWS
    m0 = tl.program_id(1) * BLOCK_M
    offs_e = tl.arange(0, 8)
    shift = (4 * offs_e) ^ 4
    code = tl.load(code_ptr + tl.arange(0, 16))
    word0 = (expert * N + n0) * words
    block0 = word0 // (BLOCK_SIZE // 8)
    within = (word0 - block0 * (BLOCK_SIZE // 8)).to(tl.int32)
    x_ptr += m0.to(tl.int64) * words * 8
    acc = ()
    for _ in tl.static_range(BLOCK_M * ROWS):
        acc += (tl.zeros((BLOCK_W,), tl.float32),)
    for w0 in range(0, words, BLOCK_W * UNROLL):
        packed, absmax = (), ()
        for u in tl.static_range(UNROLL):
            offs_w = w0 + u * BLOCK_W + tl.arange(0, BLOCK_W)
            for r in tl.static_range(ROWS):
                mask = (offs_w < words) & (n0 + r < N) & exists
                offs = r * words + offs_w
                packed += (tl.load(packed_ptr + word0 + offs, mask=mask, other=0),)
                blocks = (within + offs) // (BLOCK_SIZE // 8)
                stored, nested = stored_scale(block0, blocks, mask, absmax_ptr, nested_absmax_ptr, SCALE)
                absmax += (scale_of(stored, nested, mask, nested_code_ptr, nested_offset_ptr, SCALE),)
        for u in tl.static_range(UNROLL):
            offs_w = w0 + u * BLOCK_W + tl.arange(0, BLOCK_W)
            x = ()
            for t in tl.static_range(BLOCK_M):
                x_ptrs = x_ptr + t * words * 8 + (offs_w * 8)[:, None] + offs_e[None, :]
                mask = (offs_w < words) & (m0 + t < M)
                part = tl.load(x_ptrs, mask=mask[:, None], other=0.0)
                x += (part.to(tl.float32),)  # (BLOCK_W, 8)
            summed = ()
            for r in tl.static_range(ROWS):
                index = (packed[u * ROWS + r][:, None] >> shift[None, :]) & 15
                value = tl.gather(code, tl.reshape(index, (BLOCK_W * 8,)), 0)
                value = tl.reshape(value, (BLOCK_W, 8))
                for t in tl.static_range(BLOCK_M):
                    part = tl.sum(value * x[t], axis=1) * absmax[u * ROWS + r]
                    summed += (acc[r * BLOCK_M + t] + part,)
            acc = summed
    for r in tl.static_range(ROWS):
        for t in tl.static_range(BLOCK_M):
            y_ptrs = y_ptr + (m0 + t).to(tl.int64) * N + n0 + r
            y = tl.sum(acc[r * BLOCK_M + t], axis=0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptrs, y, mask=(n0 + r < N) & (m0 + t < M))
