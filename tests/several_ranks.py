"""What each rank does in the tests of several: ``torchrun --nproc-per-node N tests/several_ranks.py FOLDER CHECK...``.

Starting processes costs more than the checks, so many of them share a group; without torchrun, ``python tests/several_ranks.py N
FOLDER CHECK...``, ranks are forks of a process that has imported all. Each says ``ok <name>`` from every rank; the first that fails
ends all. It runs on GPUs over NCCL where there are any.
"""

import copy
import dataclasses
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelbook  # noqa: F401  before Triton

# isort: split
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.launcher import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bench import several_gpus
from bench.moe_block import block_reference
from kernelbook import check, runtime
from kernelbook.distributed import (
    ExpertParallel,
    by_expert,
    fully_shard,
    keep_equal,
    reduce_active_rows,
    save_adapter,
    windows,
)
from kernelbook.distributed import expert_parallel as expert_parallel_module
from kernelbook.distributed.exchange import exchange
from kernelbook.lab import record, remembered_types, timing
from kernelbook.nn import MoELayer, SparseLinear
from kernelbook.nn.moe import LoRAPair, quantize_parameter
from kernelbook.train import CONFIGS, Trainer, parallel
from kernelbook.train.capture import Captured
from kernelbook.train.parallel import ParallelTrainer

DEVICE = runtime.DEVICE
HIDDEN, INNER, SLOTS, RANK = 32, 16, 2, 4


def _layer(
    experts: int, *, seed: int, lora: bool = True, nf4: bool = False, double_quant: bool = False, dtype: Any = None
) -> MoELayer:
    torch.manual_seed(seed)
    layer = MoELayer(experts, HIDDEN, INNER, SLOTS, device=DEVICE, dtype=dtype)
    if nf4:
        for name in ("gate_up", "down"):
            quantize_parameter(layer.experts, name, double_quant=double_quant)
    if lora:
        layer.experts.add_lora(RANK, dtype=dtype or torch.float32)
        for name in ("gate_up_b", "down_b"):
            nn.init.normal_(getattr(layer.experts, name))
    return layer


