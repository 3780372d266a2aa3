"""Calls of this room's functions, and what each promises."""

from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import runtime
from kernelbook.cases import ONE_TARGET, Case, Given, draw
from kernelbook.scatter_ffn.op import gather_matmul, scatter_ffn
from kernelbook.scatter_ffn.reference import gather_matmul_reference, scatter_ffn_reference

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu")


def _rows(n: int, count: int) -> torch.Tensor:
    """Some of n rows, some of them twice."""
    return torch.randint(0, max(n, 1), (count if n else 0,), device=runtime.DEVICE)


def _given_matrix(
    m: int = 4, k: int = 32, n: int = 9, count: int = 3, activation: str | None = "silu", bias: bool = False
) -> Given:
    tensors = {"x": draw(m, k), "weight": draw(n, k)} | ({"bias": draw(n)} if bias else {})
    return tensors | {"rows": _rows(n, count), "activation": activation}


def given_network(
    m: int = 4, k: int = 32, n: int = 9, k_out: int = 24, count: int = 3, activation: str = "silu",
    gated: bool = True, biases: bool = False, **options: Any,
) -> Given:  # fmt: skip
    up, down = (max(size, 1) ** -0.5 for size in (k, n))
    network = {"x": draw(m, k), "w_up": draw(n, k, scale=up), "w_down": draw(n, k_out, scale=down)}
    network |= {"w_gate": draw(n, k, scale=up)} if gated else {}
    network |= {"b_up": draw(n), "b_down": draw(k_out)} if biases else {}
    network |= {"b_gate": draw(n)} if biases and gated else {}
    return network | {"neurons": _rows(n, count), "activation": activation} | options


SIZES = {"m": (0, 128), "k": (0, 257), "n": (0, 512), "count": (0, 257)}
REAL = tuple(
    {"m": m, "k": k, "n": n, "count": count}
    for m, k, n, count in (
        (1, 1024, 4096, 300), (1, 1000, 3001, 3001), (16, 1024, 4096, 300), (33, 520, 2048, 1000), (128, 1024, 4096, 2000),
        (1024, 512, 2048, 900),
    )
)  # fmt: skip

CASES = {
    "gather_matmul": Case(
        function=gather_matmul, given=_given_matrix, reference=gather_matmul_reference,
        what="a product with listed rows of a matrix", part=True, plain={"activation": None},
        sizes=SIZES | {"activation": [None, *ACTIVATIONS], "bias": [False, True]}, real=REAL,
        large={"m": 2**17 + 64, "k": 64, "n": 2**14 + 64, "count": 2**14 + 64},
    ),
    "scatter_ffn": Case(
        function=scatter_ffn, given=given_network, reference=scatter_ffn_reference,
        what="a feed-forward block of chosen neurons", plain={"gated": False},
        sizes=SIZES | {"k_out": (0, 257), "activation": ACTIVATIONS, "gated": [False, True], "biases": [False, True]},
        real=tuple(sizes | {"k_out": sizes["k"]} for sizes in REAL),
    ),
    "scatter_ffn, plain": Case(
        function=scatter_ffn, given=given_network, reference=scatter_ffn_reference,
        options={"m": 2, "gated": False, "biases": True, "activation": "gelu"},
    ),
}  # fmt: skip

WEIGHTS = ("x", "w_up", "w_down")
# Tokens, listed neurons, gate: some, and every tile that the rules choose.
SOME = ((1, 1000, 0), (16, 1000, 1), (128, 5000, 1), (1024, 5000, 0))
EVERY = (
    (1, 100, 0), (1, 1000, 1), (1, 6000, 0), (16, 100, 0), (16, 1000, 1), (16, 3000, 0), (16, 6000, 1), (32, 1000, 0),
    (64, 1000, 1), (64, 6000, 0), (128, 1000, 1), (128, 6000, 0), (128, 6000, 1), (256, 1000, 0), (256, 6000, 1),
    (512, 6000, 0), (1024, 1000, 1), (1024, 6000, 0),
)  # fmt: skip


def compiled(target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that are compiled for a GPU: on one at every size at which a rule changes."""
    wide = {"k": 4096, "n": 6000, "k_out": 4096}
    for m, count, gated in EVERY if target == ONE_TARGET else SOME:
        yield "scatter_ffn", wide | {"m": m, "count": count, "gated": bool(gated), "needs": ()}
    yield (
        "scatter_ffn",
        wide | {"m": 2, "count": 30, "biases": True, "activation": "gelu_tanh", "needs": (*WEIGHTS, "w_gate")},
    )
    for dtype in (torch.float32, torch.float64):
        for m in (1, 4, 5):
            more = {"m": m, "count": 1000, "gated": False, "activation": "gelu", "dtype": dtype, "needs": WEIGHTS}
            yield "scatter_ffn", wide | more
    apart = lambda t: t.new_empty(len(t), 4096)[:, 1:4000]  # noqa: E731
    one = {"m": 1, "k": 3999, "n": 6000, "count": 30, "activation": None, "dtype": torch.float16}
    yield "gather_matmul", one | {"needs": (), "lie": apart}
    for block_l in (16, 128):
        more = {"m": 16, "count": 30, "activation": "relu", "block_l": block_l, "needs": ()}
        yield "scatter_ffn_with_atomics", wide | more


# What the page "Compiled" shows.
WIDE = {"k": 4096, "n": 16384, "k_out": 4096, "count": 1638, "gated": False, "activation": "relu", "needs": ()}
STATED = {
    f"scatter_ffn, {m} tokens, 10% of 16,384 neurons, 4,096 wide, bfloat16": [("scatter_ffn", WIDE | {"m": m})]
    for m in (1, 16, 128)
}
