"""Runs every kernel under NVIDIA's compute-sanitizer, and 250 times under load: ``book/evidence/<gpu>.json``.

    python tools/evidence/sanitize.py --processes 14 --seconds 180
    python tools/evidence/sanitize.py --list             the calls, and the kernels that none of them launches; needs no GPU

What is called are the calls of the rooms' ``cases.py``: of those that are compiled for Hopper, of the small ones and of the real
ones as few, and as small ones, as launch each kernel with each value of each constant that is a flag or a name, and with each
dtype. A call in which a tool ends the process, or that takes longer than a minute, is named, and those after it get a new process.
"""

import argparse
import contextlib
import datetime
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, EVIDENCE = ROOT / "src" / "kernelbook", ROOT / "book" / "evidence"

import kernelbook  # noqa: E402, F401  # before Triton, which it sets up

# isort: split
import torch  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from kernelbook import runtime, train  # noqa: E402
from kernelbook.cases import ONE_TARGET, ROOMS, Case, collect, floats  # noqa: E402
from kernelbook.lab import record, stale  # noqa: E402

TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
BY_HAND = ("train", "distributed")  # rooms without cases
NO_PROMISE = ("layer_norm_with_locks", "scatter_ffn_with_atomics")  # their sums come in any order
REPEATS, PATIENCE = 250, 75  # seconds for a call
JIT = r"^@(?:triton|gluon)\.jit.*\n(?:@.*\n)*def (\w+_kernel)\("
ON_GPU = runtime.DEVICE.type == "cuda"
Call = Callable[[], Sequence[torch.Tensor]]

# --- the calls ------------------------------------------------------------------------------------------------------


def every_kernel() -> set[str]:
    """The names of the library's kernels, by reading it."""
    texts = [path.read_text() for path in PACKAGE.glob("*/*.py") if path.parent.name != "lab"]
    return {name for text in texts for name in re.findall(JIT, text, re.MULTILINE)}


def of_cases(room: str) -> list[tuple[str, Case, dict[str, Any]]]:
    """A room's calls: name, case and sizes."""
    module, every = importlib.import_module(f"kernelbook.{room}.cases"), collect("STUDIES", ("study",)) | collect()
    own = {name: case for kind in ("CASES", "STUDIES", "MODULES") for name, case in getattr(module, kind, {}).items()}
    found = [(name, every[name], sizes) for name, sizes in getattr(module, "compiled", lambda _: ())(ONE_TARGET)]
    found += [(name, case, {**sizes}) for name, case in own.items() for sizes in ({}, *case.real)]
    return [(name, case, {"dtype": torch.bfloat16} | sizes) for name, case, sizes in found]


def called(case: Case, sizes: dict[str, Any]) -> Call:
    """A call that returns the results, and the gradients of the arguments that have some."""
    sizes = dict(sizes)
    needs, lie = sizes.pop("needs", None), sizes.pop("lie", None)
    within = sizes.pop("within", contextlib.nullcontext)
    given = tree_map(lambda t: t.to(runtime.DEVICE) if isinstance(t, torch.Tensor) else t, case.of(**sizes))
    given |= {name: lie(given[name]).copy_(given[name]) for name in floats(given) if lie}
    leaves = [given[name].requires_grad_() for name in (case.leaves(given) if needs is None else needs)]
    upstream: list[torch.Tensor] = []

    def call() -> list[torch.Tensor]:
        with within():
            results = case.results(given)
            wanted = [t for t in results if t.requires_grad]
            upstream.extend(torch.randn_like(t) for t in wanted[len(upstream) :])
            grads = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True) if wanted else ()
        return [*results, *(t for t in grads if t is not None)]

    return call


