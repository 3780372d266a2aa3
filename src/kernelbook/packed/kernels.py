"""Decoding of 4-bit elements in registers, on their way into a product.

A word of four bytes holds eight elements; the even element is the high half of its byte. On NVIDIA GPUs a word becomes four
pairs of 16-bit numbers by byte permutation: the sixteen values lie in eight registers, their low bytes in four and their
high bytes in the other four, and one ``prmt`` picks four bytes of eight by the three low bits of four elements. Two of
them and a third that chooses by the elements' fourth bit look up one byte of four elements, and another two mix low and
high bytes: some two and a half instructions an element.

A block's scale comes in one of two ways. It multiplies the table before the look-ups (``pairs_by_table``), in
float32 and with one rounding: exact, and worth it where a thread has 32 elements or more of a block. Or it multiplies the
pairs (``decoded``), split in two 16-bit numbers so that its own rounding is not felt.

Formats differ in two things, both of which SCALE says. ``"float32"`` and ``"nested"`` have a code book: NF4 and FP4, with
scales as they are or as 8-bit codes. ``"e8m0"`` and ``"e4m3"`` are MXFP4 and NVFP4: the bits of their e2m1 are moved to where 16-bit numbers have them, and
a scale of MXFP4, a power of two, needs no second half. Nor does ``"e4m3 alone"``: NVFP4's without its float32, a factor of the sum.

Elsewhere, and for float32 and float64, the values are looked up with ``tl.gather`` and scaled in float32.
"""

import itertools
import re

from kernelbook import packed

# isort: split
import triton
import triton.language as tl

NESTED_BLOCK = tl.constexpr(packed.NESTED_BLOCK)

# $0 to $3: the pairs. $4: a word. $5 and $6: the scale's two halves, each twice. $7 to $10 and $11 to $14: the table.
_LOOK_UP = """
    and.b32 i, $4, 0x77777777;
    shr.u32 h, $4, 1;
    lop3.b32 h, h, 0x44444444, 0x32103210, 0xea;
    prmt.b32 a, $7, $8, i;
    prmt.b32 b, $9, $10, i;
    prmt.b32 lo, a, b, h;
    prmt.b32 a, $11, $12, i;
    prmt.b32 b, $13, $14, i;
    prmt.b32 hi, a, b, h;
    prmt.b32 p0, lo, hi, 0x4051;
    prmt.b32 p1, lo, hi, 0x6273;
    shr.u32 i, i, 16;
    shr.u32 h, h, 16;
    prmt.b32 a, $7, $8, i;
    prmt.b32 b, $9, $10, i;
    prmt.b32 lo, a, b, h;
    prmt.b32 a, $11, $12, i;
    prmt.b32 b, $13, $14, i;
    prmt.b32 hi, a, b, h;
    prmt.b32 p2, lo, hi, 0x4051;
    prmt.b32 p3, lo, hi, 0x6273;
"""


def _e2m1_asm(kind: str, is_bf16: bool, far: bool) -> str:
    """e2m1 has the bits of a 16-bit number, but for zeros between its sign and its exponent, and for the exponent's bias.

    A pair's second element is the next one, or if ``far`` the fourth after it: these lie 16 bits apart in a word already.
    """
    mantissa, bias = (7, "0x7e807e80") if is_bf16 else (10, "0x74007400")  # 2^126 and 2^14, twice
    bias = "$5" if kind == "e4m3 alone" else bias  # the scale has that in it
    shift = 13 - mantissa
    lines = ["    shl.b32 h, $4, 4;", f"    mov.b32 b, {bias};", "    mov.b32 z, 0x80008000;"]
    for pair, at in enumerate((4, 0, 12, 8)):  # where the elements 0 to 3 lie
        left = mantissa - 1 - at
        if far:
            lines += [f"    shl.b32 a, $4, {12 - at};", f"    {'shl' if left > 0 else 'shr'}.b32 i, $4, {abs(left)};"]
        else:  # a byte's high half and its low one, each on top of 16 bits
            lines += [f"    prmt.b32 a, $4, h, {0x4000 + 0x1111 * pair:#x};", f"    shr.u32 i, a, {shift};"]
        lines += [
            f"    and.b32 i, i, {0x70007000 >> shift:#x};",
            "    lop3.b32 i, a, 0x80008000, i, 0xea;",
            f"    FMA p{pair}, i, b, z;",
        ]
    scale = {"e8m0": _SCALE_ONE, "e4m3": _SCALE_TWO, "e4m3 alone": _PLAIN}[kind]
    return str(_asm("\n".join(lines) + "\n", scale, "bf16" if is_bf16 else "f16").value)


