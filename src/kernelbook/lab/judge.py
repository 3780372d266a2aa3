"""Is a reader's kernel right, and how fast? ``python -m kernelbook judge FILE --task NAME``, or ``judge(function, "softmax")``.

A solution is a function with kernels of its own. The judge

1. reads its text (:mod:`kernelbook.lab.judge_source`): a file of kernels has no use for the clock, the garbage collector or PyTorch's
   inside;
2. calls it in another process with limits (:mod:`kernelbook.lab.judge_worker`), with inputs that were drawn here and then: dtypes, one
   row, primes, more than a tile, nothing at all, strides, NaN around and between the elements, large and small numbers,
   new numbers in the same memory, and gradients where the task has them;
3. compares what comes back by the rule of :mod:`kernelbook.check`, in this process, with a reference that the other one has not;
4. where there is a GPU, does the same on it with kernels compiled, then with rows farther apart than 32 bits count and with the
   task's real sizes, and takes the time.

The first case that fails is the smallest of its kind, since cases go from small to large. What can still be forged is said on the
page "Evidence".
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import importlib.util
import math
import operator
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kernelbook import check, runtime
from kernelbook.lab import judge_source, judge_worker, tasks, timing
from kernelbook.lab.tasks import TASKS, Draw, Task

__all__ = ["TASKS", "Draw", "Judgement", "Speed", "Task", "judge"]

SECONDS = 120.0  # for one message to the other process and its answer
LARGEST = 4096  # number of a solution's text beyond which a size is tried in the interpreter
REDRAWS = 7  # of a case whose error is above the limit, before it counts: PyTorch's own error may be small by luck


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
    """What the judge says. ``sentence`` is the first thing that is wrong, with the smallest case that shows it; empty if all is right."""

    task: str
    sentence: str
    cases: int
    speed: Speed | None = None
    hints: tuple[str, ...] = ()
    printed: str = ""

    @property
    def right(self) -> bool:
        return not self.sentence

    def __str__(self) -> str:
        told = f"{self.task}: right, {self.cases} cases" if self.right else f"{self.task}: not right. {self.sentence}"
        lines = [told, *([str(self.speed)] if self.speed else []), *(f"Hint: {hint}" for hint in self.hints)]
        return "\n".join(lines + ([f"In the last case it printed:\n{self.printed}"] if self.printed else []))

    def require(self) -> Judgement:
        """Returns itself, or raises ``check.CheckError``."""
        if not self.right:
            raise check.CheckError(str(self))
        return self


# --- the other process --------------------------------------------------------------------------------------------------


class _Server:
    """A process that has imported what solutions need, and forks one for each (without a GPU; with one it serves one)."""

    def __init__(self, on_gpu: bool) -> None:
        own, other = socket.socketpair()
        kept = (
            "PATH",
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "LANG",
            "VIRTUAL_ENV",
            "TRITON_CACHE_DIR",
            "CUDA_VISIBLE_DEVICES",
            "CUDA_HOME",
            "HOME",
        )
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if not on_gpu:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernelbook.lab.judge_worker", str(other.fileno()), *([] if on_gpu else ["serve"])],
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


_server: list[_Server] = []


def _interpreting() -> _Server:
    """The server for the interpreter, started once; it ends with this process."""
    if not _server or _server[0].process.poll() is not None:
        _server[:] = [_Server(on_gpu=False)]
        atexit.register(_server[0].close)
    return _server[0]


class _WrongError(Exception):
    """Why a solution is not right, in a sentence."""


class _Solution:
    """A solution at work in a process of its own."""

    def __init__(self, server: _Server, text: str, function: str, task: Task, folder: Path, *, on_gpu: bool) -> None:
        (folder / "solution.py").write_text(text, encoding="utf-8")
        self.channel, other = socket.socketpair()
        socket.send_fds(server.control, [b"."], [other.fileno()])
        other.close()
        self.channel.settimeout(SECONDS)
        self.pid = 0
        memory = 0 if on_gpu else 16 * 2**30  # addresses, of which CUDA takes many
        self.pid = self.ask(
            {
                "folder": str(folder), "file": str(folder / "solution.py"), "function": function, "also": list(task.also), "copies": task.copies,
                "memory": memory, "seconds": 600, "watched": not on_gpu,
            }
        )["pid"]  # fmt: skip
        self._answer()

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            judge_worker.send(self.channel, message)
        except OSError:
            raise _WrongError("its process has ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            answer = judge_worker.receive(self.channel)
        except TimeoutError:
            raise _WrongError(f"it did not answer within {SECONDS:.0f} seconds") from None
        except (EOFError, OSError):
            raise _WrongError("its process ended: a crash, or a limit on time or memory") from None
        except Exception as error:  # what was sent is no message
            raise _WrongError(f"its process sent what is no answer: {type(error).__name__}") from None
        if "refused" in answer:
            raise _WrongError(_plain(str(answer["refused"])))
        return answer

    def close(self) -> None:
        self.channel.close()
        if isinstance(self.pid, int) and self.pid > 1:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _plain(text: str) -> str:
    """Without what moves a terminal's cursor: a solution's words do not write over the judge's."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text.expandtabs())


