"""The gated expert block: dense, float8 and 4-bit weights, chosen experts, LoRA pairs."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import refused

from kernelbook import check, runtime
from kernelbook.nf4 import NF4Tensor, nf4_dequantize, nf4_quantize
from kernelbook.nn import ClampedSwiGLU, GatedExperts, MoELayer, NF4Linear, load_balancing_loss, moe
from kernelbook.nn import experts as nn_experts
from kernelbook.nn.moe import Float8Tensor, LoRAPair, choose_experts, gated_experts
from kernelbook.nn.parameters import dense_parameter
from kernelbook.nn.swiglu import swiglu
from kernelbook.packed.fp4 import fp4_quantize

DEVICE = runtime.DEVICE


def reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gates: torch.Tensor,
    ids: torch.Tensor,
    a1: torch.Tensor | None = None,
    b1: torch.Tensor | None = None,
    a2: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    scaling: float = 1.0,
    act: Any = lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
) -> torch.Tensor:
    """An expert at a time. ``act``: of a row of the first product."""

    def linear(rows: torch.Tensor, w: Any, a: Any, b: Any, bias: Any, e: int) -> torch.Tensor:
        out = rows @ w[e].t()
        if a is not None:
            out = out + scaling * (rows @ a[e].t() @ b[e].t())
        return out if bias is None else out + bias[e]

    out, flat = torch.zeros(ids.numel(), down.shape[1], dtype=x.dtype, device=x.device), ids.reshape(-1)
    for e in range(gate_up.shape[0]):
        mine = (flat == e).nonzero()[:, 0]
        h = linear(x[mine // ids.shape[1]], gate_up, a1, b1, bias1, e)
        out = out.index_copy(0, mine, linear(act(h), down, a2, b2, bias2, e))
    return (out.view(*ids.shape, -1) * gates[..., None].to(x.dtype)).sum(1)


def _inputs(
    tokens: int = 9,
    experts: int = 5,
    hidden: int = 24,
    inner: int = 20,
    slots: int = 2,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(DEVICE, dtype)

    inputs = {
        "x": torch.randn(tokens, hidden, device=DEVICE).to(dtype),
        "gate_up": draw(experts, 2 * inner, hidden),
        "down": draw(experts, hidden, inner),
        "gates": torch.rand(tokens, slots, device=DEVICE).to(dtype),
        "a1": draw(experts, rank, hidden),
        "b1": draw(experts, 2 * inner, rank),
        "a2": draw(experts, rank, inner),
        "b2": draw(experts, hidden, rank),
    }
    ids = torch.stack([torch.randperm(experts)[:slots] for _ in range(tokens)]) if tokens else torch.zeros(0, slots)
    return inputs, ids.to(DEVICE, torch.int64)


def _call(ids: torch.Tensor, **settings: Any) -> Any:
    scaling = settings.pop("scaling", 1.0)

    def run(
        x: Any, gate_up: Any, down: Any, gates: Any, a1: Any = None, b1: Any = None, a2: Any = None, b2: Any = None,
        bias1: Any = None, bias2: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return gated_experts(
            x, gate_up, down, ids, gates,
            gate_up_lora=None if a1 is None else LoRAPair(a1, b1, scaling),
            down_lora=None if a2 is None else LoRAPair(a2, b2, scaling),
            gate_up_bias=bias1, down_bias=bias2, **settings,
        )  # fmt: skip

    return run


# --- dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("lora", (True, False), ids=("lora", "plain"))
def test_dense(dtype: torch.dtype, lora: bool) -> None:
    inputs, ids = _inputs(dtype=dtype)
    if not lora:
        inputs = {name: value for name, value in inputs.items() if name[0] not in "ab"}
    check.check_op(
        _call(ids, scaling=0.5), lambda **given: reference(**given, ids=ids, scaling=0.5), inputs, grads=tuple(inputs)
    )


@pytest.mark.parametrize("lora", (True, False), ids=("lora", "plain"))
def test_slots_to_skip_and_biases(lora: bool) -> None:
    inputs, ids = _inputs()
    inputs["bias1"], inputs["bias2"] = torch.randn(5, 40, device=DEVICE), torch.randn(5, 24, device=DEVICE)
    if not lora:
        inputs = {name: value for name, value in inputs.items() if name not in ("a1", "b1", "a2", "b2")}
    ids[2:5, 0] = ids[7, 1] = ids[0] = 5
    check.check_op(_call(ids), lambda **given: reference(**given, ids=ids), inputs, grads=tuple(inputs))


@pytest.mark.parametrize(("activation", "function"), (("gelu", F.gelu), ("relu", F.relu)))
def test_activations(activation: str, function: Any) -> None:
    inputs, ids = _inputs()
    check.check_op(
        _call(ids, activation=activation),
        lambda **given: reference(**given, ids=ids, act=lambda h: function(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]),
        inputs,
        grads=tuple(inputs),
    )


@pytest.mark.parametrize("lora", (True, False), ids=("lora", "plain"))
@pytest.mark.parametrize("kind", ("dense", "mxfp4"))
def test_gpt_oss_experts(kind: str, lora: bool) -> None:
    """Biases, its own activation, and rows of a number of elements that no tile divides."""
    inputs, ids = _inputs(hidden=96, inner=32)
    inputs["gate_up"], inputs["x"] = 8 * inputs["gate_up"], inputs["x"] + 1  # that some are beyond the limit
    inputs["bias1"], inputs["bias2"] = torch.randn(5, 64, device=DEVICE), torch.randn(5, 96, device=DEVICE)
    if not lora:
        inputs = {name: value for name, value in inputs.items() if name not in ("a1", "b1", "a2", "b2")}
    packed = {}
    if kind == "mxfp4":
        packed = {name: fp4_quantize(inputs.pop(name)) for name in ("gate_up", "down")}
    dense = {name: nf4_dequantize(q, dtype=torch.float32) for name, q in packed.items()}
    ours = _call(ids, activation="swigluoai")

    def expected(**given: torch.Tensor) -> torch.Tensor:
        weights = {name: value.to(given["x"].dtype) for name, value in dense.items()}
        return reference(**weights, **given, ids=ids, act=ClampedSwiGLU().reference)

    check.check_op(lambda **given: ours(**packed, **given), expected, inputs, grads=tuple(inputs))


def test_transposed_storage_and_post_expert() -> None:
    inputs, ids = _inputs()
    double = {**inputs, "gate_up": inputs["gate_up"].mT.contiguous(), "down": inputs["down"].mT.contiguous()}
    expected = reference(**inputs, ids=ids)
    torch.testing.assert_close(_call(ids, transposed=True)(**double), expected, rtol=1e-4, atol=1e-5)
    packed = {name: nf4_quantize(double[name]) for name in ("gate_up", "down")}
    dense = {name: nf4_dequantize(q, dtype=torch.float32) for name, q in packed.items()}
    both = (_call(ids, transposed=True)(**{**double, **weights}) for weights in (packed, dense))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    tripled = _call(ids, post_expert=lambda rows: 3 * rows)(**inputs)
    torch.testing.assert_close(tripled, 3 * expected, rtol=1e-4, atol=1e-5)


CLAMPED = ClampedSwiGLU(1.5, 3.0)
ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "swiglu": (swiglu, lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]),
    "clamped": (CLAMPED, CLAMPED.reference),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize(("rows", "inner"), ((1, 1), (9, 300), (0, 8)))
def test_swiglu(name: str, dtype: torch.dtype, rows: int, inner: int) -> None:
    h = (4 * torch.randn(rows, 2 * inner, device=DEVICE)).to(dtype)
    if rows > 1:  # exp(-200) and exp(200) leave the range of float32; the last one is the limit of CLAMPED itself
        h[0], h[1], h[2, ::2] = 200.0, -200.0, 3.0
    for given in (h, h.t().contiguous().t()):
        check.check_op(*ACTIVATIONS[name], {"h": given}, grads=("h",))


def test_clamped_swiglu_keeps_nan() -> None:
    h = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan, torch.inf, 1.0]], device=DEVICE)
    assert ClampedSwiGLU()(h).isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("name", "value"), (("limit", 0.0), ("limit", float("inf")), ("alpha", float("nan")), ("alpha", "1"))
)
def test_clamped_swiglu_names_what_is_wrong(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"ClampedSwiGLU: {name} must be"):
        ClampedSwiGLU(**{name: value})


# --- which experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", ("all", "bound", "auto"))
@pytest.mark.parametrize("tokens", (0, 3, 40))
def test_renamed_ids_stand_for_the_same_experts(active: str, tokens: int) -> None:
    experts, slots = 16, 3
    ids = torch.stack([torch.randperm(experts + 1)[:slots] for _ in range(tokens)]) if tokens else torch.zeros(0, 3)
    ids = ids.to(DEVICE, torch.int64)
    chosen, renamed = choose_experts(ids, experts, active)
    if chosen is None:
        assert renamed is ids
        return
    assert renamed.shape == ids.shape and renamed.dtype == ids.dtype
    assert ((renamed == len(chosen)) == (ids == experts)).all()
    kept = ids < experts
    assert torch.equal(chosen[renamed[kept]].long(), ids[kept])
    assert ids[kept].unique().numel() <= len(chosen) <= ids.numel()


def test_ids_out_of_range_are_renamed_to_slots_to_skip() -> None:
    ids = torch.tensor([[0, -1], [2, 21], [-(2**40), 16]], device=DEVICE)
    chosen, renamed = choose_experts(ids, 16, "bound")
    assert chosen is not None and chosen.min() >= 0 and chosen.max() < 16
    assert (renamed == len(chosen)).tolist() == [[False, True], [False, True], [True, True]]
    assert chosen[renamed[:2, 0]].tolist() == [0, 2]


@pytest.mark.parametrize("active", ("all", "bound"))
@pytest.mark.parametrize("bad", (-1, 17))
def test_ids_out_of_range_raise_where_they_are_checked(active: str, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")
    experts = GatedExperts(16, 24, 20, device=DEVICE).quantize()
    experts.active = active
    ids = torch.tensor([[0, bad], [1, 2]], device=DEVICE)
    with pytest.raises(ValueError, match=r"expert_ids must lie in \[0, 17\), got entries from"):
        experts(torch.randn(2, 24, device=DEVICE), ids, torch.ones(2, 2, device=DEVICE))


# --- compressed -----------------------------------------------------------------------------------------------------


def _compressed(kind: str, weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The weight compressed, and the values that it then stands for."""
    if kind == "nf4":
        q = nf4_quantize(weight, block_size=32, double_quant=True)
        return q, nf4_dequantize(q, dtype=weight.dtype)
    if kind == "mxfp4":
        q = fp4_quantize(weight)
        return q, nf4_dequantize(q, dtype=weight.dtype)
    block = (8, 4)
    experts, rows, cols = weight.shape
    scale = torch.rand(experts, -(-rows // 8), -(-cols // 4), device=DEVICE) + 0.5
    values = Float8Tensor(weight.to(torch.float8_e4m3fn), scale, block)
    spread = scale.repeat_interleave(8, 1)[:, :rows].repeat_interleave(4, 2)[:, :, :cols]
    return values, (values.values.float() * spread).to(weight.dtype)


@pytest.mark.parametrize("kind", ("nf4", "float8"))
@pytest.mark.parametrize("active", ("all", "bound"))
@pytest.mark.parametrize("tokens", (1, 4))
def test_compressed_is_as_dense(kind: str, active: str, tokens: int) -> None:
    """Bit for bit, gradients too: the same products with the same values."""
    inputs, ids = _inputs(tokens, experts=12, hidden=22)
    if tokens > 1:
        ids[0, 0] = ids[-1] = 12
    (gate_up, dense1), (down, dense2) = (_compressed(kind, inputs[name]) for name in ("gate_up", "down"))
    results = []
    for weights in ((dense1, dense2), (gate_up, down)):
        leaves = {
            name: value.clone().requires_grad_() for name, value in inputs.items() if name not in ("gate_up", "down")
        }
        with check.poisoned_empty():
            out = _call(ids, active=active)(gate_up=weights[0], down=weights[1], **leaves)
            out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves.values())])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ((3, 16, 12), (2, 9, 5)))
