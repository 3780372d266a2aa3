"""Is a reader's kernel right, and how fast? ``python -m kernelbook judge FILE --task NAME``, or ``judge(function, "softmax")``.

A solution is a function with kernels of its own. The judge

1. calls it in another process with limits (:mod:`kernelbook.lab.judge_worker`): every size and every scale in every dtype, one row,
   primes, more than a tile, nothing at all, strides, NaN between and around the elements, offsets beyond 32 bits, new numbers in
   the same memory, and gradients where the task has them, also by a ``dy`` that is expanded or transposed;
2. compares what comes back by the rule of :mod:`kernelbook.check`, in this process, with a reference that the other one has not;
3. compiles what was launched for GPUs that need not be there;
4. where there is a GPU, does the first two on it with kernels compiled, and takes the time.

The first case that fails is the smallest of its kind, since cases go from small to large. Then one thing of the case after the
other is undone: what makes it right is what is wrong, and the hint is about that. The judge is for people who judge themselves:
it resists mistakes, not forgery.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelbook import check, runtime
from kernelbook.lab import judge_source, judge_worker, tasks, timing
from kernelbook.lab.tasks import TASKS, Draw, Task

# isort: split
import triton

__all__ = ["HINTS", "TASKS", "Draw", "Judgement", "Speed", "Task", "judge"]

SECONDS = 120.0  # for one message to the other process and its answer
REDRAWS = 7  # of a case whose error is above the limit, before it counts: PyTorch's own error may be small by luck
NOT_JUDGED = ("rule", "load")  # kinds of refusals
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

# What to look at, by what went wrong; a task may have words of its own.
HINTS = {
    "mask": "Give every load and every store mask=offs < n, and a load also other=: a number that changes nothing.",
    "tail": "Sizes of a power of two are right, so look beyond the end: what does a masked element add (other=0.0, or -inf before "
    "an exponential), and is a mean divided by the size and not by the tile?",
    "stride": "Contiguous inputs are right. Each tensor has strides of its own: pass x.stride(0) and x.stride(1) of every one, and make "
    "the result with torch.empty(shape, ...): torch.empty_like(x) has the strides of x.",
    "dy": "A contiguous dy is right. y.sum().backward() gives a dy whose strides are 0, another layer one that is transposed: pass its strides.",
    "dtype": "float32 is right: convert right after the load, x.to(tl.float32), and round once, at the store.",
    "scale": "Numbers around 1 are right: does something overflow or cancel? Subtract a row's maximum before exp; add squares in float32.",
    "overflow": "row = tl.program_id(0).to(tl.int64), and columns by tl.arange(0, BLOCK).to(tl.int64), before they meet a stride.",
    "race": "Two programs meet in one element: tl.atomic_add, or a place of its own for each program and a second launch that adds them.",
    "overlap": "Each element of the result belongs to one program: look at the offsets of the store, and at the strides in them.",
    "barrier": "What one thread stores another may load only after tl.debug_barrier(); values in registers need no memory.",
    "contiguous": "torch.empty(M, N, ...) with the shape of the result is contiguous; .t() and empty_like of a transposed tensor are not.",
    "kept": "One call is right: every call needs new memory for its result, and nothing may be kept by shape or by address.",
    "compile": "The interpreter runs a kernel as Python; the compiler takes tl.*, other kernels of the file, and constants of tl.constexpr.",
    "return": "The function returns new tensors of the shapes that the task names, on the device of its inputs.",
    "grads": "class F(torch.autograd.Function) with forward(ctx, ...) and backward(ctx, dy); the function returns F.apply(...).",
}  # fmt: skip
_UNDONE = {
    "kept": "one call is right", "dy": "with a contiguous dy it is right", "stride": "contiguous, it is right",
    "dtype": "in float32 it is right", "scale": "numbers around 1 are right", "tail": "sizes of a power of two are right",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Speed:
    """Times in milliseconds with a cold cache on ``gpu``, at ``sizes``; ``bound_ms`` is what the bytes or products take at the least."""

    gpu: str
    sizes: str
    ms: float
    bound_ms: float
    torch_ms: float
    book_ms: float | None

    def __str__(self) -> str:
        others = f"PyTorch {self.torch_ms:.4g} ms" + (f", the book's {self.book_ms:.4g} ms" if self.book_ms else "")
        return f"{self.ms:.4g} ms for {self.sizes} on {self.gpu}: {self.bound_ms / self.ms:.0%} of the bound; {others}"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the judge says.

    Attributes:
        task: the task's name.
        sentence: the first thing that is wrong, with the smallest case that shows it; empty if all is right.
        cases: how many were right.
        kind: what went wrong, a key of :data:`HINTS`, or "rule" or "load" of what was not judged; empty if nothing is known.
        compiled: for which GPUs what was launched compiles, or why that was not tried.
        speed: on a GPU.
        hints: as many as were asked for; the first is about ``kind``.
        printed: what the failing case printed.
    """

    task: str
    sentence: str
    cases: int
    kind: str = ""
    compiled: str = ""
    speed: Speed | None = None
    hints: tuple[str, ...] = ()
    printed: str = ""

    @property
    def right(self) -> bool:
        return not self.sentence

    def __str__(self) -> str:
        if self.right:
            told = f"{self.task}: right, {self.cases} cases" + (f"; {self.compiled}" if self.compiled else "")
        else:
            told = f"{self.task}: {'not judged' if self.kind in NOT_JUDGED else 'not right'}: {self.sentence}"
        lines = [told, *([str(self.speed)] if self.speed else []), *(f"Hint: {hint}" for hint in self.hints)]
        return "\n".join(lines + ([f"In the last case it printed:\n{self.printed}"] if self.printed else []))

    def require(self) -> Judgement:
        """Returns itself, or raises ``check.CheckError``."""
        if not self.right:
            raise check.CheckError(str(self))
        return self


