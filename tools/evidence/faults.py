"""Faults that are planted in kernels: small systematic changes of their source, one at a time.

A fault is a place in a kernel's source and what stands there instead. It has a name that does not depend on line numbers:
the file, the function, the kind of change, the changed statement, and a number where that occurs more than once. Nor does it
depend on what variables are called.
"""

import ast
import copy
import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from common import EVIDENCE, PACKAGE, command_line

# By room: the files with its kernels, and the files whose tests have to notice.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "layer_norm": (("layer_norm/kernels.py",), ("test_layer_norm.py", "test_rms_norm.py")),
    "sparse_linear": (("sparse_linear/kernels.py",), ("test_sparse_linear.py",)),
    "scatter_ffn": (("scatter_ffn/kernels.py",), ("test_scatter_ffn.py",)),
    "nf4": (("nf4/kernels.py",), ("test_nf4.py",)),
    "moe_lora": (("moe_lora/kernels.py",), ("test_moe_lora.py",)),
    "attention": (
        (
            "attention/kernels.py",
            "attention/kernels_decode.py",
            "attention/kernels_hopper.py",
        ),
        ("test_attention.py", "test_attention_decode.py"),
    ),
    "packed": (
        ("packed/kernels.py", "packed/kernels_nvidia.py", "packed/kernels_hopper.py", "tiles.py"),
        ("test_nf4.py", "test_moe_lora.py"),
    ),
    "nn": (("nn/kernels.py",), ("test_moe_block.py", "test_whole_model.py")),
    "train": (
        ("train/kernels.py",),
        ("test_train_optimizer.py", "test_train_schedulers.py", "test_train_sparse_inference.py"),
    ),
    "distributed": (("distributed/kernels.py",), ("test_distributed.py", "test_evidence_distributed.py")),
}
# Calls that keep threads, warps or kernels in order.
# Functions that only ask a cache for what will be read: no result can depend on them.
HINTS = ("_prefetch", "_prefetch_tiles")
ORDER = ("debug_barrier", "gdc_wait", "fence_async_shared", "wait", "arrive", "store_wait", "barrier", "thread_barrier")


