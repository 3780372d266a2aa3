"""What is measured of ``layer_norm`` and ``rms_norm``: forward and backward beside PyTorch, torch.compile and Liger (and
Quack where it is installed), and the lock's barrier."""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F

from bench import Bench, Tensors, baselines, compiled, passes
from bench.models import MODELS
from kernelbook import check, memory, runtime
from kernelbook.lab import record, timing
from kernelbook.layer_norm import op
from kernelbook.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference, rms_norm_reference
from kernelbook.study import layer_norm as study

EPS, RMS_EPS = 1e-5, 1e-6
NAMED_SHAPES = ((4096, 1024), (4096, 4096), (4096, 8192), (4096, 15872), (65536, 4096))
SMALL_SHAPES = ((64, 256), (512, 1024))
SWEEP_M, SWEEP_N = 4096, tuple(512 * i for i in range(2, 32))
# By function and mode: tensors of (M, N) that are read or written, and operations for each of its numbers.
COUNTS = {
    ("layer_norm", "forward"): (2, 8),
    ("layer_norm", "backward"): (3, 14),
    ("layer_norm", "forward_backward"): (5, 22),
    ("rms_norm", "forward"): (2, 4),
    ("rms_norm", "backward"): (3, 10),
}
BARRIER_KEY = ("op", "variant", "dtype", "shape")

# Of x (M, N), weight (N,) and bias (N,), or for RMSNorm a residual (M, N) if one is to be added: the rows, and with it the sum.
Norm = Callable[..., Any]


