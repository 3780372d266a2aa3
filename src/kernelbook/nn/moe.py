"""Modules of mixture-of-experts layers, on :func:`gated_experts`: the experts with LoRA pairs, and a router before them."""

import math
from typing import Any

import torch

from kernelbook import arguments
from kernelbook.nn.experts import (
    ACTIVATIONS,
    Float8Tensor,
    LoRAPair,
    choose_experts,
    gated_experts,
    load_balancing_loss,
)
from kernelbook.nn.parameters import NF4Parametrization, quantizable, quantize_parameter, store_parameter, stored_weight
from kernelbook.tensors import reshaped

__all__ = [
    "Float8Tensor",
    "GatedExperts",
    "LoRAModule",
    "LoRAPair",
    "MoELayer",
    "NF4Parametrization",
    "choose_experts",
    "gated_experts",
    "load_balancing_loss",
    "quantize_parameter",
    "store_parameter",
    "stored_weight",
]


class LoRAModule(torch.nn.Module):
    """A module with LoRA pairs, whose scaling is part of the state dict: loading takes it over, as it does the pairs.

    Attributes:
        rank: of the pairs; 0 without any. scaling: what their products are multiplied by.
    """

    rank: int = 0
    scaling: float = 1.0

    def _add_pairs(self, rank: int, alpha: float | None, dtype: torch.dtype | None, weights: dict[str, Any]) -> None:
        """Give each of ``weights`` (..., N, K) a pair of parameters: ``<name>_a`` (..., r, K) and ``<name>_b`` (..., N, r)."""
        op = f"{type(self).__name__.removeprefix('Parametrized')}.add_lora"
        rank = arguments.integer(op, "rank", rank, least=1)
        arguments.check_choice(op, "dtype", dtype, (None, *arguments.FLOATING))
        if self.rank:
            raise ValueError(f"{op}: the module must have no LoRA pairs yet, got one with pairs of rank {self.rank}")
        scaling = 1.0 if alpha is None else arguments.number(op, "alpha", alpha) / rank
        pairs: dict[str, torch.nn.Parameter] = {}
        for name, weight in weights.items():
            *experts, n, k = weight.shape
            where: dict[str, Any] = {"device": weight.device, "dtype": dtype or weight.dtype}
            for part, shape in (("a", (rank, k)), ("b", (n, rank))):
                pairs[f"{name}_{part}"] = torch.nn.Parameter(torch.empty(*experts, *shape, **where))
            _draw_pair(pairs[f"{name}_a"], pairs[f"{name}_b"])
        for name, parameter in pairs.items():  # from here on nothing raises
            self.register_parameter(name, parameter)
        self.rank, self.scaling = rank, scaling

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.rank:
            destination[f"{prefix}scaling"] = torch.tensor(self.scaling, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, strict, missing, *_ = args
        if self.rank:
            found = state_dict.pop(f"{prefix}scaling", None)
            if found is not None:
                self.scaling = float(found)
            elif strict:
                missing.append(f"{prefix}scaling")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _draw_pair(a: torch.nn.Parameter | None, b: torch.nn.Parameter | None) -> None:
    """LoRA's beginning: a as a linear layer's weight, b zero."""
    if a is not None and b is not None:
        torch.nn.init.uniform_(a, -1 / math.sqrt(a.shape[-1]), 1 / math.sqrt(a.shape[-1]))
        torch.nn.init.zeros_(b)


class GatedExperts(LoRAModule):
    """The experts of a mixture-of-experts layer, on :func:`gated_experts`; a router is not part of it.

    The parameters are ``gate_up`` (E, 2 I, H) and ``down`` (E, H, I), drawn as ``torch.nn.Linear``'s are. With LoRA the
    state dict holds ``scaling`` too, and loading takes it over.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        activation: ``"silu"``, ``"gelu"``, ``"relu"`` or ``"swigluoai"``, see :func:`gated_experts`.
        device, dtype: of the parameters.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_a: torch.nn.Parameter | None
    gate_up_b: torch.nn.Parameter | None
    down_a: torch.nn.Parameter | None
    down_b: torch.nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "GatedExperts"
        arguments.check_choice(op, "activation", activation, tuple(ACTIVATIONS))
        self.num_experts = arguments.integer(op, "num_experts", num_experts, least=1)
        self.hidden_size = arguments.integer(op, "hidden_size", hidden_size, least=1)
        self.intermediate_size = arguments.integer(op, "intermediate_size", intermediate_size, least=1)
        self.activation, self.active = activation, "auto"
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, (n, k) in self._sizes().items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(num_experts, n, k, **where)))
            self.register_parameter(f"{name}_a", None)
            self.register_parameter(f"{name}_b", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as ``torch.nn.Linear`` does, and new LoRA pairs. Weights in 4 bits stay as they are."""
        for name in self._sizes():
            weight = stored_weight(self, name)
            if isinstance(weight, torch.Tensor):
                bound = 1 / math.sqrt(max(weight.shape[-1], 1))
                torch.nn.init.uniform_(weight, -bound, bound)
            _draw_pair(getattr(self, f"{name}_a"), getattr(self, f"{name}_b"))

    def _sizes(self) -> dict[str, tuple[int, int]]:
        hidden, intermediate = self.hidden_size, self.intermediate_size
        return {"gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate)}

    def add_lora(self, rank: int, alpha: float | None = None, dtype: torch.dtype | None = None) -> "GatedExperts":
        """Freeze the weights and give each expert a pair of ``rank``, scaled by ``alpha / rank`` (default 1).

        ``gate_up_a`` (E, r, H), ``gate_up_b`` (E, 2 I, r), ``down_a`` (E, r, I), ``down_b`` (E, H, r); b starts at zero.

        Raises ``TypeError`` for a rank or an alpha that is no number, and ``ValueError`` where there are pairs already, for a
        rank below 1 and for another dtype.
        """
        weights = {name: stored_weight(self, name) for name in self._sizes()}
        self._add_pairs(rank, alpha, dtype, weights)
        for weight in weights.values():
            if isinstance(weight, torch.Tensor):
                weight.requires_grad_(False)
        return self

    def quantize(self, *, block_size: int = 64, double_quant: bool = False) -> "GatedExperts":
        """Replace both weights by their 4-bit form, frozen."""
        for name in self._sizes():
            quantizable(self, name, block_size)
        for name in self._sizes():
            quantize_parameter(self, name, block_size=block_size, double_quant=double_quant)
        return self

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """x (..., H), expert_ids and gates (..., k) -> (..., H)."""

        def pair(a: torch.Tensor | None, b: torch.Tensor | None) -> LoRAPair | None:
            return None if a is None or b is None else LoRAPair(a, b, self.scaling)

        out = gated_experts(
            x.reshape(-1, x.shape[-1]),
            stored_weight(self, "gate_up"),
            stored_weight(self, "down"),
            expert_ids.reshape(-1, expert_ids.shape[-1]),
            gates.reshape(-1, gates.shape[-1]),
            activation=self.activation,
            gate_up_lora=pair(self.gate_up_a, self.gate_up_b),
            down_lora=pair(self.down_a, self.down_b),
            active=self.active,
        )
        # No view to autograd, since FSDP2 loses its hooks on one that is changed in place.
        return out if x.ndim == 2 else reshaped(out, *x.shape)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation!r}"
        )


