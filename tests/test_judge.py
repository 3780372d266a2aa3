"""The judge: right solutions pass, wrong ones fail with a sentence, and cheats are refused (a file each in ``cheats``)."""

import ast
import contextlib
import csv
import dataclasses
import itertools
from pathlib import Path

import kernelbook  # noqa: F401

# isort: split
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelbook import check, runtime
from kernelbook.lab import cli, judge_source
from kernelbook.lab import judge as judging
from kernelbook.lab.judge import TASKS, Judgement, Task, judge

HERE = Path(__file__).parent
CHEATS = {path.stem: path for path in sorted((HERE / "cheats").glob("*.py"))}
SOLUTIONS = {
    node.name: path
    for path in sorted((HERE / "solutions").glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name in TASKS
}
pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(("3.6.", "3.7.")), reason="the judge watches the interpreter's memory"
)


def _about(path: Path) -> tuple[str, str, bool | None]:
    """A cheat's task, when it was written, and whether only a GPU shows it; None: nothing does yet."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "(TASK, WRITTEN, NEEDS_GPU)":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} does not say what it is")


GPU_CHEATS = [name for name, path in CHEATS.items() if _about(path)[2] is not False]
# Those that only their text gives away without a GPU: the page Evidence names them.
BY_TEXT_ALONE = (
    "annotation_brings_a_module", "attributes_by_their_names", "handle_data", "not_run_as_a_script", "other_door_on_a_gpu",
    "read_in_another_encoding", "worker_by_frames",
)  # fmt: skip


@pytest.mark.unwatched
@pytest.mark.parametrize("name", [name for name in CHEATS if name not in (*GPU_CHEATS, *BY_TEXT_ALONE)])
def test_a_cheat_is_refused_for_what_it_does(name: str) -> None:
    """Without reading its text, which names it sooner where it can."""
    assert not judge(CHEATS[name], _about(CHEATS[name])[0], read=False, gpu=False).right


@pytest.mark.parametrize("name", BY_TEXT_ALONE)
def test_a_cheat_is_refused_for_its_text(name: str) -> None:
    assert judge(CHEATS[name], _about(CHEATS[name])[0], gpu=False).sentence.startswith("Its line ")


def test_there_are_cheats_of_all_times() -> None:
    written = [_about(path)[1] for path in CHEATS.values()]
    assert len(written) >= 80 and written.count("frozen") >= 10 and written.count("again") == 10
    assert (written.count("before") + written.count("blind")) * 2 >= len(written)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.memory] * (TASKS[_about(path)[0]].name == "softmax_looped"))
        for name, path in CHEATS.items()
        if _about(path)[2] is not None
    ],
)
def test_a_cheat_is_refused_on_a_gpu(name: str) -> None:
    assert not judge(CHEATS[name], _about(CHEATS[name])[0], read=False).right


@pytest.mark.unwatched
@pytest.mark.parametrize(("place", "name"), enumerate(SOLUTIONS))
def test_a_right_solution_passes(place: int, name: str) -> None:
    """In one of its dtypes, another for the next: tools/evidence/judged.py judges them in all."""
    dtypes = TASKS[name].dtypes
    task = dataclasses.replace(TASKS[name], dtypes=[dtypes[place % len(dtypes)]])
    found = judge(SOLUTIONS[name], task, gpu=False, seed=7)
    assert found.right, found
    assert found.cases >= 4


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.book])
def test_the_book_s_own_kernel_beside_a_reader_s_does_the_task(name: str) -> None:
    """Which only a GPU's timing calls."""
    task = TASKS[name]
    sizes = sorted(task.sizes, key=judging._elements)[1]
    asked = judging._Asked(dataclasses.replace(task, grads=()), judging._Case(sizes, task.dtypes[0]), seed=3)
    assert task.book is not None
    device = runtime.DEVICE
    for _ in range(2):  # the second time what the first has kept
        outputs = judging._list(task.book(**judging._to(device, asked.series[0])))
        for verdict in asked.verdicts(0, {"outputs": [out.detach() for out in outputs], "grads": []}, device):
            verdict.require()


