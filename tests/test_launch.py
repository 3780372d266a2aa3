"""One way from a call to its kernel: the launcher, plans, operators. Of what they compute the rooms' tests tell."""

import functools
import itertools
import math
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from tensors import python
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction, create_function_from_signature

import kernelbook as kb
from kernelbook import interpreter, launch, runtime, train

# isort: split
import triton.language as tl

# --- the launcher ---------------------------------------------------------------------------------------------------


class _Strided(NamedTuple):
    tensor: torch.Tensor
    rows: int
    cols: int


def _arguments_kernel(x_ptr, y, n, stride, scale, flag, BLOCK: tl.constexpr):
    pass


def _specialization(args: tuple[Any, ...]) -> Any:
    """What Triton itself derives from the arguments before it looks for a compiled kernel, for an H200."""
    kernel = JITFunction(_arguments_kernel)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    return [entry for entry in binder(*args, BLOCK=64)[1] if entry[0] != "constexpr" or entry[1] != 64]


def _key(*args: Any) -> Any:
    return launch.Launch._key(0, args)[0]


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
    st.one_of(_tensors, st.none(), st.builds(_Strided, _tensors, _integers, _integers)),
    _integers,
    _integers,
    st.floats(allow_nan=False, width=32),
    st.booleans(),
)


@hypothesis.settings(max_examples=300)
@given(_launches, _launches)
def test_what_has_one_key_is_one_kernel_to_triton(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    # The same arguments, but for values within their kind, have to share a key now and then: else nothing is tested.
    similar = tuple(
        near if type(near) is type(mine) and not isinstance(mine, torch.Tensor) else mine
        for mine, near in zip(one, other, strict=True)
    )
    for args in (other, similar):
        if _key(*one) == _key(*args):
            assert _specialization(one) == _specialization(args)


def test_numbers_of_one_kind_share_a_key() -> None:
    x = _storage
    for kind in ((32, 48, 1024), (2, 17, 2**31 - 1), (2**31 + 1, 2**40 + 1), (2**31, 2**40)):
        assert len({_key(x, x, n, 1, 0.5, True) for n in kind}) == 1
    assert len({_key(x, x, n, 1, 0.5, True) for n in (1, 2, 16, 2**31, 2**31 + 1, 2**63)}) == 6


def test_a_descriptor_has_the_key_of_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ensure_context", lambda device: None)
    x, y = (torch.zeros(rows, 8, dtype=torch.float16)[:, :4] for rows in (6, 9))
    one, other = launch.block(2, 4), launch.block(4, 4)
    [made] = launch.Launch._key(0, (launch.Descriptor(x, one),))[1]
    assert (made.base.data_ptr(), made.base.dtype) == (x.data_ptr(), x.dtype) and made.block_shape == [2, 4]
    assert made.shape == [6, 4] and made.strides == [8, 1]
    assert launch.Launch._key(0, (launch.Descriptor(x, launch.block(2, 4)),))[1][0] is made
    assert _key(launch.Descriptor(x, one)) == _key(launch.Descriptor(y, one))
    assert _key(launch.Descriptor(x, one)) != _key(launch.Descriptor(x, other))


def test_a_kept_descriptor_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ensure_context", lambda device: None)
    x = torch.zeros(6, 8, dtype=torch.float16)
    gone = weakref.ref(x)
    launch.Launch._key(0, (launch.Descriptor(x, launch.block(2, 8)),))
    del x
    assert gone() is None


def _a_schedule() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 8))
    adam = train.ChunkAdamW([weight])
    for step in range(3):
        adam.param_groups[0].update(weight_decay=0.1 * step, betas=(0.9 - 0.1 * step, 0.95), eps=10.0**-step)
        weight.grad = torch.ones_like(weight)
        adam.step()


def _numbers_of_tokens() -> None:
    weight = torch.zeros(8192, 1024, dtype=torch.bfloat16)
    for tokens in (258, 386, 514):
        kb.scatter_ffn(weight[:tokens], weight, weight, torch.arange(800))


