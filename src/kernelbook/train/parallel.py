"""One run on several ranks: ``torchrun -m kernelbook train --parallel ddp | fsdp``.

The batch of a step is the configuration's, cut among the ranks, so that losses are those of one rank. Every rank trains all
parameters (``ddp``; gradients of sparse layers travel with their active rows alone), or holds a part of each and of its moments
(``fsdp``), see :mod:`kernelbook.distributed.gradients`. All ranks see the same averaged gradients, so their schedulers
choose the same chunks.

Rank 0 writes checkpoints, of whole tensors: a run goes on, exactly, on any number of ranks that divides its batch.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from kernelbook import arguments, runtime
from kernelbook.distributed.gradients import reduce_active_rows
from kernelbook.distributed.sharding import fully_shard, local_part
from kernelbook.train.loop import TrainConfig, Trainer
from kernelbook.train.text import TextData

PARALLEL = ("ddp", "fsdp")


def start() -> None:
    """Join the ranks that torchrun has started, one GPU each where there are any.

    Raises:
        ValueError: the process was not started by torchrun.
    """
    if not dist.is_torchelastic_launched():
        raise ValueError("--parallel must be started by torchrun: torchrun --nproc-per-node 2 -m kernelbook train ...")
    if runtime.DEVICE.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank(0))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


class _AdamW(torch.optim.AdamW):
    """AdamW of this rank's rows of the sparse layers, whose gradients are zero in inactive chunks."""

    def step(self, *, scale: torch.Tensor) -> None:  # type: ignore[override]
        torch._foreach_mul_([p.grad for group in self.param_groups for p in group["params"]], scale)
        super().step()


