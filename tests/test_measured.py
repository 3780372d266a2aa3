"""What the pages say of recorded rows: ratios within a run, and a verdict only where the bands lie apart, and the share of the bound."""

from pathlib import Path

import pandas as pd
import pytest

from kernelbook.lab import measured, record


@pytest.fixture
def rows() -> pd.DataFrame:
    point = {
        "op": "f",
        "mode": "forward",
        "dtype": "float32",
        "shape": "N=1",
        "x_name": "N",
        "x": 1,
        "gpus": 1.0,
        "state": "current",
    }
    return pd.DataFrame(
        [
            {"run": run, **point, "provider": provider, "ms": ms, "ms_p20": ms - band, "ms_p80": ms + band, "host_us": host}
            for run, provider, ms, band, host in (
                ("a", "kernelbook", 2.0, 0.1, 1.0), ("a", "torch", 6.0, 0.1, 1.0), ("a", "liger", 4.0, 0.1, 9000.0),
                ("a", "kernelbook:locks", 1.0, 0.1, 1.0), ("a", "packed_cublas", 1.0, 0.1, 1.0), ("a", "eager", 0.5, 0.1, 1.0),
                ("b", "kernelbook", 2.0, 0.1, 5000.0), ("b", "torch", 1.9, 0.1, 1.0),
                ("c", "torch", 0.1, 0.1, 1.0), ("d", "kernelbook", 2.0, 0.1, 1.0), ("d", "torch", 1.0, 0.1, float("nan")),
            )
        ]
    )  # fmt: skip


def test_a_verdict_needs_bands_that_lie_apart(rows: pd.DataFrame) -> None:
    found = measured.compared(rows).set_index(["run", "provider"])
    assert found.loc[("a", "torch"), "verdict"] == "faster"
    assert found.loc[("b", "torch"), "verdict"] == "same"  # 1.9 ± 0.1 and 2.0 ± 0.1
    assert found.loc[("d", "torch"), "verdict"] == "slower"
    assert found.loc[("b", "torch"), "clock_verdict"] == "slower"  # the host takes 5 ms
    assert found.loc[("d", "torch"), "clock_verdict"] == ""  # nobody measured the host
    assert ("a", "packed_cublas") not in found.index  # a part of the work only


def test_the_strongest_baseline_may_be_another_one_by_the_clock(rows: pd.DataFrame) -> None:
    best = measured.strongest(measured.compared(rows)).set_index("run")
    assert best.loc["a", "provider"] == "liger" and best.loc["a", "ratio"] == 2
    assert best.loc["a", "clock_provider"] == "torch" and best.loc["d", "clock_provider"] == ""
    assert best.loc["a", "clock"] == 3  # liger's host takes 9 ms: torch is what one waits for least


def test_shapes_name_what_is_swept() -> None:
    rows = pd.DataFrame({"shape": ["M=1 N=2", "M=1", ""], "x_name": ["N", "N", None], "x": [2.0, 0.25, float("nan")]})
    assert list(measured.with_swept(rows)) == ["M=1 N=2", "M=1 N=0.25", ""]
    assert measured.sizes(rows["shape"][:2])["M"].tolist() == ["1", "1"]


CEILINGS = pd.DataFrame(
    {"run": ["a", "b"], "copy_gbs": [2000.0, 4000.0], "bf16_tflops": [500.0, 700.0], "tf32_tflops": [250.0, 350.0], "empty_us": [4.0, 8.0]}
)  # fmt: skip


def calls(*rows: tuple[str, str, float, float, float], **changes: object) -> pd.DataFrame:
    """Rows of run, dtype, gbytes, gflop and ms."""
    table = pd.DataFrame(rows, columns=["run", "dtype", "gbytes", "gflop", "ms"])
    named = {"op": "f", "mode": "forward", "shape": [f"N={i}" for i in range(len(table))], "x_name": "N", "x": 1.0}
    return table.assign(**{**named, **changes})


