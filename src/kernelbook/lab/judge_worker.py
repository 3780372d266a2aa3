"""The process in which the judge runs a reader's code: it calls the code with inputs that it is given, and hands back the bytes.

Nothing here decides whether a result is right: the seeds, the reference and the comparison are in another process, and no
answer is ever in this one. What is looked after here is how a result comes about:

- The host sees no numbers. Outside of kernels every tensor reads as zeros (:class:`_Veil`); what it
  holds is put back while a kernel runs, and while one of PyTorch's operators runs that only moves numbers. So nobody computes on
  the host, in PyTorch, NumPy or a thread; a call of another operator is named (:class:`_Host`).
- New memory is NaN, and in the interpreter memory is watched (:mod:`kernelbook.lab.watched_memory`).
- Results are copied on the caller's stream as soon as the function returns: what comes later, from a thread or another stream,
  comes too late.

``python -m kernelbook.lab.judge_worker FD serve`` reads sockets from a socket, and forks a process with limits for each;
without ``serve`` it takes one and keeps to this process, which a GPU needs.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import gc
import importlib.util
import inspect
import io
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kernelbook import check, interpreter, runtime
from kernelbook.lab import judge_source, remembered_types, timing

# isort: split
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime import jit
from triton.runtime.autotuner import Autotuner
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["receive", "send"]

# Operators that make memory or look at it in another way: they read no numbers.
_FREE = frozenset(
    """alias arange as_strided detach diagonal empty empty_like empty_strided expand flatten _reshape_alias lift_fresh movedim
    new_empty new_empty_strided permute select slice split split_with_sizes squeeze t transpose unbind unflatten unfold unsqueeze
    view _unsafe_view""".split()  # noqa: SIM905
)
# Operators that fill, copy or convert.
_MOVING = frozenset(
    """clone _to_copy copy_ fill_ full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zero_ zeros
    zeros_like""".split()  # noqa: SIM905
)
_COPYING = frozenset(("clone", "_to_copy", "copy_"))
# Operators with which Triton's interpreter, and what gives it float32 for bfloat16, handle a kernel's arguments.
_OF_INTERPRETER = frozenset(("set_", "clone", "copy_", "_to_copy", "equal", "new_empty", "view"))
_MEBI = 2**20


# --- messages -----------------------------------------------------------------------------------------------------------


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends tensors and plain values; tensors that share memory still do on the other side."""
    data = io.BytesIO()
    torch.save(dict(message), data)
    channel.sendall(struct.pack("<Q", data.tell()) + data.getvalue())


def receive(channel: socket.socket, *, at_most: int = 2**34) -> dict[str, Any]:
    """What the other side sent. Only tensors and plain values are read: a message cannot run code here."""

    def take(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = channel.recv(min(count - len(data), 2**24))
            if not part:
                raise EOFError("the other process has ended")
            data += part
        return bytes(data)

    (length,) = struct.unpack("<Q", take(8))
    if length > at_most:
        raise EOFError(f"a message of {length} bytes")
    message = torch.load(io.BytesIO(take(length)), weights_only=True, map_location="cpu")
    if not isinstance(message, dict):
        raise EOFError("a message that is none")
    return message


# --- what the host sees -----------------------------------------------------------------------------------------------


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, TensorDescriptor):
        return [value.base]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    value = getattr(value, "base", value) if type(value).__name__ == "TensorWrapper" else value
    return [value] if isinstance(value, torch.Tensor) else []


