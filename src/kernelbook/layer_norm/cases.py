"""Calls of this room's functions, and what each promises."""

import torch
from torch.nn import functional

from kernelbook.cases import Case, Given, draw
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


SIZES = {"m": (0, 257), "n": (1, 4096), "weight": (False, True)}
SIZES_OF_LAYER_NORM = SIZES | {"bias": (False, True), "mean": (0.0, 100.0), "eps": (1e-5, 1e-3)}

CASES = {
    "layer_norm": Case(
        function=layer_norm, given=given_layer_norm, reference=layer_norm_reference, baseline=_layer_norm,
        what="normalize rows, with their mean", sizes=SIZES_OF_LAYER_NORM, real=REAL, large={"m": 2**19 + 5, "n": 4096},
    ),
    "rms_norm": Case(
        function=rms_norm, given=given_rms_norm, reference=rms_norm_reference, what="normalize rows; add a residual first",
        plain={"residual": True}, real=REAL, large={"m": 2**19 + 5, "n": 4096},
    ),
    "rms_norm of a sum": Case(
        function=rms_norm, given=given_rms_norm, options={"residual": True}, reference=rms_norm_reference, rows=("x", "residual"), sizes=SIZES | {"residual": (False, True)}, real=REAL,
    ),
}  # fmt: skip
