"""The kernels of the chapter on Gluon as a module, and the instrument that replays a run of its last one in the interpreter.

``record_instruments.py`` writes the recording; tests and ``record_timeline.py`` take the kernels.
"""

import ast
import contextlib
import functools
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernelbook.lab.gluon import Event, GluonError, interpreted

ROOT = Path(__file__).resolve().parent.parent
WARPS = ("C0", "C1", "P")


def definitions(stem: str) -> list[tuple[str, str]]:
    """A notebook's imports, functions and constants as they stand there: names, empty of an import, and texts."""
    cells = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    found = []
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        with contextlib.suppress(SyntaxError):  # of a cell that is not Python alone
            for node in ast.parse(source).body:
                name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else getattr(node, "name", "")
                if name.isupper() or isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom)):
                    first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])
                    found.append((name, "\n".join(source.splitlines()[first - 1 : node.end_lineno])))
    return found


def source_of_page() -> str:
    """The chapter's imports, functions and constants; what runs or measures is left out."""
    return "\n\n\n".join(text for _, text in definitions("gluon")) + "\n"


def module_of(source: str, name: str) -> ModuleType:
    """A module from text, whose lines Triton can read."""
    module, file = ModuleType(name), f"<{name}>"
    module.__file__ = file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[name] = module
    exec(compile(source, file, "exec"), vars(module))  # noqa: S102
    return module


@functools.cache
def page() -> Any:
    return module_of(source_of_page(), "gluon_page")


def _frames(events: list[Event], stages: int, most: int) -> list[dict[str, Any]]:
    """What the events do to buffers, barriers and warps."""
    # By panel and cell its code and its word.
    now = {("tiles", slot): (".", "") for slot in range(stages)}
    now |= {(barrier, slot): (".", "0") for barrier in ("full", "empty") for slot in range(stages)}
    now |= {("warps", partition): ("g", word) for partition, word in enumerate(WARPS)}
    before: dict[tuple[str, int], tuple[str, str]] = {}
    frames: list[dict[str, Any]] = []

    def show(note: str) -> None:
        changed = [[*cell, code, [word]] for cell, (code, word) in now.items() if before.get(cell) != (code, word)]
        frames.append({"set": changed, "note": note})
        before.update(now)

    show("All buffers are empty, and every barrier is in phase 0.")
    landed: dict[int, int] = {}
    for event in events:
        slot = int(event.what.split("[")[1][:-1]) if "[" in event.what else 0
        barrier = event.what.split("[")[0]
        if event.kind == "copy" and barrier == "a_smem":
            now["tiles", slot], landed[slot] = ("a", ""), 0
        elif event.kind == "land":
            landed[slot] += 1
            if landed[slot] == 2:
                now["tiles", slot] = "b", ""
        elif event.kind == "product":
            now["tiles", slot] = "c", ""
        elif event.kind == "ends":
            now[barrier, slot] = "bd"[event.phase % 2], str(event.phase + 1)
            if barrier == "empty":
                now["tiles", slot] = ".", ""
        if code := {"product": "c", "wait": "x", "pass": "g"}.get(event.kind):
            now["warps", event.partition] = code, WARPS[event.partition]
        half = (event.kind == "copy" and barrier == "b_smem") or (event.kind == "land" and landed[slot] < 2)
        if not half and event.kind != "expect":
            show(_note(event))
    return frames[:most]


def _note(event: Event) -> str:
    who = {0: "Consumer C0", 1: "Consumer C1", 2: "The producer"}.get(event.partition, "")
    said = {
        "copy": f"{who} starts the copies to buffer {event.what[-2]}.",
        "land": f"The tiles of buffer {event.what[-2]} have arrived.",
        "arrive": f"{who} has read buffer {event.what[-2]}, and arrives at {event.what}.",
        "ends": f"Phase {event.phase} of {event.what} is over.",
        "wait": f"{who} waits for {event.what} to end phase {event.phase}.",
        "pass": f"{who} goes on: phase {event.phase} of {event.what} is over.",
        "product": f"{who} starts a product on buffer {event.what[-2]}.",
        "done": f"{who} knows that its product on buffer {event.what[-2]} is done.",
        "store": f"{who} stores its half of the result to shared memory.",
        "write": f"TMA copies {event.what} to global memory.",
    }
    return said[event.kind]


def gluon() -> dict[str, Any]:
    """Producer and consumers of one tile, with two and three buffers, and with the producer's phase wrong."""
    a, b = torch.ones(128, 320, dtype=torch.float16), torch.ones(320, 256, dtype=torch.float16)
    right, runs = page(), []
    source = source_of_page().replace("((count // STAGES) & 1) ^ 1)", "(count // STAGES) & 1)")
    wrong = module_of(source, "gluon_page_wrong")
    for name, kernels, stages in (
        ("two buffers", right, 2), ("three buffers", right, 3), ("two buffers, the producer's phase wrong", wrong, 2)
    ):  # fmt: skip
        end = "the product is right"
        with interpreted() as launches:
            try:
                c = kernels.specialized(a, b, kernel=kernels._matmul_specialized_kernel, STAGES=stages)
                assert (c == 320).all()
            except GluonError as error:
                end = error.kind
            events = launches.events[0]
        frames = _frames(events, stages, 60)
        if end == "deadlock":
            frames.append({"note": "Everybody waits, and nothing is under way: a deadlock."})
        kinds = [event.kind for event in events if event.partition == 2 and event.kind != "expect"]
        ahead = kinds[: kinds.index("wait")].count("copy") // 2
        facts = {"buffers": stages, "steps loaded before the producer first waits": ahead, "end": end}
        runs.append({"name": name, "frames": frames, "facts": facts})
    ahead = runs[1]["facts"]["steps loaded before the producer first waits"]
    choices = ["none", "2", "3", "all"]
    return {
        "title": "A producer, two consumers, and their barriers",
        "question": "There are five steps and three buffers. How many steps does the producer load before it first has to wait?",
        "choices": choices,
        "answer": choices.index(str(ahead)),
        "asked": 1,
        "because": "Its first wait for each buffer is for the phase before the first, which is over: one step a buffer. For the fourth step the first buffer must have been read.",
        "control": "buffers",
        "panels": [
            {"name": "tiles", "label": "buffers", "rows": 1, "columns": 3},
            {"name": "full", "label": "full: the phase it is in", "rows": 1, "columns": 3},
            {"name": "empty", "label": "empty: the phase it is in", "rows": 1, "columns": 3},
            {"name": "warps", "label": "consumers C0, C1 and producer P", "rows": 1, "columns": 3},
        ],
        "legend": {
            "a": "a copy is under way",
            "b": "full",
            "c": "being multiplied",
            "d": "a second phase over",
            "g": "runs",
            "x": "waits",
        },
        "runs": runs,
    }
