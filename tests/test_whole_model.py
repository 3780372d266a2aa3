"""Whole models by the wall clock: what they ask for, how they are built, and that the rows are what they say."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")

import pandas as pd
import torch
from tensors import compiled_graphs

from bench import whole_model as bench
from kernelbook import check, memory, runtime
from kernelbook.interop import rotary, transformers_experts, transformers_norms
from kernelbook.interop import transformers as interop
from kernelbook.lab import arithmetic, record
from kernelbook.nf4 import NF4Tensor, nf4_quantize

QWEN, OLMOE, GPT_OSS = "Qwen3-30B-A3B", "OLMoE-1B-7B", "gpt-oss-20b"


# --- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [(QWEN, 30.5, 3.3), (OLMOE, 6.9, 1.3), (GPT_OSS, 20.9, 4.2), ("gpt-oss-120b", 116.8, 5.7)],
)
def test_the_published_sizes_come_out(name: str, billions: float, active: float) -> None:
    """Total and active parameters, as the models' cards give them."""
    sizes = arithmetic.Sizes.of(bench.configuration(name))
    parts = sizes.parameters
    assert sum(parts.values()) / 1e9 == pytest.approx(billions, rel=0.01)
    used = parts["experts"] * sizes.slots / sizes.experts + parts["attention"] + parts["embeddings"] + parts["routers"]
    assert used / 1e9 == pytest.approx(active, rel=0.03)


def test_parameters_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = tiny_model_on_meta()
    sizes = arithmetic.Sizes.of(model.config)
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert sum(sizes.parameters.values()) == sum(p.numel() for p in model.parameters()) - norms


def tiny_model_on_meta() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(bench.configuration(QWEN, 3, tiny=True))


def test_bits_are_those_of_a_tensor() -> None:
    w = torch.randn(4, 128, 128, device=runtime.DEVICE, dtype=torch.bfloat16)
    for kind, double in (("nf4", False), ("nf4_double", True)):
        q = nf4_quantize(w, double_quant=double)
        codes = sum(part.nbytes for part in (q.code, q.nested_code, q.nested_offset) if part is not None)
        assert 8 * (q.nbytes - codes) / w.numel() == pytest.approx(arithmetic.BITS[kind])


def test_flops_are_those_that_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = bench.configuration(QWEN, 2, tiny=True)
    sizes = arithmetic.Sizes.of(config)
    model = bench.build(config, dtype=torch.float32).to("cpu")
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 12, dtype=torch.int64), use_cache=False)
    # Eager attention also multiplies what its mask throws away.
    masked = 2 * 4 * sizes.layers * sizes.heads * sizes.head_dim * (12 * 12 - 12 * 13 / 2)
    assert counter.get_total_flops() - masked == pytest.approx(sizes.forward_gflop(2, 12) * 1e9, rel=1e-3)


def test_arithmetic_grows_as_it_must() -> None:
    sizes = arithmetic.Sizes.of(bench.configuration(QWEN))
    assert sizes.experts_used(1) == pytest.approx(8) and sizes.experts_used(10**4) == pytest.approx(128)
    assert sizes.held_gb("nf4_double") < sizes.held_gb("nf4") < 0.35 * sizes.held_gb("dense")
    assert sizes.step_gb("dense", 1, 0) < sizes.step_gb("dense", 8, 0) < sizes.held_gb("dense")
    assert sizes.step_gb("dense", 1, 2048) - sizes.step_gb("dense", 1, 0) == pytest.approx(sizes.cache_gb(1, 2048))
    less = sizes.training_gflop(1, 2048, 16, checkpoint=False)
    assert 1.4 * less < sizes.training_gflop(1, 2048, 16, checkpoint=True) < 1.6 * less
    assert sizes.kept_gb(1, 2048, checkpoint=True) < 0.1 * sizes.kept_gb(1, 2048, checkpoint=False)
    with torch.device("meta"):
        model = bench._add_lora(tiny_model_on_meta(), 2)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert arithmetic.Sizes.of(model.config).lora_parameters(2) == trained


