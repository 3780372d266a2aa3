"""An extension of IPython: cells run as the tests do, where a reader's run as Triton and Python have it (``tests/conftest.py`` says why)."""

import gc
import sys
from typing import Any


def load_ipython_extension(shell: Any) -> None:
    gc.set_threshold(100_000, 20, 100)

    def remember(_: object) -> None:
        if "kernelbook.runtime" in sys.modules:  # a chapter imports it itself
            from kernelbook.lab import remembered_types

            shell.events.unregister("post_run_cell", remember)
            remembered_types.remember()
            gc.freeze()

    shell.events.register("post_run_cell", remember)
