"""The masked mathematics in plain PyTorch, and the two ways in which PyTorch users would write it faster."""

import math
from typing import Any

import torch

__all__ = [
    "active_features_reference",
    "gather_cublas_backward",
    "python_loop_backward",
    "sparse_dw_reference",
    "sparse_dx_reference",
    "sparse_forward_reference",
    "sparse_linear_reference",
]


def active_features_reference(active_chunks: torch.Tensor, d_out: int, chunk_size: int) -> torch.Tensor:
    """-> the (A * chunk_size,) features of the active chunks in their order; ``d_out`` where a chunk is shorter."""
    within = torch.arange(chunk_size, device=active_chunks.device)
    return (active_chunks[:, None].long() * chunk_size + within).reshape(-1).clamp(max=d_out)


def _mask(active_chunks: torch.Tensor, d_out: int, chunk_size: int) -> torch.Tensor:
    mask = torch.zeros(d_out + 1, dtype=torch.bool, device=active_chunks.device)
    mask[active_features_reference(active_chunks, d_out, chunk_size)] = True
    return mask[:-1]


class _KeepActive(torch.autograd.Function):
    """The identity, whose gradient keeps the active features and drops the others (also where they are NaN)."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.where(ctx.saved_tensors[0], dy, 0), None


def sparse_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    active_chunks: torch.Tensor | None = None,
    *,
    chunk_size: int = 64,
    mode: str = "sparse_dw",
) -> torch.Tensor:
    """``x W^T + b`` in the forward pass; autograd gives the gradients of ``mode`` by masking the output's gradient.

    Args:
        x: (..., d_in). weight: (d_out, d_in). bias: (d_out,) or ``None``. active_chunks: (A,) or ``None`` for all.
        mode: ``"dense"``, ``"sparse_dw"`` (the mask is applied for dW and db), ``"sparse_dw_dx"`` (for all three).
    """
    if active_chunks is None or mode == "dense":
        return torch.nn.functional.linear(x, weight, bias)
    mask = _mask(active_chunks, weight.shape[0], chunk_size)
    if mode == "sparse_dw_dx":
        return _KeepActive.apply(torch.nn.functional.linear(x, weight, bias), mask)
    # The value of one term is zero; its gradient by x is the dense one, and the other's by W and b the masked one.
    masked = _KeepActive.apply(torch.nn.functional.linear(x.detach(), weight, bias), mask)
    return masked + (torch.nn.functional.linear(x, weight.detach()) - torch.nn.functional.linear(x, weight).detach())


def sparse_forward_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    active_chunks: torch.Tensor,
    *,
    chunk_size: int = 64,
    compact: bool = False,
) -> torch.Tensor:
    """The active columns of ``x W^T + b``: (..., d_out) with zeros elsewhere, or (..., A * chunk_size) if ``compact``."""
    y = torch.nn.functional.linear(x, weight, bias)
    y = torch.where(_mask(active_chunks, weight.shape[0], chunk_size), y, 0)
    return _pack(y, active_chunks, chunk_size) if compact else y


def _pack(y: torch.Tensor, active_chunks: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """(..., d_out) -> (..., A * chunk_size), zeros where a chunk is shorter."""
    features = active_features_reference(active_chunks, y.shape[-1], chunk_size)
    return torch.nn.functional.pad(y, (0, 1))[..., features]


def sparse_dw_reference(
    x: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor,
    *, chunk_size: int = 64, compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> dW (d_out, d_in) and db (d_out,), zero in inactive chunks.

    If ``compact`` (A * chunk_size, d_in) and (A * chunk_size,).
    """
    x, dy = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x, dy))
    dy = torch.where(_mask(active_chunks, dy.shape[-1], chunk_size), dy, 0)
    if compact:
        dy = _pack(dy, active_chunks, chunk_size)
    return dy.t() @ x, dy.sum(0)


def sparse_dx_reference(
    dy: torch.Tensor, weight: torch.Tensor, active_chunks: torch.Tensor,
    *, chunk_size: int = 64,
) -> torch.Tensor:  # fmt: skip
    """-> dX (..., d_in), the sum of ``dY[..., c] W[c]`` over active chunks."""
    mask = _mask(active_chunks, weight.shape[0], chunk_size)
    return torch.where(mask, dy, 0) @ weight


# --- baselines ------------------------------------------------------------------------------------------------------


def python_loop_backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A loop over the chunks, three small products a chunk; reading the ids makes the host wait for the GPU.

    x (M, d_in), weight (d_out, d_in), dy (M, d_out) -> dW (d_out, d_in), db (d_out,), dX (M, d_in).
    """
    dw, dx = torch.zeros_like(weight), torch.zeros_like(x)
    db = dy.new_zeros(weight.shape[0])
    for chunk in active_chunks.tolist():
        features = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
        torch.mm(dy[:, features].t(), x, out=dw[features])
        db[features] = dy[:, features].sum(0)
        dx.addmm_(dy[:, features], weight[features])
    return dw, db, dx


def gather_cublas_backward(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, active_chunks: torch.Tensor, *, chunk_size: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The active columns of dY and rows of W copied together, two large products, dW copied back into zeros.

    x (M, d_in), weight (d_out, d_in), dy (M, d_out) -> dW (d_out, d_in), db (d_out,), dX (M, d_in). ``chunk_size`` has to
    divide d_out.
    """
    within = torch.arange(chunk_size, device=active_chunks.device)
    features = (active_chunks[:, None] * chunk_size + within).reshape(-1)
    packed_dy = dy.index_select(1, features)
    packed_w = weight.index_select(0, features)
    dw = torch.zeros_like(weight).index_copy_(0, features, packed_dy.t() @ x)
    db = dy.new_zeros(weight.shape[0])
    db.index_copy_(0, features, packed_dy.sum(0))
    return dw, db, packed_dy @ packed_w
