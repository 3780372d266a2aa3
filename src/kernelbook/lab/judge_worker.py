"""The process in which the judge runs a reader's code: it calls the code with inputs that it is given, and hands back what came.

The reference and the comparison are in another process. Here

- PyTorch may allocate, view, copy and convert, and what else a task allows: whatever computes is refused (:class:`_Host`);
- new memory is NaN, and in the interpreter memory is watched (:mod:`kernelbook.lab.watched_memory`) and types round as a GPU's do
  (:mod:`kernelbook.lab.interpreted_types`);
- ``compile`` records what is launched instead of running it, and compiles it for GPUs that need not be there.

``python -m kernelbook.lab.judge_worker FD serve`` reads sockets from a socket, and forks a process with limits for each;
without ``serve`` it takes one and keeps to this process, which a GPU needs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import random
import re
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kernelbook import check, runtime
from kernelbook.lab import compiled, interpreted_types, remembered_types, timing

# isort: split
from triton.compiler.errors import CompilationError
from triton.runtime import interpreter, jit
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError

COMPILED_FOR = ("sm_80", "sm_90")
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
# What to do about an error of Triton's compiler, by words of it.
_ADVICE = {
    "Cannot access global variable": "Pass it to the kernel as an argument, or say tl.constexpr(...) where it is defined.",
    "Input shapes should have": "tl.dot takes tiles of at least 16 in every direction: make the tile larger, and mask it.",
    "unsupported AST node": "A kernel is no Python: no break, no lists and dicts, no try. Use a mask, tl.where or a loop with a fixed end.",
    "must be a power of 2": "Take triton.next_power_of_2(size) for the tile, and mask what lies beyond the size.",
    "arange's arguments must be of type tl.constexpr": "Declare the size in the kernel's signature: BLOCK: tl.constexpr.",
    "is not defined": "A kernel sees its arguments, tl and other kernels of the file.",
    "fp32": "Convert right after the load: .to(tl.float32).",
    "shared memory": "Take smaller tiles, or a smaller num_stages.",
    "active drivers": "There is no GPU here: take the device of the inputs, x.device.",
    "PassManager": "A layout does not suit an instruction: an asynchronous copy takes at least 4 bytes of neighbours, all masked alike.",
    "no attribute": "A kernel calls tl.* and other kernels of the file; NumPy and PyTorch stay outside.",
}


def _advice(told: str) -> str:
    return next((f". {advice}" for words, advice in _ADVICE.items() if words in told), "")


class RefusedError(Exception):
    """Why a call or a solution is not right, in a sentence. ``kind``: what went wrong, for the hint; "rule" and "load" are no judgement."""

    def __init__(self, told: str, kind: str = "") -> None:
        super().__init__(told)
        self.kind = kind


# --- the one rule: PyTorch may not compute --------------------------------------------------------------------------------


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Host(TorchDispatchMode):
    """PyTorch's operators as the host calls them: those that compute raise. ``whole``: memory that PyTorch may not copy either."""

    def __init__(self, also: Sequence[str], whole: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.also, self.whole, self.refused = frozenset(also), {_place(tensor) for tensor in whole}, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in _FREE | _MOVING | self.also:
            name = {"_local_scalar_dense": "item(), for which the host waits"}.get(name, name)
            self.refused = f"PyTorch computes in it: {name}"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in _COPYING and any(_place(tensor) in self.whole for tensor in tensors):
            self.refused = f"PyTorch copies in it: {name}, and copying is the task"
        if self.refused:
            raise RefusedError(self.refused, "rule")
        return func(*args, **(kwargs or {}))


def _launches_are_free() -> contextlib.AbstractContextManager[Any]:
    """Within the context what a launch itself does with tensors is no operator of the host's."""
    interpret = interpreter.GridExecutor.__call__

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            interpret(self, *args, **kwargs)

    return mock.patch.object(interpreter.GridExecutor, "__call__", interpreted)


# --- one solution ---------------------------------------------------------------------------------------------------------


class _Session:
    file = Path()
    function: Any = None

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Imports the file, and finds its function."""
        self.file = Path(request["file"])
        random.seed(request["seed"])
        spec = importlib.util.spec_from_file_location("solution", self.file)
        assert spec is not None and spec.loader is not None
        sys.modules["solution"] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise RefusedError(
                f"the file cannot be loaded: {self._says(error)}{_advice(str(error))}", "load"
            ) from error
        self.function = getattr(module, request["function"], None)
        if not callable(self.function):
            raise RefusedError(f"the file defines no function {request['function']}", "load")
        return {}

    # --- what an error says ---

    def _line(self, number: int) -> str:
        """A line's number and its text: whoever wrote in a notebook has not seen the file."""
        lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"line {number}: `{lines[number - 1].strip()[:100]}`" if 0 < number <= len(lines) else f"line {number}"

    def _says(self, error: BaseException) -> str:
        """An exception and the line of the solution where it came up."""
        inner = error.__cause__ or error
        frames = (*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(inner.__traceback__))
        lines = [frame.lineno for frame in frames if frame.filename == str(self.file) and frame.lineno]
        if isinstance(inner, SyntaxError) and inner.lineno:
            lines = [inner.lineno]
        told = (str(inner).strip().splitlines() or [""])[0][:300]
        return f"it raised {type(inner).__name__}: {told}" + (f", at {self._line(lines[-1])}" if lines else "")

    def refusal(self, error: BaseException) -> RefusedError:
        """The sentence for whatever a call raised: the rule, the watch, the compiler, or the exception itself."""
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        for found in chain:
            if isinstance(found, RefusedError):
                return found
            if type(found).__name__ in ("WrongAccessError", "GluonError"):
                where = self._says(error).rpartition(", at ")[2]
                return RefusedError(f"{str(found).removeprefix('watched: ')}, at {where}", found.kind)  # type: ignore[attr-defined]
        compilers = [found for found in chain if isinstance(found, CompilationError)]
        if compilers or "PassManager" in str(error) or type(error).__name__ in ("OutOfResources", "PTXASError"):
            return self._of_compiler([error, *compilers][-1])
        if isinstance(error, MemoryError):
            return RefusedError("it took more memory than the judge allows")
        advice = _advice(str(chain[-1])) if any(isinstance(found, InterpreterError) for found in chain) else ""
        return RefusedError(f"{self._says(error)}{advice}", "compile" if advice else "")

    def _of_compiler(self, error: BaseException) -> RefusedError:
        """What the compiler said, the line that it said it of, and what to do."""
        told = str(error.__cause__ or getattr(error, "error_message", None) or str(error).splitlines()[-1])
        source, number = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", 0)
        line = source.splitlines()[number - 1].strip() if source and number else ""
        where = f", at `{line[:100]}`" if line else ""
        first = re.sub(
            r"^\w+\(['\"]|['\"]\)$", "", " ".join(told.split()).partition(". ")[0]
        )  # of an exception's repr()
        return RefusedError(f"it does not compile: {first}{where}{_advice(told)}", "compile")

    # --- what is asked for ---

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the function once for each of ``request["series"]``, whose data lie in the same memory one after the other.

        What each call returned is looked at after the last one: a result that a later call changes is wrong.
        """
        inputs: dict[str, Any] = {name: _on_device(value) for name, value in request["series"][0].items()}
        results = []
        for values, upstream in zip(request["series"], request["upstream"], strict=True):
            tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            for name, value in tensors.items():
                _storage_bytes(inputs[name]).copy_(_storage_bytes(value))
            inputs |= {name: value for name, value in values.items() if name not in tensors}
            results.append(self._called(inputs, request, upstream))
            for name, value in tensors.items():
                if not torch.equal(_storage_bytes(inputs[name]).cpu(), _storage_bytes(value)):
                    raise RefusedError(f"it writes into {name}, an input, or into the memory around it", "mask")
        return {"results": [_answer(*result) for result in results]}

    def _called(self, inputs: Mapping[str, Any], request: Mapping[str, Any], upstream: Sequence[Any]) -> _Result:
        """The outputs of one call, and the gradients by what the task differentiates by."""
        wanted: Sequence[str] = request["grads"] if upstream else ()
        given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        for name in wanted:
            given[name].requires_grad_()
        upstream = [_on_device(up) for up in upstream]
        host = _Host(request["also"], [x for x in tensors if request["copies"] and x.is_floating_point()])
        grads: Sequence[Any] = ()
        try:
            with _launches_are_free(), host:
                outputs = self.function(**given)
                outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
                _plain(outputs, tensors, "the result")
                if wanted and not all(out.requires_grad for out in outputs):
                    raise RefusedError(
                        "its result has no gradient: return F.apply(...) of an autograd.Function", "grads"
                    )
                if wanted:
                    grads = torch.autograd.grad(outputs, [given[name] for name in wanted], upstream, allow_unused=True)
        finally:
            if host.refused:  # also where the solution caught it, and went on without it
                raise RefusedError(host.refused, "rule")
        missing = [name for name, grad in zip(wanted, grads, strict=True) if grad is None]
        if missing:
            told = f"there is no gradient by {missing[0]}: backward returns one for each argument of forward"
            raise RefusedError(told, "grads")
        _plain(grads, [], "a gradient")
        return outputs, grads

    def compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Compiles what the function launches for each of ``request["cases"]``; raises what the compiler says."""
        launches: dict[Any, None] = {}

        def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            launches[compiled._record(kernel, args, kwargs)] = None

        with mock.patch.object(jit.JITFunction, "run", record), runtime.compiling_for(COMPILED_FOR[-1]):
            for inputs, upstream in request["cases"]:
                self._called(inputs, request, upstream)
        known: set[Any] = set()
        targets: set[str] = set()
        for launch in launches:
            types = launch.kernel, frozenset(kind for _, kind in launch.signature if kind.startswith("*"))
            newest = types in known or launch.kernel.is_gluon()  # a Gluon kernel is of one generation
            known.add(types)
            targets |= {*COMPILED_FOR[newest:]}
            for target in COMPILED_FOR[newest:]:
                found = compiled._compile(launch, target, ())
                most = runtime.TARGETS[target].shared_memory_per_program
                if found.shared_bytes > most:
                    told = f"{found.name} needs {found.shared_bytes} bytes of shared memory, and {target} has {most} a program"
                    raise RefusedError(f"{told}. {_ADVICE['shared memory']}", "compile")
        return {"compiled": sorted(targets)}

    def time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Times calls with a cold cache, and returns the last one's result."""
        inputs = {name: _on_device(value) for name, value in request["inputs"].items()}
        last: list[Any] = []

        def call() -> None:
            last[:] = [self.function(**inputs)]

        ms = timing.measure(call, rep_ms=request["rep_ms"]).ms
        return {"ms": ms, **_answer(last[0] if isinstance(last[0], (tuple, list)) else last, ())}


_Result = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


def _answer(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Copies that share no memory, and how the outputs lay."""
    ours, by = (
        [x.detach().cpu().clone(memory_format=torch.contiguous_format) for x in part] for part in (outputs, grads)
    )
    return {"outputs": ours, "grads": by, "contiguous": all(out.is_contiguous() for out in outputs)}


def _on_device(value: Any) -> Any:
    """A copy of a tensor, in memory of its own that is laid out alike."""
    if not isinstance(value, torch.Tensor):
        return value
    bytes_ = _storage_bytes(value).to(runtime.DEVICE, copy=True)
    moved = torch.empty(0, dtype=value.dtype, device=runtime.DEVICE)
    return moved.set_(bytes_.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _plain(found: Sequence[Any], inputs: Sequence[torch.Tensor], what: str) -> None:
    places = {_place(tensor) for tensor in inputs if tensor.numel()}
    for tensor in found:
        if tensor is None:
            raise RefusedError("it returned None: is its `return` missing?", "return")
        if not isinstance(tensor, torch.Tensor):
            raise RefusedError(f"{what} must be a tensor, got {type(tensor).__name__}", "return")
        if tensor.device.type != runtime.DEVICE.type:
            raise RefusedError(f"{what} must be a tensor on {runtime.DEVICE}, got one on {tensor.device}", "return")
        if tensor.numel() and _place(tensor) in places:
            raise RefusedError(f"{what} lies in the memory of an input: make new memory with torch.empty", "return")


# --- the process ------------------------------------------------------------------------------------------------------------


def _session(channel: Connection) -> None:
    """One solution from its loading to its end; every answer is a result or a sentence."""
    request = pickle.loads(channel.recv_bytes())
    os.setsid()
    os.chdir(Path(request["file"]).parent)
    os.dup2(os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of NumPy and Triton, which the solution did not print
    channel.send_bytes(pickle.dumps({"pid": os.getpid()}))
    limits = {resource.RLIMIT_CPU: request["seconds"], resource.RLIMIT_FSIZE: 256 * 2**20, resource.RLIMIT_CORE: 0}
    limits |= {resource.RLIMIT_AS: request["memory"]} if request["memory"] else {}
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    with contextlib.ExitStack() as stack:
        stack.enter_context(check.poisoned_empty())
        if runtime.INTERPRET:
            from kernelbook.lab.gluon import interpreted
            from kernelbook.lab.watched_memory import watched

            stack.enter_context(watched(tiles_too=request["strided"]))
            stack.enter_context(interpreted(request["seed"]))
            interpreted_types.compute()
        if runtime.DEVICE.type == "cpu":
            # Nothing is timed: whichever configuration triton.autotune takes is judged.
            drawn = lambda _, __, quantiles: [random.random()] * len(quantiles)  # noqa: E731
            stack.enter_context(mock.patch.object(Autotuner, "do_bench", drawn))
        session = _Session()
        while True:
            os.ftruncate(1, 0)  # what earlier cases printed says nothing of this one
            os.lseek(1, 0, os.SEEK_SET)
            try:
                answer = getattr(session, request["do"])(request)  # load, call, compile or time
            except BaseException as error:  # SystemExit too: a solution that ends the process is none
                refused = session.refusal(error)
                answer = {"refused": str(refused), "kind": refused.kind}
            sys.stdout.flush()
            channel.send_bytes(pickle.dumps(answer))
            try:
                request = pickle.loads(channel.recv_bytes())
            except EOFError:
                return


def _main(control: socket.socket, serve: bool) -> None:
    import torch._dynamo  # the first mode would, which takes seconds

    torch.set_num_threads(1)
    if runtime.INTERPRET:
        interpreted_types.represent()
        remembered_types.remember()
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
                _session(Connection(descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:] == ["serve"])
