"""The few figures that several chapters share, drawn from rows of ``book/results`` (see :mod:`kernelbook.lab.timing`).

A provider has the same colour and marker in every figure. Recorded rows are filled markers on a line; the reader's own
rows (``own``) are open markers of the same colour. A figure names under its axes what its rows were measured with, read
from those rows. Functions return a closed figure: as the last expression of a cell it is shown once.
"""

import base64
import io
import itertools
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernelbook.lab import measured, record, stale

# The colours of the book's drawings (CONTRIBUTING.md).
INK, GREY, PALE = "#1e293b", "#64748b", "#e2e8f0"
BLUE, ORANGE, GREEN, VIOLET, BROWN = "#2563eb", "#c2410c", "#0f766e", "#7c3aed", "#a16207"
COLORS = (BLUE, ORANGE, GREEN, VIOLET, BROWN, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P")

# A white card with dark ink, so that a figure is legible in the light and in the dark theme.
STYLE: Any = {
    "figure.facecolor": "white",
    "figure.dpi": 150,
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": PALE,
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
}

# Decorates what draws: the style then holds there, and nothing global changes.
_styled: Any = plt.rc_context(STYLE)

# Dense bf16 and fp16 products, by NVIDIA's data sheets.
DATA_SHEET_TFLOPS = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989}

# Peers keep their colours between chapters; others take the next colour that is free.
_FIXED = {"kernelbook": 0, "torch": 1, "dense": 1, "torch.compile": 2}


def glue(name: str, value: object) -> None:
    """Keeps ``value`` for the text of the page, where {glue:text}`name` puts it. Outside the book, prints it."""
    try:
        from myst_nb import glue as keep
    except ImportError:  # a notebook that runs without the book's own packages
        print(f"{name} = {value}")
    else:
        keep(name, value, display=False)


_sets = itertools.count()  # tab sets of a page, so that each has ids of its own


def tabs(parts: Mapping[str, object]) -> Any:
    """Figures, HTML or text under tabs, by their labels; the first is open. It needs no script, and prints one after another.

    A label that is a GPU's folder in ``book/results`` is shown as that GPU's model. The markup is that of sphinx-design, whose
    style sheet every page of the book has.
    """
    from IPython.display import HTML

    number, items = next(_sets), []
    for i, (given, part) in enumerate(parts.items()):
        label = record.gpu_name(given)
        short = re.sub(r"^NVIDIA (\S+).*", r"\1", label)  # two of them fit beside each other on a phone
        name = f"kb-tab-{number}-{i}"
        checked = ' checked="checked"' if i == 0 else ""
        items.append(
            f'<input{checked} id="{name}" name="kb-tabs-{number}" type="radio">'
            f'<label class="sd-tab-label" for="{name}" title="{escape(label)}">{escape(short)}</label>'
            f'<div class="sd-tab-content docutils">{_as_html(part, label)}</div>'
        )
    return HTML(f'<div class="sd-tab-set docutils">{"".join(items)}</div>')


def _as_html(part: object, label: str) -> str:
    if isinstance(part, Figure):
        content = io.BytesIO()
        part.savefig(content, format="png", bbox_inches="tight")
        data = base64.b64encode(content.getvalue()).decode()
        return f'<img alt="As measured on {escape(label)}" src="data:image/png;base64,{data}">'
    if hasattr(part, "_repr_html_"):
        return str(part._repr_html_())
    if hasattr(part, "_repr_markdown_"):
        text = str(part._repr_markdown_())
        try:
            from markdown_it import MarkdownIt
        except ImportError:  # the book's own renderer, which a reader's notebook need not have
            return f"<pre>{escape(text)}</pre>"
        return str(MarkdownIt("commonmark").enable("table").render(text)).replace("<table>", '<table class="table">')
    return escape(str(part))


