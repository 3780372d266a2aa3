"""The low-rank update alone: the gradients of its factors in two ways, and the products that one of them keeps."""

import dataclasses

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.memory import empty
from kernelbook.moe_lora import grouped, kernels
from kernelbook.moe_lora.grouped import Layout, ShrinkPlan, Step
from kernelbook.moe_lora.op import Given, check
from kernelbook.moe_lora.routing import Routing
from kernelbook.observed import form
from kernelbook.plans import KeptPlans
from kernelbook.tensors import precision

__all__ = ["lora_gradients", "thin_products"]


def lora_gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
    saved: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dA (E, r, K) and dB (E, N, r) of :func:`moe_lora` alone, in either of the two ways; not differentiable.

    Args:
        x: (T, K). dy: (T*k, N), row t*k + j for slot j of token t. lora_a: (E, r, K). lora_b: (E, N, r).
        routing, scaling: as in :func:`moe_lora`.
        saved: U = scaling x A^T and D = scaling dy B as :func:`thin_products` gives them, which is how the backward pass
            does it; ``None``: every program computes anew what it needs of them, which is slower and needs no memory.

    Raises: as :func:`moe_lora`.
    """
    scaling = arguments.number("lora_gradients", "scaling", scaling)
    plan = _plan("lora_gradients", x, dy, lora_a, lora_b, routing)
    da, db = (empty(t.shape, t.dtype, t) for t in (lora_a, lora_b))
    if saved is not None:
        u, d = saved
        grouped.factors(plan.factors, routing, d, u, x, dy, None, da, db)
    else:
        grouped.recompute(plan.recompute_da, routing, dy, lora_b, x, scaling, da)
        grouped.recompute(plan.recompute_db, routing, x, lora_a.transpose(1, 2), dy, scaling, db.transpose(1, 2))
    return da, db


def thin_products(
    x: torch.Tensor,
    dy: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    routing: Routing,
    *,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """U = scaling x A^T and D = scaling dy B, each (T*k, padded rank) in sorted order; not differentiable.

    The rank is padded with zeros to a power of two of at least 16. Arguments as in :func:`lora_gradients`.
    """
    scaling = arguments.number("thin_products", "scaling", scaling)
    plan = _plan("thin_products", x, dy, lora_a, lora_b, routing)
    u, d = (empty((routing.rows, kernels.padded_rank(lora_a.shape[1])), x.dtype, x) for _ in range(2))
    if plan.shrink_u is not None and plan.shrink_d is not None:
        grouped.shrink(plan.shrink_u, routing, x, lora_a, u, scaling)
        grouped.shrink(plan.shrink_d, routing, dy, lora_b.transpose(1, 2), d, scaling)
    return u, d


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is decided for a kind of call of these two."""

    shrink_u: ShrinkPlan | None  # None: there are no rows
    shrink_d: ShrinkPlan | None
    factors: Step
    recompute_da: Step
    recompute_db: Step


_plans = KeptPlans[_Plan]()


def _plan(op: str, x: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, routing: Routing) -> _Plan:
    experts, rows = routing.num_experts, routing.rows
    key = (*map(form, (x, dy, a, b, routing.expert_ids)), experts, precision(x.dtype), runtime.plan_mode())
    plan = _plans.get(key)
    if plan is None:
        w = x.new_empty(()).expand(experts, x.shape[-1], b.shape[1])
        check(op, Given(x, w, a, b, None, None, routing, 1.0, "auto", False, False))
        arguments.check_shape(op, "dy", dy, (rows, b.shape[1]))
        arguments.check_same_dtype(op, x=x, dy=dy, lora_a=a, lora_b=b)
        of_x, of_dy, turned_a, turned_b = Layout(False, routing.slots), Layout(False, 1), *(t.mT for t in (a, b))
        plan = _Plan(
            shrink_u=grouped.shrink_plan(routing, x, of_x, a) if rows else None,
            shrink_d=grouped.shrink_plan(routing, dy, of_dy, turned_b) if rows else None,
            factors=grouped.factors_step(routing, x, of_x, of_dy, a.shape[1], b.shape[1], False),
            recompute_da=grouped.recompute_step(of_dy, b, of_x, x.shape[1]),
            recompute_db=grouped.recompute_step(of_x, turned_a, of_dy, dy.shape[1]),
        )
        _plans.keep(key, plan)
    return plan
