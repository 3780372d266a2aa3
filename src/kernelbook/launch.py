"""From a call to its kernel: the launcher."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kernelbook import interpreter, runtime  # before Triton, which it sets up
from kernelbook.memory import PLAIN

# isort: split
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(a: int, b: int) -> int:
    """``triton.cdiv``, without the wrapper that lets kernels call it too: the host's time counts for small problems."""
    return -(-a // b)


# FMA contraction is pinned: it is part of what a kernel computes, and no version's default decides it.
OPTIONS = {"enable_fp_fusion": True}
_RUN = JITFunction.run
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Whether compiled kernels are called without ``kernel[grid]``.
_CALLS_COMPILED = not runtime.INTERPRET and runtime.HAS_GPU and torch.version.hip is None and runtime.TRITON_IS_TRIED


def _is_watched() -> bool:
    """Return whether something in Triton wants to see, change or replace launches: hooks, profilers, recorders, debugging."""
    watching = triton.knobs.runtime
    return bool(
        JITFunction.run is not _RUN
        or getattr(watching.launch_enter_hook, "calls", watching.launch_enter_hook)
        or getattr(watching.launch_exit_hook, "calls", watching.launch_exit_hook)
        or watching.add_stages_inspection_hook is not None
        or watching.debug
        or triton.knobs.compilation.__dict__.get("instrumentation_mode")
    )


@functools.lru_cache(maxsize=2**16)
def _integer_kind(value: Any) -> Any:
    """Return Triton's specialization of an integer argument: whether it is 1, a multiple of 16, and the type that holds it.

    Of a tuple of integers a tuple.
    """
    if isinstance(value, tuple):
        return tuple(map(_integer_kind, value))
    wide = 0 if -(2**31) <= value < 2**31 else 1 if value < 2**63 else 2
    return (value == 1) + 2 * (value % 16 == 0) + 4 * wide


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Block:
    """The block that a kernel reads or writes at a time through a tensor descriptor (TMA); made by :func:`block`."""

    shape: tuple[int, ...]
    layout: Any  # of the block in shared memory, for Gluon's kernels


@functools.cache
def block(*shape: int, layout: Any = None) -> Block:
    """Return the one :class:`Block` of this shape and layout: keys hold it, and to hash a layout takes the host longer."""
    return Block(shape, layout)


class Descriptor(NamedTuple):
    """A tensor that a kernel reads or writes through a tensor descriptor, block by block."""

    tensor: torch.Tensor
    block: Block


def _descriptor(base: Any, shape: Sequence[int], strides: Sequence[int], block: Block) -> Any:
    """Return Triton's own descriptor (without a layout) or Gluon's (with one)."""
    if block.layout is None:
        return TensorDescriptor(base, [*shape], [*strides], [*block.shape])
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(base, [*shape], [*strides], [*block.shape], block.layout)


# Triton checks a descriptor where it is made, which takes the host longer than a small launch; steps use the same memory again.
@functools.lru_cache(maxsize=4096)
def _kept_descriptor(address: int, dtype: torch.dtype, *of: Any) -> Any:
    # In the place of the tensor stands what says where its memory begins, and keeps none; what is called is written in C.
    return _descriptor(SimpleNamespace(data_ptr=address.__int__, dtype=dtype), *of)


def _parts(args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments of a launch; of one that is a tuple (a descriptor, or a tensor and its strides) what it has."""
    for arg in args:
        yield from arg if isinstance(arg, tuple) else (arg,)


def _for_triton(arg: Any) -> Any:
    return _descriptor(arg.tensor, arg.tensor.shape, arg.tensor.stride(), arg.block) if type(arg) is Descriptor else arg


class _Compiled(NamedTuple):
    """A compiled kernel, how it is called, and what tells whether it is still the one that Triton would take."""

    kernel: Any
    key: str  # in Triton's own cache
    run: Callable[..., None]
    before: tuple[Any, ...]  # what its launcher takes before the arguments, after the stream
    constants: tuple[Any, ...]  # what it takes after them, and does not look at
    globals: tuple[tuple[dict[str, Any], str, Any], ...]

    @staticmethod
    def of(jit: Any, compiled: Any, device: int, constants: tuple[Any, ...]) -> "_Compiled":
        key = next(key for key, value in jit.device_caches[device][0].items() if value is compiled)
        run, hooks = compiled.run, (None, None, None)  # no metadata for hooks, and none on entry and exit
        # Triton keeps copies of the values to compare with; whether the very object is still there is faster to ask.
        values = tuple((scope, name, scope.get(name)) for (name, _), (_, scope) in jit.used_global_vals.items())
        return _Compiled(compiled, key, run, (compiled.function, compiled.packed_metadata, *hooks), constants, values)

    def is_current(self, jit: Any, device: int) -> bool:
        current = jit.device_caches[device][0].get(self.key) is self.kernel
        for scope, name, value in self.globals:
            current = current and scope.get(name) is value
        return current


@functools.cache  # once
def _warn_of_slow_launches() -> None:
    warnings.warn(
        f"kernelbook: Triton {triton.__version__} keeps compiled kernels in a way that is not known here, so every launch goes "
        "through kernel[grid](...), which takes the host about twice as long",
        stacklevel=3,
    )


class Launch:
    """A kernel with its constants and options, to be launched many times: ``Launch(kernel, BLOCK=64)(grid, x, n)``.

    It launches what ``kernel[grid](*args, **constants)`` would, for half of the host's time or less: the compiled kernel is
    kept under what Triton specializes on (dtypes, alignment of pointers, integers that are 1, multiples of 16 or wide, the
    device; constants and options belong to this object). What was not seen before goes through Triton, which compiles it;
    so does every launch while a hook, recorder or debugger watches, in the interpreter, on other vendors' GPUs and with a
    Triton that was not tried.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``.
        constants: its ``constexpr`` parameters, which come last in its signature, and options such as ``num_warps``.
    """

    def __init__(self, kernel: Any, /, **constants: Any) -> None:
        self.kernel, self.constants = kernel, constants
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launch ``grid`` programs (one to three numbers) on the device of the tensors, on its current stream.

        Args:
            grid: numbers of programs.
            args: the kernel's first parameters: tensors, numbers, ``None``, :class:`Descriptor`, NamedTuples of a tensor and strides.
        """
        if not _CALLS_COMPILED or self.kernel.pre_run_hooks or _is_watched():
            self._by_triton(grid, args)
            return
        device = _current_device()
        key, values, tensor = self._key(device, args)
        found = self._compiled.get(key)
        if tensor.get_device() != device:
            self._by_triton(grid, args)
        elif found is None or not found.is_current(self.kernel, device):
            compiled = self._by_triton(grid, args)
            constants = tuple(self.constants.get(name) for name in self.kernel.arg_names[len(args) :])
            try:
                self._compiled[key] = _Compiled.of(self.kernel, compiled, device, constants)
            except (AttributeError, KeyError, StopIteration):
                _warn_of_slow_launches()
        else:
            stream, more = _current_stream(device), (1, 1, 1)[len(grid) :]
            found.run(*grid, *more, stream, *found.before, *values, *found.constants)

    @staticmethod
    def _key(device: int, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any], torch.Tensor]:
        """Return the key of a launch, with which Triton takes the same compiled kernel; what that is given; and a tensor of it."""
        key: list[Any] = [device]
        values: list[Any] = []
        tensor: Any = None
        described = False
        for arg in args:
            kind = type(arg)
            if kind is int:
                key.append(_integer_kind(arg))
                values.append(arg)
            elif arg is None:
                key.append(None)
                values.append(None)
            elif kind in PLAIN or isinstance(arg, torch.Tensor):
                tensor, address = arg, arg.data_ptr()
                key.append(arg.dtype)
                key.append(address % 16 == 0)
                values.append(address)
            elif kind is Descriptor:
                (tensor, block), described = arg, True
                dtype = tensor.dtype
                key.append(dtype)
                key.append(block)
                values.append(_kept_descriptor(tensor.data_ptr(), dtype, tensor.shape, tensor.stride(), block))
            elif isinstance(arg, tuple):
                tensor, strides = arg[0], arg[1:]
                address = tensor.data_ptr()
                key += (tensor.dtype, address % 16 == 0, _integer_kind(strides))
                values.append((address, *strides))
            elif kind is float or kind is bool:
                key.append(kind)
                values.append(arg)
            else:
                raise TypeError(f"Launch: no argument can be a {kind.__name__}, only tensors, tuples and numbers")
        if described:
            runtime.ensure_context(tensor.device)
        return tuple(key), values, tensor

    def _by_triton(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        """Return the compiled kernel, where there is one."""
        if runtime.INTERPRET:
            with interpreter.widened(map(_for_triton, args)) as wide:
                return self.kernel[grid](*wide, **self.constants)
        with runtime.on_device_of(next(part for part in _parts(args) if isinstance(part, torch.Tensor))):
            return self.kernel[grid](*map(_for_triton, args), **{**OPTIONS, **self.constants})


class AutotunedLaunch(Launch):
    """A launch with warps and stages that ``triton.autotune`` finds at the first call with sizes like these.

    Tile, grid and buffers are the plan's. Triton keeps what it finds in its own cache on disk, and leaves out what does not
    fit. While a graph is captured nothing can be timed: what is not known then is launched as the rule says.
    """

    def __init__(self, kernel: Any, /, **constants: Any) -> None:
        super().__init__(kernel, **constants)
        self._best: dict[tuple[Any, ...], Launch] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launch, as :class:`Launch` does."""
        parts = [*_parts(args)]
        first = next(part for part in parts if isinstance(part, torch.Tensor))
        # Sizes count as resources.bucket rounds them up, so that batches of nearly one size are searched for once.
        kinds = ((part - 1).bit_length() if type(part) is int else getattr(part, "dtype", type(part)) for part in parts)
        found = self._best.get(key := (first.device, *kinds))
        if found is None and not torch.cuda.is_current_stream_capturing():
            given = {k: v for k, v in self.constants.items() if k not in ("num_warps", "num_stages")}
            named = {**dict(zip(self.kernel.arg_names, args, strict=False)), **given}
            plain = [name for name, value in named.items() if isinstance(value, int | str)]  # what a file can hold
            tuner = triton.autotune(self.configs(), key=plain, cache_results=True)(self.kernel)
            with runtime.on_device_of(first):
                tuner[grid](*map(_for_triton, args), **{**OPTIONS, **given})
            found = self._best[key] = _launcher(self.kernel, **given, **tuner.best_config.all_kwargs())
        if found is None:
            super().__call__(grid, *args)
        else:
            found(grid, *args)

    def configs(self) -> list[triton.Config]:
        """Return what is tried: the rule's warps and stages first, then half and twice the warps, and a stage fewer and more."""
        warps, stages = self.constants.get("num_warps", 4), self.constants.get("num_stages", 3)
        pairs = [(w, s) for w in (warps, warps // 2, 2 * warps) for s in (stages, stages - 1, stages + 1)]
        # No more than 32 warps: a program has 1,024 threads at most.
        near = [(w, s) for w, s in pairs if 1 <= w <= 32 and s >= 1 and (s == stages or w >= warps)]
        return [triton.Config({}, num_warps=w, num_stages=s) for w, s in near]


def launcher(kernel: Any, /, *, repeatable: Any = False, **constants: Any) -> Launch:
    """Return the one :class:`Launch` of a kernel with these constants, so that plans that agree in them share what it keeps.

    Within ``runtime.same_bits`` no multiplication is fused with an addition: which ones are is the compiler's to say, and two
    kernels with the same lines would not round alike.

    Args:
        kernel, constants: as for :class:`Launch`.
        repeatable: the kernel writes the same however often it runs and, but for rounding, with whatever warps: it changes
            nothing that it reads, waits for no other program and has no PTX or Gluon layouts made for a number of warps.
            With ``KERNELBOOK_AUTOTUNE=1`` it is an :class:`AutotunedLaunch` then.
    """
    if runtime.in_same_bits():
        constants["enable_fp_fusion"] = False
    elif repeatable and runtime.autotune_enabled():
        return _autotuned_launcher(kernel, **constants)
    return _launcher(kernel, **constants)


_launcher = functools.lru_cache(maxsize=4096, typed=True)(Launch)
_autotuned_launcher = functools.lru_cache(maxsize=4096, typed=True)(AutotunedLaunch)
