"""Functions that kernels share, each alone: which tiles there are, which keys a tile sees, what lies in a packed tile.

A tile that is computed twice, or computed though nothing of it counts, changes no result of a kernel. Here it shows.
"""

import kernelbook as kb

# isort: split
import pytest
import torch
import triton
import triton.language as tl

from kernelbook import runtime
from kernelbook.attention.kernels import Rows, _flash_attention_bwd_delta_kernel, _length, _place, _visible
from kernelbook.packed import NF4
from kernelbook.packed.kernels import bits, in_two, load_tile, table
from kernelbook.tiles import dot, grouped


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=runtime.DEVICE)


@triton.jit
def _grouped_kernel(out_ptr, num_rows, num_cols, GROUP: tl.constexpr):
    row, col = grouped(tl.program_id(0), num_rows, num_cols, GROUP)
    tl.store(out_ptr + 2 * tl.program_id(0), row)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, col)


@pytest.mark.parametrize(("rows", "cols", "group"), ((7, 3, 4), (8, 1, 4), (3, 5, 8)))
def test_every_tile_once_in_groups_of_rows(rows: int, cols: int, group: int) -> None:
    found = _integers(rows * cols, 2)
    _grouped_kernel[(rows * cols,)](found, rows, cols, GROUP=group)
    expected = [
        (row, col)
        for first in range(0, rows, group)
        for col in range(cols)
        for row in range(first, min(first + group, rows))
    ]
    assert [tuple(pair) for pair in found.tolist()] == expected


@triton.jit
def _place_kernel(out_ptr, num_blocks, num_heads, section, REVERSED: tl.constexpr):
    block, head = _place(tl.program_id(0), num_blocks, num_heads, section, REVERSED)
    tl.store(out_ptr + 2 * tl.program_id(0), block)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, head)


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize(("blocks", "heads", "section"), ((3, 7, 4), (4, 2, 5), (1, 6, 3)))
def test_every_block_of_every_head_once_in_sections(blocks: int, heads: int, section: int, reverse: bool) -> None:
    found = _integers(blocks * heads, 2)
    _place_kernel[(blocks * heads,)](found, blocks, heads, section, REVERSED=reverse)
    expected = [
        (block, head)
        for first in range(0, heads, section)
        for block in (reversed(range(blocks)) if reverse else range(blocks))
        for head in range(first, min(first + section, heads))
    ]
    assert [tuple(pair) for pair in found.tolist()] == expected


@triton.jit
def _length_kernel(out_ptr, lengths_ptr, stride, S, LENGTHS: tl.constexpr):
    b = tl.program_id(0)
    tl.store(out_ptr + b, _length(lengths_ptr, stride, b, S, LENGTHS))


def test_lengths_lie_between_nothing_and_all() -> None:
    lengths, found = torch.tensor([-3, 9, 0, 9, 5, 9, 8, 9, 99], device=runtime.DEVICE), _integers(5)
    _length_kernel[(5,)](found, lengths, 2, 8, LENGTHS=True)
    assert found.tolist() == [0, 0, 5, 8, 8]
    _length_kernel[(5,)](found, lengths, 2, 8, LENGTHS=False)
    assert found.tolist() == [8] * 5


