"""How the rooms launch kernels and declare operators: one launcher, one declaration, and what launches have in common."""

import contextlib
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelbook import launch, plans, runtime  # before Triton, which it sets up
from kernelbook.launch import NAMESPACE, _is_watched, _of_thread, cdiv, is_aligned, is_transformed, sources
from kernelbook.launch import _integer_kinds as _kinds
from kernelbook.memory import PLAIN as _PLAIN
from kernelbook.memory import _deterministic, _new, _poisoned, accumulator, empty, poisonable, tl_accumulator
from kernelbook.memory import counters as _counters_on

# isort: split
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "NAMESPACE",
    "Box",
    "Launch",
    "accumulator",
    "allows_tf32",
    "box",
    "box_form",
    "cdiv",
    "empty",
    "has_aligned_rows",
    "in_kernel_dtype",
    "is_aligned",
    "is_observed",
    "is_recorded",
    "is_transformed",
    "matrix",
    "operator",
    "poisonable",
    "precision",
    "repeated",
    "reshaped",
    "settings",
    "strided",
    "tickets",
    "tl_accumulator",
    "without_autocast",
    "written",
]


_reader = torch._C._dynamo.eval_frame.get_eval_frame_callback  # of each Python function before it runs: the compiler


def is_observed() -> bool:
    """:func:`launch.is_observed`, but for the mode that only notes what a call does."""
    return not is_recorded() and launch.is_observed()


def is_recorded() -> bool:
    """Whether a call is noted to be repeated, so that it has to launch what it launches itself."""
    return isinstance(_of_thread.tracing, _Recording)


# --- one launcher ---------------------------------------------------------------------------------------------------


