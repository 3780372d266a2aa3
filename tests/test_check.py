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


def test_a_missing_gradient_fails() -> None:
    with pytest.raises((check.CheckError, RuntimeError)):
        check.check_op(lambda x: x.detach() * x.detach(), _square, _inputs(), grads=("x",))


def test_another_shape_or_dtype_fails() -> None:
    with pytest.raises(check.CheckError, match="shape"):
        check.check_op(lambda x: (x * x)[:-1], _square, _inputs())
    with pytest.raises(check.CheckError, match="dtype"):
        check.check_op(lambda x: (x * x).half(), _square, _inputs())


def test_several_outputs_are_all_looked_at() -> None:
    with pytest.raises(check.CheckError, match=r"out\[1\]"):
        check.check_op(lambda x: (x, x + 1), lambda x: (x, x), _inputs())


def test_the_rule_allows_twice_and_three_times_pytorchs_error() -> None:
    ref = torch.ones(1000, dtype=torch.float64)
    base = torch.full((1000,), 1 + 1e-3, dtype=torch.float32)
    for factor, error, passes in ((2.0, 1.9e-3, True), (2.0, 2.1e-3, False), (3.0, 2.9e-3, True), (3.0, 3.1e-3, False)):
        out = torch.full((1000,), 1 + error, dtype=torch.float32)
        assert check.compare("out", out, ref, base, factor=factor).passed == passes


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


def test_poisoned_empty() -> None:
    with check.poisoned_empty():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.ones(1).new_empty(2).isnan().all() and torch.empty_strided((2,), (1,)).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    plain = torch.empty
    with pytest.raises(ZeroDivisionError), check.poisoned_empty():
        assert torch.empty is not plain
        raise ZeroDivisionError
    assert torch.empty is plain
