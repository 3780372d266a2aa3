"""A mixture of gated expert networks whose frozen weights may be dense, float8 or 4-bit, with a LoRA pair per expert.

``out[t] = sum_j gates[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t]))`` with ``e = expert_ids[t, j]``. Both products are
:func:`kernelbook.moe_lora`. Rows are sorted by expert once: the first product leaves its rows in expert order, the
activation takes them as they are, and the second product reads them so and writes tokens, weighted and summed.

4-bit weights are decoded on their way into the products. Where experts have so many rows that this is slower
(:func:`kernelbook.packed.products.decodes_on_the_way`), and float8 ones always, they become dense just before each product, for
the experts that the batch uses, and are dropped right after it. The backward pass does not keep them: it makes them again.
:func:`choose_experts` says which experts these are and when that costs a host synchronisation.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils import parametrize

from kernelbook import arguments, launching  # before Triton, which it sets up
from kernelbook.moe_lora import Routing, moe_lora, route
from kernelbook.nf4 import NF4Tensor, nf4_dequantize, nf4_quantize
from kernelbook.nn import kernels
from kernelbook.packed.products import decodes_on_the_way

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

ACTIVE = ("auto", "all", "bound", "count")
NEARLY_ALL = 0.9  # with "count": a larger share of the experts than this is not worth a selection
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class LoRAPair(NamedTuple):
    """What is added to an expert's matrix W (N, K): ``scaling * b[e] @ a[e]``.

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
        """The bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes

    def dequantize(self, experts: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The experts that are asked for (``None``: all), (A, rows, cols) in ``dtype``, rounded once."""
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
    """Which experts to make dense for this batch, and the ids that stand for them.

    ``"all"``: every expert; nothing is computed. ``"bound"``: one place for each (token, slot) pair, in the pairs' order; no
    batch needs more, and the host needs to know nothing. An expert that two pairs name becomes dense twice. ``"count"``:
    each expert that is used, once; the host **waits for the device** to learn how many these are. ``"auto"``: ``"bound"``
    where that is at most half of the experts, else ``"all"``: it never waits.

    Args:
        expert_ids: (T, k) int64 or int32; ``num_experts`` marks a slot to skip, and so does every id out of range.
        num_experts: E.
        active: see above.

    Returns:
        ``experts``, (A,) ids in [0, E), or ``None`` for all; and ``expert_ids`` renamed: ``i`` stands for ``experts[i]``
        and ``A`` for a slot to skip.
    """
    arguments.check_choice("choose_experts", "active", active, ACTIVE)
    pairs = expert_ids.numel()
    if active == "auto":
        active = "bound" if 2 * pairs <= num_experts else "all"
    if active == "all" or (active == "bound" and pairs >= num_experts) or num_experts <= 1 or pairs == 0:
        return None, expert_ids
    ids = expert_ids.reshape(-1)
    if active == "bound":
        places = torch.arange(pairs, dtype=ids.dtype, device=ids.device)
        experts = ids.clamp(0, num_experts - 1)
        return experts, torch.where(ids == experts, places, pairs).view_as(expert_ids)
    ids = torch.where(ids == ids.clamp(0, num_experts), ids, num_experts)
    used = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    used.scatter_(0, ids.long(), 1)
    used = used[:num_experts]
    size = int(used.sum())  # the wait
    if size > NEARLY_ALL * num_experts:
        return None, expert_ids
    size = max(size, 1)  # every slot is to be skipped
    experts = torch.argsort(used, descending=True, stable=True)[:size]
    numbers = F.pad(used.cumsum(0, dtype=ids.dtype) - 1, (0, 1), value=size)
    return experts, numbers[ids].view_as(expert_ids)


def _dequantize(weight: NF4Tensor | Float8Tensor, experts: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, NF4Tensor):
        return nf4_dequantize(weight, experts=experts, dtype=dtype)
    return weight.dequantize(experts, dtype)


