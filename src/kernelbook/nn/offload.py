"""4-bit weights in pinned host memory: each layer's are copied to the GPU while the layer before computes.

The device holds the weights of two layers, whatever the number of layers. A second stream copies the next layer: upwards in
the forward pass, downwards in the backward pass, with activation checkpoints or without. In a captured step the copies are
nodes of the graph, and a graph that is replayed changes unseen what lies in the two places. So a pass begins with a copy of
its first layer, and once there is a graph, passes from Python copy every layer when they need it.
"""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kernelbook.nf4 import NF4Tensor
from kernelbook.nn.parameters import packed_parameter
from kernelbook.tensors import BRING_BACK

_stores: "weakref.WeakSet[_HostLayers]" = weakref.WeakSet()


def offload_layers(layers: Sequence[tuple[torch.nn.Module, Sequence[str]]], device: torch.device) -> None:
    """Move 4-bit parameters to pinned host memory, from where :func:`read_layer` brings a layer's to ``device``.

    ``state_dict`` gives their bytes as before. Conversions and moves of a module leave them on the host.

    Args:
        layers: the modules in the order in which they run, each with the names of its 4-bit parameters.
        device: where the kernels run.

    Raises:
        TypeError: a parameter is not in 4 bits.
        ValueError: a parameter is offloaded already, or layers have weights of different shapes.
    """
    found = [[packed_parameter(module, name) for name in names] for module, names in layers]
    shapes = [[[(part.shape, part.dtype) for part in _parts(stack).values()] for stack in layer] for layer in found]
    for (module, _), layer, shape in zip(layers, found, shapes, strict=True):
        if any(stack[0].host is not None for stack in layer):
            raise ValueError(
                f"offload_layers: weights of {type(module).__name__} must be on the device, they are offloaded"
            )
        if shape != shapes[0]:
            raise ValueError(
                f"offload_layers: all layers must have weights like the first one's {shapes[0]}, got {shape}: two places on "
                f"the device serve them all"
            )
    _HostLayers(found, device)


def read_layer(module: torch.nn.Module, names: Sequence[str]) -> list[NF4Tensor] | None:
    """Return a layer's weights on the device, and have its neighbour's copied; ``None`` where they are not offloaded.

    They are there until the layer after the next one is read. A backward pass has them copied again.
    """
    if any(device_of(module, name) is None for name in names):
        return None
    stacks: Any = module.parametrizations
    host = stacks[names[0]][0].host
    if torch.compiler.is_compiling():  # not at import: that brings the compiler, and a CUDA context with it
        return torch._dynamo.disable(host.read)(module)  # type: ignore[no-any-return]
    return host.read(module)  # type: ignore[no-any-return]


def device_of(module: torch.nn.Module, name: str) -> torch.device | None:
    """Return the device to which an offloaded weight is copied; ``None`` for one that stays where it is."""
    stacks: Any = getattr(module, "parametrizations", {})
    host = getattr(stacks[name][0], "host", None) if name in stacks else None
    return None if host is None else host.device


def join_copies() -> None:
    """Have the stream that is being captured wait for captured copies that no kernel waits for: a capture cannot end before."""
    for store in _stores:
        if store.stream is not None:
            with torch.cuda.stream(store.stream):
                captured = torch.cuda.is_current_stream_capturing()
            if captured:
                torch.cuda.current_stream(store.device).wait_stream(store.stream)


def _parts(stack: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that make up a 4-bit parameter, by their names in :class:`NF4Tensor`."""
    return {"packed": stack.original.detach(), **dict(stack[0].named_buffers(recurse=False))}


class _HostLayers:
    """The layers' weights on the host, and two places for them on the device."""

    def __init__(self, layers: list[list[Any]], device: torch.device) -> None:
        self.layers, self.device = layers, device
        for index, layer in enumerate(layers):
            for stack in layer:
                stack[0].host, stack[0].layer = self, index
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, weights=[])

    def _begin(self) -> None:
        """Pin the host's memory, which a copied or unpickled module has lost, and take that of the device."""
        for stack in (stack for layer in self.layers for stack in layer):
            stack.original.data = self._pinned(stack.original)
            for name, part in stack[0].named_buffers(recurse=False):
                stack[0]._buffers[name] = self._pinned(part)
        places = [
            [
                {name: torch.empty_like(part, device=self.device) for name, part in _parts(stack).items()}
                for stack in layer
            ]
            for layer in self.layers[:2]
        ]
        # Each layer's weights as kernels take them. Their parts are views of their place that know whose they are.
        self.weights = [
            [self._weight(index, stack, parts) for stack, parts in zip(layer, places[index % 2], strict=True)]
            for index, layer in enumerate(self.layers)
        ]
        self.last, self.held = -1, [-1, -1]  # the layer that was read last, and those in the two places
        self.is_captured = False
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.copied = [torch.cuda.Event(), torch.cuda.Event()] if self.stream is not None else []
        _stores.add(self)

    def _pinned(self, part: torch.Tensor) -> torch.Tensor:
        part = part.detach().to("cpu")
        return part.pin_memory() if self.device.type == "cuda" and not part.is_pinned() else part

    def _weight(self, index: int, stack: Any, place: dict[str, torch.Tensor]) -> NF4Tensor:
        parts: Any = {name: part.detach() for name, part in place.items()}
        for part in parts.values():
            setattr(part, BRING_BACK, functools.partial(self._bring_back, index))
        return dataclasses.replace(stack[0].tensor(stack.original), **parts)

    def read(self, module: Any) -> list[NF4Tensor]:
        """Return the weights of one of the modules, which are copied unless they are there already."""
        if not self.weights:
            self._begin()
        index = next(iter(module.parametrizations.values()))[0].layer
        self._read(index)
        return self.weights[index]

    def _read(self, index: int) -> None:
        capturing = self.stream is not None and torch.cuda.is_current_stream_capturing()
        self.is_captured = self.is_captured or capturing
        step, self.last = index - self.last, index
        if index == 0 or abs(step) != 1 or self.is_captured != capturing:
            self.held = [-1, -1]
        if abs(step) != 1:
            step = -1 if index == len(self.layers) - 1 else 1
        self._copy(index)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied[index % 2])
        if 0 <= index + step < len(self.layers) and self.is_captured == capturing:
            self._copy(index + step)

    def _bring_back(self, index: int) -> None:
        """Have a layer's weights be in their place for its backward pass, unless they were read last."""
        capturing = self.stream is not None and torch.cuda.is_current_stream_capturing()
        if self.last != index or self.is_captured != capturing:
            self._read(index)

    def _copy(self, index: int) -> None:
        """Have a layer copied into its place, unless it is there, behind all that was launched to read what is there now."""
        if self.held[index % 2] == index:
            return
        self.held[index % 2] = index
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            for weight, stack in zip(self.weights[index], self.layers[index], strict=True):
                for name, part in _parts(stack).items():
                    getattr(weight, name).copy_(part, non_blocking=True)
        if self.stream is not None:
            self.copied[index % 2].record(self.stream)