@dataclasses.dataclass(frozen=True)
class Fault:
    """``text`` instead of the source from ``start`` to ``end`` (offsets in bytes) of ``file``."""

    room: str
    file: str
    function: str
    kind: str
    statement: str
    number: int
    line: int
    start: int
    end: int
    text: str
    lines: tuple[int, int]  # of the changed statement, without the block that it may begin
    numbered: tuple[str, str]  # the statement and the text with numbers for the names of variables

    @property
    def name(self) -> str:
        what = "\n".join((self.file, self.function, self.kind, *self.numbered, str(self.number)))
        return f"{self.function}:{self.kind.replace(' ', '_')}:{hashlib.sha256(what.encode()).hexdigest()[:10]}"

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def _called(node: ast.AST) -> str:
    """The last part of the name that a call calls; empty for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _last_value(statement: ast.stmt) -> ast.AST:
    """The expression with which a block ends."""
    while isinstance(statement, ast.If):
        statement = statement.body[-1]
    return getattr(statement, "value", None) or statement


def _changed(node: Any, **fields: Any) -> Any:
    """The same, but for these fields."""
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def _without(call: ast.Call, *names: str) -> ast.Call:
    return _changed(call, keywords=[k for k in call.keywords if k.arg not in names])


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_constant(node: ast.AST) -> bool:
    """Known when a kernel is compiled: constants, and names in capitals except sizes."""
    sizes = {"M", "N", "K", "L", "S", "D", "E", "R", "T", "G", "H", "K_out", "L_out"}
    return not any(isinstance(n, ast.Call) for n in ast.walk(node)) and all(
        n.isupper() and n not in sizes for n in _names(node)
    )


def _is_tuple(node: ast.AST) -> bool:
    return isinstance(node, (ast.Tuple, ast.List))


def _expr(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


_LOOSER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.LtE: ast.Lt, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_OPPOSITE = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt}


def _of_call(node: ast.Call, stored: bool) -> Iterator[tuple[str, ast.AST]]:
    name, keywords = _called(node), {k.arg: k.value for k in node.keywords}
    if name in ("load", "store") or name.startswith("atomic_"):
        if "mask" in keywords:
            yield "mask dropped", _without(node, "mask", "other")
        if "other" in keywords:
            yield "other dropped", _without(node, "other")
        modifier = keywords.get("cache_modifier")
        # ".ca" and ".cs" say which lines of a cache will be needed again. ".cg" says which cache, and so what is seen of others.
        if isinstance(modifier, ast.Constant) and modifier.value not in (".ca", ".cs"):
            yield "cache modifier dropped", _without(node, "cache_modifier")
    if name.startswith("atomic_"):
        relaxed = ast.keyword("sem", ast.Constant("relaxed"))
        yield "order relaxed", _changed(node, keywords=[*_without(node, "sem").keywords, relaxed])
    if name in ("range", "static_range") and node.args:
        step = ast.unparse(node.args[2]) if len(node.args) > 2 else "1"
        at = 1 if len(node.args) > 1 else 0
        first, (end, *rest) = node.args[:at], node.args[at:]
        yield "loop one short", _changed(node, args=[*first, _expr(f"({ast.unparse(end)}) - ({step})"), *rest])
        if first:
            yield "loop starts late", _changed(node, args=[_expr(f"({ast.unparse(first[0])}) + ({step})"), end, *rest])
    if name == "zeros" and node.args:
        size, *rest = node.args
        full = _changed(node.func, attr="full")
        yield "accumulator not reset", _changed(node, func=full, args=[size, ast.Constant(1), *rest])
    if name == "dot" and len(node.args) > 2:
        yield "accumulator lost", _changed(node, args=[*node.args[:2], *node.args[3:]])
    if name == "where":
        test, *choices = node.args
        yield from (("choice dropped", choice) for choice in choices if not isinstance(choice, ast.Constant))
        if (
            isinstance(test, ast.Compare)
            and type(test.ops[0]) in _OPPOSITE
            and "tl.int32" not in ast.unparse(test)  # no NaN there
            and isinstance(test.comparators[0], ast.Constant)
        ):
            turned = _changed(test, ops=[_OPPOSITE[type(test.ops[0])]()])
            yield "NaN takes the other side", _changed(node, args=[turned, *reversed(choices)])
    if name in ("minimum", "maximum"):
        yield from (("bound dropped", arg) for arg in node.args)
    if name == "to" and isinstance(node.func, ast.Attribute) and node.args and not stored:
        target = ast.unparse(node.args[0])
        if target.endswith("int64"):
            yield "cast dropped", node.func.value
        elif target in ("ACC", "tl.float32", "gl.float32"):
            narrow = _expr("tl.float16" if target != "gl.float32" else "gl.float16")
            yield "cast narrowed", _changed(node, args=[narrow, *node.args[1:]])


def _of_operation(node: ast.BinOp, strides: list[str]) -> Iterator[tuple[str, ast.AST]]:
    left, right, op = node.left, node.right, type(node.op)
    if _is_tuple(left) or _is_tuple(right) or _is_constant(node):
        return
    if op is ast.BitAnd:
        yield "condition dropped", left
        yield "condition dropped", right
    elif op is ast.Mult:
        for side, other in (("right", left), ("left", right)):
            factor = getattr(node, side)
            if isinstance(factor, ast.Name) and factor.id.startswith("stride"):
                alike = [s for s in strides if s[:8] == factor.id[:8] and s != factor.id]
                swapped = _expr(alike[0] if alike else f"({factor.id} + 1)")
                yield "stride swapped", _changed(node, **{side: swapped})
            elif side == "right" or isinstance(factor, ast.Constant):
                yield "factor dropped", other
    elif op in (ast.Div, ast.FloorDiv, ast.Mod):
        yield "divisor dropped", left
    elif op is ast.Add:
        yield "term dropped", left
    elif op is ast.Sub:
        yield "term dropped", left
        yield "sign turned", ast.BinOp(left, ast.Add(), right)


def _of_comparison(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    if (
        len(node.ops) != 1
        or _is_constant(node)
        or (isinstance(node.comparators[0], ast.Constant) and isinstance(node.comparators[0].value, str))
    ):
        return
    op = type(node.ops[0])
    if op in _LOOSER:
        yield "comparison changed", _changed(node, ops=[_LOOSER[op]()])
    if op is ast.Lt:
        less = _expr(f"({ast.unparse(node.comparators[0])}) - 1")
        yield "bound off by one", _changed(node, comparators=[less])


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Expr) and _called(node.value) in ORDER:
        yield "barrier removed", ast.Pass()
    if isinstance(node, ast.AugAssign) and not _is_tuple(node.value):
        yield "update dropped", ast.Pass()
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and "arange" in {_called(n) for n in ast.walk(node.value)}
    ):
        yield "offset off by one", _changed(node, value=_expr(f"({ast.unparse(node.value)}) + 1"))


def _of_function(function: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt, ast.AST, ast.AST]]:
    """-> kind, statement, the node that is replaced, what replaces it."""
    strides = [a.arg for a in function.args.args if a.arg.startswith("stride")]
    casts_of_stores = set()
    for call in ast.walk(function):
        if _called(call) == "store" and len(call.args) > 1:  # type: ignore[attr-defined]
            casts_of_stores.add(call.args[1])  # type: ignore[attr-defined]  # a store casts by itself

    def visit(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt, ast.AST, ast.AST]]:
        for statement in statements:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(statement, ast.If) and _called(_last_value(statement)) in HINTS:
                continue  # it prepares a hint, and nothing else
            if isinstance(statement, ast.AnnAssign) or _called(getattr(statement, "value", None) or statement) in (
                "static_assert", "assume", "inline_asm_elementwise",
            ):  # fmt: skip
                continue
            for kind, new in _of_statement(statement):
                yield kind, statement, statement, new
            blocks = [getattr(statement, name, []) for name in ("body", "orelse")]
            inner = {id(s) for block in blocks for s in block}
            todo: list[ast.AST] = [c for c in ast.iter_child_nodes(statement) if id(c) not in inner]
            if isinstance(statement, ast.If) and not _is_constant(statement.test) and _names(statement.test):
                returns = isinstance(statement.body[-1], ast.Return)
                yield "guard dropped", statement, statement.test, ast.Constant(not returns)
            while todo:
                node = todo.pop()
                found: Iterator[tuple[str, ast.AST]] = iter(())
                if isinstance(node, ast.Call):
                    found = _of_call(node, node in casts_of_stores)
                elif isinstance(node, ast.BinOp):
                    found = _of_operation(node, strides)
                elif isinstance(node, ast.Compare):
                    found = _of_comparison(node)
                elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not _is_constant(node.operand):
                    found = iter([("sign turned", node.operand)])
                elif isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in (0.0, 1.0):
                    found = iter([("constant off", ast.Constant(node.value * 1.01))])
                for kind, new in found:
                    yield kind, statement, node, new
                todo.extend(ast.iter_child_nodes(node))
            for block in blocks:
                yield from visit(block)

    yield from visit(function.body)


def is_kernel(node: ast.AST) -> bool:
    """A function under ``triton.jit`` or ``gluon.jit``."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(d).split("(")[0] in ("triton.jit", "gluon.jit") for d in node.decorator_list
    )


