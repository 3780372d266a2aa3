"""Calls of this room's functions, and what each promises."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from kernelbook.cases import ONE_TARGET, Case, Given, draw
from kernelbook.layer_norm.op import layer_norm, rms_norm
from kernelbook.layer_norm.reference import layer_norm_reference, rms_norm_reference

WIDTHS = (512, 1001, 1536, 2001, 3001, 4096, 5003, 5632, 8192, 12288, 13824, 15001, 15872, 20480, 33000)
# Within 4 GiB, beside others on a GPU.
REAL = tuple({"m": 3001 if n < 5000 else 401, "n": n} for n in WIDTHS)


def given_layer_norm(
    m: int = 4, n: int = 32, weight: bool = True, bias: bool = True, mean: float = 0.0, eps: float = 1e-5
) -> Given:
    vectors = {"weight": draw(n) if weight else None, "bias": draw(n) if bias else None}
    return {"x": draw(m, n) + mean, **vectors, "eps": eps}


def given_rms_norm(m: int = 4, n: int = 32, weight: bool = True, residual: bool = False) -> Given:
    more = {"residual": draw(m, n)} if residual else {}
    return {"x": draw(m, n), "weight": draw(n) if weight else None, **more}


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


SIZES = {"m": (0, 257), "n": (0, 4096), "weight": (False, True)}
SIZES_OF_LAYER_NORM = SIZES | {"bias": (False, True), "mean": (0.0, 100.0), "eps": (1e-5, 1e-3)}

CASES = {
    "layer_norm": Case(
        function=layer_norm, given=given_layer_norm, reference=layer_norm_reference, baseline=_layer_norm, lowered=(),
        what="normalize rows, with their mean", sizes=SIZES_OF_LAYER_NORM, real=REAL, large={"m": 2**19 + 5, "n": 4096},
    ),
    "rms_norm": Case(
        function=rms_norm, given=given_rms_norm, reference=rms_norm_reference, what="normalize rows; add a residual first",
        plain={"residual": True}, lowered=(), real=REAL, large={"m": 2**19 + 5, "n": 4096},
    ),
    "rms_norm of a sum": Case(
        function=rms_norm, given=given_rms_norm, options={"residual": True}, reference=rms_norm_reference, rows=("x", "residual"),
        lowered=(), sizes=SIZES | {"residual": (False, True)}, real=REAL,
    ),
}  # fmt: skip


def compiled(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that are compiled for a GPU: on one at every size at which a rule changes."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for m, n in ((64, 1000), (64, 4096), (4, 4096), (64, 40000)):  # of 4 rows one program writes the sums itself
            yield "layer_norm", {"m": m, "n": n, "dtype": dtype}
        yield "layer_norm_with_locks", {"m": 64, "n": 4096, "dtype": dtype}
    apart = lambda t: t.new_empty(64, 16384)[:, 3:15363] if t.ndim > 1 else t  # noqa: E731
    yield "layer_norm", {"m": 64, "n": 15360, "bias": False, "dtype": torch.float32, "needs": ("x",), "lie": apart}
    some = (
        (64, 2048, 3072, 5632, 8192, 12288, 13824, 15872, 18432, 20480, 2001, 4095, 9001)
        if target == ONE_TARGET
        else (8192,)
    )
    for n in some:
        for dtype in (torch.bfloat16, torch.float32):
            yield "layer_norm", {"m": 64, "n": n, "dtype": dtype}
        yield "rms_norm of a sum", {"m": 64, "n": n}
    yield "rms_norm of a sum", {"m": 64, "n": 40000, "dtype": torch.float32}


# What the page "Compiled" shows.
STATED = {f"layer_norm, 4,096 x {n:,}, bfloat16": [("layer_norm", {"m": 4096, "n": n})] for n in (4096, 15872)}