@pytest.mark.parametrize("block", (None, (8, 4)))
def test_float8_dequantize(shape: tuple[int, int, int], block: tuple[int, int] | None) -> None:
    values = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
    tiles = (1, 1) if block is None else (-(-shape[1] // 8), -(-shape[2] // 4))
    q = Float8Tensor(values, torch.rand(shape[0], *tiles, device=DEVICE), block)
    assert q.device == values.device and q.shape == shape
    bi, bj = q.tile
    spread = q.scale.repeat_interleave(bi, 1)[:, : shape[1]].repeat_interleave(bj, 2)[:, :, : shape[2]]
    expected = (values.double() * spread).float()
    assert torch.equal(q.dequantize(dtype=torch.float32), expected)
    picked = torch.tensor([1, 0, 1], device=DEVICE)
    assert torch.equal(q.dequantize(picked, torch.bfloat16), expected.bfloat16()[picked])
    with pytest.raises(ValueError, match="Float8Tensor: block must be at least 1, got 0"):
        Float8Tensor(values, q.scale, (0, bj))


@pytest.mark.parametrize("active", ("auto", "all", "bound"))
def test_vmap_takes_compressed_experts(active: str) -> None:
    layer = MoELayer(4, 32, 32, 1, device=DEVICE)
    layer.experts.add_lora(2).quantize().active = active
    torch.nn.init.normal_(layer.experts.down_b)
    found = []
    for calls in (torch.vmap(layer), lambda x: torch.stack([*map(layer, x)])):
        x = torch.ones(2, 2, 32, device=DEVICE).cumsum(0).requires_grad_()
        out = calls(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, layer.experts.down_a])])
    torch.testing.assert_close(*found)


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, Any]]]:
    """Each call that makes weights dense: the number of experts, and a weak reference to the dense storage."""
    import weakref

    calls: list[tuple[int, Any]] = []
    real = nn_experts._dequantize

    def spy(*args: Any) -> torch.Tensor:
        out = real(*args)
        calls.append((out.shape[0], weakref.ref(out.untyped_storage())))
        return out

    monkeypatch.setattr(nn_experts, "_dequantize", spy)
    yield calls


