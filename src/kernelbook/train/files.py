"""Files that are either whole or not there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file that takes the place of ``path`` when all of it is on the disk, and never else.

    What a process that is killed leaves is ``path`` with ``.tmp`` behind it, which the next one overwrites.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.tmp")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