def _inputs(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x (M, N), weight (N,), bias (N,), dy (M, N)."""
    device = runtime.DEVICE
    x, dy = (torch.randn(m, n, dtype=dtype, device=device) for _ in range(2))
    w, b = (torch.randn(n, dtype=dtype, device=device) for _ in range(2))
    return x, w, b, dy


def _layer_norms() -> dict[str, Norm]:
    """The forward function of each provider that is installed."""
    found: dict[str, Norm] = {
        "torch": lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        "kernelbook": lambda x, w, b: op.layer_norm(x, w, b, EPS),
    }
    if baselines.has("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        found["liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS)
    return found


def _rms_norms() -> dict[str, Norm]:
    """The same for RMSNorm."""

    def by_torch(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Any:
        total = x + residual[0] if residual else x
        normed = F.rms_norm(total, w.shape, w, RMS_EPS)
        return (normed, total) if residual else normed

    def ours(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Any:
        return op.rms_norm(x, w, RMS_EPS, residual=residual[0]) if residual else op.rms_norm(x, w, RMS_EPS)

    found: dict[str, Norm] = {"torch": by_torch, "kernelbook": ours}
    if baselines.has("liger_kernel"):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Any:
            # Not in place: its backward pass would otherwise write into the upstream gradient, which is given again.
            if residual:
                return LigerFusedAddRMSNormFunction.apply(x, residual[0], w, RMS_EPS, 0.0, "llama", False)
            return LigerRMSNormFunction.apply(x, w, RMS_EPS, 0.0, "llama", False)

        found["liger"] = liger
    if baselines.has("quack"):
        from quack import rmsnorm

        def quack(x: torch.Tensor, w: torch.Tensor, *residual: torch.Tensor) -> Any:
            if residual:
                return rmsnorm(x, w, residual=residual[0], eps=RMS_EPS, prenorm=True)
            return rmsnorm(x, w, eps=RMS_EPS)

        found["quack"] = quack
    return found


def _quack(mode: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> Callable[[], Tensors]:
    """Its LayerNorm, whose parameters are float32 alone; there is no autograd around its passes."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    x, w, b = x.detach(), w.detach().float(), b.detach().float()
    if mode == "forward":
        return lambda: [layernorm_fwd(x, w, b, eps=EPS)]

    def forward() -> Tensors:
        return layernorm_fwd(x, w, b, eps=EPS, return_rstd=True, return_mean=True)

    saved = forward()

    def backward() -> Tensors:
        _, rstd, mean = forward() if mode == "forward_backward" else saved
        return layernorm_bwd(x, w, dy, rstd, mean)

    return backward


def _problem(
    name: str, mode: str, m: int, n: int, dtype: torch.dtype, with_compile: bool, residual: bool
) -> timing.Problem:
    x, w, b, dy = _inputs(m, n, dtype)
    more = [torch.randn_like(x) for _ in range(2 * residual)]  # what is added, and the gradient of the sum
    given, up = [x, w, *more[:1]], [dy, *more[1:]]
    norms = _rms_norms()
    if name == "layer_norm":
        given, norms = [x, w, b], _layer_norms()
    if with_compile:
        norms["torch.compile"] = compiled(norms["torch"])
        norms["kernelbook:compiled"] = compiled(norms["kernelbook"], fullgraph=True)
    if name == "layer_norm" and mode == "backward":
        norms["kernelbook:locks"] = functools.partial(study.layer_norm_with_locks, eps=EPS)
    leaves = [t.requires_grad_() for t in given]
    calls = {provider: passes(mode, norm, leaves, up) for provider, norm in norms.items()}
    views = {}
    if name == "layer_norm" and baselines.has("quack"):
        calls["quack"] = _quack(mode, x, w, b, dy)
        views["quack"] = lambda outputs: [output.to(dtype) for output in outputs]

    def reference(x: torch.Tensor, w: torch.Tensor, *more: torch.Tensor) -> Any:
        if name == "layer_norm":
            return layer_norm_reference(x, w, more[0], EPS)
        return rms_norm_reference(x, w, RMS_EPS, *more)

    def truth() -> Tensors:
        exact = [t.detach().double().requires_grad_() for t in leaves]
        return passes(mode, reference, exact, [t.double() for t in up])()

    factor = check.FORWARD_FACTOR if mode == "forward" else check.GRADIENT_FACTOR
    return timing.Problem(calls, truth, calls["torch"], factor, views)


def _case(
    name: str,
    mode: str,
    m: int,
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    with_compile: bool = False,
    residual: bool = False,
) -> timing.Case:
    tensors, operations = COUNTS[name, mode]
    tensors += residual * (2 if mode == "forward" else 1)
    gbytes, gflop = tensors * m * n * dtype.itemsize / 1e9, operations * m * n / 1e9
    shape = {"M": m, "N": n} | ({"residual": 1} if residual else {})
    build = functools.partial(_problem, name, mode, m, n, dtype, with_compile, residual)
    return timing.Case(name, mode, dtype, shape, "N", n, gbytes, gflop, build)


def cases() -> Iterator[timing.Case]:
    """Small shapes, where the host decides; the chapter's table with every peer; a sweep over N without torch.compile."""
    for m, n in SMALL_SHAPES:
        for mode in ("forward", "forward_backward"):
            yield _case("layer_norm", mode, m, n, with_compile=True)
    for m, n in NAMED_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            for mode in ("forward", "backward"):
                yield _case("layer_norm", mode, m, n, dtype, with_compile=True)
    for mode in ("forward", "backward"):
        for m, n in NAMED_SHAPES:
            yield _case("rms_norm", mode, m, n, with_compile=True)
        for m, n in ((4096, 4096), (65536, 4096)):
            yield _case("rms_norm", mode, m, n, residual=True, with_compile=True)
        for name in ("layer_norm", "rms_norm"):
            for n in SWEEP_N:
                if (SWEEP_M, n) not in NAMED_SHAPES:
                    yield _case(name, mode, SWEEP_M, n)


def models() -> Iterator[timing.Case]:
    """The widths of this year's models: RMSNorm, which they all use, on a prompt; LayerNorm on a short one."""
    for n in sorted({model.hidden for model in MODELS.values()}):
        for mode in ("forward", "backward"):
            yield _case("rms_norm", mode, 8192, n, with_compile=True)
            yield _case("layer_norm", mode, 1000, n)


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
    return pd.DataFrame(rows)


def extras() -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables of another kind."""
    yield "layer_norm_barrier", barrier_experiment()


BENCH = Bench(
    name="layer_norm",
    keys={"layer_norm_barrier": BARRIER_KEY},
    baselines={"torch": "torch", "torch.compile": "torch", "liger": "liger-kernel", "quack": "quack-kernels"},
    cases=cases,
    models=models,
    extras=extras,
)
