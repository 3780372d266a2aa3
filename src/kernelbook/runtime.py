"""GPU or interpreter? The only reader of the environment and the only maker of ``DEVICE``.

Importing this module decides how Triton kernels run in this process:

========================  ================================================================================
``TRITON_INTERPRET``      what happens
========================  ================================================================================
unset                     kernels are compiled if PyTorch sees a GPU that is not too old for Triton, and interpreted on
                          the CPU if not
``1``                     kernels are interpreted on the CPU, also where there is a GPU
``0``                     kernels are compiled; without a GPU they can be compiled but not launched
========================  ================================================================================

Triton reads that variable when it is imported. ``import kernelbook`` may come before or after that: where there is no GPU
and Triton was set up to compile, as it is where something else has imported it (``torch.compile``, transformers,
bitsandbytes), its own helpers are changed into interpreted ones. The other way around, and on a machine with a GPU, what
others have defined already could not follow: there importing this module raises.

Other variables, each read when it is needed:

- ``KERNELBOOK_DEBUG=1``: index tensors on the GPU are range-checked too, at the price of a synchronisation.
- ``KERNELBOOK_AUTOTUNE=1``: kernels that may run more than once are timed with other warps and stages than the rule's.
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.compiler import is_dynamo_compiling


def _has_gpu() -> bool:
    """``torch.cuda.is_available()``, without a CUDA context: a process that has one cannot fork workers that use CUDA.

    PyTorch then asks the driver's library for management (NVML), whose answer does not know whether the driver is recent
    enough. The first tensor on the GPU will tell.
    """
    with mock.patch.dict(os.environ, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


OLDEST = (7, 5)  # the compute capability from which on all kernels compile


def _newest_nvidia_gpu() -> tuple[tuple[int, int], str] | None:
    """Compute capability and name of this machine's newest NVIDIA GPU, by NVML; ``None`` where its driver cannot be asked."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count, found = ctypes.c_uint(), []
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            name = ctypes.create_string_buffer(96)
            if not (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
                or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
                or nvml.nvmlDeviceGetName(device, name, len(name))
            ):
                found.append(((major.value, minor.value), name.value.decode()))
    except (OSError, AttributeError):  # no driver of NVIDIA's, or one without these functions
        return None
    return max(found, default=None)


def _why_too_old() -> str:
    """Return in a sentence why Triton cannot use the GPU that PyTorch sees, and what to do; empty if it can, or there is none."""
    newest = _newest_nvidia_gpu() if torch.version.hip is None and _has_gpu() else None
    if newest is None or newest[0] >= OLDEST:
        return ""
    (major, minor), needed = newest[0], ".".join(map(str, OLDEST))
    return (
        f"this GPU ({newest[1]}, compute capability {major}.{minor}) is too old for Triton, which needs {needed} (Turing) or "
        "newer, so kernels run in the interpreter on the CPU, right but slow: keep tensors on the CPU, or take a newer GPU "
        "(on Colab a T4, an L4 or an A100)"
    )


TOO_OLD: str = _why_too_old()
if TOO_OLD:
    warnings.warn(f"kernelbook: {TOO_OLD}", stacklevel=2)
HAS_GPU: bool = _has_gpu() and not TOO_OLD


# The versions of Triton with which all kernels were compiled and run, as the page "Running the book" lists them. On others
# kernels are launched by Triton itself, and those in Gluon, which is experimental, are left out.
TRIED_TRITON = ("3.6", "3.7", "3.8", "3.9")


def _choose_mode(requested: str | None, has_gpu: bool) -> bool:
    """Return whether kernels are to be interpreted, from the value of ``TRITON_INTERPRET`` and the presence of a GPU."""
    if not requested:
        return not has_gpu
    wanted, words = requested.strip().lower(), ("1", "true", "yes", "on", "y")
    if wanted not in (*words, "0", "false", "no", "off", "n"):
        raise ValueError(f"kernelbook: TRITON_INTERPRET must be 0 or 1, got {requested!r}")
    return wanted in words