class MoELayer(torch.nn.Module):
    """A router and its experts: each token goes to the ``slots`` experts of the highest probability.

    The router is a linear layer; its softmax is taken in float32 over all experts, and the weights of the chosen ones are
    scaled to sum to 1, as in Mixtral and Qwen3-MoE.

    Args:
        num_experts, hidden_size, intermediate_size: of the :class:`GatedExperts`.
        slots: k, how many experts a token goes to.
        activation: of the :class:`GatedExperts`.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        slots: int,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "MoELayer"
        num_experts = arguments.integer(op, "num_experts", num_experts, least=1)
        hidden_size = arguments.integer(op, "hidden_size", hidden_size, least=1)
        self.slots = arguments.integer(op, "slots", slots)
        if not 1 <= self.slots <= num_experts:
            raise ValueError(f"{op}: slots must be in [1, {num_experts}], got {slots}")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = torch.nn.Linear(hidden_size, num_experts, bias=False, **where)
        self.experts = GatedExperts(num_experts, hidden_size, intermediate_size, activation=activation, **where)

    def forward(self, x: torch.Tensor, *, with_loss: bool = False) -> Any:
        """(..., H) -> (..., H); ``with_loss``: and the :func:`load_balancing_loss` of these tokens, to add to the model's."""
        probabilities = self.router(x).softmax(dim=-1, dtype=torch.float32)
        gates, expert_ids = probabilities.topk(self.slots, dim=-1)
        out = self.experts(x, expert_ids, gates / gates.sum(dim=-1, keepdim=True))
        return (out, load_balancing_loss(probabilities, expert_ids)) if with_loss else out