def test_only_used_experts_become_dense_and_are_not_kept(dequantized: list[tuple[int, Any]]) -> None:
    inputs, ids = _inputs(3, experts=12)
    ids[:] = torch.tensor([[4, 7], [7, 4], [4, 4]])
    weights = {name: nf4_quantize(inputs.pop(name), block_size=32) for name in ("gate_up", "down")}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    out = _call(ids, active="bound")(**leaves, **weights)
    gc.collect()
    assert [count for count, _ in dequantized] == [6, 6], "one for each pair, for two products"
    assert all(storage() is None for _, storage in dequantized), "kept for the backward pass"
    out.sum().backward()
    gc.collect()
    assert [count for count, _ in dequantized] == [6] * 4, "made again, once for each product"
    assert all(storage() is None for _, storage in dequantized)
    grad = leaves["a1"].grad
    assert grad is not None and grad[[4, 7]].abs().sum() > 0
    assert not grad[[e for e in range(12) if e not in (4, 7)]].any()


# --- the module -----------------------------------------------------------------------------------------------------


def _module(lora: bool = True) -> GatedExperts:
    torch.manual_seed(1)
    module = GatedExperts(6, 24, 20, device=DEVICE)
    if lora:
        module.add_lora(3, alpha=6)
        for name in ("gate_up_b", "down_b"):
            torch.nn.init.normal_(getattr(module, name))
    return module


