"""What a call costs the host, on small tensors, where the device has less to do than the host.

``python -m bench host`` asks five new processes in turn and records the median of each call in ``host.csv``, beside
``u``: the host's time for ``torch.add(x, 1, out=y)`` in the same process, PyTorch's cheapest operator.
"""

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from tabulate import tabulate

import bench as registry
import kernelbook as kb
from kernelbook import runtime
from kernelbook.lab import record, timing

__all__ = ["BENCH", "measured"]

COLUMNS = ("run", "provider", "call", "host_us", "u", "processes", *record.ENVIRONMENT)
PROCESSES = 5
BF16 = torch.bfloat16
NEW_SHAPES, CALLS = 40, 30
CACHE, GROWTH = 1000, 300  # keys, and how many times a cache grows by one


def _tensor(*shape: int, leaf: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=runtime.DEVICE, dtype=BF16, requires_grad=leaf)


def _forward_and_backward(call: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], object]:
    dy = torch.randn_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, dy)


def _pairs() -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """What PyTorch has of its own: the call, ours, PyTorch's."""
    x, w, b = _tensor(64, 256, leaf=True), _tensor(256, leaf=True), _tensor(256, leaf=True)
    weight, q = _tensor(256, 256, leaf=True), _tensor(1, 4, 64, 64, leaf=True)
    w_up, w_down = _tensor(512, 256, leaf=True), _tensor(512, 256, leaf=True)
    neurons, chunks = (torch.arange(0, n, step, device=runtime.DEVICE) for n, step in ((512, 4), (2, 1)))
    calls: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "layer_norm": (kb.layer_norm, lambda x, w, b: F.layer_norm(x, (256,), w, b), (x, w, b)),
        "rms_norm": (kb.rms_norm, lambda x, w: F.rms_norm(x, (256,), w, 1e-6), (x, w)),
        "linear": (lambda x, w, b: kb.sparse_linear(x, w, b, chunks), F.linear, (x, weight, b)),
        "sdpa": (
            lambda q, k, v: kb.flash_attention(q, k, v, causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            (q, _tensor(1, 4, 64, 64, leaf=True), _tensor(1, 4, 64, 64, leaf=True)),
        ),
        "ffn": (
            lambda x, up, down: kb.scatter_ffn(x, up, down, neurons),
            lambda x, up, down: F.relu(x @ up.t()) @ down,
            (x, w_up, w_down),
        ),
    }
    for name, (ours, theirs, leaves) in calls.items():
        plain = [leaf.detach() for leaf in leaves]
        yield name, lambda f=ours, t=plain: f(*t), lambda f=theirs, t=plain: f(*t)  # type: ignore[misc]
        yield (
            f"{name}, forward and backward",
            _forward_and_backward(ours, *leaves),
            _forward_and_backward(theirs, *leaves),
        )


