"""What is measured of whole models, by the wall clock: ``python -m bench whole_model``.

Architectures of published models, from their configurations, with random weights that are drawn on the GPU, layer by layer:
nothing is downloaded, and no time depends on what the weights are. Tasks:

- ``step``: a step of LoRA fine-tuning (rank 16, on the experts and on attention's projections): forward, backward, AdamW;
- ``prefill``: a forward pass of a prompt into an empty cache;
- ``decode``: one more token for each sequence, with a static cache that holds 2,048;
- ``generate``: the same by ``model.generate``, which chooses the tokens too: the time of 64 of them over 64;
- ``copies``: each layer's experts copied from the host once, which a step does twice: its floor where experts are offloaded.

Providers, on the same weights as far as they are the same:

- ``grouped_mm``, ``batched_mm``: transformers' experts in bfloat16, its attention (PyTorch's) and its norms; PEFT's LoRA;
- ``grouped_mm:apart``: the same with PyTorch's grouped product of the pairs beside the weights, where PEFT adds each pair to its
  whole weight in every step: a program of one's own (:func:`bench.baselines.experts_apart`);
- ``bitsandbytes``: the same with the experts in its 4 bits, which are made dense where they are read;
- ``matmul_ogs``: gpt-oss as transformers stores it in MXFP4, with products of Triton's ``triton_kernels`` (from a hub) and without gradients;
- ``kernelbook``: experts in 4 bits (doubly quantized), attention and norms on the kernels; ``kernelbook:dense`` on the
  bfloat16 weights; ``kernelbook:offloaded`` with the experts in pinned host memory, and 12 GiB of the GPU's;
- ``torch``: PyTorch's own layers, for a model without experts.

gpt-oss' experts are in MXFP4 instead, as they are published, and its baseline is the model that transformers makes dense,
with its eager attention: PyTorch's has no sinks.

Three clocks: ``graph=0`` is the call from Python; ``graph=1`` is what a user gets in a CUDA graph, for a step by
:class:`kernelbook.train.CapturedStep`, for ``generate`` by ``fast_generate``, for others one captured call; ``graph=compile``
is ``torch.compile``'s, for ``generate`` as transformers compiles a static cache by itself. All steps have the same loss, of
the output layer in pieces, so that no logits of all tokens exist.

A row's ``ms`` is wall time with the device waited for, ``host_us`` the host's part until it has nothing more to enqueue,
``peak_mib`` everything that the process holds on the GPU. ``err_ratio`` is of the same architecture at a tiny size in float32.
``whole_model_parts.csv`` has by the profiler what of a call's time no kernel covers, as the part ``none``; ``whole_model_bits.csv``
the models within :func:`kernelbook.same_bits` (provider ``kernelbook:same_bits``) beside the default, both of one run.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bench import Bench, baselines, forget, row, write_ceilings
from kernelbook import check, runtime
from kernelbook.interop import base_model
from kernelbook.lab import profiling, record, timing
from kernelbook.train.capture import Captured
from kernelbook.train.step import CapturedStep

RANK, PROMPT, ROOM, WARM = 16, 2048, 64, 3
STEM, PARTS_STEM, BITS_STEM = "whole_model", "whole_model_parts", "whole_model_bits"
PARTS_KEY = ("gpu", "provider", "shape", "batch", "part")
COMMON: dict[str, Any] = {"tie_word_embeddings": False, "attention_bias": False, "use_cache": True}
GPT_OSS: dict[str, Any] = COMMON | {
    "attention_bias": True, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}  # fmt: skip
# The published configurations, as far as they decide what is computed.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        COMMON | {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
        },
    ),
    "OLMoE-1B-7B": (
        "olmoe",
        COMMON | {
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "GPT-2": (
        "gpt2",
        {"vocab_size": 50257, "n_positions": 4096, "n_embd": 768, "n_layer": 12, "n_head": 12,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"vocab_size": 67, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                  "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmoe": {"vocab_size": 67, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
              "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "gpt_oss": {"vocab_size": 67, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8},
    "gpt2": {"vocab_size": 67, "n_embd": 64, "n_head": 4},
}  # fmt: skip
ONE_TOKEN = ("decode", "generate")
SAME_BITS = "kernelbook:same_bits"
EXPERTS = {"grouped_mm": "grouped_mm", "batched_mm": "batched_mm", "bitsandbytes": "grouped_mm"}
OFFLOADED = "kernelbook:offloaded"
APART = "grouped_mm:apart"
CAP = 12 * 2**30  # bytes of the GPU's memory that PyTorch may take where experts are offloaded
KINDS = dict.fromkeys(("grouped_mm", APART, "batched_mm", "torch", "kernelbook:dense"), "dense") | {
    OFFLOADED: "offloaded"
}
KINDS |= {name: name for name in ("bitsandbytes", "matmul_ogs")}


# --- building -------------------------------------------------------------------------------------------------------


def configuration(model: str, layers: int | None = None, *, tiny: bool = False) -> Any:
    """The configuration of transformers, with fewer layers or small where that is asked for."""
    from transformers import AutoConfig

    kind, values = MODELS[model]
    changes = dict(TINY[kind]) if tiny else {}
    if layers is not None:
        changes["n_layer" if kind == "gpt2" else "num_hidden_layers"] = layers
    if kind == "gpt_oss":  # as many as there are layers
        count = changes.get("num_hidden_layers", values["num_hidden_layers"])
        changes["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(count)]
    return AutoConfig.for_model(kind, **(values | changes))


def build(config: Any, kind: str = "dense", *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """A random model whose weights are drawn on the device, one module after the other, and stored as ``kind``.

    ``"dense"``, ``"nf4"``, ``"nf4_double"``, ``"offloaded"``: doubly quantized, on the host; or ``"bitsandbytes"``: 4 bits,
    doubly quantized, of that library. No more than one layer's experts are dense at a time. The same seed gives the same weights whatever ``kind`` is, but for ``"mxfp4"``
    and ``"matmul_ogs"``, transformers' own MXFP4: random bytes with one scale, as large as the others, which are never dense.
    """
    from transformers import AutoModelForCausalLM

    from kernelbook.interop import transformers as interop
    from kernelbook.interop.transformers_experts import expert_modules, weight_names
    from kernelbook.nn.moe import quantize_parameter

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(runtime.DEVICE).manual_seed(seed)
    if kind == "matmul_ogs":
        _draw_matmul_ogs(model, config.initializer_range, generator)
    experts = {id(module): weight_names(module) for _, module in expert_modules(model)}
    done: dict[int, torch.nn.Parameter] = {}  # by the parameter that it stands for: tied ones are drawn once
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            weight_of_experts = name in experts.get(id(module), ())
            if weight_of_experts and kind == "mxfp4":
                _draw_mxfp4(module, name, config.initializer_range, dtype, generator)
                continue
            if id(parameter) not in done:
                value = torch.empty(parameter.shape, dtype=dtype, device=runtime.DEVICE)
                if value.ndim > 1:
                    value.normal_(std=config.initializer_range, generator=generator)
                else:
                    value.fill_(0.0 if name == "bias" else 1.0)
                done[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
            setattr(module, name, done[id(parameter)])
            if weight_of_experts:
                done.pop(id(parameter))
                if kind == "bitsandbytes":
                    from bitsandbytes.nn.parametrize import replace_parameter_4bit

                    replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
                elif kind != "dense":
                    quantize_parameter(module, name, double_quant=kind != "nf4")
                    if kind == "offloaded":
                        module.parametrizations[name].to("cpu")
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            with torch.device(runtime.DEVICE):
                fresh = type(module)(config)
            for name in module._buffers:
                module._buffers[name] = fresh._buffers[name]
    if kind == "offloaded":
        interop.offload_experts(model)
    return model.eval()


def _random_mxfp4(
    shape: Sequence[int], deviation: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> blocks (..., 16) of random codes, and one scale for all. Sixteen equally frequent values have a standard deviation of 2.93."""
    blocks = torch.empty(*shape, dtype=torch.uint8, device=runtime.DEVICE).random_(0, 256, generator=generator)
    return blocks, torch.full_like(blocks[..., 0], 127 + round(math.log2(deviation / 2.93)))


