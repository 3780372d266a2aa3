"""Calls of this room's functions, and what each promises."""

import torch

from kernelbook import runtime
from kernelbook.cases import Case, Given, draw
from kernelbook.scatter_ffn.op import gather_matmul, scatter_ffn
from kernelbook.scatter_ffn.reference import gather_matmul_reference, scatter_ffn_reference

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu")


def _rows(n: int, count: int) -> torch.Tensor:
    """Some of n rows, some of them twice."""
    return torch.randint(0, max(n, 1), (count,), device=runtime.DEVICE)


def _given_matrix(
    m: int = 4, k: int = 32, n: int = 9, count: int = 3, activation: str | None = "silu", bias: bool = False
) -> Given:
    tensors = {"x": draw(m, k), "weight": draw(n, k)} | ({"bias": draw(n)} if bias else {})
    return tensors | {"rows": _rows(n, count), "activation": activation}


def given_network(
    m: int = 4, k: int = 32, n: int = 9, k_out: int = 24, count: int = 3, activation: str = "silu",
    gated: bool = True, biases: bool = False,
) -> Given:  # fmt: skip
    network = {"x": draw(m, k), "w_up": draw(n, k) / k**0.5, "w_down": draw(n, k_out) / n**0.5}
    network |= {"w_gate": draw(n, k) / k**0.5} if gated else {}
    network |= {"b_up": draw(n), "b_down": draw(k_out)} if biases else {}
    network |= {"b_gate": draw(n)} if biases and gated else {}
    return network | {"neurons": _rows(n, count), "activation": activation}


SIZES = {"m": (0, 128), "k": (1, 257), "n": (1, 512), "count": (0, 257)}
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
        sizes=SIZES | {"k_out": (1, 257), "activation": ACTIVATIONS, "gated": [False, True], "biases": [False, True]},
        real=tuple(sizes | {"k_out": sizes["k"]} for sizes in REAL),
    ),
    "scatter_ffn, plain": Case(
        function=scatter_ffn, given=given_network, reference=scatter_ffn_reference,
        options={"gated": False, "biases": True, "activation": "gelu"},
    ),
}  # fmt: skip
