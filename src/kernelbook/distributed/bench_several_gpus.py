"""What is measured on several GPUs: ``torchrun --nproc-per-node N -m kernelbook bench several_gpus``.

Every rank measures, the slowest counts, rank 0 writes ``several_gpus.csv``. Columns as everywhere; ``gpus`` says on how many.

- ``all_to_all``, ``all_reduce``, ``all_gather``, ``reduce_scatter``: PyTorch's collectives, ``x`` MiB a rank puts in or gets
  out, whichever is more; ``gbytes`` are those that it sends. They are the constants of the chapter's cost model.
- ``expert_parallel``: a layer's experts with LoRA, forward and backward, at the sizes of models, every GPU with tokens of its
  own; with ``gpus=1`` all experts on one. By the host's clock over a number of calls, as a training loop has them.
  ``peak_mib`` is what this rank keeps of the experts' weights.
- ``exchange``: tokens there and back with experts that do nothing; ``kernelbook:known`` is told the counts and does not wait.
- ``reduce_active_rows``: the gradient of a chunk-sparse layer, ``x`` its active share; ``dense`` is one all-reduce of all.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kernelbook import check, runtime, timing
from kernelbook.distributed import exchange as exchanging
from kernelbook.distributed import gradients
from kernelbook.distributed.expert_parallel import ExpertParallel
from kernelbook.nn import GatedExperts, SparseLinear, bench_moe_block, moe

__all__ = ["KEY", "SOURCES", "bench", "rows_of"]

HERE = Path(__file__).resolve().parent
SOURCES = (HERE, HERE.parent / "nn" / "moe.py", HERE.parent / "moe_lora", HERE.parent / "nf4")
KEY = (*(name for name in timing.KEY if name != "gpus"), "gpus")
MIB = (0.0625, 0.25, 1, 4, 16, 64, 256)
TOKENS = (512, 2048, 8192)
MODELS = ("Qwen3-30B-A3B", "OLMoE-1B-7B")
CALLS = 8  # of a layer between two looks at the clock
ACTIVE = (0.1, 0.25, 0.5)
SPARSE = (16384, 4096, 64)  # features out and in of a sparse layer, and of a chunk
CHECKED = 128  # tokens of each rank for which results are compared with float64


def _slowest(ms: float) -> float:
    found = torch.tensor(ms, dtype=torch.float64, device=runtime.DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _measure(call: Callable[[], Any], calls: int, samples: int) -> timing.Timing:
    """The time of a call by the host's clock, the slowest rank's: as often on every rank, or they would wait for ever."""
    for _ in range(3):
        call()
    times = []
    for _ in range(samples):
        _wait()
        dist.barrier()
        _wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _wait()
        times.append((time.perf_counter() - start) * 1e3 / calls)
    own = timing.Timing.of(times)
    return timing.Timing(_slowest(own.ms), _slowest(own.p20), _slowest(own.p80), own.samples)


def _wait() -> None:
    if runtime.DEVICE.type == "cuda":
        torch.cuda.synchronize()


Row = dict[str, Any]


def _row(
    op: str, mode: str, provider: str, dtype: torch.dtype, shape: str, x: tuple[str, float], **figures: Any
) -> Row:
    t: timing.Timing = figures.pop("timing")
    return {
        "op": op, "mode": mode, "provider": provider, "dtype": str(dtype).removeprefix("torch."), "shape": shape,
        "x_name": x[0], "x": f"{x[1]:.12g}", "ms": f"{t.ms:.5g}", "ms_p20": f"{t.p20:.5g}", "ms_p80": f"{t.p80:.5g}",
        "gbytes": "nan", "gflop": "nan", "peak_mib": "nan", "err_ratio": "nan", "host_us": "nan",
        "gpus": str(dist.get_world_size()), **figures,
    }  # fmt: skip


# --- collectives ----------------------------------------------------------------------------------------------------


def _collectives(sizes: Sequence[float], samples: int) -> Iterator[Row]:
    ranks = dist.get_world_size()
    for mib in sizes:
        size = int(mib * 2**20) // (2 * ranks) * ranks  # bfloat16
        large, other = (torch.zeros(size, dtype=torch.bfloat16, device=runtime.DEVICE) for _ in range(2))
        small = large[: size // ranks]
        calls: dict[str, tuple[Callable[[], Any], float]] = {
            "all_to_all": (functools.partial(dist.all_to_all_single, other, large), 1),
            "all_reduce": (functools.partial(dist.all_reduce, large), 2),
            "all_gather": (functools.partial(dist.all_gather_into_tensor, other, small), 1),
        }
        if runtime.DEVICE.type == "cuda":
            calls["reduce_scatter"] = (functools.partial(dist.reduce_scatter_tensor, small, other), 1)
        for name, (call, times) in calls.items():
            found = _measure(call, 10, samples)
            sent = times * large.nbytes * (ranks - 1) / ranks / 1e9
            shape = f"bytes={large.nbytes}"
            yield _row(name, "forward", "nccl" if large.is_cuda else "gloo", large.dtype, shape, ("MiB", mib), timing=found,
                       gbytes=f"{sent:.6g}")  # fmt: skip


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


def _error_ratio(whole: GatedExperts, parallel: GatedExperts, sizes: Sequence[int]) -> float:
    """The worst error over plain PyTorch's on one GPU, of outputs and gradients; ``CheckError`` if one is not correct."""
    ours = [
        part.full_tensor() if hasattr(part, "full_tensor") else part for part in _train_call(parallel, CHECKED, sizes)()
    ]
    x, ids, gates, up = (_gathered(part) for part in _tokens(CHECKED, sizes))
    dense = {name: getattr(whole, name).detach() for name in ("gate_up", "down")}
    leaves = {name: p.detach() for name, p in _leaves(whole).items()}

    def plain(dtype: torch.dtype) -> Sequence[torch.Tensor]:
        own = {name: p.to(dtype).requires_grad_() for name, p in leaves.items()}
        tokens, weights = x.to(dtype).requires_grad_(), gates.to(dtype).requires_grad_()
        pairs = {f"{n}_proj": moe.LoRAPair(own[f"{n}_a"], own[f"{n}_b"], whole.scaling) for n in ("gate_up", "down")}
        out = bench_moe_block.block_reference(tokens, dense["gate_up"], dense["down"], ids, weights, pairs)
        found = [out, *torch.autograd.grad(out, [tokens, weights, *own.values()], up.to(dtype))]
        rows = slice(dist.get_rank() * CHECKED, (dist.get_rank() + 1) * CHECKED)
        return [part[rows] for part in found[:3]] + found[3:]

    truth, baseline = plain(torch.float64), plain(torch.bfloat16)
    ratios = []
    for i, (out, ref, base) in enumerate(zip(ours, truth, baseline, strict=True)):
        factor = check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR
        verdict = check.compare(f"expert_parallel[{i}]", out, ref, base.to(out.dtype), factor=factor)
        verdict.require()
        ratios.append(verdict.ratio)
    return max(ratios)


