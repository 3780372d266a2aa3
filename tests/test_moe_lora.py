"""The room moe_lora: every output and gradient by the rule of check.py, and everything around it."""

import functools
from typing import Any

import pytest
import torch
from tensors import guarded_memory, label, packed, randn, refused

import kernelbook as kb
from kernelbook import arguments, check, runtime
from kernelbook.lab.compiled import compile_calls
from kernelbook.moe_lora import kernels, moe_lora_reference, route_reference
from kernelbook.moe_lora.cases import CASES
from kernelbook.moe_lora.routing import tiles_of_height

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LORA = ("lora_a", "lora_b")


def _experts(tokens: int, experts: int, slots: int, skipped: float = 0.0) -> torch.Tensor:
    """(T, k) different experts for each token; a share of the slots is to be skipped."""
    ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots]
    return ids.masked_fill(torch.rand(ids.shape, device=ids.device) < skipped, experts)


def _inputs(
    ids: torch.Tensor, experts: int, k: int, n: int, rank: int, dtype: torch.dtype, *,
    grouped_in: bool = False, with_bias: bool = False, gates: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    inputs = {
        "x": randn(ids.numel() if grouped_in else ids.shape[0], k, dtype=dtype),
        "w": randn(experts, k, n, dtype=dtype) / k**0.5,
        "lora_a": randn(experts, rank, k, dtype=dtype) / k**0.5,
        "lora_b": randn(experts, n, rank, dtype=dtype),
    }
    if with_bias:
        inputs["bias"] = randn(experts, n, dtype=dtype)
    if gates is not None:
        inputs["gates"] = torch.rand(ids.shape, device=ids.device).to(gates)
    return inputs


# --- routing --------------------------------------------------------------------------------------------------------


def _check_routing(ids: torch.Tensor, experts: int) -> kb.Routing:
    """The sort is PyTorch's stable one, and the tiles of each height cover every position once."""
    with check.poisoned_empty():
        routing = kb.route(ids, experts)
    order, inverse, offsets = route_reference(ids.clamp(max=experts), experts)
    assert torch.equal(routing.order.long(), order)
    assert torch.equal(routing.inverse.long(), inverse)
    assert torch.equal(routing.offsets.long(), offsets)
    assert routing.num_experts == experts and routing.slots == ids.shape[1]
    group_of = ids.reshape(-1).long()[order].tolist()
    for height in kernels.HEIGHTS:
        begin, count = tiles_of_height(ids.numel(), experts, height)
        covered = []
        for group, first, rows in routing.lists[begin : begin + 3 * count].view(-1, 3).tolist():
            if group >= 0:
                assert 1 <= rows <= height
                assert set(group_of[first : first + rows]) == {group}
                covered += range(first, first + rows)
        assert covered == list(range(ids.numel()))
    return routing


ROUTES = {
    "few tokens": lambda: (_experts(3, 7, 2), 7),
    "many experts": lambda: (_experts(30, 270, 3), 270),
    "several programs": lambda: (_experts(400, 13, 3, 0.3), 13),
    "one expert has all, several programs": lambda: (torch.full((700, 1), 3, device=runtime.DEVICE), 9),
    "nothing but slots to skip": lambda: (_experts(20, 6, 2, 2.0), 6),
    "int32": lambda: (_experts(33, 5, 2).int(), 5),
    "strided": lambda: (_experts(8, 5, 4).repeat_interleave(2, 0).t()[:, ::2].t(), 5),
    "no token": lambda: (_experts(0, 5, 2), 5),
    "no slot": lambda: (_experts(4, 5, 0), 5),
}


@pytest.mark.parametrize("name", ROUTES)
def test_route(name: str) -> None:
    _check_routing(*ROUTES[name]())


# --- outputs and gradients ------------------------------------------------------------------------------------------


# A small tile in a large one, tall and wide ones.
TILES = (
    kernels.tiles(4, 3, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, SMALL_M=16),
    kernels.tiles(4, 3, BLOCK_M=128, BLOCK_N=16, BLOCK_K=16, SMALL_M=64),
    kernels.tiles(4, 2, BLOCK_M=16, BLOCK_N=128, BLOCK_K=64, SMALL_M=16),
)


@pytest.mark.parametrize("tiles", TILES, ids=("small", "tall", "wide"))
@pytest.mark.parametrize("strategy", ("fused", "split"))
def test_every_way_to_cut_the_product(tiles: kernels.Tiles, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also transposed weights, rows that are read by tensor descriptors, and shares of a long thin sum."""
    monkeypatch.setattr(kernels, "rows_tiles", lambda *_: tiles)
    thin = kernels.tiles(4, 2, BLOCK_M=16, BLOCK_K=32, BLOCK_R=16, SPLIT=3)
    monkeypatch.setattr(kernels, "shrink_tiles", lambda *_: thin)
    ids = _experts(60, 3, 2, 0.1)
    for grouped_in in (False, True):
        inputs = _inputs(ids, 3, 72, 80, 16, torch.float16, grouped_in=grouped_in)
        for w in (inputs["w"], inputs["w"].mT.contiguous().mT):
            how = {"strategy": strategy, "grouped_in": grouped_in, "scaling": 0.5}
            CASES["moe_lora"].check(inputs | {"w": w, "routing": kb.route(ids, 3), **how})


# --- what LoRA promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ("fused", "split"))
def test_without_scaling_it_is_the_base(strategy: str) -> None:
    ids = _experts(30, 5, 2, 0.1)
    routing = kb.route(ids, 5)
    inputs = _inputs(ids, 5, 40, 48, 4, torch.float16)
    y = kb.moe_lora(**inputs, routing=routing, strategy=strategy, scaling=0.0)
    assert torch.equal(y, kb.scatter2scatter(inputs["x"], inputs["w"], routing))


@pytest.mark.parametrize("strategy", ("fused", "split"))
def test_experts_without_tokens_get_zero_gradients(strategy: str) -> None:
    ids = _experts(20, 3, 2) * 2 + 1  # of 8 experts, 1, 3 and 5 have tokens
    routing = kb.route(ids, 8)
    inputs = _inputs(ids, 8, 24, 40, 3, torch.float16, with_bias=True)
    none = torch.tensor([0, 2, 4, 6, 7], device=ids.device)
    for name in ("w", *LORA, "bias"):
        inputs[name][none] = torch.nan
    leaves = [t.requires_grad_() for t in inputs.values()]
    with check.poisoned_empty():
        y = kb.moe_lora(**dict(zip(inputs, leaves, strict=True)), routing=routing, strategy=strategy)
        _, *grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert bool(torch.isfinite(y).all())
    for grad in grads:
        assert (grad[none] == 0).all() and torch.isfinite(grad).all() and grad[[1, 3, 5]].abs().sum() > 0


@pytest.mark.parametrize("strategy", ("fused", "split"))
@pytest.mark.parametrize("gates", (None, torch.float32), ids=label)
def test_slots_to_skip_are_zero_and_do_not_leak(strategy: str, gates: torch.dtype | None) -> None:
    ids = _experts(20, 4, 2)
    ids[3] = 4
    ids[7, 1] = 4
    routing = kb.route(ids, 4)
    inputs = _inputs(ids, 4, 24, 40, 3, torch.float16, with_bias=True, gates=gates)
    inputs["x"][3] = torch.nan
    leaves = [t.requires_grad_() for t in inputs.values()]
    with check.poisoned_empty():
        y = kb.moe_lora(**dict(zip(inputs, leaves, strict=True)), routing=routing, strategy=strategy)
        dy = torch.ones_like(y)
        if gates is None:
            dy[[6, 7, 15]] = torch.nan
        dx, *grads = torch.autograd.grad(y, leaves, dy)
    assert bool(torch.isfinite(y).all()) and bool(torch.isfinite(dx).all())
    assert (y[3] == 0).all() if gates is not None else (y[[6, 7, 15]] == 0).all()
    assert (dx[3] == 0).all()
    finite = grads[:-1] if gates is not None else grads
    assert all(bool(torch.isfinite(grad).all()) for grad in finite)


# --- packed experts -------------------------------------------------------------------------------------------------


# E, N, K, block size: whole words; rows that are no whole words, blocks that straddle rows; odd sizes.
PACKED = ((4, 32, 64, 64), (3, 33, 40, 32), (2, 5, 7, 64), (3, 64, 96, 4096))


@pytest.mark.parametrize("double_quant", (False, True))
@pytest.mark.parametrize("shape", PACKED, ids=label)
def test_packed_experts_bit_for_bit(shape: tuple[int, ...], double_quant: bool) -> None:
    """Rows of an identity are what the decoded matrix holds; on GPUs before Hopper 16-bit numbers are held to the rule."""
    experts, n, k, block_size = shape
    q = kb.nf4_quantize(randn(experts, n, k), block_size=block_size, double_quant=double_quant)
    ids = torch.full((k, 1), experts - 1, device=runtime.DEVICE)
    for dtype in DTYPES:
        dense = kb.nf4_dequantize(q, dtype=dtype)[experts - 1].t()
        decoded = kb.scatter2scatter(torch.eye(k, dtype=dtype, device=ids.device), q, kb.route(ids, experts))
        exact = runtime.INTERPRET or dtype == torch.float32
        if exact or (k % 64 == 0 and runtime.properties(ids.device).arch == "sm_90"):
            assert torch.equal(decoded, dense)
        else:
            assert check.relative_error(decoded, dense.double()) < 2 * check.FLOOR[dtype]


@pytest.mark.parametrize("k", (64, 96))  # on Hopper decoded in its own kernels, and in those of every GPU
def test_packed_elements_beyond_float16_are_infinite_and_not_nan(k: int) -> None:
    w, x = randn(1, 33, k), randn(4, k, dtype=torch.float16).abs() + 0.1
    w[:, :-1, ::32] = 1e5  # beside it all others of a block are zero
    q = kb.nf4_quantize(w, block_size=32)
    ids = torch.zeros(4, 1, dtype=torch.int64, device=runtime.DEVICE)
    y = kb.scatter2scatter(x, q, kb.route(ids, 1))
    assert (y[:, :-1] == float("inf")).all() and torch.isfinite(y[:, -1]).all()
    torch.testing.assert_close(y, x @ kb.nf4_dequantize(q, dtype=torch.float16)[0].t(), rtol=1e-2, atol=1e-2)


HOPPER = pytest.mark.skipif(
    runtime.INTERPRET or not runtime.HAS_GPU or runtime.properties(runtime.DEVICE).arch != "sm_90",
    reason="kernels of Hopper GPUs",
)


@pytest.mark.gpu
@HOPPER
def test_mxfp4_experts_of_few_rows_bit_for_bit() -> None:
    """Their scales are powers of two: nothing is rounded."""
    experts, n, k = 3, 72, 128
    q = packed("mxfp4", experts, n, k)
    for dtype in (torch.bfloat16, torch.float16):
        expected = kb.nf4_dequantize(q, dtype=dtype)[1].t()
        for start in range(0, k, 4):
            x = torch.eye(k, dtype=dtype, device=q.device)[start : start + 4]
            ids = torch.full((4, 1), 1, device=q.device)
            assert torch.equal(kb.scatter2scatter(x, q, kb.route(ids, experts)), expected[start : start + 4])
            assert torch.equal(kb.nf4_matmul(x, q, 1), expected[start : start + 4])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=label)
@pytest.mark.parametrize("shape", PACKED[:3], ids=label)
def test_packed_outputs_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    experts, n, k, block_size = shape
    ids = _experts(9, experts, 2, 0.2)
    for double_quant, strategy, gated, transposed in ((True, "fused", True, False), (False, "split", False, True)):
        inputs = _inputs(ids, experts, k, n, 3, dtype, with_bias=True, gates=dtype if gated else None)
        del inputs["w"]
        stored = (k, n) if transposed else (n, k)
        q = kb.nf4_quantize(randn(experts, *stored) / k**0.5, block_size=block_size, double_quant=double_quant)
        w = kb.nf4_dequantize(q, dtype=dtype)
        w = w if transposed else w.transpose(1, 2)
        how = {"strategy": strategy, "scaling": 0.5, "transposed": transposed}
        check.check_op(
            functools.partial(kb.moe_lora, w=q, routing=kb.route(ids, experts), **how),
            lambda w=w, ids=ids, **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=ids, scaling=0.5, **t),
            inputs,
            grads=tuple(inputs),
        )


def test_packed_experts_without_tokens_do_not_leak() -> None:
    """Nor do the bytes and scales of an expert that has none; nothing of the size of all experts is allocated."""
    q = kb.nf4_quantize(randn(4, 32, 64))
    ids = torch.tensor([[0, 2], [2, 4], [4, 4]], device=runtime.DEVICE)  # expert 4 is a slot to skip
    q.absmax.view(4, -1)[[1, 3]] = torch.nan
    x = randn(3, 64).requires_grad_()
    with check.poisoned_empty():
        y = kb.scatter2scatter(x, q, kb.route(ids, 4))
        [dx] = torch.autograd.grad(y, x, torch.ones_like(y))
    assert bool(torch.isfinite(y).all()) and bool(torch.isfinite(dx).all())
    assert (y[[3, 4, 5]] == 0).all() and (dx[2] == 0).all() and (y[[0, 1, 2]] != 0).any(1).all()


# --- ids that are wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ("fused", "split"))
def test_ids_out_of_range_are_skipped(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU such ids are not looked for: they count as slots to skip, and nothing is written outside a tensor."""
    monkeypatch.setattr(arguments, "check_index_values", lambda *args, **kwargs: None)
    ids = _experts(20, 4, 2)
    ids[::3, 0] = 4
    bad = ids.clone()
    bad[bad == 4] = torch.tensor([-1, 5, 2**40, -(2**40), 2**32, 2**31, 7], device=ids.device)
    inputs = _inputs(ids, 4, 24, 40, 3, torch.float16, with_bias=True, gates=torch.float32)
    untouched = guarded_memory(monkeypatch)
    results = []
    for chosen in (ids, bad):
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        y = kb.moe_lora(**dict(zip(inputs, leaves, strict=True)), routing=kb.route(chosen, 4), strategy=strategy)
        results.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    monkeypatch.undo()
    assert untouched()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# --- edges ----------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x of another length": ({"x": lambda: randn(3, 8)}, r"x must have shape \(2, 8\), got \(3, 8\)"),
    "x is not grouped": ({"grouped_in": True}, r"x must have shape \(4, 8\), got \(2, 8\)"),
    "w for fewer experts": ({"w": lambda: randn(2, 8, 6)}, r"w must have shape \(3, 8, 6\), got \(2, 8, 6\)"),
    "packed w for fewer experts": (
        {"w": lambda: kb.nf4_quantize(randn(2, 6, 32))},
        r"w must have shape \(3, 6, 32\), got \(2, 6, 32\)",
    ),
    "packed w is a matrix": (
        {"w": lambda: kb.nf4_quantize(randn(6, 8))},
        r"w must have three dimensions, got shape \(6, 8\)",
    ),
    "w of another dtype": (
        {"w": lambda: randn(3, 8, 6).half()},
        r"w must have the dtype of x \(torch.float32\), got torch.float16",
    ),
    "no rank": ({"lora_a": lambda: randn(3, 0, 8)}, r"lora_a must have a rank of at least 1, got shape \(3, 0, 8\)"),
    "lora_a alone": ({"lora_b": None}, "lora_b must be a tensor where lora_a is one, got None"),
    "lora_b alone": ({"lora_a": None}, "lora_a must be a tensor where lora_b is one, got None"),
    "lora_b of another rank": (
        {"lora_b": lambda: randn(3, 6, 3)},
        r"lora_b must have shape \(3, 6, 2\), got \(3, 6, 3\)",
    ),
    "bias of another width": ({"bias": lambda: randn(3, 5)}, r"bias must have shape \(3, 6\), got \(3, 5\)"),
    "gates for one slot": ({"gates": lambda: randn(2, 1)}, r"gates must have shape \(2, 2\), got \(2, 1\)"),
    "gates of another dtype": (
        {"gates": lambda: randn(2, 2).half()},
        "gates must have dtype float32, got float16",
    ),
    "gates and grouped_out": (
        {"gates": lambda: randn(2, 2), "grouped_out": True},
        "grouped_out must be False with gates",
    ),
    "unknown strategy": ({"strategy": "both"}, "strategy must be one of 'auto', 'fused', 'split', got 'both'"),
    "ids instead of a routing": (
        {"routing": lambda: torch.zeros(2, 2)},
        r"routing must be a Routing, as route\(\) returns it, got Tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    ids = torch.tensor([[0, 1], [2, 0]], device=runtime.DEVICE)
    given = {**_inputs(ids, 3, 8, 6, 2, torch.float32), "routing": kb.route(ids, 3)}
    refused(kb.moe_lora, given, changes, f"moe_lora: {message}")


def test_a_routing_has_an_expert() -> None:
    with pytest.raises(ValueError, match="route: num_experts must be at least 1, got 0"):
        kb.route(torch.zeros(2, 1, dtype=torch.int64, device=runtime.DEVICE), 0)


def test_tensor_cores_do_not_wait_for_each_instruction() -> None:
    """ptxas serializes all of a kernel's tensor core instructions where one of them does not fit its rules.

    It did so for dX as long as the low-rank product came behind the loop (C7515); with B copied
    the fused form is free of it too.
    """
    code = """
import torch, kernelbook as kb
routing = kb.route(torch.zeros(512, 2, dtype=torch.int64), 4)
for strategy in ("fused", "split"):
    x, w, a, b = (torch.empty(*s, dtype=torch.bfloat16, requires_grad=True)
                  for s in ((512, 512), (4, 512, 1024), (4, 16, 512), (4, 1024, 16)))
    y = kb.moe_lora(x, w.detach(), a, b, routing, strategy=strategy)
    y.backward(torch.empty_like(y))
"""
    compiled = [k for k in compile_calls(code, ("sm_90",), asm=("sass",)) if k.name == "_moe_lora_fwd_rows_kernel"]
    found = {(k.signature["a_ptr"], k.constants["W_BY_ROW"]) for k in compiled}  # a constant None where U is split off
    assert found == {(a, by_row) for a in ("*bf16", "constexpr") for by_row in (True, False)}
    for kernel in compiled:
        instructions, waits = kernel.asm["sass"].count("HGMMA"), kernel.asm["sass"].count("WARPGROUP.DEPBAR")
        assert 0 < waits < instructions, str(kernel)


@pytest.mark.parametrize(("targets", "dtype"), ((("sm_75",), "bfloat16"), (("sm_80", "sm_90"), "float64")), ids=label)
def test_packed_experts_compile_in_dtypes_that_a_gpu_has_not(targets: tuple[str, ...], dtype: str) -> None:
    """Turing multiplies no pairs of bfloat16, and no tensor core float64 that was decoded from bytes."""
    code = f"""
import torch, kernelbook as kb
q = kb.nf4_quantize(torch.empty(3, 64, 64))
x = torch.empty(20, 64, dtype=torch.{dtype}, requires_grad=True)
y = kb.moe_lora(x, q, None, None, kb.route(torch.zeros(20, 2, dtype=torch.int64), 3))
y.backward(torch.empty_like(y))
"""
    rows = [k for k in compile_calls(code, targets) if k.name == "_moe_lora_fwd_rows_kernel"]
    assert [k.constants["FORMAT"] for k in rows] == 2 * len(targets) * ["gather" if dtype == "bfloat16" else "pointers"]


def test_packed_experts_compile_for_any_rank() -> None:
    """Rows of the low-rank product lie in shared memory in pieces of 128 bytes at most, however large the rank is."""
    code = """
import torch, kernelbook as kb
q = kb.nf4_quantize(torch.empty(5, 256, 512))
x, a, b = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((40, 512), (5, 128, 512), (5, 256, 128)))
kb.moe_lora(x, q, a, b, kb.route(torch.zeros(40, 2, dtype=torch.int64), 5))
"""
    compiled = [k for k in compile_calls(code) if k.name == "_many_rows_kernel"]
    assert [k.constants["r"] for k in compiled] == [128] and not compiled[0].spill_bytes


@pytest.mark.gpu
@pytest.mark.memory
def test_packed_products_take_64_bit_offsets() -> None:
    """Low-rank matrices that lie 2^30 elements apart, the memory between them only reserved; a result of 2^31 elements."""
    step, n, k, rank = 2**30, 72, 128, 16
    lora_b = torch.empty(2 * step + n * rank, dtype=torch.bfloat16, device=runtime.DEVICE).as_strided(
        (3, n, rank), (step, rank, 1)
    )
    lora_b.copy_(randn(3, n, rank))
    q = kb.nf4_quantize(randn(3, n, k) / k**0.5)
    given = {
        "x": randn(40, k, dtype=torch.bfloat16),
        "lora_a": randn(3, rank, k, dtype=torch.bfloat16) / k**0.5,
        "w": q,
    }
    routing = kb.route(torch.full((40, 1), 2, device=lora_b.device), 3)
    found = kb.moe_lora(lora_b=lora_b, routing=routing, **given)
    assert torch.equal(found, kb.moe_lora(lora_b=lora_b.contiguous(), routing=routing, **given))
    del lora_b
    rows, n, k = 2**15 + 8, 2**16 + 8, 64
    q, x = kb.nf4_quantize(randn(1, n, k) / 8), randn(rows, k, dtype=torch.bfloat16)
    routing = kb.route(torch.zeros(rows, 1, dtype=torch.int64, device=x.device), 1)
    y = kb.moe_lora(x, q, None, None, routing)[-16:]
    w = kb.nf4_dequantize(q, dtype=torch.float32)[0].double()
    assert check.relative_error(y, x[-16:].double() @ w.t()) < 0.01
