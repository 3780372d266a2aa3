"""The memory that a call takes, and what is asked of tensors on the host."""

import contextlib
import threading
import types
from typing import Any

import pytest
import torch

import kernelbook as kb
from kernelbook import memory, runtime, tensors


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_rows_that_begin_on_16_bytes(dtype: torch.dtype) -> None:
    wide = 16 // dtype.itemsize
    x = torch.zeros(6, 4 * wide, dtype=dtype, device=runtime.DEVICE)
    assert x.data_ptr() % 16 == 0
    for aligned in (x, x[:, :3], x[1:], x[::2], x.reshape(2, 3, -1), x[:, wide:], x[0], x.reshape(3, 2, -1)[:, 0]):
        assert tensors.has_aligned_rows(aligned)
    for other in (x.t(), x[:, 1:], x[:, ::2], x[:1].expand(6, -1), x.reshape(-1, 3 * wide // 2)):
        assert not tensors.has_aligned_rows(other), other.stride()


def test_a_matrix_of_any_tensor() -> None:
    x = torch.arange(24.0, device=runtime.DEVICE)
    for given, shape in (
        (x, (1, 24)),
        (x.view(4, 6), (4, 6)),
        (x.view(2, 3, 4), (6, 4)),
        (x.view(2, 2, 3, 2), (12, 2)),
    ):
        made = tensors.matrix(given)
        assert made.shape == shape and made.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", ((), (5,), (3, 1, 2), (3, 0, 2)))
def test_new_memory_lies_where_its_model_does(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU's short way, too, which takes strides, and memory of the current device."""
    like, short = torch.ones(2), []

    def new(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        short.append(strides)
        return torch.empty_strided(size, strides, dtype=dtype)

    monkeypatch.setattr(memory, "_new", new)
    for device in (like.get_device(), like.get_device() + 1):
        monkeypatch.setattr(memory, "_current_device", lambda device=device: device)
        made = memory.empty(shape, torch.float16, like)
        assert made.shape == shape and made.dtype == torch.float16 and made.device == like.device
    assert short == [torch.empty(shape).stride()]


# --- counters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A GPU's counters without one: ``now`` is the current stream, and every thread notes where it makes zeros."""
    state = types.SimpleNamespace(now=1, capturing=False, made=[], within={})

    @contextlib.contextmanager
    def within(stream: Any) -> Any:
        state.within[threading.get_ident()] = stream.number
        yield
        del state.within[threading.get_ident()]

    def zeros(count: int, **how: Any) -> torch.Tensor:
        thread = threading.get_ident()
        state.made.append((count, state.within.get(thread, state.now), thread == threading.main_thread().ident))
        return real(count, dtype=how["dtype"])

    real = torch.zeros
    monkeypatch.setattr(memory, "_counters", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(number=state.now, device=device)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.now, raising=False)
    return state


def test_counters_that_stay_are_made_by_another_thread(streams: types.SimpleNamespace) -> None:
    """A call's own thread may take its memory from a pool, which is not to hold what outlives the call."""
    gpu = torch.device("cuda", 0)
    first = memory.counters(5, gpu)
    assert streams.made == [(memory.COUNTERS, 1, False), (memory.CAPTURED_COUNTERS, 1, False)]
    assert memory.counters(memory.COUNTERS, gpu) is first, "one stream, one after the other"
    more = memory.counters(memory.COUNTERS + 1, gpu)
    assert more.numel() > memory.COUNTERS and memory.counters(5, gpu) is more
    streams.now = 2
    assert memory.counters(5, gpu).data_ptr() not in (first.data_ptr(), more.data_ptr())
    assert streams.made[2:] == [(memory.COUNTERS + 1, 1, False), (memory.COUNTERS, 2, False)]


def test_each_call_in_a_graph_has_counters_of_its_own(
    streams: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CAPTURED_COUNTERS", 24)
    gpu, streams.capturing = torch.device("cuda", 0), True
    memory.counters(5, gpu)
    assert streams.made.pop() == (5, 1, True) and not memory._counters, "nothing was made before"
    streams.capturing = False
    eager = memory.counters(5, gpu)
    streams.made.clear()
    streams.capturing = True
    found = [memory.counters(count, gpu) for count in (5, 8, 3)]
    begins = [part.data_ptr() for part in found]
    assert [part.numel() for part in found] == [5, 8, 3] and not streams.made
    assert [begin - begins[0] for begin in begins] == [0, 32, 64] and begins[0] != eager.data_ptr()
    assert memory.counters(5, gpu).numel() == 5 and streams.made == [(5, 1, True)], "of the graph's own memory"
    assert memory.counters(4, gpu).data_ptr() == begins[0] + 80 and len(streams.made) == 1
    streams.capturing = False
    assert memory.counters(5, gpu) is eager


@pytest.mark.gpu
def test_what_stays_is_in_nobodys_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls on a stream are made in a pool, and one of a graph: nothing of theirs stays in either."""
    monkeypatch.setattr(memory, "_counters", {})
    q, k = torch.randn(1, 8, 1, 64, device=runtime.DEVICE), torch.randn(1, 2, 30000, 64, device=runtime.DEVICE)
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        for _ in range(4):
            first = kb.flash_attention(q, k, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kb.flash_attention(q, k, k)
    graph.replay()
    assert torch.equal(first, captured) and torch.equal(first, kb.flash_attention(q, k, k))
    assert len(memory._counters) == 3 and not any(counters.any() for counters in memory._counters.values())
    torch.cuda.synchronize()
    del first
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks and all(block["state"] == "inactive" for block in blocks)