def _tokens(rank: int, experts: int, all_to: int | None, even: bool = False) -> dict[str, torch.Tensor]:
    """A rank's tokens: not as many on each unless ``even``, one slot to be skipped."""
    torch.manual_seed(100 + rank)
    count = 5 + 2 * (not even) * rank
    ids = torch.stack([torch.randperm(experts)[:SLOTS] for _ in range(count)])
    ids[0, 0] = experts
    if all_to is not None:
        ids = torch.full_like(ids, all_to)
    values = {
        "x": torch.randn(count, HIDDEN),
        "gates": torch.rand(count, SLOTS),
        "up": torch.randn(count, HIDDEN),
        "ids": ids,
    }
    return {name: value.to(DEVICE) for name, value in values.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _expert_parallel(
    experts: int, all_to: int | None = None, waits: bool = True, even: bool = False, **kind: Any
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    whole = _layer(experts, seed=0, **kind).experts
    layer = _layer(experts, seed=rank, **kind)  # rank 0's is handed out
    parallelize_module(layer, mesh, {"experts": ExpertParallel(waits=waits)})
    given = [_tokens(r, experts, all_to, even) for r in range(ranks)]
    low = kind.get("dtype") or torch.float32
    for tokens in given:
        tokens |= {name: tokens[name].to(low) for name in ("x", "up")}
    mine = given[rank]
    x, gates = mine["x"].clone().requires_grad_(), mine["gates"].clone().requires_grad_()
    out = layer.experts(x, mine["ids"], gates)
    out.backward(mine["up"])
    leaves = {name: p for name, p in layer.experts.named_parameters() if p.requires_grad}
    ours = [out.detach(), x.grad, gates.grad, *(_whole(p.grad) for p in leaves.values())]

    def plain(dtype: torch.dtype) -> list[torch.Tensor]:
        dense = {name: getattr(whole, name).detach().to(dtype) for name in ("gate_up", "down")}
        own = {name: p.detach().to(dtype).requires_grad_() for name, p in whole.named_parameters() if p.requires_grad}
        dense |= {name: p for name, p in own.items() if name in dense}
        pairs = {
            f"{name}_proj": LoRAPair(own[f"{name}_a"], own[f"{name}_b"])
            for name in ("gate_up", "down")
            if f"{name}_a" in own
        }
        inputs = [(g["x"].to(dtype).requires_grad_(), g["gates"].to(dtype).requires_grad_()) for g in given]
        found = []
        for (tokens, weights), g in zip(inputs, given, strict=True):
            # The reference has no skipped slots: an expert of zeros stands for them.
            extra = {name: torch.cat([w, torch.zeros_like(w[:1])]) for name, w in dense.items()}
            longer = {
                name: LoRAPair(*(torch.cat([f, torch.zeros_like(f[:1])]) for f in (p.a, p.b)), p.scaling)
                for name, p in pairs.items()
            }
            found.append(block_reference(tokens, extra["gate_up"], extra["down"], g["ids"], weights, longer))
        total = sum((o * g["up"].to(dtype)).sum() for o, g in zip(found, given, strict=True))
        grads = torch.autograd.grad(total, [*inputs[rank], *own.values()], allow_unused=True)
        return [found[rank].detach(), *grads[:2], *(g / ranks for g in grads[2:])]

    for name, mine_, truth, base in zip(
        ("out", "x", "gates", *leaves), ours, plain(torch.float64), plain(low), strict=True
    ):
        factor = check.FORWARD_FACTOR if name == "out" else check.GRADIENT_FACTOR
        check.compare(name, mine_, truth, base.to(mine_.dtype), factor=factor).require()


def expert_parallel(folder: Path) -> None:
    """Dense experts that do not divide evenly, trained themselves."""
    _expert_parallel(5, lora=False)


def expert_parallel_four_bits(folder: Path) -> None:
    """4-bit experts with LoRA, more ranks than some of them need; all tokens to one expert: the others still have gradients."""
    _expert_parallel(4, nf4=True, double_quant=True)
    _expert_parallel(3, all_to=0)


def expert_parallel_bfloat16(folder: Path) -> None:
    """What users train: dense and 4-bit experts and their pairs in bfloat16, with the wait and without it."""
    for nf4 in (False, True):
        for waits in (True, False):
            _expert_parallel(5, nf4=nf4, waits=waits, dtype=torch.bfloat16)


def expert_parallel_without_waiting(folder: Path) -> None:
    """Ranks that share memory, with as many tokens on each or not, and every token to every rank where they don't; experts that
    do not divide evenly, some ranks without any, all tokens to one expert."""
    shared = expert_parallel_module.windows_of
    assert shared(dist.group.WORLD, DEVICE) is not None  # type: ignore[arg-type]
    for windows_of, even in ((shared, False), (lambda *_: None, True)):
        expert_parallel_module.windows_of = windows_of  # type: ignore[assignment]
        for experts in (5, 2):
            _expert_parallel(experts, lora=False, waits=False, even=even)
        _expert_parallel(4, nf4=True, all_to=1, waits=False, even=even)
    if DEVICE.type == "cpu":  # a GPU would say it too, and nothing after it
        try:
            _expert_parallel(4, waits=False)
        except RuntimeError as error:
            assert "all ranks must bring as many tokens" in str(error)
        else:
            raise AssertionError("different numbers of tokens went through")
    expert_parallel_module.windows_of = shared


def windows_grow(folder: Path) -> None:
    """More tokens, wider ones, then few again, on one rank none; gradients of the experts alone, call after call, which leave one
    window unused. A host that waits for another one's call in vain says so."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    found = windows.windows_of(group, DEVICE)
    assert found is not None and found is windows.windows_of(group, DEVICE)
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    for most, hidden in ((3, 8), (40, 8), (7, 130), (2, 8)):
        before = found.size
        torch.manual_seed(rank)
        count = most - (most * (ranks - 1 - rank)) // (ranks - 1)  # none on the first
        x, gates = torch.randn(count, hidden, device=DEVICE), torch.rand(count, 3, device=DEVICE)
        ids = torch.rand(count, 2 * ranks + 1, device=DEVICE).topk(3).indices
        sizes = {"num_experts": 2 * ranks + 1, "share": 3}
        own = max(min(3, 2 * ranks + 1 - 3 * rank), 0)
        for _ in range(3):
            both = (
                exchange(lambda rows, _, w: factor * rows * w, x, ids, gates, **sizes, group=group),
                windows.exchange_shared(
                    lambda rows, local, w, own=own: factor * rows * (w * (local < own)).sum(1, keepdim=True), x, ids, gates, **sizes,
                    windows=found,
                ),
            )  # fmt: skip
            grads = [torch.autograd.grad(out.square().sum(), factor)[0] for out in both]
            torch.testing.assert_close(both[1], both[0])
            torch.testing.assert_close(grads[1], grads[0])
        assert found.size >= before
    assert found.size >= ranks * 7 * 130 * 4
    dist.barrier()
    if rank == ranks - 1:
        patience, windows.TIMEOUT_S = windows.TIMEOUT_S, 0.1
        try:
            found.max_tokens_over_ranks(5)
        except RuntimeError as error:
            assert "rank 0 must call the layer as often" in str(error)
        else:
            raise AssertionError("nobody missed rank 0")
        windows.TIMEOUT_S = patience
    dist.barrier()
    assert rank == ranks - 1 or found.max_tokens_over_ranks(3) == 5  # those that come late hear of it


def in_a_graph(folder: Path) -> None:
    """A GPU only: forward and backward of a layer that does not wait, captured once, replayed on other tokens; with ranks that
    share memory and bring different numbers of them, and with ranks that don't."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer = _layer(2 * ranks, seed=0, nf4=True)
    parallelize_module(layer, init_device_mesh(DEVICE.type, (ranks,)), {"experts": ExpertParallel(waits=False)})
    leaves = [p for p in layer.experts.parameters() if p.requires_grad]
    shared = expert_parallel_module.windows_of
    for windows_of, count in ((shared, 5 - rank % 2), (lambda *_: None, 5)):
        expert_parallel_module.windows_of = windows_of  # type: ignore[assignment]
        given = [
            {name: value[:count] for name, value in _tokens(rank + step, 2 * ranks, None, True).items()}
            for step in (0, 7)
        ]
        x, gates, ids, up = (given[0][name].clone() for name in ("x", "gates", "ids", "up"))

        def step(x: Any = x, gates: Any = gates, ids: Any = ids, up: Any = up) -> list[torch.Tensor]:
            own, weights = x.detach().requires_grad_(), gates.detach().requires_grad_()
            out = layer.experts(own, ids, weights)
            return [out.detach(), *(_local(g) for g in torch.autograd.grad(out, [own, weights, *leaves], up))]

        replay = Captured(step)
        for tokens in reversed(given):
            for tensor, name in ((x, "x"), (gates, "gates"), (ids, "ids"), (up, "up")):
                tensor.copy_(tokens[name])
            replay()
            torch.cuda.synchronize()
            for captured, eager in zip(replay.out, step(), strict=True):
                assert torch.equal(captured, eager)
        del replay
    expert_parallel_module.windows_of = shared


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def two_dimensions(folder: Path) -> None:
    """Four ranks: experts over one dimension of the mesh, the rest of the layer and the experts' copies over the other."""
    rank = dist.get_rank()
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "expert"))
    xs = torch.stack([_tokens(0, 4, None)["x"] * (1 + r) for r in range(4)])
    reference = _layer(4, seed=0, nf4=True)
    (sum(reference(x).square().sum() for x in xs) / 4).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    for wrap in ("fsdp", "equal", "ddp"):
        torch.manual_seed(rank)
        layer = _layer(4, seed=rank, nf4=True)
        parallelize_module(layer, mesh["expert"], {"experts": ExpertParallel(waits=wrap == "fsdp")})
        if wrap == "fsdp":
            fully_shard(layer.experts, mesh=mesh["data"])
        else:
            keep_equal((p for p in layer.experts.parameters()), mesh["data"].get_group())
        whole: nn.Module = layer
        if wrap == "ddp":  # over all four ranks, of all but the experts
            names = [f"experts.{name}" for name, _ in layer.experts.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, names)
            whole = DistributedDataParallel(layer)
        else:
            keep_equal(layer.router.parameters())
        whole(xs[rank]).square().sum().backward()
        for name, p in layer.named_parameters():
            if p.requires_grad:
                truth = expected[name]
                grad = _whole(p.grad)
                check.compare(f"{wrap} {name}", grad, truth.double(), truth, factor=check.GRADIENT_FACTOR).require()


