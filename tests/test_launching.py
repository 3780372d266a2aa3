"""What launches have in common: tensors, strides and dtypes as kernels take them."""

import contextlib
import functools
import gc
import inspect
import itertools
import subprocess
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from tensors import compiled_graphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernelbook as kb
from kernelbook import arguments, launch, launching, memory, nn, plans, runtime


def test_cdiv_is_tritons() -> None:
    for a in (0, 1, 15, 16, 17, 2**40 + 1):
        for b in (1, 3, 16):
            assert launching.cdiv(a, b) == triton.cdiv(a, b)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_sums_are_kept_in_single_or_double(dtype: torch.dtype) -> None:
    double = dtype == torch.float64
    assert launching.accumulator(dtype) == (torch.float64 if double else torch.float32)
    assert launching.tl_accumulator(dtype) == (tl.float64 if double else tl.float32)
    assert launching.tl_accumulator(launching.accumulator(dtype)) == launching.tl_accumulator(dtype)


def test_float32_is_multiplied_as_pytorch_is_set() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, expected in ((True, "tf32"), (False, "ieee")):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert launching.precision() == expected
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_autocast_is_off_within() -> None:
    x = torch.ones(2, 2, device=runtime.DEVICE)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        with launching.without_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with launching.without_autocast(x):
        assert not torch.is_autocast_enabled(x.device.type)


def test_dtypes_that_kernels_are_given() -> None:
    single = torch.ones(2, device=runtime.DEVICE)
    a, b, c = launching.in_kernel_dtype(single, None, single.bfloat16())
    assert a is single and b is None
    assert c.dtype == (torch.float32 if runtime.INTERPRET else torch.bfloat16)


def test_a_matrix_is_a_view_where_it_can_be() -> None:
    x = torch.arange(24.0, device=runtime.DEVICE).reshape(2, 3, 4)
    assert launching.matrix(x).shape == (6, 4) and launching.matrix(x).data_ptr() == x.data_ptr()
    assert launching.matrix(x[0, 0]).shape == (1, 4)
    assert launching.matrix(x[:0]).shape == (0, 4)
    turned = x.transpose(0, 1)
    assert torch.equal(launching.matrix(turned), turned.reshape(6, 4))
    steps = x[0].t()
    assert launching.matrix(steps).stride() == steps.stride()


def test_strides_of_a_tensor_and_of_none() -> None:
    x = torch.ones(3, 4, device=runtime.DEVICE)
    assert launching.strided(x, 2, x[0]) == (x, 4, 1)
    for dims in (1, 2, 3):
        stand_in, *steps = launching.strided(None, dims, x)
        assert stand_in is x and steps == [0] * dims


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_rows_that_begin_on_16_bytes(dtype: torch.dtype) -> None:
    wide = 16 // dtype.itemsize
    x = torch.zeros(6, 4 * wide, dtype=dtype, device=runtime.DEVICE)
    assert x.data_ptr() % 16 == 0
    for aligned in (x, x[:, :3], x[1:], x[::2], x.reshape(2, 3, -1), x[:, wide:], x[0], x.reshape(3, 2, -1)[:, 0]):
        assert launching.has_aligned_rows(aligned)
    for other in (x.t(), x[:, 1:], x[:, ::2], x[:1].expand(6, -1), x.reshape(-1, 3 * wide // 2)):
        assert not launching.has_aligned_rows(other), other.stride()


def test_a_box_reads_a_tensor_in_pieces() -> None:
    x = torch.zeros(6, 8, dtype=torch.float16, device=runtime.DEVICE)[:, :4]
    box = launching.box(x, 2, 4)
    assert box.tensor is x and box.form is launching.box_form(2, 4)
    assert box.descriptor().base is x and box.descriptor().block_shape == [2, 4]
    assert box.descriptor().shape == [6, 4] and box.descriptor().strides == [8, 1]


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Sub(torch.Tensor):
    pass


def test_who_observes() -> None:
    assert not launching.is_observed()
    with torch.no_grad(), torch.inference_mode():
        assert not launching.is_observed()
    for mode in (FakeTensorMode, _Passing, torch.autograd.forward_ad.dual_level, torch.profiler.profile):
        with mode():
            assert launching.is_observed()
    assert not launching.is_observed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_observes() -> None:
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(not launching.is_observed())
        return x + 1 if found[-1] else x - 1

    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(look, backend="eager")(x), x - 1)
    assert torch.equal(torch.vmap(look)(x), x - 1)
    assert torch.equal(make_fx(look)(x)(x), x - 1)
    assert torch.equal(torch.jit.trace(look, (x,), check_trace=False)(x), x - 1)
    assert not any(found)


FIRST_CALL = """
import sys, torch
import kernelbook as kb
device = kb.runtime.DEVICE
ids = torch.tensor([[0, 1], [2, 0]], device=device)
x, a, b = (torch.randn(s, device=device, requires_grad=True) for s in ((2, 8), (3, 2, 8), (3, 6, 2)))
kb.moe_lora(x, torch.randn(3, 8, 6, device=device), a, b, kb.route(ids, 3)).sum().backward()
assert x.grad.any()
print("torch._dynamo" in sys.modules)
"""


def test_a_first_call_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]


def _run_scaled(out: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    torch.mul(x, factor, out=out)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


@functools.cache
def _operators() -> tuple[Any, Any]:
    for name, more in {
        "test_scaled": {"setup_context": _keep, "backward": lambda ctx, dy: (dy * ctx.factor, None)},
        "test_scaled_once": {},
    }.items():
        launching.operator(
            f"{name}(Tensor x, float factor) -> Tensor",
            outputs=lambda x, factor: torch.empty_like(x), run=_run_scaled, **more,
        )  # fmt: skip
    return torch.ops.kernelbook.test_scaled.default, torch.ops.kernelbook.test_scaled_once.default


def test_an_operator_is_one_of_pytorchs() -> None:
    scaled, once = _operators()
    x = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(scaled, (x, 3.0))
    torch.library.opcheck(once, (x.detach(), 3.0))
    [dx] = torch.autograd.grad(scaled(x, 3.0).sum(), x)
    assert torch.equal(dx, torch.full_like(x, 3.0))
    compiled = torch.compile(lambda x: scaled(x, 2.0) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), 2 * x + 1)
    with pytest.raises(RuntimeError, match="kernelbook::test_scaled_once cannot be differentiated"):
        once(x, 3.0).sum().backward()


