"""Calls of this room's functions, and what each promises."""

import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from kernelbook import check, runtime
from kernelbook.cases import ONE_TARGET, Case, Given, draw
from kernelbook.sparse_linear import kernels
from kernelbook.sparse_linear.op import sparse_backward, sparse_dw, sparse_dx, sparse_forward, sparse_linear
from kernelbook.sparse_linear.reference import (
    sparse_dw_reference,
    sparse_dx_reference,
    sparse_forward_reference,
    sparse_linear_reference,
)


def active_chunks(d_out: int, chunk: int, share: float, count: int | None = None) -> Given:
    """A share of the chunks, or so many, in any order."""
    every = -(-d_out // chunk)
    active = torch.randperm(every, device=runtime.DEVICE)[: math.ceil(share * every) if count is None else count]
    return {"active_chunks": active, "chunk_size": chunk}


def given_layer(
    m: int = 4, d_in: int = 32, d_out: int = 48, chunk: int = 16, share: float = 0.5, count: int | None = None,
    bias: bool = True, **options: Any,
) -> Given:  # fmt: skip
    tensors = {"x": draw(m, d_in), "weight": draw(d_out, d_in), "bias": draw(d_out) if bias else None}
    return tensors | active_chunks(d_out, chunk, share, count) | options


def _given_parts(
    names: str, m: int = 4, d_in: int = 32, d_out: int = 48, chunk: int = 16, share: float = 0.5,
    count: int | None = None, **options: Any,
) -> Given:  # fmt: skip
    shapes = {"x": (m, d_in), "weight": (d_out, d_in), "dy": (m, d_out)}
    return {n: draw(*shapes[n]) for n in names.split()} | active_chunks(d_out, chunk, share, count) | options


def _backward(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, compact: bool = False, **given: Any) -> Any:
    return *sparse_dw_reference(x, dy, compact=compact, **given), sparse_dx_reference(dy, weight, **given)


SIZES = {"m": (0, 257), "d_in": (0, 257), "d_out": (0, 512), "chunk": [16, 48, 64], "share": [0.0, 0.1, 0.5, 1.0]}
EVERY_CHUNK = {"share": 1.0, "mode": "sparse_dw_dx"}
COMPACT = {"compact": [False, True]}
REAL = tuple(
    {"m": m, "d_in": d_in, "d_out": d_out, "chunk": chunk, "share": share}
    for m, d_in, d_out, chunk in ((513, 1000, 2100, 64), (2048, 1024, 4096, 64), (1111, 520, 1040, 48), (8192, 512, 2048, 128))
    for share in (0.1, 1.0)
)  # fmt: skip
LARGE = {"m": 2**17 + 64, "d_in": 64, "d_out": 2**14 + 64, "chunk": 64, "share": 0.01}

CASES = {
    "sparse_linear": Case(
        function=sparse_linear, given=given_layer, options=EVERY_CHUNK, reference=sparse_linear_reference,
        what="a linear layer with gradients of chosen chunks only", plain={"share": 0.5, "mode": "sparse_dw"},
        sizes=SIZES | {"mode": ["dense", "sparse_dw", "sparse_dw_dx"], "bias": [False, True]}, real=REAL,
    ),
    "sparse_forward": Case(
        function=sparse_forward, given=given_layer, reference=sparse_forward_reference, what="chosen columns of a product",
        part=True, sizes=SIZES, real=REAL, large=LARGE,
    ),
    "sparse_dw": Case(
        function=sparse_dw, given=_given_parts, options={"names": "x dy"}, reference=sparse_dw_reference,
        rows=("x", "dy"), but=("rows alone",), what="chosen rows of a weight's gradient", part=True, sizes=SIZES | COMPACT, real=REAL,
    ),
    "sparse_dx": Case(
        function=sparse_dx, given=_given_parts, options={"names": "dy weight"}, reference=sparse_dx_reference,
        rows=("dy",), what="the input's gradient from chosen rows", part=True, sizes=SIZES, real=REAL, large=LARGE,
    ),
    "sparse_backward": Case(
        function=sparse_backward, given=_given_parts, options={"names": "x weight dy"}, reference=_backward,
        rows=("x", "dy"), but=("rows alone",), lowered=(), grads=("x", "dy"),  # of dW, the first result
        factor=check.GRADIENT_FACTOR, what="the three gradients in one call", part=True, sizes=SIZES | COMPACT, real=REAL,
    ),
    "sparse_dw, compact": Case(
        function=sparse_dw, given=_given_parts, options={"names": "x dy", "compact": True}, reference=sparse_dw_reference,
        rows=("x", "dy"),
    ),
    "sparse_forward, compact": Case(
        function=sparse_forward, given=given_layer, options={"bias": False, "compact": True}, reference=sparse_forward_reference, sizes=SIZES,
    ),
}  # fmt: skip

# Rows, inputs, features, active chunks, chunk size: the largest tiles; then also the three smaller ones (the smallest with a
# split reduction), and ordinary loads.
SOME = ((8192, 4096, 16384, 26, 64), (2048, 512, 2048, 1, 64))
EVERY = (
    *SOME, (2048, 1024, 4096, 6, 64), (2048, 4096, 16384, 26, 64), (2048, 1024, 4096, 8, 48), (8192, 4096, 16384, 36, 48),
    (2048, 2048, 8192, 17, 48),
)  # fmt: skip


def compiled(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that are compiled for a GPU: on one at every size at which a rule changes.

    With ordinary loads in the largest tiles too, which some compact tensors get.
    """
    unboxed = functools.partial(mock.patch.object, kernels, "UNBOXED_FLOP", float("inf"))
    plain: dict[str, Any] = {"needs": (), "within": unboxed}
    for problem in EVERY if target == ONE_TARGET else SOME:
        sizes = dict(zip(("m", "d_in", "d_out", "count", "chunk"), problem, strict=True))
        yield "sparse_backward", plain | sizes
    large = plain | {"m": 8192, "d_in": 4096, "d_out": 16384, "count": 26, "chunk": 64}
    yield "sparse_dx", large
    yield "sparse_forward", large
    yield "sparse_forward, compact", large | {"m": 64}
    more = {"m": 512, "d_in": 512, "d_out": 2048, "count": 3, "chunk": 64, "dtype": torch.float32}
    yield "sparse_dw", plain | more


# What the page "Compiled" shows.
LAYER = {"m": 8192, "d_in": 4096, "d_out": 16384, "count": 26, "chunk": 64, "needs": ()}
STATED = {"sparse_backward, 8,192 x 4,096 to 16,384, 10% active, bfloat16": [("sparse_backward", LAYER)]}
