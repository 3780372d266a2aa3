"""What "correct" means in this book, defined once for tests, benchmarks and chapters.

An output or a gradient is correct when its error against the float64 reference is at most ``FORWARD_FACTOR`` (or
``GRADIENT_FACTOR``) times the error that plain PyTorch makes in the same dtype against the same reference, plus a
floor of about one rounding in that dtype::

    error(ours) <= factor * error(PyTorch) + floor,   error(out) = ||out - ref|| / ||ref||
    floor = FLOOR[dtype] * max(1, ELEMENT_FACTOR / sqrt(n))   for n different elements

The error of one number is a sum of roundings that may cancel, so PyTorch's own says how large such errors are only
where many are averaged: for a bias of three numbers it can be a tenth of that by luck, and on another CPU, whose BLAS adds
in another order, it is not. What n numbers tell varies by 1 / sqrt(n) of what one does, hence the floor for less than 64.

Where the reference is exactly zero the error is the root mean square of ``out``. NaN and infinity never pass unless
the reference has them in the same places.

A norm over a million elements hides a single wrong one. So the largest difference of any element is bounded too, loosely,
since the largest of many errors is a matter of luck::

    max |out - ref| <= ELEMENT_FACTOR * factor * max |PyTorch - ref| + ELEMENT_FLOOR * floor * max |ref|
"""

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from kernelbook import memory

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
ELEMENT_FACTOR = 8.0
ELEMENT_FLOOR = 4.0

# About one rounding of the result for the 16-bit dtypes (half a unit in the last place); a few for the wide ones, whose
# sums are also rounded on the way.
FLOOR: dict[torch.dtype, float] = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 1e-6,
    torch.float64: 1e-14,
}


class CheckError(AssertionError):
    """A result that is not correct."""


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||`` in float64, computed where ``out`` is.

    Returns infinity when ``out`` has a NaN or an infinity that ``ref`` has not. Where ``ref`` is exactly zero, the root
    mean square of ``out``. Raises ``CheckError`` when the shapes differ.
    """
    if out.shape != ref.shape:
        raise CheckError(f"the result has shape {tuple(out.shape)}, the reference {tuple(ref.shape)}")
    if out.numel() == 0:
        return 0.0
    out, ref = out.detach().to(torch.float64), ref.detach().to(out.device, torch.float64)
    finite = torch.isfinite(ref)
    if not bool(finite.all()):
        same = torch.where(torch.isnan(ref), torch.isnan(out), out == ref)
        if not bool(same[~finite].all()):
            return math.inf
        out, ref = out[finite], ref[finite]
    difference = float(torch.linalg.vector_norm(out - ref))
    scale = float(torch.linalg.vector_norm(ref))
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale > 0 else difference / math.sqrt(max(ref.numel(), 1))


def largest_error(out: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """``max |out - ref|`` and ``max |ref|`` over the elements where ``ref`` is finite, computed where ``out`` is."""
    out, ref = out.detach().to(torch.float64), ref.detach().to(out.device, torch.float64)
    difference = torch.where(torch.isfinite(ref), out - ref, 0.0)
    if out.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(torch.where(torch.isfinite(ref), ref, 0.0).abs().max())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one comparison. ``ratio`` is the error over PyTorch's, the floor counted on both sides.

    ``element`` is the largest difference of an element over what the rule allows.
    """

    name: str
    error: float
    baseline_error: float
    limit: float
    floor: float
    element: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.limit and self.element <= 1.0  # False for NaN

    @property
    def ratio(self) -> float:
        if math.isinf(self.error):
            return math.inf
        return max(self.error, self.floor) / max(self.baseline_error, self.floor)

    def __str__(self) -> str:
        return (
            f"{self.name}: error {self.error:.2e}, PyTorch's {self.baseline_error:.2e}, limit {self.limit:.2e}: "
            f"{'passed' if self.passed else 'FAILED'}"
            + (f", an element is off by {self.element:.1f} times what is allowed" if self.element > 1 else "")
        )

    def renamed(self, name: str) -> "Verdict":
        """Return the same outcome under another name."""
        return dataclasses.replace(self, name=name)

    def require(self) -> "Verdict":
        """Return itself, or raise ``CheckError``."""
        if not self.passed:
            raise CheckError(str(self))
        return self


