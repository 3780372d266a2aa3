"""What is measured on several GPUs: ``torchrun --nproc-per-node N -m bench several_gpus``.

One run measures on 1, 2, 4 ... N of them, so that ratios are taken within it. Every rank measures, the slowest counts, rank 0
writes ``several_gpus.csv``. Columns as everywhere; ``gpus`` says on how many. Times are by the host's clock over a number of
calls, as a training loop has them, unless a provider ends in ``graph``: that is the replay of a CUDA graph.

- ``all_to_all``, ``all_reduce``, ``all_gather``, ``reduce_scatter``: PyTorch's collectives, ``x`` MiB a rank puts in or gets
  out, whichever is more; ``gbytes`` are those that it sends.
- ``put``: the same by the kernel that writes tokens into other GPUs' memory, and a barrier, in a graph. It gives the constants
  of the chapter's cost model.
- ``expert_parallel``: a layer's experts with LoRA, forward and backward, at the sizes of models, ``x`` tokens on each GPU.
  ``kernelbook`` are 4-bit experts, ``kernelbook:dense`` bfloat16 ones; ``shared`` is ``ExpertParallel(waits=False)``.
  ``grouped_mm`` is transformers' all-to-all, with its experts and PEFT's pairs. ``gbytes`` are those that a rank sends in a
  step, ``peak_mib`` what a step needs beyond the weights, with windows.
- ``expert_weights``: ``peak_mib`` is what a rank keeps of frozen experts.
- ``exchange``: tokens there and back with experts that do nothing; ``kernelbook:known`` is told the counts and does not wait;
  ``kernelbook:shared`` and ``kernelbook:graph`` write into each other's memory.
- ``sharded_experts``: a stack of such layers, 4-bit under :func:`kernelbook.distributed.fully_shard`, and bfloat16 under
  PyTorch's (``fsdp2``); ``peak_mib`` with weights.
- ``reduce_active_rows``: the gradient of a chunk-sparse layer, ``x`` its active share; ``dense`` is one all-reduce of all.
- ``train_step``: a step of ``train``, ``x`` sequences on all GPUs together. ``kernelbook:ddp`` and ``kernelbook:fsdp`` are
  sparse, ``ddp`` and ``fsdp2`` PyTorch's own with dense gradients. ``err_ratio``: how far losses are from one GPU's, over
  how far plain DDP's are.
- ``sparse_gradients``: what such a step puts on the wire for its sparse layers.
"""

import dataclasses
import datetime
import functools
import gc
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bench import Bench, moe_block
from kernelbook import check, runtime
from kernelbook.distributed import exchange as exchanging
from kernelbook.distributed import gradients, windows
from kernelbook.distributed.expert_parallel import ExpertParallel
from kernelbook.distributed.sharding import fully_shard
from kernelbook.lab import record, timing
from kernelbook.nn import GatedExperts, SparseLinear, moe
from kernelbook.train import CONFIGS, Trainer
from kernelbook.train.capture import Captured
from kernelbook.train.parallel import ParallelTrainer

__all__ = ["BENCH", "KEY", "Sizes", "bench", "sections"]