class _Veil:
    """Keeps what tensors hold while the host looks."""

    def __init__(self) -> None:
        self.hidden: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    @staticmethod
    def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def lift(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Puts back what these tensors hold; -> those that were hidden."""
        lifted = []
        with _disable_current_modes():
            for tensor in tensors:
                found = self.hidden.pop(tensor.untyped_storage().data_ptr(), None)
                if found is not None:
                    self._bytes(found[0]).copy_(found[1])
                    lifted.append(tensor)
        return lifted

    def lower(self, tensors: Sequence[torch.Tensor]) -> None:
        with _disable_current_modes():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                place = storage.data_ptr()
                if place and place not in self.hidden:
                    held = self._bytes(storage)
                    self.hidden[place] = storage, held.clone()
                    held.zero_()


class _Host(TorchDispatchMode):
    """PyTorch's operators as the host calls them: those that compute are noted, and raise."""

    def __init__(self, veil: _Veil, also: Sequence[str]) -> None:
        super().__init__()
        self.veil, self.also, self.computed = veil, frozenset(also), list[str]()
        self.whole: set[int] = set()  # memory that PyTorch may not copy, since that is the task
        self.launching = False  # the interpreter itself sets, copies and compares while it runs a kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _FREE or (self.launching and name in _OF_INTERPRETER):
            return func(*args, **(kwargs or {}))
        if name not in _MOVING and name not in self.also:
            name = {"_local_scalar_dense": "item(), which the host waits for"}.get(name, name)
            self.computed.append(name)
            raise RuntimeError(f"PyTorch computes: {name}")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in _COPYING and any(tensor.untyped_storage().data_ptr() in self.whole for tensor in tensors):
            self.computed.append(f"{name}, and copying is the task")
            raise RuntimeError(f"PyTorch copies: {name}")
        lifted = self.veil.lift(tensors)
        result = func(*args, **(kwargs or {}))
        if lifted:
            self.veil.lower([*lifted, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


def _foreign_value(value: Any) -> str | None:
    """The kind of a value that is none of a kernel's: the interpreter takes whatever Python has."""
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(_foreign_value, value)), None)
    plain = isinstance(value, (bool, int, float, str, torch.Tensor, torch.dtype, types.NoneType))
    home = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    home = (getattr(value, "__module__", None) or home) if isinstance(value, (types.FunctionType, type)) else home
    if plain or home.split(".")[0] in ("triton", "math"):
        return None
    return f"a {type(value).__name__}"


def _foreign(function: Any) -> str | None:
    """What a kernel, or one that it calls, takes from around it without its being of Triton's language."""
    waiting, known = [function], set[Any]()
    while waiting:
        code = (function := waiting.pop()).__code__
        if code in known:
            continue
        known.add(code)
        around = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for part in [code, *(constant for constant in code.co_consts if isinstance(constant, types.CodeType))]:
            for step in dis.get_instructions(part):
                if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") or step.argval not in around:
                    continue
                name, value = step.argval, around[step.argval]
                if isinstance(value, (triton_interpreter.InterpretedFunction, jit.JITFunction)):
                    waiting.append(value.fn)
                elif value is vars(builtins).get(name):
                    if name not in judge_source.IN_KERNELS:
                        return name
                elif _foreign_value(value):
                    return name
    return None


@contextlib.contextmanager
def _launches_see(veil: _Veil, host: _Host) -> Iterator[list[str]]:
    """Within the context kernels see what tensors hold; yields the names of those that were launched."""
    launched: list[str] = []
    interpret, run = triton_interpreter.GridExecutor.__call__, jit.JITFunction.run

    def of_host(grid: Any, tensors: Sequence[torch.Tensor], mode: contextlib.AbstractContextManager[Any]) -> Any:
        """A grid that is a function runs on the host, in the middle of a launch."""

        def asked(meta: Any) -> Any:
            launching = host.launching
            veil.lower(tensors)
            host.launching = False
            try:
                with mode:
                    return grid(meta)
            finally:
                host.launching = launching
                veil.lift(tensors)

        return asked if callable(grid) else grid

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(self.fn.__name__)
        given = [*args, *kwargs.values()]
        if foreign := _foreign(self.fn) or next(filter(None, map(_foreign_value, given)), None):
            raise RefusedError(f"a kernel is given {foreign}, which no compiler takes")
        tensors = _tensors(given)
        self.grid = of_host(self.grid, tensors, contextlib.nullcontext())
        self.pre_run_hooks = []
        veil.lift(tensors)
        host.launching = True  # what PyTorch is asked for in a kernel's body, as the interpreter runs it, is seen too
        try:
            with interpreter.widened(given) as wide:
                interpret(self, *wide[: len(args)], **dict(zip(kwargs, wide[len(args) :], strict=True)))
        finally:
            host.launching = False
        veil.lower(tensors)

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        tensors = _tensors([*args, *kwargs.values()])
        kwargs["grid"] = of_host(kwargs.get("grid"), tensors, host)
        self.pre_run_hooks = []
        veil.lift(tensors)
        with _disable_current_modes():
            result = run(self, *args, **kwargs)
        veil.lower(tensors)
        return result

    with (
        mock.patch.object(triton_interpreter.GridExecutor, "__call__", interpreted),
        mock.patch.object(jit.JITFunction, "run", compiled),
    ):
        yield launched


def _tuned_by_chance(_: Any, call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """What ``triton.autotune`` is told of a configuration where nothing is timed: it runs, and whichever is taken is judged."""
    call()
    return [random.random()] * len(quantiles)


# --- the process as it should be ------------------------------------------------------------------------------------------


def _names() -> dict[tuple[str, str], Any]:
    """What a solution might replace to be judged otherwise: the clocks, what compares, the interpreter, PyTorch."""
    owners = {
        "time": time, "torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor,
        "torch.cuda": torch.cuda, "torch.cuda.Event": torch.cuda.Event, "torch.linalg": torch.linalg,
        "torch.testing": torch.testing, "kernelbook.check": check, "kernelbook.lab.timing": timing,
        "triton.language": tl, "triton's interpreter": triton_interpreter,
        "GridExecutor": triton_interpreter.GridExecutor, "InterpreterBuilder": triton_interpreter.InterpreterBuilder,
        "JITFunction": jit.JITFunction, "the judge": sys.modules[__name__], "the judge's host": _Host, "the judge's veil": _Veil,
    }  # fmt: skip
    return {
        (where, name): value
        for where, owner in owners.items()
        for name, value in vars(owner).items()
        if callable(value) or not where.startswith("torch")  # PyTorch notes there itself what it has set up
    }


def _changed(before: Mapping[tuple[str, str], Any]) -> str | None:
    now = _names()
    for (where, name), value in before.items():
        if now.get((where, name)) is not value and not name.startswith("__"):
            return f"{where}.{name}"
    return None


def _limit(memory: int, seconds: int) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 256 * _MEBI), (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_AS, memory)] if memory else []),
    ):  # fmt: skip
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


