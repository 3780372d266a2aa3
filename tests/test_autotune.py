"""Candidates, the resource model, the choice and its cache."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import triton

from kernelbook import autotune, runtime
from kernelbook.autotune import Autotuner, Resources, fits, prune, tile_resources

SMALL = triton.Config({"BLOCK": 64}, num_warps=4, num_stages=2)
LARGE = triton.Config({"BLOCK": 256}, num_warps=8, num_stages=3)
H200 = runtime.TARGETS["sm_90"]


def test_registers_are_counted_for_each_thread() -> None:
    """A 128 x 256 float32 accumulator in 8 warps is 128 registers a thread (not 1,024: dividing by 32 alone)."""
    config = triton.Config({}, num_warps=8, num_stages=3)
    needs = tile_resources(config, staged=[(128 * 64, 2), (64 * 256, 2)], held=[(128 * 256, 4)])
    assert needs.registers_per_thread == autotune.BOOKKEEPING_REGISTERS + 128
    assert needs.shared_bytes == 3 * (128 * 64 + 64 * 256) * 2
    assert fits(needs, config, H200)
    half = triton.Config({}, num_warps=4, num_stages=3)
    assert not fits(tile_resources(half, held=[(128 * 256, 4)]), half, H200)


def test_shared_memory_and_many_warps_limit_too() -> None:
    assert not fits(Resources(H200.shared_memory_per_program + 1, 10), SMALL, H200)
    sixteen = triton.Config({}, num_warps=16)
    assert fits(Resources(0, 128), sixteen, H200) and not fits(Resources(0, 129), sixteen, H200)


def test_prune_keeps_the_order_and_never_returns_nothing() -> None:
    wanted = {SMALL: Resources(1, 1), LARGE: Resources(10**9, 1)}
    assert prune([LARGE, SMALL], wanted.__getitem__, H200) == [SMALL]
    assert prune([SMALL, SMALL], wanted.__getitem__, H200) == [SMALL, SMALL]
    with pytest.raises(ValueError, match="prune: none of 1 configurations fits NVIDIA H200"):
        prune([LARGE], wanted.__getitem__, H200)


def _tuner(version: str = "1", candidates: Sequence[triton.Config] = (SMALL, LARGE)) -> Autotuner:
    def listed(key: Mapping[str, Any], full: bool) -> Sequence[triton.Config]:
        return [*candidates, triton.Config({"BLOCK": 512}, num_warps=8)] if full else candidates

    return Autotuner("square", listed, lambda config, key: Resources(0, 0), version)


def test_the_interpreter_takes_the_first_candidate_without_running_any() -> None:
    if runtime.DEVICE.type == "cuda":
        pytest.skip("about machines without a GPU")
    assert _tuner().choose({"N": 1}, lambda config: pytest.fail("was launched")) is SMALL


class _FakeGpu:
    """Pretends that candidates can be timed: a launch 'takes' what the table says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: Mapping[int, float | Exception]) -> None:
        import torch

        from kernelbook import timing

        self.timed: list[int] = []

        def measure(fn: Any, **_: Any) -> timing.Timing:
            fn()
            result = ms[self.timed[-1]]
            if isinstance(result, Exception):
                raise result
            return timing.Timing(result, result, result, 1)

        monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(timing, "measure", measure)
        monkeypatch.setattr(runtime, "device_slug", lambda: "fake")
        monkeypatch.setattr(runtime, "properties", lambda device=None: H200)

    def launch(self, config: triton.Config) -> None:
        self.timed.append(config.kwargs["BLOCK"])


def test_the_fastest_is_chosen_once_and_remembered_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    gpu = _FakeGpu(monkeypatch, {64: 2.0, 256: 1.0})
    tuner = _tuner()
    assert tuner.choose({"N": 1}, gpu.launch) == LARGE and gpu.timed == [64, 256]
    assert tuner.choose({"N": 1}, gpu.launch) == LARGE and len(gpu.timed) == 2
    assert _tuner().choose({"N": 1}, gpu.launch) == LARGE and len(gpu.timed) == 2  # another process
    assert _tuner().choose({"N": 2}, gpu.launch) == LARGE and len(gpu.timed) == 4  # another problem
    assert _tuner("2").choose({"N": 1}, gpu.launch) == LARGE and len(gpu.timed) == 6  # another kernel
    content = json.loads((tmp_path / "fake" / "square.json").read_text())
    assert content["version"] == "2" and [p.name for p in (tmp_path / "fake").iterdir()] == ["square.json"]


def test_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    gpu = _FakeGpu(monkeypatch, {64: 3.0, 256: 2.0, 512: 1.0})
    monkeypatch.setenv("KERNELBOOK_AUTOTUNE", "off")
    assert _tuner().choose({"N": 1}, gpu.launch) is SMALL and not gpu.timed
    monkeypatch.setenv("KERNELBOOK_AUTOTUNE", "full")
    assert _tuner().choose({"N": 1}, gpu.launch).kwargs == {"BLOCK": 512} and gpu.timed == [64, 256, 512]
    monkeypatch.setenv("KERNELBOOK_AUTOTUNE", "default")
    assert _tuner().choose({"N": 1}, gpu.launch).kwargs == {"BLOCK": 512} and len(gpu.timed) == 3  # what full found


def test_a_single_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _FakeGpu(monkeypatch, {})
    assert _tuner(candidates=[LARGE]).choose({"N": 1}, gpu.launch) is LARGE and not gpu.timed


def test_the_budget_bounds_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "BUDGET_S", -1.0)
    gpu = _FakeGpu(monkeypatch, {64: 2.0, 256: 1.0})
    assert _tuner().choose({"N": 7}, gpu.launch) is SMALL and gpu.timed == [64]


def test_what_does_not_launch_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    too_much = autotune.OutOfResources(300_000, 232_448, "shared memory")
    gpu = _FakeGpu(monkeypatch, {64: 2.0, 256: too_much})
    assert _tuner().choose({"N": 8}, gpu.launch) is SMALL
    gpu = _FakeGpu(monkeypatch, {64: too_much, 256: too_much})
    with pytest.raises(RuntimeError, match="square: none of 2 configurations runs here"):
        _tuner().choose({"N": 9}, gpu.launch)


def test_nothing_is_timed_during_a_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = _FakeGpu(monkeypatch, {64: 2.0, 256: 1.0})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tuner = _tuner()
    assert tuner.choose({"N": 10}, gpu.launch) is SMALL and not gpu.timed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner.choose({"N": 10}, gpu.launch) is LARGE


@pytest.mark.parametrize("content", ("", "not json", "[]", '{"version": "1"}'))
def test_a_broken_cache_file_is_ignored(content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    gpu = _FakeGpu(monkeypatch, {64: 2.0, 256: 1.0})
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "square.json").write_text(content)
    assert _tuner().choose({"N": 1}, gpu.launch) == LARGE
    assert json.loads((tmp_path / "fake" / "square.json").read_text())["choices"]


def test_a_folder_that_cannot_be_written_costs_only_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "file"))
    gpu = _FakeGpu(monkeypatch, {64: 2.0, 256: 1.0})
    assert _tuner().choose({"N": 1}, gpu.launch) == LARGE