def _set_up_triton(interpret: bool) -> None:
    """Switch Triton's interpreter on or off before Triton is imported, or mend what was imported before."""
    # Triton reads the variable when it is imported, and anew for each kernel that is defined.
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    # Triton's own helpers (tl.sum and its like) took their form when Triton was imported; kernels that are
    # defined later have to take the same one.
    if interpret and not HAS_GPU and not isinstance(tl.sum, InterpretedFunction):
        _interpret_helpers()
    if isinstance(tl.sum, InterpretedFunction) != interpret:
        # With a GPU, kernels that others have defined are there to be compiled, with these helpers. And to go back to
        # compiling is impossible: a helper that was called by the interpreter leaves triton.language.core patched.
        wanted, value = ("the interpreter", 1) if interpret else ("compiled kernels", 0)
        raise ImportError(
            f"kernelbook needs {wanted} here (TRITON_INTERPRET asks for it, or there is a GPU), but Triton was imported "
            f"before kernelbook and is set up the other way. Import kernelbook before Triton (and before anything that "
            f"imports Triton), or start Python with TRITON_INTERPRET={value}."
        )


def _interpret_helpers() -> None:
    """Have the interpreter run Triton's own helpers, though Triton was imported to compile.

    Interpreted ones take their places in Triton's modules, where kernels and the other helpers look them up. Kernels of
    others stay as they are. Without a GPU they could not have been launched anyway.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted = functools.cache(InterpretedFunction)  # one each: the interpreter compares them
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "triton"]:
        for name, value in list(vars(module).items()):
            if type(value) is JITFunction:
                setattr(module, name, interpreted(value.fn))
    for name, value in list(vars(tl.tensor).items()):
        if type(value) is JITFunction:  # the compiler binds such a method by itself, Python only what is made for it
            setattr(tl.tensor, name, functools.partialmethod(interpreted(value.fn)))


INTERPRET: bool = _choose_mode(os.environ.get("TRITON_INTERPRET"), HAS_GPU)
_set_up_triton(INTERPRET)


def _is_tried(version: str) -> bool:
    """Return whether this version of Triton was tried; warn where it was not and kernels are compiled."""
    if ".".join(version.split(".")[:2]) in TRIED_TRITON:
        return True
    if not INTERPRET:
        warnings.warn(
            f"kernelbook: Triton {version} was not tried with this version of kernelbook, Triton "
            f"{', '.join(TRIED_TRITON)} were: kernels take plain ways, which can be slower. Should one fail, install "
            f"'triton=={TRIED_TRITON[-1]}.*'",
            stacklevel=2,
        )
    return False


TRITON_IS_TRIED: bool = _is_tried(sys.modules["triton"].__version__)
COMPILE_ONLY: bool = not INTERPRET and not HAS_GPU
DEVICE: torch.device = torch.device("cuda" if HAS_GPU and not INTERPRET else "cpu")


@dataclasses.dataclass(frozen=True, eq=False)  # one object a device: as a key of caches it costs no hash of its fields
class DeviceProperties:
    """Properties of a GPU that launches depend on. Sizes are in bytes; registers are 32-bit."""

    name: str
    arch: str
    num_sms: int
    shared_memory_per_program: int
    shared_memory_per_sm: int
    registers_per_sm: int
    max_threads_per_sm: int
    l2_bytes: int
    warp_size: int = 32
    same_bits: bool = False  # what a rule chooses may depend on no number of rows, of tokens or of keys

    @property
    def capability(self) -> int:
        """Return an NVIDIA GPU's compute capability, 90 for 9.0; 0 of others and of the interpreter."""
        return int(self.arch[3:].rstrip("a")) if self.arch.startswith("sm_") else 0

    @property
    def is_nvidia(self) -> bool:
        return self.capability > 0

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def is_hopper(self) -> bool:
        return self.capability == 90

    @property
    def is_interpreter(self) -> bool:
        return self.arch == "interpreter"

    @property
    def has_tensor_cores(self) -> bool:
        """Return whether ``tl.dot`` becomes instructions of tensor cores.

        Triton knows those of Ampere and later, and multiplies on Turing as if it had none; cuBLAS uses Turing's too.
        """
        return not self.is_nvidia or self.capability >= 80

    @property
    def has_wgmma(self) -> bool:
        """Return whether tensor cores read both operands from shared memory; elsewhere they take registers that large tiles need.

        So do Blackwell's ``tcgen05``, but not the tensor cores of GeForce's Blackwell (sm_120).
        """
        return self.capability in (90, 100, 103)

    @property
    def has_pdl(self) -> bool:
        """Return whether a kernel can start before the last one has ended (programmatic dependent launch): Hopper and later."""
        return self.capability >= 90

    @property
    def has_tma(self) -> bool:
        """Return whether tiles can be copied by tensor descriptor: on Hopper and later, and in the interpreter."""
        return self.capability >= 90 or self.is_interpreter

    @property
    def prefers_tma(self) -> bool:
        """Return whether the large tiles that tensor descriptors are for pay: on Hopper and later, and in the interpreter.

        GeForce's Blackwell (sm_120) has descriptors too, but multiplies from registers and has less than half the shared
        memory: there such tiles spill or do not fit.
        """
        return self.has_wgmma or self.is_interpreter


