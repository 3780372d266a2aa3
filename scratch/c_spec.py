from comp import *
import spec, subprocess
sig=dict(routing_ptr="*i32", tiles_at="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32", y_ptr="*bf16", E="i32",N="i32",K="i32",slots="i32",num_m="i32")
for a in sys.argv[1:]:
    TOK,OUT,DEPTH,ST,W,BYR,R,RP=eval(a)
    c,s=comp(spec._spec_kernel, sig, dict(X_GROUPED=False,Y_GROUPED=False,BY_ROW=BYR,BLOCK_SIZE=64,SCALE="float32",NESTED_BLOCK=256,TOKENS=TOK,OUT=OUT,DEPTH=DEPTH,STAGES=ST,WARPS=W,GROUP=8,REGS=R,REGS_P=RP), 4, ("stride_xm","N","K"))
    open(f"/tmp/fourbit_spec.sass","w").write(s); open(f"/tmp/fourbit_spec.ttgir","w").write(c.asm["ttgir"])
    print(subprocess.run([sys.executable,"/tmp/fourbit_loops.py","/tmp/fourbit_spec.sass"],capture_output=True,text=True).stdout)
