"""Attention for a few queries, from contiguous keys and from pages."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import check_attention, label, randn, refused

import kernelbook as kb
from kernelbook import arguments, check, runtime
from kernelbook.attention import (
    append_to_pages_reference,
    flash_attention_reference,
    kernels_decode,
    paged_attention_reference,
)


@pytest.fixture
def split_into(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Once called, keys are split over so many programs, in tiles of 16, and the columns of the result into pieces."""

    def split(splits: int, pieces: int = 1) -> None:
        monkeypatch.setattr(kernels_decode, "_splits", lambda *_: (0.0, splits))
        monkeypatch.setattr(kernels_decode, "_pieces", lambda *_: [pieces])

        def tiles(heads: int, rows: int, d: int, *_: Any) -> tuple[Any, int]:
            blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": kernels_decode.block_d(d), "PIECES": 1, "Q_LATE": True}
            blocks["STAGES"] = 2
            return kernels_decode.triton.Config(blocks, num_warps=4, num_stages=2), 1

        monkeypatch.setattr(kernels_decode, "_tiles", tiles)

    return split


def _qkv(b: int, h: int, h_kv: int, n: int, s: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return randn(b, h, n, d, dtype=dtype), randn(b, h_kv, s, d, dtype=dtype), randn(b, h_kv, s, d, dtype=dtype)


def _integers(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=runtime.DEVICE)


# --- contiguous keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", (1, 3, 40))
@pytest.mark.parametrize(
    ("problem", "pieces"),
    (((1, 6, 2, 1, 100, 16), 1), ((2, 2, 2, 3, 77, 24), 1), ((1, 2, 1, 16, 50, 16), 1), ((1, 4, 2, 2, 60, 128), 4)),
    ids=label,
)
def test_however_the_keys_are_split(
    problem: tuple[int, ...], pieces: int, splits: int, split_into: Callable[..., None]
) -> None:
    """More shares than tiles too: those without keys are not waited for, and every counter is zero again."""
    split_into(splits, pieces)
    q, k, v = _qkv(*problem, dtype=torch.float16)
    lengths = torch.arange(q.shape[0], device=q.device) * 40
    for settings_of in ({}, {"causal": True}, {"lengths": lengths}, {"causal": True, "lengths": lengths, "window": 19}):
        check_attention(settings_of, {"q": q, "k": k, "v": v}, ())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
def test_gradients_after_a_split(dtype: torch.dtype, split_into: Callable[..., None]) -> None:
    """The backward pass takes the logarithms of the sums that the merge left."""
    split_into(3)
    given = {"causal": True, "lengths": _integers(60, 2)}
    check_attention(given, dict(zip("qkv", _qkv(2, 4, 2, 5, 60, 16, dtype=dtype), strict=True)))


@pytest.mark.parametrize("target", sorted(runtime.TARGETS))
def test_tiles_fit(target: str) -> None:
    properties = runtime.TARGETS[target]
    for d in (1, 40, 64, 128, 256):
        for itemsize in (2, 4, 8):
            for rows in (1, 4, 16, 40, 64, 128, 1000):
                for paged in (False, True):
                    kw = kernels_decode._tiles(300, rows, d, itemsize, paged, properties)[0].kwargs
                    assert kw["BLOCK_D"] >= d and min(kw["BLOCK_M"], kw["BLOCK_N"]) >= 16
                    tiles = 2 * (kw["STAGES"] - (kw["BLOCK_M"] < 64)) * kw["BLOCK_N"] + kw["BLOCK_M"]
                    assert kw["STAGES"] == 1 or tiles * kw["BLOCK_D"] * itemsize <= properties.shared_memory_per_program


# --- pages ----------------------------------------------------------------------------------------------------------


def _paged(
    b: int, h: int, h_kv: int, n: int, d: int, page: int, per: int, dtype: torch.dtype, lengths: list[int]
) -> dict[str, torch.Tensor]:
    """A random table over few pages, so that sequences share some."""
    pool = [randn(2 * per + 1, h_kv, page, d, dtype=dtype) for _ in range(2)]
    table = torch.randint(0, 2 * per + 1, (b, per), device=runtime.DEVICE)
    return {
        "q": randn(b, h, n, d, dtype=dtype), "k_pages": pool[0], "v_pages": pool[1], "block_table": table,
        "lengths": _integers(*lengths),
    }  # fmt: skip


@pytest.mark.parametrize("page", (16, 48))
@pytest.mark.parametrize("n", (1, 16))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
def test_pages(dtype: torch.dtype, n: int, page: int, split_into: Callable[..., None]) -> None:
    """Lengths 0, 1, at the border of a page, before and after it, and all."""
    split_into(2)
    lengths = [0, 1, page - 1, page, page + 1, 2 * page]
    check.check_op(kb.paged_attention, paged_attention_reference, _paged(6, 4, 2, n, 16, page, 2, dtype, lengths))


@pytest.mark.parametrize("splits", (1, 3))
def test_pages_with_sinks_and_a_soft_cap(splits: int, split_into: Callable[..., None]) -> None:
    split_into(splits)
    inputs = _paged(4, 4, 2, 3, 16, 32, 3, torch.float16, [0, 2, 33, 96])
    check.check_op(
        functools.partial(kb.paged_attention, softcap=0.7),
        functools.partial(paged_attention_reference, softcap=0.7),
        {**inputs, "sinks": 4 * randn(4)},
    )


def test_what_is_in_no_page_has_no_effect() -> None:
    """NaN in unused slots and pages, pages that are not in the pool, lengths out of range on a GPU."""
    inputs = _paged(3, 4, 2, 2, 16, 16, 4, torch.float32, [20, 64, 50])
    inputs["block_table"] = _integers([0, 1, -7, 10**9], [2, 9, -1, 3], [4, 5, 0, 6])
    clean = kb.paged_attention(**inputs)
    check.check_op(kb.paged_attention, paged_attention_reference, inputs)
    for name in ("k_pages", "v_pages"):
        dirty = inputs[name].clone()
        dirty[7:] = float("nan")
        dirty[1, :, 4:] = float("nan")
        dirty[6, :, 2:] = float("nan")
        inputs[name] = dirty
    assert torch.equal(kb.paged_attention(**inputs), clean)
    inputs["lengths"] = _integers(20, 65, -1)
    if runtime.DEVICE.type == "cpu":
        with pytest.raises(
            ValueError, match=r"paged_attention: lengths must lie in \[0, 65\), got entries from -1 to 65"
        ):
            kb.paged_attention(**inputs)
    else:
        out = kb.paged_attention(**inputs)
        assert torch.equal(out[:2], clean[:2]) and not out[2].any()


def test_pages_are_the_contiguous_keys_bit_for_bit(split_into: Callable[..., None]) -> None:
    split_into(3)
    q, k, v = _qkv(2, 4, 2, 3, 96, 16, dtype=torch.float16)
    order = torch.randperm(12, device=runtime.DEVICE)
    pools = []
    for tensor in (k, v):
        pool = torch.empty(12, 2, 16, 16, dtype=q.dtype, device=runtime.DEVICE)
        pool[order] = tensor.unflatten(2, (6, 16)).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    paged = kb.paged_attention(q, pools[0], pools[1], order.view(2, 6), _integers(96, 41))
    assert torch.equal(paged, kb.flash_attention(q, k, v, causal=True, lengths=_integers(96, 41)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=label)
@pytest.mark.parametrize("n", (1, 7))  # of seven, two programs a sequence
def test_append(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the border of a page, without room, and into pages that are not there."""
    k, v = (randn(4, 3, n, 20, dtype=dtype) for _ in range(2))
    ours = [randn(8, 3, 16, 20, dtype=dtype) for _ in range(2)]
    theirs = [t.clone() for t in ours]
    table = _integers([0, 1], [2, 8], [-1, 3], [4, 5])
    lengths = _integers(14, 15, 3, 29)
    assert kb.append_to_pages(k, v, ours[0], ours[1], table, lengths) is None
    append_to_pages_reference(k, v, theirs[0], theirs[1], table, lengths)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours[0][0, :, 14], k[0, :, 0])
    beyond = functools.partial(kb.append_to_pages, k, v, *ours, table, _integers(-1, -100, 32, 2**31 - 20))
    with monkeypatch.context() as debugging:
        debugging.setenv("KERNELBOOK_DEBUG", "1")
        with pytest.raises(ValueError, match="append_to_pages: lengths must not be negative, got entries from -100"):
            beyond()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(arguments, "check_index_values", lambda *_: None)  # as on a GPU
    beyond()
    theirs[0][0, :, : n - 1], theirs[1][0, :, : n - 1] = k[0, :, 1:], v[0, :, 1:]  # from position -1 on: all but one
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_pages_that_are_used_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence does not reach is not looked at, and -1 says that there is no page."""
    inputs, new = _paged(3, 4, 2, 2, 16, 16, 3, torch.float32, [20, 48, 0]), randn(3, 2, 2, 16)
    inputs["block_table"] = _integers([0, 1, 99], [2, -1, 3], [4, 99, 0])
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")
    pools = inputs["k_pages"], inputs["v_pages"]
    kb.paged_attention(**inputs)
    kb.append_to_pages(new, new, *pools, inputs["block_table"], _integers(20, 31, 0))
    inputs["lengths"] = _integers(33, 48, 0)
    with pytest.raises(
        ValueError, match=r"paged_attention: block_table must lie in \[0, 7\), got entries from 0 to 99"
    ):
        kb.paged_attention(**inputs)
    with pytest.raises(
        ValueError, match=r"append_to_pages: block_table must lie in \[0, 7\), got entries from 1 to 99"
    ):
        kb.append_to_pages(new, new, *pools, inputs["block_table"], _integers(31, 40, 0))


def test_a_backward_pass_over_pages_that_were_written_is_noticed() -> None:
    k, v = (randn(1, 1, 1, 16) for _ in range(2))
    pages, x = [randn(1, 1, 16, 16) for _ in range(2)], randn(16).requires_grad_()
    for page in pages * 2:  # by a new plan, and by one that is kept
        kept = (x * page).sum()
        kb.append_to_pages(k, v, *pages, _integers([0]), _integers(3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
    with torch.inference_mode():
        pages = [torch.zeros(1, 1, 16, 16, device=runtime.DEVICE) for _ in range(2)]
        kb.append_to_pages(k, v, *pages, _integers([0]), _integers(3))
    assert torch.equal(pages[0][0, 0, 3], k[0, 0, 0])


@pytest.mark.parametrize("window", (None, 30))
def test_a_cache_that_grows_keeps_its_kernel(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each 64 keys that there is room for, and one from where the window holds all keys."""
    made, real = [], kernels_decode.plan
    monkeypatch.setattr(kernels_decode, "plan", lambda *sizes: made.append(sizes[2]) or real(*sizes))
    q, k, v = _qkv(1, 4, 2, 2, 140, 16, dtype=torch.float32)
    given = {"causal": True, "window": window}
    for s in (1, 2, 30, 31, 64, 65, 66, 128, 129, 140):
        keys, values = k[:, :, :s].contiguous(), v[:, :, :s].contiguous()
        ours, exact = (each(q, keys, values, **given) for each in (kb.flash_attention, flash_attention_reference))
        torch.testing.assert_close(ours, exact)
    assert made == ([64, 128, 192] if window is None else [64, 64, 128, 192])


def test_pages_that_are_written_and_read_in_one_graph() -> None:
    inputs = _paged(2, 4, 2, 2, 16, 16, 2, torch.float32, [20, 5])
    new = [randn(2, 2, 1, 16) for _ in range(2)]

    def step(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        kb.append_to_pages(new[0], new[1], *rest)
        return kb.paged_attention(q, *rest) + 1

    backend = "inductor" if runtime.DEVICE.type == "cuda" else "aot_eager"
    compiled, plain = ([t.clone() for t in inputs.values()] for _ in range(2))
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(*compiled), step(*plain))
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too many queries": ({"q": lambda: randn(2, 4, 17, 16)}, "q must have at most 16 queries, got shape"),
    "pages of 20": (
        {"k_pages": lambda: randn(5, 2, 20, 16), "v_pages": lambda: randn(5, 2, 20, 16)},
        "k_pages must have 16 to 256 slots a page, a multiple of 16, got 20",
    ),
    "table of another batch": (
        {"block_table": lambda: _integers([0, 1])},
        r"block_table must have shape \(2, n\), got \(1, 2\)",
    ),
    "lengths of another batch": ({"lengths": lambda: _integers(1)}, r"lengths must have shape \(2,\), got \(1,\)"),
    "heads that do not divide": (
        {"q": lambda: randn(2, 3, 1, 16)},
        r"the heads of k_pages and v_pages must divide those of q \(3\), got 2",
    ),
    "values of other pages": (
        {"v_pages": lambda: randn(4, 2, 16, 16)},
        r"v_pages must have shape \(5, 2, 16, 16\), got \(4, 2, 16, 16\)",
    ),
    "new keys of another head size": (
        {"k": lambda: randn(2, 2, 1, 8), "v": lambda: randn(2, 2, 1, 8)},
        r"k_pages must have shape \(5, 2, 16, 8\), got \(5, 2, 16, 16\)",
    ),
    "new values of another dtype": ({"v": lambda: randn(2, 2, 1, 16).half()}, "v must have the dtype of k"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_says_what_is_wrong(case: str) -> None:
    changes, message = BAD[case]
    given: dict[str, Any] = _paged(2, 4, 2, 1, 16, 16, 2, torch.float32, [20, 5])
    name = "append_to_pages" if "v" in changes else "paged_attention"
    if "v" in changes:
        del given["q"]
        given |= {"k": randn(2, 2, 1, 16), "v": randn(2, 2, 1, 16)}
    refused(getattr(kb, name), given, changes, f"{name}: {message}")


@pytest.mark.skipif(not runtime.INTERPRET, reason="the interpreter's overflow check")
@pytest.mark.parametrize(
    ("far", "sizes"), ((1, (1, 3, 1)), (2, (1, 1, 3)), (3, (1, 1, 1))), ids=("heads", "slots", "columns")
)
def test_products_with_strides_of_32_bits_are_64_bit(
    far: int, sizes: tuple[int, ...], overflow_raises: Callable[[], None]
) -> None:
    """Strides have 32 bits themselves; new keys lie as far apart as the pages."""
    overflow_raises()
    pages, heads, n = sizes
    d = 9 if far == 3 else 8
    whole, last = (pages, heads, 16, d), (pages, heads, 16, d)[far] - 1
    strides = [heads * 16 * d, 16 * d, d, 1]
    strides[far] = 2**31 // last + 8 if far != 2 else 2**28
    inputs = _paged(1, heads, heads, n, d, 16, 1, torch.float16, [14])
    pools = [randn(*whole, dtype=torch.float16) for _ in range(2)]
    inputs |= {"k_pages": pools[0], "v_pages": pools[1], "block_table": _integers([pages - 1])}
    apart = [
        torch.empty(1 + sum((m - 1) * step for m, step in zip(whole, strides, strict=True)), dtype=torch.float16)
        .as_strided(whole, strides)
        .copy_(pool)
        for pool in pools
    ]
    expected = kb.paged_attention(**inputs)
    assert torch.equal(kb.paged_attention(**inputs | {"k_pages": apart[0], "v_pages": apart[1]}), expected)
    shape, steps = (1, heads, n, d), {1: (0, 2**30, d, 1), 2: (0, n * d, 2**30, 1), 3: (0, d, d, 2**28)}[far]
    new = [randn(*shape, dtype=torch.float16) for _ in range(2)]
    size = 1 + sum((m - 1) * step for m, step in zip(shape, steps, strict=True))
    new = [torch.empty(size, dtype=torch.float16).as_strided(shape, steps).copy_(t) for t in new]
    for pool in (pools, apart):
        kb.append_to_pages(*new, *pool, inputs["block_table"], _integers(13))
    assert all(torch.equal(a, b) for a, b in zip(pools, apart, strict=True))


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=label)
@pytest.mark.parametrize(
    "problem",
    (
        (1, 32, 4, 1, 1000, 128), (3, 8, 8, 1, 5000, 64), (2, 8, 2, 5, 777, 128), (2, 64, 8, 16, 700, 64),
        (1, 4, 1, 3, 400, 256), (2, 4, 2, 2, 100, 80),
    ),
    ids=label,
)  # fmt: skip
def test_real_sizes(problem: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = _qkv(*problem, dtype=dtype)
    lengths = torch.randint(0, k.shape[2] + 1, (q.shape[0],), device=q.device)
    for settings_of in ({}, {"causal": True}, {"causal": True, "lengths": lengths}, {"causal": True, "window": 130}):
        check_attention(settings_of, {"q": q, "k": k, "v": v})


@pytest.mark.gpu
def test_a_graph_follows_the_lengths() -> None:
    inputs = _paged(4, 16, 4, 2, 128, 64, 64, torch.bfloat16, [4096, 1, 300, 77])
    kb.paged_attention(**inputs)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kb.paged_attention(**inputs)
    for lengths in ([4096, 4096, 4096, 4096], [0, 5, 900, 2], [4000, 1, 2, 3]):
        inputs["lengths"].copy_(_integers(*lengths))
        graph.replay()
        assert torch.equal(captured, kb.paged_attention(**inputs))


@pytest.mark.gpu
def test_streams_do_not_share_counters() -> None:
    """Launches that run beside each other, and a graph beside them, each merge their own shares."""
    q, k, v = _qkv(1, 8, 2, 1, 30000, 64, dtype=torch.bfloat16)
    exact = kb.flash_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kb.flash_attention(q, k, v)
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(kb.flash_attention(q, k, v))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, exact) for out in (*outs, captured))
