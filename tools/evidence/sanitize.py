"""Runs every kernel under NVIDIA's compute-sanitizer, and 250 times under load: ``book/evidence/<gpu>.json``.

    python tools/evidence/sanitize.py --processes 14 --seconds 180

Calls are those of the rooms' ``cases.py``: as few, and as small ones, as launch each kernel with each dtype, and with each value
of each constant that is a flag or a name. A call that fails, ends the process, or takes longer than a minute, is named, and those
after it get a new process.
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

import kernelbook  # noqa: F401  # before Triton, which it sets up

# isort: split
import torch
from torch.utils._pytree import tree_leaves, tree_map

from kernelbook import runtime, train
from kernelbook.cases import ONE_TARGET, ROOMS, Case, collect, floats
from kernelbook.lab import compiled, record, stale
from kernelbook.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, LOGS = ROOT / "src" / "kernelbook", ROOT / "_build" / "sanitizers"
PLAIN = ("record", "warm", "repeats")  # jobs without a tool
NO_PROMISE = ("layer_norm_with_locks", "scatter_ffn_with_atomics")  # their sums come in any order
REPEATS, PATIENCE = 250, 75  # seconds for a call
JIT = r"^@(?:triton|gluon)\.jit.*\n(?:@.*\n)*def (\w+_kernel)\("
ON_GPU = runtime.DEVICE.type == "cuda"
Call = Callable[[], Sequence[torch.Tensor]]


def every_kernel() -> set[str]:
    """The names of the library's kernels, by reading it."""
    texts = [path.read_text() for path in PACKAGE.glob("*/*.py") if path.parent.name != "lab"]
    return {name for text in texts for name in re.findall(JIT, text, re.MULTILINE)}


# --- the calls ------------------------------------------------------------------------------------------------------


def called(case: Case, sizes: dict[str, Any]) -> Call:
    """A call that returns the results, and the gradients of the arguments that have some."""
    sizes = dict(sizes)
    needs, lie = sizes.pop("needs", None), sizes.pop("lie", None)
    within = sizes.pop("within", contextlib.nullcontext)
    given = tree_map(lambda t: t.to(runtime.DEVICE) if isinstance(t, torch.Tensor) else t, case.of(**sizes))
    given |= {name: lie(given[name]).copy_(given[name]) for name in floats(given) if lie}
    leaves = [given[name].requires_grad_() for name in (case.leaves(given) if needs is None else needs)]

    def call() -> list[torch.Tensor]:
        with within():
            results = case.results(given)
            wanted = [t for t in results if t.requires_grad]
            upstream = [t.detach() for t in wanted]
            grads = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True) if wanted else ()
        return [*results, *(t for t in grads if t is not None)]

    return call


def of_training() -> Iterator[tuple[str, Call]]:
    layout = train.Layout.of_fraction((70, 1, 130), 0.3)

    def trained(name: str, inactive: str) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(torch.ones(512, 200, device=runtime.DEVICE))
        scheduler = train.make_scheduler(name, layout)
        adam = train.ChunkAdamW([weight], inactive=inactive, chunk_size=32)
        grad, rows = torch.full_like(weight, 0.1), torch.arange(64, device=runtime.DEVICE)
        for weight.grad in (grad, torch.sparse_coo_tensor(rows[None], grad[:64], grad.shape, check_invariants=True)):
            scheduler.select()
            scheduler.observe(torch.ones(layout.total_active, device=runtime.DEVICE))
            adam.step()
        return [scheduler.ids, weight.detach()]

    for given in (("random", "skip"), ("ema_topk", "decay"), ("knn", "skip")):
        yield " ".join(given), functools.partial(trained, *given)


