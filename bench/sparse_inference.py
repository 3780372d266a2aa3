"""A GPT that generates with the neurons it needs: ``python -m bench sparse_inference``.

A GPT with ReLU is trained by :class:`kernelbook.train.Trainer`, as densely as any other, and most of its hidden values turn
out zero. For each layer a predictor of low rank learns from the block's input which ones will not be (Liu et al., "Deja Vu:
Contextual sparsity for efficient LLMs at inference time", 2023, section 4). :class:`Decoder` then generates with a cache,
with dense blocks or with :class:`kernelbook.nn.SparseFFN`, whose router hands over a list of fixed length, so that one CUDA
graph does for every token.

``sparse_inference.csv`` has the wall time of a step of decoding. ``share`` is how many neurons of a layer are computed, on
average over tokens.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F

from bench import Bench, forget, row, write_ceilings
from kernelbook import check, runtime  # before Triton, which it sets up
from kernelbook.attention import flash_attention
from kernelbook.lab import record, timing
from kernelbook.launch import launcher
from kernelbook.layer_norm import layer_norm
from kernelbook.nn import GPT, SparseFFN
from kernelbook.train.capture import Captured
from kernelbook.train.loop import CONFIGS, TrainConfig, Trainer
from kernelbook.train.text import TextData

# isort: split
import triton
import triton.language as tl

STEM = "sparse_inference"
WIDTHS = {1024: "medium", 2048: "large", 4096: "huge"}
SHARES = (0.05, 0.1, 0.25)
CONTEXT = 512
ABOVE_BLOCK = 8192  # columns that the one program of the kernel for chosen columns looks at in a step


# --- predictors -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M", "count"])
def _columns_above_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, stride_sm,  # (M, N), columns contiguous
    threshold_ptr,  # one number
    ids_ptr,  # (count,) int64
    M, N, count,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The columns in which any row exceeds the threshold, as many as there is room for; N in the places that are left."""
    threshold = tl.load(threshold_ptr).to(tl.float32)
    within = tl.arange(0, BLOCK_N)
    found = 0
    for start in range(0, N, BLOCK_N):
        offs = start + within
        best = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        for m in range(M):
            scores = tl.load(scores_ptr + m * stride_sm + offs, mask=offs < N, other=float("-inf"))
            best = tl.maximum(best, scores.to(tl.float32))
        wanted = (best > threshold).to(tl.int32)
        place = found + tl.cumsum(wanted, axis=0) - 1
        tl.store(ids_ptr + place, offs.to(tl.int64), mask=(wanted > 0) & (place < count))
        found += tl.sum(wanted, axis=0)
    for start in range(0, count, BLOCK_N):
        offs = start + within
        tl.store(ids_ptr + offs, tl.full((BLOCK_N,), N, tl.int64), mask=(offs >= found) & (offs < count))


class Predictor(torch.nn.Module):
    """Scores of neurons (..., N) from a block's input (..., d): ``x A^T B^T + b``, of rank r.

    As a router of :class:`kernelbook.nn.SparseFFN` it returns the neurons whose score is above ``threshold`` for any of the
    tokens, in their order. On a GPU the list has always ``count`` places: an id that is no neuron's fills those that are left,
    and what does not fit is left out. Sorting the scores would give the best ones, and take longer than the block.
    """

    threshold: torch.Tensor

    def __init__(self, features: int, neurons: int, rank: int, count: int = 0) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": runtime.DEVICE, "dtype": torch.float32}
        self.a = torch.nn.Parameter(torch.randn(rank, features, **where) / math.sqrt(features))
        self.b = torch.nn.Parameter(torch.zeros(neurons, rank, **where))
        self.bias = torch.nn.Parameter(torch.zeros(neurons, **where))
        self.register_buffer("threshold", torch.zeros((), **where))
        self.count = count

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """(..., d) -> (..., N)."""
        return F.linear(F.linear(x, self.a), self.b, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., d) -> (count,) ids, or fewer on the CPU."""
        scores = self.scores(x).flatten(0, -2)
        (rows, neurons), ids = scores.shape, x.new_empty(self.count, dtype=torch.int64)
        block = min(triton.next_power_of_2(neurons), ABOVE_BLOCK)
        launch = launcher(_columns_above_kernel, BLOCK_N=block, num_warps=max(4, block // 512))
        launch((1,), scores, scores.stride(0), self.threshold, ids, rows, neurons, self.count)
        return ids if ids.is_cuda else ids[ids < neurons]  # on the CPU an id that is no neuron's is an error


def _mlp_inputs(model: GPT, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each block's MLP reads, (T, d), and its hidden values before the activation, (T, N)."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        block.up.register_forward_hook(  # type: ignore[union-attr]
            lambda _, inputs, out: found.append((inputs[0].flatten(0, -2), out.flatten(0, -2)))
        )
        for block in model.blocks
    ]
    try:
        with torch.no_grad(), _autocast():
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(runtime.DEVICE.type, torch.bfloat16, enabled=runtime.DEVICE.type == "cuda")


def train_predictors(
    model: GPT, data: TextData, *, rank: int, steps: int, lr: float = 3e-3, first: int = 0
) -> list[Predictor]:
    """One for each layer, by binary cross entropy on which hidden values are positive; ``first``: the first batch."""
    width, hidden = model.config.width, model.config.mlp_ratio * model.config.width
    predictors = [Predictor(width, hidden, rank) for _ in model.blocks]
    parameters = [parameter for predictor in predictors for parameter in predictor.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=runtime.DEVICE.type == "cuda")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        tokens, _ = data.batch(first + step)
        with _autocast():
            losses = [
                F.binary_cross_entropy_with_logits(predictor.scores(x).float(), (z > 0).float())
                for predictor, (x, z) in zip(predictors, _mlp_inputs(model, tokens), strict=True)
            ]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return predictors


@torch.no_grad()
def calibrated(
    model: GPT, predictors: Sequence[Predictor], data: TextData, share: float, *, batch: int = 1
) -> list[Predictor]:
    """The predictors with the threshold that ``share`` of a layer's neurons exceed for ``batch`` tokens, on average.

    Their lists have room for half as many more.
    """
    tokens, _ = data.batch(0)
    found = []
    for predictor, (x, _) in zip(predictors, _mlp_inputs(model, tokens), strict=True):
        rows = x[torch.randperm(x.shape[0], device=x.device)[: 256 * batch]].float()
        scores = predictor.scores(rows[: len(rows) // batch * batch])
        best = scores.view(-1, batch, scores.shape[-1]).amax(1)
        new = copy.deepcopy(predictor)
        new.threshold.copy_(best.flatten().kthvalue(max(1, round((1 - share) * best.numel()))).values)
        new.count = min(best.shape[-1], math.ceil(1.5 * share * best.shape[-1]))
        found.append(new)
    return found


@contextlib.contextmanager
def _only(model: GPT, mask: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Hidden values outside of ``mask(layer, values)`` are zero within the context."""

    def masked(layer: int) -> Any:
        return lambda _, inputs, out: out * mask(layer, out)

    hooks = [block.up.register_forward_hook(masked(layer)) for layer, block in enumerate(model.blocks)]  # type: ignore
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- decoding -------------------------------------------------------------------------------------------------------


