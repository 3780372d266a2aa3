"""MXFP4 and NVFP4: quantizing, decoding, multiplying, against plain PyTorch and against transformers."""

from typing import Any

import pytest
import torch

import kernelbook as kb
from kernelbook import runtime
from kernelbook.packed.fp4 import FORMATS, fp4_parts

DEV = runtime.DEVICE
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def weights(*shape: int) -> torch.Tensor:
    """Experts of very different sizes, and a row of zeros."""
    w = torch.randn(shape, device=DEV) * torch.logspace(-6, 3, shape[0], device=DEV).view(-1, *[1] * (len(shape) - 1))
    w[0, 0] = 0
    return w


def dense(q: kb.NF4Tensor) -> torch.Tensor:
    """What ``q`` stands for, from the format's own bytes, in float64 but for the scales' product."""
    packed, scales, nested = fp4_parts(q)
    packed, block = packed.cpu(), q.block_size
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = VALUES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0).double()
    of_each = nested.cpu().repeat_interleave(256)[: scales.numel()].view(scales.shape)
    scale = scales.cpu().float() * of_each  # the one rounding before the last
    return values * scale.double().repeat_interleave(block, -1)


@pytest.mark.parametrize("format", tuple(FORMATS))
def test_each_element_goes_to_the_nearest_value(format: str) -> None:
    w = weights(3, 5, 96) if format == "mxfp4" else weights(1, 5, 96)
    q = kb.fp4_quantize(w, format=format)
    block = FORMATS[format][0]
    assert q.shape == w.shape and q.block_size == block and q.code_name == "e2m1"
    _, scales, nested = fp4_parts(q)
    step = scales.cpu().float().double() * nested[0].item()
    step = step.repeat_interleave(block, -1)
    choices = torch.cat([VALUES, -VALUES]) * step[..., None]
    best = (choices - w.cpu().double()[..., None]).abs().amin(-1)
    error = (dense(q) - w.cpu().double()).abs()
    assert bool((error <= best + 1e-5 * step).all())  # where two are as near, float32 decides
    assert bool((dense(q)[0, 0] == 0).all())


def test_halves_go_to_the_even_code() -> None:
    """0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4 where the scale is 1."""
    row = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=DEV)
    w = torch.cat([row, -row, torch.zeros(16, device=DEV)])[None, None]
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0], device=DEV)
    out = kb.nf4_dequantize(kb.fp4_quantize(w), dtype=torch.float32)[0, 0]
    assert torch.equal(out[:8], expected) and torch.equal(out[8:16], -expected)


@pytest.mark.parametrize("format", tuple(FORMATS))
def test_dequantized_bit_for_bit(format: str) -> None:
    q = kb.fp4_quantize(weights(3, 4, 64), format=format)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(kb.nf4_dequantize(q, dtype=dtype).cpu(), dense(q).float().to(dtype))
    assert torch.equal(q.as_float64().cpu(), dense(q).float().double())
    ids = torch.tensor([2, 0], device=DEV)
    assert torch.equal(kb.nf4_dequantize(q, experts=ids, dtype=torch.float32).cpu(), dense(q)[[2, 0]].float())


def test_gpt_oss_blocks_as_transformers_reads_them() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # (E, K, N)
    q = kb.fp4_tensor(blocks.to(DEV), scales.to(DEV))
    assert q.shape == (2, 6, 96)
    assert torch.equal(kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2).cpu(), expected)
    back, again, _ = fp4_parts(q)
    assert torch.equal(back.cpu(), blocks.flatten(-2)) and torch.equal(again.cpu().view(torch.uint8), scales)


def test_scales_of_each_expert() -> None:
    """NVFP4 checkpoints have a float32 for each expert."""
    quantized = [kb.fp4_quantize(w[None], format="nvfp4") for w in weights(2, 32, 128)]
    parts = [fp4_parts(q) for q in quantized]
    packed, scales = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    both = kb.fp4_tensor(packed, scales, torch.stack([part[2][0] for part in parts]))
    expected = torch.cat([kb.nf4_dequantize(q, dtype=torch.float32) for q in quantized])
    assert torch.equal(kb.nf4_dequantize(both, dtype=torch.float32), expected)


def test_a_tensor_scale_is_one_number_whatever_its_shape() -> None:
    packed, scales, _ = fp4_parts(kb.fp4_quantize(torch.randn(4, 64, device=DEV), format="nvfp4"))
    each = [kb.fp4_tensor(packed, scales, torch.full(n * (1,), 2.0, device=DEV)).as_float64() for n in range(3)]
    assert torch.equal(each[0], each[1]) and torch.equal(each[0], each[2])