# The GPUs that kernels are compiled for where there is none, from the vendors' data sheets.
TARGETS: dict[str, DeviceProperties] = {
    "sm_75": DeviceProperties("Tesla T4", "sm_75", 40, 65_536, 65_536, 65_536, 1024, 4 * 2**20),
    "sm_80": DeviceProperties("NVIDIA A100", "sm_80", 108, 166_912, 167_936, 65_536, 2048, 40 * 2**20),
    "sm_86": DeviceProperties("NVIDIA GeForce RTX 3090", "sm_86", 82, 101_376, 102_400, 65_536, 1536, 6 * 2**20),
    "sm_89": DeviceProperties("NVIDIA GeForce RTX 4090", "sm_89", 128, 101_376, 102_400, 65_536, 1536, 72 * 2**20),
    "sm_90": DeviceProperties("NVIDIA H200", "sm_90", 132, 232_448, 233_472, 65_536, 2048, 50 * 2**20),
    "sm_100": DeviceProperties("NVIDIA B200", "sm_100", 148, 232_448, 233_472, 65_536, 2048, 126 * 2**20),
    "sm_103": DeviceProperties("NVIDIA B300", "sm_103", 148, 232_448, 233_472, 65_536, 2048, 126 * 2**20),
    "sm_120": DeviceProperties("NVIDIA GeForce RTX 5090", "sm_120", 170, 101_376, 102_400, 65_536, 1536, 96 * 2**20),
    "sm_121": DeviceProperties("NVIDIA GB10", "sm_121", 48, 101_376, 102_400, 65_536, 1536, 24 * 2**20),
    "gfx942": DeviceProperties("AMD MI300X", "gfx942", 304, 65_536, 65_536, 131_072, 2048, 4 * 2**20, 64),
    "gfx1201": DeviceProperties("AMD Radeon RX 9070 XT", "gfx1201", 64, 65_536, 65_536, 98_304, 1024, 8 * 2**20),
}

# Few multiprocessors, so that persistent kernels loop in the interpreter too; an H200's limits on the rest.
_INTERPRETER = dataclasses.replace(TARGETS["sm_90"], name="Triton interpreter", arch="interpreter", num_sms=2)

# --- the same bits --------------------------------------------------------------------------------------------------

_same_bits: contextvars.ContextVar[bool] = contextvars.ContextVar("kernelbook.same_bits", default=False)


@contextlib.contextmanager
def same_bits(enabled: bool = True) -> Iterator[None]:
    """Within the context what a row becomes depends on that row and the weights, and on nothing that stands beside it.

    Not on how many rows there are, on their order, packing, padding, the chunk in which a prompt is read, the page size, or
    over how many programs keys are split: log-probabilities of a training batch and of generation agree bit by bit. Each
    function takes one order of its sums, whatever the number of rows, and one tile shape; only Hopper's products of 16 bits
    have several, whose width changes no bit. Nothing is autotuned, and no kernel fuses a multiplication with an addition. That
    costs time. Weights and their dtype, the GPU and the versions of PyTorch and Triton have to be the same.

    Experimental: its tests pass on an H200; ``pytest -m gpu tests/test_same_bits.py`` tries it on your GPU.

    A backward pass is in the mode of its forward pass, wherever it runs. In it the gradients of rows depend on their own
    sequence alone; those of weights add up over the batch, and are the same bits run after run for the same batch.

    The mode belongs to this thread and this asynchronous task: a thread that is started within begins without it, a task with it.
    It is a decorator too, but not of a coroutine or a generator, whose body runs when the call has returned. ``torch.compile`` is
    refused in it: the compiler cuts its own sums by their sizes. What PyTorch computes itself is as PyTorch does it: for linear
    layers there is :func:`kernelbook.nn.linear`, and ``swap(model, same_bits=True)`` puts it there.

    Args:
        enabled: ``False`` leaves the mode within a context that is in it.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"same_bits: enabled must be a bool, got {type(enabled).__name__}")
    token = _same_bits.set(enabled)
    try:
        yield
    finally:
        _same_bits.reset(token)


def in_same_bits() -> bool:
    """Return whether :func:`same_bits` holds; not for Dynamo, which cannot read it: operators refuse to be compiled in it."""
    return not is_dynamo_compiling() and _same_bits.get()


@functools.cache
def _with_same_bits(found: DeviceProperties) -> DeviceProperties:
    return dataclasses.replace(found, same_bits=True)


# --- properties -----------------------------------------------------------------------------------------------------

compile_target: DeviceProperties | None = None  # what kernels are compiled for while nothing is launched


@contextlib.contextmanager
def compiling_for(target: str | DeviceProperties) -> Iterator[DeviceProperties]:
    """Within the context :func:`properties` describes ``target``: a key of :data:`TARGETS`, or a GPU's own properties."""
    global compile_target
    if isinstance(target, str) and target not in TARGETS:
        raise ValueError(f"compiling_for: target must be one of {', '.join(TARGETS)}, got {target!r}")
    before, compile_target = compile_target, TARGETS[target] if isinstance(target, str) else target
    try:
        yield compile_target
    finally:
        compile_target = before


