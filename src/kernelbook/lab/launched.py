"""What a call launches, as text, and its digest: what the time on the device depends on. Needs no GPU.

A kernel of ours is its syntax tree and those of the functions of ours that it calls, without comments, docstrings, annotations
and the names of parameters and local variables; then its constants, options, grid, and the arguments other than addresses.
Of PyTorch's operators that run on the device the name, the shapes and the dtypes are noted. Nothing is compiled, and a digest is
the same on every version of Python and Triton.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernelbook.launch import OPTIONS  # before Triton, which it sets up

# isort: split
from triton.language import constexpr
from triton.runtime.jit import JITFunction

__all__ = ["Numbered", "digest", "launches_of", "text_of", "tree_text", "unfilled", "value_text", "without_docstrings"]

PACKAGE = "kernelbook"
LARGE = 2**18  # elements: tensors of so many are made, and not filled
INDICES = ("rand", "topk", "sort")  # what index inputs are drawn by: they are real ones, at any size
# They make a tensor or another view of one, and nothing runs on the device.
_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "_unsafe_view", "lift_fresh")


def digest(*parts: object) -> str:
    """Eight hexadecimal digits of the parts' texts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


# --- syntax trees ---------------------------------------------------------------------------------------------------


def tree_text(node: object) -> str:
    """A syntax tree as text: what ``ast.dump`` shows, but alike in all versions of Python."""
    if isinstance(node, list | tuple):
        return f"[{','.join(map(tree_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")]
    shown = ",".join(f"{name}={tree_text(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({shown})"


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The tree without the strings that stand as statements."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_text(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class Numbered(ast.NodeTransformer):
    """Numbers the parameters and local names of functions.

    ``known`` are values of global names: what is known of a name stands in its place. ``within`` is the function at hand.
    """

    def __init__(self, known: Mapping[str, Any], within: Any = None) -> None:
        self.known, self.within = known, within
        self.own: dict[str, str] = {}

    def named(self, name: str) -> ast.expr | None:
        """What stands for a global name; ``None`` where the name itself does."""
        value = self.known.get(name)
        if value is None or inspect.ismodule(value) or _is_foreign(value):
            return None
        return ast.Constant(value_text(value, self.within))

    def number(self, node: ast.FunctionDef) -> None:
        """Gives each parameter and local name of a function its number."""
        names = [n.arg for n in ast.walk(node) if isinstance(n, ast.arg)]
        names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for name in names:
            self.own.setdefault(name, f"v{len(self.own)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self.own = self.own, dict(self.own)
        constants = [_is_constexpr(arg.annotation) for arg in node.args.args]
        self.number(node)
        self.generic_visit(node)
        node.returns = None
        node.body.insert(0, ast.Expr(ast.Constant(constants)))  # type: ignore[arg-type]
        self.own = before
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=self.own.get(node.arg, node.arg))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        constant = _is_constexpr(node.annotation)
        self.generic_visit(node)
        node.annotation = ast.Constant(constant)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.own:
            return ast.Name(self.own[node.id], node.ctx)
        return self.named(node.id) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        value = self.known.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if inspect.ismodule(value) and value.__name__.partition(".")[0] == PACKAGE and node.value.id not in self.own:  # type: ignore[attr-defined]
            return ast.Constant(value_text(getattr(value, node.attr), self.within))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self.known.get(node.func.id) if isinstance(node.func, ast.Name) else None
        function = getattr(called, "fn", called)
        if isinstance(function, types.FunctionType) and not _is_foreign(function):
            names = list(inspect.signature(function).parameters)
            for keyword in node.keywords:
                if keyword.arg in names:
                    keyword.arg = str(names.index(keyword.arg))
        return self.generic_visit(node)


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and "constexpr" in ast.unparse(annotation)


def _is_foreign(value: Any) -> bool:
    """Whether it is Triton's, PyTorch's or Python's, and no number: their versions stand in a row."""
    if isinstance(value, constexpr | torch.dtype):
        return False
    module = getattr(getattr(value, "fn", value), "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("triton", "torch", "builtins", "math")


@functools.cache
def text_of(function: Any) -> str:
    """The text of a kernel or another function of ours, and of those that it calls."""
    function = getattr(function, "fn", function)
    tree: Any = without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(function))))
    tree.body[0].name, tree.body[0].decorator_list = "", []
    return tree_text(Numbered(function.__globals__, function).visit(tree.body[0]))


