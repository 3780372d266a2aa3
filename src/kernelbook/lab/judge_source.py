"""A reader's solution as text: what a file of kernels may not do, and the text of a function from a notebook.

Reading the text is the judge's first line and not its last: whoever gets past it still has to give right results to another
process. It makes the plain cases plain, with the line where they stand.
"""

from __future__ import annotations

import ast
import builtins
import inspect
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

__all__ = ["problems", "text_of"]

_IMPORTS = frozenset(
    (
        "__future__",
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "itertools",
        "kernelbook",
        "math",
        "operator",
    )
    + ("torch", "triton", "typing")
)
_OF_RUNTIME = frozenset(("DEVICE", "HAS_GPU", "INTERPRET", "TARGETS", "properties"))
_OF_CUDA = frozenset(
    ("current_device", "device_count", "get_device_capability", "get_device_properties", "is_available")
)
_NOT_OF_TORCH = frozenset(
    (
        "backends",
        "classes",
        "compile",
        "distributed",
        "export",
        "func",
        "fx",
        "hub",
        "jit",
        "library",
        "load",
        "multiprocessing",
    )
    + ("ops", "overrides", "package", "profiler", "save", "testing", "utils", "frombuffer", "from_file", "from_numpy")
    + ("manual_seed", "set_default_device", "set_default_dtype")
)
_NOT_OF_TRITON = frozenset(("backends", "compiler", "instrumentation", "knobs", "profiler", "runtime", "tools"))
_DESCRIPTORS = ["triton", "tools", "tensor_descriptor"]  # a launch makes tensor descriptors with its one class
# What makes code or an attribute's name of a string.
_OF_STRINGS = frozenset(
    ("ForwardRef", "attrgetter", "get_type_hints", "methodcaller", "singledispatch", "singledispatchmethod")
)
_NO_BUILTINS = frozenset(
    (
        "__import__",
        "breakpoint",
        "compile",
        "delattr",
        "eval",
        "exec",
        "getattr",
        "globals",
        "input",
        "locals",
        "memoryview",
    )
    + ("open", "setattr", "vars")
)
_NO_ATTRIBUTES = frozenset(
    (
        "as_subclass",
        "cr_frame",
        "f_back",
        "f_globals",
        "f_locals",
        "gi_frame",
        "numpy",
        "set_",
        "share_memory_",
        "storage",
    )
    + ("tb_frame", "tb_next", "untyped_storage", "with_traceback")
)
_DUNDERS = frozenset(("__init__", "__name__", "__doc__", "__post_init__"))
# What the body of a kernel may call: Triton's language, other kernels of the file, and what Triton makes of these of Python.
IN_KERNELS = frozenset(
    ("range", "min", "max", "len", "float", "int", "bool", "abs", "tuple", "print", "isinstance", "hasattr")
)
# What a value in a kernel has. A block's handle, say, is the interpreter's.
_OF_VALUES = frozenset(
    name
    for kind in (tl.tensor, tl.pointer_type, tl.block_type, tl.tensor_descriptor, tl.constexpr)
    for name in dir(kind)
    if not name.startswith("_")
) | {"dtype", "element_ty", "numel", "primitive_bitwidth", "shape", "strides", "type", "value"}


