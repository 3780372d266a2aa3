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

from bench import moe_block
from kernelbook import check, runtime
from kernelbook.lab import timing
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
    act: Any = F.silu,
    rows_to: Any = None,
) -> torch.Tensor:
    """One token and one slot at a time. ``rows_to``: for another activation than of the gate alone."""

    def linear(row: torch.Tensor, w: Any, a: Any, b: Any, bias: Any, e: int) -> torch.Tensor:
        out = w[e] @ row
        if a is not None:
            out = out + scaling * (b[e] @ (a[e] @ row))
        return out if bias is None else out + bias[e]

    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if e < gate_up.shape[0]:
                h = linear(x[t], gate_up, a1, b1, bias1, e)
                gate, up = h.chunk(2)
                hidden = act(gate) * up if rows_to is None else rows_to(h)
                total = total + gates[t, j].to(x.dtype) * linear(hidden, down, a2, b2, bias2, e)
        rows.append(total)
    return torch.stack(rows)


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


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("lora", (True, False), ids=("lora", "plain"))
def test_dense(dtype: torch.dtype, lora: bool) -> None:
    inputs, ids = _inputs(dtype=dtype)
    if not lora:
        inputs = {name: value for name, value in inputs.items() if name[0] not in "ab"}
    check.check_op(
        _call(ids, scaling=0.5), lambda **given: reference(**given, ids=ids, scaling=0.5), inputs, grads=tuple(inputs)
    )


@pytest.mark.parametrize(("tokens", "experts", "slots"), ((1, 1, 1), (1, 7, 3), (17, 3, 3)))
def test_shapes(tokens: int, experts: int, slots: int) -> None:
    inputs, ids = _inputs(tokens, experts, 17, 11, slots, 1)
    check.check_op(_call(ids), lambda **given: reference(**given, ids=ids), inputs, grads=tuple(inputs))


@pytest.mark.parametrize("kind", ("dense", "nf4"))
def test_no_tokens(kind: str) -> None:
    inputs, ids = _inputs(0)
    if kind == "nf4":
        inputs |= {name: nf4_quantize(inputs[name]) for name in ("gate_up", "down")}
    inputs["a1"].requires_grad_()
    out = _call(ids)(**inputs)
    out.sum().backward()
    assert out.shape == (0, 24) and not inputs["a1"].grad.any()


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
        lambda **given: reference(**given, ids=ids, act=function),
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
        return reference(**weights, **given, ids=ids, rows_to=ClampedSwiGLU().reference)

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


def test_autocast() -> None:
    """Under autocast products are in its dtype, and the result is in the dtype of x."""
    inputs, ids = _inputs()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = _call(ids)(**inputs)
    assert out.dtype == torch.float32
    expected = reference(**inputs, ids=ids)
    assert 1e-5 < check.relative_error(out, expected) < 0.02


def test_swiglu_gradient() -> None:
    h = torch.randn(5, 12, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (h,))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("rows", "inner"), ((1, 1), (5, 257), (9, 300), (0, 8)))
def test_swiglu(dtype: torch.dtype, rows: int, inner: int) -> None:
    h = (4 * torch.randn(rows, 2 * inner, device=DEVICE)).to(dtype)
    if rows > 1:
        h[0] = 200.0  # exp(-200) and exp(200) leave the range of float32
        h[1] = -200.0
    check.check_op(swiglu, lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], {"h": h}, grads=("h",))


def test_swiglu_is_an_operator() -> None:
    h, dout = (torch.randn(5, n, device=DEVICE).bfloat16() for n in (14, 7))
    torch.library.opcheck(torch.ops.kernelbook.swiglu.default, (h.requires_grad_(), None, None, ""))
    torch.library.opcheck(torch.ops.kernelbook.swiglu_backward.default, (h.detach(), dout, None, None, ""))


CLAMPED = ClampedSwiGLU(1.5, 3.0)


