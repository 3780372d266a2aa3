"""What several chapters measure, draw and say of recorded rows, each by one call.

It does not draw itself (:mod:`kernelbook.lab.plots` does), and holds no figures: they come from the recorded rows.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pandas as pd
import torch

from kernelbook import check
from kernelbook.lab import measured, plots, record, timing
from kernelbook.lab.judge import judge
from kernelbook.lab.tasks import Task

# Providers of the figures of attention, in their order; the plain variant where it is another kernel.
ATTENTION = (
    *("kernelbook", "kernelbook:plain", "sdpa_flash", "sdpa_cudnn"),
    *("flash_attention_3", "flash_attention_4", "flash_attention_4:one_order", "flex"),
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


def _listed(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def problem(
    reference: Callable[..., Any],
    calls: Mapping[str, Callable[..., Any]],
    *inputs: torch.Tensor,
    factor: float = check.FORWARD_FACTOR,
    unchecked: Collection[str] = (),
) -> timing.Problem:
    """Functions by name of the same inputs, and the reference that all are checked against, in float64 for the truth.

    Each returns a tensor or several. Those of ``unchecked`` compute more than the reference, and are not compared with it.
    """
    wide = [tensor.double() for tensor in inputs]

    def baseline() -> list[torch.Tensor]:
        return _listed(reference(*inputs))

    return timing.Problem(
        providers={name: lambda fn=fn: _listed(fn(*inputs)) for name, fn in calls.items()},  # type: ignore[misc]
        truth=lambda: _listed(reference(*wide)),
        baseline=baseline,
        factor=factor,
        views={name: lambda _: baseline() for name in unchecked},
    )


@dataclasses.dataclass(frozen=True)
class Steps(timing.Case):
    """A case that knows its providers: the steps of a chapter, see :func:`step_case`."""

    providers: tuple[str, ...] = ()


def step_case(
    op: str,
    shape: Mapping[str, Any],
    counts: tuple[float, float],
    reference: Callable[..., Any],
    inputs: Callable[[], Iterable[torch.Tensor]],
    steps: Mapping[str, Callable[..., Any]],
    others: Mapping[str, Callable[..., Any]],
    *,
    mode: str = "forward",
    x_name: str = "N",
    unchecked: Collection[str] = (),
) -> Steps:
    """The steps of a chapter and what they are compared with, on the same float16 tensors.

    Args:
        op, mode, shape, x_name: what a row says of them; ``x_name`` is one of ``shape``.
        counts: bytes and operations, the fewest possible.
        reference, unchecked: see :func:`problem`.
        inputs: makes the tensors that all take.
        steps: functions by the name of the step, in their order.
        others: functions by provider: the package, and peers.
    """
    calls = {f"kernelbook:{name}": step for name, step in steps.items()} | dict(others)
    factor = check.FORWARD_FACTOR if mode == "forward" else check.GRADIENT_FACTOR

    def build() -> timing.Problem:
        return problem(reference, calls, *inputs(), factor=factor, unchecked=unchecked)

    gbytes, gflop = (count / 1e9 for count in counts)
    return Steps(op, mode, torch.float16, shape, x_name, shape[x_name], gbytes, gflop, build, tuple(calls))


def backward_of(forward: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``backward(dy, *inputs)`` -> the gradients of ``forward(*inputs)`` by its inputs; what went forward at the first call is kept."""
    kept: dict[str, Any] = {}

    def backward(dy: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not kept:
            leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
            kept.update(y=forward(*leaves), leaves=leaves)
        return torch.autograd.grad(kept["y"], kept["leaves"], dy, retain_graph=True)

    return backward


def timed_steps(stem: str, cases: Iterable[Steps], *, record: bool, by: str = "gbs", rep_ms: float = 100.0) -> Any:
    """The tables of a chapter's steps, as recorded and on the GPU at hand: :func:`kernelbook.lab.timing.time_steps`."""
    from IPython.display import Markdown

    cases = list(cases)
    own = timing.time_steps(stem, cases, record=record, rep_ms=rep_ms)
    among = {provider for case in cases for provider in case.providers}
    return Markdown(plots.steps(stem, own=own, by=by, among=among))


def own_rows(
    cases: Iterable[timing.Case], *, stem: str = "", keep: bool = False, rep_ms: float = 100.0
) -> pd.DataFrame:
    """What the GPU at hand takes, checked: :func:`kernelbook.lab.timing.time_steps`, whose rows are written where ``keep`` is set."""
    return timing.time_steps(stem, cases, record=keep, rep_ms=rep_ms)


def keep_counts(stem: str, rows: Iterable[Mapping[str, Any]], key: tuple[str, ...]) -> None:
    """Writes rows of the GPU at hand that hold no times, with what they were found with, to ``book/results/<gpu>/<stem>.csv``."""
    run, about = record.new_run(), record.environment(stem)
    table = pd.DataFrame([{"run": run, **row, **about} for row in rows])
    record.write_results(record.results_dir() / record.device_slug() / f"{stem}.csv", table, key=key)


def microseconds(stem: str, pattern: str) -> pd.DataFrame:
    """Recorded times of the shapes that ``pattern`` matches: a row for what its groups find there and each x, a column a provider.

    What a group ``provider`` finds takes the place of ``kernelbook``.
    """
    rows = record.load_results(stem)
    parts = rows["shape"].str.extract(pattern).dropna()
    rows = rows.loc[parts.index]
    ours = parts.pop("provider") if "provider" in parts else rows["provider"]
    parts[rows["x_name"].iloc[0]] = rows["x"].astype(int)
    index = [*parts.columns]
    parts["us"], parts["of"] = 1e3 * rows["ms"], rows["provider"].where(rows["provider"] != "kernelbook", ours)
    return parts.pivot_table("us", index, "of", "median", sort=False)


def sweep(
    stem: str,
    panels: Mapping[str, str],
    *,
    own: pd.DataFrame | None = None,
    y: str = "gbs",
    x_label: str | None = None,
    over: str | None = None,
) -> Any:
    """Recorded rows against what was swept: a panel beside another for each query of pandas, under its title; a tab for each GPU.

    Args:
        stem: of the file in ``book/results/<gpu>``; a GPU whose rows leave a panel empty has no tab.
        panels: by title a query, such as ``op == 'add'``.
        own: the reader's rows, of :func:`own_rows`.
        y, x_label: see :func:`kernelbook.lab.plots.bandwidth_figure`.
        over: a provider; then how many times faster than it the others are, on logarithmic axes.
    """

    def draw(rows: pd.DataFrame, ceilings: pd.DataFrame) -> Any:
        rows = rows.sort_values("provider", kind="stable")  # one colour for a provider in all panels
        found = {title: rows.query(query) for title, query in panels.items()}
        if any(part.empty for part in found.values()):
            return None
        figure, axes = plots.new_figure(
            columns=len(panels), width=max(6.8, 3.0 * len(panels)), height=3.1, share_y=over is not None
        )
        for ax, (title, part) in zip(axes, found.items(), strict=True):
            mine = own.query(panels[title]) if own is not None and len(own) else None
            if over is None:
                plots.bandwidth_figure(part, ceilings, own=mine, y=y, x_label=x_label, title=title, ax=ax)
                continue
            ax.set(xscale="log", yscale="log")
            plots.speedup_figure(part, over, own=mine, x_label=x_label, title=title, ax=ax)
            ax.get_legend().remove()
            if ax is not axes[0]:
                ax.set_ylabel("")
        if over is not None:
            figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8)
        return plots.finish(figure, rows, own=own)

    return plots.with_records(stem, draw)


def compiler_table(kernels: Mapping[str, Any], **more: Mapping[str, Any]) -> pd.DataFrame:
    """What the compiler says of :class:`kernelbook.lab.compiled.CompiledKernel` objects, a line each by name; ``more``: further columns."""
    return pd.DataFrame(
        {
            name: {
                **{column: values[name] for column, values in more.items()},
                "registers a thread": kernel.registers,
                "spilled, bytes": kernel.spill_bytes,
                "shared, KiB": round(kernel.shared_bytes / 1024),
            }
            for name, kernel in kernels.items()
        }
    ).T


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
        kept &= ~table["shape"].str.contains("sequences=")  # packed: another problem at the same N
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


def exercise(answer: Any, task: str | Task) -> None:
    """Prints the judgement of an answer, or that there is none yet: the last line of an exercise's cell."""
    print("Not written yet." if answer is None else judge(answer, task))
