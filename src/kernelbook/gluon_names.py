"""Functions of Gluon that Triton has renamed, under the names by which the kernels call them: those of Triton 3.6.

Gluon is experimental, and this is the one place that knows what moved. ``USABLE`` says whether kernels in Gluon are taken at
all: a Triton that nobody has tried them with runs those that every GPU has.
"""

import contextlib
from types import ModuleType
from typing import Any

from kernelbook import runtime  # before Triton, which it sets up


def _named(module: Any, **newer: str) -> Any:
    """Return the module; where it has the ``newer`` names, a copy in which these functions have the older ones too."""
    renamed = {old: getattr(module, new) for old, new in newer.items() if hasattr(module, new)}
    if not renamed:
        return module
    copy = ModuleType(module.__name__)
    vars(copy).update(vars(module), **renamed)
    return copy


tma: Any = None
async_copy: Any = None
thread_barrier: Any = None
USABLE = False
with contextlib.suppress(ImportError, AttributeError):
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language import shared_memory_descriptor
    from triton.experimental.gluon.language.nvidia import ampere, hopper

    # A method, so that nothing but the class itself can have the older name: Triton 3.9 calls it "reinterpret".
    if not hasattr(shared_memory_descriptor, "_reinterpret"):
        shared_memory_descriptor._reinterpret = shared_memory_descriptor.reinterpret
    tma = _named(hopper.tma, async_copy_global_to_shared="async_load", async_copy_shared_to_global="async_store")
    async_copy = _named(ampere.async_copy, async_copy_global_to_shared="async_load")
    thread_barrier = language.barrier if hasattr(language, "barrier") else language.thread_barrier
    USABLE = runtime.TRITON_IS_TRIED
