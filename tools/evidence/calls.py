"""Small calls that between them launch every kernel of every room: what the sanitizers watch and what is repeated.

python tools/evidence/calls.py attention nf4           once, as under a sanitizer
python tools/evidence/calls.py attention --repeat 250  the same bits each time, while a second stream keeps the GPU busy
"""

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kernelbook as kb

# isort: split
import torch
from triton.runtime.jit import KernelInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import ranks_in_one_process as ranks

from kernelbook import nn, runtime, train
from kernelbook.attention import op as attention_op
from kernelbook.distributed import exchange
from kernelbook.interop import rotary
from kernelbook.lab.bench import sparse_inference
from kernelbook.launching import Launch
from kernelbook.moe_lora import lora_gradients
from kernelbook.nf4 import kernels as nf4_kernels
from kernelbook.train import chunks

Call = Callable[[], Any]
ATEN = torch.library.Library("aten", "IMPL")
BF16 = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=runtime.DEVICE) * scale).to(dtype)


def with_gradients(function: Callable[..., Any], *inputs: torch.Tensor) -> Call:
    """A call that returns the results and the gradients of all inputs."""
    leaves = [t.requires_grad_() for t in inputs]
    upstream: list[torch.Tensor] = []

    def call() -> Any:
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        upstream.extend(torch.randn_like(t) for t in out[len(upstream) :])
        return (*out, *torch.autograd.grad(out, leaves, upstream))

    return call


def layer_norm() -> Iterator[tuple[str, Call]]:
    for m, n, dtype in ((90, 1000, BF16), (40, 4096, BF16), (9, 40000, torch.float32), (33, 9001, torch.float32)):
        yield (
            f"layer_norm {m}x{n}",
            with_gradients(kb.layer_norm, rand(m, n, dtype=dtype), rand(n, dtype=dtype), rand(n, dtype=dtype)),
        )
        yield (
            f"rms_norm {m}x{n}",
            with_gradients(
                lambda x, w, r: kb.rms_norm(x, w, residual=r),
                rand(m, n, dtype=dtype),
                rand(n, dtype=dtype),
                rand(m, n, dtype=dtype),
            ),
        )
    yield (
        "layer_norm, locks (no promise)",
        with_gradients(
            lambda x, w, b: kb.layer_norm(x, w, b, backward="locks"), rand(200, 1000), rand(1000), rand(1000)
        ),
    )


def sparse_linear() -> Iterator[tuple[str, Call]]:
    for m, d_in, d_out, chunk, count, dtype in (
        (200, 128, 640, 64, 3, BF16),
        (70, 40, 130, 48, 2, BF16),
        (70, 48, 256, 64, 2, torch.float32),
    ):
        x, w, dy, b = (
            rand(m, d_in, dtype=dtype),
            rand(d_out, d_in, dtype=dtype),
            rand(m, d_out, dtype=dtype),
            rand(d_out, dtype=dtype),
        )
        given = {"active_chunks": torch.arange(count, device=x.device), "chunk_size": chunk}
        name = f"{m}x{d_in} to {d_out} {str(dtype)[6:]}"
        yield f"sparse_backward {name}", lambda x=x, w=w, dy=dy, given=given: kb.sparse_backward(x, w, dy, **given)
        yield f"sparse_dx {name}", lambda w=w, dy=dy, given=given: kb.sparse_dx(dy, w, **given)
        yield f"sparse_dw, compact {name}", lambda x=x, dy=dy, given=given: kb.sparse_dw(x, dy, compact=True, **given)
        for compact in (False, True):
            yield (
                f"sparse_forward{', compact' * compact} {name}",
                lambda x=x, w=w, b=b, given=given, compact=compact: kb.sparse_forward(
                    x, w, b, compact=compact, **given
                ),
            )


