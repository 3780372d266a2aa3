"""A Sphinx extension that reads this package's docstrings as they are meant, before Napoleon reads them.

- ``*shape`` outside of code is Python's unpacking, and not the beginning of emphasis.
- What follows ``Returns:`` is text. Napoleon would take all of it up to the first colon for a type.
- ``num_experts: E.`` is described by a letter; alone with its point that would begin a list.
"""

import re
from typing import Any

LETTER = re.compile(r"^(\s+\w+(?:, \w+)*: )(?=[A-Za-z]\.$)")
UNPACKED = re.compile(r"(?<=[(, ])\*[a-z][\w.]*(\[[^\]]*\])?(?=[),])")


def _prepare(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    for i, line in enumerate(lines):
        parts = re.split(r"(`+[^`]*`+)", line)  # every other one is code
        parts[::2] = [UNPACKED.sub(r"``\g<0>``", part) for part in parts[::2]]
        line = "".join(parts)
        line = LETTER.sub(r"\1\\", line)
        lines[i] = re.sub(r"^(\s*)", r"\1: ", line) if i and lines[i - 1].strip() == "Returns:" else line


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _prepare, priority=100)  # Napoleon's is 500
    return {"parallel_read_safe": True}
