"""What is measured of ``sparse_linear``: the sparse backward pass beside the dense one and what PyTorch users would write."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook import check, runtime, timing
from kernelbook.sparse_linear import op
from kernelbook.sparse_linear.reference import (
    active_features_reference,
    gather_cublas_backward,
    python_loop_backward,
    sparse_dx_reference,
    sparse_forward_reference,
    sparse_linear_reference,
)

__all__ = ["cases", "small_checks"]

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


def _dense(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Tensors:
    return dy.t() @ x, dy.sum(0), dy @ weight


def _tf32(call: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """The call with tf32 products, which is what float32 rows measure."""

    def allowed() -> Tensors:
        with timing.allow_tf32(True):
            return call()

    return allowed


def _problem(
    calls: dict[str, Callable[[], Tensors]],
    truth: Callable[[], Tensors],
    views: dict[str, Callable[[Tensors], Tensors]],
    factor: float,
    dtype: torch.dtype,
) -> timing.Problem:
    if dtype == torch.float32:
        calls = {name: _tf32(call) for name, call in calls.items()}
    return timing.Problem(calls, truth, calls["gather_cublas"], factor, views)


def _expanded(compact: torch.Tensor, features: torch.Tensor, d_out: int) -> torch.Tensor:
    """Compact rows in their places among zeros."""
    return compact.new_zeros((d_out, *compact.shape[1:])).index_copy_(0, features, compact)


def _backward(m: int, d_in: int, d_out: int, fraction: float, dtype: torch.dtype) -> timing.Problem:
    x, weight, dy, ids = _inputs(m, d_in, d_out, fraction, dtype)
    features = active_features_reference(ids, d_out, CHUNK)
    calls: dict[str, Callable[[], Tensors]] = {
        "dense": lambda: _dense(x, weight, dy),
        "python_loop": lambda: python_loop_backward(x, weight, dy, ids, chunk_size=CHUNK),
        "gather_cublas": lambda: gather_cublas_backward(x, weight, dy, ids, chunk_size=CHUNK),
        "kernelbook": lambda: op.sparse_backward(x, weight, dy, ids, chunk_size=CHUNK),
        "kernelbook:compact": lambda: op.sparse_backward(x, weight, dy, ids, chunk_size=CHUNK, compact=True),
    }

    def dense_on_masked(_: Tensors) -> Tensors:
        """The dense pass computes something else; where dY is zero in inactive chunks it is the same."""
        mask = torch.zeros(d_out, dtype=torch.bool, device=dy.device).index_fill_(0, features, True)
        return _dense(x, weight, torch.where(mask, dy, 0))

    return _problem(
        calls,
        lambda: gather_cublas_backward(x.double(), weight.double(), dy.double(), ids, chunk_size=CHUNK),
        {
            "dense": dense_on_masked,
            "kernelbook:compact": lambda out: [*(_expanded(t, features, d_out) for t in out[:2]), out[2]],
        },
        check.GRADIENT_FACTOR,
        dtype,
    )


def _forward(m: int, d_in: int, d_out: int, fraction: float, dtype: torch.dtype) -> timing.Problem:
    x, weight, _, ids = _inputs(m, d_in, d_out, fraction, dtype)
    bias = torch.randn(d_out, dtype=dtype, device=x.device)
    features = active_features_reference(ids, d_out, CHUNK)

    def gather_cublas() -> Tensors:
        y = F.linear(x, weight.index_select(0, features), bias.index_select(0, features))
        return [y.new_zeros(m, d_out).index_copy_(1, features, y)]

    calls: dict[str, Callable[[], Tensors]] = {
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


def _case(op_name: str, shape: tuple[int, int, int], fraction: float, dtype: torch.dtype) -> timing.Case:
    m, d_in, d_out = shape
    active = active_count(d_out, fraction) * CHUNK
    backward = op_name == "sparse_linear"
    # Read: x, active columns of dY, active rows of W. Written: dX, dW with its zeros, db. Forward: x, W; Y with its zeros.
    elements = 2 * m * d_in + m * active + active * d_in + d_out * d_in + d_out
    if not backward:
        elements = m * d_in + active * d_in + active + m * d_out
    build = _backward if backward else _forward
    return timing.Case(
        op=op_name,
        mode="backward" if backward else "forward",
        dtype=dtype,
        shape={"M": m, "d_in": d_in, "d_out": d_out, "chunk_size": CHUNK},
        x_name="active",
        x=fraction,
        gbytes=elements * dtype.itemsize / 1e9,
        gflop=(4 if backward else 2) * m * d_in * active / 1e9,
        build=lambda: build(m, d_in, d_out, fraction, dtype),
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
    """Backward at every shape and fraction (float32 with tf32 products), forward at the largest shape, a first call."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            for fraction in FRACTIONS:
                yield _case("sparse_linear", shape, fraction, dtype)
        for fraction in FRACTIONS:
            yield _case("sparse_forward", SHAPES[-1], fraction, dtype)
    yield _first_call()


def small_checks() -> list[check.Verdict]:
    """A correctness check of each public function at a small size, for ``doctor``."""
    torch.manual_seed(0)
    verdicts = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for chunk, d_out in ((16, 120), (64, 192)):
            ids = torch.tensor([2, 0], device=runtime.DEVICE)
            x, weight, dy = (
                torch.randn(shape, device=runtime.DEVICE).to(dtype) for shape in ((33, 48), (d_out, 48), (33, d_out))
            )
            bias = weight[:, 0].clone()
            chunks: dict[str, Any] = {"chunk_size": chunk}
            label = f"{str(dtype)[6:]}, chunks of {chunk}"
            for mode in ("sparse_dw", "sparse_dw_dx"):
                found = check.check_op(
                    functools.partial(op.sparse_linear, active_chunks=ids, mode=mode, **chunks),
                    functools.partial(sparse_linear_reference, active_chunks=ids, mode=mode, **chunks),
                    {"x": x, "weight": weight, "bias": bias},
                    grads=("x", "weight", "bias"),
                    require=False,
                )
                verdicts += [v.renamed(f"sparse_linear[{mode}, {label}] {v.name}") for v in found]
            found = check.check_op(
                functools.partial(op.sparse_forward, active_chunks=ids, **chunks),
                functools.partial(sparse_forward_reference, active_chunks=ids, **chunks),
                {"x": x, "weight": weight, "bias": bias},
                require=False,
            )
            verdicts += [v.renamed(f"sparse_forward[{label}] {v.name}") for v in found]
            found = check.check_op(
                functools.partial(op.sparse_dx, active_chunks=ids, **chunks),
                functools.partial(sparse_dx_reference, active_chunks=ids, **chunks),
                {"dy": dy, "weight": weight},
                require=False,
            )
            verdicts += [v.renamed(f"sparse_dx[{label}] {v.name}") for v in found]
    return verdicts
