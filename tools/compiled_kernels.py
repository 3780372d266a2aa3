"""Compiles all kernels for all targets, and writes what the compiler says.

It writes tests/compiled_reports.csv, in which tests/test_compiles.py looks before it compiles, and book/compiled.csv, which the
page "Compiled" shows. What did not change is not compiled again.
"""

import importlib
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from kernelbook import runtime
from kernelbook.cases import FUNCTIONS
from kernelbook.lab import record
from kernelbook.lab.compiled import REPORT_COLUMNS, CompiledKernel, compile_each, occupancy, read_reports

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "book" / "compiled.csv"
REPORTS = ROOT / "tests" / "compiled_reports.csv"

# What is launched beside the rooms' own functions (see their cases.py), on CPU tensors that are never touched.
CALLS = {
    "distributed": """
import torch, kernelbook
from types import SimpleNamespace
from kernelbook.distributed import exchange, windows
def shared(hidden, slots, dtype, gates_dtype):
    x, gates = torch.empty(64, hidden, dtype=dtype), torch.empty(64, slots, dtype=gates_dtype)
    ids, addresses = torch.zeros(64, slots, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    view = lambda window, at, shape, dtype: torch.empty(shape, dtype=dtype)
    space = SimpleNamespace(rank=2, ranks=4, addresses=(addresses, addresses), ensure=lambda size: None, view=view, max_tokens_over_ranks=int)
    way = windows._WindowDispatchPlan(space, ids, 128, 32)
    layout = way.layout(x, gates)
    way.places, _ = exchange._place(ids, 128, 32, 4, None, addresses, 2, layout.capacity)
    windows._put(way, layout, x, gates)
    rows, weights, _ = windows._take(way, layout, x, gates)
    windows._give(way, layout, rows, None)
    windows._give(way, layout, rows, weights)
    windows._put(way, layout, x, None)
    windows._take(way, layout, x, None)
def there_and_back(hidden, slots, dtype, gates_dtype):
    x, gates = torch.empty(64, hidden, dtype=dtype), torch.empty(64, slots, dtype=gates_dtype)
    ids, counts = torch.zeros(64, slots, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int32)
    places, firsts = exchange._place(ids, 128, 32, 4, counts)
    message = exchange._Message.empty(96, x, gates)
    exchange._send(message, x, gates, ids, places, firsts, counts, 128, 32)
    pairs, weights, _, of_slots = exchange._arrive(message, counts, 256)
    exchange._combine(pairs, of_slots, torch.empty(96, hidden, dtype=dtype))
    exchange._combine(pairs, of_slots, message.rows, weights, message.weights)
    exchange._combine(message.rows, places, torch.empty_like(x), message.weights, gates, ids, 32, 128)
    exchange._spread(x, places, message.rows)
there_and_back(2048, 8, torch.bfloat16, torch.float32)
there_and_back(5120, 1, torch.bfloat16, torch.bfloat16)
there_and_back(100, 6, torch.float32, torch.float32)
there_and_back(64, 2, torch.float64, torch.float64)
shared(2048, 8, torch.bfloat16, torch.float32)
shared(100, 1, torch.float32, torch.bfloat16)
""",
    "nn": """
import torch, kernelbook
from kernelbook.nn.swiglu import ClampedSwiGLU, swiglu
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    for inner in (768, 77):
        h = torch.empty(64, 2 * inner, dtype=dtype, requires_grad=True)
        for activation in (swiglu, ClampedSwiGLU()):
            activation(h).backward(torch.empty(64, inner, dtype=dtype))
from kernelbook.interop import rotary
for dtype in (torch.bfloat16, torch.float32):
    q, k = (torch.empty(2, 8, heads, 128, dtype=dtype, requires_grad=True).transpose(1, 2) for heads in (32, 4))
    tables = torch.empty(2, 1, 8, 128, dtype=dtype)
    torch.autograd.backward(rotary.rotate(q, k, *tables), (torch.empty_like(q), torch.empty_like(k)))
from kernelbook.nn import linear
with kernelbook.same_bits():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for n, k in ((4096, 2048), (32768, 2048), (1008, 2000)):
            x, w, b = torch.empty(64, k, dtype=dtype, requires_grad=True), *(torch.empty(s, dtype=dtype) for s in ((n, k), n))
            linear(x, w, b).backward(torch.empty(64, n, dtype=dtype))
""",
    "train": """
import torch, kernelbook
from kernelbook import train
for counts in ((96, 32, 128, 32), (4096,)):
    layout = train.Layout.of_fraction(counts, 0.1)
    for name in ("random", "ema_topk", "knn"):
        train.make_scheduler(name, layout).select()
rows = torch.arange(64)
for inactive in ("skip", "decay"):
    for shape in ((8192, 2048), (2048,), (96, 40)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        adam = train.ChunkAdamW([weight], inactive=inactive, chunk_size=32)
        weight.grad = torch.zeros(shape)
        adam.step()
        weight.grad = torch.sparse_coo_tensor(rows[None], torch.zeros(64, *shape[1:]), shape, check_invariants=True)
        adam.step()
""",
}
# What the page of compiled kernels states of it: the call in words and in code.
STATED = {
    "ChunkAdamW, 8,192 x 2,048, float32": """
import torch, kernelbook
from kernelbook import train
weight = torch.nn.Parameter(torch.zeros(8192, 2048))
adam = train.ChunkAdamW([weight], chunk_size=32)
weight.grad = torch.zeros(8192, 2048)
adam.step()
""",
}
OF_ROOMS = {room: importlib.import_module(f"kernelbook.{room}.cases").STATED for room in FUNCTIONS if room != "packed"}
ROOMS = sorted([*CALLS, *OF_ROOMS])
# Targets that share their settings: most, the one with every configuration, and the one in float16.
ALIKE = (tuple(target for target in runtime.TARGETS if target not in ("sm_90", "sm_75")), ("sm_90",), ("sm_75",))


