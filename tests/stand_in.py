"""Kernels of a GPU that is not there run on a newer one: their PTX is assembled for the GPU at hand, as its driver would do."""

import functools
from typing import NoReturn

import torch

from kernelbook import runtime


def stand_in_for(target: str) -> None:
    """From now on this process chooses plans and compiles kernels for ``target``, ``sm_75`` say, and runs them on a newer GPU.

    Rules see the other GPU's properties, its few multiprocessors among them, and a kernel that needs more shared memory than it has
    is refused. PyTorch sees the GPU that is there, but for its grouped product, which refuses a GPU before Ampere.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    wanted = runtime.TARGETS[target]
    major, minor = torch.cuda.get_device_capability()
    there, make_cubin, digest = 10 * major + minor, CUDABackend.make_cubin, CUDABackend.hash
    if not 0 < wanted.capability <= there:
        raise ValueError(f"--stand-in: {target} must be an older NVIDIA GPU than this one, sm_{there}")

    @functools.wraps(make_cubin)
    def assemble(self: object, src: str, metadata: object, opt: object, capability: int) -> bytes:
        return make_cubin(self, src, metadata, opt, there if capability == wanted.capability else capability)

    CUDABackend.make_cubin = assemble
    CUDABackend.hash = lambda self: f"{digest(self)}-on-{there}"  # part of the key of Triton's cache
    asked, fits = driver.active.utils.get_device_properties, wanted.shared_memory_per_program
    driver.active.utils.get_device_properties = lambda device: {**asked(device), "max_shared_mem": fits}
    driver.active.get_current_target = lambda: GPUTarget("cuda", wanted.capability, wanted.warp_size)
    runtime.compile_target = wanted
    if wanted.capability < 80:
        torch._grouped_mm = torch.nn.functional.grouped_mm = _refused


def _refused(*given: object, **named: object) -> NoReturn:
    raise RuntimeError("grouped_mm is only supported on CUDA devices with compute capability >= 8.0")
