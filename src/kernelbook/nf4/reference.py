"""4-bit NormalFloat with blockwise absmax (Dettmers et al. 2023, "QLoRA", section 3) in plain PyTorch: the specification.

A tensor of n elements is cut into blocks in memory order, the last of which may be short. A block keeps its largest
absolute value; each element becomes the index of the code book's value nearest to element / absmax. Two indices share a
byte, the even element in the high half.
"""

import math

import torch

__all__ = [
    "nested_absmax_reference",
    "nf4_code_reference",
    "nf4_dequantize_reference",
    "nf4_quantize_reference",
]


def nf4_code_reference(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The 16 values of NF4, derived: quantiles of the standard normal
    distribution, scaled to [-1, 1].

    Eight quantiles above zero, seven below and zero itself, evenly spaced in
    probability on each side. The outermost probability is the mean of those
    that would leave half a bin of 16 and half a bin of 15 beyond it, since the
    two sides have different numbers of values.

    Returns:
        (16,) ascending.
    """
    f64 = torch.float64
    outermost = 1 - (1 / (2 * 16) + 1 / (2 * 15)) / 2
    above = torch.linspace(outermost, 0.5, 9, dtype=f64)[:-1]
    below = torch.linspace(outermost, 0.5, 8, dtype=f64)[:-1]
    above, below = torch.special.ndtri(above), -torch.special.ndtri(below)
    code = torch.cat([above, below, torch.zeros(1, dtype=f64)]).sort().values
    return (code / code.abs().max()).to(dtype)


def nf4_quantize_reference(
    w: torch.Tensor, code: torch.Tensor, block_size: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``w`` (any shape) in float32.

    A value on the middle between two code values takes the lower one. A full block is multiplied by the reciprocal of
    its absmax, a short last block divided by it, and reciprocal and absmax are kept from infinity and zero as
    bitsandbytes does.

    Args:
        code: (16,) the code book, in any order.

    Returns:
        packed (ceil(n / 2),) uint8, and absmax (ceil(n / block_size),) float32.
    """
    flat = w.reshape(-1).float()
    n = flat.numel()
    full = n - n % block_size
    blocks = flat[:full].view(-1, block_size)
    absmax = blocks.abs().amax(1) if full else flat.new_zeros(0)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).reshape(-1)
    if full < n:
        last = flat[full:].abs().max().clamp(min=1e-38)
        absmax, scaled = torch.cat([absmax, last[None]]), torch.cat([scaled, flat[full:] / last])
    # The order of equal values (FP4 has two zeros) matters: the first one takes the values from below.
    values, order = code.float().sort(stable=True)
    index = order[torch.bucketize(scaled.clamp(-1, 1), (values[:-1] + values[1:]) / 2)].to(torch.uint8)
    if n % 2:
        filler = order[torch.bucketize(scaled.new_zeros(1), (values[:-1] + values[1:]) / 2)].to(torch.uint8)
        index = torch.cat([index, filler])
    return index[0::2] << 4 | index[1::2], absmax


def nested_absmax_reference(
    absmax: torch.Tensor, nested_absmax: torch.Tensor, nested_code: torch.Tensor, nested_offset: torch.Tensor
) -> torch.Tensor:
    """The absmax values of double quantization: ``nested_code[absmax] * nested_absmax + nested_offset``.

    Args:
        absmax: (blocks,) uint8.
        nested_absmax: (ceil(blocks / 256),), one for 256 blocks.
        nested_code: (256,).
        nested_offset: (), the mean that was subtracted.

    Returns:
        (blocks,) in the dtype of ``nested_absmax``.
    """
    scale = nested_absmax.repeat_interleave(256)[: absmax.numel()]
    return nested_code.to(scale.dtype)[absmax.long()] * scale + nested_offset.to(scale.dtype)


def nf4_dequantize_reference(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    shape: tuple[int, ...],
    block_size: int = 64,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``code[index] * absmax[block]`` for all elements, then the chosen experts of it.

    Args:
        packed: (ceil(n / 2),) uint8.
        absmax: (ceil(n / block_size),) in the dtype of the result.
        code: (16,).
        shape: (E, ...) of n elements.
        experts: (A,) or ``None`` for all.

    Returns:
        (A, ...), or ``shape`` where ``experts`` is ``None``.
    """
    n = math.prod(shape)
    index = torch.stack([packed >> 4, packed & 15], dim=-1).reshape(-1)[:n].long()
    scale = absmax.repeat_interleave(block_size)[:n]
    w = (code.to(absmax.dtype)[index] * scale).view(shape)
    return w if experts is None else w[experts]
