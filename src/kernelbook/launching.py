"""How the rooms launch kernels and declare operators: one launcher, one declaration, and what launches have in common."""

import contextlib
import functools
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kernelbook import autotune, runtime  # before Triton, which it sets up
from kernelbook.autotune import derived

# isort: split
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "NAMESPACE",
    "Box",
    "Launch",
    "Launched",
    "accumulator",
    "again",
    "allows_tf32",
    "box",
    "box_form",
    "cdiv",
    "empty",
    "has_aligned_rows",
    "in_kernel_dtype",
    "is_aligned",
    "is_observed",
    "is_transformed",
    "kind_of_call",
    "matrix",
    "operator",
    "precision",
    "remember",
    "reshaped",
    "strided",
    "tickets",
    "tl_accumulator",
    "without_autocast",
]


def cdiv(a: int, b: int) -> int:
    """``triton.cdiv``, without the wrapper that lets kernels call it too: the host's time counts for small problems."""
    return -(-a // b)


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled


def is_transformed() -> bool:
    """Whether a call is compiled or one of ``torch.func``'s transforms or forward-mode differentiation is at work."""
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0 or _transform() is not None


def is_observed() -> bool:
    """Whether PyTorch's dispatcher has something to add to a call: a compiler, a mode, a transform, a trace, a profiler."""
    return (
        torch.compiler.is_compiling() or _dispatch_modes() > 0 or _function_modes() > 0 or _profiling()
        or _trace() is not None or forward_ad._current_level >= 0 or _transform() is not None
    )  # fmt: skip


# --- one launcher ---------------------------------------------------------------------------------------------------


class _IntegerKinds(dict[int, int]):
    """What Triton specializes an integer argument on: whether it is 1, a multiple of 16, and the type that holds it."""

    def __missing__(self, value: int) -> int:
        if len(self) >= 2**16:
            self.clear()
        wide = 0 if -(2**31) <= value < 2**31 else 1 if value < 2**63 else 2
        kind = self[value] = (value == 1) + 2 * (value % 16 == 0) + 4 * wide
        return kind


class BoxForm:
    """How a tensor descriptor reads a tensor: the sides of its boxes and, for Gluon, their layout in shared memory."""

    __slots__ = ("layout", "sides")

    def __init__(self, sides: tuple[int, ...], layout: Any) -> None:
        self.sides, self.layout = sides, layout

    def __call__(self, tensor: torch.Tensor) -> "Box":
        return Box(tensor, self)


class Box:
    """A tensor that a kernel reads or writes through a tensor descriptor; made by :func:`box`."""

    __slots__ = ("form", "tensor")

    def __init__(self, tensor: torch.Tensor, form: BoxForm) -> None:
        self.tensor, self.form = tensor, form

    def descriptor(self) -> Any:
        """The descriptor as Triton (without a layout) or Gluon (with one) knows it."""
        shape, strides, sides = list(self.tensor.shape), list(self.tensor.stride()), list(self.form.sides)
        if self.form.layout is None:
            return TensorDescriptor(self.tensor, shape, strides, sides)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(self.tensor, shape, strides, sides, self.form.layout)


@functools.cache
def box_form(*sides: int, layout: Any = None) -> BoxForm:
    """The one :class:`BoxForm` of these sides and this layout; a plan keeps it, since to look it up costs a hash."""
    return BoxForm(sides, layout)


def box(tensor: torch.Tensor, *sides: int) -> Box:
    """``tensor``, read in boxes of this shape through a tensor descriptor."""
    return Box(tensor, box_form(*sides))


class _Handle:
    """A compiled kernel as its C launcher takes it, and what tells whether it is still the one that Triton would take."""

    __slots__ = ("before", "boxes", "compiled", "constants", "function", "globals", "key", "launch", "maps", "tail")

    def __init__(self, kernel: Any, compiled: Any, device: int, tail: tuple[Any, ...]) -> None:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise NotImplementedError("kernels with scratch memory are left to Triton")
        self.compiled, self.function, self.tail = compiled, compiled.function, tail
        self.key = next(key for key, value in kernel.device_caches[device][0].items() if value is compiled)
        # Triton keeps copies of the values to compare with; whether the very object is still there is faster to ask.
        self.globals = tuple(
            (scope, name, scope.get(name)) for (name, _), (_, scope) in kernel.used_global_vals.items()
        )
        self.boxes = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self.maps: dict[Any, list[Any]] = {}
        launch = launcher.launch
        if inspect.isfunction(launch):  # Triton's own, which makes the descriptors anew for each launch
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        self.launch = launch
        grid_and_early_start: tuple[Any, ...] = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        self.before: tuple[Any, ...]
        if _TRITON == (3, 6):
            self.before = (*grid_and_early_start, None, None, compiled.packed_metadata, None, None, None)
        else:
            self.before = (
                *grid_and_early_start, compiled.packed_metadata, None, None, None, None, None,
                launcher.arg_annotations, launcher.kernel_signature,
            )  # fmt: skip

    def expanded(self, index: int, box: Box, address: int) -> list[Any]:
        """What the C launcher takes for a descriptor: the map of the tensor, its shape and its strides."""
        key = (index, address, box.tensor.shape, box.tensor.stride())
        found = self.maps.get(key)
        if found is None:
            if len(self.maps) >= 4096:
                self.maps.clear()
            from triton.backends.nvidia.driver import make_tensordesc_arg

            runtime.ensure_context(box.tensor.device)
            meta = self.boxes[index] if self.boxes else None
            found = self.maps[key] = make_tensordesc_arg(box.descriptor(), meta)
        return found


_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
_RUN = JITFunction.run


class _OfThread(threading.local):
    tracing: Any = False  # True: a graph is being made of the kernels that are launched; or the _Recording of a call


_of_thread = _OfThread()

# Whether compiled kernels can be launched by their handles: on NVIDIA's GPUs, by a Triton whose launcher is known.
_HAS_HANDLES = not runtime.INTERPRET and runtime.HAS_GPU and torch.version.hip is None and _TRITON in ((3, 6), (3, 7))


def _is_watched() -> bool:
    """Whether something in Triton wants to see, change or replace launches: hooks, profilers, recorders, debugging."""
    watching = triton.knobs.runtime
    return bool(
        JITFunction.run is not _RUN
        or getattr(watching.launch_enter_hook, "calls", watching.launch_enter_hook)
        or getattr(watching.launch_exit_hook, "calls", watching.launch_exit_hook)
        or watching.add_stages_inspection_hook is not None
        or watching.debug
        or triton.knobs.compilation.__dict__.get("instrumentation_mode")
    )


class Launch:
    """A kernel with its constants and options, to be launched many times: ``Launch(kernel, BLOCK=64)(grid, x, n)``.

    It launches what ``kernel[grid](*args, **constants)`` would, for a third of the host's time: a compiled kernel is found
    by what Triton specializes on (dtypes, alignment of pointers, integers that are 1, multiples of 16 or wide, the device;
    constants and options belong to this object) and its C launcher is called with plain addresses. What was not seen
    before goes through Triton, which compiles it; so does every launch while something watches (see above), in the
    interpreter, on other vendors' GPUs and with a Triton whose launcher is not known here. While a graph is traced
    (:func:`operator` with ``visible``), the kernel goes into the graph.

    Make it where a plan is made, and keep it (``functools.lru_cache``): what it has learned is in it.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``.
        constants: its ``constexpr`` parameters, which come last in its signature, and options such as ``num_warps``.
    """

    def __init__(self, kernel: Any, /, **constants: Any) -> None:
        parameters = getattr(kernel, "params", ())  # the interpreter's functions don't tell
        wrong = [p.name for p in parameters if p.name in constants and not p.is_constexpr]
        if wrong:
            raise TypeError(
                f"Launch: constants of {kernel.__name__} must be constexpr parameters, got {', '.join(wrong)}"
            )
        self.kernel, self.constants = kernel, constants
        self._variants: dict[tuple[type, ...], tuple[Callable[..., bool], dict[Any, _Handle]]] = {}

    def __repr__(self) -> str:
        return f"Launch({self.kernel.__name__}, {self.constants})"

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launches ``grid`` programs (one to three numbers) on the device of the first tensor, on its current stream.

        Args:
            grid: numbers of programs.
            args: the kernel's first parameters, in order: tensors, numbers, ``None``, and what :func:`box` returns.
        """
        if not _HAS_HANDLES or _of_thread.tracing or self.kernel.pre_run_hooks or _is_watched():
            self._by_triton(grid, args)
            return
        types = tuple(map(type, args))
        variant = self._variants.get(types)
        if variant is None:
            handles: dict[Any, _Handle] = {}
            variant = self._variants[types] = _variant(types, self.kernel, handles), handles
        if not variant[0](grid, args):
            self._learn(grid, args, variant[1])

    def _by_triton(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        """-> the compiled kernel, where there is one."""
        if isinstance(_of_thread.tracing, _Recording):
            return _of_thread.tracing.launch(self, grid, args)
        if _of_thread.tracing:
            return torch.library.wrap_triton(self.kernel)[grid](*args, **self.constants)
        args = tuple(arg.descriptor() if type(arg) is Box else arg for arg in args)
        if runtime.INTERPRET:
            return self.kernel[grid](*args, **self.constants)
        with runtime.on_device_of(_first_tensor(args)):
            return self.kernel[grid](*args, **self.constants)

    def _learn(self, grid: tuple[int, ...], args: tuple[Any, ...], handles: dict[Any, _Handle]) -> None:
        compiled = self._by_triton(grid, args)
        device = _first_tensor(args).get_device()
        tail = tuple(self.constants.get(name) for name in self.kernel.arg_names[len(args) :])
        try:
            handle = _Handle(self.kernel, compiled, device, tail)
        except (AttributeError, KeyError, NotImplementedError, StopIteration):
            return  # not a kernel that is known here: its next launch comes this way again
        if len(handles) >= 4096:
            handles.clear()
        handles[_key(args, device)] = handle

    def settled(
        self, grid: tuple[int, ...], args: tuple[Any, ...], given: tuple[torch.Tensor, ...]
    ) -> Callable[..., bool] | None:
        """``launch(*tensors)``, for ``self(grid, *args)`` with other tensors in the places of those ``given``.

        For calls that cost the host more than the device: make it after such a call, and numbers are looked at no more. The
        tensors have to have the dtypes, shapes, strides and device of those given. It returns whether it has launched: not
        where a tensor does not begin on 16 bytes, something watches, or the kernel is another by now. ``None``: nobody
        can, as this launch did not go through a handle either.
        """
        variant, device = self._variants.get(tuple(map(type, args))), given[0].get_device()
        handle = variant[1].get(_key(args, device)) if variant and _HAS_HANDLES else None
        if handle is None or any(tensor.data_ptr() % 16 for tensor in given):
            return None
        return _settled(self.kernel, handle, grid, args, given, device)


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor:
    for arg in args:
        tensor = getattr(arg, "tensor", getattr(arg, "base", arg))
        if isinstance(tensor, torch.Tensor):
            return tensor
    raise TypeError("a launch needs a tensor among its arguments")


_kinds = _IntegerKinds()


def _key(args: tuple[Any, ...], device: int) -> tuple[Any, ...]:
    """The key of a launch: with the same key (and the same types) Triton takes the same compiled kernel."""
    pointers = [arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, torch.Tensor)]
    key: list[Any] = [device, all(pointers) or tuple(pointers)]
    for arg in args:
        if type(arg) is Box:
            key += [arg.tensor.dtype, arg.form]
        elif isinstance(arg, torch.Tensor):
            key.append(arg.dtype)
        elif type(arg) is int:
            key.append(_kinds[arg])
        elif type(arg) not in (bool, float, type(None)):
            raise TypeError(f"Launch: arguments must be tensors, numbers, None or boxes, got {type(arg).__name__}")
    return tuple(key)


def _variant(types: tuple[type, ...], kernel: Any, handles: dict[Any, _Handle]) -> Callable[..., bool]:
    """The launch of arguments of these types written out: a loop over twenty of them would cost more than the launch.

    It returns whether it has launched, and makes its keys as :func:`_key` does.
    """
    key, values, before, pointers, boxes, device = ["device", "aligned"], [], [], [], 0, ""
    for i, kind in enumerate(types):
        if kind is Box:
            before.append(f"t{i} = a{i}.tensor; p{i} = t{i}.data_ptr()")
            key += [f"t{i}.dtype", f"a{i}.form"]
            values.append(f"*handle.expanded({boxes}, a{i}, p{i})")
            boxes += 1
            device = device or f"t{i}"
        elif issubclass(kind, torch.Tensor):
            before.append(f"p{i} = a{i}.data_ptr()")
            key.append(f"a{i}.dtype")
            values.append(f"p{i}")
            pointers.append(f"p{i}")
            device = device or f"a{i}"
        else:
            if kind is int:
                key.append(f"kinds[a{i}]")
            values.append(f"a{i}")
    names = "".join(f"a{i}, " for i in range(len(types)))
    arguments = ", ".join([*values, "*handle.tail"])
    lines = [
        "def launch(grid, args):",
        f" {names.rstrip()} = args",
        *(f" {line}" for line in before),
        f" device = {device}.get_device()",
        " if device != current_device():",
        "  return False",
        f" aligned = ({' | '.join(pointers) or 0}) % 16 == 0 or ({''.join(f'{p} % 16 == 0, ' for p in pointers)})",
        f" handle = handles.get(({', '.join(key)},))",
        " if handle is None or kernel.device_caches[device][0].get(handle.key) is not handle.compiled:",
        "  return False",
        " for scope, name, value in handle.globals:",
        "  if scope.get(name) is not value:",
        "   return False",
        " handle.launch(*grid, *ones[len(grid)], stream(device), handle.function, *handle.before, "
        f"{arguments if _TRITON == (3, 6) else f'({arguments},)'})",
        " return True",
    ]
    scope = {
        "handles": handles, "kernel": kernel, "kinds": _kinds, "ones": ((1, 1, 1), (1, 1), (1,), ()),
        "current_device": torch._C._cuda_getDevice, "stream": torch._C._cuda_getCurrentRawStream,
    }  # fmt: skip
    exec("\n".join(lines), scope)  # noqa: S102
    return cast(Callable[..., bool], scope["launch"])


def _settled(
    kernel: Any, handle: _Handle, grid: tuple[int, ...], args: tuple[Any, ...], given: tuple[torch.Tensor, ...],
    device: int,
) -> Callable[..., bool] | None:  # fmt: skip
    """The launch of these numbers written out, see :meth:`Launch.settled`."""
    scope: dict[str, Any] = {
        "kernel": kernel, "handle": handle, "watched": _is_watched, "of_thread": _of_thread,
        "current_device": torch._C._cuda_getDevice, "stream": torch._C._cuda_getCurrentRawStream,
    }  # fmt: skip

    def maps(index: int, form: BoxForm) -> Callable[[torch.Tensor, int], list[Any]]:
        found: dict[int, list[Any]] = {}

        def of(tensor: torch.Tensor, address: int) -> list[Any]:
            expanded = found.get(address)
            if expanded is None:
                if len(found) >= 4096:
                    found.clear()
                expanded = found[address] = handle.expanded(index, Box(tensor, form), address)
            return expanded

        return of

    places: dict[int, list[int]] = {}  # the same tensor may be given twice, and takes its places in their order then
    for i, tensor in enumerate(given):
        places.setdefault(id(tensor), []).append(i)
    values, boxes = [], 0
    for i, arg in enumerate(args):
        if isinstance(arg, Box | torch.Tensor):
            found = places.get(id(arg.tensor if isinstance(arg, Box) else arg))
            if found is None:
                return None  # a copy that was made for this launch
            place = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(arg, Box):
            scope[f"maps{i}"] = maps(boxes, arg.form)
            values.append(f"*maps{i}(t{place}, p{place})")
            boxes += 1
        elif isinstance(arg, torch.Tensor):
            values.append(f"p{place}")
        else:
            scope[f"c{i}"] = arg
            values.append(f"c{i}")
    arguments = ", ".join([*values, "*handle.tail"])
    programs = ", ".join(map(str, (*grid, 1, 1)[:3]))
    names = [f"t{i}" for i in range(len(given))]
    lines = [
        f"def launch({', '.join(names)}):",
        *(f" p{t[1:]} = {t}.data_ptr()" for t in names),
        f" if ({' | '.join(f'p{t[1:]}' for t in names)}) % 16 or current_device() != {device} or of_thread.tracing:",
        "  return False",
        f" if kernel.device_caches[{device}][0].get(handle.key) is not handle.compiled or kernel.pre_run_hooks or watched():",
        "  return False",
        " for found, name, value in handle.globals:",
        "  if found.get(name) is not value:",
        "   return False",
        f" handle.launch({programs}, stream({device}), handle.function, *handle.before, "
        f"{arguments if _TRITON == (3, 6) else f'({arguments},)'})",
        " return True",
    ]
    exec("\n".join(lines), scope)  # noqa: S102
    return cast(Callable[..., bool], scope["launch"])


# --- calls that were made before ------------------------------------------------------------------------------------


class Launched(NamedTuple):
    """A launch, and the buffers that it used beside arguments and results, each with what makes another one."""

    launch: Launch
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    buffers: tuple[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], ...] = ()


@derived
def _calls() -> dict[tuple[Any, ...], Callable[..., torch.Tensor | None]]:
    return {}


def kind_of_call(name: str, given: tuple[Any, ...], *numbers: Any) -> tuple[Any, ...] | None:
    """What decides what a call launches, but for addresses: for calls that cost the host more than the device.

    ``None`` where somebody looks on, wants gradients, has to be told what is wrong, or waits for values to be checked.
    """
    if not _HAS_HANDLES or is_observed() or torch.is_autocast_enabled("cuda") or runtime.debug_enabled():
        return None
    found, recording = [name, allows_tf32()], torch.is_grad_enabled()
    for tensor in given:
        if type(tensor) is not torch.Tensor or (recording and tensor.requires_grad):
            return None
        found += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    for number in numbers:
        if number is not None and type(number) not in (bool, int, float):
            return None
        found += (type(number), number)
    return tuple(found)


def again(kind: tuple[Any, ...] | None, given: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The result, where a call of this kind was made before and its launch fits; the first tensor, if there is no result."""
    call = None if kind is None else _calls().get(kind)
    return None if call is None else call(*given)


def remember(
    kind: tuple[Any, ...], launched: Launched | None, given: tuple[torch.Tensor, ...], result: torch.Tensor | None
) -> None:
    """Has :func:`again` repeat what was launched for the tensors ``given``; a result is a tensor like the first of them."""
    if launched is None:
        return
    results = () if result is None else (result,)
    tensors = (*given, *results, *(buffer for buffer, _ in launched.buffers))
    launch, makers = launched.launch.settled(launched.grid, launched.args, tensors), [m for _, m in launched.buffers]
    if launch is None:
        return
    dense = given[0].is_contiguous()

    def call(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | None:
        if result is None:
            return first if launch(first, *others) else None
        out = empty(first.shape, first.dtype, first) if dense else torch.empty_like(first)
        return out if launch(first, *others, out, *[make(first) for make in makers]) else None

    if len(_calls()) >= 4096:
        _calls().clear()
    _calls()[kind] = call


# Counters that are zero, as each launch leaves them: by device and stream, and (without a stream) for captured graphs.
_counters: dict[tuple[int, int | None], torch.Tensor] = {}
COUNTERS, CAPTURED_COUNTERS = 2**12, 2**18


def tickets(count: int, like: torch.Tensor) -> torch.Tensor:
    """``count`` counters (int32) on the device of ``like``, which are zero and which no other stream uses.

    For kernels that leave them zero.

    A captured graph may run beside anything, so that each call in it gets counters of its own, of memory that was zeroed
    before; where there is none left, zeroing them becomes part of the graph.
    """
    device = like.device
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        spare = _counters.get((index, None))
        if spare is None or spare.numel() < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        found, _counters[index, None] = spare[:count], spare[count:]
        return found
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _counters or _counters[key].numel() < count:
        _counters[key] = torch.zeros(max(count, COUNTERS), dtype=torch.int32, device=device)
        if (index, None) not in _counters:
            _counters[index, None] = torch.zeros(CAPTURED_COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]


# --- calls that are repeated --------------------------------------------------------------------------------------

_NEW = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("empty", "memory_format"), ("empty_like", "default"), ("empty_strided", "default"), ("new_empty", "default"),
    )
}  # fmt: skip


