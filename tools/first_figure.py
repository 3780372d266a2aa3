"""Draws book/figures/first.svg, with which README and book begin: the steps of one kernel of the first chapter.

A bar for each recorded step of softmax, and one for PyTorch: its time on the device. A step that changed the time by less than 3%
is left out. Everything comes from book/results; the picture keeps a digest of the rows that it was drawn from, and a test
compares it.
"""

import hashlib
from pathlib import Path

import matplotlib as mpl
import pandas as pd

from kernelbook.lab import plots, record

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "book" / "figures" / "first.svg"
STEM, OP = "first_kernel_steps", "softmax"


def rows() -> pd.DataFrame:
    """The recorded steps, in their order, and PyTorch last."""
    table = record.load_results(STEM)
    return table.loc[table["op"] == OP]


def digest() -> str:
    """Of the rows that are drawn."""
    text = rows()[["run", "shape", "provider", "ms"]].to_csv(index=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def steps() -> list[tuple[str, float]]:
    """What is drawn: a name and microseconds."""
    found: list[tuple[str, float]] = []
    for _, row in rows().iterrows():
        us, ours = row["ms"] * 1e3, row["provider"].startswith("kernelbook")
        if ours and found and abs(us / found[-1][1] - 1) < 0.03:
            continue
        found.append((row["provider"].removeprefix("kernelbook:") if ours else "PyTorch", us))
    return found


def draw() -> None:
    """Writes the picture."""
    mpl.rcParams.update({"svg.hashsalt": "kernelbook", "svg.fonttype": "path"})
    shown, first = steps(), rows().iloc[0]
    figure, (ax,) = plots.new_figure(width=5.4, height=0.42 * len(shown) + 0.9)
    for y, (name, us) in enumerate(shown):
        ax.barh(y, us, color=plots.GREY if name == "PyTorch" else plots.BLUE, height=0.62)
        gain = "" if y == 0 or name == "PyTorch" else f", {shown[0][1] / us:.1f} times as fast as the first"
        ax.annotate(f"{us:.0f} µs{gain}", (us, y), (6, 0), textcoords="offset points", va="center", fontsize=10)
    ax.set_yticks(range(len(shown)), [name for name, _ in shown])
    ax.set_ylim(len(shown) - 0.5, -0.6)
    ax.set_xlim(0, 1.12 * max(us for _, us in shown))
    ax.grid(axis="y", visible=False)
    size = " by ".join(f"{int(pair.split('=')[1]):,}" for pair in first["shape"].split())
    ax.set_xlabel(f"softmax of {size} numbers on an {first['gpu']}\nmicroseconds: shorter is better")
    description = f"drawn from rows {digest()} of book/results by tools/first_figure.py"
    metadata = {"Date": None, "Description": description}
    figure.savefig(PICTURE, metadata=metadata, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    draw()
    print(PICTURE)
