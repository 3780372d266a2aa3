"""4-bit experts as PyTorch shards them: a row of bytes for each expert, which nobody takes for numbers.

:func:`kernelbook.nn.moe.quantize_parameter` keeps a parameter's packed bytes in one long row and its scales in buffers.
:func:`by_expert` lays both out as parameters with a row an expert, uint8 all of them. So ``fully_shard``, ``ExpertParallel``
and ``torch.distributed.checkpoint`` cut them between experts, gather them as bytes whatever the mixed-precision policy
says, and an optimizer sees nothing of them. No byte changes; nothing is copied that need not be.
"""

import dataclasses

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.parameters import NF4Parametrization
from kernelbook.packed import NESTED_BLOCK


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor that is read outside its module's forward pass, on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ExpertBytes(NF4Parametrization):
    """:class:`kernelbook.nn.moe.NF4Parametrization` whose ``original``, absmax and nested absmax are parameters (E, bytes)."""

    ROWS = ("absmax", "nested_absmax")

    def __init__(self, q: NF4Tensor, *, transposed: bool = False) -> None:
        super().__init__(q, transposed=transposed)
        for name in self.ROWS:
            delattr(self, name)
            part = getattr(q, name)
            rows = None if part is None else torch.nn.Parameter(_rows(part, q.shape[0]), requires_grad=False)
            self.register_parameter(name, rows)

    def tensor(self, packed: torch.Tensor) -> NF4Tensor:
        """packed (E, bytes) -> the 4-bit tensor with these bytes; everything is shared."""
        packed = _whole(packed.detach())
        parts = {name: getattr(self, name) for name in self.PARTS}
        absmax, nested = (None if parts[name] is None else _whole(parts[name].detach()) for name in self.ROWS)
        assert absmax is not None
        if nested is None:
            parts["absmax"] = absmax.reshape(-1).view(torch.float32)
        else:
            parts |= {"absmax": absmax.reshape(-1), "nested_absmax": nested.reshape(-1).view(torch.float32)}
        return self._of(packed.reshape(-1), (packed.shape[0], *self.shape[1:]), parts)


def _rows(tensor: torch.Tensor, experts: int) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(experts, -1)


def by_expert(module: torch.nn.Module) -> int:
    """Lay out every 4-bit parameter in ``module`` by expert, see above; return how many. A second call changes nothing.

    Outputs do not change. The state dict does: packed bytes and scales have a row an expert. A model that is to load a
    checkpoint of a sharded one, on any number of ranks or on one GPU, goes through here first. With double quantization, in
    which 256 scales share one of their own, experts whose scales are no multiple of 256 keep them in float32.

    Raises:
        ValueError: an expert's elements are not a multiple of the block size, so that experts share a byte or a scale.
    """
    found, to_change = 0, []
    for owner in list(module.modules()):
        if not parametrize.is_parametrized(owner):
            continue
        for name, parts in owner.parametrizations.items():  # type: ignore[union-attr, operator]
            if len(parts) != 1 or not isinstance(parts[0], NF4Parametrization):
                continue
            found += 1
            if isinstance(parts[0], ExpertBytes):
                continue
            q = parts[0].tensor(parts.original)
            if len(q.shape) != 3 or q.shape[0] == 0 or (q.numel // q.shape[0]) % q.block_size:
                raise ValueError(
                    f"by_expert: each expert of {name} must have a multiple of block_size ({q.block_size}) elements, so that "
                    f"it can be sharded, got shape {q.shape}"
                )
            to_change.append((parts, q))
    for parts, q in to_change:
        if q.nested_absmax is not None and (q.absmax.shape[0] // q.shape[0]) % NESTED_BLOCK:
            # Experts share a scale of scales: absmax in float32 then, which changes no bit.
            q = dataclasses.replace(q, absmax=q.scales(), nested_absmax=None, nested_code=None, nested_offset=None)
        parts[0] = ExpertBytes(q, transposed=parts[0].transposed).train(parts[0].training)
        parts.original = torch.nn.Parameter(_rows(q.packed, q.shape[0]), requires_grad=False)
    return found
