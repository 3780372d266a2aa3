"""Small calls that between them launch every kernel of every room: what the sanitizers watch and what is repeated.

python tools/evidence/calls.py attention nf4           once, as under a sanitizer
python tools/evidence/calls.py attention --repeat 250  the same bits each time, while a second stream keeps the GPU busy
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kernelbook as kb

# isort: split
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import ranks_in_one_process as ranks
from common import command_line, forked, keep, watching_launches

from kernelbook import nn, runtime, study, train
from kernelbook.attention import op as attention_op
from kernelbook.distributed import exchange
from kernelbook.interop import rotary
from kernelbook.lab.bench import sparse_inference
from kernelbook.nf4 import kernels as nf4_kernels
from kernelbook.study.moe_lora import lora_gradients
from kernelbook.train import chunks

Call = Callable[[], Any]
Calls = Iterator[tuple[str, Call]]
ATEN = torch.library.Library("aten", "IMPL")
BF16 = torch.bfloat16
partial = functools.partial


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=runtime.DEVICE) * scale).to(dtype)


def with_gradients(function: Callable[..., Any], *inputs: torch.Tensor, **named: torch.Tensor) -> Call:
    """A call that returns the results and the gradients of all inputs."""
    leaves = [t.requires_grad_() for t in (*inputs, *named.values())]
    upstream: list[torch.Tensor] = []

    def call() -> Any:
        out = function(*inputs, **named)
        out = out if isinstance(out, tuple) else (out,)
        upstream.extend(torch.randn_like(t) for t in out[len(upstream) :])
        return (*out, *torch.autograd.grad(out, leaves, upstream))

    return call


def layer_norm() -> Calls:
    for m, n, dtype in ((90, 1000, BF16), (40, 4096, BF16), (9, 40000, torch.float32), (33, 9001, torch.float32)):
        x, w, b, residual = (rand(*shape, dtype=dtype) for shape in ((m, n), (n,), (n,), (m, n)))
        yield f"layer_norm {m}x{n}", with_gradients(kb.layer_norm, x, w, b)
        yield f"rms_norm {m}x{n}", with_gradients(kb.rms_norm, x, w, residual=residual)
    locks = study.layer_norm_with_locks
    yield "layer_norm, locks (no promise)", with_gradients(locks, rand(200, 1000), rand(1000), rand(1000))


def sparse_linear() -> Calls:
    for m, d_in, d_out, chunk, count, dtype in (
        (200, 128, 640, 64, 3, BF16),
        (70, 40, 130, 48, 2, BF16),
        (70, 48, 256, 64, 2, torch.float32),
    ):
        x, w, dy, b = (rand(*shape, dtype=dtype) for shape in ((m, d_in), (d_out, d_in), (m, d_out), (d_out,)))
        given = {"active_chunks": torch.arange(count, device=x.device), "chunk_size": chunk}
        name = f"{m}x{d_in} to {d_out} {str(dtype)[6:]}"
        yield f"sparse_backward {name}", partial(kb.sparse_backward, x, w, dy, **given)
        yield f"sparse_dx {name}", partial(kb.sparse_dx, dy, w, **given)
        yield f"sparse_dw, compact {name}", partial(kb.sparse_dw, x, dy, compact=True, **given)
        for compact in (False, True):
            forward = partial(kb.sparse_forward, x, w, b, compact=compact, **given)
            yield f"sparse_forward{', compact' * compact} {name}", forward


def scatter_ffn() -> Calls:
    for m, gated, dtype in (
        (1, False, BF16),
        (1, True, BF16),
        (16, True, BF16),
        (70, False, BF16),
        (2, True, torch.float32),
        (20, False, torch.float32),
    ):
        n, k, listed = 1000, 256, torch.randperm(1000, device=runtime.DEVICE)[:700]
        x, up, down = (rand(*shape, dtype=dtype, scale=0.1) for shape in ((m, k), (n, k), (n, k)))
        gate = {"w_gate": rand(n, k, dtype=dtype, scale=0.1)} if gated else {}
        function = partial(kb.scatter_ffn, neurons=listed, activation="silu")
        name = f"scatter_ffn {m} tokens{', gated' * gated} {str(dtype)[6:]}"
        yield name, with_gradients(function, x, up, down, **gate)
    rows = torch.arange(40, device=runtime.DEVICE)
    yield "gather_matmul 3 tokens", partial(kb.gather_matmul, rand(3, 256), rand(500, 256), rows, activation="gelu")
    atomics = partial(study.scatter_ffn_with_atomics, neurons=rows)
    yield "scatter_ffn, atomics (no promise)", with_gradients(atomics, rand(20, 256), rand(500, 256), rand(500, 256))


def nf4() -> Calls:
    for double in (False, True):
        w, nested = rand(3, 128, 256), ", nested" * double
        quantize = partial(kb.nf4_quantize, double_quant=double)
        yield f"nf4_quantize{nested}", partial(quantize, w)
        q = quantize(w)
        some = torch.tensor([2, 0], device=w.device)
        yield f"nf4_dequantize{nested}", partial(kb.nf4_dequantize, q, experts=some)
        yield f"nf4_dequantize, odd{nested}", partial(kb.nf4_dequantize, quantize(rand(2, 33, 33)))
        for m in (1, 4, 8, 40):
            yield f"nf4_matmul {m} tokens{nested}", partial(kb.nf4_matmul, rand(m, 256), q, 1)
        large = quantize(rand(1, 96, 1024))
        for m in (3, 16, 64):
            by_tensor_cores = mock.patch.multiple(nf4_kernels, PACKED_ELEMENTS=0, SOME_ELEMENTS=0)(kb.nf4_matmul)
            yield (
                f"nf4_matmul {m} tokens, as of a large matrix{nested}",
                partial(by_tensor_cores, rand(m, 1024), large, 0),
            )


def moe_lora() -> Calls:
    for tokens, experts, slots, k, n, rank, dtype in (
        (100, 5, 2, 128, 192, 16, BF16),
        (6, 8, 2, 64, 96, 8, BF16),
        (30, 4, 2, 40, 72, 3, torch.float32),
    ):
        ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots]
        yield f"route {tokens}", partial(lambda *given: kb.route(*given).order, ids, experts)
        routing = kb.route(ids, experts)
        x, w = rand(tokens, k, dtype=dtype), rand(experts, k, n, dtype=dtype, scale=0.1)
        a, b = rand(experts, rank, k, dtype=dtype, scale=0.1), rand(experts, n, rank, dtype=dtype)
        name = f"{tokens} tokens {str(dtype)[6:]}"
        for strategy in ("fused", "split"):
            function = partial(kb.moe_lora, routing=routing, strategy=strategy)
            yield f"moe_lora, {strategy} {name}", with_gradients(function, x, w, a, b)
        function = partial(kb.scatter2scatter, routing=routing, grouped_out=True)
        yield f"scatter2scatter {name}", with_gradients(function, x, w)
        plain, factors = x.detach(), (a.detach(), b.detach())
        dy = rand(tokens * slots, n, dtype=dtype)
        yield f"lora_gradients {name}", partial(lora_gradients, plain, dy, *factors, routing)
        if dtype == BF16:
            q = kb.nf4_quantize(rand(experts, n, k))
            yield f"scatter2scatter, packed {name}", partial(kb.scatter2scatter, plain, q, routing)
            gates = torch.rand(ids.shape, device=ids.device)
            packed = partial(kb.moe_lora, w=q, routing=routing)
            yield f"moe_lora, packed {name}", with_gradients(packed, x, lora_a=a, lora_b=b, gates=gates)


def attention() -> Calls:
    for d in (64, 128, 256):
        for causal in (False, True):
            q, k, v = rand(1, 4, 300, d), rand(1, 2, 300, d), rand(1, 2, 300, d)
            function = partial(kb.flash_attention, causal=causal)
            yield f"flash_attention {d} features{', causal' * causal}", with_gradients(function, q, k, v)

    def plain(q: Any, k: Any, v: Any) -> torch.Tensor:
        with attention_op.plain_kernels():
            return kb.flash_attention(q, k, v, causal=True)

    yield "flash_attention, plain kernels", with_gradients(plain, *(rand(1, 2, 200, 64) for _ in range(3)))
    lengths = torch.tensor([5, 250], device=runtime.DEVICE)
    function = partial(kb.flash_attention, causal=True, lengths=lengths, window=40)
    yield "flash_attention, lengths and window", with_gradients(function, *(rand(2, 2, 250, 64) for _ in range(3)))
    inputs = (rand(1, 2, 100, 64, dtype=torch.float32) for _ in range(3))
    yield "flash_attention float32", with_gradients(kb.flash_attention, *inputs)
    cache = [rand(2, 2, 900, 128) for _ in range(2)]
    one = rand(2, 8, 1, 128)
    yield "flash_attention, one query", partial(kb.flash_attention, one, *cache)
    pool = [rand(31, 2, 64, 128) for _ in range(2)]
    table = torch.randperm(30, device=one.device).view(2, 15)
    held = torch.tensor([900, 33], device=one.device)
    yield "paged_attention", partial(kb.paged_attention, one, *pool, table, held)
    new = [rand(2, 2, 1, 128) for _ in range(2)]

    def append() -> tuple[torch.Tensor, ...]:
        kb.append_to_pages(*new, *pool, table, held)
        return tuple(pool)

    yield "append_to_pages", append


def modules() -> Calls:
    """What modules, training and several GPUs add to the rooms' kernels."""
    device = runtime.DEVICE
    layer = nn.MoELayer(6, 64, 96, 2, device=device, dtype=BF16)
    yield "MoELayer", with_gradients(layer, rand(60, 64))
    cos, sin = rand(2, 5, 64), rand(2, 5, 64)
    yield "rotate", with_gradients(lambda q, k: rotary.rotate(q, k, cos, sin), rand(2, 18, 5, 64), rand(2, 3, 5, 64))
    for shape in ((200, 96), (70, 33), (1000,)):
        yield f"chunk_norms {shape}", partial(chunks.chunk_norms, rand(*shape))
    layout = chunks.Layout.of_fraction([70, 1, 130], 0.3, device)
    features, norms = rand(12, layout.total, dtype=torch.float32), rand(layout.total, dtype=torch.float32).abs()
    seen = torch.randint(-1, 9, (layout.total,), dtype=torch.int32, device=device)
    now = torch.tensor([9], dtype=torch.int32, device=device)
    lately = {"longest": 130, "window": 5}
    yield "knn_scores", partial(chunks.knn_scores, features, norms, seen, now, layout.starts(), **lately)
    ids = torch.empty(layout.total_active, dtype=torch.int64, device=device)
    active = torch.tensor(layout.active, dtype=torch.int32, device=device)
    for scores in (norms, None):
        given = {"longest": 130, "chosen": torch.empty_like(seen), "step": now}

        def best(scores: Any = scores, given: Any = given) -> tuple[torch.Tensor, ...]:
            return chunks.top_chunks(scores, ids, layout.starts(), layout.slots(), active, **given), ids

        yield f"top_chunks{', random' * (scores is None)}", best
    for inactive in ("skip", "decay"):
        weight = torch.nn.Parameter(rand(200, 40, dtype=torch.float32))
        optimizer = train.ChunkAdamW([weight], chunk_size=16, inactive=inactive)
        rows = torch.arange(32, 64, device=device)
        weight.grad = torch.sparse_coo_tensor(rows[None], rand(32, 40, dtype=torch.float32), weight.shape)

        def step(weight: Any = weight, optimizer: Any = optimizer) -> tuple[torch.Tensor, ...]:
            optimizer.step()
            return (weight.detach(),)

        yield f"ChunkAdamW, {inactive} (no promise, each step goes on)", step
    predictor = sparse_inference.Predictor(64, 9000, 8, count=700)
    x = rand(3, 64, dtype=torch.float32)
    yield "Predictor", partial(predictor, x)
    xs, grads = ([rand(5, 200, dtype=torch.float32) for _ in range(3)] for _ in range(2))
    gates = [rand(5, 3, dtype=torch.float32) for _ in range(3)]
    local = [torch.rand(5, 7, device=device).argsort(1)[:, :3].to(torch.int32) for _ in range(3)]
    message = exchange._Message.empty(20, xs[0], gates[0])
    message.whole.zero_()
    yield "ids and weights of one rank of three", lambda: exchange._own(message, 3, 3, 7)
    for passed in (ranks.by_messages, ranks.by_windows):
        name = f"three ranks {passed.__name__.replace('_', ' ')}"
        yield name, partial(lambda passed: [t for part in passed(xs, gates, local, grads, 7, 3) for t in part], passed)