# A line of a solution, and what makes it wrong.
PLANTED = {
    "nf4_matvec": ("(offs // 32)[None, :]", "(offs // 64)[None, :]"),
    "causal_attention": ("if short != long:", "if short + 1 < long:"),
}


@pytest.mark.unwatched
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, tmp_path: Path) -> None:
    right, wrong = PLANTED[name]
    text = SOLUTIONS[name].read_text()
    assert text.count(right) == 1
    (tmp_path / "planted.py").write_text(text.replace(right, wrong))
    found = judge(tmp_path / "planted.py", name, gpu=False, seed=7)
    assert found.sentence.startswith("For ") and "the result" in found.sentence


@pytest.mark.parametrize("wrong", (False, True))
def test_rows_far_apart_are_read_where_they_are(wrong: bool) -> None:
    """On a GPU 2**31 elements apart, here 2**16, with a kernel whose offsets have 16 bits for 32."""
    text, plain = SOLUTIONS["rms_norm"].read_text(), "row * stride_m"
    assert plain in text
    text = text.replace(plain, "row * stride_m % 65536") if wrong else text
    with judging._solution(text, "rms_norm", TASKS["rms_norm"], on_gpu=False) as running:
        told = pytest.raises(judging._WrongError, match="65536 elements apart") if wrong else contextlib.nullcontext()
        with told:
            judging._far_apart(running, TASKS["rms_norm"], 3, torch.device("cpu"), 2**16)


def test_every_task_has_a_right_solution() -> None:
    assert set(SOLUTIONS) == set(TASKS)
    for task in TASKS.values():
        assert task.hints and task.says.startswith(f"{task.name}("), task.name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.memory(queue=f"times-{i // 2 % 2}")) for i, name in enumerate(SOLUTIONS)],
)
def test_a_right_solution_is_timed(name: str) -> None:
    for _ in range(3):  # other processes on the GPU may spoil a clock
        found = judge(SOLUTIONS[name], name)
        if found.right:
            break
    found.require()
    assert found.speed is not None and 0 < found.speed.bound_ms / found.speed.ms < 1.1


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
)


@pytest.mark.unwatched
def test_a_function_of_a_notebook_is_judged_with_what_it_uses_by_a_task_of_the_readers() -> None:
    assert judge(double, DOUBLE, gpu=False).right
    found = judge(double, dataclasses.replace(DOUBLE, reference=lambda x: 3 * x, hints=("three",)), gpu=False, hints=1)
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


@pytest.mark.unwatched
def test_a_kernel_with_descriptors_that_the_host_makes_is_judged_like_any() -> None:
    task = dataclasses.replace(DOUBLE, sizes=({"n": 8}, {"n": 200}), multiple={"n": 8}, empty=None)
    assert judge(double_tiles, task, gpu=False).require().cases >= 9  # bfloat16 among them
    assert not judge(double_tiles, dataclasses.replace(task, reference=lambda x: 3 * x), gpu=False).right
    text = judge_source.text_of(double_tiles)
    assert "from triton.tools.tensor_descriptor import TensorDescriptor" in text
    for other in ("tensor_descriptor import dataclass", "disasm import get_sass"):
        assert judge_source.problems(text.replace("tensor_descriptor import TensorDescriptor", other))


def test_the_text_of_a_function_is_a_file() -> None:
    text = judge_source.text_of(double)
    assert "TWICE = 2.0" in text and text.index("def _double_kernel") < text.index("def double")
    assert not judge_source.problems(text)
    with pytest.raises(ValueError, match="top level"):
        judge_source.text_of(lambda x: x)
    with pytest.raises(ValueError, match="a function or a file, got int"):
        judge_source.text_of(3)


WRONG = {
    "no_mask": ("mask=offs < n, other=0.0", "", "out of bounds"),
    "not_written": ("tl.store(y_ptr + offs, FACTOR * x, mask=offs < n)", "pass", "NaN"),
    "in_32_bits": ("tl.program_id(0).to(tl.int64) * BLOCK", "tl.program_id(0) * n", "32 bits"),
    "no_kernel": ("_double_kernel[(", "no_such_kernel[(", "NameError"),
    "syntax": ("def double", "def double double", "no Python"),
}


