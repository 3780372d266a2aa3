"""The spine: what every operator of the package needs, once.

A call, from the user's line to the kernel::

    layer_norm(x, ...)         the package: documentation, defaults, numbers as numbers
      Op.__call__              autocast; a plan; who answers: this file, or PyTorch's dispatcher where somebody watches
        _Recorded.forward      where a gradient is wanted: keeps what the backward pass reads
          Op.execute           new memory, then the package's run
            Launch.__call__    the kernel

and back: ``_Recorded.backward`` -> ``Op.differentiate`` -> the package's gradient, which calls an ``Op`` of its own.

A package says only what is its own, see :class:`Op`. Here and in :mod:`kernelbook.launch` stands what is asked of PyTorch's
private parts.
"""

import functools
import hashlib
import threading
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor  # one guard of a compiled call less than by the module
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime
from kernelbook.memory import PLAIN, empty, empty_again
from kernelbook.tensors import check_versions, fp32_precision, is_transformed, with_versions, without_autocast

NAMESPACE = "kernelbook"


def _hash_of_library() -> str:
    root = Path(__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if "lab" not in path.relative_to(root).parts]
    return hashlib.sha256(b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)).hexdigest()[:8]


# The last argument of an operator in a compiled graph. PyTorch keeps on disk what it made of a graph, operators by their names:
# after a change of the library that must not be found again.
SOURCES = _hash_of_library()

# --- who answers a call ---------------------------------------------------------------------------------------------

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_trace, _profiling = torch._C._get_tracing_state, torch._C._autograd._profiler_enabled
_autocasts = torch._C._is_any_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active  # to Dynamo a constant
_dynamo_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def needs_dispatcher() -> bool:
    """Return whether PyTorch's dispatcher has something to add to every call: a compiler, mode, transform, trace or profiler."""
    return is_transformed() or _function_modes() > 0 or _profiling() or _trace() is not None or _dispatch_modes() > 0


# --- plans ----------------------------------------------------------------------------------------------------------

MOST_PLANS = 2**14
_plans: dict[tuple[Any, ...], Any] = {}  # a bounded FIFO cache
_plans_lock = threading.Lock()


def forget_plans() -> None:
    """Drop all plans, so that the next calls make new ones."""
    with _plans_lock:
        _plans.clear()


def _keep_plan(key: tuple[Any, ...], plan: Any) -> Any:
    """Return a plan as it is kept: with what the outputs of its calls are like, once there was one."""
    kept = SimpleNamespace(plan=plan, forms=None)
    with _plans_lock:
        if key not in _plans and len(_plans) >= MOST_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = kept
    return kept


def _readers(
    name: str, parameters: Sequence[Any], given: int, results: Sequence[str], saves: Sequence[str], keeps: Sequence[str]
) -> tuple[Callable[..., Any], ...]:
    """Write the functions that read a call argument by argument, as ``dataclasses`` writes ``__init__``: a loop takes three times as long.

    Of a call ``key`` returns whether all tensors are PyTorch's own and none is to be negated, and the key of its plan: of each
    tensor shape, strides, dtype, device and alignment, all other arguments, and the process's modes, a superset of what any
    plan depends on. ``requires_grad`` tells whether a tensor does. Of a call and its outputs ``saved`` returns what the
    backward pass reads: tensors that autograd saves and others, arguments that are no tensors, and the dtypes of tensors.
    """
    parts, plain, grad, dtypes, others = [], [], [], [], []
    for parameter in parameters:
        arg, kind = parameter.name, str(parameter.type)
        if "Tensor" not in kind:
            parts.append(f"tuple({arg})" if kind.startswith("List") else arg)
            others.append(arg)
            continue
        form = f"{arg}.shape, {arg}.stride(), {arg}.dtype, {arg}.device, {arg}.data_ptr() % 16"
        parts.append(form if kind == "Tensor" else f"None if {arg} is None else ({form})")
        plain.append(f"({arg} is None or type({arg}) in _plain and not {arg}.is_neg())")
        if arg not in keeps:
            grad.append(f"({arg} is not None and {arg}.requires_grad)")
        dtypes.append(f"None if {arg} is None else {arg}.dtype")
    names = [parameter.name for parameter in parameters]
    saved = (f"({', '.join(each)}{',' * bool(each)})" for each in (saves, keeps, others, dtypes))
    text = f"""
def key({", ".join(names)}):
    return {" and ".join(plain)}, (_name, {", ".join(parts)}, _runtime.compile_target, _same_bits(), _fp32())
def requires_grad({", ".join(names[:given])}):
    return {" or ".join(grad) or False}
def saved({", ".join([*names, *results])}):
    return {", ".join(saved)}
"""
    # Names that no argument has; what is called is written in C.
    scope: dict[str, Any] = {"_name": name, "_plain": PLAIN, "_runtime": runtime, "_fp32": fp32_precision}
    scope["_same_bits"] = runtime._same_bits.get
    exec(text, scope)  # noqa: S102
    return scope["key"], scope["requires_grad"], scope["saved"]


