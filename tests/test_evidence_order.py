"""What compute-sanitizer's racecheck reports in the Hopper attention kernels is in order, by what was compiled.

It reports two kinds of pairs. Lines of a kernel's definition stand for the compiler's own code, which hands each warp its part of
the program, and the parts their arguments, through shared memory: every such store is followed by a barrier of all warps before
anything else happens to shared memory, every such load comes right behind one and is followed by the next. And what one warpgroup
leaves for another lies between mbarriers: whoever arrives there does so after its warps have met, so that all of them have stored
or loaded by then. racecheck reports programs of a few lines that do just that and nothing else.
"""

import inspect
import re

import pytest

from kernelbook.attention import kernels_hopper
from kernelbook.lab.compiled import compile_calls

STEP = """
import torch, kernelbook as kb
q, k, v = (torch.empty(4, 16, 2048, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o = kb.flash_attention(q, k, v, causal=True)
o.backward(torch.empty_like(o))
q, k, v = (torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o = kb.flash_attention(q, k, v, causal=True)
o.backward(torch.empty_like(o))
q, k, v = (torch.empty(4, 16, 2048, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o = kb.flash_attention(q, k, v, causal=True)
o.backward(torch.empty_like(o))
q, k, v = (torch.empty(4, 16, 2048, 256, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
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


@pytest.fixture(scope="module")
def kernels() -> list[tuple[str, str]]:
    """Names and PTX."""
    found = [(k.name, k.asm["ptx"]) for k in compile_calls(STEP, asm=("ptx",)) if "hopper" in k.name]
    assert len(found) >= 6 and len({name for name, _ in found}) == 3
    return found


def test_what_the_compiler_shares_is_behind_barriers(kernels: list[tuple[str, str]]) -> None:
    lines = inspect.getsource(kernels_hopper).splitlines()
    for name, ptx in kernels:
        line = next(i for i, text in enumerate(lines, 1) if text.startswith(f"def {name}("))
        order = handshakes(ptx, line)
        assert "st" in order and "ld" in order, (name, order)
        for kind in ("st", "ld"):
            for i, what in enumerate(order):
                if what == kind:
                    before = next((w for w in reversed(order[:i]) if w != kind), "barrier")
                    after = next(w for w in order[i:] if w != kind)
                    assert (before, after) == ("barrier", "barrier"), (name, order)


def unmet(ptx: str) -> int:
    """How often a thread arrives at an mbarrier though its warps may still store or load in shared memory."""
    count, busy = 0, False
    for text in ptx.splitlines():
        if re.search(r"\b(st|ld)\.shared", text):
            busy = True
        elif re.search(r"\b(bar|barrier)\.sync\b", text):
            busy = False
        elif re.search(r"\bmbarrier\.arrive\.shared", text):
            count += busy
    return count


def test_warps_have_met_before_one_of_them_arrives(kernels: list[tuple[str, str]]) -> None:
    for name, ptx in kernels:
        assert "mbarrier.arrive.shared" in ptx and unmet(ptx) == 0, name


def test_a_missing_barrier_would_be_seen(kernels: list[tuple[str, str]]) -> None:
    blind = {name for name, ptx in kernels if unmet(re.sub(r"\bbar\.sync", "pass", ptx)) == 0}
    assert not any(name.endswith("bwd_hopper_kernel") for name in blind), (
        blind
    )  # the others leave nothing for each other but by TMA
    ptx = ".loc 1 7\nst.shared.b32 [a], b;\nbarrier.sync \t1;\n.loc 1 8\nld.shared.b32 c, [a];\n.loc 1 7\nld.shared.b32 c, [a];"
    assert handshakes(ptx, 7) == ["st", "barrier", "ld"]
