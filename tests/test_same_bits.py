"""``same_bits``: what a row becomes depends on that row and the weights only, bit by bit; and without the mode it does not.

Each property has its opposite beside it: the same inputs outside of the mode, where some rows differ. Without that a test
would pass for sizes at which no rule changes its mind.
"""

import asyncio
import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import randn

import kernelbook as kb
from kernelbook import runtime
from kernelbook.attention import kernels_same_bits
from kernelbook.launch import AutotunedLaunch, launcher
from kernelbook.layer_norm import kernels as layer_norm
from kernelbook.nn import LoRAPair, SameBitsLinear, gated_experts, linear, swap
from kernelbook.study import layer_norm_with_locks, scatter_ffn_with_atomics

Rows = Callable[[torch.Tensor], Any]  # from the numbers of rows what becomes of these, a row each


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def rows_of(found: Any, rows: torch.Tensor) -> Any:
    return found[rows] if isinstance(found, torch.Tensor) else tuple(each[rows] for each in found)


# --- the mode -------------------------------------------------------------------------------------------------------


def test_the_mode_belongs_to_a_thread_and_a_task() -> None:
    assert not runtime.in_same_bits()
    seen: list[bool] = []

    async def one(enabled: bool) -> None:
        with kb.same_bits(enabled):
            await asyncio.sleep(0)
            seen.append(runtime.in_same_bits() == enabled)

    async def both() -> None:
        await asyncio.gather(*(asyncio.create_task(one(enabled)) for enabled in (True, False, True)))

    async def within() -> bool:
        return runtime.in_same_bits()

    with kb.same_bits():
        thread = threading.Thread(target=lambda: seen.append(not runtime.in_same_bits()))
        thread.start()
        thread.join()
        with kb.same_bits(False):
            seen.append(not runtime.in_same_bits())
        seen.append(runtime.in_same_bits() and runtime.properties().same_bits)
        seen.append(asyncio.run(within()))
    asyncio.run(both())
    seen.append(not asyncio.run(kb.same_bits()(within)()))
    with pytest.raises(ZeroDivisionError), kb.same_bits():
        raise ZeroDivisionError
    assert seen == [True] * 8 and not runtime.in_same_bits() and not runtime.properties().same_bits
    with pytest.raises(TypeError, match="same_bits: enabled must be a bool, got int"), kb.same_bits(1):  # type: ignore[arg-type]
        pass


def test_nothing_is_autotuned_in_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "autotune_enabled", lambda: True)
    for enabled in (True, False):
        with kb.same_bits(enabled):
            made = launcher(layer_norm._layer_norm_fwd_kernel, repeatable=True, BLOCK_M=3)
        assert isinstance(made, AutotunedLaunch) != enabled


