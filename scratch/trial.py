import os, sys, time, traceback
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import kernelbook as kb
import triton
import lut, lut1, tall, three, wide
from kernelbook import floor, timing
from kernelbook.moe_lora.op import _section
from kernelbook.packed import kernels_hopper

mode, worker, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
DEADLINE = time.time() + float(os.environ.get("LIMIT", "60"))
DEV = "cuda"
torch.manual_seed(0)
SMS = torch.cuda.get_device_properties(0).multi_processor_count
jobs = 0

def show(name, fn, truth=None):
    global jobs
    jobs += 1
    if mode == "compile" and jobs % workers != worker:
        return
    if time.time() > DEADLINE:
        return
    try:
        t = time.time()
        y = fn()
        torch.cuda.synchronize()
        err = ""
        if truth is not None:
            err = f"err {((y.double() - truth).norm() / truth.norm()).item():.2e} again {torch.equal(y, fn())}"
        if mode == "compile":
            print(f"{name:60s} {time.time() - t:.1f} s {err}", flush=True)
            return
        print(f"{name:60s} {timing.measure(fn, warmup_ms=5, rep_ms=25).ms * 1e3:7.1f} us  {err}", flush=True)
    except Exception as e:
        print(f"{name:60s} FAILED {type(e).__name__} {str(e)[:200]}", flush=True)
        if "illegal" in str(e) or "misaligned" in str(e) or "launch fail" in str(e):
            raise

def rest(q):
    nested = (q.absmax,) * 3 if q.nested_absmax is None else (q.nested_absmax, q.nested_code, q.nested_offset)
    return (q.packed.view(torch.int32), q.absmax, *nested, q.code)

def scale(q):
    return "float32" if q.nested_absmax is None else "nested"

