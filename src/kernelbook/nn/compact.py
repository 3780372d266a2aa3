"""A sparse linear layer whose gradients hold the active rows only, for optimizers that leave the others alone."""

from typing import Any

import torch

from kernelbook import arguments
from kernelbook.linear import linear
from kernelbook.observed import in_mode_of_forward, is_batched, keep_mode
from kernelbook.sparse_linear import sparse_backward, sparse_dw

__all__ = ["compact_sparse_linear"]


def compact_sparse_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    active_chunks: torch.Tensor,
    *,
    chunk_size: int = 64,
    mode: str = "sparse_dw",
) -> torch.Tensor:
    """:func:`kernelbook.sparse_linear` with gradients of weight and bias as ``torch.sparse_coo`` tensors of the active rows.

    Zeros are neither written nor read, and an optimizer sees which rows have a gradient. The tensors have
    ``A * chunk_size`` rows each, in the order of the ids, and are not coalesced.

    Args:
        x, weight, bias, active_chunks, chunk_size: as :func:`kernelbook.sparse_linear`; ``chunk_size`` divides the features.
        mode: ``"sparse_dw"`` or ``"sparse_dw_dx"``.

    ``torch.compile`` breaks its graph here, and with ``fullgraph=True`` it raises.

    Returns:
        (..., d_out); under autocast in its dtype, while the gradients have the dtype of the weight.

    Raises:
        TypeError: as ``sparse_linear``.
        ValueError: ``chunk_size`` does not divide the features, or ``mode`` is another one; all else as ``sparse_linear``.
    """
    op = "compact_sparse_linear"
    if torch.compiler.is_compiling():
        # Its gradients are sparse tensors, which the compiler does not know: this call stays outside of its graphs.
        torch._dynamo.graph_break(
            msg=f"{op}: gradients of active rows only cannot be compiled into one graph; set compact_gradient=False, or "
            f"leave out fullgraph=True"
        )
    arguments.check_tensor(op, "x", x)
    arguments.check_tensor(op, "weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"{op}: weight must have two dimensions, got shape {tuple(weight.shape)}")
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"{op}: x must have shape (..., {weight.shape[1]}), got {tuple(x.shape)}")
    if bias is not None:
        arguments.check_tensor(op, "bias", bias)
        arguments.check_shape(op, "bias", bias, weight.shape[:1])
    arguments.check_indices(op, "active_chunks", active_chunks)
    arguments.check_same_device(op, x=x, weight=weight, bias=bias, active_chunks=active_chunks)
    if mode not in ("sparse_dw", "sparse_dw_dx"):
        raise ValueError(f"{op}: mode must be one of 'sparse_dw', 'sparse_dw_dx', got {mode!r}")
    chunk_size = arguments.integer(op, "chunk_size", chunk_size, least=16)
    if weight.shape[0] % chunk_size:
        raise ValueError(f"{op}: chunk_size must divide the features ({weight.shape[0]}), got {chunk_size}")
    dtype = arguments.autocast_dtype(x)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
    else:
        arguments.check_same_dtype(op, x=x, weight=weight, bias=bias)
    # Autocast would cast the weight outside, and its gradient back to all rows.
    y: torch.Tensor = _CompactLinear.apply(x, weight, bias, active_chunks, chunk_size, mode, x.dtype)
    return y


class _CompactLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        chunk_size: int,
        mode: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        low = weight.to(dtype)
        keep_mode(ctx)
        ctx.save_for_backward(x, low, ids)
        ctx.chunk_size, ctx.mode, ctx.dtype = chunk_size, mode, weight.dtype
        ctx.shapes = weight.shape, None if bias is None else bias.shape
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, low, None if bias is None else bias.to(dtype))

    @staticmethod
    @in_mode_of_forward
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if is_batched(dy):
            raise NotImplementedError(
                "compact_sparse_linear: dy must be one gradient, since those of the weight are sparse tensors, got a batch "
                "(is_grads_batched=True)"
            )
        x, weight, ids = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        chunk = ctx.chunk_size
        dx: torch.Tensor | None = None
        db: torch.Tensor | None = None
        if needs_dx and ctx.mode == "sparse_dw_dx":
            dw, db, dx = sparse_backward(x, weight, dy, ids, chunk_size=chunk, compact=True)
        else:
            with torch.autocast(dy.device.type, enabled=False):
                dw, db = sparse_dw(x, dy, ids, chunk_size=chunk, compact=True, with_bias=needs_db)
                dx = linear(dy, weight.t()) if needs_dx else None
        rows = (ids.long()[:, None] * chunk + torch.arange(chunk, device=ids.device)).reshape(1, -1)
        weight_shape, bias_shape = ctx.shapes
        return (
            dx,
            _by_rows(rows, dw.to(ctx.dtype), weight_shape) if needs_dw else None,
            _by_rows(rows, db.to(ctx.dtype), bias_shape) if needs_db and db is not None else None,
            None, None, None, None,
        )  # fmt: skip


def _by_rows(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Checks would read the rows on the host; said so, or PyTorch warns that they are off.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(rows, values, shape)
