"""The shared figures: what they draw is what the rows say."""

import math
import re
from pathlib import Path

from kernelbook.lab import measured, plots, record, stale

# isort: split
import pandas as pd
import pytest
from IPython.display import Markdown
from matplotlib.figure import Figure

ABOUT = {
    "gpu": "NVIDIA H200",
    "driver": "1.2",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "version": "0",
    "commit": "c",
    "kernels": "k",
    "date": "2026-11-21",
}


def rows(run: str = "r1", provider: str = "kernelbook", ms: float = 1.0, **changes: object) -> pd.DataFrame:
    """Two rows of the results' schema, as record.load_results gives them."""
    common = {
        "run": run, "op": "layer_norm", "mode": "forward", "provider": provider, "dtype": "bfloat16", "x_name": "N",
        "ms_p20": ms, "ms_p80": ms, "gflop": 2.0, "peak_mib": 0.0, "err_ratio": 1.0, **ABOUT,
    } | changes  # fmt: skip
    table = [{**common, "shape": f"M=8 N={n}", "x": n, "ms": ms * n / 1024, "gbytes": n / 1024} for n in (1024, 4096)]
    return pd.DataFrame(table, columns=list(record.COLUMNS))


def ceilings(run: str = "r1", copy_gbs: float = 4000.0) -> pd.DataFrame:
    row = {"run": run, "copy_gbs": copy_gbs, "bf16_tflops": 700.0, "tf32_tflops": 350.0, **ABOUT}
    return pd.DataFrame([row], columns=list(record.CEILING_COLUMNS))


def labels(figure: plots.Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_bandwidth_figure_draws_the_ceiling_of_the_same_run_only() -> None:
    both = pd.concat([ceilings("r1", 4000.0), ceilings("other", 9000.0)])
    figure = plots.bandwidth_figure(pd.concat([rows(), rows(provider="torch", ms=2.0)]), both, own=rows("mine"))
    ax = figure.axes[0]
    assert labels(figure) == ["kernelbook", "torch", "ceiling: copy"]
    assert list(ax.lines[0].get_ydata()) == [1000.0, 1000.0]  # GB/s
    assert ax.lines[2].get_markerfacecolor() == "white"  # the reader's
    assert list(ax.lines[3].get_ydata()) == [4000.0, 4000.0]
    note = figure.get_supxlabel()
    assert note.startswith("NVIDIA H200 · torch") and "yours: NVIDIA H200" in note


def test_speedups_are_taken_within_a_run() -> None:
    table = pd.concat(
        [rows("r1"), rows("r1", "torch", 3.0), rows("r2", "kernelbook:locks", 1.0), rows("r2", "torch", 0.5)]
    )
    figure = plots.speedup_figure(table, over="torch")
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn == {"kernelbook": [3.0, 3.0], "kernelbook:locks": [0.5, 0.5], "torch = 1": [1.0, 1.0]}


def test_share_figure_has_a_line_for_each_function_and_pass_and_a_dot_for_each_point() -> None:
    table = pd.concat([rows(), rows(mode="backward", gflop=7e5)], ignore_index=True)
    figure = plots.share_figure(measured.shares(table, ceilings().astype({"empty_us": float})))
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer_norm, forward", "layer_norm, backward"]
    drawn = [(line.get_marker(), y, x) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)][:-2]
    # 1 GB in 1 ms at 4,000 GB/s is a quarter; 700 TFLOP at 700 TFLOP/s take a second.
    assert drawn == [("o", 0, 0.25), ("o", 0, 0.25), ("|", 0, 0.25), ("D", 1, 1000), ("D", 1, 250), ("|", 1, 625)]
    assert list(ax.lines[-1].get_xdata()) == [measured.NEAR] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bytes", "products", "launch", "median"]


def _figure(gpu: str) -> Figure:
    figure, (ax,) = plots.new_figure()
    ax.set_title(gpu)
    return plots.finish(figure)


