"""nf4: quantizing, and dequantizing chosen experts."""

import copy
import dataclasses
import io
import itertools
import math
import pickle

import pytest
import torch

from kernelbook import check, gluon_names, runtime
from kernelbook.lab.compiled import compile_calls
from kernelbook.nf4 import (
    BLOCK_SIZES,
    FP4,
    NF4,
    CodeBook,
    NF4Tensor,
    kernels,
    nested_absmax_reference,
    nf4_code_reference,
    nf4_dequantize,
    nf4_dequantize_reference,
    nf4_matmul,
    nf4_quantize,
    op,
)
from kernelbook.packed import dynamic_code, products

# isort: split
import triton

DEV = runtime.DEVICE
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Sizes that the word kernel takes; a last block that is short; experts that start inside a block; inside a byte; a vector.
SHAPES = ((4, 16, 32), (3, 5, 8), (3, 7, 6), (3, 7, 5), (37,))


def quantized(shape, block_size=64, double_quant=False, code=NF4, dtype=torch.float32):
    return nf4_quantize(
        torch.randn(shape, device=DEV).to(dtype), block_size=block_size, double_quant=double_quant, code=code
    )


def reference(q, experts=None, dtype=torch.float32):
    """What ``q`` stands for, computed in float32 by the reference."""
    absmax = q.absmax
    if q.double_quant:
        absmax = nested_absmax_reference(absmax, q.nested_absmax, q.nested_code, q.nested_offset)
    return nf4_dequantize_reference(q.packed, absmax, q.code, q.shape, q.block_size, experts).to(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# --- quantize -------------------------------------------------------------------------------------------------------


def test_the_code_book_is_what_its_derivation_gives():
    torch.testing.assert_close(nf4_code_reference(torch.float32), torch.tensor(NF4.values), atol=2e-7, rtol=0)


def test_quantize_takes_the_nearest_code_and_the_lower_one_of_two():
    code = torch.tensor(NF4.values)
    middles = (code[1:] + code[:-1]) / 2
    below, above = torch.nextafter(middles, -torch.ones(15)), torch.nextafter(middles, torch.ones(15))
    w = torch.zeros(64)
    w[:15], w[15:30], w[30:45], w[63] = below, middles, above, 1.0
    packed = nf4_quantize(w.to(DEV)).packed.cpu()
    index = torch.stack([packed >> 4, packed & 15], 1).view(-1)
    assert index[:45].tolist() == [*range(15), *range(15), *range(1, 16)]


def test_the_error_of_a_round_trip_is_the_published_one():
    """For normal weights at block 64 the mean absolute error is 0.0728 of the standard deviation."""
    w = torch.randn(2**18, device=DEV)
    for double_quant in (False, True):
        error = (nf4_dequantize(nf4_quantize(w, double_quant=double_quant), dtype=torch.float32) - w).abs().mean()
        assert 0.0715 < float(error) < 0.0745


def test_double_quantization_takes_the_nearest_value():
    w = torch.randn(3, 100, 64, device=DEV)
    q, plain = nf4_quantize(w, double_quant=True), nf4_quantize(w)
    assert q.absmax.dtype == torch.uint8 and q.nested_absmax.shape == (math.ceil(300 / 256),)
    centered = plain.absmax - plain.absmax.mean()
    scaled = centered / q.nested_absmax.repeat_interleave(256)[:300]
    best = (scaled[:, None] - q.nested_code).abs().amin(1)
    taken = (scaled - q.nested_code[q.absmax.long()]).abs()
    torch.testing.assert_close(taken, best, atol=1e-7, rtol=0)


# --- dequantize -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_equals_the_reference_bit_for_bit(shape, double_quant, dtype):
    for block_size in BLOCK_SIZES:
        for code in (NF4, FP4) if block_size in (32, 64, 4096) else (NF4,):
            q = quantized(shape, block_size, double_quant, code, dtype)
            with check.poisoned_empty():
                dense = nf4_dequantize(q, dtype=dtype)
            assert same_bits(dense, reference(q, dtype=dtype))
            assert dtype != torch.float32 or same_bits(q.as_float64().float(), dense)


@pytest.mark.parametrize("ids", [[0], [3, 0], [1, 1, 2, 1], []], ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 32), (4, 3, 8), (4, 7, 5)])
def test_experts_in_any_order(shape, ids):
    """Also in 32 bits, and in a list that has strides."""
    for double_quant in (False, True):
        q = quantized(shape, 64, double_quant)
        experts = torch.tensor(ids, dtype=torch.int64, device=DEV)
        for given in (experts, experts.int(), experts.repeat_interleave(2)[::2]):
            with check.poisoned_empty():
                out = nf4_dequantize(q, experts=given, dtype=torch.float32)
            assert same_bits(out, reference(q, experts))


