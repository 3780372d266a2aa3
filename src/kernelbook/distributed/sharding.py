"""``fully_shard`` for models whose experts are in 4 bits."""

import contextlib
import inspect
import types
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from kernelbook import runtime
from kernelbook.distributed.packed import by_expert


def fully_shard(module: torch.nn.Module, **options: Any) -> Any:
    """``torch.distributed.fsdp.fully_shard(module, **options)``, also where parameters in ``module`` are in 4 bits.

    Their bytes are laid out by expert first, see :func:`kernelbook.distributed.by_expert`, and sharded so. They are gathered
    as bytes, under every mixed-precision policy. Call it from the inside out, as PyTorch's.

    Each rank has drawn its own random numbers, and PyTorch's function shards what each rank has. Here the mesh's first rank
    (without a mesh: rank 0) hands its parameters and buffers out first, but for those on the device "meta".

    Raises:
        ValueError: as :func:`kernelbook.distributed.by_expert`.
    """
    by_expert(module)
    mesh, ignored = options.get("mesh"), options.get("ignored_params") or set()
    inner = {
        parameter
        for child in module.modules()
        if isinstance(child, fsdp.FSDPModule)
        for parameter in child.parameters()
    }
    device = runtime.DEVICE if mesh is None else torch.device(mesh.device_type)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta and tensor not in inner and tensor not in ignored:
            for group in [None] if mesh is None else [mesh.get_group(i) for i in range(mesh.ndim)]:
                hand_out(tensor, group, device)
    with _integers_are_constants():
        sharded = fsdp.fully_shard(module, **options)
    if _old():
        state = sharded._get_fsdp_state()  # type: ignore[attr-defined]
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            for parameter in () if group is None else group.fsdp_params:
                if not parameter.sharded_param.is_floating_point():
                    parameter.init_dtype_attrs = types.MethodType(_keep_dtype, parameter)
    return sharded


def hand_out(tensor: torch.Tensor, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Copy the tensor of the group's first rank to the others: of a ``DTensor`` the local part, which is the same there."""
    local = local_part(tensor.detach())
    moved = local.to(device).contiguous()
    dist.broadcast(moved, 0 if group is None else dist.get_global_rank(group, 0), group=group)
    if moved.data_ptr() != local.data_ptr():
        local.copy_(moved)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a ``DTensor`` that this rank holds; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks of the group have the same values. A collective."""
    least, most = tensor.clone(), tensor.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return torch.equal(least, most)


# --- torch before 2.12 ----------------------------------------------------------------------------------------------
# Its FSDP2 makes sharded parameters without saying whether they require a gradient, and so asks integers for one: pytorch
# issue 177844. Its mixed precision casts integers, too. To be dropped with support for these versions.


def _old() -> bool:
    return "requires_grad=param.requires_grad" not in inspect.getsource(_fsdp_param.FSDPParam._init_sharded_param)


def _constant_if_integer(data: torch.Tensor, requires_grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


def _integers_are_constants() -> contextlib.AbstractContextManager[Any]:
    if not _old():
        return contextlib.nullcontext()
    names = types.SimpleNamespace(**{**vars(torch.nn), "Parameter": _constant_if_integer})
    return mock.patch.object(_fsdp_param, "nn", names)


def _keep_dtype(parameter: Any, policy: fsdp.MixedPrecisionPolicy) -> None:
    parameter.orig_dtype = parameter.sharded_param.dtype
    parameter.param_dtype = parameter.reduce_dtype = None
