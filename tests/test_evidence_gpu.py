"""What only a GPU can tell, in few and short tests: kernels that the interpreter cannot run, many times over."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import kernelbook as kb

# isort: split
import pytest
import torch
from tensors import guarded_memory, packed, randn

from kernelbook import check, memory, runtime
from kernelbook.moe_lora import moe_lora_reference, scatter2scatter_reference

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16


def _given(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that were drawn on the CPU: a process of few launches need not load kernels for that."""
    return (torch.randn(shape) * scale).to(runtime.DEVICE, dtype)


def _run(function: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], grads: Sequence[str]) -> list[Any]:
    leaves = {name: t.detach().requires_grad_(name in grads) for name, t in inputs.items()}
    out = function(**leaves)
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view(out.shape)
    return [out.detach(), *(torch.autograd.grad(out, [leaves[n] for n in grads], upstream) if grads else ())]


def _check(
    ours: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    grads: Sequence[str] = (),
    times: int = 15,
) -> None:
    """By the rule of check.py; then the same bits again and again."""
    check.check_op(ours, reference, inputs, grads=grads)
    found = _run(ours, inputs, grads)
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(_run(ours, inputs, grads), found, strict=True))


# kind, tokens, N, K, rank, whether there are a bias, gates, a gradient of x; few rows a matrix, and each height of tiles.
PACKED = (
    ("64", 9, 256, 512, 0, False, False),
    ("64", 3, 208, 320, 0, True, False),
    ("64 double", 9, 208, 320, 0, True, False),
    ("32", 9, 208, 320, 0, False, False),
    ("4096 double", 9, 208, 320, 0, False, False),
    ("nvfp4", 9, 208, 320, 0, True, False),
    ("64", 40, 256, 512, 0, False, False),
    ("64", 40, 208, 320, 0, True, True),
    ("64 double", 40, 208, 320, 20, True, False),
    ("32", 40, 208, 320, 0, False, True),
    ("nvfp4", 40, 208, 320, 3, False, True),
    ("64", 100, 256, 512, 16, False, False),
    ("64 double", 100, 208, 320, 0, False, True),
    ("4096 double", 100, 208, 320, 80, True, True),
    ("64", 700, 256, 512, 0, False, False),
    ("64 double", 700, 208, 320, 20, True, True),
)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("problem", PACKED, ids=lambda p: "-".join(map(str, p)))
def test_packed_experts(problem: tuple[Any, ...], dtype: torch.dtype) -> None:
    kind, tokens, n, k, rank, has_bias, backward = problem
    if dtype == F16 and (kind != "64" or tokens == 100):
        pytest.skip("once is enough")
    experts = 5
    ids = torch.rand(tokens, experts).argsort(1)[:, :2]
    ids = ids.masked_fill(torch.rand(ids.shape) < 0.15, experts).to(runtime.DEVICE)
    q = packed(kind, experts, n, k)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    inputs = {"x": _given(tokens, k, dtype=dtype)}
    if rank:
        inputs["lora_a"] = _given(experts, rank, k, dtype=dtype, scale=k**-0.5)
        inputs["lora_b"] = _given(experts, n, rank, dtype=dtype)
    if has_bias:
        inputs["bias"] = _given(experts, n, dtype=dtype)
    given = {"scaling": 0.5} | ({} if rank else {"lora_a": None, "lora_b": None})
    _check(
        functools.partial(kb.moe_lora, w=q, routing=kb.route(ids, experts), **given),
        lambda **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=ids, **given, **t),
        inputs,
        ("x",) if backward else (),
        times=40,
    )


@pytest.mark.parametrize("grouped_in", (False, True))
@pytest.mark.parametrize("tokens", (9, 40, 300))
def test_packed_experts_in_sorted_order(tokens: int, grouped_in: bool) -> None:
    experts, n, k = 5, 208, 320
    ids = torch.rand(tokens, experts).argsort(1)[:, :2].masked_fill(torch.rand(tokens, 2) < 0.15, experts)
    ids = ids.to(runtime.DEVICE)
    q = packed("64", experts, n, k)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    how = {"grouped_in": grouped_in, "grouped_out": not grouped_in}
    _check(
        functools.partial(kb.scatter2scatter, w=q, routing=kb.route(ids, experts), **how),
        lambda x: scatter2scatter_reference(x, w.to(x.dtype), ids, **how),
        {"x": _given(2 * tokens if grouped_in else tokens, k)},
        ("x",),
    )