def test_packed_bytes_at_any_address():
    q = quantized((4, 16, 32))
    for shift in (1, 2, 3):
        memory = torch.zeros(q.packed.numel() + 8, dtype=torch.uint8, device=DEV)
        moved = memory[shift : shift + q.packed.numel()].copy_(q.packed)
        assert same_bits(nf4_dequantize(dataclasses.replace(q, packed=moved), dtype=torch.float32), reference(q))


def test_nothing_to_do():
    empty = nf4_quantize(torch.zeros(0, 4, 8, device=DEV), double_quant=True)
    assert nf4_dequantize(empty).shape == (0, 4, 8)
    assert nf4_dequantize(empty, experts=torch.zeros(0, dtype=torch.int64, device=DEV)).shape == (0, 4, 8)
    flat = nf4_quantize(torch.zeros(3, 0, device=DEV))
    assert nf4_dequantize(flat, experts=torch.tensor([2, 0], device=DEV)).shape == (2, 0)
    scalar = nf4_quantize(torch.tensor(2.5, device=DEV))
    assert nf4_dequantize(scalar, dtype=torch.float32) == 2.5


@pytest.mark.parametrize("shape", [(4, 16, 32), (4, 15, 9)])
@pytest.mark.parametrize("double_quant", [False, True])
def test_experts_that_are_not_chosen_have_no_influence(shape, double_quant):
    """The bytes and absmax values that belong to no chosen expert are poisoned, with NaN or an index of NaN."""
    q = quantized(shape, 32, double_quant)
    experts = torch.tensor([2], device=DEV)
    size = q.numel // 4
    bytes_, blocks = slice(size, -(-3 * size // 2)), slice(2 * size // 32, -(-3 * size // 32))
    packed = torch.full_like(q.packed, 0xFF)
    packed[bytes_] = q.packed[bytes_]
    poison, nested = math.nan, {}
    if double_quant:
        poison = min(set(range(256)) - set(q.absmax[blocks].tolist()))
        nested_code = q.nested_code.clone()
        nested_code[poison] = math.nan
        nested = {"nested_code": nested_code}
    absmax = torch.full_like(q.absmax, poison)
    absmax[blocks] = q.absmax[blocks]
    poisoned = dataclasses.replace(q, packed=packed, absmax=absmax, **nested)
    assert same_bits(nf4_dequantize(poisoned, experts=experts, dtype=torch.float32), reference(q, experts))


def config_that_prefetches(double_quant, properties):
    """Small distances, so that few programs prefetch for others, over the borders of experts."""
    tile = {"BLOCK_W": 128, "UNROLL": 3 if double_quant else 2}
    return triton.Config(tile | {"AHEAD": 1, "SPAN": 2}, num_warps=4)


@pytest.fixture
def prefetch_soon(monkeypatch):
    monkeypatch.setattr(op.kernels, "words_config", config_that_prefetches)


@pytest.mark.parametrize("block_size", [32, 64, 4096])
@pytest.mark.parametrize("double_quant", [False, True])
def test_prefetching_changes_nothing(double_quant, block_size, prefetch_soon, monkeypatch):
    """Experts of several tiles, the last one short; an id out of range among them."""
    monkeypatch.setattr(op.arguments, "check_index_values", lambda *args, **kwargs: None)
    q = quantized((4, 119, 104), block_size, double_quant)
    experts = torch.tensor([3, 0, 7, 3], device=DEV)
    out = nf4_dequantize(q, experts=experts, dtype=torch.float32)
    assert same_bits(out[[0, 1, 3]], reference(q, experts[[0, 1, 3]])) and not out[2].any()
    assert same_bits(nf4_dequantize(q, dtype=torch.float32), reference(q))


# --- multiply -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not gluon_names.USABLE, reason="needs Gluon")
def test_parts_of_k_have_one_row_of_tiles(monkeypatch):
    """More rows than a tile has never share K: workspace and tickets are those of one row of tiles."""
    monkeypatch.setattr(products, "launcher", lambda kernel, **how: how)  # the interpreter has none for these kernels
    how = {"rank": 0, "has_bias": False, "x_grouped": True, "y_grouped": True, "routed": False}
    shared = []
    for m, n, k in itertools.product((17, 64, 128, 129, 512), (1024, 4096, 14336), (2048, 14336)):
        for block_size, scale in ((64, "float32"), (64, "nested"), (32, "e8m0"), (16, "e4m3")):
            plan = products.plan.__wrapped__(
                m, (1, n, k), False, torch.bfloat16, block_size, scale, **how, properties=runtime.TARGETS["sm_90"]
            )
            if plan is not None and plan.launch.get("SPLIT_K", 1) > 1:
                assert m <= plan.height
                shared.append(plan)
    assert shared, "some do share K"


def test_parts_that_are_not_contiguous_are_copied_once():
    q = quantized((2, 6, 64), double_quant=True)
    spread = {name: torch.stack([part, part], -1)[..., 0] for name, part in q._tensors().items()}
    assert not spread["packed"].is_contiguous()
    again = dataclasses.replace(q, **spread)
    assert all(part.is_contiguous() for part in again._tensors().values())
    assert same_bits(nf4_dequantize(again), nf4_dequantize(q))


# --- bitsandbytes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bnb():
    return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")


def test_the_values_of_double_quantization_are_those_of_bitsandbytes(bnb):
    assert torch.equal(dynamic_code(), bnb.create_dynamic_map())


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [32, 64, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_bitsandbytes(bnb, quant_type, block_size, dtype):
    """The second shape is odd: its last byte is half full, and its experts begin inside bytes and blocks."""
    from kernelbook.interop.bitsandbytes import to_bitsandbytes

    for shape in ((3, 45, 64), (3, 7, 5)):
        for nested in (False, True):
            w = torch.randn(shape, device=DEV).to(dtype)
            how = {"blocksize": block_size, "quant_type": quant_type, "compress_statistics": nested}
            packed, state = bnb.quantize_4bit(w, **how)
            q = NF4Tensor.from_bitsandbytes(packed, state)
            assert q.shape == shape and q.double_quant == nested and q.dtype == dtype
            # One row: with several, bitsandbytes 0.50.2 misplaces blocks on the CPU where they span two rows.
            state.shape = torch.Size([w.numel()])
            theirs = bnb.dequantize_4bit(packed, state).view(shape)
            assert same_bits(nf4_dequantize(q, dtype=dtype), theirs)
            experts = torch.tensor([2, 0, 2], device=DEV)
            assert same_bits(nf4_dequantize(q, experts=experts, dtype=dtype), theirs[experts])
            back_packed, back = to_bitsandbytes(dataclasses.replace(q, shape=(w.numel(),)))
            assert torch.equal(back_packed, packed) and back == state
            assert same_bits(bnb.dequantize_4bit(back_packed, back).view(shape), theirs)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_gives_the_bits_of_bitsandbytes(bnb, shape, quant_type):
    for block_size in (32, 64, 2048):
        for dtype in DTYPES:
            w = torch.randn(shape).to(dtype)
            packed, state = bnb.quantize_4bit(w, blocksize=block_size, quant_type=quant_type)
            q = nf4_quantize(w.to(DEV), block_size=block_size, code={"nf4": NF4, "fp4": FP4}[quant_type])
            assert torch.equal(q.packed.cpu(), packed.view(-1)) and torch.equal(q.absmax.cpu(), state.absmax)
            assert torch.equal(q.code.cpu(), state.code)


def test_other_storage_and_shapes_of_packed(bnb):
    from kernelbook.interop.bitsandbytes import to_bitsandbytes

    w = torch.randn(4, 16, 32, device=DEV)
    packed, state = bnb.quantize_4bit(w.view(4 * 16, 32), blocksize=64, quant_type="nf4", quant_storage=torch.bfloat16)
    q = NF4Tensor.from_bitsandbytes(packed, state, shape=(4, 16, 32))
    assert same_bits(nf4_dequantize(q, dtype=torch.float32), reference(nf4_quantize(w)))
    transposed = NF4Tensor.from_bitsandbytes(packed.t(), state, shape=(4, 16, 32))
    assert torch.equal(transposed.packed, q.packed)
    with pytest.raises(ValueError, match="shape must have 2048 elements"):
        NF4Tensor.from_bitsandbytes(packed, state, shape=(4, 16, 31))
    with pytest.raises(ValueError, match="packed must have at least 1024 bytes"):
        NF4Tensor.from_bitsandbytes(packed[:-1], state)
    with pytest.raises(ValueError, match=r"q\.code_name must be one of 'nf4', 'fp4'"):
        to_bitsandbytes(dataclasses.replace(q, code_name="int4"))


# --- the object, bad input, PyTorch's machinery ---------------------------------------------------------------------


def test_what_bitsandbytes_repacked_on_the_cpu_is_refused(bnb):
    """It does so at a layer's first call, where the CPU has instructions for bfloat16, and rounds the scales for good."""
    for nested in (False, True):
        packed, state = bnb.quantize_4bit(
            torch.randn(32, 64), blocksize=64, quant_type="nf4", compress_statistics=nested
        )
        packed, state = bnb._convert_weight_packed_for_cpu(packed, state)
        with pytest.raises(ValueError, match=r"from_bitsandbytes: quant_state must .* it repacked"):
            NF4Tensor.from_bitsandbytes(packed, state)


def test_a_parameter_is_quantized_without_its_gradient():
    weight = torch.nn.Parameter(torch.randn(2, 16, 32, device=DEV))
    for double_quant in (False, True):
        q = nf4_quantize(weight, double_quant=double_quant)
        parts = [getattr(q, field.name) for field in dataclasses.fields(q)]
        assert not any(part.requires_grad for part in parts if isinstance(part, torch.Tensor))
        assert torch.equal(copy.deepcopy(q).absmax, q.absmax)
        x = torch.randn(3, 32, device=DEV, requires_grad=True)
        nf4_matmul(x, q, 1).sum().backward()
        assert x.grad is not None and weight.grad is None


def test_saved_and_pickled():
    for double_quant in (False, True):
        q = quantized((3, 7, 5), 32, double_quant, dtype=torch.float16)
        file = io.BytesIO()
        torch.save({"w": q}, file)
        # A part that is a view of a padded buffer would be written with the padding, and refused by safetensors.
        for name, part in q._tensors().items():
            assert part.untyped_storage().nbytes() == part.nbytes, name
        file.seek(0)
        for found in (torch.load(file)["w"], pickle.loads(pickle.dumps(q))):
            assert found.shape == q.shape and found.dtype == q.dtype and found.code_name == q.code_name
            assert same_bits(nf4_dequantize(found), nf4_dequantize(q))


def test_the_object():
    q = quantized((4, 16, 32), 64, True)
    assert q.nbytes == 4 * 16 * 32 // 2 + 32 + 4 + 16 * 4 + 256 * 4 + 4
    assert q.numel == 2048 and q.device == q.packed.device
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.shape = (1,)
    with pytest.raises(ValueError, match=r"packed must have shape \(1024,\), got \(1023,\)"):
        dataclasses.replace(q, packed=q.packed[:-1])
    with pytest.raises(TypeError, match="absmax must have dtype uint8"):
        dataclasses.replace(q, absmax=q.absmax.float())
    told = repr(nf4_quantize(torch.zeros(2, 64, 64, device=DEV), double_quant=True))
    assert told.startswith(
        "NF4Tensor(shape=(2, 64, 64), dtype=torch.float32, code_name='nf4', block_size=64, double_quant="
    )
    assert "nbytes=" in told and len(told) < 200


def test_bad_input():
    w, q, x = torch.randn(2, 64, device=DEV), quantized((2, 64)), torch.randn(3, 64, device=DEV)
    for call, words in [
        (lambda: nf4_quantize(w.double()), "nf4_quantize: w must have dtype bfloat16, float16, float32, got float64"),
        (lambda: nf4_quantize(w, block_size=48), "nf4_quantize: block_size must be one of 32, 64.*got 48"),
        (lambda: nf4_quantize(w, code=CodeBook("x", (0.0,))), "nf4_quantize: code must have 16 values, got 1"),
        (lambda: nf4_quantize(w, code="nf4"), "nf4_quantize: code must be a CodeBook, got str"),
        (lambda: nf4_dequantize(w), "nf4_dequantize: q must be an NF4Tensor, got Tensor"),
        (lambda: nf4_dequantize(q, dtype=torch.float64), "nf4_dequantize: dtype must be one of"),
        (lambda: nf4_dequantize(nf4_quantize(w[0, 0]), experts=torch.tensor([0], device=DEV)), "experts must be None"),
        (lambda: nf4_matmul(x[:, :63], quantized((2, 6, 64)), 1), r"x must have shape \(\.\.\., 64\), got \(3, 63\)"),
        (lambda: nf4_matmul(x, q, 1), r"nf4_matmul: q must have shape \(E, N, K\)"),
        (
            lambda: nf4_matmul(x, quantized((2, 6, 64)), torch.tensor([0, 1], device=DEV)),
            r"expert must have shape \(1,\)",
        ),
        (lambda: nf4_matmul(x, quantized((2, 6, 64)), 2), r"nf4_matmul: expert must lie in \[0, 2\), got 2"),
        (lambda: nf4_matmul(x, quantized((2, 6, 64)), -1), r"nf4_matmul: expert must lie in \[0, 2\), got -1"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    if DEV.type == "cpu":
        with pytest.raises(ValueError, match=r"nf4_dequantize: experts must lie in \[0, 2\)"):
            nf4_dequantize(q, experts=torch.tensor([2]))


@pytest.mark.skipif(not runtime.INTERPRET, reason="needs the interpreter's overflow check")
@pytest.mark.parametrize("words", [True, False])
def test_offsets_are_64_bit(words, overflow_raises):
    """Offsets far beyond 32 bits, without the memory: a negative size masks off every load and store."""

    overflow_raises()
    q = quantized((2, 64), double_quant=True)
    experts, out = torch.tensor([3, 1_000_000, 0, 0]), torch.zeros(64)
    nested = (q.nested_absmax, q.nested_code, q.nested_offset)
    kernel, config = (
        (kernels._nf4_dequantize_fwd_words_kernel, kernels.words_config(True, runtime.properties()))
        if words
        else (kernels._nf4_dequantize_fwd_elements_kernel, kernels.ELEMENTS_CONFIG)
    )
    arguments = (q.packed, q.absmax, *nested, q.code, experts, 0, out)
    more = {"PREFETCH": "load"} if words else {}
    kernel[(4,)](*arguments, 2**30, -(2**30), 1, True, 64, "nested", **config.kwargs, **more)
    assert bool((out == 0).all())


def test_a_scale_of_scales_is_rounded_before_it_is_added():
    """As bitsandbytes does it: no product and sum become one instruction, and eight outputs leave in one 16-byte store."""
    code = """
import torch, kernelbook
z = lambda n, d=torch.float32: torch.zeros(n, dtype=d)
for shape in ((2, 1024, 2048), (2, 33, 33)):
    n = shape[0] * shape[1] * shape[2]
    blocks = -(-n // 64)
    nested = dict(nested_absmax=z(-(-blocks // 256)), nested_code=z(256), nested_offset=torch.tensor(0.0))
    q = kernelbook.NF4Tensor(z(-(-n // 2), torch.uint8), z(blocks, torch.uint8), shape, 64, z(16), **nested)
    kernelbook.nf4_dequantize(q, experts=torch.tensor([0, 1]))
"""
    compiled = compile_calls(code, asm=("ptx",))
    assert {"words" in kernel.name for kernel in compiled} == {True, False}
    for kernel in compiled:
        assert "words" not in kernel.name or "st.global.v4.b32" in kernel.asm["ptx"]
        fused = [line for line in kernel.asm["ptx"].splitlines() if "fma.rn.f32" in line]
        assert all(line.rstrip(";").endswith("0f00000000") for line in fused), fused  # a product, with nothing added


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(600, 2048, 2048), (1031, 2047, 1025)])
@pytest.mark.memory
def test_more_than_2_31_elements(shape):
    n = math.prod(shape)
    packed = torch.randint(0, 256, (-(-n // 2),), dtype=torch.uint8, device=DEV)
    q = NF4Tensor(packed, torch.rand(-(-n // 64), device=DEV), shape, 64, torch.tensor(NF4.values, device=DEV))
    experts = torch.tensor([shape[0] - 1, 0, shape[0] // 2], device=DEV)
    out, everything = nf4_dequantize(q, experts=experts), nf4_dequantize(q)
    size = n // shape[0]
    for i, expert in enumerate(experts.tolist()):
        element = torch.arange(expert * size, (expert + 1) * size, device=DEV)
        byte = packed[element // 2].int()
        index = torch.where(element % 2 == 0, byte >> 4, byte & 15)
        expected = (q.code[index] * q.absmax[element // 64]).to(torch.bfloat16).view(shape[1:])
        assert torch.equal(out[i], expected) and torch.equal(everything[expert], expected)
