"""What is measured of ``layer_norm`` and ``rms_norm``: forward and backward beside PyTorch, torch.compile and Liger (and
Quack where it is installed), and the lock's barrier."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from bench import Bench, baselines
from bench.models import MODELS
from kernelbook import check, memory, runtime
from kernelbook.lab import record, timing
from kernelbook.layer_norm import op
from kernelbook.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference, rms_norm_reference
from kernelbook.study import layer_norm as study

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BENCH",
    "barrier_experiment",
    "cases",
    "count_wrong_runs",
    "extras",
]

EPS, RMS_EPS = 1e-5, 1e-6
NAMED_SHAPES = ((4096, 1024), (4096, 4096), (4096, 8192), (4096, 15872), (65536, 4096))
SMALL_SHAPES = ((64, 256), (512, 1024))
SWEEP_M, SWEEP_N = 4096, tuple(512 * i for i in range(2, 32))

BARRIER_COLUMNS = ("run", "op", "variant", "dtype", "shape", "runs", "wrong", *record.ENVIRONMENT)
BARRIER_KEY = ("op", "variant", "dtype", "shape")

LayerNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _layer_norms(with_compile: bool | None) -> dict[str, LayerNorm]:
    """The forward function of each provider that is installed; ``None``: of PyTorch's and ours alone."""

    def torch_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, w.shape, w, b, EPS)

    providers: dict[str, LayerNorm] = {"torch": torch_layer_norm}
    if with_compile:
        torch._dynamo.reset()
        # Donated buffers forbid to run a backward pass twice, which is what measuring does.
        torch._functorch.config.donated_buffer = False
        providers["torch.compile"] = torch.compile(torch_layer_norm, dynamic=False)
        ours = torch.compile(lambda x, w, b: op.layer_norm(x, w, b, EPS), dynamic=False, fullgraph=True)
        providers["kernelbook:compiled"] = ours
    if with_compile is not None and baselines.has("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        def liger_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return LigerLayerNormFunction.apply(x, w, b, EPS)

        providers["liger"] = liger_layer_norm
    providers["kernelbook"] = functools.partial(op.layer_norm, eps=EPS)
    return providers


def _inputs(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x (M, N), weight (N,), bias (N,), dy (M, N)."""
    device = runtime.DEVICE
    x, dy = (torch.randn(m, n, dtype=dtype, device=device) for _ in range(2))
    w, b = (torch.randn(n, dtype=dtype, device=device) for _ in range(2))
    return x, w, b, dy


def _listed(norm: LayerNorm, *inputs: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    return lambda: [norm(*inputs)]


def _quack(
    mode: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor
) -> Callable[[], Sequence[torch.Tensor]]:
    """Its parameters are float32 alone, and there is no autograd around its passes."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    x, w, b = x.detach(), w.detach().float(), b.detach().float()
    if mode == "forward":
        return lambda: [layernorm_fwd(x, w, b, eps=EPS)]

    def forward() -> Sequence[torch.Tensor]:
        return layernorm_fwd(x, w, b, eps=EPS, return_rstd=True, return_mean=True)

    saved = forward()

    def backward() -> Sequence[torch.Tensor]:
        _, rstd, mean = forward() if mode == "forward_backward" else saved
        return layernorm_bwd(x, w, dy, rstd, mean)

    return backward


def _forward(m: int, n: int, dtype: torch.dtype, with_compile: bool | None) -> timing.Problem:
    x, w, b, dy = _inputs(m, n, dtype)
    norms = _layer_norms(with_compile)
    providers = {name: _listed(norm, x, w, b) for name, norm in norms.items()}
    if with_compile is not None and baselines.has("quack"):
        providers["quack"] = _quack("forward", x, w, b, dy)
    return timing.Problem(
        providers=providers,
        truth=lambda: [layer_norm_reference(x.double(), w.double(), b.double(), EPS)],
        baseline=lambda: [norms["torch"](x, w, b)],
        factor=check.FORWARD_FACTOR,
    )


def _backward(m: int, n: int, dtype: torch.dtype, with_compile: bool | None) -> timing.Problem:
    x, w, b, dy = _inputs(m, n, dtype)
    leaves = tuple(tensor.requires_grad_() for tensor in (x, w, b))

    def gradients(norm: LayerNorm) -> Callable[[], Sequence[torch.Tensor]]:
        y = norm(*leaves)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    norms = _layer_norms(with_compile)
    norms["kernelbook:locks"] = functools.partial(study.layer_norm_with_locks, eps=EPS)
    providers = {name: gradients(norm) for name, norm in norms.items()}
    if with_compile is not None and baselines.has("quack"):
        providers["quack"] = _quack("backward", x, w, b, dy)
    return timing.Problem(
        providers=providers,
        truth=lambda: layer_norm_backward_reference(dy.double(), x.detach().double(), w.detach().double(), EPS),
        baseline=providers["torch"],
        factor=check.GRADIENT_FACTOR,
        views={"quack": lambda gradients: [gradient.to(dtype) for gradient in gradients]},
    )


def _forward_backward(m: int, n: int, dtype: torch.dtype, with_compile: bool | None) -> timing.Problem:
    x, w, b, dy = _inputs(m, n, dtype)
    leaves = tuple(tensor.requires_grad_() for tensor in (x, w, b))

    def step(norm: LayerNorm) -> Callable[[], Sequence[torch.Tensor]]:
        return lambda: torch.autograd.grad(norm(*leaves), leaves, dy)

    providers = {name: step(norm) for name, norm in _layer_norms(with_compile).items()}
    if with_compile is not None and baselines.has("quack"):
        providers["quack"] = _quack("forward_backward", x, w, b, dy)
    return timing.Problem(
        providers=providers,
        truth=lambda: layer_norm_backward_reference(dy.double(), x.detach().double(), w.detach().double(), EPS),
        baseline=providers["torch"],
        factor=check.GRADIENT_FACTOR,
        views={"quack": lambda gradients: [gradient.to(dtype) for gradient in gradients]},
    )


def _case(mode: str, m: int, n: int, dtype: torch.dtype, with_compile: bool | None) -> timing.Case:
    build = {"forward": _forward, "backward": _backward, "forward_backward": _forward_backward}[mode]
    tensors, operations = {"forward": (2, 8), "backward": (3, 14), "forward_backward": (5, 22)}[mode]
    return timing.Case(
        op="layer_norm",
        mode=mode,
        dtype=dtype,
        shape={"M": m, "N": n},
        x_name="N",
        x=n,
        gbytes=tensors * m * n * dtype.itemsize / 1e9,
        gflop=operations * m * n / 1e9,
        build=lambda: build(m, n, dtype, with_compile),
    )


# --- rms_norm -------------------------------------------------------------------------------------------------------

# x (M, N), weight (N,) and, where it is to be added, a residual (M, N) -> the normalized rows and, with it, the sum.
RMSNorm = Callable[..., Sequence[torch.Tensor]]


def _rms_norms(with_compile: bool | None) -> dict[str, RMSNorm]:
    """The forward function of each provider that is installed; ``None``: of PyTorch's and ours alone."""

    def torch_rms_norm(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Sequence[torch.Tensor]:
        total = x + residual[0] if residual else x
        return (F.rms_norm(total, w.shape, w, RMS_EPS), total)[: 1 + len(residual)]

    def ours(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Sequence[torch.Tensor]:
        return op.rms_norm(x, w, RMS_EPS, residual=residual[0]) if residual else (op.rms_norm(x, w, RMS_EPS),)

    providers: dict[str, RMSNorm] = {"torch": torch_rms_norm}
    if with_compile:
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False
        providers["torch.compile"] = torch.compile(torch_rms_norm, dynamic=False)
        providers["kernelbook:compiled"] = torch.compile(ours, dynamic=False, fullgraph=True)
    if with_compile is not None and baselines.has("liger_kernel"):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger_rms_norm(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Sequence[torch.Tensor]:
            # Not in place: its backward pass would otherwise write into the upstream gradient, which is given again.
            if residual:
                return LigerFusedAddRMSNormFunction.apply(x, residual[0], w, RMS_EPS, 0.0, "llama", False)
            return (LigerRMSNormFunction.apply(x, w, RMS_EPS, 0.0, "llama", False),)

        providers["liger"] = liger_rms_norm
    if with_compile is not None and baselines.has("quack"):
        from quack import rmsnorm

        def quack_rms_norm(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Sequence[torch.Tensor]:
            if residual:
                return rmsnorm(x, w, residual=residual[0], eps=RMS_EPS, prenorm=True)
            return (rmsnorm(x, w, eps=RMS_EPS),)

        providers["quack"] = quack_rms_norm
    providers["kernelbook"] = ours
    return providers


def _rms_problem(
    mode: str, m: int, n: int, dtype: torch.dtype, residual: bool, with_compile: bool | None
) -> timing.Problem:
    x, w, _, dy = _inputs(m, n, dtype)
    given = [x, w, *([torch.randn_like(x)] if residual else [])]
    up = [dy, *([torch.randn_like(x)] if residual else [])]

    def reference(leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found = rms_norm_reference(leaves[0], leaves[1], RMS_EPS, *leaves[2:])
        return list(found) if residual else [found]

    norms = _rms_norms(with_compile)
    if mode == "forward":
        forward = {name: functools.partial(norm, *given) for name, norm in norms.items()}
        return timing.Problem(
            providers=forward,
            truth=lambda: reference([t.double() for t in given]),
            baseline=forward["torch"],
            factor=check.FORWARD_FACTOR,
        )
    leaves = [t.requires_grad_() for t in given]

    def backward(norm: RMSNorm) -> Callable[[], Sequence[torch.Tensor]]:
        results = norm(*leaves)
        return lambda: torch.autograd.grad(results, leaves, up, retain_graph=True)

    def truth() -> Sequence[torch.Tensor]:
        exact = [t.detach().double().requires_grad_() for t in leaves]
        return torch.autograd.grad(reference(exact), exact, [t.double() for t in up])

    providers = {name: backward(norm) for name, norm in norms.items()}
    return timing.Problem(providers=providers, truth=truth, baseline=providers["torch"], factor=check.GRADIENT_FACTOR)


def _rms_case(mode: str, m: int, n: int, *, residual: bool = False, with_compile: bool | None = False) -> timing.Case:
    tensors = {"forward": 2, "backward": 3}[mode] + (residual * (2 if mode == "forward" else 1))
    dtype = torch.bfloat16
    return timing.Case(
        op="rms_norm",
        mode=mode,
        dtype=dtype,
        shape={"M": m, "N": n, **({"residual": 1} if residual else {})},
        x_name="N",
        x=n,
        gbytes=tensors * m * n * dtype.itemsize / 1e9,
        gflop=(4 if mode == "forward" else 10) * m * n / 1e9,
        build=lambda: _rms_problem(mode, m, n, dtype, residual, with_compile),
    )


def _rms_cases() -> Iterator[timing.Case]:
    for mode in ("forward", "backward"):
        for m, n in NAMED_SHAPES:
            yield _rms_case(mode, m, n, with_compile=True)
        for m, n in ((4096, 4096), (65536, 4096)):
            yield _rms_case(mode, m, n, residual=True, with_compile=True)
        for n in SWEEP_N:
            if (SWEEP_M, n) not in NAMED_SHAPES:
                yield _rms_case(mode, SWEEP_M, n)


def _first_call(n: int) -> timing.Case:
    code = f"""
import kernelbook as kb
x = torch.randn(4096, {n}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.ones({n}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
# first call
kb.layer_norm(x, w).backward(x)
"""
    return timing.Case(
        op="layer_norm",
        mode="first_call",
        dtype=torch.bfloat16,
        shape={"M": 4096, "N": n},
        x_name="N",
        x=n,
        gbytes=0.0,
        gflop=0.0,
        build=lambda: timing.FirstCall({"kernelbook": code}),
    )


def cases() -> Iterator[timing.Case]:
    """Small shapes, where the host decides; the chapter's table with every peer; a sweep over N without torch.compile; and a
    first call."""
    for m, n in SMALL_SHAPES:
        for mode in ("forward", "forward_backward"):
            yield _case(mode, m, n, torch.bfloat16, with_compile=True)
    for m, n in NAMED_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            for mode in ("forward", "backward"):
                yield _case(mode, m, n, dtype, with_compile=True)
    for n in SWEEP_N:
        if (SWEEP_M, n) not in NAMED_SHAPES:
            for mode in ("forward", "backward"):
                yield _case(mode, SWEEP_M, n, torch.bfloat16, with_compile=False)
    yield from _rms_cases()
    yield _first_call(4096)


def models() -> Iterator[timing.Case]:
    """The widths of this year's models: RMSNorm, which they all use, on a prompt; LayerNorm on a short one."""
    for n in sorted({model.hidden for model in MODELS.values()}):
        for mode in ("forward", "backward"):
            yield _rms_case(mode, 8192, n, with_compile=True)
            yield _case(mode, 1000, n, torch.bfloat16, with_compile=False)


def host_calls() -> dict[str, Callable[[], object]]:
    """Small calls, whose cost is the host's."""
    x, w, b, dy = _inputs(64, 256, torch.bfloat16)
    leaf = x.clone().requires_grad_()
    return {
        "layer_norm": lambda: op.layer_norm(x, w, b),
        "layer_norm, forward and backward": lambda: op.layer_norm(leaf, w, b).backward(dy),
        "rms_norm": lambda: op.rms_norm(x, w),
        "rms_norm, forward and backward": lambda: op.rms_norm(leaf, w).backward(dy),
    }


# --- the experiment with the lock -----------------------------------------------------------------------------------


def count_wrong_runs(*, barrier: bool, buffers: int, runs: int = 100, m: int = 8192, n: int = 2048) -> int:
    """How many of ``runs`` launches of the lock kernel give wrong sums, with or without the barrier before the release.

    The fewer ``buffers``, the more programs wait for each lock. The sums are float32, so right ones are off by some
    1e-6; an addition that is lost shows as 1e-4 or more.
    """
    x, w, _, dy = _inputs(m, n, torch.float32)
    statistics = torch.stack([x.mean(1), torch.rsqrt(x.var(1, unbiased=False) + EPS)])
    _, dw, db = layer_norm_backward_reference(dy.double(), x.double(), w.double(), EPS)
    constants = {"HAS_WEIGHT": True, "WITH_DW": True, "WITH_DB": True, "ACC": memory.tl_accumulator(torch.float32)}
    wrong = 0
    for _ in range(runs):
        sums = study.launch_locks(
            x, dy, w, statistics, torch.empty_like(x), constants, buffers=buffers, barrier=barrier
        )
        errors = [
            check.relative_error(total.double().sum(0), exact) for total, exact in zip(sums, (dw, db), strict=True)
        ]
        wrong += not max(errors) < 1e-5
    return wrong


def count_wrong_runs_apart(*, barrier: bool, buffers: int, runs: int, timeout_s: float = 120.0) -> int:
    """:func:`count_wrong_runs` in a process of its own with a time limit: a broken lock can also hang."""
    call = f"count_wrong_runs(barrier={barrier}, buffers={buffers}, runs={runs})"
    program = f"from bench.layer_norm import count_wrong_runs; print({call})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout_s, check=True
    )
    return int(done.stdout.split()[-1])


def barrier_experiment(*, runs: int = 100) -> pd.DataFrame:
    """Counts wrong runs with and without the barrier, for few and for many buffers."""
    import pandas as pd

    rows = [
        {
            "run": record.new_run(),
            "op": "layer_norm",
            "variant": "barrier" if barrier else "no_barrier",
            "dtype": "float32",
            "shape": f"M=8192 N=2048 buffers={buffers}",
            "runs": runs,
            "wrong": count_wrong_runs_apart(barrier=barrier, buffers=buffers, runs=runs),
            **record.environment("layer_norm_barrier"),
        }
        for buffers in (1, 8, 64)
        for barrier in (True, False)
    ]
    return pd.DataFrame(rows, columns=list(BARRIER_COLUMNS))


def extras() -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables of another kind."""
    yield "layer_norm_barrier", barrier_experiment()


BENCH = Bench(
    name="layer_norm",
    keys={"layer_norm_barrier": BARRIER_KEY},
    baselines={"torch": "torch", "torch.compile": "torch", "liger": "liger-kernel", "quack": "quack-kernels"},
    cases=cases,
    models=models,
    host_calls=host_calls,
    extras=extras,
)
