"""Does fine-tuning on the kernels reach the same loss? ``python -m bench.same_loss --out book/results/<gpu>``.

A mixture-of-experts language model (transformers' Qwen3-MoE) of some 120 million parameters is trained from scratch, by us,
on the sources of Python's standard library. Then it is fine-tuned with LoRA (PEFT, rank 8, experts and attention) on another
corpus, the prose that ``help()`` shows, in five ways that share the data, their order and the pairs' beginning:

- ``eager``: plain PyTorch, everything in float32: the truth. Every expert sees every token, and the gates of those that a
  token did not choose are zero: transformers' loop computes the same, and has to ask the host how many tokens each has. Each
  run checks the one against the other before it begins;
- ``grouped_mm``: transformers' own, frozen weights in bfloat16;
- ``kernelbook:dense``: ours on the same bfloat16 weights;
- ``kernelbook:nf4`` and ``kernelbook:nf4_double``: ours on 4-bit experts.

Each way and seed is one line of ``same_loss_curves.jsonl``, written when that run ends. On a GPU a step is one CUDA graph.
No time is taken: with ``--base`` in a file, ``--ways`` and ``--seeds`` do a part each, side by side, each with its own ``--out``.
"""

import argparse
import contextlib
import math
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import Bench
from kernelbook import check, runtime
from kernelbook.lab import record
from kernelbook.train.loop import replacing
from kernelbook.train.text import Corpus, TextData

__all__ = ["BENCH", "SIZES", "TINY", "WAYS", "finetune", "main", "pretrain"]

STEM = "same_loss_curves"
KEY = ("shape", "way", "seed", "steps")
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
EVERY_EXPERT = "every_expert"  # the name of ours in plain PyTorch on transformers' interface
EAGER_STEPS = 3  # before a step is captured: kernels are compiled and the optimizer's states made


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


def every_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' eager experts without their loop: two products over all experts, so that nothing waits for the host."""
    gates = hidden_states.new_zeros(len(hidden_states), self.num_experts).scatter(1, top_k_index, top_k_weights)
    up = torch.nn.functional.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).unflatten(1, (self.num_experts, -1))
    rows = self._apply_gate(up) * gates[..., None]  # (T, E, I)
    out: torch.Tensor = rows.flatten(1) @ self.down_proj.transpose(1, 2).flatten(0, 1)
    return out


def _check_against_the_loop(model: Any, data: TextData) -> None:
    """Switches ``model`` to :func:`every_expert`; ``CheckError`` where its loss is not that of transformers' loop."""
    from transformers.integrations import moe

    moe.ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT, every_expert)
    found = []
    for way in ("eager", EVERY_EXPERT):
        model.get_base_model().set_experts_implementation(way)
        found.append(_validation(model, data, mixed=False, count=1))
    if not math.isclose(*found, rel_tol=1e-4):  # a near tie in a router may go the other way
        raise check.CheckError(
            f"same_loss: {EVERY_EXPERT} must have the loss of eager, {found[0]:.7f}, got {found[1]:.7f}"
        )


