"""Choosing a kernel's configuration: candidates, the resource model that prunes them, the cache on disk.

A room lists few candidates for a problem, best guess first. Those that cannot fit the GPU are dropped by a model of
shared memory and registers; if one is left it is taken as it is. If several are left they are timed once, within a
budget that keeps a first call short, and the winner is kept on disk. ``KERNELBOOK_AUTOTUNE`` says how far to go:

- ``default``: as described.
- ``off``: the first candidate that fits, never a measurement.
- ``full``: the room's whole search space, without a budget (minutes), and the winner is kept for later processes.

Under the interpreter, without a GPU and while a CUDA graph is captured nothing is timed.
"""

import dataclasses
import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelbook import runtime  # before Triton, which it sets up

# isort: split
import triton
from triton.runtime.errors import OutOfResources, PTXASError

__all__ = [
    "MAX_REGISTERS",
    "Autotuner",
    "Occupancy",
    "Resources",
    "bucket",
    "fits",
    "matmul_resources",
    "occupancy",
    "prune",
    "tensor_core",
    "tile_resources",
]

MAX_REGISTERS = 255  # per thread, on every NVIDIA GPU of the last ten years
BUDGET_S = 6.0  # for timing candidates in a first call; what has not been timed by then is not
# Registers that pointers, masks, loop counters and temporaries take beside the tiles: what the compiled kernels of this
# book show, rounded down so that a kernel that spills a few bytes is still tried.
BOOKKEEPING_REGISTERS = 70

# What matmul_resources counts beside the tiles. Fitted to what the compiler reports for sm_90 (Triton 3.6 and 3.7), over
# the configurations of tests/test_autotune.py and of the chapter "Choosing tiles", which draws how far off they are.
LOOP_REGISTERS = {"wgmma": 20, "mma.sync": 28}  # counters, masks, the pipeline's state
COPY_REGISTERS = (
    3  # a load that a thread does in each step: its 64-bit address, and its mask or its place in shared memory
)
PASSING_REGISTERS = 1  # 16 bytes of operands in a step: mma.sync takes them from registers, a few at a time
DESCRIPTOR_REGISTERS = 28  # the whole loop where tensor descriptors load: there are no addresses
STAGING_BYTES = 128  # a thread: at most so much shared memory turns the result around before it is stored
BARRIER_BYTES = 8  # a stage and operand, where tensor descriptors load

