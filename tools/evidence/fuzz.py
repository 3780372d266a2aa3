"""Calls every public function and module with whatever hypothesis thinks of, and compares with the reference.

    python tools/evidence/fuzz.py --examples 20000 --processes 12 --seconds 600 --out fuzz.json

Shapes (one, primes, more than a tile, nothing), strides, offsets of storage, dtypes, which inputs want a gradient, autocast,
options, and values from tiny to large. Each example is held to the error rule of ``kernelbook.check``, with uninitialised
memory poisoned; under the interpreter memory is watched too. A failure is shrunk, printed, and makes the command fail.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "evidence")]

import kernelbook as kb  # noqa: E402

# isort: split
import hypothesis  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from hypothesis import strategies as st  # noqa: E402
from interpreters import mend_interpreter  # noqa: E402

from kernelbook import check, nn, runtime  # noqa: E402
from kernelbook.attention import flash_attention_reference, paged_attention_reference  # noqa: E402
from kernelbook.attention.reference import _seen, append_to_pages_reference  # noqa: E402
from kernelbook.layer_norm import layer_norm_reference, rms_norm_reference  # noqa: E402
from kernelbook.moe_lora import moe_lora_reference, scatter2scatter_reference  # noqa: E402
from kernelbook.nf4.reference import nested_absmax_reference, nf4_dequantize_reference  # noqa: E402
from kernelbook.scatter_ffn import gather_matmul_reference, scatter_ffn_reference  # noqa: E402
from kernelbook.sparse_linear import (  # noqa: E402
    sparse_dw_reference,
    sparse_dx_reference,
    sparse_forward_reference,
    sparse_linear_reference,
)

ON_GPU = runtime.DEVICE.type == "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Verdicts = list[check.Verdict]
TARGETS: dict[str, tuple[dict[str, st.SearchStrategy[Any]], Callable[..., Verdicts]]] = {}


def sizes(largest: int, *, zero: bool = False) -> st.SearchStrategy[int]:
    """On a GPU see ``narrowed``; any under the interpreter, but small."""
    return st.integers(0 if zero else 1, largest if ON_GPU else min(largest, 70))


def target(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., Verdicts]], Callable[..., Verdicts]]:
    common = {
        "dtype": st.sampled_from(DTYPES),
        "layout": st.sampled_from(("dense", "dense", "offset", "turned", "stepped", "wide rows")),
        "scale": st.sampled_from((1.0, 1.0, 1e-3, 30.0, 0.0)),
        "wants": st.integers(0, 2**6 - 1),
    }

    def register(function: Callable[..., Verdicts]) -> Callable[..., Verdicts]:
        TARGETS[function.__name__] = common | strategies, function
        return function

    return register


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, stored in another way."""
    if tensor.dim() == 0 or tensor.numel() == 0 or layout == "dense":
        return tensor
    if layout == "offset":
        base = tensor.new_empty(tensor.numel() + 1)
        return base[1:].view(tensor.shape).copy_(tensor)
    if layout == "turned":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor
    if layout == "stepped":
        return tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2].copy_(tensor)
    return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 5))[..., 2:-3].copy_(tensor)


def rand(*shape: int, dtype: torch.dtype, layout: str = "dense", scale: float = 1.0) -> torch.Tensor:
    return laid_out((torch.randn(shape, device=runtime.DEVICE) * scale).to(dtype), layout)