def control() -> Calls:
    """No kernel of ours: products of PyTorch, as of the calls in which a sanitizer has died."""
    for m, k, n in ((40, 256, 128), (16, 700, 256), (70, 256, 700)):
        x, w = rand(m, k), rand(n, k)
        yield f"torch.mm {m}x{k} by {n}", with_gradients(lambda x, w: torch.mm(x, w.t()), x, w)


ROOMS: dict[str, Callable[[], Calls]] = {
    f.__name__: f for f in (layer_norm, sparse_linear, scatter_ffn, nf4, moe_lora, attention, modules, control)
}


def products_elsewhere() -> None:
    """PyTorch's matrix products on the CPU: racecheck ends in those that cuBLAS has for Hopper, with no kernel of ours (control)."""
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        function = getattr(torch.ops.aten, name)

        def on_cpu(*args: Any, out: Any = None, function: Any = function, **kwargs: Any) -> torch.Tensor:
            result = function(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args), **kwargs)
            return result.to(runtime.DEVICE) if out is None else out.copy_(result)

        ATEN.impl(name, on_cpu, "CUDA")
        ATEN.impl(f"{name}.out", on_cpu, "CUDA")


def tensors(value: Any) -> list[torch.Tensor]:
    """Those of a result: a tensor, several, or a packed matrix."""
    parts = vars(value).values() if isinstance(value, kb.NF4Tensor) else value
    return [value] if isinstance(value, torch.Tensor) else [t for t in parts if isinstance(t, torch.Tensor)]