def digest_of(function: ast.FunctionDef) -> str:
    """Of a function's syntax tree without comments, docstrings and the names of its variables."""
    from kernelbook.lab import launched  # not before it is said whether kernels are interpreted

    tree = launched.without_docstrings(copy.deepcopy(function))
    tree.decorator_list = []  # type: ignore[attr-defined]
    text = launched.tree_text(launched.Numbered({}).visit(tree))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _numbering(function: ast.FunctionDef) -> Callable[[ast.AST], str]:
    """Of a part of a function the text, in which its variables have numbers."""
    from kernelbook.lab import launched

    numbered = launched.Numbered({})
    numbered.number(function)
    return lambda part: ast.unparse(ast.fix_missing_locations(numbered.visit(copy.deepcopy(part))))


def faults_of(room: str, file: str, source: bytes | None = None) -> list[Fault]:
    """All faults that can be planted in the kernels of a file, in the order of the source."""
    source = (PACKAGE / file).read_bytes() if source is None else source
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Fault] = []
    seen: dict[tuple[str, ...], int] = {}
    for function in ast.parse(source).body:
        if not is_kernel(function):
            continue
        assert isinstance(function, ast.FunctionDef)
        if function.name in HINTS:
            continue
        numbered = _numbering(function)
        for kind, statement, old, new in _of_function(function):
            start = starts[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
            end = starts[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
            text = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(new, ast.expr) and not isinstance(new, (ast.Call, ast.Name, ast.Constant, ast.Subscript)):
                text = f"({text})"
            if text == source[start:end].decode():
                continue
            blocks = [b[0].lineno for name in ("body", "orelse") if (b := getattr(statement, name, []))]
            last = min(blocks) - 1 if blocks else statement.end_lineno
            head = ast.unparse(statement).splitlines()[0]
            key = (function.name, kind, head, text)
            seen[key] = seen.get(key, -1) + 1
            lines = (statement.lineno, last)
            alike = numbered(statement).splitlines()[0], numbered(new)
            fault = Fault(room, file, function.name, kind, head, seen[key], old.lineno, start, end, text, lines, alike)  # type: ignore[attr-defined,arg-type]
            found.append(fault)
    return found


def faults(rooms: tuple[str, ...] = tuple(ROOMS)) -> list[Fault]:
    return [fault for room in rooms for file in ROOMS[room][0] for fault in faults_of(room, file)]


def reachable() -> dict[str, set[tuple[str, str]]]:
    """By kernel: the files and names of the functions that run in it, itself included. Files may have the same names."""
    calls: dict[tuple[str, str], set[str]] = {}
    imported: dict[tuple[str, str], str] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernelbook."):
                file = str(node.module).removeprefix("kernelbook.").replace(".", "/") + ".py"
                imported |= {(path.relative_to(PACKAGE).as_posix(), alias.name): file for alias in node.names}
        for node in tree.body:
            if is_kernel(node):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                attributes = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                calls[path.relative_to(PACKAGE).as_posix(), node.name] = names | attributes  # type: ignore[attr-defined]
    files: dict[str, set[str]] = defaultdict(set)
    for file, name in calls:
        files[name].add(file)
    result: dict[str, set[tuple[str, str]]] = {}
    for kernel in calls:
        found, todo = {kernel}, [kernel]
        while todo:
            file, name = todo.pop()
            for called in calls[file, name] & files.keys():
                # A file's own function, or else the one that it imports.
                for place in (
                    ({file} & files[called]) or ({imported.get((file, called), "")} & files[called]) or files[called]
                ):
                    if (place, called) not in found:
                        found.add((place, called))
                        todo.append((place, called))
        result[kernel[1]] = result.get(kernel[1], set()) | found
    return result


if __name__ == "__main__":  # book/evidence/faults.csv: how many there are
    command_line(__doc__).parse_args()
    counts = [(room, file, len(faults_of(room, file))) for room, (files, _) in ROOMS.items() for file in files]
    lines = "".join(f"{room},{file},{count}\n" for room, file, count in counts)
    (EVIDENCE / "faults.csv").write_text("room,file,faults\n" + lines)
