"""The README's Python, run as it is printed, one block after the other, with or without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelbook as kb
from kernelbook import runtime

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


def test_func_grad_is_refused_in_one_sentence() -> None:
    x = torch.randn(2, 16, device=runtime.DEVICE)
    with pytest.raises(
        NotImplementedError, match=r"layer_norm: x must be differentiated by torch.autograd \(backward\)"
    ):
        torch.func.grad(lambda x: kb.layer_norm(x).sum())(x)