def wanted(inputs: dict[str, Any], wants: int) -> tuple[str, ...]:
    """A subset of the inputs that can have a gradient."""
    names = [n for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return tuple(n for i, n in enumerate(names) if wants >> i & 1)


def ids(count: int, below: int, outside: bool = False) -> torch.Tensor:
    low, high = (-2, below + 2) if outside and ON_GPU else (0, below)
    return torch.randint(low, max(high, low + 1), (count,), device=runtime.DEVICE)


# --- functions ------------------------------------------------------------------------------------------------------


@target(
    m=sizes(257, zero=True), n=sizes(4096), weight=st.booleans(), bias=st.booleans(), shift=st.sampled_from((0.0, 100.0)),
    backward=st.sampled_from(("partials", "locks")), eps=st.sampled_from((1e-5, 1e-3)),
)  # fmt: skip
def layer_norm(
    m: int,
    n: int,
    weight: bool,
    bias: bool,
    shift: float,
    backward: str,
    eps: float,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    if shift:
        scale = max(
            scale, 1.0
        )  # rows of equal numbers have no deviations: float64 gives a rounding error, and not the truth
    inputs: dict[str, Any] = {"x": laid_out(rand(m, n, dtype=dtype, scale=scale) + shift, layout)}
    if weight:
        inputs["weight"] = rand(n, dtype=dtype, layout=layout)
    if bias:
        inputs["bias"] = rand(n, dtype=dtype, layout=layout)
    return check.check_op(
        functools.partial(kb.layer_norm, backward=backward, eps=eps), functools.partial(layer_norm_reference, eps=eps), inputs,
        grads=wanted(inputs, wants), baseline=lambda x, weight=None, bias=None: F.layer_norm(x, (n,), weight, bias, eps), require=False,
    )  # fmt: skip


@target(m=sizes(257, zero=True), n=sizes(4096), weight=st.booleans(), residual=st.booleans())
def rms_norm(
    m: int, n: int, weight: bool, residual: bool, dtype: torch.dtype, layout: str, scale: float, wants: int
) -> Verdicts:
    inputs: dict[str, Any] = {"x": rand(m, n, dtype=dtype, layout=layout, scale=scale)}
    if weight:
        inputs["weight"] = rand(n, dtype=dtype, layout=layout)
    if residual:
        inputs["residual"] = rand(m, n, dtype=dtype, layout=layout)
    grads = wanted(inputs, wants)
    if residual and grads == ("weight",):
        grads = ("x", "weight")  # the sum, the second output, depends on x alone
    return check.check_op(kb.rms_norm, rms_norm_reference, inputs, grads=grads, require=False)


_SPARSE = {
    "m": sizes(257, zero=True), "d_in": sizes(257), "d_out": sizes(512), "chunk": st.sampled_from((16, 48, 64)),
    "share": st.sampled_from((0.0, 0.1, 0.5, 1.0)),
}  # fmt: skip


def _chunks(d_out: int, chunk: int, share: float) -> torch.Tensor:
    count = -(-d_out // chunk)
    return torch.randperm(count, device=runtime.DEVICE)[: math.ceil(share * count)]


@target(**_SPARSE, mode=st.sampled_from(("dense", "sparse_dw", "sparse_dw_dx")), bias=st.booleans())
def sparse_linear(
    m: int,
    d_in: int,
    d_out: int,
    chunk: int,
    share: float,
    mode: str,
    bias: bool,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    given = {"active_chunks": _chunks(d_out, chunk, share), "chunk_size": chunk, "mode": mode}
    inputs: dict[str, Any] = {
        "x": rand(m, d_in, dtype=dtype, layout=layout, scale=scale),
        "weight": rand(d_out, d_in, dtype=dtype, layout=layout),
    }
    if bias:
        inputs["bias"] = rand(d_out, dtype=dtype, layout=layout)
    return check.check_op(
        functools.partial(kb.sparse_linear, **given), functools.partial(sparse_linear_reference, **given), inputs,
        grads=wanted(inputs, wants), require=False,
    )  # fmt: skip


@target(**_SPARSE, compact=st.booleans(), which=st.sampled_from(("forward", "dw", "dx", "backward")))
def sparse_parts(
    m: int,
    d_in: int,
    d_out: int,
    chunk: int,
    share: float,
    compact: bool,
    which: str,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    given = {"active_chunks": _chunks(d_out, chunk, share), "chunk_size": chunk}
    x, w, dy = (
        rand(m, d_in, dtype=dtype, layout=layout, scale=scale),
        rand(d_out, d_in, dtype=dtype, layout=layout),
        rand(m, d_out, dtype=dtype, layout=layout),
    )
    partial = functools.partial
    if which == "forward":
        return check.check_op(
            partial(kb.sparse_forward, bias=None, compact=compact, **given), partial(sparse_forward_reference, bias=None, compact=compact, **given),
            {"x": x, "weight": w}, grads=wanted({"x": x, "weight": w}, wants), require=False,
        )  # fmt: skip
    if which == "dw":
        grads = wanted({"x": x, "dy": dy}, wants)
        return check.check_op(
            partial(kb.sparse_dw, compact=compact, **given),
            partial(sparse_dw_reference, compact=compact, **given),
            {"x": x, "dy": dy},
            grads=("x", "dy") if grads == ("x",) else grads,  # db, the second result, depends on dy alone
            require=False,
        )
    if which == "dx":
        return check.check_op(
            partial(kb.sparse_dx, **given), partial(sparse_dx_reference, **given),
            {"dy": dy, "weight": w}, grads=wanted({"dy": dy, "weight": w}, wants), require=False,
        )  # fmt: skip

    def reference(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *sparse_dw_reference(x, dy, compact=compact, **given), sparse_dx_reference(dy, weight, **given)

    return check.check_op(
        partial(kb.sparse_backward, compact=compact, **given), reference, {"x": x, "weight": w, "dy": dy},
        forward_factor=check.GRADIENT_FACTOR, require=False,
    )  # fmt: skip


ACTIVATIONS = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu")


@target(
    m=sizes(128, zero=True),
    k=sizes(257),
    n=sizes(512),
    count=sizes(257, zero=True),
    activation=st.sampled_from((None, *ACTIVATIONS)),
    bias=st.booleans(),
)
def gather_matmul(
    m: int,
    k: int,
    n: int,
    count: int,
    activation: str | None,
    bias: bool,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    inputs: dict[str, Any] = {
        "x": rand(m, k, dtype=dtype, layout=layout, scale=scale),
        "weight": rand(n, k, dtype=dtype, layout=layout),
    }
    if bias:
        inputs["bias"] = rand(n, dtype=dtype, layout=layout)
    given = {"rows": ids(count, n), "activation": activation}
    return check.check_op(
        functools.partial(kb.gather_matmul, **given), functools.partial(gather_matmul_reference, **given), inputs,
        grads=wanted(inputs, wants), require=False,
    )  # fmt: skip


@target(
    m=sizes(128, zero=True), k=sizes(257), n=sizes(512), k_out=sizes(257), count=sizes(257, zero=True),
    activation=st.sampled_from(ACTIVATIONS), gated=st.booleans(), biases=st.integers(0, 7), deterministic=st.booleans(),
)  # fmt: skip
def scatter_ffn(
    m: int,
    k: int,
    n: int,
    k_out: int,
    count: int,
    activation: str,
    gated: bool,
    biases: int,
    deterministic: bool,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    inputs: dict[str, Any] = {
        "x": rand(m, k, dtype=dtype, layout=layout, scale=scale),
        "w_up": rand(n, k, dtype=dtype, layout=layout, scale=k**-0.5),
        "w_down": rand(n, k_out, dtype=dtype, layout=layout, scale=n**-0.5),
    }
    if gated:
        inputs["w_gate"] = rand(n, k, dtype=dtype, layout=layout, scale=k**-0.5)
    for i, (name, size) in enumerate((("b_up", n), ("b_down", k_out), ("b_gate", n))):
        if biases >> i & 1 and (gated or name != "b_gate"):
            inputs[name] = rand(size, dtype=dtype)
    given = {"neurons": ids(count, n), "activation": activation}
    return check.check_op(
        functools.partial(kb.scatter_ffn, deterministic=deterministic, **given), functools.partial(scatter_ffn_reference, **given), inputs,
        grads=wanted(inputs, wants), require=False,
    )  # fmt: skip


@target(
    b=st.integers(1, 3), h_kv=st.integers(1, 2), group=st.integers(1, 3), n=sizes(257, zero=True), s=sizes(512), d=st.sampled_from((8, 16, 40, 64, 128)),
    causal=st.booleans(), lengths=st.booleans(), window=st.sampled_from((None, None, 1, 20)), softmax=st.sampled_from((None, 0.3, -0.2)),
)  # fmt: skip
def flash_attention(
    b: int,
    h_kv: int,
    group: int,
    n: int,
    s: int,
    d: int,
    causal: bool,
    lengths: bool,
    window: int | None,
    softmax: float | None,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    given: dict[str, Any] = {"causal": causal, "scale": softmax}
    if lengths:
        given["lengths"] = torch.randint(0, s + 1, (b,), device=runtime.DEVICE)
    if causal and window:
        given["window"] = window
    seen = _seen(n, s, causal, given.get("lengths"), given.get("window"), runtime.DEVICE)
    # Where each query sees one key at most, the gradients of q and k are zero, and the rule's floor is absolute.
    size = min(scale, 3.0 if n and int(seen.sum(-1).max()) > 1 else 1.0)
    inputs = {
        name: rand(b, heads, m, d, dtype=dtype, layout=layout, scale=size)
        for name, heads, m in (("q", h_kv * group, n), ("k", h_kv, s), ("v", h_kv, s))
    }
    some = seen.any(-1, keepdim=True)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """PyTorch's own: like ours it keeps no probabilities, so the backward pass has its differences from the output."""
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))  # heads that share keys would get the plain one on a GPU
        try:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~some, scale=softmax)
        except RuntimeError:  # it chooses a kernel that does not take these strides
            o = F.scaled_dot_product_attention(*(t.contiguous() for t in (q, k, v)), seen | ~some, scale=softmax)
        return torch.where(some, o, 0.0)

    return check.check_op(
        functools.partial(kb.flash_attention, **given),
        functools.partial(flash_attention_reference, **given),
        inputs,
        grads=wanted(inputs, wants),
        baseline=fused if dtype == torch.float32 and n else None,
        require=False,
    )


@target(
    b=st.integers(1, 3),
    h_kv=st.integers(1, 2),
    group=st.integers(1, 4),
    n=st.integers(0, 16),
    d=st.sampled_from((8, 40, 64, 128)),
    page=st.sampled_from((16, 48, 64)),
    per=st.integers(1, 4),
    append=st.booleans(),
)
def pages(
    b: int,
    h_kv: int,
    group: int,
    n: int,
    d: int,
    page: int,
    per: int,
    append: bool,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    pool = [rand(b * per + 1, h_kv, page, d, dtype=dtype) for _ in range(2)]
    table = torch.randperm(b * per + 1, device=runtime.DEVICE)[: b * per].view(b, per)
    lengths = torch.randint(0, per * page - n + 1, (b,), device=runtime.DEVICE)
    if append:
        new = [rand(b, h_kv, n, d, dtype=dtype, layout=layout) for _ in range(2)]
        expected = [p.clone() for p in pool]
        append_to_pages_reference(*new, *expected, table, lengths)
        kb.append_to_pages(*new, *pool, table, lengths)
        assert all(torch.equal(ours, true) for ours, true in zip(pool, expected, strict=True)), "pages differ"
        return []
    q = rand(b, h_kv * group, n, d, dtype=dtype, layout=layout, scale=min(scale, 3.0))
    inputs = {"q": q, "k_pages": pool[0], "v_pages": pool[1], "block_table": table, "lengths": lengths}
    return check.check_op(kb.paged_attention, paged_attention_reference, inputs, require=False)


def _dense(q: Any, experts: torch.Tensor | None = None) -> torch.Tensor:
    absmax = q.absmax
    if q.double_quant:
        absmax = nested_absmax_reference(absmax, q.nested_absmax, q.nested_code, q.nested_offset)
    return nf4_dequantize_reference(q.packed, absmax, q.code, q.shape, q.block_size, experts)


@target(
    e=st.integers(1, 4),
    rows=sizes(257),
    cols=sizes(257),
    block=st.sampled_from((32, 64, 128)),
    double=st.booleans(),
    m=sizes(33),
    some=st.booleans(),
)
def nf4(
    e: int,
    rows: int,
    cols: int,
    block: int,
    double: bool,
    m: int,
    some: bool,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    q = kb.nf4_quantize(
        rand(e, rows, cols, dtype=dtype, layout=layout, scale=scale), block_size=block, double_quant=double
    )
    experts = ids(3, e) if some else None
    assert torch.equal(kb.nf4_dequantize(q, experts=experts, dtype=dtype), _dense(q, experts).to(dtype)), (
        "decoded values differ"
    )
    x, expert = rand(m, cols, dtype=dtype, layout=layout), ids(1, e)[0]
    w = _dense(q)[expert]
    return check.check_op(
        lambda x: kb.nf4_matmul(x, q, expert), lambda x: x @ w.to(x.dtype).t(), {"x": x}, grads=("x",) if wants & 1 else (),
        baseline=lambda x: x @ w.to(x.dtype).t(), require=False,
    )  # fmt: skip


@target(
    tokens=sizes(257, zero=True), experts=st.sampled_from((1, 4, 7, 64)), slots=st.integers(1, 3), k=sizes(128), n=sizes(257), rank=st.sampled_from((1, 8, 16)),
    grouped_in=st.booleans(), grouped_out=st.booleans(), gates=st.booleans(), bias=st.booleans(), lora=st.booleans(),
    strategy=st.sampled_from(("auto", "fused", "split")), skipped=st.sampled_from((0.0, 0.3)), plain=st.booleans(),
)  # fmt: skip
def moe_lora(
    tokens: int, experts: int, slots: int, k: int, n: int, rank: int, grouped_in: bool, grouped_out: bool, gates: bool, bias: bool, lora: bool,
    strategy: str, skipped: float, plain: bool, dtype: torch.dtype, layout: str, scale: float, wants: int,
) -> Verdicts:  # fmt: skip
    slots = min(slots, experts)
    chosen = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots]
    chosen = chosen.masked_fill(torch.rand(chosen.shape, device=chosen.device) < skipped, experts)
    routing = kb.route(chosen, experts)
    inputs: dict[str, Any] = {
        "x": rand(tokens * slots if grouped_in else tokens, k, dtype=dtype, layout=layout, scale=scale),
        "w": rand(experts, k, n, dtype=dtype, layout=layout, scale=k**-0.5),
    }
    how = {"grouped_in": grouped_in, "grouped_out": grouped_out and not gates}
    if plain:
        return check.check_op(
            functools.partial(kb.scatter2scatter, routing=routing, **how), functools.partial(scatter2scatter_reference, expert_ids=chosen, **how),
            inputs, grads=wanted(inputs, wants), require=False,
        )  # fmt: skip
    inputs["lora_a"] = rand(experts, rank, k, dtype=dtype, layout=layout, scale=k**-0.5) if lora else None
    inputs["lora_b"] = rand(experts, n, rank, dtype=dtype, layout=layout) if lora else None
    if bias:
        inputs["bias"] = rand(experts, n, dtype=dtype)
    if gates:
        inputs["gates"] = torch.rand(chosen.shape, device=chosen.device).to(dtype)
    return check.check_op(
        functools.partial(kb.moe_lora, routing=routing, strategy=strategy, scaling=0.5, **how),
        functools.partial(moe_lora_reference, expert_ids=chosen, scaling=0.5, **how), inputs, grads=wanted(inputs, wants), require=False,
    )  # fmt: skip


@target(
    tokens=sizes(257, zero=True), experts=st.sampled_from((1, 4, 7)), slots=st.integers(1, 3), k=st.sampled_from((1, 2, 3, 4, 8)), n=sizes(257), rank=st.sampled_from((0, 1, 8, 16)),
    format=st.sampled_from(("32", "64", "128 double", "mxfp4", "nvfp4")), gates=st.booleans(), bias=st.booleans(),
    strategy=st.sampled_from(("auto", "fused", "split")), skipped=st.sampled_from((0.0, 0.3)),
)  # fmt: skip
def packed_experts(
    tokens: int, experts: int, slots: int, k: int, n: int, rank: int, format: str, gates: bool, bias: bool, strategy: str, skipped: float,
    dtype: torch.dtype, layout: str, scale: float, wants: int,
) -> Verdicts:  # fmt: skip
    """Weights in 4 bits, of NF4 and FP4."""
    k, slots = 64 * k, min(slots, experts)
    dense = rand(experts, n, k, dtype=torch.float32, scale=k**-0.5)
    if "fp4" in format:
        q = kb.fp4_quantize(dense, format=format)
    else:
        q = kb.nf4_quantize(dense, block_size=int(format.split()[0]), double_quant="double" in format)
    w = kb.nf4_dequantize(q, dtype=dtype).transpose(1, 2)
    chosen = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots]
    chosen = chosen.masked_fill(torch.rand(chosen.shape, device=chosen.device) < skipped, experts)
    inputs: dict[str, Any] = {"x": rand(tokens, k, dtype=dtype, layout=layout, scale=scale)}
    inputs["lora_a"] = rand(experts, rank, k, dtype=dtype, layout=layout, scale=k**-0.5) if rank else None
    inputs["lora_b"] = rand(experts, n, rank, dtype=dtype, layout=layout) if rank else None
    if bias:
        inputs["bias"] = rand(experts, n, dtype=dtype)
    if gates:
        inputs["gates"] = torch.rand(chosen.shape, device=chosen.device).to(dtype)
    return check.check_op(
        functools.partial(kb.moe_lora, w=q, routing=kb.route(chosen, experts), strategy=strategy, scaling=0.5),
        lambda **t: moe_lora_reference(w=w.to(t["x"].dtype), expert_ids=chosen, scaling=0.5, **t),
        inputs, grads=wanted(inputs, wants), require=False,
    )  # fmt: skip


# --- modules, with and without autocast -----------------------------------------------------------------------------


@target(
    kind=st.sampled_from(("LayerNorm", "RMSNorm", "SparseLinear")),
    m=sizes(128, zero=True),
    n=sizes(257),
    n_out=sizes(257),
    bias=st.booleans(),
    autocast=st.sampled_from((None, torch.float16, torch.bfloat16)),
)
def modules(
    kind: str,
    m: int,
    n: int,
    n_out: int,
    bias: bool,
    autocast: torch.dtype | None,
    dtype: torch.dtype,
    layout: str,
    scale: float,
    wants: int,
) -> Verdicts:
    if kind == "SparseLinear":
        module: torch.nn.Module = nn.SparseLinear(n, n_out, bias=bias, device=runtime.DEVICE, dtype=dtype)
        plain: Callable[..., torch.Tensor] = lambda x, weight, bias=None: F.linear(x, weight, bias)  # noqa: E731
    elif kind == "LayerNorm":
        module, plain = (
            nn.LayerNorm(n, bias=bias, device=runtime.DEVICE, dtype=dtype),
            lambda x, weight, bias=None: F.layer_norm(x, (n,), weight, bias),
        )
    else:
        module, plain = (
            nn.RMSNorm(n, eps=1e-5, device=runtime.DEVICE, dtype=dtype),
            lambda x, weight: F.rms_norm(x, (n,), weight, 1e-5),
        )
    inputs = {
        "x": rand(m, n, dtype=dtype, layout=layout, scale=scale),
        **{name: p.detach().clone() for name, p in module.named_parameters()},
    }

    def ours(x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
        with torch.autocast(runtime.DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None):
            return torch.func.functional_call(module, parameters, (x,))

    def theirs(x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
        with torch.autocast(
            runtime.DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None and x.dtype != torch.float64
        ):
            return plain(x, **parameters).to(x.dtype if x.dtype == torch.float64 else result)

    with torch.no_grad():
        result = ours(**inputs).dtype
    return check.check_op(ours, theirs, inputs, grads=wanted(inputs, wants), require=False)


# --- campaigns ------------------------------------------------------------------------------------------------------


class WrongResultError(Exception):
    """A result that is not correct."""


def narrowed(strategies: dict[str, st.SearchStrategy[Any]], seed: str) -> dict[str, st.SearchStrategy[Any]]:
    """On a GPU most of the time would go into compiling, so a campaign keeps to what few kernels are compiled for.

    Options have one value. A size is zero, where that may be, or lies between powers of two; all are multiples of 16 or none is,
    as the compiler makes kernels of their own for these. Another campaign draws all this anew.
    """
    rng, narrow = random.Random(seed), {}
    for name, strategy in strategies.items():
        strategy = getattr(strategy, "wrapped_strategy", strategy)
        values = getattr(strategy, "elements", None)
        if name in ("scale", "wants", "b", "per"):
            narrow[name] = strategy
        elif repr(strategy) == "booleans()":
            narrow[name] = st.just(rng.random() < 0.5)
        elif values is not None:
            narrow[name] = st.just(rng.choice(list(values)))
        else:
            low, high = strategy.start, strategy.end  # type: ignore[attr-defined]
            if high <= 8:
                narrow[name] = st.just(rng.randint(low, high))
                continue
            most = high.bit_length()
            top = min(high, 2 ** (rng.randint(min(5, most), most) if rng.random() < 0.8 else rng.randint(0, most)))
            whole = rng.random() < 0.5
            fitting = [n for n in range(top // (4 if whole else 2) + 1, top + 1) if (n % 16 == 0) == whole] or [top]
            narrow[name] = st.sampled_from(([0] if low == 0 else []) + fitting)
    return narrow


def campaign(told: dict[str, Any], name: str, examples: int, seed: int, until: float, save: Callable[[], None]) -> None:
    """Tells how many examples ran, the worst ratio and where, and what failed first, shrunk."""
    strategies, function = TARGETS[name]
    if ON_GPU:
        strategies = narrowed(strategies, f"{name} {seed}")
    told |= {"examples": 0, "shapes": [], "worst": 0.0, "where": "", "element": 0.0, "failure": "", "drawn_again": 0}
    shapes: set[int] = set()

    def wrong(text: str, error: str) -> WrongResultError:
        told["failure"] = f"{name}({text}): {error}"  # the last is the smallest
        return WrongResultError(text)

    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, print_blob=False, suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.seed(seed)
    @hypothesis.given(**strategies)
    def run(**drawn: Any) -> None:
        if time.monotonic() > until:
            return  # no time: what is left passes without having run, and is not counted
        text = ", ".join(f"{k}={v}" for k, v in drawn.items())
        torch.manual_seed(zlib.crc32(text.encode()))  # the same values when it is shrunk
        with contextlib.nullcontext() if ON_GPU else watched():
            try:
                verdicts = function(**drawn)
            except check.CheckError as error:
                if "nothing to compare with" in str(error):
                    return
                raise wrong(text, str(error)) from error
            except Exception as error:
                if "out of memory" in str(error):  # others have filled the GPU: not tried, and not counted
                    torch.cuda.empty_cache()
                    return
                trace = "".join(traceback.format_tb(error.__traceback__)[-2:])
                raise wrong(text, f"{type(error).__name__}: {error}"[:400] + trace) from error
        told["examples"] += 1
        sizes = [v for k, v in drawn.items() if type(v) is int and k not in ("wants", "biases")]
        if (number := zlib.crc32(str((drawn["dtype"], sizes)).encode())) not in shapes:
            shapes.add(number)
            told["shapes"].append(number)
        save()
        for i, verdict in enumerate(verdicts):
            if not verdict.passed:
                if not _passes_on_average(i, verdict, lambda: function(**drawn)):
                    raise wrong(text, str(verdict))
                told["drawn_again"] += 1
                continue
            told["element"] = max(told["element"], verdict.element)
            if verdict.ratio > told["worst"]:
                told["worst"], told["where"] = verdict.ratio, f"{verdict.name}: {text}"

    try:
        run()
    except (WrongResultError, hypothesis.errors.HypothesisException) as error:
        told["failure"] = told["failure"] or f"{name}: {type(error).__name__}: {error}"


DRAWS = 16


def _passes_on_average(i: int, verdict: check.Verdict, example: Callable[[], Verdicts]) -> bool:
    """The same call with other random values: do the root mean squares of the errors keep the rule?

    PyTorch's error in a result of few elements is a matter of luck. Now and then it is next to nothing, and then its multiple
    says nothing. A kernel that is wrong is wrong with other values too. NaN, infinity and the bound on elements stay as they are.
    """
    found = [verdict]
    factor = (verdict.limit - verdict.floor) / verdict.baseline_error if verdict.baseline_error else 0.0
    for seed in range(1, DRAWS):
        if not math.isfinite(found[-1].error) or found[-1].element > 1.0:
            return False
        torch.manual_seed(seed)
        found.append(example()[i])
    ours, theirs = (
        math.sqrt(sum(e * e for e in errors) / DRAWS)
        for errors in zip(*((v.error, v.baseline_error) for v in found), strict=True)
    )
    return found[-1].element <= 1.0 and ours <= factor * theirs + verdict.floor


@contextlib.contextmanager
def watched() -> Iterator[None]:
    import watched_memory

    with watched_memory.watched():
        yield


def _work(jobs: list[tuple[str, int, int]], share: int, until: float, out: Path) -> None:
    """The campaigns ``jobs``, until so many examples ran or the time is over."""
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    saved = time.monotonic()

    def save(after: float = 3.0) -> None:
        """A process may be stopped at any time; what it saw counts."""
        nonlocal saved
        if time.monotonic() - saved >= after:
            out.with_suffix(".part").write_text(json.dumps(results))
            out.with_suffix(".part").replace(out)
            saved = time.monotonic()

    for name, examples, seed in jobs:
        if sum(part["examples"] for parts in results.values() for part in parts) >= share or time.monotonic() > until:
            break
        told: dict[str, Any] = {}
        results.setdefault(name, []).append(told)
        campaign(told, name, examples, seed, until, save)
        save(after=0.0)
        if "CUDA error" in told["failure"]:
            break  # this process can use its GPU no more


def summed_up(folder: Path) -> dict[str, dict[str, Any]]:
    """What all processes saw, by function. ``shapes`` counts the sizes and dtypes that differ."""
    summary: dict[str, dict[str, Any]] = {}
    shapes: dict[str, set[int]] = defaultdict(set)
    for path in sorted(folder.glob("*.json")):
        for name, parts in json.loads(path.read_text()).items():
            s = summary.setdefault(
                name,
                {
                    "examples": 0,
                    "shapes": 0,
                    "worst": 0.0,
                    "where": "",
                    "element": 0.0,
                    "drawn_again": 0,
                    "failures": [],
                },
            )
            for part in parts:
                s["examples"] += part["examples"]
                s["drawn_again"] += part["drawn_again"]
                shapes[name] |= set(part["shapes"])
                s["shapes"] = len(shapes[name])
                s["element"] = max(s["element"], part["element"])
                if part["worst"] > s["worst"]:
                    s["worst"], s["where"] = part["worst"], part["where"]
                if part["failure"]:
                    s["failures"].append(part["failure"])
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20000 if ON_GPU else 2000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not ON_GPU:
        mend_interpreter()
    os.environ.setdefault("KERNELBOOK_PLANS", "shipped")
    until, folder = time.monotonic() + args.seconds, args.out.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    # Small campaigns, dealt out: each begins with the simplest examples anew, so they are not too small.
    each = max(10, min(200 if ON_GPU else 50, args.examples // (len(args.only) * args.processes)))
    # More of them than examples are asked for: few values of the options leave some with few examples that differ.
    rounds = 4 * -(-args.examples // (each * len(args.only)))
    order = random.Random(args.seed)
    jobs = [(name, each, args.seed + i) for i in range(rounds) for name in order.sample(args.only, len(args.only))]
    pids = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    for p in range(args.processes):
        pid = os.fork()
        if pid == 0:
            code = 1
            if ON_GPU:  # by turns, before this process uses one
                os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[p % len(visible.split(","))]
            try:
                _work(jobs[p :: args.processes], -(-args.examples // args.processes), until, folder / f"{p}.json")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    ended, saved = [], time.monotonic()
    for pid in pids:
        # Who is still compiling or shrinking then is stopped; the campaigns that it finished count.
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until + 3:
            time.sleep(0.05)
            if time.monotonic() - saved > 5:
                args.out.write_text(json.dumps(summed_up(folder), indent=1))
                saved = time.monotonic()
        if found == (0, 0):
            os.kill(pid, signal.SIGKILL)
            found = os.waitpid(pid, 0)
        ended.append(found[1] not in (0, signal.SIGKILL))
    summary = summed_up(folder)
    args.out.write_text(json.dumps(summary, indent=1))
    shutil.rmtree(folder)
    total = sum(s["examples"] for s in summary.values())
    print(
        f"{total} examples, {sum(len(s['failures']) for s in summary.values())} failures, {sum(map(bool, ended))} processes ended badly"
    )
    for name, s in summary.items():
        print(f"  {name:16} {s['examples']:6}  worst {s['worst']:.2f}, element {s['element']:.2f}  {s['where'][:150]}")
        for failure in sorted(set(s["failures"]), key=len)[:4]:
            print(f"    FAILED {failure[:700]}")
    sys.exit(any(s["failures"] for s in summary.values()))


if __name__ == "__main__":
    main()
