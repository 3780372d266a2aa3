"""What a Gluon program on Hopper does beside its own instructions: shared memory, barriers, copies, products, partitions.

This is the machine behind :mod:`kernelbook.lab.gluon`, which says what is checked. One :class:`Program` is what one program of
the grid has under way. Its partitions run in threads, one at a time, from one wait to the next.
"""

import dataclasses
import operator
import random
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kernelbook import runtime  # noqa: F401  before Triton, which it sets up

# isort: split
import triton.language as tl
from triton.experimental.gluon import language
from triton.runtime import interpreter

# What a GluonError is about, and what to look at first.
KINDS = {
    "wrong phase": "a wait returned for a phase that was over: count how often the buffer was used before",
    "read too early": "wait for the barrier, or for the group, of the copy",
    "missing fence": "fence_async_shared() stands between what threads write and what TMA or tensor cores do with it",
    "expect": "expect() announces the bytes of all copies of the phase, no more and no less",
    "arrivals": "init() says how many arrivals end a phase",
    "deadlock": "everybody waits, and nothing is under way that would end a wait",
    "overwritten": "wait until the buffer has been read",
    "result too early": "warpgroup_mma_wait() returns the result",
    "layout": "gl.convert_layout() moves a tile from one layout to another",
    "unfinished": "wait for it before the program ends",
    "out of range": "an index",
    "not interpreted": "see kernelbook.lab.gluon for what is",
}


class GluonError(AssertionError):
    """A kernel does what it may not. ``kind`` is one of :data:`KINDS`; the text says what, where and who."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text} ({KINDS[kind]})")
        self.kind = kind


def wrong(kind: str, text: str) -> GluonError:
    """Return the error that says at the end where the program is."""
    return GluonError(kind, f"{text}, at {Program.current.place()}")


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened in a program, in the order of one run.

    Attributes:
        partition: the number of the partition; -1 for what no partition does: a copy lands.
        kind: copy | land | expect | arrive | ends | wait | pass | product | done | store | load | write
        what: a buffer or a barrier by its name in the kernel.
        phase: of a barrier: the phase that is waited for, arrived at, or over.
        line: in the kernel's file.
        text: the same in words.
    """

    partition: int
    kind: str
    what: str
    phase: int
    line: int
    text: str


def make_tensor(data: np.ndarray, dtype: Any, layout: Any = None) -> Any:
    """A tile of numbers in the interpreter; without a layout whatever layout is asked for."""
    if data.ndim == 0 or layout is False:
        return tl.tensor(interpreter.TensorHandle(np.atleast_1d(data), dtype), dtype)
    kind = language.distributed_type(dtype, [*data.shape], layout or language.AutoLayout())
    return tl.tensor(interpreter.TensorHandle(data, dtype), kind)


def warps_of(layout: Any) -> int | None:
    """How many warps a layout spreads a tile over; None where it does not say."""
    while hasattr(layout, "parent"):
        layout = layout.parent
    warps = getattr(layout, "warps_per_cta", None)
    return None if warps is None else int(np.prod(warps))


# --- one program ------------------------------------------------------------------------------------------------------


class Partition:
    """Warps that run one function: what they have under way, and what they wait for."""

    def __init__(self, number: int, name: str, num_warps: int) -> None:
        self.number, self.name, self.num_warps = number, name, num_warps
        self.products: list[Product] = []
        self.stores: list[Slot] = []  # which TMA is reading
        self.stored: list[Slot] = []  # by threads, and not fenced
        self.fenced: list[Slot] = []  # and the threads have not met since
        self.waiting: tuple[Barrier, int, int] | None = None  # barrier, phase, line
        self.waited: dict[Barrier, tuple[int, int]] = {}  # phase and line of the last wait that returned at once
        self.turn = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.done = self.cancelled = False
        self.notes: dict[str, Any] = {}  # of the functions that stand for assembly

    def __str__(self) -> str:
        return f"{self.name} (partition {self.number})" if self.number >= 0 else self.name

    def is_stuck(self) -> bool:
        return self.waiting is not None and self.waiting[0].parity == self.waiting[1]


