"""Shared by all tests. kernelbook comes first: it decides between GPU and interpreter before Triton is imported."""

import argparse
import fcntl
import functools
import gc
import itertools
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is installed may not look for models or kernels of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has a worker; processes that tests start know it from here

sys.path.append(str(Path(__file__).parents[1] / "tools"))

# isort: split
import kernelbook  # noqa: F401

# isort: split
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from stand_in import stand_in_for

from kernelbook import operators, runtime
from kernelbook.lab import remembered_types

# isort: split
import triton

remembered_types.remember()

hypothesis.settings.register_profile(
    "kernelbook",
    deadline=None,
    derandomize=True,  # the same examples on every machine; HYPOTHESIS_PROFILE=default searches afresh
    max_examples=10,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile(
    "fuzz", hypothesis.settings.get_profile("kernelbook"), derandomize=False, max_examples=2000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kernelbook"))


def _part(text: str) -> tuple[int, int]:
    own, _, of = text.partition("/")
    if not (own.isdecimal() and of.isdecimal() and 1 <= int(own) <= int(of)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text}")
    return int(own), int(of)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, metavar="I/N", help="of N parts of the chosen tests the I-th, from 1")
    parser.addoption("--stand-in", metavar="TARGET", help="plans and kernels of an older GPU than this, such as sm_75")


def pytest_configure(config: pytest.Config) -> None:
    if target := config.getoption("--stand-in"):
        stand_in_for(target)
        config.addinivalue_line("filterwarnings", "ignore:kernelbook. .* has no bfloat16")


@pytest.hookimpl(trylast=True)  # when marks have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where kernels are not compiled and launched.

    Those marked ``slow`` begin first: at the end every worker has short ones. On a GPU some workers begin with a queue each of those
    that wait for one another. A part of the tests has whole functions, whose cases share what is compiled, and a share of the queues.
    """
    gpu = runtime.DEVICE.type == "cuda"
    if part := config.getoption("--part"):
        own, of = part

        def dealt(item: pytest.Item) -> str:
            return item.nodeid if "memory" in item.keywords else item.nodeid.split("[")[0]

        cases = Counter(map(dealt, sorted(items, key=lambda item: "memory" in item.keywords)))
        parts: list[dict[str, int]] = [{} for _ in range(of)]
        for one, count in cases.most_common():
            min(parts, key=lambda those: sum(those.values()))[one] = count
        config.hook.pytest_deselected(items=[item for item in items if dealt(item) not in parts[own - 1]])
        items[:] = [item for item in items if dealt(item) in parts[own - 1]]
    items.sort(key=lambda item: "slow" not in item.keywords)
    if gpu:
        queues: dict[str, list[pytest.Item]] = {}
        for item in items:
            if "memory" in item.keywords:
                queues.setdefault(_queue(item), []).append(item)
        share = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # which a worker is given at first
        others = iter([item for item in items if "memory" not in item.keywords])
        begun = [
            each
            for queue in queues.values()
            for each in (*queue, *itertools.islice(others, max(0, share - len(queue))))
        ]
        items[:] = [*begun, *others]
    else:
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def _queue(item: pytest.Item) -> str:
    """Tests marked ``memory`` that have the same wait for one another."""
    marker = item.get_closest_marker("memory")
    return marker.kwargs.get("queue", "large") if marker else ""


def pytest_collection_finish() -> None:
    """The garbage collector looks through all of PyTorch each time: that takes a fifth of the interpreter's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _compile_but_not_for_bitsandbytes(fn: Any = None, /, **kwargs: Any) -> Any:
    """On a CPU bitsandbytes compiles its functions for each shape and block size, in ten seconds, or else calls them as they are."""
    if sys._getframe(1).f_globals["__name__"].startswith("bitsandbytes."):
        raise RuntimeError("not in tests")
    return _torch_compile(fn, **kwargs)


_torch_compile = torch.compile
if runtime.INTERPRET:
    torch.compile = functools.wraps(torch.compile)(_compile_but_not_for_bitsandbytes)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known seed, one thread for each worker, and no plans: a test may change what they are made of."""
    operators.forget_plans()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in ("KERNELBOOK_DEBUG", "KERNELBOOK_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the interpreter kernels that read out of bounds, use unset values or race raise: see ``watched_memory``."""
    # It looks into the interpreter, of which Triton 3.8 has another: there a scalar's ``other=`` never reaches a load.
    unwatched = "unwatched" in request.keywords or not runtime.INTERPRET
    if unwatched or not triton.__version__.startswith(("3.6.", "3.7.")):
        yield
        return
    from kernelbook.lab.watched_memory import watched

    with watched():
        yield


LARGE = 4 * 2**30  # bytes of a GPU's memory that a test may take beside others


@pytest.fixture(autouse=True)
def _memory_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is marked ``memory`` waits until no other of its queue runs, in whatever process; what is free is given back."""
    if runtime.DEVICE.type != "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        large = "memory" in request.keywords
        if large:
            name = f"kernelbook-{os.getuid()}-{_queue(request.node)}.lock"
            lock = stack.enter_context(open(f"{tempfile.gettempdir()}/{name}", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # which earlier tests have left
        yield
        peak = torch.cuda.max_memory_allocated() - before
        if torch.cuda.memory_reserved() > LARGE // 16:
            gc.collect()
            torch.cuda.empty_cache()
    assert large or peak <= LARGE, f"needs the mark memory: it took {peak / 2**30:.1f} GiB"


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this process."""
    return runtime.DEVICE


@pytest.fixture
def overflow_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, an integer that overflows in a kernel is an error, as long as the test runs (interpreter only)."""
    from triton.runtime import interpreter

    def switch() -> None:
        options = interpreter.InterpreterOptions(debug=True)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)

    return switch
