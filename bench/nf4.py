"""What is measured for nf4: dequantizing 1 to 256 of 256 experts, plain and double, and multiplying by one expert or matrix.

Providers: ``bitsandbytes`` dequantizes all experts, whatever is asked for; ``gather_bitsandbytes`` gathers the bytes and
absmax of the active experts first and dequantizes these. For a product ``bitsandbytes`` is its ``matmul_4bit``, and
``kernelbook:dequantize`` is what ``nf4_matmul`` saves: the expert dequantized, then PyTorch's product. Where bitsandbytes
is not installed its rows are left out. ``axolotl`` chooses among experts as we do: bitsandbytes' scales, then a kernel of
its own. ``torchao`` packs in a format of its own (whose scales are always nested, and lose more), without a choice of
experts, so only the active ones are packed. ``humming`` multiplies by MXFP4, stored in an order of its own.

A product's floor is ``read_rows``, a kernel that reads the matrix' bytes and scales and does nothing else; ``dense`` is
PyTorch's product with the same matrix in bfloat16.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench import Bench, baselines, floor
from bench.models import MODELS
from kernelbook import check, runtime
from kernelbook.lab.timing import Case, Problem
from kernelbook.nf4.op import NF4Tensor, nf4_dequantize, nf4_matmul, nf4_quantize
from kernelbook.packed.fp4 import fp4_quantize

EXPERTS, ROWS, COLS, BLOCK_SIZE = 256, 1024, 2048, 64
ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MATRICES, TOKENS = ((14336, 4096), (4096, 14336)), (1, 4, 8, 16, 32, 64, 128, 512, 2048)
BITS = {
    "nf4": 4 + 32 / BLOCK_SIZE,
    "mxfp4": 4 + 8 / 32,
    "nvfp4": 4 + 8 / 16,
}  # of an element, with its share of a scale
# Elements of an expert. axolotl's kernel has a program for each 1,024 of them, in the grid's second dimension, where CUDA
# takes 65,535: a launch beyond is an "invalid argument".
MOST_OF_AXOLOTL = 65_535 * 1_024


def dequantize_gbytes(elements: int, double_quant: bool, itemsize: int = 2) -> float:
    """The fewest bytes: half a byte packed, one absmax a block (and one for 256 of them if nested), the output."""
    per_block = 1 + 4 / 256 if double_quant else 4
    return elements * (0.5 + per_block / BLOCK_SIZE + itemsize) / 1e9


def _state(q: NF4Tensor, shape: Sequence[int], absmax: torch.Tensor, nested_absmax: torch.Tensor | None) -> Any:
    """bitsandbytes' description of experts of ``q`` that have these scales."""
    from bitsandbytes.functional import QuantState

    state2 = None
    if nested_absmax is not None:
        state2 = QuantState(absmax=nested_absmax, code=q.nested_code, blocksize=256, dtype=torch.float32)
    return QuantState(absmax, torch.Size(shape), q.code, q.block_size, "nf4", torch.bfloat16, q.nested_offset, state2)


def _bitsandbytes(q: NF4Tensor, experts: torch.Tensor) -> dict[str, Callable[[], Any]]:
    from bitsandbytes.functional import dequantize_4bit

    num_experts, *rest = q.shape

    def chosen(part: torch.Tensor) -> torch.Tensor:
        return part.view(num_experts, -1)[experts].view(-1)

    def gather() -> Sequence[torch.Tensor]:
        nested_absmax = None if q.nested_absmax is None else chosen(q.nested_absmax)
        state = _state(q, (len(experts), *rest), chosen(q.absmax), nested_absmax)
        return [dequantize_4bit(chosen(q.packed)[:, None], state)]

    providers: dict[str, Callable[[], Any]] = {"gather_bitsandbytes": gather}
    if len(experts) == num_experts:
        state = _state(q, q.shape, q.absmax, q.nested_absmax)
        providers["bitsandbytes"] = lambda: [dequantize_4bit(q.packed[:, None], state)]
    if baselines.has("axolotl") and math.prod(rest) <= MOST_OF_AXOLOTL:
        dequantize = baselines.axolotl("selective_dequant")._selective_dequant_bnb4
        whole = _state(q, q.shape, q.absmax, q.nested_absmax)
        providers["axolotl"] = lambda: [dequantize(q.packed, whole, experts, rest)]
    return providers


