"""What launches have in common: tensors, strides and dtypes as kernels take them."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from kernelbook import launching, runtime


def test_cdiv_is_tritons() -> None:
    for a in (0, 1, 15, 16, 17, 2**40 + 1):
        for b in (1, 3, 16):
            assert launching.cdiv(a, b) == triton.cdiv(a, b)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_sums_are_kept_in_single_or_double(dtype: torch.dtype) -> None:
    double = dtype == torch.float64
    assert launching.accumulator(dtype) == (torch.float64 if double else torch.float32)
    assert launching.tl_accumulator(dtype) == (tl.float64 if double else tl.float32)
    assert launching.tl_accumulator(launching.accumulator(dtype)) == launching.tl_accumulator(dtype)


def test_float32_is_multiplied_as_pytorch_is_set() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, expected in ((True, "tf32"), (False, "ieee")):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert launching.precision() == expected
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_autocast_is_off_within() -> None:
    x = torch.ones(2, 2, device=runtime.DEVICE)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        with launching.without_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with launching.without_autocast(x):
        assert not torch.is_autocast_enabled(x.device.type)


def test_dtypes_that_kernels_are_given() -> None:
    single = torch.ones(2, device=runtime.DEVICE)
    a, b, c = launching.in_kernel_dtype(single, None, single.bfloat16())
    assert a is single and b is None
    assert c.dtype == (torch.float32 if runtime.INTERPRET else torch.bfloat16)


def test_a_matrix_is_a_view_where_it_can_be() -> None:
    x = torch.arange(24.0, device=runtime.DEVICE).reshape(2, 3, 4)
    assert launching.matrix(x).shape == (6, 4) and launching.matrix(x).data_ptr() == x.data_ptr()
    assert launching.matrix(x[0, 0]).shape == (1, 4)
    assert launching.matrix(x[:0]).shape == (0, 4)
    turned = x.transpose(0, 1)
    assert torch.equal(launching.matrix(turned), turned.reshape(6, 4))
    steps = x[0].t()
    assert launching.matrix(steps).stride() == steps.stride()


def test_strides_of_a_tensor_and_of_none() -> None:
    x = torch.ones(3, 4, device=runtime.DEVICE)
    assert launching.strided(x, 2, x[0]) == (x, 4, 1)
    for dims in (1, 2, 3):
        stand_in, *steps = launching.strided(None, dims, x)
        assert stand_in is x and steps == [0] * dims


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_rows_that_begin_on_16_bytes(dtype: torch.dtype) -> None:
    wide = 16 // dtype.itemsize
    x = torch.zeros(6, 4 * wide, dtype=dtype, device=runtime.DEVICE)
    assert x.data_ptr() % 16 == 0
    for aligned in (x, x[:, :3], x[1:], x[::2], x.reshape(2, 3, -1), x[:, wide:], x[0], x.reshape(3, 2, -1)[:, 0]):
        assert launching.has_aligned_rows(aligned)
    for other in (x.t(), x[:, 1:], x[:, ::2], x[:1].expand(6, -1), x.reshape(-1, 3 * wide // 2)):
        assert not launching.has_aligned_rows(other), other.stride()


def test_a_box_reads_a_tensor_in_pieces() -> None:
    x = torch.zeros(6, 8, dtype=torch.float16, device=runtime.DEVICE)[:, :4]
    box = launching.box(x, 2, 4)
    assert box.base is x and box.block_shape == [2, 4]
    assert list(box.shape) == [6, 4] and list(box.strides) == [8, 1]


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Sub(torch.Tensor):
    pass


def test_plain_calls() -> None:
    """Ordinary tensors that record nothing, and only where nobody listens."""
    x, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    assert launching.is_plain(x, None, torch.nn.Parameter(x, requires_grad=False))
    assert launching.is_plain()
    assert not launching.is_plain(x, leaf)
    with torch.no_grad():
        assert launching.is_plain(x, leaf)
    with torch.inference_mode():
        assert launching.is_plain(x)
    for other in (torch.empty(2, device="meta"), x.as_subclass(_Sub)):
        assert not launching.is_plain(x, other)
    for mode in (FakeTensorMode, _Passing, torch.autograd.forward_ad.dual_level, torch.profiler.profile):
        with mode():
            assert not launching.is_plain(x)
    assert launching.is_plain(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_call_that_is_traced_is_not_plain() -> None:
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(launching.is_plain(x))
        return x + 1 if found[-1] else x - 1

    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(look, backend="eager")(x), x - 1)
    assert torch.equal(torch.vmap(look)(x), x - 1)
    assert torch.equal(make_fx(look)(x)(x), x - 1)
    assert torch.equal(torch.jit.trace(look, (x,), check_trace=False)(x), x - 1)
    assert not any(found)