class BoxForm:
    """How a tensor descriptor reads a tensor: the sides of its boxes and, for Gluon, their layout in shared memory."""

    __slots__ = ("layout", "sides")

    def __init__(self, sides: tuple[int, ...], layout: Any) -> None:
        self.sides, self.layout = sides, layout

    def __call__(self, tensor: torch.Tensor) -> "Box":
        return Box(tensor, self)

    def descriptor(self, base: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """The descriptor as Triton (without a layout) or Gluon (with one) knows it."""
        if self.layout is None:
            return TensorDescriptor(base, list(shape), list(strides), list(self.sides))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(base, list(shape), list(strides), list(self.sides), self.layout)


class Box:
    """A tensor that a kernel reads or writes through a tensor descriptor; made by :func:`box`."""

    __slots__ = ("form", "tensor")

    def __init__(self, tensor: torch.Tensor, form: BoxForm) -> None:
        self.tensor, self.form = tensor, form

    def descriptor(self) -> Any:
        return self.form.descriptor(self.tensor, self.tensor.shape, self.tensor.stride())


class _At(NamedTuple):
    """Stands for a tensor of which a descriptor has to know no more than where it begins and what it holds."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


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
        """What the C launcher takes for the descriptor of the kernel's box ``index``: the map, the shape and the strides."""
        key = (index, address, box.tensor.shape, box.tensor.stride())
        found = self.maps.get(key)
        if found is None:
            if len(self.maps) >= 4096:
                self.maps.clear()
            found = self.maps[key] = self.maker(index, box)(address)
        return found

    def maker(self, index: int, box: Box) -> Callable[[int], list[Any]]:
        """:meth:`expanded` for boxes like this one, by their addresses; it holds no tensor."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        tensor, meta = box.tensor, self.boxes[index] if self.boxes else None
        form, dtype, device, shape, strides = box.form, tensor.dtype, tensor.device, tensor.shape, tensor.stride()

        def make(address: int) -> list[Any]:
            runtime.ensure_context(device)
            expanded: list[Any] = make_tensordesc_arg(form.descriptor(_At(address, dtype), shape, strides), meta)
            return expanded

        return make


_TRITON = launch._VERSION


# Whether compiled kernels can be launched by their handles: on NVIDIA's GPUs, by a Triton whose launcher is known.
_HAS_HANDLES = launch._CALLS_COMPILED


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


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor:
    for arg in args:
        tensor = getattr(arg, "tensor", getattr(arg, "base", arg))
        if isinstance(tensor, torch.Tensor):
            return tensor
    raise TypeError("a launch needs a tensor among its arguments")


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


# --- counters ---------------------------------------------------------------------------------------------------------


def tickets(count: int, device: torch.device) -> torch.Tensor:
    """:func:`memory.counters`, noted where the call is recorded."""
    found = _counters_on(count, device)
    if isinstance(_of_thread.tracing, _Recording):
        _of_thread.tracing.count(found, count)
    return found


# --- calls that are repeated --------------------------------------------------------------------------------------

_SIMPLE = frozenset((bool, float, int, str, type(None)))
Public = TypeVar("Public", bound=Callable[..., Any])
_NEW = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("empty", "memory_format"), ("empty_like", "default"), ("empty_strided", "default"), ("new_empty", "default"),
    )
}  # fmt: skip
_ZEROS = {torch.ops.aten.new_zeros.default}
# Of operators that take the same arguments under their short names, which cost the host less.
_BOUND = {torch.ops.aten.mm.out: torch.mm, torch.ops.aten.addmm.out: torch.addmm}


class _Recording(TorchDispatchMode):
    """Notes what a call does: the memory it takes, the kernels it launches, PyTorch's operators that write to ``out=``.

    ``complete`` unless it does more than that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.new: list[tuple[torch.Tensor, bool]] = []  # memory, and whether it is zeroed
        self.counters: list[tuple[torch.Tensor, int]] = []
        self.steps: list[Any] = []  # in their order, memory and counters by their number
        self.launches = 0
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NEW or func in _ZEROS:
            self.steps.append(f"t{len(self.new)}")
            self.new.append((result, func in _ZEROS))
        elif any(argument.is_out for argument in func._schema.arguments):
            self.steps.append((func, args, kwargs or {}))
        elif not func.is_view:
            self.complete = False
        return result

    def count(self, found: torch.Tensor, count: int) -> None:
        self.steps.append(f"u{len(self.counters)}")
        self.counters.append((found, count))

    def launch(self, launch: Launch, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        _of_thread.tracing = False
        try:
            launch(grid, *args)
        finally:
            _of_thread.tracing = self
        variant = launch._variants.get(tuple(map(type, args)))
        handle = variant[1].get(_key(args, _first_tensor(args).get_device())) if variant else None
        if handle is None:
            self.complete = False
        else:
            self.launches += 1
            self.steps.append((launch.kernel, handle, grid, args))

    def written_out(self, given: Sequence[torch.Tensor | None], results: Any) -> Callable[..., Any] | None:
        """A function of the addresses of the tensors that were ``given`` (0: ``None``) and of these that does it again.

        It returns the results, or that it did nothing: where a kernel is another by now than Triton would launch.
        """
        if not (self.complete and self.launches):
            return None
        known = {f"g{i}": tensor for i, tensor in enumerate(given) if tensor is not None}
        known |= {f"t{i}": tensor for i, (tensor, _) in enumerate(self.new)}
        known |= {f"u{i}": tensor for i, (tensor, _) in enumerate(self.counters)}
        by_memory: dict[int, list[str]] = {}
        for name, tensor in known.items():
            # By the object: the address would be 0 for every tensor that is empty.
            by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        first = next(_first_tensor(step[3]) for step in self.steps if isinstance(step, tuple) and len(step) == 4)
        device = first.get_device()
        scope: dict[str, Any] = {
            "current_device": torch._C._cuda_getDevice, "stream": torch._C._cuda_getCurrentRawStream, "new": _new,
            "counters": _counters_on, "device": first.device, "keep": _kept, "stale": _STALE,
        }  # fmt: skip
        used: set[str] = set()  # in the step at hand

        def constant(value: Any) -> str:
            name = f"c{len(scope)}"
            scope[name] = value
            return name

        def lies(tensor: torch.Tensor) -> tuple[Any, ...]:
            memory = tensor.untyped_storage()._cdata
            return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype

        def owner_of(tensor: torch.Tensor) -> tuple[str, bool]:
            """-> whose memory it is, and whether it is that very tensor."""
            same = [name for name, other in known.items() if other is tensor]
            # What is no tensor that was given, but a part of one, is found by its memory. Two may lie in the same: whose
            # address is it then?
            owners = same or by_memory.get(tensor.untyped_storage()._cdata, [])
            if len(owners) != 1:
                raise _UnknownError
            used.add(owners[0])
            return owners[0], bool(same)

        def address(tensor: torch.Tensor) -> str:
            if not tensor.numel():
                return "0"
            owner, same = owner_of(tensor)
            pointer = f"p{owner[1:]}" if owner[0] == "g" else f"{owner}_at"
            return pointer if same else f"{pointer} + {tensor.data_ptr() - known[owner].data_ptr()}"

        def operand(value: Any) -> str:
            """An argument of one of PyTorch's operators, which wants a tensor and not its address."""
            # Nothing here calls itself: what is referred to in a circle keeps the call's memory until garbage is collected.
            if isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor) for part in value):
                return f"({', '.join(map(one, value))},)"
            return one(value)

        def one(value: Any) -> str:
            if not isinstance(value, torch.Tensor):
                return constant(value)
            owner, same = owner_of(value)
            base = known[owner]
            if same or lies(value) == lies(base):  # torch.empty() gives another tensor than the one that was noted
                return owner
            if value.dtype != base.dtype:
                raise _UnknownError
            away = value.storage_offset() - base.storage_offset()
            if (
                base.ndim == 2
                and not away
                and value.shape == base.shape[::-1]
                and value.stride() == base.stride()[::-1]
            ):
                return f"{owner}.t()"
            start = f"{owner}.storage_offset() + {away}"
            return f"{owner}.as_strided({constant(tuple(value.shape))}, {constant(value.stride())}, {start})"

        fresh = list[str]()

        def launched(kernel: Any, handle: _Handle, grid: tuple[int, ...], args: tuple[Any, ...]) -> list[str]:
            name = constant(kernel)
            fresh.append(
                f"{name}.device_caches[{device}][0].get({constant(handle.key)}) is {constant(handle.compiled)} "
                f"and not {name}.pre_run_hooks"
            )
            fresh.extend(f"{constant(names)}.get({name!r}) is {constant(v)}" for names, name, v in handle.globals)
            lines, values, boxes = list[str](), list[str](), 0
            for arg in args:
                if type(arg) is Box:
                    kept, make, where = constant({}), constant(handle.maker(boxes, arg)), address(arg.tensor)
                    lines.append(f"m{kept} = {kept}.get({where}) or keep({kept}, {where}, {make})")
                    values.append(f"*m{kept}")
                    boxes += 1
                else:
                    values.append(address(arg) if isinstance(arg, torch.Tensor) else constant(arg))
            listed = ", ".join([*values, *map(constant, handle.tail)])
            head = [*map(str, (*grid, 1, 1)[:3]), "s", constant(handle.function), *map(constant, handle.before)]
            listed = listed if _TRITON == (3, 6) else f"({listed},)"
            return [*lines, f"{constant(handle.launch)}({', '.join(head)}, {listed})"]

        def written(step: Any) -> list[str]:
            if isinstance(step, tuple) and len(step) == 4:
                return launched(*step)
            if isinstance(step, tuple):
                func, args, kwargs = step
                name = constant(_BOUND.get(func, func))
                listed = ", ".join([*map(operand, args), *(f"{key}={operand(value)}" for key, value in kwargs.items())])
                return [f"{name}({listed})"]
            if step[0] == "u":
                return [f"{step} = counters({self.counters[int(step[1:])][1]}, device); {step}_at = {step}.data_ptr()"]
            tensor, zeroed = self.new[int(step[1:])]
            sides = ", ".join(constant(tuple(part)) for part in (tensor.shape, tensor.stride()))
            made = f"{step} = new({sides}, {constant(tensor.dtype)}); {step}_at = {step}.data_ptr()"
            return [made, f"{step}.zero_()"] if zeroed else [made]

        last, body = dict[str, int](), list[list[str]]()
        try:
            for i, step in enumerate(self.steps):
                used.clear()
                body.append(written(step))
                last |= dict.fromkeys(used, i)
        except _UnknownError:
            return None
        places = {lies(new): f"t{i}" for i, (new, _) in enumerate(self.new)}
        outputs = results if isinstance(results, tuple) else () if results is None else (results,)
        found = [places.get(lies(out), "") for out in outputs]
        if "" in found:
            return None
        for name, i in last.items():  # its memory can be taken by what comes next
            if name[0] == "t" and name not in found:
                body[i].append(f"{name} = None")
        listed = ", ".join(found)
        numbers = range(len(given))
        lines = [
            f"def again({', '.join([*(f'p{i}' for i in numbers), *(f'g{i}' for i in numbers)])}):",
            f" if not (current_device() == {device} and {' and '.join(fresh)}):",
            "  return stale",
            f" s = stream({device})",
            *(f" {line}" for step_lines in body for line in step_lines),
            f" return {'None' if results is None else f'({listed},)' if isinstance(results, tuple) else listed}",
        ]
        exec("\n".join(lines), scope)  # noqa: S102
        return cast(Callable[..., Any], scope["again"])


