"""The wheel and the sdist as an index would hand them out: what is in them, what they import, which types they show."""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.metadata import Metadata
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("check", "nn", "train")  # whose use needs nothing else


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files that go to an index, and the folder that the wheel unpacks to."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "unpacked")
    return {"wheel": wheel, "sdist": sdist, "unpacked": out / "unpacked"}


def _metadata(unpacked: Path) -> Metadata:
    (path,) = unpacked.glob("*.dist-info/METADATA")
    return Metadata.from_email(path.read_bytes(), validate=True)


def test_what_is_in_them(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        wheel = set(archive.namelist())
    with tarfile.open(built["sdist"]) as archive:
        sdist = {name.split("/", 1)[1] for name in archive.getnames()}
    package = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/kernelbook").rglob("*.py")}
    assert package | {"kernelbook/py.typed"} <= wheel
    assert {f"src/{name}" for name in package} | {"README.md", "LICENSE", "pyproject.toml"} <= sdist
    for names in (wheel, sdist):
        assert not [name for name in names if name.endswith(".ipynb") or "notebooks/" in name or "/results/" in name]


def test_the_oldest_versions_allowed_are_those_that_are_run() -> None:
    """By 'nox -s oldest oldest_interop'."""
    run = dict(reversed(re.findall(r"\b([a-z]+)==([\d.]+)", (ROOT / "noxfile.py").read_text())))  # the first of each
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "triton", "accelerate", "peft", "transformers", "bitsandbytes", "kernels"):
        (allowed,) = {*re.findall(rf'"{name}>=([\d.]+)', project)}
        assert run[name].removesuffix(".0") == allowed.removesuffix(".0"), name


def _modules_of(requirements: list[Requirement]) -> set[str]:
    """The top-level modules of the distributions that are required."""
    wanted = {re.sub(r"[-_.]+", "-", requirement.name).lower() for requirement in requirements}
    owners = importlib.metadata.packages_distributions()
    return {module for module, by in owners.items() if wanted & {re.sub(r"[-_.]+", "-", d).lower() for d in by}}


@pytest.mark.slow
def test_it_imports_and_runs_with_torch_alone(built: dict[str, Path], tmp_path: Path) -> None:
    """In a folder of packages that has this environment's, but for those that only an extra brings."""
    absent = _modules_of([r for r in _metadata(built["unpacked"]).requires_dist or () if "extra" in str(r.marker)])
    assert {"pandas", "tabulate", "tqdm", "matplotlib", "transformers"} <= absent
    for package in Path(torch.__file__).parents[1].iterdir():
        if package.name.split(".")[0] not in {*absent, "kernelbook"}:
            (tmp_path / package.name).symlink_to(package)
    code = f"""
import sys
sys.path += [{str(built["unpacked"])!r}, {str(tmp_path)!r}]
import torch, kernelbook as kb
from kernelbook import {", ".join(MODULES)}
assert kb.__file__.startswith({str(built["unpacked"])!r}), kb.__file__
x = torch.randn(3, 8, device=kb.runtime.DEVICE)
torch.testing.assert_close(kb.layer_norm(x), torch.nn.functional.layer_norm(x, (8,)))
from kernelbook.lab import cli, doctor
one = {{"layer_norm": doctor._cases()["layer_norm"]}}
doctor._cases = lambda: one  # it is enough
assert cli.main(["doctor"]) == 0
assert cli.main(["train", "--out", {str(tmp_path / "run")!r}]) == 2
sys.argv = ["kernelbook", "profile"]
import runpy
runpy.run_module("kernelbook", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    # All went well but for the last commands, which say what to install.
    assert done.returncode == 2 and "checks passed" in done.stdout and "Traceback" not in done.stderr, done.stderr
    assert "train: tokenizers, tqdm must be installed: pip install 'kernelbook[train]'" in done.stderr
    assert "profile: tabulate must be installed: pip install 'kernelbook[lab]'" in done.stderr


def test_the_library_needs_nothing_of_the_laboratory() -> None:
    """Neither the laboratory itself nor what it draws, counts and prints with; other libraries may want that for themselves."""
    code = """
import importlib, importlib.util, pkgutil, sys
for name in ("transformers", "peft", "bitsandbytes"):
    if importlib.util.find_spec(name):
        importlib.import_module(name)
sys.modules |= dict.fromkeys(("pandas", "matplotlib", "tqdm", "tabulate", "kernelbook.lab"))
import kernelbook
for module in pkgutil.walk_packages(kernelbook.__path__, "kernelbook."):
    if module.name.split(".")[1] not in ("lab", "__main__"):
        importlib.import_module(module.name)
        print(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"kernelbook.train.loop", "kernelbook.interop.peft", "kernelbook.operators"} <= {*done.stdout.split()}


def test_types_are_seen_from_outside(built: dict[str, Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(site)
    (tmp_path / "user.py").write_text(
        "import kernelbook as kb\n"
        "from kernelbook.nn import LayerNorm\n"
        "norm = LayerNorm(8, eps=1e-5)\n"
        "kb.layer_norm(norm.weight, eps='small')\n"
        "kb.flash_attention(norm.weight)\n"
    )
    command = ["-m", "mypy", "--no-incremental", "--ignore-missing-imports", "--python-executable"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "env/bin/python"), "user.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = re.findall(r"user\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout)
    assert errors == [("4", "arg-type"), ("5", "call-arg")], done.stdout + done.stderr