@triton.jit
def _visible_kernel(
    out_ptr, N, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first, left, full, last = _visible(pid * BLOCK_M, N, S, window, CAUSAL, WINDOW, False, BLOCK_M, BLOCK_N)
    tl.store(out_ptr + 4 * pid, first)
    tl.store(out_ptr + 4 * pid + 1, left)
    tl.store(out_ptr + 4 * pid + 2, full)
    tl.store(out_ptr + 4 * pid + 3, last)


@pytest.mark.parametrize("window", (None, 1, 3, 9, 40))
@pytest.mark.parametrize(("n", "s"), ((16, 16), (16, 29), (13, 5), (5, 33)))
def test_no_key_is_visited_in_vain(n: int, s: int, window: int | None) -> None:
    """Tiles of four queries and of two keys: those that some query sees, and those that all see, no more and no less."""
    rows, keys = 4, 2
    blocks = -(-n // rows)
    found = _integers(blocks, 4)
    _visible_kernel[(blocks,)](
        found, n, s, window or 0, CAUSAL=True, WINDOW=window is not None, BLOCK_M=rows, BLOCK_N=keys
    )
    for block, (first, left, full, last) in enumerate(found.tolist()):
        # The block's last queries may not exist; the kernel counts on as if they did.
        ends = [block * rows + i + s - n for i in range(rows)]
        begins = [0 if window is None else end - window + 1 for end in ends]
        seen = [any(a <= key <= e for a, e in zip(begins, ends, strict=True)) for key in range(s)]
        by_all = [all(a <= key <= e for a, e in zip(begins, ends, strict=True)) for key in range(s)]
        visited = range(first, max(last, first))
        assert all(key in visited for key in range(s) if seen[key])
        if any(seen):
            assert first == seen.index(True) // keys * keys and last == s - seen[::-1].index(True)
        whole = range(left, max(full, left))
        assert all(by_all[key] for key in whole)
        tiles = [t for t in range(0, s - keys + 1, keys) if all(by_all[t : t + keys])]
        if tiles:
            assert list(whole) == list(range(tiles[0], tiles[-1] + keys))


def test_all_keys_are_visible_without_an_order() -> None:
    found = _integers(2, 4)
    _visible_kernel[(2,)](found, 8, 29, 0, CAUSAL=False, WINDOW=False, BLOCK_M=4, BLOCK_N=4)
    assert found.tolist() == [[0, 0, 28, 29]] * 2


@pytest.mark.parametrize(("n", "n_padded", "copies"), ((20, 32, 1), (32, 64, 4), (7, 9, 1)))
def test_logarithms_are_padded_for_descriptors(n: int, n_padded: int, copies: int) -> None:
    """As Hopper's kernels want them: infinite beyond the last query, where delta is zero; nothing beyond the padding.

    Of copies each has its numbers one element further on.
    """
    o, do = torch.randn(2, 2, 3, n, 24, device=runtime.DEVICE)
    lse = torch.randn(2, 3, n, device=o.device)
    rows = 6 * n_padded
    delta, padded = (torch.full((copies * (rows + 1) + 64,), 7.0, device=o.device) for _ in range(2))
    blocks = -(-n_padded // 16)
    _flash_attention_bwd_delta_kernel[(blocks * 6,)](
        Rows(o, *o.stride()), Rows(do, *do.stride()), lse, delta, padded, 3, n, n_padded,
        D=24, ACC=tl.float32, PADDED=True, COPIES=copies, BLOCK_M=16, BLOCK_D=32,
    )  # fmt: skip
    beyond = n_padded - n
    for found, expected, rest in ((padded, lse, float("inf")), (delta, (o * do).sum(-1), 0.0)):
        expected = torch.nn.functional.pad(expected, (0, beyond), value=rest)
        for copy in found[:-64].view(copies, rows + 1):
            torch.testing.assert_close(copy[:rows].view(2, 3, n_padded), expected)
            assert copy[rows] == 7
        assert (found[-64:] == 7).all()


@triton.jit(do_not_specialize=["matrix", "row0", "col0"])  # a one would be a constant, which has no type
def _tile_kernel(
    packed_ptr, absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr, code_ptr, out_ptr,
    matrix, row0, col0, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    code = tl.load(code_ptr + tl.arange(0, 16))
    tile = load_tile(
        packed_ptr.to(tl.pointer_type(tl.int32)), absmax_ptr, nested_absmax_ptr, nested_code_ptr, nested_offset_ptr,
        code, None, matrix, row0, col0, rows, cols,
        ROWS, COLS, BLOCK_SIZE, SCALE, False, tl.float32,
    )  # fmt: skip
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], tile)


@pytest.mark.parametrize("double", (False, True))
@pytest.mark.parametrize("block", (32, 64))
def test_a_packed_tile_is_what_dequantizing_gives(block: int, double: bool) -> None:
    """Of the second matrix of three, at the edges, and where rows share a block of scales."""
    q = kb.nf4_quantize(torch.randn(3, 37, 96, device=runtime.DEVICE), block_size=block, double_quant=double)
    nested = [q.absmax if part is None else part for part in (q.nested_absmax, q.nested_code, q.nested_offset)]
    dense = torch.nn.functional.pad(kb.nf4_dequantize(q, dtype=torch.float32), (0, 96, 0, 64))
    for matrix, row0, col0 in ((1, 0, 0), (2, 16, 64), (1, 32, 32), (0, 5, 0)):
        out = torch.full((16, 64), float("nan"), device=runtime.DEVICE)
        _tile_kernel[(1,)](
            q.packed, q.absmax, *nested, q.code, out, matrix, row0, col0, 37, 96,
            ROWS=16, COLS=64, BLOCK_SIZE=block, SCALE="nested" if double else "float32",
        )  # fmt: skip
        assert torch.equal(out, dense[matrix, row0 : row0 + 16, col0 : col0 + 64]), (matrix, row0, col0)


@pytest.mark.skipif(not runtime.INTERPRET, reason="memory that is reserved, not touched")
def test_the_last_matrix_of_a_large_packed_tensor_is_found() -> None:
    """Its first element is number 2^31: the bytes are all but one matrix's last and never written."""
    rows, cols = 2**15, 2**15
    packed = torch.empty(3 * rows * cols // 2, dtype=torch.uint8)
    absmax = torch.empty(3 * rows * cols // 64)
    packed[rows * cols :][: 16 * cols // 2], absmax[2 * rows * cols // 64 :][: 16 * cols // 64] = 0x17, 2.0
    out, code = torch.empty(16, 64), torch.arange(16.0)
    _tile_kernel[(1,)](
        packed, absmax, absmax, absmax, absmax, code, out, 2, 0, 64, rows, cols,
        ROWS=16, COLS=64, BLOCK_SIZE=64, SCALE="float32",
    )  # fmt: skip
    assert torch.equal(out, torch.tensor([2.0, 14.0]).repeat(16, 32))


def test_no_scale_is_read_beyond_the_last() -> None:
    """Blocks behind the last row of a tile would have a scale of scales of their own, which does not exist."""
    q = kb.nf4_quantize(torch.randn(2, 63, 64, device=runtime.DEVICE), block_size=32, double_quant=True)
    assert q.nested_absmax.numel() == 1 and q.absmax.numel() == 252
    dense = torch.nn.functional.pad(kb.nf4_dequantize(q, dtype=torch.float32), (0, 0, 0, 64))
    out = torch.empty(64, 64, device=dense.device)
    _tile_kernel[(1,)](
        q.packed, q.absmax, q.nested_absmax, q.nested_code, q.nested_offset, q.code, out, 1, 32, 0, 63, 64,
        ROWS=64, COLS=64, BLOCK_SIZE=32, SCALE="nested",
    )  # fmt: skip
    assert torch.equal(out, dense[1, 32:96])


@triton.jit
def _bytes_kernel(code_ptr, out_ptr, dtype: tl.constexpr):
    words = table(code_ptr, dtype)
    for i in tl.static_range(8):
        tl.store(out_ptr + i, words[i])


@triton.jit
def _halves_kernel(scale_ptr, out_ptr, parts_ptr, dtype: tl.constexpr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    first, second = in_two(tl.load(scale_ptr + offs), dtype)
    half = tl.arange(0, 2)[None, :]
    places = out_ptr + 2 * offs[:, None] + half
    tl.store(places, (first[:, None] >> 16 * half).to(tl.int16).to(dtype, bitcast=True).to(tl.float32))
    tl.store(places + 2 * COUNT, (second[:, None] >> 16 * half).to(tl.int16).to(dtype, bitcast=True).to(tl.float32))
    tl.store(parts_ptr + offs, bits(tl.load(scale_ptr + offs).to(dtype)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_table_in_registers_and_a_scale_in_two_numbers(dtype: torch.dtype) -> None:
    """What a word is looked up in on NVIDIA's GPUs: low bytes, then high ones. And a scale that keeps its digits."""
    known = tl.float16 if dtype == torch.float16 else tl.bfloat16
    code = torch.randn(16, device=runtime.DEVICE).to(dtype)
    words = _integers(8)
    _bytes_kernel[(1,)](code.float(), words, dtype=known)
    low, high = words.view(torch.uint8).view(2, 16).to(torch.int32)
    assert torch.equal((low | high << 8).to(torch.int16).view(dtype), code)
    # The interpreter cuts bfloat16 off, and compares its bits, of which NaN has the same as itself.
    rest_of = (1e6, 1.0) if dtype == torch.bfloat16 else (float("inf"), float("nan"))
    scale = torch.tensor([0.3, -7.1, 0.0, 6e4, -0.001, 1.0, *rest_of], device=code.device)
    found, stored = torch.empty(2, 8, 2, device=code.device), _integers(8)
    _halves_kernel[(1,)](scale, found, stored, dtype=known, COUNT=8)
    first, second = found.unbind()
    torch.testing.assert_close(second[:, 0], second[:, 1], rtol=0, atol=0, equal_nan=True)
    assert (second[:6].abs() <= scale[:6, None].abs() / 64).all()
    for half in (0, 1):
        torch.testing.assert_close(first[:, half] + second[:, half], scale, rtol=2.0**-13, atol=1e-7, equal_nan=True)
    assert torch.equal(stored[:6], first[:6, 0].to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_scale_beyond_the_largest_number_gives_what_dense_elements_are(dtype: torch.dtype) -> None:
    """Infinite where they are too large, finite where they are not, and never NaN: up to twice what float16 holds."""
    known, largest = (tl.float16, 65504.0) if dtype == torch.float16 else (tl.bfloat16, torch.finfo(dtype).max)
    scale = torch.tensor([1.0, 1.0001, 1.0003, 1.002, 1.5, 1.9, 1.99, 2.0], device=runtime.DEVICE) * largest
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    found, stored = torch.empty(2, 8, 2, device=scale.device), _integers(8)
    _halves_kernel[(1,)](scale, found, stored, dtype=known, COUNT=8)
    first, second = found[:, :, :1].double()
    elements = torch.tensor(NF4.values, dtype=torch.float64, device=scale.device).to(dtype).double()
    sums = (elements * first + (elements * second).to(dtype).double()).to(dtype)  # as two fma compute it
    # An element this close to the largest number may be rounded to it, or to infinity.
    dense = elements * scale[:, None].double()
    away = ((dense.abs() / largest - 1).abs() > 2.0**-10) | (sums == dense.to(dtype))
    assert away.sum() >= 100
    torch.testing.assert_close(sums[away], dense.to(dtype)[away], rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, PRECISION: tl.constexpr):
    offs = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    tl.store(out_ptr + offs, dot(a, b, tl.zeros((16, 16), tl.float32), PRECISION))


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of ten bits behind the first, ties away from zero."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa.abs() * 2**11 + 0.5).floor() * mantissa.sign(), exponent - 11).float()


def test_operands_are_rounded_to_the_nearest_tf32() -> None:
    a, b = torch.randn(2, 16, 16, device=runtime.DEVICE)
    found = torch.empty(16, 16, device=a.device)
    _product_kernel[(1,)](a, b, found, PRECISION="tf32")
    exact = _to_tf32(a).double() @ _to_tf32(b).double()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)  # 1e-3 apart without the rounding


@pytest.mark.parametrize("bits", (0x7FC00000, 0x7FFFFFFF, -1), ids=hex)
def test_no_nan_is_lost_by_rounding(bits: int) -> None:
    """PyTorch's, that of NVIDIA's GPUs, which rounding would carry over into a zero, and one with a sign."""
    nan = torch.tensor([bits], dtype=torch.int32, device=runtime.DEVICE).view(torch.float32)
    a = torch.randn(16, 16, device=nan.device)
    a[3, 5] = nan
    one = torch.eye(16, device=a.device)
    for operands in ((a, one), (one, a)):
        found = torch.empty(16, 16, device=a.device)
        _product_kernel[(1,)](*operands, found, PRECISION="tf32")
        assert found.isnan().any()
