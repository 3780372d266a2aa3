"""What is measured of ``sparse_linear``: the sparse backward pass beside the dense one and what PyTorch users would write."""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench import Bench, Calls, Tensors, step
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

CHUNK = 64
SHAPES = (
    (2048, 512, 2048),
    (2048, 1024, 4096),
    (2048, 2048, 8192),
    (2048, 4096, 16384),
    (8192, 4096, 16384),
)
FRACTIONS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)

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
    """Forward and backward through autograd, both sparse modes beside the dense layer; -> y, dX, dW, db."""
    x, weight, dy, ids = _inputs(m, d_in, d_out, fraction, dtype)
    bias = torch.randn(d_out, dtype=dtype, device=x.device)
    features = active_features_reference(ids, d_out, CHUNK)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    sparse = functools.partial(op.sparse_linear, active_chunks=ids, chunk_size=CHUNK)
    calls: Calls = {
        "dense": step(F.linear, leaves, dy),
        "kernelbook": step(functools.partial(sparse, mode="sparse_dw_dx"), leaves, dy),
        "kernelbook:sparse_dw": step(functools.partial(sparse, mode="sparse_dw"), leaves, dy),
    }

    def masked(out: Tensors) -> Tensors:
        """Without dX, which each of the three means in its own way."""
        kept = (torch.zeros_like(t).index_copy_(0, features, t.index_select(0, features)) for t in out[2:])
        return [out[0], *kept]

    def truth() -> Tensors:
        return masked(step(F.linear, [t.detach().double().requires_grad_() for t in leaves], dy.double())())

    views: Views = {name: (masked if name == "dense" else lambda out: [out[0], *out[2:]]) for name in calls}
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

    def truth() -> Tensors:
        return [sparse_forward_reference(x.double(), weight.double(), bias.double(), ids, chunk_size=CHUNK)]

    views: Views = {
        "dense": lambda out: [torch.zeros_like(out[0]).index_copy_(1, features, out[0][:, features])],
        "kernelbook:compact": lambda out: [_expanded(out[0].t(), features, d_out).t()],
    }
    return _problem(calls, truth, views, check.FORWARD_FACTOR, dtype)


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
    build = functools.partial(_backward, *shape, fraction, dtype, wanted)
    return _case(name, "backward", shape, fraction, elements, flop, build, dtype)


def _forward_case(shape: tuple[int, int, int], fraction: float) -> timing.Case:
    m, d_in, d_out = shape
    active = active_count(d_out, fraction) * CHUNK
    # Read: x, active rows of W. Written: Y with its zeros.
    elements = m * d_in + active * d_in + active + m * d_out
    build = functools.partial(_forward, *shape, fraction, torch.bfloat16)
    return _case("sparse_forward", "forward", shape, fraction, elements, 2 * m * d_in * active, build)


def _step_case(shape: tuple[int, int, int], fraction: float) -> timing.Case:
    m, d_in, d_out = shape
    active = active_count(d_out, fraction) * CHUNK
    # As forward (dense) and backward.
    elements = m * d_in + d_out * d_in + m * d_out + m * active + 2 * m * d_in + d_out * d_in + active * d_in
    flop = 2 * m * d_in * (d_out + 2 * active)
    build = functools.partial(_step, *shape, fraction, torch.bfloat16)
    return _case("sparse_linear", "forward_backward", shape, fraction, elements, flop, build)


def _case(
    name: str, mode: str, shape: tuple[int, int, int], fraction: float, elements: int, flop: int,
    build: Callable[[], timing.Problem], dtype: torch.dtype = torch.bfloat16,
) -> timing.Case:  # fmt: skip
    sizes = dict(zip(("M", "d_in", "d_out"), shape, strict=True)) | {"chunk_size": CHUNK}
    gbytes = elements * dtype.itemsize / 1e9
    return timing.Case(name, mode, dtype, sizes, "active", fraction, gbytes, flop / 1e9, build)


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
        yield _forward_case(SHAPES[-1], fraction)
        yield _step_case(SHAPES[-1], fraction)


def models() -> Iterator[timing.Case]:
    """The down projections of this year's models at 8,192 tokens, a tenth and a half of their chunks active."""
    for n, k in sorted({(model.hidden, model.intermediate) for model in MODELS.values() if model.intermediate}):
        for fraction in (0.1, 0.5):
            yield backward_case((8192, k, n), fraction)


BENCH = Bench(
    name="sparse_linear",
    baselines=dict.fromkeys(("dense", "python_loop", "gather_cublas", "packed_cublas"), "torch"),
    cases=cases,
    models=models,
)
