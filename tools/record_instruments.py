"""Records what the instruments of the chapters show: our kernels, run by Triton's interpreter, with every access watched.

Each is written to book/_static/instruments/<name>.json.

Kernels come from the notebooks themselves, or from the package. What programs that run at the same time do to one another
is replayed: the operations and their order within a program are recorded, how two programs interleave is chosen here.

A recording has panels of cells, and runs, one for each setting of the control. A run is a list of frames; a frame sets
cells of panels, ``[panel, first cell, codes, words]``, and says in a note what happens. ``answer`` is the index of the
right choice, and is computed; ``asked`` is the index of the run that the question is about.
"""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import instrument_gluon
import numpy as np
import torch

import kernelbook as kb
from bench import nf4 as nf4_bench
from bench.moe_block import MODELS
from kernelbook import runtime, train
from kernelbook.lab import compiled, record
from kernelbook.launch import Launch
from kernelbook.tiles import merge_shares

# isort: split
import triton
import triton.language as tl
from triton.runtime import interpreter

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "book" / "_static" / "instruments"

Recording = dict[str, Any]


# --- kernels of a notebook, and what they touch -----------------------------------------------------------------------


def from_notebook(stem: str, *names: str) -> ModuleType:
    """A module with these functions and constants of a notebook; of several with one name, the first."""
    found = {name: text for name, text in reversed(instrument_gluon.definitions(stem)) if name in names}
    parts = ["import torch\nimport triton\nimport triton.language as tl", *(found[name] for name in names)]
    return instrument_gluon.module_of("\n\n\n".join(parts) + "\n", f"{stem}_kernels")


@dataclasses.dataclass
class Access:
    """One operation of one program on a tensor, and the elements that it touches."""

    program: tuple[int, int, int]
    kind: str  # load | store | atomic | barrier
    tensor: str
    elements: list[int]


@contextlib.contextmanager
def watch(programs: list[int] | None = None, **tensors: torch.Tensor) -> Iterator[list[Access]]:
    """The accesses to ``tensors`` by the kernels that run inside, in their order.

    Args:
        programs: which program of the first axis runs first, second, ...
    """
    builder = interpreter.interpreter_builder
    seen: list[Access] = []

    def note(kind: str, pointers: Any = None, mask: Any = None) -> None:
        program = tuple(int(i) for i in builder.grid_idx)
        if pointers is None:
            seen.append(Access(program, kind, "", []))
            return
        addresses = np.asarray(pointers.data).astype(np.int64).ravel()
        wanted = True if mask is None else np.broadcast_to(mask.data, pointers.data.shape).ravel()
        for name, tensor in tensors.items():
            places = (addresses - tensor.data_ptr()) // tensor.element_size()
            inside = wanted & (places >= 0) & (places < tensor.numel())
            if inside.any():
                seen.append(Access(program, kind, name, places[inside].tolist()))

    def noted(name: str, kind: str, *arguments: int) -> Callable[..., Any]:
        """An operation that is noted; ``arguments`` are the places of its pointers and its mask."""
        operation = getattr(builder, name)

        def call(*args: Any) -> Any:
            note(kind, *(args[i] for i in arguments))
            return operation(*args)

        return call

    place = builder.set_grid_idx
    with mock.patch.multiple(
        builder,
        create_masked_load=noted("create_masked_load", "load", 0, 1),
        create_masked_store=noted("create_masked_store", "store", 0, 2),
        create_atomic_cas=noted("create_atomic_cas", "atomic", 0),
        create_atomic_rmw=noted("create_atomic_rmw", "atomic", 1, 3),
        create_barrier=noted("create_barrier", "barrier"),
        set_grid_idx=lambda x, y, z: place(programs[x] if programs else x, y, z),
    ):
        yield seen


def cells(name: str, elements: list[int], code: str) -> list[list[Any]]:
    """Changes of single cells, neighbours together."""
    changes: list[list[Any]] = []
    for element in elements:
        if changes and changes[-1][1] + len(changes[-1][2]) == element:
            changes[-1][2] += code
        else:
            changes.append([name, element, code])
    return changes