# --- the launcher ---------------------------------------------------------------------------------------------------


def _arguments_kernel(x_ptr, y_ptr, n, stride, scale, flag, BLOCK: tl.constexpr):
    pass


def _specialization(args: tuple[Any, ...]) -> Any:
    """What Triton itself derives from the arguments before it looks for a compiled kernel, for an H200."""
    kernel = JITFunction(_arguments_kernel)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    return [entry for entry in binder(*args, BLOCK=64)[1] if entry[0] != "constexpr" or entry[1] != 64]


_storage = torch.zeros(4096, dtype=torch.float32)
_tensors = st.builds(
    lambda dtype, offset: _storage.view(dtype)[offset:],
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8)),
    st.integers(0, 40),
)
_integers = st.one_of(
    st.sampled_from((0, 1, -1, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63 - 1)),
    st.integers(-(2**63), 2**63 - 1),
)
_launches = st.tuples(
    _tensors,
    st.one_of(_tensors, st.none()),
    _integers,
    _integers,
    st.floats(allow_nan=False, width=32),
    st.booleans(),
)


@hypothesis.settings(max_examples=300)
@given(_launches, _launches)
def test_what_has_one_key_is_one_kernel_to_triton(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    def key(args: tuple[Any, ...]) -> Any:
        return tuple(map(type, args)), launching._key(args, 0)

    # The same arguments, but for values within their kind, have to share a key now and then: else nothing is tested.
    similar = tuple(
        near if type(near) is type(mine) and not isinstance(mine, torch.Tensor) else mine
        for mine, near in zip(one, other, strict=True)
    )
    for args in (other, similar):
        if key(one) == key(args):
            assert _specialization(one) == _specialization(args)


def test_numbers_of_one_kind_share_a_key() -> None:
    x = _storage
    for kind in ((32, 48, 1024), (2, 17, 2**31 - 1), (2**31 + 1, 2**40 + 1), (2**31, 2**40)):
        assert len({launching._key((x, x, n, 1, 0.5, True), 0) for n in kind}) == 1
    assert len({launching._key((x, x, n, 1, 0.5, True), 0) for n in (1, 2, 16, 2**31, 2**31 + 1, 2**63)}) == 6


class _FakeLauncher:
    """Stands for the launcher of a compiled kernel, and notes what it is called with."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations = kernel_signature = "signature"

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.launch = functools.partial(self._launch, name, calls)

    @staticmethod
    def _launch(name: str, calls: list[Any], *args: Any) -> None:
        values = args[-1] if launching._TRITON != (3, 6) else args[13:]
        calls.append((name, args[:5], tuple(values)))


class _FakeKernel:
    """Stands for a ``JITFunction`` on a GPU: compiles once for each dtype and alignment of its first argument."""

    __name__ = "fake"
    arg_names = ("x_ptr", "n", "BLOCK")
    params = ()

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.used_global_vals: dict[Any, Any] = {}
        self.device_caches: dict[int, Any] = defaultdict(lambda: ({},))
        self.by_triton: list[Any] = []
        self.by_handle: list[Any] = []
        self.device = 0

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.by_triton.append((grid, args))
            key = f"{args[0].dtype} {args[0].data_ptr() % 16} {launching._kinds[args[1]]}"
            cache = self.device_caches[self.device][0]
            if key not in cache:
                launcher = _FakeLauncher(f"device {self.device}: {key}", self.by_handle)
                cache[key] = types.SimpleNamespace(
                    run=launcher, function=len(cache), packed_metadata=(4, 1, 0), metadata=types.SimpleNamespace()
                )
            return cache[key]

        return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _FakeKernel:
    """A kernel that is launched as on a GPU, though there is none: all that touches CUDA is replaced."""
    kernel = _FakeKernel()
    monkeypatch.setattr(launching, "_HAS_HANDLES", True)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: kernel.device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: kernel.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    return kernel


def test_the_second_launch_goes_through_the_handle(fake: _FakeKernel) -> None:
    launch, x = launching.Launch(fake, BLOCK=64), torch.zeros(64)
    for _ in range(3):
        launch((7,), x, 33)
    assert len(fake.by_triton) == 1 and len(fake.by_handle) == 2
    name, (gx, gy, gz, stream, _), values = fake.by_handle[-1]
    assert "float32" in name and (gx, gy, gz, stream) == (7, 1, 1, 100)
    assert values == (x.data_ptr(), 33, 64)  # the constant at the end, though the compiled kernel won't look at it
    launch((2, 3), x, 35)  # of the same kind
    assert len(fake.by_triton) == 1 and fake.by_handle[-1][1][:3] == (2, 3, 1)


def test_what_triton_specializes_on_takes_another_kernel(fake: _FakeKernel) -> None:
    launch, x = launching.Launch(fake, BLOCK=64), torch.zeros(64)
    for args in ((x, 33), (x[1:], 33), (x, 32), (x, 1), (x, 2**40 + 1), (x.half(), 33)):
        before = len(fake.by_triton)
        launch((1,), *args)
        launch((1,), *args)
        assert len(fake.by_triton) == before + 1, args
    assert len({name for name, *_ in fake.by_handle}) == 6
    fake.device = 1
    launch((1,), x, 33)
    launch((1,), x, 33)
    assert fake.by_handle[-1][0].startswith("device 1") and fake.by_handle[-1][1][3] == 101


def test_a_handle_that_triton_has_dropped_is_not_launched(fake: _FakeKernel) -> None:
    launch, x = launching.Launch(fake, BLOCK=64), torch.zeros(64)
    launch((1,), x, 33)
    fake.device_caches.clear()  # the kernel was defined anew, or the device was reset
    launch((1,), x, 33)
    assert len(fake.by_triton) == 2 and not fake.by_handle
    launch((1,), x, 33)
    assert len(fake.by_triton) == 2 and len(fake.by_handle) == 1


def test_a_changed_constant_of_the_module_is_left_to_triton_to_refuse(fake: _FakeKernel) -> None:
    scope = {"SLOPE": 0.01}
    fake.used_global_vals = {("SLOPE", id(scope)): (scope["SLOPE"], scope)}
    launch, x = launching.Launch(fake, BLOCK=64), torch.zeros(64)
    launch((1,), x, 33)
    launch((1,), x, 33)
    assert len(fake.by_handle) == 1
    scope["SLOPE"] = 0.02
    launch((1,), x, 33)
    assert len(fake.by_handle) == 1 and len(fake.by_triton) == 2


def _hook(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    "who", ("enter", "exit", "stages", "debug", "instrumentation", "recorder", "pre_run", "version")
)
def test_whoever_watches_sees_every_launch(fake: _FakeKernel, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, x = launching.Launch(fake, BLOCK=64), torch.zeros(64)
    launch((1,), x, 33)
    knobs = triton.knobs.runtime
    if who == "enter":
        monkeypatch.setattr(knobs.launch_enter_hook, "calls", [_hook])
    elif who == "exit":
        monkeypatch.setattr(knobs.launch_exit_hook, "calls", [_hook])
    elif who == "stages":
        monkeypatch.setattr(knobs, "add_stages_inspection_hook", _hook)
    elif who == "debug":
        monkeypatch.setattr(knobs, "debug", True)
    elif who == "instrumentation":
        monkeypatch.setitem(triton.knobs.compilation.__dict__, "instrumentation_mode", "fpsan")
    elif who == "recorder":
        monkeypatch.setattr(JITFunction, "run", _hook)
    elif who == "pre_run":
        fake.pre_run_hooks.append(_hook)
    else:
        monkeypatch.setattr(launching, "_HAS_HANDLES", False)
    launch((1,), x, 33)
    assert len(fake.by_triton) == 2 and not fake.by_handle


class _Repeated:
    """An operator whose calls can be repeated: it launches the fake kernel twice, and counts how often it had to think."""

    number = 0

    def __init__(self, fake: _FakeKernel) -> None:
        _Repeated.number += 1
        self.launch, self.thought, self.extra, self.part = launching.Launch(fake, BLOCK=64), 0, False, False
        self.call = launching.operator(
            f"test_repeated_{_Repeated.number}(Tensor x, Tensor? w, float eps) -> (Tensor, Tensor)",
            outputs=lambda x, w, eps: (launching.empty(x.shape, x.dtype, x), launching.empty((3,), x.dtype, x)),
            run=self._run,
            visible=True,
        )

    def _run(self, results: Any, x: torch.Tensor, w: Any, eps: float) -> None:
        self.thought += 1
        between = launching.empty((64,), torch.float32, x)
        self.launch((2,), x.view(-1) if w is None else w.view(-1) if self.part else w, 33)
        self.launch((x.shape[0], 5), between, 32)
        if self.extra:
            results[0].zero_()


@pytest.fixture
def repeated(fake: _FakeKernel, monkeypatch: pytest.MonkeyPatch) -> _Repeated:
    for module in (launching, memory):
        monkeypatch.setattr(module, "_new", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(memory, "_current_device", lambda: fake.device)
    return _Repeated(fake)


def test_a_call_is_repeated_without_thinking(fake: _FakeKernel, repeated: _Repeated) -> None:
    tensors = [(torch.zeros(4, 16), torch.zeros(64)) for _ in range(6)]
    for x, w in tensors:
        first, second = repeated.call(x, w, 0.5)
        assert first.shape == x.shape and first.is_contiguous() and second.shape == (3,)
        assert fake.by_handle[-2:] == [] or fake.by_handle[-2][2] == (w.data_ptr(), 33, 64)
    assert repeated.thought == 2  # the first call, and the one that was watched
    assert fake.by_handle[-1][1][:3] == (4, 5, 1) and len(fake.by_triton) == 2
    for other in ((tensors[0][0], None, 0.5), (tensors[0][0], tensors[0][1], 0.25), (torch.zeros(8, 16), None, 0.5)):
        before = repeated.thought
        repeated.call(*other)
        assert repeated.thought == before + 1, "another kind of call"
    x = torch.zeros(4, 16)
    for _ in range(3):
        repeated.call(x, None, 0.5)
    assert fake.by_handle[-2][2][0] == x.data_ptr()


def test_tensors_in_the_same_memory_are_told_apart_by_who_was_given(fake: _FakeKernel, repeated: _Repeated) -> None:
    storage = torch.zeros(64)
    for _ in range(3):
        repeated.call(storage.view(4, 16), storage, 0.5)
    x, w = torch.zeros(4, 16), torch.zeros(64)
    repeated.call(x, w, 0.5)
    assert repeated.thought == 2 and fake.by_handle[-2][2] == (w.data_ptr(), 33, 64)


@pytest.mark.parametrize("part", (0, 1, 2, 3))
def test_empty_tensors_are_told_apart_by_what_they_are(fake: _FakeKernel, repeated: _Repeated, part: int) -> None:
    """They have no memory to be found by: all of them have the address 0."""
    thought = []

    def run(results: Any, x: torch.Tensor) -> None:
        thought.append(x)
        repeated.launch((1,), (*results, x[4:])[part], 33)

    call = launching.operator(
        f"test_empty_{part}(Tensor x) -> (Tensor, Tensor, Tensor)",
        outputs=lambda x: tuple(launching.empty((rows, 16), x.dtype, x) for rows in (0, 4, 0)),
        run=run, repeated=launching.settings,
    )  # fmt: skip
    for _ in range(5):
        results = call(torch.zeros(4, 16))
        assert len({id(result) for result in results}) == 3 and [len(result) for result in results] == [0, 4, 0]
    assert len(thought) == 2
    assert {values[0] for _, _, values in fake.by_handle[-1:]} == {results[1].data_ptr() if part == 1 else 0}


def test_a_part_of_what_was_given_is_nothing_new(fake: _FakeKernel, repeated: _Repeated) -> None:
    @launching.repeated()
    def nothing_of(x: torch.Tensor) -> torch.Tensor:
        repeated.launch((1,), launching.empty((0, 16), x.dtype, x), 33)
        return x[:0]

    for x in [torch.zeros(4, 16) for _ in range(5)]:
        assert nothing_of(x).untyped_storage().data_ptr() == x.data_ptr()


def test_a_public_function_is_repeated_with_its_checks(
    fake: _FakeKernel, repeated: _Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients nothing of it is called again; its counters and its tensors' maps are found anew."""
    made, counted, settings, thought = [], [], [0], []

    def make(descriptor: Any, meta: Any) -> list[Any]:
        made.append(descriptor.base.data_ptr())
        return ["map", descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides]

    def counters(count: int, device: torch.device) -> torch.Tensor:
        counted.append(count)
        return zeros

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", make)
    monkeypatch.setattr(runtime, "ensure_context", lambda device: None)
    monkeypatch.setattr(launching, "_counters_on", counters)
    zeros = torch.zeros(8, dtype=torch.int32)

    @launching.repeated(lambda: settings[0])
    def public(x: torch.Tensor, w: torch.Tensor | None = None, *, deterministic: bool = False) -> torch.Tensor:
        thought.append(deterministic)
        launch, y = repeated.launch, launching.empty(x.shape, x.dtype, x)
        launch((3,), launching.tickets(5, x.device), 33, launching.box(x, 4, 8))
        launch((4,), y, 35)
        return y

    xs = [torch.zeros(4, 16) for _ in range(5)]
    results = [public(x, deterministic=True) for x in xs]
    assert thought == [True, True] and len(counted) == 5 and made == [x.data_ptr() for x in xs[1:]]
    assert fake.by_handle[-2][2] == (zeros.data_ptr(), 33, "map", xs[-1].data_ptr(), 4, 16, 16, 1)
    assert fake.by_handle[-1][2] == (results[-1].data_ptr(), 35, 64)
    for _ in range(2):
        assert [public(x, deterministic=True).shape for x in xs] == [(4, 16)] * 5 and len(made) == 6, "maps are kept"
    for other in (
        lambda: public(xs[0]), lambda: public(xs[0], deterministic=1), lambda: public(xs[0], xs[1], deterministic=True),
        lambda: public(xs[0].requires_grad_(), deterministic=True), lambda: public(xs[1].half(), deterministic=True),
        lambda: settings.__setitem__(0, 1) or public(xs[2], deterministic=True),
    ):  # fmt: skip
        before = len(thought)
        other()
        assert len(thought) == before + 1
    assert inspect.signature(public).parameters["deterministic"].default is False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A GPU's counters without one: ``now`` is the current stream, and every thread notes where it makes zeros."""
    state = types.SimpleNamespace(now=1, capturing=False, made=[], within={})

    @contextlib.contextmanager
    def within(stream: Any) -> Any:
        state.within[threading.get_ident()] = stream.number
        yield
        del state.within[threading.get_ident()]

    def zeros(count: int, **how: Any) -> torch.Tensor:
        thread = threading.get_ident()
        state.made.append((count, state.within.get(thread, state.now), thread == threading.main_thread().ident))
        return real(count, dtype=how["dtype"])

    real = torch.zeros
    monkeypatch.setattr(memory, "_counters", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(number=state.now, device=device)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.now, raising=False)
    return state


def test_counters_that_stay_are_made_by_another_thread(streams: types.SimpleNamespace) -> None:
    """A call's own thread may take its memory from a pool, which is not to hold what outlives the call."""
    gpu = torch.device("cuda", 0)
    recording = launching._Recording()
    with recording:  # as the second call of a kind is watched
        first = launching.tickets(5, gpu)
    assert recording.complete and not recording.new
    assert streams.made == [(memory.COUNTERS, 1, False), (memory.CAPTURED_COUNTERS, 1, False)]
    assert launching.tickets(memory.COUNTERS, gpu) is first, "one stream, one after the other"
    more = launching.tickets(memory.COUNTERS + 1, gpu)
    assert more.numel() > memory.COUNTERS and launching.tickets(5, gpu) is more
    streams.now = 2
    assert launching.tickets(5, gpu).data_ptr() not in (first.data_ptr(), more.data_ptr())
    assert streams.made[2:] == [(memory.COUNTERS + 1, 1, False), (memory.COUNTERS, 2, False)]


def test_each_call_in_a_graph_has_counters_of_its_own(
    streams: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CAPTURED_COUNTERS", 24)
    gpu, streams.capturing = torch.device("cuda", 0), True
    launching.tickets(5, gpu)
    assert streams.made.pop() == (5, 1, True) and not memory._counters, "nothing was made before"
    streams.capturing = False
    eager = launching.tickets(5, gpu)
    streams.made.clear()
    streams.capturing = True
    found = [launching.tickets(count, gpu) for count in (5, 8, 3)]
    begins = [part.data_ptr() for part in found]
    assert [part.numel() for part in found] == [5, 8, 3] and not streams.made
    assert [begin - begins[0] for begin in begins] == [0, 32, 64] and begins[0] != eager.data_ptr()
    assert launching.tickets(5, gpu).numel() == 5 and streams.made == [(5, 1, True)], "of the graph's own memory"
    assert launching.tickets(4, gpu).data_ptr() == begins[0] + 80 and len(streams.made) == 1
    streams.capturing = False
    assert launching.tickets(5, gpu) is eager


@pytest.mark.parametrize("unknown", (False, True))
def test_what_a_watched_call_made_dies_with_it(
    fake: _FakeKernel, repeated: _Repeated, unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, without the garbage collector: a graph's pool is looked through as soon as the graph is there.

    So does what it was given, where it cannot be repeated too: a part of memory that two arguments lie in (q, k and v).
    """
    import torch._dynamo  # else the watched call imports it, and PyTorch keeps the frames that led there

    memory: list[StorageWeakRef] = []
    empty = launching.empty

    def noted(*args: Any) -> torch.Tensor:
        tensor = empty(*args)
        memory.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def call() -> None:
        given = torch.zeros(64)
        memory.append(StorageWeakRef(given.untyped_storage()))
        repeated.call(given.view(4, 16), given, 0.5)

    monkeypatch.setattr(launching, "empty", noted)
    repeated.part = unknown
    gc.disable()
    try:
        for known in (4, 8, 12, 16, 20) if unknown else (4, 8, 9):
            call()
            fake.by_triton.clear()
            assert len(memory) == known and all(storage.expired() for storage in memory)
    finally:
        gc.enable()


def test_what_the_dispatcher_calls_is_repeated(fake: _FakeKernel, repeated: _Repeated) -> None:
    """As a compiled program calls an operator, and with lists, which the dispatcher makes of tuples."""
    thought = []

    def run(out: torch.Tensor, x: torch.Tensor, needs: Any, shape: Any) -> None:
        thought.append((list(needs), list(shape)))
        repeated.launch((1,), out, 33)

    launching.operator(
        "test_lists(Tensor x, bool[] needs, SymInt[] shape) -> Tensor",
        outputs=lambda x, needs, shape: x.new_empty(shape), run=run, repeated=launching.settings,
    )  # fmt: skip
    for needs, shape in (([True, False], [2, 3]), ([True, True], [2, 3]), ([True, True], [3, 2])):
        before = len(thought)
        for _ in range(5):
            assert torch.ops.kernelbook.test_lists(torch.randn(4), needs, shape).shape == tuple(shape)
        assert thought[before:] == [(needs, shape)] * 2


def test_what_pytorch_writes_to_out_is_repeated(fake: _FakeKernel, repeated: _Repeated) -> None:
    """Products and sorts between launches: of tensors that were given, of new ones, of parts and of transposes."""
    launch, thought = repeated.launch, []

    def run(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> None:
        thought.append(x)
        product, zeros = x.new_empty(3, 3), x.new_zeros(3)
        torch.mm(x[0], x[1].t(), out=product)
        torch.addmm(zeros, product.t(), x[0, :, :3], out=out)
        sorted_ids, order = torch.empty_like(ids), torch.empty_like(ids)
        torch.sort(ids, stable=True, out=(sorted_ids, order))
        launch((1,), sorted_ids, 33)
        launch((1,), order, 33)

    call = launching.operator(
        "test_products(Tensor x, Tensor ids) -> Tensor",
        outputs=lambda x, ids: x.new_empty(3, 3), run=run, repeated=launching.settings,
    )  # fmt: skip
    for _ in range(6):
        x, ids = torch.randn(40)[4:34].view(2, 3, 5), torch.randperm(7)
        expected = (x[0] @ x[1].t()).t() @ x[0, :, :3]
        torch.testing.assert_close(call(x, ids), expected)
    assert len(thought) == 2 and len(fake.by_handle) == 2 * 6 - 1

    def run_list(out: torch.Tensor, x: torch.Tensor) -> None:
        thought.append(x)
        torch.cat([x, x], out=out)  # of a list
        launch((1,), x, 33)

    call = launching.operator(
        "test_list(Tensor x) -> Tensor",
        outputs=lambda x: x.new_empty(8), run=run_list, repeated=launching.settings,
    )  # fmt: skip
    for _ in range(4):
        x = torch.randn(4)
        assert torch.equal(call(x), torch.cat([x, x]))
    assert len(thought) == 2 + 2


def test_what_a_repeated_call_writes_is_counted(fake: _FakeKernel, repeated: _Repeated) -> None:
    thought = []

    @launching.repeated()
    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        thought.append(x)
        repeated.launch((1,), x, 33)
        launching.written(x, y)

    x, y = torch.zeros(64), torch.zeros(64)
    for i in range(6):
        assert (x._version, y._version) == (i, i)
        write(x, y)
    assert len(thought) == 2


def test_what_cannot_be_told_apart_or_written_out_is_not_repeated(fake: _FakeKernel, repeated: _Repeated) -> None:
    storage = torch.zeros(64)
    repeated.part = True
    for _ in range(6):  # whose address is it that the kernel is given?
        repeated.call(storage.view(4, 16), storage, 0.5)
    assert repeated.thought == 6
    repeated.part, repeated.extra = False, True
    for _ in range(6):  # an operator of PyTorch between the launches
        repeated.call(torch.zeros(5, 16), storage, 0.5)
    assert repeated.thought == 12
    repeated.extra = False
    for _ in range(6):  # not on 16 bytes: Triton takes another kernel
        repeated.call(torch.zeros(97)[1:].view(6, 16), storage, 0.5)
    before = repeated.thought
    for _ in range(2):
        repeated.call(torch.zeros(6, 16), storage, 0.5)
    assert repeated.thought == before + 2


@pytest.mark.parametrize(
    "what", ("dropped", "plans", "device", "watched", "hooked", "deterministic", "profiled", "poisoned")
)
def test_what_changes_a_call_ends_its_repetition(
    fake: _FakeKernel, repeated: _Repeated, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.zeros(4, 16), torch.zeros(64)
    for _ in range(4):
        repeated.call(x, w, 0.5)
    before = repeated.thought
    assert before == 2
    if what == "dropped":
        fake.device_caches.clear()
    elif what == "plans":
        plans.forget()
    elif what == "device":
        fake.device = 1
    elif what == "watched":
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    elif what == "hooked":
        fake.pre_run_hooks.append(_hook)
    with contextlib.ExitStack() as stack:
        if what == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        if what == "profiled":
            stack.enter_context(torch.profiler.profile())
        if what == "poisoned":
            stack.enter_context(launching.poisonable())
        repeated.call(x, w, 0.5)
    assert repeated.thought == before + 1


def test_constants_are_constexpr() -> None:
    kernel = JITFunction(_arguments_kernel)
    with pytest.raises(TypeError, match="constants of _arguments_kernel must be constexpr parameters, got n"):
        launching.Launch(kernel, n=3, BLOCK=64)


def _public_calls() -> dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]]:
    """By name: what makes a function and arguments, other ones each time, whose calls do nothing but launch."""
    how = {"device": runtime.DEVICE, "dtype": torch.bfloat16}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, **how)

    def listed(count: int, rows: int) -> torch.Tensor:
        return torch.randperm(rows, device=runtime.DEVICE)[:count]

    def packed_attention() -> Any:  # three parts of one tensor
        q, k, v = draw(2, 200, 12, 64).transpose(1, 2).split((8, 2, 2), 1)
        return functools.partial(kb.flash_attention, causal=True), (q, k, v)

    def pages() -> Any:
        table = torch.arange(32, device=runtime.DEVICE).view(2, 16)
        lengths = torch.tensor([1000, 37], device=runtime.DEVICE)
        return kb.paged_attention, (draw(2, 8, 1, 128), draw(32, 2, 64, 128), draw(32, 2, 64, 128), table, lengths)

    def routed(x: int, *others: tuple[int, ...]) -> Any:
        ids = torch.rand(x, 16, device=runtime.DEVICE).argsort(1)[:, :2]
        return lambda *tensors: kb.moe_lora(*tensors, kb.route(ids, 16)), (draw(x, 256), *(draw(*s) for s in others))

    return {
        "flash_attention": lambda: (kb.flash_attention, tuple(draw(2, 4, 256, 128) for _ in range(3))),
        "packed attention": packed_attention,
        "decoding": lambda: (kb.flash_attention, (draw(2, 8, 1, 128), draw(2, 2, 3000, 128), draw(2, 2, 3000, 128))),
        "paged_attention": pages,
        "moe_lora": lambda: routed(300, (16, 256, 512), (16, 16, 256), (16, 512, 16)),
        "scatter_ffn": lambda: (kb.scatter_ffn, (draw(1, 512), draw(2048, 512), draw(2048, 512), listed(200, 2048))),
        "scatter_ffn, 16 rows": lambda: (
            kb.scatter_ffn, (draw(16, 512), draw(2048, 512), draw(2048, 512), listed(200, 2048)),
        ),
        "scatter_ffn, packed": lambda: (
            kb.scatter_ffn, (draw(300, 512), draw(2048, 512), draw(2048, 512), listed(200, 2048)),
        ),
        "gather_matmul": lambda: (kb.gather_matmul, (draw(1, 512), draw(2048, 512), listed(200, 2048))),
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("name", _public_calls())
def test_what_is_repeated_is_what_is_computed(name: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, bit for bit, for other tensors each time: the calls that are repeated, and the same ones thought anew."""
    if gradients and name not in ("flash_attention", "moe_lora") and "ffn" not in name:
        pytest.skip("no gradients, or not by launches alone")
    plans.forget()
    thought, real = [], launching.Launch.__call__
    monkeypatch.setattr(launching.Launch, "__call__", lambda *args: thought.append(args) or real(*args))
    for i in range(6):
        function, args = _public_calls()[name]()
        leaves = [t.requires_grad_(gradients) for t in args if t.is_floating_point()]
        outcomes = []
        before = len(thought)
        for anew in (contextlib.nullcontext, launching.poisonable):
            with anew():
                y = function(*args)
                outcomes.append((y, *(torch.autograd.grad(y, leaves, torch.ones_like(y)) if gradients else ())))
            if anew is contextlib.nullcontext and i > 4:
                assert len(thought) == before, "repeated, without a thought"
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.gpu
def test_both_ways_choose_the_same_kernel() -> None:
    """On a GPU: a launch by its handle runs what ``kernel[grid]`` returns, for arguments of every kind."""
    kernel = JITFunction(_arguments_kernel)
    launch = launching.Launch(kernel, BLOCK=64)
    x = torch.zeros(256, device=runtime.DEVICE)
    for n, stride, pointer in itertools.product((1, 16, 17, 2**31, 2**40 + 1), (1, 16, 3), (x, x[1:], x.half(), None)):
        args = (x, pointer, n, stride, 0.5, True)
        launch((1,), *args)
        variant = launch._variants[tuple(map(type, args))]
        handle = variant[1][launching._key(args, x.get_device())]
        assert handle.compiled is kernel[(1,)](*args, BLOCK=64)
        assert variant[0]((1,), args), "the handle is not taken"


# --- graphs that torch.compile makes --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_what_stays_is_in_nobodys_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls on a stream are made in a pool, and one of a graph: nothing of theirs stays in either."""
    monkeypatch.setattr(memory, "_counters", {})
    q, k = torch.randn(1, 8, 1, 64, device=runtime.DEVICE), torch.randn(1, 2, 30000, 64, device=runtime.DEVICE)
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        for _ in range(4):
            first = kb.flash_attention(q, k, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kb.flash_attention(q, k, k)
    graph.replay()
    assert torch.equal(first, captured) and torch.equal(first, kb.flash_attention(q, k, k))
    assert len(memory._counters) == 3 and not any(counters.any() for counters in memory._counters.values())
    torch.cuda.synchronize()
    del first
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks and all(block["state"] == "inactive" for block in blocks)


def _in_graphs() -> dict[str, Callable[[], tuple[Callable[..., torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]]]:
    """By name: what makes a function, and arguments for it, other ones each time."""
    how: dict[str, Any] = {"device": runtime.DEVICE, "dtype": torch.bfloat16}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, **how)

    def listed(count: int, rows: int) -> torch.Tensor:
        return torch.randperm(rows, device=runtime.DEVICE)[:count]

    def decoding() -> Any:
        def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return kb.flash_attention(2 * kb.flash_attention(q, k, v), k, v, lengths=lengths)

        k, v = draw(2, 2, 3000, 128), draw(2, 2, 3000, 128)
        return twice, lambda: (draw(2, 8, 1, 128), k, v, torch.randint(1, 3001, (2,), device=runtime.DEVICE))

    def paged() -> Any:
        k, v, table = draw(32, 2, 64, 128), draw(32, 2, 64, 128), torch.arange(32, device=runtime.DEVICE).view(2, 16)
        lengths = functools.partial(torch.randint, 1, 1025, (2,), device=runtime.DEVICE)
        return lambda q, n: 2 * kb.paged_attention(q, k, v, table, n), lambda: (draw(2, 8, 1, 128), lengths())

    def experts() -> Any:
        layer = nn.MoELayer(8, 256, 128, 2, **how)
        layer.experts.quantize(double_quant=True)
        return lambda x: layer(x) + x, lambda: (draw(3, 256),)

    def neurons() -> Any:
        up, down = draw(2048, 512), draw(2048, 512)
        return lambda x, ids: 2 * kb.scatter_ffn(x, up, down, ids), lambda: (draw(4, 512), listed(200, 2048))

    return {"decoding": decoding, "paged attention": paged, "experts in 4 bits": experts, "scatter_ffn": neurons}


@pytest.mark.gpu
@pytest.mark.parametrize("name", _in_graphs())
def test_a_first_call_may_be_one_of_a_compiled_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_counters", {})
    function, draw = _in_graphs()[name]()
    graphed = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    with compiled_graphs(), torch.no_grad():
        for _ in range(6):
            args = draw()
            torch.compiler.cudagraph_mark_step_begin()
            ours = graphed(*args).clone()
            torch.testing.assert_close(ours, function(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_step_of_training_in_compiled_graphs() -> None:
    """Forward and backward, each a graph, of all that has gradients; other inputs and chunks each time."""
    how: dict[str, Any] = {"device": runtime.DEVICE, "dtype": torch.float32}
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(256, **how), nn.MoELayer(8, 256, 128, 2, **how)
    ffn, linear = nn.SparseFFN(256, 512, **how), torch.nn.Linear(256, 256, **how)
    leaves = [p for module in (norm, layer, ffn, linear) for p in module.parameters()]

    def loss(x: torch.Tensor, neurons: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        x = x + layer(norm(x))
        heads = x.view(2, 64, 4, 64).transpose(1, 2)
        x = x + kb.flash_attention(heads, heads, heads, causal=True).transpose(1, 2).reshape(x.shape)
        x = x + kb.scatter_ffn(x.flatten(0, 1), ffn.w_up, ffn.w_down, neurons).view(x.shape)
        return kb.sparse_linear(x, linear.weight, linear.bias, chunks, chunk_size=32).square().sum()

    graphed = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    with compiled_graphs():
        for _ in range(6):
            x = torch.randn(2, 64, 256, **how)
            ids = torch.randperm(512, device=runtime.DEVICE)[:100], torch.randperm(8, device=runtime.DEVICE)[:3]
            outcomes = []
            for each in (graphed, loss):
                torch.compiler.cudagraph_mark_step_begin()
                given = x.clone().requires_grad_()
                value = each(given, *ids)
                found = torch.autograd.grad(value, [given, *leaves])
                outcomes.append([value.detach().clone(), *(g.clone() for g in found)])
            for ours, plain in zip(*outcomes, strict=True):
                assert (ours - plain).norm() <= 1e-4 * plain.norm()


# --- operators ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scale() -> Any:
    """An operator of the tests: ``(factor x, calls so far)``; it notes who called it."""
    seen: list[str] = []

    def run(results: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, factor: float) -> None:
        frames = {frame.function for frame in inspect.stack()}
        seen.append("dispatcher" if "dispatched" in frames else "function" if "forward" in frames else "plain")
        torch.mul(x, factor, out=results[0])
        results[1].fill_(len(seen))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    call = launching.operator(
        "test_scale(Tensor x, float factor) -> (Tensor, Tensor)",
        outputs=lambda x, factor: (torch.empty_like(x), x.new_empty((), dtype=torch.int64)),
        run=run,
        setup_context=setup_context,
        backward=lambda ctx, dy, _: (dy * ctx.factor, None),
    )
    return types.SimpleNamespace(call=call, seen=seen)


def test_pytorchs_dispatcher_is_asked_only_where_somebody_looks(scale: Any) -> None:
    x = torch.ones(4, device=runtime.DEVICE)
    leaf = x.clone().requires_grad_()
    for given_x, expected in (
        (x, "plain"),
        (torch.nn.Parameter(x, requires_grad=False), "plain"),
        (leaf, "function"),
    ):
        scale.call(given_x, 2.0)
        assert scale.seen[-1] == expected
    with torch.no_grad():
        scale.call(leaf, 2.0)
        assert scale.seen[-1] == "plain"
    with torch.profiler.profile() as profile:
        scale.call(x, 2.0)
    assert scale.seen[-1] == "dispatcher"
    assert any("test_scale" in event.key for event in profile.key_averages())
    with FakeTensorMode() as mode:
        y, _ = scale.call(mode.from_tensor(x), 2.0)
    assert y.shape == (4,) and scale.seen[-1] == "dispatcher"


def test_what_is_to_be_negated_is_negated() -> None:
    """A tensor of PyTorch's may say that its numbers have the other sign, as ``z.conj().imag`` does."""
    x = torch._neg_view(torch.randn(4, 16, device=runtime.DEVICE))
    for given_x in (x, x.detach().requires_grad_()):
        assert given_x.is_neg()
        assert torch.equal(kb.layer_norm(given_x), kb.layer_norm(x.resolve_neg()))


def test_gradients_are_the_same_both_ways(scale: Any) -> None:
    x = torch.ones(4, device=runtime.DEVICE, requires_grad=True)
    (eager,) = torch.autograd.grad(scale.call(x, 3.0)[0].sum(), x)
    (dispatched,) = torch.autograd.grad(torch.ops.kernelbook.test_scale(x, 3.0)[0].sum(), x)
    assert torch.equal(eager, dispatched) and torch.equal(eager, torch.full_like(eager, 3.0))


def test_an_operator_without_a_backward_says_so() -> None:
    call = launching.operator("test_plain(Tensor x) -> Tensor", outputs=torch.empty_like, run=lambda y, x: y.copy_(x))
    x = torch.ones(4, device=runtime.DEVICE, requires_grad=True)
    for way in (call, torch.ops.kernelbook.test_plain):
        with pytest.raises(RuntimeError, match="kernelbook::test_plain cannot be differentiated"):
            way(x).sum().backward()


@pytest.mark.skipif(not runtime.INTERPRET, reason="the interpreter's bfloat16")
def test_the_interpreter_is_given_float32_for_bfloat16(scale: Any) -> None:
    seen = []
    call = launching.operator(
        "test_widened(Tensor x, Tensor? y) -> Tensor",
        outputs=lambda x, y: torch.empty_like(x),
        run=lambda out, x, y: (seen.append((out.dtype, x.dtype, y)), out.copy_(x)),
    )
    x = torch.ones(4).bfloat16()
    assert call(x, None).dtype == torch.bfloat16 and seen == [(torch.float32, torch.float32, None)]


@pytest.mark.skipif(not runtime.INTERPRET, reason="the interpreter patches triton.language while a kernel runs")
def test_threads_share_the_interpreter() -> None:
    x = torch.randn(8, 16)
    expected = kb.layer_norm(x)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: kb.layer_norm(x), range(12)):
            assert torch.equal(y, expected)


# --- public functions under the compiler ----------------------------------------------------------------------------


def _whole_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """By operator: a public function, tensors, and its other arguments."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=runtime.DEVICE)

    ids = torch.tensor([5, 0, 7], device=runtime.DEVICE)
    q, k, v = (draw(1, 2, 20, 16) for _ in range(3))
    pages, table = draw(4, 2, 16, 16), torch.tensor([[3, 1]], device=runtime.DEVICE)
    x, weight, vector = draw(6, 32), draw(8, 32), draw(32)
    return {
        "layer_norm": (kb.layer_norm, (x, vector, vector), {"eps": 1e-3}),
        "rms_norm": (kb.rms_norm, (x, vector), {"residual": draw(6, 32)}),
        "flash_attention": (kb.flash_attention, (q, k, v), {"causal": True, "window": 7}),
        "paged_attention": (kb.paged_attention, (q[:, :, :1], pages, pages * 2, table, ids[:1]), {}),
        "gather_matmul": (kb.gather_matmul, (x, weight, ids), {"activation": "gelu"}),
        "scatter_ffn": (kb.scatter_ffn, (x, weight, weight * 2, ids), {}),
    }


@pytest.mark.parametrize("name", _whole_calls())
def test_to_dynamo_a_public_function_is_one_operator(name: str) -> None:
    function, tensors, others = _whole_calls()[name]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch.compiler.reset()
    compiled = torch.compile(lambda *t: function(*t, **others), fullgraph=True, backend=backend)
    ours, plain = compiled(*tensors), function(*tensors, **others)
    assert type(ours) is type(plain)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert graphs[0][0] == f"kernelbook.{name}_whole.default" and set(graphs[0][1:]) <= {"<built-in function getitem>"}


@pytest.mark.parametrize("name", ("layer_norm", "rms_norm", "flash_attention", "scatter_ffn"))
def test_opcheck_of_a_public_function(name: str) -> None:
    function, tensors, others = _whole_calls()[name]
    operator = getattr(torch.ops.kernelbook, f"{name}_whole").default
    given = dict(zip(inspect.signature(function).parameters, tensors, strict=False)) | others
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    names = [argument.name for argument in operator._schema.arguments][:-1]
    args = [given.get(each, defaults[each]) for each in names]
    leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    for each in (args, leaves):
        torch.library.opcheck(operator, (*each, ""))


def test_a_compiled_call_is_guarded_by_little_more_than_its_tensors() -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    (x, w, b), counts = _whole_calls()["layer_norm"][1], []
    for norm in (
        lambda x, w, b: torch.nn.functional.layer_norm(x, (32,), w, b),
        lambda x, w, b: kb.layer_norm(x, w, b),
    ):
        torch.compile(norm, backend="eager")(x, w, b)
        [entry] = _debug_get_cache_entry_list(norm.__code__)
        counts.append(str(entry.guard_manager).count("\n"))
    assert counts[1] <= counts[0] + 30


def test_messages_reach_through_the_compiler() -> None:
    x, w, _ = _whole_calls()["layer_norm"][1]
    for error, message, call in (
        (TypeError, r"a shape goes into normalized_shape=", lambda: kb.layer_norm(x, (32,))),
        (Exception, r"layer_norm: weight must have shape \(32,\), got \(3,\)", lambda: kb.layer_norm(x, w[:3])),
        (Exception, "layer_norm: backward must be one of", lambda: kb.layer_norm(x, backward="no")),
        (Exception, "layer_norm: x must have dtype", lambda: kb.layer_norm(x.int())),
    ):
        with pytest.raises(error, match=message):
            torch.compile(call, backend="eager")()


def test_what_pytorch_keeps_of_a_graph_is_not_taken_after_a_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    seen = [launch.sources.__wrapped__()]
    for name in ("kernels.py", "plan.json", "kernels.py"):
        (tmp_path / name).write_text("#" * len(seen))
        seen.append(launch.sources.__wrapped__())
    assert len(set(seen)) == 4


# --- checks that are made once --------------------------------------------------------------------------------------


def test_a_check_is_made_once_for_each_kind_of_call() -> None:
    made = []

    @arguments.once
    def check(x: Any, n: Any) -> Any:
        made.append((x, n))
        if n == 3:
            raise ValueError("three")
        return n

    a, b = torch.ones(4, 2), torch.zeros(4, 2)
    assert check(a, 1) == check(b, 1) == 1 and len(made) == 1
    for args in (
        (a[:3], 1),
        (a.double(), 1),
        (a.to_sparse(), 1),
        (a.to("meta"), 1),
        (a, 2),
        (a, True),
        (a, 1.0),
        (None, 1),
    ):
        before = len(made)
        check(*args), check(*args)
        assert len(made) == before + 1, args
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            check(a, 3)
    before = len(made)
    check([1], 1), check([1], 1)  # not a simple value
    assert len(made) == before + 2
    with torch.autograd.forward_ad.dual_level():
        check(a, 1)
    assert len(made) == before + 3