@pytest.mark.unwatched
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_a_sentence_with_its_case(name: str, tmp_path: Path) -> None:
    before, after, words = WRONG[name]
    text = judge_source.text_of(double)
    assert before in text
    (tmp_path / "double.py").write_text(text.replace(before, after, 1))
    found = judge(tmp_path / "double.py", DOUBLE, gpu=False)
    assert words in found.sentence and not found.right
    assert ("For n=" in found.sentence) == (name != "syntax")


@pytest.mark.unwatched
def test_a_sentence_quotes_its_line_and_shows_what_the_failing_case_printed(tmp_path: Path) -> None:
    text = judge_source.text_of(double)
    store = "    tl.store(y_ptr + offs, FACTOR * x, mask=offs < n)"
    (tmp_path / "double.py").write_text(text.replace(store, f'    tl.device_print("of", n)\n{store[:-16]})', 1))
    found = judge(tmp_path / "double.py", DOUBLE, gpu=False)
    assert found.sentence.endswith(": `tl.store(y_ptr + offs, FACTOR * x)`.")
    (tmp_path / "double.py").write_text(text.replace(store, f'    tl.device_print("of", n)\n{store}', 1))
    task = dataclasses.replace(DOUBLE, reference=lambda x: 2 * x + (len(x) > 90))
    printed = judge(tmp_path / "double.py", task, gpu=False).printed
    assert "of" in printed and "[1]" not in printed


@pytest.mark.unwatched
def test_a_sum_of_squares_in_16_bits_is_not_right(tmp_path: Path) -> None:
    """The squares of numbers around 300 are beyond float16."""
    text = SOLUTIONS["rms_norm"].read_text()
    load = "other=0.0).to(tl.float32)"
    assert load in text
    (tmp_path / "rms_norm.py").write_text(text.replace(load, "other=0.0)"))
    found = judge(tmp_path / "rms_norm.py", "rms_norm", gpu=False)
    assert "float16, numbers around 300" in found.sentence


@pytest.mark.parametrize(
    "line",
    (
        "import os", "from torch import _C", "import torch.utils.cpp_extension", "x = torch.cuda.Event()", "eval('1')",
        "torch.softmax = None", "from kernelbook import rms_norm", "y = triton.runtime.driver", "import gc as torch2",
        "z = torch.sys", "import operator\nf = operator.attrgetter('softmax')", "match torch:\n    case object(softmax=f):\n        pass",
        "if __name__ != '__main__':\n    import os", "@triton.jit\ndef k(x):\n    x.handle.data", "x = (1).__class__", "def f(x):\n    return x.untyped_storage()", "class A(torch.Tensor):\n    pass",
        "@triton.jit\ndef k(x):\n    helper(x)", "from torch import *",
    ),
)  # fmt: skip
def test_what_a_file_of_kernels_has_no_use_for_is_found_in_its_text(line: str) -> None:
    [problem, *_] = judge_source.problems(f"import math\nimport torch\nimport triton\n{line}\n")
    assert problem.startswith("line ")


def test_what_runs_only_as_a_script_is_not_read() -> None:
    assert not judge_source.problems('import torch\n\nif __name__ == "__main__":\n    import time\n')


def test_sizes_and_numbers_are_new_each_time_and_lie_within_the_tasks() -> None:
    import random

    for task in TASKS.values():
        cases = judging._cases(task, random.Random(1))
        assert cases == judging._cases(task, random.Random(1)) != judging._cases(task, random.Random(2))
        most = max(map(judging._elements, task.sizes))
        assert all(judging._elements(case.sizes) <= 2 * most for case in cases), task.name
        for case, (name, step) in itertools.product(cases, task.multiple.items()):
            assert case.sizes[name] % step == 0
        assert {case.dtype for case in cases} == set(task.dtypes)


def test_between_and_around_the_elements_there_is_nan() -> None:
    for layout in judging.tasks.LAYOUTS:
        drawn = judging.Draw(3, torch.float32, layout)(5, 7)
        memory = torch.empty(0).set_(drawn.untyped_storage())
        assert not drawn.isnan().any() and int((~memory.isnan()).sum()) == drawn.numel()
        assert drawn.is_contiguous() == (layout in ("contiguous", "offset"))


