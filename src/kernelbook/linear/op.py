"""The linear layer that is the same bits in any batch (batch-invariant) within ``same_bits``: function and operator."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import cdiv, launcher
from kernelbook.linear import kernels
from kernelbook.memory import empty, tl_accumulator
from kernelbook.operators import Op
from kernelbook.tensors import matrix, precision, strided


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, whose rows are the same bits in any batch within :func:`kernelbook.same_bits`.

    Outside of it, it is PyTorch's; and under ``torch.compile``, within it too, since Dynamo cannot see the mode.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), the dtype of ``x``, any strides.
        bias: (N,), the dtype of ``x``, or ``None``.

    Returns:
        (..., N) in the dtype of ``x``, under autocast in its dtype; summed in float32 (float64 for float64) and rounded once.
        float32 products use tf32 where ``torch.backends.cuda.matmul.allow_tf32`` says so. Differentiable. Within
        ``same_bits`` rows of the gradient of ``x`` are the same bits in any batch too; the gradients of ``weight`` and
        ``bias`` add up over the batch, by PyTorch.

    Raises:
        TypeError, ValueError: within ``same_bits``: a dtype, a shape or a device is not as above.
    """
    if is_dynamo_compiling() or not runtime.in_same_bits():
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias)  # type: ignore[no-any-return]


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor) -> torch.Tensor:
    """Fill out (M, N) with x (M, K) w (K, N) + bias: by these kernels within ``same_bits``, else by PyTorch."""
    if not runtime.in_same_bits():
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    (m, k), n = x.shape, w.shape[1]
    if out.numel() == 0:
        return out
    config = kernels.tiles(m, n, x.element_size(), runtime.properties(x.device))
    block_m, block_n, block_k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    launch = launcher(
        kernels._linear_fwd_kernel, HAS_BIAS=bias is not None, ACC=tl_accumulator(x.dtype), PRECISION=precision(x.dtype),
        EVEN_K=k % block_k == 0, **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    grid = (cdiv(m, block_m) * cdiv(n, block_n),)
    launch(grid, x, *x.stride(), w, *w.stride(), *strided(bias, 1, out), out, *out.stride(), m, n, k)
    return out


# --- the operator ---------------------------------------------------------------------------------------------------


def _check(x: Any, weight: Any, bias: Any) -> None:
    arguments.check_linear("linear", x, "weight", weight)
    arguments.check_alike("linear", x, bias=(bias, weight.shape[:1]))


def _run(_: Any, outputs: tuple[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: Any) -> None:
    with runtime.same_bits():  # wherever the operator runs, as in a graph that was traced within
        product(matrix(x), weight.t(), bias, out=matrix(outputs[0]))


def _gradients(call: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (x, weight), (needs_dx, needs_dw, needs_db) = call.saved, (dtype is not None for dtype in call.wanted)
    rows = matrix(dy)
    return (
        _linear(dy, weight.t(), None) if needs_dx else None,
        rows.t() @ matrix(x) if needs_dw else None,
        rows.sum(0) if needs_db else None,
    )


_linear = Op(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    check=_check,
    outputs=lambda x, weight, _: (empty((*x.shape[:-1], weight.shape[0]), x.dtype, x),),
    plan=lambda *_: (),  # of tiles and grid :func:`product` takes care
    run=_run,
    saves=("x", "weight"),
    autocast=("x", "weight", "bias"),
    backward=_gradients,
)