def test_module_takes_any_leading_dimensions() -> None:
    module = _module()
    inputs, ids = _inputs(6, experts=6)
    out = module(inputs["x"], ids, inputs["gates"])
    shaped = module(inputs["x"].view(2, 3, 24), ids.view(2, 3, 2), inputs["gates"].view(2, 3, 2))
    assert shaped.shape == (2, 3, 24) and torch.equal(shaped.view(6, 24), out)
    named = {"a1": "gate_up_a", "b1": "gate_up_b", "a2": "down_a", "b2": "down_b"}
    pairs = {short: getattr(module, long) for short, long in named.items()}
    expected = reference(inputs["x"], module.gate_up, module.down, inputs["gates"], ids, **pairs, scaling=2.0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == set(named.values())


def test_module_quantized() -> None:
    module = _module()
    dense = copy.deepcopy(module)
    module.quantize(block_size=32, double_quant=True)
    for name in ("gate_up", "down"):
        q = moe.stored_weight(module, name)
        assert isinstance(q, NF4Tensor) and 8 * q.packed.nbytes == getattr(dense, name).nbytes
        getattr(dense, name).data.copy_(getattr(module, name))
    inputs, ids = _inputs(6, experts=6)
    expected = dense(inputs["x"], ids, inputs["gates"])
    torch.testing.assert_close(module(inputs["x"], ids, inputs["gates"]), expected)
    other = _module().quantize(block_size=32, double_quant=True)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(inputs["x"], ids, inputs["gates"]), module(inputs["x"], ids, inputs["gates"]))
    with pytest.raises(ValueError, match="gate_up must not be parametrized"):
        module.quantize()