def sharded_four_bits(folder: Path) -> None:
    """FSDP2 on 4-bit experts: outputs, gradients, bytes, mixed precision; saved, and loaded without it and with it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    torch.manual_seed(1)
    xs = torch.randn(ranks, 5, HIDDEN).to(DEVICE)
    # 16 x 32 elements are 8 blocks: experts share a scale of scales with double quantization.
    for double_quant in (False, True):
        kind = {"nf4": True, "double_quant": double_quant}
        reference, layer = _layer(5, seed=0, **kind), _layer(5, seed=rank, **kind)
        fully_shard(layer, mesh=mesh)
        layer(xs[rank]).square().sum().backward()
        outs = [reference(x) for x in xs]
        (sum(out.square().sum() for out in outs) / ranks).backward()
        expected = dict(reference.named_parameters())
        for name, p in layer.named_parameters():
            assert p.requires_grad == p.is_floating_point() == name.endswith(("_a", "_b", "router.weight")), name
            if p.requires_grad:
                grad = expected[name].grad
                check.compare(name, _whole(p.grad), grad.double(), grad, factor=check.GRADIENT_FACTOR).require()
            else:
                assert p.dtype == torch.uint8 and p.to_local().shape[0] in (
                    -(-5 // ranks),
                    5 - (ranks - 1) * -(-5 // ranks),
                )
        checkpoint = str(folder / f"four_bits_{ranks}_{double_quant}")
        save(get_model_state_dict(layer), checkpoint_id=checkpoint)
        loaded = _layer(5, seed=7, **kind)
        by_expert(loaded)
        state = get_model_state_dict(loaded)
        load(state, checkpoint_id=checkpoint)
        set_model_state_dict(loaded, state)
        assert torch.equal(loaded(xs[rank]), outs[rank])


def sharded_loads_elsewhere(folder: Path) -> None:
    """What two ranks saved, three load."""
    ranks = dist.get_world_size()
    layer = _layer(5, seed=3, nf4=True)
    fully_shard(layer, mesh=init_device_mesh(DEVICE.type, (ranks,)))
    state = get_model_state_dict(layer)
    load(state, checkpoint_id=str(folder / "four_bits_2_False"))
    set_model_state_dict(layer, state)
    expected = _layer(5, seed=0, nf4=True)
    by_expert(expected)
    for name, p in expected.named_parameters():
        assert torch.equal(_whole(layer.get_parameter(name)), p), name


class _Sparse(nn.Module):
    def __init__(self, compact: bool, features: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.sparse = SparseLinear(16, features, chunk_size=16, compact_gradient=compact)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sparse(self.first(x))


def active_rows(folder: Path) -> None:
    """Under DDP the sparse layer's active rows travel, and nothing else of it; the average is that of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for compact, features in ((False, 64), (True, 64), (False, 56)):
        torch.manual_seed(rank)
        model = _Sparse(compact, features).to(DEVICE)
        reduction = reduce_active_rows(model)
        wrapped = DistributedDataParallel(model)
        reference = copy.deepcopy(model)
        ids = torch.tensor([3, 0], device=DEVICE)
        for layer in (model.sparse, reference.sparse):
            layer.active_chunks = ids
        torch.manual_seed(5)
        xs = torch.randn(ranks, 4, 16).to(DEVICE)
        for p in reference.parameters():
            for hook in list(getattr(p, "_post_accumulate_grad_hooks", None) or ()):
                p._post_accumulate_grad_hooks.pop(hook)
        for step in (1, 2):  # the second adds to the first, as in gradient accumulation
            wrapped(xs[rank] * step).square().sum().backward()
            (sum(reference(x * step).square().sum() for x in xs) / ranks).backward()
        for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            ours, truth = (grad.to_dense() if grad.is_sparse else grad for grad in (p.grad, q.grad))
            check.compare(name, ours, truth.double(), truth, factor=check.GRADIENT_FACTOR).require()
        if compact:
            continue  # the sparse gradient of the second pass holds that of the first
        active, all_of = 2 * 16, features
        dense = (model.sparse.weight.nbytes + model.sparse.bias.nbytes) * 2
        assert reduction.bytes == dense * active // all_of, (reduction.bytes, dense)