def of_training() -> Iterator[tuple[str, Call]]:
    layout = train.Layout.of_fraction((70, 1, 130), 0.3)
    norms = torch.rand(layout.total_active, device=runtime.DEVICE)
    for shape in ((832, 2048), (70, 33), (1000,)):
        grad = torch.randn(shape, device=runtime.DEVICE)
        yield f"chunk_norms {shape}", lambda grad=grad: [train.chunk_norms(grad)]

    def selected(name: str) -> list[torch.Tensor]:
        scheduler = train.make_scheduler(name, layout)
        for _ in range(2):
            scheduler.select()
            scheduler.observe(norms)
        return [scheduler.ids]

    def stepped(shape: tuple[int, ...], inactive: str, rows: torch.Tensor, *grads: torch.Tensor) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(torch.ones(shape, device=runtime.DEVICE))
        adam = train.ChunkAdamW([weight], inactive=inactive, chunk_size=32)
        for grad in (grads[0], torch.sparse_coo_tensor(rows[None], grads[1], shape, check_invariants=True)):
            weight.grad = grad
            adam.step()
        return [weight.detach()]

    for name in ("random", "ema_topk", "knn"):
        yield f"scheduler {name}", functools.partial(selected, name)
    rows = torch.arange(64, device=runtime.DEVICE)
    for inactive in ("skip", "decay"):
        for shape in ((512, 200), (96,)):
            grads = torch.randn(shape, device=runtime.DEVICE), torch.randn(64, *shape[1:], device=runtime.DEVICE)
            yield f"ChunkAdamW {inactive} {shape}", functools.partial(stepped, shape, inactive, rows, *grads)


def of_ranks() -> Iterator[tuple[str, Call]]:
    """What is done between collectives, with all ranks' rows in the memory of one."""
    from kernelbook.distributed import exchange, windows

    tokens, hidden, slots, experts, share, ranks, size = 20, 200, 3, 7, 3, 3, 2**16
    x, grad = torch.randn(2, tokens, hidden, device=runtime.DEVICE)
    gates = torch.rand(tokens, slots, device=runtime.DEVICE)
    ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots].to(torch.int32)

    def by_messages() -> list[torch.Tensor]:
        counts = torch.empty(ranks, 2, dtype=torch.int32, device=x.device)
        places, firsts = exchange._place(ids, experts, share, ranks, counts)
        rows, pairs = counts.sum(0).tolist()
        message = exchange._Message.empty(rows, x, gates)
        sent = exchange._send(message, x, gates, ids, places, firsts, counts, experts, share)
        arrived, weights, _, of_slots = exchange._arrive(message, counts, pairs)
        out, spread, dx, dgates = (
            torch.empty_like(message.rows),
            torch.empty_like(arrived),
            *map(torch.empty_like, (x, gates)),
        )
        exchange._combine(arrived, of_slots, out)
        exchange._spread(out, of_slots, spread)
        exchange._combine(arrived, of_slots, message.rows, weights, message.weights)
        exchange._combine(message.rows, sent, dx, message.weights, dgates, ids, share, experts)
        return [out, spread, dx, dgates, *exchange._own(message, share, share, experts)]

    memory = torch.zeros(2 * size, dtype=torch.uint8, device=x.device)
    begin = torch.tensor([memory.data_ptr()], device=x.device)
    alone = SimpleNamespace(
        rank=0, ranks=1, size=size, memory=memory, addresses=(begin, begin + size), barrier=lambda: None
    )
    alone.ensure, alone.max_tokens_over_ranks = lambda _: None, int
    alone.view = functools.partial(windows.Windows.view, alone)
    leaves = [x.requires_grad_(), gates.requires_grad_()]

    def by_windows() -> list[torch.Tensor]:
        plan = windows._WindowDispatchPlan(alone, ids, experts, experts)
        y = exchange.through(lambda rows, _, weights: rows * weights.sum(1, keepdim=True), *leaves, plan)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    yield "by messages", torch.no_grad()(by_messages)
    yield "by windows", by_windows


def calls(room: str) -> list[tuple[str, Callable[[], Call]]]:
    """A room's calls: name, and what makes the call."""
    if room in BY_HAND:
        return [(name, lambda call=call: call) for name, call in (of_training() if room == "train" else of_ranks())]
    found = []
    for name, case, sizes in of_cases(room):
        told = [f"{k}={getattr(v, '__name__', v)}" for k, v in sizes.items() if k != "lie" and not torch.is_tensor(v)]
        label = " ".join([name, *["(no promise)"] * (name in NO_PROMISE), *["apart"] * ("lie" in sizes), *told])
        found.append((label.replace("torch.", ""), functools.partial(called, case, sizes)))
    return found


