"""The text of a function of a notebook as a file of its own, with the kernels, functions and constants that it uses."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import linecache
import math
import symtable
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import runtime  # noqa: F401  before Triton, which it sets up

# isort: split
import triton.language as tl

_IMPORTS = (
    "from math import inf, nan",
    "import torch",
    "import triton",
    "import triton.language as tl",
    "from torch import device",
)
# Packages whose text is not the reader's own.
_INSTALLED = {*sys.stdlib_module_names, "torch", "triton", "kernelbook", "numpy"} - {"__main__"}


def base_of(value: Any) -> Any:
    """The Python function of a kernel, however it is wrapped."""
    while not isinstance(value, (types.FunctionType, type)) and hasattr(value, "fn"):
        value = value.fn
    return value


def _literal(value: Any) -> str | None:
    """An expression for a constant, where there is one."""
    names = {"torch": torch, "tl": tl, "device": torch.device, "inf": math.inf, "nan": math.nan}
    text = f"tl.constexpr({_literal(value.value)})" if isinstance(value, tl.constexpr) else repr(value)
    text = f"tl.{text}" if isinstance(value, tl.dtype) else text
    with contextlib.suppress(Exception):
        return text if repr(eval(text, {"__builtins__": {}}, names)) == repr(value) else None
    return None


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that a text takes from around it, in the order in which they are declared."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def _source(base: Any) -> tuple[str, dict[str, Any]]:
    """The text of a function or a class, and the names around it. A notebook's class has a file by its methods alone."""
    if not isinstance(base, type):
        return textwrap.dedent(inspect.getsource(base)), base.__globals__
    with contextlib.suppress(OSError, TypeError):
        return textwrap.dedent(inspect.getsource(base)), vars(sys.modules[base.__module__])
    methods = [getattr(value, "__func__", value) for value in vars(base).values()]
    for method in filter(inspect.isfunction, methods):
        lines = linecache.getlines(method.__code__.co_filename, method.__globals__)
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]), method.__globals__
    raise OSError(base.__name__)


def text_of(function: Any) -> str:
    """The text of a file with ``function``, which may be the ``apply`` of an ``autograd.Function``, with the kernels, functions and constants that it uses, in their order.

    Raises ``ValueError`` where it uses something that a file could not have: a lambda, a function within a function, a tensor.
    """
    imports: dict[str, None] = dict.fromkeys(_IMPORTS)
    parts: dict[str, str] = {}

    def take(name: str, value: Any, wanted_by: str) -> None:
        if name in parts:
            return
        base = base_of(value)
        if isinstance(value, types.ModuleType):
            imports[f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"] = None
        elif isinstance(base, (types.FunctionType, type)) and (base.__module__ or "").split(".")[0] not in _INSTALLED:
            define(name, base)
        elif callable(value) and getattr(builtins, name, None) is value:
            pass
        elif (home := getattr(value, "__module__", None)) and callable(value) and hasattr(value, "__name__"):
            imports[f"from {home} import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")] = None
        elif (text := _literal(value)) is not None:
            parts[name] = f"{name} = {text}"
        else:
            raise ValueError(
                f"judge: {wanted_by} uses {name}, a {type(value).__name__}, which a file of its own would not have"
            )

    def define(name: str, base: Any) -> None:
        if base.__name__ == "<lambda>" or "<locals>" in base.__qualname__:
            raise ValueError(f"judge: {name} must be defined at the top level of a cell or a file")
        try:
            text, scope = _source(base)
        except (OSError, SyntaxError, TypeError):
            raise ValueError(f"judge: the text of {name} cannot be found") from None
        parts[name] = ""  # a function may call itself
        for wanted in _global_names(symtable.symtable(text, name, "exec")):
            if wanted in scope:
                take(wanted, scope[wanted], name)
        del parts[name]
        parts[name] = text.rstrip() + (f"\n\n\n{name} = {base.__name__}" if name != base.__name__ else "")

    base = base_of(function)
    if isinstance(base, types.MethodType) and isinstance(base.__self__, type):
        define(base.__self__.__name__, base.__self__)
        parts[base.__name__] = f"{base.__name__} = {base.__self__.__name__}.{base.__name__}"
    elif isinstance(base, types.FunctionType):
        define(base.__name__, base)
    else:
        raise ValueError(f"judge: a solution must be a function or a file, got {type(function).__name__}")
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(parts.values()) + "\n"
