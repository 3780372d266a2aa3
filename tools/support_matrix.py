"""What each public function supports, found out by trying it: the table at the top of book/package.md.

Each function is called at a small size where kernels run in this process, in every way that the table has a column for. What
only a GPU can answer (CUDA graphs, the same bits in every run) is answered by the tests that a GPU runs: the column says
whether there is one.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from kernelbook import runtime
from kernelbook.cases import FUNCTIONS, Case, Given, collect
from kernelbook.launch import Launch

ROOT = Path(__file__).resolve().parent.parent
YES, NO, ERROR = "yes", "no", "error"


def cases() -> dict[str, Case]:
    """The case of every public function, by its name."""
    return {name: case for name, case in collect(rooms=FUNCTIONS).items() if case.what}


def _outcome(attempt: Callable[[], object]) -> str:
    """Whether the attempt went well; the two ways of failing that are meant are errors that say so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return ERROR
    return YES


def _given(case: Case, dtype: torch.dtype = torch.float32) -> Given:
    """Arguments in a dtype, as the table shows the function; those that have gradients want one."""
    given = case.of(dtype, **case.plain)
    return given | {name: given[name].requires_grad_() for name in case.leaves(given)}


def _leaves(value: Any) -> list[torch.Tensor]:
    """The tensors that have a gradient."""
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.requires_grad]


def _gradients(results: Any, given: Given, **how: Any) -> Any:
    outputs = _leaves(results)
    return torch.autograd.grad(outputs, _leaves(given), [torch.ones_like(t) for t in outputs], **how)


def _compiles(case: Case) -> None:
    torch._dynamo.reset()
    backend = "inductor" if runtime.DEVICE.type == "cuda" else "aot_eager"
    given = _given(case)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    results = torch.compile(lambda **t: case.function(**given | t), fullgraph=True, backend=backend)(**tensors)
    if case.grads != ():
        _gradients(results, given)


def _second_order(case: Case) -> None:
    given = _given(case)
    gradients = _gradients(case.function(**given), given, create_graph=True)
    torch.autograd.grad([g.sum() for g in gradients if g.requires_grad], _leaves(given), allow_unused=True)


def _forward_mode(case: Case) -> None:
    given = _given(case)
    inputs = {n: v.detach() for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    call = lambda *tensors: case.function(**given | dict(zip(inputs, tensors, strict=True)))  # noqa: E731
    torch.func.jvp(call, tuple(inputs.values()), tuple(map(torch.ones_like, inputs.values())))


def _launches(case: Case) -> str:
    """How many kernels the forward pass launches, and the backward pass."""
    given = _given(case)
    with mock.patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as launch:
        results = case.function(**given)
        forward = launch.call_count
        if case.grads != ():
            _gradients(results, given)
    return str(forward) if case.grads == () else f"{forward} + {launch.call_count - forward}"


# Other GPUs of a generation.
RELATIVES = {"sm_80": ("nvidia-a30",), "sm_89": ("nvidia-l4",), "sm_90": ("nvidia-h100", "nvidia-gh200")}


def generations() -> list[dict[str, str]]:
    """A line for each GPU that kernels are compiled for: what it is, and whether somebody measured on it."""
    from kernelbook.lab import record

    measured = sorted(p.name for p in record.results_dir().iterdir() if (p / "ceilings.csv").is_file())
    lines = []
    for target, properties in runtime.TARGETS.items():
        here = [gpu for gpu in measured if gpu.startswith((record.slug(properties.name), *RELATIVES.get(target, ())))]
        lines.append({
            "generation": target,
            "such as": properties.name,
            "shared memory of a program": f"{properties.shared_memory_per_program // 1024} KiB",
            "compiled in the tests": YES,
            "figures recorded": ", ".join(record.gpu_name(gpu) for gpu in here) or NO,
        })  # fmt: skip
    return lines


def row(name: str, case: Case) -> dict[str, str]:
    """One line of the table."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    works = [names[d] for d in names if _outcome(lambda d=d: case.function(**_given(case, d))) == YES]
    line = {"dtypes": "all" if len(works) == len(names) else ", ".join(works)}
    line["torch.compile"] = _outcome(lambda: _compiles(case))
    with torch.autocast(runtime.DEVICE.type, dtype=torch.bfloat16):
        line["autocast"] = _outcome(lambda: case.function(**_given(case)))
    given = _given(case)
    attempts: dict[str, Callable[[], object]] = {
        "gradients": lambda: _gradients(case.function(**given), given),
        "of gradients": lambda: _second_order(case),
        "forward mode": lambda: _forward_mode(case),
    }
    line |= {what: _outcome(attempt) if case.grads != () else NO for what, attempt in attempts.items()}
    line["launches"] = _launches(case)
    for what, property in (("CUDA graph", "graph"), ("same bits", "bits")):  # of tests/test_contract.py, on a GPU
        line[what] = "-" if property in case.but else "tested"
    return line


def matrix() -> dict[str, dict[str, str]]:
    """The table: a line for each function."""
    torch.manual_seed(0)
    return {name: row(name, case) for name, case in cases().items()}
