"""nn.swap on models made of PyTorch's modules, and on a GPT-2: right by the rule of check.py, and undone without a trace."""

import copy
import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensors import default_dtype, randn
from tiny_models import attention_model
from tiny_models import tokens as token_ids
from torch import nn
from transformers import Gemma2ForCausalLM, Gemma2Model, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import kernelbook as kb
from kernelbook import check, runtime
from kernelbook import nn as kb_nn
from kernelbook.interop import rotary, transformers_attention
from kernelbook.nn import swap


def _encoder(**changes: Any) -> nn.Module:
    options = {"d_model": 24, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True, **changes}
    return nn.TransformerEncoderLayer(**options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, int]]] = {
    "encoder layer": (_encoder, lambda: randn(2, 7, 24), {"LayerNorm": 2, "MultiheadAttention": 1}),
    "sequence first": (
        lambda: _encoder(batch_first=False, norm_first=True, bias=False),
        lambda: randn(7, 2, 24),
        {"LayerNorm": 2, "MultiheadAttention": 1},
    ),
    "rms": (lambda: nn.Sequential(nn.Linear(24, 24), nn.RMSNorm(24)), lambda: randn(3, 24), {"RMSNorm": 1}),
}


def _tensors(model: nn.Module, x: torch.Tensor, forward: Any) -> list[torch.Tensor]:
    """The output, the gradient of the input and those of all parameters."""
    x = x.detach().requires_grad_()
    out = forward(model, x)
    torch.manual_seed(1)
    up = torch.randn(out.shape, device=out.device).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, *model.parameters()), up)]


def _require(model: nn.Module, x: torch.Tensor, forward: Any = lambda model, x: model(x), **how: Any) -> None:
    plain = _tensors(model, x, forward)
    exact = [t.float() for t in _tensors(model.double(), x.double(), forward)]
    model.float()
    with swap(model, quiet=True, **how):
        ours = _tensors(model, x, forward)
    names = ["out", "dx", *(f"d{name}" for name, _ in model.named_parameters())]
    for name, mine, true, theirs in zip(names, ours, exact, plain, strict=True):
        factor = check.FORWARD_FACTOR if name == "out" else check.GRADIENT_FACTOR
        # A gradient that is 0 but for rounding (of a bias that softmax does not see) has no scale of its own.
        if true.abs().max() > 1e-5:
            check.compare(name, mine, true, theirs, factor=factor).require()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often each kernel's public function was called."""
    counts = {"layer_norm": 0, "flash_attention": 0, "rms_norm": 0}

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name, users in (
        ("layer_norm", ["nn.layers"]),
        ("rms_norm", ["nn.layers"]),
        ("flash_attention", ["nn.swap", "nn.named_attention"]),
    ):
        for user in users:
            monkeypatch.setattr(importlib.import_module(f"kernelbook.{user}"), name, counting(name, getattr(kb, name)))
    yield counts


@pytest.mark.parametrize("name", MODELS)
def test_models_of_pytorchs_modules(name: str, calls: dict[str, int]) -> None:
    make, x, expected = MODELS[name]
    model = make().to(runtime.DEVICE)
    classes, state = [type(m) for m in model.modules()], list(model.state_dict())
    done = swap(model, quiet=True)
    kinds = list(done.changed.values())
    assert {kind: kinds.count(kind) for kind in kinds} == expected and not done.left
    assert list(model.state_dict()) == state
    done.undo()
    assert [type(m) for m in model.modules()] == classes and not done.changed
    _require(model, x())
    ran = (calls["layer_norm"], calls["flash_attention"], calls["rms_norm"])
    assert ran == tuple(expected.get(kind, 0) for kind in ("LayerNorm", "MultiheadAttention", "RMSNorm"))


def test_inference_does_not_pass_over_the_modules(calls: dict[str, int]) -> None:
    """In evaluation PyTorch's encoder has a path of its own, which knows the parameters and not the modules."""
    model = nn.TransformerEncoder(_encoder(), 2).to(runtime.DEVICE).eval()
    x = randn(2, 7, 24)
    padding = torch.zeros(2, 7, dtype=torch.bool, device=runtime.DEVICE)
    padding[1, 5:] = True
    with torch.no_grad():
        expected, padded = model(x), model(x, src_key_padding_mask=padding)
        with swap(model, quiet=True):
            torch.testing.assert_close(model(x), expected)
            assert calls["layer_norm"] == 4 and calls["flash_attention"] == 2
            ours = model(x, src_key_padding_mask=padding)  # attention is PyTorch's, norms are not
            assert calls["layer_norm"] == 8 and calls["flash_attention"] == 2
            torch.testing.assert_close(ours[~padding], padded[~padding])
        assert model.use_nested_tensor and model.layers[0].activation_relu_or_gelu == 1
        model(x)
        assert calls["layer_norm"] == 8


CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "causal": ({"attn_mask": "causal", "is_causal": True}, True),
    "a mask": ({"attn_mask": "causal"}, False),
    "padding": ({"key_padding_mask": "last"}, False),
    "weights": ({"need_weights": True}, False),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("own_sizes", (False, True))
def test_calls_of_multihead_attention(name: str, own_sizes: bool, calls: dict[str, int]) -> None:
    changes, ours = CALLS[name]
    model = nn.MultiheadAttention(24, 3, batch_first=True, **({"kdim": 10, "vdim": 6} if own_sizes else {}))
    x = randn(2, 7, 24)
    key, value = (randn(2, 7, 10), randn(2, 7, 6)) if own_sizes else (x, x)
    masks = {
        "causal": torch.ones(7, 7, dtype=torch.bool, device=runtime.DEVICE).triu(1),
        "last": torch.arange(7, device=runtime.DEVICE).expand(2, 7) >= 5,
    }
    options = {"need_weights": False, **changes}
    options = {k: masks.get(v, v) if isinstance(v, str) else v for k, v in options.items()}

    def forward(model: nn.Module, q: torch.Tensor) -> torch.Tensor:
        return model(q, key.to(q.dtype), value.to(q.dtype), **options)[0]

    _require(model.to(runtime.DEVICE), x, forward)
    assert calls["flash_attention"] == int(ours)


def test_what_is_left_and_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model = nn.ModuleDict(
        {"two": nn.RMSNorm((3, 4)), "own": Own(8), "ours": kb_nn.LayerNorm(8), "wide": nn.MultiheadAttention(600, 2)}
    )
    done = swap(model)
    assert not done.changed and set(done.left) == {"two", "own", "wide"}
    said = capsys.readouterr().out
    assert "swap: ModuleDict runs nothing on kernelbook" in said
    assert "left as it was: two: its normalized_shape (3, 4) has more than one dimension" in said
    assert "left as it was: own: Own is a class of its own" in said
    assert "left as it was: wide: its heads have 300 features, and flash_attention takes at most 256" in said
    only = swap(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), layer_norm=False)
    assert only.changed == {"1": "RMSNorm"}
    assert "swap: Sequential runs 1 RMSNorm on kernelbook" in capsys.readouterr().out
    nn.utils.parametrize.register_parametrization(only.model.get_submodule("1"), "weight", nn.Identity())
    with pytest.raises(RuntimeError, match=r"Swap\.undo: .* gave them, RMSNorm, got ParametrizedRMSNorm; take off"):
        only.undo()
    both = swap(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)).to(runtime.DEVICE), quiet=True).model
    rows = torch.nested.nested_tensor([randn(2, 8), randn(3, 8)], layout=torch.jagged)  # PyTorch's own take those
    torch.testing.assert_close(both(rows).values(), both(rows.values()))
    with pytest.raises(TypeError, match=r"swap: model must be a torch\.nn\.Module, got list"):
        swap([])  # type: ignore[arg-type]