@contextlib.contextmanager
def _made_again(w: torch.Tensor, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Autograd keeps nothing of ``w`` within the context: it is made again."""
    if torch.compiler.is_compiling():
        yield
        return
    storage = w.untyped_storage()._cdata  # the object: the address of all that is empty is 0
    # Hooks do not stack: the rest goes to those that were there, such as those
    # of activation checkpointing.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    keep, give = outer if outer is not None else (lambda t: t, lambda t: t)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata == storage:
            return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return _Kept(keep(tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Kept):
            return give(packed.value)
        return make().as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Kept(NamedTuple):
    value: Any


# --- the block ------------------------------------------------------------------------------------------------------


@functools.cache
def _swiglu_launch(backward: bool, dtype: torch.dtype) -> launching.Launch:
    height = 1 if dtype == torch.float64 else kernels.ROWS  # its exponential takes many registers
    kernel = kernels._swiglu_bwd_kernel if backward else kernels._swiglu_fwd_kernel
    acc = launching.tl_accumulator(dtype)
    return launching.Launch(kernel, ACC=acc, ROWS=height, BLOCK_I=kernels.BLOCK_I, num_warps=kernels.WARPS)


def _run_swiglu(result: torch.Tensor, h: torch.Tensor, dout: torch.Tensor | None) -> None:
    """out (S, I) of h (S, 2 I), or with ``dout`` dh (S, 2 I)."""
    if result.numel() == 0:
        return
    rows, inner = h.shape[0], h.shape[1] // 2
    launch = _swiglu_launch(dout is not None, h.dtype)
    grid = (launching.cdiv(rows, launch.constants["ROWS"]), launching.cdiv(inner, kernels.BLOCK_I))
    gradient = () if dout is None else (dout.contiguous(),)
    launch(grid, *gradient, h.contiguous(), result, rows, inner)


def _keep_h(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


_swiglu_backward = launching.operator(
    "swiglu_backward(Tensor h, Tensor dout) -> Tensor",
    outputs=lambda h, dout: torch.empty_like(h, memory_format=torch.contiguous_format),
    run=_run_swiglu,
)
# h (S, 2 I) -> silu(h[:, :I]) * h[:, I:]. Only h is kept for the backward pass.
_swiglu_of = launching.operator(
    "swiglu(Tensor h) -> Tensor",
    outputs=lambda h: torch.empty((h.shape[0], h.shape[1] // 2), dtype=h.dtype, device=h.device),
    run=lambda result, h: _run_swiglu(result, h, None),
    setup_context=_keep_h,
    backward=lambda ctx, dout: _swiglu_backward(ctx.saved_tensors[0], dout),
)


def _swiglu(h: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # a compiler fuses these, and decides itself what to keep
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    out: torch.Tensor = _swiglu_of(h)
    return out


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up

    return apply


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _swiglu,
    "gelu": _gated(F.gelu),
    "relu": _gated(F.relu),
}


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

    Gradients reach ``x``, ``gates``, both LoRA pairs, the biases, and dense weights that require one. With dense weights
    the host never waits for the device. With compressed ones it waits only with ``active="count"``.

    Args:
        x: (T, H), float32, float16 or bfloat16.
        gate_up: (E, 2 I, H), the gate's rows before the up projection's: a tensor in the dtype of ``x``, an
            ``NF4Tensor`` or a ``Float8Tensor``.
        down: (E, H, I), likewise.
        expert_ids: (T, k) int64 or int32 in [0, E]; E marks a slot to skip. Checked as by :func:`kernelbook.route`.
        gates: (T, k), the weight of each slot, floating point.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``, of the gate; or a function from the first product's rows
            (S, 2 I) to (S, I), for other gates and for experts without one.
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
    arguments.check_choice(op, "active", active, ACTIVE)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, torch.Tensor | NF4Tensor | Float8Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, NF4Tensor or Float8Tensor, got {type(weight).__name__}")
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
    decoded = active == "auto" and packed and decodes_on_the_way(expert_ids.numel(), num_experts)
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
    """One grouped product with the chosen experts' weight, LoRA pair and bias."""

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
        context = _made_again(w, make) if torch.is_grad_enabled() else contextlib.nullcontext()
    w = w if transposed else w.transpose(1, 2)
    with context:
        return moe_lora(rows, w, a, b, routing, scaling=scaling, bias=bias, **how)


# --- modules --------------------------------------------------------------------------------------------------------


class NF4Parametrization(torch.nn.Module):
    """Keeps a 4-bit parameter's scales; as a parametrization it makes the parameter dense again where it is read.

    The packed bytes are the parametrization's ``original``. Who wants the 4-bit form asks :func:`stored_weight`.
    Conversions of the module to another dtype leave the scales as they are, and are that of the dense parameter.
    """

    PARTS = ("absmax", "code", "nested_absmax", "nested_code", "nested_offset")

    def __init__(self, q: NF4Tensor) -> None:
        super().__init__()
        self.shape, self.block_size, self.code_name, self.dtype = q.shape, q.block_size, q.code_name, q.dtype
        for name in self.PARTS:
            part = getattr(q, name)
            # A view of something larger could not be saved by safetensors.
            whole = part is None or part.untyped_storage().nbytes() == part.nbytes
            self.register_buffer(name, part if whole else part.clone())

    def tensor(self, packed: torch.Tensor) -> NF4Tensor:
        """The 4-bit tensor with these bytes; everything is shared."""
        parts = {name: getattr(self, name) for name in self.PARTS}
        return NF4Tensor(
            packed=packed.detach(),
            shape=self.shape,
            block_size=self.block_size,
            code_name=self.code_name,
            dtype=self.dtype,
            **parts,
        )

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """packed (ceil(n / 2),) -> the dense tensor."""
        dtype = self.dtype if self.dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
        return nf4_dequantize(self.tensor(packed), dtype=dtype).to(self.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "NF4Parametrization":
        where: Any = self.code.device
        self.dtype = fn(torch.empty(1, dtype=self.dtype, device=where)).dtype

        def keep_dtype(t: torch.Tensor) -> torch.Tensor:
            # Conversions change floating-point tensors only; as integers these pass unchanged.
            return fn(t.view(torch.int32)).view(torch.float32) if t.dtype == torch.float32 else fn(t)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.code_name}, block_size={self.block_size}"


class _Stack(parametrize.ParametrizationList):
    """A 4-bit weight's parametrizations: :class:`NF4Parametrization`, and what others put on it for a while."""

    def append(self, module: torch.nn.Module) -> "_Stack":
        # PEFT 0.21 puts a LoRA pair on a weight as one class and, where the weight has parametrizations of its own, takes
        # off another: the pair would stay, and be added once more in each forward pass. So it comes as that other one.
        peft: Any = sys.modules.get("peft.tuners.lora.layer")
        kind, removed = (getattr(peft, name, None) for name in ("_LoraFactorsProxy", "_LoraParameterProxy"))
        if kind is not None and removed is not None and type(module) is kind and not issubclass(kind, removed):
            pair, module = module, removed(None)
            module.forward = pair.forward  # type: ignore[method-assign]
        super().append(module)
        # Under parametrize.cached(), PEFT's way, torch's own checks have just read the weight as it was before.
        parametrize._cache.clear()
        return self


def quantize_parameter(
    module: torch.nn.Module, name: str, *, block_size: int = 64, double_quant: bool = False
) -> NF4Tensor:
    """Replaces the parameter ``module.name`` by its 4-bit form and freezes it; the dense one is given up.

    ``module.name`` can be read as before and is dequantized at each reading.

    Raises:
        AttributeError: there is no such parameter.
        TypeError: it is not floating point.
        ValueError: it is parametrized already, for one because it is quantized.
    """
    q = nf4_quantize(quantizable(module, name, block_size), block_size=block_size, double_quant=double_quant)
    store_parameter(module, name, q)
    return q


def quantizable(module: torch.nn.Module, name: str, block_size: int) -> torch.Tensor:
    """The dense ``module.name``; raises as :func:`quantize_parameter` does. Who quantizes several asks for all of them first."""
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"quantize_parameter: {name} must not be parametrized, but it is")
    parameter = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"quantize_parameter: {type(module).__name__} has no parameter {name!r}")
    nf4_quantize(torch.empty_like(parameter, device="meta"), block_size=block_size)
    return parameter.detach()


