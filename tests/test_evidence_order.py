"""What compute-sanitizer's racecheck reports at the definitions of the Hopper attention kernels is in order.

Lines of a definition stand for code that is the compiler's own. There it hands each warp its part of the program, and the
parts their arguments, through shared memory. Every such store is followed by a barrier of all warps before anything else
happens to shared memory, every such load comes right behind one and is followed by the next. Why the sanitizer reports them
all the same is inferred, not read here: warps reach these barriers (``barrier.sync 1``) at different places of the program
(``tools/evidence/handshake.py`` asks the sanitizer about a program that does nothing else).
"""

import inspect
import re

from kernelbook.attention import kernels_hopper
from kernelbook.compiled import compile_calls

STEP = """
import torch, kernelbook as kb
q, k, v = (torch.empty(4, 16, 2048, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o = kb.flash_attention(q, k, v, causal=True)
o.backward(torch.empty_like(o))
"""


def handshakes(ptx: str, line: int) -> list[str]:
    """The accesses to shared memory and the barriers of all warps that belong to ``line``, in their order."""
    found, at = [], 0
    for text in ptx.splitlines():
        if location := re.match(r"\s*\.loc\s+\d+\s+(\d+)", text):
            at = int(location[1])
        elif at == line and (access := re.search(r"\b(st|ld)\.shared|barrier\.sync\s+1;", text)):
            found.append(access[1] or "barrier")
    return found


def test_what_the_compiler_shares_is_behind_barriers() -> None:
    lines = inspect.getsource(kernels_hopper).splitlines()
    kernels = {k.name: k.asm["ptx"] for k in compile_calls(STEP, asm=("ptx",)) if "hopper" in k.name}
    assert len(kernels) == 3
    for name, ptx in kernels.items():
        line = next(i for i, text in enumerate(lines, 1) if text.startswith(f"def {name}("))
        order = handshakes(ptx, line)
        assert "st" in order and "ld" in order, (name, order)
        for kind in ("st", "ld"):
            for i, what in enumerate(order):
                if what == kind:
                    before = next((w for w in reversed(order[:i]) if w != kind), "barrier")
                    after = next(w for w in order[i:] if w != kind)
                    assert (before, after) == ("barrier", "barrier"), (name, order)


def test_a_missing_barrier_would_be_seen() -> None:
    ptx = ".loc 1 7\nst.shared.b32 [a], b;\nbarrier.sync \t1;\n.loc 1 8\nld.shared.b32 c, [a];\n.loc 1 7\nld.shared.b32 c, [a];"
    assert handshakes(ptx, 7) == ["st", "barrier", "ld"]
