"""Builds the archives of a release into dist, and tries each one in an empty environment.

    python tools/release.py 0.2.0

The version must be the package's and the one in CITATION.cff, and CHANGELOG.md must have a section for it, which becomes
dist/notes.md. Both archives are installed with what they ask for, in an environment of their own, and the doctor runs there.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def notes(version: str) -> str:
    """Return the changelog's section of a version; raise SystemExit where a file names another one, or none."""
    for name, pattern in (
        ("src/kernelbook/__init__.py", r'__version__ = "(.+)"'),
        ("CITATION.cff", r"(?m)^version: (.+)$"),
    ):
        found = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"))
        if found is None or found[1] != version:
            raise SystemExit(f"release: the version in {name} must be {version}, got {found and found[1]}")
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"(?ms)^## \[?{re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", text)
    if section is None:
        raise SystemExit(f"release: CHANGELOG.md must have a section '## {version}'")
    return section[1].strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.2.0")
    text = notes(parser.parse_args().version)
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST)], check=True, cwd=ROOT)
    archives = sorted(DIST.iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)], check=True)
    for archive in archives:
        with tempfile.TemporaryDirectory() as folder:  # away from the sources
            venv.create(folder, with_pip=True)
            python = str(Path(folder, "bin", "python"))
            subprocess.run([python, "-m", "pip", "install", "--quiet", str(archive)], check=True, cwd=folder)
            subprocess.run([python, "-m", "kernelbook", "doctor"], check=True, cwd=folder)
    (DIST / "notes.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
