"""The README's Python, run as it is printed, one block after the other, with or without a GPU."""

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kernelbook import runtime
from kernelbook.lab import measured, record

README = Path(__file__).parents[1] / "README.md"


def test_the_blocks_run_as_they_are_printed() -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    given: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), given)  # noqa: S102  the README's own lines
    assert given["y"].shape == given["x"].shape and given["y"].device.type == runtime.DEVICE.type
    trained = [p for p in given["model"].parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.isfinite().all() for p in trained)


# What the table says: function, mode, the shapes, the peer, and between what the median of the peer's time over ours lies.
FASTER, LEVEL, SLOWER, LEVEL_OR_FASTER = (1.03, math.inf), (0.97, 1.03), (0, 0.97), (0.97, math.inf)
SAID = [
    ("moe_lora", "forward_backward", "", "grouped_mm", FASTER),
    ("moe_lora", "forward_backward", "", "axolotl", FASTER),
    ("flash_attention", "forward", "", "sdpa_flash", FASTER),
    ("flash_attention", "forward", "", "flex", FASTER),
    ("flash_attention", "forward", " N=4096 ", "sdpa_cudnn", FASTER),
    ("flash_attention", "forward", "", "flash_attention_3", SLOWER),
    ("flash_attention", "forward", "", "flash_attention_4", SLOWER),
    ("flash_attention", "forward", "sequences=", "sdpa_mask", FASTER),
    ("flash_attention", "forward", "sequences=", "flash_attention_4", SLOWER),
    ("flash_attention", "backward", "sequences=", "sdpa_mask", FASTER),
    ("flash_attention", "backward", "sequences=", "flash_attention_4", LEVEL),
    ("flash_attention", "backward", "", "sdpa_flash", FASTER),
    ("flash_attention", "backward", " D=128 causal=yes", "sdpa_cudnn", LEVEL),
    ("flash_attention", "backward", " D=128 causal=no", "sdpa_cudnn", SLOWER),
    ("flash_attention", "backward", " D=(?:64|256) ", "sdpa_cudnn", FASTER),
    ("flash_attention", "backward", " D=(?:64|128) ", "flash_attention_4", SLOWER),
    ("flash_attention", "backward", " D=256 ", "flash_attention_4", FASTER),
    ("flash_attention", "forward", " N=1 ", "sdpa_cudnn", LEVEL_OR_FASTER),
    ("flash_attention", "forward", " N=1 ", "flashinfer", LEVEL_OR_FASTER),
    ("layer_norm", "forward", "", "liger", LEVEL_OR_FASTER),
    ("rms_norm", "forward", "", "quack", LEVEL_OR_FASTER),
    ("layer_norm", "backward", "", "liger", FASTER),
    ("rms_norm", "backward", "", "quack", FASTER),
    ("sparse_linear", "backward", "", "dense", FASTER),
    ("nf4_matmul", "forward", "tokens=1$", "dense", FASTER),
    ("nf4_matmul", "forward", "tokens=(?:32|64)$", "dense", SLOWER),
    ("nf4_matmul", "forward", "tokens=1$", "bitsandbytes", FASTER),
    ("nf4_matmul", "forward", "format=mxfp4 tokens=(?:1|4|8)$", "humming", LEVEL),
    ("nf4_matmul", "forward", "format=mxfp4 tokens=(?:16|32|64|128)$", "humming", SLOWER),
]


def test_its_table_says_what_is_recorded() -> None:
    rows = pd.concat(
        measured.compared(record.load_results(stem)) for stem in measured.FILES if record.recorded_gpus(stem)
    )
    rows = rows.assign(where=measured.with_swept(rows))
    for op, mode, shapes, peer, (low, high) in SAID:
        those = (
            (rows["op"] == op)
            & (rows["mode"] == mode)
            & (rows["provider"] == peer)
            & rows["where"].str.contains(shapes)
        )
        middle = rows.loc[those, "ratio"].median()
        assert low < middle < high, f"{op}, {mode}, {peer}: the median is {middle:.2f}, README says otherwise"


def test_training_steps_gain_most_in_a_graph() -> None:
    peers = ["grouped_mm", "grouped_mm:apart"]
    rows = record.load_results("whole_model")
    rows = rows.loc[(rows["mode"] == "step") & rows["provider"].isin(["kernelbook", *peers])]
    rows = rows.join(rows["shape"].str.extract(r"model=(?P<model>\S+).*graph=(?P<graph>\d)"))
    times = rows.pivot(index=["model", "graph"], columns="provider", values="ms").dropna()
    for peer in peers:
        gain = (times[peer] / times["kernelbook"]).unstack("graph")
        assert len(gain) and (gain["1"] > gain["0"]).all() and (gain["1"] > FASTER[0]).all()
