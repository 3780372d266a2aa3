"""Compiles kernels for a named GPU on a machine that has none: registers, spills, shared memory, PTX, SASS.

:func:`compile_calls` runs ordinary code that calls public functions, in a new Python process in which kernels are not
interpreted and not launched either: each launch is recorded with the very types, constants and divisibilities that it
would have on a GPU, and then compiled for the target. What is compiled is therefore what users run.

Compiling takes a second or more for each kernel. What the compiler said can be kept in a file of reports
(:func:`read_reports`): a report stands under a digest of all that it depends on, so that one of an older source or another
compiler is not found.
"""

import ast
import csv
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.lab import stale
from kernelbook.launch import OPTIONS

# isort: split
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import constexpr
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # NVIDIA's, which Triton brings

# The columns of a file of reports. The key is all that is looked up by; name and target are for those who read the file.
REPORT_COLUMNS = ("key", "name", "target", "num_warps", "num_stages", "registers", "spill_bytes", "shared_bytes")

_GPU_TARGETS = {
    name: GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, about.warp_size)
    for name, about in runtime.TARGETS.items()
}

_POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


class CompileError(RuntimeError):
    """The code that was to be compiled failed, or a kernel does not compile."""


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """One kernel in one specialization, compiled for ``target``.

    ``registers`` and ``spill_bytes`` are per thread (the spills are the bytes of local memory that the compiler
    reports); ``shared_bytes`` is per program. ``asm`` holds the text forms: ``ttir``, ``ttgir``, ``llir``, and ``ptx`` and
    ``sass`` or ``amdgcn``. ``key`` is a digest of all that the report depends on: the kernel's source and that of what it
    calls, the specialization, the target, and Triton's version; empty where something has no lasting text. ``stored`` says
    whether the report came from a file.
    """

    name: str
    target: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    asm: Mapping[str, str]
    key: str = ""
    stored: bool = False

    def __str__(self) -> str:
        types = " ".join(sorted({t for t in self.signature.values() if t.startswith("*")}))
        tiles = " ".join(f"{k}={v}" for k, v in self.constants.items() if k.isupper())
        return (
            f"{self.name} [{types}; {tiles}; {self.num_warps} warps] for {self.target}: {self.registers} registers, "
            f"{self.spill_bytes} B spilled, {self.shared_bytes} B shared"
        )


def read_reports(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a file of reports, by their key; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["key"]: row for row in csv.DictReader(file)}


def compile_calls(
    code: str,
    targets: Sequence[str] = ("sm_90",),
    *,
    using: Sequence[Callable[..., Any]] = (),
    constants: Mapping[str, Any] | None = None,
    asm: Sequence[str] = (),
) -> list[CompiledKernel]:
    """Runs ``code`` with recorded instead of launched kernels, and compiles every launch for every target.

    Args:
        code: Python source. It makes CPU tensors and calls public functions, or those of ``using``.
        targets: keys of ``runtime.TARGETS``. Launch code sees the properties of the target that it is compiled for.
        using: kernels and functions of a notebook or a script, in the order of their definition. Triton reads a kernel's
            source from a file, so they are written to one, after imports of torch, runtime, triton and tl.
        constants: what those use besides, by name; the values have to be what their ``repr`` evaluates to.
        asm: which text forms to return (``ptx``, ``sass``, ...); they are large.

    Returns:
        One entry for each distinct specialization and target, in the order of the launches.

    Raises:
        CompileError: ``code`` raised, or a kernel did not compile; the message holds the other process's error.
    """
    return compile_each([code], targets, using=using, constants=constants, asm=asm)[0]