def kept_equal(folder: Path) -> None:
    """What nobody manages is made equal, and stays so bit by bit."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(DEVICE)
    keep_equal(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(3, 8, device=DEVICE)).square().sum().backward()
        optimizer.step()
    for p in model.parameters():
        least, most = p.detach().clone(), p.detach().clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert torch.equal(least, most)


def _tiny_qwen() -> Any:
    import tiny_models

    return tiny_models.tiny_model("qwen3_moe", num_experts=4, num_hidden_layers=1)


def _with_lora(model: Any, seed: int) -> Any:
    import peft

    from kernelbook.interop import transformers as interop

    torch.manual_seed(seed)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=interop.expert_parameters(model), init_lora_weights=False
        ),
    )


def _adapter_grads(model: Any) -> dict[str, torch.Tensor]:
    return {name: _whole(p.grad).clone() for name, p in model.named_parameters() if p.requires_grad}


def transformers_experts(folder: Path) -> None:
    """Qwen3-MoE as its users configure it, with PEFT's pairs added on each rank: one adapter, whole when it is saved."""
    import peft
    import transformers
    from transformers.distributed import DistributedConfig

    from kernelbook.interop import expert_parallel as expert_parallel_interop
    from kernelbook.interop import transformers as interop

    rank, ranks = dist.get_rank(), dist.get_world_size()
    one = interop.use_kernels(_with_lora(_tiny_qwen(), 0))
    if rank == 0:
        _tiny_qwen().save_pretrained(folder / "qwen")
    dist.barrier()
    torch.manual_seed(3)
    batches = torch.randint(1, 60, (ranks, 2, 5), device=DEVICE)

    def losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    torch.stack([losses(one, ids) for ids in batches]).mean().backward()
    expected = _adapter_grads(one)
    models = {}
    try:
        expert_parallel_interop.register()
    except ImportError as error:  # transformers before 5.23, which the lock has: then it is the style alone
        assert "must have named implementations of expert parallelism, as 5.23 has" in str(error)
        assert not hasattr(transformers.distributed.expert_parallel, "EPImplementationInterface")
    else:
        settings = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="kernelbook")
        models["plan"] = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen", distributed_config=settings)
    models["style"] = ours = _tiny_qwen()
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    parallelize_module(ours, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
    for name, model in models.items():
        model = interop.use_kernels(_with_lora(model, rank))  # each rank draws another adapter
        keep_equal(p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor))
        losses(model, batches[rank]).backward()
        for key, grad in _adapter_grads(model).items():
            truth = expected[key]
            check.compare(f"{name} {key}", grad, truth.double(), truth, factor=check.GRADIENT_FACTOR).require()
        save_adapter(model, folder / f"adapter_{name}")
        loaded = peft.PeftModel.from_pretrained(_tiny_qwen(), folder / f"adapter_{name}")
        state = peft.get_peft_model_state_dict(loaded)
        assert len(state) == len(expected)
        for key, value in peft.get_peft_model_state_dict(one).items():
            assert torch.equal(state[key], value), key


