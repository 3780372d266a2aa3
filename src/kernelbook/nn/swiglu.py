"""SwiGLU between the two products of a gated expert, and gpt-oss' variant: interleaved rows, both parts clamped."""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook import arguments  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.memory import empty, tl_accumulator
from kernelbook.nn import kernels
from kernelbook.operators import Op


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """Return silu(h[:, :I]) * h[:, I:] (S, I) of h (S, 2 I). Only h is kept for the backward pass."""
    if torch.compiler.is_compiling():  # a compiler fuses these, and decides itself what to keep
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _swiglu(h, None, None)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """``g * sigmoid(alpha g) * (u + 1)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.

    The rows (S, 2 I) have gate and up in turns: ``gate = h[:, ::2]``, ``up = h[:, 1::2]`` (OpenAI, "gpt-oss-120b & gpt-oss-20b
    Model Card", 2025, and its published code). An ``activation`` of :func:`gated_experts`.

    Attributes:
        alpha: of the sigmoid.
        limit: above 0; what is larger counts as the limit, and passes no gradient on.

    Raises:
        TypeError, ValueError: ``alpha`` or ``limit`` is no finite number, or ``limit`` not above 0.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            object.__setattr__(self, name, arguments.number("ClampedSwiGLU", name, getattr(self, name)))
        if not math.isfinite(self.alpha):
            raise ValueError(f"ClampedSwiGLU: alpha must be finite, got {self.alpha}")
        if not 0 < self.limit < math.inf:
            raise ValueError(f"ClampedSwiGLU: limit must be above 0 and finite, got {self.limit}")

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h (S, 2 I) -> (S, I) in its dtype, computed in float32 and rounded once. Only h is kept for the backward pass."""
        if torch.compiler.is_compiling():  # a compiler fuses these, and decides itself what to keep
            return self.reference(h)
        return _swiglu(h, self.alpha, self.limit)  # type: ignore[no-any-return]

    def reference(self, h: torch.Tensor) -> torch.Tensor:
        """Return the same in plain PyTorch."""
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


# --- the operator: SwiGLU, or with alpha and limit the clamped one -----------------------------------------------------


def _check(h: Any, alpha: float | None, limit: float | None) -> None:
    op = "swiglu" if alpha is None else "ClampedSwiGLU"
    arguments.check_tensor(op, "h", h)
    if h.ndim != 2 or h.shape[1] % 2:
        raise ValueError(f"{op}: h must have shape (S, 2 I), got {tuple(h.shape)}")


def _plan(h: torch.Tensor, alpha: float | None, limit: float | None) -> tuple[Launch, tuple[int, int]] | None:
    rows, inner = h.shape[0], h.shape[1] // 2
    if rows * inner == 0:
        return None
    height = 1 if h.dtype == torch.float64 else kernels.ROWS  # its exponential takes many registers
    launch = launcher(
        kernels._swiglu_kernel, ALPHA=alpha, LIMIT=limit, ACC=tl_accumulator(h.dtype), ROWS=height, BLOCK_I=kernels.BLOCK_I,
        num_warps=kernels.WARPS, repeatable=True,
    )  # fmt: skip
    return launch, (cdiv(rows, height), cdiv(inner, kernels.BLOCK_I))


def _run(plan: Any, outputs: tuple[torch.Tensor], h: torch.Tensor, *_: Any) -> None:
    launch, grid = plan
    launch(grid, None, h.contiguous(), outputs[0], *outputs[0].shape)


def _run_backward(plan: Any, outputs: tuple[torch.Tensor], h: torch.Tensor, dout: torch.Tensor, *_: Any) -> None:
    launch, grid = plan
    launch(grid, dout.contiguous(), h.contiguous(), outputs[0], *dout.shape)


def _gradients(call: Any, dout: torch.Tensor) -> tuple[torch.Tensor]:
    return (_swiglu_backward(*call.saved, dout, call.alpha, call.limit),)


_swiglu = Op(
    "swiglu(Tensor h, float? alpha, float? limit) -> Tensor",
    check=_check,
    outputs=lambda h, *_: (empty((h.shape[0], h.shape[1] // 2), h.dtype, h),),
    plan=_plan,
    run=_run,
    saves=("h",),
    backward=_gradients,
)
_swiglu_backward = Op(
    "swiglu_backward(Tensor h, Tensor dout, float? alpha, float? limit) -> Tensor",
    check=lambda *_: None,
    outputs=lambda h, *_: (empty(h.shape, h.dtype, h),),
    plan=lambda h, _, alpha, limit: _plan(h, alpha, limit),
    run=_run_backward,
)
