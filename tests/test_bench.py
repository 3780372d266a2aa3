"""The list of what is measured: every bench is in it, and says what its rows depend on."""

import importlib
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import bench as registry
from kernelbook.lab import record

FILES = {"same_loss": "same_loss_curves.jsonl"}  # the others have their name
FOLDER = Path(registry.__file__).parent


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_bench_names_what_its_rows_depend_on(name: str) -> None:
    one = registry.bench(name)
    assert one.name == name and all(path.exists() for path in one.sources)
    assert (one.cases is not None) == (name in registry.CASE_BY_CASE) == (one.run is None)
    for module in one.library:
        assert importlib.import_module(module).__name__.startswith("kernelbook."), module


def test_every_module_is_in_the_list() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == set(registry.NAMES)
    assert [one.name for one in registry.benches()] == list(registry.NAMES)


def test_every_recorded_provider_that_is_not_ours_has_a_distribution() -> None:
    """And no bench names one that nothing was or can be recorded of: each is in its module's source."""
    by_op: dict[str, registry.Bench] = {}
    for one in registry.benches(registry.CASE_BY_CASE):
        assert one.cases is not None
        by_op |= {case.op: one for case in (*one.cases(), *one.models())}
    seen = 0
    for gpu in record.recorded_gpus(*registry.NAMES, "models"):
        for one in [*registry.benches(), None]:
            name = "models.csv" if one is None else FILES.get(one.name, f"{one.name}.csv")
            path = record.results_dir() / gpu / name
            if not path.exists():
                continue
            table = pd.read_json(path, lines=True) if path.suffix == ".jsonl" else pd.read_csv(path)
            column = "way" if path.suffix == ".jsonl" else "provider"
            for row in table.drop_duplicates([column, *({"op"} & {*table})]).to_dict("records"):
                provider = row[column].split(":")[0]
                if provider != "kernelbook":
                    assert provider in (one or by_op[row["op"]]).baselines, (path, provider)
                    seen += 1
    assert seen > 30
    for one in registry.benches():
        source = (FOLDER / f"{one.name}.py").read_text()
        assert all(source.count(f'"{provider}"') > 1 for provider in one.baselines), one.name


def test_the_list_is_there_before_any_bench() -> None:
    code = "import sys; import bench; print([n for n in sys.modules if n.startswith(bench.__name__ + '.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_bench_without_or_with_both_kinds_of_measuring_and_an_unknown_one_are_told() -> None:
    common = {"name": "kitchen", "sources": (), "library": (), "baselines": {}}
    with pytest.raises(ValueError, match="kitchen must have either cases or run, got none"):
        registry.Bench(**common)
    with pytest.raises(ValueError, match="kitchen must have either cases or run, got both"):
        registry.Bench(**common, cases=list, run=int)
    with pytest.raises(ValueError, match=r"bench: name must be one of attention, .*, got 'kitchen'"):
        registry.bench("kitchen")


def test_what_is_not_installed_is_told_once() -> None:
    common = {"name": "kitchen", "sources": (), "library": (), "cases": list}
    providers = {"torch": "torch", "one": "no-such-package", "two": "no-such-package", "three": "nor-this"}
    one = registry.Bench(**common, baselines=providers, needs={"nor-this": "everything"}, left_out=("steam",))
    assert one.missing() == [
        "one, two (package no-such-package is not installed)",
        "everything (package nor-this is not installed)",
        "steam",
    ]
