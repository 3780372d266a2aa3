"""What ``watched_memory`` finds in small kernels with one fault each, and that it lets their right forms pass."""

import kernelbook  # noqa: F401

# isort: split
import pytest
import remembered_types
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernelbook import runtime

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


def test_remembered_types_are_those_of_triton() -> None:
    def made(own: bool, dtype: tl.dtype, shape: list[int]) -> list[object]:
        with pytest.MonkeyPatch.context() as patch:
            if own:
                patch.setattr(tl.core.block_type, "__init__", remembered_types.BLOCK)
                patch.setattr(tl.core.tensor, "__init__", remembered_types.TENSOR)
                patch.setattr(interpreter, "_get_np_dtype", remembered_types.NP_DTYPE)
            kind = tl.block_type(dtype, [tl.constexpr(n) for n in shape]) if shape else dtype
            parts = [*vars(kind).items()] if shape else []
            tensor = tl.tensor(None, kind)
            parts += vars(tensor).items()
            return [interpreter._get_np_dtype(kind), *((name, type(v), str(v)) for name, v in parts)]

    for dtype in (tl.int1, tl.bfloat16, tl.float32, tl.pointer_type(tl.float16)):
        for shape in ([], [1], [16], [4, 32]):
            assert sorted(map(str, made(False, dtype, shape))) == sorted(map(str, made(True, dtype, shape)))
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.int32, [])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
