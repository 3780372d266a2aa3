"""Is a whole model still right after a swap, a quantization or an adapter? Layer by layer, by the rule of ``check.py``.

``kernelbook.check.model`` calls :func:`check_model`. The model runs once, and hooks keep what each layer was given and what it returned,
forwards and backwards. Then a second model without weights runs the same batch. When one of its layers is called, that layer
gets the model's own weights and the inputs that the model's layer had, computes in the reference's dtype and in the
model's, and loses them again. So the memory is that of one layer, an error is that of its own layer, and masks, windows, sinks and
soft caps are those of the reference, whatever the model has made of them.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kernelbook import check
from kernelbook.interop import base_model
from kernelbook.interop.check_layers import Recorder, Weights
from kernelbook.interop.check_reference import GLUE, Batch, Reference, batch_of, first_of, scalar, shorter_windows
from kernelbook.interop.check_report import Report
from kernelbook.nf4 import NF4Tensor, nf4_quantize
from kernelbook.nn.parameters import is_stored_transposed
from kernelbook.packed.fp4 import fp4_quantize
from kernelbook.train import CapturedStep

COARSE = 0.25  # of a gradient that a compiler made: rounding has gone through all layers, and a factor of 1/2 has not
LR = 1e-4


@contextlib.contextmanager
def _unchanged(base: nn.Module) -> Iterator[None]:
    """Weights, buffers, gradients, modes and random numbers are afterwards what they were; within it nothing is random."""
    trained = [p for p in base.parameters() if p.requires_grad]
    buffers = [b for name, b in base.named_buffers() if "parametrizations" not in name]
    kept = [(t, t.detach().clone()) for t in (*trained, *buffers)]
    grads = [(p, p.grad) for p in base.parameters()]
    modes = [(module, module.training) for module in base.modules()]
    device = next((p.device for p in base.parameters() if p.device.type == "cuda"), None)
    fast = torch.backends.mha.get_fastpath_enabled()  # it passes over the modules in PyTorch's encoder layers
    torch.backends.mha.set_fastpath_enabled(False)
    casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # within somebody's autocast casts of weights would outlive a step
    try:
        with torch.random.fork_rng(devices=[] if device is None else [device]):
            for module in base.modules():
                names = (name for name, value in vars(module).items() if isinstance(value, float) and value > 0)
                if any("drop" in name or "jitter" in name for name in (*names, type(module).__name__.lower())):
                    module.training = False
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_autocast_cache_enabled(casts)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        for p, grad in grads:
            p.grad = grad
        for module, mode in modes:
            module.training = mode


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
        self.weights = Weights(self.base)
        exact = str(self.weights.exact).removeprefix("torch.")
        what = "the module before the change" if self.against is not None else "its own eager attention and experts"
        self.report = Report(f"{type(self.base).__name__}, {what} in {exact}, with the weights that the model has now")

    def reference(self) -> Reference:
        if self.against is None:
            config = copy.deepcopy(self.base.config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
            with torch.device("meta"):
                skeleton = type(self.base)(config)
            return Reference(skeleton, self.weights, self.report)
        memo: dict[int, Any] = {}  # for a copy on the meta device
        for p in self.against.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        return Reference(copy.deepcopy(self.against, memo), self.weights, self.report)

    def trial(self, trial: str, given: Batch, *, backward: bool = True) -> tuple[Reference, Any]:
        """Run the batch and compare all layers; return the reference and the model's output."""
        self.report.trial, reference = trial, self.reference()
        trained = [p for p in self.base.parameters() if p.requires_grad]
        backward = backward and bool(trained)
        for p in trained:
            p.grad = None
        with Recorder(self.base, list(reference.layers)) as recorder, torch.set_grad_enabled(backward):
            out = given(self.model)
            loss = scalar(out)
            recorder.finished = True
            if backward and loss.requires_grad:
                loss.backward()
        if backward and not loss.requires_grad:
            self.report.fail("gradient", "loss", "missing: the loss depends on no trained parameter")
        reference.compare(given, recorder.calls, loss, backward)
        if backward:
            self._unseen(reference)
        return reference, out

    def _unseen(self, reference: Reference) -> None:
        """Trained parameters of which no layer knows."""
        for key, (p, name) in self.weights.parameters.items():
            if not p.requires_grad or key in reference.judged:
                continue
            if p.grad is None:
                self.report.fail("gradient", name, "missing: no backward pass reaches it, whatever the batch")
            elif not bool(p.grad.isfinite().all()):
                self.report.fail("gradient", name, "not finite")
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
                    self.report.fail("gradient", name, note)

    def keeps_apart(self, given: Batch) -> bool:
        """Return whether packed sequences do not see each other in the reference: some models of transformers do not look at positions."""
        ids, first = given.kwargs["input_ids"], int(given.kwargs["position_ids"][0].argmax()) + 1
        other = torch.cat([ids[:, :first].roll(1, 1), ids[:, first:]], 1)
        reference = self.reference()
        outs = (reference.whole(given.but(input_ids=x), self.weights.exact) for x in (ids, other))
        one, two = (first_of(out)[:, first:] for out in outs)
        apart = check.relative_error(one, two) < 1e-5  # other tokens come in another order to experts
        if not apart:
            self.report.note("packing is not tried: in the reference packed sequences see each other")
        return apart

    def logits(self, reference: Reference, given: Batch, out: Any) -> None:
        """The whole's logits: the error of the token in the middle, since a router may choose another expert at a near tie."""
        truth = first_of(reference.whole(given, self.weights.exact))
        plain = first_of(reference.whole(given, None))
        ours = first_of(out).detach()
        errors = [_error_of_tokens(reference.real(t), reference.real(truth)) for t in (ours, plain)]
        limit = check.FORWARD_FACTOR * errors[1] + check.FLOOR[self.weights.dtype]
        self.report.add("whole", "logits", errors[0], limit)

    def packed_weights(self) -> None:
        """The weights against those before the change: the same, or as far off as packing them anew is."""
        if self.against is None:
            return
        for name, before in self.against.named_parameters():
            module, leaf, _ = self.weights.place(name)
            stored, before = self.weights.stored(name), before.detach()
            if isinstance(stored, NF4Tensor):
                self._packed_weight(name, before.mT if is_stored_transposed(module, leaf) else before, stored)
            elif isinstance(stored, torch.Tensor):
                error = check.relative_error(stored, before.to(stored.dtype))
                self.report.add("weight", name, error, check.FLOOR[self.weights.dtype])

    def _packed_weight(self, name: str, before: torch.Tensor, q: NF4Tensor) -> None:
        if q.code_name == "nf4":
            anew = nf4_quantize(before, block_size=q.block_size, double_quant=q.nested_absmax is not None)
        elif q.code_name == "e2m1":
            anew = fp4_quantize(before, format="mxfp4" if q.block_size == 32 else "nvfp4")
        else:
            self.report.note(f"{name}: packed in {q.code_name}, and not compared with what it was")
            return
        matrices = (t.reshape(-1, *t.shape[-2:]) for t in (q.as_float64(), anew.as_float64(), before))
        for expert, (ours, fresh, ref) in enumerate(zip(*matrices, strict=True)):
            limit = check.FORWARD_FACTOR * check.relative_error(fresh, ref) + check.FLOOR[torch.float32]
            self.report.add("weight", name, check.relative_error(ours, ref), limit, f"expert {expert}")

    def step(self, given: Batch, moving: set[int]) -> None:
        """A step of SGD: what does not move though its gradient is not zero, and whether all layers see the new weights."""
        trained = [(key, p, name) for key, (p, name) in self.weights.parameters.items() if p.requires_grad]
        groups = []
        for _, p, _ in trained:
            norm = 0.0 if p.grad is None else float(p.grad.float().norm())
            if norm and math.isfinite(norm):
                groups.append({"params": [p], "lr": (float(p.detach().float().norm()) or 1.0) / 32 / norm})
        if not groups:
            return
        self.report.trial, before = "after a step", {key: p.detach().clone() for key, p, _ in trained}
        torch.optim.SGD(groups).step()
        for key, p, name in trained:
            if key in moving:
                moved = not torch.equal(p, before[key])
                why = "" if moved else "does not move, and should"
                self.report.add("moved", name, 0.0 if moved else math.inf, 0.0, why)
        self.trial("after a step", given, backward=False)

    def attempt(self, trial: str, call: Callable[[], None]) -> None:
        """Call it; what it raises is an outcome too."""
        self.report.trial = trial
        try:
            call()
        except Exception as error:  # a compiler can raise anything
            self.report.fail("whole", type(self.base).__name__, f"{type(error).__name__}: {error}")

    def compiled(self, given: Batch, logits: torch.Tensor, gradients: Mapping[int, torch.Tensor]) -> None:
        """Under ``torch.compile``, against the model as it is."""
        for p in self.base.parameters():
            p.grad = None
        out = given(torch.compile(self.model))
        loss = scalar(out)
        if gradients:
            loss.backward()
        error = _error_of_tokens(first_of(out).detach(), logits)
        limit = COARSE if self.weights.dtype.itemsize < 4 else 1e-3
        self.report.add("whole", "logits", error, limit)
        for key, before in gradients.items():
            p, name = self.weights.parameters[key]
            error = math.inf if p.grad is None else check.relative_error(p.grad, before)
            self.report.add("gradient", name, error, COARSE)

    def captured(self, given: Batch) -> None:
        """Steps in a CUDA graph beside the same from Python; in the third of four the learning rate is zero."""
        kwargs = given.kwargs
        if self.of_transformers:
            from kernelbook.interop.transformers_attention import known_masks

            kwargs = known_masks(self.model, kwargs)
        trained = [(p, name) for p, name in self.weights.parameters.values() if p.requires_grad]
        start = [p.detach().clone() for p, _ in trained]
        losses: list[list[float]] = []
        how: dict[str, Any] = {"loss": lambda model, *args, **named: scalar(model(*args, **named)), "warm": 1}
        for capture in (False, True):
            with torch.no_grad():
                for (p, _), value in zip(trained, start, strict=True):
                    p.copy_(value)
            rate = torch.tensor(LR, device=start[0].device)
            parameters = [p for p, _ in trained]
            optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0, fused=True, capturable=rate.is_cuda)
            step = CapturedStep(self.model, optimizer, **how, capture=capture)
            losses.append([])
            for lr in (LR, LR, 0.0, LR):
                for group in optimizer.param_groups:
                    group["lr"].fill_(lr)  # as PyTorch's schedulers do
                before = [p.detach().clone() for p, _ in trained]
                losses[-1].append(float(step(*given.args, **kwargs)))
                for (p, name), value in zip(trained, before, strict=True) if capture and not lr else ():
                    moves = not torch.equal(p, value)
                    note = "moves though the learning rate is zero now" if moves else ""
                    self.report.add("moved", name, math.inf if moves else 0.0, 0.0, note)
            if capture and step.why_eager is not None:
                self.report.note(f"CapturedStep runs this model's steps from Python: {step.why_eager}")
        limit = max(GLUE * check.FLOOR[self.weights.between], 1e-4)
        for i, (plain, ours) in enumerate(zip(*losses, strict=True)):
            error = abs(ours - plain) / (abs(plain) or 1.0)
            self.report.add("loss", f"step {i + 1}", error, limit)


