"""What compute-sanitizer's racecheck reports in the Hopper attention kernels is in order, by what was compiled.

It reports two kinds of pairs. Lines of a kernel's definition stand for the compiler's own code, which hands each warp its part of
the program, and the parts their arguments, through shared memory: every such store is followed by a barrier of all warps before
anything else happens to shared memory, every such load comes right behind one and is followed by the next. And what one warpgroup
leaves for another lies between mbarriers: whoever arrives there does so after its warps have met, so that all of them have stored
or loaded by then. racecheck reports programs of a few lines that do just that and nothing else.
"""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
from programs import program

from kernelbook.attention import kernels_hopper
from kernelbook.lab.compiled import compile_calls

STEP = """
import torch, kernelbook as kb
for n, d in ((2048, 128), (4096, 128), (2048, 64), (2048, 256)):
    q, k, v = (torch.empty(4, 16, n, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
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
    for name, ptx in kernels:  # the others leave nothing for each other but by TMA
        assert not name.endswith("bwd_hopper_kernel") or unmet(re.sub(r"\bbar\.sync", "pass", ptx)), name
    ptx = ".loc 1 7\nst.shared.b32 [a], b;\nbarrier.sync \t1;\n.loc 1 8\nld.shared.b32 c, [a];\n.loc 1 7\nld.shared.b32 c, [a];"
    assert handshakes(ptx, 7) == ["st", "barrier", "ld"]


LOG = """call: {"item": "train:0", "room": "train", "name": "random"}
ended: {"end": "well", "launched": ["_top_chunks_kernel"]}
call: {"item": "train:1", "room": "train", "name": "knn"}
========= Error: Race reported between Write access at _top_chunks_kernel+0x1230 in kernels.py:55
=========     and Read access at _top_chunks_kernel+0x1330 in kernels.py:57 [16 hazards]
========= Invalid __global__ read of size 4 bytes
=========     at void elementwise_kernel<4>(int)+0x30
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
ended: {"end": "we"""


def test_a_sanitizers_log_names_kernels_and_calls_that_never_ended(tmp_path: Path) -> None:
    sanitize = program("evidence/sanitize")
    (tmp_path / "log").write_text(LOG)
    found = sanitize.of_tool("racecheck", [tmp_path / "log"], Counter(train=3))["train racecheck"]
    assert (found["calls"], found["clean"], found["tool died in"]) == (2, False, ["knn"])
    assert found["kernels"] == [("_top_chunks_kernel", 1)] and "kernels.py:57" in found["reports"][0][0]
    # One in Gluon, and one whose decorator has arguments.
    assert {"_flash_attention_fwd_hopper_kernel", "_top_chunks_kernel"} <= sanitize.every_kernel()
