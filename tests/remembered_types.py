"""Types that Triton's interpreter makes anew for every value, of which a launch has few: remembered, they cost a fourth less.

Only what is made is kept, by what it is made of; ``test_evidence_memory`` compares it with what Triton makes.
"""

import builtins
import functools
import math
from typing import Any

from kernelbook import runtime

# isort: split
import triton
from triton.language import core
from triton.runtime import interpreter

TENSOR, BLOCK = core.tensor.__init__, core.block_type.__init__  # Triton's own
NP_DTYPE = getattr(interpreter, "_get_np_dtype", None)


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, ...]:
    block: Any = core.block_type.__new__(core.block_type)
    BLOCK(block, core.int32, list(sizes))
    return block.shape, block.numel, str(block.shape)


@functools.cache
def _sizes(sizes: tuple[int, ...]) -> tuple[Any, ...]:
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, text = _shape(builtins.tuple(core._unwrap_shape(shape)))
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(builtins.tuple(type.shape.values) if type.is_block() else ())


def _np_dtype(dtype: Any, known: dict[str, Any] = {}) -> Any:  # noqa: B006
    name = dtype.scalar.name
    if name not in known:
        known[name] = NP_DTYPE(dtype)  # type: ignore[misc]
    return known[name]


def remember() -> None:
    if not (runtime.INTERPRET and triton.__version__.startswith("3.7.")):  # others make types in other ways
        return
    core.block_type.__init__, core.tensor.__init__ = _init_block, _init_tensor  # type: ignore[method-assign]
    interpreter._get_np_dtype = _np_dtype
