"""MXFP4 and NVFP4: the same bytes and the same kernels as NF4, with other values and other scales.

Both store e2m1 (a sign, two bits of exponent, one of mantissa), two elements a byte, the even one in the *low* half. MXFP4
has a power of two (e8m0) for 32 elements of a row; NVFP4 has an e4m3 for 16, and a float32 for the whole tensor or for
each expert. A scale of 8 bits that stands for one of 256 values, times a float32 of a larger block: that is what an
``NF4Tensor`` with double quantization has. So these formats become such tensors, with the halves of their bytes swapped and
nothing to be added to their scales, by which kernels know them.
"""

from typing import Any

import torch

from kernelbook import arguments
from kernelbook.packed import DTYPES, NESTED_BLOCK, CodeBook, NF4Tensor

__all__ = ["E2M1", "fp4_parts", "fp4_quantize", "fp4_tensor"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = CodeBook("e2m1", (*_MAGNITUDES, *(-m for m in _MAGNITUDES)))

CHUNK = 2**26  # bytes that change at a time
# The elements of a scale, and its dtype. Checkpoints hold e8m0 as plain bytes.
FORMATS = {"mxfp4": (32, torch.float8_e8m0fnu), "nvfp4": (16, torch.float8_e4m3fn)}


def fp4_tensor(
    packed: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    in_place: bool = False,
) -> NF4Tensor:
    """The ``NF4Tensor`` that stands for a tensor in MXFP4 or NVFP4; it is decoded exactly.

    The bytes of ``packed`` are copied; contiguous ``scales`` are shared.

    Args:
        packed: uint8, (..., K / 2) or, as gpt-oss' checkpoints have it, (..., K / 32, 16); the even element in the low half.
        scales: (..., K / 32) float8_e8m0fnu or uint8 for MXFP4, (..., K / 16) float8_e4m3fn for NVFP4.
        tensor_scale: of NVFP4, a tensor, floating point: one number, or one for each entry of the first dimension, which
            then must have a multiple of 4,096 elements each: so it is the same along a row, whose sum it multiplies in
            products. ``None``: 1.
        dtype: of the tensor that was quantized.
        in_place: the bytes of ``packed``, then contiguous, become the result's own and change where they lie.

    Raises:
        TypeError, ValueError: shapes or dtypes are others.
    """
    op = "fp4_tensor"
    kinds = (torch.uint8, *(kind for _, kind in FORMATS.values()))
    for name, value, dtypes in (("packed", packed, (torch.uint8,)), ("scales", scales, kinds)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
        arguments.check_dtype(op, name, value, dtypes)
        if value.layout != torch.strided:
            raise TypeError(f"{op}: {name} must be a dense tensor, got layout {value.layout}")
    if scales.ndim == 0:
        raise ValueError(f"{op}: scales must have at least one dimension, got a scalar")
    block, kind = FORMATS["nvfp4" if scales.dtype == torch.float8_e4m3fn else "mxfp4"]
    if tensor_scale is not None:
        if kind != torch.float8_e4m3fn:
            raise ValueError(f"{op}: tensor_scale must be None for MXFP4, whose scales are all there is, got one")
        if not isinstance(tensor_scale, torch.Tensor):
            raise TypeError(f"{op}: tensor_scale must be a torch.Tensor or None, got {type(tensor_scale).__name__}")
        arguments.check_dtype(op, "tensor_scale", tensor_scale, arguments.FLOATING)
    *rest, groups = scales.shape
    flat = packed.flatten(-2) if packed.ndim == scales.ndim + 1 else packed
    arguments.check_shape(op, "packed", flat, (*rest, groups * block // 2))
    blocks = scales.numel()
    nested = (
        torch.ones((), dtype=torch.float32, device=packed.device)
        if tensor_scale is None
        else tensor_scale.detach().float().to(packed.device)
    )
    each = blocks // max(nested.numel(), 1)
    if nested.numel() != 1 and (nested.shape != (scales.shape[0],) or each % NESTED_BLOCK):
        raise ValueError(
            f"{op}: tensor_scale must be one number, or {scales.shape[0]} with a multiple of {NESTED_BLOCK} scales each, "
            f"got shape {tuple(nested.shape)} for {each} scales each"
        )
    absmax = scales.contiguous().view(torch.uint8).reshape(-1)
    count = -(-blocks // NESTED_BLOCK)
    nested = nested.reshape(1).expand(count) if nested.numel() == 1 else nested.repeat_interleave(each // NESTED_BLOCK)
    if in_place and not packed.is_contiguous():
        raise ValueError(f"{op}: packed must be contiguous with in_place=True, got strides {packed.stride()}")
    bytes_ = flat.reshape(-1)
    if in_place:
        for part in bytes_.split(CHUNK):  # so that little is there twice
            part.copy_(_swapped(part))
    return NF4Tensor(
        packed=bytes_ if in_place else _swapped(bytes_),
        absmax=absmax,
        shape=(*rest, groups * block),
        block_size=block,
        code=_values(packed.device),
        code_name=E2M1.name,
        dtype=dtype,
        nested_absmax=nested.contiguous(),
        nested_code=torch.arange(256, dtype=torch.uint8, device=packed.device).view(kind).float(),
    )


def _swapped(packed: torch.Tensor) -> torch.Tensor:
    """Bytes with their halves the other way around."""
    return packed << 4 | packed >> 4


def _values(device: torch.device) -> torch.Tensor:
    """``E2M1.values`` on the device, made there: the host would have to wait until they are copied."""
    codes = torch.arange(8, device=device)
    # In float32: of integers PyTorch makes the default dtype.
    exponent, mantissa = (codes >> 1).float(), (codes & 1).float() / 2
    magnitudes = torch.where(exponent > 0, torch.ldexp(1 + mantissa, exponent - 1), mantissa)
    return torch.cat([magnitudes, -magnitudes])


def fp4_parts(q: NF4Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`fp4_tensor` made ``q`` of: packed (..., K / 2), scales, and a float32 for each 256 of them."""
    arguments.check_choice("fp4_parts", "q.code_name", q.code_name, (E2M1.name,))
    kind = next(kind for block, kind in FORMATS.values() if block == q.block_size)
    assert q.nested_absmax is not None
    *rest, k = q.shape
    packed = _swapped(q.packed).view(*rest, k // 2)
    return packed, q.absmax.view(kind).view(*rest, k // q.block_size), q.nested_absmax


def fp4_quantize(w: torch.Tensor, *, format: str = "mxfp4", scale: str = "ocp") -> NF4Tensor:
    """Quantizes ``w`` (..., K) to MXFP4 or NVFP4, each element to the nearest value, halves to the even code.

    MXFP4's scale is the power of two that the OCP Microscaling specification gives (version 1.0, section 6.3): elements
    beyond 6 times it become 6 times it. NVFP4's makes the largest element of a block 6, and the largest of the tensor's
    scales 448. A block that is not finite becomes NaN. The host does not wait for the device.

    Args:
        w: float32, float16 or bfloat16, any strides; K a multiple of 32 or 16.
        format: ``"mxfp4"`` or ``"nvfp4"``.
        scale: ``"ocp"``, as above; or ``"best"``, of MXFP4: that power of two or the next one, whichever a block loses less
            with. What is in MXFP4 already and has changed a little then keeps its scale where the specification's would cut
            its largest elements.

    Raises:
        TypeError, ValueError: ``w``, ``format`` or ``scale`` is not as above.
    """
    op = "fp4_quantize"
    arguments.check_choice(op, "format", format, tuple(FORMATS))
    arguments.check_choice(op, "scale", scale, ("ocp", "best") if format == "mxfp4" else ("ocp",))
    if not isinstance(w, torch.Tensor):
        raise TypeError(f"{op}: w must be a torch.Tensor, got {type(w).__name__}")
    arguments.check_dtype(op, "w", w, DTYPES)
    if w.layout != torch.strided:
        raise TypeError(f"{op}: w must be a dense tensor, got layout {w.layout}")
    block, kind = FORMATS[format]
    if w.ndim == 0 or w.shape[-1] % block:
        raise ValueError(f"{op}: w must have rows of a multiple of {block} elements, got shape {tuple(w.shape)}")
    values = w.detach().float().unflatten(-1, (-1, block))
    largest = values.abs().amax(-1)
    tensor_scale: Any = None
    if format == "mxfp4":
        exponent = torch.frexp(largest).exponent - 3  # the largest is in [4, 8) times the scale
        # 2^-127 is the smallest; 255 stands for NaN.
        stored = (exponent + 127).clamp(0, 254).where(largest.isfinite(), 255).to(torch.uint8)
        step = _power(stored)
        if scale == "best":
            next_one = (stored + 1).where(stored < 254, stored)  # 255 stands for NaN
            lost = [(_nearest(values, power) - values).square().sum(-1) for power in (step, _power(next_one))]
            stored = next_one.where(lost[1] < lost[0], stored)
            step = _power(stored)
        scales = stored.view(kind)
    else:
        finite = largest.isfinite()
        tensor_scale = (largest.where(finite, 0.0).amax() if largest.numel() else largest.new_zeros(())) / (6 * 448)
        scales = (largest / 6 / tensor_scale).nan_to_num(0.0).where(finite, torch.nan).to(kind)  # all zeros: 0 / 0
        step = scales.float() * tensor_scale
    code = _codes(values, step).flatten(-2)
    return fp4_tensor(code[..., 0::2] | code[..., 1::2] << 4, scales, tensor_scale, dtype=w.dtype)


def _power(stored: torch.Tensor) -> torch.Tensor:
    """The powers of two that e8m0's bytes stand for."""
    return torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.float() - 127)


def _codes(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The codes of values (..., block) over their steps (...)."""
    scaled = (values / step[..., None]).nan_to_num(0.0, 6.0, -6.0)
    magnitudes = _values(values.device)[:8]
    edges = (magnitudes[1:] + magnitudes[:-1]) / 2
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros_like(edges[1::2]))  # there the value above has the even code
    return torch.bucketize(scaled.abs(), edges).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)


def _nearest(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return _values(values.device)[_codes(values, step).int()] * step[..., None]