def of_ranks() -> Iterator[tuple[str, Call]]:
    """What a rank does around collectives, for a group of one."""
    from kernelbook.distributed import exchange, windows

    tokens, slots, experts, size = 20, 3, 7, 2**16
    x, grad = torch.randn(2, tokens, 200, device=runtime.DEVICE)
    gates = torch.rand(tokens, slots, device=runtime.DEVICE)
    ids = torch.rand(tokens, experts, device=runtime.DEVICE).argsort(1)[:, :slots].to(torch.int32)
    leaves = [x.requires_grad_(), gates.requires_grad_()]
    all_to_all = lambda out, given, *_, **__: out.copy_(given)  # noqa: E731
    exchange.dist = SimpleNamespace(get_world_size=lambda _: 1, all_to_all_single=all_to_all)
    exchange.wait_for_counts = lambda _: [[(tokens, tokens * slots)]] * 2
    memory = torch.zeros(2 * size, dtype=torch.uint8, device=x.device)
    begin = torch.tensor([memory.data_ptr()], device=x.device)
    alone = SimpleNamespace(rank=0, ranks=1, size=size, memory=memory, addresses=(begin, begin + size))
    alone.barrier, alone.ensure, alone.max_tokens_over_ranks = lambda: None, lambda _: None, int
    alone.view = functools.partial(windows.Windows.view, alone)

    def passed(plan_of: Callable[..., Any], way: Any) -> list[torch.Tensor]:
        plan = plan_of(way, ids, experts, experts)
        y = exchange.through(lambda rows, _, weights: rows * weights.sum(1, keepdim=True), *leaves, plan)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    yield "by windows", functools.partial(passed, windows._WindowDispatchPlan, alone)
    yield "by messages", functools.partial(passed, lambda group, *given: exchange._DispatchPlan(*given, group), None)


BY_HAND = {"train": of_training, "distributed": of_ranks}  # rooms without cases


@functools.cache
def calls(room: str) -> list[tuple[str, Callable[[], Call]]]:
    """A room's calls: name, and what makes the call."""
    if room in BY_HAND:
        return [(name, lambda call=call: call) for name, call in BY_HAND[room]()]
    module, every = importlib.import_module(f"kernelbook.{room}.cases"), collect("STUDIES", ("study",)) | collect()
    own = {name: case for kind in ("CASES", "STUDIES", "MODULES") for name, case in getattr(module, kind, {}).items()}
    given = [(name, every[name], sizes) for name, sizes in getattr(module, "compiled", lambda _: ())(ONE_TARGET)]
    given += [(name, case, {**sizes}) for name, case in own.items() for sizes in ({}, *case.real)]
    found = []
    for name, case, sizes in given:
        sizes = {"dtype": torch.bfloat16} | sizes
        named = {k: getattr(v, "func", v) for k, v in sizes.items() if k != "lie" and not torch.is_tensor(v)}
        told = [f"{k}={getattr(v, '__name__', v)}" for k, v in named.items()]
        label = " ".join([name, *["(no promise)"] * (name in NO_PROMISE), *["apart"] * ("lie" in sizes), *told])
        found.append((label.replace("torch.", ""), functools.partial(called, case, sizes)))
    return found


# --- in a process of its own ----------------------------------------------------------------------------------------


