"""GPU or interpreter: decided before Triton is imported, or refused with a reason."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import python

import kernelbook as kb
from kernelbook import interpreter, runtime
from kernelbook.layer_norm import layer_norm_reference

# isort: split
import triton
import triton.language as tl


@triton.jit
def _square(x):
    return tl.sum(x * x, 0)


@triton.jit
def _squares_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, _square(x) + _square(x))


SRC = str(Path(kb.__file__).parents[1])


REPORT = "import kernelbook.runtime as r; print(r.INTERPRET, r.COMPILE_ONLY, r.DEVICE)"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, "True False cpu"), ("1", "True False cpu"), ("0", "False True cpu")],
)
def test_modes_without_a_gpu(setting: str | None, expected: str) -> None:
    """Importing does no work: no drawing library, no table library."""
    code = f"{REPORT}; import sys; print([m for m in ('matplotlib', 'pandas') if m in sys.modules])"
    done = python(code, **({} if setting is None else {"TRITON_INTERPRET": setting}))
    assert done.stdout.splitlines() == [expected, "[]"], done.stderr


def test_a_setting_that_is_neither() -> None:
    done = python(REPORT, TRITON_INTERPRET="maybe")
    assert "TRITON_INTERPRET must be 0 or 1, got 'maybe'" in done.stderr


# What a program may have done before it imports kernelbook; all but the first import Triton on the way.
BEFORE = {
    "triton": "import triton",
    "an optimizer": "torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])",
}


@pytest.mark.parametrize("before", BEFORE)
def test_triton_imported_before_to_compile_is_changed_to_interpret(before: str) -> None:
    """Its helpers too: functions of triton.language that are kernels themselves, and the methods of tensors."""
    code = f"""
        import sys, torch
        {BEFORE[before]}
        assert "triton" in sys.modules
        import kernelbook as kb
        import triton, triton.language as tl
        from helpers_of_triton import helpers
        x, out = torch.randn(4, 16), torch.zeros(3)
        helpers[(1,)](x, out)
        assert torch.allclose(out, torch.stack([x.sum(), x.max(), x.argmax(1)[0].float()]), atol=1e-4), out
        y = kb.layer_norm(x)
        assert kb.runtime.INTERPRET and torch.allclose(y, torch.nn.functional.layer_norm(x, (16,)), atol=1e-5)
        print("fine")
    """
    here = os.pathsep.join((SRC, str(Path(__file__).parent)))
    done = python(code, PYTHONPATH=here)
    assert done.stdout.strip() == "fine", done.stderr


def test_triton_imported_before_to_interpret_is_refused_with_what_to_do() -> None:
    code = "import triton, os; os.environ['TRITON_INTERPRET'] = '0'; import kernelbook"
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "Import kernelbook before Triton" in done.stderr and "TRITON_INTERPRET=0" in done.stderr


def test_importing_makes_no_cuda_context() -> None:
    """A process with one cannot fork workers that use CUDA. With one GPU by what the driver's NVML says."""
    code = """
        import os, torch
        def forbidden(*args):
            raise AssertionError("a CUDA context is made")
        torch.cuda._is_compiled = lambda: True
        torch.cuda._device_count_nvml = lambda: 1
        torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = torch._C._cuda_init = forbidden
        import kernelbook.nn, kernelbook.train
        assert kernelbook.runtime.HAS_GPU and kernelbook.runtime.DEVICE.type == "cuda"
        assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
        print("fine")
    """
    done = python(code, CUDA_VISIBLE_DEVICES="0")
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.skipif(not runtime.INTERPRET, reason="about the interpreter")
def test_threads_take_turns_in_the_interpreter() -> None:
    """It patches triton.language while a kernel runs, and numbers programs in one place."""
    from helpers_of_triton import program_ids

    outs = [torch.full((size,), -1.0) for size in (10, 20, 40, 80)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(outs)) as pool:
            list(pool.map(lambda out: program_ids[(len(out),)](out), outs))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(out, torch.arange(float(len(out)))) for out in outs)


PLATFORMS = {
    "linux": "which is not installed: pip install 'triton>=3.6' (Linux; no GPU is needed)",
    "darwin": "which has no build for macOS: take a Linux container or virtual machine",
    "win32": "which has no official build for Windows: take WSL 2, or a Linux container",
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_without_triton_one_sentence_says_what_to_do(platform: str, tmp_path: Path) -> None:
    code = f"import sys; sys.platform = {platform!r}; sys.modules['triton'] = None"
    sentence = f"kernelbook needs Triton, {PLATFORMS[platform]}"
    done = python(f"{code}; import kernelbook")
    *frames, last = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith(f"ImportError: {sentence}"), done.stderr
    assert sum("File" in line for line in frames) == 2, "raised at the door, not inside"
    # What is typed: no traceback at all.
    (tmp_path / "sitecustomize.py").write_text(code)
    for typed in (["doctor"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "kernelbook", *typed],
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), SRC))},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2 and not done.stdout and done.stderr.startswith(sentence), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_launching_in_compile_only_mode_is_refused() -> None:
    done = python("import torch, kernelbook as kb; kb.layer_norm(torch.ones(2, 3))", TRITON_INTERPRET="0")
    assert done.returncode != 0
    assert "layer_norm: x cannot be used: there is no GPU and TRITON_INTERPRET=0" in done.stderr


