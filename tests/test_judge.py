"""The judge: right solutions pass, and honest mistakes are told in a sentence of their own."""

import ast
import contextlib
import dataclasses
import types
from pathlib import Path
from typing import Any

import kernelbook  # noqa: F401

# isort: split
import pytest
import torch
import triton
import triton.language as tl
from mistakes import MISTAKES
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelbook import check
from kernelbook.lab import cli, judge_source
from kernelbook.lab import judge as judging
from kernelbook.lab.judge import TASKS, Task, judge

HERE = Path(__file__).parent
ROOT = HERE.parent
CHEATS, UNUSUAL = HERE / "solutions" / "cheats.py", HERE / "solutions" / "unusual.py"
SOLUTIONS = {
    node.name: path
    for path in [*sorted((HERE / "solutions").glob("*.py")), ROOT / "book" / "solutions" / "rms_norm.py"]
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name in TASKS
}
pytestmark = [
    pytest.mark.unwatched,
    pytest.mark.skipif(
        not triton.__version__.startswith(("3.6.", "3.7.")), reason="the judge watches the interpreter's memory"
    ),
]


def _tasks_of(path: Path) -> dict[str, str]:
    """The functions of a file and their tasks, as it says."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TASKS":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} names no tasks")


def _as_written_wrong(name: str) -> str:
    """The text of a right solution with a mistake in it."""
    task, right, wrong, _, _, *more = MISTAKES[name]
    text = SOLUTIONS[task].read_text().replace("import torch\n", "import numpy as np\nimport torch\n", 1)
    for before, after in [(right, wrong), *zip(more[::2], more[1::2], strict=True)]:
        assert before in text, (name, before)
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_its_own_words(name: str, tmp_path: Path) -> None:
    task, _, _, words, kind, *_ = MISTAKES[name]
    (tmp_path / "mistake.py").write_text(_as_written_wrong(name))
    found = judge(tmp_path / "mistake.py", task, gpu=False, seed=5, hints=1)
    assert not found.right and words in found.sentence and found.kind == kind, found
    assert str(found).startswith(f"{task}: {'not judged' if kind in ('rule', 'load') else 'not right'}: ")
    told = TASKS[task].hints.get(kind) or judging.HINTS.get(kind) or TASKS[task].how
    assert found.hints == (() if kind == "load" else (told,))


@pytest.mark.parametrize(
    "name",
    ("no_other", "the_residual_lies_as_x_does", "the_last_of_equal_ones", "dy_is_contiguous", "columns_of_32_bits"),
)
def test_a_mistake_is_found_whatever_is_drawn(name: str, tmp_path: Path) -> None:
    (tmp_path / "mistake.py").write_text(_as_written_wrong(name))
    for seed in (11, 12):
        found = judge(tmp_path / "mistake.py", MISTAKES[name][0], gpu=False, seed=seed)
        again = judge(tmp_path / "mistake.py", MISTAKES[name][0], gpu=False, seed=seed)
        assert not found.right  # what lies how far before an address is another process's business
        assert str(found).partition("out of bounds")[0] == str(again).partition("out of bounds")[0]


@pytest.mark.parametrize("name", _tasks_of(CHEATS))
def test_a_cheat_is_refused(name: str) -> None:
    assert not judge(CHEATS, dataclasses.replace(TASKS[_tasks_of(CHEATS)[name]], name=name), gpu=False, seed=5).right


@pytest.mark.parametrize("name", _tasks_of(UNUSUAL))
def test_a_right_kernel_may_be_unusual(name: str) -> None:
    judge(UNUSUAL, dataclasses.replace(TASKS[_tasks_of(UNUSUAL)[name]], name=name), gpu=False, seed=5).require()


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_right_solution_passes(name: str) -> None:
    found = judge(SOLUTIONS[name], name, gpu=False, seed=7).require()
    assert found.compiled == "compiled for sm_80 and sm_90" and found.cases >= 4
    assert str(found) == f"{name}: right, {found.cases} cases; compiled for sm_80 and sm_90"


@pytest.mark.parametrize(
    ("dtype", "off", "calls", "right"),
    [("float32", 4e-6, 1, True), ("float32", 4e-6, 3, False), ("float32", 1e-3, 1, False), ("float16", 4e-3, 1, False)],
)
def test_what_is_off_by_little_is_drawn_again(dtype: str, off: float, calls: int, right: bool) -> None:
    """In one draw of float32 PyTorch may have been lucky; in three, by much, or in 16 bits it was not."""
    asked: list[Any] = []

    def ask(message: dict[str, Any]) -> dict[str, Any]:
        asked.append(message["series"][0]["x"])
        y = asked[-1].softmax(-1) * (1 + off * (len(asked) <= calls))
        return {"results": [{"outputs": [y], "grads": [], "contiguous": True}]}

    solution: Any = types.SimpleNamespace(task=TASKS["softmax"], ask=ask)
    with contextlib.nullcontext() if right else pytest.raises(judging.RefusedError, match="is off by"):
        judging._run_case(solution, judging._Case({"M": 3, "N": 100}, getattr(torch, dtype)), seed=0)
    assert len(asked) == {True: 2, False: calls}[right]
    assert len({float(x.sum()) for x in asked}) == len(asked)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.memory) for name in SOLUTIONS])
def test_a_right_solution_is_timed(name: str) -> None:
    found = judge(SOLUTIONS[name], name).require()
    assert "of the bound; PyTorch" in found.speed


# --- a task and a solution of the reader's ------------------------------------------------------------------------------


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, FACTOR * x, mask=offs < n)


TWICE = 2.0


def double(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _double_kernel[(triton.cdiv(len(x), 64),)](x, y, len(x), FACTOR=TWICE, BLOCK=64)
    return y


DOUBLE = Task(
    name="double",
    says="double(x): twice x. x (n,) contiguous -> (n,)",
    reference=lambda x: 2 * x,
    inputs=lambda draw, n: {"x": draw(n)},
    sizes=({"n": 1}, {"n": 97}),
    real={"n": 2**24},
    strided=False,
    empty="n",
    how="three",
)


def test_a_function_of_a_notebook_is_judged_with_what_it_uses_by_a_task_of_the_readers() -> None:
    assert judge(double, DOUBLE, gpu=False).right
    found = judge(double, dataclasses.replace(DOUBLE, reference=lambda x: 3 * x), gpu=False, hints=2)
    assert not found.right and "off by 3.3e-01" in found.sentence and found.hints == ("three",)
    with pytest.raises(check.CheckError, match="not right"):
        found.require()


@triton.jit
def _double_tiles_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    y_desc.store([start], 2.0 * x_desc.load([start]))


def double_tiles(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_desc, y_desc = (TensorDescriptor.from_tensor(tensor, [64]) for tensor in (x, y))
    _double_tiles_kernel[(triton.cdiv(len(x), 64),)](x_desc, y_desc, BLOCK=64)
    return y


def test_a_kernel_with_descriptors_that_the_host_makes_is_judged_like_any() -> None:
    task = dataclasses.replace(DOUBLE, sizes=({"n": 8}, {"n": 200}), multiple={"n": 8}, empty=None)
    assert judge(double_tiles, task, gpu=False).require().cases >= 9  # bfloat16 among them
    assert not judge(double_tiles, dataclasses.replace(task, reference=lambda x: 3 * x), gpu=False).right


@gluon.jit
def _gluon_double_kernel(x_ptr, out_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    offs = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, layout)
    buffer = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.async_copy_global_to_shared(buffer, x_ptr + offs, mask=offs < n)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out_ptr + offs, 2.0 * buffer.load(layout), mask=offs < n)


def double_in_gluon(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    if len(x):
        _gluon_double_kernel[(triton.cdiv(len(x), 512),)](x, out, len(x), BLOCK=512)
    return out


def test_a_gluon_kernel_is_judged_like_any(tmp_path: Path) -> None:
    task, wait = dataclasses.replace(DOUBLE, dtypes=(torch.float32,)), "    async_copy.wait_group(0)\n"
    assert judge(double_in_gluon, task, gpu=False).require().compiled == "compiled for sm_90"
    text = judge_source.text_of(double_in_gluon).replace("def double_in_gluon", "def double")
    assert wait in text
    (tmp_path / "double.py").write_text(text.replace(wait, ""))
    found = judge(tmp_path / "double.py", task, gpu=False)
    assert "read too early" in found.sentence and "at line" in found.sentence


@triton.jit
def _one_tile_kernel(x_ptr, y_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    zeros = tl.sum(tl.dot(x, tl.trans(x + 1.0)) * 0.0, axis=1)
    tl.store(y_ptr + offs, (2.0 * x + zeros[:, None]).to(y_ptr.dtype.element_ty), mask=offs < n)


def double_in_one_tile(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _one_tile_kernel[(1,)](x, y, len(x), ROWS=128, BLOCK=512, num_warps=8)
    return y


def test_a_tile_that_no_gpu_has_room_for_is_refused() -> None:
    task = dataclasses.replace(DOUBLE, sizes=({"n": 97},), dtypes=(torch.float16,), empty=None)
    found = judge(double_in_one_tile, task, gpu=False)
    assert found.kind == "compile" and "bytes of shared memory" in found.sentence and "smaller tiles" in found.sentence


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "PTXAS", Path("nowhere"))
    assert "; in the interpreter, not compiled" in str(judge(double, DOUBLE, gpu=False))


def test_the_text_of_a_function_is_a_file() -> None:
    text = judge_source.text_of(double)
    assert "TWICE = 2.0" in text and text.index("def _double_kernel") < text.index("def double")
    with pytest.raises(ValueError, match="top level"):
        judge_source.text_of(lambda x: x)
    with pytest.raises(ValueError, match="a function or a file, got int"):
        judge_source.text_of(3)


def test_a_function_of_autograd_in_a_notebook_is_a_file(tmp_path: Path) -> None:
    """Python finds no text of a class in a cell: its module has no file."""
    cell = tmp_path / "cell.py"
    cell.write_text(
        "import torch\n\n\nclass Double(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n\n"
        "    @staticmethod\n    def backward(ctx, dy):\n        return 2 * dy\n\n\ndef double(x):\n    return Double.apply(x)\n"
    )
    main = types.ModuleType("__main__")
    exec(compile(cell.read_text(), str(cell), "exec"), vars(main))  # noqa: S102
    names: dict[str, Any] = {}
    for solution, name in ((main.double, "double"), (main.Double.apply, "apply")):
        exec(judge_source.text_of(solution), names)  # noqa: S102
        x = torch.ones(3, requires_grad=True)
        names[name](x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_what_the_failing_case_printed_is_shown_and_warnings_are_not(tmp_path: Path) -> None:
    text = judge_source.text_of(double).replace(
        "    if len(x):", "    import warnings\n\n    warnings.warn('look')\n    if len(x):"
    )
    store = "    tl.store(y_ptr + offs, FACTOR * x, mask=offs < n)"
    assert store in text
    (tmp_path / "double.py").write_text(text.replace(store, f'    tl.device_print("of", n)\n{store}'))
    task = dataclasses.replace(DOUBLE, reference=lambda x: 2 * x + (len(x) > 90))
    printed = judge(tmp_path / "double.py", task, gpu=False).printed
    assert "of" in printed and "[1]" not in printed and "look" not in printed


def test_a_file_that_ends_its_process_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(
        judge_source.text_of(double).replace("    if len(x):", "    __import__('os')._exit(0)\n    if len(x):")
    )
    assert "its process ended" in judge(tmp_path / "double.py", DOUBLE, gpu=False).sentence


# --- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_judges_and_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["judge"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in TASKS) and listed.index("row_sum") < listed.index("rope")
    assert cli.main(["judge", "--task", "row_sum"]) == 0
    assert TASKS["row_sum"].picture in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("def softmax(x):\n    return x\n")
    assert cli.main(["judge", str(tmp_path / "mine.py"), "--task", "softmax", "--hint", "--hint"]) == 1
    out = capsys.readouterr().out
    assert "memory of an input" in out and out.count("Hint:") == 2
    own = tmp_path / "own.py"
    own.write_text(
        "from kernelbook.lab.judge import Task\n"
        "SAME = Task(name='same', says='same(x)', reference=lambda x: x, inputs=lambda draw, n: {'x': draw(n)},\n"
        "            sizes=({'n': 3},), real={'n': 8})\n"
    )
    assert judging.find_task(f"{own}:same").name == "same"
    with pytest.raises(ValueError, match=r"own\.py has same"):
        judging.find_task(f"{own}:other")
