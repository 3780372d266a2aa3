"""PEFT's LoRA pairs on expert parameters, used as pairs.

PEFT puts LoRA on a parameter (``LoraConfig(target_parameters=...)``) by wrapping the module that holds it: one
``ParamWrapper`` a parameter, one around the other. In each forward pass a wrapper adds its pair to the **whole** weight,
all experts, and lets the module read the sum. After :func:`use_factors` it hands the pair to the module instead, as long as
the module's experts run on the kernels. Nothing else of PEFT changes: adapters are switched, disabled, merged, saved and
loaded by PEFT's own code, on the same parameters. Only to merge into compressed weights is refused: what is lost there
:func:`merge_experts` says, or makes them dense.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import peft
import torch
from peft.tuners.lora import layer

from kernelbook import arguments
from kernelbook.interop import base_model, probing
from kernelbook.interop.transformers_experts import LORA_ATTRIBUTE, NAME, expert_modules, stored, weight_names
from kernelbook.nf4 import NF4Tensor, nf4_dequantize
from kernelbook.nn import offload
from kernelbook.nn.experts import LoRAPair
from kernelbook.nn.parameters import dense_parameter, is_stored_transposed, stored_weight
from kernelbook.packed.fp4 import fp4_quantize


def lora_pair(wrapper: Any, adapter: str) -> LoRAPair:
    """The adapter's pair in the convention of :func:`kernelbook.moe_lora`, views of PEFT's parameters.

    PEFT stores A (E r, in) with the expert slowest and B (out, r E) with the expert fastest. Which of the parameter's two
    feature dimensions it calls "in" has changed between its versions; the wrapper says which it is.

    Returns:
        a (E, r, K), b (E, N, r) and the scaling, where the module computes ``x (., K) -> (., N)``.
    """
    experts = wrapper.num_experts
    first = wrapper.lora_A[adapter].weight
    second = wrapper.lora_B[adapter].weight
    a = first.view(experts, -1, first.shape[1])  # (E, r, in)
    b = second.view(second.shape[0], -1, experts).permute(2, 0, 1)  # (E, out, r)
    # With "in" the last dimension of the stored (E, out, in), the pair adds b a to it; else a^T b^T to (E, in, out).
    in_is_last = getattr(wrapper, "_did_swap_in_out_features", False)
    k_is_last = not getattr(wrapper.get_base_layer(), "is_transposed", False)
    if in_is_last != k_is_last:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return LoRAPair(a, b, float(wrapper.scaling[adapter]))


class ParamWrapper(layer.ParamWrapper):  # PEFT knows its wrappers by this name
    """PEFT's wrapper, except that it hands its pairs to experts that run on the kernels."""

    def __getattr__(self, name: str) -> Any:
        # To give packed weights another adapter, PEFT looks in the outermost wrapper for them and for "parametrizations".
        if name == "parametrizations":  # by name alone: to PyTorch the wrapper has none
            experts: Any = self.get_base_layer()
            return tuple(experts.parametrizations)
        of_experts = name in ("gate_up_proj", "up_proj", "down_proj")
        return getattr(self.get_base_layer(), name) if of_experts else super().__getattr__(name)

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts: Any = self.get_base_layer()
        adapters = [name for name in active_adapters if name in self.lora_A]
        if experts.config._experts_implementation != NAME or not adapters:
            with super()._activate_lora(active_adapters):
                yield
            return
        pair, *others = pairs = [lora_pair(self, name) for name in adapters]
        if others:  # one that adds what all of them add: ranks side by side, each scaled as its own
            a = torch.cat([each.a.to(pair.a.dtype) for each in pairs], dim=1)
            pair = LoRAPair(a, torch.cat([each.b.to(a.dtype) * each.scaling for each in pairs], dim=2))
        handed = experts.__dict__.setdefault(LORA_ATTRIBUTE, {})
        handed[self.parameter_name] = pair
        try:
            yield
        finally:
            del handed[self.parameter_name]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's, for dense weights. Into compressed ones it would add to a dense copy, which is dropped at once."""
        if self.merged and set(self._active_of(adapter_names)) <= set(self.merged_adapters):
            return  # by merge_experts
        weight = stored(self.get_base_layer(), self.parameter_name)
        if not isinstance(weight, torch.Tensor):
            raise ValueError(
                f"merge: {self.parameter_name} must be dense to take up LoRA pairs, got {type(weight).__name__}; merge into "
                f"the model before it is quantized, or by kernelbook.interop.peft.merge_experts (unmerge_adapter() takes back "
                f"what other layers have merged just now)"
            )
        super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        """As PEFT's; what compressed weights have taken up cannot be taken back."""
        if self.merged and not isinstance(stored(self.get_base_layer(), self.parameter_name), torch.Tensor):
            raise ValueError(
                f"unmerge: {self.parameter_name} must be dense to give LoRA pairs back, got packed weights, into which they "
                f"were rounded"
            )
        super().unmerge()

    def _active_of(self, adapter_names: list[str] | None) -> list[str]:
        names = self.active_adapters if adapter_names is None else adapter_names
        return [name for name in names if name in self.lora_A]


