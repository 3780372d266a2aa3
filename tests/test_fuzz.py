"""Every public function, called with whatever hypothesis thinks of, and compared with its reference; modules under autocast too.

Shapes (one, primes, more than a tile, nothing), strides, offsets of storage, dtypes, which inputs want a gradient, options, and
values from tiny to large: the sizes and options of each function stand in its room's ``cases.py``.
``HYPOTHESIS_PROFILE=fuzz python -m pytest tests/test_fuzz.py`` draws 2,000 of each anew.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import kernelbook  # noqa: F401

# isort: split
import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from kernelbook import check, nn, runtime
from kernelbook.cases import collect, floats

Verdicts = list[check.Verdict]
CASES = collect() | collect("STUDIES")


def _values(choice: Sequence[Any]) -> st.SearchStrategy[Any]:
    """From the smallest to the largest number, under the interpreter small ones, or one of several."""
    if isinstance(choice, tuple) and [type(value) for value in choice] == [int, int]:
        return st.integers(choice[0], min(choice[1], 70) if runtime.INTERPRET else choice[1])
    return st.sampled_from(choice)


COMMON = {
    "dtype": st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    "layout": st.sampled_from(("dense", "dense", "offset", "turned", "stepped", "wide rows")),
    "factor": st.sampled_from((1.0, 1.0, 1e-3, 30.0, 0.0)),
    "wants": st.integers(0, 2**6 - 1),
}


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, stored in another way."""
    if tensor.dim() == 0 or tensor.numel() == 0 or layout == "dense":
        return tensor
    if layout == "offset":
        base = tensor.new_empty(tensor.numel() + 1)
        return base[1:].view(tensor.shape).copy_(tensor)
    if layout == "turned":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor
    if layout == "stepped":
        return tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2].copy_(tensor)
    return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 5))[..., 2:-3].copy_(tensor)


def _called(name: str, dtype: torch.dtype, layout: str, factor: float, wants: int, **sizes: Any) -> Verdicts:
    case = CASES[name]
    given = case.of(dtype, **sizes)
    if names := floats(given):
        given[names[0]] = given[names[0]] * min(factor, case.largest)
    given |= {n: _laid_out(given[n], layout) for n in names}
    wanted = [n for i, n in enumerate(case.leaves(given)) if wants >> i & 1]
    if case.factor != check.FORWARD_FACTOR:
        wanted = []  # results that are gradients
    elif wanted and not isinstance(case.reference and case.reference(**given), torch.Tensor):
        wanted = case.leaves(given)  # one of several results may depend on some only
    return case.check(given, grads=wanted, require=False)


def _module(
    name: str,
    dtype: torch.dtype,
    layout: str,
    factor: float,
    wants: int,
    m: int,
    n: int,
    n_out: int,
    bias: bool,
    autocast: Any,
) -> Verdicts:
    """With and without autocast, beside PyTorch's."""
    where: Any = {"device": runtime.DEVICE, "dtype": dtype}
    module, plain = {
        "SparseLinear": lambda: (nn.SparseLinear(n, n_out, bias=bias, **where), F.linear),
        "LayerNorm": lambda: (
            nn.LayerNorm(n, bias=bias, **where),
            lambda x, weight, bias=None: F.layer_norm(x, (n,), weight, bias),
        ),
        "RMSNorm": lambda: (nn.RMSNorm(n, eps=1e-5, **where), lambda x, weight: F.rms_norm(x, (n,), weight, 1e-5)),
    }[name]()
    given = {"x": _laid_out((torch.randn(m, n, device=runtime.DEVICE) * factor).to(dtype), layout)}
    given |= {name: p.detach().clone() for name, p in module.named_parameters()}

    def under(enabled: bool) -> torch.autocast:
        return torch.autocast(runtime.DEVICE.type, autocast or torch.bfloat16, enabled and autocast is not None)

    def ours(x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
        with under(True):
            return torch.func.functional_call(module, parameters, (x,))

    def theirs(x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
        exact = x.dtype == torch.float64
        with under(not exact):
            return plain(x, **parameters).to(x.dtype if exact else result)

    with torch.no_grad():
        result = ours(**given).dtype
    grads = [n for i, n in enumerate(given) if wants >> i & 1]
    return check.check_op(ours, theirs, given, grads=grads, require=False)


AUTOCAST = st.sampled_from((None, torch.float16, torch.bfloat16))
SIZES = {"m": (0, 128), "n": (1, 257), "n_out": (1, 257), "bias": [False, True]}
TARGETS: dict[str, tuple[Callable[..., Verdicts], dict[str, Any]]] = {
    **{name: (_called, {s: _values(c) for s, c in case.sizes.items()}) for name, case in CASES.items() if case.sizes},
    **dict.fromkeys(
        ("LayerNorm", "RMSNorm", "SparseLinear"),
        (_module, {s: _values(c) for s, c in SIZES.items()} | {"autocast": AUTOCAST}),
    ),
}


def test_every_function_with_a_reference_is_fuzzed() -> None:
    """But for further ways to call one that is."""
    functions = {case.function for name, case in CASES.items() if name in TARGETS}
    assert all(case.function in functions for case in CASES.values() if case.reference)


DRAWS = 16


def _passes_on_average(i: int, verdict: check.Verdict, example: Callable[[], Verdicts]) -> bool:
    """The same call with other random values: do the root mean squares of the errors keep the rule?

    PyTorch's error in a result of few elements is a matter of luck. Now and then it is next to nothing, and then its multiple
    says nothing. A kernel that is wrong is wrong with other values too. NaN, infinity and the bound on elements stay as they are.
    """
    found = [verdict]
    factor = (verdict.limit - verdict.floor) / verdict.baseline_error if verdict.baseline_error else 0.0
    for seed in range(1, DRAWS):
        if not math.isfinite(found[-1].error) or found[-1].element > 1.0:
            return False
        torch.manual_seed(seed)
        found.append(example()[i])
    ours, theirs = (
        math.sqrt(sum(e * e for e in errors) / DRAWS)
        for errors in zip(*((v.error, v.baseline_error) for v in found), strict=True)
    )
    return found[-1].element <= 1.0 and ours <= factor * theirs + verdict.floor


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_drawn(name: str) -> None:
    function, strategies = TARGETS[name]

    @hypothesis.given(**COMMON | strategies)
    def run(**drawn: Any) -> None:
        torch.manual_seed(zlib.crc32(repr(sorted(drawn.items())).encode()))  # the same values when it is shrunk
        try:
            verdicts = function(name, **drawn)
        except check.CheckError as error:
            hypothesis.assume("nothing to compare with" not in str(error))
            raise
        for i, verdict in enumerate(verdicts):
            assert verdict.passed or _passes_on_average(i, verdict, lambda: function(name, **drawn)), str(verdict)

    run()
