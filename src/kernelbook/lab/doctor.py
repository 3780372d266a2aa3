"""``python -m kernelbook doctor``: what this machine is, whether every public function is right on it, and what a call costs."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kernelbook as kb
from kernelbook import check, memory, runtime
from kernelbook.attention.reference import flash_attention_reference
from kernelbook.lab import timing
from kernelbook.layer_norm.reference import layer_norm_reference, rms_norm_reference
from kernelbook.moe_lora.reference import moe_lora_reference, route_reference, scatter2scatter_reference
from kernelbook.nf4.reference import nf4_dequantize_reference
from kernelbook.scatter_ffn.reference import gather_matmul_reference, scatter_ffn_reference
from kernelbook.sparse_linear.reference import sparse_forward_reference, sparse_linear_reference

__all__ = ["doctor"]

WITHOUT_TENSOR_CORES = (
    "float16 and float32; bfloat16 is right, and several times slower. Triton has no tensor cores before Ampere: attention and "
    "experts do without, sparse layers and lists of neurons have them by cuBLAS"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Check:
    """A small call of a public function, and the reference that it is compared with.

    Attributes:
        name: what is printed.
        ours, reference: of the tensors in ``given``, by name.
        given: drawn in float32, and rounded to the dtype under test.
        dtypes: those in which it is checked; the first is the one in which a call's cost is measured.
        grads: whether gradients of all of ``given`` are checked too.
    """

    name: str
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    given: dict[str, torch.Tensor]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    grads: bool = True


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=runtime.DEVICE)


def _checks() -> Iterator[Check]:
    rows = {"x": _draw(17, 130), "weight": _draw(130)}
    yield Check("layer_norm", kb.layer_norm, layer_norm_reference, rows | {"bias": _draw(130)})
    yield Check("rms_norm", kb.rms_norm, rms_norm_reference, rows)
    heads = {"q": _draw(1, 4, 40, 64), "k": _draw(1, 2, 40, 64), "v": _draw(1, 2, 40, 64)}
    how: dict[str, Any] = {"causal": True}
    given = functools.partial(kb.flash_attention, **how), functools.partial(flash_attention_reference, **how)
    yield Check("flash_attention", *given, heads)
    one = heads | {"q": _draw(1, 4, 1, 64)}
    yield Check("flash_attention, one query", kb.flash_attention, flash_attention_reference, one, grads=False)
    how = {"active_chunks": torch.tensor([2, 0], device=runtime.DEVICE), "chunk_size": 16}
    layer = {"x": _draw(33, 48), "weight": _draw(120, 48), "bias": _draw(120)}
    given = functools.partial(kb.sparse_linear, **how), functools.partial(sparse_linear_reference, **how)
    yield Check("sparse_linear", *given, layer)
    given = functools.partial(kb.sparse_forward, **how), functools.partial(sparse_forward_reference, **how)
    yield Check("sparse_forward", *given, layer, grads=False)
    neurons = torch.randperm(96, device=runtime.DEVICE)[:40]
    how = {"neurons": neurons, "activation": "silu"}
    ffn = {"x": _draw(4, 48), "w_up": _draw(96, 48) / 7, "w_down": _draw(96, 48) / 10, "w_gate": _draw(96, 48) / 7}
    given = functools.partial(kb.scatter_ffn, **how), functools.partial(scatter_ffn_reference, **how)
    yield Check("scatter_ffn", *given, ffn)
    how = {"rows": neurons}
    given = functools.partial(kb.gather_matmul, **how), functools.partial(gather_matmul_reference, **how)
    yield Check("gather_matmul", *given, {"x": ffn["x"], "weight": ffn["w_up"]})
    yield from _expert_checks()


def _expert_checks() -> Iterator[Check]:
    ids = torch.rand(24, 5, device=runtime.DEVICE).argsort(1)[:, :2]
    ids[3, 1] = 5  # a slot to skip
    routing = kb.route(ids, 5)
    for name, exact in zip(("order", "inverse", "offsets"), route_reference(ids, 5), strict=True):
        found = getattr(routing, name)
        yield Check(f"route, {name}", lambda found=found: found, lambda exact=exact: exact, {}, DTYPES[:1], grads=False)
    experts = {"x": _draw(24, 64), "w": _draw(5, 64, 32) / 8}
    ours: Callable[..., Any] = functools.partial(kb.scatter2scatter, routing=routing)
    yield Check("scatter2scatter", ours, functools.partial(scatter2scatter_reference, expert_ids=ids), experts)
    lora = {"lora_a": _draw(5, 4, 64) / 8, "lora_b": _draw(5, 32, 4)}
    q = kb.nf4_quantize(_draw(5, 32, 64))
    decoded = nf4_dequantize_reference(q.packed, q.absmax, q.code, q.shape, q.block_size)
    ours = functools.partial(kb.moe_lora, routing=routing, scaling=0.5)
    theirs = functools.partial(moe_lora_reference, expert_ids=ids, scaling=0.5)
    yield Check("moe_lora", ours, theirs, experts | lora)
    four = functools.partial(ours, w=q)
    yield Check("moe_lora, 4 bits", four, _with_experts(theirs, decoded.transpose(1, 2)), {"x": experts["x"]} | lora)
    rows = {"x": _draw(3, 64)}
    yield Check("nf4_matmul", lambda x: kb.nf4_matmul(x, q, 1), lambda x: x @ decoded[1].to(x.dtype).t(), rows)


def _with_experts(reference: Callable[..., Any], w: torch.Tensor) -> Callable[..., Any]:
    """The reference with these experts, in the dtype of ``x``."""
    return lambda x, **given: reference(x=x, w=w.to(x.dtype), **given)


def _verdicts(one: Check) -> Iterator[check.Verdict]:
    """Of each dtype the outputs and gradients; a check that raises is a failed one."""
    for dtype in one.dtypes:
        name = f"{one.name}[{str(dtype)[6:]}]"
        given = {key: tensor.to(dtype) for key, tensor in one.given.items()}
        try:
            if given:
                grads = tuple(given) if one.grads else ()
                found = check.check_op(one.ours, one.reference, given, grads=grads, require=False)
            else:
                out, exact = one.ours(), one.reference()
                found = [check.compare("out", out.double(), exact.double(), exact.double())]
        except Exception as error:  # a broken kernel can raise anything; doctor has to go on and tell
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            found = [check.Verdict(type(error).__name__, float("nan"), 0.0, 0.0, 0.0)]
        yield from (verdict.renamed(f"{name} {verdict.name}") for verdict in found)


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


def _host_costs(checks: list[Check]) -> Iterator[tuple[str, float]]:
    """Microseconds of the host for PyTorch's cheapest operator, one launch, and each call in bfloat16."""
    from kernelbook.launch import Launch
    from kernelbook.layer_norm import kernels

    x, y = (torch.ones(64, 256, dtype=torch.bfloat16, device=runtime.DEVICE) for _ in range(2))
    constants = {"WITH_DW": True, "WITH_DB": False, "ACC": memory.tl_accumulator(x.dtype), "BLOCK_G": 64, "BLOCK_N": 16}
    launch = Launch(kernels._layer_norm_bwd_sum_kernel, **constants)
    yield "torch.add(x, 1, out=y)", timing.host_us(lambda: torch.add(x, 1, out=y))
    yield "one launch", timing.host_us(lambda: launch((16, 1), x, x, y, y, 64, 256))
    for one in checks:
        if one.given:
            given = {key: tensor.bfloat16() for key, tensor in one.given.items()}
            yield one.name, timing.host_us(functools.partial(one.ours, **given))


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
    checks, verdicts = [*_checks()], []
    for one in checks:
        for v in _verdicts(one):
            verdicts.append(v)
            print(f"{v.name:60}  {v.error:.1e}  {v.limit:.1e}  {'ok' if v.passed else 'FAILED'}", flush=True)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if runtime.DEVICE.type == "cuda" and not failed:
        print(f"\n{'what a call costs the host, small tensors':60}      us")
        for name, us in _host_costs(checks):
            print(f"{name:60}  {us:6.1f}")
    print(
        f"\n{len(verdicts) - len(failed)} of {len(verdicts)} checks passed."
        + (" Something is broken." if failed else "")
    )
    return 1 if failed else 0
