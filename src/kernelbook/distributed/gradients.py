"""Gradients that PyTorch's own reductions leave out or send too much of: averaged as the backward pass makes them.

- Chunk-sparse layers: :func:`reduce_active_rows`. All ranks choose the same chunks, so the rows of all others are zero on
  every rank and need not travel.
- Parameters that neither DDP nor FSDP2 manages, such as an adapter that was added after ``fully_shard``, and experts that
  have copies on another dimension of the mesh: :func:`keep_equal`.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kernelbook import runtime
from kernelbook.distributed.sharding import hand_out, local_part, same_on_all_ranks
from kernelbook.nn.layers import SparseLinear

AT_ONCE = 2**20  # bytes from which a gradient travels by itself, while the backward pass goes on


class _Part(NamedTuple):
    """The part of a gradient that is to be reduced, and how it gets back."""

    values: torch.Tensor
    finish: Callable[[], object] | None = None


Select = Callable[[torch.Tensor], _Part]


class _Pass:
    """Gradients that one backward pass has to average. Its callback alone holds them: of a pass that raises nothing is left."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, _Part]] = []
        self.small: list[_Part] = []


class Reduction:
    """Averages gradients over the ranks of a group, from within the backward pass; when that returns, all are averaged.

    Large ones start at once. Small ones travel together at the end. A gradient to which further backward passes add is
    averaged after each: the sum of averages.

    Attributes:
        bytes: what this rank has put into all-reduces since it was last set to 0, in bytes.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.bytes = group, 0
        self._handles: list[Any] = []
        self._current: Callable[[], _Pass | None] = lambda: None

    def add(self, parameter: torch.Tensor, select: Select) -> None:
        """Average ``parameter``'s gradient, or the part that ``select`` finds in it."""
        self._handles.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._take, select)))

    def remove(self) -> None:
        """Leave the gradients alone from now on."""
        for handle in self._handles:
            handle.remove()

    def _take(self, select: Select, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        part = select(parameter.grad)
        work = self._start(part.values) if part.values.nbytes >= AT_ONCE else None
        current = self._current()
        if current is None:
            current = _Pass()
            self._current = weakref.ref(current)
            # As DDP does it: called when the whole backward pass is through.
            finish = functools.partial(self._finish, current)
            torch.autograd.Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]
        if work is None:
            current.small.append(part)
        else:
            current.started.append((work, part))

    def _start(self, values: torch.Tensor) -> Any:
        """Start an all-reduce, and count it; return what to wait for."""
        self.bytes += values.nbytes
        return dist.all_reduce(values, group=self.group, async_op=True)

    def _finish(self, current: _Pass) -> None:
        small, started, ranks = current.small, current.started, dist.get_world_size(self.group)
        self._current = lambda: None
        for dtype in dict.fromkeys(part.values.dtype for part in small):
            parts = [part for part in small if part.values.dtype == dtype]
            together = torch.cat([part.values.reshape(-1) for part in parts])
            self._start(together).wait()
            pieces = together.div_(ranks).split([part.values.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.values.copy_(piece.view_as(part.values))
        for work, part in started:
            work.wait()
            part.values.div_(ranks)
        for part in (*small, *(part for _, part in started)):
            if part.finish is not None:
                part.finish()


def _dense(grad: torch.Tensor) -> _Part:
    if grad.is_sparse:
        raise TypeError(
            "keep_equal: gradients must be dense, got a sparse one, whose rows may be others on each rank; for SparseLinear "
            "there is reduce_active_rows"
        )
    return _all_of(grad)


def _all_of(grad: torch.Tensor) -> _Part:
    grad = local_part(grad.detach())
    if grad.is_sparse:  # of the same rows on every rank
        return _Part(grad._values())
    if grad.is_contiguous():
        return _Part(grad)
    values = grad.contiguous()
    return _Part(values, lambda: grad.copy_(values))


def _active_rows(layer: SparseLinear, group: dist.ProcessGroup | None, grad: torch.Tensor) -> _Part:
    """Return the rows of the chunks that are active, of a gradient that is zero in all others."""
    ids = layer.active_chunks
    if runtime.debug_enabled() and ids is not None and not same_on_all_ranks(ids.to(torch.int64), group):
        raise ValueError("reduce_active_rows: active_chunks must be the same on all ranks, and they are not")
    if grad.is_sparse or ids is None or layer.mode == "dense":
        return _all_of(grad)
    grad, chunk = grad.detach(), layer.chunk_size
    rows = (ids[:, None] * chunk + torch.arange(chunk, device=ids.device)).reshape(-1)
    rows = rows.clamp_(max=grad.shape[0] - 1)  # of a shorter last chunk those past the end stand for the last row
    values = grad.index_select(0, rows)
    return _Part(values, lambda: grad.index_copy_(0, rows, values))


def reduce_active_rows(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> Reduction:
    """Average the gradients of all :class:`kernelbook.nn.SparseLinear` in ``module``, and send their active rows only.

    ::

        reduction = reduce_active_rows(model)
        model = DistributedDataParallel(model)  # the other parameters; it leaves these alone

    Gradients may be dense or of active rows only (``compact_gradient``). All ranks must have the same ``active_chunks``; with
    ``KERNELBOOK_DEBUG=1`` that is checked. Schedulers that look at gradients after the backward pass see the averages, and
    so choose alike on all ranks. The first rank's parameters are handed out, as DDP does.

    Args:
        module: before it is wrapped by DDP.
        group: the ranks that share the batch; all of them by default.

    Returns:
        The reduction; its ``bytes`` counts what is sent.

    Raises:
        ValueError: there is no such layer.
    """
    reduction, ignored = Reduction(group), []
    for name, layer in module.named_modules():
        if not isinstance(layer, SparseLinear):
            continue
        for own, parameter in layer.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) or not parameter.requires_grad:
                continue
            hand_out(parameter, group, parameter.device)
            reduction.add(parameter, functools.partial(_active_rows, layer, group))
            ignored.append(f"{name}.{own}" if name else own)
    if not ignored:
        raise ValueError(
            f"reduce_active_rows: module must have SparseLinear layers with gradients of their own, got "
            f"{type(module).__name__} without"
        )
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*before, *ignored])
    return reduction


def keep_equal(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> Reduction:
    """Make ``parameters`` equal on all ranks of ``group`` and keep them so: the first rank's values, averaged gradients.

    For what neither DDP nor ``fully_shard`` manages. Each rank that adds LoRA pairs to a sharded model draws its own, and
    nobody averages their gradients: as many models as ranks are trained, and one of them is saved. With ::

        model = get_peft_model(sharded, LoraConfig(...))
        keep_equal(p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor))

    there is one. Gradients must be dense. It also serves experts on a 2-D mesh, whose copies lie along the other dimension
    (``keep_equal(layer.experts.parameters(), mesh["data"].get_group())``). Of a ``DTensor`` the local part is averaged.

    Raises:
        ValueError: there are no parameters.
    """
    reduction, parameters = Reduction(group), list(parameters)
    if not parameters:
        raise ValueError("keep_equal: parameters must not be empty, got none")
    for parameter in parameters:
        hand_out(parameter, group, parameter.device)
        if parameter.requires_grad:
            reduction.add(parameter, _dense)
    return reduction
