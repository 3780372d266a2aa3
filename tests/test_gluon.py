"""The chapter on Gluon and its interpreter: each step is right in every order and compiles, planted faults are named."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import program

from kernelbook import check, runtime
from kernelbook.lab import compiled, gluon, gluon_layouts

# isort: split
import triton.experimental.gluon.language as gl

if not runtime.INTERPRET:
    pytest.skip("needs the interpreter", allow_module_level=True)

TOOL = program("instrument_gluon")
PAGE = TOOL.page()
ALONG, SWIZZLED = {"LOADS": PAGE.ALONG}, {"LOADS": PAGE.ALONG, "SHARED": PAGE.SWIZZLED}

# By the kernel: how a module with the page's kernels multiplies by it.
STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "down": lambda page, a, b: page.with_pointers(page._matmul_layout_kernel, a, b, LOADS=page.DOWN),
    "layout": lambda page, a, b: page.with_pointers(page._matmul_layout_kernel, a, b, **ALONG),
    "shared": lambda page, a, b: page.with_pointers(page._matmul_shared_kernel, a, b, **SWIZZLED),
    "buffers": lambda page, a, b: page.with_pointers(page._matmul_two_buffers_kernel, a, b, **SWIZZLED),
    "tma": lambda page, a, b: page.with_tma(page._matmul_tma_kernel, a, b),
    "wgmma": lambda page, a, b: page.with_tma(page._matmul_wgmma_kernel, a, b),
    "async": lambda page, a, b: page.with_tma(page._matmul_async_kernel, a, b, **page.FOUR),
    "large": lambda page, a, b: page.with_tma(page._matmul_async_kernel, a, b, tile=page.LARGE, **page.EIGHT),
    "specialized": lambda page, a, b: page.specialized(a, b, kernel=page._matmul_specialized_kernel),
    "persistent": lambda page, a, b: page.specialized(a, b, programs=1, kernel=page._matmul_specialized_kernel),
    "third buffer": lambda page, a, b: page.with_tma(page._matmul_stages_kernel, a, b, STAGES=3),
    "store": lambda page, a, b: page.with_store(page._matmul_store_kernel, a, b),
}


@functools.cache
def _inputs(k: int = 320) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(*shape, generator=generator).half() for name, shape in (("a", (256, k)), ("b", (k, 256)))}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_right_in_every_order(step: str, seed: int) -> None:
    with gluon.interpreted(seed):
        found = STEPS[step](PAGE, **_inputs())
    inputs = _inputs()
    truth = inputs["a"].double() @ inputs["b"].double()
    check.compare("c", found, truth, inputs["a"] @ inputs["b"]).require()


@pytest.mark.slow
def test_every_step_compiles_for_a_hopper_gpu() -> None:
    kernels = compiled.compile_calls(
        f"import sys; sys.path[:0] = {[str(TOOL.ROOT / 'tools'), str(TOOL.ROOT / 'tests')]!r}\n"
        "import torch, instrument_gluon\n"
        "page = instrument_gluon.page()\n"
        "a = torch.empty(1024, 1024, dtype=torch.float16)\n"
        "page.with_pointers(page._matmul_layout_kernel, a, a, LOADS=page.DOWN)\n"
        "page.with_pointers(page._matmul_layout_kernel, a, a, LOADS=page.ALONG)\n"
        "for kernel in (page._matmul_shared_kernel, page._matmul_two_buffers_kernel):\n"
        "    page.with_pointers(kernel, a, a, LOADS=page.ALONG, SHARED=page.SWIZZLED)\n"
        "page.with_tma(page._matmul_tma_kernel, a, a)\n"
        "page.with_tma(page._matmul_wgmma_kernel, a, a)\n"
        "page.with_tma(page._matmul_async_kernel, a, a, **page.FOUR)\n"
        "page.with_tma(page._matmul_async_kernel, a, a, tile=page.LARGE, **page.EIGHT)\n"
        "page.specialized(a, a)\n"
        "page.with_tma(page._matmul_stages_kernel, a, a, STAGES=3)\n"
        "page.with_store(page._matmul_store_kernel, a, a)\n",
        asm=("ptx",),
    )
    assert len(kernels) == 11
    for kernel in kernels:  # operands of mma_v2 pass through registers, those of wgmma do not
        assert kernel.spill_bytes == 0 or "wgmma" not in kernel.asm["ptx"], kernel
    assert sum("wgmma" in kernel.asm["ptx"] for kernel in kernels) == 5
    assert sum("setmaxnreg" in kernel.asm["ptx"] for kernel in kernels) == 1


# --- planted faults ---------------------------------------------------------------------------------------------------

_COUNT = "(count - 1) % STAGES"
# The step, what is replaced (in the first place at or behind the kernel's name) by what, and the kind that is named.
FAULTS = {
    "no phase": ("tma", "_matmul_tma_kernel", "(i // 2) & 1", "0", "wrong phase"),
    "the other phase": ("tma", "_matmul_tma_kernel", "(i // 2) & 1", "1 - ((i // 2) & 1)", "wrong phase"),
    "no wait": ("tma", "_matmul_tma_kernel", "mbarrier.wait(full.index(i % 2), (i // 2) & 1)", "pass", "read too early"),
    "a group too few": ("buffers", "_matmul_two_buffers_kernel", "wait_group(1)", "wait_group(2)", "read too early"),
    "barriers not fenced": ("tma", "_matmul_tma_kernel", "fence_async_shared()", "pass", "missing fence"),
    "result not fenced": ("store", "_matmul_store_kernel", "acc.to(gl.float16))  # New:\n    fence_async_shared()", "acc.to(gl.float16))", "missing fence"),
    "too few bytes": ("wgmma", "_copy_tiles", "expect(bar, BYTES)", "expect(bar, BYTES // 2)", "expect"),
    "too many bytes": ("wgmma", "_copy_tiles", "expect(bar, BYTES)", "expect(bar, BYTES * 2)", "expect"),
    "nobody expects": ("wgmma", "_copy_tiles", "    mbarrier.expect(bar, BYTES)\n", "", "deadlock"),
    "an arrival too much": ("wgmma", "_copy_tiles", "expect(bar, BYTES)", "arrive(bar, count=2)", "arrivals"),
    "nobody frees buffers": ("specialized", "_consume", f"mbarrier.arrive(empty.index({_COUNT}))\n            count", "pass\n            count", "deadlock"),
    "the producer's phase": ("specialized", "_produce", "((count // STAGES) & 1) ^ 1)", "(count // STAGES) & 1)", "deadlock"),
    "three arrivals of two": ("specialized", "_matmul_specialized_kernel", "count=2)", "count=3)", "deadlock"),
    "freed too early": ("specialized", "_consume", f"            if i > 0:\n                mbarrier.arrive(empty.index({_COUNT}))", "            mbarrier.arrive(empty.index(slot))", "overwritten"),
    "the producer does not wait": ("specialized", "_produce", "            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)\n", "", "arrivals"),
    "a product too many": ("async", "_matmul_async_kernel", "warpgroup_mma_wait(1", "warpgroup_mma_wait(2", "overwritten"),
    "result not waited for": ("async", "_matmul_async_kernel", "    acc = warpgroup_mma_wait(0, deps=[acc])  # New:\n", "", "result too early"),
    "no conversion": ("layout", "_matmul_layout_kernel", "gl.convert_layout(a, LEFT)", "a", "layout"),
    "operands exchanged": ("layout", "_matmul_layout_kernel", "gl.convert_layout(a, LEFT)", "gl.convert_layout(a, RIGHT)", "layout"),
    "half of the warps": ("large", "_matmul_async_kernel", "[WARPS, 1]", "[4, 1]", "layout"),
    "another swizzle": ("tma", "_matmul_tma_kernel", "[2, BLOCK_M, BLOCK_K], a_desc.layout", "[2, BLOCK_M, BLOCK_K], gl.NVMMASharedLayout(64, 16)", "layout"),
    "pointers of another layout": ("layout", "_matmul_layout_kernel", "row, column, N, BLOCK_M, BLOCK_N, MMA)", "row, column, N, BLOCK_M, BLOCK_N, LOADS)", "layout"),
    "the end before the store": ("store", "_matmul_store_kernel", "    tma.store_wait(0)  # New:\n", "", "unfinished"),
    "a buffer that is not there": ("tma", "_matmul_tma_kernel", "[2, BLOCK_K, BLOCK_N]", "[1, BLOCK_K, BLOCK_N]", "out of range"),
}  # fmt: skip


def _planted(kernel: str, old: str, new: str) -> Any:
    source = TOOL.source_of_page()
    begin = source.index(f"def {kernel}(")
    assert old in source[begin:]
    return TOOL.module_of(
        source[:begin] + source[begin:].replace(old, new, 1), f"gluon_{abs(hash((kernel, old, new)))}"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    step, kernel, old, new, kind = FAULTS[fault]
    page = _planted(kernel, old, new)

    def run(seed: int) -> gluon.GluonError | None:
        try:
            with gluon.interpreted(seed):
                STEPS[step](page, **_inputs())
        except gluon.GluonError as error:
            return error
        return None

    found = [error for error in map(run, range(4)) if error is not None]
    # Where copies arrive at once, the next symptom of the same fault may come first.
    assert found and found[0].kind == kind, found
    assert str(found[0]).startswith(f"{kind}: ") and str(found[0]).endswith(f"({gluon.KINDS[kind]})")


def test_a_deadlock_says_who_waits_for_what() -> None:
    page = _planted("_matmul_specialized_kernel", "count=2)", "count=3)")
    with pytest.raises(gluon.GluonError) as raised, gluon.interpreted():
        page.specialized(**_inputs(), kernel=page._matmul_specialized_kernel)
    text = str(raised.value)
    assert "_produce (partition 2) waits in line" in text
    assert "for empty[0] to end phase 0, which still needs 1 of 3 arrivals and 0 bytes" in text
    assert "_consume (partition 0) waits" in text and "_consume (partition 1) waits" in text


def test_a_run_can_be_replayed() -> None:
    inputs = _inputs()
    c = torch.empty(256, 256, dtype=torch.float16)
    tile = (128, 64), (64, 128)
    given = [PAGE.descriptor(t, *shape) for t, shape in zip(inputs.values(), tile, strict=True)]
    runs = [
        gluon.interpret(PAGE._matmul_tma_kernel[(4,)], *given, c, 256, 256, 320, **PAGE.TILE, seed=s) for s in (0, 1)
    ]
    assert len(runs[0]) == 4 and runs[0][0] != runs[1][0]
    ends = [(event.what, event.phase) for event in runs[0][0] if event.kind == "ends"]
    assert ends == [("full[0]", 0), ("full[1]", 0), ("full[0]", 1), ("full[1]", 1), ("full[0]", 0)]


def test_what_is_not_interpreted_says_so() -> None:
    page = _planted("_matmul_layout_kernel", "gl.zeros([BLOCK_M", "gl.histogram([BLOCK_M")
    with pytest.raises(gluon.GluonError, match=r"not interpreted: gl.histogram"), gluon.interpreted():
        STEPS["layout"](page, **_inputs())


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_conflicts_and_places_are_those_that_triton_counts() -> None:
    builder = gluon_layouts._builder()
    ampere = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    tiles = [PAGE.ALONG, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]), ampere]
    tiles += [gl.DotOperandLayout(n, ampere, 2) for n in range(2)]
    for shape in ([128, 64], [64, 128]):
        nvmma = gl.NVMMASharedLayout.get_default_for(shape, gl.float16)
        for shared in (PAGE.PLAIN, PAGE.SWIZZLED, nvmma):
            counted = [
                builder.get_shared_bank_conflicts(tile._to_ir(builder), shared._to_ir(builder), shape, 16)
                for tile in tiles
            ]
            assert [gluon_layouts.bank_conflicts(tile, shared, shape) for tile in tiles] == counted
            bases = builder.to_linear_layout(shared._to_ir(builder), shape).offset_bases
            places = gluon_layouts._places(bases)
            found = gluon_layouts.offsets(shared, shape)
            assert [found[tuple(at)] for at in places] == list(range(len(places)))
    with pytest.raises(ValueError, match="offsets: shared must be a layout of rows"):
        gluon_layouts.offsets(gl.NVMMASharedLayout(128, 16, transposed=True), [64, 64])


def test_owners_are_those_of_a_blocked_layout() -> None:
    who = gluon_layouts.owners(PAGE.ALONG, (128, 64))
    for row, column in ((0, 0), (3, 17), (5, 63), (17, 8)):
        assert who.lane[row, column] == row % 4 * 8 + column // 8
        assert who.warp[row, column] == row // 4 % 4
        assert who.register[row, column] == row // 16 * 8 + column % 8
