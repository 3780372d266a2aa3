"""Is a whole model still right after a swap, a quantization or an adapter? Layer by layer, by the rule of ``check.py``.

``kernelbook.check.model`` is the way in. The model runs once, and hooks keep what each layer was given and what it returned,
forwards and backwards. Then a second model without weights runs the same batch. When one of its layers is called, that layer
gets the model's own weights and the inputs that the model's layer had, computes in the reference's dtype and in the
model's, and loses them again. So the memory is that of one layer, an error is that of its own layer, and masks, windows, sinks and
soft caps are those of the reference, whatever the model has made of them.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kernelbook import check
from kernelbook.interop import base_model
from kernelbook.nf4 import NF4Tensor, nested_absmax_reference, nf4_dequantize_reference, nf4_quantize
from kernelbook.nn.experts import Float8Tensor
from kernelbook.nn.parameters import is_stored_transposed, stored_weight
from kernelbook.packed.fp4 import fp4_quantize
from kernelbook.train import CapturedStep
from kernelbook.train.step import loss_of

__all__ = ["Report", "Row", "check_model"]

GLUE = 4.0  # times check.FLOOR: what may be lost between two layers, where a residual is added or a weight applied
COARSE = 0.25  # of a gradient that a compiler made: rounding has gone through all layers, and a factor of 1/2 has not
SHOWN = 5  # of the gradients that are right, the largest errors
LR = 1e-4


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: ``what`` (output, gradient, input, loss, ...) of ``name`` in a ``trial``, its error and the limit."""

    trial: str
    what: str
    name: str
    error: float
    limit: float
    passed: bool
    note: str = ""

    @property
    def ratio(self) -> float:
        """Error over limit; infinity where there is no number."""
        ratio = self.error / self.limit if self.limit > 0 else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def __str__(self) -> str:
        note = f"  {self.note}" if self.note else ""
        return f"{self.trial:12}  {self.what:12}  {self.name:40}  {self.error:9.2e}  {self.limit:9.2e}{note}"


@dataclasses.dataclass
class Report:
    """What ``check.model`` found. Printed it is a table: what is wrong, the largest first, and a count of what is right.

    Attributes:
        reference: what the model was compared with, in words.
        rows: all comparisons.
        notes: what is no error and should be known, such as experts that no row of the batch reached.
    """

    reference: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """The rows that are not right, the largest first."""
        return sorted((row for row in self.rows if not row.passed), key=lambda row: -row.ratio)

    @property
    def ok(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        lines = [f"compared with {self.reference}", ""]
        for trial in dict.fromkeys(row.trial for row in self.rows):
            of_trial = [row for row in self.rows if row.trial == trial]
            counts = []
            for what in dict.fromkeys(row.what for row in of_trial):
                found = [row.passed for row in of_trial if row.what == what]
                counts.append(f"{what} {sum(found)} of {len(found)}")
            lines.append(f"{trial:12}  right: {', '.join(counts)}")
        head = f"{'trial':12}  {'what':12}  {'where':40}  {'error':9}  {'limit':9}"
        if self.wrong:
            lines += ["", "WRONG, the largest first", head, *map(str, self.wrong)]
        gradients = [row for row in self.rows if row.passed and row.what == "gradient"]
        if gradients:
            gradients.sort(key=lambda row: -row.ratio)
            lines += ["", "right, gradients nearest to their limit", head, *map(str, gradients[:SHOWN])]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", "Something is wrong." if self.wrong else "All is right."])

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def add(self, trial: str, name: str, what: str, verdict: check.Verdict, note: str = "") -> None:
        """Add the outcome of a comparison by the rule."""
        if verdict.passed or verdict.error > verdict.limit:
            self.rows.append(Row(trial, what, name, verdict.error, verdict.limit, verdict.passed, note))
        else:
            note = f"{note} an element is off by {verdict.element:.1f} times what is allowed".strip()
            self.rows.append(Row(trial, what, name, verdict.element, 1.0, False, note))

    def fail(self, trial: str, name: str, what: str, note: str) -> None:
        """Add what is wrong without a number."""
        self.rows.append(Row(trial, what, name, math.inf, 0.0, False, note))


# --- the layers of a model --------------------------------------------------------------------------------------------


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in ("has_gate", "is_transposed", "_apply_gate"))