def test_loading_takes_over_the_scaling() -> None:
    """A pair means something only with its scaling: under another alpha it would be another network."""
    module = _module()
    other = GatedExperts(6, 24, 20, device=DEVICE).add_lora(3, alpha=60)
    inputs, ids = _inputs(6, experts=6)
    expected = module(inputs["x"], ids, inputs["gates"])
    state = module.state_dict()
    other.load_state_dict(state)
    assert other.scaling == module.scaling == 2.0
    assert torch.equal(other(inputs["x"], ids, inputs["gates"]), expected)
    del state["scaling"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scaling"'):
        other.load_state_dict(state)
    assert "scaling" not in GatedExperts(6, 24, 20).state_dict()
    with pytest.raises(
        ValueError, match=r"GatedExperts.add_lora: the module must have no LoRA pairs yet, got .* rank 3"
    ):
        other.quantize().add_lora(4)
    layer = MoELayer(6, 24, 20, 2, device=DEVICE)
    layer.experts.add_lora(3, alpha=1)
    layer.experts.load_state_dict(module.state_dict())
    again = MoELayer(6, 24, 20, 2, device=DEVICE)
    again.experts.add_lora(3)
    again.load_state_dict(layer.state_dict())
    assert again.experts.scaling == 2.0


@pytest.mark.parametrize("double_quant", (False, True))
def test_a_quantized_module_is_saved_by_every_way(double_quant: bool, tmp_path: Path) -> None:
    """Whole by pickle, too: PyTorch alone refuses that for parametrized modules."""
    module, (inputs, ids) = _module().quantize(block_size=32, double_quant=double_quant), _inputs(6, experts=6)
    expected = module(inputs["x"], ids, inputs["gates"])
    torch.save(module, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    parts = _module().quantize(block_size=32, double_quant=double_quant)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    parts.load_state_dict(torch.load(tmp_path / "state.pt"))
    found = [whole, parts, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(module, str(tmp_path / "state.safetensors"))
    found.append(_module().quantize(block_size=32, double_quant=double_quant))
    safetensors.load_model(found[-1], str(tmp_path / "state.safetensors"))
    for other in found:
        assert torch.equal(other(inputs["x"], ids, inputs["gates"]), expected)
        assert isinstance(moe.stored_weight(other, "down"), NF4Tensor) and other.gate_up.shape == (6, 40, 24)


@pytest.mark.parametrize(
    ("make", "name"),
    ((lambda: _module().quantize(block_size=32), "down"), (lambda: NF4Linear(32, 32, device=DEVICE), "weight")),
    ids=("GatedExperts", "NF4Linear"),
)
def test_a_copy_that_becomes_dense_leaves_the_original_alone(make: Callable[[], Any], name: str) -> None:
    for copied in (copy.deepcopy, lambda module: copy.deepcopy(copy.deepcopy(module)), pickled):
        module = make()
        expected = getattr(module, name)
        other = copied(module)
        dense_parameter(other, name, getattr(other, name).detach())
        assert isinstance(moe.stored_weight(module, name), NF4Tensor)
        assert torch.equal(getattr(module, name), expected) and torch.equal(getattr(other, name), expected)
        assert type(other) is not type(module) and isinstance(copy.deepcopy(module), type(module).__bases__[0])


def pickled(module: torch.nn.Module) -> Any:
    return copy.deepcopy(pickle.loads(pickle.dumps(module)))


@pytest.mark.parametrize("x_dtype", (torch.float16, torch.bfloat16), ids=str)
def test_nf4_linear_has_the_dtype_of_what_comes_in(x_dtype: torch.dtype) -> None:
    """The bias and the pair, which are trained, may be float32."""
    layer = NF4Linear(32, 16, device=DEVICE).add_lora(2)
    assert layer.bias.dtype == layer.lora_a.dtype == torch.float32
    x = torch.randn(3, 32, device=DEVICE)
    found = layer(x.to(x_dtype))
    assert found.dtype == x_dtype
    torch.testing.assert_close(found.float(), layer(x.to(x_dtype).float()), rtol=0.02, atol=0.02)


def test_conversions_of_a_quantized_module_change_the_dense_dtype_alone() -> None:
    module = _module(lora=False).quantize(block_size=32)
    before = module.down
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        converted = module.to(dtype)
        assert converted.down.dtype == dtype
        torch.testing.assert_close(converted.down, before.to(dtype))
    assert torch.equal(module.down, before)


def test_parameters_are_drawn_again() -> None:
    with torch.device("meta"):
        module = GatedExperts(6, 24, 20).add_lora(3)
    module = module.to_empty(device=DEVICE)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    module.reset_parameters()
    for name, bound in (("gate_up", 24**-0.5), ("down", 20**-0.5), ("gate_up_a", 24**-0.5), ("down_a", 20**-0.5)):
        size = getattr(module, name).abs().max()
        assert 0.9 * bound < size <= bound
    assert not module.gate_up_b.any() and not module.down_b.any()
    packed = module.quantize().state_dict()["parametrizations.down.original"].clone()
    module.reset_parameters()
    assert torch.equal(module.state_dict()["parametrizations.down.original"], packed)


def test_the_layer_takes_an_activation_and_gives_the_loss_of_its_balance() -> None:
    layer, x = MoELayer(6, 24, 20, 2, activation="gelu", device=DEVICE), torch.randn(2, 7, 24, device=DEVICE)
    assert layer.experts.activation == "gelu"
    out, loss = layer(x, with_loss=True)
    assert torch.equal(out, layer(x))
    torch.testing.assert_close(layer(x[1:, 3:4]), out[1:, 3:4])  # whatever tokens it comes with
    loss.backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.any()
    pytest.importorskip("transformers", minversion="5")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    theirs = load_balancing_loss_func((layer.router(x).flatten(0, 1),), num_experts=6, top_k=2)
    torch.testing.assert_close(loss, theirs)
    even = torch.full((6, 6), 1 / 6, device=DEVICE)
    ids = torch.stack([torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE).roll(1)], 1)
    assert float(load_balancing_loss(even, ids)) == pytest.approx(2)
    assert float(load_balancing_loss(even[:0], ids[:0])) == 0


# --- a linear layer in 4 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", (False, True), ids=("plain", "lora"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_nf4_linear(dtype: torch.dtype, lora: bool) -> None:
    linear = torch.nn.Linear(48, 40, device=DEVICE, dtype=dtype)
    layer = NF4Linear.from_linear(linear, block_size=32)
    assert layer.state_dict()["parametrizations.weight.original"].nbytes == 48 * 40 // 2
    if lora:
        layer.add_lora(3, alpha=6)
        torch.nn.init.normal_(layer.lora_b)
        assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}
        with pytest.raises(ValueError, match=r"NF4Linear.add_lora: the module must have no LoRA pairs yet"):
            layer.add_lora(3)
    w, bias = layer.weight.detach(), linear.bias.detach()

    def ours(x: torch.Tensor, **pair: torch.Tensor) -> Any:
        return torch.func.functional_call(layer, pair, x)

    def plain(x: torch.Tensor, **pair: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w.to(x.dtype), bias.to(x.dtype))
        return y + 2 * (x @ pair["lora_a"].t() @ pair["lora_b"].t()) if pair else y

    pair = {name: getattr(layer, name).detach() for name in ("lora_a", "lora_b")} if lora else {}
    for rows in ((5,), (2, 9)):
        x = torch.randn(*rows, 48, device=DEVICE).to(dtype)
        check.check_op(ours, plain, {"x": x, **pair}, grads=("x", *pair))
    other = NF4Linear(48, 40, device=DEVICE, dtype=dtype, block_size=32)
    if lora:
        other.add_lora(3)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and f"rank={3 * lora}" in repr(other)
    with pytest.raises(TypeError, match=r"NF4Linear.from_linear: linear must be a torch.nn.Linear, got ReLU"):
        NF4Linear.from_linear(torch.nn.ReLU())


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"gates": torch.zeros(9, 3)}, r"gates must have shape \(9, 2\), got \(9, 3\)"),
        ({"gate_up": torch.zeros(40, 24)}, "gate_up must have shape"),
        ({"gate_up": "w"}, "gate_up must be a tensor, NF4Tensor or Float8Tensor, got str"),
        ({"down": torch.zeros(4, 24, 20)}, r"down must have shape \(5, N, K\), got \(4, 24, 20\)"),
        ({"down": torch.zeros(5, 23, 20)}, "must take and give 24 features"),
        ({"down": torch.zeros(5, 24, 19)}, r"twice the features that down takes \(19\), got 40"),
        ({"b1": torch.zeros(5, 39, 3)}, r"lora_b must have shape \(5, 40, 3\)"),
    ),
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    inputs, ids = _inputs()
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    refused(_call(ids), inputs, moved, message)