# --- building -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_model_however_it_is_stored() -> None:
    config = bench.configuration(QWEN, 2, tiny=True)
    dense, packed = (bench.build(config, kind, dtype=torch.float32) for kind in ("dense", "nf4_double"))
    for (name, experts), (_, theirs) in zip(interop.expert_modules(packed), interop.expert_modules(dense), strict=True):
        for weight in ("gate_up_proj", "down_proj"):
            stored = transformers_experts.stored(experts, weight)
            assert isinstance(stored, NF4Tensor) and stored.double_quant, name
            assert torch.equal(stored.packed, nf4_quantize(getattr(theirs, weight), double_quant=True).packed)
    own, others = dict(dense.named_parameters()), dict(packed.named_parameters())
    shared = own.keys() & others.keys()
    assert len(shared) > 10 and all(torch.equal(own[name], others[name]) for name in shared)
    assert not any(t.is_meta for t in [*packed.parameters(), *packed.buffers()])


def test_tied_weights_stay_tied() -> None:
    model = bench.build(bench.configuration("GPT-2", 1, tiny=True), dtype=torch.float32)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("provider", ("kernelbook", "kernelbook:dense", "grouped_mm"))
def test_providers_compute_the_same(provider: str) -> None:
    assert bench.error_ratio(QWEN, provider) < 3


@pytest.mark.parametrize("provider", ("kernelbook", "grouped_mm"))
def test_providers_compute_the_same_of_gpt_oss(provider: str) -> None:
    assert bench.error_ratio(GPT_OSS, provider) < 3


def test_a_wrong_provider_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = interop.gated_experts
    monkeypatch.setattr(interop, "gated_experts", lambda *args, **kwargs: 1.001 * real(*args, **kwargs))
    with pytest.raises(check.CheckError):
        bench.error_ratio(OLMOE, "kernelbook:dense")


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_a_step_of_decoding() -> None:
    """Each step reads the token of the step before, at the place that is set."""
    model = bench.build(bench.configuration(QWEN, 1, tiny=True), dtype=torch.float32)
    model.set_experts_implementation("eager")
    step, rewind = bench._decode_task(model, 2, 3)
    first = step()
    rewind()
    assert first.shape == (2, 1, 67)
    again = step()  # the token has changed, the place has not
    assert not torch.equal(first, again) and bool(again.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ("kernelbook", "kernelbook:dense"))
