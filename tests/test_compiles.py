"""Every kernel of every room compiles for real GPUs, in the configurations that users get, and does not spill.

Neither CI nor a laptop can run these kernels, but both can compile them. What the compiler said is kept in
``compiled_reports.csv`` beside this file, under a digest of all that it depends on: only what is new is compiled.
``make compiled`` writes that file and the table of the page "Compiled" anew.
"""

import ast
import itertools
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import compiled_kernels
import pandas as pd
import pytest
from compiled_kernels import REPORTS, ROOMS, compiled

from kernelbook import runtime
from kernelbook.lab.compiled import CompileError, compile_calls, read_reports

# isort: split
import triton

SRC = Path(runtime.__file__).parent
ROOT = Path(__file__).resolve().parents[1]

# (kernel, target) -> the most bytes that may be spilled, and why that is accepted. That is what the pinned compiler spills;
# another one's ptxas spills more of the same kernels, or nothing: in Triton 3.6 up to 840 bytes, in 3.9 2,528 where 2,432 are
# listed. Of a kernel that is not listed it may spill a few bytes: in Triton 3.6 8 of LayerNorm's backward pass in float64, in
# 3.9 56 of attention in float32, in 3.8 88 of the sparse backward pass on sm_80.
PINNED = f"triton=={triton.__version__}" in (ROOT / "requirements.txt").read_text()
OTHERS_SPILL, OTHERS_MORE, OTHERS_FEW = 1024, 1.25, 96
SPILLS_ALLOWED = {
    ("_flash_attention_bwd_dkdv_kernel", "sm_90"): (
        640,
        "bfloat16: the tiles that were measured fastest. float32 at 128 features: exact products take each operand twice.",
    ),
    ("_flash_attention_same_bits_kernel", "sm_90"): (
        512,
        "128 and 256 features: the sums of earlier parts wait beside those of the present one, and are moved once a part.",
    ),
    ("_flash_attention_same_bits_kernel", "sm_75"): (
        192,
        "float32 at 256 features without tensor cores.",
    ),
    ("_flash_attention_bwd_dq_kernel", "sm_90"): (
        640,
        "float32 at 128 features: exact products take each operand twice.",
    ),
    ("_flash_attention_bwd_hopper_kernel", "sm_90"): (
        56,
        "128 features: up to four registers outside the loops, and with packed sequences where each key's ends; with smaller "
        "tiles tensor cores would wait for shared memory.",
    ),
    ("_flash_attention_fwd_hopper_kernel", "sm_90"): (
        32,
        "128 and 256 features: some registers outside the loop over the tiles.",
    ),
    ("_flash_attention_decode_kernel", "sm_90"): (
        40,
        "float32 at 256 features: exact products take each operand twice.",
    ),
    ("_flash_attention_bwd_dkdv_kernel", "sm_75"): (
        616,
        "128 features without tensor cores: four registers; 256 features with a soft cap more. Tiles cannot be smaller.",
    ),
    ("_flash_attention_bwd_dq_kernel", "sm_75"): (
        360,
        "256 features with a soft cap or packed sequences, without tensor cores; tiles cannot be smaller.",
    ),
    ("_gather_matmul_fwd_vector_kernel", "sm_75"): (
        328,
        "Two tokens, gated, with biases, and the gelu with a tanh; never measured.",
    ),
    ("_scatter_ffn_fwd_fused_kernel", "sm_75"): (
        2432,
        "There for study: no rule takes it.",
    ),
    ("_flash_attention_bwd_dkdv_kernel", "sm_80"): (
        56,
        "256 features with a soft cap; with a window of 64 features two registers.",
    ),
    ("_flash_attention_fwd_kernel", "sm_80"): (
        16,
        "A window and sinks: up to four registers.",
    ),
    ("_layer_norm_fwd_kernel", "sm_90"): (
        8,
        "float32, two rows of up to 1,024 elements: two registers; not measured since the tile stays centered.",
    ),
    ("_layer_norm_bwd_partials_kernel", "sm_90"): (
        32,
        "Rows of 12,289 to 14,336 elements in 16 bits: the sums take all registers but a few, and a program that keeps a row to itself was measured faster than two that share it.",
    ),
    ("_scatter_ffn_place_kernel", "sm_90"): (
        8,
        "float64: two registers, in a kernel that copies rows.",
    ),
    ("_moe_lora_fwd_rows_kernel", "sm_90"): (
        8,
        "Experts in 4 bits and float32: two registers.",
    ),
    ("_nf4_matmul_fwd_kernel", "sm_80"): (
        8,
        "Eight tokens with double quantization: two registers. Half as many words in flight would need none, and were measured slower.",
    ),
    ("_moe_lora_fwd_rows_kernel", "sm_80"): (
        16,
        "Four registers; never measured on such a GPU.",
    ),
    ("_moe_lora_fwd_rows_kernel", "sm_75"): (
        8,
        "Two registers; never measured on such a GPU.",
    ),
    ("_scatter_ffn_fwd_down_vector_kernel", "sm_80"): (
        8,
        "Two registers; never measured on such a GPU.",
    ),
}
# Targets on which nothing was measured yet: the most that any kernel spills, in tiles that are those of other GPUs.
NOT_MEASURED = {
    "sm_86": 64, "sm_89": 64, "sm_100": 1264, "sm_103": 1264, "sm_120": 2048, "sm_121": 2048, "gfx942": 2180, "gfx1201": 3004,
}  # fmt: skip


