"""To bitsandbytes, and from its 4-bit parameters. ``NF4Tensor.from_bitsandbytes`` needs nothing of that library."""

from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch.nn.utils import parametrize

from kernelbook import arguments
from kernelbook.nf4 import NF4Tensor
from kernelbook.packed import NESTED_BLOCK


def to_bitsandbytes(q: NF4Tensor) -> tuple[torch.Tensor, QuantState]:
    """What ``bitsandbytes.functional.quantize_4bit`` would have returned. The tensors are shared, not copied.

    Returns:
        packed (ceil(n / 2), 1) uint8, and the ``QuantState``.

    Raises:
        ValueError: the code book is neither NF4 nor FP4.
    """
    arguments.check_choice("to_bitsandbytes", "q.code_name", q.code_name, ("nf4", "fp4"))
    state2 = None
    if q.double_quant:
        state2 = QuantState(absmax=q.nested_absmax, code=q.nested_code, blocksize=NESTED_BLOCK, dtype=torch.float32)
    state = QuantState(
        absmax=q.absmax,
        shape=torch.Size(q.shape),
        code=q.code,
        blocksize=q.block_size,
        quant_type=q.code_name,
        dtype=q.dtype,
        offset=q.nested_offset,
        state2=state2,
    )
    return q.packed[:, None], state


def parametrized_weight(module: torch.nn.Module, name: str) -> NF4Tensor:
    """The parameter ``module.name`` after ``bitsandbytes.nn.parametrize.replace_parameter_4bit``. Tensors are shared.

    Raises:
        ValueError: the parameter is not parametrized by bitsandbytes alone, or its quantization is neither NF4 nor FP4.
    """
    found: Any = module.parametrizations[name] if parametrize.is_parametrized(module, name) else ()  # type: ignore[index]
    state = getattr(found[0], "quant_state", None) if len(found) == 1 else None
    if not isinstance(state, QuantState):
        raise ValueError(
            f"parametrized_weight: {name} of {type(module).__name__} must be quantized by bitsandbytes' "
            f"replace_parameter_4bit, got {[type(part).__name__ for part in found] or 'an ordinary parameter'}"
        )
    return NF4Tensor.from_bitsandbytes(found.original.detach(), state)
