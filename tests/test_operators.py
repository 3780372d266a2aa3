"""The spine: what one Op does for every operator, with operators of the tests that PyTorch computes."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelbook import memory, operators, runtime
from kernelbook.memory import empty
from kernelbook.operators import Op


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the operators of a test have been asked."""

    checks: list[Any] = dataclasses.field(default_factory=list)
    plans: list[Any] = dataclasses.field(default_factory=list)
    runs: list[Any] = dataclasses.field(default_factory=list)


def _check(x: Any, w: Any, ids: Any, factor: Any) -> None:
    for name, tensor in (("x", x), ("w", w)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"scaled: {name} must be a torch.Tensor, got {type(tensor).__name__}")


def _outputs(x: torch.Tensor, w: Any, ids: Any, factor: float, record: bool) -> tuple[Any, Any]:
    return empty(x.shape, x.dtype, x), empty(x.shape, x.dtype, x) if record else None


@pytest.fixture(scope="module")
def ops() -> tuple[Op, Op, _Seen]:
    """y = factor * x * w, plus how many ids there are; and its gradient, which cannot be differentiated again."""
    seen = _Seen()

    def run(plan: Any, outputs: Any, x: torch.Tensor, w: Any, ids: Any, factor: float, record: bool) -> None:
        y, scaled = outputs
        seen.runs.append((plan, runtime.in_same_bits()))
        y.copy_(factor * x * (1 if w is None else w) + (0 if ids is None else ids.numel()))
        if scaled is not None:
            scaled.copy_(factor * x)

    def run_backward(
        plan: Any, outputs: Any, dy: torch.Tensor, scaled: torch.Tensor, w: Any, factor: float, needs: Any
    ) -> None:
        seen.runs.append(("backward", runtime.in_same_bits(), torch.is_autocast_enabled(dy.device.type)))
        for output, product in zip(
            outputs, (lambda: factor * dy * (1 if w is None else w), lambda: dy * scaled), strict=True
        ):
            if output is not None:
                output.copy_(product())

    gradient = Op(
        "test_scaled_backward(Tensor dy, Tensor scaled, Tensor? w, float factor, bool[] needs) -> (Tensor dx, Tensor dw)",
        check=lambda *_: None,
        outputs=lambda dy, scaled, w, factor, needs: tuple(empty(dy.shape, dy.dtype, dy) if need else None for need in needs),
        plan=lambda *args: args[3:],
        run=run_backward,
        results=2,
    )  # fmt: skip

    def backward(call: Any, dy: torch.Tensor) -> Any:
        scaled, w = call.saved
        needs = [dtype is not None for dtype in call.wanted[:2]]
        return gradient(dy, scaled, w, call.factor, needs)

    def check(*args: Any) -> None:
        seen.checks.append(args)
        _check(*args)

    scaled = Op(
        "test_scaled(Tensor x, Tensor? w, Tensor? ids, float factor, bool record) -> (Tensor y, Tensor scaled)",
        check=check,
        outputs=_outputs,
        plan=lambda *args: seen.plans.append(args[3:]) or (None if args[0].numel() == 0 else args[3:]),
        run=run,
        saves=("scaled", "w"),
        keeps=("ids",),
        autocast=("x", "w"),
        backward=backward,
    )
    return scaled, gradient, seen


@pytest.fixture
def scaled(ops: tuple[Op, Op, _Seen]) -> Iterator[tuple[Op, _Seen]]:
    op, _, seen = ops
    operators.forget_plans()
    for found in (seen.checks, seen.plans, seen.runs):
        found.clear()
    yield op, seen
    operators.forget_plans()