@pytest.mark.skipif(not runtime.INTERPRET, reason="about the interpreter")
def test_bfloat16_is_right_in_the_interpreter() -> None:
    """The interpreter's own bfloat16 arithmetic is not (it truncates, or worse): ours works in float32 inside."""
    x, w = torch.randn(9, 40).bfloat16(), torch.randn(40).bfloat16()
    exact = layer_norm_reference(x.double(), w.double())
    # Rounded once and to nearest: within half a unit in the last place of every element.
    ours = kb.layer_norm(x, w)
    assert ours.dtype == torch.bfloat16
    assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()
    assert (ours.float() > exact.float()).float().mean() > 0.3  # truncation would make nearly all smaller in size


# NVIDIA's management library as it answers on a machine with these GPUs: names and compute capabilities.
GPUS = """
import ctypes, torch

class Nvml:
    nvmlInit_v2 = staticmethod(lambda: 0)
    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(GPUS)
        return 0
    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index + 1
        return 0
    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        major._obj.value, minor._obj.value = GPUS[device.value - 1][1]
        return 0
    def nvmlDeviceGetName(self, device, name, size):
        name.value = GPUS[device.value - 1][0]
        return 0

library = ctypes.CDLL
ctypes.CDLL = lambda name, *how, **more: Nvml() if name == "libnvidia-ml.so.1" else library(name, *how, **more)
torch.cuda.is_available = lambda: True
"""
V100, T4, H100 = (b"Tesla V100", (7, 0)), (b"Tesla T4", (7, 5)), (b"NVIDIA H100", (9, 0))


def test_a_gpu_that_is_too_old_is_said_so_and_the_interpreter_is_chosen() -> None:
    done = python(f"GPUS = {[V100]}\n{GPUS}\n{REPORT}")
    assert done.stdout.strip() == "True False cpu", done.stderr
    sentence = "this GPU (Tesla V100, compute capability 7.0) is too old for Triton, which needs 7.5"
    assert sentence in done.stderr and "on Colab a T4, an L4 or an A100" in done.stderr


@pytest.mark.parametrize("gpus", ([T4], [V100, H100], []))
def test_newer_gpus_are_used(gpus: list[object]) -> None:
    """Also where an older one stands beside it, and where the driver cannot be asked."""
    done = python(
        f"GPUS = {gpus}\n{GPUS}\nimport kernelbook.runtime as r; print(r.HAS_GPU, r.INTERPRET, repr(r.TOO_OLD))"
    )
    assert done.stdout.strip() == "True False ''", done.stderr


def test_public_functions_say_that_the_gpu_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "TOO_OLD", "this GPU is too old for Triton")

    class OnTheGpu(torch.Tensor):  # nobody has such a GPU here
        device = torch.device("cuda", 0)
        is_cuda = True

    x = torch.ones(2, 3).as_subclass(OnTheGpu)
    with pytest.raises(ValueError, match="layer_norm: x must be on the CPU: this GPU is too old for Triton"):
        kb.layer_norm(x)


@pytest.mark.skipif(not runtime.INTERPRET, reason="about the interpreter")
def test_overflows_are_looked_for_only_where_they_are_told(overflow_raises: Callable[[], None]) -> None:
    """The interpreter's time is saved elsewhere too: functions that a kernel calls more than once, and launches in turn."""
    x, out = torch.tensor([1, 2, 3, 2**30], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        _squares_kernel[(1,)](x, out, BLOCK=4)
        assert out == 28
    overflow_raises()
    with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        _squares_kernel[(1,)](x, out, BLOCK=4)
    x[3] = 0
    _squares_kernel[(1,)](x, out, BLOCK=4)
    assert out == 28


@triton.jit
def _steps_kernel(out_ptr, n):
    steps = 0
    for _ in range(0, n, 2):
        steps += 1
    tl.store(out_ptr, steps)


@pytest.mark.skipif(not runtime.INTERPRET, reason="about the interpreter")
def test_a_kernel_counts_up_to_a_number_on_any_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 has NumPy make an index of an array of one element, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter as tritons

    patch, out = tritons._patch_lang_tensor, torch.zeros(1, dtype=torch.int32)

    def refused(self: object) -> int:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    def patch_tensor(tensor: object, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", refused)

    monkeypatch.setattr(tritons, "_patch_lang_tensor", patch_tensor)
    with pytest.raises(Exception, match="only 0-dimensional arrays"):
        _steps_kernel[(1,)](out, 5)
    interpreter.mend()
    before = getattr(tl.tensor, "__index__", None)
    _steps_kernel[(1,)](out, 5)
    assert out == 3
    assert getattr(tl.tensor, "__index__", None) is before, "what a launch patches it puts back"


@triton.jit
def _others_kernel(x_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    for tile in range(pid, 2):
        tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1.0, mask=(offs < n) & (tile != pid))


@pytest.mark.skipif(not runtime.INTERPRET, reason="about the interpreter")
def test_a_mask_of_a_number_and_a_tile_is_one() -> None:
    """Triton's own "&" gives integers there, which its loads refuse from 3.9 on."""
    x = torch.zeros(4)
    _others_kernel[(1,)](x, 3, BLOCK=4)
    assert x.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    assert not runtime.autotune_enabled()
    monkeypatch.setenv("KERNELBOOK_AUTOTUNE", "1")
    assert runtime.autotune_enabled()
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cpu"))  # the interpreter's times say nothing
    assert not runtime.autotune_enabled()
    for held in ({}, {"KERNELBOOK_DEBUG": "1"}):  # a dictionary, as others' tests put there
        monkeypatch.setattr(runtime.os, "environ", held)
        assert runtime.debug_enabled() == bool(held)
