"""Compiles all kernels for all targets, and writes what the compiler says.

It writes tests/compiled_reports.csv, in which tests/test_compiles.py looks before it compiles, and book/compiled.csv, which the
page "Compiled" shows. What did not change is not compiled again.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from kernelbook import runtime
from kernelbook.lab.compiled import CompiledKernel, compile_each, occupancy, read_reports, write_reports

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "book" / "compiled.csv"
REPORTS = ROOT / "tests" / "compiled_reports.csv"

# What users call, on CPU tensors that are never touched: their launches are recorded and compiled.
CALLS = {
    "attention": """
import torch, kernelbook as kb
from kernelbook.attention import op
def step(d, dtype, causal=True, aligned=True, n=1024):
    q, k, v = (torch.empty(1, h, n, d if aligned else d + 1, dtype=dtype)[..., :d] for h in (4, 2, 2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = kb.flash_attention(*leaves, causal=causal)
    o.backward(torch.empty_like(o))
for d in HEADS:
    step(d, torch.bfloat16)
    step(d, torch.bfloat16, aligned=False)
    with op.plain_kernels():
        step(d, torch.bfloat16)
for d in FLOAT32_HEADS:
    step(d, torch.float32)
    step(d, torch.float32, aligned=False)
step(64, torch.float16, causal=False, n=2048)
step(64, torch.bfloat16, n=10000)
if 256 in HEADS:  # for Hopper
    step(128, torch.bfloat16, causal=False, n=16384)
q, k, v = (torch.empty(2, h, 1024, 128, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
o = kb.flash_attention(q, k, v, causal=True, lengths=torch.zeros(2, dtype=torch.int32), window=200)
o.backward(torch.empty_like(o))
for d, window in ((64, None), (128, None), (128, 128), (256, None)):  # packed sequences
    q, k, v = (torch.empty(1, h, 1024, d, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    o = kb.flash_attention(q, k, v, causal=True, window=window, cu_seqlens=torch.zeros(9, dtype=torch.int32))
    o.backward(torch.empty_like(o))
for h, h_kv, n, d, dtype in DECODED:
    q, k, v = (torch.empty(2, heads, m, d, dtype=dtype) for heads, m in ((h, n), (h_kv, 8192), (h_kv, 8192)))
    kb.flash_attention(q, k, v, causal=True)
    pages, table, lengths = k.view(2 * 128, h_kv, 64, d), *(torch.zeros(s, dtype=torch.int32) for s in ((2, 128), (2,)))
    kb.paged_attention(q, pages, pages, table, lengths)
kb.append_to_pages(k[:, :, :1], v[:, :, :1], pages, pages, table, lengths)
for d, how in (  # gpt-oss' two kinds of layers, Gemma 2's
    (64, {}), (64, {"window": 128}), (256, {"softcap": 50.0}), (256, {"softcap": 50.0, "window": 512})
):
    sinks = torch.empty(8, dtype=torch.bfloat16, requires_grad=True) if d == 64 else None
    q, k, v = (torch.empty(1, h, 1024, d, dtype=torch.bfloat16, requires_grad=True) for h in (8, 1, 1))
    o = kb.flash_attention(q, k, v, causal=True, sinks=sinks, **how)
    o.backward(torch.empty_like(o))
    kb.flash_attention(q[:, :, :1], k, v, causal=True, sinks=sinks, **how)
    if not how:
        kb.paged_attention(q[:, :, :1], k.view(16, 1, 64, d), v.view(16, 1, 64, d), table[:1, :16], lengths[:1], sinks=sinks)
with kb.same_bits():
    for d in HEADS:
        step(d, torch.bfloat16)
        q, k = (torch.empty(2, h, n, d, dtype=torch.bfloat16) for h, n in ((32, 1), (4, 8192)))
        kb.flash_attention(q, k, k)
        kb.paged_attention(q, k.view(256, 4, 64, d), k.view(256, 4, 64, d), table, lengths)
    for d in FLOAT32_HEADS:
        step(d, torch.float32)
    q, k = (torch.empty(1, h, 1024, 64, dtype=torch.bfloat16) for h in (8, 1))
    kb.flash_attention(q, k, k, causal=True, cu_seqlens=torch.zeros(9, dtype=torch.int32))
    kb.flash_attention(q, k, k, causal=True, sinks=torch.empty(8, dtype=torch.bfloat16), window=128, softcap=50.0)
""",
    "distributed": """
import torch, kernelbook
from types import SimpleNamespace
from kernelbook.distributed import exchange, windows
def shared(hidden, slots, dtype, gates_dtype):
    x, gates = torch.empty(64, hidden, dtype=dtype), torch.empty(64, slots, dtype=gates_dtype)
    ids, addresses = torch.zeros(64, slots, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    view = lambda window, at, shape, dtype: torch.empty(shape, dtype=dtype)
    space = SimpleNamespace(rank=2, ranks=4, addresses=(addresses, addresses), ensure=lambda size: None, view=view, max_tokens_over_ranks=int)
    way = windows._WindowDispatchPlan(space, ids, 128, 32)
    layout = way.layout(x, gates)
    way.places, _ = exchange._place(ids, 128, 32, 4, None, addresses, 2, layout.capacity)
    windows._put(way, layout, x, gates)
    rows, weights, _ = windows._take(way, layout, x, gates)
    windows._give(way, layout, rows, None)
    windows._give(way, layout, rows, weights)
    windows._put(way, layout, x, None)
    windows._take(way, layout, x, None)
def there_and_back(hidden, slots, dtype, gates_dtype):
    x, gates = torch.empty(64, hidden, dtype=dtype), torch.empty(64, slots, dtype=gates_dtype)
    ids, counts = torch.zeros(64, slots, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int32)
    places, firsts = exchange._place(ids, 128, 32, 4, counts)
    message = exchange._Message.empty(96, x, gates)
    exchange._send(message, x, gates, ids, places, firsts, counts, 128, 32)
    pairs, weights, _, of_slots = exchange._arrive(message, counts, 256)
    exchange._combine(pairs, of_slots, torch.empty(96, hidden, dtype=dtype))
    exchange._combine(pairs, of_slots, message.rows, weights, message.weights)
    exchange._combine(message.rows, places, torch.empty_like(x), message.weights, gates, ids, 32, 128)
    exchange._spread(x, places, message.rows)
    exchange._own(message, 0, 32, 128)
there_and_back(2048, 8, torch.bfloat16, torch.float32)
there_and_back(5120, 1, torch.bfloat16, torch.bfloat16)
there_and_back(100, 6, torch.float32, torch.float32)
there_and_back(64, 2, torch.float64, torch.float64)
shared(2048, 8, torch.bfloat16, torch.float32)
shared(100, 1, torch.float32, torch.bfloat16)
""",
    "layer_norm": """
import torch, kernelbook as kb
from kernelbook.study import layer_norm_with_locks
def step(m, n, dtype, norm=kb.layer_norm):
    x, w, b = (torch.empty(*s, dtype=dtype, requires_grad=True) for s in ((m, n), (n,), (n,)))
    y = norm(x, w, b)
    y.backward(torch.empty_like(y))
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    step(64, 1000, dtype)
    step(64, 4096, dtype)
    step(4, 4096, dtype)  # one program, which writes the sums itself
    step(64, 4096, dtype, layer_norm_with_locks)
    step(64, 40000, dtype)
x = torch.empty(64, 16384)[:, 3:15363].requires_grad_()  # rows that are not aligned
kb.layer_norm(x, torch.empty(15360)).backward(torch.empty(64, 15360))
def rms(n, dtype, **how):
    x, r, w = (torch.empty(*s, dtype=dtype, requires_grad=True) for s in ((64, n), (64, n), (n,)))
    y, total = kb.rms_norm(x, w, residual=r)
    torch.autograd.backward((y, total), (torch.empty_like(x), torch.empty_like(x)))
for n in WIDTHS:
    step(64, n, torch.bfloat16)
    step(64, n, torch.float32)
    rms(n, torch.bfloat16)
rms(40000, torch.float32)
""",
    "moe_lora": """
import torch, kernelbook as kb
from kernelbook.study.moe_lora import lora_gradients
def step(tokens, experts, slots, k, n, rank, dtype, strategy, gated=False, **how):
    routing = kb.route(torch.zeros(tokens, slots, dtype=torch.int64), experts)
    leaf = lambda *s: torch.empty(*s, dtype=dtype, requires_grad=True)
    x, a, b = leaf(tokens * slots if gated else tokens, k), leaf(experts, rank, k), leaf(experts, n, rank)
    extra = dict(gates=torch.empty(tokens, slots, requires_grad=True), bias=leaf(experts, n)) if gated else {}
    y = kb.moe_lora(x, torch.empty(experts, k, n, dtype=dtype), a, b, routing, strategy=strategy, **extra, grouped_in=gated)
    y.backward(torch.empty_like(y))
bf16 = torch.bfloat16
for strategy in ("fused", "split"):
    for rank in RANKS:
        step(512, 4, 2, 2048, 1536, rank, bf16, strategy)
    step(512, 4, 2, 768, 2048, 16, bf16, strategy, gated=True)
    for tokens in TOKENS:
        step(tokens, 4, 2, 2048, 1536, 16, bf16, strategy)
    step(512, 4, 2, 72, 40, 3, torch.float32, strategy)
step(512, 4, 2, 333, 257, 3, torch.float16, "split", gated=True)
x, w, y = (torch.empty(*s, dtype=bf16, requires_grad=True) for s in ((512, 256), (4, 256, 384), (1024, 384)))
routing = kb.route(torch.zeros(512, 2, dtype=torch.int64), 4)
kb.scatter2scatter(x, w, routing).backward(y)
lora_gradients(x, y, torch.empty(4, 16, 256, dtype=bf16), torch.empty(4, 384, 16, dtype=bf16), routing)
def packed(n, k, block_size):
    blocks = 4 * n * k // block_size
    nested = dict(nested_absmax=torch.empty(-(-blocks // 256)), nested_code=torch.empty(256), nested_offset=torch.empty(()))
    return kb.NF4Tensor(
        torch.empty(2 * n * k, dtype=torch.uint8), torch.empty(blocks, dtype=torch.uint8), (4, n, k), block_size, torch.empty(16), **nested
    )
for dtype in (bf16, torch.float32):
    for tokens in (2, 20, 100, 1000):
        x, y = torch.empty(tokens, 512, dtype=dtype, requires_grad=True), torch.empty(2 * tokens, 384, dtype=dtype)
        routing = kb.route(torch.zeros(tokens, 2, dtype=torch.int64), 4)
        for block_size in (16, 64):
            kb.scatter2scatter(x, packed(384, 512, block_size), routing).backward(y)
        a, b = torch.empty(4, 64, 512, dtype=dtype, requires_grad=True), torch.empty(4, 384, 64, dtype=dtype, requires_grad=True)
        kb.moe_lora(x, packed(384, 512, 64), a, b, routing, strategy="split").backward(y)
x = torch.empty(100, 328, dtype=bf16)[:, :320].requires_grad_()  # rows and sums of no multiple of 16
kb.scatter2scatter(x, packed(200, 320, 64), kb.route(torch.zeros(100, 2, dtype=torch.int64), 4)).sum().backward()
kb.scatter2scatter(torch.empty(9, 36, dtype=bf16), packed(24, 36, 32), kb.route(torch.zeros(9, 2, dtype=torch.int64), 4))
from kernelbook.nf4 import kernels as nf4_kernels
with kb.same_bits():
    step(512, 4, 2, 2048, 1536, 16, bf16, "auto")
    step(512, 4, 2, 333, 257, 3, torch.float16, "auto", gated=True)
    x, y = torch.empty(100, 512, dtype=bf16, requires_grad=True), torch.empty(200, 384, dtype=bf16)
    a, b = torch.empty(4, 16, 512, dtype=bf16, requires_grad=True), torch.empty(4, 384, 16, dtype=bf16, requires_grad=True)
    routing = kb.route(torch.zeros(100, 2, dtype=torch.int64), 4)
    kb.moe_lora(x, packed(384, 512, 64), a, b, routing).backward(y)
for tokens in FEW:  # of one matrix: what fills its tiles, and what does not
    for n, k, block_size in ((4096, 2048, 64), (4096, 2112, 4096)):
        kb.nf4_matmul(torch.empty(tokens, k, dtype=bf16), packed(n, k, block_size), 1)
if FEW:
    for block_size in (64, 4096):
        kb.nf4_matmul(torch.empty(16, 2112, dtype=bf16), packed(16384, 2112, block_size), 1)
for tokens in SOME:  # with parts of K, and without
    for n, k, block_size in ((4096, 2112, 64), (14336, 2048, 4096)):
        kb.nf4_matmul(torch.empty(tokens, k, dtype=bf16), packed(n, k, block_size), 1)
""",
    "nf4": """
import torch, kernelbook as kb
def quantized(shape, block_size, double_quant):
    n = shape[0] * shape[1] * shape[2]
    blocks = -(-n // block_size)
    empty = lambda n, dtype=torch.float32: torch.empty(n, dtype=dtype)
    nested = dict(nested_absmax=empty(-(-blocks // 256)), nested_code=empty(256), nested_offset=torch.empty(()))
    return kb.NF4Tensor(
        empty(-(-n // 2), torch.uint8), empty(blocks, torch.uint8 if double_quant else torch.float32),
        shape, block_size, empty(16), **(nested if double_quant else {}),
    )
experts = torch.tensor([0, 1])
for double_quant in (False, True):
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((2, 64, 256), (2, 33, 33)):
            kb.nf4_dequantize(quantized(shape, 64, double_quant), experts=experts, dtype=dtype)
    kb.nf4_dequantize(quantized((2, 64, 256), 4096, double_quant))
    for tokens in (1, 2, 4, 8, 16, 40, 64):
        for n in (1024, 4096) if tokens <= 8 else (1024,):
            kb.nf4_matmul(torch.empty(tokens, 256, dtype=torch.bfloat16), quantized((2, n, 256), 64, double_quant), torch.tensor(1))
for block_size in (32, 64, 4096):
    kb.nf4_quantize(torch.empty(2, 4096, dtype=torch.bfloat16), block_size=block_size)
""",
    "scatter_ffn": """
import torch, kernelbook as kb
from kernelbook.study import scatter_ffn_with_atomics
def network(m, dtype, gated, requires_grad=False):
    shapes = ((m, 4096), *(((6000, 4096),) * (3 if gated else 2)))
    return (torch.empty(s, dtype=dtype, requires_grad=requires_grad) for s in shapes)
for m, count, gated in FFN:
    x, w_up, w_down, *gate = network(m, torch.bfloat16, gated)
    kb.scatter_ffn(x, w_up, w_down, torch.arange(count), w_gate=gate[0] if gate else None, activation="silu")
x, w_up, w_down, w_gate = network(2, torch.bfloat16, True, True)
b_up, b_down = torch.empty(6000, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
y = kb.scatter_ffn(
    x, w_up, w_down, torch.arange(30), w_gate=w_gate, b_up=b_up, b_gate=b_up, b_down=b_down, activation="gelu_tanh"
)
y.backward(torch.empty_like(y))
for dtype in (torch.float32, torch.float64):
    for m in (1, 4, 5):
        x, w_up, w_down = network(m, dtype, False, True)
        y = kb.scatter_ffn(x, w_up, w_down, torch.arange(1000), activation="gelu")
        y.backward(torch.empty_like(y))
x, w_up, _ = network(1, torch.float16, False)
kb.gather_matmul(x[:, 1:4000], w_up[:, 1:4000], torch.arange(30))  # rows that are not aligned
for block_l in (16, 128):
    scatter_ffn_with_atomics(*network(16, torch.bfloat16, False), torch.arange(30), block_l=block_l)
""",
    "nn": """
import torch, kernelbook
from kernelbook.nn.swiglu import ClampedSwiGLU, swiglu
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    for inner in (768, 77):
        h = torch.empty(64, 2 * inner, dtype=dtype, requires_grad=True)
        for activation in (swiglu, ClampedSwiGLU()):
            activation(h).backward(torch.empty(64, inner, dtype=dtype))
from kernelbook.interop import rotary
for dtype in (torch.bfloat16, torch.float32):
    q, k = (torch.empty(2, 8, heads, 128, dtype=dtype, requires_grad=True).transpose(1, 2) for heads in (32, 4))
    tables = torch.empty(2, 1, 8, 128, dtype=dtype)
    torch.autograd.backward(rotary.rotate(q, k, *tables), (torch.empty_like(q), torch.empty_like(k)))
from kernelbook.nn import linear
with kernelbook.same_bits():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for n, k in ((4096, 2048), (32768, 2048), (1008, 2000)):
            x, w, b = torch.empty(64, k, dtype=dtype, requires_grad=True), *(torch.empty(s, dtype=dtype) for s in ((n, k), n))
            linear(x, w, b).backward(torch.empty(64, n, dtype=dtype))
""",
    "sparse_linear": """
import torch, kernelbook as kb
from kernelbook.sparse_linear import kernels
def tensors(m, d_in, d_out, dtype):
    return (torch.empty(*s, dtype=dtype) for s in ((m, d_in), (d_out, d_in), (m, d_out)))
boxed, kernels.UNBOXED_FLOP = kernels.UNBOXED_FLOP, float("inf")  # ordinary loads with the largest tiles too, which some compact tensors get
for m, d_in, d_out, count, chunk in SPARSE:
    x, w, dy = tensors(m, d_in, d_out, torch.bfloat16)
    kb.sparse_backward(x, w, dy, torch.arange(count), chunk_size=chunk)
x, w, dy = tensors(8192, 4096, 16384, torch.bfloat16)
kb.sparse_dx(dy, w, torch.arange(26))
kb.sparse_forward(x, w, torch.empty(16384, dtype=torch.bfloat16), torch.arange(26))
kb.sparse_forward(x[:64], w, None, torch.arange(26), compact=True)
x, w, dy = tensors(512, 512, 2048, torch.float32)
kb.sparse_dw(x, dy, torch.arange(3))
kernels.UNBOXED_FLOP = boxed
""",
    "train": """
import torch, kernelbook
from kernelbook import train
for dtype in (torch.float32, torch.bfloat16):
    train.chunk_norms(torch.empty(832, 2048, dtype=dtype))
    train.chunk_norms(torch.empty(832, 100, dtype=dtype), chunk_size=16)
for counts in ((96, 32, 128, 32), (4096,)):
    layout = train.Layout.of_fraction(counts, 0.1, torch.device("cpu"))
    for name in ("random", "ema_topk", "knn"):
        train.make_scheduler(name, layout).select()
from bench.sparse_inference import Predictor
for neurons in (4096, 16384):
    predictor = Predictor(64, neurons, 16, count=600).to(torch.bfloat16)
    for tokens in (1, 8):
        predictor(torch.empty(tokens, 1, 64, dtype=torch.bfloat16))
rows = torch.arange(64)
for inactive in ("skip", "decay"):
    for shape in ((8192, 2048), (2048,), (96, 40)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        adam = train.ChunkAdamW([weight], inactive=inactive, chunk_size=32)
        weight.grad = torch.zeros(shape)
        adam.step()
        weight.grad = torch.sparse_coo_tensor(rows[None], torch.zeros(64, *shape[1:]), shape, check_invariants=True)
        adam.step()
""",
}
# What the page "Compiled" states: by room, the call in words and in code.
STATED = {
    "attention": {
        "flash_attention, 4,096 tokens, heads of 128, causal, bfloat16": """
import torch, kernelbook as kb
q, k, v = (torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o = kb.flash_attention(q, k, v, causal=True)
o.backward(torch.empty_like(o))
""",
    },
    "layer_norm": {
        f"layer_norm, 4,096 x {n:,}, bfloat16": f"""
import torch, kernelbook as kb
x, w, b = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in ((4096, {n}), {n}, {n}))
y = kb.layer_norm(x, w, b)
y.backward(torch.empty_like(y))
"""
        for n in (4096, 15872)
    },
    "moe_lora": {
        "moe_lora, 128 experts, 2,048 to 1,536, 8 of them for each of 2,048 tokens, rank 16, bfloat16": """
import torch, kernelbook as kb
leaf = lambda *s: torch.empty(*s, dtype=torch.bfloat16, requires_grad=True)
routing = kb.route(torch.zeros(2048, 8, dtype=torch.int64), 128)
w = torch.empty(128, 2048, 1536, dtype=torch.bfloat16)
y = kb.moe_lora(leaf(2048, 2048), w, leaf(128, 16, 2048), leaf(128, 1536, 16), routing)
y.backward(torch.empty_like(y))
""",
    },
    "nf4": {
        "nf4_dequantize, 256 experts of 1,024 x 2,048, bfloat16; nf4_matmul, one token": """
import torch, kernelbook as kb
def packed(*shape):
    blocks = shape[0] * shape[1] * shape[2] // 64
    return kb.NF4Tensor(
        torch.empty(blocks * 32, dtype=torch.uint8), torch.empty(blocks), shape, 64, torch.empty(16)
    )
kb.nf4_dequantize(packed(256, 1024, 2048), experts=torch.arange(64))
kb.nf4_matmul(torch.empty(1, 4096, dtype=torch.bfloat16), packed(1, 14336, 4096), 0)
""",
    },
    "scatter_ffn": {
        f"scatter_ffn, {m} tokens, 10% of 16,384 neurons, 4,096 wide, bfloat16": f"""
import torch, kernelbook as kb
x, w_up, w_down = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in ({m}, 16384, 16384))
kb.scatter_ffn(x, w_up, w_down, torch.arange(1638))
"""
        for m in (1, 16, 128)
    },
    "sparse_linear": {
        "sparse_backward, 8,192 x 4,096 to 16,384, 10% active, bfloat16": """
import torch, kernelbook as kb
x, w, dy = (torch.empty(s, dtype=torch.bfloat16) for s in ((8192, 4096), (16384, 4096), (8192, 16384)))
kb.sparse_backward(x, w, dy, torch.arange(26))
""",
    },
    "train": {
        "ChunkAdamW, 8,192 x 2,048, float32": """
import torch, kernelbook
from kernelbook import train
weight = torch.nn.Parameter(torch.zeros(8192, 2048))
adam = train.ChunkAdamW([weight], chunk_size=32)
weight.grad = torch.zeros(8192, 2048)
adam.step()
""",
    },
}
# The sizes at which configurations change; all of them on one target, to save time.
SETTINGS = {
    "attention": {
        "": "import torch\nHEADS, FLOAT32_HEADS, DECODED = (64, 128), (64,), ((32, 4, 1, 128, torch.bfloat16),)",
        "sm_75": "import torch\nHEADS, FLOAT32_HEADS, DECODED = (64, 128), (64, 128, 256), ((32, 4, 1, 128, torch.bfloat16),)",
        # Decoding: query and key heads, queries, features: every height of a tile.
        "sm_90": "import torch\nHEADS, FLOAT32_HEADS, DECODED = (16, 32, 64, 80, 128, 256), (64, 128), ((32, 4, 1, 128, torch.bfloat16), "
        "(32, 8, 16, 128, torch.bfloat16), (64, 8, 16, 128, torch.bfloat16), (16, 4, 16, 256, torch.bfloat16), "
        "(16, 16, 1, 64, torch.float32), (8, 4, 4, 256, torch.float32))",
    },
    "layer_norm": {
        "": "WIDTHS = (8192,)",
        "sm_90": "WIDTHS = (64, 2048, 3072, 5632, 8192, 12288, 13824, 15872, 18432, 20480, 2001, 4095, 9001)",
    },
    # Tokens, listed neurons, gate: on the one target every tile that the rules choose.
    "scatter_ffn": {
        "": "FFN = ((1, 1000, False), (16, 1000, True), (128, 5000, True), (1024, 5000, False))",
        "sm_90": "FFN = ((1, 100, 0), (1, 1000, 1), (1, 6000, 0), (16, 100, 0), (16, 1000, 1), (16, 3000, 0), (16, 6000, 1), "
        "(32, 1000, 0), (64, 1000, 1), (64, 6000, 0), (128, 1000, 1), (128, 6000, 0), (128, 6000, 1), (256, 1000, 0), "
        "(256, 6000, 1), (512, 6000, 0), (1024, 1000, 1), (1024, 6000, 0))",
    },
    # Ranks, and numbers of tokens that get smaller tiles.
    "moe_lora": {
        "": "RANKS, TOKENS, FEW, SOME = (64,), (), (), ()",
        "sm_90": "RANKS, TOKENS, FEW, SOME = (8, 16, 32, 64, 100), (2, 16, 32), (1, 5), (16, 32, 64)",
    },
    # Rows, inputs, features, active chunks, chunk size: the largest tiles; on the one target also the three smaller ones
    # (the smallest with a split reduction), and ordinary loads.
    "sparse_linear": {
        "": "SPARSE = ((8192, 4096, 16384, 26, 64), (2048, 512, 2048, 1, 64))",
        "sm_90": "SPARSE = ((8192, 4096, 16384, 26, 64), (2048, 512, 2048, 1, 64), (2048, 1024, 4096, 6, 64), "
        "(2048, 4096, 16384, 26, 64), (2048, 1024, 4096, 8, 48), (8192, 4096, 16384, 36, 48), (2048, 2048, 8192, 17, 48))",
    },
}


# Targets that share their settings: most, the one with every configuration, and the one in float16.
ALIKE = (tuple(target for target in runtime.TARGETS if target not in ("sm_90", "sm_75")), ("sm_90",), ("sm_75",))


def for_target(code: str, target: str) -> str:
    """A call as it is to be made on a GPU: in float16 on Turing, which has no bfloat16 of its own."""
    return code.replace("torch.bfloat16", "torch.float16") if target == "sm_75" else code


def code_of(room: str, target: str) -> str:
    """All calls of a room, as they are made on a target of one of :data:`ALIKE`."""
    settings = SETTINGS.get(room, {"": ""})
    code = "\n".join([settings.get(target, settings[""]) + CALLS[room], *STATED.get(room, {}).values()])
    return for_target(code, target)


def compiled(
    rooms: Sequence[str], targets: tuple[str, ...], *, recompile_every: int = 0
) -> dict[str, list[CompiledKernel]]:
    """By room the reports of all its calls for targets of one of :data:`ALIKE`."""
    how = {"reports": REPORTS, "recompile_every": recompile_every, "timeout_s": 3000.0}
    return dict(zip(rooms, compile_each([code_of(room, targets[0]) for room in rooms], targets, **how), strict=True))


def _row(room: str, call: str, kernel: CompiledKernel) -> dict[str, Any]:
    nvidia = kernel.target.startswith("sm_")
    properties = runtime.TARGETS[kernel.target]
    fits = occupancy(kernel.registers, kernel.shared_bytes, kernel.num_warps, properties) if nvidia else None
    tiles = " ".join(f"{name}={value}" for name, value in kernel.constants.items() if name in TILES)
    row = {"room": room, "call": call, "kernel": kernel.name, "target": kernel.target, "tiles": tiles}
    row |= {name: getattr(kernel, name) for name in ("num_warps", "num_stages", *FIGURES)}
    row["num_stages"] = kernel.constants.get("STAGES", kernel.num_stages)
    return row | {"programs": fits.programs if fits else "", "limit": fits.limit if fits else ""}


FIGURES = ("registers", "spill_bytes", "shared_bytes")
TILES = (
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "BLOCK_R", "BLOCK_L", "BLOCK_C", "BLOCK_P", "BLOCK_Q", "BLOCK_S", "BLOCK_G",
    "BLOCK_W", "BLOCK", "BLOCK_E", "NUM_BLOCKS", "SHARES", "NUM_SPLITS", "SPLIT", "UNROLL", "ROWS", "WARPGROUPS",
)  # fmt: skip


def table(reports: Path) -> pd.DataFrame:
    """The table of the page: what users get at the stated sizes."""
    calls = [(room, call, code) for room, stated in sorted(STATED.items()) for call, code in stated.items()]
    found: list[list[CompiledKernel]] = [[] for _ in calls]
    for alike in ([name for name in runtime.TARGETS if name != "sm_75"], ["sm_75"]):
        codes = [for_target(code, alike[0]) for *_, code in calls]
        for kernels, more in zip(found, compile_each(codes, alike, reports=reports, timeout_s=3000.0), strict=True):
            kernels += more
    pairs = zip(calls, found, strict=True)
    return pd.DataFrame([_row(room, call, kernel) for (room, call, _), kernels in pairs for kernel in kernels])


def main() -> int:
    """Writes both files."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jobs = itertools.product([[room] for room in sorted(CALLS)], ALIKE)
    kernels: list[CompiledKernel] = []
    before = [SimpleNamespace(**row) for row in read_reports(REPORTS).values()]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for job in as_completed([pool.submit(compiled, *job) for job in jobs]):
            kernels += [kernel for of_room in job.result().values() for kernel in of_room]
            write_reports(REPORTS, [*before, *kernels])  # so that a run that is stopped loses nothing
            print(f"{len(kernels)} kernels", flush=True)
    write_reports(REPORTS, kernels)
    table(REPORTS).to_csv(TABLE, index=False, lineterminator="\n")
    print(f"{len(kernels)} kernels, {sum(not kernel.stored for kernel in kernels)} of them compiled anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