# The scale in one part, which is exact, or in two.
_SCALE_ONE = "    mov.b32 z, 0x80008000;\n" + "".join(f"    FMA ${i}, p{i}, $5, z;\n" for i in range(4))
_SCALE_TWO = "    mov.b32 z, 0x80008000;\n" + "".join(
    f"    FMA a, p{i}, $6, z;\n    FMA ${i}, p{i}, $5, a;\n" for i in range(4)
)
_PLAIN = "".join(f"    mov.b32 ${i}, p{i};\n" for i in range(4))


def _asm(elements: str, scale: str, dtype: str = "") -> "tl.constexpr":
    """Assembly that decodes ``elements`` and multiplies them."""
    names = ".reg .b32 i, h, lo, hi, a, b, z, p0, p1, p2, p3;\n"
    return tl.constexpr("{\n" + names + (elements + scale).replace("FMA", f"fma.rn.{dtype}x2") + "}")


DECODE_BF16, DECODE_FP16 = (_asm(_LOOK_UP, _SCALE_TWO, dtype) for dtype in ("bf16", "f16"))
# What e2m1 is too small by, less 2^7: with that it multiplies an e4m3, and stays in range.
BIAS_BF16, BIAS_FP16 = tl.constexpr(2.0**119), tl.constexpr(2.0**7)
_KINDS = itertools.product(("e8m0", "e4m3", "e4m3 alone"), (False, True), (False, True))
E2M1 = tl.constexpr({which: _e2m1_asm(*which) for which in _KINDS})


@triton.constexpr_function
def e2m1(kind, is_bf16, far):
    """Assembly that decodes a word of e2m1 and multiplies it with a scale of this kind."""
    return E2M1.value[kind, is_bf16, far]


PAIRS = tl.constexpr("=&r,=&r,=&r,=&r")
TABLE_INPUTS = tl.constexpr(",r" * 8)


def _table_asm(convert: str) -> str:
    """$0 to $7: the table's low and high bytes; $8 to $23: the sixteen values; $24: the scale."""
    lines = ["{", ".reg .f32 " + ", ".join(f"f{i}" for i in range(16)) + ";"]
    lines += [".reg .b32 " + ", ".join(f"p{i}" for i in range(8)) + ";"]
    lines += [f"mul.rn.f32 f{i}, ${8 + i}, $24;" for i in range(16)]
    lines += [f"{convert} p{i}, f{2 * i + 1}, f{2 * i};" for i in range(8)]
    for i in range(4):
        lines += [
            f"prmt.b32 ${i}, p{2 * i}, p{2 * i + 1}, 0x6420;",
            f"prmt.b32 ${4 + i}, p{2 * i}, p{2 * i + 1}, 0x7531;",
        ]
    return "\n".join([*lines, "}"])


TABLE_BF16 = tl.constexpr(_table_asm("cvt.rn.bf16x2.f32"))
TABLE_FP16 = tl.constexpr(_table_asm("cvt.rn.f16x2.f32"))
TABLE_REGISTERS = tl.constexpr("=&r," * 8 + ",".join("f" * 17))


# As above, but for the scale: the table is $5 to $12.
LOOKUP = _asm(re.sub(r"\$(\d+)", lambda m: f"${int(m[1]) - 2 * (int(m[1]) > 6)}", _LOOK_UP), _PLAIN)
LOOKUP_REGISTERS = tl.constexpr("=&r," * 4 + ",".join("r" * 9))