def _leaves(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = (torch.randn(shape, device=runtime.DEVICE, requires_grad=True) for _ in range(2))
    return x, w


def test_a_plan_is_made_once_and_checks_run_where_it_is_made(scaled: tuple[Op, _Seen]) -> None:
    op, seen = scaled
    x, w = _leaves(3, 4)
    for _ in range(3):
        assert torch.equal(op(x.detach(), w.detach(), None, 2.0), 2 * x * w)
    assert seen.plans == [(2.0, False)] and len(seen.checks) == 1
    op(x, w, None, 2.0)
    assert seen.plans[1:] == [(2.0, True)]
    with pytest.raises(TypeError, match=r"scaled: w must be a torch\.Tensor, got str"):
        op(x, "w", None, 2.0)


def test_a_call_that_pytorch_answers_is_checked_once_for_each_kind() -> None:
    made: list[Any] = []

    def check(x: Any, w: Any, factor: Any) -> None:
        made.append((x, w, factor))
        if factor == 3.0:
            raise ValueError("three")

    op = Op(
        "test_checked(Tensor x, Tensor? w, float factor) -> Tensor", check=check,
        outputs=lambda x, *_: (empty(x.shape, x.dtype, x),), plan=lambda *_: None, run=lambda *_: None,
    )  # fmt: skip
    a, b = torch.ones(4, 2), torch.zeros(4, 2)

    def asked(*args: Any) -> int:
        made.clear()
        op.check_once(*args), op.check_once(*args)
        return len(made)

    assert asked(a, None, 1.0) == 1 and asked(b, None, 1.0) == 0
    for args in ((a[:3], None, 1.0), (a.double(), None, 1.0), (a, b, 1.0), (a.to("meta"), None, 1.0), (a, None, 2.0)):
        assert asked(*args) == 1, args
    for args in ((a.to_sparse(), None, 1.0), ("a", None, 1.0)):  # what has no key is always checked
        assert asked(*args) == 2, args
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            op.check_once(a, None, 3.0)
    with torch.autograd.forward_ad.dual_level():
        assert asked(a, None, 1.0) > 0
    assert asked(a, None, 1.0) == asked(a, None, 2.0) == 0  # a kind that came between is no reason to forget another


@pytest.mark.parametrize(
    "other",
    (
        lambda x: (x[:2], 2.0), lambda x: (x.t().contiguous().t(), 2.0), lambda x: (x.double(), 2.0), lambda x: (x, 3.0),
        lambda x: (torch.cat((x.reshape(-1)[:1], x.reshape(-1)))[1:].view(x.shape), 2.0),
    ),
    ids=("shape", "strides", "dtype", "number", "alignment"),
)  # fmt: skip
def test_what_a_plan_may_depend_on_is_in_its_key(scaled: tuple[Op, _Seen], other: Callable[..., Any]) -> None:
    op, seen = scaled
    x = torch.randn(3, 4, device=runtime.DEVICE)
    op(x, None, None, 2.0)
    changed, factor = other(x)
    assert torch.equal(op(changed, None, None, factor), factor * changed)
    assert len(seen.plans) == 2
    with runtime.same_bits():
        op(x, None, None, 2.0)
    assert len(seen.plans) == 3


def test_the_cache_is_bounded_and_threads_share_it(scaled: tuple[Op, _Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    op, _ = scaled
    monkeypatch.setattr(operators, "MOST_PLANS", 4)
    start = threading.Barrier(4)

    def calls(offset: int) -> bool:
        start.wait()
        factors = [float(offset + i) for i in range(50)]
        x = torch.ones(2, device=runtime.DEVICE)
        return all(torch.equal(op(x, None, None, f), f * x) for f in factors)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))
    assert len(operators._plans) <= 4


def test_gradients_in_the_mode_of_the_forward_pass(scaled: tuple[Op, _Seen]) -> None:
    op, seen = scaled
    x, w = _leaves(3, 4)
    with runtime.same_bits():
        y = op(x, w, None, 2.0)
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert torch.equal(dx, 2 * w) and torch.equal(dw, 2 * x)
    assert seen.runs[-1] == ("backward", True, False)
    with torch.autocast(runtime.DEVICE.type, dtype=torch.bfloat16):
        y = op(x, w, None, 2.0)
        assert y.dtype == torch.bfloat16 and op(x.double(), None, None, 2.0).dtype == torch.float64
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert dx.dtype == dw.dtype == torch.float32
    assert seen.runs[-1] == ("backward", False, False)


def test_tensors_without_numbers(scaled: tuple[Op, _Seen]) -> None:
    op, seen = scaled
    x, _ = _leaves(3, 4)
    assert op(x.to("meta"), None, None, 2.0).shape == (3, 4)
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(torch.randn(3, 4)), None, None, 2.0).shape == (3, 4)
    assert not seen.runs
    y = op(torch.empty(0, 4, device=runtime.DEVICE), None, None, 2.0)
    assert y.shape == (0, 4) and not seen.runs  # plan said that there is nothing to compute
    assert torch.equal(op(torch._neg_view(x.detach()), None, None, 2.0), -2 * x)


def test_deterministic_memory_is_filled(scaled: tuple[Op, _Seen]) -> None:
    op, _ = scaled
    before = torch.are_deterministic_algorithms_enabled()
    x = torch.ones(2, device=runtime.DEVICE)
    op(x, None, None, 2.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert op.outputs(x, None, None, 2.0, False)[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(before)


class _Named(torch.Tensor):
    """A class of a user's."""


def test_a_subclass_comes_back_from_every_call(scaled: tuple[Op, _Seen]) -> None:
    op, _ = scaled
    x = torch.randn(3, 4)
    for tensor in (x.as_subclass(_Named), x, x.as_subclass(_Named)):
        assert type(op(tensor, None, None, 2.0)) is type(tensor)


def test_a_plan_keeps_what_outputs_are_like(scaled: tuple[Op, _Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where memory comes without ``torch.empty``: each call has its own, and the first one alone asks for shapes."""
    op, seen = scaled
    if runtime.DEVICE.type == "cpu":
        monkeypatch.setattr(memory, "_new", torch._C._dynamo.guards._empty_strided_cpu)
        monkeypatch.setattr(memory, "_current_device", lambda: -1)
    x, w = _leaves(3, 4)
    kept = []
    for _ in range(3):
        y = op(x, w, None, 2.0)
        dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
        assert torch.equal(y, 2 * x * w) and torch.equal(dx, 2 * w) and torch.equal(dw, 2 * x)
        kept += [y, dx, dw]
        monkeypatch.setattr(op, "outputs", None)
    assert len({tensor.data_ptr() for tensor in kept}) == len(kept) and len(seen.plans) == 1
