"""What the judge says of cheats, of right solutions, and of the steps and broken kernels of chapters: ``book/evidence/judge.csv``.

What is missing there or has changed is judged. On a machine with a GPU the column ``gpu`` is filled as well, eight at a time; what is not refused there for its results is then timed,
one after the other. A run that is stopped keeps what it has. A cheat is judged twice: by its text, and by what it does when its text is
not read.
"""

import ast
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kernelbook  # noqa: F401

# isort: split
import pandas as pd
import torch
import torch.nn.functional as F  # noqa: N812
from common import EVIDENCE, ROOT, command_line, keep_table, rows_of

from kernelbook import runtime
from kernelbook.lab import judge_source
from kernelbook.lab.judge import TASKS, Task, judge

CHEATS = ROOT / "tests" / "cheats"
TABLE = EVIDENCE / "judge.csv"
COLUMNS = ("kind", "name", "task", "written", "expected", "text", "interpreter", "gpu", "sentence", "digest")
GPU = runtime.DEVICE.type == "cuda"
SEED = 20261124

# --- the steps of chapters ----------------------------------------------------------------------------------------------

CONTIGUOUS: dict[str, Any] = {"strided": False, "empty": None}
# So many rows that PyTorch's rounding, by which the limit is set, is not small by chance in all of them.
ROWS = tuple({"M": m, "N": n} for m, n in ((16, 7), (16, 16), (37, 97), (16, 1031)))


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        return torch.autograd.grad(_layer_norm(*leaves), leaves, dy)


# The steps before the corrected mean lose digits of rows around 1000, as the chapter says of them: theirs are around 0.
LAYER_NORM = Task(
    name="layer_norm",
    says="layer_norm(x, weight, bias)",
    reference=_layer_norm,
    inputs=lambda draw, M, N: {"x": draw(M, N), "weight": draw.near_one(N), "bias": draw(N)},
    sizes=ROWS,
    real={"M": 8192, "N": 4096},
    dtypes=(torch.float32,),
    **CONTIGUOUS,
)
LAYER_NORM_AROUND_1000 = dataclasses.replace(
    LAYER_NORM,
    inputs=lambda draw, M, N: {"x": 1000 + draw(M, N), "weight": draw.near_one(N), "bias": draw(N)},
)
LAYER_NORM_GRADIENTS = dataclasses.replace(
    LAYER_NORM,
    name="layer_norm_gradients",
    reference=_gradients,
    inputs=lambda draw, M, N: {"dy": draw(M, N), "x": draw(M, N), "weight": draw.near_one(N), "bias": draw(N)},
    dtypes=(torch.float32, torch.float16),
)
LARGE = {"scales": (1.0,), **CONTIGUOUS}
PRODUCT = dataclasses.replace(TASKS["matmul"], dtypes=(torch.float16,), **LARGE)
EVEN = dataclasses.replace(
    PRODUCT,
    sizes=tuple(dict(zip("MKN", s, strict=True)) for s in ((64, 64, 64), (64, 128, 192))),
    multiple=dict.fromkeys("MKN", 64),
)
PLAIN = {
    "vector_add": dataclasses.replace(TASKS["vector_add"], dtypes=(torch.float32,), **CONTIGUOUS),
    "softmax": dataclasses.replace(TASKS["softmax"], dtypes=(torch.float32,), **CONTIGUOUS),
    "product": PRODUCT,
    "even": EVEN,
    "layer_norm": LAYER_NORM,
    "around 1000": LAYER_NORM_AROUND_1000,
    "gradients": LAYER_NORM_GRADIENTS,
}
# By chapter: function, task, and whether it is right. What a step says that it does not do is no part of its task.
STEPS = {
    "first_kernel": (
        ("add_whole_tiles", "vector_add", False),
        ("add", "vector_add", True),
        ("softmax_zeros", "softmax", False),
        ("softmax_narrow", "softmax", False),
        ("softmax", "softmax", True),
    ),
    "matrix_product": (
        ("matmul_fp32", "product", True),
        ("matmul_dot", "product", True),
        ("matmul_written_out", "even", True),
        ("matmul", "product", True),
        ("matmul_descriptors", "even", True),
        ("matmul_persistent", "even", True),
    ),
    "layer_norm": (
        *((name, "layer_norm", True) for name in ("three_launches", "fused", "several", "late")),
        ("corrected", "around 1000", True),
        ("squares", "around 1000", False),
        *(
            (name, "gradients", True)
            for name in ("three_launches_back", "fused_back", "atomics", "locks", "partials", "tiles", "ahead")
        ),
    ),
}
ADAPTERS = {
    **dict.fromkeys(
        ("layer_norm", "around 1000"), "def judged(x, weight, bias):\n    return {step}(x, weight, bias)[0]\n"
    ),
    "gradients": "def judged(dy, x, weight, bias):\n    _, mean, rstd = corrected(x, weight, bias)\n    return {step}(dy, x, weight, mean, rstd)\n",
}


