"""Does fine-tuning on the kernels reach the same loss? ``python -m bench same_loss``.

A mixture-of-experts language model (transformers' Qwen3-MoE) of some 120 million parameters is trained from scratch, by us,
on the sources of Python's standard library. Then it is fine-tuned with LoRA (PEFT, rank 8, experts and attention) on another
corpus, the prose that ``help()`` shows, in five ways that share the data, their order and the pairs' beginning:

- ``eager``: transformers' loop over experts, everything in float32: the truth;
- ``grouped_mm``: transformers' own, frozen weights in bfloat16;
- ``kernelbook:dense``: ours on the same bfloat16 weights;
- ``kernelbook:nf4`` and ``kernelbook:nf4_double``: ours on 4-bit experts.

Each way and seed is one line of ``same_loss_curves.jsonl``, written when that run ends. No time is taken.
``--select 'nf4'`` takes only the runs whose way or seed has this.
"""

import contextlib
import itertools
import math
import re
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench import Bench
from kernelbook import runtime
from kernelbook.lab import record
from kernelbook.train.text import Corpus, TextData

STEM = "same_loss_curves"
KEY = ("shape", "way", "seed", "steps")
SEEDS = (0, 1, 2)
WAYS = ("eager", "grouped_mm", "kernelbook:dense", "kernelbook:nf4", "kernelbook:nf4_double")
SIZES: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1536, "vocab": 4096, "context": 256, "batch": 8,
    "rank": 8,
}  # fmt: skip
TINY: dict[str, Any] = SIZES | {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 4, "moe_intermediate_size": 32, "vocab": 300, "context": 16, "batch": 2, "rank": 2,
}  # fmt: skip


# --- data and model -------------------------------------------------------------------------------------------------


def corpora(sizes: dict[str, Any], *, seed: int = 0, small: bool = False) -> tuple[TextData, TextData]:
    """What the model is trained on, Python's sources, and what it is fine-tuned on, the topics; the same tokens.

    ``small``: a few documents of each.
    """
    documents = Corpus.of("topics" if small else "stdlib").documents
    topics = tuple((name, text) for name, text in documents if name.startswith("topics/"))
    sources = tuple((name, text) for name, text in documents if not name.startswith("topics/"))
    if small:
        sources, topics = topics[:12], topics[12:24]
    how: dict[str, Any] = {"batch_size": sizes["batch"], "context": sizes["context"], "seed": seed}
    first = TextData(Corpus(sources), vocab_size=sizes["vocab"], **how)
    return first, TextData(Corpus(topics), encoding=first.encoding, **how)