@triton.jit
def pairs_by_table(words, code, scale, dtype: tl.constexpr):
    """Words (R, C, W), the sixteen values (floats), scales (R, C) -> pairs as :func:`pairs` gives them.

    The values are multiplied with each scale and rounded before they are looked up.
    """
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        TABLE_BF16 if dtype == tl.bfloat16 else TABLE_FP16,
        TABLE_REGISTERS,
        [
            code[0], code[1], code[2], code[3], code[4], code[5], code[6], code[7], code[8], code[9], code[10], code[11],
            code[12], code[13], code[14], code[15], scale,
        ],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        LOOKUP,
        LOOKUP_REGISTERS,
        [
            words, v0[:, :, None], v1[:, :, None], v2[:, :, None], v3[:, :, None],
            v4[:, :, None], v5[:, :, None], v6[:, :, None], v7[:, :, None],
        ],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    return tl.join(tl.join(p0, p1), tl.join(p2, p3))


@triton.jit
def bits(value):
    """The bits of 16-bit numbers, in int32."""
    return value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def table(code_ptr, dtype: tl.constexpr):
    """The sixteen values in ``dtype`` (16 bits) as eight registers: their low bytes, then their high bytes."""
    low = ()
    high = ()
    for i in tl.static_range(4):
        low_word = 0
        high_word = 0
        for j in tl.static_range(4):
            value = bits(tl.load(code_ptr + 4 * i + j).to(dtype))
            low_word = low_word | ((value & 0xFF) << (8 * j))
            high_word = high_word | ((value >> 8) << (8 * j))
        low += (low_word,)
        high += (high_word,)
    return low + high


@triton.jit
def in_two(scale, dtype: tl.constexpr):
    """float32 as the sum of two 16-bit numbers, each twice in an int32.

    The first is finite, as infinity less infinity is NaN. What float16 cannot hold twice makes the second infinite: then no
    element of the block is finite, though a small one times the scale, and zero, may be where W is made dense.
    """
    LARGEST: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
    first = tl.minimum(scale, LARGEST).to(dtype)
    second = (scale - first.to(tl.float32)).to(dtype)
    return bits(first) * 0x10001, bits(second) * 0x10001


