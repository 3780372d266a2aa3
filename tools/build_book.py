"""Builds the book into _build/html: every notebook executed afresh, every warning an error."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from ipykernel.kernelspec import write_kernel_spec

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"


def write_config(path: Path) -> None:
    """Writes _config.yml, with the buttons that need the repository's address if that one setting is not empty."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    if config["repository"]["url"]:
        for button in ("repository", "edit_page", "issues"):
            config["html"][f"use_{button}_button"] = True
    else:
        del config["launch_buttons"]
    path.write_text(str(yaml.safe_dump(config)), encoding="utf-8")


def main() -> int:
    shutil.rmtree(HTML, ignore_errors=True)  # else the pages of removed chapters and old failure reports would stay
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "_config.yml")
        write_config(config)
        # The notebooks run in this very Python, whatever kernel of the same name the user has installed elsewhere.
        write_kernel_spec(Path(scratch, "kernels", "python3"), extra_arguments=["--log-level=ERROR"])
        environment = os.environ | {
            "JUPYTER_PATH": os.pathsep.join(filter(None, [scratch, os.environ.get("JUPYTER_PATH")])),
            # For the extension docstrings.py beside this file.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")])),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the debugger's warning about frozen modules
        }
        build = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(ROOT)]
        flags = ["--all", "-W", "-n", "--keep-going", "--config", str(config)]
        code = subprocess.run(build + flags, env=environment, check=False).returncode
    for report in sorted((HTML / "reports").rglob("*.err.log")):
        print(f"\n{report.relative_to(HTML / 'reports')}\n{report.read_text(encoding='utf-8')}", file=sys.stderr)
    if code:
        print("The book was not built: see the warnings and reports above.", file=sys.stderr)
    else:
        print("Open _build/html/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