def test_bad_settings() -> None:
    inputs, ids = _inputs()
    pair = torch.zeros(5, 3, 24, device=DEVICE), torch.zeros(5, 40, 3, device=DEVICE)
    given = {name: inputs[name] for name in ("x", "gate_up", "down", "gates")} | {"expert_ids": ids}
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"gate_up_lora": (*pair, 1.0)}, "gate_up_lora must be a kernelbook.nn.LoRAPair or None, got tuple"),
        ({"down_lora": LoRAPair(None, pair[1])}, "down_lora.a must be a torch.Tensor, got NoneType"),  # type: ignore
        ({"gate_up_bias": "bias"}, "gate_up_bias must be a torch.Tensor, got str"),
        ({"activation": "tanh"}, "activation must be one of 'silu', 'gelu', 'relu', 'swigluoai', got 'tanh'"),
        ({"active": "some"}, "active must be one of 'auto', 'all', 'bound', got 'some'"),
        ({"expert_ids": ids[:8]}, r"expert_ids must have shape \(9, k\), got \(8, 2\)"),
    )
    for change, message in changes:
        refused(gated_experts, given, change, message)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        _module(lora=False).add_lora(0)
    with pytest.raises(AttributeError, match="GatedExperts has no parameter 'side'"):
        moe.quantize_parameter(_module(), "side")


