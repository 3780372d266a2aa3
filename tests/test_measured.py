"""What the pages say of recorded rows: ratios within a run, and a verdict only where the bands lie apart."""

import pandas as pd
import pytest

from kernelbook.lab import measured


@pytest.fixture
def rows() -> pd.DataFrame:
    point = {"op": "f", "mode": "forward", "dtype": "float32", "shape": "N=1", "x_name": "N", "x": 1, "gpus": 1.0}
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


def test_ratios_are_taken_within_a_run(rows: pd.DataFrame) -> None:
    found = measured.compared(rows).set_index(["run", "provider"])
    assert dict(found["ratio"]) == {
        ("a", "torch"): 3,
        ("a", "liger"): 2,
        ("a", "eager"): 0.25,
        ("b", "torch"): 0.95,
        ("d", "torch"): 0.5,
    }


def test_a_verdict_needs_bands_that_lie_apart(rows: pd.DataFrame) -> None:
    found = measured.compared(rows).set_index(["run", "provider"])
    assert found.loc[("a", "torch"), "verdict"] == "faster"
    assert found.loc[("b", "torch"), "verdict"] == "same"  # 1.9 ± 0.1 and 2.0 ± 0.1
    assert found.loc[("d", "torch"), "verdict"] == "slower"
    assert found.loc[("b", "torch"), "clock_verdict"] == "slower"  # the host takes 5 ms
    assert found.loc[("d", "torch"), "clock_verdict"] == ""  # nobody measured the host


def test_the_strongest_baseline_may_be_another_one_by_the_clock(rows: pd.DataFrame) -> None:
    best = measured.strongest(measured.compared(rows)).set_index("run")
    assert best.loc["a", "provider"] == "liger" and best.loc["a", "ratio"] == 2
    assert best.loc["a", "clock"] == 3  # liger's host takes 9 ms: torch is what one waits for least


def test_shapes_name_what_is_swept() -> None:
    rows = pd.DataFrame({"shape": ["M=1 N=2", "M=1", ""], "x_name": ["N", "N", None], "x": [2.0, 0.25, float("nan")]})
    assert list(measured.with_swept(rows)) == ["M=1 N=2", "M=1 N=0.25", ""]
    assert measured.sizes(rows["shape"][:2])["M"].tolist() == ["1", "1"]
