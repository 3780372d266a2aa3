"""What is measured for the block: one layer's experts, at the sizes of models, with transformers and PEFT as the baselines.

All providers are the same module of transformers with the same LoRA, which PEFT put on it; only who computes differs.

- ``eager``, ``grouped_mm``, ``batched_mm``: transformers' own implementations on bfloat16 weights, with what PEFT does for
  them (it adds each pair to the whole weight); ``grouped_mm:apart``: a program of one's own that keeps the pairs apart;
- ``axolotl``: its ScatterMoE on the same bfloat16 weights, where it is installed, with the pairs as its patch of PEFT hands them on;
- ``kernelbook``: ours on 4-bit experts, and ``kernelbook:dense`` on the bfloat16 weights.

The bfloat16 weights are what the 4-bit ones stand for, so all compute the same. Mode ``forward`` is without LoRA and
gradients, as in decoding; ``forward_backward`` gives the gradients of the input, of the gates and of the LoRA parameters.
Memory is counted beyond the weights: the 4-bit ones take 0.28 times the bfloat16 ones' bytes in addition.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench import Bench, baselines, passes, routing, step
from kernelbook import check, runtime
from kernelbook.lab.timing import Case, Problem
from kernelbook.nn import moe

# experts, hidden size, intermediate size, experts of a token
MODELS = {
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "OLMoE-1B-7B": (64, 2048, 1024, 8),
    "Mixtral-8x7B": (8, 4096, 14336, 2),
}
RANK = 16
ZIPF = 0.5  # experts' preferences fall off like 1 / sqrt(rank): of 128 the most wanted one gets five times its share
# By model: tokens of a forward pass without LoRA, and of a training step with it.
DECODING = {"Qwen3-30B-A3B": (1, 4, 8, 16, 64, 2048), "OLMoE-1B-7B": (1, 8, 2048), "Mixtral-8x7B": (1, 2048)}
TRAINING = {"Qwen3-30B-A3B": (16, 128, 2048, 8192), "OLMoE-1B-7B": (16, 2048), "Mixtral-8x7B": (16, 2048)}
BATCHED_TOKENS = 16  # batched_mm copies the weights of each pair
EAGER_TOKENS, EAGER_EXPERTS = (1, 16, 2048), 128  # a loop over many experts takes its time to measure


# --- the reference --------------------------------------------------------------------------------------------------


def block_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    pairs: Mapping[str, moe.LoRAPair],
) -> torch.Tensor:
    """The block in plain PyTorch in the dtype of ``x``, an expert at a time; dense weights (E, N, K), pairs unmerged."""

    def linear(rows: torch.Tensor, name: str, weight: torch.Tensor, e: int) -> torch.Tensor:
        out = rows @ weight[e].to(x.dtype).t()
        if name in pairs:
            a, b, scaling = pairs[name]
            out = out + scaling * (rows @ a[e].to(x.dtype).t()) @ b[e].to(x.dtype).t()
        return out

    flat, slots = ids.reshape(-1), ids.shape[1]
    out = x.new_zeros(flat.numel(), x.shape[1])
    for e in flat.unique().tolist():
        rows = (flat == e).nonzero()[:, 0]
        gate, up = linear(x[rows // slots], "gate_up_proj", gate_up, e).chunk(2, dim=-1)
        out = out.index_copy(0, rows, linear(F.silu(gate) * up, "down_proj", down, e))
    return (out.view(*ids.shape, -1) * gates[..., None].to(x.dtype)).sum(1)


# --- transformers' module with PEFT's wrappers ----------------------------------------------------------------------


class _Layer:
    """One layer's experts, of transformers, dense and in 4 bits, with the same LoRA on both."""

    def __init__(self, sizes: Sequence[int], rank: int | None) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        from kernelbook.interop import transformers as interop

        experts, hidden, inner, slots = sizes
        config = Qwen3MoeConfig(
            num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner, num_experts_per_tok=slots
        )
        interop.register()
        with torch.device(runtime.DEVICE):
            dense = Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
        quantized = copy.copy(dense)
        quantized._parameters = dict(dense._parameters)
        quantized._modules = dict(dense._modules)
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(dense, name)
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
            moe.quantize_parameter(quantized, name)
            weight.data.copy_(getattr(quantized, name))
        self.config = config
        self.dense: Any = dense
        self.quantized: Any = quantized
        self.weights = {name: getattr(dense, name) for name in ("gate_up_proj", "down_proj")}
        self.modules: dict[str, Any] = {"dense": dense, "quantized": quantized}
        self.parameters: dict[str, list[torch.nn.Parameter]] = {"dense": [], "quantized": []}
        self.pairs: dict[str, moe.LoRAPair] = {}
        if rank is not None:
            self._add_lora(rank)

    def _add_lora(self, rank: int) -> None:
        import peft

        from kernelbook.interop import peft as interop_peft

        names = ("gate_up_proj", "down_proj")
        first: dict[str, Any] = {}
        for kind in ("dense", "quantized"):
            settings = peft.LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=[f"experts.{n}" for n in names],
                init_lora_weights=False,
            )  # fmt: skip
            holder: Any = torch.nn.ModuleDict({"experts": getattr(self, kind)})
            model: Any = peft.get_peft_model(holder, settings)
            interop_peft.use_factors(model)
            wrappers: dict[str, Any] = {w.parameter_name: w for w in model.modules() if hasattr(w, "parameter_name")}
            for name in names:
                parts = [wrappers[name].lora_A["default"].weight, wrappers[name].lora_B["default"].weight]
                if kind == "dense":
                    first[name] = parts
                    self.pairs[name] = interop_peft.lora_pair(wrappers[name], "default")
                else:
                    for own, other in zip(parts, first[name], strict=True):
                        own.data.copy_(other)
                self.parameters[kind] += parts
            self.modules[kind] = model.base_model.model.experts

    def call(self, provider: str) -> tuple[Callable[..., torch.Tensor], list[torch.nn.Parameter]]:
        """The provider's forward pass of (x, ids, gates), and the parameters that it trains."""
        kind = "quantized" if provider == "kernelbook" else "dense"

        def forward(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
            self.config._experts_implementation = provider.removesuffix(":dense")
            out: torch.Tensor = self.modules[kind](x, ids, gates)
            return out

        others = {"axolotl": self._axolotl, "grouped_mm:apart": self._apart}
        return others.get(provider, forward), self.parameters[kind]

    def _apart(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return baselines.experts_apart(self.dense, x, ids, gates, self.pairs)

    def _axolotl(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """What axolotl's patch of PEFT does in front of its kernels: each pair is cast and laid out anew."""
        to_theirs, parameters = baselines.axolotl("layers").peft_lora_to_scattermoe, self.parameters["dense"]
        self.dense._scattermoe_lora = {
            name: (*to_theirs(a.to(x.dtype), b.to(x.dtype), len(pair[0]), pair[0].shape[1]), pair[2])
            for (name, pair), a, b in zip(self.pairs.items(), parameters[::2], parameters[1::2], strict=True)
        }
        out: torch.Tensor = baselines.axolotl("experts").scattermoe_experts_forward(self.dense, x, ids, gates)
        return out


# --- the cases ------------------------------------------------------------------------------------------------------


def _inputs(tokens: int, sizes: Sequence[int], zipf: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts, hidden, _, slots = sizes
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=runtime.DEVICE)
    gates = torch.rand(tokens, slots, device=runtime.DEVICE)
    ids = routing(tokens, experts, slots, zipf).to(runtime.DEVICE)
    return x, ids, (gates / gates.sum(1, keepdim=True)).to(torch.bfloat16)


def _problem(mode: str, tokens: int, sizes: Sequence[int], zipf: float = 0.0) -> Problem:
    layer = _Layer(sizes, RANK if mode == "forward_backward" else None)
    x, ids, gates = _inputs(tokens, sizes, zipf)
    upstream = torch.randn_like(x)
    weights = layer.weights["gate_up_proj"], layer.weights["down_proj"]

    def timed(
        forward: Callable[..., torch.Tensor], parameters: Sequence[torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[], Sequence[torch.Tensor]]:
        def call(x: torch.Tensor, gates: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return forward(x, ids, gates)

        leaves = [*(t.detach().to(dtype).requires_grad_() for t in (x, gates)), *parameters]
        if mode == "forward":
            return passes(mode, torch.no_grad()(call), leaves, [])
        return step(call, leaves, upstream.to(dtype))

    def plain(dtype: torch.dtype) -> Sequence[torch.Tensor]:
        def forward(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
            return block_reference(x, *weights, ids, gates, layer.pairs)

        return timed(forward, layer.parameters["dense"], dtype)()

    names = ["grouped_mm", *["grouped_mm:apart"] * (mode == "forward_backward"), "kernelbook:dense", "kernelbook"]
    if sizes[0] >= EAGER_EXPERTS and tokens in EAGER_TOKENS:
        names.insert(0, "eager")
    if mode == "forward" and tokens <= BATCHED_TOKENS and sizes[0] > 8:
        names.insert(0, "batched_mm")
    if baselines.has("axolotl"):
        names.append("axolotl")
    factor = check.FORWARD_FACTOR if mode == "forward" else check.GRADIENT_FACTOR
    calls = {name: timed(*layer.call(name)) for name in names}
    return Problem(calls, lambda: plain(torch.float64), lambda: plain(torch.bfloat16), factor)


def _case(mode: str, tokens: int, sizes: Sequence[int], zipf: float = 0.0) -> Case:
    experts, hidden, inner, slots = sizes
    rank = RANK if mode == "forward_backward" else 0
    times = 2 if rank else 1
    # Of each weight that the batch uses, on average over random routings: 4 bits, and an absmax for 64 of them.
    used = experts * (1 - (1 - slots / experts) ** tokens)
    stored = used * 3 * hidden * inner * (0.5 + 4 / 64)
    factors = 2 * rank * experts * (2 * hidden + 3 * inner) * times
    products = tokens * slots * (3 * hidden * inner + rank * (2 * hidden + 3 * inner))
    gbytes = (times * stored + factors + 2 * times * 2 * tokens * hidden) / 1e9
    # Backward: the products again with the gradient, and those of the LoRA parameters' own gradients.
    gflop = (2 * products * times + (2 * tokens * slots * rank * (2 * hidden + 3 * inner) if rank else 0)) / 1e9
    shape = {"E": experts, "H": hidden, "I": inner, "k": slots, "r": rank} | ({"zipf": zipf} if zipf else {})
    build = functools.partial(_problem, mode, tokens, sizes, zipf)
    return Case("moe_block", mode, torch.bfloat16, shape, "T", tokens, gbytes, gflop, build)


def cases() -> Iterator[Case]:
    """Decoding without LoRA and training with it, for three models' layers; routers are even, and of many experts skewed too."""
    for name, sizes in MODELS.items():
        for tokens in TRAINING[name]:
            yield _case("forward_backward", tokens, sizes)
        for tokens in DECODING[name]:
            yield _case("forward", tokens, sizes)
        if sizes[0] > 8:
            yield _case("forward_backward", 2048, sizes, ZIPF)
            yield _case("forward", 64, sizes, ZIPF)


BENCH = Bench(
    name="moe_block",
    baselines=dict.fromkeys(("eager", "grouped_mm", "grouped_mm:apart", "batched_mm"), "transformers")
    | {"axolotl": "axolotl"},
    needs={"transformers": "everything", "peft": "forward + backward"},
    cases=cases,
)
