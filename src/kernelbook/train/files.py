"""Files that are either whole or not there."""

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["replacing", "sweep"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file that takes the place of ``path`` when all of it is on the disk, and never else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = None
    try:
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            name = file.name
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise


def sweep(path: Path) -> None:
    """Remove what processes that were killed within :func:`replacing` have left beside ``path``."""
    for left in path.parent.glob(f"{glob.escape(path.name)}*.tmp"):
        left.unlink(missing_ok=True)
