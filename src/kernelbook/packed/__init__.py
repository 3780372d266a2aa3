"""Tensors in 4 bits an element, as several rooms take them."""

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from kernelbook import arguments

__all__ = [
    "BLOCK_SIZES",
    "DTYPES",
    "FLOAT8_SCALES",
    "FP4",
    "NESTED_BLOCK",
    "NF4",
    "CodeBook",
    "NF4Tensor",
    "dynamic_code",
    "kind_of_scale",
    "quantized_scales",
]

NESTED_BLOCK = 256  # absmax values that share one nested absmax
FLOAT8_SCALES = {32: "e8m0", 16: "e4m3"}  # by block size, of MXFP4 and NVFP4
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CodeBook(NamedTuple):
    """Sixteen values, in [-1, 1] where absmax scales them, in the order of their 4-bit codes, and the name by which bitsandbytes knows them."""

    name: str
    values: tuple[float, ...]


# The published float32 values (Dettmers et al. 2023, "QLoRA", appendix E); the chapter derives them.
NF4 = CodeBook(
    "nf4",
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip

_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # by the three bits below the sign
# A sign, two bits of exponent, one of mantissa, divided by the largest; the sign of zero is of no consequence.
FP4 = CodeBook("fp4", tuple(sign * m / 12.0 for sign in (1.0, -1.0) for m in _FP4_MAGNITUDES))


_PARTS = ("packed", "absmax", "code", "nested_absmax", "nested_code", "nested_offset")


def _check_parts(block_size: int, n: int, *parts: Any) -> None:
    arguments.check_choice("NF4Tensor", "block_size", block_size, (16, *BLOCK_SIZES))  # 16: NVFP4's, see fp4.py
    given = dict(zip(_PARTS, parts, strict=True))
    blocks, double_quant = -(-n // block_size), given["nested_absmax"] is not None
    expected: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("packed", (-(-n // 2),), torch.uint8),
        ("absmax", (blocks,), torch.uint8 if double_quant else torch.float32),
        ("code", (16,), torch.float32),
    ]
    if double_quant:
        expected += [
            ("nested_absmax", (-(-blocks // NESTED_BLOCK),), torch.float32),
            ("nested_code", (256,), torch.float32),
        ]
        if block_size not in FLOAT8_SCALES or given["nested_offset"] is not None:
            expected.append(("nested_offset", (), torch.float32))
    for name, shape, dtype in expected:
        value = given[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"NF4Tensor: {name} must be a torch.Tensor, got {type(value).__name__}")
        arguments.check_dtype("NF4Tensor", name, value, (dtype,))
        arguments.check_shape("NF4Tensor", name, value, shape)
    arguments.check_same_device("NF4Tensor", **given)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NF4Tensor:
    """A tensor of n elements in 4 bits each, cut into blocks of ``block_size`` elements in memory order.

    Parts that are not contiguous are copied.

    Attributes:
        packed: (ceil(n / 2),) uint8, two codes a byte; the even element is the high half.
        absmax: (ceil(n / block_size),), the blocks' largest absolute values: float32, or uint8 where they are quantized
            in turn (double quantization).
        shape: of the tensor that was quantized; its first dimension counts experts.
        block_size: a power of two from 16 to 4096.
        code: (16,) float32, the code book's values.
        code_name: the code book's name, ``"nf4"`` or ``"fp4"`` where bitsandbytes has it, ``"e2m1"`` for MXFP4 and NVFP4.
        dtype: of the tensor that was quantized.
        nested_absmax: (ceil(blocks / 256),) float32, with double quantization: the scales of ``absmax``. NVFP4's are the same
            along a row, as :func:`kernelbook.fp4_tensor` makes them: in products on Hopper GPUs a row that has several is NaN.
        nested_code: (256,) float32, with double quantization: the values that ``absmax`` stands for.
        nested_offset: () float32, with double quantization: added at the end. ``None`` of MXFP4 and NVFP4, whose ``absmax``
            holds the bytes of float8 scales.

    Raises:
        TypeError, ValueError: the parts do not fit together.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    shape: tuple[int, ...]
    block_size: int
    code: torch.Tensor
    code_name: str = "nf4"
    dtype: torch.dtype = torch.bfloat16
    nested_absmax: torch.Tensor | None = None
    nested_code: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in _PARTS}
        _check_parts(self.block_size, self.numel, *parts.values())
        for name, part in parts.items():
            if part is not None and not part.is_contiguous():
                object.__setattr__(self, name, part.contiguous())

    def __repr__(self) -> str:
        """What it is, in a line; its parts would fill pages."""
        return (
            f"NF4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, code_name={self.code_name!r}, "
            f"block_size={self.block_size}, double_quant={self.double_quant}, device='{self.device}', nbytes={self.nbytes})"
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in _PARTS if getattr(self, name) is not None}

    @property
    def numel(self) -> int:
        """How many elements it stands for."""
        return math.prod(self.shape)

    @property
    def double_quant(self) -> bool:
        """Whether the absmax values are quantized too."""
        return self.nested_absmax is not None

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """The bytes of all its parts."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def scales(self) -> torch.Tensor:
        """(ceil(n / block_size),) float32: of each block, whatever ``absmax`` holds."""
        if self.nested_absmax is None or self.nested_code is None:
            return self.absmax
        nested = self.nested_absmax.repeat_interleave(NESTED_BLOCK)[: self.absmax.numel()]
        scales = self.nested_code[self.absmax.int()] * nested
        return scales if self.nested_offset is None else scales + self.nested_offset

    def as_float64(self) -> torch.Tensor:
        """What it stands for, dense: each product of code and scale rounded once to float32, as kernels round it."""
        scales = self.scales().repeat_interleave(self.block_size)[: self.numel]
        index = torch.stack((self.packed >> 4, self.packed & 15), -1).flatten()[: self.numel].int()
        return (self.code[index] * scales).double().view(self.shape)

    def to(self, device: torch.device | str) -> "NF4Tensor":
        """The same on ``device``."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return dataclasses.replace(self, **moved)

    @classmethod
    def from_bitsandbytes(
        cls, packed: torch.Tensor, quant_state: Any, *, shape: tuple[int, ...] | None = None
    ) -> "NF4Tensor":
        """From what ``bitsandbytes.functional.quantize_4bit`` returns, or a ``Params4bit``'s data and quant_state.

        Args:
            packed: the bytes in any shape and any storage dtype. They are shared, not copied.
            quant_state: bitsandbytes' ``QuantState``; its tensors are shared too.
            shape: (E, rows, cols) where the state's own shape is flat; as many elements as the state's.

        Raises:
            TypeError, ValueError: the state is of another kind, or does not fit ``packed`` or ``shape``.
        """
        op = "NF4Tensor.from_bitsandbytes"
        arguments.check_choice(op, "quant_state.quant_type", quant_state.quant_type, ("nf4", "fp4"))
        if getattr(quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"{op}: quant_state must describe what bitsandbytes quantized, got what it repacked, with rounded scales, "
                "at the layer's first call on the CPU: take the tensor before that call, or from a checkpoint"
            )
        n = math.prod(quant_state.shape)
        shape = tuple(quant_state.shape if shape is None else shape)
        if math.prod(shape) != n:
            raise ValueError(f"{op}: shape must have {n} elements, got {shape}")
        data = packed.contiguous().reshape(-1).view(torch.uint8)
        if data.numel() < -(-n // 2):
            raise ValueError(f"{op}: packed must have at least {-(-n // 2)} bytes, got {data.numel()}")
        absmax, nested = quant_state.absmax, {}
        if quant_state.state2 is not None:
            state2 = quant_state.state2
            arguments.check_choice(op, "quant_state.state2.blocksize", state2.blocksize, (NESTED_BLOCK,))
            arguments.check_choice(op, "quant_state.state2.dtype", state2.dtype, (torch.float32,))
            nested = {
                "nested_absmax": state2.absmax.float(),
                "nested_code": state2.code.to(absmax.device, torch.float32),
                "nested_offset": quant_state.offset.float(),
            }
        return cls(
            packed=data[: -(-n // 2)],
            absmax=absmax if nested else absmax.float(),
            shape=shape,
            block_size=quant_state.blocksize,
            code=quant_state.code.to(absmax.device, torch.float32),
            code_name=quant_state.quant_type,
            dtype=quant_state.dtype,
            **nested,
        )


def kind_of_scale(block_size: int, nested_absmax: torch.Tensor | None, nested_offset: torch.Tensor | None) -> str:
    """What kernels call the scales of an ``NF4Tensor`` with these parts: "float32", "nested", "e8m0" or "e4m3"."""
    if nested_absmax is None:
        return "float32"
    return FLOAT8_SCALES[block_size] if nested_offset is None else "nested"


# What torch.save wrote is loaded under its default, weights_only=True, too: the class holds tensors and plain values.
torch.serialization.add_safe_globals([NF4Tensor])


# --- double quantization ----------------------------------------------------------------------------------------------


def quantized_scales(absmax: torch.Tensor) -> dict[str, Any]:
    """float32 ``absmax`` of an ``NF4Tensor`` in 8 bits, with what belongs to it, by the names that they have there."""
    offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())  # the mean of no blocks would be NaN
    code = dynamic_code().to(absmax.device)
    quantized, nested = _nearest(absmax - offset, code)
    return {"absmax": quantized, "nested_absmax": nested, "nested_code": code, "nested_offset": offset}


def dynamic_code() -> torch.Tensor:
    """(256,): seven decades with 2, 4, ..., 128 values, zero, and one (Dettmers 2015)."""
    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are where a model is loaded
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, **plain)
        positive.append(10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2))
    below_one = torch.cat(positive)
    return torch.cat([below_one, -below_one, torch.tensor([0.0, 1.0], **plain)]).sort().values


def _nearest(centered: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> indices (blocks,) uint8 into ``code``, and scales (ceil(blocks / 256),). One value in 64 or fewer comes here."""
    n = centered.numel()
    groups = torch.nn.functional.pad(centered, (0, -n % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    scale = groups.abs().amax(1)
    scaled = (groups * (1.0 / scale.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    index = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2).to(torch.uint8)
    return index.view(-1)[:n].clone(), scale  # no view of the padding: it would be saved along
