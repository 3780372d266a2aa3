"""What the tests of the rooms share: random tensors, rows that lie far apart, calls with a wrong argument, other processes."""

import contextlib
import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelbook as kb
from kernelbook import check, memory, runtime
from kernelbook.attention import flash_attention_reference


def label(value: Any) -> str:
    """A parameter in the name of a test."""
    return str(value).removeprefix("torch.").replace(" ", "")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers where kernels run, rounded to ``dtype``."""
    return torch.randn(shape, device=runtime.DEVICE).to(dtype)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it PyTorch makes floating-point tensors in ``dtype`` where nothing is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def far_apart(tensor: torch.Tensor, *steps: int) -> torch.Tensor:
    """A copy of ``tensor`` with these strides and contiguous rows. The memory between is reserved, not touched."""
    strides = (*steps, 1)
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
    return torch.empty(size, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def packed(kind: str, *shape: int) -> kb.NF4Tensor:
    """Random numbers in 4 bits; ``kind``: mxfp4, nvfp4, or the block size of NF4, as in ``64 double``, where scales are packed too."""
    if kind in ("mxfp4", "nvfp4"):
        return kb.fp4_quantize(randn(*shape), format=kind)
    return kb.nf4_quantize(randn(*shape), block_size=int(kind.split()[0]), double_quant="double" in kind)


def check_attention(given: dict[str, Any], inputs: dict[str, torch.Tensor], grads: Sequence[str] | None = None) -> None:
    """Output of ``flash_attention``, and gradients of these inputs or of all, by the rule of check.py."""
    check.check_op(
        functools.partial(kb.flash_attention, **given),
        functools.partial(flash_attention_reference, **given),
        inputs,
        grads=tuple(inputs) if grads is None else grads,
    )


def refused(function: Callable[..., object], given: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """A call with the arguments ``given``, but for ``changes`` (what can be called makes the argument), names what is wrong."""
    changes = {name: v() if callable(v) else v for name, v in changes.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        function(**given | changes)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another process with the package, in which no GPU is seen: the same outcome on every machine."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(kb.__file__).parents[1])}
    code = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | hidden | environment, capture_output=True, text=True, check=False
    )


def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """From here on each buffer that Python code allocates lies between two stretches of memory.

    -> whether there are any, and they are as they were.
    """
    real_empty, real_new_empty, guards = torch.empty, torch.Tensor.new_empty, []

    def guarded(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pad = 4096
        whole = torch.full((shape.numel() + 2 * pad,), 7, dtype=dtype, device=device)
        guards.extend((whole[:pad], whole[pad + shape.numel() :]))
        return whole[pad : pad + shape.numel()].view(shape)

    def empty(*size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return guarded(real_empty(*size, device="meta").shape, dtype, device)

    def new_empty(self: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        if kwargs:  # the interpreter's own
            return real_new_empty(self, *size, dtype=dtype, **kwargs)
        return guarded(real_empty(*size, device="meta").shape, dtype or self.dtype, self.device)

    monkeypatch.setattr(memory, "_new", None)  # what a GPU's memory comes from otherwise
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return lambda: bool(guards) and all(bool((guard == 7).all()) for guard in guards)


# For tests that ask which products go to cuBLAS: without tensor cores all those of 16 bits do.
with_tensor_cores = pytest.mark.skipif("not runtime.properties().has_tensor_cores", reason="cuBLAS multiplies there")


@contextlib.contextmanager
def compiled_graphs() -> Iterator[None]:
    """What is compiled within, with ``mode="reduce-overhead"``, becomes graphs of the GPU, and nothing of it is left out."""
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    torch.compiler.reset()
    counters.clear()
    try:
        yield
        manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        assert manager is not None and any(True for _ in manager.get_roots()), "no graph was made"
        assert counters["inductor"]["cudagraph_skips"] == 0
    finally:
        torch.compiler.reset()
