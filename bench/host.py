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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from tabulate import tabulate

import kernelbook as kb
from bench import Bench
from kernelbook.cases import FUNCTIONS, Given, collect, draw, draw_shares
from kernelbook.lab import record, timing

COLUMNS = ("run", "provider", "call", "host_us", "u", "processes", *record.ENVIRONMENT)
PROCESSES = 5
BF16 = torch.bfloat16
CASES = collect(rooms=FUNCTIONS)
Sizes = dict[str, Any]
NEW_SHAPES, CALLS = 40, 30
CACHE, GROWTH = 1000, 300  # keys, and how many times a cache grows by one


# What PyTorch has of its own: a case, its sizes, and PyTorch's call.
PAIRS: dict[str, tuple[str, Sizes, Callable[..., torch.Tensor]]] = {
    "layer_norm": ("layer_norm", {"m": 64, "n": 256}, lambda x, weight, bias, eps: F.layer_norm(x, (256,), weight, bias, eps)),
    "rms_norm": ("rms_norm", {"m": 64, "n": 256}, lambda x, weight: F.rms_norm(x, (256,), weight, 1e-6)),
    "linear": (
        "sparse_linear", {"m": 64, "d_in": 256, "d_out": 256, "chunk": 64, "share": 0.5, "mode": "sparse_dw"},
        lambda x, weight, bias, **_: F.linear(x, weight, bias),
    ),
    "sdpa": (
        "flash_attention", {"b": 1, "h": 4, "group": 1, "n": 64, "s": 64, "d": 64},
        lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    ),
    "ffn": (
        "scatter_ffn", {"m": 64, "k": 256, "n": 512, "k_out": 256, "count": 128, "gated": False, "activation": "relu"},
        lambda x, w_up, w_down, **_: F.relu(x @ w_up.t()) @ w_down,
    ),
}  # fmt: skip
# Others of ours: a case, its sizes, and what is differentiated where both passes are one call.
HEADS: Sizes = {"b": 1, "h": 4, "group": 8, "n": 1, "d": 128}
PAGES = HEADS | {"page": 64, "per": 4}
LAYER: Sizes = {"m": 64, "d_in": 256, "d_out": 1024, "chunk": 64, "share": 0.25}
LORA: Sizes = {"tokens": 16, "experts": 8, "k": 128, "n": 128, "rank": 16, "bias": False, "gates": False}
MATRIX: Sizes = {"m": 1, "n": 64, "k": 256, "experts": 4}
BLOCK: Sizes = {"k": 256, "n": 1024, "k_out": 256, "count": 100, "gated": False, "activation": "relu"}
OURS: dict[str, tuple[str, Sizes, str]] = {
    "flash_attention, one query": ("flash_attention", HEADS | {"s": 256, "causal": False}, ""),
    "paged_attention, one query": ("paged_attention", PAGES, ""),
    "append_to_pages": ("append_to_pages", PAGES, ""),
    "flash_attention, forward and backward": (
        "flash_attention", {"b": 1, "h": 8, "group": 1, "n": 128, "s": 128, "d": 64}, "q k v"
    ),
    "route": ("route", {"tokens": 16, "experts": 8}, ""),
    "scatter2scatter": ("scatter2scatter", {"tokens": 16, "experts": 8, "k": 128, "n": 128}, ""),
    "moe_lora, r = 16": ("moe_lora", LORA, ""),
    "moe_lora, forward and backward": ("moe_lora", LORA, "x lora_a lora_b"),
    "nf4_dequantize": ("nf4_dequantize", {"e": 4, "n": 64, "k": 256}, ""),
    "nf4_matmul": ("nf4_matmul", MATRIX, ""),
    "nf4_matmul, forward and backward": ("nf4_matmul", MATRIX, "x"),
    "gather_matmul": ("gather_matmul", {"m": 1, "k": 256, "n": 1024, "count": 100, "activation": None}, ""),
    "scatter_ffn, one token": ("scatter_ffn", BLOCK | {"m": 1}, ""),
    "scatter_ffn, 16 tokens": ("scatter_ffn", BLOCK | {"m": 16}, ""),
    "scatter_ffn, forward and backward": ("scatter_ffn", BLOCK | {"m": 16}, "x"),
    "sparse_forward": ("sparse_forward", LAYER | {"bias": False}, ""),
    "sparse_dx": ("sparse_dx", LAYER, ""),
    "sparse_dw": ("sparse_dw", LAYER, ""),
    "sparse_backward": ("sparse_backward", LAYER, ""),
    "sparse_linear, forward and backward": ("sparse_linear", LAYER | {"bias": False, "mode": "sparse_dw"}, "weight"),
}  # fmt: skip
# What is called with shapes that were never seen: the size that changes, and the others.
CHANGING: dict[str, tuple[str, Sizes]] = {
    "layer_norm": ("m", {"n": 256}),
    "sparse_linear": ("m", {"d_in": 256, "d_out": 256, "chunk": 64, "share": 0.5, "mode": "sparse_dw"}),
    "flash_attention": ("n", {"b": 1, "h": 4, "group": 1, "d": 64, "causal": False}),
    "scatter_ffn": ("m", {"k": 256, "n": 256, "k_out": 256, "count": 2, "gated": False, "activation": "relu"}),
    "moe_lora": ("tokens", {"experts": 8, "k": 256, "n": 256, "rank": 16, "bias": False, "gates": False}),
}


