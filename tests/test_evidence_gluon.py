"""The kernels in Gluon, of ``packed`` and of attention on Hopper, by ``kernelbook.lab.gluon``."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import kernelbook as kb

# isort: split
import pytest
import torch
import triton
from tensors import check_attention, far_apart, guarded_memory, packed, randn

from kernelbook import arguments, check, runtime
from kernelbook.attention import backward
from kernelbook.attention import kernels as attention_kernels
from kernelbook.attention import kernels_hopper as hopper
from kernelbook.moe_lora import moe_lora_reference, scatter2scatter_reference
from kernelbook.nf4 import kernels as nf4_kernels
from kernelbook.packed import products

# It looks into the interpreter, of which Triton 3.8 has another. A GPU runs these kernels as they are.
if not (runtime.INTERPRET and triton.__version__.startswith(("3.6.", "3.7."))):
    pytest.skip("needs the interpreter of Triton 3.6 or 3.7", allow_module_level=True)

from gluon_assembly import BOUNDED, assembly

from kernelbook.lab.gluon import interpreted

F16 = torch.float16


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[products.Plan | None]]:
    """As on a small Hopper, whose programs have several groups of rows each -> what is launched."""
    plan, made = products.plan, []
    small = dataclasses.replace(runtime.TARGETS["sm_90"], num_sms=2)

    def planned(*args: Any, **how: Any) -> products.Plan | None:
        made.append(plan(*args, **{**how, "properties": small}))
        return made[-1]

    monkeypatch.setattr(products, "plan", planned)
    for name in ("PACKED_ELEMENTS", "SOME_ELEMENTS"):
        monkeypatch.setattr(nf4_kernels, name, 0)
    with interpreted(assembly=assembly, any_tile=True, bounded=lambda _: BOUNDED):
        yield made


def _check(
    ours: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    grads: bool = False,
) -> None:
    """As ``check.check_op``, in one run, which writes nowhere but into the results."""

    def run(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = {name: t.detach().to(dtype).requires_grad_(grads and name == "x") for name, t in inputs.items()}
        out = function(**leaves)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return [out.detach(), *(torch.autograd.grad(out, leaves["x"], upstream) if grads else ())]

    with pytest.MonkeyPatch.context() as patch:
        untouched = guarded_memory(patch)
        found = run(ours, F16)
    assert untouched()
    for result, truth, plain in zip(found, run(reference, torch.float64), run(reference, F16), strict=True):
        check.compare("out", result, truth, plain).require()


def _were(kinds: set[str], made: list[products.Plan | None]) -> None:
    assert {plan.kind if plan else "none" for plan in made} == kinds, made


@pytest.mark.parametrize(
    ("m", "kind", "shape"),
    (
        (1, "64", (2, 40, 256)),
        (3, "64 double", (2, 200, 320)),
        (7, "128 double", (2, 72, 448)),
        (6, "4096 double", (3, 40, 1088)),
        (5, "64", (1, 48, 4096)),
        (3, "32", (2, 40, 320)),
        (3, "mxfp4", (2, 40, 2112)),
        (8, "nvfp4", (2, 40, 320)),
        (13, "4096 double", (3, 40, 1088)),
        (13, "64", (1, 48, 4096)),
        (20, "128 double", (2, 200, 320)),
        (29, "64 double", (2, 72, 1088)),
        (20, "nvfp4", (2, 200, 320)),
        (40, "nvfp4", (2, 72, 320)),
        (64, "64", (2, 40, 1216)),
        (12, "32", (2, 40, 320)),
        (270, "mxfp4", (2, 136, 128)),
    ),
    ids=str,
)
def test_matrix(m: int, kind: str, shape: tuple[int, ...], launched: list[products.Plan | None]) -> None:
    q, last = packed(kind, *shape), shape[0] - 1
    w = kb.nf4_dequantize(q, dtype=torch.float32)
    x = randn(m, shape[2], dtype=F16)
    for expert in {0, last}:
        given = torch.tensor([expert]) if m % 2 else expert
        dense = w[expert].t()
        _check(
            functools.partial(kb.nf4_matmul, q=q, expert=given), lambda x, dense=dense: x @ dense.to(x.dtype), {"x": x}
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "check_index_values", lambda *_: None)  # which a GPU does not
        for nobody in (shape[0], shape[0] + 3, -1):
            with check.poisoned_empty():
                assert (kb.nf4_matmul(x / 0, q, torch.tensor([nobody])) == 0).all()
    few = products.SKINNY_ROWS_OF_NVFP4 if kind == "nvfp4" else products.SKINNY_ROWS_OF_ONE
    _were({"skinny" if m <= few else "gemm"}, launched)


@pytest.mark.parametrize("times", (2.0, torch.nan))
@pytest.mark.parametrize(("m", "kind"), ((3, "skinny"), (40, "gemm")))
def test_rows_with_several_scales_of_scales_are_nan(
    m: int, kind: str, times: float, launched: list[products.Plan | None]
) -> None:
    """NVFP4's float32 multiplies the sum of a row: a row that has several of them is not a wrong number."""
    q, x = packed("nvfp4", 1, 40, 4160), randn(m, 4160, dtype=F16)
    assert q.nested_absmax is not None
    changed = q.nested_absmax.clone()
    changed[20] *= times  # of the elements 20 * 4096 to 21 * 4096
    y = kb.nf4_matmul(x, dataclasses.replace(q, nested_absmax=changed), 0)
    rows = torch.arange(40, device=y.device) * 4160
    both = (rows < 21 * 4096) & (rows + 4160 > 20 * 4096)
    assert both.sum() == 2 and y[:, both].isnan().all()
    assert torch.equal(y[:, ~both], kb.nf4_matmul(x, q, 0)[:, ~both])
    _were({kind}, launched)


