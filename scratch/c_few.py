from comp import *
import few, subprocess
sig=dict(routing_ptr="*i32", tiles_at="i32", expert_ptr="*i64", expert="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32",bias_ptr="*bf16",stride_ce="i32",stride_cn="i32",y_ptr="*bf16", E="i32",M="i32",N="i32",K="i32",slots="i32")
for a in sys.argv[1:]:
    TOK,ROWS,G,W,LUT,STAY=eval(a)
    c,s=comp(few._few_rows_kernel, sig, dict(X_GROUPED=False,Y_GROUPED=False,EVEN=True,HAS_BIAS=False,BLOCK_SIZE=64,SCALE="float32",NESTED_BLOCK=256,TOKENS=TOK,ROWS=ROWS,GROUPS=G,WARPS=W,PARTS=1,LUT=LUT,STAY=STAY), W, ("stride_xm","N","K"))
    open(f"/tmp/fourbit_f.sass","w").write(s)
    print(subprocess.run([sys.executable,"/tmp/fourbit_loops.py","/tmp/fourbit_f.sass"],capture_output=True,text=True).stdout)
