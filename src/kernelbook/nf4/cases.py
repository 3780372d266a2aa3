"""Calls of this room's functions, and what each promises."""

from collections.abc import Iterator
from typing import Any

import torch

from kernelbook.cases import Case, Given, draw, ids
from kernelbook.nf4.op import NF4, nf4_dequantize, nf4_matmul, nf4_quantize
from kernelbook.nf4.reference import nf4_quantize_reference
from kernelbook.packed import NF4Tensor
from kernelbook.packed.cases import parts, weights

KINDS = ("32", "64", "128 double", "mxfp4", "nvfp4")


def _quantized(w: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return nf4_quantize_reference(w, torch.tensor(NF4.values, dtype=torch.float32, device=w.device), block_size)


def _dequantized(q: NF4Tensor, experts: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    w = q.as_float64()
    return (w if experts is None else w[experts]).to(dtype)


def _product(x: torch.Tensor, q: NF4Tensor, expert: torch.Tensor | int) -> torch.Tensor:
    return x @ q.as_float64()[expert].view(q.shape[1:]).to(x.dtype).t()


def _given_matmul(m: int = 4, n: int = 8, k: int = 64, experts: int = 3, kind: str = "64", expert: Any = 1) -> Given:
    return {"x": draw(m, k), "q": weights(experts, n, k, kind=kind), "expert": expert}


def _given_dequantize(e: int = 3, n: int = 32, k: int = 64, kind: str = "64", every: bool = False) -> Given:
    some = None if every else ids(e - 1, 0)
    return {"q": weights(e, n, k, kind=kind), "experts": some, "dtype": torch.float32}


CASES = {
    "nf4_quantize": Case(
        function=lambda w, block_size: parts(nf4_quantize(w, block_size=block_size)), reference=_quantized,
        given=lambda m=3, n=64, block_size=64: {"w": draw(m, n), "block_size": block_size}, rows=("w",), grads=(),
        but=("graph", "synchronisation", "rows alone"),  # the code book comes from the host; blocks begin in one row and end in another
        what="pack weights into NF4", sizes={"m": (0, 257), "n": (1, 257), "block_size": [32, 64, 128]},
        real=({"m": 512, "n": 2049}, {"m": 100, "n": 4096, "block_size": 4096}),
    ),
    "nf4_dequantize": Case(
        function=nf4_dequantize, given=_given_dequantize, reference=_dequantized, rows=("experts",), grads=(),
        but=("strides", "forward mode"), what="unpack the experts that you name",
        sizes={"e": (1, 4), "n": (1, 257), "k": (1, 257), "kind": KINDS[:3], "every": [False, True]},
        real=tuple({"e": 5, "n": 1000, "k": 2112, "kind": kind} for kind in KINDS),
    ),
    "nf4_matmul": Case(
        function=nf4_matmul, given=_given_matmul, reference=_product, lowered=(), but=("gradcheck",),  # no float64
        what="a product with a packed matrix, few tokens",
        sizes={"m": (1, 33), "n": (1, 257), "k": [32, 64, 128, 160], "experts": (1, 4), "kind": KINDS, "expert": [0]},
        real=tuple(
            {"m": m, "n": 4096, "k": 2112, "kind": kind} for m in (1, 3, 8, 16, 64, 700) for kind in ("64", "64 double", "mxfp4", "nvfp4")
        ),
    ),
    "nf4_matmul, scales in 8 bits": Case(
        function=nf4_matmul, reference=_product, lowered=(), but=("gradcheck", "bad input"),
        given=_given_matmul, options={"m": 2, "kind": "64 double", "expert": ids(2)},
        sizes={"m": (1, 33), "n": (1, 257), "k": (1, 257), "kind": KINDS[:3]},
    ),
}  # fmt: skip


def compiled(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that are compiled for a GPU."""
    for more in ("", " double"):
        for dtype in (torch.bfloat16, torch.float32):
            for n, k in ((64, 256), (33, 33)):
                yield "nf4_dequantize", {"e": 2, "n": n, "k": k, "kind": "64" + more, "dtype": dtype}
        yield "nf4_dequantize", {"e": 2, "n": 64, "k": 256, "kind": "4096" + more, "every": True}
        for m in (1, 2, 4, 8, 16, 40, 64):
            for n in (1024, 4096) if m <= 8 else (1024,):
                sizes = {"m": m, "experts": 2, "n": n, "k": 256, "kind": "64" + more, "needs": ()}
                yield "nf4_matmul", sizes | {"expert": torch.tensor(1)}
    for block_size in (32, 64, 4096):
        yield "nf4_quantize", {"m": 2, "n": 4096, "block_size": block_size}


# What the page "Compiled" shows.
STATED = {
    "nf4_dequantize, 256 experts of 1,024 x 2,048, bfloat16; nf4_matmul, one token": [
        ("nf4_dequantize", {"e": 256, "n": 1024, "k": 2048}),
        ("nf4_matmul", {"m": 1, "experts": 1, "n": 14336, "k": 4096, "expert": 0, "needs": ()}),
    ]
}
