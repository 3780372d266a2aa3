"""Calls of the functions that make tensors of FP4, and 4-bit weights for calls of others."""

import torch

from kernelbook import packed, runtime
from kernelbook.cases import Case, Given, draw, draw_shares, ids
from kernelbook.packed import NF4, NF4Tensor
from kernelbook.packed.fp4 import fp4_quantize, fp4_tensor


def weights(*shape: int, kind: str = "64") -> NF4Tensor:
    """Weights (E, N, K) in 4 bits: NF4 in blocks of ``kind``, with its scales in 8 bits if that ends in "double"; or FP4's."""
    if "fp4" in kind:
        return fp4_quantize(draw(*shape), format=kind)
    block_size = int(kind.split()[0])
    n = shape[0] * shape[1] * shape[2]
    blocks = -(-n // block_size)
    codes = torch.randint(0, 256, (-(-n // 2),), dtype=torch.uint8, device=runtime.DEVICE)
    absmax = draw_shares(blocks) / shape[-1] ** 0.5
    scales = packed.quantized_scales(absmax) if "double" in kind else {"absmax": absmax}
    code = torch.tensor(NF4.values, dtype=torch.float32, device=runtime.DEVICE)
    return NF4Tensor(packed=codes, shape=shape, block_size=block_size, code=code, **scales)


def parts(q: NF4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.packed, q.absmax


def _given_codes(dtype: torch.dtype = torch.float32) -> Given:
    scales = ids(127, 126, 125, 0).byte().view(2, 2)
    return {"packed": ids(*range(64)).byte().view(2, 32), "scales": scales, "dtype": dtype}


CASES = {
    "fp4_quantize": Case(
        function=lambda w, **how: parts(fp4_quantize(w, **how)), given=lambda m=3, n=64: {"w": draw(m, n)}, rows=("w",),
        grads=(), but=("opcheck", "forward mode"), what="pack weights into MXFP4 or NVFP4",
    ),
    "fp4_tensor": Case(
        function=lambda packed, scales, dtype: parts(fp4_tensor(packed, scales, dtype=dtype)), given=_given_codes,
        rows=("packed", "scales"), grads=(), what="take codes and scales as they are stored",
        but=("opcheck", "bad input", "forward mode"),  # no operator; of two that do not fit the first is named
    ),
}  # fmt: skip
