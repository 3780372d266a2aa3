"""What an attention class of transformers asks of its implementation, read in the source of its ``forward``."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any


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
    chosen = {name for name, value in _assigned(ast.walk(forward)) if "ALL_ATTENTION_FUNCTIONS" in ast.unparse(value)}
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call) and ast.unparse(node.func) in chosen]
    if chosen and not calls:
        return "hands its attention implementation on"
    for call in calls:
        beside = _beside(forward, call)
        for why in _problems([node for node in ast.walk(forward) if node not in beside], call, calls, read):
            return why
    return "is of a model that computes with its masks" if calls and "allow_is_causal_skip" in file else None


def _assigned(nodes: Iterator[ast.AST] | list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Names that are assigned to, and what each gets."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), node.value


def _problems(nodes: list[ast.AST], call: ast.Call, calls: list[ast.Call], read: Collection[str]) -> Iterator[str]:
    for keyword in call.keywords:
        nothing = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg is not None and keyword.arg not in read and not nothing:
            yield f"passes {keyword.arg} to its attention, which nobody here reads"
    for node in nodes:
        asks = isinstance(node, ast.If | ast.IfExp) and "_attn_implementation" in ast.unparse(node.test)
        if asks and any(isinstance(part, ast.Constant) for part in ast.walk(node.test)):  # type: ignore[attr-defined]
            yield "asks for the name of its attention implementation"
    given = [keyword.value for keyword in call.keywords if keyword.arg == "attention_mask"] or call.args[4:5]
    if given and not _is_handed_on(given[0], nodes, calls):
        yield "computes with its attention mask"


def _beside(forward: ast.AST, call: ast.Call) -> set[ast.AST]:
    """What does not run where ``call`` does: the other branch of an ``if`` in which the call stands."""
    found: set[ast.AST] = set()
    for node in ast.walk(forward):
        if isinstance(node, ast.If):
            one, other = ({part for top in branch for part in ast.walk(top)} for branch in (node.body, node.orelse))
            found |= other if call in one else one if call in other else set()
    return found


def _choices(value: ast.expr) -> list[ast.expr]:
    """What an expression chooses from."""
    return [*_choices(value.body), *_choices(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _is_handed_on(mask: ast.expr, nodes: list[ast.AST], calls: list[ast.Call]) -> bool:
    """Whether the mask is what ``forward`` was given, or another such: only handed on, and asked whether it is there."""
    found, values = set[str](), _choices(mask)
    for value in values:  # which grows
        name = ast.unparse(value)
        if name not in ("None", *found):
            if not isinstance(value, ast.Name):
                return False
            found.add(name)
            values += [choice for target, given in _assigned(nodes) if target == name for choice in _choices(given)]
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in found:
            above = parents.get(node)
            above = parents.get(above) if isinstance(above, ast.keyword) else above
            asked = isinstance(above, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in above.ops)
            if not (asked or above in calls or isinstance(above, ast.Assign | ast.AnnAssign | ast.IfExp | ast.If)):
                return False
    return True
