"""The room attention: every output and gradient by the rule of check.py, and everything around it."""

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import check_attention, label, randn, refused
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelbook as kb
from kernelbook import check, memory, runtime
from kernelbook.attention import (
    flash_attention_backward_reference,
    flash_attention_reference,
    kernels,
    kernels_decode,
    launches,
    op,
)
from kernelbook.lab import timing


def _qkv(
    b: int, h: int, h_kv: int, n: int, s: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(b, h, n, d, dtype=dtype), randn(b, h_kv, s, d, dtype=dtype), randn(b, h_kv, s, d, dtype=dtype)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None) -> None:
    given = {"causal": causal, "scale": scale}
    # Of a single key dq and dk are exactly zero, as PyTorch finds; from delta the difference of two rounded sums remains.
    check_attention(given, {"q": q, "k": k, "v": v}, grads=("q", "k", "v") if k.shape[2] != 1 else ("v",))


# B, H, H_kv, N, S, D: one query, one key, primes, more than one tile, fewer and more queries than keys, shared heads, head
# sizes that are powers of two, and others.
PROBLEMS = (
    (2, 3, 3, 7, 7, 32),
    (1, 2, 1, 1, 113, 64),
    (1, 4, 2, 64, 64, 64),
    (1, 2, 1, 70, 150, 64),
    (1, 3, 1, 113, 40, 32),
    (1, 1, 1, 20, 50, 80),
    (1, 2, 1, 40, 20, 256),
    (1, 2, 1, 20, 20, 7),
)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_output_and_gradients(problem: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    _check(*_qkv(*problem, dtype=dtype), causal)


def _seen(b: int, n: int, s: int, causal: bool, lengths: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """(B, 1, N, S): which keys a query sees, by a loop."""
    mask = torch.zeros(b, 1, n, s, dtype=torch.bool, device=runtime.DEVICE)
    for j, length in enumerate([s] * b if lengths is None else lengths.tolist()):
        for i in range(n):
            last = length - n + i if causal else length - 1
            mask[j, 0, i, 0 if window is None else max(last - window + 1, 0) : last + 1] = True
    return mask


@pytest.mark.parametrize(("n", "s"), ((5, 5), (4, 9)))
@pytest.mark.parametrize(("causal", "window"), ((False, None), (True, None), (True, 3)))
@pytest.mark.parametrize("with_lengths", (False, True))
def test_references_are_pytorchs(n: int, s: int, causal: bool, window: int | None, with_lengths: bool) -> None:
    q, k, v = (t.double().requires_grad_() for t in _qkv(2, 4, 2, n, s, 8))
    lengths = torch.tensor([s, n], device=q.device) if with_lengths else None
    given: dict[str, Any] = {"causal": causal, "window": window, "lengths": lengths}
    with sdpa_kernel(SDPBackend.MATH):
        mask = _seen(2, n, s, causal, lengths, window)
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    ours, do = flash_attention_reference(q, k, v, **given), torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs)
    exact = torch.autograd.grad(theirs, (q, k, v), do)
    by_hand = flash_attention_backward_reference(do, *(t.detach() for t in (q, k, v)), **given)
    for grads in (torch.autograd.grad(ours, (q, k, v), do), by_hand):
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


def _tiles(m: int, n: int, d: int) -> kernels.triton.Config:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": kernels.block_d(d)}
    return kernels.triton.Config(blocks, num_warps=4, num_stages=2)


@pytest.mark.parametrize("descriptors", (False, True))
@pytest.mark.parametrize(("m", "n"), ((16, 64), (64, 16), (32, 32)))
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
    for problem in ((1, 3, 3, 50, 50, 16), (1, 2, 1, 30, 64, 40), (1, 1, 1, 70, 30, 16)):
        if problem[-1] == 40 and descriptors and runtime.DEVICE.type == "cuda":
            continue
        _check(*_qkv(*problem, dtype=torch.float16), causal)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each kind of loop runs."""
    sizes = {"dkdv": (32, 16)}
    monkeypatch.setattr(kernels, "config", lambda kernel, d, *_: _tiles(*sizes.get(kernel, (16, 32)), d))
    monkeypatch.setattr(launches, "HAS_GLUON", False)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("causal", "window"), ((False, None), *((True, window) for window in (None, 1, 20, 45))))
@pytest.mark.parametrize("lengths", (None, (0, 33), (70, 51)))
def test_lengths_and_windows(causal: bool, lengths: tuple[int, ...] | None, window: int | None) -> None:
    """Fewer and more queries than keys; NaN where there is no key."""
    for n in (20, 90):
        q, k, v = _qkv(2, 2, 1, n, 70, 16, dtype=torch.float16)
        given: dict[str, Any] = {"causal": causal, "window": window}
        if lengths is not None:
            given["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=runtime.DEVICE)
            for b, length in enumerate(lengths):
                k[b, :, length:], v[b, :, length:] = float("nan"), float("nan")
        check_attention(given, {"q": q, "k": k, "v": v})


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("with_sinks", "softcap"), ((False, 0.7), (True, None), (True, 0.7)))
@pytest.mark.parametrize("seen", ("all", "window", "window and lengths"))
def test_sinks_and_soft_caps(seen: str, with_sinks: bool, softcap: float | None) -> None:
    """A few queries and many; in a sequence some queries see no key at all."""
    given: dict[str, Any] = {"causal": seen != "all", "softcap": softcap, "window": 13 if seen != "all" else None}
    if "lengths" in seen:
        given["lengths"] = torch.tensor([0, 30], device=runtime.DEVICE)
    for n, dtype in ((5, torch.float32), (40, torch.float16)):
        inputs = dict(zip("qkv", _qkv(2, 2, 1, n, 36, 16, dtype=dtype), strict=True))
        if with_sinks:
            inputs["sinks"] = 4 * randn(2, dtype=dtype)
        check_attention(given, inputs)


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


@pytest.mark.parametrize("window", (40, 2**31 - 1, sys.maxsize, 2**70))
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


def test_queries_that_see_nothing_give_zeros() -> None:
    """With more queries than keys the first ones see none."""
    q, k, v = (t.requires_grad_() for t in _qkv(1, 2, 1, 150, 40, 32, dtype=torch.float16))
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
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
def test_very_large_scores(dtype: torch.dtype, causal: bool) -> None:
    """Scores of 1e5 and more: exp overflows from 89 on in float32."""
    q, k, v = _qkv(1, 2, 2, 40, 100, 64, dtype=dtype)
    leaves = [t.requires_grad_() for t in (q * 100, k * 100, v)]
    o = kb.flash_attention(*leaves, causal=causal)
    exact = flash_attention_reference(*(t.double() for t in leaves), causal=causal)
    assert check.relative_error(o, exact) < 1e-2  # a rounding of such a score is a change of its probability
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(o.sum(), leaves))


@pytest.mark.parametrize("n", (5, 40))
def test_scores_far_below_zero(n: int) -> None:
    """All of them: what is kept of a query's sum is far below zero too, and a key that is not there has a score of zero."""
    q, k, v = _qkv(2, 2, 1, n, 21, 16)
    # By one feature alone: were all keys nearly alike, dQ would be what is left of much larger terms, and show how a machine
    # happens to round a score rather than this.
    q[..., 0], k[..., 0] = 1000, -2
    for causal, lengths in ((False, None), (True, None), (False, torch.tensor([21, 5], device=q.device))):
        check_attention({"causal": causal, "lengths": lengths}, {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
def test_extreme_scales(dtype: torch.dtype, sign: int) -> None:
    """A scale next to zero averages the values; a large one picks that of the largest score."""
    q, k, v = _qkv(1, 2, 1, 40, 50, 16, dtype=dtype)
    tolerance = 4 * torch.finfo(dtype).eps
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
def test_nan_stays_where_it_belongs(causal: bool) -> None:
    """In a query: its own row. In a key: the queries that see it, none before."""
    given = _qkv(1, 2, 2, 150, 150, 32)
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


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {
    "(B, N, H, D)": lambda b, h, n, d: randn(b, n, h, d).transpose(1, 2),
    "packed": lambda b, h, n, d: randn(b, n, h, 3, d)[:, :, :, 1].transpose(1, 2),
    "reversed batch": lambda b, h, n, d: randn(n, h, b, d).permute(2, 1, 0, 3),
    "expanded": lambda b, h, n, d: randn(1, 1, n, d).expand(b, h, n, d),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_models(layout: str) -> None:
    """In 16 bits, where descriptors may read them."""
    q, k, v = (LAYOUTS[layout](2, h, n, 24).half() for h, n in ((2, 30), (1, 50), (1, 50)))
    _check(q, k, v, True)
    if layout == "(B, N, H, D)":
        assert kb.flash_attention(q, k, v).stride() == q.stride()


@pytest.mark.parametrize("problem", ((1, 0, 0, 4, 4, 16), (1, 2, 1, 0, 4, 16), (1, 2, 1, 4, 0, 16)), ids=label)
def test_zero_sizes(problem: tuple[int, ...]) -> None:
    _check(*_qkv(*problem), True)


# --- edges ----------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k of another dtype": (
        {"k": lambda: randn(1, 2, 6, 16).half()},
        r"k must have the dtype of q \(torch.float32\), got torch.float16",
    ),
    "v of another length": (
        {"v": lambda: randn(1, 2, 7, 16)},
        r"v must have shape \(1, 2, 6, 16\), got \(1, 2, 7, 16\)",
    ),
    "heads that do not divide": (
        {"k": lambda: randn(1, 3, 6, 16), "v": lambda: randn(1, 3, 6, 16)},
        r"the heads of k and v must divide those of q \(4\), got 3",
    ),
    "no head of k": (
        {"k": lambda: randn(1, 0, 6, 16), "v": lambda: randn(1, 0, 6, 16)},
        r"the heads of k and v must divide those of q \(4\), got 0",
    ),
    "large heads": (
        {"q": lambda: randn(1, 4, 5, 257)},
        r"q must have 1 to 256 features a head, got shape \(1, 4, 5, 257\)",
    ),
    "causal is a number": ({"causal": 1}, "causal must be a bool, got int"),
    "scale is infinite": ({"scale": math.inf}, r"scale must be finite and not above 2\.36e\+38 in size, got inf"),
    "scale that float32 does not hold": ({"scale": -1e300}, r"scale must be finite .* got -1e\+300"),
    "window without causal": (
        {"window": 3},
        "window must be at least 1 and come with causal=True, got 3 and causal=False; .* FlexAttention",
    ),
    "window of nothing": ({"window": 0, "causal": True}, "window must be at least 1 .* got 0"),
    "lengths of another batch": ({"lengths": torch.ones(2).long()}, r"lengths must have shape \(1,\), got \(2,\)"),
    "lengths are not integers": ({"lengths": torch.ones(1)}, "lengths must have dtype int64, int32, got float32"),
    "sinks of other heads": ({"sinks": lambda: randn(2)}, r"sinks must have shape \(4,\), got \(2,\)"),
    "softcap is nothing": ({"softcap": 0.0}, r"softcap must be above 0 and not above .* got 0\.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    given = dict(zip("qkv", _qkv(1, 4, 2, 5, 6, 16), strict=True))
    refused(kb.flash_attention, given, changes, f"flash_attention: {message}")


@pytest.mark.skipif(not runtime.INTERPRET, reason="the interpreter's overflow check")
@pytest.mark.parametrize("how", ("pointers", "descriptors"))
def test_offsets_are_64_bit(how: str, monkeypatch: pytest.MonkeyPatch, overflow_raises: Callable[[], None]) -> None:
    """Rows, heads and batches lie 2^31 elements and more apart (the memory is reserved, not touched).

    A stride that has 64 bits makes a product of 64 bits of any number; so there is one that has not, and a third row.
    """
    overflow_raises()
    monkeypatch.setattr(launches, "_fit_descriptors", lambda *tensors: how == "descriptors")
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
            for d in (1, 16, 17, 64, 65, 80, 128, 129, 200, 256):
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


# --- on a GPU -------------------------------------------------------------------------------------------------------


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
                check_attention(given, {"q": q, "k": k, "v": v})


@pytest.fixture
def all_gradients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.parametrize("boxes", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_plain_kernels_have_the_same_bits_in_every_run(d: int, boxes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race between copies and tensor cores would show; of the kernels that a Hopper GPU takes the contract tells."""
    monkeypatch.setattr(launches, "HAS_GLUON", False)
    monkeypatch.setattr(launches, "_fit_descriptors", lambda *tensors: boxes)
    leaves = [t.requires_grad_() for t in _qkv(1, 4, 2, 2048, 2048, d, dtype=torch.bfloat16)]
    do = torch.randn_like(leaves[0])

    def run() -> list[torch.Tensor]:
        o = kb.flash_attention(*leaves, causal=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

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