def features(room: str) -> list[dict[str, Any]]:
    """Of each of a room's calls what it launches on a Hopper, by recording; nothing is compiled or computed."""
    if room in BY_HAND:
        every = range(sum(1 for _ in calls(room)))
        return [{"room": room, "call": i, "size": 0, "features": [[room, i]], "kernels": []} for i in every]
    from triton.runtime.jit import JITFunction

    from kernelbook.lab import compiled

    seen: set[tuple[str, ...]] = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        launch, name = compiled._record(kernel, args, constants), kernel.__name__
        told = ((k, str(v)) for k, v in launch.constants if isinstance(v, bool | str) or k == "BLOCK_D")
        seen.update((name, *flag) for flag in told)
        seen.update((name, kind) for _, kind in launch.signature if kind.startswith("*"))
        seen.add((name,))

    found, products = [], compiled._leave_out_products()
    JITFunction.run = note
    with runtime.compiling_for(ONE_TARGET):
        for i, (_, case, sizes) in enumerate(of_cases(room)):
            within = sizes.pop("within", contextlib.nullcontext)
            seen.clear()
            with contextlib.suppress(Exception), within():
                case.launch(**sizes)
                given = case.of(**{name: value for name, value in sizes.items() if name not in ("needs", "lie")})
                size = sum(t.numel() for t in tree_leaves(given) if isinstance(t, torch.Tensor))
                call = {"room": room, "call": i, "size": size, "kernels": sorted({name for name, *_ in seen})}
                found.append(call | {"features": sorted(seen)})
    products._destroy()
    return found


# --- in a process of its own ----------------------------------------------------------------------------------------


def products_elsewhere() -> None:
    """PyTorch's matrix products on the CPU: racecheck ends in those that cuBLAS has for Hopper, with no kernel of ours."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        function = getattr(torch.ops.aten, name)

        def on_cpu(*args: Any, out: Any = None, function: Any = function, **how: Any) -> torch.Tensor:
            result = function(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args), **how)
            return result.to(runtime.DEVICE) if out is None else out.copy_(result)

        library.impl(name, on_cpu, "CUDA")
        library.impl(f"{name}.out", on_cpu, "CUDA")
    products_elsewhere.kept = library  # type: ignore[attr-defined]


def repeated(call: Call) -> dict[str, int]:
    """How often the call ran, and how often its bits were not those of the first time, under load on a second stream."""

    def bits() -> list[torch.Tensor]:
        return [t.detach().contiguous().view(-1).view(torch.uint8) for t in call()]

    first = [t.clone() for t in bits()]
    busy, other = torch.randn(2048, 2048, device=runtime.DEVICE), torch.cuda.Stream() if ON_GPU else None
    different = torch.zeros((), dtype=torch.int64, device=runtime.DEVICE)
    for i in range(REPEATS):
        with torch.cuda.stream(other):
            for _ in range(i % 3 * ON_GPU):  # now more, now less of the GPU is free
                torch.mm(busy, busy)
        different += torch.stack([(a != b).any() for a, b in zip(bits(), first, strict=True)]).any()
    return {"repeats": REPEATS, "different": int(different)}


def wait() -> None:
    """For the device; raises what went wrong there."""
    if ON_GPU:
        torch.cuda.synchronize()


def make_calls(job: str, items: Sequence[str]) -> None:
    """Make these calls (room:number), once or again and again, and say of each what came of it."""
    from kernelbook.launch import Launch

    launched, launch = set[str](), Launch.__call__

    def noting(self: Launch, grid: tuple[int, ...], *args: Any) -> None:
        launched.add(self.kernel.fn.__name__)
        launch(self, grid, *args)

    Launch.__call__ = noting  # type: ignore[method-assign]
    if job == "racecheck":
        products_elsewhere()
    known: dict[str, list[tuple[str, Callable[[], Call]]]] = {}
    for item in items:
        room, number = item.split(":")
        torch.manual_seed(0)
        name, make = known.setdefault(room, calls(room))[int(number)]
        print(f"call: {room}: {name}", flush=True)
        launched.clear()
        signal.alarm(PATIENCE)  # ends the process, whatever it waits for
        try:
            call = make()
            told = repeated(call) if job == "repeats" else {"results": len(call())}
            wait()
            print("well:", json.dumps({"kernels": sorted(launched)} | told), flush=True)
        except Exception:
            traceback.print_exc()
            told = {"kernels": sorted(launched), "error": traceback.format_exc().splitlines()[-1][:300]}
            print("failed:", json.dumps(told), flush=True)
            wait()  # raises again where the GPU is lost for this process
        signal.alarm(0)


# --- all of it ------------------------------------------------------------------------------------------------------


def command(*arguments: str, **more: str) -> dict[str, Any]:
    """This program in a process of its own, as ``subprocess`` takes it."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more
    return {"args": [sys.executable, __file__, *arguments], "env": environment, "text": True}


