"""transformers' Trainer with its steps in CUDA graphs.

:class:`CapturedTrainer` takes the place of ``Trainer``::

    trainer = CapturedTrainer(model, TrainingArguments(folder, bf16=True, ...), train_dataset=data)
    trainer.train()
"""

import contextlib
import functools
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import transformers

from kernelbook.interop.transformers_attention import known_masks
from kernelbook.train.capture import CapturedCalls, FixedInputs
from kernelbook.train.step import KeptGradients

__all__ = ["CapturedTrainer"]


@contextlib.contextmanager
def _generators_left_alone(model: torch.nn.Module) -> Iterator[None]:
    """Within the context activation checkpoints keep no state of generators, where nobody said whether they should."""
    changed = []
    for module in model.modules():
        how = module.__dict__.get("_gradient_checkpointing_func")  # which transformers sets where they are on
        if isinstance(how, functools.partial) and "preserve_rng_state" not in how.keywords:
            changed.append((module, how))
            module._gradient_checkpointing_func = functools.partial(how, preserve_rng_state=False)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, how in changed:
            module._gradient_checkpointing_func = how  # type: ignore[assignment]


def _generators() -> tuple[bytes, list[int]]:
    """Where the generators of the host and of all devices are."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return torch.get_rng_state().numpy().tobytes(), [generator.get_offset() for generator in devices]


class CapturedTrainer(transformers.Trainer):
    """``transformers.Trainer``, whose forward and backward passes are captured in CUDA graphs and replayed.

    Arguments and results are ``Trainer``'s. Clipping, the optimizer, the scheduler, callbacks, evaluation, checkpoints and
    resuming are its own code and run as they do there. There is a graph for each shape of a batch, so batches should be
    filled up to a few lengths (``DataCollatorForLanguageModeling(pad_to_multiple_of=...)``). The first three steps of each
    shape run as they are. A step that cannot be captured (see :class:`kernelbook.train.CapturedStep`) goes on so, and a
    warning names the line; so it does without a GPU and on several.

    A model that draws random numbers (dropout, a router's noise) is captured as long as it has no activation checkpoints; with
    them it runs as it is, and so does one that draws on the host. That is no matter of a list of names: the steps before the
    capture are watched. Where none of them draws, checkpoints keep no state of the generator (``preserve_rng_state=False``)
    while the step is captured.

    Attributes:
        calls: the graphs; ``calls.why_eager`` says why steps run as they are, or is ``None``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        alone = self.args.n_gpu <= 1 and self.args.world_size <= 1
        self.calls = CapturedCalls("CapturedTrainer")
        if not alone:
            self.calls.go_on_eagerly("there are several GPUs")
        self._fixed = FixedInputs("CapturedTrainer")
        self._gradients: KeptGradients | None = None
        self._drawing: set[Hashable] = set()  # kinds of steps that draw random numbers
        self._host_draws = False

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None, **others: Any
    ) -> torch.Tensor:
        """``Trainer.training_step``, captured: the loss of a batch, whose gradients are added to those that are there."""
        step = super().training_step
        if self.calls.why_eager is not None and not len(self.calls):
            return step(model, inputs, num_items_in_batch, **others)
        if self._gradients is None:
            self._gradients = KeptGradients(model.parameters())
        model.train()
        batch = known_masks(self.model, self._prepare_inputs(inputs))
        if num_items_in_batch is not None:  # as a number it would be another one in each step, and a part of the graph
            batch["num_items_in_batch"] = torch.as_tensor(num_items_in_batch)
        kind, _, fixed = self._fixed((), batch, self.args.device)
        items = fixed.pop("num_items_in_batch", None)
        gradients, first, before = self._gradients, self._gradients.begin(), len(self.calls)

        parts = getattr(self, "current_gradient_accumulation_steps", None)
        what: Hashable = (kind, first, parts)

        def body() -> torch.Tensor:
            if first:
                gradients.clear()
            if torch.cuda.is_current_stream_capturing():
                quiet = _generators_left_alone(model) if what not in self._drawing else contextlib.nullcontext()
                with quiet:
                    return step(model, dict(fixed), items, **others)
            host, devices = _generators()
            out = step(model, dict(fixed), items, **others)
            host_now, devices_now = _generators()
            self._host_draws |= host_now != host
            if devices_now != devices:
                self._drawing.add(what)
            return out

        if self._host_draws and self.calls.why_eager is None:
            self.calls.go_on_eagerly(
                "a step draws random numbers on the host, and a graph would draw the same ones again"
            )
        loss: torch.Tensor = self.calls((kind, first, parts, gradients.places()), body)
        if len(self.calls) == before:
            gradients.keep("CapturedTrainer")
        return loss.clone()
