"""Builds the kernel repository for Hugging Face's ``kernels`` from the package: its sources, and what the library loads.

    python tools/build_hub.py [--backend cuda]

``torch-ext/kernelbook`` are the rooms and the modules on top of them, with relative imports and with operators in the
namespace that ``_ops.py`` gives: two versions then live in one process. ``build/torch-<backend>`` is the same, with the
metadata that the library reads; their own builder makes it too, from ``build.toml``, which has the version. Other files come from ``hub/``.
"""

import argparse
import ast
import base64
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "kernelbook"
# The laboratory, training and other libraries stay at home, and so do the modules that need them.
AT_HOME = {"lab", "study", "check", "__main__", "train", "interop", "distributed", "gpt", "swap"}
ADDED = ("layers.py", "transformers_attention.py")  # of hub/, to the package
# The one line that names the namespace of operators in our sources, and what takes its place.
NAMESPACE = f'NAMESPACE = "{PACKAGE}"', 'NAMESPACE = add_op_namespace_prefix("").removesuffix("::")'

OPS = '''"""The namespace of this build's operators."""

import torch

_OPS_NAME = "{name}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """The operator's name in that namespace."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


def replaced(source: str, old: str, new: str, where: str) -> str:
    """``source`` with ``new`` in the place of ``old``; raises unless that stands there once."""
    if source.count(old) != 1:
        raise ValueError(f"build_hub: {where} must have {old!r} once, got it {source.count(old)} times")
    return source.replace(old, new)


def stays_at_home(path: Path) -> bool:
    """Whether the module at ``path``, relative to the package, is left out."""
    return any(part.removesuffix(".py") in AT_HOME for part in path.parts)


def relative_imports(source: str, path: Path) -> str:
    """``source`` with imports of the package written from the place of ``path``."""
    lines = source.splitlines(keepends=True)
    dots = "." * len(path.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            rest = node.module[len(PACKAGE) + 1 :]
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {dots}{rest} import", 1)
    return "".join(lines)


def own_namespace(source: str, path: Path) -> str:
    """``source`` with operators in the build's namespace instead of the package's."""
    prefix = f"from {'.' * len(path.parts)}_ops import add_op_namespace_prefix\n"
    named = source.replace(*NAMESPACE)
    if named == source:
        return source
    first = next(node for node in ast.parse(named).body if isinstance(node, ast.Import | ast.ImportFrom))
    lines = named.splitlines(keepends=True)
    return "".join([*lines[: first.lineno - 1], prefix, *lines[first.lineno - 1 :]])


def without_home(source: str) -> str:
    """An ``__init__`` without what is imported from modules that stay at home, in its ``__all__`` too."""
    tree, dropped = ast.parse(source), set()
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and stays_at_home(Path(*(node.module or "").split("."))):
            dropped |= {alias.asname or alias.name for alias in node.names}
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
    kept = "".join(lines)
    for name in dropped:
        kept = replaced(kept, f'    "{name}",\n', "", "__all__")
    return kept


def sources() -> dict[Path, str]:
    """Every file of the kernel repository's package but ``_ops.py``, by its path in it."""
    home = ROOT / "src" / PACKAGE
    files = [path for path in sorted(home.rglob("*.*")) if path.suffix in (".py", ".json")]
    places = {path.relative_to(home): path for path in files}
    found = {place: path.read_text(encoding="utf-8") for place, path in places.items() if not stays_at_home(place)}
    for name in ADDED:
        found[Path(name)] = (ROOT / "hub" / name).read_text(encoding="utf-8")
    public = "from kernelbook import layers\nfrom kernelbook.transformers_attention import attention_forward\n"
    top = replaced(found[Path("__init__.py")], "\n__version__ =", f"{public}\n__version__ =", "__init__.py")
    names = '__all__ = [\n    "attention_forward",\n    "layers",\n'
    found[Path("__init__.py")] = replaced(top, "__all__ = [\n", names, "__init__.py")
    for place, text in found.items():
        if place.suffix == ".py":
            text = without_home(text) if place.name == "__init__.py" else text
            found[place] = own_namespace(relative_imports(text, place), place)
    return found


def build(out: Path, backend: str = "cuda", version: int | None = None) -> Path:
    """Writes the repository to ``out``, which is emptied before, and returns the folder that the library loads.

    ``version`` None is the one in ``build.toml``.
    """
    files = sources()
    settings = (ROOT / "hub" / "build.toml").read_text(encoding="utf-8")
    version = version or int(settings.split("version = ")[1].split("\n")[0])
    content = hashlib.sha256(repr((version, sorted(files.items()))).encode()).hexdigest()[:12]
    unique = f"_{PACKAGE}_{backend}_{content}"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "hub", out, ignore=shutil.ignore_patterns(*ADDED, "__pycache__"))
    shutil.copy(ROOT / "LICENSE", out)
    capabilities = json.loads(settings.split("cuda-capabilities = ")[1])
    variant = out / "build" / f"torch-{backend}"
    for folder in (out / "torch-ext" / PACKAGE, variant):
        for place, text in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
    # torch-ext has none: the builder writes it.
    (variant / "_ops.py").write_text(OPS.format(name=unique), encoding="utf-8")
    digests = {
        str(path.relative_to(variant)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    metadata = {
        "name": PACKAGE,
        "id": unique,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": capabilities} if backend == "cuda" else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "rocm", "cpu"), default="cuda")
    print(build(ROOT / "_build" / "hub", parser.parse_args().backend))


if __name__ == "__main__":
    main()
