"""A Sphinx extension that reads this package's docstrings as they are meant, before Napoleon reads them.

- ``*shape`` outside of code is Python's unpacking, and not the beginning of emphasis.
- What follows ``Returns:`` is text. Napoleon would take all of it up to the first colon for a type.
- ``num_experts: E.`` is described by a letter; alone with its point that would begin a list.
- A class that goes by another ``__name__`` (transformers compares those of configurations) is still itself, and no alias.
"""

import re
from typing import Any

from sphinx.ext.autodoc import ClassDocumenter

LETTER = re.compile(r"^(\s+\w+(?:, \w+)*: )(?=[A-Za-z]\.$)")
UNPACKED = re.compile(r"(?<=[(, ])\*[a-z][\w.]*(\[[^\]]*\])?(?=[),])")


def _prepare(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    for i, line in enumerate(lines):
        parts = re.split(r"(`+[^`]*`+)", line)  # every other one is code
        parts[::2] = [UNPACKED.sub(r"``\g<0>``", part) for part in parts[::2]]
        line = "".join(parts)
        line = LETTER.sub(r"\1\\", line)
        lines[i] = re.sub(r"^(\s*)", r"\1: ", line) if i and lines[i - 1].strip() == "Returns:" else line


class _NamedClass(ClassDocumenter):
    def import_object(self, raiseerror: bool = False) -> bool:
        found = super().import_object(raiseerror)
        if found and self.objpath[-1] == getattr(self.object, "__qualname__", None):
            self.doc_as_attr = False
        return found


def setup(app: Any) -> dict[str, bool]:
    app.add_autodocumenter(_NamedClass, override=True)
    app.connect("autodoc-process-docstring", _prepare, priority=100)  # Napoleon's is 500
    return {"parallel_read_safe": True}
