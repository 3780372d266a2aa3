import itertools, sys, time, traceback
import torch
import kernelbook as kb
from kernelbook.packed import kernels_hopper as kh, kernels_nvidia as kn
import triton, triton.language as tl

mode = sys.argv[1]
worker, workers = (int(a) for a in sys.argv[2:4]) if mode == "compile" else (0, 1)
DEV = "cuda"
torch.manual_seed(0)
flush = torch.empty(64 * 2**20, dtype=torch.float32, device=DEV)
jobs = 0

@triton.jit
def _read(p_ptr, n, s_ptr, m, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(p_ptr + offs, mask=offs < n, other=0)
    offs_s = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    s = tl.load(s_ptr + offs_s, mask=offs_s < m, other=0)
    t = tl.sum(v, 0) + tl.sum(s, 0)
    if t == 0x12345678:
        tl.store(out_ptr, t)

def ms(fn, n=15):
    fn()
    if mode == "compile":
        return 0.0
    ts = []
    for _ in range(n):
        flush.zero_(); flush.sum()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); fn(); b.record()
        ts.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in ts)[n // 2] * 1e3

def show(name, fn, truth=None):
    global jobs
    jobs += 1
    if mode == "compile" and jobs % workers != worker:
        return
    try:
        out = fn()
        torch.cuda.synchronize()
        err = "" if truth is None else f"err {((out.double() - truth).norm() / truth.norm()).item():.2e}"
        print(f"{name:72s} {ms(fn):8.1f} us  {err}", flush=True)
    except Exception as e:
        print(f"{name:72s} FAILED {type(e).__name__} {str(e)[:300]}", flush=True)
        if "illegal" in str(e) or "misaligned" in str(e) or "launch fail" in str(e):
            raise

def few(x, q, expert, TOK, ROWS, G, W, LUT, NREG, routing=None, tiles=None, slots=1):
    E, N, K = q.shape
    M = x.shape[0]
    rows = M if routing is None else routing.rows
    y = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(N, ROWS), triton.cdiv(M, TOK) if routing is None else len(tiles))
    step = G * 64 * W
    kn._few_rows_kernel[grid](
        x if routing is None else LISTS[id(tiles)], rows, expert, 0, x, x.stride(0),
        q.packed.view(torch.int32), q.absmax, q.absmax, q.absmax, q.absmax, q.code, x, 0, 0, 0, x, x, 0, 0, y, E, M, N, K, slots,
        ROUTED=routing is not None, X_GROUPED=False, Y_GROUPED=False, EVEN=K % step == 0 and N % ROWS == 0,
        r=0, RANK=0, HAS_BIAS=False, BLOCK_SIZE=q.block_size, SCALE="float32", NESTED_BLOCK=256, TOKENS=TOK, ROWS=ROWS, GROUPS=G, WARPS=W,
        LUT=LUT, num_warps=W, maxnreg=NREG or None)
    return y

from kernelbook.moe_lora import op as mop
from kernelbook.nf4 import op as nop
def packed_of(q):
    E, N, K = q.shape
    from kernelbook.packed.products import Matrices
    return Matrices(q.packed, q.absmax, q.code, (q.nested_absmax, q.nested_code, q.nested_offset), q.block_size, (E, K, N))
def many(x, q, routing, tiles, by_row, *variant, k=1):
    w = packed_of(q)
    if by_row:
        w = w.transpose()
    y = torch.empty(routing.rows, w.shape[2], dtype=x.dtype, device=x.device)
    assert mop._launch_packed(routing, mop._Rows(x, False, k), w, None, None, y, False, variant)
    return y
def one(x, q, *variant):
    y = torch.empty(x.shape[0], q.shape[1], dtype=x.dtype, device=x.device)
    parts = (q.packed, q.absmax, q.code, q.nested_absmax, q.nested_code, q.nested_offset)
    assert nop._run_by_tiles(x, parts, None, 0, y, q.shape, q.block_size, variant)
    return y

