"""RMSNorm, of the room layer_norm: every output and gradient by the rule of check.py, with and without a residual."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import label, randn, refused

import kernelbook as kb
from kernelbook import check, runtime
from kernelbook.layer_norm import rms_norm_reference
from kernelbook.layer_norm.cases import CASES
from kernelbook.nn import RMSNorm

EPS = 1e-6


def _check(x: torch.Tensor, weight: Any = None, residual: Any = None) -> None:
    CASES["rms_norm"].check({"x": x, "weight": weight, "residual": residual})


# Rows that share a tile, one tile, several tiles, rows that two programs share, rows that are looped over.
SHAPES = ((1, 1), (7, 1), (13, 64), (101, 31), (3, 2053), (2, 9001))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("with_residual", (False, True))
def test_outputs_and_gradients(shape: tuple[int, int], dtype: torch.dtype, with_residual: bool) -> None:
    x, residual = (randn(*shape, dtype=dtype) for _ in range(2))
    _check(x, randn(shape[1], dtype=dtype), residual if with_residual else None)


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    (
        ((13, 64), (torch.bfloat16, torch.float32)),  # what autocast makes of a layer's result, and the residual stream
        ((3, 2053), (torch.float32, torch.float16)),
        ((3, 5), (torch.float16, torch.bfloat16)),
        ((3, 5), (torch.float32, torch.float64)),
    ),
    ids=label,
)
@pytest.mark.parametrize("autocast", (False, True), ids=("", "autocast"))
def test_a_residual_of_another_dtype_is_added_as_pytorch_adds_it(
    shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], autocast: bool
) -> None:
    inputs = [randn(*shape, dtype=dtypes[0]), randn(*shape, dtype=dtypes[1]), randn(shape[1])]
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with torch.autocast(runtime.DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
        found = kb.rms_norm(leaves[0], leaves[2], EPS, residual=leaves[1])
    total = leaves[0] + leaves[1]
    expected = rms_norm_reference(
        total.float() if autocast and total.dtype == torch.bfloat16 else total, leaves[2], EPS
    )
    wide = torch.float64 if torch.float64 in dtypes else torch.float32  # every pair but one half with another
    assert [t.dtype for t in found] == [wide, wide]
    torch.testing.assert_close(found, (expected.to(wide), total))
    weights = [randn(*shape).to(wide) for _ in found]
    ours = torch.autograd.grad(found, leaves, weights)
    theirs = torch.autograd.grad((expected, total), leaves, weights)
    for leaf, one, other in zip(leaves, ours, theirs, strict=True):
        assert one.dtype == leaf.dtype
        torch.testing.assert_close(one, other, rtol=1e-2 if leaf.dtype.itemsize == 2 else 1e-4, atol=1e-4)


def test_a_single_column_without_a_weight() -> None:
    """With an eps that leaves it a gradient to speak of."""
    x = randn(5, 1).requires_grad_()
    ours, plain = (f(x).sum() for f in (lambda x: kb.rms_norm(x, None, 0.5), lambda x: F.rms_norm(x, (1,), None, 0.5)))
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (ours, plain)))


@pytest.mark.parametrize("used", (0, 1))
def test_only_one_result_is_used(used: int) -> None:
    x, residual, weight = leaves = [t.requires_grad_() for t in (randn(5, 33), randn(5, 33), randn(33))]
    results, up = (
        kb.rms_norm(x, weight, EPS, residual=residual),
        [torch.zeros(5, 33, device=x.device) for _ in range(2)],
    )
    up[used] = randn(5, 33)
    expected = torch.autograd.grad(results, leaves, up, retain_graph=True)
    found = torch.autograd.grad(results[used], leaves, up[used], materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", (None, 1e-3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.float64), ids=label)
def test_a_module_does_what_pytorchs_does(dtype: torch.dtype, eps: float | None) -> None:
    """Rows so small that eps decides: ``None`` is PyTorch's own choice for the dtype."""
    ours, theirs = (kind(24, eps=eps, device=runtime.DEVICE, dtype=dtype) for kind in (RMSNorm, torch.nn.RMSNorm))
    theirs.load_state_dict(ours.state_dict())
    x = randn(3, 24).mul(3e-4).to(dtype)
    exact = rms_norm_reference(x.double(), eps=eps or torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
    check.compare("out", ours(x), exact, theirs(x)).require()
    y, total = ours(x, residual=x)
    assert torch.equal(total, x + x) and torch.equal(y, ours(x + x))


def test_a_module_says_what_is_wrong() -> None:
    with pytest.raises(
        ValueError, match=r"RMSNorm: normalized_shape \(2, 3\) must be the last dimension, got \(2, 3\)"
    ):
        RMSNorm([2, 3], device=runtime.DEVICE)(randn(2, 3))
    with pytest.raises(ValueError, match=r"RMSNorm: normalized_shape \(24,\) must be the last dimension, got \(2, 3\)"):
        RMSNorm(24, device=runtime.DEVICE)(randn(2, 3))


# --- edges ----------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "weight of another length": ({"weight": lambda: randn(7)}, r"weight must have shape \(8,\), got \(7,\)"),
    "residual of another shape": ({"residual": lambda: randn(8)}, r"residual must have shape \(2, 8\), got \(8,\)"),
    "negative eps": ({"eps": -1.0}, "eps must be a number that is not negative, got -1.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    refused(kb.rms_norm, {"x": randn(2, 8), "weight": randn(8)}, changes, f"rms_norm: {message}")
