"""The kernels of ``packed`` in Gluon, by the interpreter: see ``gluon_interpreted``."""

import functools
from collections.abc import Iterator

import kernelbook as kb

# isort: split
import pytest
import torch
from gluon_interpreted import interpreted
from tensors import far_apart, randn

from kernelbook import check, runtime
from kernelbook.moe_lora import moe_lora_reference, scatter2scatter_reference
from kernelbook.nf4 import kernels as nf4_kernels
from kernelbook.packed import products

pytestmark = pytest.mark.skipif(not runtime.INTERPRET, reason="a GPU runs them as they are")
F16 = torch.float16


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[products.Plan]]:
    """As on Hopper -> what is launched."""
    plan, plans = products.plan, []

    def planned(*args: object) -> products.Plan | None:
        plans.append(plan(*args[:-1], runtime.TARGETS["sm_90"]))
        return plans[-1]

    monkeypatch.setattr(products, "plan", planned)
    for name in ("PACKED_ROWS", "PACKED_ELEMENTS"):
        monkeypatch.setattr(nf4_kernels, name, 0)
    with interpreted():
        yield plans


def _packed(kind: str, *shape: int) -> kb.NF4Tensor:
    if kind in ("mxfp4", "nvfp4"):
        return kb.fp4_quantize(randn(*shape), format=kind)
    return kb.nf4_quantize(randn(*shape), block_size=int(kind.split()[0]), double_quant="double" in kind)


@pytest.mark.parametrize(
    ("kind", "shape"), (("64", (2, 200, 256)), ("64 double", (2, 200, 320)), ("32", (2, 40, 320))), ids=str
)
@pytest.mark.parametrize("m", (1, 3, 13, 40))
def test_matrix(m: int, kind: str, shape: tuple[int, ...], launched: list[products.Plan]) -> None:
    q, x = _packed(kind, *shape), randn(m, shape[2], dtype=F16)
    w = kb.nf4_dequantize(q, dtype=torch.float32)[1]
    check.check_op(lambda x: kb.nf4_matmul(x, q, 1), lambda x: x @ w.to(x.dtype).t(), {"x": x})
    assert None not in launched and launched


def test_rows_far_apart(launched: list[products.Plan]) -> None:
    """Rows of x whose numbers need 64 bits."""
    q, x = _packed("64", 1, 40, 256), randn(13, 256, dtype=F16)
    assert torch.equal(kb.nf4_matmul(far_apart(x, 2**28), q, 0), kb.nf4_matmul(x, q, 0))
    assert launched[-1].kind == "one"