def test_gpt2(calls: dict[str, int]) -> None:
    model, tokens = attention_model("gpt2").train(), token_ids()

    def forward(model: Any, embeddings: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embeddings, use_cache=False).logits

    _require(model, model.transformer.wte(tokens).detach(), forward)
    assert calls == {"layer_norm": 5, "flash_attention": 2, "rms_norm": 0}
    assert model.config._attn_implementation == "eager"
    model.eval()
    padded = torch.ones(2, 9, dtype=torch.int64, device=runtime.DEVICE)
    padded[1, :3] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=padded).logits
        generated = model.generate(tokens[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
        with swap(model, quiet=True) as done:
            assert done.changed["config"] == "attention implementation"
            ours = model(tokens, attention_mask=padded).logits
            torch.testing.assert_close(ours[0], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours[1, 3:], expected[1, 3:], rtol=1e-4, atol=1e-4)
            assert calls["flash_attention"] == 2  # a padded batch is PyTorch's
            again = model.generate(tokens[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
            assert torch.equal(again, generated) and calls["flash_attention"] > 2


def test_sinks_are_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model that PyTorch's attention cannot serve; its rotation has tables for half of a head's features."""
    model, tokens, rotated = attention_model("gpt_oss"), token_ids(), []
    monkeypatch.setattr(rotary, "rotate", lambda *given, rotate=rotary.rotate: rotated.append(1) or rotate(*given))
    with torch.no_grad():
        expected = model(tokens).logits
        with default_dtype(torch.bfloat16):  # of no consequence
            done = swap(model, quiet=True)
        with done:
            assert done.changed["config"] == "attention implementation" and not done.left
            assert list(done.changed.values()).count("RMSNorm") == 5
            assert list(done.changed.values()).count("rotary embedding") == 2
            assert not list(rotary.attentions(model))  # not twice
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(tokens).logits, expected) and len(rotated) == 2
        model.config.output_attentions = True
        with swap(model, quiet=True) as done:
            assert "asks for attention weights" in done.left[""] and len(model(tokens).attentions) == 2


def test_a_compiled_model_turns_queries_and_keys_by_the_kernel() -> None:
    """In gpt-oss the module's function has no closure, whose contents Dynamo's guards would ask for."""
    model, tokens, calls = attention_model("gpt_oss"), token_ids(), []
    model.set_experts_implementation("batched_mm")

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad(), swap(model, quiet=True):
        expected = model(tokens).logits
        torch.testing.assert_close(torch.compile(model, backend=keep, fullgraph=True)(tokens).logits, expected)
    assert sum("rotate" in call for call in calls) == 2, calls


@pytest.mark.parametrize("before", ("eager", "sdpa"))
def test_a_soft_cap_stays(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model that says it can do without, as Gemma2 does in transformers 5.17."""
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    monkeypatch.setattr(Gemma2Model, "_supports_sdpa", True)
    model, tokens = attention_model("gemma2"), token_ids()
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation(before)
        with swap(model, quiet=True) as done:
            assert done.changed["config"] == "attention implementation"
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_norms_of_other_dtypes_are_the_models_own() -> None:
    """T5 keeps a part in float32 when it is loaded in float16; its norm then gives its weight's dtype, Llama's the wider one."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=31, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(runtime.DEVICE, torch.float16).eval()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    tokens = torch.randint(1, 31, (2, 9), device=runtime.DEVICE)
    with torch.no_grad():
        expected = model(tokens, decoder_input_ids=tokens).logits
        with swap(model, quiet=True) as done:
            assert list(done.changed.values()).count("RMSNorm") == 12
            ours = model(tokens, decoder_input_ids=tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    norm, x = LlamaRMSNorm(24).to(runtime.DEVICE), randn(2, 24).bfloat16()
    model = _llama()
    model.model.norm = norm
    with swap(model, quiet=True):
        assert type(norm) is not LlamaRMSNorm and norm(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_norms_of_transformers_give_their_own_dtype_under_autocast(dtype: torch.dtype) -> None:
    """Their code rounds by itself, where PyTorch's own norms give float32."""
    model = _llama().to(dtype)
    norm, x = model.model.norm, randn(2, 32).to(dtype)
    with torch.autocast(runtime.DEVICE.type, dtype=torch.bfloat16):
        expected = norm(x)
        with swap(model, quiet=True):
            ours = norm(x)
    assert ours.dtype == expected.dtype == dtype
    torch.testing.assert_close(ours, expected)


def _llama() -> Any:
    """A Llama whose MLP is 32 wide: on a CPU PyTorch's SiLU gives what is left of a vector of 16 or 32 numbers other bits."""
    return attention_model("llama", intermediate_size=32, num_hidden_layers=1)


def test_a_swapped_model_is_copied_and_pickled(tmp_path: Path) -> None:
    model, tokens = _llama(), torch.arange(1, 10, device=runtime.DEVICE)[None]
    # With the library kernels beside it transformers notes local classes, which pickle refuses.
    for module in model.modules():
        vars(module).pop("_kernel_funcs", None)
    swap(model, quiet=True)
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        expected = model(tokens).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(module) for module in other.modules()] == classes
            assert torch.equal(other(tokens).logits, expected)
    torch.save((model, tokens, expected), tmp_path / "model.pt")
    script = (  # another process knows of no swap
        "import sys, torch\n"
        "model, tokens, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(model(tokens).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], check=True, timeout=300)


def test_sparse_attention_of_an_indexer_stays() -> None:
    """DeepseekV32 puts the keys that it selects into its mask for two names of implementations, and into a keyword for others."""
    config = getattr(transformers, "DeepseekV32Config", None)
    if config is None:
        pytest.skip("this transformers has no DeepseekV32")
    torch.manual_seed(0)
    made = config(
        vocab_size=31, hidden_size=24, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, head_dim=8,
        initializer_range=0.5, index_topk=4, index_head_dim=16, index_n_heads=2,
    )  # fmt: skip
    model = transformers.DeepseekV32ForCausalLM(made).to(runtime.DEVICE).eval()
    tokens = torch.randint(1, 31, (2, 12), device=runtime.DEVICE)
    with torch.no_grad():
        expected = model(tokens).logits
        with swap(model, quiet=True) as done:
            assert "DeepseekV32Attention passes indices to its attention" in done.left[""]
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        transformers_attention.register()
        model.set_attn_implementation(transformers_attention.NAME)
        with pytest.raises(ValueError, match=r"attention_forward: indices must be None .* got Tensor from DeepseekV32"):
            model(tokens)


def test_a_gated_norm_stays() -> None:
    """It is an RMS norm for one argument, and the model gives it two."""
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=31, hidden_size=16, num_heads=4, head_dim=8, state_size=8, num_hidden_layers=1, n_groups=1, chunk_size=4,
    )  # fmt: skip
    model = transformers.Mamba2Model(config)
    tokens = torch.randint(1, 31, (2, 5), device=runtime.DEVICE)
    with torch.no_grad():
        expected = model.to(runtime.DEVICE).eval()(tokens).last_hidden_state
        with swap(model, quiet=True) as done:
            assert done.left["layers.0.mixer.norm"] == "MambaRMSNormGated takes gate too"
            assert list(done.changed.values()) == ["RMSNorm"] * 2
            torch.testing.assert_close(model(tokens).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_an_instance_with_a_forward_of_its_own_stays() -> None:
    """As accelerate's hooks give it, which call the forward that the class had before."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = _llama()
    attention = "model.layers.0.self_attn"
    plain = swap(model, quiet=True)
    expected = {name for name in plain.changed if name in ("model.norm", attention)}
    assert len(expected) == 2
    plain.undo()
    for name in ("model.norm", attention, "lm_head"):
        hooks.add_hook_to_module(model.get_submodule(name), hooks.ModelHook())
    layers = nn.Sequential(nn.LayerNorm(8))
    hooks.add_hook_to_module(layers[0], hooks.ModelHook())
    with swap(model, quiet=True) as done, swap(layers, quiet=True) as of_layers:
        assert done.left.keys() == expected and of_layers.left.keys() == {"0"} and not of_layers.changed
        assert all("a forward of its own" in why for why in done.left.values())
    with pytest.raises(ValueError, match=r"same_bits must be False .*lm_head: it has a forward of its own"):
        swap(model, same_bits=True, quiet=True)


def _gpt_bigcode() -> Any:
    """Its layers are not given the positions."""
    torch.manual_seed(0)
    config = transformers.GPTBigCodeConfig(
        vocab_size=31, n_positions=16, n_embd=24, n_layer=1, n_head=3, initializer_range=0.2, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPTBigCodeForCausalLM(config).to(runtime.DEVICE).eval()


def _gpt_oss() -> Any:
    return attention_model("gpt_oss", intermediate_size=32)


@pytest.mark.parametrize("kind", ("llama", "gpt_oss", "gpt_bigcode"))
def test_packed_sequences_are_alone_within_same_bits(kind: str) -> None:
    """transformers looks at position_ids only without a cache and without a mask, and never for gpt-oss.

    Of 16 tokens each: PyTorch's activations on a CPU are others in the last few numbers of a tensor.
    """
    model = {"llama": _llama, "gpt_oss": _gpt_oss, "gpt_bigcode": _gpt_bigcode}[kind]()
    tokens = torch.randint(1, 31, (1, 32), device=runtime.DEVICE)
    places = torch.arange(16).repeat(2)[None].to(runtime.DEVICE)
    ones = torch.ones_like(tokens)
    left = torch.tensor([[0, 0, 1, 1, 1]], device=runtime.DEVICE)
    cache = transformers.DynamicCache()
    with torch.no_grad(), swap(model, same_bits=True, quiet=True):
        alone = [model(part).logits for part in tokens.split(16, 1)]
        begins = {"cu_seq_lens_q": torch.tensor([0, 16, 32], dtype=torch.int32, device=runtime.DEVICE)}
        for given in ({}, {"attention_mask": ones}, {"use_cache": False}, begins):
            if kind == "gpt_bigcode" and given is begins:  # which hands on no such keywords
                continue
            assert torch.equal(model(tokens, position_ids=places, **given).logits, torch.cat(alone, 1))
        with pytest.raises(ValueError, match="position_ids must not pack sequences where attention_mask tells of one"):
            model(tokens, position_ids=places, attention_mask=torch.cat((ones[:, 1:], 0 * ones[:, :1]), 1))
        model(tokens[:, :3], past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids must not pack sequences where there are keys from before"):
            model(tokens, position_ids=places, past_key_values=cache)
        # What generate gives for a batch that is padded on the left: positions of padding are 1, and then come 0, 1, ...
        of_left = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
        padded = model(tokens[:, :5], attention_mask=left, position_ids=of_left).logits[:, 2:]
        assert torch.equal(padded, model(tokens[:, 2:5]).logits)
