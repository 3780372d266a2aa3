from comp import *
from kernelbook.packed import kernels_nvidia as kn
import subprocess
sig=dict(expert_ptr="*i64", expert="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32", y_ptr="*bf16", E="i32",M="i32",N="i32",K="i32")
for a in sys.argv[1:]:
    TOK,ROWS,W,AHEAD,mult,EVEN,SC=eval(a)
    sig["absmax_ptr"]="*u8" if SC=="nested" else "*fp32"
    opts=dict(maxnreg=min(255, 65536//(32*W*mult)//8*8))
    c,s=comp(kn._one_matrix_kernel, sig, dict(expert_ptr=None,EVEN=EVEN,BLOCK_SIZE=64,SCALE=SC,NESTED_BLOCK=256,TOKENS=TOK,ROWS=ROWS,WARPS=W,AHEAD=AHEAD), W, ("stride_xm","N","K"), **opts)
    open(f"/tmp/fourbit_prod.sass","w").write(s)
    print(subprocess.run([sys.executable,"/tmp/fourbit_loops.py","/tmp/fourbit_prod.sass"],capture_output=True,text=True).stdout)
