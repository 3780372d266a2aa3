"""transformers' attention on the kernels: logits, gradients and generated tokens of tiny models are their own."""

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")

import torch
import transformers
from packaging.version import Version
from tensors import randn
from tiny_models import WINDOW, assert_as_eager, attention_model, tokens
from transformers import StaticCache, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernelbook import check, runtime
from kernelbook.attention import flash_attention
from kernelbook.interop import transformers_attention as interop
from kernelbook.nn import named_attention


def _ours(model: Any) -> Any:
    interop.register()
    model.set_attn_implementation(interop.NAME)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the kernel was called with beyond its tensors."""
    found: list[dict[str, Any]] = []

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        found.append({"n": q.shape[2], "s": k.shape[2], **how})
        return flash_attention(q, k, v, **how)

    monkeypatch.setattr(named_attention, "flash_attention", call)
    return found


MODELS = ("gemma2", "gpt2", "gpt_oss", "llama", "mistral", "qwen3_moe")
MIXED = ("gemma2", "gpt_oss")  # one layer with a window, one without


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, calls: list[dict[str, Any]]) -> None:
    assert_as_eager(attention_model(name), _ours)
    assert len(calls) == 2 and all(call["causal"] for call in calls)
    windows = {None, WINDOW} if name in MIXED else {WINDOW if name == "mistral" else None}
    assert {call["window"] for call in calls} == windows
    assert all(("softcap" in call) == (name == "gemma2") and ("sinks" in call) == (name == "gpt_oss") for call in calls)


@pytest.mark.parametrize("cache", ("dynamic", "static"))
@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, cache: str, calls: list[dict[str, Any]]) -> None:
    model, ids = attention_model(name), tokens(2, 6)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected = model.generate(ids, **how)
    assert torch.equal(_ours(model).generate(ids, **how), expected)
    if cache == "static" and Version(transformers.__version__) < Version("5.20"):
        return  # some passes are PyTorch's there
    assert len(calls) == 8  # the first pass and every step of each layer
    if (name, cache) == ("llama", "static"):
        assert calls[0]["s"] == 6 and calls[2]["s"] > 7 and calls[2]["lengths"].tolist() == [7, 7]


def test_several_tokens_after_others(calls: list[dict[str, Any]]) -> None:
    """The last query stands at the last key: a prompt that continues, or a batch of guesses."""
    for name in ("llama", "mistral"):
        model, ids = attention_model(name), tokens(2, 9)
        with torch.no_grad():
            truth = copy.deepcopy(model).double()(ids).logits[:, 5:]
            outputs = []
            for each in (model, _ours(copy.deepcopy(model))):
                past = each(ids[:, :5], use_cache=True).past_key_values
                outputs.append(each(ids[:, 5:], past_key_values=past).logits)
        check.compare(name, outputs[1], truth, outputs[0]).require()
    expected = [(n, window) for window in (None, WINDOW) for n in (5, 5, 4, 4)]
    assert [(call["n"], call["window"]) for call in calls] == expected


@pytest.mark.parametrize("name", ("llama", "mistral"))
def test_padding_is_pytorchs(name: str, calls: list[dict[str, Any]]) -> None:
    model, ids = attention_model(name), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    how = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, **how)
    assert torch.equal(_ours(model).generate(ids, **how), expected)
    # But for the window's later queries, which see none of it.
    assert all(call["n"] == 1 and call["s"] <= WINDOW for call in calls) and (name == "mistral" or not calls)


def test_a_window_with_something_added_is_no_window() -> None:
    window = masking_utils.sliding_window_causal_mask_function(4)
    assert interop._is_window(window, 4) and not interop._is_window(window, 5)
    causal = masking_utils.causal_mask_function
    for other in (masking_utils.and_masks(window, causal), masking_utils.chunked_causal_mask_function(4, None), causal):
        assert not interop._is_window(other, 4)


@pytest.mark.parametrize("name", MIXED)
def test_a_padded_batch_with_sinks_or_a_soft_cap_is_the_models_own(name: str, calls: list[dict[str, Any]]) -> None:
    """PyTorch's attention has neither, and would leave them out (that of transformers 5.17)."""
    model, ids = attention_model(name), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    model.set_attn_implementation("eager")
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=mask)
    assert torch.equal(_ours(model).generate(ids, max_new_tokens=4, do_sample=False, attention_mask=mask), expected)
    # But for the window's later queries, which see none of it.
    assert all(call["n"] == 1 and call["s"] <= WINDOW for call in calls)
    if name == "gpt_oss":  # whose eager experts ask the device which of them are used
        model.set_experts_implementation("batched_mm")
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(step(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def _eager_attention_forward(
    module: torch.nn.Module, q: Any, k: Any, v: Any, mask: Any, scaling: float, gate: Any = 1, **given: Any
) -> Any:
    scores = scaling * q @ k.mT + (0 if mask is None else mask)
    weights = scores.softmax(-1) * gate
    return (weights @ v).transpose(1, 2), weights


class _Gated(torch.nn.Module):
    """An attention with a keyword of which nobody has heard."""

    is_causal = True

    def forward(self, how: Any, q: torch.Tensor, **given: Any) -> Any:
        return (how or _eager_attention_forward)(self, q, q, q, given.pop("mask", None), scaling=0.3, **given)


@pytest.mark.parametrize("is_causal", (True, False))
def test_an_unknown_keyword_is_the_models_own(is_causal: bool, calls: list[dict[str, Any]]) -> None:
    module, q, gate = _Gated(), randn(2, 3, 9, 8), randn(9)
    causal = torch.full((9, 9), -torch.inf, device=runtime.DEVICE).triu(1) if is_causal else None
    none = torch.empty(0, dtype=torch.int64, device=runtime.DEVICE)
    for mask in (None, named_attention.encode_mask(none, None)) if is_causal else (None,):
        ours, _ = module(interop.attention_forward, q, gate=gate, mask=mask, is_causal=is_causal)
        torch.testing.assert_close(ours, module(None, q, gate=gate, mask=causal)[0])
    assert not calls
    module(interop.attention_forward, q, gate=None, use_cache=True, is_causal=is_causal)
    assert len(calls) == 1
    with pytest.raises(ValueError, match=r"attention_forward: other must be None .* got Tensor from _Gated"):
        module(interop.attention_forward, q, other=gate, is_causal=is_causal)


def test_an_unknown_keyword_of_a_module_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is causal, as transformers takes it; one query, the last, sees all keys."""
    monkeypatch.delattr(_Gated, "is_causal")
    module, q, gate = _Gated(), randn(2, 3, 9, 8), randn(9)
    for n in (9, 1):
        causal = torch.full((n, 9), -torch.inf, device=runtime.DEVICE).triu(10 - n)
        ours, _ = interop.attention_forward(module, q[:, :, -n:], q, q, None, scaling=0.3, gate=gate)
        expected, _ = _eager_attention_forward(module, q[:, :, -n:], q, q, causal, 0.3, gate=gate)
        torch.testing.assert_close(ours, expected)


def test_a_window_without_a_mask_is_an_error() -> None:
    """A mask function that leaves windows to the attention: nobody would see to them."""
    q = randn(1, 2, 9, 8)
    with pytest.raises(
        ValueError, match=r"sliding_window must be part of attention_mask .* got 4 for 9 keys and no mask"
    ):
        interop.attention_forward(torch.nn.Module(), q, q, q, None, sliding_window=4)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8), ids=str)
def test_a_mask_of_integers_is_an_error(dtype: torch.dtype) -> None:
    """It would be added to the scores, or mean yes and no: the models do not say. None is taken for a statement."""
    q = randn(1, 2, 9, 8)
    for mask in (torch.ones(1, 1, 9, 9, dtype=dtype), torch.ones(1, 1, 1, 9, dtype=dtype).tril()):
        with pytest.raises(ValueError, match=rf"attention_mask must be of booleans or floating point, got {dtype}"):
            interop.attention_forward(torch.nn.Module(), q, q, q, mask.to(q.device))
        model = _ours(attention_model("llama"))
        with pytest.raises(ValueError, match="attention_mask must be of booleans"):
            model(tokens(1, 9), attention_mask=mask.to(q.device))


class _Selects(torch.nn.Module):
    """An attention that selects keys by its mask, and needs one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[interop.NAME]
        mask = mask if mask is None else mask & (x[:, :, None, :, 0] > 0)
        out: torch.Tensor = attend(self, x, x, x, mask)[0]
        return out


def test_a_module_that_computes_with_masks_needs_its_own() -> None:
    interop.register()
    module, q = _Selects(), randn(1, 2, 9, 8)
    own = torch.ones(1, 1, 9, 9, dtype=torch.bool, device=q.device).tril()
    assert module(q, own).shape == (1, 9, 2, 8)
    with pytest.raises(
        ValueError, match=r"_Selects computes with its attention mask; kernelbook\.nn\.swap leaves it alone"
    ):
        module(q, None)


def test_a_step_compiled_once_serves_all_lengths() -> None:
    model, ids = attention_model("llama"), tokens(2, 7)
    ours = _ours(copy.deepcopy(model))
    step = torch.compile(ours, fullgraph=True, backend="aot_eager")
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        for each, run, cache in ((model, model, caches[0]), (ours, step, caches[1])):
            each(ids[:, :4], past_key_values=cache)
            found = [run(ids[:, i : i + 1], past_key_values=cache).logits for i in range(4, 7)]
            caches.append(found)
    for mine, theirs in zip(caches[3], caches[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", (None, 1, 3))
@pytest.mark.parametrize("stated", (False, True))
def test_what_a_statement_says_to_others(stated: bool, window: int | None) -> None:
    """A layer with dropout falls back, with the mask that the statement stands for."""
    q, k, v = randn(3, 4, 5, 8), randn(3, 2, 9, 8), randn(3, 2, 9, 8)
    lengths = torch.tensor([9, 7, 8], device=runtime.DEVICE) if stated else None
    none = torch.empty(0, dtype=torch.int64, device=runtime.DEVICE)
    mask = named_attention.encode_mask(none if lengths is None else lengths, window)
    made = named_attention.boolean_mask(mask, 5, 9)
    expected = flash_attention(q, k, v, causal=True, lengths=lengths, window=window)
    wide = (t.repeat_interleave(2, dim=1) for t in (k, v))
    torch.testing.assert_close(
        torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=made), expected, rtol=1e-4, atol=1e-5
    )
    module = torch.nn.Module()
    assert named_attention.own_attention(module, q, k, v, mask, 0.5, None, None) is None
    ours, _ = interop.attention_forward(module, q, k, v, mask)
    assert torch.equal(ours, expected.transpose(1, 2))
