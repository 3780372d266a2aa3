"""A Sphinx extension that reads this package's docstrings as they are meant, before Napoleon reads them.

- ``*shape`` outside of code is Python's unpacking, and not the beginning of emphasis.
- What follows ``Returns:`` is text. Napoleon would take all of it up to the first colon for a type.
- ``x: (M, K). weight: (N, K).`` under ``Args:`` or ``Attributes:`` are two of them; Napoleon would see one.
- ``num_experts: E.`` is described by a letter; alone with its point that would begin a list.
"""

import dataclasses
import inspect
import re
from typing import Any

LETTER = re.compile(r"^(\s+\w+(?:, \w+)*: )(?=[A-Za-z]\.$)")
UNPACKED = re.compile(r"(?<=[(, ])\*[a-z][\w.]*(\[[^\]]*\])?(?=[),])")
SECTIONS = ("Args:", "Attributes:")


def _names(obj: Any) -> set[str]:
    """What ``obj`` takes or holds: the names that may begin an entry."""
    names = {field.name for field in dataclasses.fields(obj)} if dataclasses.is_dataclass(obj) else set()
    try:
        return names | set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return names


def apart(lines: list[str], names: set[str]) -> list[str]:
    """``lines`` with one entry a line in the sections that list arguments and attributes."""
    if not names:
        return lines
    name = "(?:" + "|".join(sorted(names, key=len, reverse=True)) + ")"
    next_entry = re.compile(rf"(?<=[.;]) (?={name}(?:, {name})*: )")
    done: list[str] = []
    inside = False
    entry = ""

    def finish() -> None:
        nonlocal entry
        if entry:
            indent = entry[: len(entry) - len(entry.lstrip())]
            done.extend(indent + part for part in next_entry.split(entry.strip()))
        entry = ""

    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() in SECTIONS and indent == 0:
            inside = True
            done.append(line)
        elif inside and indent > 4 and entry:
            entry += " " + line.strip()
        elif inside and indent == 4:
            finish()
            entry = line
        else:
            finish()
            inside = inside and not line.strip()
            done.append(line)
    finish()
    return done


def _prepare(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = apart(lines, _names(obj))
    for i, line in enumerate(lines):
        parts = re.split(r"(`+[^`]*`+)", line)  # every other one is code
        parts[::2] = [UNPACKED.sub(r"``\g<0>``", part) for part in parts[::2]]
        line = "".join(parts)
        line = LETTER.sub(r"\1\\", line)
        lines[i] = re.sub(r"^(\s*)", r"\1: ", line) if i and lines[i - 1].strip() == "Returns:" else line


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _prepare, priority=100)  # Napoleon's is 500
    return {"parallel_read_safe": True}
