"""Packed sequences: every output and gradient by the rule of check.py, against each sequence alone, and bit by bit."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import check_attention, label, randn, refused

import kernelbook as kb
from kernelbook import runtime
from kernelbook.attention import kernels, kernels_same_bits

Boundaries = tuple[int, ...]

# Empty sequences, one of one row, one that is all, padding behind the last, boundaries on those of tiles, none at all.
PACKED: tuple[tuple[Boundaries, int], ...] = (
    ((0, 20, 20, 21, 70, 70), 90),
    ((0, 70), 70),
    ((0, 32, 64, 96), 96),
    ((0, 1, 2, 3, 50), 61),
    ((0, 0, 45), 45),
    ((0,), 20),
)
HOW: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window and a soft cap": {"causal": True, "window": 13, "softcap": 0.7},
}


def _boundaries(*rows: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype, device=runtime.DEVICE)


def _inputs(
    n: int, h: int = 4, h_kv: int = 2, d: int = 16, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {"q": randn(1, h, n, d, dtype=dtype), **{name: randn(1, h_kv, n, d, dtype=dtype) for name in "kv"}}


def _spans(rows: Sequence[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in itertools.pairwise(rows) if begin < end]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a sequence has several, and each kind of loop runs."""

    def tiles(kernel: str, d: int, *_: Any) -> kernels.triton.Config:
        m, n = (32, 16) if kernel == "dkdv" else (16, 32)
        return kernels.triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": kernels.block_d(d)})

    monkeypatch.setattr(kernels, "config", tiles)
    monkeypatch.setattr(kernels_same_bits, "PART", 64)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("packed", PACKED, ids=label)
def test_output_and_gradients(packed: tuple[Boundaries, int], how: str) -> None:
    """In small tiles; NaN in keys that no sequence has."""
    rows, n = packed
    inputs = _inputs(n, dtype=torch.float16)
    for name in "kv":
        inputs[name][:, :, rows[-1] :] = float("nan")
    if how != "causal":
        inputs["sinks"] = randn(4)
    check_attention(HOW[how] | {"cu_seqlens": _boundaries(*rows)}, inputs, tuple(inputs))


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    behind=st.integers(0, 20),
    heads=st.sampled_from(((1, 1), (3, 1), (4, 2))),
    d=st.sampled_from((7, 16, 40, 64, 130, 256)),
    how=st.sampled_from(sorted(HOW)),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64)),
    step=st.integers(1, 3),
    of=st.sampled_from((torch.int32, torch.int64)),
)
def test_any_lengths(
    lengths: list[int], behind: int, heads: tuple[int, int], d: int, how: str, dtype: torch.dtype, step: int, of: torch.dtype
) -> None:  # fmt: skip
    if dtype == torch.float64 and d > 128:
        d = 128
    rows = _boundaries(0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist(), dtype=of)
    spaced = torch.full((step * rows.shape[0],), -9, dtype=of, device=rows.device)
    spaced[::step] = rows
    # With a single key dq and dk are exactly zero, see test_attention.py.
    grads = ("q", "k", "v") if max(lengths, default=0) > 1 else ("v",)
    check_attention(HOW[how] | {"cu_seqlens": spaced[::step]}, _inputs(sum(lengths) + behind, *heads, d, dtype), grads)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("packed", PACKED[:4], ids=label)
def test_the_bits_of_each_sequence_alone(packed: tuple[Boundaries, int], how: str) -> None:
    """Output and gradients within ``same_bits``, with room for more sequences and without."""
    rows, n = packed
    dtype = torch.float16
    leaves = {name: t.requires_grad_() for name, t in _inputs(n, dtype=dtype).items()}
    do, sinks = randn(1, 4, n, 16, dtype=dtype), randn(4)
    with kb.same_bits():
        for given_ in (rows, (*rows, *[n] * 40) if rows[-1] == n else rows):
            out = kb.flash_attention(**leaves, sinks=sinks, cu_seqlens=_boundaries(*given_), **HOW[how])
            found = (out, *torch.autograd.grad(out, tuple(leaves.values()), do))
            assert not any(t[:, :, rows[-1] :].any() for t in found)
            for span in _spans(rows):
                own = [t.detach()[:, :, span].clone().requires_grad_() for t in leaves.values()]
                alone = kb.flash_attention(*own, sinks=sinks, **HOW[how])
                of_alone = (alone, *torch.autograd.grad(alone, own, do[:, :, span]))
                assert all(torch.equal(a[:, :, span], b) for a, b in zip(found, of_alone, strict=True))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's maximum
@pytest.mark.parametrize("same_bits", (False, True))
def test_a_sequence_does_not_see_what_is_wrong_with_another(same_bits: bool) -> None:
    """NaN in queries and keys stays in its sequence; behind the last nothing is read, for gradients either."""
    rows, n = _boundaries(0, 30, 50, 80), 100
    tensors = tuple(_inputs(n).values())
    found, gradients = [], []
    for value in (0.5, float("nan")):
        leaves = [t.clone() for t in tensors]
        for t in leaves:
            t[:, :, 80:] = value
            t.requires_grad_()
        with runtime.same_bits(same_bits):
            o = kb.flash_attention(*leaves, causal=True, cu_seqlens=rows)
            gradients.append(torch.autograd.grad(o, leaves, torch.ones_like(o)))
            with torch.no_grad():
                leaves[0][:, :, 30:50], leaves[1][:, :, 30:50] = value, value
                found.append(kb.flash_attention(*leaves, causal=True, cu_seqlens=rows))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    for span in (slice(0, 30), slice(50, 100)):
        assert torch.equal(found[0][:, :, span], found[1][:, :, span])
    assert found[1][:, :, 30:50].isnan().all() and not found[1][:, :, 80:].any()