COUNTS = (1, 2, 7, 16, 17, 64, 300, 2048, 16384)


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_rule_looks_at_how_many_rows_there_are(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On no GPU: of each function one kernel, one instruction and one order, for any number of rows, tokens, queries or keys.

    But where ``wgmma`` multiplies, tiles of any width.
    """
    from kernelbook.attention import backward, launches
    from kernelbook.attention import op as attention
    from kernelbook.linear import kernels as of_linear
    from kernelbook.moe_lora import kernels as moe
    from kernelbook.packed import products
    from kernelbook.scatter_ffn import kernels as scatter
    from kernelbook.sparse_linear import kernels as sparse

    # The interpreter has no launches of kernels in Gluon.
    monkeypatch.setattr(products, "launcher", lambda kernel, **how: (kernel.__name__, tuple(how.items())))
    with runtime.compiling_for(target), kb.same_bits():
        p, bf16 = runtime.properties(), torch.bfloat16
        for itemsize in (2, 4, 8):
            for access in ("boxes", "wide", "narrow", "packed"):
                assert len({moe.rows_tiles(m, 128, 0, itemsize, access, p) for m in COUNTS}) == 1
            assert len({moe.shrink_tiles(m, 128, 8192, 16, itemsize, p) for m in COUNTS}) == 1
            blocks = [of_linear.tiles(m, 4096, itemsize, p).kwargs for m in COUNTS]
            if itemsize == 2 and p.is_hopper:
                assert {found["BLOCK_M"] for found in blocks} == {64, 128}  # one or two of the instruction's heights
            else:
                assert blocks == blocks[:1] * len(COUNTS)
            assert {sparse.strategy(m, 4096, 512, 64, itemsize, True, False, p) for m in COUNTS} == {"packed"}
        assert {moe.choose_strategy(m, p) for m in COUNTS} == {"split"}
        assert all(products.decodes_on_the_way(m, 8, p) for m in COUNTS)
        assert {scatter.strategy(m, 4096, 4096, 400, "bfloat16", True, p) for m in COUNTS} == {"packed"}
        for routed in (True, False):
            how = {"rank": 0, "has_bias": False, "x_grouped": False, "y_grouped": True, "routed": routed}
            found = [
                products.plan.__wrapped__(m, (128, 1536, 2048), False, bf16, 64, "float32", **how, properties=p)
                for m in COUNTS
            ]
            launches_of = [None if plan is None else (plan.kind, plan.launch[0], plan.parts) for plan in found]
            assert launches_of == [("gemm", "_many_rows_kernel", 1) if p.is_hopper else None] * len(COUNTS)
        kept = set()
        for b, n, s in ((1, 1, 300), (64, 1, 300), (1, 16, 9000), (2, 2048, 2048), (1, 3, 64)):
            q, k = torch.empty(b, 8, n, 128, dtype=bf16), torch.empty(b, 2, s, 128, dtype=bf16)
            problem = launches.problem(q, k, None, None, True, None, None)
            constants = attention.split_keys(problem).launch.constants
            kept.add(tuple((name, value) for name, value in constants.items() if name != "ROWS"))
            chosen = backward.choose_kernels(launches.with_tma(problem, True, (q, k), (q, k)))
            assert chosen.splits == 1 and chosen.dkdv.launch.kernel.__name__ == "_flash_attention_bwd_dkdv_kernel"
        assert len(kept) == 1


def _atomics(x: torch.Tensor) -> torch.Tensor:
    return scatter_ffn_with_atomics(x, randn(60, 32), randn(60, 20), torch.arange(4, device=x.device))


@pytest.mark.parametrize(
    "function", (layer_norm_with_locks, _atomics), ids=("layer_norm_with_locks", "scatter_ffn_with_atomics")
)
def test_sums_of_no_order_are_refused_where_bits_are_promised(function: Rows, request: pytest.FixtureRequest) -> None:
    name, x = request.node.callspec.id, randn(4, 32)
    with kb.same_bits(), pytest.raises(ValueError, match=rf"{name}: same_bits\(\) must be off"):
        function(x)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=f"{name} has no deterministic implementation"):
            function(x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_cannot_promise_it_says_what_can() -> None:
    x = randn(4, 32)
    with kb.same_bits(), pytest.raises(Exception, match=r"torch.compile must be off within same_bits\(\)"):
        torch.compile(
            lambda x: kb.moe_lora(x, randn(2, 32, 8), None, None, kb.route(torch.zeros_like(x[:, :1]).long(), 2))
        )(x)
    with pytest.raises(Exception, match=r"linear: torch.compile must be off within same_bits\(\)"):
        torch.compile(SameBitsLinear(32, 5, device=runtime.DEVICE), backend="eager")(x)
    with pytest.raises(ValueError, match=r"weight must have shape \(5, 32\), got \(5, 31\)"), kb.same_bits():
        linear(x, randn(5, 31))
    with pytest.raises(TypeError, match=r"linear: .*dtype"), kb.same_bits():
        linear(x, randn(5, 32).half())


# --- rows of products and norms --------------------------------------------------------------------------------------


def _experts(dtype: torch.dtype, packed: str) -> tuple[Rows, int]:
    tokens, k, experts, inner, slots, rank = 36, 256, 3, 32, 2, 4
    x = randn(tokens, k, dtype=dtype)
    gate_up, down = randn(experts, 2 * inner, k, dtype=dtype) / 16, randn(experts, k, inner, dtype=dtype) / 8
    lora = [
        LoRAPair(randn(experts, rank, w.shape[2], dtype=dtype) / 8, randn(experts, w.shape[1], rank, dtype=dtype), 0.5)
        for w in (gate_up, down)
    ]
    weights: Any = gate_up, down
    if packed == "nf4":
        weights = [kb.nf4_quantize(w, block_size=64) for w in weights]
    elif packed == "mxfp4":
        weights = [kb.fp4_quantize(w, format="mxfp4") for w in weights]
    ids = torch.stack([torch.randperm(experts)[:slots] for _ in range(tokens)]).to(x.device)
    gates = torch.rand(tokens, slots).to(x.device)

    def rows(which: torch.Tensor) -> torch.Tensor:
        pairs = {"gate_up_lora": lora[0], "down_lora": lora[1]}
        return gated_experts(x[which], *weights, ids[which], gates[which], **pairs)

    return rows, tokens


def _linear(dtype: torch.dtype) -> tuple[Rows, int]:
    x, w, b = randn(70, 300, dtype=dtype), randn(90, 300, dtype=dtype), randn(90, dtype=dtype)
    return lambda rows: linear(x[rows], w, b), 70


PRODUCTS: dict[str, Callable[[], tuple[Rows, int]]] = {
    "linear": lambda: _linear(torch.float32),
    "linear, bfloat16": lambda: _linear(torch.bfloat16),
    "experts, dense": lambda: _experts(torch.float16, "no"),
    "experts, float32": lambda: _experts(torch.float32, "no"),
    "experts, NF4": lambda: _experts(torch.bfloat16, "nf4"),
    "experts, MXFP4": lambda: _experts(torch.float16, "mxfp4"),
}


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=3)
@given(data=st.data())
def test_rows_alone_in_any_batch_and_in_any_order(name: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    rows, count = PRODUCTS[name]()
    first = data.draw(st.integers(0, count - 1))
    size = data.draw(st.integers(1, count - first))
    with kb.same_bits():
        whole = rows(torch.arange(count))
        for which in (torch.arange(first, first + size), torch.randperm(count), torch.tensor([first] * 3)):
            assert same(rows(which), rows_of(whole, which)), (name, which)


@pytest.mark.skipif(not runtime.INTERPRET, reason="a GPU has sizes of its own below")
def test_without_the_mode_they_differ() -> None:
    rows, count = PRODUCTS["experts, float32"]()
    whole = rows(torch.arange(count))
    assert not all(same(rows(torch.tensor([i])), whole[i : i + 1]) for i in range(count))


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one tile of keys, so that a few keys are several parts."""
    monkeypatch.setattr(kernels_same_bits, "PART", 64)


def _qkv(s: int, dtype: torch.dtype = torch.float16, d: int = 16, b: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(randn(b, heads, s, d, dtype=dtype) for heads in (2, 1, 1))


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "sinks and a soft cap": {"softcap": 20.0, "sinks": True},
}


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("how", HOW)
@settings(max_examples=3)
@given(s=st.integers(130, 300), cut=st.integers(1, 129), seed=st.integers(0, 99))
def test_a_prompt_in_chunks_and_token_by_token(how: str, s: int, cut: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = _qkv(s)
    options = dict(HOW[how])
    if "sinks" in options:
        options["sinks"] = randn(2)
    with kb.same_bits():
        whole = kb.flash_attention(q, k, v, causal=True, **options)
        alone = kb.flash_attention(q[1:], k[1:], v[1:], causal=True, **options)
        assert same(alone, whole[1:])
        last = min(cut + 40, s)
        chunk = kb.flash_attention(q[:, :, cut:last], k[:, :, :last], v[:, :, :last], causal=True, **options)
        assert same(chunk, whole[:, :, cut:last])
        for i in (cut, s - 1):
            seen = slice(0, i + 1)
            one = kb.flash_attention(q[:1, :, i : i + 1], k[:1, :, seen], v[:1, :, seen], causal=True, **options)
            assert same(one, whole[:1, :, i : i + 1])


@pytest.mark.usefixtures("short_parts")
def test_lengths_padding_and_what_is_asked_of_autograd() -> None:
    q, k, v = _qkv(100)
    with kb.same_bits():
        whole = kb.flash_attention(q, k, v, causal=True)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        assert same(kb.flash_attention(*leaves, causal=True).detach(), whole)
        # More room than keys, for each sequence its own.
        room = [torch.cat((t, torch.full_like(t, 9.0)), 2) for t in (k, v)]
        lengths = torch.tensor([100, 71], device=q.device)
        found = kb.flash_attention(q[:, :, 70:71], *room, causal=True, lengths=torch.tensor([71, 71], device=q.device))
        assert same(found, whole[:, :, 70:71])
        found = kb.flash_attention(q[:, :, -1:], *room, causal=True, lengths=lengths)
        assert same(found[0], whole[0, :, -1:]) and not same(found[1], whole[1, :, -1:])


@pytest.mark.usefixtures("short_parts")
@settings(max_examples=5)
@given(page=st.sampled_from([16, 48, 64, 256]), at=st.integers(1, 200), n=st.integers(1, 6), seed=st.integers(0, 99))
def test_pages_of_any_size(page: int, at: int, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    s, at = 200, max(at, n)
    q, k, v = _qkv(s)
    per_sequence = -(-s // page)
    table = torch.randperm(2 * per_sequence, device=q.device).view(2, per_sequence)
    pages = [
        torch.full((2 * per_sequence, 1, page, 16), float("nan"), dtype=q.dtype, device=q.device) for _ in range(2)
    ]
    kb.append_to_pages(k, v, *pages, table, torch.zeros(2, dtype=torch.int64, device=q.device))
    with kb.same_bits():
        whole = kb.flash_attention(q, k, v, causal=True)
        lengths = torch.tensor([at, at], device=q.device)
        assert same(kb.paged_attention(q[:, :, at - n : at], *pages, table, lengths), whole[:, :, at - n : at])


@pytest.mark.skipif(not runtime.INTERPRET, reason="a GPU is asked at the sizes of models, by another test")
def test_without_the_mode_attention_differs() -> None:
    q, k, v = _qkv(200, torch.float32)
    whole = kb.flash_attention(q, k, v, causal=True)
    assert not same(kb.flash_attention(q[:, :, -1:], k, v), whole[:, :, -1:])
    assert not same(kb.flash_attention(q[:1, :, -4:], k[:1], v[:1], causal=True), whole[:1, :, -4:])


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_of_a_sequence_do_not_see_the_others_nor_padding() -> None:
    q, k, v = _qkv(70, torch.float32)
    do = randn(*q.shape)
    found = []
    for b, room in ((slice(0, 2), 70), (slice(1, 2), 70), (slice(1, 2), 90)):
        leaves = [torch.nn.functional.pad(t[b], (0, 0, 0, room - 70)).requires_grad_() for t in (q, k, v)]
        with kb.same_bits():
            o = kb.flash_attention(*leaves, causal=True)
        dqkv = torch.autograd.grad(o, leaves, torch.nn.functional.pad(do[b], (0, 0, 0, room - 70)))
        found.append([t[-1:, :, :70] for t in dqkv])
    assert same(found[0], found[1]) and same(found[0], found[2])


# --- whole models ----------------------------------------------------------------------------------------------------


def _model(name: str) -> Any:
    import transformers

    common = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    if name == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    else:
        own = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**common, **own}))
        if name == "lora":
            import peft

            from kernelbook.interop import transformers as interop

            interop.quantize_experts(model.to(runtime.DEVICE))
            config = peft.LoraConfig(
                r=4, lora_alpha=8, init_lora_weights=False, target_modules=["q_proj", "v_proj"],
                target_parameters=interop.expert_parameters(model),
            )  # fmt: skip
            model = interop.use_kernels(peft.get_peft_model(model, config))  # its pairs are not merged
    return model.to(runtime.DEVICE).eval()


def _log_probs(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """Of all tokens at each place, as a training loop computes them."""
    logits = model(ids, **more).logits
    found: torch.Tensor = logits.float().log_softmax(-1).detach()
    return found


def _ways(
    model: Any, ids: torch.Tensor, short: int, *, generated: bool
) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """By the way in which two sequences (2, N), the first of which has only ``short`` tokens, are read: pairs to be equal."""
    import transformers

    n = ids.shape[1]
    a = _log_probs(model, ids[:1, :short], use_cache=False)[0]
    b = _log_probs(model, ids[1:], use_cache=False)[0]
    packed = torch.cat((ids[0, :short], ids[1]))[None]
    places = torch.cat((torch.arange(short), torch.arange(n)))[None].to(ids.device)
    of_packed = _log_probs(model, packed, position_ids=places, use_cache=False)[0]
    right, left = (torch.ones_like(ids) for _ in range(2))
    right[0, short:], left[0, : n - short] = 0, 0
    moved = torch.cat((ids[0].roll(n - short)[None], ids[1:]))
    from_left = {"attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)}
    of_right = _log_probs(model, ids, attention_mask=right, use_cache=False)
    of_left = _log_probs(model, moved, **from_left, use_cache=False)
    found = {
        "packed": [(of_packed[:short], a), (of_packed[short:], b)],
        "padded": [(of_right[0, :short], a), (of_right[1], b), (of_left[0, n - short :], a), (of_left[1], b)],
    }
    if not generated:
        return found
    cut = n - 3
    with torch.no_grad():
        cache = transformers.DynamicCache()
        steps = [
            _log_probs(model, ids[1:, :9], past_key_values=cache),
            _log_probs(model, ids[1:, 9:cut], past_key_values=cache),
        ]
        steps += [_log_probs(model, ids[1:, i : i + 1], past_key_values=cache) for i in range(cut, n)]
        cache, padded = transformers.DynamicCache(), []
        for begin, end in ((0, cut), *((i, i + 1) for i in range(cut, n))):
            more = {"attention_mask": left[:, :end], "position_ids": from_left["position_ids"][:, begin:end]}
            padded.append(_log_probs(model, moved[:, begin:end], past_key_values=cache, **more))
    both = torch.cat(padded, 1)
    return found | {
        "prompt in chunks, then token by token": [(torch.cat(steps, 1)[0], b)],
        "two at a time, token by token": [(both[0, n - short :], a), (both[1], b)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "lora"])
def test_training_and_generation_agree_bit_by_bit(name: str) -> None:
    model, ids = _model(name), torch.randint(1, 96, (2, 20), device=runtime.DEVICE)
    with swap(model, same_bits=True, quiet=True):
        for way, pairs in _ways(model, ids, 13, generated=True).items():
            assert all(same(*pair) for pair in pairs), way
    with swap(model, quiet=True):
        if name == "qwen3_moe":
            model.set_experts_implementation("kernelbook")
        different = [
            way
            for way, pairs in _ways(model, ids, 13, generated=False).items()
            if not all(same(*pair) for pair in pairs)
        ]
    assert different == ["packed", "padded"]


@pytest.mark.slow
def test_a_step_of_training_packed_or_not_and_checkpointed() -> None:
    """The losses' terms are equal, and so are the gradients of what belongs to one sequence: its embeddings."""
    model, ids = _model("qwen3_moe"), torch.randint(1, 96, (2, 24), device=runtime.DEVICE)
    places = torch.arange(24, device=ids.device).repeat(2)[None]
    found = []
    with swap(model, same_bits=True, quiet=True):
        for packed in (False, True, True):
            model.train()
            if len(found) == 2:
                model.gradient_checkpointing_enable()
            embeddings = model.get_input_embeddings()(ids).detach()
            embeddings = (embeddings.reshape(1, 48, -1) if packed else embeddings).requires_grad_()
            more = {"position_ids": places} if packed else {}
            logits = model(inputs_embeds=embeddings, use_cache=False, **more).logits.view(48, -1)
            terms = torch.nn.functional.cross_entropy(logits, ids.flatten(), reduction="none")
            (gradient,) = torch.autograd.grad(terms.sum(), embeddings)
            found.append((terms.detach(), gradient.reshape(48, -1)))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_swap_takes_what_it_knows_and_refuses_the_rest() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 8)).to(
        runtime.DEVICE
    )
    x, kinds = randn(70, 16), [type(module) for module in model]
    before = copy.deepcopy(model.state_dict())
    with swap(model, same_bits=True, quiet=True) as done:
        assert [type(module) for module in model][::2] == [SameBitsLinear] * 2
        assert list(done.changed.values()) == ["LayerNorm", "Linear", "Linear"]
        whole = model(x)
        assert all(same(model(x[i : i + 1]), whole[i : i + 1]) for i in (0, 33, 69))
        with pytest.raises(ValueError, match="linear: weight must have shape"):
            model(randn(3, 17))
        assert not runtime.in_same_bits()
    assert [type(module) for module in model] == kinds and before.keys() == model.state_dict().keys()
    assert "_call_impl" not in vars(model)
    with pytest.raises(ValueError, match=r"swap: same_bits must be False for this model.*0: Conv1d has weights"):
        swap(torch.nn.Sequential(torch.nn.Conv1d(2, 2, 3)), same_bits=True)
    with pytest.raises(ValueError, match="0: BatchNorm1d normalizes over other rows"):
        swap(torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False)), same_bits=True)
    with pytest.raises(ValueError, match="swap: layer_norm, rms_norm and attention must be True with same_bits=True"):
        swap(model, same_bits=True, attention=False)
    with pytest.raises(TypeError, match="swap: same_bits must be a bool, got int"):
        swap(model, same_bits=1)  # type: ignore[arg-type]


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight.t())