def scatter_ffn() -> Iterator[tuple[str, Call]]:
    for m, gated, dtype in (
        (1, False, BF16),
        (1, True, BF16),
        (16, True, BF16),
        (70, False, BF16),
        (2, True, torch.float32),
        (20, False, torch.float32),
    ):
        n, k, listed = 1000, 256, torch.randperm(1000, device=runtime.DEVICE)[:700]
        shapes = ((m, k), (n, k), (n, k), *(((n, k),) if gated else ()))

        def function(x: Any, up: Any, down: Any, gate: Any = None, listed: torch.Tensor = listed) -> torch.Tensor:
            return kb.scatter_ffn(x, up, down, listed, w_gate=gate, activation="silu")

        yield (
            f"scatter_ffn {m} tokens{', gated' * gated} {str(dtype)[6:]}",
            with_gradients(function, *(rand(*s, dtype=dtype, scale=0.1) for s in shapes)),
        )
    x, w = rand(3, 256), rand(500, 256)
    rows = torch.arange(40, device=x.device)
    yield "gather_matmul 3 tokens", lambda: kb.gather_matmul(x, w, rows, activation="gelu")


def nf4() -> Iterator[tuple[str, Call]]:
    for double in (False, True):
        w = rand(3, 128, 256)
        yield (
            f"nf4_quantize{', nested' * double}",
            lambda w=w, double=double: _parts(kb.nf4_quantize(w, double_quant=double)),
        )
        q = kb.nf4_quantize(w, double_quant=double)
        odd = kb.nf4_quantize(rand(2, 33, 33), double_quant=double)
        some = torch.tensor([2, 0], device=w.device)
        yield f"nf4_dequantize{', nested' * double}", lambda q=q, some=some: kb.nf4_dequantize(q, experts=some)
        yield f"nf4_dequantize, odd{', nested' * double}", lambda odd=odd: kb.nf4_dequantize(odd)
        for m in (1, 4, 8, 40):
            x = rand(m, 256)
            yield f"nf4_matmul {m} tokens{', nested' * double}", lambda x=x, q=q: kb.nf4_matmul(x, q, 1)
        large = kb.nf4_quantize(rand(1, 96, 1024), double_quant=double)
        for m in (3, 16):
            x = rand(m, 1024)

            def by_tensor_cores(x: torch.Tensor = x, q: Any = large) -> torch.Tensor:
                with mock.patch.object(nf4_kernels, "PACKED_ELEMENTS", 0):
                    return kb.nf4_matmul(x, q, 0)

            yield f"nf4_matmul {m} tokens, as of a large matrix{', nested' * double}", by_tensor_cores


def _parts(q: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in (q.packed, q.absmax, q.nested_absmax, q.nested_offset) if t is not None)


def moe_lora() -> Iterator[tuple[str, Call]]:
    for tokens, experts, slots, k, n, rank, dtype in (
        (100, 5, 2, 128, 192, 16, BF16),
        (6, 8, 2, 64, 96, 8, BF16),
        (30, 4, 2, 40, 72, 3, torch.float32),
    ):
        ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots]
        yield f"route {tokens}", lambda ids=ids, experts=experts: kb.route(ids, experts).order
        routing = kb.route(ids, experts)
        inputs = [
            rand(tokens, k, dtype=dtype),
            rand(experts, k, n, dtype=dtype, scale=0.1),
            rand(experts, rank, k, dtype=dtype, scale=0.1),
            rand(experts, n, rank, dtype=dtype),
        ]
        name = f"{tokens} tokens {str(dtype)[6:]}"
        for strategy in ("fused", "split"):
            yield (
                f"moe_lora, {strategy} {name}",
                with_gradients(
                    lambda x, w, a, b, routing=routing, strategy=strategy: kb.moe_lora(
                        x, w, a, b, routing, strategy=strategy
                    ),
                    *inputs,
                ),
            )
        yield (
            f"scatter2scatter {name}",
            with_gradients(
                lambda x, w, routing=routing: kb.scatter2scatter(x, w, routing, grouped_out=True), *inputs[:2]
            ),
        )
        x, dy = inputs[0].detach(), rand(tokens * slots, n, dtype=dtype)
        factors = [t.detach() for t in inputs[2:]]
        yield (
            f"lora_gradients {name}",
            lambda x=x, dy=dy, factors=factors, routing=routing: lora_gradients(x, dy, *factors, routing),
        )
        if dtype == BF16:
            q = kb.nf4_quantize(rand(experts, n, k))
            yield f"scatter2scatter, packed {name}", lambda x=x, q=q, routing=routing: kb.scatter2scatter(x, q, routing)
            gates = torch.rand(ids.shape, device=ids.device)
            yield (
                f"moe_lora, packed {name}",
                with_gradients(
                    lambda x, a, b, g, q=q, routing=routing: kb.moe_lora(x, q, a, b, routing, gates=g),
                    inputs[0],
                    inputs[2],
                    inputs[3],
                    gates,
                ),
            )


