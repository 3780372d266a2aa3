"""Records when producer and consumers wait and work, by the SM's clock, on a Hopper GPU: of the last kernel of the chapter on
Gluon, and of attention's forward pass.

A copy of the kernel stores the clock around each wait and each product. One program's spans, of some steps in the middle, go to
book/results/<gpu>/gluon_timeline.csv and attention_timeline.csv: partition, step, what, and the cycles at which it begins and ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import instrument_gluon
import pandas as pd
import torch

from kernelbook import launch, runtime
from kernelbook.attention import flash_attention, kernels_hopper
from kernelbook.lab import record

SIZE, STAMPS, MOST = 8192, 7, 192  # of the matrices; clocks a step; steps that are kept of each partition
STEPS = range(96, 161)  # a tile has 128
ATTENTION = (4, 16, 4096, 128)  # not causal: 32 tiles of keys a block of queries
ATTENTION_STEPS = range(5, 31)

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
ATTENTION_CHANGES = (
    ("@gluon.jit\ndef _step(\n    i,", f"{HEAD}@gluon.jit\ndef _step(\n    clocks, i,"),
    ("    slot = _await(k, before + i)\n    # The first", "    _stamp(clocks, before + i, 0)\n    slot = _await(k, before + i)\n    _stamp(clocks, before + i, 1)\n    # The first"),
    ("    scores = _scores(q, q_rest, k, slot, W, REST)\n    slot_v", "    _stamp(clocks, before + i, 2)\n{}"),
    ("    scores = warpgroup_mma_wait(PRODUCTS, deps=[scores])\n", "    _stamp(clocks, before + i, 3)\n{}    _stamp(clocks, before + i, 4)\n"),
    ("    slot_v = _await(v, before + i - 1)\n    if REST", "    _stamp(clocks, before + i, 5)\n{}"),
    ("    mbarrier.arrive(v.free.index(slot_v))\n    return", "    _stamp(clocks, before + i, 6)\n{}"),
    ("def _consume(", "def _consume(clocks, "),
    ("left = _step(i,", "left = _step(clocks, i,"),
    ("left = _step(i,", "left = _step(clocks, i,"),
    ("def _flash_attention_fwd_hopper_kernel(\n", "{}    clocks_ptr,\n"),
    ("    if WARPGROUPS == 2:\n        gl.warp_specialize(", "    clocks = clocks_ptr + gl.program_id(0) * 3 * MOST * STAMPS\n{}"),
    ("(consumer, OVERLAP, CAUSAL, REST, 0)", "(clocks, consumer, OVERLAP, CAUSAL, REST, 0)"),
    ("(consumer, OVERLAP, CAUSAL, REST, 1)", "(clocks + MOST * STAMPS, consumer, OVERLAP, CAUSAL, REST, 1)"),
)  # fmt: skip
SPANS = {
    "consumer": {"wait for full": (0, 1), "start the product": (1, 2), "wait for the product before": (2, 3), "store the result": (4, 5)},
    "producer": {"wait for empty": (0, 1), "start the copies": (1, 2)},
}  # fmt: skip
ATTENTION_SPANS = {
    "consumer": {
        "wait for keys": (0, 1), "wait for its turn": (1, 2), "start the products": (2, 3), "wait for the scores": (3, 4),
        "softmax": (4, 5), "wait for the product with the values": (5, 6),
    }
}  # fmt: skip


def stamped(source: str, changes: Sequence[tuple[str, str]], name: str) -> Any:
    """Kernels in a module in which one keeps clocks: for each change, what is replaced first from the first change on, and by what."""
    at = source.index(changes[0][0])
    head, text = source[:at], source[at:]
    for old, new in changes:
        if text.count(old) < 1:
            raise ValueError(f"stamped: the kernels have no line {old!r}")
        text = text.replace(old, new.replace("{}", old), 1)
    text = text.replace("MOST", str(MOST)).replace("STAMPS", str(STAMPS))  # a kernel reads no number of Python's
    return instrument_gluon.module_of(head + text, name)


def spans(clocks: torch.Tensor, steps: range, named: dict[str, dict[str, tuple[int, int]]]) -> pd.DataFrame:
    """Of clocks (3, MOST, STAMPS) of one program, zero where nothing was stored."""
    rows = []
    for number, partition in enumerate(("consumer 0", "consumer 1", "producer")):
        for step in steps:
            for what, (begin, end) in named.get(partition.split()[0], {}).items():
                first, last = (int(clocks[number, step, n]) for n in (begin, end))
                if first and last:
                    rows.append((partition, step, what, first, last))
    return pd.DataFrame(rows, columns=["partition", "step", "what", "begin", "end"])


def clocks_of(programs: int) -> torch.Tensor:
    return torch.zeros(programs, 3, MOST, STAMPS, dtype=torch.int64, device=runtime.DEVICE)


def matmul_spans() -> pd.DataFrame:
    page = stamped(instrument_gluon.source_of_page(), CHANGES, "gluon_page_stamped")
    a, b = (torch.randn(SIZE, SIZE, device=runtime.DEVICE, dtype=torch.float16) for _ in range(2))
    programs = runtime.properties().num_sms
    page.CLOCKS = clocks_of(programs)
    for _ in range(3):  # the last one counts
        c = page.specialized(a, b, programs=programs, kernel=page._matmul_specialized_kernel)
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=1.0)
    return spans(page.CLOCKS[programs // 2].cpu(), STEPS, SPANS)


def attention_spans() -> pd.DataFrame:
    name = "_flash_attention_fwd_hopper_kernel"
    kernel = getattr(stamped(Path(kernels_hopper.__file__).read_text(), ATTENTION_CHANGES, "attention_stamped"), name)
    q, k, v = torch.randn(3, *ATTENTION, device=runtime.DEVICE, dtype=torch.bfloat16)
    expected, clocks = flash_attention(q, k, v), clocks_of(4 * 16 * 4096 // 64)

    def launched(self: Any, grid: tuple[int, ...], *args: Any) -> None:
        if self.kernel.fn.__name__ != name:
            raise ValueError(f"attention_spans: one kernel is launched, got {self.kernel.fn.__name__}")
        constants = {**launch.OPTIONS, **self.constants}
        kernel[grid](clocks, *map(launch._for_triton, args), **constants)

    with mock.patch.object(launch.Launch, "__call__", launched):
        for _ in range(3):
            found = flash_attention(q, k, v)
    assert torch.equal(found, expected)
    return spans(clocks[runtime.properties().num_sms // 2].cpu(), ATTENTION_STEPS, ATTENTION_SPANS)


def main() -> None:
    for stem, measured in (("gluon", matmul_spans), ("attention", attention_spans)):
        table = measured().assign(**record.environment(f"{stem}_timeline"))
        path = record.results_dir() / record.device_slug() / f"{stem}_timeline.csv"
        table.to_csv(path, index=False, lineterminator="\n")
        cycles = (table["end"] - table["begin"]).groupby([table["partition"], table["what"]]).median()
        print(cycles.to_string(), f"\n{len(table)} spans in {path}")


if __name__ == "__main__":
    main()
