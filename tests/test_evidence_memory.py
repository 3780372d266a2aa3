"""What ``watched_memory`` finds in small kernels with one fault each, and that it lets their right forms pass."""

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import kernelbook  # noqa: F401

# isort: split
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernelbook import runtime
from kernelbook.lab import remembered_types
from kernelbook.lab.watched_memory import watched

pytestmark = pytest.mark.skipif(
    not runtime.INTERPRET or not triton.__version__.startswith(("3.6.", "3.7.")),
    reason="the interpreter's memory is watched",
)


@triton.jit
def _copy_kernel(x_ptr, y_ptr, N, MASKED: tl.constexpr, SET: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0) if SET else tl.load(x_ptr + offs, mask=offs < N)
    if MASKED:
        tl.store(y_ptr + offs, x, mask=offs < N)
    else:
        tl.store(y_ptr + offs, x)


@triton.jit
def _total_kernel(
    x_ptr, partial_ptr, ticket_ptr, y_ptr, ORDER: tl.constexpr, BARRIER: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program keeps its sum, and the last adds them up."""
    pid = tl.program_id(0)
    tl.store(partial_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), axis=0))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem=ORDER) == 3:
        tl.store(y_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, 4)), axis=0))


@triton.jit
def _turn_kernel(x_ptr, y_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """Threads read what others have stored."""
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))
    if BARRIER:
        tl.debug_barrier()
    turned = tl.load(y_ptr + BLOCK - 1 - offs)
    tl.debug_barrier()
    tl.store(y_ptr + offs, turned)


@triton.jit
def _row_kernel(x_ptr, stride_xm, y_ptr, N, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_xm + offs, mask=offs < N, other=0.0)
    tl.store(y_ptr + row.to(tl.int64) * N + offs, x, mask=offs < N)


def test_right_kernels_pass() -> None:
    x, y = torch.randn(4, 16), torch.zeros(4, 16)
    _copy_kernel[(2,)](x, y, 60, MASKED=True, SET=True, BLOCK=32)
    assert torch.equal(y.view(-1)[:60], x.view(-1)[:60])
    partial, ticket, total = torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1)
    _total_kernel[(4,)](x, partial, ticket, total, ORDER="acq_rel", BARRIER=True, BLOCK=16)
    torch.testing.assert_close(total[0], x.sum())
    _turn_kernel[(1,)](x[0], y[0], BARRIER=True, BLOCK=16)
    assert torch.equal(y[0], x[0].flip(0))
    _row_kernel[(4,)](x, 16, y, 16, WIDE=True, BLOCK=16)
    assert torch.equal(y, x)


X = (torch.randn(4, 16), torch.zeros(4, 16))
FAULTS = {
    "a store that is not masked": (
        lambda: _copy_kernel[(3,)](*X, 64, MASKED=False, SET=True, BLOCK=32), "a store of 4 bytes out of bounds",
    ),
    "a ticket that does not release": (
        lambda: _total_kernel[(4,)](X[0], torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1), ORDER="relaxed", BARRIER=True, BLOCK=16),
        "nothing orders the two",
    ),
    "threads that do not meet before the ticket": (
        lambda: _total_kernel[(4,)](X[0], torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1), ORDER="acq_rel", BARRIER=False, BLOCK=16),
        "nothing orders the two",
    ),
    "threads that do not meet": (lambda: _turn_kernel[(1,)](X[0][0], X[1][0], BARRIER=False, BLOCK=16), "without a barrier"),
    "an offset in 32 bits": (lambda: _row_kernel[(4,)](X[0], 16, X[1], 16, WIDE=False, BLOCK=16), "in 32 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_raise(name: str) -> None:
    call, message = FAULTS[name]
    with pytest.raises(Exception, match=message):
        call()


def test_a_value_that_nobody_set_is_not_a_zero() -> None:
    x, y = torch.randn(20), torch.zeros(32)
    _copy_kernel[(1,)](x, y, 20, MASKED=False, SET=False, BLOCK=32)
    assert torch.equal(y[:20], x) and y[20:].isnan().all()


@triton.jit
def _kernel_that_calls(function: tl.constexpr):
    function()


SHAPES: list[tuple[int, ...]] = [(), (1,), (4,), (2, 1), (1, 4), (2, 4), (2,)]
NUMBERS = [0, 1, -3, 2**24 + 1, 2**31, 2**40, 2.5, 0.0, -0.0, 1e-40, True, float("inf"), tl.constexpr(2)]
OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
    operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
    lambda a, b: tl.maximum(a, b), lambda a, b: tl.where(a > b, a, b), lambda a, b: tl.broadcast(a, b)[0],
    lambda a, b: a.to(b.dtype), lambda a, b: a[:, None] + b[None, :], lambda a, b: tl.zeros((2, 4), a.dtype) + a,
]  # fmt: skip


def _values(dtype: tl.dtype, shape: tuple[int, ...], narrow: str) -> tl.tensor:
    numbers = np.arange(1, 1 + math.prod(shape)).reshape(shape or (1,))
    handle = interpreter.TensorHandle(numbers.astype(interpreter._get_np_dtype(dtype)), dtype)
    if narrow:
        handle.narrow = narrow
    return tl.tensor(handle, tl.block_type(dtype, [*shape]) if shape else dtype)


def _results(pairs: list[tuple[Any, Any]]) -> list[str]:
    """Types, bits and what is watched, or the error, of every operator."""

    def made(value: Any) -> Any:
        return _values(*value) if isinstance(value, tuple) else value

    found = []

    def run() -> None:
        for (a, b), of in itertools.product(pairs, OPERATORS):
            try:
                c = of(made(a), made(b))
            except Exception as error:
                found.append(type(error).__name__)
                continue
            if not isinstance(c, tl.tensor):
                found.append(repr(c))
            else:
                handle, kinds = c.handle, {**vars(c), "type of": vars(c.type)}
                bits = handle.data.dtype, handle.data.shape, handle.data.tobytes(), handle.dtype
                told = (f"{name} {type(kinds[name])} {kinds[name]}" for name in sorted(kinds) if name != "handle")
                found.append(f"{bits} {getattr(handle, 'narrow', '')} {[*told]}")

    with watched(), np.errstate(all="ignore"):
        _kernel_that_calls[(1,)](run)
    return found


@pytest.mark.parametrize(
    "of", (lambda x: x + 1, lambda x: 1 + x, lambda x: x + x, lambda x: x - (-1), lambda x: x * 2, lambda x: x * x)
)
def test_what_is_remembered_overflows_too(of: Callable[[Any], Any], overflow_raises: Callable[[], None]) -> None:
    def run() -> None:
        largest = interpreter.TensorHandle(np.full(1, 2**31 - 1, np.int32), tl.int32)
        of(tl.tensor(largest, tl.int32))

    _kernel_that_calls[(1,)](run)
    overflow_raises()
    with pytest.raises(Exception, match="overflow"):
        _kernel_that_calls[(1,)](run)


@pytest.mark.filterwarnings("ignore:Value 2 exceeds")
@pytest.mark.unwatched  # until the one or the other is in place
@pytest.mark.skipif(not remembered_types.of_triton, reason="nothing is remembered")
def test_what_is_remembered_is_tritons() -> None:
    names = "int1 uint8 int32 uint32 int64 float16 bfloat16 float32"
    dtypes = [*(getattr(tl, name) for name in names.split()), tl.pointer_type(tl.float32)]
    pairs: list[tuple[Any, Any]] = [
        *(((a, (4,), ""), (b, shape, "")) for a, b in itertools.product(dtypes, dtypes) for shape in ((4,), ())),
        *(((tl.int32, a, ""), (tl.int32, b, "")) for a, b in itertools.product(SHAPES, SHAPES)),
        *(((tl.pointer_type(tl.int8), a, ""), (tl.int32, b, "")) for a, b in itertools.product(SHAPES, SHAPES)),
    ]
    for kind in dtypes:
        pairs += [
            pair for n in NUMBERS for shape in ((), (4,)) for pair in (((kind, shape, ""), n), (n, (kind, shape, "")))
        ]
    kinds = ("", "small", "argument", "product")
    pairs += [((tl.int32, (4,), a), (b, (), c)) for b in (tl.int32, tl.int64) for a in kinds for c in kinds]
    pairs += [((tl.int32, (4,), kind), n) for kind in kinds for n in (0, 3)]
    ours = _results(pairs)
    with pytest.MonkeyPatch.context() as patch:
        for (place, name), member in remembered_types.of_triton.items():
            patch.setattr(place, name, member)
        theirs = _results(pairs)
    assert len(ours) == len(theirs) == len(pairs) * len(OPERATORS)
    for (pair, of), own, real in zip(itertools.product(pairs, OPERATORS), ours, theirs):
        assert own == real, (pair, of)
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.int32, [])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