def test_a_size_is_tried_beyond_what_the_text_says() -> None:
    import random

    by_rows, by_columns = judging._beyond(TASKS["logsumexp"], "LAST = 1 << 11", random.Random(1))
    assert 2048 < by_rows.sizes["M"] <= 3073 and 2048 < by_columns.sizes["N"] <= 3073
    [by_rows] = judging._beyond(TASKS["softmax"], "LAST = 4096", random.Random(1))  # its rows are of 4,096 at most
    assert by_rows.sizes["M"] > 4096 > by_rows.sizes["N"]
    assert judging._plain("\x1b[2Kright\n") == "\ufffd[2Kright\n"


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def _double_tuned_kernel(x_ptr, y_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, FACTOR * tl.load(x_ptr + offs, mask=offs < n, other=0.0), mask=offs < n)


TUNED = """
def double(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _double_tuned_kernel[lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)](x, y, len(x), FACTOR=2.0)
    return y
"""


@pytest.mark.unwatched
def test_without_a_gpu_autotune_takes_any_configuration(tmp_path: Path) -> None:
    source = Path(__file__).read_text()
    kernel = source[source.index("@triton.autotune([") : source.index("\n\n\nTUNED =")]
    (tmp_path / "tuned.py").write_text(
        f"import torch\nimport triton\nimport triton.language as tl\n\n\n{kernel}\n\n{TUNED}"
    )
    judge(tmp_path / "tuned.py", DOUBLE, gpu=False).require()


@pytest.mark.unwatched
def test_the_command_judges_and_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["judge"]) == 0
    assert set(TASKS) <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    (tmp_path / "mine.py").write_text("def softmax(x):\n    return x\n")
    assert cli.main(["judge", str(tmp_path / "mine.py"), "--task", "softmax", "--hint", "--hint"]) == 1
    out = capsys.readouterr().out
    assert "memory of an input" in out and out.count("Hint:") == 2
    assert cli.main(["judge", str(tmp_path / "mine.py"), "--task", "kitchen"]) == 2
    assert "must be one of" in capsys.readouterr().err
    assert cli.main(["judge", str(tmp_path / "none.py"), "--task", "softmax"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    own = tmp_path / "own.py"
    own.write_text(
        "from kernelbook.lab.judge import Task\n"
        "SAME = Task(name='same', says='same(x)', reference=lambda x: x, inputs=lambda draw, n: {'x': draw(n)},\n"
        "            sizes=({'n': 3},), real={'n': 8})\n"
    )
    assert judging.find_task(f"{own}:same").name == "same"
    with pytest.raises(ValueError, match="must be one of same"):
        judging.find_task(f"{own}:other")


def test_without_a_gpu_none_can_be_asked_for() -> None:
    if runtime.DEVICE.type != "cuda":
        with pytest.raises(ValueError, match="needs a GPU"):
            judge(SOLUTIONS["softmax"], "softmax", gpu=True)
    assert str(Judgement("softmax", "", 3)) == "softmax: right, 3 cases"


def test_the_page_s_table_is_of_these_cheats_and_solutions() -> None:
    """``python tools/evidence/judged.py`` writes it."""
    rows = list(csv.DictReader((HERE.parent / "book" / "evidence" / "judge.csv").open(newline="")))
    named = {(row["kind"], row["name"]): row for row in rows}
    assert {name for kind, name in named if kind == "cheat"} == set(CHEATS)
    assert {name for kind, name in named if kind == "solution"} == set(SOLUTIONS)
    for name, path in CHEATS.items():
        assert named["cheat", name]["text"] == ("refused" if judge_source.problems(path.read_text()) else "read")
        refused = "refused" in (named["cheat", name]["text"], named["cheat", name]["interpreter"])
        assert refused or _about(path)[2] is not False, f"{name} needs a GPU to be refused and does not say so"
    assert all(row["interpreter"] == row["expected"] for row in rows if row["kind"] != "cheat")