def test_clamped_swiglu_gradient() -> None:
    h = 3 * torch.randn(5, 12, dtype=torch.float64, device=DEVICE)
    assert torch.autograd.gradcheck(CLAMPED, (h.requires_grad_(),))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("rows", "inner"), ((1, 1), (5, 257), (9, 300), (0, 8)))
def test_clamped_swiglu(dtype: torch.dtype, rows: int, inner: int) -> None:
    h = (4 * torch.randn(rows, 2 * inner, device=DEVICE)).to(dtype)
    if rows > 1:
        h[0], h[1], h[2, ::2] = 200.0, -200.0, 3.0  # the last one is the limit itself
    check.check_op(CLAMPED, CLAMPED.reference, {"h": h}, grads=("h",))


def test_clamped_swiglu_is_an_operator_and_keeps_nan() -> None:
    h, dout = (torch.randn(5, n, device=DEVICE).bfloat16() for n in (14, 7))
    torch.library.opcheck(torch.ops.kernelbook.swiglu.default, (h.requires_grad_(), 1.702, 7.0, ""))
    torch.library.opcheck(torch.ops.kernelbook.swiglu_backward.default, (h.detach(), dout, 1.702, 7.0, ""))
    h = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan, torch.inf, 1.0]], device=DEVICE)
    assert ClampedSwiGLU()(h).isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize(("name", "value"), (("limit", 0.0), ("limit", float("inf")), ("alpha", "1")))
def test_clamped_swiglu_names_what_is_wrong(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"ClampedSwiGLU: {name} must be"):
        ClampedSwiGLU(**{name: value})


def test_swiglu_of_rows_that_are_not_contiguous() -> None:
    h = torch.randn(12, 7, device=DEVICE).t()
    gate, up = h.chunk(2, -1)
    torch.testing.assert_close(swiglu(h), F.silu(gate) * up)