def chosen(pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """As few calls, and as small ones, as have all features; the largest first."""

    def of_room(room: str) -> list[dict[str, Any]]:
        how = command("--features", room, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
        told = json.loads(subprocess.run(**how, stdout=subprocess.PIPE, check=True).stdout)
        return [call | {"features": {*map(tuple, call["features"])}} for call in told]

    every = [call for of in pool.map(of_room, [*ROOMS, *BY_HAND]) for call in of]
    taken, counts = [], Counter[tuple[Any, ...]]()
    for call in sorted(every, key=lambda call: call["size"]):
        if call["features"] - counts.keys():
            taken.insert(0, call)
            counts.update(call["features"])
    for call in list(taken):  # what smaller ones have made superfluous
        if all(counts[feature] > 1 for feature in call["features"]):
            taken.remove(call)
            counts.subtract(call["features"])
    return taken


def told_in(logs: Sequence[Path]) -> list[dict[str, Any]]:
    """The calls that were begun: room, name, how they ended, and what was told then."""
    found: list[dict[str, Any]] = []
    for line in "\n".join(log.read_text(errors="replace") for log in logs).splitlines():
        kind, _, text = line.partition(": ")
        if kind == "call":
            room, name = text.split(": ", 1)
            found.append({"room": room, "name": name.strip(), "end": "died", "kernels": []})
        elif kind in ("well", "failed") and found:
            found[-1] |= {"end": kind} | json.loads(text)
    return found


def of_tool(tool: str, logs: Sequence[Path], wanted: Counter[str]) -> dict[str, dict[str, Any]]:
    """By room what a tool said; of kernels that rooms share in each of them. A report is a line, and the next says where."""
    text, found = "\n".join(log.read_text(errors="replace") for log in logs), {}
    lines = re.findall(r"========= (?!COMPUTE|ERROR|RACECHECK|Internal|\s)(.*\n=========\s+.*)", text)
    reports = [re.sub(r"\n=========\s+(at )?", " ", line) for line in lines]
    for room, count in sorted(wanted.items()):
        begun = [call for call in told_in(logs) if call["room"] == room]
        launched = sorted({kernel for call in begun for kernel in call["kernels"]})
        ours = [(k, r) for r in reports for k in re.findall(r"\b_\w+_kernel\b", r)[:1] if k in launched]
        ends = Counter(call["end"] for call in begun)
        summary = f"{len(ours)} reports" + ", a call failed" * (ends["failed"] > 0)
        found[f"{room} {tool}"] = {
            "tool": tool,
            "summary": summary + f", ran out of time after {len(begun)} of {count} calls" * (len(begun) < count),
            "clean": not ours and ends["well"] == count,
            "calls": len(begun),
            "tool died in": [call["name"] for call in begun if call["end"] == "died"],
            "launched": launched,
            "kernels": Counter(kernel for kernel, _ in ours).most_common(),
            "reports": Counter(
                re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d{4,}", "#", r)[:200] for _, r in ours
            ).most_common(6),
        }
    return found


def watching(tool: str) -> list[str]:
    """The command that watches our kernels only; initcheck has to see who writes memory, so it watches PyTorch's too."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    only = [text for name in sorted(every_kernel()) for text in ("--kernel-name", f"kne={name}")]
    probe = subprocess.run([program, *only, "/bin/true"], capture_output=True, text=True, check=False)
    if tool == "initcheck" or re.search(r"more than once|unrecogni[sz]ed|invalid", probe.stdout + probe.stderr):
        only = []
    return [program, "--tool", tool, "--print-limit", "2000", "--show-backtrace", "no", *only]


def made_in(folder: Path, job: str, part: int, items: list[str], until: float) -> list[Path]:
    """Make calls under a tool or without, in one process after the other where one does not come to their end -> the logs."""
    logs, before, more = [], watching(job) if job in TOOLS else [], {}
    if before:  # each tensor in memory of its own, so that its neighbours are not part of it
        more["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    while items and (left := until - time.monotonic()) > 0:
        logs.append(folder / f"{job}_{part}_{len(items)}.log")
        how = command("--run", job, *items, **more)
        how["args"] = [*before, *how["args"]]
        with logs[-1].open("w") as file:
            process = subprocess.Popen(**how, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        begun = len(told_in(logs[-1:]))
        items = items[begun:] if begun else []
    return logs


def keep(path: Path, logs: dict[str, list[Path]], wanted: Counter[str]) -> dict[str, Any]:
    """The record with what stands in the logs, written."""
    told: dict[str, Any] = {"gpu": runtime.properties().name, "fuzz": {}}
    told |= json.loads(path.read_text()) if path.exists() else {}
    runs = [of_tool(tool, logs[tool], wanted) for tool in TOOLS if tool in logs]
    today = {"date": datetime.date.today().isoformat(), "commit": stale.commit(), "kernels": sorted(every_kernel())}
    told["sanitizers"] = today | {"runs": {name: run for of in runs for name, run in of.items()}}
    told["repeats"] = {
        f"{call['room']}: {call['name']}": {name: call[name] for name in ("repeats", "different")}
        for call in told_in(logs.get("repeats", [])) if call["end"] == "well"
    }  # fmt: skip
    path.with_suffix(".part").write_text(json.dumps(told, indent=1) + "\n")
    path.with_suffix(".part").replace(path)
    return told


def campaign(given: argparse.Namespace, pool: ThreadPoolExecutor, until: float) -> None:
    """Warm the caches, then have every tool and the repeats side by side, until all has run or the time is up."""
    picked, logs = chosen(pool), defaultdict[str, list[Path]](list)
    items = [f"{call['room']}:{call['call']}" for call in picked]
    for jobs in (["warm"], given.jobs):
        running = {}
        for job in jobs:
            count = {"warm": given.processes, "repeats": 2}.get(job, max(1, (given.processes - 2) // 2))
            for i in range(count):
                running[pool.submit(made_in, given.logs, job, i, items[i::count], until)] = job
        for ended in as_completed(running):
            job = running[ended]
            logs[job] += ended.result()
            told = keep(given.out / f"{record.device_slug()}.json", logs, Counter(call["room"] for call in picked))
            print(
                f"{until - time.monotonic():4.0f} s left: {job} {len(told_in(logs[job]))} of {len(items)}", flush=True
            )
    for job, of in logs.items():
        every = told_in(of)
        seen = {kernel for call in every for kernel in call["kernels"]}
        print(f"{job}: {len(every)} of {len(items)} calls; kernels of no call: {sorted(every_kernel() - seen)}")
        for call in every:
            if call["end"] != "well" or call.get("different"):
                print("  ", call)
    for name, run in told["sanitizers"]["runs"].items():
        if not run["clean"]:
            print(name, run["summary"], run["kernels"], run["reports"][:2])


def listed(given: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Print the calls, and the kernels that none launches; calls without cases are made, in the interpreter."""
    picked = chosen(pool)
    by_hand = [f"{call['room']}:{call['call']}" for call in picked if call["room"] in BY_HAND]
    os.environ["TRITON_INTERPRET"] = "1"
    made = told_in(made_in(given.logs, "listed", 0, by_hand, float("inf")))
    for call in picked:
        print(f"{call['room']}:{call['call']} {call['size']:,} {' '.join(call['kernels'])}")
    missing = every_kernel() - {kernel for call in [*picked, *made] for kernel in call["kernels"]}
    print(f"{len(picked)} calls; kernels of no call: {sorted(missing)}")


def main() -> None:
    """Writes the record of the GPU at hand, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only list the calls, and the kernels that none launches")
    parser.add_argument("--jobs", nargs="*", default=["racecheck", "memcheck", "repeats", "synccheck", "initcheck"])
    parser.add_argument("--processes", type=int, default=max(4, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    parser.add_argument("--logs", type=Path, default=ROOT / "_build" / "sanitizers")
    parser.add_argument("--features", help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.features:
        print(json.dumps(features(given.features)))
    elif given.run:
        make_calls(given.run[0], given.run[1:])
    else:
        given.logs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(given.processes) as pool:
            (listed(given, pool) if given.list else campaign(given, pool, time.monotonic() + given.seconds))


if __name__ == "__main__":
    main()