@pytest.mark.parametrize(
    ("rows", "message"),
    (
        ((1, 5), r"flash_attention: cu_seqlens must begin at 0 and not fall, got \[1, 5\]"),
        ((0, 7, 5), r"flash_attention: cu_seqlens must begin at 0 and not fall, got \[0, 7, 5\]"),
        ((0, 5, 11), r"flash_attention: cu_seqlens must lie in \[0, 11\), got entries from 0 to 11"),
        ((0, -1, 5), r"flash_attention: cu_seqlens must lie in \[0, 11\), got entries from -1 to 5"),
    ),
)
def test_boundaries_that_do_not_fit_are_refused(
    rows: Boundaries, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, and on a GPU under ``KERNELBOOK_DEBUG``."""
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        kb.flash_attention(**_inputs(10), cu_seqlens=_boundaries(*rows))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "numbers": ({"cu_seqlens": lambda: randn(3)}, "cu_seqlens must have dtype int64, int32, got float32"),
    "no boundary": (
        {"cu_seqlens": _boundaries},
        r"cu_seqlens must have shape \(sequences \+ 1,\), one entry at least, got \(0,\)",
    ),
    "a matrix": (
        {"cu_seqlens": lambda: _boundaries(0, 10)[None]},
        r"cu_seqlens must have one dimension, got shape \(1, 2\)",
    ),
    "lengths too": (
        {"lengths": lambda: _boundaries(10)},
        r"lengths must be None with cu_seqlens, got a tensor of shape \(1,\)",
    ),
    "other keys": (
        {"k": lambda: randn(1, 2, 9, 16), "v": lambda: randn(1, 2, 9, 16)},
        r"q, k and v must be a batch of 1 with the same rows .* and k of shape \(1, 2, 9, 16\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    given_ = _inputs(10) | {"cu_seqlens": _boundaries(0, 4, 10)}
    refused(kb.flash_attention, given_, changes, f"flash_attention: {message}")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("d", (40, 64, 128, 256))
def test_real_sizes(d: int, how: str) -> None:
    """Lengths as TRL packs them: several, one of one row, padding at the end, a boundary on that of a tile."""
    rows = (0, 700, 701, 1024, 1024, 1900, 2048, 2100, 2110, 2900)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = _inputs(3001, 8, 2, d, dtype) | {"sinks": randn(8)}
        for name in "kv":
            inputs[name][:, :, rows[-1] :] = float("nan")
        check_attention(HOW[how] | {"cu_seqlens": _boundaries(*rows)}, inputs, tuple(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=label)
@pytest.mark.parametrize("d", (64, 128))
def test_the_bits_of_each_sequence_alone_at_real_sizes(d: int, dtype: torch.dtype) -> None:
    rows, n = (0, 700, 701, 1024, 1900, 2900), 3001
    leaves = [t.requires_grad_() for t in _inputs(n, 8, 2, d, dtype).values()]
    do = randn(1, 8, n, d, dtype=dtype)
    for how in HOW.values():
        with kb.same_bits():
            o = kb.flash_attention(*leaves, cu_seqlens=_boundaries(*rows), **how)
            found = (o, *torch.autograd.grad(o, leaves, do))
            for span in _spans(rows):
                own = [t.detach()[:, :, span].clone().requires_grad_() for t in leaves]
                alone = kb.flash_attention(*own, **how)
                of_alone = (alone, *torch.autograd.grad(alone, own, do[:, :, span]))
                assert all(torch.equal(a[:, :, span], b) for a, b in zip(found, of_alone, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("same_bits", (False, True))
def test_a_graph_follows_the_boundaries(same_bits: bool) -> None:
    """Captured once, replayed with more, fewer and other sequences; nothing waits for the device."""
    leaves = [t.requires_grad_() for t in _inputs(1000, d=64, dtype=torch.bfloat16).values()]
    do, rows = torch.randn_like(leaves[0]), _boundaries(*range(0, 1001, 100), *[1000] * 10)

    def step() -> tuple[torch.Tensor, ...]:
        with runtime.same_bits(same_bits):
            o = kb.flash_attention(*leaves, causal=True, cu_seqlens=rows)
        return o, *torch.autograd.grad(o, leaves, do)

    step()  # compiles before the capture
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((1000,), (1, 499, 0, 77), (5,) * 20, (333, 667)):
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        rows.copy_(_boundaries(*ends, *ends[-1:] * (21 - len(ends))))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
        for span in _spans(ends)[:2]:
            alone = kb.flash_attention(*(t[:, :, span] for t in leaves), causal=True)
            torch.testing.assert_close(captured[0][:, :, span], alone, rtol=2e-2, atol=2e-2)