def test_the_bound_is_the_longest_of_bytes_products_and_a_launch() -> None:
    found = measured.shares(
        calls(
            ("a", "bfloat16", 3.0, 120.0, 2.0),  # 1 ms at 3,000 GB/s, 0.2 ms at 600 TFLOP/s
            ("a", "bfloat16", 0.3, 1200.0, 4.0),  # 2 ms at 600 TFLOP/s
            ("b", "float32", 0.3, 1200.0, 4.0),  # 4 ms at 300 TFLOP/s
            ("a", "bfloat16", 0.003, 0.12, 0.012),  # 1 µs, 0.2 µs, and a launch of 6
            ("c", "bfloat16", 3.0, float("nan"), 0.8),  # no operations counted; faster than a copy
        ),
        CEILINGS,
    )
    assert list(found["bound"]) == ["bytes", "products", "products", "launch", "bytes"]
    assert found["share"].tolist() == pytest.approx([0.5, 0.5, 1.0, 0.5, 1.25])


def test_nothing_is_said_of_a_row_that_counts_neither_bytes_nor_operations() -> None:
    found = measured.shares(calls(("a", "bfloat16", 0.0, float("nan"), 2.0)), CEILINGS)
    assert list(found["bound"]) == [""] and found["share"].isna().all()
    (line,) = measured.share_lines(found).to_dict("records")
    assert line["points"] == 1 and line["where"] == "" and line["unknown"] == "bytes, operations"
    assert pd.isna(line["median"])


def test_a_line_has_the_worst_the_middle_and_the_best_share_and_where_it_is_worst() -> None:
    points = [("a", "bfloat16", 3.0, flop, ms) for flop, ms in ((1.0, 2.0), (1.0, 4.0), (0.0, 1.25), (1200.0, 2.5))]
    backward = calls(*points, mode="backward", x_name="k", x=[1.0, 2.0, 3.0, 4.0])
    forward, other = calls(points[0]), calls(points[0], op="g")
    found = measured.shares(pd.concat([backward, other, forward], ignore_index=True), CEILINGS)
    lines = measured.share_lines(found)
    assert list(zip(lines["op"], lines["mode"], strict=True)) == [("f", "forward"), ("f", "backward"), ("g", "forward")]
    line = lines.iloc[1]
    assert [line["lowest"], line["median"], line["highest"]] == pytest.approx([0.25, 0.65, 0.8])
    assert line["where"] == "N=1 k=2" and line["bound"] == "bytes" and line["unknown"] == "operations"
    assert list(lines["unknown"]) == ["", "operations", ""]


def test_bounded_are_the_package_s_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"provider": ["kernelbook", "kernelbook:locks", "torch", "kernelbook", "kernelbook"]}
    named |= {"op": ["f", "f", "f", "read_rows", "f"], "mode": [*["forward"] * 4, "first_call"]}
    rows = calls(*[("a", "bfloat16", 2.0, 1.0, 2.0)] * 5, **named)
    rows = pd.concat([rows, calls(("a", "float32", 2.0, 1.0, 2.0), provider="kernelbook")])
    found = {"recorded_gpus": lambda stem: ["a-gpu"] if stem in ("layer_norm", "several_gpus") else []}
    loaded: list[str] = []
    found |= {"load_results": lambda stem, gpu: loaded.append(stem) or rows, "load_ceilings": lambda gpu: CEILINGS}
    for name, function in found.items():
        monkeypatch.setattr(record, name, function)
    assert len(measured.bounded("a-gpu")) == 1 and loaded == ["layer_norm"]


def test_what_is_wrong_is_no_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "results_dir", lambda: tmp_path)
    (tmp_path / "gpu").mkdir()
    rows = pd.DataFrame(
        {"provider": ["torch", "peer", "unchecked"], "ms": 1.0, "gbytes": 1.0, "gflop": 1.0, "kernels": ""}
    )
    rows.assign(err_ratio=[1.0, 292.0, None]).to_csv(tmp_path / "gpu" / "attention.csv", index=False)
    assert record.load_results("attention", "gpu")["provider"].tolist() == ["torch", "unchecked"]
    assert record.wrong_results("attention", "gpu")["provider"].tolist() == ["peer"]