@contextlib.contextmanager
def _solution(text: str, function: str, task: Task, *, on_gpu: bool) -> Iterator[_Solution]:
    with tempfile.TemporaryDirectory() as folder:
        server = _Server(on_gpu=True) if on_gpu else _interpreting()
        solution = None
        try:
            solution = _Solution(server, text, function, task, Path(folder), on_gpu=on_gpu)
            yield solution
        finally:
            if solution is not None:
                solution.close()
            if on_gpu:
                server.close()
            printed = Path(folder, "printed.txt")
            if printed.exists():
                _printed[:] = [_plain(printed.read_text(errors="replace")[:4000]).strip()]


_printed: list[str] = []


# --- the cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Case:
    sizes: Mapping[str, int]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    scale: float = 1.0
    calls: int = 1

    def __str__(self) -> str:
        words = [
            " ".join(f"{name}={size}" for name, size in self.sizes.items()),
            str(self.dtype).removeprefix("torch."),
        ]
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"numbers around {self.scale:g}"] if self.scale != 1 else []
        return ", ".join(words)


def _elements(sizes: Mapping[str, int]) -> int:
    return math.prod(max(size, 1) for size in sizes.values())


def _drawn(task: Task, rng: random.Random) -> dict[str, int]:
    """Sizes that nobody knows beforehand, between the task's own."""
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
    """From small to large; every size, every dtype in every layout, every scale, drawn sizes, nothing, and new numbers in old memory."""
    sizes = sorted(task.sizes, key=_elements)
    dtypes, layouts = list(task.dtypes), tasks.LAYOUTS if task.strided else tasks.LAYOUTS[:1]
    cases = [_Case(s, dtypes[i % len(dtypes)]) for i, s in enumerate(sizes)]
    middle = sizes[len(sizes) // 2]
    cases += [_Case(_drawn(task, rng), dtype, layout) for dtype in dtypes for layout in layouts]
    cases += [_Case(middle, dtypes[0], scale=scale) for scale in task.scales if scale != 1]
    cases += [_Case(sizes[-1], dtypes[-1], layouts[-1])]
    if task.empty:
        cases.append(_Case({**middle, task.empty: 0}))
    cases.append(_Case(middle, dtypes[0], calls=rng.randint(4, 8)))
    cases.append(_Case(_drawn(task, rng), dtypes[-1], calls=3))
    return sorted(cases, key=lambda case: (case.calls > 1, _elements(case.sizes)))


def _numbers(text: str) -> set[int]:
    """The whole numbers of a text, and what comes of those that are multiplied, added or shifted there."""
    known = {ast.Mult: operator.mul, ast.Add: operator.add, ast.LShift: operator.lshift, ast.Pow: operator.pow}

    def value(node: ast.AST) -> int | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in known:
            left, right = value(node.left), value(node.right)
            if left is not None and right is not None and 0 <= left < 2**16 and 0 <= right < 2**16:
                return known[type(node.op)](left, right) if right < 32 or isinstance(node.op, ast.Mult) else None
        return None

    return {found for node in ast.walk(ast.parse(text.encode())) if (found := value(node)) is not None}


def _beyond(task: Task, text: str, rng: random.Random) -> list[_Case]:
    """Where the text has a number above a size that is tried anyway, from which it may do otherwise: that size beyond it, the others small."""
    cases = []
    for name in [name for name in task.sizes[0] if name not in task.powers]:
        high, step = max(sizes[name] for sizes in task.sizes), task.multiple.get(name, 1)
        found = [n for n in _numbers(text) if high <= n <= min(LARGEST, task.most.get(name, LARGEST + 1) - 1)]
        if found:
            size = -(-rng.randint(max(found) * 5 // 4 + 1, max(found) * 3 // 2 + 1) // step) * step
            for few in (1, 0):  # the second smallest of the others, else the smallest
                values = {other: sorted({sizes[other] for sizes in task.sizes}) for other in task.sizes[0]}
                case = {other: many[min(few, len(many) - 1)] for other, many in values.items()}
                case[name] = min(size, task.most.get(name, size))
                if _elements(case) <= 8 * LARGEST:
                    cases.append(_Case(case, task.dtypes[0]))
                    break
    return cases


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
        self.shapes = [out.shape for out in _list(task.reference(**self.series[0]))]
        generator = torch.Generator().manual_seed(seed + 10_000)
        self.upstream = [
            [torch.randn(shape, generator=generator).to(case.dtype) for shape in self.shapes] if task.grads else []
            for _ in self.series
        ]

    def message(self) -> dict[str, Any]:
        return {"do": "call", "series": self.series, "grads": list(self.task.grads), "upstream": self.upstream}

    def verdicts(self, number: int, result: Mapping[str, Any], device: torch.device) -> list[check.Verdict]:
        """Compares the result of one call; raises where there is nothing to compare."""
        inputs, upstream = _to(device, self.series[number]), [up.to(device) for up in self.upstream[number]]
        plain = self.task.peer or self.task.reference
        truth, true_grads = check._run(self.task.reference, inputs, torch.float64, upstream or None, self.task.grads)
        base, base_grads = check._run(plain, inputs, None, upstream or None, self.task.grads)
        outputs, grads = list(result["outputs"]), list(result["grads"])
        if len(outputs) != len(truth):
            raise _WrongError(f"it returned {len(outputs)} tensors where {len(truth)} were expected")
        names = ["the result"] if len(truth) == 1 else [f"result {i}" for i in range(len(truth))]
        named: list[tuple[Any, ...]] = [
            *zip(names, outputs, truth, base, [check.FORWARD_FACTOR] * len(names), strict=True)
        ]
        by = [f"the gradient by {name}" for name in self.task.grads]
        named += zip(by, grads, true_grads, base_grads, [check.GRADIENT_FACTOR] * len(by), strict=True)
        return [_compared(name, out.to(device), true, plain_, factor) for name, out, true, plain_, factor in named]

    def unchanged(self, number: int, result: Mapping[str, Any]) -> None:
        """All memory of the inputs is as it was, also between and around the elements."""
        for name, value in self.series[number].items():
            if isinstance(value, torch.Tensor):
                before = judge_worker._storage_bytes(value)
                if not torch.equal(before, result["inputs"][name]):
                    raise _WrongError(f"it writes into {name}, which is an input, or into the memory around it")


def _compared(name: str, out: torch.Tensor, truth: torch.Tensor, base: torch.Tensor, factor: float) -> check.Verdict:
    if out.shape != truth.shape:
        raise _WrongError(f"{name} has shape {tuple(out.shape)}, expected {tuple(truth.shape)}")
    if out.dtype != base.dtype:
        raise _WrongError(f"{name} is {out.dtype}, expected {base.dtype}")
    if not base.is_floating_point():
        wrong = out != base
        if bool(wrong.any()):
            raise _WrongError(
                f"{name} is wrong in {int(wrong.sum())} of {out.numel()} elements, {_first(wrong, out, base)}"
            )
        return check.Verdict(name, 0.0, 0.0, 0.0, 0.0)
    nan = torch.isnan(out) & ~torch.isnan(truth)
    if bool(nan.any()):
        raise _WrongError(
            f"{name} has NaN in {int(nan.sum())} of {out.numel()} elements, {_first(nan, out, truth)}: not written, or made of what "
            "lies outside"
        )
    return check.compare(name, out, truth, base, factor=factor)


def _first(wrong: torch.Tensor, out: torch.Tensor, truth: torch.Tensor) -> str:
    place = tuple(torch.nonzero(wrong)[0].tolist())
    return f"the first at {list(place)}: {float(out[place]):.5g} instead of {float(truth[place]):.5g}"


def _far_off(
    asked: _Asked, number: int, result: Mapping[str, Any], verdict: check.Verdict, device: torch.device
) -> str:
    """What a failed comparison says to a reader."""
    inputs = _to(device, asked.series[number])
    upstream = [up.to(device) for up in asked.upstream[number]]
    truth, grads = check._run(asked.task.reference, inputs, torch.float64, upstream or None, asked.task.grads)
    for name, out, true in [
        *zip(
            ["the result"] if len(truth) == 1 else [f"result {i}" for i in range(len(truth))],
            result["outputs"],
            truth,
            strict=True,
        ),
        *zip([f"the gradient by {n}" for n in asked.task.grads], result["grads"], grads, strict=True),
    ]:
        if name == verdict.name and true is not None and true.numel():
            difference = (out.to(device).double() - true).abs()
            allowed = max(4 * verdict.limit * float(true.abs().max()), 1e-30)
            wrong = difference > min(allowed, float(difference.max()) * 0.999)
            return (
                f"{name} is off by {verdict.error:.1e} where {verdict.limit:.1e} is allowed; {int(wrong.sum())} of {true.numel()} elements "
                f"stand out, {_first(wrong, out.to(device), true)}"
            )
    return str(verdict)


def _run_case(solution: _Solution, task: Task, case: _Case, seed: int, device: torch.device) -> None:
    """Raises :class:`_WrongError` if the solution is wrong for the case."""

    def ask(seed: int, *, first: bool = False) -> tuple[_Asked, list[dict[str, Any]], list[list[check.Verdict]]]:
        asked = _Asked(task, case, seed)
        results = solution.ask(asked.message() | {"first": first}).get("results")
        if not isinstance(results, list) or len(results) != case.calls:
            raise _WrongError("its process sent what is no answer")
        try:
            for number, result in enumerate(results):
                asked.unchanged(number, result)
            return asked, results, [asked.verdicts(number, result, device) for number, result in enumerate(results)]
        except (KeyError, TypeError, AttributeError, check.CheckError) as error:
            raise _WrongError(f"its process sent what is no answer: {error}") from None

    asked, results, found = ask(seed, first=True)
    if all(verdict.passed for verdicts in found for verdict in verdicts):
        return
    # A limit that PyTorch's luck has made small does not count: the root mean squares over more draws do.
    close = max(v.error / v.limit for verdicts in found for v in verdicts if v.limit) < 10
    draws = [found, *(ask(seed + 100_000 * (i + 1))[2] for i in range(REDRAWS if close else 0))]
    for number, verdicts in enumerate(found):
        for i, verdict in enumerate(verdicts):
            if verdict.passed:
                continue

            def mean(field: Callable[[check.Verdict], float], number: int = number, i: int = i) -> float:
                return math.sqrt(sum(field(draw[number][i]) ** 2 for draw in draws) / len(draws))

            if len(draws) > 1 and mean(lambda v: v.error) <= mean(lambda v: v.limit) and mean(lambda v: v.element) <= 1:
                continue
            told = _far_off(asked, number, results[number], verdict, device)
            if number:
                told = f"call {number + 1} with new numbers in the same memory: {told}"
            raise _WrongError(told)


def _far_apart(solution: _Solution, task: Task, seed: int, device: torch.device, elements: int = 2**31) -> None:
    """Raises :class:`_WrongError` if rows that lie so far apart are not read where they are: by offsets that 32 bits cannot count."""
    sizes, dtype = max(task.sizes, key=_elements), min(task.dtypes, key=lambda dtype: dtype.itemsize)
    asked = _Asked(dataclasses.replace(task, grads=()), _Case(sizes, dtype), seed)
    tensors = [value for value in asked.series[0].values() if isinstance(value, torch.Tensor)]
    if not any(tensor.dim() == 2 and len(tensor) > 1 for tensor in tensors):
        return
    where = f"with rows that lie {elements} elements apart"
    try:
        outputs = solution.ask({"do": "far", "inputs": asked.series[0], "elements": elements})["outputs"]
        found = [] if outputs is None else asked.verdicts(0, {"outputs": outputs, "grads": []}, device)
    except _WrongError as error:
        raise _WrongError(f"{where}: {error}") from None
    for verdict in found:
        if verdict.error > 10 * verdict.limit:  # what is read elsewhere is far off
            raise _WrongError(f"{where}: {verdict}")


# --- speed ----------------------------------------------------------------------------------------------------------------


def _timed(solution: _Solution, task: Task, rng: random.Random) -> Speed:
    """The time at the real size; raises :class:`_WrongError` if it is no time, or the results that were timed are wrong."""
    dtype, device = task.dtypes[-1], runtime.DEVICE
    case = _Case(task.real, dtype)
    asked = _Asked(dataclasses.replace(task, grads=()), case, rng.getrandbits(32))
    inputs = asked.series[0]
    seeds, wanted = [rng.getrandbits(31) for _ in range(997)], rng.randint(3, 17)
    asking = {
        "do": "time",
        "inputs": inputs,
        "kept": list(task.kept),
        "seeds": seeds,
        "wanted": wanted,
        "rep_ms": 100.0,
    }
    answer = solution.ask(asking)
    ms = float(answer["ms"])

    ours = _to(device, inputs)
    generator = torch.Generator(device)
    for seed in seeds[: wanted + 1]:
        for name in judge_worker.scrambled(ours, task.kept):
            judge_worker.scramble(ours[name], generator.manual_seed(seed))
    asked.series = [ours]
    for verdict in asked.verdicts(0, {"outputs": answer["kept"], "grads": []}, device):
        if not verdict.passed:
            raise _WrongError(f"the result of a call that was timed is wrong: {verdict}")

    ceilings = timing.measure_ceilings(quick=True)
    outputs = _list(task.reference(**ours))
    size = torch.empty(0, dtype=dtype).element_size()
    tensors = [value for value in (*ours.values(), *outputs) if isinstance(value, torch.Tensor)]
    moved = task.moved(task.real, size) if task.moved else sum(t.numel() * t.element_size() for t in tensors)
    bound = moved / ceilings.copy_gbs / 1e6
    if task.flops:
        tflops = ceilings.tf32_tflops if dtype is torch.float32 else ceilings.bf16_tflops
        bound = max(bound, task.flops(task.real) / tflops / 1e9)
    peer = task.peer or task.reference
    calls: dict[str, Callable[[], Any]] = {"torch": lambda: peer(**ours)}
    if task.book is not None:
        book = task.book
        calls["book"] = lambda: book(**ours)
    times = timing.measure_in_turn(calls)
    speed = Speed(
        runtime.properties().name, ", ".join(map(str, (case,))), ms, bound, times["torch"].ms,
        times["book"].ms if "book" in times else None,
    )  # fmt: skip
    if ms < 0.9 * bound:
        raise _WrongError(f"{speed}: no kernel can do that, so the clock was not this kernel's")
    own = math.inf
    for _ in range(5):  # what else runs on the GPU can make this clock too slow, and never too fast
        own = min(own, _wall_ms(solution, inputs))
        if own <= 2 * ms + 0.2:
            return speed
    raise _WrongError(f"the other process says {ms:.4g} ms a call, and this one's clock {own:.4g} ms")


def _wall_ms(solution: _Solution, inputs: Mapping[str, Any]) -> float:
    """By this process's clock, what a further call takes in a row of them; the cache is warm and the host's time counts."""

    def seconds(calls: int, given: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        solution.ask({"do": "repeat", "calls": calls, "inputs": given})
        return time.perf_counter() - start

    seconds(5, inputs)
    return min((seconds(220, {}) - seconds(20, {})) / 200 for _ in range(3)) * 1e3


# --- judge ----------------------------------------------------------------------------------------------------------------


def _text(solution: Any, name: str) -> tuple[str, str]:
    """The text of a solution and its function's name in it."""
    if not isinstance(solution, (str, Path)):
        text = judge_source.text_of(solution)
        return text, judge_source._base(solution).__name__
    path = Path(solution)
    try:
        return path.read_text(encoding="utf-8"), name
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"judge: {path} cannot be read: {error}") from None


def find_task(name: str) -> Task:
    """A task by its name, or ``my_tasks.py:name`` in a file of the reader's: the ``Task`` there that is called so."""
    place, colon, own = name.rpartition(":")
    if not colon:
        return tasks.task(name)
    try:
        spec = importlib.util.spec_from_file_location("own_tasks", place)
        assert spec is not None and spec.loader is not None
        module: types.ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"judge: {place} cannot be read as a file of tasks: {type(error).__name__}: {error}") from None
    found = {value.name: value for value in vars(module).values() if isinstance(value, Task)}
    if own not in found:
        raise ValueError(f"judge: task must be one of {', '.join(sorted(found)) or 'none'} of {place}, got {own!r}")
    return found[own]


def judge(
    solution: Any,
    task: str | Task,
    *,
    hints: int = 0,
    seed: int | None = None,
    read: bool = True,
    gpu: bool | None = None,
    speed: bool = True,
) -> Judgement:
    """Judges a solution.

    Args:
        solution: a function of a notebook or a script, or the path of a file with a function of the task's name.
        task: a name of :data:`TASKS`, or a :class:`Task`.
        hints: how many of the task's hints to give, where the solution is not right.
        seed: of sizes and numbers; default: a new one each time, so that nobody can know them.
        read: whether the text is read first. Without it, what runs has to be refused for what it does.
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
    found = judge_source.problems(text) if read else []
    rng = random.Random(secrets.randbits(64) if seed is None else seed)
    passed, case, timed = 0, None, None
    _printed.clear()
    sentence = f"Its {found[0]}." if found else ""
    if not found:
        try:
            for on_gpu in (False, True)[: 1 + gpu]:
                device = runtime.DEVICE if on_gpu else torch.device("cpu")
                case = None
                with _solution(text, function, task, on_gpu=on_gpu) as running:
                    for case in [*_cases(task, rng), *_beyond(task, text, rng)]:
                        _run_case(running, task, case, rng.getrandbits(32), device)
                        passed += 1
                    case = None
                    if on_gpu and task.strided:
                        _far_apart(running, task, rng.getrandbits(32), device)
                    if on_gpu and speed:
                        timed = _timed(running, task, rng)
        except _WrongError as refused:
            told = str(refused)
            sentence = f"For {case}: {told}." if case else f"{told[:1].upper()}{told[1:]}."
    given = () if not sentence else tuple(task.hints[:hints])
    return Judgement(task.name, sentence, passed, timed, given, _printed[0] if _printed else "")
