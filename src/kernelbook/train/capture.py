"""Calls as CUDA graphs: captured once, and replayed without the host's work between their kernels.

Built on ``torch.cuda.graph`` and its memory pools. A replay reads and writes the tensors that the captured call read and
wrote, at their addresses; what Python decided then, it decided for every replay.
"""

import collections
import contextlib
import dataclasses
import enum
import os
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten

from kernelbook import runtime
from kernelbook.nn.offload import join_copies

TORCH = os.path.dirname(torch.__file__) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
MAX_KINDS = 64  # kinds that are kept: of calls, with their graphs, and of batches
_failed: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocators may go on asking such a graph whether it captures
_generations = 0  # how often a generator had to be given another state: graphs from before draw from the one it had


def _capture(call: Callable[[], Any], stream: torch.cuda.Stream, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return the call as a graph, and what it returned while it was captured; nothing has been computed.

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
                join_copies()
            except Exception as error:  # where that breaks the capture its end raises another one
                first = error
                raise
    except Exception as error:
        if error is not first:  # the capture itself failed, and PyTorch has not ended it
            _end(graph, pool)
        _mend(generator)
        generator.set_state(numbers)
        cause = first or error
        said = str(cause).strip().splitlines() or [type(cause).__name__]
        raise RuntimeError(f"{_line_of(cause)}: {said[0]}") from cause
    return graph, out


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Do what PyTorch leaves undone where a capture fails: see ``CUDAGraph::capture_end``."""
    _failed.append(graph)
    device = torch.cuda.current_device()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(torch._C, name)(device, pool)


def _mend(generator: torch.Generator) -> None:
    """Let the generator draw again after a capture that failed.

    PyTorch before 2.13 leaves its state marked as captured, and refuses to draw for anybody. A capture that succeeds takes the
    mark away from the same state, which the graphs from before go on drawing from. Where that does not help either, it gets
    another state, and those graphs are dropped.
    """
    global _generations
    x = torch.zeros(1, device=generator.device)
    if _draws_from(generator, x):
        return
    with contextlib.suppress(RuntimeError):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            x.add_(1)
    if _draws_from(generator, x):
        return
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
    _generations += 1


def _draws_from(generator: torch.Generator, x: torch.Tensor) -> bool:
    try:
        x.uniform_(generator=generator)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _no_stashed_generator() -> Iterator[None]:
    """Within the context to ask for the generator's state is an error.

    A graph draws by a counter of its own: what is set back to draw the same numbers twice, as activation checkpoints do for
    dropout, has no effect there, and the gradients would be those of other numbers.
    """

    # A profile function sees this thread only; in PyTorch's place, a function of ours would refuse other threads too. What it
    # raises ends the call that it saw, and itself, as Python's documentation says.
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
    """Return the innermost line outside of PyTorch that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(TORCH) and frame.filename != __file__]
    if not own:
        return "no line of Python's"
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}, `{frame.line}`"


class Captured:
    """A call without arguments as one CUDA graph of the current device. Calling it replays the graph and returns what the
    call returned.

    Each replay reads the tensors that the call read, and overwrites those that it made. It runs ``warm`` times beforehand, so
    that kernels are compiled and an optimizer's states made.

    Raises:
        RuntimeError: there is no GPU, or the call cannot be captured; then the message names the line.
    """

    def __init__(self, call: Callable[[], Any], *, warm: int = 3) -> None:
        if runtime.DEVICE.type != "cuda":
            raise RuntimeError("Captured: call must run on a GPU, and there is none")
        self._call, stream = call, torch.cuda.Stream()  # kept, since the graph reads what was made before it
        for _ in range(warm):
            _run_on(stream, call)
        self.graph, self.out = _capture(call, stream, torch.cuda.graph_pool_handle())

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


