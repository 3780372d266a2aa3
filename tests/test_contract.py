"""What every public function owes its callers, over one table: strides, empty tensors, 64-bit offsets, bad input, compilers,
autocast, gradients, meta tensors. What is particular to a function stands in the tests of its room.
"""

import contextlib
import copy
import dataclasses
import enum
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensors import default_dtype, far_apart, label
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import kernelbook as kb
from kernelbook import check, launch, nn, operators, runtime
from kernelbook.cases import Case, Given, collect, draw, floats, ids
from kernelbook.distributed.exchange import exchange
from kernelbook.lab import timing
from kernelbook.nn.cases import routed
from kernelbook.train import TrainConfig

DEVICE = runtime.DEVICE
CASES = collect()
CALLS = CASES | collect("MODULES")
COMPARED = CASES | collect("STUDIES")


def _that(has: str, *, gradients: bool = False) -> Any:
    """The functions that have a property."""
    names = [n for n, p in CASES.items() if has not in p.but and not (gradients and p.grads == ())]
    return pytest.mark.parametrize("name", names)


def _copied(given: Given) -> Given:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}


def _weights(result: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, result.numel(), dtype=torch.float64, device=DEVICE).to(result).view(result.shape)


def _with_gradients(
    case: Case,
    given: Given,
    *,
    call: Callable[..., Any] | None = None,
    weigh: Callable[[torch.Tensor], torch.Tensor] = _weights,
    times: int = 1,
    needs: list[str] | None = None,
) -> list[torch.Tensor]:
    """Results and gradients, dense, of all arguments or of those in ``needs``; ``call``: of another function; ``times``: in one graph."""
    names = case.leaves(given) if needs is None else needs
    given = given | {n: given[n].detach().requires_grad_() for n in names}
    results = case.results(given, call)
    if not names:
        return results
    wanted = [r for r in results if r.requires_grad]
    for n in range(times):
        torch.autograd.backward(wanted, [weigh(r) for r in wanted], retain_graph=n + 1 < times)
    grads = [given[n].grad / times for n in names]
    return [*(r.detach() for r in results), *(g.to_dense() if g.is_sparse else g for g in grads)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor], label: str = "") -> None:
    """As far as the order of additions and one rounding of the result allow, by the error rule."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.is_floating_point():
            check.compare(f"{label} {i}", a, b, b).require()
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- results --------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=label)
_with_reference = pytest.mark.parametrize("name", [n for n, c in COMPARED.items() if c.reference])


@_dtypes
@_with_reference
def test_results_and_gradients_are_right(name: str, dtype: torch.dtype) -> None:
    COMPARED[name].check(COMPARED[name].of(dtype))


@pytest.mark.gpu
@_dtypes
@pytest.mark.parametrize(("name", "i"), [(n, i) for n, c in COMPARED.items() for i in range(len(c.real))])
def test_real_sizes(name: str, i: int, dtype: torch.dtype) -> None:
    case = COMPARED[name]
    for tf32 in (False, True) if dtype == torch.float32 else (False,):
        with timing.allow_tf32(tf32):
            case.check(case.of(dtype, **case.real[i]))


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.large])
def test_more_than_2_31_elements(name: str) -> None:
    """The last rows of a large call are those of a small one."""
    case = CASES[name]
    given = case.of(torch.bfloat16, **(case.large or {}))
    leaves = {n: given[n].requires_grad_() for n in case.leaves(given) if n in case.rows}
    (y,) = case.results(given)
    assert max(t.numel() for t in (y, *given.values()) if isinstance(t, torch.Tensor)) > 2**31
    rows = len(given[case.rows[0]])
    last = slice(rows - min(rows, 3), rows)
    few = {n: _rows_of(given[n], last) for n in case.rows}
    per_row = len(y) // rows
    dy = _weights(y[last.start * per_row :])
    grads = torch.autograd.grad(y[last.start * per_row :], list(leaves.values()), dy)

    def part(function: Callable[..., Any] | None, dtype: torch.dtype) -> list[torch.Tensor]:
        kept = case.float32 if dtype != torch.float64 else ()
        small = {n: v.to(dtype) if n in floats(few) and n not in kept else v for n, v in few.items()}
        small |= {n: small[n].detach().requires_grad_() for n in leaves}
        others = {n: v.to(dtype) if n in floats(given) and n not in few else v for n, v in given.items()}
        (out,) = case.results(others | small, function)
        return [out.detach(), *torch.autograd.grad(out, [small[n] for n in leaves], dy.to(dtype))]

    found = [y[last.start * per_row :].detach(), *(g[last] for g in grads)]
    for a, exact, plain in zip(
        found, part(case.reference, torch.float64), part(case.reference, torch.bfloat16), strict=True
    ):
        check.compare(name, a, exact, plain, factor=check.GRADIENT_FACTOR).require()


@_that("bits")
def test_the_same_bits_in_every_run(name: str) -> None:
    """On a GPU at real sizes, where programs end in any order."""
    case = CASES[name]
    gpu = DEVICE.type == "cuda"
    for sizes in case.real if gpu else ({},):
        given = case.of(torch.bfloat16 if gpu else torch.float32, **sizes)
        first = _with_gradients(case, _copied(given))
        for _ in range(50 if gpu else 1):
            assert all(torch.equal(a, b) for a, b in zip(first, _with_gradients(case, _copied(given)), strict=True))


def _rows_are_the_same_alone(case: Case, given: Given) -> bool:
    """Results of a row, and gradients of what it is computed from: alone, among others, and in another order."""
    leaves = [n for n in case.leaves(given) if n in case.rows]

    def of(which: torch.Tensor) -> list[torch.Tensor]:
        part = given | {n: _rows_of(given[n], which) for n in case.rows}
        found = _with_gradients(case, part, needs=leaves, weigh=lambda r: _weights(r[0]).expand(r.shape))
        return [t.reshape(len(which), -1) for t in found]

    rows = len(given[case.rows[0]])
    whole = of(torch.arange(rows, device=DEVICE))
    return all(
        torch.equal(ours, every[which])
        for which in (ids(1), torch.arange(1, rows, device=DEVICE), torch.randperm(rows, device=DEVICE))
        for ours, every in zip(of(which), whole, strict=True)
    )


def _many_rows(case: Case) -> Given:
    return case.of(**{s: min(c[1], 40) for s, c in case.sizes.items() if isinstance(c, tuple) and type(c[1]) is int})


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.rows and "rows alone" not in c.but and c.sizes])
def test_rows_have_the_same_bits_in_any_batch(name: str) -> None:
    case = CASES[name]
    given = [case.of(torch.bfloat16, **sizes) for sizes in case.real] if DEVICE.type == "cuda" else [_many_rows(case)]
    with kb.same_bits():
        assert all(_rows_are_the_same_alone(case, each) for each in given)


@pytest.mark.skipif(not runtime.INTERPRET, reason="on a GPU rules change their mind at larger sizes")
@pytest.mark.parametrize("name", ("nf4_matmul", "scatter_ffn", "gather_matmul"))
def test_without_the_mode_rows_have_other_bits(name: str) -> None:
    """Else the property above would say nothing."""
    assert not _rows_are_the_same_alone(CASES[name], _many_rows(CASES[name]))


@_that("plans")
def test_calls_that_share_a_plan_compute_of_their_own_tensors(name: str) -> None:
    """Bit for bit, by a plan that other tensors of the same sizes had made, and by one that is made anew."""
    case = CASES[name]
    gpu = DEVICE.type == "cuda"
    for sizes in case.real[:4] if gpu else ({},):
        for _ in range(2):
            given = case.of(torch.bfloat16 if gpu else torch.float32, **sizes)
            kept = _with_gradients(case, _copied(given))
            operators.forget_plans()
            launch._launcher.cache_clear()
            assert all(torch.equal(a, b) for a, b in zip(kept, _with_gradients(case, given), strict=True))


@_that("graph")
@pytest.mark.gpu
def test_a_graph_of_a_gpu_replays_with_other_tensors(name: str) -> None:
    """Forward and backward pass; what is replayed is what a call computes."""
    case = CASES[name]
    given, other = case.of(torch.bfloat16), case.of(torch.bfloat16)
    leaves = {n: given[n].requires_grad_() for n in case.leaves(given)}

    def step() -> list[torch.Tensor]:
        results = case.results(given)
        wanted = [r for r in results if r.requires_grad]
        return [
            *results,
            *(torch.autograd.grad(wanted, list(leaves.values()), list(map(_weights, wanted))) if leaves else ()),
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for n, value in given.items():
            for a, b in zip(_memory(value), _memory(other[n]), strict=True):
                a.copy_(b)
    graph.replay()
    for ours, again in zip(captured, step(), strict=True):
        assert torch.equal(ours, again)


@_that("synchronisation")
@pytest.mark.gpu
def test_the_host_does_not_wait(name: str) -> None:
    case = CASES[name]
    given = case.of(torch.bfloat16)
    _with_gradients(case, given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        _with_gradients(case, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- strides, sizes, offsets ----------------------------------------------------------------------------------------


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _not_on_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor.reshape(-1)[:1], tensor.reshape(-1)))[1:].view(tensor.shape)


@_that("strides")
@pytest.mark.parametrize(
    ("lie", "dtype"),
    ((_every_second, torch.float32), (_transposed, torch.float16), (_not_on_16_bytes, torch.float16)),
)
def test_strides_change_nothing(name: str, lie: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    """Of arguments, and of the gradient that comes."""
    case = CASES[name]
    given = case.of(dtype)
    expected = _with_gradients(case, _copied(given))
    other = {n: lie(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    _equal(_with_gradients(case, other, weigh=lambda r: lie(_weights(r))), expected)


def _rows_of(value: Any, rows: slice | torch.Tensor) -> Any:
    return kb.route(value.expert_ids[rows], value.num_experts) if isinstance(value, kb.Routing) else value[rows]


@_that("empty")
def test_no_rows_give_nothing_and_zeros(name: str) -> None:
    case = CASES[name]
    given = case.of()
    assert case.rows
    found = _with_gradients(case, given | {n: _rows_of(given[n], slice(0)) for n in case.rows})
    assert all(torch.equal(t, torch.zeros_like(t)) for t in found)
    assert any(t.numel() == 0 for t in found)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (n, s)
        for n, c in COMPARED.items()
        for s, sizes in c.sizes.items()
        if sizes[0] == 0 and (s == "share" or type(sizes[0]) is int)
    ],
)
def test_no_elements_give_nothing_or_zeros(name: str, size: str) -> None:
    """Of any size that may be zero: rows, columns, what a sum is over."""
    COMPARED[name].check(COMPARED[name].of(torch.float16, **{size: 0}))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.rows and {*c.rows} <= {"x", "dy", "residual"}])
@pytest.mark.parametrize("leading", ((4,), (2, 2), (1, 4, 1), (4, 0, 2)), ids=label)
def test_any_leading_dimensions(name: str, leading: tuple[int, ...]) -> None:
    case = CASES[name]
    given = case.of(m=4)
    given |= {n: given[n][: math.prod(leading)] for n in case.rows}
    shaped = {n: given[n].reshape(*leading, given[n].shape[-1]) for n in case.rows}
    expected, found = _with_gradients(case, given), _with_gradients(case, given | shaped)
    rows = math.prod(leading)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == (b.shape if len(b) != rows or b.ndim < 2 else (*leading, *b.shape[1:]))
    _equal([a.reshape(b.shape) for a, b in zip(found, expected, strict=True)], expected)


@pytest.mark.skipif(not runtime.INTERPRET, reason="memory that is reserved, not touched")
@_that("strides")
def test_offsets_are_64_bit(name: str, overflow_raises: Callable[[], None]) -> None:
    """Rows of each argument lie so far apart that a 32-bit offset overflows. The memory between is not touched."""
    case = CASES[name]
    given = case.of(torch.float16)
    expected = _with_gradients(case, _copied(given))
    overflow_raises()
    matrices = [n for n, value in given.items() if isinstance(value, torch.Tensor) and value.ndim > 1]
    assert matrices
    for n in matrices:
        fresh = _copied(given)
        tensor = fresh[n].int() if fresh[n].dtype == torch.int64 else fresh[n]  # half of the memory
        fresh[n] = far_apart(tensor, 2**31 // max(1, len(tensor) - 1) + 16, *tensor.stride()[1:-1])
        _equal(_with_gradients(case, fresh), expected)


# --- bad input ------------------------------------------------------------------------------------------------------


@_that("bad input")
def test_what_is_no_such_tensor_is_named(name: str) -> None:
    case = CASES[name]
    op = case.op or name.split()[0].strip(",")
    given = case.of()
    tensors = [n for n, v in given.items() if isinstance(v, torch.Tensor)]
    for n in tensors:
        bad: list[Any] = ["a", 3.0, given[n].to(torch.complex64), given[n].to_sparse()]
        if n in ("x", "dy", "w"):  # which may have any leading dimensions
            bad += [given[n].reshape(-1)[0]] if n != "w" else []
        else:
            bad.append(given[n][None])
        if n != tensors[0]:
            bad.append(given[n].to("meta"))
        for other in bad:
            with pytest.raises((TypeError, ValueError), match=rf"{op}: .*\b{n}\b.*(got|must)"):
                case.function(**case.of() | {n: other})


@pytest.mark.parametrize("name", [n for n in CALLS if "forward mode" not in CALLS[n].but and n != "GPT"])
def test_integers_are_refused(name: str) -> None:
    case = CALLS[name]
    given = case.of()
    first = floats(given)[0]
    with pytest.raises((TypeError, RuntimeError)):
        case.function(**given | {first: given[first].int()})


def test_every_public_function_and_module_is_asked() -> None:
    called = {case.op or name.split()[0].strip(",") for name, case in CALLS.items()}
    public = [n for m in (kb, nn) for n in m.__all__ if isinstance(getattr(m, n), types.FunctionType)]
    public += [
        n for n in nn.__all__ if isinstance(getattr(nn, n), type) and issubclass(getattr(nn, n), torch.nn.Module)
    ]
    assert set(public) - called == {"same_bits", "swap"}


# --- compilers, modes, other tensors ----------------------------------------------------------------------------------


class _Noted(TorchDispatchMode):
    """Notes the operators of ours that are called, with what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kernelbook":
            given = args if torch.is_grad_enabled() else tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            self.calls.append((func, given))
        return func(*args, **(kwargs or {}))


