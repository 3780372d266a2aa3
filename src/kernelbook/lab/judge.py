"""Is a reader's kernel right, and how fast? ``python -m kernelbook judge FILE --task NAME``, or ``judge(function, "softmax")``.

A solution is a function with kernels of its own. The judge

1. calls it in another process with limits (:mod:`kernelbook.lab.judge_worker`): every size and every scale in every dtype, one row,
   primes, more than a tile, nothing at all, strides, NaN between and around the elements, new numbers in the same
   memory, and gradients where the task has them, also by a ``dy`` that is expanded or transposed;
2. compares what comes back by the rule of :mod:`kernelbook.check`, in this process, with a reference that the other one has not;
3. compiles what was launched for GPUs that need not be there, a Gluon kernel for the newest of them;
4. where there is a GPU, goes on to it with kernels compiled: the largest size in every dtype, mixed strides, repeated calls; and
   takes the time.

The first case that fails is the smallest of its kind, since cases go from small to large. Then one thing of the case after the
other is undone: what makes it right is what is wrong, and the hint is about that. The judge is for people who judge themselves:
it resists mistakes, not forgery.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import math
import multiprocessing
import os
import pickle
import random
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kernelbook import check, runtime
from kernelbook.lab import judge_source, tasks, timing
from kernelbook.lab.compiled import TOOLS
from kernelbook.lab.judge_worker import RefusedError
from kernelbook.lab.tasks import TASKS, Draw, Task

SECONDS = 120.0  # for one message to the other process and its answer
NOT_JUDGED = ("rule", "load")  # kinds of refusals
LUCK = 8.0  # times what is allowed: where numbers cancel, PyTorch's own error in one draw may be so much smaller than in another
PTXAS = TOOLS / "ptxas"

# What to look at, by what went wrong; a task may have words of its own.
HINTS = {
    "rule": "PyTorch may allocate, view, copy and convert. The arithmetic belongs in a kernel.",
    "mask": "Give every load and every store mask=offs < n, and a load also other=: a number that changes nothing.",
    "tail": "Sizes of a power of two are right, so look beyond the end: what does a masked element add (other=0.0, or -inf before "
    "an exponential), and is a mean divided by the size and not by the tile?",
    "stride": "Contiguous inputs are right. Each tensor has strides of its own: pass x.stride(0) and x.stride(1) of every one, and make "
    "the result with torch.empty(shape, ...): torch.empty_like(x) has the strides of x.",
    "dy": "A contiguous dy is right. y.sum().backward() gives a dy whose strides are 0, another layer one that is transposed: pass its strides.",
    "dtype": "Compute in float32: x.to(tl.float32) right after the load, one rounding at the store; tl.dot of float32 with input_precision='ieee'.",
    "scale": "Numbers around 1 are right: does something overflow or cancel, and where is eps added? Subtract a row's maximum before exp; add squares in float32.",
    "overflow": "row = tl.program_id(0).to(tl.int64), and columns by tl.arange(0, BLOCK).to(tl.int64), before they meet a stride.",
    "race": "Two programs meet in one element: tl.atomic_add, or a place of its own for each program and a second launch that adds them.",
    "overlap": "Each element of the result belongs to one program: look at the offsets of the store, and at the strides in them.",
    "barrier": "What one thread stores another may load only after tl.debug_barrier(); values in registers need no memory.",
    "contiguous": "torch.empty(M, N, ...) with the shape of the result is contiguous; .t() and empty_like of a transposed tensor are not.",
    "again": "The same call is right when it is made once more: do programs race, or does something count calls?",
    "kept": "One call is right: every call needs new memory for its result, and nothing may be kept by shape or by address.",
    "compile": "The interpreter runs a kernel as Python; the compiler takes tl.*, other kernels of the file, and constants of tl.constexpr.",
    "return": "The function returns new tensors of the shapes that the task names, on the device of its inputs.",
    "grads": "class F(torch.autograd.Function) with forward(ctx, ...) and backward(ctx, dy); the function returns F.apply(...).",
}  # fmt: skip
# In the order in which they are undone.
_UNDONE = {
    "again": "called once more, it is right", "kept": "one call is right", "dy": "with a contiguous dy it is right", "stride": "contiguous, it is right",
    "scale": "numbers around 1 are right", "dtype": "in another dtype it is right", "tail": "sizes of a power of two are right",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the judge says.

    Attributes:
        task: the task's name.
        sentence: the first thing that is wrong, with the smallest case that shows it; empty if all is right.
        cases: how many were right.
        kind: what went wrong, a key of :data:`HINTS`, or "rule" or "load" of what was not judged; empty if nothing is known.
        compiled: for which GPUs what was launched compiles, or why that was not tried.
        speed: on a GPU, the time with a cold cache, its share of the bound that bytes or products set, and PyTorch's time.
        hints: as many as were asked for; the first is about ``kind``.
        printed: what the failing case printed.
    """

    task: str
    sentence: str
    cases: int
    kind: str = ""
    compiled: str = ""
    speed: str = ""
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
        lines = [told, *filter(None, [self.speed]), *(f"Hint: {hint}" for hint in self.hints)]
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
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if how != "gpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
            environment["TRITON_INTERPRET"] = "1" if how == "interpret" else "0"
        command = [sys.executable, "-m", "kernelbook.lab.judge_worker", str(other.fileno()), "serve"]
        command = command[: 4 + (how != "gpu")]
        void = subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=environment, pass_fds=(other.fileno(),), stdin=void, stdout=void)
        other.close()
        self.control = own

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


