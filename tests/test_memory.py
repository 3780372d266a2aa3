"""Chapters choose their sizes by the memory that there is: 6 GiB are enough."""

from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from kernelbook import runtime
from kernelbook.lab import timing

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
    rows, failures = timing.run_cases([case], progress=False)
    assert rows.empty and not failures
    assert "left out, too little GPU memory: square forward float32 N=7" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chapter",
    [pytest.param(name, marks=pytest.mark.memory(queue=f"chapters-{i % 3}")) for i, name in enumerate(CHAPTERS)],
)
def test_six_gib_are_enough(chapter: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell of a chapter runs on so much of a GPU. With ``--stand-in`` rules and kernels are those of an older one."""
    share = min(1.0, 6 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"per_process_memory_fraction:{share:.4f}")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(ROOT / "notebooks" / f"{chapter}.ipynb", as_version=4)
    if target := pytestconfig.getoption("--stand-in"):
        stand_in = (
            f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import stand_in; stand_in.stand_in_for({target!r})"
        )
        notebook.cells.insert(0, nbformat.v4.new_code_cell(stand_in))
    limit = "assert torch.cuda.get_per_process_memory_fraction() < 0.99 or torch.cuda.mem_get_info()[1] < 7 * 2**30"
    notebook.cells.append(nbformat.v4.new_code_cell(f"import torch\n{limit}"))
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