@triton.jit
def pairs(word, scale, values, dtype: tl.constexpr, SCALE: tl.constexpr, FAR: tl.constexpr = False):
    """Words (...) and their blocks' scales -> pairs of 16-bit numbers in int32, (..., 2, 2), the second one at (1, 0).

    A pair's second element is the next one, or if FAR, of e2m1 only, the fourth after it.
    """
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    if SCALE == "e8m0" or SCALE == "e4m3 alone":
        scale = scale if SCALE == "e8m0" else scale * (BIAS_BF16 if IS_BF16 else BIAS_FP16)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            e2m1(SCALE, IS_BF16, FAR), PAIRS + ",r,r", [word, bits(scale.to(dtype)) * 0x10001],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif SCALE == "e4m3":
        first, second = in_two(scale, dtype)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            e2m1(SCALE, IS_BF16, FAR), PAIRS + ",r,r,r", [word, first, second],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, second = in_two(scale, dtype)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            DECODE_BF16 if IS_BF16 else DECODE_FP16, PAIRS + ",r,r,r" + TABLE_INPUTS,
            [word, first, second, values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.join(tl.join(p0, p1), tl.join(p2, p3))


@triton.jit
def decoded(word, scale, values, dtype: tl.constexpr, SCALE: tl.constexpr, FAR: tl.constexpr = False):
    """Words (...) and their blocks' scales -> the eight elements of each, (..., 2, 2, 2), the first one at (0, 0, 0).

    The dimensions are in the order in which they arise: the first tells the pairs of four elements, the last a pair's halves.
    """
    found = pairs(word, scale, values, dtype, SCALE, FAR)
    low = (found & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (found >> 16).to(tl.int16).to(dtype, bitcast=True))


# --- scales ---------------------------------------------------------------------------------------------------------


@triton.jit
def stored_scale(block0, blocks, mask, absmax_ptr, nested_absmax_ptr, SCALE: tl.constexpr):
    """Load what the scales of the blocks block0 (64-bit) + blocks (32-bit) are made of: the stored value, and its own scale."""
    stored = tl.load(absmax_ptr + block0 + blocks, mask=mask, other=0)
    nested = stored
    if SCALE == "nested" or SCALE == "e4m3":
        nested0 = block0 // NESTED_BLOCK
        within = (block0 - nested0 * NESTED_BLOCK).to(tl.int32)
        nested = tl.load(nested_absmax_ptr + nested0 + (within + blocks) // NESTED_BLOCK, mask=mask, other=0)
    return stored, nested


@triton.jit
def scale_of(stored, nested, mask, nested_code_ptr, offset, SCALE: tl.constexpr):
    """The scales in float32, of what :func:`stored_scale` loaded; zero where there is none (``mask``), or what is stored there.

    But of e8m0, which has no zero: there elements are. ``offset``: a number or a pointer to it.
    """
    value = stored
    if SCALE == "e8m0":  # powers of two; 0 is 2^-127, which has no exponent of its own, 255 is NaN
        power = stored.to(tl.int32)
        value = tl.maximum(power << 23, 0x400000).to(tl.float32, bitcast=True)
        value = tl.where(power == 255, float("nan"), value)
    elif SCALE == "e4m3" or SCALE == "e4m3 alone":  # without a sign; 127 is NaN
        e4m3 = stored.to(tl.int32)
        # Shifted, all bits are in their places; 2^120 corrects the bias.
        value = (e4m3 << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(e4m3 == 127, float("nan"), value)
        value = value if SCALE == "e4m3 alone" else value * nested
    elif SCALE == "nested":
        nothing: tl.constexpr = None if mask is None else 0
        value = tl.load(nested_code_ptr + stored.to(tl.int32), mask=mask, other=nothing)
        # Two roundings, as bitsandbytes has it: an addition is never fused with an fma.
        value = tl.fma(value, nested, 0.0) + (tl.load(offset) if offset.dtype.is_ptr() else offset)
        value = value if mask is None else tl.where(mask, value, 0.0)
    return value


# --- tiles ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,
    code, values,
    matrix, row0, col0, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
    PERMUTE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A tile (ROWS, COLS) in ``dtype`` of the ``matrix``-th of matrices (rows, cols), from (row0, col0); zero outside.

    ``code``: (16,) the values in float32; ``values``: what :func:`table` made of them, if PERMUTE. ``cols`` is a multiple
    of 32, so that the words of a group have one scale.
    """
    GROUP: tl.constexpr = min(32, BLOCK_SIZE)
    GROUPS: tl.constexpr = COLS // GROUP
    # 64-bit scalars find the tile; offsets within it are 32-bit.
    element0 = (matrix.to(tl.int64) * rows + row0) * cols + col0
    block0 = element0 // BLOCK_SIZE
    within = (element0 - block0 * BLOCK_SIZE).to(tl.int32)
    offs_r = tl.arange(0, ROWS)[:, None]
    offs_c = tl.arange(0, GROUPS)[None, :] * GROUP
    offs = offs_r * cols + offs_c  # (ROWS, GROUPS)
    mask = (offs_r < rows - row0) & (offs_c < cols - col0)
    blocks = (within + offs) // BLOCK_SIZE
    stored, nested = stored_scale(block0, blocks, mask, absmax_ptr, nested_absmax_ptr, SCALE)
    scale = scale_of(stored, nested, mask, nested_code_ptr, nested_offset_ptr, SCALE)[:, :, None]
    offs_w = (offs // 8)[:, :, None] + tl.arange(0, GROUP // 8)[None, None, :]
    word = tl.load(packed_ptr + element0 // 8 + offs_w, mask=mask[:, :, None], other=0)  # (ROWS, GROUPS, GROUP / 8)
    if PERMUTE:
        w = tl.permute(decoded(word, scale, values, dtype, SCALE), (0, 1, 2, 4, 3, 5))
    else:
        offs_e = tl.arange(0, 8)
        index = (word[:, :, :, None] >> ((4 * offs_e) ^ 4)[None, None, None, :]) & 15
        value = tl.gather(code, tl.reshape(index, (ROWS * COLS,)), 0)
        w = (tl.reshape(value, (ROWS, GROUPS, GROUP // 8, 8)) * scale[:, :, :, None]).to(dtype)
    return tl.reshape(w, (ROWS, COLS))
