"""Records when producer and consumers of the last kernel of the chapter on Gluon wait and work, by the SM's clock, on a Hopper GPU.

A copy of the kernel stores the clock around each wait and each product. One program's spans, of some steps around the end of
its first tile, go to book/results/<gpu>/gluon_timeline.csv: partition, step, what, and the cycles at which it begins and ends.
"""

import argparse
import sys
from typing import Any

import instrument_gluon
import pandas as pd
import torch

from kernelbook import runtime
from kernelbook.lab import record

SIZE, STAMPS, MOST = 8192, 6, 192  # of the matrices; clocks a step; steps that are kept of each partition
STEPS = range(96, 161)  # a tile has 128

HEAD = '''
@gluon.jit
def _stamp(clocks, step, number: gl.constexpr):
    """Stores the clock, of the first steps."""
    if step < MOST:
        now = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(clocks + step * STAMPS + number, now)


'''
# What is replaced, and by what.
CHANGES = (
    ("@gluon.jit\ndef _produce(", f"{HEAD}@gluon.jit\ndef _produce(clocks, "),
    ("            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)\n", "            _stamp(clocks, count, 0)\n{}            _stamp(clocks, count, 1)\n"),
    ("b_smem.index(slot))\n            count += 1", "b_smem.index(slot))\n            _stamp(clocks, count, 2)\n            count += 1"),
    ("def _consume(", "def _consume(clocks, "),
    ("            mbarrier.wait(full.index(slot), (count // STAGES) & 1)\n", "            _stamp(clocks, count, 0)\n{}            _stamp(clocks, count, 1)\n"),
    ("            acc = warpgroup_mma_wait(1, deps=[acc])\n            if", "            _stamp(clocks, count, 2)\n            acc = warpgroup_mma_wait(1, deps=[acc])\n            _stamp(clocks, count, 3)\n            if"),
    ("        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier", "        acc = warpgroup_mma_wait(0, deps=[acc])\n        _stamp(clocks, count - 1, 4)\n        mbarrier"),
    ("column], c_smem.index(W))\n", "{}        _stamp(clocks, count - 1, 5)\n"),
    ("def _matmul_specialized_kernel(\n", "{}    clocks_ptr,\n"),
    ("    gl.warp_specialize(", "    clocks = clocks_ptr + gl.program_id(0) * 3 * MOST * STAMPS\n    gl.warp_specialize("),
    ("(_consume, (c_desc, a_smem, b_smem, c_smem, full, empty, M, N, K, 0", "(_consume, (clocks, c_desc, a_smem, b_smem, c_smem, full, empty, M, N, K, 0"),
    ("(_consume, (c_desc, a_smem, b_smem, c_smem, full, empty, M, N, K, 1", "(_consume, (clocks + MOST * STAMPS, c_desc, a_smem, b_smem, c_smem, full, empty, M, N, K, 1"),
    ("(_produce, (a_desc", "(_produce, (clocks + 2 * MOST * STAMPS, a_desc"),
    ("kernel[(min(tiles, programs or tiles),)](*", "kernel[(min(tiles, programs or tiles),)](CLOCKS, *"),
)  # fmt: skip
SPANS = {
    "consumer": {"wait for full": (0, 1), "start the product": (1, 2), "wait for the product before": (2, 3), "store the result": (4, 5)},
    "producer": {"wait for empty": (0, 1), "start the copies": (1, 2)},
}  # fmt: skip


def stamped() -> Any:
    """The page's kernels, in a module in which the last one keeps clocks."""
    source = instrument_gluon.source_of_page()
    at = source.index(CHANGES[0][0])
    head, text = source[:at], source[at:]
    for old, new in CHANGES:
        if text.count(old) < 1:
            raise ValueError(f"stamped: the chapter has no line {old!r}")
        text = text.replace(old, new.replace("{}", old), 1)
    text = text.replace("MOST", str(MOST)).replace("STAMPS", str(STAMPS))  # a kernel reads no number of Python's
    return instrument_gluon.module_of(head + text, "gluon_page_stamped")


def spans(clocks: torch.Tensor, steps: range) -> pd.DataFrame:
    """Of clocks (3, MOST, STAMPS) of one program, zero where nothing was stored."""
    rows = []
    for number, partition in enumerate(("consumer 0", "consumer 1", "producer")):
        for step in steps:
            for what, (begin, end) in SPANS[partition.split()[0]].items():
                first, last = (int(clocks[number, step, n]) for n in (begin, end))
                if first and last:
                    rows.append((partition, step, what, first, last))
    return pd.DataFrame(rows, columns=["partition", "step", "what", "begin", "end"])


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    page = stamped()
    a, b = (torch.randn(SIZE, SIZE, device=runtime.DEVICE, dtype=torch.float16) for _ in range(2))
    programs = runtime.properties().num_sms
    page.CLOCKS = torch.zeros(programs, 3, MOST, STAMPS, dtype=torch.int64, device=runtime.DEVICE)
    for _ in range(3):  # the last one counts
        c = page.specialized(a, b, programs=programs, kernel=page._matmul_specialized_kernel)
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=1.0)
    table = spans(page.CLOCKS[programs // 2].cpu(), STEPS)
    path = record.results_dir() / record.device_slug() / "gluon_timeline.csv"
    table.to_csv(path, index=False, lineterminator="\n")
    cycles = (table["end"] - table["begin"]).groupby([table["partition"], table["what"]]).median()
    print(cycles.to_string(), f"\n{len(table)} spans in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
