"""A model without weights beside one that has them: layer by layer the same inputs, and what should have come out."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from kernelbook import check
from kernelbook.interop.check_layers import (
    Call,
    Weights,
    as_list,
    cast,
    detached,
    is_float,
    joined,
    layers_of,
    module_at,
    names_in,
    replaced,
    unwrapped,
)
from kernelbook.interop.check_report import Report

# Times check.FLOOR: what may be lost between layers and behind them, where residuals are added and logits capped.
GLUE = 4.0


@dataclasses.dataclass
class Batch:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, model: Any) -> Any:
        return model(*self.args, **self.kwargs)

    def cast(self, dtype: torch.dtype) -> "Batch":
        return Batch(cast(self.args, dtype), cast(self.kwargs, dtype))

    def real_tokens(self) -> torch.Tensor | None:
        """(B, N), True for tokens that are no padding; ``None`` where all are real."""
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool(mask.all()):
            return None
        return mask.bool()

    def but(self, **changes: Any) -> "Batch":
        kwargs = {**self.kwargs, **changes}
        return Batch(self.args, {name: value for name, value in kwargs.items() if value is not None})

    def padded(self) -> "Batch":
        """The first sequence with padding behind it, the last with padding before it."""
        ids = self.kwargs["input_ids"]
        mask, some = torch.ones_like(ids), ids.shape[1] // 4
        mask[0, ids.shape[1] - some :] = 0
        if len(ids) > 1:
            mask[-1, :some] = 0
        labels = _unlabelled(self.kwargs.get("labels", ids), mask.bool())
        return self.but(attention_mask=mask, labels=labels, position_ids=None)

    def packed(self) -> "Batch":
        """Two sequences in each row: the positions begin anew."""
        ids = self.kwargs["input_ids"]
        first = ids.shape[1] // 2 + 1
        positions = torch.cat([torch.arange(first), torch.arange(ids.shape[1] - first)]).to(ids.device)
        return self.but(attention_mask=None, position_ids=positions.expand_as(ids).contiguous())


def batch_of(batch: Any, of_transformers: bool) -> Batch:
    if isinstance(batch, torch.Tensor):
        found = Batch((), {"input_ids": batch}) if of_transformers else Batch((batch,), {})
    elif isinstance(batch, Mapping):
        found = Batch((), dict(batch))
    elif isinstance(batch, tuple | list):
        found = Batch(tuple(batch), {})
    else:
        raise TypeError(f"check.model: batch must be a tensor, a tuple or a mapping, got {type(batch).__name__}")
    if of_transformers:
        found.kwargs.setdefault("use_cache", False)
        ids = found.kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor):
            found.kwargs.setdefault("labels", ids)
        real, labels = found.real_tokens(), found.kwargs.get("labels")
        if real is not None and isinstance(labels, torch.Tensor) and labels.shape == real.shape:
            found.kwargs["labels"] = _unlabelled(labels, real)
    return found


def _unlabelled(labels: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Labels without those of padding and those that padding would have to foretell: its attention is anything."""
    before = torch.cat([real[:, :1], real[:, :-1]], dim=1)
    return labels.masked_fill(~(real & before), -100)


def scalar(out: Any) -> torch.Tensor:
    """The loss; of a model that returns none, the mean square of its first output."""
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", as_list(out)[0])
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found
    return first_of(out).double().square().mean()


def first_of(out: Any) -> torch.Tensor:
    """The logits, or the first tensor that is no scalar, or the scalar, as one row."""
    if getattr(out, "logits", None) is not None:
        return out.logits  # type: ignore[no-any-return]
    found = [value for value in as_list(out) if is_float(value)]
    return torch.atleast_1d(next((value for value in found if value.ndim), found[0]))


@contextlib.contextmanager
def shorter_windows(base: Any, length: int) -> Iterator[bool]:
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


