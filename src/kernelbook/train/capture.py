"""Calls as CUDA graphs: captured once, and replayed without the host's work between their kernels.

Built on ``torch.cuda.graph`` and its memory pools. A replay reads and writes the tensors that the captured call read and
wrote, at their addresses; what Python decided then, it decided for every replay.
"""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kernelbook import runtime

__all__ = ["Captured", "CapturedCalls", "FixedInputs"]

TORCH = os.path.dirname(torch.__file__) + os.sep
_failed: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocators may go on asking such a graph whether it captures


def _capture(call: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The call as a graph, and what it returned while it was captured; nothing has been computed.

    Raises:
        RuntimeError: it cannot be captured; the message names the line.
    """
    graph, first = torch.cuda.CUDAGraph(), None
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    numbers = generator.get_state()
    try:
        # thread_local: NCCL looks at its work from a thread of its own meanwhile. The stream is named twice, since a capture
        # that fails does not leave it.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            try:
                out = call()
            except Exception as error:  # the end of the capture raises another one
                first = error
                raise
    except Exception as error:
        _end(graph, pool)
        # It would go on as if it were captured, and refuse to draw for anybody.
        generator.graphsafe_set_state(torch.Generator(runtime.DEVICE).graphsafe_get_state())
        generator.set_state(numbers)
        cause = first or error
        raise RuntimeError(f"{_line_of(cause)}: {_first_line(cause)}") from cause
    return graph, out


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """What PyTorch leaves undone where a capture fails: see ``CUDAGraph::capture_end``."""
    _failed.append(graph)
    device = torch.cuda.current_device()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(torch._C, name)(device, pool)


@contextlib.contextmanager
def _no_stashed_generator() -> Iterator[None]:
    """Within the context to ask for the generator's state is an error.

    A graph draws by a counter of its own: what is set back to draw the same numbers twice, as activation checkpoints do for
    dropout, has no effect there, and the gradients would be those of other numbers.
    """

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is torch.cuda.get_rng_state.__code__:
            raise RuntimeError("the state of the generator cannot be set back in a graph, and random numbers are drawn")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def _line_of(error: BaseException) -> str:
    """The innermost line outside of PyTorch that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(TORCH) and frame.filename != __file__]
    if not own:
        return "no line of Python's"
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}, `{frame.line}`"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


class Captured:
    """A call without arguments as one CUDA graph. Calling it replays the graph and returns what the call returned.

    Each replay reads the tensors that the call read, and overwrites the tensors that it made: new inputs are copied into
    the old ones. What is captured must not wait for the device.

    Args:
        call: it is kept, since the graph reads what was made before it: inputs, and the states of an optimizer.
        warm: how often it runs beforehand, so that kernels are compiled and an optimizer's states made.

    Attributes:
        graph: the ``torch.cuda.CUDAGraph``.
        out: what the call returned while it was captured.

    Raises:
        RuntimeError: there is no GPU, or the call cannot be captured; then the message names the line.
    """

    def __init__(self, call: Callable[[], Any], *, warm: int = 3) -> None:
        if runtime.DEVICE.type != "cuda":
            raise RuntimeError("Captured: call must run on a GPU, and there is none")
        self._call, stream = call, torch.cuda.Stream()
        for _ in range(warm):
            _run_on(stream, call)
        self.graph, self.out = _capture(call, stream, torch.cuda.graph_pool_handle())

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