class Linear(layer.Linear):  # likewise
    """PEFT's wrapper of a linear layer, except that it does not merge into a packed weight: it would be lost."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if _is_packed(self.get_base_layer()):
            raise ValueError(
                f"merge: the weight of {type(self.get_base_layer()).__name__} must be dense to take up LoRA pairs, got a packed "
                f"one; kernelbook.interop.peft.merge_experts(model, into='dense') makes it dense"
            )
        super().merge(safe_merge, adapter_names)


def _is_packed(linear: Any) -> bool:
    return isinstance(linear, torch.nn.Linear) and isinstance(stored_weight(linear, "weight"), NF4Tensor)


# --- merging into compressed experts ----------------------------------------------------------------------------------


class MergeError(NamedTuple):
    """What rounding did to a parameter, by Frobenius norms: of the rounding's error over that of the weights and the update.

    Attributes:
        of_weights: relative to the exact sum of weights and pairs.
        of_update: relative to what the pairs add. From 1 on as much is lost as was learned.
    """

    of_weights: float
    of_update: float


@torch.no_grad()
def merge_experts(model: torch.nn.Module, *, into: str) -> dict[str, MergeError]:
    """Adds the active LoRA pairs to the 4-bit experts' weights of a ``PeftModel``, expert by expert.

    ``"dense"``: the weights become dense in their own dtype. ``"mxfp4"``: those that are in MXFP4 are rounded to it again, in
    the same memory, each block with the better of two scales. An update much smaller than the step between two values of 4 bits is then
    lost in the rounding; the errors say how much. Pairs elsewhere, and on experts that are dense, are left to PEFT:
    ``model.merge_and_unload()`` takes them up afterwards, and the pairs that are merged here off. For it ``"dense"`` makes
    linear layers dense too, where a checkpoint in NVFP4 has packed ones.

    Returns:
        For each parameter that changed, by its name in the model, what was lost; in "dense" by its dtype alone.

    Raises:
        ImportError, ValueError: as :func:`check_wrappers`, or weights in another format. Nothing has been changed then.
    """
    op = "merge_experts"
    arguments.check_choice(op, "into", into, ("dense", "mxfp4"))
    found = {}
    for wrapper in check_wrappers(model):
        q = stored(wrapper.get_base_layer(), wrapper.parameter_name)
        if isinstance(q, torch.Tensor):
            continue
        if not isinstance(q, NF4Tensor) or (into == "mxfp4" and (q.code_name, q.block_size) != ("e2m1", 32)):
            kind = f"{q.code_name} in blocks of {q.block_size}" if isinstance(q, NF4Tensor) else type(q).__name__
            raise ValueError(f"{op}: {wrapper.parameter_name} must be in MXFP4 to be rounded to it again, got {kind}")
        found[wrapper] = q
    use_factors(model)
    names = {id(experts): name for name, experts in expert_modules(base_model(model))}
    errors = {}
    for wrapper, q in found.items():
        experts, name = wrapper.get_base_layer(), wrapper.parameter_name
        adapters = [adapter for adapter in wrapper._active_of(None) if adapter not in wrapper.merged_adapters]
        if not adapters:
            warnings.warn(f"{op}: no active adapter of {name} is left to merge", stacklevel=2)
            continue
        # (E, N, K), or (E, K, N) where the weight is stored as the module has it.
        across = experts.is_transposed and not is_stored_transposed(experts, name)
        pairs = [lora_pair(wrapper, adapter) for adapter in adapters]
        errors[f"{names[id(experts)].replace('.base_layer', '')}.{name}"] = _merge(
            experts, name, q, pairs, across, into
        )
        wrapper.merged_adapters.extend(adapters)
    for module in base_model(model).modules() if into == "dense" else ():
        if _is_packed(module):
            dense_parameter(module, "weight", module.weight.detach())  # type: ignore[arg-type, operator]
    return errors


def _merge(experts: Any, name: str, q: NF4Tensor, pairs: list[LoRAPair], across: bool, into: str) -> MergeError:
    dense = torch.empty(q.shape, dtype=q.dtype, device=q.device) if into == "dense" else None
    squares = torch.zeros(3, dtype=torch.float64, device=q.device)  # of the error, the sum and the update
    for e in range(q.shape[0]):
        weight = nf4_dequantize(q, experts=torch.tensor([e], device=q.device), dtype=torch.float32)[0]
        update = sum(pair.scaling * (pair.b[e].float() @ pair.a[e].float()) for pair in pairs)
        assert isinstance(update, torch.Tensor)
        exact = weight + (update.mT if across else update).to(weight.device)
        if dense is not None:
            dense[e] = exact
            rounded = dense[e].float()
        else:
            one = fp4_quantize(exact, scale="best")
            for part, blocks in ((q.packed, one.packed), (q.absmax, one.absmax)):
                part.view(q.shape[0], -1)[e] = blocks
            rounded = nf4_dequantize(one, dtype=torch.float32)
        squares += torch.stack([t.double().square().sum() for t in (rounded - exact, exact, update)])
    if dense is not None:
        dense_parameter(
            experts, name, dense.transpose(1, 2).contiguous() if is_stored_transposed(experts, name) else dense
        )
    lost, whole, learned = (math.sqrt(float(square)) for square in squares)
    return MergeError(lost / whole if whole else 0.0, lost / learned if learned else math.inf if lost else 0.0)


@functools.cache
@probing()
def _probe() -> str | None:
    """Asks the PEFT at hand what its pairs add to a parameter; in words what is not as expected."""
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=[], target_parameters=["inner.weight"], init_lora_weights=False
    )
    for is_transposed in (False, True):
        holder: Any = torch.nn.Module()
        holder.is_transposed, holder.weight = is_transposed, torch.nn.Parameter(torch.zeros(2, 3, 5))
        model: Any = peft.get_peft_model(torch.nn.ModuleDict({"inner": holder}), config)  # type: ignore[arg-type]
        wrapper = model.base_model.model.inner
        if type(wrapper) is not layer.ParamWrapper or not hasattr(wrapper, "_activate_lora"):
            return "parameters are wrapped in another class"
        a, b, scaling = lora_pair(wrapper, "default")
        ours = scaling * b @ a
        added = wrapper.get_delta_weight("default")
        if not torch.allclose(ours.transpose(1, 2) if is_transposed else ours, added, atol=1e-6):
            return "the pairs are stored in another layout"
    return None


def check_wrappers(model: torch.nn.Module) -> list[Any]:
    """The wrappers that PEFT put on the experts' weights of ``model``.

    Raises:
        ImportError: this version of PEFT keeps its pairs otherwise.
        ValueError: LoRA on another parameter of an experts module, such as a bias, or on weights of another shape.
    """
    problem = _probe()
    if problem:
        raise ImportError(
            f"kernelbook.interop.peft: LoRA on parameters must be stored as in PEFT 0.20 and 0.21, and in PEFT "
            f"{peft.__version__} it is not: {problem}"
        )
    weights = {id(experts): weight_names(experts) for _, experts in expert_modules(model)}
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, layer.ParamWrapper):
            continue
        experts = module.get_base_layer()
        if id(experts) not in weights:
            continue
        if module.parameter_name not in weights[id(experts)]:
            raise ValueError(
                f"check_wrappers: LoRA must be on {' or '.join(weights[id(experts)])} of {type(experts).__name__}, "
                f"got {module.parameter_name} ({name})"
            )
        found.append(module)
    return found


def use_factors(model: torch.nn.Module) -> int:
    """Makes every wrapper of expert weights in ``model`` hand over its pairs; returns how many there are.

    ``kernelbook.interop.transformers.use_kernels`` calls it. Call it again after adding wrappers.

    Raises:
        ImportError, ValueError: as :func:`check_wrappers`; then nothing has been changed.
    """
    wrappers = check_wrappers(model)
    for wrapper in wrappers:
        wrapper.__class__ = ParamWrapper
        device = offload.device_of(wrapper.get_base_layer(), wrapper.parameter_name)
        for pair in (wrapper.lora_A, wrapper.lora_B):
            pair.to(device)  # PEFT has them lie where the weights do
    for module in model.modules():
        if type(module) is layer.Linear and _is_packed(module.get_base_layer()):
            module.__class__ = Linear
    return len(wrappers)