def test_several_gpus_come_under_tabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "recorded_gpus", lambda *stems: ["nvidia-h200", "nvidia-h100", "nvidia-l4"])
    text = plots.by_gpu("layer_norm", _figure).data
    assert text.count("<img ") == 3 and text.count('type="radio"') == 3 and text.count("<input checked") == 1
    places = [text.index(f">{gpu}</label>") for gpu in ("H200", "nvidia-h100", "nvidia-l4")]
    assert places == sorted(places) and text.index("checked") < places[0]  # the first is open
    other = plots.tabs({"a < b": "1 < 2"}).data
    assert "a &lt; b" in other and "1 &lt; 2" in other
    assert not set(re.findall(r'id="([^"]+)"', text)) & set(re.findall(r'id="([^"]+)"', other))


def test_a_figure_says_what_of_its_rows_is_older() -> None:
    rows = pd.DataFrame({"gpu": "a", "torch": "2", "triton": "3", "state": [stale.OLDER, stale.CURRENT]})
    said = [plots.finish(plots.new_figure()[0], table).get_supxlabel() for table in (rows, rows[1:])]
    assert "1 of 2 rows were measured with other kernels than today's." in said[0] and "rows" not in said[1]


def test_each_gpus_record_is_drawn_and_one_that_lacks_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    for gpu, modes in (("nvidia-h200", "forward"), ("nvidia-h100", "forward"), ("partly-measured", "backward")):
        (tmp_path / gpu).mkdir()
        row = dict.fromkeys(record.COLUMNS, "1") | {"mode": modes, "ms": "2" if gpu == "nvidia-h200" else "4"}
        pd.DataFrame([row]).to_csv(tmp_path / gpu / "layer_norm.csv", index=False)
        ceiling = dict.fromkeys(record.CEILING_COLUMNS, "1") | {"copy_gbs": "30" if gpu == "nvidia-h200" else "20"}
        pd.DataFrame([ceiling]).to_csv(tmp_path / gpu / "ceilings.csv", index=False)

    def draw(rows: pd.DataFrame, ceilings: pd.DataFrame) -> Markdown | None:
        forward = rows.loc[rows["mode"] == "forward"]
        if forward.empty:
            return None
        return Markdown(f"{forward['ms'].iloc[0]} ms, {ceilings['copy_gbs'].iloc[0]} GB/s")

    text = plots.with_records("layer_norm", draw).data
    assert text.index("2 ms, 30 GB/s") < text.index("4 ms, 20 GB/s") and "partly-measured" not in text
    with pytest.raises(IndexError):  # a figure that fails in a tab fails
        plots.with_records("layer_norm", lambda rows, _: rows.loc[rows["mode"] == "forward", "ms"].iloc[0])
    assert plots.with_records("nf4", draw) is None


def test_gpus_with_results_come_in_the_readers_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    for gpu in ("a-gpu", "nvidia-h200", "my-gpu", "empty"):
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / ("layer_norm.csv" if gpu != "empty" else "nf4.csv")).write_text("")
    assert record.recorded_gpus("layer_norm") == ["nvidia-h200", "a-gpu", "my-gpu"]
    monkeypatch.setattr(record, "device_slug", lambda: "my-gpu")
    assert record.recorded_gpus("layer_norm") == ["nvidia-h200", "my-gpu", "a-gpu"]
    assert record.recorded_gpus("layer_norm", "nf4")[-1] == "empty"


def _steps() -> pd.DataFrame:
    rows = {"provider": ["kernelbook:first", "torch", "kernelbook:second"], "ms": [0.4, 0.3, 0.2], "run": "r", "x": 1}
    return pd.DataFrame({**rows, "gbytes": 0.2, "gflop": 20.0}).assign(
        ms_p20=lambda t: t["ms"], ms_p80=lambda t: t["ms"]
    )


def test_ladder_compares_each_step_with_the_best_before_and_puts_peers_last() -> None:
    ceilings = pd.DataFrame({"run": ["r", "other"], "copy_gbs": [2000.0, 1.0], "bf16_tflops": [400.0, 1.0]})
    steps = _steps().iloc[[0, 2, 1]]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in plots.ladder(steps, ceilings).splitlines()
    ]
    assert lines[2:] == [
        ["first", "400.0", "25%", ""],
        ["second", "200.0", "50%", "2.00"],
        ["torch", "300.0", "33%", ""],
    ]
    assert "25%" in plots.ladder(steps, ceilings, by="tflops")
    # After a wrong turn the best before stays the measure, and stands in the table.
    turn = pd.DataFrame(
        {"provider": [f"kernelbook:{name}" for name in ("good", "bad", "better")], "ms": [0.4, 0.8, 0.2]}
    )
    turn = turn.assign(run="r", x=1, gbytes=0.2, gflop=20.0)
    table = plots.ladder(turn, ceilings)
    assert [line.split("|")[4].strip() for line in table.splitlines()[2:]] == ["", "0.50", "2.00"]