def _kept_mib(layer: GatedExperts) -> float:
    """What this rank keeps of frozen weights, in MiB."""
    frozen = [p for p in layer.parameters() if not p.requires_grad]
    return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in frozen) / 2**20


def _layers(mesh: DeviceMesh, models: Sequence[str], tokens: Sequence[int], samples: int) -> Iterator[Row]:
    for model in models:
        sizes, rank = bench_moe_block.MODELS[model], bench_moe_block.RANK
        experts, hidden, inner, slots = sizes
        shape = f"E={experts} H={hidden} I={inner} k={slots} r={rank}"
        for kind in ("nf4", "dense"):
            provider = "kernelbook" if kind == "nf4" else "kernelbook:dense"
            whole, parallel = _experts(sizes, kind, rank), _experts(sizes, kind, rank)
            ExpertParallel(gradients="sum")._apply(parallel, mesh)
            ratio = _slowest(_error_ratio(whole, parallel, sizes))
            for count in tokens:
                products = count * slots * (3 * hidden * inner + rank * (2 * hidden + 3 * inner))
                gflop = (4 * products + 2 * count * slots * rank * (2 * hidden + 3 * inner)) * 2 / 2e9
                for layer, gpus in ((whole, 1), (parallel, mesh.size())):
                    found = _measure(_train_call(layer, count, sizes), CALLS, samples)
                    yield _row(
                        "expert_parallel", "forward_backward", provider, torch.bfloat16, shape, ("T", count),
                        timing=found, gflop=f"{gflop:.6g}", peak_mib=f"{_kept_mib(layer):.5g}", gpus=str(gpus),
                        err_ratio=f"{ratio if gpus > 1 else float('nan'):.3g}",
                    )  # fmt: skip
            del whole, parallel
        yield from _exchanges(mesh, sizes, tokens, samples)