class Decoder:
    """A trained GPT that generates token by token, ``batch`` sequences at a time, all in ``dtype``.

    ``predictors``, which are :func:`calibrated`: with :class:`SparseFFN` in the place of each MLP; without them dense. Nothing
    in a step waits for the device, and its tensors stay where they are: it can be captured in a CUDA graph.
    """

    def __init__(
        self, model: GPT, batch: int, context: int, *, predictors: Sequence[Predictor] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        config = model.config
        self.model, self.dtype, self.context = model, dtype, context
        size = config.width // config.heads
        self.weights = {name: value.detach().to(dtype) for name, value in model.state_dict().items()}
        shape = (config.depth, batch, config.heads, context, size)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=runtime.DEVICE) for _ in range(2))
        self.length = torch.zeros((), dtype=torch.int64, device=runtime.DEVICE)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=runtime.DEVICE)
        self.blocks: list[SparseFFN] = []
        if predictors is not None:
            hidden = config.mlp_ratio * config.width
            for layer, predictor in enumerate(predictors):
                block = SparseFFN(
                    config.width, hidden, activation=config.activation, device=runtime.DEVICE, dtype=dtype
                ).requires_grad_(False)
                block.w_up.copy_(self.weights[f"blocks.{layer}.up.weight"])
                block.w_down.copy_(self.weights[f"blocks.{layer}.down.weight"].t())
                block.router = copy.deepcopy(predictor).to(dtype).requires_grad_(False)
                self.blocks.append(block)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Reads :attr:`tokens` (B, 1) at position :attr:`length`; -> logits (B, 1, vocab). Writes the next tokens there."""
        config, weights = self.model.config, self.weights
        batch = self.tokens.shape[0]
        heads = (batch, 1, config.heads, config.width // config.heads)
        place = self.length.view(1)
        lengths = (self.length + 1).expand(batch)
        x = F.embedding(self.tokens, weights["tokens.weight"]) + weights["positions.weight"].index_select(0, place)
        for layer in range(config.depth):
            name = f"blocks.{layer}"
            normed = self._norm(x, f"{name}.norm_attention")
            q, k, v = (self._linear(normed, f"{name}.{part}").view(heads).transpose(1, 2) for part in "qkv")
            self.keys[layer].index_copy_(2, place, k)
            self.values[layer].index_copy_(2, place, v)
            mixed = flash_attention(q, self.keys[layer], self.values[layer], causal=True, lengths=lengths)
            x = x + self._linear(mixed.transpose(1, 2).reshape(batch, 1, -1), f"{name}.attention_out")
            normed = self._norm(x, f"{name}.norm_mlp")
            if self.blocks:
                x = x + self.blocks[layer](normed)
            else:
                hidden = F.relu(self._linear(normed, f"{name}.up"))
                x = x + self._linear(hidden, f"{name}.down")
        logits = self._linear(self._norm(x, "norm"), "head")
        self.length += 1
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits


def _step_ms(decoder: Decoder, start: int, count: int, samples: int, *, graph: bool) -> timing.Timing:
    """The wall time of a step, ``count`` in a row from position ``start``."""
    call: Callable[[], Any] = decoder.step
    decoder.length.fill_(start)
    for _ in range(3):
        call()
    if graph:
        call = Captured(call)
    return timing.wall(call, calls=count, samples=samples, before=lambda: decoder.length.fill_(start))[0]


def error_ratio(model: GPT, predictors: Sequence[Predictor], data: TextData) -> float:
    """A few steps of the sparse decoder against dense products with a mask, in float64 and in float32.

    Raises ``CheckError`` where it is not correct.
    """
    tokens, _ = next(iter(data.validation_batches(1)))
    given = tokens[:1, :6]
    decoder = Decoder(model, 1, 16, predictors=predictors, dtype=torch.float32)
    chosen: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    for layer, block in enumerate(decoder.blocks):
        assert isinstance(block.router, Predictor)
        block.router.register_forward_hook(lambda _, inputs, ids, kept=chosen[layer]: kept.append(ids))
    out = []
    for i in range(given.shape[1]):
        decoder.tokens.copy_(given[:, i : i + 1])
        out.append(decoder.step())

    def plain(dtype: torch.dtype) -> torch.Tensor:
        reference = copy.deepcopy(model).to(dtype)
        for block in reference.blocks:
            block.attention = "torch"  # type: ignore[assignment]

        def mask(layer: int, values: torch.Tensor) -> torch.Tensor:
            kept = torch.zeros_like(values)
            for position, ids in enumerate(chosen[layer]):
                kept[0, position, ids[ids < kept.shape[-1]]] = 1
            return kept

        with torch.no_grad(), _only(reference, mask):
            return reference(given)

    with timing.allow_tf32(False):
        verdict = check.compare("decoder", torch.cat(out, 1), plain(torch.float64), plain(torch.float32))
    return verdict.require().ratio


# --- what is measured -------------------------------------------------------------------------------------------------


def measure(
    config: TrainConfig, folder: Path, about: dict[str, str], *, rank: int, predictor_steps: int,
    shares: Sequence[float] = SHARES, batches: Sequence[int] = (1, 8), samples: int = 5, count: int = 64,
) -> None:  # fmt: skip
    """Trains one model and its predictors, and writes its rows."""
    trainer = Trainer(config, progress=False)
    trainer.run()
    model, data = trainer.model, trainer.data
    assert isinstance(data, TextData)
    del trainer
    model.requires_grad_(False).eval()
    for linear in model.sparse_layers().values():
        linear.active_chunks = None
    predictors = train_predictors(model, data, rank=rank, steps=predictor_steps, first=config.steps)
    ratio = error_ratio(model, calibrated(model, predictors, data, shares[0]), data)
    real = runtime.DEVICE.type == "cuda"
    context, hidden = min(config.context, CONTEXT), model.config.mlp_ratio * config.width
    others = 4 * config.width**2 * config.depth + data.vocab_size * config.width
    for batch in batches:
        for share in (1.0, *shares):
            chosen = None if share == 1.0 else calibrated(model, predictors, data, share, batch=batch)
            dtype = torch.bfloat16 if real else torch.float32
            decoder = Decoder(model, batch, context, predictors=chosen, dtype=dtype)
            mlp = 2 * share * hidden * config.width + (rank * (config.width + hidden) if share < 1 else 0)
            gb = 2 * (others + config.depth * mlp) / 1e9
            for graph in (False, True) if real else (False,):
                found = _step_ms(decoder, context // 2, count, samples, graph=graph)
                shape = f"width={config.width} depth={config.depth} rank={rank} B={batch} graph={int(graph)}"
                written = row(
                    STEM, "forward", "dense" if share == 1.0 else "kernelbook", dtype, shape, ("share", share), found,
                    gbytes=gb, gflop=batch * gb, err_ratio=ratio if share < 1 else math.nan,
                )  # fmt: skip
                table = pd.DataFrame([{**about, **written}], columns=list(record.COLUMNS))
                record.write_results(folder / f"{STEM}.csv", table)
                print(f"{shape} share {share:g}: {found.ms:.4f} ms", flush=True)
            del decoder


def run(folder: Path, select: str | None = None) -> int:
    """Trains and measures each width, or those that are named with commas between them."""
    about = {"run": record.new_run(), **record.environment(STEM)}
    write_ceilings(folder, about["run"], quick=True)
    for width in map(int, select.split(",")) if select else WIDTHS:
        config = dataclasses.replace(
            CONFIGS[WIDTHS[width]], activation="relu", mode="dense", scheduler="all", steps=300, batch_size=8,
            sparse_layers="mlp", cuda_graph=True, eval_every=0, checkpoint_every=0, log_every=100,
        )  # fmt: skip
        measure(config, folder, about, rank=width // 16, predictor_steps=150)
        forget()
    return 0


BENCH = Bench(
    name="sparse_inference",
    baselines={"dense": "torch"},
    run=run,
    options=("select",),
)