def definitions(notebook: Path) -> str:
    """The imports, functions and plain constants of a chapter."""
    kept: list[str] = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            for node in ast.parse("".join(cell["source"])).body:
                named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).split("[")[0].isupper()
                if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)) or named:
                    kept.append(ast.unparse(node))
    return "\n\n\n".join(kept)


def module_of(text: str, name: str, folder: Path) -> ModuleType:
    """The text as a module, but for what needs names that only a running chapter has."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    for node in ast.parse(text).body:
        with contextlib.suppress(NameError, KeyError):
            exec(compile(ast.Module([node], []), str(path), "exec"), module.__dict__)  # noqa: S102
    return module


def steps(chapter: str, folder: Path) -> Iterator[tuple[str, str, Task, bool]]:
    """Name, text, task and whether it is right, of each step of a chapter."""
    text = definitions(ROOT / "notebooks" / f"{chapter}.ipynb")
    for step, task, right in STEPS[chapter]:
        stem = f"{chapter}_{step}"
        adapter = ADAPTERS.get(task, "").format(step=step)
        module = module_of(f"{text}\n\n\n{adapter}", stem, folder)
        yield (
            f"{chapter}: {step}",
            judge_source.text_of(module.judged if adapter else getattr(module, step)),
            PLAIN[task],
            right,
        )


def broken(folder: Path) -> Iterator[tuple[str, str, Task, bool]]:
    """The broken kernels of "A kernel is wrong, a kernel is slow", and what its solutions mend."""
    chapter = ROOT / "notebooks" / "wrong_and_slow.ipynb"
    text = definitions(chapter)
    module = module_of(text, "wrong_and_slow_definitions", folder)
    source = "\n".join(
        "".join(c["source"]) for c in json.loads(chapter.read_text())["cells"] if c["cell_type"] == "code"
    )
    for call in [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "ask"]:
        name, task, *_ = map(ast.unparse, call.args)
        parts = getattr(module, ast.unparse(call.keywords[0].value))
        found = TASKS[ast.literal_eval(task)] if task.startswith(("'", '"')) else getattr(module, task)
        yield (
            f"wrong_and_slow: {name}",
            judge_source.text_of(getattr(module, name)),
            dataclasses.replace(found, **parts),
            name.endswith("_mended"),
        )


# --- the table ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, str]:
    """What a text says by itself: its digest, and whether it is refused."""
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return {"digest": digest, "text": "refused" if judge_source.problems(text) else "read"}


def about(cheat: Path) -> tuple[str, str, bool | None]:
    """A cheat's task, when it was written, and whether only a GPU shows it; None: nothing does yet."""
    for node in ast.parse(cheat.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "(TASK, WRITTEN, NEEDS_GPU)":
            return ast.literal_eval(node.value)
    raise ValueError(f"{cheat} does not say what it is")


def row_of(kind: str, name: str, task: str, right: bool, written: str = "") -> dict[str, str]:
    """A row without its verdicts."""
    expected = "right" if right else "refused"
    return {"kind": kind, "name": name, "task": task, "written": written, "expected": expected}


def entries(folder: Path) -> Iterator[tuple[dict[str, str], Path, Task]]:
    """A row without its verdicts, the file and the task, of all that is judged."""
    for cheat in sorted(CHEATS.glob("*.py")):
        task, written, _ = about(cheat)
        yield row_of("cheat", cheat.stem, task, False, written), cheat, TASKS[task]
    for path in sorted((ROOT / "tests" / "solutions").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name in TASKS:
                yield row_of("solution", node.name, node.name, True), path, TASKS[node.name]
    every = [("step", entry) for chapter in STEPS for entry in steps(chapter, folder)]
    every += [("broken", entry) for entry in broken(folder)]
    for i, (kind, (name, text, task, right)) in enumerate(every):
        path = folder / f"judged_{i}.py"
        function = name.split(": ")[1]
        function = "judged" if task.name in ("layer_norm", "layer_norm_gradients") else function
        path.write_text(f"{text}\n\n{task.name} = {function}\n" if function != task.name else text, encoding="utf-8")
        yield row_of(kind, name, task.name, right), path, task


def judged(row: dict[str, str], path: Path, task: Task, old: dict[str, str]) -> dict[str, str]:
    """The row with its verdicts. ``old``: what is known of the same text, perhaps without a GPU."""
    row["interpreter"], row["gpu"], row["sentence"] = (old.get(name, "") for name in ("interpreter", "gpu", "sentence"))
    if not row["interpreter"]:
        found = judge(path, task, read=False, gpu=False, seed=SEED)
        row["interpreter"], row["sentence"] = "right" if found.right else "refused", found.sentence
    if GPU:
        found = judge(path, task, read=False, seed=SEED, speed=False)
        row["gpu"] = "right" if found.right else "refused"
        row["sentence"] = found.sentence or row["sentence"]
    print(
        f"{row['kind']:9} {row['name']:44} text: {row['text']:8} interpreter: {row['interpreter']:8} {row['sentence'][:110]}",
        flush=True,
    )
    return row


def main(arguments: list[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--all", action="store_true", help="judge everything again")
    rows = [] if parser.parse_args(arguments).all else rows_of(TABLE)
    before = {(row["kind"], row["name"]): row for row in rows}
    found: dict[tuple[str, str], dict[str, str]] = {}
    surprises = 0

    def keep(row: dict[str, str]) -> None:
        found[row["kind"], row["name"]] = {column: row[column] for column in COLUMNS}
        order = {key: i for i, key in enumerate(every)}
        both = before | found
        rows = [both[key] for key in sorted(both, key=lambda key: order.get(key, len(order)))]
        keep_table(TABLE, pd.DataFrame(rows, columns=list(COLUMNS)))

    with tempfile.TemporaryDirectory() as place, concurrent.futures.ThreadPoolExecutor(8 if GPU else 1) as pool:
        asked = [(row | read(path), path, task) for row, path, task in entries(Path(place))]
        every = [(row["kind"], row["name"]) for row, _, _ in asked]
        waiting = []
        for row, path, task in asked:
            old = before.get((row["kind"], row["name"]), {})
            old = old if old.get("digest") == row["digest"] else {}
            if old and (not GPU or old["gpu"]):
                keep(old | {"text": row["text"]})  # which costs nothing, and what may be written changes
            else:
                waiting.append(pool.submit(judged, row, path, task, old))
        for future in concurrent.futures.as_completed(waiting):
            keep(future.result())
        for row, path, task in asked:  # alone on the GPU: these times count
            verdict = found[row["kind"], row["name"]]
            if GPU and row["kind"] == "cheat" and verdict["gpu"] == "right":
                timed = judge(path, task, read=False, seed=SEED)
                keep(verdict | {"gpu": "right" if timed.right else "refused", "sentence": timed.sentence})
        table = [found[key] for key in every]
        keep_table(TABLE, pd.DataFrame(table, columns=list(COLUMNS)))
    shown_by = {cheat.stem: about(cheat)[2] for cheat in CHEATS.glob("*.py")}  # as :func:`about` says it
    for row in table:
        verdicts = {row["interpreter"], row["gpu"]} - {""} | (
            {"refused"} if row["text"] == "refused" and row["kind"] == "cheat" else set()
        )
        fine = "refused" in verdicts if row["expected"] == "refused" else verdicts == {"right"}
        if row["kind"] == "cheat":  # one that only a GPU shows may pass without, and one that nothing shows anywhere
            needs_gpu = shown_by[row["name"]]
            fine |= needs_gpu is None or (needs_gpu and not row["gpu"])
        surprises += not fine
        if not fine:
            print(f"NOT AS EXPECTED ({row['expected']}): {row['kind']} {row['name']}")
    print(f"{len(table)} judged, {surprises} not as expected")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
