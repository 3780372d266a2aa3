"""The room attention: every output and gradient by the rule of check.py, and everything around it."""

import contextlib
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tensors import call_with, label, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelbook as kb
from kernelbook import check, memory, operators, runtime
from kernelbook.attention import (
    backward,
    causal_mask_reference,
    flash_attention_backward_reference,
    flash_attention_reference,
    kernels,
    kernels_decode,
    launches,
    op,
)
from kernelbook.lab import compiled, timing

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _qkv(
    b: int, h: int, h_kv: int, n: int, s: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(b, h, n, d, dtype=dtype), randn(b, h_kv, s, d, dtype=dtype), randn(b, h_kv, s, d, dtype=dtype)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None) -> None:
    given = {"causal": causal, "scale": scale}
    # With a single key every probability is 1, and dq and dk are exactly zero. PyTorch's softmax finds that; from delta
    # the difference of two rounded sums remains.
    one_key = k.shape[2] == 1
    check.check_op(
        functools.partial(kb.flash_attention, **given),
        functools.partial(flash_attention_reference, **given),
        {"q": q, "k": k, "v": v},
        grads=("v",) if one_key else ("q", "k", "v"),
    )
    if one_key:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(kb.flash_attention(*leaves, **given).sum(), leaves)
        scale = max(1.0, abs(scale or 1.0)) * float(dv.abs().max()) * k.shape[3]
        epsilon = 10 * torch.finfo(torch.float32 if q.dtype == torch.float64 else q.dtype).eps
        assert max(float(t.abs().max()) if t.numel() else 0.0 for t in (dq, dk)) <= epsilon * scale


