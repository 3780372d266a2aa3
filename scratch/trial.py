import os, sys, time, traceback
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import kernelbook as kb
import triton, triton.language as tl
import one, few, many, ring, spec
from kernelbook.moe_lora import op as mop
from kernelbook.moe_lora.op import _section

mode = sys.argv[1]
worker, workers = (int(a) for a in sys.argv[2:4]) if mode == "compile" else (0, 1)
DEV = "cuda"
torch.manual_seed(0)
flush = torch.empty(64 * 2**20, dtype=torch.float32, device=DEV)
SMS = torch.cuda.get_device_properties(0).multi_processor_count
jobs = 0
DEADLINE = time.time() + float(os.environ.get("LIMIT", "60"))

@triton.jit
def _read(p_ptr, n, s_ptr, m, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(p_ptr + offs, mask=offs < n, other=0)
    offs_s = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    s = tl.load(s_ptr + offs_s, mask=offs_s < m, other=0)
    t = tl.sum(v, 0) + tl.sum(s, 0)
    if t == 0x12345678:
        tl.store(out_ptr, t)

def us(fn, n=15):
    fn()
    ts = []
    for _ in range(n):
        flush.zero_(); flush.sum()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); fn(); b.record()
        ts.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in ts)[n // 2] * 1e3

def show(name, fn, truth=None, always=False):
    global jobs
    jobs += 1
    if mode == "compile" and jobs % workers != worker:
        return
    if time.time() > DEADLINE:
        return
    try:
        out = fn()
        torch.cuda.synchronize()
        if mode == "compile":
            return
        err = "" if truth is None else f"err {((out.double() - truth).norm() / truth.norm()).item():.2e}"
        t = us(fn)
        print(f"{name:80s} {t:8.1f} us  {err}", flush=True)
    except Exception as e:
        print(f"{name:80s} FAILED {type(e).__name__} {str(e)[:300]}", flush=True)
        if "illegal" in str(e) or "misaligned" in str(e) or "launch fail" in str(e):
            raise

def run_one(x, q, TOK, SPLIT, ROWS, G, W, HELD, LUT, STAY, mult=0):
    E, N, K = q.shape
    M = x.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    step = G * 64 * SPLIT * W
    assert not HELD or K <= step
    programs = min(triton.cdiv(N, ROWS), SMS * (mult or max(1, 16 // W)))
    one._one_kernel[(programs,)](
        None, 0, x, x.stride(0), q.packed.view(torch.int32), q.absmax, q.absmax, q.absmax, q.absmax, q.code, y, E, M, N, K,
        EVEN=K % step == 0 and N % ROWS == 0, BLOCK_SIZE=q.block_size, SCALE="float32", NESTED_BLOCK=256,
        TOKENS=TOK, SPLIT=SPLIT, ROWS=ROWS, GROUPS=G, WARPS=W, HELD=bool(HELD), LUT=bool(LUT), STAY=bool(STAY), num_warps=W,
        maxnreg=min(255, 65536 // (32 * W * (mult or max(1, 16 // W))) // 8 * 8))
    return y

def run_few(x, q, routing, slots, ROWS, G, W, LUT, STAY, NREG=0):
    E, N, K = q.shape
    tiles_at, num_m = _section(routing.rows, routing.num_experts, 16)
    y = torch.empty(routing.rows, N, dtype=x.dtype, device=x.device)
    step = G * 64 * W
    few._few_rows_kernel[(triton.cdiv(N, ROWS), num_m * 2)](
        routing.lists, tiles_at, None, 0, x, x.stride(0), q.packed.view(torch.int32), q.absmax, q.absmax, q.absmax, q.absmax, q.code,
        None, 0, 0, y, E, x.shape[0], N, K, slots,
        X_GROUPED=False, Y_GROUPED=False, EVEN=K % step == 0 and N % ROWS == 0, HAS_BIAS=False, BLOCK_SIZE=q.block_size,
        SCALE="float32", NESTED_BLOCK=256, TOKENS=8, ROWS=ROWS, GROUPS=G, WARPS=W, PARTS=2, LUT=bool(LUT), STAY=bool(STAY),
        num_warps=W, maxnreg=NREG or None)
    return y

def run_many(x, q, routing, slots, by_row, TOK, HALVES, BETWEEN, OUT, DEPTH, STAGES, AHEAD, W, NREG=0, GROUP=8, SKIP=0):
    E, N, K = q.shape
    width = K if by_row else N
    tiles_at, num_m = _section(routing.rows, routing.num_experts, TOK)
    y = torch.empty(routing.rows, width, dtype=x.dtype, device=x.device)
    many._many_rows_kernel[(num_m * triton.cdiv(width, OUT),)](
        routing.lists, tiles_at, None, 0, x, x.stride(0), q.packed.view(torch.int32), q.absmax, q.absmax, q.absmax, q.absmax, q.code,
        None, 0, 0, 0, None, None, 0, 0, y, E, x.shape[0], N, K, slots, num_m,
        X_GROUPED=False, Y_GROUPED=False, BY_ROW=by_row, r=0, RANK=0, HAS_BIAS=False, BLOCK_SIZE=q.block_size, SCALE="float32",
        NESTED_BLOCK=256, TOKENS=TOK, HALVES=HALVES, OUT=OUT, DEPTH=DEPTH, STAGES=STAGES, AHEAD=AHEAD, WARPS=W, GROUP=GROUP,
        BETWEEN=bool(BETWEEN), SKIP=SKIP, num_warps=W, maxnreg=NREG or None)
    return y

MANY = [(256, 2, 0, 128, 64, 4, 6, 8), (256, 2, 1, 128, 64, 4, 6, 8)]
SKIPS = [(256, 2, 0, 128, 64, 4, 4, 8, 0, 8, s) for s in (1, 2, 4, 5, 6)]
def part_many():
    for E, N, K, T, k in ((128, 1536, 2048, 2048, 8), (128, 2048, 768, 2048, 8), (8, 28672, 4096, 2048, 2)):
        if mode == "compile" and N != 1536: continue
        print(f"--- many rows E={E} N={N} K={K} T={T} k={k}", flush=True)
        q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)
        ids = torch.rand(T, E, device=DEV).topk(k).indices
        x, dy = torch.randn(T, K, device=DEV).bfloat16(), torch.randn(T * k, N, device=DEV).bfloat16()
        wt = w.transpose(1, 2)
        routing, r1 = kb.route(ids, E), kb.route(ids.reshape(-1, 1), E)
        true_y = kb.scatter2scatter(x, wt, routing).double()
        true_dx = kb.scatter2scatter(dy, w, r1).double()
        show("dense fwd", lambda: kb.scatter2scatter(x, wt, routing))
        show("dense dX", lambda: kb.scatter2scatter(dy, w, r1))
        show("dequantize all", lambda: kb.nf4_dequantize(q))
        show("packed as it is, fwd", lambda: kb.scatter2scatter(x, q, routing), true_y)
        for by_row in (False, True):
            for v in (MANY + SKIPS if not by_row else MANY) if N == 1536 else MANY[:4]:
                if by_row:
                    show(f"many dX {v}", lambda: run_many(dy, q, r1, 1, True, *v), true_dx)
                else:
                    show(f"many fwd {v}", lambda: run_many(x, q, routing, k, False, *v), true_y)
        del q, w, x, dy, wt, true_y, true_dx
        torch.cuda.empty_cache()

def run_spec(x, q, routing, slots, by_row, TOK, OUT, STAGES, GROUP, mult=1, FENCE=3):
    E, N, K = q.shape
    width = K if by_row else N
    tiles_at, num_m = _section(routing.rows, routing.num_experts, TOK)
    y = torch.empty(routing.rows, width, dtype=x.dtype, device=x.device)
    programs = min(SMS * mult, num_m * triton.cdiv(width, OUT))
    spec._spec_kernel[(programs,)](
        routing.lists, tiles_at, x, x.stride(0), q.packed.view(torch.int32), q.absmax, q.absmax, q.absmax, q.absmax, q.code,
        y, E, N, K, slots, num_m,
        X_GROUPED=False, Y_GROUPED=False, BY_ROW=by_row, BLOCK_SIZE=q.block_size, SCALE="float32",
        NESTED_BLOCK=256, TOKENS=TOK, OUT=OUT, DEPTH=64, STAGES=STAGES, WARPS=4, GROUP=GROUP, REGS=168, REGS_P=168, FENCE=FENCE, num_warps=4)
    return y

SPEC = [(256, 128, 4, 8, 1, f) for f in (3, 2, 1, 0)]
def part_spec():
    for E, N, K, T, k in ((128, 1536, 2048, 2048, 8),):
        print(f"--- spec E={E} N={N} K={K} T={T} k={k}", flush=True)
        q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)
        ids = torch.rand(T, E, device=DEV).topk(k).indices
        x, dy = torch.randn(T, K, device=DEV).bfloat16(), torch.randn(T * k, N, device=DEV).bfloat16()
        wt = w.transpose(1, 2)
        routing, r1 = kb.route(ids, E), kb.route(ids.reshape(-1, 1), E)
        true_y = kb.scatter2scatter(x, wt, routing).double()
        true_dx = kb.scatter2scatter(dy, w, r1).double()
        show("dense fwd", lambda: kb.scatter2scatter(x, wt, routing))
        show("dense dX", lambda: kb.scatter2scatter(dy, w, r1))
        for v in SPEC:
            show(f"spec fwd {v}", lambda: run_spec(x, q, routing, k, False, *v), true_y)
        for v in MANY + SKIPS:
            show(f"many fwd {v}", lambda: run_many(x, q, routing, k, False, *v), true_y)
        for v in SPEC:
            show(f"spec dX {v}", lambda: run_spec(dy, q, r1, 1, True, *v), true_dx)
        for v in MANY:
            show(f"many dX {v}", lambda: run_many(dy, q, r1, 1, True, *v), true_dx)

def run_ring(x, q, TOK, SPLIT, ROWS, W, AHEAD, mult):
    E, N, K = q.shape
    M = x.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    programs = min(triton.cdiv(N, ROWS), SMS * mult)
    nested = (q.absmax,) * 3 if q.nested_absmax is None else (q.nested_absmax, q.nested_code, q.nested_offset)
    ring._ring_kernel[(programs,)](
        None, 0, x, x.stride(0), q.packed.view(torch.int32), q.absmax, *nested, q.code, y, E, M, N, K,
        EVEN=K % (128 * W) == 0 and N % ROWS == 0, BLOCK_SIZE=q.block_size, SCALE="float32" if q.nested_absmax is None else "nested", NESTED_BLOCK=256,
        TOKENS=TOK, SPLIT=SPLIT, ROWS=ROWS, WARPS=W, AHEAD=AHEAD, num_warps=W,
        maxnreg=min(255, 65536 // (32 * W * mult) // 8 * 8))
    return y

R4 = [(4, 2, 32, 8, 4, 2), (4, 2, 16, 16, 8, 1), (4, 2, 64, 8, 4, 1), (4, 2, 16, 8, 8, 2), (4, 2, 32, 16, 5, 1), (4, 2, 32, 8, 3, 2), (4, 2, 16, 16, 4, 1)]
R8 = [(8, 1, 32, 8, 4, 2), (8, 1, 16, 16, 8, 1), (8, 1, 64, 8, 4, 1), (8, 1, 16, 8, 8, 2), (8, 1, 32, 16, 5, 1)]
R16 = [(16, 1, 32, 8, 4, 2), (16, 1, 32, 8, 5, 1), (16, 1, 64, 8, 4, 1), (16, 1, 16, 8, 8, 2), (16, 1, 16, 16, 8, 1)]
R32 = [(32, 1, 32, 8, 5, 1), (32, 1, 16, 8, 8, 2), (32, 1, 64, 8, 4, 1)]
O32 = [(16, 0, 64, 128, 6, 6, 4), (16, 0, 128, 64, 4, 6, 8), (16, 0, 128, 128, 4, 4, 8)]
def run_one_many(x, q, TOK, HALVES, OUT, DEPTH, STAGES, AHEAD, W):
    E, N, K = q.shape
    y = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    num_m = triton.cdiv(x.shape[0], TOK)
    many._many_rows_kernel[(num_m * triton.cdiv(N, OUT),)](
        None, 0, None, 0, x, x.stride(0), q.packed.view(torch.int32), q.absmax, q.absmax, q.absmax, q.absmax, q.code,
        None, 0, 0, 0, None, None, 0, 0, y, E, x.shape[0], N, K, 1, num_m,
        X_GROUPED=True, Y_GROUPED=True, BY_ROW=False, r=0, RANK=0, HAS_BIAS=False, BLOCK_SIZE=q.block_size, SCALE="float32",
        NESTED_BLOCK=256, TOKENS=TOK, HALVES=HALVES, OUT=OUT, DEPTH=DEPTH, STAGES=STAGES, AHEAD=AHEAD, WARPS=W, GROUP=8,
        BETWEEN=False, SKIP=0, num_warps=W)
    return y

def part_right():
    for N, K, bs, double in ((1000, 2112, 64, False), (72, 320, 64, True), (520, 4096, 128, True), (48, 64, 64, False), (4096, 14336, 4096, False)):
        q = kb.nf4_quantize(torch.randn(1, N, K, device=DEV, dtype=torch.bfloat16) / K**.5, block_size=bs, double_quant=double)
        w = kb.nf4_dequantize(q, dtype=torch.float32)[0]
        for M in (1, 3, 4, 7, 16, 25):
            for v in R4[:3] if M <= 4 else R8[:2] if M <= 8 else R16[:2] if M <= 16 else R32[:1]:
                x = torch.randn(M, K, device=DEV).bfloat16()
                show(f"right {N, K, bs, double, M} {v}", lambda: run_ring(x, q, *v), x.double() @ w.double().t())

from kernelbook.nf4 import kernels as nk
from kernelbook.packed import products
def as_it_was(x, q, expert):
    kept, nk.PACKED_ELEMENTS = nk.PACKED_ELEMENTS, 0
    few, products.FEW_TOKENS = products.FEW_TOKENS, 0
    products.plan.cache_clear()
    try:
        return kb.nf4_matmul(x, q, expert)
    finally:
        nk.PACKED_ELEMENTS, products.FEW_TOKENS = kept, few
        products.plan.cache_clear()

def part_ring():
    for N, K in ((14336, 4096), (4096, 14336), (1024, 2048), (4096, 4096), (28672, 4096)):
        if mode == "compile" and N != 14336: continue
        q = kb.nf4_quantize(torch.randn(1, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)[0]
        expert = torch.zeros(1, dtype=torch.int64, device=DEV)
        out = torch.empty(1, dtype=torch.int32, device=DEV)
        n = q.packed.numel() // 4
        show(f"read bytes {N}x{K}", lambda: _read[(triton.cdiv(n, 4096),)](q.packed.view(torch.int32), n, q.absmax.view(torch.int32), q.absmax.numel(), out, BLOCK=4096, num_warps=8))
        for M in (1, 4, 8, 16, 32, 64):
            if mode == "compile" and M == 1: continue
            if N in (4096, 28672) and K == 4096 and M in (1, 8, 32, 64): continue
            x = torch.randn(M, K, device=DEV).bfloat16()
            truth = x.double() @ w.double().t()
            print(f"--- ring {N}x{K} tokens {M}", flush=True)
            show("dense", lambda: x @ w.t(), truth)
            show("nf4_matmul as it is", lambda: kb.nf4_matmul(x, q, expert), truth)
            show("nf4_matmul as it was", lambda: as_it_was(x, q, expert), truth)
            for v in R4 if M <= 4 else R8 if M == 8 else R16 if M == 16 else R32 if M == 32 else []:
                show(f"ring {v}", lambda: run_ring(x, q, *v), truth)
            for v in T4[3:4] if M <= 4 else T8[3:5] if M == 8 else T16[1:2] if M == 16 else []:
                show(f"one {v}", lambda: run_one(x, q, *v), truth)
            for v in O32 if M >= 16 else []:
                show(f"many {(M, *v[1:])}", lambda: run_one_many(x, q, M, *v[1:]), truth)

T4 = [(4, 2, 16, 2, 16, 1, 1, 1), (4, 2, 16, 2, 16, 1, 1, 0), (4, 2, 16, 2, 16, 1, 0, 1), (4, 2, 32, 1, 8, 0, 1, 1), (4, 2, 32, 2, 8, 0, 1, 1), (4, 2, 16, 2, 8, 0, 1, 1),
      (4, 2, 32, 1, 16, 0, 1, 1), (4, 2, 16, 1, 16, 0, 1, 1), (4, 2, 32, 1, 8, 0, 0, 1), (4, 2, 16, 2, 4, 0, 1, 1), (4, 2, 16, 4, 8, 1, 1, 1), (4, 2, 16, 1, 8, 0, 1, 1, 3), (4, 2, 32, 2, 8, 0, 1, 1, 1), (4, 2, 64, 1, 8, 0, 1, 1, 1)]
T8 = [(8, 1, 16, 4, 16, 1, 1, 1), (8, 1, 16, 4, 16, 1, 0, 1), (8, 1, 32, 2, 16, 0, 1, 1), (8, 1, 32, 2, 8, 0, 1, 1), (8, 1, 32, 1, 8, 0, 1, 1), (8, 2, 16, 2, 8, 0, 1, 1), (8, 2, 32, 1, 8, 0, 1, 1), (8, 1, 64, 1, 8, 0, 1, 1, 1), (8, 1, 32, 2, 8, 0, 1, 1, 1)]
T16 = [(16, 1, 32, 2, 8, 0, 1, 1), (16, 1, 32, 1, 8, 0, 1, 1), (16, 1, 64, 1, 8, 0, 1, 1), (16, 1, 16, 2, 16, 0, 1, 1), (16, 1, 32, 1, 16, 0, 1, 1), (16, 1, 64, 1, 8, 0, 1, 1, 1), (16, 1, 32, 2, 8, 0, 1, 1, 1), (16, 1, 32, 1, 8, 0, 0, 1)]
T32 = [(32, 1, 32, 1, 8, 0, 1, 1), (32, 1, 64, 1, 8, 0, 1, 1), (32, 1, 32, 1, 8, 0, 0, 1), (32, 1, 32, 1, 8, 0, 1, 1, 1), (32, 1, 64, 1, 8, 0, 1, 1, 1)]
T64 = [(64, 1, 32, 1, 8, 0, 1, 1, 1), (64, 1, 16, 1, 8, 0, 1, 1, 1)]
def part_matmul():
    for N, K in ((14336, 4096), (4096, 14336), (1024, 2048)):
        if mode == "compile" and N != 14336: continue
        q = kb.nf4_quantize(torch.randn(1, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)[0]
        expert = torch.zeros(1, dtype=torch.int64, device=DEV)
        out = torch.empty(1, dtype=torch.int32, device=DEV)
        for B in (2048, 8192):
            n = q.packed.numel() // 4
            show(f"read bytes {N}x{K} block {B}", lambda: _read[(triton.cdiv(n, B),)](q.packed.view(torch.int32), n, q.absmax.view(torch.int32), q.absmax.numel(), out, BLOCK=B, num_warps=8))
        for M in (1, 2, 4, 8, 16, 32, 64):
            if N != 14336 and M in (2, 32, 64): continue
            if mode == "compile" and M in (1, 2): continue
            x = torch.randn(M, K, device=DEV).bfloat16()
            truth = x.double() @ w.double().t()
            print(f"--- nf4_matmul {N}x{K} tokens {M}", flush=True)
            show("dense", lambda: x @ w.t(), truth)
            show("nf4_matmul as it is", lambda: kb.nf4_matmul(x, q, expert), truth)
            for v in T4 if M <= 4 else T8 if M == 8 else T16 if M == 16 else T32 if M == 32 else T64:
                if v[5] and K > v[3] * 64 * v[1] * v[4]: continue
                show(f"one {v}", lambda: run_one(x, q, *v), truth)
            if M <= 4 and N == 14336:
                for v in T8[:2]:
                    show(f"one {v}", lambda: run_one(x, q, *v), truth)

FEW = [(32, 1, 4, 0, 0), (32, 1, 4, 0, 1), (32, 1, 4, 1, 1), (64, 1, 4, 1, 1), (32, 2, 4, 1, 1), (64, 1, 4, 0, 1), (64, 1, 8, 1, 1)]
def part_routed():
    for E, N, K, k in ((128, 1536, 2048, 8), (128, 2048, 768, 8)):
        q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)
        wt = w.transpose(1, 2)
        out = torch.empty(1, dtype=torch.int32, device=DEV)
        for T in (1, 4, 16, 64):
            if mode == "compile" and T in (1, 4, 16): continue
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
            for v in FEW:
                show(f"few {v}", lambda: run_few(x, q, routing, k, *v), truth)
        del q, w, wt
        torch.cuda.empty_cache()

for name in sys.argv[4:] if mode == "compile" else sys.argv[2:]:
    t = time.time()
    try:
        globals()["part_" + name]()
    except Exception:
        traceback.print_exc()
    print(f"=== {name} {time.time() - t:.0f} s", flush=True)