@pytest.mark.parametrize(
    ("m", "step", "kind"),
    ((7, 2**28, "skinny"), (7, 2**26 - 16, "skinny"), (20, 2**28, "gemm"), (40, 2**26 - 16, "gemm")),
)
def test_rows_far_apart(m: int, step: int, kind: str, launched: list[products.Plan | None]) -> None:
    """Rows of x whose numbers need 64 bits, and such that just do without."""
    q, x = packed("64", 1, 40, 1024), randn(m, 1024, dtype=F16)
    assert torch.equal(kb.nf4_matmul(far_apart(x, step), q, 0), kb.nf4_matmul(x, q, 0))
    _were({kind}, launched)


def test_parts_of_k(launched: list[products.Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program of a tile adds the parts up in their order, and leaves its counter zero: a second call has the same bits."""
    monkeypatch.setattr(products, "split_of_k", lambda *_: 4)
    q, x = packed("64 double", 1, 72, 2112), randn(20, 2112, dtype=F16)
    with check.poisoned_empty():
        assert torch.equal(kb.nf4_matmul(x, q, 0), kb.nf4_matmul(x, q, 0))
    _were({"gemm"}, launched)
    assert launched[-1] is not None and launched[-1].parts == 4


def _ids(tokens: int, experts: int, skipped: bool = True) -> torch.Tensor:
    """Two experts for each token: the first one has them all, so that its tile is full."""
    ids = torch.stack([torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens) % (experts - 1) + 1], 1)
    ids[::5, 1] = experts if skipped else experts - 1
    return ids


# kind, tokens, N, K, rank, whether there are a bias and a gradient of x; few rows a matrix, and each height of tiles.
EXPERTS = (
    ("64", 7, 64, 512, 0, False, False),
    ("64 double", 12, 40, 320, 0, True, False),
    ("32", 5, 40, 320, 0, True, False),
    ("4096 double", 9, 40, 1088, 0, False, False),
    ("nvfp4", 7, 40, 320, 0, True, False),
    ("mxfp4", 7, 40, 320, 0, True, False),
    ("64", 32, 80, 320, 0, True, True),
    ("64 double", 20, 72, 1088, 20, True, False),
    ("32", 20, 80, 320, 0, False, True),
    ("mxfp4", 20, 80, 320, 3, False, True),
    ("nvfp4", 16, 80, 320, 3, False, True),
    ("64 double", 70, 400, 64, 0, False, True),
    ("4096 double", 64, 80, 576, 80, True, True),
    ("64 double", 140, 144, 320, 20, True, True),
)


@pytest.mark.parametrize("problem", EXPERTS, ids=lambda p: "-".join(map(str, p)))
def test_experts(problem: tuple[Any, ...], launched: list[products.Plan | None]) -> None:
    kind, tokens, n, k, rank, has_bias, backward = problem
    experts = 3 if tokens >= 16 else 4
    ids = _ids(tokens, experts)
    q = packed(kind, experts, n, k)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    inputs = {"x": randn(tokens, k, dtype=F16)}
    if rank:
        inputs["lora_a"] = randn(experts, rank, k, dtype=F16) / k**0.5
        inputs["lora_b"] = randn(experts, n, rank, dtype=F16)
    if has_bias:
        inputs["bias"] = randn(experts, n, dtype=F16)
    given = {"scaling": 0.5} | ({} if rank else {"lora_a": None, "lora_b": None})
    _check(
        functools.partial(kb.moe_lora, w=q, routing=kb.route(ids, experts), **given),
        lambda **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=ids, **given, **t),
        inputs,
        backward,
    )
    _were({"skinny" if tokens < 16 else "gemm"}, launched)


@pytest.mark.parametrize("skipped", (False, True))
def test_one_expert(skipped: bool, launched: list[products.Plan | None]) -> None:
    """A tile that is larger than all lists: what lies behind their ends is nobody's."""
    n, k, rank, tokens = 40, 128, 16, 70 if skipped else 140
    ids = torch.zeros(tokens, 1, dtype=torch.int64)
    ids[66:] = int(skipped)
    q = packed("64", 1, n, k)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    inputs = {name: randn(*shape, dtype=F16) for name, shape in (("x", (tokens, k)), ("lora_b", (1, n, rank)))}
    inputs |= {"lora_a": randn(1, rank, k, dtype=F16) / k**0.5, "bias": randn(1, n, dtype=F16)}
    _check(
        functools.partial(kb.moe_lora, w=q, routing=kb.route(ids, 1)),
        lambda **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=ids, **t),
        inputs,
    )
    _were({"gemm"}, launched)


@pytest.mark.parametrize("grouped_in", (False, True))
@pytest.mark.parametrize("tokens", (9, 20))
def test_experts_in_sorted_order(tokens: int, grouped_in: bool, launched: list[products.Plan | None]) -> None:
    experts, n, k = 3, 80, 320
    ids = _ids(tokens, experts, skipped=False)  # so that the last tile ends where the rows end
    q = packed("64", experts, n, k)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    how = {"grouped_in": grouped_in, "grouped_out": not grouped_in}
    _check(
        functools.partial(kb.scatter2scatter, w=q, routing=kb.route(ids, experts), **how),
        lambda x: scatter2scatter_reference(x, w.to(x.dtype), ids, **how),
        {"x": randn(2 * tokens if grouped_in else tokens, k, dtype=F16)},
        True,
    )
    _were({"skinny", "gemm"} if tokens == 9 else {"gemm"}, launched)


@pytest.mark.filterwarnings("ignore:(overflow|invalid)")
def test_what_is_infinite_stays_in_its_feature() -> None:
    """A block without end in the last row of W but one, and a row of x: rows, columns and words beyond the end are nobody's."""
    experts, n, k, tokens = 3, 72, 192, 20
    ids = torch.rand(tokens, experts).argsort(1)[:, :2]
    q = packed("64", experts, n, k)
    call = functools.partial(kb.moe_lora, w=q, lora_a=None, lora_b=None, routing=kb.route(ids, experts))
    x = randn(tokens, k, dtype=F16)
    first = call(x)
    q.absmax.view(experts, n, k // 64)[:, n - 2, -1] = float("inf")
    others = torch.arange(n) != n - 2
    assert torch.equal(call(x)[:, others], first[:, others])


# --- attention --------------------------------------------------------------------------------------------------------


# Features, whether causal, batch, heads, of keys, queries, keys; tiles: rows, keys a tile, warpgroups, buffers, overlap.
ATTENTION = (
    (32, False, 1, 2, 1, 70, 90, (16, 16, 2, 2, True)),
    (32, False, 1, 2, 1, 50, 64, (16, 16, 2, 2, True)),
    (32, True, 1, 2, 1, 90, 90, (16, 16, 2, 2, True)),
    (32, True, 2, 3, 1, 128, 150, (16, 16, 2, 2, True)),
    (24, True, 2, 2, 2, 70, 100, (16, 32, 3, 2, False)),
    (32, True, 1, 4, 1, 110, 70, (16, 16, 2, 3, True)),
    (32, False, 2, 4, 1, 150, 40, (16, 16, 3, 2, False)),
    (256, True, 2, 4, 2, 70, 75, (16, 16, 2, 2, True)),
    (256, False, 1, 4, 1, 40, 100, (16, 16, 2, 2, True)),
    (32, False, 1, 2, 1, 60, 50, (16, 16, 2, 2, True)),
    (128, True, 1, 4, 1, 60, 90, (16, 16, 2, 2, True)),
    (128, False, 1, 4, 2, 90, 75, (16, 16, 2, 2, True)),
    (80, True, 2, 2, 2, 70, 70, (16, 16, 2, 3, True)),
    (80, False, 1, 4, 2, 40, 130, (16, 16, 2, 3, True)),
    (96, True, 1, 4, 2, 100, 130, (16, 16, 2, 2, True)),
)


def _small_tiles(
    d: int, tiles: tuple[Any, ...], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[torch.Tensor]]:
    """-> the kernels that are launched, and the counters of turns."""
    rows, block_n, warpgroups, stages, overlap = tiles
    width = triton.next_power_of_2(d)
    blocks = {"BLOCK_D": width, "ROWS": rows, "STAGES": stages}
    forward = blocks | {"BLOCK_N": block_n, "WARPGROUPS": warpgroups, "OVERLAP": overlap, "REST": 0}
    configs = {
        "fwd": forward | ({"BLOCK_D": 64, "REST": d - 64} if 64 < d < 128 else {}),
        "dkdv": blocks | {"BLOCK_M": 16, "DQ": False, "DS_STAGES": 0},
        "dq": blocks | {"BLOCK_N": block_n},
        "bwd": blocks | {"BLOCK_M": 16, "DQ": True, "DS_STAGES": 2},
    }
    launched: list[str] = []

    def config(kernel: str, *_: Any) -> triton.Config:
        if kernel == "bwd" and not at_once:
            return None
        launched.append(kernel)
        return triton.Config(configs[kernel], num_warps=4)

    def grid(num_blocks: int, heads: int, width: int, causal: bool, mean: int, num_sms: int) -> tuple[int, int]:
        order = 1 + num_blocks % 2 if causal else 0
        return min(3, num_blocks * heads // (1 + order % 2)), order  # programs that stay for several blocks

    monkeypatch.setattr(hopper, "config", config)
    monkeypatch.setattr(hopper, "forward_grid", grid)
    monkeypatch.setattr(hopper, "parts", lambda heads, s, group, d, num_sms: max(1, group // 2))
    monkeypatch.setattr(hopper, "programs_wait_little", lambda *_: True)
    monkeypatch.setattr(attention_kernels, "section", lambda *_: 4)
    turns: list[torch.Tensor] = []

    def counters(count: int, _: torch.device) -> torch.Tensor:
        turns.append(torch.zeros(count, dtype=torch.int32))
        return turns[-1]

    monkeypatch.setattr(backward, "counters", counters)
    return launched, turns


@pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
@pytest.mark.parametrize("problem", ATTENTION, ids=lambda p: "-".join(map(str, p[:7])))
def test_attention(problem: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    d, causal, b, h, h_kv, n, s, tiles = problem
    at_once = d == 32 and s >= n
    launched, turns = _small_tiles(d, tiles, at_once, monkeypatch)
    if causal:
        monkeypatch.setattr(hopper, "parts", lambda *_: 1)
    shapes = {"q": (b, h, n, d), "k": (b, h_kv, s, d), "v": (b, h_kv, s, d)}
    inputs = {name: randn(*shape, dtype=F16) for name, shape in shapes.items()}
    if n % 20:  # probabilities of what does not exist would be large
        inputs |= {"q": -inputs["q"].abs() * 6 / d**0.5 * 5, "k": inputs["k"].abs()}
    else:  # largest scores that are far apart
        inputs["q"] *= 40
    if h_kv == 1:  # sinks join in the forward kernel
        inputs["sinks"] = 3 * randn(h)
    check_attention({"causal": causal}, inputs)
    assert {*launched} == ({"fwd", "bwd"} if at_once else {"fwd", "dkdv", "dq"})
    assert bool(turns) == at_once and not any(t.any() for t in turns), "as the next launch needs them"


# Features, heads, of keys; boundaries, queries: sequences longer than a tile, empty, of one row, many in a tile, rows behind.
PACKED = (
    (32, 2, 1, (0, 20, 20, 21, 75, 75), 90, (16, 16, 2, 2, True)),
    (32, 4, 1, (0, 90), 90, (16, 32, 3, 2, False)),
    (32, 2, 2, (0, 32, 64, 96), 96, (16, 16, 2, 3, True)),
    (128, 2, 1, (0, 1, 2, 3, 50), 61, (16, 16, 2, 2, True)),
    (96, 2, 1, (0, 40, 41, 100), 130, (16, 16, 2, 2, True)),
    (256, 2, 1, (0, 0, 45, 70), 75, (16, 16, 2, 2, True)),
    (32, 1, 1, (0,), 20, (16, 16, 2, 2, True)),
)


@pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("problem", PACKED, ids=lambda p: "-".join(map(str, p[:5])))
def test_packed_attention(problem: tuple[Any, ...], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each sequence alone; NaN in keys behind the last."""
    d, h, h_kv, rows, n, tiles = problem
    launched, _ = _small_tiles(d, tiles, False, monkeypatch)
    inputs = {name: randn(1, heads, n, d, dtype=F16) for name, heads in (("q", h), ("k", h_kv), ("v", h_kv))}
    for name in "kv":
        inputs[name][:, :, rows[-1] :] = float("nan")
    if h > h_kv:
        inputs["sinks"] = randn(h)
    else:  # largest scores that are far apart
        inputs["q"] *= 10
    check_attention({"causal": causal, "cu_seqlens": torch.tensor(rows)}, inputs, ("q", "k", "v"))
    assert {*launched} == {"fwd", "dkdv", "dq"}


@pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
@pytest.mark.parametrize("rows", ((20, 60), (-9, 50, 30, 99, 200), (45, 0)), ids=str)
def test_packed_attention_ends(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries that a GPU does not check: nobody waits for a tile that nobody copies."""
    monkeypatch.setattr(arguments, "check_index_values", lambda *_, **__: None)
    _small_tiles(32, (16, 16, 2, 2, True), False, monkeypatch)
    q, k, v = (randn(1, 1, 90, 32, dtype=F16).requires_grad_() for _ in range(3))
    out = kb.flash_attention(q, k, v, causal=True, cu_seqlens=torch.tensor(rows))
    assert [grad.shape for grad in torch.autograd.grad(out, (q, k, v), out)] == [q.shape] * 3