def _step(function: Callable[..., torch.Tensor], given: Given, names: Iterable[str]) -> Callable[[], object]:
    """Both passes of a call, with the gradients of these arguments."""
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    inputs, dy, call = (
        [*leaves.values()],
        torch.randn_like(function(**given)),
        functools.partial(function, **given | leaves),
    )
    return lambda: torch.autograd.grad(call(), inputs, dy)


def _pairs() -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """The call, ours, PyTorch's."""
    for name, (of, sizes, theirs) in PAIRS.items():
        case = CASES[of]
        given = case.of(BF16, **sizes)
        yield name, functools.partial(case.function, **given), functools.partial(theirs, **given)
        leaves = case.leaves(given)
        yield f"{name}, forward and backward", _step(case.function, given, leaves), _step(theirs, given, leaves)


def _ours() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that have no equal in PyTorch."""
    for name, (of, sizes, leaves) in OURS.items():
        given, function = CASES[of].of(BF16, **sizes), getattr(kb, of)
        yield name, _step(function, given, leaves.split()) if leaves else functools.partial(function, **given)
    routed = {"x": draw(4, 128), "gates": draw_shares(4, 2), **CASES["route"].of(tokens=4, experts=8)}
    del routed["num_experts"]
    for name, kind in (("gated_experts", None), ("gated_experts, 4 bits", "64")):
        sides = {"gate_up": {"n": 128, "k": 128}, "down": {"n": 128, "k": 64}}
        stored = {n: CASES["scatter2scatter"].of(BF16, experts=8, kind=kind, **side)["w"] for n, side in sides.items()}
        stored = stored if kind else {n: w.mT.contiguous() for n, w in stored.items()}
        given = {n: t.to(BF16) if t.is_floating_point() else t for n, t in routed.items()} | stored
        yield name, functools.partial(collect(rooms=("nn",))["gated_experts"].function, **given)


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
    for name, (size, others) in CHANGING.items():
        case = CASES[name]
        shapes = [others | {size: 64 + i} | ({"s": 64 + i} if size == "n" else {}) for i in range(NEW_SHAPES)]
        made = [functools.partial(case.function, **case.of(BF16, **sizes)) for sizes in shapes]
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
    q, cache = (draw(*shape).to(BF16) for shape in ((1, 32, 1, 128), (2, 1, 8, CACHE + GROWTH, 128)))
    for n in range(CACHE, CACHE + GROWTH + 64, 64):
        kb.flash_attention(q, *cache[:, :, :, :n])  # compiles
    timing.wait()
    calls = [functools.partial(kb.flash_attention, q, *cache[:, :, :, :n]) for n in range(CACHE + 1, CACHE + GROWTH)]
    return statistics.mean(_times(call, 1)[0] for call in calls)


def measured() -> list[tuple[str, str, float]]:
    """Provider, call and microseconds, in this process; the first is ``u``."""
    x, y = (draw(64, 256).to(BF16) for _ in range(2))
    rows = [("torch", "u", timing.host_us(lambda: torch.add(x, 1, out=y)))]
    for name, ours, theirs in _pairs():
        rows += [("kernelbook", name, timing.host_us(ours)), ("torch", name, timing.host_us(theirs))]
    rows += [("kernelbook", name, timing.host_us(ours)) for name, ours in _ours()]
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
    about = {"run": record.new_run(), "processes": PROCESSES, **record.environment("host")}
    rows = []
    for i, (provider, call, _) in enumerate(found[0]):
        us = statistics.median(each[i][2] for each in found)
        # Within its own process each call is so many u; the column holds the median of these.
        share = statistics.median(each[i][2] / each[0][2] for each in found)
        rows.append({**about, "provider": provider, "call": call, "host_us": f"{us:.2f}", "u": f"{share:.2f}"})
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    record.write_results(folder / "host.csv", table, key=("provider", "call"))
    print(tabulate(table[["provider", "call", "host_us", "u"]], headers="keys", showindex=False))
    return 0


BENCH = Bench(
    name="host",
    keys={"host": ("provider", "call")},
    baselines={"torch": "torch"},
    run=run,
)

if __name__ == "__main__":
    print(json.dumps(measured()))
