"""Builds the book into _build/html, every warning an error.

Notebooks, and pages with cells, are executed, as many at a time as there are processors, and what they print is kept in _build/executed. It is used again as long as the
notebook, the package and what was recorded are what they were: tools/keep_executed.py keeps there what the tests of notebooks execute. --draft builds the pages without
what is not there yet.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import yaml
from ipykernel.kernelspec import write_kernel_spec
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.config import NbParserConfig
from myst_nb.core.read import create_nb_reader
from myst_parser.config.main import MdParserConfig

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
EXECUTED = ROOT / "_build" / "executed"
HAS_GPU = shutil.which("nvidia-smi") is not None
# On a GPU one after the other: some of them take times.
AT_ONCE = 1 if HAS_GPU else len(os.sched_getaffinity(0))
# Cells run as the tests do: Triton's interpreter with caches, and a garbage collector that rarely looks through all of PyTorch.
QUICK = (
    "from kernelbook.lab import remembered_types; remembered_types.remember(); del remembered_types; "
    "import gc; gc.freeze(); gc.set_threshold(100_000, 20, 100); del gc"
)
BUILT_FROM = EXECUTED.parent / "built_from"
# What decides the outputs of a notebook beside itself.
DECIDING = (
    "src",
    "bench",
    "book/results",
    "book/archive",
    "book/evidence",
    "book/compiled.csv",
    "book/moe_lora_orders.csv",
    "requirements.txt",
)
# What decides the pages.
PAGES = ("src", "bench", "book", "notebooks", "tools", "_config.yml", "_toc.yml", "CHANGELOG.md", "requirements.txt")


def digest_of(names: tuple[str, ...]) -> str:
    """Return a digest of these files and folders, of this Python, and of whether there is a GPU."""
    digest = hashlib.sha256(f"{sys.version} {HAS_GPU}".encode())
    for place in (ROOT / name for name in names):
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read(path: Path) -> nbformat.NotebookNode | None:
    """A notebook, also where it is a page in Markdown with cells; None where it has none."""
    text = path.read_text(encoding="utf-8")
    reader = create_nb_reader(str(path), MdParserConfig(enable_extensions={"colon_fence"}), NbParserConfig(), text)
    return None if reader is None else reader.read(text)


def open_cache() -> Any:
    """The cache of executed notebooks, emptied if it was filled with other sources."""
    mark, now = EXECUTED / "sources", digest_of(DECIDING)
    if not mark.exists() or mark.read_text() != now:
        shutil.rmtree(EXECUTED, ignore_errors=True)
        EXECUTED.mkdir(parents=True)
        mark.write_text(now)
    return get_cache(str(EXECUTED))


def keep(cache: Any, path: Path, notebook: nbformat.NotebookNode, seconds: float) -> None:
    bundle = CacheBundleIn(notebook, str(path), data={"execution_seconds": seconds})
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def is_kept(cache: Any, path: Path) -> bool:
    try:
        cache.match_cache_notebook(read(path))
    except KeyError:
        return False
    return True


@contextlib.contextmanager
def kernels(*arguments: str) -> Iterator[Path]:
    """The environment in which notebooks run, kernels with these arguments besides, and a folder that goes with it."""
    with tempfile.TemporaryDirectory() as scratch:
        # This very Python, whatever kernel of the same name the user has installed elsewhere.
        quick = [] if HAS_GPU else [f"--IPKernelApp.exec_lines={QUICK}"]
        extra = ["--log-level=ERROR", *quick, *arguments]
        write_kernel_spec(Path(scratch, "kernels", "python3"), extra_arguments=extra)
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [scratch, os.environ.get("JUPYTER_PATH")]))
        os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the debugger's warning about frozen modules
        # For what pages import, and Sphinx's extensions, beside this file.
        places = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        if AT_ONCE > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has a notebook
        yield Path(scratch)


def execute_all(paths: list[Path], cache: Any) -> int:
    """Executes the notebooks; the number of those that failed."""
    how = {"timeout": 600, "allow_errors": False, "kernel_name": "python3"}
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        runs = pool.map(lambda path: single_nb_execution(read(path), cwd=str(path.parent), **how), paths)
        for path, done in zip(paths, runs, strict=True):
            print(f"{path.name}: {done.time:.0f} s{', FAILED' if done.err else ''}", flush=True)
            if done.err:
                print(done.err, file=sys.stderr)
                failed += 1
            else:
                keep(cache, path, done.nb, done.time)
    return failed


def write_config(path: Path, cache: Path) -> None:
    """Writes _config.yml, with the buttons that need the repository's address if that one setting is not empty.

    With an address of the built book, ``BOOK_ADDRESS`` (https://owner.github.io/name/, which the workflow in .github gives), it
    also gets a site map, a page for addresses that do not exist, and what social networks show of a link.
    """
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    config["execute"]["cache"] = str(cache)
    if config["repository"]["url"]:
        for button in ("repository", "edit_page", "issues"):
            config["html"][f"use_{button}_button"] = True
    else:
        del config["launch_buttons"]
    if address := os.environ.get("BOOK_ADDRESS"):
        address = f"{address.rstrip('/')}/"
        config["sphinx"]["extra_extensions"] += ["sphinx_sitemap", "sphinxext.opengraph", "notfound.extension"]
        config["sphinx"]["config"] |= {
            "html_baseurl": address, "ogp_site_url": address, "notfound_urls_prefix": urlsplit(address).path,
            "sitemap_url_scheme": "{link}",
        }  # fmt: skip
    path.write_text(str(yaml.safe_dump(config)), encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="build pages without executing any")
    draft = parser.parse_args(arguments).draft
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: -path.stat().st_size)
    # Sphinx would execute these one after the other.
    pages = [path for path in sorted((ROOT / "book").glob("*.md")) if read(path) is not None]
    pages_digest = digest_of(PAGES) + os.environ.get("BOOK_ADDRESS", "")
    if not draft and HTML.exists() and BUILT_FROM.exists() and BUILT_FROM.read_text() == pages_digest:
        print("The book is built from these very files. Open _build/html/index.html")
        return 0
    BUILT_FROM.unlink(missing_ok=True)
    shutil.rmtree(HTML, ignore_errors=True)  # else the pages of removed chapters and old failure reports would stay
    with kernels() as scratch:
        place = EXECUTED
        cache = open_cache()
        new = [path for path in notebooks if not is_kept(cache, path)]
        if draft:
            place = shutil.copytree(EXECUTED, scratch / "cache")
            cache = get_cache(str(place))
            for path in new:
                keep(cache, path, read(path), 0.0)
        elif execute_all([*(path for path in pages if not is_kept(cache, path)), *new], cache):
            print("The book was not built: see the errors above.", file=sys.stderr)
            return 1
        config = scratch / "_config.yml"
        write_config(config, place)
        build = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(ROOT)]
        flags = ["--all", *([] if draft else ["-W", "-n"]), "--keep-going", "--config", str(config)]
        code = subprocess.run(build + flags, check=False).returncode
    if code:
        print("The book was not built: see the warnings above.", file=sys.stderr)
    else:
        if not draft:
            BUILT_FROM.write_text(pages_digest)
        print("Open _build/html/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
