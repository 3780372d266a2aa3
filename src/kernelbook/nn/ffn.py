"""A feed-forward block that computes only the neurons it is told to."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from kernelbook import arguments
from kernelbook.scatter_ffn import ACTIVATIONS, activation_reference, dense_ffn, scatter_ffn

# Where the parts of a block are found, by the attributes that it has: (up, gate, down).
_LAYOUTS = (
    ("up_proj", "gate_proj", "down_proj"),  # Llama and its relatives
    ("c_fc", None, "c_proj"),  # GPT-2
    ("fc1", None, "fc2"),  # OPT, Phi, many vision models
    ("up_proj", None, "down_proj"),
)
_ACTS = ("act", "act_fn", "activation_fn")
# Largest hidden values of the rows on which two blocks are compared: some functions differ only far from zero.
_REACHES = tuple(2.0**i for i in range(-3, 11))


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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.check_choice("SparseFFN", "activation", activation, tuple(ACTIVATIONS))
        op, out_features = "SparseFFN", features if out_features is None else out_features
        features = arguments.integer(op, "features", features, least=0)
        neurons = arguments.integer(op, "neurons", neurons, least=0)
        out_features = arguments.integer(op, "out_features", out_features, least=0)
        self.features, self.num_neurons, self.out_features = features, neurons, out_features
        self.activation, self.router, self.neurons = activation, router, None

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_up, self.w_down = parameter(neurons, features), parameter(neurons, out_features)
        self.register_parameter("w_gate", parameter(neurons, features) if gated else None)
        self.register_parameter("b_up", parameter(neurons) if bias else None)
        self.register_parameter("b_gate", parameter(neurons) if bias and gated else None)
        self.register_parameter("b_down", parameter(out_features) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters as ``torch.nn.Linear`` does."""
        for name, parameter in self.named_parameters(recurse=False):
            bound = max(self.num_neurons if name.endswith("down") else self.features, 1) ** -0.5
            torch.nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_dense(
        cls,
        block: torch.nn.Module,
        *,
        router: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> "SparseFFN":
        """Return the same network with its weights repacked once, a row a neuron: new tensors, none shared with ``block``.

        Both are run on a batch whose hidden values reach from small to large ones, in float64 and with random weights, and
        have to agree: a block that computes anything else beside is refused. That takes a copy of it for the moment.

        Args:
            block: ``torch.nn.Sequential(Linear, activation, Linear)``, or a block with the attributes of transformers' GPT-2
                (``c_fc``, ``c_proj``), Phi (``fc1``, ``fc2``) or Llama (``gate_proj``, ``up_proj``, ``down_proj``). Its
                projections are ``torch.nn.Linear`` or transformers' ``Conv1D``.
            router: as in :class:`SparseFFN`.

        Raises:
            TypeError: ``block`` has none of these forms.
            ValueError: its activation is none of those that there are, it computes something else beside, or it is in training
                mode and drops out values.
        """
        up, gate, down, act = _parts(block)
        activation = _name_of(act)
        _compare(block, activation)
        w_up, b_up = _in_rows(up)
        w_gate, b_gate = (None, None) if gate is None else _in_rows(gate)
        w_down, b_down = _in_rows(down)
        new = torch.nn.utils.skip_init(
            cls,
            w_up.shape[1],
            w_up.shape[0],
            w_down.shape[0],
            gated=gate is not None,
            activation=activation,
            device=w_up.device,
            dtype=w_up.dtype,
        )
        new.router = router
        given = {"w_up": w_up, "w_gate": w_gate, "w_down": w_down.t(), "b_up": b_up, "b_gate": b_gate, "b_down": b_down}
        for name, value in given.items():
            if value is not None:
                copied = value.detach().clone(memory_format=torch.contiguous_format)
                setattr(new, name, torch.nn.Parameter(copied, value.requires_grad))
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
        )

    def extra_repr(self) -> str:
        gated = self.w_gate is not None
        return (
            f"features={self.features}, neurons={self.num_neurons}, out_features={self.out_features}, gated={gated}, "
            f"bias={self.b_down is not None}, activation={self.activation!r}"
        )


def _parts(block: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module | None, torch.nn.Module, Any]:
    """Return up, gate or ``None``, down, activation."""
    if isinstance(block, torch.nn.Sequential):
        layers = [layer for layer in block if not isinstance(layer, _DropoutNd | torch.nn.Identity)]
        if len(layers) == 3 and isinstance(layers[0], torch.nn.Linear) and isinstance(layers[2], torch.nn.Linear):
            return layers[0], None, layers[2], layers[1]
    for up, gate, down in _LAYOUTS:
        if all(isinstance(getattr(block, name, None), torch.nn.Module) for name in (up, gate, down) if name):
            act = next((getattr(block, name) for name in _ACTS if getattr(block, name, None)), None)
            return getattr(block, up), getattr(block, gate) if gate else None, getattr(block, down), act
    raise TypeError(
        "SparseFFN.from_dense: block must be Sequential(Linear, activation, Linear) or have gate_proj, up_proj and down_proj, "
        f"c_fc and c_proj, or fc1 and fc2; got {type(block).__name__}"
    )