KEY = (*(name for name in record.KEY if name != "gpus"), "gpus")
CALLS = 6  # of a layer between two looks at the clock
CHECKED = 128  # tokens of each rank for which results are compared with float64
GAP = 0.01  # relative, between the losses of one GPU and of several


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured; the defaults are a record's, others a test's.

    Attributes:
        mib: of collectives. tokens: on each GPU, by model. strong: tokens on all GPUs together, by model; 0: none. layers: of a stack.
        active: shares. sparse: features out and in of a sparse layer, and of a chunk.
        train: names in ``kernelbook.train.CONFIGS``, changed by ``settings``; sequences a GPU, and on all together; ``steps`` between two looks
            at the clock.
        samples: looks at the clock.
    """

    mib: Sequence[float] = (0.0625, 0.25, 1, 4, 16, 64, 256)
    models: Sequence[str] = ("Qwen3-30B-A3B", "OLMoE-1B-7B")
    tokens: Sequence[Sequence[int]] = ((512, 2048, 8192), (2048,))
    strong: Sequence[int] = (8192, 0)
    layers: int = 4
    active: Sequence[float] = (0.1, 0.25, 0.5, 1.0)
    sparse: tuple[int, int, int] = (16384, 4096, 64)
    train: Sequence[str] = ("large", "huge")
    settings: tuple[tuple[str, Any], ...] = (("depth", 2),)
    sequences: tuple[int, int] = (8, 16)
    steps: int = 2
    samples: int = 5


def _slowest(ms: float) -> float:
    found = torch.tensor(ms, dtype=torch.float64, device=runtime.DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _together() -> None:
    """Waits for all ranks, each of which has nothing to do any more."""
    timing.wait()
    dist.barrier()


def _measure(call: Callable[[], Any], calls: int, samples: int) -> timing.Timing:
    """The time of a call by the host's clock, the slowest rank's: as often on every rank, or they would wait for ever."""
    for _ in range(3):
        call()
    own, _ = timing.wall(call, calls=calls, samples=samples, before=_together)
    return timing.Timing(_slowest(own.ms), _slowest(own.p20), _slowest(own.p80), own.samples)


def _on_gpu() -> bool:
    return runtime.DEVICE.type == "cuda"


def _host_us(call: Callable[[], Any]) -> float:
    """The host's time for a call that finds the device idle, the slowest rank's: until it returns, not until it is done."""
    return _slowest(timing.wall(call, samples=5, before=_together)[1])


def _peak_mib(call: Callable[[], Any]) -> float:
    """What a call allocates at most, beyond what is there, in MiB."""
    if not _on_gpu():
        return math.nan
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


Row = dict[str, Any]
NOT_TIMED = timing.Timing(math.nan, math.nan, math.nan, 0)


def _row(
    op: str, mode: str, provider: str, dtype: torch.dtype, shape: str, x: tuple[str, float], **figures: Any
) -> Row:
    t: timing.Timing = figures.pop("timing", NOT_TIMED)
    written = {name: f"{value:.6g}" for name, value in figures.items()}
    return {
        "op": op, "mode": mode, "provider": provider, "dtype": str(dtype).removeprefix("torch."), "shape": shape,
        "x_name": x[0], "x": f"{x[1]:.12g}", "ms": f"{t.ms:.5g}", "ms_p20": f"{t.p20:.5g}", "ms_p80": f"{t.p80:.5g}",
        "gbytes": "nan", "gflop": "nan", "peak_mib": "nan", "err_ratio": "nan", "host_us": "nan",
        "gpus": str(dist.get_world_size()), **written,
    }  # fmt: skip


# --- collectives ----------------------------------------------------------------------------------------------------


def _collectives(sizes: Sizes) -> Iterator[Row]:
    ranks = dist.get_world_size()
    for mib in sizes.mib if ranks > 1 else ():
        size = int(mib * 2**20) // (2 * ranks) * ranks  # bfloat16
        large, other = (torch.zeros(size, dtype=torch.bfloat16, device=runtime.DEVICE) for _ in range(2))
        small = large[: size // ranks]
        calls: dict[str, tuple[Callable[[], Any], float]] = {
            "all_to_all": (functools.partial(dist.all_to_all_single, other, large), 1),
            "all_reduce": (functools.partial(dist.all_reduce, large), 2),
            "all_gather": (functools.partial(exchanging.all_gather, other, small), 1),
            "reduce_scatter": (functools.partial(exchanging.reduce_scatter, small, other), 1),
        }
        for name, (call, times) in calls.items():
            found = _measure(call, 10, sizes.samples)
            sent = times * large.nbytes * (ranks - 1) / ranks / 1e9
            shape = f"bytes={large.nbytes}"
            yield _row(name, "forward", "nccl" if large.is_cuda else "gloo", large.dtype, shape, ("MiB", mib), timing=found,
                       gbytes=sent)  # fmt: skip


def _puts(sizes: Sizes) -> Iterator[Row]:
    ranks, hidden = dist.get_world_size(), 2048
    for mib in sizes.mib if ranks > 1 else ():
        found_windows = windows.windows_of(dist.group.WORLD, runtime.DEVICE)  # type: ignore[arg-type]
        if found_windows is None:
            return
        tokens = max(int(mib * 2**20) // (2 * hidden * ranks), 1)
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=runtime.DEVICE)
        ids = torch.arange(ranks, dtype=torch.int32, device=runtime.DEVICE).expand(tokens, ranks)
        way = windows._WindowDispatchPlan(found_windows, ids, ranks, 1)
        layout = way.layout(x, x[:, :0])
        way.places = ids * tokens + torch.arange(tokens, dtype=torch.int32, device=runtime.DEVICE)[:, None]

        def put(way: Any = way, layout: Any = layout, x: torch.Tensor = x) -> None:
            windows._put(way, layout, x, None)
            way.windows.barrier()

        call = Captured(put) if _on_gpu() else put
        yield _row(
            "put", "forward", "kernelbook", x.dtype, f"bytes={x.nbytes * ranks}", ("MiB", mib),
            timing=_measure(call, 10, sizes.samples), gbytes=x.nbytes * (ranks - 1) / 1e9,
        )  # fmt: skip
        del call


# --- the layer ------------------------------------------------------------------------------------------------------


def _experts(sizes: Sequence[int], kind: str, rank: int) -> GatedExperts:
    """All experts, the same on every rank."""
    experts, hidden, inner, _ = sizes
    with torch.device(runtime.DEVICE):
        torch.manual_seed(0)
        layer = GatedExperts(experts, hidden, inner, dtype=torch.bfloat16)
        if kind == "nf4":
            for name in ("gate_up", "down"):
                moe.quantize_parameter(layer, name)
        layer.add_lora(rank)
        for name in ("gate_up_b", "down_b"):
            torch.nn.init.normal_(getattr(layer, name), std=0.02)
    return layer


def _tokens(count: int, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's tokens, where they go, their weights, and an upstream gradient."""
    experts, hidden, _, slots = sizes
    torch.manual_seed(1 + dist.get_rank())
    x, up = (torch.randn(count, hidden, dtype=torch.bfloat16, device=runtime.DEVICE) for _ in range(2))
    gates = torch.rand(count, slots, device=runtime.DEVICE)
    return x, torch.rand(count, experts, device=runtime.DEVICE).topk(slots).indices, gates / gates.sum(1, True), up