class Reference:
    """Runs a batch through a model without weights, and compares each of its layers with the call of the model's own."""

    def __init__(self, skeleton: nn.Module, weights: Weights, report: Report) -> None:
        self.skeleton, self.weights, self.report = skeleton.eval(), weights, report
        self.layers = dict(layers_of(skeleton))
        self.keep: torch.Tensor | None = None
        self.judged: set[int] = set()  # parameters whose gradient was compared
        self.moving: set[int] = set()  # parameters whose gradient is not zero
        self._calls: dict[str, list[Call]] = {}
        self._uses: dict[int, int] = {}
        self._sums: dict[int, tuple[Any, Any]] = {}
        self._last: tuple[str, Call, list[Any]] | None = None
        inside = {joined(layer, name) for layer, part in self.layers.items() for name in names_in(part)}
        outside = (name for name in names_in(skeleton) if name not in inside)
        self._outside = {name: weights.value(name, weights.exact, {}) for name in outside}

    # --- the whole, for its logits ---

    def whole(self, given: "Batch", dtype: torch.dtype | None) -> Any:
        """Compute the whole in ``dtype``, or in the model's own, one layer at a time."""
        used = dtype or self.weights.dtype

        def forward(name: str, args: Any, kwargs: Any) -> Any:
            return self._compute(name, cast(args, used), cast(kwargs, used), dtype, {})

        with torch.no_grad(), self._as_layers(forward):
            return given.cast(used)(self.skeleton)

    # --- layer by layer ---

    def compare(self, given: "Batch", calls: dict[str, list[Call]], loss: torch.Tensor, backward: bool) -> None:
        """Compare all layers, and the loss that the reference makes of the model's last layer."""
        self._calls, self.keep = {name: list(found) for name, found in calls.items()}, given.real_tokens()
        for name in self.layers if backward else ():
            for key in self._trained_in(name):
                self._uses[key] = self._uses.get(key, 0) + len(calls[name])
        with torch.enable_grad(), self._as_layers(self._layer):
            ref = scalar(given.cast(self.weights.exact)(self.skeleton))
        for name, left in self._calls.items():
            if left:
                self.report.fail("output", name, f"called {len(left)} times more than in the reference")
        error, limit = check.relative_error(loss, ref), GLUE * check.FLOOR[self.weights.between]
        self.report.add("loss", "loss", error, limit)
        if self._last is not None and ref.requires_grad:
            name, call, leaves = self._last
            wanted = {i: leaves[i] for i in call.dy if leaves[i].requires_grad}
            found = torch.autograd.grad(ref, list(wanted.values()), allow_unused=True)
            for i, truth in zip(wanted, found, strict=True):
                if truth is not None:
                    self._judge(name, "loss grad", [call.dy[i], truth, truth], check.GRADIENT_FACTOR)

    @contextlib.contextmanager
    def _as_layers(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Within the context ``forward(name, args, kwargs)`` is what layers do, and products are not rounded to TF32."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with _reparametrize_module(self.skeleton, self._outside):
                for name, layer in self.layers.items():
                    layer.__dict__["forward"] = lambda *args, name=name, **kwargs: forward(name, args, kwargs)
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for layer in self.layers.values():
                layer.__dict__.pop("forward", None)

    def _compute(self, name: str, args: Any, kwargs: Any, dtype: torch.dtype | None, leaves: dict[int, Any]) -> Any:
        layer, value = self.layers[name], self.weights.value
        with _reparametrize_module(layer, {own: value(joined(name, own), dtype, leaves) for own in names_in(layer)}):
            return type(layer).forward(layer, *args, **kwargs)

    def _layer(self, name: str, args: Any, kwargs: Any) -> Any:
        """Compare a layer; return what the model's own returned."""
        args, kwargs = detached(args), detached(kwargs)
        if not self._calls[name]:
            self.report.fail("output", name, "not called, and it is in the reference")
            return detached(self._compute(name, args, kwargs, self.weights.exact, {}))
        call = self._calls[name].pop(0).to(self.weights.device)
        self._judge_inputs(name, call, args, kwargs)
        out, truth, dx, dw = self._computed(name, call, args, kwargs, self.weights.exact)
        _, plain, plain_dx, plain_dw = self._computed(name, call, args, kwargs, None)
        for i, (ours, ref, base) in enumerate(zip(call.out, truth, plain, strict=False)):
            if is_float(ours) and is_float(ref) and ours.numel():
                note = f"output {i}" if i else ""
                three = [self.real(t) if t.shape == ref.shape else t for t in (ours, ref, base)]
                self._judge(name, "output", three, check.FORWARD_FACTOR, note)
        for i, place in {i: place for place, i in call.places.items()}.items():
            if i in call.dx and dx[i] is not None:
                three = [call.dx[i], dx[i], plain_dx[i]]
                self._judge(name, "input grad", three, check.GRADIENT_FACTOR, f"argument {place}")
        for key in self._trained_in(name) if self._uses else ():
            self._add_gradient(name, key, call, dw.get(key), plain_dw.get(key))
        leaves = [
            cast(ours, self.weights.exact).clone().requires_grad_(i in call.dy) if is_float(ours) else ours
            for i, ours in enumerate(call.out)
        ]
        if call.dy:
            self._last = name, call, leaves
        return replaced(out, leaves)

    def _trained_in(self, name: str) -> list[int]:
        names = (joined(name, own) for own, _ in self.layers[name].named_parameters())
        return [id(p) for own in names for p in self.weights.trained(own)]

    def _computed(
        self, name: str, call: Call, args: Any, kwargs: Any, dtype: torch.dtype | None
    ) -> tuple[Any, list[Any], dict[int, Any], dict[int, Any]]:
        """A layer's output, as it is and as a list, and the gradients of its inputs and of parameters, in ``dtype``."""
        used = dtype or self.weights.dtype
        inputs = [
            (cast(x, dtype) if dtype else x).detach().clone().requires_grad_(i in call.dx)
            for i, x in enumerate(call.inputs)
        ]
        args = tuple(inputs[call.places[i]] if i in call.places else cast(x, used) for i, x in enumerate(args))
        kwargs = {i: inputs[call.places[i]] if i in call.places else cast(x, used) for i, x in kwargs.items()}
        leaves: dict[int, torch.Tensor] = {}
        out = self._compute(name, args, kwargs, dtype, leaves)
        values = as_list(out)
        pairs = [
            (value, call.dy[i].to(value.dtype))
            for i, value in enumerate(values)
            if i in call.dy and is_float(value) and value.requires_grad and value.shape == call.dy[i].shape
        ]
        wanted = {**{i: x for i, x in enumerate(inputs) if x.requires_grad}, **leaves}
        grads: dict[int, Any] = {}
        if pairs and wanted:
            given = [v for v, _ in pairs], list(wanted.values()), [g for _, g in pairs]
            grads = dict(zip(wanted, torch.autograd.grad(*given, allow_unused=True), strict=True))
        dx = {i: grads.get(i) for i in range(len(inputs))}
        return detached(out), detached(values), dx, {key: grads.get(key) for key in leaves}

    def real(self, t: torch.Tensor) -> torch.Tensor:
        """The rows of tokens that are no padding."""
        keep = self.keep
        if keep is None:
            return t
        if t.shape[:2] == keep.shape:
            return t[keep]
        return t[keep.flatten()] if t.ndim > 1 and t.shape[0] == keep.numel() else t

    # --- one comparison ---

    def _judge(self, name: str, what: str, three: list[torch.Tensor], factor: float, note: str = "") -> None:
        """``three``: the model's, the truth, and what the model's dtype makes of it."""
        ours, ref, plain = three
        try:
            verdict = check.compare(name, ours, ref, plain.to(ours.dtype), factor=factor)
        except check.CheckError as error:
            self.report.fail(what, name, str(error))
            return
        if not math.isfinite(verdict.error):
            note = f"{note} not finite".strip()
        self.report.judge(what, name, verdict, note)

    def _judge_inputs(self, name: str, call: Call, args: Any, kwargs: Any) -> None:
        """What reaches a layer, of what the layers before it returned."""
        limit = GLUE * check.FLOOR[self.weights.between]
        for place, i in call.places.items():
            ref: Any = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            if not is_float(ref):
                continue
            if call.inputs[i].shape != ref.shape:
                shapes = f"argument {place} has shape {tuple(call.inputs[i].shape)}, the reference's {tuple(ref.shape)}"
                self.report.fail("input", name, shapes)
                continue
            error = check.relative_error(self.real(call.inputs[i]), self.real(ref))
            self.report.add("input", name, error, limit, f"argument {place}")

    def _add_gradient(self, layer: str, key: int, call: Call, truth: Any, plain: Any) -> None:
        """Sum what the layers that share a parameter give, and compare once all have."""
        self._uses[key] -= 1
        if truth is not None:
            truths, plains = self._sums.get(key, (0, 0))
            self._sums[key] = truths + truth, plains + plain
        if self._uses[key]:
            return
        p, name = self.weights.parameters[key]
        self.judged.add(key)
        if p.grad is None:
            self.report.fail("gradient", name, "missing: no backward pass reaches it, whatever the batch")
            return
        if key not in self._sums:
            return
        truth, plain = self._sums.pop(key)
        note = ""
        if bool(truth.any()):
            self.moving.add(key)
            note = "" if bool(p.grad.any()) else "zero, and should not be"
        elif call.dy and not any(bool(dy.any()) for dy in call.dy.values()):
            self.report.fail("gradient", name, "zero: what reaches its layer from behind is zero")
        else:
            self.report.note(
                f"{name}: its gradient is zero here and in the reference, as where the other half of a pair is"
            )
        if call.indices is not None:
            count = unwrapped(module_at(self.weights.base, layer))[0].num_experts
            note = self._of_experts(layer, name, p.grad, truth, call.indices, count) or note
        self._judge(name, "gradient", [p.grad, truth, plain], check.GRADIENT_FACTOR, note)

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
        # PEFT's B has the expert fastest, all else has it slowest.
        by_expert = [t.reshape(-1, count).mT if "lora_B" in name else t.reshape(count, -1) for t in (ours, truth)]
        some, wanted = (t.ne(0).any(1) for t in by_expert)
        dead = (wanted & ~some).nonzero().flatten().tolist()
        return f"zero for experts {', '.join(map(str, dead))}, which rows reach" if dead else ""
