"""What :mod:`kernelbook.lab.judge` can judge: each task is a reference in plain PyTorch, inputs, sizes, and what it has to move.

A task of your own takes ten lines, in a file of yours (``--task my_tasks.py:row_max``) or a cell (``judge(row_max, ROW_MAX)``)::

    ROW_MAX = Task(
        name="row_max",
        says="row_max(x): the largest number of each row. x (M, N) -> (M,)",
        reference=lambda x: x.amax(-1),
        inputs=lambda draw, M, N: {"x": draw(M, N)},
        sizes=({"M": 1, "N": 1}, {"M": 5, "N": 7}, {"M": 3, "N": 1031}),
        real={"M": 8192, "N": 4096},
    )
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook.nf4 import nf4_code_reference
from kernelbook.nf4.reference import nf4_quantize_reference

__all__ = ["LAYOUTS", "TASKS", "Draw", "Task", "task"]

# How a tensor of floating-point numbers may lie in memory. Between and around its elements there is NaN.
LAYOUTS = ("contiguous", "padded", "transposed", "offset")
_GUARD = 64  # elements of NaN before the first and after the last
EPS = 1e-6

Sizes = Mapping[str, int]


class Draw:
    """Makes the inputs of one case: random, in one dtype and layout, from one generator."""

    def __init__(self, seed: int, dtype: torch.dtype, layout: str = "contiguous", scale: float = 1.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.layout, self.scale = dtype, layout, scale

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers with the standard deviation ``scale``."""
        return self._placed(torch.randn(shape, generator=self.generator) * self.scale, dtype or self.dtype)

    def near_one(self, *shape: int) -> torch.Tensor:
        """What a trained weight of a norm looks like."""
        return self._placed(1 + 0.3 * torch.randn(shape, generator=self.generator), self.dtype)

    def around(self, mean: torch.Tensor, *shape: int) -> torch.Tensor:
        """Normal numbers around ``mean``, which is broadcast."""
        return self._placed((torch.randn(shape, generator=self.generator) + mean) * self.scale, self.dtype)

    def probabilities(self, *shape: int) -> torch.Tensor:
        """Rows that sum to one."""
        return self._placed(torch.randn(shape, generator=self.generator).softmax(-1), self.dtype)

    def positive(self, *shape: int) -> torch.Tensor:
        """Between 0.1 and 1.1, always float32."""
        return self._placed(0.1 + torch.rand(shape, generator=self.generator), torch.float32)

    def number(self) -> float:
        """A number that is passed like a size."""
        return float(torch.randn((), generator=self.generator))

    def some_of(self, many: int, few: int) -> torch.Tensor:
        """``few`` different integers from 0 to ``many`` - 1, or all of them, in no order."""
        return torch.randperm(many, generator=self.generator)[:few]

    def ids(self, below: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers from 0 to ``below`` - 1."""
        return torch.randint(0, max(below, 1), shape, generator=self.generator, dtype=dtype)

    def packed_bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)

    def table(self) -> torch.Tensor:
        """Sixteen values from -1 to 1, ascending, float32: no kernel can know them beforehand."""
        return (2 * torch.rand(16, generator=self.generator) - 1).sort().values

    def angles(self, positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (positions, half) each, of angles that are drawn: those of a rotary embedding a kernel could know."""
        angle = 2 * math.pi * torch.rand((positions, half), generator=self.generator)
        return self._placed(angle.cos(), self.dtype), self._placed(angle.sin(), self.dtype)

    def _placed(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = list(values.shape)
        order = list(range(len(shape)))
        if self.layout == "transposed" and len(shape) > 1:
            order[-2:] = order[:-3:-1]
        strides, step = [0] * len(shape), 3 if self.layout == "padded" and len(shape) == 1 else 1
        for i in reversed(order):
            strides[i] = step
            step *= max(shape[i], 1) + (5 if self.layout == "padded" and i == order[-1] else 0)
        before = _GUARD + (1 if self.layout == "offset" else 0)
        memory = torch.full((before + step + _GUARD,), math.nan, dtype=dtype)
        placed = memory.as_strided(shape, strides, before)
        return placed.copy_(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to write.

    Attributes:
        name: the function's name in a reader's file.
        says: its signature and what it returns, in a sentence or two, with shapes.
        reference: the same in plain PyTorch, for any dtype up to float64.
        inputs: ``inputs(draw, **sizes)`` makes the arguments by name; ``draw`` is a :class:`Draw`.
        sizes: small sizes for the interpreter, edges first: one row, primes, more than a tile. Further ones are drawn between them.
        real: one size for a GPU.
        multiple: a size that is always a multiple of a number.
        most: a size that is never larger than a number, as ``says`` says.
        powers: sizes that are powers of two.
        empty: a size that may be zero.
        grads: inputs by which the result is differentiated.
        dtypes: of the floating-point inputs.
        kept: inputs that keep their numbers while the time is taken: an ascending table, say.
        strided: whether inputs may have any strides; else they are contiguous.
        scales: standard deviations of the inputs that are tried.
        also: PyTorch's operators (``sum``) that a solution may call beside those that only allocate, view, copy or convert.
        copies: whether copying numbers is the whole task, so that PyTorch may not copy the inputs.
        peer: what a PyTorch user would call, where that is not ``reference``.
        book: the book's own function.
        moved: bytes that have to be moved, from the sizes and the bytes of an element; default: all inputs and outputs once.
        flops: floating-point operations, from the sizes, where they may bound it.
        hints: from a nudge to nearly the answer.
    """

    name: str
    says: str
    reference: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    sizes: Sequence[Sizes]
    real: Sizes
    multiple: Sizes = dataclasses.field(default_factory=dict)
    most: Sizes = dataclasses.field(default_factory=dict)
    powers: Sequence[str] = ()
    empty: str | None = None
    grads: Sequence[str] = ()
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    kept: Sequence[str] = ()
    strided: bool = True
    scales: Sequence[float] = (1.0, 20.0)
    also: Sequence[str] = ()
    copies: bool = False
    peer: Callable[..., Any] | None = None
    book: Callable[..., Any] | None = None
    moved: Callable[[Sizes, int], int] | None = None
    flops: Callable[[Sizes], int] | None = None
    hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    contiguous: bool = False


TASKS: dict[str, Task] = {}


def task(name: str) -> Task:
    """The task of this name."""
    if name not in TASKS:
        raise ValueError(f"judge: task must be one of {', '.join(sorted(TASKS))}, got {name!r}")
    return TASKS[name]


def _add(**fields: Any) -> None:
    fields["hints"] = {str(i): h for i, h in enumerate(fields.get("hints", ()))}
    TASKS[fields["name"]] = Task(**fields)


def _rows(*pairs: tuple[int, int]) -> tuple[Sizes, ...]:
    return tuple({"M": m, "N": n} for m, n in pairs)


# One element, one row, primes, many rows, more than a tile of 1,024.
_MATRICES = _rows((1, 1), (1, 7), (3, 16), (7, 97), (67, 8), (2, 1031))
_MODEL = {"M": 8192, "N": 4096}  # tokens and a model's width
# In a row of one element the gradient by x is all cancellation: what is left is rounding, PyTorch's and a reader's.
_LONGER_ROWS = _rows((1, 2), (1, 7), (3, 16), (7, 97), (67, 8), (2, 1031))
# exp() of numbers around 300 is infinite in float32: without the largest number of its row a kernel is wrong.
_EXPONENTIALS = (1.0, 20.0, 300.0)


def _named(names: str, *rows: tuple[int, ...]) -> tuple[Sizes, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


def _book(call: Callable[..., Any]) -> Callable[..., Any]:
    """The book's own function, called as the task is: ``call`` gets the package, which is not imported before, and the inputs."""

    def book(*args: Any, **kwargs: Any) -> Any:
        import kernelbook

        return call(kernelbook, *args, **kwargs)

    return book


def _rise_and_fall(K: int) -> torch.Tensor:
    """Means, times numbers around 1, of a sum over K that rises to K / 2 and comes back: what a kernel rounds on the way shows at its end."""
    return torch.where(torch.arange(K) < K / 2, 1.0, -1.0)


def _nf4(packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, *shape: int) -> Any:
    from kernelbook.packed import NF4Tensor

    return NF4Tensor(packed.flatten(), absmax.flatten(), shape, 64, table)


# --- elementwise and rows -------------------------------------------------------------------------------------------

_add(
    name="vector_add",
    says="vector_add(x, y): their sum. x, y (n,) -> (n,)",
    reference=lambda x, y: x + y,
    inputs=lambda draw, n: {"x": draw(n), "y": draw(n)},
    sizes=tuple({"n": n} for n in (1, 97, 1024, 2503)),
    real={"n": 2**26},
    empty="n",
    hints=(
        "Each program adds one block of elements: tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).",
        "n need not be a multiple of BLOCK: give every load and the store mask=offs < n.",
        "x and y have strides of their own (x.stride(0)): an element's address is x_ptr + offs * stride, in 64 bits.",
    ),
)

_add(
    name="bias_relu",
    says="bias_relu(x, bias): max(x + bias, 0), with one bias a column. x (M, N), bias (N,) -> (M, N)",
    reference=lambda x, bias: torch.relu(x + bias),
    inputs=lambda draw, M, N: {"x": draw(M, N), "bias": draw(N)},
    sizes=_MATRICES,
    real=_MODEL,
    empty="M",
    hints=(
        "One program a row, or a tile of rows and columns; the bias is loaded by column.",
        "tl.maximum(x + bias, 0.0), computed in float32 and stored in the dtype of the result.",
    ),
)

_add(
    name="silu_mul",
    says="silu_mul(gate, up): silu(gate) * up, the middle of a gated MLP. gate, up (M, N) -> (M, N)",
    reference=lambda gate, up: F.silu(gate) * up,
    inputs=lambda draw, M, N: {"gate": draw(M, N), "up": draw(M, N)},
    sizes=_MATRICES,
    real=_MODEL,
    empty="M",
    hints=("silu(g) = g * sigmoid(g): tl.sigmoid takes float32.", "gate and up may lie in memory in different ways."),
)

_add(
    name="softmax",
    says="softmax(x): of each row. x (M, N), rows of up to 4096 -> (M, N)",
    reference=lambda x: torch.softmax(x, -1),
    inputs=lambda draw, M, N: {"x": draw(M, N)},
    sizes=_MATRICES,
    real=_MODEL,
    empty="M",
    scales=_EXPONENTIALS,
    most={"N": 4096},
    hints=(
        "One program a row; BLOCK_N = triton.next_power_of_2(N) holds the row.",
        "Beyond N a sum needs zeros after the exponential: load other=-inf.",
        "Subtract the largest number of the row first: exp(89) is infinite in float32.",
    ),
)

_add(
    name="softmax_backward",
    says="softmax_backward(dy, y): the gradient by x of y = softmax(x). dy, y (M, N) -> dx (M, N)",
    reference=lambda dy, y: y * (dy - (dy * y).sum(-1, keepdim=True)),
    inputs=lambda draw, M, N: {"dy": draw(M, N), "y": draw.probabilities(M, N)},
    sizes=_MATRICES,
    real=_MODEL,
    empty="M",
    hints=(
        "dx = y * (dy - sum(dy * y)), the sum over the row.",
        "Masked elements must add nothing to the sum: other=0.0 for both.",
    ),
)

_add(
    name="logsumexp",
    says="logsumexp(x): log of the sum of the exponentials of each row. x (M, N) -> (M,)",
    reference=lambda x: torch.logsumexp(x, -1),
    inputs=lambda draw, M, N: {"x": draw(M, N)},
    sizes=_MATRICES,
    real=_MODEL,
    empty="M",
    scales=_EXPONENTIALS,
    hints=(
        "m + log(sum(exp(x - m))), m the largest number of the row.",
        "In a loop over tiles: when m grows from m_old to m_new the sum so far is multiplied by exp(m_old - m_new).",
    ),
)

_add(
    name="row_products",
    says="row_products(a, b): the sum of a * b over each row. a, b (M, N) -> (M,)",
    reference=lambda a, b: (a * b).sum(-1),
    inputs=lambda draw, M, N: {"a": draw(M, N), "b": draw(M, N)},
    sizes=_MATRICES,
    real=_MODEL,
    empty="M",
    hints=("Convert both to float32 before the product: a 16-bit product is rounded.",),
)

_add(
    name="column_sum",
    says="column_sum(x): the sum over the rows. x (M, N) -> (N,)",
    reference=lambda x: x.sum(0),
    inputs=lambda draw, M, N: {"x": draw(M, N)},
    sizes=_rows((1, 1), (1, 7), (16, 3), (97, 7), (128, 5), (131, 67)),
    real=_MODEL,
    hints=(
        "A program owns a block of columns and goes down the rows.",
        "That is few programs for few columns: let several share the rows, each with a row of partial sums, and add these in a second launch.",
    ),
)

_add(
    name="cross_entropy",
    says="cross_entropy(logits, targets): the loss of each row. logits (M, N), targets (M,) int64 -> (M,)",
    reference=lambda logits, targets: torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None])[:, 0],
    inputs=lambda draw, M, N: {"logits": draw(M, N), "targets": draw.ids(N, M)},
    sizes=_MATRICES,
    real={"M": 4096, "N": 32000},
    empty="M",
    peer=lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"),
    scales=_EXPONENTIALS,
    hints=(
        "loss = logsumexp(row) - row[target].",
        "Load the target's logit by its own address: x_ptr + row * stride + target * stride_n.",
        "A vocabulary of 32,000 is a loop over tiles with a running maximum and a running sum.",
    ),
)

# --- RMSNorm, piece by piece ----------------------------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rms_norm_dx(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    g, xhat = dy * weight, x * rstd
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))


