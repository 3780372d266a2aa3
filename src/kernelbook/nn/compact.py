"""A sparse linear layer whose gradients hold the active rows only, for optimizers that leave the others alone."""

from typing import Any

import torch

from kernelbook import arguments
from kernelbook.linear import linear, product
from kernelbook.memory import empty
from kernelbook.operators import Op
from kernelbook.sparse_linear.op import products
from kernelbook.tensors import is_batched, matrix


def compact_sparse_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    active_chunks: torch.Tensor,
    *,
    chunk_size: int = 64,
    mode: str = "sparse_dw",
) -> torch.Tensor:
    """Compute :func:`kernelbook.sparse_linear` with gradients of weight and bias as ``torch.sparse_coo`` tensors of the active rows.

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
    chunk_size = arguments.integer(op, "chunk_size", chunk_size)
    lowered = isinstance(x, torch.Tensor) and arguments.autocast_dtype(x) is not None
    return _compact_linear(x, weight, bias, active_chunks, chunk_size, mode, lowered)  # type: ignore[no-any-return]


def _check(x: Any, weight: Any, bias: Any, ids: Any, chunk_size: int, mode: str, lowered: bool) -> None:
    op = "compact_sparse_linear"
    arguments.check_tensor(op, "x", x)
    arguments.check_tensor(op, "weight", weight, dims=2)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"{op}: x must have shape (..., {weight.shape[1]}), got {tuple(x.shape)}")
    if bias is not None:
        arguments.check_tensor(op, "bias", bias)
        arguments.check_shape(op, "bias", bias, weight.shape[:1])
    arguments.check_indices(op, "active_chunks", ids)
    arguments.check_same_device(op, x=x, weight=weight, bias=bias, active_chunks=ids)
    arguments.check_choice(op, "mode", mode, ("sparse_dw", "sparse_dw_dx"))
    arguments.integer(op, "chunk_size", chunk_size, least=16)
    if weight.shape[0] % chunk_size:
        raise ValueError(f"{op}: chunk_size must divide the features ({weight.shape[0]}), got {chunk_size}")
    if not lowered or x.dtype == torch.float64:
        arguments.check_same_dtype(op, x=x, weight=weight, bias=bias)


def _outputs(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return y, and for the backward pass the weight in the dtype of x where it has another."""
    keeps_low = others[-1] and weight.dtype != x.dtype
    return empty((*x.shape[:-1], weight.shape[0]), x.dtype, x), empty(weight.shape, x.dtype, x) if keeps_low else None


def _run(
    _: Any, outputs: tuple[Any, ...], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any
) -> None:
    y, low = outputs
    low = weight.to(x.dtype) if low is None else low.copy_(weight)
    product(matrix(x), low.t(), None if bias is None else bias.to(x.dtype), out=matrix(y))


@torch.autograd.function.once_differentiable  # the weight in another dtype has no gradient
def _gradients(call: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, weight and bias."""
    if is_batched(dy):
        raise NotImplementedError(
            "compact_sparse_linear: dy must be one gradient, since those of the weight are sparse tensors, got a batch "
            "(is_grads_batched=True)"
        )
    (x, weight, low), [ids], (dx_dtype, dw_dtype, db_dtype, _) = call.saved, call.kept, call.wanted
    low = weight if weight.dtype == x.dtype else low
    chunk, dense_dx = call.chunk_size, dx_dtype is not None and call.mode == "sparse_dw"
    needs = dx_dtype is not None and not dense_dx, dw_dtype is not None, db_dtype is not None
    dx, dw, db = products(dy, x, low, ids, chunk, weight.shape[0], False, False, True, needs)
    if dense_dx:
        dx = linear(dy, low.t())
    rows = (ids.long()[:, None] * chunk + torch.arange(chunk, device=ids.device)).reshape(1, -1)
    return (
        dx,
        _by_rows(rows, dw.to(dw_dtype), weight.shape) if dw_dtype else None,
        _by_rows(rows, db.to(db_dtype), weight.shape[:1]) if db_dtype else None,
    )


def _by_rows(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Checks would read the rows on the host; said so, or PyTorch warns that they are off.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(rows, values, shape)


_compact_linear = Op(
    "compact_sparse_linear(Tensor x, Tensor weight, Tensor? bias, Tensor active_chunks, SymInt chunk_size, str mode, "
    "bool lowered, bool record) -> (Tensor y, Tensor low)",
    check=_check,
    outputs=_outputs,
    plan=lambda *_: (),
    run=_run,
    saves=("x", "weight", "low"),
    keeps=("active_chunks",),
    autocast=("x",),  # to lower the weight outside would give a gradient of all rows
    backward=_gradients,
)
