"""The kernel that only reads: that it reads what it is said to read."""

import pytest
import torch

from bench import floor
from kernelbook import runtime


@pytest.mark.parametrize("rows", (None, (5, 0, 5, 11)))
@pytest.mark.parametrize(("dtype", "columns"), ((torch.bfloat16, 4098), (torch.uint8, 64), (torch.float32, 33)))
def test_every_word_is_read(dtype: torch.dtype, columns: int, rows: tuple[int, ...] | None) -> None:
    matrices = [torch.randn(13, columns, device=runtime.DEVICE).mul(50).to(dtype) for _ in range(3)]
    ids = None if rows is None else torch.tensor(rows, device=runtime.DEVICE)
    for count in (1, 2, 3):
        expected = floor.fold([m if ids is None else m[ids] for m in matrices[:count]])
        assert torch.equal(floor.fold([floor.read_rows(matrices[:count], ids)]), expected)