@pytest.mark.parametrize(("tokens", "k"), ((40, 192), (40, 1088), (120, 1088)))
def test_packed_experts_at_the_edges(tokens: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps and many, the last not full; features that end within a tile; a bias for each expert; slots to skip.

    Nothing is written behind the result, and what is infinite stays in its feature.
    """
    experts, n, rank = 4, 72, 16
    ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :2]
    ids[::5, 1], ids[-1] = experts, experts
    q = kb.nf4_quantize(randn(experts, n, k) / k**0.5)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    inputs = {
        "x": randn(tokens, k, dtype=BF16),
        "lora_a": randn(experts, rank, k, dtype=BF16) / k**0.5,
        "lora_b": randn(experts, n, rank, dtype=BF16),
        "bias": randn(experts, n, dtype=BF16),
    }
    call = functools.partial(kb.moe_lora, w=q, routing=kb.route(ids, experts), scaling=0.5)
    check.check_op(call, lambda **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=ids, scaling=0.5, **t), inputs)
    first = call(**inputs)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_new", None)
        untouched = guarded_memory(patch)
        again = call(**inputs)
    assert untouched() and torch.equal(again, first)
    q.absmax.view(experts, n, k // 64)[:, 5, 0] = float("inf")
    others = torch.arange(n, device=first.device) != 5
    assert torch.equal(call(**inputs)[:, others], first[:, others])


@pytest.mark.memory
def test_packed_products_take_64_bit_offsets() -> None:
    """Low-rank matrices that lie 2^30 elements apart, the memory between them only reserved; a result of 2^31 elements."""
    step, n, k, rank = 2**30, 72, 128, 16
    lora_b = torch.empty(2 * step + n * rank, dtype=BF16, device=runtime.DEVICE).as_strided(
        (3, n, rank), (step, rank, 1)
    )
    lora_b.copy_(randn(3, n, rank))
    q = kb.nf4_quantize(randn(3, n, k) / k**0.5)
    given = {"x": randn(40, k, dtype=BF16), "lora_a": randn(3, rank, k, dtype=BF16) / k**0.5, "w": q}
    routing = kb.route(torch.full((40, 1), 2, device=lora_b.device), 3)
    found = kb.moe_lora(lora_b=lora_b, routing=routing, **given)
    assert torch.equal(found, kb.moe_lora(lora_b=lora_b.contiguous(), routing=routing, **given))
    del lora_b
    rows, n, k = 2**15 + 8, 2**16 + 8, 64
    q, x = kb.nf4_quantize(randn(1, n, k) / 8), randn(rows, k, dtype=BF16)
    routing = kb.route(torch.zeros(rows, 1, dtype=torch.int64, device=x.device), 1)
    y = kb.moe_lora(x, q, None, None, routing)[-16:]
    w = kb.nf4_dequantize(q, dtype=torch.float32)[0].double()
    assert check.relative_error(y, x[-16:].double() @ w.t()) < 0.01


@pytest.mark.parametrize("tokens", (1, 16))
def test_shares_of_a_sum_meet(tokens: int) -> None:
    """Programs that add up others' sums, and a second kernel that starts before the first has ended."""
    x, up, down = (
        randn(tokens, 1024, dtype=BF16),
        randn(4000, 1024, dtype=BF16) / 32,
        randn(4000, 1024, dtype=BF16) / 32,
    )
    rows = torch.randperm(4000, device=x.device)[:1500]
    hidden = (x.double() @ up[rows].double().t()).relu().to(BF16)
    truth, plain = hidden.double() @ down[rows].double(), hidden @ down[rows]
    call = functools.partial(kb.scatter_ffn, x, up, down, rows)
    check.compare("out", call(), truth, plain).require()
    first = call()
    for _ in range(300):
        assert torch.equal(call(), first)
