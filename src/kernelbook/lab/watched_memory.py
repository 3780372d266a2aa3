"""What kernels do with memory, watched while the interpreter runs them: bounds, unset values, races.

The interpreter runs the programs of a launch one after another, all threads of a program at once, and reads whatever address
it is given. So it gives right results for kernels that are wrong on a GPU. Within ``watched()`` such a kernel raises:

- Bounds: each address that a load, a store or an atomic touches lies within a tensor that the launch was given.
- Unset values: where a mask is false and nothing was said of the value (no ``other=``), a load of a block returns NaN, or
  integers of which every other one is large, instead of zeros.
- One store of several threads: lanes that store different values to one address.
- Programs: what another program of the launch has stored may be read, or overwritten by another value, only if that program
  let go of it before (its threads met at a barrier, then an atomic that releases), and this one took hold of it since (an
  atomic on the same address that acquires). That is the memory model of the GPU, and it does not depend on the order in
  which programs happen to run here.
- Offsets: an address is no product of 32 bits with an argument of the launch, a stride or a size, which may overflow. Constants
  and, without ``tiles_too``, offsets within a tile may be multiplied with one; so may the counters of loops, which look like
  constants here.
- Threads: what this program has stored since its last barrier may be read only by a load of the very same addresses in the
  same shape, of which each thread reads its own.
"""

import bisect
import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_FOLLOWED = (
    "get_int32",
    "get_null_value",
    "create_make_range",
    "create_mul",
    "create_add",
    "create_sub",
    "create_splat",
    "create_broadcast",
    "create_expand_dims",
)
_FAR = 2**48  # bytes: more than any memory
_LARGEST = 2**26  # bytes of a tensor whose stores are remembered
# By addresses that kernels load: every launch counts as given these too, until the context ends.
reached: list[torch.Tensor] = []


class Bounded(int):
    """An argument of a launch whose products with other sizes have 32 bits: whoever launches the kernel sees to it."""


class WrongAccessError(AssertionError):
    """A kernel does with memory what it may not. ``kind``: what that is, in a word."""

    def __init__(self, told: str, kind: str) -> None:
        super().__init__(told)
        self.kind = kind


class _Region:
    """The bytes from ``start`` to ``end``, in cells of ``size`` bytes: who stored each last, when, and by which store."""

    def __init__(self, start: int, end: int, size: int) -> None:
        self.start, self.end, self.size = start, end, size
        self.program: Any = None

    def remember(self) -> bool:
        if self.program is None and self.end - self.start <= _LARGEST:
            cells = (self.end - self.start) // self.size + 1
            self.program, self.epoch, self.store = (np.full(cells, -1, np.int32) for _ in range(3))
        return self.program is not None