# --- on a GPU -------------------------------------------------------------------------------------------------------


def _large(tokens: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return _inputs(tokens, experts=64, hidden=512, inner=256, slots=4, rank=16, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (1, 16, 300))
@pytest.mark.parametrize("kind", ("dense", "nf4", "mxfp4", "float8"))
def test_large_blocks(tokens: int, kind: str) -> None:
    inputs, ids = _large(tokens)
    weights: dict[str, Any] = {name: inputs.pop(name) for name in ("gate_up", "down")}
    dense = weights
    if kind != "dense":
        found = {name: _compressed(kind, weight) for name, weight in weights.items()}
        weights, dense = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    check.check_op(
        lambda **given: _call(ids)(**given, **weights),
        lambda **given: reference(**given, **{n: w.to(given["x"].dtype) for n, w in dense.items()}, ids=ids),
        inputs,
        grads=tuple(inputs),
    )


@pytest.mark.gpu
def test_transient_memory_is_given_back() -> None:
    inputs, ids = _large(64)
    weights = {name: nf4_quantize(inputs.pop(name)) for name in ("gate_up", "down")}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = _call(ids, active="all")(**leaves, **weights)
    dense_bytes = 64 * 2 * 256 * 512 * 2
    assert torch.cuda.memory_allocated() - before < 0.2 * dense_bytes
    out.sum().backward()