class Program:
    """What one program of the grid has under way, and what has happened in it.

    Args:
        number: of the programs of the launch.
        seed: which of the orders that the machine allows.
        num_warps: of the launch.
        any_tile: do not ask whether wgmma takes a tile of this shape.
    """

    current: "Program"

    def __init__(self, number: int, seed: int, num_warps: int, name: str, files: set[str], any_tile: bool) -> None:
        self.files, self.any_tile = files, any_tile
        self.order = (seed + number) % 4  # 0: late, the oldest first; 1: late, the newest first; 2: at once; 3: drawn
        self.random = random.Random(f"{seed} {number}")
        self.groups: list[list[Copy]] = [[]]  # of asynchronous copies by threads; the last one is open
        self.flying: list[Copy] = []  # of TMA
        self.here = Partition(-1, name, num_warps)
        self.partitions = [self.here]
        self.main = self.here
        self.scheduler = threading.Semaphore(0)
        self.unfenced: list[Barrier] = []  # made, and not fenced since
        self.events: list[Event] = []
        self.barriers: list[Barrier] = []

    def line(self) -> int:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno

    def tell(self, kind: str, what: object, text: str, phase: int = -1, partition: int | None = None) -> None:
        number = self.here.number if partition is None else partition
        self.events.append(Event(number, kind, str(what), phase, self.line(), text))

    def place(self) -> str:
        return f"{self.here}, line {self.line()}"

    # --- who goes on

    def land(self) -> None:
        """One copy arrives: of those that somebody waits for, if there are any."""
        wanted = [part.waiting[0] for part in self.partitions if not part.done and part.waiting is not None]
        first = [copy for copy in self.flying if copy.barrier in wanted] or self.flying
        at = {0: 0, 1: -1, 2: 0, 3: self.random.randrange(len(first))}[self.order]
        copy = first[at]
        self.flying.remove(copy)
        copy.land()

    def wait(self, barrier: "Barrier", phase: int) -> None:
        here = self.here
        here.waiting = (barrier, phase, self.line())
        if here.is_stuck():
            self.tell("wait", barrier, f"{here} waits for {barrier} to end phase {phase}", phase)
        else:
            here.waited[barrier] = (phase, self.line())
        if here is self.main:
            while here.is_stuck():
                if not self.flying:
                    raise self.deadlock()
                self.land()
        elif here.is_stuck() or (self.order == 3 and self.random.random() < 0.5):
            self.scheduler.release()
            here.turn.acquire()
        if here.cancelled:
            raise SystemExit
        here.waiting = None
        self.tell("pass", barrier, f"{here} has waited for phase {phase} of {barrier}", phase)

    def deadlock(self) -> GluonError:
        """Who waits for what. Bytes that were announced and do not come are a fault of their own."""
        waiting = [(part, *part.waiting) for part in self.partitions if not part.done and part.waiting is not None]
        said = "; ".join(
            f"{part} waits in line {line} for {barrier} to end phase {phase}, which {barrier.needs()}"
            for part, barrier, phase, line in waiting
        )
        short = [barrier for _, barrier, _, _ in waiting if barrier.missing == 0 and barrier.bytes > 0]
        return GluonError("expect" if short else "deadlock", said)

    def specialize(self, functions: Sequence[tuple[Any, tuple[Any, ...]]], num_warps: Sequence[int]) -> None:
        """Runs partitions, the first one with the warps of the program, until all are done."""
        trace = sys.gettrace()

        def run(part: Partition, function: Any, args: tuple[Any, ...]) -> None:
            sys.settrace(trace)
            part.turn.acquire()
            try:
                if not part.cancelled:
                    function(*args)
                if not part.cancelled:
                    self.finish(part)
            except SystemExit:
                pass
            except BaseException as error:
                part.error = error
            part.done = True
            self.scheduler.release()

        warps = [self.main.num_warps, *(operator.index(n) for n in num_warps)]
        names = [getattr(function, "__name__", "partition") for function, _ in functions]
        if len(warps) != len(names):
            raise GluonError(
                "not interpreted", f"warp_specialize has {len(names)} functions and warps for {len(warps) - 1} workers"
            )
        parts = self.partitions = [Partition(i, *both) for i, both in enumerate(zip(names, warps, strict=True))]
        for part, (function, args) in zip(parts, functions, strict=True):
            part.stored, part.fenced = [*self.main.stored], [*self.main.fenced]
            threading.Thread(target=run, args=(part, function, args), daemon=True).start()
        try:
            self.schedule(parts)
        finally:
            for part in parts:
                if not part.done:
                    part.cancelled = True
                    self.go_on(part)
            self.here = self.main
            self.partitions = [self.main]

    def go_on(self, part: Partition) -> None:
        self.here = part
        part.turn.release()
        self.scheduler.acquire()

    def schedule(self, parts: list[Partition]) -> None:
        while not all(part.done for part in parts):
            ready = [part for part in parts if not part.done and not part.is_stuck()]
            if self.order == 3 and self.flying and self.random.random() < 0.3:
                self.land()
            elif ready:
                # The last partition, as a rule the producer, as far ahead as it can be; or behind; or drawn.
                at = {0: -1, 1: -1, 2: 0, 3: self.random.randrange(len(ready))}[self.order]
                part = ready[at]
                self.go_on(part)
                if part.error is not None:
                    raise part.error
            elif self.flying:
                self.land()
            else:
                raise self.deadlock()

    def finish(self, part: Partition) -> None:
        """A partition or the program ends."""
        if part.stores:
            raise GluonError("unfinished", f"{part} ends while TMA still copies {part.stores[0]} to global memory")
        if part.products:
            raise GluonError("unfinished", f"{part} ends while a product is under way")
        if part is self.main:
            for copy in [*self.flying, *(copy for group in self.groups for copy in group)]:
                raise GluonError("unfinished", f"{part} ends while {copy.memory} is being written")
            for barrier in self.barriers:
                if barrier.bytes:
                    raise GluonError("expect", f"at the end of {part} {barrier} {barrier.needs()}")


