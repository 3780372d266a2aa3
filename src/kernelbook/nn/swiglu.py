"""SwiGLU between the two products of a gated expert, and gpt-oss' variant: interleaved rows, both parts clamped."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher, operator
from kernelbook.memory import empty, tl_accumulator
from kernelbook.nn import kernels
from kernelbook.observed import in_mode_of_forward, keep_mode, observed, wants_gradient
from kernelbook.plans import KeptPlans

__all__ = ["ClampedSwiGLU", "swiglu"]


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """h (S, 2 I) -> silu(h[:, :I]) * h[:, I:]. Only h is kept for the backward pass."""
    if torch.compiler.is_compiling():  # a compiler fuses these, and decides itself what to keep
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _swiglu(_checked(h)) if observed(h) else _unobserved(h)


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
            return _clamped_swiglu(_checked(h, "ClampedSwiGLU"), self.alpha, self.limit)  # type: ignore[no-any-return]
        return _unobserved(h, self.alpha, self.limit)

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


def _checked(h: torch.Tensor, op: str = "swiglu") -> torch.Tensor:
    arguments.check_tensor(op, "h", h)
    if h.ndim != 2 or h.shape[1] % 2:
        raise ValueError(f"{op}: h must have shape (S, 2 I), got {tuple(h.shape)}")
    return h


def _plan(h: torch.Tensor, clamp: tuple[float, ...]) -> _Plan:
    """``clamp``: alpha and limit of :class:`ClampedSwiGLU`, or nothing."""
    key = (h.shape, h.dtype, h.device, clamp, runtime.plan_mode())
    plan = _plans.get(key)
    if plan is None:
        _checked(h, "ClampedSwiGLU" if clamp else "swiglu")
        rows, inner = h.shape[0], h.shape[1] // 2
        height = 1 if h.dtype == torch.float64 else kernels.ROWS  # its exponential takes many registers
        how: dict[str, Any] = dict(zip(("ALPHA", "LIMIT"), clamp, strict=False))
        how |= {"ACC": tl_accumulator(h.dtype), "ROWS": height, "BLOCK_I": kernels.BLOCK_I, "num_warps": kernels.WARPS}
        plan = _Plan(
            rows=rows, inner=inner,
            forward=launcher(kernels._clamped_swiglu_fwd_kernel if clamp else kernels._swiglu_fwd_kernel, **how),
            backward=launcher(kernels._clamped_swiglu_bwd_kernel if clamp else kernels._swiglu_bwd_kernel, **how),
            grid=(cdiv(rows, height), cdiv(inner, kernels.BLOCK_I)),
        )  # fmt: skip
        _plans.keep(key, plan)
    return plan


def _unobserved(h: torch.Tensor, *clamp: float) -> torch.Tensor:
    return _Activation.apply(h, *clamp) if wants_gradient(h) else _run(h, *clamp)


def _run(h: torch.Tensor, *clamp: float) -> torch.Tensor:
    plan = _plan(h, clamp)
    out = empty((plan.rows, plan.inner), h.dtype, h)
    if out.numel() > 0:
        plan.forward(plan.grid, h.contiguous(), out, plan.rows, plan.inner)
    return out


def _run_backward(h: torch.Tensor, dout: torch.Tensor, *clamp: float) -> torch.Tensor:
    plan = _plan(h, clamp)
    dh = empty(h.shape, h.dtype, h)
    if dh.numel() > 0:
        plan.backward(plan.grid, dout.contiguous(), h.contiguous(), dh, plan.rows, plan.inner)
    return dh


class _Activation(torch.autograd.Function):
    """The activations that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, *clamp: float) -> torch.Tensor:
        _keep(ctx, (h, *clamp), None)
        return _run(h, *clamp)

    @staticmethod
    @in_mode_of_forward
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [h] = ctx.saved_tensors
        if torch.is_grad_enabled() or observed(h, dout):
            dh = (_clamped_swiglu_backward if ctx.clamp else _swiglu_backward)(h, dout, *ctx.clamp)
        else:
            dh = _run_backward(h, dout, *ctx.clamp)
        return dh, *(None for _ in ctx.clamp)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    h, *ctx.clamp = inputs
    keep_mode(ctx)
    ctx.save_for_backward(h)


def _new_rows(h: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty((h.shape[0], h.shape[1] // 2), h.dtype, h)


def _new_gradient(h: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty(h.shape, h.dtype, h)


_swiglu_backward = operator(
    "swiglu_backward(Tensor h, Tensor dout) -> Tensor", outputs=_new_gradient, run=_run_backward
)
_swiglu = operator(
    "swiglu(Tensor h) -> Tensor", outputs=_new_rows, run=_run, setup_context=_keep, backward=_Activation.backward
)
_clamped_swiglu_backward = operator(
    "clamped_swiglu_backward(Tensor h, Tensor dout, float alpha, float limit) -> Tensor",
    outputs=_new_gradient,
    run=_run_backward,
)
_clamped_swiglu = operator(
    "clamped_swiglu(Tensor h, float alpha, float limit) -> Tensor",
    outputs=_new_rows,
    run=_run,
    setup_context=_keep,
    backward=_Activation.backward,
)
