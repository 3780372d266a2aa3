"""The layers of a model, their weights by name whoever wrapped or packed them, and what they are called with."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kernelbook.interop.transformers_experts import is_experts, stored
from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.experts import Float8Tensor
from kernelbook.nn.parameters import is_stored_transposed, stored_weight


def layers_of(module: nn.Module, name: str = "", in_list: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The parts that are compared: attention, norms, experts, routers, embeddings; of modules without lists the children."""
    children = list(module.named_children())
    lists = nn.ModuleList | nn.ModuleDict
    holds = isinstance(module, lists) or any(isinstance(part, lists) for part in module.modules())
    holds_experts = not is_experts(module) and any(map(is_experts, module.modules()))
    if children and (name == "" or in_list or holds_experts or (holds and not in_list)):
        for child, part in children:
            full = f"{name}.{child}" if name else child
            if in_list and not isinstance(module, lists) and not (any(map(is_experts, part.modules()))):
                yield full, part
            else:
                yield from layers_of(part, full, isinstance(module, lists))
    else:
        yield name, module


def unwrapped(module: Any) -> tuple[Any, list[Any]]:
    """The module that PEFT has wrapped, and the wrappers around it."""
    wrappers = []
    while True:
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            active = [name for name in module.active_adapters if name in module.modules_to_save]
            module = module.modules_to_save[active[0]] if active else module.original_module
        elif hasattr(module, "base_layer"):
            wrappers.append(module)
            module = module.base_layer
        else:
            return module, wrappers


def module_at(base: nn.Module, path: str) -> Any:
    """The module at ``path``, through wrappers; the last of them is kept."""
    found: Any = base
    for part in path.split(".") if path else ():
        if part not in found._modules:
            found = unwrapped(found)[0]
        found = found._modules[part]
    return found


# --- tensors in what layers take and return ---


def names_in(module: nn.Module) -> list[str]:
    """Of parameters and buffers."""
    return [name for found in (module.named_parameters(), module.named_buffers()) for name, _ in found]


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def detached(value: Any, device: torch.device | str | None = None) -> Any:
    """Tensors without their graphs, on another device where one is named."""
    return tree_map(lambda x: x.detach().to(device) if isinstance(x, torch.Tensor) else x, value)


def replaced(out: Any, values: list[Any]) -> Any:
    """What the reference's layer returned, with the model's tensors in it."""
    if isinstance(out, torch.Tensor):
        return values[0]
    new = as_list(out)
    for i, ours in enumerate(values[: len(new)]):
        new[i] = ours if isinstance(ours, torch.Tensor) else new[i]
    if not isinstance(out, Mapping):
        return type(out)(new)
    found: Any = copy.copy(out)
    found.update(zip(out, new, strict=True))
    return found


def as_list(out: Any) -> list[Any]:
    if isinstance(out, Mapping):
        return list(out.values())
    return list(out) if isinstance(out, tuple | list) else [out]


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype; what is a mask's least number stays finite."""
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)  # models take softmax in float32

    def one(t: torch.Tensor) -> torch.Tensor:
        return (t.clamp(info.min, info.max) if torch.finfo(t.dtype).max > info.max else t).to(dtype)

    return tree_map(lambda x: one(x) if is_float(x) else x, value)


# --- weights by name ---


