"""What all public functions have in common: how they take tensors of any kind, and what may be done with their results."""

import enum
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import kernelbook
from kernelbook import arguments, launching, runtime
from kernelbook.nn import GatedExperts, SparseLinear
from kernelbook.train.chunks import chunk_norms

Call = Callable[[torch.Tensor], torch.Tensor]


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=runtime.DEVICE)


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=runtime.DEVICE)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    return kernelbook.gather_matmul(x, _draw(9, 32), _ids(1, 4))


def _ffn(x: torch.Tensor) -> torch.Tensor:
    return kernelbook.scatter_ffn(x, _draw(9, 32), _draw(9, 24), _ids(1, 4))


def _attended(x: torch.Tensor) -> torch.Tensor:
    q = x.reshape(1, 2, -1, 16)
    return kernelbook.flash_attention(q, q, q)


def _routed(x: torch.Tensor) -> torch.Tensor:
    routing = kernelbook.route(_ids(0, 1, 1, 0)[:, None], 2)
    return kernelbook.scatter2scatter(x.reshape(4, 32), _draw(2, 32, 24), routing)


CALLS: dict[str, Call] = {
    "layer_norm": kernelbook.layer_norm,
    "sparse_linear": lambda x: kernelbook.sparse_linear(x, _draw(48, 32), None, _ids(1), chunk_size=16),
    "sparse_forward": lambda x: kernelbook.sparse_forward(x, _draw(48, 32), None, _ids(1), chunk_size=16),
    "sparse_forward dense": lambda x: kernelbook.sparse_forward(x, _draw(16, 32), None, _ids(0), chunk_size=16),
    "gather_matmul": _gathered,
    "scatter_ffn": _ffn,
    "flash_attention": _attended,
    "scatter2scatter": _routed,
}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "flash_attention"])
@pytest.mark.parametrize("shape", [(4, 32), (2, 2, 32)], ids=str)
def test_a_result_can_be_changed_in_place(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = _draw(*shape).requires_grad_()
    y = CALLS[name](x)
    assert not y._is_view()
    y += 1.0  # as models add their residual
    y.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_attention_needs_its_result_and_says_when_it_was_changed() -> None:
    x = _draw(4, 32).requires_grad_()
    y = _attended(x)
    y += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused_not_left_out(name: str) -> None:
    x = _draw(4, 32)
    with pytest.raises(NotImplementedError, match=r"must be differentiated by torch\.autograd"):
        torch.func.jvp(CALLS[name], (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        CALLS[name](forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match=r"got torch\.func"):
        torch.func.grad(lambda t: CALLS[name](t).sum())(x)
    with forward_ad.dual_level():
        CALLS[name](x)  # the level alone is no obstacle


@pytest.mark.parametrize("name", ["layer_norm", "sparse_linear", "gather_matmul", "scatter_ffn"])
def test_sparse_tensors_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"x must be a dense tensor, got layout torch.sparse_coo"):
        CALLS[name](_draw(4, 32).to_sparse())


def test_meta_tensors_have_no_autocast() -> None:
    q = torch.empty(1, 2, 4, 16, dtype=torch.float16, device="meta")
    assert kernelbook.flash_attention(q, q, q).is_meta
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert arguments.in_autocast_dtype(q, q) == (q, q)


@pytest.mark.parametrize("switch", ["fp32_precision", "allow_tf32"])
def test_both_switches_for_tf32_are_read(switch: str) -> None:
    """In a process of its own: after the newer switch was set, the older one cannot be read any more."""
    set_it: dict[str, Any] = {"fp32_precision": ("'tf32'", "'ieee'"), "allow_tf32": (True, False)}
    on, off = set_it[switch]
    script = (
        "import torch\n"
        "from kernelbook import launching\n"
        "matmul = torch.backends.cuda.matmul\n"
        "assert not launching.allows_tf32()\n"
        f"matmul.{switch} = {on}\n"
        "assert launching.precision() == 'tf32'\n"
        f"matmul.{switch} = {off}\n"
        "assert launching.precision() == 'ieee'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_reshaped_shares_memory_and_is_no_view() -> None:
    base = torch.arange(6.0)
    out = launching.reshaped(base, 2, 3)
    assert out.shape == (2, 3) and out.data_ptr() == base.data_ptr() and not out._is_view()


# --- numbers --------------------------------------------------------------------------------------------------------

Q = torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0)).to(runtime.DEVICE)
PACKED = kernelbook.nf4_quantize(_draw(2, 64, 64).to(runtime.DEVICE))
ROUTING = kernelbook.route(_ids(0, 1)[:, None], 2)
IDENTITY = torch.eye(64, device=runtime.DEVICE)


def _pages(scale: Any) -> torch.Tensor:
    pages = Q.new_ones(2, 1, 16, 16)
    return kernelbook.paged_attention(Q[:, :, :1], pages, pages, _ids(0, 1)[None], _ids(20), scale=scale)


def _scaled(scaling: Any) -> torch.Tensor:
    lora = torch.ones(2, 1, 64, device=runtime.DEVICE)
    return kernelbook.moe_lora(IDENTITY[:2], IDENTITY.expand(2, 64, 64), lora, lora.mT, ROUTING, scaling=scaling)


# A call for each argument that is a number, and a number for it.
INTEGERS: dict[str, tuple[Callable[[Any], torch.Tensor], int]] = {
    "flash_attention window": (lambda n: kernelbook.flash_attention(Q, Q, Q, causal=True, window=n), 3),
    "route num_experts": (lambda n: kernelbook.route(_ids(0, 1)[:, None], n).lists, 2),
    "nf4_matmul expert": (lambda n: kernelbook.nf4_matmul(IDENTITY[:2], PACKED, n), 1),
    "nf4_quantize block_size": (lambda n: kernelbook.nf4_quantize(IDENTITY, block_size=n).packed, 64),
    "sparse_linear chunk_size": (lambda n: kernelbook.sparse_linear(IDENTITY, IDENTITY, chunk_size=n), 32),
    "sparse_forward chunk_size": (lambda n: kernelbook.sparse_forward(IDENTITY, IDENTITY, None, _ids(1), chunk_size=n), 32),
    "SparseLinear chunk_size": (lambda n: _ids(SparseLinear(64, 64, chunk_size=n).num_chunks), 32),
    "GatedExperts.add_lora rank": (lambda n: GatedExperts(2, 32, 32).add_lora(n).gate_up_b, 2),
    "chunk_norms chunk_size": (lambda n: chunk_norms(IDENTITY, chunk_size=n), 32),
}  # fmt: skip
NUMBERS: dict[str, tuple[Callable[[Any], torch.Tensor], int]] = {
    "flash_attention scale": (lambda n: kernelbook.flash_attention(Q, Q, Q, scale=n), 2),
    "paged_attention scale": (_pages, 2),
    "GatedExperts.add_lora alpha": (lambda n: torch.tensor(GatedExperts(2, 32, 32).add_lora(2, n).scaling), 2),
    "moe_lora scaling": (_scaled, 2),
}


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_what_a_number_is(name: str) -> None:
    """One of Python's or NumPy's, or of a class made of those: never a bool, a string or a tensor."""
    call, number = INTEGERS.get(name) or NUMBERS[name]
    of_a_class = enum.IntEnum("Sizes", {"SIZE": number})["SIZE"]
    others: list[Any] = [of_a_class, np.int64(number)]
    if name in NUMBERS:
        others += [float(number), np.float32(number)]
    expected = call(number)
    for _ in range(3):  # what a call has been seen to do is repeated from the third on
        for other in others:
            torch.testing.assert_close(call(other), expected, rtol=0, atol=0)
    op, argument = name.split()
    nothing: list[Any] = [True, str(number), np.bool_(True)]
    if name in INTEGERS:
        nothing.append(float(number))
    if name != "nf4_matmul expert":  # which may be a tensor
        nothing.append(torch.tensor(number))
    for other in nothing:
        with pytest.raises(TypeError, match=f"{op}: {argument} must be an? (int|num).*, got {type(other).__name__}"):
            call(other)
