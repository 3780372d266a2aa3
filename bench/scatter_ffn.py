"""What is measured of ``scatter_ffn``: the chosen neurons beside all of them, and what PyTorch users would write."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pandas as pd
import torch

from bench import Bench, Calls, Tensors, floor
from bench.models import MODELS
from kernelbook import check, runtime, study
from kernelbook.lab import record, timing
from kernelbook.scatter_ffn import op
from kernelbook.scatter_ffn.reference import dense_ffn, gather_matmul_reference, scatter_ffn_reference
from kernelbook.study.scatter_ffn import launch_fused

ATOMICS_KEY = ("op", "variant", "dtype", "shape", "programs")

TOKENS = (1, 16, 128, 1024)
FRACTIONS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)


class Shape(NamedTuple):
    """One network: K inputs and outputs, N neurons."""

    k: int
    n: int
    gated: bool
    activation: str

    def text(self, m: int) -> dict[str, Any]:
        """The columns of ``shape``; what is not the default is named."""
        found: dict[str, Any] = {"M": m, "K": self.k, "N": self.n}
        return found | ({"gated": True, "activation": self.activation} if self.gated else {})

    def active(self, fraction: float) -> int:
        return max(1, round(self.n * fraction))

    def counts(self, m: int, active: int) -> tuple[float, float]:
        """gbytes and gflop: the listed rows of two or three matrices, x and y; in 16 bits."""
        matrices = 3 if self.gated else 2
        return 2 * (matrices * active * self.k + 2 * m * self.k) / 1e9, 2 * matrices * m * active * self.k / 1e9


PLAIN = Shape(4096, 16384, False, "relu")
LLAMA = Shape(4096, 11008, True, "silu")  # Llama-7B


def _network(shape: Shape, m: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=runtime.DEVICE)

    found = {
        "x": randn(m, shape.k),
        "w_up": randn(shape.n, shape.k) / shape.k**0.5,
        "w_down": randn(shape.n, shape.k) / shape.n**0.5,
    }
    return found | ({"w_gate": randn(shape.n, shape.k) / shape.k**0.5} if shape.gated else {})


def _neurons(n: int, count: int) -> torch.Tensor:
    """``count`` different neurons in random order."""
    return torch.randperm(n, device=runtime.DEVICE)[:count]


def _wide(network: dict[str, Any]) -> dict[str, Any]:
    return {name: t.double() for name, t in network.items()}


def _forward(shape: Shape, m: int, fraction: float) -> timing.Problem:
    network = _network(shape, m)
    neurons = _neurons(shape.n, shape.active(fraction))
    how: dict[str, Any] = {"activation": shape.activation}
    # What torch.nn.Linear stores: its product reads rows, the gathered one would have to read columns.
    by_column = {**network, "w_down": network["w_down"].t().contiguous().t()}
    calls: Calls = {
        "dense": lambda: [dense_ffn(**network, **how)],
        "gather": lambda: [scatter_ffn_reference(**network, neurons=neurons, **how)],
        "kernelbook": lambda: [op.scatter_ffn(**network, neurons=neurons, **how)],
    }
    if not shape.gated and m <= 128:
        calls["kernelbook:fused"] = lambda: [study.scatter_ffn_with_atomics(**network, neurons=neurons, **how)]
    if not shape.gated and fraction <= 0.5 and m <= 128:
        calls["kernelbook:columns"] = lambda: [op.scatter_ffn(**by_column, neurons=neurons, **how)]

    def dense_on_masked(_: Tensors) -> Tensors:
        """The dense network computes something else; with zeros for the other neurons it is the same."""
        mask = torch.zeros(shape.n, dtype=torch.bool, device=neurons.device).index_fill_(0, neurons, True)
        return [dense_ffn(**{**network, "w_down": torch.where(mask[:, None], network["w_down"], 0)}, **how)]

    return timing.Problem(
        calls,
        lambda: [scatter_ffn_reference(**_wide(network), neurons=neurons, **how)],
        calls["gather"],
        check.FORWARD_FACTOR,
        {"dense": dense_on_masked},
    )


def _gather(shape: Shape, m: int, fraction: float) -> timing.Problem:
    network = _network(shape, m)
    x, weight, rows = network["x"], network["w_up"], _neurons(shape.n, shape.active(fraction))
    calls: Calls = {
        "gather": lambda: [gather_matmul_reference(x, weight, rows, activation="relu")],
        "kernelbook": lambda: [op.gather_matmul(x, weight, rows, activation="relu")],
    }
    return timing.Problem(
        calls,
        lambda: [gather_matmul_reference(x.double(), weight.double(), rows, activation="relu")],
        calls["gather"],
        check.FORWARD_FACTOR,
    )


def _case(
    op: str, build: Callable[..., timing.Problem], shape: Shape, m: int, fraction: float,
    counts: tuple[float, float] | None = None,
) -> timing.Case:  # fmt: skip
    """A forward pass with a fraction of the neurons; ``counts``: its gbytes and gflop, where they are not the network's."""
    gbytes, gflop = shape.counts(m, shape.active(fraction)) if counts is None else counts
    build = functools.partial(build, shape, m, fraction)
    return timing.Case(op, "forward", torch.bfloat16, shape.text(m), "active", fraction, gbytes, gflop, build)


