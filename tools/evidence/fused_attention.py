"""How far PyTorch's own fused attention is from a reference that keeps its probabilities: ``book/evidence/fused_attention.csv``.

In float32, on a CPU. It is why the fuzz of float32 attention has the fused one as its baseline: by the other PyTorch's own
kernel would not be correct.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import kernelbook  # noqa: F401

# isort: split
import pandas as pd
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelbook import check
from kernelbook.attention import flash_attention_reference

OUT = Path(__file__).resolve().parents[2] / "book" / "evidence" / "fused_attention.csv"
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gradients(attention: Attention, inputs: list[torch.Tensor], do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(attention(*leaves), leaves, do)


def main() -> None:
    torch.manual_seed(0)
    rows: dict[str, tuple[str, float, str, str, str]] = {}
    for n, s, d, size in itertools.product((1, 5, 33, 128), (1, 7, 64, 257), (8, 64), (1.0, 3.0)):
        inputs = [size * torch.randn(1, 2, m, d) for m in (n, s, s)]
        do = torch.randn(1, 2, n, d)
        exact = gradients(flash_attention_reference, [t.double() for t in inputs], do.double())
        plain = gradients(flash_attention_reference, inputs, do)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            fused = gradients(F.scaled_dot_product_attention, inputs, do)
        for name, ours, truth, base in zip(("dq", "dk", "dv"), fused, exact, plain, strict=True):
            verdict = check.compare(name, ours, truth, base, factor=check.GRADIENT_FACTOR)
            if name not in rows or verdict.ratio > rows[name][1]:
                errors = (f"{verdict.error:.1e}", f"{verdict.baseline_error:.1e}")
                rows[name] = (name, verdict.ratio, *errors, f"{n} queries, {s} keys, {d} features, scale {size}")
    table = pd.DataFrame(rows.values(), columns=["gradient", "ratio", "error", "error_with_probabilities", "where"])
    table.to_csv(OUT, index=False, float_format="%.1f", lineterminator="\n")


if __name__ == "__main__":
    main()
