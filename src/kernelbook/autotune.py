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

__all__ = ["MAX_REGISTERS", "Autotuner", "Resources", "fits", "prune", "tile_resources"]

MAX_REGISTERS = 255  # per thread, on every NVIDIA GPU of the last ten years
BUDGET_S = 6.0  # for timing candidates in a first call; what has not been timed by then is not
# Registers that pointers, masks, loop counters and temporaries take beside the tiles: what the compiled kernels of this
# book show, rounded down so that a kernel that spills a few bytes is still tried.
BOOKKEEPING_REGISTERS = 70


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
