"""Public functions as data: how each is called, and what it promises.

A room's ``cases.py`` has its own; tests, the doctor, the tables of the book, fuzz and host times read them here. Importing the
package imports none of it.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kernelbook import check, runtime

Given = dict[str, Any]
FUNCTIONS = ("layer_norm", "attention", "sparse_linear", "scatter_ffn", "nf4", "packed", "moe_lora")
ONE_TARGET = "sm_90"  # for which every configuration is compiled; for others some, to save time
ROOMS = (*FUNCTIONS, "study", "nn", "interop")  # the last for what is installed with the extra of that name


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers; nothing is written where kernels are only compiled."""
    if runtime.COMPILE_ONLY:
        return torch.empty(shape, dtype=torch.float32)
    return torch.randn(shape, dtype=torch.float32, device=runtime.DEVICE) * scale


def draw_shares(*shape: int) -> torch.Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float32, device=runtime.DEVICE)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=runtime.DEVICE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A public function and calls of it.

    Attributes:
        function: what is called, with names for all arguments.
        given: makes the arguments from sizes and options, which are small where nothing is said. Numbers are float32.
        options: those that this case has where nothing else is said.
        reference: the same in plain PyTorch, of the same arguments; ``baseline``: what users would run, if that is another.
        rows: the arguments whose first dimension counts rows that do not know each other, and may be empty, all at once.
        but: properties that the function has not, or that have a test of their own.
        op: what messages call it; by default the first word of the case's name.
        grads: the arguments that have gradients; by default all that are floating point.
        float32: the arguments that stay in float32 whatever the dtype of others.
        lowered: the arguments that autocast lowers; by default all that are floating point, but those in ``float32``.
        writes: the arguments that it changes in place of a result.
        factor: of the error rule.
        what, part: the function in a few words, and whether layers are made of it, for the table of the package.
        plain: options of the call that the table of what is supported shows.
        sizes: for each size or option what fuzz draws: from the smallest to the largest, or one of several.
        largest: the largest factor by which fuzz multiplies the first argument.
        real: sizes of calls on a GPU, one for each way to compute it.
        large: sizes with which an argument or result has more than 2^31 elements.
    """

    function: Callable[..., Any]
    given: Callable[..., Given]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    baseline: Callable[..., Any] | None = None
    rows: tuple[str, ...] = ("x",)
    but: tuple[str, ...] = ()
    op: str = ""
    grads: tuple[str, ...] | None = None
    float32: tuple[str, ...] = ()
    lowered: tuple[str, ...] | None = None
    writes: tuple[str, ...] = ()
    factor: float = check.FORWARD_FACTOR
    what: str = ""
    part: bool = False
    plain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    largest: float = 30.0
    real: Sequence[Mapping[str, Any]] = ()
    large: Mapping[str, Any] | None = None

    def of(self, dtype: torch.dtype = torch.float32, **sizes: Any) -> Given:
        """Arguments of these sizes in a dtype."""
        given = self.given(**{**self.options, **sizes})
        for name in set(floats(given)) - {*self.float32}:
            value = given[name]
            given[name] = torch.empty_like(value, dtype=dtype) if runtime.COMPILE_ONLY else value.to(dtype)
        return given | ({"dtype": dtype} if "dtype" in given else {})

    def results(self, given: Given, function: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        """The tensors that a call returns or writes; of another ``function`` with the same arguments, if there is one."""
        found = [t for t in tree_leaves((function or self.function)(**given)) if isinstance(t, torch.Tensor)]
        return found or [given[name] for name in self.writes]

    def launch(
        self,
        dtype: torch.dtype,
        needs: Sequence[str] | None = None,
        lie: Callable[..., Any] | None = None,
        **sizes: Any,
    ) -> None:
        """A call, and its backward pass by all arguments or those in ``needs``, where kernels are only compiled.

        ``lie`` gives a tensor of floating-point numbers another layout. What is to be computed is not there.
        """
        given = self.of(dtype, **sizes)
        given |= {n: lie(given[n]) for n in floats(given) if lie}
        given |= {n: given[n].requires_grad_() for n in (self.leaves(given) if needs is None else needs)}
        wanted = [r for r in self.results(given) if r.requires_grad]
        torch.autograd.backward(wanted, [torch.empty_like(r) for r in wanted])

    def leaves(self, given: Given) -> list[str]:
        """The names of the arguments that have gradients."""
        return [name for name in floats(given) if self.grads is None or name in self.grads]

    def check(self, given: Given, *, grads: Sequence[str] | None = None, require: bool = True) -> list[check.Verdict]:
        """Results by the error rule, and gradients of these arguments or of all; of results that are gradients there are none."""
        assert self.reference is not None

        def called(function: Callable[..., Any] | None) -> Callable[..., Any]:
            def call(**given: Any) -> list[torch.Tensor]:
                given |= {name: given[name].clone() for name in self.writes}
                return [t if t.is_floating_point() else t.double() for t in self.results(given, function)]

            return call

        baseline = called(self.baseline) if self.baseline else None
        every = self.leaves(given) if self.factor == check.FORWARD_FACTOR else ()
        names = every if grads is None else grads
        how: dict[str, Any] = {"forward_factor": self.factor, "require": require}
        return check.check_op(called(None), called(self.reference), given, grads=names, baseline=baseline, **how)


def floats(given: Given) -> list[str]:
    """The arguments that are tensors of floating-point numbers."""
    return [n for n, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def compile_calls(room: str, target: str, stated: str = "") -> None:
    """Make the calls of a room that are compiled for a GPU, or those that are ``stated`` on a page.

    In float16 on Turing, which has no bfloat16 of its own.
    """
    cases = collect(rooms=FUNCTIONS) | collect("STUDIES", ("study",))
    of_room = importlib.import_module(f"kernelbook.{room}.cases")
    every = [*of_room.compiled(target), *(call for calls in of_room.STATED.values() for call in calls)]
    for name, how in of_room.STATED[stated] if stated else every:
        how = {"dtype": torch.bfloat16} | how
        if target == "sm_75" and how["dtype"] == torch.bfloat16:
            how["dtype"] = torch.float16
        with how.pop("within", contextlib.nullcontext)():
            cases[name].launch(**how)


def collect(kind: str = "CASES", rooms: Sequence[str] = ROOMS) -> dict[str, Any]:
    """What the rooms have under this name, as one dictionary."""
    found: dict[str, Any] = {}
    for room in rooms:
        found |= getattr(importlib.import_module(f"kernelbook.{room}.cases"), kind, {})
    return found