_servers: dict[str, _Server] = {}


def _server(how: str) -> _Server:
    """The server, started once; it ends with this process."""
    if how not in _servers or _servers[how].process.poll() is not None:
        _servers[how] = _Server(how)
        atexit.register(_servers[how].close)
    return _servers[how]


class _Solution:
    """A solution at work in a process of its own; one message is sent, and its answer read, before the next."""

    def __init__(self, server: _Server, text: str, function: str, task: Task, folder: Path, seed: int) -> None:
        self.folder, self.task, self.pid = folder, task, 0
        self.rules = {name: getattr(task, name) for name in ("grads", "also", "copies", "strided")}
        file = folder / "solution.py"
        file.write_text(text, encoding="utf-8")
        self.channel, other = multiprocessing.Pipe()
        socket.send_fds(server.control, [b"."], [other.fileno()])
        other.close()
        memory = 0 if runtime.DEVICE.type == "cuda" else 16 * 2**30  # addresses, of which CUDA takes many
        self.send(
            {"do": "load", "file": str(file), "function": function, "memory": memory, "seconds": 600, "seed": seed}
        )
        self.pid = self.answer()["pid"]

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the answer says so
            self.channel.send_bytes(pickle.dumps({**self.rules, **message}))

    def answer(self) -> dict[str, Any]:
        try:
            if not self.channel.poll(SECONDS):
                raise RefusedError(f"it did not answer within {SECONDS:.0f} seconds")
            answer = pickle.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            raise RefusedError("its process ended: a crash, or a limit on time or memory") from None
        if "refused" in answer:
            raise RefusedError(answer["refused"], answer["kind"])
        return answer

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.send(message)
        return self.answer()

    def printed(self) -> str:
        found = self.folder / "printed.txt"
        return found.read_text(errors="replace")[:4000].strip() if found.exists() else ""

    def close(self) -> None:
        self.channel.close()
        if self.pid > 1:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


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
        words = [" ".join(f"{name}={size}" for name, size in self.sizes.items()), str(self.dtype)[len("torch.") :]]
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"dy {self.dy}"] if self.dy != "contiguous" else []
        return ", ".join(words + ([f"numbers around {self.scale:g}"] if self.scale != 1 else []))

    @property
    def order(self) -> tuple[Any, ...]:
        """Small before large, plain before strange."""
        strange = self.layout != "contiguous", self.dy != "contiguous", self.scale != 1
        return self.calls > 1, _elements(self.sizes), *strange


def _elements(sizes: Mapping[str, int]) -> int:
    return math.prod(max(size, 1) for size in sizes.values())