def repeated(call: Call, times: int, seconds: float) -> tuple[int, int]:
    """-> how often the call ran, and how often its bits were not those of the first time, under load on a second stream."""
    first = [t.detach().clone() for t in tensors(call())]
    busy, other = torch.randn(2048, 2048, device=runtime.DEVICE), torch.cuda.Stream()
    torch.mm(busy, busy)
    torch.cuda.synchronize()
    done, different, began = 0, torch.zeros((), dtype=torch.int64, device=runtime.DEVICE), time.monotonic()
    while done < times and time.monotonic() - began < seconds:
        with torch.cuda.stream(other):
            for _ in range(done % 3):  # now more, now less of the GPU is free
                torch.mm(busy, busy)
        for ours, before in zip(tensors(call()), first, strict=True):
            same = (
                ours.detach().reshape(-1).view(torch.uint8) == before.reshape(-1).view(torch.uint8)
                if ours.is_contiguous() and before.is_contiguous()
                else ours.detach() == before
            )
            different += ~same.all()
        done += 1
    return done, int(different)


def largest() -> dict[str, dict[str, Any]]:
    """More elements than 32 bits count: the last rows have the bits that they have alone."""
    x = torch.randn(2**20 + 5, 2056, device=runtime.DEVICE, dtype=BF16)
    told = {}
    for function in (kb.layer_norm, kb.rms_norm):
        y, alone = function(x), function(x[-64:])
        told[function.__name__] = {"elements": x.numel(), "same": torch.equal(y[-64:], alone)}
        del y
    return told


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("rooms", nargs="*", default=list(ROOMS))
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the repeats of one call")
    parser.add_argument("--first", type=int, default=0, help="calls before this one are left out")
    parser.add_argument("--share", default="0/1", help="K/N: every N-th call from the K-th on")
    parser.add_argument("--processes", type=int, default=1, help="that have a share each, on the GPUs by turns")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--products-elsewhere", action="store_true", help="PyTorch's matrix products run on the CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.largest:
        told = largest()
        print(told)
        keep(args.out, told)
        sys.exit(not all(t["same"] for t in told.values()))
    if args.processes == 1:
        sys.exit(run(args, *map(int, args.share.split("/")), args.out))

    def share(k: int) -> None:
        """A share of the calls, with a file of its own."""
        sys.exit(run(args, k, args.processes, args.out and args.out.with_stem(f"{args.out.stem}_{k}")))

    processes = forked(args.processes, share)
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def run(args: argparse.Namespace, share: int, shares: int, out: Path | None) -> bool:
    """Every ``shares``-th call from number ``share`` on, once or again and again -> whether bits differed that may not."""
    told, wrong, at = {}, 0, -1
    if args.products_elsewhere:
        products_elsewhere()
    for room in args.rooms:
        torch.manual_seed(0)
        for i, (name, call) in enumerate(ROOMS[room]()):
            at += 1
            if i < args.first or at % shares != share:
                continue
            if not args.repeat:
                print(f"call {i}: {name}", flush=True)
                launched: set[str] = set()
                with watching_launches(lambda kernel, _, launched=launched: launched.add(kernel)):
                    call()
                print("launched:", *sorted(launched), flush=True)
                if runtime.DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                continue
            done, different = repeated(call, args.repeat, args.seconds)
            told[f"{room}: {name}"] = {"repeats": done, "different": different}
            wrong += different if "no promise" not in name else 0
            print(f"{room}: {name}: {done} repeats, {different} with other bits", flush=True)
            keep(out, told)
    return wrong > 0


if __name__ == "__main__":
    main()