def compare(
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    baseline: torch.Tensor,
    *,
    factor: float = FORWARD_FACTOR,
    floor: float | None = None,
) -> Verdict:
    """Compare ``out`` with ``baseline`` (plain PyTorch in the dtype of ``out``), both against ``ref`` (float64).

    ``floor`` is that of many elements, ``FLOOR[out.dtype]`` by default.
    """
    if out.dtype != baseline.dtype:
        raise CheckError(f"{name}: the result has dtype {out.dtype}, PyTorch's {baseline.dtype}")
    floor = FLOOR[out.dtype] if floor is None else floor
    # PyTorch's error of few numbers is luck. Where an input is expanded, many are the same few.
    count = ref.unique().numel() if ref.numel() < 10 * ELEMENT_FACTOR**2 else ref.numel()
    floor *= max(1.0, ELEMENT_FACTOR / math.sqrt(max(count, 1)))
    baseline_error = relative_error(baseline, ref)
    if not math.isfinite(baseline_error):
        raise CheckError(f"{name}: plain PyTorch gives no finite result here, so there is nothing to compare with")
    error = relative_error(out, ref)
    element = 0.0
    if math.isfinite(error) and error > 0:
        (largest, scale), (baseline_largest, _) = largest_error(out, ref), largest_error(baseline, ref)
        # Where the reference is zero, the floor is absolute, as it is for the norm.
        allowed = ELEMENT_FACTOR * factor * baseline_largest + ELEMENT_FLOOR * floor * (scale or 1.0)
        element = largest / allowed if allowed else math.inf
    return Verdict(name, error, baseline_error, factor * baseline_error + floor, floor, element)


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(math.nan)
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within the context, memory that Python code allocates uninitialised is filled with NaN (integers: the maximum).

    It finds outputs that a kernel leaves unwritten. PyTorch's own switch for this comes only with deterministic
    algorithms, which would also change which kernels are chosen.
    """

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: _fill(allocate(*args, **kwargs))

    patched: dict[str, Any] = {
        name: poisoned(getattr(torch, name)) for name in ("empty", "empty_like", "empty_strided")
    }
    new_empty = mock.patch.object(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    with mock.patch.object(memory, "_new", None), mock.patch.multiple(torch, **patched), new_empty:
        yield


def _run(
    fn: Callable[..., Any],
    inputs: Mapping[str, Any],
    dtype: torch.dtype | None,
    upstream: Sequence[torch.Tensor] | None,
    wanted: Sequence[str],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Call ``fn`` on its own leaves of ``inputs`` (in ``dtype``); return outputs, and gradients of ``wanted``."""
    own = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # A leaf with the same strides: detach() keeps them, to() keeps them where they are dense.
            value = value.detach() if dtype is None else value.detach().to(dtype)
            value.requires_grad_(name in wanted)
        own[name] = value
    outputs = [out for out in tree_leaves(fn(**own)) if isinstance(out, torch.Tensor)]
    if upstream is None or not wanted:
        return [out.detach() for out in outputs], []
    grads = torch.autograd.grad(
        outputs,
        [own[name] for name in wanted],
        [up.to(out.dtype) for up, out in zip(upstream, outputs, strict=True)],
        allow_unused=True,
    )
    return [out.detach() for out in outputs], list(grads)


def check_op(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    grads: Sequence[str] = (),
    baseline: Callable[..., Any] | None = None,
    forward_factor: float = FORWARD_FACTOR,
    require: bool = True,
) -> list[Verdict]:
    """Check ``fn(**inputs)`` and the gradients of the inputs named in ``grads``.

    Args:
        fn: the function under test; it returns a tensor or a tuple of tensors.
        reference: the same mathematics in plain PyTorch. It is run twice: on the inputs converted to float64, for the
            truth, and (unless ``baseline`` is given) on the inputs as they are, for PyTorch's own error.
        inputs: the arguments by name. Floating-point tensors are converted for the reference; all else is passed on.
        grads: names of the inputs whose gradients are compared, for one random upstream gradient.
        baseline: what plain PyTorch users would run in the same dtype, where that differs from ``reference``.
        require: raise ``CheckError`` at the first result that is not correct.

    Returns:
        One verdict for each output (``out`` or ``out[i]``) and each gradient (``d<name>``).

    Uninitialised memory is NaN while ``fn`` runs, so an output that is not written fails.
    """
    truth_outputs, _ = _run(reference, inputs, torch.float64, None, ())
    upstream = [torch.randn(out.shape, dtype=torch.float32, device=out.device) for out in truth_outputs]
    with poisoned_empty():
        outputs, gradients = _run(fn, inputs, None, upstream, grads)
    # The upstream gradient that fn was given is rounded to the dtype of its output; the truth has to see the same one.
    upstream = [up.to(out.dtype) for up, out in zip(upstream, outputs, strict=True)]
    truth_outputs, truth_gradients = _run(reference, inputs, torch.float64, upstream, grads)
    base_outputs, base_gradients = _run(baseline or reference, inputs, None, upstream, grads)

    verdicts = []
    for i, (out, ref, base) in enumerate(zip(outputs, truth_outputs, base_outputs, strict=True)):
        name = "out" if len(outputs) == 1 else f"out[{i}]"
        verdicts.append(compare(name, out, ref, base, factor=forward_factor))
    for name, ours, true_grad, base_grad in zip(grads, gradients, truth_gradients, base_gradients, strict=True):
        if ours is None or true_grad is None or base_grad is None:
            raise CheckError(f"d{name}: no gradient from {'fn' if ours is None else 'the reference'}")
        verdicts.append(compare(f"d{name}", ours, true_grad, base_grad, factor=GRADIENT_FACTOR))
    if require:
        for verdict in verdicts:
            verdict.require()
    return verdicts


def model(*args: Any, **kwargs: Any) -> Any:
    """Check a whole model, layer by layer: :func:`kernelbook.interop.check_model.check_model` with these arguments."""
    return importlib.import_module("kernelbook.interop.check_model").check_model(*args, **kwargs)