def _run_on(stream: torch.cuda.Stream, call: Callable[[], Any]) -> Any:
    """Run the call on ``stream``, in the order of the current stream."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        out = call()
    current.wait_stream(stream)
    return out


def _why_not(device: torch.device) -> str | None:
    """Return why calls on ``device`` cannot be captured."""
    if runtime.DEVICE.type != "cuda":
        return "there is no GPU"
    return None if device.type == "cuda" else f"the model is on the {device.type}"


def drawn() -> int:
    """Return how far the generator of the current device is."""
    return int(torch.cuda.default_generators[torch.cuda.current_device()].get_offset())


def _host_generators() -> dict[str, Any]:
    """Return the states of the random numbers that are drawn on the host."""
    found: dict[str, Any] = {"torch's on the CPU": torch.get_rng_state().tolist(), "random": random.getstate()}
    if "numpy.random" in sys.modules:
        found["numpy.random"] = pickle.dumps(sys.modules["numpy.random"].get_state(legacy=False))
    return found


def keep(kept: dict[Any, Any], key: Hashable, value: Any) -> None:
    """Put ``value`` last; of more than :data:`MAX_KINDS` the one that was not used for longest is dropped."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MAX_KINDS:
        del kept[next(iter(kept))]


@dataclasses.dataclass
class _Kind:
    """State of the calls of a key."""

    runs: int = 0
    draws: bool = False  # random numbers, on the device
    captured: tuple[Any, Any] | None = None  # the graph, and what the call returned


