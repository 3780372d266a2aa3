"""``python -m kernelbook``: does this machine work, how fast is it, is a kernel or a model right, a training run, a profile."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kernelbook
from kernelbook import check, memory, runtime
from kernelbook.lab import bench as registry
from kernelbook.lab import older, profiling, record, timing
from kernelbook.train import command as training

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["main"]

WITHOUT_TENSOR_CORES = (
    "float16 and float32; bfloat16 is right, and several times slower. Triton has no tensor cores before Ampere: attention and "
    "experts do without, sparse layers and lists of neurons have them by cuBLAS"
)
# What a command needs beside the package's own requirements: of the extras ``lab`` and ``interop``.
NEEDS = {"bench": ("pandas", "tabulate", "tqdm"), "profile": ("tabulate",), "check-model": ("transformers",)}


# --- doctor ---------------------------------------------------------------------------------------------------------


def _machine() -> list[tuple[str, str]]:
    p = runtime.properties()
    import triton

    lines = [
        ("kernels are", "interpreted on the CPU" if runtime.INTERPRET else "compiled"),
        ("GPU", p.name if runtime.HAS_GPU else runtime.TOO_OLD or "none found: kernels are right here, but not fast"),
        ("kernelbook", str(Path(kernelbook.__file__).parent)),
        ("Python", sys.version.split()[0]),
        ("torch", torch.__version__),
        ("triton", triton.__version__),
    ]
    if runtime.DEVICE.type == "cuda":
        lines += [
            ("architecture", p.arch),
            ("multiprocessors", str(p.num_sms)),
            ("shared memory", f"{p.shared_memory_per_program / 1024:.0f} KiB a program"),
            ("registers", f"{p.registers_per_sm} a multiprocessor"),
            ("L2 cache", f"{p.l2_bytes / 2**20:.0f} MiB"),
        ]
        if not p.has_tensor_cores:
            lines.append(("to expect", WITHOUT_TENSOR_CORES))
    return lines


def _host_costs() -> list[tuple[str, float]]:
    """Microseconds of the host for PyTorch's cheapest operator, one launch, and each bench's ``host_calls()``."""
    from kernelbook.launch import Launch
    from kernelbook.layer_norm import kernels

    x, y = (torch.ones(64, 256, dtype=torch.bfloat16, device=runtime.DEVICE) for _ in range(2))
    constants = {"WITH_DW": True, "WITH_DB": False, "ACC": memory.tl_accumulator(x.dtype), "BLOCK_G": 64, "BLOCK_N": 16}
    launch = Launch(kernels._layer_norm_bwd_sum_kernel, **constants)
    calls: dict[str, Callable[[], object]] = {
        "torch.add(x, 1, out=y)": lambda: torch.add(x, 1, out=y),
        "one launch": lambda: launch((16, 1), x, x, y, y, 64, 256),
        "the same, kernel[grid](...)": lambda: launch.kernel[(16, 1)](x, x, y, y, 64, 256, **launch.constants),
    }
    for one in registry.benches(registry.CASE_BY_CASE):
        calls.update(one.host_calls())
    return [(name, timing.host_us(call)) for name, call in calls.items()]


def _check_room(room: str) -> list[check.Verdict]:
    """The room's small checks; a check that raises is a failed one."""
    try:
        return registry.bench(room).checks()
    except Exception as error:  # a broken kernel can raise anything; doctor has to go on and tell
        print(f"{room}: {type(error).__name__}: {error}", file=sys.stderr)
        return [check.Verdict(f"{room}: {type(error).__name__}", float("nan"), 0.0, 0.0, 0.0)]


def doctor() -> int:
    """Prints what this machine is and whether every public function is right on it; 1 if one is not."""
    for name, value in _machine():
        print(f"{name:15}  {value}")
    if runtime.COMPILE_ONLY:
        print("\nTRITON_INTERPRET=0 without a GPU: kernels can be compiled but not run, so nothing was checked.")
        return 1
    if runtime.DEVICE.type == "cuda":
        ceilings = timing.measure_ceilings(quick=True)
        print(
            f"\nceilings (a quick measurement): copy {ceilings.copy_gbs:.0f} GB/s, "
            f"bf16 {ceilings.bf16_tflops:.0f} TFLOP/s, tf32 {ceilings.tf32_tflops:.0f} TFLOP/s"
        )
    print(f"\n{'check':60}  error    limit")
    verdicts = []
    for room in registry.CASE_BY_CASE:
        for v in _check_room(room):
            verdicts.append(v)
            print(f"{v.name:60}  {v.error:.1e}  {v.limit:.1e}  {'ok' if v.passed else 'FAILED'}", flush=True)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if runtime.DEVICE.type == "cuda" and not failed:
        print(f"\n{'what a call costs the host, small tensors':60}      us")
        for name, us in _host_costs():
            print(f"{name:60}  {us:6.1f}")
    print(
        f"\n{len(verdicts) - len(failed)} of {len(verdicts)} checks passed."
        + (" Something is broken." if failed else "")
    )
    return 1 if failed else 0


