"""transformers' Trainer with its steps in CUDA graphs.

:class:`CapturedTrainer` takes the place of ``Trainer``::

    trainer = CapturedTrainer(model, TrainingArguments(folder, bf16=True, ...), train_dataset=data)
    trainer.train()
"""

from typing import Any

import torch
import transformers

from kernelbook.interop.transformers_attention import known_masks
from kernelbook.train.capture import CapturedCalls, FixedInputs, Known, unfixed
from kernelbook.train.step import KeptGradients

__all__ = ["CapturedTrainer"]


def _draws(model: Any) -> bool:
    """Whether a step of ``model`` draws random numbers, as dropout does."""
    settings = [module.config.to_dict() for module in model.modules() if hasattr(module, "config")][:1]
    modules = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    named = (v for s in settings for k, v in s.items() if k.endswith(("dropout", "pdrop")) and isinstance(v, float))
    return modules or any(named)


class CapturedTrainer(transformers.Trainer):
    """``transformers.Trainer``, whose forward and backward passes are captured in CUDA graphs and replayed.

    Arguments and results are ``Trainer``'s. Clipping, the optimizer, the scheduler, callbacks, evaluation, checkpoints and
    resuming are its own code and run as they do there. There is a graph for each shape of a batch, so batches should be
    filled up to a few lengths (``DataCollatorForLanguageModeling(pad_to_multiple_of=...)``). The first three steps of each
    shape run as they are, and again the first three after a change of what is trained or of the model's modules. A step that
    cannot be captured (see :class:`kernelbook.train.CapturedStep`) goes on so, and a warning names the line; so it does
    without a GPU, on several, and with ``use_cpu``.

    Activation checkpoints keep no state of the generator (``preserve_rng_state=False``) where the model has no dropout.

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
        self._fixed = FixedInputs("CapturedTrainer")
        self._gradients, self._known = KeptGradients(), Known()
        how: Any = self.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
        if self.args.gradient_checkpointing and self.model is not None and not _draws(self.model):
            self.args.gradient_checkpointing_kwargs = {"preserve_rng_state": False, **how}

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None, **others: Any
    ) -> torch.Tensor:
        """``Trainer.training_step``, captured: the loss of a batch, whose gradients are added to those that are there."""
        step = super().training_step
        if self.calls.captures and any(p.device != self.args.device for p in model.parameters()):
            self.calls.forget()
            self.calls.go_on_eagerly(f"the model is not on the {self.args.device} alone")
        why = unfixed(inputs) if self.calls.captures else None
        if why is not None and self.calls.why_eager is None:
            self.calls.go_on_eagerly(why)
        if not self.calls.captures:
            return step(model, inputs, num_items_in_batch, **others)
        model.train()
        gradients, calls, key = self._gradients, self.calls, None
        there = gradients.begin(model.parameters())
        if why is None:
            batch = known_masks(self.model, self._prepare_inputs(inputs))
            if (
                num_items_in_batch is not None
            ):  # as a number it would be another one in each step, and a part of the graph
                batch["num_items_in_batch"] = torch.as_tensor(num_items_in_batch)
            kind, _, inputs = self._fixed((), batch, self.args.device)
            num_items_in_batch = inputs.pop("num_items_in_batch", None)
            parts = getattr(self, "current_gradient_accumulation_steps", None)
            key = (kind, ("gradients", there), ("parts", parts), self._known(model))

        def body() -> tuple[torch.Tensor, tuple[bool, ...] | None]:
            gradients.start(key, capturing=calls.capturing)
            loss = step(model, dict(inputs), num_items_in_batch, **others)
            return loss, gradients.end(key, capturing=calls.capturing)

        loss, found = calls(key, body)
        if found is not None:
            gradients.put(found)
        else:
            calls.forget()
            calls.go_on_eagerly("a gradient is sparse, and would be kept from one graph to the next")
        return loss.clone()