LISTS = {}
def tile_list(routing, h):
    off = routing.offsets.tolist()
    t = [(e, f, min(h, off[e + 1] - f)) for e in range(len(off) - 1) for f in range(off[e], off[e + 1], h)]
    t = torch.tensor(t, dtype=torch.int32, device=DEV)
    LISTS[id(t)] = torch.cat([routing.order, t.reshape(-1)])
    return t

def part_many():
    for E, N, K, T, k in ((128, 1536, 2048, 2048, 8), (8, 28672, 4096, 2048, 2)):
        if mode == 'compile' and E == 8: continue
        print(f"--- many rows E={E} N={N} K={K} T={T} k={k}", flush=True)
        q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)
        ids = torch.rand(T, E, device=DEV).topk(k).indices
        routing = kb.route(ids, E)
        x, dy = torch.randn(T, K, device=DEV).bfloat16(), torch.randn(T * k, N, device=DEV).bfloat16()
        wt = w.transpose(1, 2)
        true_y = kb.scatter2scatter(x, wt, routing).double()
        true_dx = kb.scatter2scatter(dy, w, kb.route(ids.reshape(-1, 1), E)).double()
        r1 = kb.route(ids.reshape(-1, 1), E)
        show("dense fwd", lambda: kb.scatter2scatter(x, wt, routing))
        show("dense dX", lambda: kb.scatter2scatter(dy, w, r1))
        show("dequantize all", lambda: kb.nf4_dequantize(q))
        if E == 128:
            show("packed as it is, fwd", lambda: kb.scatter2scatter(x, q, routing), true_y)
        for by_row in (False, True):
            for v in ((256, 2, 128, 64, 4, 4, 8), (256, 2, 128, 64, 3, 4, 8), (256, 2, 128, 64, 4, 8, 8), (128, 2, 128, 64, 4, 4, 8), (128, 2, 128, 64, 4, 4, 4),
                      (256, 2, 64, 64, 4, 4, 4), (128, 2, 256, 64, 4, 4, 8), (128, 2, 128, 128, 3, 3, 8), (128, 2, 64, 64, 4, 4, 4)):
                if by_row:
                    show(f"many dX {v}", lambda: many(dy, q, r1, None, True, *v), true_dx)
                else:
                    show(f"many fwd {v}", lambda: many(x, q, routing, None, False, *v, k=k), true_y)
        del q, w, x, dy, wt, true_y, true_dx
        torch.cuda.empty_cache()