class _Watch:
    """The state of one launch."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = []
        for tensor in tensors:
            if tensor.numel():
                last = sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                size = tensor.element_size()
                spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * size, size))
        self.regions: list[_Region] = []
        for start, end, size in sorted(spans):
            if self.regions and start < self.regions[-1].end:  # two views of one tensor
                before = self.regions[-1]
                before.end, before.size = max(before.end, end), min(before.size, size)
            else:
                self.regions.append(_Region(start, end, size))
        self.starts = [r.start for r in self.regions]
        self.program = -1
        self.barriers: dict[int, int] = {}  # by program: how often its threads have met
        self.released: dict[int, dict[int, int]] = {}  # by address: for each program how many of its barriers are seen
        self.seen: dict[int, dict[int, int]] = {}
        self.shapes: list[bytes] = []  # by store: its addresses and shape

    def _region(self, addresses: np.ndarray, size: int, what: str) -> _Region:
        """The region that all addresses lie in."""
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self.starts, low) - 1
        if index >= 0 and high + size <= self.regions[index].end:
            return self.regions[index]
        where = self.regions[index] if index >= 0 else None
        byte = high - where.start if where is not None else 0
        if where is None:
            inside = "no tensor of this launch begins before it"
        elif byte > _FAR:
            inside = "its offset is no number that anybody set: does an index come from a masked load without other=?"
        else:
            inside = f"the tensor that begins before it has {where.end - where.start} bytes, this is byte {byte}"
        raise WrongAccessError(f"watched: {what} of {size} bytes out of bounds: {inside}", "mask")

    def _foreign(self, region: _Region, cells: np.ndarray, what: str) -> None:
        """Raises if cells were stored by programs of which this one knows nothing."""
        others = (region.program[cells] >= 0) & (region.program[cells] != self.program)
        if others.any():
            pairs = np.unique(np.stack([region.program[cells][others], region.epoch[cells][others]]), axis=1)
            for program, epoch in pairs.T:
                if self.seen.get(self.program, {}).get(int(program), 0) <= epoch:
                    both = f"watched: program {self.program} {what} what program {program} stored, and nothing orders the two"
                    if what == "reads":
                        raise WrongAccessError(both, "race")
                    raise WrongAccessError(f"{both}: their offsets overlap", "overlap")

    def load(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        addresses = pointers[mask]
        if addresses.size == 0:
            return
        region = self._region(addresses, size, "a load")
        if region.program is None:
            return
        cells = (addresses - np.uint64(region.start)).astype(np.int64) // region.size
        self._foreign(region, cells, "reads")
        own = (region.program[cells] == self.program) & (region.epoch[cells] == self.barriers.get(self.program, 0))
        if own.any():
            same = self._shape(pointers)
            if any(self.shapes[number] != same for number in np.unique(region.store[cells][own])):
                raise WrongAccessError(
                    "watched: a load of what other threads of the program may have stored, without a barrier", "barrier"
                )

    @staticmethod
    def _shape(pointers: np.ndarray) -> bytes:
        return hashlib.md5(np.ascontiguousarray(pointers).tobytes() + str(np.squeeze(pointers).shape).encode()).digest()

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray, size: int) -> None:
        addresses = pointers[mask]
        if addresses.size == 0:
            return
        region = self._region(addresses, size, "a store")
        if not region.remember():
            return
        cells = (addresses - np.uint64(region.start)).astype(np.int64) // region.size
        if not (addresses[1:] > addresses[:-1]).all():
            order = np.argsort(addresses, kind="stable")
            twice = np.flatnonzero(np.diff(addresses[order]) == 0)
            bits = np.ascontiguousarray(np.broadcast_to(values, pointers.shape)[mask]).view(
                f"V{values.dtype.itemsize}"
            )[order]
            if (bits[twice] != bits[twice + 1]).any():
                raise WrongAccessError("watched: lanes of one store write different values to one address", "overlap")
        others = (region.program[cells] >= 0) & (region.program[cells] != self.program)
        if others.any():
            old = interpreter._interpreter.load(pointers, mask, np.zeros_like(values), values.dtype)
            same = old.view(f"V{values.dtype.itemsize}") == np.ascontiguousarray(values).view(
                f"V{values.dtype.itemsize}"
            )
            self._foreign(region, cells[~same[mask]], "overwrites")
        region.program[cells] = self.program
        region.epoch[cells] = self.barriers.get(self.program, 0)
        region.store[cells] = len(self.shapes)
        self.shapes.append(self._shape(pointers))

    def barrier(self) -> None:
        self.barriers[self.program] = self.barriers.get(self.program, 0) + 1

    def atomic(self, pointers: np.ndarray, mask: np.ndarray, size: int, order: Any) -> None:
        addresses = pointers[mask]
        if addresses.size == 0:
            return
        self._region(addresses, size, "an atomic")
        seen = self.seen.setdefault(self.program, {})
        for address in map(int, np.unique(addresses)):
            known = self.released.setdefault(address, {})
            if order in _ACQUIRES:
                for program, barriers in known.items():
                    seen[program] = max(seen.get(program, 0), barriers)
            if order in _RELEASES:
                own = {**seen, self.program: self.barriers.get(self.program, 0)}
                for program, barriers in own.items():
                    known[program] = max(known.get(program, 0), barriers)


_turns = itertools.cycle((0, 1))


def _unset(pointers: Any) -> Any:
    """A value for each lane that no kernel may count on."""
    kind, dtype = pointers.get_element_ty(), interpreter._get_np_dtype(pointers.get_element_ty())
    value = np.full_like(pointers.data, 0, dtype=dtype)
    if str(kind) == "bf16":
        value[...] = 0x7FC0
    elif np.issubdtype(dtype, np.floating):
        value[...] = np.nan
    else:  # zero is somebody's id, and by turns with numbers that are nobody's
        value.reshape(-1)[next(_turns) :: 2] = True if dtype == np.bool_ else np.iinfo(dtype).max // 3
    return interpreter.TensorHandle(value, kind)


@contextlib.contextmanager
def watched(tiles_too: bool = False) -> Iterator[None]:
    """Within the context the interpreter raises where a kernel does what it may not (see above).

    ``tiles_too``: an offset in a tile times an argument needs 64 bits as well, since a stride may be anything.
    """
    current: list[_Watch] = []
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder

    def tensors_of(value: Any) -> list[torch.Tensor]:
        if isinstance(value, (tuple, list)):
            return [t for item in value for t in tensors_of(item)]
        if isinstance(value, TensorDescriptor):
            return [value.base]
        value = interpreter._unwrap_tensor(value) if hasattr(value, "data_ptr") else value
        return [value] if isinstance(value, torch.Tensor) else []

    init, convert = executor._init_args_hst, interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        result = convert(arg)
        if isinstance(arg, int) and -(2**31) <= arg < 2**31 and not isinstance(arg, Bounded):
            result.handle.narrow = "argument"
        return result

    def follow(name: str) -> Any:
        """The operation, whose result is remembered to be what comes of its operands.

        Of 32 bits: an argument of the launch, a product with one, or small, as constants and the offsets in a tile are.
        """
        made, handle = getattr(builder, name), interpreter.TensorHandle
        starts = name in ("get_int32", "get_null_value", "create_make_range")
        multiplies, mixes = name == "create_mul", name in ("create_mul", "create_add", "create_sub")

        def operation(self: Any, *args: Any) -> Any:
            result = made(self, *args)
            if result.data.dtype.itemsize != 4:
                return result
            if starts:
                result.narrow = "small"
                return result
            kinds = {getattr(a, "narrow", "") for a in args if isinstance(a, handle)}
            if "product" in kinds or (multiplies and "argument" in kinds and (tiles_too or "small" not in kinds)):
                result.narrow = "product"
            elif len(kinds) == 1 and (not mixes or kinds == {"small"}):
                result.narrow = kinds.pop()
            return result

        return operation

    def addptr(self: Any, ptr: Any, offset: Any) -> Any:
        if getattr(offset, "narrow", "") == "product":
            raise WrongAccessError(
                "watched: an offset is a product with an argument of the launch in 32 bits, which may overflow: convert with "
                ".to(tl.int64) before it is multiplied",
                "overflow",
            )
        return real["create_addptr"](self, ptr, offset)

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = init(self, args, kwargs)
        current[:] = [_Watch([*tensors_of([*args, *kwargs.values()]), *reached])]
        return args, kwargs

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        real["set_grid_idx"](self, x, y, z)
        if current:
            current[0].program = (z * self.grid_dim[1] + y) * self.grid_dim[0] + x

    def lanes(mask: Any, pointers: np.ndarray) -> np.ndarray:
        # A descriptor's mask has no dtype.
        if getattr(mask.data, "dtype", None) == np.bool_ and mask.data.shape == pointers.shape:
            return mask.data
        return np.broadcast_to(mask.data, pointers.shape).astype(bool)  # a mask made with Python's bool holds integers

    def load(
        self: Any, ptrs: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: Any
    ) -> Any:
        on = lanes(mask, ptrs.data)
        size = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
        current[0].load(ptrs.data, on, size)
        # A scalar's ``other=0.0`` is false where Triton's front end asks whether there is one, and does not come this far.
        if other is None and not on.all() and ptrs.data.size > 1:
            other = _unset(ptrs)
        return real["create_masked_load"](self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, cache_modifier: Any, eviction_policy: Any) -> Any:
        current[0].store(ptrs.data, value.data, lanes(mask, ptrs.data), value.data.dtype.itemsize)
        return real["create_masked_store"](self, ptrs, value, mask, cache_modifier, eviction_policy)

    def compare_and_swap(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        current[0].atomic(ptr.data, np.ones(ptr.data.shape, bool), val.data.dtype.itemsize, sem)
        return real["create_atomic_cas"](self, ptr, cmp, val, sem, scope)

    def modify(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        current[0].atomic(ptr.data, lanes(mask, ptr.data), val.data.dtype.itemsize, sem)
        return real["create_atomic_rmw"](self, op, ptr, val, mask, sem, scope)

    def barrier(self: Any) -> Any:
        current[0].barrier()
        return real["create_barrier"](self)

    patches = {
        **{name: follow(name) for name in _FOLLOWED},
        "set_grid_idx": set_grid_idx,
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_cas": compare_and_swap,
        "create_atomic_rmw": modify,
        "create_barrier": barrier,
        "create_addptr": addptr,
    }
    real = {name: getattr(builder, name) for name in patches}
    with (
        mock.patch.object(executor, "_init_args_hst", init_args),
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        mock.patch.multiple(builder, **patches),
    ):
        reached.clear()
        yield