def attention() -> Iterator[tuple[str, Call]]:
    for d in (64, 128, 256):
        for causal in (False, True):
            q, k, v = rand(1, 4, 300, d), rand(1, 2, 300, d), rand(1, 2, 300, d)
            yield (
                f"flash_attention {d} features{', causal' * causal}",
                with_gradients(lambda q, k, v, causal=causal: kb.flash_attention(q, k, v, causal=causal), q, k, v),
            )

    def plain(q: Any, k: Any, v: Any) -> torch.Tensor:
        with attention_op.plain_kernels():
            return kb.flash_attention(q, k, v, causal=True)

    yield (
        "flash_attention, plain kernels",
        with_gradients(plain, rand(1, 2, 200, 64), rand(1, 2, 200, 64), rand(1, 2, 200, 64)),
    )
    lengths = torch.tensor([5, 250], device=runtime.DEVICE)
    yield (
        "flash_attention, lengths and window",
        with_gradients(
            lambda q, k, v: kb.flash_attention(q, k, v, causal=True, lengths=lengths, window=40),
            *(rand(2, 2, 250, 64) for _ in range(3)),
        ),
    )
    yield (
        "flash_attention float32",
        with_gradients(
            lambda q, k, v: kb.flash_attention(q, k, v), *(rand(1, 2, 100, 64, dtype=torch.float32) for _ in range(3))
        ),
    )
    cache = [rand(2, 2, 900, 128) for _ in range(2)]
    one = rand(2, 8, 1, 128)
    yield "flash_attention, one query", lambda: kb.flash_attention(one, *cache)
    pool = [rand(31, 2, 64, 128) for _ in range(2)]
    table = torch.randperm(30, device=one.device).view(2, 15)
    held = torch.tensor([900, 33], device=one.device)
    yield "paged_attention", lambda: kb.paged_attention(one, *pool, table, held)
    new = [rand(2, 2, 1, 128) for _ in range(2)]

    def append() -> tuple[torch.Tensor, ...]:
        kb.append_to_pages(*new, *pool, table, held)
        return tuple(pool)

    yield "append_to_pages", append


def modules() -> Iterator[tuple[str, Call]]:
    """What modules, training and several GPUs add to the rooms' kernels."""
    device = runtime.DEVICE
    layer = nn.MoELayer(6, 64, 96, 2, device=device, dtype=BF16)
    yield "MoELayer", with_gradients(layer, rand(60, 64))
    cos, sin = rand(2, 5, 64), rand(2, 5, 64)
    yield "rotate", with_gradients(lambda q, k: rotary.rotate(q, k, cos, sin), rand(2, 18, 5, 64), rand(2, 3, 5, 64))
    for shape in ((200, 96), (70, 33), (1000,)):
        grad = rand(*shape)
        yield f"chunk_norms {shape}", lambda grad=grad: chunks.chunk_norms(grad)
    layout = chunks.Layout.of_fraction([70, 1, 130], 0.3, device)
    features, norms = rand(12, layout.total, dtype=torch.float32), rand(layout.total, dtype=torch.float32).abs()
    seen = torch.randint(-1, 9, (layout.total,), dtype=torch.int32, device=device)
    now = torch.tensor([9], dtype=torch.int32, device=device)
    lately = {"longest": 130, "window": 5}
    yield "knn_scores", lambda: chunks.knn_scores(features, norms, seen, now, layout.starts(), **lately)
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
    yield "Predictor", lambda: (predictor(x),)
    xs, grads = ([rand(5, 200, dtype=torch.float32) for _ in range(3)] for _ in range(2))
    gates = [rand(5, 3, dtype=torch.float32) for _ in range(3)]
    local = [torch.rand(5, 7, device=device).argsort(1)[:, :3].to(torch.int32) for _ in range(3)]
    message = exchange._Message.empty(20, xs[0], gates[0])
    message.whole.zero_()
    yield "ids and weights of one rank of three", lambda: exchange._own(message, 3, 3, 7)
    for passed in (ranks.by_messages, ranks.by_windows):
        yield (
            f"three ranks {passed.__name__.replace('_', ' ')}",
            lambda passed=passed: [t for part in passed(xs, gates, local, grads, 7, 3) for t in part],
        )


