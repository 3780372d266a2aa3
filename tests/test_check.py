"""The checker itself: right results pass, and every kind of wrong one fails."""

import math

import pytest
import torch

from kernelbook import check


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(50, 7).to(dtype)}


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16))
def test_a_right_result_passes(dtype: torch.dtype) -> None:
    verdicts = check.check_op(_square, _square, _inputs(dtype), grads=("x",))
    assert [v.name for v in verdicts] == ["out", "dx"] and all(v.passed and v.ratio == 1 for v in verdicts)


def _one_element_off(x: torch.Tensor) -> torch.Tensor:
    out = x * x
    out[3, 3] += 0.1
    return out


def _nan(x: torch.Tensor) -> torch.Tensor:
    out = x * x
    out[0, 0] = math.nan
    return out


def _infinity(x: torch.Tensor) -> torch.Tensor:
    out = x * x
    out[0, 0] = math.inf
    return out


def _unwritten(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:-1] = x[:-1] * x[:-1]
    return out


def _systematically_off(x: torch.Tensor) -> torch.Tensor:
    return x * x * (1 + 1e-5)


@pytest.mark.parametrize("wrong", (_one_element_off, _nan, _infinity, _unwritten, _systematically_off))
def test_a_wrong_result_fails(wrong: object) -> None:
    with pytest.raises(check.CheckError, match=r"out: error .* FAILED"):
        check.check_op(wrong, _square, _inputs())


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0] * 1.999


def test_a_wrong_gradient_fails() -> None:
    with pytest.raises(check.CheckError, match="dx: error"):
        check.check_op(lambda x: _WrongGradient.apply(x), _square, _inputs(), grads=("x",))


@pytest.mark.parametrize("who", ("fn", "the reference"))
def test_a_gradient_that_one_of_several_inputs_lacks_fails(who: str) -> None:
    inputs = {"x": torch.randn(5), "y": torch.randn(5)}
    product, without = lambda x, y: x * y, lambda x, y: x * y.detach()
    ours, baseline = (without, product) if who == "fn" else (product, without)
    with pytest.raises(check.CheckError, match=f"dy: no gradient from {who}"):
        check.check_op(ours, product, inputs, grads=("x", "y"), baseline=baseline)


def test_the_truth_is_computed_in_float64_and_what_is_no_floating_point_tensor_is_passed_on() -> None:
    seen = []

    def scaled(x: torch.Tensor, ids: torch.Tensor, factor: float) -> torch.Tensor:
        seen.append((x.dtype, ids.dtype, factor))
        return x[ids] * factor

    check.check_op(scaled, scaled, {**_inputs(), "ids": torch.tensor([3, 0]), "factor": 0.5}, grads=("x",))
    assert set(seen) == {(dtype, torch.int64, 0.5) for dtype in (torch.float32, torch.float64)}
    assert [dtype for dtype, *_ in seen].count(torch.float64) == 2


def test_another_shape_or_dtype_fails() -> None:
    with pytest.raises(check.CheckError, match="shape"):
        check.check_op(lambda x: (x * x)[:-1], _square, _inputs())
    with pytest.raises(check.CheckError, match="dtype"):
        check.check_op(lambda x: (x * x).half(), _square, _inputs())


def test_several_outputs_are_all_looked_at() -> None:
    with pytest.raises(check.CheckError, match=r"out\[1\]"):
        check.check_op(lambda x: (x, x + 1), lambda x: (x, x), _inputs())
    with pytest.raises(ValueError, match="shorter"):
        check.check_op(lambda x: (x, x + 1), lambda x: (x, x), _inputs(), baseline=lambda x: x)


def test_the_rule_allows_twice_and_three_times_pytorchs_error() -> None:
    ref = torch.ones(1000, dtype=torch.float64)
    base = torch.full((1000,), 1 + 1e-3, dtype=torch.float32)
    for factor, error, passes in ((2.0, 1.9e-3, True), (2.0, 2.1e-3, False), (3.0, 2.9e-3, True), (3.0, 3.1e-3, False)):
        out = torch.full((1000,), 1 + error, dtype=torch.float32)
        assert check.compare("out", out, ref, base, factor=factor).passed == passes


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_floor_is_half_a_unit_in_the_last_place(dtype: torch.dtype) -> None:
    ref, base = torch.ones(1000, dtype=torch.float64), torch.ones(1000, dtype=dtype)
    for count, passes in ((200, True), (300, False)):  # the root of a quarter is a half
        out = base.clone()
        out[:count] += torch.finfo(dtype).eps
        assert check.compare("out", out, ref, base).passed == passes