def _leaves(layer: GatedExperts) -> dict[str, Any]:
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}


def _train_call(layer: GatedExperts, count: int, sizes: Sequence[int]) -> Callable[[], Sequence[torch.Tensor]]:
    x, ids, gates, up = _tokens(count, sizes)

    def call() -> Sequence[torch.Tensor]:
        own, weights = x.detach().requires_grad_(), gates.detach().requires_grad_()
        out = layer(own, ids, weights)
        return [out, *torch.autograd.grad(out, [own, weights, *_leaves(layer).values()], up)]

    return call


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def _error_ratios(
    whole: GatedExperts, parallel: GatedExperts, ways: Mapping[str, Any], sizes: Sequence[int]
) -> dict[str, float]:
    """By way the worst error over plain PyTorch's on one GPU, of outputs and gradients; ``CheckError`` if one is not correct."""
    x, ids, gates, up = (_gathered(part) for part in _tokens(CHECKED, sizes))
    dense = {name: getattr(whole, name).detach() for name in ("gate_up", "down")}
    leaves = {name: p.detach() for name, p in _leaves(whole).items()}

    def plain(dtype: torch.dtype) -> Sequence[torch.Tensor]:
        own = {name: p.to(dtype).requires_grad_() for name, p in leaves.items()}
        tokens, weights = x.to(dtype).requires_grad_(), gates.to(dtype).requires_grad_()
        pairs = {f"{n}_proj": moe.LoRAPair(own[f"{n}_a"], own[f"{n}_b"], whole.scaling) for n in ("gate_up", "down")}
        out = moe_block.block_reference(tokens, dense["gate_up"], dense["down"], ids, weights, pairs)
        found = [out, *torch.autograd.grad(out, [tokens, weights, *own.values()], up.to(dtype))]
        rows = slice(dist.get_rank() * CHECKED, (dist.get_rank() + 1) * CHECKED)
        return [part[rows] for part in found[:3]] + found[3:]

    truth, baseline = plain(torch.float64), plain(torch.bfloat16)
    ratios = {}
    for way, share in ways.items():
        parallel._expert_parallel = share  # type: ignore[assignment]
        ours = [
            part.full_tensor() if hasattr(part, "full_tensor") else part
            for part in _train_call(parallel, CHECKED, sizes)()
        ]
        verdicts = [
            check.compare(
                f"expert_parallel[{i}]",
                out,
                ref,
                base.to(out.dtype),
                factor=check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR,
            )
            for i, (out, ref, base) in enumerate(zip(ours, truth, baseline, strict=True))
        ]
        for verdict in verdicts:
            verdict.require()
        ratios[way] = _slowest(max(verdict.ratio for verdict in verdicts))
    return ratios


