"""The memory that a call takes: new tensors, the dtypes of sums, and counters that are zero."""

import functools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
import triton.language as tl

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # the classes of tensors that nobody has derived from
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_deterministic = torch._C._get_deterministic_algorithms
# What Inductor's programs allocate by, on a GPU; ``None`` has :func:`empty` ask ``torch.empty``.
_new: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if runtime.DEVICE.type == "cuda" else None


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """``torch.empty(shape, dtype=dtype, device=like.device)``, on a GPU for less than half of its host time."""
    if _is_plain(like):
        return _new(*_contiguous(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


def empty_again(forms: Sequence[Any], like: torch.Tensor) -> tuple[Any, ...] | None:
    """Return new tensors of these shapes, strides and dtypes where :func:`empty` is fast, with ``None`` in the place of ``None``."""
    return tuple([form and _new(*form) for form in forms]) if _is_plain(like) else None


def _is_plain(like: torch.Tensor) -> bool:
    """Return whether memory is new as it comes, on the GPU that is the current one."""
    return (
        _new is not None and type(like) in PLAIN and like.get_device() == _current_device()
        and not _deterministic()  # PyTorch may fill new memory then
        and not _dispatch_modes()
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides of a contiguous tensor, as tuples."""
    return tuple(shape), tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tl_accumulator(dtype: torch.dtype) -> tl.dtype:
    """:func:`accumulator` as a kernel's ``ACC`` takes it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


# --- counters -------------------------------------------------------------------------------------------------------

# Self-resetting semaphores, zero again after each launch: by device and stream, and (without a stream) for captured graphs.
_counters: dict[tuple[int, int | None], torch.Tensor] = {}
_counters_lock = threading.Lock()  # two threads may capture at once
COUNTERS, CAPTURED_COUNTERS = 2**12, 2**18


def counters(count: int, device: torch.device) -> torch.Tensor:
    """``count`` counters (int32), or more, which are zero and which no other stream uses: for kernels that leave them zero.

    A captured graph may run beside anything, so that each call in it gets counters of its own, of memory that was zeroed
    before; where there is none left, zeroing them becomes part of the graph.
    """
    if device.type != "cuda":  # on the GPU that a process only compiles for they would be there already
        made = torch.empty if runtime.COMPILE_ONLY else torch.zeros
        return made(count, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        with _counters_lock:
            spare = _counters.get((index, None))
            if spare is not None and spare.numel() >= count:
                after = -(-count // 4) * 4  # on 16 bytes, as the kernel has it that was compiled for a call outside
                found, _counters[index, None] = spare[:count], spare[after:]
                return found
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _counters or _counters[key].numel() < count:
        stream = torch.cuda.current_stream(device)
        _counters[key] = _kept_zeros(max(count, COUNTERS), stream)
        # No graph begins before these are zero: whoever captures waits for the device.
        if (index, None) not in _counters:
            _counters.setdefault((index, None), _kept_zeros(CAPTURED_COUNTERS, stream))
    return _counters[key]


def _kept_zeros(count: int, stream: torch.cuda.Stream) -> torch.Tensor:
    """``count`` zeros (int32) that outlive the call, made on ``stream`` by a thread of their own.

    This thread's memory may come from a pool: of ``torch.cuda.use_mem_pool``, or of the graphs that ``torch.compile`` makes
    with ``mode="reduce-overhead"``, which calls it an error where anything but outputs of graphs stays in there. Such
    contexts are of a thread, and so are PyTorch's modes.
    """

    def make() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(count, dtype=torch.int32, device=stream.device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
