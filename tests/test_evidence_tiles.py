"""Kernels in tiles that are far too small, so that small inputs have many of them, and the last of each is not full."""

import kernelbook as kb

# isort: split
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from tensors import check_attention, randn
from triton.runtime import interpreter

from bench import sparse_inference
from kernelbook import check, runtime
from kernelbook.attention import kernels as attention_kernels
from kernelbook.attention import kernels_decode as decode_kernels
from kernelbook.attention import paged_attention_reference
from kernelbook.interop import rotary
from kernelbook.moe_lora import cases as moe_cases
from kernelbook.moe_lora import kernels as moe_kernels
from kernelbook.nn import kernels as nn_kernels
from kernelbook.nn.swiglu import swiglu
from kernelbook.sparse_linear import kernels as sparse_kernels
from kernelbook.sparse_linear import op as sparse_op
from kernelbook.sparse_linear import sparse_dw_reference, sparse_dx_reference, sparse_forward_reference
from kernelbook.study import moe_lora as moe_study
from kernelbook.train import kernels as train_kernels
from kernelbook.train.chunks import Layout, knn_scores, knn_scores_reference, top_chunks, top_chunks_reference
from kernelbook.train.optimizer import ChunkAdamW

pytestmark = pytest.mark.skipif(not runtime.INTERPRET, reason="tiles that no GPU would be given")


# --- sparse_linear --------------------------------------------------------------------------------------------------


def _whole(*shape: int) -> torch.Tensor:
    """Whole numbers, so that all sums are exact, of more bits than float16 has."""
    return torch.randint(-4, 5, shape, device=runtime.DEVICE).float() * 1025


