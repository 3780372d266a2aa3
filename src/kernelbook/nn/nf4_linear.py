"""A linear layer whose weight is frozen in four bits."""

import dataclasses

import torch

from kernelbook import arguments
from kernelbook.linear import linear
from kernelbook.nf4 import NF4Tensor, nf4_matmul
from kernelbook.nn.moe import LoRAModule, quantize_parameter, stored_weight


class NF4Linear(LoRAModule):
    """A linear layer whose weight is frozen in 4 bits, on :func:`kernelbook.nf4_matmul`, with or without a LoRA pair.

    ``layer.weight`` reads the dense weight (out_features, in_features), made anew each time; the state dict holds its packed
    bytes and scales, and with LoRA ``lora_a`` (r, in_features), ``lora_b`` (out_features, r) and ``scaling``.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``; the weight is drawn as its.
        block_size, double_quant: as in :func:`kernelbook.nf4_quantize`.

    Raises:
        TypeError, ValueError: ``dtype`` is neither float32, float16 nor bfloat16, or ``block_size`` is not known.
    """

    bias: torch.nn.Parameter | None
    lora_a: torch.nn.Parameter | None
    lora_b: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        block_size: int = 64,
        double_quant: bool = False,
    ) -> None:
        super().__init__()
        self._take(torch.nn.Linear(in_features, out_features, bias, device, dtype), block_size, double_quant)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, block_size: int = 64, double_quant: bool = False) -> "NF4Linear":
        """Return the layer in 4 bits; the bias is shared. Raises ``TypeError`` for what is no ``torch.nn.Linear``."""
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"NF4Linear.from_linear: linear must be a torch.nn.Linear, got {type(linear).__name__}")
        new = cls.__new__(cls)
        super(NF4Linear, new).__init__()
        new._take(linear, block_size, double_quant)
        return new.train(linear.training)

    def _take(self, linear: torch.nn.Linear, block_size: int, double_quant: bool) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(linear.weight.detach())
        self.register_parameter("bias", linear.bias)
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        quantize_parameter(self, "weight", block_size=block_size, double_quant=double_quant)

    def add_lora(self, rank: int, alpha: float | None = None, dtype: torch.dtype | None = None) -> "NF4Linear":
        """Freeze the bias and add ``alpha / rank`` (default 1) times ``x a^T b^T``; b starts at zero.

        Raises ``TypeError`` for a rank or an alpha that is no number, and ``ValueError`` where there is a pair already, for a
        rank below 1 and for another dtype.
        """
        self._add_pairs(rank, alpha, dtype, {"lora": stored_weight(self, "weight")})
        if self.bias is not None:
            self.bias.requires_grad_(False)
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        x, bias, a, b = arguments.in_autocast_dtype(input, self.bias, self.lora_a, self.lora_b)
        stored = stored_weight(self, "weight")
        if isinstance(stored, NF4Tensor):
            out = nf4_matmul(x, dataclasses.replace(stored, shape=(1, *stored.shape)), 0)
        else:  # something else has been put on it
            out = linear(x, stored.to(x.dtype))
        if bias is not None:
            out = out + bias.to(out.dtype)
        if a is not None:
            out = out + linear(linear(x.to(a.dtype), a), b).to(out.dtype) * self.scaling
        return out

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank}"
        )
