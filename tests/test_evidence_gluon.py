"""The kernels of ``packed`` in Gluon, by the interpreter: see ``gluon_interpreted``."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import kernelbook as kb

# isort: split
import pytest
import torch
from gluon_interpreted import interpreted
from tensors import far_apart, guarded_memory, randn

from kernelbook import arguments, check, runtime
from kernelbook.moe_lora import moe_lora_reference, scatter2scatter_reference
from kernelbook.nf4 import kernels as nf4_kernels
from kernelbook.packed import products

pytestmark = pytest.mark.skipif(not runtime.INTERPRET, reason="a GPU runs them as they are")
F16 = torch.float16


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[products.Plan | None]]:
    """As on a small Hopper, whose programs have several groups of rows each -> what is launched."""
    plan, plans = products.plan, []
    hopper = dataclasses.replace(runtime.TARGETS["sm_90"], num_sms=2)

    def planned(*args: Any) -> products.Plan | None:
        plans.append(plan(*args[:-1], hopper))
        return plans[-1]

    monkeypatch.setattr(products, "plan", planned)
    for name in ("PACKED_ROWS", "PACKED_ELEMENTS"):
        monkeypatch.setattr(nf4_kernels, name, 0)
    with interpreted():
        yield plans


def _packed(kind: str, *shape: int) -> kb.NF4Tensor:
    if kind == "nvfp4":
        return kb.fp4_quantize(randn(*shape), format=kind)
    return kb.nf4_quantize(randn(*shape), block_size=int(kind.split()[0]), double_quant="double" in kind)


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


def _were(kinds: set[str], plans: list[products.Plan | None]) -> None:
    assert {plan.kind if plan else "none" for plan in plans} == kinds, plans


@pytest.mark.parametrize(
    ("m", "kind", "shape"),
    (
        (1, "64", (2, 40, 256)),
        (3, "64 double", (2, 200, 320)),
        (7, "128 double", (2, 72, 448)),
        (13, "4096 double", (3, 40, 1088)),
        (13, "64", (1, 48, 4096)),
        (3, "32", (2, 40, 320)),
        (8, "nvfp4", (2, 40, 320)),
        (40, "64 double", (2, 72, 320)),
    ),
    ids=str,
)
def test_matrix(m: int, kind: str, shape: tuple[int, ...], launched: list[products.Plan | None]) -> None:
    q, last = _packed(kind, *shape), shape[0] - 1
    w = kb.nf4_dequantize(q, dtype=torch.float32)[last]
    expert = torch.tensor([last]) if m % 2 else last
    x = randn(m, shape[2], dtype=F16)
    _check(lambda x: kb.nf4_matmul(x, q, expert), lambda x: x @ w.to(x.dtype).t(), {"x": x})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "check_index_values", lambda *_: None)  # which a GPU does not
        for nobody in (shape[0], -1):
            assert (kb.nf4_matmul(x, q, torch.tensor([nobody])) == 0).all()
    _were({"many" if m > 16 else "one" if q.block_size >= 64 else "few"}, launched)


def test_rows_far_apart(launched: list[products.Plan | None]) -> None:
    """Rows of x whose numbers need 64 bits."""
    q, x = _packed("64", 1, 40, 256), randn(13, 256, dtype=F16)
    assert torch.equal(kb.nf4_matmul(far_apart(x, 2**28), q, 0), kb.nf4_matmul(x, q, 0))
    _were({"one"}, launched)


# kind, tokens, N, K, rank, whether there are a bias and a gradient of x; few rows a matrix, and each height of tiles.
EXPERTS = (
    ("64", 7, 64, 512, 0, False, False),
    ("64 double", 7, 40, 320, 0, True, False),
    ("32", 5, 40, 320, 0, True, False),
    ("4096 double", 7, 40, 1088, 0, False, False),
    ("nvfp4", 7, 40, 320, 0, True, False),
    ("64", 20, 80, 320, 0, True, True),
    ("64 double", 20, 72, 1088, 20, True, False),
    ("32", 20, 80, 320, 0, False, True),
    ("nvfp4", 20, 80, 320, 3, False, True),
    ("64 double", 60, 80, 320, 0, False, True),
    ("4096 double", 60, 80, 576, 80, True, True),
    ("64 double", 130, 144, 320, 20, True, True),
)


@pytest.mark.parametrize("problem", EXPERTS, ids=lambda p: "-".join(map(str, p)))
def test_experts(problem: tuple[Any, ...], launched: list[products.Plan | None]) -> None:
    kind, tokens, n, k, rank, has_bias, backward = problem
    experts = 3
    ids = torch.rand(tokens, experts).argsort(1)[:, :2]
    ids = ids.masked_fill(torch.rand(ids.shape) < 0.15, experts)
    q = _packed(kind, experts, n, k)
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
    _were({"few" if tokens < 10 else "many"}, launched)


@pytest.mark.parametrize("grouped_in", (False, True))
@pytest.mark.parametrize("tokens", (7, 20))
def test_experts_in_sorted_order(tokens: int, grouped_in: bool, launched: list[products.Plan | None]) -> None:
    experts, n, k = 3, 80, 320
    ids = torch.rand(tokens, experts).argsort(1)[:, :2].masked_fill(torch.rand(tokens, 2) < 0.15, experts)
    q = _packed("64", experts, n, k)
    w = kb.nf4_dequantize(q, dtype=torch.float32).transpose(1, 2)
    how = {"grouped_in": grouped_in, "grouped_out": not grouped_in}
    _check(
        functools.partial(kb.scatter2scatter, w=q, routing=kb.route(ids, experts), **how),
        lambda x: scatter2scatter_reference(x, w.to(x.dtype), ids, **how),
        {"x": randn(2 * tokens if grouped_in else tokens, k, dtype=F16)},
        True,
    )
    _were({"few", "many"} if tokens == 7 else {"many"}, launched)


def test_what_is_infinite_stays_in_its_feature() -> None:
    """A block without end in the last row of W but one, and a row of x: rows, columns and words beyond the end are nobody's."""
    experts, n, k, tokens = 3, 72, 192, 20
    ids = torch.rand(tokens, experts).argsort(1)[:, :2]
    q = _packed("64", experts, n, k)
    call = functools.partial(kb.moe_lora, w=q, lora_a=None, lora_b=None, routing=kb.route(ids, experts))
    x = randn(tokens, k, dtype=F16)
    first = call(x)
    q.absmax.view(experts, n, k // 64)[:, n - 2, -1] = float("inf")
    others = torch.arange(n) != n - 2
    assert torch.equal(call(x)[:, others], first[:, others])
