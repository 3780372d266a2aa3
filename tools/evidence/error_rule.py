"""The smallest errors that the rule of correctness finds, by planting them in right results: ``book/evidence/error_rule.csv``.

The right result is a product of matrices with random numbers, as PyTorch computes it in the dtype.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from kernelbook import check

OUT = Path(__file__).resolve().parents[2] / "book" / "evidence" / "error_rule.csv"


def product(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An (n, n) product: -> exact, and PyTorch's."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 64, generator=generator).to(dtype) for _ in range(2))
    return a.double() @ b.double().t(), a @ b.t()


# What is planted, in place: (PyTorch's result in float64, the root mean square of the exact one, a size).
PLANTED: dict[str, Callable[[torch.Tensor, torch.Tensor, float], object]] = {
    "one element is off by": lambda wrong, rms, size: wrong[0, 0].add_(size * rms),
    "one row is scaled, too large by": lambda wrong, rms, size: wrong[0].mul_(1 + size),
    "all elements are off by": lambda wrong, rms, size: wrong.add_(size * rms),
    "all elements are scaled, too large by": lambda wrong, rms, size: wrong.mul_(1 + size),
}


def smallest_found(kind: str, ref: torch.Tensor, plain: torch.Tensor, elementwise: bool = True) -> float:
    """By bisection of the size; infinite if none up to a thousand is found."""

    def found(size: float) -> bool:
        wrong = plain.double()
        PLANTED[kind](wrong, ref.square().mean().sqrt(), size)
        verdict = check.compare("out", wrong.to(plain.dtype), ref, plain)
        return not verdict.passed if elementwise else verdict.error > verdict.limit

    low, high = 1e-8, 1e3
    if not found(high):
        return math.inf
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def main() -> None:
    rows = []
    for dtype, n in itertools.product((torch.float32, torch.float16, torch.bfloat16), (64, 512)):
        ref, plain = product(n, dtype)
        for kind in PLANTED:
            sizes = (smallest_found(kind, ref, plain, elementwise) for elementwise in (False, True))
            rows.append((kind, str(dtype)[6:], n * n, *sizes))
    table = pd.DataFrame(rows, columns=["planted", "dtype", "elements", "found_by_norm", "found"])
    table.to_csv(OUT, index=False, float_format="%.1e", lineterminator="\n")


if __name__ == "__main__":
    main()