def test_bad_arguments() -> None:
    w, packed = torch.randn(2, 4, 64, device=DEV), torch.zeros(2, 4, 32, dtype=torch.uint8, device=DEV)
    e4m3 = torch.zeros(2, 4, 4, device=DEV).to(torch.float8_e4m3fn)
    e8m0 = torch.zeros(2, 4, 2, dtype=torch.uint8, device=DEV)
    wrong: Any = (
        (lambda: kb.fp4_quantize(w, format="fp4"), ValueError, "format must be one of 'mxfp4', 'nvfp4', got 'fp4'"),
        (lambda: kb.fp4_quantize(w[..., :40]), ValueError, "w must have rows of a multiple of 32 elements"),
        (lambda: kb.fp4_quantize(w.double()), TypeError, "w must have dtype"),
        (lambda: kb.fp4_tensor(packed, e4m3[..., :3]), ValueError, r"packed must have shape \(2, 4, 24\)"),
        (lambda: kb.fp4_tensor(packed.float(), e4m3), TypeError, "packed must have dtype uint8"),
        (lambda: kb.fp4_tensor(packed, e4m3, torch.ones(2, device=DEV)), ValueError, "a multiple of 256 scales each"),
        (lambda: kb.fp4_tensor(packed, e4m3, 2.0), TypeError, "tensor_scale must be a torch.Tensor or None, got float"),
        (lambda: kb.fp4_tensor(packed, e4m3, torch.tensor(2)), TypeError, "tensor_scale must have dtype .* got int64"),
        (lambda: kb.fp4_tensor(packed, e8m0, torch.tensor(2.0)), ValueError, "tensor_scale must be None for MXFP4"),
        (
            lambda: kb.fp4_tensor(packed.to_sparse(), e8m0),
            TypeError,
            "packed must be a dense tensor, got layout torch.sparse",
        ),
        (lambda: kb.fp4_tensor(packed, e8m0[0, 0, 0]), ValueError, "scales must have at least one dimension"),
        (lambda: fp4_parts(kb.nf4_quantize(w)), ValueError, "q.code_name must be one of 'e2m1'"),
    )
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("format", tuple(FORMATS))
@pytest.mark.parametrize("bad", (torch.nan, -torch.inf), ids=str)
def test_a_block_that_is_not_finite_stays_so(format: str, bad: float) -> None:
    w = torch.ones(1, 1, 64, device=DEV)
    w[0, 0, 3] = bad
    block = FORMATS[format][0]
    out = kb.nf4_dequantize(kb.fp4_quantize(w, format=format), dtype=torch.float32)[0, 0]
    assert bool(out[:block].isnan().all()) and bool((out[block:] == 1).all())


def test_the_better_of_two_scales() -> None:
    """It never loses more than the specification's, and a small change of what is in MXFP4 changes nothing."""
    w = torch.randn(16, 256, device=runtime.DEVICE) * torch.logspace(-3, 3, 16, device=runtime.DEVICE)[:, None]
    w[3], w[4, 5], w[5, 6] = 0, torch.inf, torch.nan

    def lost(q: kb.NF4Tensor) -> torch.Tensor:
        return (kb.nf4_dequantize(q, dtype=torch.float32) - w).unflatten(-1, (-1, 32)).square().sum(-1)

    ours, theirs = (lost(kb.fp4_quantize(w, scale=scale)) for scale in ("best", "ocp"))
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().sum() == 2
    assert not (ours > theirs).any() and (ours < theirs).any()
    q = kb.fp4_quantize(w)
    packed = kb.nf4_dequantize(q, dtype=torch.float32)
    again = kb.fp4_quantize(packed * 0.999, scale="best")
    assert torch.equal(kb.nf4_dequantize(again, dtype=torch.float32).nan_to_num(), packed.nan_to_num())
    cut = kb.nf4_dequantize(kb.fp4_quantize(packed * 0.999), dtype=torch.float32)
    assert not torch.equal(cut.nan_to_num(), packed.nan_to_num())
    with pytest.raises(ValueError, match="fp4_quantize: scale must be"):
        kb.fp4_quantize(w, format="nvfp4", scale="best")


def test_bytes_that_become_the_tensors_own() -> None:
    blocks, scales, _ = fp4_parts(kb.fp4_quantize(torch.randn(3, 64, device=runtime.DEVICE)))
    expected = kb.fp4_tensor(blocks, scales)
    q = kb.fp4_tensor(blocks, scales, in_place=True)
    assert torch.equal(q.packed, expected.packed) and q.packed.data_ptr() == blocks.data_ptr()
    with pytest.raises(ValueError, match="fp4_tensor: packed must be contiguous with in_place=True"):
        kb.fp4_tensor(blocks.mT.contiguous().mT, scales, in_place=True)