def _drawn(task: Task, rng: random.Random) -> dict[str, int]:
    """Sizes up to some of the task's own; two where it has more than one, since a single row lies alike in most layouts."""
    sizes = dict(rng.choice(task.sizes))
    for name in [name for name in sizes if name not in task.powers]:
        step = task.multiple.get(name, 1)
        least = max(step, min(2, max(other[name] for other in task.sizes)))
        sizes[name] = max(least, rng.randint((sizes[name] + 1) // 2, sizes[name]) // step * step)
    return sizes


def _cases(task: Task, rng: random.Random) -> list[_Case]:
    """Every size, every scale, every layout and every layout of ``dy`` in every dtype; nothing; and new numbers in old memory."""
    sizes = sorted(task.sizes, key=_elements)
    middle, cases = sizes[len(sizes) // 2], []
    layouts = tasks.LAYOUTS if task.strided else tasks.LAYOUTS[:1]
    for dtype in task.dtypes:
        cases += [_Case(s, dtype) for s in sizes]
        cases += [_Case(s, dtype, scale=scale) for scale in task.scales if scale != 1 for s in (middle, sizes[-1])]
        cases += [_Case(_drawn(task, rng), dtype, layout) for layout in layouts]
        cases += [_Case(_drawn(task, rng), dtype, dy=dy) for dy in tasks.LAYOUTS[1:] if task.grads]
        cases += [_Case({**middle, task.empty: 0}, dtype)] if task.empty else []
        cases += [_Case(middle, dtype, calls=3)]
    return sorted(cases, key=lambda case: case.order)


class _Asked:
    """One case, drawn; what the solution has to give back for it."""

    def __init__(self, task: Task, case: _Case, seed: int) -> None:
        calls = range(case.calls)
        draws = [Draw(seed + i, case.dtype, case.layout, case.scale) for i in calls]
        self.task, self.series = task, [task.inputs(draw, **case.sizes) for draw in draws]
        outputs = check._run(task.reference, self.series[0], None, None, ())[0] if task.grads else []
        self.upstream = [[Draw(~seed + i, case.dtype, case.dy)(*out.shape) for out in outputs] for i in calls]

    def found(self, number: int, result: Mapping[str, Any]) -> list[_Found]:
        """What one call returned, beside the truth and PyTorch's own; raises where there is nothing to compare."""
        given, grads = (self.series[number], self.upstream[number] or None), self.task.grads
        truth, true_grads = check._run(self.task.reference, given[0], torch.float64, given[1], grads)
        base, base_grads = check._run(self.task.peer or self.task.reference, given[0], None, given[1], grads)
        ours: list[torch.Tensor] = result["outputs"]
        if len(ours) != len(truth):
            raise RefusedError(f"it returned {len(ours)} tensors where {len(truth)} were expected", "return")
        names = ["the result"] if len(truth) == 1 else [f"result {i}" for i in range(len(truth))]
        by = [f"the gradient by {name}" for name in grads]
        forward = zip(names, ours, truth, base, strict=True)
        backward = zip(by, result["grads"], true_grads, base_grads, strict=True)
        found = [_Found.of(*parts, check.FORWARD_FACTOR) for parts in forward]
        return found + [_Found.of(*parts, check.GRADIENT_FACTOR) for parts in backward]  # type: ignore[arg-type]


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
            raise RefusedError(f"{name} has shape {tuple(out.shape)}, expected {tuple(truth.shape)}", "return")
        if out.dtype != base.dtype:
            raise RefusedError(f"{name} is {out.dtype}, expected {base.dtype}", "return")
        numbers = base.is_floating_point()
        wrong = torch.isnan(out) & ~torch.isnan(truth) if numbers else out != base
        if bool(wrong.any()):
            told = f"{'has NaN' if numbers else 'is wrong'} in {int(wrong.sum())} of {out.numel()} elements"
            made = ": not written, made of what lies outside, or an overflow" if numbers else ""
            raise RefusedError(f"{name} {told}, {_first(wrong, out, truth)}{made}")
        verdict = check.compare(name, out, truth, base, factor=factor) if numbers else check.Verdict(name, 0, 0, 0, 0)
        return _Found(verdict, out, truth)

    def __str__(self) -> str:
        """What a failed comparison says to a reader."""
        difference = (self.out.double() - self.truth).abs()
        allowed = max(4 * self.verdict.limit * float(self.truth.abs().max()), 1e-30)
        wrong = difference > min(allowed, float(difference.max()) * 0.999)
        off = f"is off by {self.verdict.error:.1e} where {self.verdict.limit:.1e} is allowed"
        where = f"{int(wrong.sum())} of {self.truth.numel()} elements stand out"
        return f"{self.verdict.name} {off}; {where}, {_first(wrong, self.out, self.truth)}"


def _first(wrong: torch.Tensor, out: torch.Tensor, truth: torch.Tensor) -> str:
    """The first place that is wrong, with as many digits as it takes to see that."""
    place = tuple(torch.nonzero(wrong)[0].tolist())
    ours, true = float(out[place]), float(truth[place])
    digits = next((d for d in range(5, 18) if f"{ours:.{d}g}" != f"{true:.{d}g}"), 17)
    return f"the first at {list(place)}: {ours:.{digits}g} instead of {true:.{digits}g}"


def _run_case(solution: _Solution, case: _Case, seed: int, draws: int = 3) -> None:
    """Raises :class:`RefusedError` if the solution is wrong for the case; if it is off by little in float32, in each of so many draws."""
    asked = _Asked(solution.task, case, seed)
    results = solution.ask({"do": "call", "series": asked.series, "upstream": asked.upstream})["results"]
    try:
        found = [one for number, result in enumerate(results) for one in asked.found(number, result)]
    except check.CheckError:  # PyTorch's own result is not finite
        return
    if solution.task.contiguous and not all(result["contiguous"] for result in results):
        raise RefusedError("the result is not contiguous, as the task promises", "contiguous")
    for one in found:
        if not one.verdict.passed:
            little = max(one.verdict.error / one.verdict.limit, one.verdict.element) < LUCK
            if little and draws > 1 and case.dtype is torch.float32:
                return _run_case(solution, case, seed + case.calls, draws - 1)
            call = "of several calls with new numbers in the same memory: " if case.calls > 1 else ""
            raise RefusedError(f"{call}{one}")


def _why(solution: _Solution, case: _Case, seed: int) -> str:
    """The kind of a failure: which one thing of the case, undone, makes it right. Empty where none does."""
    kept = {*solution.task.powers, *solution.task.multiple}
    powers = {n: s if n in kept or s < 3 else 1 << (s.bit_length() - 1) for n, s in case.sizes.items()}
    other = torch.float16 if case.dtype is torch.float32 else torch.float32
    plain: list[Any] = [{"calls": 1}, {"dy": "contiguous"}, {"layout": "contiguous"}, {"scale": 1.0}, {"dtype": other}]
    for kind, change in zip(_UNDONE, [{}, *plain, {"sizes": powers}], strict=True):
        undone = dataclasses.replace(case, **change)
        if (undone != case or kind == "again") and undone.dtype in solution.task.dtypes:
            with contextlib.suppress(RefusedError):
                for more in range(1 if kind == "again" else 3):
                    _run_case(solution, undone, seed + more)
                return kind
    return ""


def _compiles(solution: _Solution, rng: random.Random) -> None:
    """Asks for the compiler's word on every size, and on a strided case in every dtype; its answer comes later."""
    task = solution.task
    cases = [_Case(s, task.dtypes[i % len(task.dtypes)]) for i, s in enumerate(task.sizes)]
    cases += [_Case(_drawn(task, rng), dtype, "padded" if task.strided else "contiguous") for dtype in task.dtypes]
    asked = [_Asked(task, case, rng.getrandbits(32)) for case in cases]
    solution.send({"do": "compile", "cases": [(one.series[0], one.upstream[0]) for one in asked]})


def _timed(solution: _Solution, seed: int) -> str:
    """The time at the real size, in words; raises :class:`RefusedError` if the result there is wrong."""
    task, dtype = dataclasses.replace(solution.task, grads=()), solution.task.dtypes[-1]
    case = _Case(task.real, dtype)
    asked = _Asked(task, case, seed)
    answer = solution.ask({"do": "time", "inputs": asked.series[0], "rep_ms": 100.0})
    inputs = {n: x.to(runtime.DEVICE) if isinstance(x, torch.Tensor) else x for n, x in asked.series[0].items()}
    outputs = [x.to(runtime.DEVICE) for x in answer["outputs"]]
    asked.series[0] = inputs  # where the reference does not take seconds
    for one in asked.found(0, {"outputs": outputs, "grads": []}):
        if not one.verdict.passed:
            raise RefusedError(f"for {case}: {one}")
    ceilings = timing.measure_ceilings(quick=True)
    tensors = [value for value in (*inputs.values(), *outputs) if isinstance(value, torch.Tensor)]
    moved = task.moved(task.real, dtype.itemsize) if task.moved else sum(tensor.nbytes for tensor in tensors)
    tflops = ceilings.tf32_tflops if dtype is torch.float32 else ceilings.bf16_tflops
    bound = max(moved / ceilings.copy_gbs / 1e6, task.flops(task.real) / tflops / 1e9 if task.flops else 0.0)
    peer = timing.measure(lambda: (task.peer or task.reference)(**inputs))
    share = f"{bound / answer['ms']:.0%} of the bound; PyTorch {peer.ms:.4g} ms"
    return f"{answer['ms']:.4g} ms for {case} on {runtime.properties().name}: {share}"


# --- judge ----------------------------------------------------------------------------------------------------------------


def find_task(name: str) -> Task:
    """A task by its name, or ``my_tasks.py:name`` in a file of the reader's: the ``Task`` there that is called so."""
    place, colon, own = name.rpartition(":")
    known: Mapping[str, Task] = TASKS
    if colon:
        try:
            found = runpy.run_path(place).values()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"judge: {place} cannot be read as a file of tasks: {told}") from None
        known = {value.name: value for value in found if isinstance(value, Task)}
    if own not in known:
        near = [f"did you mean {match}?" for match in difflib.get_close_matches(own, known, 1)]
        there = f"{place} has {', '.join(known) or 'none'}" if colon else "`python -m kernelbook judge` lists them"
        raise ValueError(f"judge: there is no task {own!r}: {(near or [there])[0]}")
    return known[own]


def judge(
    solution: Any,
    task: str | Task,
    *,
    hints: int = 0,
    seed: int | None = None,
    gpu: bool = True,
    speed: bool = True,
) -> Judgement:
    """Judges a solution.

    Args:
        solution: a function of a notebook or a script, or the path of a file with a function of the task's name.
        task: a name of :data:`TASKS`, or a :class:`Task`.
        hints: how many hints to give, where the solution is not right: one of what went wrong, then how the task is done.
        seed: of sizes and numbers; default: a new one each time.
        gpu: whether to go on to the GPU, where there is one.
        speed: whether to take the time, on a GPU.

    Raises:
        ValueError: there is no such task or file, or the function cannot be made a file.
    """
    task = find_task(task) if isinstance(task, str) else task
    gpu = gpu and runtime.DEVICE.type == "cuda"
    if isinstance(solution, (str, Path)):
        try:
            text, function = Path(solution).read_text(encoding="utf-8"), task.name
        except (OSError, ValueError) as error:
            raise ValueError(f"judge: {solution} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    else:
        text, function = judge_source.text_of(solution), judge_source.base_of(solution).__name__
    rng = random.Random(secrets.randbits(64) if seed is None else seed)
    file, passed, case, speed_, compiled = (text, function, task, rng.getrandbits(32)), 0, None, "", ""
    with contextlib.ExitStack() as stack:
        compiling: _Solution | None = None
        running: Any = None
        try:
            if not gpu and PTXAS.exists():
                compiling = stack.enter_context(_solution("compile", *file))
            for how in ("interpret", "gpu")[: 1 + gpu]:
                running = stack.enter_context(_solution(how, *file))
                running.answer()
                if compiling is not None:
                    compiling.answer()
                    _compiles(compiling, random.Random(file[-1]))
                for case in _cases(task, rng):
                    # On a GPU most of the time goes into compiling: only the largest size, what lies as it likes, and calls.
                    many = case.calls > 1 or _elements(case.sizes) == max(map(_elements, task.sizes))
                    if how == "gpu" and not (many or "mixed" in (case.layout, case.dy)):
                        continue
                    drawn = rng.getrandbits(32)
                    _run_case(running, case, drawn)
                    passed += 1
                case = None
                if how == "gpu" and speed:
                    speed_ = _timed(running, rng.getrandbits(32))
            if compiling is not None:
                compiled = f"compiled for {' and '.join(compiling.answer()['compiled'])}"
            elif not gpu:
                compiled = "in the interpreter, not compiled: this Triton has no compiler for NVIDIA GPUs"
        except RefusedError as wrong:
            kind, told, printed = wrong.kind, str(wrong), running.printed() if running is not None else ""
            if case is not None and kind in ("", "mask"):
                why = _why(running, case, drawn)
                if why and (not kind or why in ("again", "kept", "dy", "stride")):
                    kind, told = why, f"{told}; {_UNDONE[why]}"
            told = f"for {case}: {told}" if case is not None and kind not in NOT_JUDGED else told
            told = told if told.endswith((".", "?")) else f"{told}."
            of_kind = task.hints.get(kind) or HINTS.get(kind, "")
            shown = [hint for hint in (of_kind, task.how) if hint and kind != "load"][:hints]
            return Judgement(task.name, told, passed, kind, hints=tuple(shown), printed=printed)
    return Judgement(task.name, "", passed, "", compiled, speed_)
