"""What dates a row of ``book/results``: of rows of a bench the launches and the host's path, of other files their sources.

``launches`` is the digest of what a case launches (:mod:`kernelbook.lab.launched`); it dates the times. ``host`` is that of the
library's files that a call goes through, and dates ``host_us``. What no bench of a room has written is dated by the sources
that :data:`DATED` names.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path

import kernelbook
from kernelbook.lab import launched

__all__ = ["DATED", "Sources", "host_digest", "library_files", "sources_digest", "tree_of"]

PACKAGE = Path(kernelbook.__file__).parent
NOTEBOOKS = PACKAGE.parents[1] / "notebooks"  # of the repository; who only installs the package records no chapter


@functools.cache
def tree_of(text: str) -> str:
    """A file's syntax tree without comments, docstrings, annotations, local names and what ``raise`` is given."""
    tree = launched.without_docstrings(ast.parse(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
    return launched.tree_text(launched.Numbered({}).visit(tree))


def _jit_functions(notebook: Path) -> list[str]:
    """The trees of a notebook's kernels."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join(line for cell in cells for line in cell["source"] if not line.lstrip().startswith(("%", "!")))
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    return [
        tree_of(ast.unparse(function))
        for function in functions
        if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    ]


@functools.cache
def _imports(text: str) -> tuple[str, ...]:
    """The names that a file imports, of modules or of what is in them."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(found)


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
            waiting += _imports(path.read_text())
    return sorted(path for path in found if not path.name.startswith("kernels"))


def host_digest(modules: Iterable[str]) -> str:
    """The digest of the host's path of calls into ``modules``."""
    return launched.digest(*(tree_of(path.read_text()) for path in library_files(modules)))


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
        """The syntax trees, as text."""
        paths = [PACKAGE / place for place in self.places]
        files = [file for path in paths for file in (sorted(path.glob("kernels*.py")) if path.is_dir() else [path])]
        kernels = _jit_functions(NOTEBOOKS / f"{self.page}.ipynb") if self.page else []
        return [*(tree_of(file.read_text()) for file in files), *kernels]


_HOST = (
    "launch.py", "operators.py", "memory.py", "tensors.py", "attention/op.py", "attention/launches.py",
    "attention/backward.py", "attention/pages.py", "layer_norm/op.py", "moe_lora/op.py", "moe_lora/routing.py",
    "moe_lora/grouped.py", "nf4/op.py", "scatter_ffn/op.py", "sparse_linear/op.py",
)  # fmt: skip
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
    "attention_hopper_steps": Sources(("attention",)),
    "attention_race": Sources(page="attention_backward"),
    "choosing_tiles": Sources(("sparse_linear",)),
    "choosing_tiles_compiled": Sources(("sparse_linear", "moe_lora")),
    "first_kernel": Sources(page="first_kernel"),
    "host": Sources(_HOST),
    "first_kernel_steps": Sources(page="first_kernel"),
    "launches": Sources(("layer_norm", "launch.py", "operators.py")),
    "layer_norm_barrier": Sources(("layer_norm",)),
    "layer_norm_lock": Sources(page="layer_norm"),
    "layer_norm_steps": Sources(page="layer_norm"),
    "matrix_product": Sources(page="matrix_product"),
    "matrix_product_steps": Sources(page="matrix_product"),
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
    "whole_model_bits": Sources((*_MODEL, "linear")),
    "whole_model_skewed": Sources(_MODEL),
    "whole_model_host": Sources(_HOST),
    "whole_model_parts": Sources(_MODEL),
}


def sources_digest(stem: str) -> str:
    """The digest that dates ``stem`` by :data:`DATED`; nothing without a rule."""
    rule = DATED.get(stem)
    if rule is None:
        return ""
    return launched.digest(
        rule.method, rule.trees(), []
    )  # recorded digests have a third part: plans, of which there were none
