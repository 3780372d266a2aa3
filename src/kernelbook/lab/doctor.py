"""``python -m kernelbook doctor``: what this machine is, and whether every public function is right on it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import kernelbook as kb
from kernelbook import check, runtime
from kernelbook.cases import FUNCTIONS, Case, collect, floats
from kernelbook.lab import timing

WITHOUT_TENSOR_CORES = (
    "float16 and float32; bfloat16 is right, and several times slower. Triton has no tensor cores before Ampere: attention and "
    "experts do without, sparse layers and lists of neurons have them by cuBLAS"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _cases() -> dict[str, Case]:
    return {name: case for name, case in collect(rooms=FUNCTIONS).items() if case.reference}


def _verdicts(name: str, case: Case) -> Iterator[check.Verdict]:
    """Of each dtype the outputs and gradients; a check that raises is a failed one."""
    sizes = case.real[0] if runtime.DEVICE.type == "cuda" and case.real else {}
    for dtype in DTYPES if floats(case.of()) else DTYPES[:1]:
        which = f"{name}[{str(dtype)[6:]}]"
        try:
            found = case.check(case.of(dtype, **sizes), require=False)
        except Exception as error:  # a broken kernel can raise anything; doctor has to go on and tell
            print(f"{which}: {type(error).__name__}: {error}", file=sys.stderr)
            found = [check.Verdict(type(error).__name__, float("nan"), 0.0, 0.0, 0.0)]
        yield from (verdict.renamed(f"{which} {verdict.name}") for verdict in found)


def _machine() -> Iterator[tuple[str, str]]:
    import triton

    p = runtime.properties()
    yield "kernels are", "interpreted on the CPU" if runtime.INTERPRET else "compiled"
    yield "GPU", p.name if runtime.HAS_GPU else runtime.TOO_OLD or "none found: kernels are right here, but not fast"
    yield "kernelbook", str(Path(kb.__file__).parent)
    yield "Python", sys.version.split()[0]
    yield "torch", torch.__version__
    yield "triton", triton.__version__
    if runtime.DEVICE.type == "cuda":
        yield "architecture", p.arch
        yield "multiprocessors", str(p.num_sms)
        yield "shared memory", f"{p.shared_memory_per_program / 1024:.0f} KiB a program"
        yield "registers", f"{p.registers_per_sm} a multiprocessor"
        yield "L2 cache", f"{p.l2_bytes / 2**20:.0f} MiB"
        if not p.has_tensor_cores:
            yield "to expect", WITHOUT_TENSOR_CORES


def doctor() -> int:
    """Prints what this machine is and whether every public function is right on it; 1 if one is not."""
    for name, value in _machine():
        print(f"{name:15}  {value}")
    if runtime.COMPILE_ONLY:
        print("\nTRITON_INTERPRET=0 without a GPU: kernels can be compiled but not run, so nothing was checked.")
        return 1
    if runtime.DEVICE.type == "cuda":
        ceilings = timing.measure_ceilings(quick=True)
        print(
            f"\nceilings (a quick measurement): copy {ceilings.copy_gbs:.0f} GB/s, "
            f"bf16 {ceilings.bf16_tflops:.0f} TFLOP/s, tf32 {ceilings.tf32_tflops:.0f} TFLOP/s"
        )
    print(f"\n{'check':60}  error    limit")
    torch.manual_seed(0)
    verdicts = []
    for name, case in _cases().items():
        for v in _verdicts(name, case):
            verdicts.append(v)
            print(f"{v.name:60}  {v.error:.1e}  {v.limit:.1e}  {'ok' if v.passed else 'FAILED'}", flush=True)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    print(
        f"\n{len(verdicts) - len(failed)} of {len(verdicts)} checks passed."
        + (" Something is broken." if failed else "")
    )
    return 1 if failed else 0
