"""The rules of the house, by reading the sources: who may import whom, and where things are."""

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from bench import ROOMS
from kernelbook import cases

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "kernelbook"
ABOVE_THE_ROOMS = {"study", "nn", "distributed", "train", "interop", "lab"}

# What each door of a room may import of the package (the room's own modules apart) and of the outside world.
DOORS = {
    "reference.py": {"kernelbook": set(), "outside": {"torch"}},
    "kernels.py": {
        "kernelbook": {"runtime", "packed", "tiles", "gluon_names"},
        "outside": {"torch", "triton"},
    },
    "op.py": {
        "kernelbook": {
            "runtime",
            "arguments",
            "launch",
            "linear",
            "memory",
            "operators",
            "tensors",
            "packed",
            "gluon_names",
        },
        "outside": {"torch", "triton"},
    },
    "cases.py": {"kernelbook": {"runtime", "check", "cases", "packed", "tensors"}, "outside": {"torch"}},
    "__init__.py": {"kernelbook": set(), "outside": set()},
}
# A room may have further kernels, for one generation of GPUs or for one kind of call, behind the door of kernels.py, and more
# of the host's part behind that of op.py.
DOORS_THAT_MAY_BE = {
    **dict.fromkeys(("kernels_hopper.py", "kernels_decode.py", "kernels_same_bits.py"), DOORS["kernels.py"]),
    **dict.fromkeys(("launches.py", "backward.py", "routing.py", "grouped.py", "lora.py", "pages.py"), DOORS["op.py"]),
}
# What kernels of several rooms call, and the product that several rooms launch.
SHARED_BY_KERNELS = {"linear/kernels.py", "tiles.py", "packed/kernels.py", "packed/kernels_nvidia.py"}
OWN_MODULES = {
    "reference.py": set(),
    "kernels.py": set(),
    "kernels_hopper.py": {"kernels"},
    "kernels_decode.py": {"kernels"},
    "kernels_same_bits.py": {"kernels", "kernels_decode"},
    "launches.py": {"kernels", "kernels_hopper"},
    "backward.py": {"kernels", "launches"},
    "routing.py": {"kernels"},
    "grouped.py": {"kernels", "routing"},
    "lora.py": {"kernels", "routing", "grouped", "op"},
    "op.py": {
        *("kernels", "kernels_decode", "kernels_same_bits", "launches", "backward", "routing", "grouped"),
    },
    "pages.py": {"kernels", "kernels_decode", "launches", "op"},
    "cases.py": {"op", "pages", "routing", "reference", "kernels"},
    "__init__.py": {"op", "lora", "pages", "reference", "kernels"},
}


def imports(source: str) -> Iterator[str]:
    """Every module that the source imports, as a dotted name with what is taken from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_standard(module: str) -> bool:
    import sys

    return module in sys.stdlib_module_names


def broken_rules(path: str, source: str) -> list[str]:
    """What the file at ``path`` (inside src/kernelbook) imports and may not."""
    parts = Path(path).parts
    top = Path(parts[0]).stem
    broken = []
    for name in imports(source):
        head, *rest = name.split(".")
        if head in ("bench", "tests", "tools", "pytest", "notebooks", "conftest"):
            broken.append(f"{path} imports {name}: src imports nothing beside it")
        if head == "matplotlib" and path != "lab/plots.py":
            broken.append(f"{path} imports {name}: only lab/plots.py draws")
        if head == "kernelbook" and rest[:1] == ["lab"] and top not in ("lab", "__main__"):
            broken.append(f"{path} imports {name}: the library imports nothing of the laboratory")
        room_of_import = rest[0] if head == "kernelbook" and rest and rest[0] in ROOMS else None
        if room_of_import and top not in ABOVE_THE_ROOMS and path != "__init__.py" and top != room_of_import:
            broken.append(f"{path} imports {name}: a room's inside is the room's own")
        doors = DOORS | DOORS_THAT_MAY_BE
        if top in ROOMS and len(parts) == 2 and parts[1] in doors:
            door = doors[parts[1]]
            if head == "kernelbook" and room_of_import != top:
                if not rest or rest[0] not in door["kernelbook"]:
                    broken.append(f"{path} imports {name}: {parts[1]} may not")
            elif room_of_import == top:
                if len(rest) > 1 and rest[1] not in OWN_MODULES[parts[1]] and parts[1] != "__init__.py":
                    broken.append(f"{path} imports {name}: {parts[1]} may not")
            elif not _is_standard(head) and door["outside"] is not None and head not in door["outside"]:
                broken.append(f"{path} imports {name}: {parts[1]} may not")
    return broken


def test_imports_keep_the_rules() -> None:
    found = [rule for path in SRC.rglob("*.py") for rule in broken_rules(str(path.relative_to(SRC)), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("layer_norm/op.py", "from kernelbook.layer_norm.reference import layer_norm_reference"),
        ("layer_norm/kernels.py", "from kernelbook import check"),
        ("tensors.py", "import kernelbook.lab.timing"),
        ("layer_norm/reference.py", "import triton"),
        ("lab/doctor.py", "from bench import layer_norm"),
        ("check.py", "from kernelbook.layer_norm import layer_norm"),
        ("nn/layers.py", "import matplotlib.pyplot as plt"),
    ],
)
def test_a_forbidden_import_is_found(path: str, line: str) -> None:
    assert broken_rules(path, line)


def test_nothing_imports_tests_but_tests() -> None:
    tests = {"tests", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    for path in [*SRC.rglob("*.py"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        assert not tests & {name.split(".")[0] for name in imports(path.read_text())}, path


def circle(sources: Mapping[str, str]) -> list[str]:
    """A circle in which modules import each other, also within functions; by name their sources. Nothing where there is none."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for name in imports(source):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            graph[module] |= {name} & {*sources} - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    sources = {}
    for path in SRC.rglob("*.py"):
        place = path.relative_to(SRC.parent).with_suffix("")
        sources[".".join(place.parts).removesuffix(".__init__")] = path.read_text()
    assert not circle(sources)
    planted = "def later():\n    from kernelbook.lab import cli\n"
    assert circle({**sources, "kernelbook.lab.record": sources["kernelbook.lab.record"] + planted})