def test_steps_of_decoding_in_a_compiled_graph(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens and logits of the eager steps; the first call of all is one in the pool of the compiler's graphs."""
    from torch._dynamo.utils import counters

    config = bench.configuration(QWEN, 2, tiny=True)
    config.initializer_range = 0.2  # weak weights would make every block look the same
    model = bench.build(config, bench.Plan(QWEN, provider, "decode").kind, dtype=torch.float32)
    outcomes = []
    with bench._running(model, provider):
        for compiled in (True, False):
            torch.manual_seed(0)
            step, rewind = bench._decode_task(model, 2, 3000, graph="compile" if compiled else "0")
            monkeypatch.setattr(memory, "_counters", {})
            with compiled_graphs() if compiled else contextlib.nullcontext():
                outcomes.append([step().clone() for _ in range(6)])
                rewind()
                outcomes[-1] += [step().clone() for _ in range(3)]
                copied = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
                assert copied <= 1, "no more than the tokens: weights and caches stay where they are"
    for ours, plain in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


def test_covered() -> None:
    assert bench.covered([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert bench.covered([]) == 0


# --- the command ----------------------------------------------------------------------------------------------------


def test_rows_of_a_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [
        bench.Plan(OLMOE, "grouped_mm", "step"),
        bench.Plan(OLMOE, "grouped_mm", "decode", 2),
        bench.Plan(OLMOE, "kernelbook:dense", "prefill"),
        bench.Plan(OLMOE, "grouped_mm", "generate"),
        bench.Plan(QWEN, "kernelbook", "step"),
        bench.Plan(OLMOE, bench.APART, "step"),
        bench.Plan(GPT_OSS, "kernelbook", "decode"),
        bench.Plan(OLMOE, "kernelbook", "decode", bits=True),
    ]
    assert bench.bench(tmp_path, layers=1, tokens=8, samples=1, tiny=True, wanted=wanted) == 0
    rows = pd.read_csv(tmp_path / "whole_model.csv")
    assert list(rows.columns) == [*record.COLUMNS]
    assert len(rows) == 7 and rows["run"].nunique() == 1
    assert len(pd.read_csv(tmp_path / "whole_model_bits.csv")) == 1
    assert set(rows["mode"]) == {"step", "forward"}
    assert (rows["ms"].iloc[:3] > 0).all()  # a token more of generate is a difference of two times
    assert rows["shape"].iloc[0] == f"model={OLMOE} layers=1 task=step N=8 r=16 checkpoint=1 graph=0"
    assert rows["x"].tolist() == [1, 2, 1, 1, 1, 1, 1]
    assert rows["provider"][rows["err_ratio"].isna()].tolist() == [bench.APART]
    printed = capsys.readouterr().out
    assert "left out: axolotl (" in printed and "left out: Unsloth (" in printed


def test_a_wrong_result_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> float:
        raise check.CheckError("too far off")

    monkeypatch.setattr(bench, "error_ratio", wrong)
    wanted = [bench.Plan(OLMOE, "kernelbook", "prefill")]
    assert bench.bench(tmp_path, layers=1, tokens=8, samples=1, tiny=True, wanted=wanted) == 1
    assert not (tmp_path / "whole_model.csv").exists()


def test_plans_are_of_models_that_are_there() -> None:
    found = bench.plans()
    assert len(set(map(str, found))) == len(found)
    assert {plan.model for plan in found} == set(bench.MODELS)
    assert any(str(plan).startswith("OLMoE-1B-7B step") for plan in found)  # as the page about running selects them


# --- norms ----------------------------------------------------------------------------------------------------------


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (1 + self.weight) * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    assert not list(transformers_norms.rms_norms(torch.nn.Sequential(Shifted())))


# --- rotation of queries and keys -----------------------------------------------------------------------------------


def test_rotation_and_its_gradient() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

    cos, sin = torch.randn(2, 5, 12, device=runtime.DEVICE), torch.randn(1, 5, 12, device=runtime.DEVICE)
    queries = torch.randn(2, 5, 18, 12, device=runtime.DEVICE).transpose(1, 2)  # as a model has them
    keys = torch.randn(2, 3, 5, 24, device=runtime.DEVICE)[..., ::2]

    def call(function: Any) -> Any:
        return lambda q, k: function(q, k, cos.to(q.dtype), sin.to(q.dtype).expand(2, -1, -1))

    check.check_op(call(rotary.rotate), call(apply_rotary_pos_emb), {"q": queries, "k": keys}, grads=("q", "k"))
    q, k = rotary.rotate(queries, keys, cos, sin)
    assert q.stride() == queries.stride() and k.stride(-1) == 1
    # Where tables may be for half of the features, they may be for all.
    assert torch.equal(rotary._or(pytest.fail, half=True)(queries, keys, cos, sin)[0], q)


def test_another_rotation_is_left_alone() -> None:
    """One that turns neighbouring features; no attention at all; a part of the features, float64, a tangent to carry on."""
    from transformers.models.cohere.modeling_cohere import CohereAttention
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    assert rotary._with_kernel(Qwen3MoeAttention, Qwen3MoeAttention.forward) is not None
    assert rotary._with_kernel(CohereAttention, CohereAttention.forward) is None
    assert rotary._with_kernel(torch.nn.Linear, torch.nn.Linear.forward) is None
    given = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    assert rotary._or(lambda *others: others)(*given)[2] is given[2]
    doubles = tuple(torch.randn(1, 2, 3, 8, dtype=torch.float64) for _ in range(2))
    assert rotary._or(lambda *others: others)(*doubles, *torch.randn(2, 1, 3, 8))[0] is doubles[0]
    with torch.autograd.forward_ad.dual_level():
        assert rotary._or(lambda *others: others)(*given[:2], *torch.randn(2, 1, 3, 8))[0] is given[0]
