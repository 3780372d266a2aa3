"""Rotary position embedding of transformers' models in one launch; :func:`kernelbook.nn.swap` puts it there.

transformers turns queries and keys in ten small kernels, each of which reads and writes all of them. Here one program turns
all heads of a token: ``q cos + rotated(q) sin`` with the two halves of a head's features as the pairs, computed in float32
and rounded once. Memory: q and k read and written once, cos and sin read once a token. The gradient is the same with the
transposed rotation. An attention class is taken by what its function of that name computes.
"""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from kernelbook.interop import probing, transformers_attention
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.nn import kernels
from kernelbook.nn.made_again import MadeAgain
from kernelbook.operators import Op
from kernelbook.tensors import is_transformed

# isort: split
import triton

FUNCTION = "apply_rotary_pos_emb"


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn q (B, HQ, N, D) and k (B, HK, N, D) by cos and sin, (B or 1, N, D), in their own dtype (not float64)."""
    return _rotation(q, k, cos, sin, False)  # type: ignore[no-any-return]


def _new_like(x: torch.Tensor) -> torch.Tensor:
    """In the order of dimensions that x has in memory, with contiguous features."""
    return torch.empty_like(x, memory_format=torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format)


def _plan(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> tuple[Launch, tuple[int, int]] | None:
    batch, heads, n, size = q.shape
    if batch * n == 0:
        return None
    launch = launcher(
        kernels._rotate_kernel, HALF=size // 2, BLOCK_D=triton.next_power_of_2(size // 2), BLOCK_H=kernels.HEADS,
        BACK=back, num_warps=kernels.WARPS,
    )  # fmt: skip
    return launch, (batch * n, cdiv(heads, kernels.HEADS) + cdiv(k.shape[1], kernels.HEADS))


def _run(
    plan: tuple[Launch, tuple[int, int]], outputs: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, k: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, _: bool,
) -> None:  # fmt: skip
    (launch, grid), (q_out, k_out) = plan, outputs
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    batch, heads, n, size = q.shape
    cos, sin = (table.expand(batch, n, size) for table in (cos, sin))
    launch(
        grid,
        q, *q.stride()[:3], k, *k.stride()[:3], cos, *cos.stride()[:2], sin, *sin.stride()[:2],
        q_out, *q_out.stride()[:3], k_out, *k_out.stride()[:3],
        n, heads, k.shape[1],
    )  # fmt: skip


def _gradients(call: Any, dq: torch.Tensor | None, dk: torch.Tensor | None) -> list[torch.Tensor | None]:
    """-> those of q and k. Where only one of the two has been used, its gradient stands for both."""
    found = _rotation(dk if dq is None else dq, dq if dk is None else dk, *call.kept, not call.back)
    return [None if given is None else gradient for given, gradient in zip((dq, dk), found, strict=True)]


_rotation = Op(
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
    check=lambda *_: None,
    outputs=lambda q, k, *_: (_new_like(q), _new_like(k)),
    plan=_plan,
    run=_run,
    results=2,
    keeps=("cos", "sin"),  # all layers have the same
    backward=_gradients,
)


def _or(theirs: Any, half: bool = False) -> Any:
    """:func:`rotate`, or ``theirs`` where a model turns a part of the features, computes in float64, or is transformed.

    ``half``: its tables may be for the first half of a head's features alone.
    """

    def either(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if is_transformed() and not torch.compiler.is_compiling():  # forward-mode differentiation, torch.func
            return theirs(q, k, cos, sin)
        if q.ndim != 4 or cos.ndim != 3 or q.shape[-1] % 2 or q.dtype == torch.float64:
            return theirs(q, k, cos, sin)
        if 2 * cos.shape[-1] == q.shape[-1] and half:  # tables for a half's features, as in gpt-oss
            cos, sin = (torch.cat([table, table], -1) for table in (cos, sin))
        return (rotate if cos.shape[-1] == q.shape[-1] else theirs)(q, k, cos, sin)

    return either


def _is_rotation(function: Any, width: int) -> bool:
    """Whether the function turns the two halves of each head's 8 features against each other, called with four tensors.

    ``width``: of cos and sin.
    """
    with probing():
        q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
        cos, sin = torch.randn(2, 5, width), torch.randn(2, 5, width)
        try:
            found = function(q, k, cos, sin)
        except Exception:  # whatever a function raises that has other arguments
            return False

    def expected(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        wide_cos, wide_sin = (table.repeat(1, 1, 8 // width)[:, None] for table in (cos, sin))
        return x * wide_cos + torch.cat([-second, first], -1) * wide_sin

    return all(
        isinstance(out, torch.Tensor) and out.shape == x.shape and torch.allclose(out, expected(x), atol=1e-5)
        for out, x in zip(found, (q, k), strict=True)
    )


def _names_it(forward: Any) -> bool:
    """Whether it may call its module's function. Of other classes none is kept: with parametrizations a module has a class of its
    own, which keeps the module, and so its weights.
    """
    code = getattr(forward, "__code__", None)
    return code is not None and FUNCTION in code.co_names and FUNCTION in forward.__globals__


@functools.cache
def _with_kernel(kind: Any, forward: Any) -> type[torch.nn.Module] | None:
    """The attention class that calls :func:`rotate` instead of its module's function; ``None`` where that cannot be."""
    if inspect.unwrap(forward) is not forward:
        return None
    names = forward.__globals__
    try:
        calls = inspect.getsource(forward).count(f"{FUNCTION}(query_states, key_states, cos, sin)")
    except OSError:  # there is no source to look into
        return None
    half = calls == 1 and _is_rotation(names[FUNCTION], 4)
    if calls != 1 or not (half or _is_rotation(names[FUNCTION], 8)):
        return None
    # Without the name of their module, in which Dynamo would look the function up.
    own_names = {name: value for name, value in names.items() if name != "__name__"}
    own_names[FUNCTION] = _or(names[FUNCTION], half)
    own = types.FunctionType(forward.__code__, own_names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__module__, own.__kwdefaults__ = forward.__module__, forward.__kwdefaults__
    return type(kind.__name__, (MadeAgain, kind), {"forward": own, "__module__": __name__, "make": _again})


def _again(kind: Any) -> type[torch.nn.Module]:
    """The class on the kernel, or ``kind`` where another version of transformers has it otherwise."""
    transformers_attention.register()  # in another process nobody has, and the model's configuration names it
    return (_with_kernel(kind, kind.forward) if _names_it(kind.forward) else None) or kind


def attentions(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, type[torch.nn.Module]]]:
    """The attention modules of ``model`` that turn queries and keys so: name, module, and its class on the kernel."""
    for name, module in model.named_modules():
        kind: Any = type(module)
        if kind.__module__ != __name__ and _names_it(kind.forward) and (new := _with_kernel(kind, kind.forward)):
            yield name, module, new
