"""What the rows of ``book/results`` say of a function beside what one would use instead: the pages "Measured" and "The package".

A point is one call: function, mode, dtype and shape, timed in one run with its baselines. Needs the extra ``lab``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kernelbook.lab import record, timing

# Files that measure the package's functions, and the chapters about them. Others measure the steps of a chapter.
FILES = {
    "layer_norm": "layer_norm",
    "sparse_linear": "sparse_linear",
    "attention": "attention_forward",
    "scatter_ffn": "scatter_ffn",
    "nf4": "nf4",
    "moe_lora": "moe_lora",
    "moe_block": "together",
    "several_gpus": "several_gpus",
    "models": None,  # all functions, at the sizes of published models
}
# Not what one would use instead: a part of the work only, or there to show how far one can fall.
FOR_SCALE = (*record.BOUNDS, "python_loop", "sdpa_math", "eager")
POINT = ["run", "op", "mode", "dtype", "shape", "x_name", "x", "gpus"]
SAME_BY_THE_CLOCK = 0.05  # the host's time has no percentiles: a difference below this share is none
NEAR = 0.9  # share of the bound from which on nothing has to be explained
# No function of the package but what one is compared with; no ceiling of an exchange between GPUs is measured.
NO_BOUND = {"ops": ("read_rows",), "files": ("several_gpus",)}


def with_swept(rows: pd.DataFrame) -> pd.Series:
    """The shape of each row, with the swept variable where it is not part of it."""
    named = rows["x_name"].notna() & ~pd.Series(
        [f"{name}=" in f" {shape}" for name, shape in zip(rows["x_name"], rows["shape"], strict=True)],
        index=rows.index,
        dtype=bool,
    )
    swept = " " + rows["x_name"].astype(str) + "=" + rows["x"].map("{:g}".format)
    return rows["shape"] + swept.where(named, "")


def sizes(shapes: pd.Series) -> pd.DataFrame:
    """A column for each name in texts like ``M=4096 N=1024``."""
    return pd.DataFrame([dict(pair.split("=", 1) for pair in shape.split()) for shape in shapes], index=shapes.index)


def compared(rows: pd.DataFrame, leave_out: Sequence[str] = record.BOUNDS) -> pd.DataFrame:
    """A row for each point and baseline, taken within one run.

    Args:
        rows: as :func:`kernelbook.lab.record.load_results` gives them.
        leave_out: baselines that are not compared with.

    Returns:
        the baseline's row, ours in columns that end in ``_ours``, and

        - ``ratio``: the baseline's time on the device over ours; ``clock``: the same of what a caller waits for, the longer of
          device and host (NaN where the host's time is not recorded);
        - ``verdict``: ``faster`` or ``slower`` where the bands from the 20th to the 80th percentile of the two lie apart, else
          ``same``; ``clock_verdict``: the same by ``clock``, where 5% is no difference.
    """
    rows = rows.assign(gpus=rows["gpus"].fillna(1), x_name=rows["x_name"].fillna(""))
    figures = ["ms", "ms_p20", "ms_p80", "host_us", "peak_mib", "state"]
    ours = rows.loc[rows["provider"] == "kernelbook", [*POINT, *(name for name in figures if name in rows)]]
    others = rows.loc[~rows["provider"].map(record.is_ours) & ~rows["provider"].isin(leave_out)]
    found = others.merge(ours, on=POINT, suffixes=("", "_ours"))
    wait, wait_ours = (found[f"ms{end}"].combine(found[f"host_us{end}"] / 1e3, max) for end in ("", "_ours"))
    known = found["host_us"].notna() & found["host_us_ours"].notna()
    found = found.assign(
        ratio=found["ms"] / found["ms_ours"],
        wait=wait.where(known),
        wait_ours=wait_ours.where(known),
        clock=(wait / wait_ours).where(known),
        verdict="same",
        clock_verdict="same",
    )
    found.loc[found["ms_p80_ours"] < found["ms_p20"], "verdict"] = "faster"
    found.loc[found["ms_p20_ours"] > found["ms_p80"], "verdict"] = "slower"
    found.loc[found["clock"] > 1 + SAME_BY_THE_CLOCK, "clock_verdict"] = "faster"
    found.loc[found["clock"] < 1 / (1 + SAME_BY_THE_CLOCK), "clock_verdict"] = "slower"
    found.loc[~known, "clock_verdict"] = ""
    return found


def strongest(found: pd.DataFrame) -> pd.DataFrame:
    """Of what :func:`compared` gives, for each point the baseline that is fastest on the device; ``clock`` and its verdict are
    against the one for which a caller waits least, ``clock_provider``."""
    found = found.loc[~found["provider"].isin(FOR_SCALE)]
    least = found.loc[found.groupby(POINT, sort=False)["ms"].idxmin()]
    waits = found.dropna(subset="wait")
    by_clock = waits.loc[waits.groupby(POINT, sort=False)["wait"].idxmin()]
    by_clock = by_clock.assign(clock_provider=by_clock["provider"])
    clock = ["clock", "clock_verdict", "wait", "wait_ours"]
    there = by_clock[[*POINT, *clock, "clock_provider"]]
    return (
        least.drop(columns=clock).merge(there, on=POINT, how="left").fillna({"clock_verdict": "", "clock_provider": ""})
    )


# --- the share of the bound -----------------------------------------------------------------------------------------


def shares(rows: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``bound``, what a call cannot be shorter than, and ``share``, that bound over the call's time.

    The bound is the longest of three times: ``bytes`` at the speed of a copy; ``products``, the operations at the speed of
    PyTorch's large matrix product, in bfloat16 or, of float32 rows, tf32; and ``launch``, one empty kernel. How many kernels a
    call launches is not recorded. The ceilings are the medians of all runs: a process beside one run lowers those of that run.

    A row with neither bytes nor operations has no bound, and NaN.
    """
    copy, bf16, tf32, empty = ceilings[["copy_gbs", "bf16_tflops", "tf32_tflops", "empty_us"]].median()
    tflops = rows["dtype"].map({"float32": tf32}).fillna(bf16)
    least = pd.DataFrame(
        {"bytes": rows["gbytes"] / copy * 1e3, "products": rows["gflop"] / tflops, "launch": empty / 1e3}
    ).fillna(0.0)
    counts = (rows["gbytes"] > 0) | (rows["gflop"] > 0)
    return rows.assign(
        bound=least.idxmax(axis=1).where(counts, ""), share=(least.max(axis=1) / rows["ms"]).where(counts)
    )


def bounded(gpu: str) -> pd.DataFrame:
    """:func:`shares` of each recorded call of the package in bfloat16 on ``gpu``, a folder of ``book/results``."""
    stems = [stem for stem in FILES if stem not in NO_BOUND["files"] and gpu in record.recorded_gpus(stem)]
    rows = pd.concat([record.load_results(stem, gpu) for stem in stems], ignore_index=True)
    rows = rows.loc[(rows["provider"] == "kernelbook") & (rows["dtype"] == "bfloat16")]
    rows = rows.loc[~rows["op"].isin(NO_BOUND["ops"]) & rows["mode"].isin(timing.MODES)]
    return shares(rows, record.load_ceilings(gpu)).reset_index(drop=True)


def share_lines(found: pd.DataFrame) -> pd.DataFrame:
    """Of what :func:`shares` gives a row for each function and mode; functions in their order.

    Columns: ``op``, ``mode``, ``points``; ``lowest``, ``median`` and ``highest`` share; ``where`` it is lowest; ``bound``, that of
    most points; ``unknown``: which of ``bytes`` and ``operations`` is not recorded of some point.
    """
    lines: list[dict[str, Any]] = []
    for (op, mode), group in found.groupby(["op", "mode"], sort=False):
        known = group.dropna(subset="share")
        worst = known.loc[known["share"] == known["share"].min()].iloc[:1]
        lines.append(
            {
                "op": op, "mode": mode, "points": len(group),
                "lowest": known["share"].min(), "median": known["share"].median(), "highest": known["share"].max(),
                "where": "".join(with_swept(worst)), "bound": "".join(known["bound"].mode()[:1]),
                "unknown": ", ".join(
                    name for name, column in (("bytes", "gbytes"), ("operations", "gflop")) if not (group[column] > 0).all()
                ),
            }
        )  # fmt: skip
    place = {op: i for i, op in reversed([*enumerate(found["op"])])}
    lines.sort(key=lambda line: (place[line["op"]], timing.MODES.index(line["mode"])))
    return pd.DataFrame(lines)