def _draw_mxfp4(experts: Any, name: str, deviation: float, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Random codes in the place of a parameter without storage."""
    from kernelbook.nn.parameters import store_parameter
    from kernelbook.packed.fp4 import fp4_tensor

    e, *sides = getattr(experts, name).shape
    n, k = reversed(sides) if experts.is_transposed else sides
    blocks, scales = _random_mxfp4((e, n, k // 32, 16), deviation, generator)
    store_parameter(
        experts, name, fp4_tensor(blocks, scales, dtype=dtype, in_place=True), transposed=experts.is_transposed
    )


def _draw_matmul_ogs(model: Any, deviation: float, generator: torch.Generator) -> None:
    """The same as transformers loads it: its own module for gpt-oss's experts, weights in the order of its kernels."""
    from transformers.integrations import mxfp4
    from transformers.utils.quantization_config import Mxfp4Config

    mxfp4.replace_with_mxfp4_linear(model, quantization_config=Mxfp4Config())
    kernels: Any = vars(mxfp4)["triton_kernels_hub"]  # which that has loaded
    for experts in [module for module in model.modules() if isinstance(module, mxfp4.Mxfp4GptOssExperts)]:
        for name in ("gate_up_proj", "down_proj"):
            given = _random_mxfp4(getattr(experts, name).shape, deviation, generator)
            mxfp4.swizzle_mxfp4_convertops(*given, experts, name, runtime.DEVICE, kernels)


def _add_lora(model: Any, rank: int) -> Any:
    """PEFT's pairs in the model's dtype, on every expert and on attention's projections."""
    import peft

    from kernelbook.interop import transformers as interop

    settings = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=interop.expert_parameters(model),
    )  # fmt: skip
    with torch.device(runtime.DEVICE):  # on the host the many pairs take a while to draw
        return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