class ParallelTrainer(Trainer):
    """:class:`Trainer` on all ranks of the default process group.

    Args:
        config: as for one rank; ``batch_size`` is that of all ranks together and a multiple of their number.
        parallel: ``"ddp"`` or ``"fsdp"``.
        data, out, resume, progress: as :class:`Trainer`; ``out`` is a folder that all ranks see, rank 0 writes the log.

    Raises:
        FileExistsError, ValueError: as :class:`Trainer`; the batch does not divide, a CUDA graph is wanted, or with ``"fsdp"``
            rows without gradient are to rest: how many of a rank's rows have one is known to the device only.
    """

    def __init__(
        self,
        config: TrainConfig,
        parallel: str,
        data: TextData | None = None,
        *,
        out: Path | str | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        arguments.check_choice("ParallelTrainer", "parallel", parallel, PARALLEL)
        self.parallel, self.rank, self.ranks = parallel, dist.get_rank(), dist.get_world_size()
        if config.batch_size % self.ranks:
            raise ValueError(
                f"ParallelTrainer: batch_size must be a multiple of the ranks ({self.ranks}), got {config.batch_size}"
            )
        if parallel == "fsdp" and config.mode != "dense" and config.inactive != "decay":
            raise ValueError(f"ParallelTrainer: inactive must be 'decay' with fsdp, got {config.inactive!r}")
        if config.cuda_graph:
            raise ValueError("ParallelTrainer: cuda_graph must be off, got True")
        super().__init__(config, data, out=out, resume=resume, progress=progress and self.rank == 0)

    # --- what a run is made of ---

    def _part(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Iterable[torch.Tensor]:
        return (part.chunk(self.ranks)[self.rank] for part in batch)

    def _build(self) -> None:
        super()._build()
        if self.parallel == "ddp":
            if self.config.mode != "dense":
                reduce_active_rows(self.model)
            self._forward: Any = DistributedDataParallel(self.model)
            return
        before = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for layer in self.layers.values():
            layer.compact_gradient = False  # FSDP2 wants gradients of the parameters' shape
        mesh = init_device_mesh(runtime.DEVICE.type, (self.ranks,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        self._forward = fully_shard(self.model, mesh=mesh)
        # What an optimizer moves are this rank's parts, as ordinary tensors: its arithmetic is element by element.
        self._sharded: dict[str, Any] = dict(self.model.named_parameters())
        self._own = {name: torch.nn.Parameter(p.detach().to_local()) for name, p in self._sharded.items()}
        for group in self._rest_adam.param_groups:
            group["params"] = [self._own[before[id(p)]] for p in group["params"]]
        self._rest = [self._own[before[id(p)]] for p in self._rest]
        weights, decay = [self._own[f"{name}.weight"] for name in self.layers], self.config.weight_decay
        self._chunk_adam = _AdamW(weights, self._chunk_lr, weight_decay=decay, **self._how)  # type: ignore[assignment]
        self._parameter_of = {own: self._sharded[name] for name, own in self._own.items()}
        # The chunk of each row; rows are cut as torch.chunk cuts.
        self._chunks = {}
        for layer, own in zip(self.layers.values(), weights, strict=True):
            count = layer.out_features
            first = min(self.rank * -(-count // self.ranks), count)
            self._chunks[own] = (first + torch.arange(own.shape[0], device=own.device)) // self.config.chunk_size

    # --- a step ---

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value.div_(self.ranks)

    def _backward(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._forward(self._inputs, self._targets)
        loss.backward()
        self._loss.copy_(self._mean(loss.detach().clone()))
        if self.parallel == "fsdp":
            for name, own in self._own.items():
                grad = self._sharded[name].grad
                own.grad = None if grad is None else grad.to_local()

    def _measure(self, into: torch.Tensor, sizes: Iterable[int]) -> None:
        if self.parallel == "ddp":
            super()._measure(into, sizes)
            return
        # A chunk may lie on two ranks: squares are added up, those of all layers at once.
        squares = []
        for name, layer in self.layers.items():
            own = self._own[f"{name}.weight"]
            assert own.grad is not None
            zeros = own.grad.new_zeros(layer.num_chunks)
            squares.append(zeros.index_add_(0, self._chunks[own], own.grad.square().sum(1)))
        together = torch.cat(squares)
        dist.all_reduce(together)
        parts = together.sqrt().split([layer.num_chunks for layer in self.layers.values()])
        chosen = [
            part if layer.active_chunks is None or part.numel() == size else part[layer.active_chunks]
            for part, layer, size in zip(parts, self.layers.values(), sizes, strict=True)
        ]
        into.copy_(torch.cat(chosen))

    def _total_norm(self, norms: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        if self.parallel == "ddp":
            return super()._total_norm(norms, others)
        square = torch.nn.utils.get_total_norm(others).square()
        dist.all_reduce(square)
        return (square + norms.square().sum()).sqrt()

    def _weights(self) -> list[torch.Tensor]:
        return [w.full_tensor() if isinstance(w, DTensor) else w for w in super()._weights()]

    def evaluate(self) -> float:
        return float(self._mean(torch.tensor(super().evaluate(), dtype=torch.float64, device=runtime.DEVICE)))

    # --- checkpoints ---

    def _mapped(self, state: dict[str, Any], change: Callable[[Any, Any], Any]) -> dict[str, Any]:
        """Return a state in which ``change(parameter, tensor)`` stands for each tensor that is cut as a parameter is."""
        state = {**state, "model": {name: change(self._sharded[name], p) for name, p in state["model"].items()}}
        for name, optimizer in (("chunk_adam", self._chunk_adam), ("rest_adam", self._rest_adam)):
            cut = [self._parameter_of[p] for group in optimizer.param_groups for p in group["params"]]
            moments = {
                i: {key: local_part(change(cut[i], value)) if value.ndim else value for key, value in found.items()}
                for i, found in state[name]["state"].items()
            }
            state[name] = {**state[name], "state": moments}
        return state

    def _state(self) -> dict[str, Any]:
        return self._mapped(super()._state(), _whole) if self.parallel == "fsdp" else super()._state()

    def _load(self, state: dict[str, Any]) -> None:
        if self.parallel == "fsdp":
            state = self._mapped(state, lambda p, whole: distribute_tensor(whole, p.device_mesh, p.placements))
        super()._load(state)


def _whole(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which each rank has a part, cut as ``parameter`` is."""
    how: dict[str, Any] = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local_part(part), parameter.device_mesh, parameter.placements, **how).full_tensor()
