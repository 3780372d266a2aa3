"""The mathematics in plain PyTorch: rows selected, then ordinary products; and the dense network beside it."""

import functools
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["activation_reference", "dense_ffn", "gather_matmul_reference", "scatter_ffn_reference"]


def activation_reference(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    """``relu``, ``leaky_relu`` (slope 0.01), ``gelu`` (with erf), ``gelu_tanh`` (GPT-2's approximation), ``silu``, ``None``."""
    if activation is None:
        return z
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    result: torch.Tensor = getattr(F, activation)(z)
    return result


def gather_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor | slice,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """act(x weight[rows]^T + bias[rows]) (..., L).

    x (..., K); weight (N, K); rows (L,); bias (N,).
    """
    z = F.linear(x, weight[rows], None if bias is None else bias[rows])
    return activation_reference(z, activation)


def scatter_ffn_reference(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    neurons: torch.Tensor | slice,
    *,
    w_gate: torch.Tensor | None = None,
    b_up: torch.Tensor | None = None,
    b_gate: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: str = "relu",
) -> torch.Tensor:
    """The listed neurons' rows copied together, then a small dense network.

    x (..., K); w_up, w_gate (N, K); w_down (N, K_out); neurons (L,);
    b_up, b_gate (N,); b_down (K_out,) -> (..., K_out).
    A neuron that is listed twice counts twice.
    """
    act = functools.partial(gather_matmul_reference, activation=activation)
    if w_gate is None:
        h = act(x, w_up, neurons, bias=b_up)
    else:
        h = act(x, w_gate, neurons, bias=b_gate)
        h = h * gather_matmul_reference(x, w_up, neurons, bias=b_up)
    return F.linear(h, w_down[neurons].t(), b_down)


def dense_ffn(x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, **others: Any) -> torch.Tensor:
    """The whole network, every neuron; arguments as in :func:`scatter_ffn_reference`."""
    return scatter_ffn_reference(x, w_up, w_down, slice(None), **others)