class Scales(Router):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum(0)


def test_swap_takes_a_router_by_its_product() -> None:
    model, x = torch.nn.Sequential(Router()), randn(70, 16)
    with swap(model, same_bits=True, quiet=True):
        whole = model(x)
        assert all(same(model(x[i : i + 1]), whole[i : i + 1]) for i in (0, 33, 69))
        assert same(pickle.loads(pickle.dumps(model[0]))(x), whole)
    with pytest.raises(ValueError, match="0: Scales has weights"):
        swap(torch.nn.Sequential(Scales()), same_bits=True)


def test_a_part_of_a_swapped_model_is_in_the_mode_too() -> None:
    class Probe(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> bool:
            if not x.numel():
                raise KeyboardInterrupt
            return runtime.in_same_bits()

    model: Any = torch.nn.Sequential(torch.nn.Sequential(Probe()))
    with swap(model, same_bits=True, quiet=True), swap(model, same_bits=True, quiet=True):
        assert model(randn(1)) and model[0](randn(1)) and copy.deepcopy(model)(randn(1))
        shallow = copy.copy(model)
        shallow._modules = {}
        assert not isinstance(shallow(randn(1)), bool), "a copy runs its own modules"
        with pytest.raises(KeyboardInterrupt):
            model(randn(0))
        assert not runtime.in_same_bits()
    assert not model(randn(1))


# --- on a GPU, at the sizes of models --------------------------------------------------------------------------------

TOKENS = 2048


def _large_model(kind: str, **sizes: Any) -> Any:
    """OLMoE's sizes, random weights, with LoRA pairs that are not merged; experts dense, in NF4 or in MXFP4."""
    import peft
    import transformers

    from kernelbook.interop import transformers as interop
    from kernelbook.nn.parameters import store_parameter

    own = {"num_hidden_layers": 2, "intermediate_size": 1024, "initializer_range": 0.05}
    config = transformers.OlmoeConfig(**{**own, **sizes})
    with torch.device(runtime.DEVICE):
        model: Any = transformers.OlmoeForCausalLM(config).to(torch.bfloat16).eval()
    for _, experts in interop.expert_modules(model):
        for name in interop.weight_names(experts):
            if kind == "nf4":
                store_parameter(experts, name, kb.nf4_quantize(getattr(experts, name).detach()))
            elif kind == "mxfp4":
                store_parameter(experts, name, kb.fp4_quantize(getattr(experts, name).detach(), format="mxfp4"))
    lora = peft.LoraConfig(
        r=16, lora_alpha=32, init_lora_weights=False, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=interop.expert_parameters(model),
    )  # fmt: skip
    model = peft.get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.02
    return interop.use_kernels(model.to(torch.bfloat16))


@torch.no_grad()
def _generated(model: Any, ids: torch.Tensor, prompt: int, chunk: int) -> torch.Tensor:
    """The same of ids (B, N), of which ``prompt`` tokens are read in chunks, and then one at a time."""
    import transformers

    cache, found, n = transformers.DynamicCache(), [], ids.shape[1] - 1
    cuts = [*range(0, prompt, chunk), *range(prompt, n + 1)]
    for begin, end in itertools.pairwise(cuts):
        log_probs = _log_probs(model, ids[:, begin:end], past_key_values=cache)
        found.append(log_probs.gather(2, ids[:, begin + 1 : end + 1, None])[..., 0])
    return torch.cat(found, 1)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.memory
@pytest.mark.parametrize("kind", ["dense", "nf4", "mxfp4"])
def test_training_and_generation_agree_at_the_sizes_of_a_model(kind: str) -> None:
    """Five packed batches of 2,048 tokens, against generation of 1 to 64 sequences at a time: the divergence is 0."""
    model, length = _large_model(kind), TOKENS // 64
    places = torch.arange(length, device=runtime.DEVICE).repeat(64)[None]
    tokens, different = 0, 0
    for mode in (True, False):
        with swap(model, same_bits=mode, quiet=True):
            for batch in range(5 if mode else 1):
                ids = torch.randint(1, 50000, (64, length + 1), device=runtime.DEVICE)
                logits = model(ids[:, :-1].reshape(1, -1), position_ids=places, use_cache=False).logits
                log_probs = logits.detach().float().log_softmax(-1).view(64, length, -1)
                packed = log_probs.gather(2, ids[:, 1:, None])[..., 0]
                for size in (1, 2, 8, 32, 64) if batch == 0 else (64,):
                    found = _generated(model, ids[:size], 20, (7, 20)[batch % 2])
                    if mode:
                        assert same(found, packed[:size]), (kind, batch, size)
                        tokens += found.numel()
                    else:
                        different += int((found != packed[:size]).sum())
    assert tokens >= 10_000 and different > 0


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16, 512, 4096, 50304])
def test_tiles_of_any_width_at_the_sizes_of_models(n: int) -> None:
    x, w, b = (randn(*shape, dtype=torch.bfloat16) for shape in ((3000, 2048), (n, 2048), (n,)))
    packed = kb.nf4_quantize(w[None])
    with kb.same_bits():
        whole, of_packed = linear(x, w, b), kb.nf4_matmul(x, packed, 0)
        for m in (1, 17, 64, 65, 300, 2048):
            assert same(linear(x[:m], w, b), whole[:m]) and same(kb.nf4_matmul(x[:m], packed, 0), of_packed[:m]), m


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("h", "h_kv", "d"), [(32, 4, 128), (16, 16, 128), (64, 8, 64), (8, 1, 256)])
def test_attention_at_the_sizes_of_models(h: int, h_kv: int, d: int) -> None:
    s = TOKENS
    q, k, v = (randn(4, heads, s, d, dtype=torch.bfloat16) for heads in (h, h_kv, h_kv))
    do = randn(4, h, s, d, dtype=torch.bfloat16)
    with kb.same_bits():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        whole = kb.flash_attention(*leaves, causal=True)
        gradients = torch.autograd.grad(whole, leaves, do)
        one = [t[2:3].clone().requires_grad_() for t in (q, k, v)]
        alone = kb.flash_attention(*one, causal=True)
        assert same(alone, whole[2:3]) and same(torch.autograd.grad(alone, one, do[2:3]), [t[2:3] for t in gradients])
        for begin, end in ((0, 1000), (1000, 1001), (1001, 1016), (1016, 1400), (2047, 2048)):
            of_chunk = kb.flash_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], causal=True)
            assert same(of_chunk, whole[:, :, begin:end]), (begin, end)
            assert same(
                kb.flash_attention(q[1:2, :, begin:end], k[1:2, :, :end], v[1:2, :, :end], causal=True),
                whole[1:2, :, begin:end],
            )
        for page in (16, 32, 64, 128, 256):
            table = torch.randperm(4 * s // page, device=q.device).view(4, s // page)
            pages = [torch.empty(4 * s // page, h_kv, page, d, dtype=q.dtype, device=q.device) for _ in range(2)]
            kb.append_to_pages(k, v, *pages, table, torch.zeros(4, dtype=torch.int64, device=q.device))
            for end, n in ((1500, 1), (2048, 16), (130, 3)):
                lengths = torch.full((4,), end, device=q.device)
                found = kb.paged_attention(q[:, :, end - n : end], *pages, table, lengths)
                assert same(found, whole[:, :, end - n : end]), (page, end)
    assert not same(
        kb.flash_attention(q[:1, :, -1:], k[:1], v[:1]), kb.flash_attention(q, k, v, causal=True)[:1, :, -1:]
    )
