"""A mixture of gated expert networks whose frozen weights may be dense, float8 or 4-bit, with a LoRA pair per expert.

``out[t] = sum_j gates[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t]))`` with ``e = expert_ids[t, j]``. Both products are
:func:`kernelbook.moe_lora`. Rows are sorted by expert once: the first product leaves its rows in expert order, the
activation takes them as they are, and the second product reads them so and writes tokens, weighted and summed.

4-bit weights are decoded on their way into the products. Where experts have so many rows that this is slower
(:func:`kernelbook.packed.products.decodes_on_the_way`), and float8 ones always, they become dense just before each product, for
the experts that the batch uses, and are dropped right after it. The backward pass does not keep them: it makes them again.
:func:`choose_experts` says which experts these are.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernelbook import arguments  # before Triton, which it sets up
from kernelbook.moe_lora import Routing, moe_lora, route
from kernelbook.nf4 import NF4Tensor, nf4_dequantize
from kernelbook.nn.swiglu import ClampedSwiGLU, swiglu
from kernelbook.packed.products import decodes_on_the_way
from kernelbook.tensors import check_versions, is_transformed, with_versions

ACTIVE = ("auto", "all", "bound")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class LoRAPair(NamedTuple):
    """The low-rank matrices added to an expert's W (N, K): ``scaling * b[e] @ a[e]``.

    ``a`` is (E, r, K) and ``b`` is (E, N, r), of any strides and floating-point dtype.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Float8Tensor:
    """Experts in float8 with scales: the element at (e, i, j) is ``values[e, i, j] * scale[e, i // bi, j // bj]``.

    Attributes:
        values: (E, rows, cols), float8_e4m3fn or float8_e5m2.
        scale: (E, ceil(rows / bi), ceil(cols / bj)) floating point or float8_e8m0fnu; (E, 1, 1) is one scale an expert.
        block: (bi, bj), the rows and columns that share a scale; ``None``: as many as the shape of ``scale`` says.

    Raises:
        TypeError, ValueError: the parts do not fit together.
    """

    values: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        arguments.check_dtype("Float8Tensor", "values", self.values, FLOAT8)
        arguments.check_dtype("Float8Tensor", "scale", self.scale, (*arguments.FLOATING, torch.float8_e8m0fnu))
        for name, value in (("values", self.values), ("scale", self.scale)):
            if value.ndim != 3:
                raise ValueError(f"Float8Tensor: {name} must have three dimensions, got shape {tuple(value.shape)}")
        for size in self.block or ():
            arguments.integer("Float8Tensor", "block", size, "two integers or None", least=1)
        num_experts, rows, cols = self.values.shape
        bi, bj = self.tile
        arguments.check_shape("Float8Tensor", "scale", self.scale, (num_experts, -(-rows // bi), -(-cols // bj)))
        arguments.check_same_device("Float8Tensor", values=self.values, scale=self.scale)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        if self.block is not None:
            return self.block
        (_, rows, cols), (_, across, along) = self.values.shape, self.scale.shape
        return max(-(-rows // max(across, 1)), 1), max(-(-cols // max(along, 1)), 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes

    def dequantize(self, experts: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return the experts that are asked for (``None``: all), (A, rows, cols) in ``dtype``, rounded once."""
        # Indexing is not there for float8; its bytes are as good.
        values, scale = self.values, self.scale
        if experts is not None:
            values = values.view(torch.uint8).index_select(0, experts).view(values.dtype)
            scale = scale.float().index_select(0, experts)
        (bi, bj), (num, rows, cols) = self.tile, values.shape
        out = values.to(dtype)
        # Products are in float32 and rounded into place.
        if rows % bi == 0 and cols % bj == 0:
            tiles = out.view(num, rows // bi, bi, cols // bj, bj)
            torch.mul(tiles, scale.float()[:, :, None, :, None], out=tiles)
        else:
            spread = scale.float().repeat_interleave(bi, 1)[:, :rows].repeat_interleave(bj, 2)[:, :, :cols]
            torch.mul(out, spread, out=out)
        return out


Weight = torch.Tensor | NF4Tensor | Float8Tensor


# --- which experts --------------------------------------------------------------------------------------------------


def choose_experts(
    expert_ids: torch.Tensor, num_experts: int, active: str = "auto"
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return which experts to make dense for this batch, and the ids that stand for them. The host never waits.

    ``"all"``: every expert; nothing is computed. ``"bound"``: one place for each (token, slot) pair, in the pairs' order; no
    batch needs more, and the host needs to know nothing. An expert that two pairs name becomes dense twice. ``"auto"``:
    ``"bound"`` where that is at most half of the experts, else ``"all"``.

    Args:
        expert_ids: (T, k) int64 or int32; ``num_experts`` marks a slot to skip, and so does every id out of range.
        num_experts: E.
        active: see above.

    Returns:
        ``experts``, (A,) ids in [0, E), or ``None`` for all; and ``expert_ids`` renamed: ``i`` stands for ``experts[i]``
        and ``A`` for a slot to skip.

    Raises:
        ValueError: ``active`` is no such word.
    """
    arguments.check_choice("choose_experts", "active", active, ACTIVE)
    pairs = expert_ids.numel()
    if active == "auto":
        active = "bound" if 2 * pairs <= num_experts else "all"
    if active == "all" or pairs >= num_experts or num_experts <= 1 or pairs == 0:
        return None, expert_ids
    ids = expert_ids.reshape(-1)
    places = torch.arange(pairs, dtype=ids.dtype, device=ids.device)
    experts = ids.clamp(0, num_experts - 1)
    return experts, torch.where(ids == experts, places, pairs).view_as(expert_ids)


def _dequantize(weight: NF4Tensor | Float8Tensor, experts: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, NF4Tensor):
        return nf4_dequantize(weight, experts=experts, dtype=dtype)
    return weight.dequantize(experts, dtype)


@contextlib.contextmanager
def recompute_in_backward(
    w: torch.Tensor, make: Callable[[], torch.Tensor], *sources: torch.Tensor | None
) -> Iterator[None]:
    """Have autograd keep nothing of ``w`` within the context: it is made again, from the same ``sources``."""
    if is_transformed():
        yield
        return
    storage = w.untyped_storage()._cdata  # the object: the address of all that is empty is 0
    # Hooks do not stack: the rest goes to those that were there, such as those
    # of activation checkpointing.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    keep, give = outer if outer is not None else (with_versions, _unchanged)
    kept_sources = with_versions(*sources)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata == storage:
            return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return _Kept(keep(tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Kept):
            return give(packed.value)
        check_versions(kept_sources)
        return make().as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Kept(NamedTuple):
    value: Any


def _unchanged(kept: Any) -> torch.Tensor:
    """Return what PyTorch does without hooks, and leaves to those that there are."""
    check_versions(kept)
    [(tensor, _)] = kept
    return tensor  # type: ignore[no-any-return]


# --- the activation -------------------------------------------------------------------------------------------------


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up

    return apply


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": swiglu,
    "gelu": _gated(F.gelu),
    "relu": _gated(F.relu),
    "swigluoai": ClampedSwiGLU(),
}


# --- the block ------------------------------------------------------------------------------------------------------


def gated_experts(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    expert_ids: torch.Tensor,
    gates: torch.Tensor,
    *,
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "silu",
    gate_up_lora: LoRAPair | None = None,
    down_lora: LoRAPair | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    post_expert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    active: str = "auto",
) -> torch.Tensor:
    """``sum_j gates[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t]))``, ``e = expert_ids[t, j]``.

    Gradients reach ``x``, ``gates``, both LoRA pairs, the biases, and dense weights that require one. The host never waits
    for the device.

    Args:
        x: (T, H), float32, float16 or bfloat16.
        gate_up: (E, 2 I, H), the gate's rows before the up projection's: a tensor in the dtype of ``x``, an
            ``NF4Tensor`` or a ``Float8Tensor``.
        down: (E, H, I), likewise.
        expert_ids: (T, k) int64 or int32 in [0, E]; E marks a slot to skip. Checked as by :func:`kernelbook.route`.
        gates: (T, k), the weight of each slot, floating point.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``, of the gate; ``"swigluoai"``, gpt-oss' own, with the rows of gate and
            up in turns (:class:`kernelbook.nn.ClampedSwiGLU` for other constants); or a function from the first product's
            rows (S, 2 I) to (S, I), for other gates and for experts without one.
        gate_up_lora, down_lora: pairs for the two products, for (N, K) = (2 I, H) and (H, I).
        gate_up_bias, down_bias: (E, 2 I) and (E, H).
        transposed: the weights are stored the other way around, (E, H, 2 I) and (E, I, H).
        post_expert: applied to the second product's rows (T k, H) before they are weighted.
        active: which experts of compressed weights become dense, see :func:`choose_experts`; with ``"auto"`` none of
            4-bit weights where they are decoded within the product.

    Returns:
        (T, H) in the dtype of ``x``.

    Raises:
        TypeError, ValueError: an argument is of another kind, shape or dtype.
    """
    op = "gated_experts"
    arguments.check_tensor(op, "x", x, dtypes=arguments.FLOATING)
    arguments.check_tensor(op, "expert_ids", expert_ids, dtypes=(torch.int64, torch.int32))
    arguments.check_tensor(op, "gates", gates)
    if x.ndim != 2:
        raise ValueError(f"{op}: x must have shape (T, H), got {tuple(x.shape)}")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: expert_ids must have shape ({x.shape[0]}, k), got {tuple(expert_ids.shape)}")
    arguments.check_shape(op, "gates", gates, expert_ids.shape)
    arguments.check_same_device(op, x=x, expert_ids=expert_ids, gates=gates)
    arguments.check_choice(op, "active", active, ACTIVE)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, torch.Tensor | NF4Tensor | Float8Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, NF4Tensor or Float8Tensor, got {type(weight).__name__}")
        if isinstance(weight, torch.Tensor):
            arguments.check_tensor(op, name, weight)
            arguments.check_same_device(op, x=x, **{name: weight})
        if len(weight.shape) != 3 or weight.shape[0] != gate_up.shape[0]:
            raise ValueError(f"{op}: {name} must have shape ({gate_up.shape[0]}, N, K), got {tuple(weight.shape)}")
    k_dim, n_dim = (1, 2) if transposed else (2, 1)
    if gate_up.shape[k_dim] != x.shape[1] or down.shape[n_dim] != x.shape[1]:
        raise ValueError(
            f"{op}: gate_up and down must take and give {x.shape[1]} features, got shapes {tuple(gate_up.shape)} and "
            f"{tuple(down.shape)}{' (transposed)' if transposed else ''}"
        )
    for name, lora in (("gate_up_lora", gate_up_lora), ("down_lora", down_lora)):
        if lora is not None and not isinstance(lora, LoRAPair):
            raise TypeError(f"{op}: {name} must be a kernelbook.nn.LoRAPair or None, got {type(lora).__name__}")
        for part, tensor in zip("ab", lora or (), strict=False):
            arguments.check_tensor(op, f"{name}.{part}", tensor)
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None:
            arguments.check_tensor(op, name, bias)
    if isinstance(activation, str):
        arguments.check_choice(op, "activation", activation, tuple(ACTIVATIONS))
        if gate_up.shape[n_dim] != 2 * down.shape[k_dim]:
            raise ValueError(
                f"{op}: gate_up must give twice the features that down takes ({down.shape[k_dim]}), "
                f"got {gate_up.shape[n_dim]}"
            )
        activation = ACTIVATIONS[activation]

    num_experts = gate_up.shape[0]
    dtype = arguments.autocast_dtype(x) or x.dtype
    compressed = not (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor))
    if compressed and not torch.compiler.is_compiling():  # renamed ids are all in range
        arguments.check_index_values(op, "expert_ids", expert_ids, num_experts + 1)
    packed = all(isinstance(weight, torch.Tensor | NF4Tensor) for weight in (gate_up, down))
    whole = all(weight.shape[-1] % 32 == 0 for weight in (gate_up, down))  # rows that the products can decode
    decoded = active == "auto" and packed and whole and decodes_on_the_way(expert_ids.numel(), num_experts)
    dense = compressed and not decoded
    chosen, ids = choose_experts(expert_ids, num_experts, active) if dense else (None, expert_ids)
    routing = route(ids, num_experts if chosen is None else chosen.shape[0])

    def product(
        rows: torch.Tensor, weight: Weight, lora: LoRAPair | None, bias: torch.Tensor | None, **how: Any
    ) -> torch.Tensor:
        return _product(
            rows.to(dtype), weight, lora, bias, routing, chosen, transposed=transposed, decoded=decoded, **how
        )

    hidden = activation(product(x, gate_up, gate_up_lora, gate_up_bias, grouped_out=True))
    if post_expert is None:
        weights = gates if gates.dtype in (dtype, torch.float32) else gates.float()
        return product(hidden, down, down_lora, down_bias, grouped_in=True, gates=weights).to(x.dtype)
    rows = post_expert(product(hidden, down, down_lora, down_bias, grouped_in=True))
    # A skipped slot is no part of the sum, whatever the function makes of its zeros.
    weights = gates.masked_fill((expert_ids < 0) | (expert_ids >= num_experts), 0)
    return (rows.unflatten(0, gates.shape) * weights[..., None]).sum(1).to(x.dtype)


def _product(
    rows: torch.Tensor,
    weight: Weight,
    lora: LoRAPair | None,
    bias: torch.Tensor | None,
    routing: Routing,
    chosen: torch.Tensor | None,
    *,
    transposed: bool,
    decoded: bool,
    **how: Any,
) -> torch.Tensor:
    """Return one grouped product with the chosen experts' weight, LoRA pair and bias."""

    def chosen_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if chosen is None else tensor.index_select(0, chosen)

    # One copy at most: into the dtype of the rows, each expert's matrix in one piece.
    a, b, scaling = (None, None, 1.0) if lora is None else (chosen_of(lora.a), chosen_of(lora.b), lora.scaling)
    if a is not None and b is not None:
        a, b = (t.to(rows.dtype, memory_format=torch.contiguous_format) for t in (a, b))
    if bias is not None:
        bias = chosen_of(bias).to(rows.dtype)

    if decoded and isinstance(weight, NF4Tensor):
        return moe_lora(rows, weight, a, b, routing, scaling=scaling, bias=bias, transposed=transposed, **how)
    if isinstance(weight, torch.Tensor):
        # Beside a compressed weight a dense one has to follow the same renaming.
        w = chosen_of(weight) if arguments.autocast_dtype(rows) is None else chosen_of(weight).to(rows.dtype)
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    else:
        compressed = weight

        def make() -> torch.Tensor:
            return _dequantize(compressed, chosen, rows.dtype)

        w = make()
        parts = (part for part in vars(weight).values() if isinstance(part, torch.Tensor))
        context = (
            recompute_in_backward(w, make, chosen, *parts) if torch.is_grad_enabled() else contextlib.nullcontext()
        )
    w = w if transposed else w.transpose(1, 2)
    with context:
        return moe_lora(rows, w, a, b, routing, scaling=scaling, bias=bias, **how)


def load_balancing_loss(probabilities: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """``E * sum_e f_e p_e``: what grows where few experts get most tokens.

    Fedus, Zoph and Shazeer, "Switch transformers" (2022), equation 4, for k slots as Mixtral counts them: k where all
    experts get as many tokens with the same probability.

    Args:
        probabilities: (..., E), the router's, over all experts. Their mean is p.
        expert_ids: (..., k), where the tokens go, each below E: a slot to skip has no place here. f_e counts the slots
            that expert e gets, over the number of tokens.

    Returns:
        () in the dtype of ``probabilities``, differentiable in them.
    """
    num_experts = probabilities.shape[-1]
    tokens = max(probabilities.numel() // num_experts, 1)
    ids = expert_ids.flatten().long()
    share = probabilities.new_zeros(num_experts).index_add_(0, ids, probabilities.new_ones(ids.shape)) / tokens
    return num_experts * (share * probabilities.flatten(0, -2).sum(0) / tokens).sum()