# --- bench ----------------------------------------------------------------------------------------------------------


def _can_measure() -> bool:
    return runtime.DEVICE.type == "cuda"


def bench(
    names: Sequence[str],
    out: Path,
    rep_ms: float,
    select: str | None,
    layers: int | None = None,
    only: str | None = None,
    part: tuple[int, int] = (0, 1),
    warm: bool = False,
    missing: bool = False,
    behind: str | None = None,
) -> int:
    """Measures rooms, their cases and then those of models, and records the rows under ``out``; 1 if a result of ours was not correct, 2 without a GPU.

    The rows of a case are written before the next one is measured: a run that is stopped keeps what it has. ``only`` is
    ``room`` or ``models``; ``part`` (i, n) takes each n-th case; ``warm`` calls every provider once and records nothing;
    ``missing`` leaves out what ``out`` has rows of today's sources of; ``behind`` has what ``make older`` printed, and all else is
    left out.
    """
    if not _can_measure():
        print("bench: no GPU runs kernels here, and the interpreter's times say nothing about one.", file=sys.stderr)
        return 2
    if runtime.autotune_enabled():
        print("bench: KERNELBOOK_AUTOTUNE must not be set: rows are of what the rules choose", file=sys.stderr)
        return 2
    try:
        record.check_folder("bench", out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = out / runtime.device_slug()
    listed = None if behind is None else older.listed(behind, runtime.device_slug())
    code = 0
    for room in names:
        one = registry.bench(room)
        if one.cases is not None and layers is not None:
            print(f"bench: {room} does not take --layers", file=sys.stderr)
            return 2
        if one.cases is None:
            code = max(code, _run(one, folder, select=select, layers=layers))
            continue
        lists = {} if only == "models" else {room: one.cases()}
        lists |= {} if only == "room" else {"models": one.models()}
        chosen = {
            stem: [
                case
                for case in found
                if re.search(select or "", str(case)) and (listed is None or (stem, str(case)) in listed)
            ][part[0] :: part[1]]
            for stem, found in lists.items()
        }
        print(f"{room}: {sum(map(len, chosen.values()))} cases on {runtime.properties().name}", flush=True)
        for note in one.missing():
            print(f"left out: {note}")
        if warm:
            for case in (case for cases in chosen.values() for case in cases):
                _warm(case)
                torch.cuda.empty_cache()  # for processes beside this one
            continue
        failures = []
        for stem, cases in chosen.items():
            there = _measured(folder / f"{stem}.csv", one.package()) if missing else set()
            cases = [case for case in cases if case.key not in there]
            failures += _bench_cases(one, stem, cases, folder, rep_ms) if cases else []
        if select is None and listed is None and only != "models" and part[0] == 0:
            failures += _bench_extras(one, folder)
        for failure in failures:
            print(f"NOT RECORDED: {failure}", file=sys.stderr)
        code = max(code, 1 if failures else 0)
    if not warm:
        record.drop_unused_ceilings(folder)
    return code


def _measured(path: Path, package: str) -> set[tuple[str, ...]]:
    """The keys of the cases of which a file has rows of this version."""
    import pandas as pd

    if not path.exists():
        return set()
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    columns = [name for name in record.KEY if name != "provider"]
    return set(rows.loc[rows["package"] == package, columns].itertuples(index=False, name=None))


def _run(one: registry.Bench, folder: Path, **given: Any) -> int:
    """Runs a bench with a table and a clock of its own; 2 where it does not take an option that was given."""
    assert one.run is not None
    wrong = [name for name, value in given.items() if value is not None and name not in one.options]
    if wrong:
        print(f"bench: {one.name} does not take --{wrong[0]}", file=sys.stderr)
        return 2
    return one.run(folder, **{name: given[name] for name in one.options})


def _warm(case: timing.Case) -> None:
    """Calls every provider once, so that the compilers' caches on disk are full before anything is measured."""

    def attempt(what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # measuring says more; here the others matter
            print(f"not warmed: {what}: {type(error).__name__}: {error}", file=sys.stderr)

    problem = attempt(str(case), case.build)
    for provider, call in problem.providers.items() if isinstance(problem, timing.Problem) else ():
        attempt(f"{case}: {provider}", call)


def _bench_cases(
    one: registry.Bench, stem: str, cases: Sequence[timing.Case], folder: Path, rep_ms: float
) -> list[str]:
    """Measures the cases, writes and prints the rows of each as they come, and returns the failures."""
    from tabulate import tabulate
    from tqdm import tqdm

    package, dated = one.package(), older.dates_of(one)
    ceilings = timing.measure_ceilings()
    recorded: set[str] = set()

    def keep(rows: pd.DataFrame) -> None:
        run = rows["run"].iloc[0]
        if run not in recorded:  # the ceilings first: no row without those of its run
            row = timing.ceilings_row(ceilings, run, package)
            record.write_results(folder / "ceilings.csv", row, key=("run",))
            recorded.add(run)
        record.write_results(folder / f"{stem}.csv", rows)
        first = rows.iloc[0]
        shown = rows[["provider", "ms", "host_us", "peak_mib", "err_ratio"]]
        tqdm.write(f"\n{first['mode']} {first['dtype']} {first['shape']} {first['x_name']}={first['x']}")
        tqdm.write(tabulate(shown, headers="keys", showindex=False, disable_numparse=True))

    return timing.run_cases(cases, package=package, rep_ms=rep_ms, dated=dated, record=keep)[1]


def _bench_extras(one: registry.Bench, folder: Path) -> list[str]:
    """Measures and writes the tables of another kind, one by one, and returns the failures."""
    from tabulate import tabulate

    try:
        for stem, table, key in one.extras() if one.extras is not None else ():
            record.write_results(folder / f"{stem}.csv", table, key=key)
            print(tabulate(table.to_dict("records"), headers="keys"), flush=True)
    except Exception as error:  # the room's own rows are written already and count
        return [f"{one.name}, extras: {type(error).__name__}: {error}"]
    return []


# --- judge ----------------------------------------------------------------------------------------------------------


def judge(file: Path | None, task: str | None, hints: int, seed: int | None) -> int:
    """Judges a file, or lists the tasks; 0 if it is right, 1 if not, 2 if there is nothing to judge."""
    from kernelbook.lab import judge as judging

    if file is None and task is None:
        for one in judging.TASKS.values():
            print(f"{one.name:18} {one.says}")
        return 0
    try:
        if file is None or task is None:
            raise ValueError(f"judge: a file and --task must come together, got {file or f'--task {task}'} alone")
        found = judging.judge(file, task, hints=hints, seed=seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(found)
    return 0 if found.right else 1


# --- check-model ----------------------------------------------------------------------------------------------------


def check_model(given: argparse.Namespace) -> int:
    """Loads a model, runs it on the kernels and checks it; 0 if it is right, 1 if not, 2 if there is none."""
    names = "config.json", "adapter_config.json"
    try:
        has_config, has_adapter = ((given.folder / name).is_file() for name in names)
    except OSError:  # such as a name that is too long
        has_config = has_adapter = False
    if not (has_config or has_adapter):
        print(f"check-model: the folder must have a {' or an '.join(names)}, got {given.folder}", file=sys.stderr)
        return 2
    import transformers

    from kernelbook.interop import base_model
    from kernelbook.interop import transformers as interop
    from kernelbook.nn import swap

    how: dict[str, Any] = {"dtype": "auto", "quantization_config": interop.NF4ExpertsConfig() if given.nf4 else None}
    try:
        if has_adapter:
            import peft

            model: Any = peft.AutoPeftModelForCausalLM.from_pretrained(given.folder, is_trainable=True, **how)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(given.folder, **how)
        model = model.to(runtime.DEVICE)
        if any(True for _ in interop.expert_modules(model)):
            interop.use_kernels(model)
    except (OSError, ValueError, ImportError) as error:
        print(f"check-model: {error}", file=sys.stderr)
        return 2
    swap(base_model(model))
    torch.manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    found = check.model(model, torch.randint(vocabulary, (2, given.tokens), device=runtime.DEVICE))
    print(f"\n{found}")
    return 0 if found.ok else 1


# --- the command line -----------------------------------------------------------------------------------------------


def _default_out() -> Path:
    try:
        return record.results_dir()
    except FileNotFoundError:
        return Path("results")


def _part(text: str) -> tuple[int, int]:
    own, _, of = text.partition("/")
    if not (own.isdigit() and of.isdigit() and int(own) < int(of)):
        raise argparse.ArgumentTypeError(f"must be I/N with I < N, got {text}")
    return int(own), int(of)


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above zero, got {text}")


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number above zero, got {text}")


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"must be a regular expression, got {text}: {error}") from None
    return text


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a file of text, got {path!r} ({error})") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m kernelbook", description=kernelbook.__doc__)
    top.add_argument("--version", action="version", version=f"kernelbook {kernelbook.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check that this machine works; exit code 1 if something is broken")
    measure = commands.add_parser("bench", help="measure on the GPU at hand and record the results")
    measure.add_argument("room", nargs="?", choices=registry.NAMES, help="what to measure")
    measure.add_argument("--all", action="store_true", help="measure everything that is measured case by case")
    measure.add_argument("--out", type=Path, default=None, help="folder for <gpu>/<room>.csv (default: book/results)")
    measure.add_argument("--rep-ms", type=_positive, default=100.0, help="how long to sample each call (default: 100)")
    measure.add_argument(
        "--select",
        type=_pattern,
        help="only cases whose description has this, a regular expression: 'forward .*r=16'; several_gpus: parts of it, with commas between",
    )
    measure.add_argument(
        "--only", choices=("room", "models"), help="the room's own cases, or those of models (default: both)"
    )
    measure.add_argument(
        "--part", type=_part, default=(0, 1), help="I/N: of N processes the I-th, from 0 (default: 0/1)"
    )
    measure.add_argument(
        "--warm", action="store_true", help="call all once and record nothing: fills compilers' caches"
    )
    measure.add_argument("--missing", action="store_true", help="only cases without rows of these sources in --out")
    measure.add_argument(
        "--older", type=_text, metavar="FILE", help="only cases that FILE, what 'make older' printed, has for this GPU"
    )
    measure.add_argument("--layers", type=_count, help="whole_model: so many layers of each model (default: all)")
    judged = commands.add_parser(
        "judge", help="judge a kernel of yours: is it right, and on a GPU how fast; without a file, list the tasks"
    )
    judged.add_argument("file", nargs="?", type=Path, help="a file with a function of the task's name")
    judged.add_argument("--task", help="what it has to do; my_tasks.py:name for a Task of your own")
    judged.add_argument("--hint", action="count", default=0, help="a hint if it is not right; again: one more")
    judged.add_argument("--seed", type=int, help="of sizes and numbers (default: new ones each time)")
    checked = commands.add_parser(
        "check-model", help="check a model of transformers on the kernels, layer by layer; exit code 1 if it is wrong"
    )
    checked.add_argument("folder", type=Path, help="a model's folder, or that of an adapter of PEFT")
    checked.add_argument("--tokens", type=_count, default=64, help="in each of two random sequences (default: 64)")
    checked.add_argument("--nf4", action="store_true", help="hold the experts' weights in 4 bits")
    training.add_arguments(commands.add_parser("train", help="train a small GPT with a sparse backward pass"))
    profiling.add_arguments(commands.add_parser("profile", help="record some training steps of a model"))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    top = parser()
    given = top.parse_args(arguments)
    missing = [name for name in NEEDS.get(given.command, ()) if importlib.util.find_spec(name) is None]
    if missing:
        extra = "interop" if given.command == "check-model" else "lab"
        print(
            f"{given.command}: {', '.join(missing)} must be installed: pip install 'kernelbook[{extra}]'",
            file=sys.stderr,
        )
        return 2
    try:
        return _command(top, given)
    except KeyboardInterrupt:
        print(f"\n{given.command}: interrupted", file=sys.stderr)
        return 130


def _command(top: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    if given.command == "doctor":
        return doctor()
    if given.command == "train":
        return training.train(given)
    if given.command == "judge":
        return judge(given.file, given.task, given.hint, given.seed)
    if given.command == "check-model":
        return check_model(given)
    if given.command == "profile":
        return profiling.profile(given)
    if bool(given.room) == given.all:
        top.error("bench must have either a room or --all" + (", got both" if given.all else ""))
    names, out = registry.CASE_BY_CASE if given.all else [given.room], given.out or _default_out()
    how = given.select, given.layers, given.only, given.part, given.warm, given.missing, given.older
    return bench(names, out, given.rep_ms, *how)
