"""A training step as a CUDA graph, for any module and any loop.

A step from Python sends thousands of kernels, one by one; where they are short the device waits for the host. A graph sends
them at once. PyTorch captures it (``torch.cuda.graph``); what is done here is what such a graph needs around it: inputs and
learning rates at addresses that stay, gradients that live as long as they must, a graph for each kind of batch, and a way
on where there is no graph.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook import arguments, runtime
from kernelbook.train.capture import CapturedCalls, FixedInputs
from kernelbook.train.optimizer import ChunkAdamW

__all__ = ["PAD", "CapturedStep", "KeptGradients", "loss_of"]

# What transformers' batches are filled up with: tokens that no loss counts and that a mask leaves out.
PAD: dict[str, float] = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def loss_of(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What ``model`` returns if that is a loss, or its attribute, key or first element of that name."""
    out = model(*args, **kwargs)
    if isinstance(out, Mapping):
        out = out["loss"]
    elif isinstance(out, tuple):
        out = out[0]
    return getattr(out, "loss", out)  # type: ignore[no-any-return]


class KeptGradients:
    """Gradients at addresses that stay: set to zero where others are dropped, as long as graphs add to them.

    Args:
        parameters: whose they are.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def begin(self, *, first: bool | None = None) -> bool:
        """Puts the gradients back where they were dropped; whether the next backward pass is the first since then."""
        if first is None:
            first = all(p.grad is None for p in self._parameters)
        for parameter in self._parameters:
            if first:
                parameter.grad = self._kept.get(parameter)
        return first

    def clear(self) -> None:
        """Zero, on the device. What has no gradient yet gets one in the backward pass."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def keep(self, op: str) -> None:
        """Remembers the gradients of a backward pass that ran as it is.

        Raises:
            ValueError: one of them is sparse, and cannot be added to in place.
        """
        for parameter in self._parameters:
            if parameter.grad is None or parameter in self._kept:
                continue
            if parameter.grad.is_sparse:
                raise ValueError(
                    f"{op}: gradients must be dense where they are kept from one graph to the next (accumulate above 1, or "
                    f"an optimizer outside of the graph), got a sparse one of shape {tuple(parameter.grad.shape)}"
                )
            self._kept[parameter] = parameter.grad

    def places(self) -> tuple[tuple[int, bool], ...]:
        """Where the parameters are, and whether they still want a gradient: what a graph takes for granted."""
        return tuple((p.data_ptr(), p.requires_grad) for p in self._parameters)

    def forget(self) -> None:
        """Keeps none of them."""
        self._kept.clear()