@_that("opcheck")
def test_pytorch_accepts_each_operator(name: str) -> None:
    case = CASES[name]
    with _Noted() as noted:
        _with_gradients(case, case.of())
    assert noted.calls
    for operator, args in noted.calls:
        # A routing's lists have room that nothing fills: two of them differ.
        compared = () if operator is torch.ops.kernelbook.route.default else ("test_aot_dispatch_dynamic",)
        tests = ("test_schema", "test_faketensor", *compared)
        torch.library.opcheck(operator, args, test_utils=tests)


@_that("compile")
@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_to_one_graph(name: str, dynamic: bool) -> None:
    case = CASES[name]
    given = case.of()
    names = [n for n, v in given.items() if isinstance(v, torch.Tensor)]

    def step(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """With an operation of PyTorch's before it, which the compiler may join to it."""
        doubled = [
            t * 2 if t.is_floating_point() and n not in ("k_pages", "v_pages") else t
            for n, t in zip(names, tensors, strict=True)
        ]
        return function(**given | dict(zip(names, doubled, strict=True)))

    torch.compiler.reset()
    compiled = torch.compile(
        lambda *t: step(case.function, *t),
        fullgraph=True, dynamic=dynamic, backend="inductor" if DEVICE.type == "cuda" else "aot_eager",
    )  # fmt: skip
    ways = [
        dataclasses.replace(case, function=lambda call=call, **g: call(*(g[n] for n in names)))
        for call in (compiled, lambda *t: step(case.function, *t))
    ]
    shapes: list[Given] = [{}]  # for another one what is not dynamic is compiled anew, as for the first
    if dynamic and len(case.rows) == 1 and case.rows[0] in names:
        shapes.append({n: torch.cat((given[n],) * 2) for n in case.rows})
    for more in shapes:
        found, expected = (_with_gradients(way, _copied(given | more)) for way in ways)
        _equal(found, expected)


@_that("meta")
def test_meta_tensors_have_the_shapes_of_results(name: str) -> None:
    case = CASES[name]
    given = case.of()

    def without_data(value: Any) -> Any:
        if isinstance(value, kb.Routing):
            return value._replace(expert_ids=value.expert_ids.to("meta"), lists=value.lists.to("meta"))
        return value.to("meta") if isinstance(value, torch.Tensor | kb.NF4Tensor) else value

    found = _with_gradients(case, {n: without_data(v) for n, v in given.items()})
    expected = _with_gradients(case, given)
    for ours, real in zip(found, expected, strict=True):
        assert ours.is_meta and ours.shape == real.shape and ours.dtype == real.dtype


@pytest.mark.parametrize("name", CALLS)
def test_a_trace_of_fake_tensors_computes_the_same(name: str) -> None:
    case = CALLS[name]
    given = case.of()
    names = [n for n, v in given.items() if isinstance(v, torch.Tensor)]
    fresh = _copied(given)
    expected = case.results(fresh)

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        fresh = given | dict(zip(names, tensors, strict=True))
        return case.results(fresh)

    trace = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)
    traced = trace(*(given[n] for n in names))
    _equal(traced(*(_copied(given)[n] for n in names)), expected)


