"""What Triton 3.6's interpreter needs on a machine that has a newer NumPy."""

from typing import Any


def mend_interpreter() -> None:
    """NumPy 2.4 no longer makes a number of an array with one element, which Triton 3.6's interpreter asks it for."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def mended(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = mended