def run_wide(x, q, TOK, HALVES, ROWS, W, PARTS, DEPTH, CHUNKS, XAHEAD, mult=1, SKIP=0):
    E, N, K = q.shape
    M = x.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    # as many groups as make the programs fill the multiprocessors evenly
    tiles = triton.cdiv(N, ROWS)
    most = W // PARTS
    rounds = triton.cdiv(tiles, most * SMS * mult)
    groups = triton.cdiv(tiles, rounds * SMS * mult)
    step = 32 * 2 * HALVES * CHUNKS * PARTS
    wide._wide_kernel[(triton.cdiv(tiles, groups),)](
        None, 0, x, x.stride(0), *rest(q), y, E, M, N, K, groups,
        EVEN=K % step == 0, BLOCK_SIZE=q.block_size, SCALE=scale(q), NESTED_BLOCK=256,
        TOKENS=TOK, HALVES=HALVES, ROWS=ROWS, WARPS=W, PARTS=PARTS, DEPTH=DEPTH, CHUNKS=CHUNKS, XAHEAD=bool(XAHEAD), SKIP=SKIP,
        num_warps=W, maxnreg=min(255, 65536 // (32 * W * mult) // 8 * 8))
    return y

def run_tall(x, q, TOK, ROWS, W, DEPTH, STAGES, CH):
    E, N, K = q.shape
    M = x.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    tall._tall_kernel[(triton.cdiv(N, ROWS), triton.cdiv(M, TOK))](
        None, 0, x, x.stride(0), *rest(q), y, E, M, N, K, BLOCK_SIZE=q.block_size, SCALE=scale(q), NESTED_BLOCK=256,
        TOKENS=TOK, ROWS=ROWS, WARPS=W, DEPTH=DEPTH, STAGES=STAGES, CH=CH, num_warps=W)
    return y

def run_many(mod, x, q, routing, slots, by_row, TOK, HALVES, OUT, DEPTH, STAGES, AHEAD, W):
    E, N, K = q.shape
    width = K if by_row else N
    if routing is None:
        lists, tiles_at, num_m, rows = None, 0, triton.cdiv(x.shape[0], TOK), x.shape[0]
    else:
        lists, rows = routing.lists, routing.rows
        tiles_at, num_m = _section(rows, routing.num_experts, TOK)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    mod._many_rows_kernel[(num_m * triton.cdiv(width, OUT),)](
        lists, tiles_at, None, 0, x, x.stride(0), *rest(q),
        None, 0, 0, 0, None, None, 0, 0, y, E, x.shape[0], N, K, slots, num_m,
        X_GROUPED=routing is None, Y_GROUPED=routing is None, BY_ROW=by_row, r=0, RANK=0, HAS_BIAS=False, BLOCK_SIZE=q.block_size, SCALE=scale(q),
        NESTED_BLOCK=256, TOKENS=TOK, HALVES=HALVES, OUT=OUT, DEPTH=DEPTH, STAGES=STAGES, AHEAD=AHEAD, WARPS=W, GROUP=8, num_warps=W)
    return y

#      TOK HALVES ROWS W PARTS DEPTH CHUNKS XAHEAD
W4 = [(4, 2, 16, 16, 2, 3, 1, 1), (4, 2, 16, 8, 1, 6, 1, 1), (4, 2, 16, 16, 2, 2, 1, 1), (4, 2, 16, 16, 2, 1, 2, 0), (4, 2, 16, 8, 1, 4, 2, 1),
      (4, 2, 16, 8, 2, 2, 1, 1, 2), (4, 2, 16, 16, 2, 2, 1, 1, 1, 1), (4, 2, 32, 16, 4, 1, 1, 1)]
W8 = [(8, 1, 16, 16, 2, 4, 1, 1), (8, 1, 16, 16, 2, 2, 2, 1), (8, 2, 16, 8, 1, 4, 1, 1), (8, 2, 16, 16, 2, 2, 1, 1)]
W16 = [(16, 1, 16, 16, 2, 3, 1, 1), (16, 1, 32, 8, 2, 4, 1, 1), (16, 1, 32, 16, 4, 2, 1, 1), (16, 1, 16, 8, 1, 6, 1, 1)]
W32 = [(32, 1, 16, 8, 1, 6, 1, 1)]
TALL = [(128, 8, 4, 4, 2), (128, 8, 4, 4, 4), (64, 4, 4, 4, 2), (128, 8, 4, 5, 1)]
ONE = [(0, 64, 64, 4, 6, 4), (0, 128, 64, 4, 6, 8), (0, 128, 128, 4, 4, 8)]

def part_matmul():
    for N, K in ((14336, 4096), (4096, 14336)):
        if mode == "compile" and N != 14336:
            continue
        q = kb.nf4_quantize(torch.randn(1, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)[0]
        bytes_ = torch.randint(256, (round((N * K * (0.5 + 4 / 64)) / 4096), 4096), dtype=torch.uint8, device=DEV)
        print(f"--- {N}x{K}", flush=True)
        show("read_rows", lambda: floor.read_rows([bytes_]))
        for M in (1, 4, 8, 16, 32, 64):
            if mode == "compile" and M == 1:
                continue
            if N != 14336 and M in (8, 64):
                continue
            x = torch.randn(M, K, device=DEV).bfloat16()
            truth = x.double() @ w.double().t()
            show(f"M={M} dense", lambda: x @ w.t(), truth)
            show(f"M={M} nf4_matmul as it is", lambda: kb.nf4_matmul(x, q, 0), truth)
            for v in W4 if M <= 4 else W8 if M == 8 else W16 if M == 16 else W32 if M == 32 else []:
                if K == 14336:  # eight parts
                    v = (*v[:4], 8 * v[2] // 16 if v[3] == 16 else 4 * v[2] // 16, *v[5:])
                show(f"M={M} wide {v}", lambda: run_wide(x, q, *v), truth)
            for v in TALL if M >= 16 else []:
                show(f"M={M} tall {v}", lambda: run_tall(x, q, M, *v), truth)
            for v in ONE if M >= 16 else []:
                show(f"M={M} many {v}", lambda: run_many(kernels_hopper, x, q, None, 1, False, M, *v), truth)

def part_tiles():
    for E, N, K, T, k in ((128, 1536, 2048, 2048, 8), (128, 2048, 768, 2048, 8)):
        if mode == "compile" and N != 1536:
            continue
        print(f"--- tiles E={E} N={N} K={K} T={T} k={k}", flush=True)
        q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV, dtype=torch.bfloat16) / K**.5)
        w = kb.nf4_dequantize(q)
        ids = torch.rand(T, E, device=DEV).topk(k).indices
        x, dy = torch.randn(T, K, device=DEV).bfloat16(), torch.randn(T * k, N, device=DEV).bfloat16()
        wt = w.transpose(1, 2)
        routing, r1 = kb.route(ids, E), kb.route(ids.reshape(-1, 1), E)
        exact = kb.scatter2scatter(x, wt, routing).double(), kb.scatter2scatter(dy, w, r1).double()
        show("dense fwd", lambda: kb.scatter2scatter(x, wt, routing))
        show("dense dX", lambda: kb.scatter2scatter(dy, w, r1))
        now, now_x = (256, 2, 128, 64, 4, 4, 8), (256, 2, 128, 64, 4, 6, 8)
        show("now fwd", lambda: run_many(kernels_hopper, x, q, routing, k, False, *now), exact[0])
        show("now dX", lambda: run_many(kernels_hopper, dy, q, r1, 1, True, *now_x), exact[1])
        show("three fwd", lambda: run_many(three, x, q, routing, k, False, *now), exact[0])
        show("three dX", lambda: run_many(three, dy, q, r1, 1, True, *now_x), exact[1])
        for v in ((256, 2, 128, 64, 4, 2, 8), (128, 1, 128, 64, 4, 4, 8), (256, 2, 128, 64, 3, 4, 8)):
            show(f"lut fwd {v}", lambda: run_many(lut, x, q, routing, k, False, *v), exact[0])
            show(f"lut dX {v}", lambda: run_many(lut, dy, q, r1, 1, True, *v), exact[1])
        v = (256, 2, 128, 64, 4, 2, 8)
        show(f"lut1 fwd {v}", lambda: run_many(lut1, x, q, routing, k, False, *v), exact[0])
        show(f"lut1 dX {v}", lambda: run_many(lut1, dy, q, r1, 1, True, *v), exact[1])
        del q, w, x, dy, wt, exact
        torch.cuda.empty_cache()

def part_right():
    import dataclasses
    shapes = ((2, 1000, 2112, 64, True, torch.bfloat16), (3, 72, 320, 64, False, torch.float16), (1, 520, 4096, 128, True, torch.bfloat16), (2, 4096, 1088, 4096, False, torch.float16))
    E, N, K, bs, double, dtype = shapes[worker]
    q = kb.nf4_quantize(torch.randn(E, N, K, device=DEV) / K**.5, block_size=bs, double_quant=double)
    w = kb.nf4_dequantize(q, dtype=torch.float32)[0]
    rounded = kb.nf4_dequantize(dataclasses.replace(q, code=q.code.to(dtype).float()), dtype=dtype)[0].t()
    eye = torch.eye(K, dtype=dtype, device=DEV)
    bad = 0
    for M in (1, 3, 4, 5, 8, 11, 16, 33, 64):
        x = torch.randn(M, K, device=DEV).to(dtype)
        truth = x.double() @ w.double().t()
        calls = {}
        for v in (W4[:2] if M <= 4 else W8[:2] if M <= 8 else W16[:2] if M <= 16 else []):
            calls[f"wide {v}"] = lambda x, v=v: run_wide(x, q, *v)
        for v in (TALL[1:3] if M > 8 else []):
            calls[f"tall {v}"] = lambda x, v=v: run_tall(x, q, 16 if M <= 16 else 64, *v)
        for name, call in calls.items():
            try:
                y = call(x)
                err = ((y.double() - truth).norm() / truth.norm()).item()
                bits = all(torch.equal(call(eye[s : s + M]), rounded[s : s + M]) for s in (0, 60, 128, K - M))
                ok = err < 4e-3 and bits and torch.equal(y, call(x))
                bad += not ok
                print(f"{E, N, K, bs, double} M={M} {name} err {err:.2e} bits {bits} {'ok' if ok else 'BAD'}", flush=True)
            except Exception as e:
                bad += 1
                print(f"{E, N, K} M={M} {name} FAILED {type(e).__name__} {str(e)[:200]}", flush=True)
                if "illegal" in str(e) or "misaligned" in str(e):
                    raise
    print("RIGHT" if not bad else "WRONG", worker, bad, flush=True)

for name in sys.argv[4:]:
    t = time.time()
    try:
        globals()["part_" + name]()
    except Exception:
        traceback.print_exc()
    print(f"=== {name} {time.time() - t:.0f} s", flush=True)
