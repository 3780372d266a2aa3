"""The resource model."""

import pytest
import triton

from kernelbook import operators, runtime
from kernelbook.lab.compiled import CompiledKernel, compile_calls, occupancy
from kernelbook.lab.resources import Resources, fits, matmul_resources, tensor_core

SMALL = triton.Config({"BLOCK": 64}, num_warps=4, num_stages=2)
H200 = runtime.TARGETS["sm_90"]


def test_shared_memory_and_many_warps_limit_too() -> None:
    assert not fits(Resources(H200.shared_memory_per_program + 1, 10), SMALL, H200)
    sixteen = triton.Config({}, num_warps=16)
    assert fits(Resources(0, 255), SMALL, H200) and not fits(Resources(0, 255.5), SMALL, H200)
    assert fits(Resources(0, 128), sixteen, H200) and not fits(Resources(0, 129), sixteen, H200)


# --- the model of a matrix product, against the compiler --------------------------------------------------------------

# sparse_linear's forward pass (pointers) and its dX (descriptors, and pointers that follow ids) with any configuration:
# loads, BLOCK_R, BLOCK_D, BLOCK_K, num_warps, num_stages.
SPREAD = [
    ("pointers", 16, 128, 64, 4, 4),
    ("pointers", 32, 64, 32, 4, 3),
    ("pointers", 16, 64, 32, 4, 1),
    ("pointers", 64, 64, 64, 4, 4),
    ("pointers", 64, 128, 64, 8, 3),
    ("pointers", 128, 64, 128, 4, 2),
    ("pointers", 128, 128, 32, 4, 4),
    ("pointers", 128, 128, 64, 8, 1),
    ("pointers", 128, 256, 16, 8, 1),  # the result's staging is larger than the loop's buffers
    ("pointers", 128, 256, 64, 8, 3),
    ("pointers", 128, 256, 32, 4, 2),  # spills
    ("unaligned", 64, 128, 64, 4, 3),  # spills
    ("dX", 128, 128, 64, 8, 3),
    ("descriptors", 64, 128, 64, 4, 4),
    ("descriptors", 128, 256, 64, 8, 4),
    ("descriptors", 128, 256, 64, 4, 3),  # spills
]
LAUNCH = """
from unittest import mock
import torch, triton
import kernelbook as kb
from kernelbook import operators
from kernelbook.lab import resources
from kernelbook.sparse_linear import kernels
ids = torch.arange(4)
for loads, r, d, k, warps, stages in SPREAD:
    blocks = {"BLOCK_R": r, "BLOCK_D": d, "BLOCK_K": k, "GROUP": 8}
    config = triton.Config(blocks, num_warps=warps, num_stages=stages)
    plan = kernels.Plan(config, 1, loads == "descriptors")
    d_in = 4095 if loads == "unaligned" else 4096
    x, w, dy = (torch.empty(s, dtype=torch.bfloat16) for s in ((64, d_in), (16384, d_in), (64, 16384)))
    operators.forget_plans()  # else the plan that was made with another tile is found
    with mock.patch.multiple(kernels, plan_forward=lambda *_: plan, plan_backward=lambda *_: plan):
        if loads in ("dX", "descriptors"):
            kb.sparse_dx(dy, w, ids)
        else:
            kb.sparse_forward(x, w, None, ids, compact=True)
"""


def _model(loads: str, r: int, d: int, k: int, warps: int, stages: int) -> Resources:
    return matmul_resources(
        triton.Config({}, num_warps=warps, num_stages=stages),
        rows=r,
        operands=[(r * k, 2), (d * k, 2)],
        accumulators=[(r * d, 4)],
        copy_bytes=2 if loads == "unaligned" else 16,
        descriptors=loads == "descriptors",
        properties=H200,
    )


@pytest.fixture(scope="module")
def reports() -> list[CompiledKernel]:
    found = compile_calls(f"SPREAD = {SPREAD!r}\n{LAUNCH}", ("sm_90",), asm=("ptx",))
    assert len(found) == len(SPREAD)
    return found