def by_gpu(stem: str | Sequence[str], draw: Callable[[str], Any]) -> Any:
    """What ``draw(gpu)`` makes of each GPU that has recorded rows of ``stem``, for the last line of a cell.

    Where there are several, each has a tab: the book's GPU first, then the reader's own, then the others; a GPU of which
    ``draw`` makes nothing has none. ``gpu`` is a folder of ``book/results``, as :func:`kernelbook.lab.record.load_results`
    takes it.
    """
    gpus = record.recorded_gpus(*([stem] if isinstance(stem, str) else stem))
    drawn = {gpu: part for gpu in gpus if (part := draw(gpu)) is not None}
    return tabs(drawn) if len(drawn) > 1 else next(iter(drawn.values()), None)


def with_records(stem: str, draw: Callable[[pd.DataFrame, pd.DataFrame], Any]) -> Any:
    """What ``draw(rows, ceilings)`` makes of each GPU's recorded rows of ``stem`` and of its ceilings, see :func:`by_gpu`.

    ``draw`` returns ``None`` for rows that lack what it draws, and that GPU has no tab.
    """
    return by_gpu(stem, lambda gpu: draw(record.load_results(stem, gpu), record.load_ceilings(gpu)))


def provenance(*tables: pd.DataFrame | None) -> str:
    """What the rows were measured with: GPU and versions, from the rows themselves; the files have the rest."""
    rows = pd.concat([table for table in tables if table is not None and len(table)])
    parts = []
    for column, prefix in (("gpu", ""), ("torch", "torch "), ("triton", "triton ")):
        parts.append(prefix + ", ".join(sorted(rows[column].astype(str).unique())))
    return " · ".join(parts)


@_styled
def new_figure(
    *, columns: int = 1, width: float = 6.8, height: float = 3.1, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure in the book's style with ``columns`` axes beside each other; sizes in inches."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, sharey=share_y, layout="constrained"
    )
    return figure, list(axes[0])


@_styled
def finish(figure: Figure, *tables: pd.DataFrame | None, own: pd.DataFrame | None = None) -> Figure:
    """Writes the provenance of ``tables`` (and of the reader's ``own`` rows), and what of them is older, under the axes.

    Titles and legends that were added outside of this module get its style.
    """
    for ax in figure.axes:
        if title := ax.get_title("center"):
            ax.set_title("", loc="center")
            ax.set_title(title)
    for legend in [*figure.legends, *(found for ax in figure.axes if (found := ax.get_legend()))]:
        legend.set_frame_on(False)
    lines = []
    if any(table is not None and len(table) for table in tables):
        lines.append(provenance(*tables))
        lines += [older for table in tables if table is not None and (older := record.dated(table))]
    if own is not None and len(own):
        lines.append("open markers, yours: " + provenance(own))
    if any(shape.get_gid() == BAND for ax in figure.axes for shape in ax.collections):
        lines.append("bands: from the 20th to the 80th percentile")
    lines = [textwrap.fill(line, round(19 * figure.get_figwidth())) for line in lines]  # characters of that size
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.01, ha="left")
    plt.close(figure)
    return figure