def _experts_apart(self: Any, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    from kernelbook.interop.transformers_experts import LORA_ATTRIBUTE

    return baselines.experts_apart(self, x, ids, gates, self.__dict__.get(LORA_ATTRIBUTE, {}))


@contextlib.contextmanager
def _running(model: Any, provider: str) -> Iterator[None]:
    """Within the context ``model`` computes as ``provider`` does."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from kernelbook.interop import transformers as interop
    from kernelbook.interop.transformers_experts import NAME
    from kernelbook.nn import swap

    base = base_model(model)
    has_experts = any(True for _ in interop.expert_modules(base))
    if not provider.startswith("kernelbook"):
        if provider == APART:  # in the place of ours, to which PEFT's wrappers hand their pairs
            interop.use_kernels(model)
            ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_apart)
        elif has_experts:
            base.set_experts_implementation(EXPERTS[provider])
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
        try:
            yield
        finally:
            interop.register()
        return
    if has_experts:
        interop.use_kernels(model)
    with swap(base, same_bits=provider == SAME_BITS, quiet=True):
        yield


# --- tasks ----------------------------------------------------------------------------------------------------------


def _step_task(model: Any, batch: int, tokens: int, *, graph: bool) -> Callable[[], torch.Tensor]:
    """A step of training what requires a gradient, with checkpoints; returns the loss."""
    from transformers import DynamicCache

    from kernelbook.interop.transformers import known_masks, loss_in_pieces

    base = base_model(model)
    ids = torch.randint(0, base.config.vocab_size, (batch, tokens), device=runtime.DEVICE)
    model.train()
    # There is no dropout, and what draws nothing need not keep the state of the generator.
    how = {"use_reentrant": False, "preserve_rng_state": False}
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    real = runtime.DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=real, capturable=real)
    batch_ = known_masks(base, {"input_ids": ids}) if graph else {"input_ids": ids}

    def loss_of(model: Any, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        # While a graph is captured nobody can look whether sequences are packed, and transformers would make a mask for
        # that; it asks no such thing where there is a cache, be it empty.
        cache = DynamicCache() if graph and attention_mask is None else None
        return loss_in_pieces(model, input_ids, input_ids, attention_mask, past_key_values=cache)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, **batch_)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not graph:
        return step
    captured = CapturedStep(model, optimizer, loss=loss_of, warm=WARM)
    for _ in range(WARM + 1):
        captured(**batch_)
    if captured.why_eager is not None:
        raise RuntimeError(f"the step was not captured: {captured.why_eager}")
    return lambda: captured(**batch_)


def _copies_task(model: Any) -> Callable[[], torch.Tensor]:
    from kernelbook.interop.transformers_experts import expert_modules, weight_names
    from kernelbook.nn.offload import read_layer

    layers = [(experts, weight_names(experts)) for _, experts in expert_modules(model)]

    def copies() -> torch.Tensor:
        [*_, last] = (read_layer(*layer) for layer in layers)
        assert last is not None
        return last[0].absmax

    return copies


def _prefill_task(model: Any, batch: int, tokens: int) -> Callable[[], torch.Tensor]:
    from transformers import DynamicCache

    model.eval()
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=runtime.DEVICE)

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        logits: torch.Tensor = model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).logits
        return logits

    return prefill


def _decode_task(
    model: Any, batch: int, context: int, graph: str = "0"
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """-> one more token, and back to the first one."""
    from transformers import StaticCache

    from kernelbook.interop.transformers_generation import in_graphs

    model.eval()
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=runtime.DEVICE)
    cache: Any = StaticCache(config=model.config, max_cache_len=context + ROOM)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
            if hasattr(layer, "cumulative_length_int"):  # of a window, which is full
                layer.cumulative_length_int = context

    rewind()
    compiled = graph == "compile"
    # The cache is there before anything is compiled, as generate() has it after the prompt.
    forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False) if compiled else model
    read = in_graphs(cache) if graph == "1" else cache

    @torch.no_grad()
    def step() -> torch.Tensor:
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits: torch.Tensor = forward(ids, past_key_values=read, use_cache=True).logits
        ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits

    return step, rewind


def _generate_task(model: Any, batch: int, context: int, graph: str) -> Callable[[int], torch.Tensor]:
    """-> a function that generates so many tokens after a prompt of ``context``, greedily."""
    from kernelbook.interop.transformers import fast_generate

    model.eval()
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=runtime.DEVICE)
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if graph != "0":
        how["cache_implementation"] = "static"
    if graph == "1":
        fast_generate(model, max_length=context + ROOM)

    def generate(new: int) -> torch.Tensor:
        found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **how)
        return found

    return generate


# --- what is measured -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """One measurement: a model, who computes, the task, and how it is launched."""

    model: str
    provider: str
    task: str
    batch: int = 1
    graph: str = "0"
    bits: bool = False  # for whole_model_bits.csv

    @property
    def kind(self) -> str:
        """How the experts are stored."""
        packed = "mxfp4" if MODELS[self.model][0] == "gpt_oss" else "nf4_double"
        return KINDS.get(self.provider, packed)

    @property
    def mode(self) -> str:
        return "step" if self.task == "step" else "forward"

    def shape(self, layers: int, tokens: int) -> str:
        """The column of that name."""
        parts = {"model": self.model, "layers": layers, "task": self.task}
        if self.task == "step":
            parts |= {"N": tokens, "r": RANK, "checkpoint": 1}
        elif self.task != "copies":
            parts |= {"N": 1, "S": tokens} if self.task in ONE_TOKEN else {"N": tokens, "S": 0}
        return " ".join(f"{name}={value}" for name, value in (parts | {"graph": self.graph}).items())

    def __str__(self) -> str:
        bits = " bits" if self.bits else ""
        return f"{self.model} {self.task} {self.provider} batch={self.batch} graph={self.graph}{bits}"


def plans() -> list[Plan]:
    """What is measured; within a model the most important first, those with the same weights one after the other."""
    found = []
    for provider in ("torch", "kernelbook:dense"):
        found += [Plan("GPT-2", provider, "prefill", graph=graph) for graph in ("1", "0")]
        found += [Plan("GPT-2", provider, "decode", batch, graph="1") for batch in (1, 32)]
    for model, batches in (("Qwen3-30B-A3B", (1, 8, 32)), ("OLMoE-1B-7B", (1, 8))):
        for own in (("kernelbook",), ("grouped_mm", "kernelbook:dense"), ("bitsandbytes",)):
            for provider in own:
                found += [Plan(model, provider, "decode", batch, graph="1") for batch in batches]
                if provider == "grouped_mm":
                    found.append(Plan(model, "batched_mm", "decode", graph="1"))
                found.append(Plan(model, provider, "decode"))
                found += [Plan(model, provider, "prefill", graph=graph) for graph in ("1", "0")]
            for provider in own:
                for who in {"bitsandbytes": (), "grouped_mm": (provider, APART)}.get(provider, (provider,)):
                    found += [Plan(model, who, "step", graph=graph) for graph in ("1", "0")]
        if model == "Qwen3-30B-A3B":
            found += [Plan(model, OFFLOADED, task, graph=graph) for task in ("copies", "step") for graph in ("0", "1")]
        both = ("kernelbook", SAME_BITS)
        found += [
            Plan(model, provider, "decode", batch, graph="1", bits=True) for batch in (1, 32) for provider in both
        ]
        found += [Plan(model, provider, "step", graph="1", bits=True) for provider in both]
    for provider in ("kernelbook", "grouped_mm"):
        # transformers' own attention with sinks makes tensors on the host, which a graph cannot; compiled it does not.
        found += [
            Plan("gpt-oss-20b", provider, task, graph=graph) for task in ("step", "decode", "prefill") for graph in "10"
        ]
        found.append(Plan("gpt-oss-20b", provider, "decode", graph="compile"))
    found += [Plan("gpt-oss-20b", APART, "step", graph=graph) for graph in "10"]
    found += [Plan("gpt-oss-20b", "matmul_ogs", task, graph=graph) for task in ("decode", "prefill") for graph in "10"]
    found += [Plan("gpt-oss-120b", "kernelbook", "step", graph=graph) for graph in ("0", "1")]
    found.append(Plan("gpt-oss-120b", "kernelbook", "decode", graph="1"))
    # What transformers gives by itself: a growing cache, and all layers compiled.
    for model in ("Qwen3-30B-A3B", "OLMoE-1B-7B"):
        found += [Plan(model, "kernelbook", "generate", graph=graph) for graph in ("1", "0")]
        found += [Plan(model, "grouped_mm", "generate", graph=graph) for graph in ("0", "compile")]
        found.append(Plan(model, "grouped_mm", "decode", graph="compile"))
    return found


class _Session:
    """Models on the GPU, one at a time, and the rows measured on them."""

    def __init__(self, folder: Path, layers: int | None, tokens: int, samples: int, tiny: bool) -> None:
        self.folder, self.layers, self.tokens, self.samples, self.tiny = folder, layers, tokens, samples, tiny
        self.about = {"run": record.new_run(), **record.environment("whole_model")}
        self.ratios: dict[tuple[str, str], float] = {}
        self._held: tuple[Any, ...] = ()
        self.model: Any = None

    def drop(self) -> None:
        """Gives the model's memory back."""
        self._held, self.model = (), None
        forget()

    def _model(self, plan: Plan) -> Any:
        """The model of the plan, with LoRA pairs for a step; built anew where another one is held."""
        lora, held = plan.task == "step", (plan.model, plan.kind)
        if self._held[:2] != held or (self._held[2] and not lora):
            self.drop()
            self.model = build(configuration(plan.model, self.layers, tiny=self.tiny), plan.kind)
            self._held = (*held, False)
        if lora and not self._held[2]:
            self.model = _add_lora(self.model, RANK if not self.tiny else 8)
            self._held = (*held, True)
        return self.model

    def run(self, plan: Plan) -> None:
        """Measures and writes the rows of one plan."""
        key = (plan.model, plan.provider)
        if key not in self.ratios:
            self.ratios[key] = error_ratio(*key)
        model = self._model(plan)
        forget()
        if runtime.DEVICE.type == "cuda":
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, CAP / total) if plan.provider == OFFLOADED else 1.0)
            torch.cuda.reset_peak_memory_stats()
        try:
            with _running(model, plan.provider):
                self._measure(plan, model)
        finally:
            if plan.graph == "compile":
                torch._dynamo.reset()  # what was compiled holds the model

    def _measure(self, plan: Plan, model: Any) -> None:
        before: Callable[[], object] = timing.wait
        calls, samples = 1, self.samples
        if plan.task == "generate":
            self._write(plan, model, self._token_times(plan, base_model(model)), math.nan)
            return
        if plan.task == "decode":
            call, before = _decode_task(model, plan.batch, self.tokens, plan.graph)
            calls = ROOM // 4
        elif plan.task == "copies":
            call = _copies_task(model)
        elif plan.task == "prefill":
            call = _prefill_task(model, plan.batch, self.tokens)
        else:
            call = _step_task(model, plan.batch, self.tokens, graph=plan.graph == "1")
            # A launch takes milliseconds, and a trainer launches a step while the one before runs.
            calls = 3 if plan.graph == "1" else 1
        if plan.graph == "1" and plan.task != "step":
            call = Captured(call)
        elif plan.graph != "1":
            samples = min(samples, 3)
            for _ in range(5 if plan.graph == "compile" else 2):
                call()
        before()
        out = call()
        if not bool(out.float().isfinite().all()):
            raise check.CheckError(f"{plan}: the outcome must be finite")
        found, host = timing.wall(call, calls=calls, samples=samples, before=before)
        before()
        self._write(plan, model, found, host, call)

    def _token_times(self, plan: Plan, base: Any) -> timing.Timing:
        """Of a new token of ``generate``: what :data:`ROOM` more of them take."""
        new = ROOM if runtime.DEVICE.type == "cuda" else 2
        try:
            generate = _generate_task(base, plan.batch, self.tokens, plan.graph)
            generate(new)
            once, many = (timing.wall(functools.partial(generate, n), samples=self.samples)[0] for n in (1, new))
        finally:  # as the model was
            for name in ("get_compiled_call", "_compiled_call"):
                base.__dict__.pop(name, None)
            base.generation_config.cache_implementation = base.generation_config.max_cache_len = None
        more = new - 1
        return timing.Timing(
            (many.ms - once.ms) / more, (many.p20 - once.p80) / more, (many.p80 - once.p20) / more, many.samples
        )

    def _write(
        self, plan: Plan, model: Any, found: timing.Timing, host: float, call: Callable[[], Any] | None = None
    ) -> None:
        """The row, and by the profiler what of ``call`` no kernel covers."""
        on_gpu = runtime.DEVICE.type == "cuda"
        peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else math.nan
        shape = plan.shape(base_model(model).config.num_hidden_layers, self.tokens)
        written = row(
            STEM, plan.mode, plan.provider, torch.bfloat16, shape, ("batch", plan.batch), found,
            peak_mib=peak, err_ratio=self.ratios[plan.model, plan.provider], host_us=host,
        )  # fmt: skip
        ours = record.is_ours(plan.provider)
        written["peer"] = "" if ours else baselines.peer_version(plan.provider, BENCH.baselines)
        table = pd.DataFrame([{**self.about, **written}], columns=list(record.COLUMNS))
        record.write_results(self.folder / f"{BITS_STEM if plan.bits else STEM}.csv", table)
        if on_gpu and call is not None and not plan.bits:
            spans = sorted((kernel.start, kernel.end) for kernel in profiling.device_kernels(call))
            idle = max(0.0, found.ms - covered(spans) / 1e6)
            part = {"provider": plan.provider, "shape": shape, "batch": str(plan.batch), "part": "none"}
            part |= {"part_ms": f"{idle:.4g}", "launches": str(len(spans)), **self.about}
            record.write_results(self.folder / f"{PARTS_STEM}.csv", pd.DataFrame([part]), key=PARTS_KEY)
        print(f"{plan}: {found.ms:.4g} ms, {peak / 1024:.4g} GiB, host {host / 1e3:.4g} ms", flush=True)


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """How much of the line the intervals (start, end) cover together; they come in order."""
    total = reach = 0
    for start, end in spans:
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