def adapters_are_safe(folder: Path) -> None:
    """Adapters that fully_shard cuts are saved whole; those that went apart are not saved at all."""
    import peft

    rank = dist.get_rank()
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    reference, model = _with_lora(_tiny_qwen(), 0), _with_lora(_tiny_qwen(), rank)
    fully_shard(model, mesh=mesh)
    save_adapter(model, folder / "adapter_sharded")
    loaded = peft.PeftModel.from_pretrained(_tiny_qwen(), folder / "adapter_sharded")
    state = peft.get_peft_model_state_dict(loaded)
    for key, value in peft.get_peft_model_state_dict(reference).items():
        assert torch.equal(state[key], value), key
    apart = _with_lora(_tiny_qwen(), rank)
    try:
        save_adapter(apart, folder / "adapter_apart")
    except RuntimeError as error:
        assert "keep_equal" in str(error)
    else:
        raise AssertionError("adapters that differ were saved")
    assert not (folder / "adapter_apart").exists()


def bytes_stay_bytes(folder: Path) -> None:
    """Pairs of bytes that would be NaN as bfloat16 come through sharding, gathering and a checkpoint as they are."""
    ranks = dist.get_world_size()
    layer = _layer(4, seed=0, nf4=True)
    by_expert(layer)
    packed = layer.experts.parametrizations.gate_up.original
    patterns = torch.arange(packed.numel(), device=DEVICE).view_as(packed)
    packed.data.copy_(torch.where(patterns % 2 == 0, patterns // 2 % 256, 0x7F + patterns // 512 % 2 * 0x80))
    before = packed.detach().clone()
    assert before.view(torch.bfloat16).isnan().any()
    layer = layer.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=init_device_mesh(DEVICE.type, (ranks,)), mp_policy=policy)
    layer(torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=DEVICE)).sum().backward()
    name = next(name for name, p in layer.named_parameters() if name.endswith("gate_up.original"))
    assert torch.equal(_whole(layer.get_parameter(name)), before)
    save(get_model_state_dict(layer), checkpoint_id=str(folder / f"patterns_{ranks}"))
    state = get_model_state_dict(layer)
    with torch.no_grad():
        state[name].zero_()
    load(state, checkpoint_id=str(folder / f"patterns_{ranks}"))
    assert torch.equal(_whole(state[name]), before)


