"""Names that moved, and where they are now: there is no module under the old name."""

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

    It raises ``ImportError`` for these: ``from kernelbook import timing`` would hide the message of an ``AttributeError``.
    """

    def look(name: str) -> Any:
        place = PLACES.get(f"{module}.{name}")
        if place is not None:
            raise ImportError(f"{module}.{name} is {place} now", name=f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look
