from comp import *
import importlib
mod=importlib.import_module(sys.argv[1]); kh=mod
sig=dict(routing_ptr="*i32", tiles_at="i32", expert_ptr="*i64", expert="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32", b_ptr="*bf16",stride_be="i32",stride_bn="i32",stride_br="i32",u_ptr="*bf16",bias_ptr="*bf16",stride_ce="i32",stride_cn="i32",y_ptr="*bf16", E="i32",M="i32",N="i32",K="i32",slots="i32",num_m="i32")
for a in sys.argv[2:]:
    TOK,SM,OUT,DEPTH,ST,AH,W,BYR,RK,SC,more = eval(a)
    sig["absmax_ptr"]="*u8" if SC=="nested" else "*fp32"
    opts={}
    if "maxnreg" in more: opts["maxnreg"]=more.pop("maxnreg")
    c,s=comp(kh._many_rows_kernel, dict(sig), dict(X_GROUPED=False,Y_GROUPED=False,BY_ROW=BYR,BLOCK_SIZE=64,SCALE=SC,NESTED_BLOCK=256,TOKENS=TOK,HALVES=SM,r=RK,RANK=RK,HAS_BIAS=RK>0,OUT=OUT,DEPTH=DEPTH,STAGES=ST,AHEAD=AH,WARPS=W,GROUP=8,**more), W, ("stride_xm","N","K"),**opts)
    open(f"/tmp/fourbit_many.sass","w").write(s)
    import subprocess; print(subprocess.run([sys.executable,"/tmp/fourbit_loops.py","/tmp/fourbit_many.sass"],capture_output=True,text=True).stdout)