SMALL = dataclasses.replace(
    CONFIGS["tiny"], corpus=__file__, vocab_size=260, width=32, depth=1, context=5, batch_size=12, steps=4, dense_steps=1,
    log_every=2, inactive="decay", eval_every=0, eval_batches=1, checkpoint_every=2, lr_warmup=1, refresh_every=2, attention="torch",
)  # fmt: skip


def _as_one(trainer: Trainer) -> None:
    """The losses of the steps that this rank has in its log, and the last validation, are those of one process."""
    one = Trainer(SMALL, progress=False)
    one.run()
    count = len(trainer.losses())
    for name, ours, theirs in (
        ("losses", trainer.losses(), one.losses()[-count:]),
        ("validation", trainer.validation_losses()[-1:], one.validation_losses()[-1:]),
    ):
        truth = torch.tensor(theirs)
        check.compare(name, torch.tensor(ours), truth.double(), truth, factor=check.GRADIENT_FACTOR).require()
    assert count >= 2 and torch.equal(one.scheduler.ids, trainer.scheduler.ids)


def trains_ddp(folder: Path) -> None:
    """The losses of one process; the same chunks everywhere."""
    out = folder / f"ddp{dist.get_world_size()}"
    trainer = ParallelTrainer(SMALL, "ddp", out=out, progress=False)
    trainer.run()
    _as_one(trainer)
    if trainer.rank == 0:  # the run of several goes on as one of one
        assert Trainer(SMALL, out=out, resume=True, progress=False).step == trainer.step