def test_kernels_live_in_rooms_in_the_modules_in_the_training_loop_and_between_ranks() -> None:
    """A kernel elsewhere would have no reference beside it, and nothing would compile it."""
    for path in SRC.rglob("*.py"):
        decorators = [
            ast.unparse(decorator)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
        ]
        shared = path.parent.name == "study" or path.relative_to(SRC).as_posix() in SHARED_BY_KERNELS
        if not shared and any(decorator.startswith("triton.jit") for decorator in decorators):
            assert path.name in ("kernels.py", *DOORS_THAT_MAY_BE) and path.parent.name in {
                *ROOMS,
                "nn",
                "train",
                "distributed",
            }, path


def test_what_every_operator_needs_stands_in_the_spine_alone() -> None:
    names = ("KeptPlans", "operator(", "composite(", "autograd.Function", "torch.library", "register_fake", "_plans =")
    rooms = [path for room in (*ROOMS, "packed", "study") for path in (SRC / room).glob("*.py")]
    found = [(path.name, name) for path in rooms for name in names if name in path.read_text()]
    # The reference masks gradients, in plain PyTorch.
    assert found == [("reference.py", "autograd.Function")]


def test_rooms_have_five_doors_and_one_stem() -> None:
    chapters = (ROOT / "_toc.yml").read_text()
    assert {path.parent.name for path in SRC.glob("*/reference.py")} == set(ROOMS)
    assert {path.parent.name for path in SRC.glob("*/cases.py")} == set(cases.ROOMS)
    for room in ROOMS:
        assert {path.name for path in (SRC / room).glob("*.py")} >= set(DOORS), room
        assert (ROOT / "bench" / f"{room}.py").is_file(), room
        assert (ROOT / "tests" / f"test_{room}.py").is_file(), room
        # A room with two chapters adds what each is about: attention_forward, attention_backward.
        assert re.search(rf"^ *- file: notebooks/{room}(_\w+)?$", chapters, re.MULTILINE), room


def _environment_reads(source: str) -> list[str]:
    tree = ast.parse(source)
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]


def test_only_runtime_reads_the_environment_and_makes_a_device() -> None:
    # A new process gets a changed copy of the environment, which is no setting read; nor is it one that ranks compare which
    # GPUs they see, before they take each other's device numbers for their own.
    passes_it_on = {
        "lab/compiled.py",
        "lab/judge.py",
        "lab/judge_worker.py",  # and there HOME and TMPDIR become a folder that is thrown away
        "lab/timing.py",
        "distributed/notebook.py",
        "distributed/windows.py",
    }
    for path in SRC.rglob("*.py"):
        name, source = str(path.relative_to(SRC)), path.read_text()
        if name != "runtime.py":
            assert name in passes_it_on or not _environment_reads(source), name
            assert "torch.cuda.is_available" not in source, name


def test_runtime_comes_first() -> None:
    """Importing the package sets Triton up: nothing may import Triton before runtime did."""
    names = imports((SRC / "__init__.py").read_text())
    first = next(name for name in names if not _is_standard(name.split(".")[0]))
    assert first == "kernelbook.runtime"


def test_every_masked_load_says_what_else() -> None:
    """A masked load without ``other=`` gives whatever was in the register."""
    for path in SRC.rglob("kernels*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "gl.load"):
                names = {keyword.arg for keyword in node.keywords}
                assert "mask" not in names or "other" in names, f"{path.parent.name}: {ast.unparse(node)}"


def test_notebooks_are_stripped_and_listed() -> None:
    import json

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = {chapter["file"] for part in toc["parts"] for chapter in part["chapters"]}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.stem}" in listed, path.name
        assert not path.stem[0].isdigit()
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and not cell.get("execution_count"), f"{path.name} has stored outputs"
            source = "".join(cell["source"])
            assert "pip install" not in source or cell["cell_type"] == "markdown", path.name


def test_the_pages_of_the_package_list_what_is_public() -> None:
    import kernelbook
    from kernelbook import nn

    pages = "".join(path.read_text() for path in (ROOT / "book" / "package").glob("*.md"))
    listed = set(re.findall(r"auto(?:function|class):: kernelbook\.([\w.]+)", pages))
    public = {*kernelbook.__all__, *(f"nn.{name}" for name in nn.__all__)} - {"__version__", "runtime"}
    assert public <= listed, public - listed