def control() -> Iterator[tuple[str, Call]]:
    """No kernel of ours: products of PyTorch, as of the calls in which a sanitizer has died."""
    for m, k, n in ((40, 256, 128), (16, 700, 256), (70, 256, 700)):
        x, w = rand(m, k), rand(n, k)
        yield f"torch.mm {m}x{k} by {n}", with_gradients(lambda x, w: torch.mm(x, w.t()), x, w)


ROOMS: dict[str, Callable[[], Iterator[tuple[str, Call]]]] = {
    f.__name__: f for f in (layer_norm, sparse_linear, scatter_ffn, nf4, moe_lora, attention, modules, control)
}


@contextlib.contextmanager
def launches_said() -> Iterator[None]:
    """Prints the names of the kernels that are launched."""
    names: set[str] = set()
    getitem, launch = KernelInterface.__getitem__, Launch.__call__

    def watched_getitem(kernel: Any, grid: Any) -> Any:
        names.add(str(getattr(kernel, "__name__", None) or kernel.fn.__name__))
        return getitem(kernel, grid)

    def watched_launch(self: Any, grid: Any, *args: Any) -> None:
        names.add(str(getattr(self.kernel, "__name__", None) or self.kernel.fn.__name__))
        launch(self, grid, *args)

    KernelInterface.__getitem__, Launch.__call__ = watched_getitem, watched_launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        KernelInterface.__getitem__, Launch.__call__ = getitem, launch  # type: ignore[method-assign]
        print("launched:", *sorted(names), flush=True)


def products_elsewhere() -> None:
    """PyTorch's matrix products on the CPU: racecheck ends in those that cuBLAS has for Hopper, with no kernel of ours (control)."""
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        function = getattr(torch.ops.aten, name)

        def on_cpu(*args: Any, function: Any = function, **kwargs: Any) -> torch.Tensor:
            return function(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args), **kwargs).to(runtime.DEVICE)

        def into(*args: Any, out: torch.Tensor, function: Any = function, **kwargs: Any) -> torch.Tensor:
            return out.copy_(function(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args), **kwargs))

        ATEN.impl(name, on_cpu, "CUDA")
        ATEN.impl(f"{name}.out", into, "CUDA")


def tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for t in value if isinstance(t, torch.Tensor)]


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


def in_processes(count: int) -> bool:
    """This command in so many processes, each with its share of the calls and a file of its own -> whether one failed."""
    visible, pids = os.environ.get("CUDA_VISIBLE_DEVICES"), []
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    for k in range(count):
        pids.append(os.fork())  # nothing has used CUDA yet
        if pids[-1] == 0:
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[k % len(gpus)]
            sys.argv += ["--processes", "1", "--share", f"{k}/{count}"]
            if "--out" in sys.argv:
                path = Path(sys.argv[sys.argv.index("--out") + 1])
                sys.argv += ["--out", str(path.with_name(f"{path.stem}_{k}{path.suffix}"))]
            code = 1
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    return any(ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", default=list(ROOMS))
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the repeats of one call")
    parser.add_argument("--first", type=int, default=0, help="calls before this one are left out")
    parser.add_argument("--share", default="0/1", help="K/N: every N-th call from the K-th on")
    parser.add_argument("--processes", type=int, default=1, help="that have a share each, on the GPUs by turns")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--products-elsewhere", action="store_true", help="PyTorch's matrix products run on the CPU")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.largest:
        told = largest()
        print(told)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(told, file)
        sys.exit(not all(t["same"] for t in told.values()))
    if args.processes > 1:
        sys.exit(in_processes(args.processes))
    told, wrong, at = {}, 0, -1
    share, shares = map(int, args.share.split("/"))
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
                with launches_said():
                    call()
                if runtime.DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                continue
            done, different = repeated(call, args.repeat, args.seconds)
            told[f"{room}: {name}"] = {"repeats": done, "different": different}
            wrong += different if "no promise" not in name else 0
            print(f"{room}: {name}: {done} repeats, {different} with other bits", flush=True)
            if args.out:
                with open(args.out, "w") as file:
                    json.dump(told, file)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