def compile_each(
    codes: Sequence[str],
    targets: Sequence[str],
    *,
    using: Sequence[Callable[..., Any]] = (),
    constants: Mapping[str, Any] | None = None,
    asm: Sequence[str] = (),
    reports: Path | None = None,
    timeout_s: float = 900.0,
) -> list[list[CompiledKernel]]:
    """What :func:`compile_calls` returns, for each of several codes; they run one after the other in one process a target.

    ``reports``: a file of reports; what stands there is not compiled again, unless ``asm`` asks for texts.
    """
    for target in targets:
        if target not in _GPU_TARGETS:
            raise ValueError(f"compile_calls: targets must be of {', '.join(_GPU_TARGETS)}, got {target!r}")
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        if using:
            Path(folder, "definitions.py").write_text(_definitions(using, constants or {}))
            names = ", ".join(function.__name__ for function in using)
            codes = [
                f"import sys\n\nsys.path.insert(0, {folder!r})\nfrom definitions import {names}\n{c}" for c in codes
            ]
        what = {"codes": list(codes), "targets": list(targets), "asm": list(asm), "reports": str(reports or "")}
        job.write_text(json.dumps(what))
        # A GPU that is there is hidden: its presence would change what is chosen and launched.
        hidden = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-m", "kernelbook.lab.compiled", str(job), str(result)],
            env={**os.environ, **hidden},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise CompileError(done.stderr[-6000:])
        return [[CompiledKernel(**entry) for entry in of_code] for of_code in json.loads(result.read_text())]


def _definitions(using: Sequence[Callable[..., Any]], constants: Mapping[str, Any]) -> str:
    """A module with the constants and the sources of the functions; a kernel keeps its function in ``fn``."""
    head = "import torch\nfrom kernelbook import runtime\nimport triton\nimport triton.language as tl\n"
    values = [f"{name} = {value!r}\n" for name, value in constants.items()]
    return "\n\n".join([head, *values, *(inspect.getsource(getattr(function, "fn", function)) for function in using)])


# --- occupancy -------------------------------------------------------------------------------------------------------

# How registers and shared memory are handed out, and how many programs run at a time at most: CUDA C++ Programming Guide,
# "Compute Capabilities", 7.5 to 12.1.
REGISTER_UNIT, WARP_UNIT = 256, 4  # registers a warp gets at a time; warps, one on each quarter of a multiprocessor
SHARED_UNIT, SHARED_RESERVED = 128, 1024  # bytes; the latter a program, from Ampere on
MAX_PROGRAMS = {
    "sm_75": 16,
    "sm_86": 16,
    "sm_89": 24,
    "sm_120": 24,
    "sm_121": 24,
}  # on a multiprocessor; 32 on all others


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many programs a multiprocessor runs at a time, and what keeps it from running more.

    ``limit`` is ``registers``, ``shared memory``, ``warps`` or ``programs``; ``share`` is the part of the
    multiprocessor's warps that is in use.
    """

    programs: int
    share: float
    limit: str


def occupancy(
    registers: int, shared_bytes: int, num_warps: int, properties: runtime.DeviceProperties | None = None
) -> Occupancy:
    """The occupancy of a kernel on an NVIDIA GPU, from what the compiler reports.

    Args:
        registers: per thread.
        shared_bytes: per program.
        num_warps: per program.
        properties: the GPU (default: the current one).
    """
    p = properties or runtime.properties()
    per_warp = -(-registers * p.warp_size // REGISTER_UNIT) * REGISTER_UNIT
    reserved = SHARED_RESERVED if p.has_tensor_cores else 0
    per_program = -(-(shared_bytes + reserved) // SHARED_UNIT) * SHARED_UNIT
    limits = {
        "registers": p.registers_per_sm // per_warp // WARP_UNIT * WARP_UNIT // num_warps,
        "shared memory": p.shared_memory_per_sm // max(per_program, 1),
        "warps": p.max_threads_per_sm // (p.warp_size * num_warps),
        "programs": MAX_PROGRAMS.get(p.arch, 32),
    }
    limit = min(limits, key=limits.__getitem__)
    programs = limits[limit]
    return Occupancy(programs, programs * num_warps * p.warp_size / p.max_threads_per_sm, limit)


# --- in the other process -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Launch:
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # places in the signature
    options: tuple[tuple[str, Any], ...]


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, TensorDescriptor) or hasattr(value, "block_shape"):  # Gluon's descriptor has a layout besides
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_POINTERS[value.base.dtype].removeprefix('*')}{list(value.block_shape)}{layout}>"
    raise CompileError(f"no kernel argument type for {type(value).__name__}")


def _leaves(parameters: Sequence[Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, parameter and value of each argument; of a NamedTuple those of each field, named ``parameter.field``."""
    for parameter in parameters:
        value = values.get(parameter.name, parameter.default)
        if isinstance(value, tuple) and not parameter.is_constexpr:
            fields: Any = type(value)
            yield from (
                (f"{parameter.name}.{field}", parameter, v) for field, v in zip(fields._fields, value, strict=True)
            )
        else:
            yield parameter.name, parameter, value