class Weights:
    """The weights of ``base`` by their names in a model without wrappers: dense, with LoRA pairs added exactly.

    ``trained`` of a name are its parameters that require a gradient.
    """

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.parameters = {id(p): (p, name) for name, p in base.named_parameters()}
        dtypes: Counter[torch.dtype] = Counter()
        for name, p in base.named_parameters():
            if p.is_floating_point() and "lora_" not in name:
                dtypes[p.dtype] += p.numel()
        self.dtype = max(dtypes, key=dtypes.__getitem__, default=torch.float32)
        self.device = next((p.device for p in base.parameters()), torch.device("cpu"))
        self.exact = torch.float64 if self.dtype in (torch.float32, torch.float64) else torch.float32
        # What lies between layers may be rounded as the caller's autocast does.
        kind = self.device.type
        self.between = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    def place(self, name: str) -> tuple[Any, str, list[Any]]:
        """The module that holds a parameter or buffer, its name there, and PEFT's wrappers that change it."""
        path, _, leaf = name.rpartition(".")
        module, wrappers = unwrapped(module_at(self.base, path))
        return module, leaf, [w for w in wrappers if getattr(w, "parameter_name", "weight") == leaf]

    def pairs(self, name: str) -> list[tuple[Any, str]]:
        """The wrappers of a parameter, with the adapter of each that is active and not merged."""
        return [
            (wrapper, adapter)
            for wrapper in self.place(name)[2]
            if not getattr(wrapper, "disable_adapters", False)
            for adapter in wrapper.active_adapters
            if adapter in getattr(wrapper, "lora_A", ()) and adapter not in wrapper.merged_adapters
        ]

    def trained(self, name: str) -> list[nn.Parameter]:
        """The parameters behind a name that are trained."""
        module, leaf, _ = self.place(name)
        found = [module._parameters.get(leaf)]
        found += [part[adapter].weight for w, adapter in self.pairs(name) for part in (w.lora_A, w.lora_B)]
        if leaf == "weight":
            found += [getattr(module, "lora_a", None), getattr(module, "lora_b", None)]
        return [p for p in found if p is not None and p.requires_grad]

    def value(self, name: str, dtype: torch.dtype | None, leaves: dict[int, torch.Tensor]) -> Any:
        """The tensor in ``dtype``, or in its own; ``leaves`` takes up what gradients are asked for."""
        module, leaf, _ = self.place(name)
        if leaf in module._buffers:
            buffer = module._buffers[leaf]
            return buffer if buffer is None or not buffer.is_floating_point() else buffer.to(dtype or buffer.dtype)

        def of(p: torch.Tensor) -> torch.Tensor:
            if p.requires_grad:
                if id(p) not in leaves:
                    leaves[id(p)] = p.detach().to(dtype or p.dtype).clone().requires_grad_()
                return leaves[id(p)]
            return p.detach().to(dtype or p.dtype)

        weight = self.stored(name)
        if isinstance(weight, NF4Tensor):
            dense = weight.as_float64().to(dtype or weight.dtype)
            dense = dense.transpose(1, 2) if is_stored_transposed(module, leaf) else dense
        elif isinstance(weight, Float8Tensor):
            dense = weight.dequantize(dtype=dtype or self.dtype)
        else:
            dense = of(weight) if weight is not None else None  # type: ignore[assignment]
        for wrapper, adapter in self.pairs(name):
            dense = dense + _added(wrapper, adapter, of).to(dense.dtype)
        if leaf == "weight" and getattr(module, "lora_a", None) is not None:
            dense = dense + (module.scaling * of(module.lora_b) @ of(module.lora_a)).to(dense.dtype)
        return dense

    def stored(self, name: str) -> Any:
        """The weight as it is stored."""
        module, leaf, _ = self.place(name)
        if is_experts(module):
            return stored(module, leaf)
        weight: Any = stored_weight(module, leaf)
        if hasattr(weight, "quant_state"):  # bitsandbytes' linear layers
            import bitsandbytes

            return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        if isinstance(weight, torch.Tensor) and weight.element_size() == 1:
            raise ValueError(f"check.model: weights must be in a form that is known, got {name} in {weight.dtype}")
        return weight


