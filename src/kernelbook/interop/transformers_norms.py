"""RMSNorm of transformers' models on :func:`kernelbook.rms_norm`; :func:`kernelbook.nn.swap` puts it there.

transformers has a class for each model's norm. One is taken for an RMS norm by what it computes, not by its name, and by its
signature: what takes a gate as well computes more.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from kernelbook.interop import probing
from kernelbook.layer_norm import rms_norm
from kernelbook.nn.made_again import MadeAgain
from kernelbook.tensors import without_autocast


class _Norm(MadeAgain):
    """The forward pass that a norm's class gets; everything else stays its own."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != self.weight.dtype:  # the models' norms differ in what comes out then
            return super().forward(hidden_states)  # type: ignore[no-any-return, misc]
        with without_autocast(hidden_states):  # it gives float32 there, and these the dtype that they were given
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)


@functools.cache
def _on_kernel(kind: Any) -> type[torch.nn.Module]:
    return type(kind.__name__, (_Norm, kind), {"__module__": __name__, "make": _on_kernel})


def _is_rms_norm(kind: type[torch.nn.Module], size: int, eps: float) -> bool:
    """Whether the class computes ``weight * x / rms(x)``: others add 1 to the weight, or subtract the mean."""
    with probing():
        norm: Any = kind.__new__(kind)
        torch.nn.Module.__init__(norm)
        x = torch.randn(3, size) + 0.5
        try:
            norm.weight, norm.variance_epsilon = torch.nn.Parameter(torch.rand(size) + 0.5), eps
            out = norm(x)
        except Exception:  # whatever a norm raises that has other attributes
            return False
    expected = norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return isinstance(out, torch.Tensor) and out.shape == x.shape and torch.allclose(out, expected, atol=1e-5)


def rms_norms(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, type[torch.nn.Module] | str]]:
    """The RMS norms of ``model`` that have ``weight`` and ``variance_epsilon``: name, module, and its class on the kernel.

    Instead of the class why there is none, where it is an RMS norm for one argument and takes others too.
    """
    taken: dict[type, bool] = {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if (
            issubclass(kind, _Norm)
            or not isinstance(weight, torch.Tensor)
            or weight.ndim != 1
            or not isinstance(eps, float)
        ):
            continue
        if kind not in taken:
            taken[kind] = _is_rms_norm(kind, 32, eps)
        if taken[kind]:
            others = list(inspect.signature(kind.forward).parameters)[2:]
            yield name, module, f"{kind.__name__} takes {' and '.join(others)} too" if others else _on_kernel(kind)