def trains_fsdp(folder: Path) -> None:
    """Half a run; the other half is another check's."""
    trainer = ParallelTrainer(SMALL, "fsdp", out=folder / "fsdp", progress=False)
    trainer.run(2)


def resumes_fsdp(folder: Path) -> None:
    """Goes on from the parts that another number of ranks wrote, and ends where one process does."""
    trainer = ParallelTrainer(SMALL, "fsdp", out=folder / "fsdp", progress=False, resume=True)
    assert trainer.step == 2
    trainer.run()
    _as_one(trainer)


def measures(folder: Path) -> None:
    """Every section of the bench yields rows that a results file takes, on one rank's count too."""
    several_gpus.CHECKED = 4
    several_gpus._measure = lambda call, *_: (call(), timing.Timing(1.0, 1.0, 1.0, 1))[1]  # type: ignore[assignment]
    wall = timing.wall
    timing.wall = lambda call, samples, **how: wall(call, samples=1, **how)  # type: ignore[assignment]
    several_gpus.moe_block.MODELS["small"] = (4, 32, 32, 2)
    small = several_gpus.Sizes(
        models=("small",), tokens=((4,),),
        train=("tiny",), settings=(("context", 8), ("refresh_every", 5)), sequences=(1, 2), steps=1, samples=2,
    )  # fmt: skip
    rows = {name: list(section()) for name, section in several_gpus.sections(small).items()}
    assert rows["layers"] and rows["train"]
    assert bool(rows["peers"]) == (DEVICE.type == "cuda")
    table = pd.DataFrame([row for found in rows.values() for row in found])
    assert not table.duplicated(list(several_gpus.KEY)).any()
    assert {*table.columns} <= {*record.COLUMNS}


def dies(folder: Path) -> None:
    """The last rank is killed while it writes a checkpoint: everything ends, and the checkpoint before is whole."""
    trainer = ParallelTrainer(SMALL, "ddp", out=folder / "dies", progress=False)
    trainer.run(2)
    if trainer.rank == trainer.ranks - 1:
        trainer.save = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    trainer.run()


CHECKS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        transformers_experts, adapters_are_safe, bytes_stay_bytes, expert_parallel,
        expert_parallel_four_bits, expert_parallel_bfloat16, expert_parallel_without_waiting, windows_grow, in_a_graph, two_dimensions, sharded_four_bits, sharded_loads_elsewhere,
        active_rows, kept_equal, trains_ddp, trains_fsdp, resumes_fsdp, measures, dies,
    )
}  # fmt: skip


def main(folder: str, *checks: str) -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("SECONDS_FOR_CHECKS", "500")), exit=True)
    torch.set_num_threads(1)
    remembered_types.remember()
    gc.freeze()  # see conftest.py
    gc.set_threshold(100_000, 20, 100)
    parallel.start()
    for name in checks:
        CHECKS[name](Path(folder))
        dist.barrier()
        sys.stdout.write(f"ok {name} {dist.get_rank()}\n")  # at once: ranks share the pipe
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(*sys.argv[1:])
    else:
        how = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0, "start_method": "fork"}
        elastic_launch(LaunchConfig(1, 1, int(sys.argv[1]), **how), main)(*sys.argv[2:])