@pytest.mark.parametrize("vary", (_a_schedule, _numbers_of_tokens))
def test_numbers_that_vary_compile_no_kernel_anew(vary: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[Any, set[Any]] = defaultdict(set)

    def record(self: launch.Launch, grid: tuple[int, ...], *args: Any) -> None:
        launched[self.kernel.fn.__name__].add((self, *map(type, args)))

    monkeypatch.setattr(launch.Launch, "__call__", record)
    monkeypatch.setattr(runtime, "properties", lambda *_: runtime.TARGETS["sm_90"])
    vary()
    assert launched and all(len(ways) == 1 for ways in launched.values()), launched


def test_what_no_kernel_takes_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match="Launch: no argument can be a str, only tensors, tuples and numbers",
    ):
        _key(_storage, "16")


class _FakeKernel:
    """Stands for a ``JITFunction`` on a GPU: compiles once for each dtype and alignment of its first argument."""

    __name__ = "fake"
    arg_names = ("x_ptr", "n", "BLOCK")
    params = ()

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.used_global_vals: dict[Any, Any] = {}
        # As Triton has it: compiled kernels by their keys, and how one is found.
        self.device_caches: dict[int, Any] = defaultdict(lambda: ({}, {}, "target", "backend", "binder"))
        self.by_triton: list[Any] = []
        self.called: list[Any] = []  # what compiled kernels were called with
        self.device = 0

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.by_triton.append((grid, args))
            key = f"{args[0].dtype} {args[0].data_ptr() % 16} {launch._integer_kind(args[1])}"
            cache = self.device_caches[self.device][0]
            if key not in cache:
                called = functools.partial(self._call, f"device {self.device}: {key}")
                cache[key] = types.SimpleNamespace(run=called, function=len(cache), packed_metadata=(4, 1, 0))
            return cache[key]

        return run

    def _call(self, name: str, *args: Any) -> None:
        self.called.append((name, args[:4], args[9:]))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _FakeKernel:
    """A kernel that is launched as on a GPU, though there is none: all that touches CUDA is replaced."""
    kernel = _FakeKernel()
    monkeypatch.setattr(launch, "_CALLS_COMPILED", True)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: kernel.device)
    monkeypatch.setattr(launch, "_current_device", lambda: kernel.device)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 100 + device)
    return kernel


def test_the_second_launch_calls_the_compiled_kernel(fake: _FakeKernel) -> None:
    launched, x = launch.Launch(fake, BLOCK=64), torch.zeros(64)
    for _ in range(3):
        launched((7,), x, 33)
    assert len(fake.by_triton) == 1 and len(fake.called) == 2
    name, grid_and_stream, values = fake.called[-1]
    assert "float32" in name and grid_and_stream == (7, 1, 1, 100)
    assert values == (x.data_ptr(), 33, 64)  # the constant at the end, though the compiled kernel won't look at it
    launched((2, 3), x, 35)  # of the same kind
    assert len(fake.by_triton) == 1 and fake.called[-1][1][:3] == (2, 3, 1)


def test_what_triton_specializes_on_takes_another_kernel(fake: _FakeKernel) -> None:
    launched, x = launch.Launch(fake, BLOCK=64), torch.zeros(64)
    for args in ((x, 33), (x[1:], 33), (x, 32), (x, 1), (x, 2**40 + 1), (x.half(), 33)):
        before = len(fake.by_triton)
        launched((1,), *args)
        launched((1,), *args)
        assert len(fake.by_triton) == before + 1, args
    assert len({name for name, *_ in fake.called}) == 6
    fake.device = 1
    launched((1,), x, 33)
    launched((1,), x, 33)
    assert fake.called[-1][0].startswith("device 1") and fake.called[-1][1][3] == 101


def test_a_compiled_kernel_that_triton_has_dropped_is_not_called(fake: _FakeKernel) -> None:
    launched, x = launch.Launch(fake, BLOCK=64), torch.zeros(64)
    launched((1,), x, 33)
    fake.device_caches.clear()  # the kernel was defined anew, or the device was reset
    launched((1,), x, 33)
    assert len(fake.by_triton) == 2 and not fake.called
    launched((1,), x, 33)
    assert len(fake.by_triton) == 2 and len(fake.called) == 1


def test_a_changed_constant_of_the_module_is_left_to_triton_to_refuse(fake: _FakeKernel) -> None:
    scope = {"SLOPE": 0.01}
    fake.used_global_vals = {("SLOPE", id(scope)): (scope["SLOPE"], scope)}
    launched, x = launch.Launch(fake, BLOCK=64), torch.zeros(64)
    launched((1,), x, 33)
    launched((1,), x, 33)
    assert len(fake.called) == 1
    scope["SLOPE"] = 0.02
    launched((1,), x, 33)
    assert len(fake.called) == 1 and len(fake.by_triton) == 2