FEW = (1, 3, 8, 40)  # elements: scalars, biases of routers, sinks


@pytest.mark.parametrize("count", (*FEW, 64, 5000))
def test_the_floor_of_few_numbers_is_higher(count: int) -> None:
    ref = torch.arange(1.0, count + 1, dtype=torch.float64)
    for share, passes in ((0.98, True), (1.02, False)):
        out = ref * (1 + share * check.FLOOR[torch.float64] * max(1, 8 / math.sqrt(count)))
        for rows in (1, 3):
            assert check.compare("out", *(t.expand(rows, count) for t in (out, ref, ref))).passed == passes


@pytest.mark.parametrize("dtype", check.FLOOR)
@pytest.mark.parametrize("count", FEW)
def test_a_fault_in_few_numbers_is_found(count: int, dtype: torch.dtype) -> None:
    """In the gradient of a bias of so many numbers: one of 18 tokens is left out, or a factor is wrong."""
    dy = torch.randn(18, count, dtype=torch.float64).add(1).to(dtype)
    ref, base = dy.double().sum(0), dy.sum(0)
    wrong = 1e-11 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 0.1
    for out in (dy[:-1].sum(0), dy[1:].sum(0), (ref * (1 + wrong)).to(dtype)):
        assert not check.compare("dbias", out, ref, base, factor=check.GRADIENT_FACTOR).passed
    assert check.compare("dbias", base, ref, base, factor=check.GRADIENT_FACTOR).passed


@pytest.mark.parametrize("scale", (0.0, 1e-3, 1.0, 1e3))
def test_an_element_may_be_off_by_sixteen_times_pytorchs_largest_error_and_four_floors(scale: float) -> None:
    ref = torch.full((1000,), scale, dtype=torch.float64)
    for error in (0.0, 1e-3 * (scale or 1.0)):
        allowed = 16 * error + 4e-6 * (scale or 1.0)
        for share, passes in ((0.98, True), (1.02, False)):
            out = ref.clone()
            out[3] += share * allowed
            assert check.compare("out", out, ref, ref + error, floor=1e-6).passed == passes


def test_a_baseline_without_a_result_is_no_excuse() -> None:
    ref = torch.ones(3, dtype=torch.float64)
    with pytest.raises(check.CheckError, match="nothing to compare with"):
        check.compare("out", torch.ones(3), ref, torch.full((3,), math.nan))


def test_relative_error() -> None:
    ref = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert check.relative_error(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert check.relative_error(torch.tensor([math.nan, 4.0]), ref) == math.inf
    assert check.relative_error(torch.tensor([0.0, 1.0]), torch.zeros(2)) == pytest.approx(math.sqrt(0.5))
    assert check.relative_error(torch.empty(0), torch.empty(0)) == 0
    infinite = torch.tensor([math.inf, 1.0])
    assert check.relative_error(infinite, infinite) == 0
    assert check.relative_error(torch.tensor([1.0, 1.0]), infinite) == math.inf
    assert check.relative_error(torch.tensor([0.03, 0.045]), ref / 100) == pytest.approx(0.1)
    assert check.relative_error(infinite[:1], infinite[:1]) == 0


def test_the_largest_error_is_that_of_what_is_finite() -> None:
    ref = torch.tensor([math.inf, -2.0, 1.0])
    assert check.largest_error(torch.tensor([math.inf, -2.0, 1.5]), ref) == (0.5, 2.0)
    assert check.largest_error(ref[:0], ref[:0]) == (0.0, 0.0)


def test_poisoned_empty() -> None:
    with check.poisoned_empty():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.ones(1).new_empty(2).isnan().all() and torch.empty_strided((2,), (1,)).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        assert torch.empty(2, dtype=torch.bool).all()
    plain = torch.empty
    with pytest.raises(ZeroDivisionError), check.poisoned_empty():
        assert torch.empty is not plain
        raise ZeroDivisionError
    assert torch.empty is plain