# Kernels that no rule takes on a GPU without tensor cores for tl.dot: cuBLAS has them, and multiplies there.
BY_CUBLAS = {
    "_gather_matmul_fwd_tiles_kernel",
    "_scatter_ffn_fwd_down_tiles_kernel",
    "_sparse_linear_bwd_tiles_kernel",
    "_sparse_linear_fwd_tiles_kernel",
}


def _kernels(room: str, target: str) -> set[str]:
    """The names of the kernels that a room has for a GPU, by reading its kernels.py (and kernels_*.py)."""
    names = {"kernels.py", "kernels_decode.py", "kernels_same_bits.py"} | (
        {"kernels_hopper.py"} if target == "sm_90" else set()
    )
    paths = [path for path in (SRC / room).glob("kernels*.py") if path.name in names]
    if room == "moe_lora" and target == "sm_90":  # experts in 4 bits
        paths += (SRC / "packed").glob("kernels_*.py")
    if room == "nn":
        paths.append(SRC / "linear" / "kernels.py")
    return _kernels_in(paths) - (set() if runtime.TARGETS[target].has_tensor_cores else BY_CUBLAS)


def _kernels_in(paths: Iterable[Path]) -> set[str]:
    nodes = [node for path in paths for node in ast.parse(path.read_text()).body]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}


def test_every_room_is_compiled() -> None:
    # What is in `packed` is called by kernels of rooms.
    with_kernels = {path.parent.name for path in SRC.glob("*/kernels.py")} - {"packed", "linear"}
    assert set(ROOMS) == with_kernels


# nn's rotary embeddings are for the models of transformers.
HERE = tuple(room for room in ROOMS if room != "nn" or find_spec("transformers"))


def _assert_fits(name: str, target: str, spill_bytes: int, shared_bytes: int) -> None:
    allowed = NOT_MEASURED.get(target) or SPILLS_ALLOWED.get((name, target), (0, ""))[0]
    more = max(OTHERS_SPILL, OTHERS_MORE * allowed) if allowed else OTHERS_FEW
    assert spill_bytes <= (allowed if PINNED else more), (name, target)
    assert shared_bytes <= runtime.TARGETS[target].shared_memory_per_program, (name, target)


