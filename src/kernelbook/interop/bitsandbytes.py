"""To bitsandbytes. The way back, ``NF4Tensor.from_bitsandbytes``, needs nothing of that library."""

import torch
from bitsandbytes.functional import QuantState

from kernelbook import arguments
from kernelbook.nf4 import NF4Tensor

__all__ = ["to_bitsandbytes"]

NESTED_BLOCK = 256  # absmax values that share one nested absmax, in both libraries


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
