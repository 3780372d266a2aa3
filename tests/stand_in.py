"""Kernels of a GPU that is not there run on a newer one: their PTX is assembled for the GPU at hand, as its driver would do."""

import functools

import torch

from kernelbook import runtime


def stand_in_for(target: str) -> None:
    """From now on this process chooses plans and compiles kernels for ``target``, ``sm_75`` say, and runs them on a newer GPU.

    Rules see the other GPU's properties, its few multiprocessors among them; PyTorch sees the GPU that is there.
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
    driver.active.get_current_target = lambda: GPUTarget("cuda", wanted.capability, wanted.warp_size)
    runtime.compile_target = wanted
