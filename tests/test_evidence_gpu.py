"""What only a GPU can tell, in few and short tests: kernels that the interpreter cannot run, many times over."""

import functools

import kernelbook as kb

# isort: split
import pytest
import torch
from tensors import guarded_memory, randn

from kernelbook import check, memory, runtime
from kernelbook.moe_lora import moe_lora_reference

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16


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
