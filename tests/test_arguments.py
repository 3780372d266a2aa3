"""What all public functions have in common: how they take tensors of any kind, and what may be done with their results."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from tensors import python

import kernelbook
from kernelbook import arguments, runtime
from kernelbook.lab import timing


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=runtime.DEVICE)


def _attended(x: torch.Tensor) -> torch.Tensor:
    q = x.reshape(1, 2, -1, 16)
    return kernelbook.flash_attention(q, q, q)


def test_attention_needs_its_result_and_says_when_it_was_changed() -> None:
    x = _draw(4, 32).requires_grad_()
    y = _attended(x)
    y += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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
        "from kernelbook import tensors\n"
        "matmul = torch.backends.cuda.matmul\n"
        "assert tensors.precision(torch.float32) == 'ieee'\n"
        f"matmul.{switch} = {on}\n"
        "assert tensors.precision(torch.float32) == 'tf32'\n"
        f"matmul.{switch} = {off}\n"
        "assert tensors.precision(torch.float32) == 'ieee'\n"
    )
    done = python(script)
    assert done.returncode == 0, done.stderr


def test_bfloat16_on_a_gpu_that_has_none_is_said_once() -> None:
    arguments._warn_of_bfloat16.cache_clear()  # another test may have been told
    x = {dtype: _draw(3, 16).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}

    def check(target: str, dtype: torch.dtype) -> None:
        with runtime.compiling_for(target):
            arguments.check_tensor("layer_norm", "x", x[dtype])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target, dtype in (("sm_75", torch.float16), ("sm_75", torch.float32), ("sm_80", torch.bfloat16)):
            check(target, dtype)
        with pytest.warns(UserWarning, match=r"kernelbook: Tesla T4 has no bfloat16: .* Take float16 there"):
            check("sm_75", torch.bfloat16)
        check("sm_75", torch.bfloat16)
    for target, dtype in (("sm_75", torch.float16), ("sm_80", torch.bfloat16), ("gfx942", torch.bfloat16)):
        with runtime.compiling_for(target):
            assert timing.half_dtype() == dtype
    arguments._warn_of_bfloat16.cache_clear()


@pytest.mark.parametrize("kind", ("cuda", "xpu"))
def test_of_other_devices_gpus_alone_are_taken(kind: str) -> None:
    class Elsewhere(torch.Tensor):  # nobody has such a device here
        device = torch.device(kind, 0)
        is_cuda = kind == "cuda"

    x = torch.ones(2, 3).as_subclass(Elsewhere)
    refused = pytest.raises(ValueError, match=r"layer_norm: x must be on a GPU .*, got xpu")
    with contextlib.nullcontext() if kind == "cuda" else refused:
        arguments.check_tensor("layer_norm", "x", x)


@pytest.mark.skipif(not runtime.INTERPRET, reason="in the interpreter, beside a GPU")
def test_the_cpu_is_taken_by_the_interpreter_beside_a_gpu_and_by_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    arguments.check_tensor("layer_norm", "x", torch.ones(2, 3))
    monkeypatch.setattr(runtime, "INTERPRET", False)
    with pytest.raises(ValueError, match="layer_norm: x must be on the GPU, got cpu"):
        arguments.check_tensor("layer_norm", "x", torch.ones(2, 3))


def test_a_tracers_integer_stays_what_it_is() -> None:
    n = torch.SymInt(None)
    assert arguments.integer("tile", "n", n) is n