class CapturedStep:
    """Forward, loss, backward, clipping and optimizer as a CUDA graph: ``loss = step(**batch)`` instead of a loop's lines.

    ::

        step = CapturedStep(model, torch.optim.AdamW(parameters, lr=1e-4, fused=True), clip=1.0, scheduler=scheduler)
        for batch in loader:
            loss = step(**batch)

    The first calls of each kind of batch are ordinary steps, the next one is captured, and all others replay it: every call
    is one step of training. A kind is the shapes and dtypes of the batch's tensors and the values of all else; each has a
    graph, and all share their memory. Weights are updated in place, so that saving, loading, evaluating and generating go on
    as before, and so do the state dicts of optimizer and scheduler. After a change of a hyperparameter or of ``model.training``
    the graph is captured anew. Learning rates may change at any time.

    What Python does in a step (a count, a print, a hook) it does when the step is captured, and no more. A step that waits
    for the device (``.item()``, a shape that depends on values), or that draws random numbers and has activation checkpoints
    which draw them again (``preserve_rng_state``), cannot be captured: it goes on as an ordinary step, and a warning names
    the line. So it does without a GPU.

    Args:
        model: any module on one device.
        optimizer: one of PyTorch's that have ``capturable`` (it is set, and learning rates become tensors), or
            :class:`kernelbook.train.ChunkAdamW`. Any other runs after the graph, from Python.
        loss: ``loss(model, *args, **kwargs)`` with the batch's arguments -> a scalar; default :func:`loss_of`.
        scheduler: of learning rates; ``step()`` is called after each update.
        clip: the largest norm of the gradient.
        accumulate: calls of which the mean gradient makes an update.
        autocast: the dtype of products and activations, bfloat16 or float16.
        lengths: the batch's tensors that ``pad`` names are filled up at the end of dimension 1, to the first of these that is
            long enough: as many graphs as lengths.
        pad: what with, by name.
        warm: how many calls of a kind run before it is captured.
        capture: ``False``: every call is an ordinary step with the same results.

    Attributes:
        why_eager: why steps are not captured, in words; ``None`` where they are.
        grad_norm: () the norm of the last update's gradient before clipping; ``None`` without ``clip``.
        updates: how many there have been.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range; a batch is longer than all of ``lengths``;
            the loss is no scalar.
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
        arguments.check_choice(op, "autocast", autocast, (None, torch.bfloat16, torch.float16))
        if clip is not None and not arguments.number(op, "clip", clip) > 0:
            raise ValueError(f"{op}: clip must be positive, got {clip}")
        self.model, self.optimizer, self.scheduler, self.clip = model, optimizer, scheduler, clip
        self.accumulate = arguments.integer(op, "accumulate", accumulate, least=1)
        self.lengths = sorted(arguments.integer(op, "lengths", n, least=1) for n in lengths)
        self.pad, self.autocast = dict(pad), autocast
        self.grad_norm: torch.Tensor | None = None
        self.updates, self._micro = 0, 0
        self._loss = loss
        self._all = [*model.parameters(), *model.buffers()]
        self._device = self._all[0].device if self._all else runtime.DEVICE
        self._inputs = FixedInputs(op)
        self._calls = CapturedCalls(op, warm=arguments.integer(op, "warm", warm, least=1), capture=capture)
        self._lrs: list[torch.Tensor] = []
        self._settle()
        # Where the optimizer is in the graph, gradients are made and dropped in it. Else they outlive it.
        self._gradients = KeptGradients(self._trained())
        self._keeps = self.accumulate > 1 or not self._in_graph
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    @property
    def why_eager(self) -> str | None:
        return self._calls.why_eager

    # --- the optimizer ---

    @property
    def _in_graph(self) -> bool:
        """Whether the optimizer can be a part of the graph."""
        return isinstance(self.optimizer, ChunkAdamW) or all("capturable" in g for g in self.optimizer.param_groups)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def forget(self) -> None:
        """Drops all graphs, which are captured anew: for tensors of the model or the optimizer that others have taken the
        place of. After ``optimizer.load_state_dict`` it happens by itself; ``model.load_state_dict`` copies, and needs none.
        """
        self._calls.forget()
        self._gradients.forget()
        self._all = [*self.model.parameters(), *self.model.buffers()]
        self._settle()

    def _settle(self) -> None:
        """Puts learning rates and counts of steps on the device, where a graph reads them."""
        if self._device.type != "cuda" or not self._in_graph:
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

    def _state(self) -> tuple[Any, ...]:
        """What a graph takes for granted of model and optimizer."""
        groups = self.optimizer.param_groups
        return (
            self.model.training,
            torch.is_autocast_enabled(self._device.type),
            tuple(t.data_ptr() for t in self._all),
            tuple(p.requires_grad for p in self._trained()),
            tuple((name, str(value)) for g in groups for name, value in g.items() if name not in ("params", "lr")),
        )

    # --- a step ---

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step, or one of ``accumulate``, with the arguments of ``loss`` after the model -> the loss, ().

        Tensors may lie on the host; they are copied.
        """
        kind, args_, kwargs_ = self._inputs(args, self._padded(kwargs), self._device)
        first, last = self._micro == 0, self._micro == self.accumulate - 1
        self._settle_lrs()
        if self._keeps:
            self._gradients.begin(first=first)
        before = len(self._calls)
        loss, norm = self._calls((kind, first, last, self._state()), lambda: self._body(first, last, args_, kwargs_))
        if self._keeps and len(self._calls) == before:
            self._gradients.keep("CapturedStep")
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
        self, first: bool, last: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is captured."""
        if first and self._keeps:
            self._gradients.clear()
        elif first:
            self.optimizer.zero_grad(set_to_none=True)
        with self._casting():
            loss = self._loss(self.model, *args, **kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"CapturedStep: loss must return a scalar, got {got}")
        (loss / self.accumulate if self.accumulate > 1 else loss).backward()
        norm = self._clipped() if last and self.clip is not None else None
        if last and self._in_graph:
            self.optimizer.step()
            if not self._keeps:
                self.optimizer.zero_grad(set_to_none=True)  # their memory is another graph's then
        return loss.detach(), norm

    def _casting(self) -> contextlib.AbstractContextManager[object]:
        device = self._device.type
        if self.autocast is None and not torch.is_autocast_enabled(device):
            return contextlib.nullcontext()
        # No cache of casts: it would outlive the graph that made them.
        return torch.autocast(device, self.autocast or torch.get_autocast_dtype(device), cache_enabled=False)

    def _clipped(self) -> torch.Tensor:
        """Clips as ``torch.nn.utils.clip_grad_norm_`` does, sparse gradients too; returns the norm before."""
        grads = [p.grad._values() if p.grad.is_sparse else p.grad for p in self._trained() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[operator]
        return norm

    def _padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self.lengths:
            return batch
        named = {name: batch[name] for name in self.pad if isinstance(batch.get(name), torch.Tensor)}
        longest = max((t.shape[1] for t in named.values()), default=0)
        if longest > self.lengths[-1]:
            raise ValueError(
                f"CapturedStep: the batch must be at most as long as the largest of lengths ({self.lengths[-1]}), got {longest}"
            )
        length = next(n for n in self.lengths if n >= longest)
        return batch | {
            name: F.pad(t, (0, 0) * (t.ndim - 2) + (0, length - t.shape[1]), value=self.pad[name])
            for name, t in named.items()
        }