def _rms_norm_dw(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).sum(0)


def _norm_inputs(draw: Draw, M: int, N: int) -> dict[str, Any]:
    return {"x": draw(M, N), "weight": draw.near_one(N)}


def _norm_grad_inputs(draw: Draw, M: int, N: int) -> dict[str, Any]:
    return {"dy": draw(M, N), **_norm_inputs(draw, M, N)}


# Numbers of all sizes: the mean square of what randn gives is 1, and a kernel that leaves the norm out would be right.
_NORM = {"sizes": _MATRICES, "real": _MODEL, "empty": "M", "scales": (1.0, 20.0, 0.01)}

_add(
    name="rms_norm",
    says="rms_norm(x, weight): x / sqrt(mean(x^2) + 1e-6) * weight, the mean over a row. x (M, N), weight (N,) -> (M, N)",
    reference=_rms_norm,
    inputs=_norm_inputs,
    **{**_NORM, "scales": (1.0, 300.0, 0.01)},
    # The scales are tried in the first dtype: the square of 300 is no float16.
    dtypes=(torch.float16, torch.float32, torch.bfloat16),
    peer=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    book=_book(lambda kb, x, weight: kb.rms_norm(x, weight, EPS)),
    hints=(
        "One program a row: load it once, reduce it, scale it, store it.",
        "The row in float32: x.to(tl.float32). The mean divides by N, not by BLOCK_N; masked elements are 0.",
        "Offsets: row = tl.program_id(0).to(tl.int64), then x_ptr + row * stride_xm + offs_n * stride_xn. Weight has a stride too.",
        "y = x * (1 / tl.sqrt(tl.sum(x * x) / N + EPS)) * w, stored as y.to(y_ptr.dtype.element_ty) with mask=offs_n < N.",
    ),
)