class Frames(list[dict[str, Any]]):
    """What a run shows, one after the other; at first what there is before anything happens."""

    def __init__(self, note: str, *changes: list[Any]) -> None:
        super().__init__()
        self.show(note, *changes)

    def show(self, note: str, *changes: list[Any]) -> None:
        """What happens, and the cells that it changes."""
        self.append({"set": list(changes), "note": note} if changes else {"note": note})

    def as_run(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The frames by a name of the control, with what a reader is told beside them."""
        return {"name": name, "frames": self, "facts": facts}


def telling(function: Callable[..., Any], note: Callable[[Any], object]) -> Callable[..., Any]:
    """The function; ``note`` is told each result."""

    def call(*args: Any) -> Any:
        result = function(*args)
        note(result)
        return result

    return call


def panel(name: str, label: str, columns: int, rows: int = 1) -> dict[str, Any]:
    return {"name": name, "label": label, "rows": rows, "columns": columns}


# --- the recordings ---------------------------------------------------------------------------------------------------


def first_kernel() -> Recording:
    """Which program of the vector add touches which elements."""
    page = from_notebook("first_kernel", "_add_fwd_kernel")
    n, room = 30, 32
    x, y = torch.arange(2.0 * n).view(2, n)
    runs = []
    for block in (4, 8, 16):
        out = torch.zeros(n)
        programs = triton.cdiv(n, block)
        with watch(x=x, y=y, out=out) as seen:
            page._add_fwd_kernel[(programs,)](x, y, out, n, BLOCK=block)
        frames = Frames(f"{programs} programs, each with a tile of {block}. Nothing is loaded yet.")
        for access in seen:
            what = "loads" if access.kind == "load" else "stores"
            low, high = access.elements[0], access.elements[-1] + 1
            outside = list(range(high, low + block))
            note = f"Program {access.program[0]} {what} {access.tensor}[{low}:{high}]."
            if outside:
                note += f" Its mask keeps it from {len(outside)} more, which do not exist."
            code = "a" if access.kind == "load" else "b"
            frames.show(note, *(cells(access.tensor, access.elements, code) + cells(access.tensor, outside, "x")))
        moved = sum(4 * len(access.elements) for access in seen)
        masked = sum(block - len(access.elements) for access in seen if access.kind == "store")
        facts = {"programs": programs, "bytes read and written": moved, "elements masked off": masked}
        runs.append(frames.as_run(f"BLOCK = {block}", facts))
    moved = {run["facts"]["bytes read and written"] for run in runs}
    assert len(moved) == 1
    return {
        "title": f"A vector of {n} elements, program by program",
        "question": "Tiles of 4, 8 or 16: which moves the fewest bytes?",
        "choices": ["tiles of 4", "tiles of 16", "all the same"],
        "answer": 2,
        "asked": 0,
        "because": f"Every element is loaded once and stored once, {moved.pop()} bytes, whoever does it. What changes is how many programs share the work.",
        "control": "size of a tile",
        "panels": [panel(name, name, room) for name in ("x", "y", "out")],
        "legend": {"a": "loaded", "b": "stored", "x": "masked off: beyond the end"},
        "runs": runs,
    }


Schedule = list[tuple[str, int, int]]  # an operation, the program that does it, and which half of its threads
Cells = list[frozenset[int]]  # the programs whose shares are in each


def interleave(
    frames: Frames,
    schedule: Schedule,
    name: str,
    n: int,
    notes: dict[str, str],
    shown: Callable[[Cells, int], list[Any]],
) -> int:
    """Two programs add their shares to ``n`` cells ``name`` in memory, by the operations of a schedule; a frame for each.

    ``shown``: the codes, and the words if there are any, of cells that a program left. Returns how many lost a share.
    """
    memory: Cells = [frozenset()] * n
    registers = [list(memory), list(memory)]
    for operation, program, half in schedule:
        at, changes = slice(half * n // 2, (half + 1) * n // 2), []
        if operation == "acquire":
            changes = [["lock", 0, "ab"[program], ["1"]]]
        elif operation == "release":
            changes = [["lock", 0, ".", ["0"]]]
        elif operation == "load":
            registers[program][at] = [cell | {program} for cell in memory[at]]
            changes = [[f"p{program}", at.start, *shown(registers[program][at], program)]]
        elif operation in ("store", "atomic"):
            memory[at] = registers[program][at] if operation == "store" else [cell | {program} for cell in memory[at]]
            changes = [[name, at.start, *shown(memory[at], program)]]
        threads, rows = ("the other" if half else "one"), f"rows {at.start} to {at.stop - 1}"
        frames.show(notes[operation].format(p=program, t=threads, rows=rows), *changes)
    return sum(len(cell) < 2 for cell in memory)


def layer_norm() -> Recording:
    """Two programs add their rows under the page's lock; how they interleave is the control."""
    page = from_notebook("layer_norm", "_load_row", "_store_row", "_row_gradient", "_layer_norm_bwd_locks_kernel")
    m, n = 2, 8
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    dy = torch.tensor([[1.0], [2.0]]).expand(m, n).contiguous()
    w, mean, rstd = torch.ones(n), x.mean(1), 1 / x.std(1, unbiased=False)
    dw, db, lock = torch.zeros(1, n), torch.zeros(1, n), torch.zeros(1, dtype=torch.int32)
    with watch(sums=db, lock=lock) as seen:
        page._layer_norm_bwd_locks_kernel[(m,)](
            dy, x, w, mean, rstd, torch.empty_like(x), dw, db, lock, n, BLOCK_N=n, NUM_BUFFERS=1
        )  # fmt: skip
    own = [access for access in seen if access.program[0] == 0]
    assert [access.kind for access in own] == ["atomic", "load", "store", "barrier", "atomic"]
    notes = {
        "acquire": "Program {p} finds 0 in the lock and makes it 1: it owns the sums.",
        "spin": "Program {p} finds 1 in the lock, and asks again.",
        "load": "Program {p}, {t} half of its threads: loads the sums and adds its row, in registers.",
        "store": "Program {p}, {t} half of its threads: stores.",
        "barrier": "Program {p}: all its threads have reached the barrier.",
        "release": "Program {p}, one thread: puts the 0 back.",
    }

    def of(operation: str, program: int) -> Schedule:
        return [(operation, program, 0), (operation, program, 1)]

    def whole(program: int) -> Schedule:
        added = of("load", program) + of("store", program)
        return [("acquire", program, 0), *added, ("barrier", program, 0), ("release", program, 0)]

    def shown(cells: Cells, program: int) -> list[Any]:
        return ["ab"[program] * len(cells), [str(sum(share + 1 for share in cell)) for cell in cells]]

    schedules = {
        "one after the other": whole(0) + whole(1),
        "at once, no lock": of("load", 0) + of("load", 1) + of("store", 0) + of("store", 1),
        "at once, a lock without barrier": [
            *(("acquire", 0, 0), ("spin", 1, 0), ("load", 0, 0), ("load", 0, 1), ("store", 0, 0), ("release", 0, 0)),
            *(("acquire", 1, 0), *of("load", 1), ("store", 0, 1), *of("store", 1), ("release", 1, 0)),
        ],
        "at once, lock and barrier": [
            *(("acquire", 0, 0), ("spin", 1, 0), *of("load", 0), ("spin", 1, 0), *of("store", 0)),
            *(("barrier", 0, 0), ("spin", 1, 0), ("release", 0, 0), *whole(1)),
        ],
    }  # fmt: skip
    runs = []
    for name, schedule in schedules.items():
        frames = Frames(
            "Each program has 1 or 2 to add to every element. Both begin.",
            ["sums", 0, "." * n, ["0"] * n],
            ["lock", 0, ".", ["0"]],
            ["p0", 0, "." * n, [""] * n],
            ["p1", 0, "." * n, [""] * n],
        )
        lost = interleave(frames, schedule, "sums", n, notes, shown)
        runs.append(frames.as_run(name, {"elements that should be 3": n, "of them wrong": lost}))
    wrong = [run["facts"]["of them wrong"] for run in runs]
    assert wrong[0] == wrong[3] == 0 and wrong[1] == n and 0 < wrong[2] < n
    return {
        "title": "Two programs, one row of sums",
        "question": "Both programs run at once. Where is an addition lost?",
        "choices": [
            "only without a lock",
            "without a lock, and without the barrier",
            "nowhere: each program stores all it has",
        ],
        "answer": 1,
        "asked": 2,
        "because": "A lock without the barrier opens while some threads have not stored yet, and loses what they had.",
        "control": "how the two run",
        "panels": [
            panel("lock", "the lock", 1),
            panel("sums", "sums in memory", n),
            panel("p0", "program 0, registers", n),
            panel("p1", "program 1, registers", n),
        ],
        "legend": {"a": "by program 0", "b": "by program 1"},
        "runs": runs,
    }


def attention_online() -> Recording:
    """What the online softmax holds after each tile of keys, for one query."""
    page = from_notebook("attention_forward", "_load_rows", "_store_rows", "_absorb", "_attention_fwd_loop_kernel")
    keys, tile, d = 64, 16, 16
    generator = torch.Generator().manual_seed(3)
    q, v = torch.zeros(1, 16, d), torch.randn(1, keys, d, generator=generator)
    q[0, 0, 0] = 1.0
    scores = torch.randn(keys, generator=generator) * 2
    orders = {
        "as they come": torch.arange(keys),
        "largest first": scores.argsort(descending=True),
        "largest last": scores.argsort(),
    }
    runs = []
    for name, order in orders.items():
        k = torch.zeros(1, keys, d)
        k[0, :, 0] = scores[order] * d**0.5
        o = torch.empty_like(q)
        states: list[Any] = []
        with mock.patch.object(page, "_absorb", telling(page._absorb, states.append)):
            page._attention_fwd_loop_kernel[(1, 1)](
                q, k, v[:, order].contiguous(), o, 16, keys, d**-0.5, D=d, BLOCK_M=16, BLOCK_N=tile, BLOCK_D=d
            )  # fmt: skip
        values = [f"{value:.1f}" for value in scores[order].tolist()]
        frames = Frames(
            "One query, 64 scores, a row for each tile. m = minus infinity, l = 0.", ["scores", 0, "." * keys, values]
        )
        shrinks = 0
        maximum = -np.inf
        for i, state in enumerate(states):
            before, (maximum, total, a) = maximum, (float(part.handle.data.flat[0]) for part in state)
            factor = np.exp(before - maximum)
            shrunk = bool(i > 0 and factor < 1)
            shrinks += shrunk
            seen = [["scores", (i - 1) * tile, "a" * tile]] if i else []
            note = f"After tile {i + 1}: m = {maximum:.2f}, l = {total:.2f}, a / l = {a / total:.3f}."
            if shrunk:
                note += f" The maximum grew: what was summed so far is multiplied by {factor:.3f}."
            elif i:
                note += " The maximum stayed, and the factor is 1."
            frames.show(note, *seen, ["scores", i * tile, "b" * tile])
        whole = float(torch.softmax(scores.double(), 0) @ v[0, :, 0].double())
        facts = {
            "tiles that shrink the sum": shrinks,
            "a / l at the end": f"{a / total:.4f}",
            "softmax of the whole row": f"{whole:.4f}",
        }
        runs.append(frames.as_run(name, facts))
    first = runs[1]["facts"]["tiles that shrink the sum"]
    return {
        "title": "The state of an online softmax",
        "question": "The largest scores come in the first tile. How many of the later tiles make it shrink what was summed so far?",
        "choices": ["none of the other three", "one of them", "all three"],
        "answer": {0: 0, 1: 1, 3: 2}[first],
        "asked": 1,
        "because": "A factor below 1 is needed where the maximum grows. The result is the same in every order.",
        "control": "order of the keys",
        "panels": [panel("scores", "scores, a row a tile", tile, keys // tile)],
        "legend": {"a": "seen", "b": "this tile"},
        "runs": runs,
    }


def attention_causal() -> Recording:
    """Which tiles of keys each program of the causal kernel visits."""
    names = ("_load_rows", "_store_rows", "_absorb", "_key_ranges", "_attend")
    page = from_notebook("attention_forward", *names, "_attention_fwd_masked_kernel", "_attention_fwd_causal_kernel")
    side, d = 16, 16
    runs = []
    settings = {"all tiles, masked": (8, 8, False), "skipped": (8, 8, True), "fewer queries than keys": (4, 8, True)}
    for name, (rows, columns, skip) in settings.items():
        n, s = rows * side, columns * side
        q, k, v = (torch.randn(1, count, d, generator=torch.Generator().manual_seed(0)) for count in (n, s, s))
        with watch(k=k) as seen:
            kernel = page._attention_fwd_causal_kernel if skip else page._attention_fwd_masked_kernel
            how = {"CAUSAL": True, "LONGEST_FIRST": False} if skip else {}
            kernel[(rows, 1)](
                q, k, v, torch.empty_like(q), n, s, d**-0.5, D=d, BLOCK_M=side, BLOCK_N=side, BLOCK_D=d, **how
            )  # fmt: skip
        frames = Frames(
            f"{rows} programs, each with {side} queries: a row of tiles.", ["tiles", 0, "g" * (rows * columns)]
        )
        for access in seen:
            row, column = access.program[0], access.elements[0] // (side * d)
            whole = (column + 1) * side - 1 <= row * side + s - n  # even the first query sees its last key
            nobody = column * side > row * side + side - 1 + s - n
            code = "x" if nobody else "a" if whole else "b"
            what = {"x": "computed for nothing", "a": "all seen", "b": "seen in part, masked"}[code]
            note = f"Program {row}, tile {column} of the keys: {what}."
            frames.show(note, ["tiles", row * columns + column, code])
        facts = {"tiles": rows * columns, "visited": len(seen), "share": f"{len(seen) / (rows * columns):.0%}"}
        runs.append(frames.as_run(name, facts))
    share = runs[1]["facts"]["share"]
    choices = ["13%", "50%", "56%"]
    return {
        "title": "Causal attention, tile by tile",
        "question": "As many keys as queries, eight tiles of each. What share of the tiles does a kernel visit that skips what nobody sees?",
        "choices": choices,
        "answer": choices.index(share),
        "asked": 1,
        "because": "The tiles on the diagonal count whole: a bit more than half. With smaller tiles it comes nearer to half.",
        "control": "what the program does with tiles that nobody sees",
        "panels": [panel("tiles", "queries down, keys across", 8, 8)],
        "legend": {"a": "no mask needed", "b": "masked", "x": "computed for nothing", "g": "never visited"},
        "runs": runs,
    }


def choosing_tiles() -> Recording:
    """How many programs fit an SM, for configurations that are compiled as the page compiles them, and were measured."""
    times = record.load_results("choosing_tiles").query("x == 8192")
    tiles = "BLOCK_R={} BLOCK_D={} BLOCK_K={} num_warps={} num_stages={}"
    wanted = [
        (64, 64, 64, 4, 4),
        (64, 128, 64, 4, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 16, 3),
    ]
    h200, places = runtime.TARGETS["sm_90"], 64
    runs, measured = [], []
    calls = "".join(f"launch('pointers', *{config!r})\n" for config in wanted)
    kernels = compiled.compile_calls(from_notebook("choosing_tiles", "COMPILE").COMPILE + calls)
    for config, kernel in zip(wanted, kernels, strict=True):
        ms = float(times.loc[times["shape"].str.endswith(tiles.format(*config)), "ms"].iloc[0])
        warps, shared = kernel.num_warps, kernel.shared_bytes // 1024
        found = compiled.occupancy(kernel.registers, kernel.shared_bytes, warps, h200)
        takes = f"{kernel.registers} registers a lane in {warps} warps, and {shared} KiB of shared memory"
        frames = Frames(f"A program takes {takes}.", ["warps", 0, "." * places])
        for program in range(found.programs):
            places_of = ["warps", program * warps, "abcdef"[program % 6] * warps]
            frames.show(f"Program {program + 1} finds room.", places_of)
        left = list(range(found.programs * warps, places))
        frames.show(f"No further program: the limit is {found.limit}.", *cells("warps", left, "g"))
        facts = {
            "registers a lane": kernel.registers,
            "shared memory, KiB": shared,
            "programs on an SM": found.programs,
            "occupancy": f"{found.share:.0%}",
            "measured, ms": f"{ms:.3f}",
        }
        name = f"{config[0]} by {config[1]}, {warps} warps"
        measured.append((ms, found.share, name))
        runs.append(frames.as_run(name, facts))
    _, share, fastest = min(measured)
    fullest = max(share for _, share, _ in measured)
    return {
        "title": "Programs on one multiprocessor of an H200",
        "question": "Six tiles for one product. Does the one with the highest occupancy take the least time?",
        "choices": ["yes", "no"],
        "answer": 0 if share == fullest else 1,
        "asked": 4,
        "because": f"The fastest of the six, {fastest}, fills {share:.0%} of the places for warps; the fullest fills {fullest:.0%}.",
        "control": "tile",
        "panels": [panel("warps", "64 places for warps", 16, 4)],
        "legend": {"a": "warps of a program, a colour each", "g": "places that stay empty"},
        "runs": runs,
    }


def nf4() -> Recording:
    """Which bytes, scales and code words two of the page's kernels ask for."""
    page = from_notebook("nf4", "_nf4_dequantize_fwd_simple_kernel", "_nf4_dequantize_fwd_bytes_kernel")
    n, block = 16, 8
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (n,), generator=generator)
    packed = (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)
    book = kb.nf4_quantize(torch.randn(64, 64, generator=generator)).code.float()
    absmax = torch.tensor([1.0, 2.0])
    runs = []
    for name, kernel, lanes in (
        ("one element at a time", page._nf4_dequantize_fwd_simple_kernel, n),
        ("a byte once", page._nf4_dequantize_fwd_bytes_kernel, n // 2),
    ):
        out = torch.zeros(n)
        with watch(packed=packed, absmax=absmax, code=book, out=out) as seen:
            kernel[(1,)](packed, absmax, book, out, n, BLOCK_SIZE=block, BLOCK=lanes)
        by = {access.tensor: access.elements for access in seen}
        frames = Frames(
            "Eight bytes hold sixteen codes. The first code of a byte is its high half.",
            ["packed", 0, "." * (n // 2), [f"{byte:02x}" for byte in packed.tolist()]],
            ["absmax", 0, "..", ["1.0", "2.0"]],
        )
        each = n // lanes
        for lane in range(lanes):
            elements = by["out"][lane * each : (lane + 1) * each]
            byte, scale = by["packed"][lane], by["absmax"][lane * each]
            words = [f"{out[e]:.1f}" for e in elements]
            halves = " and ".join(
                f"code {int(codes[e])} → {float(book[codes[e]]):.2f} times {float(absmax[scale]):.0f}" for e in elements
            )
            change = [
                *cells("packed", [byte], "a"),
                *cells("absmax", [scale], "c"),
                *cells("code", codes[elements].unique().tolist(), "d"),
                ["out", elements[0], "b" * each, words],
            ]
            if lane:
                change = [["code", 0, "." * 16], *change]
            frames.show(f"Lane {lane} loads byte {byte}: {halves}.", *change)
        facts = {"loads of a byte": len(by["packed"]), "loads of a scale": len(by["absmax"]), "outputs a lane": each}
        runs.append(frames.as_run(name, facts))
    simple = runs[0]["facts"]["loads of a byte"]
    return {
        "title": "Sixteen numbers out of eight bytes",
        "question": "Each lane makes one element, and fetches its byte itself. How many loads of a byte is that for sixteen elements?",
        "choices": ["8: there are eight bytes", "16: one for each element", "32: a byte and a scale each"],
        "answer": [8, 16, 32].index(simple),
        "asked": 0,
        "because": "Two lanes load the same byte and take another half of it. A lane that keeps both halves loads half as often.",
        "control": "the kernel",
        "panels": [
            panel("packed", "bytes", n // 2),
            panel("absmax", "scale of each block", 2),
            panel("code", "the sixteen values", 16),
            panel("out", "outputs", n),
        ],
        "legend": {"a": "byte", "c": "scale", "d": "value", "b": "output"},
        "runs": runs,
    }


def moe_lora() -> Recording:
    """Tokens sorted by expert, and the tiles that programs take from them."""
    page = from_notebook("moe_lora", "list_tiles", "_scatter2scatter_fwd_kernel")
    tokens, slots, experts, k, n = 32, 2, 4, 16, 16
    height = 16
    generator = torch.Generator().manual_seed(5)
    routings = {
        "even": torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 1) % experts], 1),
        "uneven": torch.tensor([[0, 1]])
        .repeat(tokens, 1)
        .where(torch.rand(tokens, 1, generator=generator) < 0.7, torch.tensor([[0, 2]])),
        "one expert only": torch.tensor([[3, 3]]).repeat(tokens, 1),
    }
    x, w = torch.randn(tokens, k, generator=generator), torch.randn(experts, k, n, generator=generator)
    rows = tokens * slots
    page.R, page.E = rows, experts  # names of the page that its function reads
    runs = []
    for name, ids in routings.items():
        routing = kb.route(ids, experts)
        counts = routing.offsets.diff().tolist()
        listed = page.list_tiles(routing.offsets, height)
        tiles, room = [tile for tile in listed.tolist() if tile[0] >= 0], len(listed)
        y = torch.zeros(rows, n)
        with watch(order=routing.order, y=y) as seen:
            page._scatter2scatter_fwd_kernel[(room, 1)](
                x, *x.stride(), w, *w.stride(), routing.order, listed, y, k, n, slots, BLOCK_M=height, BLOCK_N=16, BLOCK_K=16
            )  # fmt: skip
        codes = "abcd"
        by_pair = "".join(codes[e] for e in ids.flatten().tolist())
        note = f"{tokens} tokens, two experts each: {rows} rows, in the order of the tokens. A colour is an expert."
        frames = Frames(note, ["pairs", 0, by_pair])
        note = ", ".join(f"expert {e} has {count}" for e, count in enumerate(counts))
        by_expert = "".join(by_pair[p] for p in routing.order.tolist())
        frames.show(f"Sorted by expert. {note} rows.", ["sorted", 0, by_expert])
        stores = {access.program[0]: access for access in seen if access.tensor == "y"}
        for program in range(room):
            if program not in stores:
                frames.show(f"Program {program} finds no tile in the list, and goes home.")
                continue
            expert, first, count = tiles[program]
            written = sorted({element // n for element in stores[program].elements})
            note = f"Program {program}: expert {expert}, {count} rows of a tile of {height}, written straight to their places."
            frames.show(note, ["sorted", first, "e" * count], *cells("y", written, codes[expert]))
        facts = {
            "tiles": len(tiles),
            "programs that are launched": room,
            "rows of tiles for each real row": f"{len(tiles) * height / rows:.2f}",
        }
        runs.append(frames.as_run(name, facts))
    choices = [str(rows // height), str(room), str(rows)]
    return {
        "title": "Rows, experts, tiles",
        "question": f"{rows} rows, {experts} experts, tiles of {height} rows. The host does not know the counts. How many programs does it launch, so that it is always enough?",
        "choices": choices,
        "answer": choices.index(str(room)),
        "asked": 1,
        "because": "Every expert has at most one tile that is not full. So the number is known without asking, and some programs find nothing to do.",
        "control": "how the tokens chose",
        "panels": [
            panel("pairs", "rows, by token", 32, 2),
            panel("sorted", "rows, by expert", 32, 2),
            panel("y", "results, by token", 32, 2),
        ],
        "legend": {"a": "expert 0", "b": "expert 1", "c": "expert 2", "d": "expert 3", "e": "taken by a program"},
        "runs": runs,
    }


def sparse_linear() -> Recording:
    """What the sparse dW reads and writes, chunk by chunk."""
    page = from_notebook("sparse_linear", "_sparse_dw_bwd_chunk_kernel")
    m, d_in, chunk, chunks = 16, 32, 16, 8
    d_out = chunk * chunks
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(m, d_in, generator=generator), torch.randn(m, d_out, generator=generator)
    # By tensor the cell of an element, and what a program does with it.
    places = {
        "x": (lambda e: e % d_in // 16, "loads its columns of X"),
        "dy": (lambda e: e % d_out // chunk, "loads the columns of dY that its id names"),
        "dw": (lambda e: (e % d_in // 16) * chunks + e // d_in // chunk, "writes its tile of dW"),
    }
    runs = []
    for active in ([5], [5, 1], [5, 1, 6, 2], list(range(chunks))):
        ids, dw = torch.tensor(active), torch.zeros(d_out, d_in)
        with watch(x=x, dy=dy, dw=dw) as seen:
            page._sparse_dw_bwd_chunk_kernel[(len(active), 2)](
                ids, x, *x.stride(), dy, *dy.stride(), dw, *dw.stride(), m, d_in, d_out, CHUNK=chunk, BLOCK_M=16, BLOCK_D=16
            )  # fmt: skip
        frames = Frames(f"{len(active)} of {chunks} chunks are active: {', '.join(map(str, active))}.")
        for access in seen:
            program, tile, _ = access.program
            place, what = places[access.tensor]
            change = cells(access.tensor, sorted({*map(place, access.elements)}), "b" if access.tensor == "dw" else "a")
            frames.show(f"Program {program}, {tile} (chunk {active[program]}) {what}.", *change)
        once = {name: len({e for a in seen if a.tensor == name for e in a.elements}) for name in ("x", "dy", "dw")}
        facts = {
            "elements of dY that are read": once["dy"],
            "elements of X that are read": once["x"],
            "elements of dW that are written": once["dw"],
            "multiplications": sum(len(a.elements) for a in seen if a.tensor == "dw") * m,
        }
        runs.append(frames.as_run(f"{len(active)} of {chunks} active", facts))
    quarter, full = runs[1]["facts"], runs[3]["facts"]
    assert [name for name in full if 4 * quarter[name] != full[name]] == ["elements of X that are read"]
    return {
        "title": "The gradient of the weight, a chunk a program",
        "question": "Two of eight chunks are active. Which of these is not a quarter of what it would be with all of them?",
        "choices": ["what is read of dY", "what is read of X", "the multiplications"],
        "answer": 1,
        "asked": 1,
        "because": "Every active feature's gradient needs all of X. So X is what the sparse kernel cannot save.",
        "control": "active chunks",
        "panels": [
            panel("dy", "dY, chunks of columns", chunks),
            panel("x", "X, tiles of columns", 2),
            panel("dw", "dW transposed, chunks across", chunks, 2),
        ],
        "legend": {"a": "loaded", "b": "written"},
        "runs": runs,
    }


@triton.jit
def _tickets_kernel(
    x_ptr,  # (SPLIT, BLOCK) what each program has summed up
    partial_ptr,  # (SPLIT, BLOCK)
    tickets_ptr,  # (1,) zero
    y_ptr,  # (BLOCK,) the total
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    sums = (tl.load(x_ptr + share * BLOCK + offs),)
    is_last, sums = merge_shares(sums, (partial_ptr,), offs, BLOCK, share, SPLIT, tickets_ptr, offs < BLOCK)
    if is_last:
        tl.store(y_ptr + offs, sums[0])


def show_ticket(frames: Frames, program: int, drawn: int, shares: int) -> None:
    """A program draws a ticket, so that so many are drawn."""
    rest = "It is the last one: all parts are there." if drawn == shares else "Others are to come: it ends."
    frames.show(f"Program {program} draws ticket {drawn - 1}. {rest}", ["tickets", 0, "abcd"[program], [str(drawn)]])


def scatter_ffn() -> Recording:
    """Four programs draw tickets in three orders; the package's helpers say who is last, and add up."""
    split, block = 4, 8
    x = torch.randn(split, block, generator=torch.Generator().manual_seed(2))
    runs, totals = [], []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        partial, tickets, y = torch.zeros(split, block), torch.zeros(1, dtype=torch.int32), torch.zeros(block)
        with watch(order, partial=partial, tickets=tickets, y=y) as seen:
            _tickets_kernel[(split,)](x, partial, tickets, y, SPLIT=split, BLOCK=block)
        totals.append(y)
        frames = Frames("Four programs have a part of the sum each. The counter is 0.", ["tickets", 0, ".", ["0"]])
        drawn, last = 0, -1
        for access in seen:
            program, code = access.program[0], "abcd"[access.program[0]]
            if access.tensor == "tickets" and access.kind == "store":
                frames.show(f"Program {program} sets the counter back to 0.", ["tickets", 0, code, ["0"]])
            elif access.tensor == "tickets":
                drawn, last = drawn + 1, program
                show_ticket(frames, program, drawn, split)
            elif access.tensor == "y":
                frames.show(f"Program {program} writes the total.", ["y", 0, code * block])
            elif access.tensor == "partial":
                row, own = access.elements[0] // block, access.kind == "store"
                what = "writes its part to its own row" if own else f"adds row {row}"
                frames.show(f"Program {program} {what}.", ["partial", row * block, (code if own else "e") * block])
        facts = {
            "who adds up": f"program {last}",
            "order of the additions": "0, 1, 2, 3",
            "atomic additions of floats": 0,
        }
        runs.append(frames.as_run("they end as " + ", ".join(map(str, order)), facts))
    assert all(torch.equal(totals[0], other) for other in totals)
    return {
        "title": "Tickets: who comes last adds up",
        "question": "The programs end in another order. What changes?",
        "choices": ["the last bits of the sum", "which program adds up", "both"],
        "answer": 1,
        "asked": 1,
        "because": "Who draws the last ticket is chance. It adds the rows in their order, so the bits are the same.",
        "control": "order in which the programs end",
        "panels": [
            panel("tickets", "tickets", 1),
            panel("partial", "a row for each program", block, split),
            panel("y", "the total", block),
        ],
        "legend": {"a": "program 0", "b": "program 1", "c": "program 2", "d": "program 3", "e": "being added"},
        "runs": runs,
    }


def attention_backward() -> Recording:
    """Two programs add to the same rows of dQ: by load, add and store, and by atomics."""
    names = ("_load_rows", "_load_per_row", "_store_rows", "_attention_bwd_keys_kernel", "forward")
    page = from_notebook("attention_backward", *names)
    n, s, d, side = 16, 32, 16, 16
    generator = torch.Generator().manual_seed(4)
    q, k, v, do = (torch.randn(1, count, d, generator=generator) for count in (n, s, s, n))
    o, lse = page.forward(q, k, v, False)
    kinds = {}
    for atomic in (False, True):
        dq, dk, dv = torch.zeros(1, n, d), torch.empty_like(k), torch.empty_like(v)
        with watch(dq=dq) as seen:
            page._attention_bwd_keys_kernel[(2, 1)](
                q, k, v, do, lse, (o * do).sum(-1), dq, dk, dv, n, s, d**-0.5, ATOMIC=atomic, D=d, BLOCK_M=side, BLOCK_N=side, BLOCK_D=d
            )  # fmt: skip
        kinds[atomic] = [(access.program[0], access.kind) for access in seen]
    assert kinds[False] == [(0, "load"), (0, "store"), (1, "load"), (1, "store")]
    assert kinds[True] == [(0, "atomic"), (1, "atomic")]
    codes = {frozenset(): ".", frozenset({0}): "a", frozenset({1}): "b", frozenset({0, 1}): "c"}
    notes = {
        "load": "Program {p} loads {rows} and adds its share, in registers.",
        "store": "Program {p} stores {rows}.",
        "atomic": "Program {p} adds to {rows}, atomically.",
    }
    schedules: dict[str, Schedule] = {
        "one after the other": [(kind, program, half) for program, kind in kinds[False] for half in (0, 1)],
        "at once": [
            *(("load", 0, 0), ("load", 1, 0), ("store", 0, 0), ("load", 0, 1), ("store", 1, 0)),
            *(("store", 0, 1), ("load", 1, 1), ("store", 1, 1)),
        ],
        "at once, atomics": [("atomic", 0, 0), ("atomic", 1, 0), ("atomic", 1, 1), ("atomic", 0, 1)],
    }  # fmt: skip
    runs = []
    for name, schedule in schedules.items():
        frames = Frames("Sixteen rows of dQ are zero. Each program has a share for every row.")
        lost = interleave(frames, schedule, "dq", n, notes, lambda cells, _: ["".join(codes[cell] for cell in cells)])
        runs.append(frames.as_run(name, {"rows": n, "rows that lost a share": lost}))
    lost = [run["facts"]["rows that lost a share"] for run in runs]
    assert lost[0] == 0 == lost[2] and 0 < lost[1] < n
    return {
        "title": "Two programs, the same rows of dQ",
        "question": "Both load, add and store the same rows at the same time. What is missing in the end?",
        "choices": ["nothing", "one program's share, in some rows", "both shares, everywhere"],
        "answer": 1,
        "asked": 1,
        "because": "Where both had loaded before one stored, the later store overwrites the earlier. Which rows those are is timing: the interpreter never shows it.",
        "control": "how the two run",
        "panels": [
            panel("dq", "dQ in memory", n),
            panel("p0", "program 0, registers", n),
            panel("p1", "program 1, registers", n),
        ],
        "legend": {"a": "share of program 0", "b": "share of program 1", "c": "both"},
        "runs": runs,
    }


def attention_decoding() -> Recording:
    """Four programs share the keys of one head; the last to draw a ticket merges."""
    names = ("_rows", "_absorb", "_finish", "_merge", "_decode_ticket_kernel")
    page = from_notebook("attention_decoding", *names)
    shares, tile, d = 4, 16, 16
    keys = shares * tile
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, rows, d, generator=generator) for rows in (1, keys, keys))
    runs, outputs = [], []
    for name, order in {"0, 1, 2, 3": [0, 1, 2, 3], "3, 2, 1, 0": [3, 2, 1, 0], "2, 0, 3, 1": [2, 0, 3, 1]}.items():
        o, part, lse = torch.zeros(1, 1, d), torch.zeros(1, shares, tile, d), torch.zeros(1, shares, tile)
        tickets = torch.zeros(1, dtype=torch.int32)
        with watch(order, k=k, o=o, lse=lse, tickets=tickets) as seen:
            page._decode_ticket_kernel[(shares, 1)](
                q, k, v, o, part, lse, tickets, 1, keys, shares, d**-0.5 * float(np.log2(np.e)),
                D=d, BLOCK_M=tile, BLOCK_N=tile, BLOCK_D=d, SEM="acq_rel",
            )  # fmt: skip
        outputs.append(o)
        frames = Frames(f"{keys} keys of one head, {shares} programs. The counter is zero.", ["tickets", 0, ".", ["0"]])
        drawn, merging = 0, None
        for access in seen:
            program = access.program[0]
            mine = "abcd"[program]
            if access.tensor == "k":
                read = sorted({element // d for element in access.elements})
                frames.show(f"Program {program} walks over its split of the keys.", *cells("k", read, mine))
            elif access.tensor == "lse" and access.kind == "store":
                note = "It stores its part: the mean of its values, and its log-sum-exp."
                frames.show(note, ["parts", program, mine])
            elif access.kind == "atomic":
                drawn += 1
                show_ticket(frames, program, drawn, shares)
            elif access.tensor == "tickets" and access.kind == "store":
                frames.show("It puts the counter back to zero for the next launch.", ["tickets", 0, ".", ["0"]])
            elif access.tensor == "o":
                merging = program
                note = f"Program {program} has read all parts in their order, and stores the output."
                frames.show(note, ["o", 0, mine])
        runs.append(frames.as_run(name, {"launches": 1, "merged by program": merging}))
    assert len({run["facts"]["merged by program"] for run in runs}) > 1
    assert all(torch.equal(o, outputs[0]) for o in outputs)
    return {
        "title": "Four programs, one head",
        "question": "Which program merges the parts?",
        "choices": ["program 0", "the one with the last keys", "whichever draws the last ticket"],
        "answer": 2,
        "asked": 2,
        "because": "The last ticket says that all parts are stored. Who draws it is chance; the parts are read in their order, so that the bits of the output are not.",
        "control": "order of the programs",
        "panels": [
            panel("k", "keys", keys // 2, 2),
            panel("parts", "parts in memory", shares),
            panel("tickets", "tickets drawn", 1),
            panel("o", "output", 1),
        ],
        "legend": {"a": "program 0", "b": "program 1", "c": "program 2", "d": "program 3"},
        "runs": runs,
    }


def sparse_training() -> Recording:
    """Which chunks three schedulers choose, step after step, and where the gradient is."""
    chunks, active, steps = 32, 8, 24
    runs, found = [], {}
    for name in ("random", "ema_topk", "oracle"):
        torch.manual_seed(0)
        teacher = train.PlantedTeacher(chunks=chunks, planted=8, families=None, d_in=16, batch=16, period=8)
        scheduler = train.make_scheduler(name, train.Layout((chunks,), (active,)))
        chosen: list[set[int]] = []
        noting = telling(scheduler.select, lambda ids, chosen=chosen: chosen.append(set(ids.tolist())))
        with mock.patch.object(scheduler, "select", noting):
            scores = list(train.score_scheduler(teacher, scheduler, steps))
        frames = Frames(f"{chunks} chunks across, time goes down. {active} may be chosen in a step.")
        for step, asked in enumerate(chosen):
            where = set(teacher.planted_chunks(step).tolist())
            row = [".xgc"[2 * (i in asked) + (i in where)] for i in range(chunks)]
            note = f"Step {step}: {len(asked & where)} of the {len(where)} chunks with the gradient are chosen."
            frames.show(note, ["steps", step * chunks, "".join(row)])
        found[name] = float(np.mean([score["recall"] for score in scores]))
        runs.append(frames.as_run(name, {"found, in the mean": f"{found[name]:.0%}"}))
    assert found["random"] < found["ema_topk"] < found["oracle"]
    return {
        "title": "Chosen chunks over time",
        "question": "The gradient moves to other chunks every eight steps. What does a scheduler do that goes by running means of what it saw?",
        "choices": [
            "it finds them all the time",
            "it loses them at each move, and finds them again",
            "it does no better than chance",
        ],
        "answer": 1,
        "asked": 1,
        "because": f"It finds {found['ema_topk']:.0%} in the mean; chance finds {found['random']:.0%}. What it did not look at it does not know, so every move costs it some steps.",
        "control": "scheduler",
        "panels": [panel("steps", "a row a step", chunks, steps)],
        "legend": {"c": "chosen, and the gradient is there", "g": "chosen in vain", "x": "missed"},
        "runs": runs,
    }


def together() -> Recording:
    """The bytes of a whole model's experts, a cell a GiB."""
    experts, hidden, inner, _ = MODELS["Qwen3-30B-A3B"]
    layers, columns, gpu = 48, 20, 141
    elements = layers * experts * 3 * hidden * inner

    def four_bits(double: bool) -> float:  # without the bfloat16 that dequantizing writes
        return nf4_bench.dequantize_gbytes(elements, double) * 1e9 - 2 * elements

    parts = {
        "bfloat16, frozen": {"weights": 2.0 * elements},
        "4 bits, frozen": {"weights": four_bits(False)},
        "4 bits, scales quantized too": {"weights": four_bits(True)},
        "bfloat16, trained with AdamW": {
            "weights": 2.0 * elements,
            "gradients": 2.0 * elements,
            "float32 weights": 4.0 * elements,
            "two moments": 8.0 * elements,
        },
    }  # fmt: skip
    total = {name: sum(part.values()) / 2**30 for name, part in parts.items()}
    room = int(np.ceil(max(total.values()) / columns)) * columns
    runs = []
    for name, part in parts.items():
        frames = Frames(f"{elements / 1e9:.1f} billion weights in the experts of {layers} layers. A cell is a GiB.")
        at = 0.0
        for code, (what, size) in zip("abcd", part.items()):
            first, last = round(at), round(at + size / 2**30)
            frames.show(f"{what.capitalize()}: {size / 2**30:.1f} GiB.", *cells("gib", list(range(first, last)), code))
            at += size / 2**30
        fits = "yes" if at < gpu else f"no: {at / gpu:.1f} times as much"
        runs.append(frames.as_run(name, {"GiB": f"{at:.1f}", f"fits a GPU of {gpu} GB": fits}))
    share = total["4 bits, frozen"] / total["bfloat16, frozen"]
    return {
        "title": "The experts of a 30B model, in GiB",
        "question": "From bfloat16 to four bits with a float32 scale for each 64: how much is left?",
        "choices": ["exactly a quarter", "a bit more than a quarter", "half"],
        "answer": 0 if share == 0.25 else 1 if share < 0.35 else 2,
        "asked": 1,
        "because": f"It is {share:.1%}: the codes are a quarter, and the scales come on top.",
        "control": "how the weights are kept",
        "panels": [panel("gib", "a cell a GiB", columns, room // columns)],
        "legend": {"a": "weights", "b": "gradients", "c": "float32 weights", "d": "moments"},
        "runs": runs,
    }


def launches() -> Recording:
    """Which calls of one kernel find a compiled one, by the key that the package's launcher makes."""
    room = torch.zeros(4096)
    calls = {
        "multiples of 16": [(room, 16 * n) for n in range(1, 17)],
        "any length": [(room, n) for n in range(1, 17)],
        "views that begin anywhere": [(room[n:], 1024) for n in range(16)],
        "two dtypes": [(room.half() if n % 2 else room, 1024) for n in range(16)],
    }
    runs = []
    for name, arguments in calls.items():
        known: list[Any] = []
        frames = Frames("Sixteen calls of one kernel. Nothing is compiled yet.")
        for call, (tensor, n) in enumerate(arguments):
            key = Launch._key(0, (tensor, n))[0]
            what = "finds" if key in known else "compiles"
            known += [key] * (key not in known)
            kernel = known.index(key)
            code = "abcdef"[kernel % 6]
            begin = f", {tensor.storage_offset() * tensor.element_size()} bytes in" if tensor.storage_offset() else ""
            note = f"Call {call + 1}, {str(tensor.dtype).removeprefix('torch.')}{begin}, N = {n}: {what} kernel {kernel + 1}."
            frames.show(note, ["calls", call, code], ["kernels", kernel, code])
        runs.append(frames.as_run(name, {"calls": len(arguments), "kernels compiled": len(known)}))
    compiled = runs[0]["facts"]["kernels compiled"]
    choices = ["1", "2", "16"]
    return {
        "title": "Sixteen calls, so many kernels",
        "question": "N is 16, 32, 48 and so on, up to 256. How many kernels are compiled for the sixteen calls?",
        "choices": choices,
        "answer": choices.index(str(compiled)),
        "asked": 0,
        "because": "A kernel is made for what an argument is like, not for its value: divisible by 16, equal to 1, or neither.",
        "control": "what differs between the calls",
        "panels": [
            panel("calls", "calls, coloured by the kernel that runs", 16),
            panel("kernels", "compiled kernels", 16),
        ],
        "legend": {"a": "kernel 1", "b": "kernel 2", "c": "kernel 3"},
        "runs": runs,
    }


def several_gpus() -> Recording:
    """To which GPUs each token travels, by the chapter's own function."""
    page = from_notebook("several_gpus", "goes_solution")
    tokens, experts, gpus = 12, 16, 4
    generator = torch.Generator().manual_seed(6)
    runs = []
    for slots in (1, 2, 4, 8):
        ids = torch.rand(tokens, experts, generator=generator).topk(slots).indices
        goes = page.goes_solution(ids, experts // gpus, gpus)
        frames = Frames(f"{experts} experts on {gpus} GPUs. Each of {tokens} tokens asks for {slots}.")
        for token in range(tokens):
            row = "".join("c" if there else "." for there in goes[token].tolist())
            asked = torch.bincount(ids[token] // (experts // gpus), minlength=gpus).tolist()
            words = [str(count) if count else "" for count in asked]
            there = int(goes[token].sum())
            note = f"Token {token}: {slots} experts, on {there} GPUs. A number says how many it asks for there."
            frames.show(note, ["goes", token * gpus, row, words])
        pairs, rows = tokens * slots, int(goes.sum())
        facts = {"rows, if each pair travelled": pairs, "rows, once to each GPU": rows, "share": f"{rows / pairs:.0%}"}
        runs.append(frames.as_run(f"{slots} expert{'s' * (slots > 1)} a token", facts))
    rows = [run["facts"]["rows, once to each GPU"] for run in runs]
    return {
        "title": "Where tokens travel",
        "question": "From one expert a token to eight, on four GPUs: how much does the traffic grow, if a row goes to each GPU only once?",
        "choices": ["not at all", "at most four times", "eight times"],
        "answer": 1,
        "asked": 3,
        "because": f"A row goes to no more GPUs than there are. Here it grew from {rows[0]} rows to {rows[-1]}.",
        "control": "experts a token",
        "panels": [panel("goes", "tokens down, GPUs across", gpus, tokens)],
        "legend": {"c": "the token's row travels there"},
        "runs": runs,
    }


def bytes_in_flight() -> Recording:
    """How much an SM gets of its memory's bandwidth, by how much it has asked for: Little's law, played."""
    gpu, latency, piece, step, end = runtime.TARGETS["sm_90"], 600, 512, 75, 1500  # nanoseconds, bytes
    rate = 4800 / gpu.num_sms  # bytes a nanosecond, by the data sheet
    runs = []
    for kib in (4, 8, 16, 32):
        slots = kib * 1024 // piece
        # A slot asks again as soon as it has its piece; pieces leave the memory one after the other.
        asked, free, arrivals = [0.0] * slots, 0.0, []
        while min(asked) < 11 * latency:
            slot = asked.index(min(asked))
            free = max(asked[slot], free) + piece / rate
            asked[slot] = max(free, asked[slot] + latency)
            arrivals.append(asked[slot])
        frames = Frames(f"The SM asks for {slots} pieces of {piece} bytes at once: {kib} KiB.", ["way", 0, "a" * slots])
        for now in range(step, end + 1, step):
            there = sum(arrival <= now for arrival in arrivals)
            frames.show(f"After {now} ns: {there} pieces are there.", ["there", 0, "b" * there])
        share = sum(latency < arrival <= 11 * latency for arrival in arrivals) * piece / (10 * latency) / rate
        facts = {
            "KiB on their way": kib,
            "bytes a nanosecond": f"{share * rate:.1f}",
            "share of what one SM can get": f"{min(1.0, share):.0%}",
        }
        runs.append(frames.as_run(f"{kib} KiB", facts))
    shares = [int(run["facts"]["share of what one SM can get"][:-1]) for run in runs]
    choices = [20, 50, 90]
    return {
        "title": "Bytes in flight",
        "question": f"An SM waits {latency} ns for each answer and has 4 KiB on their way at any time. Which share of its bandwidth does it get?",
        "choices": [f"about {choice}%" for choice in choices],
        "answer": min(range(3), key=lambda i: abs(choices[i] - shares[0])),
        "asked": 0,
        "because": f"Bandwidth times latency, {rate * latency / 1024:.0f} KiB, have to be on their way. Whoever asks for less waits with nothing to do.",
        "control": "asked for at any time",
        "panels": [
            panel("way", "on their way, a cell is 512 bytes", 64),
            panel("there", f"there after {end} ns", 32, 4),
        ],
        "legend": {"a": "asked for", "b": "arrived"},
        "runs": runs,
    }


def splits_against_time() -> Recording:
    """Splits of one head's keys on eight SMs: how many finish first. A model of the scheduler, in units of one block of keys."""
    sms, blocks, start, merged = 8, 96, 2, 4  # a program takes two units to begin; a unit merges four parts
    width, runs = 28, []
    for splits in (4, 6, 8, 12, 32):
        busy, own = [0] * sms, blocks // splits
        frames = Frames(f"{blocks} blocks of keys in {splits} splits. A split begins on the SM that is free first.")
        for split in range(splits):
            sm = busy.index(min(busy))
            note = f"Split {split} on SM {sm}: {start} units to begin, {own} blocks of keys."
            frames.show(note, ["time", sm * width + busy[sm], "x" * start + "a" * own])
            busy[sm] += start + own
        last, merge = max(busy), -(-splits // merged)
        place = busy.index(last) * width + last
        frames.show(f"The last program merges {splits} parts.", ["time", place, "c" * merge])
        total = last + merge
        facts = {"units of time": total, "waves": -(-splits // sms), "SMs at work": f"{sum(busy) / (sms * total):.0%}"}
        runs.append(frames.as_run(f"{splits} splits", facts))
    times = [run["facts"]["units of time"] for run in runs]
    best = times.index(min(times))
    return {
        "title": "Splits of one head's keys on eight SMs",
        "question": "Eight SMs, 96 blocks of keys. Into how many splits should one cut them?",
        "choices": [run["name"] for run in runs],
        "answer": best,
        "asked": best,
        "because": "One split for each SM fills one wave. Fewer leave SMs without work; more begin a second wave, and there is more to begin and to merge.",
        "control": "splits",
        "panels": [panel("time", "SMs down, time across", width, sms)],
        "legend": {"x": "begins", "a": "reads a block of keys", "c": "merges"},
        "runs": runs,
    }


def tile_height() -> Recording:
    """Rows of routed tokens in tiles of an expert: how often a matrix is read, and how many rows are not there."""
    experts, slots, tokens, width = 8, 2, 64, 64
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2)).topk(slots).indices
    counts = torch.bincount(ids.flatten(), minlength=experts).tolist()
    runs = []
    for height in (8, 16, 32, 64):
        frames = Frames(f"{sum(counts)} rows, sorted by expert. Tiles have {height} rows.")
        tiles = 0
        for expert, count in enumerate(counts):
            own = -(-count // height)
            tiles += own
            code = "".join("ab"[i // height % 2] for i in range(count)) + "x" * (own * height - count)
            note = f"Expert {expert}: {count} rows, {own} tile{'s' * (own > 1)}. Each reads the expert's matrix once."
            frames.show(note, ["rows", expert * width, code])
        facts = {
            "reads of a matrix": tiles,
            "rows that do not exist": tiles * height - sum(counts),
            "rows computed for each real one": f"{tiles * height / sum(counts):.2f}",
        }
        runs.append(frames.as_run(f"{height} rows", facts))
    reads = [run["facts"]["reads of a matrix"] for run in runs]
    return {
        "title": "The height of a tile",
        "question": "From tiles of 8 rows to tiles of 32: how often are the experts' matrices read?",
        "choices": ["more often", "as often", "less often"],
        "answer": 2 if reads[2] < reads[0] else 1 if reads[2] == reads[0] else 0,
        "asked": 2,
        "because": f"Each tile reads its expert's matrix once: {reads[2]} times instead of {reads[0]}. The rows that do not exist cost arithmetic and no bytes.",
        "control": "height of a tile",
        "panels": [panel("rows", "experts down, their rows across", width, experts)],
        "legend": {"a": "a tile's rows", "b": "the next tile's", "x": "rows that do not exist"},
        "runs": runs,
    }


def same_bits() -> Recording:
    """One row alone and in a batch: who sums which part of it, by a split that looks at the batch and by parts at fixed places."""
    page = from_notebook("same_bits", "_split_kernel", "_parts_kernel", "joined")
    k, n, part = 128, 16, 32
    blocks = {"BLOCK_M": 16, "BLOCK_N": n, "BLOCK_K": 16}
    generator = torch.Generator().manual_seed(5)
    batch, w = torch.randn(64, k, generator=generator), torch.randn(k, n, generator=generator)
    runs, alone = [], torch.empty(0)
    for name, fixed, rows in (
        ("a split by rows, one row", False, 1), ("a split by rows, 64 rows", False, 64),
        ("fixed parts, one row", True, 1), ("fixed parts, 64 rows", True, 64),
    ):  # fmt: skip
        x, programs = batch[:rows].clone(), 4 if rows == 1 else 1
        sums = torch.zeros(programs, rows, n)
        grid, more = (triton.cdiv(rows, 16), 1, programs), {"PART": part, "SPLIT": rows == 1} if fixed else {}
        with watch(x=x, sums=sums) as seen:
            kernel = page._parts_kernel if fixed else page._split_kernel
            kernel[grid](x, w, sums, rows, n, k, *(() if fixed else (k // programs,)), **blocks, **more)
        found = page.joined(sums)[0]
        alone = found if rows == 1 else alone
        frames = Frames(f"{k} numbers of one row, in a batch of {rows}. {programs} programs share them.")
        for access in (access for access in seen if access.program[0] == 0):
            program, letter = access.program[2], "abcd"[access.program[2]]
            if access.tensor == "x":
                read = [element for element in access.elements if element < k]
                note = f"Program {program} multiplies and adds."
                if fixed and programs == 1 and (read[-1] + 1) % part == 0:
                    note += " A part is full: it joins the sum of those before."
                frames.show(note, *cells("row", read, "abcd"[read[0] // part] if fixed else letter))
            else:
                frames.show(f"Program {program} stores its sum.", ["sums", program, letter])
        note = "The sums are joined in their order." if programs > 1 else "There is nothing to join."
        frames.show(note, ["out", 0, "g"])
        same = "yes" if torch.equal(found, alone) else "no"
        runs.append(frames.as_run(name, {"programs": programs, "the bits of the row alone": same}))
    assert [run["facts"]["the bits of the row alone"] for run in runs] == ["yes", "no", "yes", "yes"]
    return {
        "title": "One row, alone and among 64",
        "question": "64 rows give each program enough to do. Which of the two ways then still adds the row up as it did alone?",
        "choices": ["both", "the split by rows", "the fixed parts"],
        "answer": 2,
        "asked": 3,
        "because": "One program walks over the parts that four programs had, ends each where they did, and joins them in their order.",
        "control": "way, and rows",
        "panels": [panel("row", "the row", k // 4, 4), panel("sums", "sums in memory", 4), panel("out", "result", 1)],
        "legend": {"a": "first sum", "b": "second", "c": "third", "d": "fourth", "g": "the row's result"},
        "runs": runs,
    }


RECORDINGS: dict[str, Callable[[], Recording]] = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__annotations__", {}).get("return") is Recording
} | {"gluon": instrument_gluon.gluon}


def written(recording: Recording) -> str:
    """A recording as the file has it."""
    return json.dumps(recording, ensure_ascii=False, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"without one, all: {', '.join(RECORDINGS)}")
    for name in parser.parse_args().names or RECORDINGS:
        text = written(RECORDINGS[name]())
        (OUT / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode()) / 1024:.1f} kB")


if __name__ == "__main__":
    main()
