"""A feed-forward block that computes only the neurons it is told to."""

from collections.abc import Callable
from typing import Any

import torch

from kernelbook.scatter_ffn import ACTIVATIONS, activation_reference, scatter_ffn

__all__ = ["SparseFFN"]

# Where the parts of a block are found, by the attributes that it has: (up, gate, down).
_LAYOUTS = (
    ("up_proj", "gate_proj", "down_proj"),  # Llama and its relatives
    ("c_fc", None, "c_proj"),  # GPT-2
    ("fc1", None, "fc2"),  # OPT, Phi, many vision models
    ("up_proj", None, "down_proj"),
)


class SparseFFN(torch.nn.Module):
    """``act(x W_up^T + b_up) W_down + b_down``, or with a gate, for the chosen neurons: :func:`kernelbook.scatter_ffn`.

    Set ``block.neurons`` before a forward pass, or give the block a ``router``. With neither, all neurons count and the
    block is a dense one.

    Args:
        features: K, the size of the input's last dimension.
        neurons: N, how many hidden neurons there are.
        out_features: K_out; ``None``: as ``features``.
        gated: multiply by a second up projection, as in Llama.
        bias: of all projections.
        activation: ``"relu"``, ``"leaky_relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
        router: called with the input (..., K), returns the neurons (L,) for it. A module is registered as a child.
        deterministic: as in :func:`kernelbook.scatter_ffn`.
        device, dtype: of the parameters.

    Attributes:
        w_up, w_gate, w_down: (N, K), (N, K) or ``None``, (N, K_out): a row a neuron.
        b_up, b_gate, b_down: (N,), (N,), (K_out,), or ``None``.
        neurons: (L,) int64 or int32 ids, or ``None``. Not part of the state dict.
    """

    neurons: torch.Tensor | None
    w_gate: torch.nn.Parameter | None
    b_up: torch.nn.Parameter | None
    b_gate: torch.nn.Parameter | None
    b_down: torch.nn.Parameter | None

    def __init__(
        self,
        features: int,
        neurons: int,
        out_features: int | None = None,
        *,
        gated: bool = False,
        bias: bool = False,
        activation: str = "relu",
        router: Callable[[torch.Tensor], torch.Tensor] | None = None,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"SparseFFN: activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}"
            )
        out_features = features if out_features is None else out_features
        self.features, self.num_neurons, self.out_features = features, neurons, out_features
        self.activation, self.router, self.deterministic = activation, router, deterministic
        self.neurons = None

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_up, self.w_down = parameter(neurons, features), parameter(neurons, out_features)
        self.register_parameter("w_gate", parameter(neurons, features) if gated else None)
        self.register_parameter("b_up", parameter(neurons) if bias else None)
        self.register_parameter("b_gate", parameter(neurons) if bias and gated else None)
        self.register_parameter("b_down", parameter(out_features) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters as ``torch.nn.Linear`` does."""
        for parameter, fan_in in (
            (self.w_up, self.features),
            (self.w_gate, self.features),
            (self.b_up, self.features),
            (self.b_gate, self.features),
            (self.w_down, self.num_neurons),
            (self.b_down, self.num_neurons),
        ):
            if parameter is not None:
                bound = max(fan_in, 1) ** -0.5
                torch.nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_dense(
        cls,
        block: torch.nn.Module,
        *,
        activation: str | None = None,
        router: Callable[[torch.Tensor], torch.Tensor] | None = None,
        deterministic: bool = False,
    ) -> "SparseFFN":
        """The same network with its weights repacked once, a row a neuron: new tensors, none shared with ``block``.

        Args:
            block: ``torch.nn.Sequential(Linear, activation, Linear)`` (dropout layers are passed over), or a block with the
                attributes of transformers' GPT-2 (``c_fc``, ``c_proj``), OPT (``fc1``, ``fc2``) or Llama (``gate_proj``,
                ``up_proj``, ``down_proj``). Its projections are ``torch.nn.Linear`` or transformers' ``Conv1D``.
            activation: its name; ``None``: found by comparing the block's own with each that there is.
            router, deterministic: as in :class:`SparseFFN`.

        Raises:
            TypeError: ``block`` has none of these forms.
            ValueError: its activation is none of those that there are.
        """
        up, gate, down, act = _parts(block)
        w_up, b_up = _in_rows(up)
        w_gate, b_gate = (None, None) if gate is None else _in_rows(gate)
        w_down, b_down = _in_rows(down)
        new = cls(
            w_up.shape[1],
            w_up.shape[0],
            w_down.shape[0],
            gated=gate is not None,
            activation=activation or _name_of(act),
            router=router,
            deterministic=deterministic,
            device=w_up.device,
            dtype=w_up.dtype,
        )
        for name, value in (
            ("w_up", w_up),
            ("w_gate", w_gate),
            ("w_down", w_down.t()),
            ("b_up", b_up),
            ("b_gate", b_gate),
            ("b_down", b_down),
        ):
            if value is not None:
                copy = value.detach().clone(memory_format=torch.contiguous_format)
                setattr(new, name, torch.nn.Parameter(copy, requires_grad=value.requires_grad))
        return new.train(block.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., K_out)."""
        neurons = self.neurons if self.router is None else self.router(input)
        return scatter_ffn(
            input,
            self.w_up,
            self.w_down,
            neurons,
            w_gate=self.w_gate,
            b_up=self.b_up,
            b_gate=self.b_gate,
            b_down=self.b_down,
            activation=self.activation,
            deterministic=self.deterministic,
        )

    def extra_repr(self) -> str:
        gated = self.w_gate is not None
        return (
            f"features={self.features}, neurons={self.num_neurons}, out_features={self.out_features}, gated={gated}, "
            f"bias={self.b_down is not None}, activation={self.activation!r}"
        )


