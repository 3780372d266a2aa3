"""Chapters choose their sizes by the memory that there is: 6 GiB are enough."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernelbook import runtime, timing

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_free_memory_is_what_the_allocator_may_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime.DEVICE.type != "cuda":
        assert 2**20 < runtime.free_bytes() < 2**50
    gib = 2**30
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * gib)
    for fraction, expected in ((1.0, 33 * gib), (0.25, 18 * gib)):
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda f=fraction: f)
        assert runtime.free_bytes() == expected


def test_a_case_that_does_not_fit_is_left_out_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> timing.Problem:
        raise torch.OutOfMemoryError("CUDA out of memory")

    case = timing.Case("square", "forward", torch.float32, {"N": 7}, "N", 7, 1.0, 1.0, build)
    rows, failures = timing.run_cases([case], package="test", progress=False)
    assert rows.empty and not failures
    assert "left out, too little GPU memory: square forward float32 N=7" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("nbval") is None, reason="needs nbval")
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_six_gib_are_enough(chapter: str) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-cell-timeout=600", "-p", "no:cacheprovider"]
        + [str(ROOT / "notebooks" / f"{chapter}.ipynb")],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{6 * 2**30 / total:.4f}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