def _kept_mib(layer: GatedExperts) -> float:
    """What this rank keeps of frozen weights and their scales, in MiB."""
    frozen = [*(p for p in layer.parameters() if not p.requires_grad), *layer.buffers()]
    return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in frozen) / 2**20


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model's layer: its sizes, and what is counted of it."""

    name: str
    mesh: DeviceMesh

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return moe_block.MODELS[self.name]

    @property
    def shape(self) -> str:
        experts, hidden, inner, slots = self.sizes
        return f"E={experts} H={hidden} I={inner} k={slots} r={moe_block.RANK}"

    def gflop(self, count: int) -> float:
        (_, hidden, inner, slots), rank = self.sizes, moe_block.RANK
        lora = rank * (2 * hidden + 3 * inner)
        return (4 * (3 * hidden * inner + lora) + 2 * lora) * count * slots / 1e9

    def sent(self, count: int) -> float:
        """GB of rows that leave this rank, there or back, for ``count`` tokens."""
        experts, hidden, _, _ = self.sizes
        ranks, own = self.mesh.size(), self.mesh.get_local_rank()
        goes = _tokens(count, self.sizes)[1] // -(-experts // ranks)
        visits = torch.zeros(count, ranks, device=goes.device).scatter_(1, goes, 1).sum(0)
        return float(visits.sum() - visits[own]) * hidden * 2 / 1e9

    def windows_mib(self, count: int) -> float:
        """What windows for ``count`` tokens take, once for all layers; 0 where there are none."""
        if windows.windows_of(self.mesh.get_group(), runtime.DEVICE) is None:
            return 0.0
        _, hidden, _, slots = self.sizes
        return 2 * windows._layout(self.mesh.size(), count, 2 * hidden, 4 * slots, 4 * slots).size / 2**20


def _layers(sizes: Sizes) -> Iterator[Row]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(runtime.DEVICE.type, (ranks,))
    for name, tokens, strong in zip(sizes.models, sizes.tokens, sizes.strong, strict=True):
        model = _Model(name, mesh)
        counts = _counts(tokens, strong)
        for kind in ("nf4", "dense"):
            yield from _layer(model, kind, counts, sizes.samples)
        if ranks > 1 and name == sizes.models[0]:
            yield from _exchanges(model, counts, sizes.samples)
        _forget()


def _peers(sizes: Sizes) -> Iterator[Row]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(runtime.DEVICE.type, (ranks,))
    if _on_gpu() and importlib.util.find_spec("transformers") and importlib.util.find_spec("peft"):
        for name, tokens, strong in zip(sizes.models, sizes.tokens, sizes.strong, strict=True):
            yield from _peer(_Model(name, mesh), _counts(tokens, strong), sizes.samples)


