"""What is measured: one :class:`Bench` each for the rooms, for modules and whole models, for several GPUs and for experiments.

``python -m bench layer_norm``, or ``make bench ROOM=layer_norm``, measures one of them and writes its rows into ``book/results/<gpu>``.
This folder is no part of the installed package: run it in the repository. Importing it imports none of the benches.
"""

import dataclasses
import functools
import gc
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bench import baselines
from kernelbook import runtime
from kernelbook.cases import FUNCTIONS
from kernelbook.lab import record, timing
from kernelbook.lab.timing import Case

Tensors = Sequence[torch.Tensor]
Calls = dict[str, Callable[[], Tensors]]
# The rooms: each is a package of this name. What `packed` has is measured with the others.
ROOMS = tuple(sorted(set(FUNCTIONS) - {"packed"}))
CASE_BY_CASE = (*ROOMS, "moe_block")
# Those beyond have tables and a clock of their own.
NAMES = (*CASE_BY_CASE, "host", "several_gpus", "whole_model", "same_loss", "sparse_inference", "sparse_training")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured of one thing; module ``bench.<name>`` makes it, as ``BENCH``.

    Attributes:
        name: of the module, and what the names of its files in ``book/results/<gpu>`` begin with.
        baselines: for each provider that is not ours the distribution whose version dates it. A provider is meant up to a colon.
        needs: by distribution, what is not measured without it, where that is more than a baseline.
        left_out: what is not measured though one would expect it, and why.
        cases: what is measured, case by case.
        models: further cases, at the sizes of published models; their file is ``models.csv``.
        extras: tables of another kind as they come, each with the stem of its file.
        keys: of files with other columns the columns that tell one row from another, by the stem.
        run: measures into a folder, where a table and a clock of its own take the place of cases. Returns the exit code.
        options: those of the command's ``select`` and ``layers`` that ``run`` takes.
    """

    name: str
    baselines: Mapping[str, str]
    needs: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    cases: Callable[[], Iterable[Case]] | None = None
    models: Callable[[], Iterable[Case]] = tuple
    extras: Callable[[], Iterator[tuple[str, pd.DataFrame]]] | None = None
    keys: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    run: Callable[..., int] | None = None
    options: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """What is not measured here, and why."""
        lost: dict[str, list[str]] = {}
        for provider, package in self.baselines.items():
            lost.setdefault(package, []).append(provider)
        wanted = {package: ", ".join(providers) for package, providers in lost.items()} | self.needs
        absent = [package for package in wanted if baselines.version(package) is None]
        return [*(f"{wanted[package]} (package {package} is not installed)" for package in absent), *self.left_out]


def bench(name: str) -> Bench:
    """The bench of that name."""
    if name not in NAMES:
        raise ValueError(f"bench: name must be one of {', '.join(NAMES)}, got {name!r}")
    found: Bench = importlib.import_module(f"{__name__}.{name}").BENCH
    return found


def benches(names: Iterable[str] = NAMES) -> list[Bench]:
    """The benches of these names, or all of them."""
    return [bench(name) for name in names]


def forget() -> None:
    """Gives memory back that nobody holds any more, so that what comes is measured alike."""
    gc.collect()
    if runtime.DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def passes(
    mode: str, call: Callable[..., Any], leaves: Sequence[torch.Tensor], up: Sequence[torch.Tensor]
) -> Callable[[], Sequence[torch.Tensor]]:
    """What is timed of ``call(*leaves)``, which gives a tensor or several: its results, or the gradients of the leaves for ``up``.

    Mode ``backward`` has the forward pass behind it, ``forward_backward`` takes both.
    """

    def results(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found = call(*given)
        return [found] if isinstance(found, torch.Tensor) else found

    if mode == "forward":
        given = [leaf.detach() for leaf in leaves]
        return lambda: results(given)
    if mode == "backward":
        kept = results(leaves)
        return lambda: torch.autograd.grad(kept, leaves, up, retain_graph=True)
    return lambda: torch.autograd.grad(results(leaves), leaves, up)


def step(
    call: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], up: torch.Tensor
) -> Callable[[], Sequence[torch.Tensor]]:
    """Both passes of ``call(*leaves)``: the result, and the gradients of the leaves."""

    def both() -> Sequence[torch.Tensor]:
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, up)]

    return both


@functools.lru_cache(maxsize=64)
def routing(tokens: int, experts: int, slots: int, zipf: float = 0.0) -> torch.Tensor:
    """-> (T, k) int64 on the CPU: each token to different experts at random, the same ones on every machine.

    Evenly, or with preferences that fall off like ``1 / rank ** zipf``: a softmax's numbers with Gumbel noise, the largest.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(tokens, experts, generator=generator)
    if zipf:
        rank = torch.randperm(experts, generator=generator) + 1.0
        drawn = -zipf * rank.log() - (-drawn.log()).log()
    return drawn.topk(slots).indices


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile`` of a function for one shape, whatever was compiled before."""
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = (
        False  # it forbids to run a backward pass twice, which is what measuring does
    )
    return torch.compile(function, dynamic=False, **how)


def row(
    op: str, mode: str, provider: str, dtype: torch.dtype, shape: str, x: tuple[str, float], found: timing.Timing,
    **figures: float,
) -> dict[str, str]:  # fmt: skip
    """A row of what has a clock of its own, without run and environment; the figures that are not given are NaN."""
    ms = {"ms": found.ms, "ms_p20": found.p20, "ms_p80": found.p80}
    numbers = dict.fromkeys(record.FIGURES, math.nan) | {"gpus": 1} | ms | figures
    named = {"op": op, "mode": mode, "provider": provider, "dtype": str(dtype).removeprefix("torch."), "shape": shape}
    return named | {"x_name": x[0], "x": f"{x[1]:.12g}"} | {name: f"{value:.6g}" for name, value in numbers.items()}


def write_ceilings(folder: Path, run: str, *, quick: bool = False) -> None:
    """Measures what the machine reaches, and writes it as that of a run."""
    row = timing.ceilings_row(timing.measure_ceilings(quick=quick), run)
    record.write_results(folder / "ceilings.csv", row, key=("run",))
