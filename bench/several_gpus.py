"""What is measured on several GPUs: ``torchrun --nproc-per-node N -m bench several_gpus``.

One run measures on 1, 2, 4 ... N of them, so that ratios are taken within it. Every rank measures, the slowest counts, rank 0
writes ``several_gpus.csv``. Columns as everywhere; ``gpus`` says on how many. Times are by the host's clock over a number of
calls, as a training loop has them, unless a provider ends in ``graph``: that is the replay of a CUDA graph.

- ``expert_parallel``: a layer's experts with LoRA, forward and backward, at the sizes of models, ``x`` tokens on each GPU.
  ``kernelbook`` are 4-bit experts, ``kernelbook:dense`` bfloat16 ones; ``shared`` is ``ExpertParallel(waits=False)``.
  ``grouped_mm`` is transformers' all-to-all, with its experts and PEFT's pairs. ``peak_mib`` is what a step needs beyond the
  weights and the windows.
- ``train_step``: a step of ``train``, ``x`` sequences on all GPUs together. ``kernelbook:ddp`` and ``kernelbook:fsdp`` are
  sparse, ``ddp`` and ``fsdp2`` PyTorch's own with dense gradients. ``err_ratio``: how far losses are from one GPU's, over
  how far plain DDP's are.
"""

import dataclasses
import datetime
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bench import Bench, baselines, forget, moe_block, row
from kernelbook import check, runtime
from kernelbook.distributed.expert_parallel import ExpertParallel
from kernelbook.lab import record, timing
from kernelbook.nn import GatedExperts, moe
from kernelbook.train import CONFIGS, Trainer
from kernelbook.train.capture import Captured
from kernelbook.train.parallel import ParallelTrainer

KEY = (*(name for name in record.KEY if name != "gpus"), "gpus")
CALLS = 6  # of a layer between two looks at the clock
CHECKED = 128  # tokens of each rank for which results are compared with float64
GAP = 0.01  # relative, between the losses of one GPU and of several


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured; the defaults are a record's, others a test's.

    Attributes:
        tokens: on each GPU, by model.
        train: names in ``kernelbook.train.CONFIGS``, changed by ``settings``; sequences a GPU, and on all together; ``steps`` between two looks
            at the clock.
        samples: looks at the clock.
    """

    models: Sequence[str] = ("Qwen3-30B-A3B", "OLMoE-1B-7B")
    tokens: Sequence[Sequence[int]] = ((512, 2048, 8192), (2048,))
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


def _row(*given: Any, **figures: Any) -> dict[str, str]:
    return row(*given, gpus=dist.get_world_size(), **figures)


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
        return [part[rows] for part in found[:3]] + [part / dist.get_world_size() for part in found[3:]]

    truth, baseline = plain(torch.float64), plain(torch.bfloat16)
    ratios = {}
    for way, share in ways.items():
        parallel._expert_parallel = share  # type: ignore[assignment]
        ours = [
            part.full_tensor() if hasattr(part, "full_tensor") else part
            for part in _train_call(parallel, CHECKED, sizes)()
        ]
        worst = 0.0
        for i, (out, ref, base) in enumerate(zip(ours, truth, baseline, strict=True)):
            factor = check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR
            verdict = check.compare(f"expert_parallel[{i}]", out, ref, base.to(out.dtype), factor=factor)
            worst = max(worst, verdict.require().ratio)
        ratios[way] = _slowest(worst)
    return ratios


def _mesh() -> Any:
    return init_device_mesh(runtime.DEVICE.type, (dist.get_world_size(),))


def _shape(model: Sequence[int]) -> str:
    experts, hidden, inner, slots = model
    return f"E={experts} H={hidden} I={inner} k={slots} r={moe_block.RANK}"


def _layer(model: Sequence[int], kind: str, counts: Sequence[int], samples: int) -> Iterator[dict[str, str]]:
    provider, joint = ("kernelbook", ":") if kind == "nf4" else ("kernelbook:dense", "_")
    layer, ranks = _experts(model, kind, moe_block.RANK), dist.get_world_size()
    ratios = {"": math.nan, "shared": math.nan}
    if ranks > 1:
        whole = _experts(model, kind, moe_block.RANK)
        ExpertParallel()._apply(layer, _mesh())
        waiting: Any = layer._expert_parallel
        ways = {"": waiting, "shared": dataclasses.replace(waiting, waits=False)}
        ratios = _error_ratios(whole, layer, ways, model)
        del whole
    for count, way, graph in itertools.product(counts, ("", "shared"), (False, True)):
        if (ranks == 1 and way) or (graph and (not _on_gpu() or (ranks > 1 and not way))):
            continue
        if ranks > 1:
            layer._expert_parallel = ways[way]
        call: Callable[[], Any] = _train_call(layer, count, model)
        peak = _slowest(timing.peak_mib(call))
        call = Captured(call) if graph else call
        variant = "graph" if graph else way
        # Of a call that finds the device idle, until it returns, not until it is done.
        host = _slowest(timing.wall(call, samples=5, before=_together)[1])
        yield _row(
            "expert_parallel", "forward_backward", f"{provider}{joint}{variant}" if variant else provider, torch.bfloat16,
            _shape(model), ("T", count), _measure(call, CALLS, samples), host_us=host, peak_mib=peak,
            err_ratio=ratios[way],
        )  # fmt: skip
        del call
        forget()


class _Settled(torch.autograd.Function):
    """The rows themselves; backward what an all-to-all may still be writing is waited for."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.wait() if hasattr(grad, "wait") else grad