class _Recording(TorchDispatchMode):
    """Notes what a call does: the memory it takes and the kernels it launches; ``complete`` unless it does more than that."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[torch.Tensor] = []
        self.launches: list[tuple[Any, _Handle, tuple[int, ...], tuple[Any, ...]]] = []
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NEW:
            self.new.append(result)
        elif not func.is_view:
            self.complete = False
        return result

    def launch(self, launch: Launch, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        _of_thread.tracing = False
        try:
            launch(grid, *args)
        finally:
            _of_thread.tracing = self
        variant = launch._variants.get(tuple(map(type, args)))
        handle = variant[1].get(_key(args, _first_tensor(args).get_device())) if variant else None
        if handle is None or handle.boxes or any(type(arg) is Box for arg in args):
            self.complete = False
        else:
            self.launches.append((launch.kernel, handle, grid, args))

    def written_out(self, given: Sequence[torch.Tensor | None], results: Any) -> Callable[..., Any] | None:
        """A function of the addresses of the tensors that were ``given`` (0: ``None``) that does the same again.

        It returns ``None``, and has done nothing, where a kernel is not the one any more that Triton would launch.
        """
        outputs = results if isinstance(results, tuple) else (results,)
        places = {(new.data_ptr(), new.shape, new.stride(), new.dtype): i for i, new in enumerate(self.new)}
        found = [places.get((out.data_ptr(), out.shape, out.stride(), out.dtype)) for out in outputs]
        known = {f"p{i}": tensor for i, tensor in enumerate(given) if tensor is not None}
        known |= {f"q{i}": tensor for i, tensor in enumerate(self.new)}
        owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in known.items() if tensor.numel()}
        told_apart = len(owners) == sum(tensor.numel() > 0 for tensor in known.values())
        if not (self.complete and self.launches and told_apart and None not in found):
            return None
        device = _first_tensor(self.launches[0][3]).get_device()
        scope: dict[str, Any] = {
            "current_device": torch._C._cuda_getDevice, "stream": torch._C._cuda_getCurrentRawStream, "new": _new,
        }  # fmt: skip

        def constant(value: Any) -> str:
            name = f"c{len(scope)}"
            scope[name] = value
            return name

        def address(tensor: torch.Tensor) -> str:
            owner = owners[tensor.untyped_storage().data_ptr()]
            return f"{owner} + {tensor.data_ptr() - known[owner].data_ptr()}"

        fresh, calls = [], []
        for kernel, handle, grid, args in self.launches:
            fresh.append(
                f"{constant(kernel)}.device_caches[{device}][0].get({constant(handle.key)}) is {constant(handle.compiled)}"
            )
            fresh += [f"{constant(scope)}.get({name!r}) is {constant(value)}" for scope, name, value in handle.globals]
            values = [address(arg) if isinstance(arg, torch.Tensor) else constant(arg) for arg in args]
            listed = ", ".join([*values, *map(constant, handle.tail)])
            head = [*map(str, (*grid, 1, 1)[:3]), "s", constant(handle.function), *map(constant, handle.before)]
            listed = listed if _TRITON == (3, 6) else f"({listed},)"
            calls.append(f"{constant(handle.launch)}({', '.join(head)}, {listed})")
        lines = [
            f"def again({', '.join(f'p{i}' for i in range(len(given)))}):",
            f" if not (current_device() == {device} and {' and '.join(fresh)}):",
            "  return None",
        ]
        for i, tensor in enumerate(self.new):
            shape_and_strides = ", ".join(constant(tuple(part)) for part in (tensor.shape, tensor.stride()))
            lines.append(f" t{i} = new({shape_and_strides}, {constant(tensor.dtype)}); q{i} = t{i}.data_ptr()")
        lines += [f" s = stream({device})", *(f" {call}" for call in calls)]
        names = [f"t{i}" for i in found]
        lines.append(f" return {', '.join(names)}{',' if isinstance(results, tuple) and len(names) == 1 else ''}")
        exec("\n".join(lines), scope)  # noqa: S102
        return cast(Callable[..., Any], scope["again"])


class _Repeats(dict[Any, Callable[..., Any]]):
    """By kind of call what does it again; learns it from the second call, which it watches."""

    def __init__(self, compute: Callable[..., Any], tensors: Sequence[int]) -> None:
        self.compute, self.tensors, self.seen = compute, tensors, dict[Any, int]()
        autotune.remembered(self)

    def cache_clear(self) -> None:
        self.clear()
        self.seen.clear()

    def learn(self, key: Any, *args: Any) -> Any:
        """Computes, and learns how if that seems possible."""
        calls = self.seen[key] = self.seen.get(key, 0) + 1
        if len(self.seen) > 4096:
            self.cache_clear()
        # Where not all begin on 16 bytes, the key does not say which do.
        if key[-1] or not 1 < calls < 5 or _deterministic() or _is_watched() or is_observed():
            return self.compute(*args)
        recording = _Recording()
        before, _of_thread.tracing = _of_thread.tracing, recording
        try:
            with recording:
                results = self.compute(*args)
        finally:
            _of_thread.tracing = before
        again = recording.written_out([args[i] for i in self.tensors], results)
        if again is not None:
            self[key] = again
        return results


# --- one declaration an operator ------------------------------------------------------------------------------------

NAMESPACE = "kernelbook"


def operator(
    schema: str,
    *,
    outputs: Callable[..., Any],
    run: Callable[..., object],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    saved: int = 0,
    visible: bool = False,
) -> Callable[..., Any]:
    """Declares the operator ``kernelbook::<name>`` and returns the function that calls it.

    What a call costs depends on who looks on. Where nobody does, ``outputs`` and ``run`` are called, and nothing else; where
    a gradient is wanted, they are called in an ``autograd.Function``. PyTorch's dispatcher, and the operator that is
    registered with it, are there for whoever compiles, traces, transforms, profiles or brings tensors of another class.

    Args:
        schema: name, arguments and results, such as ``"scale(Tensor x, float factor) -> Tensor"``.
        outputs: allocates the results (a tensor, or a tuple of tensors) from the arguments; real and fake tensors alike,
            so it reads shapes, dtypes and devices only.
        run: ``run(results, *arguments)`` fills them. In the interpreter bfloat16 arguments and results reach it as
            float32, see :func:`runtime.kernel_dtype`. Checks of values (of ids) stand here.
        setup_context, backward: as for ``torch.library.register_autograd``; ``None``: to differentiate it is an error.
        saved: so many of the last results are there for ``setup_context`` only: the caller does not get them, and
            ``backward`` no gradients of them. To autograd each result costs as much as a small launch.
        visible: under ``torch.compile`` the graph holds the kernels themselves instead of the operator. ``run`` is then
            called with fake tensors: it does nothing but launch (:class:`Launch`, without :func:`box`) and allocate.
    """
    qualified = f"{NAMESPACE}::{schema.partition('(')[0]}"

    def cannot(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"{qualified} cannot be differentiated")

    differentiate, keep = backward or cannot, setup_context or (lambda ctx, inputs, output: None)

    def compute(*args: Any) -> Any:
        results = outputs(*args)
        run(results, *args)
        return results

    def compute_widened(*args: Any) -> Any:
        results = outputs(*args)
        wide = [_widened(result) for result in (results if isinstance(results, tuple) else (results,))]
        run(tuple(wide) if isinstance(results, tuple) else wide[0], *map(_widened, args))
        for result, filled in zip(results if isinstance(results, tuple) else (results,), wide, strict=True):
            if filled is not result:
                result.copy_(filled)
        return results

    implementation = compute_widened if runtime.INTERPRET else compute

    @functools.cache
    def untraced() -> Callable[..., Any]:
        return torch.compiler.disable(implementation)

    def dispatched(*args: Any) -> Any:
        # Only where the compiler has been imported can it be at work on what calls this. (To import it takes seconds.)
        return (untraced() if "torch._dynamo" in sys.modules else implementation)(*args)

    def keep_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, inputs, output)
        if saved:
            ctx.mark_non_differentiable(*output[-saved:])

    def differentiate_all(ctx: Any, *gradients: Any) -> Any:
        return differentiate(ctx, *(gradients[:-saved] if saved else gradients))

    torch.library.define(qualified, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", dispatched)
    torch.library.register_fake(qualified, outputs)
    torch.library.register_autograd(qualified, differentiate_all, setup_context=keep_all)
    registered = getattr(getattr(torch.ops, NAMESPACE), qualified.partition("::")[2]).default
    if visible and _HAS_HANDLES:
        _decompose(qualified, compute)

    parameters = [
        parameter.split() for parameter in schema.partition("(")[2].rpartition(" ->")[0].strip("()").split(",")
    ]
    of_tensors = [i for i, (kind, _) in enumerate(parameters) if re.fullmatch(r"Tensor(\(\w+!?\))?\??", kind)]
    scope = {"outputs": outputs, "run": run, "implementation": implementation, "keep": keep, "registered": registered}
    if visible and _HAS_HANDLES and _new is not None:
        scope["repeats"] = _Repeats(compute, of_tensors)
    forward, call = _written_out(
        [name for _, name in parameters],
        [parameters[i][1] for i in of_tensors],
        f"[:-{saved}]" if saved and schema.rpartition("->")[2].count(",") > saved else "[0]" if saved else "",
        scope,
    )
    Eager: Any = type(
        qualified.partition("::")[2], (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(differentiate)},
    )  # fmt: skip
    # Function.apply without what it does for transforms, of which there are none where this is called.
    call.__globals__["apply"] = super(torch.autograd.Function, Eager).apply  # type: ignore[misc]
    call.__name__ = call.__qualname__ = qualified
    return call


def _written_out(
    names: list[str], tensors: list[str], given: str, scope: dict[str, Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator's eager call, and ``forward`` of its ``autograd.Function``, with its arguments' names written out.

    To pass arguments on as ``*args``, three times a call, costs more than all that these functions do.
    """
    args = ", ".join(names)
    compute = (f"implementation({args})",) if runtime.INTERPRET else (f"outputs({args})", f"run(results, {args})")
    lines = []
    if "repeats" in scope:
        compute = (f"compute({args})",)
        key = [
            f"None if {name} is None else ({name}.shape, {name}.stride(), {name}.dtype, {name}.device)"
            if name in tensors
            else name
            for name in names
        ]
        lines = [
            f"def compute({args}):",
            *(f" p{i} = 0 if {name} is None else {name}.data_ptr()" for i, name in enumerate(tensors)),
            f" key = ({', '.join(key)}, ({' | '.join(f'p{i}' for i in range(len(tensors)))}) % 16)",
            " again = repeats.get(key)",
            " if again is not None and not (deterministic() or watched()):",
            f"  results = again({', '.join(f'p{i}' for i in range(len(tensors)))})",
            "  if results is not None:",
            "   return results",
            f" return repeats.learn(key, {args})",
        ]
        scope |= {"deterministic": _deterministic, "watched": _is_watched}
    lines += [
        f"def forward(ctx, {args}):",
        f" results = {compute[0]}",
        *(f" {line}" for line in compute[1:]),
        f" keep(ctx, ({args},), results)",
        f" return results{given}",
        f"def call({args}):",
        " if is_observed():",
        f"  return registered({args}){given}",
        " wanted = False",
    ]
    for name in tensors:
        lines += [
            f" if {name} is not None:",
            f"  if type({name}) not in plain or {name}.is_meta:",
            f"   return registered({args}){given}",
            f"  if {name}.requires_grad:",
            "   wanted = True",
        ]
    lines += [
        " if wanted and is_grad_enabled():",
        f"  return apply({args})",
        f" results = {compute[0]}",
        *(f" {line}" for line in compute[1:]),
        f" return results{given}",
    ]
    scope |= {"is_observed": is_observed, "is_grad_enabled": torch.is_grad_enabled, "plain": _PLAIN}
    exec("\n".join(lines), scope)  # noqa: S102
    return scope["forward"], scope["call"]


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _decompose(qualified: str, compute: Callable[..., Any]) -> None:
    """Has the compiler see the kernels that the operator launches, as ``torch.library.triton_op`` does."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    def decomposed(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch._subclasses import FakeTensor
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        # An exported program keeps operators. So does one in which PyTorch fills new memory with NaN: it has no way to do
        # that between an allocation and a kernel that stand in one graph.
        deterministic: Any = torch.utils.deterministic
        filled = torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory
        if filled or custom_triton_ops_decomposition_disabled():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if any(not issubclass(t, FakeTensor) and t not in (torch.Tensor, FunctionalTensor) for t in types):
            return NotImplemented
        before, _of_thread.tracing = _of_thread.tracing, True
        try:
            with mode:
                return compute(*args, **kwargs)
        finally:
            _of_thread.tracing = before

    torch.library.register_torch_dispatch(qualified, FunctionalTensorMode, decomposed)


# --- tensors and dtypes as kernels take them ------------------------------------------------------------------------


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all begin on 16 bytes, as PyTorch allocates them; fake tensors do."""
    if _of_thread.tracing is not True:
        for tensor in tensors:
            if tensor.data_ptr() % 16:
                return False
    return True