def provider_style(providers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each provider. A variant (``kernelbook:locks``) is its provider's colour, dashed."""
    styles: dict[str, dict[str, Any]] = {}
    families = list(dict.fromkeys(provider.split(":")[0] for provider in providers))
    free = [i for i in range(len(COLORS)) if i not in {_FIXED[f] for f in families if f in _FIXED}]
    indices = {family: _FIXED[family] if family in _FIXED else (free.pop(0) if free else -1) for family in families}
    variants: dict[str, int] = {}
    for provider in dict.fromkeys(providers):
        family, _, variant = provider.partition(":")
        index = indices[family]
        number = variants[family] = variants.get(family, -1) + 1
        dashes: Any = "-" if not variant else (("--", ":", "-.")[max(number - 1, 0) % 3])
        marker = MARKERS[index] if not variant else MARKERS[(index + 2 + number) % len(MARKERS)]
        styles[provider] = {"color": COLORS[index], "marker": marker, "linestyle": dashes}
    return styles


def _lines(ax: Axes, rows: pd.DataFrame, y: str, styles: dict[str, dict[str, Any]], *, own: bool, label: bool) -> None:
    for provider, group in rows.groupby("provider", sort=False):
        style = dict(styles[str(provider)])
        if own:
            style |= {"linestyle": "none", "markerfacecolor": "white", "markersize": 6, "zorder": 3}
        group = group.sort_values("x")
        if 2 * group["x"].nunique() < rows["x"].nunique():  # a line would claim the points that were not measured
            style |= {"linestyle": "none"}
        ax.plot(group["x"], group[y], label=str(provider) if label else None, **style)
        if not own:
            low, high = group[y] * group["low"], group[y] * group["high"]
            ax.fill_between(group["x"], low, high, color=style["color"], alpha=0.22, linewidth=0, gid=BAND)


BAND = "band"  # from the 20th to the 80th percentile


def _with_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``gbs`` and ``tflops``, and figures as numbers (rows that were just measured hold text).

    ``low`` and ``high``: what the 80th and the 20th percentile of the time make of a rate, as factors.
    """
    spread = [name for name in ("ms_p20", "ms_p80") if name in rows.columns]
    figures = rows[["x", "ms", "gbytes", "gflop", *spread]].apply(pd.to_numeric)
    ms = figures["ms"]
    return rows.assign(
        **figures,
        gbs=figures["gbytes"] / ms * 1e3,
        tflops=figures["gflop"] / ms,
        low=ms / figures.get("ms_p80", ms),
        high=ms / figures.get("ms_p20", ms),
    )


def _tables(rows: pd.DataFrame | None, own: pd.DataFrame | None) -> Iterator[tuple[pd.DataFrame, bool]]:
    """The tables that have rows, with rates, each with whether it is the reader's own."""
    for table, is_own in ((rows, False), (own, True)):
        if table is not None and len(table):
            yield _with_rates(table), is_own


def _swept(
    tables: Sequence[tuple[pd.DataFrame, bool]],
    y: str,
    over: Sequence[str],
    x_label: str | None,
    title: str,
    ax: Axes | None,
) -> tuple[Figure, Axes, dict[str, dict[str, Any]]]:
    """Draws lines of ``y`` against ``x`` into ``ax`` or a new figure; ``over``: providers that have a style and no line.

    -> the figure, its axes and the styles.
    """
    if ax is None:
        figure, (ax,) = new_figure()
    else:
        figure = ax.get_figure()  # type: ignore[assignment]
    everything = pd.concat([table for table, _ in tables])
    styles = provider_style([*over, *everything["provider"]])
    for i, (table, is_own) in enumerate(tables):
        _lines(ax, table, y, styles, own=is_own, label=i == 0)
    x = everything["x"]
    if len(x) and float(x.max()) > 30 * max(float(x.min()), 1e-9):
        ax.set_xscale("log", base=2)
    ax.set_xlabel(x_label or str(everything["x_name"].iloc[0]))
    ax.set_title(title)
    return figure, ax, styles


@_styled
def bandwidth_figure(
    rows: pd.DataFrame | None,
    ceilings: pd.DataFrame | None = None,
    *,
    own: pd.DataFrame | None = None,
    y: str = "gbs",
    x_label: str | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """GB/s (``y="tflops"``: TFLOP/s) of each provider against ``x``, with the ceiling of the same runs as a line.

    Args:
        rows: recorded rows of one operation, mode and dtype; ``None`` or empty where nothing is recorded.
        ceilings: recorded ceilings; those of the runs in ``rows`` are drawn (copy, or the bf16 matrix product).
        own: the reader's rows.
        ax: axes to draw in, of a figure that the caller finishes; else a new figure.
    """
    own_figure = ax is None
    figure, ax, _ = _swept(list(_tables(rows, own)), y, (), x_label, title, ax)
    if ceilings is not None and rows is not None and len(rows):
        column, name = ("copy_gbs", "copy") if y == "gbs" else ("bf16_tflops", "bf16 matmul, PyTorch, 8192³")
        ceiling = ceilings.loc[ceilings["run"].isin(rows["run"]), column]
        if len(ceiling):
            ax.axhline(float(ceiling.median()), color=INK, linewidth=1, linestyle=(0, (4, 3)), label=f"ceiling: {name}")
    ax.set_ylabel("GB/s" if y == "gbs" else "TFLOP/s")
    # The legend lies above all lines: nothing says where there would be room among them.
    lines = math.ceil(len(ax.get_legend_handles_labels()[0]) / 2)
    highest = max(float(np.nanmax(np.asarray(line.get_ydata(), dtype=float))) for line in ax.lines)
    ax.set_ylim(0, highest / (1 - 0.1 * lines))
    size = 8.5 if len(figure.axes) == 1 else 7
    ax.legend(loc="upper left", ncols=2, fontsize=size, handlelength=1.6, columnspacing=1)
    return finish(figure, rows, own=own) if own_figure else figure


def _ratios(rows: pd.DataFrame, over: str) -> pd.DataFrame:
    """``speedup``: the time of ``over`` divided by each row's, within one run, operation, mode, dtype, shape and x."""
    key = ["run", "op", "mode", "dtype", "shape", "x"]
    base = rows.loc[rows["provider"] == over, [*key, "ms", "low", "high"]]
    joined = rows.merge(base, on=key, suffixes=("", "_base"))
    speedup = joined["ms_base"] / joined["ms"]
    low, high = joined["low"] / joined["high_base"], joined["high"] / joined["low_base"]
    return joined.assign(speedup=speedup, low=low, high=high).loc[joined["provider"] != over]


@_styled
def speedup_figure(
    rows: pd.DataFrame | None,
    over: str,
    *,
    own: pd.DataFrame | None = None,
    x_label: str | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """How many times faster than the provider ``over``, within a run; the line at 1 is where a provider loses."""
    own_figure = ax is None
    tables = [(_ratios(table, over), is_own) for table, is_own in _tables(rows, own)]
    figure, ax, styles = _swept(tables, "speedup", (over,), x_label, title, ax)
    ax.axhline(1.0, color=styles[over]["color"], linewidth=1, linestyle=(0, (4, 3)), label=f"{over} = 1")
    ax.set_ylabel(f"times faster than {over}")
    if ax.get_yscale() == "linear":  # the axes given may be logarithmic
        ax.set_ylim(bottom=0)
    ax.legend()
    return finish(figure, rows, own=own) if own_figure else figure


def _microseconds(ms: float) -> str:
    return f"{1e3 * ms:,.0f}" if ms >= 1 else f"{1e3 * ms:.1f}"


def _without_ours(providers: pd.Series) -> pd.Series:
    return providers.str.removeprefix("kernelbook:").replace("kernelbook", "the package")


def ladder(
    rows: pd.DataFrame,
    ceilings: pd.DataFrame,
    *,
    by: str = "gbs",
    peak: bool = False,
) -> str:
    """The steps of a chapter as a Markdown table: microseconds, share of the ceiling, times the best step before.

    Args:
        rows: the steps of one operation, mode and shape in one run, in their order; providers that are not ours are peers
            and come last.
        ceilings: recorded ceilings; that of the rows' run, else the median.
        by: ``gbs`` for a share of the copy's bandwidth, ``tflops`` for one of the matrix product's rate.
        peak: name the most memory that a step holds at a time beyond its inputs, too.
    """
    rows = _with_rates(rows).reset_index(drop=True)
    ours = rows["provider"].str.startswith("kernelbook")
    names = _without_ours(rows["provider"])
    column = {"gbs": "copy_gbs", "tflops": "bf16_tflops"}[by]
    own = ceilings.loc[ceilings["run"].isin(rows["run"]), column]
    share = rows[by] / float((own if len(own) else ceilings[column]).median())
    steps = rows["ms"].where(ours)
    gain = steps.cummin().shift(1) / steps
    table = pd.DataFrame(
        {
            "step": names,
            "µs": [_microseconds(ms) for ms in rows["ms"]],
            "of the copy's bandwidth" if by == "gbs" else "of cuBLAS at 8192³": [f"{value:.0%}" for value in share],
            "times as fast as the best before": ["" if math.isnan(value) else f"{value:.2f}" for value in gain],
        }
    )
    sheet = [DATA_SHEET_TFLOPS.get(str(gpu)) for gpu in rows["gpu"]] if by == "tflops" and "gpu" in rows else []
    if sheet and all(sheet):
        table["of the data sheet"] = [f"{rate / most:.0%}" for rate, most in zip(rows["tflops"], sheet, strict=True)]
    if peak:
        table["MiB"] = [f"{float(value):,.0f}" for value in rows["peak_mib"]]
    return pd.concat([table[ours], table[~ours]]).to_markdown(index=False, disable_numparse=True)


def _ladders_folder(stem: str) -> str | None:
    """Which GPU's ladder is shown: of the page's steps as they are, with the most of them; the book's GPU, if it is as good."""

    def good(gpu: str) -> tuple[bool, int]:
        rows = record.load_results(stem, gpu)
        return bool((rows["state"] == stale.CURRENT).all()), len(rows)

    return max(record.recorded_gpus(stem), key=good, default=None)


def _recorded(stem: str) -> pd.DataFrame | None:
    folder = _ladders_folder(stem)
    return None if folder is None else record.load_results(stem, folder)


def ladder_gpu(stem: str) -> str:
    """The GPU of the ladder that the page shows, in a sentence: "an H200"."""
    name = record.gpu_name(_ladders_folder(stem) or record.BOOKS_GPU)
    short = re.search(r"\b[A-Z]+\d+\w*", name)
    return name if short is None else f"{'an' if short[0][0] in 'AEFHILMNORSX' else 'a'} {short[0]}"


def _ladders(
    rows: pd.DataFrame, only: Mapping[str, Any], among: Collection[str] | None = None
) -> list[tuple[str, pd.DataFrame]]:
    """The ladders among ``rows``, each with what it is a ladder of; ``among``: only these of our steps."""
    for column, value in only.items():
        rows = rows.loc[rows[column] == value]
    if among is not None:
        rows = rows.loc[rows["provider"].isin(among) | ~rows["provider"].str.startswith("kernelbook:")]
    named = rows.groupby(["op", "mode", "shape", "dtype"], sort=False)
    ladders = [
        ("{}, {}, {}, {}".format(*map(str, key)).replace("_backward", " + backward"), part) for key, part in named
    ]
    return [(name, part) for name, part in ladders if part["provider"].str.startswith("kernelbook:").any()]


def step_times(stem: str, **only: Any) -> dict[str, float]:
    """Microseconds of the steps and peers of the first recorded ladder that ``only`` picks, by name, in their order; NaN for
    what is not recorded."""
    recorded = _recorded(stem)
    ladders = [] if recorded is None else _ladders(recorded, only)
    times: dict[str, float] = defaultdict(lambda: math.nan)
    for _, rows in ladders[:1]:
        times |= dict(zip(_without_ours(rows["provider"]), 1e3 * rows["ms"].astype(float), strict=True))
    return times


@_styled
def steps_figure(stem: str, *, leave_out: Collection[str] = (), **only: Any) -> Figure | str:
    """A recorded ladder as a small chart, a bar for each step with its time, peers in grey; a word where it is not recorded.

    Args:
        stem: the file that :func:`kernelbook.lab.timing.time_steps` wrote, of the GPU that :func:`ladder_gpu` names.
        leave_out: recorded steps that the page has not.
        only: values of columns that pick one ladder among the rows; the first of several is drawn.
    """
    recorded = _recorded(stem)
    ladders = [] if recorded is None else _ladders(recorded, only)
    if not ladders:
        return "These times are not recorded yet."
    name, rows = ladders[0]
    rows = rows[~_without_ours(rows["provider"]).isin(leave_out)]
    ours = rows["provider"].str.startswith("kernelbook")
    rows = pd.concat([rows[ours], rows[~ours]])
    times, names = 1e3 * rows["ms"].astype(float), _without_ours(rows["provider"])
    figure, (ax,) = new_figure(width=4.0, height=0.75 + 0.2 * len(rows))
    colors = [BLUE if mine else GREY for mine in rows["provider"].str.startswith("kernelbook")]
    bars = ax.barh(range(len(rows)), times, color=colors, height=0.62)
    ax.bar_label(bars, labels=[f"{_microseconds(ms / 1e3)} µs" for ms in times], padding=3, fontsize=8)
    ax.set_yticks(range(len(rows)), list(names), fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.25 * times.max())
    ax.xaxis.set_visible(False)
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)
    ax.set_title(textwrap.fill(name, 36), fontsize=9)  # narrow enough for a phone
    return finish(figure, rows)


def steps(
    stem: str,
    *,
    own: pd.DataFrame | None = None,
    by: str = "gbs",
    peak: bool = False,
    among: Collection[str] | None = None,
    **only: Any,
) -> str:
    """All recorded ladders of a chapter as Markdown, the reader's own below, and which steps gained nothing.

    Args:
        stem: the file that :func:`kernelbook.lab.timing.time_steps` wrote, of the GPU that :func:`ladder_gpu` names.
        own: what :func:`kernelbook.lab.timing.time_steps` returned: the reader's times, if any.
        by, peak: see :func:`ladder`.
        among: the steps that the page has, as providers; a file may hold others. ``None`` for all.
        only: values of columns that pick some of the ladders.
    """
    text = ""
    for title, rows in (("Recorded", _recorded(stem)), ("Yours", own)):
        if rows is None or not len(rows):
            continue
        ceilings = record.load_ceilings(_ladders_folder(stem) or record.BOOKS_GPU)
        for name, part in _ladders(rows, only, among):
            table = ladder(part, ceilings, by=by, peak=peak)
            text += f"{title}: {name}. {provenance(part)}\n\n{table}\n\n"
            ours = part.loc[part["provider"].str.startswith("kernelbook")].reset_index(drop=True)
            ms, low, high = (ours[column].astype(float) for column in ("ms", "ms_p20", "ms_p80"))
            best = [0 if i == 0 else int(ms[:i].idxmin()) for i in range(len(ms))]
            steps = _without_ours(ours["provider"])
            slower = [name for i, name in enumerate(steps) if i and low[i] > high[best[i]]]
            alike = [name for i, name in enumerate(steps) if i and low[i] <= high[best[i]] and high[i] >= low[best[i]]]
            text += f"Slower than the best before: {', '.join(slower)}.\n\n" if slower else ""
            text += f"No difference beyond the spread of the times: {', '.join(alike)}.\n\n" if alike else ""
        if title == "Recorded" and (rows["state"] != stale.CURRENT).any():
            text += "These times are of an earlier version of this page's steps: steps that joined since are not among them.\n\n"
    return text or "Nothing is recorded yet."


@_styled
def roofline_figure(ceilings: pd.DataFrame, intensities: Mapping[str, float]) -> Figure:
    """Attainable TFLOP/s against arithmetic intensity, both axes logarithmic.

    Args:
        ceilings: recorded ceilings; the roof is their median.
        intensities: FLOP per byte of operations to mark under the roof, by name.
    """
    figure, (ax,) = new_figure(height=4.2)
    low, high = min(0.05, *(m / 2 for m in intensities.values())), max(8000.0, *(2 * m for m in intensities.values()))

    copy, most = ceilings[["copy_gbs", "bf16_tflops"]].median()
    ridge, lowest = most * 1e3 / copy, low * copy / 1e3
    ax.plot([low, ridge, high], [lowest, most, most], color=INK, zorder=2)
    halfway = (low * ridge) ** 0.5
    how: Any = {"textcoords": "offset points", "fontsize": 8.5}
    ax.annotate(f"copy: {copy:.0f} GB/s", (halfway, halfway * copy / 1e3), xytext=(-6, 4), ha="right", **how)
    ax.annotate(f"bf16 matmul: {most:.0f} TFLOP/s", (ridge, most), xytext=(-6, 5), ha="right", **how)
    ax.plot([ridge, ridge], [1e-4, most], color=GREY, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(lowest, 3 * most))
    for i, (name, value) in enumerate(intensities.items()):
        top = min(most, value * copy / 1e3)
        ax.plot([value, value], [lowest, top], color=GREY, linewidth=1, zorder=1)
        ax.plot(value, top, "_", color=GREY, markersize=9, zorder=3)
        ax.annotate(name, (value, lowest), xytext=(4, 5 + 11 * (i % 2)), color=GREY, **how)
    ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="TFLOP/s")
    return finish(figure, ceilings)


BOUNDS = {"bytes": (BLUE, "o"), "products": (ORANGE, "D"), "launch": (GREY, "s")}


def timeline(stem: str, drawn: range, title: str) -> tuple[Figure, pd.Series, float]:
    """Draws when the warps of a program waited and worked, by the SM's clock.

    Args:
        stem: of the file in the results: ``<stem>_timeline.csv``.
        drawn: the steps of a loop that the figure shows.

    Returns:
        The figure; the median cycles that the first of its partitions spent a step, by what it did; those of a whole step.
    """
    rows = pd.read_csv(record.results_dir() / record.BOOKS_GPU / f"{stem}_timeline.csv")
    rows["cycles"] = rows["end"] - rows["begin"]
    own = rows.loc[rows["partition"] == rows["partition"].iloc[0]]
    rows = rows.loc[rows["step"].isin(drawn)]
    figure, (ax,) = new_figure(height=2.2)
    colors = {"wait": GREY, "softmax": ORANGE, "store": ORANGE}
    for what, part in rows.groupby("what"):
        left = part["begin"] - rows["begin"].min()
        ax.barh(part["partition"], part["cycles"], left=left, height=0.6, color=colors.get(str(what).split()[0], BLUE))
    ax.set_xlabel("cycles")
    ax.set_title(title)
    return (
        finish(figure),
        own.groupby("what")["cycles"].median(),
        float(own.groupby("step")["begin"].min().diff().median()),
    )


@_styled
def share_figure(found: pd.DataFrame) -> Figure:
    """How near each call is to its bound: a line for each function and mode, a dot for each point, a stroke at the median.

    Args:
        found: of :func:`kernelbook.lab.measured.shares`.
    """
    lines = measured.share_lines(found)
    figure, (ax,) = new_figure(width=7.4, height=0.23 * len(lines) + 1.3)
    for y, line in lines.iterrows():
        points = found.loc[(found["op"] == line["op"]) & (found["mode"] == line["mode"])]
        for bound, (color, marker) in BOUNDS.items():
            of = points.loc[points["bound"] == bound, "share"]
            ax.plot(of, [y] * len(of), marker, color=color, alpha=0.5, markersize=4.5, mew=0)
        ax.plot(line["median"], y, "|", color=INK, markersize=11, mew=1.6)
    for bound, (color, marker) in BOUNDS.items():
        ax.plot([], [], marker, color=color, markersize=4.5, label=bound)
    ax.plot([], [], "|", color=INK, markersize=9, mew=1.6, label="median")
    ax.axvline(measured.NEAR, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    names = [f"{op}, {mode.replace('_', ' + ')}" for op, mode in zip(lines["op"], lines["mode"], strict=True)]
    ax.set_yticks(range(len(lines)), names, fontsize=8)
    ax.set(ylim=(len(lines) - 0.4, -0.6), xlim=(0, None))
    ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.set_xlabel(f"the bound over the time of a call; dashed: {measured.NEAR:.0%}")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=len(BOUNDS) + 1, fontsize=8)
    return finish(figure, found)