# --- barriers ---------------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends when so many have arrived and all bytes that were announced are there."""

    def __init__(self, owner: "Shared | None" = None, index: int | None = None) -> None:
        self.owner, self.at = owner, index
        self.count = self.missing = self.bytes = self.over = 0

    def __str__(self) -> str:
        name = "a barrier" if self.owner is None else self.owner.name
        return name if self.at is None else f"{name}[{self.at}]"

    @property
    def parity(self) -> int:
        """Of the phase that is not over."""
        return self.over % 2

    def needs(self) -> str:
        """What the phase waits for."""
        if not self.count:
            return "was never initialized"
        amount = f"{self.bytes} bytes" if self.bytes >= 0 else f"an expect() for {-self.bytes} bytes that came"
        return f"still needs {self.missing} of {self.count} arrivals and {amount}"

    def init(self, count: int) -> None:
        self.count = self.missing = count
        Program.current.unfenced.append(self)
        Program.current.barriers.append(self)

    def arrive(self, bytes: int = 0, arrivals: int = 1) -> None:
        """Arrivals at the phase, bytes that are announced, or (negative) bytes that have come."""
        program = Program.current
        if not self.count:
            raise wrong("not interpreted", f"{self} is used before mbarrier.init")
        self.bytes += bytes
        self.missing -= arrivals
        if self.missing < 0:
            raise wrong("arrivals", f"{self} gets one arrival more than its {self.count}, in phase {self.parity}")
        if self.missing == 0 and self.bytes < 0:
            raise GluonError(
                "expect",
                f"copies bring {-self.bytes} bytes more to {self} than expect() announced for phase {self.parity}",
            )
        if self.missing == 0 and self.bytes == 0:
            late = [copy for copy in program.flying if copy.barrier is self]
            if late:
                raise GluonError(
                    "expect",
                    f"phase {self.parity} of {self} ends while {late[0].memory}, of {late[0].values.nbytes} bytes, is under way: "
                    "expect() announced too few",
                )
            program.tell("ends", self, f"phase {self.parity} of {self} is over", self.parity, -1)
            self.over, self.missing = self.over + 1, self.count


# --- shared memory ----------------------------------------------------------------------------------------------------


class Slot:
    """A buffer in shared memory, which is written as a whole: what ``index`` gives."""

    def __init__(self, owner: "Shared", at: int) -> None:
        self.owner, self.at = owner, at
        self.is_indexed = False
        self.visible = False  # to TMA and tensor cores
        self.written = False
        self.unread = False  # what TMA brought
        self.copy: Copy | None = None  # under way

    def __str__(self) -> str:
        return f"{self.owner.name}[{self.at}]" if self.is_indexed else self.owner.name