FEW = [(16, 2, 8, 0, 0), (16, 2, 8, 1, 0), (16, 2, 4, 1, 0), (16, 1, 8, 1, 0), (16, 2, 8, 1, 80), (16, 2, 4, 0, 80), (16, 1, 8, 0, 64), (32, 1, 8, 1, 0), (32, 1, 4, 1, 128), (16, 4, 4, 1, 128), (16, 2, 4, 1, 64)]
ONE = [(16, 1, 64, 128, 4, 4, 4), (16, 1, 64, 64, 4, 8, 4), (16, 1, 64, 256, 3, 3, 4), (16, 1, 128, 64, 4, 8, 4)]
def part_matmul():
    from bitsandbytes import matmul_4bit
    from kernelbook.nf4.bench import _state
    for N, K in ((14336, 4096), (4096, 14336), (1024, 2048)):
        if mode == 'compile' and N != 14336: continue
        q = kb.nf4_quantize(torch.randn(1, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)[0]
        expert = torch.zeros(1, dtype=torch.int64, device=DEV)
        state = _state(q, q.shape[1:], q.absmax, None)
        out = torch.empty(1, dtype=torch.int32, device=DEV)
        for B in (2048, 4096, 8192):
            n = q.packed.numel() // 4
            show(f"read bytes {N}x{K} block {B}", lambda: _read[(triton.cdiv(n, B),)](q.packed.view(torch.int32), n, q.absmax.view(torch.int32), q.absmax.numel(), out, BLOCK=B, num_warps=8))
        for M in (1, 2, 4, 8, 16, 32, 64):
            if N != 14336 and M in (2, 4, 32): continue
            if mode == 'compile' and M in (1, 2, 4): continue
            x = torch.randn(M, K, device=DEV).bfloat16()
            truth = x.double() @ w.double().t()
            print(f"--- nf4_matmul {N}x{K} tokens {M}", flush=True)
            show("dense", lambda: x @ w.t(), truth)
            show("bitsandbytes", lambda: matmul_4bit(x, q.packed[:, None].t(), quant_state=state))
            show("dequantize + mm", lambda: x @ kb.nf4_dequantize(q)[0].t())
            show("nf4_matmul as it is", lambda: kb.nf4_matmul(x, q, expert), truth)
            if M <= 8:
                for ROWS, G, W, LUT, R in FEW if N == 14336 and M == 1 else FEW[1:6]:
                    show(f"few {8, ROWS, G, W, LUT, R}", lambda: few(x, q, expert, 8, ROWS, G, W, bool(LUT), R), truth)
            tok = max(16, M)
            for _, h, *v in ONE:
                show(f"one {tok, h, *v}", lambda: one(x, q, tok, h, *v), truth)

def part_routed():
    for E, N, K, k in ((128, 1536, 2048, 8), (128, 2048, 768, 8)):
        q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)
        wt = w.transpose(1, 2)
        out = torch.empty(1, dtype=torch.int32, device=DEV)
        for T in (1, 4, 16, 64, 256):
            if mode == 'compile' and T in (1, 4, 16): continue
            ids = torch.rand(T, E, device=DEV).topk(k).indices
            routing = kb.route(ids, E)
            x = torch.randn(T, K, device=DEV).bfloat16()
            truth = kb.scatter2scatter(x, wt, routing).double()
            active = len(ids.unique())
            n = active * N * K // 8
            print(f"--- routed E={E} N={N} K={K} T={T} active {active}", flush=True)
            show("read bytes", lambda: _read[(triton.cdiv(n, 4096),)](q.packed.view(torch.int32), n, q.absmax.view(torch.int32), n // 8, out, BLOCK=4096, num_warps=8))
            show("dense", lambda: kb.scatter2scatter(x, wt, routing), truth)
            show("packed as it is", lambda: kb.scatter2scatter(x, q, routing), truth)
            if T <= 64:
                tiles = tile_list(routing, 8)
                for ROWS, G, W, LUT, R in ((64, 2, 4, 1, 0), (64, 1, 4, 1, 0), (64, 1, 4, 1, 128), (32, 1, 4, 1, 128), (32, 1, 4, 0, 128), (32, 2, 4, 0, 168), (64, 1, 4, 0, 0)):
                    if K == 768 and G == 2: continue
                    show(f"few {8, ROWS, G, W, LUT, R}", lambda: few(x, q, ids, 8, ROWS, G, W, bool(LUT), R, routing, tiles, k), truth)
            for v in ((16, 1, 64, 128, 4, 4, 4), (16, 1, 128, 64, 4, 4, 4), (16, 1, 128, 64, 4, 8, 4), (16, 1, 128, 128, 3, 3, 4), (16, 1, 128, 128, 3, 3, 8), (16, 1, 64, 256, 3, 3, 4), (32, 1, 128, 64, 4, 4, 4), (32, 1, 64, 128, 4, 4, 4), (128, 2, 128, 64, 4, 4, 4)):
                if v[0] > 16 and T < 64: continue
                show(f"many {v}", lambda: many(x, q, routing, None, False, *v, k=k), truth)
        del q, w, wt
        torch.cuda.empty_cache()

for name in sys.argv[4:] if mode == "compile" else sys.argv[2:]:
    t = time.time()
    try:
        globals()["part_" + name]()
    except Exception:
        traceback.print_exc()
    print(f"=== {name} {time.time() - t:.0f} s", flush=True)