@functools.cache
def _gpu_properties(index: int) -> DeviceProperties:
    p = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    per_program = getattr(p, "shared_memory_per_block_optin", 0) or getattr(p, "shared_memory_per_block", 65_536)
    return DeviceProperties(
        name=p.name,
        arch=p.gcnArchName.split(":")[0] if hip else f"sm_{p.major}{p.minor}",
        num_sms=p.multi_processor_count,
        shared_memory_per_program=per_program,
        shared_memory_per_sm=getattr(p, "shared_memory_per_multiprocessor", per_program),
        registers_per_sm=getattr(p, "regs_per_multiprocessor", 65_536),
        max_threads_per_sm=p.max_threads_per_multi_processor,
        l2_bytes=p.L2_cache_size,
        warp_size=p.warp_size,
    )


def properties(device: torch.device | None = None) -> DeviceProperties:
    """Return the properties of ``device`` (default: the current GPU), of the interpreter, or of the compilation target.

    Within :func:`same_bits` they say so, by which every rule knows.
    """
    if compile_target is not None:
        found = compile_target
    elif DEVICE.type != "cuda":
        found = TARGETS["sm_90"] if COMPILE_ONLY else _INTERPRETER
    else:
        index = device.index if device is not None else None
        found = _gpu_properties(torch.cuda.current_device() if index is None else index)
    return _with_same_bits(found) if in_same_bits() else found


_of_thread = threading.local()


def ensure_context(device: torch.device) -> None:
    """Give this thread a CUDA context on ``device``.

    A thread's first kernel may be ours: in the one in which PyTorch runs backward passes, say. It has no CUDA context then,
    and Triton makes no tensor descriptor without one. Whatever PyTorch itself launches brings the context along.
    """
    ready: set[torch.device] = _of_thread.__dict__.setdefault("ready", set())
    if device not in ready:
        torch.zeros(1, device=device)
        ready.add(device)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the GPU that holds ``tensor`` the current one: Triton launches on the current device."""
    if tensor.is_cuda:
        ensure_context(tensor.device)
    return torch.cuda.device_of(tensor)


def debug_enabled() -> bool:
    """Return whether ``KERNELBOOK_DEBUG=1`` asks for the checks that cost a synchronisation."""
    # Each call with ids asks, and ``os.environ`` itself takes half a microsecond to say that a variable is not there.
    # What it holds are bytes, on Windows strings; a test may put a plain dictionary in its place.
    held: Any = getattr(os.environ, "_data", os.environ)
    return bool(held.get(b"KERNELBOOK_DEBUG") == b"1" or held.get("KERNELBOOK_DEBUG") == "1")


def autotune_enabled() -> bool:
    """Return whether ``KERNELBOOK_AUTOTUNE=1`` asks for warps and stages to be searched for, and a GPU can time kernels."""
    return os.environ.get("KERNELBOOK_AUTOTUNE", "") == "1" and DEVICE.type == "cuda"


def given_commit() -> str:
    """The commit of these sources by ``KERNELBOOK_COMMIT``, for a machine that has them without their repository."""
    return os.environ.get("KERNELBOOK_COMMIT", "")