# How registers and shared memory are handed out, and how many programs run at a time at most: CUDA C++ Programming Guide,
# "Compute Capabilities", 8.0 to 10.0.
REGISTER_UNIT, WARP_UNIT = 256, 4  # registers a warp gets at a time; warps, one on each quarter of a multiprocessor
SHARED_UNIT, SHARED_RESERVED = 128, 1024  # bytes; the latter a program
MAX_PROGRAMS = 32  # on a multiprocessor


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a program needs: bytes of shared memory, and 32-bit registers in each thread."""

    shared_bytes: int
    registers_per_thread: float


def tile_resources(
    config: triton.Config,
    *,
    staged: Sequence[tuple[int, int]] = (),
    held: Sequence[tuple[int, int]] = (),
    scratch_bytes: int = 0,
    warp_size: int = 32,
) -> Resources:
    """The resource model.

    Args:
        config: its ``num_warps`` and ``num_stages`` enter.
        staged: (elements, bytes an element) of each tile that the software pipeline keeps in shared memory; there are
            ``num_stages`` copies of it.
        held: (elements, bytes an element) of each tile that lives in registers at the same time. It is spread over all
            threads of the program: elements / (32 x num_warps) in each, not elements / 32.
        scratch_bytes: shared memory beside the pipeline, for reductions and layout changes.
    """
    threads = warp_size * config.num_warps
    shared = sum(elements * size for elements, size in staged) * max(config.num_stages, 1) + scratch_bytes
    registers = sum(elements * size / 4 for elements, size in held) / threads
    return Resources(shared, BOOKKEEPING_REGISTERS + registers)


def tensor_core(rows: int, num_warps: int, properties: runtime.DeviceProperties) -> str:
    """The instruction that ``tl.dot`` becomes: ``wgmma`` (operands read from shared memory) or ``mma.sync``.

    Four warps together multiply at least 64 rows, on Hopper and later (where Blackwell's ``tcgen05`` takes its place).
    """
    hopper = properties.arch in ("sm_90", "sm_100", "interpreter")
    return "wgmma" if hopper and rows % 64 == 0 and num_warps % 4 == 0 else "mma.sync"


def matmul_resources(
    config: triton.Config,
    *,
    rows: int,
    operands: Sequence[tuple[int, int]],
    accumulators: Sequence[tuple[int, int]],
    held: Sequence[tuple[int, int]] = (),
    out_itemsize: int = 2,
    copy_bytes: int = 16,
    descriptors: bool | Sequence[bool] = False,
    scratch_bytes: int = 0,
    properties: runtime.DeviceProperties | None = None,
) -> Resources:
    """The resource model of a loop over matrix products, as ``tl.dot(a, b, acc)`` on tiles that were just loaded.

    Args:
        config: its ``num_warps`` and ``num_stages`` enter.
        rows: of the result's tile; they decide between ``wgmma`` and ``mma.sync``.
        operands: (elements, bytes an element) of each tile that a step of the loop loads for a product.
        accumulators: (elements, bytes an element) of each tile that the loop adds to.
        held: (elements, bytes an element) of each other tile that stays in registers through the loop.
        out_itemsize: bytes an element of the result as it is stored.
        copy_bytes: how wide one thread's loads are: 16 where rows begin on multiples of 16 bytes; the element's size where
            the compiler cannot know.
        descriptors: whether tensor descriptors load the operands; one for all, or one for each.
        scratch_bytes: shared memory beside the loop's buffers, for tiles of a product before or after it.
        properties: the GPU (default: the current one).

    Not counted: row and column indices that are carried through the loop, and what a kernel computes besides.
    """
    properties = properties or runtime.properties()
    threads = properties.warp_size * config.num_warps
    core = tensor_core(rows, config.num_warps, properties)
    tiles = [elements * size for elements, size in operands]
    boxes = [descriptors] * len(tiles) if isinstance(descriptors, bool) else descriptors

    # mma.sync has its operands in registers when the next copy starts; wgmma
    # still reads shared memory then, which takes one buffer more.
    buffers = max(config.num_stages - (core == "mma.sync"), 1)
    staged, passing, loaded = float(scratch_bytes), 0.0, 0
    for size, box in zip(tiles, boxes, strict=True):
        # An asynchronous copy takes 4, 8 or 16 bytes. Narrower loads go
        # through registers, into a single buffer.
        wide = box or min(copy_bytes, size // threads) >= 4
        ahead = wide and config.num_stages > 1
        staged += size * (buffers if ahead else 1)
        passing += 0 if ahead else size / 4 / threads
        staged += BARRIER_BYTES * config.num_stages if box else 0
        loaded += 0 if box else size  # by threads, each with an address
    turned = sum(elements * out_itemsize for elements, _ in accumulators)
    shared = max(staged, min(turned, STAGING_BYTES * threads))

    kept = sum(n * size / 4 for n, size in (*accumulators, *held)) / threads
    if core == "mma.sync":
        passing += PASSING_REGISTERS * sum(tiles) / 16 / threads
    copies = loaded / copy_bytes / threads
    rest = LOOP_REGISTERS[core] + COPY_REGISTERS * copies + passing
    if not loaded:
        rest = DESCRIPTOR_REGISTERS
    return Resources(int(shared), kept + rest)


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many programs a multiprocessor runs at a time, and what keeps it from running more.

    ``limit`` is ``registers``, ``shared memory``, ``warps`` or ``programs``; ``share`` is the part of the
    multiprocessor's warps that is in use.
    """

    programs: int
    share: float
    limit: str


def occupancy(
    registers: int, shared_bytes: int, num_warps: int, properties: runtime.DeviceProperties | None = None
) -> Occupancy:
    """The occupancy of a kernel on an NVIDIA GPU, from what the compiler reports.

    Args:
        registers: per thread. shared_bytes: per program. num_warps: per program.
        properties: the GPU (default: the current one).
    """
    p = properties or runtime.properties()
    per_warp = -(-registers * p.warp_size // REGISTER_UNIT) * REGISTER_UNIT
    per_program = -(-(shared_bytes + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    limits = {
        "registers": p.registers_per_sm // per_warp // WARP_UNIT * WARP_UNIT // num_warps,
        "shared memory": p.shared_memory_per_sm // per_program,
        "warps": p.max_threads_per_sm // (p.warp_size * num_warps),
        "programs": MAX_PROGRAMS,
    }
    limit = min(limits, key=limits.__getitem__)
    programs = limits[limit]
    return Occupancy(programs, programs * num_warps * p.warp_size / p.max_threads_per_sm, limit)


def bucket(count: int, *, lowest: int = 16) -> int:
    """``count`` rounded up to a power of two, at least ``lowest``.

    It stands in an :class:`Autotuner`'s key for a size that changes from
    batch to batch, so that batches of nearly one size share a configuration.
    """
    return max(triton.next_power_of_2(max(count, 1)), lowest)


def fits(needs: Resources, config: triton.Config, properties: runtime.DeviceProperties) -> bool:
    """Whether a program fits the GPU without spilling, as far as the model can tell."""
    threads = properties.warp_size * config.num_warps
    registers = min(MAX_REGISTERS, properties.registers_per_sm // threads)
    return needs.shared_bytes <= properties.shared_memory_per_program and needs.registers_per_thread <= registers


def prune(
    configs: Sequence[triton.Config],
    resources: Callable[[triton.Config], Resources],
    properties: runtime.DeviceProperties | None = None,
) -> list[triton.Config]:
    """The configurations that fit, in their order. Raises ``ValueError`` if none does."""
    properties = properties or runtime.properties()
    kept = [config for config in configs if fits(resources(config), config, properties)]
    if not kept:
        raise ValueError(f"prune: none of {len(configs)} configurations fits {properties.name}")
    return kept


def _as_json(config: triton.Config) -> dict[str, Any]:
    return {"tiles": config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _same(config: triton.Config, stored: Mapping[str, Any]) -> bool:
    return _as_json(config) == stored


class Autotuner:
    """Chooses a configuration for each problem key of one kernel.

    Args:
        name: names the file on disk, one for each kernel: ``sparse_linear_dw``.
        candidates: ``candidates(key, full)`` lists configurations for a problem, best guess first.
        resources: ``resources(config, key)`` is what a configuration needs, by :func:`tile_resources`.
        version: changes when the kernel does (a digest of its sources), so that old choices are forgotten.
    """

    def __init__(
        self,
        name: str,
        candidates: Callable[[Mapping[str, Any], bool], Sequence[triton.Config]],
        resources: Callable[[triton.Config, Mapping[str, Any]], Resources],
        version: str = "",
    ) -> None:
        self.name, self._candidates, self._resources, self._version = name, candidates, resources, version
        self._chosen: dict[tuple[str, str, str], triton.Config] = {}
        self._lock = threading.Lock()

    def fitting(self, key: Mapping[str, Any], *, full: bool = False) -> list[triton.Config]:
        """The candidates for ``key`` that fit the current GPU."""
        return prune(self._candidates(key, full), lambda config: self._resources(config, key))

    def path(self) -> Path:
        """The file that keeps the choices for the current GPU."""
        return runtime.cache_dir() / runtime.device_slug() / f"{self.name}.json"

    def choose(self, key: Mapping[str, Any], launch: Callable[[triton.Config], object]) -> triton.Config:
        """The configuration for ``key``.

        ``launch(config)`` runs the kernel on the caller's tensors. It may be called many times, so it must not
        accumulate into them.
        """
        mode = runtime.autotune_mode()
        text = json.dumps(dict(key), sort_keys=True)
        memo = (runtime.properties().arch, mode, text)
        if memo in self._chosen:
            return self._chosen[memo]
        candidates = self.fitting(key, full=mode == "full")
        can_time = runtime.DEVICE.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        if mode == "off" or len(candidates) == 1 or runtime.DEVICE.type != "cuda":
            config = candidates[0]
        else:
            stored = self._load().get(text)
            if stored is not None and (mode == "default" or stored["mode"] == "full"):
                known = self.fitting(key, full=stored["mode"] == "full")
                config = next((c for c in known if _same(c, stored["config"])), None)
                if config is not None:
                    self._chosen[memo] = config
                    return config
            if not can_time:
                return candidates[0]  # not remembered: a later call may time
            config, ms = self._fastest(candidates, launch, None if mode == "full" else BUDGET_S)
            self._store(text, {"config": _as_json(config), "mode": mode, "ms": round(ms, 6)})
        self._chosen[memo] = config
        return config

    def _fastest(
        self, candidates: Sequence[triton.Config], launch: Callable[[triton.Config], object], budget_s: float | None
    ) -> tuple[triton.Config, float]:
        from kernelbook.timing import measure

        started, best, best_ms = time.perf_counter(), None, float("inf")
        failure: Exception | None = None
        for config in candidates:
            if best is not None and budget_s is not None and time.perf_counter() - started > budget_s:
                break
            try:
                ms = measure(functools.partial(launch, config), warmup_ms=2, rep_ms=10, min_samples=5).ms
            except (OutOfResources, PTXASError) as error:  # the model was wrong about this one
                failure = error
                continue
            if ms < best_ms:
                best, best_ms = config, ms
        if best is None:
            raise RuntimeError(f"{self.name}: none of {len(candidates)} configurations runs here") from failure
        return best, best_ms

    def _load(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path().read_text())
            same = content["version"] == self._version and content["triton"] == triton.__version__
            return dict(content["choices"]) if same else {}
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or not one of ours
            return {}

    def _store(self, text: str, choice: Mapping[str, Any]) -> None:
        """Adds one choice; another process's choices are kept, and a reader never sees half a file."""
        with self._lock:
            choices = {**self._load(), text: dict(choice)}
            content = {"version": self._version, "triton": triton.__version__, "choices": choices}
            path = self.path()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
                    json.dump(content, file, indent=1)
                os.replace(file.name, path)
            except OSError:  # a read-only home: the choice then lives as long as the process
                return
