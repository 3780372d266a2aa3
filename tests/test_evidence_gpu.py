"""What only a GPU can tell, in few and short tests: kernels that the interpreter cannot run, many times over.

They are what ``tools/evidence/mutants.py`` shows to faults in kernels written in Gluon.
"""

import functools

import kernelbook as kb

# isort: split
import pytest
import torch
from tensors import guarded_memory, randn

from kernelbook import check, launching, runtime
from kernelbook.attention import flash_attention_reference
from kernelbook.moe_lora import moe_lora_reference

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def _repeats(call, times: int = 40) -> None:
    first = call()
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))


@pytest.mark.parametrize("kind", ("full", "causal", "lengths", "window"))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_attention(d: int, kind: str) -> None:
    """Fewer blocks of queries than multiprocessors, and more: programs stay for several, causal ones for pairs of them."""
    for batch, n in ((2, 300), (8, 1000)) if d <= 128 and kind in ("full", "causal") else ((3, 700),):
        q, k, v = (randn(batch, h, n, d, dtype=BF16).requires_grad_() for h in (4, 2, 2))
        given = {"causal": kind != "full"}
        if kind in ("lengths", "window"):
            given["lengths"] = torch.tensor([n, 0, 130], device=q.device)
        if kind == "window":
            given["window"] = 150
        inputs = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        call = functools.partial(kb.flash_attention, **given)
        check.check_op(call, functools.partial(flash_attention_reference, **given), inputs, grads=("q", "k", "v"))
        do = randn(batch, 4, n, d, dtype=BF16)
        _repeats(lambda call=call, q=q, k=k, v=v, do=do: torch.autograd.grad(call(q, k, v), (q, k, v), do), times=15)


@pytest.mark.parametrize("m", (1, 4, 8))
def test_few_rows_of_packed_weights(m: int) -> None:
    for n, k in ((200, 256), (1024, 512)):
        q = kb.nf4_quantize(randn(2, n, k))
        w = kb.nf4_dequantize(q, dtype=torch.float32)[1]
        x = randn(m, k, dtype=BF16)
        check.check_op(lambda x, q=q: kb.nf4_matmul(x, q, 1), lambda x, w=w: x @ w.to(x.dtype).t(), {"x": x})
        _repeats(lambda x=x, q=q: (kb.nf4_matmul(x, q, 1),))


@pytest.mark.parametrize("tokens", (3, 40, 300))
def test_packed_experts(tokens: int) -> None:
    experts, n, k, rank = 6, 256, 512, 16
    ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :2]
    q = kb.nf4_quantize(randn(experts, n, k) / k**0.5)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    inputs = {
        "x": randn(tokens, k, dtype=BF16),
        "lora_a": randn(experts, rank, k, dtype=BF16) / k**0.5,
        "lora_b": randn(experts, n, rank, dtype=BF16),
    }
    routing = kb.route(ids, experts)
    check.check_op(
        functools.partial(kb.moe_lora, w=q, routing=routing, scaling=0.5),
        lambda **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=ids, scaling=0.5, **t),
        inputs,
    )
    _repeats(lambda: (kb.moe_lora(w=q, routing=routing, **inputs),))


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
    with monkeypatch.context() as patch, launching.poisonable():
        untouched = guarded_memory(patch)
        again = call(**inputs)
    assert untouched() and torch.equal(again, first)
    q.absmax.view(experts, n, k // 64)[:, 5, 0] = float("inf")
    others = torch.arange(n, device=first.device) != 5
    assert torch.equal(call(**inputs)[:, others], first[:, others])


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
    _repeats(lambda: (call(),), times=300)
