"""What is measured for nf4: dequantizing 8, 64 and 256 of 256 experts, plain and double, beside bitsandbytes.

Providers: ``bitsandbytes`` dequantizes all experts, whatever is asked for; ``gather_bitsandbytes`` gathers the bytes and
absmax of the active experts first and dequantizes these. Both are left out where bitsandbytes is not installed.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kernelbook import check, runtime
from kernelbook.nf4.op import NF4Tensor, nf4_dequantize, nf4_quantize
from kernelbook.nf4.reference import nested_absmax_reference, nf4_dequantize_reference
from kernelbook.timing import Case, Problem

__all__ = ["cases", "small_checks"]

EXPERTS, ROWS, COLS, BLOCK_SIZE = 256, 1024, 2048, 64
ACTIVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def dequantize_gbytes(elements: int, block_size: int, double_quant: bool, itemsize: int = 2) -> float:
    """The fewest bytes: half a byte packed, one absmax a block (and one for 256 of them if nested), the output."""
    per_block = 1 + 4 / 256 if double_quant else 4
    return elements * (0.5 + per_block / block_size + itemsize) / 1e9


def _truth(q: NF4Tensor, experts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The chosen experts from the reference, expert by expert to save memory; blocks may not span two experts."""
    per_expert = q.numel // q.shape[0]
    bytes_, blocks = per_expert // 2, per_expert // q.block_size
    out = []
    for e in experts.tolist():
        absmax = q.absmax[e * blocks : (e + 1) * blocks]
        if q.nested_absmax is not None and q.nested_code is not None and q.nested_offset is not None:
            nested = q.nested_absmax[e * blocks // 256 : (e + 1) * blocks // 256]
            absmax = nested_absmax_reference(absmax, nested.to(dtype), q.nested_code, q.nested_offset)
        packed = q.packed[e * bytes_ : (e + 1) * bytes_]
        out.append(nf4_dequantize_reference(packed, absmax.to(dtype), q.code, q.shape[1:], q.block_size))
    return torch.stack(out)


def _bitsandbytes(q: NF4Tensor, experts: torch.Tensor, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    packed, state = q.to_bitsandbytes()
    state.dtype = dtype
    num_experts, *rest = q.shape

    def gather() -> Sequence[torch.Tensor]:
        absmax = q.absmax.view(num_experts, -1)[experts].view(-1)
        state2 = None
        if state.nested:
            scales = state.state2.absmax.view(num_experts, -1)[experts].view(-1)
            state2 = QuantState(absmax=scales, code=state.state2.code, blocksize=256, dtype=torch.float32)
        part = QuantState(
            absmax, torch.Size([len(experts), *rest]), state.code, state.blocksize, "nf4", dtype, state.offset, state2
        )
        return [dequantize_4bit(packed.view(num_experts, -1)[experts].view(-1, 1), part)]

    providers: dict[str, Callable[[], Any]] = {"gather_bitsandbytes": gather}
    if len(experts) == num_experts:
        providers["bitsandbytes"] = lambda: [dequantize_4bit(packed, state)]
    return providers


def _problem(shape: tuple[int, int, int], active: int, block_size: int, double_quant: bool) -> Problem:
    dtype = torch.bfloat16
    w = torch.randn(shape, dtype=dtype, device=runtime.DEVICE)
    q = nf4_quantize(w, block_size=block_size, double_quant=double_quant)
    del w
    # All experts come in their order, so that what bitsandbytes gives for all of them is the same result.
    ids = torch.arange(shape[0]) if active == shape[0] else torch.randperm(shape[0])[:active]
    experts = ids.to(runtime.DEVICE)
    providers: dict[str, Callable[[], Any]] = {"kernelbook": lambda: [nf4_dequantize(q, experts=experts, dtype=dtype)]}
    if importlib.util.find_spec("bitsandbytes") is not None and runtime.DEVICE.type == "cuda":
        providers.update(_bitsandbytes(q, experts, dtype))
    return Problem(
        providers=providers,
        truth=lambda: [_truth(q, ids, torch.float64)],
        baseline=lambda: [_truth(q, ids, torch.float32).to(dtype)],
        factor=check.FORWARD_FACTOR,
    )


def _case(shape: tuple[int, int, int], active: int, block_size: int, double_quant: bool) -> Case:
    num_experts, rows, cols = shape
    return Case(
        op="nf4_dequantize",
        mode="forward",
        dtype=torch.bfloat16,
        shape={"E": num_experts, "rows": rows, "cols": cols, "block_size": block_size, "double_quant": double_quant},
        x_name="active",
        x=active,
        gbytes=dequantize_gbytes(active * rows * cols, block_size, double_quant),
        gflop=0.0,
        build=lambda: _problem(shape, active, block_size, double_quant),
    )


def cases() -> Iterator[Case]:
    """The rows of the book's figures: 1 to 256 active experts of 256, plain and double."""
    for double_quant in (False, True):
        for active in ACTIVE:
            yield _case((EXPERTS, ROWS, COLS), active, BLOCK_SIZE, double_quant)


def small_checks() -> Iterator[Case]:
    """The same at sizes for the interpreter."""
    for double_quant in (False, True):
        yield _case((4, 64, 256), 2, BLOCK_SIZE, double_quant)
