"""A call as a CUDA graph: captured once, and replayed without the host's work between its kernels."""

from collections.abc import Callable
from typing import Any

import torch

from kernelbook import runtime

__all__ = ["Captured"]


class Captured:
    """A call without arguments as one CUDA graph. Calling it replays the graph and returns what the call returned.

    Each replay reads the tensors that the call read, and overwrites the tensors that it made: new inputs are copied into
    the old ones. What is captured must not wait for the device.

    Args:
        call: it is kept, since the graph reads what was made before it: inputs, and the states of an optimizer.
        warm: how often it runs beforehand, so that kernels are compiled and an optimizer's states made.

    Attributes:
        graph: the ``torch.cuda.CUDAGraph``.
        out: what the call returned while it was captured.

    Raises:
        RuntimeError: there is no GPU, or the call cannot be captured.
    """

    def __init__(self, call: Callable[[], Any], *, warm: int = 3) -> None:
        if runtime.DEVICE.type != "cuda":
            raise RuntimeError("Captured: call must run on a GPU, and there is none")
        self._call = call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL looks at its work from a thread of its own meanwhile.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.out = call()
        except Exception:
            # The generator would go on as if it were captured, and refuse to draw for anybody.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(torch.Generator(runtime.DEVICE).graphsafe_get_state())
            raise

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out
