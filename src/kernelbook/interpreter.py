"""Mends of Triton's interpreter, which compiled kernels do not need: no measured row depends on this file.

On a newer NumPy: Triton 3.6 takes an array of one element for a number, NumPy 2.4 does not, and a loop up to a number that a
kernel is given failed. Masks of truth values: "&" of a number and a tile gives integers, which loads refuse from Triton 3.9 on.
Rows that are the same bits in any tile, within ``same_bits``. One kernel at a time: of two threads the first that ends would
take the patches of triton.language away from the other, and programs share one index. And float32 in the place of bfloat16,
whose arithmetic is silently wrong in it.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
from triton.runtime import interpreter


def mend() -> None:
    """Replace what is wrong in the interpreter, what two threads cannot share, and what takes half of its time for nothing."""
    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    run, patched, lock = interpreter.InterpretedFunction.run, set[int](), threading.RLock()

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)  # the scope puts back what it has replaced, this too
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    def patch_once(function: Any) -> Any:
        """Patch triton.language once a launch; Triton does so whenever a kernel calls a function."""
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch_lang(function)

    @functools.wraps(run)
    def run_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            patched.clear()
            return run(*args, **kwargs)

    interpreter._patch_lang_tensor, interpreter._patch_lang = with_index, patch_once
    interpreter.InterpretedFunction.run = run_alone
    builder: Any = interpreter.interpreter_builder
    # It computes every sum and product of integers twice, to look for overflows, and only then asks whether to tell.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(type(builder), name, _with_mask_of_bool(getattr(type(builder), name), place))
    type(builder).create_dot = _row_by_row(type(builder).create_dot)


def _with_mask_of_bool(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a method of the interpreter's builder that is given a mask as its argument number ``place``."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[place]
        if getattr(mask.data, "dtype", "bool") != "bool":  # of a descriptor Triton 3.6 gives NumPy's array itself
            args = (*args[:place], type(mask)(mask.data.astype(bool), mask.dtype), *args[place + 1 :])
        return function(self, *args, **kwargs)

    return call


def _row_by_row(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Return the interpreter's product of two tiles, which within ``same_bits`` is a product for each row.

    BLAS may add the last rows of a tile in another order than the first, as OpenBLAS does on CPUs with AVX2. What a row
    becomes would then depend on its place in the tile.
    """

    @functools.wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, acc: Any, *how: Any) -> Any:
        if not runtime.in_same_bits():
            return dot(self, a, b, acc, *how)
        of, row = type(a), (..., None, slice(None))
        rows = dot(
            self, of(a.data[row], a.dtype), of(b.data[..., None, :, :], b.dtype), of(acc.data[row], acc.dtype), *how
        )
        return of(rows.data[..., 0, :], rows.dtype)

    return create_dot


@contextlib.contextmanager
def widened(args: Iterable[Any]) -> Iterator[list[Any]]:
    """A kernel's arguments with float32 copies of bfloat16 tensors, which lie in memory alike; what it wrote is copied back.

    A tensor is an argument itself, the ``base`` of a descriptor, or in a tuple with its strides.
    """
    copies: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
        if place not in copies:
            wide = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)
            once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())  # of what is expanded
            wide[once].copy_(tensor.detach()[once])
            copies[place] = tensor, wide, wide.clone()
        return copies[place][1]

    def given(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return type(arg)(*map(given, arg))
        tensor = arg.base if hasattr(arg, "block_shape") else arg
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16:
            arg = copy_of(tensor) if tensor is arg else dataclasses.replace(arg, base=copy_of(tensor))
        return arg

    yield [*map(given, args)]
    for tensor, wide, before in copies.values():
        if not torch.equal(wide.view(torch.int32), before.view(torch.int32)):
            tensor.data.copy_(wide)  # autograd hears of it as little as of what a kernel writes on a GPU


if runtime.INTERPRET:
    mend()
