"""Draws book/figures/first.svg, with which README and book begin: our functions beside what one would use instead.

    python tools/first_figure.py

A line for each function: from the worst recorded point to the best, how many times as fast as the fastest alternative there by
device time, a dot in the middle; a hollow dot is the middle by the clock, where a call takes as long as the device or the host,
whichever is slower. A GPU on which less than half of the points were measured has no line there. Everything comes from
book/results; the picture keeps a digest of the rows that it was drawn from, and a test compares it.
"""

import hashlib
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kernelbook.lab import plots, record

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "book" / "figures" / "first.svg"
# The file, the function and its mode; how the figure calls it.
LINES = {
    ("layer_norm", "layer_norm", "forward"): "LayerNorm",
    ("layer_norm", "layer_norm", "backward"): "LayerNorm, backward",
    ("layer_norm", "rms_norm", "forward"): "RMSNorm",
    ("layer_norm", "rms_norm", "backward"): "RMSNorm, backward",
    ("attention", "flash_attention", "forward"): "attention",
    ("attention", "flash_attention", "backward"): "attention, backward",
    ("sparse_linear", "sparse_linear", "backward"): "sparse backward pass",
    ("scatter_ffn", "scatter_ffn", "forward"): "chosen neurons",
    ("nf4", "nf4_dequantize", "forward"): "4 bits to 16",
    ("nf4", "nf4_matmul", "forward"): "4-bit matrix, few tokens",
    ("moe_lora", "moe_lora", "forward_backward"): "experts with LoRA, both passes",
    ("moe_block", "moe_block", "forward_backward"): "a 4-bit MoE block, both passes",
}
# Not what one would use: the operands of the one were packed before, the others are there for scale.
FOR_SCALE = (*record.BOUNDS, "python_loop", "sdpa_math", "eager")
POINT = ["run", "op", "mode", "dtype", "shape", "x_name", "x"]
COLORS = (plots.BLUE, plots.ORANGE, plots.GREY)


def tables(gpu: str) -> dict[str, pd.DataFrame]:
    """The files that the figure is drawn from, as they are recorded."""
    stems = dict.fromkeys(stem for stem, _, _ in LINES)
    return {stem: record.load_results(stem, gpu) for stem in stems if gpu in record.recorded_gpus(stem)}


def gpus() -> list[str]:
    """The GPUs on which any of the files was recorded."""
    found = record.recorded_gpus(*dict.fromkeys(stem for stem, _, _ in LINES))
    return sorted(found, key=lambda gpu: (gpu != record.BOOKS_GPU, gpu))  # the same wherever it is drawn


def digest() -> str:
    """Of the rows that are drawn."""
    rows = [
        table[["run", *POINT[1:], "provider", "ms", "host_us"]].to_csv(index=False)
        for gpu in gpus()
        for table in tables(gpu).values()
    ]
    return hashlib.sha256("\n".join([*gpus(), *rows]).encode()).hexdigest()[:16]


def ratios(rows: pd.DataFrame, column: str) -> pd.Series:
    """For each point the least of the alternatives' times over ours; ``clock``: the longer of device's and host's."""
    if column == "clock":
        rows = rows.loc[rows["host_us"].notna()]
        rows = rows.assign(clock=np.maximum(rows["ms"], rows["host_us"] / 1e3))
    ours = rows.loc[rows["provider"] == "kernelbook"].set_index(POINT)[column]
    theirs = rows.loc[~rows["provider"].str.startswith("kernelbook") & ~rows["provider"].isin(FOR_SCALE)]
    return (theirs.groupby(POINT)[column].min() / ours).dropna()


def _figure(legend: str = "upper") -> Figure:
    mpl.rcParams.update({"svg.hashsalt": "kernelbook", "svg.fonttype": "path"})
    recorded = {gpu: tables(gpu) for gpu in gpus()}
    figure, (ax,) = plots.new_figure(width=7.4, height=(0.16 + 0.14 * len(recorded)) * len(LINES) + 1.3)
    names: list[str] = []
    for (stem, op, mode), name in LINES.items():
        found = [
            (i, table.loc[(table["op"] == op) & (table["mode"] == mode)])
            for i, gpu in enumerate(recorded)
            if (table := recorded[gpu].get(stem)) is not None
        ]
        counts = [len(ratios(rows, "ms")) for _, rows in found]
        found = [one for one, count in zip(found, counts, strict=True) if count and count >= counts[0] / 2]
        if not found:
            continue
        for i, rows in found:
            y = len(names) + 0.42 * (i - (len(recorded) - 1) / 2)
            device, color = ratios(rows, "ms"), COLORS[i % len(COLORS)]
            ax.plot([device.min(), device.max()], [y, y], color=color, linewidth=2, alpha=0.45, solid_capstyle="round")
            ax.plot(device.median(), y, "o", color=color, markersize=7)
            clock = ratios(rows, "clock")
            end = max(device.max(), clock.median()) if len(clock) else device.max()
            ax.annotate(f"{device.median():.2f}", (end, y), (7, 0), textcoords="offset points", va="center", fontsize=9)
            if len(clock):
                ax.plot(clock.median(), y, "o", color=color, markersize=8, markerfacecolor="none", mew=1.5)
        names.append(name)
    ax.axvline(1.0, color=plots.INK, linewidth=1)
    ax.set_xscale("log")
    ax.set_xticks([0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20], ["0.5", "0.7", "1", "1.5", "2", "3", "5", "10", "20"])
    ax.minorticks_off()
    ax.set_yticks(np.arange(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("times as fast as the fastest alternative: the worst recorded point, the middle, the best")
    for i, gpu in enumerate(recorded):
        first = next(iter(recorded[gpu].values()))
        ax.plot([], [], "o-", color=COLORS[i % len(COLORS)], label=f"{first['gpu'].iloc[-1]}, time on the device")
    if any(table["host_us"].notna().any() for one in recorded.values() for table in one.values()):
        ax.plot([], [], "o", color=plots.INK, markerfacecolor="none", mew=1.5, label="by the clock")
    figure.legend(loc=f"outside {legend} left", ncols=3, fontsize=9, frameon=False)
    return figure


def draw() -> None:
    """Writes the picture."""
    description = f"drawn from rows {digest()} of book/results by tools/first_figure.py"
    _figure().savefig(
        PICTURE, metadata={"Date": None, "Description": description}, bbox_inches="tight", facecolor="white"
    )


def draw_card(path: Path, title: str) -> None:
    """Writes what social networks show of a link, 1200 by 630 points: the title above the picture."""
    figure = _figure(legend="lower")
    figure.set_size_inches(12, 6.3)
    figure.suptitle(title, fontsize=19, fontweight="bold")
    figure.savefig(path, dpi=100, facecolor="white")


if __name__ == "__main__":
    draw()
    print(PICTURE)
