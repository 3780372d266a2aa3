"""Memory that the ranks of one machine share: kernels write where the others read, and nobody's host has to know how much.

A *window* is a part of every rank's memory that all ranks can write to (PyTorch's symmetric memory; on a CPU a mapped file).
It holds what comes from each rank: how many rows, the rows, their weights and their expert ids, with space for as many rows
as a rank has tokens. So a sender knows where to write before anybody has counted anything.

====================  ======================================================================================
forward               tokens into window 0, *barrier*, out of it; experts; results into window 1, *barrier*
backward              their gradients into window 0, *barrier*, out, *barrier*; tokens' into window 1, *barrier*
====================  ======================================================================================

A barrier is a kernel: streams wait for each other, hosts for no device. Between two uses of a window there is always one that
all ranks have passed since they read it. (The second one of the backward pass stands for window 1, which is not used where no
gradient of the tokens is wanted.)

Ranks may bring different numbers of tokens: their hosts tell each other, through a few bytes that all of them map.
"""

import functools
import math
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernelbook.distributed.exchange import _bits, _combine, _launch, _place, _sizes, aligned, through
from kernelbook.tensors import check_versions, with_versions

TIMEOUT_S = 600.0  # for a host that does not call the layer, as PyTorch's groups have it


class _Layout(NamedTuple):
    """Offsets of the parts of a window, in bytes: counts of rows, rows (n, capacity, H), weights and ids (n, capacity, k)."""

    capacity: int
    rows: int
    weights: int
    ids: int
    size: int


@functools.cache
def _layout(ranks: int, capacity: int, row: int, weights: int, ids: int) -> _Layout:
    """For rows, weights and ids of so many bytes each."""
    at_rows = aligned(4 * ranks)
    at_weights = at_rows + aligned(ranks * capacity * row)
    at_ids = at_weights + aligned(ranks * capacity * weights)
    return _Layout(capacity, at_rows, at_weights, at_ids, at_ids + aligned(ranks * capacity * ids))


class Windows:
    """Two windows of each rank of a group, and a barrier. They grow, by all ranks together, and are never given back:
    captured graphs hold their addresses."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group: Callable[[], Any] = weakref.ref(group)  # nobody's group lives longer for it
        self.device = device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.size = 0
        self._calls = 0
        # Two numbers of each rank: the call and its tokens, in turns. A third call begins when all have read the first.
        self._told = [memoryview(part.numpy()).cast("q") for part in self._mapped(16)]  # type: ignore[arg-type]
        self._before: list[Any] = []
        self.memory: torch.Tensor
        self.addresses: tuple[torch.Tensor, torch.Tensor]  # (n,) int64, by window
        self.barrier: Callable[[], None]

    def ensure(self, size: int) -> None:
        """Windows of at least ``size`` bytes."""
        if size <= self.size:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "ExpertParallel(waits=False): call the layer once with as many tokens before a graph is captured"
            )
        self.size = max(size, 2 * self.size)
        begin = self._on_gpus() if self.device.type == "cuda" else self._on_cpus()
        table = torch.tensor([begin, [at + self.size for at in begin]], dtype=torch.int64, device=self.device)
        self.addresses = table[0], table[1]

    def _on_gpus(self) -> list[int]:
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(2 * self.size, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(memory, self._group())
        self._before.append((memory, handle))
        self.memory, self.barrier = memory, lambda: handle.barrier(channel=0)
        return [handle.get_buffer(r, (2 * self.size,), torch.uint8).data_ptr() for r in range(self.ranks)]

    def _on_cpus(self) -> list[int]:
        mapped, group = self._mapped(2 * self.size), self._group()
        self._before.append(mapped)
        self.memory, self.barrier = mapped[self.rank], lambda: dist.barrier(group)
        return [part.data_ptr() for part in mapped]

    def _mapped(self, size: int) -> list[torch.Tensor]:
        """Return a file of zeros of each rank, in the memory of all."""
        group = self._group()
        names = [tempfile.mkdtemp(prefix="kernelbook-") if self.rank == 0 else ""]
        dist.broadcast_object_list(names, group=group, group_src=0)
        paths = [os.path.join(names[0], str(r)) for r in range(self.ranks)]
        with open(paths[self.rank], "wb") as file:
            file.truncate(size)
        dist.barrier(group)
        mapped = [torch.from_file(p, shared=True, size=size, dtype=torch.uint8, device="cpu") for p in paths]
        dist.barrier(group)
        os.remove(paths[self.rank])
        dist.barrier(group)
        if self.rank == 0:
            os.rmdir(names[0])
        return mapped

    def max_tokens_over_ranks(self, tokens: int) -> int:
        """Return the most tokens that a rank brings to this call: hosts wait here for each other's call, and for no device."""
        self._calls += 1
        call, side, found = self._calls << 32, self._calls % 2, tokens
        self._told[self.rank][side] = call | tokens
        for rank, told in enumerate(self._told):
            tries = 0
            while told[side] < call:
                tries += 1
                if tries == 1:
                    end = time.monotonic() + TIMEOUT_S
                elif tries > 1000:  # a good while: others may want this processor
                    time.sleep(2e-5)
                    if time.monotonic() > end:
                        raise RuntimeError(
                            f"ExpertParallel(waits=False): rank {rank} must call the layer as often as rank {self.rank}, and has "
                            f"not for {TIMEOUT_S:g} s"
                        )
            found = max(found, told[side] - call)
        return found

    def view(self, window: int, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a part of this rank's own window."""
        begin = window * self.size + at
        return self.memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


_found: "weakref.WeakKeyDictionary[dist.ProcessGroup, Windows | None]" = weakref.WeakKeyDictionary()
# PyTorch knows groups of symmetric memory by their names, and keeps the first of a name: one that comes after it gets none.
_named: dict[str, Callable[[], Any]] = {}


def windows_of(group: dist.ProcessGroup, device: torch.device) -> Windows | None:
    """Return the windows of the group; ``None`` where its ranks cannot reach each other's memory. A collective, the first time."""
    if group not in _found:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
        boot = Path("/proc/sys/kernel/random/boot_id")  # containers of several machines can have one name
        booted = boot.read_text() if boot.exists() else ""
        about = (socket.gethostname(), booted, os.environ.get("CUDA_VISIBLE_DEVICES"), device.type)
        all_of: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_of, (about, index), group=group)
        reachable = len({about for about, _ in all_of}) == 1
        if reachable and device.type == "cuda":
            devices = {i for _, i in all_of}
            reachable = len(devices) == len(all_of) and all(
                torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b
            )
        reachable = reachable and _named.setdefault(group.group_name, weakref.ref(group))() is group
        _found[group] = (
            Windows(group, torch.device("cuda", index) if device.type == "cuda" else device) if reachable else None
        )
    return _found[group]