# --- correctness ----------------------------------------------------------------------------------------------------


def error_ratio(name: str, provider: str) -> float:
    """The worst error of a provider's logits and gradients over plain PyTorch's, on a tiny model in float32.

    The truth is transformers' own eager model in float64, on the weights that the experts stand for.

    Raises:
        check.CheckError: the provider is one of ours, and not correct.
    """
    plan = Plan(name, provider, "prefill")
    config = configuration(name, 2, tiny=True)
    config.initializer_range = 0.2  # weak weights would make every block look the same
    if (
        provider == APART
        or plan.kind == "matmul_ogs"
        or (plan.kind == "bitsandbytes" and runtime.DEVICE.type != "cuda")
    ):
        return math.nan  # the first two take no float32
    with timing.allow_tf32(False):  # float32 products in float32: a tiny model is to route its tokens as float64 does
        model = build(config, plan.kind, dtype=torch.float32)
        plain = _plain_copy(config, model)
        embeddings = torch.randn(2, 16, config.hidden_size, device=runtime.DEVICE)
        upstream = torch.randn(2, 16, config.vocab_size, device=runtime.DEVICE)

        def outputs(of: Any, dtype: torch.dtype) -> list[torch.Tensor]:
            given = embeddings.to(dtype, copy=True).requires_grad_()
            logits = of(inputs_embeds=given, use_cache=False).logits
            (logits * upstream.to(dtype)).sum().backward()
            assert given.grad is not None
            return [logits.detach(), given.grad]

        baseline = outputs(plain, torch.float32)
        truth = outputs(copy.deepcopy(plain).double(), torch.float64)
        with _running(model, provider):
            ours = outputs(model, torch.float32)
    worst = 0.0
    for i, (out, ref, base) in enumerate(zip(ours, truth, baseline, strict=True)):
        factor = check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR
        verdict = check.compare(f"{name} {provider} {('logits', 'dembeddings')[i]}", out, ref, base, factor=factor)
        if provider.startswith("kernelbook"):
            verdict.require()
        worst = max(worst, verdict.ratio)
    return worst