def _torchao(w: torch.Tensor) -> Any:
    """A matrix as torchao packs it."""
    from torchao.quantization import NF4Tensor

    return NF4Tensor.from_tensor(w, BLOCK_SIZE, 256)


def _problem(shape: tuple[int, int, int], active: int, double_quant: bool) -> Problem:
    dtype = torch.bfloat16
    w = torch.randn(shape, dtype=dtype, device=runtime.DEVICE)
    q = nf4_quantize(w, double_quant=double_quant)
    del w
    # All experts come in their order, so that what bitsandbytes gives for all of them is the same result.
    ids = torch.arange(shape[0]) if active == shape[0] else torch.randperm(shape[0])[:active]
    experts = ids.to(runtime.DEVICE)
    providers: dict[str, Callable[[], Any]] = {"kernelbook": lambda: [nf4_dequantize(q, experts=experts, dtype=dtype)]}
    if baselines.has("bitsandbytes") and runtime.DEVICE.type == "cuda":
        providers.update(_bitsandbytes(q, experts))
    if double_quant and baselines.has("torchao"):
        packed = _torchao(nf4_dequantize(q, experts=experts, dtype=dtype).flatten(0, 1))
        providers["torchao"] = lambda: [packed.get_original_weight().view(active, *shape[1:])]
    return Problem(
        providers=providers,
        truth=lambda: [q.as_float64()[experts]],
        baseline=lambda: [q.as_float64()[experts].to(dtype)],
        factor=check.FORWARD_FACTOR,
    )


def _stored(shape: tuple[int, int, int], double_quant: bool) -> dict[str, Any]:
    """The column of the shape."""
    named = dict(zip(("E", "rows", "cols"), shape, strict=True))
    return named | {"block_size": BLOCK_SIZE, "double_quant": double_quant}


def _case(shape: tuple[int, int, int], active: int, double_quant: bool) -> Case:
    gbytes = dequantize_gbytes(active * shape[1] * shape[2], double_quant)
    build = functools.partial(_problem, shape, active, double_quant)
    sizes = _stored(shape, double_quant)
    return Case("nf4_dequantize", "forward", torch.bfloat16, sizes, "active", active, gbytes, 0.0, build)


def _matmul_bitsandbytes(x: torch.Tensor, q: NF4Tensor, expert: int) -> Callable[[], Any]:
    """By a tensor that is the one expert: bitsandbytes has no choice of experts."""
    from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]

    def part(whole: torch.Tensor) -> torch.Tensor:
        return whole.view(q.shape[0], -1)[expert].clone()

    packed, nested_absmax = part(q.packed)[:, None], None if q.nested_absmax is None else part(q.nested_absmax)
    state = _state(q, q.shape[1:], part(q.absmax), nested_absmax)
    return lambda: [matmul_4bit(x, packed.t(), quant_state=state)]