# B, H, H_kv, N, S, D: one query, one key, primes, more than one tile, fewer and more queries than keys, shared heads, head
# sizes that are powers of two, and others.
PROBLEMS = (
    (1, 1, 1, 1, 1, 16),
    (2, 3, 3, 7, 7, 32),
    (1, 2, 1, 1, 113, 64),
    (1, 2, 2, 70, 1, 16),
    (1, 4, 2, 64, 64, 64),
    (1, 2, 1, 70, 150, 64),
    (1, 3, 1, 113, 40, 32),
    (1, 2, 1, 70, 70, 128),
    (1, 1, 1, 20, 50, 80),
    (1, 1, 1, 40, 40, 96),
    (1, 2, 1, 40, 20, 256),
    (1, 1, 1, 20, 20, 200),
    (1, 2, 1, 20, 20, 7),
)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_output_and_gradients(problem: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    _check(*_qkv(*problem, dtype=dtype), causal)


@given(
    b=st.integers(1, 2),
    h_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    n=st.integers(0, 50),
    s=st.integers(0, 50),
    d=st.integers(1, 70),
    causal=st.booleans(),
    scale=st.sampled_from((None, 0.3, -0.2, 0.0)),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
)
def test_any_shape(
    b: int, h_kv: int, group: int, n: int, s: int, d: int, causal: bool, scale: float | None, dtype: torch.dtype
) -> None:
    _check(*_qkv(b, h_kv * group, h_kv, n, s, d, dtype=dtype), causal, scale)


def _torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's own, in its plainest form; it aligns the first query with the first key unless given a mask."""
    mask = causal_mask_reference(q.shape[2], k.shape[2], q.device) if causal else None
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("h", "h_kv"), ((2, 2), (4, 2)))
@pytest.mark.parametrize(("n", "s"), ((5, 5), (4, 9)))
def test_reference_is_pytorchs(n: int, s: int, h: int, h_kv: int, causal: bool) -> None:
    leaves = [t.double().requires_grad_() for t in _qkv(2, h, h_kv, n, s, 8)]
    ours, theirs = flash_attention_reference(*leaves, causal=causal), _torch(*leaves, causal)
    torch.testing.assert_close(ours, theirs)
    do = torch.randn_like(theirs)
    exact = torch.autograd.grad(theirs, leaves, do)
    by_hand = flash_attention_backward_reference(do, *(t.detach() for t in leaves), causal=causal)
    for grads in (torch.autograd.grad(ours, leaves, do), by_hand):
        for a, b in zip(grads, exact, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu  # on the CPU PyTorch's attention keeps probabilities in float32
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=label)
@pytest.mark.parametrize("causal", (False, True))
def test_no_less_exact_than_pytorchs(causal: bool, dtype: torch.dtype) -> None:
    """The rule again, with PyTorch's own attention as the baseline instead of the reference in 16 bits."""
    check.check_op(
        functools.partial(kb.flash_attention, causal=causal),
        functools.partial(flash_attention_reference, causal=causal),
        dict(zip("qkv", _qkv(1, 2, 2, 190, 190, 64, dtype=dtype), strict=True)),
        grads=("q", "k", "v"),
        baseline=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """For tests that change how plans are made."""
    operators.forget_plans()
    yield
    operators.forget_plans()


def _tiles(m: int, n: int, d: int) -> kernels.triton.Config:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": kernels.block_d(d)}
    return kernels.triton.Config(blocks, num_warps=4, num_stages=2)


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("descriptors", (False, True))
@pytest.mark.parametrize(("m", "n"), ((16, 16), (16, 64), (64, 16), (32, 32)))
@pytest.mark.parametrize("causal", (False, True))
def test_every_way_to_cut_the_work(
    causal: bool, m: int, n: int, descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small tiles, so that each kind of loop runs several times."""
    if descriptors and not runtime.properties().prefers_tma:
        pytest.skip("no tensor descriptors here")
    monkeypatch.setattr(kernels, "config", lambda kernel, d, *_: _tiles(m, n, d))
    monkeypatch.setattr(kernels, "section", lambda *_: 2)
    monkeypatch.setattr(launches, "HAS_GLUON", False)
    monkeypatch.setattr(launches, "_fit_descriptors", lambda *tensors: descriptors)
    for problem in ((1, 3, 3, 50, 50, 16), (1, 2, 1, 30, 70, 40), (1, 1, 1, 70, 30, 16)):
        dtype = torch.float16
        if problem[-1] == 40 and descriptors and runtime.DEVICE.type == "cuda":
            continue
        _check(*_qkv(*problem, dtype=dtype), causal)


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(("causal", "window"), ((False, None), *((True, window) for window in (None, 1, 20, 45))))
@pytest.mark.parametrize("lengths", (None, (0, 33), (70, 51)))
def test_lengths_and_windows(
    causal: bool, lengths: tuple[int, ...] | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small tiles, so that each kind of loop runs; fewer and more queries than keys; NaN where there is no key."""
    monkeypatch.setattr(
        kernels, "config", lambda kernel, d, *_: _tiles(16, 32, d) if kernel != "dkdv" else _tiles(32, 16, d)
    )
    monkeypatch.setattr(launches, "HAS_GLUON", False)
    for n in (20, 90):
        q, k, v = _qkv(2, 2, 1, n, 70, 16, dtype=torch.float16)
        given: dict[str, Any] = {"causal": causal, "window": window}
        if lengths is not None:
            given["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=runtime.DEVICE)
            for b, length in enumerate(lengths):
                k[b, :, length:], v[b, :, length:] = float("nan"), float("nan")
        check.check_op(
            functools.partial(kb.flash_attention, **given),
            functools.partial(flash_attention_reference, **given),
            {"q": q, "k": k, "v": v},
            grads=("q", "k", "v"),
        )


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(("with_sinks", "softcap"), ((False, 0.7), (True, None), (True, 0.7)))
@pytest.mark.parametrize("seen", ("all", "causal", "window", "lengths", "window and lengths"))
def test_sinks_and_soft_caps(
    seen: str, with_sinks: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few queries and many, in small tiles; in a sequence some queries see no key at all."""
    monkeypatch.setattr(
        kernels, "config", lambda kernel, d, *_: _tiles(16, 32, d) if kernel != "dkdv" else _tiles(32, 16, d)
    )
    monkeypatch.setattr(launches, "HAS_GLUON", False)
    given: dict[str, Any] = {"causal": seen != "all", "softcap": softcap}
    if "window" in seen:
        given["window"] = 13
    if "lengths" in seen:
        given["lengths"] = torch.tensor([0, 30], device=runtime.DEVICE)
    for n, dtype in ((5, torch.float32), (40, torch.float16)):
        inputs = dict(zip("qkv", _qkv(2, 2, 1, n, 36, 16, dtype=dtype), strict=True))
        if with_sinks:
            inputs["sinks"] = 4 * randn(2, dtype=dtype)
        check.check_op(
            functools.partial(kb.flash_attention, **given),
            functools.partial(flash_attention_reference, **given),
            inputs,
            grads=tuple(inputs),
        )


@pytest.mark.parametrize(("n", "scale", "softcap"), ((3, 0.8, 1.3), (17, -2.0, 0.4)))
def test_gradients_with_sinks_and_a_soft_cap(n: int, scale: float, softcap: float) -> None:
    q, k, v = (t.double().requires_grad_() for t in _qkv(1, 2, 1, n, n + 2, 4))
    sinks = randn(2, dtype=torch.float64).requires_grad_()
    call = functools.partial(kb.flash_attention, causal=True, window=9, scale=scale, softcap=softcap)
    ours = lambda q, k, v, sinks: call(q, k, v, sinks=sinks)  # noqa: E731
    assert torch.autograd.gradcheck(ours, (q, k, v, sinks), fast_mode=True)


@pytest.mark.parametrize("n", (3, 40))
def test_sinks_of_every_dtype_and_stride_and_of_no_weight(n: int) -> None:
    q, k, v = _qkv(1, 4, 2, n, n, 16, dtype=torch.float16)
    sinks = randn(4).half()
    expected = kb.flash_attention(q, k, v, causal=True, sinks=sinks)
    spread = torch.stack([sinks, sinks + 9], 1)[:, 0]
    for other in (sinks.float(), sinks.double(), spread):
        assert torch.equal(kb.flash_attention(q, k, v, causal=True, sinks=other), expected)
    plain, none = kb.flash_attention(q, k, v), torch.full((4,), -math.inf, device=q.device)
    assert torch.equal(kb.flash_attention(q, k, v, sinks=none), plain)
    assert not kb.flash_attention(q, k, v, sinks=torch.full((4,), 1e4, device=q.device)).any()
    leaf = sinks.requires_grad_()  # the only one
    kb.flash_attention(q, k, v, sinks=leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.float16 and leaf.grad.any()


@pytest.mark.parametrize("softcap", (1e4, 1e30))
def test_a_soft_cap_that_caps_nothing(softcap: float) -> None:
    """Near zero the hyperbolic tangent must not lose what the scores differ by."""
    q, k, v = _qkv(1, 2, 2, 20, 30, 16)
    torch.testing.assert_close(kb.flash_attention(q, k, v, softcap=softcap), kb.flash_attention(q, k, v))


@pytest.mark.parametrize("window", (40, 2**31 - 30, 2**31 - 1, sys.maxsize, 2**70))
@pytest.mark.parametrize("n", (3, 40))
def test_a_window_that_holds_all_keys_is_none(n: int, window: int) -> None:
    q, k, v = (t.requires_grad_() for t in _qkv(2, 2, 1, n, 40, 16))
    lengths = torch.tensor([40, 21], device=runtime.DEVICE)
    do = randn(2, 2, n, 16)
    for further in ({}, {"lengths": lengths}):
        results = []
        for each in (None, window):
            o = kb.flash_attention(q, k, v, causal=True, window=each, **further)
            results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
        for ours, expected in zip(results[1], results[0], strict=True):
            assert torch.equal(ours, expected)


def test_references_with_lengths_and_windows_are_pytorchs() -> None:
    q, k, v = (t.double() for t in _qkv(2, 4, 2, 5, 9, 8))
    lengths, window = torch.tensor([9, 6], device=q.device), 3
    mask = torch.zeros(2, 1, 5, 9, dtype=torch.bool, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        for i in range(5):
            last = length - 5 + i
            mask[b, 0, i, max(last - window + 1, 0) : last + 1] = True
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    given: dict[str, Any] = {"causal": True, "lengths": lengths, "window": window}
    ours = flash_attention_reference(*leaves, **given)
    torch.testing.assert_close(ours, theirs)
    do = torch.randn_like(ours)
    by_hand = flash_attention_backward_reference(do, *(t.detach() for t in leaves), **given)
    for a, b in zip(torch.autograd.grad(ours, leaves, do), by_hand, strict=True):
        torch.testing.assert_close(a, b)


def test_lengths_out_of_range() -> None:
    """On the CPU an error; kernels take the nearest length there is."""
    q, k, v = _qkv(2, 2, 1, 20, 30, 16)
    lengths = torch.tensor([-5, 31], device=runtime.DEVICE)
    if runtime.DEVICE.type == "cpu":
        with pytest.raises(
            ValueError, match=r"flash_attention: lengths must lie in \[0, 31\), got entries from -5 to 31"
        ):
            kb.flash_attention(q, k, v, lengths=lengths)
        return
    assert torch.equal(
        kb.flash_attention(q, k, v, lengths=lengths), kb.flash_attention(q, k, v, lengths=lengths.clamp(0, 30))
    )


# --- what a query sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "s"), ((90, 90), (70, 130), (130, 70)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
def test_a_causal_query_sees_no_later_key(n: int, s: int, dtype: torch.dtype) -> None:
    q, k, v = _qkv(1, 2, 1, n, s, 16, dtype=dtype)
    first = kb.flash_attention(q, k, v, causal=True)
    for changed in (s // 3, s - 1):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, changed] = 1e4
        other_v[:, :, changed] = -1e4
        again = kb.flash_attention(q, other_k, other_v, causal=True)
        sees = changed - (s - n)  # the first query that sees the changed key
        assert torch.equal(first[:, :, : max(sees, 0)], again[:, :, : max(sees, 0)])
        assert not torch.equal(first[:, :, max(sees, 0) :], again[:, :, max(sees, 0) :])


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_queries_that_see_nothing_give_zeros(dtype: torch.dtype) -> None:
    """With more queries than keys the first ones see none."""
    q, k, v = (t.requires_grad_() for t in _qkv(1, 2, 1, 150, 40, 32, dtype=dtype))
    with check.poisoned_empty():
        o = kb.flash_attention(q, k, v, causal=True)
        do = torch.randn_like(o)
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    assert not o[:, :, :110].any() and o[:, :, 110:].any() and not dq[:, :, :110].any()
    assert all(bool(torch.isfinite(t).all()) for t in (o, dq, dk, dv))
    do[:, :, :110] = 0
    for a, b in zip(torch.autograd.grad(o, (q, k, v), do), (dq, dk, dv), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_very_large_scores(dtype: torch.dtype, causal: bool) -> None:
    """Scores of 1e5 and more: exp overflows from 89 on in float32."""
    q, k, v = _qkv(1, 2, 2, 40, 100, 64, dtype=dtype)
    q, k = q * 100, k * 100
    o = kb.flash_attention(q, k, v, causal=causal)
    assert torch.isfinite(o).all()
    exact = flash_attention_reference(q.double(), k.double(), v.double(), causal=causal)
    assert check.relative_error(o, exact) < 1e-2
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(kb.flash_attention(*leaves, causal=causal).sum(), leaves)
    assert all(bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize("n", (5, 40))
def test_scores_far_below_zero(n: int) -> None:
    """All of them: what is kept of a query's sum is far below zero too, and a key that is not there has a score of zero."""
    q, k, v = _qkv(2, 2, 1, n, 21, 16)
    # By one feature alone: were all keys nearly alike, dQ would be what is left of much larger terms, and show how a machine
    # happens to round a score rather than this.
    q[..., 0], k[..., 0] = 1000, -2
    for causal, lengths in ((False, None), (True, None), (False, torch.tensor([21, 5], device=q.device))):
        given: dict[str, Any] = {"causal": causal, "lengths": lengths}
        check.check_op(
            functools.partial(kb.flash_attention, **given),
            functools.partial(flash_attention_reference, **given),
            {"q": q, "k": k, "v": v},
            grads=("q", "k", "v"),
        )


@pytest.mark.parametrize("n", (5, 40))  # few queries have a kernel of their own
@pytest.mark.parametrize("causal", (False, True))
def test_what_the_backward_pass_is_given(causal: bool, n: int) -> None:
    """The logarithm of each query's sum, and infinity where a query sees no key."""
    q, k, v = _qkv(3, 4, 2, n, 30, 16)
    lengths = torch.tensor([30, 3, 0], device=q.device)
    o, lse = torch.ops.kernelbook.flash_attention(
        q, k, v, lengths, None, None, causal, 0.25, None, None, True, True, ""
    )
    keys, queries = torch.arange(30, device=q.device), torch.arange(n, device=q.device)
    seen = (keys < lengths[:, None, None]).expand(3, n, 30)
    if causal:
        seen = seen & (keys <= (queries[None, :] + lengths[:, None] - n)[..., None])
    scores = 0.25 * q.double() @ k.double().repeat_interleave(2, 1).mT
    expected = torch.logsumexp(scores.masked_fill(~seen[:, None], -float("inf")), -1) / math.log(2)
    nothing = ~seen.any(-1)[:, None].expand(expected.shape)
    assert nothing.any() and torch.equal(lse == float("inf"), nothing) and not o[nothing].any()
    torch.testing.assert_close(lse[~nothing].double(), expected[~nothing], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=label)
def test_extreme_scales(dtype: torch.dtype, sign: int) -> None:
    """A scale next to zero averages the values; a large one picks that of the largest score."""
    q, k, v = _qkv(1, 2, 1, 40, 50, 16, dtype=dtype)
    tolerance = 4 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    mean = v.double().mean(dim=2, keepdim=True).expand(q.shape)
    for scale in (1e-37, 1e-44, 1e-300):
        o = kb.flash_attention(q, k, v, scale=sign * scale)
        torch.testing.assert_close(o.double(), mean, rtol=0, atol=tolerance)
    seen = kb.flash_attention(q, k, v, causal=True, scale=sign * 1e-44)
    torch.testing.assert_close(seen[0, 0, 0].double(), v[0, 0, :11].double().mean(dim=0), rtol=0, atol=tolerance)
    scores = sign * (q.double() @ k.double().mT)
    assert scores.topk(2).values.diff().abs().min() > 1e-4  # no draws
    picked = v.double()[0, 0, scores.argmax(dim=-1)]
    # The largest score times the scale has one rounding: its probability is not quite 1, and o is divided by it again.
    found = kb.flash_attention(q, k, v, scale=sign * 1e6).double()
    torch.testing.assert_close(found, picked, rtol=2 * tolerance, atol=0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's maximum
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=label)
def test_nan_stays_where_it_belongs(dtype: torch.dtype, causal: bool) -> None:
    """In a query: its own row. In a key: the queries that see it, none before."""
    given = _qkv(1, 2, 2, 150, 150, 32, dtype=dtype)
    clean = kb.flash_attention(*given, causal=causal)
    for index, row in ((0, 70), (1, 131)):
        tensors = [t.clone() for t in given]
        tensors[index][0, 1, row, 3] = float("nan")
        out = kb.flash_attention(*tensors, causal=causal)
        bad = torch.zeros(clean.shape[:3], dtype=torch.bool, device=clean.device)
        bad[0, 1, row : row + 1 if index == 0 else None] = True
        if index == 1 and not causal:
            bad[0, 1] = True
        assert out[bad].isnan().all()
        assert torch.equal(out[~bad], clean[~bad])


def test_second_derivatives_are_refused() -> None:
    leaves = [t.requires_grad_() for t in _qkv(1, 1, 1, 5, 5, 16)]
    (dq,) = torch.autograd.grad(kb.flash_attention(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention_backward cannot be differentiated"):
        torch.autograd.grad(dq.sum(), leaves)


def test_equal_scores_average_the_values() -> None:
    q, k, v = _qkv(1, 1, 1, 9, 50, 16)
    mean = v.mean(2, keepdim=True).expand(-1, -1, 9, -1)
    torch.testing.assert_close(kb.flash_attention(q, k, v, scale=0.0), mean)
    torch.testing.assert_close(kb.flash_attention(torch.zeros_like(q), k, v), mean)


def _layouts() -> dict[str, Callable[..., torch.Tensor]]:
    f16 = {"dtype": torch.float16}
    return {
        "(B, N, H, D)": lambda b, h, n, d: randn(b, n, h, d, **f16).transpose(1, 2),
        "packed": lambda b, h, n, d: randn(b, n, h, 3, d, **f16)[:, :, :, 1].transpose(1, 2),
        "transposed": lambda b, h, n, d: randn(b, h, d, n, **f16).mT,
        "every other feature": lambda b, h, n, d: randn(b, h, n, 2 * d, **f16)[..., ::2],
        "not aligned": lambda b, h, n, d: randn(b, h, n, d + 1, **f16)[..., 1:],
        "reversed batch": lambda b, h, n, d: randn(n, h, b, d, **f16).permute(2, 1, 0, 3),
        "expanded heads": lambda b, h, n, d: randn(b, 1, n, d, **f16).expand(b, h, n, d),
        "expanded": lambda b, h, n, d: randn(1, 1, 1, 1, **f16).expand(b, h, n, d),
    }


@pytest.mark.parametrize("layout", _layouts())
@pytest.mark.parametrize("causal", (False, True))
def test_layouts(layout: str, causal: bool) -> None:
    make = _layouts()[layout]
    q, k, v = make(2, 2, 30, 24), make(2, 1, 50, 24), make(2, 1, 50, 24)
    _check(q, k, v, causal)
    _check(q.contiguous(), k, v.contiguous(), causal)
    o = kb.flash_attention(q, k, v)
    if layout == "(B, N, H, D)":
        assert o.stride() == q.stride()


@pytest.mark.parametrize("how", ("expanded", "transposed", "not aligned"))
def test_layouts_of_the_upstream_gradient(how: str) -> None:
    leaves = [t.requires_grad_() for t in _qkv(1, 2, 2, 40, 40, 32)]
    o = kb.flash_attention(*leaves)
    do = _layouts()[how](1, 2, 40, 32).float()
    exact = flash_attention_backward_reference(do.double(), *(t.detach().double() for t in leaves))
    for a, b in zip(torch.autograd.grad(o, leaves, do), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("needed", ("q", "k", "v", "qv"))
def test_only_the_gradients_that_are_needed(needed: str) -> None:
    check.check_op(
        kb.flash_attention,
        flash_attention_reference,
        dict(zip("qkv", _qkv(1, 2, 1, 20, 30, 16), strict=True)),
        grads=tuple(needed),
    )


@pytest.mark.parametrize(
    "problem", ((0, 2, 1, 4, 4, 16), (1, 0, 0, 4, 4, 16), (1, 2, 1, 0, 4, 16), (1, 2, 1, 4, 0, 16), (1, 2, 2, 0, 0, 16)),
    ids=label,
)  # fmt: skip
@pytest.mark.parametrize("causal", (False, True))
def test_zero_sizes(problem: tuple[int, ...], causal: bool) -> None:
    leaves = [t.requires_grad_() for t in _qkv(*problem)]
    with check.poisoned_empty():
        o = kb.flash_attention(*leaves, causal=causal)
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert o.shape == leaves[0].shape and not o.any()
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.shape == leaf.shape and not grad.any()


# --- PyTorch's machinery --------------------------------------------------------------------------------------------


def test_autocast_is_that_of_pytorchs_attention() -> None:
    kind = runtime.DEVICE.type
    leaves = [t.requires_grad_() for t in _qkv(1, 2, 2, 20, 20, 16)]
    with torch.autocast(kind, dtype=torch.bfloat16):
        ours, plain = kb.flash_attention(*leaves), F.scaled_dot_product_attention(*leaves)
    assert ours.dtype == plain.dtype == torch.bfloat16
    for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert check.relative_error(a, b) < 0.01


def test_under_vmap_free_checkpointing() -> None:
    """Recomputed in the backward pass, the result is the same to the bit."""
    from torch.utils.checkpoint import checkpoint

    leaves = [t.requires_grad_() for t in _qkv(1, 2, 2, 30, 30, 16)]
    once = torch.autograd.grad(kb.flash_attention(*leaves, causal=True).square().sum(), leaves)
    again = checkpoint(lambda *t: kb.flash_attention(*t, causal=True), *leaves, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.square().sum(), leaves), once, strict=True):
        assert torch.equal(a, b)


# --- edges ----------------------------------------------------------------------------------------------------------


def _good() -> dict[str, Any]:
    return dict(zip("qkv", _qkv(1, 4, 2, 5, 6, 16), strict=True))


_bad = functools.partial(call_with, kb.flash_attention, _good)


BAD = {
    "q is a list": (_bad(q=[1.0]), TypeError, "flash_attention: q must be a torch.Tensor, got list"),
    "q is integer": (
        _bad(q=lambda: torch.ones(1, 4, 5, 16, dtype=torch.int64, device=runtime.DEVICE)),
        TypeError,
        "flash_attention: q must have dtype float16, bfloat16, float32, float64, got int64",
    ),
    "q has three dimensions": (
        _bad(q=lambda: randn(4, 5, 16)),
        ValueError,
        r"flash_attention: q must have four dimensions, got shape \(4, 5, 16\)",
    ),
    "k of another dtype": (
        _bad(k=lambda: randn(1, 2, 6, 16).half()),
        TypeError,
        r"flash_attention: k must have the dtype of q \(torch.float32\), got torch.float16",
    ),
    "k of another batch": (
        _bad(k=lambda: randn(2, 2, 6, 16)),
        ValueError,
        r"flash_attention: k must have shape \(1, 2, 6, 16\), got \(2, 2, 6, 16\)",
    ),
    "v of another length": (
        _bad(v=lambda: randn(1, 2, 7, 16)),
        ValueError,
        r"flash_attention: v must have shape \(1, 2, 6, 16\), got \(1, 2, 7, 16\)",
    ),
    "heads that do not divide": (
        _bad(k=lambda: randn(1, 3, 6, 16), v=lambda: randn(1, 3, 6, 16)),
        ValueError,
        r"flash_attention: the heads of k and v must divide those of q \(4\), got 3",
    ),
    "no head of k": (
        _bad(k=lambda: randn(1, 0, 6, 16), v=lambda: randn(1, 0, 6, 16)),
        ValueError,
        r"flash_attention: the heads of k and v must divide those of q \(4\), got 0",
    ),
    "large heads": (
        _bad(q=lambda: randn(1, 4, 5, 257)),
        ValueError,
        r"flash_attention: q must have 1 to 256 features a head, got shape \(1, 4, 5, 257\)",
    ),
    "empty heads": (
        _bad(q=lambda: randn(1, 4, 5, 0)),
        ValueError,
        r"flash_attention: q must have 1 to 256 features a head, got shape \(1, 4, 5, 0\)",
    ),
    "v elsewhere": (
        _bad(v=lambda: torch.empty(1, 2, 6, 16, device="meta")),
        ValueError,
        r"flash_attention: v must be on the device of q \((cpu|cuda:0)\), got meta",
    ),
    "causal is a number": (_bad(causal=1), TypeError, "flash_attention: causal must be a bool, got int"),
    "scale is text": (
        _bad(scale="x"),
        TypeError,
        "flash_attention: scale must be a number or None, got str",
    ),
    "scale is infinite": (
        _bad(scale=math.inf),
        ValueError,
        r"flash_attention: scale must be finite and not above 2\.36e\+38 in size, got inf",
    ),
    "scale is no number at all": (_bad(scale=math.nan), ValueError, "flash_attention: scale must be finite .* got nan"),
    "scale that float32 does not hold": (
        _bad(scale=-1e300),
        ValueError,
        r"flash_attention: scale must be finite .* got -1e\+300",
    ),
    "window without causal": (
        _bad(window=3),
        ValueError,
        "flash_attention: window must be at least 1 and come with causal=True, got 3 and causal=False; .* FlexAttention",
    ),
    "window of nothing": (
        _bad(window=0, causal=True),
        ValueError,
        "flash_attention: window must be at least 1 .* got 0",
    ),
    "window is a mask": (
        _bad(window=lambda: randn(5, 6), causal=True),
        TypeError,
        "flash_attention: window must be an int or None, got Tensor",
    ),
    "lengths of another batch": (
        _bad(lengths=lambda: torch.ones(2, dtype=torch.int64, device=runtime.DEVICE)),
        ValueError,
        r"flash_attention: lengths must have shape \(1,\), got \(2,\)",
    ),
    "sinks of other heads": (
        _bad(sinks=lambda: randn(2)),
        ValueError,
        r"flash_attention: sinks must have shape \(4,\), got \(2,\)",
    ),
    "sinks are integers": (
        _bad(sinks=lambda: torch.ones(4, dtype=torch.int64, device=runtime.DEVICE)),
        TypeError,
        "flash_attention: sinks must have dtype .* got int64",
    ),
    "softcap is nothing": (
        _bad(softcap=0.0),
        ValueError,
        r"flash_attention: softcap must be above 0 and not above .* got 0\.0",
    ),
    "softcap is text": (_bad(softcap="x"), TypeError, "flash_attention: softcap must be a number or None, got str"),
    "lengths are not integers": (
        _bad(lengths=lambda: torch.ones(1, device=runtime.DEVICE)),
        TypeError,
        "flash_attention: lengths must have dtype int64, int32, got float32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(not runtime.INTERPRET, reason="the interpreter's overflow check")
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("how", ("decode", "pointers", "descriptors"))
def test_offsets_are_64_bit(how: str, monkeypatch: pytest.MonkeyPatch, overflow_raises: Callable[[], None]) -> None:
    """Rows, heads and batches lie 2^31 elements and more apart (the memory is reserved, not touched).

    A stride that has 64 bits makes a product of 64 bits of any number; so there is one that has not, and a third row.
    """
    overflow_raises()
    monkeypatch.setattr(launches, "_fit_descriptors", lambda *tensors: how == "descriptors")
    if how != "decode":
        monkeypatch.setattr(kernels_decode, "MAX_QUERIES", 0)
    far = 2**31 + 8
    for step, n in (((far, 64, 16), 2), ((64, far, 16), 2), ((64, 128, far), 2), ((64, 128, 2**30), 3)):
        dense = _qkv(2, 2, 2, n, n, 16)
        size = sum(step) + (n - 2) * step[-1] + 16
        strided = [torch.empty(size).as_strided(t.shape, (*step, 1)).copy_(t).requires_grad_() for t in dense]
        dense = [t.requires_grad_() for t in dense]
        ours, plain = kb.flash_attention(*strided), kb.flash_attention(*dense)
        assert torch.equal(ours, plain)
        do = torch.empty(size).as_strided(plain.shape, (*step, 1)).copy_(torch.randn_like(plain))
        for a, b in zip(
            torch.autograd.grad(ours, strided, do), torch.autograd.grad(plain, dense, do.contiguous()), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("target", sorted(runtime.TARGETS))
def test_every_head_size_has_tiles_that_fit(target: str) -> None:
    properties = runtime.TARGETS[target]
    amd = target.startswith("gfx")
    for kernel in kernels.KERNELS:
        for itemsize in (2, 4, 8):
            for d in range(1, 257):
                for descriptors in {False, properties.prefers_tma}:
                    if itemsize == 8 and d > 128 and properties.shared_memory_per_program == 2**16 and not amd:
                        with pytest.raises(ValueError, match=f"float64 must have at most 128 features .* got {d}"):
                            kernels.config(kernel, d, itemsize, descriptors, properties)
                        continue
                    config = kernels.config(kernel, d, itemsize, descriptors, properties)
                    kw = config.kwargs
                    least = 8 if itemsize == 8 or (itemsize == 4 and not properties.has_tensor_cores) else 16
                    assert kw["BLOCK_D"] >= d and min(kw["BLOCK_M"], kw["BLOCK_N"]) >= least
                    tiles = kernels._Tiles(kw["BLOCK_M"], kw["BLOCK_N"], config.num_warps, config.num_stages)
                    needs = kernels._shared_bytes(kernel, tiles, kw["BLOCK_D"], itemsize, amd)
                    assert needs <= properties.shared_memory_per_program


@pytest.mark.parametrize(("target", "d"), [("sm_75", 80), ("sm_86", 256)])
def test_float64_leaves_room_where_shared_memory_is_small(target: str, d: int) -> None:
    properties = runtime.TARGETS[target]
    for kernel, owned in (("dkdv", "BLOCK_N"), ("dq", "BLOCK_M")):
        assert kernels.config(kernel, d, 8, False, properties).kwargs[owned] == 8
        assert kernels.config(kernel, 64, 8, False, properties).kwargs[owned] == 16


def test_causal_programs_stay_only_where_they_are_equally_long() -> None:
    hopper = pytest.importorskip("kernelbook.attention.kernels_hopper")
    assert hopper.forward_grid(32, 64, 128, False, 132) == (132, 0)
    assert hopper.forward_grid(32, 64, 128, True, 132) == (132, 1)  # 1024 pairs: 8 rounds, the last almost full
    assert hopper.forward_grid(32, 9, 128, True, 132) == (288, 0)  # 144 pairs: 12 programs would have twice the work
    assert hopper.forward_grid(33, 64, 128, True, 132) == (33 * 64, 0)  # one block of each head would be left over
    assert hopper.forward_grid(33, 64, 80, True, 132) == (132, 2)
    assert hopper.forward_grid(4, 20, 128, False, 132) == (80, 0)  # fewer blocks than multiprocessors
    assert hopper.forward_grid(32, 64, 256, False, 132) == (32 * 64, 0)


def test_sections_are_equally_large() -> None:
    """And none much larger than the L2 cache takes: twice as many heads at most."""
    properties = runtime.TARGETS["sm_90"]
    for length in (100, 1000, 4096, 16384, 10**6):
        for heads in (1, 5, 16, 17, 32, 128):
            section = kernels.section(length, heads, 128, 2, True, properties)
            sections = -(-heads // section)
            assert 1 <= section <= heads and heads > (sections - 1) * section
            fitting = max(1, properties.l2_bytes // 2 // (2 * length * 128 * 2))
            assert section < 2 * max(fitting, 1) or section == 1
            assert sections * section - heads < sections  # the last one has as many, or a head a section fewer
    assert kernels.section(4096, 16, 128, 2, False, properties) == 1


def test_heads_that_share_keys_are_divided_where_programs_are_few() -> None:
    hopper = pytest.importorskip("kernelbook.attention.kernels_hopper")
    assert hopper.parts(8, 4096, 8, 128, 132) == 1  # 256 blocks of 128 keys
    assert hopper.parts(4, 4096, 16, 128, 132) == 2
    assert hopper.parts(1, 300, 6, 128, 132) == 6  # never more than there are heads
    assert all(group % hopper.parts(2, 2048, group, 256, 132) == 0 for group in range(1, 33))


def _kernels_of_gradients(
    b: int, h: int, h_kv: int, n: int, s: int, d: int, causal: bool, dtype: torch.dtype = torch.bfloat16,
    *, lengths: bool = False, window: int | None = None, softcap: float | None = None,
) -> tuple[list[str], int]:  # fmt: skip
    """On the GPU that is compiled for: what computes dk, dv and dq; how many heads are worked on at a time."""
    q, k = (torch.empty(b, heads, rows, d, dtype=dtype, device="meta") for heads, rows in ((h, n), (h_kv, s)))
    seen = torch.empty(b, dtype=torch.int64, device="meta") if lengths else None
    p = launches.problem(q, k, seen, None, causal, window, softcap)
    chosen = backward.choose_kernels(launches.with_tma(p, launches.HAS_GLUON, (q, k, k, q), (q, k, k)))
    dkdv, dq = chosen.dkdv, chosen.dq
    if isinstance(dq, backward.DqReduction):
        assert dkdv.grid == (-(-s // 128) * b * h_kv * chosen.splits,) and dq.counters == b * h * -(-n // 64)
        return [dkdv.launch.kernel.__name__], dkdv.sizes[-1]
    return [tiles.launch.kernel.__name__ for tiles in (dkdv, dq)], dkdv.sizes[-1]


def test_heads_of_64_have_all_gradients_of_one_kernel() -> None:
    """On Hopper, where dq's turns cost less than two of seven products."""
    pytest.importorskip("kernelbook.attention.kernels_hopper")
    one = ["_flash_attention_bwd_hopper_kernel"]
    two = [*one, "_flash_attention_bwd_dq_kernel"]
    plain = ["_flash_attention_bwd_dkdv_kernel", "_flash_attention_bwd_dq_kernel"]
    with runtime.compiling_for("sm_90"):
        for causal in (False, True):
            for b, n in ((16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768)):
                assert _kernels_of_gradients(b, 32, 32, n, n, 64, causal)[0] == one
            assert _kernels_of_gradients(2, 32, 32, 8192, 8192, 64, causal) == (one, 13 if causal else 6)
            assert _kernels_of_gradients(2, 64, 8, 8192, 8192, 56, causal)[0] == one
            assert _kernels_of_gradients(4, 32, 32, 4096, 4096, 64, causal, torch.float32)[0] == plain
            assert _kernels_of_gradients(4, 32, 32, 4096, 4096, 64, causal, lengths=True)[0] == plain
            assert _kernels_of_gradients(4, 32, 32, 4096, 4096, 64, causal, softcap=9.0)[0] == plain
            # Few programs, each as long as the one before it, of which the last would wait for all others.
            assert _kernels_of_gradients(1, 4, 4, 64, 8192, 64, causal)[0] == two
        assert _kernels_of_gradients(16, 32, 32, 1024, 1024, 64, True) == (one, 64)
        assert _kernels_of_gradients(1, 4, 4, 4096, 4096, 64, True)[0] == one
        assert _kernels_of_gradients(4, 32, 32, 4096, 4000, 64, True)[0] == two  # queries that see nothing
        assert _kernels_of_gradients(4, 32, 32, 4096, 4096, 64, True, window=900)[0] == plain
        with kb.same_bits():
            assert _kernels_of_gradients(4, 32, 32, 4096, 4096, 64, True)[0] == plain
    with runtime.compiling_for("sm_100"):
        assert _kernels_of_gradients(4, 32, 32, 4096, 4096, 64, True)[0] == plain


def test_wide_heads_have_gradients_of_two_kernels() -> None:
    """On Hopper: there are no registers for a third warpgroup."""
    pytest.importorskip("kernelbook.attention.kernels_hopper")
    two = ["_flash_attention_bwd_hopper_kernel", "_flash_attention_bwd_dq_hopper_kernel"]
    with runtime.compiling_for("sm_90"):
        for causal, d in itertools.product((False, True), (72, 80, 128, 256)):
            assert _kernels_of_gradients(8, 16, 16, 2048, 2048, d, causal)[0] == two
            assert _kernels_of_gradients(1, 4, 4, 64, 8192, d, causal)[0] == two
            assert _kernels_of_gradients(2, 32, 8, 4096, 4096, d, causal)[0] == two
        assert _kernels_of_gradients(4, 16, 16, 4200, 4100, 128, True)[0] == two  # queries that see nothing


def test_tiles_for_hopper_follow_the_length() -> None:
    hopper = pytest.importorskip("kernelbook.attention.kernels_hopper")
    with runtime.compiling_for("sm_90") as properties:
        lengths = 1000, 1024, 2048, 2049, 8192, 8193
        for causal, groups in ((True, [None, 2, 2, 2, 2, 3]), (False, [None, 2, 3, 3, 3, 3])):
            found = [hopper.config("fwd", 64, 2, s, causal, properties) for s in lengths]
            assert [config and config.kwargs["WARPGROUPS"] for config in found] == groups
        assert hopper.config("fwd", 64, 4, 9000, True, properties) is None  # float32
    with runtime.compiling_for("sm_80") as properties:
        assert hopper.config("fwd", 128, 2, 9000, True, properties) is None


def test_exponentials_run_beside_the_product() -> None:
    """In a step for Hopper GPUs the exponentials come between the wait for the scores and that for the product."""
    code = """
import torch, kernelbook as kb
for causal in (False, True):
    q = torch.empty(1, 4, 1024, 128, dtype=torch.bfloat16)
    kb.flash_attention(q, q, q, causal=causal)
"""
    kernels = compiled.compile_calls(code, ("sm_90",), asm=("sass",))
    # Where it is causal, tiles with a mask have a loop of their own.
    for kernel, loops in zip(kernels, (1, 2), strict=True):
        found, beside, count = re.findall(r"HGMMA|MUFU\.EX2|DEPBAR\.LE gsb0, 0x[01]", kernel.asm["sass"]), [], 0
        for instruction in found:
            if instruction.startswith("MUFU"):
                count += 1
            elif instruction.endswith("0x0"):
                beside.append(count)
            elif instruction == "HGMMA":
                count = 0
        # 64 queries, 128 keys and 128 threads: 64 exponentials a thread and tile, in the steps of each of two warpgroups.
        assert sum(number >= 64 for number in beside) == 2 * loops, beside


def test_programs_visit_every_block_of_every_head_once() -> None:
    """The order of programs is a permutation, and within a section the blocks with most work come first."""
    import triton
    import triton.language as tl

    @triton.jit
    def places(out_ptr, num_blocks, num_heads, section, REVERSED: tl.constexpr):
        block, head = kernels_place(tl.program_id(0), num_blocks, num_heads, section, REVERSED)
        tl.store(out_ptr + 2 * tl.program_id(0), block)
        tl.store(out_ptr + 2 * tl.program_id(0) + 1, head)

    kernels_place = kernels._place
    places.fn.__globals__["kernels_place"] = kernels_place
    for num_blocks, num_heads, section in ((3, 5, 2), (4, 3, 8), (1, 4, 1)):
        for backwards in (False, True):
            out = torch.zeros(num_blocks * num_heads, 2, dtype=torch.int32, device=runtime.DEVICE)
            places[(num_blocks * num_heads,)](out, num_blocks, num_heads, section, backwards)
            found = [tuple(pair) for pair in out.tolist()]
            assert sorted(found) == [(b, h) for b in range(num_blocks) for h in range(num_heads)]
            assert found[0] == (num_blocks - 1 if backwards else 0, 0)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize(
    "problem",
    (
        (2, 8, 8, 1024, 1024, 64), (1, 8, 2, 1000, 1000, 128), (1, 4, 4, 777, 1300, 64), (2, 4, 1, 1300, 777, 128),
        (1, 4, 2, 513, 2049, 256), (1, 4, 2, 1025, 1025, 80), (1, 2, 2, 2048, 2048, 96), (1, 2, 2, 1000, 1000, 32),
        (3, 2, 1, 1, 4096, 128), (1, 2, 2, 500, 500, 17), (1, 4, 2, 4100, 4200, 128),
    ),
    ids=label,
)  # fmt: skip
@pytest.mark.parametrize("plain", (False, True))
def test_real_sizes(problem: tuple[int, ...], dtype: torch.dtype, causal: bool, plain: bool) -> None:
    with op.plain_kernels() if plain else contextlib.nullcontext():
        _check(*_qkv(*problem, dtype=dtype), causal)


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "problem", ((2, 160, 80, 256, 256, 64), (1, 150, 50, 500, 1100, 128), (2, 70, 70, 600, 300, 128))
)
def test_programs_that_stay_for_many_blocks(problem: tuple[int, ...], causal: bool) -> None:
    _check(*_qkv(*problem, dtype=torch.bfloat16), causal)


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "window"), ((False, None), *((True, window) for window in (None, 1, 100, 700))))
@pytest.mark.parametrize("lengths", (False, True))
@pytest.mark.parametrize("d", (40, 64, 128, 256))
def test_lengths_and_windows_of_real_sizes(d: int, causal: bool, lengths: bool, window: int | None) -> None:
    """NaN where there is no key; more and fewer queries than keys; the Hopper kernels as well as the plain ones."""
    for n, s in ((1300, 1100), (300, 1100), (1030, 1290)):
        q, k, v = _qkv(3, 4, 2, n, s, d, dtype=torch.bfloat16)
        given: dict[str, Any] = {"causal": causal, "window": window}
        if lengths:
            given["lengths"] = torch.tensor((0, 517, s - 1), device=runtime.DEVICE)
            for b, length in enumerate(given["lengths"].tolist()):
                k[b, :, length:], v[b, :, length:] = float("nan"), float("nan")
        for how in (op.plain_kernels(), contextlib.nullcontext()):
            with how:
                check.check_op(
                    functools.partial(kb.flash_attention, **given),
                    functools.partial(flash_attention_reference, **given),
                    {"q": q, "k": k, "v": v},
                    grads=("q", "k", "v"),
                )


@pytest.fixture
def all_gradients_at_once(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kernel wherever there is one, also for few programs."""
    if launches.HAS_GLUON:
        hopper = pytest.importorskip("kernelbook.attention.kernels_hopper")
        monkeypatch.setattr(hopper, "programs_wait_little", lambda *_: True)


@pytest.mark.gpu
@pytest.mark.usefixtures("all_gradients_at_once")
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_programs_of_any_length_do_not_wait_for_ever(d: int, causal: bool) -> None:
    """The Hopper kernels pass tiles between warps through barriers: every count of tiles, once. pytest ends what waits for ever."""
    for n in (1, 63, 64, 65, 128, 129, 192, 193, 320, 385, 512, 700, 1025):
        for s in (1, 64, 65, 129, 257, 400, 640, 1100):
            _check(*_qkv(1, 2, 1, n, s, d, dtype=torch.bfloat16), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", (False, True))
@pytest.mark.parametrize("d", (64, 128))
def test_float32_follows_the_switch(d: int, tf32: bool) -> None:
    q, k, v = _qkv(1, 2, 2, 500, 500, d)
    with timing.allow_tf32(tf32):
        _check(q, k, v, True)
        error = check.relative_error(
            kb.flash_attention(q, k, v), flash_attention_reference(q.double(), k.double(), v.double())
        )
    assert (error > 1e-5) == (tf32 and runtime.properties().has_tensor_cores)


@pytest.mark.gpu
def test_float64_on_a_gpu() -> None:
    _check(*_qkv(1, 2, 1, 70, 100, 48, dtype=torch.float64), True)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("how", ("hopper", "descriptors", "pointers"))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_bitwise_reproducible(d: int, how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sums have one order; a race between copies and tensor cores would show too."""
    if how != "hopper":
        monkeypatch.setattr(launches, "HAS_GLUON", False)
    if how == "pointers":
        monkeypatch.setattr(launches, "_fit_descriptors", lambda *tensors: False)
    small = dtype == torch.float32
    leaves = [t.requires_grad_() for t in _qkv(1, 4, 2, *2 * (512 if small else 2048,), d, dtype=dtype)]
    do = torch.randn_like(leaves[0])

    def run() -> list[torch.Tensor]:
        o = kb.flash_attention(*leaves, causal=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    with timing.allow_tf32(True):
        first = run()
        for _ in range(250):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("all_gradients_at_once")
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "problem",
    ((4, 32, 8, 1024, 1024, 64), (1, 16, 16, 1500, 2200, 56)),
    ids=label,
)
def test_dq_is_added_up_in_turn_beside_other_work(problem: tuple[int, ...], causal: bool) -> None:
    """Programs that wait for one another, on streams that run beside each other, in a graph and beside products."""
    q, k, v = _qkv(*problem, dtype=torch.bfloat16)
    _check(q[:1], k[:1], v[:1], causal)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    do, other = torch.randn_like(leaves[0]), randn(4096, 4096, dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(kb.flash_attention(*leaves, causal=causal), leaves, do)

    exact = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for _ in range(8):
        for stream in streams[:3]:
            with torch.cuda.stream(stream):
                found.append(step())
        with torch.cuda.stream(streams[3]):
            other = (other @ other).sign()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for grads in (*found, captured) for a, b in zip(grads, exact, strict=True))
    assert not any(counters.any() for counters in memory._counters.values()), "as the next launch needs them"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True))
def test_cuda_graph(causal: bool) -> None:
    leaves = [t.requires_grad_() for t in _qkv(1, 4, 2, 512, 512, 64, dtype=torch.bfloat16)]
    do = torch.randn_like(leaves[0])

    def step() -> tuple[torch.Tensor, ...]:
        o = kb.flash_attention(*leaves, causal=causal)
        return o, *torch.autograd.grad(o, leaves, do)

    step()  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (*leaves, do):
            t.copy_(torch.randn_like(t))
    graph.replay()
    for ours, again in zip(captured, step(), strict=True):
        assert torch.equal(ours, again)


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    leaves = [t.requires_grad_() for t in _qkv(1, 4, 2, 512, 512, 64, dtype=torch.bfloat16)]
    for _ in range(2):  # the first call compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            kb.flash_attention(*leaves, causal=True).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.memory
def test_more_than_2_31_elements() -> None:
    """The last head of the last batch lies behind 2^31 elements, as does the last row of a packed tensor."""
    n, d = 2**13, 128
    packed = torch.randn(n, 3, 700, d, dtype=torch.bfloat16, device=runtime.DEVICE)  # (N, 3, H, D): 2.2e9 elements
    q, k, v = (packed[:, i].transpose(0, 1).unsqueeze(0)[:, -4:].requires_grad_() for i in range(3))
    do = torch.randn(1, 4, n, d, dtype=torch.bfloat16, device=runtime.DEVICE)
    grads = torch.autograd.grad(kb.flash_attention(q, k, v, causal=True), (q, k, v), do)
    dense = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(kb.flash_attention(*dense, causal=True), dense, do)
    for a, b in zip(grads, exact, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_peak_memory_grows_with_the_sequence_not_its_square() -> None:
    q, k, v = (t.requires_grad_() for t in _qkv(1, 2, 2, 2**15, 2**15, 64, dtype=torch.bfloat16))
    do = torch.randn_like(q)

    def step() -> object:
        return torch.autograd.grad(kb.flash_attention(q, k, v, causal=True), (q, k, v), do)

    step()
    # o, dq, dk, dv; dq's sums in float32; lse and delta; the score matrix alone would take 4,096 MiB.
    assert timing.peak_mib(step) < 1.25 * (4 * q.nbytes + 2 * q.nbytes + 2 * q.nbytes // 16) / 2**20
