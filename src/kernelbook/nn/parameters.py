"""A user's parameter in 4 bits: its packed bytes in the parameter's place, and dense again wherever it is read."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from kernelbook.nf4 import NF4Tensor, nf4_dequantize, nf4_quantize


class NF4Parametrization(torch.nn.Module):
    """Keeps a 4-bit parameter's scales; as a parametrization it makes the parameter dense again where it is read.

    The packed bytes are the parametrization's ``original``. Who wants the 4-bit form asks :func:`stored_weight`.
    Conversions of the module to another dtype leave the scales as they are, and are that of the dense parameter.
    ``transposed``: the parameter is (E, K, N), and what is stored (E, N, K), as checkpoints that were packed along K have it.
    """

    PARTS = ("absmax", "code", "nested_absmax", "nested_code", "nested_offset")
    transposed = False
    host: Any = None  # who copies it to the device where it is offloaded (nn/offload.py), and its layer's number there
    layer = 0

    def __init__(self, q: NF4Tensor, *, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.shape, self.block_size, self.code_name, self.dtype = q.shape, q.block_size, q.code_name, q.dtype
        for name in self.PARTS:
            part = getattr(q, name)
            # A view of something larger could not be saved by safetensors.
            whole = part is None or part.untyped_storage().nbytes() == part.nbytes
            self.register_buffer(name, part if whole else part.clone())

    def tensor(self, packed: torch.Tensor) -> NF4Tensor:
        """Return the 4-bit tensor with these bytes; everything is shared."""
        return self._of(packed.detach(), self.shape, {name: getattr(self, name) for name in self.PARTS})

    def _of(self, packed: torch.Tensor, shape: tuple[int, ...], parts: dict[str, Any]) -> NF4Tensor:
        how: dict[str, Any] = {"block_size": self.block_size, "code_name": self.code_name, "dtype": self.dtype}
        return NF4Tensor(packed, shape=shape, **how, **parts)

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """packed (ceil(n / 2),) -> the dense tensor."""
        dtype = self.dtype if self.dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
        q = self.tensor(packed) if self.host is None else self.tensor(packed).to(self.host.device)
        dense = nf4_dequantize(q, dtype=dtype).to(self.dtype)
        return dense.transpose(1, 2) if self.transposed else dense

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "NF4Parametrization":
        where: Any = self.code.device
        self.dtype = fn(torch.empty(1, dtype=self.dtype, device=where)).dtype
        if self.host is not None:
            return self

        def keep_dtype(t: torch.Tensor) -> torch.Tensor:
            # Conversions change floating-point tensors only; as integers these pass unchanged.
            return fn(t.view(torch.int32)).view(torch.float32) if t.dtype == torch.float32 else fn(t)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        return (
            f"{self.shape}, {self.code_name}, block_size={self.block_size}{', transposed' if self.transposed else ''}"
        )


class _Stack(parametrize.ParametrizationList):
    """A 4-bit weight's parametrizations: :class:`NF4Parametrization`, and what others put on it for a while."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "_Stack":
        if self[0].host is None:
            return super()._apply(fn, recurse)
        for parametrization in self:  # the packed bytes stay on the host
            parametrization._apply(fn)
        return self

    def append(self, module: torch.nn.Module) -> "_Stack":
        # PEFT 0.21 puts a LoRA pair on a weight as one class and, where the weight has parametrizations of its own, takes
        # off another: the pair would stay, and be added once more in each forward pass. So it comes as that other one.
        peft: Any = sys.modules.get("peft.tuners.lora.layer")
        kind, removed = (getattr(peft, name, None) for name in ("_LoraFactorsProxy", "_LoraParameterProxy"))
        if kind is not None and removed is not None and type(module) is kind and not issubclass(kind, removed):
            pair, module = module, removed(None)
            module.forward = pair.forward  # type: ignore[method-assign]
        super().append(module)
        # Under parametrize.cached(), PEFT's way, torch's own checks have just read the weight as it was before.
        parametrize._cache.clear()
        return self