def _read(shape: Shape, m: int, fraction: float) -> timing.Problem:
    network, neurons = _network(shape, m), _neurons(shape.n, shape.active(fraction))
    weights = [network[name] for name in ("w_up", "w_gate", "w_down") if network.get(name) is not None]

    def truth() -> Tensors:
        return [floor.fold([weight[neurons] for weight in weights])]

    *first, last = weights
    calls: Calls = {
        "kernelbook": lambda: [floor.read_rows(weights, neurons)],
        # As the two products have to: the second launch begins when the first one has ended.
        "kernelbook:in two": lambda: [floor.read_rows(first, neurons), floor.read_rows([last], neurons)],
    }
    views = {provider: lambda out: [floor.fold(out)] for provider in calls}
    return timing.Problem(calls, truth, truth, check.FORWARD_FACTOR, views)


def cases() -> Iterator[timing.Case]:
    """Both networks at every number of tokens and fraction; the up projection alone, the floor."""
    for shape in (PLAIN, LLAMA):
        for m in TOKENS:
            for fraction in FRACTIONS:
                yield _case("scatter_ffn", _forward, shape, m, fraction)
    for m in (4, 32, 64, 256, 4096):
        yield _case("scatter_ffn", _forward, PLAIN, m, 0.1)
    active, k = PLAIN.active(0.1), PLAIN.k
    for m in TOKENS:
        counts = 2 * (active * k + m * k + m * active) / 1e9, 2 * m * active * k / 1e9
        yield _case("gather_matmul", _gather, PLAIN, m, 0.1, counts)
    for shape in (PLAIN, LLAMA):  # the floor: a kernel that reads the listed rows of the weights and does nothing else
        for fraction in FRACTIONS:
            counts = shape.counts(0, shape.active(fraction))[0], 0.0
            yield _case("read_rows", _read, shape, 1, fraction, counts)


def models() -> Iterator[timing.Case]:
    """The dense networks of this year's models, a tenth of their neurons active: one token, and a batch of 16."""
    for k, n in sorted({(model.hidden, model.intermediate) for model in MODELS.values() if model.intermediate}):
        for m in (1, 16):
            yield _case("scatter_ffn", _forward, Shape(k, n, True, "silu"), m, 0.1)


def atomics_experiment() -> pd.DataFrame:
    """The fused kernel with atomic additions and with plain stores in their place, for tokens and programs."""
    run, rows = record.new_run(), []
    about = record.environment("scatter_ffn_atomics")
    for m in (1, 16, 32, 64, 128):
        network = _network(PLAIN, m)
        for fraction in (0.1, 0.25):
            neurons = _neurons(PLAIN.n, PLAIN.active(fraction))
            exact = scatter_ffn_reference(**_wide(network), neurons=neurons)
            baseline = scatter_ffn_reference(**network, neurons=neurons)
            for block_l in (16, 32, 64, 128):
                how: dict[str, Any] = {"neurons": neurons, "activation": "relu", "block_l": block_l}
                ours = study.scatter_ffn_with_atomics(**network, **how)
                check.compare("fused", ours, exact, baseline).require()
                for variant in ("add", "store"):
                    fused = functools.partial(launch_fused, **network, **how, add=variant == "add")
                    time = timing.measure(lambda fused=fused: fused().to(torch.bfloat16), rep_ms=20.0)  # type: ignore[misc]
                    row: dict[str, Any] = {
                        "run": run, "op": "fused_ffn", "variant": variant, "dtype": "bfloat16",
                        "shape": f"M={m} K={PLAIN.k} N={PLAIN.n} active={fraction} block_l={block_l}",
                        "programs": -(-len(neurons) // block_l) * -(-m // 16),
                        "time_ms": f"{time.ms:.5g}", "p20_ms": f"{time.p20:.5g}", "p80_ms": f"{time.p80:.5g}",
                    }  # fmt: skip
                    rows.append(row | about)
    return pd.DataFrame(rows)


def extras() -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables of another kind."""
    yield "scatter_ffn_atomics", atomics_experiment()


BENCH = Bench(
    name="scatter_ffn",
    keys={"scatter_ffn_atomics": ATOMICS_KEY},
    baselines={"dense": "torch", "gather": "torch"},
    cases=cases,
    models=models,
    extras=extras,
)