def _exchanges(mesh: DeviceMesh, sizes: Sequence[int], tokens: Sequence[int], samples: int) -> Iterator[Row]:
    experts, hidden, _, slots = sizes
    share = -(-experts // mesh.size())
    for count in tokens:
        x, ids, gates, _ = _tokens(count, sizes)

        def call(x: Any = x, ids: Any = ids, gates: Any = gates) -> torch.Tensor:
            return exchanging.exchange(
                lambda rows, *_: rows, x, ids, gates, num_experts=experts, share=share, group=mesh.get_group()
            )

        seen: list[list[list[int]]] = []
        waits = exchanging.wait_for_counts

        def note(counts: torch.Tensor, seen: Any = seen, waits: Any = waits) -> list[list[int]]:
            seen.append(waits(counts))
            return seen[-1]

        with torch.no_grad():
            with mock.patch.object(exchanging, "wait_for_counts", note):
                call()
            known = mock.patch.object(exchanging, "wait_for_counts", lambda counts, seen=seen: seen[-1])
            sent = 2 * (sum(seen[-1][0]) - seen[-1][0][mesh.get_local_rank()]) * hidden * x.element_size() / 1e9
            shape = f"E={experts} H={hidden} k={slots}"
            for provider in ("kernelbook", "kernelbook:known"):
                with known if provider.endswith("known") else mock.patch.object(exchanging, "wait_for_counts", waits):
                    found = _measure(call, CALLS, samples)
                yield _row(
                    "exchange", "forward", provider, x.dtype, shape, ("T", count), timing=found, gbytes=f"{sent:.6g}"
                )


# --- gradients of active rows ---------------------------------------------------------------------------------------


def _active_rows(sizes: Sequence[int], samples: int) -> Iterator[Row]:
    features, inputs, chunk = sizes
    layer = SparseLinear(inputs, features, bias=False, device="meta", chunk_size=chunk)
    ranks, chunks = dist.get_world_size(), features // chunk
    shape = f"d_in={inputs} d_out={features} chunk_size={chunk}"
    for active in (*ACTIVE, 1.0):
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
            found = _measure(functools.partial(call, work), 4, samples)
            yield _row(
                "reduce_active_rows", "backward", provider, grad.dtype, shape, ("active", active), timing=found,
                gbytes=f"{2 * size * (ranks - 1) / ranks / 1e9:.6g}",
                err_ratio=f"{verdict.ratio if provider != 'dense' else 1.0:.3g}",
            )  # fmt: skip


# --- the command ----------------------------------------------------------------------------------------------------


def rows_of(
    *,
    mib: Sequence[float] = MIB,
    models: Sequence[str] = MODELS,
    tokens: Sequence[int] = TOKENS,
    sparse: Sequence[int] = SPARSE,
    samples: int = 10,
) -> Iterator[Row]:
    """The figures, as they come; the default process group is there."""
    mesh = init_device_mesh(runtime.DEVICE.type, (dist.get_world_size(),))
    yield from _collectives(mib, samples)
    yield from _layers(mesh, models, tokens, samples)
    yield from _active_rows(sparse, samples)


def bench(folder: Path) -> int:
    """Measures and writes ``folder/several_gpus.csv``; 2 where this process was not started by torchrun."""
    if not dist.is_torchelastic_launched():
        print("bench several_gpus: start it by torchrun --nproc-per-node <GPUs> -m kernelbook bench several_gpus")
        return 2
    torch.cuda.set_device(dist.get_node_local_rank(0))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        columns = list(timing.COLUMNS)
        columns[columns.index("err_ratio") + 1 : columns.index("err_ratio") + 1] = [
            name for name in ("host_us", "gpus") if name not in columns
        ]
        about = {"run": timing.new_run(), **timing.environment(timing.package_version(*SOURCES))}
        for row in rows_of():
            if dist.get_rank() == 0:
                timing.write_results(
                    folder / "several_gpus.csv", pd.DataFrame([{**about, **row}], columns=columns), KEY
                )
                print(tabulate([[row[n] for n in (*KEY, "ms", "err_ratio")]], tablefmt="plain"), flush=True)
        return 0
    finally:
        dist.destroy_process_group()