def _added(wrapper: Any, adapter: str, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What an adapter adds to a whole weight, as PEFT says: A has the expert slowest, B fastest."""
    if getattr(wrapper, "use_dora", {}).get(adapter):
        raise ValueError(f"check.model: adapters must be plain LoRA, got DoRA in {adapter}")
    a, b = (of(part[adapter].weight) for part in (wrapper.lora_A, wrapper.lora_B))
    experts = getattr(wrapper, "num_experts", 1)
    if experts == 1:
        added = b @ a
        return wrapper.scaling[adapter] * (added.mT if getattr(wrapper, "fan_in_fan_out", False) else added)
    a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
    added = torch.einsum("ore,eri->eoi", b, a) * wrapper.scaling[adapter]
    return added if getattr(wrapper, "_did_swap_in_out_features", False) else added.mT


# --- what the model's own layers did ---


class Call:
    """A layer's inputs by their places, its outputs, and the gradients of both, kept on the host."""

    def __init__(self) -> None:
        self.places: dict[int | str, int] = {}
        self.inputs: list[torch.Tensor] = []
        self.indices: torch.Tensor | None = None  # of experts, which rows go to which
        self.out: list[Any] = []
        self.dx: dict[int, torch.Tensor] = {}
        self.dy: dict[int, torch.Tensor] = {}
        self.in_graph = False

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep the inputs; each that has a gradient goes on as a view of its own, whose gradient is this layer's."""
        views: dict[int, tuple[int, torch.Tensor]] = {}
        self.inputs = []

        def taken(place: int | str, value: Any) -> Any:
            if not is_float(value) or "mask" in str(place):
                return value
            if id(value) not in views:
                view = value.view_as(value) if value.requires_grad and torch.is_grad_enabled() else value
                views[id(value)] = len(self.inputs), view
                self.inputs.append(value.detach().cpu())
            self.places[place], view = views[id(value)]
            return view

        args = tuple(taken(i, value) for i, value in enumerate(args))
        kwargs = {name: taken(name, value) for name, value in kwargs.items()}
        _watch([view for _, view in views.values()], self.dx)
        return args, kwargs

    def give(self, out: Any) -> Any:
        """Keep the outputs; each goes on as a view, since one may be what another was made of."""
        values = as_list(out)
        self.out = detached(values, "cpu")
        views = [value.view_as(value) if is_float(value) and value.requires_grad else value for value in values]
        self.in_graph = _watch(views, self.dy)
        return replaced(out, views)

    def to(self, device: torch.device) -> "Call":
        """Return it where the reference computes."""
        found = copy.copy(self)
        found.inputs, found.out, found.dx, found.dy = detached([self.inputs, self.out, self.dx, self.dy], device)
        return found


def _watch(tensors: list[Any], into: dict[int, torch.Tensor]) -> bool:
    """Put the gradients of these, once there are any, into the dictionary; whether there will be."""
    found = [(i, t) for i, t in enumerate(tensors) if is_float(t) and t.requires_grad and torch.is_grad_enabled()]
    for i, tensor in found:
        tensor.register_hook(lambda grad, i=i: into.__setitem__(i, grad.detach().cpu()))  # type: ignore[misc]
    return bool(found)


class Recorder:
    """Within the context, the calls of the layers ``names`` of ``base``.

    A checkpoint's second forward pass, after ``finished``, belongs to the first, which made no graph where it is reentrant.
    """

    def __init__(self, base: nn.Module, names: list[str]) -> None:
        self.calls: dict[str, list[Call]] = {name: [] for name in names}
        self.finished = False
        self._modules = {name: module_at(base, name) for name in names}
        self._hooks: list[Any] = []

    def __enter__(self) -> "Recorder":
        for name, module in self._modules.items():
            before, after = self._watching(name, module)
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watching(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        calls, experts = self.calls[name], is_experts(unwrapped(module)[0])

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.finished:
                calls.append(Call())
            elif not calls or calls[-1].in_graph:
                return None
            if experts and len(args) > 1:
                calls[-1].indices = args[1].detach()
            return calls[-1].take(args, kwargs)

        def after(_: nn.Module, args: Any, out: Any) -> Any:
            return calls[-1].give(out) if calls and not calls[-1].in_graph else None

        return before, after
