"""Expert parallelism as a ``ParallelStyle``: each rank holds a part of the experts, and tokens travel to them."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from kernelbook.distributed.exchange import exchange, exchange_all
from kernelbook.distributed.packed import by_expert
from kernelbook.distributed.windows import exchange_shared, windows_of
from kernelbook.nn.moe import GatedExperts, LoRAPair, NF4Parametrization
from kernelbook.tensors import reshaped

LORA_ATTRIBUTE = "_kernelbook_lora"  # where PEFT's wrappers leave their pairs, see kernelbook.interop.transformers


@dataclasses.dataclass(frozen=True)
class _Share:
    """The share of an expert-parallel module: all experts, those of a rank at most, and the mesh."""

    num_experts: int
    size: int
    mesh: DeviceMesh
    waits: bool

    @functools.cached_property
    def own(self) -> slice:
        """This rank's experts, as ``torch.chunk`` divides them."""
        first = min(self.mesh.get_local_rank() * self.size, self.num_experts)
        return slice(first, min(first + self.size, self.num_experts))

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def __deepcopy__(self, memo: Any) -> "_Share":
        return self  # a copy of the module is on the same ranks


class ExpertParallel(ParallelStyle):
    """Each rank of the mesh holds some of the experts, and every token visits those that its router names.

    ::

        parallelize_module(layer, mesh, {"experts": ExpertParallel()})

    for :class:`kernelbook.nn.MoELayer`, or for the blocks of a transformers model with the experts' names. The module
    itself is called as before, on this rank's experts and the tokens that came to them, so whatever it computes with (dense,
    4-bit, LoRA pairs, another implementation of transformers) goes on working. Experts need not divide evenly.

    What belongs to an expert lives with it: dense weights, biases and LoRA pairs become ``DTensor`` s sharded over their first
    dimension; so do the bytes of 4-bit weights, see :func:`kernelbook.distributed.by_expert`. Rank 0 of the mesh hands them
    out, so that all ranks have the experts of one model whatever their seeds. LoRA pairs that PEFT has put around the module
    stay whole on every rank; :func:`kernelbook.distributed.keep_equal` averages their gradients.

    Every rank brings its own tokens. Gradients of the experts' parameters belong to the mean of the ranks' losses, as
    ``fully_shard`` and DDP have it for all other parameters. Compose with ``fully_shard`` over another dimension of a 2-D mesh, or with
    ``DistributedDataParallel`` around the whole model, told to ignore the experts' parameters;
    :func:`kernelbook.distributed.keep_equal` averages what these two do not manage.

    Args:
        waits: a token travels to the ranks that have experts for it, in buffers of just the size that is needed, for which the
            host waits once in each forward pass. ``False``: the host waits for no device, and a CUDA graph can hold the layer;
            buffers have space for whatever a router may say, as many times more as there are ranks. For few ranks. Where they
            can write to each other's memory (the GPUs of one machine) tokens travel as before, see
            ``windows.exchange_shared``; elsewhere to every rank, which must all bring as many, see ``exchange.exchange_all``.
            A graph is captured and replayed by all ranks together, and keeps the numbers of tokens of its capture.

    Raises:
        TypeError: the module is no experts module of ours or of transformers.
        ValueError: its experts are parallel already, or compressed in a form that is not sharded.
    """

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__()
        self.waits = waits

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(f"ExpertParallel: the mesh must have one dimension, got {device_mesh.ndim}")
        if hasattr(module, "_expert_parallel"):
            raise ValueError(f"ExpertParallel: {type(module).__name__} must not be expert-parallel already")
        ours = isinstance(module, GatedExperts)
        if not ours and not all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed")):
            raise TypeError(
                f"ExpertParallel: module must be kernelbook.nn.GatedExperts or the experts of a transformers model, got "
                f"{type(module).__name__}"
            )
        experts: Any = module
        num_experts, ranks = int(experts.num_experts), device_mesh.size()
        size = -(-num_experts // ranks)
        share = _Share(num_experts, size, device_mesh, self.waits)
        for name, parts in getattr(module, "parametrizations", {}).items():
            if len(parts) != 1 or not isinstance(parts[0], NF4Parametrization):
                raise ValueError(
                    f"ExpertParallel: {name} must be dense or 4-bit by kernelbook's quantize_parameter or quantize_experts, "
                    f"got a parametrization by {type(parts[0]).__name__}"
                )
        by_expert(module)
        for owner, name, parameter in _sharded(module, num_experts):
            spread = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            owner.register_parameter(name, torch.nn.Parameter(spread, requires_grad=parameter.requires_grad))
        source = dist.get_global_rank(device_mesh.get_group(), self.src_data_rank or 0)
        for buffer in module.buffers():  # code books and offsets, which belong to the bytes
            dist.broadcast(buffer, source, group=device_mesh.get_group())
        experts.num_experts = share.own.stop - share.own.start
        experts._expert_parallel = share
        # An attribute of the module, not a closure: copies of the module call their own.
        experts.forward = types.MethodType(_forward, module)
        return module


def _sharded(module: torch.nn.Module, num_experts: int) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return the parameters that have a row an expert, with the modules that own them."""
    owners = [module, *getattr(module, "parametrizations", {}).values()]
    owners += [parts[0] for parts in getattr(module, "parametrizations", {}).values()]
    for owner in owners:
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.ndim >= 2 and parameter.shape[0] == num_experts:
                yield owner, name, parameter


@contextlib.contextmanager
def _on_own_experts(module: torch.nn.Module, share: _Share) -> Iterator[None]:
    """Within the context the module's parameters are this rank's part, as ordinary tensors that autograd follows."""
    owners: list[Any] = [module]
    lists: Any = module._modules.get("parametrizations")
    for parts in () if lists is None else lists._modules.values():  # of bytes, see ExpertParallel._apply
        owners += [parts, parts._modules["0"]]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor):
                replaced.append((owner._parameters, name, parameter))
                local = _Local.apply(parameter) if parameter.requires_grad else parameter._local_tensor
                owner._parameters[name] = local
    try:
        with own_pairs(module.__dict__.get(LORA_ATTRIBUTE, {}), share.own, share.num_experts):
            yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


@contextlib.contextmanager
def own_pairs(handed: dict[str, LoRAPair], own: slice, num_experts: int) -> Iterator[None]:
    """Within the context the LoRA pairs in ``handed`` that are those of all experts are those of the ``own`` ones."""
    whole = dict(handed)
    for name, pair in whole.items():
        if pair.a.shape[0] == num_experts:
            handed[name] = LoRAPair(pair.a[own], pair.b[own], pair.scaling)
    try:
        yield
    finally:
        handed.update(whole)


class _Local(torch.autograd.Function):
    """A ``DTensor``'s local part; backwards the mean over the ranks, as a ``DTensor``. In a fraction of ``to_local``'s host time."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:  # type: ignore[override]
        return DTensor(grad / ctx.spec.mesh.size(), ctx.spec, requires_grad=False)


def _forward(module: Any, hidden_states: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """hidden_states (..., H), expert_ids and gates (..., k) -> (..., H), by the experts of all ranks."""
    share: _Share = module._expert_parallel

    def experts(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if share.own.start == share.own.stop:  # more ranks than experts: nothing is for this one; gradients are empty
            return 0 * rows + sum(p.sum() for p in module.parameters() if p.requires_grad)
        return type(module).forward(module, rows, ids, weights)

    x, ids, weights = (part.reshape(-1, part.shape[-1]) for part in (hidden_states, expert_ids, gates))
    num_experts, size, group = share.num_experts, share.size, share.group
    windows = None if share.waits else windows_of(group, x.device)
    with _on_own_experts(module, share):
        if windows is not None:
            out = exchange_shared(experts, x, ids, weights, num_experts=num_experts, share=size, windows=windows)
        else:
            way = exchange if share.waits else exchange_all
            out = way(experts, x, ids, weights, num_experts=num_experts, share=size, group=group)
    return out if hidden_states.ndim == 2 else reshaped(out, *hidden_states.shape)