def _plain_copy(config: Any, model: Any) -> Any:
    """transformers' own eager model with the dense weights that ``model`` stands for."""
    from transformers import AutoModelForCausalLM

    from kernelbook.interop import transformers as interop

    with torch.device(runtime.DEVICE):
        plain: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    for name, module in plain.named_modules():
        theirs = model.get_submodule(name)
        for own, parameter in module._parameters.items():
            if parameter is not None:
                parameter.data.copy_(getattr(theirs, own))
                parameter.requires_grad_(False)
    if any(True for _ in interop.expert_modules(plain)):
        plain.set_experts_implementation("eager")
    plain.set_attn_implementation("eager")
    return plain.eval()


# --- the command ----------------------------------------------------------------------------------------------------


def bench(
    folder: Path,
    *,
    layers: int | None = None,
    select: str | None = None,
    tokens: int = PROMPT,
    samples: int = 5,
    tiny: bool = False,
    wanted: Sequence[Plan] | None = None,
) -> int:
    """Measures and writes ``folder/whole_model.csv`` and ``whole_model_parts.csv``; 1 where a result of ours was wrong.

    Args:
        layers: of each model (all); a smaller number for a smaller card.
        select: only those in whose description this regular expression finds something.
        tokens: of a prompt, a context and a sequence. samples: of each time. tiny: small widths, for tests.
        wanted: what to measure instead of :func:`plans`.
    """
    for note in BENCH.missing():
        print(f"left out: {note}")
    session = _Session(folder, layers, tokens, samples, tiny)
    if runtime.DEVICE.type == "cuda":
        write_ceilings(folder, session.about["run"], quick=True)
    failed = False
    for plan in plans() if wanted is None else wanted:
        if not re.search(select or "", str(plan)):
            continue
        try:
            session.run(plan)
        except torch.OutOfMemoryError:
            print(f"left out, too little GPU memory: {plan}", flush=True)
            session.drop()
        except Exception as error:  # one measurement is lost, not the run
            failed |= record.is_ours(plan.provider)
            print(f"NOT RECORDED: {plan}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            session.drop()
    session.drop()
    return int(failed)


BENCH = Bench(
    name="whole_model",
    keys={PARTS_STEM: PARTS_KEY},
    baselines=dict.fromkeys(("torch", "grouped_mm", APART, "batched_mm", "matmul_ogs"), "transformers")
    | {"bitsandbytes": "bitsandbytes"},
    needs={"transformers": "everything", "peft": "every step", "kernels": "matmul_ogs"},
    left_out=(
        "steps of bitsandbytes (PEFT 0.21 cannot put LoRA on experts in its 4 bits)",
        "axolotl (its kernels try hundreds of tiles for each size, which takes minutes; one layer of it: bench moe_block)",
        "Unsloth (its kernels come as patches of whole models from a hub, not for a model that is there)",
    ),
    run=bench,
    options=("select", "layers"),
)