@pytest.mark.parametrize("name", [n for n in CALLS if "forward mode" not in CALLS[n].but])
def test_forward_mode_is_refused_not_left_out(name: str) -> None:
    case = CALLS[name]
    given = case.of()
    first = floats(given)[0]
    call = lambda x: case.results(given | {first: x})[0]  # noqa: E731
    x = given[first]
    with pytest.raises(NotImplementedError, match=r"must be differentiated by torch\.autograd"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        call(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match=r"got torch\.func"):
        torch.func.grad(lambda t: call(t).sum())(x)
    with forward_ad.dual_level():
        call(x)  # the level alone is no obstacle


@_that("autocast", gradients=True)
def test_autocast_is_a_call_with_lowered_arguments(name: str) -> None:
    """Gradients have the dtypes of their tensors."""
    case = CASES[name]
    given = case.of()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = _with_gradients(case, _copied(given))
    lowered = {*floats(given)} - {*case.float32} if case.lowered is None else case.lowered

    def lower(**given: Any) -> list[torch.Tensor]:
        results = case.results({n: v.bfloat16() if n in lowered else v for n, v in given.items()})
        return [t.to(ours.dtype) for t, ours in zip(results, found, strict=False)]

    _equal(found, _with_gradients(case, _copied(given), call=lower))
    assert all(t.dtype in (torch.bfloat16, torch.float32) for t in found)


# --- gradients --------------------------------------------------------------------------------------------------------


@_that("gradcheck", gradients=True)
def test_gradients_are_those_of_differences(name: str) -> None:
    case = CASES[name]
    given = case.of()
    names = case.leaves(given)
    given |= {n: given[n].double() for n in floats(given)}
    leaves = [given[n].requires_grad_() for n in names]
    torch.autograd.gradcheck(
        lambda *t: tuple(case.results(given | dict(zip(names, t, strict=True)))),
        leaves,
        fast_mode=True,
    )


@_that("gradcheck", gradients=True)
def test_a_gradient_of_gradients_is_right_or_refused(name: str) -> None:
    case = CASES[name]
    given = case.of()
    names = case.leaves(given)
    given |= {n: given[n].double() for n in floats(given)}
    leaves = [given[n].requires_grad_() for n in names]
    y = case.results(given)[0]
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    try:
        sum(g.square().sum() for g in first).backward()
    except RuntimeError as error:
        assert "cannot be differentiated" in str(error)
    else:
        torch.autograd.gradgradcheck(
            lambda *t: case.results(given | dict(zip(names, t, strict=True)))[0],
            leaves,
            fast_mode=True,
        )


@_that("in place", gradients=True)
def test_a_result_can_be_changed_in_place(name: str) -> None:
    case = CASES[name]
    given = case.of()
    names = case.leaves(given)
    given |= {n: given[n].requires_grad_() for n in names}
    y = case.results(given)[0]
    assert not y._is_view()
    y += 1.0  # as models add their residual
    y.sum().backward()
    assert all(given[n].grad is not None and torch.isfinite(given[n].grad).all() for n in names)


@_that("alone", gradients=True)
def test_each_gradient_alone_is_that_of_all(name: str) -> None:
    case = CASES[name]
    given = case.of(torch.float16)
    names = case.leaves(given)
    expected = dict(zip(names, _with_gradients(case, given)[-len(names) :], strict=True))
    for n in names:
        _equal(_with_gradients(case, given, needs=[n])[-1:], [expected[n]])


# --- ways to a backward pass ------------------------------------------------------------------------------------------

_differentiable = pytest.mark.parametrize("name", [n for n, p in CALLS.items() if p.grads != ()])


def _checkpointed(case: Case, given: Given, reentrant: bool) -> list[torch.Tensor]:
    def call(**given: Any) -> Any:
        names = [n for n, v in given.items() if isinstance(v, torch.Tensor)]
        return checkpoint(
            lambda *t: case.function(**given | dict(zip(names, t, strict=True))),
            *(given[n] for n in names),
            use_reentrant=reentrant,
        )

    return _with_gradients(case, given, call=call)


def _saved(case: Case, given: Given, context: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
    def call(**given: Any) -> Any:
        with context:
            return case.function(**given)

    return _with_gradients(case, given, call=call)


def _turned(kept: torch.Tensor) -> torch.Tensor:
    return kept.mT if kept.ndim > 1 else kept


WAYS: dict[str, Callable[[Case, Given], list[torch.Tensor]]] = {
    "checkpoint": lambda case, given: _checkpointed(case, given, False),
    "reentrant checkpoint": lambda case, given: _checkpointed(case, given, True),
    "save_on_cpu": lambda case, given: _saved(case, given, torch.autograd.graph.save_on_cpu()),
    "hooks": lambda case, given: _saved(
        case, given, torch.autograd.graph.saved_tensors_hooks(lambda t: [t.clone()], lambda kept: kept.pop())
    ),
    "hooks that return other strides": lambda case, given: _saved(
        case, given, torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous() if t.ndim > 1 else t, _turned)
    ),
    "twice": lambda case, given: _with_gradients(case, given, times=2),
}


@_differentiable
def test_gradients_are_the_same_in_any_way(name: str) -> None:
    case = CALLS[name]
    given = case.of()
    expected = _with_gradients(case, _copied(given))
    for name_of_way, way in WAYS.items():
        _equal(way(case, _copied(given)), expected, name_of_way)
    # A gradient each of whose elements is the same one in memory.
    ones = _with_gradients(case, _copied(given), weigh=torch.ones_like)
    _equal(_with_gradients(case, given, weigh=lambda r: r.new_ones(()).expand(r.shape)), ones, "expanded")


@pytest.mark.parametrize("name", CALLS)
def test_a_default_dtype_changes_nothing(name: str) -> None:
    case = CALLS[name]
    torch.manual_seed(0)
    given = case.of()
    expected = _with_gradients(case, _copied(given))
    for dtype in (torch.float64, torch.float16):
        with default_dtype(dtype):
            if name in CASES:  # a module's parameters would be of that dtype
                torch.manual_seed(0)
                given = case.of()
            found = _with_gradients(case, _copied(given))
        _equal(found, expected, str(dtype))


def _memory(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument that somebody may change."""
    if isinstance(value, kb.NF4Tensor):
        return [value.packed, value.absmax]
    if isinstance(value, nn.Float8Tensor):
        return [value.scale]
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


@_differentiable
def test_what_is_changed_before_the_backward_pass_is_an_error(name: str) -> None:
    """Or makes no difference to it."""
    case = CALLS[name]
    given = case.of()
    names = case.leaves(given)
    expected = _with_gradients(case, _copied(given))[-len(names) :]
    for changed in given:
        fresh = copy.deepcopy(given)
        leaves = {n: fresh[n].requires_grad_() for n in names}
        fresh |= {n: leaf.clone() for n, leaf in leaves.items()}
        wanted = [r for r in case.results(fresh) if r.requires_grad]
        for tensor in _memory(fresh[changed]):
            tensor.detach().zero_()
        try:
            torch.autograd.backward(wanted, [_weights(r) for r in wanted])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            grads = [leaves[n].grad for n in names]
            _equal([g.to_dense() if g.is_sparse else g for g in grads], expected)


def test_ids_that_an_exchange_keeps_are_among_them(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        given = routed()
        y = exchange(
            lambda rows, ids, gates: rows * gates,
            given["x"].requires_grad_(),
            given["expert_ids"],
            given["gates"],
            num_experts=3,
            share=3,
            group=dist.group.WORLD,
        )
        given["expert_ids"].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    finally:
        dist.destroy_process_group()


@_differentiable
def test_gradients_of_many_vectors_are_right_or_refused(name: str) -> None:
    case = CALLS[name]
    given = case.of()
    names = case.leaves(given)
    leaves = [given[n].requires_grad_() for n in names]
    y = next(r for r in case.results(given) if r.requires_grad)
    vectors = torch.stack([_weights(y), torch.ones_like(y)])

    def gradients(vectors: torch.Tensor, batched: bool) -> list[torch.Tensor]:
        # The key that is rotated has no part in the first result, which is the query.
        how = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
        return [g for g in torch.autograd.grad(y, leaves, vectors, **how) if g is not None]

    try:
        found = gradients(vectors, True)
    except NotImplementedError as error:
        assert "must be" in str(error)
    else:
        _equal(found, [torch.stack(pair) for pair in zip(*(gradients(v, False) for v in vectors), strict=True)])


@_that("vmap", gradients=True)
def test_calls_of_vmap_are_so_many_calls(name: str) -> None:
    """With their gradients by ``backward()``; other ways to differentiate are refused within ``torch.vmap`` too."""
    case = CASES[name]
    given = case.of()
    first = case.leaves(given)[0]

    def call(x: torch.Tensor) -> torch.Tensor:
        return case.results(given | {first: x})[0]

    def with_gradient(calls: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = torch.stack([given[first], 2 * given[first]]).requires_grad_()
        y = calls(x)
        y.backward(_weights(y))
        return [y.detach(), x.grad]

    _equal(with_gradient(torch.vmap(call)), with_gradient(lambda x: torch.stack([*map(call, x)])))
    x = given[first][None]
    with pytest.raises(NotImplementedError, match=r"must be differentiated by torch\.autograd"):
        torch.func.jvp(torch.vmap(call), (x,), (x,))
    with pytest.raises(NotImplementedError, match=r"got torch\.func"):
        torch.func.vjp(torch.vmap(call), x)


# --- the properties notice a fault ------------------------------------------------------------------------------------


def _with_backward(backward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The square of x, with this gradient."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.unversioned = x.data
            return x * x

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return backward(ctx, dy)

    return lambda x, weight: Square.apply(x) + weight


def _once(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    ctx.times = getattr(ctx, "times", 0) + 1
    return 2 * dy * (ctx.times == 1)


COUNT = itertools.count(1)
# A property with what else it is given, and what breaks it: in place of a call of x (4, 32) and weight (32,).
FAULTS: dict[str, tuple[Callable[..., None], tuple[Any, ...], Callable[..., Any]]] = {
    "results": (test_results_and_gradients_are_right, (torch.float16,), lambda x, weight: 1.01 * x * weight),
    "results, a gradient": (test_results_and_gradients_are_right, (torch.float32,), lambda x, weight: x * weight.detach()),
    "bits": (test_the_same_bits_in_every_run, (), lambda x, weight: x * weight + 1e-6 * torch.rand(())),
    "rows alone": (test_rows_have_the_same_bits_in_any_batch, (), lambda x, weight: x * weight * (1 + (len(x) > 1))),
    "plans": (
        test_calls_that_share_a_plan_compute_of_their_own_tensors, (),
        lambda x, weight: operators._plans.setdefault(("planted",), x.detach().clone()) * weight + x,
    ),
    "strides": (
        test_strides_change_nothing, (_every_second, torch.float32), lambda x, weight: x.as_strided(x.shape, (32, 1)) * weight,
    ),
    "no elements": (test_no_elements_give_nothing_or_zeros, ("m",), lambda x, weight: x * weight if len(x) else weight[None]),
    "no rows": (test_no_rows_give_nothing_and_zeros, (), lambda x, weight: x.sum(0) * weight + (len(x) == 0)),
    "leading dimensions": (test_any_leading_dimensions, ((2, 2),), lambda x, weight: x.mT.reshape(x.shape) * weight),
    "leading dimensions, lost": (test_any_leading_dimensions, ((2, 2),), lambda x, weight: x.flatten(0, -2) * weight),
    "offsets": (
        test_offsets_are_64_bit, (lambda: None,), lambda x, weight: x * weight * (x.stride(0) < 2**29),
    ),
    "bad input": (test_what_is_no_such_tensor_is_named, (), lambda x, weight: x * weight),
    "integers": (test_integers_are_refused, (), lambda x, weight: x * weight),
    "operators": (test_pytorch_accepts_each_operator, (), lambda x, weight: x * weight),
    "compile": (
        test_compiles_to_one_graph, (False,), lambda x, weight: x * weight * (2 - torch.compiler.is_compiling()),
    ),
    "meta": (test_meta_tensors_have_the_shapes_of_results, (), lambda x, weight: (x * weight)[: 3 if x.is_meta else 4]),
    "a trace": (
        test_a_trace_of_fake_tensors_computes_the_same, (), lambda x, weight: x * weight * (2 - (type(x) is torch.Tensor)),
    ),
    "forward mode": (test_forward_mode_is_refused_not_left_out, (), lambda x, weight: x * weight),
    "autocast": (
        test_autocast_is_a_call_with_lowered_arguments, (), lambda x, weight: x * weight,
    ),
    "a gradient": (test_gradients_are_those_of_differences, (), _with_backward(lambda ctx, dy: 3 * ctx.saved_tensors[0] * dy)),
    "of gradients": (
        test_a_gradient_of_gradients_is_right_or_refused, (), _with_backward(lambda ctx, dy: 2 * ctx.unversioned * dy),
    ),
    "in place": (test_a_result_can_be_changed_in_place, (), lambda x, weight: x.view_as(x)),
    "a gradient alone": (
        test_each_gradient_alone_is_that_of_all, (), lambda x, weight: x * weight * (1 + weight.requires_grad),
    ),
    "checkpoint": (test_gradients_are_the_same_in_any_way, (), lambda x, weight: x * weight * next(COUNT)),
    "hooks": (
        test_gradients_are_the_same_in_any_way, (),
        _with_backward(lambda ctx, dy: 2 * ctx.saved_tensors[0] * dy + 0 * ctx.saved_tensors[0]),
    ),
    "twice": (test_gradients_are_the_same_in_any_way, (), _with_backward(_once)),
    "a gradient of no memory": (
        test_gradients_are_the_same_in_any_way, (), _with_backward(lambda ctx, dy: dy * dy.stride(-1)),
    ),
    "default dtype": (
        test_a_default_dtype_changes_nothing, (), lambda x, weight: x * weight * torch.tensor(1 / 3),
    ),
    "changed": (
        test_what_is_changed_before_the_backward_pass_is_an_error, (), _with_backward(lambda ctx, dy: 2 * ctx.unversioned * dy),
    ),
    "calls of vmap": (test_calls_of_vmap_are_so_many_calls, (), lambda x, weight: x * weight * (1 + x.requires_grad)),
    "many vectors": (
        test_gradients_of_many_vectors_are_right_or_refused, (),
        _with_backward(lambda ctx, dy: 2 * ctx.saved_tensors[0] * dy * float(dy.sum() > -1e9)),
    ),
}  # fmt: skip
FAULTS_ON_A_GPU: dict[str, tuple[Callable[..., None], tuple[Any, ...], Callable[..., Any]]] = {
    "real sizes": (test_real_sizes, (0, torch.bfloat16), lambda x, weight: x * weight + (x.numel() > 1000)),
    "large": (test_more_than_2_31_elements, (), lambda x, weight: x * weight + (x.numel() > 2**31)),
    "a graph": (
        test_a_graph_of_a_gpu_replays_with_other_tensors, (), lambda x, weight: x * weight * next(COUNT),
    ),
    "waiting": (test_the_host_does_not_wait, (), lambda x, weight: x * weight * float(x[0, 0] < 1e9)),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", [*FAULTS, *(pytest.param(name, marks=(pytest.mark.gpu, pytest.mark.memory)) for name in FAULTS_ON_A_GPU)]
)
def test_each_property_notices_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    property_of, more, function = (FAULTS | FAULTS_ON_A_GPU)[fault]
    broken = Case(
        function=function,
        given=lambda m=4, n=32: {"x": draw(m, n), "weight": draw(n)},
        reference=lambda x, weight: x * weight,
        real=({"m": 100, "n": 64},),
        large={"m": 2**19 + 5, "n": 4096},
    )
    for cases in (CASES, CALLS, COMPARED):
        monkeypatch.setitem(cases, "planted", broken)
    with pytest.raises((AssertionError, RuntimeError, IndexError, pytest.fail.Exception)):
        property_of("planted", *more)


def test_each_property_has_a_planted_fault() -> None:
    planted = {property_of for property_of, *_ in (FAULTS | FAULTS_ON_A_GPU).values()}
    properties = {
        value for key, value in globals().items()
        if key.startswith("test_") and [*inspect.signature(value).parameters][:1] == ["name"]
    }  # fmt: skip
    assert properties - planted == {
        test_what_a_number_is,
        test_a_compiler_takes_no_other_numbers,
        test_without_the_mode_rows_have_other_bits,
    }


# --- numbers --------------------------------------------------------------------------------------------------------

Q = torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
PACKED = kb.nf4_quantize(draw(2, 64, 64).to(DEVICE))
ROUTING = kb.route(ids(0, 1)[:, None], 2)
IDENTITY = torch.eye(64, device=DEVICE)


def _pages(**how: Any) -> torch.Tensor:
    pages = Q.new_ones(2, 1, 16, 16)
    return kb.paged_attention(Q[:, :, :1], pages, pages, ids(0, 1)[None], ids(20), **how)


def _scaled(scaling: Any) -> torch.Tensor:
    lora = torch.ones(2, 1, 64, device=DEVICE)
    return kb.moe_lora(IDENTITY[:2], IDENTITY.expand(2, 64, 64), lora, lora.mT, ROUTING, scaling=scaling)


def _fields(default: Any, kind: str) -> Any:
    """For each field of a configuration that is declared ``int`` or ``float``: how it is read, and a number for it."""

    def read(name: str) -> Callable[[Any], torch.Tensor]:
        return lambda n: torch.tensor(getattr(dataclasses.replace(default, **{name: n}), name))

    those = [f for f in dataclasses.fields(default) if getattr(f.type, "__name__", str(f.type)).startswith(kind)]
    return {f"{type(default).__name__} {f.name}": (read(f.name), getattr(default, f.name) or 0) for f in those}


# A call for each argument that is a number, and a number for it.
INTEGERS: dict[str, tuple[Callable[[Any], torch.Tensor], int]] = {
    "flash_attention window": (lambda n: kb.flash_attention(Q, Q, Q, causal=True, window=n), 3),
    "route num_experts": (lambda n: kb.route(ids(0, 1)[:, None], n).lists, 2),
    "nf4_matmul expert": (lambda n: kb.nf4_matmul(IDENTITY[:2], PACKED, n), 1),
    "nf4_quantize block_size": (lambda n: kb.nf4_quantize(IDENTITY, block_size=n).packed, 64),
    "sparse_linear chunk_size": (lambda n: kb.sparse_linear(IDENTITY, IDENTITY, chunk_size=n), 32),
    "sparse_forward chunk_size": (lambda n: kb.sparse_forward(IDENTITY, IDENTITY, None, ids(1), chunk_size=n), 32),
    "layer_norm normalized_shape": (lambda n: kb.layer_norm(IDENTITY, normalized_shape=n), 64),
    "sparse_backward chunk_size": (lambda n: kb.sparse_backward(IDENTITY, IDENTITY, IDENTITY, ids(1), chunk_size=n)[0], 32),
    "sparse_dw chunk_size": (lambda n: kb.sparse_dw(IDENTITY, IDENTITY, ids(1), chunk_size=n), 32),
    "sparse_dx chunk_size": (lambda n: kb.sparse_dx(IDENTITY, IDENTITY, ids(1), chunk_size=n), 32),
    **_fields(nn.GPTConfig(64), "int"),
    **_fields(TrainConfig(), "int"),
}  # fmt: skip
NUMBERS: dict[str, tuple[Callable[[Any], torch.Tensor], int]] = {
    "flash_attention scale": (lambda n: kb.flash_attention(Q, Q, Q, scale=n), 2),
    "flash_attention softcap": (lambda n: kb.flash_attention(Q, Q, Q, softcap=n), 2),
    "paged_attention scale": (lambda n: _pages(scale=n), 2),
    "paged_attention softcap": (lambda n: _pages(softcap=n), 2),
    "moe_lora scaling": (_scaled, 2),
    "layer_norm eps": (lambda n: kb.layer_norm(IDENTITY, eps=n), 1),
    "rms_norm eps": (lambda n: kb.rms_norm(IDENTITY, eps=n), 1),
    **_fields(TrainConfig(lr=1.0, min_lr=0.0), "float"),
}


@pytest.mark.parametrize("config", (nn.GPTConfig(5), TrainConfig()), ids=lambda c: type(c).__name__)
def test_a_configuration_stays_as_it_was_checked(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 7


def _may_be(name: str) -> tuple[Callable[[Any], torch.Tensor], Any, list[Any], list[Any]]:
    """A call, its number, and what else is and what is not such a number."""
    call, number = INTEGERS.get(name) or NUMBERS[name]
    others: list[Any] = [np.int64(number)] if number == int(number) else []
    nothing: list[Any] = [True, str(number), np.bool_(True)]
    if number == int(number):
        others.append(enum.IntEnum("Sizes", {"SIZE": int(number)})["SIZE"])
    if name in INTEGERS:
        nothing.append(float(number))
    else:
        others += [float(number), *([np.float32(number)] if number == np.float32(number) else [])]
    if name != "nf4_matmul expert":  # which may be a tensor
        nothing.append(torch.tensor(number))
    return call, number, others, nothing


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_what_a_number_is(name: str) -> None:
    """One of Python's or NumPy's, or of a class made of those: never a bool, a string or a tensor."""
    call, number, others, nothing = _may_be(name)
    argument = name.split()[1]
    with torch.device(runtime.DEVICE):
        expected = call(number)
        for other in others:
            torch.testing.assert_close(call(other), expected, rtol=0, atol=0)
        for other in nothing:
            with pytest.raises(TypeError, match=rf": {argument} must be an? (int|num).*, got {type(other).__name__}"):
                call(other)


@pytest.mark.parametrize("name", ("flash_attention window", "flash_attention scale", "paged_attention scale", "rms_norm eps",
                                  "layer_norm eps", "sparse_linear chunk_size", "moe_lora scaling"))  # fmt: skip
def test_a_compiler_takes_no_other_numbers(name: str) -> None:
    """An operator's schema takes a bool for a number."""
    call, number, others, nothing = _may_be(name)
    other = others[1] if name in INTEGERS else number  # Dynamo makes no float of one of an enum
    torch.testing.assert_close(torch.compile(lambda: call(other), backend="eager")(), call(number))
    for other in nothing[:2]:
        torch.compiler.reset()
        with pytest.raises(TypeError, match=f"must be an? (int|num).*, got {type(other).__name__}"):
            torch.compile(lambda other=other: call(other), backend="eager")()


def test_every_number_of_a_public_function_is_asked() -> None:
    functions = {name: getattr(kb, name) for name in kb.__all__ if inspect.isfunction(getattr(kb, name))}
    found = {
        f"{name} {parameter.name}"
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if re.search(r"(?<!set\[)\b(int|float)\b", str(parameter.annotation))
    }
    assert found and found <= {*INTEGERS, *NUMBERS}
