"""Whole adapters of sharded models."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kernelbook.distributed.sharding import same_on_all_ranks


def save_adapter(model: Any, folder: Path | str, **options: Any) -> None:
    """``model.save_pretrained(folder)`` of PEFT, with whole adapters whatever they are sharded over. A collective.

    Every rank gathers; rank 0 writes, and the others wait until it has. The folder loads on one GPU. Saved without it, an
    adapter under ``fully_shard`` may hold one rank's part.

    Args:
        model: a ``PeftModel``.
        folder: as PEFT has it.
        options: what else ``save_pretrained`` takes.

    Raises:
        RuntimeError: an adapter that is not sharded differs between the ranks: each has trained its own. See
            :func:`kernelbook.distributed.keep_equal`.
    """
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and "lora_" not in name:
            continue
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif not same_on_all_ranks(value):
            raise RuntimeError(
                f"save_adapter: {name} must be the same on all ranks, and it is not; keep_equal() makes and keeps it so"
            )
        if dist.get_rank() == 0:
            state[name] = value.cpu()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state, is_main_process=True, **options)
    dist.barrier()
