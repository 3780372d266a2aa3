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
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook.nf4.reference import nf4_quantize_reference

# How tensors may lie in memory; mixed: one after the other in another way. Between and around its elements there is NaN, or a number that is nobody's id.
LAYOUTS = ("contiguous", "padded", "transposed", "offset", "expanded", "mixed")
_GUARD = 64  # elements before the first and after the last
EPS = 1e-6
# Twelve small tasks, in the order in which chapters make them ripe.
_FIRST = "copy", "vector_add", "strided_copy", "row_sum", "softmax", "softmax_autograd", "row_argmax"
PATH = {
    **dict.fromkeys(_FIRST, "/notebooks/first_kernel"),
    **dict.fromkeys(("transposed_copy", "expert_counts"), "/book/machine"),
    **dict.fromkeys(("running_sum", "top1_gather", "residual_relu"), "/notebooks/layer_norm"),
}

Sizes = Mapping[str, int]


class Draw:
    """Makes the inputs of one case: random, in one dtype and layout, from one generator."""

    def __init__(self, seed: int, dtype: torch.dtype, layout: str = "contiguous", scale: float = 1.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.layouts, self.scale = dtype, itertools.cycle([layout]), scale
        if layout == "mixed":
            self.layouts = itertools.cycle(("transposed", "padded", "contiguous"))

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers with the standard deviation ``scale``."""
        return self._placed(torch.randn(shape, generator=self.generator) * self.scale, dtype or self.dtype)

    def near_one(self, *shape: int) -> torch.Tensor:
        """What a trained weight of a norm looks like."""
        return self._placed(1 + 0.3 * torch.randn(shape, generator=self.generator), self.dtype)

    def positive_mean(self, *shape: int) -> torch.Tensor:
        """Normal numbers around 1."""
        return self._placed((torch.randn(shape, generator=self.generator) + 1.0) * self.scale, self.dtype)

    def rising(self, M: int, K: int) -> torch.Tensor:
        """Rows around 1 and then around -1: times numbers around 1 their sum rises and comes back, and shows what was rounded on the way."""
        mean = torch.where(torch.arange(K) < K / 2, 1.0, -1.0)
        return self._placed((torch.randn((M, K), generator=self.generator) + mean) * self.scale, self.dtype)

    def shifted(self, M: int, N: int) -> torch.Tensor:
        """Normal numbers, each row around a number of its own as large as ``scale``: exponentials overflow, and no number of a row outweighs all others."""
        rows = torch.randn((M, 1), generator=self.generator) * self.scale
        return self._placed(torch.randn((M, N), generator=self.generator) + rows, self.dtype)

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
        """``few`` different integers from 0 to ``many`` - 1, or all of them, in no order, contiguous."""
        return torch.randperm(many, generator=self.generator)[:few]

    def ids(self, below: int, *shape: int) -> torch.Tensor:
        """Integers from 0 to ``below`` - 1, int64."""
        return self._placed(torch.randint(0, max(below, 1), shape, generator=self.generator), torch.int64)

    def lengths(self, most: int, *shape: int) -> torch.Tensor:
        """Integers from 1 to ``most``, int64."""
        return self._placed(torch.randint(1, most + 1, shape, generator=self.generator), torch.int64)

    def packed_bytes(self, *shape: int) -> torch.Tensor:
        """Bytes, contiguous."""
        return torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)

    def table(self) -> torch.Tensor:
        """Sixteen values from -1 to 1, ascending, float32: no kernel can know them beforehand."""
        return (2 * torch.rand(16, generator=self.generator) - 1).sort().values

    def angles(self, positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (positions, half) each, of angles that are drawn."""
        angle = 2 * math.pi * torch.rand((positions, half), generator=self.generator)
        return self._placed(angle.cos(), self.dtype), self._placed(angle.sin(), self.dtype)

    def _placed(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        whole, layout = values.shape, next(self.layouts)
        if layout == "expanded" and values.dim() > 1:
            values = values[:1]
        shape = list(values.shape)
        order = list(range(len(shape)))
        if layout == "transposed" and len(shape) > 1:
            order[-2:] = order[:-3:-1]
        strides, step = [0] * len(shape), 3 if layout == "padded" and len(shape) == 1 else 1
        for i in reversed(order):
            strides[i] = step
            step *= max(shape[i], 1) + (5 if layout == "padded" and i == order[-1] else 0)
        before = _GUARD + (1 if layout == "offset" else 0)
        gap = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 3
        memory = torch.full((before + step + _GUARD,), gap, dtype=dtype)
        return memory.as_strided(shape, strides, before).copy_(values).expand(whole)


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
        powers: sizes that are powers of two.
        empty: a size that may be zero.
        grads: inputs by which the result is differentiated.
        dtypes: of the floating-point inputs.
        strided: whether inputs may have any strides; else they are contiguous.
        contiguous: whether the results have to be.
        scales: standard deviations of the inputs that are tried.
        also: PyTorch's operators (``sum``) that a solution may call beside those that only allocate, view, copy or convert.
        copies: whether copying numbers is the whole task, so that PyTorch may not copy the inputs.
        peer: what a PyTorch user would call, where that is not ``reference``.
        moved: bytes that have to be moved, from the sizes and the bytes of an element; default: all inputs and outputs once.
        flops: floating-point operations, from the sizes, where they may bound it.
        hints: by what went wrong, a key of ``judge.HINTS``, where there is more to say than there.
        how: how it is done, in a sentence or two.
        picture: the smallest picture of it, in text.
    """

    name: str
    says: str
    reference: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    sizes: Sequence[Sizes]
    real: Sizes
    multiple: Sizes = dataclasses.field(default_factory=dict)
    powers: Sequence[str] = ()
    empty: str | None = None
    grads: Sequence[str] = ()
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    strided: bool = True
    contiguous: bool = False
    scales: Sequence[float] = (1.0, 20.0)
    also: Sequence[str] = ()
    copies: bool = False
    peer: Callable[..., Any] | None = None
    moved: Callable[[Sizes, int], int] | None = None
    flops: Callable[[Sizes], int] | None = None
    hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    how: str = ""
    picture: str = ""


TASKS: dict[str, Task] = {}


def _named(names: str, *rows: tuple[int, ...]) -> tuple[Sizes, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


# One element, one row, primes, many rows, more than a tile of 1,024 and of 4,096: two rows, since the sum of one may be all cancellation.
_MATRICES = _named("M N", (1, 1), (1, 7), (3, 16), (7, 97), (67, 5), (2, 1031), (2, 4099))
_UP_TO_4096 = _MATRICES[:-1]
# Sizes for a GPU, by their letters: tokens M and T, a model's width N and K, experts E, heads H of D numbers ...
_REAL = {"M": 8192, "N": 4096, "K": 4096, "n": 2**26, "R": 65536, "T": 4096, "k": 4, "E": 128}
_REAL |= {"H": 16, "D": 128, "L": 1434, "A": 26, "width": 512}
# exp() of numbers around 300 is infinite in float32: without the largest number of its row a kernel is wrong.
_EXPONENTIALS = (1.0, 20.0, 300.0)
_HALVES = torch.float16, torch.bfloat16


def _draw(**shapes: str) -> Callable[..., dict[str, Any]]:
    """Inputs by name: the sizes of normal numbers, ``x="M N"``, with another method of :class:`Draw` before them, ``weight="near_one N"``."""

    def drawn(draw: Draw, shape: str, sizes: Sizes) -> torch.Tensor:
        words = shape.split()
        make = draw if words[0] in sizes else getattr(draw, words.pop(0))
        return make(*(sizes[size] for size in words))

    return lambda draw, **sizes: {name: drawn(draw, shape, sizes) for name, shape in shapes.items()}


_MATRIX = _draw(x="M N")


def _add(says: str, reference: Any, inputs: Any = _MATRIX, sizes: Sequence[Sizes] = _MATRICES, **more: Any) -> None:
    """Adds the task that ``says`` describes: what it begins with is the name, and where it says "contiguous" that is so."""
    takes, _, gives = says.partition("->")
    name, strided = says.partition("(")[0], "contiguous" not in takes
    more["real"] = {size: _REAL[size] for size in sizes[0] if size in _REAL} | more.get("real", {})
    told = {"strided": strided, "contiguous": "contiguous" in gives, "empty": next(iter(sizes[0])) if strided else None}
    TASKS[name] = Task(name=name, says=says, reference=reference, inputs=inputs, sizes=sizes, **told | more)


# --- the path of small ones ---------------------------------------------------------------------------------------------

_add(
    "copy(x): the same numbers in memory of its own. x (n,) contiguous -> (n,)",
    lambda x: x.clone(),
    _draw(x="n"),
    _named("n", (1,), (97,), (1024,), (4099,)),
    empty="n",
    how="A program copies a block: offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), a load and a store with mask=offs < n.",
    picture="x        a b c d | e f g h | i\nprogram     0    |    1    | 2\nout      a b c d | e f g h | i",
    copies=True,
)
_add(
    "vector_add(x, y): their sum. x, y (n,) -> (n,)",
    lambda x, y: x + y,
    _draw(x="n", y="n"),
    _named("n", (1,), (97,), (1024,), (4099,)),
    how="Each program adds one block of elements: tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).",
    picture="x    1 2 3 4 | 5\n     + + + +   +\ny    9 8 7 6 | 5\nout 10 ...    10",
)
_add(
    "strided_copy(x): the same matrix from one of any strides. x (M, N) -> (M, N) contiguous",
    lambda x: x.contiguous(),
    how="Load at x_ptr + row * x.stride(0) + column * x.stride(1), store at out_ptr + row * N + column.",
    picture="memory  a b . c d .  (stride 3, 1)\nout     a b c d      (stride 2, 1)",
    copies=True,
)
_add(
    "row_sum(x): the sum of each row. x (M, N) -> (M,)",
    lambda x: x.sum(-1),
    how="One program a row; tl.sum of a tile in float32, or of several in a loop.",
    picture="1 2 3  ->  6\n4 5 6  -> 15",
)
_add(
    "softmax(x): of each row. x (M, N), rows of up to 4096 -> (M, N)",
    lambda x: torch.softmax(x, -1),
    sizes=_UP_TO_4096,
    scales=_EXPONENTIALS,
    how="One program a row; BLOCK_N = triton.next_power_of_2(N) holds the row.",
    picture="0 1 2  ->  .09 .24 .67",
)
_add(
    "softmax_autograd(x): softmax of each row, with a gradient, as an autograd.Function. x (M, N), rows of up to 4096 -> (M, N)",
    lambda x: torch.softmax(x, -1),
    _draw(x="shifted M N"),
    _UP_TO_4096[1:],
    grads=("x",),
    scales=(1.0, 300.0),
    how="forward saves y; backward(ctx, dy) gives y * (dy - sum(dy * y)), the sum over the row: a kernel of the same shape.",
    picture=" x -- forward ->  y\ndx <- backward -- dy",
)
_add(
    "row_argmax(x): the place of the largest number of each row, the first of equal ones. x (M, N), rows of up to 4096 -> (M,) int64",
    lambda x: x.argmax(-1),
    sizes=_UP_TO_4096,
    scales=(1.0, 20.0, 0.0),  # of equal numbers each is the largest
    hints=dict.fromkeys(("tail", "scale", "dtype"), "A masked -inf never wins; of equal numbers the first does."),
    how="tl.argmax(x, axis=0) takes the first of equal ones; what it gives is int32, the result is int64.",
    picture="3 9 9  ->  1\n7 2 5  ->  0",
)
_add(
    "transposed_copy(x): the transposed matrix in memory of its own. x (M, N) -> (N, M) contiguous",
    lambda x: x.T.contiguous(),
    sizes=_named("M N", (1, 1), (1, 7), (16, 3), (7, 97), (33, 65)),
    how="A program loads a tile of x and stores it at the transposed place; tl.trans turns the tile in registers, so that both go along memory.",
    picture="a b c      a d\nd e f  ->  b e\n           c f",
    copies=True,
)
_add(
    "expert_counts(ids, num_experts): a histogram: how many slots chose each expert. ids (T,) int64, num_experts int -> (num_experts,) int32",
    lambda ids, num_experts: torch.bincount(ids, minlength=num_experts).to(torch.int32),
    lambda draw, T, E: {"ids": draw.ids(E, T), "num_experts": E},
    _named("T E", (1, 1), (7, 3), (97, 8), (515, 17)),
    real={"T": 2**24},
    dtypes=(torch.float32,),
    scales=(1.0,),
    how="tl.atomic_add into zeros, one for each slot; a masked slot adds nothing. Fewer atomics: tl.histogram counts a block first.",
    picture="ids  2 0 2 1 2   ->   counts  1 1 3",
)
_add(
    "running_sum(x): of each row the sums up to each element, an inclusive scan. x (M, N), rows of up to 4096 -> (M, N)",
    lambda x: x.cumsum(-1),
    sizes=_UP_TO_4096,
    how="One program a row: tl.cumsum(x.to(tl.float32), axis=0).",
    picture="1 2 3 4  ->  1 3 6 10",
)
_add(
    "top1_gather(table, ids): the row of the table that each token chose. table (R, N), ids (T,) int64 below R -> (T, N) contiguous",
    lambda table, ids: table[ids],
    _draw(table="R N", ids="ids R T"),
    _named("R N T", (1, 1, 1), (5, 7, 3), (11, 97, 15), (4, 1031, 4)),
    empty="T",
    moved=lambda s, size: 2 * s["T"] * s["N"] * size + 8 * s["T"],
    how="One program a token: it loads its id, then that row. The id is 64 bits, so is the offset.",
    picture="ids 2 0     table  a a     out  c c\n                   b b  ->      a a\n                   c c",
    copies=True,
)
_add(
    "residual_relu(x, residual): max(x + residual, 0) in one launch. x, residual (M, N) -> (M, N)",
    lambda x, residual: torch.relu(x + residual),
    _draw(x="M N", residual="M N"),
    how="The sum stays in registers between the two loads and the one store: tl.maximum(x + residual, 0.0).",
    picture="x         1 -4\nresidual  2  1\nout       3  0",
)

# --- rows -----------------------------------------------------------------------------------------------------------------

_add(
    "silu_mul(gate, up): silu(gate) * up, the middle of a gated MLP. gate, up (M, N) -> (M, N)",
    lambda gate, up: F.silu(gate) * up,
    _draw(gate="M N", up="M N"),
    how="silu(g) = g * sigmoid(g): tl.sigmoid takes float32.",
)
_add(
    "softmax_backward(dy, y): the gradient by x of y = softmax(x). dy, y (M, N) -> dx (M, N)",
    lambda dy, y: y * (dy - (dy * y).sum(-1, keepdim=True)),
    _draw(dy="M N", y="probabilities M N"),
    how="dx = y * (dy - sum(dy * y)), the sum over the row.",
)
_add(
    "logsumexp(x): log of the sum of the exponentials of each row. x (M, N) -> (M,)",
    lambda x: torch.logsumexp(x, -1),
    scales=_EXPONENTIALS,
    how="m + log(sum(exp(x - m))), m the largest number of the row. In a loop over tiles: when m grows from m_old to m_new the sum so far is multiplied by exp(m_old - m_new).",
)
_add(
    "row_products(a, b): the sum of a * b over each row. a, b (M, N) -> (M,)",
    lambda a, b: (a * b).sum(-1),
    _draw(a="M N", b="M N"),
    how="Convert both to float32 before the product: a 16-bit product is rounded.",
)
_add(
    "column_sum(x): the sum over the rows. x (M, N) -> (N,)",
    lambda x: x.sum(0),
    sizes=_named("M N", (1, 1), (1, 7), (16, 3), (97, 7), (128, 5), (131, 67)),
    how="A program owns a block of columns and goes down the rows. For few columns let several share the rows: a row of partial sums each, which a second launch adds.",
)

# --- RMSNorm, piece by piece ----------------------------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rms_norm_dx(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    g, xhat = dy * weight, x * rstd
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))


_NORM_INPUTS = _draw(x="M N", weight="near_one N")
_NORM_GRAD_INPUTS = _draw(dy="M N", x="M N", weight="near_one N")
# Numbers of all sizes: the mean square of what randn gives is 1, and a kernel that leaves the norm out would be right.
_NORM_SCALES = (1.0, 20.0, 0.01)

_add(
    "rms_norm(x, weight): x / sqrt(mean(x^2) + 1e-6) * weight, the mean over a row. x (M, N), weight (N,) -> (M, N) contiguous",
    _rms_norm,
    _NORM_INPUTS,
    scales=(1.0, 300.0, 0.01),
    peer=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    how="One program a row: load it once, y = x * (1 / tl.sqrt(tl.sum(x * x) / N + eps)) * w, store it with mask=offs_n < N.",
)
# In a row of few elements this is all cancellation: what is left is rounding, PyTorch's and a reader's.
_add(
    "rms_norm_dx(dy, x, weight): the gradient of rms_norm by x. dy, x (M, N), weight (N,) -> dx (M, N) contiguous",
    _rms_norm_dx,
    _NORM_GRAD_INPUTS,
    _MATRICES[1:],
    also=("sum",),
    how="g = dy * weight and xhat = x * rstd: dx = rstd * (g - xhat * mean(g * xhat)), the mean over the row. One program a row.",
    scales=_NORM_SCALES,
)
_add(
    "rms_norm_dw(dy, x, weight): the gradient of rms_norm by weight. dy, x (M, N), weight (N,) -> dw (N,)",
    lambda dy, x, weight: (dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).sum(0),
    _NORM_GRAD_INPUTS,
    also=("sum",),
    how="dw = sum over the rows of dy * xhat. Let a few programs take every P-th row each, keep a row of float32 sums, and store it as their row of partial (P, N); a second launch, or partial.sum(0), adds these. tl.atomic_add into float32 zeros works too.",
    scales=_NORM_SCALES,
)
_add(
    "rms_norm_autograd(x, weight): rms_norm with gradients by x and weight, as an autograd.Function. x (M, N), weight (N,) -> (M, N) contiguous",
    _rms_norm,
    _NORM_INPUTS,
    _MATRICES[1:],
    grads=("x", "weight"),
    also=("sum",),
    peer=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    how="class RMSNorm(torch.autograd.Function): forward(ctx, x, weight) calls ctx.save_for_backward(x, weight); backward(ctx, dy) returns dx, dw.",
    scales=_NORM_SCALES,
)
_add(
    "add_rms_norm(x, residual, weight): s = x + residual, and rms_norm(s, weight). x, residual (M, N), weight (N,) -> s, y (M, N) contiguous",
    lambda x, residual, weight: (x + residual, _rms_norm(x + residual, weight)),
    _draw(x="M N", residual="M N", weight="near_one N"),
    how="s is written and not read back: it is in registers. Normalize it before it is rounded, or after: both pass.",
    scales=_NORM_SCALES,
)

# --- moving -----------------------------------------------------------------------------------------------------------

_add(
    "topk_gather(table, ids): the chosen rows of each token. table (R, N), ids (T, k) int64 below R -> (T, k, N) contiguous",
    lambda table, ids: table[ids],
    _draw(table="R N", ids="ids R T k"),
    _named("R N T k", (1, 1, 1, 1), (5, 7, 3, 2), (11, 97, 5, 3), (4, 1031, 2, 2)),
    empty="T",
    moved=lambda s, size: 2 * s["T"] * s["k"] * s["N"] * size + 8 * s["T"] * s["k"],
    how="One program a chosen row: it loads its id, by the strides of ids, then the row. The id is 64 bits: so is the offset.",
    copies=True,
)
_add(
    "combine(y, gates): the sum of a token's k rows, each times its gate. y (T, k, N), gates (T, k) -> (T, N)",
    lambda y, gates: (y * gates[..., None]).sum(1),
    _draw(y="T k N", gates="probabilities T k"),
    _named("T k N", (1, 1, 1), (3, 2, 7), (5, 4, 97), (2, 3, 1031)),
    how="Accumulate the k products in float32; round once, at the store.",
)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


_add(
    "rope(x, cos, sin): x1 * cos - x2 * sin beside x2 * cos + x1 * sin, x1 and x2 the halves of a head. "
    "x (T, H, D), cos, sin (T, D / 2) -> (T, H, D)",
    _rope,
    lambda draw, T, H, D: {"x": draw(T, H, D), **dict(zip(("cos", "sin"), draw.angles(T, D // 2), strict=True))},
    _named("T H D", (1, 1, 2), (3, 2, 6), (5, 3, 34), (2, 2, 128)),
    multiple={"D": 2},
    how="A program takes a token (and a head), and loads both halves before it stores either; cos and sin are of the token.",
)

# --- products and packed numbers ------------------------------------------------------------------------------------


def _packed(draw: Draw, packed: tuple[int, ...], absmax: tuple[int, ...]) -> dict[str, Any]:
    return {"packed": draw.packed_bytes(*packed), "absmax": draw.positive(*absmax), "table": draw.table()}


_add(
    "matmul(a, b): the matrix product. a (M, K), b (K, N) -> (M, N)",
    lambda a, b: a @ b,
    _draw(a="M K", b="K N"),
    _named("M K N", (1, 1, 1), (1, 17, 5), (16, 16, 16), (33, 70, 41), (64, 128, 32)),
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    how="A program owns a tile of the result and loops over K: acc = tl.dot(a, b, acc). Tiles are at least 16 in every direction.",
)
_add(
    "gather_linear(x, weight, rows): x times the chosen rows of weight. x (M, K), weight (N, K), rows (L,) int64 below N -> (M, L)",
    lambda x, weight, rows: x @ weight[rows].T,
    _draw(x="M K", weight="N K", rows="ids N L"),
    _named("M K N L", (1, 1, 1, 1), (1, 17, 5, 3), (3, 64, 41, 7), (17, 70, 100, 37)),
    real={"M": 1, "N": 14336},
    moved=lambda s, size: (s["M"] * s["K"] + s["L"] * s["K"] + s["M"] * s["L"]) * size + 8 * s["L"],
    flops=lambda s: 2 * s["M"] * s["K"] * s["L"],
    how="Load the block of row numbers first (64 bits, by their stride), then the rows of weight; for one row of x a tl.sum over K is enough.",
)


def _nf4_decode(packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    ids = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
    return table[ids] * absmax.flatten().repeat_interleave(64)


_add(
    "nf4_decode(packed, absmax, table): two values a byte, the first in its high half; the i-th is table[nibble] * absmax[i // 64]. "
    "packed (n / 2,) uint8, absmax (n / 64,) and table (16,) float32, all contiguous -> (n,) float32",
    _nf4_decode,
    lambda draw, n: _packed(draw, (n // 2,), (n // 64,)),
    _named("n", (64,), (192,), (1024,), (64 * 41,)),
    multiple={"n": 64},
    empty="n",
    dtypes=(torch.float32,),
    scales=(1.0,),
    how="packed >> 4 is the first value of a byte, packed & 15 the second; table_ptr + nibble.to(tl.int32) is its number. tl.interleave(high, low) puts the two beside each other, so that the store goes along memory.",
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


def _decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
    return _attention(q.unflatten(1, (k.shape[1], -1)), k, v, seen).flatten(1, 2)


_add(
    "decode_attention(q, k, v, lengths): one query a sequence against the first lengths[b] keys, scaled by 1 / sqrt(D); consecutive "
    "heads of q share one of k and v. q (B, H, D), k, v (B, H_kv, S, D), lengths (B,) int64 from 1 to S -> (B, H, D)",
    _decode_attention,
    lambda draw, B, H_kv, G, S, D: _draw(q="B H D", k="B H_kv S D", v="B H_kv S D", lengths="lengths S B")(
        draw, B=B, H=H_kv * G, H_kv=H_kv, S=S, D=D
    ),
    _named("B H_kv G S D", (1, 1, 1, 1, 16), (2, 1, 2, 5, 16), (3, 2, 2, 97, 32), (2, 1, 1, 300, 16)),
    real={"B": 16, "H_kv": 8, "G": 4, "S": 8192},
    powers=("D",),
    scales=(1.0, 3.0, 7.0),
    moved=lambda s, size: s["B"] * s["H_kv"] * s["S"] * s["D"] * size,  # k and v, of which half lies before the lengths
    hints={"tail": "Keys beyond the length: scores of -inf. Their values must be masked as well: 0 times NaN is NaN."},
    how="One program a sequence and head: a loop over tiles of keys, with a running maximum, sum and result.",
)
_add(
    "chunk_norms(w): the Euclidean norm of each chunk of 16 rows. w (R, N), R a multiple of 16 -> (R / 16,)",
    lambda w: w.unflatten(0, (-1, 16)).square().sum((1, 2)).sqrt(),
    _draw(w="R N"),
    _named("R N", (16, 1), (32, 7), (48, 97), (16, 1031)),
    multiple={"R": 16},
    how="One program a chunk, with a loop over columns; the sum of squares in float32, the root at the end.",
)

# --- exercises of chapters: contiguous, as their solutions are ----------------------------------------------------------

_add(
    "axpy(x, y, alpha): alpha * x + y, alpha a number. x, y (n,) contiguous -> (n,)",
    lambda x, y, alpha: alpha * x + y,
    lambda draw, n: {"x": draw(n), "y": draw(n), "alpha": draw.number()},
    _named("n", (1,), (5,), (97,), (1024,), (4099,)),
    how="A number is an argument of the kernel like a size. One load of x, one of y, one store.",
)
_add(
    "softmax_looped(x): softmax of rows of any length, in tiles. x (M, N) contiguous -> (M, N)",
    lambda x: torch.softmax(x, -1),
    real={"M": 512, "N": 65536},  # in float64 with what PyTorch holds beside it less than 6 GiB: chapters have no more
    scales=_EXPONENTIALS,
    how="Two loops over the row: the first for its maximum and its sum, the second for the result. When the maximum grows from m to m', the sum so far is multiplied by exp(m - m').",
)
_add(
    "matmul_bias_relu(a, b, bias): max(a @ b + bias, 0). a (M, K), b (K, N), bias (N,), 16 bits, contiguous -> (M, N)",
    lambda a, b, bias: torch.relu(a @ b + bias),
    _draw(a="rising M K", b="positive_mean K N", bias="N"),
    _named("M K N", (1, 1, 1), (1, 17, 5), (16, 16, 16), (33, 70, 41), (2, 4099, 17)),
    dtypes=_HALVES,
    flops=lambda s: 2 * s["M"] * s["K"] * s["N"],
    how="Between the loop and the store the tile is in registers, in float32. The bias is of the columns: bias[None, :].",
)
_add(
    "add_norm(x, residual, weight, bias): s = x + residual, and LayerNorm of s with eps 1e-5. x, residual (M, N), weight, bias (N,), all "
    "contiguous -> s, y (M, N)",
    lambda x, residual, weight, bias: (x + residual, F.layer_norm(x + residual, weight.shape, weight, bias, 1e-5)),
    _draw(x="M N", residual="M N", weight="near_one N", bias="N"),
    _named("M N", (1, 7), (3, 16), (7, 97), (2, 1031)),
    hints={"tail": "Beyond N the sum holds what was loaded: mask it before the squares are added."},
    how="s is written and not read back.",
)
_X_WEIGHT = _draw(x="rising M K", weight="positive_mean N K")

_add(
    "sparse_forward(x, weight, ids): the columns of x @ weight.T that belong to the chunks ids, each of 64, zeros where the last chunk "
    "is shorter. x (M, K), weight (N, K), 16 bits, ids (A,) int64 -> (M, 64 A)",
    lambda x, weight, ids: F.pad(x @ weight.T, (0, -weight.shape[0] % 64)).unflatten(1, (-1, 64))[:, ids].flatten(1),
    lambda draw, M, K, N, A: {**_X_WEIGHT(draw, M=M, K=K, N=N), "ids": draw.some_of(-(-N // 64), A)},
    _named("M K N A", (1, 1, 1, 1), (1, 17, 100, 2), (3, 70, 130, 2), (33, 40, 64, 1), (2, 2053, 65, 1)),
    dtypes=_HALVES,
    flops=lambda s: 2 * s["M"] * s["K"] * 64 * s["A"],
    moved=lambda s, size: (s["M"] * s["K"] + 64 * s["A"] * (s["K"] + s["M"])) * size,
    how="A program owns a chunk and some rows of x: it loads its id once. Features beyond N are loaded as zeros, which are stored.",
)


def _distance(q: torch.Tensor) -> torch.Tensor:
    position = torch.arange(q.shape[1], device=q.device)
    return position[:, None] - position[None, :]


_ATTENTION: dict[str, Any] = {
    "powers": ("D",), "dtypes": (torch.float16, torch.bfloat16), "scales": (1.0, 3.0, 7.0),
    "real": {"N": 2048},
}  # fmt: skip
_QKV = _draw(q="H N D", k="H N D", v="H N D")

_add(
    "window(q, k, v, width): causal attention to the last width keys up to the query's own, scaled by 1 / sqrt(D). "
    "q, k, v (H, N, D), 16 bits, contiguous, width an int from 1 on -> (H, N, D)",
    lambda q, k, v, width: _attention(q, k, v, (_distance(q) >= 0) & (_distance(q) < width)),
    lambda draw, width, **sizes: {**_QKV(draw, **sizes), "width": width},
    _named("H N D width", (1, 1, 16, 1), (2, 5, 16, 3), (1, 97, 32, 21), (1, 133, 16, 40)),
    flops=lambda s: 4 * s["H"] * s["N"] * s["width"] * s["D"],
    how="The first query of a tile has the oldest key: begin at its tile. Mask by distance: 0 <= query - key < width.",
    **_ATTENTION,
)
_add(
    "sink(q, k, v, sinks): attention with a further score sinks[h] in each softmax, whose value is zero; scores are scaled by "
    "1 / sqrt(D), sinks are not. q, k, v (H, N, D), 16 bits, sinks (H,) float32, all contiguous -> (H, N, D)",
    lambda q, k, v, sinks: _attention(q, k, v, None, sinks),
    lambda draw, H, N, D: {**_QKV(draw, H=H, N=N, D=D), "sinks": draw(H, dtype=torch.float32)},
    _named("H N D", (1, 1, 16), (2, 5, 16), (1, 97, 32)),
    flops=lambda s: 4 * s["H"] * s["N"] ** 2 * s["D"],
    how="A key that has been seen before the loop: the maximum is its score, the sum is 1.",
    **_ATTENTION,
)
_add(
    "causal_attention(q, k, v): query i sees the keys up to i, scaled by 1 / sqrt(D). q, k, v (H, N, D), 16 bits, contiguous -> (H, N, D)",
    lambda q, k, v: _attention(q, k, v, _distance(q) >= 0),
    _QKV,
    _named("H N D", (1, 1, 16), (2, 5, 16), (3, 40, 16), (1, 97, 32), (1, 133, 16)),
    peer=lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0],
    flops=lambda s: 2 * s["H"] * s["N"] ** 2 * s["D"],
    how="A persistent program: for unit in range(tl.program_id(0), units, tl.num_programs(0)). A unit is a head and a pair of tiles of queries, i and tiles - 1 - i. An odd number of tiles leaves the one in the middle without a partner: take it once.",
    **_ATTENTION,
)


def _quantized(w: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed, absmax = nf4_quantize_reference(w, code.float())
    return packed, absmax.to(w.dtype)


_add(
    "quantize_blocks(w, code): each block of 64 in 4 bits. The block's absmax; then w * (1 / absmax), in float32, takes the number of "
    "the nearest value of code, ascending; halfway the lower one. Of a block of zeros the absmax is 0, and each takes the number of 0. "
    "Two numbers a byte, the first in its high half. "
    "w (n,), code (16,) float32, contiguous -> packed (n / 2,) uint8, absmax (n / 64,)",
    _quantized,
    lambda draw, n: {"w": draw(n).index_fill_(0, torch.arange(64, max(min(n, 128), 64)), 0.0), "code": draw.table()},
    _named("n", (64,), (128,), (192,), (64 * 11,)),
    multiple={"n": 64},
    dtypes=(torch.float32,),
    also=("add", "div"),
    how="tl.div_rn divides as IEEE asks for, and by tl.maximum(absmax, 1.2e-38) of a block of zeros. The number is the count of middles between the values of code that lie below; tl.split takes pairs apart.",
)
_add(
    "nf4_matvec(packed, absmax, table, x): a matrix in 4 bits times a vector. Row r of the matrix has two values a byte, the first in the "
    "high half; column k is table[nibble] * absmax[r, k // 64]. packed (N, K / 2) uint8, absmax (N, K / 64) and table (16,) float32, x (K,), "
    "all contiguous -> (N,) in the dtype of x",
    lambda packed, absmax, table, x: _nf4_decode(packed, absmax, table).view(len(packed), -1).to(x.dtype) @ x,
    lambda draw, N, K: {**_packed(draw, (N, K // 2), (N, K // 64)), "x": draw(K)},
    _named("N K", (1, 64), (5, 64), (3, 320), (19, 128)),
    real={"N": 14336},
    multiple={"K": 64},
    how="A program owns some rows and walks over K. The high halves belong to the even columns of x, the low halves to the odd ones: two loads of x with steps of two. absmax_ptr + row * (K // 64) + byte // 32 is the same for 32 bytes.",
)