def products_elsewhere() -> torch.library.Library:
    """PyTorch's matrix products on the CPU: racecheck ends in those that cuBLAS has for Hopper, with no kernel of ours."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        function = getattr(torch.ops.aten, name)

        def on_cpu(*args: Any, out: Any = None, function: Any = function, **how: Any) -> torch.Tensor:
            result = function(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args), **how)
            return result.to(runtime.DEVICE) if out is None else out.copy_(result)

        library.impl(name, on_cpu, "CUDA")
        library.impl(f"{name}.out", on_cpu, "CUDA")
    return library


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


def make_calls(job: str, items: Sequence[str]) -> None:
    """Make these calls (room:number), once or again and again, and say of each what came of it; the first that fails is the last.

    To record a room is to make all its calls and to launch nothing, where there is neither a GPU nor the interpreter.
    """
    launched, launch = set[str](), Launch.__call__

    def noting(self: Launch, grid: tuple[int, ...], *args: Any) -> None:
        name = self.kernel.fn.__name__
        launched.add(name)
        if job != "record":
            return launch(self, grid, *args)
        told = [f"{k}={v}" for k, v in self.constants.items() if isinstance(v, bool | str) or k == "BLOCK_D"]
        told += [str(t.dtype) for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        launched.update(f"{name} {what}" for what in told)

    Launch.__call__ = noting
    kept = {"record": compiled._leave_out_products, "racecheck": products_elsewhere}.get(job, list)()  # noqa: F841
    if job == "record":
        runtime.compile_target = runtime.TARGETS[ONE_TARGET]
        items = [f"{items[0]}:{i}" for i in range(len(calls(items[0])))]
    for item in items:
        room, number = item.split(":")
        torch.manual_seed(0)
        name, make = calls(room)[int(number)]
        print("call:", json.dumps({"item": item, "room": room, "name": name}), flush=True)
        launched.clear()
        signal.alarm(PATIENCE)  # ends the process, whatever it waits for
        try:
            call = make()
            told: dict[str, Any] = repeated(call) if job == "repeats" else {"size": sum(t.numel() for t in call())}
            if ON_GPU:
                torch.cuda.synchronize()
            told["end"] = "well"
        except Exception as error:
            traceback.print_exc()
            told = {"end": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
        signal.alarm(0)
        print("ended:", json.dumps(told | {"launched": sorted(launched)}), flush=True)
        if told["end"] == "failed" and job != "record":  # the GPU may be lost for this process
            break


# --- all of it ------------------------------------------------------------------------------------------------------


def told_in(logs: Sequence[Path]) -> list[dict[str, Any]]:
    """The calls that were begun: item, room, name, how they ended, and what was told then."""
    found: list[dict[str, Any]] = []
    for line in "\n".join(log.read_text(errors="replace") for log in logs).splitlines():
        kind, _, text = line.partition(": ")
        with contextlib.suppress(json.JSONDecodeError):  # of a line that was cut off
            if kind == "call":
                found.append({"end": "died", "launched": []} | json.loads(text))
            elif kind == "ended":
                found[-1] |= json.loads(text)
    return found


def kernels_of(calls: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the kernels that these calls launched."""
    return sorted({launched.split()[0] for call in calls for launched in call["launched"]})


