"""Chapters choose their sizes by the memory that there is: 6 GiB are enough."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
from programs import program

from kernelbook import runtime
from kernelbook.lab import record, timing

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_free_memory_is_what_the_allocator_may_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime.DEVICE.type != "cuda":
        assert 2**20 < timing.free_bytes() < 2**50
    gib = 2**30
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * gib)
    for fraction, expected in ((1.0, 33 * gib), (0.25, 18 * gib)):
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda f=fraction: f)
        assert timing.free_bytes() == expected


def test_a_case_that_does_not_fit_is_left_out_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> timing.Problem:
        raise torch.OutOfMemoryError("CUDA out of memory")

    case = timing.Case("square", "forward", torch.float32, {"N": 7}, "N", 7, 1.0, 1.0, build)
    rows, failures = timing.run_cases([case], package="test", progress=False)
    assert rows.empty and not failures
    assert "left out, too little GPU memory: square forward float32 N=7" in capsys.readouterr().out


# Beside a GPU of 10 GiB of which a half may be taken; what a measurement held is forgotten by the next one.
PASSES = """import contextlib, types, torch
assert "watch" in globals()
cuda, most = torch.cuda, [3 * 2**30]
cuda.is_initialized, cuda.max_memory_allocated = lambda: True, lambda: most[0]
cuda.get_per_process_memory_fraction = lambda: 0.5
cuda.get_device_properties = lambda _: types.SimpleNamespace(total_memory=10 * 2**30)
with contextlib.suppress(Exception):
    cuda.reset_peak_memory_stats()
most[0] = 2**30
print('left out, too little GPU memory: one')"""


@pytest.mark.parametrize(
    ("cells", "code", "state", "figures"),
    (
        ((PASSES, "1"), 0, "passed", ("1", "3072", "5120")),
        (("{}['no']", "import os; os._exit(3)"), 1, "cell 0: KeyError: 'no'; DeadKernelError: ", ("0", "nan", "nan")),
    ),
)
def test_a_chapter_s_row_says_how_it_went(
    cells: tuple[str, str],
    code: int,
    state: str,
    figures: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    job, new_cell = program("measure_job"), nbformat.v4.new_code_cell
    expected = new_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    first, last = map(new_cell, cells)
    chapter = [first, nbformat.v4.new_markdown_cell("text"), expected, last, nbformat.v4.new_markdown_cell("end")]
    nbformat.write(nbformat.v4.new_notebook(cells=chapter), tmp_path / "short.ipynb")
    monkeypatch.setattr(job.record_chapters, "NOTEBOOKS", tmp_path)
    for name in ("write_results", "drop_rows"):
        monkeypatch.setattr(record, name, getattr(record, name))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "MPLBACKEND", "JUPYTER_PATH"):
        monkeypatch.setenv(name, "")  # what the job makes of it ends with the test
    assert job.main([str(tmp_path), "notebook", "short"]) == code
    (path,) = tmp_path.glob("*/chapters.csv")
    row = pd.read_csv(path, dtype=str, keep_default_na=False).iloc[0]
    assert row["state"].startswith(state) and row["chapter"] == "short" and int(row["seconds"]) >= 0
    assert (row["left_out"], row["peak_mib"], row["limit_mib"]) == figures


def test_what_is_recorded_was_executed_within_six_gib() -> None:
    """Chapters without a row are named on the page of measurements."""
    for path in (ROOT / "book" / "results").glob("*/chapters.csv"):
        rows = pd.read_csv(path).set_index("chapter")
        assert set(rows.index) <= set(CHAPTERS) and (rows["state"] == "passed").all()
        assert (rows["limit_mib"] < 6.1 * 2**10).all() and (rows["peak_mib"] <= rows["limit_mib"]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chapter",
    [pytest.param(name, marks=pytest.mark.memory(queue=f"chapters-{i % 3}")) for i, name in enumerate(CHAPTERS)],
)
def test_six_gib_are_enough(chapter: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With ``--stand-in`` plans and kernels are those of an older GPU."""
    target = pytestconfig.getoption("--stand-in") or ""
    job = ROOT / "tools" / "measure_job.py"
    done = subprocess.run([sys.executable, str(job), str(tmp_path), "notebook", chapter, target], check=False)
    (path,) = tmp_path.glob("*/chapters.csv")
    row = pd.read_csv(path).iloc[0]
    assert (done.returncode, row["state"]) == (0, "passed")
    assert row["peak_mib"] <= row["limit_mib"] < 6.1 * 2**10