def _humming(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Humming's layer of a matrix that MXFP4 holds exactly."""
    from humming.layer import HummingLayer

    config = {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}
    layer = HummingLayer(shape_n=w.shape[0], shape_k=w.shape[1], weight_config=config, torch_dtype=w.dtype).cuda()
    layer.load_from_unquantized(w)
    layer.transform()
    return layer


def _matmul_problem(
    shape: tuple[int, int, int], tokens: int, double_quant: bool = False, format: str | None = None
) -> Problem:
    """One of the experts: in NF4 with all peers, or in a ``format``, whose peers are the dense product and Humming."""
    dtype = torch.bfloat16
    w = torch.randn(shape, dtype=dtype, device=runtime.DEVICE)
    nf4 = format is None or format == "nf4"
    q = nf4_quantize(w, double_quant=double_quant) if nf4 else fp4_quantize(w, format=str(format))
    x = torch.randn(tokens, shape[2], dtype=dtype, device=runtime.DEVICE)
    number = int(torch.randint(shape[0], ()))
    expert = torch.tensor([number], device=runtime.DEVICE)
    dense = nf4_dequantize(q, experts=expert, dtype=dtype)[0]
    providers: dict[str, Callable[[], Any]] = {
        "kernelbook": lambda: [nf4_matmul(x, q, expert)],
        "dense": lambda: [x @ dense.t()],
    }
    if format is None:
        providers["kernelbook:dequantize"] = lambda: [x @ nf4_dequantize(q, experts=expert, dtype=dtype)[0].t()]
    if format is None and baselines.has("bitsandbytes") and runtime.DEVICE.type == "cuda":
        providers["bitsandbytes"] = _matmul_bitsandbytes(x, q, number)
    if double_quant and baselines.has("torchao"):
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        packed = _torchao(dense)
        providers["torchao"] = lambda: [linear_nf4(x, packed)]
    if format == "mxfp4" and baselines.has("humming") and runtime.DEVICE.type == "cuda":
        layer = _humming(dense)
        providers["humming"] = lambda: [layer(x)]
    return Problem(
        providers=providers,
        truth=lambda: [x.double() @ q.as_float64()[number].t()],
        baseline=lambda: [x @ q.as_float64()[number].to(dtype).t()],
        factor=check.FORWARD_FACTOR,
    )


def _matmul_case(
    shape: tuple[int, int, int], tokens: int, double_quant: bool = False, format: str | None = None
) -> Case:
    experts, rows, cols = shape
    gbytes = dequantize_gbytes(rows * cols, double_quant, itemsize=0)
    sizes = _stored(shape, double_quant)
    if format is not None:
        gbytes = rows * cols * BITS[format] / 8e9
        sizes = {"E": experts, "rows": rows, "cols": cols, "format": format}
    gbytes += tokens * (rows + cols) * 2 / 1e9
    build = functools.partial(_matmul_problem, shape, tokens, double_quant, format)
    gflop = 2 * tokens * rows * cols / 1e9
    return Case("nf4_matmul", "forward", torch.bfloat16, sizes, "tokens", tokens, gbytes, gflop, build)


def _read_problem(bytes_: int) -> Problem:
    rows = torch.randint(256, (bytes_ // 4096, 4096), dtype=torch.uint8, device=runtime.DEVICE)

    def truth() -> list[torch.Tensor]:
        return [floor.fold([rows])]

    calls: dict[str, Callable[[], Any]] = {"kernelbook": lambda: [floor.read_rows([rows])]}
    return Problem(calls, truth, truth, check.FORWARD_FACTOR, {"kernelbook": lambda out: [floor.fold(out)]})


def _read_case(shape: tuple[int, int, int], double_quant: bool) -> Case:
    """The floor of a product by one expert: as many bytes, read by a kernel that does nothing else."""
    gbytes = dequantize_gbytes(shape[1] * shape[2], double_quant, itemsize=0)
    build = functools.partial(_read_problem, round(gbytes * 1e9))
    sizes = _stored(shape, double_quant)
    return Case("read_rows", "forward", torch.bfloat16, sizes, "tokens", 0, gbytes, 0.0, build)


def cases() -> Iterator[Case]:
    """The rows of the book's figures: 1 to 256 active experts of 256, plain and double; one expert at decode sizes; formats."""
    for double_quant in (False, True):
        for active in ACTIVE:
            yield _case((EXPERTS, ROWS, COLS), active, double_quant)
        for rows, cols in ((ROWS, COLS), (14336, 4096)):
            yield _read_case((8, rows, cols), double_quant)
            for tokens in (1, 2, 4, 8, 16, 32, 64):
                yield _matmul_case((8, rows, cols), tokens, double_quant)
    for shape, tokens, format in itertools.product(MATRICES, TOKENS, BITS):
        yield _matmul_case((1, *shape), tokens, format=format)


def models() -> Iterator[Case]:
    """Matrices of this year's models: eight of 32 experts made dense, and one matrix times one token and 16."""
    for model in MODELS.values():
        if model.experts:
            yield _case((32, 2 * model.expert_intermediate, model.hidden), 8, False)
    for rows, cols in sorted({(model.hidden, model.intermediate) for model in MODELS.values() if model.intermediate}):
        for tokens in (1, 16):
            yield _matmul_case((1, rows, cols), tokens)


BENCH = Bench(
    name="nf4",
    baselines={
        "dense": "torch",
        "bitsandbytes": "bitsandbytes",
        "gather_bitsandbytes": "bitsandbytes",
        "axolotl": "axolotl",
        "torchao": "torchao",
        "humming": "humming-kernels",
    },
    left_out=(f"axolotl for experts of more than {MOST_OF_AXOLOTL:,} elements (its launch grid is too large)",),
    cases=cases,
    models=models,
)