def _in_rows(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight (out, in) and bias of a Linear, or of transformers' Conv1D, which stores (in, out)."""
    weight: Any = getattr(layer, "weight", None)
    linear, conv = isinstance(layer, torch.nn.Linear), type(layer).__name__ == "Conv1D"
    if not (linear or conv) or weight.ndim != 2 or weight.dtype not in arguments.FLOATING:
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise TypeError(
            f"SparseFFN.from_dense: projections must be torch.nn.Linear or transformers' Conv1D with a dense floating-point "
            f"weight, got {kind}; merge adapters into them, and dequantize them, first"
        )
    bias: Any = layer.bias
    return (weight if linear else weight.t()), bias


def _name_of(act: Any) -> str:
    """Return which of ours ``act`` computes, by its values: libraries have many classes for the same function."""
    if not callable(act):
        raise ValueError("SparseFFN.from_dense: block has no activation that can be called")
    z = torch.cat([torch.linspace(-6, 6, 97, dtype=torch.float64), torch.tensor(_REACHES), -torch.tensor(_REACHES)])
    with torch.no_grad():
        values = act(z.clone())
    for name in ACTIVATIONS:
        if torch.allclose(values, activation_reference(z, name), rtol=1e-12, atol=1e-9):
            return name
    raise ValueError(
        f"SparseFFN.from_dense: the block's activation must be one of {', '.join(ACTIVATIONS)}, got {act!r}"
    )


@torch.no_grad()
def _compare(block: torch.nn.Module, activation: str) -> None:
    """Raise unless ``block`` is the network that its parts make."""
    op = "SparseFFN.from_dense"
    twin = copy.deepcopy(block)
    if any(parameter.is_meta for parameter in twin.parameters()):
        twin = twin.to_empty(device="cpu")
    for module in twin.modules():
        if isinstance(module, _DropoutNd):
            if module.p and block.training:
                raise ValueError(
                    f"{op}: block must drop out nothing, got Dropout(p={module.p}); set it to 0, or call eval(), first"
                )
            module.p = 0.0
    twin = twin.double().train()  # whatever else training mode does has to show
    up, gate, down, act = _parts(twin)
    parts = [(part, *_in_rows(part)) for part in (up, gate, down) if part is not None]
    # The caller's random numbers go on as if nothing had been drawn. The parameters of a new model may be zeros, and hide what
    # it does. The rows' largest hidden values are as they are to be.
    with torch.random.fork_rng({parameter.device for parameter in twin.parameters() if parameter.is_cuda}):
        for parameter in twin.parameters():
            parameter.uniform_(-1, 1)
        for _, weight, _ in parts:
            weight.div_(weight.shape[1] ** 0.5)
        (_, w_up, b_up), (_, w_acted, _), (_, w_down, b_down) = parts[0], parts[-2], parts[-1]
        w_gate, b_gate = (None, None) if gate is None else parts[1][1:]
        x = torch.randn(len(_REACHES), w_up.shape[1], dtype=w_up.dtype, device=w_up.device)
        x *= torch.tensor(_REACHES).to(x)[:, None] / (x @ w_acted.t()).abs().amax(1, keepdim=True)
        try:
            theirs = twin(x[None].clone())
        except Exception as raised:  # whatever a block raises that wants other inputs
            raise ValueError(
                f"{op}: block must map (..., {x.shape[1]}) to (..., {w_down.shape[0]}), and {type(block).__name__} raised "
                f"{type(raised).__name__}: {raised}"
            ) from raised
    ours = dense_ffn(x, w_up, w_down.t(), w_gate=w_gate, b_up=b_up, b_gate=b_gate, b_down=b_down, activation=activation)
    error = float("inf")
    if isinstance(theirs, torch.Tensor) and theirs.shape == (1, *ours.shape):
        error = float(((theirs[0] - ours).norm(dim=1) / ours.norm(dim=1)).max())
    if not error <= 1e-6:
        used = {id(part) for part, _, _ in parts} | {id(act)}
        others = [f"{name} ({type(m).__name__})" for name, m in twin.named_modules() if name and id(m) not in used]
        beside = f"it has {', '.join(others)} beside them" if others else "look at its forward(), also in training mode"
        raise ValueError(
            f"{op}: block must compute {'act(gate) * up' if gate is not None else 'act(up)'}, then down, with activation "
            f"{activation!r} and nothing else, but the output of {type(block).__name__} differs by {error:.1g} "
            f"(relative): {beside}"
        )
