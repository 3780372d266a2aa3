"""What is measured of ``sparse_linear``: the sparse backward pass beside the dense one and what PyTorch users would write."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench import Bench
from bench.models import MODELS
from kernelbook import check, runtime
from kernelbook.lab import timing
from kernelbook.sparse_linear import op
from kernelbook.sparse_linear.reference import (
    active_features_reference,
    gather_cublas_backward,
    python_loop_backward,
    sparse_forward_reference,
)

__all__ = ["BENCH", "backward_case", "cases", "host_calls"]

CHUNK = 64
SHAPES = (
    (2048, 512, 2048),
    (2048, 1024, 4096),
    (2048, 2048, 8192),
    (2048, 4096, 16384),
    (8192, 4096, 16384),
)
FRACTIONS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)

Tensors = Sequence[torch.Tensor]
Calls = dict[str, Callable[[], Tensors]]
Views = dict[str, Callable[[Tensors], Tensors]]


def active_count(d_out: int, fraction: float) -> int:
    """How many chunks are active: the fraction of all, rounded, at least one."""
    return max(1, round(d_out // CHUNK * fraction))


def _inputs(m: int, d_in: int, d_out: int, fraction: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x (M, d_in), weight (d_out, d_in), dy (M, d_out), ids (A,) in random order."""
    device = runtime.DEVICE
    x, dy = (torch.randn(m, n, dtype=dtype, device=device) for n in (d_in, d_out))
    weight = torch.randn(d_out, d_in, dtype=dtype, device=device) / d_in**0.5
    ids = torch.randperm(d_out // CHUNK, device=device)[: active_count(d_out, fraction)]
    return x, weight, dy, ids


def _tf32(call: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """The call with tf32 products, which is what float32 rows measure."""

    def allowed() -> Tensors:
        with timing.allow_tf32(True):
            return call()

    return allowed


def _problem(
    calls: Calls, truth: Callable[[], Tensors], views: Views, factor: float, dtype: torch.dtype
) -> timing.Problem:
    if dtype == torch.float32:
        calls = {name: _tf32(call) for name, call in calls.items()}
    return timing.Problem(calls, truth, calls["gather_cublas"], factor, views)


def _expanded(compact: torch.Tensor, features: torch.Tensor, d_out: int) -> torch.Tensor:
    """Compact rows in their places among zeros."""
    return compact.new_zeros((d_out, *compact.shape[1:])).index_copy_(0, features, compact)


def _backward(m: int, d_in: int, d_out: int, fraction: float, dtype: torch.dtype, wanted: str) -> timing.Problem:
    """``wanted``: ``dw`` (dW and db), ``dx``, or ``all``, and the outputs are those in this order."""
    x, weight, dy, ids = _inputs(m, d_in, d_out, fraction, dtype)
    features = active_features_reference(ids, d_out, CHUNK)
    packed_dy, packed_w = dy.index_select(1, features), weight.index_select(0, features)
    with_dw, with_dx = wanted != "dx", wanted != "dw"

    def dense_products(dy: torch.Tensor, weight: torch.Tensor) -> Tensors:
        """Three calls of PyTorch, on the whole or on what was packed before."""
        return [*((dy.t() @ x, dy.sum(0)) if with_dw else ()), *((dy @ weight,) if with_dx else ())]

    def gather_cublas() -> Tensors:
        if wanted == "all":
            return gather_cublas_backward(x, weight, dy, ids, chunk_size=CHUNK)
        packed = dy.index_select(1, features)
        if wanted == "dx":
            return [packed @ weight.index_select(0, features)]
        dw = torch.zeros_like(weight).index_copy_(0, features, packed.t() @ x)
        return [dw, dy.new_zeros(d_out).index_copy_(0, features, packed.sum(0))]

    def ours(compact: bool) -> Tensors:
        if wanted == "all":
            return op.sparse_backward(x, weight, dy, ids, chunk_size=CHUNK, compact=compact)
        if wanted == "dx":
            return [op.sparse_dx(dy, weight, ids, chunk_size=CHUNK)]
        dw, db = op.sparse_dw(x, dy, ids, chunk_size=CHUNK, compact=compact)
        assert db is not None
        return [dw, db]

    calls: Calls = {"dense": lambda: dense_products(dy, weight)}
    if wanted == "all":
        calls["python_loop"] = lambda: python_loop_backward(x, weight, dy, ids, chunk_size=CHUNK)
    calls["gather_cublas"] = gather_cublas
    calls["packed_cublas"] = lambda: dense_products(packed_dy, packed_w)  # the packing itself is not counted
    calls["kernelbook"] = lambda: ours(False)
    if with_dw:
        calls["kernelbook:compact"] = lambda: ours(True)

    def dense_on_masked(_: Tensors) -> Tensors:
        """The dense pass computes something else; where dY is zero in inactive chunks it is the same."""
        mask = torch.zeros(d_out, dtype=torch.bool, device=dy.device).index_fill_(0, features, True)
        return dense_products(torch.where(mask, dy, 0), weight)

    def in_place(out: Tensors) -> Tensors:
        return [*(_expanded(t, features, d_out) for t in out[: 2 * with_dw]), *out[2 * with_dw :]]

    def truth() -> Tensors:
        out = gather_cublas_backward(x.double(), weight.double(), dy.double(), ids, chunk_size=CHUNK)
        return [*out[: 2 * with_dw], *out[2 : 2 + with_dx]]

    views: Views = {"dense": dense_on_masked, "packed_cublas": in_place, "kernelbook:compact": in_place}
    return _problem(calls, truth, views, check.GRADIENT_FACTOR, dtype)


def _step(m: int, d_in: int, d_out: int, fraction: float, dtype: torch.dtype) -> timing.Problem:
    """Forward and backward through autograd, both sparse modes beside the dense layer; -> y, dW, db, dX."""
    x, weight, dy, ids = _inputs(m, d_in, d_out, fraction, dtype)
    bias = torch.randn(d_out, dtype=dtype, device=x.device)
    features = active_features_reference(ids, d_out, CHUNK)
    leaves = tuple(t.requires_grad_() for t in (weight, bias, x))

    def step(layer: Callable[..., torch.Tensor], **how: Any) -> Callable[[], Tensors]:
        def call() -> Tensors:
            y = layer(x, weight, bias, **how)
            return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

        return call

    given: dict[str, Any] = {"active_chunks": ids, "chunk_size": CHUNK}
    calls: Calls = {
        "dense": step(F.linear),
        "kernelbook": step(op.sparse_linear, mode="sparse_dw_dx", **given),
        "kernelbook:sparse_dw": step(op.sparse_linear, mode="sparse_dw", **given),
    }

    def masked(out: Tensors) -> Tensors:
        """Without dX, which each of the three means in its own way."""
        kept = (torch.zeros_like(t).index_copy_(0, features, t.index_select(0, features)) for t in out[1:3])
        return [out[0], *kept]

    def truth() -> Tensors:
        with torch.no_grad():
            y = F.linear(x.double(), weight.double(), bias.double())
            return masked([y, dy.double().t() @ x.double(), dy.double().sum(0)])

    views: Views = {name: (masked if name == "dense" else lambda out: out[:3]) for name in calls}
    return timing.Problem(calls, truth, lambda: masked(calls["dense"]()), check.GRADIENT_FACTOR, views)


def _forward(m: int, d_in: int, d_out: int, fraction: float, dtype: torch.dtype) -> timing.Problem:
    x, weight, _, ids = _inputs(m, d_in, d_out, fraction, dtype)
    bias = torch.randn(d_out, dtype=dtype, device=x.device)
    features = active_features_reference(ids, d_out, CHUNK)

    def gather_cublas() -> Tensors:
        y = F.linear(x, weight.index_select(0, features), bias.index_select(0, features))
        return [y.new_zeros(m, d_out).index_copy_(1, features, y)]

    calls: Calls = {
        "dense": lambda: [F.linear(x, weight, bias)],
        "gather_cublas": gather_cublas,
        "kernelbook": lambda: [op.sparse_forward(x, weight, bias, ids, chunk_size=CHUNK)],
        "kernelbook:compact": lambda: [op.sparse_forward(x, weight, bias, ids, chunk_size=CHUNK, compact=True)],
    }
    masked = functools.partial(_masked_columns, features=features)
    return _problem(
        calls,
        lambda: [
            sparse_forward_reference(x.double(), weight.double(), bias.double(), ids, chunk_size=CHUNK, compact=False)
        ],
        {
            "dense": lambda out: [masked(out[0])],
            "kernelbook:compact": lambda out: [_expanded(out[0].t(), features, d_out).t()],
        },
        check.FORWARD_FACTOR,
        dtype,
    )


def _masked_columns(y: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y).index_copy_(1, features, y[:, features])


def backward_case(
    shape: tuple[int, int, int], fraction: float, dtype: torch.dtype = torch.bfloat16, wanted: str = "all"
) -> timing.Case:
    """The backward pass (``wanted``: ``all``), or ``dw`` or ``dx`` alone, at (M, d_in, d_out)."""
    m, d_in, d_out = shape
    active = active_count(d_out, fraction) * CHUNK
    # Read: active columns of dY; x for dW, active rows of W for dX. Written: dW with its zeros and db; dX.
    with_dw, with_dx = wanted != "dx", wanted != "dw"
    elements = m * active + with_dw * (m * d_in + d_out * d_in + d_out) + with_dx * (active * d_in + m * d_in)
    name = {"all": "sparse_linear", "dw": "sparse_dw", "dx": "sparse_dx"}[wanted]
    flop = 2 * m * d_in * active * (with_dw + with_dx)
    return _case(name, "backward", shape, fraction, dtype, elements, flop, _backward, wanted)


def _forward_case(shape: tuple[int, int, int], fraction: float, dtype: torch.dtype) -> timing.Case:
    m, d_in, d_out = shape
    active = active_count(d_out, fraction) * CHUNK
    # Read: x, active rows of W. Written: Y with its zeros.
    elements = m * d_in + active * d_in + active + m * d_out
    return _case("sparse_forward", "forward", shape, fraction, dtype, elements, 2 * m * d_in * active, _forward)


def _step_case(shape: tuple[int, int, int], fraction: float, dtype: torch.dtype) -> timing.Case:
    m, d_in, d_out = shape
    active = active_count(d_out, fraction) * CHUNK
    # As forward (dense) and backward.
    elements = m * d_in + d_out * d_in + m * d_out + m * active + 2 * m * d_in + d_out * d_in + active * d_in
    flop = 2 * m * d_in * (d_out + 2 * active)
    return _case("sparse_linear", "forward_backward", shape, fraction, dtype, elements, flop, _step)


def _case(
    name: str,
    mode: str,
    shape: tuple[int, int, int],
    fraction: float,
    dtype: torch.dtype,
    elements: int,
    flop: int,
    build: Callable[..., timing.Problem],
    *how: str,
) -> timing.Case:
    m, d_in, d_out = shape
    return timing.Case(
        op=name,
        mode=mode,
        dtype=dtype,
        shape={"M": m, "d_in": d_in, "d_out": d_out, "chunk_size": CHUNK},
        x_name="active",
        x=fraction,
        gbytes=elements * dtype.itemsize / 1e9,
        gflop=flop / 1e9,
        build=lambda: build(m, d_in, d_out, fraction, dtype, *how),
    )


def _first_call() -> timing.Case:
    m, d_in, d_out = SHAPES[-1]
    code = f"""
import kernelbook as kb
x = torch.randn({m}, {d_in}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.randn({d_out}, {d_in}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
ids = torch.arange(26, device="cuda")
# first call
kb.sparse_linear(x, w, None, ids, mode="sparse_dw_dx").sum().backward()
"""
    return timing.Case(
        op="sparse_linear",
        mode="first_call",
        dtype=torch.bfloat16,
        shape={"M": m, "d_in": d_in, "d_out": d_out, "chunk_size": CHUNK},
        x_name="active",
        x=0.1,
        gbytes=0.0,
        gflop=0.0,
        build=lambda: timing.FirstCall({"kernelbook": code}),
    )


def cases() -> Iterator[timing.Case]:
    """Backward at every shape and fraction; at the largest also float32 (with tf32 products), its parts, and whole steps."""
    for shape in SHAPES:
        for fraction in FRACTIONS:
            yield backward_case(shape, fraction)
    for fraction in FRACTIONS:
        yield backward_case(SHAPES[-1], fraction, torch.float32)
    for fraction in FRACTIONS:
        yield backward_case(SHAPES[-1], fraction, wanted="dw")
        yield backward_case(SHAPES[-1], fraction, wanted="dx")
        yield _forward_case(SHAPES[-1], fraction, torch.bfloat16)
        yield _step_case(SHAPES[-1], fraction, torch.bfloat16)
    yield _first_call()


def models() -> Iterator[timing.Case]:
    """The down projections of this year's models at 8,192 tokens, a tenth and a half of their chunks active."""
    for n, k in sorted({(model.hidden, model.intermediate) for model in MODELS.values() if model.intermediate}):
        for fraction in (0.1, 0.5):
            yield backward_case((8192, k, n), fraction)


def host_calls() -> dict[str, Callable[[], object]]:
    """Small calls, whose cost is the host's."""
    x, weight, dy, ids = _inputs(64, 256, 1024, 0.25, torch.bfloat16)
    leaf = weight.clone().requires_grad_()
    return {
        "sparse_forward": lambda: op.sparse_forward(x, weight, None, ids),
        "sparse_dx": lambda: op.sparse_dx(dy, weight, ids),
        "sparse_dw": lambda: op.sparse_dw(x, dy, ids),
        "sparse_backward": lambda: op.sparse_backward(x, weight, dy, ids),
        "sparse_linear, forward and backward": lambda: op.sparse_linear(x, leaf, None, ids).backward(dy),
    }


BENCH = Bench(
    name="sparse_linear",
    baselines=dict.fromkeys(("dense", "python_loop", "gather_cublas", "packed_cublas"), "torch"),
    cases=cases,
    models=models,
    host_calls=host_calls,
)