class Shared:
    """Shared memory, or a part of it: a ``shared_memory_descriptor``."""

    def __init__(self, data: Any, dtype: Any, layout: Any, slots: list[Slot] | None = None, name: str = "") -> None:
        self.data, self.dtype, self.layout, self.name = data, dtype, layout, name or "shared memory"
        many = slots is None and dtype != tl.int64 and data.ndim > 1
        self.slots = slots or [Slot(self, i) for i in range(len(data) if many else 1)]
        self.barriers: list[Barrier] = []
        if slots is None and dtype == tl.int64:
            one = data.ndim == 1
            self.barriers = [Barrier(self, None if one else i) for i in range(1 if one else len(data))]

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[Any], layout: Any, value: Any = None) -> "Shared":
        size = [operator.index(n) for n in shape]
        memory = cls(np.empty(size, interpreter._get_np_dtype(dtype)), dtype, layout)
        memory.destroy()
        if value is not None:
            memory.store(value)
        return memory

    def __str__(self) -> str:
        return str(self.slots[0]) if len(self.slots) == 1 else self.name

    @property
    def shape(self) -> list[int]:
        return [len(self.data), *self.data[0].shape] if isinstance(self.data, list) else [*self.data.shape]

    @property
    def type(self) -> "Shared":
        return self

    @property
    def barrier(self) -> Barrier:
        if len(self.barriers) != 1:
            raise GluonError("not interpreted", f"{self.name} is used where one barrier is expected")
        return self.barriers[0]

    def destroy(self) -> None:
        """Bits that are NaN, or minus one."""
        self.data[...] = np.frombuffer(b"\xff" * self.data.itemsize, self.data.dtype)[0]

    # --- parts

    def _part(self, data: Any, slots: list[Slot], dtype: Any = None, layout: Any = None) -> "Shared":
        return Shared(data, dtype or self.dtype, layout or self.layout, slots, self.name)

    def index(self, i: Any) -> "Shared":
        i = operator.index(i)
        if not 0 <= i < len(self.data):
            raise wrong("out of range", f"{self.name} has {len(self.data)} parts, and {i} is asked for")
        part = self._part(self.data[i], [self.slots[min(i, len(self.slots) - 1)]])
        part.slots[0].is_indexed = len(self.slots) > 1
        part.barriers = self.barriers[i : i + 1]
        return part

    def slice(self, start: Any, length: Any, dim: int = 0) -> "Shared":
        start, length = operator.index(start), operator.index(length)
        if not 0 <= start <= start + length <= self.data.shape[dim]:
            raise GluonError("out of range", f"{start} to {start + length} of {self}, which has {self.data.shape[dim]}")
        return self._part(self.data[(slice(None),) * dim + (slice(start, start + length),)], self.slots)

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._part(self.data.transpose([operator.index(i) for i in order]), self.slots)

    def reshape(self, shape: Sequence[Any]) -> "Shared":
        return self._part(self.data.reshape([operator.index(n) for n in shape]), self.slots)

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Shared":
        if len(shape) == 3:  # halves of tiles
            halves = [half for tile in self.data for half in np.split(tile, 2, axis=1)]
            return self._part(halves, [slot for slot in self.slots for _ in range(2)], dtype, layout)
        return self._part(self.data.view(interpreter._get_np_dtype(dtype)).reshape(shape), self.slots, dtype, layout)

    _reinterpret = reinterpret  # Triton 3.6 to 3.8

    # --- what threads do

    def check_free(self) -> None:
        """Nobody reads or writes it."""
        program = Program.current
        for part in program.partitions:
            for product in part.products:
                for slot in {*self.slots} & {*product.slots}:
                    raise wrong(
                        "overwritten", f"{slot} is written while a product of {part} reads it, from line {product.line}"
                    )
            for slot in {*self.slots} & {*part.stores}:
                raise wrong("overwritten", f"{slot} is written while TMA copies it to global memory")
        for slot in self.slots:
            if slot.copy is not None:
                raise wrong("overwritten", f"{slot} is written while the copy from line {slot.copy.line} is under way")

    def check_there(self, who: str) -> None:
        """What is read has been written."""
        program = Program.current
        for slot in self.slots:
            slot.unread = False
            if slot.copy is None and slot.written:
                continue
            if slot.copy is None:
                said, barrier = f"{who} {slot} at {program.place()}, and nothing has been written there", None
                passed = [*program.here.waited.items()][-1:]
            else:
                barrier = slot.copy.barrier
                said = f"{who} {slot} at {program.place()} while the copy from line {slot.copy.line} is under way"
                passed = [(b, w) for b, w in program.here.waited.items() if b is barrier]
            for waited, (phase, line) in passed:
                if waited.over == 0 or barrier is not None:
                    raise GluonError(
                        "wrong phase", f"{said}; the wait for phase {phase} of {waited} in line {line} returned at once: "
                        f"{waited} is in phase {waited.parity}"
                    )  # fmt: skip
            raise GluonError("read too early", said)

    def overwrite(self, data: np.ndarray) -> None:
        self.data[...] = data
        for slot in self.slots:
            slot.visible, slot.written, slot.copy = False, True, None
            Program.current.here.stored.append(slot)

    def store(self, value: Any) -> None:
        if [*value.shape] != self.shape or value.dtype != self.dtype:
            raise wrong(
                "layout", f"{self} is of {self.shape} {self.dtype}, and {[*value.shape]} {value.dtype} is stored"
            )
        self.check_free()
        self.overwrite(value.handle.data.astype(self.data.dtype, copy=False))
        Program.current.tell("store", self, f"threads store to {self}")

    def load(self, layout: Any) -> Any:
        self.check_there("threads read")
        Program.current.tell("load", self, f"threads read {self}")
        return make_tensor(self.data.copy(), self.dtype, layout)

    def read_by_async_proxy(self, who: str) -> None:
        """Reads of TMA and tensor cores: of what threads have written, only behind a fence."""
        self.check_there(who)
        for slot in self.slots:
            if not slot.visible and slot not in Program.current.here.fenced:
                raise wrong("missing fence", f"{who} {slot}, which threads have stored and not fenced")


