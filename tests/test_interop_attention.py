"""transformers' attention on the kernels: logits, gradients and generated tokens of tiny models are their own."""

import copy
import itertools
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
    # One query, the last, sees all keys.
    last, expected = q[:, :, -1:], _eager_attention_forward(module, q[:, :, -1:], q, q, None, 0.3, gate=gate)[0]
    torch.testing.assert_close(interop.attention_forward(module, last, q, q, None, scaling=0.3, gate=gate)[0], expected)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8), ids=str)
def test_a_mask_of_integers_is_an_error(dtype: torch.dtype) -> None:
    """It would be added to the scores, or mean yes and no: the models do not say. None is taken for a statement.

    Nor is a window without a mask, which a mask function left to the attention: nobody would see to it.
    """
    q = randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"sliding_window must be part of attention_mask .* got 4 for 9 keys and no"):
        interop.attention_forward(torch.nn.Module(), q, q, q, None, sliding_window=4)
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


# As TRL packs: several lengths, one of them 1, and padding at the end, each token of which has position 0. In two rows too.
LENGTHS, PADDING = (5, 1, 4, 7, 1), 2


def _packed(how: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """-> tokens, and what tells where sequences begin; ``rows``: in each row of a batch."""
    places = torch.cat([*map(torch.arange, LENGTHS), torch.zeros(PADDING, dtype=torch.int64)]).to(runtime.DEVICE)
    more: dict[str, Any] = {"position_ids": places.view(2 if how == "rows" else 1, -1), "use_cache": how == "cache"}
    if how == "cu_seq_lens":
        begins = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=runtime.DEVICE)
        more |= {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 7, "max_length_k": 7}
    return tokens(*more["position_ids"].shape), more


@pytest.mark.parametrize("how", ("position_ids", "cache", "cu_seq_lens", "rows"))
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_alone(name: str, how: str, calls: list[dict[str, Any]]) -> None:
    """Logits and gradients of a packed batch, against those of the model's own attention for each sequence."""
    model, count = attention_model(name), sum(LENGTHS)
    ids, more = _packed(how)
    parts = ids.view(1, -1)[:, :count].split(LENGTHS, 1)

    def alone(each: Any) -> list[torch.Tensor]:
        return _with_gradients(each, torch.cat([each(part, use_cache=False).logits for part in parts], 1))

    truth, theirs = alone(copy.deepcopy(model).double()), alone(model)
    ours = _ours(copy.deepcopy(model))
    logits = ours(ids, **more).logits.reshape(1, ids.numel(), -1)
    assert len(calls) == 2 and all(call["cu_seqlens"] is not None and call["n"] == ids.numel() for call in calls)
    for i, (a, b, c) in enumerate(zip(_with_gradients(ours, logits[:, :count]), truth, theirs, strict=True)):
        factor = check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR
        check.compare(f"{name} {i}", a, b, c, factor=factor).require()


def test_a_mask_of_fewer_tokens_than_there_are_hides_the_rest() -> None:
    """Someone forgot the tokens in the cache: it is read as by ``sdpa_mask``, which takes what is missing for padding."""
    model, ids, found = attention_model("llama"), tokens(1, 7), []
    for use in (lambda each: each, _ours):
        each, cache = use(model), transformers.DynamicCache()
        with torch.no_grad():
            each(ids[:, :4], past_key_values=cache)
            found.append(each(ids[:, 4:], past_key_values=cache, attention_mask=torch.ones_like(ids[:, 4:])).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ("llama", "gpt_oss"))
def test_positions_that_skip_or_repeat_pack_nothing(name: str) -> None:
    """As where a short text is to teach a long context, or an image's tokens have one position: no sequence begins."""
    model, ids = attention_model(name), tokens(1, 8)
    places = torch.tensor([[0, 1, 2, 20, 21, 21, 9, 10]], device=runtime.DEVICE)
    given = {"position_ids": places, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = model(ids, **given).logits
        torch.testing.assert_close(_ours(model)(ids, **given).logits, expected, rtol=1e-4, atol=1e-4)


def _with_gradients(model: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    weights = [p for p in model.parameters() if p.requires_grad]
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), weights, materialize_grads=True)]


def test_the_mask_of_packed_sequences_for_others() -> None:
    """A layer with dropout falls back: sequences are told apart there too."""
    q, k, v = (randn(2, 4, 6, 8) for _ in range(3))
    number = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]], device=runtime.DEVICE)
    begins = named_attention.cu_seqlens(number)
    assert begins.tolist() == [0, 2, 5, 6, 10, *[12] * 8]
    for window in (None, 2):
        mask = named_attention.encode_packed(begins, window)
        module = torch.nn.Module()
        ours, _ = interop.attention_forward(module, q, k, v, mask)
        theirs, _ = interop.attention_forward(module, q, k, v, mask, dropout=1e-30)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        with pytest.raises(
            ValueError, match=r"attention_mask must be of booleans or floating point, got torch\.uint64"
        ):
            interop.attention_forward(module, q, k, v, mask[:, :, :-1])
    places = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]], device=runtime.DEVICE)
    for causal in (False, True):
        for more in ({"position_ids": places}, {"cu_seq_lens_q": begins[:6]}):
            ours, theirs = (
                interop.attention_forward(module, q, k, v, None, dropout=p, is_causal=causal, **more)[0]
                for p in (0.0, 1e-30)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", (None, 1, 3))
@pytest.mark.parametrize("stated", (False, True))
def test_what_a_statement_says_to_others(stated: bool, window: int | None) -> None:
    """A layer with dropout falls back, with the mask that the statement stands for."""
    q, k, v = randn(3, 4, 5, 8), randn(3, 2, 9, 8), randn(3, 2, 9, 8)
    lengths = torch.tensor([9, 7, 8], device=runtime.DEVICE) if stated else None
    none = torch.empty(0, dtype=torch.int64, device=runtime.DEVICE)
    mask = named_attention.encode_mask(none if lengths is None else lengths, window)
    made = named_attention.boolean_mask(mask, 3, 5, 9)
    expected = flash_attention(q, k, v, causal=True, lengths=lengths, window=window)
    wide = (t.repeat_interleave(2, dim=1) for t in (k, v))
    torch.testing.assert_close(
        torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=made), expected, rtol=1e-4, atol=1e-5
    )
    module = torch.nn.Module()
    assert named_attention.own_attention(module, q, k, v, mask, 0.5, None, None) is None
    ours, _ = interop.attention_forward(module, q, k, v, mask)
    assert torch.equal(ours, expected.transpose(1, 2))
