"""gpt-oss' activation: gate and up in turns, both clamped, a steeper sigmoid, and one more than up."""

import dataclasses
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher, operator
from kernelbook.memory import empty, tl_accumulator
from kernelbook.nn import kernels
from kernelbook.observed import observed, wants_gradient
from kernelbook.plans import KeptPlans

__all__ = ["ClampedSwiGLU"]


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
        if not 0 < self.limit < float("inf"):
            raise ValueError(f"ClampedSwiGLU: limit must be above 0 and finite, got {self.limit}")

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h (S, 2 I) -> (S, I) in its dtype, computed in float32 and rounded once. Only h is kept for the backward pass."""
        if torch.compiler.is_compiling():  # a compiler fuses these, and decides itself what to keep
            return self.reference(h)
        if observed(h):
            return _operator(h, self.alpha, self.limit)  # type: ignore[no-any-return]
        if wants_gradient(h):
            return _Activation.apply(h, self.alpha, self.limit)  # type: ignore[no-any-return]
        return _run(h, self.alpha, self.limit)

    def reference(self, h: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch."""
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is decided for h (S, 2 I) of a kind, forward and backward."""

    rows: int
    inner: int  # I
    forward: Launch
    backward: Launch
    grid: tuple[int, int]


_plans = KeptPlans[_Plan]()


def _plan(h: torch.Tensor, alpha: float, limit: float) -> _Plan:
    key = (h.shape, h.dtype, h.device, alpha, limit, runtime.compile_target)
    plan = _plans.get(key)
    if plan is None:
        if h.ndim != 2 or h.shape[1] % 2:
            raise ValueError(f"ClampedSwiGLU: h must have shape (S, 2 I), got {tuple(h.shape)}")
        rows, inner = h.shape[0], h.shape[1] // 2
        height = 1 if h.dtype == torch.float64 else kernels.ROWS  # its exponential takes many registers
        how: dict[str, Any] = {
            "ALPHA": alpha, "LIMIT": limit, "ACC": tl_accumulator(h.dtype), "ROWS": height, "BLOCK_I": kernels.BLOCK_I,
        }  # fmt: skip
        plan = _Plan(
            rows=rows, inner=inner, forward=launcher(kernels._clamped_swiglu_fwd_kernel, **how, num_warps=kernels.WARPS),
            backward=launcher(kernels._clamped_swiglu_bwd_kernel, **how, num_warps=kernels.WARPS),
            grid=(cdiv(rows, height), cdiv(inner, kernels.BLOCK_I)),
        )  # fmt: skip
        _plans.keep(key, plan)
    return plan


def _run(h: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    plan = _plan(h, alpha, limit)
    out = empty((plan.rows, plan.inner), h.dtype, h)
    if out.numel() > 0:
        plan.forward(plan.grid, h.contiguous(), out, plan.rows, plan.inner)
    return out


def _run_backward(h: torch.Tensor, dout: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    plan = _plan(h, alpha, limit)
    dh = empty(h.shape, h.dtype, h)
    if dh.numel() > 0:
        plan.backward(plan.grid, dout.contiguous(), h.contiguous(), dh, plan.rows, plan.inner)
    return dh


class _Activation(torch.autograd.Function):
    """The activation that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        _keep(ctx, (h, alpha, limit), None)
        return _run(h, alpha, limit)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [h] = ctx.saved_tensors
        by_operator = torch.is_grad_enabled() or observed(h, dout)
        return (_backward_operator if by_operator else _run_backward)(h, dout, ctx.alpha, ctx.limit), None, None


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    h, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(h)


_backward_operator = operator(
    "clamped_swiglu_backward(Tensor h, Tensor dout, float alpha, float limit) -> Tensor",
    outputs=lambda h, *_: empty(h.shape, h.dtype, h),
    run=_run_backward,
)
_operator = operator(
    "clamped_swiglu(Tensor h, float alpha, float limit) -> Tensor",
    outputs=lambda h, *_: empty((h.shape[0], h.shape[1] // 2), h.dtype, h),
    run=_run,
    setup_context=_keep,
    backward=_Activation.backward,
)