def _counts(tokens: Sequence[int], strong: int) -> list[int]:
    """On each GPU."""
    return sorted({*tokens, *([strong // dist.get_world_size()] if strong else [])})


def _layer(model: _Model, kind: str, counts: Sequence[int], samples: int) -> Iterator[Row]:
    provider, joint = ("kernelbook", ":") if kind == "nf4" else ("kernelbook:dense", "_")
    layer, ranks = _experts(model.sizes, kind, moe_block.RANK), model.mesh.size()
    ratios = {"": math.nan, "shared": math.nan}
    if ranks > 1:
        whole = _experts(model.sizes, kind, moe_block.RANK)
        ExpertParallel(gradients="sum")._apply(layer, model.mesh)
        waiting: Any = layer._expert_parallel
        ways = {"": waiting, "shared": dataclasses.replace(waiting, waits=False)}
        ratios = _error_ratios(whole, layer, ways, model.sizes)
        del whole
    yield _row("expert_weights", "forward", provider, torch.bfloat16, model.shape, ("T", 0), peak_mib=_kept_mib(layer))
    for count, way, graph in itertools.product(counts, ("", "shared"), (False, True)):
        if (ranks == 1 and way) or (graph and (not _on_gpu() or (ranks > 1 and not way))):
            continue
        if ranks > 1:
            layer._expert_parallel = ways[way]
        call: Callable[[], Any] = _train_call(layer, count, model.sizes)
        found: dict[str, Any] = {
            "gflop": model.gflop(count),
            "peak_mib": _slowest(_peak_mib(call)),
            "err_ratio": ratios[way],
        }
        if way and _on_gpu():
            found["peak_mib"] += model.windows_mib(count)
        if ranks > 1:
            found["gbytes"] = 4 * model.sent(count)
        call = Captured(call) if graph else call
        found |= {"timing": _measure(call, CALLS, samples), "host_us": _host_us(call)}
        variant = "graph" if graph else way
        yield _row(
            "expert_parallel", "forward_backward", f"{provider}{joint}{variant}" if variant else provider, torch.bfloat16,
            model.shape, ("T", count), **found,
        )  # fmt: skip
        del call
        _forget()


def _forget() -> None:
    """Gives memory back, so that what comes is measured alike."""
    gc.collect()
    if _on_gpu():
        torch.cuda.empty_cache()


def _exchanges(model: _Model, counts: Sequence[int], samples: int) -> Iterator[Row]:
    experts, hidden, _, slots = model.sizes
    share, waits = -(-experts // model.mesh.size()), exchanging.wait_for_counts
    for count in counts:
        x, ids, gates, _ = _tokens(count, model.sizes)

        def call(x: Any = x, ids: Any = ids, gates: Any = gates) -> torch.Tensor:
            return exchanging.exchange(
                lambda rows, *_: rows, x, ids, gates, num_experts=experts, share=share, group=model.mesh.get_group()
            )

        seen: list[Any] = []

        def note(counts: torch.Tensor, seen: Any = seen) -> Any:
            seen.append(waits(counts))
            return seen[-1]

        with torch.no_grad():
            with mock.patch.object(exchanging, "wait_for_counts", note):
                call()
            known = mock.patch.object(exchanging, "wait_for_counts", lambda counts, seen=seen: seen[-1])
            for provider in ("kernelbook", "kernelbook:known"):
                with known if provider.endswith("known") else mock.patch.object(exchanging, "wait_for_counts", waits):
                    found = _measure(call, CALLS, samples)
                yield _row(
                    "exchange", "forward", provider, x.dtype, f"E={experts} H={hidden} k={slots}", ("T", count), timing=found,
                    gbytes=2 * model.sent(count),
                )  # fmt: skip
            yield from _exchanges_shared(model, x, ids, gates, samples)


def _exchanges_shared(
    model: _Model, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, samples: int
) -> Iterator[Row]:
    experts, hidden, _, slots = model.sizes
    found_windows = windows.windows_of(model.mesh.get_group(), x.device)
    if found_windows is None:
        return

    def call() -> torch.Tensor:
        return windows.exchange_shared(
            lambda rows, *_: rows, x, ids, gates, num_experts=experts, share=-(-experts // model.mesh.size()),
            windows=found_windows,
        )  # fmt: skip

    for provider in ("kernelbook:shared", *(["kernelbook:graph"] if _on_gpu() else [])):
        found = _measure(Captured(call) if provider.endswith("graph") else call, CALLS, samples)
        yield _row(
            "exchange", "forward", provider, x.dtype, f"E={experts} H={hidden} k={slots}", ("T", x.shape[0]),
            timing=found, gbytes=2 * model.sent(x.shape[0]),
        )  # fmt: skip


class _Settled(torch.autograd.Function):
    """The rows themselves; backward what an all-to-all may still be writing is waited for."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.wait() if hasattr(grad, "wait") else grad


def _peer(model: _Model, counts: Sequence[int], samples: int) -> Iterator[Row]:
    """transformers' experts with PEFT's pairs, and where there are several ranks its all-to-all around them."""
    (experts, hidden, inner, slots), ranks = model.sizes, model.mesh.size()
    if experts % ranks:
        return
    layer = moe_block._Layer((experts // ranks, hidden, inner, slots), moe_block.RANK)
    forward, leaves = layer.call("grouped_mm")
    call_experts: Callable[..., torch.Tensor] = forward
    if ranks > 1:
        try:
            from transformers.distributed.expert_parallel import AllToAllEP  # type: ignore[attr-defined, unused-ignore]
        except ImportError:  # an older version
            return
        own = SimpleNamespace(forward=lambda *given: _Settled.apply(forward(*given)), num_experts=experts // ranks)
        alone = SimpleNamespace(size=lambda: 1, get_group=model.mesh.get_group)  # ranks with the same batch
        call_experts = AllToAllEP(own, model.mesh, alone)  # type: ignore[arg-type, unused-ignore]
    for count in counts:
        x, ids, gates, up = _tokens(count, model.sizes)
        gates = gates.to(x.dtype)

        def call(x: Any = x, ids: Any = ids, gates: Any = gates, up: Any = up) -> Any:
            own, weights = x.detach().requires_grad_(), gates.detach().requires_grad_()
            return torch.autograd.grad(call_experts(own, ids, weights), [own, weights, *leaves], up)

        found: dict[str, Any] = {
            "peak_mib": _slowest(_peak_mib(call)),
            "timing": _measure(call, 4, max(samples // 2, 2)),
        }
        yield _row(
            "expert_parallel", "forward_backward", "grouped_mm", x.dtype, model.shape, ("T", count),
            gflop=model.gflop(count), **found,
        )  # fmt: skip
        _forget()


# --- experts that are gathered --------------------------------------------------------------------------------------


class _Stack(torch.nn.Module):
    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, ids, gates)
        return x


def _sharded(sizes: Sizes) -> Iterator[Row]:
    name, count, ranks = sizes.models[0], sizes.tokens[0][-2:][0], dist.get_world_size()
    model = _Model(name, init_device_mesh(runtime.DEVICE.type, (ranks,)))
    x, ids, gates, up = _tokens(count, model.sizes)
    for kind, provider, shard in (("nf4", "kernelbook", fully_shard), ("dense", "fsdp2", fsdp.fully_shard)):
        before = torch.cuda.memory_allocated() if _on_gpu() else 0
        stack = _Stack([_experts(model.sizes, kind, moe_block.RANK) for _ in range(sizes.layers)])
        with torch.no_grad():
            truth = stack(x[:CHECKED], ids[:CHECKED], gates[:CHECKED])
        if ranks > 1:
            for layer in stack.layers:
                shard(layer, mesh=model.mesh)
            shard(stack, mesh=model.mesh)
        weights = sum(p.numel() * p.element_size() for p in stack.parameters())
        trained = sum(p.numel() * p.element_size() for p in stack.parameters() if p.requires_grad)
        with torch.no_grad():
            found = stack(x[:CHECKED], ids[:CHECKED], gates[:CHECKED])
        check.compare("sharded_experts", found, truth.double(), truth, factor=check.FORWARD_FACTOR).require()

        def call(stack: Any = stack) -> None:
            for p in stack.parameters():
                p.grad = None
            stack(x, ids, gates).backward(up)

        call()
        _forget()
        held = (torch.cuda.memory_allocated() - before) / 2**20 if _on_gpu() else math.nan
        peak = _slowest(_peak_mib(call) + held)
        yield _row(
            "sharded_experts", "forward_backward", provider, x.dtype, f"{model.shape} layers={sizes.layers}", ("T", count),
            timing=_measure(call, 4, sizes.samples), peak_mib=peak, gflop=sizes.layers * model.gflop(count),
            gbytes=(2 * weights + trained) * (ranks - 1) / ranks / 1e9,
        )  # fmt: skip
        del stack, truth, found
        _forget()


# --- gradients of active rows ---------------------------------------------------------------------------------------


def _active_rows(sizes: Sizes) -> Iterator[Row]:
    features, inputs, chunk = sizes.sparse
    layer = SparseLinear(inputs, features, bias=False, device="meta", chunk_size=chunk)
    ranks, chunks = dist.get_world_size(), features // chunk
    shape = f"d_in={inputs} d_out={features} chunk_size={chunk}"
    for active in sizes.active if ranks > 1 else ():
        count = max(1, round(active * chunks))
        torch.manual_seed(0)
        ids = torch.randperm(chunks, device="cpu")[:count].to(runtime.DEVICE)
        mask = torch.zeros(chunks, device=runtime.DEVICE).index_fill_(0, ids, 1).repeat_interleave(chunk)[:, None]
        torch.manual_seed(1 + dist.get_rank())
        grad = torch.randn(features, inputs, device=runtime.DEVICE) * mask
        layer.active_chunks = ids

        def ours(grad: torch.Tensor) -> int:
            part = gradients._active_rows(layer, grad)
            dist.all_reduce(part.values)
            part.values.div_(ranks)
            part.finish()
            return part.values.nbytes

        def dense(grad: torch.Tensor) -> int:
            dist.all_reduce(grad)
            grad.div_(ranks)
            return grad.nbytes

        once, other = grad.clone(), grad.clone()
        ours(once)
        dense(other)
        truth = _gathered(grad.double()).view(ranks, features, inputs).sum(0) / ranks
        verdict = check.compare("reduce_active_rows", once, truth, other, factor=check.GRADIENT_FACTOR)
        verdict.require()
        for provider, call in (("dense", dense), ("kernelbook", ours)):
            work = grad.clone()
            size = call(work)
            found = _measure(functools.partial(call, work), 4, sizes.samples)
            yield _row(
                "reduce_active_rows", "backward", provider, grad.dtype, shape, ("active", active), timing=found,
                gbytes=2 * size * (ranks - 1) / ranks / 1e9, err_ratio=verdict.ratio if provider != "dense" else 1.0,
            )  # fmt: skip


# --- a training step ------------------------------------------------------------------------------------------------


class _Losses(dict[str, list[float]]):
    """Losses of one GPU, which lie beside the rows: runs on several are compared with them, in this process or a later one."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(json.loads(path.read_text()) if path is not None and path.exists() else {})
        self.path = path

    def __setitem__(self, key: str, losses: list[float]) -> None:
        super().__setitem__(key, losses)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self))


def _train(sizes: Sizes, one: dict[str, list[float]]) -> Iterator[Row]:
    """``one`` keeps the losses of one GPU from call to call, on rank 0."""
    ranks = dist.get_world_size()
    each, strong = sizes.sequences
    for name in sizes.train:
        base = dataclasses.replace(
            CONFIGS[name],
            task="copy",
            dense_steps=2,
            log_every=1000,
            eval_every=0,
            eval_batches=1,
            **dict(sizes.settings),
        )
        shape = f"width={base.width} depth={base.depth} context={base.context} active={base.active:g}"
        for batch in sorted({each * ranks, strong}):
            parallels = ("ddp", "fsdp") if batch == strong else ("ddp",)
            gaps: dict[str, float] = {}
            # Dense first: how far its losses go from one GPU's is what ours are compared with.
            for parallel, mode in itertools.product(parallels if ranks > 1 else ("",), ("dense", base.mode)):
                config = dataclasses.replace(base, mode=mode, batch_size=batch)
                before = torch.cuda.memory_allocated() if _on_gpu() else 0
                if _on_gpu():
                    torch.cuda.reset_peak_memory_stats()
                trainer = (
                    ParallelTrainer(config, parallel, progress=False) if parallel else Trainer(config, progress=False)
                )
                trainer.run(max(sizes.steps, 3))  # the third is the first sparse one
                times = []
                for _ in range(3):
                    started = trainer.seconds
                    trainer.run(trainer.step + sizes.steps)
                    times.append((trainer.seconds - started) * 1e3 / sizes.steps)
                own = timing.Timing.of(times)
                found = timing.Timing(_slowest(own.ms), _slowest(own.p20), _slowest(own.p80), own.samples)
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if _on_gpu() else math.nan
                losses = trainer.losses()
                key = f"{name} {batch} {mode}"
                if ranks == 1:
                    one[key] = losses
                gap = _gap(losses, one.get(key))
                if gap > GAP:
                    raise check.CheckError(
                        f"train_step: losses of {parallel} must be those of one GPU, they differ by {gap:.2g}"
                    )
                gaps.setdefault(parallel, gap)
                provider = {"": "dense", "ddp": "ddp", "fsdp": "fsdp2"}[parallel]
                if mode != "dense":
                    provider = f"kernelbook:{parallel}" if parallel else "kernelbook"
                yield _row(
                    "train_step", "step", provider, torch.bfloat16, shape, ("batch", batch), timing=found,
                    peak_mib=_slowest(peak), gbytes=_sent_gb(trainer),
                    err_ratio=gap / max(gaps[parallel], 1e-6) if gap else math.nan,
                )  # fmt: skip
                if parallel and batch == strong:
                    yield _sparse_gradients(trainer, provider, shape)
                del trainer
                _forget()


def _gap(losses: Sequence[float], truth: Sequence[float] | None) -> float:
    if truth is None:  # no run of one GPU had this batch, or this rank was not in it
        return 0.0
    return math.dist(losses, truth) / math.hypot(*truth)


def _bytes_of_layers(trainer: Any) -> int:
    return sum(p.nbytes for layer in trainer.layers.values() for p in layer.parameters())


def _sent_gb(trainer: Any) -> float:
    """GB that a rank sends in a step."""
    if trainer.ranks == 1:
        return 0.0
    ranks, everything = trainer.ranks, sum(p.nbytes for p in trainer.model.parameters())
    rest = everything if trainer.reduction is None else everything - _bytes_of_layers(trainer)
    reduced = rest if trainer.parallel == "fsdp" else 2 * rest
    if trainer.parallel == "fsdp":  # gathered forward and backward
        reduced += 2 * everything
    return (reduced + 2 * trainer.reduced_bytes) * (ranks - 1) / ranks / 1e9


def _sparse_gradients(trainer: Any, provider: str, shape: str) -> Row:
    size = 2 * trainer.reduced_bytes
    if trainer.reduction is None:
        size = _bytes_of_layers(trainer) * (1 if trainer.parallel == "fsdp" else 2)
    gbytes, active = size * (trainer.ranks - 1) / trainer.ranks / 1e9, trainer.config.active
    return _row("sparse_gradients", "backward", provider, torch.float32, shape, ("active", active), gbytes=gbytes)


# --- the command ----------------------------------------------------------------------------------------------------


def sections(sizes: Sizes, losses: dict[str, list[float]] | None = None) -> dict[str, Callable[[], Iterator[Row]]]:
    """The figures by name, each to be called on every rank of the default process group; ``losses`` as in :func:`_train`."""
    losses = {} if losses is None else losses

    def layers() -> Iterator[Row]:
        for part in (_layers, _sharded, _active_rows, _collectives, _puts):
            yield from part(sizes)

    return {
        "layers": layers,
        "peers": functools.partial(_peers, sizes),
        "train": functools.partial(_train, sizes, losses),
    }


def bench(folder: Path, select: str | None = None, sizes: Sizes = Sizes()) -> int:
    """Measures and writes ``folder/several_gpus.csv``; 2 where this process was not started by torchrun.

    Args:
        select: parts by section and number of GPUs, with commas between them: ``"layers 2,train"``.
    """
    if not dist.is_torchelastic_launched():
        print("bench several_gpus: start it by torchrun --nproc-per-node <GPUs> -m bench several_gpus")
        return 2
    store, rank, world = next(iter(rendezvous("env://")))
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    about = {"run": record.new_run(), **record.environment("several_gpus")}
    counts = [n for n in (1, 2, 4, 8) if n < world] + [world]
    losses = _Losses(folder / "several_gpus_losses.json" if rank == 0 else None)
    for i, ((name, section), count) in enumerate(itertools.product(sections(sizes, losses).items(), counts)):
        if select is not None and not any(wanted in f"{name} {count}" for wanted in select.split(",")):
            continue
        part = PrefixStore(f"{name} {count}", store)
        if rank < count:
            dist.distributed_c10d._world.group_count = 1000 * i  # groups of other names, see windows._named
            dist.init_process_group("nccl", store=part, rank=rank, world_size=count, device_id=device)
            for row in section():
                if rank == 0:
                    record.write_results(
                        folder / "several_gpus.csv", pd.DataFrame([{**about, **row}], columns=list(record.COLUMNS)), KEY
                    )
                    print(
                        tabulate([[row[n] for n in (*KEY, "ms", "peak_mib", "err_ratio")]], tablefmt="plain"),
                        flush=True,
                    )
            dist.destroy_process_group()
        if rank == 0:
            part.set("done", "")
        part.wait(["done"], datetime.timedelta(minutes=10))
    return 0


BENCH = Bench(
    name="several_gpus",
    keys={"several_gpus": KEY},
    baselines=dict.fromkeys(("nccl", "gloo", "dense", "ddp", "fsdp2"), "torch") | {"grouped_mm": "transformers"},
    run=bench,
    options=("select",),
)