def _error_of_tokens(ours: torch.Tensor, ref: torch.Tensor) -> float:
    ours, ref = (t.reshape(-1, t.shape[-1]).double() for t in (ours, ref))
    return float(((ours - ref).norm(dim=1) / ref.norm(dim=1).clamp(min=1e-30)).nan_to_num(math.inf).median())


def check_model(
    model: nn.Module,
    batch: Any,
    *,
    against: nn.Module | None = None,
    compiled: bool | None = None,
    captured: bool | None = None,
) -> Report:
    """Compare a model with the same one computed by plain PyTorch, layer by layer, by the rule of ``check.py``.

    The model runs ``batch`` once, forwards and backwards. Each layer (attention, experts, router, norm, embedding) is then
    computed anew from the inputs and the output's gradient that the model's own layer had, with the model's own weights:
    packed ones made dense and LoRA pairs added in full. This is done in float32 (float64 for a model in float32), which
    is the truth, and in the model's dtype, which says how large an error may be. Outputs, gradients of inputs and of every
    trained parameter, what reaches a layer from the layers before it, the loss and its gradient, and the logits of the whole are
    compared. After a step of SGD all outputs are compared again. A model of transformers is tried with padding, with packed
    sequences (``position_ids`` that begin anew, where the reference looks at them) and, where it has sliding windows that the batch does not fill, with shorter ones.

    Everything random is off meanwhile. Afterwards weights, gradients, modes and the generators' states are what they were.
    Memory: what training takes, and one layer, dense, in float32; what layers took and returned is kept on the host.

    Args:
        model: a model of transformers, also wrapped by PEFT, swapped or quantized; or any module, with ``against``.
        batch: token ids (B, N), or the arguments by name, or in a tuple. ``labels`` are the tokens where there are none.
            Padded tokens, and those that follow padding, lose their labels.
        against: the model before the change, with the same names: each layer is compared with its layer, and its weights with
            the model's: dense ones must be the same, and packed ones as near as packing them anew is. Without it the reference is
            made of ``model.config``, with eager attention and eager experts.
        compiled: compare with ``torch.compile(model)`` too, which takes as long as compiling it; ``None``: on a GPU.
        captured: compare steps of :class:`kernelbook.train.CapturedStep` with ordinary ones too; ``None``: on a GPU.

    Returns:
        A report: printed, a table of what is wrong, the largest first; ``ok``; ``rows``; ``notes`` of what is no fault, such as
        experts that no row of this batch reached.

    Raises:
        TypeError: ``batch`` is of another kind.
        ValueError: ``model`` is none of transformers' and there is no ``against``; an adapter is DoRA.
    """
    checking = _Check(model, against)
    given = batch_of(batch, checking.of_transformers)
    base, report = checking.base, checking.report
    on_gpu = any(p.device.type == "cuda" for p in base.parameters())
    with _unchanged(base):
        checking.packed_weights()
        checking.frozen()
        reference, out = checking.trial("as given", given)
        checking.logits(reference, given, out)
        logits = first_of(out).detach()
        del out
        trained = {key: p.grad for key, (p, _) in checking.weights.parameters.items() if p.grad is not None}
        checking.step(given, reference.moving)
    with _unchanged(base):
        ids = given.kwargs.get("input_ids")
        if checking.of_transformers and isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] >= 8:
            checking.trial("padding", given.padded())
            if checking.keeps_apart(given.packed()):
                checking.trial("packing", given.packed())
            with shorter_windows(base, ids.shape[1]) as shorter:
                if shorter:
                    checking.trial("window", given.but(attention_mask=None))
        if on_gpu if compiled is None else compiled:
            checking.attempt("compiled", lambda: checking.compiled(given, logits, trained))
        if trained and (on_gpu if captured is None else captured):
            checking.attempt("captured", lambda: checking.captured(given))
    return report