def test_steps_come_from_their_file_and_say_when_they_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    assert "Nothing" in plots.steps("square_steps")
    folder = tmp_path / record.BOOKS_GPU
    folder.mkdir()
    monkeypatch.setattr(stale, "kernels_hash", lambda *_: "1")
    about = dict.fromkeys(record.ENVIRONMENT, "1") | {"peak_mib": 1234, "dtype": "float16", "mode": "forward_backward"}
    small, large = (_steps().iloc[[0, 2, 1]].assign(op="square", shape=f"N={n}", x=n, **about) for n in (1, 2))
    large["ms"] = large["ms_p20"] = large["ms_p80"] = [4.0, 5.0, 3.0]
    pd.concat([small, large]).to_csv(folder / "square_steps.csv", index=False)
    ceilings = pd.DataFrame({"run": ["r"], "copy_gbs": [2000.0], "bf16_tflops": [400.0]})
    ceilings.to_csv(folder / "ceilings.csv", index=False)
    text = plots.steps("square_steps", by="tflops", peak=True, x=2)
    assert "5,000" in text and "0.80" in text and "1,234" in text and "square, forward + backward, N=2, float16" in text
    assert "first" not in plots.steps("square_steps", among={"kernelbook:second", "torch"})
    assert "Nothing" in plots.steps("square_steps", among={"kernelbook:third"})
    own = small.assign(ms="7.0")
    text = plots.steps("square_steps", own=own, by="tflops")
    assert "earlier version" not in text
    monkeypatch.setattr(stale, "kernels_hash", lambda *_: "2")
    assert "earlier version" in plots.steps("square_steps", own=own)
    large["ms_p20"] = 3.5  # the steps' times overlap
    pd.concat([small, large]).to_csv(folder / "square_steps.csv", index=False)
    assert "No difference beyond the spread of the times: second." in plots.steps("square_steps", x=2)
    assert text.count("Recorded: square, forward + backward, N=") == 2 and text.count("Yours") == 1
    assert text.count("Slower than the best before: second.") == 1 and "7,000" in text
    times = plots.step_times("square_steps", x=1)
    assert times["second"] == 200.0 and math.isnan(times["third"])
    figure = plots.steps_figure("square_steps", x=1)
    assert not isinstance(figure, str)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["first", "second", "torch"]
    assert "not recorded" in plots.steps_figure("cube_steps")


def test_a_ladder_is_of_the_gpu_that_has_the_page_s_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The book's own, unless only another has them as they are, or has more of them."""
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(stale, "kernels_hash", lambda *_: "new")
    assert plots.ladder_gpu("square_steps") == record.BOOKS_GPU

    def write(folder: str, gpu: str, kernels: str, steps: int) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        about = dict.fromkeys(record.ENVIRONMENT, "1") | {"dtype": "float16", "mode": "forward"}
        rows = _steps().iloc[[0, 2, 1]].assign(op="square", shape="N=1", **about)
        rows.assign(gpu=gpu, kernels=kernels).iloc[:steps].to_csv(tmp_path / folder / "square_steps.csv", index=False)
        ceilings = {"run": ["r"], "gpu": [gpu], "copy_gbs": [2000.0], "bf16_tflops": [400.0]}
        pd.DataFrame(ceilings).to_csv(tmp_path / folder / "ceilings.csv", index=False)

    other = "nvidia-x100-pcie"
    for own, others, expected in (
        (("old", 2), ("old", 2), "H200"),
        (("old", 2), ("new", 2), "X100"),
        (("new", 2), ("new", 2), "H200"),
        (("new", 2), ("new", 3), "X100"),
        (("new", 2), ("old", 3), "H200"),
    ):
        write(record.BOOKS_GPU, "NVIDIA H200", *own)
        write(other, "NVIDIA X100 PCIe", *others)
        assert plots.ladder_gpu("square_steps") == f"an {expected}"
        name = {"H200": "NVIDIA H200", "X100": "NVIDIA X100 PCIe"}[expected]
        assert name in plots.steps("square_steps")
