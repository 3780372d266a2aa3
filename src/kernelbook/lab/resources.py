"""The resource model of "Choosing tiles": shared memory and registers of a program that multiplies matrices.

The rules beside the kernels are what such models and measurements have shown, in a few lines each.
"""

import dataclasses
from collections.abc import Sequence

import triton

from kernelbook import runtime

MAX_REGISTERS = 255  # per thread, on every NVIDIA GPU of the last ten years
# Registers that pointers, masks, loop counters and temporaries take beside the tiles: what the compiled kernels of this
# book show, rounded down so that a kernel that spills a few bytes is still tried.
BOOKKEEPING_REGISTERS = 70

# What matmul_resources counts beside the tiles. Fitted to what the compiler reports for sm_90 (Triton 3.6 and 3.7), over
# the configurations of tests/test_resources.py and of the chapter "Choosing tiles", which draws how far off they are.
LOOP_REGISTERS = {"wgmma": 20, "mma.sync": 28, "fma": 28}  # counters, masks, the pipeline's state
COPY_REGISTERS = 3  # a thread's load in each step: its 64-bit address, and its mask or its place in shared memory
PASSING_REGISTERS = 1  # 16 bytes of operands in a step: mma.sync takes them from registers, a few at a time
DESCRIPTOR_REGISTERS = 28  # the whole loop where tensor descriptors load: there are no addresses
STAGING_BYTES = 128  # a thread: at most so much shared memory turns the result around before it is stored
BARRIER_BYTES = 8  # a stage and operand, where tensor descriptors load


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a program needs: bytes of shared memory, and 32-bit registers in each thread."""

    shared_bytes: int
    registers_per_thread: float


def tensor_core(rows: int, num_warps: int, properties: runtime.DeviceProperties) -> str:
    """The instruction that ``tl.dot`` becomes: ``wgmma`` (operands read from shared memory), ``mma.sync`` or, before Ampere, ``fma``.

    Four warps together multiply at least 64 rows, on Hopper and later (where Blackwell's ``tcgen05`` takes its place).
    """
    if not properties.has_tensor_cores:
        return "fma"
    wgmma = properties.has_wgmma or properties.is_interpreter  # which has a Hopper GPU's limits
    return "wgmma" if wgmma and rows % 64 == 0 and num_warps % 4 == 0 else "mma.sync"


def matmul_resources(
    config: triton.Config,
    *,
    rows: int,
    operands: Sequence[tuple[int, int]],
    accumulators: Sequence[tuple[int, int]],
    out_itemsize: int = 2,
    copy_bytes: int = 16,
    descriptors: bool = False,
    properties: runtime.DeviceProperties | None = None,
) -> Resources:
    """The resource model of a loop over matrix products, as ``tl.dot(a, b, acc)`` on tiles that were just loaded.

    Args:
        config: its ``num_warps`` and ``num_stages`` enter.
        rows: of the result's tile; they decide between ``wgmma`` and ``mma.sync``.
        operands: (elements, bytes an element) of each tile that a step of the loop loads for a product.
        accumulators: (elements, bytes an element) of each tile that the loop adds to.
        out_itemsize: bytes an element of the result as it is stored.
        copy_bytes: how wide one thread's loads are: 16 where rows begin on multiples of 16 bytes; the element's size where
            the compiler cannot know.
        descriptors: whether tensor descriptors load the operands.
        properties: the GPU (default: the current one).

    Not counted: row and column indices that are carried through the loop, what a kernel computes besides, and the operands
    that a thread holds where there are no tensor cores.
    """
    properties = properties or runtime.properties()
    threads = properties.warp_size * config.num_warps
    core = tensor_core(rows, config.num_warps, properties)
    tiles = [elements * size for elements, size in operands]

    # mma.sync has its operands in registers when the next copy starts; wgmma
    # still reads shared memory then, which takes one buffer more.
    buffers = max(config.num_stages - (core == "mma.sync"), 1)
    staged = float(BARRIER_BYTES * config.num_stages * len(tiles) if descriptors else 0)
    passing = 0.0
    for size in tiles:
        # An asynchronous copy takes 4, 8 or 16 bytes. Narrower loads go
        # through registers, into a single buffer.
        wide = descriptors or min(copy_bytes, size // threads) >= 4
        ahead = wide and config.num_stages > 1 and core != "fma"  # no asynchronous copies before Ampere
        staged += size * (buffers if ahead else 1)
        passing += 0 if ahead else size / 4 / threads
    turned = sum(elements * out_itemsize for elements, _ in accumulators)
    shared = max(staged, min(turned, STAGING_BYTES * threads))

    kept = sum(n * size / 4 for n, size in accumulators) / threads
    if core == "mma.sync":
        passing += PASSING_REGISTERS * sum(tiles) / 16 / threads
    copies = sum(tiles) / copy_bytes / threads
    rest = DESCRIPTOR_REGISTERS if descriptors else LOOP_REGISTERS[core] + COPY_REGISTERS * copies + passing
    return Resources(int(shared), kept + rest)


def bucket(count: int) -> int:
    """``count`` rounded up to a power of two, at least 16.

    It stands in a key for a size that changes from batch to batch, so that
    batches of nearly one size share what was found for one of them.
    """
    return max(1 << max(count - 1, 0).bit_length(), 16)


def fits(needs: Resources, config: triton.Config, properties: runtime.DeviceProperties) -> bool:
    """Whether a program fits the GPU without spilling, as far as the model can tell."""
    threads = properties.warp_size * config.num_warps
    registers = min(MAX_REGISTERS, properties.registers_per_sm // threads)
    return needs.shared_bytes <= properties.shared_memory_per_program and needs.registers_per_thread <= registers
