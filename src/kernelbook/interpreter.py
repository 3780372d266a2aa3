"""What Triton's interpreter needs on a newer NumPy: Triton 3.6 takes an array of one element for a number, NumPy 2.4 does not.

A loop up to a number that a kernel is given failed. That is no matter of compiled kernels: no measured row depends on it.
"""

from typing import Any

from kernelbook import runtime


def mend() -> None:
    """Has a kernel's numbers be numbers to Python too, as Triton 3.7 does."""
    from triton.runtime import interpreter

    patch: Any = getattr(interpreter, "_patch_lang_tensor", None)

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)  # the scope puts back what it has replaced, this too
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    if patch is not None:
        interpreter._patch_lang_tensor = patch_tensor


if runtime.INTERPRET:
    mend()
