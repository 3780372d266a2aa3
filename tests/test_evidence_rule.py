"""The rule of correctness, put to the test itself: errors are planted in right results, and it has to find them.

``tools/evidence/error_rule.py`` searches for the smallest that it finds; the page "Evidence" shows the table.
"""

import sys
from pathlib import Path

import pytest
import torch

from kernelbook import check

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "evidence"))
import error_rule


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_a_single_wrong_element_of_a_million_is_found(dtype: torch.dtype) -> None:
    """Of the size that elements have: by the norm alone it would pass in 16 bits."""
    ref, plain = error_rule.product(1024, dtype)
    wrong = plain.clone()
    index = int((ref.abs() - ref.square().mean().sqrt()).abs().argmin())  # of average size
    wrong.view(-1)[index] = 0
    verdict = check.compare("out", wrong, ref, plain)
    assert not verdict.passed
    assert check.compare("out", plain, ref, plain).passed
    if dtype == torch.bfloat16:
        assert verdict.error <= verdict.limit, "if the norm sees it, this test needs more elements"


@pytest.mark.parametrize("kind", error_rule.PLANTED)
def test_a_planted_error_is_found_from_some_size_on(kind: str) -> None:
    ref, plain = error_rule.product(256, torch.bfloat16)
    smallest = error_rule.smallest_found(kind, ref, plain)
    assert not check.compare("out", error_rule.planted(kind, plain, ref, 1.01 * smallest), ref, plain).passed
    assert check.compare("out", error_rule.planted(kind, plain, ref, smallest / 4), ref, plain).passed