def _peer(model: Sequence[int], counts: Sequence[int], samples: int) -> Iterator[dict[str, str]]:
    """transformers' experts with PEFT's pairs, and where there are several ranks its all-to-all around them."""
    (experts, hidden, inner, slots), ranks, mesh = model, dist.get_world_size(), _mesh()
    if experts % ranks or not (_on_gpu() and baselines.has("transformers") and baselines.has("peft")):
        return
    layer = moe_block._Layer((experts // ranks, hidden, inner, slots), moe_block.RANK)
    forward, leaves = layer.call("grouped_mm")
    call_experts: Callable[..., torch.Tensor] = forward
    if ranks > 1:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

        own: Any = torch.nn.Module()
        own.forward, own.num_experts = lambda *given: _Settled.apply(forward(*given)), experts // ranks
        call_experts = EpDispatchExpertsParallel().install_forward(own, mesh).forward
    for count in counts:
        x, ids, gates, up = _tokens(count, model)
        gates = gates.to(x.dtype)

        def call(x: Any = x, ids: Any = ids, gates: Any = gates, up: Any = up) -> Any:
            own, weights = x.detach().requires_grad_(), gates.detach().requires_grad_()
            return torch.autograd.grad(call_experts(own, ids, weights), [own, weights, *leaves], up)

        peak = _slowest(timing.peak_mib(call))
        yield _row(
            "expert_parallel", "forward_backward", "grouped_mm", x.dtype, _shape(model), ("T", count),
            _measure(call, 4, max(samples // 2, 2)), peak_mib=peak,
        )  # fmt: skip
        forget()


# --- a training step ------------------------------------------------------------------------------------------------


def _train(sizes: Sizes, one: dict[str, list[float]]) -> Iterator[dict[str, str]]:
    """``one`` keeps the losses of one GPU from call to call, on rank 0."""
    ranks = dist.get_world_size()
    each, strong = sizes.sequences
    for name in sizes.train:
        how: dict[str, Any] = {
            "dense_steps": 2,
            "log_every": 1000,
            "eval_every": 0,
            "eval_batches": 1,
            **dict(sizes.settings),
        }
        base = dataclasses.replace(CONFIGS[name], corpus="topics", inactive="decay", **how)
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
                make: Any = functools.partial(ParallelTrainer, parallel=parallel) if parallel else Trainer
                trainer = make(config, progress=False)
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
                truth = one.get(key, losses)  # no run of one GPU had this batch, or this rank was not in it
                gap = math.dist(losses, truth) / math.hypot(*truth)
                if gap > GAP:
                    raise check.CheckError(
                        f"train_step: losses of {parallel} must be those of one GPU, they differ by {gap:.2g}"
                    )
                gaps.setdefault(parallel, gap)
                provider = {"": "dense", "ddp": "ddp", "fsdp": "fsdp2"}[parallel]
                if mode != "dense":
                    provider = f"kernelbook:{parallel}" if parallel else "kernelbook"
                yield _row(
                    "train_step", "step", provider, torch.bfloat16, shape, ("batch", batch), found,
                    peak_mib=_slowest(peak), err_ratio=gap / max(gaps[parallel], 1e-6) if gap else math.nan,
                )  # fmt: skip
                del trainer
                forget()


# --- the command ----------------------------------------------------------------------------------------------------


def sections(sizes: Sizes) -> dict[str, Callable[[], Iterator[dict[str, str]]]]:
    """The figures by name, each to be called on every rank of the default process group."""
    models = [(moe_block.MODELS[name], tokens) for name, tokens in zip(sizes.models, sizes.tokens, strict=True)]
    layers = [(model, kind, tokens) for model, tokens in models for kind in ("nf4", "dense")]
    return {
        "layers": lambda: itertools.chain.from_iterable(_layer(*layer, sizes.samples) for layer in layers),
        "peers": lambda: itertools.chain.from_iterable(_peer(*model, sizes.samples) for model in models),
        "train": functools.partial(_train, sizes, {}),
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
    for i, ((name, section), count) in enumerate(itertools.product(sections(sizes).items(), counts)):
        if select is not None and not any(wanted in f"{name} {count}" for wanted in select.split(",")):
            continue
        part = PrefixStore(f"{name} {count}", store)
        if rank < count:
            dist.distributed_c10d._world.group_count = 1000 * i  # groups of other names, see windows._named
            dist.init_process_group("nccl", store=part, rank=rank, world_size=count, device_id=device)
            for found in section():
                if rank == 0:
                    table = pd.DataFrame([{**about, **found}], columns=list(record.COLUMNS))
                    record.write_results(folder / "several_gpus.csv", table, KEY)
                    print(*(found[name] for name in (*KEY, "ms", "peak_mib", "err_ratio")), flush=True)
            dist.destroy_process_group()
        if rank == 0:
            part.set("done", "")
        part.wait(["done"], datetime.timedelta(minutes=10))
    return 0


BENCH = Bench(
    name="several_gpus",
    keys={"several_gpus": KEY},
    baselines=dict.fromkeys(("dense", "ddp", "fsdp2"), "torch") | {"grouped_mm": "transformers"},
    run=bench,
    options=("select",),
)
