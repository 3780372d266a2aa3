"""What several chapters measure, draw and say of recorded rows, each by one call.

It does not draw itself (:mod:`kernelbook.lab.plots` does), and holds no figures: they come from the recorded rows.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
import torch

from kernelbook import check
from kernelbook.lab import measured, plots, record, timing

__all__ = ["attention_points", "attention_rates", "attention_sweep", "beside", "in_words", "problem"]

# Providers of the figures of attention, in their order; the plain variant where it is another kernel.
ATTENTION = (
    *("kernelbook", "kernelbook:plain", "sdpa_flash", "sdpa_cudnn"),
    *("flash_attention_4", "flash_attention_4:one_order", "flex"),
)
# The shapes of the tables of attention.
NAMED = (
    "B=4 H=48 H_kv=48 N=4096 S=4096 D=64 causal=yes",
    "B=4 H=16 H_kv=16 N=4096 S=4096 D=128 causal=yes",
    "B=1 H=16 H_kv=16 N=16384 S=16384 D=128 causal=yes",
    "B=4 H=16 H_kv=16 N=4096 S=4096 D=128 causal=no",
    "B=4 H=32 H_kv=8 N=4096 S=4096 D=128 causal=yes",
)
OWN_LENGTHS = (1024, 4096, 16384)  # at which a GPU at hand is measured


def problem(
    reference: Callable[..., torch.Tensor],
    calls: Mapping[str, Callable[..., torch.Tensor]],
    *inputs: torch.Tensor,
    factor: float = check.FORWARD_FACTOR,
) -> timing.Problem:
    """Functions by name of the same inputs, and the reference that all are checked against, in float64 for the truth."""
    wide = [tensor.double() for tensor in inputs]
    return timing.Problem(
        providers={name: lambda fn=fn: [fn(*inputs)] for name, fn in calls.items()},  # type: ignore[misc]
        truth=lambda: [reference(*wide)],
        baseline=lambda: [reference(*inputs)],
        factor=factor,
    )


def in_words(shape: str) -> str:
    """A shape of attention, ``B=4 H=16 ... causal=yes``, as a sentence says it."""
    sizes = dict(part.split("=") for part in shape.split())
    words = f"N\u00a0=\u00a0{int(sizes['N']):,}, D\u00a0=\u00a0{sizes['D']}"
    words += f", {sizes['H']}\u00a0heads" + ("" if sizes["H"] == sizes["H_kv"] else f" on\u00a0{sizes['H_kv']}")
    return words + (", causal" if sizes["causal"] == "yes" else "")


def beside(points: pd.DataFrame, peers: tuple[str, ...]) -> str:
    """A line of Markdown for each peer: how fast ours is beside it, and at how many points it is faster or slower.

    Args:
        points: of :func:`kernelbook.lab.measured.compared`.
        peers: the providers to compare with; one without points has no line.
    """
    text = ""
    for peer in peers:
        found = points.loc[points["provider"] == peer]
        if len(found):
            won, lost = (int((found["verdict"] == verdict).sum()) for verdict in ("faster", "slower"))
            text += (
                f"- **Against {peer}** it is {found['ratio'].min():.2f} to {found['ratio'].max():.2f} times as fast: "
            )
            text += f"faster at {won} of {len(found)} points, slower at {lost or 'none'}.\n"
    return text


def attention_points(cases: Iterable[timing.Case], mode: str) -> list[timing.Case]:
    """Of the cases of attention those of one mode that a chapter measures on the GPU at hand: causal, heads of 128 numbers."""

    def wanted(case: timing.Case) -> bool:
        shape = case.shape
        same = case.x_name == "N" and case.mode == mode and case.dtype == torch.bfloat16 and case.x in OWN_LENGTHS
        return same and shape["D"] == 128 and shape["H"] == shape["H_kv"] == 16 and shape["causal"] == "yes"

    return [case for case in cases if wanted(case)]


def attention_sweep(
    rows: pd.DataFrame, ceilings: pd.DataFrame, mode: str, causal: bool, own: pd.DataFrame | None = None
) -> Any:
    """TFLOP/s against the length of a sequence, for heads of 64 and of 128 numbers, as a figure; ``None`` where a panel would be empty.

    Args:
        rows, own: as :func:`kernelbook.lab.record.load_results` gives them; those of the sweep over N are drawn.
        ceilings: recorded ceilings.
        mode, causal: which rows.
    """

    def panel(table: pd.DataFrame | None, D: int) -> pd.DataFrame | None:
        if table is None or not len(table):
            return None
        sizes = measured.sizes(table["shape"])
        kept = (table["mode"] == mode) & (table["dtype"] == "bfloat16") & table["provider"].isin(ATTENTION)
        kept &= (table["x_name"] == "N") & (sizes["D"] == str(D)) & (sizes["causal"] == ("yes" if causal else "no"))
        kept &= (sizes["H"] == sizes["H_kv"]) & (sizes["H"] == str(2048 // D))
        order = table["provider"].map({name: place for place, name in enumerate(ATTENTION)})
        return table.assign(order=order).loc[kept].sort_values(["order", "x"])

    drawn = {D: panel(rows, D) for D in (64, 128)}
    if any(found is None or found.empty for found in drawn.values()):
        return None
    figure, axes = plots.new_figure(columns=2, width=9.0, height=4.0, share_y=True)
    for ax, (D, found) in zip(axes, drawn.items(), strict=True):
        plots.bandwidth_figure(
            found, ceilings, own=panel(own, D), y="tflops", x_label="N = S", title=f"D = {D}", ax=ax
        )  # fmt: skip
        ticks: list[Any] = sorted(set(found["x"])) if found is not None else []
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{n // 1024:.0f}k" for n in ticks])
        ax.set_ylim(0, 1.5 * ceilings["bf16_tflops"].median())
        ax.legend(ncols=2, loc="upper left", fontsize=7.5, frameon=False)
    axes[1].set_ylabel("")
    return plots.finish(figure, drawn[128], own=panel(own, 128))


def attention_rates(mode: str) -> str:
    """TFLOP/s of the book's GPU at some shapes, a line for each provider, as Markdown."""
    rows = record.load_results("attention", record.BOOKS_GPU)
    rows = rows.loc[(rows["mode"] == mode) & (rows["dtype"] == "bfloat16") & rows["shape"].isin(NAMED)]
    table = rows.loc[rows["provider"].isin(ATTENTION)].pivot_table(index="provider", columns="shape", values="tflops")
    table = table.reindex(index=[p for p in ATTENTION if p in table.index], columns=[s for s in NAMED if s in table])
    table.columns = pd.Index([in_words(shape) for shape in table.columns])
    cells = table.map(lambda rate: "" if pd.isna(rate) else f"{rate:.0f}").reset_index(names="TFLOP/s")
    return str(cells.to_markdown(index=False, disable_numparse=True, colalign=["left", *["right"] * table.shape[1]]))