def _path(node: ast.expr) -> list[str] | None:
    """``a.b.c`` as its parts; nothing for what begins otherwise."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def _module_problem(parts: list[str]) -> str | None:
    """What is wrong with using this dotted name of an imported module."""
    head, *rest = parts
    name = ".".join(parts)
    if head not in _IMPORTS:
        return f"imports {name}: a file of kernels needs torch, triton and a little of Python's library"
    if _OF_STRINGS.intersection(rest):
        return f"uses {name}, which finds by a string what the text does not show"
    if any(part.startswith("_") for part in rest):
        return f"uses {name}, which is private"
    if any(
        part in sys.stdlib_module_names and part not in _IMPORTS for part in rest if head not in ("math", "operator")
    ):
        return f"reaches through {name} for a module of Python's"
    if head == "torch" and rest[:1] and rest[0] in _NOT_OF_TORCH:
        return f"uses {name}: of torch a solution takes memory and autograd"
    if parts[:2] == ["torch", "cuda"] and rest[1:] and rest[1] not in _OF_CUDA:
        return f"uses {name}: streams, events and graphs are the judge's"
    if parts[:3] == _DESCRIPTORS and parts[3:4] in ([], ["TensorDescriptor"]):
        return None
    if head == "triton" and any(part in _NOT_OF_TRITON for part in rest):
        return f"uses {name}: of triton a solution takes its language"
    if head == "kernelbook" and rest and (rest[0] != "runtime" or (rest[1:2] and rest[1] not in _OF_RUNTIME)):
        return f"uses {name}: the book's own kernels are not yours"
    return None


def _found(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source.encode())  # as Python reads a file, in the encoding that its first lines may name
    # What a file does when it is run by itself, a benchmark say, never runs here.
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            statement.test, statement.body = ast.Constant(value=False), [ast.Pass()]
    modules: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = (
                    alias.name.split(".") if alias.asname else alias.name.split(".")[:1]
                )
                if problem := _module_problem(alias.name.split(".")):
                    yield node.lineno, problem
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                parts = [*(node.module or "").split("."), alias.name]
                modules[alias.asname or alias.name] = parts
                if node.level or alias.name == "*":
                    yield node.lineno, "imports names that the text does not show"
                elif problem := _module_problem(parts):
                    yield node.lineno, problem
    kernels = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("jit" in (_path(d.func if isinstance(d, ast.Call) else d) or []) for d in node.decorator_list)
    } | {
        node.args[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and "jit" in (_path(node.func) or [])
        and node.args
        and isinstance(node.args[0], ast.Name)
    }
    inner: set[int] = set()  # attributes whose chain was looked at as a whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            part: ast.expr = node
            while isinstance(part, ast.Attribute):
                inner.add(id(part))
                part = part.value
            chain = _path(node)
            full = [*modules[chain[0]], *chain[1:]] if chain and chain[0] in modules else []
            if full and (problem := _module_problem(full)):
                yield node.lineno, problem
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "ctx")
            if node.attr in _NO_ATTRIBUTES or (node.attr.startswith("_") and node.attr not in _DUNDERS and not own):
                yield node.lineno, f"uses .{node.attr}, which reaches behind a tensor or a function"
            if isinstance(node.ctx, (ast.Store, ast.Del)) and not own:
                yield node.lineno, f"changes {ast.unparse(node)}"
        elif isinstance(node, ast.Name):
            if node.id in _NO_BUILTINS or (node.id.startswith("__") and node.id not in _DUNDERS):
                yield node.lineno, f"uses {node.id}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name.startswith("__") and node.name not in _DUNDERS:
                yield node.lineno, f"defines {node.name}"
            if isinstance(node, ast.FunctionDef) and node.name in kernels:
                yield from _in_kernel(node, kernels, modules)
        elif isinstance(node, ast.MatchClass) and node.kwd_attrs:
            yield node.lineno, f"reads .{node.kwd_attrs[0]} by a pattern"
        elif isinstance(node, ast.ClassDef) and "torch.Tensor" in map(ast.unparse, node.bases):
            yield node.lineno, "derives a class from torch.Tensor"


def _in_kernel(kernel: ast.FunctionDef, kernels: set[str], modules: dict[str, list[str]]) -> Iterator[tuple[int, str]]:
    """The interpreter runs a kernel's body as Python, with whatever it calls; a compiler would not."""
    for node in ast.walk(ast.Module(kernel.body, [])):
        if isinstance(node, ast.Call) and (chain := _path(node.func)):
            full = [*modules.get(chain[0], chain[:1]), *chain[1:]]
            method = chain[0] not in modules and len(chain) > 1
            if not (method or full[0] == "triton" or (len(full) == 1 and full[0] in kernels | IN_KERNELS)):
                yield node.lineno, f"calls {'.'.join(chain)} in a kernel, which is no function of Triton's language"
        elif isinstance(node, ast.Attribute) and node.attr not in _OF_VALUES:
            chain = _path(node)
            if not (chain and chain[0] in modules):
                yield node.lineno, f"uses .{node.attr} in a kernel, which no value of Triton's language has"


def problems(source: str) -> list[str]:
    """What the text of a solution does that a kernel and its launch have no use for, line by line; empty if nothing."""
    try:
        return [f"line {line} {what}" for line, what in sorted(set(_found(source)))]
    except SyntaxError as error:
        return [f"line {error.lineno} is no Python: {error.msg}"]


# --- a function of a notebook as a file --------------------------------------------------------------------------------


def _base(value: Any) -> Any:
    """The Python function of a kernel, however it is wrapped."""
    while not isinstance(value, (types.FunctionType, type)) and hasattr(value, "fn"):
        value = value.fn
    return value


def _literal(value: Any) -> str | None:
    """An expression for a constant, where there is one."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, tl.constexpr):
        inner = _literal(value.value)
        return inner and f"tl.constexpr({inner})"
    if isinstance(value, tl.dtype):
        return f"tl.{value!r}" if hasattr(tl, repr(value)) else None
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype)):
        return {"inf": 'float("inf")', "-inf": '-float("inf")', "nan": 'float("nan")'}.get(repr(value), repr(value))
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        parts = [_literal(item) for item in value]
        inner = ", ".join(part or "" for part in parts) + ("," if isinstance(value, tuple) and len(parts) == 1 else "")
        return None if None in parts else f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if type(value) is dict:
        pairs = [(_literal(k), _literal(v)) for k, v in value.items()]
        return None if any(None in p for p in pairs) else "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    return None


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that a text takes from around it, in the order in which they are declared."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def text_of(function: Any) -> str:
    """The text of a file with ``function``, with the kernels, functions and constants that it uses, in their order.

    Raises ``ValueError`` where it uses something that a file could not have: a lambda, a function within a function, a tensor.
    """
    imports: dict[str, None] = dict.fromkeys(("import torch", "import triton", "import triton.language as tl"))
    parts: dict[str, str] = {}

    def take(name: str, value: Any, wanted_by: str) -> None:
        if name in parts:
            return
        base = _base(value)
        if isinstance(value, types.ModuleType):
            imports[f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"] = None
        elif isinstance(base, (types.FunctionType, type)) and _of_reader(base):
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
            text = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            raise ValueError(f"judge: the text of {name} cannot be found") from None
        parts[name] = ""  # a function may call itself
        scope = base.__globals__ if isinstance(base, types.FunctionType) else sys.modules[base.__module__].__dict__
        for wanted in _global_names(symtable.symtable(text, name, "exec")):
            if wanted in scope:
                take(wanted, scope[wanted], name)
        del parts[name]
        parts[name] = text.rstrip() + (f"\n\n\n{name} = {base.__name__}" if name != base.__name__ else "")

    base = _base(function)
    if not isinstance(base, types.FunctionType):
        raise ValueError(f"judge: a solution must be a function or a file, got {type(function).__name__}")
    define(base.__name__, base)
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(parts.values()) + "\n"


def _of_reader(base: Any) -> bool:
    """Whether this is the reader's own text, not that of an installed package."""
    return (base.__module__ or "").split(".")[0] not in {
        *sys.stdlib_module_names,
        "torch",
        "triton",
        "kernelbook",
        "numpy",
    } or (base.__module__ == "__main__")
