"""What dates the rows of ``book/results``, and which of them are older than these sources. Needs no GPU.

A row of ours has two digests. ``launches`` is of what its case launches (:mod:`kernelbook.lab.launched`) and dates its times;
``host`` is of the library's files that a call goes through and dates ``host_us``. Files that no bench of a room has written are
dated by the sources that :data:`DATED` names. ``peer`` is the version of what a row compares with.

``python -m kernelbook.lab.older`` lists file, case and column.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kernelbook
from kernelbook import plans, runtime
from kernelbook.lab import bench, launched, timing

__all__ = ["DATED", "Older", "host_digest", "launch_digests", "listed", "older", "peer_version", "sources_digest"]

PACKAGE = Path(kernelbook.__file__).parent
OWN_PLANS = "own plans"  # stands for the digest of rows that nobody else can date
NOT_DATED = "not dated"
# The GPUs whose rows the book has: nothing else is known of them where they are not.
GPUS = {
    runtime.slug(name): dataclasses.replace(runtime.TARGETS["sm_90"], name=name)
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
}


# --- files ----------------------------------------------------------------------------------------------------------


def tree_of(text: str) -> str:
    """A file's syntax tree without comments, docstrings, annotations, local names and what ``raise`` is given."""
    tree = launched.without_docstrings(ast.parse(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
    return launched.tree_text(launched.Numbered({}).visit(tree))


def _jit_functions(notebook: Path) -> list[str]:
    """The trees of a notebook's kernels."""
    found = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(line for line in cell["source"] if not line.lstrip().startswith(("%", "!")))
            for node in ast.parse(code).body:
                if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                    found.append(tree_of(ast.unparse(node)))
    return found


def _imports(path: Path) -> Iterator[str]:
    """The names that a file imports, of modules or of what is in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _file_of(module: str) -> Path | None:
    place = PACKAGE.parent.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def library_files(modules: Iterable[str]) -> list[Path]:
    """The library's files that a call into ``modules`` can go through: these, and what they import in turn.

    Without kernels and the rules beside them, which ``launches`` dates.
    """
    found: dict[Path, None] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = _file_of(name) if name.startswith("kernelbook.") else None
        if path is not None and path not in found and "lab" not in path.relative_to(PACKAGE).parts:
            found[path] = None
            waiting += _imports(path)
    return sorted(path for path in found if not path.name.startswith("kernels"))


def host_digest(modules: Iterable[str]) -> str:
    """The digest of the host's path of calls into ``modules``."""
    return launched.digest(*(tree_of(path.read_text()) for path in library_files(modules)))


def sources_digest(stem: str, gpu: str) -> str:
    """The digest that dates ``stem`` on ``gpu``, a folder of ``book/results``, by :data:`DATED`; nothing without a rule."""
    rule = DATED.get(stem)
    if rule is None:
        return ""
    return launched.digest(rule.method, *rule.trees(), (PACKAGE / "tuned" / f"{gpu}.json").is_file() and _plans(gpu))


def _plans(gpu: str) -> object:
    return plans.read_plans(PACKAGE / "tuned" / f"{gpu}.json")


@dataclasses.dataclass(frozen=True)
class Sources:
    """What dates a file that no bench of a room has written: files and folders of the package, and pages with kernels.

    Attributes:
        places: below ``src/kernelbook``; of a folder the kernels.
        page: the chapter whose kernels were measured.
        method: raised by hand when how or on what is measured changes.
    """

    places: tuple[str, ...] = ()
    page: str = ""
    method: int = 1

    def trees(self) -> list[str]:
        trees = []
        for place in self.places:
            path = PACKAGE / place
            for file in sorted(path.glob("kernels*.py")) if path.is_dir() else [path]:
                trees.append(tree_of(file.read_text()))
        if self.page:
            trees += _jit_functions(timing.results_dir().parents[1] / "notebooks" / f"{self.page}.ipynb")
        return trees


_EXPERTS = ("moe_lora", "nf4", "packed", "packed/products.py", "nn")
_MODEL = (*_EXPERTS, "attention", "layer_norm")
_TRAINING = ("sparse_linear", "attention", "layer_norm", "train")
_INFERENCE = ("scatter_ffn", "attention", "layer_norm", "train")
# By the stem of a file; one that is neither here nor a bench's own is not dated, and the page of measurements says so.
DATED: dict[str, Sources] = {
    "attention_backward": Sources(page="attention_backward"),
    "attention_decoding_steps": Sources(page="attention_decoding"),
    "attention_errors": Sources(("attention",)),
    "attention_forward": Sources(page="attention_forward"),
    "attention_race": Sources(page="attention_backward"),
    "choosing_tiles": Sources(("sparse_linear",)),
    "choosing_tiles_compiled": Sources(("sparse_linear", "moe_lora")),
    "first_kernel": Sources(page="first_kernel"),
    "first_kernel_steps": Sources(page="first_kernel"),
    "launches": Sources(("layer_norm", "launching.py")),
    "layer_norm_barrier": Sources(("layer_norm",)),
    "layer_norm_lock": Sources(page="layer_norm"),
    "layer_norm_steps": Sources(page="layer_norm"),
    "moe_block_choice": Sources(_EXPERTS),
    "moe_block_parts": Sources(_EXPERTS),
    "moe_lora_steps": Sources(page="moe_lora"),
    "nf4_steps": Sources(page="nf4"),
    "same_loss_curves": Sources(_EXPERTS),
    "scatter_ffn_atomics": Sources(("scatter_ffn",)),
    "scatter_ffn_steps": Sources(page="scatter_ffn"),
    "several_gpus": Sources((*_EXPERTS, "distributed", "train")),
    "sparse_inference": Sources(_INFERENCE),
    "sparse_inference_layers": Sources(_INFERENCE),
    "sparse_linear_steps": Sources(page="sparse_linear"),
    "sparse_training": Sources(_TRAINING),
    "sparse_training_budgets": Sources(_TRAINING),
    "sparse_training_curves": Sources(_TRAINING),
    "sparse_training_parts": Sources(_TRAINING),
    "sparse_training_scores": Sources(("train/synthetic.py", "train/schedulers.py")),
    "together_steps": Sources(_EXPERTS),
    "whole_model": Sources(_MODEL),
    "whole_model_parts": Sources(_MODEL),
}


# --- what cases launch ----------------------------------------------------------------------------------------------

Digests = dict[str, dict[str, dict[str, str]]]  # by bench, case and provider


def case_key(row: Mapping[str, Any]) -> str:
    """A case as rows name it."""
    return " ".join(str(row[name]) for name in ("op", "mode", "dtype", "shape", "x_name", "x"))


def properties_of(gpu: str) -> runtime.DeviceProperties | None:
    """What is known of the GPU of a folder in ``book/results``: the one at hand, or one of the book's."""
    if runtime.DEVICE.type == "cuda" and gpu == runtime.device_slug():
        return runtime.properties()
    return GPUS.get(gpu)


def launch_digests(properties: runtime.DeviceProperties) -> Digests:
    """By bench, case and provider of ours the digest of what it launches on a GPU, found by a process that has none.

    Kept on disk for these sources. Empty where the user's own plans are in use: nobody else has them.
    """
    mode = runtime.plans_in_use()
    if mode == "tuned" and plans.own_plans(properties.name).exists():
        return {}
    sources = hashlib.sha256(repr((dataclasses.astuple(properties), mode == "rules", sys.version_info)).encode())
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json")):
        sources.update(path.read_bytes())
    kept = runtime.cache_dir() / "launches" / f"{sources.hexdigest()[:16]}.json"
    if not kept.exists():
        hidden = {
            "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1",
            "KERNELBOOK_PLANS": "rules" if mode == "rules" else "shipped", "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "kernelbook.lab.older", "--launches"],
            input=json.dumps(dataclasses.asdict(properties)),
            env={**os.environ, **hidden}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        timing.replace(kept, done.stdout.splitlines()[-1])
    return dict(json.loads(kept.read_text()))


def _launch_digests(properties: Mapping[str, Any]) -> Digests:
    """What :func:`launch_digests` asks for, in the process without a GPU."""
    found: Digests = {}
    with runtime.compiling_for(runtime.DeviceProperties(**properties)):
        for one in bench.benches():
            cases = found.setdefault(one.name, {})
            for case in (*one.cases(), *one.models()):
                try:
                    launches = launched.launches_of(lambda case=case: _ours(case))
                    cases[case_key(case.columns)] = {
                        provider: launched.digest(timing.METHOD, one.method, what) for provider, what in launches
                    }
                except Exception as error:  # of this case nothing is known; of the others all is
                    print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def _ours(case: Any) -> dict[str, Callable[[], object]]:
    """The calls of ours that a case times."""
    import torch

    torch.manual_seed(0)
    providers = {name: call for name, call in case.build().providers.items() if timing.is_ours(name)}
    return {name: _first_call(call) if isinstance(call, str) else call for name, call in providers.items()}


def _first_call(code: str) -> Callable[[], object]:
    return lambda: exec(code.replace('"cuda"', '"cpu"'), {"torch": importlib.import_module("torch")})


def peer_version(provider: str, distributions: Mapping[str, str]) -> str:
    """``liger-kernel 0.8.5``: what a provider that is not ours comes from, and its version here."""
    name = distributions.get(provider, "torch")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(name)}"
    return name


# --- the list -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Older:
    """A case, or a whole file, of which something is older: ``launches``, ``host``, ``peer``, ``sources``, or not dated."""

    gpu: str
    file: str
    case: str
    column: str
    rows: int

    def __str__(self) -> str:
        return f"{self.gpu}/{self.file}: {self.case or f'{self.rows} rows'}: {self.column}"


def older(gpus: Iterable[str] | None = None) -> list[Older]:
    """What in ``book/results`` is older than these sources, or not dated, on the GPUs of these folders (default: all)."""
    folders = list(timing.recorded_gpus("*") if gpus is None else gpus)
    known = {gpu: properties for gpu in folders if (properties := properties_of(gpu)) is not None}
    with ThreadPoolExecutor() as pool:
        digests = dict(zip(known, pool.map(launch_digests, known.values()), strict=True))
    return [found for gpu in folders for found in _older_on(gpu, digests.get(gpu, {}))]


def _older_on(gpu: str, digests: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Iterator[Older]:
    import pandas as pd

    bench_of = {case: name for name, cases in digests.items() for case in cases}
    hosts = {name: host_digest(bench.bench(name).library) for name in digests}
    folder = timing.results_dir() / gpu
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.jsonl")]):
        if path.stem == "ceilings":  # of the machine, whatever the sources are
            continue
        rows = pd.read_json(path, lines=True, dtype=False) if path.suffix == ".jsonl" else pd.read_csv(path, dtype=str)
        rows = rows.fillna("")
        if path.stem in DATED:
            digest = sources_digest(path.stem, gpu)
            column = "launches" if set(timing.KEY) <= {*rows} else "sources"
            behind = rows.get(column, "") != digest
            if column == "launches":
                behind &= rows["provider"].map(timing.is_ours)
            if count := int(behind.sum()):
                yield Older(gpu, path.name, "", column, count)
        elif path.stem in {*digests, "models"}:
            for _, case in rows.groupby(list(timing.KEY[:2] + timing.KEY[3:]), sort=False):
                key = case_key(case.iloc[0])
                columns = _older_columns(
                    case, digests.get(bench_of.get(key, ""), {}).get(key, {}), hosts.get(bench_of.get(key, ""))
                )
                for column in columns:
                    yield Older(gpu, path.name, key, column, len(case))
        else:
            yield Older(gpu, path.name, "", NOT_DATED, len(rows))


def _older_columns(case: Any, digests: Mapping[str, str], host: str | None) -> list[str]:
    """The columns of a case's rows that are older: its launches, else the host's path and the peers' versions."""
    ours = case["provider"].map(timing.is_ours)
    if any(row["launches"] != digests.get(row["provider"]) for _, row in case[ours].iterrows()):
        return ["launches"]
    found = ["host"] if any((case["host_us"] != "") & ours & (case["host"] != host)) else []
    return [*found, *(["peer"] if any(map(_is_older_peer, case["peer"][~ours])) else [])]


def _is_older_peer(peer: str) -> bool:
    """Whether another version of a peer is installed here; PyTorch's own is the one that a record was made with."""
    name, _, version = peer.partition(" ")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return name not in ("", "torch") and importlib.metadata.version(name) != version
    return False


def sentence(stem: str, gpu: str) -> str:
    """Whether recorded rows of ``stem`` are older, in a sentence; nothing where none is."""
    return _sentences(gpu).get(stem, "")


@functools.cache
def _sentences(gpu: str) -> dict[str, str]:
    counts: dict[str, dict[str, int]] = {}
    for found in older([gpu]):
        of_file = counts.setdefault(found.file.partition(".")[0], {})
        of_file[found.column] = of_file.get(found.column, 0) + found.rows
    return {stem: _in_words(columns) for stem, columns in counts.items()}


def _in_words(columns: Mapping[str, int]) -> str:
    parts = [f"{columns[name]:,} rows {what}" for name, what in WORDS.items() if name in columns]
    return f"{'; '.join(parts)}."


WORDS = {
    "launches": "launch other kernels than they did when they were measured",
    "sources": "were measured with older sources than this book's",
    "host": "were measured with an older path of the host, which their host times tell of",
    "peer": "compare with a peer of another version than the one that is pinned now",
    NOT_DATED: "have no rule that would tell whether they are older",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is older, a line each."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--launches"]:
        print(json.dumps(_launch_digests(json.load(sys.stdin))))
        return 0
    for found in older():
        print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