def test_a_way_that_is_not_known_is_said_once(fake: _FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton does not keep compiled kernels as it did, every launch goes by kernel[grid]."""

    def of(*_: Any) -> None:
        raise AttributeError

    monkeypatch.setattr(launch._Compiled, "of", of)
    launch._warn_of_slow_launches.cache_clear()
    launched = launch.Launch(fake, BLOCK=64)
    with pytest.warns(UserWarning, match=r"every launch goes through kernel\[grid\]") as said:
        for _ in range(3):
            launched((4,), torch.zeros(8), 8)
    assert len(said) == 1
    launch._warn_of_slow_launches.cache_clear()


def _hook(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    "who", ("enter", "exit", "stages", "debug", "instrumentation", "recorder", "pre_run", "version", "device")
)
def test_whoever_watches_sees_every_launch(fake: _FakeKernel, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, x = launch.Launch(fake, BLOCK=64), torch.zeros(64)
    launched((1,), x, 33)
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
    elif who == "version":
        monkeypatch.setattr(launch, "_CALLS_COMPILED", False)
    else:  # the tensor is not on the current one
        monkeypatch.setattr(launch, "_current_device", lambda: 1)
    launched((1,), x, 33)
    assert len(fake.by_triton) == 2 and not fake.called


def test_a_version_of_triton_that_was_not_tried_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRET", False)
    with pytest.warns(
        UserWarning, match=r"Triton 9\.0\.1 was not tried .*, Triton 3\.6, 3\.7, .* were: .* install 'triton=="
    ):
        assert not runtime._is_tried("9.0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime._is_tried("3.6.0") and runtime._is_tried("3.9.0+git1234") and runtime.TRITON_IS_TRIED
        monkeypatch.setattr(runtime, "INTERPRET", True)
        assert not runtime._is_tried("3.60.0")


def test_with_another_version_kernels_go_plain_ways_and_warn_once() -> None:
    """Kernels for Hopper GPUs are launched by Triton itself then, and none of them is in Gluon."""
    code = """
        import os, warnings
        os.environ["TRITON_INTERPRET"] = "0"
        import triton
        triton.__version__ = "9.0.0"
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            import torch, kernelbook as kb
            from triton.runtime.jit import JITFunction
            launched = []
            JITFunction.run = lambda kernel, *args, **kwargs: launched.append((kernel, kwargs))
            with kb.runtime.compiling_for("sm_90"):
                q = torch.empty(1, 2, 512, 64, dtype=torch.float16)
                kb.flash_attention(q, q, q)
                packed = torch.empty(512, dtype=torch.uint8), torch.empty(16), (1, 16, 64), 64, torch.empty(16)
                routing = kb.route(torch.zeros(8, 1, dtype=torch.int64), 1)
                kb.scatter2scatter(torch.empty(8, 64, dtype=torch.float16), kb.NF4Tensor(*packed), routing)
        assert len([w for w in found if "was not tried" in str(w.message)]) == 1, found
        assert launched and not any(kernel.is_gluon() for kernel, _ in launched)
        assert all(options["enable_fp_fusion"] for _, options in launched)
        assert not kb.launch._CALLS_COMPILED
    """
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_both_ways_choose_the_same_kernel() -> None:
    """On a GPU: what is kept is what ``kernel[grid]`` returns, for arguments of every kind."""
    kernel = JITFunction(_arguments_kernel)
    launched = launch.Launch(kernel, BLOCK=64)
    x = torch.zeros(256, device=runtime.DEVICE)
    for n, stride, pointer in itertools.product((1, 16, 17, 2**31, 2**40 + 1), (1, 16, 3), (x, x[1:], x.half(), None)):
        args = (x, pointer, n, stride, 0.5, True)
        launched((1,), *args)
        kept = launched._compiled[launched._key(x.get_device(), args)[0]]
        assert kept.kernel is kernel[(1,)](*args, BLOCK=64, **launch.OPTIONS) and kept.is_current(
            kernel, x.get_device()
        )
        launched((1,), *args)
    torch.cuda.synchronize()


def test_the_interpreter_computes_on_float32_in_the_place_of_bfloat16() -> None:
    """Copies lie in memory as their tensors do; what a kernel wrote is rounded and put back, and nothing else is."""
    x = torch.randn(4, 10).bfloat16()[:, ::2].requires_grad_()
    y, row, n = torch.full((4, 5), torch.nan).bfloat16(), torch.ones(1, 5).bfloat16().expand(4, 5), 3
    with interpreter.widened((x, y, row, n, x, None)) as (wide_x, wide_y, wide_row, number, again, nothing):
        assert wide_x.dtype == wide_y.dtype == wide_row.dtype == torch.float32
        assert wide_x.stride() == (10, 2) and wide_row.stride() == (0, 1) and again is wide_x
        assert (number, nothing) == (3, None) and torch.equal(wide_x, x.detach().float())
        wide_y.copy_(1 + 2**-12 * torch.ones(4, 5))
    assert torch.equal(y, torch.ones(4, 5).bfloat16())
    assert x._version == y._version == row._version == 0


# --- KERNELBOOK_AUTOTUNE ----------------------------------------------------------------------------------------------


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, factor, SHIFT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(ACC)
    tl.store(y_ptr + offs, x * factor + SHIFT, mask=offs < n)


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Triton's autotuners as they are made, with a clock on which the last configuration but one is the fastest."""
    made: list[Any] = []
    autotune = triton.autotune
    answers = itertools.chain(
        [9.0, OutOfResources(300_000, 232_448, "shared memory"), 8.0, 7.0, 8.0], itertools.repeat(9.0)
    )

    def do_bench(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        if isinstance(answer := next(answers), Exception):
            raise answer
        return [answer] * 3

    def recorded(configs: Any, **how: Any) -> Callable[[Any], Any]:
        return lambda kernel: made.append(autotune(configs, do_bench=do_bench, **how)(kernel)) or made[-1]

    monkeypatch.setattr(triton, "autotune", recorded)
    monkeypatch.setattr(runtime, "autotune_enabled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch._autotuned_launcher.cache_clear()
    return made


def _scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    constants = {"SHIFT": 1, "ACC": tl.float32, "BLOCK": 16, "num_warps": 4, "num_stages": 2}
    launch.launcher(_scale_kernel, repeatable=True, **constants)((triton.cdiv(len(x), 16),), x, y, len(x), factor)
    return y


def test_warps_and_stages_are_searched_for_once_for_sizes_like_these(tuner: list[Any]) -> None:
    for n, factor in ((33, 2.0), (64, 3.0), (40, 2.0)):
        x = torch.arange(float(n))
        assert torch.equal(_scaled(x, factor), x * factor + 1)
    [one] = tuner
    found = [(config.num_warps, config.num_stages) for config in one.configs]
    assert found == [(4, 2), (4, 1), (4, 3), (2, 2), (8, 2), (8, 1), (8, 3)]  # the rule's first
    # What a file can hold, without numbers that are only computed with; Triton adds the tensors' dtypes.
    assert one.keys == ["n", "SHIFT", "BLOCK"]
    assert [one.configs_timings[config][0] for config in one.configs] == [9.0, math.inf, 8.0, 7.0, 8.0, 9.0, 9.0]
    assert (one.best_config.num_warps, one.best_config.num_stages) == (2, 2)
    _scaled(torch.zeros(65))
    _scaled(torch.zeros(65, dtype=torch.float64))
    assert len(tuner) == 3


def test_nothing_is_timed_unasked_nor_while_a_graph_is_captured(
    tuner: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(launch.launcher(_scale_kernel, BLOCK=16)) is launch.Launch
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(_scaled(torch.arange(500.0)), torch.arange(500.0) * 2 + 1)
    monkeypatch.setattr(runtime, "autotune_enabled", lambda: False)
    assert type(launch.launcher(_scale_kernel, repeatable=True, BLOCK=16)) is launch.Launch
    assert not tuner


def test_no_program_has_more_threads_than_a_gpu_runs(tuner: list[Any]) -> None:
    for warps, tried in ((32, {16, 32}), (1, {1, 2})):
        made = launch.launcher(_scale_kernel, repeatable=True, num_warps=warps)
        assert {config.num_warps for config in made.configs()} == tried
