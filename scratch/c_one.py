from comp import *
import one
sig=dict(expert_ptr="*i64", expert="i32", x_ptr="*bf16", stride_xm="i32", packed_ptr="*i32", absmax_ptr="*fp32", nested_absmax_ptr="*fp32", nested_code_ptr="*fp32", nested_offset_ptr="*fp32", code_ptr="*fp32", y_ptr="*bf16", E="i32",M="i32",N="i32",K="i32")
for TOK,SPLIT,ROWS,GROUPS,W,HELD,LUT,EVEN in [eval(a) for a in sys.argv[1:]]:
    c,s=comp(one._one_kernel, sig, dict(expert_ptr=None,EVEN=EVEN,BLOCK_SIZE=64,SCALE="float32",NESTED_BLOCK=256,TOKENS=TOK,SPLIT=SPLIT,ROWS=ROWS,GROUPS=GROUPS,WARPS=W,HELD=HELD,LUT=LUT,STAY=True), W, ("stride_xm","N","K"))
    open(f"/tmp/fourbit_one_{TOK}_{SPLIT}_{ROWS}_{GROUPS}_{W}_{HELD}_{LUT}.sass","w").write(s)
    print(hist(s).most_common(30))

    import re
    lines=[l for l in s.splitlines() if re.search(r'/\*[0-9a-f]{4}\*/',l)]
    seq=[]
    for l in lines:
        m=re.search(r"\s([A-Z][A-Z0-9_.]*)", l.split("*/",1)[1])
        op=re.search(r"(LDG|LDS|HMMA|BAR|BRA|LDGSTS|WARPSYNC|STS|LDL|STL|HGMMA)", l.split("*/",1)[1].split("/*")[0])
        if op:
            o=op.group(1)
            if seq and seq[-1][0]==o: seq[-1][1]+=1
            else: seq.append([o,1])
    print(" ".join(f"{o}{n}" for o,n in seq))
