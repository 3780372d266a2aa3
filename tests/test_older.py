"""What makes a recorded row older: what its case launches, and for the host's time the path of a call; nothing else."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import kernelbook
from bench import baselines
from kernelbook import runtime
from kernelbook.lab import dates, launched, older, record, timing

# isort: split
import triton
import triton.language as tl

SOURCES = Path(kernelbook.__file__).parent
Digests = dict[str, dict[str, str]]  # by case and provider
DIGESTS = """
import contextlib, importlib, json, os, sys
for name in ("torch._dynamo", "pandas", "liger_kernel.ops"):  # what all copies need besides
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for folder in sys.argv[2:]:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        import bench
        from kernelbook.lab import dates, older
        assert str(older.PACKAGE.parent) == folder
        properties, one = json.loads(sys.argv[1]), bench.bench("layer_norm")
        found = [older.digests_here(properties, ["layer_norm"])["layer_norm"], dates.host_digest(one.library)]
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def digests_with(folder: Path, *copies: dict[str, tuple[str, str]]) -> list[tuple[Digests, str]]:
    """What LayerNorm's cases launch, and the host's digest, in copies of the package with texts replaced, by file."""
    folders = [folder / str(i) for i in range(len(copies))]
    for place, edits in zip(folders, copies, strict=True):
        shutil.copytree(SOURCES, place / "kernelbook", ignore=shutil.ignore_patterns("__pycache__"))
        for name, (text, other) in edits.items():
            path = place / "kernelbook" / name.strip()
            assert text in path.read_text()
            path.write_text(path.read_text().replace(text, other))
    hidden = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    properties = json.dumps(dataclasses.asdict(older.GPUS["nvidia-h200"]))
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, properties, *map(str, folders)],
        env={**os.environ, **hidden}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads((place / "found.json").read_text())) for place in folders]


@pytest.mark.slow
def test_what_makes_a_row_older_and_what_does_not(tmp_path):
    says_nothing_of_a_launch = {
        "arguments.py": ("import torch\n", "import torch  # a comment\n"),
        "launch.py": ("import functools\n", "import functools  # a comment\n"),
        "layer_norm/op.py": ('must have fewer than', 'has to have fewer than'),
        "layer_norm/kernels.py": ("rstd", "one_over_sigma"),
        "sparse_linear/kernels.py": ("acc += ", "acc += 2 * "),
    }  # fmt: skip
    arithmetic_and_thresholds = {
        "study/layer_norm.py": (
            "tl.store(buffer_dw_ptr + offs, dw",
            "tl.store(buffer_dw_ptr + offs, 2 * dw",
        ),  # with locks
        "layer_norm/kernels.py ": ("elif n <= 6144:", "elif n <= 5120:"),
    }
    a_new_check = {
        "arguments.py": ("def check_choice(", "def check_more(x):\n    assert x.ndim\n\n\ndef check_choice(")
    }
    today, alike, other, checked = digests_with(
        tmp_path, {}, says_nothing_of_a_launch, arithmetic_and_thresholds, a_new_check
    )
    assert alike == today
    assert checked[0] == today[0] and checked[1] != today[1]  # host times only
    launches, host = other
    assert host == today[1]
    changed = {
        (case, provider)
        for case, of_providers in launches.items()
        for provider, digest in of_providers.items()
        if digest != today[0][case][provider]
    }
    between = {case for case in launches if "backward" in case and 5120 < int(case.rpartition("=")[2]) <= 6144}
    expected = {(case, provider) for case in launches for provider in launches[case] if provider.endswith(":locks")}
    assert changed == expected | {(case, provider) for case in between for provider in launches[case]}
    assert len(between) > 1


# --- texts ----------------------------------------------------------------------------------------------------------

SCALE = tl.constexpr(3)


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def _plain_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Writes what it reads, doubled and scaled."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, _double(x) * SCALE, mask=offs < n)


@triton.jit
def _renamed_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a comment
    values = tl.load(source_ptr + where, mask=where < count, other=0.0)
    tl.store(target_ptr + where, _double(values) * SCALE, mask=where < count)


@triton.jit
def _other_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, _double(x) + SCALE, mask=offs < n)


@pytest.fixture
def texts():
    """Texts of functions whose globals change within a test."""
    launched.text_of.cache_clear()
    yield launched.text_of
    launched.text_of.cache_clear()