# --- the other process --------------------------------------------------------------------------------------------------


class _Server:
    """A process that has imported what solutions need. ``how``: "interpret" and "compile" fork one for each; "gpu" serves one."""

    def __init__(self, how: str) -> None:
        own, other = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if how != "gpu":
            environment |= {"TRITON_INTERPRET": "1" if how == "interpret" else "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernelbook.lab.judge_worker", str(other.fileno()), *(["serve"] if how != "gpu" else [])],
            env=environment, pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        other.close()
        self.control = own

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


_servers: dict[str, _Server] = {}


def _server(how: str) -> _Server:
    """The server, started once; it ends with this process."""
    if how not in _servers or _servers[how].process.poll() is not None:
        _servers[how] = _Server(how)
        atexit.register(_servers[how].close)
    return _servers[how]


class _WrongError(Exception):
    """Why a solution is not right, in a sentence, and what kind of failure that is."""

    def __init__(self, told: str, kind: str = "") -> None:
        super().__init__(told)
        self.kind = kind


class _Solution:
    """A solution at work in a process of its own; one message is sent, and its answer read, before the next."""

    def __init__(self, server: _Server, text: str, function: str, task: Task, folder: Path, seed: int) -> None:
        self.folder, self.pid = folder, 0
        (folder / "solution.py").write_text(text, encoding="utf-8")
        self.channel, other = socket.socketpair()
        socket.send_fds(server.control, [b"."], [other.fileno()])
        other.close()
        self.channel.settimeout(SECONDS)
        memory = 0 if runtime.DEVICE.type == "cuda" else 16 * 2**30  # addresses, of which CUDA takes many
        self.send(
            {
                "do": "load", "folder": str(folder), "file": str(folder / "solution.py"), "function": function, "also": list(task.also),
                "copies": task.copies, "memory": memory, "seconds": 600, "seed": seed,
            }
        )  # fmt: skip
        self.pid = self.answer()["pid"]

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            judge_worker.send(self.channel, message)
        except OSError:
            raise _WrongError("its process has ended") from None

    def answer(self) -> dict[str, Any]:
        try:
            answer = judge_worker.receive(self.channel)
        except TimeoutError:
            raise _WrongError(f"it did not answer within {SECONDS:.0f} seconds") from None
        except (EOFError, OSError):
            raise _WrongError("its process ended: a crash, or a limit on time or memory") from None
        if "refused" in answer:
            raise _WrongError(_plain(answer["refused"]), answer["kind"])
        return answer

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.send(message)
        return self.answer()

    def printed(self) -> str:
        found = self.folder / "printed.txt"
        return _plain(found.read_text(errors="replace")[:4000]).strip() if found.exists() else ""

    def close(self) -> None:
        self.channel.close()
        if self.pid > 1:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _plain(text: str) -> str:
    """Without what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text.expandtabs())


@contextlib.contextmanager
def _solution(how: str, text: str, function: str, task: Task, seed: int) -> Iterator[_Solution]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = _Server("gpu") if how == "gpu" else _server(how)
        if how == "gpu":
            stack.callback(server.close)
        solution = _Solution(server, text, function, task, Path(folder), seed)
        stack.callback(solution.close)
        yield solution


# --- the cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Case:
    sizes: Mapping[str, int]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    scale: float = 1.0
    dy: str = "contiguous"
    calls: int = 1

    def __str__(self) -> str:
        words = [" ".join(f"{name}={size}" for name, size in self.sizes.items()), str(self.dtype).removeprefix("torch.")]
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"dy {self.dy}"] if self.dy != "contiguous" else []
        return ", ".join(words + ([f"numbers around {self.scale:g}"] if self.scale != 1 else []))

    @property
    def order(self) -> tuple[Any, ...]:
        """Small before large, plain before strange."""
        return self.calls > 1, _elements(self.sizes), self.layout != "contiguous", self.dy != "contiguous", self.scale != 1


def _elements(sizes: Mapping[str, int]) -> int:
    return math.prod(max(size, 1) for size in sizes.values())


def _drawn(task: Task, rng: random.Random) -> dict[str, int]:
    """Sizes between the task's own."""
    sizes = {}
    for name in task.sizes[0]:
        choices = [s[name] for s in task.sizes]
        if name in task.powers:
            sizes[name] = rng.choice(choices)
            continue
        step, low, high = task.multiple.get(name, 1), min(choices), max(choices)
        sizes[name] = max(step, round(math.exp(rng.uniform(math.log(low), math.log(high))) / step) * step)
    budget = 2 * max(map(_elements, task.sizes))
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        step = task.multiple.get(name, 1)
        if _elements(sizes) > budget and name not in task.powers:
            sizes[name] = max(step, sizes[name] * budget // _elements(sizes) // step * step)
    return sizes


def _cases(task: Task, rng: random.Random) -> list[_Case]:
    """Every size, every scale, every layout and every layout of ``dy`` in every dtype; nothing; and new numbers in old memory."""
    sizes = sorted(task.sizes, key=_elements)
    middle = sizes[len(sizes) // 2]
    cases = []
    for dtype in task.dtypes:
        cases += [_Case(s, dtype) for s in sizes]
        cases += [_Case(s, dtype, scale=scale) for scale in task.scales if scale != 1 for s in (middle, sizes[-1])]
        cases += [_Case(_drawn(task, rng), dtype, layout) for layout in (tasks.LAYOUTS if task.strided else tasks.LAYOUTS[:1])]
        cases += [_Case(_drawn(task, rng), dtype, dy=dy) for dy in tasks.LAYOUTS[1:] if task.grads]
        cases += [_Case({**middle, task.empty: 0}, dtype)] if task.empty else []
        cases += [_Case(middle, dtype, calls=3)]
    return sorted(cases, key=lambda case: case.order)


def _to(device: torch.device, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _list(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


class _Asked:
    """One case, drawn; what the solution has to give back for it."""

    def __init__(self, task: Task, case: _Case, seed: int) -> None:
        self.task = task
        self.series = [
            task.inputs(Draw(seed + i, case.dtype, case.layout, case.scale), **case.sizes) for i in range(case.calls)
        ]
        shapes = [out.shape for out in _list(task.reference(**self.series[0]))] if task.grads else []
        self.upstream = [[Draw(seed + 10_000 + i, case.dtype, case.dy)(*shape) for shape in shapes] for i in range(case.calls)]

    def message(self) -> dict[str, Any]:
        return {"do": "call", "series": self.series, "grads": list(self.task.grads), "upstream": self.upstream}

    def found(self, number: int, result: Mapping[str, Any], device: torch.device) -> list[_Found]:
        """What one call returned, beside the truth and PyTorch's own; raises where there is nothing to compare."""
        inputs, upstream = _to(device, self.series[number]), [up.to(device) for up in self.upstream[number]]
        plain = self.task.peer or self.task.reference
        truth, true_grads = check._run(self.task.reference, inputs, torch.float64, upstream or None, self.task.grads)
        base, base_grads = check._run(plain, inputs, None, upstream or None, self.task.grads)
        if len(result["outputs"]) != len(truth):
            raise _WrongError(f"it returned {len(result['outputs'])} tensors where {len(truth)} were expected", "return")
        names = ["the result"] if len(truth) == 1 else [f"result {i}" for i in range(len(truth))]
        by = [f"the gradient by {name}" for name in self.task.grads]
        found = [
            *((*parts, check.FORWARD_FACTOR) for parts in zip(names, result["outputs"], truth, base, strict=True)),
            *((*parts, check.GRADIENT_FACTOR) for parts in zip(by, result["grads"], true_grads, base_grads, strict=True)),
        ]
        return [_Found.of(name, out.to(device), true, plain_, factor) for name, out, true, plain_, factor in found]  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class _Found:
    """One tensor of a solution, with the verdict on it."""

    verdict: check.Verdict
    out: torch.Tensor
    truth: torch.Tensor

    @staticmethod
    def of(name: str, out: torch.Tensor, truth: torch.Tensor, base: torch.Tensor, factor: float) -> _Found:
        """Compares; raises for what no number describes: shape, dtype, integers, NaN."""
        if out.shape != truth.shape:
            raise _WrongError(f"{name} has shape {tuple(out.shape)}, expected {tuple(truth.shape)}", "return")
        if out.dtype != base.dtype:
            raise _WrongError(f"{name} is {out.dtype}, expected {base.dtype}", "return")
        if not base.is_floating_point():
            if bool((wrong := out != base).any()):
                many = f"{int(wrong.sum())} of {out.numel()}"
                raise _WrongError(f"{name} is wrong in {many} elements, {_first(wrong, out, base)}")
            return _Found(check.Verdict(name, 0.0, 0.0, 0.0, 0.0), out, truth)
        if bool((nan := torch.isnan(out) & ~torch.isnan(truth)).any()):
            many = f"{int(nan.sum())} of {out.numel()}"
            told = f"{name} has NaN in {many} elements, {_first(nan, out, truth)}: not written, or made of what lies outside"
            raise _WrongError(told)
        return _Found(check.compare(name, out, truth, base, factor=factor), out, truth)

    def __str__(self) -> str:
        """What a failed comparison says to a reader."""
        difference = (self.out.double() - self.truth).abs()
        allowed = max(4 * self.verdict.limit * float(self.truth.abs().max()), 1e-30)
        wrong = difference > min(allowed, float(difference.max()) * 0.999)
        return (
            f"{self.verdict.name} is off by {self.verdict.error:.1e} where {self.verdict.limit:.1e} is allowed; {int(wrong.sum())} of "
            f"{self.truth.numel()} elements stand out, {_first(wrong, self.out, self.truth)}"
        )


def _first(wrong: torch.Tensor, out: torch.Tensor, truth: torch.Tensor) -> str:
    """The first place that is wrong, with as many digits as it takes to see that."""
    place = tuple(torch.nonzero(wrong)[0].tolist())
    ours, true = float(out[place]), float(truth[place])
    digits = next((d for d in range(5, 18) if f"{ours:.{d}g}" != f"{true:.{d}g}"), 17)
    return f"the first at {list(place)}: {ours:.{digits}g} instead of {true:.{digits}g}"


def _run_case(solution: _Solution, task: Task, case: _Case, seed: int, device: torch.device) -> None:
    """Raises :class:`_WrongError` if the solution is wrong for the case."""

    def ask(seed: int) -> list[list[_Found]]:
        asked = _Asked(task, case, seed)
        results = solution.ask(asked.message())["results"]
        found = [asked.found(number, result, device) for number, result in enumerate(results)]
        if task.contiguous and not all(result["contiguous"] for result in results):
            raise _WrongError("the result is not contiguous, as the task promises", "contiguous")
        return found

    try:
        found = ask(seed)
        failed = [(i, j) for i, row in enumerate(found) for j, one in enumerate(row) if not one.verdict.passed]
        # A limit that PyTorch's luck has made small does not count: the root mean squares over more draws do.
        close = all(found[i][j].verdict.error < 10 * found[i][j].verdict.limit for i, j in failed)
        draws = [found, *(ask(seed + 100_000 * (i + 1)) for i in range(REDRAWS if failed and close else 0))]
    except check.CheckError:  # PyTorch's own result is not finite
        return
    for i, j in failed:
        verdicts = [draw[i][j].verdict for draw in draws]

        def mean(field: str, verdicts: Sequence[check.Verdict] = verdicts) -> float:
            return math.sqrt(sum(getattr(verdict, field) ** 2 for verdict in verdicts) / len(verdicts))

        if len(draws) == 1 or mean("error") > mean("limit") or mean("element") > 1:
            call = f"call {i + 1} of {case.calls} with new numbers in the same memory: " if case.calls > 1 else ""
            raise _WrongError(f"{call}{found[i][j]}")


def _why(solution: _Solution, task: Task, case: _Case, seed: int, device: torch.device) -> str:
    """The kind of a failure: which one thing of the case, undone, makes it right. Empty where none does."""
    powers = {n: s if n in task.powers or n in task.multiple or s < 3 else 1 << (s.bit_length() - 1) for n, s in case.sizes.items()}
    undone = {
        "kept": {"calls": 1}, "dy": {"dy": "contiguous"}, "stride": {"layout": "contiguous"}, "scale": {"scale": 1.0},
        "dtype": {"dtype": torch.float32}, "tail": {"sizes": powers},
    }  # fmt: skip
    for kind, change in undone.items():
        plain = dataclasses.replace(case, **change)
        if plain != case and plain.dtype in task.dtypes:
            try:
                _run_case(solution, task, plain, seed, device)
            except _WrongError:
                continue
            return kind
    return ""


def _far_apart(solution: _Solution, task: Task, seed: int, device: torch.device) -> None:
    """Raises :class:`_WrongError` if elements that lie 2**31 apart are not read where they are: by offsets that 32 bits cannot count."""
    sizes = next((sizes for sizes in sorted(task.sizes, key=_elements) if sum(s > 2 for s in sizes.values()) > 1), None)
    if sizes is None:
        return
    asked = _Asked(dataclasses.replace(task, grads=()), _Case(sizes, min(task.dtypes, key=lambda dtype: dtype.itemsize)), seed)
    for name, value in asked.series[0].items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.is_floating_point():
            continue
        for dim in sorted({0, value.dim() - 1}):
            if value.shape[dim] < 3:
                continue
            try:
                outputs = solution.ask({"do": "far", "inputs": asked.series[0], "name": name, "dim": dim})["outputs"]
                found = [] if outputs is None else asked.found(0, {"outputs": outputs, "grads": []}, device)
                told = next((str(one) for one in found if one.verdict.error > 10 * one.verdict.limit), "")
            except _WrongError as error:
                told = str(error)
            if told:
                lie = "rows" if dim == 0 else "columns"
                raise _WrongError(f"with {lie} of {name} so far apart that 32 bits do not count the offsets, {told}: "
                                  "convert with .to(tl.int64) before a stride is multiplied", "overflow")  # fmt: skip


def _compiles(solution: _Solution, task: Task, rng: random.Random) -> None:
    """Asks for the compiler's word on every size, and on a strided case in every dtype."""
    sizes, dtypes = sorted(task.sizes, key=_elements), task.dtypes
    cases = [_Case(s, dtypes[i % len(dtypes)]) for i, s in enumerate(sizes)]
    cases += [_Case(_drawn(task, rng), dtype, "padded" if task.strided else "contiguous") for dtype in dtypes]
    asked = [_Asked(task, case, rng.getrandbits(32)) for case in cases]
    solution.send({"do": "compile", "grads": list(task.grads), "cases": [(one.series[0], one.upstream[0]) for one in asked]})


# --- speed ----------------------------------------------------------------------------------------------------------------


def _timed(solution: _Solution, task: Task, seed: int) -> Speed:
    """The time at the real size; raises :class:`_WrongError` if the result there is wrong."""
    dtype, device = task.dtypes[-1], runtime.DEVICE
    case = _Case(task.real, dtype)
    asked = _Asked(dataclasses.replace(task, grads=()), case, seed)
    answer = solution.ask({"do": "time", "inputs": asked.series[0], "rep_ms": 100.0})
    for one in asked.found(0, {"outputs": answer["outputs"], "grads": []}, device):
        if not one.verdict.passed:
            raise _WrongError(f"for {case}: {one}")
    inputs = _to(device, asked.series[0])
    ceilings = timing.measure_ceilings(quick=True)
    outputs = _list(task.reference(**inputs))
    tensors = [value for value in (*inputs.values(), *outputs) if isinstance(value, torch.Tensor)]
    moved = task.moved(task.real, dtype.itemsize) if task.moved else sum(t.numel() * t.element_size() for t in tensors)
    bound = moved / ceilings.copy_gbs / 1e6
    if task.flops:
        tflops = ceilings.tf32_tflops if dtype is torch.float32 else ceilings.bf16_tflops
        bound = max(bound, task.flops(task.real) / tflops / 1e9)
    functions = {"torch": task.peer or task.reference, **({"book": task.book} if task.book else {})}
    times = timing.measure_in_turn({name: lambda call=call: call(**inputs) for name, call in functions.items()})  # type: ignore[misc]
    book = times["book"].ms if "book" in times else None
    return Speed(runtime.properties().name, str(case), answer["ms"], bound, times["torch"].ms, book)


# --- judge ----------------------------------------------------------------------------------------------------------------


def _text(solution: Any, name: str) -> tuple[str, str]:
    """The text of a solution and its function's name in it."""
    if not isinstance(solution, (str, Path)):
        return judge_source.text_of(solution), judge_source.base_of(solution).__name__
    try:
        return Path(solution).read_text(encoding="utf-8"), name
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"judge: {solution} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def find_task(name: str) -> Task:
    """A task by its name, or ``my_tasks.py:name`` in a file of the reader's: the ``Task`` there that is called so."""
    place, colon, own = name.rpartition(":")
    known: Mapping[str, Task] = TASKS
    if colon:
        try:
            spec = importlib.util.spec_from_file_location("own_tasks", place)
            assert spec is not None and spec.loader is not None
            module: types.ModuleType = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"judge: {place} cannot be read as a file of tasks: {type(error).__name__}: {error}") from None
        known = {value.name: value for value in vars(module).values() if isinstance(value, Task)}
    if own not in known:
        near = difflib.get_close_matches(own, known, 1)
        told = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}" if colon else "`python -m kernelbook judge` lists them"
        raise ValueError(f"judge: there is no task {own!r}{f' in {place}' if colon else ''}: {told}")
    return known[own]


def _hints(task: Task, kind: str, many: int) -> tuple[str, ...]:
    """First of what went wrong, then how the task is done."""
    own = [*([task.hints[kind]] if kind in task.hints else [HINTS[kind]] if kind in HINTS else [])]
    return tuple([*own, *(hint for name, hint in task.hints.items() if name != kind)][:many])


def judge(
    solution: Any,
    task: str | Task,
    *,
    hints: int = 0,
    seed: int | None = None,
    gpu: bool | None = None,
    speed: bool = True,
) -> Judgement:
    """Judges a solution.

    Args:
        solution: a function of a notebook or a script, or the path of a file with a function of the task's name.
        task: a name of :data:`TASKS`, or a :class:`Task`.
        hints: how many hints to give, where the solution is not right.
        seed: of sizes and numbers; default: a new one each time.
        gpu: whether to go on to the GPU; default: if there is one.
        speed: whether to take the time, on a GPU.

    Raises:
        ValueError: there is no such task or file, or the function cannot be made a file.
    """
    task = find_task(task) if isinstance(task, str) else task
    if gpu is None:
        gpu = runtime.DEVICE.type == "cuda"
    if gpu and runtime.DEVICE.type != "cuda":
        raise ValueError("judge: gpu=True needs a GPU on which kernels are compiled, and there is none")
    text, function = _text(solution, task.name)
    rng = random.Random(secrets.randbits(64) if seed is None else seed)
    first = rng.getrandbits(32)
    passed, timed, compiled = 0, None, ""

    def judged(sentence: str = "", kind: str = "", printed: str = "") -> Judgement:
        given = _hints(task, kind, hints) if sentence else ()
        return Judgement(task.name, sentence, passed, kind, "" if sentence else compiled, timed, given, printed)

    running: _Solution | None = None
    try:
        with contextlib.ExitStack() as stack:
            compiling = None
            if not gpu and PTXAS.exists():
                compiling = stack.enter_context(_solution("compile", text, function, task, first))
            for how in ("interpret", "gpu")[: 1 + gpu]:
                device = runtime.DEVICE if how == "gpu" else torch.device("cpu")
                running = stack.enter_context(_solution(how, text, function, task, first))
                running.answer()
                if compiling is not None and not passed:
                    with contextlib.suppress(_WrongError):
                        compiling.answer()
                        _compiles(compiling, task, random.Random(first))
                for case in _cases(task, rng):
                    drawn = rng.getrandbits(32)
                    try:
                        _run_case(running, task, case, drawn, device)
                    except _WrongError as wrong:
                        printed = running.printed()
                        kind = wrong.kind or _why(running, task, case, drawn, device)
                        if kind in NOT_JUDGED:
                            return judged(f"{wrong}.", kind)
                        also = f"; {_UNDONE[kind]}" if not wrong.kind and kind else ""
                        return judged(f"for {case}: {wrong}{also}.", kind, printed)
                    passed += 1
                if task.strided:
                    _far_apart(running, task, rng.getrandbits(32), device)
                if how == "gpu" and speed:
                    timed = _timed(running, task, rng.getrandbits(32))
            if compiling is not None:
                compiling.answer()
                compiled = f"compiled for {' and '.join(judge_worker.COMPILED_FOR)}"
            elif not gpu:
                compiled = "in the interpreter; not compiled, since Triton has no compiler for NVIDIA GPUs here"
    except _WrongError as wrong:
        return judged(f"{wrong}.", wrong.kind, running.printed() if running is not None and wrong.kind not in NOT_JUDGED else "")
    return judged()
