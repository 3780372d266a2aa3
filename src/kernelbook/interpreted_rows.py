"""Within ``same_bits`` the interpreter's product of two tiles is a product for each row.

BLAS may add the last rows of a tile in another order than the first, as OpenBLAS does on CPUs with AVX2. What a row becomes
would then depend on its place in the tile. A file of its own that only the package imports: recorded host times are dated by
the files that a launch imports, as it does :mod:`kernelbook.interpreter`, and no launch on a GPU goes through this.
"""

import functools
from collections.abc import Callable
from typing import Any

from kernelbook import runtime


def _row_by_row(dot: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, acc: Any, *how: Any) -> Any:
        if not runtime.in_same_bits():
            return dot(self, a, b, acc, *how)
        of, row = type(a), (..., None, slice(None))
        rows = dot(
            self, of(a.data[row], a.dtype), of(b.data[..., None, :, :], b.dtype), of(acc.data[row], acc.dtype), *how
        )
        return of(rows.data[..., 0, :], rows.dtype)

    return create_dot


if runtime.INTERPRET:
    from triton.runtime.interpreter import interpreter_builder

    _builder: Any = type(interpreter_builder)
    _builder.create_dot = _row_by_row(_builder.create_dot)
