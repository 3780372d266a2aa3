"""What each public function supports, found out by trying it: the table at the top of book/package.md.

Each function is called at a small size where kernels run in this process, in every way that the table has a column for. What
only a GPU can answer (CUDA graphs, the same bits in every run) is answered by the tests that a GPU runs: the column says
whether there is one.
"""

import ast
import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kernelbook as kb
from kernelbook import runtime

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
YES, NO, ERROR = "yes", "no", "error"
Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one public function.

    ``call`` takes floating-point tensors of these ``shapes``, in the dtype that is tried.
    """

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    differentiable: bool = True


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=runtime.DEVICE)


def cases() -> dict[str, Case]:
    """A case for every public function."""
    active, rows = {"active_chunks": _ids(2, 0), "chunk_size": 16}, _ids(5, 1, 1)
    routing = kb.route(_ids(0, 1, 1, 2, 0, 2).view(3, 2), 3)
    pages = {"block_table": _ids(1, 0, 2, 3).view(2, 2), "lengths": _ids(20, 5)}
    x, w, dy = (3, 24), (48, 24), (3, 48)

    def append(k: torch.Tensor, v: torch.Tensor) -> None:
        pool = torch.zeros(2, 4, 2, 16, 16, dtype=k.dtype, device=k.device)
        kb.append_to_pages(k, v, *pool, **pages)

    def packed(like: torch.Tensor) -> Any:
        codes, scales = (torch.full((4, n), value, device=like.device).byte() for n, value in ((32, 0), (2, 127)))
        return kb.fp4_tensor(codes, scales, dtype=like.dtype)

    partial = functools.partial
    return {
        "layer_norm": Case(kb.layer_norm, (x, (24,), (24,))),
        "rms_norm": Case(lambda x, w, r: kb.rms_norm(x, w, residual=r), (x, (24,), x)),
        "sparse_linear": Case(partial(kb.sparse_linear, **active), (x, w, (48,))),
        "sparse_forward": Case(partial(kb.sparse_forward, **active), (x, w, (48,))),
        "sparse_dw": Case(partial(kb.sparse_dw, **active), (x, dy)),
        "sparse_dx": Case(partial(kb.sparse_dx, **active), (dy, w)),
        "sparse_backward": Case(partial(kb.sparse_backward, **active), (x, w, dy), differentiable=False),
        "flash_attention": Case(partial(kb.flash_attention, causal=True), ((1, 2, 5, 16),) * 3),
        "paged_attention": Case(
            partial(kb.paged_attention, **pages), ((2, 2, 1, 16), (4, 2, 16, 16), (4, 2, 16, 16)), differentiable=False
        ),
        "append_to_pages": Case(append, ((2, 2, 1, 16), (2, 2, 1, 16)), differentiable=False),
        "gather_matmul": Case(partial(kb.gather_matmul, rows=rows), (x, (8, 24))),
        "scatter_ffn": Case(partial(kb.scatter_ffn, neurons=rows), (x, (8, 24), (8, 24))),
        "nf4_quantize": Case(kb.nf4_quantize, ((2, 4, 64),), differentiable=False),
        "nf4_dequantize": Case(lambda w: kb.nf4_dequantize(_QUANTIZED, dtype=w.dtype), ((1,),), differentiable=False),
        "fp4_quantize": Case(kb.fp4_quantize, ((2, 4, 64),), differentiable=False),
        "fp4_tensor": Case(packed, ((1,),), differentiable=False),
        "nf4_matmul": Case(lambda x: kb.nf4_matmul(x, _QUANTIZED, 1), ((3, 64),)),
        "scatter2scatter": Case(partial(kb.scatter2scatter, routing=routing), (x, (3, 24, 16))),
        "moe_lora": Case(partial(kb.moe_lora, routing=routing), (x, (3, 24, 16), (3, 4, 24), (3, 16, 4))),
        "route": Case(lambda _: kb.route(_ids(0, 1, 1, 2).view(2, 2), 3), ((1,),), differentiable=False),
    }


_QUANTIZED = kb.nf4_quantize(torch.randn(2, 4, 64, device=runtime.DEVICE))


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _tensors(part)]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return [value for value in vars(result).values() if isinstance(value, torch.Tensor)]
    return []


def _outcome(attempt: Callable[[], object]) -> str:
    """Whether the attempt went well; the two ways of failing that are meant are errors that say so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return ERROR
    return YES


