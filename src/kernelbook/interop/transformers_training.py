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
from kernelbook.train import capture
from kernelbook.train.capture import CapturedCalls, Fingerprint, FixedInputs, why_not_capturable
from kernelbook.train.step import KeptGradients


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


class CapturedTrainer(transformers.Trainer):
    """``transformers.Trainer``, whose forward and backward passes are captured in CUDA graphs and replayed.

    Arguments and results are ``Trainer``'s. Clipping, the optimizer, the scheduler, callbacks, evaluation, checkpoints and
    resuming are its own code and run as they do there. There is a graph for each shape of a batch, so batches should be
    filled up to a few lengths (``DataCollatorForLanguageModeling(pad_to_multiple_of=...)``). The first three steps of each
    shape run as they are, and again the first three after a change of what is trained or of the model's modules. A step that
    cannot be captured (see :class:`kernelbook.train.CapturedStep`) goes on so, and a warning names the line; so it does
    without a GPU, on several, and with ``use_cpu``.

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
        patience = 8 * self.args.gradient_accumulation_steps
        self.calls = CapturedCalls("CapturedTrainer", device=self.args.device, patience=patience)
        if not alone and self.calls.why_eager is None:
            self.calls.go_on_eagerly("there are several GPUs")
        self._fixed = FixedInputs()
        self._gradients, self._fingerprint = KeptGradients(), Fingerprint()
        self._drawing: set[Hashable] = set()  # kinds of steps that draw random numbers

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None, **others: Any
    ) -> torch.Tensor:
        """``Trainer.training_step``, captured: the loss of a batch, whose gradients are added to those that are there."""
        step = super().training_step
        if self.calls.captures and any(p.device != self.args.device for p in model.parameters()):
            self.calls.forget()
            self.calls.go_on_eagerly(f"the model is not on the {self.args.device} alone")
        why = why_not_capturable(inputs) if self.calls.captures else None
        if why is not None and self.calls.why_eager is None:
            self.calls.go_on_eagerly(why)
        if not self.calls.captures:
            return step(model, inputs, num_items_in_batch, **others)
        model.train()
        gradients, calls, key = self._gradients, self.calls, None
        there = gradients.begin(model.parameters())
        if why is None:
            batch = known_masks(self.model, self._prepare_inputs(inputs))
            if num_items_in_batch is not None:  # a number would be another one in each step, and a part of the graph
                batch["num_items_in_batch"] = torch.as_tensor(num_items_in_batch)
            kind, _, inputs = self._fixed((), batch, self.args.device)
            num_items_in_batch = inputs.pop("num_items_in_batch", None)
            parts = getattr(self, "current_gradient_accumulation_steps", None)
            key = (kind, ("gradients", there), ("parts", parts), self._fingerprint(model))

        def body() -> tuple[torch.Tensor, tuple[bool, ...] | None]:
            gradients.start(key, capturing=calls.capturing)
            quiet = calls.capturing and key not in self._drawing
            with _generators_left_alone(model) if quiet else contextlib.nullcontext():
                before = None if calls.capturing else capture.drawn()
                loss = step(model, dict(inputs), num_items_in_batch, **others)
                if not calls.capturing and capture.drawn() != before:
                    self._drawing.add(key)
            return loss, gradients.end(key, capturing=calls.capturing)

        loss, found = calls(key, body)
        if found is not None:
            gradients.put(found)
        else:
            calls.forget()
            calls.go_on_eagerly("a gradient is sparse, and would be kept from one graph to the next")
        return loss.clone()