def new_model(sizes: dict[str, Any], vocab: int) -> Any:
    """A new model, in float32."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    own = {name: value for name, value in sizes.items() if name not in ("vocab", "context", "batch", "rank")}
    config = Qwen3MoeConfig(
        vocab_size=vocab, max_position_embeddings=sizes["context"], norm_topk_prob=True, tie_word_embeddings=True, **own
    )
    with torch.device(runtime.DEVICE):
        return Qwen3MoeForCausalLM(config)


def _autocast(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(runtime.DEVICE.type, torch.bfloat16, enabled=on)


def _loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def _validation(model: Any, data: TextData, mixed: bool) -> float:
    model.eval()
    with _autocast(mixed):
        losses = [float(_loss(model, *batch)) for batch in data.validation_batches(4)]
    model.train()
    return statistics.fmean(losses)


def _train(
    model: Any, data: TextData, steps: int, lr: float, *, mixed: bool, every: int
) -> tuple[list[float], list[tuple[int, float]]]:
    """-> the loss of each step, and (step, validation loss) pairs; the rate warms up for a twentieth and falls to zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    warm = max(1, steps // 20)
    losses = []
    evaluated = [(0, _validation(model, data, mixed))]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.zero_grad()
        with _autocast(mixed):
            loss = _loss(model, *data.batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % every == 0 or step + 1 == steps:
            evaluated.append((step + 1, _validation(model, data, mixed)))
    return [float(loss) for loss in losses], evaluated


def pretrain(
    sizes: dict[str, Any], steps: int, *, lr: float = 1e-3, small: bool = False
) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of a model trained from scratch, on the kernels in mixed precision, and its last validation loss."""
    from kernelbook.interop import transformers as interop

    torch.manual_seed(0)
    data, _ = corpora(sizes | {"batch": 4 * sizes["batch"]}, small=small)
    model = new_model(sizes, data.vocab_size)
    interop.use_kernels(model)
    real = runtime.DEVICE.type == "cuda"
    _, evaluated = _train(model, data, steps, lr, mixed=real, every=max(steps, 1))
    return {name: value.detach() for name, value in model.state_dict().items()}, evaluated[-1][1]


def finetune(
    way: str, seed: int, sizes: dict[str, Any], steps: int, base: Mapping[str, torch.Tensor], *, lr: float = 3e-4,
    small: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One line of the curves: LoRA fine-tuning of the model with the weights ``base`` in one of :data:`WAYS`."""
    import peft

    from kernelbook.interop import transformers as interop

    if way not in WAYS:
        raise ValueError(f"finetune: way must be one of {', '.join(WAYS)}, got {way!r}")
    _, data = corpora(sizes, seed=seed, small=small)
    model = new_model(sizes, data.vocab_size)
    model.load_state_dict(base)
    parameters = sum(p.numel() for p in model.parameters())
    real = runtime.DEVICE.type == "cuda"
    mixed = real and way != "eager"
    if mixed:
        model.to(torch.bfloat16)
    settings = peft.LoraConfig(
        r=sizes["rank"], lora_alpha=2 * sizes["rank"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=interop.expert_parameters(model),
    )  # fmt: skip
    torch.manual_seed(seed)  # the same pairs whatever the way
    model = peft.get_peft_model(model, settings)
    if "nf4" in way:
        interop.quantize_experts(model, double_quant=way.endswith("double"))
    if way.startswith("kernelbook"):
        interop.use_kernels(model)
    else:
        base_model: Any = model.get_base_model()
        base_model.set_experts_implementation(way)
    losses, evaluated = _train(model, data, steps, lr, mixed=mixed, every=max(1, steps // 10))
    block = max(1, steps // 50)
    return {
        "way": way, "seed": seed, "steps": steps,
        "shape": " ".join(f"{name}={value}" for name, value in sizes.items()),
        "parameters": parameters,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "train_steps": [min(i + block, steps) for i in range(0, steps, block)],
        "train_loss": [round(statistics.fmean(losses[i : i + block]), 5) for i in range(0, steps, block)],
        "validation_steps": [step for step, _ in evaluated],
        "validation_loss": [round(value, 5) for _, value in evaluated],
        "corpus": data.digest, "vocab_size": data.vocab_size,
    }  # fmt: skip


def run(
    folder: Path, select: str | None = None, sizes: dict[str, Any] = SIZES, *, first: int = 300, steps: int = 500
) -> int:
    """Trains from scratch, then fine-tunes in each way with each seed, and writes the lines as they come; 1 where one failed.

    Args:
        select: only runs in whose description, such as ``eager, seed 0``, this regular expression finds something.
        first: steps from scratch.
    """
    small = sizes is not SIZES
    base, loss = pretrain(sizes, first, small=small)
    print(f"from scratch: validation loss {loss:.4f}", flush=True)
    about = {"run": record.new_run(), **record.environment(STEM)}
    failed = False
    for seed, way in itertools.product(SEEDS, WAYS):
        name, began = f"{way}, seed {seed}", time.perf_counter()
        if not re.search(select or "", name):
            continue
        try:
            line = {**about, **finetune(way, seed, sizes, steps, base, small=small)}
        except Exception:  # one run is lost, not all
            failed = True
            print(f"NOT RECORDED: {name}", file=sys.stderr, flush=True)
            traceback.print_exc()
            continue
        record.write_lines(folder / f"{STEM}.jsonl", [line], KEY)
        losses = line["validation_loss"]
        print(f"{name}: {losses[0]:.4f} -> {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
    return int(failed)


BENCH = Bench(
    name="same_loss",
    keys={STEM: KEY},
    baselines={"eager": "transformers", "grouped_mm": "transformers"},
    needs={"transformers": "everything", "peft": "everything"},
    run=run,
    options=("select",),
)