# --- launches -------------------------------------------------------------------------------------------------------


class _WindowDispatchPlan:
    """Plan of a dispatch, which the forward pass makes and the backward pass follows: where tokens go. ``capacity`` (C): the most tokens of a rank."""

    places: torch.Tensor  # (T, n): rank * capacity + row there, or -1
    counts: torch.Tensor  # (n,) int32, rows from each rank

    def __init__(self, windows: Windows, ids: torch.Tensor, num_experts: int, share: int) -> None:
        self.windows, self.ids, self.num_experts, self.share = windows, ids, num_experts, share
        self.versions = with_versions(ids)
        self.own = max(min(share, num_experts - windows.rank * share), 0)
        self.capacity = windows.max_tokens_over_ranks(ids.shape[0])

    def layout(self, x: torch.Tensor, gates: torch.Tensor) -> _Layout:
        top_k = self.ids.shape[1]
        row, weights = x.shape[1] * x.element_size(), top_k * gates.element_size()
        found = _layout(self.windows.ranks, self.capacity, row, weights, top_k * 4)
        self.windows.ensure(found.size)
        return found

    def dispatch(self, x: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> rows (n C, H), their weights and ids (n C, k)."""
        self.gates, layout, windows = gates.detach(), self.layout(x, gates), self.windows
        place = windows.addresses[0], windows.rank, layout.capacity
        self.places, _ = _place(self.ids, self.num_experts, self.share, windows.ranks, None, *place)
        _put(self, layout, x, gates)
        windows.barrier()
        return _take(self, layout, x, gates)

    def dispatch_back(
        self, drows: torch.Tensor, dweights: torch.Tensor, dx: torch.Tensor, dgates: torch.Tensor, *_: Any
    ) -> None:
        check_versions(self.versions)
        layout = self.layout(drows, dweights)
        _give(self, layout, drows, dweights)
        self.windows.barrier()
        _sums(self, layout, dx, dgates)

    def combine(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        layout = self.layout(rows, self.gates)
        _give(self, layout, rows, None)
        self.windows.barrier()
        _sums(self, layout, out, None)

    def combine_back(self, grad: torch.Tensor) -> torch.Tensor:
        layout = self.layout(grad, self.gates)
        _put(self, layout, grad, None)
        self.windows.barrier()
        (rows,) = _take(self, layout, grad, None)
        self.windows.barrier()
        return rows


def _put(plan: _WindowDispatchPlan, layout: _Layout, x: torch.Tensor, gates: torch.Tensor | None) -> None:
    """Rows, and with ``gates`` weights and ids, into window 0 of the ranks that they visit."""
    (tokens, top_k), hidden, windows = plan.ids.shape, x.shape[1], plan.windows
    if tokens:
        launch = _launch("_put_kernel", HAS_IDS=gates is not None, **_sizes(top_k, hidden))
        launch(
            (tokens,), _bits(x), None if gates is None else _bits(gates), plan.ids, plan.places, windows.addresses[0],
            windows.rank, layout.capacity, plan.share, windows.ranks, plan.num_experts, hidden, layout.rows, layout.weights,
            layout.ids,
        )  # fmt: skip


def _take(
    plan: _WindowDispatchPlan, layout: _Layout, like: torch.Tensor, gates: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """(n C, H) rows, and with ``gates`` (n C, k) weights and ids, out of this rank's window 0: zeros, and ids to skip, where
    nothing came."""
    top_k, hidden, windows = plan.ids.shape[1], like.shape[1], plan.windows
    count = windows.ranks * layout.capacity
    out = torch.empty(count, hidden, dtype=like.dtype, device=like.device)
    if gates is None:
        weights = ids = None
        counts = plan.counts
    else:
        weights = torch.empty(count, top_k, dtype=gates.dtype, device=like.device)
        ids = torch.empty(count, top_k, dtype=torch.int32, device=like.device)
        plan.counts = torch.empty(windows.ranks, dtype=torch.int32, device=like.device)
        counts = windows.view(0, 0, (windows.ranks,), torch.int32)
    if count:
        launch = _launch("_copy_kernel", BACK=False, **_sizes(top_k, hidden))
        given: tuple[Any, ...] = (None, None, None, None)
        if gates is not None and weights is not None:
            shape = (count, top_k)
            given = (
                _bits(windows.view(0, layout.weights, shape, gates.dtype)), _bits(weights),
                windows.view(0, layout.ids, shape, torch.int32), ids,
            )  # fmt: skip
        rows = windows.view(0, layout.rows, (count, hidden), like.dtype)
        sizes = layout.capacity, 0, plan.own, hidden, 0, 0
        launch((count,), _bits(rows), counts, None, _bits(out), plan.counts, *given, *sizes)
    return (out,) if weights is None or ids is None else (out, weights, ids)


def _give(plan: _WindowDispatchPlan, layout: _Layout, rows: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Rows (n C, H), and weights (n C, k), into window 1 of the ranks where their tokens came from."""
    top_k, hidden, windows = plan.ids.shape[1], rows.shape[1], plan.windows
    if layout.capacity:
        launch = _launch("_copy_kernel", BACK=True, **_sizes(top_k, hidden))
        launch(
            (windows.ranks * layout.capacity,), _bits(rows), plan.counts, windows.addresses[1], None, None,
            None if weights is None else _bits(weights), None, None, None,
            layout.capacity, windows.rank, 0, hidden, layout.rows, layout.weights,
        )  # fmt: skip


def _sums(plan: _WindowDispatchPlan, layout: _Layout, out: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Out of this rank's window 1: out (T, H), sums of the rows that came back; and (T, k) weights."""
    windows, top_k = plan.windows, plan.ids.shape[1]
    count = windows.ranks * layout.capacity
    rows = windows.view(1, layout.rows, (count, out.shape[1]), out.dtype)
    theirs = None if weights is None else windows.view(1, layout.weights, (count, top_k), weights.dtype)
    _combine(
        rows, plan.places, out, theirs, weights, plan.ids if weights is not None else None, plan.share, plan.num_experts
    )


def exchange_shared(
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    gates: torch.Tensor,
    *,
    num_experts: int,
    share: int,
    windows: Windows,
) -> torch.Tensor:
    """As ``exchange.exchange``, between ranks that share memory: a token travels to the ranks that have experts for it, and no
    host waits for anything, so that a CUDA graph can hold it. What goes over the wire is what the router says.

    Experts get ``ranks`` times as many rows as the rank with the most tokens brings, ``k`` slots a row of which those are skipped
    that are not theirs: the host does not know how many came, so their buffers have the size that no batch exceeds. That most
    the hosts tell each other: they wait for each other's call, see :meth:`Windows.max_tokens_over_ranks`.

    Args: as ``exchange.exchange``; ``experts`` is called with k slots a row, of which ids equal to this rank's number of experts
        are to be skipped.
    """
    return through(experts, x, gates, _WindowDispatchPlan(windows, expert_ids.contiguous(), num_experts, share))
