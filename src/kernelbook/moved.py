"""Names that moved, and where they are now: there is no module under the old name."""

import opcode
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["moved"]

PLACES = {
    "kernelbook.autotune": "kernelbook.plans",
    "kernelbook.peers": "kernelbook.lab.baselines",
    **{
        f"kernelbook.{name}": f"kernelbook.lab.{name}"
        for name in ("cli", "compiled", "floor", "models", "plots", "profiling", "timing", "tuning")
    },
    "kernelbook.interop.transformers.ProfileCallback": "kernelbook.lab.profiling.ProfileCallback",
    **{
        f"kernelbook.train.{name}": f"kernelbook.lab.bench.{name}"
        for name in ("same_loss", "sparse_inference", "study")
    },
}


def moved(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module from which names moved.

    It raises ``AttributeError``, so that ``hasattr`` is false, and ``ImportError`` where ``from kernelbook import timing`` asks,
    which would hide the message of the other.
    """

    def look(name: str) -> Any:
        place = PLACES.get(f"{module}.{name}")
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        frame: Any = sys._getframe(1)
        while frame.f_code.co_name == "__getattr__":  # a module's own, which asks this one
            frame = frame.f_back
        imports = frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
        raise (ImportError if imports else AttributeError)(f"{module}.{name} is {place} now")

    return look