# --- copies -----------------------------------------------------------------------------------------------------------


class Copy:
    """A copy into shared memory that is under way: whose buffer nobody may touch."""

    def __init__(self, memory: Shared, values: np.ndarray, barrier: Barrier | None = None) -> None:
        self.memory, self.values, self.barrier, self.line = memory, values, barrier, Program.current.line()
        memory.check_free()
        for slot in memory.slots:
            if slot.unread and barrier is not None:
                raise wrong("overwritten", f"{slot} is written, and nobody has read what the last copy brought")
        memory.destroy()
        for slot in memory.slots:
            slot.visible, slot.copy, slot.written = False, self, False
        Program.current.tell("copy", memory, f"a copy to {memory} starts")

    def land(self) -> None:
        if self.barrier is None:
            self.memory.overwrite(self.values)
        else:
            self.memory.data[...] = self.values.reshape(self.memory.data.shape)
            for slot in self.memory.slots:
                slot.visible = slot.written = slot.unread = True
                slot.copy = None
        Program.current.tell("land", self.memory, f"{self.memory} has arrived", partition=-1)
        if self.barrier is not None:
            self.barrier.arrive(-self.values.nbytes, 0)


class Tiles:
    """A tensor descriptor: tiles of a tensor, in the layout that they have in shared memory."""

    def __init__(self, descriptor: Any) -> None:
        base = descriptor.base
        self.data = base.detach().as_strided([*descriptor.shape], [*descriptor.strides]).numpy()
        self.block_shape = [*descriptor.block_shape]
        self.layout = descriptor.layout
        self.dtype = {torch.float16: tl.float16, torch.float32: tl.float32}[base.dtype]
        self.block_type = language.block_type(self.dtype, self.block_shape)
        self.shape = [*descriptor.shape]

    @property
    def type(self) -> "Tiles":
        return self

    def part(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor, and of a tile: what both have."""
        begins = [operator.index(i) for i in at]
        if begins[-1] * self.data.itemsize % 16:
            raise wrong("layout", f"TMA copies pieces of 16 bytes, and {begins[-1]} of {self.dtype} is within one")
        spans = [
            (max(0, i), max(0, min(i + n, size)))
            for i, n, size in zip(begins, self.block_shape, self.data.shape, strict=True)
        ]
        return (
            tuple(slice(low, max(low, high)) for low, high in spans),
            tuple(slice(low - i, max(low, high) - i) for (low, high), i in zip(spans, begins, strict=True)),
        )

    def check(self, memory: Shared) -> None:
        if np.prod(memory.shape) != np.prod(self.block_shape) or memory.dtype != self.dtype:
            raise wrong(
                "layout",
                f"the descriptor has tiles of {self.block_shape} {self.dtype}, {memory} is of {memory.shape} {memory.dtype}",
            )
        if memory.layout != self.layout and not Program.current.any_tile:
            raise wrong("layout", f"{memory} has the layout {memory.layout}, the descriptor {self.layout}")


# --- products ---------------------------------------------------------------------------------------------------------


class Product:
    """The result of a product that may be under way, as ``warpgroup_mma`` returns it."""

    def __init__(self, value: Any, slots: Iterable[Slot]) -> None:
        self._value, self.slots, self.line = value, [*slots], Program.current.line()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise wrong("result too early", f"the product of line {self.line} is used and nobody has waited for it")