def _run_on(stream: torch.cuda.Stream, call: Callable[[], Any]) -> Any:
    """The call on ``stream``, in the order of the current stream."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        out = call()
    current.wait_stream(stream)
    return out


class CapturedCalls:
    """Calls by key. Each runs as it is a few times, is captured then, and replayed from there on.

    All graphs share a memory pool, so that several take little more than the largest. Where a call cannot be captured, this
    and all new ones run as they are, and a warning names the line.

    Args:
        op: whose warning it is.
        warm: how often a call of each key runs as it is, so that kernels are compiled and an optimizer's states made.
        capture: ``False``: every call runs as it is.

    Attributes:
        why_eager: why new calls run as they are, in words; ``None`` where they are captured.
    """

    def __init__(self, op: str, *, warm: int = 3, capture: bool = True) -> None:
        self.op, self.warm = op, warm
        self.why_eager: str | None = None if capture else "capture is off"
        if capture and runtime.DEVICE.type != "cuda":
            self._go_on_eagerly("there is no GPU")
        self._runs: dict[Hashable, int] = {}
        self._draws: dict[Hashable, bool] = {}  # whether a call of this key draws random numbers
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._stream = torch.cuda.Stream() if self.why_eager is None else None
        self.forget()

    def __len__(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def forget(self) -> None:
        """Drops all graphs: what they read is elsewhere now."""
        self._runs.clear()
        self._captured.clear()
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()

    def __call__(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """What ``call`` returns. From a graph: tensors that its next replay overwrites."""
        found = self._captured.get(key)
        if found is not None:
            found[0].replay()
            return found[1]
        if self.why_eager is not None or self._stream is None:
            return call()
        runs = self._runs.get(key, 0)
        if runs < self.warm:
            self._runs[key] = runs + 1
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            offset = generator.get_offset()
            out = _run_on(self._stream, call)
            self._draws[key] = generator.get_offset() != offset
            return out
        why = self._capture_as(key, call, draws=self._draws.get(key, False))
        if why is not None:
            out = _run_on(self._stream, call)  # an error of the call's own is raised here
            self._go_on_eagerly(why)
            return out
        graph, out = self._captured[key]
        graph.replay()
        return out

    def _capture_as(self, key: Hashable, call: Callable[[], Any], *, draws: bool) -> str | None:
        """Captures the call; in words why that cannot be. The error is gone by then, and with it what it held."""
        assert self._stream is not None
        try:
            with _no_stashed_generator() if draws else contextlib.nullcontext():
                self._captured[key] = _capture(call, self._stream, self._pool)
        except RuntimeError as error:
            return str(error)
        return None

    def _go_on_eagerly(self, why: str) -> None:
        self.why_eager = why
        warnings.warn(f"{self.op}: goes on without a CUDA graph: {why}", stacklevel=4)


class FixedInputs:
    """The tensors of a batch at addresses that stay, one set for each kind of batch.

    Args:
        op: whose errors they are.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._sets: dict[Hashable, dict[Path, torch.Tensor]] = {}

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> tuple[Hashable, tuple[Any, ...], dict[str, Any]]:
        """-> what kind of batch it is, and its arguments with tensors on ``device`` that every such batch is copied into.

        Tensors may stand in dictionaries, lists and tuples.

        Raises:
            TypeError: a value is neither a tensor nor hashable.
        """
        given = (tuple(args), dict(kwargs))
        leaves = list(_leaves(given))
        tensors = {path: value for path, value in leaves if isinstance(value, torch.Tensor)}
        kind = tuple((path, (v.shape, v.dtype) if path in tensors else v) for path, v in leaves)
        try:
            own = self._sets.get(kind)
        except TypeError as error:
            raise TypeError(f"{self._op}: the batch must be of tensors and of plain values: {error}") from None
        if own is None:
            own = {path: torch.empty_like(t, device=device) for path, t in tensors.items()}
            self._sets[kind] = own
        for path, t in tensors.items():
            own[path].copy_(t.detach(), non_blocking=True)
        return kind, *_with(given, own)


Path = tuple[Any, ...]


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What stands in nested dictionaries, lists and tuples, and where."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    elif type(value) in (list, tuple):
        for i, part in enumerate(value):
            yield from _leaves(part, (*path, i))
    else:
        yield path, value


def _with(value: Any, tensors: Mapping[Path, torch.Tensor], path: Path = ()) -> Any:
    """``value`` with other tensors in these places."""
    if isinstance(value, Mapping):
        return {name: _with(part, tensors, (*path, name)) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with(part, tensors, (*path, i)) for i, part in enumerate(value))
    return tensors.get(path, value)