def test_names_and_comments_are_no_part_of_a_kernels_text(texts):
    assert texts(_plain_kernel) == texts(_renamed_kernel) != texts(_other_kernel)


@pytest.mark.parametrize(("name", "value"), [("SCALE", tl.constexpr(4)), ("_double", _other_kernel)])
def test_what_a_kernel_reads_and_calls_is_part_of_its_text(texts, monkeypatch, name, value):
    before = texts(_plain_kernel)
    monkeypatch.setitem(globals(), name, value)
    texts.cache_clear()
    assert texts(_plain_kernel) != before


def test_messages_annotations_and_names_are_no_part_of_a_hosts_path():
    first = "def f(x: int) -> int:\n    if x < 0:\n        raise ValueError('no')\n    y = x\n    return y\n"
    other = "def f(count):\n    # why\n    if count < 0:\n        raise ValueError(f'{count}')\n    n = count\n    return n\n"
    checked = other.replace("count < 0", "count < 1")
    assert dates.tree_of(first) == dates.tree_of(other) != dates.tree_of(checked)


def test_the_hosts_path_has_no_other_room_and_no_laboratory():
    names = {str(path.relative_to(SOURCES)) for path in dates.library_files(bench.bench("layer_norm").library)}
    assert {"layer_norm/op.py", "launch.py", "operators.py", "memory.py", "arguments.py"} <= names
    assert not any(name.startswith(("lab/", "attention/", "moe_lora/")) or "kernels" in name for name in names)


# --- the list -------------------------------------------------------------------------------------------------------