def _layers(module: nn.Module, name: str = "", in_list: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The parts that are compared: attention, norms, experts, routers, embeddings; of modules without lists the children."""
    children = list(module.named_children())
    lists = nn.ModuleList | nn.ModuleDict
    holds = isinstance(module, lists) or any(isinstance(part, lists) for part in module.modules())
    holds_experts = not _is_experts(module) and any(map(_is_experts, module.modules()))
    if children and (name == "" or in_list or holds_experts or (holds and not in_list)):
        for child, part in children:
            full = f"{name}.{child}" if name else child
            if in_list and not isinstance(module, lists) and not (any(map(_is_experts, part.modules()))):
                yield full, part
            else:
                yield from _layers(part, full, isinstance(module, lists))
    else:
        yield name, module


def _inside(module: Any) -> tuple[Any, list[Any]]:
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


def _find(base: nn.Module, path: str) -> Any:
    """The module at ``path``, through wrappers; the last of them is kept."""
    found: Any = base
    for part in path.split(".") if path else ():
        if part not in found._modules:
            found = _inside(found)[0]
        found = found._modules[part]
    return found


# --- weights by name --------------------------------------------------------------------------------------------------


def _unpacked(q: NF4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The dense tensor, in plain PyTorch."""
    absmax = q.absmax
    if q.nested_absmax is not None:
        assert q.nested_code is not None and q.nested_offset is not None
        absmax = nested_absmax_reference(absmax, q.nested_absmax, q.nested_code, q.nested_offset)
    return nf4_dequantize_reference(q.packed, absmax.to(dtype), q.code, q.shape, q.block_size)


class _Weights:
    """The weights of ``base`` by their names in a model without wrappers: dense, with LoRA pairs added exactly.

    ``trained`` of a name are its parameters that require a gradient.
    """

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.parameters = {id(p): (p, name) for name, p in base.named_parameters()}
        dtypes: dict[torch.dtype, int] = {}
        for name, p in base.named_parameters():
            if p.is_floating_point() and "lora_" not in name:
                dtypes[p.dtype] = dtypes.get(p.dtype, 0) + p.numel()
        self.dtype = max(dtypes, key=lambda dtype: dtypes[dtype]) if dtypes else torch.float32
        self.exact = torch.float64 if self.dtype in (torch.float32, torch.float64) else torch.float32

    def place(self, name: str) -> tuple[Any, str, list[Any]]:
        """The module that holds a parameter or buffer, its name there, and PEFT's wrappers that change it."""
        path, _, leaf = name.rpartition(".")
        module, wrappers = _inside(_find(self.base, path))
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

    def value(self, name: str, dtype: torch.dtype | None, leaves: dict[int, torch.Tensor]) -> torch.Tensor | None:
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
            dense = _unpacked(weight, dtype or torch.float32).to(dtype or weight.dtype)
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
        if _is_experts(module):
            from kernelbook.interop.transformers_experts import stored

            return stored(module, leaf)
        weight = stored_weight(module, leaf)
        if hasattr(weight, "quant_state"):  # bitsandbytes' linear layers
            import bitsandbytes

            return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
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


@contextlib.contextmanager
def _holding(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Within the context the module without weights has these."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        before.append((table, leaf, table[leaf]))
        table[leaf] = value
    try:
        yield
    finally:
        for table, leaf, value in before:
            table[leaf] = value


# --- what the model's own layers did ----------------------------------------------------------------------------------


def _as_list(out: Any) -> list[Any]:
    if isinstance(out, Mapping):
        return list(out.values())
    return list(out) if isinstance(out, tuple | list) else [out]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Call:
    """A layer's inputs by their places, its outputs, and the gradients of both."""

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
            if not _is_float(value) or "mask" in str(place):
                return value
            if id(value) not in views:
                view = value.view_as(value) if value.requires_grad and torch.is_grad_enabled() else value
                views[id(value)] = len(self.inputs), view
                self.inputs.append(value.detach())
            self.places[place], view = views[id(value)]
            return view

        args = tuple(taken(i, value) for i, value in enumerate(args))
        kwargs = {name: taken(name, value) for name, value in kwargs.items()}
        _watch([view for _, view in views.values()], self.dx)
        return args, kwargs

    def give(self, out: Any) -> Any:
        """Keep the outputs; each goes on as a view, since one may be what another was made of."""
        values = _as_list(out)
        self.out = _detached(values)
        views = [value.view_as(value) if _is_float(value) and value.requires_grad else value for value in values]
        self.in_graph = _watch(views, self.dy)
        return _replaced(out, views)


def _watch(tensors: list[Any], into: dict[int, torch.Tensor]) -> bool:
    """Put the gradients of these, once there are any, into the dictionary; whether there will be."""
    found = [(i, t) for i, t in enumerate(tensors) if _is_float(t) and t.requires_grad and torch.is_grad_enabled()]
    for i, tensor in found:
        tensor.register_hook(lambda grad, i=i: into.__setitem__(i, grad.detach()))  # type: ignore[misc]
    return bool(found)


class _Recorder:
    """Within the context, the calls of the layers ``names`` of ``base``.

    A checkpoint's second forward pass, after ``finished``, belongs to the first, which made no graph where it is reentrant.
    """

    def __init__(self, base: nn.Module, names: list[str]) -> None:
        self.calls: dict[str, list[_Call]] = {name: [] for name in names}
        self.finished = False
        self._modules = {name: _find(base, name) for name in names}
        self._hooks: list[Any] = []

    def __enter__(self) -> "_Recorder":
        for name, module in self._modules.items():
            before, after = self._watching(name, module)
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watching(self, name: str, module: nn.Module) -> tuple[Any, Any]:
        calls, experts = self.calls[name], _is_experts(_inside(module)[0])

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.finished:
                calls.append(_Call())
            elif not calls or calls[-1].in_graph:
                return None
            if experts and len(args) > 1:
                calls[-1].indices = args[1].detach()
            return calls[-1].take(args, kwargs)

        def after(_: nn.Module, args: Any, out: Any) -> Any:
            return calls[-1].give(out) if calls and not calls[-1].in_graph else None

        return before, after


# --- the reference ----------------------------------------------------------------------------------------------------


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
    return copy.deepcopy(model, memo)


def _from_config(base: Any) -> nn.Module:
    """The model of transformers that the configuration describes, with eager attention and experts, without weights."""
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return type(base)(config)  # type: ignore[no-any-return]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype; what is a mask's least number stays finite."""
    if isinstance(value, tuple | list):
        return type(value)(_cast(part, dtype) for part in value) if not hasattr(value, "_fields") else value
    if isinstance(value, dict):
        return {name: _cast(part, dtype) for name, part in value.items()}
    if not _is_float(value):
        return value
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)  # models take softmax in float32
    return (value.clamp(info.min, info.max) if torch.finfo(value.dtype).max > info.max else value).to(dtype)


class _Reference:
    """Runs a batch through a model without weights, and compares each of its layers with the call of the model's own."""

    def __init__(self, skeleton: nn.Module, weights: _Weights, report: Report, trial: str) -> None:
        self.skeleton, self.weights, self.report, self.trial = skeleton.eval(), weights, report, trial
        self.layers = dict(_layers(skeleton))
        self.keep: torch.Tensor | None = None
        self.judged: set[int] = set()  # parameters whose gradient was compared
        self.moving: set[int] = set()  # parameters whose gradient is not zero
        self._calls: dict[str, list[_Call]] = {}
        self._uses: dict[int, int] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last: tuple[str, _Call, list[Any]] | None = None
        inside = {_joined(layer, name) for layer, part in self.layers.items() for name in _names(part)}
        outside = (name for name in _names(skeleton) if name not in inside)
        self._outside = {name: weights.value(name, weights.exact, {}) for name in outside}

    # --- the whole, for its logits ---

    def whole(self, given: "_Batch", dtype: torch.dtype | None) -> Any:
        """Compute the whole in ``dtype``, or in the model's own, one layer at a time."""
        used = dtype or self.weights.dtype

        def forward(name: str, args: Any, kwargs: Any) -> Any:
            return self._compute(name, _cast(args, used), _cast(kwargs, used), dtype, {})

        with torch.no_grad(), self._as_layers(forward):
            return given.cast(used)(self.skeleton)

    # --- layer by layer ---

    def compare(self, given: "_Batch", calls: dict[str, list[_Call]], loss: torch.Tensor, backward: bool) -> None:
        """Compare all layers, and the loss that the reference makes of the model's last layer."""
        self._calls, self.keep = {name: list(found) for name, found in calls.items()}, given.real_tokens()
        for name in self.layers if backward else ():
            for key in self._trained_in(name):
                self._uses[key] = self._uses.get(key, 0) + len(calls[name])
        with torch.enable_grad(), self._as_layers(self._layer):
            ref = scalar(given.cast(self.weights.exact)(self.skeleton))
        for name, left in self._calls.items():
            if left:
                self.report.fail(self.trial, name, "output", f"called {len(left)} times more than in the reference")
        ours = loss.detach().reshape(1)
        truth = ref.detach().reshape(1)
        self._judge("loss", "loss", ours, truth, truth, check.FORWARD_FACTOR)
        if self._last is not None and ref.requires_grad:
            name, call, leaves = self._last
            wanted = {i: leaves[i] for i in call.dy if leaves[i].requires_grad}
            found = torch.autograd.grad(ref, list(wanted.values()), allow_unused=True)
            for i, truth in zip(wanted, found, strict=True):
                if truth is not None:
                    self._judge(name, "loss grad", call.dy[i], truth, truth, check.GRADIENT_FACTOR)

    @contextlib.contextmanager
    def _as_layers(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Within the context ``forward(name, args, kwargs)`` is what layers do, and products are not rounded to TF32."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with _holding(self.skeleton, self._outside):
                for name, layer in self.layers.items():
                    layer.__dict__["forward"] = lambda *args, name=name, **kwargs: forward(name, args, kwargs)
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for layer in self.layers.values():
                layer.__dict__.pop("forward", None)

    def _compute(self, name: str, args: Any, kwargs: Any, dtype: torch.dtype | None, leaves: dict[int, Any]) -> Any:
        layer = self.layers[name]
        with _holding(layer, {own: self.weights.value(_joined(name, own), dtype, leaves) for own in _names(layer)}):
            return type(layer).forward(layer, *args, **kwargs)

    def _layer(self, name: str, args: Any, kwargs: Any) -> Any:
        """Compare a layer; return what the model's own returned."""
        args, kwargs = _detached(args), _detached(kwargs)
        if not self._calls[name]:
            self.report.fail(self.trial, name, "output", "not called, and it is in the reference")
            return _detached(self._compute(name, args, kwargs, self.weights.exact, {}))
        call = self._calls[name].pop(0)
        self._judge_inputs(name, call, args, kwargs)
        out, truth, dx, dw = self._computed(name, call, args, kwargs, self.weights.exact)
        _, plain, plain_dx, plain_dw = self._computed(name, call, args, kwargs, None)
        for i, (ours, ref, base) in enumerate(zip(call.out, truth, plain, strict=False)):
            if _is_float(ours) and _is_float(ref) and ours.numel():
                note = f"output {i}" if i else ""
                rows = [self._real(t) if t.shape == ref.shape else t for t in (ours, ref, base)]
                self._judge(name, "output", rows[0], rows[1], rows[2], check.FORWARD_FACTOR, note)
        for place, i in call.places.items():
            if i in call.dx and dx[i] is not None:
                ref, base = dx.pop(i), plain_dx[i]
                self._judge(name, "input grad", call.dx[i], ref, base, check.GRADIENT_FACTOR, f"argument {place}")
                dx[i] = None
        for key in self._trained_in(name) if self._uses else ():
            self._add_gradient(name, key, call, dw.get(key), plain_dw.get(key))
        leaves = [
            _cast(ours, self.weights.exact).clone().requires_grad_(i in call.dy) if _is_float(ours) else ours
            for i, ours in enumerate(call.out)
        ]
        if call.dy:
            self._last = name, call, leaves
        return _replaced(out, leaves)

    def _trained_in(self, name: str) -> list[int]:
        names = (_joined(name, own) for own, _ in self.layers[name].named_parameters())
        return [id(p) for own in names for p in self.weights.trained(own)]

    def _computed(
        self, name: str, call: _Call, args: Any, kwargs: Any, dtype: torch.dtype | None
    ) -> tuple[Any, list[Any], dict[int, Any], dict[int, Any]]:
        """A layer's output, as it is and as a list, and the gradients of its inputs and of parameters, in ``dtype``."""
        used = dtype or self.weights.dtype
        inputs = [
            (_cast(x, dtype) if dtype else x).detach().clone().requires_grad_(i in call.dx)
            for i, x in enumerate(call.inputs)
        ]
        args = tuple(inputs[call.places[i]] if i in call.places else _cast(x, used) for i, x in enumerate(args))
        kwargs = {i: inputs[call.places[i]] if i in call.places else _cast(x, used) for i, x in kwargs.items()}
        leaves: dict[int, torch.Tensor] = {}
        out = self._compute(name, args, kwargs, dtype, leaves)
        values = _as_list(out)
        pairs = [
            (value, call.dy[i].to(value.dtype))
            for i, value in enumerate(values)
            if i in call.dy and _is_float(value) and value.requires_grad and value.shape == call.dy[i].shape
        ]
        wanted = {**{i: x for i, x in enumerate(inputs) if x.requires_grad}, **leaves}
        grads: dict[int, Any] = {}
        if pairs and wanted:
            given = [v for v, _ in pairs], list(wanted.values()), [g for _, g in pairs]
            grads = dict(zip(wanted, torch.autograd.grad(*given, allow_unused=True), strict=True))
        dx = {i: grads.get(i) for i in range(len(inputs))}
        return _detached(out), _detached(values), dx, {key: grads.get(key) for key in leaves}

    def _real(self, t: torch.Tensor) -> torch.Tensor:
        """The rows of tokens that are no padding."""
        keep = self.keep
        if keep is None:
            return t
        if t.shape[:2] == keep.shape:
            return t[keep]
        return t[keep.flatten()] if t.ndim > 1 and t.shape[0] == keep.numel() else t

    # --- one comparison ---

    def _judge(
        self, name: str, what: str, ours: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor, factor: float, note: str = ""
    ) -> None:
        try:
            verdict = check.compare(name, ours, ref, plain.to(ours.dtype), factor=factor)
        except check.CheckError as error:
            self.report.fail(self.trial, name, what, str(error))
            return
        if not math.isfinite(verdict.error):
            note = f"{note} not finite".strip()
        self.report.add(self.trial, name, what, verdict, note)

    def _judge_inputs(self, name: str, call: _Call, args: Any, kwargs: Any) -> None:
        """What reaches a layer, of what the layers before it returned."""
        limit = GLUE * check.FLOOR[self.weights.dtype]
        for place, i in call.places.items():
            ref = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            if not _is_float(ref):
                continue
            if call.inputs[i].shape != ref.shape:
                shapes = f"argument {place} has shape {tuple(call.inputs[i].shape)}, the reference's {tuple(ref.shape)}"
                self.report.fail(self.trial, name, "input", shapes)
                continue
            error = check.relative_error(self._real(call.inputs[i]), self._real(ref))
            self.report.rows.append(Row(self.trial, "input", name, error, limit, error <= limit, f"argument {place}"))

    def _add_gradient(self, layer: str, key: int, call: _Call, truth: Any, plain: Any) -> None:
        """Sum what the layers that share a parameter give, and compare once all have."""
        self._uses[key] -= 1
        if truth is not None:
            before = self._sums.get(key)
            self._sums[key] = (truth, plain) if before is None else (before[0] + truth, before[1] + plain)
        if self._uses[key]:
            return
        p, name = self.weights.parameters[key]
        self.judged.add(key)
        if p.grad is None:
            self.report.fail(self.trial, name, "gradient", "missing: no backward pass reaches it, whatever the batch")
            return
        if key not in self._sums:
            return
        truth, plain = self._sums.pop(key)
        note = ""
        if bool(truth.any()):
            self.moving.add(key)
            note = "" if bool(p.grad.any()) else "zero, and should not be"
        elif call.dy and not any(bool(dy.any()) for dy in call.dy.values()):
            self.report.fail(self.trial, name, "gradient", "zero: what reaches its layer from behind is zero")
        else:
            self.report.note(f"{name}: its gradient is zero here and in the reference, as where the other half of a pair is")
        if call.indices is not None:
            count = _inside(_find(self.weights.base, layer))[0].num_experts
            note = self._of_experts(layer, name, p.grad, truth, call.indices, count) or note
        self._judge(name, "gradient", p.grad, truth, plain, check.GRADIENT_FACTOR, note)

    def _of_experts(
        self, layer: str, name: str, ours: torch.Tensor, truth: torch.Tensor, indices: torch.Tensor, count: int
    ) -> str:
        """Which experts have no gradient though they should; a note of those that no row reached."""
        reached = torch.zeros(count, dtype=torch.bool, device=indices.device)
        reached[indices[indices < count].long()] = True
        if not bool(reached.all()):
            which = ", ".join(map(str, (~reached).nonzero().flatten().tolist()))
            self.report.note(f"{layer}: no row of this batch reached experts {which}; another batch may")
        if truth.numel() % count or truth.ndim < 2:
            return ""
        parts = [_by_expert(name, t, count).ne(0).any(1) for t in (ours, truth)]
        dead = (parts[1] & ~parts[0]).nonzero().flatten().tolist()
        return f"zero for experts {', '.join(map(str, dead))}, which rows reach" if dead else ""


def _by_expert(name: str, t: torch.Tensor, count: int) -> torch.Tensor:
    """(E, numbers): PEFT's B has the expert fastest, all else has it slowest."""
    if "lora_B" in name:
        return t.reshape(-1, count).mT
    return t.reshape(count, -1)


def _names(module: nn.Module) -> list[str]:
    """Of parameters and buffers."""
    return [name for found in (module.named_parameters(), module.named_buffers()) for name, _ in found]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)


def _replaced(out: Any, values: list[Any]) -> Any:
    """What the reference's layer returned, with the model's tensors in it."""
    if isinstance(out, torch.Tensor):
        return values[0]
    old = _as_list(out)
    new = [ours if isinstance(ours, torch.Tensor) else ref for ours, ref in zip(values, old, strict=False)]
    new += old[len(new) :]
    if isinstance(out, Mapping):
        found = copy.copy(out)
        for name, value in zip(out, new, strict=True):
            found[name] = value  # type: ignore[index]
        return found
    return type(out)(new)


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Batch:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, model: Any) -> Any:
        return model(*self.args, **self.kwargs)

    def cast(self, dtype: torch.dtype) -> "_Batch":
        return _Batch(_cast(self.args, dtype), _cast(self.kwargs, dtype))

    def real_tokens(self) -> torch.Tensor | None:
        """(B, N), True for tokens that are no padding; ``None`` where all are real."""
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool(mask.all()):
            return None
        return mask.bool()

    def but(self, **changes: Any) -> "_Batch":
        kwargs = {**self.kwargs, **changes}
        return _Batch(self.args, {name: value for name, value in kwargs.items() if value is not None})