def _leaves(case: Case, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    inputs = (torch.randn(shape, device=runtime.DEVICE).to(dtype) for shape in case.shapes)
    return [t.requires_grad_(case.differentiable) for t in inputs]


def _first_order(case: Case, inputs: list[torch.Tensor], call: Call | None = None, **how: Any) -> Any:
    outputs = [t for t in _tensors((call or case.call)(*inputs)) if t.requires_grad]
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], **how)


def _compiles(case: Case) -> None:
    torch._dynamo.reset()
    backend = "inductor" if runtime.DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(case.call, fullgraph=True, backend=backend)
    if case.differentiable:
        _first_order(case, _leaves(case), compiled)
    else:
        compiled(*_leaves(case))


def _second_order(case: Case) -> None:
    inputs = _leaves(case)
    gradients = _first_order(case, inputs, create_graph=True)
    torch.autograd.grad([g.sum() for g in gradients if g.requires_grad], inputs, allow_unused=True)


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """Within the context, the first entry counts the kernels that are launched."""
    count = [0]
    if runtime.INTERPRET:
        from triton.runtime.interpreter import GridExecutor as Watched
    else:
        from triton.runtime.jit import JITFunction as Watched
    name = "__call__" if runtime.INTERPRET else "run"
    launch = getattr(Watched, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return launch(*args, **kwargs)

    with mock.patch.object(Watched, name, counted):  # a launcher that sees this leaves the launch to Triton
        yield count


def _launches(case: Case) -> str:
    inputs = _leaves(case)
    with _counting() as forward:
        results = case.call(*inputs)
    if not case.differentiable:
        return str(forward[0])
    outputs = [t for t in _tensors(results) if t.requires_grad]
    with _counting() as backward:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs])
    return f"{forward[0]} + {backward[0]}"


RELATIVES = {
    "sm_80": ("nvidia-a30",),
    "sm_89": ("nvidia-l4",),
    "sm_90": ("nvidia-h100", "nvidia-gh200"),
}  # of one generation


def generations() -> list[dict[str, str]]:
    """A line for each GPU that kernels are compiled for: what it is, and whether somebody measured on it."""
    from kernelbook.lab import record

    measured = sorted(p.name for p in record.results_dir().iterdir() if (p / "ceilings.csv").is_file())
    lines = []
    for target, properties in runtime.TARGETS.items():
        here = [gpu for gpu in measured if gpu.startswith((runtime.slug(properties.name), *RELATIVES.get(target, ())))]
        lines.append({
            "generation": target,
            "such as": properties.name,
            "shared memory of a program": f"{properties.shared_memory_per_program // 1024} KiB",
            "compiled in the tests": YES,
            "figures recorded": ", ".join(record.gpu_name(gpu) for gpu in here) or NO,
        })  # fmt: skip
    return lines


def _tested(name: str, pattern: str) -> str:
    """Whether a test of the function's room that only a GPU runs has such a name."""
    room = getattr(kb, name).__module__.split(".")[1]
    nodes = [n for path in ROOT.glob(f"tests/test_{room}.py") for n in ast.parse(path.read_text(encoding="utf-8")).body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    of_gpu = [f.name for f in functions if "pytest.mark.gpu" in map(ast.unparse, f.decorator_list)]
    return "tested" if any(re.search(pattern, test) for test in of_gpu) else "-"


def row(name: str, case: Case) -> dict[str, str]:
    """One line of the table."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    works = [names[d] for d in DTYPES if _outcome(lambda d=d: case.call(*_leaves(case, d))) == YES]
    line = {"dtypes": "all" if len(works) == len(DTYPES) else ", ".join(works)}
    line["torch.compile"] = _outcome(lambda: _compiles(case))
    with torch.autocast(runtime.DEVICE.type, dtype=torch.bfloat16):
        line["autocast"] = _outcome(lambda: case.call(*_leaves(case)))
    line["gradients"] = _outcome(lambda: _first_order(case, _leaves(case))) if case.differentiable else NO
    line["of gradients"] = _outcome(lambda: _second_order(case)) if case.differentiable else NO
    inputs = [t.detach() for t in _leaves(case)]
    forward = _outcome(lambda: torch.func.jvp(case.call, tuple(inputs), tuple(torch.ones_like(t) for t in inputs)))
    line["forward mode"] = forward if case.differentiable else NO
    line["launches"] = _launches(case)
    line["CUDA graph"] = _tested(name, "graph")
    line["same bits"] = _tested(name, "reproducible|bitwise|deterministic|same_bits")
    return line


def matrix() -> dict[str, dict[str, str]]:
    """The table: a line for each function."""
    with contextlib.suppress(RuntimeError):
        torch.manual_seed(0)
    return {name: row(name, case) for name, case in cases().items()}