def row(provider: str, x: int, **dated: str) -> dict[str, str]:
    case = {
        "op": "layer_norm",
        "mode": "forward",
        "dtype": "float16",
        "shape": f"M=1 N={x}",
        "x_name": "N",
        "x": str(x),
    }
    known = dict.fromkeys(record.COLUMNS, "") | case | {"provider": provider, "host_us": "1.0"} | dated
    return {name: known[name] for name in record.COLUMNS}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A folder of results whose case N=1 is of these sources; what else there is a test writes."""
    pd = pytest.importorskip("pandas")
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    host = dates.host_digest(bench.bench("layer_norm").library)
    cases = {f"layer_norm forward float16 M=1 N={x} N={x}": {"kernelbook": f"launches {x}"} for x in (1, 2)}
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(older, "launch_digests", lambda properties, names: {"layer_norm": cases})
    monkeypatch.setattr(older, "_cases_of", lambda stem, names: [])

    def list_older(*rows: dict[str, str], stem: str = "layer_norm") -> list[tuple[str, str]]:
        rows = (row("kernelbook", 1, launches="launches 1", host=host), row("torch", 1, peer="torch 1"), *rows)
        pd.DataFrame(rows).to_csv(folder / f"{stem}.csv", index=False)
        return [(found.case or found.file, found.column) for found in older.older(["nvidia-h200"])]

    return list_older


def test_a_row_of_these_sources_is_not_listed(recorded):
    assert recorded() == []


@pytest.mark.parametrize(
    ("dated", "column"),
    [
        ({"launches": "launches 1"}, "launches"),
        ({"launches": ""}, "launches"),
        ({"launches": "launches 2", "host": "0"}, "host"),
    ],
)
def test_a_row_is_older_by_its_launches_or_else_by_its_host(recorded, dated, column):
    assert recorded(row("kernelbook", 2, **dated)) == [("layer_norm forward float16 M=1 N=2 N=2", column)]


def test_a_peer_of_another_version_than_the_one_that_is_installed_is_older(recorded):
    assert recorded(row("liger", 1, peer="pytest 0.1")) == [("layer_norm forward float16 M=1 N=1 N=1", "peer")]


def test_a_case_without_rows_is_listed(recorded, monkeypatch):
    cases = [f"layer_norm forward float16 M=1 N={x} N={x}" for x in (1, 2)]
    monkeypatch.setattr(older, "_cases_of", lambda stem, names: cases if (stem, *names) == ("layer_norm",) * 2 else [])
    assert recorded() == [(cases[1], "not measured")]
    missing = older.older(["nvidia-h200"])
    assert older.listed("\n".join(map(str, missing)), "nvidia-h200") == {("layer_norm", cases[1])}
    assert recorded(row("kernelbook", 2, launches="launches 1"))[0][1] == "launches"


def test_the_cases_of_a_file_are_those_of_its_room_or_of_all_rooms_models():
    names, counts = ("layer_norm", "moe_lora"), {}
    for stem in (*names, "models", "profile"):
        counts[stem] = len(older._cases_of(stem, names))
    both = [bench.bench(name) for name in names]
    assert counts == {one.name: len(list(one.cases())) for one in both} | {
        "models": sum(len(list(one.models())) for one in both),
        "profile": 0,
    }


def test_a_file_without_a_rule_is_not_dated(recorded):
    assert recorded(stem="profile") == [("profile.csv", older.NOT_DATED)]


def test_rows_are_dated_wherever_they_lie(tmp_path):
    pd = pytest.importorskip("pandas")
    table = record.write_results(
        tmp_path / "scratch" / "whole_model.csv", pd.DataFrame([row("kernelbook", 1, gpu="NVIDIA H200")])
    )
    assert list(table["launches"]) == [dates.sources_digest("whole_model")]


def test_whole_models_are_listed_one_by_one(tmp_path, monkeypatch):
    pd = pytest.importorskip("pandas")
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    (tmp_path / "nvidia-h200").mkdir()
    now = dates.sources_digest("whole_model")
    models = {"A 1": "older", "B": now, "C": "older"}
    rows = [
        row(provider, 1, launches=digest) | {"shape": f"model={model} layers=2 task=step graph={graph}"}
        for model, digest in models.items()
        for graph in (0, 1)
        for provider in ("kernelbook", "kernelbook:dense", "torch")
    ]
    pd.DataFrame(rows[:-2]).to_csv(tmp_path / "nvidia-h200" / "whole_model.csv", index=False)
    found = older.older(["nvidia-h200"], "whole_model")
    names = ("A 1 kernelbook", "A 1 kernelbook:dense", "C kernelbook", "C kernelbook:dense")
    assert [(one.case, one.rows) for one in found] == list(zip(names, (2, 2, 2, 1), strict=True))
    assert older.listed("\n".join(map(str, found)), "nvidia-h200") == {("whole_model", name) for name in names}


def test_what_is_older_is_said_in_a_sentence(recorded):
    older.sentence.cache_clear()
    recorded(row("kernelbook", 2, launches="launches 1"))
    assert older.sentence("layer_norm", "nvidia-h200") == f"1 of the rows {older.WORDS['launches']}."
    older.sentence.cache_clear()


def test_every_recorded_file_has_a_rule_or_is_known_to_have_none():
    stems = {path.stem for gpu in record.recorded_gpus("*") for path in (record.results_dir() / gpu).iterdir()}
    dated = {*dates.DATED, *bench.CASE_BY_CASE, "models", "ceilings"}
    assert stems - dated <= {"chapters", "counters", "profile", "revisions", "slow_kernels"}


def test_without_a_gpu_no_peer_is_set_up(monkeypatch):
    seen = []
    one = dataclasses.replace(bench.bench("layer_norm"), cases=lambda: seen.append(baselines.has("pytest")) or [])
    monkeypatch.setattr(older.bench, "benches", lambda _: [one])
    older.digests_here(dataclasses.asdict(older.GPUS["nvidia-h200"]), ["layer_norm"])
    assert seen == [False] and baselines.has("pytest") and baselines.version("pytest")


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("name", bench.ROOMS)
def test_a_gpu_launches_what_was_found_without_one(name):
    digests = older.launch_digests(runtime.properties())[name]
    one = bench.bench(name)
    cases = [case for case in one.cases() if case.mode != "first_call" and case.gbytes < 0.1][::7]
    assert cases
    for case in cases:
        calls = {name: call for name, call in older.calls_of(case).items() if not name.endswith(":compiled")}
        for call in calls.values():
            call()  # what is made once is there afterwards
        launches = launched.launches_of(lambda calls=calls: calls, large=float("inf"))
        for provider, what in launches:
            assert launched.digest(timing.METHOD, one.method, what) == digests[str(case)][provider], (
                f"{case}: {provider}"
            )
        del calls
        torch.cuda.empty_cache()