class _UnknownError(Exception):
    """A kernel was given memory of which nobody knows where the next call will have it."""


_STALE = object()


def _kept(maps: dict[int, list[Any]], address: int, make: Callable[[int], list[Any]]) -> list[Any]:
    if len(maps) >= 4096:
        maps.clear()
    found = maps[address] = make(address)
    return found


class _Repeats(dict[Any, Callable[..., Any]]):
    """By kind of call what does it again; learns it from the second call, which it watches."""

    def __init__(self, compute: Callable[..., Any], tensors: Sequence[int]) -> None:
        self.compute, self.tensors, self.seen = compute, tensors, dict[Any, int]()
        plans.remembered(self)

    def cache_clear(self) -> None:
        self.clear()
        self.seen.clear()

    def learn(self, key: Any, *args: Any) -> Any:
        """Computes, and learns how if that seems possible."""
        # Where not all begin on 16 bytes, the key does not say which do.
        if key[-1] or _deterministic() or _poisoned or _is_watched() or is_observed():
            return self.compute(*args)
        calls = self.seen[key] = self.seen.get(key, 0) + 1
        if len(self.seen) > 4096:
            self.cache_clear()
        if not 1 < calls < 5:
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

    def lines(
        self, names: Sequence[str], numbers: Callable[[str], str], settings: Callable[[], Any] | None
    ) -> tuple[list[str], dict[str, Any]]:
        """``compute(<names>)`` written out, which repeats what it can, and what its lines refer to."""
        tensors, args = [names[i] for i in self.tensors], ", ".join(names)
        key = [
            f"None if {name} is None else ({name}.shape, {name}.stride(), {name}.dtype, {name}.device)"
            if name in tensors
            else numbers(name)
            for name in names
        ]
        lines = [
            f"def _compute({args}):",
            " if _of_thread.tracing:",  # of a call that this one belongs to
            f"  return _plainly({args})",
            *(f" _p{i} = 0 if {name} is None else {name}.data_ptr()" for i, name in enumerate(tensors)),
            f" _key = ({', '.join(key)}, {'_settings(), ' if settings else ''}"
            f"({' | '.join(f'_p{i}' for i in range(len(tensors)))}) % 16)",
            " _again = _repeats.get(_key)",
            " if _again is not None and not (_deterministic() or _poisoned or _watched()):",
            f"  _results = _again({', '.join([*(f'_p{i}' for i in range(len(tensors))), *tensors])})",
            "  if _results is not _stale:",
            "   return _results",
            f" return _repeats.learn(_key, {args})",
        ]
        return lines, {
            "_of_thread": _of_thread, "_plainly": self.compute, "_settings": settings, "_repeats": self, "_stale": _STALE,
            "_deterministic": _deterministic, "_watched": _is_watched, "_poisoned": _poisoned,
        }  # fmt: skip