def _parts(block: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module | None, torch.nn.Module, Any]:
    """-> up, gate or ``None``, down, activation."""
    if isinstance(block, torch.nn.Sequential):
        layers = [layer for layer in block if not isinstance(layer, torch.nn.Dropout | torch.nn.Identity)]
        if len(layers) == 3 and isinstance(layers[0], torch.nn.Linear) and isinstance(layers[2], torch.nn.Linear):
            return layers[0], None, layers[2], layers[1]
    for up, gate, down in _LAYOUTS:
        if all(isinstance(getattr(block, name, None), torch.nn.Module) for name in (up, gate, down) if name):
            act = getattr(block, "act", None) or getattr(block, "act_fn", None) or getattr(block, "activation_fn", None)
            return getattr(block, up), getattr(block, gate) if gate else None, getattr(block, down), act
    raise TypeError(
        "SparseFFN.from_dense: block must be Sequential(Linear, activation, Linear) or have gate_proj, up_proj and down_proj, "
        f"c_fc and c_proj, or fc1 and fc2; got {type(block).__name__}"
    )


def _in_rows(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> weight (out, in) and bias of a Linear, or of transformers' Conv1D, which stores (in, out)."""
    weight: Any = layer.weight
    bias: Any = layer.bias
    if isinstance(layer, torch.nn.Linear):
        return weight, bias
    if type(layer).__name__ == "Conv1D" and weight.ndim == 2:
        return weight.t(), bias
    raise TypeError(f"SparseFFN.from_dense: projections must be Linear or Conv1D, got {type(layer).__name__}")


def _name_of(act: Any) -> str:
    """Which of ours ``act`` computes, by its values: libraries have many classes for the same function."""
    if not callable(act):
        raise ValueError("SparseFFN.from_dense: block has no activation that can be called; name it with activation=")
    z = torch.linspace(-6, 6, 97, dtype=torch.float64)
    with torch.no_grad():
        values = act(z)
    for name in ACTIVATIONS:
        if torch.allclose(values, activation_reference(z, name), rtol=0, atol=1e-9):
            return name
    raise ValueError(
        f"SparseFFN.from_dense: the block's activation must be one of {', '.join(ACTIVATIONS)}, got {act!r}"
    )