def _autocast(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(runtime.DEVICE.type, torch.bfloat16, enabled=on)


def _loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from transformers import DynamicCache

    # Without a cache, be it empty, transformers looks on the host whether sequences are packed; a graph has no host to ask.
    logits = model(inputs, past_key_values=DynamicCache(), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def _validation(model: Any, data: TextData, mixed: bool, count: int = 4) -> float:
    model.eval()
    with _autocast(mixed):
        losses = [float(_loss(model, *batch)) for batch in data.validation_batches(count)]
    model.train()
    return statistics.fmean(losses)


def _train(
    model: Any, data: TextData, steps: int, lr: float, *, mixed: bool, every: int, graph: bool
) -> tuple[list[float], list[tuple[int, float]]]:
    """-> the loss of each step, and (step, validation loss) pairs; the rate warms up for a twentieth and falls to zero.

    ``graph``: the first steps are launched one by one, the others are replays of a captured one.
    """
    real = runtime.DEVICE.type == "cuda"
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = torch.zeros((), device=runtime.DEVICE)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=real, capturable=real)
    warm = max(1, steps // 20)
    inputs, targets = (part.clone() for part in data.batch(0))

    def body() -> torch.Tensor:
        optimizer.zero_grad()
        with _autocast(mixed):
            loss = _loss(model, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.detach()

    losses = torch.zeros(steps, device=runtime.DEVICE)
    evaluated = [(0, _validation(model, data, mixed))]
    captured = None
    with contextlib.ExitStack() as stack:
        stream = torch.cuda.Stream() if graph else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(stream))
        for step in range(steps):
            for mine, new in zip((inputs, targets), data.batch(step), strict=True):
                mine.copy_(new)
            rate.fill_(lr * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps))))
            if stream is not None and step == EAGER_STEPS:
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured, stream=stream):
                    loss = body()
            if captured is None:
                loss = body()
            else:
                captured.replay()
            losses[step] = loss
            if (step + 1) % every == 0 or step + 1 == steps:
                evaluated.append((step + 1, _validation(model, data, mixed)))
        found = losses.tolist()
    return found, evaluated


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
    _, evaluated = _train(model, data, steps, lr, mixed=real, every=max(steps, 1), graph=real)
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
    elif way == "eager":
        _check_against_the_loop(model, data)
    else:
        base_model: Any = model.get_base_model()
        base_model.set_experts_implementation(way)
    losses, evaluated = _train(model, data, steps, lr, mixed=mixed, every=max(1, steps // 10), graph=real)
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


# --- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains from scratch, then fine-tunes in each way with each seed, and writes the lines as they come; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.same_loss", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of same_loss_curves.jsonl")
    parser.add_argument("--pretrain-steps", type=int, default=300, help="steps from scratch (default: 300)")
    parser.add_argument("--steps", type=int, default=500, help="steps of fine-tuning (default: 500)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="ways (default: all)")
    parser.add_argument(
        "--base", type=Path, help="the trained model: read from this file, or written to it where it is not there"
    )
    parser.add_argument("--tiny", action="store_true", help="a model for the interpreter")
    given = parser.parse_args(arguments)
    if runtime.DEVICE.type != "cuda" and not given.tiny:
        parser.error("--tiny must be given where no GPU runs kernels")
    sizes = TINY if given.tiny else SIZES
    began = time.perf_counter()
    if given.base is not None and given.base.exists():
        base = torch.load(given.base, map_location=runtime.DEVICE, weights_only=True)
    else:
        base, loss = pretrain(sizes, given.pretrain_steps, small=given.tiny)
        print(f"from scratch: validation loss {loss:.4f} after {time.perf_counter() - began:.0f} s", flush=True)
        if given.base is not None:
            with replacing(given.base) as file:
                torch.save(base, file)
    about = {"run": record.new_run(), **record.environment(STEM)}
    failed = 0
    for seed in given.seeds:
        for way in given.ways:
            try:
                line = {**about, **finetune(way, seed, sizes, given.steps, base, small=given.tiny)}
            except Exception:  # one run is lost, not all
                failed += 1
                print(f"NOT RECORDED: {way}, seed {seed}", file=sys.stderr, flush=True)
                traceback.print_exc()
                continue
            record.write_lines(given.out / f"{STEM}.jsonl", [line], KEY)
            print(
                f"{way}, seed {seed}: validation {line['validation_loss'][0]:.4f} -> {line['validation_loss'][-1]:.4f}, "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return 1 if failed else 0


BENCH = Bench(
    name="same_loss",
    keys={STEM: KEY},
    baselines={"eager": "transformers", "grouped_mm": "transformers"},
    needs={"transformers": "everything", "peft": "everything"},
    run=lambda folder: main(["--out", str(folder)]),
)


if __name__ == "__main__":
    sys.exit(main())