@pytest.mark.parametrize("kind", ("dense", "nf4"))
def test_compiles_to_one_graph(kind: str) -> None:
    inputs, ids = _inputs(tokens=4)
    weights = {name: inputs.pop(name) for name in ("gate_up", "down")}
    if kind == "nf4":
        weights = {name: nf4_quantize(weight, block_size=32) for name, weight in weights.items()}

    def block(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        given = {**inputs, **weights, "x": x, "gates": gates}
        return _call(ids)(**given)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = inputs["x"].clone().requires_grad_()
    out = compiled(x, inputs["gates"])
    out.sum().backward()
    expected = inputs["x"].clone().requires_grad_()
    block(expected, inputs["gates"]).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


# --- which experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", ("all", "bound", "count", "auto"))
@pytest.mark.parametrize("tokens", (0, 1, 2, 3, 40))
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
    used = ids[kept].unique().numel()
    assert len(chosen) == max(used, 1) if active == "count" else used <= len(chosen) <= ids.numel()


@pytest.mark.parametrize("active", ("bound", "count"))
def test_ids_out_of_range_are_renamed_to_slots_to_skip(active: str) -> None:
    ids = torch.tensor([[0, -1], [2, 21], [-(2**40), 16]], device=DEVICE)
    chosen, renamed = choose_experts(ids, 16, active)
    assert chosen is not None and chosen.min() >= 0 and chosen.max() < 16
    assert (renamed == len(chosen)).tolist() == [[False, True], [False, True], [True, True]]
    assert chosen[renamed[:2, 0]].tolist() == [0, 2]


@pytest.mark.parametrize("active", ("all", "bound", "count"))
@pytest.mark.parametrize("bad", (-1, 17))
def test_ids_out_of_range_raise_where_they_are_checked(active: str, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")
    experts = GatedExperts(16, 24, 20, device=DEVICE).quantize()
    experts.active = active
    ids = torch.tensor([[0, bad], [1, 2]], device=DEVICE)
    with pytest.raises(ValueError, match=r"expert_ids must lie in \[0, 17\), got entries from"):
        experts(torch.randn(2, 24, device=DEVICE), ids, torch.ones(2, 2, device=DEVICE))


@pytest.mark.parametrize(("tokens", "expected"), ((1, 8), (4, 32), (8, 64), (9, None), (2048, None)))
def test_automatic_choice_at_128_experts(tokens: int, expected: int | None) -> None:
    chosen, _ = choose_experts(torch.zeros(tokens, 8, dtype=torch.int64, device=DEVICE), 128)
    assert (None if chosen is None else len(chosen)) == expected


def test_count_takes_everything_where_nearly_all_are_active() -> None:
    ids = torch.arange(16, device=DEVICE)[:, None]
    assert choose_experts(ids, 16, "count")[0] is None


# --- compressed -----------------------------------------------------------------------------------------------------


def _compressed(kind: str, weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The weight compressed, and the values that it then stands for."""
    if kind == "nf4":
        q = nf4_quantize(weight, block_size=32, double_quant=True)
        return q, nf4_dequantize(q, dtype=weight.dtype)
    block = (8, 4)
    experts, rows, cols = weight.shape
    scale = torch.rand(experts, -(-rows // 8), -(-cols // 4), device=DEVICE) + 0.5
    values = Float8Tensor(weight.to(torch.float8_e4m3fn), scale, block)
    spread = scale.repeat_interleave(8, 1)[:, :rows].repeat_interleave(4, 2)[:, :, :cols]
    return values, (values.values.float() * spread).to(weight.dtype)


@pytest.mark.parametrize("kind", ("nf4", "float8"))
@pytest.mark.parametrize("active", ("all", "bound", "count"))
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


def test_one_dense_and_one_compressed_weight() -> None:
    inputs, ids = _inputs(3, experts=12)
    down, dense = _compressed("nf4", inputs["down"])
    expected = _call(ids)(**{**inputs, "down": dense})
    torch.testing.assert_close(_call(ids)(**{**inputs, "down": down}), expected, rtol=1e-5, atol=1e-6)


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
    out = _call(ids, active="count")(**leaves, **weights)
    gc.collect()
    assert [count for count, _ in dequantized] == [2, 2], "experts 4 and 7, for two products"
    assert all(storage() is None for _, storage in dequantized), "kept for the backward pass"
    out.sum().backward()
    gc.collect()
    assert [count for count, _ in dequantized] == [2] * 4, "made again, once for each product"
    assert all(storage() is None for _, storage in dequantized)
    grad = leaves["a1"].grad
    assert grad is not None and grad[[4, 7]].abs().sum() > 0
    assert not grad[[e for e in range(12) if e not in (4, 7)]].any()


def test_without_gradients_nothing_is_made_again(dequantized: list[tuple[int, Any]]) -> None:
    inputs, ids = _inputs(3, experts=12, hidden=64, inner=32)
    weights = {name: nf4_quantize(inputs.pop(name)) for name in ("gate_up", "down")}
    with torch.no_grad():
        _call(ids)(**inputs, **weights)
        assert not dequantized  # decoded on the way into the products
        _call(ids, active="all")(**inputs, **weights)
    gc.collect()
    assert len(dequantized) == 2 and all(storage() is None for _, storage in dequantized)


def test_outer_hooks_see_what_is_not_ours() -> None:
    """Checkpointing, or offloading to the CPU, works by hooks; only the dense weights stay out of them."""
    inputs, ids = _inputs(3, experts=12)
    weights = {name: nf4_quantize(inputs.pop(name), block_size=32) for name in ("gate_up", "down")}
    seen: list[tuple[int, ...]] = []
    x = inputs.pop("x").requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = _call(ids)(x=x, **inputs, **weights)
    out.sum().backward()
    assert tuple(x.shape) in seen and not any(shape[-2:] in ((24, 40), (20, 24)) for shape in seen if len(shape) == 3)
    assert x.grad is not None and x.grad.isfinite().all()


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

    def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, *pair: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, w, bias)
        return y + 2 * (x @ pair[0].t() @ pair[1].t()) if pair else y

    for rows in ((5,), (2, 9)):
        x = torch.randn(*rows, 48, device=DEVICE).to(dtype)
        pair = (layer.lora_a.detach(), layer.lora_b.detach()) if lora else ()
        given = (x, layer.weight.detach(), linear.bias.detach(), *pair)
        ours = [x.clone().requires_grad_()]
        upstream = torch.randn(*rows, 40, device=DEVICE).to(dtype)
        out = layer(ours[0])
        out.backward(upstream)
        grads = [ours[0].grad, *((layer.lora_a.grad, layer.lora_b.grad) if lora else ())]
        results = []
        for kind in (torch.float64, dtype):
            leaves = [t.to(kind).requires_grad_() for t in given]
            y = plain(*leaves)
            y.backward(upstream.to(kind))
            results.append([y, leaves[0].grad, *(t.grad for t in leaves[3:])])
        names = ("y", "dx", "da", "db")
        for i, (name, mine, ref, base) in enumerate(zip(names, [out, *grads], *results, strict=False)):
            check.compare(name, mine, ref, base, factor=check.GRADIENT_FACTOR if i else check.FORWARD_FACTOR).require()
        layer.zero_grad()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    other = NF4Linear(48, 40, device=DEVICE, dtype=dtype, block_size=32)
    if lora:
        other.add_lora(3)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and f"rank={3 * lora}" in repr(other)
    with pytest.raises(TypeError, match=r"NF4Linear.from_linear: linear must be a torch.nn.Linear, got ReLU"):
        NF4Linear.from_linear(torch.nn.ReLU())


# --- what is measured -----------------------------------------------------------------------------------------------


def test_a_case_has_the_same_routing_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    first = moe_block._inputs(6, (16, 8, 8, 4))[1]
    assert torch.equal(moe_block._inputs(6, (16, 8, 8, 4))[1], first)
    assert first.sort(1).values.diff(dim=1).min() > 0  # each token to different experts


def test_a_small_case_of_the_benchmark_is_right() -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    for mode in ("forward", "forward_backward"):
        problem = moe_block._case(mode, 3, (12, 64, 64, 2)).build()
        ratios = timing.error_ratios(problem)
        assert {"grouped_mm", "kernelbook", "kernelbook:dense"} <= set(ratios)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    (
        ({"x": torch.zeros(9, 2, 24)}, ValueError, r"x must have shape \(T, H\), got \(9, 2, 24\)"),
        ({"gates": torch.zeros(9, 3)}, ValueError, r"gates must have shape \(9, 2\), got \(9, 3\)"),
        ({"gate_up": torch.zeros(40, 24)}, ValueError, "gate_up must have shape"),
        ({"gate_up": "w"}, TypeError, "gate_up must be a tensor, NF4Tensor or Float8Tensor, got str"),
        ({"down": torch.zeros(4, 24, 20)}, ValueError, r"down must have shape \(5, N, K\), got \(4, 24, 20\)"),
        ({"down": torch.zeros(5, 23, 20)}, ValueError, "must take and give 24 features"),
        ({"down": torch.zeros(5, 24, 19)}, ValueError, r"twice the features that down takes \(19\), got 40"),
        ({"b1": torch.zeros(5, 39, 3)}, ValueError, r"lora_b must have shape \(5, 40, 3\)"),
    ),
)
def test_bad_input(change: dict[str, Any], error: type, message: str) -> None:
    inputs, ids = _inputs()
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        _call(ids)(**{**inputs, **moved})


@pytest.mark.parametrize("packed", (False, True))
def test_tensors_without_values(packed: bool) -> None:
    layer = MoELayer(6, 64, 64, 2, device="meta")
    layer.experts.add_lora(3)
    if packed:
        layer.experts.quantize()
    x = torch.empty(2, 3, 64, device="meta", requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.is_meta and out.shape == x.shape and x.grad is not None and layer.experts.down_b.grad is not None


def test_bad_settings() -> None:
    inputs, ids = _inputs()
    pair = torch.zeros(5, 3, 24, device=DEVICE), torch.zeros(5, 40, 3, device=DEVICE)
    x, gate_up, down, gates = (inputs[name] for name in ("x", "gate_up", "down", "gates"))
    for others, message in (
        ({"gate_up_lora": (*pair, 1.0)}, "gate_up_lora must be a kernelbook.nn.LoRAPair or None, got tuple"),
        ({"down_lora": LoRAPair(None, pair[1])}, "down_lora.a must be a torch.Tensor, got NoneType"),  # type: ignore
        ({"gate_up_bias": "bias"}, "gate_up_bias must be a torch.Tensor, got str"),
    ):
        with pytest.raises(TypeError, match=message):
            gated_experts(x, gate_up, down, ids, gates, **others)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation must be one of 'silu', 'gelu', 'relu', 'swigluoai', got 'tanh'"):
        _call(ids, activation="tanh")(**inputs)
    with pytest.raises(ValueError, match="active must be one of 'auto', 'all', 'bound', 'count', got 'some'"):
        _call(ids, active="some")(**inputs)
    with pytest.raises(ValueError, match=r"expert_ids must have shape \(9, k\), got \(8, 2\)"):
        _call(ids[:8])(**inputs)
    with pytest.raises(TypeError, match="expert_ids must have dtype int64, int32, got float32"):
        _call(ids.float())(**inputs)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        _module(lora=False).add_lora(0)
    with pytest.raises(AttributeError, match="GatedExperts has no parameter 'side'"):
        moe.quantize_parameter(_module(), "side")


# --- on a GPU -------------------------------------------------------------------------------------------------------


def _large(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return _inputs(tokens, experts=64, hidden=512, inner=256, slots=4, rank=16, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (1, 16, 300))
@pytest.mark.parametrize("kind", ("dense", "nf4", "float8"))
def test_large_blocks(tokens: int, kind: str) -> None:
    inputs, ids = _large(tokens)
    weights: dict[str, Any] = {name: inputs.pop(name) for name in ("gate_up", "down")}
    dense = weights
    if kind != "dense":
        found = {name: _compressed(kind, weight) for name, weight in weights.items()}
        weights, dense = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    check.check_op(
        lambda **given: _call(ids)(**given, **weights),
        lambda **given: _rowwise(**given, **{n: w.to(given["x"].dtype) for n, w in dense.items()}, ids=ids),
        inputs,
        grads=tuple(inputs),
    )


def _rowwise(x: Any, gate_up: Any, down: Any, gates: Any, a1: Any, b1: Any, a2: Any, b2: Any, ids: Any) -> Any:
    """The reference, an expert at a time."""
    out = torch.zeros(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    flat = ids.reshape(-1)
    for e in flat.unique().tolist():
        rows = (flat == e).nonzero()[:, 0]
        mine = x[rows // ids.shape[1]]
        gate, up = (mine @ gate_up[e].t() + (mine @ a1[e].t()) @ b1[e].t()).chunk(2, -1)
        hidden = F.silu(gate) * up
        out = out.index_copy(0, rows, hidden @ down[e].t() + (hidden @ a2[e].t()) @ b2[e].t())
    return (out.view(*ids.shape, -1) * gates[..., None].to(x.dtype)).sum(1)


@pytest.mark.gpu
@pytest.mark.parametrize("active", ("all", "bound"))
def test_no_synchronisation(active: str) -> None:
    inputs, ids = _large(8)
    weights = {name: nf4_quantize(inputs.pop(name)) for name in ("gate_up", "down")}
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    _call(ids, active=active)(**leaves, **weights).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _call(ids, active=active)(**leaves, **weights).sum().backward()
        with pytest.raises(RuntimeError, match="synchroniz"):
            _call(ids, active="count")(**leaves, **weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_captures_into_a_graph() -> None:
    """Replayed with another routing it is right there too: what was captured does not depend on it."""
    inputs, ids = _large(8)
    weights = {name: nf4_quantize(inputs.pop(name)) for name in ("gate_up", "down")}
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _call(ids, active="bound")(**inputs, **weights)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _call(ids)(**inputs, **weights)
        ids.copy_(torch.randint(0, 64, ids.shape, device=DEVICE))
        graph.replay()
        assert check.relative_error(out, _call(ids, active="all")(**inputs, **weights)) < 0.01


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