def code_of(room: str, target: str, stated: str = "") -> str:
    """All calls of a room, or those that the page states in these words, as they are made on a target of one of :data:`ALIKE`."""
    if room not in CALLS:
        return f"from kernelbook.cases import compile_calls\ncompile_calls({room!r}, {target!r}, {stated!r})"
    code = STATED[stated] if stated else "\n".join([CALLS[room], *(STATED.values() if room == "train" else ())])
    return code.replace("torch.bfloat16", "torch.float16") if target == "sm_75" else code


def compiled(rooms: Sequence[str], targets: tuple[str, ...]) -> dict[str, list[CompiledKernel]]:
    """By room the reports of all its calls for targets of one of :data:`ALIKE`."""
    codes = [code_of(room, targets[0]) for room in rooms]
    return dict(zip(rooms, compile_each(codes, targets, reports=REPORTS, timeout_s=3000.0), strict=True))


def _row(room: str, call: str, kernel: CompiledKernel) -> dict[str, Any]:
    nvidia = kernel.target.startswith("sm_")
    properties = runtime.TARGETS[kernel.target]
    fits = occupancy(kernel.registers, kernel.shared_bytes, kernel.num_warps, properties) if nvidia else None
    tiles = " ".join(f"{name}={value}" for name, value in kernel.constants.items() if name in TILES)
    row = {"room": room, "call": call, "kernel": kernel.name, "target": kernel.target, "tiles": tiles}
    figures = ("num_warps", "num_stages", "registers", "spill_bytes", "shared_bytes")
    row |= {name: getattr(kernel, name) for name in figures}
    row["num_stages"] = kernel.constants.get("STAGES", kernel.num_stages)
    return row | {"programs": fits.programs if fits else "", "limit": fits.limit if fits else ""}


TILES = (
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "BLOCK_R", "BLOCK_L", "BLOCK_C", "BLOCK_P", "BLOCK_Q", "BLOCK_S", "BLOCK_G",
    "BLOCK_W", "BLOCK", "BLOCK_E", "NUM_BLOCKS", "SHARES", "NUM_SPLITS", "SPLIT", "UNROLL", "ROWS", "WARPGROUPS",
)  # fmt: skip


def table(reports: Path, targets: Sequence[str] = tuple(runtime.TARGETS)) -> pd.DataFrame:
    """The table of the page: what users get at the stated sizes."""
    of_rooms = OF_ROOMS | {"train": STATED}
    stated = [(room, call) for room in sorted(of_rooms) for call in of_rooms[room]]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {call: [] for call in stated}
    both = [name for name in targets if name != "sm_75"], [name for name in targets if name == "sm_75"]
    for alike in filter(None, both):
        codes = [code_of(room, alike[0], call) for room, call in stated]
        for call, kernels in zip(stated, compile_each(codes, alike, reports=reports, timeout_s=3000.0)):
            rows[call] += [_row(*call, kernel) for kernel in kernels]
    return pd.DataFrame(itertools.chain.from_iterable(rows.values()))


def write_reports(kernels: Sequence[Any]) -> None:
    """Writes the reports of ``kernels``, and no others, in an order that does not change from one machine to the next."""
    rows = {kernel.key: [str(getattr(kernel, name)) for name in REPORT_COLUMNS] for kernel in kernels if kernel.key}
    table = pd.DataFrame(rows.values(), columns=list(REPORT_COLUMNS)).sort_values(["name", "target", "key"])
    record.replace_file(REPORTS, table.to_csv(index=False, lineterminator="\n"))


def main() -> None:
    """Writes both files."""
    jobs = itertools.product([[room] for room in ROOMS], ALIKE)
    kernels: list[CompiledKernel] = []
    before = [SimpleNamespace(**row) for row in read_reports(REPORTS).values()]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for job in as_completed([pool.submit(compiled, *job) for job in jobs]):
            kernels += [kernel for of_room in job.result().values() for kernel in of_room]
            write_reports([*before, *kernels])  # so that a run that is stopped loses nothing
            print(f"{len(kernels)} kernels", flush=True)
    write_reports(kernels)
    table(REPORTS).to_csv(TABLE, index=False, lineterminator="\n")
    print(f"{len(kernels)} kernels, {sum(not kernel.stored for kernel in kernels)} of them compiled anew")


if __name__ == "__main__":
    main()