# --- operators ------------------------------------------------------------------------------------------------------

# By operator what PyTorch holds of it. A reload of this module keeps it: packages that are reloaded declare theirs again.
_libraries: dict[str, torch.library.Library] = globals().get("_libraries", {})


def named_arguments(parameters: str) -> Any:
    """Return the class of named tuples that hold the arguments of an operator, as its schema lists them."""
    schema = torch._C.parse_schema(f"{NAMESPACE}::call({parameters}) -> ()")
    return namedtuple("Call", [parameter.name for parameter in schema.arguments])


class Op:
    """One operator: ``kernelbook::<name>`` to PyTorch's dispatcher, and the short way to its kernels where nobody watches.

    Args:
        schema: name, arguments and results as ``torch.library.define`` takes them. The arguments of a call are positional. A last
            argument ``bool record`` is filled in: whether autograd records the call.
        check: raises unless the arguments are right; safe for symbolic sizes. Runs where a plan is made, not where one is
            kept. An operator that only other operators call needs none.
        outputs: from the arguments a tuple of new tensors, one for each result; ``None`` for one that this call does without,
            in whose place the dispatcher sees a tensor of no elements. Safe for symbolic sizes: it is the fake kernel too.
        plan: from the arguments what is decided for calls of this kind: launches, grids, numbers; no tensor, stream or
            address. ``None``: there is nothing to compute, and outputs are zeros.
        run: ``run(plan, outputs, *arguments)`` fills the outputs.
        results: how many of the outputs a caller gets; those behind them are for the backward pass.
        saves: names of arguments and outputs that the backward pass reads.
        keeps: names of arguments without a gradient (ids, packed weights) that it reads too: no saved-tensor hook sees them,
            and activation checkpoints need not store them.
        autocast: names of arguments that autocast lowers, or a function: from autocast's dtype and the arguments to
            the arguments.
        kind: from the arguments a smaller key, under which calls of several shapes share a plan, and their checks with it, or
            ``None``. A cache that grows by a token in each call is the case that it is for.
        backward: ``backward(call, *gradients)`` returns the gradients of the tensor arguments, or of the first of them.
            ``call.saved`` and ``call.kept`` are tuples in the order of the names; ``call.wanted`` has for each tensor argument the
            dtype of its gradient, ``None`` where none is wanted; plain arguments are attributes, and together ``call.plain``.
            Without ``backward``, to differentiate the operator is an error.
    """

    def __init__(
        self,
        schema: str,
        *,
        check: Callable[..., object] = lambda *_: None,
        outputs: Callable[..., tuple[Any, ...]],
        plan: Callable[..., Any],
        run: Callable[..., object],
        results: int = 1,
        saves: Sequence[str] = (),
        keeps: Sequence[str] = (),
        autocast: Sequence[str] | Callable[..., tuple[Any, ...]] = (),
        kind: Callable[..., tuple[Any, ...] | None] = lambda *_: None,
        backward: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.check, self.outputs, self.plan, self.run, self.backward = check, outputs, plan, run, backward
        self.results, self.kind = results, kind
        parsed = torch._C.parse_schema(f"{NAMESPACE}::{schema}")
        self.name, parameters = parsed.name, parsed.arguments
        names = [parameter.name for parameter in parameters]
        self._records = names[-1] == "record"
        self._given = len(names) - self._records  # arguments that a caller passes
        self._tensors = tuple(i for i, parameter in enumerate(parameters) if "Tensor" in str(parameter.type))
        self._autocast: Any = autocast if callable(autocast) else frozenset(map(names.index, autocast))
        self._mutated = tuple(i for i in self._tensors if getattr(parameters[i].alias_info, "is_write", False))
        self._num_outputs = len(parsed.returns)
        returned = [result.name or f"_{i}" for i, result in enumerate(parsed.returns)]
        self._key, self._requires_grad, self._saved = _readers(
            self.name, parameters, self._given, returned, saves, keeps
        )
        plain = [name for i, name in enumerate(names) if i not in self._tensors]
        self._recorded: Any = namedtuple("Recorded", ["saved", "kept", "wanted", "plain", *plain])  # type: ignore[misc]
        self.operator = self._declare(schema)

    # --- a call

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            return self._compiled(args)
        if _autocasts():
            args = self._in_autocast_dtype(args)
        if needs_dispatcher():
            return self._dispatch(args)
        try:
            wanted = torch.is_grad_enabled() and self._requires_grad(*args)
            given = (*args, wanted) if self._records else args
            plain, key = self._key(*given)
            kept = _plans.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or some without memory
            return self._dispatch(args)
        if not plain or (kept is None and any(args[i] is not None and args[i].is_meta for i in self._tensors)):
            return self._dispatch(args)
        kept = kept or self._new_plan(key, given)
        if wanted and self.results:
            return _record((self, kept, given), *[given[i] for i in self._tensors])
        outputs = self.execute(kept, given)
        return outputs[0] if self.results == 1 else outputs[: self.results]

    def check_once(self, *args: Any) -> None:
        """Check a call that PyTorch's own functions answer: once for each kind of call, as where a plan is made."""
        if is_dynamo_compiling():
            return
        try:
            _, key = (False, None) if needs_dispatcher() else self._key(*args)
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or some without memory
            key = None
        if key is None or key not in _plans:
            self.check(*args)
            if key is not None:
                _keep_plan(key, None)

    def _new_plan(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        kind = self.kind(*args)
        shared = key if kind is None else (self.name, kind, *key[-3:])
        kept = _plans.get(shared)
        if kept is None:
            self.check(*args[: self._given])
            kept = _keep_plan(shared, self.plan(*args))
        return kept if kind is None else _keep_plan(key, kept.plan)

    def execute(self, kept: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return new outputs that the kernels have filled."""
        outputs = empty_again(kept.forms, args[self._tensors[0]]) if kept.forms else None
        if outputs is None:
            outputs = self.outputs(*args)
            kept.forms = [None if out is None else (tuple(out.shape), out.stride(), out.dtype) for out in outputs]
        if kept.plan is not None:
            self.run(kept.plan, outputs, *args)
        else:
            for output in outputs:
                if output is not None:
                    output.zero_()
        if self._mutated:
            # A backward pass that has kept what was in them then raises PyTorch's error instead of reading what is there now.
            torch._C._increment_version([args[i] for i in self._mutated if args[i] is not None])
        return outputs

    def _in_autocast_dtype(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments as autocast, where it is on, has PyTorch's own operators take them."""
        dtype = arguments.autocast_dtype(args[self._tensors[0]])
        if dtype is None or callable(self._autocast):
            return args if dtype is None else self._autocast(dtype, *args)
        return tuple(arguments.lowered(arg, dtype) if i in self._autocast else arg for i, arg in enumerate(args))

    # --- where PyTorch's dispatcher answers

    def _dispatch(self, args: tuple[Any, ...]) -> Any:
        self.check(*args)
        return self._by_operator(args, "")

    def _compiled(self, args: tuple[Any, ...]) -> Any:
        """Put one opaque operator into the compiler's graph; what its fake kernel checks need not be traced."""
        args = self._in_autocast_dtype(args)
        for i in self._tensors:
            if args[i] is not None and not isinstance(args[i], Tensor):
                self.check(*args)
        return self._by_operator(args, SOURCES)

    def _by_operator(self, args: tuple[Any, ...], sources: str) -> Any:
        if self._records:
            # What torch.func.vmap has wrapped does not say that a gradient is wanted of it.
            wanted = torch.is_grad_enabled() and (self._requires_grad(*args) or _transforms())
            args = (*args, wanted)
        found = self.operator(*args, sources)
        if self._num_outputs <= 1:
            return found
        return found[0] if self.results == 1 else found[: self.results]

    def _declare(self, schema: str) -> Any:
        """Declare the operator; what a package that is being reloaded has declared before is dropped."""
        if self.name in _libraries:
            _libraries[self.name]._destroy()
        owner = _libraries[self.name] = torch.library.Library(NAMESPACE, "FRAGMENT")
        before, arrow, after = schema.rpartition(") ->")
        tags = (torch.Tag.pt2_compliant_tag,)
        short = self.name.removeprefix(f"{NAMESPACE}::")
        torch.library.define(
            self.name, f"{before.removeprefix(short)}, str sources{arrow}{after}", lib=owner, tags=tags
        )
        torch.library.impl(self.name, "default", self._dispatched, lib=owner)
        torch.library.register_fake(self.name, self._fake, lib=owner)
        if not self._mutated:
            differentiate, setup = self._differentiate_dispatched, self._setup_context
            torch.library.register_autograd(self.name, differentiate, setup_context=setup, lib=owner)
        return getattr(getattr(torch.ops, NAMESPACE), short).default

    def _dispatched(self, *args: Any) -> Any:
        # Dynamo, where it is at work, would read this too; it does not read while a program that it has made runs.
        run = self._execute_dispatched if _dynamo_callback() is None else self._untraced
        return run(*args)

    @functools.cached_property
    def _untraced(self) -> Callable[..., Any]:
        return torch.compiler.disable(self._execute_dispatched)

    def _execute_dispatched(self, *args: Any) -> Any:
        args, sources = args[:-1], args[-1]
        self._refuse_to_compile(sources)
        _, key = self._key(*args)
        return self._for_dispatcher(args, self.execute(_plans.get(key) or self._new_plan(key, args), args))

    def _fake(self, *args: Any) -> Any:
        args, sources = args[:-1], args[-1]
        self._refuse_to_compile(sources)
        self.check(*args[: self._given])
        return self._for_dispatcher(args, self.outputs(*args))

    def _refuse_to_compile(self, sources: str) -> None:
        if sources and runtime.in_same_bits():
            raise ValueError(
                f"{self.name}: torch.compile must be off within same_bits(), since the compiler cuts sums by their sizes; "
                f"call the model as it is, or capture it as a CUDA graph"
            )

    def _for_dispatcher(self, args: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
        """Return the outputs as an operator returns them: it cannot return ``None``."""
        like = args[self._tensors[0]]
        found = tuple(empty((0,), like.dtype, like) if output is None else output for output in outputs)
        return found[0] if self._num_outputs == 1 else found if found else None

    # --- gradients

    def save(self, ctx: Any, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Have autograd's context hold what the backward pass reads."""
        saved, kept, plain, dtypes = self._saved(*args, *outputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        # No hook sees what is kept, and autograd does not compare its versions.
        ctx.call = kept, with_versions(*kept) if kept else (), plain, dtypes, runtime.in_same_bits()

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        self.save(ctx, inputs[:-1], outputs)
        ctx.mark_non_differentiable(*outputs[self.results :])

    def _differentiate_dispatched(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        found = self.differentiate(ctx, [ctx.needs_input_grad[i] for i in self._tensors], gradients)
        of = dict(zip(self._tensors, found, strict=False))
        return tuple(of.get(i) for i in range(len(ctx.needs_input_grad)))

    def differentiate(self, ctx: Any, needs: Sequence[bool], gradients: Sequence[Tensor | None]) -> Sequence[Any]:
        """Return the gradients of the tensor arguments, or of the first of them, computed in the mode of the forward pass."""
        if self.backward is None:
            raise RuntimeError(f"{self.name} cannot be differentiated")
        gradients = gradients[: self.results]
        first = next((gradient for gradient in gradients if gradient is not None), None)
        if first is None:
            return ()
        saved = ctx.saved_tensors  # once: activation checkpoints unpack what they recompute a single time
        kept, versions, plain, dtypes, same_bits = ctx.call
        check_versions(versions)
        wanted = [dtype if need else None for dtype, need in zip(dtypes, needs, strict=True)]
        call = self._recorded(saved, kept, wanted, plain, *plain)
        if same_bits == runtime.in_same_bits() and not _autocasts():
            found = self.backward(call, *gradients)
        else:
            # Autograd may run this in a thread of its own, and later. Dtypes are settled: autocast would lower them.
            with runtime.same_bits(same_bits), without_autocast(first):
                found = self.backward(call, *gradients)
        # For one that is not wanted the dispatcher returns a tensor of no elements.
        return [gradient if need else None for gradient, need in zip(found, needs, strict=False)]


class _Recorded(torch.autograd.Function):
    """The one function that autograd records, for every operator, where nobody watches.

    Autograd sees the tensors; the whole call comes with them as one argument, since each one costs the host.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Op, Any, tuple[Any, ...]], *tensors: Any) -> Any:
        op, kept, args = call
        outputs = op.execute(kept, args)
        op.save(ctx, args, outputs)
        ctx.op = op
        return outputs[0] if op.results == 1 else outputs[: op.results]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        found = ctx.op.differentiate(ctx, needs, gradients)
        return None, *found, *(None,) * (len(needs) - len(found))


# ``apply`` without what it does for ``torch.func``, of which there is nothing here.
_record = super(torch.autograd.Function, _Recorded).apply
