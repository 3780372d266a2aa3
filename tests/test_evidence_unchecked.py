"""Ids and lengths out of range as kernels on a GPU get them: on a CPU they are an error, so here nobody looks.

Each is as if it were not there; memory is watched meanwhile.
"""

import kernelbook as kb

# isort: split
import pytest
import torch
from tensors import label, randn

from kernelbook import arguments, runtime

BAD = (-1, 10**6, 2**33 + 1, -(2**40))


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "check_index_values", lambda *_, **__: None)


def _among(good: list[int], first_bad: int) -> torch.Tensor:
    """Ids with others between them: the first that does not exist, and far ones."""
    bad = (first_bad, *BAD)
    listed = [i for pair in zip(good, bad * len(good), strict=False) for i in pair]
    return torch.tensor([first_bad, *listed], device=runtime.DEVICE)


@pytest.mark.parametrize("double", (False, True))
@pytest.mark.parametrize("cols", (64, 37))
def test_experts(cols: int, double: bool) -> None:
    q = kb.nf4_quantize(randn(3, 5, cols), double_quant=double)
    dense = kb.nf4_dequantize(q, dtype=torch.float32)
    ids = torch.cat([_among([2, 0], 3), torch.tensor(BAD, device=q.packed.device)])
    expected = torch.stack([dense[i] if 0 <= i < 3 else torch.zeros_like(dense[0]) for i in ids.tolist()])
    assert torch.equal(kb.nf4_dequantize(q, experts=ids, dtype=torch.float32), expected)
    for i in (*_among([2], 3).tolist(), 2**33 + 1):
        found = kb.nf4_matmul(randn(1, cols), q, torch.tensor([i], device=q.packed.device))
        assert (found == 0).all() == (not 0 <= i < 3)


def test_lengths() -> None:
    q, k, v = (randn(5, 1, n, 16) for n in (9, 20, 20))
    lengths, clamped = (
        torch.tensor(listed, device=q.device) for listed in ([-5, 99, 2**40, 7, 7 - 2**40], [0, 20, 20, 7, 0])
    )
    for causal in (False, True):
        leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
        out = [
            kb.flash_attention(*t, causal=causal, lengths=n) for t, n in zip(leaves, (lengths, clamped), strict=True)
        ]
        grads = [torch.autograd.grad(o.square().sum(), t) for o, t in zip(out, leaves, strict=True)]
        assert torch.equal(*out) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("same_bits", (False, True))
@pytest.mark.parametrize("rows", ((-5, 12, 40), (3, 99, 7, 30), (0, 2**40, -(2**40), 40), (50, 40, 30)), ids=label)
def test_boundaries(rows: tuple[int, ...], same_bits: bool) -> None:
    """What rows see is not defined, but it lies in q, k and v: so all is finite where these are, and memory beside stays."""
    q, k, v = (randn(1, 2, 100, 16) for _ in range(3))
    for t in (q, k, v):
        t[:, :, :30], t[:, :, 70:] = float("nan"), float("nan")  # what lies before and behind
    leaves = [t[:, :, 30:70].requires_grad_() for t in (q, k, v)]
    for causal in (False, True):
        with runtime.same_bits(same_bits):
            o = kb.flash_attention(*leaves, causal=causal, cu_seqlens=torch.tensor(rows, device=q.device))
            grads = torch.autograd.grad(o.square().sum(), leaves)
        assert all(t.isfinite().all() for t in (o, *grads))