def _batch(batch: Any, of_transformers: bool) -> _Batch:
    if isinstance(batch, torch.Tensor):
        found = _Batch((), {"input_ids": batch}) if of_transformers else _Batch((batch,), {})
    elif isinstance(batch, Mapping):
        found = _Batch((), dict(batch))
    elif isinstance(batch, tuple | list):
        found = _Batch(tuple(batch), {})
    else:
        raise TypeError(f"check.model: batch must be a tensor, a tuple or a mapping, got {type(batch).__name__}")
    if of_transformers:
        found.kwargs.setdefault("use_cache", False)
        ids = found.kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor):
            found.kwargs.setdefault("labels", ids)
        real, labels = found.real_tokens(), found.kwargs.get("labels")
        if real is not None and isinstance(labels, torch.Tensor) and labels.shape == real.shape:
            found.kwargs["labels"] = labels.masked_fill(~real, -100)
    return found


def scalar(out: Any) -> torch.Tensor:
    """The loss; of a model that returns none, the mean square of its first output."""
    found = loss_of(lambda: out) if not isinstance(out, Mapping) or "loss" in out else out
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found
    return _first(out).double().square().mean()


def _first(out: Any) -> torch.Tensor:
    """The logits, or the first tensor that is no scalar."""
    if getattr(out, "logits", None) is not None:
        return out.logits  # type: ignore[no-any-return]
    return next(value for value in _as_list(out) if _is_float(value) and value.ndim)