def quantize_parameter(
    module: torch.nn.Module, name: str, *, block_size: int = 64, double_quant: bool = False
) -> NF4Tensor:
    """Replace the parameter ``module.name`` by its 4-bit form and freeze it; the dense one is given up.

    ``module.name`` can be read as before and is dequantized at each reading.

    Raises:
        AttributeError: there is no such parameter.
        TypeError: it is not floating point.
        ValueError: it is parametrized already, for one because it is quantized.
    """
    q = nf4_quantize(quantizable(module, name, block_size), block_size=block_size, double_quant=double_quant)
    store_parameter(module, name, q)
    return q


def quantizable(module: torch.nn.Module, name: str, block_size: int) -> torch.Tensor:
    """Return the dense ``module.name``, or raise as :func:`quantize_parameter`. Ask for all of several before the first is quantized."""
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"quantize_parameter: {name} must not be parametrized, but it is")
    parameter = module._parameters.get(name)
    if parameter is None:
        raise AttributeError(f"quantize_parameter: {type(module).__name__} has no parameter {name!r}")
    nf4_quantize(torch.empty_like(parameter, device="meta"), block_size=block_size)
    return parameter.detach()


def store_parameter(module: torch.nn.Module, name: str, q: NF4Tensor, *, transposed: bool = False) -> None:
    """Put ``q`` in the place of the parameter ``module.name``, which is given up; ``transposed``: see the parametrization."""
    packed = torch.nn.Parameter(q.packed, requires_grad=False)
    parametrization = NF4Parametrization(q, transposed=transposed)
    setattr(module, name, packed)
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    stacks: Any = module.parametrizations
    stacks[name] = _Stack([parametrization], packed, unsafe=True)
    _reduces(type(module))


def _reduces(kind: type[torch.nn.Module]) -> None:
    """Make modules of the class that PyTorch has made for one parametrized module copied and pickled by :func:`_reduce`."""
    kind.__reduce_ex__ = _reduce  # type: ignore[assignment, method-assign]
    # PyTorch's own copies share the class: whoever made a parameter of one dense would take it from all.
    if "__deepcopy__" in kind.__dict__:
        del kind.__deepcopy__  # type: ignore[attr-defined]


def _reduce(module: torch.nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Return how to pickle and copy a module with 4-bit parameters, which PyTorch refuses: the new one has a class of its own."""
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return _parametrized, (type(module).__bases__[0], names), dict(module.__dict__)


def _parametrized(kind: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    _reduces(type(module))
    return module


def packed_parameter(module: torch.nn.Module, name: str) -> Any:
    """Return the parametrizations of the 4-bit ``module.name``; raise a ``TypeError`` where it is dense or adapters are on it."""
    found: Any = module.parametrizations[name] if parametrize.is_parametrized(module, name) else ()  # type: ignore[index]
    if len(found) != 1 or not isinstance(found[0], NF4Parametrization):
        raise TypeError(f"packed_parameter: {type(module).__name__}.{name} must be a 4-bit parameter, and it is not")
    return found


def is_stored_transposed(module: torch.nn.Module, name: str) -> bool:
    """Return whether :func:`stored_weight` gives (E, N, K) where ``module.name`` is (E, K, N)."""
    if not parametrize.is_parametrized(module, name):
        return False
    return bool(getattr(module.parametrizations[name][0], "transposed", False))  # type: ignore[index]


def dense_parameter(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a dense ``value`` in the place of a 4-bit parameter, which is given up."""
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    delattr(module, name)
    module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def stored_weight(module: torch.nn.Module, name: str) -> torch.Tensor | NF4Tensor:
    """``module.name`` in the form in which it is stored: an ``NF4Tensor`` after :func:`quantize_parameter`."""
    if parametrize.is_parametrized(module, name):
        found: Any = module.parametrizations[name]  # type: ignore[index]
        if len(found) == 1 and isinstance(found[0], NF4Parametrization):
            if found.original.is_meta and not found[0].code.is_meta:
                raise ValueError(
                    f"stored_weight: packed {name} must be in memory, got the meta device, as accelerate leaves what it offloads; "
                    f"kernelbook.interop.transformers.offload_experts keeps 4-bit experts on the host"
                )
            return found[0].tensor(found.original)
    return getattr(module, name)
