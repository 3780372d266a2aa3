import re
src=open("/work/wt/fourbit/scratch/trial.py").read()
from comp import *
import one, many, few
ns={}
for name in ("MANY","T4","T8","T16","T32","T64","FEW"):
    m=re.search(rf"^{name} = (\[.*?\])\n(?=def|T|$)", src, re.S|re.M); ns[name]=eval(m.group(1))
s1=dict(expert_ptr="*i64", expert="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32", y_ptr="*bf16", E="i32",M="i32",N="i32",K="i32")
for n in ("T4","T8","T16","T32","T64"):
    for v in ns[n]:
        TOK,SPLIT,ROWS,G,W,HELD,LUT,STAY=v[:8]
        try: comp(one._one_kernel, s1, dict(expert_ptr=None,EVEN=True,BLOCK_SIZE=64,SCALE="float32",NESTED_BLOCK=256,TOKENS=TOK,SPLIT=SPLIT,ROWS=ROWS,GROUPS=G,WARPS=W,HELD=bool(HELD),LUT=bool(LUT),STAY=bool(STAY)), W, ("stride_xm","N","K"))
        except Exception as e: print("FAIL", v, str(e)[:500])