# --- one solution ---------------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """Why a call does not count, in a sentence."""


class _Session:
    def __init__(self, request: Mapping[str, Any]) -> None:
        self.text = Path(request["file"])
        self.also, self.copies = request["also"], request["copies"]
        self.before = _names()
        self.function = self._load(request["function"])
        self._honest()

    def _load(self, name: str) -> Callable[..., Any]:
        spec = importlib.util.spec_from_file_location("solution", self.text)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["solution"] = module
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            raise RefusedError(f"the file defines no function {name}")
        return function

    def _honest(self) -> None:
        if changed := _changed(self.before):
            raise RefusedError(f"the code replaces {changed} in the process that judges it")

    def sentence(self, error: BaseException) -> str:
        """What an exception says, with the line of the solution where it came up."""
        found: BaseException | None = error
        watched = ""
        while found is not None:
            if type(found).__name__ == "WrongAccessError":
                watched = str(found).removeprefix("watched: ")
            elif isinstance(found, RefusedError):
                watched = str(found)
            found = found.__cause__ or found.__context__
        inner = error.__cause__ or error
        frames = (*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(inner.__traceback__))
        lines = [frame.lineno for frame in frames if frame.filename == str(self.text) and frame.lineno]
        where = f", at line {lines[-1]}: {self._line(lines[-1])}" if lines else ""
        told = str(inner).strip().splitlines() or [""]
        return (watched or f"it raised {type(inner).__name__}: {told[0][:300]}") + where

    def _line(self, number: int) -> str:
        """The text of a line: whoever wrote in a notebook has not seen the file, and its numbers say nothing there."""
        lines = self.text.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"`{lines[number - 1].strip()[:100]}`" if number <= len(lines) else "?"

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the function once for each of ``request["series"]``, whose data lie in the same memory one after the other."""
        device = runtime.DEVICE
        series: list[dict[str, Any]] = request["series"]
        first = {name: self._on(device, value) for name, value in series[0].items()}
        results = []
        for number, values in enumerate(series):
            if number:
                for name, value in values.items():
                    if isinstance(value, torch.Tensor):
                        _storage_bytes(first[name]).copy_(_storage_bytes(value))
                    else:
                        first[name] = value
            results.append(self._one(first, request, number))
        return {"results": results}

    @staticmethod
    def _on(device: torch.device, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = torch.empty(0, dtype=value.dtype, device=device)
        bytes_ = _storage_bytes(value).to(device, copy=True)
        return moved.set_(bytes_.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def _one(self, inputs: dict[str, Any], request: Mapping[str, Any], number: int) -> dict[str, Any]:
        veil = _Veil()
        host = _Host(veil, self.also)
        given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        if self.copies:
            host.whole |= {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.is_floating_point()}
        for name in request["grads"]:
            given[name].requires_grad_()
        upstream = [self._on(runtime.DEVICE, up) for up in request["upstream"][number]]
        veil.lower([*tensors, *upstream])
        threads = threading.active_count()
        with _launches_see(veil, host) as launched, host:
            try:
                outputs = self.function(**given)
            except Exception as error:
                raise RefusedError(
                    f"PyTorch computes in it: {host.computed[0]}" if host.computed else self.sentence(error)
                ) from error
            outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            self._plain(outputs, tensors, "the result")
            kept = self._copies(veil, outputs)
            grads: Sequence[Any] = ()
            if request["grads"]:
                wanted = [given[name] for name in request["grads"]]
                if not all(out.requires_grad for out in outputs):
                    raise RefusedError("its result has no gradient: nothing joined it to autograd")
                try:
                    grads = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
                except Exception as error:
                    found = host.computed and f"PyTorch computes in its backward pass: {host.computed[0]}"
                    raise RefusedError(found or self.sentence(error)) from error
                missing = [name for name, grad in zip(request["grads"], grads, strict=True) if grad is None]
                if missing:
                    raise RefusedError(f"there is no gradient by {missing[0]}")
                self._plain(grads, [], "a gradient")
            kept_grads = self._copies(veil, grads)
            results = [StorageWeakRef(found.untyped_storage()) for found in (*outputs, *grads)]
        if host.computed:
            raise RefusedError(f"PyTorch computes in it: {host.computed[0]}")
        if threading.active_count() > threads:
            raise RefusedError("it leaves a thread at work")
        self._honest()
        veil.lift(tensors)
        del outputs, grads, host
        veil.hidden.clear()
        gc.collect()
        if not all(result.expired() for result in results):
            raise RefusedError("it keeps the memory of a result, which a later call may change or return again")
        if runtime.DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return {
            "outputs": [out.cpu() for out in kept],
            "grads": [grad.cpu() for grad in kept_grads],
            "inputs": {
                n: _storage_bytes(v).to("cpu", copy=True) for n, v in inputs.items() if isinstance(v, torch.Tensor)
            },
            "launched": launched,
        }

    @staticmethod
    def _plain(found: Sequence[Any], inputs: Sequence[torch.Tensor], what: str) -> None:
        for tensor in found:
            if type(tensor) is not torch.Tensor:
                raise RefusedError(f"{what} must be a plain torch.Tensor, got {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.device.type != runtime.DEVICE.type:
                raise RefusedError(
                    f"{what} must be a dense tensor on {runtime.DEVICE}, got {tensor.layout} on {tensor.device}"
                )
            places = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
            if tensor.numel() and tensor.untyped_storage().data_ptr() in places:
                raise RefusedError(f"{what} lies in the memory of an input")

    @staticmethod
    def _copies(veil: _Veil, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on this stream, now."""
        lifted = veil.lift(found)
        with _disable_current_modes():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in found]
        veil.lower(lifted)
        return copies

    def far(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the function with the first and the last row of a matrix so many elements apart, if there is room for that."""
        inputs = {name: self._on(runtime.DEVICE, value) for name, value in request["inputs"].items()}
        name, value = next(
            (n, v) for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() == 2 and len(v) > 1
        )
        apart = request["elements"] // (len(value) - 1) + 1
        size = (len(value) - 1) * apart + value[0].numel()
        if timing.free_bytes() < size * value.element_size() * 5 // 4:
            return {"outputs": None}
        memory = torch.empty(size, dtype=value.dtype, device=value.device)
        inputs[name] = memory.as_strided(value.shape, (apart, 1)).copy_(value)
        host = _Host(veil := _Veil(), self.also)
        with _launches_see(veil, host), host:
            found = self.function(**inputs)
            kept = self._copies(veil, found if isinstance(found, (tuple, list)) else (found,))
        return {"outputs": [out.cpu() for out in kept]}

    def time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Times calls on new data each, in memory that they share, with a cold cache; returns one call's result.

        Before each call its data are made from a seed, on the caller's stream. Which call's result is asked for only whoever
        sent the request knows beforehand.
        """
        inputs = {name: self._on(runtime.DEVICE, value) for name, value in request["inputs"].items()}
        seeds, wanted = request["seeds"], request["wanted"]
        names = scrambled(inputs, request["kept"])
        kept: list[torch.Tensor] = []
        host = _Host(_Veil(), self.also)
        generator = torch.Generator(runtime.DEVICE)
        calls = iter(range(10**9))
        last: Any = None

        def refresh() -> None:
            seed = seeds[(number := next(calls)) % len(seeds)]
            if last is not None and number == wanted + 1:
                kept.extend(tensor.detach().clone() for tensor in last)
            for name in names:
                scramble(inputs[name], generator.manual_seed(seed))

        def call() -> None:
            nonlocal last
            with host:
                result = self.function(**inputs)
            last = result if isinstance(result, (tuple, list)) else (result,)

        timed = timing.measure(call, rep_ms=request["rep_ms"], before=refresh)
        torch.cuda.synchronize()
        self._honest()
        return {"ms": timed.ms, "p20": timed.p20, "p80": timed.p80, "kept": [tensor.cpu() for tensor in kept]}

    def repeat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """So many calls in a row, and the wait for the device: whoever sent the request has a clock of its own."""
        if request["inputs"]:
            self.held = {name: self._on(runtime.DEVICE, value) for name, value in request["inputs"].items()}
        for _ in range(request["calls"]):
            self.function(**self.held)
        torch.cuda.synchronize()
        return {}


def scrambled(inputs: Mapping[str, Any], kept: Sequence[str]) -> list[str]:
    """The inputs that get new numbers before each call that is timed."""
    return [
        name
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in kept
    ]


def scramble(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Turns signs at random: new numbers of the same sizes, without other memory than a mask."""
    tensor.mul_(torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device, dtype=torch.int8) * 2 - 1)


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _session(channel: socket.socket) -> None:
    """One solution from its loading to its end; every answer is a result or a sentence."""
    request = receive(channel)
    os.setsid()
    os.chdir(request["folder"])
    printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.environ["HOME"] = os.environ["TMPDIR"] = request["folder"]
    send(channel, {"pid": os.getpid()})
    _limit(request["memory"], request["seconds"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(check.poisoned_empty())
        if runtime.INTERPRET and request["watched"]:
            from kernelbook.lab.watched_memory import watched

            stack.enter_context(watched())
            stack.enter_context(mock.patch.object(Autotuner, "do_bench", _tuned_by_chance))
        session: _Session | None = None
        while True:
            if request.get("first"):  # what earlier cases printed says nothing of this one
                os.ftruncate(1, 0)
                os.lseek(1, 0, os.SEEK_SET)
            try:
                if session is None:
                    session, answer = _Session(request), {}
                else:
                    answer = getattr(session, request["do"])(request)  # call, far, time or repeat
            except RefusedError as refused:
                answer = {"refused": str(refused)}
            except MemoryError:
                answer = {"refused": "it took more memory than the judge allows"}
            except BaseException as error:  # SystemExit too: a solution that ends the process is none
                first = str(error).partition("\n")[0]
                answer = {"refused": f"it raised {type(error).__name__}: {first[:300]}"}
            sys.stdout.flush()
            send(channel, answer)
            try:
                request = receive(channel)
            except EOFError:
                return


def _main(control: socket.socket, serve: bool) -> None:
    import torch._dynamo  # the first mode would, which takes seconds, and it wraps some of torch's functions

    torch.set_num_threads(1)
    remembered_types.remember()
    gc.collect()
    gc.freeze()  # what a solution leaves is looked for after each call, and not among all of PyTorch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever stops a notebook stops this too, and reads no traceback
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if not serve or os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            try:
                _session(socket.socket(fileno=descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:] == ["serve"])
