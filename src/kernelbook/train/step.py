"""A training step as a CUDA graph, for any module and any loop.

A step from Python sends thousands of kernels, one by one; where they are short the device waits for the host. A graph sends
them at once. PyTorch captures it (``torch.cuda.graph``); what is done here is what such a graph needs around it: inputs and
learning rates at addresses that stay, gradients that live as long as they must, a graph for each kind of batch, and a way
on where there is no graph.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook import arguments, runtime
from kernelbook.train.capture import CapturedCalls, Fingerprint, FixedInputs, keep, moved, plain, why_not_capturable
from kernelbook.train.optimizer import ChunkAdamW

# What transformers' batches are filled up with: tokens that no loss counts and that a mask leaves out.
PAD: dict[str, float] = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def loss_of(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what ``model`` returns if that is a loss, or its attribute, key or first element of that name."""
    out = model(*args, **kwargs)
    if isinstance(out, Mapping):
        out = out["loss"]
    elif isinstance(out, tuple):
        out = out[0]
    return getattr(out, "loss", out)  # type: ignore[no-any-return]


class KeptGradients:
    """Gradients at addresses that stay, as long as graphs add to them.

    A graph adds to the gradients that were there when it was captured, and makes others. Which were there is a part of its
    key (:meth:`begin`). What a call makes lies at its parameter's own address afterwards; a parameter that has no part in it
    has the gradient that it had, or none, as in a loop.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._ends: dict[Hashable, tuple[bool, ...]] = {}  # which gradients there were after a call of this key

    def begin(self, parameters: Iterable[torch.Tensor], *, first: bool = False) -> tuple[bool, ...]:
        """Before a call: which gradients there are; with ``first`` none, and what there was is dropped."""
        self._before = []
        for parameter in parameters:
            if parameter.requires_grad:
                if first:
                    parameter.grad = None
                elif parameter.grad is not None:
                    self._keep(parameter, parameter.grad)
                self._before.append((parameter, parameter.grad))
        return tuple(grad is not None for _, grad in self._before)

    def start(self, key: Hashable, *, capturing: bool) -> None:
        """The first thing in a call: the gradients that were there, and zero where a graph is to make others."""
        for parameter, grad in self._before:
            parameter.grad = grad
        if capturing:
            made = [
                p
                for (p, grad), there in zip(self._before, self._ends.get(key, ()), strict=False)
                if there and grad is None
            ]
            for parameter in made:
                parameter.grad = self._kept[parameter]
            if made:
                torch._foreach_zero_([self._kept[parameter] for parameter in made])

    def end(self, key: Hashable, *, capturing: bool) -> tuple[bool, ...] | None:
        """Return what follows the backward pass: which gradients there are; ``None`` if one is sparse, to which no graph can add.

        Raises:
            RuntimeError: the call is being captured, and makes another gradient than it made before.
        """
        for parameter, _ in self._before:
            grad = parameter.grad
            if grad is None or grad is self._kept.get(parameter):
                continue
            if grad.is_sparse and not capturing:
                return None
            if capturing:
                raise RuntimeError(
                    f"a gradient of shape {tuple(grad.shape)} is put where there was none in the calls before"
                )
            self._keep(parameter, grad)
        found = tuple(parameter.grad is not None for parameter, _ in self._before)
        if not capturing:
            keep(self._ends, key, found)
        return found

    def put(self, found: tuple[bool, ...]) -> None:
        """After a call that was replayed: the gradients that :meth:`end` found."""
        for (parameter, _), there in zip(self._before, found, strict=True):
            parameter.grad = self._kept[parameter] if there else None

    def _keep(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        own = self._kept.get(parameter)
        if own is None or (own.shape, own.dtype, own.device) != (grad.shape, grad.dtype, grad.device):
            self._kept[parameter] = grad
        elif own is not grad:
            own.copy_(grad)
            parameter.grad = own

    def forget(self) -> None:
        """Keep none of them."""
        self._kept.clear()
        self._ends.clear()


class CapturedStep:
    """Forward, loss, backward, clipping and optimizer as a CUDA graph: ``loss = step(**batch)`` instead of a loop's lines.

    ::

        step = CapturedStep(model, torch.optim.AdamW(parameters, lr=1e-4, fused=True), clip=1.0, scheduler=scheduler)
        for batch in loader:
            loss = step(**batch)

    The first calls of each kind of batch are ordinary steps, the next one is captured, and all others replay it: every call
    is one step of training. A kind is the shapes and dtypes of the batch's tensors and the values of all else; each has a
    graph (64 are kept), and all share their memory. Weights are updated in place, so that saving, loading, evaluating and
    generating go on as before, and so do the state dicts of optimizer and scheduler. Learning rates may change at any time.
    After a change of another hyperparameter, of what is trained, or of what the model's modules have as plain attributes
    (``training``, a dropout's rate, ``SparseLinear.active_chunks`` and ``mode``, PEFT's adapters) the step is captured anew.

    What Python does in a step (a print, a hook, a count outside of the model) it does when the step is captured, and no more.
    A step that waits for the device (``.item()``, a shape that depends on values), whose random numbers are drawn on the host
    (``random``, NumPy, ``torch.rand(())`` on the CPU: layers left out by chance), or that draws random numbers and has
    activation checkpoints which draw them again (``preserve_rng_state``), cannot be captured: it goes on as an ordinary step,
    and a warning names the line. So it does where the model is not on a GPU or on several, with a batch of other things than
    tensors and plain values, and where a gradient that is to be kept is sparse. If each step is of another kind (a weight
    decay with a schedule, a number in the batch) none is captured, and a warning says what changes.

    Args:
        model: any module.
        optimizer: one of PyTorch's that have ``capturable`` (it is set, and learning rates become tensors), or
            :class:`kernelbook.train.ChunkAdamW`. Any other runs after the graph, from Python.
        loss: ``loss(model, *args, **kwargs)`` with the batch's arguments -> a scalar; default :func:`loss_of`.
        scheduler: of learning rates; ``step()`` is called after each update.
        clip: the largest norm of the gradient.
        accumulate: calls of which the mean gradient makes an update.
        autocast: the dtype of products and activations, bfloat16. (Gradients in float16 vanish without a ``GradScaler``,
            whose update waits for the device.)
        lengths: the batch's tensors that ``pad`` names are filled up at the end of dimension 1, to the first of these that is
            long enough: as many graphs as lengths. The batch is given by name then.
        pad: what with, by name. Where it names ``attention_mask``, a batch that is filled up must have one, so that no token
            looks at the padding; a model in which no token sees a later one needs none: leave it out of ``pad``.
        warm: how many calls of a kind run before it is captured.
        capture: ``False``: every call is an ordinary step with the same results.

    Attributes:
        why_eager: why steps are not captured, in words; ``None`` where they are.
        grad_norm: () the norm of the last update's gradient before clipping; ``None`` without ``clip``.
        updates: how many there have been.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range; a batch is longer than all of ``lengths``, or
            cannot be filled up; the loss is no scalar; autocast is on in float16.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Callable[..., torch.Tensor] = loss_of,
        scheduler: Any = None,
        clip: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        lengths: Sequence[int] = (),
        pad: Mapping[str, float] = PAD,
        warm: int = 3,
        capture: bool = True,
    ) -> None:
        op = "CapturedStep"
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{op}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        arguments.check_choice(op, "autocast", autocast, (None, torch.bfloat16))
        if clip is not None and not arguments.number(op, "clip", clip) > 0:
            raise ValueError(f"{op}: clip must be positive, got {clip}")
        self.model, self.optimizer, self.scheduler, self.clip = model, optimizer, scheduler, clip
        self.accumulate = arguments.integer(op, "accumulate", accumulate, least=1)
        if not isinstance(lengths, Sequence):
            raise TypeError(f"{op}: lengths must be a sequence of integers, got {type(lengths).__name__}")
        self.lengths = sorted(arguments.integer(op, "lengths", n, least=1) for n in lengths)
        self.pad, self.autocast = dict(pad), autocast
        self.grad_norm: torch.Tensor | None = None
        self.updates, self._micro = 0, 0
        self._loss, self._gradients, self._inputs = loss, KeptGradients(), FixedInputs()
        self._fingerprint, self._lrs = Fingerprint(), list[torch.Tensor]()
        # Pinned host memory is that of offloaded experts, which are copied as they are needed.
        devices = dict.fromkeys(p.device for p in model.parameters() if p.device.type != "cpu" or not p.is_pinned())
        self._device = next((device for device in devices if device.type != "meta"), runtime.DEVICE)
        warm, patience = arguments.integer(op, "warm", warm, least=1), 8 * self.accumulate
        self._calls = CapturedCalls(op, warm=warm, capture=capture, device=self._device, patience=patience)
        if len(devices) > 1:
            self._calls.go_on_eagerly("the model is on several devices")
        self._settles = self._device.type == "cuda" and len(devices) == 1
        self._settle()
        # The hook is the optimizer's: it must not keep the step, and goes with it.
        own = weakref.ref(self)
        hook = optimizer.register_load_state_dict_post_hook(lambda _: _begin_anew(own()))
        weakref.finalize(self, hook.remove)

    @property
    def why_eager(self) -> str | None:
        return self._calls.why_eager

    # --- the optimizer ---

    @property
    def _in_graph(self) -> bool:
        """Return whether the optimizer can be a part of the graph."""
        return isinstance(self.optimizer, ChunkAdamW) or all("capturable" in g for g in self.optimizer.param_groups)

    def forget(self) -> None:
        """Drop all graphs, which are captured anew: for what a step reads from elsewhere than the batch and the model's
        modules, and what has been put in another place. After ``optimizer.load_state_dict`` it happens by itself.
        """
        self._calls.forget()
        self._gradients.forget()
        self._settle()

    def _settle(self) -> None:
        """Put learning rates and counts of steps on the device, where a graph reads them."""
        if not self._settles or not self._in_graph:
            return
        self._lrs = []
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device).clone()
            self._lrs.append(group["lr"])
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(self._device)

    def _settle_lrs(self) -> None:
        """Learning rates that somebody has set since, where the graph reads them."""
        if len(self._lrs) != len(self.optimizer.param_groups):
            self._settle()  # there is a new group
        for group, own in zip(self.optimizer.param_groups, self._lrs, strict=False):
            if group["lr"] is not own:
                own.fill_(group["lr"])
                group["lr"] = own

    def _state(self) -> Hashable:
        """Return what a graph takes for granted of model, optimizer and PyTorch."""
        groups = tuple(
            (
                ("parameters", tuple([(id(p), p.requires_grad) for p in group["params"]])),
                *((name, plain(value)) for name, value in group.items() if name not in ("params", "lr", "initial_lr")),
            )
            for group in self.optimizer.param_groups
        )
        return self._fingerprint(
            self.model,
            ("optimizer", groups),
            ("autocast", self._autocast()),
            ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
            ("float32 precision", torch.get_float32_matmul_precision()),
        )

    # --- a step ---

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step, or one of ``accumulate``, with the arguments of ``loss`` after the model -> the loss, ().

        Tensors may lie on the host; they are copied.
        """
        self._autocast()  # raises
        args = tuple(dict(value) if isinstance(value, Mapping) else value for value in args)
        kwargs = self._padded(args, kwargs)
        first, last = self._micro == 0, self._micro == self.accumulate - 1
        self._settle_lrs()
        why = why_not_capturable(args, kwargs) if self._calls.captures else None
        if why is not None:
            self._calls.go_on_eagerly(why)
        fixed = self._calls.captures and why is None
        kind: Hashable = None
        if fixed:
            kind, args, kwargs = self._inputs(args, kwargs, self._device)
        else:
            args, kwargs = moved(args, self._device), moved(kwargs, self._device)
        # Gradients outlive a graph, but where the optimizer is in it: then they are made and dropped in it.
        keeps, key = self._calls.captures and (self.accumulate > 1 or not self._in_graph), None
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        there = self._gradients.begin(trained, first=first) if keeps else ()
        if fixed:
            key = (kind, ("gradients", there), ("accumulation", (first, last)), self._state())
        loss, norm, found = self._calls(key, lambda: self._body(first, last, keeps, key, args, kwargs))
        if found is not None:
            self._gradients.put(found)
        elif keeps:
            self._calls.forget()
            self._calls.go_on_eagerly("a gradient is sparse, and would be kept from one graph to the next")
        self._micro = 0 if last else self._micro + 1
        if last:
            if not self._in_graph:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.grad_norm = None if norm is None else norm.clone()
            self.updates += 1
            if self.scheduler is not None:
                self.scheduler.step()
        return loss.clone()  # type: ignore[no-any-return]

    def _body(
        self, first: bool, last: bool, keeps: bool, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[bool, ...] | None]:
        """Return what is captured."""
        capturing = self._calls.capturing
        if keeps:
            self._gradients.start(key, capturing=capturing)
        elif first:
            self.optimizer.zero_grad(set_to_none=True)
        dtype = self._autocast()
        # No cache of casts: it would outlive the graph that made them.
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            loss = self._loss(self.model, *args, **kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"CapturedStep: loss must return a scalar, got {got}")
        (loss / self.accumulate if self.accumulate > 1 else loss).backward()
        found = self._gradients.end(key, capturing=capturing) if keeps else None
        norm = None if self.clip is None or not last else self._clipped(self.clip)
        if last and self._in_graph:
            self.optimizer.step()
            if not keeps:
                self.optimizer.zero_grad(set_to_none=True)  # their memory is another graph's then
        return loss.detach(), norm, found

    def _autocast(self) -> torch.dtype | None:
        """Return the dtype of products: ours, or that of the caller's autocast."""
        dtype = self.autocast
        if dtype is None and torch.is_autocast_enabled(self._device.type):
            dtype = torch.get_autocast_dtype(self._device.type)
        if dtype is torch.float16:
            raise ValueError(
                "CapturedStep: autocast must be in bfloat16, got float16, whose gradients vanish without a GradScaler"
            )
        return dtype

    def _clipped(self, clip: float) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does, sparse gradients too; return the norm before."""
        grads = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    if not group.get("unique_rows"):  # a row that is there twice has one gradient, the sum
                        p.grad = p.grad.coalesce()
                    grads.append(p.grad._values())
                elif p.grad is not None:
                    grads.append(p.grad)
        norm = torch.nn.utils.get_total_norm(grads)
        if grads:  # an optimizer of other parameters has none
            torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _padded(self, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
        if not self.lengths:
            return batch
        if args:
            raise ValueError(
                f"CapturedStep: the batch must be given by name where lengths are, got {len(args)} without a name"
            )
        # What has no elements says something else than tokens, as known_masks does.
        named = {n: batch[n] for n in self.pad if isinstance(batch.get(n), torch.Tensor) and batch[n].numel()}
        for name, t in named.items():
            if t.ndim < 2:
                raise ValueError(
                    f"CapturedStep: {name} must have a dimension 1 that is filled up to one of lengths, or not stand in pad, "
                    f"got shape {tuple(t.shape)}"
                )
        longest = max((t.shape[1] for t in named.values()), default=0)
        if longest > self.lengths[-1]:
            raise ValueError(
                f"CapturedStep: the batch must be at most as long as the largest of lengths ({self.lengths[-1]}), got {longest}"
            )
        length = next(n for n in self.lengths if n >= longest)
        if longest < length and "attention_mask" in self.pad and batch.get("attention_mask") is None:
            raise ValueError(
                "CapturedStep: the batch must have an attention_mask where it is filled up, or tokens look at the padding; if "
                "none sees a later one, leave attention_mask out of pad: pad={'input_ids': 0, 'labels': -100}"
            )
        return batch | {
            name: F.pad(t, (0, 0) * (t.ndim - 2) + (0, length - t.shape[1]), value=self.pad[name])
            for name, t in named.items()
        }


def _begin_anew(step: CapturedStep | None) -> None:
    """After ``optimizer.load_state_dict``: other states, and no gradient of before."""
    if step is not None:
        step.forget()
        step._micro = 0
        step.optimizer.zero_grad(set_to_none=True)