def _padded(given: _Batch) -> _Batch:
    """The first sequence with padding behind it, the last with padding before it."""
    ids = given.kwargs["input_ids"]
    mask, some = torch.ones_like(ids), ids.shape[1] // 4
    mask[0, ids.shape[1] - some :] = 0
    if len(ids) > 1:
        mask[-1, :some] = 0
    labels = given.kwargs.get("labels", ids).masked_fill(mask == 0, -100)
    return given.but(attention_mask=mask, labels=labels, position_ids=None)


def _packed(given: _Batch) -> _Batch:
    """Two sequences in each row: the positions begin anew."""
    ids = given.kwargs["input_ids"]
    first = ids.shape[1] // 2 + 1
    positions = torch.cat([torch.arange(first), torch.arange(ids.shape[1] - first)]).to(ids.device)
    return given.but(attention_mask=None, position_ids=positions.expand_as(ids).contiguous())


@contextlib.contextmanager
def _window(base: Any, length: int) -> Iterator[bool]:
    """Within the context sliding windows are shorter than the batch; whether there are any that were not."""
    size = max(2, length // 3)
    found = [base.config, base.config.get_text_config(), *base.modules()]
    owners = {id(owner): owner for owner in found if isinstance(vars(owner).get("sliding_window"), int)}
    before = {key: owner.sliding_window for key, owner in owners.items() if owner.sliding_window > size}
    try:
        for key in before:
            owners[key].sliding_window = size
        yield bool(before)
    finally:
        for key, value in before.items():
            owners[key].sliding_window = value


# --- the whole check --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unchanged(base: nn.Module) -> Iterator[None]:
    """Weights, buffers, gradients, modes and random numbers are afterwards what they were; within it nothing is random."""
    trained = [p for p in base.parameters() if p.requires_grad]
    kept = [(t, t.detach().clone()) for t in (*trained, *_own_buffers(base))]
    grads = [(p, p.grad) for p in base.parameters()]
    modes = [(module, module.training) for module in base.modules()]
    device = next((p.device for p in base.parameters() if p.device.type == "cuda"), None)
    try:
        with torch.random.fork_rng(devices=[] if device is None else [device]):
            for module in base.modules():
                names = (name for name, value in vars(module).items() if isinstance(value, float) and value > 0)
                if any("drop" in name or "jitter" in name for name in (*names, type(module).__name__.lower())):
                    module.training = False
            yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        for p, grad in grads:
            p.grad = grad
        for module, mode in modes:
            module.training = mode


def _own_buffers(base: nn.Module) -> list[torch.Tensor]:
    return [b for name, b in base.named_buffers() if "parametrizations" not in name]


class _Check:
    """One call of :func:`check_model`."""

    def __init__(self, model: Any, against: Any) -> None:
        self.model = getattr(model, "_orig_mod", model)
        self.base: Any = base_model(self.model)
        self.of_transformers = hasattr(self.base, "config") and hasattr(self.base, "set_attn_implementation")
        self.against = None if against is None else base_model(against)
        if self.against is None and not self.of_transformers:
            raise ValueError(
                f"check.model: against must be the module before the change where model is none of transformers', got a "
                f"{type(self.base).__name__} alone"
            )
        self.weights = _Weights(self.base)
        exact = str(self.weights.exact).removeprefix("torch.")
        what = "the module before the change" if self.against is not None else "its own eager attention and experts"
        self.report = Report(f"{type(self.base).__name__}, {what} in {exact}, with the weights that the model has now")

    def reference(self, trial: str) -> _Reference:
        skeleton = _from_config(self.base) if self.against is None else _without_weights(self.against)
        return _Reference(skeleton, self.weights, self.report, trial)

    def trial(self, trial: str, given: _Batch, *, backward: bool = True) -> tuple[_Reference, Any]:
        """Run the batch and compare all layers; return the reference and the model's output."""
        reference = self.reference(trial)
        trained = [p for p in self.base.parameters() if p.requires_grad]
        backward = backward and bool(trained)
        for p in trained:
            p.grad = None
        with _Recorder(self.base, list(reference.layers)) as recorder, torch.set_grad_enabled(backward):
            out = given(self.model)
            loss = scalar(out)
            recorder.finished = True
            if backward and loss.requires_grad:
                loss.backward()
        if backward and not loss.requires_grad:
            self.report.fail(trial, "loss", "gradient", "missing: the loss depends on no trained parameter")
        reference.compare(given, recorder.calls, loss, backward)
        if backward:
            self._unseen(trial, reference)
        return reference, out

    def _unseen(self, trial: str, reference: _Reference) -> None:
        """Trained parameters of which no layer knows."""
        for key, (p, name) in self.weights.parameters.items():
            if not p.requires_grad or key in reference.judged:
                continue
            if p.grad is None:
                self.report.fail(trial, name, "gradient", "missing: no backward pass reaches it, whatever the batch")
            elif not bool(p.grad.isfinite().all()):
                self.report.fail(trial, name, "gradient", "not finite")
            else:
                self.report.note(f"{name}: its gradient is finite and compared with nothing, since no layer has it")

    def frozen(self) -> None:
        """Adapters that no batch can reach."""
        pairs = {name: p.requires_grad for p, name in self.weights.parameters.values() if "lora_" in name}
        for name, trained in pairs.items():
            if not trained and any(pairs.values()):
                adapter = name.removesuffix(".weight").rpartition(".")[2]
                if any(others for other, others in pairs.items() if f".{adapter}." in f".{other}."):
                    note = "frozen (requires_grad is False) beside trained ones: no batch can reach it"
                    self.report.fail("as given", name, "gradient", note)

    def logits(self, reference: _Reference, given: _Batch, out: Any) -> None:
        """The whole's logits: the error of the token in the middle, since a router may choose another expert at a near tie."""
        truth = _first(reference.whole(given, self.weights.exact))
        plain = _first(reference.whole(given, None))
        ours = _first(out).detach()
        errors = [_error_of_tokens(reference._real(t), reference._real(truth)) for t in (ours, plain)]
        limit = check.FORWARD_FACTOR * errors[1] + check.FLOOR[self.weights.dtype]
        self.report.rows.append(Row("as given", "whole", "logits", errors[0], limit, errors[0] <= limit))

    def packed_weights(self) -> None:
        """The weights against those before the change: the same, or as far off as packing them anew is."""
        if self.against is None:
            return
        for name, before in self.against.named_parameters():
            module, leaf, _ = self.weights.place(name)
            stored = self.weights.stored(name)
            if isinstance(stored, NF4Tensor):
                self._packed_weight(name, before.detach(), stored, is_stored_transposed(module, leaf))
            elif isinstance(stored, torch.Tensor):
                error = check.relative_error(stored, before.detach().to(stored.dtype))
                limit = check.FLOOR[self.weights.dtype]
                self.report.rows.append(Row("as given", "weight", name, error, limit, error <= limit))

    def _packed_weight(self, name: str, before: torch.Tensor, q: NF4Tensor, transposed: bool) -> None:
        before = before.mT if transposed else before
        if q.code_name == "nf4":
            anew = nf4_quantize(before, block_size=q.block_size, double_quant=q.nested_absmax is not None)
        elif q.code_name == "e2m1":
            anew = fp4_quantize(before, format="mxfp4" if q.block_size == 32 else "nvfp4")
        else:
            self.report.note(f"{name}: packed in {q.code_name}, and not compared with what it was")
            return
        parts = zip(*(_unpacked(x, torch.float32).flatten(0, -3) for x in (q, anew)), before.flatten(0, -3), strict=True)
        rows = []
        for expert, (ours, fresh, ref) in enumerate(parts if before.ndim > 2 else ()):
            error, limit = check.relative_error(ours, ref), check.FORWARD_FACTOR * check.relative_error(fresh, ref)
            limit += check.FLOOR[torch.float32]
            rows.append(Row("as given", "weight", name, error, limit, error <= limit, f"expert {expert}"))
        self.report.rows += [row for row in rows if not row.passed] or rows[:1]

    def step(self, given: _Batch, moving: set[int]) -> None:
        """A step of SGD: what does not move though its gradient is not zero, and whether all layers see the new weights."""
        trained = [(key, p, name) for key, (p, name) in self.weights.parameters.items() if p.requires_grad]
        groups = []
        for _, p, _ in trained:
            norm = 0.0 if p.grad is None else float(p.grad.float().norm())
            if norm and math.isfinite(norm):
                groups.append({"params": [p], "lr": (float(p.detach().float().norm()) or 1.0) / 32 / norm})
        if not groups:
            return
        before = {key: p.detach().clone() for key, p, _ in trained}
        torch.optim.SGD(groups).step()
        for key, p, name in trained:
            if key in moving:
                moved = not torch.equal(p, before[key])
                why = "" if moved else "does not move, and should"
                self.report.rows.append(Row("after a step", "moved", name, 0.0 if moved else math.inf, 0.0, moved, why))
        self.trial("after a step", given, backward=False)

    def compiled(self, given: _Batch, logits: torch.Tensor, gradients: Mapping[int, torch.Tensor]) -> None:
        """Under ``torch.compile``, against the model as it is."""
        for p in self.base.parameters():
            p.grad = None
        out = given(torch.compile(self.model))
        loss = scalar(out)
        if gradients:
            loss.backward()
        error = _error_of_tokens(_first(out).detach(), logits)
        limit = COARSE if self.weights.dtype.itemsize < 4 else 1e-3
        self.report.rows.append(Row("compiled", "whole", "logits", error, limit, error <= limit))
        for key, before in gradients.items():
            p, name = self.weights.parameters[key]
            error = math.inf if p.grad is None else check.relative_error(p.grad, before)
            self.report.rows.append(Row("compiled", "gradient", name, error, COARSE, error <= COARSE))

    def captured(self, given: _Batch) -> None:
        """Steps in a CUDA graph beside the same from Python; in the third of four the learning rate is zero."""
        trained = [(p, name) for p, name in self.weights.parameters.values() if p.requires_grad]
        start = [p.detach().clone() for p, _ in trained]
        losses: list[list[float]] = []
        for capture in (False, True):
            with torch.no_grad():
                for (p, _), value in zip(trained, start, strict=True):
                    p.copy_(value)
            optimizer = torch.optim.AdamW([p for p, _ in trained], lr=LR, weight_decay=0.0)
            step = CapturedStep(
                self.model, optimizer, loss=lambda model, *args, **kwargs: scalar(model(*args, **kwargs)), warm=1, capture=capture
            )
            losses.append([])
            for lr in (LR, LR, 0.0, LR):
                for group in optimizer.param_groups:
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(lr)
                    else:
                        group["lr"] = lr
                before = [p.detach().clone() for p, _ in trained]
                losses[-1].append(float(step(*given.args, **self._known(given))))
                if not capture:
                    continue
                moved = [not torch.equal(p, value) for (p, _), value in zip(trained, before, strict=True)]
                if lr == 0.0:
                    for (_, name), does in zip(trained, moved, strict=True):
                        note = "moves though the learning rate is zero now" if does else ""
                        self.report.rows.append(
                            Row("captured", "moved", name, math.inf if does else 0.0, 0.0, not does, note)
                        )
            if capture and step.why_eager is not None:
                self.report.note(f"CapturedStep runs this model's steps from Python: {step.why_eager}")
        limit = max(GLUE * check.FLOOR[self.weights.dtype], 1e-4)
        for i, (plain, ours) in enumerate(zip(*losses, strict=True)):
            error = abs(ours - plain) / (abs(plain) or 1.0)
            self.report.rows.append(Row("captured", "loss", f"step {i + 1}", error, limit, error <= limit))

    def _known(self, given: _Batch) -> dict[str, Any]:
        if not self.of_transformers:
            return given.kwargs
        from kernelbook.interop.transformers_attention import known_masks

        return known_masks(self.model, given.kwargs)


def _error_of_tokens(ours: torch.Tensor, ref: torch.Tensor) -> float:
    ours, ref = (t.reshape(-1, t.shape[-1]).double() for t in (ours, ref))
    return float(((ours - ref).norm(dim=1) / ref.norm(dim=1).clamp(min=1e-30)).nan_to_num(math.inf).median())


def check_model(
    model: nn.Module, batch: Any, *, against: nn.Module | None = None, compiled: bool | None = None, captured: bool | None = None
) -> Report:
    """See :func:`kernelbook.check.model`."""
    checking = _Check(model, against)
    given = _batch(batch, checking.of_transformers)
    base, report = checking.base, checking.report
    on_gpu = any(p.device.type == "cuda" for p in base.parameters())
    with _unchanged(base):
        checking.packed_weights()
        checking.frozen()
        reference, out = checking.trial("as given", given)
        checking.logits(reference, given, out)
        logits = _first(out).detach()
        del out
        trained = {key: p.grad for key, (p, _) in checking.weights.parameters.items() if p.grad is not None}
        checking.step(given, reference.moving)
    with _unchanged(base):
        ids = given.kwargs.get("input_ids")
        if checking.of_transformers and isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] >= 8:
            checking.trial("padding", _padded(given))
            checking.trial("packing", _packed(given))
            with _window(base, ids.shape[1]) as shorter:
                if shorter:
                    checking.trial("window", given.but(attention_mask=None))
        if on_gpu if compiled is None else compiled:
            checking.compiled(given, logits, trained)
        if trained and (on_gpu if captured is None else captured):
            checking.captured(given)
    return report