def _times(call: Callable[[], object], count: int) -> list[float]:
    """The host's microseconds of each of ``count`` calls in a row."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    timing.wait()
    return times


def _new_shapes() -> Iterator[tuple[str, float]]:
    """Medians over shapes that were never seen, of kernels that were: the first calls with one, and later ones."""
    w, experts = _tensor(256, 256), _tensor(8, 256, 256)
    lora, chunks = (_tensor(8, 16, 256), _tensor(8, 256, 16)), torch.arange(2, device=runtime.DEVICE)

    def routed(rows: int) -> tuple[torch.Tensor, kb.Routing]:
        return _tensor(rows, 256), kb.route(torch.randint(8, (rows, 2), device=runtime.DEVICE), 8)

    calls: dict[str, tuple[Callable[..., object], Callable[[int], tuple[Any, ...]]]] = {
        "layer_norm": (lambda x: kb.layer_norm(x, w[0], w[1]), lambda rows: (_tensor(rows, 256),)),
        "sparse_linear": (lambda x: kb.sparse_linear(x, w, w[0], chunks), lambda rows: (_tensor(rows, 256),)),
        "flash_attention": (kb.flash_attention, lambda rows: (_tensor(1, 4, rows, 64),) * 3),
        "scatter_ffn": (lambda x: kb.scatter_ffn(x, w, w, chunks), lambda rows: (_tensor(rows, 256),)),
        "moe_lora": (lambda x, routing: kb.moe_lora(x, experts, *lora, routing), routed),
    }
    for name, (call, make) in calls.items():
        made = [functools.partial(call, *make(64 + i)) for i in range(NEW_SHAPES)]
        timing.wait()
        times = [_times(each, CALLS) for each in made][NEW_SHAPES // 4 :]  # the first ones may compile
        parts = {
            "the first call": slice(1),
            "the second": slice(1, 2),
            "2 to 11": slice(1, 11),
            "later": slice(CALLS // 3, CALLS),
        }
        for what, part in parts.items():
            yield f"{name}, a new shape, {what}", statistics.median(statistics.median(each[part]) for each in times)


def _growing_cache() -> float:
    """The mean of one query's calls with a cache that grows by a key a call."""
    q, cache = _tensor(1, 32, 1, 128), _tensor(2, 1, 8, CACHE + GROWTH, 128)
    for n in range(CACHE, CACHE + GROWTH + 64, 64):
        kb.flash_attention(q, *cache[:, :, :, :n])  # compiles
    timing.wait()
    calls = [functools.partial(kb.flash_attention, q, *cache[:, :, :, :n]) for n in range(CACHE + 1, CACHE + GROWTH)]
    return statistics.mean(_times(call, 1)[0] for call in calls)


def measured() -> list[tuple[str, str, float]]:
    """Provider, call and microseconds, in this process; the first is ``u``."""
    x, y = _tensor(64, 256), _tensor(64, 256)
    rows = [("torch", "u", timing.host_us(lambda: torch.add(x, 1, out=y)))]
    for name, ours, theirs in _pairs():
        rows += [("kernelbook", name, timing.host_us(ours)), ("torch", name, timing.host_us(theirs))]
    known = {call for _, call, _ in rows}
    for one in registry.benches(registry.CASE_BY_CASE):
        rows += [("kernelbook", name, timing.host_us(f)) for name, f in one.host_calls().items() if name not in known]
    rows += [("kernelbook", name, us) for name, us in _new_shapes()]
    return [*rows, ("kernelbook", "flash_attention, one query, a growing cache", _growing_cache())]


def run(folder: Path) -> int:
    """Writes ``host.csv``: medians over processes."""
    found: list[list[tuple[str, str, float]]] = []
    for _ in range(PROCESSES):
        done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, timeout=600)
        if done.returncode:
            print(f"NOT RECORDED: host: {done.stderr[-2000:]}", file=sys.stderr)
            return 1
        found.append(json.loads(done.stdout.splitlines()[-1]))
    environment, run_id = record.environment("host"), record.new_run()
    medians = [statistics.median(each[i][2] for each in found) for i in range(len(found[0]))]
    # Within its own process each call is so many u; the column holds the median of these.
    shares = [statistics.median(each[i][2] / each[0][2] for each in found) for i in range(len(found[0]))]
    rows = [
        {
            "run": run_id,
            "provider": provider,
            "call": call,
            "host_us": f"{us:.2f}",
            "u": f"{share:.2f}",
            "processes": PROCESSES,
        }
        for (provider, call, _), us, share in zip(found[0], medians, shares, strict=True)
    ]
    record.write_results(
        folder / "host.csv",
        pd.DataFrame([{**row, **environment} for row in rows], columns=list(COLUMNS)),
        key=("provider", "call"),
    )
    print(
        tabulate(
            [[row["provider"], row["call"], row["host_us"], row["u"]] for row in rows], ("provider", "call", "us", "u")
        )
    )
    return 0


BENCH = registry.Bench(
    name="host",
    keys={"host": ("provider", "call")},
    baselines={"torch": "torch"},
    run=run,
)

if __name__ == "__main__":
    print(json.dumps(measured()))
