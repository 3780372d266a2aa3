"""The checks of arguments that rooms share."""

from typing import Any

import pytest
import torch

from kernelbook import arguments, runtime


def _tensor(*shape: int, **how: Any) -> torch.Tensor:
    return torch.zeros(shape, **{"device": runtime.DEVICE, **how})


def test_dtypes_are_compared_with_the_first_tensor_there_is() -> None:
    x, half = _tensor(2), _tensor(2, dtype=torch.float16)
    arguments.check_same_dtype("op", x=x, w=None, b=x)
    arguments.check_same_dtype("op", x=None, w=half, b=half)
    with pytest.raises(TypeError, match=r"op: b must have the dtype of x \(torch.float32\), got torch.float16"):
        arguments.check_same_dtype("op", x=x, w=None, b=half)
    with pytest.raises(TypeError, match=r"op: b must have the dtype of w \(torch.float16\), got torch.float32"):
        arguments.check_same_dtype("op", x=None, w=half, b=x)


@pytest.mark.parametrize("leading", ((), (3,), (2, 0)))
def test_a_linear_layer_takes_rows_of_any_shape(leading: tuple[int, ...]) -> None:
    arguments.check_linear("op", _tensor(*leading, 8), "w", _tensor(5, 8))


@pytest.mark.parametrize(
    ("x", "w", "error", "message"),
    [
        ([1.0], _tensor(5, 8), TypeError, "op: x must be a torch.Tensor, got list"),
        (_tensor(8), None, TypeError, "op: w must be a torch.Tensor, got NoneType"),
        (_tensor(), _tensor(5, 8), ValueError, "op: x must have at least one dimension, got a scalar"),
        (_tensor(8), _tensor(8), ValueError, r"op: w must have two dimensions, got shape \(8,\)"),
        (_tensor(3, 8), _tensor(5, 9), ValueError, r"op: w must have shape \(5, 8\), got \(5, 9\)"),
        (
            _tensor(3, 8), _tensor(5, 8, dtype=torch.float64),
            TypeError, r"op: w must have the dtype of x \(torch.float32\), got torch.float64",
        ),
        (_tensor(3, 8), _tensor(5, 8, device="meta"), ValueError, r"op: w must be on the device of x \(.*\), got meta"),
    ],
)  # fmt: skip
def test_what_is_no_linear_layer(x: Any, w: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        arguments.check_linear("op", x, "w", w)


def test_autocast_lowers_what_pytorch_would_lower() -> None:
    kind = runtime.DEVICE.type
    single, double, ids = _tensor(2), _tensor(2, dtype=torch.float64), _tensor(2, dtype=torch.int64)
    given = (single, double, ids, None)
    assert all(a is b for a, b in zip(arguments.in_autocast_dtype(*given), given, strict=True))
    with torch.autocast(kind, dtype=torch.bfloat16):
        lowered, *others = arguments.in_autocast_dtype(*given)
        assert lowered.dtype == torch.bfloat16
        assert all(a is b for a, b in zip(others, given[1:], strict=True))
        assert arguments.in_autocast_dtype([1.0], single) == ([1.0], single)  # no tensor: the checks complain later


def test_index_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")  # on a GPU the entries are looked at only then
    ids = torch.tensor([0, 3, 3], device=runtime.DEVICE)
    arguments.check_indices("op", "ids", ids)
    arguments.check_index_values("op", "ids", ids, 4)
    with pytest.raises(ValueError, match=r"op: ids must lie in \[0, 3\), got entries from 0 to 3"):
        arguments.check_index_values("op", "ids", ids, 3)
    with pytest.raises(ValueError, match="op: ids must not repeat an entry, got 3 more than once"):
        arguments.check_index_values("op", "ids", ids, 4, unique=True)
    with pytest.raises(TypeError, match="op: ids must have dtype int64, int32, got float32"):
        arguments.check_indices("op", "ids", _tensor(2))
    with pytest.raises(ValueError, match=r"op: ids must have one dimension, got shape \(1, 2\)"):
        arguments.check_indices("op", "ids", _tensor(1, 2, dtype=torch.int64))