def value_text(value: Any, within: Any = None) -> str:
    """A constant, or a function or class of ours, as text."""
    value = getattr(value, "value", value) if isinstance(value, constexpr) else value
    function = getattr(value, "fn", value)
    if isinstance(function, types.FunctionType):
        return "itself" if function is within else digest(text_of(function))
    if inspect.isclass(value):
        tree = without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(value))))
        return digest(tree_text(tree.body[0].body))  # type: ignore[attr-defined]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"({','.join(map(value_text, value))})"
    if dataclasses.is_dataclass(value):
        # What a newer Triton has added to a layout is what it was before, unless somebody sets it.
        fields = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({','.join(f'{f.name}={value_text(getattr(value, f.name))}' for f in fields)})"
    return str(value) if isinstance(value, torch.dtype) or type(value).__module__.startswith("triton") else repr(value)


# --- what is launched -----------------------------------------------------------------------------------------------


def _argument_text(value: Any) -> object:
    """What a launch depends on of an argument that is no constant."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):
        layout = value_text(getattr(value, "layout", None))
        return str(value.base.dtype), [*value.shape], [*value.strides], [*value.block_shape], layout
    return value_text(value)


def _launch_text(kernel: Any, args: Sequence[Any], grid: Any, options: Mapping[str, Any]) -> object:
    names = [parameter.name for parameter in kernel.params]
    given = {**dict(zip(names, args, strict=False)), **options}
    values = [
        value_text(value) if parameter.is_constexpr else _argument_text(value)
        for parameter in kernel.params
        for value in [given.get(parameter.name, parameter.default)]
    ]
    unspecialized = [parameter.do_not_specialize for parameter in kernel.params]
    grid = tuple(grid(given) if callable(grid) else grid)
    others = sorted(
        (name, value_text(value))
        for name, value in options.items()
        if name not in names and (name, value) not in OPTIONS.items()
    )
    return digest(text_of(kernel)), values, unspecialized, (*grid, 1, 1)[:3], others


class _Unfilled(TorchDispatchMode):
    """Large tensors are made, but nothing is computed of them: what is launched does not depend on what they hold.

    ``operators``, if it is a list, is given those that would run on the device.
    """

    def __init__(self, large: float = LARGE) -> None:
        super().__init__()
        self.large = large
        self.operators: list[object] | None = None

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == PACKAGE:
            with self:  # to see what it does
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        name = func._schema.name.partition("::")[2]
        if self.operators is not None and not func.is_view and name not in _ALLOCATES:
            self.operators.append((name, [(str(t.dtype), tuple(t.shape)) for t in tensors]))
        sizes = [math.prod(s) for s in args if isinstance(s, list | tuple) and all(type(n) is int for n in s)]
        small = max([*(t.numel() for t in tensors), *sizes], default=0) < self.large
        if small or func.namespace != "aten" or func.is_view or name in INDICES:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]

        def meta(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return each.to("meta")
            return "meta" if isinstance(each, torch.device) else each

        def real(each: Any) -> Any:
            kept = isinstance(each, torch.Tensor)
            return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype) if kept else each

        generator = {"generator": None} if "generator" in kwargs else {}
        return tree_map(real, func(*tree_map(meta, args), **(tree_map(meta, kwargs) | generator)))


def unfilled() -> TorchDispatchMode:
    """A context in which large tensors are made without being filled."""
    return _Unfilled()


def launches_of(
    build: Callable[[], Mapping[str, Callable[[], object]]], *, large: float = LARGE
) -> Iterator[tuple[str, list[object]]]:
    """For each call that ``build()`` returns, by name, what it would launch, in order; nothing is launched.

    For a process that can only compile, in which :func:`kernelbook.runtime.compiling_for` says for which GPU. Tensors of
    ``large`` elements are not filled; on a GPU itself all are to be.
    """
    mode = _Unfilled(large)
    found: list[object] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_launch_text(kernel, args, grid, options))

    run, JITFunction.run = JITFunction.run, note
    try:
        with mode:
            for name, call in build().items():
                found.clear()
                mode.operators = found
                try:
                    call()
                finally:
                    mode.operators = None
                yield name, list(found)
    finally:
        JITFunction.run = run