def of_tool(tool: str, logs: Sequence[Path], wanted: Counter[str]) -> dict[str, dict[str, Any]]:
    """By room what a tool said; of kernels that rooms share in each of them. A report is a line, and the next says where."""
    text, found = "\n".join(log.read_text(errors="replace") for log in logs), {}
    pairs = re.findall(r"========= (?!COMPUTE|ERROR|RACECHECK|Internal|\s)(.*)\n=========\s+(?:at )?(.*)", text)
    reports = [" ".join(pair) for pair in pairs]
    for room, count in sorted(wanted.items()):
        begun = [call for call in told_in(logs) if call["room"] == room]
        launched = kernels_of(begun)
        ours = [(k, r) for r in reports for k in re.findall(r"\b_\w+_kernel\b", r)[:1] if k in launched]
        ends = Counter(call["end"] for call in begun)
        texts = [re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d{4,}", "#", report)[:200] for _, report in ours]
        summary = f"{len(ours)} reports" + ", a call failed" * (ends["failed"] > 0)
        found[f"{room} {tool}"] = {
            "tool": tool,
            "summary": summary + f", ran out of time after {len(begun)} of {count} calls" * (len(begun) < count),
            "clean": not ours and ends["well"] == count,
            "calls": len(begun),
            "tool died in": [call["name"] for call in begun if call["end"] == "died"],
            "launched": launched,
            "kernels": Counter(kernel for kernel, _ in ours).most_common(),
            "reports": Counter(texts).most_common(6),
        }
    return found


def watching(tool: str) -> list[str]:
    """The command that watches our kernels only, where this version of the sanitizer can."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    only = [text for name in sorted(every_kernel()) for text in ("--kernel-name", f"kne={name}")]
    probe = subprocess.run([program, *only, "/bin/true"], capture_output=True, text=True, check=False)
    if re.search(r"more than once|unrecogni[sz]ed|invalid", probe.stdout + probe.stderr):
        only = []
    return [program, "--tool", tool, "--print-limit", "2000", "--show-backtrace", "no", *only]


def made_in(job: str, part: Any, items: list[str], until: float) -> list[Path]:
    """Make calls under a tool or without, in one process after the other where one does not come to their end -> the logs."""
    logs, before = [], [] if job in PLAIN else watching(job)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if job == "record":
        environment |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    elif before:  # each tensor in memory of its own, so that its neighbours are not part of it
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    while items and (left := until - time.monotonic()) > 0:
        logs.append(LOGS / f"{job}_{part}_{len(items)}.log")
        command = [*before, sys.executable, __file__, "--run", job, *items]
        with logs[-1].open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        begun = len(told_in(logs[-1:]))
        items = items[begun:] if begun else []
    return logs


def chosen(pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """As few calls, and as small ones, as launch all that any call launches; the largest first."""
    rooms = [*ROOMS, *BY_HAND]
    logs = [log for of in pool.map(lambda room: made_in("record", room, [room], float("inf")), rooms) for log in of]
    taken, counts = [], Counter[str]()
    for call in sorted((call for call in told_in(logs) if call["end"] == "well"), key=lambda call: call["size"]):
        if not counts.keys() >= {*call["launched"]}:
            taken.insert(0, call)
            counts.update(call["launched"])
    for call in list(taken):  # what smaller ones have made superfluous
        if all(counts[launched] > 1 for launched in call["launched"]):
            taken.remove(call)
            counts.subtract(call["launched"])
    return taken


def keep(logs: dict[str, list[Path]], wanted: Counter[str]) -> None:
    """Write what stands in the logs into the record."""
    path = ROOT / "book" / "evidence" / f"{record.device_slug()}.json"
    told: dict[str, Any] = {"gpu": runtime.properties().name, "fuzz": {}}
    told |= json.loads(path.read_text()) if path.exists() else {}
    told["sanitizers"] = {
        "date": datetime.date.today().isoformat(),
        "commit": stale.commit(),
        "kernels": sorted(every_kernel()),
        "runs": {k: run for job in logs if job not in PLAIN for k, run in of_tool(job, logs[job], wanted).items()},
    }
    told["repeats"] = {
        f"{call['room']}: {call['name']}": {name: call[name] for name in ("repeats", "different")}
        for call in told_in(logs.get("repeats", [])) if call["end"] == "well"
    }  # fmt: skip
    record.replace_file(path, json.dumps(told, indent=1) + "\n")


def campaign(given: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Warm the caches, then have every tool and the repeats side by side, until all has run or the time is up."""
    until = time.monotonic() + given.seconds
    items, logs = [call["item"] for call in chosen(pool)], defaultdict[str, list[Path]](list)
    for jobs in (["warm"], given.jobs):
        running = {}
        for job in jobs:
            count = {"warm": given.processes, "repeats": 2}.get(job, max(1, (given.processes - 2) // 2))
            for i in range(count):
                running[pool.submit(made_in, job, i, items[i::count], until)] = job
        for ended in as_completed(running):
            job = running[ended]
            logs[job] += ended.result()
            keep(logs, Counter(item.split(":")[0] for item in items))
            left = until - time.monotonic()
            print(f"{left:4.0f} s left: {job} {len(told_in(logs[job]))} of {len(items)}", flush=True)
    for job in logs:
        calls = told_in(logs[job])
        missing = every_kernel() - {*kernels_of(calls)}
        print(f"{job}: {len(calls)} of {len(items)} calls; kernels of no call: {sorted(missing)}")
        for call in calls:
            if call["end"] != "well" or call.get("different"):
                print("  ", call)


def main() -> None:
    """Writes the record of the GPU at hand, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", default=["racecheck", "memcheck", "repeats"])
    parser.add_argument("--processes", type=int, default=max(4, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        return make_calls(given.run[0], given.run[1:])
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.processes) as pool:
        campaign(given, pool)


if __name__ == "__main__":
    main()