def test_the_model_agrees_with_the_compiler(reports: list[CompiledKernel]) -> None:
    errors = []
    for configuration, kernel in zip(SPREAD, reports, strict=True):
        _, r, _, _, warps, _ = configuration
        needs = _model(*configuration)
        assert (tensor_core(r, warps, H200) == "wgmma") == ("wgmma.mma_async" in kernel.asm["ptx"]), str(kernel)
        # The barriers of descriptors are a few bytes.
        assert 0 <= needs.shared_bytes - kernel.shared_bytes <= 64, (str(kernel), needs)
        assert (needs.registers_per_thread > 255) == (kernel.spill_bytes > 0), (str(kernel), needs)
        if not kernel.spill_bytes:
            errors.append(needs.registers_per_thread - kernel.registers)
    assert max(abs(error) for error in errors) <= 20, errors
    assert sum(abs(error) for error in errors) / len(errors) <= 10, errors


def test_the_older_tensor_cores_have_one_buffer_fewer() -> None:
    config = triton.Config({}, num_warps=4, num_stages=3)
    shared = {
        arch: matmul_resources(
            config,
            rows=64,
            operands=[(64 * 64, 2), (128 * 64, 2)],
            accumulators=[(64 * 128, 4)],
            properties=runtime.TARGETS[arch],
        ).shared_bytes
        for arch in ("sm_80", "sm_90", "sm_100")
    }
    assert shared == {"sm_80": 2 * 24576, "sm_90": 3 * 24576, "sm_100": 3 * 24576}  # as the compiler reports


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs", "limit"),
    (
        (32, 0, 4, 16, "registers"),  # 64 warps: the registers and the warps give out at the same time
        (24, 0, 4, 16, "warps"),
        (16, 0, 1, 32, "programs"),
        (128, 0, 4, 4, "registers"),
        (129, 0, 4, 3, "registers"),  # rounded up to 136
        (64, 100 * 1024, 4, 2, "shared memory"),
        (64, 113 * 1024, 4, 2, "shared memory"),
        (64, 114 * 1024, 4, 1, "shared memory"),  # 1 KiB of each program is the system's
        (187, 147_456, 8, 1, "registers"),
    ),
)
def test_occupancy(registers: int, shared: int, warps: int, programs: int, limit: str) -> None:
    found = occupancy(registers, shared, warps, H200)
    assert found.programs == programs and found.share == programs * warps / 64
    assert found.limit == limit


@pytest.mark.gpu
def test_occupancy_is_what_the_driver_says() -> None:
    import ctypes
    from unittest import mock

    import torch

    import kernelbook as kb
    from kernelbook.sparse_linear import kernels

    x, w = (torch.randn(n, 256, device=runtime.DEVICE, dtype=torch.bfloat16) for n in (64, 2048))
    ids = torch.arange(4, device=runtime.DEVICE)
    for loads, r, d, k, warps, stages in SPREAD:
        if loads == "pointers":
            blocks = {"BLOCK_R": r, "BLOCK_D": d, "BLOCK_K": k, "GROUP": 8}
            config = triton.Config(blocks, num_warps=warps, num_stages=stages)
            operators.forget_plans()
            with mock.patch.object(kernels, "plan_forward", lambda *_, c=config: kernels.Plan(c)):
                kb.sparse_forward(x, w, None, ids, compact=True)
    compiled = [
        kernel
        for cache in kernels._sparse_linear_fwd_tiles_kernel.device_caches.values()
        for kernel in cache[0].values()
    ]
    assert len(compiled) >= 8
    driver = ctypes.CDLL("libcuda.so.1")
    for kernel in compiled:
        warps, shared, said = kernel.metadata.num_warps, kernel.metadata.shared, ctypes.c_int()
        code = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(said), ctypes.c_void_p(kernel.function), 32 * warps, ctypes.c_size_t(shared)
        )
        assert code == 0
        assert occupancy(kernel.n_regs, shared, warps).programs == said.value, (kernel.n_regs, shared, warps)