_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_deterministic = torch._C._get_deterministic_algorithms
_new = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # what Inductor's programs allocate by


def empty(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """``torch.empty(shape, dtype=dtype, device=like.device)``, on a GPU for less than half of its host time."""
    if (
        _HAS_HANDLES and _new is not None and type(like) in _PLAIN and like.get_device() == _current_device()
        and not _deterministic()  # PyTorch may fill new memory then
        and not _dispatch_modes()
    ):  # fmt: skip
        return _new(*_contiguous(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides of a contiguous tensor, as tuples."""
    return tuple(shape), tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tl_accumulator(dtype: torch.dtype) -> tl.dtype:
    """:func:`accumulator` as a kernel's ``ACC`` takes it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def allows_tf32() -> bool:
    """Whether PyTorch is set to multiply float32 matrices in tf32, by any of its switches.

    ``torch.backends.cuda.matmul.allow_tf32`` cannot be read once somebody has set the newer ``fp32_precision``; that one
    can be read either way.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def precision() -> str:
    """How kernels multiply float32 (``input_precision`` of ``tl.dot``): as PyTorch is set to, in tf32 or exactly."""
    return "tf32" if allows_tf32() else "ieee"


def reshaped(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """An operator's result in another shape, on the same memory.

    It is no view to autograd, which forbids ``y += residual`` on a view that an operator returned.
    """
    return torch.ops.aten._unsafe_view.default(result, shape)


def without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast on the tensor's device.

    Within an operator dtypes are settled; autocast would lower those of a backward pass that runs under it.
    """
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def in_kernel_dtype(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """``tensors`` in the dtypes that kernels are given, see :func:`runtime.kernel_dtype`; ``None`` stays ``None``."""
    if not runtime.INTERPRET:
        return tensors  # kernel_dtype() changes none
    return tuple(None if t is None else t.to(runtime.kernel_dtype(t.dtype)) for t in tensors)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """(M, N) for (..., N), a view where the strides allow it, in the dtype that kernels are given."""
    if x.ndim == 2 and not runtime.INTERPRET:
        return x
    return x.to(runtime.kernel_dtype(x.dtype)).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def strided(tensor: torch.Tensor | None, dims: int, stand_in: torch.Tensor) -> tuple[Any, ...]:
    """The tensor and its ``dims`` strides, as a kernel's arguments.

    Without a tensor it is ``stand_in`` and zeros: the kernel wants a pointer, and won't touch it.
    """
    return (stand_in, *(0,) * dims) if tensor is None else (tensor, *tensor.stride())


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Whether the last dimension is contiguous and all rows begin on 16 bytes, one after the other.

    Then rows are loaded in pieces of 16 bytes, and a tensor descriptor can read them.
    """
    return tensor.data_ptr() % 16 == 0 and _keep_aligned(tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=4096)
def _keep_aligned(strides: tuple[int, ...], size: int) -> bool:
    *steps, within = strides
    return within == 1 and all(step > 0 and step * size % 16 == 0 for step in steps)