class CapturedCalls:
    """Calls by key. Each runs as it is a few times, is captured then, and replayed from there on.

    All graphs share a memory pool, so that several take little more than the largest; see :func:`keep` for how many there are.
    Where a call cannot be captured, this and all new ones run as they are, and a warning names the line.

    Args:
        op: whose warning it is.
        warm: how often a call of each key runs as it is, so that kernels are compiled and an optimizer's states made.
        capture: ``False``: every call runs as it is.
        device: where the calls compute; default ``runtime.DEVICE``.
        patience: after so many new keys in a row a warning says what changes between them.

    Attributes:
        why_eager: why calls run as they are, in words; ``None`` where they are captured.
        capturing: whether the call that runs is being captured.
    """

    def __init__(
        self, op: str, *, warm: int = 3, capture: bool = True, device: torch.device | None = None, patience: int = 8
    ) -> None:
        self.op, self.warm, self.patience = op, warm, patience
        self.device = runtime.DEVICE if device is None else device
        self.capturing = False
        self._why: str | None = None if capture else "capture is off"
        self._row, self._why_row = 0, ""  # how many new kinds there were in a row; once they are too many, in words
        self._kinds: dict[Hashable, _Kind] = {}
        self._stream: Any = None
        why = _why_not(self.device)
        if why is not None:
            self.go_on_eagerly(why)
        if self._why is None:
            with self._on_device():
                self._stream = torch.cuda.Stream()
        self.forget()

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return sum(kind.captured is not None for kind in self._kinds.values())

    @property
    def why_eager(self) -> str | None:
        return self._why or (self._why_row if self._row >= self.patience else None)

    @property
    def captures(self) -> bool:
        """Return whether there are graphs, or will be."""
        return self._why is None or len(self) > 0

    def forget(self) -> None:
        """Drop all graphs: what they read is elsewhere now."""
        self._kinds.clear()
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()
        self._generations = _generations

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def __call__(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """Return what ``call`` returns. From a graph: tensors that its next replay overwrites."""
        if not self.captures:
            return call()
        if self._generations != _generations:
            self.forget()
        kind = self._kinds.get(key)
        if self._why is not None and (kind is None or kind.captured is None):
            return call()
        self._row = self._row + 1 if kind is None else 0
        if kind is None:
            self._say_what_changes(key)
            kind = _Kind()
        keep(self._kinds, key, kind)
        with self._on_device():
            if kind.captured is None and kind.runs < self.warm:
                kind.runs += 1
                return self._warmed(kind, call)
            if kind.captured is None and (why := self._capture_as(kind, call)) is not None:
                out = _run_on(self._stream, call)  # an error of the call's own is raised here
                self.go_on_eagerly(why)
                return out
            assert kind.captured is not None
            kind.captured[0].replay()
            return kind.captured[1]

    def _warmed(self, kind: _Kind, call: Callable[[], Any]) -> Any:
        """Run the call as it is, and look at what it draws of random numbers."""
        on_host, before = _host_generators(), drawn()
        out = _run_on(self._stream, call)
        kind.draws = drawn() != before
        moved = [name for name, state in _host_generators().items() if on_host.get(name, state) != state]
        if moved:
            self.go_on_eagerly(
                f"random numbers are drawn on the host ({', '.join(moved)}), and what they decide would be decided for good"
            )
        return out

    def _capture_as(self, kind: _Kind, call: Callable[[], Any]) -> str | None:
        """Capture the call; return in words why that cannot be. The error is gone by then, and with it what it held."""
        self.capturing = True
        try:
            with _no_stashed_generator() if kind.draws else contextlib.nullcontext():
                kind.captured = _capture(call, self._stream, self._pool)
        except RuntimeError as error:
            return str(error)
        finally:
            self.capturing = False
        return None

    def _say_what_changes(self, key: Hashable) -> None:
        """Say it once, where each call is of another kind."""
        if self._row == self.patience and not self._why_row:
            changes = min((list(_changes(other, key)) for other in self._kinds), key=len, default=[])
            named = ", ".join(dict.fromkeys(changes)) or "the key"
            self._why_row = (
                f"{self.patience} calls in a row were of as many kinds, of which each would have a graph of its own; "
                f"what changes from one to the next: {named}"
            )
            self._warn(self._why_row)

    def go_on_eagerly(self, why: str) -> None:
        """Capture nothing from here on, and warn why, in words; what was said first stays."""
        if self._why is None:
            self._why = why
            self._warn(why)

    def _warn(self, why: str) -> None:
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame, level = frame.f_back, level + 1
        warnings.warn(f"{self.op}: goes on without a CUDA graph: {why}", stacklevel=level)


@dataclasses.dataclass(eq=False)
class _State:
    """What a graph takes for granted, as one object: keys that compare it by its place take the host less time."""

    values: tuple[Hashable, ...]


class Fingerprint:
    """Fingerprints of the states of models that graphs take for granted, each once."""

    def __init__(self) -> None:
        self._states: list[_State] = []

    def __call__(self, model: torch.nn.Module, *others: tuple[str, Hashable]) -> Hashable:
        """Return the object that stands for the state of ``model``, and for names and values of ``others``."""
        values = (*state_of(model), *others)
        found = next((state for state in self._states if state.values == values), None) or _State(values)
        self._states = [found, *(state for state in self._states if state is not found)][:MAX_KINDS]
        return found


def _changes(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Names of what differs between two keys, which are nested tuples; a name and a value are a pair."""
    if isinstance(old, _State) and isinstance(new, _State):
        old, new = old.values, new.values
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) > 0:
        if len(old) == 2 and isinstance(old[0], str) and old[0] == new[0]:
            old, new, name = old[1:], new[1:], f"{name} {old[0]}".strip()
        for a, b in zip(old, new, strict=True):
            if type(a) is not type(b) or a != b:
                yield from _changes(a, b, name)
    elif name:
        yield name


# --- what a graph takes for granted of a model ------------------------------------------------------------------------

_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
)
_CONTAINERS = frozenset((collections.OrderedDict, dict, list, tuple, set))
MANY = 16  # parts of a list or a dictionary; longer ones are no settings


def state_of(model: torch.nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """Return by name what a graph takes for granted of a model: where its tensors are, the plain values that its modules have
    as attributes (modes, rates, adapters), their hooks, and same_bits. Values of tensors may change; what a pass leaves in a module as a
    part of its own graph of gradients does not count.
    """
    found: list[tuple[str, Hashable]] = []
    configs: set[int] = set()
    for path, module in model.named_modules():
        kind = type(module)  # by name, since some are made anew
        settings: list[tuple[str, Hashable]] = [("class", (kind.__module__, kind.__name__))]
        for name, value in module.__dict__.items():
            kind, part = type(value), None
            if kind in _PLAIN:
                part = value
            elif kind in _CONTAINERS and (not value or name == "_modules"):
                continue
            elif kind is collections.OrderedDict:  # of hooks
                part = tuple(value)
            elif name == "_parameters" or name == "_buffers":
                part = tuple([None if t is None else _place_of(t) for t in value.values()])
            elif kind in _CONTAINERS:
                if len(value) > MANY:
                    continue
                part = tuple(filter(_is_plain, value.items() if kind is dict else value))
            elif isinstance(value, torch.Tensor):
                if value.grad_fn is not None:
                    continue
                part = _place_of(value)
            elif name == "config":  # many modules share one
                if id(value) in configs or not hasattr(value, "__dict__"):
                    continue
                configs.add(id(value))
                part = tuple([(own, v) for own, v in vars(value).items() if type(v) in _PLAIN])
            elif dataclasses.is_dataclass(value):  # tensors with their scales, as one value
                part = id(value)
            else:
                continue
            settings.append((name, part))
        found.append((path, tuple(settings)))
    return *found, ("same_bits", runtime.in_same_bits())


def plain(value: Any) -> Hashable:
    """Return a value by which a graph's key can compare it: tensors by their place."""
    if isinstance(value, torch.Tensor):
        return _place_of(value)
    if type(value) in (list, tuple):
        return tuple(map(plain, value))
    return value if type(value) in _PLAIN else repr(value)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _place_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    place = tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
    return place, tensor.requires_grad, tensor.shape


# --- batches ----------------------------------------------------------------------------------------------------------


def why_not_capturable(*values: Any) -> str | None:
    """Return in words what of ``values`` can neither stay at its address nor be a part of a graph; ``None`` if all can."""
    given = [dict(value) if isinstance(value, Mapping) else value for value in values]
    for path, value in tree_flatten_with_path(given)[0]:
        at = keystr(path[1:])
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.requires_grad:
                return f"the batch has a tensor that is sparse, nested, quantized or wants a gradient, at {at}"
        elif type(value) not in _PLAIN and not isinstance(value, enum.Enum):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            return f"the batch has a {kind} at {at}: neither a tensor nor a plain value"
    return None


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


class FixedInputs:
    """The tensors of a batch at addresses that stay, one set for each kind of batch; see :func:`keep` for how many there are."""

    def __init__(self) -> None:
        self._sets: dict[Hashable, tuple[int, list[torch.Tensor]]] = {}
        self._made = 0

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> tuple[Hashable, tuple[Any, ...], dict[str, Any]]:
        """Return what kind of batch it is, and its arguments with tensors on ``device`` that every such batch is copied into.

        Tensors may stand in dictionaries, lists, tuples and named tuples. Every other value is hashable.
        """
        found, shape = tree_flatten_with_path((tuple(args), dict(kwargs)))
        about = ((v.shape, v.dtype) if isinstance(v, torch.Tensor) else (type(v), v) for _, v in found)
        kinds = [(keystr(path[1:]), value) for (path, _), value in zip(found, about, strict=True)]
        kind = ("batch", (("structure", str(shape)), *kinds))
        tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
        if kind not in self._sets:
            self._made += 1
            self._sets[kind] = self._made, [torch.empty_like(t, device=device) for t in tensors]
        number, own = self._sets[kind]
        keep(self._sets, kind, (number, own))
        for mine, t in zip(own, tensors, strict=True):
            # Its owner may fill pinned memory anew as soon as we return; of other memory CUDA takes a copy by itself.
            mine.copy_(t.detach().clone() if t.is_pinned() else t.detach(), non_blocking=True)
        fixed = iter(own)
        leaves = [next(fixed) if isinstance(value, torch.Tensor) else value for _, value in found]
        return (kind, number), *tree_unflatten(leaves, shape)