def repeated(settings: Callable[[], Any] | None = None) -> Callable[[Public], Public]:
    """For a public function: a call that only launches kernels is repeated without what led to them, checks included.

    That is where no gradients are wanted and nobody looks on, from the third call of a kind on: with tensors of the same
    shapes, strides, dtypes and devices, and numbers that are equal. Small calls cost the host more than the device.
    Under ``torch.compile`` the call is one operator of the graph, see :func:`_whole`.

    Args:
        settings: what else decides what is launched, as a value that can be compared.
    """

    def decorate(function: Public) -> Public:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function)
        names = list(parameters)
        of_tensors = [i for i, name in enumerate(names) if torch.Tensor in (hints[name], *typing.get_args(hints[name]))]
        by_name = [name for name in names if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
        given = ", ".join(f"{name}={name}" if name in by_name else name for name in names)
        scope: dict[str, Any] = {"_function": function}
        exec(f"def _plainly({', '.join(names)}):\n return _function({given})", scope)  # noqa: S102
        declared, lines = [], list[str]()
        for name in names:
            if name in by_name[:1]:
                declared.append("*")
            optional = parameters[name].default is not inspect.Parameter.empty
            declared.append(f"{name}=_default_{name}" if optional else name)
        scope |= {f"_default_{name}": parameters[name].default for name in names}
        compiled = list[str]()
        if hints["return"] is not type(None):  # what writes into its arguments stays what it is
            compiled, more = _whole(function.__name__, scope["_plainly"], hints)
            compiled.append(f"  return _function({given})")
            scope |= more
        if not _HAS_HANDLES or _new is None:
            lines += [f"def _call({', '.join(declared)}):", *compiled, f" return _function({given})"]
        else:
            repeats = _Repeats(scope["_plainly"], of_tensors)
            lines, more = repeats.lines(names, lambda name: f"type({name}), {name}", settings)
            scope |= more | {
                "_is_observed": is_observed, "_is_grad_enabled": torch.is_grad_enabled, "_plain": _PLAIN, "_simple": _SIMPLE,
                "_is_autocast_enabled": torch.is_autocast_enabled,
            }  # fmt: skip
            lines += [
                f"def _call({', '.join(declared)}):",
                *compiled,
                " if _is_observed() or _is_autocast_enabled('cuda'):",
                f"  return _function({given})",
                " _recorded = _is_grad_enabled()",
            ]
            for i, name in enumerate(names):
                if i in of_tensors:
                    lines.append(
                        f" if {name} is not None and (type({name}) not in _plain or (_recorded and {name}.requires_grad) "
                        f"or {name}.is_neg()):"
                    )
                else:
                    lines.append(f" if type({name}) not in _simple:")
                lines.append(f"  return _function({given})")
            lines.append(f" return _compute({', '.join(names)})")
        exec("\n".join(lines), scope)  # noqa: S102
        return cast(Public, functools.wraps(function)(scope["_call"]))

    return decorate


# What may be an argument of an operator: its type there, and how code tells one. Dynamo guards on each name that it
# reads, and a guard costs every call; the class of a literal has none.
_IN_SCHEMA = {
    torch.Tensor: ("Tensor", "isinstance({0}, _Tensor)"),
    float: ("float", "({0}.__class__ is (0.0).__class__ or {0}.__class__ is (0).__class__)"),
    int: ("SymInt", "isinstance({0}, int)"),
    bool: ("bool", "{0}.__class__ is (True).__class__"),
    str: ("str", "{0}.__class__ is ''.__class__"),
}


def _whole(name: str, compute: Callable[..., Any], hints: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Declares ``kernelbook::<name>_whole``: a public function as one operator, made of those that it calls.

    Dynamo reads Python, and a compiled call is checked against all that was read; it does not read operators. What this
    one does the compiler sees where it takes operators apart. -> lines that return its result, unless an argument has to
    be left to the function (and its checks), and what they refer to.
    """
    arguments, declared, conditions = [], [], []
    *parameters, (_, result) = hints.items()
    for given, hint in parameters:
        [kind, *others] = [k for k in typing.get_args(hint) or (hint,) if k is not type(None)]
        optional = type(None) in typing.get_args(hint)
        if others or kind not in _IN_SCHEMA:
            conditions.append(f"{given} is None")
            continue
        kind, condition = _IN_SCHEMA[kind]
        condition = condition.format(given)
        conditions.append(f"({given} is None or {condition})" if optional else condition)
        declared.append(f"{kind}{'?' * optional} {given}")
        arguments.append(given)
    args = ", ".join(arguments)
    several = result is not torch.Tensor
    scope: dict[str, Any] = {"_compute": compute}
    lines = [
        f"def _implementation({args}):",
        f" _found = _compute({', '.join(given if given in arguments else 'None' for given, _ in parameters)})",
        f" return {'list(_found) if type(_found) is tuple else [_found]' if several else '_found'}",
    ]
    exec("\n".join(lines), scope)  # noqa: S102
    registered = launch.composite(
        f"{name}_whole({', '.join(declared)}) -> Tensor{'[]' * several}", scope["_implementation"]
    )
    return [
        " if _is_compiling():",
        f"  if {' and '.join(conditions)}:",
        f"   _found = _operator({args}, {sources()!r})",
        f"   return {'_found[0] if len(_found) == 1 else tuple(_found)' if several else '_found'}",
    ], {
        "_Tensor": torch.Tensor, "_operator": registered,
        "_is_compiling": torch.compiler.is_dynamo_compiling,
    }  # fmt: skip


def written(*tensors: torch.Tensor) -> None:
    """Says that kernels have written into tensors that the caller has.

    A backward pass that has kept what was in them then raises PyTorch's error instead of reading what is there now.
    """
    torch._C._increment_version(tensors)
    if isinstance(_of_thread.tracing, _Recording):
        _of_thread.tracing.steps.append((torch._C._increment_version, (tensors,), {}))


def settings() -> tuple[bool, ...]:
    """What may decide, beside its arguments, what a call launches: for :func:`repeated`."""
    return allows_tf32(), runtime.debug_enabled()


# --- one declaration an operator ------------------------------------------------------------------------------------


def operator(
    schema: str,
    *,
    outputs: Callable[..., Any],
    run: Callable[..., object],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    saved: int = 0,
    visible: bool = False,
    repeated: Callable[[], Any] | None = None,
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
        repeated: a call of a kind that was seen before launches what that one did, where that was all it did, see
            :func:`repeated`, which takes this as its argument. An operator that is ``visible`` is repeated anyway.
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

    def dispatched(*args: Any) -> Any:
        return (implementation if is_observed() else perform)(*args)

    def keep_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, inputs, output)
        if saved:
            ctx.mark_non_differentiable(*output[-saved:])

    def differentiate_all(ctx: Any, *gradients: Any) -> Any:
        return differentiate(ctx, *(gradients[:-saved] if saved else gradients))

    registered = launch.operator(
        schema, outputs=outputs, run=dispatched, setup_context=keep_all, backward=differentiate_all, visible=visible
    )
    parameters = [
        parameter.split() for parameter in schema.partition("(")[2].rpartition(" ->")[0].strip("()").split(",")
    ]
    of_tensors = [i for i, (kind, _) in enumerate(parameters) if re.fullmatch(r"Tensor(\(\w+!?\))?\??", kind)]
    scope = {"outputs": outputs, "run": run, "implementation": implementation, "keep": keep, "registered": registered}
    names, lines = [name for _, name in parameters], list[str]()
    if (visible or repeated) and _HAS_HANDLES and _new is not None:
        lists = {name for kind, name in parameters if kind.endswith("[]")}  # as the dispatcher gives them
        lines, more = _Repeats(compute, of_tensors).lines(
            names, lambda name: f"tuple({name})" if name in lists else name, repeated
        )
        scope |= more
    forward, call = _written_out(
        names,
        [names[i] for i in of_tensors],
        lines,
        f"[:-{saved}]" if saved and schema.rpartition("->")[2].count(",") > saved else "[0]" if saved else "",
        scope,
    )
    perform: Callable[..., Any] = scope.get("_compute", implementation)
    Eager: Any = type(
        qualified.partition("::")[2], (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(differentiate)},
    )  # fmt: skip
    # Function.apply without what it does for transforms, of which there are none where this is called.
    call.__globals__["apply"] = super(torch.autograd.Function, Eager).apply  # type: ignore[misc]
    call.__name__ = call.__qualname__ = qualified
    return call


def _written_out(
    names: list[str], tensors: list[str], lines: list[str], given: str, scope: dict[str, Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator's eager call, and ``forward`` of its ``autograd.Function``, with its arguments' names written out.

    To pass arguments on as ``*args``, three times a call, costs more than all that these functions do.
    """
    args = ", ".join(names)
    compute = (f"implementation({args})",) if runtime.INTERPRET else (f"outputs({args})", f"run(results, {args})")
    if lines:
        compute = (f"_compute({args})",)
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
            f"  if type({name}) not in plain or {name}.is_meta or {name}.is_neg():",  # PyTorch negates it on the way
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


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


# --- tensors and dtypes as kernels take them ------------------------------------------------------------------------


_fp32_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)  # what the switch itself asks


def allows_tf32() -> bool:
    """Whether PyTorch is set to multiply float32 matrices in tf32, by any of its switches.

    ``torch.backends.cuda.matmul.allow_tf32`` cannot be read once somebody has set the newer ``fp32_precision``; that one
    can be read either way.
    """
    return (
        _fp32_precision("cuda", "matmul") if _fp32_precision else torch.backends.cuda.matmul.fp32_precision
    ) == "tf32"


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