@pytest.mark.slow
# Of targets that are compiled alike one of each kind, which knows whether the kept reports are those of today's kernels.
@pytest.mark.parametrize("targets", (("sm_90",), ("sm_75",), ("sm_80", "gfx942")), ids=lambda targets: targets[0])
# With reports that are kept, a process for all rooms takes hardly longer than one for a single room.
@pytest.mark.parametrize(
    "rooms", [HERE] if PINNED else [(room,) for room in HERE], ids=lambda v: v[0] if len(v) == 1 else "rooms"
)
def test_kernels_compile_without_spilling(rooms: tuple[str, ...], targets: tuple[str, ...]) -> None:
    found = compiled(rooms, targets)
    if PINNED:  # another compiler's are not kept
        new = [str(kernel) for kernels in found.values() for kernel in kernels if not kernel.stored]
        assert not new, f"run 'make compiled' to keep what the compiler says of {', '.join(new)}"
    for room, target in itertools.product(rooms, targets):
        of_target = [kernel for kernel in found[room] if kernel.target == target]
        # Those of `packed` are moe_lora's, nf4 calls one of them too; and the linear layer's is nn's.
        shared = _kernels_in(
            [*(SRC / "packed").glob("kernels_*.py"), *(SRC / "study").glob("*.py"), SRC / "linear" / "kernels.py"]
        ) - _kernels(room, target)
        assert {kernel.name for kernel in of_target} - shared == _kernels(room, target)
        for kernel in of_target:
            _assert_fits(kernel.name, target, kernel.spill_bytes, kernel.shared_bytes)


def test_kept_reports_spill_where_that_is_accepted_and_nowhere_else() -> None:
    """For every target. A reason that no longer holds is struck from the list."""
    spilled = set()
    for row in read_reports(REPORTS).values():
        if PINNED:
            _assert_fits(row["name"], row["target"], int(row["spill_bytes"]), int(row["shared_bytes"]))
        spilled |= {(row["name"], row["target"])} if int(row["spill_bytes"]) else set()
    accepted = {place for place, (allowed, _reason) in SPILLS_ALLOWED.items() if allowed}
    assert accepted <= spilled, accepted - spilled


def test_the_page_holds_what_the_compiler_says() -> None:
    written = pd.read_csv(compiled_kernels.TABLE, dtype=str, keep_default_na=False)
    found = compiled_kernels.table(REPORTS, ["sm_90"]).astype(str).reset_index(drop=True)
    shown = written[written["target"] == "sm_90"].reset_index(drop=True)
    assert shown.equals(found), "run 'make compiled'"


def test_reports_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "double_it.py").write_text(
        "import kernelbook\n"
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def double(x_ptr, n, scale, BLOCK: tl.constexpr):\n"
        "    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)\n"
        "    tl.store(x_ptr + offs, x * scale, mask=offs < n)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(SRC.parent)]))
    code = "import double_it, torch\n" + "".join(
        f"double_it.double[(8,)](torch.empty(1024, dtype=torch.{dtype}), {n}, 2.0, 128, num_warps=2)\n"
        for dtype, n in (("float32", 1000), ("float32", 1001), ("float16", 1024), ("float16", 1040))
    )
    compiled = compile_calls(code, ("sm_90", "gfx942"), asm=("ptx", "sass", "amdgcn"))
    # 1000 and 1001 are no multiples of 16, 1024 and 1040 are: two specializations on each target.
    assert [(k.target, k.signature["x_ptr"]) for k in compiled] == [
        ("sm_90", "*fp32"),
        ("sm_90", "*fp16"),
        ("gfx942", "*fp32"),
        ("gfx942", "*fp16"),
    ]
    first, amd = compiled[0], compiled[2]
    assert first.num_warps == 2 and first.constants["BLOCK"] == 128 and first.signature["scale"] == "fp32"
    assert 0 < first.registers < 64 and first.spill_bytes == 0 and first.shared_bytes == 0
    assert ".target sm_90" in first.asm["ptx"] and "LDG" in first.asm["sass"]
    assert "global_load" in amd.asm["amdgcn"] and amd.registers > 0
    assert "double" in str(first)


def test_failures_say_why() -> None:
    with pytest.raises(CompileError, match="ZeroDivisionError"):
        compile_calls("1 / 0")
    with pytest.raises(ValueError, match=f"targets must be of {', '.join(runtime.TARGETS)}, got 'sm_1'"):
        compile_calls("", ("sm_1",))