def store_parameter(module: torch.nn.Module, name: str, q: NF4Tensor) -> None:
    """Puts ``q`` in the place of the parameter ``module.name``, which is given up."""
    setattr(module, name, torch.nn.Parameter(q.packed, requires_grad=False))
    parametrize.register_parametrization(module, name, NF4Parametrization(q), unsafe=True)
    module.parametrizations[name].__class__ = _Stack  # type: ignore[index]
    type(module).__reduce_ex__ = _reduce  # type: ignore[assignment, method-assign]


def _reduce(module: torch.nn.Module, protocol: Any) -> tuple[Any, ...]:
    """How a module with 4-bit parameters is pickled. PyTorch makes a class for each parametrized module, and refuses."""
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return _parametrized, (type(module).__bases__[0], names), dict(module.__dict__)


def _parametrized(kind: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    type(module).__reduce_ex__ = _reduce  # type: ignore[assignment, method-assign]
    return module


def stored_weight(module: torch.nn.Module, name: str) -> torch.Tensor | NF4Tensor:
    """``module.name`` in the form in which it is stored: an ``NF4Tensor`` after :func:`quantize_parameter`."""
    if parametrize.is_parametrized(module, name):
        found: Any = module.parametrizations[name]  # type: ignore[index]
        if len(found) == 1 and isinstance(found[0], NF4Parametrization):
            return found[0].tensor(found.original)
    return getattr(module, name)


class LoRAModule(torch.nn.Module):
    """A module with LoRA pairs, whose scaling is part of the state dict: loading takes it over, as it does the pairs.

    Attributes:
        rank: of the pairs; 0 without any. scaling: what their products are multiplied by.
    """

    rank: int = 0
    scaling: float = 1.0

    def _check_lora(self, rank: int, alpha: float | None, dtype: torch.dtype | None) -> tuple[int, float]:
        """-> the rank and the scaling. Nothing is changed."""
        op = f"{type(self).__name__.removeprefix('Parametrized')}.add_lora"
        rank = arguments.integer(op, "rank", rank, least=1)
        arguments.check_choice(op, "dtype", dtype, (None, *arguments.FLOATING))
        if self.rank:
            raise ValueError(f"{op}: the module must have no LoRA pairs yet, got one with pairs of rank {self.rank}")
        return rank, 1.0 if alpha is None else arguments.number(op, "alpha", alpha) / rank

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
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``.
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
        """Draws new weights, as ``torch.nn.Linear`` does, and new LoRA pairs. Weights in 4 bits stay as they are."""
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
        """Freezes the weights and gives each expert a pair of ``rank``, scaled by ``alpha / rank`` (default 1).

        ``gate_up_a`` (E, r, H), ``gate_up_b`` (E, 2 I, r), ``down_a`` (E, r, I), ``down_b`` (E, H, r); b starts at zero.

        Raises ``TypeError`` for a rank or an alpha that is no number, and ``ValueError`` where there are pairs already, for a
        rank below 1 and for another dtype.
        """
        rank, scaling = self._check_lora(rank, alpha, dtype)
        pairs: dict[str, torch.nn.Parameter] = {}
        weights = {name: stored_weight(self, name) for name in self._sizes()}
        for name, (n, k) in self._sizes().items():
            where: dict[str, Any] = {"device": weights[name].device, "dtype": dtype or weights[name].dtype}
            for part, shape in (("a", (rank, k)), ("b", (n, rank))):
                pairs[f"{name}_{part}"] = torch.nn.Parameter(torch.empty(self.num_experts, *shape, **where))
            _draw_pair(pairs[f"{name}_a"], pairs[f"{name}_b"])
        # From here on nothing raises.
        for weight in weights.values():
            if isinstance(weight, torch.Tensor):
                weight.requires_grad_(False)
        for name, parameter in pairs.items():
            self.register_parameter(name, parameter)
        self.rank, self.scaling = rank, scaling
        return self

    def quantize(self, *, block_size: int = 64, double_quant: bool = False) -> "GatedExperts":
        """Replaces both weights by their 4-bit form, frozen."""
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
        return out if x.ndim == 2 else launching.reshaped(out, *x.shape)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation!r}"
        )


def load_balancing_loss(probabilities: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """``E * sum_e f_e p_e``: what grows where few experts get most tokens.

    Fedus, Zoph and Shazeer, "Switch transformers" (2022), equation 4, for k slots as Mixtral counts them: k where all
    experts get as many tokens with the same probability.

    Args:
        probabilities: (..., E), the router's, over all experts. Their mean is p.
        expert_ids: (..., k), where the tokens go. f_e counts the slots that expert e gets, over the number of tokens.

    Returns:
        () in the dtype of ``probabilities``, differentiable in them.
    """
    num_experts = probabilities.shape[-1]
    tokens = max(probabilities.numel() // num_experts, 1)
    ids = expert_ids.flatten().long()
    share = probabilities.new_zeros(num_experts).index_add_(0, ids, probabilities.new_ones(ids.shape)) / tokens
    return num_experts * (share * probabilities.flatten(0, -2).sum(0) / tokens).sum()


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
