"""What an attention class of transformers asks of its implementation, read in the source of its ``forward``."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any

__all__ = ["eager_attention", "parameters", "why_not", "why_not_by_source"]


def eager_attention(forward: Any) -> Callable[..., Any] | None:
    """The eager attention that a ``forward`` names."""
    forward = inspect.unwrap(forward)
    for name in forward.__code__.co_names:
        if name.endswith("eager_attention_forward"):
            return forward.__globals__.get(name)  # type: ignore[no-any-return]
    return None


def parameters(function: Any) -> tuple[str, ...]:
    """The names of its arguments; by its code, which Dynamo can read."""
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.cache
def why_not(forward: Any, read: frozenset[str]) -> str | None:
    """:func:`why_not_by_source` of a function; ``None`` where there is no source, and only its calls can be looked at."""
    forward = inspect.unwrap(forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
        file = inspect.getsource(sys.modules[forward.__module__])
    except (OSError, TypeError, KeyError, SyntaxError):
        return None
    return why_not_by_source(tree, file, read.union(parameters(eager_attention(forward))))


def why_not_by_source(forward: ast.AST, file: str, read: Collection[str]) -> str | None:
    """Why the attention of a module with this ``forward`` must not be replaced; ``None`` where nothing speaks against it.

    A keyword that nobody reads, such as the keys that a sparse attention has chosen; a question for the implementation's name;
    or a mask that the model computes with, since ours may be a statement, or none.

    Args:
        forward: its tree.
        file: the text that it stands in.
        read: the keywords that are read, or mean nothing here.
    """
    chosen = {
        ast.unparse(target)
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign | ast.AnnAssign) and "ALL_ATTENTION_FUNCTIONS" in _text(node.value)
        for target in _targets(node)
    }
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call) and ast.unparse(node.func) in chosen]
    if chosen and not calls:
        return "hands its attention implementation on"
    for call in calls:
        for why in _problems(forward, call, calls, read):
            return why
    return "is of a model that computes with its masks" if calls and "allow_is_causal_skip" in file else None


def _text(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _problems(forward: ast.AST, call: ast.Call, calls: list[ast.Call], read: Collection[str]) -> Iterator[str]:
    for keyword in call.keywords:
        nothing = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg is not None and keyword.arg not in read and not nothing:
            yield f"passes {keyword.arg} to its attention, which nobody here reads"
    nodes = list(_before(forward, call))
    for node in nodes:
        asks = isinstance(node, ast.If | ast.IfExp) and "_attn_implementation" in _text(node.test)
        if asks and any(isinstance(part, ast.Constant) for part in ast.walk(node.test)):  # type: ignore[attr-defined]
            yield "asks for the name of its attention implementation"
    given = [keyword.value for keyword in call.keywords if keyword.arg == "attention_mask"] or call.args[4:5]
    if given and not _is_handed_on(given[0], nodes, calls):
        yield "computes with its attention mask"


def _before(node: ast.AST, call: ast.Call) -> Iterator[ast.AST]:
    """What may run where ``call`` does: all of ``node`` but the other branch of an ``if`` in which the call stands."""
    yield node
    for _, field in ast.iter_fields(node):
        parts = [part for part in (field if isinstance(field, list) else [field]) if isinstance(part, ast.AST)]
        beside = (
            isinstance(node, ast.If) and isinstance(field, list) and _holds([node], call) and not _holds(parts, call)
        )
        for part in [] if beside else parts:
            yield from _before(part, call)


def _holds(nodes: list[ast.AST], call: ast.Call) -> bool:
    return any(part is call for node in nodes for part in ast.walk(node))


def _is_handed_on(mask: ast.expr, nodes: list[ast.AST], calls: list[ast.Call]) -> bool:
    """Whether the mask is what ``forward`` was given, or another such: only handed on, and asked whether it is there."""
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    names, found = _names(mask), set[str]()
    while names is not None and not names <= found:
        found |= names
        values = [
            _names(node.value)
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign) and found & {_text(target) for target in _targets(node)}
        ]
        names = None if None in values else set[str]().union(*(value or () for value in values))
    if names is None:
        return False
    for node in nodes:
        if not isinstance(node, ast.Name) or node.id not in found:
            continue
        above = parents.get(node)
        handed = isinstance(above, ast.Assign | ast.AnnAssign | ast.IfExp | ast.If) or above in calls
        asked = isinstance(above, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in above.ops)
        keyword = isinstance(above, ast.keyword) and parents.get(above) in calls
        if not (handed or asked or keyword):
            return False
    return True


def _names(value: ast.expr | None) -> set[str] | None:
    """The names that an expression chooses from; ``None`` where it is anything else."""
    if isinstance(value, ast.Name):
        return {value.id}
    if isinstance(value, ast.IfExp):
        parts = [_names(value.body), _names(value.orelse)]
        return None if None in parts else set[str]().union(*(part or () for part in parts))
    return set() if value is None or (isinstance(value, ast.Constant) and value.value is None) else None
