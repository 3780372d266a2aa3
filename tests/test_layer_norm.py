"""The room layer_norm: every output and gradient by the rule of check.py, and everything around it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import label, randn, refused

import kernelbook as kb
from bench import layer_norm as bench
from kernelbook import check, runtime
from kernelbook.layer_norm import cases, kernels, layer_norm_backward_reference, layer_norm_reference
from kernelbook.nn import LayerNorm
from kernelbook.study.cases import STUDIES
from kernelbook.study.layer_norm import LOCK_BUFFERS, layer_norm_with_locks

CASES = cases.CASES | {"layer_norm_with_locks": STUDIES["layer_norm_with_locks"]}
NORMS = ("layer_norm", "layer_norm_with_locks")


def _check(x: torch.Tensor, weight: Any, bias: Any, norm: str = "layer_norm") -> None:
    CASES[norm].check({"x": x, "weight": weight, "bias": bias, "eps": 1e-5})


# Rows that share a tile, one tile, several tiles, rows that two programs share, rows that are looped over.
SHAPES = ((1, 1), (7, 1), (13, 64), (101, 31), (3, 2053), (5, 4096), (2, 9001))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=label)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("norm", NORMS)
def test_outputs_and_gradients(shape: tuple[int, int], dtype: torch.dtype, norm: str) -> None:
    n = shape[1]
    _check(randn(*shape, dtype=dtype), randn(n, dtype=dtype), randn(n, dtype=dtype), norm)


@pytest.mark.parametrize("n", (13_000, 18_000))
def test_rows_beyond_one_tile(n: int) -> None:
    _check(*(randn(*shape, dtype=torch.bfloat16) for shape in ((3, n), (n,), (n,))))


def test_a_large_mean_does_not_cancel() -> None:
    x = randn(4, 500) + 1000.0
    check.compare("out", kb.layer_norm(x), layer_norm_reference(x.double()), F.layer_norm(x, (500,))).require()
    wide = randn(2, 40_000) + 1000.0
    check.compare(
        "out", kb.layer_norm(wide), layer_norm_reference(wide.double()), F.layer_norm(wide, (40_000,))
    ).require()


def test_mixed_dtypes() -> None:
    x, w, b = randn(6, 40, dtype=torch.float16), randn(40), randn(40, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = kb.layer_norm(*leaves)
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    exact = layer_norm_reference(x.double(), w.double(), b.double())
    check.compare("out", y, exact, F.layer_norm(x, (40,), w.half(), b.half())).require()


def test_the_backward_reference_is_the_gradient() -> None:
    x, w, dy = randn(4, 9).double().requires_grad_(), randn(9).double(), randn(4, 9).double()
    b = torch.zeros_like(w).requires_grad_()
    w.requires_grad_()
    expected = torch.autograd.grad(layer_norm_reference(x, w, b), (x, w, b), dy)
    for ours, exact in zip(layer_norm_backward_reference(dy, x, w), expected, strict=True):
        torch.testing.assert_close(ours, exact)


# --- PyTorch's machinery --------------------------------------------------------------------------------------------


def test_normalized_shape_is_pytorchs() -> None:
    x, w, b = randn(3, 4, 6), randn(4, 6), randn(4, 6)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    ours = kb.layer_norm(x, normalized_shape=(4, 6), weight=w, bias=b)
    theirs = F.layer_norm(x, normalized_shape=(4, 6), weight=w, bias=b)
    torch.testing.assert_close(ours, theirs)
    dy = randn(3, 4, 6)
    for a, c in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True):
        torch.testing.assert_close(a, c)
    torch.testing.assert_close(kb.layer_norm(x, normalized_shape=6), F.layer_norm(x, (6,)))
    with pytest.raises(
        ValueError, match=r"normalized_shape must be how the shape of x ends, \(3, 4, 6\), got \(6, 4\)"
    ):
        kb.layer_norm(x, normalized_shape=(6, 4))
    with pytest.raises(TypeError, match=r"weight must be a tensor \(a shape goes into normalized_shape=\), got \(6,\)"):
        kb.layer_norm(x, (6,))  # type: ignore[arg-type]


@pytest.mark.parametrize("poisoned", ("x", "dy"))
def test_nan_stays_in_a_row_of_one_element(poisoned: str) -> None:
    x, dy = randn(3, 1), randn(3, 1)
    {"x": x, "dy": dy}[poisoned][1] = torch.nan
    (dx,) = torch.autograd.grad(kb.layer_norm(x.requires_grad_()), x, dy)
    assert dx.isnan().flatten().tolist() == [False, True, False] and not dx[::2].any()


def test_a_module_takes_the_state_of_pytorchs_and_says_what_is_wrong() -> None:
    ours, theirs = LayerNorm(24, device=runtime.DEVICE), torch.nn.LayerNorm(24, device=runtime.DEVICE)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = randn(8, 24)
    check.compare("out", ours(x), theirs.double()(x.double()), theirs.float()(x)).require()
    several, x = LayerNorm([2, 3]), randn(4, 2, 3)
    torch.testing.assert_close(several.to(x.device)(x), F.layer_norm(x, (2, 3)))
    with pytest.raises(ValueError, match=r"normalized_shape must be how the shape of x ends, \(2, 3\), got \(24,\)"):
        ours(randn(2, 3))


# --- edges ----------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "weight of another length": ({"weight": lambda: randn(7)}, r"weight must have shape \(8,\), got \(7,\)"),
    "bias of another length": ({"bias": lambda: randn(2, 8)}, r"bias must have shape \(8,\), got \(2, 8\)"),
    "negative eps": ({"eps": -1.0}, "eps must be a number that is not negative, got -1.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    refused(kb.layer_norm, {"x": randn(2, 8), "weight": randn(8)}, changes, f"layer_norm: {message}")


def test_locks_take_no_row_that_is_too_long() -> None:
    message = r"layer_norm_with_locks: x must have rows of at most 128 KiB in float32, got \(1, 32769\)"
    refused(layer_norm_with_locks, {}, {"x": lambda: randn(1, 2**15 + 1)}, message)


def test_an_exported_norm_takes_any_number_of_rows() -> None:
    norm, x = LayerNorm(8).to(runtime.DEVICE), randn(5, 8)
    exported = torch.export.export(norm, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert torch.equal(exported.module()(x[:3]), norm(x[:3]))


def test_too_many_columns() -> None:
    x = torch.empty(1, 1, device=runtime.DEVICE).expand(1, 2**31)
    with pytest.raises(ValueError, match="layer_norm: x must have fewer than 2\\^31 rows and columns"):
        kb.layer_norm(x)


@pytest.mark.parametrize("target", ("sm_86", "sm_90", "gfx942"))
def test_every_width_has_a_configuration_that_fits(target: str) -> None:
    properties = runtime.TARGETS[target]
    for itemsize in (2, 4, 8):
        for n in (*range(1, 100, 7), *range(100, 50_000, 997)):
            forward = kernels.plan_forward(n, itemsize, properties)
            assert forward is None or forward.kwargs["BLOCK_N"] * forward.kwargs["NUM_BLOCKS"] >= n
            for sums in (1, 2):  # RMSNorm's, and LayerNorm's
                backward = kernels.plan_backward(n, itemsize, n % 16 == 0, sums, False, properties).config
                if "SPLIT" in backward.kwargs:
                    kw = backward.kwargs
                    assert kw["BLOCK_N"] * kw["NUM_BLOCKS"] * kw["SPLIT"] >= n
                    shared_bytes, _ = kernels.backward_resources(backward, itemsize)
                    assert shared_bytes <= properties.shared_memory_per_program


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", (1024, 4096, 8192, 15872))
def test_real_sizes_that_are_not_aligned(n: int) -> None:
    _check(randn(301, n + 16)[:, 1 : n + 1], randn(n + 1)[1:], randn(n + 1)[1:])


@pytest.mark.gpu
@pytest.mark.alone
def test_the_lock_holds_over_a_thousand_launches_and_its_mutant_is_caught() -> None:
    assert bench.count_wrong_runs_apart(barrier=True, buffers=LOCK_BUFFERS, runs=500) == 0
    assert bench.count_wrong_runs_apart(barrier=True, buffers=8, runs=500) == 0
    # Two runs in a hundred are wrong on an H200 that is idle otherwise, and fewer beside other work.
    assert any(bench.count_wrong_runs_apart(barrier=False, buffers=8, runs=200) for _ in range(10))
