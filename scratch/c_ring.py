from comp import *
import ring, subprocess
sig=dict(expert_ptr="*i64", expert="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32", y_ptr="*bf16", E="i32",M="i32",N="i32",K="i32")
for a in sys.argv[1:]:
    TOK,SPLIT,ROWS,W,AHEAD,mult,EVEN=eval(a)
    opts=dict(maxnreg=min(255, 65536//(32*W*mult)//8*8))
    c,s=comp(ring._ring_kernel, sig, dict(expert_ptr=None,EVEN=EVEN,BLOCK_SIZE=64,SCALE="float32",NESTED_BLOCK=256,TOKENS=TOK,SPLIT=SPLIT,ROWS=ROWS,WARPS=W,AHEAD=AHEAD), W, ("stride_xm","N","K"), **opts)
    open(f"/tmp/fourbit_ring.sass","w").write(s)
    print(subprocess.run([sys.executable,"/tmp/fourbit_loops.py","/tmp/fourbit_ring.sass"],capture_output=True,text=True).stdout)
