"""CUDA graphs on the CPU, for tests: a call's operators are recorded, with nothing computed, and a replay runs them again.

Like a graph, a replay reads and writes the tensors of the recorded call, and nothing that Python decides happens again.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from kernelbook import runtime
from kernelbook.train import capture

WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.undo: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError(f"{func} waits for the device")
        for i, argument in enumerate(func._schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = given if isinstance(given, list | tuple) else [given]
                self.undo += [(t, t.detach().clone()) for t in written if isinstance(t, torch.Tensor)]
        out = func(*args, **kwargs)
        self.operators.append((func, args, kwargs, out))
        return out


class Graph:
    def __init__(self, operators: list[tuple[Any, Any, Any, Any]]) -> None:
        self.operators = operators

    def replay(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, out in self.operators:
                again = func(*args, **kwargs)
                pairs = zip(*(x if isinstance(x, list | tuple) else (x,) for x in (out, again)), strict=True)
                returns = func._schema.returns
                for i, (old, new) in enumerate(pairs):
                    fresh = returns[min(i, len(returns) - 1)].alias_info is None if returns else False
                    if fresh and isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)


def _captured(call: Callable[[], Any], stream: Any, pool: Any) -> tuple[Graph, Any]:
    mode = Recording()
    try:
        with mode:
            out = call()
    except Exception as error:
        raise RuntimeError(f"{capture._line_of(error)}: {error}") from error
    finally:
        with torch.no_grad():
            for tensor, value in reversed(mode.undo):
                tensor.copy_(value)
    return Graph(mode.operators), out


def _is_recording() -> bool:
    return any(isinstance(mode, Recording) for mode in _get_current_dispatch_mode_stack())


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on in a test steps are captured on the CPU; where there is a GPU, there as ever."""
    if runtime.DEVICE.type == "cuda":
        return
    for name, other in {
        "_why_not": lambda device: None,
        "drawn": lambda: 0,
        "_run_on": lambda stream, call: call(),
        "_capture": _captured,
    }.items():
        monkeypatch.setattr(capture, name, other)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", _is_recording)  # models ask