def _assert_exact(m: int, d_in: int, d_out: int, ids: list[int], chunk: int) -> None:
    """All products of sparse_linear, to the last bit; what is inactive is full of NaN."""
    x, w = _whole(m, d_in) / 1025, _whole(d_out, d_in) / 1025
    dy, b = _whole(m, d_out), _whole(d_out)
    given = {"active_chunks": torch.tensor(ids, device=x.device), "chunk_size": chunk}
    unlisted = ~torch.isin(torch.arange(d_out, device=x.device) // chunk, given["active_chunks"])
    clean = [t.double() for t in (x, w, dy, b)]
    w[unlisted], dy[:, unlisted], b[unlisted] = float("nan"), float("nan"), float("nan")
    for compact in (False, True):
        found = (
            *kb.sparse_backward(x, w, dy, compact=compact, **given),
            kb.sparse_forward(x, w, b, compact=compact, **given),
        )
        x64, w64, dy64, b64 = clean
        exact = (
            *sparse_dw_reference(x64, dy64, compact=compact, **given), sparse_dx_reference(dy64, w64, **given),
            sparse_forward_reference(x64, w64, b64, compact=compact, **given),
        )  # fmt: skip
        for name, ours, true in zip(("dw", "db", "dx", "y"), found, exact, strict=True):
            assert torch.equal(ours.double(), true), (name, compact)


@pytest.mark.parametrize(
    ("m", "chunk", "side", "boxes", "split"),
    (
        (34, 20, 16, False, 1),
        (70, 16, 16, False, 3),
        (34, 64, 128, True, 1),
        (34, 128, 128, True, 1),
        (70, 64, 64, True, 2),
    ),
    ids=("", "shares without boxes", "two boxes", "half a chunk", "shares"),
)
def test_sparse_linear_to_the_last_bit(
    m: int, chunk: int, side: int, boxes: bool, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of several boxes, the last of them with one that does not exist; fewer pieces of zeros than tiles."""
    blocks = {"BLOCK_R": side, "BLOCK_D": 16, "BLOCK_K": 16, "GROUP": 2}
    plan = sparse_kernels.Plan(triton.Config(blocks, num_warps=4, num_stages=1), split, boxes)
    monkeypatch.setattr(sparse_kernels, "plan_backward", lambda *_: plan)
    monkeypatch.setattr(sparse_kernels, "plan_forward", lambda *_: sparse_kernels.Plan(plan.config))
    monkeypatch.setattr(sparse_op, "_strategy", lambda *_, **__: "tiles")  # in float32, which no GPU does
    for name, small in (("ZERO_PIECE", 128), ("BLOCK_ZERO", 64), ("ZERO_ROWS", 32), ("BLOCK_A", 2)):
        monkeypatch.setattr(sparse_kernels, name, small)
    _assert_exact(m, 24, 4 * chunk - 8, [3, 1, 2], chunk)


def test_packed_chunks_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for a few rows and a few columns each; a chunk is no power of two."""
    config = triton.Config({"BLOCK_M": 4, "BLOCK_N": 16, "ROWS": 8}, num_warps=4)
    monkeypatch.setattr(sparse_kernels, "PACK_CONFIG", config)
    monkeypatch.setattr(sparse_kernels, "PLACE_BLOCK_M", 16)
    _assert_exact(22, 24, 4 * 20 - 8, [3, 0, 2], 20)


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "s", "window"), ((50, 110, 30), (50, 70, 45)))
def test_attention_to_keys_before_the_queries(n: int, s: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys before the first query than a window has, and fewer: which tiles of queries see all keys of a tile."""
    small = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": attention_kernels.block_d(24)}
    monkeypatch.setattr(attention_kernels, "config", lambda *_: triton.Config(small, num_warps=4, num_stages=1))
    monkeypatch.setattr(attention_kernels, "section", lambda *_: 2)
    check_attention(
        {"causal": True, "window": window}, {"q": randn(1, 2, n, 24), "k": randn(1, 1, s, 24), "v": randn(1, 1, s, 24)}
    )


@pytest.mark.parametrize("late", (False, True), ids=("", "queries asked for with the keys"))
@pytest.mark.parametrize(("height", "splits", "pieces"), ((16, 1, 1), (16, 4, 2), (64, 3, 1)))
@pytest.mark.parametrize("n", (1, 7))
def test_decoding(n: int, height: int, splits: int, pieces: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 queries or 64, and 16 keys: of 28 queries two tiles, or one; keys in shares, columns in pieces."""
    pieces = pieces if n == 1 else 1  # only few rows are cut
    blocks = {"BLOCK_M": height, "BLOCK_N": 16, "BLOCK_D": 64, "PIECES": pieces, "Q_LATE": late, "STAGES": 1}
    plan = triton.Config(blocks, num_warps=4, num_stages=1), splits
    monkeypatch.setattr(decode_kernels, "tiles_and_splits", lambda *_: plan)
    b, h_kv, group, s, page = 3, 2, 4, 90, 16
    q = randn(b, h_kv * group, n, 64).half()
    lengths = torch.tensor([90, 37, 0], device=q.device)
    for window in (None, 20):
        k, v = (randn(b, h_kv, s, 64).half() for _ in range(2))
        check_attention({"causal": True, "lengths": lengths, "window": window}, {"q": q, "k": k, "v": v}, ())
    if not late:
        pages = [randn(20, h_kv, page, 64).half() for _ in range(2)]
        table = torch.randperm(20, device=q.device)[:18].view(3, 6)
        table[1, 1] = -3  # a page that is not there
        inputs = {"q": q, "k_pages": pages[0], "v_pages": pages[1], "block_table": table, "lengths": lengths}
        check.check_op(kb.paged_attention, paged_attention_reference, inputs)


def _among_nan(tensor: torch.Tensor, rows: int = 0) -> torch.Tensor:
    """The tensor with NaN behind its last column, of which the kernels' tiles have more, and behind its rows."""
    *outer, n, d = tensor.shape
    whole = torch.full((*outer, n + rows, 32), float("nan"), dtype=tensor.dtype, device=tensor.device)
    whole[..., :n, :d] = tensor
    return whole[..., :n, :d]


@pytest.mark.parametrize(
    ("n", "block_n", "page", "splits", "merged"),
    ((3, 16, 16, 1, 1), (3, 64, 16, 1, 1), (1, 16, 32, 3, 1), (3, 16, 32, 5, 2)),
)
@pytest.mark.parametrize("listed", (2, 128))
def test_decoding_among_nan(
    listed: int, n: int, block_n: int, page: int, splits: int, merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that do not fill a tile, a share of one key and one that begins within a page.

    Shares are merged two at a time, pages listed two at a time. Numbers of no page count as keys that are not there.
    """
    blocks = {"BLOCK_M": 16, "BLOCK_N": block_n, "BLOCK_D": 32, "PIECES": 1, "Q_LATE": False, "STAGES": 1}
    plan = triton.Config(blocks, num_warps=4, num_stages=1), splits
    monkeypatch.setattr(decode_kernels, "tiles_and_splits", lambda *_: plan)
    monkeypatch.setattr(decode_kernels, "_merged_at_a_time", lambda *_: merged)
    monkeypatch.setattr(decode_kernels, "MAX_LISTED", listed)
    q = _among_nan(randn(3, 4, n, 24))
    lengths = torch.tensor([0, 33, 81], device=q.device)
    if listed == 2:
        k, v = (_among_nan(randn(3, 2, 81, 24), 16) for _ in range(2))
        check_attention({"causal": True, "lengths": lengths}, {"q": q, "k": k, "v": v}, ())
    pages = [_among_nan(randn(20, 2, page, 24)) for _ in range(2)]
    table = torch.randperm(20, device=q.device)[: 3 * (96 // page)].view(3, -1)
    table[1, 0], table[2, 0] = 20, -(2**32) + 1
    if page == 16:
        table[1, 2], table[2, 2] = -3, 2**32 + 1
    inputs = {"q": q, "k_pages": pages[0], "v_pages": pages[1], "block_table": table, "lengths": lengths}
    check.check_op(kb.paged_attention, paged_attention_reference, inputs)


def test_no_share_of_nothing_is_divided_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an integer divided by zero is, no GPU says."""
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": 16, "PIECES": 1, "Q_LATE": False, "STAGES": 1}
    plan = triton.Config(blocks, num_warps=4, num_stages=1), 3
    monkeypatch.setattr(decode_kernels, "tiles_and_splits", lambda *_: plan)
    lengths = torch.tensor([40, 0], device=runtime.DEVICE)
    divide = interpreter.interpreter_builder.create_idiv

    def checked(lhs: object, rhs: object) -> object:
        assert np.all(rhs.data != 0)
        return divide(lhs, rhs)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_sdiv", checked)
    o = kb.flash_attention(randn(2, 2, 1, 16), randn(2, 2, 40, 16), randn(2, 2, 40, 16), lengths=lengths)
    assert o[0].any() and not o[1].any()


# --- moe_lora and modules -------------------------------------------------------------------------------------------


@pytest.fixture
def _small_moe_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = moe_kernels.tiles
    monkeypatch.setattr(
        moe_kernels,
        "rows_tiles",
        lambda rows, experts, rank, itemsize, access, *_: tiles(
            4, 1, BLOCK_M=16, SMALL_M=16, **dict.fromkeys(("BLOCK_N", "BLOCK_K"), 32 if access == "packed" else 16)
        ),
    )  # fmt: skip
    monkeypatch.setattr(
        moe_kernels,
        "shrink_tiles",
        lambda rows, experts, k, rank, *_: tiles(4, 1, BLOCK_M=16, BLOCK_K=16, BLOCK_R=16, SPLIT=2),
    )
    monkeypatch.setattr(moe_kernels, "wgrad_tiles", lambda *_: tiles(4, 1, BLOCK_P=16, BLOCK_Q=16, BLOCK_M=16))
    monkeypatch.setattr(moe_study, "recompute_tiles", lambda *_: tiles(4, 1, BLOCK_Q=16, BLOCK_M=16, BLOCK_C=16))
    monkeypatch.setattr(moe_kernels, "slots_tiles", lambda slots, _: tiles(1, 1, BLOCK_S=4, BLOCK_C=16))
    monkeypatch.setattr(moe_kernels, "route_blocks", lambda rows, experts: (4, 8, 2))
    monkeypatch.setattr(moe_kernels, "ROUTE_BLOCK", 16)


@pytest.mark.usefixtures("_small_moe_tiles")
@pytest.mark.parametrize("strategy", ("fused", "split"))
@pytest.mark.parametrize("packed", (False, True))
def test_moe_lora(strategy: str, packed: bool) -> None:
    """Two tiles of rows of an expert, of columns, of sums and of the rank; slots to skip; programs that route together."""
    case = moe_cases.CASES["moe_lora in 4 bits" if packed else "moe_lora"]
    sizes = {
        "tokens": 45,
        "experts": 5,
        "slots": 3,
        "k": 64,
        "n": 40,
        "rank": 20,
        "skipped": 0.1,
        "bias": True,
        "gates": True,
    }
    for grouped in (False,) if packed else (False, True):
        case.check(case.of(**sizes, strategy=strategy, grouped_in=grouped))


def test_elementwise_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn_kernels, "BLOCK_I", 16)
    monkeypatch.setattr(nn_kernels, "ROWS", 2)
    monkeypatch.setattr(nn_kernels, "HEADS", 4)
    h = randn(5, 74)
    check.check_op(swiglu, lambda h: F.silu(h[:, :37]) * h[:, 37:], {"h": h}, grads=("h",))

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([-x[..., 6:], x[..., :6]], -1)
        return x * cos[:, None].to(x.dtype) + halves * sin[:, None].to(x.dtype)

    q, k = randn(2, 3, 9, 12).transpose(1, 2), randn(2, 5, 3, 14)[..., 1:-1]
    shared, own = randn(1, 3, 12).expand(2, -1, -1), randn(2, 3, 12)
    for cos, sin in ((own, shared), (shared, own)):
        check.check_op(
            functools.partial(rotary.rotate, cos=cos, sin=sin),
            lambda q, k, cos=cos, sin=sin: (turned(q, cos, sin), turned(k, cos, sin)),
            {"q": q, "k": k},
            grads=("q", "k"),
        )


# --- training -------------------------------------------------------------------------------------------------------


def test_chunks_of_several_layers_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of four; among equal ones the first, NaN and what is taken at the ends."""
    monkeypatch.setattr(train_kernels, "TOP_BLOCK", 4)
    layout = Layout.of_fraction([11, 1, 18], 0.4)
    scores = torch.randint(-4, 3, (layout.total,), device=runtime.DEVICE).float()
    scores[[3, 20]] = float("nan")
    ids = torch.full((layout.total_active,), -1, dtype=torch.int64, device=runtime.DEVICE)
    active = torch.tensor(layout.active, dtype=torch.int32, device=runtime.DEVICE)
    given = {"longest": 18}
    chosen = top_chunks(scores, ids, layout.starts(), layout.slots(), active, **given)
    ranked = scores.nan_to_num(float("inf"))
    assert torch.equal(ids, top_chunks_reference(ranked, layout.counts, layout.active))
    assert int(chosen.sum()) == layout.total_active
    taken = torch.zeros_like(chosen)
    taken[[5, 13, 29]] = 1
    chosen = top_chunks(scores, ids, layout.starts(), layout.slots(), active, taken=taken, **given)
    assert torch.equal(
        ids, top_chunks_reference(ranked.masked_fill(taken == 1, -float("inf")), layout.counts, layout.active)
    )
    assert int(chosen.sum()) == layout.total_active + 3 and bool((chosen[taken == 1] == 1).all())
    draws, versions = [], (ids._version, chosen._version)
    for step in (1, 2):
        now = torch.tensor([step], dtype=torch.int32, device=runtime.DEVICE)
        top_chunks(None, ids, layout.starts(), layout.slots(), active, chosen=chosen, step=now, seed=5, **given)
        draws.append(ids.tolist())
    assert draws[0] != draws[1] and (ids._version, chosen._version) == tuple(version + 2 for version in versions)
    everything = Layout((13,), (13,))
    ids, orders = torch.empty(13, dtype=torch.int64, device=runtime.DEVICE), []
    for step in (1, 2):
        now = torch.tensor([step], dtype=torch.int32, device=runtime.DEVICE)
        counts = torch.tensor([13], dtype=torch.int32, device=runtime.DEVICE)
        top_chunks(
            None, ids, everything.starts(), everything.slots(), counts, longest=13, chosen=torch.empty_like(chosen[:13]),
            step=now, seed=5,
        )  # fmt: skip
        orders.append(ids.tolist())
    # A step's numbers are no others' moved on by one.
    assert [i - 1 for i in orders[0] if i > 0] != [i for i in orders[1] if i < 12]


def test_neighbours_in_the_first_steps() -> None:
    """Step 0 was lately, and never is not, though -1 is no further away; a neighbour in the same place; nobody but step 0."""
    layout = Layout((9, 3), (2, 1))
    features, norms = randn(4, 12), torch.rand(12, device=runtime.DEVICE) + 0.1
    features[:, 1] = features[:, 2]
    seen = torch.tensor([0, -1, 2, 0, -1, 3, -1, 0, 1, 0, -1, -1], dtype=torch.int32, device=norms.device)
    for step, window in ((3, 9), (3, 2)):
        now = torch.tensor([step], dtype=torch.int32, device=norms.device)
        found = knn_scores(features, norms, seen, now, layout.starts(), longest=9, window=window, k=2)
        expected = knn_scores_reference(features, norms, seen, now, layout.starts(), window=window, k=2)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("inactive", ("skip", "decay"))
def test_chunks_are_updated_in_pieces(inactive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 32 elements, ids in steps of two, and a gradient that is scaled."""
    monkeypatch.setattr(train_kernels, "ADAMW_CONFIG", triton.Config({"BLOCK": 32}, num_warps=1))
    monkeypatch.setattr(train_kernels, "BLOCK_A", 2)
    start, chunk, d = randn(32, 7), 8, 7
    given = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    ours = torch.nn.Parameter(start.clone())
    sparse = ChunkAdamW([ours], chunk_size=chunk, inactive=inactive, **given)
    theirs = [torch.nn.Parameter(part.clone()) for part in start.split(chunk)]
    dense = [torch.optim.AdamW([part], **given) for part in theirs]
    for active, scale in (([1, 3, 0], 0.5), ([3], 4.0), ([2, 0, 3], 0.1)):  # AdamW hardly sees a factor that stays
        grads = {c: randn(chunk, d) for c in active}
        rows = torch.cat([torch.arange(c * chunk, (c + 1) * chunk, device=start.device) for c in active])
        ours.grad = torch.sparse_coo_tensor(rows[None], torch.cat([grads[c] for c in active]), start.shape)
        sparse.step(scale=torch.tensor(scale, device=start.device))
        for c, (part, step) in enumerate(zip(theirs, dense, strict=True)):
            part.grad = grads[c] * scale if c in grads else (torch.zeros_like(part) if inactive == "decay" else None)
            step.step()
    torch.testing.assert_close(ours.detach(), torch.cat([p.detach() for p in theirs]), rtol=1e-5, atol=1e-6)


def test_columns_above_a_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_inference, "ABOVE_BLOCK", 16)
    predictor = sparse_inference.Predictor(6, 70, 4, count=25)
    x = randn(3, 6)
    with torch.no_grad():
        predictor.b.copy_(randn(70, 4))
        scores = predictor.scores(x)
        for threshold in (*scores.amax(0).sort().values[46:54].tolist(), 1e9, -1e9):
            predictor.threshold.fill_(threshold)
            best = (scores > threshold).any(0).nonzero().flatten()[:25]
            found = predictor(x)
            assert torch.equal(found[found < 70], best)
