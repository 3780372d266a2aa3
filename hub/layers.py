"""Layers without state: each forward pass reads the parameters of the layer that it stands in for."""

import torch

from kernelbook.layer_norm import layer_norm, rms_norm
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.moe import gated_experts
from kernelbook.nn.swiglu import ClampedSwiGLU

__all__ = ["Experts", "GptOssExperts", "LayerNorm", "LlamaRMSNorm", "RMSNorm"]


class _Layer(torch.nn.Module):
    """A layer that can be trained and compiled."""

    has_backward = True
    can_torch_compile = True


class LayerNorm(_Layer):
    """``torch.nn.LayerNorm``."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    normalized_shape: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape)


class RMSNorm(_Layer):
    """``torch.nn.RMSNorm`` over one dimension."""

    weight: torch.Tensor | None
    eps: float | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        y: torch.Tensor = rms_norm(x, self.weight, eps)
        return y


class LlamaRMSNorm(_Layer):
    """The RMSNorm of Llama, Qwen and their relatives in transformers."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)  # what transformers' gives
        y: torch.Tensor = rms_norm(hidden_states.to(dtype), self.weight, self.variance_epsilon)
        return y


class Experts(_Layer):
    """Experts with SwiGLU as transformers keeps them: ``gate_up_proj`` (E, 2 I, H) and ``down_proj`` (E, H, I)."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return gated_experts(hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights)


class GptOssExperts(_Layer):
    """gpt-oss' experts as transformers keeps them: ``gate_up_proj`` (E, H, 2 I) and ``down_proj`` (E, I, H), with biases.

    Or in the checkpoint's own 4 bits, with ``fp4_tensor(blocks, scales)`` in the place of each parameter.
    """

    gate_up_proj: torch.Tensor | NF4Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj: torch.Tensor | NF4Tensor
    down_proj_bias: torch.Tensor
    alpha: float
    limit: float

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        return gated_experts(
            hidden_states, self.gate_up_proj, self.down_proj, router_indices, routing_weights,
            activation=ClampedSwiGLU(self.alpha, self.limit),
            gate_up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias,
            transposed=isinstance(self.gate_up_proj, torch.Tensor),  # packed along K by checkpoints
        )  # fmt: skip
