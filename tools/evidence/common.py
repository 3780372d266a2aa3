"""What the programs in this folder share."""

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "book" / "evidence"


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the program's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none where there is no such file yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def keep_table(path: Path, table: "pd.DataFrame") -> None:
    """Writes a table in one step: who reads it meanwhile finds all of it or what was there before."""
    table.to_csv(path.with_suffix(".part"), index=False, lineterminator="\n")
    path.with_suffix(".part").replace(path)
