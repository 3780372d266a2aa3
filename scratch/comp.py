import sys, time, re, collections
sys.path.insert(0, "/work/wt/fourbit/scratch")
import kernelbook
from kernelbook import compiled
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
def comp(kernel, signature, constants, num_warps, aligned_names=(), **opts):
    signature = dict(signature)
    for k in constants:
        signature[k] = "constexpr" if k not in signature or constants[k] is None or k.isupper() else signature[k]
    names = list(kernel.arg_names)
    signature = {n: signature[n] for n in names}
    src = GluonASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n].startswith("*") or n in aligned_names})
    t = time.time()
    c = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=num_warps, **opts))
    regs, spills, sass = compiled._cubin_report(c.asm["cubin"], True)
    print(f"{kernel.__name__} {[(k,v) for k,v in constants.items() if k.isupper()]} regs {regs} spills {spills} shared {c.metadata.shared} {time.time()-t:.1f}s", flush=True)
    return c, sass
def hist(sass):
    cnt = collections.Counter()
    for line in sass.splitlines():
        m = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", line)
        if m: cnt[m.group(1).split(".")[0]] += 1
    return cnt