def _norm_gradients(*wanted: str) -> Callable[..., Any]:
    """The book's backward pass by some of the arguments; what it needs of the forward pass is made once for the same tensors."""
    made: list[Any] = []

    def gradients(kb: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not made or made[0] is not x:
            leaves = {"x": x.detach(), "weight": weight.detach()}
            leaves |= {name: leaves[name].requires_grad_() for name in wanted}
            made[:] = [x, kb.rms_norm(leaves["x"], leaves["weight"], EPS), [leaves[name] for name in wanted]]
        return torch.autograd.grad(made[1], made[2], dy, retain_graph=True)[0]

    return _book(gradients)


_add(
    name="rms_norm_dx",
    says="rms_norm_dx(dy, x, weight): the gradient of rms_norm by x. dy, x (M, N), weight (N,) -> dx (M, N)",
    reference=_rms_norm_dx,
    inputs=_norm_grad_inputs,
    **{**_NORM, "sizes": _LONGER_ROWS},
    book=_norm_gradients("x"),
    hints=(
        "g = dy * weight and xhat = x * rstd: what of g lies along xhat is taken off.",
        "dx = rstd * (g - xhat * mean(g * xhat)), the mean over the row.",
        "One program a row again; dy, x and weight are loaded once each, with other=0.0.",
    ),
)

_add(
    name="rms_norm_dw",
    says="rms_norm_dw(dy, x, weight): the gradient of rms_norm by weight. dy, x (M, N), weight (N,) -> dw (N,)",
    reference=_rms_norm_dw,
    inputs=_norm_grad_inputs,
    **{**_NORM, "empty": None},
    also=("sum",),
    book=_norm_gradients("weight"),
    hints=(
        "dw = sum over the rows of dy * xhat: programs of different rows add into the same place.",
        "Let a few programs take every P-th row each, keep a row of float32 sums, and store it as its own row of partial (P, N).",
        "A second launch (or partial.sum(0)) adds the P rows. tl.atomic_add works too, into zeros in float32, in an order that changes.",
    ),
)

_add(
    name="rms_norm_autograd",
    says="rms_norm_autograd(x, weight): rms_norm with gradients by x and weight, as an autograd.Function. x (M, N), weight (N,) -> (M, N)",
    reference=_rms_norm,
    inputs=_norm_inputs,
    **{**_NORM, "empty": None, "sizes": _rows((1, 2), (1, 7), (3, 16), (7, 97), (19, 8), (2, 1031))},
    grads=("x", "weight"),
    also=("sum",),
    peer=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    book=_book(lambda kb, x, weight: kb.rms_norm(x, weight, EPS)),
    hints=(
        "class RMSNorm(torch.autograd.Function): forward(ctx, x, weight) calls ctx.save_for_backward(x, weight).",
        "backward(ctx, dy) returns one gradient for each argument of forward: dx, dw. dy may have any strides.",
    ),
)

_add(
    name="add_rms_norm",
    says="add_rms_norm(x, residual, weight): s = x + residual, and rms_norm(s, weight). x, residual (M, N), weight (N,) -> s, y (M, N)",
    reference=lambda x, residual, weight: (x + residual, _rms_norm(x + residual, weight)),
    inputs=lambda draw, M, N: {"x": draw(M, N), "residual": draw(M, N), "weight": draw.near_one(N)},
    **_NORM,
    book=_book(lambda kb, x, residual, weight: kb.rms_norm(x, weight, EPS, residual=residual)[::-1]),
    hints=(
        "s is written and not read back: it is in registers.",
        "Normalize the sum before it is rounded, or after: both pass.",
    ),
)

# --- moving -----------------------------------------------------------------------------------------------------------

_add(
    name="transposed_copy",
    says="transposed_copy(x): the transposed matrix in memory of its own. x (M, N) -> (N, M) contiguous",
    reference=lambda x: x.T.contiguous(),
    inputs=lambda draw, M, N: {"x": draw(M, N)},
    sizes=_rows((1, 1), (1, 7), (16, 3), (7, 97), (33, 65)),
    real=_MODEL,
    empty="M",
    copies=True,
    hints=(
        "A program loads a tile of x and stores it at the transposed place.",
        "tl.trans turns the tile in registers, so that both the load and the store go along memory.",
    ),
)

_add(
    name="topk_gather",
    says="topk_gather(table, ids): the chosen rows of each token. table (R, N), ids (T, k) int64 below R -> (T, k, N)",
    reference=lambda table, ids: table[ids],
    inputs=lambda draw, R, N, T, k: {"table": draw(R, N), "ids": draw.ids(R, T, k)},
    sizes=tuple(
        dict(zip(("R", "N", "T", "k"), s, strict=True))
        for s in ((1, 1, 1, 1), (5, 7, 3, 2), (11, 97, 5, 3), (4, 1031, 2, 2))
    ),
    real={"R": 65536, "N": 4096, "T": 4096, "k": 4},
    empty="T",
    moved=lambda s, size: 2 * s["T"] * s["k"] * s["N"] * size + 8 * s["T"] * s["k"],
    copies=True,
    hints=("One program a chosen row: it loads its id, then the row. The id is 64 bits: so is the offset.",),
)

_add(
    name="combine",
    says="combine(y, gates): the sum of a token's k rows, each times its gate. y (T, k, N), gates (T, k) -> (T, N)",
    reference=lambda y, gates: (y * gates[..., None]).sum(1),
    inputs=lambda draw, T, k, N: {"y": draw(T, k, N), "gates": draw.probabilities(T, k)},
    sizes=tuple(dict(zip(("T", "k", "N"), s, strict=True)) for s in ((1, 1, 1), (3, 2, 7), (5, 4, 97), (2, 3, 1031))),
    real={"T": 4096, "k": 8, "N": 4096},
    empty="T",
    hints=("Accumulate the k products in float32; round once, at the store.",),
)

_add(
    name="rope",
    says="rope(x, cos, sin): x1 * cos - x2 * sin beside x2 * cos + x1 * sin, x1 and x2 the halves of a head. "
    "x (T, H, D), cos, sin (T, D / 2) -> (T, H, D)",
    reference=lambda x, cos, sin: torch.cat(
        [
            x.chunk(2, -1)[0] * cos[:, None] - x.chunk(2, -1)[1] * sin[:, None],
            x.chunk(2, -1)[1] * cos[:, None] + x.chunk(2, -1)[0] * sin[:, None],
        ],
        -1,
    ),
    inputs=lambda draw, T, H, D: {
        "x": draw(T, H, D),
        **dict(zip(("cos", "sin"), draw.angles(T, D // 2), strict=True)),
    },
    sizes=tuple(dict(zip(("T", "H", "D"), s, strict=True)) for s in ((1, 1, 2), (3, 2, 6), (5, 3, 34), (2, 2, 128))),
    real={"T": 8192, "H": 32, "D": 128},
    multiple={"D": 2},
    empty="T",
    hints=(
        "A program takes a token (and a head); both halves are loaded before either is stored.",
        "cos and sin are of the token, not of the head: load them once for several heads.",
    ),
)

_add(
    name="expert_counts",
    says="expert_counts(ids, num_experts): how many slots chose each expert. ids (T,) int64, num_experts int -> (num_experts,) int32",
    reference=lambda ids, num_experts: torch.bincount(ids, minlength=num_experts).to(torch.int32),
    inputs=lambda draw, T, E: {"ids": draw.ids(E, T), "num_experts": E},
    sizes=tuple({"T": t, "E": e} for t, e in ((1, 1), (7, 3), (97, 8), (515, 17))),
    real={"T": 2**24, "E": 128},
    dtypes=(torch.float32,),
    scales=(1.0,),
    hints=(
        "tl.atomic_add into zeros, one for each slot; a masked slot adds nothing.",
        "Fewer atomics: tl.histogram counts a block in registers first.",
    ),
)

# --- products and packed numbers ------------------------------------------------------------------------------------

_add(
    name="matmul",
    says="matmul(a, b): the matrix product. a (M, K), b (K, N) -> (M, N)",
    reference=lambda a, b: a @ b,
    inputs=lambda draw, M, K, N: {"a": draw(M, K), "b": draw(K, N)},
    sizes=tuple(
        dict(zip(("M", "K", "N"), s, strict=True))
        for s in ((1, 1, 1), (1, 17, 5), (16, 16, 16), (33, 70, 41), (64, 128, 32))
    ),
    real={"M": 4096, "K": 4096, "N": 4096},
    empty="M",
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    hints=(
        "A program owns a tile of the result and loops over K: acc = tl.dot(a, b, acc), acc in float32.",
        "K need not be a multiple of BLOCK_K: mask both tiles of the last step, with other=0.0.",
        'float32 inputs: tl.dot(..., input_precision="ieee"), or ten of 23 bits are kept.',
        "Tiles are at least 16 in every direction; smaller matrices are masked.",
    ),
)

_add(
    name="gather_linear",
    says="gather_linear(x, weight, rows): x times the chosen rows of weight. x (M, K), weight (N, K), rows (L,) int64 below N -> (M, L)",
    reference=lambda x, weight, rows: x @ weight[rows].T,
    inputs=lambda draw, M, K, N, L: {"x": draw(M, K), "weight": draw(N, K), "rows": draw.ids(N, L)},
    sizes=tuple(
        dict(zip(("M", "K", "N", "L"), s, strict=True))
        for s in ((1, 1, 1, 1), (1, 17, 5, 3), (3, 64, 41, 7), (17, 70, 100, 37))
    ),
    real={"M": 1, "K": 4096, "N": 14336, "L": 1434},
    book=_book(lambda kb, x, weight, rows: kb.gather_matmul(x, weight, rows)),
    moved=lambda s, size: (s["M"] * s["K"] + s["L"] * s["K"] + s["M"] * s["L"]) * size + 8 * s["L"],
    flops=lambda s: 2 * s["M"] * s["K"] * s["L"],
    hints=(
        "Load the block of row numbers first (64 bits), then the rows of weight at these addresses.",
        "For one row of x no tensor core is needed: multiply, and tl.sum over K.",
    ),
)


def _nf4_decode(packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    ids = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
    return table[ids] * absmax.repeat_interleave(64)


_add(
    name="nf4_decode",
    says="nf4_decode(packed, absmax, table): two values a byte, the first in its high half; the i-th is table[nibble] * absmax[i // 64]. "
    "packed (n / 2,) uint8, absmax (n / 64,) and table (16,) float32, all contiguous -> (n,) float32",
    reference=_nf4_decode,
    inputs=lambda draw, n: {
        "packed": draw.packed_bytes(n // 2),
        "absmax": draw.positive(n // 64),
        "table": draw.table(),
    },
    sizes=tuple({"n": n} for n in (64, 192, 1024, 64 * 41)),
    real={"n": 2**26},
    multiple={"n": 64},
    empty="n",
    dtypes=(torch.float32,),
    strided=False,
    scales=(1.0,),
    book=_book(
        lambda kb, packed, absmax, table: kb.nf4_dequantize(
            _nf4(packed, absmax, table, 2 * len(packed)), dtype=torch.float32
        )
    ),
    hints=(
        "packed >> 4 is the first value of a byte, packed & 15 the second.",
        "The table's 16 numbers: tl.load from it by nibble, table_ptr + nibble.to(tl.int32).",
        "tl.interleave(high, low) puts the two values beside each other, so that the store goes along memory.",
    ),
)


def _decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    heads, size = k.shape[1], k.shape[2]
    grouped = q.unflatten(1, (heads, -1))  # (B, H_kv, G, D)
    scores = grouped @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    beyond = torch.arange(size, device=q.device) >= lengths[:, None]
    weights = scores.masked_fill(beyond[:, None, None], -math.inf).softmax(-1)
    return (weights @ v).flatten(1, 2)


_add(
    name="decode_attention",
    says="decode_attention(q, k, v, lengths): one query a sequence against the first lengths[b] keys, scaled by 1 / sqrt(D); consecutive "
    "heads of q share one of k and v. q (B, H, D), k, v (B, H_kv, S, D), lengths (B,) int64 from 1 to S -> (B, H, D)",
    reference=_decode_attention,
    inputs=lambda draw, B, H_kv, G, S, D: {
        "q": draw(B, H_kv * G, D),
        "k": draw(B, H_kv, S, D),
        "v": draw(B, H_kv, S, D),
        "lengths": draw.ids(S, B) + 1,
    },
    sizes=tuple(
        dict(zip(("B", "H_kv", "G", "S", "D"), s, strict=True))
        for s in ((1, 1, 1, 1, 16), (2, 1, 2, 5, 16), (3, 2, 2, 97, 32), (2, 1, 1, 300, 16))
    ),
    real={"B": 16, "H_kv": 8, "G": 4, "S": 8192, "D": 128},
    powers=("D",),
    scales=(1.0, 3.0, 7.0),
    book=_book(lambda kb, q, k, v, lengths: kb.flash_attention(q[:, :, None], k, v, lengths=lengths)[:, :, 0]),
    moved=lambda s, size: s["B"] * s["H_kv"] * s["S"] * s["D"] * size,  # k and v, of which half lies before the lengths
    hints=(
        "One program a sequence and head: a loop over tiles of keys, with a running maximum, sum and result.",
        "Keys beyond the length: scores of -inf. Their values must be masked as well: 0 times NaN is NaN.",
        "One program a head is few programs: split the keys into parts, each with its maximum and sum, and merge these in a second launch.",
    ),
)

_add(
    name="chunk_norms",
    says="chunk_norms(w): the Euclidean norm of each chunk of 16 rows. w (R, N), R a multiple of 16 -> (R / 16,)",
    reference=lambda w: w.unflatten(0, (-1, 16)).square().sum((1, 2)).sqrt(),
    inputs=lambda draw, R, N: {"w": draw(R, N)},
    sizes=tuple({"R": r, "N": n} for r, n in ((16, 1), (32, 7), (48, 97), (16, 1031))),
    real={"R": 16384, "N": 4096},
    multiple={"R": 16},
    empty="R",
    hints=("One program a chunk, with a loop over columns; the sum of squares in float32, the root at the end.",),
)

# --- exercises of chapters: contiguous, as their solutions are ----------------------------------------------------------

_add(
    name="axpy",
    says="axpy(x, y, alpha): alpha * x + y, alpha a number. x, y (n,) contiguous -> (n,)",
    reference=lambda x, y, alpha: alpha * x + y,
    inputs=lambda draw, n: {"x": draw(n), "y": draw(n), "alpha": draw.number()},
    sizes=_named("n", (1,), (5,), (97,), (1024,), (2503,)),
    real={"n": 2**26},
    strided=False,
    hints=(
        "A number is an argument of the kernel like a size.",
        "One load of x, one of y, one store: nothing travels twice.",
    ),
)

_add(
    name="softmax_looped",
    says="softmax_looped(x): softmax of rows of any length, in tiles. x (M, N) contiguous -> (M, N)",
    reference=lambda x: torch.softmax(x, -1),
    inputs=lambda draw, M, N: {"x": draw(M, N)},
    sizes=_rows((1, 1), (1, 7), (3, 129), (7, 97), (2, 1031)),
    real={"M": 512, "N": 65536},  # in float64 with what PyTorch holds beside it less than 6 GiB: chapters have no more
    strided=False,
    scales=_EXPONENTIALS,
    hints=(
        "Two loops over the row: the first for its maximum and its sum, the second for the result.",
        "When the maximum grows from m to m', the sum so far is multiplied by exp(m - m').",
    ),
)

_add(
    name="matmul_bias_relu",
    says="matmul_bias_relu(a, b, bias): max(a @ b + bias, 0). a (M, K), b (K, N), bias (N,), 16 bits, contiguous -> (M, N)",
    reference=lambda a, b, bias: torch.relu(a @ b + bias),
    inputs=lambda draw, M, K, N: {
        "a": draw.around(_rise_and_fall(K), M, K),
        "b": draw.around(torch.ones(()), K, N),
        "bias": draw(N),
    },
    sizes=_named("M K N", (1, 1, 1), (1, 17, 5), (16, 16, 16), (33, 70, 41), (2, 4099, 17)),
    real={"M": 4096, "K": 4096, "N": 4096},
    dtypes=(torch.float16, torch.bfloat16),
    strided=False,
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    hints=(
        "Between the loop and the store the tile is in registers, in float32.",
        "The bias is of the columns: bias[None, :].",
    ),
)

_add(
    name="add_norm",
    says="add_norm(x, residual, weight, bias): s = x + residual, and LayerNorm of s with eps 1e-5. x, residual (M, N), weight, bias (N,), all "
    "contiguous -> s, y (M, N)",
    reference=lambda x, residual, weight, bias: (
        x + residual,
        F.layer_norm(x + residual, weight.shape, weight, bias, 1e-5),
    ),
    inputs=lambda draw, M, N: {"x": draw(M, N), "residual": draw(M, N), "weight": draw.near_one(N), "bias": draw(N)},
    sizes=_rows((1, 7), (3, 16), (7, 97), (2, 1031)),
    real=_MODEL,
    strided=False,
    hints=(
        "s is written and not read back.",
        "Beyond N the sum holds what was loaded: mask it before the squares are added.",
    ),
)

_add(
    name="sparse_forward",
    says="sparse_forward(x, weight, ids): the columns of x @ weight.T that belong to the chunks ids, each of 64, zeros where the last chunk "
    "is shorter. x (M, K), weight (N, K), 16 bits, ids (A,) int64 -> (M, 64 A)",
    reference=lambda x, weight, ids: (
        F.pad(x @ weight.T, (0, -weight.shape[0] % 64)).unflatten(1, (-1, 64))[:, ids].flatten(1)
    ),
    inputs=lambda draw, M, K, N, A: {
        "x": draw.around(_rise_and_fall(K), M, K),
        "weight": draw.around(torch.ones(()), N, K),
        "ids": draw.some_of(-(-N // 64), A),
    },
    sizes=_named("M K N A", (1, 1, 1, 1), (1, 17, 100, 2), (3, 70, 130, 2), (33, 40, 64, 1), (2, 2053, 65, 1)),
    real={"M": 4096, "K": 4096, "N": 16384, "A": 26},
    dtypes=(torch.float16, torch.bfloat16),
    book=_book(lambda kb, x, weight, ids: kb.sparse_forward(x, weight, None, ids, compact=True)),
    flops=lambda s: 2 * s["M"] * s["K"] * 64 * s["A"],
    moved=lambda s, size: (s["M"] * s["K"] + 64 * s["A"] * (s["K"] + s["M"])) * size,
    hints=(
        "A program owns a chunk and some rows of x: it loads its id once.",
        "Features beyond N: masked loads of the weight give zeros, which are stored.",
    ),
)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        beside = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def _distance(q: torch.Tensor) -> torch.Tensor:
    position = torch.arange(q.shape[1], device=q.device)
    return position[:, None] - position[None, :]


def _heads(draw: Draw, H: int, N: int, D: int) -> dict[str, Any]:
    return {name: draw(H, N, D) for name in "qkv"}


_ATTENTION: dict[str, Any] = {
    "powers": ("D",),
    "dtypes": (torch.float16, torch.bfloat16),
    "strided": False,
    "scales": (1.0, 3.0, 7.0),
}

_add(
    name="window",
    says="window(q, k, v, width): causal attention to the last width keys up to the query's own, scaled by 1 / sqrt(D). "
    "q, k, v (H, N, D), 16 bits, contiguous, width an int from 1 on -> (H, N, D)",
    reference=lambda q, k, v, width: _attention(q, k, v, (_distance(q) >= 0) & (_distance(q) < width)),
    inputs=lambda draw, H, N, D, width: {**_heads(draw, H, N, D), "width": width},
    sizes=_named("H N D width", (1, 1, 16, 1), (2, 5, 16, 3), (1, 97, 32, 21), (1, 133, 16, 40)),
    real={"H": 16, "N": 2048, "D": 128, "width": 512},
    **_ATTENTION,
    book=_book(lambda kb, q, k, v, width: kb.flash_attention(q[None], k[None], v[None], causal=True, window=width)[0]),
    flops=lambda s: 4 * s["H"] * s["N"] * s["width"] * s["D"],
    hints=(
        "The first query of a tile has the oldest key: begin at its tile.",
        "Mask by distance: 0 <= query - key < width.",
    ),
)

_add(
    name="sink",
    says="sink(q, k, v, sinks): attention with a further score sinks[h] in each softmax, whose value is zero; scores are scaled by "
    "1 / sqrt(D), sinks are not. q, k, v (H, N, D), 16 bits, sinks (H,) float32, all contiguous -> (H, N, D)",
    reference=lambda q, k, v, sinks: _attention(q, k, v, None, sinks),
    inputs=lambda draw, H, N, D: {**_heads(draw, H, N, D), "sinks": draw(H, dtype=torch.float32)},
    sizes=_named("H N D", (1, 1, 16), (2, 5, 16), (1, 97, 32)),
    real={"H": 16, "N": 2048, "D": 128},
    **_ATTENTION,
    book=_book(lambda kb, q, k, v, sinks: kb.flash_attention(q[None], k[None], v[None], sinks=sinks)[0]),
    flops=lambda s: 4 * s["H"] * s["N"] ** 2 * s["D"],
    hints=("A key that has been seen before the loop: the maximum is its score, the sum is 1.",),
)

_add(
    name="causal_attention",
    says="causal_attention(q, k, v): query i sees the keys up to i, scaled by 1 / sqrt(D). q, k, v (H, N, D), 16 bits, contiguous -> (H, N, D)",
    reference=lambda q, k, v: _attention(q, k, v, _distance(q) >= 0),
    inputs=_heads,
    sizes=_named("H N D", (1, 1, 16), (2, 5, 16), (3, 40, 16), (1, 97, 32), (1, 133, 16)),
    real={"H": 16, "N": 2048, "D": 128},
    **_ATTENTION,
    peer=lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0],
    book=_book(lambda kb, q, k, v: kb.flash_attention(q[None], k[None], v[None], causal=True)[0]),
    flops=lambda s: 2 * s["H"] * s["N"] ** 2 * s["D"],
    hints=(
        "A persistent program: for unit in range(tl.program_id(0), units, tl.num_programs(0)).",
        "A unit is a head and a pair of tiles of queries, i and tiles - 1 - i: a long one and a short one.",
        "An odd number of tiles leaves the one in the middle without a partner: take it once.",
    ),
)

_add(
    name="quantize_blocks",
    says="quantize_blocks(w, code): each block of 64 in 4 bits. The block's absmax; then w * (1 / absmax), in float32, takes the number of "
    "the nearest value of code, ascending; halfway the lower one. Of a block of zeros the absmax is 0, and each takes the number of 0. "
    "Two numbers a byte, the first in its high half. "
    "w (n,), code (16,) float32, contiguous -> packed (n / 2,) uint8, absmax (n / 64,)",
    reference=lambda w, code: _quantized(w, code),
    # The book's own function has NF4's code.
    inputs=lambda draw, n: {
        "w": _with_zeros(draw(n)),
        "code": draw.table() if draw.scale != 1 else nf4_code_reference(torch.float32),
    },
    sizes=_named("n", (64,), (128,), (192,), (64 * 11,)),
    real={"n": 2**26},
    multiple={"n": 64},
    dtypes=(torch.float32,),
    strided=False,
    kept=("code",),
    also=("add", "div"),
    book=_book(lambda kb, w, code: (lambda q: (q.packed, q.absmax))(kb.nf4_quantize(w))),
    hints=(
        "tl.div_rn divides as IEEE asks for: else the last bit differs, and now and then a number.",
        "Nothing is divided by the absmax of a block of zeros: tl.maximum(absmax, 1.2e-38).",
        "The number is the count of middles between the values of code that lie below; tl.split takes pairs apart.",
    ),
)


def _with_zeros(w: torch.Tensor) -> torch.Tensor:
    w[64:128] = 0.0
    return w


def _quantized(w: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, absmax = nf4_quantize_reference(w, code.float())
    return packed, absmax.to(w.dtype)


def _nf4_matvec(packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    ids = torch.stack([packed >> 4, packed & 15], -1).flatten(1).long()
    return (table[ids] * absmax.repeat_interleave(64, 1)).to(x.dtype) @ x


_add(
    name="nf4_matvec",
    says="nf4_matvec(packed, absmax, table, x): a matrix in 4 bits times a vector. Row r of the matrix has two values a byte, the first in the "
    "high half; column k is table[nibble] * absmax[r, k // 64]. packed (N, K / 2) uint8, absmax (N, K / 64) and table (16,) float32, x (K,), "
    "all contiguous -> (N,) in the dtype of x",
    reference=_nf4_matvec,
    inputs=lambda draw, N, K: {
        "packed": draw.packed_bytes(N, K // 2),
        "absmax": draw.positive(N, K // 64),
        "table": draw.table(),
        "x": draw(K),
    },
    sizes=_named("N K", (1, 64), (5, 64), (3, 320), (19, 128)),
    real={"N": 14336, "K": 4096},
    multiple={"K": 64},
    strided=False,
    scales=(1.0, 20.0),
    book=_book(
        lambda kb, packed, absmax, table, x: kb.nf4_matmul(
            x[None], _nf4(packed, absmax, table, 1, packed.shape[0], len(x)), 0
        )[0]
    ),
    hints=(
        "A program owns some rows and walks over K; every weight is used once, so no tensor core is needed.",
        "The high halves belong to the even columns of x, the low halves to the odd ones: two loads of x with steps of two.",
        "absmax is the same for 32 bytes of a row: absmax_ptr + row * (K // 64) + byte // 32.",
    ),
)
