"""Files that are either whole or not there."""

import contextlib
import glob
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["kept", "replacing", "sweep"]


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


def kept(path: Path, make: Callable[[], Any], read: Callable[[Path], Any], write: Callable[[Any, Any], object]) -> Any:
    """Return what ``make()`` returns, kept in a file for the next time.

    A file that cannot be read (``read(path)`` raises) is made anew; where none can be written there is a warning.
    """
    if path.exists():
        with contextlib.suppress(OSError, EOFError, ValueError, IndexError):
            return read(path)
    made = make()
    try:
        with replacing(path) as file:
            write(file, made)
    except OSError as error:
        warnings.warn(f"{path} cannot be kept for the next time ({error}); see KERNELBOOK_CACHE", stacklevel=2)
    return made