def _record(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Launch:
    """What Triton's launcher derives from the arguments: types, constants, divisibility by 16."""
    names = [parameter.name for parameter in kernel.params]
    options = {
        name: value for name, value in kwargs.items() if name not in names and (name, value) not in OPTIONS.items()
    }
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    signature, constants, aligned = {}, {}, []
    for name, parameter, value in _leaves(kernel.params, values):
        # The launcher turns None and the integer 1 into constants, the latter unless the kernel says otherwise.
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name] = "constexpr"
            constants[name] = getattr(value, "value", value)
            continue
        signature[name] = parameter.annotation_type or _type_of(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        # A tensor of a CUDA allocator starts on a multiple of 256 bytes; on the CPU one only of 64, which is enough.
        if type(number) is int and number % 16 == 0 and not parameter.do_not_specialize:
            aligned.append(len(signature) - 1)
    return _Launch(
        kernel, tuple(signature.items()), tuple(constants.items()), tuple(aligned), tuple(sorted(options.items()))
    )


def _leave_out_products() -> torch.library.Library:
    """Has PyTorch return memory instead of products on the CPU as long as the library lives: one of models' size takes minutes."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    library.impl("mm.out", lambda a, b, *, out: out, "CPU")
    library.impl("addmm", lambda _, a, b, **__: a.new_empty(a.shape[0], b.shape[1]), "CPU")
    library.impl("addmm.out", lambda _, a, b, *, out, **__: out, "CPU")
    return library


def _launches(code: str) -> Iterator[_Launch]:
    launches: dict[_Launch, None] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches[_record(kernel, args, kwargs)] = None

    JITFunction.run, before = record, JITFunction.run
    try:
        exec(compile(code, "<code to compile>", "exec"), {"__name__": "__compile__"})  # noqa: S102
    finally:
        JITFunction.run = before
    yield from launches


def _cubin_report(cubin: bytes, with_sass: bool) -> tuple[int, int, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sass = ""
        if with_sass:
            command = [str(TOOLS / "nvdisasm"), "-c", file.name]
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"]), sass


def _amd_report(amdgcn: str) -> tuple[int, int]:
    registers = re.search(r"\.vgpr_count:\s*(\d+)", amdgcn)
    spills = re.search(r"\.private_segment_fixed_size:\s*(\d+)", amdgcn)
    if registers is None or spills is None:
        raise CompileError("the compiler's AMD output names no register count")
    return int(registers[1]), int(spills[1])


@functools.cache
def _text_of(function: Any) -> str:
    """The syntax tree of a kernel or another function of ours, and what the names in it mean: numbers, functions of ours."""
    function = getattr(function, "fn", function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in function.__globals__:
            known[node.id] = _value_text(function.__globals__[node.id], function)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = function.__globals__.get(node.value.id)
            if inspect.ismodule(module) and module.__name__.startswith("kernelbook"):
                known[ast.unparse(node)] = _value_text(getattr(module, node.attr), function)
    return f"{stale.tree_text(tree)} {sorted(known.items())}"


def _value_text(value: Any, within: Any = None) -> str:
    """A constant, or a function or class of ours, as text; nothing of what is Triton's or PyTorch's, whose versions are known."""
    value = getattr(value, "value", value) if isinstance(value, constexpr) else value
    function = getattr(value, "fn", value)
    if inspect.isfunction(function) or inspect.isclass(value):
        theirs = function.__module__.partition(".")[0] in ("triton", "torch")
        if function is within or theirs or function.__module__ not in sys.modules:  # whose source nobody finds
            return ""
        if inspect.isclass(value):
            return stale.tree_text(ast.parse(textwrap.dedent(inspect.getsource(value))))
        return hashlib.sha256(_text_of(function).encode()).hexdigest()
    return "" if inspect.ismodule(value) or inspect.isbuiltin(value) else repr(value)


def _key(launch: _Launch, target: str) -> str:
    """A digest of all that the compiled kernel depends on; nothing where there is none."""
    constants = [(name, _value_text(value)) for name, value in launch.constants]
    parts = (_text_of(launch.kernel), launch.signature, constants, launch.aligned, launch.options)
    compiler = (triton.__version__, os.environ.get("TRITON_PTXAS_PATH", ""))
    text = repr((*parts, target, compiler))
    return "" if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()[:16]


def _report(
    launch: _Launch, target: str, asm: Sequence[str], reports: Mapping[str, Mapping[str, str]]
) -> CompiledKernel:
    key = _key(launch, target)
    row = reports.get(key)
    if row is None or asm:
        return dataclasses.replace(_compile(launch, target, asm), key=key)
    figures: dict[str, Any] = {name: int(row[name]) for name in REPORT_COLUMNS[3:]}
    return CompiledKernel(*_identity(launch, target), **figures, asm={}, key=key, stored=True)


def _identity(launch: _Launch, target: str) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    """The first fields of a :class:`CompiledKernel`: name, target, signature and constants."""
    constants = {
        name: value if isinstance(value, int | float | str) else str(value) for name, value in launch.constants
    }
    return launch.kernel.__name__, target, dict(launch.signature), constants


def _nested(flat: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """-> the signature as Triton has it, in which a NamedTuple is one parameter; and where each name stands in it."""
    fields: dict[str, dict[str, str]] = {}
    paths: dict[str, tuple[int, ...]] = {}
    for name, kind in flat:
        parameter, _, field = name.partition(".")
        of_parameter = fields.setdefault(parameter, {})
        paths[name] = (len(fields) - 1, len(of_parameter)) if field else (len(fields) - 1,)
        of_parameter[field] = kind
    signature: dict[str, Any] = {}
    for name, kinds in fields.items():
        signature[name] = kinds[""] if "" in kinds else namedtuple(name, kinds)(**kinds)
    return signature, paths


def _compile(launch: _Launch, target: str, asm: Sequence[str]) -> CompiledKernel:
    signature, paths = _nested(launch.signature)
    source_type = ASTSource
    if launch.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(
        launch.kernel,
        signature,
        {paths[name]: value for name, value in launch.constants},
        {paths[launch.signature[index][0]]: [["tt.divisibility", 16]] for index in launch.aligned},
    )
    compiled = triton.compile(source, target=_GPU_TARGETS[target], options={**OPTIONS, **dict(launch.options)})
    texts = {name: text for name, text in compiled.asm.items() if name in asm and isinstance(text, str)}
    if _GPU_TARGETS[target].backend == "cuda":
        registers, spills, sass = _cubin_report(compiled.asm["cubin"], "sass" in asm)
        if sass:
            texts["sass"] = sass
    else:
        registers, spills = _amd_report(compiled.asm["amdgcn"])
    metadata = compiled.metadata
    return CompiledKernel(
        *_identity(launch, target),
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=metadata.shared,
        asm=texts,
    )


def _of_target(target: str, job: Mapping[str, Any], reports: Mapping[str, Mapping[str, str]], result: Path) -> None:
    products = _leave_out_products()  # in this process, which does nothing else
    with runtime.compiling_for(target):
        found = [
            [dataclasses.asdict(_report(launch, target, job["asm"], reports)) for launch in _launches(c)]
            for c in job["codes"]
        ]
    products._destroy()
    result.write_text(json.dumps(found))


def _main(job_path: str, result_path: str) -> None:
    job, result = json.loads(Path(job_path).read_text()), Path(result_path)
    if len(job["targets"]) > 2:
        import torch._dynamo  # noqa: F401  # else each target's process does, at its first backward pass
    reports = read_reports(Path(job["reports"])) if job["reports"] else {}
    parts = [result.with_suffix(f".{target}") for target in job["targets"]]
    for target, part in zip(job["targets"], parts, strict=True):
        # A process for each: what launch code remembers for one target must not reach the next. To import takes longer.
        child = os.fork()
        if child == 0:
            try:
                _of_target(target, job, reports, part)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(1)
    of_targets = [json.loads(part.read_text()) for part in parts]
    result.write_text(json.dumps([list(itertools.chain(*of_code)) for of_code in zip(*of_targets, strict=True)]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
